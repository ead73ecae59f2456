//! Rows are pushed to the process of the worker that they are for, as soon as there is a batch of them, after Gonçalves et al.,
//! "A push-based asynchronous middleware for data shuffling" (2016).
//!
//! ```text
//!  process 0                                                          process 1
//!  Sender of worker 0 ─┐        ┌ network thread: reads, ◄─┐
//!    writes to the     ├► Link ─┤ notifications, room      ├─ one TCP ──► network thread ─┬► inbox of worker 2 ─► Receiver
//!    socket itself     │        └──────────────────────────┘  connection                  └► inbox of worker 3 ─► Receiver
//!  Sender of worker 1 ─┘◄──────────── "so many bytes of shuffle 7 have been read" ◄──────── Receivers, batched
//! ```
//!
//! Flow control is by credit, for each shuffle and pair of processes: a process announces how many bytes it takes without having
//! read them (the window), and tells when they are read. A sender whose rows find neither credit nor room in the outgoing buffer
//! sleeps; those for other processes and other shuffles go on. A frame that is larger than the window waits until all of
//! it is free, so a row of any size passes.
//!
//! A worker that sends must not be the only one to read what it is sent in the same shuffle: who sleeps for room waits for
//! readers. Stages that form no circle can't block each other.

mod exchange;
mod halves;
mod inbox;
mod incoming;
mod link;
mod meet;
mod node;
mod wire;

use std::net::TcpListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use arrow_schema::SchemaRef;

pub use halves::{Receiver, Sender};
pub use link::LinkStatus;

use crate::stream::Out;
use crate::{Cluster, Error, NodeId, PoolStatus, Result, Seat, WorkerId, deadline};
use link::{Frame, Link};
use node::Shared;
use wire::{Head, Kind};

/// Reads, and heads understood, from one process before the others have their turn.
const STEPS: usize = 64;

/// That a process takes part in at a time.
const SHUFFLES: usize = 4096;

/// Sizes and times.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Bytes of a shuffle that one process may have sent and this one has not read: the incoming buffer.
    pub window: usize,
    /// Bytes of a shuffle that wait to be sent to one process: the outgoing buffer. Also of what waits for a worker of this one.
    pub outgoing: usize,
    /// Bytes of received rows whose memory is kept for later ones.
    pub pool: usize,
    /// Rows that a [`Sender`] gathers for each worker before it takes them apart.
    pub batch_rows: usize,
    /// How long to wait for the others, when meeting and when leaving.
    pub patience: Duration,
}

impl Default for Config {
    /// Windows and outgoing buffers of 4 MiB, a pool of 64 MiB, batches of 8,192 rows, 30 seconds.
    fn default() -> Self {
        let patience = Duration::from_secs(30);
        Self { window: 4 << 20, outgoing: 4 << 20, pool: 64 << 20, batch_rows: 8192, patience }
    }
}

/// This process, as part of a cluster. Dropped without [`Node::leave`], it is gone for the others at once.
#[derive(Debug)]
pub struct Node {
    shared: Arc<Shared>,
    network: Option<JoinHandle<()>>,
    /// Nobody is accepted any more. But the library finds the other end of a connection by the port that it listens on, a few
    /// calls after it has been made.
    _seat: TcpListener,
}

impl Node {
    /// Meets all others of the cluster, in which this is process `me`: connects to those with higher numbers, and waits for
    /// the rest.
    ///
    /// # Errors
    ///
    /// [`Error::Join`] if somebody has not come in time; [`Error::Gone`] if somebody has been there, and is gone before all have
    /// met; settings that make no sense.
    pub fn join(seat: Seat, cluster: Cluster, me: NodeId, config: Config) -> Result<Self> {
        let listener = seat.of(&cluster, me)?;
        if config.window == 0 || i64::try_from(config.window).is_err() || config.batch_rows == 0 {
            return Err(Error::Cluster("a window or batches of nothing".into()));
        }
        meet::meet(listener, cluster, me, config)
    }

    /// The halves of shuffle `id` of each worker of this process. Every process has to take part in it, with the same schema.
    /// A number is used once.
    ///
    /// # Errors
    ///
    /// A number that has been used; types that can't be sent. That another process is gone is told by the halves.
    pub fn shuffle(&self, id: u64, schema: &SchemaRef) -> Result<Vec<(Sender, Receiver)>> {
        Out::new(schema)?;
        let exchange = self.shared.open(id)?;
        let mine = self.shared.cluster.workers_of(self.shared.me).map(WorkerId);
        Ok(mine.map(|worker| halves::of(&self.shared, &exchange, worker, schema)).collect())
    }

    pub fn cluster(&self) -> &Cluster {
        &self.shared.cluster
    }

    pub fn id(&self) -> NodeId {
        self.shared.me
    }

    /// What was sent to each other process, and what carries the connection, if the library is there.
    pub fn links(&self) -> Vec<(NodeId, LinkStatus, Option<thallus_api::Status>)> {
        let thallus = thallus_api::Thallus::find();
        let links = self.shared.links();
        links
            .map(|link| {
                let carried = thallus.and_then(|thallus| thallus.status(&link.stream).ok());
                (link.node, link.status(), carried)
            })
            .collect()
    }

    pub fn pool(&self) -> PoolStatus {
        self.shared.pool.status()
    }

    /// Waits until the shuffles that this process has opened are over, tells the others, and waits until they have left or are gone.
    /// False if one of both took longer than [`Config::patience`], or somebody broke the protocol.
    pub fn leave(mut self) -> bool {
        let deadline = deadline::after(self.shared.config.patience);
        let mut all = self.shared.wind_down(deadline);
        for link in self.shared.links() {
            all &= link.drained(deadline);
            link.notify(Frame::of(Head::new(Kind::Goodbye, 0, WorkerId(0))));
        }
        all &= self.shared.links().all(|link| link.drained(deadline));
        self.end_network();
        let in_order = |link: &Link| !matches!(link.ended(), None | Some(Error::Protocol { .. }));
        all &= self.shared.links().all(in_order);
        self.shared.shut();
        all
    }

    fn end_network(&mut self) {
        if let Some(network) = self.network.take() {
            // Fails only if it had been written 2⁶⁴ times.
            let _ = self.shared.stop.write(1);
            network.join().expect("the network thread does not panic");
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.network.is_some() {
            self.shared.shut();
            self.end_network();
        }
    }
}

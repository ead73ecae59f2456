//! Both designs and their twins behind one interface.

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::time::Duration;

use anyhow::{Context, Result};
use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use thallus_api::{Fabric, Status};
use thallus_shuffle::halves::{Inlet, Outlet};
use thallus_shuffle::{Cluster, NodeId, Partition, Seat, push, staged};

use crate::{Design, Options, twin};

pub(crate) trait Sender: Send {
    fn partition(&mut self, partition: &Partition) -> Result<()>;
    fn send(&mut self, batch: RecordBatch) -> Result<()>;
    fn finish(self: Box<Self>) -> Result<()>;
}

pub(crate) type Receiver = Box<dyn Iterator<Item = Result<RecordBatch>> + Send>;

/// Of one worker.
pub(crate) type Halves = (Box<dyn Sender>, Receiver);

/// A process of the experiment.
pub(crate) trait Process {
    /// The halves of this process' workers.
    fn shuffle(&mut self, id: u64, schema: &SchemaRef) -> Result<Vec<Halves>>;
    /// What carries the connections; empty without the library.
    fn carried(&self) -> Vec<Status>;
    /// The connections that it has made.
    fn connections(&self) -> usize;
    fn leave(self: Box<Self>) -> Result<()>;
}

/// Ends of connections by what carries them, and bytes.
#[derive(Clone, Debug, Default, serde::Deserialize, serde::Serialize)]
pub(crate) struct Carried {
    pub(crate) in_memory: u64,
    pub(crate) over_verbs: u64,
    pub(crate) on_tcp: u64,
    /// Why those are.
    pub(crate) reasons: Vec<String>,
    pub(crate) ring_bytes: u64,
    pub(crate) tcp_bytes: u64,
}

impl Carried {
    pub(crate) fn of(ends: &[Status]) -> Self {
        let mut sum = Self::default();
        for end in ends {
            match end.fabric {
                Fabric::SharedMemory => sum.in_memory += 1,
                Fabric::Verbs => sum.over_verbs += 1,
                _ => {
                    sum.on_tcp += 1;
                    sum.reasons.push(end.reason.clone());
                }
            }
            sum.ring_bytes += end.ring_bytes_sent;
            sum.tcp_bytes += end.tcp_bytes_sent;
        }
        sum
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.in_memory += other.in_memory;
        self.over_verbs += other.over_verbs;
        self.on_tcp += other.on_tcp;
        self.reasons.extend(other.reasons.iter().cloned());
        self.ring_bytes += other.ring_bytes;
        self.tcp_bytes += other.tcp_bytes;
    }
}

/// The workers of each process, as even as possible.
pub(crate) fn workers_of(options: &Options, process: usize) -> Range<usize> {
    let first = |process: usize| options.workers * process / options.processes;
    first(process)..first(process + 1)
}

/// Seats that listen: one, or one for each worker.
pub(crate) struct Seats(Vec<Seat>);

impl Seats {
    pub(crate) fn bind(design: Design, options: &Options, process: usize) -> Result<Self> {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let of_workers = design == Design::Push && options.no_share;
        let count = if of_workers { workers_of(options, process).len() } else { 1 };
        Ok(Self((0..count).map(|_| Seat::bind(any)).collect::<Result<_, _>>()?))
    }

    pub(crate) fn addresses(&self) -> Result<Vec<SocketAddr>> {
        Ok(self.0.iter().map(Seat::address).collect::<Result<_, _>>()?)
    }

    /// Meets the others, whose addresses are known now.
    pub(crate) fn join(
        self,
        design: Design,
        options: &Options,
        process: usize,
        addresses: &[Vec<SocketAddr>],
    ) -> Result<Box<dyn Process>> {
        let mut nodes = Vec::new();
        for (other, addresses) in addresses.iter().enumerate() {
            let each = workers_of(options, other).len() / addresses.len();
            nodes.extend(addresses.iter().map(|address| (*address, each)));
        }
        let cluster = Cluster::new(0x5eed, &nodes)?;
        let first = addresses[..process].iter().map(Vec::len).sum::<usize>();
        let seats = (u32::try_from(first)?..).map(NodeId).zip(self.0);
        let Options { window, chunk, batch_rows, .. } = *options;
        let patience = Duration::from_secs(options.patience);
        if design == Design::Push {
            let config =
                push::Config { window, outgoing: window, batch_rows, patience, ..push::Config::default() };
            let joining: Vec<_> = seats
                .map(|(me, seat)| {
                    let cluster = cluster.clone();
                    std::thread::spawn(move || push::Node::join(seat, cluster, me, config))
                })
                .collect();
            let nodes = joining.into_iter().map(|joining| joining.join().expect("it does not panic"));
            return Ok(Box::new(Push(nodes.collect::<Result<_, _>>()?)));
        }
        let (me, seat) = { seats }.next().context("no seat")?;
        Ok(match design {
            Design::Staged => {
                let share = !options.no_share;
                let config =
                    staged::Config { chunk, batch_rows, share, patience, ..staged::Config::default() };
                Box::new(staged::Node::join(seat, cluster, me, config)?)
            }
            Design::PushTwin => Box::new(twin::push::Mesh::join(seat.into(), cluster, me, batch_rows)?),
            _ => Box::new(twin::staged::Blocks::join(seat.into(), cluster, me, batch_rows)?),
        })
    }
}

impl<O: Outlet + Send> Sender for thallus_shuffle::Sender<O> {
    fn partition(&mut self, partition: &Partition) -> Result<()> {
        Ok(self.partition(partition)?)
    }

    fn send(&mut self, batch: RecordBatch) -> Result<()> {
        Ok(self.send(batch)?)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        Ok((*self).finish()?)
    }
}

/// Halves of a design.
fn boxed<O: Outlet + Send + 'static, I: Inlet + Send + 'static>(
    design: &'static str,
    halves: Vec<(thallus_shuffle::Sender<O>, thallus_shuffle::Receiver<I>)>,
) -> impl Iterator<Item = Halves> {
    halves.into_iter().map(move |(sender, receiver)| -> Halves {
        (Box::new(sender), Box::new(receiver.map(move |batch| batch.context(design))))
    })
}

struct Push(Vec<push::Node>);

impl Process for Push {
    fn shuffle(&mut self, id: u64, schema: &SchemaRef) -> Result<Vec<Halves>> {
        let mut halves = Vec::new();
        for node in &self.0 {
            halves.extend(boxed("push", node.shuffle(id, schema)?));
        }
        Ok(halves)
    }

    fn carried(&self) -> Vec<Status> {
        self.0.iter().flat_map(push::Node::links).filter_map(|(_, _, carried)| carried).collect()
    }

    fn connections(&self) -> usize {
        self.0.iter().map(|node| node.links().iter().filter(|(other, _, _)| *other > node.id()).count()).sum()
    }

    fn leave(self: Box<Self>) -> Result<()> {
        let leaving: Vec<_> = self.0.into_iter().map(|node| std::thread::spawn(|| node.leave())).collect();
        let all = leaving.into_iter().all(|leaving| leaving.join().expect("it does not panic"));
        anyhow::ensure!(all, "somebody did not leave in order");
        Ok(())
    }
}

impl Process for staged::Node {
    fn shuffle(&mut self, id: u64, schema: &SchemaRef) -> Result<Vec<Halves>> {
        Ok(boxed("staged", Self::shuffle(self, id, schema)?).collect())
    }

    fn carried(&self) -> Vec<Status> {
        let (made, accepted) = Self::carried(self);
        made.into_iter().chain(accepted).collect()
    }

    fn connections(&self) -> usize {
        usize::try_from(self.fetched().connections).expect("few")
    }

    fn leave(self: Box<Self>) -> Result<()> {
        anyhow::ensure!(Self::leave(*self), "somebody did not leave in order");
        Ok(())
    }
}

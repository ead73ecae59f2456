//! Rows stay where they were made until those who need them fetch them, after Lu et al., "Accelerating Spark with RDMA for big
//! data processing" (2014).
//!
//! ```text
//!  process 0                                             process 1
//!  Receiver of worker 0 ─┐                    ┌─► listener ─► receiver ═► handlers ═► responders ─┐
//!  Receiver of worker 1 ─┴► Client ─ requests ┘                                │                  │
//!                            ▲    one connection                          blocks of workers 2, 3  │
//!                            └────────── chunks of 512 KiB, of all requests in turn ◄─────────────┘
//! ```
//!
//! A worker's rows for another are a block, which can be fetched when the worker has finished; who asks before waits. Memory is not
//! bounded here: what has not been fetched is kept. What is under way is: a receiver asks for a few parts of blocks at a time.
//!
//! Connections are made when somebody asks, shared by all workers of a process, and closed when nobody has asked for a while.

mod client;
mod halves;
mod queue;
mod server;
mod store;
mod wire;

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use arrow_schema::SchemaRef;

pub use client::ClientStatus;
pub use halves::{Receiver, Sender};
pub use server::ServerStatus;

use crate::stream::Out;
use crate::{Cluster, Error, NodeId, PoolStatus, Result, Seat, WorkerId, deadline};
use client::Client;
use halves::Part;
use server::Server;

/// Sizes, numbers and times.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Bytes of a chunk.
    pub chunk: usize,
    /// Bytes that are asked for at once. A single message may be larger.
    pub fetch: usize,
    /// Requests of one receiver that are under way.
    pub ahead: usize,
    /// Threads that find blocks, and threads that send.
    pub handlers: usize,
    pub responders: usize,
    /// Length of the queue in front of each.
    pub queue: usize,
    /// Connections that are accepted at a time; never fewer than twice as many as the others of the cluster need.
    pub connections: usize,
    /// Whether the workers of a process share its connections.
    pub share: bool,
    /// After which an unused connection is closed.
    pub idle: Duration,
    /// Bytes of received rows whose memory is kept for later ones.
    pub pool: usize,
    /// Rows that a [`Sender`] gathers for each worker before it takes them apart.
    pub batch_rows: usize,
    /// How long to wait for a process that does not listen yet, or whose network or host is not there yet, and when leaving.
    pub patience: Duration,
}

impl Default for Config {
    /// Chunks of 512 KiB, 4 MiB at once and four times that ahead, two threads in each pool, queues of 64, 1,024 connections,
    /// shared and idle for 30 seconds, a pool of 64 MiB, batches of 8,192 rows, 30 seconds.
    fn default() -> Self {
        let (idle, patience) = (Duration::from_secs(30), Duration::from_secs(30));
        Self {
            chunk: 512 << 10,
            fetch: 4 << 20,
            ahead: 4,
            handlers: 2,
            responders: 2,
            queue: 64,
            connections: 1024,
            share: true,
            idle,
            pool: 64 << 20,
            batch_rows: 8192,
            patience,
        }
    }
}

/// This process, as part of a cluster. Dropped without [`Node::leave`], its blocks are gone at once.
#[derive(Debug)]
pub struct Node {
    cluster: Cluster,
    me: NodeId,
    config: Config,
    client: Arc<Client>,
    server: Arc<Server>,
    threads: Vec<JoinHandle<()>>,
}

impl Node {
    /// Serves blocks, as process `me` of the cluster. Nobody is waited for.
    ///
    /// # Errors
    ///
    /// Settings that make no sense; what the system refuses.
    pub fn join(seat: Seat, cluster: Cluster, me: NodeId, config: Config) -> Result<Self> {
        let listener = seat.of(&cluster, me)?;
        let numbers =
            [config.fetch, config.ahead, config.handlers, config.responders, config.queue, config.batch_rows];
        if numbers.contains(&0) || !(1..=1 << 30).contains(&config.chunk) {
            return Err(Error::Cluster("a size or a number of nothing, or too large".into()));
        }
        listener.set_nonblocking(true).map_err(Error::io("listen"))?;
        let server = Arc::new(Server::new(cluster.clone(), me, config).map_err(Error::io("server"))?);
        let client = Client::new(cluster.clone(), config, server.clone());
        let mut node = Self { cluster, me, config, client, server, threads: Vec::new() };
        node.start("listener", move |server| server.listen(&listener))?;
        node.start("receiver", Server::receive)?;
        (0..config.handlers).try_for_each(|_| node.start("handler", Server::handle))?;
        (0..config.responders).try_for_each(|_| node.start("responder", Server::respond))?;
        Ok(node)
    }

    /// The halves of shuffle `id` of each worker of this process. Every process has to take part in it, with the same schema.
    /// A number is used once.
    ///
    /// # Errors
    ///
    /// A number that has been used; types that can't be sent.
    pub fn shuffle(&self, id: u64, schema: &SchemaRef) -> Result<Vec<(Sender, Receiver)>> {
        Out::new(schema)?;
        let mine = self.cluster.workers_of(self.me).map(WorkerId);
        self.server.store.open(id, mine.len(), self.cluster.workers())?;
        let part = |worker| Part {
            cluster: self.cluster.clone(),
            me: self.me,
            config: self.config,
            server: self.server.clone(),
            shuffle: id,
            worker,
            schema: schema.clone(),
        };
        Ok(mine.map(|worker| part(worker).halves(self.client.clone())).collect())
    }

    pub fn id(&self) -> NodeId {
        self.me
    }

    pub fn served(&self) -> ServerStatus {
        self.server.status()
    }

    pub fn fetched(&self) -> ClientStatus {
        self.client.status()
    }

    pub fn pool(&self) -> PoolStatus {
        self.client.pool.status()
    }

    /// What carries the connections that are open now, if the library is there: those that were made, and those that were accepted.
    pub fn carried(&self) -> (Vec<thallus_api::Status>, Vec<thallus_api::Status>) {
        (self.client.carried(), self.server.carried())
    }

    /// Waits until the shuffles that this process has opened are over: its workers have what they need, and so has everybody
    /// who needs rows of theirs. False if that took longer than [`Config::patience`].
    pub fn leave(mut self) -> bool {
        let deadline = deadline::after(self.config.patience);
        // Before it waits: that rows are not wanted lets others end, who may have the same to say to this one.
        self.client.tell(deadline);
        let mut all = self.server.store.close(deadline);
        self.client.tell(deadline);
        self.client.shut();
        all &= self.server.see_off(deadline);
        self.stop();
        all
    }

    fn start(&mut self, name: &str, stage: impl FnOnce(&Server) + Send + 'static) -> Result<()> {
        let server = self.server.clone();
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || stage(&server));
        self.threads.push(thread.map_err(Error::io("thread"))?);
        Ok(())
    }

    fn stop(&mut self) {
        self.server.store.close(Instant::now());
        self.client.shut();
        self.server.shut();
        self.threads.drain(..).for_each(|thread| thread.join().expect("it does not panic"));
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_whose_host_is_gone_without_a_word_is_noticed() {
        let seat = Seat::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let address = seat.address().unwrap();
        let cluster = Cluster::new(1, &[(address, 1)]).unwrap();
        let node = Node::join(seat, cluster, NodeId(0), Config::default()).unwrap();
        let _client = std::net::TcpStream::connect(address).unwrap();
        while node.served().connections == 0 {
            thread::yield_now();
        }
        assert!(node.server.are_prepared());
    }
}

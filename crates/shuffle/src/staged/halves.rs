//! What a worker has of a shuffle: the blocks that it makes, and those that it fetches.

use std::collections::VecDeque;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;

use super::Config;
use super::client::{Client, Pending};
use super::server::Server;
use super::store::Rows;
use crate::stream::{self, Ins, Outs};
use crate::{Cluster, Error, Gather, NodeId, Result, WorkerId, halves};

/// Makes blocks. Never waits.
pub type Sender = halves::Sender<Outlet>;

/// Rows of blocks that are fetched.
pub type Receiver = halves::Receiver<Inlet>;

/// Who, and of what.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) cluster: Cluster,
    pub(super) me: NodeId,
    pub(super) config: Config,
    pub(super) server: Arc<Server>,
    pub(super) shuffle: u64,
    pub(super) worker: WorkerId,
    pub(super) schema: SchemaRef,
}

impl Part {
    pub(super) fn halves(self, client: Arc<Client>) -> (Sender, Receiver) {
        let workers = u32::try_from(self.cluster.workers()).expect("fewer than 65,536");
        let gather = Gather::new(self.schema.clone(), workers as usize, self.config.batch_rows);
        let blocks = (0..workers).map(|_| Rows::default()).collect();
        let outlet = Outlet { part: self.clone(), blocks, streams: Outs::new(self.schema.clone()) };
        // Each begins with another, so that not all ask the first at once.
        let sources = (0..workers).map(|n| WorkerId((self.worker.0 + n) % workers)).collect();
        let streams = Ins::new(self.schema.clone());
        let inlet = Inlet { part: self, client, sources, asked: VecDeque::new(), streams };
        (Sender::new(outlet, gather), Receiver::new(inlet))
    }

    fn is_here(&self, worker: WorkerId) -> bool {
        self.cluster.node_of(worker) == self.me
    }
}

/// The sending half: blocks in the making.
#[derive(Debug)]
pub struct Outlet {
    part: Part,
    /// By worker.
    blocks: Vec<Rows>,
    streams: Outs,
}

impl halves::Outlet for Outlet {
    fn worker(&self) -> WorkerId {
        self.part.worker
    }

    fn deliver(&mut self, target: WorkerId, batch: RecordBatch) -> Result<()> {
        let block = &mut self.blocks[target.index()];
        if self.part.is_here(target) {
            block.batches.push(stream::of_schema(&batch, &self.part.schema)?);
        } else {
            block.messages.extend(self.streams.frame(target, &batch)?);
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        Ok(())
    }

    /// Lets everybody fetch the blocks, or tells why there won't be any.
    fn gone(&mut self, gave_up: Option<String>) {
        let Part { server, shuffle, worker, .. } = &self.part;
        let targets = self.blocks.len();
        let blocks = (0..).map(WorkerId).zip(std::mem::take(&mut self.blocks));
        let outcome = match gave_up {
            None => Ok(blocks.map(|(target, rows)| (target, Arc::new(rows))).collect()),
            Some(why) => Err(Error::GaveUp { worker: *worker, why }),
        };
        server.answer_all(server.store.finish(*shuffle, *worker, targets, outcome));
        server.store.half_gone(*shuffle);
    }
}

#[derive(Clone, Debug)]
enum Fetch {
    Here,
    /// From this message of the block on.
    There(Arc<Pending>, u64),
}

/// The receiving half: requests for blocks.
#[derive(Debug)]
pub struct Inlet {
    part: Part,
    client: Arc<Client>,
    /// Workers that nobody has asked yet.
    sources: VecDeque<WorkerId>,
    asked: VecDeque<(WorkerId, Fetch)>,
    streams: Ins,
}

impl Inlet {
    fn ask(&self, source: WorkerId, first: u64) -> Result<Fetch> {
        let Part { shuffle, worker, config, .. } = &self.part;
        let pending = self.client.ask(*shuffle, source, *worker, first, config.fetch as u64)?;
        Ok(Fetch::There(pending, first))
    }
}

impl halves::Inlet for Inlet {
    fn worker(&self) -> WorkerId {
        self.part.worker
    }

    fn next(&mut self, ready: &mut VecDeque<RecordBatch>) -> Result<bool> {
        while self.asked.len() < self.part.config.ahead
            && let Some(&source) = self.sources.front()
        {
            let fetch = if self.part.is_here(source) { Fetch::Here } else { self.ask(source, 0)? };
            self.sources.pop_front();
            self.asked.push_back((source, fetch));
        }
        let Some((source, fetch)) = self.asked.front().cloned() else { return Ok(false) };
        match fetch {
            Fetch::Here => {
                let store = &self.part.server.store;
                let name = (self.part.shuffle, source, self.part.worker);
                ready.extend(store.wait(name)?.batches.iter().cloned());
                store.fetched(name);
            }
            Fetch::There(pending, first) => {
                let answer = pending.wait()?;
                if answer.next < answer.messages {
                    if answer.next <= first || answer.memory.is_empty() {
                        let node = self.part.cluster.node_of(source);
                        return Err(Error::Protocol { node, why: "a part of a block without a row".into() });
                    }
                    let next = self.ask(source, answer.next)?;
                    self.asked.push_back((source, next));
                }
                ready.extend(self.streams.frame(source, &answer.memory)?);
            }
        }
        self.asked.pop_front();
        Ok(true)
    }

    /// Blocks that have not been fetched are not wanted any more.
    fn close(&mut self, error: Option<&Error>) {
        let Part { server, shuffle, worker, .. } = &self.part;
        if let Some(error) = error {
            // Nobody will get rows of this process any more, which also tells those who would wait for them.
            server.answer_all(server.store.fail(*shuffle, error));
        }
        let asked = self.asked.drain(..).map(|(source, _)| source);
        for source in self.sources.drain(..).chain(asked) {
            if self.part.is_here(source) {
                server.store.fetched((*shuffle, source, *worker));
            } else {
                // Also to one that is gone: it may have been the connection alone.
                self.client.decline(*shuffle, source, *worker);
            }
        }
    }

    fn gone(&mut self) {
        self.part.server.store.half_gone(self.part.shuffle);
    }
}

//! What a worker has of a shuffle: where its rows go, and where those for it come from.

use std::collections::VecDeque;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;

use super::exchange::Exchange;
use super::inbox::{Inbox, Item};
use super::link::Frame;
use super::node::Shared;
use super::wire::{Head, Kind};
use crate::stream::{self, Ins, Outs};
use crate::{Error, Gather, NodeId, Result, WorkerId, halves};

/// Bytes of rows that go in one piece, however small the window: a frame of one row is some hundred bytes, and a way there and back.
const PIECE: usize = 4 << 10;

/// Pushes rows as they come. Sleeps while there is no room.
pub type Sender = halves::Sender<Outlet>;

/// Rows that have been pushed.
pub type Receiver = halves::Receiver<Inlet>;

/// Who, and of what.
#[derive(Clone, Debug)]
struct Part {
    shared: Arc<Shared>,
    exchange: Arc<Exchange>,
    worker: WorkerId,
}

/// The halves of one worker of this process.
pub(super) fn of(
    shared: &Arc<Shared>,
    exchange: &Arc<Exchange>,
    worker: WorkerId,
    schema: &SchemaRef,
) -> (Sender, Receiver) {
    let part = Part { shared: shared.clone(), exchange: exchange.clone(), worker };
    let gather = Gather::new(schema.clone(), shared.cluster.workers(), shared.config.batch_rows);
    let outlet = Outlet { part: part.clone(), schema: schema.clone(), streams: Outs::new(schema.clone()) };
    let inlet = Inlet { part, streams: Ins::new(schema.clone()), taken: VecDeque::new() };
    (Sender::new(outlet, gather), Receiver::new(inlet))
}

/// The sending half: links to other processes, and inboxes of this one.
#[derive(Debug)]
pub struct Outlet {
    part: Part,
    schema: SchemaRef,
    streams: Outs,
}

impl halves::Outlet for Outlet {
    fn worker(&self) -> WorkerId {
        self.part.worker
    }

    fn deliver(&mut self, target: WorkerId, batch: RecordBatch) -> Result<()> {
        let Part { shared, exchange, worker } = &self.part;
        let node = shared.cluster.node_of(target);
        let Some(link) = &shared.links[node.index()] else {
            let inbox = exchange.inbox(target).expect("a worker of this process");
            return inbox.add_batch(stream::of_schema(&batch, &self.schema)?);
        };
        // What is larger than a part of the window goes in pieces, so that reading and sending overlap.
        let most = (link.window() / 4).max(PIECE);
        let rows = batch.num_rows();
        let pieces = stream::bytes(&batch).div_ceil(most);
        let step = rows.div_ceil(pieces.clamp(1, rows.max(1))).max(1);
        for from in (0..rows).step_by(step) {
            let messages = self.streams.frame(target, &batch.slice(from, step.min(rows - from)))?;
            link.send(Frame::rows(exchange.id, *worker, target, messages), exchange)?;
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        let Part { shared, exchange, worker } = &self.part;
        for link in shared.links() {
            link.send(Frame::of(Head::new(Kind::End, exchange.id, *worker)), exchange)?;
        }
        exchange.source_ended(*worker).expect("it ends once");
        Ok(())
    }

    fn gone(&mut self, gave_up: Option<String>) {
        let Part { shared, exchange, worker } = &self.part;
        let why = gave_up.or_else(|| exchange.failed().map(|error| error.to_string()));
        shared.sender_gone(exchange, *worker, why.as_deref());
    }
}

/// The receiving half: an inbox.
#[derive(Debug)]
pub struct Inlet {
    part: Part,
    streams: Ins,
    /// Out of the inbox, and not read.
    taken: VecDeque<Item>,
}

impl Inlet {
    fn inbox(&self) -> &Inbox {
        self.part.exchange.inbox(self.part.worker).expect("a worker of this process")
    }

    fn read(&self, node: NodeId, bytes: usize, enough: usize) {
        let Part { shared, exchange, .. } = &self.part;
        let free = exchange.read(node, bytes as u64, enough as u64);
        shared.credit(exchange, node, free);
    }
}

impl halves::Inlet for Inlet {
    fn worker(&self) -> WorkerId {
        self.part.worker
    }

    fn next(&mut self, ready: &mut VecDeque<RecordBatch>) -> Result<bool> {
        let Part { shared, exchange, worker } = &self.part;
        match self.taken.pop_front() {
            Some(Item::Batch { batch, bytes }) => {
                self.inbox().read(bytes);
                ready.push_back(batch);
            }
            Some(Item::Frame { source, node, memory }) => {
                self.read(node, memory.len(), shared.config.window / 4);
                ready.extend(self.streams.frame(source, &memory)?);
            }
            None => {
                let inbox = exchange.inbox(*worker).expect("a worker of this process");
                return inbox.take(&mut self.taken, || shared.settle(exchange));
            }
        }
        Ok(true)
    }

    /// Rows that come later are dropped.
    fn close(&mut self, _: Option<&Error>) {
        let mut unread = std::mem::take(&mut self.taken);
        unread.extend(self.inbox().close());
        for item in unread {
            if let Item::Frame { node, memory, .. } = item {
                self.read(node, memory.len(), 1);
            }
        }
        self.part.shared.settle(&self.part.exchange);
    }

    fn gone(&mut self) {
        self.part.shared.receiver_gone(&self.part.exchange);
    }
}

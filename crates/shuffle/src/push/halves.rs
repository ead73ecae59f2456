//! What a worker has of a shuffle: the half that sends and the half that receives.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use arrow_select::concat::concat_batches;

use super::exchange::Exchange;
use super::inbox::{Inbox, Item};
use super::link::Frame;
use super::node::Shared;
use super::wire::{Head, Kind};
use crate::{Error, NodeId, Partition, Result, Scatter, WorkerId, stream};

/// Sends the rows of one worker. Dropped without [`Sender::finish`], it makes the shuffle fail for everybody.
#[derive(Debug)]
pub struct Sender {
    shared: Arc<Shared>,
    exchange: Arc<Exchange>,
    worker: WorkerId,
    schema: SchemaRef,
    /// By worker.
    streams: Vec<Option<stream::Out>>,
    gathered: Vec<RecordBatch>,
    gathered_rows: usize,
    scatter: Option<Scatter>,
    /// Why it ended early.
    why: Option<String>,
    finished: bool,
}

impl Sender {
    pub(super) fn new(
        shared: Arc<Shared>,
        exchange: Arc<Exchange>,
        worker: WorkerId,
        schema: SchemaRef,
    ) -> Self {
        let streams = (0..shared.cluster.workers()).map(|_| None).collect();
        let (gathered, gathered_rows, scatter, why, finished) = (Vec::new(), 0, None, None, false);
        Self { shared, exchange, worker, schema, streams, gathered, gathered_rows, scatter, why, finished }
    }

    pub fn worker(&self) -> WorkerId {
        self.worker
    }

    /// How [`Sender::send`] spreads rows from here on.
    ///
    /// # Errors
    ///
    /// Those of [`Scatter::new`], and of sending what has been gathered.
    pub fn partition(&mut self, partition: &Partition) -> Result<()> {
        self.flush()?;
        self.scatter = Some(Scatter::new(partition, &self.schema, self.streams.len())?);
        Ok(())
    }

    /// Spreads rows over all workers by [`Sender::partition`]. They are gathered first, so that each worker gets batches of some
    /// size. Sleeps while there is no room.
    ///
    /// # Errors
    ///
    /// A worker or a process is gone, or gave up; other columns; no partition.
    pub fn send(&mut self, batch: RecordBatch) -> Result<()> {
        if batch.schema().fields() != self.schema.fields() {
            return Err(self.failed(Error::Schema));
        }
        self.gathered_rows += batch.num_rows();
        if batch.num_rows() > 0 {
            self.gathered.push(batch);
        }
        if self.gathered_rows >= self.shared.config.batch_rows.saturating_mul(self.streams.len()) {
            return self.flush();
        }
        Ok(())
    }

    /// Sends what has been gathered.
    ///
    /// # Errors
    ///
    /// Those of [`Sender::send`].
    pub fn flush(&mut self) -> Result<()> {
        let gathered = std::mem::take(&mut self.gathered);
        self.gathered_rows = 0;
        let batch = match &gathered[..] {
            [] => return Ok(()),
            [batch] => batch.clone(),
            batches => match concat_batches(&self.schema, batches) {
                Ok(batch) => batch,
                Err(error) => return Err(self.failed(error.into())),
            },
        };
        let Some(scatter) = &mut self.scatter else {
            return Err(self.failed(Error::Partition("nobody has said how".into())));
        };
        let parts = scatter.split(&batch);
        drop((gathered, batch));
        let parts = match parts {
            Ok(parts) => parts,
            Err(error) => return Err(self.failed(error)),
        };
        for (target, part) in parts {
            self.send_to(WorkerId(u32::try_from(target).expect("a worker's number")), part)?;
        }
        Ok(())
    }

    /// Sends rows to one worker now. Sleeps while there is no room.
    ///
    /// # Errors
    ///
    /// Those of [`Sender::send`].
    ///
    /// # Panics
    ///
    /// If there is no such worker.
    pub fn send_to(&mut self, target: WorkerId, batch: RecordBatch) -> Result<()> {
        self.deliver(target, batch).map_err(|error| self.failed(error))
    }

    fn deliver(&mut self, target: WorkerId, batch: RecordBatch) -> Result<()> {
        let node = self.shared.cluster.node_of(target);
        let Some(link) = &self.shared.links[node.index()] else {
            let inbox = self.exchange.inbox(target).expect("a worker of this process");
            return inbox.add_batch(batch.with_schema(self.schema.clone())?);
        };
        // What is larger than a part of the window goes in pieces, so that reading and sending overlap.
        let most = (self.shared.config.window / 4).max(1);
        let rows = batch.num_rows();
        let pieces = stream::bytes(&batch).div_ceil(most);
        let step = rows.div_ceil(pieces.clamp(1, rows.max(1))).max(1);
        for from in (0..rows).step_by(step) {
            let piece = batch.slice(from, step.min(rows - from));
            let out = match &mut self.streams[target.index()] {
                Some(out) => out,
                none => none.insert(stream::Out::new(&self.schema)?),
            };
            let messages = out.frame(&piece)?;
            link.send(
                Frame::rows(self.shared.me, self.exchange.id, self.worker, target, messages)?,
                &self.exchange,
            )?;
        }
        Ok(())
    }

    /// Sends what has been gathered, and that there is nothing more.
    ///
    /// # Errors
    ///
    /// Those of [`Sender::send`].
    pub fn finish(mut self) -> Result<()> {
        self.flush()?;
        let shared = self.shared.clone();
        for link in shared.links() {
            let end = Frame::of(Head::new(Kind::End, self.exchange.id, self.worker));
            if let Err(error) = link.send(end, &self.exchange) {
                return Err(self.failed(error));
            }
        }
        self.exchange.source_ended(self.worker).expect("it ends once");
        self.finished = true;
        Ok(())
    }

    /// Ends the shuffle for everybody, and says why.
    pub fn give_up(mut self, why: &str) {
        self.why = Some(why.to_owned());
    }

    fn failed(&mut self, error: Error) -> Error {
        self.why.get_or_insert_with(|| error.to_string());
        error
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let why = self.why.take().or_else(|| self.exchange.failed().map(|error| error.to_string()));
        let why = match why {
            None if self.finished => None,
            None => Some("it stopped before its end".to_owned()),
            some => some,
        };
        self.shared.sender_gone(&self.exchange, self.worker, why.as_deref());
    }
}

/// The rows for one worker, in no particular order but that of each sender. After an error, or the end, there are no more.
#[derive(Debug)]
pub struct Receiver {
    shared: Arc<Shared>,
    exchange: Arc<Exchange>,
    worker: WorkerId,
    schema: SchemaRef,
    streams: HashMap<WorkerId, stream::In>,
    taken: VecDeque<Item>,
    ready: VecDeque<RecordBatch>,
    over: bool,
}

impl Receiver {
    pub(super) fn new(
        shared: Arc<Shared>,
        exchange: Arc<Exchange>,
        worker: WorkerId,
        schema: SchemaRef,
    ) -> Self {
        let (streams, taken, ready) = (HashMap::new(), VecDeque::new(), VecDeque::new());
        Self { shared, exchange, worker, schema, streams, taken, ready, over: false }
    }

    pub fn worker(&self) -> WorkerId {
        self.worker
    }

    fn inbox(&self) -> &Inbox {
        self.exchange.inbox(self.worker).expect("a worker of this process")
    }

    fn advance(&mut self) -> Result<Option<RecordBatch>> {
        loop {
            if let Some(batch) = self.ready.pop_front() {
                return Ok(Some(batch));
            }
            match self.taken.pop_front() {
                Some(Item::Batch { batch, bytes }) => {
                    self.inbox().read(bytes);
                    return Ok(Some(batch));
                }
                Some(Item::Frame { source, node, memory }) => {
                    self.read(node, memory.len(), self.shared.config.window / 4);
                    let schema = &self.schema;
                    let stream =
                        self.streams.entry(source).or_insert_with(|| stream::In::new(schema.clone()));
                    self.ready.extend(stream.frame(&memory)?);
                }
                None => {
                    let inbox = self.exchange.inbox(self.worker).expect("a worker of this process");
                    if !inbox.take(&mut self.taken, || self.shared.settle(&self.exchange))? {
                        return Ok(None);
                    }
                }
            }
        }
    }

    fn read(&self, node: NodeId, bytes: usize, enough: usize) {
        let free = self.exchange.read(node, bytes as u64, enough as u64);
        self.shared.credit(&self.exchange, node, free);
    }
}

impl Iterator for Receiver {
    type Item = Result<RecordBatch>;

    /// Sleeps until there are rows, or an end.
    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let next = self.advance().transpose();
        self.over = !matches!(next, Some(Ok(_)));
        next
    }
}

impl Drop for Receiver {
    /// Rows that come later are dropped.
    fn drop(&mut self) {
        let mut taken = std::mem::take(&mut self.taken);
        taken.extend(self.inbox().close());
        for item in taken {
            if let Item::Frame { node, memory, .. } = item {
                self.read(node, memory.len(), 1);
            }
        }
        self.shared.settle(&self.exchange);
        self.shared.receiver_gone(&self.exchange);
    }
}

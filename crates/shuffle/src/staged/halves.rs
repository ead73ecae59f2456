//! What a worker has of a shuffle: the half that makes blocks and the half that fetches them.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use arrow_select::concat::concat_batches;

use super::Config;
use super::client::{Client, Pending};
use super::server::Server;
use super::store::Rows;
use crate::{Cluster, Error, NodeId, Partition, Result, Scatter, WorkerId, stream};

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

/// Makes one worker's blocks. Dropped without [`Sender::finish`], it makes the shuffle fail for everybody who needs them.
#[derive(Debug)]
pub struct Sender {
    part: Part,
    /// By worker.
    blocks: Vec<Rows>,
    streams: Vec<Option<stream::Out>>,
    gathered: Vec<RecordBatch>,
    gathered_rows: usize,
    scatter: Option<Scatter>,
    why: Option<String>,
    finished: bool,
}

impl Sender {
    pub(super) fn new(part: Part) -> Self {
        let workers = part.cluster.workers();
        let blocks = (0..workers).map(|_| Rows::default()).collect();
        let streams = (0..workers).map(|_| None).collect();
        let (gathered, gathered_rows, scatter, why, finished) = (Vec::new(), 0, None, None, false);
        Self { part, blocks, streams, gathered, gathered_rows, scatter, why, finished }
    }

    pub fn worker(&self) -> WorkerId {
        self.part.worker
    }

    /// How [`Sender::send`] spreads rows from here on.
    ///
    /// # Errors
    ///
    /// Those of [`Scatter::new`].
    pub fn partition(&mut self, partition: &Partition) -> Result<()> {
        self.flush()?;
        self.scatter = Some(Scatter::new(partition, &self.part.schema, self.blocks.len())?);
        Ok(())
    }

    /// Spreads rows over all workers by [`Sender::partition`]. Never waits.
    ///
    /// # Errors
    ///
    /// Other columns; no partition.
    pub fn send(&mut self, batch: RecordBatch) -> Result<()> {
        if batch.schema().fields() != self.part.schema.fields() {
            return Err(self.failed(Error::Schema));
        }
        self.gathered_rows += batch.num_rows();
        if batch.num_rows() > 0 {
            self.gathered.push(batch);
        }
        if self.gathered_rows >= self.part.config.batch_rows.saturating_mul(self.blocks.len()) {
            return self.flush();
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let gathered = std::mem::take(&mut self.gathered);
        self.gathered_rows = 0;
        let batch = match &gathered[..] {
            [] => return Ok(()),
            [batch] => batch.clone(),
            batches => match concat_batches(&self.part.schema, batches) {
                Ok(batch) => batch,
                Err(error) => return Err(self.failed(error.into())),
            },
        };
        let Some(scatter) = &mut self.scatter else {
            return Err(self.failed(Error::Partition("nobody has said how".into())));
        };
        match scatter.split(&batch) {
            Ok(parts) => parts.into_iter().try_for_each(|(target, part)| {
                self.send_to(WorkerId(u32::try_from(target).expect("a worker's number")), part)
            }),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Adds rows to the block of one worker.
    ///
    /// # Errors
    ///
    /// Other columns.
    ///
    /// # Panics
    ///
    /// If there is no such worker.
    pub fn send_to(&mut self, target: WorkerId, batch: RecordBatch) -> Result<()> {
        self.add(target, batch).map_err(|error| self.failed(error))
    }

    fn add(&mut self, target: WorkerId, batch: RecordBatch) -> Result<()> {
        let block = &mut self.blocks[target.index()];
        if self.part.cluster.node_of(target) == self.part.me {
            block.batches.push(batch.with_schema(self.part.schema.clone())?);
            return Ok(());
        }
        let out = match &mut self.streams[target.index()] {
            Some(out) => out,
            none => none.insert(stream::Out::new(&self.part.schema)?),
        };
        block.messages.extend(out.frame(&batch)?);
        Ok(())
    }

    /// Lets everybody fetch the blocks.
    ///
    /// # Errors
    ///
    /// Those of [`Sender::send`].
    pub fn finish(mut self) -> Result<()> {
        self.flush()?;
        self.finished = true;
        Ok(())
    }

    /// Ends the shuffle for everybody who needs the blocks, and says why.
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
        let Part { server, shuffle, worker, .. } = &self.part;
        let blocks = match self.why.take() {
            None if self.finished => {
                let blocks = (0..).map(WorkerId).zip(std::mem::take(&mut self.blocks));
                Ok(blocks.map(|(target, rows)| (target, Arc::new(rows))).collect())
            }
            why => {
                let why = why.unwrap_or_else(|| "it stopped before its end".into());
                Err(Error::GaveUp { worker: *worker, why })
            }
        };
        server.answer_all(server.store.finish(*shuffle, *worker, self.part.cluster.workers(), blocks));
        server.store.half_gone(*shuffle);
    }
}

#[derive(Debug)]
enum Fetch {
    Here,
    There(Arc<Pending>),
}

/// Fetches the rows for one worker, in no particular order but that of each sender. After an error, or the end, there are no more.
#[derive(Debug)]
pub struct Receiver {
    part: Part,
    client: Arc<Client>,
    /// Workers that nobody has asked yet.
    sources: VecDeque<WorkerId>,
    asked: VecDeque<(WorkerId, Fetch)>,
    streams: HashMap<WorkerId, stream::In>,
    ready: VecDeque<RecordBatch>,
    over: bool,
}

impl Receiver {
    pub(super) fn new(part: Part, client: Arc<Client>) -> Self {
        // Each begins with another, so that not all ask the first at once.
        let workers = u32::try_from(part.cluster.workers()).expect("fewer than 65,536");
        let sources = (0..workers).map(|n| WorkerId((part.worker.0 + n) % workers)).collect();
        let (asked, streams, ready) = (VecDeque::new(), HashMap::new(), VecDeque::new());
        Self { part, client, sources, asked, streams, ready, over: false }
    }

    pub fn worker(&self) -> WorkerId {
        self.part.worker
    }

    fn advance(&mut self) -> Result<Option<RecordBatch>> {
        loop {
            if let Some(batch) = self.ready.pop_front() {
                return Ok(Some(batch));
            }
            while self.asked.len() < self.part.config.ahead
                && let Some(source) = self.sources.pop_front()
            {
                let fetch = match self.part.cluster.node_of(source) == self.part.me {
                    true => Fetch::Here,
                    false => Fetch::There(self.ask(source, 0)?),
                };
                self.asked.push_back((source, fetch));
            }
            let Some((source, fetch)) = self.asked.pop_front() else { return Ok(None) };
            match fetch {
                Fetch::Here => {
                    let name = (self.part.shuffle, source, self.part.worker);
                    let block = self.part.server.store.wait(name)?;
                    self.ready.extend(block.batches.iter().cloned());
                    self.part.server.store.fetched(name);
                }
                Fetch::There(pending) => {
                    let answer = pending.wait()?;
                    if answer.next < answer.messages {
                        let next = Fetch::There(self.ask(source, answer.next)?);
                        self.asked.push_back((source, next));
                    }
                    let schema = &self.part.schema;
                    let stream =
                        self.streams.entry(source).or_insert_with(|| stream::In::new(schema.clone()));
                    self.ready.extend(stream.frame(&answer.memory)?);
                }
            }
        }
    }

    fn ask(&self, source: WorkerId, first: u64) -> Result<Arc<Pending>> {
        self.client.ask(self.part.shuffle, source, self.part.worker, first, self.part.config.fetch as u64)
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
        if let Some(Err(error)) = &next {
            // Nobody will get rows of this process any more, which also tells those who would wait for them.
            let server = &self.part.server;
            server.answer_all(server.store.fail(self.part.shuffle, error));
        }
        self.over = !matches!(next, Some(Ok(_)));
        next
    }
}

impl Drop for Receiver {
    /// Blocks that have not been fetched are not wanted any more.
    fn drop(&mut self) {
        if !self.over {
            let asked = self.asked.drain(..).map(|(source, _)| source);
            for source in self.sources.drain(..).chain(asked) {
                if self.part.cluster.node_of(source) == self.part.me {
                    self.part.server.store.fetched((self.part.shuffle, source, self.part.worker));
                } else {
                    // One that is gone wants to hear nothing.
                    let _ = self.client.ask(self.part.shuffle, source, self.part.worker, 0, 0);
                }
            }
        }
        self.part.server.store.half_gone(self.part.shuffle);
    }
}

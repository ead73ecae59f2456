//! The twin of push: two connections for each pair of workers, one for each shuffle of the experiment. A thread reads each; TCP's
//! own windows are the flow control.

use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver as Inbox, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, anyhow, bail};
use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_schema::SchemaRef;
use thallus_api::Status;
use thallus_shuffle::stream::{Ins, Outs};
use thallus_shuffle::{Cluster, Gather, NodeId, WorkerId};

use super::{Plain, carried, read_message, read_u64, serialize, write_numbers};
use crate::design::{Halves, Process};

/// Messages that wait for a worker.
const INBOX: usize = 64;

enum Item {
    Message(u32, Vec<u8>),
    Batch(RecordBatch),
    End,
    Failed(String),
}

/// Which shuffle of the two, a worker of this process, and one of another.
type Key = (u64, u32, u32);

pub(crate) struct Mesh {
    cluster: Cluster,
    me: NodeId,
    batch_rows: usize,
    streams: HashMap<Key, Arc<TcpStream>>,
    inboxes: HashMap<(u64, u32), SyncSender<Item>>,
    outlets: HashMap<(u64, u32), Arc<std::sync::Mutex<Inbox<Item>>>>,
    readers: Vec<JoinHandle<()>>,
    made: usize,
    /// The library finds the other end by it.
    _listener: TcpListener,
}

impl Mesh {
    pub(crate) fn join(
        listener: TcpListener,
        cluster: Cluster,
        me: NodeId,
        batch_rows: usize,
    ) -> Result<Self> {
        let mine = cluster.workers_of(me);
        let mut streams = HashMap::new();
        let mut made = 0;
        for (a, b) in mine.clone().flat_map(|a| (mine.end..cluster.workers() as u32).map(move |b| (a, b))) {
            for shuffle in 0..2 {
                let stream = TcpStream::connect(cluster.address(cluster.node_of(WorkerId(b))))?;
                write_numbers(&stream, &[shuffle, u64::from(a), u64::from(b)])?;
                streams.insert((shuffle, b, a), stream);
                made += 1;
            }
        }
        let mut streams: HashMap<Key, TcpStream> =
            streams.into_iter().map(|((s, b, a), stream)| ((s, a, b), stream)).collect();
        for _ in 0..2 * mine.start as usize * mine.len() {
            let (stream, _) = listener.accept()?;
            let (shuffle, a, b) = (read_u64(&stream)?, read_u64(&stream)?, read_u64(&stream)?);
            streams.insert((shuffle, u32::try_from(b)?, u32::try_from(a)?), stream);
        }
        let mut mesh = Self {
            cluster,
            me,
            batch_rows,
            streams: HashMap::new(),
            inboxes: HashMap::new(),
            outlets: HashMap::new(),
            readers: Vec::new(),
            made,
            _listener: listener,
        };
        for key in mine.flat_map(|worker| (0..2).map(move |shuffle| (shuffle, worker))) {
            let (inbox, outlet) = sync_channel(INBOX);
            mesh.inboxes.insert(key, inbox);
            mesh.outlets.insert(key, Arc::new(outlet.into()));
        }
        for ((shuffle, here, there), stream) in streams {
            stream.set_nodelay(true)?;
            let stream = Arc::new(stream);
            let inbox = mesh.inboxes[&(shuffle, here)].clone();
            let reading = stream.clone();
            mesh.readers.push(thread::spawn(move || read(&reading, there, &inbox)));
            mesh.streams.insert((shuffle, here, there), stream);
        }
        Ok(mesh)
    }
}

fn read(stream: &TcpStream, source: u32, inbox: &SyncSender<Item>) {
    loop {
        let item = match read_message(stream) {
            Ok(message) if message.is_empty() => Item::End,
            Ok(message) => Item::Message(source, message),
            Err(error) => {
                // Nobody may be there any more, which is the orderly end.
                let _ = inbox.try_send(Item::Failed(format!("worker {source}: {error}")));
                return;
            }
        };
        if inbox.send(item).is_err() {
            return;
        }
    }
}

impl Process for Mesh {
    fn shuffle(&mut self, id: u64, schema: &SchemaRef) -> Result<Vec<Halves>> {
        let (shuffle, workers) = (id % 2, self.cluster.workers());
        let halves = self.cluster.workers_of(self.me).map(|worker| -> Halves {
            let target = |other| match self.streams.get(&(shuffle, worker, other)) {
                Some(stream) => Target::There(stream.clone()),
                None => Target::Here(self.inboxes[&(shuffle, other)].clone()),
            };
            let targets = (0..).take(workers).map(target).collect();
            let target = Targets { targets, streams: Outs::new(schema.clone()), message: Vec::new() };
            let gather = Gather::new(schema.clone(), workers, self.batch_rows);
            let arriving = Arriving {
                outlet: self.outlets[&(shuffle, worker)].clone(),
                streams: Ins::new(schema.clone()),
                ready: VecDeque::new(),
                open: workers,
            };
            (Box::new(Plain { gather, target }), Box::new(arriving))
        });
        Ok(halves.collect())
    }

    fn carried(&self) -> Vec<Status> {
        carried(self.streams.values().map(|stream| &**stream))
    }

    fn connections(&self) -> usize {
        self.made
    }

    fn leave(self: Box<Self>) -> Result<()> {
        // All ends of rows have been read: what follows can only be the end of the stream.
        for stream in self.streams.values() {
            let _ = stream.shutdown(Shutdown::Write); // the other may be faster
        }
        for reader in self.readers {
            reader.join().map_err(|_| anyhow!("a reader panicked"))?;
        }
        Ok(())
    }
}

enum Target {
    Here(SyncSender<Item>),
    There(Arc<TcpStream>),
}

struct Targets {
    /// By worker.
    targets: Vec<Target>,
    streams: Outs,
    message: Vec<u8>,
}

impl super::Target for Targets {
    fn deliver(&mut self, target: WorkerId, batch: RecordBatch) -> Result<()> {
        match &self.targets[target.0 as usize] {
            Target::Here(inbox) => inbox.send(Item::Batch(batch)).ok().context("nobody reads"),
            Target::There(stream) => {
                self.message.clear();
                self.message.extend([0; 8]);
                serialize(&mut self.streams, target, &batch, &mut self.message)?;
                let length = self.message.len() as u64 - 8;
                self.message[..8].copy_from_slice(&length.to_le_bytes());
                Ok((&**stream).write_all(&self.message)?)
            }
        }
    }

    fn finish(&mut self) -> Result<()> {
        self.targets.iter().try_for_each(|target| match target {
            Target::Here(inbox) => inbox.send(Item::End).ok().context("nobody reads"),
            Target::There(stream) => Ok(write_numbers(stream, &[0])?),
        })
    }
}

struct Arriving {
    outlet: Arc<std::sync::Mutex<Inbox<Item>>>,
    streams: Ins,
    ready: VecDeque<RecordBatch>,
    open: usize,
}

impl Arriving {
    fn advance(&mut self) -> Result<Option<RecordBatch>> {
        loop {
            if let Some(batch) = self.ready.pop_front() {
                return Ok(Some(batch));
            }
            if self.open == 0 {
                return Ok(None);
            }
            let item = self.outlet.lock().expect("nobody panics with it").recv();
            match item? {
                Item::Batch(batch) => return Ok(Some(batch)),
                Item::End => self.open -= 1,
                Item::Failed(why) => bail!(why),
                Item::Message(source, message) => {
                    self.ready.extend(self.streams.frame(WorkerId(source), &Buffer::from(message))?);
                }
            }
        }
    }
}

impl Iterator for Arriving {
    type Item = Result<RecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        self.advance().transpose()
    }
}

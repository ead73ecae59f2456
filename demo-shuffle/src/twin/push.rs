//! The twin of push: two connections for each pair of workers, one for each shuffle of the experiment. A thread reads each; TCP's
//! own windows are the flow control.

use std::collections::HashMap;
use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver as Inbox, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, anyhow, bail};
use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_schema::SchemaRef;
use thallus_api::{Status, Thallus};
use thallus_shuffle::stream::{In, Out};
use thallus_shuffle::{Cluster, NodeId, Partition, WorkerId};

use super::{Gather, read_message, read_u64, serialize, write_numbers};
use crate::design::{Process, Receiver, Sender};

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
    fn shuffle(&mut self, id: u64, schema: &SchemaRef) -> Result<Vec<(Box<dyn Sender>, Receiver)>> {
        let (shuffle, workers) = (id % 2, self.cluster.workers());
        let halves = self.cluster.workers_of(self.me).map(|worker| -> (Box<dyn Sender>, Receiver) {
            let targets =
                (0..).take(workers).map(|other| match self.streams.get(&(shuffle, worker, other)) {
                    Some(stream) => Target::There(stream.clone(), None),
                    None => Target::Here(self.inboxes[&(shuffle, other)].clone()),
                });
            let gather = Gather::new(schema.clone(), workers, self.batch_rows);
            let sender =
                Plain { schema: schema.clone(), gather, targets: targets.collect(), message: Vec::new() };
            let outlet = self.outlets[&(shuffle, worker)].clone();
            let arriving = Arriving {
                outlet,
                schema: schema.clone(),
                streams: HashMap::new(),
                ready: Vec::new(),
                open: workers,
            };
            (Box::new(sender), Box::new(arriving))
        });
        Ok(halves.collect())
    }

    fn carried(&self) -> Vec<Status> {
        let Some(thallus) = Thallus::find() else { return Vec::new() };
        self.streams.values().filter_map(|stream| thallus.status(stream).ok()).collect()
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
    There(Arc<TcpStream>, Option<Out>),
}

struct Plain {
    schema: SchemaRef,
    gather: Gather,
    targets: Vec<Target>,
    message: Vec<u8>,
}

impl Plain {
    fn parts(&mut self, parts: Vec<(usize, RecordBatch)>) -> Result<()> {
        for (target, part) in parts {
            match &mut self.targets[target] {
                Target::Here(inbox) => inbox.send(Item::Batch(part)).ok().context("nobody reads")?,
                Target::There(stream, out) => {
                    let out = match out {
                        Some(out) => out,
                        none => none.insert(Out::new(&self.schema)?),
                    };
                    self.message.clear();
                    self.message.extend([0; 8]);
                    serialize(out, &part, &mut self.message)?;
                    let length = self.message.len() as u64 - 8;
                    self.message[..8].copy_from_slice(&length.to_le_bytes());
                    (&**stream).write_all(&self.message)?;
                }
            }
        }
        Ok(())
    }
}

impl Sender for Plain {
    fn partition(&mut self, partition: &Partition) -> Result<()> {
        self.gather.partition(partition)
    }

    fn send(&mut self, batch: RecordBatch) -> Result<()> {
        let parts = self.gather.add(batch)?;
        self.parts(parts)
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        let parts = self.gather.rest()?;
        self.parts(parts)?;
        for target in &self.targets {
            match target {
                Target::Here(inbox) => inbox.send(Item::End).ok().context("nobody reads")?,
                Target::There(stream, _) => write_numbers(stream, &[0])?,
            }
        }
        Ok(())
    }
}

struct Arriving {
    outlet: Arc<std::sync::Mutex<Inbox<Item>>>,
    schema: SchemaRef,
    streams: HashMap<u32, In>,
    ready: Vec<RecordBatch>,
    open: usize,
}

impl Arriving {
    fn advance(&mut self) -> Result<Option<RecordBatch>> {
        loop {
            if let Some(batch) = self.ready.pop() {
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
                    let stream = self.streams.entry(source).or_insert_with(|| In::new(self.schema.clone()));
                    self.ready = stream.frame(&Buffer::from(message))?;
                    self.ready.reverse();
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

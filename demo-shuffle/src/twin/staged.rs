//! The twin of the staged design: each pair of workers has a connection, on which a worker asks for a block and gets it as a whole,
//! serialized. A thread serves each connection.

use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};

use anyhow::{Result, anyhow};
use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_schema::SchemaRef;
use thallus_api::{Status, Thallus};
use thallus_shuffle::stream::{In, Out};
use thallus_shuffle::{Cluster, NodeId, Partition, WorkerId};

use super::{Gather, read_message, read_u64, serialize, write_numbers};
use crate::design::{Process, Receiver, Sender};

/// Shuffle, source, target.
type Name = (u64, u32, u32);

#[derive(Default)]
struct Store {
    blocks: Mutex<HashMap<Name, Rows>>,
    news: Condvar,
}

/// For another process, and for this one.
#[derive(Default)]
struct Rows {
    serialized: Vec<u8>,
    batches: Vec<RecordBatch>,
}

impl Store {
    fn put(&self, blocks: impl Iterator<Item = (Name, Rows)>) {
        self.blocks.lock().expect("nobody panics with it").extend(blocks);
        self.news.notify_all();
    }

    fn take(&self, name: Name) -> Rows {
        let mut blocks = self.blocks.lock().expect("nobody panics with it");
        loop {
            if let Some(rows) = blocks.remove(&name) {
                return rows;
            }
            blocks = self.news.wait(blocks).expect("nobody panics with it");
        }
    }
}

type Connections = Arc<Mutex<HashMap<(u32, u32), Arc<TcpStream>>>>;

/// A connection, and who serves it.
type Accepted = (Arc<TcpStream>, JoinHandle<()>);

pub(crate) struct Blocks {
    cluster: Cluster,
    me: NodeId,
    batch_rows: usize,
    store: Arc<Store>,
    /// By worker of this process and worker of another.
    asking: Connections,
    accepted: Arc<Mutex<Vec<Accepted>>>,
    leaving: Arc<AtomicBool>,
    accepting: JoinHandle<()>,
    address: std::net::SocketAddr,
}

impl Blocks {
    pub(crate) fn join(
        listener: TcpListener,
        cluster: Cluster,
        me: NodeId,
        batch_rows: usize,
    ) -> Result<Self> {
        let (store, accepted) = (Arc::<Store>::default(), Arc::<Mutex<Vec<_>>>::default());
        let leaving = Arc::new(AtomicBool::new(false));
        let address = listener.local_addr()?;
        let accepting = {
            let (store, accepted, leaving) = (store.clone(), accepted.clone(), leaving.clone());
            thread::spawn(move || {
                for stream in listener.incoming() {
                    if leaving.load(Ordering::SeqCst) {
                        return;
                    }
                    let Ok(stream) = stream else { continue };
                    let stream = Arc::new(stream);
                    let serving = (stream.clone(), store.clone());
                    let serving = thread::spawn(move || serve(&serving.0, &serving.1));
                    accepted.lock().expect("nobody panics with it").push((stream, serving));
                }
            })
        };
        Ok(Self {
            cluster,
            me,
            batch_rows,
            store,
            asking: Connections::default(),
            accepted,
            leaving,
            accepting,
            address,
        })
    }
}

/// Until the client has enough.
fn serve(stream: &TcpStream, store: &Store) {
    let _ = stream.set_nodelay(true); // slower without
    let answer = || -> Result<()> {
        let (shuffle, source, target) = (read_u64(stream)?, read_u64(stream)?, read_u64(stream)?);
        let rows = store.take((shuffle, u32::try_from(source)?, u32::try_from(target)?));
        write_numbers(stream, &[rows.serialized.len() as u64])?;
        let mut stream = stream;
        Ok(stream.write_all(&rows.serialized)?)
    };
    while answer().is_ok() {}
    let _ = stream.shutdown(Shutdown::Both); // it is at its end
}

impl Process for Blocks {
    fn shuffle(&mut self, id: u64, schema: &SchemaRef) -> Result<Vec<(Box<dyn Sender>, Receiver)>> {
        let workers = u32::try_from(self.cluster.workers())?;
        let halves = self.cluster.workers_of(self.me).map(|worker| -> (Box<dyn Sender>, Receiver) {
            let here = (0..workers).map(|target| self.cluster.node_of(WorkerId(target)) == self.me);
            let targets = here.map(|here| Target { here, out: None, rows: Rows::default() }).collect();
            let gather = Gather::new(schema.clone(), workers as usize, self.batch_rows);
            let store = self.store.clone();
            let sender = Plain { schema: schema.clone(), gather, store, shuffle: id, worker, targets };
            let fetching = Fetching {
                cluster: self.cluster.clone(),
                me: self.me,
                store: self.store.clone(),
                asking: self.asking.clone(),
                shuffle: id,
                worker,
                schema: schema.clone(),
                sources: (0..workers).map(|n| (worker + n) % workers).collect(),
                ready: VecDeque::new(),
            };
            (Box::new(sender), Box::new(fetching))
        });
        Ok(halves.collect())
    }

    fn carried(&self) -> Vec<Status> {
        let Some(thallus) = Thallus::find() else { return Vec::new() };
        let accepted = self.accepted.lock().expect("nobody panics with it");
        let accepted = accepted.iter().map(|(stream, _)| stream.clone()).collect::<Vec<_>>();
        let asking = self.asking.lock().expect("nobody panics with it");
        asking.values().cloned().chain(accepted).filter_map(|stream| thallus.status(&*stream).ok()).collect()
    }

    fn connections(&self) -> usize {
        self.asking.lock().expect("nobody panics with it").len()
    }

    fn leave(self: Box<Self>) -> Result<()> {
        for stream in self.asking.lock().expect("nobody panics with it").values() {
            let _ = stream.shutdown(Shutdown::Both); // the other may be faster
        }
        self.leaving.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.address)?);
        self.accepting.join().map_err(|_| anyhow!("the listener panicked"))?;
        for (_, serving) in self.accepted.lock().expect("nobody panics with it").drain(..) {
            serving.join().map_err(|_| anyhow!("a server panicked"))?;
        }
        Ok(())
    }
}

struct Target {
    here: bool,
    out: Option<Out>,
    rows: Rows,
}

struct Plain {
    schema: SchemaRef,
    gather: Gather,
    store: Arc<Store>,
    shuffle: u64,
    worker: u32,
    targets: Vec<Target>,
}

impl Plain {
    fn parts(&mut self, parts: Vec<(usize, RecordBatch)>) -> Result<()> {
        for (target, part) in parts {
            let target = &mut self.targets[target];
            if target.here {
                target.rows.batches.push(part);
                continue;
            }
            let out = match &mut target.out {
                Some(out) => out,
                none => none.insert(Out::new(&self.schema)?),
            };
            serialize(out, &part, &mut target.rows.serialized)?;
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
        let targets = (0..).zip(std::mem::take(&mut self.targets));
        self.store.put(targets.map(|(target, of)| ((self.shuffle, self.worker, target), of.rows)));
        Ok(())
    }
}

struct Fetching {
    cluster: Cluster,
    me: NodeId,
    store: Arc<Store>,
    asking: Connections,
    shuffle: u64,
    worker: u32,
    schema: SchemaRef,
    sources: VecDeque<u32>,
    ready: VecDeque<RecordBatch>,
}

impl Fetching {
    fn advance(&mut self) -> Result<Option<RecordBatch>> {
        loop {
            if let Some(batch) = self.ready.pop_front() {
                return Ok(Some(batch));
            }
            let Some(source) = self.sources.pop_front() else { return Ok(None) };
            let node = self.cluster.node_of(WorkerId(source));
            if node == self.me {
                self.ready.extend(self.store.take((self.shuffle, source, self.worker)).batches);
                continue;
            }
            let key = (self.worker, source);
            let open = self.asking.lock().expect("nobody panics with it").get(&key).cloned();
            let stream = match open {
                Some(stream) => stream,
                None => {
                    let stream = TcpStream::connect(self.cluster.address(node))?;
                    stream.set_nodelay(true)?;
                    let stream = Arc::new(stream);
                    self.asking.lock().expect("nobody panics with it").insert(key, stream.clone());
                    stream
                }
            };
            write_numbers(&stream, &[self.shuffle, u64::from(source), u64::from(self.worker)])?;
            let block = Buffer::from(read_message(&stream)?);
            self.ready.extend(In::new(self.schema.clone()).frame(&block)?);
        }
    }
}

impl Iterator for Fetching {
    type Item = Result<RecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        self.advance().transpose()
    }
}

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
use thallus_api::Status;
use thallus_shuffle::stream::{In, Outs};
use thallus_shuffle::{Cluster, Gather, NodeId, WorkerId};

use super::{Plain, Target, carried, read_message, read_u64, serialize, write_numbers};
use crate::design::{Halves, Process};

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
    fn shuffle(&mut self, id: u64, schema: &SchemaRef) -> Result<Vec<Halves>> {
        let workers = u32::try_from(self.cluster.workers())?;
        let halves = self.cluster.workers_of(self.me).map(|worker| -> Halves {
            let target = Making {
                cluster: self.cluster.clone(),
                me: self.me,
                store: self.store.clone(),
                shuffle: id,
                worker,
                blocks: (0..workers).map(|_| Rows::default()).collect(),
                streams: Outs::new(schema.clone()),
            };
            let gather = Gather::new(schema.clone(), workers as usize, self.batch_rows);
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
            (Box::new(Plain { gather, target }), Box::new(fetching))
        });
        Ok(halves.collect())
    }

    fn carried(&self) -> Vec<Status> {
        let accepted = self.accepted.lock().expect("nobody panics with it");
        let asking = self.asking.lock().expect("nobody panics with it");
        carried(asking.values().chain(accepted.iter().map(|(stream, _)| stream)).map(|stream| &**stream))
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

/// Blocks in the making.
struct Making {
    cluster: Cluster,
    me: NodeId,
    store: Arc<Store>,
    shuffle: u64,
    worker: u32,
    /// By worker.
    blocks: Vec<Rows>,
    streams: Outs,
}

impl Target for Making {
    fn deliver(&mut self, target: WorkerId, batch: RecordBatch) -> Result<()> {
        let block = &mut self.blocks[target.0 as usize];
        if self.cluster.node_of(target) == self.me {
            block.batches.push(batch);
            return Ok(());
        }
        serialize(&mut self.streams, target, &batch, &mut block.serialized)
    }

    fn finish(&mut self) -> Result<()> {
        let blocks = (0..).zip(std::mem::take(&mut self.blocks));
        self.store.put(blocks.map(|(target, rows)| ((self.shuffle, self.worker, target), rows)));
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

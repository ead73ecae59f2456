//! Both designs and their twins behind one interface.

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::time::Duration;

use anyhow::{Context, Result};
use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use thallus_api::{Fabric, Status};
use thallus_shuffle::{Cluster, NodeId, Partition, push, staged};

use crate::{Design, Options, twin};

pub(crate) trait Sender: Send {
    fn partition(&mut self, partition: &Partition) -> Result<()>;
    fn send(&mut self, batch: RecordBatch) -> Result<()>;
    fn finish(self: Box<Self>) -> Result<()>;
}

pub(crate) type Receiver = Box<dyn Iterator<Item = Result<RecordBatch>> + Send>;

/// A process of the experiment.
pub(crate) trait Process {
    /// The halves of this process' workers.
    fn shuffle(&mut self, id: u64, schema: &SchemaRef) -> Result<Vec<(Box<dyn Sender>, Receiver)>>;
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

/// Seats that listen.
pub(crate) enum Seats {
    Push(Vec<push::Seat>),
    Staged(staged::Seat),
    Twin(std::net::TcpListener),
}

impl Seats {
    pub(crate) fn bind(design: Design, options: &Options, process: usize) -> Result<Self> {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Ok(match design {
            Design::Push => {
                let count = if options.no_share { workers_of(options, process).len() } else { 1 };
                Self::Push((0..count).map(|_| push::Seat::bind(any)).collect::<Result<_, _>>()?)
            }
            Design::Staged => Self::Staged(staged::Seat::bind(any)?),
            Design::PushTwin | Design::StagedTwin => Self::Twin(std::net::TcpListener::bind(any)?),
        })
    }

    pub(crate) fn addresses(&self) -> Result<Vec<SocketAddr>> {
        Ok(match self {
            Self::Push(seats) => seats.iter().map(push::Seat::address).collect::<Result<_, _>>()?,
            Self::Staged(seat) => vec![seat.address()?],
            Self::Twin(listener) => vec![listener.local_addr()?],
        })
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
            let workers = workers_of(options, other).len();
            let each = if addresses.len() > 1 { 1 } else { workers };
            nodes.extend(addresses.iter().map(|address| (*address, each)));
        }
        let cluster = Cluster::new(0x5eed, &nodes)?;
        let first: usize = addresses[..process].iter().map(Vec::len).sum();
        match self {
            Self::Push(seats) => {
                let Options { window, batch_rows, patience, .. } = *options;
                let patience = Duration::from_secs(patience);
                let config = push::Config {
                    window,
                    outgoing: window,
                    batch_rows,
                    patience,
                    ..push::Config::default()
                };
                let joining: Vec<_> = (first..)
                    .zip(seats)
                    .map(|(me, seat)| {
                        let cluster = cluster.clone();
                        let me = NodeId(u32::try_from(me).expect("few"));
                        std::thread::spawn(move || seat.join(cluster, me, config))
                    })
                    .collect();
                let nodes = joining.into_iter().map(|joining| joining.join().expect("it does not panic"));
                Ok(Box::new(Push(nodes.collect::<Result<_, _>>()?)))
            }
            Self::Staged(seat) => {
                let Options { chunk, batch_rows, patience, .. } = *options;
                let patience = Duration::from_secs(patience);
                let config = staged::Config {
                    chunk,
                    batch_rows,
                    share: !options.no_share,
                    patience,
                    ..staged::Config::default()
                };
                Ok(Box::new(Staged(seat.join(cluster, NodeId(u32::try_from(process)?), config)?)))
            }
            Self::Twin(listener) => {
                let me = NodeId(u32::try_from(process)?);
                match design {
                    Design::PushTwin => {
                        Ok(Box::new(twin::push::Mesh::join(listener, cluster, me, options.batch_rows)?))
                    }
                    _ => Ok(Box::new(twin::staged::Blocks::join(listener, cluster, me, options.batch_rows)?)),
                }
            }
        }
    }
}

struct Push(Vec<push::Node>);

impl Process for Push {
    fn shuffle(&mut self, id: u64, schema: &SchemaRef) -> Result<Vec<(Box<dyn Sender>, Receiver)>> {
        let mut halves: Vec<(Box<dyn Sender>, Receiver)> = Vec::new();
        for node in &self.0 {
            for (sender, receiver) in node.shuffle(id, schema)? {
                halves.push((Box::new(sender), Box::new(receiver.map(|batch| batch.context("push")))));
            }
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

impl Sender for push::Sender {
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

struct Staged(staged::Node);

impl Process for Staged {
    fn shuffle(&mut self, id: u64, schema: &SchemaRef) -> Result<Vec<(Box<dyn Sender>, Receiver)>> {
        let halves = self.0.shuffle(id, schema)?.into_iter();
        Ok(halves
            .map(|(sender, receiver)| -> (Box<dyn Sender>, Receiver) {
                (Box::new(sender), Box::new(receiver.map(|batch| batch.context("staged"))))
            })
            .collect())
    }

    fn carried(&self) -> Vec<Status> {
        let (made, accepted) = self.0.carried();
        made.into_iter().chain(accepted).collect()
    }

    fn connections(&self) -> usize {
        usize::try_from(self.0.fetched().connections).expect("few")
    }

    fn leave(self: Box<Self>) -> Result<()> {
        anyhow::ensure!(self.0.leave(), "somebody did not leave in order");
        Ok(())
    }
}

impl Sender for staged::Sender {
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

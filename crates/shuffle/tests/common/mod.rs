//! Clusters whose processes are threads of this one; their connections are as between processes.

#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "shared by tests that use a part of it; a test fails by panicking"
)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use arrow_array::{Int64Array, RecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use thallus_shuffle::{Cluster, NodeId, Partition, Result, Seat, push, staged};

pub(crate) fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new("n", DataType::Int64, false)]))
}

pub(crate) fn batch(values: impl IntoIterator<Item = i64>) -> RecordBatch {
    RecordBatch::try_new(schema(), vec![Arc::new(Int64Array::from_iter_values(values))]).unwrap()
}

pub(crate) fn values(batch: &RecordBatch) -> &[i64] {
    batch.column(0).as_any().downcast_ref::<Int64Array>().unwrap().values()
}

/// Count and sum.
pub(crate) fn sum(batches: impl IntoIterator<Item = RecordBatch>) -> (usize, i64) {
    batches.into_iter().fold((0, 0), |(count, sum), batch| {
        (count + batch.num_rows(), values(&batch).iter().fold(sum, |sum, value| sum.wrapping_add(*value)))
    })
}

/// What tests want of both designs.
pub(crate) trait Process: Send + Sized + 'static {
    type Config: Copy + Default + Send + 'static;
    type Sender: Send;
    type Receiver: Iterator<Item = Result<RecordBatch>> + Send;

    fn join(seat: Seat, cluster: Cluster, me: NodeId, config: Self::Config) -> Result<Self>;
    fn shuffle(&self, id: u64, schema: &SchemaRef) -> Result<Vec<(Self::Sender, Self::Receiver)>>;
    /// Sends all batches, and finishes.
    fn send(sender: Self::Sender, by: &Partition, batches: impl IntoIterator<Item = RecordBatch>);
    fn leave(self) -> bool;
}

macro_rules! process {
    ($design:ident) => {
        impl Process for $design::Node {
            type Config = $design::Config;
            type Sender = $design::Sender;
            type Receiver = $design::Receiver;

            fn join(seat: Seat, cluster: Cluster, me: NodeId, config: $design::Config) -> Result<Self> {
                Self::join(seat, cluster, me, config)
            }

            fn shuffle(&self, id: u64, schema: &SchemaRef) -> Result<Vec<(Self::Sender, Self::Receiver)>> {
                self.shuffle(id, schema)
            }

            fn send(
                mut sender: Self::Sender,
                by: &Partition,
                batches: impl IntoIterator<Item = RecordBatch>,
            ) {
                sender.partition(by).unwrap();
                batches.into_iter().for_each(|batch| sender.send(batch).unwrap());
                sender.finish().unwrap();
            }

            fn leave(self) -> bool {
                self.leave()
            }
        }
    };
}

process!(push);
process!(staged);

/// Seats of one process for each number of workers.
pub(crate) fn seats(workers: &[usize]) -> (Vec<Seat>, Cluster) {
    let seats: Vec<_> = workers.iter().map(|_| Seat::bind(([127, 0, 0, 1], 0).into()).unwrap()).collect();
    let processes: Vec<(SocketAddr, usize)> =
        seats.iter().zip(workers).map(|(seat, workers)| (seat.address().unwrap(), *workers)).collect();
    (seats, Cluster::new(42, &processes).unwrap())
}

/// Lets all join.
pub(crate) fn join<P: Process>(seats: Vec<Seat>, cluster: &Cluster, config: P::Config) -> Vec<P> {
    let joining: Vec<_> = (0..)
        .map(NodeId)
        .zip(seats)
        .map(|(me, seat)| {
            let cluster = cluster.clone();
            thread::spawn(move || P::join(seat, cluster, me, config).unwrap())
        })
        .collect();
    joining.into_iter().map(|joining| joining.join().unwrap()).collect()
}

/// One process for each number of workers.
pub(crate) fn nodes<P: Process>(workers: &[usize], config: P::Config) -> Vec<P> {
    let (seats, cluster) = seats(workers);
    join(seats, &cluster, config)
}

/// Halves of one shuffle of all workers.
pub(crate) fn halves<P: Process>(nodes: &[P], id: u64) -> Vec<(P::Sender, P::Receiver)> {
    nodes.iter().flat_map(|node| node.shuffle(id, &schema()).unwrap()).collect()
}

/// The first error of each reader.
pub(crate) fn errors(
    receivers: impl IntoIterator<Item: Iterator<Item = Result<RecordBatch>>>,
) -> Vec<String> {
    let first = |mut receiver: _| Iterator::find_map(&mut receiver, Result::err).unwrap().to_string();
    receivers.into_iter().map(first).collect()
}

pub(crate) fn leave<P: Process>(nodes: Vec<P>) {
    let leaving: Vec<_> = nodes.into_iter().map(|node| thread::spawn(move || node.leave())).collect();
    assert!(leaving.into_iter().all(|leaving| leaving.join().unwrap()), "all leave in order");
}

/// What `test` gives. A test that hangs fails, instead of the whole run.
pub(crate) fn within<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    let running = thread::spawn(move || drop(sender.send(test())));
    match receiver.recv_timeout(Duration::from_secs(120)) {
        Ok(result) => result,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(running.join().unwrap_err());
        }
    }
}

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
use thallus_shuffle::push::{Config, Node, Seat};
use thallus_shuffle::{Cluster, NodeId};

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

pub(crate) fn cluster(seats: &[Seat], workers: &[usize]) -> Cluster {
    let processes: Vec<(SocketAddr, usize)> =
        seats.iter().zip(workers).map(|(seat, workers)| (seat.address().unwrap(), *workers)).collect();
    Cluster::new(42, &processes).unwrap()
}

/// One process for each number of workers.
pub(crate) fn nodes(workers: &[usize], config: Config) -> Vec<Node> {
    let seats: Vec<Seat> = workers.iter().map(|_| Seat::bind(([127, 0, 0, 1], 0).into()).unwrap()).collect();
    let cluster = cluster(&seats, workers);
    let joining: Vec<_> = (0..)
        .map(NodeId)
        .zip(seats)
        .map(|(me, seat)| {
            let cluster = cluster.clone();
            thread::spawn(move || seat.join(cluster, me, config).unwrap())
        })
        .collect();
    joining.into_iter().map(|joining| joining.join().unwrap()).collect()
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

pub(crate) fn leave(nodes: Vec<Node>) {
    let leaving: Vec<_> = nodes.into_iter().map(|node| thread::spawn(move || node.leave())).collect();
    assert!(leaving.into_iter().all(|leaving| leaving.join().unwrap()), "all leave in order");
}

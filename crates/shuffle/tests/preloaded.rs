//! The same under the library, by its own counts. Wants THALLUS_LIBRARY, the path of libthallus_shim.so.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::process::Command;
use std::thread;

use thallus_api::{Fabric, Status, Thallus};
use thallus_shuffle::push::{Config, Node};
use thallus_shuffle::{Partition, staged};

use common::{Process, batch, halves, leave, nodes, sum, within};

/// Runs one test of this file in a process that has the library.
fn under_the_library(test: &str, says: &str) {
    let library = std::env::var("THALLUS_LIBRARY").expect("THALLUS_LIBRARY: the path of libthallus_shim.so");
    let mut child = Command::new(std::env::current_exe().unwrap());
    let child = child.args(["--exact", test, "--nocapture"]).env("LD_PRELOAD", library).output().unwrap();
    let said = String::from_utf8_lossy(&child.stdout).into_owned() + &String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && said.contains(says), "{said}");
}

#[test]
fn all_connections_leave_tcp_and_then_carry_all_bytes_in_memory() {
    if Thallus::find().is_some() {
        return within(shuffle_and_look);
    }
    under_the_library("all_connections_leave_tcp_and_then_carry_all_bytes_in_memory", "6 ends in memory");
}

#[test]
fn fetched_chunks_come_in_memory() {
    if Thallus::find().is_some() {
        return within(fetch_and_look);
    }
    under_the_library("fetched_chunks_come_in_memory", "12 ends in memory");
}

fn shuffle_and_look() {
    let config = Config { batch_rows: 1_000, ..Config::default() };
    let nodes: Vec<Node> = once_switched(&[2, 1, 2], config, |nodes| {
        let links = nodes.iter().flat_map(Node::links);
        let carried = links.map(|(_, sent, carried)| {
            let carried = carried.unwrap();
            // And 64 of the greeting.
            assert_eq!(carried.ring_bytes_sent + carried.tcp_bytes_sent, sent.bytes + 64);
            carried
        });
        carried.collect()
    });
    leave(nodes);
}

fn fetch_and_look() {
    let config = staged::Config { chunk: 8 << 10, batch_rows: 1_000, ..staged::Config::default() };
    let nodes: Vec<staged::Node> = once_switched(&[2; 3], config, |nodes| {
        let carried = nodes.iter().map(staged::Node::carried);
        carried.flat_map(|(made, accepted)| made.into_iter().chain(accepted)).collect()
    });
    leave(nodes);
}

/// Nodes that shuffle until all their connections are in memory both ways, and then once more: of that, no byte is on TCP.
/// How many shuffles the first part takes depends on who runs when.
fn once_switched<P: Process>(
    workers: &[usize],
    config: P::Config,
    look: impl Fn(&[P]) -> Vec<Status>,
) -> Vec<P> {
    let nodes: Vec<P> = nodes(workers, config);
    let shuffle = |id| {
        thread::scope(|scope| {
            for (sender, receiver) in halves(&nodes, id) {
                let batches = (0..50).map(|n| batch(n * 1_000..n * 1_000 + 1_000));
                scope.spawn(move || P::send(sender, &Partition::Hash(vec![0]), batches));
                scope.spawn(move || sum(receiver.map(Result::unwrap)));
            }
        });
        look(&nodes)
    };
    let is_switched = |end: &Status| end.ring_bytes_sent > 0 && end.ring_bytes_received > 0;
    let mut ids = 0..;
    let before = ids.by_ref().map(shuffle).find(|ends| ends.iter().all(is_switched)).unwrap();
    let after = shuffle(ids.next().unwrap());
    assert_eq!(before.len(), after.len());
    let on_tcp =
        |ends: &[Status]| -> u64 { ends.iter().map(|end| end.tcp_bytes_sent + end.tcp_bytes_received).sum() };
    assert_eq!(on_tcp(&before), on_tcp(&after), "{before:?} {after:?}");
    for end in &after {
        assert_eq!((end.fabric, end.reason.as_str()), (Fabric::SharedMemory, ""));
    }
    let in_memory = |ends: &[Status]| -> u64 { ends.iter().map(|end| end.ring_bytes_received).sum() };
    assert!(in_memory(&after) > in_memory(&before) + 100_000, "{before:?} {after:?}");
    println!("{} ends in memory", after.len());
    nodes
}

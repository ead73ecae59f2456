//! The same under the library, by its own counts. Wants THALLUS_LIBRARY, the path of libthallus_shim.so.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::process::Command;
use std::thread;

use thallus_api::{Fabric, Thallus};
use thallus_shuffle::push::{Config, Node};
use thallus_shuffle::{Partition, staged};

use common::{batch, leave, nodes, schema, sum, within};

/// Runs one test of this file in a process that has the library.
fn under_the_library(test: &str, says: &str) {
    let library = std::env::var("THALLUS_LIBRARY").expect("THALLUS_LIBRARY: the path of libthallus_shim.so");
    let mut child = Command::new(std::env::current_exe().unwrap());
    let child = child.args(["--exact", test, "--nocapture"]).env("LD_PRELOAD", library).output().unwrap();
    let said = String::from_utf8_lossy(&child.stdout).into_owned() + &String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && said.contains(says), "{said}");
}

#[test]
fn all_connections_leave_tcp_and_carry_nearly_all_bytes_in_memory() {
    if Thallus::find().is_some() {
        return within(shuffle_and_look);
    }
    under_the_library("all_connections_leave_tcp_and_carry_nearly_all_bytes_in_memory", "6 ends in memory");
}

#[test]
fn fetched_chunks_come_in_memory() {
    if Thallus::find().is_some() {
        return within(fetch_and_look);
    }
    under_the_library("fetched_chunks_come_in_memory", "12 ends in memory");
}

fn shuffle_and_look() {
    let nodes: Vec<Node> = nodes(&[2, 1, 2], Config { batch_rows: 1_000, ..Config::default() });
    for id in 0..5 {
        thread::scope(|scope| {
            for (mut sender, receiver) in nodes.iter().flat_map(|node| node.shuffle(id, &schema()).unwrap()) {
                scope.spawn(move || {
                    sender.partition(&Partition::Hash(vec![0])).unwrap();
                    (0..50).for_each(|n| sender.send(batch(n * 1_000..n * 1_000 + 1_000)).unwrap());
                    sender.finish().unwrap();
                });
                scope.spawn(move || sum(receiver.map(Result::unwrap)));
            }
        });
    }
    let mut ends = 0;
    for (_, sent, carried) in nodes.iter().flat_map(Node::links) {
        let carried = carried.unwrap();
        assert_eq!((carried.fabric, carried.reason.as_str()), (Fabric::SharedMemory, ""));
        let all = carried.ring_bytes_sent + carried.tcp_bytes_sent;
        // And 64 of the greeting.
        assert_eq!(all, sent.bytes + 64);
        assert!(carried.tcp_bytes_sent * 5 < all, "{carried:?}");
        ends += 1;
    }
    println!("{ends} ends in memory");
    leave(nodes);
}

fn fetch_and_look() {
    let config = staged::Config { chunk: 8 << 10, batch_rows: 1_000, ..staged::Config::default() };
    let nodes: Vec<staged::Node> = nodes(&[2; 3], config);
    for id in 0..5 {
        thread::scope(|scope| {
            for (mut sender, receiver) in nodes.iter().flat_map(|node| node.shuffle(id, &schema()).unwrap()) {
                scope.spawn(move || {
                    sender.partition(&Partition::Hash(vec![0])).unwrap();
                    (0..50).for_each(|n| sender.send(batch(n * 1_000..n * 1_000 + 1_000)).unwrap());
                    sender.finish().unwrap();
                    sum(receiver.map(Result::unwrap))
                });
            }
        });
    }
    let mut ends = 0;
    for node in &nodes {
        let (made, accepted) = node.carried();
        for carried in made.into_iter().chain(accepted) {
            assert_eq!((carried.fabric, carried.reason.as_str()), (Fabric::SharedMemory, ""));
            let ring = carried.ring_bytes_sent + carried.ring_bytes_received;
            assert!(carried.tcp_bytes_sent + carried.tcp_bytes_received < ring, "{carried:?}");
            ends += 1;
        }
    }
    println!("{ends} ends in memory");
    leave(nodes);
}

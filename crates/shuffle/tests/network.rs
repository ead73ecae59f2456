//! A network that is there later than the processes: each test runs once more in a network of its own, whose loopback is down at first.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::net::{Ipv4Addr, TcpStream};
use std::process::Command;
use std::thread;
use std::time::Duration;

use thallus_shuffle::{Partition, push, staged};

use common::{Process, batch, halves, leave, nodes, sum, within};

const INSIDE: &str = "THALLUS_TEST_IN_A_NETWORK_OF_ITS_OWN";

fn in_a_network_of_its_own(test: &str, inside: impl FnOnce() + Send + 'static) {
    if std::env::var_os(INSIDE).is_some() {
        return within(inside);
    }
    let mut child = Command::new("unshare");
    child.args(["--net", "--map-root-user", "--"]).arg(std::env::current_exe().unwrap());
    let child = child.args(["--exact", test, "--nocapture"]).env(INSIDE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&child.stdout).into_owned() + &String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && said.contains("1 passed"), "{said}");
}

/// All rows come, though nobody can be reached when the processes begin.
fn shuffle<P: Process>() {
    let unreachable = TcpStream::connect((Ipv4Addr::LOCALHOST, 9)).unwrap_err();
    assert_eq!(unreachable.kind(), std::io::ErrorKind::NetworkUnreachable);
    let network = thread::spawn(|| {
        thread::sleep(Duration::from_millis(200));
        assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
    });
    let nodes: Vec<P> = nodes(&[1, 1], P::Config::default());
    let (rows, total) = thread::scope(|scope| {
        let mut reading = Vec::new();
        for (sender, receiver) in halves(&nodes, 0) {
            scope.spawn(move || P::send(sender, &Partition::Hash(vec![0]), [batch(0..1_000)]));
            reading.push(scope.spawn(move || sum(receiver.map(Result::unwrap))));
        }
        let all = reading.into_iter().map(|reading| reading.join().unwrap());
        all.fold((0, 0), |(rows, total), (more, sum)| (rows + more, total + sum))
    });
    assert_eq!((rows, total), (2_000, 2 * 999 * 1_000 / 2));
    network.join().unwrap();
    leave(nodes);
}

#[test]
fn processes_meet_once_there_is_a_network() {
    in_a_network_of_its_own("processes_meet_once_there_is_a_network", shuffle::<push::Node>);
}

#[test]
fn rows_are_fetched_once_there_is_a_network() {
    in_a_network_of_its_own("rows_are_fetched_once_there_is_a_network", shuffle::<staged::Node>);
}

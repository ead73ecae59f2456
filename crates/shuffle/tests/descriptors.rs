//! A process without free descriptors. Alone in its file: the limit is the whole process's.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, connect, socket};
use thallus_shuffle::staged::{Config, Node};
use thallus_shuffle::{Cluster, NodeId, Seat};

#[test]
fn a_connection_that_can_not_be_accepted_waits() {
    common::within(|| {
        let seat = Seat::bind("127.0.0.1:0".parse::<SocketAddr>().unwrap()).unwrap();
        let address = seat.address().unwrap();
        let cluster = Cluster::new(1, &[(address, 1)]).unwrap();
        let node = Node::join(seat, cluster, NodeId(0), Config::default()).unwrap();
        let client = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();

        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, 128, hard).unwrap();
        let files: Vec<File> = (0..).map_while(|_| File::open("/dev/null").ok()).collect();
        connect(client.as_raw_fd(), &SockaddrStorage::from(address)).unwrap();
        await_that(|| node.served().scarce >= 2);
        sleep(Duration::from_millis(300));
        assert!(node.served().scarce < 1_000, "it tries without a pause");
        assert_eq!(node.served().connections, 0);

        drop(files);
        setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
        await_that(|| node.served().connections == 1);
        drop(client);
        assert!(node.leave());
    });
}

fn await_that(holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain");
        sleep(Duration::from_millis(5));
    }
}

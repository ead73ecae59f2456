//! Somebody else at the rendezvous: of another user, or of the same one and up to no good.
//!
//! The attacker is a process that the connecting side forks before it connects, so that it has no part in
//! the connection. It uses the library's own code where it behaves, and plain sockets where it does not.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType, connect,
    send, sendmsg, socket,
};
use thallus_transport::rendezvous::{self, Ends, Service};

use super::peers::{echo, request_echoes};
use super::{Behaviour, Tally};
use crate::calls::{self, Child, Fd, Leave, fork, quietly};
use crate::say;
use crate::side::{Side, receive_exactly};

const NOBODY: u32 = 65534;

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::whole("name_held_by_another_user", echoes, name_held_by_another, Tally::Total(1))
        .tally(Tally::Mixed(0, &[("not-owner", 1)]), Tally::Mixed(0, &[("name-taken", 1)]))
        .needs_root(),
    Behaviour::whole("name_held_by_the_same_user", echoes, name_held_by_ourselves, Tally::Stayed(1))
        .tally(Tally::Stayed(1), Tally::Mixed(0, &[("name-taken", 1)])),
    Behaviour::whole("answered_by_another_user", answers_late, answered_by_another, Tally::Total(1))
        .needs_root(),
    Behaviour::whole("hint_without_a_server", echoes_below_a_false_hint, asks_plainly, Tally::Total(1)),
    Behaviour::whole(
        "garbage_at_the_rendezvous",
        answers_late_often,
        sends_garbage,
        Tally::Total(GARBAGE as u64),
    ),
    Behaviour::whole(
        "files_at_the_rendezvous",
        answers_late_for_files,
        sends_files,
        Tally::Total(FILES as u64),
    ),
    Behaviour::whole("a_crowd_at_the_rendezvous", answers_late, crowds, Tally::Total(1)),
];

fn echoes(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    say!("echoed {}", echo(fd));
}

/// Echoes, but reads nothing before the attacker has done its work.
fn answers_late(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    side.sync("attacked");
    say!("echoed {}", echo(fd));
}

/// A process that learns the two addresses of a connection, does what `attack` does, and stays until it is
/// let go.
struct Attacker {
    child: Child,
    orders: Fd,
    reports: Fd,
}

impl Attacker {
    /// `attack` returns what must stay open.
    fn new<T>(attack: impl FnOnce(SocketAddr, SocketAddr) -> T) -> Self {
        let (orders, commanding) = quietly(calls::pipe).expect("pipe");
        let (reports, reporting) = quietly(calls::pipe).expect("pipe");
        let child = fork(Leave::AtOnce, || {
            quietly(|| {
                calls::close(commanding).expect("close");
                calls::close(reports).expect("close");
                let order = calls::read(orders, 200).expect("read");
                let text = String::from_utf8(order).expect("addresses are text");
                let (client, server) = text.split_once(' ').expect("two addresses");
                let address = |text: &str| text.parse().expect("an address");
                let held = attack(address(client), address(server));
                calls::write(reporting, b"x").expect("write");
                assert_eq!(calls::read(orders, 1), Ok(vec![]));
                drop(held);
            });
        });
        quietly(|| {
            calls::close(orders).expect("close");
            calls::close(reporting).expect("close");
        });
        Self { child, orders: commanding, reports }
    }

    /// Lets it loose on the connection `fd`, and waits until it has done its work.
    fn attack(&self, fd: Fd) {
        quietly(|| {
            // As the library sees them: an IPv4 address is one, in whatever family it came.
            let canonical =
                |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
            let client = canonical(calls::local_address(fd).expect("getsockname"));
            let server = canonical(calls::peer_address(fd).expect("getpeername"));
            calls::write(self.orders, format!("{client} {server}").as_bytes()).expect("write");
            assert_eq!(calls::read(self.reports, 1), Ok(b"x".to_vec()), "the attacker failed");
        });
    }

    fn end(self) {
        quietly(|| {
            calls::close(self.orders).expect("close");
            calls::close(self.reports).expect("close");
            self.child.wait_for_success();
        });
    }
}

/// Where a descriptor does not change the numbers of others, whether it could be made or not.
fn out_of_the_way(fd: OwnedFd) -> Result<OwnedFd, rustix::io::Errno> {
    rustix::io::fcntl_dupfd_cloexec(&fd, 500)
}

fn hold_the_name(side: &Side, user: Option<u32>) {
    let attacker = Attacker::new(|client, server| {
        if let Some(user) = user {
            calls::become_user(user, user).expect("setuid");
        }
        rendezvous::offer(Ends::Internet { client, server }, out_of_the_way).expect("the name is free")
    });
    let fd = side.connect();
    attacker.attack(fd);
    request_echoes(fd, 100, 1000);
    say!("100 echoes");
    attacker.end();
}

fn name_held_by_another(side: &Side) {
    hold_the_name(side, Some(NOBODY));
}

fn name_held_by_ourselves(side: &Side) {
    hold_the_name(side, None);
}

/// The client has made its offer; somebody of another user answers before the server does.
fn answered_by_another(side: &Side) {
    let attacker = Attacker::new(|client, server| {
        calls::become_user(NOBODY, NOBODY).expect("setuid");
        // Without the library there is no offer, and nothing to answer.
        rendezvous::answer(Ends::Internet { client, server }, |_| {}, out_of_the_way).ok()
    });
    let fd = side.connect();
    for _ in 0..5 {
        assert_eq!(calls::send(fd, b"early", 0), Ok(5));
    }
    attacker.attack(fd);
    side.sync("attacked");
    assert_eq!(receive_exactly(fd, 25), b"early".repeat(5));
    request_echoes(fd, 100, 1000);
    say!("100 echoes");
    attacker.end();
}

/// The server's port has a hint that says that it has the library, which matters where it has not.
fn echoes_below_a_false_hint(side: &Side) {
    let listener = side.listen_quietly();
    let port = crate::side::listening_port(listener);
    let hint = rendezvous::announce(Service::Port(port), out_of_the_way);
    side.tell(u64::from(port));
    let fd = side.accept(listener);
    say!("echoed {}", echo(fd));
    drop(hint);
}

fn asks_plainly(side: &Side) {
    let fd = side.connect();
    request_echoes(fd, 100, 1000);
    say!("100 echoes");
}

/// The kinds of garbage that [`throw`] knows.
const GARBAGE: usize = 9;

fn answers_late_often(side: &Side) {
    answers_late_to(side, GARBAGE);
}

fn answers_late_to(side: &Side, connections: usize) {
    let listener = side.listen();
    for _ in 0..connections {
        let fd = side.accept(listener);
        side.sync("attacked");
        say!("echoed {}", echo(fd));
        calls::close(fd).expect("close");
    }
}

fn sends_garbage(side: &Side) {
    throws(side, 0..GARBAGE);
}

/// More than a process takes in its life.
const FILES: usize = 24;

/// Of those of [`throw`].
const A_FILE: usize = 4;

fn answers_late_for_files(side: &Side) {
    answers_late_to(side, FILES);
}

fn sends_files(side: &Side) {
    let open = || quietly(|| calls::open_descriptors(512).len());
    let before = open();
    throws(side, std::iter::repeat_n(A_FILE, FILES));
    assert!(open() <= before + 16, "{} of {FILES} stay", open() - before);
}

fn throws(side: &Side, kinds: impl IntoIterator<Item = usize>) {
    let destination = side.destination();
    for kind in kinds {
        let attacker = Attacker::new(|client, _| throw(kind, client.port()));
        let fd = side.connect_to(destination);
        for _ in 0..5 {
            assert_eq!(calls::send(fd, b"early", 0), Ok(5));
        }
        attacker.attack(fd);
        side.sync("attacked");
        assert_eq!(receive_exactly(fd, 25), b"early".repeat(5));
        request_echoes(fd, 60, 1000);
        calls::close(fd).expect("close");
        attacker.end();
    }
}

/// The abstract names of the library that belong to a connection from `port`, as everybody can see them.
fn names_with(port: u16) -> Vec<String> {
    let table = std::fs::read_to_string("/proc/self/net/unix").expect("/proc is mounted");
    let names = table.lines().filter_map(|line| line.split_once(" @")).map(|(_, name)| name.to_owned());
    names.filter(|name| name.starts_with("thallus") && name.contains(&format!(":{port}-"))).collect()
}

fn connected_to(name: &str) -> Option<OwnedFd> {
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("socket");
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name as the kernel shows it");
    connect(&socket, &address).ok().map(|()| socket)
}

/// Throws something at the rendezvous that is no offer.
fn throw(kind: usize, port: u16) -> Vec<OwnedFd> {
    let mut sockets = Vec::new();
    for name in names_with(port) {
        let Some(socket) = connected_to(&name) else { continue };
        let memory = memfd_create("garbage", MemfdFlags::ALLOW_SEALING).expect("memfd_create");
        let magic = b"THALLUSo0123456789abcdef";
        match kind {
            0 => send_with(&socket, &[], &[]),
            1 => send_with(&socket, b"short", &[]),
            2 => send_with(&socket, &[0xff; 24], &[]),
            3 => send_with(&socket, magic, &[]),
            A_FILE => send_with(&socket, magic, &[rustix::stdio::stderr()]),
            5 => {
                ftruncate(&memory, 4096).expect("ftruncate");
                send_with(&socket, magic, &[memory.as_fd()]);
            }
            6 => {
                // Large enough, but it may shrink under whoever maps it.
                ftruncate(&memory, thallus_transport::segment::SEGMENT_BYTES as u64).expect("ftruncate");
                send_with(&socket, magic, &[memory.as_fd()]);
            }
            7 => send_with(&socket, &[b'x'; 60_000], &[memory.as_fd(); 8]),
            _ => {}
        }
        if kind < 8 {
            sockets.push(socket);
        }
    }
    sockets
}

fn send_with(socket: &OwnedFd, data: &[u8], fds: &[BorrowedFd<'_>]) {
    // What the other end makes of it is its own affair; it may have refused already.
    if fds.is_empty() {
        let _ = send(socket, data, SendFlags::NOSIGNAL);
        return;
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "there is room");
    let _ = sendmsg(socket, &[IoSlice::new(data)], &mut control, SendFlags::NOSIGNAL);
}

/// So many strangers wait at the rendezvous that the server finds no place there.
fn crowds(side: &Side) {
    let attacker = Attacker::new(|client, _| {
        let mut crowd = Vec::new();
        for name in names_with(client.port()) {
            for _ in 0..20 {
                let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("socket");
                rustix::io::ioctl_fionbio(&socket, true).expect("FIONBIO");
                let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name");
                let _ = connect(&socket, &address);
                crowd.push(socket);
            }
        }
        crowd
    });
    let fd = side.connect();
    for _ in 0..5 {
        assert_eq!(calls::send(fd, b"early", 0), Ok(5));
    }
    attacker.attack(fd);
    side.sync("attacked");
    assert_eq!(receive_exactly(fd, 25), b"early".repeat(5));
    request_echoes(fd, 100, 1000);
    say!("100 echoes");
    attacker.end();
}

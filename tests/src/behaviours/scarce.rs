//! Processes that run out of something, or may not do something: the bytes arrive all the same.

use std::time::Duration;

use super::peers::{echo, request_echoes, send_all};
use super::{Behaviour, Tally};
use crate::calls::{self, Errno, Fd, forbid, quietly};
use crate::say;
use crate::side::{
    ARRIVAL, Pattern, Side, await_process_asleep, receive_exactly, receive_pattern, send_pattern,
};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::whole(
        "client_without_descriptors",
        echoes,
        connects_with_the_last_descriptor,
        Tally::Total(1),
    )
    .alone(&["no-memory"])
    .tally(Tally::Stayed(1), Tally::Mixed(0, &[("no-fds", 1)])),
    Behaviour::whole("server_without_descriptors", accepts_with_the_last_descriptor, asks, Tally::Total(1))
        .alone(&["no-memory"])
        .tally(Tally::Mixed(0, &[("no-fds", 1)]), Tally::Stayed(1)),
    Behaviour::whole(
        "few_descriptors",
        echoes_with_few_descriptors,
        asks_with_few_descriptors,
        Tally::Upgraded(1),
    ),
    Behaviour::whole("server_without_memory_files", echoes_without_memfd, asks, Tally::Total(1))
        .tally(Tally::Mixed(0, &[("no-memory", 1)]), Tally::Stayed(1)),
    Behaviour::whole(
        "server_without_memory_files_from_the_start",
        no_memfd_and_echoes,
        asks,
        Tally::Total(1),
    )
    .tally(Tally::Mixed(0, &[("no-memory", 1)]), Tally::Stayed(1)),
    Behaviour::whole("server_without_space", echoes_without_fallocate, asks, Tally::Total(1))
        .tally(Tally::Mixed(0, &[("no-memory", 1)]), Tally::Stayed(1)),
    Behaviour::whole("server_without_address_space", echoes_without_address_space, asks, Tally::Total(1))
        .tally(Tally::Mixed(0, &[("no-memory", 1)]), Tally::Stayed(1)),
    Behaviour::whole("client_without_address_space", echoes, asks_without_address_space, Tally::Total(1))
        .tally(Tally::Stayed(1), Tally::Mixed(0, &[("no-memory", 1)])),
    Behaviour::whole("server_with_small_files", echoes_with_small_files, asks, Tally::Total(1))
        .tally(Tally::Mixed(0, &[("no-memory", 1)]), Tally::Stayed(1)),
    Behaviour::whole("server_with_small_files_from_the_start", small_files_and_echoes, asks, Tally::Total(1))
        .tally(Tally::Mixed(0, &[("no-memory", 1)]), Tally::Stayed(1)),
    Behaviour::whole("server_that_cannot_ask_for_owners", echoes_without_netlink, asks, Tally::Total(1))
        .tally(Tally::Mixed(0, &[("no-diag", 1)]), Tally::Stayed(1)),
    Behaviour::whole("client_that_cannot_ask_for_owners", echoes, asks_without_netlink, Tally::Total(1))
        .tally(Tally::Stayed(1), Tally::Mixed(0, &[("no-diag", 1)])),
    Behaviour::whole(
        "server_that_may_use_netlink_as_libc_does",
        echoes_with_raw_netlink,
        asks,
        Tally::Upgraded(1),
    ),
    Behaviour::whole(
        "client_that_may_use_netlink_as_libc_does",
        echoes,
        asks_with_raw_netlink,
        Tally::Upgraded(1),
    ),
    Behaviour::whole("client_that_may_not_ask_for_names", echoes, asks_without_datagrams, Tally::Total(1))
        .tally(Tally::Stayed(1), Tally::Mixed(0, &[("forbidden", 1)])),
    Behaviour::whole("client_that_may_not_take_its_name", echoes, asks_without_packets, Tally::Total(1))
        .tally(Tally::Stayed(1), Tally::Mixed(0, &[("forbidden", 1)])),
    Behaviour::whole("client_that_may_not_take_the_answer", echoes, asks_without_messages, Tally::Total(1))
        .tally(Tally::Stayed(1), Tally::Mixed(0, &[("forbidden", 1)])),
    Behaviour::whole("server_that_may_not_answer", echoes_without_packets, asks, Tally::Total(1))
        .tally(Tally::Mixed(0, &[("forbidden", 1)]), Tally::Stayed(1)),
    Behaviour::whole("server_that_may_make_no_memory_files", echoes_forbidden_memfd, asks, Tally::Total(1))
        .alone(&["no-memory"])
        .tally(Tally::Mixed(0, &[("forbidden", 1)]), Tally::Stayed(1)),
    // It takes the server's.
    Behaviour::whole(
        "client_that_may_make_no_memory_files",
        echoes,
        asks_forbidden_memfd,
        Tally::Upgraded(1),
    )
    .alone(&["no-memory"]),
    Behaviour::connected("write_waits_without_descriptors", writes_without_descriptors::<0>, reads_late),
    Behaviour::connected(
        "write_with_a_timeout_waits_without_descriptors",
        writes_without_descriptors::<20>,
        reads_late,
    ),
    Behaviour::connected("no_space_to_grow", streams_without_fallocate, streams_back),
    Behaviour::connected("no_large_files_to_grow", streams_with_small_files, streams_back),
    Behaviour::connected("no_memory_for_a_wide_window", writes_much_without_memory, reads_much).tcp_only(),
    // A process in a folder of its own cannot reach the one for statistics.
    Behaviour::whole("confined_client", echoes, asks_confined, Tally::Upgraded(1))
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .needs_root(),
    Behaviour::whole("confined_server", echoes_confined, asks, Tally::Upgraded(1))
        .tally(Tally::Unknown, Tally::Upgraded(1))
        .needs_root(),
    Behaviour::connected("waits_without_memory", waits_without_memory, echoes_on),
];

fn accept_one(side: &Side) -> Fd {
    let listener = side.listen();
    side.accept(listener)
}

fn echoes(side: &Side) {
    let fd = accept_one(side);
    say!("echoed {}", echo(fd));
}

fn asks(side: &Side) {
    let fd = side.connect();
    ask(fd);
}

fn ask(fd: Fd) {
    request_echoes(fd, 100, 3000);
    say!("100 echoes");
}

/// Opens files until there is room for `left` descriptors.
fn leave_descriptors(left: usize) {
    calls::limit_descriptors(64);
    let mut opened = Vec::new();
    quietly(|| {
        while let Ok(fd) = calls::open("/dev/null", libc::O_RDONLY) {
            opened.push(fd);
        }
        for fd in opened.iter().rev().take(left) {
            calls::close(*fd).expect("close");
        }
    });
}

fn connects_with_the_last_descriptor(side: &Side) {
    let destination = side.destination();
    leave_descriptors(1);
    let fd = side.connect_to(destination);
    ask(fd);
    assert_eq!(calls::dup(fd), Err(Errno::EMFILE));
    calls::limit_descriptors(128);
}

fn accepts_with_the_last_descriptor(side: &Side) {
    let listener = side.listen();
    leave_descriptors(1);
    let fd = side.accept(listener);
    say!("echoed {}", echo(fd));
    assert_eq!(calls::dup(fd), Err(Errno::EMFILE));
    // Statistics need one, too.
    calls::limit_descriptors(128);
}

fn echoes_with_few_descriptors(side: &Side) {
    calls::limit_descriptors(24);
    echoes(side);
}

fn asks_with_few_descriptors(side: &Side) {
    calls::limit_descriptors(24);
    asks(side);
}

/// What the connection itself needs is there; only then comes the shortage.
fn echoes_after(side: &Side, shortage: impl FnOnce()) {
    let fd = accept_one(side);
    shortage();
    say!("echoed {}", echo(fd));
}

fn asks_after(side: &Side, shortage: impl FnOnce()) {
    let fd = side.connect();
    shortage();
    ask(fd);
}

fn no_memfd() {
    forbid(libc::SYS_memfd_create, &[], Errno::ENOMEM);
}

fn echoes_without_memfd(side: &Side) {
    echoes_after(side, no_memfd);
}

fn no_memfd_and_echoes(side: &Side) {
    no_memfd();
    echoes(side);
}

fn may_make_no_memfd() {
    forbid(libc::SYS_memfd_create, &[], Errno::EACCES);
}

fn echoes_forbidden_memfd(side: &Side) {
    may_make_no_memfd();
    echoes(side);
}

fn asks_forbidden_memfd(side: &Side) {
    may_make_no_memfd();
    asks(side);
}

fn echoes_without_fallocate(side: &Side) {
    echoes_after(side, || forbid(libc::SYS_fallocate, &[], Errno::ENOSPC));
}

/// Bytes of address space that this process uses.
pub(super) fn mapped_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc is mounted");
    let size = status
        .lines()
        .find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix(" kB")?.parse().ok());
    let kilobytes: u64 = size.expect("a process has a size");
    kilobytes << 10
}

pub(super) fn no_address_space() {
    calls::limit_resource(libc::RLIMIT_AS, mapped_bytes() + (8 << 20));
}

fn echoes_without_address_space(side: &Side) {
    echoes_after(side, no_address_space);
}

fn asks_without_address_space(side: &Side) {
    asks_after(side, no_address_space);
}

/// A file that grows beyond this limit also raises SIGXFSZ, which kills.
fn small_files() {
    calls::limit_resource(libc::RLIMIT_FSIZE, 1 << 20);
}

fn echoes_with_small_files(side: &Side) {
    echoes_after(side, small_files);
}

fn small_files_and_echoes(side: &Side) {
    small_files();
    echoes(side);
}

fn no_netlink() {
    forbid(libc::SYS_socket, &[(0, libc::AF_NETLINK as u32)], Errno::EPERM);
}

fn echoes_without_netlink(side: &Side) {
    echoes_after(side, no_netlink);
}

fn asks_without_netlink(side: &Side) {
    asks_after(side, no_netlink);
}

fn forbid_sockets(family: i32, kind: i32, errno: Errno) {
    // As the library, and libc, ask for them.
    for flags in [libc::SOCK_CLOEXEC, libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK] {
        forbid(libc::SYS_socket, &[(0, family as u32), (1, (kind | flags) as u32)], errno);
    }
}

/// What AppArmor's profiles allow to who looks names up is `network netlink raw`.
fn only_raw_netlink() {
    forbid_sockets(libc::AF_NETLINK, libc::SOCK_DGRAM, Errno::EACCES);
}

fn echoes_with_raw_netlink(side: &Side) {
    echoes_after(side, only_raw_netlink);
}

fn asks_with_raw_netlink(side: &Side) {
    asks_after(side, only_raw_netlink);
}

fn asks_without_datagrams(side: &Side) {
    asks_after(side, || forbid_sockets(libc::AF_UNIX, libc::SOCK_DGRAM, Errno::EACCES));
}

fn no_packets() {
    forbid_sockets(libc::AF_UNIX, libc::SOCK_SEQPACKET, Errno::EACCES);
}

fn asks_without_packets(side: &Side) {
    asks_after(side, no_packets);
}

fn asks_without_messages(side: &Side) {
    asks_after(side, || forbid(libc::SYS_recvmsg, &[], Errno::EACCES));
}

fn echoes_without_packets(side: &Side) {
    echoes_after(side, no_packets);
}

const STREAM: usize = 4 << 20;

fn stream(fd: Fd, ours: u64, theirs: u64) {
    std::thread::scope(|scope| {
        scope.spawn(|| send_pattern(fd, &mut Pattern::new(ours), STREAM, 200_000));
        receive_pattern(fd, &mut Pattern::new(theirs), STREAM, 100_000);
    });
    say!("sent and received {STREAM}");
}

fn streams_without_fallocate(_side: &Side, fd: Fd) {
    forbid(libc::SYS_fallocate, &[], Errno::ENOSPC);
    stream(fd, 41, 42);
}

fn streams_with_small_files(_side: &Side, fd: Fd) {
    small_files();
    stream(fd, 41, 42);
}

fn streams_back(_side: &Side, fd: Fd) {
    stream(fd, 42, 41);
}

/// Bytes in flight at a time, while there is memory.
const PIECE: usize = 64 << 10;
/// Such pieces after which the window is wide and has memory for a part: it becomes wide at 16 MiB, within 512 KiB.
const PIECES: usize = (16 << 20) / PIECE + 12;

/// Memory for windows larger than 512 KiB comes in pieces of 256 KiB, of which there are no more from some moment on.
fn writes_much_without_memory(_side: &Side, fd: Fd) {
    const MADV_POPULATE_WRITE: u32 = 23;
    let mut pattern = Pattern::new(44);
    quietly(|| {
        let piece = pattern.take(PIECE);
        for _ in 0..PIECES {
            send_all(fd, &piece);
            assert_eq!(receive_exactly(fd, 1), b"g");
        }
        forbid(libc::SYS_madvise, &[(1, 256 << 10), (2, MADV_POPULATE_WRITE)], Errno::ENOMEM);
        send_all(fd, &pattern.take(STREAM));
        calls::set_nonblocking(fd, true).expect("fcntl");
        let end = pattern.position() + STREAM as u64;
        while pattern.position() < end {
            assert_eq!(calls::poll(&[(fd, libc::POLLOUT)], ARRIVAL), Ok(vec![libc::POLLOUT]));
            let piece = pattern.take(PIECE.min((end - pattern.position()) as usize));
            let sent = calls::send(fd, &piece, 0).expect("poll has told of room");
            pattern.put_back(piece.len() - sent);
        }
    });
    say!("sent");
}

fn reads_much(_side: &Side, fd: Fd) {
    let mut pattern = Pattern::new(44);
    quietly(|| {
        let piece = pattern.take(PIECE);
        for _ in 0..PIECES {
            assert!(receive_exactly(fd, PIECE) == piece);
            send_all(fd, b"g");
        }
        receive_pattern(fd, &mut pattern, 2 * STREAM, 100_000);
    });
    say!("received");
}

/// Sleeps for room when there is no descriptor left to wait with.
fn writes_without_descriptors<const TIMEOUT: u64>(side: &Side, fd: Fd) {
    calls::set_send_timeout(fd, Duration::from_secs(TIMEOUT)).expect("SO_SNDTIMEO");
    leave_descriptors(0);
    assert_eq!(calls::dup(fd), Err(Errno::EMFILE));
    let data = Pattern::new(43).take(LARGE);
    side.tell(std::process::id().into());
    assert_eq!(quietly(|| calls::send(fd, &data, 0)), Ok(LARGE));
    side.sync("done");
    // Statistics need one, too.
    calls::limit_descriptors(128);
}

fn reads_late(side: &Side, fd: Fd) {
    await_process_asleep(side.told() as libc::pid_t);
    receive_pattern(fd, &mut Pattern::new(43), LARGE, 100_000);
    side.sync("done");
}

/// More than any buffer takes.
const LARGE: usize = 16 << 20;

fn asks_confined(side: &Side) {
    asks_after(side, || calls::confine_to("/usr"));
}

fn echoes_confined(side: &Side) {
    echoes_after(side, || calls::confine_to("/usr"));
}

fn waits_without_memory(_side: &Side, fd: Fd) {
    request_echoes(fd, 10, 3000);
    let set = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(set, fd, libc::EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    say!("{:?}", calls::wait_without_memory(fd, set));
    request_echoes(fd, 10, 3000);
    calls::close(fd).expect("close");
}

fn echoes_on(_side: &Side, fd: Fd) {
    say!("echoed {}", echo(fd));
}

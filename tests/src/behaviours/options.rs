//! Questions to a socket and its settings: ioctl, fcntl, getsockopt.

use std::time::{Duration, Instant};

use super::peers::{drains_on_demand, fill};
use super::{Behaviour, Tally};
use crate::calls::{self, End, Errno, Family, Fd, quietly};
use crate::say;
use crate::side::{
    ARRIVAL, Side, await_readable, await_unread, listening_port, receive_exactly, while_blocked,
};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("unread_bytes", unread_bytes, sends_in_steps),
    Behaviour::connected("nonblocking_by_ioctl", nonblocking_by_ioctl, sends_in_steps),
    Behaviour::connected("nonblocking_by_fcntl", nonblocking_by_fcntl, sends_in_steps),
    Behaviour::connected("nonblocking_while_another_thread_reads", nonblocking_while_reading, sends_in_steps),
    Behaviour::connected(
        "nonblocking_while_another_thread_sends",
        nonblocking_while_sending,
        drains_on_demand,
    ),
    Behaviour::connected("what_a_socket_is", what_a_socket_is, waits),
    Behaviour::connected("options_of_tcp", options_of_tcp, waits),
    Behaviour::connected("corked_when_it_is_back", corks_what_is_back, counts_what_was_corked)
        .tcp_only()
        .alone(&["unsupported-call"])
        .tally(Tally::Returned(1), Tally::Returned(1)),
    Behaviour::connected("what_has_arrived_is_not_left_to_send", waits_for_arrival, reads_after_that)
        .tcp_only(),
    Behaviour::connected("addresses", addresses, waits),
    Behaviour::connected("unknown_questions", unknown_questions, waits),
    Behaviour::connected("low_water_mark_afterwards", low_water_mark, sends_in_steps)
        .alone(&["rcvlowat"])
        .limitation("**`SO_RCVLOWAT`**"),
    Behaviour::connected("new_stamps", new_stamps, waits)
        .alone(&["unsupported-call"])
        .tcp_only()
        .limitation("**`SO_TIMESTAMP*`"),
    Behaviour::whole("low_water_mark_before", low_water_mark_server, sends_in_steps_client, Tally::Total(1))
        .tally(Tally::Mixed(0, &[("rcvlowat", 1)]), Tally::Total(1))
        // poll(2) of one of `AF_UNIX` does not know the mark.
        .tcp_only(),
    Behaviour::connected("what_is_left", what_is_left, sends_in_steps).tcp_only(),
    Behaviour::whole(
        "what_is_left_by_inheritance",
        what_is_left_server,
        what_is_left_client,
        Tally::Upgraded(1),
    )
    .tcp_only(),
    Behaviour::connected("what_is_left_of_a_killed_peer", what_is_left_of_a_killed_peer, is_killed)
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .end(End::Exit(0), End::Signal(libc::SIGKILL))
        .tcp_only(),
];

/// The steps of [`sends_in_steps`], in bytes.
const STEPS: [usize; 3] = [5, 10, 300];

fn sends_in_steps(side: &Side, fd: Fd) {
    for step in STEPS {
        side.sync("send now");
        assert_eq!(calls::send(fd, &vec![b's'; step], 0), Ok(step));
        side.sync("sent");
    }
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    side.sync("done");
}

fn sends_in_steps_client(side: &Side) {
    let fd = side.connect();
    sends_in_steps(side, fd);
}

fn waits(side: &Side, _fd: Fd) {
    side.sync("done");
}

fn unread_bytes(side: &Side, fd: Fd) {
    assert_eq!(calls::unread(fd), Ok(0));
    let mut total = 0;
    for step in STEPS {
        side.sync("send now");
        side.sync("sent");
        total += step;
        await_unread(fd, total);
        assert_eq!(calls::unread(fd), Ok(total));
    }
    side.sync("done");
    let _ = calls::recv(fd, 15, 0);
    assert_eq!(calls::unread(fd), Ok(300));
    let _ = calls::recv(fd, 1000, 0);
    let _ = calls::unread(fd);
    let _ = calls::recv(fd, 1000, 0);
    let _ = calls::unread(fd);
}

fn nonblocking_by_ioctl(side: &Side, fd: Fd) {
    nonblocking(side, fd, |fd, on| calls::set_nonblocking(fd, on).expect("FIONBIO"));
}

fn nonblocking_by_fcntl(side: &Side, fd: Fd) {
    nonblocking(side, fd, |fd, on| {
        let flags = calls::status(fd).expect("F_GETFL");
        let flags = if on { flags | libc::O_NONBLOCK } else { flags & !libc::O_NONBLOCK };
        calls::set_status(fd, flags).expect("F_SETFL");
    });
}

fn nonblocking(side: &Side, fd: Fd, set: fn(Fd, bool)) {
    set(fd, true);
    let _ = calls::status(fd);
    assert_eq!(calls::recv(fd, 10, 0), Err(Errno::EAGAIN));
    assert_eq!(calls::read(fd, 10), Err(Errno::EAGAIN));
    assert_eq!(calls::recvmsg(fd, &[10], 0, 0).err(), Some(Errno::EAGAIN));
    set(fd, false);
    let _ = calls::status(fd);
    assert_eq!(while_blocked(|| calls::recv(fd, 10, 0), || side.sync("send now")), Ok(b"sssss".to_vec()));
    side.sync("sent");
    set(fd, true);
    side.sync("send now");
    side.sync("sent");
    await_readable(fd);
    assert_eq!(calls::recv(fd, 100, 0).map(|data| data.len()), Ok(10));
    assert_eq!(calls::recv(fd, 100, 0), Err(Errno::EAGAIN));
    set(fd, false);
    assert_eq!(
        while_blocked(|| calls::recv(fd, 300, 0), || side.sync("send now")).map(|data| data.len()),
        Ok(300)
    );
    side.sync("sent");
    side.sync("done");
}

fn nonblocking_while_reading(side: &Side, fd: Fd) {
    // A call that has begun to wait goes on waiting.
    let data = while_blocked(
        || calls::recv(fd, 10, 0),
        || {
            calls::quietly(|| calls::set_nonblocking(fd, true)).expect("FIONBIO");
            side.sync("send now");
            side.sync("sent");
        },
    );
    assert_eq!(data, Ok(b"sssss".to_vec()));
    assert_eq!(calls::recv(fd, 10, 0), Err(Errno::EAGAIN));
    for _ in 1..STEPS.len() {
        side.sync("send now");
        side.sync("sent");
    }
    receive_exactly_nonblocking(fd, 310);
    side.sync("done");
}

fn nonblocking_while_sending(side: &Side, fd: Fd) {
    let filled = fill(fd);
    side.sync("full");
    let piece = vec![b'f'; 1 << 20];
    side.tell((filled + piece.len()) as u64);
    let sent = while_blocked(
        || calls::send(fd, &piece, 0),
        || {
            calls::quietly(|| calls::set_nonblocking(fd, true)).expect("FIONBIO");
            side.sync("drain now");
        },
    );
    assert_eq!(sent, Ok(piece.len()));
    side.sync("drained");
    fill(fd);
    assert_eq!(calls::quietly(|| calls::send(fd, &piece, 0)), Err(Errno::EAGAIN));
    side.sync("done");
}

fn receive_exactly_nonblocking(fd: Fd, len: usize) {
    await_unread(fd, len);
    assert_eq!(receive_exactly(fd, len).len(), len);
}

fn what_a_socket_is(side: &Side, fd: Fd) {
    for name in [
        libc::SO_TYPE,
        libc::SO_DOMAIN,
        libc::SO_PROTOCOL,
        libc::SO_ACCEPTCONN,
        libc::SO_ERROR,
        libc::SO_KEEPALIVE,
        libc::SO_OOBINLINE,
        libc::SO_RCVLOWAT,
        libc::SO_SNDLOWAT,
    ] {
        let _ = calls::option(fd, libc::SOL_SOCKET, name);
    }
    let _ = calls::status(fd);
    let _ = calls::closes_on_exec(fd);
    let _ = calls::file_kind(fd);
    side.sync("done");
}

fn options_of_tcp(side: &Side, fd: Fd) {
    for name in [libc::TCP_NODELAY, libc::TCP_CORK, libc::TCP_QUICKACK] {
        for value in [1, 0] {
            let is_set = calls::set_option(fd, libc::IPPROTO_TCP, name, value).is_ok();
            assert_eq!(is_set, side.family != Family::Unix);
            let _ = calls::option(fd, libc::IPPROTO_TCP, name);
        }
    }
    for (name, value) in [
        (libc::SO_KEEPALIVE, 1),
        (libc::SO_RCVBUF, 100_000),
        (libc::SO_SNDBUF, 100_000),
        (libc::SO_BUSY_POLL, 0),
    ] {
        let _ = calls::set_option(fd, libc::SOL_SOCKET, name, value);
        let _ = calls::option(fd, libc::SOL_SOCKET, name);
    }
    let _ = calls::set_option(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 30_000);
    let _ = calls::option(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT);
    side.sync("done");
}

/// How many small messages are held back until there is no cork any more.
const CORKED: usize = 10;

/// Only the kernel sends from a socket into a pipe. What it holds back it sends in one segment; in two if that takes 200 ms (tcp(7)).
fn corks_what_is_back(side: &Side, fd: Fd) {
    let cork = |on| assert_eq!(calls::set_option(fd, libc::IPPROTO_TCP, libc::TCP_CORK, on), Ok(0));
    let sends_few_segments = || {
        let before = calls::segments_sent(fd);
        for _ in 0..CORKED {
            assert_eq!(calls::send(fd, b"x", 0), Ok(1));
        }
        cork(0);
        let segments = calls::segments_sent(fd) - before;
        assert!(segments < CORKED as u32 / 2, "{segments} segments");
    };
    side.send_at_once(fd);
    cork(1);
    let (reading, writing) = calls::pipe().expect("pipe");
    await_readable(fd);
    assert_eq!(calls::sendfile(writing, fd, 5), Ok(5));
    assert_eq!(calls::read(reading, 10), Ok(b"begin".to_vec()));
    sends_few_segments();
    for _ in 0..2 {
        cork(1);
        assert_eq!(calls::option(fd, libc::IPPROTO_TCP, libc::TCP_CORK), Ok(1));
        sends_few_segments();
    }
    side.sync("done");
}

fn counts_what_was_corked(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"begin", 0), Ok(5));
    assert_eq!(receive_exactly(fd, 3 * CORKED), [b'x'; 3 * CORKED]);
    side.sync("done");
}

/// The other side's kernel acknowledges what has come, whether its program reads that or not.
fn waits_for_arrival(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, &[b'x'; 5000], 0), Ok(5000));
    let begun = Instant::now();
    while quietly(|| calls::unsent(fd)) != Ok(0) {
        assert!(begun.elapsed() < Duration::from_millis(ARRIVAL as u64), "it never arrives");
        std::thread::yield_now();
    }
    side.sync("arrived");
    side.sync("done");
}

fn reads_after_that(side: &Side, fd: Fd) {
    side.sync("arrived");
    assert_eq!(receive_exactly(fd, 5000).len(), 5000);
    side.sync("done");
}

fn addresses(side: &Side, fd: Fd) {
    let local = calls::local_address(fd).expect("getsockname");
    let peer = calls::peer_address(fd).expect("getpeername");
    assert_ne!(local, peer);
    side.sync("done");
}

fn unknown_questions(side: &Side, fd: Fd) {
    let _ = calls::option(fd, libc::SOL_SOCKET, 9999);
    let _ = calls::option(fd, 9999, 1);
    let _ = calls::set_option(fd, libc::IPPROTO_TCP, 9999, 1);
    let _ = calls::set_option(fd, libc::SOL_SOCKET, libc::SO_TYPE, 1);
    side.sync("done");
}

/// `SO_TIMESTAMP_NEW`, which libc does not know.
fn new_stamps(side: &Side, fd: Fd) {
    calls::set_option(fd, libc::SOL_SOCKET, 63, 1).expect("SO_TIMESTAMP_NEW");
    side.sync("done");
}

/// `SO_RCVLOWAT`: neither recv nor poll stirs below the mark.
fn low_water_mark(side: &Side, fd: Fd) {
    calls::set_option(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 15).expect("SO_RCVLOWAT");
    side.sync("send now");
    side.sync("sent");
    await_unread(fd, 5);
    assert_eq!(calls::poll(&[(fd, libc::POLLIN)], 0), Ok(vec![0]));
    // The kernel's recv counts from where it stands: had it taken the five bytes, it would want 15 more.
    let send_more = || {
        side.sync("send now");
        side.sync("sent");
    };
    assert_eq!(while_blocked(|| calls::poll(&[(fd, libc::POLLIN)], -1), send_more), Ok(vec![libc::POLLIN]));
    assert_eq!(calls::recv(fd, 100, 0).map(|data| data.len()), Ok(15));
    assert_eq!(while_blocked(|| calls::recv(fd, 1000, 0), send_more).map(|data| data.len()), Ok(300));
    side.sync("done");
    // The end counts as readable whatever the mark.
    assert_eq!(calls::recv(fd, 1000, 0), Ok(vec![]));
    say!("end");
}

fn low_water_mark_server(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    low_water_mark(side, fd);
}

/// Room for one control message with an integer.
const ROOM: usize = 24;

/// `TCP_INQ`, on an upgraded connection or not: 315 bytes come, then the end.
fn what_is_left(side: &Side, fd: Fd) {
    let _ = calls::option(fd, libc::IPPROTO_TCP, libc::TCP_INQ);
    assert!(calls::set_option(fd, libc::IPPROTO_TCP, libc::TCP_INQ, 2).is_err());
    calls::set_option(fd, libc::IPPROTO_TCP, libc::TCP_INQ, 1).expect("TCP_INQ");
    reads_what_is_left(side, fd);
}

fn reads_what_is_left(side: &Side, fd: Fd) {
    assert_eq!(calls::option(fd, libc::IPPROTO_TCP, libc::TCP_INQ), Ok(1));
    assert_eq!(calls::recvmsg_control(fd, 10, ROOM, libc::MSG_DONTWAIT), Err(Errno::EAGAIN));
    side.sync("send now");
    side.sync("sent");
    await_unread(fd, 5);
    assert_eq!(calls::recvmsg_control(fd, 3, ROOM, libc::MSG_PEEK), Ok((3, Some(5))));
    assert_eq!(calls::recvmsg_control(fd, 2, ROOM, 0), Ok((2, Some(3))));
    for room in 0..=40 {
        let _ = calls::recvmsg_control(fd, 0, room, 0);
    }
    calls::set_option(fd, libc::IPPROTO_TCP, libc::TCP_INQ, 0).expect("TCP_INQ");
    assert_eq!(calls::recvmsg_control(fd, 1, ROOM, 0), Ok((1, None)));
    calls::set_option(fd, libc::IPPROTO_TCP, libc::TCP_INQ, 1).expect("TCP_INQ");
    assert_eq!(calls::recvmsg_control(fd, 9, ROOM, 0), Ok((2, Some(0))));
    let _ = calls::recvmmsg(fd, &[1, 1], libc::MSG_DONTWAIT);
    for _ in 1..STEPS.len() {
        side.sync("send now");
        side.sync("sent");
    }
    side.sync("done");
    await_end(fd);
    assert_eq!(calls::recvmsg_control(fd, 300, ROOM, libc::MSG_WAITALL), Ok((300, Some(11))));
    assert_eq!(calls::recvmsg_control(fd, 10, ROOM, 0), Ok((10, Some(1))));
    assert_eq!(calls::recvmsg_control(fd, 10, ROOM, 0), Ok((0, Some(1))));
    assert_eq!(calls::recvmsg_control(fd, 10, ROOM, libc::MSG_PEEK), Ok((0, Some(1))));
}

/// Waits until the end of the stream has come, whatever lies before it.
fn await_end(fd: Fd) {
    let ready = calls::quietly(|| calls::poll(&[(fd, libc::POLLRDHUP)], ARRIVAL)).expect("poll");
    assert_ne!(ready[0] & libc::POLLRDHUP, 0, "no end came");
}

fn what_is_left_server(side: &Side) {
    let listener = side.listen_quietly();
    calls::set_option(listener, libc::IPPROTO_TCP, libc::TCP_INQ, 1).expect("TCP_INQ");
    side.tell(u64::from(listening_port(listener)));
    let fd = side.accept(listener);
    side.answer_warm_up(fd);
    reads_what_is_left(side, fd);
}

fn what_is_left_client(side: &Side) {
    let fd = side.connect();
    side.warm_up(fd);
    sends_in_steps(side, fd);
}

fn what_is_left_of_a_killed_peer(side: &Side, fd: Fd) {
    calls::set_option(fd, libc::IPPROTO_TCP, libc::TCP_INQ, 1).expect("TCP_INQ");
    side.sync("send now");
    await_end(fd);
    assert_eq!(calls::recvmsg_control(fd, 5, ROOM, 0), Ok((5, Some(6))));
    assert_eq!(calls::recvmsg_control(fd, 9, ROOM, 0), Ok((5, Some(1))));
    assert_eq!(calls::recvmsg_control(fd, 9, ROOM, 0), Ok((0, Some(1))));
}

fn is_killed(side: &Side, fd: Fd) {
    side.sync("send now");
    assert_eq!(calls::send(fd, b"0123456789", 0), Ok(10));
    calls::kill_self();
}

//! What came by the kernel's socket before the connection left that, and is still unread, here or on its way, long after.

use super::peers::{fill, send_all};
use super::switching::is_seen_to_wait;
use super::{Behaviour, Tally};
use crate::calls::{self, End, Errno, Family, Fd, quietly};
use crate::say;
use crate::side::{
    ARRIVAL, Pattern, Side, await_end_of, await_readable, await_unread, receive_exactly,
    receive_pattern_to_end, while_blocked,
};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::whole("room_for_who_reads_nothing", sends_first, waits_for_room, Tally::Upgraded(1))
        .environment(SMALL),
    Behaviour::whole(
        "room_for_who_reads_nothing_more",
        sends_first,
        waits_for_edges_of_room,
        Tally::Upgraded(1),
    )
    .environment(SMALL),
    Behaviour::whole("exit_behind_much", sends_first_and_exits, reads_when_it_is_over, Tally::Upgraded(2))
        .environment(ASLEEP),
    Behaviour::whole("kill_behind_much", sends_first_and_dies, reads_when_it_is_over, Tally::Upgraded(2))
        .tally(Tally::Unknown, Tally::Upgraded(2))
        .end(End::Signal(libc::SIGKILL), End::Exit(0))
        .environment(ASLEEP),
    // It goes back when little is unread, if it comes to that.
    Behaviour::connected("many_splices_beside_reads", splices_or_reads, streams)
        .tally(Tally::AtLeast(1, 1), Tally::AtLeast(1, 1))
        .takes_long(),
    Behaviour::whole(
        "reported_beside_a_full_socket",
        waits_above_a_full_socket,
        reads_at_last,
        Tally::Upgraded(1),
    ),
];

/// Rings that are full soon.
const SMALL: &[(&str, &str)] = &[("THALLUS_RING", "64K")];
/// Who waits sleeps, and is rung for.
const ASLEEP: &[(&str, &str)] = &[("THALLUS_SPIN_US", "0")];
const SEED: u64 = 61;
/// Calls at each end, by which the connection leaves the kernel's socket.
const ROUNDS: u64 = 40;
/// Bytes that follow many splices.
const MUCH: u64 = 4 << 20;
/// Bytes that a writer that reads nothing sends in the end: more than the kernel's buffers of a connection whose peer does not read: the sender's grows to 4 MiB (`tcp_wmem`), at once where earlier
/// connections have been fast (`tcp_metrics`).
const TOO_MUCH: u64 = 16 << 20;

/// More than a reader's kernel takes at first, and less than a sender's does.
fn leftover(side: &Side) -> usize {
    if side.family == Family::Unix { 1000 } else { 500_000 }
}

/// One byte asks for it.
fn sends_leftover(side: &Side, fd: Fd) {
    assert_eq!(calls::recv(fd, 1, 0), Ok(b"g".to_vec()));
    let data = Pattern::new(SEED).take(leftover(side));
    assert_eq!(quietly(|| calls::send(fd, &data, libc::MSG_DONTWAIT)), Ok(data.len()));
    side.sync("sent");
}

fn asks_for_leftover(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"g", 0), Ok(1));
    side.sync("sent");
}

/// The other side sends, and reads nothing.
fn hears(side: &Side, fd: Fd) {
    for _ in 0..ROUNDS {
        // Or the connection would stay on TCP: it waits.
        quietly(|| calls::poll(&[(fd, libc::POLLIN)], 0)).expect("poll");
        side.sync("hears");
        assert_eq!(quietly(|| calls::recv(fd, 1, 0)), Ok(b"n".to_vec()));
    }
}

fn speaks(side: &Side, fd: Fd, waits: impl Fn()) {
    for _ in 0..ROUNDS {
        waits();
        side.sync("hears");
        assert_eq!(quietly(|| calls::send(fd, b"n", 0)), Ok(1));
    }
}

fn sends_first(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    sends_leftover(side, fd);
    hears(side, fd);
    side.sync("full");
    let mut pattern = Pattern::new(SEED + 1);
    let total = receive_pattern_to_end(fd, &mut pattern);
    say!("{total} bytes came");
}

fn waits_for_room(side: &Side) {
    writes_much(side, libc::EPOLLOUT);
}

fn waits_for_edges_of_room(side: &Side) {
    writes_much(side, libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET);
}

/// An event loop that sends all before it reads.
fn writes_much(side: &Side, events: libc::c_int) {
    // Too few for the library to be woken by anything but the connection's own socket.
    calls::limit_descriptors(200);
    let fd = side.connect();
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    let set = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(set, fd, events, 1).expect("EPOLL_CTL_ADD");
    asks_for_leftover(side, fd);
    speaks(side, fd, || drop(quietly(|| calls::epoll_wait(set, 4, 0))));
    let mut pattern = Pattern::new(SEED + 1);
    let mut is_full = false;
    while pattern.position() < TOO_MUCH {
        let data = pattern.take((TOO_MUCH - pattern.position()).min(65536) as usize);
        match quietly(|| calls::send(fd, &data, libc::MSG_NOSIGNAL)) {
            Ok(sent) => pattern.put_back(data.len() - sent),
            Err(error) => {
                assert_eq!(error, Errno::EAGAIN);
                pattern.put_back(data.len());
                if !std::mem::replace(&mut is_full, true) {
                    side.sync("full");
                }
                let ready = quietly(|| calls::epoll_wait(set, 4, ARRIVAL)).expect("epoll_wait");
                assert!(!ready.is_empty(), "no room after {pattern:?}");
            }
        }
    }
    say!("{} bytes went", pattern.position());
    assert_eq!(calls::shutdown(fd, libc::SHUT_WR), Ok(0));
    calls::set_nonblocking(fd, false).expect("FIONBIO");
    assert_eq!(receive_pattern_to_end(fd, &mut Pattern::new(SEED)), leftover(side));
}

fn sends_first_and_exits(side: &Side) {
    serves_two(side);
    // Neither is closed.
    std::process::exit(0);
}

fn sends_first_and_dies(side: &Side) {
    serves_two(side);
    calls::kill_self();
}

/// An event loop that has sent much to one client, and then hears from it, now and then from that one alone, and in the end from it again.
fn serves_two(side: &Side) {
    let listener = side.listen();
    let clients = [side.accept(listener), side.accept(listener)];
    sends_leftover(side, clients[0]);
    side.tell(u64::from(std::process::id()));
    let set = calls::epoll_create().expect("epoll_create1");
    for (data, fd) in (0..).zip(clients) {
        calls::epoll_add(set, fd, libc::EPOLLIN, data).expect("EPOLL_CTL_ADD");
    }
    quietly(|| {
        loop {
            for ready in calls::epoll_wait(set, 1, ARRIVAL).expect("epoll_wait") {
                let fd = clients[ready.data as usize];
                let request = calls::recv(fd, 1, 0).expect("recv");
                match request.as_slice() {
                    b"p" => assert_eq!(calls::send(fd, b"p", 0), Ok(1)),
                    b"n" => {}
                    _ => return,
                }
            }
        }
    });
}

fn reads_when_it_is_over(side: &Side) {
    let destination = side.destination();
    let clients = [(); 2].map(|()| side.connect_to(destination));
    asks_for_leftover(side, clients[0]);
    let server = side.told() as libc::pid_t;
    let exchange = |fd| {
        assert_eq!(calls::send(fd, b"p", 0), Ok(1));
        assert_eq!(calls::recv(fd, 1, 0), Ok(b"p".to_vec()));
    };
    quietly(|| {
        for _ in 0..ROUNDS {
            assert_eq!(calls::send(clients[0], b"n", 0), Ok(1));
            exchange(clients[1]);
        }
        for _ in 0..ROUNDS {
            exchange(clients[1]);
        }
        assert_eq!(calls::send(clients[0], b"q", 0), Ok(1));
    });
    await_end_of(server);
    let total = receive_pattern_to_end(clients[0], &mut Pattern::new(SEED));
    say!("{total} bytes of {}", leftover(side));
}

/// More than a side believes of requests of the other's in a row.
const SPLICES: usize = 10_100;
const PIECE: usize = 4096;

/// Asks for a splice before each read. The library has none as long as much is unread, and says so.
fn splices_or_reads(side: &Side, fd: Fd) {
    let (reading, writing) = calls::pipe().expect("pipe");
    let mut pattern = Pattern::new(SEED);
    side.sync("full");
    quietly(|| {
        for _ in 0..SPLICES {
            let data = match calls::splice(fd, writing, PIECE) {
                Ok(moved) => calls::read(reading, moved).expect("read"),
                Err(error) => {
                    assert_eq!(error, Errno::EINVAL);
                    calls::recv(fd, PIECE, libc::MSG_WAITALL).expect("recv")
                }
            };
            assert!(!data.is_empty(), "the stream has ended");
            pattern.expect(&data);
        }
    });
    let rest = receive_pattern_to_end(fd, &mut pattern);
    say!("{} bytes", pattern.position());
    assert!(rest > 0, "nothing was left");
}

fn streams(side: &Side, fd: Fd) {
    let mut pattern = Pattern::new(SEED);
    let mut has_begun = false;
    let total = (SPLICES * PIECE) as u64 + MUCH;
    while pattern.position() < total {
        let data = pattern.take((total - pattern.position()).min(256 << 10) as usize);
        let sent = quietly(|| calls::send(fd, &data, if has_begun { 0 } else { libc::MSG_DONTWAIT }));
        pattern.put_back(data.len() - sent.unwrap_or(0));
        if sent.is_err() {
            assert!(!has_begun, "{sent:?}");
            has_begun = true;
            side.sync("full");
        }
    }
    assert_eq!(calls::shutdown(fd, libc::SHUT_WR), Ok(0));
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
}

/// What the client has sent is reported, though the socket beneath is full of what it does not read: to a thread that sleeps on the set
/// already when the connection is registered, or asked for anew, and to who waits for the set.
fn waits_above_a_full_socket(side: &Side) {
    const EVENTS: [libc::c_int; 3] =
        [libc::EPOLLIN, libc::EPOLLIN | libc::EPOLLET, libc::EPOLLIN | libc::EPOLLONESHOT];
    let listener = side.listen();
    let fd = calls::accept4(listener, libc::SOCK_NONBLOCK).expect("accept4");
    side.sync("asked");
    await_readable(fd);
    let total = fill(fd);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"ask".to_vec()));
    for _ in 0..20 {
        is_seen_to_wait(fd);
        assert_eq!(quietly(|| calls::recv(fd, 10, 0)), Err(Errno::EAGAIN));
    }
    side.sync("full");
    side.sync("sent");
    await_unread(fd, SENT);
    let wait = |epfd| quietly(|| calls::epoll_wait(epfd, 4, -1)).expect("epoll_wait");
    let is_told =
        |ready: &[calls::Ready]| ready.len() == 1 && ready[0].has(libc::EPOLLIN) && ready[0].data == 7;
    for events in EVENTS {
        let set = || {
            let set = calls::epoll_create().expect("epoll_create1");
            let add = move || {
                calls::epoll_add(set, fd, events, 7).expect("EPOLL_CTL_ADD");
            };
            (set, add)
        };
        let (epfd, add) = set();
        assert!(is_told(&while_blocked(|| wait(epfd), add)));
        let again = || {
            calls::epoll_modify(epfd, fd, events, 7).expect("EPOLL_CTL_MOD");
        };
        if events == EVENTS[0] {
            assert!(is_told(&wait(epfd)));
        } else {
            assert!(is_told(&while_blocked(|| wait(epfd), again)));
            assert_eq!(calls::epoll_wait(epfd, 4, 0), Ok(vec![]));
        }
        let (inner, add) = set();
        let outer = calls::epoll_create().expect("epoll_create1");
        calls::epoll_add(outer, inner, libc::EPOLLIN, 1).expect("EPOLL_CTL_ADD");
        assert_eq!(while_blocked(|| wait(outer), add).len(), 1);
        assert_eq!(calls::poll(&[(inner, libc::POLLIN)], ARRIVAL), Ok(vec![libc::POLLIN]));
        assert!(is_told(&wait(inner)));
        let is_left = events == EVENTS[0];
        assert_eq!(calls::epoll_wait(outer, 4, 0).map(|ready| ready.len()), Ok(usize::from(is_left)));
        for set in [epfd, inner, outer] {
            calls::close(set).expect("close");
        }
    }
    side.tell(total as u64);
    calls::set_nonblocking(fd, false).expect("FIONBIO");
    quietly(|| receive_exactly(fd, SENT));
    side.sync("done");
}

const SENT: usize = 400;

fn reads_at_last(side: &Side) {
    let fd = side.connect();
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    send_all(fd, b"ask");
    for _ in 0..20 {
        is_seen_to_wait(fd);
        assert_eq!(quietly(|| calls::recv(fd, 1, 0)), Err(Errno::EAGAIN));
    }
    side.sync("asked");
    side.sync("full");
    quietly(|| {
        for _ in 0..SENT / 10 {
            assert_eq!(calls::send(fd, b"0123456789", 0), Ok(10));
            is_seen_to_wait(fd);
        }
    });
    side.sync("sent");
    let total = side.told() as usize;
    calls::set_nonblocking(fd, false).expect("FIONBIO");
    quietly(|| receive_exactly(fd, total));
    side.sync("done");
}

//! Reports that must not be lost, nor told twice: of bytes that the library had put aside, to each of several registrations of
//! one connection, and to several threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use libc::{EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLLRDNORM};

use super::peers::{demand, drains_on_demand, fill, request_echoes, send_all, sends_on_demand, stop};
use super::{Behaviour, Tally};
use crate::calls::{self, Errno, Fd, quietly};
use crate::say;
use crate::side::{Side, await_readable, await_unread, receive_exactly, while_blocked};

/// Calls after which a side has left TCP, if the other one is there.
const CALLS: usize = 20;

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::whole("put_aside", bytes_put_aside, sends_over_tcp_and_is_ready, Tally::Upgraded(1)),
    Behaviour::whole(
        "as_much_as_was_put_aside",
        as_much_as_was_put_aside,
        sends_over_tcp_and_is_ready,
        Tally::Upgraded(1),
    ),
    Behaviour::whole("asked_again_while_on_tcp", asks_again, sends_over_tcp_and_talks, Tally::Upgraded(1)),
    Behaviour::whole(
        "room_beside_bytes_on_tcp",
        room_beside_bytes,
        sends_over_tcp_and_is_ready,
        Tally::Upgraded(1),
    ),
    Behaviour::connected(
        "room_of_one_that_goes_back_and_never_sleeps",
        asks_for_room_and_splices,
        awaits_the_other,
    )
    .alone(&["unsupported-call"])
    .tally(Tally::Returned(1), Tally::Total(1)),
    Behaviour::whole(
        "room_of_one_that_was_never_waited_for",
        serves_without_a_wait,
        asks_much,
        Tally::Upgraded(1),
    ),
    Behaviour::connected("room_for_two_sets", room_for_two_sets, drains_on_demand),
    Behaviour::connected("room_for_two_descriptors", room_for_two_descriptors, drains_on_demand),
    Behaviour::connected("the_sets_first_descriptor_is_closed", closes_first_descriptor, sends_on_demand),
    Behaviour::connected("one_name_for_two_descriptors", one_name_for_two, sends_on_demand),
    Behaviour::connected("one_name_and_one_event_at_a_time", one_event_at_a_time, sends_on_demand),
    Behaviour::connected("one_name_with_a_level", |side, fd| name_with_event(side, fd, 0), sends_on_demand),
    Behaviour::connected(
        "one_name_with_an_edge",
        |side, fd| name_with_event(side, fd, EPOLLET),
        sends_on_demand,
    ),
    Behaviour::connected("one_name_and_one_is_taken_out", one_is_taken_out, sends_on_demand),
    Behaviour::connected("a_name_that_is_used_again", name_used_again, sends_on_demand),
    Behaviour::whole("told_to_one_of_many", many_threads_serve, many_ask, Tally::Upgraded(MANY as u64)),
    Behaviour::whole(
        "told_to_one_of_many_beside_others",
        many_threads_serve_beside_others,
        many_ask,
        Tally::Upgraded(MANY as u64),
    ),
];

/// Connections in a set on which several threads wait.
const MANY: usize = 8;
const THREADS: usize = 6;
/// Requests on each of them.
const REQUESTS: usize = 2000;

const IN: u32 = EPOLLIN as u32;
const OUT: u32 = EPOLLOUT as u32;
const RDNORM: u32 = EPOLLRDNORM as u32;

/// What a set of one entry has to report, which must come.
fn later(epfd: Fd) -> u32 {
    let ready = calls::epoll_wait(epfd, 8, -1).expect("epoll_wait");
    assert_eq!(ready.len(), 1);
    ready[0].events
}

/// Waits for all of `events`, however many calls tell of them, `most` at a time.
fn gather(epfd: Fd, most: usize, events: u32) {
    let mut seen = 0;
    while seen & events != events {
        let ready = quietly(|| calls::epoll_wait(epfd, most, -1)).expect("epoll_wait");
        seen |= ready.iter().fold(0, |seen, ready| seen | ready.events);
    }
}

/// As [`with_bytes_on_tcp`], by calls that find room.
pub(super) fn with_room_beside_bytes(side: &Side) -> (Fd, Fd) {
    let wait = |fd| assert_eq!(calls::poll(&[(fd, libc::POLLOUT)], -1), Ok(vec![libc::POLLOUT]));
    with_bytes_on_tcp(side, wait)
}

/// The same once the other side has made sure that it can leave TCP, too: who sleeps then, and not for bytes, has put them aside.
pub(super) fn with_bytes_put_aside(side: &Side) -> (Fd, Fd) {
    let (epfd, fd) = with_room_beside_bytes(side);
    side.sync("look now");
    side.sync("looked");
    assert_eq!(calls::poll(&[(fd, libc::POLLRDHUP)], 1), Ok(vec![0]));
    (epfd, fd)
}

/// The other side of [`with_bytes_put_aside`].
pub(super) fn sends_over_tcp_and_looks(side: &Side) -> Fd {
    let fd = sends_over_tcp(side);
    side.sync("look now");
    look_in_vain(fd);
    side.sync("looked");
    fd
}

/// Leaves the bytes on TCP where they are.
fn peek(fd: Fd) {
    assert_eq!(calls::recv(fd, 1, libc::MSG_PEEK), Ok(b"m".to_vec()));
}

/// A connection in an edge-triggered set that has read "data"; "more" has come over TCP since, and this side alone has left TCP, by
/// making one `call` after the other.
pub(super) fn with_bytes_on_tcp(side: &Side, call: impl Fn(Fd)) -> (Fd, Fd) {
    let listener = side.listen();
    side.sync("asked");
    let fd = calls::accept4(listener, libc::SOCK_NONBLOCK).expect("accept4");
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, EPOLLIN | EPOLLET, 1).expect("EPOLL_CTL_ADD");
    assert_eq!(later(epfd), IN);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    side.sync("more");
    side.sync("sent");
    quietly(|| {
        for _ in 0..CALLS {
            call(fd);
        }
    });
    (epfd, fd)
}

fn sends_over_tcp_and_talks(side: &Side) {
    let fd = sends_over_tcp(side);
    talks(side, fd, CALLS);
}

/// The other side of [`with_bytes_on_tcp`].
pub(super) fn sends_over_tcp(side: &Side) -> Fd {
    let destination = side.destination();
    let fd = side.connect_to(destination);
    look_in_vain(fd);
    send_all(fd, b"data");
    side.sync("asked");
    side.sync("more");
    send_all(fd, b"more");
    side.sync("sent");
    fd
}

/// Of room nobody has been told when the connection goes back to TCP, and no wait sleeps, before which the kernel would be asked for it.
fn asks_for_room_and_splices(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, EPOLLIN | EPOLLOUT | EPOLLET, 1).expect("EPOLL_CTL_ADD");
    let (_, input) = calls::pipe().expect("pipe");
    calls::set_nonblocking(fd, true).expect("F_SETFL");
    assert_eq!(calls::splice(fd, input, 5), Err(Errno::EAGAIN));
    for _ in 0..2 {
        let _ = calls::epoll_wait(epfd, 4, 0);
    }
    side.sync("spliced");
}

fn awaits_the_other(side: &Side, _fd: Fd) {
    side.sync("spliced");
}

pub(super) fn look_in_vain(fd: Fd) {
    quietly(|| {
        for _ in 0..CALLS {
            assert_eq!(calls::recv(fd, 1, libc::MSG_DONTWAIT), Err(Errno::EAGAIN));
        }
    });
}

fn talks(side: &Side, fd: Fd, times: usize) {
    for _ in 0..times {
        side.sync("send now");
        send_all(fd, b"talk");
        assert_eq!(quietly(|| receive_exactly(fd, 4)), b"talk");
    }
    side.sync("done");
}

fn sends_over_tcp_and_is_ready(side: &Side) {
    let fd = sends_over_tcp_and_looks(side);
    talks(side, fd, CALLS);
}

fn exchange(side: &Side, epfd: Fd, fd: Fd) {
    let ready = while_blocked(|| calls::epoll_wait(epfd, 8, -1), || side.sync("send now"));
    assert_eq!(ready.expect("epoll_wait").len(), 1);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"talk".to_vec()));
    assert_eq!(calls::recv(fd, 10, 0), Err(Errno::EAGAIN));
    send_all(fd, b"talk");
}

fn bytes_put_aside(side: &Side) {
    let (epfd, fd) = with_bytes_put_aside(side);
    assert_eq!(later(epfd), IN);
    assert_eq!(calls::epoll_wait(epfd, 8, 0), Ok(vec![]));
    assert_eq!(calls::recv(fd, 3, libc::MSG_PEEK), Ok(b"mor".to_vec()));
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"more".to_vec()));
    assert_eq!(calls::recv(fd, 10, 0), Err(Errno::EAGAIN));
    for _ in 0..CALLS {
        exchange(side, epfd, fd);
    }
    side.sync("done");
}

/// What comes once the bytes put aside have been read is an edge, though there is as much to be read as before.
fn as_much_as_was_put_aside(side: &Side) {
    let (epfd, fd) = with_bytes_put_aside(side);
    side.sync("send now");
    await_unread(fd, 8);
    assert_eq!(later(epfd), IN);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"moretalk".to_vec()));
    assert_eq!(calls::recv(fd, 10, 0), Err(Errno::EAGAIN));
    send_all(fd, b"talk");
    for _ in 1..CALLS {
        exchange(side, epfd, fd);
    }
    side.sync("done");
}

/// Asked once more, an edge-triggered set tells of the bytes again, though they are still on TCP.
fn asks_again(side: &Side) {
    let (epfd, fd) = with_bytes_on_tcp(side, peek);
    for data in [1, 1, 2] {
        assert_eq!(later(epfd), IN);
        assert_eq!(calls::epoll_wait(epfd, 8, 0), Ok(vec![]));
        calls::epoll_modify(epfd, fd, EPOLLIN | EPOLLET, data).expect("EPOLL_CTL_MOD");
    }
    assert_eq!(later(epfd), IN);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"more".to_vec()));
    for _ in 0..CALLS {
        exchange(side, epfd, fd);
    }
    side.sync("done");
}

/// There is room in the ring, and bytes on TCP: both are told at once.
fn room_beside_bytes(side: &Side) {
    let (epfd, fd) = with_bytes_on_tcp(side, peek);
    side.sync("look now");
    side.sync("looked");
    let level = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(level, fd, EPOLLIN | EPOLLOUT, 1).expect("EPOLL_CTL_ADD");
    for _ in 0..10 {
        assert_eq!(later(level), IN | OUT);
    }
    for mode in [EPOLLONESHOT, EPOLLONESHOT | EPOLLET] {
        calls::epoll_modify(level, fd, EPOLLIN | EPOLLOUT | mode, 1).expect("EPOLL_CTL_MOD");
        assert_eq!(later(level), IN | OUT);
        assert_eq!(calls::epoll_wait(level, 8, 0), Ok(vec![]));
    }
    assert_eq!(later(epfd), IN);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"more".to_vec()));
    for _ in 0..CALLS {
        exchange(side, epfd, fd);
    }
    side.sync("done");
}

/// Fills the connection; when the other side has taken all, `told` is to be told of room.
fn fills(side: &Side, fd: Fd, told: impl Fn()) {
    let total = fill(fd);
    side.sync("full");
    side.tell(total as u64);
    side.sync("drain now");
    side.sync("drained");
    told();
    side.sync("done");
}

fn room_for_two_sets(side: &Side, fd: Fd) {
    let sets = [EPOLLOUT, EPOLLIN | EPOLLOUT].map(|events| {
        let epfd = calls::epoll_create().expect("epoll_create1");
        calls::epoll_add(epfd, fd, events | EPOLLET, 1).expect("EPOLL_CTL_ADD");
        epfd
    });
    assert_eq!(sets.map(later), [OUT; 2]);
    fills(side, fd, || assert_eq!(sets.map(later), [OUT; 2]));
}

fn room_for_two_descriptors(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    for (fd, data) in [(fd, 1), (calls::dup(fd).expect("dup"), 2)] {
        calls::epoll_add(epfd, fd, EPOLLOUT | EPOLLET, data).expect("EPOLL_CTL_ADD");
    }
    let told_both = || {
        let mut told = [false; 2];
        while told != [true; 2] {
            for ready in quietly(|| calls::epoll_wait(epfd, 8, -1)).expect("epoll_wait") {
                told[ready.data as usize - 1] |= ready.events & OUT != 0;
            }
        }
    };
    told_both();
    fills(side, fd, told_both);
}

/// What the set knows by the descriptor that it was made with it still knows by a copy.
fn closes_first_descriptor(side: &Side, fd: Fd) {
    let first = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(first, fd, EPOLLIN | EPOLLONESHOT, 1).expect("EPOLL_CTL_ADD");
    assert_eq!(while_blocked(|| later(first), || demand(side)), IN);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    assert_eq!(quietly(|| calls::epoll_wait(first, 8, 10)), Ok(vec![]));
    let set = calls::dup(first).expect("dup");
    calls::close(first).expect("close");
    // Another set has the number, and the connection.
    let other = calls::epoll_create().expect("epoll_create1");
    assert_eq!(other, first, "the lowest free descriptor");
    calls::epoll_add(other, fd, EPOLLIN, 2).expect("EPOLL_CTL_ADD");
    for data in 3..6 {
        calls::epoll_modify(set, fd, EPOLLIN | EPOLLONESHOT, data).expect("EPOLL_CTL_MOD");
        let ready = while_blocked(|| calls::epoll_wait(set, 8, -1), || demand(side)).expect("epoll_wait");
        assert_eq!(ready.iter().map(|ready| ready.data).collect::<Vec<_>>(), [data]);
        assert_eq!(later(other), IN);
        assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    }
    calls::epoll_delete(set, fd).expect("EPOLL_CTL_DEL");
    assert_eq!(quietly(|| calls::epoll_wait(set, 8, 10)), Ok(vec![]));
    calls::epoll_add(set, fd, EPOLLIN, 7).expect("EPOLL_CTL_ADD");
    assert_eq!(while_blocked(|| later(set), || demand(side)), IN);
    stop(side);
}

/// A set with a connection by two descriptors, of one name, which ask for different things.
fn set_with_both(fd: Fd, mode: libc::c_int) -> (Fd, [(Fd, libc::c_int); 2]) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    let both = [(fd, EPOLLIN | mode), (calls::dup(fd).expect("dup"), EPOLLRDNORM | mode)];
    for (fd, events) in both {
        calls::epoll_add(epfd, fd, events, 1).expect("EPOLL_CTL_ADD");
    }
    (epfd, both)
}

fn one_name_for_two(side: &Side, fd: Fd) {
    one_name(side, fd, 8);
}

fn one_event_at_a_time(side: &Side, fd: Fd) {
    one_name(side, fd, 1);
}

/// Each is told of what it asks for, `most` at a time.
fn one_name(side: &Side, fd: Fd, most: usize) {
    for mode in [EPOLLET, EPOLLONESHOT, EPOLLET | EPOLLONESHOT] {
        let (epfd, both) = set_with_both(fd, mode);
        for _ in 0..10 {
            while_blocked(|| gather(epfd, most, IN | RDNORM), || demand(side));
            assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
            for (fd, events) in both {
                calls::epoll_modify(epfd, fd, events, 1).expect("EPOLL_CTL_MOD");
            }
        }
        calls::close(both[1].0).expect("close");
        calls::close(epfd).expect("close");
    }
    stop(side);
}

/// Beside the connection there is an event of the same name, registered in this `mode`.
fn name_with_event(side: &Side, fd: Fd, mode: libc::c_int) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    let event = calls::eventfd().expect("eventfd");
    calls::epoll_add(epfd, fd, EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    calls::epoll_add(epfd, event, EPOLLIN | mode, 1).expect("EPOLL_CTL_ADD");
    for _ in 0..15 {
        sleep_in_vain(epfd);
        assert_eq!(while_blocked(|| later(epfd), || demand(side)), IN);
        assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
        assert_eq!(calls::write(event, &ONE), Ok(8));
        assert_eq!(later(epfd), IN);
        assert_eq!(calls::read(event, 8), Ok(ONE.to_vec()));
    }
    stop(side);
}

/// What is written to an event.
const ONE: [u8; 8] = 1_u64.to_ne_bytes();

/// For so long that nothing is expected of the connections in the set any more.
fn sleep_in_vain(epfd: Fd) {
    for _ in 0..20 {
        assert_eq!(quietly(|| calls::epoll_wait(epfd, 8, 1)), Ok(vec![]));
    }
}

/// While a thread sleeps: what has the same name is told of.
fn one_is_taken_out(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    let event = calls::eventfd().expect("eventfd");
    calls::epoll_add(epfd, event, EPOLLIN | EPOLLET, 1).expect("EPOLL_CTL_ADD");
    for _ in 0..3 {
        calls::epoll_add(epfd, fd, EPOLLIN, 1).expect("EPOLL_CTL_ADD");
        let happens = || {
            quietly(|| {
                calls::epoll_delete(epfd, fd).expect("EPOLL_CTL_DEL");
                assert_eq!(calls::write(event, &ONE), Ok(8));
            });
        };
        assert_eq!(while_blocked(|| later(epfd), happens), IN);
        assert_eq!(calls::read(event, 8), Ok(ONE.to_vec()));
    }
    stop(side);
}

/// By what has its edge at once: what was taken out has had its own.
fn name_used_again(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    for _ in 0..5 {
        calls::epoll_add(epfd, fd, EPOLLIN, 1).expect("EPOLL_CTL_ADD");
        assert_eq!(while_blocked(|| later(epfd), || demand(side)), IN);
        assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
        calls::epoll_delete(epfd, fd).expect("EPOLL_CTL_DEL");
        let event = calls::eventfd().expect("eventfd");
        assert_eq!(calls::write(event, &ONE), Ok(8));
        calls::epoll_add(epfd, event, EPOLLIN | EPOLLOUT | EPOLLET, 1).expect("EPOLL_CTL_ADD");
        assert_eq!(later(epfd), IN | OUT);
        calls::close(event).expect("close");
    }
    stop(side);
}

fn many_threads_serve(side: &Side) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    each_is_told_to_one(side, epfd);
}

/// The set's number, and those of what was in sets that have been closed, have had other uses.
fn many_threads_serve_beside_others(side: &Side) {
    for _ in 0..3 {
        let old = calls::epoll_create().expect("epoll_create1");
        for data in 0..MANY as u64 {
            let event = calls::eventfd().expect("eventfd");
            calls::epoll_add(old, event, EPOLLIN, data).expect("EPOLL_CTL_ADD");
        }
        calls::close(old).expect("close");
    }
    let epfd = calls::epoll_create().expect("epoll_create1");
    for data in 0..MANY as u64 {
        // In the set under another name, or no longer.
        let event = calls::eventfd().expect("eventfd");
        calls::epoll_add(epfd, event, EPOLLIN, data).expect("EPOLL_CTL_ADD");
        if data % 2 == 0 {
            calls::epoll_modify(epfd, event, EPOLLIN, u64::MAX).expect("EPOLL_CTL_MOD");
            assert_eq!(calls::epoll_add(epfd, event, EPOLLIN, data), Err(Errno::EEXIST));
        } else {
            calls::epoll_delete(epfd, event).expect("EPOLL_CTL_DEL");
            assert_eq!(calls::epoll_modify(epfd, event, EPOLLIN, data), Err(Errno::ENOENT));
        }
    }
    each_is_told_to_one(side, epfd);
}

/// Several threads wait on one set of one-shot registrations. Each report is told to one of them, which alone serves the
/// connection until it arms it again; and there is something to be read.
fn each_is_told_to_one(side: &Side, epfd: Fd) {
    let listener = side.listen();
    let fds: Vec<Fd> = quietly(|| {
        let accept = |data| {
            let fd = calls::accept4(listener, libc::SOCK_NONBLOCK).expect("accept4");
            calls::epoll_add(epfd, fd, EPOLLIN | EPOLLONESHOT, data as u64).expect("EPOLL_CTL_ADD");
            fd
        };
        (0..MANY).map(accept).collect()
    });
    let is_served: [AtomicBool; MANY] = Default::default();
    let left = AtomicUsize::new(MANY);
    let serve = || {
        quietly(|| {
            while left.load(Ordering::SeqCst) > 0 {
                for ready in calls::epoll_wait(epfd, 4, 50).expect("epoll_wait") {
                    let index = ready.data as usize;
                    assert!(!is_served[index].swap(true, Ordering::SeqCst), "told to two threads");
                    let data = calls::recv(fds[index], 100, 0).expect("a report is of something");
                    if data.is_empty() {
                        left.fetch_sub(1, Ordering::SeqCst);
                        continue;
                    }
                    send_all(fds[index], &data);
                    is_served[index].store(false, Ordering::SeqCst);
                    calls::epoll_modify(epfd, fds[index], EPOLLIN | EPOLLONESHOT, ready.data)
                        .expect("EPOLL_CTL_MOD");
                }
            }
        });
    };
    std::thread::scope(|scope| {
        for _ in 1..THREADS {
            scope.spawn(serve);
        }
        serve();
    });
    say!("{MANY} connections served");
}

/// A set in which it is registered before it leaves TCP is first waited for afterwards: of the room that there was all along nobody has been told.
fn serves_without_a_wait(side: &Side) {
    let fd = calls::accept(side.listen()).expect("accept");
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, EPOLLIN | EPOLLOUT | EPOLLET, 1).expect("EPOLL_CTL_ADD");
    for _ in 0..2 * CALLS {
        await_readable(fd);
        let request = quietly(|| receive_exactly(fd, 1));
        quietly(|| send_all(fd, &request));
    }
    side.sync("answered");
    let ready = quietly(|| calls::epoll_wait(epfd, 4, crate::side::ARRIVAL)).expect("epoll_wait");
    assert!(ready.len() == 1 && ready[0].has(EPOLLOUT), "{ready:?}");
    assert_eq!(calls::epoll_wait(epfd, 4, 0), Ok(vec![]));
    side.sync("done");
}

fn asks_much(side: &Side) {
    let fd = side.connect();
    request_echoes(fd, 2 * CALLS, 1);
    side.sync("answered");
    side.sync("done");
}

fn many_ask(side: &Side) {
    let destination = side.destination();
    let fds = [(); MANY].map(|()| side.connect_to(destination));
    std::thread::scope(|scope| {
        for fd in fds {
            scope.spawn(move || {
                quietly(|| {
                    request_echoes(fd, REQUESTS, 8);
                    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
                });
            });
        }
    });
}

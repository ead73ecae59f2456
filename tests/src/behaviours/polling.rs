//! poll, ppoll, select and pselect, on connections and on everything else that programs mix with them.

use std::time::Duration;

use libc::{POLLHUP, POLLIN, POLLNVAL, POLLOUT, POLLPRI, POLLRDHUP};

use super::peers::{
    answer_echoes, demand, drains_on_demand, ends_on_demand, fill, is_killed_on_demand, request_echoes,
    sends_on_demand, stop, waits,
};
use super::{Behaviour, Tally};
use crate::calls::{self, Errno, Fd, Selected, SignalSet, quietly, signal_thread, thread_id};
use crate::say;
use crate::side::{
    ARRIVAL, Pattern, Side, Start, assert_waited, await_end_of, await_process_asleep, await_readable,
    await_unread, pause, receive_exactly, receive_pattern, send_pattern, while_blocked,
};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("nothing_yet", nothing_yet, waits),
    Behaviour::connected("readable_until_read", readable_until_read, sends_on_demand),
    Behaviour::connected("woken_by_data", woken_by_data, sends_on_demand),
    Behaviour::connected("woken_by_the_end", woken_by_the_end, ends_on_demand),
    Behaviour::connected("woken_by_death", woken_by_death, is_killed_on_demand)
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .end(calls::End::Exit(0), calls::End::Signal(libc::SIGKILL)),
    Behaviour::connected("death_in_one_poll_for_room_too", one_poll_after_death, is_killed_unseen)
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .end(calls::End::Exit(0), calls::End::Signal(libc::SIGKILL)),
    Behaviour::connected("death_in_one_select_for_room_too", one_select_after_death, is_killed_unseen)
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .end(calls::End::Exit(0), calls::End::Signal(libc::SIGKILL)),
    Behaviour::connected("death_in_one_peek", one_peek_after_death, is_killed_unseen)
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .end(calls::End::Exit(0), calls::End::Signal(libc::SIGKILL)),
    Behaviour::connected("half_closed", half_closed, ends_on_demand),
    Behaviour::connected("no_interest", no_interest, ends_on_demand),
    Behaviour::connected("full_is_not_writable", full_is_not_writable, drains_on_demand),
    Behaviour::connected("full_after_half_close_is_not_writable", fills_back_on_tcp, half_closes_and_reads)
        .tally(Tally::Returned(1), Tally::Returned(1))
        .alone(&["unsupported-call"])
        .tcp_only(),
    Behaviour::connected("woken_by_room", woken_by_room, drains_on_demand),
    Behaviour::connected("odd_entries", odd_entries, sends_on_demand),
    Behaviour::connected("the_same_descriptor_twice", same_twice, sends_on_demand),
    Behaviour::connected("mixed_with_everything", mixed, sends_on_demand),
    Behaviour::connected("woken_by_a_pipe", woken_by_a_pipe, waits),
    Behaviour::connected("as_many_as_may_be_open", as_many_as_may_be_open, sends_on_demand),
    Behaviour::connected("selected_beside_ends_that_nobody_asked_for", selects_beside_ends, ends_on_demand),
    Behaviour::connected("woken_by_an_eventfd", woken_by_an_eventfd, waits),
    Behaviour::connected("woken_by_a_timer", woken_by_a_timer, waits),
    Behaviour::connected("woken_by_a_signalfd", woken_by_a_signalfd, waits),
    Behaviour::connected("timeouts", timeouts, waits),
    Behaviour::connected("fortified", fortified, sends_on_demand),
    Behaviour::connected("select_all_kinds", select_all_kinds, sends_on_demand),
    Behaviour::connected("select_woken_by_data", select_woken_by_data, sends_on_demand),
    Behaviour::connected("select_bad_descriptor", select_bad_descriptor, waits),
    Behaviour::connected("select_with_pipes", select_with_pipes, sends_on_demand),
    Behaviour::connected("a_connection_and_its_copy", connection_and_copy, sends_on_demand),
    Behaviour::connected("poll_of_an_epoll", poll_of_an_epoll, sends_on_demand),
    Behaviour::connected("in_two_threads", in_two_threads, sends_on_demand),
    Behaviour::connected(
        "asks_epoll_for_nothing_until_a_reset",
        waits_for_nothing_in_epoll,
        resets_by_its_end,
    )
    .tally(Tally::Upgraded(1), Tally::Unknown)
    .end(calls::End::Exit(0), calls::End::Signal(libc::SIGKILL)),
    Behaviour::connected("asks_for_nothing_until_a_reset", waits_for_nothing, resets_by_its_end)
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .end(calls::End::Exit(0), calls::End::Signal(libc::SIGKILL)),
    Behaviour::connected("many_short_polls", many_short_polls, echoes),
    Behaviour::connected("asked_for_more_meanwhile", asked_for_more, reads_late).takes_long(),
];

const ALL_EVENTS: libc::c_short = POLLIN | POLLOUT | POLLPRI | POLLRDHUP;

fn nothing_yet(side: &Side, fd: Fd) {
    let now = Some(Duration::ZERO);
    assert_eq!(calls::poll(&[(fd, POLLIN)], 0), Ok(vec![0]));
    assert_eq!(calls::poll(&[(fd, ALL_EVENTS)], 0), Ok(vec![POLLOUT]));
    assert_eq!(calls::poll(&[(fd, ALL_EVENTS)], -1), Ok(vec![POLLOUT]));
    assert_eq!(calls::ppoll(&[(fd, ALL_EVENTS)], now, None), Ok(vec![POLLOUT]));
    let _ =
        calls::poll(&[(fd, libc::POLLRDNORM | libc::POLLRDBAND | libc::POLLWRNORM | libc::POLLWRBAND)], 0);
    let _ = calls::select(&[fd], &[fd], &[fd], now);
    let _ = calls::pselect(&[fd], &[], &[], now, None);
    side.sync("done");
}

fn readable_until_read(side: &Side, fd: Fd) {
    demand(side);
    await_readable(fd);
    for _ in 0..2 {
        assert_eq!(calls::poll(&[(fd, ALL_EVENTS)], -1), Ok(vec![POLLIN | POLLOUT]));
    }
    let _ =
        calls::poll(&[(fd, libc::POLLRDNORM | libc::POLLRDBAND | libc::POLLWRNORM | libc::POLLWRBAND)], 0);
    assert_eq!(calls::recv(fd, 3, 0), Ok(b"dat".to_vec()));
    assert_eq!(calls::poll(&[(fd, POLLIN)], -1), Ok(vec![POLLIN]));
    assert_eq!(calls::recv(fd, 3, 0), Ok(b"a".to_vec()));
    assert_eq!(calls::poll(&[(fd, POLLIN)], 0), Ok(vec![0]));
    stop(side);
}

fn woken_by_data(side: &Side, fd: Fd) {
    for _ in 0..5 {
        let ready = while_blocked(|| calls::poll(&[(fd, POLLIN)], -1), || demand(side));
        assert_eq!(ready, Ok(vec![POLLIN]));
        assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
        let ready = while_blocked(|| calls::ppoll(&[(fd, POLLIN)], None, None), || demand(side));
        assert_eq!(ready, Ok(vec![POLLIN]));
        assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    }
    stop(side);
}

fn woken_by_the_end(side: &Side, fd: Fd) {
    let ready = while_blocked(|| calls::poll(&[(fd, POLLIN | POLLRDHUP)], -1), || side.sync("end now"));
    assert_eq!(ready, Ok(vec![POLLIN | POLLRDHUP]));
    side.sync("ended");
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
    side.sync("close now");
    side.sync("closed");
}

fn woken_by_death(side: &Side, fd: Fd) {
    let ready = while_blocked(|| calls::poll(&[(fd, POLLIN)], -1), || side.sync("blocked"));
    assert_eq!(ready, Ok(vec![POLLIN | side.hangup_at_end()]));
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
}

/// As a pool looks, before it uses a connection that was idle, whether the server still has it.
fn one_poll_after_death(side: &Side, fd: Fd) {
    await_death(side);
    assert_eq!(calls::poll(&[(fd, POLLIN | POLLOUT)], 0), Ok(vec![POLLIN | POLLOUT | side.hangup_at_end()]));
}

fn one_select_after_death(side: &Side, fd: Fd) {
    await_death(side);
    let ready = calls::select(&[fd], &[fd], &[fd], Some(Duration::ZERO));
    assert_eq!(ready, Ok(Selected { read: vec![fd], write: vec![fd], except: vec![] }));
}

fn one_peek_after_death(side: &Side, fd: Fd) {
    await_death(side);
    assert_eq!(calls::recv(fd, 1, libc::MSG_PEEK | libc::MSG_DONTWAIT), Ok(vec![]));
}

/// The other side of [`is_killed_unseen`]: does nothing on the connection until the peer is dead.
fn await_death(side: &Side) {
    let victim = side.told() as libc::pid_t;
    side.sync("ends");
    await_end_of(victim);
}

fn is_killed_unseen(side: &Side, _fd: Fd) {
    side.tell(u64::from(std::process::id()));
    side.sync("ends");
    calls::kill_self();
}

fn half_closed(side: &Side, fd: Fd) {
    side.sync("end now");
    side.sync("ended");
    await_readable(fd);
    let _ = calls::poll(&[(fd, ALL_EVENTS)], 0);
    let _ = calls::poll(&[(fd, POLLRDHUP)], 0);
    let _ = calls::select(&[fd], &[fd], &[fd], Some(Duration::ZERO));
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    side.sync("close now");
    side.sync("closed");
    let _ = calls::poll(&[(fd, ALL_EVENTS)], 0);
    let _ = calls::poll(&[(fd, 0)], 0);
    let _ = calls::select(&[fd], &[fd], &[fd], Some(Duration::ZERO));
}

/// Who waits for urgent data alone is not woken by what poll tells unasked.
fn selects_beside_ends(side: &Side, fd: Fd) {
    let (reading, writing) = calls::pipe().expect("pipe");
    let (half, other) = calls::pipe().expect("pipe");
    calls::close(other).expect("close");
    let writes = || assert_eq!(quietly(|| calls::write(writing, b"x")), Ok(1));
    let open = while_blocked(|| calls::select(&[reading], &[], &[fd, half], None), writes);
    assert_eq!(open.expect("select").read, [reading]);
    calls::read(reading, 1).expect("read");
    for place in ["end now", "ended", "close now", "closed"] {
        side.sync(place);
    }
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    let ended = while_blocked(|| calls::pselect(&[reading], &[], &[fd], None, None), writes);
    assert_eq!(ended.expect("pselect").read, [reading]);
    calls::read(reading, 1).expect("read");
    // The sets are as before then.
    calls::catch(libc::SIGUSR2, true);
    let thread = thread_id();
    let interrupted = while_blocked(
        || calls::select(&[reading], &[], &[fd, half], None),
        || signal_thread(thread, libc::SIGUSR2),
    );
    assert_eq!(interrupted, Err(Errno::EINTR));
    let none = calls::select(&[], &[], &[fd], Some(Duration::from_millis(50)));
    assert!(none.expect("select").except.is_empty());
}

fn no_interest(side: &Side, fd: Fd) {
    assert_eq!(calls::poll(&[(fd, 0)], 0), Ok(vec![0]));
    side.sync("end now");
    side.sync("ended");
    await_readable(fd);
    assert_eq!(calls::poll(&[(fd, 0)], 0), Ok(vec![0]));
    let ready = while_blocked(
        || calls::poll(&[(fd, 0)], -1),
        || {
            quietly(|| calls::shutdown(fd, libc::SHUT_WR)).expect("shutdown");
            side.sync("close now");
        },
    );
    assert_eq!(ready, Ok(vec![POLLHUP]));
    side.sync("closed");
}

fn full_is_not_writable(side: &Side, fd: Fd) {
    let total = fill(fd);
    side.sync("full");
    assert_eq!(calls::poll(&[(fd, ALL_EVENTS)], 0), Ok(vec![0]));
    assert_eq!(calls::poll(&[(fd, libc::POLLWRNORM)], 0), Ok(vec![0]));
    assert_eq!(calls::select(&[fd], &[fd], &[], Some(Duration::ZERO)), Ok(Selected::default()));
    let start = Start::now();
    assert_eq!(calls::poll(&[(fd, POLLOUT)], 50), Ok(vec![0]));
    assert_waited(start, Duration::from_millis(50));
    side.tell(total as u64);
    side.sync("drain now");
    side.sync("drained");
    assert_eq!(calls::poll(&[(fd, POLLOUT)], -1), Ok(vec![POLLOUT]));
    let _ = calls::select(&[], &[fd], &[], None);
    side.sync("done");
}

fn woken_by_room(side: &Side, fd: Fd) {
    let total = fill(fd);
    side.sync("full");
    side.tell(total as u64);
    let ready = while_blocked(|| calls::poll(&[(fd, POLLOUT)], -1), || side.sync("drain now"));
    assert_eq!(ready, Ok(vec![POLLOUT]));
    side.sync("drained");
    side.sync("done");
}

/// Whoever is told of room has some. Back on TCP, a peer that sends no more still reads.
fn fills_back_on_tcp(side: &Side, fd: Fd) {
    let sets = [0, libc::EPOLLET].map(|edge| {
        let set = calls::epoll_create().expect("epoll_create1");
        calls::epoll_add(set, fd, libc::EPOLLOUT | edge, 1).expect("EPOLL_CTL_ADD");
        set
    });
    calls::set_status(fd, libc::O_RDWR | libc::O_ASYNC).expect("F_SETFL");
    request_echoes(fd, 20, 100);
    side.sync("half-close now");
    side.sync("half-closed");
    let mut total = fill(fd);
    // A kernel may find more room after it refused.
    while quietly(|| calls::poll(&[(fd, POLLOUT)], 100)) == Ok(vec![POLLOUT]) {
        let more = fill(fd);
        assert_ne!(more, 0, "it is writable, and nothing fits");
        total += more;
    }
    assert_eq!(calls::poll(&[(fd, POLLOUT)], 0), Ok(vec![0]));
    quietly(|| calls::epoll_wait(sets[1], 4, 0)).expect("epoll_wait");
    for set in sets {
        assert_eq!(calls::epoll_wait(set, 4, 0), Ok(vec![]));
    }
    side.tell(total as u64);
    let ready = [calls::Ready { events: libc::EPOLLOUT as u32, data: 1 }];
    assert_eq!(calls::poll(&[(fd, POLLOUT)], ARRIVAL), Ok(vec![POLLOUT]));
    for set in sets {
        assert_eq!(calls::epoll_wait(set, 4, ARRIVAL), Ok(ready.to_vec()));
    }
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
    side.sync("done");
}

fn half_closes_and_reads(side: &Side, fd: Fd) {
    answer_echoes(fd, 20, 100);
    side.sync("half-close now");
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    side.sync("half-closed");
    let total = side.told() as usize;
    receive_exactly(fd, total);
    side.sync("done");
}

fn odd_entries(side: &Side, fd: Fd) {
    demand(side);
    await_readable(fd);
    let closed = quietly(|| calls::dup(fd)).expect("dup");
    quietly(|| calls::close(closed)).expect("close");
    let ready = calls::poll(&[(-1, POLLIN), (fd, POLLIN), (closed, POLLIN), (-fd, POLLIN)], -1);
    assert_eq!(ready, Ok(vec![0, POLLIN, POLLNVAL, 0]));
    assert_eq!(calls::poll(&[], 0), Ok(vec![]));
    assert_eq!(calls::poll(&[(closed, 0)], -1), Ok(vec![POLLNVAL]));
    let _ = calls::recv(fd, 10, 0);
    stop(side);
}

fn same_twice(side: &Side, fd: Fd) {
    assert_eq!(calls::poll(&[(fd, POLLIN), (fd, POLLOUT), (fd, POLLIN)], 0), Ok(vec![0, POLLOUT, 0]));
    demand(side);
    await_readable(fd);
    assert_eq!(
        calls::poll(&[(fd, POLLIN), (fd, POLLOUT), (fd, POLLIN)], 0),
        Ok(vec![POLLIN, POLLOUT, POLLIN])
    );
    let _ = calls::recv(fd, 10, 0);
    stop(side);
}

/// One of each kind of descriptor that event loops hold beside their connections.
struct Others {
    pipe: (Fd, Fd),
    event: Fd,
    timer: Fd,
    signal: Fd,
}

impl Others {
    fn new() -> Self {
        let signals = SignalSet::of(&[libc::SIGUSR2]);
        signals.block_only();
        Self {
            pipe: calls::pipe().expect("pipe"),
            event: calls::eventfd().expect("eventfd"),
            timer: calls::timerfd(Duration::from_millis(40)).expect("timerfd"),
            signal: signals.descriptor().expect("signalfd"),
        }
    }
}

fn mixed(side: &Side, fd: Fd) {
    let others = Others::new();
    let wanted = [
        (others.pipe.0, POLLIN),
        (fd, POLLIN),
        (others.event, POLLIN),
        (others.signal, POLLIN),
        (others.pipe.1, POLLOUT),
    ];
    assert_eq!(calls::poll(&wanted, 0), Ok(vec![0, 0, 0, 0, POLLOUT]));
    let wanted = &wanted[..4];
    let ready = while_blocked(|| calls::poll(wanted, -1), || demand(side));
    assert_eq!(ready, Ok(vec![0, POLLIN, 0, 0]));
    let _ = calls::write(others.pipe.1, b"p");
    let _ = calls::write(others.event, &1u64.to_ne_bytes());
    signal_thread(thread_id(), libc::SIGUSR2);
    assert_eq!(calls::poll(wanted, -1), Ok(vec![POLLIN; 4]));
    assert_eq!(calls::poll(&[(others.timer, POLLIN), (-1, 0)], -1), Ok(vec![POLLIN, 0]));
    let _ = calls::recv(fd, 10, 0);
    assert_eq!(calls::poll(wanted, -1), Ok(vec![POLLIN, 0, POLLIN, POLLIN]));
    stop(side);
}

fn woken_by_a_pipe(side: &Side, fd: Fd) {
    let (reading, writing) = calls::pipe().expect("pipe");
    let ready = while_blocked(
        || calls::poll(&[(fd, POLLIN), (reading, POLLIN)], -1),
        || {
            quietly(|| calls::write(writing, b"p")).expect("write");
        },
    );
    assert_eq!(ready, Ok(vec![0, POLLIN]));
    side.sync("done");
}

/// The kernel takes no more entries than a process may have descriptors, whatever they are.
fn as_many_as_may_be_open(side: &Side, fd: Fd) {
    const MOST: usize = 300;
    calls::limit_descriptors(MOST as u64);
    let (reading, _writing) = calls::pipe().expect("pipe");
    for other in [-1, reading] {
        let mut list = vec![(other, POLLIN); MOST];
        list[MOST - 1].0 = fd;
        for _ in 0..3 {
            let poll = || quietly(|| calls::poll(&list, -1)).map(|found| found[MOST - 1]);
            assert_eq!(while_blocked(poll, || demand(side)), Ok(POLLIN));
            assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
            assert_eq!(quietly(|| calls::poll(&list, 0)).map(|found| found[MOST - 1]), Ok(0));
        }
        list.push((fd, POLLIN));
        assert_eq!(quietly(|| calls::poll(&list, 1)), Err(Errno::EINVAL));
    }
    stop(side);
}

fn woken_by_an_eventfd(side: &Side, fd: Fd) {
    let event = calls::eventfd().expect("eventfd");
    let ready = while_blocked(
        || calls::poll(&[(event, POLLIN), (fd, POLLIN)], -1),
        || {
            quietly(|| calls::write(event, &1u64.to_ne_bytes())).expect("write");
        },
    );
    assert_eq!(ready, Ok(vec![POLLIN, 0]));
    side.sync("done");
}

fn woken_by_a_timer(side: &Side, fd: Fd) {
    let start = Start::now();
    let timer = calls::timerfd(Duration::from_millis(60)).expect("timerfd");
    assert_eq!(calls::poll(&[(fd, POLLIN), (timer, POLLIN)], -1), Ok(vec![0, POLLIN]));
    assert_waited(start, Duration::from_millis(60));
    side.sync("done");
}

fn woken_by_a_signalfd(side: &Side, fd: Fd) {
    let signals = SignalSet::of(&[libc::SIGUSR2]);
    signals.block_only();
    let descriptor = signals.descriptor().expect("signalfd");
    let thread = thread_id();
    let ready = while_blocked(
        || calls::poll(&[(fd, POLLIN), (descriptor, POLLIN)], -1),
        || signal_thread(thread, libc::SIGUSR2),
    );
    assert_eq!(ready, Ok(vec![0, POLLIN]));
    side.sync("done");
}

fn timeouts(side: &Side, fd: Fd) {
    let timeout = Duration::from_millis(70);
    let ways: &[fn(Fd, Duration) -> bool] = &[
        |fd, timeout| calls::poll(&[(fd, POLLIN)], timeout.as_millis() as libc::c_int) == Ok(vec![0]),
        |fd, timeout| calls::poll_chk(&[(fd, POLLIN)], timeout.as_millis() as libc::c_int) == Ok(vec![0]),
        |fd, timeout| calls::ppoll(&[(fd, POLLIN)], Some(timeout), None) == Ok(vec![0]),
        |fd, timeout| calls::ppoll_chk(&[(fd, POLLIN)], Some(timeout)) == Ok(vec![0]),
        |fd, timeout| calls::select(&[fd], &[], &[], Some(timeout)) == Ok(Selected::default()),
        |fd, timeout| calls::pselect(&[fd], &[], &[], Some(timeout), None) == Ok(Selected::default()),
        |_, timeout| calls::poll(&[], timeout.as_millis() as libc::c_int) == Ok(vec![]),
        |_, timeout| calls::select(&[], &[], &[], Some(timeout)) == Ok(Selected::default()),
    ];
    for way in ways {
        let start = Start::now();
        assert!(way(fd, timeout));
        assert_waited(start, timeout);
    }
    side.sync("done");
}

fn fortified(side: &Side, fd: Fd) {
    assert_eq!(calls::poll_chk(&[(fd, ALL_EVENTS)], 0), Ok(vec![POLLOUT]));
    assert_eq!(calls::ppoll_chk(&[(fd, ALL_EVENTS)], Some(Duration::ZERO)), Ok(vec![POLLOUT]));
    let ready = while_blocked(|| calls::poll_chk(&[(fd, POLLIN)], -1), || demand(side));
    assert_eq!(ready, Ok(vec![POLLIN]));
    let _ = calls::read_chk(fd, 10);
    let ready = while_blocked(|| calls::ppoll_chk(&[(fd, POLLIN)], None), || demand(side));
    assert_eq!(ready, Ok(vec![POLLIN]));
    let _ = calls::recv_chk(fd, 10, 0);
    stop(side);
}

fn select_all_kinds(side: &Side, fd: Fd) {
    let now = Some(Duration::ZERO);
    assert_eq!(calls::select(&[fd], &[fd], &[fd], now).map(|found| found.write), Ok(vec![fd]));
    demand(side);
    await_readable(fd);
    let found = calls::select(&[fd], &[fd], &[fd], now).expect("select");
    assert_eq!((found.read, found.write), (vec![fd], vec![fd]));
    let _ = calls::pselect(&[fd], &[fd], &[fd], now, None);
    let _ = calls::select(&[fd], &[], &[], None);
    let _ = calls::recv(fd, 10, 0);
    let _ = calls::select(&[fd], &[], &[], now);
    stop(side);
    await_readable(fd);
    let _ = calls::select(&[fd], &[fd], &[fd], now);
}

fn select_woken_by_data(side: &Side, fd: Fd) {
    for _ in 0..3 {
        let found = while_blocked(|| calls::select(&[fd], &[], &[], None), || demand(side));
        assert_eq!(found.map(|found| found.read), Ok(vec![fd]));
        let _ = calls::recv(fd, 10, 0);
        let found = while_blocked(|| calls::pselect(&[fd], &[], &[fd], None, None), || demand(side));
        assert_eq!(found.map(|found| found.read), Ok(vec![fd]));
        let _ = calls::recv(fd, 10, 0);
    }
    stop(side);
}

fn select_bad_descriptor(side: &Side, fd: Fd) {
    let closed = quietly(|| calls::dup(fd)).expect("dup");
    quietly(|| calls::close(closed)).expect("close");
    assert_eq!(calls::select(&[fd, closed], &[], &[], Some(Duration::ZERO)), Err(Errno::EBADF));
    assert_eq!(calls::pselect(&[], &[closed], &[], Some(Duration::ZERO), None), Err(Errno::EBADF));
    side.sync("done");
}

fn select_with_pipes(side: &Side, fd: Fd) {
    let (reading, writing) = calls::pipe().expect("pipe");
    let found = calls::select(&[reading, fd], &[writing], &[], Some(Duration::ZERO)).expect("select");
    assert_eq!((found.read, found.write), (vec![], vec![writing]));
    let found = while_blocked(
        || calls::select(&[reading, fd], &[], &[], None),
        || {
            quietly(|| calls::write(writing, b"p")).expect("write");
        },
    );
    assert_eq!(found.map(|found| found.read), Ok(vec![reading]));
    demand(side);
    await_readable(fd);
    let found = calls::select(&[reading, fd], &[writing], &[], None).expect("select");
    assert_eq!(found.read, vec![reading, fd]);
    let _ = calls::recv(fd, 10, 0);
    stop(side);
}

fn connection_and_copy(side: &Side, fd: Fd) {
    let copy = calls::dup(fd).expect("dup");
    let ready = while_blocked(|| calls::poll(&[(fd, POLLIN), (copy, POLLIN)], -1), || demand(side));
    assert_eq!(ready, Ok(vec![POLLIN, POLLIN]));
    assert_eq!(calls::recv(copy, 10, 0), Ok(b"data".to_vec()));
    assert_eq!(calls::poll(&[(fd, POLLIN), (copy, POLLIN)], 0), Ok(vec![0, 0]));
    stop(side);
}

/// An epoll descriptor is readable while one of its own is ready.
fn poll_of_an_epoll(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, libc::EPOLLIN, 7).expect("EPOLL_CTL_ADD");
    assert_eq!(calls::poll(&[(epfd, POLLIN)], 0), Ok(vec![0]));
    let ready = while_blocked(|| calls::poll(&[(epfd, POLLIN)], -1), || demand(side));
    assert_eq!(ready, Ok(vec![POLLIN]));
    let _ = calls::epoll_wait(epfd, 4, -1);
    let _ = calls::select(&[epfd], &[], &[], None);
    let _ = calls::recv(fd, 10, 0);
    assert_eq!(calls::poll(&[(epfd, POLLIN)], 0), Ok(vec![0]));
    stop(side);
}

fn in_two_threads(side: &Side, fd: Fd) {
    let other = std::thread::scope(|scope| {
        let other = scope.spawn(|| quietly(|| calls::poll(&[(fd, POLLIN)], -1)));
        let ready = while_blocked(|| quietly(|| calls::poll(&[(fd, POLLIN)], -1)), || demand(side));
        say!("here: {ready:?}");
        other.join().expect("the other thread is well")
    });
    say!("there: {other:?}");
    await_unread(fd, 4);
    let _ = calls::recv(fd, 10, 0);
    stop(side);
}

fn waits_for_nothing_in_epoll(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, 0, 7).expect("EPOLL_CTL_ADD");
    quietly(|| {
        let ready = while_blocked(|| calls::epoll_wait(epfd, 8, -1), || side.sync("reset now"));
        assert!(ready.expect("epoll_wait")[0].has(libc::EPOLLHUP));
    });
}

/// Twice: the answer is no edge.
fn waits_for_nothing(side: &Side, fd: Fd) {
    let asked = [(fd, 0)];
    quietly(|| {
        let ready = while_blocked(|| calls::poll(&asked, -1), || side.sync("reset now"));
        assert_ne!(ready.expect("poll")[0] & POLLHUP, 0);
        assert_ne!(calls::poll(&asked, -1).expect("poll")[0] & POLLHUP, 0);
    });
}

fn resets_by_its_end(side: &Side, fd: Fd) {
    calls::set_linger(fd, 0).expect("SO_LINGER");
    side.sync("reset now");
    calls::kill_self();
}

const SHORT_POLLS: usize = 2000;

/// Requests whose answers are awaited by polls without a timeout, as some programs do.
fn many_short_polls(_side: &Side, fd: Fd) {
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    for round in 0..SHORT_POLLS {
        let request = (round as u32).to_be_bytes();
        assert_eq!(quietly(|| calls::send(fd, &request, 0)), Ok(4));
        let mut polls = 0;
        while quietly(|| calls::poll(&[(fd, POLLIN)], 0)) == Ok(vec![0]) {
            polls += 1;
            if polls % 20 == 0 {
                pause();
            }
        }
        assert_eq!(quietly(|| calls::recv(fd, 100, 0)), Ok(request.to_vec()));
    }
    say!("{SHORT_POLLS} rounds");
}

fn echoes(_side: &Side, fd: Fd) {
    for _ in 0..SHORT_POLLS {
        let request = receive_exactly(fd, 4);
        assert_eq!(quietly(|| calls::send(fd, &request, 0)), Ok(4));
    }
    await_readable(fd);
}

/// What another thread asks for in the array of a poll that sleeps is for nobody. The memory of both ends is as before: a write that
/// fills it sleeps, and is woken.
fn asked_for_more(side: &Side, fd: Fd) {
    let mut polled = libc::pollfd { fd, events: POLLIN, revents: 0 };
    let place = std::sync::atomic::AtomicPtr::new(&raw mut polled);
    let place = || place.load(std::sync::atomic::Ordering::Relaxed);
    let polls = || {
        // SAFETY: one entry, which outlives the call.
        let ready = unsafe { libc::poll(place(), 1, 300) };
        // SAFETY: as above; the other thread has been and gone.
        (ready, unsafe { place().read_volatile() }.revents)
    };
    let asks = || {
        // SAFETY: as above.
        let events = unsafe { &raw mut (*place()).events };
        // SAFETY: as above.
        unsafe { events.write_volatile(POLLIN | POLLOUT) };
        // SAFETY: as above.
        let number = unsafe { &raw mut (*place()).fd };
        // SAFETY: as above.
        unsafe { number.write_volatile(-1) };
    };
    assert_eq!(while_blocked(polls, asks), (0, 0));
    side.tell(u64::from(std::process::id()));
    let mut pattern = Pattern::new(11);
    send_pattern(fd, &mut pattern, LONG, LONG);
    side.sync("read");
}

fn reads_late(side: &Side, fd: Fd) {
    let writer = side.told();
    await_unread(fd, 1);
    await_process_asleep(writer as libc::pid_t);
    let mut pattern = Pattern::new(11);
    receive_pattern(fd, &mut pattern, LONG, 1 << 16);
    side.sync("read");
}

/// More than both ends hold.
const LONG: usize = 16 << 20;

//! epoll on one connection: triggers, interests, errors.

use std::time::Duration;

use libc::{EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLLRDHUP};

use super::peers::{
    demand, drains_on_demand, ends_on_demand, fill, is_killed_on_demand, sends_on_demand, stop, waits,
};
use super::{Behaviour, Tally};
use crate::calls::{self, End, Errno, Family, Fd, quietly};
use crate::say;
use crate::side::{
    Side, Start, assert_waited, await_hangup, await_readable, await_unread, receive_exactly, while_blocked,
};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("level_triggered", level_triggered, sends_on_demand),
    Behaviour::connected("edge_triggered", edge_triggered, sends_on_demand),
    Behaviour::connected("edge_after_a_partial_read", edge_after_partial_read, sends_on_demand),
    Behaviour::connected("edge_for_data_that_was_there", edge_for_old_data, sends_on_demand),
    Behaviour::connected("edges_for_input_and_output", edges_for_both, sends_on_demand),
    Behaviour::connected("one_shot", one_shot, sends_on_demand),
    Behaviour::connected("one_shot_edge", one_shot_edge, sends_on_demand),
    Behaviour::connected("modify", modify, sends_on_demand),
    Behaviour::connected("modify_arms_the_edge_again", modify_arms_again, sends_on_demand),
    Behaviour::connected("modify_wakes_a_waiter", modify_wakes, sends_on_demand),
    Behaviour::connected("delete", delete, sends_on_demand),
    Behaviour::connected("deleted_and_exclusive", deleted_and_exclusive, sends_on_demand)
        .tally(Tally::Total(1), Tally::Total(1))
        .alone(&["exclusive"]),
    Behaviour::connected("no_interest", no_interest, ends_on_demand),
    Behaviour::connected("half_closed", half_closed, ends_on_demand),
    Behaviour::connected("half_closed_edge", half_closed_edge, ends_on_demand),
    Behaviour::connected("reset", reset, resets),
    Behaviour::connected("woken_by_data", woken_by_data, sends_on_demand),
    Behaviour::connected("woken_by_the_end", woken_by_the_end, ends_on_demand),
    Behaviour::connected("woken_by_death", woken_by_death, is_killed_on_demand)
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .end(End::Exit(0), End::Signal(libc::SIGKILL)),
    Behaviour::connected("edge_of_death", |side, fd| edge_of_death(side, fd, 0), is_killed_on_demand)
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .end(End::Exit(0), End::Signal(libc::SIGKILL)),
    Behaviour::connected(
        "edge_of_death_behind_messages",
        |side, fd| edge_of_death(side, fd, 3),
        |side, fd| sends_and_is_killed(side, fd, 3),
    )
    .tally(Tally::Upgraded(1), Tally::Unknown)
    .end(End::Exit(0), End::Signal(libc::SIGKILL)),
    Behaviour::connected("full_is_not_writable", full_is_not_writable, drains_on_demand),
    Behaviour::connected("room_for_who_never_sleeps", room_without_sleep, |side, fd| {
        side.sync("read");
        drains_on_demand(side, fd);
    }),
    Behaviour::connected("woken_by_room", woken_by_room, drains_on_demand),
    Behaviour::connected("edge_for_room", edge_for_room, drains_on_demand),
    Behaviour::connected("edge_for_room_after_sendfile", edge_after_sendfile, drains_on_demand),
    Behaviour::connected("write_only_interest", write_only_interest, sends_on_demand),
    Behaviour::connected("write_only_interest_when_full", write_only_when_full, drains_on_demand),
    Behaviour::connected("other_names_of_events", other_names, sends_on_demand),
    Behaviour::connected("timeouts", timeouts, waits),
    Behaviour::connected("wrong_arguments", wrong_arguments, waits),
    Behaviour::connected("a_connection_is_no_set", no_set, sends_on_demand),
    Behaviour::connected("data_comes_back_unchanged", data_unchanged, sends_on_demand),
    Behaviour::connected("close_takes_it_out", close_takes_it_out, sends_on_demand),
    Behaviour::connected("a_copy_keeps_it_in", copy_keeps_it_in, sends_on_demand),
    Behaviour::connected("a_copy_keeps_it_ready_for_polls", copy_keeps_it_ready, drains_on_demand),
    Behaviour::connected("two_entries_for_one_connection", two_entries, sends_on_demand),
    Behaviour::connected("two_sets_for_one_connection", two_sets, sends_on_demand),
    Behaviour::connected("a_set_inside_a_set", nested, sends_on_demand),
    Behaviour::connected("peeked_data_stays_ready", peeked, sends_on_demand),
];

fn set_with(fd: Fd, events: libc::c_int) -> Fd {
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, events, 1).expect("EPOLL_CTL_ADD");
    epfd
}

/// The events of the only entry of a set, with nothing awaited; 0 if there are none.
fn now(epfd: Fd) -> u32 {
    let ready = calls::epoll_wait(epfd, 8, 0).expect("epoll_wait");
    assert!(ready.len() <= 1);
    ready.first().map_or(0, |ready| ready.events)
}

/// As [`now`], awaiting something.
fn later(epfd: Fd) -> u32 {
    let ready = calls::epoll_wait(epfd, 8, -1).expect("epoll_wait");
    assert_eq!(ready.len(), 1);
    ready[0].events
}

const IN: u32 = EPOLLIN as u32;
const OUT: u32 = EPOLLOUT as u32;
const RDHUP: u32 = EPOLLRDHUP as u32;
const HUP: u32 = libc::EPOLLHUP as u32;

fn level_triggered(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN);
    assert_eq!(now(epfd), 0);
    demand(side);
    for _ in 0..3 {
        assert_eq!(later(epfd), IN);
    }
    assert_eq!(calls::recv(fd, 2, 0), Ok(b"da".to_vec()));
    assert_eq!(later(epfd), IN);
    assert_eq!(calls::recv(fd, 2, 0), Ok(b"ta".to_vec()));
    assert_eq!(now(epfd), 0);
    demand(side);
    assert_eq!(later(epfd), IN);
    stop(side);
}

fn edge_triggered(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN | EPOLLET);
    assert_eq!(now(epfd), 0);
    for _ in 0..4 {
        demand(side);
        assert_eq!(later(epfd), IN);
        assert_eq!(now(epfd), 0);
        assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
        assert_eq!(now(epfd), 0);
        assert_eq!(calls::recv(fd, 10, libc::MSG_DONTWAIT), Err(Errno::EAGAIN));
    }
    stop(side);
}

fn edge_after_partial_read(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN | EPOLLET);
    demand(side);
    assert_eq!(later(epfd), IN);
    assert_eq!(calls::recv(fd, 1, 0), Ok(b"d".to_vec()));
    assert_eq!(now(epfd), 0);
    // What comes is an edge, though something was left.
    demand(side);
    assert_eq!(later(epfd), IN);
    assert_eq!(now(epfd), 0);
    await_unread(fd, 7);
    assert_eq!(calls::recv(fd, 5, 0), Ok(b"atada".to_vec()));
    assert_eq!(now(epfd), 0);
    demand(side);
    assert_eq!(later(epfd), IN);
    await_unread(fd, 6);
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"tadata".to_vec()));
    assert_eq!(now(epfd), 0);
    stop(side);
}

fn edge_for_old_data(side: &Side, fd: Fd) {
    demand(side);
    await_readable(fd);
    let epfd = set_with(fd, EPOLLIN | EPOLLET);
    assert_eq!(later(epfd), IN);
    assert_eq!(now(epfd), 0);
    stop(side);
}

fn edges_for_both(side: &Side, fd: Fd) {
    // The other side has read the warm-up, which over `AF_UNIX` would be an edge of room.
    demand(side);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    let epfd = set_with(fd, EPOLLIN | EPOLLOUT | EPOLLET | EPOLLRDHUP);
    assert_eq!(later(epfd), OUT);
    assert_eq!(now(epfd), 0);
    assert_eq!(calls::send(fd, b"x", 0), Ok(1));
    assert_eq!(now(epfd), 0);
    for _ in 0..3 {
        demand(side);
        assert_eq!(later(epfd), IN | OUT);
        assert_eq!(now(epfd), 0);
        let _ = calls::recv(fd, 10, 0);
        assert_eq!(now(epfd), 0);
    }
    stop(side);
}

fn one_shot(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN | EPOLLONESHOT);
    demand(side);
    assert_eq!(later(epfd), IN);
    assert_eq!(now(epfd), 0);
    demand(side);
    await_unread(fd, 8);
    assert_eq!(now(epfd), 0);
    calls::epoll_modify(epfd, fd, EPOLLIN | EPOLLONESHOT, 2).expect("EPOLL_CTL_MOD");
    assert_eq!(later(epfd), IN);
    assert_eq!(now(epfd), 0);
    let _ = calls::recv(fd, 10, 0);
    calls::epoll_modify(epfd, fd, EPOLLIN | EPOLLONESHOT, 3).expect("EPOLL_CTL_MOD");
    assert_eq!(now(epfd), 0);
    demand(side);
    assert_eq!(later(epfd), IN);
    calls::epoll_modify(epfd, fd, EPOLLIN, 4).expect("EPOLL_CTL_MOD");
    assert_eq!(later(epfd), IN);
    assert_eq!(later(epfd), IN);
    stop(side);
}

fn one_shot_edge(side: &Side, fd: Fd) {
    let mask = EPOLLIN | EPOLLOUT | EPOLLET | EPOLLONESHOT | EPOLLRDHUP;
    let epfd = set_with(fd, mask);
    assert_eq!(later(epfd), OUT);
    for _ in 0..3 {
        demand(side);
        await_readable(fd);
        assert_eq!(now(epfd), 0);
        calls::epoll_modify(epfd, fd, mask, 5).expect("EPOLL_CTL_MOD");
        assert_eq!(later(epfd), IN | OUT);
        assert_eq!(now(epfd), 0);
        let _ = calls::recv(fd, 10, 0);
    }
    stop(side);
}

fn modify(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN);
    assert_eq!(now(epfd), 0);
    calls::epoll_modify(epfd, fd, EPOLLOUT, 2).expect("EPOLL_CTL_MOD");
    assert_eq!(later(epfd), OUT);
    demand(side);
    await_readable(fd);
    assert_eq!(later(epfd), OUT);
    calls::epoll_modify(epfd, fd, EPOLLIN | EPOLLOUT, 3).expect("EPOLL_CTL_MOD");
    assert_eq!(later(epfd), IN | OUT);
    calls::epoll_modify(epfd, fd, EPOLLIN, 4).expect("EPOLL_CTL_MOD");
    assert_eq!(later(epfd), IN);
    calls::epoll_modify(epfd, fd, 0, 5).expect("EPOLL_CTL_MOD");
    assert_eq!(now(epfd), 0);
    calls::epoll_modify(epfd, fd, EPOLLIN | EPOLLET, 6).expect("EPOLL_CTL_MOD");
    assert_eq!(later(epfd), IN);
    assert_eq!(now(epfd), 0);
    stop(side);
}

fn modify_arms_again(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN | EPOLLET);
    demand(side);
    assert_eq!(later(epfd), IN);
    assert_eq!(now(epfd), 0);
    for _ in 0..3 {
        calls::epoll_modify(epfd, fd, EPOLLIN | EPOLLET, 2).expect("EPOLL_CTL_MOD");
        assert_eq!(later(epfd), IN);
        assert_eq!(now(epfd), 0);
    }
    stop(side);
}

fn modify_wakes(side: &Side, fd: Fd) {
    let epfd = set_with(fd, 0);
    demand(side);
    await_readable(fd);
    let events = while_blocked(
        || later(epfd),
        || {
            quietly(|| calls::epoll_modify(epfd, fd, EPOLLIN, 2)).expect("EPOLL_CTL_MOD");
        },
    );
    assert_eq!(events, IN);
    stop(side);
}

fn delete(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN);
    demand(side);
    assert_eq!(later(epfd), IN);
    calls::epoll_delete(epfd, fd).expect("EPOLL_CTL_DEL");
    assert_eq!(now(epfd), 0);
    assert_eq!(calls::epoll_delete(epfd, fd), Err(Errno::ENOENT));
    assert_eq!(calls::epoll_modify(epfd, fd, EPOLLIN, 1), Err(Errno::ENOENT));
    calls::epoll_add(epfd, fd, EPOLLIN, 2).expect("EPOLL_CTL_ADD");
    assert_eq!(later(epfd), IN);
    assert_eq!(calls::epoll_add(epfd, fd, EPOLLIN, 3), Err(Errno::EEXIST));
    stop(side);
}

fn deleted_and_exclusive(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN);
    demand(side);
    assert_eq!(later(epfd), IN);
    calls::epoll_delete(epfd, fd).expect("EPOLL_CTL_DEL");
    calls::epoll_add(epfd, fd, EPOLLIN | libc::EPOLLEXCLUSIVE, 2).expect("EPOLL_CTL_ADD");
    assert_eq!(later(epfd), IN);
    assert_eq!(calls::epoll_add(epfd, fd, EPOLLIN, 3), Err(Errno::EEXIST));
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    assert_eq!(now(epfd), 0);
    stop(side);
}

fn no_interest(side: &Side, fd: Fd) {
    let epfd = set_with(fd, 0);
    assert_eq!(now(epfd), 0);
    side.sync("end now");
    side.sync("ended");
    await_readable(fd);
    assert_eq!(now(epfd), 0);
    let events = while_blocked(
        || later(epfd),
        || {
            quietly(|| calls::shutdown(fd, libc::SHUT_WR)).expect("shutdown");
            side.sync("close now");
        },
    );
    assert_eq!(events, HUP);
    side.sync("closed");
}

fn half_closed(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
    assert_eq!(later(epfd), OUT);
    side.sync("end now");
    side.sync("ended");
    await_readable(fd);
    assert_eq!(later(epfd), IN | OUT | RDHUP);
    assert_eq!(later(epfd), IN | OUT | RDHUP);
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    side.sync("close now");
    side.sync("closed");
    assert_eq!(later(epfd), IN | OUT | RDHUP | HUP);
}

fn half_closed_edge(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN | EPOLLRDHUP | EPOLLET);
    assert_eq!(now(epfd), 0);
    side.sync("end now");
    side.sync("ended");
    assert_eq!(later(epfd), IN | RDHUP);
    assert_eq!(now(epfd), 0);
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
    assert_eq!(now(epfd), 0);
    side.sync("close now");
    side.sync("closed");
}

fn resets(side: &Side, fd: Fd) {
    side.sync("sent");
    await_readable(fd);
    calls::close(fd).expect("close");
    side.sync("closed");
    side.sync("done");
}

fn reset(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN | EPOLLRDHUP);
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    side.sync("sent");
    side.sync("closed");
    await_hangup(fd);
    let _ = later(epfd);
    let _ = calls::pending_error(fd);
    let _ = later(epfd);
    let _ = calls::recv(fd, 10, 0);
    let _ = later(epfd);
    side.sync("done");
}

fn woken_by_data(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN);
    for _ in 0..3 {
        assert_eq!(while_blocked(|| later(epfd), || demand(side)), IN);
        let _ = calls::recv(fd, 10, 0);
        let ready = while_blocked(|| calls::epoll_pwait(epfd, 8, -1, None), || demand(side));
        assert_eq!(ready.map(|ready| ready.len()), Ok(1));
        let _ = calls::recv(fd, 10, 0);
        let ready = while_blocked(|| calls::epoll_pwait_until(epfd, 8, None, None), || demand(side));
        assert_eq!(ready.map(|ready| ready.len()), Ok(1));
        let _ = calls::recv(fd, 10, 0);
    }
    calls::epoll_modify(epfd, fd, EPOLLIN | EPOLLET, 1).expect("EPOLL_CTL_MOD");
    for _ in 0..3 {
        assert_eq!(while_blocked(|| later(epfd), || demand(side)), IN);
    }
    stop(side);
}

fn woken_by_the_end(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN | EPOLLRDHUP);
    assert_eq!(while_blocked(|| later(epfd), || side.sync("end now")), IN | RDHUP);
    side.sync("ended");
    side.sync("close now");
    side.sync("closed");
}

fn woken_by_death(side: &Side, fd: Fd) {
    let at_end = side.hangup_at_end() as u32;
    let epfd = set_with(fd, EPOLLIN);
    assert_eq!(while_blocked(|| later(epfd), || side.sync("blocked")), IN | at_end);
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
}

/// As event loops do that ask for edges, but not for EPOLLRDHUP: Xorg's, Boost.Asio's.
fn edge_of_death(side: &Side, fd: Fd, messages: usize) {
    let at_end = side.hangup_at_end() as u32;
    let epfd = set_with(fd, EPOLLIN | EPOLLET);
    for _ in 0..messages {
        assert_eq!(while_blocked(|| later(epfd), || side.sync("asleep")), IN);
        assert_eq!(calls::recv(fd, 10, libc::MSG_DONTWAIT), Ok(b"message".to_vec()));
        assert_eq!(calls::recv(fd, 10, libc::MSG_DONTWAIT), Err(Errno::EAGAIN));
    }
    assert_eq!(while_blocked(|| later(epfd), || side.sync("blocked")), IN | at_end);
    assert_eq!(calls::recv(fd, 10, libc::MSG_DONTWAIT), Ok(vec![]));
}

fn sends_and_is_killed(side: &Side, fd: Fd, messages: usize) {
    for _ in 0..messages {
        side.sync("asleep");
        assert_eq!(calls::send(fd, b"message", 0), Ok(7));
    }
    is_killed_on_demand(side, fd);
}

fn full_is_not_writable(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN | EPOLLOUT);
    assert_eq!(later(epfd), OUT);
    let total = fill(fd);
    side.sync("full");
    assert_eq!(now(epfd), 0);
    let start = Start::now();
    assert_eq!(calls::epoll_wait(epfd, 8, 50), Ok(vec![]));
    assert_waited(start, Duration::from_millis(50));
    side.tell(total as u64);
    side.sync("drain now");
    side.sync("drained");
    assert_eq!(later(epfd), OUT);
    side.sync("done");
}

/// As a program that asks between other work whether it may write, and whose peer reads nothing before it has all.
fn room_without_sleep(side: &Side, fd: Fd) {
    // A peer that has still to read what came before would be one that reads on.
    side.sync("read");
    let epfd = set_with(fd, EPOLLOUT);
    let data = [7; 7000];
    let mut total = 0;
    // The kernel calls a socket writable as long as a third of its buffer is free, one of `AF_UNIX` three quarters.
    let parts = if side.family == Family::Unix { 2 } else { 5 };
    while total < side.always_taken() / 8 * parts {
        assert_eq!(now(epfd), OUT, "{total} bytes have been sent");
        assert_eq!(calls::send(fd, &data, libc::MSG_DONTWAIT), Ok(data.len()));
        total += data.len();
    }
    side.sync("full");
    side.tell(total as u64);
    side.sync("drain now");
    side.sync("drained");
    side.sync("done");
}

fn woken_by_room(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN | EPOLLOUT);
    let total = fill(fd);
    side.sync("full");
    side.tell(total as u64);
    assert_eq!(while_blocked(|| later(epfd), || side.sync("drain now")), OUT);
    side.sync("drained");
    side.sync("done");
}

fn edge_for_room(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN | EPOLLOUT | EPOLLET);
    assert_eq!(later(epfd), OUT);
    let total = fill(fd);
    side.sync("full");
    assert_eq!(now(epfd), 0);
    side.tell(total as u64);
    assert_eq!(while_blocked(|| later(epfd), || side.sync("drain now")), OUT);
    side.sync("drained");
    // A kernel may make further edges while the other side goes on reading.
    quietly(|| while calls::epoll_wait(epfd, 8, 0).is_ok_and(|ready| !ready.is_empty()) {});
    assert_eq!(now(epfd), 0);
    side.sync("done");
}

/// Written by a timer, so to speak: the set has long had nothing to report when a file does not fit.
fn edge_after_sendfile(side: &Side, fd: Fd) {
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    let epfd = set_with(fd, EPOLLIN | EPOLLOUT | EPOLLET);
    assert_eq!(later(epfd), OUT);
    for _ in 0..20 {
        let ready = quietly(|| calls::epoll_wait(epfd, 8, 1)).expect("epoll_wait");
        // Over `AF_UNIX` it is an edge of room when the other side reads the last message of the warm-up.
        assert!(ready.is_empty() || side.family == Family::Unix);
    }
    let file = calls::file_with(&[b'f'; 32768]).expect("memfd_create");
    let mut total = 0;
    quietly(|| {
        loop {
            calls::seek(file, 0).expect("lseek");
            match calls::sendfile(fd, file, 32768) {
                Ok(sent) => total += sent,
                Err(error) => break assert_eq!(error, Errno::EAGAIN),
            }
        }
    });
    side.sync("full");
    side.tell(total as u64);
    assert_eq!(while_blocked(|| later(epfd), || side.sync("drain now")), OUT);
    side.sync("drained");
    side.sync("done");
}

fn write_only_interest(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLOUT);
    assert_eq!(later(epfd), OUT);
    demand(side);
    await_readable(fd);
    assert_eq!(later(epfd), OUT);
    assert_eq!(later(epfd), OUT);
    calls::epoll_modify(epfd, fd, EPOLLOUT | EPOLLET, 2).expect("EPOLL_CTL_MOD");
    assert_eq!(later(epfd), OUT);
    assert_eq!(now(epfd), 0);
    stop(side);
}

fn write_only_when_full(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLOUT);
    let total = fill(fd);
    side.sync("full");
    assert_eq!(now(epfd), 0);
    side.tell(total as u64);
    assert_eq!(while_blocked(|| later(epfd), || side.sync("drain now")), OUT);
    side.sync("drained");
    side.sync("done");
}

fn other_names(side: &Side, fd: Fd) {
    let all = libc::EPOLLRDNORM | libc::EPOLLRDBAND | libc::EPOLLWRNORM | libc::EPOLLWRBAND | libc::EPOLLPRI;
    let epfd = set_with(fd, all);
    let _ = later(epfd);
    demand(side);
    await_readable(fd);
    let _ = later(epfd);
    stop(side);
}

fn timeouts(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN);
    let timeout = Duration::from_millis(70);
    for round in 0..3 {
        let start = Start::now();
        let ready = match round {
            0 => calls::epoll_wait(epfd, 8, 70),
            1 => calls::epoll_pwait(epfd, 8, 70, None),
            _ => calls::epoll_pwait_until(epfd, 8, Some(timeout), None),
        };
        assert_eq!(ready, Ok(vec![]));
        assert_waited(start, timeout);
    }
    assert_eq!(calls::epoll_pwait_until(epfd, 8, Some(Duration::from_nanos(10)), None), Ok(vec![]));
    assert_eq!(calls::epoll_pwait_until(epfd, 8, Some(Duration::ZERO), None), Ok(vec![]));
    side.sync("done");
}

fn wrong_arguments(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN);
    // Before anything polls the set from outside, or is added to it.
    for operation in [libc::EPOLL_CTL_ADD, libc::EPOLL_CTL_MOD] {
        assert_eq!(calls::epoll_ctl_from_nowhere(epfd, operation, fd), Err(Errno::EFAULT));
    }
    assert_eq!(calls::epoll_wait(epfd, 0, 0), Err(Errno::EINVAL));
    assert_eq!(calls::epoll_wait(fd, 8, 0), Err(Errno::EINVAL));
    assert_eq!(calls::epoll_wait(999, 8, 0), Err(Errno::EBADF));
    assert_eq!(calls::epoll_add(epfd, 999, EPOLLIN, 1), Err(Errno::EBADF));
    assert_eq!(calls::epoll_add(999, fd, EPOLLIN, 1), Err(Errno::EBADF));
    assert_eq!(calls::epoll_add(epfd, epfd, EPOLLIN, 1), Err(Errno::EINVAL));
    assert_eq!(calls::epoll_add(fd, epfd, EPOLLIN, 1), Err(Errno::EINVAL));
    let file = calls::file_with(b"x").expect("memfd_create");
    assert_eq!(calls::epoll_add(epfd, file, EPOLLIN, 1), Err(Errno::EPERM));
    assert_eq!(calls::epoll_modify(epfd, file, EPOLLIN, 1), Err(Errno::EPERM));
    side.sync("done");
}

/// Mistaken for a set, it stays what it is.
fn no_set(side: &Side, fd: Fd) {
    let copy = calls::dup(fd).expect("dup");
    let unconnected = calls::stream_socket(side.family, 0).expect("socket");
    for (epfd, other) in [(copy, fd), (fd, copy), (copy, unconnected), (unconnected, fd)] {
        assert_eq!(calls::epoll_add(epfd, other, EPOLLIN, 1), Err(Errno::EINVAL));
        assert_eq!(calls::epoll_modify(epfd, other, EPOLLIN, 1), Err(Errno::EINVAL));
        assert_eq!(calls::epoll_delete(epfd, other), Err(Errno::EINVAL));
        for number in [fd, copy] {
            demand(side);
            assert_eq!(receive_exactly(number, 4), b"data");
        }
    }
    stop(side);
}

fn data_unchanged(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    let (reading, writing) = calls::pipe().expect("pipe");
    let odd = 0xdead_beef_0bad_cafe;
    calls::epoll_add(epfd, fd, EPOLLIN, odd).expect("EPOLL_CTL_ADD");
    calls::epoll_add(epfd, reading, EPOLLIN, odd).expect("EPOLL_CTL_ADD");
    assert_eq!(calls::write(writing, b"p"), Ok(1));
    demand(side);
    await_readable(fd);
    let ready = calls::epoll_wait(epfd, 1, -1).expect("epoll_wait");
    assert!(ready.iter().all(|ready| ready.data == odd));
    for data in [0, u64::MAX, 1 << 63] {
        calls::epoll_modify(epfd, fd, EPOLLIN, data).expect("EPOLL_CTL_MOD");
        // How many of those that are ready one call tells of is its own affair.
        quietly(|| {
            while !calls::epoll_wait(epfd, 8, -1).expect("epoll_wait").iter().any(|ready| ready.data == data)
            {
            }
        });
    }
    stop(side);
}

fn close_takes_it_out(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN);
    demand(side);
    assert_eq!(later(epfd), IN);
    stop(side);
    calls::close(fd).expect("close");
    assert_eq!(now(epfd), 0);
    // The number's next owner is not in the set.
    let (reading, writing) = calls::pipe().expect("pipe");
    assert_eq!(reading, fd, "the lowest free descriptor");
    let _ = calls::write(writing, b"p");
    assert_eq!(now(epfd), 0);
    assert_eq!(calls::epoll_delete(epfd, reading), Err(Errno::ENOENT));
}

fn copy_keeps_it_in(side: &Side, fd: Fd) {
    // epoll(7): an entry lives as long as its open file description.
    let epfd = set_with(fd, EPOLLIN);
    let copy = calls::dup(fd).expect("dup");
    calls::close(fd).expect("close");
    demand(side);
    assert_eq!(later(epfd), IN);
    assert_eq!(calls::recv(copy, 10, 0), Ok(b"data".to_vec()));
    assert_eq!(now(epfd), 0);
    assert_eq!(while_blocked(|| later(epfd), || demand(side)), IN);
    stop(side);
    calls::close(copy).expect("close");
    assert_eq!(now(epfd), 0);
}

/// The kernel knows an entry by a number that is closed, and is asked for its readiness from outside.
fn copy_keeps_it_ready(side: &Side, fd: Fd) {
    let copy = calls::dup(fd).expect("dup");
    let epfd = set_with(fd, EPOLLIN | EPOLLOUT);
    calls::close(fd).expect("close");
    let is_ready = || calls::poll(&[(epfd, libc::POLLIN)], 0) == Ok(vec![libc::POLLIN]);
    assert!(is_ready());
    let total = fill(copy);
    side.sync("full");
    assert!(!is_ready());
    assert_eq!(now(epfd), 0);
    side.tell(total as u64);
    let later = || calls::poll(&[(epfd, libc::POLLIN)], -1);
    assert_eq!(while_blocked(later, || side.sync("drain now")), Ok(vec![libc::POLLIN]));
    side.sync("drained");
    assert_eq!(now(epfd), OUT);
    // The number is free for others.
    assert_eq!(calls::dup(epfd), Ok(fd));
    side.sync("done");
}

fn two_entries(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN);
    let copy = calls::dup(fd).expect("dup");
    calls::epoll_add(epfd, copy, EPOLLIN | EPOLLET, 2).expect("EPOLL_CTL_ADD");
    demand(side);
    await_readable(fd);
    assert_eq!(calls::epoll_wait(epfd, 8, -1).map(|ready| ready.len()), Ok(2));
    assert_eq!(calls::epoll_wait(epfd, 8, -1).map(|ready| ready.len()), Ok(1));
    calls::epoll_delete(epfd, fd).expect("EPOLL_CTL_DEL");
    assert_eq!(calls::epoll_wait(epfd, 8, 0), Ok(vec![]));
    demand(side);
    assert_eq!(calls::epoll_wait(epfd, 8, -1).map(|ready| ready.len()), Ok(1));
    stop(side);
}

fn two_sets(side: &Side, fd: Fd) {
    let level = set_with(fd, EPOLLIN);
    let edge = set_with(fd, EPOLLIN | EPOLLET);
    for _ in 0..2 {
        demand(side);
        assert_eq!(later(level), IN);
        assert_eq!(later(edge), IN);
        assert_eq!(later(level), IN);
        assert_eq!(now(edge), 0);
        let _ = calls::recv(fd, 10, 0);
        assert_eq!(now(level), 0);
    }
    stop(side);
}

fn nested(side: &Side, fd: Fd) {
    let inner = set_with(fd, EPOLLIN);
    let outer = set_with(inner, EPOLLIN);
    assert_eq!(now(outer), 0);
    assert_eq!(while_blocked(|| later(outer), || demand(side)), IN);
    assert_eq!(later(inner), IN);
    assert_eq!(later(outer), IN);
    let _ = calls::recv(fd, 10, 0);
    assert_eq!(now(inner), 0);
    assert_eq!(now(outer), 0);
    demand(side);
    assert_eq!(later(outer), IN);
    stop(side);
}

fn peeked(side: &Side, fd: Fd) {
    let epfd = set_with(fd, EPOLLIN);
    demand(side);
    assert_eq!(later(epfd), IN);
    let _ = calls::recv(fd, 10, libc::MSG_PEEK);
    assert_eq!(later(epfd), IN);
    let _ = calls::recv(fd, 10, 0);
    assert_eq!(now(epfd), 0);
    say!("done");
    stop(side);
}

//! What `shutdown` does to an `AF_UNIX` stream, where it does otherwise than TCP: each end knows at once what the other one does.

use std::os::raw::c_int;

use libc::{
    EPOLLET, EPOLLIN, MSG_DONTWAIT, MSG_NOSIGNAL, MSG_PEEK, POLLIN, POLLOUT, POLLRDHUP, SHUT_RD, SHUT_RDWR,
    SHUT_WR,
};

use super::ending::every_write_fails;
use super::peers::{fill, send_all};
use super::unix_rights::late;
use super::unix_streams::{
    Watch, awaits_room_by_epoll, both, look, new_set, polls_for_room, sends_a_file_until_it_ends,
    sends_a_part, writes_until_it_ends,
};
use super::{Behaviour, Tally};
use crate::calls::{self, Beside, Errno, Fd, caught, quietly};
use crate::say;
use crate::side::{
    Pattern, Side, await_readable, await_stopped, receive_exactly, receive_pattern_to_end, while_blocked,
};

pub(super) const ALL: &[Behaviour] = &[
    both("reading_is_shut_down", stops_reading, finds_nobody_reads),
    both("reading_is_shut_down_with_much_unread", stops_reading_with_much_unread, fills_and_fails),
    both(
        "reading_is_shut_down_while_a_write_waits",
        shuts_down_while_blocked::<SHUT_RD>,
        writes_until_it_ends,
    ),
    both(
        "reading_is_shut_down_while_a_write_has_sent_a_part",
        shuts_down_while_blocked::<SHUT_RD>,
        sends_a_part,
    ),
    both(
        "reading_is_shut_down_while_sendfile_waits",
        shuts_down_while_blocked::<SHUT_RD>,
        sends_a_file_until_it_ends,
    ),
    both("reading_is_shut_down_while_poll_waits_for_room", stops_and_reads, polls_for_room),
    both("reading_is_shut_down_while_epoll_waits_for_room", stops_and_reads, awaits_room_by_epoll),
    both("reading_is_shut_down_while_it_waits", wakes_its_own_reader, sends_on),
    both("reading_is_shut_down_while_it_reads_and_writes", wakes_its_reader_beside_a_writer, reads_late),
    both("reading_is_shut_down_while_it_polls_and_writes", wakes_its_poll_beside_a_writer, reads_late),
    both("reading_is_shut_down_while_epoll_waits_and_it_writes", wakes_its_set_beside_a_writer, reads_late),
    both("both_stop_reading_with_much_unread", stops_reading_behind_much, stops_reading_before_much),
    both("reading_is_shut_down_while_a_stopped_process_waits_for_room", wakes_its_reader, stands_still),
    both("all_is_shut_down_while_a_write_waits", shuts_down_while_blocked::<SHUT_RDWR>, writes_until_it_ends),
    both("reading_is_shut_down_then_it_closes", stops_reading_and_sees_it_closed, closes_when_nobody_reads),
    both("reading_is_shut_down_after_1_round", stops_reading_after::<1>, waits_after::<1>),
    both("reading_is_shut_down_after_2_rounds", stops_reading_after::<2>, waits_after::<2>),
    both("reading_is_shut_down_after_4_rounds", stops_reading_after::<4>, waits_after::<4>),
    both("reading_is_shut_down_after_8_rounds", stops_reading_after::<8>, waits_after::<8>),
    both("reading_is_shut_down_before_sendmmsg", stops_reading_soon, sends_several_messages),
    both("reading_is_shut_down_before_sendfile", stops_reading_soon, sends_a_file),
    late("reading_is_shut_down_before_a_descriptor_comes", stops_reading_behind_bytes, gives_to_nobody)
        .tally(Tally::Returned(1), Tally::Returned(1)),
    late("reading_is_shut_down_before_a_descriptor_goes", stops_reading_and_gives, takes_and_gives_to_nobody)
        .tally(Tally::Returned(1), Tally::Returned(1)),
    both("spliced_after_the_end", splices_after_the_end, sends_little_soon),
    both("one_way_goes_on", stops_reading_and_sends_on, receives_to_the_end),
    both("shut_down_reading_writing", shuts_down::<0, true>, shuts_down::<0, false>),
    both("shut_down_writing_reading", shuts_down::<1, true>, shuts_down::<1, false>),
    both("shut_down_reading_there_writing", shuts_down::<2, true>, shuts_down::<2, false>),
    both("shut_down_reading_there_reading", shuts_down::<3, true>, shuts_down::<3, false>),
    both("shut_down_writing_there_writing", shuts_down::<4, true>, shuts_down::<4, false>),
    both("shut_down_writing_there_reading", shuts_down::<5, true>, shuts_down::<5, false>),
    both("shut_down_both_then_there_each", shuts_down::<6, true>, shuts_down::<6, false>),
    both("shut_down_reading_then_both", shuts_down::<7, true>, shuts_down::<7, false>),
    both("shut_down_writing_then_both_there_too", shuts_down::<8, true>, shuts_down::<8, false>),
    both("shut_down_reading_here_and_there_writing_too", shuts_down::<9, true>, shuts_down::<9, false>),
    both("shut_down_the_same_again", shuts_down::<10, true>, shuts_down::<10, false>),
    both("edges_of_shut_down_reading", tells_of_edges::<0, true>, tells_of_edges::<0, false>)
        .limitation("**Edges without news**"),
    both("edges_of_shut_down_writing", tells_of_edges::<1, true>, tells_of_edges::<1, false>),
    both("edges_of_shut_down_both_then_there_each", tells_of_edges::<6, true>, tells_of_edges::<6, false>)
        .limitation("**Edges without news**"),
    both("edges_of_shut_down_the_same_again", tells_of_edges::<10, true>, tells_of_edges::<10, false>)
        .limitation("**Edges without news**"),
];

fn stops_reading(side: &Side, fd: Fd) {
    side.sync("sent");
    let watch = Watch::plainly(fd);
    assert_eq!(calls::shutdown(fd, SHUT_RD), Ok(0));
    side.sync("stopped");
    look(fd);
    watch.ask();
    side.sync("looked");
    assert_eq!(calls::recv(fd, 2, MSG_PEEK), Ok(b"on".to_vec()));
    assert_eq!(calls::recv(fd, 2, 0), Ok(b"on".to_vec()));
    look(fd);
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"etwo".to_vec()));
    for _ in 0..3 {
        assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]));
    }
    look(fd);
    assert_eq!(calls::send(fd, b"still here", 0), Ok(10));
    side.sync("answered");
    side.sync("read");
    calls::close(fd).expect("close");
    side.sync("closed");
    side.sync("done");
}

fn finds_nobody_reads(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    let watch = Watch::plainly(fd);
    assert_eq!(calls::send(fd, b"one", 0), Ok(3));
    assert_eq!(calls::send(fd, b"two", 0), Ok(3));
    side.sync("sent");
    side.sync("stopped");
    look(fd);
    watch.ask();
    every_write_fails(side, fd, Errno::EPIPE);
    side.sync("looked");
    side.sync("answered");
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"still here".to_vec()));
    assert_eq!(calls::recv(fd, 100, MSG_DONTWAIT), Err(Errno::EAGAIN));
    look(fd);
    side.sync("read");
    side.sync("closed");
    look(fd);
    assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]));
    let _ = calls::pending_error(fd);
    side.sync("done");
}

/// All that was sent is read, although the sender learns that nobody reads.
fn stops_reading_with_much_unread(side: &Side, fd: Fd) {
    let sent = side.told() as usize;
    assert_eq!(calls::shutdown(fd, SHUT_RD), Ok(0));
    side.sync("stopped");
    assert_eq!(receive_pattern_to_end(fd, &mut Pattern::new(51)), sent);
    side.sync("done");
}

fn fills_and_fails(side: &Side, fd: Fd) {
    let mut pattern = Pattern::new(51);
    while let Ok(sent) = quietly(|| calls::send(fd, &pattern.take(10_000), MSG_DONTWAIT)) {
        pattern.put_back(10_000 - sent);
    }
    side.tell(pattern.position() - 10_000);
    side.sync("stopped");
    assert_eq!(calls::send(fd, b"x", MSG_NOSIGNAL), Err(Errno::EPIPE));
    assert_eq!(calls::send(fd, b"x", MSG_NOSIGNAL | MSG_DONTWAIT), Err(Errno::EPIPE));
    side.sync("done");
}

fn shuts_down_while_blocked<const HOW: c_int>(side: &Side, fd: Fd) {
    side.sync("blocked");
    assert_eq!(calls::shutdown(fd, HOW), Ok(0));
    side.sync("ended");
    side.sync("done");
}

/// Who waits for room has none while nobody reads, though there never will be a reader.
fn stops_and_reads(side: &Side, fd: Fd) {
    side.sync("blocked");
    assert_eq!(calls::shutdown(fd, SHUT_RD), Ok(0));
    assert!(!side.is_awaited(), "it wakes although there is no room");
    while !quietly(|| calls::recv(fd, 65536, 0)).expect("recv").is_empty() {}
    side.sync("ended");
    side.sync("done");
}

fn wakes_its_own_reader(side: &Side, fd: Fd) {
    let data = while_blocked(
        || calls::recv(fd, 100, 0),
        || assert_eq!(quietly(|| calls::shutdown(fd, SHUT_RD)), Ok(0)),
    );
    assert_eq!(data, Ok(vec![]));
    look(fd);
    side.sync("stopped");
    side.sync("refused");
    let _ = calls::recv(fd, 100, 0);
    assert_eq!(calls::send(fd, b"bye", 0), Ok(3));
    side.sync("done");
}

fn stops_reading_behind_much(side: &Side, fd: Fd) {
    side.tell(fill(fd) as u64);
    side.sync("stopped");
    assert_eq!(calls::shutdown(fd, SHUT_RD), Ok(0));
    for _ in 0..2 {
        assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
    }
    side.sync("read");
    side.sync("done");
}

fn stops_reading_before_much(side: &Side, fd: Fd) {
    let total = side.told() as usize;
    assert_eq!(calls::shutdown(fd, SHUT_RD), Ok(0));
    side.sync("stopped");
    side.sync("read");
    receive_exactly(fd, total);
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
    side.sync("done");
}

/// While a thread is in a write that does not fit, and another sleeps in `wait`, a third shuts down reading.
fn stops_reading_beside_a_writer(side: &Side, fd: Fd, wait: impl FnOnce() + Send) {
    let stops = || assert_eq!(quietly(|| calls::shutdown(fd, SHUT_RD)), Ok(0));
    let waits = || {
        while_blocked(|| quietly(wait), stops);
        side.sync("stopped");
    };
    while_blocked(|| quietly(|| send_all(fd, &Pattern::new(53).take(3 << 20))), waits);
    calls::shutdown(fd, SHUT_WR).expect("shutdown");
    side.sync("done");
}

fn wakes_its_reader_beside_a_writer(side: &Side, fd: Fd) {
    stops_reading_beside_a_writer(side, fd, || assert_eq!(calls::recv(fd, 100, 0), Ok(vec![])));
}

fn wakes_its_poll_beside_a_writer(side: &Side, fd: Fd) {
    stops_reading_beside_a_writer(side, fd, || {
        assert_eq!(calls::poll(&[(fd, POLLIN | POLLRDHUP)], -1), Ok(vec![POLLIN | POLLRDHUP]));
    });
}

fn wakes_its_set_beside_a_writer(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, EPOLLIN, 7).expect("EPOLL_CTL_ADD");
    stops_reading_beside_a_writer(side, fd, || {
        let ready = calls::epoll_wait(epfd, 8, -1).expect("epoll_wait");
        assert_eq!(
            ready.iter().map(|event| (event.data, event.events)).collect::<Vec<_>>(),
            [(7, EPOLLIN as u32)]
        );
    });
}

/// The other end sleeps for room, and has it, but has been stopped.
fn wakes_its_reader(side: &Side, fd: Fd) {
    let (total, pid) = (side.told() as usize, side.told() as libc::pid_t);
    calls::kill(pid, libc::SIGSTOP).expect("kill");
    await_stopped(pid);
    receive_exactly(fd, total);
    let stops = || assert_eq!(quietly(|| calls::shutdown(fd, SHUT_RD)), Ok(0));
    assert_eq!(while_blocked(|| calls::recv(fd, 100, 0), stops), Ok(vec![]));
    calls::kill(pid, libc::SIGCONT).expect("kill");
    side.sync("done");
}

fn stands_still(side: &Side, fd: Fd) {
    let total = fill(fd);
    let tells = || {
        side.tell(total as u64);
        side.tell(std::process::id().into());
    };
    let ready = while_blocked(|| quietly(|| calls::poll(&[(fd, POLLOUT)], -1)), tells);
    assert_eq!(ready, Ok(vec![POLLOUT]));
    assert_eq!(calls::send(fd, b"x", MSG_NOSIGNAL), Err(Errno::EPIPE));
    side.sync("done");
}

fn reads_late(side: &Side, fd: Fd) {
    side.sync("stopped");
    assert_eq!(calls::send(fd, b"x", MSG_NOSIGNAL), Err(Errno::EPIPE));
    assert_eq!(receive_pattern_to_end(fd, &mut Pattern::new(53)), 3 << 20);
    side.sync("done");
}

fn sends_on(side: &Side, fd: Fd) {
    side.sync("stopped");
    assert_eq!(calls::send(fd, b"x", MSG_NOSIGNAL), Err(Errno::EPIPE));
    side.sync("refused");
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"bye".to_vec()));
    side.sync("done");
}

fn stops_reading_and_sends_on(side: &Side, fd: Fd) {
    side.sync("sent");
    assert_eq!(calls::shutdown(fd, SHUT_RD), Ok(0));
    side.sync("stopped");
    send_all(fd, &Pattern::new(52).take(3 << 20));
    calls::shutdown(fd, SHUT_WR).expect("shutdown");
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"unread".to_vec()));
    assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]));
    side.sync("done");
}

fn receives_to_the_end(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    side.sync("sent");
    side.sync("stopped");
    await_readable(fd);
    assert_eq!(calls::send(fd, b"x", MSG_NOSIGNAL), Err(Errno::EPIPE));
    assert_eq!(receive_pattern_to_end(fd, &mut Pattern::new(52)), 3 << 20);
    assert_eq!(calls::send(fd, b"x", MSG_NOSIGNAL), Err(Errno::EPIPE));
    look(fd);
    side.sync("done");
}

/// Which side, left if true, shuts down what.
type Step = (bool, c_int);

const STEPS: [&[Step]; 11] = [
    &[(true, SHUT_RD), (true, SHUT_WR)],
    &[(true, SHUT_WR), (true, SHUT_RD)],
    &[(true, SHUT_RD), (false, SHUT_WR)],
    &[(true, SHUT_RD), (false, SHUT_RD)],
    &[(true, SHUT_WR), (false, SHUT_WR)],
    &[(true, SHUT_WR), (false, SHUT_RD)],
    &[(true, SHUT_RDWR), (false, SHUT_RD), (false, SHUT_WR)],
    &[(true, SHUT_RD), (true, SHUT_RDWR)],
    &[(true, SHUT_WR), (true, SHUT_RDWR), (false, SHUT_RDWR)],
    &[(true, SHUT_RD), (false, SHUT_RD), (true, SHUT_WR), (false, SHUT_WR)],
    &[(true, SHUT_RD), (true, SHUT_RD), (false, SHUT_WR), (false, SHUT_WR), (false, SHUT_RDWR)],
];

/// Each side has bytes unread when it begins. After each step both look, and then try to send, the left side first.
fn shuts_down<const N: usize, const LEFT: bool>(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    side.sync("sent");
    for (number, &(left, how)) in STEPS[N].iter().enumerate() {
        let watch = Watch::plainly(fd);
        side.sync("watched");
        if left == LEFT {
            assert_eq!(calls::shutdown(fd, how), Ok(0));
        }
        side.sync("shut down");
        say!("step {number}");
        look(fd);
        watch.ask();
        side.sync("looked");
        for sender in [true, false] {
            if sender == LEFT {
                let _ = calls::send(fd, b"more", 0);
                say!("SIGPIPE {}", caught(libc::SIGPIPE));
            }
            side.sync("tried");
        }
    }
    for _ in 0..4 {
        let _ = calls::recv(fd, 8, MSG_DONTWAIT);
    }
    look(fd);
    side.sync("read");
    calls::close(fd).expect("close");
}

/// An edge-triggered set tells after each step of its side and of the other.
fn tells_of_edges<const N: usize, const LEFT: bool>(side: &Side, fd: Fd) {
    let set = new_set(fd, EPOLLET);
    side.sync("watched");
    for (number, &(left, how)) in STEPS[N].iter().enumerate() {
        if left == LEFT {
            assert_eq!(calls::shutdown(fd, how), Ok(0));
        }
        side.sync("shut down");
        say!("step {number}");
        let _ = calls::epoll_wait(set, 4, 0);
        let _ = calls::epoll_wait(set, 4, 0);
        side.sync("told");
    }
}

/// A few rounds: a connection that has made none before leaves the kernel's socket meanwhile, or is about to.
fn rounds(side: &Side, fd: Fd, count: usize) {
    if side.listens {
        side.answer_warm_up_with(fd, count);
    } else {
        side.warm_up_with(fd, count);
    }
}

fn some_rounds(side: &Side, fd: Fd) {
    rounds(side, fd, 2);
}

/// The other side has read all: there is no reset.
fn stops_reading_and_sees_it_closed(side: &Side, fd: Fd) {
    some_rounds(side, fd);
    assert_eq!(calls::shutdown(fd, SHUT_RD), Ok(0));
    side.sync("stopped");
    side.sync("closed");
    look(fd);
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
    assert_eq!(calls::pending_error(fd), Ok(Errno(0)));
    assert_eq!(calls::send(fd, b"x", MSG_NOSIGNAL), Err(Errno::EPIPE));
    side.sync("done");
}

fn closes_when_nobody_reads(side: &Side, fd: Fd) {
    some_rounds(side, fd);
    side.sync("stopped");
    calls::close(fd).expect("close");
    side.sync("closed");
    side.sync("done");
}

/// Of two reads without a wait and one with it none waits.
fn stops_reading_after<const ROUNDS: usize>(side: &Side, fd: Fd) {
    rounds(side, fd, ROUNDS);
    assert_eq!(calls::shutdown(fd, SHUT_RD), Ok(0));
    assert_eq!(calls::recv(fd, 10, MSG_DONTWAIT), Ok(vec![]));
    assert_eq!(calls::recv(fd, 10, MSG_DONTWAIT), Ok(vec![]));
    assert_eq!(calls::recvmsg(fd, &[20_000], 0, 0).map(|received| received.data), Ok(vec![]));
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
    assert_eq!(calls::read(fd, 10), Ok(vec![]));
    side.sync("done");
}

fn waits_after<const ROUNDS: usize>(side: &Side, fd: Fd) {
    rounds(side, fd, ROUNDS);
    side.sync("done");
}

fn stops_reading_soon(side: &Side, fd: Fd) {
    some_rounds(side, fd);
    assert_eq!(calls::shutdown(fd, SHUT_RD), Ok(0));
    side.sync("stopped");
    side.sync("done");
}

fn sends_several_messages(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    some_rounds(side, fd);
    side.sync("stopped");
    assert_eq!(calls::sendmmsg(fd, &[b"x", b"y"], 0), Err(Errno::EPIPE));
    say!("SIGPIPE {}", caught(libc::SIGPIPE));
    side.sync("done");
}

fn sends_a_file(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    some_rounds(side, fd);
    side.sync("stopped");
    let file = calls::file_with(b"contents").expect("memfd_create");
    assert_eq!(calls::sendfile(fd, file, 8), Err(Errno::EPIPE));
    say!("SIGPIPE {}", caught(libc::SIGPIPE));
    side.sync("done");
}

/// It makes no call after that before the other side has made its own.
fn stops_reading_behind_bytes(side: &Side, fd: Fd) {
    side.sync("sent");
    assert_eq!(calls::shutdown(fd, SHUT_RD), Ok(0));
    side.sync("stopped");
    side.sync("given");
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"unread".to_vec()));
    assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]));
    side.sync("done");
}

fn gives_to_nobody(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    side.sync("sent");
    side.sync("stopped");
    gives_in_vain(fd);
    side.sync("given");
    side.sync("done");
}

fn gives_in_vain(fd: Fd) {
    let beside = Beside { fds: &[0], ..Beside::default() };
    assert_eq!(calls::sendmsg_with(fd, &[b"with"], beside, 0), Err(Errno::EPIPE));
    say!("SIGPIPE {}", caught(libc::SIGPIPE));
    assert_eq!(calls::sendmsg_with(fd, &[b"with"], beside, MSG_NOSIGNAL), Err(Errno::EPIPE));
    assert_eq!(calls::send(fd, b"without", 0), Err(Errno::EPIPE));
    say!("SIGPIPE {}", caught(libc::SIGPIPE));
}

fn stops_reading_and_gives(side: &Side, fd: Fd) {
    side.sync("sent");
    assert_eq!(calls::shutdown(fd, SHUT_RD), Ok(0));
    let beside = Beside { fds: &[0], ..Beside::default() };
    assert_eq!(calls::sendmsg_with(fd, &[b"with"], beside, 0), Ok(4));
    side.sync("given");
    side.sync("given back");
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"unread".to_vec()));
    assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]));
    side.sync("done");
}

fn takes_and_gives_to_nobody(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    side.sync("sent");
    side.sync("given");
    gives_in_vain(fd);
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"with".to_vec()));
    side.sync("given back");
    side.sync("done");
}

/// Its own bytes go nowhere, and those that it has not read stay.
fn splices_after_the_end(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    some_rounds(side, fd);
    side.sync("sent");
    assert_eq!(calls::shutdown(fd, SHUT_WR), Ok(0));
    let (reading, writing) = calls::pipe().expect("pipe");
    assert_eq!(calls::write(writing, b"contents"), Ok(8));
    assert_eq!(calls::splice(reading, fd, 8), Err(Errno::EPIPE));
    say!("SIGPIPE {}", caught(libc::SIGPIPE));
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"little".to_vec()));
    side.sync("done");
}

fn sends_little_soon(side: &Side, fd: Fd) {
    some_rounds(side, fd);
    assert_eq!(calls::send(fd, b"little", 0), Ok(6));
    side.sync("sent");
    side.sync("done");
}

//! Whether a process that dies resets the connection: if it has not read all that was sent to it, or has asked for that by `SO_LINGER` of
//! zero time. Else its stream ends in order, whatever bells it has not read.

use std::time::{Duration, Instant};

use super::epoll_edges::{look_in_vain, sends_over_tcp, with_bytes_on_tcp};
use super::{Behaviour, Tally};
use crate::calls::{self, End, Fd, Outcome, caught, quietly};
use crate::say;
use crate::side::{ARRIVAL, Side, await_end_of, await_hangup, await_unread, receive_exactly, while_blocked};

pub(super) const ALL: &[Behaviour] = &[
    killed("killed_with_linger_zero", dies_with_linger::<0>, sees_how_it_ended),
    killed("killed_with_linger_zero_no_more", dies_with_linger::<1>, sees_how_it_ended),
    killed("killed_with_a_time_to_linger", dies_with_linger::<2>, sees_how_it_ended),
    killed("killed_with_linger_zero_after_its_end", dies_with_linger::<3>, sees_how_it_died),
    killed_server("killed_with_linger_zero_set_early", dies_with_early_linger, sees_it_die),
    killed_server("killed_with_unread_bytes_on_tcp", dies_with_bytes_on_tcp, shuts_down_behind_them),
    killed_server("killed_when_it_had_read_them", dies_having_read, shuts_down_behind_them),
    Behaviour::connected("exits_with_linger_zero", exits_with_linger, sees_it_die_and_read_little),
    Behaviour::connected("disconnected", disconnects::<false>, sees_how_it_ended).tcp_only(),
    Behaviour::connected("disconnected_after_its_end", disconnects::<true>, sees_how_it_died).tcp_only(),
    Behaviour::connected("disconnected_by_a_copy", disconnects_a_copy, sees_how_it_ended).tcp_only(),
    Behaviour::connected("disconnected_beside_a_reader", disconnects_beside, sees_how_it_ended).tcp_only(),
    Behaviour::connected("closed_by_the_deaf_when_the_other_was_back", is_deaf_and_closes, goes_back_from_it)
        .alone(&["unsupported-call"])
        .tally(Tally::Unknown, Tally::Returned(1)),
    Behaviour::connected("closed_with_bytes_unread", closes_with_bytes_unread, is_over),
    killed("killed_with_bytes_unread", dies_with_bytes_unread, asks_for_the_error),
    moved("told_by_splice_to_it", |side, fd| {
        is_told_by(side, fd, |(output, _)| calls::splice(output, fd, 5));
    }),
    moved("told_by_splice_from_it", |side, fd| {
        is_told_by(side, fd, |(_, input)| calls::splice(fd, input, 5))
    }),
    moved("told_by_sendfile_from_it", |side, fd| {
        is_told_by(side, fd, |(_, input)| calls::sendfile(input, fd, 5));
    }),
    moved("told_before_urgent_data", |side, fd| {
        is_told_by(side, fd, |_| calls::send(fd, b"!", libc::MSG_OOB))
    })
    .alone(&["oob", "unsupported-call"]),
];

/// The left side is killed.
const fn killed(name: &'static str, left: fn(&Side, Fd), right: fn(&Side, Fd)) -> Behaviour {
    Behaviour::connected(name, left, right)
        .tally(Tally::Unknown, Tally::Upgraded(1))
        .end(End::Signal(libc::SIGKILL), End::Exit(0))
}

/// The same, of a server that has accepted the connection itself.
const fn killed_server(name: &'static str, left: fn(&Side), right: fn(&Side)) -> Behaviour {
    Behaviour::whole(name, left, right, Tally::Upgraded(1))
        .tally(Tally::Unknown, Tally::Upgraded(1))
        .end(End::Signal(libc::SIGKILL), End::Exit(0))
}

/// The right side finds a reset as it moves bytes by the kernel.
const fn moved(name: &'static str, right: fn(&Side, Fd)) -> Behaviour {
    Behaviour::connected(name, closes_with_linger, right)
        .alone(&["unsupported-call"])
        .tally(Tally::Upgraded(1), Tally::Total(1))
}

fn dies_with_linger<const HOW: u32>(side: &Side, fd: Fd) {
    let time = if HOW == 2 { 5 } else { 0 };
    calls::set_linger(fd, time).expect("SO_LINGER");
    if HOW == 1 {
        calls::clear_linger(fd).expect("SO_LINGER");
    }
    assert_eq!(calls::send(fd, b"before", 0), Ok(6));
    if HOW == 3 {
        assert_eq!(calls::shutdown(fd, libc::SHUT_WR), Ok(0));
    }
    side.sync("sent");
    side.sync("arrived");
    calls::kill_self();
}

fn closes_with_linger(side: &Side, fd: Fd) {
    calls::set_linger(fd, 0).expect("SO_LINGER");
    side.sync("linger");
    calls::close(fd).expect("close");
}

fn closes_with_bytes_unread(side: &Side, fd: Fd) {
    await_unread(fd, 6);
    calls::close(fd).expect("close");
    side.sync("closed");
}

/// The kernel itself knows that it is over, and tells whoever asks it.
fn is_over(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    side.sync("closed");
    await_hangup(fd);
    let address = quietly(|| calls::peer_address(fd));
    say!("it has a peer: {}", address.is_ok());
    for _ in 0..2 {
        let _ = calls::recv(fd, 10, 0);
    }
    let _ = calls::send(fd, b"late", 0);
    say!("SIGPIPE {}", caught(libc::SIGPIPE));
}

fn dies_with_bytes_unread(side: &Side, fd: Fd) {
    await_unread(fd, 6);
    side.tell(u64::from(std::process::id()));
    calls::kill_self();
}

/// Nobody has looked at the connection since.
fn asks_for_the_error(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    await_end_of(side.told() as libc::pid_t);
    for _ in 0..2 {
        let _ = calls::pending_error(fd);
    }
    let _ = calls::recv(fd, 10, 0);
}

/// The first call tells of the reset, whichever it is, and no other.
fn is_told_by(side: &Side, fd: Fd, moves: impl Fn((Fd, Fd)) -> Outcome<usize>) {
    calls::catch(libc::SIGPIPE, true);
    let ends = calls::pipe().expect("pipe");
    calls::write(ends.1, b"hello").expect("write");
    side.sync("linger");
    await_hangup(fd);
    for _ in 0..2 {
        let _ = moves(ends);
    }
    let _ = calls::recv(fd, 10, 0);
    let _ = calls::send(fd, b"late", 0);
    say!("SIGPIPE {}", caught(libc::SIGPIPE));
}

/// By connect(2) to `AF_UNSPEC`, as .NET does to wake its threads.
fn disconnects<const HAS_ENDED: bool>(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"before", 0), Ok(6));
    if HAS_ENDED {
        assert_eq!(calls::shutdown(fd, libc::SHUT_WR), Ok(0));
    }
    side.sync("sent");
    side.sync("arrived");
    assert_eq!(calls::disconnect(fd), Ok(0));
    tells_of_nothing(fd);
}

/// What the reader is told depends on the kernel (`EPIPE` since Linux 6.7).
fn disconnects_beside(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"before", 0), Ok(6));
    side.sync("sent");
    side.sync("arrived");
    let _ = while_blocked(|| calls::recv(fd, 4, 0), || assert_eq!(quietly(|| calls::disconnect(fd)), Ok(0)));
    tells_of_nothing(fd);
}

fn disconnects_a_copy(side: &Side, fd: Fd) {
    let copy = calls::dup(fd).expect("dup");
    assert_eq!(calls::send(copy, b"before", 0), Ok(6));
    side.sync("sent");
    side.sync("arrived");
    assert_eq!(calls::disconnect(copy), Ok(0));
    tells_of_nothing(copy);
    tells_of_nothing(fd);
}

/// Of a socket that is connected no more.
fn tells_of_nothing(fd: Fd) {
    let _ = calls::poll(&[(fd, libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP)], 0);
    let _ = calls::recv(fd, 4, libc::MSG_DONTWAIT);
    let _ = calls::send(fd, b"x", libc::MSG_NOSIGNAL);
    let _ = calls::pending_error(fd);
}

fn dies_with_early_linger(side: &Side) {
    let fd = side.accept(side.listen());
    calls::set_linger(fd, 0).expect("SO_LINGER");
    side.answer_warm_up(fd);
    assert_eq!(calls::send(fd, b"before", 0), Ok(6));
    side.sync("sent");
    side.sync("arrived");
    calls::kill_self();
}

fn sees_it_die(side: &Side) {
    let fd = side.connect_to(side.destination());
    side.warm_up(fd);
    sees_how_it_ended(side, fd);
}

fn sees_how_it_ended(side: &Side, fd: Fd) {
    waits_for_its_death(side, fd);
    tells_of_the_end(fd);
}

/// Its stream had ended before.
fn sees_how_it_died(side: &Side, fd: Fd) {
    waits_for_its_death(side, fd);
    await_hangup(fd);
    tells_of_the_end(fd);
}

fn waits_for_its_death(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    side.sync("sent");
    await_unread(fd, 6);
    side.sync("arrived");
}

fn tells_of_the_end(fd: Fd) {
    let events = || quietly(|| calls::poll(&[(fd, libc::POLLRDHUP)], ARRIVAL)).expect("poll")[0];
    let mut ready = events();
    assert_ne!(ready, 0, "it did not come");
    // The kernel notes the error of a reset first, and that nothing goes either way any more a moment later (`tcp_reset`).
    let start = Instant::now();
    while ready & (libc::POLLERR | libc::POLLHUP) == libc::POLLERR {
        assert!(
            start.elapsed() < Duration::from_millis(ARRIVAL.cast_unsigned().into()),
            "an error without a hang-up"
        );
        std::thread::yield_now();
        ready = events();
    }
    let _ = calls::poll(&[(fd, libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP)], 0);
    let _ = calls::poll(&[(fd, 0)], 0);
    let _ = calls::recv(fd, 4, 0);
    let _ = calls::pending_error(fd);
    for _ in 0..3 {
        let _ = calls::recv(fd, 100, 0);
    }
    let _ = calls::shutdown(fd, libc::SHUT_WR);
    say!("SIGPIPE {}", caught(libc::SIGPIPE));
}

/// What it has not read came over TCP, and the ring is empty.
fn dies_with_bytes_on_tcp(side: &Side) {
    let (_, fd) = with_bytes_on_tcp(side, peeks);
    side.sync("look now");
    side.sync("shut");
    let _ = calls::unread(fd);
    calls::kill_self();
}

fn dies_having_read(side: &Side) {
    let (_, fd) = with_bytes_on_tcp(side, peeks);
    side.sync("look now");
    side.sync("shut");
    assert_eq!(receive_exactly(fd, 4), b"more");
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
    calls::kill_self();
}

fn peeks(fd: Fd) {
    assert_eq!(calls::recv(fd, 4, libc::MSG_PEEK), Ok(b"more".to_vec()));
}

fn shuts_down_behind_them(side: &Side) {
    let fd = sends_over_tcp(side);
    side.sync("look now");
    look_in_vain(fd);
    assert_eq!(calls::shutdown(fd, libc::SHUT_WR), Ok(0));
    side.sync("shut");
    calls::catch(libc::SIGPIPE, true);
    await_hangup(fd);
    tells_of_the_end(fd);
}

fn exits_with_linger(side: &Side, fd: Fd) {
    calls::set_linger(fd, 0).expect("SO_LINGER");
    assert_eq!(calls::send(fd, b"before", 0), Ok(6));
    side.sync("sent");
    side.sync("arrived");
}

/// What it has not read is in the ring, and the other side has gone back to TCP alone: this one has told its kernel that it is done.
fn is_deaf_and_closes(side: &Side, fd: Fd) {
    side.sync("sent");
    await_unread(fd, 6);
    calls::shutdown(fd, libc::SHUT_RDWR).expect("shutdown");
    side.sync("deaf");
    side.sync("back");
    calls::close(fd).expect("close");
    side.sync("closed");
}

fn goes_back_from_it(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    side.sync("sent");
    side.sync("deaf");
    calls::set_status(fd, libc::O_RDWR | libc::O_ASYNC).expect("F_SETFL");
    side.sync("back");
    side.sync("closed");
    tells_of_the_end(fd);
}

fn sees_it_die_and_read_little(side: &Side, fd: Fd) {
    side.sync("sent");
    await_unread(fd, 6);
    assert_eq!(calls::recv(fd, 3, 0), Ok(b"bef".to_vec()));
    side.sync("arrived");
    tells_of_the_end(fd);
}

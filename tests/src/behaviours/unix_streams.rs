//! How `AF_UNIX` streams end, where they do so otherwise than TCP: each end knows at once what the other one does.
//!
//! Nothing here waits for news, unless it is about waiting: after the two sides have met, a side says with [`look`] and
//! [`Watch::ask`] all that it can know.

use std::os::raw::{c_int, c_short};
use std::time::Duration;

use libc::{
    EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLLPRI, EPOLLRDHUP, MSG_DONTWAIT, MSG_NOSIGNAL, MSG_PEEK,
    SHUT_RD, SHUT_RDWR, SHUT_WR,
};

use super::ending::every_write_fails;
use super::peers::fill;
use super::{Behaviour, Tally};
use crate::calls::{self, End, Errno, Fd, caught, quietly};
use crate::say;
use crate::side::{Side, await_hangup, await_unread, receive_exactly, while_blocked};

pub(super) const ALL: &[Behaviour] = &[
    both("closed_having_read_all", sees_it_closed, closes_when_watched),
    both("bytes_before_a_close", reads_what_was_sent_before, sends_and_closes),
    both("closed_while_a_write_waits", writes_until_it_ends, closes_while_blocked),
    both("closed_while_a_write_has_sent_a_part", sends_a_part, closes_having_read_some),
    both("closed_while_poll_waits_for_room", polls_for_room, closes_while_blocked),
    both("closed_while_select_waits_for_room", selects_for_room, closes_while_blocked),
    both("closed_while_epoll_waits_for_room", awaits_room_by_epoll, closes_while_blocked),
    both("closed_while_poll_waits_for_bytes", polls_for_bytes, closes_while_blocked),
    both("closed_while_epoll_waits_for_bytes", awaits_bytes_by_epoll, closes_while_blocked),
    both("reset_while_a_read_waits", reads_until_it_is_reset, closes_with_unread_while_blocked),
    both("reset_is_told_to_a_read_behind_the_bytes", reads_up_to_a_reset, resets),
    both("reset_is_told_to_who_asks", asks_for_a_reset, resets),
    both("reset_is_not_told_to_writes", writes_after_a_reset, resets),
    both("reset_is_told_to_a_peek", peeks_at_a_reset, resets),
    both("reset_is_told_to_a_read_of_nothing", reads_nothing_at_a_reset, resets),
    both("reset_is_told_to_recvmsg", receives_at_a_reset, resets),
    killed("killed_having_read_all", sees_it_killed, reads_all_and_is_killed),
    killed("killed_with_unread_bytes", sees_it_killed, is_killed_with_unread),
    killed("killed_with_unread_bytes_and_asked", asks_who_killed_it, is_killed_with_unread),
    both("reads_of_nothing", reads_nothing, sends_little),
    both("shutdown_after_a_close", shuts_down_after_a_close, closes_when_watched),
];

/// Both sides must have left the kernel's socket; who shuts down reading may be back there.
pub(super) const fn both(name: &'static str, left: fn(&Side, Fd), right: fn(&Side, Fd)) -> Behaviour {
    Behaviour::connected(name, left, right).unix_only()
}

/// The right side is killed.
const fn killed(name: &'static str, left: fn(&Side, Fd), right: fn(&Side, Fd)) -> Behaviour {
    both(name, left, right)
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .end(End::Exit(0), End::Signal(libc::SIGKILL))
}

const EVENTS: c_short = libc::POLLIN | libc::POLLPRI | libc::POLLOUT | libc::POLLRDHUP;

/// Notes all that can be known without a read or a write.
pub(super) fn look(fd: Fd) {
    let _ = calls::poll(&[(fd, EVENTS)], 0);
    let _ = calls::poll(&[(fd, 0)], 0);
    let _ = calls::select(&[fd], &[fd], &[fd], Some(Duration::ZERO));
    let _ = calls::unread(fd);
}

/// Sets that watch one descriptor for everything.
pub(super) struct Watch {
    level: Fd,
    once: Fd,
    edges: Option<Fd>,
    watched: Fd,
}

const WATCHED: c_int = EPOLLIN | EPOLLPRI | EPOLLOUT | EPOLLRDHUP;

impl Watch {
    /// Without edges. What there is to say now has been said.
    pub(super) fn plainly(watched: Fd) -> Self {
        let watch =
            Self { level: new_set(watched, 0), once: new_set(watched, EPOLLONESHOT), edges: None, watched };
        watch.arm();
        watch
    }

    /// With a set of each kind.
    fn of(watched: Fd) -> Self {
        Self { edges: Some(new_set(watched, EPOLLET)), ..Self::plainly(watched) }
    }

    /// Has the one-shot set tell once more, but not of room.
    fn arm(&self) {
        let events = (WATCHED & !EPOLLOUT) | EPOLLONESHOT;
        calls::epoll_modify(self.once, self.watched, events, 1).expect("EPOLL_CTL_MOD");
    }

    /// Notes what each tells, and tells again.
    pub(super) fn ask(&self) {
        for set in [Some(self.level), self.edges, Some(self.once)].into_iter().flatten() {
            let _ = calls::epoll_wait(set, 4, 0);
            let _ = calls::epoll_wait(set, 4, 0);
        }
    }
}

/// What there is to say now, the set has said.
pub(super) fn new_set(watched: Fd, kind: c_int) -> Fd {
    let set = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(set, watched, WATCHED | kind, 1).expect("EPOLL_CTL_ADD");
    quietly(|| calls::epoll_wait(set, 4, 0)).expect("epoll_wait");
    set
}

fn sees_it_closed(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    let watch = Watch::of(fd);
    side.sync("watched");
    side.sync("closed");
    look(fd);
    watch.ask();
    every_write_fails(side, fd, Errno::EPIPE);
    look(fd);
    for _ in 0..2 {
        assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
        let _ = calls::pending_error(fd);
    }
    watch.arm();
    watch.ask();
    Watch::of(fd).ask();
    side.sync("done");
}

fn closes_when_watched(side: &Side, fd: Fd) {
    side.sync("watched");
    calls::close(fd).expect("close");
    side.sync("closed");
    side.sync("done");
}

fn reads_what_was_sent_before(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    let watch = Watch::of(fd);
    side.sync("watched");
    side.sync("closed");
    look(fd);
    watch.ask();
    assert_eq!(calls::send(fd, b"x", 0), Err(Errno::EPIPE));
    assert_eq!(calls::recv(fd, 5, MSG_PEEK), Ok(b"onetw".to_vec()));
    assert_eq!(calls::recv(fd, 2, 0), Ok(b"on".to_vec()));
    look(fd);
    assert_eq!(calls::write(fd, b"x"), Err(Errno::EPIPE));
    assert_eq!(calls::readv(fd, &[2, 100]), Ok(b"etwothree".to_vec()));
    look(fd);
    for _ in 0..3 {
        assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
        assert_eq!(calls::recv(fd, 10, MSG_DONTWAIT), Ok(vec![]));
    }
    say!("SIGPIPE {}", caught(libc::SIGPIPE));
    let _ = calls::pending_error(fd);
    side.sync("done");
}

fn sends_and_closes(side: &Side, fd: Fd) {
    side.sync("watched");
    for word in ["one", "two", "three"] {
        assert_eq!(calls::send(fd, word.as_bytes(), 0), Ok(word.len()));
    }
    calls::close(fd).expect("close");
    side.sync("closed");
    side.sync("done");
}

/// No byte of the write has been sent.
pub(super) fn writes_until_it_ends(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    fill(fd);
    let sent = while_blocked(|| calls::send(fd, b"x", 0), || side.sync("blocked"));
    assert!(sent.is_err());
    side.sync("ended");
    after_the_end(side, fd);
}

/// Who has waited is sent no signal, whatever it writes by.
pub(super) fn sends_a_file_until_it_ends(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    fill(fd);
    let file = calls::file_with(&[b'x'; 1 << 16]).expect("memfd_create");
    let sent = while_blocked(|| calls::sendfile(fd, file, 1 << 16), || side.sync("blocked"));
    assert!(sent.is_err());
    side.sync("ended");
    after_the_end(side, fd);
}

fn after_the_end(side: &Side, fd: Fd) {
    say!("SIGPIPE {}", caught(libc::SIGPIPE));
    let _ = calls::poll(&[(fd, libc::POLLIN | libc::POLLRDHUP)], 0);
    for _ in 0..2 {
        let _ = calls::send(fd, b"x", 0);
        say!("SIGPIPE {}", caught(libc::SIGPIPE));
    }
    for _ in 0..3 {
        let _ = calls::recv(fd, 10, MSG_DONTWAIT);
    }
    let _ = calls::pending_error(fd);
    let _ = calls::poll(&[(fd, libc::POLLIN | libc::POLLRDHUP)], 0);
    side.sync("done");
}

pub(super) fn sends_a_part(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    let huge = vec![b'x'; 64 << 20];
    let sent = while_blocked(|| quietly(|| calls::send(fd, &huge, 0)), || side.sync("blocked"));
    let sent = sent.expect("a part was sent");
    assert!((1..huge.len()).contains(&sent));
    side.sync("ended");
    after_the_end(side, fd);
}

fn closes_while_blocked(side: &Side, fd: Fd) {
    side.sync("blocked");
    calls::close(fd).expect("close");
    side.sync("ended");
    side.sync("done");
}

fn closes_having_read_some(side: &Side, fd: Fd) {
    receive_exactly(fd, 1 << 20);
    closes_while_blocked(side, fd);
}

/// Whether there is room by then depends on how far the other side's close has got.
pub(super) fn polls_for_room(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    fill(fd);
    let ready =
        while_blocked(|| quietly(|| calls::poll(&[(fd, libc::POLLOUT)], -1)), || side.sync("blocked"));
    let ready = ready.expect("poll")[0];
    say!("hang-up {} error {}", ready & libc::POLLHUP != 0, ready & libc::POLLERR != 0);
    side.sync("ended");
    after_the_end(side, fd);
}

fn selects_for_room(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    fill(fd);
    let ready = while_blocked(|| calls::select(&[], &[fd], &[], None), || side.sync("blocked"));
    assert_eq!(ready.expect("select").write, [fd]);
    side.sync("ended");
    after_the_end(side, fd);
}

pub(super) fn awaits_room_by_epoll(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    fill(fd);
    let set = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(set, fd, EPOLLOUT | EPOLLET, 1).expect("EPOLL_CTL_ADD");
    let ready = while_blocked(|| quietly(|| calls::epoll_wait(set, 4, -1)), || side.sync("blocked"));
    let ready = ready.expect("epoll_wait")[0];
    say!("hang-up {} error {}", ready.has(libc::EPOLLHUP), ready.has(libc::EPOLLERR));
    side.sync("ended");
    after_the_end(side, fd);
}

fn polls_for_bytes(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    let events = libc::POLLIN | libc::POLLRDHUP;
    let ready = while_blocked(|| calls::poll(&[(fd, events)], -1), || side.sync("blocked"));
    assert_eq!(ready, Ok(vec![events | libc::POLLHUP]));
    side.sync("ended");
    after_the_end(side, fd);
}

fn awaits_bytes_by_epoll(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    let set = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(set, fd, EPOLLIN | EPOLLRDHUP | EPOLLONESHOT, 1).expect("EPOLL_CTL_ADD");
    let ready = while_blocked(|| calls::epoll_wait(set, 4, -1), || side.sync("blocked"));
    assert!(ready.expect("epoll_wait")[0].has(libc::EPOLLHUP));
    side.sync("ended");
    after_the_end(side, fd);
}

fn reads_until_it_is_reset(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    let data = while_blocked(|| calls::recv(fd, 10, 0), || side.sync("blocked"));
    assert_eq!(data, Err(Errno::ECONNRESET));
    side.sync("ended");
    after_the_end(side, fd);
}

fn closes_with_unread_while_blocked(side: &Side, fd: Fd) {
    quietly(|| await_unread(fd, 6));
    closes_while_blocked(side, fd);
}

/// Closes with bytes unread, having sent some.
fn resets(side: &Side, fd: Fd) {
    side.sync("sent");
    await_unread(fd, 6);
    assert_eq!(calls::send(fd, b"last words", 0), Ok(10));
    calls::close(fd).expect("close");
    side.sync("closed");
    side.sync("done");
}

fn is_reset(side: &Side, fd: Fd) -> Watch {
    calls::catch(libc::SIGPIPE, true);
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    let watch = Watch::of(fd);
    side.sync("sent");
    side.sync("closed");
    watch
}

fn reads_up_to_a_reset(side: &Side, fd: Fd) {
    let watch = is_reset(side, fd);
    look(fd);
    watch.ask();
    assert_eq!(calls::recv(fd, 4, 0), Ok(b"last".to_vec()));
    look(fd);
    assert_eq!(calls::recv(fd, 100, 0), Ok(b" words".to_vec()));
    look(fd);
    watch.arm();
    watch.ask();
    assert_eq!(calls::recv(fd, 100, 0), Err(Errno::ECONNRESET));
    look(fd);
    watch.arm();
    watch.ask();
    assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]));
    assert_eq!(calls::pending_error(fd), Ok(Errno(0)));
    every_write_fails(side, fd, Errno::EPIPE);
    side.sync("done");
}

fn asks_for_a_reset(side: &Side, fd: Fd) {
    let watch = is_reset(side, fd);
    assert_eq!(calls::pending_error(fd), Ok(Errno::ECONNRESET));
    assert_eq!(calls::pending_error(fd), Ok(Errno(0)));
    look(fd);
    watch.ask();
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"last words".to_vec()));
    assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]));
    assert_eq!(calls::send(fd, b"x", MSG_NOSIGNAL), Err(Errno::EPIPE));
    side.sync("done");
}

fn writes_after_a_reset(side: &Side, fd: Fd) {
    let watch = is_reset(side, fd);
    every_write_fails(side, fd, Errno::EPIPE);
    look(fd);
    watch.ask();
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"last words".to_vec()));
    every_write_fails(side, fd, Errno::EPIPE);
    assert_eq!(calls::recv(fd, 100, 0), Err(Errno::ECONNRESET));
    assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]));
    side.sync("done");
}

fn peeks_at_a_reset(side: &Side, fd: Fd) {
    is_reset(side, fd);
    assert_eq!(calls::recv(fd, 100, MSG_PEEK), Ok(b"last words".to_vec()));
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"last words".to_vec()));
    let _ = calls::recv(fd, 100, MSG_PEEK);
    let _ = calls::recv(fd, 100, MSG_PEEK);
    let _ = calls::recv(fd, 100, 0);
    side.sync("done");
}

fn reads_nothing_at_a_reset(side: &Side, fd: Fd) {
    is_reset(side, fd);
    let _ = calls::recv(fd, 0, 0);
    assert_eq!(calls::read(fd, 100), Ok(b"last words".to_vec()));
    let _ = calls::read(fd, 0);
    let _ = calls::recv(fd, 0, 0);
    let _ = calls::recv(fd, 0, 0);
    let _ = calls::recv(fd, 1, 0);
    side.sync("done");
}

fn receives_at_a_reset(side: &Side, fd: Fd) {
    is_reset(side, fd);
    let _ = calls::recvmsg(fd, &[5, 100], 0, libc::MSG_WAITALL);
    let _ = calls::recvmsg(fd, &[1, 2], 0, 0);
    let _ = calls::recvmsg(fd, &[1, 2], 0, 0);
    let _ = calls::recvmmsg(fd, &[3, 3], 0);
    side.sync("done");
}

fn reads_all_and_is_killed(side: &Side, fd: Fd) {
    receive_exactly(fd, 6);
    is_killed(side, fd);
}

fn is_killed_with_unread(side: &Side, fd: Fd) {
    await_unread(fd, 6);
    is_killed(side, fd);
}

fn is_killed(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"last words", 0), Ok(10));
    side.sync("answered");
    calls::kill_self();
}

fn sees_it_killed(side: &Side, fd: Fd) {
    let watch = writes_to_who_is_killed(side, fd);
    look(fd);
    watch.ask();
    assert_eq!(calls::send(fd, b"x", 0), Err(Errno::EPIPE));
    assert_eq!(calls::recv(fd, 4, 0), Ok(b"last".to_vec()));
    look(fd);
    assert_eq!(calls::recv(fd, 100, 0), Ok(b" words".to_vec()));
    look(fd);
    for _ in 0..3 {
        let _ = calls::recv(fd, 100, 0);
    }
    every_write_fails(side, fd, Errno::EPIPE);
    look(fd);
}

fn asks_who_killed_it(side: &Side, fd: Fd) {
    writes_to_who_is_killed(side, fd);
    for _ in 0..2 {
        let _ = calls::pending_error(fd);
        look(fd);
    }
    for _ in 0..2 {
        let _ = calls::recv(fd, 100, 0);
    }
}

fn writes_to_who_is_killed(side: &Side, fd: Fd) -> Watch {
    calls::catch(libc::SIGPIPE, true);
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    let watch = Watch::of(fd);
    side.sync("answered");
    await_hangup(fd);
    watch
}

/// recv(2) of no bytes waits for some, as TCP's does not; read(2) of none asks nobody.
fn reads_nothing(side: &Side, fd: Fd) {
    for flags in [MSG_DONTWAIT, MSG_DONTWAIT | MSG_PEEK] {
        let _ = calls::recv(fd, 0, flags);
        let _ = calls::recvmsg(fd, &[], 0, flags);
        let _ = calls::recvmsg(fd, &[0, 0], 0, flags);
    }
    let _ = calls::read(fd, 0);
    let _ = calls::readv(fd, &[0, 0]);
    let _ = while_blocked(|| calls::recv(fd, 0, 0), || side.sync("blocked"));
    side.sync("sent");
    for flags in [0, MSG_DONTWAIT, MSG_PEEK] {
        let _ = calls::recv(fd, 0, flags);
        let _ = calls::recvmsg(fd, &[], 0, flags);
        let _ = calls::recvmsg(fd, &[0, 0], 0, flags);
    }
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"little".to_vec()));
    side.sync("end");
    side.sync("ended");
    let _ = calls::recv(fd, 0, 0);
    let _ = calls::recvmsg(fd, &[], 0, 0);
    let _ = calls::send(fd, b"", 0);
    let _ = calls::sendmsg(fd, &[], 0);
    side.sync("done");
}

fn sends_little(side: &Side, fd: Fd) {
    side.sync("blocked");
    assert_eq!(calls::send(fd, b"", 0), Ok(0));
    assert_eq!(calls::send(fd, b"little", 0), Ok(6));
    side.sync("sent");
    side.sync("end");
    calls::shutdown(fd, SHUT_WR).expect("shutdown");
    side.sync("ended");
    side.sync("done");
}

fn shuts_down_after_a_close(side: &Side, fd: Fd) {
    side.sync("watched");
    side.sync("closed");
    for how in [SHUT_WR, SHUT_RD, SHUT_RDWR, SHUT_RD, SHUT_WR] {
        assert_eq!(calls::shutdown(fd, how), Ok(0));
        look(fd);
    }
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
    side.sync("done");
}

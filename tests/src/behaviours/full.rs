//! Full connections whose side shuts down writing: who waits for room there.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use libc::POLLOUT;

use super::Behaviour;
use super::ending::{fills, reads_all_when_told};
use crate::calls::{self, Errno, Fd, Leave, quietly};
use crate::side::{ARRIVAL, Pattern, Side, await_process_asleep, await_readable, while_blocked};

/// What a fork before the upgrade may end in.
const SHARED: &[&str] = &["shared-before-upgrade"];
const WAITS_FOR_ROOM: &str = "**`shutdown` of sending while other processes wait for room**";

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("shutdown_of_writing_wakes_a_writer", wakes_a_writer, reads_all_when_told),
    Behaviour::connected(
        "shutdown_of_writing_wakes_a_writer_that_has_sent_a_part",
        wakes_a_writer_in_mid_write,
        reads_all_when_told,
    ),
    Behaviour::connected(
        "shutdown_of_writing_wakes_a_writer_with_a_limit",
        wakes_a_writer_with_a_limit,
        reads_all_when_told,
    ),
    Behaviour::connected(
        "shutdown_of_writing_wakes_a_writer_beside_unread_bytes",
        wakes_a_writer_beside_unread_bytes,
        says_and_reads_all_when_told,
    ),
    Behaviour::connected("shutdown_of_writing_wakes_a_poll_for_room", wakes_a_poll, reads_all_when_told)
        .tcp_only(),
    Behaviour::connected("shutdown_of_writing_wakes_epoll_for_room", wakes_a_set, reads_all_when_told)
        .tcp_only(),
    Behaviour::connected("shutdown_of_writing_makes_no_room", wakes_no_poll, reads_all_when_told).unix_only(),
    Behaviour::connected(
        "shutdown_of_writing_wakes_a_writing_child",
        wakes_a_writing_child,
        reads_all_when_told,
    )
    .alone(SHARED)
    .limitation(WAITS_FOR_ROOM),
    Behaviour::connected(
        "shutdown_of_writing_wakes_a_child_that_polls_for_room",
        wakes_a_polling_child,
        reads_all_when_told,
    )
    .alone(SHARED)
    .tcp_only()
    .limitation(WAITS_FOR_ROOM),
];

fn shuts_down_writing(fd: Fd) {
    assert_eq!(quietly(|| calls::shutdown(fd, libc::SHUT_WR)), Ok(0));
}

/// A write of the pattern's next `len` bytes, during which writing is shut down; whether it sent some.
fn writes_until_shut_down(fd: Fd, pattern: &mut Pattern, len: usize) -> bool {
    let data = pattern.take(len);
    let sent =
        while_blocked(|| quietly(|| calls::send(fd, &data, libc::MSG_NOSIGNAL)), || shuts_down_writing(fd));
    pattern.put_back(len - sent.unwrap_or(0));
    match sent {
        Ok(sent) => assert!((1..len).contains(&sent), "{sent} of {len} bytes were sent"),
        Err(error) => assert_eq!(error, Errno::EPIPE),
    }
    sent.is_ok()
}

/// All that was sent arrives, and then the end.
fn tells_what_was_sent(side: &Side, fd: Fd, sent: u64) {
    assert_eq!(calls::send(fd, b"x", libc::MSG_NOSIGNAL), Err(Errno::EPIPE));
    side.tell(sent);
    side.sync("done");
}

/// A kernel may find a little room after it refused.
fn wakes_a_writer(side: &Side, fd: Fd) {
    let mut pattern = fills(fd);
    writes_until_shut_down(fd, &mut pattern, 16 << 20);
    tells_what_was_sent(side, fd, pattern.position());
}

fn wakes_a_writer_with_a_limit(side: &Side, fd: Fd) {
    calls::set_send_timeout(fd, Duration::from_secs(3600)).expect("SO_SNDTIMEO");
    wakes_a_writer(side, fd);
}

fn wakes_a_writer_beside_unread_bytes(side: &Side, fd: Fd) {
    side.sync("say");
    await_readable(fd);
    wakes_a_writer(side, fd);
}

fn says_and_reads_all_when_told(side: &Side, fd: Fd) {
    side.sync("say");
    assert_eq!(calls::send(fd, b"hello", 0), Ok(5));
    reads_all_when_told(side, fd);
}

fn wakes_a_writer_in_mid_write(side: &Side, fd: Fd) {
    let mut pattern = Pattern::new(41);
    assert!(writes_until_shut_down(fd, &mut pattern, 64 << 20));
    tells_what_was_sent(side, fd, pattern.position());
}

/// On TCP, whose next write fails, there is room then.
fn wakes_a_poll(side: &Side, fd: Fd) {
    let sent = fills(fd).position();
    let ready =
        while_blocked(|| quietly(|| calls::poll(&[(fd, POLLOUT)], ARRIVAL)), || shuts_down_writing(fd));
    assert_eq!(ready, Ok(vec![POLLOUT]));
    tells_what_was_sent(side, fd, sent);
}

fn wakes_a_set(side: &Side, fd: Fd) {
    let sent = fills(fd).position();
    let set = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(set, fd, libc::EPOLLOUT, 1).expect("EPOLL_CTL_ADD");
    let ready = while_blocked(|| quietly(|| calls::epoll_wait(set, 4, ARRIVAL)), || shuts_down_writing(fd));
    assert_eq!(ready, Ok(vec![calls::Ready { events: libc::EPOLLOUT as u32, data: 1 }]));
    tells_what_was_sent(side, fd, sent);
}

/// On `AF_UNIX` there is room when the peer has read, though the next write fails.
fn wakes_no_poll(side: &Side, fd: Fd) {
    let sent = fills(fd).position();
    let polled = AtomicBool::new(false);
    let ready = while_blocked(
        || {
            let ready = quietly(|| calls::poll(&[(fd, POLLOUT)], ARRIVAL));
            polled.store(true, Ordering::SeqCst);
            ready
        },
        || {
            shuts_down_writing(fd);
            assert_eq!(quietly(|| calls::poll(&[(fd, POLLOUT)], 100)), Ok(vec![0]));
            assert!(!polled.load(Ordering::SeqCst), "it wakes although there is no room");
            side.tell(sent);
        },
    );
    assert_eq!(ready, Ok(vec![POLLOUT]));
    assert_eq!(calls::send(fd, b"x", libc::MSG_NOSIGNAL), Err(Errno::EPIPE));
    side.sync("done");
}

/// Shuts down writing while a child sleeps in `wait`.
fn shuts_down_beside_a_child(fd: Fd, wait: impl FnOnce()) {
    let (reading, writing) = quietly(calls::pipe).expect("pipe");
    let child = calls::fork(Leave::Exit, || {
        quietly(|| calls::write(writing, b"x")).expect("write");
        wait();
    });
    assert_eq!(quietly(|| calls::read(reading, 1)), Ok(b"x".to_vec()));
    await_process_asleep(child.0);
    shuts_down_writing(fd);
    child.wait_for_success();
}

/// The child's bytes are the parent's, too.
fn wakes_a_writing_child(side: &Side, fd: Fd) {
    let mut pattern = fills(fd);
    let (reading, writing) = quietly(calls::pipe).expect("pipe");
    shuts_down_beside_a_child(fd, || {
        let sent = quietly(|| calls::send(fd, &pattern.take(16 << 20), libc::MSG_NOSIGNAL));
        if let Err(error) = sent {
            assert_eq!(error, Errno::EPIPE);
        }
        let sent = sent.unwrap_or(0) as u64;
        quietly(|| calls::write(writing, &sent.to_ne_bytes())).expect("write");
    });
    let more = quietly(|| calls::read(reading, 8)).expect("read");
    let more = u64::from_ne_bytes(more.try_into().expect("a number"));
    assert!(more < 16 << 20, "all of it was sent");
    tells_what_was_sent(side, fd, pattern.position() + more);
}

fn wakes_a_polling_child(side: &Side, fd: Fd) {
    let sent = fills(fd).position();
    shuts_down_beside_a_child(fd, || {
        assert_eq!(quietly(|| calls::poll(&[(fd, POLLOUT)], ARRIVAL)), Ok(vec![POLLOUT]));
    });
    tells_what_was_sent(side, fd, sent);
}

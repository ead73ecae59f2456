//! `SO_RCVTIMEO` and `SO_SNDTIMEO`.

use std::time::Duration;

use super::Behaviour;
use crate::calls::{self, Errno, Fd, quietly};
use crate::say;
use crate::side::{
    Pattern, Side, Start, assert_waited, await_readable, let_pass, receive_pattern, while_blocked,
};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("receive", receive, sends_late),
    Behaviour::connected("receive_for_ever_again", receive_for_ever_again, sends_late),
    Behaviour::connected("receive_in_time", receive_in_time, sends_late),
    Behaviour::connected("receive_timeout_counts_all_waits", receives_all_in_time, trickles),
    Behaviour::connected("receive_all_with_a_part_there", receives_part, sends_a_part),
    Behaviour::connected("receive_all_without_waiting", receives_part_at_once, sends_parts),
    Behaviour::connected("send", send, reads_late),
    Behaviour::connected("send_for_ever", sends_beyond_a_later_limit, reads_at_last).tcp_only(),
    Behaviour::connected("send_step_by_step", sends_beyond_the_limit_in_all, reads_step_by_step).unix_only(),
    Behaviour::connected("poll_ignores_them", poll_ignores_them, sends_late),
];

const TIMEOUT: Duration = Duration::from_millis(60);

fn sends_late(side: &Side, fd: Fd) {
    side.sync("send now");
    assert_eq!(calls::send(fd, b"at last", 0), Ok(7));
    side.sync("done");
}

fn receive(side: &Side, fd: Fd) {
    calls::set_receive_timeout(fd, TIMEOUT).expect("SO_RCVTIMEO");
    let ways: &[fn(Fd) -> Option<Errno>] = &[
        |fd| calls::recv(fd, 10, 0).err(),
        |fd| calls::read(fd, 10).err(),
        |fd| calls::recvfrom(fd, 10, 0).err(),
        |fd| calls::readv(fd, &[5, 5]).err(),
        |fd| calls::recvmsg(fd, &[5, 5], 0, 0).err(),
        |fd| calls::recvmmsg(fd, &[5, 5], 0).err(),
        |fd| calls::read_chk(fd, 10).err(),
        |fd| calls::recv(fd, 10, libc::MSG_PEEK).err(),
    ];
    for way in ways {
        let start = Start::now();
        assert_eq!(way(fd), Some(Errno::EAGAIN));
        assert_waited(start, TIMEOUT);
    }
    side.sync("send now");
    calls::set_receive_timeout(fd, Duration::from_secs(20)).expect("SO_RCVTIMEO");
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"at last".to_vec()));
    side.sync("done");
}

fn receive_for_ever_again(side: &Side, fd: Fd) {
    calls::set_receive_timeout(fd, TIMEOUT).expect("SO_RCVTIMEO");
    assert_eq!(calls::recv(fd, 10, 0), Err(Errno::EAGAIN));
    calls::set_receive_timeout(fd, Duration::ZERO).expect("SO_RCVTIMEO");
    let data = while_blocked(
        || calls::recv(fd, 10, 0),
        || {
            // Several times what would have been the timeout.
            let_pass(TIMEOUT * 3);
            side.sync("send now");
        },
    );
    assert_eq!(data, Ok(b"at last".to_vec()));
    side.sync("done");
}

fn receive_in_time(side: &Side, fd: Fd) {
    calls::set_receive_timeout(fd, Duration::from_secs(20)).expect("SO_RCVTIMEO");
    let data = while_blocked(|| calls::recv(fd, 10, 0), || side.sync("send now"));
    assert_eq!(data, Ok(b"at last".to_vec()));
    side.sync("done");
}

/// Each byte ends a wait, but not what is left of the time for all of them.
fn receives_all_in_time(side: &Side, fd: Fd) {
    calls::set_receive_timeout(fd, Duration::from_millis(400)).expect("SO_RCVTIMEO");
    side.sync("send now");
    let received = quietly(|| calls::recv(fd, 1000, libc::MSG_WAITALL)).expect("some of it came");
    assert!((1..4).contains(&received.len()), "{} bytes came", received.len());
    side.sync("done");
}

/// A byte each quarter of a second, for three seconds at most.
fn trickles(side: &Side, fd: Fd) {
    side.sync("send now");
    quietly(|| {
        for _ in 0..12 {
            std::thread::sleep(Duration::from_millis(250));
            if side.is_awaited() {
                break;
            }
            assert_eq!(calls::send(fd, b"x", 0), Ok(1));
        }
    });
    side.sync("done");
}

/// What is there before the call does not make it wait for the rest for ever.
fn receives_part(side: &Side, fd: Fd) {
    calls::set_receive_timeout(fd, TIMEOUT).expect("SO_RCVTIMEO");
    side.sync("send now");
    side.sync("sent");
    await_readable(fd);
    let start = Start::now();
    assert_eq!(calls::recv(fd, 10, libc::MSG_WAITALL), Ok(b"at".to_vec()));
    assert_waited(start, TIMEOUT);
    side.sync("done");
}

fn sends_a_part(side: &Side, fd: Fd) {
    side.sync("send now");
    assert_eq!(calls::send(fd, b"at", 0), Ok(2));
    side.sync("sent");
    side.sync("done");
}

/// Several times, because a read that must not wait asks the kernel only now and then.
const PARTS: usize = 20;

fn receives_part_at_once(side: &Side, fd: Fd) {
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    for _ in 0..PARTS {
        side.sync("send now");
        side.sync("sent");
        await_readable(fd);
        assert_eq!(calls::recv(fd, 10, libc::MSG_WAITALL), Ok(b"at".to_vec()));
    }
    side.sync("done");
}

fn sends_parts(side: &Side, fd: Fd) {
    for _ in 0..PARTS {
        side.sync("send now");
        assert_eq!(calls::send(fd, b"at", 0), Ok(2));
        side.sync("sent");
    }
    side.sync("done");
}

fn poll_ignores_them(side: &Side, fd: Fd) {
    calls::set_receive_timeout(fd, Duration::from_millis(1)).expect("SO_RCVTIMEO");
    let start = Start::now();
    assert_eq!(calls::poll(&[(fd, libc::POLLIN)], 100), Ok(vec![0]));
    assert_waited(start, Duration::from_millis(100));
    side.sync("send now");
    assert_eq!(calls::poll(&[(fd, libc::POLLIN)], -1), Ok(vec![libc::POLLIN]));
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"at last".to_vec()));
    side.sync("done");
}

fn send(side: &Side, fd: Fd) {
    calls::set_send_timeout(fd, TIMEOUT).expect("SO_SNDTIMEO");
    let mut pattern = Pattern::new(11);
    let huge = pattern.take(32 << 20);
    let start = Start::now();
    let sent = quietly(|| calls::send(fd, &huge, 0)).expect("some of it fits");
    assert_waited(start, TIMEOUT);
    assert!(sent >= side.always_taken() && sent < huge.len(), "{sent} bytes were sent");
    say!("a part was sent");
    let start = Start::now();
    let mut rest = quietly(|| calls::send(fd, &huge[sent..], 0));
    let mut total = sent;
    // The kernel may find a little room later, when it acknowledges what it has queued.
    while let Ok(more) = rest {
        total += more;
        rest = quietly(|| calls::send(fd, &huge[total..], 0));
    }
    assert_waited(start, TIMEOUT);
    say!("then {rest:?}");
    side.tell(total as u64);
    side.sync("read");
    calls::set_send_timeout(fd, Duration::ZERO).expect("SO_SNDTIMEO");
    assert_eq!(calls::send(fd, b"end", 0), Ok(3));
    side.sync("done");
}

fn reads_late(side: &Side, fd: Fd) {
    let total = side.told() as usize;
    receive_pattern(fd, &mut Pattern::new(11), total, 1 << 20);
    side.sync("read");
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"end".to_vec()));
    side.sync("done");
}

/// More than any buffer holds.
const MUCH: usize = 24 << 20;

/// What another thread makes of the limit meanwhile is for later calls.
fn sends_beyond_a_later_limit(side: &Side, fd: Fd) {
    let data = Pattern::new(13).take(MUCH);
    let sent = while_blocked(
        || calls::send(fd, &data, 0),
        || {
            calls::set_send_timeout(fd, TIMEOUT).expect("SO_SNDTIMEO");
            let_pass(TIMEOUT * 3);
            side.sync("read now");
        },
    );
    assert_eq!(sent, Ok(MUCH));
    side.sync("done");
}

/// On `AF_UNIX` the limit is for each wait of a write alone, and what another thread makes of it for those that begin later.
fn sends_beyond_the_limit_in_all(side: &Side, fd: Fd) {
    let limit = Duration::from_millis(1500);
    let data = Pattern::new(13).take(MUCH);
    let sent = while_blocked(
        || calls::send(fd, &data, 0),
        || {
            calls::set_send_timeout(fd, limit).expect("SO_SNDTIMEO");
            let_pass(limit * 3 / 2);
            side.sync("read now");
        },
    );
    assert_eq!(sent, Ok(MUCH));
    side.sync("done");
}

fn reads_step_by_step(side: &Side, fd: Fd) {
    side.sync("read now");
    let mut pattern = Pattern::new(13);
    for _ in 0..STEPS {
        let_pass(Duration::from_millis(250));
        receive_pattern(fd, &mut pattern, MUCH / STEPS, 65_536);
    }
    side.sync("done");
}

const STEPS: usize = 16;

fn reads_at_last(side: &Side, fd: Fd) {
    side.sync("read now");
    receive_pattern(fd, &mut Pattern::new(13), MUCH, 65_536);
    side.sync("done");
}

//! Flags of the send and recv families.

use std::time::Duration;

use super::Behaviour;
use crate::calls::{self, Errno, Fd, quietly, thread_id};
use crate::side::{Side, Start, assert_waited, await_asleep, await_readable, await_unread, while_blocked};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("peek", peek, sends_two_words),
    Behaviour::connected("peek_by_every_call", peek_by_every_call, sends_two_words),
    Behaviour::connected("dontwait", dontwait, sends_two_words),
    Behaviour::connected("waitall", waitall, sends_three_tens),
    Behaviour::connected("waitall_by_recvmsg", waitall_by_recvmsg, sends_three_tens),
    Behaviour::connected("waitall_and_peek", waitall_and_peek, sends_ten_then_twenty)
        .limitation("**`MSG_PEEK | MSG_WAITALL`**"),
    Behaviour::connected("waitall_and_dontwait", waitall_and_dontwait, sends_two_words),
    Behaviour::connected("waitall_ends_with_the_stream", waitall_at_the_end, sends_ten_and_ends),
    Behaviour::connected("waitall_ends_with_the_timeout", waitall_with_timeout, sends_ten),
    Behaviour::connected("trunc_discards", trunc, sends_two_words).tcp_only(),
    Behaviour::connected("more_joins", reads_joined, sends_more),
    // One of `AF_UNIX` has no such queue, and the flag means nothing.
    Behaviour::connected("no_errors_queued", errqueue, sends_two_words).tcp_only(),
    Behaviour::connected("flags_without_meaning", odd_flags_received, odd_flags_sent),
];

fn sends_two_words(side: &Side, fd: Fd) {
    side.sync("send now");
    assert_eq!(calls::send(fd, b"hello world", 0), Ok(11));
    side.sync("sent");
    side.sync("done");
}

fn peek(side: &Side, fd: Fd) {
    side.sync("send now");
    assert_eq!(calls::recv(fd, 5, libc::MSG_PEEK), Ok(b"hello".to_vec()));
    assert_eq!(calls::recv(fd, 100, libc::MSG_PEEK), Ok(b"hello world".to_vec()));
    assert_eq!(calls::unread(fd), Ok(11));
    assert_eq!(calls::recv(fd, 6, 0), Ok(b"hello ".to_vec()));
    assert_eq!(calls::recv(fd, 100, libc::MSG_PEEK), Ok(b"world".to_vec()));
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"world".to_vec()));
    assert_eq!(calls::recv(fd, 100, libc::MSG_PEEK | libc::MSG_DONTWAIT), Err(Errno::EAGAIN));
    side.sync("sent");
    side.sync("done");
}

fn peek_by_every_call(side: &Side, fd: Fd) {
    side.sync("send now");
    side.sync("sent");
    await_unread(fd, 11);
    let _ = calls::recvfrom(fd, 100, libc::MSG_PEEK);
    let _ = calls::recvmsg(fd, &[2, 3, 100], 0, libc::MSG_PEEK);
    let _ = calls::recvmmsg(fd, &[4], libc::MSG_PEEK);
    let _ = calls::recv_chk(fd, 100, libc::MSG_PEEK);
    let _ = calls::recvfrom_chk(fd, 100, libc::MSG_PEEK);
    let _ = calls::recv_into(fd, &mut [0; 4], libc::MSG_PEEK | libc::MSG_TRUNC);
    assert_eq!(calls::read(fd, 100), Ok(b"hello world".to_vec()));
    side.sync("done");
}

fn dontwait(side: &Side, fd: Fd) {
    let _ = calls::recv(fd, 10, libc::MSG_DONTWAIT);
    let _ = calls::recvfrom(fd, 10, libc::MSG_DONTWAIT);
    let _ = calls::recvmsg(fd, &[10], 0, libc::MSG_DONTWAIT);
    let _ = calls::recvmmsg(fd, &[10], libc::MSG_DONTWAIT);
    let _ = calls::recv_chk(fd, 10, libc::MSG_DONTWAIT);
    let _ = calls::recvfrom_chk(fd, 10, libc::MSG_DONTWAIT);
    side.sync("send now");
    side.sync("sent");
    await_unread(fd, 11);
    let _ = calls::recv(fd, 5, libc::MSG_DONTWAIT);
    let _ = calls::recvmsg(fd, &[3, 5], 0, libc::MSG_DONTWAIT);
    let _ = calls::recv(fd, 5, libc::MSG_DONTWAIT);
    side.sync("done");
}

fn sends_three_tens(side: &Side, fd: Fd) {
    side.sync("the other side is blocked");
    for _ in 0..3 {
        assert_eq!(calls::send(fd, b"0123456789", 0), Ok(10));
    }
    side.sync("done");
}

fn waitall(side: &Side, fd: Fd) {
    let data =
        while_blocked(|| calls::recv(fd, 30, libc::MSG_WAITALL), || side.sync("the other side is blocked"));
    assert_eq!(data.map(|data| data.len()), Ok(30));
    side.sync("done");
}

fn waitall_by_recvmsg(side: &Side, fd: Fd) {
    let message = while_blocked(
        || calls::recvmsg(fd, &[7, 13, 5], 0, libc::MSG_WAITALL),
        || side.sync("the other side is blocked"),
    );
    assert_eq!(message.map(|message| message.data.len()), Ok(25));
    await_unread(fd, 5);
    assert_eq!(calls::recv(fd, 5, libc::MSG_WAITALL), Ok(b"56789".to_vec()));
    side.sync("done");
}

fn sends_ten_then_twenty(side: &Side, fd: Fd) {
    side.sync("the other side is blocked");
    assert_eq!(calls::send(fd, b"0123456789", 0), Ok(10));
    side.sync("ten are sent");
    side.sync("the other side is blocked again");
    assert_eq!(calls::send(fd, b"01234567890123456789", 0), Ok(20));
    side.sync("done");
}

fn waitall_and_peek(side: &Side, fd: Fd) {
    let thread = thread_id();
    let data = while_blocked(
        || calls::recv(fd, 25, libc::MSG_WAITALL | libc::MSG_PEEK),
        || {
            side.sync("the other side is blocked");
            side.sync("ten are sent");
            await_unread(fd, 10);
            await_asleep(thread);
            side.sync("the other side is blocked again");
        },
    );
    assert_eq!(data.map(|data| data.len()), Ok(25));
    await_unread(fd, 30);
    assert_eq!(calls::recv(fd, 100, 0).map(|data| data.len()), Ok(30));
    side.sync("done");
}

fn waitall_and_dontwait(side: &Side, fd: Fd) {
    let _ = calls::recv(fd, 30, libc::MSG_WAITALL | libc::MSG_DONTWAIT);
    side.sync("send now");
    side.sync("sent");
    await_unread(fd, 11);
    let _ = calls::recv(fd, 30, libc::MSG_WAITALL | libc::MSG_DONTWAIT);
    side.sync("done");
}

fn sends_ten_and_ends(side: &Side, fd: Fd) {
    side.sync("the other side is blocked");
    assert_eq!(calls::send(fd, b"0123456789", 0), Ok(10));
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    side.sync("done");
}

fn waitall_at_the_end(side: &Side, fd: Fd) {
    let data =
        while_blocked(|| calls::recv(fd, 30, libc::MSG_WAITALL), || side.sync("the other side is blocked"));
    assert_eq!(data, Ok(b"0123456789".to_vec()));
    assert_eq!(calls::recv(fd, 30, libc::MSG_WAITALL), Ok(vec![]));
    side.sync("done");
}

fn sends_ten(side: &Side, fd: Fd) {
    side.sync("the other side is blocked");
    assert_eq!(calls::send(fd, b"0123456789", 0), Ok(10));
    side.sync("done");
}

fn waitall_with_timeout(side: &Side, fd: Fd) {
    let timeout = Duration::from_millis(300);
    calls::set_receive_timeout(fd, timeout).expect("SO_RCVTIMEO");
    // The other side may take longer than one timeout: then that call ends with nothing.
    let receive = || loop {
        let start = Start::now();
        let data = quietly(|| calls::recv(fd, 30, libc::MSG_WAITALL));
        assert_waited(start, timeout);
        if data != Err(Errno::EAGAIN) {
            return data;
        }
    };
    let data = while_blocked(receive, || side.sync("the other side is blocked"));
    assert_eq!(data, Ok(b"0123456789".to_vec()));
    assert_eq!(calls::recv(fd, 30, libc::MSG_WAITALL), Err(Errno::EAGAIN));
    side.sync("done");
}

fn trunc(side: &Side, fd: Fd) {
    side.sync("send now");
    side.sync("sent");
    await_unread(fd, 11);
    let mut untouched = *b"......";
    assert_eq!(calls::recv_into(fd, &mut untouched, libc::MSG_TRUNC), Ok(6));
    assert_eq!(&untouched, b"......", "MSG_TRUNC stores nothing on TCP");
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"world".to_vec()));
    side.sync("done");
}

fn sends_more(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"one ", libc::MSG_MORE), Ok(4));
    assert_eq!(calls::sendmsg(fd, &[b"two "], libc::MSG_MORE), Ok(4));
    assert_eq!(calls::send(fd, b"three", 0), Ok(5));
    side.sync("sent");
    side.sync("done");
}

fn reads_joined(side: &Side, fd: Fd) {
    side.sync("sent");
    await_unread(fd, 13);
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"one two three".to_vec()));
    side.sync("done");
}

fn errqueue(side: &Side, fd: Fd) {
    let _ = calls::recvmsg(fd, &[10], 0, libc::MSG_ERRQUEUE);
    side.sync("send now");
    side.sync("sent");
    await_readable(fd);
    let _ = calls::recvmsg(fd, &[10], 0, libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT);
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"hello world".to_vec()));
    side.sync("done");
}

const ODD_TO_SEND: &[libc::c_int] = &[
    libc::MSG_DONTROUTE,
    libc::MSG_EOR,
    libc::MSG_CONFIRM,
    libc::MSG_WAITALL,
    libc::MSG_PEEK,
    libc::MSG_ZEROCOPY,
    libc::MSG_CMSG_CLOEXEC,
];
const ODD_TO_RECEIVE: &[libc::c_int] = &[
    libc::MSG_DONTROUTE,
    libc::MSG_EOR,
    libc::MSG_NOSIGNAL,
    libc::MSG_MORE,
    libc::MSG_CMSG_CLOEXEC,
    libc::MSG_SYN,
];

fn odd_flags_sent(side: &Side, fd: Fd) {
    for &flags in ODD_TO_SEND {
        side.tell(u64::from(calls::send(fd, b"xy", flags).is_ok()));
        side.sync("received");
    }
    for _ in ODD_TO_RECEIVE {
        assert_eq!(calls::send(fd, b"xy", 0), Ok(2));
        side.sync("received");
    }
}

fn odd_flags_received(side: &Side, fd: Fd) {
    for _ in ODD_TO_SEND {
        if side.told() == 1 {
            assert_eq!(calls::recv(fd, 100, 0), Ok(b"xy".to_vec()));
        }
        side.sync("received");
    }
    for &flags in ODD_TO_RECEIVE {
        await_readable(fd);
        let _ = calls::recvmsg(fd, &[100], 0, flags);
        side.sync("received");
    }
}

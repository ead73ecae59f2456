//! Threads that sleep beside each other on an `AF_UNIX` connection, of which one is woken by what the other takes.

use libc::{MSG_NOSIGNAL, SHUT_RD, SHUT_WR};

use super::peers::{answer_echoes, fill, request_echoes, send_all};
use super::unix_rights::{Gift, ROOM};
use super::{Behaviour, Tally};
use crate::calls::{self, Beside, Errno, quietly};
use crate::side::{Pattern, Side, receive_pattern, while_blocked};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::whole("a_descriptor_comes", gives_and_reads, reads_and_writes, Tally::Returned(CONNECTIONS))
        .unix_only()
        .alone(&["control-data"]),
    Behaviour::whole("nobody_reads_any_more", reads_no_more, reads_and_fails, Tally::Upgraded(CONNECTIONS))
        .unix_only(),
];

/// One after the other: each is a chance for the reader to be first.
const CONNECTIONS: u64 = 12;
const ROUNDS: usize = 40;
const LARGEST: usize = 100;
/// More than a connection holds.
const MUCH: usize = 3_000_000;
/// Fewer than the other end's kernel takes at once.
const LITTLE: usize = 1000;
const READERS: usize = 3;

fn serves(side: &Side, serve: impl Fn(calls::Fd)) {
    let listener = side.listen();
    for _ in 0..CONNECTIONS {
        let fd = side.accept(listener);
        answer_echoes(fd, ROUNDS, LARGEST);
        side.sync("sleep");
        serve(fd);
        side.sync("done");
        calls::close(fd).expect("close");
    }
}

fn asks(side: &Side, ask: impl Fn(calls::Fd)) {
    let destination = side.destination();
    for _ in 0..CONNECTIONS {
        let fd = side.connect_to(destination);
        request_echoes(fd, ROUNDS, LARGEST);
        ask(fd);
        side.sync("done");
        calls::close(fd).expect("close");
    }
}

/// The way back, for both of the other's threads.
fn gives_and_reads(side: &Side) {
    serves(side, |fd| {
        send_all(fd, &Pattern::new(1).take(LITTLE));
        let gift = Gift::new();
        let beside = Beside { fds: &[gift.writing], ..Beside::default() };
        std::thread::scope(|scope| {
            // It needs an answer, which comes as this one reads.
            scope.spawn(move || {
                assert_eq!(quietly(|| calls::sendmsg_with(fd, &[b"with"], beside, 0)), Ok(4));
            });
            receive_pattern(fd, &mut Pattern::new(2), MUCH, 65536);
        });
        gift.read();
    });
}

fn reads_and_writes(side: &Side) {
    asks(side, |fd| {
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut left = LITTLE + 4;
                while left > 0 {
                    let letter = quietly(|| calls::recvmsg_with(fd, &[4096], ROOM, 0)).expect("recvmsg");
                    assert!(!letter.data.is_empty(), "the stream has ended");
                    left -= letter.data.len();
                    for gift in letter.fds {
                        quietly(|| calls::close(gift)).expect("close");
                    }
                }
            });
            while_blocked(|| send_all(fd, &Pattern::new(2).take(MUCH)), || side.sync("sleep"));
        });
    });
}

fn reads_no_more(side: &Side) {
    serves(side, |fd| {
        assert_eq!(calls::shutdown(fd, SHUT_RD), Ok(0));
        side.sync("refused");
        assert_eq!(calls::shutdown(fd, SHUT_WR), Ok(0));
    });
}

/// The writer is to hear of it, whoever else is woken.
fn reads_and_fails(side: &Side) {
    asks(side, |fd| {
        fill(fd);
        std::thread::scope(|scope| {
            for _ in 0..READERS {
                scope.spawn(move || assert_eq!(quietly(|| calls::recv(fd, 10, 0)), Ok(vec![])));
            }
            let failed = while_blocked(
                || quietly(|| calls::send(fd, &[b'f'; 40_000], MSG_NOSIGNAL)),
                || side.sync("sleep"),
            );
            assert_eq!(failed, Err(Errno::EPIPE));
            side.sync("refused");
        });
    });
}

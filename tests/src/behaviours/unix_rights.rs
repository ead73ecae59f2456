//! Descriptors that come with the bytes of an `AF_UNIX` stream (`SCM_RIGHTS`).
//!
//! Only the kernel can carry them, so a connection that has left it has to go back first. Each descriptor is the writing end of a
//! pipe, and comes with its own bytes of the stream: with a read that ends before them it does not come (a peek is another matter),
//! with the first one that takes any of them it does.

use std::os::raw::c_int;

use libc::{MSG_CMSG_CLOEXEC, MSG_DONTWAIT, MSG_NOSIGNAL, MSG_PEEK, MSG_WAITALL};

use super::peers::{answer_echoes, request_echoes, send_all};
use super::unix_streams::look;
use super::{Behaviour, Tally};
use crate::calls::{self, Beside, Errno, Fd, Letter, quietly};
use crate::say;
use crate::side::{Pattern, Side, receive_exactly, receive_pattern, while_blocked};

pub(super) const ALL: &[Behaviour] = &[
    whole("with_the_first_message", receives_at_first, sends_at_first),
    whole("with_the_first_message_of_the_server", sends_first_of_all, receives_first_of_all),
    returned("behind_bytes_from_before", gives_at_last, takes_at_last),
    returned("behind_bytes_from_before_of_the_client", takes_at_last, gives_at_last),
    late("read_in_one", gives_between, takes_in_one),
    late("read_in_pieces", gives_between, takes_in_pieces),
    late("read_whole", gives_between, takes_whole),
    late("read_whole_without_room", gives_between, takes_whole_without_room),
    late("read_whole_one_by_one", gives_five, takes_five_whole),
    late("read_whole_while_the_receiver_waits", gives_one, waits_for_all),
    late("peeked_at", gives_between, peeks_and_takes),
    late("peeked_at_up_to_it", gives_between, peeks_up_to_it)
        .limitation("**`MSG_PEEK` of bytes before those with descriptors**"),
    late("without_room", gives_between, takes_without_room),
    late("with_little_room", gives_two, takes_with_little_room),
    late("read_by_read", gives_between, takes_by_read),
    late("read_by_every_call", gives_five, takes_by_every_call),
    late("closing_on_exec", gives_between, takes_closing_on_exec),
    late("read_without_blocking", gives_when_told, takes_without_blocking),
    late("while_the_receiver_waits", gives_one, waits_in_recvmsg),
    late("while_the_receiver_waits_in_poll", gives_one, waits_in_poll),
    late("while_the_receiver_waits_in_epoll", gives_one, waits_in_epoll::<0>),
    late("while_the_receiver_waits_for_edges", gives_one, waits_in_epoll::<{ libc::EPOLLET }>),
    late("several_in_a_row", gives_five, takes_five),
    late("several_at_once", gives_three_at_once, takes_in_pieces),
    late("one_after_the_other", gives_again_and_again, takes_again_and_again),
    late("both_ways", gives_and_takes::<true>, gives_and_takes::<false>),
    late("with_unread_bytes_at_the_sender", gives_with_unread, takes_having_sent),
    late("unread_bytes_at_the_sender_stay", gives_and_reads_at_once, takes_having_sent_once),
    late("to_one_that_has_closed_with_unread_bytes_at_the_sender", gives_to_nobody, closes_behind_bytes),
    late("beside_a_thread_that_reads", gives_beside_a_reader, takes_and_answers_the_reader),
    late("with_more_unread_than_the_kernel_would_take", gives_with_much_unread, takes_having_sent_much),
    late("with_more_unread_in_a_set", gives_with_more_unread_in_a_set, takes_having_sent_more),
    late("to_one_that_never_writes", gives_once_more, takes_after_a_while),
    late("with_much_unread_at_the_receiver", gives_behind_much, takes_behind_much),
    late("with_many_bytes", gives_with_many, takes_with_many),
    late("with_no_bytes", gives_with_nothing, takes_what_follows),
    late("from_a_socket_that_does_not_block", gives_without_blocking, takes_in_pieces),
    late("that_is_none", gives_what_is_none, takes_what_follows),
    late("after_the_end", gives_after_the_end, ends),
    late("then_closed", gives_and_closes, takes_after_the_close),
];

/// The connection has carried messages both ways when they come.
pub(super) const fn late(name: &'static str, left: fn(&Side, Fd), right: fn(&Side, Fd)) -> Behaviour {
    Behaviour::connected(name, left, right).unix_only().alone(&["control-data"])
}

/// Whether such a connection leaves the kernel's socket is the library's business.
pub(super) const fn whole(name: &'static str, left: fn(&Side), right: fn(&Side)) -> Behaviour {
    Behaviour::whole(name, left, right, Tally::Total(1)).unix_only().alone(&["control-data"])
}

/// It leaves the kernel's socket, and comes back.
const fn returned(name: &'static str, left: fn(&Side), right: fn(&Side)) -> Behaviour {
    Behaviour::whole(name, left, right, Tally::Returned(1)).unix_only().alone(&["control-data"])
}

/// A pipe whose writing end is given away.
pub(super) struct Gift {
    reading: Fd,
    pub(super) writing: Fd,
}

impl Gift {
    pub(super) fn new() -> Self {
        let (reading, writing) = quietly(calls::pipe).expect("pipe");
        Self { reading, writing }
    }

    /// Sends the writing end with `data`.
    fn give(&self, fd: Fd, data: &[u8]) {
        let beside = Beside { fds: &[self.writing], ..Beside::default() };
        assert_eq!(calls::sendmsg_with(fd, &[data], beside, 0), Ok(data.len()));
    }

    /// Reads what everybody who has a writing end writes, until none is left.
    pub(super) fn read(self) {
        quietly(|| calls::close(self.writing)).expect("close");
        let mut data = Vec::new();
        loop {
            let piece = quietly(|| calls::read(self.reading, 100)).expect("read");
            if piece.is_empty() {
                break;
            }
            data.extend(piece);
        }
        say!("{} bytes through the pipe", data.len());
        quietly(|| calls::close(self.reading)).expect("close");
    }
}

/// Writes through each descriptor of a message, and closes it.
pub(super) fn open(letter: &Letter) {
    for &fd in &letter.fds {
        let _ = calls::write(fd, b"through the pipe");
        quietly(|| calls::close(fd)).expect("close");
    }
}

/// Room for a sender's name, and for control data.
pub(super) const ROOM: [usize; 2] = [110, 200];

fn take(fd: Fd, len: usize, flags: c_int) -> Letter {
    let letter = calls::recvmsg_with(fd, &[len], ROOM, flags).expect("recvmsg");
    open(&letter);
    letter
}

/// As long as they talk on, both stay where they are; nothing is left open.
pub(super) fn asks_on(side: &Side, fd: Fd) {
    side.sync("taken");
    request_echoes(fd, 30, 2000);
    side.sync("done");
    calls::open_descriptors(100);
}

pub(super) fn answers_on(side: &Side, fd: Fd) {
    side.sync("taken");
    answer_echoes(fd, 30, 2000);
    side.sync("done");
    calls::open_descriptors(100);
}

fn receives_at_first(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    side.sync("sent");
    while !take(fd, 3, 0).data.ends_with(b"d") {}
    side.sync("read");
    side.answer_warm_up(fd);
    answers_on(side, fd);
}

fn sends_at_first(side: &Side) {
    let fd = side.connect();
    let gift = Gift::new();
    gift.give(fd, b"with");
    assert_eq!(calls::send(fd, b"behind", 0), Ok(6));
    side.sync("sent");
    gift.read();
    side.sync("read");
    side.warm_up(fd);
    asks_on(side, fd);
}

fn sends_first_of_all(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    let gift = Gift::new();
    gift.give(fd, b"with");
    gift.read();
    side.answer_warm_up(fd);
    answers_on(side, fd);
}

fn receives_first_of_all(side: &Side) {
    let fd = side.connect();
    take(fd, 4, 0);
    side.warm_up(fd);
    asks_on(side, fd);
}

/// Sends a descriptor with bytes before and behind, all of which are unread meanwhile.
/// Messages of which the other side reads a byte at a time, so that those from before it left the kernel's socket are unread at the end.
const MESSAGES: usize = 20;

fn gives_at_last(side: &Side) {
    let fd = side.connection();
    let mut pattern = Pattern::new(63);
    for _ in 0..MESSAGES {
        send_all(fd, &pattern.take(64));
        side.sync("sent");
        receive_exactly(fd, 1);
    }
    let gift = Gift::new();
    gift.give(fd, b"with");
    side.sync("given");
    gift.read();
}

fn takes_at_last(side: &Side) {
    let fd = side.connection();
    let mut pattern = Pattern::new(63);
    for _ in 0..MESSAGES {
        side.sync("sent");
        receive_pattern(fd, &mut pattern, 1, 1);
        send_all(fd, b"a");
    }
    side.sync("given");
    receive_pattern(fd, &mut pattern, 63 * MESSAGES, 64);
    take(fd, 100, 0);
}

fn gives_between(side: &Side, fd: Fd) {
    let gift = Gift::new();
    assert_eq!(calls::send(fd, b"before", 0), Ok(6));
    gift.give(fd, b"with");
    assert_eq!(calls::send(fd, b"behind", 0), Ok(6));
    side.sync("sent");
    gift.read();
    asks_on(side, fd);
}

fn takes_in_one(side: &Side, fd: Fd) {
    side.sync("sent");
    look(fd);
    take(fd, 100, 0);
    take(fd, 100, 0);
    answers_on(side, fd);
}

fn takes_in_pieces(side: &Side, fd: Fd) {
    side.sync("sent");
    let mut left = 16;
    while left > 0 {
        left -= take(fd, 3.min(left), 0).data.len();
    }
    answers_on(side, fd);
}

/// Who asks for all gets it, but for what is behind descriptors.
fn takes_whole(side: &Side, fd: Fd) {
    side.sync("sent");
    take(fd, 16, MSG_WAITALL);
    take(fd, 6, MSG_WAITALL);
    answers_on(side, fd);
}

fn takes_whole_without_room(side: &Side, fd: Fd) {
    side.sync("sent");
    assert_eq!(calls::recv(fd, 16, MSG_WAITALL), Ok(b"beforewith".to_vec()));
    assert_eq!(calls::recv(fd, 6, MSG_WAITALL), Ok(b"behind".to_vec()));
    answers_on(side, fd);
}

fn takes_five_whole(side: &Side, fd: Fd) {
    side.sync("sent");
    let mut left = WORDS.concat().len();
    while left > 0 {
        left -= take(fd, left, MSG_WAITALL).data.len();
    }
    answers_on(side, fd);
}

fn peeks_and_takes(side: &Side, fd: Fd) {
    side.sync("sent");
    for len in [7, 10, 100] {
        take(fd, len, MSG_PEEK);
    }
    take(fd, 6, 0);
    take(fd, 2, MSG_PEEK);
    take(fd, 2, 0);
    take(fd, 1, MSG_PEEK);
    take(fd, 100, 0);
    answers_on(side, fd);
}

/// A peek that is done looks at the messages that follow, too, up to the first that has a descriptor (`unix_stream_read_generic` of
/// net/unix/af_unix.c, Linux 6.18): that one comes.
fn peeks_up_to_it(side: &Side, fd: Fd) {
    side.sync("sent");
    take(fd, 3, MSG_PEEK);
    take(fd, 6, MSG_PEEK);
    take(fd, 6, 0);
    take(fd, 100, 0);
    take(fd, 100, 0);
    answers_on(side, fd);
}

/// What there is no room for is gone.
fn takes_without_room(side: &Side, fd: Fd) {
    side.sync("sent");
    let mut left = 16;
    for room in [0, 0, 8, 0].into_iter().cycle() {
        let letter = calls::recvmsg_with(fd, &[3.min(left)], [0, room], 0).expect("recvmsg");
        left -= letter.data.len();
        if left == 0 {
            break;
        }
    }
    answers_on(side, fd);
}

fn gives_two(side: &Side, fd: Fd) {
    let gifts = [Gift::new(), Gift::new()];
    let fds = gifts.each_ref().map(|gift| gift.writing);
    let beside = Beside { fds: &fds, ..Beside::default() };
    assert_eq!(calls::sendmsg_with(fd, &[b"wi", b"th"], beside, 0), Ok(4));
    assert_eq!(calls::sendmsg_with(fd, &[b"again"], beside, 0), Ok(5));
    side.sync("sent");
    gifts.into_iter().for_each(Gift::read);
    asks_on(side, fd);
}

fn takes_with_little_room(side: &Side, fd: Fd) {
    side.sync("sent");
    let letter = calls::recvmsg_with(fd, &[100], [0, 20], MSG_PEEK).expect("recvmsg");
    open(&letter);
    let letter = calls::recvmsg_with(fd, &[100], [0, 20], 0).expect("recvmsg");
    open(&letter);
    let letter = calls::recvmsg_with(fd, &[100], [0, 24], 0).expect("recvmsg");
    open(&letter);
    answers_on(side, fd);
}

fn takes_by_read(side: &Side, fd: Fd) {
    side.sync("sent");
    let mut left = 16;
    while left > 0 {
        left -= calls::read(fd, 100.min(left)).expect("read").len();
    }
    answers_on(side, fd);
}

pub(super) const WORDS: [&[u8]; 5] = [b"one", b"two", b"three", b"four", b"five"];

fn gives_five(side: &Side, fd: Fd) {
    let gifts: [_; 5] = std::array::from_fn(|_| Gift::new());
    for (gift, words) in gifts.iter().zip(WORDS) {
        gift.give(fd, words);
    }
    side.sync("sent");
    gifts.into_iter().for_each(Gift::read);
    asks_on(side, fd);
}

fn takes_five(side: &Side, fd: Fd) {
    side.sync("sent");
    for _ in WORDS {
        take(fd, 100, 0);
    }
    answers_on(side, fd);
}

fn takes_by_every_call(side: &Side, fd: Fd) {
    side.sync("sent");
    let _ = calls::recv(fd, 100, 0);
    let _ = calls::readv(fd, &[1, 100]);
    let _ = calls::recvfrom_with(fd, 100, 110, 0);
    let _ = calls::recvmmsg(fd, &[100], 0);
    take(fd, 100, 0);
    answers_on(side, fd);
}

fn takes_closing_on_exec(side: &Side, fd: Fd) {
    side.sync("sent");
    for flags in [MSG_PEEK, MSG_PEEK | MSG_CMSG_CLOEXEC, MSG_CMSG_CLOEXEC] {
        let letter = calls::recvmsg_with(fd, &[100], ROOM, flags).expect("recvmsg");
        for &fd in &letter.fds {
            let _ = calls::closes_on_exec(fd);
        }
        open(&letter);
    }
    assert_eq!(receive_exactly(fd, 6), b"behind");
    answers_on(side, fd);
}

fn gives_when_told(side: &Side, fd: Fd) {
    side.sync("now");
    gives_between(side, fd);
}

fn takes_without_blocking(side: &Side, fd: Fd) {
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    assert_eq!(calls::recvmsg_with(fd, &[10], ROOM, 0).err(), Some(Errno::EAGAIN));
    side.sync("now");
    side.sync("sent");
    take(fd, 100, 0);
    take(fd, 100, 0);
    assert_eq!(calls::recvmsg_with(fd, &[10], ROOM, 0).err(), Some(Errno::EAGAIN));
    calls::set_nonblocking(fd, false).expect("FIONBIO");
    answers_on(side, fd);
}

fn gives_one(side: &Side, fd: Fd) {
    side.sync("waiting");
    let gift = Gift::new();
    gift.give(fd, b"with");
    gift.read();
    asks_on(side, fd);
}

fn waits_in_recvmsg(side: &Side, fd: Fd) {
    let letter = while_blocked(|| calls::recvmsg_with(fd, &[100], ROOM, 0), || side.sync("waiting"));
    open(&letter.expect("recvmsg"));
    answers_on(side, fd);
}

fn waits_for_all(side: &Side, fd: Fd) {
    let letter =
        while_blocked(|| calls::recvmsg_with(fd, &[100], ROOM, MSG_WAITALL), || side.sync("waiting"));
    open(&letter.expect("recvmsg"));
    answers_on(side, fd);
}

fn waits_in_poll(side: &Side, fd: Fd) {
    let ready = while_blocked(|| calls::poll(&[(fd, libc::POLLIN)], -1), || side.sync("waiting"));
    assert_eq!(ready, Ok(vec![libc::POLLIN]));
    take(fd, 100, 0);
    answers_on(side, fd);
}

fn waits_in_epoll<const KIND: c_int>(side: &Side, fd: Fd) {
    let set = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(set, fd, libc::EPOLLIN | KIND, 1).expect("EPOLL_CTL_ADD");
    let ready = while_blocked(|| calls::epoll_wait(set, 4, -1), || side.sync("waiting"));
    assert_eq!(ready.map(|ready| ready.len()), Ok(1));
    take(fd, 100, 0);
    let _ = calls::epoll_wait(set, 4, 0);
    answers_on(side, fd);
}

fn gives_three_at_once(side: &Side, fd: Fd) {
    let gifts: [_; 3] = std::array::from_fn(|_| Gift::new());
    let fds = gifts.each_ref().map(|gift| gift.writing);
    assert_eq!(calls::send(fd, b"before", 0), Ok(6));
    assert_eq!(calls::sendmsg_with(fd, &[b"three"], Beside { fds: &fds, ..Beside::default() }, 0), Ok(5));
    assert_eq!(calls::send(fd, b"after", 0), Ok(5));
    side.sync("sent");
    gifts.into_iter().for_each(Gift::read);
    asks_on(side, fd);
}

/// More than one message could be under way if the answer did not come first.
fn gives_again_and_again(side: &Side, fd: Fd) {
    for _ in 0..10 {
        let gift = Gift::new();
        gift.give(fd, b"with");
        assert_eq!(calls::recv(fd, 10, 0), Ok(b"thanks".to_vec()));
        gift.read();
    }
    asks_on(side, fd);
}

fn takes_again_and_again(side: &Side, fd: Fd) {
    for _ in 0..10 {
        take(fd, 100, 0);
        assert_eq!(calls::send(fd, b"thanks", 0), Ok(6));
    }
    answers_on(side, fd);
}

fn gives_and_takes<const LEFT: bool>(side: &Side, fd: Fd) {
    for _ in 0..3 {
        for giver in [true, false] {
            if giver == LEFT {
                let gift = Gift::new();
                gift.give(fd, b"with");
                gift.read();
            } else {
                take(fd, 100, 0);
            }
        }
    }
    if LEFT { asks_on(side, fd) } else { answers_on(side, fd) }
}

fn gives_with_unread(side: &Side, fd: Fd) {
    side.sync("unread");
    gives_between_reading(side, fd);
    asks_on(side, fd);
}

fn gives_between_reading(side: &Side, fd: Fd) {
    let gift = Gift::new();
    let _ = calls::unread(fd);
    gift.give(fd, b"with");
    let _ = calls::unread(fd);
    assert_eq!(calls::recv(fd, 3, 0), Ok(b"unr".to_vec()));
    gift.give(fd, b"again");
    assert_eq!(receive_exactly(fd, 3), b"ead");
    side.sync("sent");
    gift.read();
}

fn takes_having_sent(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    side.sync("unread");
    side.sync("sent");
    take(fd, 100, 0);
    take(fd, 100, 0);
    answers_on(side, fd);
}

/// What was there before it went back is there afterwards, without a wait.
fn gives_and_reads_at_once(side: &Side, fd: Fd) {
    side.sync("unread");
    let gift = Gift::new();
    look(fd);
    gift.give(fd, b"with");
    look(fd);
    assert_eq!(calls::recv(fd, 3, MSG_DONTWAIT | MSG_PEEK), Ok(b"unr".to_vec()));
    assert_eq!(calls::recv(fd, 3, MSG_DONTWAIT), Ok(b"unr".to_vec()));
    assert_eq!(calls::recv(fd, 100, MSG_DONTWAIT), Ok(b"ead".to_vec()));
    side.sync("sent");
    gift.read();
    asks_on(side, fd);
}

fn takes_having_sent_once(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    side.sync("unread");
    side.sync("sent");
    take(fd, 100, 0);
    answers_on(side, fd);
}

fn gives_to_nobody(side: &Side, fd: Fd) {
    side.sync("closed");
    let gift = Gift::new();
    let beside = Beside { fds: &[gift.writing], ..Beside::default() };
    for _ in 0..2 {
        assert_eq!(calls::sendmsg_with(fd, &[b"with"], beside, MSG_NOSIGNAL), Err(Errno::EPIPE));
    }
    assert_eq!(receive_exactly(fd, 6), b"unread");
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
    gift.read();
}

fn closes_behind_bytes(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    calls::close(fd).expect("close");
    side.sync("closed");
}

/// Another thread sleeps in a read meanwhile, and gets what comes.
fn gives_beside_a_reader(side: &Side, fd: Fd) {
    let read = while_blocked(
        || receive_exactly(fd, 6),
        || {
            let gift = Gift::new();
            gift.give(fd, b"with");
            side.sync("sent");
            gift.read();
        },
    );
    assert_eq!(read, b"answer");
    asks_on(side, fd);
}

fn takes_and_answers_the_reader(side: &Side, fd: Fd) {
    side.sync("sent");
    take(fd, 100, 0);
    assert_eq!(calls::send(fd, b"answer", 0), Ok(6));
    answers_on(side, fd);
}

fn gives_with_much_unread(side: &Side, fd: Fd) {
    side.sync("unread");
    let gift = Gift::new();
    gift.give(fd, b"with");
    side.sync("sent");
    receive_pattern(fd, &mut Pattern::new(62), MUCH, 4000);
    gift.read();
    asks_on(side, fd);
}

/// More than the other side could send once more, had it to.
const MORE: usize = 150_000;

/// A registration that has been idle for some waits, and on which nobody waits now, is no reason to wait for the other side.
fn gives_with_more_unread_in_a_set(side: &Side, fd: Fd) {
    let set = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(set, fd, libc::EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    for _ in 0..20 {
        quietly(|| calls::epoll_wait(set, 4, 5)).expect("epoll_wait");
    }
    side.sync("idle");
    side.sync("unread");
    let gift = Gift::new();
    gift.give(fd, b"with");
    side.sync("sent");
    let ready = calls::epoll_wait(set, 4, -1).expect("epoll_wait");
    assert_eq!(ready.len(), 1);
    receive_pattern(fd, &mut Pattern::new(62), MORE, 4000);
    let _ = calls::epoll_wait(set, 4, 0);
    gift.read();
    asks_on(side, fd);
}

fn takes_having_sent_more(side: &Side, fd: Fd) {
    side.sync("idle");
    send_all(fd, &Pattern::new(62).take(MORE));
    side.sync("unread");
    side.sync("sent");
    take(fd, 100, 0);
    answers_on(side, fd);
}

fn takes_having_sent_much(side: &Side, fd: Fd) {
    send_all(fd, &Pattern::new(62).take(MUCH));
    side.sync("unread");
    side.sync("sent");
    take(fd, 100, 0);
    answers_on(side, fd);
}

fn gives_once_more(side: &Side, fd: Fd) {
    for turn in 0..64 {
        assert_eq!(calls::send(fd, b"bytes", 0), Ok(5));
        side.sync("sent");
        if turn == 60 {
            let gift = Gift::new();
            gift.give(fd, b"with");
            gift.give(fd, b"again");
            side.sync("given");
            gift.read();
        }
    }
}

fn takes_after_a_while(side: &Side, fd: Fd) {
    for turn in 0..64 {
        side.sync("sent");
        assert_eq!(receive_exactly(fd, 5), b"bytes");
        if turn == 60 {
            // No call of this side's comes before.
            side.sync("given");
            take(fd, 4, 0);
            take(fd, 5, 0);
        }
    }
}

const MUCH: usize = 100_000;

fn gives_behind_much(side: &Side, fd: Fd) {
    send_all(fd, &Pattern::new(61).take(MUCH));
    let gift = Gift::new();
    gift.give(fd, b"with");
    side.sync("sent");
    gift.read();
    asks_on(side, fd);
}

fn takes_behind_much(side: &Side, fd: Fd) {
    side.sync("sent");
    let mut pattern = Pattern::new(61);
    while (pattern.position() as usize) < MUCH {
        let len = 3333.min(MUCH - pattern.position() as usize);
        let letter = quietly(|| calls::recvmsg_with(fd, &[len], ROOM, 0)).expect("recvmsg");
        assert!(letter.fds.is_empty(), "it came {} bytes early", MUCH - pattern.position() as usize);
        pattern.expect(&letter.data);
    }
    take(fd, 100, 0);
    answers_on(side, fd);
}

/// A message that no buffer takes has it with its first piece.
fn gives_with_many(side: &Side, fd: Fd) {
    let gift = Gift::new();
    let data = Pattern::new(62).take(2 << 20);
    let beside = Beside { fds: &[gift.writing], ..Beside::default() };
    assert_eq!(calls::sendmsg_with(fd, &[&data], beside, 0), Ok(data.len()));
    gift.read();
    asks_on(side, fd);
}

fn takes_with_many(side: &Side, fd: Fd) {
    let letter = take(fd, 1, 0);
    let mut pattern = Pattern::new(62);
    pattern.expect(&letter.data);
    receive_pattern(fd, &mut pattern, (2 << 20) - 1, 50_000);
    answers_on(side, fd);
}

/// It goes nowhere.
fn gives_with_nothing(side: &Side, fd: Fd) {
    let gift = Gift::new();
    let beside = Beside { fds: &[gift.writing], ..Beside::default() };
    let _ = calls::sendmsg_with(fd, &[], beside, 0);
    let _ = calls::sendmsg_with(fd, &[b""], beside, 0);
    gift.read();
    assert_eq!(calls::send(fd, b"what follows", 0), Ok(12));
    side.sync("sent");
    asks_on(side, fd);
}

pub(super) fn takes_what_follows(side: &Side, fd: Fd) {
    side.sync("sent");
    take(fd, 100, 0);
    answers_on(side, fd);
}

/// A write that could not be done at once may be tried again.
fn gives_without_blocking(side: &Side, fd: Fd) {
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    let gift = Gift::new();
    assert_eq!(calls::send(fd, b"before", 0), Ok(6));
    let beside = Beside { fds: &[gift.writing], ..Beside::default() };
    loop {
        match quietly(|| calls::sendmsg_with(fd, &[b"with"], beside, MSG_NOSIGNAL)) {
            Ok(sent) => {
                say!("sent {sent}");
                break;
            }
            Err(error) => assert_eq!(error, Errno::EAGAIN),
        }
        assert_eq!(quietly(|| calls::poll(&[(fd, libc::POLLOUT)], -1)), Ok(vec![libc::POLLOUT]));
    }
    assert_eq!(calls::send(fd, b"behind", 0), Ok(6));
    calls::set_nonblocking(fd, false).expect("FIONBIO");
    side.sync("sent");
    gift.read();
    asks_on(side, fd);
}

fn gives_what_is_none(side: &Side, fd: Fd) {
    for number in [-1, 9999] {
        let beside = Beside { fds: &[number], ..Beside::default() };
        assert_eq!(calls::sendmsg_with(fd, &[b"with"], beside, 0), Err(Errno::EBADF));
    }
    assert_eq!(calls::send(fd, b"what follows", 0), Ok(12));
    side.sync("sent");
    asks_on(side, fd);
}

fn gives_after_the_end(side: &Side, fd: Fd) {
    let gift = Gift::new();
    let beside = Beside { fds: &[gift.writing], ..Beside::default() };
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    let _ = calls::sendmsg_with(fd, &[b"with"], beside, MSG_NOSIGNAL);
    side.sync("close");
    side.sync("closed");
    let _ = calls::sendmsg_with(fd, &[b"with"], beside, MSG_NOSIGNAL);
    gift.read();
    calls::open_descriptors(100);
}

fn ends(side: &Side, fd: Fd) {
    side.sync("close");
    assert_eq!(calls::recvmsg_with(fd, &[10], ROOM, 0).map(|letter| letter.data), Ok(vec![]));
    calls::close(fd).expect("close");
    side.sync("closed");
}

fn gives_and_closes(side: &Side, fd: Fd) {
    let gift = Gift::new();
    gift.give(fd, b"with");
    calls::close(fd).expect("close");
    side.sync("closed");
    gift.read();
    calls::open_descriptors(100);
}

fn takes_after_the_close(side: &Side, fd: Fd) {
    side.sync("closed");
    look(fd);
    take(fd, 100, 0);
    assert_eq!(calls::recvmsg_with(fd, &[10], ROOM, 0).map(|letter| letter.data), Ok(vec![]));
    calls::open_descriptors(100);
}

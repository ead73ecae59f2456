//! Credentials that come with the bytes of an `AF_UNIX` stream (`SCM_CREDENTIALS`, `SO_PASSCRED`): only the kernel knows whose they are, so a
//! connection on which they are sent or asked for stays with it, or goes back.

use libc::{MSG_DONTWAIT, MSG_PEEK, SO_PASSCRED, SOL_SOCKET};

use super::Behaviour;
use super::unix_rights::{Gift, ROOM, WORDS, answers_on, asks_on, late, open, takes_what_follows, whole};
use crate::calls::{self, Beside, Fd, Letter, quietly};
use crate::say;
use crate::side::Side;

pub(super) const ALL: &[Behaviour] = &[
    late("nobody_asked_for", says_who_it_is, takes_what_follows),
    late("asked_for_late", is_known_late, asks_late),
    late("asked_for_with_unread_bytes", is_known_with_unread, asks_with_unread),
    late("asked_for_with_unread_bytes_and_little_room", is_known_with_unread, asks_with_little_room),
    whole("asked_for_early", is_asked_early, asks_early),
    whole("asked_for_before_listening", asks_before_listening, is_asked_early_of_listener),
    whole("asked_for_before_connecting", answers_who_asked_before, asks_before_connecting),
];

const CREDENTIALS: Beside<'_> = Beside { fds: &[], credentials: true, address: false };

fn says_who_it_is(side: &Side, fd: Fd) {
    assert_eq!(calls::sendmsg_with(fd, &[b"it is me"], CREDENTIALS, 0), Ok(8));
    side.sync("sent");
    asks_on(side, fd);
}

/// Whether it names the other side, which has told its number.
fn check_sender(letter: &Letter, process: u64) {
    let named = letter.credentials.map(|credentials| u64::from(credentials.process));
    say!("it names the other side: {:?}", named.map(|named| named == process));
}

fn is_known_late(side: &Side, fd: Fd) {
    side.tell(u64::from(std::process::id()));
    side.sync("asked");
    assert_eq!(calls::send(fd, b"one", 0), Ok(3));
    assert_eq!(calls::sendmsg_with(fd, &[b"two"], CREDENTIALS, 0), Ok(3));
    let gift = Gift::new();
    let beside = Beside { fds: &[gift.writing], ..CREDENTIALS };
    assert_eq!(calls::sendmsg_with(fd, &[b"three"], beside, 0), Ok(5));
    side.sync("sent");
    gift.read();
    asks_on(side, fd);
}

fn asks_late(side: &Side, fd: Fd) {
    let other = side.told();
    calls::set_option(fd, SOL_SOCKET, SO_PASSCRED, 1).expect("SO_PASSCRED");
    let _ = calls::option(fd, SOL_SOCKET, SO_PASSCRED);
    side.sync("asked");
    side.sync("sent");
    for len in [2, 100, 100, 100] {
        if let Ok(letter) = calls::recvmsg_with(fd, &[len], ROOM, MSG_DONTWAIT) {
            check_sender(&letter, other);
            open(&letter);
        }
    }
    answers_on(side, fd);
}

fn is_known_with_unread(side: &Side, fd: Fd) {
    side.tell(u64::from(std::process::id()));
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    side.sync("unread");
    side.sync("asked");
    assert_eq!(calls::send(fd, b"one", 0), Ok(3));
    assert_eq!(calls::send(fd, b"two", 0), Ok(3));
    side.sync("sent");
    asks_on(side, fd);
}

fn asks_with_unread(side: &Side, fd: Fd) {
    let other = side.told();
    side.sync("unread");
    calls::set_option(fd, SOL_SOCKET, SO_PASSCRED, 1).expect("SO_PASSCRED");
    side.sync("asked");
    side.sync("sent");
    for len in [2, 100, 100] {
        if let Ok(letter) = calls::recvmsg_with(fd, &[len], ROOM, MSG_DONTWAIT) {
            check_sender(&letter, other);
        }
    }
    answers_on(side, fd);
}

/// The kernel gives as much of them as there is room for, and says that it was too little.
fn asks_with_little_room(side: &Side, fd: Fd) {
    side.told();
    side.sync("unread");
    calls::set_option(fd, SOL_SOCKET, SO_PASSCRED, 1).expect("SO_PASSCRED");
    side.sync("asked");
    side.sync("sent");
    for (room, flags) in [(24, MSG_PEEK), (24, 0), (8, 0), (0, 0), (28, 0), (32, 0)] {
        let _ = calls::recvmsg_with(fd, &[1], [ROOM[0], room], MSG_DONTWAIT | flags);
    }
    assert_eq!(calls::recv(fd, 100, MSG_DONTWAIT), Ok(b"d".to_vec()));
    assert_eq!(calls::recv(fd, 100, MSG_DONTWAIT), Ok(b"onetwo".to_vec()));
    answers_on(side, fd);
}

fn asks_early(side: &Side) {
    let fd = side.connect();
    calls::set_option(fd, SOL_SOCKET, SO_PASSCRED, 1).expect("SO_PASSCRED");
    reads_who_sends(side, fd);
}

fn is_asked_early(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    tells_who_sends(side, fd);
}

/// The first words come from who knows nothing of it yet, maybe; all that follow say who sends.
fn tells_who_sends(side: &Side, fd: Fd) {
    side.tell(u64::from(std::process::id()));
    side.sync("asked");
    for words in WORDS {
        assert_eq!(calls::send(fd, words, 0), Ok(words.len()));
    }
    side.sync("sent");
    side.answer_warm_up(fd);
    answers_on(side, fd);
}

fn reads_who_sends(side: &Side, fd: Fd) {
    let other = side.told();
    side.sync("asked");
    side.sync("sent");
    for len in [2, 100, 100] {
        if let Ok(letter) = calls::recvmsg_with(fd, &[len], ROOM, MSG_DONTWAIT) {
            check_sender(&letter, other);
        }
    }
    side.warm_up(fd);
    asks_on(side, fd);
}

fn asks_before_listening(side: &Side) {
    let listener = quietly(|| calls::stream_socket(side.family, 0)).expect("socket");
    calls::set_option(listener, SOL_SOCKET, SO_PASSCRED, 1).expect("SO_PASSCRED");
    quietly(|| calls::bind(listener, side.family.own(0))).expect("bind");
    calls::listen(listener, 8).expect("listen");
    side.tell(u64::from(crate::side::listening_port(listener)));
    let fd = side.accept(listener);
    let _ = calls::option(fd, SOL_SOCKET, SO_PASSCRED);
    let other = side.told();
    side.sync("sent");
    for len in [2, 100, 100] {
        if let Ok(letter) = calls::recvmsg_with(fd, &[len], ROOM, MSG_DONTWAIT) {
            check_sender(&letter, other);
        }
    }
    side.sync("read");
    side.answer_warm_up(fd);
    answers_on(side, fd);
}

fn is_asked_early_of_listener(side: &Side) {
    let fd = side.connect();
    side.tell(u64::from(std::process::id()));
    for words in WORDS {
        assert_eq!(calls::send(fd, words, 0), Ok(words.len()));
    }
    side.sync("sent");
    side.sync("read");
    side.warm_up(fd);
    asks_on(side, fd);
}

fn answers_who_asked_before(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    let _ = calls::option(fd, SOL_SOCKET, SO_PASSCRED);
    tells_who_sends(side, fd);
}

fn asks_before_connecting(side: &Side) {
    let destination = side.destination();
    let fd = calls::stream_socket(side.family, 0).expect("socket");
    calls::set_option(fd, SOL_SOCKET, SO_PASSCRED, 1).expect("SO_PASSCRED");
    calls::connect(fd, destination).expect("connect");
    reads_who_sends(side, fd);
}

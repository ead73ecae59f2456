//! What messages on an `AF_UNIX` stream have beside their bytes: names of senders and receivers, flags, options.

use std::os::raw::{c_int, c_short};

use libc::{
    MSG_DONTWAIT, MSG_EOR, MSG_ERRQUEUE, MSG_MORE, MSG_NOSIGNAL, MSG_OOB, MSG_PEEK, MSG_TRUNC, MSG_WAITALL,
    SHUT_WR, SO_PEEK_OFF, SO_RCVLOWAT, SOL_SOCKET,
};

use super::peers::{echo, request_echoes, waits};
use super::unix_streams::look;
use super::{Behaviour, Tally};
use crate::calls::{self, Beside, Errno, Fd, quietly};
use crate::say;
use crate::side::{Side, await_unread};

pub(super) const ALL: &[Behaviour] = &[
    both("names_by_recvfrom", asks_recvfrom, sends_thrice),
    both("names_by_recvmsg", asks_recvmsg, sends_thrice),
    both("names_at_the_end", asks_at_the_end, ends),
    both("names_with_reads_of_nothing", asks_with_reads_of_nothing, sends_thrice),
    whole("client_with_a_name", listens_to_one_with_a_name, connects_with_a_name, Tally::Upgraded(1)),
    whole("client_with_any_name", listens_to_one_with_a_name, connects_with_any_name, Tally::Upgraded(1)),
    whole("client_named_late", listens_to_one_named_late, is_named_late, Tally::Upgraded(1)),
    both("sending_to_a_name", sends_to_a_name, reads_what_comes),
    both("sending_nothing_to_a_name", sends_nothing_to_a_name, sends_once),
    both("sending_to_a_name_of_a_closed_peer", sends_to_a_name_after_a_close, closes),
    both("truncated", asks_to_truncate, sends_thrice),
    both("error_queue", asks_the_error_queue, sends_thrice),
    both("sending_flags", sends_with_each_flag, reads_what_comes),
    both("receiving_flags", receives_with_each_flag, sends_thrice),
    both("urgent_byte", receives_an_urgent_byte, sends_an_urgent_byte).alone(&["oob"]),
    both("urgent_byte_that_is_not_asked_for", misses_an_urgent_byte, sends_an_urgent_byte).alone(&["oob"]),
    both("urgent_where_there_is_none", asks_for_urgent, sends_thrice).alone(&["oob"]),
    whole("urgent_byte_at_first", receives_urgent_at_first, sends_urgent_at_first, Tally::Total(1))
        .alone(&["oob"]),
    both("peeking_on", peeks_on, sends_thrice),
    both("peek_offset_late", sets_a_peek_offset, sends_thrice)
        .alone(&["unsupported-call"])
        .limitation("**`SO_PEEK_OFF`**"),
    whole("peek_offset_early", accepts_and_sets_a_peek_offset, connects_and_sends, Tally::Total(1))
        .alone(&["unsupported-call"]),
    both("counts_of_unread_bytes_late", asks_what_is_left, sends_thrice)
        .alone(&["unsupported-call"])
        .limitation("**`SO_INQ`**"),
    whole("counts_of_unread_bytes_early", accepts_and_asks_what_is_left, connects_and_sends, Tally::Total(1))
        .alone(&["unsupported-call"]),
    whole("low_water_mark_early", accepts_and_raises_the_mark, connects_and_sends, Tally::Total(1))
        .alone(&["rcvlowat"]),
    both("who_the_peer_is", asks_who_it_is, asks_who_it_is),
    both("names_of_ends", asks_for_names, closes_after_a_while),
    both("options_of_others", asks_for_options_of_others, waits).alone(&["unsupported-call"]),
    both("options_of_its_own", asks_for_options_of_its_own, waits).alone(&["unsupported-call"]),
    both("unread_bytes_of_several_messages", counts_unread, sends_thrice),
];

const fn both(name: &'static str, left: fn(&Side, Fd), right: fn(&Side, Fd)) -> Behaviour {
    Behaviour::connected(name, left, right).unix_only()
}

const fn whole(name: &'static str, left: fn(&Side), right: fn(&Side), tally: Tally) -> Behaviour {
    Behaviour::whole(name, left, right, tally).unix_only()
}

/// Bytes of room for a name: for none, for less than a family, for it, for a part of the name, for all.
const ROOMS: [usize; 5] = [0, 1, 2, 5, 110];

const WORDS: [&[u8]; 3] = [b"first words", b"second words", b"third words"];

fn sends_thrice(side: &Side, fd: Fd) {
    side.sync("ready");
    for words in WORDS {
        assert_eq!(calls::send(fd, words, 0), Ok(words.len()));
    }
    side.sync("sent");
    side.sync("done");
}

fn asks_recvfrom(side: &Side, fd: Fd) {
    let _ = calls::recvfrom_with(fd, 10, 110, MSG_DONTWAIT);
    side.sync("ready");
    side.sync("sent");
    for room in ROOMS {
        let _ = calls::recvfrom_with(fd, 2, room, MSG_PEEK);
        let _ = calls::recvfrom_with(fd, 2, room, 0);
    }
    let _ = calls::recvfrom(fd, 5, 0);
    let _ = calls::recvfrom_chk(fd, 5, 0);
    let _ = calls::recvfrom_with(fd, 100, 110, 0);
    let _ = calls::recvfrom_with(fd, 100, 110, MSG_DONTWAIT);
    side.sync("done");
}

fn asks_recvmsg(side: &Side, fd: Fd) {
    let _ = calls::recvmsg_with(fd, &[10], [110, 100], MSG_DONTWAIT);
    side.sync("ready");
    side.sync("sent");
    for room in ROOMS {
        let _ = calls::recvmsg_with(fd, &[1, 2], [room, 100], MSG_PEEK);
        let _ = calls::recvmsg_with(fd, &[1, 2], [room, 0], 0);
    }
    let _ = calls::recvmsg_with(fd, &[100], [110, 0], 0);
    let _ = calls::recvmsg_with(fd, &[100], [110, 0], MSG_DONTWAIT);
    side.sync("done");
}

fn asks_at_the_end(side: &Side, fd: Fd) {
    side.sync("ended");
    let _ = calls::recvfrom_with(fd, 100, 110, 0);
    let _ = calls::recvfrom_with(fd, 100, 110, 0);
    let _ = calls::recvmsg_with(fd, &[100], [110, 100], 0);
    let _ = calls::recvmsg_with(fd, &[100], [110, 100], MSG_PEEK);
    side.sync("done");
}

fn ends(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"last words", 0), Ok(10));
    calls::shutdown(fd, SHUT_WR).expect("shutdown");
    side.sync("ended");
    side.sync("done");
}

fn asks_with_reads_of_nothing(side: &Side, fd: Fd) {
    let _ = calls::recvmsg_with(fd, &[], [110, 100], MSG_DONTWAIT);
    side.sync("ready");
    side.sync("sent");
    for flags in [0, MSG_PEEK, MSG_WAITALL, MSG_DONTWAIT] {
        let _ = calls::recvmsg_with(fd, &[], [110, 100], flags);
        let _ = calls::recvmsg_with(fd, &[0], [110, 0], flags);
        let _ = calls::recvfrom_with(fd, 0, 110, flags);
    }
    assert_eq!(calls::recv(fd, 11, 0), Ok(WORDS[0].to_vec()));
    side.sync("done");
}

fn listens_to_one_with_a_name(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    let _ = calls::recvmsg_with(fd, &[5], [110, 0], MSG_PEEK);
    let _ = calls::recvmsg_with(fd, &[5], [110, 0], libc::MSG_WAITALL);
    side.answer_warm_up(fd);
    let _ = calls::name_of(fd, true);
    asks_recvmsg(side, fd);
}

fn connects_with_a_name(side: &Side) {
    let destination = side.destination();
    let fd = calls::stream_socket(side.family, 0).expect("socket");
    calls::bind(fd, side.family.own(0)).expect("bind");
    calls::connect(fd, destination).expect("connect");
    let _ = calls::name_of(fd, false);
    assert_eq!(calls::send(fd, b"first", 0), Ok(5));
    side.warm_up(fd);
    sends_thrice(side, fd);
}

fn connects_with_any_name(side: &Side) {
    let destination = side.destination();
    let fd = calls::stream_socket(side.family, 0).expect("socket");
    calls::bind_automatically(fd).expect("bind");
    calls::connect(fd, destination).expect("connect");
    let _ = calls::name_of(fd, false);
    assert_eq!(calls::send(fd, b"first", 0), Ok(5));
    side.warm_up(fd);
    sends_thrice(side, fd);
}

/// The name is that of the sender when its bytes are read.
fn listens_to_one_named_late(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    side.answer_warm_up(fd);
    side.sync("sent");
    let _ = calls::recvmsg_with(fd, &[2], [110, 0], 0);
    side.sync("name yourself");
    side.sync("named");
    let _ = calls::recvmsg_with(fd, &[2], [110, 0], 0);
    let _ = calls::recvfrom_with(fd, 2, 110, MSG_PEEK);
    let _ = calls::name_of(fd, true);
    side.sync("done");
}

fn is_named_late(side: &Side) {
    let fd = side.connect();
    side.warm_up(fd);
    assert_eq!(calls::send(fd, b"words", 0), Ok(5));
    side.sync("sent");
    side.sync("name yourself");
    calls::bind(fd, side.family.own(0)).expect("bind");
    let _ = calls::name_of(fd, false);
    side.sync("named");
    side.sync("done");
}

/// Whatever else a call wants: it has to do without a name.
fn sends_to_a_name(side: &Side, fd: Fd) {
    let named = Beside { address: true, ..Beside::default() };
    for _ in 0..2 {
        for flags in [0, MSG_DONTWAIT, MSG_NOSIGNAL, MSG_MORE] {
            assert_eq!(calls::sendto_nobody(fd, b"lost", flags), Err(Errno::EISCONN));
            assert_eq!(calls::sendto_nobody(fd, b"", flags), Err(Errno::EISCONN));
            assert_eq!(calls::sendmsg_with(fd, &[b"lost"], named, flags), Err(Errno::EISCONN));
            assert_eq!(calls::sendmsg_with(fd, &[], named, flags), Err(Errno::EISCONN));
        }
        let _ = calls::sendto(fd, b"lost", 0);
        let _ = calls::sendto_peer(fd, b"kept", MSG_NOSIGNAL);
        calls::shutdown(fd, SHUT_WR).expect("shutdown");
    }
    side.sync("done");
    side.sync("read");
}

fn sends_nothing_to_a_name(side: &Side, fd: Fd) {
    assert_eq!(calls::recv(fd, 1, 0), Ok(b"x".to_vec()));
    for _ in 0..20 {
        assert_eq!(quietly(|| calls::sendto(fd, b"", 0)), Err(Errno::EISCONN));
        assert_eq!(quietly(|| calls::sendto_nobody(fd, b"", 0)), Err(Errno::EISCONN));
    }
    side.sync("done");
}

fn sends_once(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"x", 0), Ok(1));
    side.sync("done");
}

fn reads_what_comes(side: &Side, fd: Fd) {
    side.sync("done");
    let _ = calls::recv(fd, 100, MSG_DONTWAIT);
    let _ = calls::recv(fd, 100, MSG_DONTWAIT);
    side.sync("read");
}

fn sends_to_a_name_after_a_close(side: &Side, fd: Fd) {
    side.sync("closed");
    let _ = calls::sendto_nobody(fd, b"lost", MSG_NOSIGNAL);
    let _ = calls::sendto_nobody(fd, b"", MSG_NOSIGNAL);
    let _ = calls::send(fd, b"", MSG_NOSIGNAL);
    let _ = calls::sendmsg(fd, &[], MSG_NOSIGNAL);
}

fn closes(side: &Side, fd: Fd) {
    calls::close(fd).expect("close");
    side.sync("closed");
}

/// The flag means nothing here.
fn asks_to_truncate(side: &Side, fd: Fd) {
    let _ = calls::recv(fd, 10, MSG_TRUNC | MSG_DONTWAIT);
    side.sync("ready");
    side.sync("sent");
    let _ = calls::recv(fd, 4, MSG_TRUNC | MSG_PEEK);
    let _ = calls::recv(fd, 4, MSG_TRUNC);
    let _ = calls::recvmsg_with(fd, &[2, 2], [110, 100], MSG_TRUNC);
    let _ = calls::recv(fd, 0, MSG_TRUNC);
    let mut buf = [b'.'; 4];
    let _ = calls::recv_into(fd, &mut buf, MSG_TRUNC | MSG_WAITALL);
    say!("{:?}", buf);
    let _ = calls::recv(fd, 100, 0);
    side.sync("done");
}

fn asks_the_error_queue(side: &Side, fd: Fd) {
    let _ = calls::recv(fd, 10, MSG_ERRQUEUE | MSG_DONTWAIT);
    side.sync("ready");
    side.sync("sent");
    let _ = calls::recv(fd, 4, MSG_ERRQUEUE | MSG_PEEK);
    let _ = calls::recv(fd, 4, MSG_ERRQUEUE);
    let _ = calls::recvmsg_with(fd, &[2, 2], [110, 100], MSG_ERRQUEUE);
    let _ = calls::recv(fd, 100, 0);
    side.sync("done");
}

/// From linux/socket.h; libc does not know them all.
const MSG_CONFIRM: c_int = 0x800;
const MSG_FASTOPEN: c_int = 0x2000_0000;

fn sends_with_each_flag(side: &Side, fd: Fd) {
    for flags in [
        MSG_MORE,
        MSG_EOR,
        MSG_CONFIRM,
        MSG_FASTOPEN,
        libc::MSG_DONTROUTE,
        libc::MSG_ZEROCOPY,
        MSG_PEEK,
        MSG_TRUNC,
    ] {
        let _ = calls::send(fd, b"abc", flags | MSG_NOSIGNAL);
        let _ = calls::sendmsg(fd, &[b"d", b"e"], flags);
    }
    side.sync("done");
    side.sync("read");
}

fn receives_with_each_flag(side: &Side, fd: Fd) {
    side.sync("ready");
    side.sync("sent");
    for flags in [
        MSG_MORE,
        MSG_EOR,
        MSG_CONFIRM,
        libc::MSG_CMSG_CLOEXEC,
        libc::MSG_DONTROUTE,
        MSG_NOSIGNAL,
        MSG_WAITALL,
    ] {
        let _ = calls::recvmsg_with(fd, &[1, 2], [110, 100], flags);
        let _ = calls::recv(fd, 1, flags);
    }
    let _ = calls::recv(fd, 100, MSG_WAITALL | MSG_DONTWAIT);
    let _ = calls::recv(fd, 100, MSG_WAITALL | MSG_DONTWAIT);
    side.sync("done");
}

const URGENT: c_short = libc::POLLIN | libc::POLLPRI | libc::POLLRDBAND;

fn sends_an_urgent_byte(side: &Side, fd: Fd) {
    side.sync("ready");
    assert_eq!(calls::send(fd, b"before", 0), Ok(6));
    assert_eq!(calls::send(fd, b"ab!", MSG_OOB), Ok(3));
    assert_eq!(calls::send(fd, b"behind", 0), Ok(6));
    side.sync("sent");
    side.sync("taken");
    request_echoes(fd, 20, 500);
    side.sync("done");
}

fn receives_an_urgent_byte(side: &Side, fd: Fd) {
    let _ = calls::recv(fd, 1, MSG_OOB | MSG_DONTWAIT);
    side.sync("ready");
    in_calls_until(side, fd, "sent");
    let _ = calls::poll(&[(fd, URGENT)], 0);
    let _ = calls::unread(fd);
    let _ = calls::at_mark(fd);
    let _ = calls::recv(fd, 1, MSG_OOB | MSG_PEEK);
    let _ = calls::recv(fd, 10, MSG_OOB);
    let _ = calls::recv(fd, 10, MSG_OOB);
    let _ = calls::poll(&[(fd, URGENT)], 0);
    let _ = calls::recv(fd, 100, 0);
    let _ = calls::at_mark(fd);
    let _ = calls::recv(fd, 6, MSG_DONTWAIT);
    serve(side, fd);
}

fn misses_an_urgent_byte(side: &Side, fd: Fd) {
    side.sync("ready");
    in_calls_until(side, fd, "sent");
    let _ = calls::recv(fd, 3, 0);
    let _ = calls::recv(fd, 100, 0);
    let _ = calls::at_mark(fd);
    let _ = calls::recv(fd, 6, MSG_DONTWAIT);
    let _ = calls::at_mark(fd);
    let _ = calls::recv(fd, 10, MSG_OOB | MSG_DONTWAIT);
    serve(side, fd);
}

/// Answers the other side's echoes, until it is done.
fn serve(side: &Side, fd: Fd) {
    side.sync("taken");
    super::peers::answer_echoes(fd, 20, 500);
    side.sync("done");
}

/// Makes calls on the connection that change nothing, until the other side has got to `place`.
pub(super) fn in_calls_until(side: &Side, fd: Fd, place: &str) {
    while !side.is_awaited() {
        let _ = quietly(|| calls::poll(&[(fd, libc::POLLIN)], 1));
        crate::side::pause();
    }
    side.sync(place);
}

fn asks_for_urgent(side: &Side, fd: Fd) {
    side.sync("ready");
    side.sync("sent");
    for _ in 0..2 {
        let _ = calls::recv(fd, 1, MSG_OOB);
        let _ = calls::recv(fd, 1, MSG_OOB | MSG_PEEK);
        let _ = calls::at_mark(fd);
    }
    let _ = calls::option(fd, SOL_SOCKET, libc::SO_OOBINLINE);
    assert_eq!(calls::recv(fd, 11, 0), Ok(WORDS[0].to_vec()));
    side.sync("done");
}

fn receives_urgent_at_first(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    side.sync("sent");
    let _ = calls::poll(&[(fd, URGENT)], 0);
    let _ = calls::recv(fd, 10, MSG_OOB);
    let _ = calls::recv(fd, 100, 0);
    let _ = calls::recv(fd, 100, 0);
    side.sync("taken");
    side.answer_warm_up(fd);
    say!("echoed {}", echo(fd));
}

fn sends_urgent_at_first(side: &Side) {
    let fd = side.connect();
    assert_eq!(calls::send(fd, b"ab!", MSG_OOB), Ok(3));
    assert_eq!(calls::send(fd, b"behind", 0), Ok(6));
    side.sync("sent");
    side.sync("taken");
    side.warm_up(fd);
    request_echoes(fd, 20, 500);
}

fn peeks_on(side: &Side, fd: Fd) {
    side.sync("ready");
    side.sync("sent");
    for len in [1, 11, 12, 100] {
        let _ = calls::recv(fd, len, MSG_PEEK);
        let _ = calls::recvmsg_with(fd, &[len, 3], [110, 0], MSG_PEEK);
    }
    let _ = calls::recv(fd, 10, 0);
    let _ = calls::recv(fd, 3, MSG_PEEK);
    let _ = calls::recv(fd, 100, 0);
    side.sync("done");
}

fn peeks_with_an_offset(side: &Side, fd: Fd) {
    let _ = calls::option(fd, SOL_SOCKET, SO_PEEK_OFF);
    let _ = calls::set_option(fd, SOL_SOCKET, SO_PEEK_OFF, 2);
    let _ = calls::option(fd, SOL_SOCKET, SO_PEEK_OFF);
    side.sync("ready");
    side.sync("sent");
    for len in [3, 3, 20] {
        let _ = calls::recv(fd, len, MSG_PEEK);
        let _ = calls::option(fd, SOL_SOCKET, SO_PEEK_OFF);
    }
    let _ = calls::recv(fd, 5, 0);
    let _ = calls::option(fd, SOL_SOCKET, SO_PEEK_OFF);
    let _ = calls::recv(fd, 3, MSG_PEEK);
    let _ = calls::set_option(fd, SOL_SOCKET, SO_PEEK_OFF, -1);
    let _ = calls::recv(fd, 3, MSG_PEEK);
    let _ = calls::recv(fd, 100, 0);
    side.sync("done");
}

fn sets_a_peek_offset(side: &Side, fd: Fd) {
    peeks_with_an_offset(side, fd);
}

fn accepts_and_sets_a_peek_offset(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    peeks_with_an_offset(side, fd);
}

/// `SO_INQ` of asm-generic/socket.h.
const SO_INQ: c_int = 84;

fn asks_what_is_left(side: &Side, fd: Fd) {
    let _ = calls::set_option(fd, SOL_SOCKET, SO_INQ, 1);
    side.sync("ready");
    side.sync("sent");
    for len in [3, 20, 100] {
        let _ = calls::recvmsg_with(fd, &[len], [0, 200], 0);
    }
    let _ = calls::set_option(fd, SOL_SOCKET, SO_INQ, 0);
    side.sync("done");
}

fn accepts_and_asks_what_is_left(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    asks_what_is_left(side, fd);
}

fn connects_and_sends(side: &Side) {
    let fd = side.connect();
    sends_thrice(side, fd);
}

fn accepts_and_raises_the_mark(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    calls::set_option(fd, SOL_SOCKET, SO_RCVLOWAT, 20).expect("SO_RCVLOWAT");
    let _ = calls::option(fd, SOL_SOCKET, SO_RCVLOWAT);
    side.sync("ready");
    side.sync("sent");
    let _ = calls::recv(fd, 3, 0);
    let _ = calls::recv(fd, 25, 0);
    let _ = calls::recv(fd, 100, MSG_DONTWAIT);
    let _ = calls::poll(&[(fd, libc::POLLIN)], 0);
    let _ = calls::recv(fd, 100, MSG_DONTWAIT);
    side.sync("done");
}

/// Which process made the other end, both know from the beginning.
fn asks_who_it_is(side: &Side, fd: Fd) {
    side.tell(u64::from(std::process::id()));
    let other = side.told();
    let told = calls::peer_credentials(fd).expect("SO_PEERCRED");
    say!("it is the other side: {}", u64::from(told.process) == other);
    for name in [libc::SO_TYPE, libc::SO_DOMAIN, libc::SO_PROTOCOL, libc::SO_ACCEPTCONN, libc::SO_ERROR] {
        let _ = calls::option(fd, SOL_SOCKET, name);
    }
    side.sync("asked");
    calls::shutdown(fd, libc::SHUT_RDWR).expect("shutdown");
    side.sync("shut down");
    let told = calls::peer_credentials(fd).expect("SO_PEERCRED");
    say!("it is the other side: {}", u64::from(told.process) == other);
}

fn asks_for_names(side: &Side, fd: Fd) {
    for place in ["asked", "closed"] {
        for of_peer in [false, true] {
            let _ = calls::name_of(fd, of_peer);
        }
        let _ = calls::peer_credentials(fd);
        side.sync(place);
    }
    for of_peer in [false, true] {
        let _ = calls::name_of(fd, of_peer);
    }
    look(fd);
}

fn closes_after_a_while(side: &Side, fd: Fd) {
    for of_peer in [false, true] {
        let _ = calls::name_of(fd, of_peer);
    }
    side.sync("asked");
    calls::close(fd).expect("close");
    side.sync("closed");
}

fn asks_for_options_of_others(side: &Side, fd: Fd) {
    let levels =
        [libc::IPPROTO_TCP, libc::IPPROTO_IP, libc::IPPROTO_IPV6, libc::IPPROTO_UDP, libc::SOL_NETLINK];
    for level in levels {
        for name in [
            libc::TCP_NODELAY,
            libc::TCP_CORK,
            libc::TCP_QUICKACK,
            libc::TCP_INFO,
            libc::TCP_INQ,
            libc::TCP_ULP,
        ] {
            let _ = calls::option(fd, level, name);
            let _ = calls::set_option(fd, level, name, 1);
            let _ = calls::set_option(fd, level, name, 0);
        }
    }
    side.sync("done");
}

fn asks_for_options_of_its_own(side: &Side, fd: Fd) {
    let names = [
        libc::SO_KEEPALIVE,
        libc::SO_REUSEADDR,
        libc::SO_REUSEPORT,
        libc::SO_OOBINLINE,
        libc::SO_PRIORITY,
        libc::SO_ZEROCOPY,
        libc::SO_BUSY_POLL,
        libc::SO_RCVLOWAT,
        libc::SO_INCOMING_CPU,
        // What the library does not have on others.
        libc::SO_TIMESTAMP,
    ];
    for name in names {
        let _ = calls::set_option(fd, SOL_SOCKET, name, 1);
        if name != libc::SO_INCOMING_CPU {
            let _ = calls::option(fd, SOL_SOCKET, name);
        }
        let _ = calls::set_option(fd, SOL_SOCKET, name, 0);
    }
    side.sync("done");
}

fn counts_unread(side: &Side, fd: Fd) {
    let _ = calls::unread(fd);
    side.sync("ready");
    side.sync("sent");
    await_unread(fd, 34);
    let _ = calls::unread(fd);
    let _ = calls::recv(fd, 5, 0);
    let _ = calls::unread(fd);
    let _ = calls::recv(fd, 5, MSG_PEEK);
    let _ = calls::unread(fd);
    let _ = calls::recv(fd, 100, 0);
    let _ = calls::unread(fd);
    await_nothing(fd);
    side.sync("done");
}

fn await_nothing(fd: Fd) {
    assert_eq!(calls::poll(&[(fd, libc::POLLIN)], 0), Ok(vec![0]));
}

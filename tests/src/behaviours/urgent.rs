//! Urgent data, which takes an upgraded connection back to the kernel's socket: a read ends before it, what precedes it may have come through
//! the ring, and what follows it is readable.

use libc::{MSG_DONTWAIT, MSG_OOB, MSG_PEEK, MSG_WAITALL};

use super::peers::{echo, request_echoes};
use super::{Behaviour, Tally};
use crate::calls::{self, Fd, Ready};
use crate::side::{ARRIVAL, Side, while_blocked};

pub(super) const ALL: &[Behaviour] = &[
    urgent("behind_unread_bytes", reads_up_to_the_mark, sends_around_urgent),
    urgent("behind_unread_bytes_in_pieces", reads_pieces_up_to_the_mark, sends_around_urgent_twice),
    urgent("behind_unread_bytes_that_are_peeked_at", peeks_up_to_the_mark, sends_around_urgent),
    urgent("behind_a_part_of_what_is_asked_for", asks_for_more, sends_around_urgent_twice),
    urgent("comes_while_a_read_waits_for_more", waits_for_more, sends_urgent_to_who_waits),
    urgent("behind_which_bytes_are_found_by_poll", polls_behind_urgent, sends_behind_urgent),
    urgent("behind_which_bytes_are_found_by_epoll", waits_by_epoll_behind_urgent, sends_behind_urgent),
];

const fn urgent(name: &'static str, left: fn(&Side, Fd), right: fn(&Side, Fd)) -> Behaviour {
    Behaviour::connected(name, left, right).alone(&["oob"]).tally(Tally::Returned(1), Tally::Returned(1))
}

fn sends_around_urgent(side: &Side, fd: Fd) {
    send_around_urgent(side, fd);
    request_echoes(fd, 20, 100);
}

/// Once as long as the other side has read nothing from the kernel's socket, and once it has.
fn sends_around_urgent_twice(side: &Side, fd: Fd) {
    for _ in 0..2 {
        send_around_urgent(side, fd);
    }
    request_echoes(fd, 20, 100);
}

fn send_around_urgent(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"0123456789abcdef", 0), Ok(16));
    send_urgent(side, fd);
}

/// Once the other side waits for it.
fn send_urgent(side: &Side, fd: Fd) {
    side.sync("urgent data now");
    assert_eq!(calls::send(fd, b"!", MSG_OOB), Ok(1));
    assert_eq!(calls::send(fd, b"behind", 0), Ok(6));
    side.sync("sent");
    side.sync("received");
}

/// Waits for the urgent byte, and what is behind it.
fn await_urgent(side: &Side, fd: Fd) {
    side.sync("urgent data now");
    assert_eq!(calls::poll(&[(fd, libc::POLLPRI)], ARRIVAL), Ok(vec![libc::POLLPRI]));
    side.sync("sent");
}

fn expect_mark(fd: Fd, is_there: bool) {
    assert_eq!(calls::at_mark(fd), Ok(is_there));
    assert_eq!(calls::sockatmark(fd), Ok(is_there));
}

/// Takes the urgent byte, and what is behind it.
fn read_from_the_mark(side: &Side, fd: Fd) {
    expect_mark(fd, true);
    assert_eq!(calls::recv(fd, 10, MSG_OOB), Ok(b"!".to_vec()));
    assert_eq!(calls::recv(fd, 6, MSG_WAITALL), Ok(b"behind".to_vec()));
    expect_mark(fd, false);
    side.sync("received");
}

fn reads_up_to_the_mark(side: &Side, fd: Fd) {
    await_urgent(side, fd);
    expect_mark(fd, false);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"0123456789".to_vec()));
    expect_mark(fd, false);
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"abcdef".to_vec()));
    read_from_the_mark(side, fd);
    echo(fd);
}

fn reads_pieces_up_to_the_mark(side: &Side, fd: Fd) {
    for _ in 0..2 {
        await_urgent(side, fd);
        assert_eq!(calls::readv(fd, &[1; 40]), Ok(b"0123456789abcdef".to_vec()));
        read_from_the_mark(side, fd);
    }
    echo(fd);
}

fn peeks_up_to_the_mark(side: &Side, fd: Fd) {
    await_urgent(side, fd);
    for _ in 0..2 {
        assert_eq!(calls::recv(fd, 100, MSG_PEEK), Ok(b"0123456789abcdef".to_vec()));
    }
    assert_eq!(calls::recv(fd, 16, MSG_DONTWAIT), Ok(b"0123456789abcdef".to_vec()));
    // Where none has been read, what is behind it is shown, and it stays.
    assert_eq!(calls::recv(fd, 3, MSG_PEEK), Ok(b"beh".to_vec()));
    read_from_the_mark(side, fd);
    echo(fd);
}

fn asks_for_more(side: &Side, fd: Fd) {
    for _ in 0..2 {
        await_urgent(side, fd);
        assert_eq!(calls::recv(fd, 22, MSG_WAITALL), Ok(b"0123456789abcdef".to_vec()));
        read_from_the_mark(side, fd);
    }
    echo(fd);
}

fn waits_for_more(side: &Side, fd: Fd) {
    for _ in 0..2 {
        let received = while_blocked(|| calls::recv(fd, 22, MSG_WAITALL), || side.sync("waits"));
        assert_eq!(received, Ok(b"before".to_vec()));
        expect_mark(fd, true);
        assert_eq!(calls::recv(fd, 10, MSG_OOB), Ok(b"!".to_vec()));
        side.sync("received");
    }
    echo(fd);
}

fn sends_urgent_to_who_waits(side: &Side, fd: Fd) {
    for _ in 0..2 {
        assert_eq!(calls::send(fd, b"before", 0), Ok(6));
        side.sync("waits");
        assert_eq!(calls::send(fd, b"!", MSG_OOB), Ok(1));
        side.sync("received");
    }
    request_echoes(fd, 20, 100);
}

fn sends_behind_urgent(side: &Side, fd: Fd) {
    for _ in 0..2 {
        send_urgent(side, fd);
    }
    request_echoes(fd, 20, 100);
}

fn polls_behind_urgent(side: &Side, fd: Fd) {
    find_behind_urgent(side, fd, || {
        assert_eq!(calls::poll(&[(fd, libc::POLLIN)], ARRIVAL), Ok(vec![libc::POLLIN]));
    });
}

fn waits_by_epoll_behind_urgent(side: &Side, fd: Fd) {
    let both = libc::EPOLLIN | libc::EPOLLOUT;
    let sets = [libc::EPOLLIN, both].map(|events| {
        let set = calls::epoll_create().expect("epoll_create1");
        calls::epoll_add(set, fd, events, 1).expect("EPOLL_CTL_ADD");
        (set, events as u32)
    });
    find_behind_urgent(side, fd, || {
        for (set, events) in sets {
            assert_eq!(calls::epoll_wait(set, 4, ARRIVAL), Ok(vec![Ready { events, data: 1 }]));
        }
    });
    for (set, _) in sets {
        calls::close(set).expect("close");
    }
}

/// `find` waits for bytes to read. They stay readable until they are read.
fn find_behind_urgent(side: &Side, fd: Fd, find: impl Fn()) {
    for _ in 0..2 {
        await_urgent(side, fd);
        find();
        find();
        read_from_the_mark(side, fd);
    }
    echo(fd);
}

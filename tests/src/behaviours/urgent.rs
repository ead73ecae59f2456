//! Urgent data, which takes an upgraded connection back to the kernel's socket: what follows it is readable.

use libc::{MSG_OOB, MSG_WAITALL};

use super::peers::{echo, request_echoes};
use super::{Behaviour, Tally};
use crate::calls::{self, Fd, Ready};
use crate::side::{ARRIVAL, Side};

pub(super) const ALL: &[Behaviour] = &[
    urgent("behind_which_bytes_are_found_by_poll", polls_behind_urgent, sends_behind_urgent),
    urgent("behind_which_bytes_are_found_by_epoll", waits_by_epoll_behind_urgent, sends_behind_urgent),
];

const fn urgent(name: &'static str, left: fn(&Side, Fd), right: fn(&Side, Fd)) -> Behaviour {
    Behaviour::connected(name, left, right).alone(&["oob"]).tally(Tally::Returned(1), Tally::Returned(1))
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

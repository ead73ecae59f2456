//! epoll and the numbers of descriptors: those that another connection gets, or the same again.

use libc::EPOLLIN;

use super::peers::{demand, sends_on_demand, stop};
use super::{Behaviour, Tally};
use crate::calls::{self, Errno, Fd};
use crate::side::Side;

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::whole("used_again", number_used_again, sends_on_two, Tally::Upgraded(2)),
    Behaviour::connected("come_back", number_comes_back, sends_on_demand),
    Behaviour::connected("come_back_to_a_polled_set", comes_back_polled, sends_on_demand),
];

/// A registration whose number has been closed, and whose connection has another, is none of the connection that gets the number.
fn number_used_again(side: &Side) {
    let listener = side.listen();
    let first = side.accept(listener);
    side.answer_warm_up(first);
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, first, EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    let copy = calls::dup(first).expect("dup");
    calls::close(first).expect("close");
    let second = side.accept(listener);
    side.answer_warm_up(second);
    assert_eq!(second, first);
    assert_eq!(calls::epoll_modify(epfd, second, EPOLLIN, 2), Err(Errno::ENOENT));
    assert_eq!(calls::epoll_delete(epfd, second), Err(Errno::ENOENT));
    let is_told = |fd, data| {
        side.sync("send now");
        let ready = calls::epoll_wait(epfd, 8, -1).expect("epoll_wait");
        assert_eq!(ready.iter().map(|ready| ready.data).collect::<Vec<_>>(), [data]);
        assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    };
    for _ in 0..3 {
        calls::epoll_add(epfd, second, EPOLLIN, 2).expect("EPOLL_CTL_ADD");
        is_told(copy, 1);
        is_told(second, 2);
        calls::epoll_delete(epfd, second).expect("EPOLL_CTL_DEL");
    }
    // It has its number again.
    assert_eq!(calls::dup2(copy, second), Ok(first));
    is_told(copy, 1);
    calls::epoll_modify(epfd, first, EPOLLIN, 3).expect("EPOLL_CTL_MOD");
    is_told(copy, 3);
    side.sync("done");
}

/// A connection is known by another number, and by the first again, in between two calls on the set: what is then deleted is.
fn number_comes_back(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, EPOLLIN | libc::EPOLLRDHUP, 1).expect("EPOLL_CTL_ADD");
    assert_eq!(calls::epoll_wait(epfd, 4, 10), Ok(vec![]));
    let copy = renumbered(fd);
    calls::epoll_delete(epfd, fd).expect("EPOLL_CTL_DEL");
    demand(side);
    assert_eq!(calls::epoll_wait(epfd, 4, 100), Ok(vec![]));
    assert_eq!(calls::recv(copy, 10, 0), Ok(b"data".to_vec()));
    stop(side);
    let _ = calls::recv(copy, 10, 0);
    assert_eq!(calls::epoll_wait(epfd, 4, 100), Ok(vec![]));
}

/// The same of a set that has been polled.
fn comes_back_polled(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    assert_eq!(calls::poll(&[(epfd, libc::POLLIN)], 0), Ok(vec![0]));
    let once = EPOLLIN | libc::EPOLLONESHOT;
    calls::epoll_add(epfd, fd, once, 1).expect("EPOLL_CTL_ADD");
    let is_told = |data| {
        demand(side);
        let ready = calls::epoll_wait(epfd, 4, -1).expect("epoll_wait");
        assert_eq!(ready.iter().map(|ready| ready.data).collect::<Vec<_>>(), [data]);
        assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    };
    is_told(1);
    renumbered(fd);
    calls::epoll_modify(epfd, fd, once, 2).expect("EPOLL_CTL_MOD");
    is_told(2);
    stop(side);
}

/// Closes it while there is a copy, which then takes its number. The copy.
fn renumbered(fd: Fd) -> Fd {
    let copy = calls::dup(fd).expect("dup");
    calls::close(fd).expect("close");
    assert_eq!(calls::dup2(copy, fd), Ok(fd));
    copy
}

fn sends_on_two(side: &Side) {
    let destination = side.destination();
    let fds = [(); 2].map(|()| {
        let fd = side.connect_to(destination);
        side.warm_up(fd);
        fd
    });
    for at in [0, 1, 0, 1, 0, 1, 0, 0] {
        side.sync("send now");
        assert_eq!(calls::send(fds[at], b"data", 0), Ok(4));
    }
    side.sync("done");
}

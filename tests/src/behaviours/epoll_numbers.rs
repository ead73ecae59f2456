//! epoll, the numbers of descriptors and the names of registrations: those that another connection gets, or the same again.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

use libc::{EPOLLIN, EPOLLONESHOT, SO_RCVLOWAT, SOL_SOCKET};

use super::peers::{demand, sends_on_demand, stop};
use super::{Behaviour, Tally};
use crate::calls::{self, Errno, Fd, quietly};
use crate::say;
use crate::side::{Side, receive_exactly};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::whole("used_again", number_used_again, sends_on_two, Tally::Upgraded(2)),
    Behaviour::connected("come_back", number_comes_back, sends_on_demand),
    Behaviour::connected("come_back_to_a_polled_set", comes_back_polled, sends_on_demand),
    Behaviour::whole(
        "names_of_one_shots_used_again",
        serves_by_names,
        many_short_lived_clients,
        Tally::AtLeast(CLIENTS * VISITS / 4, CLIENTS * VISITS),
    ),
    Behaviour::whole(
        "names_of_one_shots_used_again_on_tcp",
        serves_by_names,
        some_of_many_on_tcp,
        Tally::Total(CLIENTS * VISITS),
    )
    .alone(&["rcvlowat"]),
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

/// Clients at a time, and connections that each of them makes, one after the other.
const CLIENTS: u64 = 4;
const VISITS: u64 = 150;
/// Threads that serve whatever is reported.
const WORKERS: usize = 6;
/// Names of connections; the one that was given back last is used again first, as memory is.
const NAMES: usize = 16;

/// Nobody but the thread that was told of a one-shot connection touches it, until that asks for more or has closed it.
fn serves_by_names(side: &Side) {
    let listener = side.listen();
    let set = calls::epoll_create().expect("epoll_create1");
    let free = Mutex::new((0..NAMES).collect::<Vec<_>>());
    let fds = [const { AtomicI32::new(-1) }; NAMES];
    let busy = [const { AtomicBool::new(false) }; NAMES];
    let left = AtomicUsize::new((CLIENTS * VISITS) as usize);
    let serve = |name: usize| {
        assert!(!busy[name].swap(true, Ordering::SeqCst), "two threads are told of one connection");
        let fd = fds[name].load(Ordering::SeqCst);
        match calls::recv(fd, 64, libc::MSG_DONTWAIT) {
            Ok(data) if data.is_empty() => {
                calls::close(fd).expect("close");
                busy[name].store(false, Ordering::SeqCst);
                free.lock().expect("a lock").push(name);
                left.fetch_sub(1, Ordering::SeqCst);
                return;
            }
            Ok(data) => assert_eq!(calls::send(fd, &data, 0), Ok(data.len())),
            Err(error) => assert_eq!(error, Errno::EAGAIN),
        }
        busy[name].store(false, Ordering::SeqCst);
        calls::epoll_modify(set, fd, EPOLLIN | EPOLLONESHOT, name as u64).expect("EPOLL_CTL_MOD");
    };
    let work = || {
        quietly(|| {
            while left.load(Ordering::SeqCst) > 0 {
                for ready in calls::epoll_wait(set, 1, 50).expect("epoll_wait") {
                    serve(ready.data as usize);
                }
            }
        });
    };
    std::thread::scope(|scope| {
        (0..WORKERS).for_each(|_| drop(scope.spawn(work)));
        quietly(|| {
            for _ in 0..CLIENTS * VISITS {
                let fd = side.accept(listener);
                let name = free.lock().expect("a lock").pop().expect("there are more names than clients");
                fds[name].store(fd, Ordering::SeqCst);
                calls::epoll_add(set, fd, EPOLLIN | EPOLLONESHOT, name as u64).expect("EPOLL_CTL_ADD");
            }
        });
    });
    say!("all served");
}

fn many_short_lived_clients(side: &Side) {
    visit_often(side, false);
}

fn some_of_many_on_tcp(side: &Side) {
    visit_often(side, true);
}

/// Connections of many clients, one after the other; every other one stays on TCP, if `some_stay`.
fn visit_often(side: &Side, some_stay: bool) {
    let destination = side.destination();
    let visits = |client: u64| {
        quietly(|| {
            for visit in 0..VISITS {
                let fd = side.connect_to(destination);
                if some_stay && visit % 2 == 0 {
                    for threshold in [2, 1] {
                        calls::set_option(fd, SOL_SOCKET, SO_RCVLOWAT, threshold).expect("SO_RCVLOWAT");
                    }
                }
                for round in 0..5 + (visit * 7 + client * 11) % 40 {
                    let message = vec![b'a' + (round % 26) as u8; 1 + (round * 13 % 60) as usize];
                    assert_eq!(calls::send(fd, &message, 0), Ok(message.len()));
                    assert_eq!(receive_exactly(fd, message.len()), message);
                }
                calls::close(fd).expect("close");
            }
        });
    };
    std::thread::scope(|scope| (0..CLIENTS).for_each(|client| drop(scope.spawn(move || visits(client)))));
    say!("all visited");
}

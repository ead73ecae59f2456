//! Registrations of connections that have done little yet: the library leaves them to the kernel until they have done more.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;

use libc::{EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLOUT, SOCK_NONBLOCK};

use super::peers::{request_echoes, send_all};
use super::{Behaviour, Tally};
use crate::calls::{self, Errno, Fd, quietly};
use crate::side::{Side, receive_exactly, while_blocked};

/// Connections, one after the other.
const SHORT_LIVED: u64 = 300;
/// Reads by another thread, of which most find nothing: meanwhile the connection leaves TCP.
const TRIES: usize = 100;
/// Exchanges after which both sides have left TCP.
const ROUNDS: usize = 40;
const ENVIRONMENT: &[(&str, &str)] = &[("THALLUS_UPGRADE_AFTER", "8")];

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::whole("changed_before_the_first_byte", changes, talks, Tally::Upgraded(1))
        .environment(ENVIRONMENT),
    Behaviour::whole("changed_at_each_byte", changes_always, talks, Tally::Upgraded(1))
        .environment(ENVIRONMENT),
    Behaviour::whole("in_two_sets", in_two_sets, talks, Tally::Upgraded(1)).environment(ENVIRONMENT),
    Behaviour::whole(
        "in_two_sets_at_once",
        adds_to_two_sets_at_once,
        many_talk,
        Tally::Upgraded(SHORT_LIVED / 3),
    )
    .environment(ENVIRONMENT),
    Behaviour::whole("by_two_numbers", by_two_numbers, talks, Tally::Upgraded(1)).environment(ENVIRONMENT),
    // Between hosts a client is ready with the first answer, unless its server has closed by then.
    Behaviour::whole("the_number_is_used_again", reuses, talks_again, Tally::Mixed(1, &[("short", 3)]))
        .over_verbs(Tally::AtLeast(1, 4), Tally::AtLeast(1, 4))
        .environment(ENVIRONMENT),
    Behaviour::whole(
        "added_while_another_thread_reads",
        adds_while_another_reads,
        short_lived_clients,
        Tally::AtLeast(1, SHORT_LIVED),
    )
    .environment(ENVIRONMENT),
];

fn accept(side: &Side) -> (Fd, Fd) {
    let listener = side.listen();
    let fd = side.accept(listener);
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    (listener, fd)
}

/// Waits for the next exchange in `epfd`, where it has `data`, and echoes it.
fn exchange(side: &Side, epfd: Fd, fd: Fd, data: u64) {
    let ready = while_blocked(|| calls::epoll_wait(epfd, 8, -1), || side.sync("send now"));
    let ready: Vec<u64> = ready.expect("epoll_wait").iter().map(|ready| ready.data).collect();
    assert_eq!(ready, [data]);
    let bytes = calls::recv(fd, 100, 0).expect("recv");
    assert_eq!(calls::recv(fd, 100, 0), Err(Errno::EAGAIN));
    assert_eq!(calls::send(fd, &bytes, 0), Ok(4));
    assert_eq!(calls::epoll_wait(epfd, 8, 0), Ok(vec![]));
}

fn talk(side: &Side, fd: Fd, rounds: usize) {
    for _ in 0..rounds {
        side.sync("send now");
        assert_eq!(calls::send(fd, b"talk", 0), Ok(4));
        assert_eq!(receive_exactly(fd, 4), b"talk");
    }
}

fn talks(side: &Side) {
    let fd = side.connect();
    talk(side, fd, ROUNDS);
    side.sync("done");
}

/// Everything that `epoll_ctl` does, also what it refuses; then the connection leaves TCP.
fn changes(side: &Side) {
    let (_, fd) = accept(side);
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, EPOLLIN | EPOLLOUT, 1).expect("EPOLL_CTL_ADD");
    let now = || calls::epoll_wait(epfd, 8, 0).expect("epoll_wait").len();
    assert_eq!(now(), 1);
    assert_eq!(calls::epoll_add(epfd, fd, EPOLLIN, 2), Err(Errno::EEXIST));
    calls::epoll_modify(epfd, fd, EPOLLIN, 2).expect("EPOLL_CTL_MOD");
    assert_eq!(now(), 0);
    calls::epoll_delete(epfd, fd).expect("EPOLL_CTL_DEL");
    assert_eq!(calls::epoll_delete(epfd, fd), Err(Errno::ENOENT));
    assert_eq!(calls::epoll_modify(epfd, fd, EPOLLIN, 2), Err(Errno::ENOENT));
    calls::epoll_add(epfd, fd, EPOLLOUT | EPOLLONESHOT, 3).expect("EPOLL_CTL_ADD");
    assert_eq!((now(), now()), (1, 0));
    calls::epoll_modify(epfd, fd, EPOLLIN | EPOLLET, 4).expect("EPOLL_CTL_MOD");
    for _ in 0..ROUNDS {
        exchange(side, epfd, fd, 4);
    }
    side.sync("done");
}

fn changes_always(side: &Side) {
    let (_, fd) = accept(side);
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, EPOLLIN, 0).expect("EPOLL_CTL_ADD");
    for round in 1..=ROUNDS as u64 {
        if round % 3 == 0 {
            calls::epoll_delete(epfd, fd).expect("EPOLL_CTL_DEL");
            calls::epoll_add(epfd, fd, EPOLLIN, round).expect("EPOLL_CTL_ADD");
        } else {
            calls::epoll_modify(epfd, fd, EPOLLIN, round).expect("EPOLL_CTL_MOD");
        }
        exchange(side, epfd, fd, round);
    }
    side.sync("done");
}

fn in_two_sets(side: &Side) {
    let (_, fd) = accept(side);
    let [first, second] = [1, 2].map(|data| {
        let epfd = calls::epoll_create().expect("epoll_create1");
        calls::epoll_add(epfd, fd, EPOLLIN, data).expect("EPOLL_CTL_ADD");
        epfd
    });
    for round in 0..ROUNDS {
        let [sleeps_in, looks_in] = if round % 2 == 0 { [first, second] } else { [second, first] };
        let ready = while_blocked(|| calls::epoll_wait(sleeps_in, 8, -1), || side.sync("send now"));
        assert_eq!(ready.map(|ready| ready.len()), Ok(1));
        assert_eq!(calls::epoll_wait(looks_in, 8, 0).map(|ready| ready.len()), Ok(1));
        let bytes = calls::recv(fd, 100, 0).expect("recv");
        assert_eq!(calls::epoll_wait(looks_in, 8, 0), Ok(vec![]));
        assert_eq!(calls::send(fd, &bytes, 0), Ok(4));
    }
    side.sync("done");
}

/// Two threads add a connection that has done nothing to a set each, at the same moment. Each set is told of all that comes.
fn adds_to_two_sets_at_once(side: &Side) {
    let listener = side.listen();
    let sets = [(); 2].map(|()| calls::epoll_create().expect("epoll_create1"));
    let next = AtomicI32::new(-1);
    let added = AtomicU64::new(0);
    let add = |epfd: Fd| {
        let mut last = -1;
        quietly(|| {
            for data in 0..SHORT_LIVED / 3 {
                while next.load(Ordering::SeqCst) == last {
                    std::hint::spin_loop();
                }
                last = next.load(Ordering::SeqCst);
                calls::epoll_add(epfd, last >> 1, EPOLLIN, data).expect("EPOLL_CTL_ADD");
                added.fetch_add(1, Ordering::SeqCst);
            }
        });
    };
    std::thread::scope(|scope| {
        for epfd in sets {
            let add = &add;
            scope.spawn(move || add(epfd));
        }
        quietly(|| {
            for data in 0..SHORT_LIVED / 3 {
                let fd = calls::accept4(listener, SOCK_NONBLOCK).expect("accept4");
                // The number may be the last one's.
                next.store(fd << 1 | (data % 2) as i32, Ordering::SeqCst);
                while added.load(Ordering::SeqCst) < 2 * (data + 1) {
                    std::thread::yield_now();
                }
                for _ in 0..ROUNDS {
                    for epfd in sets {
                        let ready = calls::epoll_wait(epfd, 8, -1).expect("epoll_wait");
                        assert_eq!(ready.iter().map(|ready| ready.data).collect::<Vec<_>>(), [data]);
                    }
                    assert!(echo_once(fd));
                }
                calls::close(fd).expect("close");
            }
        });
    });
    side.sync("done");
}

fn many_talk(side: &Side) {
    let destination = side.destination();
    quietly(|| {
        for _ in 0..SHORT_LIVED / 3 {
            let fd = side.connect_to(destination);
            for _ in 0..ROUNDS {
                send_all(fd, b"talk");
                assert_eq!(receive_exactly(fd, 4), b"talk");
            }
            calls::close(fd).expect("close");
        }
    });
    side.sync("done");
}

fn by_two_numbers(side: &Side) {
    let (_, fd) = accept(side);
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    let copy = calls::dup(fd).expect("dup");
    for round in 0..ROUNDS {
        exchange(side, epfd, if round % 2 == 0 { fd } else { copy }, 1);
    }
    side.sync("done");
}

/// The registration of a connection that is closed young says nothing of the next one with its number.
fn reuses(side: &Side) {
    let listener = side.listen();
    let [old, epfd] = [(); 2].map(|()| calls::epoll_create().expect("epoll_create1"));
    for (set, data) in [(old, 1), (old, 2), (epfd, 3)] {
        let fd = side.accept(listener);
        calls::epoll_add(set, fd, EPOLLIN, data).expect("EPOLL_CTL_ADD");
        side.sync("send now");
        assert_eq!(receive_exactly(fd, 4), b"talk");
        assert_eq!(calls::send(fd, b"talk", 0), Ok(4));
        calls::close(fd).expect("close");
    }
    let fd = side.accept(listener);
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    calls::epoll_add(epfd, fd, EPOLLIN, 4).expect("EPOLL_CTL_ADD");
    for _ in 0..ROUNDS {
        exchange(side, epfd, fd, 4);
        assert_eq!(calls::epoll_wait(old, 8, 0), Ok(vec![]));
    }
    side.sync("done");
}

fn talks_again(side: &Side) {
    let destination = side.destination();
    for _ in 0..3 {
        let fd = side.connect_to(destination);
        talk(side, fd, 1);
        assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
        calls::close(fd).expect("close");
    }
    let fd = side.connect_to(destination);
    talk(side, fd, ROUNDS);
    side.sync("done");
}

/// One thread adds a connection to its set, and waits there, while another uses it.
fn adds_while_another_reads(side: &Side) {
    let listener = side.listen();
    let epfd = calls::epoll_create().expect("epoll_create1");
    let (reader, given) = sync_channel::<Fd>(0);
    let (finished, done) = sync_channel::<()>(0);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            quietly(|| {
                for fd in given {
                    for _ in 0..TRIES {
                        echo_once(fd);
                    }
                    finished.send(()).expect("the loop is there");
                }
            });
        });
        quietly(|| {
            for data in 0..SHORT_LIVED {
                let fd = calls::accept4(listener, SOCK_NONBLOCK).expect("accept4");
                reader.send(fd).expect("the reader is there");
                calls::epoll_add(epfd, fd, EPOLLIN, data).expect("EPOLL_CTL_ADD");
                loop {
                    let ready = calls::epoll_wait(epfd, 8, -1).expect("epoll_wait");
                    assert_eq!(ready.iter().map(|ready| ready.data).collect::<Vec<_>>(), [data]);
                    if !echo_once(fd) {
                        break;
                    }
                }
                done.recv().expect("the reader is there");
                calls::close(fd).expect("close");
            }
        });
        drop(reader);
    });
    side.sync("done");
}

/// Echoes what is there. False at the end of the stream.
fn echo_once(fd: Fd) -> bool {
    match calls::recv(fd, 100, 0) {
        Ok(bytes) => {
            send_all(fd, &bytes);
            !bytes.is_empty()
        }
        Err(errno) => {
            assert_eq!(errno, Errno::EAGAIN);
            true
        }
    }
}

fn short_lived_clients(side: &Side) {
    let destination = side.destination();
    quietly(|| {
        for _ in 0..SHORT_LIVED {
            let fd = side.connect_to(destination);
            request_echoes(fd, 20, 8);
            calls::close(fd).expect("close");
        }
    });
    side.sync("done");
}

//! Programs that wait by system calls of their own, and read and write by libc's: bytes in memory would not wake them.

use libc::{EPOLLIN, EPOLLONESHOT, POLLIN, POLLOUT, SOCK_NONBLOCK};

use super::peers::{echo, request_echoes, send_all};
use super::{Behaviour, Tally};
use crate::calls::{self, Errno, Fd, quietly};
use crate::say;
use crate::side::{Side, pause};

const UNSEEN: Tally = Tally::Mixed(0, &[("unseen-wait", 1)]);
const UNANSWERED: Tally = Tally::Mixed(0, &[("no-answer", 1)]);
const UNASKED: Tally = Tally::Mixed(0, &[("peer-without-thallus", 1)]);

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::whole("server_in_epoll", |side| serves(side, Waiting::Epoll), asks, UNSEEN)
        .tally(UNSEEN, UNANSWERED),
    Behaviour::whole("server_in_poll", |side| serves(side, Waiting::Poll), asks, UNSEEN)
        .tally(UNSEEN, UNANSWERED),
    Behaviour::whole("client_in_epoll", echoes, |side| asks_by(side, Waiting::Epoll), UNSEEN)
        .tally(UNASKED, UNSEEN),
    Behaviour::whole("client_in_poll", echoes, |side| asks_by(side, Waiting::Poll), UNSEEN)
        .tally(UNASKED, UNSEEN),
    // Can't be told from those.
    Behaviour::whole("server_does_not_wait", |side| serves(side, Waiting::No), asks, UNSEEN)
        .tally(UNSEEN, UNANSWERED),
    Behaviour::whole("server_tries_often_first", |side| serves(side, Waiting::LatePoll), asks_late, UNSEEN)
        .tally(UNSEEN, UNANSWERED),
    // A wait for the connect tells nothing of those that follow.
    Behaviour::whole("client_connects_by_poll", echoes, connects_by_poll, UNSEEN).tally(UNASKED, UNSEEN),
    // Seen, although in an unusual way.
    Behaviour::whole("server_polls_at_first", serves_at_first_by_poll, asks, Tally::Upgraded(1))
        .environment(&[("THALLUS_UPGRADE_AFTER", "8")]),
    Behaviour::whole(
        "server_in_epoll_by_syscall",
        |side| serves(side, Waiting::EpollBySyscall),
        asks,
        Tally::Upgraded(1),
    ),
    Behaviour::whole(
        "server_registers_for_each_wait",
        |side| serves(side, Waiting::Registering),
        asks,
        Tally::Upgraded(1),
    ),
    Behaviour::whole(
        "server_asks_once_each",
        |side| serves(side, Waiting::OneShot),
        asks,
        Tally::Upgraded(1),
    ),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiting {
    /// `epoll_ctl` by libc, `epoll_wait` by a system call that no hook sees: as Bun does.
    Epoll,
    /// Without an epoll set that libc knows of: as Rust's async-io, whose set no hook sees at all.
    Poll,
    /// The same, after having tried in vain: as a task of smol's does for each turn of another.
    LatePoll,
    /// It tries again and again.
    No,
    /// `epoll_pwait2` by `syscall()`.
    EpollBySyscall,
    /// In the set only while it waits.
    Registering,
    /// Registered anew for each event.
    OneShot,
}

/// A connection that does not block, and how to wait until it is readable.
struct Waiter {
    waiting: Waiting,
    epfd: Fd,
    fd: Fd,
}

impl Waiter {
    fn new(waiting: Waiting, fd: Fd) -> Self {
        let epfd = calls::epoll_create().expect("epoll_create1");
        match waiting {
            Waiting::Epoll | Waiting::EpollBySyscall => {
                calls::epoll_add(epfd, fd, EPOLLIN, 1).expect("EPOLL_CTL_ADD");
            }
            Waiting::OneShot => {
                calls::epoll_add(epfd, fd, EPOLLIN | EPOLLONESHOT, 1).expect("EPOLL_CTL_ADD");
            }
            Waiting::Poll | Waiting::LatePoll | Waiting::Registering | Waiting::No => {}
        }
        Self { waiting, epfd, fd }
    }

    fn wait(&self) {
        let ready = match self.waiting {
            Waiting::Epoll => calls::unseen_epoll_wait(self.epfd),
            Waiting::Poll | Waiting::LatePoll => calls::unseen_poll(self.fd, POLLIN),
            Waiting::No => {
                std::thread::yield_now();
                Ok(1)
            }
            Waiting::EpollBySyscall => calls::epoll_pwait_by_syscall(self.epfd, 4).map(|ready| ready.len()),
            Waiting::Registering => {
                calls::epoll_add(self.epfd, self.fd, EPOLLIN, 1).expect("EPOLL_CTL_ADD");
                let ready = calls::epoll_wait(self.epfd, 4, -1).map(|ready| ready.len());
                calls::epoll_delete(self.epfd, self.fd).expect("EPOLL_CTL_DEL");
                ready
            }
            Waiting::OneShot => {
                let ready = calls::epoll_wait(self.epfd, 4, -1).map(|ready| ready.len());
                calls::epoll_modify(self.epfd, self.fd, EPOLLIN | EPOLLONESHOT, 1).expect("EPOLL_CTL_MOD");
                ready
            }
        };
        assert_eq!(ready, Ok(1));
    }

    /// What has come, once something has; nothing at the end of the stream.
    fn receive(&self) -> Vec<u8> {
        loop {
            match calls::recv(self.fd, 65536, libc::MSG_DONTWAIT) {
                Err(Errno::EAGAIN) => self.wait(),
                other => return other.expect("recv"),
            }
        }
    }
}

fn serves(side: &Side, waiting: Waiting) {
    let listener = side.listen();
    let fd = calls::accept4(listener, SOCK_NONBLOCK).expect("accept4");
    if waiting == Waiting::LatePoll {
        for _ in 0..2_000 {
            assert_eq!(quietly(|| calls::recv(fd, 1, 0)), Err(Errno::EAGAIN));
        }
        side.sync("tried");
    }
    let total = quietly(|| {
        let waiter = Waiter::new(waiting, fd);
        if matches!(waiting, Waiting::EpollBySyscall | Waiting::Registering | Waiting::OneShot) {
            // On one processor it might find each request there, and never wait.
            waiter.wait();
        }
        let mut total = 0;
        loop {
            let data = waiter.receive();
            if data.is_empty() {
                return total;
            }
            total += data.len();
            send_all(fd, &data);
        }
    });
    say!("echoed {total} bytes");
}

fn echoes(side: &Side) {
    let fd = side.accept(side.listen());
    say!("echoed {} bytes", echo(fd));
}

fn asks(side: &Side) {
    let fd = side.connect();
    request_echoes(fd, 60, 3000);
    say!("60 echoes");
}

fn asks_late(side: &Side) {
    let fd = side.connect();
    side.sync("tried");
    request_echoes(fd, 60, 3000);
    say!("60 echoes");
}

/// As its first calls, while it could as well be a connection of one request.
fn serves_at_first_by_poll(side: &Side) {
    let listener = side.listen();
    let fd = calls::accept4(listener, SOCK_NONBLOCK).expect("accept4");
    let total = quietly(|| {
        assert_eq!(calls::poll(&[(fd, POLLIN)], -1), Ok(vec![POLLIN]));
        let mut total = 0;
        loop {
            match calls::recv(fd, 65536, 0) {
                Err(Errno::EAGAIN) => pause(),
                other => {
                    let data = other.expect("recv");
                    if data.is_empty() {
                        return total;
                    }
                    total += data.len();
                    send_all(fd, &data);
                }
            }
        }
    });
    say!("echoed {total} bytes");
}

/// As Rust's std does it for a connect with a time limit.
fn connects_by_poll(side: &Side) {
    let destination = side.destination();
    let fd = calls::stream_socket(side.family, SOCK_NONBLOCK).expect("socket");
    quietly(|| {
        assert!(matches!(calls::connect(fd, destination), Ok(_) | Err(Errno::EINPROGRESS)));
        assert_eq!(calls::poll(&[(fd, POLLOUT)], -1), Ok(vec![POLLOUT]));
    });
    requests(fd, Waiting::Poll);
}

fn asks_by(side: &Side, waiting: Waiting) {
    let fd = side.connect();
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    requests(fd, waiting);
}

fn requests(fd: Fd, waiting: Waiting) {
    quietly(|| {
        let waiter = Waiter::new(waiting, fd);
        for round in 0..60usize {
            let request = crate::side::Pattern::new(round as u64).take(1 + round * 7919 % 3000);
            send_all(fd, &request);
            let mut answer = Vec::new();
            while answer.len() < request.len() {
                let data = waiter.receive();
                assert!(!data.is_empty(), "the end after {} bytes", answer.len());
                answer.extend(data);
            }
            assert_eq!(answer, request, "echo {round}");
        }
    });
    say!("60 echoes");
}

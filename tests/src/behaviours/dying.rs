//! Processes that are killed while they send: what the peer has read is all that they had sent, or it is told of a reset. Never
//! an ordinary end of a stream that was cut short.

use super::{Behaviour, Tally};
use crate::calls::{self, End, Errno, Family, Fd, Leave, SharedCount, fork, quietly};
use crate::say;
use crate::side::{ARRIVAL, Pattern, Side, await_end_of, has_ended, receive_exactly, while_blocked};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::whole(
        "servers_in_mid_stream",
        accepted_by_victims,
        reads_of_servers,
        Tally::Upgraded(VICTIMS),
    )
    .tally(Tally::Unknown, Tally::Upgraded(VICTIMS))
    .alone(ALONE),
    Behaviour::whole(
        "clients_in_mid_stream",
        reads_of_clients,
        connected_by_victims,
        Tally::Upgraded(VICTIMS),
    )
    .tally(Tally::Upgraded(VICTIMS), Tally::Unknown)
    .alone(ALONE),
    Behaviour::whole(
        "while_it_sends_again",
        reads_of_clients_after_their_end,
        dies_while_it_sends_again,
        Tally::Unknown,
    )
    .tally(Tally::Returned(AGAIN), Tally::Unknown)
    .between_hosts(),
    Behaviour::connected("asleep_while_the_peer_is_busy", is_busy, dies_asleep)
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .end(End::Exit(0), End::Signal(libc::SIGKILL)),
    Behaviour::connected("asleep_in_a_set_while_the_peer_is_busy", is_busy, dies_asleep_in_a_set)
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .end(End::Exit(0), End::Signal(libc::SIGKILL)),
];

const VICTIMS: u64 = 12;
const ALONE: &[&str] = &["shared-before-upgrade", "unseen-bytes"];
const PATTERN: u64 = 51;
/// Bytes of a send, in turn.
const PIECES: [usize; 4] = [10, 700, 5000, 65536];
/// Bytes that a victim has sent, at least, when it is killed.
const SENT: [u64; 6] = [1, 3000, 50_000, 200_000, 1 << 20, 3 << 20];

/// Victims that have more to send again than TCP has room for.
const AGAIN: u64 = 3;
/// Bytes that they send, and that a ring holds.
const UNREAD: u64 = 1 << 20;
/// Bytes of a socket's buffer: far less.
const BUFFER: libc::c_int = 16 << 10;
/// Looks in a row that find a process asleep that does not wake any more.
const ASLEEP: u32 = 100;

/// The victims of one side, each of which makes its connection itself.
fn kill_in_mid_stream(side: &Side, connection: impl Fn() -> Fd) {
    for victim in 0..VICTIMS as usize {
        let sent = SharedCount::new();
        let piece = PIECES[victim % PIECES.len()];
        let child = fork(Leave::Exit, || {
            quietly(|| {
                let fd = connection();
                let mut pattern = Pattern::new(PATTERN);
                loop {
                    let data = pattern.take(piece);
                    let count = calls::send(fd, &data, libc::MSG_NOSIGNAL).expect("send");
                    pattern.put_back(data.len() - count);
                    sent.set(pattern.position());
                }
            });
        });
        let least = SENT[victim / 2 % SENT.len()].min(piece as u64 * 200);
        while sent.get() < least {
            assert!(!has_ended(child.0), "victim {victim} has ended by itself, after {} bytes", sent.get());
            std::thread::yield_now();
        }
        quietly(|| calls::kill(child.0, libc::SIGKILL)).expect("kill");
        assert_eq!(quietly(|| child.wait()), End::Signal(libc::SIGKILL));
        side.tell(sent.get());
    }
    say!("{VICTIMS} victims");
    side.sync("done");
}

/// How a reader waits.
#[derive(Clone, Copy, Debug)]
enum Reader {
    Blocks,
    Polls,
    Loops,
}

/// Reads until there is nothing more to come: how many bytes, and how the stream ended.
fn read_until_the_end(fd: Fd, reader: Reader) -> (u64, Result<(), Errno>) {
    let set = calls::epoll_create().expect("epoll_create");
    calls::epoll_add(set, fd, libc::EPOLLIN | libc::EPOLLRDHUP, 0).expect("epoll_ctl");
    let mut pattern = Pattern::new(PATTERN);
    let end = loop {
        let flags = match reader {
            Reader::Blocks => 0,
            Reader::Polls => {
                let ready = calls::poll(&[(fd, libc::POLLIN)], ARRIVAL).expect("poll");
                assert_ne!(ready[0], 0, "nothing comes");
                libc::MSG_DONTWAIT
            }
            Reader::Loops => {
                assert!(!calls::epoll_wait(set, 1, ARRIVAL).expect("epoll_wait").is_empty(), "nothing comes");
                libc::MSG_DONTWAIT
            }
        };
        match calls::recv(fd, 50_000, flags) {
            Ok(data) if data.is_empty() => break Ok(()),
            Ok(data) => pattern.expect(&data),
            Err(Errno::EAGAIN) => {}
            Err(error) => break Err(error),
        }
    };
    calls::close(set).expect("close");
    (pattern.position(), end)
}

/// The other side of [`kill_in_mid_stream`].
fn read_what_they_sent(side: &Side, connection: impl Fn() -> Fd) {
    for victim in 0..VICTIMS as usize {
        let reader = [Reader::Blocks, Reader::Polls, Reader::Loops][victim % 3];
        quietly(|| {
            let fd = connection();
            let unread = victim % 2 == 1;
            if unread {
                let sent = calls::send(fd, b"never read", libc::MSG_NOSIGNAL);
                // Over `AF_UNIX` a victim that is dead already takes nothing.
                let is_dead = side.family == Family::Unix && sent == Err(Errno::EPIPE);
                assert!(sent == Ok(10) || is_dead, "victim {victim}: send {sent:?}");
            }
            let (total, end) = read_until_the_end(fd, reader);
            let sent = side.told();
            match end {
                // A send that was cut short has not been counted.
                Ok(()) => assert!(
                    total >= sent,
                    "victim {victim}, {reader:?}: an end after {total} of {sent} bytes"
                ),
                Err(error) => assert_eq!(error, Errno::ECONNRESET, "victim {victim}, {reader:?}"),
            }
            assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]), "victim {victim}, {reader:?}: after the end");
            calls::close(fd).expect("close");
        });
    }
    side.sync("done");
}

/// Clients whose connection goes back to TCP, because they fork, with much that their peer has not read: it does not read on, so they
/// are killed while they send that again.
fn dies_while_it_sends_again(side: &Side) {
    let destination = side.destination();
    for _ in 0..AGAIN {
        let (sent, forks) = (SharedCount::new(), SharedCount::new());
        let child = fork(Leave::Exit, || {
            quietly(|| {
                let fd = side.connect_to(destination);
                side.warm_up(fd);
                calls::set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, BUFFER).expect("SO_SNDBUF");
                let mut pattern = Pattern::new(PATTERN);
                while pattern.position() < UNREAD {
                    let data = pattern.take(PIECES[2]);
                    match calls::send(fd, &data, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) {
                        Ok(count) => pattern.put_back(data.len() - count),
                        // A kernel's buffers are full.
                        Err(error) => {
                            assert_eq!(error, Errno::EAGAIN);
                            break;
                        }
                    }
                    sent.set(pattern.position());
                }
                forks.set(1);
                fork(Leave::Exit, || {}).wait_for_success();
                loop {
                    std::thread::sleep(std::time::Duration::from_secs(1));
                }
            });
        });
        let mut asleep = 0;
        while asleep < ASLEEP {
            assert!(!has_ended(child.0), "a victim has ended by itself, after {} bytes", sent.get());
            asleep = if forks.get() == 1 && is_asleep(child.0) { asleep + 1 } else { 0 };
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        quietly(|| calls::kill(child.0, libc::SIGKILL)).expect("kill");
        assert_eq!(quietly(|| child.wait()), End::Signal(libc::SIGKILL));
        side.tell(sent.get());
    }
    say!("{AGAIN} victims");
    side.sync("done");
}

fn is_asleep(process: libc::pid_t) -> bool {
    std::fs::read_to_string(format!("/proc/{process}/stat"))
        .is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S')))
}

/// Reads nothing before they are dead.
fn reads_of_clients_after_their_end(side: &Side) {
    let listener = quietly(|| side.listen());
    for reader in [Reader::Blocks, Reader::Polls, Reader::Loops] {
        quietly(|| {
            let fd = side.accept(listener);
            side.answer_warm_up(fd);
            calls::set_option(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, BUFFER).expect("SO_RCVBUF");
            let sent = side.told();
            let (total, end) = read_until_the_end(fd, reader);
            match end {
                Ok(()) => assert!(total >= sent, "{reader:?}: an end after {total} of {sent} bytes"),
                Err(error) => assert_eq!(error, Errno::ECONNRESET, "{reader:?}"),
            }
            assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]), "{reader:?}: after the end");
            calls::close(fd).expect("close");
        });
    }
    side.sync("done");
}

fn accepted_by_victims(side: &Side) {
    let listener = quietly(|| side.listen());
    kill_in_mid_stream(side, || {
        let fd = side.accept(listener);
        side.answer_warm_up(fd);
        fd
    });
}

fn reads_of_servers(side: &Side) {
    let destination = side.destination();
    read_what_they_sent(side, || {
        let fd = side.connect_to(destination);
        side.warm_up(fd);
        fd
    });
}

fn reads_of_clients(side: &Side) {
    let listener = quietly(|| side.listen());
    read_what_they_sent(side, || {
        let fd = side.accept(listener);
        side.answer_warm_up(fd);
        fd
    });
}

fn connected_by_victims(side: &Side) {
    let destination = side.destination();
    kill_in_mid_stream(side, || {
        let fd = side.connect_to(destination);
        side.warm_up(fd);
        fd
    });
}

/// Has taken all, and does something else when its peer dies, which sleeps: an ordinary end.
fn is_busy(side: &Side, fd: Fd) {
    let victim = side.told() as libc::pid_t;
    assert_eq!(receive_exactly(fd, 8), b"farewell");
    side.sync("blocked");
    await_end_of(victim);
    for _ in 0..2 {
        assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]));
    }
    let _ = calls::pending_error(fd);
    let _ = calls::poll(&[(fd, libc::POLLIN | libc::POLLRDHUP)], 0);
}

fn dies_asleep(side: &Side, fd: Fd) {
    dies_in(side, fd, || calls::recv(fd, 100, 0));
}

fn dies_asleep_in_a_set(side: &Side, fd: Fd) {
    let set = calls::epoll_create().expect("epoll_create");
    calls::epoll_add(set, fd, libc::EPOLLIN | libc::EPOLLET, 0).expect("epoll_ctl");
    dies_in(side, fd, || calls::epoll_wait(set, 1, -1));
}

/// The other side of [`is_busy`]: dies while it sleeps in `wait`.
fn dies_in<T>(side: &Side, fd: Fd, wait: impl FnOnce() -> T) {
    side.tell(u64::from(std::process::id()));
    assert_eq!(calls::send(fd, b"farewell", 0), Ok(8));
    let _ = while_blocked(wait, || {
        side.sync("blocked");
        calls::kill_self();
    });
}

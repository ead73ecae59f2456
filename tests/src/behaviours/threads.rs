//! Threads that share a connection.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::peers::{demand, echo, request_echoes, send_all, sends_on_demand, stop};
use super::{Behaviour, Tally};
use crate::calls::{self, Errno, Fd, Leave, fork, quietly};
use crate::say;
use crate::side::{
    Pattern, Side, listening_port, pause, receive_exactly, receive_pattern, receive_pattern_to_end,
    send_pattern, while_blocked,
};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("one_reads_one_writes", full_duplex_left, full_duplex_right),
    Behaviour::connected("two_read", two_readers, sends_numbers),
    Behaviour::connected("two_write", counts_writes, two_writers),
    Behaviour::connected("eight_take_turns", eight_take_turns, echoes),
    Behaviour::connected("a_writer_while_a_reader_sleeps", writer_and_sleeping_reader, echoes),
    Behaviour::connected("a_poller_and_a_reader", poller_and_reader, sends_on_demand),
    Behaviour::connected("a_poll_is_never_for_nothing", polls_beside_a_reader, sends_one_by_one),
    retired("a_thread_with_descriptors_of_its_own", |_, fd| parts(fd, parts_and_closes), echoes, OWN),
    retired("a_thread_that_closes_what_is_its_own", |_, fd| parts(fd, closes_its_own), echoes, OWN),
    retired("a_thread_that_marks_what_is_its_own", |_, fd| parts(fd, marks_its_own), echoes, OWN),
    retired("unshared_beside_a_reader", |side, fd| reads_beside(side, fd, unshares), sends_on_demand, OWN),
    retired(
        "given_to_stdio_beside_a_reader",
        |side, fd| reads_beside(side, fd, opens),
        sends_on_demand,
        &["stdio"],
    ),
    Behaviour::connected("two_blocked_readers", two_blocked_readers, sends_on_demand),
    Behaviour::connected("shutdown_ends_two_blocked_readers", shutdown_ends_both, ends_too),
    Behaviour::whole(
        "reads_while_another_calls_for_more",
        reads_from_the_start,
        sends_late,
        Tally::Upgraded(1),
    ),
    Behaviour::whole("closes_while_another_reads", closes_under_reads, nothing, Tally::Upgraded(0))
        .tally(Tally::Total(2 * CLOSES), Tally::Upgraded(0))
        .by_itself(),
    Behaviour::connected("blocked_writer_and_blocked_reader", blocked_both_ways, unblocks),
    Behaviour::connected("close_of_a_copy_beside_a_reader", closes_beside_a_reader, sends_on_to_a_copy),
    Behaviour::connected("close_of_a_copy_beside_a_poll", closes_beside_a_poll, sends_on_to_a_copy),
    // What a call sends over TCP that returns after its descriptor was closed, nobody counts.
    Behaviour::connected("close_of_a_copy_beside_a_writer", closes_beside_a_writer, reads_on_from_a_copy)
        .tally(Tally::Unknown, Tally::Upgraded(1)),
    Behaviour::whole(
        "close_of_a_copy_beside_a_reader_and_an_accept",
        accepts_beside_a_reader,
        connects_again_and_sends,
        Tally::Upgraded(2),
    ),
    Behaviour::whole(
        "close_of_a_copy_beside_a_reader_and_a_connect",
        accepts_again_and_sends,
        connects_beside_a_reader,
        Tally::Upgraded(2),
    ),
    Behaviour::whole(
        "close_of_a_copy_beside_a_reader_and_a_young_accept",
        accepts_a_young_one_beside_a_reader,
        connects_again_and_sends_at_once,
        Tally::Total(2),
    ),
    Behaviour::whole(
        "close_of_a_copy_beside_a_reader_and_a_young_connect",
        accepts_again_and_sends_at_once,
        connects_a_young_one_beside_a_reader,
        Tally::Total(2),
    ),
    Behaviour::whole("shut_down_as_a_thread_follows", shuts_down, splices, Tally::Returned(CHANCES))
        .alone(&["unsupported-call"])
        // What is spliced is not counted as sent.
        .tally(Tally::Returned(CHANCES), Tally::Unknown),
];

const OWN: &[&str] = &["own-descriptors"];

/// The left side takes the connection out of the library's hands.
const fn retired(
    name: &'static str,
    left: fn(&Side, Fd),
    right: fn(&Side, Fd),
    reasons: &'static [&'static str],
) -> Behaviour {
    Behaviour::connected(name, left, right).alone(reasons).tally(Tally::Unknown, Tally::Returned(1))
}

const LENGTH: usize = 6 << 20;

fn full_duplex_left(_side: &Side, fd: Fd) {
    full_duplex(fd, 21, 22);
}

fn full_duplex_right(_side: &Side, fd: Fd) {
    full_duplex(fd, 22, 21);
}

fn full_duplex(fd: Fd, ours: u64, theirs: u64) {
    std::thread::scope(|scope| {
        scope.spawn(|| send_pattern(fd, &mut Pattern::new(ours), LENGTH, 50_000));
        receive_pattern(fd, &mut Pattern::new(theirs), LENGTH, 30_000);
    });
    say!("sent and received {LENGTH}");
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
}

const NUMBERS: u64 = 20_000;

fn sends_numbers(_side: &Side, fd: Fd) {
    for number in 0..NUMBERS {
        send_all(fd, &number.to_le_bytes());
    }
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
}

/// Two readers divide the stream between them: whole numbers, as each asks for eight bytes at a time and
/// only whole numbers are in the stream. A reader that gets a part reads the rest, which another reader may
/// have taken, so what is compared is the sum of all bytes.
fn two_readers(_side: &Side, fd: Fd) {
    let (sum, count) = (AtomicU64::new(0), AtomicU64::new(0));
    let read = || {
        loop {
            let data = quietly(|| calls::recv(fd, 8, 0)).expect("recv");
            if data.is_empty() {
                return;
            }
            count.fetch_add(data.len() as u64, Ordering::SeqCst);
            sum.fetch_add(data.iter().map(|&byte| u64::from(byte)).sum(), Ordering::SeqCst);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(read);
        read();
    });
    let wanted: u64 = (0..NUMBERS).flat_map(|number| number.to_le_bytes()).map(u64::from).sum();
    assert_eq!((count.load(Ordering::SeqCst), sum.load(Ordering::SeqCst)), (NUMBERS * 8, wanted));
    say!("read {NUMBERS} numbers");
}

const WRITES: usize = 10_000;

/// Two threads write at once. How their writes mix is open; every byte of each arrives.
fn two_writers(_side: &Side, fd: Fd) {
    let write = |byte: u8| {
        for _ in 0..WRITES {
            assert_eq!(quietly(|| calls::send(fd, &[byte; 16], 0)), Ok(16));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| write(b'a'));
        write(b'b');
    });
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
}

fn counts_writes(_side: &Side, fd: Fd) {
    let mut counts = [0; 2];
    loop {
        let data = quietly(|| calls::recv(fd, 10_000, 0)).expect("recv");
        if data.is_empty() {
            break;
        }
        for byte in data {
            counts[usize::from(byte - b'a')] += 1;
        }
    }
    assert_eq!(counts, [16 * WRITES; 2]);
    say!("{counts:?}");
}

fn echoes(_side: &Side, fd: Fd) {
    say!("echoed {}", echo(fd));
}

fn eight_take_turns(_side: &Side, fd: Fd) {
    for round in 0..50u64 {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let request = Pattern::new(round).take(500);
                send_all(fd, &request);
                assert_eq!(receive_exactly(fd, 500), request);
            });
        });
    }
    say!("50 threads");
}

fn writer_and_sleeping_reader(_side: &Side, fd: Fd) {
    for round in 0..50u64 {
        let request = round.to_be_bytes();
        let answer =
            while_blocked(|| quietly(|| calls::recv(fd, 8, libc::MSG_WAITALL)), || send_all(fd, &request));
        assert_eq!(answer, Ok(request.to_vec()));
    }
    say!("50 rounds");
}

fn poller_and_reader(side: &Side, fd: Fd) {
    std::thread::scope(|scope| {
        let poller = scope.spawn(|| quietly(|| calls::poll(&[(fd, libc::POLLIN)], -1)));
        let data = while_blocked(|| quietly(|| calls::recv(fd, 4, libc::MSG_PEEK)), || demand(side));
        say!("read {data:?}");
        say!("polled {:?}", poller.join().expect("the poller is well"));
    });
    assert_eq!(calls::recv(fd, 4, 0), Ok(b"data".to_vec()));
    stop(side);
}

/// Data for both wakes both, one after the other: no wakeup is swallowed by the one that came first.
/// Another thread may have read what a poll was for, which then waits on.
fn polls_beside_a_reader(_: &Side, fd: Fd) {
    let (quiet, _writer) = calls::pipe().expect("pipe");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let read = || quietly(|| calls::recv(fd, 64, libc::MSG_DONTWAIT));
            while read().map_or(true, |data| !data.is_empty()) {}
            over.store(true, Ordering::Relaxed);
        });
        while !over.load(Ordering::Relaxed) {
            let events = quietly(|| calls::poll(&[(fd, libc::POLLIN), (quiet, libc::POLLIN)], -1));
            assert!(events.expect("poll")[0] & libc::POLLIN != 0, "a poll without a limit ended for nothing");
        }
    });
}

/// What one thread makes of its own descriptors is not the others' business.
fn parts(fd: Fd, part: fn(Fd)) {
    request_echoes(fd, 10, 3000);
    std::thread::scope(|scope| {
        scope.spawn(|| quietly(|| part(fd)));
    });
    request_echoes(fd, 10, 3000);
    calls::close(fd).expect("close");
}

fn parts_and_closes(fd: Fd) {
    calls::unshare_descriptors();
    calls::close(fd).expect("close");
    let (_reader, _writer) = calls::pipe().expect("pipe");
}

fn closes_its_own(fd: Fd) {
    calls::close_range(fd, fd.cast_unsigned(), UNSHARE).expect("close_range");
}

fn marks_its_own(fd: Fd) {
    calls::close_range(fd, fd.cast_unsigned(), UNSHARE | CLOEXEC).expect("close_range");
    calls::close(fd).expect("close");
}

/// A thread sleeps in a read while another has the connection taken out of the library's hands.
fn reads_beside(side: &Side, fd: Fd, retire: fn(Fd)) {
    demand(side);
    assert_eq!(receive_exactly(fd, 4), b"data");
    let got = while_blocked(
        || calls::recv(fd, 10, 0),
        || {
            quietly(|| retire(fd));
            side.tell(1);
        },
    );
    assert_eq!(got, Ok(b"data".to_vec()));
    side.sync("sent");
    stop(side);
}

fn unshares(_: Fd) {
    calls::unshare_descriptors();
}

fn opens(fd: Fd) {
    // It stays open.
    let _ = calls::Stdio::open(fd);
}

const UNSHARE: i32 = libc::CLOSE_RANGE_UNSHARE.cast_signed();
const CLOEXEC: i32 = libc::CLOSE_RANGE_CLOEXEC.cast_signed();

fn sends_one_by_one(_: &Side, fd: Fd) {
    for _ in 0..ONE_BY_ONE {
        assert_eq!(quietly(|| calls::send(fd, b"x", 0)), Ok(1));
    }
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
}

const ONE_BY_ONE: usize = 50_000;

fn two_blocked_readers(side: &Side, fd: Fd) {
    for _ in 0..30 {
        std::thread::scope(|scope| {
            let other = scope.spawn(|| quietly(|| calls::recv(fd, 4, 0)));
            let here = while_blocked(
                || quietly(|| calls::recv(fd, 4, 0)),
                || {
                    demand(side);
                    demand(side);
                },
            );
            assert_eq!(here, Ok(b"data".to_vec()));
            assert_eq!(other.join().expect("the other reader is well"), Ok(b"data".to_vec()));
        });
    }
    say!("30 rounds");
    stop(side);
}

fn shutdown_ends_both(side: &Side, fd: Fd) {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| quietly(|| calls::recv(fd, 4, 0)));
        let here = while_blocked(|| quietly(|| calls::recv(fd, 4, 0)), || side.sync("end now"));
        say!("{here:?} {:?}", other.join().expect("the other reader is well"));
    });
}

fn ends_too(side: &Side, fd: Fd) {
    side.sync("end now");
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    let _ = calls::recv(fd, 1, 0);
}

/// One thread sleeps in the very first read, while another does what a library must look after from then on: copies of
/// the descriptor, an event loop, a child.
fn reads_from_the_start(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    for step in ["dup", "epoll", "fork"] {
        let read = while_blocked(
            || quietly(|| calls::recv(fd, 4, 0)),
            || {
                quietly(|| match step {
                    "dup" => calls::close(calls::dup(fd).expect("dup")).expect("close"),
                    "epoll" => {
                        let set = calls::epoll_create().expect("epoll_create1");
                        calls::epoll_add(set, fd, libc::EPOLLIN, 1).expect("epoll_ctl");
                    }
                    _ => fork(Leave::AtOnce, || {}).wait_for_success(),
                });
                side.sync(step);
            },
        );
        say!("read {read:?}");
    }
    request_echoes(fd, 100, 300);
}

fn sends_late(side: &Side) {
    let fd = side.connect();
    for step in ["dup", "epoll", "fork"] {
        side.sync(step);
        send_all(fd, b"data");
    }
    say!("echoed {}", echo(fd));
}

const CLOSES: u64 = 300;

/// A thread reads without waiting until it is told that there is nothing to read from; another closes beside it.
fn closes_under_reads(side: &Side) {
    let listener = side.listen_quietly();
    let destination = side.family.own(listening_port(listener));
    let (open, done) = (AtomicI32::new(-1), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                let fd = open.load(Ordering::SeqCst);
                if fd >= 0 && quietly(|| calls::recv(fd, 1, libc::MSG_DONTWAIT)) == Err(Errno::EBADF) {
                    open.store(-1, Ordering::SeqCst);
                }
            }
        });
        quietly(|| {
            for _ in 0..CLOSES {
                let client = side.connect_to(destination);
                let server = side.accept(listener);
                for _ in 0..20 {
                    send_all(client, b"x");
                    receive_exactly(server, 1);
                    send_all(server, b"y");
                    receive_exactly(client, 1);
                }
                open.store(client, Ordering::SeqCst);
                pause();
                calls::close(client).expect("close");
                while open.load(Ordering::SeqCst) >= 0 {
                    pause();
                }
                calls::close(server).expect("close");
            }
        });
        done.store(true, Ordering::SeqCst);
    });
    say!("{CLOSES} closes");
}

fn nothing(_side: &Side) {}

/// One thread sleeps for room while another sleeps for data; each is woken by what it waits for.
fn blocked_both_ways(side: &Side, fd: Fd) {
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| quietly(|| calls::recv(fd, 4, 0)));
        while_blocked(
            || send_pattern(fd, &mut Pattern::new(23), 16 << 20, 1 << 20),
            || {
                side.sync("send now");
                side.sync("sent");
                assert_eq!(reader.join().expect("the reader is well"), Ok(b"data".to_vec()));
                side.sync("read now");
            },
        );
    });
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    side.sync("done");
}

/// While a thread sleeps in `wait`, another closes the descriptor, of which there is a copy, and does `then`.
fn closes_beside<T>(fd: Fd, wait: impl FnOnce() -> T, then: impl FnOnce() + Send) -> (Fd, T) {
    let copy = calls::dup(fd).expect("dup");
    let closes = || {
        quietly(|| calls::close(fd)).expect("close");
        then();
    };
    let found = while_blocked(|| quietly(wait), closes);
    (copy, found)
}

/// A copy is as good as the original.
fn uses_a_copy(side: &Side, copy: Fd) {
    side.sync("woken");
    assert_eq!(receive_exactly(copy, 4), b"more");
    assert_eq!(calls::send(copy, b"answer", 0), Ok(6));
    side.sync("done");
}

fn awaits_an_answer(side: &Side, fd: Fd) {
    side.sync("woken");
    send_all(fd, b"more");
    assert_eq!(receive_exactly(fd, 6), b"answer");
    side.sync("done");
}

/// A read that waits has the file, whatever becomes of the number.
fn closes_beside_a_reader(side: &Side, fd: Fd) {
    let (copy, data) = closes_beside(fd, || calls::recv(fd, 100, 0), || side.sync("closed"));
    assert_eq!(data, Ok(b"hello".to_vec()));
    assert_eq!(calls::recv(fd, 100, libc::MSG_DONTWAIT), Err(Errno::EBADF));
    uses_a_copy(side, copy);
}

/// The file's bytes wake it, and then it looks up the number again.
fn closes_beside_a_poll(side: &Side, fd: Fd) {
    let wait = || calls::poll(&[(fd, libc::POLLIN)], -1);
    let (copy, ready) = closes_beside(fd, wait, || side.sync("closed"));
    assert_eq!(ready, Ok(vec![libc::POLLNVAL]));
    assert_eq!(receive_exactly(copy, 5), b"hello");
    uses_a_copy(side, copy);
}

fn sends_on_to_a_copy(side: &Side, fd: Fd) {
    side.sync("closed");
    send_all(fd, b"hello");
    awaits_an_answer(side, fd);
}

const MUCH: usize = 16 << 20;

fn closes_beside_a_writer(side: &Side, fd: Fd) {
    let data = Pattern::new(24).take(MUCH);
    let (copy, sent) = closes_beside(fd, || calls::send(fd, &data, 0), || side.sync("closed"));
    assert_eq!(sent, Ok(MUCH));
    uses_a_copy(side, copy);
}

fn reads_on_from_a_copy(side: &Side, fd: Fd) {
    side.sync("closed");
    receive_pattern(fd, &mut Pattern::new(24), MUCH, 1 << 20);
    awaits_an_answer(side, fd);
}

const UNSPOILED: usize = 50_000;

/// The number becomes another connection's, whose bytes are its own.
fn reuses_beside_a_reader(side: &Side, fd: Fd, another: impl FnOnce() -> Fd + Send) {
    let reuses = || {
        assert_eq!(another(), fd);
        side.sync("reused");
        // The peer has sent to the new one, and then to the old one.
        side.sync("sent");
    };
    let (copy, data) = closes_beside(fd, || calls::recv(fd, 100, 0), reuses);
    assert_eq!(data, Ok(b"hello".to_vec()));
    receive_pattern(fd, &mut Pattern::new(25), UNSPOILED, 10_000);
    assert_eq!(calls::send(fd, b"all", 0), Ok(3));
    uses_a_copy(side, copy);
}

fn sends_to_both(side: &Side, old: Fd, new: Fd) {
    side.sync("reused");
    send_pattern(new, &mut Pattern::new(25), UNSPOILED, 10_000);
    side.sync("sent");
    send_all(old, b"hello");
    assert_eq!(receive_exactly(new, 3), b"all");
    awaits_an_answer(side, old);
}

fn accepts(side: &Side, listener: Fd) -> Fd {
    let fd = side.accept(listener);
    side.answer_warm_up(fd);
    fd
}

fn connects(side: &Side, destination: SocketAddr) -> Fd {
    let fd = side.connect_to(destination);
    side.warm_up(fd);
    fd
}

fn accepts_beside_a_reader(side: &Side) {
    let listener = side.listen();
    let fd = accepts(side, listener);
    reuses_beside_a_reader(side, fd, || {
        side.sync("closed");
        quietly(|| accepts(side, listener))
    });
}

fn connects_again_and_sends(side: &Side) {
    let destination = side.destination();
    let old = connects(side, destination);
    side.sync("closed");
    let new = connects(side, destination);
    sends_to_both(side, old, new);
}

/// What the new connection carries, its own socket has, if nothing came before.
fn accepts_a_young_one_beside_a_reader(side: &Side) {
    let listener = side.listen();
    let fd = accepts(side, listener);
    reuses_beside_a_reader(side, fd, || {
        side.sync("closed");
        quietly(|| side.accept(listener))
    });
}

fn connects_again_and_sends_at_once(side: &Side) {
    let destination = side.destination();
    let old = connects(side, destination);
    side.sync("closed");
    let new = side.connect_to(destination);
    sends_to_both(side, old, new);
}

fn accepts_again_and_sends_at_once(side: &Side) {
    let listener = side.listen();
    let old = accepts(side, listener);
    let new = side.accept(listener);
    sends_to_both(side, old, new);
}

fn connects_a_young_one_beside_a_reader(side: &Side) {
    let destination = side.destination();
    let fd = connects(side, destination);
    reuses_beside_a_reader(side, fd, || quietly(|| side.connect_to(destination)));
}

fn accepts_again_and_sends(side: &Side) {
    let listener = side.listen();
    let old = accepts(side, listener);
    let new = accepts(side, listener);
    sends_to_both(side, old, new);
}

fn connects_beside_a_reader(side: &Side) {
    let destination = side.destination();
    let fd = connects(side, destination);
    reuses_beside_a_reader(side, fd, || quietly(|| connects(side, destination)));
}

fn unblocks(side: &Side, fd: Fd) {
    side.sync("send now");
    assert_eq!(calls::send(fd, b"data", 0), Ok(4));
    side.sync("sent");
    side.sync("read now");
    let total = receive_pattern_to_end(fd, &mut Pattern::new(23));
    say!("received {total}");
    side.sync("done");
}

/// Connections one after the other: at each both ends may be at any step when the other begins.
const CHANCES: u64 = 100;

/// The end that one thread makes of its stream, while another that reads takes the connection back as the peer asks.
fn shuts_down(side: &Side) {
    let listener = side.listen();
    for chance in 0..CHANCES {
        let fd = quietly(|| side.accept(listener));
        side.answer_warm_up(fd);
        quietly(|| {
            std::thread::scope(|scope| {
                let reading = scope.spawn(|| {
                    let mut bytes = [0; 100];
                    // As fast as may be: the moment is short in which it takes the connection back.
                    quietly(|| while calls::recv_into(fd, &mut bytes, libc::MSG_DONTWAIT) != Ok(0) {});
                });
                side.sync("both");
                go_on_at_the_same_moment_and(chance * 7 % 120);
                calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
                assert_eq!(calls::send(fd, b"x", libc::MSG_NOSIGNAL), Err(Errno::EPIPE));
                side.sync("ended");
                reading.join().expect("it ends with the stream");
            });
            calls::close(fd).expect("close");
        });
    }
}

fn splices(side: &Side) {
    let destination = side.destination();
    let (reading, writing) = calls::pipe().expect("pipe");
    for chance in 0..CHANCES {
        let fd = quietly(|| side.connect_to(destination));
        side.warm_up(fd);
        quietly(|| {
            calls::write(writing, b"s").expect("write");
            side.sync("both");
            go_on_at_the_same_moment_and(chance * 11 % 60);
            assert_eq!(calls::splice(reading, fd, 1), Ok(1));
            assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
            side.sync("ended");
            calls::close(fd).expect("close");
        });
    }
}

/// Goes on so many microseconds after a moment that is the same for both sides, if they come here at nearly the same time.
fn go_on_at_the_same_moment_and(micros: u64) {
    let now = || Duration::try_from(clock_gettime(ClockId::Monotonic)).expect("it is behind the boot");
    let moment = Duration::from_millis(now().as_millis() as u64 + 2) + Duration::from_micros(micros);
    // Others need the processors.
    std::thread::sleep(moment.saturating_sub(now()));
}

//! Processes that are killed in the middle of calls, on a connection that others go on using.

use super::peers::{echo, hand_to_child, request_echoes, send_all};
use super::{Behaviour, Tally};
use crate::calls::{self, End, Errno, Fd, Leave, Stops, fork, fork_traced, quietly};
use crate::say;
use crate::side::{
    ARRIVAL, Pattern, Side, await_unread, receive_exactly, receive_pattern, receive_pattern_to_end,
    send_pattern,
};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("in_the_middle_of_sends", killed_in_sends, counts_two_kinds)
        .alone(&["unseen-bytes"])
        .tally(Tally::Unknown, Tally::Upgraded(1)),
    Behaviour::connected("in_the_middle_of_receives", killed_in_receives, sends_for_two)
        .alone(&["unseen-bytes"])
        .tally(Tally::Unknown, Tally::Upgraded(1)),
    Behaviour::whole("at_each_system_call", killed_at_each_call, sends_and_counts, Tally::Upgraded(STOPS))
        .alone(&["shared-before-upgrade", "unseen-bytes"])
        .tally(Tally::Unknown, Tally::Upgraded(STOPS))
        // The client has sent everything before the server answers.
        .over_verbs(Tally::Unknown, Tally::Stayed(STOPS))
        // docs/limitations.md, "Unix sockets": it is reset.
        .tcp_only(),
    Behaviour::whole("while_bytes_wait", killed_while_bytes_wait, sends_and_counts, Tally::Upgraded(STOPS))
        .environment(&[("THALLUS_RING", "64K")])
        .alone(&["shared-before-upgrade", "unseen-bytes"])
        .tally(Tally::Unknown, Tally::Upgraded(STOPS))
        // The client has sent everything before the server answers.
        .over_verbs(Tally::Unknown, Tally::Stayed(STOPS)),
    Behaviour::whole("while_handing_on", killed_while_handing_on, asks_across, Tally::Upgraded(HANDERS))
        .alone(&["shared-before-upgrade", "unseen-bytes", "passed-to-process"])
        .tally(Tally::Unknown, Tally::AtLeast(HANDERS, HANDERS))
        .tcp_only(),
    Behaviour::connected("at_any_instruction", killed_at_any_instruction, requests_one_answer_or_two)
        .takes_long()
        .alone(&["shared-before-upgrade", "unseen-bytes"])
        .tally(Tally::Unknown, Tally::Upgraded(1)),
    Behaviour::whole(
        "child_is_killed_while_busy",
        child_killed_while_busy,
        reads_until_it_ends,
        Tally::Upgraded(1),
    )
    .tally(Tally::Unknown, Tally::Upgraded(1)),
    Behaviour::whole("reader_is_killed", killed_without_reading, writes_until_it_fails, Tally::Upgraded(1))
        .tally(Tally::Unknown, Tally::Upgraded(1)),
];

const HANDERS: u64 = 60;

/// Children that are killed while they hand the connection to somebody: their parent goes on, over whatever.
fn killed_while_handing_on(side: &Side) {
    let listener = side.listen();
    quietly(|| {
        for stop in 1..=HANDERS {
            let fd = side.accept(listener);
            for _ in 0..20 {
                let request = receive_exactly(fd, 10);
                send_all(fd, &request);
            }
            let (local, remote) = calls::unix_pair().expect("socketpair");
            let child = fork_traced(|| {
                let _ = calls::send_fd(remote, b"x", fd);
            });
            side.sync("go");
            child.kill_at_stop(Stops::SystemCalls, stop as usize);
            calls::close(local).expect("close");
            calls::close(remote).expect("close");
            side.sync("killed");
            echo(fd);
            calls::close(fd).expect("close");
        }
    });
    say!("{HANDERS} children");
    side.sync("done");
}

/// Has said something, or not, when the child is killed.
fn asks_across(side: &Side) {
    let destination = side.destination();
    quietly(|| {
        for stop in 1..=HANDERS {
            let fd = side.connect_to(destination);
            for _ in 0..20 {
                send_all(fd, b"0123456789");
                receive_exactly(fd, 10);
            }
            let early = stop % 2 * 5;
            send_all(fd, &b"early"[..early as usize]);
            side.sync("go");
            calls::poll(&[(fd, libc::POLLIN)], 1).expect("poll");
            side.sync("killed");
            assert_eq!(receive_exactly(fd, early as usize), b"early"[..early as usize]);
            request_echoes(fd, 20, 3000);
            calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
            assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
            calls::close(fd).expect("close");
        }
    });
    side.sync("done");
}

const KILLS: usize = 20;
const OURS: usize = 5000;

/// Children that are killed in the middle of whatever a send does leave nothing that holds the parent up.
fn killed_in_sends(side: &Side, fd: Fd) {
    for round in 0..KILLS {
        let (reading, writing) = quietly(calls::pipe).expect("pipe");
        let child = fork(Leave::Exit, || {
            quietly(|| {
                loop {
                    let _ = calls::send(fd, &[b'c'; 700], 0);
                    let _ = calls::write(writing, b"s");
                }
            });
        });
        // Each at another place of its loop.
        receive_from_pipe(reading, 1 + round * 3);
        calls::kill(child.0, libc::SIGKILL).expect("kill");
        assert_eq!(quietly(|| child.wait()), End::Signal(libc::SIGKILL));
        send_all(fd, &[b'p'; OURS]);
        quietly(|| calls::close(reading)).expect("close");
        quietly(|| calls::close(writing)).expect("close");
    }
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    side.sync("done");
}

fn receive_from_pipe(reading: Fd, mut bytes: usize) {
    while bytes > 0 {
        bytes -= quietly(|| calls::read(reading, bytes)).expect("read").len();
    }
}

fn counts_two_kinds(side: &Side, fd: Fd) {
    let mut ours = 0;
    loop {
        let data = quietly(|| calls::recv(fd, 65536, 0)).expect("recv");
        if data.is_empty() {
            break;
        }
        assert!(data.iter().all(|byte| b"cp".contains(byte)), "nobody sent this");
        ours += data.iter().filter(|&&byte| byte == b'p').count();
    }
    say!("received {ours}");
    assert_eq!(ours, KILLS * OURS);
    side.sync("done");
}

/// The same for receives: what a killed child took is gone, and the parent has the rest.
fn killed_in_receives(side: &Side, fd: Fd) {
    for round in 0..KILLS {
        let (reading, writing) = quietly(calls::pipe).expect("pipe");
        let child = fork(Leave::Exit, || {
            quietly(|| {
                loop {
                    let _ = calls::recv(fd, 700, 0);
                    let _ = calls::write(writing, b"r");
                }
            });
        });
        side.sync("stream");
        receive_from_pipe(reading, 1 + round * 3);
        calls::kill(child.0, libc::SIGKILL).expect("kill");
        assert_eq!(quietly(|| child.wait()), End::Signal(libc::SIGKILL));
        quietly(|| calls::close(reading)).expect("close");
        quietly(|| calls::close(writing)).expect("close");
        side.sync("the child is gone");
        // The rest of this round, up to its last byte.
        loop {
            let data = quietly(|| calls::recv(fd, 65536, 0)).expect("recv");
            assert!(!data.is_empty(), "the stream ended early");
            if data.ends_with(b"!") {
                break;
            }
        }
    }
    say!("{KILLS} children");
    side.sync("done");
}

fn sends_for_two(side: &Side, fd: Fd) {
    for _ in 0..KILLS {
        side.sync("stream");
        for _ in 0..100 {
            send_all(fd, &[b'.'; 700]);
        }
        side.sync("the child is gone");
        send_all(fd, b"!");
    }
    side.sync("done");
}

/// Stops of a child at system calls, at each of which one is killed.
const STOPS: u64 = 200;
/// Bytes of each piece that the child takes at a time.
const PIECE: usize = 700;
/// Pieces that are sent over TCP, before this side reads, and after it has left TCP.
const PIECES: [usize; 2] = [20, 10];
const PATTERN: u64 = 33;

/// Children that are killed while they read and answer, each at another system call, while the other side leaves TCP.
fn killed_at_each_call(side: &Side) {
    each_killed_at_another_call(side, |fd, told| {
        side.sync("more");
        Box::new(move || {
            while take_piece(fd, told) {
                calls::send(fd, b"a", 0).expect("send");
                tell(told, "sent", 1);
            }
        })
    });
}

/// The same for children that sleep until they can write, while bytes that nobody has asked for are still on TCP.
fn killed_while_bytes_wait(side: &Side) {
    each_killed_at_another_call(side, |fd, told| {
        side.sync("more");
        await_end(fd);
        Box::new(move || {
            while let Ok(sent) = calls::send(fd, &[b'a'; 256 << 10], libc::MSG_DONTWAIT) {
                tell(told, "sent", sent);
            }
            calls::poll(&[(fd, libc::POLLOUT)], 1).expect("poll");
            while take_piece(fd, told) {}
        })
    });
}

/// What such children have taken is gone, what they have sent arrives, and the parent goes on with the very next byte.
/// `prepare` makes what a child is to do with the connection, and with the pipe that it tells its progress.
fn each_killed_at_another_call(side: &Side, prepare: impl Fn(Fd, Fd) -> Box<dyn FnOnce()>) {
    let listener = side.listen();
    for stop in 1..=STOPS {
        let fd = quietly(|| side.accept(listener));
        side.sync("sent");
        let mut pattern = Pattern::new(PATTERN);
        receive_pattern(fd, &mut pattern, 3 * PIECE, PIECE);
        let (from_child, told) = quietly(calls::pipe).expect("pipe");
        let body = prepare(fd, told);
        quietly(|| fork_traced(body).kill_at_stop(Stops::SystemCalls, stop as usize));
        quietly(|| calls::close(told)).expect("close");
        let [taken, answered] = read_progress(from_child);
        quietly(|| calls::close(from_child)).expect("close");
        // The stream goes on where one of the child's reads ended.
        let rest = receive_to_end(fd);
        let total = PIECE * PIECES.iter().sum::<usize>();
        let first = total - rest.len();
        assert!(
            (3 * PIECE + taken..=4 * PIECE + taken).contains(&first),
            "stop {stop}: {taken}, then {first}"
        );
        pattern.take(first - 3 * PIECE);
        pattern.expect(&rest);
        side.sync("answers");
        send_all(fd, b"!");
        quietly(|| calls::close(fd)).expect("close");
        let arrived = side.told() as usize;
        // One send at most was not told of.
        assert!(arrived >= answered, "stop {stop}: {answered} bytes of answers, {arrived} arrived");
    }
    say!("{STOPS} children");
    side.sync("done");
}

fn take_piece(fd: Fd, told: Fd) -> bool {
    let data = calls::recv(fd, PIECE, 0).expect("recv");
    tell(told, "taken", data.len());
    !data.is_empty()
}

fn tell(told: Fd, what: &str, count: usize) {
    calls::write(told, format!("{what} {count}\n").as_bytes()).expect("write");
}

/// Bytes taken and sent, as children [`tell`].
fn read_progress(pipe: Fd) -> [usize; 2] {
    let mut all = Vec::new();
    loop {
        let data = quietly(|| calls::read(pipe, 4096)).expect("read");
        if data.is_empty() {
            break;
        }
        all.extend(data);
    }
    let text = String::from_utf8(all).expect("it is text");
    ["taken ", "sent "]
        .map(|what| text.lines().filter_map(|line| line.strip_prefix(what)?.parse::<usize>().ok()).sum())
}

fn await_end(fd: Fd) {
    let ready = quietly(|| calls::poll(&[(fd, libc::POLLRDHUP)], ARRIVAL)).expect("poll");
    assert_ne!(ready[0] & libc::POLLRDHUP, 0, "the end does not come");
}

fn receive_to_end(fd: Fd) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        let data = quietly(|| calls::recv(fd, 65536, 0)).expect("recv");
        if data.is_empty() {
            return all;
        }
        all.extend(data);
    }
}

fn sends_and_counts(side: &Side) {
    let destination = side.destination();
    for _ in 0..STOPS {
        let fd = quietly(|| side.connect_to(destination));
        let mut pattern = Pattern::new(PATTERN);
        send_pattern(fd, &mut pattern, PIECES[0] * PIECE, PIECE);
        side.sync("sent");
        side.sync("more");
        send_pattern(fd, &mut pattern, PIECES[1] * PIECE, PIECE);
        quietly(|| calls::shutdown(fd, libc::SHUT_WR)).expect("shutdown");
        side.sync("answers");
        let answers = receive_to_end(fd);
        let (last, before) = answers.split_last().expect("at least the parent answers");
        assert!(*last == b'!' && before.iter().all(|&byte| byte == b'a'), "nobody sent this");
        side.tell(before.len() as u64);
        quietly(|| calls::close(fd)).expect("close");
    }
    side.sync("done");
}

/// Children of [`killed_at_any_instruction`], and the instructions from the end of one to that of the next. Each run has
/// other ones.
const VICTIMS: usize = 60;
const STRIDE: usize = 41;
const REQUEST: usize = 100;

/// Children that are killed while they take one request and answer it: they have taken all of it or nothing, and the
/// other side, which sleeps, hears of the parent's answer.
fn killed_at_any_instruction(side: &Side, fd: Fd) {
    let offset = std::process::id() as usize % STRIDE;
    for victim in 1..=VICTIMS {
        let steps = victim * STRIDE + offset;
        side.sync("sent");
        await_unread(fd, REQUEST);
        let child = quietly(|| {
            fork_traced(|| {
                receive_exactly(fd, REQUEST);
                send_all(fd, b"a");
            })
        });
        quietly(|| child.kill_at_stop(Stops::Instructions, steps));
        match quietly(|| calls::recv(fd, 2 * REQUEST, libc::MSG_DONTWAIT)) {
            Ok(data) => assert_eq!(data, [victim as u8; REQUEST], "after {steps} steps"),
            Err(errno) => assert_eq!(errno, Errno::EAGAIN, "after {steps} steps"),
        }
        send_all(fd, b"!");
    }
    say!("{VICTIMS} children");
    side.sync("done");
}

fn requests_one_answer_or_two(side: &Side, fd: Fd) {
    for victim in 1..=VICTIMS {
        send_all(fd, &[victim as u8; REQUEST]);
        side.sync("sent");
        let mut answers = receive_exactly(fd, 1);
        if answers == b"a" {
            answers = receive_exactly(fd, 1);
        }
        assert_eq!(answers, b"!");
    }
    say!("{VICTIMS} requests");
    side.sync("done");
}

/// As a backend that is killed while it answers a long query.
fn child_killed_while_busy(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    let child = hand_to_child(fd, Leave::Exit, || {
        side.answer_warm_up_with(fd, 16);
        let mut pattern = Pattern::new(32);
        send_pattern(fd, &mut pattern, 3 << 20, 10_000);
        side.tell(pattern.position());
        calls::kill_self();
    });
    assert_eq!(child.wait(), End::Signal(libc::SIGKILL));
    side.sync("done");
}

fn reads_until_it_ends(side: &Side) {
    let fd = side.connect();
    side.warm_up_with(fd, 16);
    let total = receive_pattern_to_end(fd, &mut Pattern::new(32));
    assert_eq!(total as u64, side.told());
    say!("received {total}");
    side.sync("done");
}

fn killed_without_reading(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    let child = hand_to_child(fd, Leave::Exit, || {
        side.answer_warm_up_with(fd, 16);
        calls::kill_self();
    });
    assert_eq!(child.wait(), End::Signal(libc::SIGKILL));
    side.sync("killed");
    side.sync("done");
}

/// A writer that never reads learns of it, long before the peer's buffer would be full.
fn writes_until_it_fails(side: &Side) {
    let fd = side.connect();
    side.warm_up_with(fd, 16);
    side.sync("killed");
    let failed = quietly(|| (0..64).find_map(|_| calls::send(fd, b"12345678", libc::MSG_NOSIGNAL).err()));
    let error = failed.expect("64 messages to nobody");
    assert!([Errno(libc::EPIPE), Errno(libc::ECONNRESET)].contains(&error), "{error:?}");
    side.sync("done");
}

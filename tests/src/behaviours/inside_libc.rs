//! Connections in functions of libc's that make system calls of their own: dprintf, system, popen, execl, posix_spawn.

use std::ffi::CString;

use super::peers::{asks_to_the_end, echo, request_echoes};
use super::{Behaviour, Tally};
use crate::calls::{self, Child, Errno, Fd, Leave, Listed, Program, SharedCount, fork, quietly};
use crate::say;
use crate::side::{Side, receive_exactly};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("dprintf", prints, reads_what_is_printed),
    Behaviour::connected("dprintf_to_a_full_connection", prints_too_much, reads_at_last),
    service("execl", becomes_by_execl),
    service("execlp", becomes_by_execlp),
    service("execle", becomes_by_execle),
    service("exec_at_its_own_number", becomes_the_only_owner),
    service("posix_spawn", spawns),
    service("system", runs_a_shell),
    service("popen", reads_from_a_shell),
    Behaviour::connected("system_beside_a_connection", runs_shells, request_echoes_often),
];

/// The left side's connection is a program's that it starts.
pub(super) const fn service(name: &'static str, left: fn(&Side, Fd)) -> Behaviour {
    Behaviour::connected(name, left, asks_to_the_end)
        .alone(&["inherited-by-exec"])
        .tally(Tally::Unknown, Tally::Returned(1))
}

const LINES: i32 = 200;

fn prints(side: &Side, fd: Fd) {
    for seed in 0..LINES {
        let length = calls::many(seed).len();
        assert_eq!(calls::print_many(fd, seed, seed % 2 == 1), Ok(length));
    }
    assert_eq!(calls::print_text(fd, &long_text()), Ok(LONG));
    let pipe = calls::pipe().expect("pipe");
    assert_eq!(calls::print_many(pipe.1, 7, false), Ok(calls::many(7).len()));
    assert_eq!(calls::read(pipe.0, 500), Ok(calls::many(7)));
    side.sync("printed");
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
    let closed = quietly(|| calls::dup(fd)).expect("dup");
    quietly(|| calls::close(closed)).expect("close");
    assert_eq!(calls::print_many(closed, 1, false), Err(Errno::EBADF));
}

const LONG: usize = 300_000;

fn long_text() -> CString {
    CString::new(vec![b'l'; LONG]).expect("it has no NUL byte")
}

fn reads_what_is_printed(side: &Side, fd: Fd) {
    for seed in 0..LINES {
        let wanted = calls::many(seed);
        assert_eq!(receive_exactly(fd, wanted.len()), wanted);
    }
    assert_eq!(receive_exactly(fd, LONG), long_text().as_bytes());
    side.sync("printed");
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
}

fn prints_too_much(side: &Side, fd: Fd) {
    calls::set_nonblocking(fd, true).expect("O_NONBLOCK");
    let text = long_text();
    let mut whole = 0;
    let error = loop {
        match quietly(|| calls::print_text(fd, &text)) {
            Ok(length) => whole += length as u64,
            Err(error) => break error,
        }
    };
    say!("at last {error}");
    side.tell(whole);
    calls::close(fd).expect("close");
}

fn reads_at_last(side: &Side, fd: Fd) {
    let whole = side.told();
    let mut total = 0;
    loop {
        let data = quietly(|| calls::recv(fd, 100_000, 0)).expect("recv");
        assert!(data.iter().all(|&byte| byte == b'l'));
        if data.is_empty() {
            break;
        }
        total += data.len() as u64;
    }
    assert!((whole..whole + LONG as u64).contains(&total), "{total} bytes, after {whole} in whole texts");
}

/// Lets a child have the connection, and nobody else. It begins once that is so.
fn hand_over(fd: Fd, uses: impl FnOnce(Fd)) {
    let closed = SharedCount::new();
    let child = fork(Leave::Exit, || {
        while closed.get() == 0 {
            std::thread::yield_now();
        }
        uses(fd);
    });
    calls::close(fd).expect("close");
    closed.set(1);
    child.wait_for_success();
}

fn becomes(side: &Side, fd: Fd, how: Listed) {
    hand_over(fd, |fd| {
        quietly(|| calls::dup2(fd, 0)).expect("dup2");
        quietly(|| calls::dup2(fd, 1)).expect("dup2");
        quietly(|| calls::close(fd)).expect("close");
        let program = Program::helper("echo", &["0", "and", "four", "others", "more"], false);
        panic!("exec: {}", program.exec_listed(how));
    });
    side.sync("done");
}

fn becomes_by_execl(side: &Side, fd: Fd) {
    assert_eq!(Program::missing_with(8).exec_listed(Listed::Execl), Errno::ENOENT);
    // The environment is the process's, with the library.
    becomes(side, fd, Listed::Execl);
}

fn becomes_by_execlp(side: &Side, fd: Fd) {
    becomes(side, fd, Listed::Execlp);
}

fn becomes_by_execle(side: &Side, fd: Fd) {
    becomes(side, fd, Listed::Execle);
}

/// As a server does that starts its successor in its own place.
fn becomes_the_only_owner(side: &Side, fd: Fd) {
    hand_over(fd, |fd| {
        let program = Program::helper("echo", &[&fd.to_string()], false);
        panic!("exec: {}", program.exec());
    });
    side.sync("done");
}

fn spawns(side: &Side, fd: Fd) {
    let spawn = |onto: &[(Fd, Fd)]| -> Child {
        Program::helper("echo", &["0"], false).spawn(onto).expect("posix_spawn")
    };
    let child = spawn(&[(fd, 0), (fd, 1)]);
    calls::close(fd).expect("close");
    child.wait_for_success();
    side.sync("done");
}

fn shell(side: &Side, fd: Fd, run: impl Fn()) {
    hand_over(fd, |fd| {
        quietly(|| calls::dup2(fd, 0)).expect("dup2");
        quietly(|| calls::close(fd)).expect("close");
        run();
    });
    side.sync("done");
}

fn runs_a_shell(side: &Side, fd: Fd) {
    shell(side, fd, || assert_eq!(calls::system(c"exec cat >&0"), 0));
}

fn reads_from_a_shell(side: &Side, fd: Fd) {
    shell(side, fd, || assert_eq!(calls::popen(c"exec cat >&0"), 0));
}

/// A shell that does not know of the connection leaves it where it is.
fn runs_shells(side: &Side, fd: Fd) {
    for _ in 0..3 {
        assert_eq!(calls::system(c"true"), 0);
    }
    side.sync("ran");
    say!("echoed {}", echo(fd));
}

fn request_echoes_often(side: &Side, fd: Fd) {
    side.sync("ran");
    request_echoes(fd, 60, 3000);
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
}

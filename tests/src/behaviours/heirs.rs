//! Programs that use a connection which they have inherited at any number, after it has left TCP, while the process that started
//! them still has it.

use std::ffi::CString;

use super::Behaviour;
use super::inside_libc::service;
use super::peers::{asks_to_the_end, echo};
use crate::calls::{self, Fd, Leave, Program, fork, quietly};
use crate::say;
use crate::side::Side;

pub(super) const ALL: &[Behaviour] = &[
    service("marked_before_a_fork", marked_before),
    service("marked_by_ioctl", marked_by_ioctl),
    service("marked_by_the_child", marked_by_child),
    service("marked_by_a_vforked_child", marked_by_vforked_child),
    service("marked_and_spawned", marked_and_spawned),
    service("marked_for_a_shell", marked_for_shell),
    service("copied_by_the_child", copied_by_child),
    service("marked_copied_and_spawned_by_the_child", marked_copied_and_spawned),
    service("spawned_with_it_as_standard_input", spawned_with_standard_input),
    service("kept_by_a_child_that_closes_others", kept_by_tidy_child),
    Behaviour::connected("forgotten", forgotten, asks_to_the_end).alone(&["inherited-by-exec"]),
    Behaviour::connected("copied_and_forgotten", copied_and_forgotten, asks_to_the_end)
        .alone(&["inherited-by-exec"]),
    Behaviour::connected("forgotten_by_who_has_closed_others", forgotten_by_tidy, asks_to_the_end)
        .alone(&["inherited-by-exec"]),
];

/// Where a descriptor goes that has not been there.
const ELSEWHERE: Fd = 77;

fn echoes(fd: Fd) -> Program {
    Program::helper("echo", &[&fd.to_string()], false)
}

/// The program, and with it the last who uses the connection, is at its end.
fn is_done(side: &Side, fd: Fd) {
    calls::close(fd).expect("close");
    side.sync("done");
}

/// A child that does `first`, and becomes the program that echoes at `at`.
fn child_becomes(side: &Side, fd: Fd, at: Fd, first: impl FnOnce()) {
    let program = echoes(at);
    let child = fork(Leave::AtOnce, || {
        quietly(first);
        panic!("exec: {}", program.exec());
    });
    child.wait_for_success();
    is_done(side, fd);
}

fn mark(fd: Fd) {
    calls::set_close_on_exec(fd, false).expect("F_SETFD");
}

/// As Python's sockets are from the start.
fn unmark(fd: Fd) {
    calls::set_close_on_exec(fd, true).expect("F_SETFD");
}

fn marked_before(side: &Side, fd: Fd) {
    unmark(fd);
    mark(fd);
    child_becomes(side, fd, fd, || {});
}

fn marked_by_ioctl(side: &Side, fd: Fd) {
    unmark(fd);
    calls::keep_on_exec(fd).expect("FIONCLEX");
    child_becomes(side, fd, fd, || {});
}

fn marked_by_child(side: &Side, fd: Fd) {
    unmark(fd);
    child_becomes(side, fd, fd, || mark(fd));
}

/// As Python's `subprocess` does with `pass_fds`.
fn marked_by_vforked_child(side: &Side, fd: Fd) {
    unmark(fd);
    echoes(fd).vfork_and_exec(&[(fd, fd)]).expect("vfork").wait_for_success();
    is_done(side, fd);
}

fn marked_and_spawned(side: &Side, fd: Fd) {
    mark(fd);
    echoes(fd).spawn(&[]).expect("posix_spawn").wait_for_success();
    is_done(side, fd);
}

fn marked_for_shell(side: &Side, fd: Fd) {
    mark(fd);
    let helper = std::env::current_exe().expect("/proc is mounted");
    let command = format!("unset LD_PRELOAD; '{}' --helper echo {fd}", helper.display());
    let command = CString::new(command).expect("no path has a NUL byte");
    assert_eq!(calls::system(&command), 0, "the exit status");
    is_done(side, fd);
}

fn copied_by_child(side: &Side, fd: Fd) {
    child_becomes(side, fd, ELSEWHERE, || {
        calls::dup2(fd, ELSEWHERE).expect("dup2");
    });
}

/// That a child has given it one more number does not undo what has been said of the one it has.
fn marked_copied_and_spawned(side: &Side, fd: Fd) {
    unmark(fd);
    let child = fork(Leave::AtOnce, || {
        quietly(|| {
            mark(fd);
            calls::dup2(fd, ELSEWHERE).expect("dup2");
            unmark(ELSEWHERE);
        });
        echoes(fd).spawn(&[]).expect("posix_spawn").wait_for_success();
    });
    child.wait_for_success();
    is_done(side, fd);
}

/// Nothing but its number tells that the program is to use it.
fn spawned_with_standard_input(side: &Side, fd: Fd) {
    unmark(fd);
    let child = fork(Leave::AtOnce, || {
        quietly(|| calls::dup2(fd, libc::STDIN_FILENO)).expect("dup2");
        echoes(libc::STDIN_FILENO).spawn(&[]).expect("posix_spawn").wait_for_success();
    });
    child.wait_for_success();
    is_done(side, fd);
}

fn kept_by_tidy_child(side: &Side, fd: Fd) {
    let listener = quietly(|| side.listen_quietly());
    child_becomes(side, fd, fd, || calls::close(listener).expect("close"));
    quietly(|| calls::close(listener).expect("close"));
}

/// Programs that know of nothing, as a server starts them that marks nothing close-on-exec.
fn programs_start() {
    let (read_end, write_end) = quietly(calls::pipe).expect("pipe");
    quietly(|| calls::close(write_end)).expect("close");
    let program = Program::helper("wait", &[&read_end.to_string()], true);
    fork(Leave::AtOnce, || panic!("exec: {}", program.exec())).wait_for_success();
    program.spawn(&[]).expect("posix_spawn").wait_for_success();
}

fn forgotten(side: &Side, fd: Fd) {
    programs_start();
    say!("echoed {}", echo(fd));
    is_done(side, fd);
}

/// What the server has closed says nothing of the programs that its children become.
fn forgotten_by_tidy(side: &Side, fd: Fd) {
    quietly(|| {
        let listener = side.listen_quietly();
        calls::close(listener).expect("close");
    });
    forgotten(side, fd);
}

/// The same after the server has given the connection, which a child has, too, one more number.
fn copied_and_forgotten(side: &Side, fd: Fd) {
    let (read_end, write_end) = quietly(calls::pipe).expect("pipe");
    let child = fork(Leave::AtOnce, || {
        quietly(|| {
            calls::close(write_end).expect("close");
            assert_eq!(calls::read(read_end, 1), Ok(vec![]));
        });
    });
    quietly(|| calls::dup2(fd, ELSEWHERE)).expect("dup2");
    programs_start();
    say!("echoed {}", echo(fd));
    quietly(|| calls::close(write_end)).expect("close");
    child.wait_for_success();
    calls::close(ELSEWHERE).expect("close");
    is_done(side, fd);
}

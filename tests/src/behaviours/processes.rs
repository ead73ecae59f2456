//! Processes that share a connection, inherit it, or hand it on.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use thallus_transport::arena::{State, View};

use super::peers::{
    demand, echo, hand_to_child, own_arenas, request_echoes, send_all, sends_on_demand, stop,
};
use super::{Behaviour, Tally};
use crate::calls::{self, Child, End, Errno, Fd, Leave, Program, fork, quietly};
use crate::say;
use crate::side::{
    Pattern, Side, await_process_asleep, await_readable, await_stopped, receive_exactly, receive_pattern,
    send_pattern, while_blocked,
};

/// What a fork before the upgrade may end in.
const SHARED: &[&str] = &["shared-before-upgrade"];
/// The same, where a child is killed in a call before the upgrade.
const UNCOUNTED: &[&str] = &["shared-before-upgrade", "unseen-bytes"];

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::whole("child_serves", child_serves, asks, Tally::Upgraded(1)),
    Behaviour::whole("child_serves_and_leaves_at_once", child_serves_and_leaves, asks, Tally::Upgraded(1))
        .tally(Tally::Unknown, Tally::Upgraded(1)),
    Behaviour::whole("children_before_any_connection", children_before_connections, asks, Tally::Upgraded(1)),
    Behaviour::whole("a_child_for_each_connection", child_for_each, asks_on_five, Tally::Upgraded(5)),
    Behaviour::whole("children_accept", children_accept, asks_on_six, Tally::Upgraded(6)),
    Behaviour::whole("child_closes_in_a_fork_handler", child_closes_in_handler, asks, Tally::Upgraded(1)),
    Behaviour::whole("child_connects", waits_for_child, child_connects, Tally::Upgraded(1)),
    Behaviour::whole("served_by_a_grandchild", grandchild_serves, asks, Tally::Upgraded(1)),
    Behaviour::connected("parent_and_child_in_turn", in_turn, echoes).alone(SHARED),
    Behaviour::connected("child_reads_parent_writes", child_reads_parent_writes, echoes).alone(SHARED),
    Behaviour::connected("child_has_it_after_the_parent", child_after_parent, echoes).alone(SHARED),
    Behaviour::connected("child_closes_its_copy", child_closes, echoes).alone(SHARED),
    Behaviour::connected(
        "child_closes_what_the_parent_has_in_a_set",
        child_closes_beside_a_set,
        sends_on_demand,
    )
    .alone(SHARED),
    Behaviour::connected("child_exits_with_its_copy", child_exits, echoes).alone(SHARED),
    Behaviour::connected("child_is_killed_with_its_copy", child_killed, echoes).alone(SHARED),
    Behaviour::connected("beside_a_writer_that_is_killed", beside_a_killed_writer, answers_slowly)
        .alone(UNCOUNTED)
        .tally(Tally::Unknown, Tally::Upgraded(1)),
    Behaviour::connected("beside_a_writer_that_is_stopped", beside_a_stopped_writer, answers_slowly)
        .alone(UNCOUNTED)
        .tally(Tally::Unknown, Tally::Upgraded(1)),
    Behaviour::connected("end_only_after_the_child", end_after_child, notes_the_end).alone(SHARED),
    // Nobody knows that it was the last to let go, so nobody counts it.
    Behaviour::connected("eight_children_at_once", eight_children, echoes)
        .tally(Tally::Unknown, Tally::Upgraded(1))
        .alone(SHARED),
    Behaviour::connected("fifty_children_in_turn", fifty_children, echoes).alone(SHARED),
    Behaviour::connected("fork_while_a_thread_reads", fork_while_reading, sends_once),
    Behaviour::whole("programs_beside_young_connections", accepts_some, programs_beside, Tally::Total(FEW)),
    Behaviour::connected("programs_that_do_not_care", programs_that_do_not_care, echoes)
        .alone(&["inherited-by-exec"]),
    Behaviour::whole("beside_programs_that_children_became", beside_programs, asks, Tally::Upgraded(1)),
    Behaviour::connected("child_in_a_sandbox_of_its_own", child_in_sandbox, echoes)
        .alone(&["sandbox", "shared-before-upgrade"])
        .tally(Tally::Unknown, Tally::Returned(1)),
    Behaviour::connected("child_in_a_sandbox_and_a_peer_that_polls", child_in_sandbox, echoes_by_poll)
        .alone(&["sandbox", "shared-before-upgrade"])
        .tally(Tally::Unknown, Tally::Returned(1)),
    Behaviour::whole("where_a_program_cannot_be_started", beside_a_missing_program, asks, Tally::Total(1)),
    // Nothing of it changes anything, and the connection counts once.
    Behaviour::connected("beside_what_is_refused", beside_refusals, echoes),
    Behaviour::connected("forked_before_and_used_after", forked_before, echoes)
        .alone(SHARED)
        .tally(Tally::Total(1), Tally::Total(1)),
    Behaviour::whole("two_processes_before_the_upgrade", two_at_once, asks_ten, Tally::Total(1))
        .tally(Tally::Mixed(0, &[("shared-before-upgrade", 1)]), Tally::Stayed(1)),
];

fn asks(side: &Side) {
    let fd = side.connect();
    request_echoes(fd, 100, 3000);
    calls::close(fd).expect("close");
    say!("100 echoes");
    side.sync("done");
}

fn echoes(_side: &Side, fd: Fd) {
    say!("echoed {}", echo(fd));
}

/// As a postmaster and its backend.
fn child_serves(side: &Side) {
    serve_in_child(side, Leave::Exit);
}

fn child_serves_and_leaves(side: &Side) {
    serve_in_child(side, Leave::AtOnce);
}

fn serve_in_child(side: &Side, leave: Leave) {
    let listener = side.listen();
    let fd = side.accept(listener);
    let child = hand_to_child(fd, leave, || {
        calls::close(listener).expect("close");
        say!("echoed {}", echo(fd));
    });
    child.wait_for_success();
    side.sync("done");
}

/// Of a program that has not connected yet: they close the epoll set that another thread is changing.
fn children_before_connections(side: &Side) {
    let ended = AtomicBool::new(false);
    quietly(|| {
        let epfd = calls::epoll_create().expect("epoll_create1");
        std::thread::scope(|scope| {
            scope.spawn(|| quietly(|| change_set(epfd, &ended)));
            for _ in 0..100 {
                let close = || {
                    calls::close(epfd).expect("close");
                };
                fork(Leave::AtOnce, close).wait_for_success();
            }
            ended.store(true, Ordering::SeqCst);
        });
    });
    child_serves(side);
}

fn change_set(epfd: Fd, ended: &AtomicBool) {
    let (reading, _writing) = calls::pipe().expect("pipe");
    calls::epoll_add(epfd, reading, 0, 1).expect("EPOLL_CTL_ADD");
    while !ended.load(Ordering::SeqCst) {
        for events in [libc::EPOLLIN, 0] {
            calls::epoll_modify(epfd, reading, events, 1).expect("EPOLL_CTL_MOD");
        }
    }
}

/// As a server that has made its connections close-on-exec, and starts programs that live as long as they do.
fn beside_programs(side: &Side) {
    let listener = side.listen();
    let fd = calls::accept4(listener, libc::SOCK_CLOEXEC).expect("accept4");
    let (reading, writing) = quietly(calls::pipe).expect("pipe");
    let (started, starting) = quietly(calls::pipe).expect("pipe");
    quietly(|| {
        calls::set_close_on_exec(reading, false).expect("F_SETFD");
        calls::set_close_on_exec(writing, true).expect("F_SETFD");
        calls::set_close_on_exec(starting, true).expect("F_SETFD");
    });
    let program = Program::helper("wait", &[&reading.to_string()], true);
    let children: Vec<Child> = (0..3)
        .map(|_| {
            fork(Leave::AtOnce, || {
                let errno = program.exec();
                panic!("execve: {errno}");
            })
        })
        .collect();
    quietly(|| {
        calls::close(starting).expect("close");
        assert_eq!(calls::read(started, 1), Ok(vec![]), "all of them are programs");
    });
    say!("echoed {}", echo(fd));
    quietly(|| {
        calls::close(fd).expect("close");
        calls::close(writing).expect("close");
    });
    for child in children {
        child.wait_for_success();
    }
    side.sync("done");
}

/// As the part of sshd that talks to strangers: what it may not do kills it.
fn child_in_sandbox(_side: &Side, fd: Fd) {
    request_echoes(fd, 10, 3000);
    let child = fork(Leave::AtOnce, || {
        let memory = [libc::SYS_brk, libc::SYS_mmap, libc::SYS_munmap, libc::SYS_mremap, libc::SYS_madvise];
        let own = [libc::SYS_read, libc::SYS_write, libc::SYS_close, libc::SYS_exit_group];
        calls::allow_only(&[&memory[..], &own[..]].concat());
        for round in 0..20u64 {
            let message = Pattern::new(round).take(500);
            quietly(|| assert_eq!(calls::write(fd, &message), Ok(500)));
            let mut echoed = Vec::new();
            while echoed.len() < 500 {
                let more = quietly(|| calls::read(fd, 500 - echoed.len())).expect("read");
                assert!(!more.is_empty(), "the stream has ended");
                echoed.extend(more);
            }
            assert_eq!(echoed, message);
        }
    });
    child.wait_for_success();
    request_echoes(fd, 10, 3000);
    calls::close(fd).expect("close");
}

fn beside_refusals(_side: &Side, fd: Fd) {
    request_echoes(fd, 10, 3000);
    for _ in 0..3 {
        calls::ask_for_what_is_refused();
        assert_eq!(Program::missing().exec(), Errno::ENOENT);
        calls::set_close_on_exec(fd, true).expect("F_SETFD");
        assert_eq!(Program::folder().exec(), Errno::EACCES);
        calls::set_close_on_exec(fd, false).expect("F_SETFD");
        request_echoes(fd, 10, 3000);
    }
    calls::close(fd).expect("close");
}

/// As ssh, for which a connection that is said to be readable, and is not, has failed.
fn echoes_by_poll(side: &Side, fd: Fd) {
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    let mut total = 0;
    quietly(|| {
        loop {
            let ready = calls::poll(&[(fd, libc::POLLIN)], -1).expect("poll");
            let data = calls::recv(fd, 65536, 0).expect("it is readable");
            let hangup = if data.is_empty() { side.hangup_at_end() } else { 0 };
            assert_eq!(ready, [libc::POLLIN | hangup]);
            if data.is_empty() {
                break;
            }
            total += data.len();
            send_all(fd, &data);
        }
    });
    say!("echoed {total}");
}

/// The child that could not become a program goes on with the connection, which thus does not leave TCP before its end.
fn beside_a_missing_program(side: &Side) {
    let listener = side.listen();
    let fd = calls::accept4(listener, libc::SOCK_CLOEXEC).expect("accept4");
    let (parents_turn, from_child) = calls::pipe().expect("pipe");
    let (childs_turn, from_parent) = calls::pipe().expect("pipe");
    let echo_some = || {
        quietly(|| {
            for _ in 0..10 {
                send_all(fd, &calls::recv(fd, 65536, 0).expect("recv"));
            }
        });
    };
    let child = fork(Leave::Exit, || {
        assert_eq!(Program::missing().exec(), Errno::ENOENT);
        assert_eq!(Program::folder().exec(), Errno::EACCES);
        quietly(|| calls::write(from_child, b"t")).expect("write");
        quietly(|| calls::read(childs_turn, 1)).expect("read");
        echo_some();
    });
    quietly(|| calls::read(parents_turn, 1)).expect("read");
    echo_some();
    let arenas = own_arenas();
    let mut blocks = arenas.iter().flat_map(View::blocks);
    assert!(blocks.all(|(_, block)| block.state() != State::Active), "the child still has it");
    quietly(|| calls::write(from_parent, b"t")).expect("write");
    child.wait_for_success();
    say!("echoed {}", echo(fd) > 0);
    calls::close(fd).expect("close");
    side.sync("done");
}

fn child_for_each(side: &Side) {
    let listener = side.listen();
    let children: Vec<Child> = (0..5)
        .map(|_| {
            let fd = quietly(|| side.accept(listener));
            hand_to_child(fd, Leave::Exit, || {
                echo(fd);
            })
        })
        .collect();
    for child in children {
        child.wait_for_success();
    }
}

fn asks_on(side: &Side, count: usize) {
    let destination = side.destination();
    let fds: Vec<Fd> = (0..count).map(|_| quietly(|| side.connect_to(destination))).collect();
    for round in 0..40 {
        for &fd in &fds {
            request_echoes(fd, 1, 10 + round);
        }
    }
    say!("{count} connections answered");
}

fn asks_on_five(side: &Side) {
    asks_on(side, 5);
}

fn asks_on_six(side: &Side) {
    let destination = side.destination();
    for _ in 0..6 {
        let fd = quietly(|| side.connect_to(destination));
        request_echoes(fd, 40, 500);
        quietly(|| calls::close(fd)).expect("close");
    }
    say!("6 connections answered");
}

/// Processes that were forked first, and accept from the listener that they share.
fn children_accept(side: &Side) {
    let listener = side.listen_quietly();
    let children: Vec<Child> = (0..2)
        .map(|_| {
            fork(Leave::Exit, || {
                for _ in 0..3 {
                    let fd = quietly(|| side.accept(listener));
                    echo(fd);
                    quietly(|| calls::close(fd)).expect("close");
                }
            })
        })
        .collect();
    side.tell(u64::from(crate::side::listening_port(listener)));
    for child in children {
        child.wait_for_success();
    }
}

fn waits_for_child(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    say!("echoed {}", echo(fd));
}

fn child_connects(side: &Side) {
    let destination = side.destination();
    fork(Leave::Exit, || {
        let fd = side.connect_to(destination);
        request_echoes(fd, 100, 500);
        say!("100 echoes");
    })
    .wait_for_success();
}

/// As a daemon starts: the process in between is gone before the first byte.
fn grandchild_serves(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    let (reading, writing) = calls::pipe().expect("pipe");
    let (others, held_by_others) = quietly(calls::pipe).expect("pipe");
    fork(Leave::Exit, || {
        quietly(|| calls::close(reading)).expect("close");
        // The grandchild is on its own: nobody waits for it but at the pipe.
        let _ = fork(Leave::Exit, || {
            // Until nobody else has the connection.
            quietly(|| calls::close(held_by_others)).expect("close");
            assert_eq!(quietly(|| calls::read(others, 1)), Ok(vec![]));
            say!("echoed {}", echo(fd));
            side.sync("done");
        });
    })
    .wait_for_success();
    quietly(|| {
        calls::close(fd).expect("close");
        calls::close(held_by_others).expect("close");
        calls::close(writing).expect("close");
        assert_eq!(calls::read(reading, 1), Ok(vec![]));
    });
}

/// Runs `body` in a child, and waits for it.
fn in_child(body: impl FnOnce()) {
    fork(Leave::Exit, body).wait_for_success();
}

fn in_turn(_side: &Side, fd: Fd) {
    for round in 0..5 {
        request_echoes(fd, 5, 300);
        in_child(|| request_echoes(fd, 5 + round, 300));
    }
    let child = fork(Leave::Exit, || {
        assert_eq!(quietly(|| calls::recv(fd, 5, 0)), Ok(b"for y".to_vec()));
        say!("the child has its part");
    });
    send_all(fd, b"for you");
    child.wait_for_success();
    assert_eq!(receive_exactly(fd, 2), b"ou");
}

fn child_reads_parent_writes(_side: &Side, fd: Fd) {
    const LENGTH: usize = 3 << 20;
    let child = fork(Leave::Exit, || {
        receive_pattern(fd, &mut Pattern::new(31), LENGTH, 50_000);
        say!("received {LENGTH}");
    });
    send_pattern(fd, &mut Pattern::new(31), LENGTH, 30_000);
    child.wait_for_success();
    request_echoes(fd, 5, 300);
}

fn child_after_parent(_side: &Side, fd: Fd) {
    let (reading, writing) = quietly(calls::pipe).expect("pipe");
    let child = fork(Leave::Exit, || {
        assert_eq!(quietly(|| calls::read(reading, 1)), Ok(b"x".to_vec()));
        request_echoes(fd, 30, 3000);
        say!("30 echoes");
    });
    calls::close(fd).expect("close");
    quietly(|| calls::write(writing, b"x")).expect("write");
    child.wait_for_success();
}

fn child_closes(_side: &Side, fd: Fd) {
    in_child(|| {
        calls::close(fd).expect("close");
    });
    request_echoes(fd, 10, 300);
    in_child(|| {
        request_echoes(fd, 10, 300);
        calls::close(fd).expect("close");
    });
    request_echoes(fd, 10, 300);
}

static INHERITED: AtomicI32 = AtomicI32::new(-1);

extern "C" fn close_inherited() {
    quietly(|| {
        calls::close(INHERITED.load(Ordering::Relaxed)).expect("close");
        let set = calls::epoll_create().expect("epoll_create1");
        calls::close(set).expect("close");
    });
}

/// As libraries do that are prepared for forks. The handler is there before the first connection is.
fn child_closes_in_handler(side: &Side) {
    calls::at_fork_in_child(close_inherited);
    let listener = side.listen();
    let fd = side.accept(listener);
    quietly(|| {
        let mut echoed = 0;
        while echoed < 50_000 {
            let part = calls::recv(fd, 4096, 0).expect("recv");
            send_all(fd, &part);
            echoed += part.len();
        }
    });
    INHERITED.store(fd, Ordering::Relaxed);
    in_child(|| {});
    quietly(|| echo(fd));
    side.sync("done");
}

/// The registrations stay the parent's, both one that has been reported and one that is made again.
fn child_closes_beside_a_set(side: &Side, fd: Fd) {
    const IN: u32 = libc::EPOLLIN as u32;
    let epfd = calls::epoll_create().expect("epoll_create1");
    let is_told = |data: u64| {
        // For so long that nothing is expected of the connection any more.
        for _ in 0..20 {
            assert_eq!(quietly(|| calls::epoll_wait(epfd, 4, 1)), Ok(vec![]));
        }
        let told = while_blocked(|| calls::epoll_wait(epfd, 4, -1), || demand(side)).expect("epoll_wait");
        assert_eq!(told.iter().map(|ready| (ready.events, ready.data)).collect::<Vec<_>>(), [(IN, data)]);
        assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    };
    let close = || calls::close(fd).expect("close");
    calls::epoll_add(epfd, fd, libc::EPOLLIN | libc::EPOLLONESHOT, 1).expect("EPOLL_CTL_ADD");
    is_told(1);
    in_child(close);
    calls::epoll_modify(epfd, fd, libc::EPOLLIN, 2).expect("EPOLL_CTL_MOD");
    is_told(2);
    calls::epoll_delete(epfd, fd).expect("EPOLL_CTL_DEL");
    in_child(close);
    calls::epoll_add(epfd, fd, libc::EPOLLIN, 3).expect("EPOLL_CTL_ADD");
    is_told(3);
    stop(side);
}

fn child_exits(_side: &Side, fd: Fd) {
    in_child(|| {});
    request_echoes(fd, 10, 300);
    fork(Leave::AtOnce, || request_echoes(fd, 10, 300)).wait_for_success();
    request_echoes(fd, 10, 300);
}

fn child_killed(_side: &Side, fd: Fd) {
    for used in [false, true] {
        let child = fork(Leave::Exit, || {
            if used {
                request_echoes(fd, 10, 300);
            }
            calls::kill_self();
        });
        assert_eq!(child.wait(), End::Signal(libc::SIGKILL));
        request_echoes(fd, 10, 300);
    }
}

/// More than there would be room for in the kernel's buffer, if each left a bell there.
const ANSWERS: usize = 300;

fn beside_a_killed_writer(side: &Side, fd: Fd) {
    let writer = writes_until_it_sleeps(fd);
    calls::kill(writer.0, libc::SIGKILL).expect("kill");
    assert_eq!(writer.wait(), End::Signal(libc::SIGKILL));
    asks_slowly(side, fd);
}

fn beside_a_stopped_writer(side: &Side, fd: Fd) {
    let writer = writes_until_it_sleeps(fd);
    calls::kill(writer.0, libc::SIGSTOP).expect("kill");
    await_stopped(writer.0);
    asks_slowly(side, fd);
    calls::kill(writer.0, libc::SIGKILL).expect("kill");
    assert_eq!(writer.wait(), End::Signal(libc::SIGKILL));
}

/// A child that sends without end.
fn writes_until_it_sleeps(fd: Fd) -> Child {
    let data = vec![b'x'; 1 << 20];
    let writer = fork(Leave::AtOnce, || {
        loop {
            quietly(|| calls::send(fd, &data, 0)).expect("send");
        }
    });
    await_process_asleep(writer.0);
    writer
}

/// Sleeps before each answer.
fn asks_slowly(side: &Side, fd: Fd) {
    side.sync("it does not run");
    send_all(fd, b"q");
    side.sync("all of it has been read");
    for round in 0..ANSWERS {
        send_all(fd, b"q");
        assert_eq!(receive_exactly(fd, 1), b"r", "answer {round}");
    }
    say!("answered");
}

fn answers_slowly(side: &Side, fd: Fd) {
    side.sync("it does not run");
    quietly(|| while calls::recv(fd, 65536, 0).expect("recv").last() == Some(&b'x') {});
    side.sync("all of it has been read");
    for round in 0..ANSWERS {
        assert_eq!(receive_exactly(fd, 1), b"q", "question {round}");
        std::thread::sleep(Duration::from_millis(1));
        send_all(fd, b"r");
    }
}

fn end_after_child(side: &Side, fd: Fd) {
    let (reading, writing) = calls::pipe().expect("pipe");
    let child = fork(Leave::Exit, || {
        quietly(|| calls::close(writing)).expect("close");
        assert_eq!(quietly(|| calls::read(reading, 1)), Ok(vec![]));
    });
    calls::close(fd).expect("close");
    side.sync("closed here");
    side.sync("no end yet");
    calls::close(writing).expect("close");
    child.wait_for_success();
    side.sync("closed there");
}

fn notes_the_end(side: &Side, fd: Fd) {
    side.sync("closed here");
    assert_eq!(calls::poll(&[(fd, libc::POLLIN)], 0), Ok(vec![0]));
    side.sync("no end yet");
    side.sync("closed there");
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
}

fn fifty_children(_side: &Side, fd: Fd) {
    quietly(|| {
        for _ in 0..50 {
            in_child(|| request_echoes(fd, 2, 300));
        }
    });
    request_echoes(fd, 2, 300);
    say!("50 children");
}

/// More processes have the connection than are remembered one by one; each uses it while the others live.
fn eight_children(_side: &Side, fd: Fd) {
    let children: Vec<_> = quietly(|| {
        (0..8)
            .map(|_| {
                let turn = calls::pipe().expect("pipe");
                let done = calls::pipe().expect("pipe");
                let child = fork(Leave::Exit, || {
                    calls::close(turn.1).expect("close");
                    for _ in 0..2 {
                        calls::read(turn.0, 1).expect("read");
                        request_echoes(fd, 3, 300);
                        calls::write(done.1, b"x").expect("write");
                    }
                    calls::read(turn.0, 1).expect("read");
                    request_echoes(fd, 3, 300);
                    calls::close(fd).expect("close");
                });
                (child, turn, done)
            })
            .collect()
    });
    for _ in 0..2 {
        for (_, turn, done) in &children {
            quietly(|| {
                calls::write(turn.1, b"x").expect("write");
                calls::read(done.0, 1).expect("read");
            });
            request_echoes(fd, 1, 300);
        }
    }
    // Those who came first go first: the last was not remembered.
    calls::close(fd).expect("close");
    for (child, turn, _) in children {
        quietly(|| calls::write(turn.1, b"x")).expect("write");
        child.wait_for_success();
    }
    say!("8 children");
}

fn fork_while_reading(side: &Side, fd: Fd) {
    let data = while_blocked(
        || calls::recv(fd, 10, 0),
        || {
            for _ in 0..5 {
                // Its child has only the thread that forked, and leaves without touching what others hold.
                quietly(|| fork(Leave::AtOnce, || {}).wait_for_success());
            }
            side.sync("send now");
        },
    );
    assert_eq!(data, Ok(b"data".to_vec()));
    side.sync("done");
}

fn sends_once(side: &Side, fd: Fd) {
    side.sync("send now");
    assert_eq!(calls::send(fd, b"data", 0), Ok(4));
    side.sync("done");
}

/// Connections, and messages on each: enough for it to be offered to the peer, whose calls are too few.
const FEW: u64 = 20;
const MESSAGES: usize = 12;

fn accepts_some(side: &Side) {
    let listener = side.listen();
    let fds: Vec<Fd> = (0..FEW).map(|_| side.accept(listener)).collect();
    side.sync("done");
    for fd in fds {
        assert_eq!(receive_exactly(fd, MESSAGES).len(), MESSAGES);
    }
}

/// Nothing is left open of connections that are closed while a program that inherits them runs.
fn programs_beside(side: &Side) {
    let program = Program::helper("nothing", &[], false);
    let destination = side.destination();
    let before = every_descriptor();
    let fds: Vec<Fd> = (0..FEW).map(|_| side.connect_to(destination)).collect();
    for &fd in &fds {
        (0..MESSAGES).for_each(|_| assert_eq!(quietly(|| calls::send(fd, b"m", 0)), Ok(1)));
    }
    quietly(|| program.vfork_and_exec(&[])).expect("vfork").wait_for_success();
    quietly(|| fds.into_iter().for_each(|fd| calls::close(fd).expect("close")));
    // What the library keeps for all connections.
    assert!(every_descriptor() < before + 10, "{} descriptors, {before} before", every_descriptor());
    side.sync("done");
}

/// How many are open, the library's among them.
fn every_descriptor() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc is mounted").count()
}

/// As system(3) does: programs with and without the library inherit the connection and leave it alone.
fn programs_that_do_not_care(_side: &Side, fd: Fd) {
    for shimmed in [true, false] {
        let program = Program::helper("nothing", &[], shimmed);
        program.spawn(&[]).expect("posix_spawn").wait_for_success();
        request_echoes(fd, 10, 300);
        program.vfork_and_exec(&[]).expect("vfork").wait_for_success();
        request_echoes(fd, 10, 300);
        in_child(|| panic!("exec: {}", program.exec()));
        request_echoes(fd, 10, 300);
    }
}

/// A child that was forked before the first byte looks on while its parent has the connection upgraded, and
/// uses it later.
fn forked_before(_side: &Side, fd: Fd) {
    let (reading, writing) = calls::pipe().expect("pipe");
    let child = fork(Leave::Exit, || {
        quietly(|| calls::close(writing)).expect("close");
        assert_eq!(quietly(|| calls::read(reading, 1)), Ok(vec![]));
        request_echoes(fd, 10, 300);
    });
    request_echoes(fd, 20, 300);
    calls::close(writing).expect("close");
    child.wait_for_success();
    request_echoes(fd, 10, 300);
}

/// Parent and child take requests in turn, from the first one on.
fn two_at_once(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    let (parents_turn, from_child) = calls::pipe().expect("pipe");
    let (childs_turn, from_parent) = calls::pipe().expect("pipe");
    let answer = |mine: Fd, theirs: Fd| {
        quietly(|| {
            for _ in 0..5 {
                assert_eq!(calls::read(mine, 1), Ok(b"t".to_vec()));
                let request = receive_exactly(fd, 3);
                send_all(fd, &request);
                assert_eq!(calls::write(theirs, b"t"), Ok(1));
            }
        });
    };
    let child = fork(Leave::Exit, || answer(childs_turn, from_child));
    quietly(|| calls::write(from_parent, b"t")).expect("write");
    answer(parents_turn, from_parent);
    child.wait_for_success();
}

fn asks_ten(side: &Side) {
    let fd = side.connect();
    for _ in 0..10 {
        send_all(fd, b"ask");
        await_readable(fd);
        assert_eq!(receive_exactly(fd, 3), b"ask");
    }
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
}

//! Connections that leave the library's sight: exec, SCM_RIGHTS, stdio, other listeners.

use super::epoll_edges::{sends_over_tcp_and_looks, with_bytes_on_tcp, with_bytes_put_aside};
use super::peers::{
    MOMENTS, accept_for_a_moment, asks_to_the_end, connect_for_a_moment, demand, echo, request_echoes,
    send_all, sends_on_demand, stop,
};
use super::switching::{Wait, stream_both_ways, stream_nonblocking};
use super::{Behaviour, Tally};
use crate::calls::{self, Beside, Errno, Fd, Leave, Program, Stdio, fork, quietly};
use crate::say;
use crate::side::{ARRIVAL, Side, receive_exactly, while_blocked};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::whole("to_an_inetd_service", inetd, asks, Tally::Total(1))
        .tally(Tally::StayedOrUncounted, Tally::Stayed(1)),
    Behaviour::whole("to_a_spawned_program", spawned, asks, Tally::Total(1))
        .alone(&["inherited-by-exec"])
        .tally(Tally::StayedOrUncounted, Tally::Stayed(1)),
    Behaviour::whole("to_a_vforked_program", vforked, asks, Tally::Total(1))
        .alone(&["inherited-by-exec"])
        .tally(Tally::StayedOrUncounted, Tally::Stayed(1)),
    Behaviour::whole("to_a_shimmed_program", shimmed, asks, Tally::Total(1))
        .tally(Tally::Unknown, Tally::Total(1)),
    Behaviour::whole("from_the_connecting_side", echo_server, program_asks, Tally::Total(1))
        .alone(&["inherited-by-exec"])
        .tally(Tally::Stayed(1), Tally::StayedOrUncounted),
    Behaviour::connected("to_a_program_after_the_upgrade", after_upgrade, asks_to_the_end)
        .tally(Tally::Unknown, Tally::Returned(1)),
    Behaviour::connected("to_a_shimmed_program_after_the_upgrade", after_upgrade_shimmed, asks_to_the_end)
        .tally(Tally::Unknown, Tally::Returned(1)),
    Behaviour::whole("to_another_process_with_rights", passes, asks, Tally::Total(1))
        .alone(&["passed-to-process"])
        .tally(Tally::StayedOrUncounted, Tally::Stayed(1)),
    Behaviour::connected("to_a_vforked_program_after_the_upgrade", vforked_after, asks_to_the_end)
        .alone(&["inherited-by-exec"])
        .tally(Tally::Unknown, Tally::Returned(1)),
    passed("to_another_process_after_the_upgrade", passed_after, asks_to_the_end)
        .tally(Tally::Unknown, Tally::Returned(1)),
    passed("by_a_socket_of_a_high_number", passed_from_high_up, asks_to_the_end)
        .tally(Tally::Unknown, Tally::Returned(1)),
    Behaviour::whole("both_of_one_message", passes_two, asks_of_both, Tally::Returned(2))
        .alone(&["passed-to-process"])
        .tally(Tally::Unknown, Tally::Returned(2)),
    Behaviour::whole("by_both_ends_at_once", serves_and_passes, asks_and_passes, Tally::Returned(CHANCES))
        .alone(&["passed-to-process"]),
    passed("to_another_process_with_unread_bytes", passed_unread, sends_before_it_is_passed)
        .tally(Tally::Unknown, Tally::Returned(1)),
    passed("to_another_process_with_a_bell_unread", passed_once_woken, wakes_and_asks)
        .tally(Tally::Unknown, Tally::Returned(1)),
    Behaviour::whole(
        "to_another_process_with_bytes_put_aside",
        passes_what_is_put_aside,
        sends_more_by_the_ring,
        Tally::Returned(1),
    )
    .alone(&["passed-to-process"])
    .tally(Tally::Unknown, Tally::Returned(1)),
    Behaviour::whole(
        "to_another_process_with_bytes_before_a_bell",
        passes_what_is_before_a_bell,
        sends_more_by_the_ring,
        Tally::Returned(1),
    )
    .alone(&["passed-to-process"])
    .tally(Tally::Unknown, Tally::Returned(1)),
    passed("to_another_process_with_much_unread", passed_much_unread, sends_much_before_it_is_passed)
        .limitation("**Bytes that the peer has sent and this side has not read**"),
    passed("a_peer_with_much_under_way_goes_on", tries_to_pass, is_not_blocked),
    passed("to_another_process_after_the_end", passed_after_the_end, ends_before_it_is_passed)
        .tally(Tally::Unknown, Tally::Returned(1)),
    passed(
        "to_another_process_after_an_end_with_nothing_after_it",
        passed_after_the_end,
        ends_and_calls_no_more,
    )
    .tally(Tally::Unknown, Tally::Upgraded(1)),
    passed("to_another_process_after_the_close", passed_after_the_end, closes_before_it_is_passed)
        .tally(Tally::Unknown, Tally::Upgraded(1)),
    Behaviour::whole("in_mid_stream", hands_on_in_mid_stream, streams_through, Tally::Unknown)
        .alone(&["passed-to-process", "inherited-by-exec"])
        .tally(Tally::Unknown, Tally::AtLeast(RUNS / 2, RUNS)),
    Behaviour::whole("to_stdio", stdio, talks_in_lines, Tally::Total(1))
        .alone(&["stdio"])
        .tally(Tally::StayedOrUncounted, Tally::Stayed(1)),
    Behaviour::connected("to_stdio_after_the_upgrade", stdio_after, talks_in_lines_after)
        .alone(&["stdio"])
        // What libc's stdio moves, no hook counts.
        .tally(Tally::Unknown, Tally::Returned(1)),
    Behaviour::connected("to_stdio_what_poll_has_told_of", stdio_told, sends_and_waits)
        .alone(&["stdio"])
        .tally(Tally::Unknown, Tally::Returned(1)),
    Behaviour::connected("to_stdio_from_an_epoll_set", stdio_from_a_set, sends_on_demand)
        .alone(&["stdio"])
        .tally(Tally::Unknown, Tally::Returned(1)),
    Behaviour::whole("of_a_peer_that_only_reads", only_reads, splices_when_read, Tally::Returned(1))
        .alone(&["unsupported-call"])
        // What is spliced no hook counts.
        .tally(Tally::Returned(1), Tally::Unknown)
        // A server that has not answered is no peer there.
        .over_verbs(Tally::Stayed(1), Tally::Stayed(1)),
    Behaviour::connected("used_on_in_event_loops", goes_on_by_epoll, asks_twice)
        .alone(&["unsupported-call"])
        .tally(Tally::Returned(1), Tally::Returned(1)),
    Behaviour::whole("an_end_at_the_same_moment", goes_back_at_once, ends_at_once, Tally::Unknown)
        .alone(&["unsupported-call"])
        .tally(Tally::Unknown, Tally::Total(MOMENTS)),
    Behaviour::connected("urgent_data_after_the_upgrade", urgent_after, sends_urgent_after)
        .alone(&["oob"])
        .tally(Tally::Returned(1), Tally::Returned(1)),
    Behaviour::connected("sends_without_a_copy", sends_without_a_copy, echoes_to_the_end)
        .alone(&["zerocopy"])
        .tally(Tally::Returned(1), Tally::Returned(1))
        .tcp_only(),
    Behaviour::whole(
        "sends_without_a_copy_from_the_start",
        server_without_a_copy,
        echoing_client,
        Tally::Total(1),
    )
    .alone(&["zerocopy"])
    .tally(Tally::Mixed(0, &[("zerocopy", 1)]), Tally::Stayed(1))
    .tcp_only(),
    Behaviour::whole("accepted_by_an_unshimmed_child", unshimmed_accepts, asks_of_two, Tally::Total(10))
        .tally(Tally::Upgraded(5), Tally::Mixed(5, &[("no-answer", 5)]))
        // The child takes the greeting for the client's bytes, and sends it back.
        .over_verbs(Tally::Upgraded(5), Tally::Mixed(5, &[("bad-offer", 5)])),
    Behaviour::whole("accepted_by_an_unshimmed_sibling", sibling_accepts, asks_of_siblings, Tally::Total(20))
        .tally(Tally::Unknown, Tally::Total(20))
        // `SO_REUSEPORT` is for ports.
        .tcp_only(),
    Behaviour::whole("urgent_data", urgent, sends_urgent, Tally::Total(1))
        .tally(Tally::Mixed(0, &[("oob", 1)]), Tally::Mixed(0, &[("oob", 1)])),
];

/// An upgraded connection is passed on by `SCM_RIGHTS`.
const fn passed(name: &'static str, left: fn(&Side, Fd), right: fn(&Side, Fd)) -> Behaviour {
    Behaviour::connected(name, left, right).alone(&["passed-to-process"])
}

fn asks(side: &Side) {
    asks_to_the_end(side, side.connect());
}

fn accept_one(side: &Side) -> Fd {
    let listener = side.listen();
    let fd = side.accept(listener);
    calls::close(listener).expect("close");
    fd
}

/// Runs a program in a child as inetd does, with the connection as descriptors 0 and 1.
fn run_as_service(fd: Fd, shimmed: bool) {
    let child = fork(Leave::Exit, || {
        let program = Program::helper("echo", &["0"], shimmed);
        quietly(|| calls::dup2(fd, 0)).expect("dup2");
        quietly(|| calls::dup2(fd, 1)).expect("dup2");
        quietly(|| calls::close(fd)).expect("close");
        panic!("exec: {}", program.exec());
    });
    calls::close(fd).expect("close");
    child.wait_for_success();
}

fn inetd(side: &Side) {
    run_as_service(accept_one(side), false);
    side.sync("done");
}

fn shimmed(side: &Side) {
    run_as_service(accept_one(side), true);
    side.sync("done");
}

fn after_upgrade(side: &Side, fd: Fd) {
    run_as_service(fd, false);
    side.sync("done");
}

fn after_upgrade_shimmed(side: &Side, fd: Fd) {
    run_as_service(fd, true);
    side.sync("done");
}

/// As Python's `subprocess` starts a program whose standard input and output are the connection.
fn vforked_after(side: &Side, fd: Fd) {
    let program = Program::helper("echo", &["0"], false);
    let child = program.vfork_and_exec(&[(fd, 0), (fd, 1)]).expect("vfork");
    quietly(|| calls::close(fd)).expect("close");
    child.wait_for_success();
    side.sync("done");
}

fn spawned(side: &Side) {
    let fd = accept_one(side);
    let child = Program::helper("echo", &["0"], false).spawn(&[(fd, 0), (fd, 1)]).expect("posix_spawn");
    calls::close(fd).expect("close");
    child.wait_for_success();
    side.sync("done");
}

fn vforked(side: &Side) {
    let fd = accept_one(side);
    let child = Program::helper("echo", &[&fd.to_string()], false).vfork_and_exec(&[]).expect("vfork");
    quietly(|| calls::close(fd)).expect("close");
    child.wait_for_success();
    side.sync("done");
}

fn echo_server(side: &Side) {
    let fd = accept_one(side);
    say!("echoed {}", echo(fd));
}

fn program_asks(side: &Side) {
    let fd = side.connect();
    let program = Program::helper("ask", &[&fd.to_string()], false);
    program.spawn(&[]).expect("posix_spawn").wait_for_success();
}

/// A process that waits for a connection over an `AF_UNIX` socket, and echoes on it.
fn receiver(local: Fd, remote: Fd) -> calls::Child {
    fork(Leave::Exit, || {
        quietly(|| calls::close(remote)).expect("close");
        let message = quietly(|| calls::recvmsg(local, &[1], 1, 0)).expect("recvmsg");
        say!("echoed {}", echo(message.fds[0]));
    })
}

fn passes(side: &Side) {
    let (local, remote) = calls::unix_pair().expect("socketpair");
    let child = receiver(local, remote);
    let fd = accept_one(side);
    // The child may be faster with what it has to say.
    assert_eq!(quietly(|| calls::send_fd(remote, b"x", fd)), Ok(1));
    quietly(|| calls::close(fd)).expect("close");
    child.wait_for_success();
    side.sync("done");
}

fn passed_after(side: &Side, fd: Fd) {
    pass_all(&[fd], &[]);
    side.sync("done");
}

/// Beyond the numbers that are quick to look up.
fn passed_from_high_up(side: &Side, fd: Fd) {
    let (local, remote) = calls::unix_pair().expect("socketpair");
    let high = calls::dup_from(remote, 5000).expect("F_DUPFD");
    calls::close(remote).expect("close");
    let child = fork(Leave::Exit, || {
        for other in [fd, high] {
            quietly(|| calls::close(other)).expect("close");
        }
        let message = quietly(|| calls::recvmsg(local, &[1], 1, 0)).expect("recvmsg");
        echo(message.fds[0]);
    });
    assert_eq!(quietly(|| calls::send_fd(high, b"x", fd)), Ok(1));
    for own in [fd, high, local] {
        quietly(|| calls::close(own)).expect("close");
    }
    assert_eq!(child.wait(), calls::End::Exit(0));
    side.sync("done");
}

/// Connections one after the other: at each both ends may be at any step when the other begins.
const CHANCES: u64 = 100;

/// The descriptor is on its way for a moment. No byte is on the connection meanwhile.
fn passes_for_a_moment(side: &Side, fd: Fd) {
    let (local, remote) = quietly(calls::unix_pair).expect("socketpair");
    side.sync("now");
    let passes = || calls::sendmsg_with(remote, &[b"x"], Beside { fds: &[fd], ..Beside::default() }, 0);
    assert_eq!(quietly(passes), Ok(1));
    for end in [local, remote] {
        quietly(|| calls::close(end)).expect("close");
    }
    send_all(fd, b"hello");
    assert_eq!(receive_exactly(fd, 5), b"hello");
    quietly(|| calls::close(fd)).expect("close");
}

fn serves_and_passes(side: &Side) {
    let listener = side.listen();
    for _ in 0..CHANCES {
        let fd = quietly(|| side.accept(listener));
        side.answer_warm_up(fd);
        passes_for_a_moment(side, fd);
    }
}

fn asks_and_passes(side: &Side) {
    let destination = side.destination();
    for _ in 0..CHANCES {
        let fd = quietly(|| side.connect_to(destination));
        side.warm_up(fd);
        passes_for_a_moment(side, fd);
    }
}

fn passes_two(side: &Side) {
    let listener = side.listen();
    let accepted = [(); 2].map(|()| {
        let fd = side.accept(listener);
        side.answer_warm_up(fd);
        fd
    });
    pass_all(&accepted, &[listener]);
    side.sync("done");
}

/// Passes the connections in one message to a process that echoes on one after the other, and waits for it. As a process of its own would,
/// it knows them only from the message, and has none of `others`.
fn pass_all(fds: &[Fd], others: &[Fd]) {
    let (local, remote) = calls::unix_pair().expect("socketpair");
    let child = fork(Leave::Exit, || {
        for &fd in fds.iter().chain(others).chain(&[remote]) {
            quietly(|| calls::close(fd)).expect("close");
        }
        let message = quietly(|| calls::recvmsg(local, &[1], fds.len(), 0)).expect("recvmsg");
        assert_eq!(message.fds.len(), fds.len());
        for fd in message.fds {
            say!("echoed {}", echo(fd));
            quietly(|| calls::close(fd)).expect("close");
        }
    });
    // The child may be faster with what it has to say.
    assert_eq!(
        quietly(|| calls::sendmsg_with(remote, &[b"x"], Beside { fds, ..Beside::default() }, 0)),
        Ok(1)
    );
    for &fd in fds {
        quietly(|| calls::close(fd)).expect("close");
    }
    child.wait_for_success();
}

fn asks_of_both(side: &Side) {
    let destination = side.destination();
    let connected = [(); 2].map(|()| {
        let fd = side.connect_to(destination);
        side.warm_up(fd);
        fd
    });
    for fd in connected {
        request_echoes(fd, 60, 3000);
        calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
        assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
    }
    side.sync("done");
}

/// What has not been read when it is passed, the other process reads.
fn passed_unread(side: &Side, fd: Fd) {
    side.sync("sent");
    passed_after(side, fd);
}

fn sends_before_it_is_passed(side: &Side, fd: Fd) {
    send_all(fd, &[b'u'; 5000]);
    side.sync("sent");
    assert_eq!(receive_exactly(fd, 5000), [b'u'; 5000]);
    asks_to_the_end(side, fd);
}

/// What woke this side is not the application's, and must not get to the other process.
fn passed_once_woken(side: &Side, fd: Fd) {
    let woken =
        while_blocked(|| quietly(|| calls::poll(&[(fd, libc::POLLIN)], ARRIVAL)), || side.sync("asleep"));
    assert_eq!(woken, Ok(vec![libc::POLLIN]));
    side.sync("woken");
    passed_after(side, fd);
}

fn wakes_and_asks(side: &Side, fd: Fd) {
    side.sync("asleep");
    send_all(fd, &[b'u'; 5000]);
    side.sync("woken");
    assert_eq!(receive_exactly(fd, 5000), [b'u'; 5000]);
    asks_to_the_end(side, fd);
}

const MUCH: usize = 1_500_000;

fn passed_much_unread(side: &Side, fd: Fd) {
    side.sync("sent");
    passed_after(side, fd);
}

fn sends_much_before_it_is_passed(side: &Side, fd: Fd) {
    calls::set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, 2 << 20).expect("SO_SNDBUF");
    send_all(fd, &[b'u'; MUCH]);
    side.sync("sent");
    assert_eq!(receive_exactly(fd, MUCH), [b'u'; MUCH]);
    asks_to_the_end(side, fd);
}

/// What is under way to this side is more than the peer's socket could hold, so the way back would block the peer.
fn tries_to_pass(side: &Side, fd: Fd) {
    side.sync("sent");
    quietly(|| {
        let (here, there) = calls::unix_pair().expect("socketpair");
        let _ = calls::send_fd(here, b"x", fd);
        calls::close(here).expect("close");
        calls::close(there).expect("close");
    });
    side.sync("tried");
    assert_eq!(receive_exactly(fd, MUCH), [b'u'; MUCH]);
}

fn is_not_blocked(side: &Side, fd: Fd) {
    calls::set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, 2 << 20).expect("SO_SNDBUF");
    send_all(fd, &[b'u'; MUCH]);
    side.sync("sent");
    loop {
        assert!(quietly(|| calls::recv(fd, 1, libc::MSG_DONTWAIT)).is_err());
        if side.is_awaited() {
            break;
        }
    }
    side.sync("tried");
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
}

/// Whoever gets a connection whose stream has ended sees the end, too.
fn passed_after_the_end(side: &Side, fd: Fd) {
    assert_eq!(receive_exactly(fd, 3), b"bye");
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
    side.sync("read");
    passed_after(side, fd);
}

fn ends_before_it_is_passed(side: &Side, fd: Fd) {
    send_all(fd, b"bye");
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    side.sync("read");
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
    side.sync("done");
}

/// What the other side is passed on to hears of the end though no call follows here.
fn ends_and_calls_no_more(side: &Side, fd: Fd) {
    send_all(fd, b"bye");
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    side.sync("read");
    side.sync("done");
}

fn closes_before_it_is_passed(side: &Side, fd: Fd) {
    send_all(fd, b"bye");
    calls::close(fd).expect("close");
    side.sync("read");
    side.sync("done");
}

const RUNS: u64 = 18;
const LENGTH: usize = 60_000;

/// Echoes some bytes, and has another program, or another process, echo the rest.
fn hands_on_in_mid_stream(side: &Side) {
    let listener = side.listen();
    quietly(|| {
        for run in 0..RUNS {
            let fd = side.accept(listener);
            side.send_at_once(fd);
            let mut left = run as usize * 7919 % (LENGTH * 2 / 3);
            while left > 0 {
                let data = calls::recv(fd, left.min(4096), 0).expect("recv");
                send_all(fd, &data);
                left -= data.len();
            }
            if run % 2 == 0 {
                run_as_service(fd, run % 4 == 0);
            } else {
                let (local, remote) = calls::unix_pair().expect("socketpair");
                let child = receiver(local, remote);
                assert_eq!(calls::send_fd(remote, b"x", fd), Ok(1));
                calls::close(fd).expect("close");
                calls::close(remote).expect("close");
                calls::close(local).expect("close");
                child.wait_for_success();
            }
        }
    });
    say!("{RUNS} connections echoed");
    side.sync("done");
}

fn streams_through(side: &Side) {
    let destination = side.destination();
    quietly(|| {
        for run in 0..RUNS {
            let fd = side.connect_to(destination);
            side.send_at_once(fd);
            match run % 3 {
                0 => stream_both_ways(fd, run, run, LENGTH),
                1 => stream_nonblocking(fd, run, run, LENGTH, u64::MAX, Wait::Poll),
                _ => stream_nonblocking(fd, run, run, LENGTH, u64::MAX, Wait::EdgeTriggeredEpoll),
            }
            calls::close(fd).expect("close");
        }
    });
    say!("{RUNS} connections used");
    side.sync("done");
}

/// One set of each kind watches it before and after a call for which it has to go back to TCP.
fn goes_on_by_epoll(side: &Side, fd: Fd) {
    let sets = [0, libc::EPOLLET].map(|edge| {
        let epfd = calls::epoll_create().expect("epoll_create1");
        calls::epoll_add(epfd, fd, libc::EPOLLIN | edge, 1).expect("EPOLL_CTL_ADD");
        epfd
    });
    for round in 0..40 {
        for epfd in sets {
            assert_eq!(calls::epoll_wait(epfd, 4, -1).map(|ready| ready.len()), Ok(1));
        }
        let request = receive_exactly(fd, 10);
        if round == 20 {
            calls::set_status(fd, libc::O_RDWR | libc::O_ASYNC).expect("F_SETFL");
        }
        send_all(fd, &request);
    }
    side.sync("done");
}

fn asks_twice(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, libc::EPOLLIN | libc::EPOLLET, 1).expect("EPOLL_CTL_ADD");
    for _ in 0..40 {
        send_all(fd, b"0123456789");
        assert_eq!(calls::epoll_wait(epfd, 4, -1).map(|ready| ready.len()), Ok(1));
        assert_eq!(calls::recv(fd, 100, 0), Ok(b"0123456789".to_vec()));
    }
    side.sync("done");
}

fn goes_back_at_once(side: &Side) {
    let listener = side.listen();
    for number in 0..MOMENTS {
        let fd = accept_for_a_moment(side, listener, number);
        calls::set_status(fd, libc::O_RDWR | libc::O_ASYNC).expect("F_SETFL");
        assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
        side.sync("read");
        calls::close(fd).expect("close");
    }
}

/// The end may come while the other side is on its way back; nothing follows it.
fn ends_at_once(side: &Side) {
    let destination = side.destination();
    for number in 0..MOMENTS {
        let fd = connect_for_a_moment(side, destination, number);
        calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
        side.sync("read");
        calls::close(fd).expect("close");
    }
}

fn urgent_after(side: &Side, fd: Fd) {
    side.sync("sent");
    let ready = calls::poll(&[(fd, libc::POLLPRI)], crate::side::ARRIVAL);
    assert_eq!(ready, Ok(vec![libc::POLLPRI]));
    assert_eq!(calls::recv(fd, 10, libc::MSG_OOB), Ok(b"!".to_vec()));
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"abc".to_vec()));
    side.sync("received");
    echo(fd);
}

fn sends_urgent_after(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"abc", 0), Ok(3));
    side.sync("sent");
    assert_eq!(calls::send(fd, b"!", libc::MSG_OOB), Ok(1));
    side.sync("received");
    request_echoes(fd, 20, 100);
}

/// `SO_ZEROCOPY` alone changes nothing; `MSG_ZEROCOPY` does.
fn sends_without_a_copy(_side: &Side, fd: Fd) {
    calls::set_option(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1).expect("SO_ZEROCOPY");
    assert_eq!(calls::option(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY), Ok(1));
    request_echoes(fd, 20, 100);
    are_sent_without_a_copy(fd);
}

fn are_sent_without_a_copy(fd: Fd) {
    let sets = [libc::EPOLLRDHUP, libc::EPOLLRDHUP | libc::EPOLLET].map(|events| {
        let set = calls::epoll_create().expect("epoll_create1");
        calls::epoll_add(set, fd, events, 1).expect("EPOLL_CTL_ADD");
        set
    });
    for number in 0..3 {
        assert_eq!(calls::send(fd, b"left alone", libc::MSG_ZEROCOPY), Ok(10));
        assert_eq!(calls::poll(&[(fd, 0)], crate::side::ARRIVAL), Ok(vec![libc::POLLERR]));
        for set in sets {
            let ready = calls::epoll_wait(set, 4, crate::side::ARRIVAL).expect("epoll_wait");
            assert_eq!(ready, [calls::Ready { events: libc::EPOLLERR as u32, data: 1 }]);
        }
        let done = calls::sent_without_copy(fd).expect("a completion");
        assert_eq!(done.numbers, number..=number);
        assert_eq!(receive_exactly(fd, 10), b"left alone");
        assert_eq!(calls::poll(&[(fd, 0)], 0), Ok(vec![0]));
        assert_eq!(calls::pending_error(fd), Ok(Errno(0)));
        request_echoes(fd, 20, 100);
    }
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
}

fn echoes_to_the_end(_side: &Side, fd: Fd) {
    echo(fd);
}

fn server_without_a_copy(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    calls::set_option(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1).expect("SO_ZEROCOPY");
    are_sent_without_a_copy(fd);
}

fn echoing_client(side: &Side) {
    echo(side.connect());
}

fn stdio(side: &Side) {
    let fd = accept_one(side);
    speak_in_lines(fd);
}

fn stdio_after(_side: &Side, fd: Fd) {
    speak_in_lines(fd);
}

/// The registrations go on as they were asked for.
/// A stream that finds nothing where poll had told of bytes takes that for an error.
fn stdio_told(side: &Side, fd: Fd) {
    side.sync("sent");
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    assert_eq!(calls::poll(&[(fd, libc::POLLIN)], ARRIVAL), Ok(vec![libc::POLLIN]));
    let mut stream = Stdio::open(fd);
    assert_eq!(stream.line().map(|line| line.len()), Some(255));
    side.sync("read");
}

fn sends_and_waits(side: &Side, fd: Fd) {
    send_all(fd, &[b'u'; 100_000]);
    side.sync("sent");
    // It is in a call when the other side goes back.
    while_blocked(|| calls::recv(fd, 1, 0), || side.sync("read")).expect_err("it is reset");
}

fn stdio_from_a_set(side: &Side, fd: Fd) {
    const IN: u32 = libc::EPOLLIN as u32;
    let level = calls::epoll_create().expect("epoll_create1");
    let once = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(level, fd, libc::EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    calls::epoll_add(once, fd, libc::EPOLLIN | libc::EPOLLONESHOT, 2).expect("EPOLL_CTL_ADD");
    let later = |epfd, data| {
        let ready = calls::epoll_wait(epfd, 4, -1).expect("epoll_wait");
        assert_eq!(ready.iter().map(|ready| (ready.events, ready.data)).collect::<Vec<_>>(), [(IN, data)]);
    };
    demand(side);
    later(level, 1);
    later(once, 2);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    let stream = Stdio::open(fd);
    demand(side);
    for _ in 0..3 {
        later(level, 1);
    }
    assert_eq!(calls::epoll_wait(once, 4, 0), Ok(vec![]));
    calls::epoll_modify(once, fd, libc::EPOLLIN | libc::EPOLLONESHOT, 3).expect("EPOLL_CTL_MOD");
    later(once, 3);
    assert_eq!(calls::epoll_wait(once, 4, 0), Ok(vec![]));
    stop(side);
    stream.close();
}

fn speak_in_lines(fd: Fd) {
    let mut stream = Stdio::open(fd);
    for _ in 0..20 {
        let line = stream.line().expect("a line comes");
        stream.put(&line.to_uppercase());
    }
    assert_eq!(stream.line(), None);
    stream.close();
}

fn talks_in_lines(side: &Side) {
    let fd = side.connect();
    talk_in_lines(fd);
}

fn talks_in_lines_after(_side: &Side, fd: Fd) {
    talk_in_lines(fd);
}

fn talk_in_lines(fd: Fd) {
    for _ in 0..20 {
        send_all(fd, b"line\n");
        assert_eq!(receive_exactly(fd, 5), b"LINE\n");
    }
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
}

/// A listener does not prove who reads: five connections go to a program without the library, five to us.
fn unshimmed_accepts(side: &Side) {
    let listener = side.listen();
    let program = Program::helper("accept", &[&listener.to_string(), "5"], false);
    program.spawn(&[]).expect("posix_spawn").wait_for_success();
    side.sync("half done");
    for _ in 0..5 {
        let fd = quietly(|| side.accept(listener));
        echo(fd);
        quietly(|| calls::close(fd)).expect("close");
    }
    side.sync("done");
}

fn asks_of_two(side: &Side) {
    let destination = side.destination();
    for round in 0..10 {
        if round == 5 {
            side.sync("half done");
        }
        let fd = quietly(|| side.connect_to(destination));
        request_echoes(fd, 100, 500);
        quietly(|| calls::close(fd)).expect("close");
    }
    say!("10 connections answered");
    side.sync("done");
}

/// Two listeners of one port (`SO_REUSEPORT`), one of them without the library; the kernel chooses.
fn sibling_accepts(side: &Side) {
    let listener = reusable_listener(side, 0);
    let port = crate::side::listening_port(listener);
    let sibling = reusable_listener(side, port);
    let program = Program::helper("accept", &[&sibling.to_string(), "1000"], false);
    let child = program.spawn(&[]).expect("posix_spawn");
    calls::close(sibling).expect("close");
    side.tell(u64::from(port));
    quietly(|| {
        calls::set_nonblocking(listener, true).expect("FIONBIO");
        let (mut done, control) = (false, 0);
        while !done {
            let ready = calls::poll(&[(listener, libc::POLLIN), (control, libc::POLLIN)], -1).expect("poll");
            if ready[0] != 0 {
                let fd = calls::accept4(listener, 0).expect("accept4");
                echo(fd);
                calls::close(fd).expect("close");
            }
            done = ready[0] == 0 && ready[1] != 0;
        }
    });
    side.sync("done");
    calls::kill(child.0, libc::SIGKILL).expect("kill");
    let _ = child.wait();
}

fn reusable_listener(side: &Side, port: u16) -> Fd {
    quietly(|| {
        let listener = calls::stream_socket(side.family, 0).expect("socket");
        calls::set_option(listener, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1).expect("SO_REUSEPORT");
        calls::bind(listener, side.family.own(port)).expect("bind");
        calls::listen(listener, 64).expect("listen");
        listener
    })
}

fn asks_of_siblings(side: &Side) {
    let destination = side.destination();
    for _ in 0..20 {
        let fd = quietly(|| side.connect_to(destination));
        request_echoes(fd, 50, 500);
        quietly(|| calls::close(fd)).expect("close");
    }
    say!("20 connections answered");
    side.sync("done");
}

fn sends_urgent(side: &Side) {
    let fd = side.connect();
    assert_eq!(calls::send(fd, b"abc", 0), Ok(3));
    assert_eq!(calls::send(fd, b"!", libc::MSG_OOB), Ok(1));
    side.sync("sent");
    side.sync("received");
    request_echoes(fd, 20, 100);
}

fn urgent(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    side.sync("sent");
    let ready = calls::poll(&[(fd, libc::POLLPRI)], crate::side::ARRIVAL);
    assert_eq!(ready, Ok(vec![libc::POLLPRI]));
    assert_eq!(calls::recv(fd, 10, libc::MSG_OOB), Ok(b"!".to_vec()));
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"abc".to_vec()));
    side.sync("received");
    echo(fd);
}

fn passes_what_is_put_aside(side: &Side) {
    let (_, fd) = with_bytes_put_aside(side);
    side.sync("send now");
    side.sync("sent all");
    pass_on_to_the_end(fd);
}

/// What it has not read came over TCP, and a bell behind it.
fn passes_what_is_before_a_bell(side: &Side) {
    let (epfd, fd) = with_bytes_on_tcp(side, |fd| {
        assert_eq!(calls::recv(fd, 4, libc::MSG_PEEK), Ok(b"more".to_vec()));
    });
    side.sync("look now");
    side.sync("looked");
    quietly(|| calls::epoll_wait(epfd, 8, 0)).expect("epoll_wait");
    let woken = while_blocked(|| calls::epoll_wait(epfd, 8, -1), || side.sync("send now"));
    assert_eq!(woken.expect("epoll_wait").len(), 1);
    side.sync("sent all");
    pass_on_to_the_end(fd);
}

fn pass_on_to_the_end(fd: Fd) {
    // The other process waits in its reads.
    calls::set_status(fd, libc::O_RDWR).expect("F_SETFL");
    let (local, remote) = calls::unix_pair().expect("socketpair");
    let child = receiver(local, remote);
    // The child may be faster with what it has to say.
    assert_eq!(quietly(|| calls::send_fd(remote, b"x", fd)), Ok(1));
    for fd in [fd, remote, local] {
        quietly(|| calls::close(fd)).expect("close");
    }
    child.wait_for_success();
}

fn sends_more_by_the_ring(side: &Side) {
    let fd = sends_over_tcp_and_looks(side);
    side.sync("send now");
    send_all(fd, b"by the ring");
    side.sync("sent all");
    assert_eq!(receive_exactly(fd, 15), b"moreby the ring");
    send_all(fd, b"and on");
    assert_eq!(receive_exactly(fd, 6), b"and on");
}

/// Enough for both sides to meet, and for the one that sends to leave TCP.
const MESSAGES: usize = 64;

fn only_reads(side: &Side) {
    let fd = side.accept(side.listen());
    for _ in 0..MESSAGES {
        assert_eq!(receive_exactly(fd, 5), b"bytes");
        side.sync("read");
    }
    // No call of this side's comes before.
    side.sync("spliced");
    assert_eq!(receive_exactly(fd, 7), b"spliced");
    send_all(fd, b"answer");
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
}

fn splices_when_read(side: &Side) {
    let fd = side.connect_to(side.destination());
    for _ in 0..MESSAGES {
        send_all(fd, b"bytes");
        side.sync("read");
    }
    let (reading, writing) = calls::pipe().expect("pipe");
    assert_eq!(calls::write(writing, b"spliced"), Ok(7));
    assert_eq!(calls::splice(reading, fd, 7), Ok(7));
    side.sync("spliced");
    assert_eq!(receive_exactly(fd, 6), b"answer");
}

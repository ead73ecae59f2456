//! Connections between hosts go back to TCP, and nobody notices.

use std::process::Command;
use std::time::Duration;

use thallus_transport::arena::{View, flag};
use thallus_transport::reason::Reason;

use super::Behaviour;
use super::Tally;
use super::peers::{
    MOMENTS, accept_for_a_moment, answer_echoes, ask_for_tcp, connect_for_a_moment, echo, own_arenas,
    request_echoes, send_all,
};
use crate::calls::{self, Fd, Leave, fork, quietly};
use crate::say;
use crate::side::{
    ARRIVAL, Pattern, Side, await_process_asleep, await_stopped, await_unread, let_pass, receive_exactly,
    receive_pattern, send_pattern, while_blocked,
};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("a_device_is_removed_under_load", streams_and_removes, streams)
        .tally(Tally::Returned(1), Tally::Returned(1))
        .needs_root()
        .between_hosts(),
    Behaviour::connected("a_device_is_removed_at_the_other_side", streams, streams_and_removes)
        .tally(Tally::Returned(1), Tally::Returned(1))
        .needs_root()
        .between_hosts(),
    Behaviour::connected("a_device_is_removed_between_requests", removes_between, answers)
        .tally(Tally::Returned(1), Tally::Returned(1))
        .needs_root()
        .between_hosts(),
    Behaviour::whole(
        "a_device_is_removed_beneath_a_call",
        removes_beneath_a_call,
        answers_all,
        Tally::Returned(1),
    )
    // The queue pair itself does not give up as long as that takes.
    .environment(&[("THALLUS_RDMA_TIMEOUT", "20")])
    .needs_root()
    .between_hosts(),
    Behaviour::whole("a_device_comes_back", uses_two_devices, asks_twice, Tally::Upgraded(2))
        .needs_root()
        .between_hosts(),
    Behaviour::whole("by_request", echoes, asks_for_tcp, Tally::Returned(1)).alone(&["by-request"]),
    Behaviour::whole("by_request_under_load", streams_on, asks_for_tcp_under_load, Tally::Returned(1))
        .alone(&["by-request"]),
    Behaviour::connected("a_child_serves_on", serves_in_a_child, asks)
        .tally(Tally::Returned(1), Tally::Returned(1))
        .between_hosts(),
    Behaviour::connected("a_child_beside_an_idle_set", forks_when_told, sends_once_idle)
        .tally(Tally::Returned(1), Tally::Returned(1))
        .between_hosts(),
    Behaviour::whole(
        "a_child_reads_what_comes_meanwhile",
        forks_at_once,
        sends_at_once,
        Tally::Upgraded(MOMENTS),
    )
    .alone(&["shared-before-upgrade"])
    .over_verbs(Tally::Returned(MOMENTS), Tally::Returned(MOMENTS)),
    Behaviour::whole("a_client_comes_late", ends_and_closes, comes_after_the_end, Tally::Upgraded(2))
        .alone(&["shared-before-upgrade"])
        .over_verbs(Tally::Returned(2), Tally::Returned(2)),
    Behaviour::connected(
        "beside_a_stopped_reader_at_the_end",
        sees_the_end_beside_a_stopped_child,
        goes_back_and_ends,
    )
    .alone(&["unsupported-call", "shared-before-upgrade"])
    .tally(Tally::Unknown, Tally::Returned(1)),
    Behaviour::connected("beside_a_stopped_reader", reads_beside_a_stopped_child, sends_and_goes_back)
        .alone(&["unsupported-call", "shared-before-upgrade"])
        .tally(Tally::Unknown, Tally::Returned(1)),
    Behaviour::connected(
        "beside_a_stopped_reader_that_peeks",
        peeks_beside_a_stopped_child,
        sends_and_goes_back,
    )
    .alone(&["unsupported-call", "shared-before-upgrade"])
    .tally(Tally::Unknown, Tally::Returned(1)),
    Behaviour::connected(
        "a_limit_is_set_while_it_waits",
        waits_beyond_a_later_limit,
        goes_back_and_sends_late,
    )
    .alone(&["unsupported-call"])
    .tally(Tally::Returned(1), Tally::Returned(1)),
];

const LENGTH: usize = 3 << 20;

/// Takes this side's device away, as if it were unplugged, and gives another like it back: others need it.
fn remove_device() {
    let name = std::fs::read_dir("/sys/class/infiniband")
        .expect("a device")
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .find(|name| has_own_address(name))
        .expect("a device with this side's address");
    outside("rdma", &["link", "delete", &name]);
    outside("rdma", &["link", "add", &name, "type", "rxe", "netdev", "eth0"]);
    while !has_own_address(&name) {
        std::thread::yield_now();
    }
    // The guest's device files are copies, and so they still lead to the device that was removed.
    outside("sh", &["-c", "for d in /dev/infiniband/uverbs*; do cp -a $d $d.new; mv $d.new $d; done"]);
}

/// Runs a program without the library, to its good end.
fn outside(program: &str, arguments: &[&str]) {
    let status = Command::new("/usr/bin/env")
        .args(["-u", "LD_PRELOAD", "PATH=/usr/sbin:/sbin:/usr/bin:/bin", program])
        .args(arguments)
        .status();
    assert!(status.expect("env").success(), "{program} {arguments:?}");
}

fn has_own_address(device: &str) -> bool {
    let own = std::env::var("THALLUS_TEST_OWN").expect("an address");
    let own: std::net::Ipv4Addr = own.parse().expect("an address");
    let gid = std::fs::read_to_string(format!("/sys/class/infiniband/{device}/ports/1/gids/1"));
    gid.is_ok_and(|gid| gid.trim().parse() == Ok(own.to_ipv6_mapped()))
}

fn streams(_side: &Side, fd: Fd) {
    full_duplex(fd, 32, 31, || {});
}

fn streams_and_removes(_side: &Side, fd: Fd) {
    full_duplex(fd, 31, 32, || quietly(remove_device));
}

/// Streams both ways, and does `midway` when a third has come.
fn full_duplex(fd: Fd, ours: u64, theirs: u64, midway: impl FnOnce()) {
    both_ways(fd, ours, theirs, midway);
    end(fd);
}

fn both_ways(fd: Fd, ours: u64, theirs: u64, midway: impl FnOnce()) {
    std::thread::scope(|scope| {
        scope.spawn(|| send_pattern(fd, &mut Pattern::new(ours), LENGTH, 50_000));
        let mut pattern = Pattern::new(theirs);
        receive_pattern(fd, &mut pattern, LENGTH / 3, 30_000);
        midway();
        receive_pattern(fd, &mut pattern, LENGTH - LENGTH / 3, 30_000);
    });
    say!("sent and received {LENGTH}");
}

fn end(fd: Fd) {
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
}

const REQUESTS: usize = 10;

fn removes_between(_side: &Side, fd: Fd) {
    for number in 0..2 * REQUESTS {
        if number == REQUESTS {
            quietly(remove_device);
        }
        request(fd, number);
    }
    say!("answered");
}

fn request(fd: Fd, number: usize) {
    let request = [number as u8; 100];
    send_all(fd, &request);
    assert_eq!(receive_exactly(fd, request.len()), request);
}

fn answers(_side: &Side, fd: Fd) {
    for _ in 0..2 * REQUESTS {
        let request = receive_exactly(fd, 100);
        send_all(fd, &request);
    }
}

/// What the device is to do meanwhile never completes: first because the peer does not answer, and then because the device is
/// gone.
fn removes_beneath_a_call(side: &Side) {
    let (reading, writing) = calls::pipe().expect("pipe");
    // Before there is a connection: it does what it does from outside.
    let remover = fork(Leave::Exit, || {
        let told = quietly(|| calls::read(reading, 100)).expect("read");
        let peer = String::from_utf8(told).expect("an address");
        remove_device();
        outside("ip", &["neighbour", "delete", &peer, "dev", "eth0"]);
    });
    let fd = side.connect();
    for number in 0..REQUESTS {
        request(fd, number);
    }
    let peer = quietly(|| calls::peer_address(fd)).expect("getpeername").ip().to_string();
    let nobody = ["lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent"];
    outside("ip", &[&["neighbour", "replace", &peer], &nobody[..]].concat());
    quietly(|| calls::write(writing, peer.as_bytes())).expect("write");
    request(fd, REQUESTS);
    say!("answered");
    remover.wait_for_success();
}

fn answers_all(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    for number in 0..=REQUESTS {
        let request = receive_exactly(fd, 100);
        assert_eq!(request, [number as u8; 100]);
        send_all(fd, &request);
    }
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
}

/// A server whose device is taken away and given back between two connections.
fn uses_two_devices(side: &Side) {
    let listener = side.listen();
    for again in [true, false] {
        let fd = side.accept(listener);
        echo(fd);
        calls::close(fd).expect("close");
        if again {
            quietly(remove_device);
        }
        side.sync("next");
    }
}

fn asks_twice(side: &Side) {
    let destination = side.destination();
    for _ in 0..2 {
        let fd = side.connect_to(destination);
        request_echoes(fd, 30, 3000);
        calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
        assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
        calls::close(fd).expect("close");
        side.sync("next");
    }
}

/// What has come by the time of a fork is reported, though the peer makes no further call.
fn forks_when_told(side: &Side, fd: Fd) {
    answer_echoes(fd, 40, 100);
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, libc::EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    for _ in 0..20 {
        assert_eq!(quietly(|| calls::epoll_wait(epfd, 1, 10)), Ok(vec![]));
    }
    side.sync("idle");
    side.sync("sent");
    await_unread(fd, 7);
    fork(Leave::AtOnce, || {}).wait_for_success();
    assert_eq!(calls::epoll_wait(epfd, 1, 5_000).map(|ready| ready.len()), Ok(1));
    assert_eq!(receive_exactly(fd, 7), b"message");
    side.sync("told");
    send_all(fd, b"answer");
}

fn sends_once_idle(side: &Side, fd: Fd) {
    request_echoes(fd, 40, 100);
    side.sync("idle");
    send_all(fd, b"message");
    side.sync("sent");
    side.sync("told");
    assert_eq!(receive_exactly(fd, 6), b"answer");
}

/// As servers do that fork for each client, after they have read what it wants.
fn serves_in_a_child(_side: &Side, fd: Fd) {
    for _ in 0..REQUESTS {
        let request = receive_exactly(fd, 100);
        send_all(fd, &request);
    }
    let child = fork(Leave::Exit, || {
        for _ in 0..REQUESTS {
            let request = receive_exactly(fd, 100);
            send_all(fd, &request);
        }
    });
    calls::close(fd).expect("close");
    child.wait_for_success();
}

/// What the peer sends while this side forks, and its end, reach the child, though the peer makes no call afterwards.
fn forks_at_once(side: &Side) {
    let listener = side.listen();
    for number in 0..MOMENTS {
        let fd = accept_for_a_moment(side, listener, number);
        let child = fork(Leave::Exit, || {
            assert_eq!(receive_exactly(fd, 10), b"0123456789");
            if number % 2 == 0 {
                assert_eq!(calls::poll(&[(fd, libc::POLLIN | libc::POLLRDHUP)], ARRIVAL), Ok(vec![ENDED]));
                assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
            }
        });
        child.wait_for_success();
        side.sync("read");
        assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
        calls::close(fd).expect("close");
    }
}

const ENDED: i16 = libc::POLLIN | libc::POLLRDHUP;

fn sends_at_once(side: &Side) {
    let destination = side.destination();
    for number in 0..MOMENTS {
        let fd = connect_for_a_moment(side, destination, number);
        assert_eq!(calls::send(fd, b"0123456789", 0), Ok(10));
        if number % 2 == 0 {
            calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
        }
        side.sync("read");
        if number % 2 != 0 {
            calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
        }
        assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
        calls::close(fd).expect("close");
    }
}

/// Has gone back, because it forks, before the client makes its next call; and by then has shut down one direction, or sent much and closed.
fn ends_and_closes(side: &Side) {
    let listener = side.listen();
    for closes in [false, true] {
        let fd = side.accept(listener);
        side.answer_warm_up(fd);
        fork(Leave::Exit, || {}).wait_for_success();
        if !closes {
            calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
            side.sync("ended");
            assert_eq!(receive_exactly(fd, 10), b"0123456789");
            assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
        }
        if closes {
            // More than the client's kernel takes, and no more than this side's.
            calls::set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, 1 << 20).expect("SO_SNDBUF");
            send_pattern(fd, &mut Pattern::new(33), LATE, LATE);
        }
        calls::close(fd).expect("close");
        if closes {
            side.sync("ended");
        }
    }
}

const LATE: usize = 150_000;

fn comes_after_the_end(side: &Side) {
    let destination = side.destination();
    for closed in [false, true] {
        let fd = side.connect_to(destination);
        side.warm_up(fd);
        side.sync("ended");
        if closed {
            receive_pattern(fd, &mut Pattern::new(33), LATE, 10_000);
        }
        assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
        if !closed {
            assert_eq!(calls::send(fd, b"0123456789", 0), Ok(10));
        }
        calls::close(fd).expect("close");
    }
}

fn asks(_side: &Side, fd: Fd) {
    for number in 0..2 * REQUESTS {
        request(fd, number);
    }
    say!("answered");
}

fn echoes(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    say!("echoed {}", echo(fd));
}

fn asks_for_tcp(side: &Side) {
    let fd = side.connect();
    request_echoes(fd, 100, 3000);
    ask_for_tcp();
    request_echoes(fd, 100, 3000);
    let arenas = own_arenas();
    for (_, block) in arenas.iter().flat_map(View::blocks).filter(|(_, block)| block.has(flag::RETURNED)) {
        assert_eq!(block.reason(), Reason::ByRequest);
    }
    say!("200 echoes");
}

fn streams_on(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    answer_echoes(fd, 100, 3000);
    both_ways(fd, 32, 31, || {});
    answer_echoes(fd, 10, 3000);
    end(fd);
}

/// The wish is granted when all that has come has been read: at the latest when both are at rest.
fn asks_for_tcp_under_load(side: &Side) {
    let fd = side.connect();
    request_echoes(fd, 100, 3000);
    both_ways(fd, 31, 32, ask_for_tcp);
    request_echoes(fd, 10, 3000);
    end(fd);
}

/// A child that sleeps in a read has been rung for, and stopped, when this process looks at some of the bytes. What is left is the child's.
fn beside_a_stopped_child(side: &Side, fd: Fd, look: impl FnOnce(&[u8])) {
    let all = Pattern::new(12).take(150);
    let child = fork(Leave::Exit, || {
        let rest = quietly(|| calls::recv(fd, 100, libc::MSG_WAITALL)).expect("recv");
        assert_eq!(rest, all[10..110]);
    });
    await_process_asleep(child.0);
    calls::kill(child.0, libc::SIGSTOP).expect("kill");
    await_stopped(child.0);
    side.sync("stopped");
    side.sync("sent");
    await_unread(fd, 150);
    look(&all);
    assert_eq!(calls::recv(fd, 10, 0), Ok(all[..10].to_vec()));
    assert_eq!(calls::unread(fd), Ok(140));
    calls::kill(child.0, libc::SIGCONT).expect("kill");
    child.wait_for_success();
    assert_eq!(calls::recv(fd, 100, 0), Ok(all[110..].to_vec()));
    side.sync("read");
}

fn reads_beside_a_stopped_child(side: &Side, fd: Fd) {
    beside_a_stopped_child(side, fd, |_| ());
}

fn peeks_beside_a_stopped_child(side: &Side, fd: Fd) {
    beside_a_stopped_child(side, fd, |all| {
        assert_eq!(calls::recv(fd, 200, libc::MSG_PEEK), Ok(all.to_vec()));
        assert_eq!(calls::recv(fd, 120, libc::MSG_PEEK), Ok(all[..120].to_vec()));
        assert_eq!(calls::poll(&[(fd, libc::POLLRDHUP)], 10), Ok(vec![0]));
        assert_eq!(calls::poll(&[(fd, libc::POLLIN)], 0), Ok(vec![libc::POLLIN]));
    });
}

fn sees_the_end_beside_a_stopped_child(side: &Side, fd: Fd) {
    let set = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(set, fd, libc::EPOLLRDHUP | libc::EPOLLET, 1).expect("EPOLL_CTL_ADD");
    beside_a_stopped_child(side, fd, |_| {
        assert_eq!(calls::poll(&[(fd, libc::POLLRDHUP)], ARRIVAL), Ok(vec![libc::POLLRDHUP]));
        let ready = calls::Ready { events: libc::EPOLLRDHUP as u32, data: 1 };
        assert_eq!(calls::epoll_wait(set, 4, ARRIVAL), Ok(vec![ready]));
    });
}

fn sends_and_goes_back(side: &Side, fd: Fd) {
    goes_back_and(side, fd, || ());
}

fn goes_back_and_ends(side: &Side, fd: Fd) {
    goes_back_and(side, fd, || {
        calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    });
}

fn goes_back_and(side: &Side, fd: Fd, then: impl FnOnce()) {
    let mut pattern = Pattern::new(12);
    side.sync("stopped");
    send_all(fd, &pattern.take(100));
    calls::set_status(fd, libc::O_RDWR | libc::O_ASYNC).expect("F_SETFL");
    send_all(fd, &pattern.take(50));
    then();
    side.sync("sent");
    side.sync("read");
}

/// What another thread makes of `SO_RCVTIMEO` meanwhile is for later calls.
fn waits_beyond_a_later_limit(side: &Side, fd: Fd) {
    let limit = Duration::from_millis(60);
    let data = while_blocked(
        || calls::recv(fd, 10, 0),
        || {
            calls::set_receive_timeout(fd, limit).expect("SO_RCVTIMEO");
            side.sync("go back");
            side.sync("gone back");
            let_pass(limit * 3);
            side.sync("send now");
        },
    );
    assert_eq!(data, Ok(b"at last".to_vec()));
    side.sync("done");
}

fn goes_back_and_sends_late(side: &Side, fd: Fd) {
    side.sync("go back");
    calls::set_status(fd, libc::O_RDWR | libc::O_ASYNC).expect("F_SETFL");
    side.sync("gone back");
    side.sync("send now");
    send_all(fd, b"at last");
    side.sync("done");
}

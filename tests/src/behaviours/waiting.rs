//! What waiting costs: no CPU once it sleeps, and no thread.

use std::time::{Duration, Instant};

use super::Behaviour;
use super::peers::{drains_on_demand, fill, waits};
use crate::calls::{self, Errno, Fd, cpu_time, quietly};
use crate::say;
use crate::side::{ARRIVAL, Side};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("asleep_in_recv", asleep_in_recv, waits).takes_long(),
    Behaviour::connected("asleep_in_poll", asleep_in_poll, waits).takes_long(),
    Behaviour::connected("asleep_in_select", asleep_in_select, waits).takes_long(),
    Behaviour::connected("asleep_in_epoll", asleep_in_epoll, waits).takes_long(),
    // `AF_UNIX` tells of room anew whenever the peer has read.
    Behaviour::connected("asleep_in_edge_triggered_epoll", asleep_in_edge_epoll, waits)
        .takes_long()
        .tcp_only(),
    Behaviour::connected("asleep_with_unread_data", asleep_with_unread_data, sends_and_waits).takes_long(),
    Behaviour::connected("asleep_in_send", asleep_in_send, waits).takes_long(),
    Behaviour::connected("asleep_until_writable", asleep_until_writable, waits).takes_long(),
    Behaviour::connected("both_asleep", asleep_in_recv, asleep_in_recv).takes_long(),
    Behaviour::connected("woken_by_others", woken_by_others, waits)
        .environment(&[("THALLUS_SPIN_US", "5000")])
        .takes_long(),
    Behaviour::connected("memory_is_kept_for_a_second", keeps_memory, drains_on_demand).takes_long(),
    Behaviour::connected("no_thread", no_thread, waits),
];

const IDLE: Duration = Duration::from_secs(1);

/// CPU time that a wait of [`IDLE`] may use: its spin, and what accounting by clock ticks adds to that.
const ALLOWED: Duration = Duration::from_millis(50);

/// Lets `wait` take [`IDLE`], and looks at what it used. The first wait may spin longer, and learns from it.
fn costs_nothing(wait: impl Fn()) {
    for round in 0..2 {
        let before = cpu_time();
        wait();
        let used = cpu_time() - before;
        assert!(used < ALLOWED, "wait {round} of {IDLE:?} used {used:?} of CPU time");
    }
}

fn asleep_in_recv(side: &Side, fd: Fd) {
    calls::set_receive_timeout(fd, IDLE).expect("SO_RCVTIMEO");
    costs_nothing(|| assert_eq!(calls::recv(fd, 10, 0), Err(Errno::EAGAIN)));
    side.sync("done");
}

const IDLE_MS: libc::c_int = IDLE.as_millis() as libc::c_int;

fn asleep_in_poll(side: &Side, fd: Fd) {
    costs_nothing(|| assert_eq!(calls::poll(&[(fd, libc::POLLIN)], IDLE_MS), Ok(vec![0])));
    side.sync("done");
}

fn asleep_in_select(side: &Side, fd: Fd) {
    costs_nothing(|| assert!(calls::select(&[fd], &[], &[fd], Some(IDLE)).is_ok()));
    side.sync("done");
}

fn asleep_in_epoll(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, libc::EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    costs_nothing(|| assert_eq!(calls::epoll_wait(epfd, 8, IDLE_MS), Ok(vec![])));
    side.sync("done");
}

fn asleep_in_edge_epoll(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
    calls::epoll_add(epfd, fd, events, 1).expect("EPOLL_CTL_ADD");
    let _ = calls::epoll_wait(epfd, 8, 0);
    costs_nothing(|| assert_eq!(calls::epoll_wait(epfd, 8, IDLE_MS), Ok(vec![])));
    side.sync("done");
}

fn sends_and_waits(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    side.sync("sent");
    side.sync("done");
}

/// Data that nobody wants to read does not keep a wait for something else awake.
fn asleep_with_unread_data(side: &Side, fd: Fd) {
    side.sync("sent");
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, libc::EPOLLIN | libc::EPOLLET, 1).expect("EPOLL_CTL_ADD");
    assert_eq!(calls::epoll_wait(epfd, 8, -1).map(|ready| ready.len()), Ok(1));
    costs_nothing(|| assert_eq!(calls::epoll_wait(epfd, 8, IDLE_MS), Ok(vec![])));
    costs_nothing(|| assert_eq!(calls::poll(&[(fd, libc::POLLRDHUP)], IDLE_MS), Ok(vec![0])));
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"unread".to_vec()));
    side.sync("done");
}

fn asleep_in_send(side: &Side, fd: Fd) {
    fill(fd);
    calls::set_send_timeout(fd, IDLE).expect("SO_SNDTIMEO");
    // A kernel may find a little room after it refused, so one of these may be over early.
    costs_nothing(|| {
        let sent = quietly(|| calls::send(fd, &[b'f'; 100_000], 0));
        assert!(sent.is_ok() || sent == Err(Errno::EAGAIN));
    });
    side.sync("done");
}

fn asleep_until_writable(side: &Side, fd: Fd) {
    fill(fd);
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, libc::EPOLLIN | libc::EPOLLOUT, 1).expect("EPOLL_CTL_ADD");
    costs_nothing(|| assert_eq!(calls::epoll_wait(epfd, 8, IDLE_MS), Ok(vec![])));
    costs_nothing(|| assert_eq!(calls::poll(&[(fd, libc::POLLOUT)], IDLE_MS), Ok(vec![0])));
    side.sync("done");
}

/// A set that only the kernel's own descriptors wake, time after time, soon stops to spin for its connection.
fn woken_by_others(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, libc::EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    let (before, start) = (cpu_time(), Instant::now());
    for _ in 0..300 {
        quietly(|| {
            let timer = calls::timerfd(Duration::from_millis(2)).expect("timerfd");
            calls::epoll_add(epfd, timer, libc::EPOLLIN, 2).expect("EPOLL_CTL_ADD");
            let ready = calls::epoll_wait(epfd, 8, -1).expect("epoll_wait");
            assert_eq!(ready.iter().map(|event| event.data).collect::<Vec<_>>(), [2]);
            calls::close(timer).expect("close");
        });
    }
    let (used, took) = (cpu_time() - before, start.elapsed());
    assert!(used < took / 3, "{used:?} of CPU time in {took:?}");
    side.sync("done");
}

/// An event loop that soon sends as much again needs the same pages; one that does not gives them back.
fn keeps_memory(side: &Side, fd: Fd) {
    const MUCH: usize = 256 << 10;
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, libc::EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    quietly(|| {
        let filled = fill(fd);
        side.sync("full");
        side.tell(filled as u64);
        side.sync("drain now");
        side.sync("drained");
        // Over TCP, or while the connection leaves it, there is nothing to give back.
        let had_much = segment_memory() >= MUCH;
        let start = Instant::now();
        for _ in 0..20 {
            assert_eq!(calls::epoll_wait(epfd, 8, 1), Ok(vec![]));
        }
        let has_much = segment_memory() >= MUCH;
        assert!(!had_much || has_much || start.elapsed() > IDLE, "given back at once");
        while segment_memory() >= MUCH {
            assert!(start.elapsed() < Duration::from_millis(ARRIVAL as u64), "never given back");
            assert_eq!(calls::epoll_wait(epfd, 8, 50), Ok(vec![]));
        }
    });
    side.sync("done");
}

/// Bytes of the segments of upgraded connections that this process has in memory.
pub(super) fn segment_memory() -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("/proc is mounted");
    let (mut total, mut counts) = (0, false);
    for line in maps.lines() {
        if let Some(size) = line.strip_prefix("Rss:") {
            let kib: usize = size.trim().trim_end_matches(" kB").parse().expect("a number of KiB");
            total += if counts { kib << 10 } else { 0 };
        } else if line.split(' ').next().is_some_and(|word| word.contains('-')) {
            counts = line.contains("thallus-segment");
        }
    }
    total
}

fn no_thread(side: &Side, _fd: Fd) {
    let threads = std::fs::read_dir("/proc/self/task").expect("/proc is mounted").count();
    say!("{threads} thread");
    assert_eq!(threads, 1);
    side.sync("done");
}

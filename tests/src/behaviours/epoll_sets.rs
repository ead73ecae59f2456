//! epoll on many descriptors: event loops as servers have them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::yield_now;
use std::time::{Duration, Instant};

use libc::{EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLOUT, EPOLLRDHUP};

use super::peers::{demand, request_echoes, send_all, sends_on_demand, stop, waits};
use super::{Behaviour, Tally};
use crate::calls::{self, Errno, Fd, SignalSet, quietly, signal_thread, thread_id};
use crate::say;
use crate::side::{Pattern, Side, await_readable, pause, receive_exactly, while_blocked};

const MANY: usize = 50;
/// More than an event loop looks at for nothing.
const CROWD: usize = 150;
/// Connections that end one after the other, beside one that stays.
const SHORT_LIVED: u64 = 400;

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::whole("level_triggered_server", level_server, one_client, Tally::Upgraded(1)),
    Behaviour::whole("edge_triggered_server", edge_server, one_client, Tally::Upgraded(1)),
    Behaviour::whole("one_shot_server", one_shot_server, one_client, Tally::Upgraded(1)),
    Behaviour::whole(
        "taken_out_and_closed_by_another",
        takes_out_server,
        short_lived_clients,
        Tally::AtLeast(SHORT_LIVED / 2, SHORT_LIVED + 1),
    ),
    Behaviour::whole("added_before_the_first_byte", adds_first, talks_later, Tally::Upgraded(1)),
    Behaviour::whole("fifty_connections", level_server, fifty_clients, Tally::Upgraded(MANY as u64)),
    Behaviour::whole(
        "fifty_connections_edge_triggered",
        edge_server,
        fifty_clients,
        Tally::Upgraded(MANY as u64),
    ),
    Behaviour::whole(
        "fifty_in_the_client_as_well",
        level_server,
        fifty_in_one_set,
        Tally::Upgraded(MANY as u64),
    ),
    Behaviour::whole(
        "two_threads_share_a_set",
        two_thread_server,
        fifty_clients,
        Tally::Upgraded(MANY as u64),
    ),
    Behaviour::whole("idle_among_many", level_server, crowd_of_clients, Tally::Upgraded(CROWD as u64)),
    Behaviour::whole(
        "idle_among_many_edge_triggered",
        edge_server,
        crowd_of_clients,
        Tally::Upgraded(CROWD as u64),
    ),
    Behaviour::whole(
        "idle_among_many_one_shot",
        one_shot_server,
        crowd_of_clients,
        Tally::Upgraded(CROWD as u64),
    ),
    Behaviour::whole("exclusive", exclusive, one_client_of_ten, Tally::Total(1))
        .tally(Tally::Mixed(0, &[("exclusive", 1)]), Tally::Total(1)),
    Behaviour::connected("mixed_with_everything", mixed, sends_on_demand),
    Behaviour::connected("woken_by_a_pipe", woken_by_a_pipe, waits),
    Behaviour::connected("woken_by_an_addition", woken_by_an_addition, sends_on_demand),
    Behaviour::connected("behind_a_busy_pipe", behind_a_busy_pipe, sends_on_demand),
    Behaviour::whole("few_events_at_a_time", few_at_a_time, sends_on_five, Tally::Upgraded(5)),
    Behaviour::whole("nothing_starves", nothing_starves, sends_on_five, Tally::Upgraded(5)),
    Behaviour::connected("beside_one_that_is_always_ready", pipe_beside_a_busy_one, asks_until_the_end),
    Behaviour::connected("one_of_two_waiters", one_of_two_waiters, sends_on_demand),
    Behaviour::whole(
        "in_the_order_of_arrival",
        reports_in_order,
        sends_on_five_from_the_last,
        Tally::Upgraded(5),
    ),
    Behaviour::whole(
        "in_the_order_of_arrival_at_once",
        reports_all_in_order,
        sends_on_five_from_the_last,
        Tally::Upgraded(5),
    ),
    Behaviour::whole(
        "in_the_order_of_arrival_round_after_round",
        serves_in_order,
        sends_in_many_orders,
        Tally::Upgraded(1 + ORDERED as u64),
    ),
];

/// How a server registers its connections.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Trigger {
    Level,
    Edge,
    OneShot,
}

impl Trigger {
    fn events(self) -> libc::c_int {
        match self {
            Self::Level => EPOLLIN,
            Self::Edge => EPOLLIN | EPOLLOUT | EPOLLET | EPOLLRDHUP,
            Self::OneShot => EPOLLIN | EPOLLONESHOT,
        }
    }
}

fn level_server(side: &Side) {
    echo_server(side, Trigger::Level);
}

fn edge_server(side: &Side) {
    echo_server(side, Trigger::Edge);
}

fn one_shot_server(side: &Side) {
    echo_server(side, Trigger::OneShot);
}

/// What a connection of [`echo_server`] still has to send.
type Unsent = BTreeMap<Fd, Vec<u8>>;

/// An event loop with its listener in the set, which ends when all clients have gone.
fn echo_server(side: &Side, trigger: Trigger) {
    let listener = side.listen();
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, listener, EPOLLIN, listener as u64).expect("EPOLL_CTL_ADD");
    let clients = side.told() as usize;
    let (mut gone, mut echoed) = (0, 0);
    let mut unsent = Unsent::new();
    quietly(|| {
        while gone < clients {
            for ready in calls::epoll_wait(epfd, 16, -1).expect("epoll_wait") {
                let fd = ready.data as Fd;
                if fd == listener {
                    let conn = calls::accept4(listener, libc::SOCK_NONBLOCK).expect("accept4");
                    side.send_at_once(conn);
                    calls::epoll_add(epfd, conn, trigger.events(), conn as u64).expect("EPOLL_CTL_ADD");
                } else if serve(epfd, fd, trigger, &mut unsent, &mut echoed) {
                    calls::close(fd).expect("close");
                    gone += 1;
                }
            }
        }
    });
    say!("echoed {echoed} bytes to {clients} clients");
}

/// Serves one connection as far as it goes; whether it has ended.
fn serve(epfd: Fd, fd: Fd, trigger: Trigger, unsent: &mut Unsent, echoed: &mut usize) -> bool {
    let rest = unsent.entry(fd).or_default();
    loop {
        while !rest.is_empty() {
            match calls::send(fd, rest, libc::MSG_NOSIGNAL) {
                Ok(sent) => drop(rest.drain(..sent)),
                Err(error) => {
                    assert_eq!(error, Errno::EAGAIN);
                    break;
                }
            }
        }
        if !rest.is_empty() {
            break;
        }
        match calls::recv(fd, 10_000, 0) {
            Ok(data) if data.is_empty() => {
                unsent.remove(&fd);
                return true;
            }
            Ok(data) => {
                *echoed += data.len();
                *rest = data;
            }
            Err(error) => {
                assert_eq!(error, Errno::EAGAIN);
                break;
            }
        }
    }
    let wanted = if rest.is_empty() { EPOLLIN } else { EPOLLOUT };
    match trigger {
        Trigger::Level => {
            calls::epoll_modify(epfd, fd, wanted, fd as u64).expect("EPOLL_CTL_MOD");
        }
        Trigger::OneShot => {
            calls::epoll_modify(epfd, fd, wanted | EPOLLONESHOT, fd as u64).expect("EPOLL_CTL_MOD");
        }
        Trigger::Edge => {}
    }
    false
}

fn one_client(side: &Side) {
    let destination = side.destination();
    side.tell(1);
    let fd = side.connect_to(destination);
    request_echoes(fd, 400, 30_000);
    say!("400 echoes");
}

fn fifty_clients(side: &Side) {
    let destination = side.destination();
    side.tell(MANY as u64);
    let fds: Vec<Fd> = (0..MANY).map(|_| side.connect_to(destination)).collect();
    // Many small rounds in turn, then requests to all before any answer is read.
    for round in 0..20 {
        for &fd in &fds {
            request_echoes(fd, 1 + round % 3, 200);
        }
    }
    for round in 0..20u64 {
        let request = Pattern::new(round).take(3000);
        for &fd in &fds {
            send_all(fd, &request);
        }
        for &fd in &fds {
            assert_eq!(receive_exactly(fd, request.len()), request);
        }
    }
    say!("{MANY} connections answered");
}

/// Most say nothing for so many waits of the server that it stops looking at them, then again and all at once.
fn crowd_of_clients(side: &Side) {
    let destination = side.destination();
    side.tell(CROWD as u64);
    let fds: Vec<Fd> = (0..CROWD).map(|_| side.connect_to(destination)).collect();
    for &fd in &fds {
        request_echoes(fd, 20, 100);
    }
    for round in 0..3 {
        request_echoes(fds[0], 1000, 64);
        let request = Pattern::new(round).take(3000);
        for &fd in &fds[1..] {
            send_all(fd, &request);
            if round == 0 {
                assert_eq!(receive_exactly(fd, request.len()), request);
            }
        }
        if round > 0 {
            for &fd in &fds[1..] {
                assert_eq!(receive_exactly(fd, request.len()), request);
            }
        }
    }
    // The ends of idle ones are reported, too.
    request_echoes(fds[0], 1000, 64);
    say!("{CROWD} connections answered");
}

fn fifty_in_one_set(side: &Side) {
    let destination = side.destination();
    side.tell(MANY as u64);
    let epfd = calls::epoll_create().expect("epoll_create1");
    let fds: Vec<Fd> = (0..MANY).map(|_| side.connect_to(destination)).collect();
    for &fd in &fds {
        quietly(|| calls::epoll_add(epfd, fd, EPOLLIN, fd as u64)).expect("EPOLL_CTL_ADD");
        send_all(fd, b"ping");
    }
    let mut rounds: BTreeMap<Fd, usize> = fds.iter().map(|&fd| (fd, 0)).collect();
    quietly(|| {
        while rounds.values().any(|&count| count < 60) {
            for ready in calls::epoll_wait(epfd, 8, -1).expect("epoll_wait") {
                let fd = ready.data as Fd;
                assert_eq!(receive_exactly(fd, 4), b"ping");
                let count = rounds.get_mut(&fd).expect("only known descriptors are ready");
                *count += 1;
                if *count < 60 {
                    send_all(fd, b"ping");
                }
            }
        }
    });
    say!("{} rounds", rounds.values().sum::<usize>());
}

/// Two threads wait on the same set; one-shot entries give each event to one of them.
fn two_thread_server(side: &Side) {
    let listener = side.listen();
    let epfd = calls::epoll_create().expect("epoll_create1");
    let clients = side.told() as usize;
    let gone = AtomicUsize::new(0);
    let echoed = AtomicUsize::new(0);
    quietly(|| {
        for _ in 0..clients {
            let conn = calls::accept4(listener, libc::SOCK_NONBLOCK).expect("accept4");
            calls::epoll_add(epfd, conn, Trigger::OneShot.events(), conn as u64).expect("EPOLL_CTL_ADD");
        }
    });
    let work = || {
        quietly(|| {
            while gone.load(Ordering::SeqCst) < clients {
                for ready in calls::epoll_wait(epfd, 4, 50).expect("epoll_wait") {
                    let fd = ready.data as Fd;
                    let (mut unsent, mut here) = (Unsent::new(), 0);
                    if serve(epfd, fd, Trigger::OneShot, &mut unsent, &mut here) {
                        calls::close(fd).expect("close");
                        gone.fetch_add(1, Ordering::SeqCst);
                    }
                    assert!(unsent.values().all(Vec::is_empty), "answers this small always fit");
                    echoed.fetch_add(here, Ordering::SeqCst);
                }
            }
        });
    };
    std::thread::scope(|scope| {
        scope.spawn(work);
        work();
    });
    say!("echoed {} bytes to {clients} clients", echoed.load(Ordering::SeqCst));
}

/// An event loop takes connections that have ended out of its set, and leaves closing them to another thread. No report names
/// them any more, though one that is never idle keeps the loop awake.
fn takes_out_server(side: &Side) {
    let listener = side.listen();
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, listener, EPOLLIN, 0).expect("EPOLL_CTL_ADD");
    let (closer, ended) = std::sync::mpsc::channel::<Fd>();
    let mut open = BTreeMap::new();
    let mut accepted = 0;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            quietly(|| ended.iter().for_each(|fd| calls::close(fd).expect("close")));
        });
        quietly(|| {
            while accepted <= SHORT_LIVED || !open.is_empty() {
                for ready in calls::epoll_wait(epfd, 8, -1).expect("epoll_wait") {
                    if ready.data == 0 {
                        let fd = calls::accept4(listener, libc::SOCK_NONBLOCK).expect("accept4");
                        accepted += 1;
                        open.insert(accepted, fd);
                        calls::epoll_add(epfd, fd, EPOLLIN | EPOLLRDHUP, accepted).expect("EPOLL_CTL_ADD");
                        continue;
                    }
                    let fd = *open.get(&ready.data).expect("in the set");
                    let bytes = calls::recv(fd, 100, 0).expect("a report is of something");
                    if bytes.is_empty() {
                        calls::epoll_delete(epfd, fd).expect("EPOLL_CTL_DEL");
                        open.remove(&ready.data);
                        closer.send(fd).expect("the other thread is there");
                    } else {
                        send_all(fd, &bytes);
                    }
                }
            }
        });
        drop(closer);
    });
    side.sync("done");
}

/// The peer answers while the wait spins, so that none ends before, or in the kernel.
fn pipe_beside_a_busy_one(side: &Side, fd: Fd) {
    const WAITS: usize = 64;
    let (reading, writing) = calls::pipe().expect("pipe");
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    calls::epoll_add(epfd, reading, EPOLLIN, 2).expect("EPOLL_CTL_ADD");
    let echo = || {
        let bytes = calls::recv(fd, 100, 0).expect("recv");
        send_all(fd, &bytes);
    };
    quietly(|| {
        (0..400).for_each(|_| echo());
        for round in 0..20 {
            calls::write(writing, b"x").expect("write");
            let mut waits = 0;
            let mut told = false;
            while !told {
                waits += 1;
                assert!(waits <= WAITS, "the pipe of round {round} waits behind the connection");
                for ready in calls::epoll_wait(epfd, 8, -1).expect("epoll_wait") {
                    if ready.data == 1 {
                        echo();
                    } else {
                        told = true;
                    }
                }
            }
            assert_eq!(calls::read(reading, 8), Ok(b"x".to_vec()));
            // One that does not wait, so that what happens once in some waits is not always met, or never.
            if !calls::epoll_wait(epfd, 8, 0).expect("epoll_wait").is_empty() {
                echo();
            }
        }
        calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
        while !calls::recv(fd, 100, 0).expect("recv").is_empty() {}
    });
    side.sync("done");
}

fn asks_until_the_end(side: &Side, fd: Fd) {
    quietly(|| {
        send_all(fd, b"request");
        while !calls::recv(fd, 100, 0).expect("recv").is_empty() {
            send_all(fd, b"request");
        }
        calls::close(fd).expect("close");
    });
    side.sync("done");
}

fn short_lived_clients(side: &Side) {
    let destination = side.destination();
    let busy = side.connect_to(destination);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                quietly(|| request_echoes(busy, 20, 8));
            }
            calls::close(busy).expect("close");
        });
        for _ in 0..SHORT_LIVED {
            let fd = quietly(|| side.connect_to(destination));
            quietly(|| request_echoes(fd, 12, 8));
            quietly(|| calls::close(fd)).expect("close");
        }
        over.store(true, Ordering::SeqCst);
    });
    side.sync("done");
}

/// As event loops do: into the set first, and only what is ready is ever touched.
fn adds_first(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, EPOLLIN | EPOLLET, 1).expect("EPOLL_CTL_ADD");
    for round in 0..40 {
        let ready = while_blocked(|| calls::epoll_wait(epfd, 8, -1), || side.sync("send now"));
        assert_eq!(ready.map(|ready| ready.len()), Ok(1), "round {round}");
        let data = calls::recv(fd, 100, 0).expect("recv");
        assert_eq!(calls::recv(fd, 100, 0), Err(Errno::EAGAIN));
        assert_eq!(calls::send(fd, &data, 0), Ok(4));
        assert_eq!(calls::epoll_wait(epfd, 8, 0), Ok(vec![]));
    }
    side.sync("done");
}

fn talks_later(side: &Side) {
    let fd = side.connect();
    for _ in 0..40 {
        side.sync("send now");
        assert_eq!(calls::send(fd, b"talk", 0), Ok(4));
        assert_eq!(receive_exactly(fd, 4), b"talk");
    }
    side.sync("done");
}

fn exclusive(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, EPOLLIN | libc::EPOLLEXCLUSIVE, 1).expect("EPOLL_CTL_ADD");
    assert_eq!(calls::epoll_modify(epfd, fd, EPOLLIN, 1), Err(Errno::EINVAL));
    for _ in 0..10 {
        assert_eq!(calls::epoll_wait(epfd, 8, -1).map(|ready| ready.len()), Ok(1));
        let data = calls::recv(fd, 100, 0).expect("recv");
        assert_eq!(calls::send(fd, &data, 0), Ok(data.len()));
    }
}

fn one_client_of_ten(side: &Side) {
    let fd = side.connect();
    for _ in 0..10 {
        assert_eq!(calls::send(fd, b"only you", 0), Ok(8));
        assert_eq!(receive_exactly(fd, 8), b"only you");
    }
}

fn mixed(side: &Side, fd: Fd) {
    let signals = SignalSet::of(&[libc::SIGUSR2]);
    signals.block_only();
    let (reading, writing) = calls::pipe().expect("pipe");
    let event = calls::eventfd().expect("eventfd");
    let signal = signals.descriptor().expect("signalfd");
    let (local, remote) = calls::unix_pair().expect("socketpair");
    let epfd = calls::epoll_create().expect("epoll_create1");
    for (data, other) in [fd, reading, event, signal, local].into_iter().enumerate() {
        calls::epoll_add(epfd, other, EPOLLIN, data as u64).expect("EPOLL_CTL_ADD");
    }
    let ready = |epfd| -> Vec<u64> {
        let ready = calls::epoll_wait(epfd, 8, -1).expect("epoll_wait");
        ready.iter().map(|ready| ready.data).collect()
    };
    assert_eq!(calls::epoll_wait(epfd, 8, 0), Ok(vec![]));
    assert_eq!(while_blocked(|| ready(epfd), || demand(side)), [0]);
    let _ = calls::write(writing, b"p");
    let _ = calls::write(event, &1u64.to_ne_bytes());
    signal_thread(thread_id(), libc::SIGUSR2);
    let _ = calls::send(remote, b"u", 0);
    // How many of those that are ready one call tells of is its own affair; soon all have been told.
    let mut told: Vec<u64> = quietly(|| (0..100).flat_map(|_| ready(epfd)).collect());
    told.sort_unstable();
    told.dedup();
    assert_eq!(told, [0, 1, 2, 3, 4]);
    let _ = calls::recv(fd, 10, 0);
    assert_eq!(ready(epfd), [1, 2, 3, 4]);
    let timer = calls::timerfd(Duration::from_millis(30)).expect("timerfd");
    let timers = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(timers, timer, EPOLLIN, 5).expect("EPOLL_CTL_ADD");
    calls::epoll_add(timers, fd, EPOLLIN, 6).expect("EPOLL_CTL_ADD");
    assert_eq!(ready(timers), [5]);
    stop(side);
}

fn woken_by_a_pipe(side: &Side, fd: Fd) {
    let (reading, writing) = calls::pipe().expect("pipe");
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    calls::epoll_add(epfd, reading, EPOLLIN, 2).expect("EPOLL_CTL_ADD");
    for _ in 0..3 {
        let ready = while_blocked(
            || calls::epoll_wait(epfd, 8, -1),
            || {
                quietly(|| calls::write(writing, b"p")).expect("write");
            },
        );
        assert_eq!(ready.map(|ready| ready[0].data), Ok(2));
        let _ = calls::read(reading, 1);
    }
    side.sync("done");
}

fn woken_by_an_addition(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    demand(side);
    await_readable(fd);
    let ready = while_blocked(
        || calls::epoll_wait(epfd, 8, -1),
        || {
            quietly(|| calls::epoll_add(epfd, fd, EPOLLIN, 1)).expect("EPOLL_CTL_ADD");
        },
    );
    assert_eq!(ready.map(|ready| ready.len()), Ok(1));
    stop(side);
}

/// Five warmed-up connections in a set.
fn five_connections(side: &Side) -> (Fd, Vec<Fd>) {
    connections_in_a_set(side, 5)
}

fn connections_in_a_set(side: &Side, count: u64) -> (Fd, Vec<Fd>) {
    let listener = side.listen();
    let epfd = calls::epoll_create().expect("epoll_create1");
    let fds = (0..count)
        .map(|index| {
            let fd = side.accept(listener);
            side.answer_warm_up(fd);
            calls::epoll_add(epfd, fd, EPOLLIN, index).expect("EPOLL_CTL_ADD");
            fd
        })
        .collect();
    (epfd, fds)
}

fn sends_on_five(side: &Side) {
    sends_in_turn(side, |fds| fds);
}

fn sends_on_five_from_the_last(side: &Side) {
    sends_in_turn(side, |fds| fds.into_iter().rev().collect());
}

/// Sends on five connections, in the order that `order` gives to those who were made one after the other.
fn sends_in_turn(side: &Side, order: impl Fn(Vec<Fd>) -> Vec<Fd>) {
    let destination = side.destination();
    let fds = (0..5).map(|_| {
        let fd = side.connect_to(destination);
        side.warm_up(fd);
        fd
    });
    let fds = order(fds.collect());
    side.sync("send now");
    for fd in fds {
        assert_eq!(calls::send(fd, b"data", 0), Ok(4));
    }
    side.sync("sent");
    side.sync("done");
}

/// Connections that have become ready meanwhile are reported in the order in which their bytes came.
fn reports_in_order(side: &Side) {
    let (epfd, _) = five_connections(side);
    // The kernel would report those first that have been ready before.
    assert_eq!(quietly(|| calls::epoll_wait(epfd, 5, 0)).expect("epoll_wait"), []);
    side.sync("send now");
    side.sync("sent");
    let next = |_| quietly(|| calls::epoll_wait(epfd, 1, -1)).expect("epoll_wait")[0].data;
    let order: Vec<u64> = (0..5).map(next).collect();
    assert_eq!(order, [4, 3, 2, 1, 0]);
    side.sync("done");
}

/// As [`reports_in_order`], all by one call.
fn reports_all_in_order(side: &Side) {
    let (epfd, _) = five_connections(side);
    assert_eq!(quietly(|| calls::epoll_wait(epfd, 5, 0)).expect("epoll_wait"), []);
    side.sync("send now");
    side.sync("sent");
    assert_eq!(calls::epoll_wait_in_order(epfd, 8, -1), Ok(vec![4, 3, 2, 1, 0]));
    side.sync("done");
}

/// Exchanges after which a connection has left TCP, if both sides have the library.
const CALLS: usize = 20;
/// Connections on which something comes in a certain order.
const ORDERED: usize = 8;
/// Rounds in which each of them carries a byte, in an order of the round's own, while the server takes them.
const ROUNDS: usize = 20_000;

/// The order of round number `round`: all come, one after the other.
fn order_of(round: usize) -> Vec<usize> {
    let mut left: Vec<usize> = (1..=ORDERED).collect();
    // Neighbours differ in all places.
    let (mut order, mut number) = (Vec::new(), round * 7919);
    while !left.is_empty() {
        let choices = left.len();
        order.push(left.remove(number % choices));
        number /= choices;
    }
    order
}

/// An event loop sees the bytes on its connections in the order in which they were sent, also those that come while it looks.
fn serves_in_order(side: &Side) {
    let (epfd, fds) = connections_in_a_set(side, 1 + ORDERED as u64);
    // Over this one the client is told to go on. What it answers while the server's kernel is still sending would come late.
    calls::epoll_delete(epfd, fds[0]).expect("EPOLL_CTL_DEL");
    // All have left TCP by then, if they do: docs/limitations.md has what holds beside those on TCP.
    for &fd in fds.iter().cycle().take(CALLS * fds.len()) {
        receive_exactly(fd, 1);
        assert_eq!(quietly(|| calls::send(fd, b"y", 0)), Ok(1));
    }
    side.sync("send now");
    for round in 0..ROUNDS {
        let mut order = Vec::new();
        while order.len() < ORDERED {
            // Without a sleep: after eight of them who has nothing is left to the kernel.
            yield_now();
            for index in calls::epoll_wait_in_order(epfd, 2 * ORDERED, 0).expect("epoll_wait") {
                receive_exactly(fds[index as usize], 1);
                order.push(index as usize);
            }
        }
        assert_eq!(order, order_of(round), "round {round}");
        // The kernel goes on in this order, with those that are ready again before it has looked.
        assert_eq!(quietly(|| calls::epoll_wait(epfd, 8, 0)), Ok(vec![]));
        assert_eq!(quietly(|| calls::send(fds[0], b"next", 0)), Ok(4));
    }
    side.sync("done");
}

fn sends_in_many_orders(side: &Side) {
    let destination = side.destination();
    let connect = |_| {
        let fd = side.connect_to(destination);
        side.send_at_once(fd);
        side.warm_up(fd);
        fd
    };
    let fds: Vec<Fd> = (0..=ORDERED).map(connect).collect();
    for &fd in fds.iter().cycle().take(CALLS * fds.len()) {
        assert_eq!(quietly(|| calls::send(fd, b"x", 0)), Ok(1));
        receive_exactly(fd, 1);
    }
    side.sync("send now");
    for round in 0..ROUNDS {
        for index in order_of(round) {
            assert_eq!(quietly(|| calls::send(fds[index], b"x", 0)), Ok(1));
        }
        assert_eq!(receive_exactly(fds[0], 4), b"next");
    }
    side.sync("done");
}

/// A loop that takes one event at a time, and works for it, while there is always one of a pipe.
fn behind_a_busy_pipe(side: &Side, fd: Fd) {
    const TURNS: usize = 1000;
    const WORK: Duration = Duration::from_micros(60);
    let epfd = calls::epoll_create().expect("epoll_create1");
    let (_reading, writing) = calls::pipe().expect("pipe");
    calls::epoll_add(epfd, writing, libc::EPOLLOUT, 1).expect("EPOLL_CTL_ADD");
    calls::epoll_add(epfd, fd, EPOLLIN, 2).expect("EPOLL_CTL_ADD");
    for _ in 0..20 {
        demand(side);
        let comes = |_| {
            let ready = quietly(|| calls::epoll_wait(epfd, 1, -1)).expect("epoll_wait");
            let start = Instant::now();
            while start.elapsed() < WORK {}
            ready[0].data == 2
        };
        assert!((0..TURNS).any(comes), "it is not told of in {TURNS} turns");
        assert_eq!(quietly(|| calls::recv(fd, 10, 0)), Ok(b"data".to_vec()));
    }
    stop(side);
}

fn few_at_a_time(side: &Side) {
    let (epfd, fds) = five_connections(side);
    side.sync("send now");
    side.sync("sent");
    for &fd in &fds {
        await_readable(fd);
    }
    // Level-triggered entries take turns, so that two calls with room for three see all five.
    let mut seen: Vec<u64> = Vec::new();
    for _ in 0..2 {
        let ready = quietly(|| calls::epoll_wait(epfd, 3, -1)).expect("epoll_wait");
        assert_eq!(ready.len(), 3);
        seen.extend(ready.iter().map(|ready| ready.data));
    }
    seen.sort_unstable();
    seen.dedup();
    say!("seen {seen:?}");
    assert_eq!(seen.len(), 5);
    side.sync("done");
}

/// Connections that are always ready do not keep a pipe from being seen, even one event at a time.
fn nothing_starves(side: &Side) {
    let (epfd, fds) = five_connections(side);
    let (reading, writing) = calls::pipe().expect("pipe");
    calls::epoll_add(epfd, reading, EPOLLIN, 5).expect("EPOLL_CTL_ADD");
    side.sync("send now");
    side.sync("sent");
    for &fd in &fds {
        await_readable(fd);
    }
    let _ = calls::write(writing, b"p");
    let mut seen: Vec<u64> = Vec::new();
    for _ in 0..12 {
        let ready = quietly(|| calls::epoll_wait(epfd, 1, -1)).expect("epoll_wait");
        seen.push(ready[0].data);
    }
    seen.sort_unstable();
    seen.dedup();
    say!("seen {seen:?}");
    side.sync("done");
}

/// One event under one-shot goes to one of two waiting threads; the other goes on waiting.
fn one_of_two_waiters(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, EPOLLIN | EPOLLONESHOT, 1).expect("EPOLL_CTL_ADD");
    let (reading, writing) = calls::pipe().expect("pipe");
    let events = AtomicUsize::new(0);
    let wait = || {
        quietly(|| {
            loop {
                let ready = calls::epoll_wait(epfd, 8, -1).expect("epoll_wait");
                if ready.iter().any(|ready| ready.data == 2) {
                    return;
                }
                events.fetch_add(ready.len(), Ordering::SeqCst);
            }
        });
    };
    std::thread::scope(|scope| {
        scope.spawn(wait);
        while_blocked(wait, || {
            demand(side);
            while events.load(Ordering::SeqCst) == 0 {
                pause();
            }
            // Level-triggered, so that both threads see it and leave.
            quietly(|| calls::epoll_add(epfd, reading, EPOLLIN, 2)).expect("EPOLL_CTL_ADD");
            quietly(|| calls::write(writing, b"p")).expect("write");
        });
    });
    say!("{} event", events.load(Ordering::SeqCst));
    stop(side);
}

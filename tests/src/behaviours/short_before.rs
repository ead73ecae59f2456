//! Connections at a port whose earlier ones were short: the library waits longer before it looks for the peer, and keeps less of
//! them until then.

use std::time::{Duration, Instant};

use libc::EPOLLIN;
use thallus_transport::arena::View;

use super::peers::{echo, own_arenas, send_all};
use super::{Behaviour, Tally};
use crate::calls::{self, Fd, quietly};
use crate::side::{Side, receive_exactly};

/// Connections, after which both ends wait as long as they ever do: 64 calls.
const SHORT: u64 = 60;
/// The first of them. After 32 a client waits for 16 calls, after these for 32.
const FIRST: u64 = 40;
/// Requests on the last connection until something else is done with it. It has grown up by the 30th.
const BETWEEN: usize = 10;
/// Requests after which both of its ends have left TCP.
const MANY: usize = 150;
/// Before the first of them.
const IDLE: Duration = Duration::from_millis(50);
/// As without the variable: with it, nothing is learned.
const ENVIRONMENT: &[(&str, &str)] = &[("THALLUS_UPGRADE_AFTER", "")];

/// None but the last can have left TCP. A server's other reasons depend on who is faster.
const THE_LAST: Tally = Tally::AtLeast(1, SHORT + 1);
/// The client has looked for its peer until it had learned, and not once since, but for the last.
const HAS_LEARNED: Tally = Tally::Mixed(1, &[("no-answer", 32), ("short", SHORT - 32)]);

const fn behaviour(name: &'static str, server: fn(&Side), client: fn(&Side)) -> Behaviour {
    Behaviour::whole(name, server, client, THE_LAST)
        .tally(THE_LAST, HAS_LEARNED)
        .over_verbs(THE_LAST, THE_LAST)
        .environment(ENVIRONMENT)
}

pub(super) const ALL: &[Behaviour] = &[
    behaviour("echoed", echoes, requests),
    behaviour("in_an_epoll_set", echoes_by_events, requests),
    behaviour("by_another_number", echoes_by_another_number, requests_by_another_number),
    // As long as another thread is inside, nobody takes it out of TCP.
    Behaviour::whole("served_by_threads", echoes_by_threads, requests, Tally::Total(SHORT + 1))
        .environment(ENVIRONMENT),
];

/// Requests on a short connection, so few that none leaves TCP: of the first 32 the client looks for its peer in the last call, and had it
/// learned nothing since, of those behind [`FIRST`] again.
fn few(index: u64) -> usize {
    if index < FIRST { 4 } else { 8 }
}

/// The last connection, after all short ones.
fn last(side: &Side, listener: Fd) -> Fd {
    for index in 0..SHORT {
        let fd = side.accept(listener);
        assert_eq!(echo(fd), few(index) * 8);
        quietly(|| calls::close(fd)).expect("close");
    }
    side.accept(listener)
}

fn connect_last(side: &Side) -> Fd {
    let destination = side.destination();
    quietly(|| {
        for index in 0..SHORT {
            let fd = side.connect_to(destination);
            ask(fd, few(index));
            calls::close(fd).expect("close");
        }
    });
    side.connect_to(destination)
}

/// So many requests of 8 bytes, each of which comes back.
fn ask(fd: Fd, rounds: usize) {
    for round in 0..rounds {
        let request = round.to_le_bytes();
        send_all(fd, &request);
        assert_eq!(receive_exactly(fd, request.len()), request, "echo {round}");
    }
}

fn answer(fd: Fd, rounds: usize) {
    for _ in 0..rounds {
        let bytes = receive_exactly(fd, 8);
        assert_eq!(calls::send(fd, &bytes, 0), Ok(8));
    }
}

fn requests(side: &Side) {
    let fd = connect_last(side);
    ask(fd, MANY);
    calls::close(fd).expect("close");
    side.sync("done");
}

/// The connection's age counts from its accept, not from where the library began to keep more of it.
fn echoes(side: &Side) {
    let fd = last(side, side.listen());
    let opened = Instant::now();
    std::thread::sleep(IDLE);
    assert_eq!(echo(fd), MANY * 8);
    let age = opened.elapsed();
    let arenas = own_arenas();
    let blocks = arenas.iter().flat_map(View::blocks).filter(|(_, block)| block.connection().is_some());
    for (_, block) in blocks {
        assert!(block.age() >= age, "{:?}, not {age:?}", block.age());
    }
    side.sync("done");
}

/// The end of the last connection is an event of the same registration.
fn echoes_by_events(side: &Side) {
    let fd = last(side, side.listen());
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, EPOLLIN, 5).expect("EPOLL_CTL_ADD");
    let mut rounds = 0;
    loop {
        let ready = quietly(|| calls::epoll_wait(epfd, 8, -1)).expect("epoll_wait");
        assert_eq!(ready.iter().map(|ready| ready.data).collect::<Vec<_>>(), [5]);
        let bytes = quietly(|| calls::recv(fd, 8, 0)).expect("recv");
        if bytes.is_empty() {
            break;
        }
        assert_eq!(quietly(|| calls::send(fd, &bytes, 0)), Ok(8));
        rounds += 1;
    }
    assert_eq!(rounds, MANY);
    side.sync("done");
}

/// The connection is duplicated while little is known of it, and its first number closed.
fn echoes_by_another_number(side: &Side) {
    let fd = last(side, side.listen());
    answer(fd, BETWEEN);
    let other = calls::dup(fd).expect("dup");
    answer(other, BETWEEN);
    calls::close(fd).expect("close");
    assert_eq!(echo(other), (MANY - 2 * BETWEEN) * 8);
    side.sync("done");
}

fn requests_by_another_number(side: &Side) {
    let fd = connect_last(side);
    ask(fd, BETWEEN);
    let other = calls::dup(fd).expect("dup");
    calls::close(fd).expect("close");
    ask(other, MANY - BETWEEN);
    calls::close(other).expect("close");
    side.sync("done");
}

/// Each of several threads in turn answers some, so that one is inside a read when another's call makes the connection grow up.
fn echoes_by_threads(side: &Side) {
    const THREADS: usize = 3;
    let fd = last(side, side.listen());
    let served = quietly(|| {
        std::thread::scope(|scope| {
            let threads = [(); THREADS].map(|()| scope.spawn(move || quietly(|| echo(fd))));
            threads.map(|thread| thread.join().expect("no thread fails")).iter().sum::<usize>()
        })
    });
    assert_eq!(served, MANY * 8);
    side.sync("done");
}

//! The switch from TCP to the ring in the middle of streams.
//!
//! Nothing here warms a connection up: bytes are on their way in both directions, in pieces and with
//! pauses of random length, when the upgrade comes. Each stream must arrive without a byte lost, doubled
//! or out of place.

use super::peers::{fill, request_echoes, send_all};
use super::{Behaviour, Tally};
use crate::calls::{self, Errno, Fd, quietly};
use crate::say;
use crate::side::{
    ARRIVAL, Pattern, Side, await_readable, receive_exactly, receive_pattern, receive_pattern_to_end,
    send_pattern,
};

const RUNS: u64 = 40;

/// Streams that run freely may be over before the other side has come to answer.
const MOST: Tally = Tally::AtLeast(RUNS / 2, RUNS);

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::whole("both_ways_with_slow_readers", slow_readers_server, slow_readers_client, MOST),
    Behaviour::whole("both_ways_by_poll", polling_server, polling_client, MOST),
    Behaviour::whole("both_ways_by_epoll", epolling_server, epolling_client, MOST),
    Behaviour::whole("one_way_to_the_client", sends_much, receives_much, Tally::Total(RUNS)),
    Behaviour::whole("one_way_to_the_server", receives_much_server, sends_much_client, Tally::Total(RUNS)),
    Behaviour::whole("by_a_server_that_only_sends", only_sends, receives_to_the_end, Tally::Unknown)
        .tally(Tally::Mixed(0, &[("nothing-read", 1)]), Tally::Stayed(1))
        .over_verbs(Tally::Mixed(0, &[("peer-spoke-first", 1)]), Tally::Stayed(1)),
    Behaviour::whole(
        "by_a_server_that_only_sends_at_first",
        sends_before_it_reads,
        receives_and_asks,
        Tally::Upgraded(1),
    )
    .over_verbs(Tally::Mixed(0, &[("peer-spoke-first", 1)]), Tally::Stayed(1)),
    Behaviour::whole("while_a_reader_is_blocked", blocked_server, blocked_client, MOST),
    Behaviour::whole("requests_and_responses", answers, asks, Tally::Upgraded(RUNS)),
    Behaviour::whole("while_waiting_for_all", waits_for_all, sends_in_pieces, Tally::Upgraded(RUNS)),
    Behaviour::whole("with_much_unread", leaves_much_unread, fills_before_it_asks, Tally::Upgraded(RUNS)),
    // The server answers only when the client has shut down.
    Behaviour::whole("the_end_behind_unread_bytes", awaits_the_end, sends_and_ends, Tally::Upgraded(RUNS))
        .over_verbs(
            Tally::Mixed(0, &[("no-answer", RUNS)]),
            Tally::Mixed(0, &[("shutdown-before-upgrade", RUNS)]),
        ),
    Behaviour::whole("full_while_it_leaves_tcp", fills_while_switching, empties_and_asks, Tally::Upgraded(1))
        .environment(&[("THALLUS_SPIN_US", "0")]),
    Behaviour::whole(
        "full_before_it_leaves_tcp",
        fills_before_switching,
        empties_and_asks,
        Tally::Upgraded(1),
    )
    .environment(&[("THALLUS_SPIN_US", "0")]),
    Behaviour::whole(
        "full_before_it_joins_a_set",
        fills_before_registering,
        offers_and_empties,
        Tally::Upgraded(1),
    )
    .environment(&[("THALLUS_SPIN_US", "0")])
    // The server speaks first.
    .over_verbs(Tally::Mixed(0, &[("peer-spoke-first", 1)]), Tally::Mixed(0, &[("peer-without-thallus", 1)])),
    Behaviour::whole("more_than_was_there", reads_more_than_was_there, fills_both, Tally::Upgraded(1))
        .environment(&[("THALLUS_RING", "64K")])
        // The server answers nothing.
        .over_verbs(Tally::Mixed(0, &[("no-answer", 1)]), Tally::Mixed(0, &[("no-answer", 1)]))
        // One of `AF_UNIX` is never under way: what is sent is there.
        .tcp_only(),
    Behaviour::whole("room_all_along", writes_bit_by_bit, empties_and_asks, Tally::Upgraded(1)),
    Behaviour::whole(
        "room_all_along_in_a_nested_set",
        writes_for_a_nested_set,
        empties_and_asks,
        Tally::Upgraded(1),
    ),
    Behaviour::whole("peeking_all_along", peeks_along, asks, Tally::Upgraded(RUNS)),
];

/// The connection leaves TCP at the first write, which is of more pieces than one system call of ours takes. Then it is
/// filled, over TCP, because the client is not ready yet.
fn fills_while_switching(side: &Side) {
    fills(side, |fd| {
        assert_eq!(calls::recv(fd, 10, 0), Ok(b"ask".to_vec()));
        assert_eq!(calls::writev(fd, &[&[b'f'; 100][..]; 40]), Ok(4000));
        4000 + fill(fd)
    });
}

/// The connection is filled, and leaves TCP at the next read.
fn fills_before_switching(side: &Side) {
    fills(side, |fd| {
        let total = fill(fd);
        assert_eq!(calls::recv(fd, 10, 0), Ok(b"ask".to_vec()));
        assert_eq!(quietly(|| calls::recv(fd, 10, 0)), Err(Errno::EAGAIN));
        total
    });
}

/// The connection is filled by its first call, joins an edge-triggered set, and leaves TCP at one of the next reads.
fn fills_before_registering(side: &Side) {
    let listener = side.listen();
    let fd = calls::accept4(listener, libc::SOCK_NONBLOCK).expect("accept4");
    side.sync("asked");
    let much = vec![b'f'; 16 << 20];
    let total = quietly(|| calls::send(fd, &much, 0)).expect("send");
    assert!(total < much.len(), "all of it was taken");
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET, 1).expect("EPOLL_CTL_ADD");
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"ask".to_vec()));
    for _ in 0..20 {
        assert_eq!(quietly(|| calls::recv(fd, 10, 0)), Err(Errno::EAGAIN));
    }
    answers_on(side, fd, epfd, total);
}

const LAST: usize = 1000;

/// Bytes in the ring lie behind others that TCP has not delivered yet when the set reports, and when this side asks how much
/// there is. So they are news when it has read more than that. nginx, which then waits for an edge, relies on it.
fn reads_more_than_was_there(side: &Side) {
    let listener = side.listen();
    let fd = calls::accept4(listener, libc::SOCK_NONBLOCK).expect("accept4");
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET, 1).expect("EPOLL_CTL_ADD");
    side.sync("full");
    let mut pattern = Pattern::new(41);
    for count in 0..20 {
        if count == 6 {
            is_seen_to_wait(fd);
        }
        pattern.expect(&calls::recv(fd, 10, 0).expect("recv"));
    }
    side.sync("answered");
    let total = side.told();
    assert_eq!(calls::epoll_wait(epfd, 4, -1).expect("epoll_wait").len(), 1);
    quietly(|| {
        let there = pattern.position() + calls::unread(fd).expect("FIONREAD") as u64;
        assert!(there < total - LAST as u64, "TCP has delivered all of it");
        while pattern.position() < total - LAST as u64 {
            await_readable(fd);
            let most = (total - pattern.position()) as usize - LAST;
            pattern.expect(&calls::recv(fd, most, 0).expect("recv"));
        }
    });
    assert_eq!(calls::epoll_wait(epfd, 4, -1).expect("epoll_wait").len(), 1);
    pattern.expect(&quietly(|| calls::recv(fd, LAST, 0)).expect("recv"));
    side.sync("done");
}

/// Or the connection would stay on TCP.
pub(super) fn is_seen_to_wait(fd: Fd) {
    quietly(|| calls::poll(&[(fd, libc::POLLIN)], 0)).expect("poll");
}

/// Fills TCP's buffers, and then the ring.
fn fills_both(side: &Side) {
    let fd = side.connect();
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    for _ in 0..12 {
        assert_eq!(quietly(|| calls::recv(fd, 1, 0)), Err(Errno::EAGAIN));
    }
    is_seen_to_wait(fd);
    let mut pattern = Pattern::new(41);
    let mut fill = || {
        quietly(|| {
            loop {
                let data = pattern.take(1 << 20);
                let sent = calls::send(fd, &data, 0);
                pattern.put_back(data.len() - sent.unwrap_or(0));
                if sent.is_err() {
                    break;
                }
            }
        });
        pattern.position()
    };
    fill();
    side.sync("full");
    side.sync("answered");
    let total = fill();
    side.tell(total);
    side.sync("done");
}

/// The connection leaves TCP while only room is waited for, and is never full: each wait tells of room once more, though the
/// client is not ready, and reads nothing.
fn writes_bit_by_bit(side: &Side) {
    writes_when_told(side, |epfd| epfd);
}

fn writes_for_a_nested_set(side: &Side) {
    writes_when_told(side, |inner| {
        let outer = calls::epoll_create().expect("epoll_create1");
        calls::epoll_add(outer, inner, libc::EPOLLIN, 2).expect("EPOLL_CTL_ADD");
        outer
    });
}

/// Each of many writes waits for the set that `over` makes of one which watches for room.
fn writes_when_told(side: &Side, over: impl Fn(Fd) -> Fd) {
    let listener = side.listen();
    let fd = calls::accept4(listener, libc::SOCK_NONBLOCK).expect("accept4");
    side.sync("asked");
    await_readable(fd);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"ask".to_vec()));
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, libc::EPOLLOUT, 1).expect("EPOLL_CTL_ADD");
    let waits = over(epfd);
    for _ in 0..40 {
        assert_eq!(quietly(|| calls::epoll_wait(waits, 4, -1)).expect("epoll_wait").len(), 1);
        assert!(quietly(|| calls::epoll_wait(epfd, 4, 0)).is_ok_and(|ready| ready[0].has(libc::EPOLLOUT)));
        assert_eq!(quietly(|| calls::send(fd, b"bit", 0)), Ok(3));
    }
    answers_on(side, fd, epfd, 120);
}

/// `until_full` gives back how much it has written. When the client is ready, the edge for room is still owed.
fn fills(side: &Side, until_full: impl Fn(Fd) -> usize) {
    const EVENTS: libc::c_int = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET;
    let listener = side.listen();
    let fd = calls::accept4(listener, libc::SOCK_NONBLOCK).expect("accept4");
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, EVENTS, 1).expect("EPOLL_CTL_ADD");
    side.sync("asked");
    await_readable(fd);
    assert!(quietly(|| calls::epoll_wait(epfd, 4, -1)).is_ok_and(|ready| ready[0].has(libc::EPOLLOUT)));
    answers_on(side, fd, epfd, quietly(|| until_full(fd)));
}

/// The client is to read the `total` bytes that were sent; then there is room.
fn answers_on(side: &Side, fd: Fd, epfd: Fd, total: usize) {
    side.tell(total as u64);
    side.sync("emptied");
    let room = quietly(|| calls::epoll_wait(epfd, 4, -1)).expect("epoll_wait");
    assert!(room[0].has(libc::EPOLLOUT));
    side.sync("room");
    calls::set_nonblocking(fd, false).expect("FIONBIO");
    for _ in 0..20 {
        quietly(|| assert_eq!(receive_exactly(fd, 3), b"ask"));
        quietly(|| send_all(fd, b"answer"));
    }
    side.sync("done");
}

fn empties_and_asks(side: &Side) {
    let fd = side.connect();
    send_all(fd, b"ask");
    empties_after_asking(side, fd);
}

/// As [`empties_and_asks`], after enough calls that the server can leave TCP at any of its own.
fn offers_and_empties(side: &Side) {
    let fd = side.connect();
    send_all(fd, b"ask");
    for _ in 0..20 {
        assert_eq!(quietly(|| calls::recv(fd, 1, libc::MSG_DONTWAIT)), Err(Errno::EAGAIN));
    }
    empties_after_asking(side, fd);
}

fn empties_after_asking(side: &Side, fd: Fd) {
    side.sync("asked");
    let total = side.told() as usize;
    quietly(|| receive_exactly(fd, total));
    side.sync("emptied");
    // With bytes of this side's the other would be told of room as well.
    side.sync("room");
    for _ in 0..20 {
        quietly(|| send_all(fd, b"ask"));
        assert_eq!(quietly(|| receive_exactly(fd, 6)), b"answer");
    }
    side.sync("done");
}

/// Small random numbers of a known seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % sides
    }

    /// A size that is small as often as it is large.
    fn size(&mut self) -> usize {
        let bits = self.roll(17);
        1 + self.roll(1 << bits)
    }

    /// Lets the other side run for a moment, sometimes. By yields, though these are slow on a busy machine: with sleeps in their
    /// place `handing_on::in_mid_stream` is refused the way back (`EOPNOTSUPP`) in one of six runs.
    fn pause(&mut self) {
        for _ in 0..[0, 0, 0, 1, 5, 50][self.roll(6)] {
            std::thread::yield_now();
        }
    }
}

fn each_accepted(side: &Side, body: impl Fn(u64, Fd)) {
    let listener = side.listen();
    quietly(|| {
        for run in 0..RUNS {
            let fd = side.accept(listener);
            body(run, fd);
            calls::close(fd).expect("close");
        }
    });
    say!("{RUNS} connections served");
}

fn each_connected(side: &Side, body: impl Fn(u64, Fd)) {
    let destination = side.destination();
    quietly(|| {
        for run in 0..RUNS {
            let fd = side.connect_to(destination);
            body(run, fd);
            calls::close(fd).expect("close");
        }
    });
    say!("{RUNS} connections used");
}

const LENGTH: usize = 300_000;

/// A thread for each direction.
pub(super) fn stream_both_ways(fd: Fd, ours: u64, theirs: u64, length: usize) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            quietly(|| {
                let (mut dice, mut pattern) = (Dice(ours), Pattern::new(ours));
                while (pattern.position() as usize) < length {
                    let size = dice.size().min(length - pattern.position() as usize);
                    send_pattern(fd, &mut pattern, size, size);
                    dice.pause();
                }
                calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
            });
        });
        let (mut dice, mut pattern) = (Dice(theirs ^ 99), Pattern::new(theirs));
        while (pattern.position() as usize) < length {
            let size = dice.size().min(length - pattern.position() as usize);
            receive_pattern(fd, &mut pattern, size, size);
            dice.pause();
        }
        assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
    });
}

fn slow_readers_server(side: &Side) {
    each_accepted(side, |run, fd| stream_both_ways(fd, 2 * run, 2 * run + 1, LENGTH));
}

fn slow_readers_client(side: &Side) {
    each_connected(side, |run, fd| stream_both_ways(fd, 2 * run + 1, 2 * run, LENGTH));
}

/// How far a stream that does not block may be ahead of the one in the other direction. On a busy machine one side would else be done with all of it before the
/// other has made a call, and nothing would leave TCP.
const LEAD: u64 = LENGTH as u64 / 5;

/// Which wait drives [`stream_nonblocking`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    Poll,
    EdgeTriggeredEpoll,
}

/// One thread, non-blocking, both directions, of which this side's gets at most `lead` bytes ahead.
pub(super) fn stream_nonblocking(fd: Fd, ours: u64, theirs: u64, length: usize, lead: u64, wait: Wait) {
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    let epfd = calls::epoll_create().expect("epoll_create1");
    if wait == Wait::EdgeTriggeredEpoll {
        let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
        calls::epoll_add(epfd, fd, events, 0).expect("EPOLL_CTL_ADD");
    }
    let mut dice = Dice(ours);
    let (mut ours, mut theirs) = (Pattern::new(ours), Pattern::new(theirs));
    let (mut may_write, mut may_read) = (true, true);
    let all = length as u64;
    while ours.position() < all || theirs.position() < all {
        dice.pause();
        let wants_write = ours.position() < all.min(theirs.position().saturating_add(lead));
        let wants_read = theirs.position() < all;
        if wants_write && may_write && dice.roll(2) == 0 {
            let data = ours.take(dice.size().min((all - ours.position()) as usize));
            match calls::send(fd, &data, 0) {
                Ok(sent) => ours.put_back(data.len() - sent),
                Err(error) => {
                    assert_eq!(error, Errno::EAGAIN);
                    ours.put_back(data.len());
                    may_write = false;
                }
            }
        }
        if wants_read && may_read && dice.roll(2) == 0 {
            match calls::recv(fd, dice.size().min((all - theirs.position()) as usize), 0) {
                Ok(data) => {
                    assert!(!data.is_empty(), "the stream ended early");
                    theirs.expect(&data);
                }
                Err(error) => {
                    assert_eq!(error, Errno::EAGAIN);
                    may_read = false;
                }
            }
        }
        let stuck = !(wants_write && may_write || wants_read && may_read);
        let timeout = if stuck { -1 } else { 0 };
        match wait {
            Wait::Poll if stuck => {
                let write = if wants_write { libc::POLLOUT } else { 0 };
                let read = if wants_read { libc::POLLIN } else { 0 };
                let ready = calls::poll(&[(fd, write | read)], timeout).expect("poll")[0];
                may_write |= ready & libc::POLLOUT != 0;
                may_read |= ready & libc::POLLIN != 0;
            }
            Wait::Poll => {}
            Wait::EdgeTriggeredEpoll => {
                for ready in calls::epoll_wait(epfd, 4, timeout).expect("epoll_wait") {
                    may_write |= ready.has(libc::EPOLLOUT);
                    may_read |= ready.has(libc::EPOLLIN);
                }
            }
        }
    }
    calls::close(epfd).expect("close");
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    calls::set_nonblocking(fd, false).expect("FIONBIO");
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
}

fn polling_server(side: &Side) {
    each_accepted(side, |run, fd| stream_nonblocking(fd, 2 * run, 2 * run + 1, LENGTH, LEAD, Wait::Poll));
}

fn polling_client(side: &Side) {
    each_connected(side, |run, fd| stream_nonblocking(fd, 2 * run + 1, 2 * run, LENGTH, LEAD, Wait::Poll));
}

fn epolling_server(side: &Side) {
    each_accepted(side, |run, fd| {
        stream_nonblocking(fd, 2 * run, 2 * run + 1, LENGTH, LEAD, Wait::EdgeTriggeredEpoll)
    });
}

fn epolling_client(side: &Side) {
    each_connected(side, |run, fd| {
        stream_nonblocking(fd, 2 * run + 1, 2 * run, LENGTH, LEAD, Wait::EdgeTriggeredEpoll)
    });
}

fn send_at_random(run: u64, fd: Fd) {
    let (mut dice, mut pattern) = (Dice(run), Pattern::new(run));
    while (pattern.position() as usize) < LENGTH {
        let size = dice.size().min(LENGTH - pattern.position() as usize);
        send_pattern(fd, &mut pattern, size, size);
        dice.pause();
    }
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
}

fn receive_at_random(run: u64, fd: Fd) {
    let (mut dice, mut pattern) = (Dice(run ^ 77), Pattern::new(run));
    loop {
        let data = calls::recv(fd, dice.size(), 0).expect("recv");
        if data.is_empty() {
            break;
        }
        pattern.expect(&data);
        dice.pause();
    }
    assert_eq!(pattern.position(), LENGTH as u64);
}

fn sends_much(side: &Side) {
    each_accepted(side, |run, fd| {
        send_at_random(run, fd);
        assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
    });
}

fn receives_much(side: &Side) {
    each_connected(side, receive_at_random);
}

fn receives_much_server(side: &Side) {
    each_accepted(side, receive_at_random);
}

fn sends_much_client(side: &Side) {
    each_connected(side, |run, fd| {
        send_at_random(run, fd);
        assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
    });
}

/// How often, each time [`PIECE`] bytes.
const SENDS: usize = 200;
const PIECE: usize = 100;

/// Nothing proves that it would read by a hook.
fn only_sends(side: &Side) {
    let fd = side.accept(side.listen());
    sends_pieces(fd);
    calls::close(fd).expect("close");
}

fn sends_pieces(fd: Fd) {
    let mut pattern = Pattern::new(7);
    for _ in 0..SENDS {
        quietly(|| send_pattern(fd, &mut pattern, PIECE, PIECE));
    }
}

fn receives_to_the_end(side: &Side) {
    let fd = side.connect();
    assert_eq!(quietly(|| receive_pattern_to_end(fd, &mut Pattern::new(7))), SENDS * PIECE);
}

fn sends_before_it_reads(side: &Side) {
    let fd = side.accept(side.listen());
    sends_pieces(fd);
    super::peers::echo(fd);
}

fn receives_and_asks(side: &Side) {
    let fd = side.connect();
    quietly(|| receive_pattern(fd, &mut Pattern::new(7), SENDS * PIECE, PIECE));
    request_echoes(fd, 300, 100);
}

/// A reader that has gone to sleep before the upgrade is woken by what comes after it.
fn blocked_server(side: &Side) {
    each_accepted(side, |run, fd| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                quietly(|| receive_pattern(fd, &mut Pattern::new(run), 200, 1));
            });
            for round in 0..100u8 {
                send_all(fd, &[round]);
                Dice(run + u64::from(round)).pause();
            }
        });
    });
}

fn blocked_client(side: &Side) {
    each_connected(side, |run, fd| {
        let mut pattern = Pattern::new(run);
        for round in 0..100u8 {
            assert_eq!(receive_exactly(fd, 1), [round]);
            send_pattern(fd, &mut pattern, 2, 2);
        }
    });
}

fn asks(side: &Side) {
    each_connected(side, |run, fd| request_echoes(fd, 40, 100 + 50 * run as usize));
}

fn answers(side: &Side) {
    each_accepted(side, |_, fd| {
        super::peers::echo(fd);
    });
}

fn peeks_along(side: &Side) {
    each_accepted(side, |_, fd| {
        loop {
            let peeked = calls::recv(fd, 5000, libc::MSG_PEEK).expect("recv");
            let data = calls::recv(fd, 5000, 0).expect("recv");
            assert!(data.starts_with(&peeked), "what was peeked at comes first");
            if data.is_empty() {
                break;
            }
            send_all(fd, &data);
        }
    });
}

const BLOCK: usize = 5000;

fn waits_for_all(side: &Side) {
    each_accepted(side, |run, fd| {
        let mut pattern = Pattern::new(run);
        for _ in 0..30 {
            let data = calls::recv(fd, BLOCK, libc::MSG_WAITALL).expect("recv");
            assert_eq!(data.len(), BLOCK, "MSG_WAITALL gives all");
            pattern.expect(&data);
            send_all(fd, b"ok");
        }
    });
}

fn sends_in_pieces(side: &Side) {
    each_connected(side, |run, fd| {
        side.send_at_once(fd);
        let (mut dice, mut pattern) = (Dice(run), Pattern::new(run));
        for _ in 0..30 {
            let mut left = BLOCK;
            while left > 0 {
                let size = (1 + dice.roll(2000)).min(left);
                send_pattern(fd, &mut pattern, size, size);
                dice.pause();
                left -= size;
            }
            assert_eq!(receive_exactly(fd, 2), b"ok");
        }
    });
}

/// Much was sent over TCP, and is still unread, when the sender has switched.
fn fills_before_it_asks(side: &Side) {
    each_connected(side, |run, fd| {
        let mut pattern = Pattern::new(run);
        send_pattern(fd, &mut pattern, 600_000, 40_000);
        for round in 0..20u8 {
            assert_eq!(receive_exactly(fd, 1), [round]);
            send_pattern(fd, &mut pattern, 1000, 1000);
        }
        calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
        assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
    });
}

fn leaves_much_unread(side: &Side) {
    each_accepted(side, |run, fd| {
        let mut pattern = Pattern::new(run);
        for round in 0..20u8 {
            receive_pattern(fd, &mut pattern, 100, 100);
            send_all(fd, &[round]);
        }
        receive_pattern_to_end(fd, &mut pattern);
        assert_eq!(pattern.position(), 620_000);
    });
}

/// Waits for nothing but the end, as whoever has no room for more bytes does.
fn awaits_the_end(side: &Side) {
    each_accepted(side, |run, fd| {
        side.sync("sent");
        let mut pattern = Pattern::new(run);
        receive_pattern(fd, &mut pattern, 300, 100);
        side.sync("more");
        match run % 3 {
            0 => {
                let ready = calls::poll(&[(fd, libc::POLLRDHUP)], ARRIVAL).expect("poll");
                assert_eq!(ready, [libc::POLLRDHUP]);
            }
            trigger => {
                let edge = if trigger == 1 { 0 } else { libc::EPOLLET };
                let epfd = calls::epoll_create().expect("epoll_create1");
                calls::epoll_add(epfd, fd, libc::EPOLLRDHUP | edge, 1).expect("EPOLL_CTL_ADD");
                let ready = calls::epoll_wait(epfd, 8, ARRIVAL).expect("epoll_wait");
                assert_eq!(
                    ready.iter().map(|ready| ready.events).collect::<Vec<_>>(),
                    [libc::EPOLLRDHUP as u32]
                );
                calls::close(epfd).expect("close");
            }
        }
        receive_pattern_to_end(fd, &mut pattern);
        assert_eq!(pattern.position(), 8000);
        send_all(fd, b"!");
    });
    side.sync("done");
}

fn sends_and_ends(side: &Side) {
    each_connected(side, |run, fd| {
        let mut dice = Dice(run);
        let mut pattern = Pattern::new(run);
        send_pattern(fd, &mut pattern, 2000, 100);
        side.sync("sent");
        side.sync("more");
        for _ in 0..60 {
            send_pattern(fd, &mut pattern, 100, 100);
            dice.pause();
        }
        calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
        assert_eq!(receive_exactly(fd, 1), b"!");
    });
    side.sync("done");
}

//! Sleepers on several descriptors, who are woken beside the connection's own socket.

use std::time::Duration;

use super::peers::{fill, left_for_memory, send_all, waits};
use super::{Behaviour, Tally};
use crate::calls::{self, Errno, Fd, Leave, fork, quietly};
use crate::say;
use crate::side::{Side, receive_exactly, while_blocked};

pub(super) const ALL: &[Behaviour] = &[
    chimed("asleep_in_poll", answers_by_poll, asks, [0, MOST]),
    chimed("asleep_in_select", answers_by_select, asks, [0, MOST]),
    chimed("asleep_in_epoll", answers_by_epoll, asks, [0, MOST]),
    chimed("asleep_in_edge_triggered_epoll", answers_by_edge_epoll, asks, [0, MOST]),
    chimed("asleep_in_one_shot_epoll", answers_by_one_shot_epoll, asks, [0, MOST]),
    chimed("both_asleep_in_poll", answers_by_poll, asks_by_poll, [MOST, MOST]),
    chimed("asleep_in_two_sets", answers_by_two_sets, asks, [0, MOST]),
    chimed("asleep_in_one_set_after_the_other", answers_by_new_sets, asks, [0, MOST]),
    chimed("asleep_in_epoll_and_poll", answers_by_epoll_and_poll, asks, [0, MOST]),
    Behaviour::connected("asleep_in_epoll_and_poll_at_once", answers_at_once, asks_at_once)
        .environment(WITHOUT_SPIN)
        .chimes(0, MOST),
    chimed("its_own_set_is_closed_unseen", answers_after_an_unseen_close, asks, [0, MOST]),
    Behaviour::connected("asleep_in_a_set_that_is_closed", asleep_in_a_closed_set, sends_when_told)
        .environment(WITHOUT_SPIN)
        .limitation("**An epoll set that is closed**"),
    chimed("asleep_until_writable", waits_for_room, drains, [0, 1]),
    chimed("asleep_until_writable_by_epoll", waits_for_room_by_epoll, drains, [0, 1]),
    // Only one thread of a process listens at a time: the others are woken as ever.
    Behaviour::whole("four_threads_asleep", answers_in_threads, asks_in_turn, Tally::Upgraded(4))
        .environment(WITHOUT_SPIN)
        .chimes(0, 1),
    // A child has no part in what its parent is woken by.
    chimed("asleep_in_a_child", answers_in_child, asks, [0, 0]).alone(&["shared-before-upgrade"]),
    chimed("asleep_beside_a_child", answers_beside_child, asks, [0, MOST]).alone(&["shared-before-upgrade"]),
    Behaviour::whole(
        "asleep_in_a_child_with_a_connection_of_its_own",
        answers_in_child_with_its_own,
        asks_on_the_first,
        Tally::Upgraded(2),
    )
    .environment(WITHOUT_SPIN)
    .alone(&["shared-before-upgrade"]),
    Behaviour::connected("end_of_stream_while_asleep", sees_the_end, ends).environment(WITHOUT_SPIN),
    Behaviour::connected("other_descriptors_wake_too", sees_the_other_descriptor, waits)
        .environment(WITHOUT_SPIN),
];

const WITHOUT_SPIN: &[(&str, &str)] = &[("THALLUS_SPIN_US", "0")];

const fn chimed(
    name: &'static str,
    left: fn(&Side, Fd),
    right: fn(&Side, Fd),
    [by_left, by_right]: [u64; 2],
) -> Behaviour {
    Behaviour::connected(name, left, right).environment(WITHOUT_SPIN).chimes(by_left, by_right)
}

const REQUESTS: u8 = 60;
/// So many of them find a sleeper on any machine.
const MOST: u64 = REQUESTS as u64 / 2;

/// Time after which whoever is to be asked is asleep, nearly always.
const REST: Duration = Duration::from_millis(1);

fn ask(fd: Fd, number: u8) {
    std::thread::sleep(REST);
    quietly(|| send_all(fd, &[number]));
}

fn asks(_side: &Side, fd: Fd) {
    for number in 0..REQUESTS {
        ask(fd, number);
        assert_eq!(quietly(|| receive_exactly(fd, 1)), [number]);
    }
    say!("{REQUESTS} answers");
}

fn asks_by_poll(_side: &Side, fd: Fd) {
    for number in 0..REQUESTS {
        ask(fd, number);
        quietly(|| poll(fd));
        assert_eq!(quietly(|| calls::recv(fd, 8, 0)), Ok(vec![number]));
    }
    say!("{REQUESTS} answers");
}

/// Answers each request after `wait` has returned, and no sooner.
fn answers(fd: Fd, count: u8, mut wait: impl FnMut()) {
    for number in 0..count {
        quietly(&mut wait);
        assert_eq!(quietly(|| calls::recv(fd, 8, libc::MSG_DONTWAIT)), Ok(vec![number]));
        // Whoever asked may have gone to sleep by then.
        std::thread::sleep(REST);
        quietly(|| send_all(fd, &[number]));
    }
}

fn poll(fd: Fd) {
    // The peer may have ended meanwhile.
    let ready = calls::poll(&[(fd, libc::POLLIN)], -1).expect("poll");
    assert_eq!(ready[0] & libc::POLLIN, libc::POLLIN);
}

fn answers_by_poll(_side: &Side, fd: Fd) {
    answers(fd, REQUESTS, || poll(fd));
}

fn answers_by_select(_side: &Side, fd: Fd) {
    answers(fd, REQUESTS, || assert!(calls::select(&[fd], &[], &[], None).is_ok()));
}

fn set_of(fd: Fd, events: i32) -> Fd {
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, events, 7).expect("EPOLL_CTL_ADD");
    epfd
}

fn await_event(epfd: Fd) {
    let ready = calls::epoll_wait(epfd, 8, -1).expect("epoll_wait");
    assert_eq!(ready.iter().map(|event| event.data).collect::<Vec<_>>(), [7]);
}

fn answers_by_epoll(_side: &Side, fd: Fd) {
    let epfd = set_of(fd, libc::EPOLLIN);
    answers(fd, REQUESTS, || await_event(epfd));
}

fn answers_by_edge_epoll(_side: &Side, fd: Fd) {
    let epfd = set_of(fd, libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET);
    answers(fd, REQUESTS, || await_event(epfd));
}

fn answers_by_one_shot_epoll(_side: &Side, fd: Fd) {
    let epfd = set_of(fd, libc::EPOLLIN | libc::EPOLLONESHOT);
    answers(fd, REQUESTS, || {
        await_event(epfd);
        calls::epoll_modify(epfd, fd, libc::EPOLLIN | libc::EPOLLONESHOT, 7).expect("EPOLL_CTL_MOD");
    });
}

/// In turn.
fn answers_by_two_sets(_side: &Side, fd: Fd) {
    let sets = [(); 2].map(|()| set_of(fd, libc::EPOLLIN));
    let mut turns = sets.iter().cycle();
    answers(fd, REQUESTS, || await_event(*turns.next().expect("a cycle")));
}

fn answers_by_new_sets(_side: &Side, fd: Fd) {
    let mut epfd = set_of(fd, libc::EPOLLIN);
    let mut waits = 0;
    answers(fd, REQUESTS, || {
        waits += 1;
        if waits % 10 == 0 {
            calls::close(epfd).expect("close");
            epfd = set_of(fd, libc::EPOLLIN);
        }
        await_event(epfd);
    });
}

/// More often by epoll, so that bells are left.
fn answers_by_epoll_and_poll(_side: &Side, fd: Fd) {
    let epfd = set_of(fd, libc::EPOLLIN);
    let mut waits = 0;
    answers(fd, REQUESTS, || {
        waits += 1;
        if waits % 7 == 0 { poll(fd) } else { await_event(epfd) }
    });
}

/// Requests without a rest: bells come while the other side is about to sleep.
const MANY: u32 = 20_000;

fn answers_at_once(_side: &Side, fd: Fd) {
    let epfd = set_of(fd, libc::EPOLLIN);
    quietly(|| {
        for number in 0..MANY {
            if number % 2 == 0 {
                await_event(epfd)
            } else {
                poll(fd)
            }
            assert_eq!(calls::recv(fd, 8, libc::MSG_DONTWAIT), Ok(b"x".to_vec()));
            send_all(fd, b"x");
        }
    });
}

/// Without sleeping, and each time a little later after the answer, so that some bells come just before the other side sleeps.
fn asks_at_once(_side: &Side, fd: Fd) {
    quietly(|| {
        for number in 0..MANY {
            for _ in 0..number % 512 {
                std::hint::spin_loop();
            }
            send_all(fd, b"x");
            let mut answer = Err(Errno::EAGAIN);
            while answer == Err(Errno::EAGAIN) {
                answer = calls::recv(fd, 8, libc::MSG_DONTWAIT);
            }
            assert_eq!(answer, Ok(b"x".to_vec()));
        }
    });
}

/// By who closes what it has not opened, by system calls of its own: among it the library's set.
fn answers_after_an_unseen_close(_side: &Side, fd: Fd) {
    let epfd = set_of(fd, libc::EPOLLIN);
    let mut waits = 0;
    answers(fd, REQUESTS, || {
        waits += 1;
        if waits == 20 {
            assert_eq!(calls::close_sets_unseen(512), left_for_memory(), "the library's sets");
        }
        await_event(epfd);
    });
}

/// The set lives on as long as somebody sleeps on it.
fn asleep_in_a_closed_set(side: &Side, fd: Fd) {
    let epfd = set_of(fd, libc::EPOLLIN);
    let (reading, writing) = calls::pipe().expect("pipe");
    calls::epoll_add(epfd, reading, libc::EPOLLIN, 8).expect("EPOLL_CTL_ADD");
    let woken = while_blocked(
        || calls::epoll_wait(epfd, 8, -1),
        || {
            quietly(|| {
                calls::close(epfd).expect("close");
                calls::write(writing, b"x").expect("write");
            });
        },
    );
    say!("{woken:?}");
    side.sync("now");
    assert_eq!(calls::recv(fd, 8, 0), Ok(b"data".to_vec()));
}

fn sends_when_told(side: &Side, fd: Fd) {
    side.sync("now");
    send_all(fd, b"data");
}

fn waits_for_room(side: &Side, fd: Fd) {
    side.tell(fill(fd) as u64);
    assert_eq!(calls::poll(&[(fd, libc::POLLOUT)], -1), Ok(vec![libc::POLLOUT]));
    side.sync("done");
}

fn waits_for_room_by_epoll(side: &Side, fd: Fd) {
    let epfd = set_of(fd, libc::EPOLLOUT);
    side.tell(fill(fd) as u64);
    await_event(epfd);
    side.sync("done");
}

fn drains(side: &Side, fd: Fd) {
    let total = side.told() as usize;
    std::thread::sleep(20 * REST);
    quietly(|| receive_exactly(fd, total));
    side.sync("done");
}

const THREADS: usize = 4;

fn answers_in_threads(side: &Side) {
    let listener = side.listen();
    let fds: Vec<Fd> = (0..THREADS).map(|_| side.accept(listener)).collect();
    for &fd in &fds {
        side.answer_warm_up(fd);
    }
    std::thread::scope(|scope| {
        for (index, &fd) in fds.iter().enumerate() {
            scope.spawn(move || {
                if index % 2 == 0 {
                    answers(fd, REQUESTS, || poll(fd));
                } else {
                    let epfd = quietly(|| set_of(fd, libc::EPOLLIN));
                    answers(fd, REQUESTS, || await_event(epfd));
                }
            });
        }
    });
}

fn asks_in_turn(side: &Side) {
    let destination = side.destination();
    let fds: Vec<Fd> = (0..THREADS).map(|_| side.connect_to(destination)).collect();
    for &fd in &fds {
        side.warm_up(fd);
    }
    for number in 0..REQUESTS {
        for &fd in &fds {
            quietly(|| send_all(fd, &[number]));
        }
        for &fd in &fds {
            assert_eq!(quietly(|| receive_exactly(fd, 1)), [number]);
        }
    }
    say!("{REQUESTS} answers of each");
}

fn answers_in_child(_side: &Side, fd: Fd) {
    fork(Leave::AtOnce, || answers(fd, REQUESTS, || poll(fd))).wait_for_success();
}

/// The child can be woken by those whom it has met itself, but by them alone.
fn answers_in_child_with_its_own(side: &Side) {
    let listener = side.listen();
    let first = side.accept(listener);
    side.answer_warm_up(first);
    fork(Leave::Exit, || {
        let own = quietly(|| side.accept(listener));
        side.answer_warm_up(own);
        answers(first, REQUESTS, || poll(first));
    })
    .wait_for_success();
}

fn asks_on_the_first(side: &Side) {
    let destination = side.destination();
    let [first, second] = [(); 2].map(|()| {
        let fd = side.connect_to(destination);
        side.warm_up(fd);
        fd
    });
    asks(side, first);
    calls::close(second).expect("close");
}

/// The child has the parent's set, and everything else by which the parent is woken.
fn answers_beside_child(_side: &Side, fd: Fd) {
    let epfd = set_of(fd, libc::EPOLLIN);
    answers(fd, 5, || await_event(epfd));
    let (reading, writing) = calls::pipe().expect("pipe");
    let child = fork(Leave::AtOnce, || {
        // Beside its parent's calls.
        quietly(|| {
            calls::close(writing).expect("close");
            let unused = calls::epoll_create().expect("epoll_create1");
            assert_eq!(calls::epoll_wait(unused, 8, 20), Ok(vec![]));
            assert_eq!(calls::read(reading, 1), Ok(vec![]));
        });
    });
    for number in 5..REQUESTS {
        quietly(|| await_event(epfd));
        assert_eq!(quietly(|| calls::recv(fd, 8, libc::MSG_DONTWAIT)), Ok(vec![number]));
        quietly(|| send_all(fd, &[number]));
    }
    calls::close(writing).expect("close");
    child.wait_for_success();
}

fn sees_the_end(side: &Side, fd: Fd) {
    let epfd = set_of(fd, libc::EPOLLIN | libc::EPOLLRDHUP);
    side.sync("asleep");
    await_event(epfd);
    assert_eq!(calls::recv(fd, 8, 0), Ok(vec![]));
    assert_eq!(calls::poll(&[(fd, libc::POLLIN)], -1), Ok(vec![libc::POLLIN]));
}

fn ends(side: &Side, fd: Fd) {
    side.sync("asleep");
    std::thread::sleep(20 * REST);
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    assert_eq!(calls::recv(fd, 8, 0), Ok(vec![]));
}

/// Who is woken by chimes is woken by everything else as well, and by time and signals.
fn sees_the_other_descriptor(side: &Side, fd: Fd) {
    let epfd = set_of(fd, libc::EPOLLIN);
    for _ in 0..20 {
        quietly(|| {
            let timer = calls::timerfd(Duration::from_millis(2)).expect("timerfd");
            calls::epoll_add(epfd, timer, libc::EPOLLIN, 7).expect("EPOLL_CTL_ADD");
            await_event(epfd);
            assert_eq!(calls::epoll_wait(epfd, 8, 0).map(|ready| ready.len()), Ok(1));
            calls::close(timer).expect("close");
            assert_eq!(calls::epoll_wait(epfd, 8, 3), Ok(vec![]));
        });
    }
    assert_eq!(calls::recv(fd, 8, libc::MSG_DONTWAIT), Err(Errno::EAGAIN));
    say!("20 timers");
    side.sync("done");
}

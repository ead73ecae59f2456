//! Signals that arrive during calls.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::Behaviour;
use super::peers::{demand, drains_on_demand, sends_on_demand, stop};
use crate::calls::{self, Child, Errno, Fd, Leave, SignalSet, caught, quietly, signal_thread, thread_id};
use crate::say;
use crate::side::{
    Side, await_asleep, await_process_asleep, await_readable, pause, receive_exactly, while_blocked,
};

const SIGNAL: libc::c_int = libc::SIGUSR1;

/// What a fork before the upgrade may end in.
const SHARED: &[&str] = &["shared-before-upgrade"];

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("interrupted_receive", interrupted_receive, sends_when_told),
    Behaviour::connected("restarted_receive", restarted_receive, sends_when_told),
    Behaviour::connected("receive_with_timeout_is_not_restarted", timeout_is_not_restarted, sends_when_told),
    Behaviour::connected("interrupted_waitall_gives_what_it_has", interrupted_waitall, sends_half),
    Behaviour::connected("any_signal_ends_a_waitall_that_has_some", ended_waitall, sends_half),
    Behaviour::connected("interrupted_send", interrupted_send, reads_when_told),
    Behaviour::connected("any_signal_ends_a_send_that_has_sent", ended_send, reads_when_told),
    Behaviour::connected("any_signal_ends_a_sendfile_that_has_sent", ended_sendfile, reads_when_told),
    Behaviour::connected(
        "restarted_send_beside_a_receive_timeout",
        restarted_send_with_limit,
        reads_when_told,
    ),
    Behaviour::connected("restarted_send", restarted_send, reads_when_told),
    Behaviour::connected("restarted_send_of_one_that_does_not_read", restarted_send_only, reads_when_told),
    Behaviour::connected("one_of_two_handlers_ends_a_send", one_of_two_handlers, reads_when_told),
    Behaviour::connected("interrupted_waits", interrupted_waits, sends_when_told),
    Behaviour::connected("masks_of_waits", masks_of_waits, sends_when_told),
    Behaviour::connected("masks_of_looks", masks_of_looks, sends_when_told),
    Behaviour::connected("ready_comes_before_a_signal", ready_comes_first, sends_when_told),
    Behaviour::connected("signals_at_any_moment", signals_at_any_moment, sends_when_told),
    Behaviour::connected("restarted_at_any_moment", restarted_at_any_moment, answers_many),
    Behaviour::connected("a_handler_that_sends", a_handler_that_sends, counts_two_kinds),
    Behaviour::connected("a_handler_that_closes", a_handler_that_closes, drains_on_demand),
    Behaviour::connected("a_handler_that_receives", a_handler_that_receives, sends_many),
    Behaviour::connected("a_handler_that_forks", a_handler_that_forks, sends_on_demand).alone(SHARED),
];

fn sends_when_told(side: &Side, fd: Fd) {
    side.sync("send now");
    assert_eq!(calls::send(fd, b"data", 0), Ok(4));
    side.sync("done");
}

/// Interrupts `call` with a signal once it blocks.
fn interrupted<T>(call: impl FnOnce() -> T) -> T {
    let thread = thread_id();
    while_blocked(call, || signal_thread(thread, SIGNAL))
}

/// Interrupts `call` with a signal once it blocks; when the handler has run, and it blocks again, runs `then`.
fn interrupted_then<T>(call: impl FnOnce() -> T, then: impl FnOnce() + Send) -> T {
    let thread = thread_id();
    let before = caught(SIGNAL);
    while_blocked(call, || {
        signal_thread(thread, SIGNAL);
        while caught(SIGNAL) == before {
            pause();
        }
        then();
    })
}

fn interrupted_receive(side: &Side, fd: Fd) {
    calls::catch(SIGNAL, false);
    let ways: &[fn(Fd) -> Option<Errno>] = &[
        |fd| calls::recv(fd, 10, 0).err(),
        |fd| calls::recv(fd, 10, libc::MSG_PEEK).err(),
        |fd| calls::recv(fd, 10, libc::MSG_WAITALL).err(),
        |fd| calls::read(fd, 10).err(),
        |fd| calls::readv(fd, &[5, 5]).err(),
        |fd| calls::recvfrom(fd, 10, 0).err(),
        |fd| calls::recvmsg(fd, &[5, 5], 0, 0).err(),
        |fd| calls::read_chk(fd, 10).err(),
        |fd| calls::recv_chk(fd, 10, 0).err(),
    ];
    for way in ways {
        assert_eq!(interrupted(|| way(fd)), Some(Errno::EINTR));
    }
    say!("caught {}", caught(SIGNAL));
    side.sync("send now");
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    side.sync("done");
}

fn restarted_receive(side: &Side, fd: Fd) {
    calls::catch(SIGNAL, true);
    let data = interrupted_then(|| calls::recv(fd, 10, 0), || side.sync("send now"));
    assert_eq!(data, Ok(b"data".to_vec()));
    say!("caught {}", caught(SIGNAL));
    side.sync("done");
}

fn timeout_is_not_restarted(side: &Side, fd: Fd) {
    calls::catch(SIGNAL, true);
    calls::set_receive_timeout(fd, Duration::from_secs(20)).expect("SO_RCVTIMEO");
    // signal(7): a socket call with a timeout is never restarted.
    assert_eq!(interrupted(|| calls::recv(fd, 10, 0)), Err(Errno::EINTR));
    say!("caught {}", caught(SIGNAL));
    side.sync("send now");
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    side.sync("done");
}

fn sends_half(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"01234", 0), Ok(5));
    side.sync("sent");
    side.sync("done");
}

fn interrupted_waitall(side: &Side, fd: Fd) {
    calls::catch(SIGNAL, false);
    waitall_gives_what_it_has(side, fd);
}

/// signal(7) restarts only what has moved nothing.
fn ended_waitall(side: &Side, fd: Fd) {
    calls::catch(SIGNAL, true);
    waitall_gives_what_it_has(side, fd);
}

fn waitall_gives_what_it_has(side: &Side, fd: Fd) {
    side.sync("sent");
    await_readable(fd);
    assert_eq!(interrupted(|| calls::recv(fd, 10, libc::MSG_WAITALL)), Ok(b"01234".to_vec()));
    side.sync("done");
}

/// Sends until a write would block, and again until it stays so.
fn fill(fd: Fd) -> usize {
    let piece = [b'x'; 4096];
    let mut total = 0;
    while let Ok(sent) = quietly(|| calls::send(fd, &piece, libc::MSG_DONTWAIT)) {
        total += sent;
    }
    total
}

fn reads_when_told(side: &Side, fd: Fd) {
    side.sync("read now");
    let mut total = 0;
    loop {
        let data = quietly(|| calls::recv(fd, 65536, 0)).expect("recv");
        if data.is_empty() {
            break;
        }
        assert!(data.iter().all(|&byte| byte == b'x'));
        total += data.len();
    }
    side.tell(total as u64);
}

fn interrupted_send(side: &Side, fd: Fd) {
    calls::catch(SIGNAL, false);
    let mut total = fill(fd);
    let huge = vec![b'x'; 64 << 20];
    let error = loop {
        // A kernel may find a little room after it refused.
        match interrupted(|| quietly(|| calls::send(fd, &huge, 0))) {
            Ok(sent) => total += sent,
            Err(error) => break error,
        }
    };
    say!("send = {error}");
    side.sync("read now");
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    assert_eq!(side.told(), total as u64, "bytes counted and bytes that arrived");
}

fn ended_send(side: &Side, fd: Fd) {
    let huge = vec![b'x'; HUGE];
    gives_what_it_has_sent(side, fd, || calls::send(fd, &huge, 0));
}

fn ended_sendfile(side: &Side, fd: Fd) {
    let file = calls::file_with(&vec![b'x'; HUGE]).expect("memfd_create");
    gives_what_it_has_sent(side, fd, || calls::sendfile(fd, file, HUGE));
}

const HUGE: usize = 64 << 20;

fn gives_what_it_has_sent(side: &Side, fd: Fd, send: impl FnOnce() -> calls::Outcome<usize>) {
    calls::catch(SIGNAL, true);
    let sent = interrupted(|| quietly(send)).expect("a part of it");
    assert!((1..HUGE).contains(&sent), "{sent} bytes");
    say!("caught {}", caught(SIGNAL));
    side.sync("read now");
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    assert_eq!(side.told(), sent as u64, "bytes counted and bytes that arrived");
}

fn restarted_send_with_limit(side: &Side, fd: Fd) {
    calls::set_receive_timeout(fd, Duration::from_secs(20)).expect("SO_RCVTIMEO");
    restarted_send(side, fd);
}

fn restarted_send(side: &Side, fd: Fd) {
    calls::catch(SIGNAL, true);
    let filled = fill(fd);
    let more = vec![b'x'; 1 << 20];
    let sent = interrupted_then(|| quietly(|| calls::send(fd, &more, 0)), || side.sync("read now"));
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    let sent = sent.expect("an interrupted send goes on");
    assert_eq!(side.told(), (filled + sent) as u64, "bytes counted and bytes that arrived");
    say!("caught {}", caught(SIGNAL));
}

/// Shuts reading down first: then the library sleeps in another way.
fn restarted_send_only(side: &Side, fd: Fd) {
    calls::shutdown(fd, libc::SHUT_RD).expect("shutdown");
    restarted_send(side, fd);
}

fn one_of_two_handlers(side: &Side, fd: Fd) {
    calls::catch(SIGNAL, true);
    calls::catch(libc::SIGUSR2, false);
    calls::shutdown(fd, libc::SHUT_RD).expect("shutdown");
    let mut total = fill(fd);
    let huge = vec![b'x'; 64 << 20];
    let thread = thread_id();
    let error = loop {
        let sleeps_on = || {
            await_asleep(thread);
            signal_thread(thread, libc::SIGUSR2);
        };
        // A kernel may find a little room after it refused.
        match interrupted_then(|| quietly(|| calls::send(fd, &huge, 0)), sleeps_on) {
            Ok(sent) => total += sent,
            Err(error) => break error,
        }
    };
    say!("send = {error}");
    side.sync("read now");
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    assert_eq!(side.told(), total as u64, "bytes counted and bytes that arrived");
}

fn interrupted_waits(side: &Side, fd: Fd) {
    // These are never restarted, whatever the handler says.
    calls::catch(SIGNAL, true);
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, libc::EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    let long = Some(Duration::from_secs(20));
    assert_eq!(interrupted(|| calls::poll(&[(fd, libc::POLLIN)], -1)), Err(Errno::EINTR));
    assert_eq!(interrupted(|| calls::poll(&[(fd, libc::POLLIN)], 20_000)), Err(Errno::EINTR));
    assert_eq!(interrupted(|| calls::poll_chk(&[(fd, libc::POLLIN)], -1)), Err(Errno::EINTR));
    assert_eq!(interrupted(|| calls::ppoll(&[(fd, libc::POLLIN)], None, None)), Err(Errno::EINTR));
    assert_eq!(interrupted(|| calls::ppoll(&[(fd, libc::POLLIN)], long, None)), Err(Errno::EINTR));
    assert_eq!(interrupted(|| calls::select(&[fd], &[], &[], None)), Err(Errno::EINTR));
    assert_eq!(interrupted(|| calls::select(&[fd], &[], &[], long)), Err(Errno::EINTR));
    assert_eq!(interrupted(|| calls::pselect(&[fd], &[], &[], None, None)), Err(Errno::EINTR));
    assert_eq!(interrupted(|| calls::epoll_wait(epfd, 4, -1)), Err(Errno::EINTR));
    assert_eq!(interrupted(|| calls::epoll_pwait(epfd, 4, -1, None)), Err(Errno::EINTR));
    assert_eq!(interrupted(|| calls::epoll_pwait_until(epfd, 4, None, None)), Err(Errno::EINTR));
    say!("caught {}", caught(SIGNAL));
    side.sync("send now");
    assert_eq!(calls::poll(&[(fd, libc::POLLIN)], -1), Ok(vec![libc::POLLIN]));
    side.sync("done");
}

/// So it does with one that does not wait, if there is nothing.
fn masks_of_looks(side: &Side, fd: Fd) {
    calls::catch(SIGNAL, true);
    let (open, closed) = (SignalSet::of(&[]), SignalSet::of(&[SIGNAL]));
    closed.block_only();
    let ways: [fn(Fd, &SignalSet) -> Option<Errno>; 2] = [
        |fd, mask| calls::ppoll(&[(fd, libc::POLLIN)], Some(Duration::ZERO), Some(mask)).err(),
        |fd, mask| calls::pselect(&[fd], &[], &[], Some(Duration::ZERO), Some(mask)).err(),
    ];
    for (round, way) in ways.into_iter().enumerate() {
        signal_thread(thread_id(), SIGNAL);
        assert_eq!(way(fd, &closed), None);
        assert_eq!(caught(SIGNAL), round, "a blocked signal was delivered");
        assert_eq!(way(fd, &open), Some(Errno::EINTR));
        assert_eq!(caught(SIGNAL), round + 1, "the signal was not delivered during the look");
    }
    side.sync("send now");
    await_readable(fd);
    for way in ways {
        signal_thread(thread_id(), SIGNAL);
        assert_eq!(way(fd, &open), None);
        assert_eq!(caught(SIGNAL), ways.len(), "what is there comes first");
    }
    side.sync("done");
}

/// Waits for the connection, or the set that holds it, under a mask; the error.
type WaitWithMask = fn(Fd, Fd, &SignalSet, Duration) -> Option<Errno>;

/// A signal that is pending and blocked ends a wait whose mask lets it through, and no other.
fn masks_of_waits(side: &Side, fd: Fd) {
    calls::catch(SIGNAL, true);
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, libc::EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    let (open, closed) = (SignalSet::of(&[]), SignalSet::of(&[SIGNAL]));
    closed.block_only();
    let short = Duration::from_millis(20);
    let ways: &[WaitWithMask] = &[
        |fd, _, mask, timeout| calls::ppoll(&[(fd, libc::POLLIN)], Some(timeout), Some(mask)).err(),
        |fd, _, mask, timeout| calls::pselect(&[fd], &[], &[], Some(timeout), Some(mask)).err(),
        |_, epfd, mask, timeout| {
            calls::epoll_pwait(epfd, 4, timeout.as_millis() as libc::c_int, Some(mask)).err()
        },
        |_, epfd, mask, timeout| calls::epoll_pwait_until(epfd, 4, Some(timeout), Some(mask)).err(),
    ];
    for (round, way) in ways.iter().enumerate() {
        signal_thread(thread_id(), SIGNAL);
        assert_eq!(way(fd, epfd, &closed, short), None);
        assert_eq!(caught(SIGNAL), round, "a blocked signal was delivered");
        assert_eq!(way(fd, epfd, &open, Duration::from_secs(20)), Some(Errno::EINTR));
        assert_eq!(caught(SIGNAL), round + 1, "the signal was not delivered during the wait");
    }
    side.sync("send now");
    side.sync("done");
}

fn ready_comes_first(side: &Side, fd: Fd) {
    calls::catch(SIGNAL, true);
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, libc::EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    SignalSet::of(&[SIGNAL]).block_only();
    let open = SignalSet::of(&[]);
    let long = Some(Duration::from_secs(20));
    side.sync("send now");
    await_readable(fd);
    signal_thread(thread_id(), SIGNAL);
    let _ = calls::ppoll(&[(fd, libc::POLLIN)], long, Some(&open));
    say!("caught {}", caught(SIGNAL));
    let _ = calls::pselect(&[fd], &[], &[], long, Some(&open));
    say!("caught {}", caught(SIGNAL));
    let _ = calls::epoll_pwait(epfd, 4, 20_000, Some(&open));
    say!("caught {}", caught(SIGNAL));
    let _ = calls::epoll_pwait_until(epfd, 4, long, Some(&open));
    say!("caught {}", caught(SIGNAL));
    side.sync("done");
}

/// Runs `body` while another thread sends volleys of signals to this one.
fn under_fire<T>(body: impl FnOnce() -> T) -> T {
    let thread = thread_id();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                (0..16).for_each(|_| signal_thread(thread, SIGNAL));
                pause();
            }
        });
        let result = body();
        over.store(true, Ordering::SeqCst);
        result
    })
}

/// A signal while a call looks for data without sleeping must end it as well.
fn signals_at_any_moment(side: &Side, fd: Fd) {
    calls::catch(SIGNAL, false);
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, libc::EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    under_fire(|| {
        quietly(|| {
            for _ in 0..300 {
                assert_eq!(calls::recv(fd, 10, 0), Err(Errno::EINTR));
                assert_eq!(calls::poll(&[(fd, libc::POLLIN)], -1), Err(Errno::EINTR));
                assert_eq!(calls::epoll_wait(epfd, 4, -1), Err(Errno::EINTR));
                assert_eq!(calls::select(&[fd], &[], &[], None), Err(Errno::EINTR));
            }
        });
    });
    side.sync("send now");
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    side.sync("done");
}

const MANY: usize = 3000;

fn restarted_at_any_moment(side: &Side, fd: Fd) {
    calls::catch(SIGNAL, true);
    under_fire(|| {
        for round in 0..MANY {
            let request = (round as u64).to_be_bytes();
            assert_eq!(quietly(|| calls::send(fd, &request, 0)), Ok(8));
            assert_eq!(receive_exactly(fd, 8), request);
        }
    });
    say!("{MANY} rounds");
    side.sync("done");
}

fn answers_many(side: &Side, fd: Fd) {
    for _ in 0..MANY {
        let request = receive_exactly(fd, 8);
        assert_eq!(quietly(|| calls::send(fd, &request, 0)), Ok(8));
    }
    side.sync("done");
}

/// A handler may call send, which POSIX lists as safe, while the thread is inside a send of its own.
fn a_handler_that_sends(side: &Side, fd: Fd) {
    calls::catch_and_send(SIGNAL, fd);
    let piece = [b'x'; 1000];
    under_fire(|| {
        for _ in 0..MANY {
            let mut rest = &piece[..];
            while !rest.is_empty() {
                let sent = quietly(|| calls::send(fd, rest, 0)).expect("send");
                rest = &rest[sent..];
            }
        }
    });
    let by_handler = caught(SIGNAL);
    say!("sent {}", MANY * piece.len());
    calls::default_action(SIGNAL);
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    side.tell(by_handler as u64);
    side.sync("done");
}

/// What is in an epoll set, while the program finds no room in it.
fn a_handler_that_closes(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, libc::EPOLLIN | libc::EPOLLET, 1).expect("EPOLL_CTL_ADD");
    let mut total = fill(fd);
    side.sync("full");
    calls::catch_and_copy(SIGNAL, fd);
    under_fire(|| {
        while caught(SIGNAL) < MANY {
            total += quietly(|| calls::send(fd, b"data", libc::MSG_DONTWAIT)).unwrap_or(0);
        }
    });
    calls::default_action(SIGNAL);
    side.tell(total as u64);
    side.sync("drain now");
    side.sync("drained");
    side.sync("done");
}

fn counts_two_kinds(side: &Side, fd: Fd) {
    let (mut by_main, mut by_handler) = (0u64, 0u64);
    loop {
        let data = quietly(|| calls::recv(fd, 65536, 0)).expect("recv");
        if data.is_empty() {
            break;
        }
        for byte in data {
            match byte {
                b'x' => by_main += 1,
                calls::HANDLER_BYTE => by_handler += 1,
                other => panic!("nobody sent {other}"),
            }
        }
    }
    say!("received {by_main}");
    assert_eq!(by_handler, side.told(), "bytes sent by the handler");
    side.sync("done");
}

/// The same for recv: main and handler share the bytes between them, and none is lost.
fn a_handler_that_receives(side: &Side, fd: Fd) {
    calls::catch_and_receive(SIGNAL, fd);
    let mut by_main = 0;
    under_fire(|| {
        loop {
            let data = quietly(|| calls::recv(fd, 100, 0)).expect("recv");
            if data.is_empty() {
                break;
            }
            assert!(data.iter().all(|&byte| byte == b'x'));
            by_main += data.len();
        }
    });
    say!("received {}", by_main + calls::received_by_handler());
    side.sync("done");
}

fn sends_many(side: &Side, fd: Fd) {
    for _ in 0..MANY {
        assert_eq!(quietly(|| calls::send(fd, &[b'x'; 300], 0)), Ok(300));
    }
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    side.sync("done");
}

/// Parent and child return from the handler, and from the call that it has interrupted. What the child does then is nothing to the parent.
fn a_handler_that_forks(side: &Side, fd: Fd) {
    calls::catch_and_fork(SIGNAL);
    let set = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(set, fd, libc::EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    let (reading, writing) = quietly(calls::pipe).expect("pipe");
    let waits: [&dyn Fn() -> Option<Errno>; 3] = [
        &|| calls::recv(fd, 4, libc::MSG_PEEK).err(),
        &|| calls::poll(&[(fd, libc::POLLIN)], -1).err(),
        &|| calls::epoll_wait(set, 4, -1).err(),
    ];
    for wait in waits {
        let parent = std::process::id().cast_signed();
        let signaller = calls::fork(Leave::AtOnce, || {
            await_process_asleep(parent);
            calls::kill(parent, SIGNAL).expect("kill");
        });
        assert_eq!(quietly(wait), Some(Errno::EINTR));
        let child = calls::forked_by_handler();
        if child == 0 {
            let turn = quietly(|| calls::read(reading, 1));
            let data = quietly(|| calls::recv(fd, 4, 0));
            let gone_on = turn == Ok(b"t".to_vec()) && data == Ok(b"data".to_vec());
            calls::exit_at_once(libc::c_int::from(!gone_on));
        }
        signaller.wait_for_success();
        assert_eq!(while_blocked(|| quietly(wait), || quietly(|| demand(side))), None);
        assert_eq!(quietly(|| calls::recv(fd, 10, 0)), Ok(b"data".to_vec()));
        quietly(|| {
            calls::write(writing, b"t").expect("write");
            demand(side);
        });
        Child(child).wait_for_success();
    }
    stop(side);
}

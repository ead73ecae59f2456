//! How connections end: half-close, close, reset, exit, death.

use super::epoll_edges::{
    sends_over_tcp, sends_over_tcp_and_looks, with_bytes_put_aside, with_room_beside_bytes,
};
use super::{Behaviour, Tally};
use crate::calls::{self, End, Errno, Family, Fd, Leave, caught, quietly};
use crate::say;
use crate::side::{
    Pattern, Side, await_end_of, await_hangup, await_readable, await_unread, receive_exactly,
    receive_pattern_to_end, send_pattern, while_blocked,
};

const KILLED: End = End::Signal(libc::SIGKILL);
const FINE: End = End::Exit(0);

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("end_after_data", end_after_data, sends_and_closes),
    Behaviour::connected("half_close_here_first", half_close_first, half_close_second),
    Behaviour::connected("half_close_there_first", half_close_second, half_close_first),
    Behaviour::connected("a_long_answer_after_half_close", asks_and_half_closes, answers_at_length),
    Behaviour::connected("shutdown_of_reading", shutdown_of_reading, sends_twice_more).tcp_only(),
    Behaviour::connected("shutdown_of_both", shutdown_of_both, reads_to_the_end),
    Behaviour::connected("shutdown_of_both_behind_bytes", shutdown_of_both_at_once, reads_a_million),
    Behaviour::connected("shutdown_twice", shutdown_twice, reads_to_the_end),
    Behaviour::connected("shutdown_many_times_behind_unread_data", shutdown_many_times, reads_all_when_told),
    Behaviour::connected("shutdown_with_unread_data", shutdown_with_unread_data, notices_shutdown),
    Behaviour::connected("shutdown_wakes_a_reader", shutdown_wakes_a_reader, reads_to_the_end),
    Behaviour::connected("write_after_shutdown", write_after_shutdown, reads_to_the_end),
    Behaviour::connected("write_to_closed", write_to_closed, closes),
    Behaviour::connected("write_to_closed_by_every_call", write_to_closed_by_every_call, closes),
    Behaviour::connected("broken_pipe_kills", broken_pipe_kills, closes)
        .tally(Tally::Unknown, Tally::Upgraded(1)),
    Behaviour::connected("close_with_unread_data", close_with_unread_data, sees_a_reset),
    Behaviour::connected(
        "close_with_unread_data_both_ways",
        close_with_unread_data_after_sending,
        sees_data_and_reset,
    ),
    Behaviour::connected("linger_zero_resets", linger_zero, sees_a_reset_after_data),
    Behaviour::connected("linger_waits", linger_waits, end_after_data),
    Behaviour::connected("exit_without_close", end_after_data, exits),
    Behaviour::connected("exit_without_atexit", end_after_data, exits_at_once)
        .tally(Tally::Upgraded(1), Tally::Unknown),
    Behaviour::connected("write_after_exit", writes_to_an_ended_process, exits_unseen),
    Behaviour::connected("write_after_exit_that_nobody_counts", writes_to_an_ended_process, exits_unseen)
        .right_is_uncounted(),
    Behaviour::connected("write_after_shutdown_and_kill", writes_to_an_ended_process, is_killed_half_closed)
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .end(FINE, KILLED),
    Behaviour::connected(
        "write_after_shutdown_of_reading_and_kill",
        writes_without_reading,
        is_killed_unseen,
    )
    .tally(Tally::Upgraded(1), Tally::Unknown)
    .end(FINE, KILLED)
    // docs/limitations.md, "Unix sockets".
    .tcp_only(),
    Behaviour::connected("killed_after_sending", end_after_data, is_killed)
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .end(FINE, KILLED),
    Behaviour::connected("killed_with_unread_data", sees_a_killed_peer, is_killed_with_unread)
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .end(FINE, KILLED),
    Behaviour::connected("killed_while_the_peer_reads", blocked_reader_sees_the_end, is_killed_on_demand)
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .end(FINE, KILLED),
    Behaviour::connected("killed_while_the_peer_writes", blocked_writer_sees_the_end, is_killed_on_demand)
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .end(FINE, KILLED),
    Behaviour::connected("killed_while_busy", reads_until_it_ends, streams_until_killed)
        .tally(Tally::Upgraded(1), Tally::Unknown)
        .end(FINE, KILLED),
    Behaviour::connected("a_mebibyte_then_close", reads_a_mebibyte_after_close, sends_a_mebibyte_and_closes),
    Behaviour::connected(
        "a_mebibyte_then_killed",
        reads_a_mebibyte_after_close,
        sends_a_mebibyte_and_is_killed,
    )
    .tally(Tally::Upgraded(1), Tally::Unknown)
    .end(FINE, KILLED),
    Behaviour::connected("end_is_lasting", end_is_lasting, sends_and_closes),
    Behaviour::connected("close_while_another_thread_reads", close_while_reading, sends_when_told)
        .limitation("**`close` while another thread reads**"),
    // docs/limitations.md, "Unix sockets".
    Behaviour::whole("closed_with_bytes_on_tcp", closes_with_bytes_on_tcp, is_reset, Tally::Total(1))
        .tcp_only(),
    Behaviour::whole(
        "closed_with_bytes_put_aside",
        closes_with_bytes_put_aside,
        looks_and_is_reset,
        Tally::Total(1),
    )
    .tcp_only(),
    Behaviour::connected("shut_down_again_after_the_peer_went_back", shuts_down_again, goes_back)
        .tally(Tally::Total(1), Tally::Total(1))
        .alone(&["unsupported-call"]),
    Behaviour::whole(
        "shut_down_twice_with_bytes_on_tcp",
        |side| shuts_down_twice(side, with_room_beside_bytes(side).1),
        |side| finds_the_end(side, sends_over_tcp(side)),
        Tally::Total(1),
    ),
    Behaviour::whole(
        "shut_down_twice_with_bytes_put_aside",
        |side| shuts_down_twice(side, with_bytes_put_aside(side).1),
        |side| finds_the_end(side, sends_over_tcp_and_looks(side)),
        Tally::Total(1),
    ),
    Behaviour::whole(
        "hung_up_after_a_write_was_refused",
        writes_after_a_reset,
        resets_over_tcp,
        Tally::Total(1),
    )
    .tcp_only(),
];

fn sends_and_closes(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"farewell", 0), Ok(8));
    calls::close(fd).expect("close");
    side.sync("closed");
}

fn end_after_data(side: &Side, fd: Fd) {
    side.sync("closed");
    await_unread(fd, 8);
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"farewell".to_vec()));
    assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]));
    assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]));
    let _ = calls::read(fd, 100);
    let _ = calls::recv(fd, 100, libc::MSG_DONTWAIT);
    let _ = calls::pending_error(fd);
}

/// Without having looked at the connection since.
fn writes_to_an_ended_process(side: &Side, fd: Fd) {
    let peer = side.told() as libc::pid_t;
    side.sync("ends");
    await_end_of(peer);
    let send = || calls::send(fd, b"late", libc::MSG_NOSIGNAL);
    // The kernel of TCP takes what it is reset for.
    let first = if side.family == Family::Unix { Err(Errno::EPIPE) } else { Ok(4) };
    assert_eq!(send(), first);
    assert_eq!(send(), Err(Errno::EPIPE));
    assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]));
}

fn writes_without_reading(side: &Side, fd: Fd) {
    calls::shutdown(fd, libc::SHUT_RD).expect("shutdown");
    writes_to_an_ended_process(side, fd);
}

fn exits_unseen(side: &Side, _fd: Fd) {
    side.tell(u64::from(std::process::id()));
    side.sync("ends");
}

fn is_killed_unseen(side: &Side, fd: Fd) {
    exits_unseen(side, fd);
    calls::kill_self();
}

fn is_killed_half_closed(side: &Side, fd: Fd) {
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    is_killed_unseen(side, fd);
}

fn exits(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"farewell", 0), Ok(8));
    side.sync("closed");
}

fn exits_at_once(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"farewell", 0), Ok(8));
    side.sync("closed");
    calls::exit_at_once(0);
}

fn is_killed(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"farewell", 0), Ok(8));
    side.sync("closed");
    calls::kill_self();
}

fn half_close_first(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"question", 0), Ok(8));
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    side.sync("asked");
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"answer".to_vec()));
    side.sync("answered");
    assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]));
    side.sync("done");
}

fn half_close_second(side: &Side, fd: Fd) {
    side.sync("asked");
    await_unread(fd, 8);
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"question".to_vec()));
    assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]));
    assert_eq!(
        calls::poll(&[(fd, libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP)], 0).map(|ready| ready.len()),
        Ok(1)
    );
    assert_eq!(calls::send(fd, b"answer", 0), Ok(6));
    side.sync("answered");
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    side.sync("done");
}

fn asks_and_half_closes(_side: &Side, fd: Fd) {
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    let total = receive_pattern_to_end(fd, &mut Pattern::new(12));
    say!("received {total}");
}

fn answers_at_length(_side: &Side, fd: Fd) {
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
    send_pattern(fd, &mut Pattern::new(12), 6 << 20, 100_000);
    calls::close(fd).expect("close");
}

fn shutdown_of_reading(side: &Side, fd: Fd) {
    side.sync("sent once");
    await_readable(fd);
    calls::shutdown(fd, libc::SHUT_RD).expect("shutdown");
    let _ = calls::poll(&[(fd, libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP)], 0);
    let _ = calls::recv(fd, 100, 0);
    let _ = calls::recv(fd, 100, 0);
    side.sync("send again");
    side.sync("sent again");
    let _ = calls::recv(fd, 100, 0);
    let _ = calls::recv(fd, 100, 0);
    assert_eq!(calls::send(fd, b"still here", 0), Ok(10));
    side.sync("done");
}

fn sends_twice_more(side: &Side, fd: Fd) {
    // Else the second send may wait for the first one's acknowledgement.
    quietly(|| side.send_at_once(fd));
    assert_eq!(calls::send(fd, b"one", 0), Ok(3));
    side.sync("sent once");
    side.sync("send again");
    assert_eq!(calls::send(fd, b"two", 0), Ok(3));
    side.sync("sent again");
    assert_eq!(calls::recv(fd, 100, 0), Ok(b"still here".to_vec()));
    side.sync("done");
}

fn reads_to_the_end(side: &Side, fd: Fd) {
    while calls::recv(fd, 100, 0).is_ok_and(|data| !data.is_empty()) {}
    side.sync("done");
}

fn shutdown_of_both(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    calls::shutdown(fd, libc::SHUT_RDWR).expect("shutdown");
    let _ = calls::recv(fd, 100, 0);
    let _ = calls::send(fd, b"too late", 0);
    say!("SIGPIPE {}", caught(libc::SIGPIPE));
    let _ = calls::poll(&[(fd, libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP)], 0).map(|ready| ready.len());
    side.sync("done");
}

fn shutdown_of_both_at_once(side: &Side, fd: Fd) {
    send_pattern(fd, &mut Pattern::new(1), 1_000_000, 65536);
    calls::shutdown(fd, libc::SHUT_RDWR).expect("shutdown");
    side.sync("done");
}

fn reads_a_million(side: &Side, fd: Fd) {
    say!("{} bytes", receive_pattern_to_end(fd, &mut Pattern::new(1)));
    side.sync("done");
}

fn shutdown_twice(side: &Side, fd: Fd) {
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    let _ = calls::shutdown(fd, libc::SHUT_WR);
    let _ = calls::shutdown(fd, libc::SHUT_RD);
    let _ = calls::shutdown(fd, libc::SHUT_RDWR);
    let _ = calls::shutdown(fd, 7);
    side.sync("done");
}

/// Sends of pattern 41 what there is room for.
pub(super) fn fills(fd: Fd) -> Pattern {
    let mut pattern = Pattern::new(41);
    loop {
        let data = pattern.take(65536);
        match quietly(|| calls::send(fd, &data, libc::MSG_DONTWAIT)) {
            Ok(sent) => pattern.put_back(data.len() - sent),
            Err(error) => {
                pattern.put_back(data.len());
                assert_eq!(error, Errno::EAGAIN);
                return pattern;
            }
        }
    }
}

fn shutdown_many_times(side: &Side, fd: Fd) {
    let pattern = fills(fd);
    for _ in 0..20 {
        let _ = calls::shutdown(fd, libc::SHUT_WR);
    }
    side.tell(pattern.position());
    side.sync("done");
}

pub(super) fn reads_all_when_told(side: &Side, fd: Fd) {
    let sent = side.told();
    assert_eq!(receive_pattern_to_end(fd, &mut Pattern::new(41)) as u64, sent);
    side.sync("done");
}

fn shutdown_with_unread_data(side: &Side, fd: Fd) {
    side.sync("sent");
    await_readable(fd);
    calls::shutdown(fd, libc::SHUT_RDWR).expect("shutdown");
    let _ = calls::recv(fd, 3, 0);
    let _ = calls::recv(fd, 100, 0);
    let _ = calls::recv(fd, 100, 0);
    side.sync("done");
}

fn notices_shutdown(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    side.sync("sent");
    let _ = calls::recv(fd, 100, 0);
    side.sync("done");
}

fn shutdown_wakes_a_reader(side: &Side, fd: Fd) {
    let data = while_blocked(
        || calls::recv(fd, 100, 0),
        || {
            quietly(|| calls::shutdown(fd, libc::SHUT_RDWR)).expect("shutdown");
        },
    );
    assert_eq!(data, Ok(vec![]));
    side.sync("done");
}

fn write_after_shutdown(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    assert_eq!(calls::send(fd, b"last words", 0), Ok(10));
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    every_write_fails(side, fd, Errno::EPIPE);
    let _ = calls::poll(&[(fd, libc::POLLOUT)], 0);
    side.sync("done");
}

/// Each call's error, and how many signals it raised.
pub(super) fn every_write_fails(side: &Side, fd: Fd, error: Errno) {
    let ways: &[fn(&Side, Fd) -> Option<Errno>] = &[
        |_, fd| calls::send(fd, b"x", 0).err(),
        |_, fd| calls::send(fd, b"x", libc::MSG_NOSIGNAL).err(),
        |_, fd| calls::write(fd, b"x").err(),
        |_, fd| calls::writev(fd, &[b"x", b"y"]).err(),
        |side, fd| side.sendto(fd, b"x").err(),
        |_, fd| calls::sendmsg(fd, &[b"x"], 0).err(),
        |_, fd| calls::sendmsg(fd, &[b"x"], libc::MSG_NOSIGNAL).err(),
        |_, fd| calls::sendmmsg(fd, &[b"x"], 0).err(),
    ];
    for way in ways {
        assert_eq!(way(side, fd), Some(error));
        say!("SIGPIPE {}", caught(libc::SIGPIPE));
    }
}

fn closes(side: &Side, fd: Fd) {
    calls::close(fd).expect("close");
    side.sync("closed");
    side.sync("done");
}

fn write_to_closed(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    side.sync("closed");
    await_readable(fd);
    if side.family != Family::Unix {
        // TCP learns that nobody reads when this is answered by a reset.
        assert_eq!(calls::send(fd, b"anyone?", 0), Ok(7));
    }
    await_hangup(fd);
    let _ = calls::poll(&[(fd, libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP)], 0);
    assert_eq!(calls::send(fd, b"anyone?", 0), Err(Errno::EPIPE));
    say!("SIGPIPE {}", caught(libc::SIGPIPE));
    let _ = calls::recv(fd, 100, 0);
    let _ = calls::pending_error(fd);
    side.sync("done");
}

fn write_to_closed_by_every_call(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    side.sync("closed");
    await_readable(fd);
    if side.family != Family::Unix {
        assert_eq!(calls::write(fd, b"anyone?"), Ok(7));
    }
    await_hangup(fd);
    every_write_fails(side, fd, Errno::EPIPE);
    side.sync("done");
}

fn broken_pipe_kills(side: &Side, fd: Fd) {
    side.sync("closed");
    await_readable(fd);
    let writer = calls::fork(Leave::Exit, || {
        if side.family != Family::Unix {
            assert_eq!(calls::send(fd, b"anyone?", 0), Ok(7));
        }
        await_hangup(fd);
        let _ = calls::send(fd, b"anyone?", 0);
    });
    assert_eq!(writer.wait(), End::Signal(libc::SIGPIPE));
    side.sync("done");
}

fn close_with_unread_data(side: &Side, fd: Fd) {
    side.sync("sent");
    await_unread(fd, 6);
    assert_eq!(calls::recv(fd, 2, 0), Ok(b"un".to_vec()));
    calls::close(fd).expect("close");
    side.sync("closed");
    side.sync("done");
}

fn sees_a_reset(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    side.sync("sent");
    side.sync("closed");
    await_hangup(fd);
    let _ = calls::poll(&[(fd, libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP)], 0);
    assert_eq!(calls::recv(fd, 100, 0), Err(Errno::ECONNRESET));
    assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]));
    let _ = calls::send(fd, b"x", 0);
    say!("SIGPIPE {}", caught(libc::SIGPIPE));
    let _ = calls::pending_error(fd);
    let _ = calls::poll(&[(fd, libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP)], 0);
    side.sync("done");
}

fn close_with_unread_data_after_sending(side: &Side, fd: Fd) {
    side.sync("sent");
    await_unread(fd, 6);
    assert_eq!(calls::send(fd, b"also unread", 0), Ok(11));
    side.sync("answered");
    calls::close(fd).expect("close");
    side.sync("closed");
    side.sync("done");
}

fn sees_data_and_reset(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    side.sync("sent");
    side.sync("answered");
    await_unread(fd, 11);
    side.sync("closed");
    await_hangup(fd);
    let _ = calls::recv(fd, 4, 0);
    let _ = calls::recv(fd, 100, 0);
    let _ = calls::recv(fd, 100, 0);
    let _ = calls::recv(fd, 100, 0);
    side.sync("done");
}

fn linger_zero(side: &Side, fd: Fd) {
    calls::set_linger(fd, 0).expect("SO_LINGER");
    assert_eq!(calls::send(fd, b"before", 0), Ok(6));
    side.sync("sent");
    side.sync("arrived");
    calls::close(fd).expect("close");
    side.sync("closed");
    side.sync("done");
}

fn sees_a_reset_after_data(side: &Side, fd: Fd) {
    calls::catch(libc::SIGPIPE, true);
    side.sync("sent");
    await_unread(fd, 6);
    side.sync("arrived");
    side.sync("closed");
    await_hangup(fd);
    let _ = calls::poll(&[(fd, libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP)], 0);
    let _ = calls::recv(fd, 100, 0);
    let _ = calls::recv(fd, 100, 0);
    let _ = calls::recv(fd, 100, 0);
    let _ = calls::send(fd, b"x", 0);
    say!("SIGPIPE {}", caught(libc::SIGPIPE));
    side.sync("done");
}

fn linger_waits(side: &Side, fd: Fd) {
    calls::set_linger(fd, 5).expect("SO_LINGER");
    assert_eq!(calls::send(fd, b"farewell", 0), Ok(8));
    calls::close(fd).expect("close");
    side.sync("closed");
}

fn is_killed_with_unread(side: &Side, fd: Fd) {
    side.sync("sent");
    await_unread(fd, 6);
    assert_eq!(calls::send(fd, b"last words", 0), Ok(10));
    side.sync("answered");
    side.sync("arrived");
    calls::kill_self();
}

fn sees_a_killed_peer(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"unread", 0), Ok(6));
    side.sync("sent");
    side.sync("answered");
    await_unread(fd, 10);
    side.sync("arrived");
    await_hangup(fd);
    let _ = calls::recv(fd, 4, 0);
    let _ = calls::recv(fd, 100, 0);
    let _ = calls::recv(fd, 100, 0);
    let _ = calls::recv(fd, 100, 0);
}

fn is_killed_on_demand(side: &Side, _fd: Fd) {
    side.sync("blocked");
    calls::kill_self();
}

fn blocked_reader_sees_the_end(side: &Side, fd: Fd) {
    let data = while_blocked(|| calls::recv(fd, 100, 0), || side.sync("blocked"));
    assert_eq!(data, Ok(vec![]));
    assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]));
}

fn blocked_writer_sees_the_end(side: &Side, fd: Fd) {
    let huge = vec![b'x'; 64 << 20];
    let sent =
        while_blocked(|| quietly(|| calls::send(fd, &huge, libc::MSG_NOSIGNAL)), || side.sync("blocked"));
    let sent = sent.expect("a part was taken before the reset");
    assert!(sent < huge.len());
    // Which errors follow, and in which order, the next calls tell.
    let _ = calls::send(fd, b"x", libc::MSG_NOSIGNAL);
    let _ = calls::send(fd, b"x", libc::MSG_NOSIGNAL);
    let _ = calls::recv(fd, 100, 0);
}

fn streams_until_killed(side: &Side, fd: Fd) {
    let mut pattern = Pattern::new(13);
    send_pattern(fd, &mut pattern, 5 << 20, 3000);
    side.tell(pattern.position());
    calls::kill_self();
}

fn reads_until_it_ends(side: &Side, fd: Fd) {
    let total = receive_pattern_to_end(fd, &mut Pattern::new(13));
    assert_eq!(total as u64, side.told(), "everything that was sent arrives");
    say!("received {total}");
}

/// Of `AF_UNIX` no buffer takes so much.
fn sends_a_mebibyte_and_closes(side: &Side, fd: Fd) {
    send_pattern(fd, &mut Pattern::new(14), side.always_taken(), 65536);
    calls::close(fd).expect("close");
    side.sync("closed");
}

fn sends_a_mebibyte_and_is_killed(side: &Side, fd: Fd) {
    send_pattern(fd, &mut Pattern::new(14), side.always_taken(), 65536);
    side.sync("closed");
    calls::kill_self();
}

fn reads_a_mebibyte_after_close(side: &Side, fd: Fd) {
    side.sync("closed");
    let total = receive_pattern_to_end(fd, &mut Pattern::new(14));
    assert_eq!(total, side.always_taken());
    say!("received {total}");
}

fn end_is_lasting(side: &Side, fd: Fd) {
    side.sync("closed");
    await_unread(fd, 8);
    assert_eq!(calls::recv(fd, 100, libc::MSG_PEEK), Ok(b"farewell".to_vec()));
    assert_eq!(calls::recv(fd, 100, libc::MSG_WAITALL), Ok(b"farewell".to_vec()));
    for _ in 0..3 {
        let _ = calls::recv(fd, 100, libc::MSG_PEEK);
        let _ = calls::readv(fd, &[1, 2]);
        let _ = calls::recvmsg(fd, &[1, 2], 0, 0);
        let _ = calls::unread(fd);
        let _ = calls::poll(&[(fd, libc::POLLIN | libc::POLLRDHUP)], 0);
        let _ = calls::select(&[fd], &[], &[], Some(std::time::Duration::ZERO));
    }
}

fn sends_when_told(side: &Side, fd: Fd) {
    side.sync("closed there");
    let _ = calls::send(fd, b"who reads this?", 0);
    side.sync("sent");
    side.sync("done");
}

fn close_while_reading(side: &Side, fd: Fd) {
    // The kernel lets a call in progress go on: it holds the file, not the descriptor.
    let data = while_blocked(
        || calls::recv(fd, 100, 0),
        || {
            calls::close(fd).expect("close");
            side.sync("closed there");
            side.sync("sent");
        },
    );
    assert_eq!(data, Ok(b"who reads this?".to_vec()));
    assert_eq!(calls::recv(fd, 100, 0), Err(Errno::EBADF));
    side.sync("done");
}

/// What the library has put aside the program has not read: the peer is told so.
fn shuts_down_again(side: &Side, fd: Fd) {
    assert_eq!(calls::shutdown(fd, libc::SHUT_RDWR), Ok(0));
    side.sync("shut down");
    side.sync("back");
    for how in [libc::SHUT_RD, libc::SHUT_WR, libc::SHUT_RDWR] {
        let _ = calls::shutdown(fd, how);
    }
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
    side.sync("done");
}

fn goes_back(side: &Side, fd: Fd) {
    side.sync("shut down");
    await_readable(fd);
    calls::set_status(fd, libc::O_RDWR | libc::O_ASYNC).expect("F_SETFL");
    side.sync("back");
    side.sync("done");
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
}

fn shuts_down_twice(side: &Side, fd: Fd) {
    for how in [libc::SHUT_WR, libc::SHUT_WR, libc::SHUT_RD, libc::SHUT_WR] {
        assert_eq!(calls::shutdown(fd, how), Ok(0));
    }
    assert_eq!(receive_exactly(fd, 4), b"more");
    side.sync("shut down");
    side.sync("closed");
}

fn finds_the_end(side: &Side, fd: Fd) {
    side.sync("shut down");
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
    calls::close(fd).expect("close");
    side.sync("closed");
}

fn closes_with_bytes_on_tcp(side: &Side) {
    let (_, fd) = with_room_beside_bytes(side);
    calls::close(fd).expect("close");
    side.sync("closed");
}

fn closes_with_bytes_put_aside(side: &Side) {
    let (_, fd) = with_bytes_put_aside(side);
    calls::close(fd).expect("close");
    side.sync("closed");
}

fn is_reset(side: &Side) {
    finds_a_reset(side, sends_over_tcp(side));
}

fn looks_and_is_reset(side: &Side) {
    finds_a_reset(side, sends_over_tcp_and_looks(side));
}

fn finds_a_reset(side: &Side, fd: Fd) {
    side.sync("closed");
    assert_eq!(calls::recv(fd, 10, 0), Err(Errno::ECONNRESET));
}

/// The reset is told by a write; from then on poll and epoll tell of no error, but of a hang-up.
fn writes_after_a_reset(side: &Side) {
    let (epfd, fd) = with_room_beside_bytes(side);
    side.sync("reset now");
    side.sync("reset");
    assert_eq!(calls::send(fd, b"x", libc::MSG_NOSIGNAL), Err(Errno::ECONNRESET));
    for _ in 0..3 {
        let ready = quietly(|| calls::poll(&[(fd, libc::POLLIN | libc::POLLRDHUP)], -1)).expect("poll");
        assert_eq!(ready, [libc::POLLIN | libc::POLLRDHUP | libc::POLLHUP]);
        calls::epoll_modify(epfd, fd, libc::EPOLLIN, 1).expect("EPOLL_CTL_MOD");
        let ready = quietly(|| calls::epoll_wait(epfd, 8, -1)).expect("epoll_wait");
        assert_eq!(ready[0].events, (libc::EPOLLIN | libc::EPOLLHUP) as u32);
    }
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"more".to_vec()));
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
    assert_eq!(calls::send(fd, b"x", libc::MSG_NOSIGNAL), Err(Errno::EPIPE));
}

fn resets_over_tcp(side: &Side) {
    let fd = sends_over_tcp(side);
    side.sync("reset now");
    calls::set_linger(fd, 0).expect("SO_LINGER");
    calls::close(fd).expect("close");
    side.sync("reset");
}

//! Every way to send and receive, with plain results.

use super::{Behaviour, Tally};
use crate::calls::{self, Errno, Family, Fd, quietly};
use crate::say;
use crate::side::{
    Pattern, Side, await_readable, await_unread, receive_exactly, receive_pattern, receive_pattern_to_end,
    send_pattern,
};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("every_pair_of_calls", every_way_to_receive, every_way_to_send),
    Behaviour::connected("short_reads", short_reads, sends_a_hundred),
    Behaviour::connected("two_sends_one_read", two_sends_one_read, sends_twice),
    Behaviour::connected("zero_lengths", zero_lengths, sends_something),
    Behaviour::connected("byte_by_byte", reads_in_odd_sizes, sends_byte_by_byte),
    Behaviour::connected("ping_pong", pong, ping),
    Behaviour::connected("one_large_write", reads_it_all, one_large_write),
    Behaviour::connected("one_large_write_with_pieces", reads_it_all, one_large_writev),
    Behaviour::connected("a_mebibyte_before_anyone_reads", reads_a_mebibyte_late, sends_a_mebibyte),
    Behaviour::connected("filled_until_it_would_block", empties, fills),
    Behaviour::connected("both_directions_at_once", both_directions_left, both_directions_right),
    Behaviour::connected("a_thousand_pieces", reads_a_thousand_pieces, sends_a_thousand_pieces),
    Behaviour::connected("messages_in_batches", receives_batches, sends_batches),
    Behaviour::connected("bad_pointers", bad_pointers, sends_something),
    Behaviour::connected("not_open", not_open, waits),
    Behaviour::connected("not_a_file", not_a_file, sends_something),
    Behaviour::connected("sendfile", reads_what_sendfile_sends, sendfile),
    Behaviour::connected("sendfile_into_a_pipe", sends_into_a_pipe, sends_and_awaits_answer)
        .alone(&["unsupported-call"])
        .tally(Tally::Returned(1), Tally::Returned(1)),
    Behaviour::connected("splice", splices_into_a_pipe, splices_from_a_pipe)
        .alone(&["unsupported-call"])
        .tally(Tally::Returned(1), Tally::Returned(1)),
];

const GREETING: &[u8] = b"the quick brown fox";
const MEBIBYTE: usize = 1 << 20;

fn every_way_to_send(side: &Side, fd: Fd) {
    let ways: &[fn(&Side, Fd) -> bool] = &[
        |_, fd| calls::send(fd, GREETING, 0).is_ok(),
        |_, fd| calls::write(fd, GREETING).is_ok(),
        |side, fd| side.sendto(fd, GREETING).is_ok(),
        |_, fd| calls::writev(fd, &[&GREETING[..4], &[], &GREETING[4..]]).is_ok(),
        |_, fd| calls::sendmsg(fd, &[&GREETING[..10], &GREETING[10..], &[]], 0).is_ok(),
        |_, fd| calls::sendmmsg(fd, &[&GREETING[..1], &GREETING[1..]], 0).is_ok(),
    ];
    for round in 0..9 {
        for way in ways {
            assert!(way(side, fd));
            side.sync(&format!("sent {round}"));
            side.sync(&format!("received {round}"));
        }
    }
}

fn every_way_to_receive(side: &Side, fd: Fd) {
    let ways: &[fn(Fd) -> bool] = &[
        |fd| calls::recv(fd, 64, 0).is_ok(),
        |fd| calls::read(fd, 64).is_ok(),
        |fd| calls::recvfrom(fd, 64, 0).is_ok(),
        |fd| calls::readv(fd, &[4, 0, 5, 64]).is_ok(),
        |fd| calls::recvmsg(fd, &[0, 9, 64], 0, 0).is_ok(),
        |fd| calls::recvmmsg(fd, &[64], 0).is_ok(),
        |fd| calls::read_chk(fd, 64).is_ok(),
        |fd| calls::recv_chk(fd, 64, 0).is_ok(),
        |fd| calls::recvfrom_chk(fd, 64, 0).is_ok(),
    ];
    for (round, way) in ways.iter().enumerate() {
        for _ in 0..6 {
            side.sync(&format!("sent {round}"));
            await_unread(fd, GREETING.len());
            assert!(way(fd));
            side.sync(&format!("received {round}"));
        }
    }
}

fn short_reads(side: &Side, fd: Fd) {
    side.sync("sent");
    await_unread(fd, 100);
    while calls::unread(fd).is_ok_and(|left| left > 0) {
        let piece = calls::recv(fd, 7, 0).expect("recv");
        assert!(!piece.is_empty());
    }
    assert_eq!(calls::recv(fd, 7, libc::MSG_DONTWAIT), Err(Errno::EAGAIN));
    side.sync("done");
}

fn sends_a_hundred(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, &Pattern::new(1).take(100), 0), Ok(100));
    side.sync("sent");
    side.sync("done");
}

fn two_sends_one_read(side: &Side, fd: Fd) {
    side.sync("sent");
    await_unread(fd, 38);
    assert_eq!(calls::recv(fd, 1000, 0).map(|data| data.len()), Ok(38));
    side.sync("done");
}

fn sends_twice(side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, GREETING, 0), Ok(19));
    assert_eq!(calls::send(fd, GREETING, 0), Ok(19));
    side.sync("sent");
    side.sync("done");
}

fn zero_lengths(side: &Side, fd: Fd) {
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    let _ = calls::recv(fd, 0, 0);
    let _ = calls::read(fd, 0);
    let _ = calls::readv(fd, &[]);
    let _ = calls::readv(fd, &[0, 0]);
    let _ = calls::recvmsg(fd, &[], 0, 0);
    let _ = calls::send(fd, &[], 0);
    let _ = calls::write(fd, &[]);
    let _ = calls::writev(fd, &[]);
    let _ = calls::sendmsg(fd, &[], 0);
    side.sync("send now");
    await_readable(fd);
    let _ = calls::recv(fd, 0, 0);
    let _ = calls::recv(fd, 0, libc::MSG_PEEK);
    let _ = calls::read(fd, 0);
    let _ = calls::readv(fd, &[]);
    let _ = calls::readv(fd, &[0, 0]);
    let _ = calls::recvmsg(fd, &[], 0, 0);
    assert_eq!(calls::recv(fd, 64, 0), Ok(GREETING.to_vec()));
    side.sync("done");
}

fn sends_something(side: &Side, fd: Fd) {
    side.sync("send now");
    assert_eq!(calls::send(fd, GREETING, 0), Ok(GREETING.len()));
    side.sync("done");
}

fn waits(side: &Side, _fd: Fd) {
    side.sync("done");
}

fn reads_in_odd_sizes(_side: &Side, fd: Fd) {
    let mut pattern = Pattern::new(2);
    let mut size = 1;
    while pattern.position() < 3000 {
        size = size * 7 % 31;
        let data = quietly(|| calls::recv(fd, size, 0)).expect("recv");
        assert!(!data.is_empty(), "the stream ended early");
        pattern.expect(&data);
    }
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
}

fn sends_byte_by_byte(_side: &Side, fd: Fd) {
    let mut pattern = Pattern::new(2);
    send_pattern(fd, &mut pattern, 3000, 1);
    say!("sent {}", pattern.position());
    calls::close(fd).expect("close");
}

fn ping(_side: &Side, fd: Fd) {
    for round in 0..2000usize {
        let request = Pattern::new(round as u64).take(1 + round % 200);
        assert_eq!(quietly(|| calls::send(fd, &request, 0)), Ok(request.len()));
        assert_eq!(receive_exactly(fd, request.len()), request);
    }
    say!("2000 rounds");
}

fn pong(_side: &Side, fd: Fd) {
    for round in 0..2000usize {
        let request = receive_exactly(fd, 1 + round % 200);
        assert_eq!(quietly(|| calls::send(fd, &request, 0)), Ok(request.len()));
    }
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
}

const LARGE: usize = 8 * MEBIBYTE + 13;

fn one_large_write(_side: &Side, fd: Fd) {
    let data = Pattern::new(3).take(LARGE);
    assert_eq!(calls::send(fd, &data, 0), Ok(LARGE));
    calls::close(fd).expect("close");
}

fn one_large_writev(_side: &Side, fd: Fd) {
    let data = Pattern::new(3).take(LARGE);
    let (first, rest) = data.split_at(5);
    let (second, third) = rest.split_at(3 * MEBIBYTE);
    assert_eq!(calls::writev(fd, &[first, second, third]), Ok(LARGE));
    calls::close(fd).expect("close");
}

fn reads_it_all(_side: &Side, fd: Fd) {
    let mut pattern = Pattern::new(3);
    receive_pattern(fd, &mut pattern, LARGE, 10_000);
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
}

/// Of `AF_UNIX` no buffer takes so much.
fn sends_a_mebibyte(side: &Side, fd: Fd) {
    let mut pattern = Pattern::new(4);
    send_pattern(fd, &mut pattern, side.always_taken(), 65536);
    say!("sent {}", pattern.position());
    side.sync("all is sent");
    side.sync("all is read");
}

fn reads_a_mebibyte_late(side: &Side, fd: Fd) {
    side.sync("all is sent");
    let mut pattern = Pattern::new(4);
    receive_pattern(fd, &mut pattern, side.always_taken(), 65536);
    assert_eq!(calls::recv(fd, 1, libc::MSG_DONTWAIT), Err(Errno::EAGAIN));
    side.sync("all is read");
}

fn fills(side: &Side, fd: Fd) {
    let mut pattern = Pattern::new(5);
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    for round in 0..3 {
        let start = pattern.position();
        let error = loop {
            let data = pattern.take(65536);
            match quietly(|| calls::send(fd, &data, 0)) {
                Ok(sent) => pattern.put_back(data.len() - sent),
                Err(error) => {
                    pattern.put_back(data.len());
                    break error;
                }
            }
        };
        say!("filled: {error}");
        let taken = pattern.position() - start;
        assert!(taken >= side.always_taken() as u64, "only {taken} bytes were taken");
        // There a close is a hang-up at once, and programs rely on what is unread then being little.
        assert!(side.family != Family::Unix || taken <= 1 << 20, "{taken} bytes were taken");
        assert_eq!(calls::poll(&[(fd, libc::POLLOUT)], 0), Ok(vec![0]));
        side.sync("full");
        side.tell(taken);
        side.sync("empty");
        assert_eq!(calls::poll(&[(fd, libc::POLLOUT)], crate::side::ARRIVAL), Ok(vec![libc::POLLOUT]));
        say!("round {round}");
    }
    side.sync("done");
}

fn empties(side: &Side, fd: Fd) {
    let mut pattern = Pattern::new(5);
    for _ in 0..3 {
        side.sync("full");
        let amount = side.told() as usize;
        receive_pattern(fd, &mut pattern, amount, 40_000);
        assert_eq!(calls::recv(fd, 1, libc::MSG_DONTWAIT), Err(Errno::EAGAIN));
        side.sync("empty");
    }
    side.sync("done");
}

fn both_directions_left(_side: &Side, fd: Fd) {
    both_directions(fd, Pattern::new(6), Pattern::new(7));
}

fn both_directions_right(_side: &Side, fd: Fd) {
    both_directions(fd, Pattern::new(7), Pattern::new(6));
}

/// One thread that sends and receives 8 MiB as poll allows.
fn both_directions(fd: Fd, mut ours: Pattern, mut theirs: Pattern) {
    const TOTAL: u64 = 8 << 20;
    calls::set_nonblocking(fd, true).expect("FIONBIO");
    let mut size = 1usize;
    while ours.position() < TOTAL || theirs.position() < TOTAL {
        size = size * 16807 % 65521;
        let want_out = if ours.position() < TOTAL { libc::POLLOUT } else { 0 };
        let want_in = if theirs.position() < TOTAL { libc::POLLIN } else { 0 };
        let ready = quietly(|| calls::poll(&[(fd, want_in | want_out)], -1)).expect("poll")[0];
        if ready & want_out != 0 {
            let data = ours.take(size.min((TOTAL - ours.position()) as usize));
            match quietly(|| calls::send(fd, &data, 0)) {
                Ok(sent) => ours.put_back(data.len() - sent),
                Err(error) => {
                    assert_eq!(error, Errno::EAGAIN);
                    ours.put_back(data.len());
                }
            }
        }
        if ready & want_in != 0 {
            let data = quietly(|| calls::recv(fd, size, 0)).expect("poll said that there is something");
            assert!(!data.is_empty(), "the stream ended early");
            theirs.expect(&data);
        }
    }
    say!("sent {} and received {}", ours.position(), theirs.position());
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    quietly(|| calls::poll(&[(fd, libc::POLLIN)], -1)).expect("poll");
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
}

fn sends_a_thousand_pieces(side: &Side, fd: Fd) {
    let data = Pattern::new(8).take(1025 * 10);
    let pieces: Vec<&[u8]> = data.chunks(10).collect();
    assert_eq!(calls::writev(fd, &pieces), Err(Errno::EINVAL));
    assert_eq!(calls::sendmsg(fd, &pieces, 0), Err(Errno::EMSGSIZE));
    assert_eq!(calls::writev(fd, &pieces[..1024]), Ok(10_240));
    side.sync("written");
    side.sync("read");
    assert_eq!(calls::sendmsg(fd, &pieces[..1024], 0), Ok(10_240));
    side.sync("written");
    side.sync("read");
}

fn reads_a_thousand_pieces(side: &Side, fd: Fd) {
    for _ in 0..2 {
        side.sync("written");
        await_unread(fd, 10_240);
        assert!(calls::readv(fd, &[10; 1025]).is_err());
        assert!(calls::recvmsg(fd, &[10; 1025], 0, 0).is_err());
        assert_eq!(calls::readv(fd, &[1; 1024]).map(|data| data.len()), Ok(1024));
        assert_eq!(calls::recvmsg(fd, &[9; 1024], 0, 0).map(|message| message.data.len()), Ok(9216));
        side.sync("read");
    }
}

fn sends_batches(side: &Side, fd: Fd) {
    assert_eq!(calls::sendmmsg(fd, &[b"one", b"", b"three", b"four"], 0), Ok(vec![3, 0, 5, 4]));
    side.sync("sent");
    side.sync("received");
}

fn receives_batches(side: &Side, fd: Fd) {
    side.sync("sent");
    await_unread(fd, 12);
    // A stream has no messages: each buffer is filled in turn.
    let _ = calls::recvmmsg(fd, &[2, 4, 6], 0);
    let _ = calls::recvmmsg(fd, &[2, 4], libc::MSG_DONTWAIT);
    side.sync("received");
}

fn bad_pointers(side: &Side, fd: Fd) {
    assert_eq!(calls::send_from_nowhere(fd, 10, 0), Err(Errno::EFAULT));
    assert_eq!(calls::write_from_nowhere(fd, 100_000), Err(Errno::EFAULT));
    side.sync("send now");
    await_readable(fd);
    assert_eq!(calls::recv_into_nowhere(fd, 10, 0), Err(Errno::EFAULT));
    assert_eq!(calls::recv_into_nowhere(fd, 10, libc::MSG_PEEK), Err(Errno::EFAULT));
    assert_eq!(calls::read_into_nowhere(fd, 1000), Err(Errno::EFAULT));
    // What could not be stored is still there.
    assert_eq!(calls::recv(fd, 64, 0), Ok(GREETING.to_vec()));
    side.sync("done");
}

fn not_open(side: &Side, fd: Fd) {
    calls::close(fd).expect("close");
    let _ = calls::close(fd);
    let _ = calls::send(fd, GREETING, 0);
    let _ = calls::write(fd, GREETING);
    let _ = calls::writev(fd, &[GREETING]);
    let _ = calls::sendmsg(fd, &[GREETING], 0);
    let _ = calls::sendto(fd, GREETING, 0);
    let _ = calls::recv(fd, 10, 0);
    let _ = calls::read(fd, 10);
    let _ = calls::readv(fd, &[10]);
    let _ = calls::recvmsg(fd, &[10], 0, 0);
    let _ = calls::recvfrom(fd, 10, 0);
    let _ = calls::unread(fd);
    let _ = calls::set_nonblocking(fd, true);
    let _ = calls::status(fd);
    let _ = calls::shutdown(fd, libc::SHUT_WR);
    let _ = calls::dup(fd);
    let _ = calls::poll(&[(fd, libc::POLLIN)], 0);
    let _ = calls::local_address(fd);
    side.sync("done");
}

fn not_a_file(side: &Side, fd: Fd) {
    let _ = calls::file_kind(fd);
    let _ = calls::seek(fd, 0);
    let _ = calls::pread(fd, 10, 0);
    side.sync("send now");
    await_readable(fd);
    let _ = calls::pread(fd, 10, 0);
    let _ = calls::recv(fd, 64, 0);
    side.sync("done");
}

fn sendfile(_side: &Side, fd: Fd) {
    let data = Pattern::new(9).take(300_000);
    let file = calls::file_with(&data).expect("memfd_create");
    let mut sent = 0;
    while sent < data.len() {
        sent += quietly(|| calls::sendfile(fd, file, data.len() - sent)).expect("sendfile");
    }
    say!("sent {sent}");
    assert_eq!(calls::sendfile(fd, file, 10), Ok(0));
    calls::close(fd).expect("close");
}

fn reads_what_sendfile_sends(_side: &Side, fd: Fd) {
    let total = receive_pattern_to_end(fd, &mut Pattern::new(9));
    say!("received {total}");
}

fn sends_into_a_pipe(_side: &Side, fd: Fd) {
    let (reading, writing) = calls::pipe().expect("pipe");
    calls::set_nonblocking(fd, true).expect("fcntl");
    await_readable(fd);
    assert_eq!(calls::sendfile(writing, fd, 4), Ok(4));
    assert_eq!(calls::read(reading, 10), Ok(b"some".to_vec()));
    assert_eq!(calls::recv(fd, 10, 0), Ok(b" bytes".to_vec()));
    assert_eq!(calls::sendfile(writing, fd, 4), Err(Errno::EAGAIN));
    assert_eq!(calls::send(fd, b"thanks", 0), Ok(6));
}

fn sends_and_awaits_answer(_side: &Side, fd: Fd) {
    assert_eq!(calls::send(fd, b"some bytes", 0), Ok(10));
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"thanks".to_vec()));
}

fn splices_from_a_pipe(_side: &Side, fd: Fd) {
    let (reading, writing) = calls::pipe().expect("pipe");
    let data = Pattern::new(10).take(4000);
    assert_eq!(calls::write(writing, &data), Ok(data.len()));
    assert_eq!(calls::splice(reading, fd, data.len()), Ok(data.len()));
    calls::close(fd).expect("close");
}

fn splices_into_a_pipe(_side: &Side, fd: Fd) {
    let (reading, writing) = calls::pipe().expect("pipe");
    let mut pattern = Pattern::new(10);
    loop {
        let moved = quietly(|| calls::splice(fd, writing, 4000)).expect("splice");
        if moved == 0 {
            break;
        }
        pattern.expect(&quietly(|| calls::read(reading, moved)).expect("read"));
    }
    say!("received {}", pattern.position());
}

//! Arguments that the kernel refuses, or takes in a way of its own: what it answers, and that nothing is lost.

use libc::{
    IPPROTO_IP, IPPROTO_TCP, MSG_DONTWAIT, MSG_FASTOPEN, MSG_NOSIGNAL, MSG_PEEK, MSG_TRUNC, SO_ERROR,
    SOL_SOCKET, TCP_CORK, TCP_NODELAY,
};

use super::peers::{demand, sends_on_demand, stop, waits};
use super::{Behaviour, Tally};
use crate::calls::{self, Claim, Errno, Family, Fd, NOWHERE, quietly};
use crate::side::{Side, await_readable, await_unread, receive_exactly};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("sendfile_from_what_is_no_file", sends_no_files, drains),
    Behaviour::connected("sendfile_of_impossible_counts", sends_impossible_counts, drains),
    Behaviour::connected("sendfile_from_itself", sends_itself, sends_on_demand),
    Behaviour::connected("sendfile_past_the_page_cache", sends_past_the_cache, has_the_same_file),
    Behaviour::connected("parts_of_options", asks_for_parts, sends_on_demand),
    Behaviour::connected("messages_nowhere", has_messages_nowhere, sends_on_demand),
    Behaviour::connected("reads_of_nothing_by_preadv2", reads_nothing, sends_on_demand),
    Behaviour::connected("writes_of_nothing_by_pwritev2", writes_nothing, drains),
    Behaviour::connected("flags_of_preadv2", reads_with_each_flag, sends_on_demand),
    Behaviour::connected("flags_of_pwritev2", writes_with_each_flag, drains),
    Behaviour::connected("discarding_into_nothing", discards_into_nothing, sends_on_demand).tcp_only(),
    Behaviour::connected("lengths_that_no_buffer_has", claims_lengths, sends_on_demand),
    Behaviour::connected("nothing_at_impossible_addresses", moves_nothing, sends_on_demand),
    Behaviour::connected("names_of_impossible_lengths", has_room_for_odd_names, sends_on_demand),
    Behaviour::connected("lengths_of_no_name", has_no_room_for_a_name, sends_on_demand),
    Behaviour::connected("sending_to_impossible_names", sends_to_odd_names, drains),
    Behaviour::connected("control_data_that_is_refused", sends_odd_control_data, drains).tcp_only(),
    Behaviour::connected("control_data_nowhere", sends_control_data_from_nowhere, drains),
    Behaviour::connected("control_data_longer_than_its_buffer", sends_overlong_control_data, drains),
    Behaviour::connected("connecting_to_nowhere", connects_to_nowhere, drains),
    Behaviour::connected("options_from_nowhere", sets_options_from_nowhere, sends_on_demand),
    Behaviour::connected("limits_of_recvmmsg", has_limits, sends_on_demand),
    Behaviour::connected("opening_fast_what_is_open", opens_fast, drains),
    Behaviour::connected("flag_of_the_kernels_own", passes_a_flag_of_the_kernels, sends_on_demand)
        .tally(Tally::Total(1), Tally::Total(1))
        .alone(&["control-data"]),
    Behaviour::connected("exclusive_and_one_shot", adds_exclusive_and_one_shot, waits),
    Behaviour::connected("no_descriptor", calls_on_none, sends_on_demand),
    Behaviour::connected("very_many_messages", takes_very_many, sends_very_many).tcp_only(),
    Behaviour::connected("events_reported_nowhere", waits_for_events_nowhere, sends_on_demand),
];

/// Reads as many bytes as the other side says that it has sent, after which there are no more.
fn drains(side: &Side, fd: Fd) {
    let count = side.told() as usize;
    assert_eq!(receive_exactly(fd, count).len(), count);
    let more = quietly(|| calls::recv(fd, 1 << 16, MSG_DONTWAIT));
    assert!(more.map_or_else(|errno| errno == Errno::EAGAIN, |data| data.is_empty()));
    side.sync("done");
}

/// Ends what [`drains`] is for.
fn assert_came(side: &Side, count: usize) {
    side.tell(count as u64);
    side.sync("done");
}

fn sends_no_files(side: &Side, fd: Fd) {
    let (reading, writing) = calls::pipe().expect("pipe");
    assert_eq!(calls::write(writing, b"in the pipe"), Ok(11));
    let (one, other) = calls::unix_pair().expect("socketpair");
    assert_eq!(calls::write(other, b"in the socket"), Ok(13));
    let event = calls::eventfd().expect("eventfd");
    assert_eq!(calls::write(event, &7u64.to_ne_bytes()), Ok(8));
    let timer = calls::timerfd(std::time::Duration::ZERO).expect("timerfd");
    let folder = calls::open("/", libc::O_RDONLY).expect("open");
    let only_written = calls::open("/dev/null", libc::O_WRONLY).expect("open");
    let path = calls::open("/dev/zero", libc::O_PATH).expect("open");
    for input in [reading, one, event, timer, folder, only_written, path, 999, -1] {
        for offset in [None, Some(0), Some(-1)] {
            for count in [10, 0, usize::MAX] {
                assert!(calls::sendfile_at(fd, input, offset, count).map_or(true, |sent| sent.0 == 0));
            }
        }
    }
    assert_eq!(calls::read(reading, 64), Ok(b"in the pipe".to_vec()));
    assert_eq!(calls::read(one, 64), Ok(b"in the socket".to_vec()));
    assert_eq!(calls::read(event, 8), Ok(7u64.to_ne_bytes().to_vec()));
    let zeros = calls::open("/dev/zero", libc::O_RDONLY).expect("open");
    assert_eq!(calls::sendfile(fd, zeros, 4000), Ok(4000));
    assert_came(side, 4000);
}

fn sends_impossible_counts(side: &Side, fd: Fd) {
    let file = calls::file_with(&[b'f'; 100]).expect("memfd_create");
    let most = isize::MAX as usize;
    let mut total = 0;
    for offset in [None, Some(40), Some(100), Some(-1), Some(i64::MAX - 5), Some(i64::MIN)] {
        for count in [0, 10, most, most - 30, most + 1, usize::MAX] {
            total += calls::sendfile_at(fd, file, offset, count).map_or(0, |sent| sent.0);
            let _ = calls::place_of(file);
            assert_eq!(calls::seek(file, 20), Ok(20));
        }
    }
    for address in [8, usize::MAX] {
        assert_eq!(calls::sendfile_nowhere(fd, file, address), Err(Errno::EFAULT));
    }
    assert_came(side, total);
}

fn sends_itself(side: &Side, fd: Fd) {
    demand(side);
    await_unread(fd, 4);
    assert_eq!(calls::sendfile_at(fd, fd, None, 4), Err(Errno::EINVAL));
    assert_eq!(calls::sendfile_at(fd, fd, Some(0), 4), Err(Errno::ESPIPE));
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    stop(side);
}

/// Both processes run it.
const PROGRAM: &str = "/proc/self/exe";

/// A file that is opened with `O_DIRECT` is read in whole blocks of its device, into memory that begins with one.
fn sends_past_the_cache(side: &Side, fd: Fd) {
    let tell = |offset: i64, sent: usize| {
        side.tell(sent as u64);
        side.tell(offset.cast_unsigned());
    };
    // Not every file system has such files.
    if let Ok(file) = calls::open(PROGRAM, libc::O_RDONLY | libc::O_DIRECT) {
        for (offset, count) in [(0, 4096), (4096, 12_288), (16_384, 200_000), (100, 300), (0, 10), (0, 512)] {
            match calls::sendfile_at(fd, file, Some(offset), count) {
                Ok((sent, _)) if sent > 0 => tell(offset, sent),
                _ => {}
            }
        }
        assert_eq!(calls::sendfile(fd, file, 4096), Ok(4096));
        assert_eq!(calls::place_of(file), Ok(4096));
        tell(0, 4096);
    }
    assert_came(side, 0);
}

fn has_the_same_file(side: &Side, fd: Fd) {
    let file = std::fs::read(PROGRAM).expect("this program");
    loop {
        let sent = side.told() as usize;
        if sent == 0 {
            break;
        }
        let offset = side.told() as usize;
        assert!(
            receive_exactly(fd, sent) == file[offset..offset + sent],
            "other bytes came from {offset} on"
        );
    }
    side.sync("done");
}

fn asks_for_parts(side: &Side, fd: Fd) {
    for room in [4, 3, 2, 1, 0, 12, -1] {
        let _ = calls::part_of_option(fd, SOL_SOCKET, SO_ERROR, room);
        for name in [TCP_NODELAY, TCP_CORK] {
            let _ = calls::part_of_option(fd, IPPROTO_TCP, name, room);
        }
    }
    // None of that was an error of the connection's.
    demand(side);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    stop(side);
}

fn has_messages_nowhere(side: &Side, fd: Fd) {
    let (other, _peer) = calls::unix_pair().expect("socketpair");
    demand(side);
    await_unread(fd, 4);
    for address in NOWHERE {
        for count in [0, 1, 3] {
            let _ = calls::recvmmsg_nowhere(fd, address, count);
            let _ = calls::sendmmsg_nowhere(fd, address, count);
            let _ = calls::sendmmsg_nowhere(other, address, count);
            let _ = calls::poll_nowhere(address, count.into());
            if count > 0 || address == 0 {
                let _ = calls::vectors_nowhere(fd, address, count.cast_signed());
            }
        }
        let _ = calls::recvmsg_nowhere(fd, address);
        for fd in [fd, other] {
            let _ = calls::sendmsg_nowhere(fd, address);
        }
        if address != 0 {
            let _ = calls::select_nowhere(fd, address);
        }
    }
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    stop(side);
}

fn reads_nothing(side: &Side, fd: Fd) {
    for flags in [0, libc::RWF_NOWAIT, 0x10000] {
        assert_eq!(calls::preadv2(fd, &[], flags), Ok(0));
        assert_eq!(calls::preadv2(fd, &[0], flags), Ok(0));
        assert_eq!(calls::preadv2(fd, &[0, 0], flags), Ok(0));
    }
    demand(side);
    assert_eq!(calls::preadv2(fd, &[0, 4, 0], 0), Ok(4));
    stop(side);
}

fn writes_nothing(side: &Side, fd: Fd) {
    assert_eq!(calls::pwritev2(fd, &[b"", b"data"], 0), Ok(4));
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    for flags in [0, libc::RWF_NOWAIT, 0x10000] {
        assert_eq!(calls::pwritev2(fd, &[], flags), Ok(0));
        assert_eq!(calls::pwritev2(fd, &[b"", b""], flags), Ok(0));
    }
    assert_came(side, 4);
}

/// Flags that no kernel takes for a socket: `RWF_ATOMIC` and `RWF_DONTCACHE`, and those that there are not.
const UNKNOWN: [i32; 5] = [0x40, 0x80, 0x1000, 0x10000, -1];
/// Those that all kernels take.
const TAKEN: [i32; 5] =
    [libc::RWF_HIPRI, libc::RWF_DSYNC, libc::RWF_SYNC, libc::RWF_NOWAIT, libc::RWF_APPEND];

fn reads_with_each_flag(side: &Side, fd: Fd) {
    for flags in TAKEN {
        demand(side);
        await_unread(fd, 4);
        for unknown in UNKNOWN {
            assert_eq!(calls::preadv2(fd, &[2, 2], unknown), Err(Errno::EOPNOTSUPP));
        }
        assert_eq!(calls::preadv2(fd, &[2, 2], flags), Ok(4));
    }
    stop(side);
}

fn writes_with_each_flag(side: &Side, fd: Fd) {
    for unknown in UNKNOWN {
        assert_eq!(calls::pwritev2(fd, &[b"ab", b"cd"], unknown), Err(Errno::EOPNOTSUPP));
    }
    for flags in TAKEN {
        assert_eq!(calls::pwritev2(fd, &[b"ab", b"cd"], flags), Ok(4));
    }
    assert_came(side, 20);
}

/// TCP stores nothing with `MSG_TRUNC`, so it does not matter where.
fn discards_into_nothing(side: &Side, fd: Fd) {
    assert_eq!(calls::recv_at(fd, 0, 10, MSG_TRUNC | MSG_DONTWAIT), Err(Errno::EAGAIN));
    for _ in 0..4 {
        demand(side);
    }
    await_unread(fd, 16);
    assert_eq!(calls::recv_at(fd, 0, 1, MSG_TRUNC), Ok(1));
    assert_eq!(calls::recv_at(fd, 8, 2, MSG_TRUNC), Ok(2));
    assert_eq!(calls::recv_at(fd, 0, 5, MSG_TRUNC | MSG_PEEK), Ok(5));
    assert_eq!(calls::recv_at(fd, usize::MAX, 5, MSG_TRUNC), Err(Errno::EFAULT));
    assert_eq!(calls::recv_at(fd, 0, 5, 0), Err(Errno::EFAULT));
    let mut untouched = *b"......";
    assert_eq!(calls::recv_into(fd, &mut untouched, MSG_TRUNC | MSG_PEEK), Ok(6));
    assert_eq!(&untouched, b"......", "MSG_TRUNC stores nothing on TCP");
    assert_eq!(calls::recv_at(fd, 0, 1000, MSG_TRUNC | MSG_PEEK), Ok(13));
    assert_eq!(calls::recv(fd, 3, 0), Ok(b"ada".to_vec()));
    // As HAProxy drains what it does not want.
    assert_eq!(calls::recv_at(fd, 0, i32::MAX as usize, MSG_TRUNC | MSG_DONTWAIT | MSG_NOSIGNAL), Ok(10));
    assert_eq!(
        calls::recv_at(fd, 0, i32::MAX as usize, MSG_TRUNC | MSG_DONTWAIT | MSG_NOSIGNAL),
        Err(Errno::EAGAIN)
    );
    stop(side);
}

fn claims_lengths(side: &Side, fd: Fd) {
    for shift in [31, 40, 48, 57, 62, 63, 64] {
        let len = 1usize.checked_shl(shift).unwrap_or(usize::MAX);
        for claim in Claim::ALL {
            demand(side);
            await_unread(fd, 4);
            if claim.receive(fd, len).is_err() {
                assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
            }
        }
        if shift >= 48 {
            assert_eq!(calls::write_claiming(fd, len), Err(Errno::EFAULT));
        }
    }
    stop(side);
}

fn moves_nothing(side: &Side, fd: Fd) {
    demand(side);
    await_unread(fd, 4);
    for address in NOWHERE {
        let _ = calls::send_at(fd, address, 0, 0);
        let _ = calls::recv_at(fd, address, 0, 0);
        let _ = calls::writev_behind(fd, address, b"");
    }
    assert_eq!(calls::writev_behind(fd, usize::MAX, b"data"), Err(Errno::EFAULT));
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    stop(side);
}

fn has_room_for_odd_names(side: &Side, fd: Fd) {
    for _ in 0..5 {
        demand(side);
    }
    await_unread(fd, 20);
    for length in [u32::MAX, 1 << 31] {
        assert_eq!(calls::recvmsg_with_length(fd, 3, length, 0), Err(Errno::EINVAL));
        // The bytes are gone by then.
        assert_eq!(calls::recvfrom_with_length(fd, 3, Some(length)), Err(Errno::EINVAL));
    }
    let _ = calls::recvmsg_with_length(fd, 2, 200, 0);
    let _ = calls::recvfrom_with_length(fd, 2, Some(200));
    assert_eq!(calls::recvfrom_with_length(fd, 3, None), Err(Errno::EFAULT));
    assert_eq!(calls::recv(fd, 20, 0), Ok(b"atadata".to_vec()));
    stop(side);
}

fn has_no_room_for_a_name(side: &Side, fd: Fd) {
    demand(side);
    await_unread(fd, 4);
    for length in [0, 55, u32::MAX, 1] {
        let _ = calls::recvmsg_without_name(fd, 1, length);
    }
    stop(side);
}

fn sends_to_odd_names(side: &Side, fd: Fd) {
    for length in [129, 200, 1 << 31, u32::MAX] {
        assert_eq!(calls::sendto_with_length(fd, b"data", None, length), Err(Errno::EINVAL));
    }
    let is_unix = side.family == Family::Unix;
    let mut total = 0;
    for address in NOWHERE {
        total += calls::sendto_with_length(fd, b"data", Some(address), 16).unwrap_or(0);
        total += calls::sendto_with_length(fd, b"data", Some(address), 0).unwrap_or(0);
        total += calls::sendmsg_with_length(fd, b"data", Some(address), 16).unwrap_or(0);
        assert!(calls::sendmsg_with_length(fd, b"data", Some(address.max(1)), u32::MAX).is_err());
    }
    if !is_unix {
        total += calls::sendmsg_with_length(fd, b"data", None, 200).unwrap_or(0);
    }
    assert_came(side, total);
}

fn sends_odd_control_data(side: &Side, fd: Fd) {
    let mut total = 0;
    for (header, length) in [
        // No header, a header of nothing, one that ends too early or too late.
        ([0, 0, 0], 5),
        ([0, 0, 0], 24),
        ([3, SOL_SOCKET, libc::SO_TIMESTAMPING], 24),
        ([100, SOL_SOCKET, libc::SO_TIMESTAMPING], 24),
        ([20, SOL_SOCKET, 99], 24),
        ([20, SOL_SOCKET, libc::SCM_RIGHTS], 24),
        ([20, SOL_SOCKET, libc::SO_TIMESTAMPING], 24),
        ([20, IPPROTO_IP, libc::IP_TOS], 24),
        ([20, IPPROTO_TCP, 1], 24),
        ([20, SOL_SOCKET, 99], 1 << 31),
    ] {
        total += calls::sendmsg_with_control(fd, b"data", header, None, length, 0).unwrap_or(0);
    }
    assert_came(side, total);
}

fn sends_control_data_from_nowhere(side: &Side, fd: Fd) {
    let mut total = 0;
    for address in NOWHERE {
        assert_eq!(
            calls::sendmsg_with_control(fd, b"data", [0; 3], Some(address), 24, 0),
            Err(Errno::EFAULT)
        );
        assert_eq!(
            calls::sendmsg_with_control(fd, b"data", [0; 3], Some(address), 1 << 31, 0),
            Err(Errno::ENOBUFS)
        );
        total += calls::sendmsg_with_control(fd, b"data", [0; 3], Some(address), 0, 0).unwrap_or(0);
    }
    assert_came(side, total);
}

/// A control message that says that it is longer than all of them: nothing is sent, and what is behind is none of its.
fn sends_overlong_control_data(side: &Side, fd: Fd) {
    let (other, peer) = calls::unix_pair().expect("socketpair");
    for len in [25, 100, 1 << 20, -1] {
        let header = [len, SOL_SOCKET, libc::SCM_RIGHTS];
        assert_eq!(calls::sendmsg_with_control(other, b"data", header, None, 24, 0), Err(Errno::EINVAL));
    }
    assert_eq!(calls::recv(peer, 10, MSG_DONTWAIT), Err(Errno::EAGAIN));
    let total = calls::send(fd, b"data", 0).unwrap_or(0);
    assert_came(side, total);
}

/// The address is of no interest to the kernel where there is no socket, or it is too long.
fn connects_to_nowhere(side: &Side, fd: Fd) {
    let (other, _peer) = calls::unix_pair().expect("socketpair");
    for address in NOWHERE {
        for length in [16, 110, 4096] {
            for fd in [fd, other, 999] {
                assert!(calls::connect_nowhere(fd, address, length).is_err());
            }
        }
    }
    let total = calls::send(fd, b"data", 0).unwrap_or(0);
    assert_came(side, total);
}

fn sets_options_from_nowhere(side: &Side, fd: Fd) {
    for address in NOWHERE {
        for name in [libc::SO_RCVLOWAT, libc::SO_PEEK_OFF, libc::SO_TIMESTAMP, libc::SO_RCVBUF] {
            let _ = calls::set_option_nowhere(fd, SOL_SOCKET, name, address);
        }
        for name in [TCP_NODELAY, TCP_CORK, libc::TCP_INQ] {
            let _ = calls::set_option_nowhere(fd, IPPROTO_TCP, name, address);
        }
    }
    demand(side);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    stop(side);
}

/// What is left of a limit is told with messages alone.
fn has_limits(side: &Side, fd: Fd) {
    for address in [8, usize::MAX] {
        assert_eq!(calls::recvmmsg_for_nowhere(fd, address), Err(Errno::EFAULT));
    }
    let limit = libc::timespec { tv_sec: 5, tv_nsec: 7 };
    assert!(calls::recvmmsg_for(fd, 10, limit).is_err());
    demand(side);
    await_unread(fd, 4);
    let _ = calls::recvmmsg_for(fd, 10, limit);
    stop(side);
}

fn opens_fast(side: &Side, fd: Fd) {
    let mut total = calls::send(fd, b"data", MSG_FASTOPEN).unwrap_or(0);
    total += calls::sendmsg(fd, &[b"data"], MSG_FASTOPEN).unwrap_or(0);
    total += calls::sendto_peer(fd, b"data", MSG_FASTOPEN | MSG_DONTWAIT).unwrap_or(0);
    assert_came(side, total);
}

/// `MSG_CMSG_COMPAT`, by which the kernel tells a program of 32 bits.
fn passes_a_flag_of_the_kernels(side: &Side, fd: Fd) {
    const COMPATIBLE: i32 = i32::MIN;
    assert_eq!(calls::send(fd, b"data", COMPATIBLE), Ok(4));
    assert_eq!(calls::sendmsg(fd, &[b"data"], COMPATIBLE), Err(Errno::EINVAL));
    demand(side);
    await_unread(fd, 4);
    assert_eq!(calls::recvmsg(fd, &[2], 0, COMPATIBLE).err(), Some(Errno::EINVAL));
    assert_eq!(calls::recv(fd, 2, COMPATIBLE), Ok(b"da".to_vec()));
    // On `AF_UNIX` this has it go back.
    let header = [20, IPPROTO_TCP, 1];
    assert_eq!(calls::sendmsg_with_control(fd, b"data", header, None, 24, 0), Ok(4));
    assert_eq!(calls::send(fd, b"data", COMPATIBLE), Ok(4));
    assert_eq!(calls::recv(fd, 2, COMPATIBLE), Ok(b"ta".to_vec()));
    stop(side);
}

fn adds_exclusive_and_one_shot(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    let exclusive = libc::EPOLLIN | libc::EPOLLEXCLUSIVE;
    for beside in [libc::EPOLLONESHOT, libc::EPOLLPRI, libc::EPOLLRDHUP] {
        assert_eq!(calls::epoll_add(epfd, fd, exclusive | beside, 1), Err(Errno::EINVAL));
    }
    calls::epoll_add(epfd, fd, libc::EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    for beside in [libc::EPOLLONESHOT, libc::EPOLLPRI] {
        assert_eq!(calls::epoll_add(epfd, fd, exclusive | beside, 1), Err(Errno::EINVAL));
        assert_eq!(calls::epoll_modify(epfd, fd, exclusive | beside, 1), Err(Errno::EINVAL));
    }
    side.sync("done");
}

/// By a negative number, and by a high one, none of which is open.
fn calls_on_none(side: &Side, fd: Fd) {
    for none in [-1, 5000] {
        assert_eq!(calls::sendmmsg(none, &[b"data"], 0), Err(Errno::EBADF));
        assert_eq!(calls::sendmmsg(none, &[], 0), Err(Errno::EBADF));
        assert_eq!(calls::recvmmsg(none, &[4], 0), Err(Errno::EBADF));
        assert_eq!(calls::recvmmsg(none, &[], 0), Err(Errno::EBADF));
        assert_eq!(calls::send(none, b"data", libc::MSG_ZEROCOPY), Err(Errno::EBADF));
        assert_eq!(calls::sendmsg(none, &[b"data"], libc::MSG_ZEROCOPY), Err(Errno::EBADF));
        assert_eq!(calls::dup2(none, 200), Err(Errno::EBADF));
        assert_eq!(calls::dup3(none, 200, libc::O_CLOEXEC), Err(Errno::EBADF));
        assert_eq!(calls::dup2(fd, -1), Err(Errno::EBADF));
        assert_eq!(calls::sendfile_at(none, fd, None, 10), Err(Errno::EBADF));
        assert_eq!(calls::sendfile_at(none, none, None, 10), Err(Errno::EBADF));
    }
    assert_eq!(calls::splice(-1, fd, 10), Err(Errno::EBADF));
    assert_eq!(calls::splice(fd, -1, 10), Err(Errno::EBADF));
    stop(side);
}

/// The kernel sends no more than 1,024 messages at once (`UIO_MAXIOV`), but receives any number. A Unix socket would not hold so many.
const VERY_MANY: usize = 1500;

fn sends_very_many(side: &Side, fd: Fd) {
    let sent = calls::sendmmsg(fd, &[b"m".as_slice(); VERY_MANY], 0).expect("sendmmsg");
    assert_eq!(sent, [1; 1024]);
    assert_eq!(calls::send(fd, &[b'm'; VERY_MANY - 1024], 0), Ok(VERY_MANY - 1024));
    side.sync("sent");
    side.sync("done");
}

fn takes_very_many(side: &Side, fd: Fd) {
    side.sync("sent");
    await_unread(fd, VERY_MANY);
    let taken = calls::recvmmsg(fd, &[1; VERY_MANY], 0).expect("recvmmsg");
    assert_eq!(taken, vec![b"m"; VERY_MANY]);
    side.sync("done");
}

fn waits_for_events_nowhere(side: &Side, fd: Fd) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, libc::EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    assert_eq!(calls::epoll_wait_nowhere(epfd, 1, 0), Ok(0));
    demand(side);
    await_readable(fd);
    assert_eq!(calls::epoll_wait_nowhere(epfd, 1, -1), Err(Errno::EFAULT));
    // EP_MAX_EVENTS
    let most = libc::c_int::MAX / size_of::<libc::epoll_event>() as libc::c_int;
    assert_eq!(calls::epoll_wait_nowhere(epfd, most, -1), Err(Errno::EFAULT));
    for count in [most + 1, libc::c_int::MAX, 0, -1] {
        assert_eq!(calls::epoll_wait_nowhere(epfd, count, -1), Err(Errno::EINVAL));
    }
    assert_eq!(calls::epoll_wait(epfd, 4, -1).map(|ready| ready.len()), Ok(1));
    stop(side);
}

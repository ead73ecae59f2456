//! Calls that no sensible program makes: with addresses, lengths and flags that the kernel refuses, or takes in a way of its own.

use std::os::raw::{c_int, c_void};

use super::show::{Bytes, lengths, message_flags};
use super::stream::{message_of, show_pieces, vector_of, vector_of_mut};
use super::transcript::{noted, noted_number};
use super::{Errno, Fd, Outcome};

/// Addresses at which no process has memory that it may use: null, in the first page, and the kernel's last byte.
pub const NOWHERE: [usize; 3] = [0, 8, usize::MAX];

fn at(address: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(address)
}

/// An address as the transcript shows it.
fn place(address: usize) -> String {
    if address == usize::MAX { "−1".to_owned() } else { address.to_string() }
}

/// recv(2) to an address that is never written to.
pub fn recv_at(fd: Fd, address: usize, len: usize, flags: c_int) -> Outcome<usize> {
    // SAFETY: the kernel writes nothing there, or answers EFAULT, and so must anything in between.
    let ret = unsafe { libc::recv(fd, at(address), len, flags) };
    noted_number(Errno::check(ret), || {
        format!("recv({fd}, at {}, {len}, {})", place(address), message_flags(flags))
    })
}

/// send(2) from an address that can't be read.
pub fn send_at(fd: Fd, address: usize, len: usize, flags: c_int) -> Outcome<usize> {
    // SAFETY: as in `recv_at`.
    let ret = unsafe { libc::send(fd, at(address), len, flags) };
    noted_number(Errno::check(ret), || {
        format!("send({fd}, at {}, {len}, {})", place(address), message_flags(flags))
    })
}

/// writev(2) of no bytes at `address`, and of `data`.
pub fn writev_behind(fd: Fd, address: usize, data: &[u8]) -> Outcome<usize> {
    let mut vector = vector_of(&[&[], data]);
    vector[0].iov_base = at(address);
    // SAFETY: the entries describe nothing, and `data`.
    let ret = unsafe { libc::writev(fd, vector.as_ptr(), 2) };
    noted_number(Errno::check(ret), || format!("writev({fd}, none at {}, {})", place(address), Bytes(data)))
}

/// A call that may be told a length that its buffer has not.
#[derive(Clone, Copy, Debug)]
pub enum Claim {
    /// recv(2)
    Recv,
    /// recvfrom(2)
    Recvfrom,
    /// read(2)
    Read,
    /// readv(2) of one buffer.
    Readv,
    /// recvmsg(2) of one buffer.
    Recvmsg,
    /// readv(2) of two buffers, the second of which is not long.
    ReadvOfTwo,
}

impl Claim {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Recv, Self::Recvfrom, Self::Read, Self::Readv, Self::Recvmsg, Self::ReadvOfTwo];

    /// Receives what is there, 64 bytes at most, into a buffer that is said to have `len`.
    pub fn receive(self, fd: Fd, len: usize) -> Outcome<usize> {
        // Not on the stack, which may lie so high that no length is possible.
        let mut data = vec![0u8; 64];
        let buffer: *mut c_void = data.as_mut_ptr().cast();
        let mut vector = [libc::iovec { iov_base: buffer, iov_len: len }; 2];
        vector[1].iov_len = 1;
        let (name, length) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut message = message_of(&mut vector[..1]);
        let flags = libc::MSG_DONTWAIT;
        let ret = match self {
            // SAFETY: there is room for what is there, here and below.
            Self::Recv => unsafe { libc::recv(fd, buffer, len, flags) },
            // SAFETY: as above.
            Self::Recvfrom => unsafe { libc::recvfrom(fd, buffer, len, flags, name, length) },
            // SAFETY: as above.
            Self::Read => unsafe { libc::read(fd, buffer, len) },
            // SAFETY: as above.
            Self::Readv => unsafe { libc::readv(fd, message.msg_iov, 1) },
            // SAFETY: as above.
            Self::Recvmsg => unsafe { libc::recvmsg(fd, &raw mut message, flags) },
            // SAFETY: as above.
            Self::ReadvOfTwo => unsafe { libc::readv(fd, vector.as_ptr(), 2) },
        };
        noted_number(Errno::check(ret), || format!("{self:?}({fd}, {len:#x})"))
    }
}

/// write(2) of more bytes than any process has.
pub fn write_claiming(fd: Fd, len: usize) -> Outcome<usize> {
    let data = [0u8; 64];
    // SAFETY: as in `recv_at`.
    let ret = unsafe { libc::write(fd, data.as_ptr().cast(), len) };
    noted_number(Errno::check(ret), || format!("write({fd}, {len:#x})"))
}

/// sendfile(2) from `file`, at `offset` or its own. How much was sent, and the offset afterwards.
pub fn sendfile_at(socket: Fd, file: Fd, offset: Option<i64>, count: usize) -> Outcome<(usize, Option<i64>)> {
    let mut place = offset;
    let pointer = place.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
    // SAFETY: null, or that of `place`.
    let ret = unsafe { libc::sendfile(socket, file, pointer, count) };
    noted(
        Errno::check(ret).map(|sent| (sent, place)),
        || format!("sendfile({socket}, {file}, {offset:?}, {count:#x})"),
        |sent| format!("{sent:?}"),
    )
}

/// Where the file `fd` is read next, by lseek(2).
pub fn place_of(fd: Fd) -> Outcome<usize> {
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::lseek(fd, 0, libc::SEEK_CUR) };
    noted_number(Errno::check(ret as isize), || format!("lseek({fd}, 0, SEEK_CUR)"))
}

/// sendfile(2) with an offset at `address`.
pub fn sendfile_nowhere(socket: Fd, file: Fd, address: usize) -> Outcome<usize> {
    // SAFETY: as in `recv_at`.
    let ret = unsafe { libc::sendfile(socket, file, at(address).cast(), 10) };
    noted_number(Errno::check(ret), || format!("sendfile({socket}, {file}, at {}, 10)", place(address)))
}

/// getsockopt(2) into twelve bytes of 170, of which it is told to use `room`. All of them, and the length that it tells.
pub fn part_of_option(fd: Fd, level: c_int, name: c_int, room: c_int) -> Outcome<([u8; 12], u32)> {
    let mut value = [170u8; 12];
    let mut len = room.cast_unsigned();
    // SAFETY: the pointers are those of `value`, which has that room, or the kernel answers EINVAL, and `len`.
    let ret = unsafe { libc::getsockopt(fd, level, name, value.as_mut_ptr().cast(), &raw mut len) };
    noted(
        Errno::check(ret as isize).map(|_| (value, len)),
        || format!("getsockopt({fd}, {level}, {name}, room {room})"),
        |part| format!("{part:?}"),
    )
}

/// recvmmsg(2), which does not wait, with the messages at `address`.
pub fn recvmmsg_nowhere(fd: Fd, address: usize, count: u32) -> Outcome<usize> {
    // SAFETY: as in `recv_at`.
    let ret =
        unsafe { libc::recvmmsg(fd, at(address).cast(), count, libc::MSG_DONTWAIT, std::ptr::null_mut()) };
    noted_number(Errno::check(ret as isize), || format!("recvmmsg({fd}, at {}, {count})", place(address)))
}

/// sendmmsg(2) with the messages at `address`.
pub fn sendmmsg_nowhere(fd: Fd, address: usize, count: u32) -> Outcome<usize> {
    // SAFETY: as in `recv_at`.
    let ret = unsafe { libc::sendmmsg(fd, at(address).cast(), count, 0) };
    noted_number(Errno::check(ret as isize), || format!("sendmmsg({fd}, at {}, {count})", place(address)))
}

/// recvmsg(2) with the message at `address`.
pub fn recvmsg_nowhere(fd: Fd, address: usize) -> Outcome<usize> {
    // SAFETY: as in `recv_at`.
    let ret = unsafe { libc::recvmsg(fd, at(address).cast(), libc::MSG_DONTWAIT) };
    noted_number(Errno::check(ret), || format!("recvmsg({fd}, at {})", place(address)))
}

/// sendmsg(2) with the message at `address`.
pub fn sendmsg_nowhere(fd: Fd, address: usize) -> Outcome<usize> {
    // SAFETY: as in `recv_at`.
    let ret = unsafe { libc::sendmsg(fd, at(address).cast(), 0) };
    noted_number(Errno::check(ret), || format!("sendmsg({fd}, at {})", place(address)))
}

/// readv(2) and writev(2) with `count` pieces at `address`.
pub fn vectors_nowhere(fd: Fd, address: usize, count: c_int) -> [Outcome<usize>; 2] {
    // SAFETY: as in `recv_at`.
    let read = unsafe { libc::readv(fd, at(address).cast(), count) };
    // SAFETY: as in `recv_at`.
    let written = unsafe { libc::writev(fd, at(address).cast(), count) };
    let noted = |name, ret| {
        noted_number(Errno::check(ret), || format!("{name}({fd}, at {}, {count})", place(address)))
    };
    [noted("readv", read), noted("writev", written)]
}

/// poll(2) without waiting, of `count` descriptors at `address`.
pub fn poll_nowhere(address: usize, count: libc::nfds_t) -> Outcome<usize> {
    // SAFETY: as in `recv_at`.
    let ret = unsafe { libc::poll(at(address).cast(), count, 0) };
    noted_number(Errno::check(ret as isize), || format!("poll(at {}, {count})", place(address)))
}

/// select(2) without waiting, of descriptors up to `fd`, with two sets and one at `address`.
pub fn select_nowhere(fd: Fd, address: usize) -> Outcome<usize> {
    // SAFETY: plain bits, of which zeros are no descriptor.
    let mut set: libc::fd_set = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is below FD_SETSIZE.
    unsafe { libc::FD_SET(fd, &raw mut set) };
    let mut time = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let null = std::ptr::null_mut();
    // SAFETY: as in `recv_at`; the others are those of `set` and `time`.
    let ret = unsafe { libc::select(fd + 1, &raw mut set, at(address).cast(), null, &raw mut time) };
    noted_number(Errno::check(ret as isize), || format!("select({fd}, at {})", place(address)))
}

/// preadv2(2) of a socket.
pub fn preadv2(fd: Fd, lens: &[usize], flags: c_int) -> Outcome<usize> {
    let mut pieces: Vec<Vec<u8>> = lens.iter().map(|&len| vec![0; len]).collect();
    let vector = vector_of_mut(&mut pieces);
    // SAFETY: each entry describes one of `pieces`.
    let ret = unsafe { libc::preadv2(fd, vector.as_ptr(), vector.len() as c_int, -1, flags) };
    noted_number(Errno::check(ret), || format!("preadv2({fd}, {}, {flags:#x})", lengths(lens)))
}

/// pwritev2(2) of a socket.
pub fn pwritev2(fd: Fd, pieces: &[&[u8]], flags: c_int) -> Outcome<usize> {
    let vector = vector_of(pieces);
    // SAFETY: each entry describes one of `pieces`.
    let ret = unsafe { libc::pwritev2(fd, vector.as_ptr(), vector.len() as c_int, -1, flags) };
    noted_number(Errno::check(ret), || format!("pwritev2({fd}, {}, {flags:#x})", show_pieces(pieces)))
}

/// recvfrom(2) with an address whose length is `room`, or nowhere. The length afterwards.
pub fn recvfrom_with_length(fd: Fd, len: usize, room: Option<u32>) -> Outcome<usize> {
    let mut data = vec![0u8; len];
    let mut address = [0u64; 32];
    let mut length = room;
    let pointer = length.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
    // SAFETY: the pointers are those of `data`, `address` and `length`.
    let ret = unsafe {
        libc::recvfrom(
            fd,
            data.as_mut_ptr().cast(),
            len,
            libc::MSG_DONTWAIT,
            address.as_mut_ptr().cast(),
            pointer,
        )
    };
    noted(
        Errno::check(ret),
        || format!("recvfrom({fd}, {len}, room {room:?})"),
        |count| format!("{count} address length {length:?}"),
    )
}

/// sendto(2) with an address of `length` bytes, at `place` or where there are as many.
pub fn sendto_with_length(fd: Fd, data: &[u8], place: Option<usize>, length: u32) -> Outcome<usize> {
    let address = [0u64; 32];
    let pointer = place.map_or(address.as_ptr().cast(), |place| at(place).cast_const());
    // SAFETY: the pointers are those of `data` and `address`, or as in `recv_at`.
    let ret = unsafe { libc::sendto(fd, data.as_ptr().cast(), data.len(), 0, pointer.cast(), length) };
    noted_number(Errno::check(ret), || format!("sendto({fd}, {}, {place:?}, {length:#x})", Bytes(data)))
}

/// recvmsg(2) of at most `len` bytes with room for an address that is said to be of `length` bytes.
pub fn recvmsg_with_length(fd: Fd, len: usize, length: u32, flags: c_int) -> Outcome<usize> {
    let mut pieces = [vec![0; len]];
    let mut vector = vector_of_mut(&mut pieces);
    let mut message = message_of(&mut vector);
    let mut address = [0u64; 32];
    message.msg_name = address.as_mut_ptr().cast();
    message.msg_namelen = length;
    // SAFETY: the message describes buffers that outlive the call.
    let ret = unsafe { libc::recvmsg(fd, &raw mut message, flags) };
    noted(
        Errno::check(ret),
        || format!("recvmsg({fd}, {len}, room {length:#x}, {})", message_flags(flags)),
        |count| format!("{count} address length {}", message.msg_namelen),
    )
}

/// recvmsg(2) of at most `len` bytes with no room for an address, which is said to be of `length` bytes.
pub fn recvmsg_without_name(fd: Fd, len: usize, length: u32) -> Outcome<usize> {
    let mut pieces = [vec![0; len]];
    let mut vector = vector_of_mut(&mut pieces);
    let mut message = message_of(&mut vector);
    message.msg_namelen = length;
    // SAFETY: the message describes buffers that outlive the call.
    let ret = unsafe { libc::recvmsg(fd, &raw mut message, 0) };
    noted(
        Errno::check(ret),
        || format!("recvmsg({fd}, {len}, no room {length:#x})"),
        |count| format!("{count} address length {}", message.msg_namelen),
    )
}

/// sendmsg(2) with an address of `length` bytes, at `place` or where there are as many.
pub fn sendmsg_with_length(fd: Fd, data: &[u8], place: Option<usize>, length: u32) -> Outcome<usize> {
    let mut vector = vector_of(&[data]);
    let mut message = message_of(&mut vector);
    let mut address = [0u64; 32];
    message.msg_name = place.map_or(address.as_mut_ptr().cast(), at);
    message.msg_namelen = length;
    // SAFETY: the message describes buffers that outlive the call, or as in `recv_at`.
    let ret = unsafe { libc::sendmsg(fd, &raw const message, 0) };
    noted_number(Errno::check(ret), || format!("sendmsg({fd}, {}, {place:?}, {length:#x})", Bytes(data)))
}

/// sendmsg(2) with `length` bytes of control data, at `place` or where there is one message of the given header. The call also gets
/// `flags`.
pub fn sendmsg_with_control(
    fd: Fd,
    data: &[u8],
    header: [c_int; 3],
    place: Option<usize>,
    length: usize,
    flags: c_int,
) -> Outcome<usize> {
    let mut vector = vector_of(&[data]);
    let mut message = message_of(&mut vector);
    let [len, level, kind] = header;
    let words = u64::from(level.cast_unsigned()) | u64::from(kind.cast_unsigned()) << 32;
    let mut control = [u64::from(len.cast_unsigned()), words, 0, 0];
    message.msg_control = place.map_or(control.as_mut_ptr().cast(), at);
    message.msg_controllen = length;
    // SAFETY: the message describes buffers that outlive the call, or as in `recv_at`.
    let ret = unsafe { libc::sendmsg(fd, &raw const message, flags) };
    noted_number(Errno::check(ret), || {
        format!("sendmsg({fd}, {}, control {header:?} {place:?} {length:#x}, {flags:#x})", Bytes(data))
    })
}

/// connect(2) with `length` bytes at `address`.
pub fn connect_nowhere(fd: Fd, address: usize, length: u32) -> Outcome<usize> {
    // SAFETY: as in `recv_at`.
    let ret = unsafe { libc::connect(fd, at(address).cast(), length) };
    noted_number(Errno::check(ret as isize), || format!("connect({fd}, at {}, {length})", place(address)))
}

/// setsockopt(2) with four bytes at `address`.
pub fn set_option_nowhere(fd: Fd, level: c_int, name: c_int, address: usize) -> Outcome<usize> {
    // SAFETY: as in `recv_at`.
    let ret = unsafe { libc::setsockopt(fd, level, name, at(address), 4) };
    noted_number(Errno::check(ret as isize), || {
        format!("setsockopt({fd}, {level}, {name}, at {}, 4)", place(address))
    })
}

/// recvmmsg(2) of one message of at most `len` bytes, without waiting, with `limit` to look at between two. Whether it tells how much of
/// that is left.
pub fn recvmmsg_for(fd: Fd, len: usize, mut limit: libc::timespec) -> Outcome<(usize, bool)> {
    let mut pieces = [vec![0; len]];
    let mut vector = vector_of_mut(&mut pieces);
    let mut message = libc::mmsghdr { msg_hdr: message_of(&mut vector), msg_len: 0 };
    let libc::timespec { tv_sec, tv_nsec } = limit;
    // SAFETY: the message describes buffers that outlive the call.
    let ret = unsafe { libc::recvmmsg(fd, &raw mut message, 1, libc::MSG_DONTWAIT, &raw mut limit) };
    let is_told = (limit.tv_sec, limit.tv_nsec) != (tv_sec, tv_nsec);
    let outcome = Errno::check(ret as isize).map(|count| (count, is_told));
    noted(
        outcome,
        || format!("recvmmsg({fd}, {len}, {tv_sec}.{tv_nsec}): changes it {is_told}"),
        |(count, _)| count.to_string(),
    )
}

/// The same with the limit at `address`.
pub fn recvmmsg_for_nowhere(fd: Fd, address: usize) -> Outcome<usize> {
    // SAFETY: as in `recv_at`.
    let ret = unsafe {
        libc::recvmmsg(fd, std::ptr::null_mut(), 0, libc::MSG_DONTWAIT, at(address).cast::<libc::timespec>())
    };
    noted_number(Errno::check(ret as isize), || format!("recvmmsg({fd}, 0, limit at {})", place(address)))
}

/// epoll_wait(2) for one event, to be reported nowhere.
pub fn epoll_wait_nowhere(epfd: Fd, max: c_int, timeout: c_int) -> Outcome<usize> {
    // SAFETY: as in `recv_at`.
    let ret = unsafe { libc::epoll_wait(epfd, std::ptr::null_mut(), max, timeout) };
    noted_number(Errno::check(ret as isize), || format!("epoll_wait({epfd}, null, {max}, {timeout})"))
}

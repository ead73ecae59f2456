//! Bytes in and out: every libc entry point that can touch a stream.

use std::os::raw::{c_int, c_uint, c_void};

use rustix::fd::BorrowedFd;
use rustix::net::RecvFlags;

use super::show::{Bytes, lengths, message_flags};
use super::transcript::{noted, noted_number};
use super::{Errno, Fd, Outcome};

unsafe extern "C" {
    fn __read_chk(fd: c_int, buf: *mut c_void, count: usize, buf_len: usize) -> isize;
    fn __recv_chk(fd: c_int, buf: *mut c_void, count: usize, buf_len: usize, flags: c_int) -> isize;
    fn __recvfrom_chk(
        fd: c_int,
        buf: *mut c_void,
        count: usize,
        buf_len: usize,
        flags: c_int,
        addr: *mut libc::sockaddr,
        addr_len: *mut libc::socklen_t,
    ) -> isize;
}

/// Room for any socket address.
const ADDRESS_ROOM: usize = size_of::<libc::sockaddr_storage>();

/// An address in no process's memory.
const NOWHERE: usize = 8;

fn filled(outcome: Outcome<usize>, mut buf: Vec<u8>) -> Outcome<Vec<u8>> {
    outcome.map(|len| {
        buf.truncate(len);
        buf
    })
}

fn noted_bytes(outcome: Outcome<Vec<u8>>, call: impl FnOnce() -> String) -> Outcome<Vec<u8>> {
    noted(outcome, call, |data| format!("{} {}", data.len(), Bytes(data)))
}

/// send(2)
pub fn send(fd: Fd, data: &[u8], flags: c_int) -> Outcome<usize> {
    // SAFETY: pointer and length are those of `data`.
    let ret = unsafe { libc::send(fd, data.as_ptr().cast(), data.len(), flags) };
    noted_number(Errno::check(ret), || format!("send({fd}, {}, {})", Bytes(data), message_flags(flags)))
}

/// send(2) from a bad pointer.
pub fn send_from_nowhere(fd: Fd, len: usize, flags: c_int) -> Outcome<usize> {
    // SAFETY: the kernel answers a bad pointer with EFAULT, and so must anything in between.
    let ret = unsafe { libc::send(fd, std::ptr::without_provenance(NOWHERE), len, flags) };
    noted_number(Errno::check(ret), || format!("send({fd}, nowhere, {len}, {})", message_flags(flags)))
}

/// write(2)
pub fn write(fd: Fd, data: &[u8]) -> Outcome<usize> {
    // SAFETY: pointer and length are those of `data`.
    let ret = unsafe { libc::write(fd, data.as_ptr().cast(), data.len()) };
    noted_number(Errno::check(ret), || format!("write({fd}, {})", Bytes(data)))
}

/// write(2) from a bad pointer.
pub fn write_from_nowhere(fd: Fd, len: usize) -> Outcome<usize> {
    // SAFETY: as in `send_from_nowhere`.
    let ret = unsafe { libc::write(fd, std::ptr::without_provenance(NOWHERE), len) };
    noted_number(Errno::check(ret), || format!("write({fd}, nowhere, {len})"))
}

/// sendto(2), with an address that TCP ignores.
pub fn sendto(fd: Fd, data: &[u8], flags: c_int) -> Outcome<usize> {
    // SAFETY: an all-zero address is a valid value of this plain C struct.
    let mut address: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    address.sin_family = libc::AF_INET as libc::sa_family_t;
    let len = size_of_val(&address) as libc::socklen_t;
    // SAFETY: pointers and lengths are those of `data` and `address`.
    let ret = unsafe {
        libc::sendto(fd, data.as_ptr().cast(), data.len(), flags, (&raw const address).cast(), len)
    };
    noted_number(Errno::check(ret), || format!("sendto({fd}, {}, {})", Bytes(data), message_flags(flags)))
}

/// sendto(2) without an address.
pub fn sendto_peer(fd: Fd, data: &[u8], flags: c_int) -> Outcome<usize> {
    // SAFETY: pointer and length are those of `data`; a null pointer means no address.
    let ret = unsafe { libc::sendto(fd, data.as_ptr().cast(), data.len(), flags, std::ptr::null(), 0) };
    noted_number(Errno::check(ret), || format!("sendto({fd}, {}, {})", Bytes(data), message_flags(flags)))
}

/// writev(2)
pub fn writev(fd: Fd, pieces: &[&[u8]]) -> Outcome<usize> {
    let vector = vector_of(pieces);
    // SAFETY: each entry describes one of `pieces`.
    let ret = unsafe { libc::writev(fd, vector.as_ptr(), vector.len() as c_int) };
    noted_number(Errno::check(ret), || format!("writev({fd}, {})", show_pieces(pieces)))
}

/// sendmsg(2), without ancillary data.
pub fn sendmsg(fd: Fd, pieces: &[&[u8]], flags: c_int) -> Outcome<usize> {
    let mut vector = vector_of(pieces);
    let message = message_of(&mut vector);
    // SAFETY: the message describes `pieces`, which outlive the call.
    let ret = unsafe { libc::sendmsg(fd, &raw const message, flags) };
    noted_number(Errno::check(ret), || {
        format!("sendmsg({fd}, {}, {})", show_pieces(pieces), message_flags(flags))
    })
}

/// sendmmsg(2): one message for each element of `messages`. The bytes of each that were sent.
pub fn sendmmsg(fd: Fd, messages: &[&[u8]], flags: c_int) -> Outcome<Vec<usize>> {
    let mut vectors: Vec<_> = messages.iter().map(|message| vector_of(&[message])).collect();
    let mut headers: Vec<_> =
        vectors.iter_mut().map(|vector| libc::mmsghdr { msg_hdr: message_of(vector), msg_len: 0 }).collect();
    // SAFETY: each header describes one of `messages`, which outlive the call.
    let ret = unsafe { libc::sendmmsg(fd, headers.as_mut_ptr(), headers.len() as c_uint, flags) };
    let sent = Errno::check(ret as isize)
        .map(|count| headers[..count].iter().map(|header| header.msg_len as usize).collect::<Vec<_>>());
    noted(
        sent,
        || format!("sendmmsg({fd}, {}, {})", show_pieces(messages), message_flags(flags)),
        |sent| format!("{sent:?}"),
    )
}

/// sendfile(2) from `file` at its own offset.
pub fn sendfile(socket: Fd, file: Fd, count: usize) -> Outcome<usize> {
    // SAFETY: a null offset asks for the file's own.
    let ret = unsafe { libc::sendfile(socket, file, std::ptr::null_mut(), count) };
    noted_number(Errno::check(ret), || format!("sendfile({socket}, {file}, {count})"))
}

/// splice(2) between a pipe and something else, at their own offsets.
pub fn splice(from: Fd, to: Fd, count: usize) -> Outcome<usize> {
    // SAFETY: null offsets are what pipes and sockets need.
    let ret = unsafe { libc::splice(from, std::ptr::null_mut(), to, std::ptr::null_mut(), count, 0) };
    noted_number(Errno::check(ret), || format!("splice({from}, {to}, {count})"))
}

/// recv(2)
pub fn recv(fd: Fd, len: usize, flags: c_int) -> Outcome<Vec<u8>> {
    let mut buf = vec![0; len];
    // SAFETY: pointer and length are those of `buf`.
    let ret = unsafe { libc::recv(fd, buf.as_mut_ptr().cast(), len, flags) };
    noted_bytes(filled(Errno::check(ret), buf), || format!("recv({fd}, {len}, {})", message_flags(flags)))
}

/// recv(2) into a buffer that the caller looks at. With `MSG_TRUNC` the kernel counts bytes that it does
/// not store.
pub fn recv_into(fd: Fd, buf: &mut [u8], flags: c_int) -> Outcome<usize> {
    // SAFETY: pointer and length are those of `buf`.
    let ret = unsafe { libc::recv(fd, buf.as_mut_ptr().cast(), buf.len(), flags) };
    noted_number(Errno::check(ret), || format!("recv({fd}, {}, {})", buf.len(), message_flags(flags)))
}

/// recv(2) into a bad pointer.
pub fn recv_into_nowhere(fd: Fd, len: usize, flags: c_int) -> Outcome<usize> {
    // SAFETY: as in `send_from_nowhere`.
    let ret = unsafe { libc::recv(fd, std::ptr::without_provenance_mut(NOWHERE), len, flags) };
    noted_number(Errno::check(ret), || format!("recv({fd}, nowhere, {len}, {})", message_flags(flags)))
}

/// read(2)
pub fn read(fd: Fd, len: usize) -> Outcome<Vec<u8>> {
    let mut buf = vec![0; len];
    // SAFETY: pointer and length are those of `buf`.
    let ret = unsafe { libc::read(fd, buf.as_mut_ptr().cast(), len) };
    noted_bytes(filled(Errno::check(ret), buf), || format!("read({fd}, {len})"))
}

/// read(2) into a bad pointer.
pub fn read_into_nowhere(fd: Fd, len: usize) -> Outcome<usize> {
    // SAFETY: as in `send_from_nowhere`.
    let ret = unsafe { libc::read(fd, std::ptr::without_provenance_mut(NOWHERE), len) };
    noted_number(Errno::check(ret), || format!("read({fd}, nowhere, {len})"))
}

/// `__read_chk`, which read(2) becomes in a program built with `_FORTIFY_SOURCE`.
pub fn read_chk(fd: Fd, len: usize) -> Outcome<Vec<u8>> {
    let mut buf = vec![0; len];
    // SAFETY: pointer and both lengths are those of `buf`.
    let ret = unsafe { __read_chk(fd, buf.as_mut_ptr().cast(), len, len) };
    noted_bytes(filled(Errno::check(ret), buf), || format!("__read_chk({fd}, {len})"))
}

/// `__recv_chk`, the fortified recv(2).
pub fn recv_chk(fd: Fd, len: usize, flags: c_int) -> Outcome<Vec<u8>> {
    let mut buf = vec![0; len];
    // SAFETY: pointer and both lengths are those of `buf`.
    let ret = unsafe { __recv_chk(fd, buf.as_mut_ptr().cast(), len, len, flags) };
    noted_bytes(filled(Errno::check(ret), buf), || {
        format!("__recv_chk({fd}, {len}, {})", message_flags(flags))
    })
}

/// recvfrom(2). Also notes the length of the sender's address, which TCP does not fill in.
pub fn recvfrom(fd: Fd, len: usize, flags: c_int) -> Outcome<Vec<u8>> {
    receive_with_address("recvfrom", fd, len, flags, |buf, address, address_len| {
        // SAFETY: pointers and lengths are those of the caller's two buffers.
        unsafe {
            libc::recvfrom(fd, buf.as_mut_ptr().cast(), len, flags, address.as_mut_ptr().cast(), address_len)
        }
    })
}

/// `__recvfrom_chk`, the fortified recvfrom(2).
pub fn recvfrom_chk(fd: Fd, len: usize, flags: c_int) -> Outcome<Vec<u8>> {
    receive_with_address("__recvfrom_chk", fd, len, flags, |buf, address, address_len| {
        let address = address.as_mut_ptr().cast();
        // SAFETY: pointers and lengths are those of the caller's two buffers.
        unsafe { __recvfrom_chk(fd, buf.as_mut_ptr().cast(), len, len, flags, address, address_len) }
    })
}

fn receive_with_address(
    name: &str,
    fd: Fd,
    len: usize,
    flags: c_int,
    call: impl FnOnce(&mut [u8], &mut [u64; ADDRESS_ROOM / 8], &mut libc::socklen_t) -> isize,
) -> Outcome<Vec<u8>> {
    let mut buf = vec![0; len];
    let mut address = [0u64; ADDRESS_ROOM / 8];
    let mut address_len = ADDRESS_ROOM as libc::socklen_t;
    let ret = call(&mut buf, &mut address, &mut address_len);
    noted(
        filled(Errno::check(ret), buf),
        || format!("{name}({fd}, {len}, {})", message_flags(flags)),
        |data| format!("{} {} address length {address_len}", data.len(), Bytes(data)),
    )
}

/// readv(2) into buffers of the given lengths. The bytes of all of them.
pub fn readv(fd: Fd, lens: &[usize]) -> Outcome<Vec<u8>> {
    let mut pieces: Vec<Vec<u8>> = lens.iter().map(|&len| vec![0; len]).collect();
    let vector = vector_of_mut(&mut pieces);
    // SAFETY: each entry describes one of `pieces`.
    let ret = unsafe { libc::readv(fd, vector.as_ptr(), vector.len() as c_int) };
    noted_bytes(filled(Errno::check(ret), pieces.concat()), || format!("readv({fd}, {})", lengths(lens)))
}

/// What recvmsg(2) gave.
#[derive(Clone, Debug)]
pub struct Received {
    /// The bytes of all buffers.
    pub data: Vec<u8>,
    /// File descriptors that came along.
    pub fds: Vec<Fd>,
}

/// recvmsg(2) into buffers of the given lengths, with room for `fds` file descriptors.
pub fn recvmsg(fd: Fd, lens: &[usize], fds: usize, flags: c_int) -> Outcome<Received> {
    let mut pieces: Vec<Vec<u8>> = lens.iter().map(|&len| vec![0; len]).collect();
    let mut vector = vector_of_mut(&mut pieces);
    let mut address = [0u64; ADDRESS_ROOM / 8];
    let mut control = vec![0u64; if fds == 0 { 0 } else { 2 + fds.div_ceil(2) }];
    let mut message = message_of(&mut vector);
    message.msg_name = address.as_mut_ptr().cast();
    message.msg_namelen = ADDRESS_ROOM as libc::socklen_t;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&*control);
    // SAFETY: the message describes buffers that outlive the call.
    let ret = unsafe { libc::recvmsg(fd, &raw mut message, flags) };
    let received = Errno::check(ret).map(|len| Received {
        data: { filled(Ok(len), pieces.concat()).unwrap_or_default() },
        fds: received_fds(&control[..message.msg_controllen / 8]),
    });
    noted(
        received,
        || format!("recvmsg({fd}, {}, {})", lengths(lens), message_flags(flags)),
        |received| {
            format!(
                "{} {} flags {} address length {} control length {}",
                received.data.len(),
                Bytes(&received.data),
                message_flags(message.msg_flags),
                message.msg_namelen,
                message.msg_controllen
            )
        },
    )
}

/// recvmsg(2) of at most `len` bytes, with `room` bytes for control data. How many came, and the integer that came along.
pub fn recvmsg_control(fd: Fd, len: usize, room: usize, flags: c_int) -> Outcome<(usize, Option<c_int>)> {
    let mut pieces = [vec![0; len]];
    let mut vector = vector_of_mut(&mut pieces);
    let mut control = [u8::MAX; 64];
    let mut message = message_of(&mut vector);
    if room > 0 {
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = control[..room].len();
    }
    // SAFETY: the message describes buffers that outlive the call.
    let ret = unsafe { libc::recvmsg(fd, &raw mut message, flags) };
    let value =
        (message.msg_controllen >= 20).then(|| c_int::from_ne_bytes([16, 17, 18, 19].map(|at| control[at])));
    noted(
        Errno::check(ret).map(|count| (count, value)),
        || format!("recvmsg({fd}, {len}, room {room}, {})", message_flags(flags)),
        |(count, _)| {
            let flags = message_flags(message.msg_flags);
            format!("{count} flags {flags} control length {} {:?}", message.msg_controllen, &control[..room])
        },
    )
}

/// What the error queue says of sends with `MSG_ZEROCOPY` (Documentation/networking/msg_zerocopy.rst).
#[derive(Clone, Debug)]
pub struct SentWithoutCopy {
    /// Which sends are done, the first being 0.
    pub numbers: std::ops::RangeInclusive<u32>,
    /// Whether the kernel had to copy after all.
    pub was_copied: bool,
}

/// `SO_EE_CODE_ZEROCOPY_COPIED` of linux/errqueue.h.
const COPIED: u8 = 1;

/// recvmsg(2) with `MSG_ERRQUEUE`.
pub fn sent_without_copy(fd: Fd) -> Outcome<SentWithoutCopy> {
    let mut control = [0u64; 16];
    let mut message = message_of(&mut []);
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: the message describes a buffer that outlives the call.
    let ret = unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_ERRQUEUE) };
    // struct sock_extended_err lies behind the header of the first control message.
    let error = control[2..].as_ptr().cast::<libc::sock_extended_err>();
    // SAFETY: plain integers, inside the buffer.
    let error = unsafe { error.read() };
    let done = Errno::check(ret).map(|_| SentWithoutCopy {
        numbers: error.ee_info..=error.ee_data,
        was_copied: error.ee_code & COPIED != 0,
    });
    noted(
        done,
        || format!("recvmsg({fd}, MSG_ERRQUEUE)"),
        |done| format!("{done:?} errno {} origin {}", error.ee_errno, error.ee_origin),
    )
}

/// recvmmsg(2) with one buffer of each of the given lengths. The messages that came.
pub fn recvmmsg(fd: Fd, lens: &[usize], flags: c_int) -> Outcome<Vec<Vec<u8>>> {
    let mut pieces: Vec<Vec<u8>> = lens.iter().map(|&len| vec![0; len]).collect();
    let mut vectors: Vec<_> =
        pieces.iter_mut().map(|piece| vector_of_mut(std::slice::from_mut(piece))).collect();
    let mut headers: Vec<_> =
        vectors.iter_mut().map(|vector| libc::mmsghdr { msg_hdr: message_of(vector), msg_len: 0 }).collect();
    // SAFETY: each header describes one of `pieces`, which outlive the call.
    let ret = unsafe {
        libc::recvmmsg(fd, headers.as_mut_ptr(), headers.len() as c_uint, flags, std::ptr::null_mut())
    };
    let received = Errno::check(ret as isize).map(|count| {
        let lens = headers[..count].iter().map(|header| header.msg_len as usize);
        pieces.iter().zip(lens).map(|(piece, len)| piece[..len].to_vec()).collect::<Vec<_>>()
    });
    noted(
        received,
        || format!("recvmmsg({fd}, {}, {})", lengths(lens), message_flags(flags)),
        |messages| {
            format!("{:?}", messages.iter().map(|message| Bytes(message).to_string()).collect::<Vec<_>>())
        },
    )
}

/// Sends `data` with `passed` attached (`SCM_RIGHTS`).
pub fn send_fd(fd: Fd, data: &[u8], passed: Fd) -> Outcome<usize> {
    let mut vector = vector_of(&[data]);
    // A control message of one descriptor: length, level and type, then the descriptor, padded to 8 bytes.
    let length = size_of::<libc::cmsghdr>() + size_of::<Fd>();
    let mut control = [
        length as u64,
        u64::from(libc::SOL_SOCKET as u32) | u64::from(libc::SCM_RIGHTS as u32) << 32,
        u64::from(passed as u32),
    ];
    let mut message = message_of(&mut vector);
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: the message describes buffers that outlive the call.
    let ret = unsafe { libc::sendmsg(fd, &raw const message, 0) };
    noted_number(Errno::check(ret), || format!("sendmsg({fd}, {}, SCM_RIGHTS {passed})", Bytes(data)))
}

fn received_fds(control: &[u64]) -> Vec<Fd> {
    let [length, kind, fds @ ..] = control else { return Vec::new() };
    if *kind >> 32 != u64::from(libc::SCM_RIGHTS as u32) {
        return Vec::new();
    }
    let count = (*length as usize - size_of::<libc::cmsghdr>()) / size_of::<Fd>();
    fds.iter().flat_map(|pair| [*pair as u32 as Fd, (*pair >> 32) as Fd]).take(count).collect()
}

pub(super) fn vector_of(pieces: &[&[u8]]) -> Vec<libc::iovec> {
    pieces
        .iter()
        .map(|piece| libc::iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: piece.len() })
        .collect()
}

pub(super) fn vector_of_mut(pieces: &mut [Vec<u8>]) -> Vec<libc::iovec> {
    pieces
        .iter_mut()
        .map(|piece| libc::iovec { iov_base: piece.as_mut_ptr().cast(), iov_len: piece.len() })
        .collect()
}

pub(super) fn message_of(vector: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: all-zero is a valid value of this plain C struct: no address, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vector.as_mut_ptr();
    message.msg_iovlen = vector.len();
    message
}

pub(super) fn show_pieces(pieces: &[&[u8]]) -> String {
    if pieces.len() > 8 {
        return format!("{} pieces {}", pieces.len(), Bytes(&pieces.concat()));
    }
    let shown: Vec<_> = pieces.iter().map(|piece| Bytes(piece).to_string()).collect();
    format!("[{}]", shown.join(", "))
}

/// recv(2) by a system call that no hook sees.
pub fn unseen_recv(fd: Fd, len: usize) -> Outcome<Vec<u8>> {
    // SAFETY: the caller's descriptor, which is open.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut data = Vec::with_capacity(len);
    rustix::net::recv(fd, rustix::buffer::spare_capacity(&mut data), RecvFlags::empty())?;
    Ok(data)
}

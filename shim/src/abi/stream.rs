//! read, recv, write, send, their vectored and checked forms, sendfile and splice.

use libc::{c_int, c_uint, c_void, iovec, off_t, off64_t, size_t, sockaddr, socklen_t, ssize_t};
use rustix::io::Errno;
use syscalls::Sysno;
use thallus_transport::buffers::{MOST_BYTES, TOO_LONG, may_be_of_program};
use thallus_transport::unix;

use super::{cancellable, guard};
use crate::ops::stream::{self, list, one};
use crate::{errno, real, table};

/// Receives into `list`; what is no connection of ours is `kernel`'s alone.
///
/// # Safety
/// The list's buffers are the program's.
unsafe fn receive(fd: c_int, list: &[iovec], flags: c_int, kernel: impl FnOnce() -> ssize_t) -> ssize_t {
    if !stream::may_be_connection(fd) {
        return kernel();
    }
    // SAFETY: the caller's promise.
    unsafe { receive_ours(fd, list, flags, kernel) }
}

/// As [`receive`], of what is a connection of ours.
///
/// # Safety
/// The list's buffers are the program's.
unsafe fn receive_ours(fd: c_int, list: &[iovec], flags: c_int, kernel: impl FnOnce() -> ssize_t) -> ssize_t {
    if let Some(connection) = table::released(fd) {
        let result = kernel();
        connection.received(result, flags);
        return result;
    }
    // SAFETY: the caller's promise.
    cancellable(|| unsafe { stream::receive(fd, list, flags, kernel) })
}

/// Sends `list`; what is no connection of ours is `kernel`'s alone.
///
/// # Safety
/// The list's buffers are the program's.
unsafe fn transmit(fd: c_int, list: &[iovec], flags: c_int, kernel: impl FnOnce() -> ssize_t) -> ssize_t {
    if !stream::may_be_connection(fd) {
        return kernel();
    }
    // SAFETY: the caller's promise.
    unsafe { transmit_ours(fd, list, flags, kernel) }
}

/// As [`transmit`], of what is a connection of ours.
///
/// # Safety
/// The list's buffers are the program's.
unsafe fn transmit_ours(
    fd: c_int,
    list: &[iovec],
    flags: c_int,
    kernel: impl FnOnce() -> ssize_t,
) -> ssize_t {
    if let Some(connection) = table::released(fd) {
        let result = kernel();
        connection.sent(result);
        return result;
    }
    // SAFETY: the caller's promise.
    cancellable(|| unsafe { stream::transmit(fd, list, flags, kernel) })
}

/// Makes a call on `fd` by `body`, which may leave it to others.
#[inline]
fn briefly(fd: c_int, body: impl FnOnce() -> Option<isize>) -> Option<isize> {
    /// No call returns so many.
    const LEFT: isize = isize::MIN;
    if !table::may_be_upgraded(fd) {
        return None;
    }
    let result = cancellable(|| body().unwrap_or(LEFT));
    (result != LEFT).then_some(result)
}

/// read(2).
///
/// # Safety
/// As for read(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, count: size_t) -> ssize_t {
    // SAFETY: the program's own buffer.
    unsafe {
        // Of nothing: unlike recv(2) it looks at nothing (`sock_read_iter` of net/socket.c).
        if count == 0 || !stream::may_be_connection(fd) {
            return real::read(fd, buffer, count);
        }
        read_ours(fd, buffer, count)
    }
}

/// As the three like it, out of line: what is not ours needs no frame, and is only passed on.
#[inline(never)]
unsafe fn read_ours(fd: c_int, buffer: *mut c_void, count: size_t) -> ssize_t {
    // SAFETY: the program's own buffer.
    unsafe {
        briefly(fd, || stream::receive_briefly(fd, buffer.cast(), count, 0)).unwrap_or_else(|| {
            if count >= TOO_LONG {
                // Unlike recv(2) it looks at all of the buffer (`vfs_read` of fs/read_write.c).
                return errno::count(Err(Errno::FAULT));
            }
            receive_ours(fd, &one(buffer.cast(), count), 0, || real::read(fd, buffer, count))
        })
    }
}

/// `read` as fortified programs call it (glibc, `_FORTIFY_SOURCE`).
///
/// # Safety
/// As for read(2); `room` is the buffer's size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __read_chk(fd: c_int, buffer: *mut c_void, count: size_t, room: size_t) -> ssize_t {
    check(count, room);
    // SAFETY: the program's own arguments.
    unsafe { read(fd, buffer, count) }
}

/// recv(2).
///
/// # Safety
/// As for recv(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recv(fd: c_int, buffer: *mut c_void, count: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program's own buffer.
    unsafe {
        if !stream::may_be_connection(fd) {
            return real::recv(fd, buffer, count, flags);
        }
        recv_ours(fd, buffer, count, flags)
    }
}

#[inline(never)]
unsafe fn recv_ours(fd: c_int, buffer: *mut c_void, count: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program's own buffer.
    unsafe {
        briefly(fd, || stream::receive_briefly(fd, buffer.cast(), count, flags)).unwrap_or_else(|| {
            let list = one(buffer.cast(), count.min(MOST_BYTES));
            receive_ours(fd, &list, flags, || real::recv(fd, buffer, count, flags))
        })
    }
}

/// `recv` as fortified programs call it.
///
/// # Safety
/// As for recv(2); `room` is the buffer's size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __recv_chk(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    room: size_t,
    flags: c_int,
) -> ssize_t {
    check(count, room);
    // SAFETY: the program's own arguments.
    unsafe { recv(fd, buffer, count, flags) }
}

/// recvfrom(2).
///
/// # Safety
/// As for recvfrom(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvfrom(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    flags: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
) -> ssize_t {
    let mut ours = true;
    // SAFETY: the program's own buffer.
    let result = unsafe {
        receive(fd, &one(buffer.cast(), count.min(MOST_BYTES)), flags, || {
            ours = false;
            real::recvfrom(fd, buffer, count, flags, address, length)
        })
    };
    if ours && result >= 0 && !address.is_null() {
        // Looked at when the bytes have been taken (`move_addr_to_user` of net/socket.c).
        if !may_be_of_program(length.addr(), size_of::<socklen_t>()) {
            return errno::count(Err(Errno::FAULT));
        }
        // SAFETY: the program's own.
        let room = unsafe { length.read() };
        if is_negative(room) {
            return errno::count(Err(Errno::INVAL));
        }
        // SAFETY: the program's own.
        unsafe { length.write(put_name(fd, address, room, result, count)) };
    }
    result
}

/// Whether the kernel, to which it is an int, refuses this length.
pub(super) fn is_negative(length: socklen_t) -> bool {
    length.cast_signed() < 0
}

/// Says who has sent what was received just now, `received` of so many bytes `asked` for. TCP names no source (tcp_recvmsg leaves the
/// name alone, and its length becomes 0), but `AF_UNIX` does, also of bytes that it only looked at (`unix_copy_addr` of
/// net/unix/af_unix.c).
///
/// # Safety
/// `name` is writable for `room` bytes.
pub(super) unsafe fn put_name(
    fd: c_int,
    name: *mut sockaddr,
    room: socklen_t,
    received: ssize_t,
    asked: usize,
) -> socklen_t {
    if !table::is_unix(fd) || received == 0 && (asked > 0 || !stream::has_unread(fd)) {
        return 0;
    }
    // SAFETY: the program's descriptor, on which it makes a call.
    let socket = unsafe { rustix::fd::BorrowedFd::borrow_raw(fd) };
    let Ok((peer, length)) = errno::keep(|| unix::address(Sysno::getpeername, socket)) else { return 0 };
    if length <= size_of::<libc::sa_family_t>() {
        return 0;
    }
    let count = length.min(room as usize);
    // SAFETY: the caller's promise; the name is no shorter.
    unsafe { std::ptr::copy_nonoverlapping((&raw const peer).cast::<u8>(), name.cast(), count) };
    length as socklen_t
}

/// `recvfrom` as fortified programs call it.
///
/// # Safety
/// As for recvfrom(2); `room` is the buffer's size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    room: size_t,
    flags: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
) -> ssize_t {
    check(count, room);
    // SAFETY: the program's own arguments.
    unsafe { recvfrom(fd, buffer, count, flags, address, length) }
}

/// readv(2).
///
/// # Safety
/// As for readv(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readv(fd: c_int, buffers: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the program's own list.
    unsafe {
        match list(buffers, count) {
            Some(entries) if entries.iter().any(|entry| entry.iov_len > 0) => {
                receive(fd, entries, 0, || real::readv(fd, buffers, count))
            }
            // The kernel refuses a bad list, and looks at nothing for an empty one.
            _ => real::readv(fd, buffers, count),
        }
    }
}

/// write(2).
///
/// # Safety
/// As for write(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, buffer: *const c_void, count: size_t) -> ssize_t {
    // SAFETY: the program's own buffer.
    unsafe {
        if !stream::may_be_connection(fd) {
            return real::write(fd, buffer, count);
        }
        write_ours(fd, buffer, count)
    }
}

#[inline(never)]
unsafe fn write_ours(fd: c_int, buffer: *const c_void, count: size_t) -> ssize_t {
    // SAFETY: the program's own buffer.
    unsafe {
        briefly(fd, || stream::transmit_briefly(fd, buffer.cast(), count, 0)).unwrap_or_else(|| {
            if count >= TOO_LONG {
                // As for `read`.
                return errno::count(Err(Errno::FAULT));
            }
            transmit_ours(fd, &one(buffer.cast(), count), 0, || real::write(fd, buffer, count))
        })
    }
}

/// writev(2).
///
/// # Safety
/// As for writev(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, buffers: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the program's own list.
    unsafe {
        // The kernel refuses a bad list.
        let Some(entries) = list(buffers, count) else { return real::writev(fd, buffers, count) };
        if entries.iter().all(|entry| entry.iov_len == 0) {
            // Unlike send(2) of no bytes it reaches no socket.
            return real::writev(fd, buffers, count);
        }
        transmit(fd, entries, 0, || real::writev(fd, buffers, count))
    }
}

/// send(2).
///
/// # Safety
/// As for send(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(fd: c_int, buffer: *const c_void, count: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program's own buffer.
    unsafe {
        if !stream::may_be_connection(fd) {
            return real::send(fd, buffer, count, flags);
        }
        send_ours(fd, buffer, count, flags)
    }
}

#[inline(never)]
unsafe fn send_ours(fd: c_int, buffer: *const c_void, count: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program's own buffer.
    unsafe {
        briefly(fd, || stream::transmit_briefly(fd, buffer.cast(), count, flags)).unwrap_or_else(|| {
            let list = one(buffer.cast(), count.min(MOST_BYTES));
            transmit_ours(fd, &list, flags, || real::send(fd, buffer, count, flags))
        })
    }
}

/// Room for any address of a socket.
pub(super) const LONGEST_NAME: usize = size_of::<libc::sockaddr_storage>();

/// Whether the kernel refuses what is to be an address of `length` bytes, before it looks at the socket (`move_addr_to_kernel` of
/// net/socket.c).
pub(super) fn is_bad_name(name: *const c_void, length: socklen_t) -> bool {
    length as usize > LONGEST_NAME || length > 0 && !may_be_of_program(name.addr(), length as usize)
}

/// sendto(2). On a connected TCP socket the address is ignored, as the kernel does; on `AF_UNIX` it is an error.
///
/// # Safety
/// As for sendto(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendto(
    fd: c_int,
    buffer: *const c_void,
    count: size_t,
    flags: c_int,
    address: *const sockaddr,
    length: socklen_t,
) -> ssize_t {
    let is_refused = |fd| is_bad_name(address.cast(), length) || table::is_unix(fd);
    if !address.is_null() && length > 0 && stream::may_be_connection(fd) && is_refused(fd) {
        // The kernel refuses it before it looks at anything else.
        // SAFETY: the program's own arguments.
        return unsafe { real::sendto(fd, buffer, count, flags, address, length) };
    }
    // SAFETY: the program's own buffer.
    unsafe {
        transmit(fd, &one(buffer.cast(), count.min(MOST_BYTES)), flags, || {
            real::sendto(fd, buffer, count, flags, address, length)
        })
    }
}

/// The flags of preadv2(2) that mean something for a socket, or nothing.
const KNOWN: c_int = libc::RWF_HIPRI
    | libc::RWF_DSYNC
    | libc::RWF_SYNC
    | libc::RWF_NOWAIT
    | libc::RWF_APPEND
    | NOAPPEND
    | NOSIGNAL;

/// `RWF_NOAPPEND` and `RWF_NOSIGNAL` of linux/fs.h, since Linux 6.9 and 6.18.
const NOAPPEND: c_int = 0x20;
const NOSIGNAL: c_int = 0x100;

macro_rules! positioned {
    ($($name:ident, $direction:ident, $offset:ty, $doc:literal;)*) => {$(
        #[doc = $doc]
        ///
        /// # Safety
        /// As for the function of that name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            fd: c_int,
            buffers: *const iovec,
            count: c_int,
            offset: $offset,
            flags: c_int,
        ) -> ssize_t {
            // SAFETY: the program's own list.
            unsafe {
                if offset != -1 {
                    return real::$name(fd, buffers, count, offset, flags);
                }
                let Some(entries) = list(buffers, count) else {
                    return real::$name(fd, buffers, count, offset, flags);
                };
                if entries.iter().all(|entry| entry.iov_len == 0) {
                    // As `readv` and `writev` of no bytes: it looks at nothing, not even at the flags.
                    return real::$name(fd, buffers, count, offset, flags);
                }
                if flags & !KNOWN != 0 && table::is_connection(fd) {
                    return errno::count(Err(Errno::OPNOTSUPP));
                }
                let wait = if flags & libc::RWF_NOWAIT == 0 { 0 } else { libc::MSG_DONTWAIT };
                let quiet = if flags & NOSIGNAL == 0 { 0 } else { libc::MSG_NOSIGNAL };
                $direction(fd, entries, wait | quiet, || real::$name(fd, buffers, count, offset, flags))
            }
        }
    )*};
}

positioned! {
    preadv2, receive, off_t, "preadv2(2); at offset −1 it reads a socket.";
    preadv64v2, receive, off64_t, "preadv2(2) with 64-bit offsets.";
    pwritev2, transmit, off_t, "pwritev2(2); at offset −1 it writes a socket.";
    pwritev64v2, transmit, off64_t, "pwritev2(2) with 64-bit offsets.";
}

macro_rules! sendfiles {
    ($($name:ident, $offset:ty;)*) => {$(
        /// sendfile(2).
        ///
        /// # Safety
        /// As for sendfile(2).
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(out: c_int, input: c_int, offset: *mut $offset, count: size_t) -> ssize_t {
            // SAFETY: the program's own arguments.
            guard(|| unsafe {
                stream::send_file(out, input, offset, count, || real::$name(out, input, offset, count))
            })
        }
    )*};
}

sendfiles! {
    sendfile, off_t;
    sendfile64, off64_t;
}

/// splice(2): a connection that is spliced stays on TCP.
///
/// # Safety
/// As for splice(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn splice(
    input: c_int,
    offset_in: *mut off64_t,
    out: c_int,
    offset_out: *mut off64_t,
    count: size_t,
    flags: c_uint,
) -> ssize_t {
    let mut served = true;
    let said = guard(|| {
        let said = stream::settle_for_moving(input, out, count);
        served = said.is_none();
        said.map_or(0, errno::count)
    });
    if !served || said != 0 {
        return said;
    }
    // SAFETY: the program's own arguments.
    let result = unsafe { real::splice(input, offset_in, out, offset_out, count, flags) };
    if result < 0 {
        stream::kernel_said([input, out]);
    }
    result
}

/// What glibc does when a fortified call would overflow its buffer.
fn check(count: size_t, room: size_t) {
    if count > room {
        std::process::abort();
    }
}

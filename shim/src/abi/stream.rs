//! read, recv, write, send, their vectored, message and checked forms, sendfile and splice.

use std::time::{Duration, Instant};

use libc::{
    c_int, c_uint, c_void, cmsghdr, iovec, mmsghdr, msghdr, off_t, off64_t, size_t, sockaddr, socklen_t,
    ssize_t, timespec,
};
use rustix::io::Errno;
use syscalls::Sysno;
use thallus_transport::buffers::{ControlData, MOST_BYTES, TOO_LONG, may_be_of_program};
use thallus_transport::reason::Reason;
use thallus_transport::unix;

use super::{cancellable, guard};
use crate::ops::descriptor;
use crate::ops::stream::{self, COMPATIBLE, list, message_list, one};
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
fn is_negative(length: socklen_t) -> bool {
    length.cast_signed() < 0
}

/// Says who has sent what was received just now, `received` of so many bytes `asked` for. TCP names no source (tcp_recvmsg leaves the
/// name alone, and its length becomes 0), but `AF_UNIX` does, also of bytes that it only looked at (`unix_copy_addr` of
/// net/unix/af_unix.c).
///
/// # Safety
/// `name` is writable for `room` bytes.
unsafe fn put_name(
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

/// recvmsg(2).
///
/// # Safety
/// As for recvmsg(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    if message.is_null() || !stream::may_be_connection(fd) {
        // SAFETY: the program's own message, or the kernel refuses it.
        return unsafe { real::recvmsg(fd, message, flags) };
    }
    // SAFETY: the program's own message.
    unsafe {
        if let Some(connection) = table::released(fd) {
            let result = real::recvmsg(fd, message, flags);
            connection.received(result, flags);
            return result;
        }
        cancellable(|| receive_message(fd, message, flags))
    }
}

/// recvmsg(2) of a connection of ours.
///
/// # Safety
/// `message` is the program's own.
unsafe fn receive_message(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    let mut ours = true;
    // SAFETY: the program's own message.
    let (buffer, room) = unsafe { ((*message).msg_control, (*message).msg_controllen) };
    let room = if buffer.is_null() { 0 } else { room };
    let mut control = ControlData { buffer, room, length: 0, flags: 0 };
    let asked;
    // SAFETY: the program's own message.
    let result = unsafe {
        let is_refused = flags & COMPATIBLE != 0 || has_bad_name(&*message, false);
        let Some(entries) = message_list(message).filter(|_| !is_refused) else {
            return real::recvmsg(fd, message, flags);
        };
        asked = stream::length(entries);
        stream::receive_with(fd, entries, flags, Some(&mut control), || {
            ours = false;
            real::recvmsg(fd, message, flags)
        })
    };
    if result < 0 {
        return result;
    }
    // SAFETY: the program's own message.
    let message = unsafe { &mut *message };
    if !ours {
        if message.msg_controllen > 0 || message.msg_flags & libc::MSG_CTRUNC != 0 {
            stream::control_came(fd);
        }
        return result;
    }
    if !message.msg_name.is_null() {
        // SAFETY: the program's own name.
        message.msg_namelen =
            unsafe { put_name(fd, message.msg_name.cast(), message.msg_namelen, result, asked) };
    } else {
        message.msg_namelen = 0;
    }
    message.msg_flags = flags & libc::MSG_CMSG_CLOEXEC | control.flags;
    match descriptor::inq(fd) {
        // SAFETY: the program's own control buffer.
        Some(inq) => unsafe { put_control(message, libc::IPPROTO_TCP, libc::TCP_CM_INQ, inq) },
        None => message.msg_controllen = control.length,
    }
    result
}

/// Makes `value` the only control message of `message`, cut short if the buffer is too small (`put_cmsg` of net/core/scm.c).
///
/// # Safety
/// The message's control buffer is writable as far as its length says.
unsafe fn put_control(message: &mut msghdr, level: c_int, kind: c_int, value: c_int) {
    let buffer = message.msg_control.cast::<u8>();
    let room = if buffer.is_null() { 0 } else { message.msg_controllen };
    // SAFETY: these two only calculate.
    let (length, space) = unsafe { (libc::CMSG_LEN(SIZE), libc::CMSG_SPACE(SIZE)) };
    let fits = room.min(length as usize);
    if fits < length as usize {
        message.msg_flags |= libc::MSG_CTRUNC;
    }
    message.msg_controllen = 0;
    if fits < size_of::<cmsghdr>() {
        return;
    }
    message.msg_controllen = room.min(space as usize);
    let header = cmsghdr { cmsg_len: fits, cmsg_level: level, cmsg_type: kind };
    // SAFETY: there is room for a header and so many bytes behind it.
    unsafe {
        buffer.cast::<cmsghdr>().write_unaligned(header);
        let data = buffer.add(size_of::<cmsghdr>());
        data.copy_from_nonoverlapping((&raw const value).cast(), fits - size_of::<cmsghdr>());
    }
}

/// Bytes of the one kind of value that is told beside a message.
const SIZE: c_uint = size_of::<c_int>() as c_uint;

/// recvmmsg(2).
///
/// # Safety
/// As for recvmmsg(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    if !stream::may_be_connection(fd) {
        // SAFETY: the program's own arguments.
        return unsafe { real::recvmmsg(fd, messages, count, flags, timeout) };
    }
    cancellable(|| {
        // SAFETY: null or the program's own.
        let timeout = unsafe { timeout.as_mut() };
        if timeout.as_ref().is_some_and(|left| left.tv_sec < 0 || !(0..SECOND).contains(&left.tv_nsec)) {
            return errno::int(Err(Errno::INVAL));
        }
        // The kernel looks for it first (`do_recvmmsg` of net/socket.c).
        if flags & libc::MSG_ERRQUEUE == 0
            && let Some(errno) = descriptor::take_error(fd)
        {
            return errno::int(Err(errno));
        }
        let start = Instant::now();
        let limit = timeout.as_ref().map(|left| Duration::new(left.tv_sec as u64, left.tv_nsec as u32));
        let done = for_each_message(messages, count, |message, done| {
            // Looked at only between messages, as recvmmsg(2) says under BUGS.
            if done > 0 && limit.is_some_and(|limit| start.elapsed() >= limit) {
                return None;
            }
            let later = if done > 0 && flags & libc::MSG_WAITFORONE != 0 { libc::MSG_DONTWAIT } else { 0 };
            // SAFETY: one of the program's messages.
            Some(unsafe { receive_message(fd, message, (flags & !libc::MSG_WAITFORONE) | later) })
        });
        if let (Some(left), Some(limit)) = (timeout, limit) {
            let rest = limit.saturating_sub(start.elapsed());
            *left = timespec { tv_sec: rest.as_secs() as i64, tv_nsec: rest.subsec_nanos().into() };
        }
        done
    })
}

/// sendmmsg(2).
///
/// # Safety
/// As for sendmmsg(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    if !stream::may_be_connection(fd) {
        // SAFETY: the program's own messages.
        let passes =
            |index| unsafe { stream::settle_passed_fds((&raw const (*messages.add(index)).msg_hdr).cast()) };
        let all = || messages.is_null() || (0..count.min(MOST_MESSAGES) as usize).all(passes);
        if guard(|| i32::from(all())) != 1 {
            return errno::int(Err(Errno::OPNOTSUPP));
        }
        // SAFETY: the program's own arguments.
        return unsafe { real::sendmmsg(fd, messages, count, flags) };
    }
    cancellable(|| {
        let mut whole = true;
        for_each_message(messages, count, |message, _| {
            if !whole {
                return None;
            }
            // SAFETY: one of the program's messages.
            let sent = unsafe { send_message(fd, message, flags) };
            // SAFETY: as above.
            let list = unsafe { message_list(message) };
            // Behind one that was not sent whole nothing follows, or there would be a gap (`__sys_sendmmsg` of net/socket.c).
            whole =
                list.is_none_or(|list| usize::try_from(sent).is_ok_and(|sent| sent == stream::length(list)));
            Some(sent)
        })
    })
}

const SECOND: i64 = 1_000_000_000;

/// As many as the kernel does at once (`UIO_MAXIOV`).
const MOST_MESSAGES: c_uint = 1024;

/// Runs `each` on every message, with the number done before, until one fails or it declines; returns how many
/// were done.
fn for_each_message(
    messages: *mut mmsghdr,
    count: c_uint,
    mut each: impl FnMut(*mut msghdr, c_int) -> Option<ssize_t>,
) -> c_int {
    if count > 0 && !may_be_of_program(messages.addr(), size_of::<mmsghdr>()) {
        return errno::int(Err(Errno::FAULT));
    }
    let mut done = 0;
    for index in 0..count.min(MOST_MESSAGES) as usize {
        // SAFETY: index < count, the program's own array.
        let entry = unsafe { messages.add(index) };
        // SAFETY: inside that entry.
        let header = unsafe { &raw mut (*entry).msg_hdr };
        let Some(result) = each(header, done) else { break };
        if result < 0 {
            return if done > 0 { done } else { -1 };
        }
        // SAFETY: inside that entry.
        unsafe { (*entry).msg_len = result as c_uint };
        done += 1;
    }
    done
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
const LONGEST_NAME: usize = size_of::<libc::sockaddr_storage>();

/// Whether the kernel refuses what is to be an address of `length` bytes, before it looks at the socket (`move_addr_to_kernel` of
/// net/socket.c).
fn is_bad_name(name: *const c_void, length: socklen_t) -> bool {
    length as usize > LONGEST_NAME || length > 0 && !may_be_of_program(name.addr(), length as usize)
}

/// The same of that in `message`, a longer one of which is cut (`__copy_msghdr`). One that is only room for an address is not `read`.
fn has_bad_name(message: &msghdr, read: bool) -> bool {
    let (name, length) = (message.msg_name, message.msg_namelen);
    !name.is_null()
        && (is_negative(length) || read && is_bad_name(name, length.min(LONGEST_NAME as socklen_t)))
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

/// sendmsg(2).
///
/// # Safety
/// As for sendmsg(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: null or the program's own message.
    let passes = || guard(|| i32::from(unsafe { stream::settle_passed_fds(message) })) == 1;
    if message.is_null() || !stream::may_be_connection(fd) {
        if !passes() {
            return errno::count(Err(Errno::OPNOTSUPP));
        }
        // SAFETY: the program's own message, or the kernel refuses it.
        return unsafe { real::sendmsg(fd, message, flags) };
    }
    // SAFETY: the program's own message.
    unsafe {
        if let Some(connection) = table::released(fd) {
            if has_control(&*message) && !passes() {
                return errno::count(Err(Errno::OPNOTSUPP));
            }
            let result = real::sendmsg(fd, message, flags);
            connection.sent(result);
            return result;
        }
        cancellable(|| send_message(fd, message, flags))
    }
}

/// Whether something is to go beside the bytes.
fn has_control(message: &msghdr) -> bool {
    !message.msg_control.is_null() && message.msg_controllen > 0
}

/// Whether the kernel refuses what is to go beside the bytes before it looks at it (`____sys_sendmsg` of net/socket.c).
fn has_bad_control(message: &msghdr) -> bool {
    let length = message.msg_controllen;
    length > 0 && (length > c_int::MAX as usize || !may_be_of_program(message.msg_control.addr(), length))
}

/// sendmsg(2) on a connection of ours: TCP carries no descriptors, `AF_UNIX` does.
///
/// # Safety
/// `message` is the program's own.
unsafe fn send_message(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the program's own message.
    unsafe {
        let Some(entries) = message_list(message) else { return real::sendmsg(fd, message, flags) };
        let header = &*message;
        if flags & COMPATIBLE != 0 || has_bad_name(header, true) || has_bad_control(header) {
            return real::sendmsg(fd, message, flags);
        }
        if !header.msg_name.is_null() && header.msg_namelen > 0 && table::is_unix(fd) {
            // As in `sendto`.
            return real::sendmsg(fd, message, flags);
        }
        if has_control(header) && !table::is_unix(fd) {
            if let Err(errno) = stream::check_control(fd, header) {
                return errno::count(Err(errno));
            }
        } else if has_control(header) {
            if !stream::settle_passed_fds(message) {
                return errno::count(Err(Errno::OPNOTSUPP));
            }
            let asked = stream::length(entries);
            return stream::transmit_with_control(fd, asked, flags, || real::sendmsg(fd, message, flags));
        }
        stream::transmit(fd, entries, flags, || real::sendmsg(fd, message, flags))
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
    // What splice says of descriptors that it can't serve; programs then read and write.
    let otherwise = Errno::INVAL;
    let settled = guard(|| {
        let input = stream::settle(input, Reason::UnsupportedCall).then_some(()).ok_or(otherwise);
        let both = input.and_then(|()| stream::settle_for_writing(out, Reason::UnsupportedCall, otherwise));
        errno::count(both.map(|()| 0))
    });
    if settled != 0 {
        return settled;
    }
    // SAFETY: the program's own arguments.
    unsafe { real::splice(input, offset_in, out, offset_out, count, flags) }
}

/// What glibc does when a fortified call would overflow its buffer.
fn check(count: size_t, room: size_t) {
    if count > room {
        std::process::abort();
    }
}

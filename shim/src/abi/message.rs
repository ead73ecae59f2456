//! Messages, and what comes beside them: recvmsg, sendmsg, recvmmsg and sendmmsg.

use std::time::{Duration, Instant};

use libc::{c_int, c_uint, cmsghdr, mmsghdr, msghdr, socklen_t, ssize_t, timespec};
use rustix::io::Errno;
use thallus_transport::buffers::{ControlData, may_be_of_program};

use super::stream::{LONGEST_NAME, is_bad_name, is_negative, put_name};
use super::{cancellable, guard};
use crate::ops::descriptor;
use crate::ops::stream::{self, COMPATIBLE, message_list};
use crate::{errno, real, table};

/// Whether the program can have nothing there.
fn is_nowhere<T>(place: *const T) -> bool {
    !may_be_of_program(place.addr(), size_of::<T>())
}

/// recvmsg(2).
///
/// # Safety
/// As for recvmsg(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    if is_nowhere(message) || !table::is_connection(fd) {
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
    let mut control = ControlData::new(buffer, room);
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

/// sendmsg(2).
///
/// # Safety
/// As for sendmsg(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: null or the program's own message.
    let passes = || guard(|| i32::from(unsafe { stream::settle_passed_fds(message) })) == 1;
    if is_nowhere(message) || !table::is_connection(fd) {
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

/// The same of that in `message`, a longer one of which is cut (`__copy_msghdr`). One that is only room for an address is not `read`.
fn has_bad_name(message: &msghdr, read: bool) -> bool {
    let (name, length) = (message.msg_name, message.msg_namelen);
    !name.is_null()
        && (is_negative(length) || read && is_bad_name(name, length.min(LONGEST_NAME as socklen_t)))
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
    if !table::is_connection(fd) {
        // SAFETY: the program's own arguments.
        return unsafe { real::recvmmsg(fd, messages, count, flags, timeout) };
    }
    if !timeout.is_null() && is_nowhere(timeout) {
        // SAFETY: the kernel refuses it.
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
        if let (Some(left), Some(limit)) = (timeout.filter(|_| done > 0), limit) {
            let rest = limit.saturating_sub(start.elapsed());
            *left = timespec { tv_sec: rest.as_secs() as i64, tv_nsec: rest.subsec_nanos().into() };
        }
        done
    })
}

const SECOND: i64 = 1_000_000_000;

/// sendmmsg(2).
///
/// # Safety
/// As for sendmmsg(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    if !table::is_connection(fd) {
        // SAFETY: the program's own messages.
        let passes =
            |index| unsafe { stream::settle_passed_fds((&raw const (*messages.add(index)).msg_hdr).cast()) };
        let all = || is_nowhere(messages) || (0..count.min(MOST_MESSAGES) as usize).all(passes);
        if guard(|| i32::from(all())) != 1 {
            return errno::int(Err(Errno::OPNOTSUPP));
        }
        // SAFETY: the program's own arguments.
        return unsafe { real::sendmmsg(fd, messages, count, flags) };
    }
    cancellable(|| {
        let mut whole = true;
        for_each_message(messages, count.min(MOST_MESSAGES), |message, _| {
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

/// As many as the kernel sends at once (`UIO_MAXIOV`).
const MOST_MESSAGES: c_uint = 1024;

/// Runs `each` on every message, with the number done before, until one fails or it declines; returns how many
/// were done.
fn for_each_message(
    messages: *mut mmsghdr,
    count: c_uint,
    mut each: impl FnMut(*mut msghdr, c_int) -> Option<ssize_t>,
) -> c_int {
    if count > 0 && is_nowhere(messages) {
        return errno::int(Err(Errno::FAULT));
    }
    let mut done = 0;
    for index in 0..count as usize {
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

//! Descriptors come and go, and change: close, dup, fcntl, ioctl, shutdown, socket options.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use libc::{c_int, c_void, socklen_t};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use thallus_transport::arena::flag;
use thallus_transport::buffers::may_be_of_program;
use thallus_transport::reason::Reason;
use thallus_transport::segment::Segment;
use thallus_transport::settle::SHORT_PATIENCE;
use thallus_transport::{tcp, unix};

use crate::ops::stream::{leave_to_kernel, settle};
use crate::ops::{epoll, process};
use crate::{errno, real, table};

/// Before close(2). False: to the program, a descriptor that it never opened is not open.
pub(crate) fn may_close(fd: i32) -> bool {
    if table::is_internal(fd) && !table::is_borrowed() {
        return false;
    }
    table::remove(fd);
    true
}

/// `close_range(2)`, around this library's own descriptors.
pub(crate) fn close_range(first: u32, last: u32, flags: i32) -> i32 {
    const UNSHARE: i32 = libc::CLOSE_RANGE_UNSHARE.cast_signed();
    const CLOEXEC: i32 = libc::CLOSE_RANGE_CLOEXEC.cast_signed();
    // SAFETY: takes numbers.
    let kernel = || unsafe { real::close_range(first, last, flags) };
    if table::is_borrowed() || first > last || flags & !(UNSHARE | CLOEXEC) != 0 {
        return kernel();
    }
    let close = || if flags & CLOEXEC != 0 { kernel() } else { close_others(first, last, flags) };
    if flags & UNSHARE != 0 { process::part_descriptors(close) } else { close() }
}

/// Closes what is not this library's own.
fn close_others(first: u32, last: u32, flags: i32) -> i32 {
    for fd in table::descriptors().collect::<Vec<_>>() {
        if (first..=last).contains(&fd.cast_unsigned()) {
            table::remove(fd);
        }
    }
    let mut from = first;
    for own in table::internal_fds().into_iter().map(i32::cast_unsigned) {
        if own < from || own > last {
            continue;
        }
        if own > from {
            // SAFETY: takes numbers.
            let result = unsafe { real::close_range(from, own - 1, flags) };
            if result != 0 {
                return result;
            }
        }
        if own == last {
            return 0;
        }
        from = own + 1;
    }
    // SAFETY: takes numbers.
    unsafe { real::close_range(from, last, flags) }
}

/// dup2(2), and dup3(2) with `flags`: `duplicate` is the original call.
pub(crate) fn replace(old: i32, new: i32, flags: i32, duplicate: impl FnOnce() -> i32) -> i32 {
    if old == new || old < 0 || flags & !libc::O_CLOEXEC != 0 || !is_below_limit(new) {
        // Nothing is replaced.
        return duplicate();
    }
    if table::is_borrowed() {
        return duplicated(old, duplicate);
    }
    if table::is_internal(new) && !make_way(new) {
        return errno::int(Err(Errno::MFILE));
    }
    // SAFETY: the program's own number; the call fails if it is not open.
    let borrowed = unsafe { rustix::fd::BorrowedFd::borrow_raw(old) };
    if rustix::io::fcntl_getfd(borrowed).is_err() {
        return duplicate();
    }
    table::remove(new);
    duplicated(old, duplicate)
}

/// Whether a descriptor may have this number.
fn is_below_limit(number: i32) -> bool {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    u64::try_from(number).is_ok_and(|number| limit.is_none_or(|limit| number < limit))
}

/// The program wants the very number that one of our descriptors has: nothing to be done but to say so.
fn make_way(_: i32) -> bool {
    false
}

/// Another name for `old`: `duplicate` is the original call.
pub(crate) fn duplicated(old: i32, duplicate: impl FnOnce() -> i32) -> i32 {
    if table::is_borrowed() {
        // What a child that was vforked gives another name, the program that it is about to become is to use.
        process::hands_on(old);
        return duplicate();
    }
    // Counted before the kernel makes it, so that a close beside us does not end what the new name keeps open.
    let held = table::hold(old);
    let new = duplicate();
    if let Some(held) = held {
        held.settle(new);
        process::copied(new);
    } else if new >= 0 {
        errno::keep(|| table::copied_unconnected(old, new));
    }
    new
}

/// Whether fcntl(2) with `command` and `argument` changes what this library knows.
pub(crate) fn concerns(command: i32, argument: usize) -> bool {
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC | libc::F_SETFL => true,
        libc::F_SETFD => argument as i32 & libc::FD_CLOEXEC == 0,
        _ => false,
    }
}

/// fcntl(2): `call` is the original.
pub(crate) fn fcntl(fd: i32, command: i32, argument: usize, call: impl FnOnce() -> i32) -> i32 {
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => duplicated(fd, call),
        libc::F_SETFL => {
            let flags = argument as i32;
            if flags & libc::O_ASYNC != 0 {
                settle(fd, Reason::UnsupportedCall);
            }
            let result = call();
            if result == 0 {
                note_blocking(fd, flags & libc::O_NONBLOCK != 0);
            }
            result
        }
        libc::F_SETFD => process::bequeathed(fd, call),
        _ => call(),
    }
}

fn note_blocking(fd: i32, nonblocking: bool) {
    if let Some(entered) = table::enter_adult(fd) {
        entered.connection().nonblocking.store(nonblocking, Ordering::Relaxed);
    }
}

/// ioctl(2): `call` is the original.
///
/// # Safety
/// `argument` is what the request takes.
pub(crate) unsafe fn ioctl(fd: i32, request: u64, argument: usize, call: impl FnOnce() -> i32) -> i32 {
    if request == libc::FIOASYNC {
        settle(fd, Reason::UnsupportedCall);
        return call();
    }
    if request == libc::FIONCLEX {
        return process::bequeathed(fd, call);
    }
    let Some(entered) = table::enter_adult(fd) else { return call() };
    let connection = entered.connection();
    let output = std::ptr::with_exposed_provenance_mut::<c_int>(argument);
    match request {
        libc::FIONBIO => {
            let result = call();
            if result == 0 {
                // SAFETY: the kernel has just read an int there.
                connection.nonblocking.store(unsafe { output.read() } != 0, Ordering::Relaxed);
            }
            result
        }
        libc::FIONREAD if connection.is_active() => match connection.unread(fd) {
            Ok(count) => {
                let result = call();
                if result == 0 {
                    // SAFETY: the kernel has just written an int there.
                    unsafe { output.write(i32::try_from(count).unwrap_or(i32::MAX)) };
                }
                result
            }
            Err(errno) => errno::int(Err(errno)),
        },
        tcp::SIOCATMARK if connection.is_active() => match connection.is_at_mark(fd) {
            Ok(at_mark) => {
                let result = call();
                if result == 0 {
                    // SAFETY: the kernel has just written an int there.
                    unsafe { output.write(at_mark.into()) };
                }
                result
            }
            Err(errno) => errno::int(Err(errno)),
        },
        libc::TIOCOUTQ if connection.is_active() => {
            let result = call();
            if result == 0 && connection.block.send_switched.load(Ordering::Relaxed) != 0 {
                // SAFETY: the kernel has just written an int there.
                unsafe { output.write(i32::try_from(connection.unsent()).unwrap_or(i32::MAX)) };
            }
            result
        }
        _ => call(),
    }
}

/// shutdown(2): `call` is the original.
pub(crate) fn shutdown(fd: i32, how: i32, call: impl FnOnce() -> i32) -> i32 {
    let Some(entered) = table::enter(fd) else { return call() };
    let connection = entered.connection();
    // A peer that has been told by an `AF_UNIX` socket that nobody reads there can't ring any more, and writers might need that.
    let mut refuses = how == libc::SHUT_RD && connection.is_unix() && !connection.block.has(flag::SHUT_WR);
    if !matches!(how, libc::SHUT_RD | libc::SHUT_WR | libc::SHUT_RDWR) {
        return call();
    }
    // Once for the call, however it is done.
    let mut is_noted = false;
    let mut note = || {
        if !std::mem::replace(&mut is_noted, true) {
            connection.block.shutdowns.fetch_add(1, Ordering::SeqCst);
        }
    };
    while connection.is_active() {
        let block = connection.block;
        if connection.is_failing() {
            let _ = connection.mend(fd);
        }
        if !connection.segment().is_some_and(Segment::is_ready) {
            // Both sides must agree that nothing will ever leave TCP, or that it may.
            if connection.pin(fd, Reason::ShutdownBeforeUpgrade) {
                break;
            }
            let stays = |segment: &Segment| segment.refuse() || segment.is_down();
            if connection.has_returned() || connection.segment().is_some_and(stays) {
                note();
                // The side buffer may hold bytes, so the hooks stay in between; but nothing leaves TCP any more.
                block.raise(match how {
                    libc::SHUT_RD => flag::SHUT_RD,
                    libc::SHUT_WR => flag::SHUT_WR,
                    _ => flag::SHUT_RD | flag::SHUT_WR,
                });
                return call();
            }
            continue;
        }
        if std::mem::take(&mut refuses) {
            block.raise(flag::SHUT_RD);
            note();
            // Before there is room for what the peer still wants to write.
            connection.shut_receiving(fd);
            errno::keep(|| epoll::stalled(entered.slot));
            if connection.refuse_by_kernel(fd, Instant::now() + SHORT_PATIENCE) {
                continue;
            }
            return 0;
        }
        let is_over = !connection.is_unix() && connection.is_over(fd);
        if is_over {
            connection.keep_reset(fd);
        }
        if how != libc::SHUT_RD {
            match connection.shut_sending(fd, how == libc::SHUT_RDWR) {
                Ok(true) => {}
                // Another thread has just taken the connection back.
                Ok(false) if connection.has_returned() => continue,
                Ok(false) => {}
                Err(errno) => return errno::int(Err(errno)),
            }
        }
        if how == libc::SHUT_RDWR {
            connection.flush_fabric(fd);
        }
        if connection.is_failing() {
            // The peer has asked meanwhile, and looks at its kernel alone for the end.
            let _ = connection.mend(fd);
        }
        if how != libc::SHUT_WR {
            if how == libc::SHUT_RD {
                connection.note_deaf_again();
            }
            block.raise(flag::SHUT_RD);
            connection.go_deaf();
        }
        // Before the kernel wakes who is to be told of it.
        note();
        let result = if how == libc::SHUT_WR {
            errno::keep(|| connection.end_waits_for_room());
            if tcp::peer_has_closed(fd) {
                // Nobody reads bells any more: that wakes who waits for edges in other processes.
                errno::keep(call);
            }
            0
        } else {
            // Wakes this side's sleepers. Without SHUT_WR, bells still pass to the peer.
            match call() {
                // The peer's kernel has reset it, for unread bells.
                -1 if errno::now() == Errno::NOTCONN => 0,
                result => result,
            }
        };
        connection.shut_for_both(fd);
        errno::keep(|| epoll::stalled(entered.slot));
        return if is_over { errno::int(Err(Errno::NOTCONN)) } else { result };
    }
    connection.pin(fd, Reason::ShutdownBeforeUpgrade);
    call()
}

/// setsockopt(2): `call` is the original.
///
/// # Safety
/// `value` is readable for `length` bytes.
pub(crate) unsafe fn set_option(
    fd: i32,
    level: i32,
    name: i32,
    value: *const c_void,
    length: libc::socklen_t,
    call: impl FnOnce() -> i32,
) -> i32 {
    if let Some(view) = tcp_view(fd, level, name) {
        let result = call();
        if result == 0 {
            // SAFETY: the kernel has just read an int there.
            let wanted = unsafe { value.cast::<c_int>().read_unaligned() };
            view.0.store(u32::from(wanted != 0), Ordering::SeqCst);
            view.1.connection().keep_bells_prompt(fd, name);
        }
        return result;
    }
    if (level, name) == (libc::IPPROTO_TCP, libc::TCP_INQ) {
        let result = call();
        if result == 0
            && let Some(entered) = table::enter_adult(fd)
        {
            // SAFETY: the kernel has just read an int there.
            let wanted = unsafe { value.cast::<c_int>().read_unaligned() };
            entered.connection().block.inq.store(u32::from(wanted != 0), Ordering::Relaxed);
        }
        return result;
    }
    if (level, name) == (libc::SOL_SOCKET, libc::SO_LINGER) {
        let result = call();
        if result == 0
            && let Some(entered) = table::enter_adult(fd)
        {
            // SAFETY: the program's call on this descriptor has just succeeded.
            entered.connection().tell_linger(unsafe { rustix::fd::BorrowedFd::borrow_raw(fd) });
        }
        return result;
    }
    const NOT_OF_TCP: [i32; 3] = unix::SENDER_OPTIONS;
    let reason = match (level, name) {
        (libc::SOL_SOCKET, name) if NOT_OF_TCP.contains(&name) => Reason::ControlData,
        (libc::SOL_SOCKET, libc::SO_PEEK_OFF) => Reason::UnsupportedCall,
        (libc::SOL_SOCKET, unix::SO_INQ) if table::is_unix(fd) => Reason::UnsupportedCall,
        (libc::SOL_SOCKET, libc::SO_RCVLOWAT) => Reason::RcvLowat,
        (libc::SOL_SOCKET, name) if tcp::STAMPS.contains(&name) => Reason::UnsupportedCall,
        (libc::IPPROTO_TCP, libc::TCP_ULP | libc::TCP_REPAIR) => Reason::UnsupportedCall,
        _ => return call(),
    };
    // An `AF_UNIX` stream tells no times.
    let tells_nothing = tcp::STAMPS.contains(&name);
    if (level == libc::IPPROTO_TCP || tells_nothing) && table::is_unix(fd) {
        return call();
    }
    let Some(entered) = table::enter(fd) else { return call() };
    if name != libc::TCP_ULP {
        if (length as usize) < size_of::<c_int>() || !may_be_of_program(value.addr(), size_of::<c_int>()) {
            // The kernel refuses it.
            return call();
        }
        // SAFETY: an int is readable there.
        let number = unsafe { value.cast::<c_int>().read_unaligned() };
        let harmless = match (reason, name) {
            (Reason::RcvLowat, _) => number <= 1,
            (_, libc::SO_PEEK_OFF) => number < 0,
            (Reason::ControlData, _) => number == 0 || !entered.connection().is_unix(),
            _ => number == 0,
        };
        if harmless {
            return call();
        }
    }
    if entered.connection().pin(fd, reason) {
        return call();
    }
    if reason == Reason::ControlData && leave_to_kernel(&entered, fd, reason) {
        return call();
    }
    // Too late: the bytes have left TCP. A threshold is a hint; the others are features to do without.
    if reason == Reason::RcvLowat { 0 } else { errno::int(Err(Errno::NOPROTOOPT)) }
}

/// What `TCP_INQ` tells behind a read of `fd`, if that was asked for.
pub(crate) fn inq(fd: i32) -> Option<c_int> {
    let entered = table::enter_adult(fd)?;
    let connection = entered.connection();
    let is_wanted = connection.block.inq.load(Ordering::Relaxed) != 0;
    is_wanted.then(|| errno::keep(|| c_int::try_from(connection.inq(fd)).unwrap_or(c_int::MAX)))
}

/// What the application believes of an option that an upgraded connection keeps at another value.
fn tcp_view(fd: i32, level: i32, name: i32) -> Option<(&'static AtomicU32, table::Call)> {
    if level != libc::IPPROTO_TCP || !matches!(name, libc::TCP_NODELAY | libc::TCP_CORK) {
        return None;
    }
    let entered = table::enter_adult(fd)?;
    let connection = entered.connection();
    let view = if name == libc::TCP_NODELAY { &connection.block.nodelay } else { &connection.block.cork };
    connection.is_active().then_some((view, entered))
}

/// getsockopt(2): `call` is the original.
///
/// # Safety
/// `value` is writable for what `length` says.
pub(crate) unsafe fn option(
    fd: i32,
    level: i32,
    name: i32,
    value: *mut c_void,
    length: *mut socklen_t,
    call: impl FnOnce() -> i32,
) -> i32 {
    if (level, name) == (libc::SOL_SOCKET, libc::SO_ERROR) {
        // SAFETY: the caller's promise.
        return unsafe { option_of_error(fd, value, length, call) };
    }
    let result = call();
    if result == 0
        && let Some((view, _call)) = tcp_view(fd, level, name)
    {
        // SAFETY: the kernel has just written it.
        let room = unsafe { length.read() };
        // SAFETY: the kernel has just written so many bytes there.
        unsafe { put_int(value, room, view.load(Ordering::Relaxed) as c_int) };
    }
    result
}

/// getsockopt(2) of `SO_ERROR`. Asking the kernel clears what it has, of which the program may have room for a part, or for nothing.
///
/// # Safety
/// As for [`option`].
unsafe fn option_of_error(
    fd: i32,
    value: *mut c_void,
    length: *mut socklen_t,
    call: impl FnOnce() -> i32,
) -> i32 {
    let is_active = || table::enter_adult(fd).is_some_and(|entered| entered.connection().is_active());
    if !may_be_of_program(length.addr(), size_of::<socklen_t>()) || !is_active() {
        return call();
    }
    // SAFETY: the caller's promise.
    let room = unsafe { length.read() };
    let length_of_int = size_of::<c_int>() as socklen_t;
    let count = room.min(length_of_int);
    if room.cast_signed() < 0 || count > 0 && !may_be_of_program(value.addr(), count as usize) {
        return call();
    }
    let error = take_error(fd).map_or(0, Errno::raw_os_error);
    // SAFETY: the caller's promise; no more than there is room for.
    unsafe { put_int(value, count, error) };
    // SAFETY: the caller's promise.
    unsafe { length.write(count) };
    0
}

/// Writes the first bytes of `number`, as many as there is room for, as the kernel does.
///
/// # Safety
/// `target` is writable for `room` bytes.
unsafe fn put_int(target: *mut c_void, room: socklen_t, number: c_int) {
    let count = size_of::<c_int>().min(room as usize);
    // SAFETY: the caller's promise.
    unsafe { target.cast::<u8>().copy_from_nonoverlapping((&raw const number).cast(), count) };
}

/// The error waiting at a connection, which this clears.
pub(crate) fn take_error(fd: i32) -> Option<Errno> {
    // SAFETY: the program's descriptor, on which it makes a call.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let kernel = rustix::net::sockopt::socket_error(socket).ok().and_then(Result::err);
    match table::enter_adult(fd) {
        Some(entered) if entered.connection().is_active() => entered.connection().take_error(fd, kernel),
        _ => kernel,
    }
}

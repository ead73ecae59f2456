//! close, dup, fcntl, ioctl, shutdown, socket options, fdopen.
//!
//! fcntl, ioctl and syscall are variadic in C; on the Linux ABIs a single word after the named ones arrives
//! where a named one would.

use libc::{c_char, c_int, c_uint, c_ulong, c_void, socklen_t};
use rustix::io::Errno;
use thallus_transport::reason::Reason;
use thallus_transport::tcp::SIOCATMARK;

use super::guard;
use crate::ops::{descriptor, epoll, stream};
use crate::{errno, real, table};

/// close(2).
#[unsafe(no_mangle)]
pub extern "C" fn close(fd: c_int) -> c_int {
    if guard(|| i32::from(!descriptor::may_close(fd))) == 1 {
        return errno::int(Err(Errno::BADF));
    }
    // SAFETY: takes a number.
    unsafe { real::close(fd) }
}

/// `close_range(2)`.
#[unsafe(no_mangle)]
pub extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    guard(|| descriptor::close_range(first, last, flags))
}

/// closefrom(3).
#[unsafe(no_mangle)]
pub extern "C" fn closefrom(first: c_int) {
    let first = u32::try_from(first).unwrap_or(0);
    if guard(|| descriptor::close_range(first, u32::MAX, 0)) != 0 {
        // A kernel without close_range (before 5.9).
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(65_536);
        for fd in first..u32::try_from(limit).unwrap_or(65_536) {
            close(fd.cast_signed());
        }
    }
}

/// dup(2).
#[unsafe(no_mangle)]
pub extern "C" fn dup(fd: c_int) -> c_int {
    // SAFETY: takes a number.
    guard(|| descriptor::duplicated(fd, || unsafe { real::dup(fd) }))
}

/// dup2(2).
#[unsafe(no_mangle)]
pub extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    // SAFETY: takes numbers.
    guard(|| descriptor::replace(old, new, 0, || unsafe { real::dup2(old, new) }))
}

/// dup3(2).
#[unsafe(no_mangle)]
pub extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    // SAFETY: takes numbers.
    guard(|| descriptor::replace(old, new, flags, || unsafe { real::dup3(old, new, flags) }))
}

/// fcntl(2).
///
/// # Safety
/// As for fcntl(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
    // SAFETY: the program's own arguments.
    let call = || unsafe { real::fcntl(fd, command, argument) };
    if descriptor::concerns(command, argument) {
        guard(|| descriptor::fcntl(fd, command, argument, call))
    } else {
        call()
    }
}

/// fcntl(2), as programs with 64-bit file offsets call it.
///
/// # Safety
/// As for fcntl(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: usize) -> c_int {
    // SAFETY: the program's own arguments.
    let call = || unsafe { real::fcntl64(fd, command, argument) };
    if descriptor::concerns(command, argument) {
        guard(|| descriptor::fcntl(fd, command, argument, call))
    } else {
        call()
    }
}

/// ioctl(2).
///
/// # Safety
/// As for ioctl(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: usize) -> c_int {
    // SAFETY: the program's own arguments.
    guard(|| unsafe { descriptor::ioctl(fd, request, argument, || real::ioctl(fd, request, argument)) })
}

/// sockatmark(3).
#[unsafe(no_mangle)]
pub extern "C" fn sockatmark(fd: c_int) -> c_int {
    let mut at: c_int = 0;
    // SAFETY: SIOCATMARK writes one int.
    match unsafe { ioctl(fd, SIOCATMARK, (&raw mut at).expose_provenance()) } {
        0 => at,
        failed => failed,
    }
}

/// shutdown(2).
#[unsafe(no_mangle)]
pub extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    // SAFETY: takes numbers.
    guard(|| descriptor::shutdown(fd, how, || unsafe { real::shutdown(fd, how) }))
}

/// setsockopt(2).
///
/// # Safety
/// As for setsockopt(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    // SAFETY: the program's own arguments.
    guard(|| unsafe {
        descriptor::set_option(fd, level, name, value, length, || {
            real::setsockopt(fd, level, name, value, length)
        })
    })
}

/// getsockopt(2).
///
/// # Safety
/// As for getsockopt(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: *mut socklen_t,
) -> c_int {
    // SAFETY: the program's own arguments.
    guard(|| unsafe {
        descriptor::option(fd, level, name, value, length, || {
            real::getsockopt(fd, level, name, value, length)
        })
    })
}

/// fdopen(3): what a stream reads and writes no hook sees, so its connection stays on TCP and is no longer ours.
///
/// # Safety
/// As for fdopen(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fdopen(fd: c_int, mode: *const c_char) -> *mut libc::FILE {
    if !stream::settle(fd, Reason::Stdio) {
        errno::set(rustix::io::Errno::INVAL);
        return std::ptr::null_mut();
    }
    // SAFETY: the program's own arguments.
    let stream = unsafe { real::fdopen(fd, mode) };
    if !stream.is_null() {
        errno::keep(|| epoll::hand_over(fd));
        table::let_go(fd);
    }
    stream
}

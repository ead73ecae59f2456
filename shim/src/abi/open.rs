//! socket, connect, accept, accept4, listen.

use libc::{c_int, sockaddr, socklen_t};
use rustix::io::Errno;

use super::guard;
use crate::ops::open::{self, Target};
use crate::{errno, real, table};

/// socket(2).
#[unsafe(no_mangle)]
pub extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: takes numbers.
    let fd = unsafe { real::socket(domain, kind, protocol) };
    guard(|| {
        open::created(fd, domain, kind, protocol);
        fd
    })
}

/// connect(2).
///
/// # Safety
/// As for connect(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    let has_left = open::connects(fd);
    // SAFETY: the program's own arguments.
    let result = unsafe { real::connect(fd, address, length) };
    guard(|| {
        let target = if result == 0 || matches!(errno::now(), Errno::INPROGRESS | Errno::INTR) {
            // SAFETY: the kernel has read the address. Of a call that it refuses it may not even look at that.
            unsafe { open::target(address, length) }
        } else {
            Target::Other
        };
        if has_left {
            open::connected_again(fd, target);
        }
        open::connected(fd, target, result);
        result
    })
}

/// accept(2).
///
/// # Safety
/// As for accept(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    // SAFETY: the program's own arguments.
    let accepted = unsafe { real::accept(fd, address, length) };
    guard(|| {
        open::accepted(fd, accepted);
        accepted
    })
}

/// accept4(2).
///
/// # Safety
/// As for accept4(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept4(
    fd: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
    flags: c_int,
) -> c_int {
    // SAFETY: the program's own arguments.
    let accepted = unsafe { real::accept4(fd, address, length, flags) };
    guard(|| {
        open::accepted(fd, accepted);
        accepted
    })
}

/// listen(2).
#[unsafe(no_mangle)]
pub extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    guard(|| {
        // SAFETY: takes numbers.
        let result = unsafe { real::listen(fd, backlog) };
        if result == 0 {
            table::listening(fd);
        }
        result
    })
}

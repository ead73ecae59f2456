//! Connections begin: connect, accept, listen.

use rustix::fd::BorrowedFd;
use thallus_transport::arena::Role;
use thallus_transport::tcp;

use crate::{config, errno, log, table};

/// connect(2) on `fd` returned; `port` is the one it asked for.
pub(crate) fn connected(fd: i32, port: Option<u16>, result: i32) {
    let underway =
        result == 0 || matches!(errno::now(), rustix::io::Errno::INPROGRESS | rustix::io::Errno::INTR);
    if !underway || port == Some(0) || !config::enabled() || table::is_borrowed() {
        return;
    }
    let Some(port) = port else {
        table::remove(fd);
        return;
    };
    if table::enter(fd).is_some() {
        return;
    }
    errno::keep(|| {
        // SAFETY: the program's call on this descriptor has just been taken by the kernel.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        if tcp::is_tcp(socket) {
            // A non-blocking connect is never done at once (`inet_stream_connect`).
            let connected = result == 0;
            table::track(fd, Role::Client, port, !connected && is_nonblocking(socket), connected);
        }
    });
}

/// accept(2) on `listener` made `fd`.
pub(crate) fn accepted(listener: i32, fd: i32, nonblocking: bool) {
    if fd < 0 || !config::enabled() || table::is_borrowed() {
        return;
    }
    if let Some(port) = table::listener_port(listener) {
        log::info!("fd {fd}: accepted on port {port}");
        table::track(fd, Role::Server, port, nonblocking, true);
    } else {
        table::remove(fd);
    }
}

fn is_nonblocking(socket: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_getfl(socket).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
}

/// The port in a socket address of the application's; `None` for `AF_UNSPEC`, 0 for other families.
///
/// # Safety
/// `address` is readable for `length` bytes, or the kernel has refused it.
pub(crate) unsafe fn port(address: *const libc::sockaddr, length: libc::socklen_t) -> Option<u16> {
    if address.is_null() || (length as usize) < size_of::<libc::sockaddr_in>() {
        return Some(0);
    }
    // SAFETY: at least a sockaddr_in is readable.
    let family = unsafe { (*address).sa_family };
    match i32::from(family) {
        libc::AF_UNSPEC => None,
        libc::AF_INET | libc::AF_INET6 => {
            // SAFETY: long enough, and both families keep the port at the same place.
            let port = unsafe { (*address.cast::<libc::sockaddr_in>()).sin_port };
            Some(u16::from_be(port))
        }
        _ => Some(0),
    }
}

//! Connections begin: socket, connect, accept, listen.

use rustix::fd::BorrowedFd;
use thallus_transport::arena::Role;
use thallus_transport::tcp;

use crate::{config, errno, log, table};

/// socket(2) made `fd`, or failed with −1.
pub(crate) fn created(fd: i32, domain: i32, kind: i32, protocol: i32) {
    let stream = kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) == libc::SOCK_STREAM;
    let internet = matches!(domain, libc::AF_INET | libc::AF_INET6);
    // The kernel's choice of a protocol for a stream is TCP.
    if !config::enabled() {
        return;
    }
    if stream && internet && matches!(protocol, 0 | libc::IPPROTO_TCP) {
        table::add_socket(fd);
    } else {
        table::add_other(fd);
    }
}

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
    if table::is_connection(fd) {
        return;
    }
    errno::keep(|| {
        // SAFETY: the program's call on this descriptor has just been taken by the kernel.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        if table::is_socket(fd) || tcp::is_tcp(socket) {
            table::track(fd, Role::Client, port, result == 0);
        }
    });
}

/// accept(2) on `listener` made `fd`.
pub(crate) fn accepted(listener: i32, fd: i32) {
    if fd < 0 || !config::enabled() || table::is_borrowed() {
        return;
    }
    if let Some(port) = table::listener_port(listener) {
        log::info!("fd {fd}: accepted on port {port}");
        table::track(fd, Role::Server, port, true);
    } else {
        table::remove(fd);
    }
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

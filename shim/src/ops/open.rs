//! Connections begin: socket, connect, accept, listen.

use rustix::fd::BorrowedFd;
use thallus_transport::arena::Role;
use thallus_transport::reason::Reason;
use thallus_transport::rendezvous::Service;
use thallus_transport::settings::settings;
use thallus_transport::unix::Name;
use thallus_transport::{tcp, unix};

use crate::ops::stream;
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
    } else if stream && domain == libc::AF_UNIX {
        table::add_local(fd);
    } else {
        table::add_other(fd);
    }
}

/// What connect(2) asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// `AF_UNSPEC`: to connect no more.
    Unspecified,
    /// A server.
    Service(Service),
    /// Something of no interest.
    Other,
}

/// connect(2) on `fd` is about to be called. Whether that is a connection which may have left TCP. Nothing is held meanwhile, as the call
/// is a cancellation point.
pub(crate) fn connects(fd: i32) -> bool {
    let call = table::enter_adult(fd).filter(|_| !table::is_borrowed());
    call.inspect(|call| call.connection().may_be_disconnected()).is_some()
}

/// connect(2) on such an `fd` returned.
pub(crate) fn connected_again(fd: i32, target: Target) {
    errno::keep(|| {
        let Some(call) = table::enter_adult(fd) else { return };
        match target {
            Target::Unspecified => {
                call.connection().disconnected();
                table::remove_all(&call);
            }
            // SAFETY: the program's call on this descriptor has just returned.
            _ => call.connection().tell_linger(unsafe { BorrowedFd::borrow_raw(fd) }),
        }
    });
}

/// connect(2) on `fd` returned: it has connected, or the kernel goes on with it.
pub(crate) fn connected(fd: i32, target: Target, result: i32) {
    if matches!(target, Target::Other) || !config::enabled() || table::is_borrowed() {
        return;
    }
    let Target::Service(service) = target else {
        table::remove(fd);
        return;
    };
    if table::is_connection(fd) {
        return;
    }
    errno::keep(|| {
        // SAFETY: the program's call on this descriptor has just been taken by the kernel.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        let is_ours = match service {
            Service::Port(_) => table::is_socket(fd) || tcp::is_tcp(socket),
            // It connects at once, or not at all.
            Service::Unix(name) => {
                let settings = settings();
                result == 0 && settings.shm && settings.selects_unix(&name) && unix::is_stream(socket)
            }
        };
        if is_ours && table::track(fd, Role::Client, service, result == 0) {
            stream::settle(fd, Reason::SharedBeforeUpgrade);
        }
    });
}

/// accept(2) on `listener` made `fd`.
pub(crate) fn accepted(listener: i32, fd: i32) {
    if fd < 0 || !config::enabled() || table::is_borrowed() {
        return;
    }
    if let Some(service) = table::service_of_listener(listener, fd) {
        match service {
            Service::Port(port) => log::info!("fd {fd}: accepted on port {port}"),
            Service::Unix(name) => log::info!("fd {fd}: accepted on {name}"),
        }
        table::track(fd, Role::Server, service, true);
    } else {
        table::add_other(fd);
    }
}

/// What a socket address of the application's names.
///
/// # Safety
/// `address` is readable for `length` bytes.
pub(crate) unsafe fn target(address: *const libc::sockaddr, length: libc::socklen_t) -> Target {
    let length = length as usize;
    if address.is_null() || length < size_of::<libc::sa_family_t>() {
        return Target::Other;
    }
    // SAFETY: the family stands first, and is readable, maybe unaligned.
    let family = unsafe { address.cast::<libc::sa_family_t>().read_unaligned() };
    match i32::from(family) {
        libc::AF_UNIX => {
            let before = size_of::<libc::sa_family_t>();
            let path = address.cast::<u8>().wrapping_add(before);
            // SAFETY: the caller's promise; a name is no longer.
            let path = unsafe {
                std::slice::from_raw_parts(path, length.min(size_of::<libc::sockaddr_un>()) - before)
            };
            Name::of(path).map_or(Target::Other, |name| Target::Service(Service::Unix(name)))
        }
        libc::AF_UNSPEC => Target::Unspecified,
        _ if length < size_of::<libc::sockaddr_in>() => Target::Other,
        libc::AF_INET | libc::AF_INET6 => {
            // SAFETY: long enough, and both families keep the port at the same place.
            let port = unsafe { (*address.cast::<libc::sockaddr_in>()).sin_port };
            if port == 0 { Target::Other } else { Target::Service(Service::Port(u16::from_be(port))) }
        }
        _ => Target::Other,
    }
}

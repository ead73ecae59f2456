//! Sockets that are registered before they connect, as nginx does with those to its upstreams. The set keeps what the
//! program asked for, and makes it a registration of the connection as soon as there is one.

use libc::epoll_event;
use rustix::fd::BorrowedFd;
use thallus_transport::reason::Reason;
use thallus_transport::tcp;

use super::member::{EXCLUSIVE, Member};
use super::set::{self, Set};
use crate::{config, errno, table};

/// Whether `fd`, which is no connection, may become one.
pub(super) fn may_connect(fd: i32) -> bool {
    if !config::enabled() || table::is_borrowed() {
        return false;
    }
    if table::is_unknown(fd) {
        errno::keep(|| {
            // SAFETY: a number; the kernel says whether it is a socket.
            let socket = unsafe { BorrowedFd::borrow_raw(fd) };
            // Made by another program, perhaps, or a copy.
            if fd >= 0 && tcp::is_unconnected(socket) {
                table::discover_socket(fd);
            }
        });
    }
    table::is_socket(fd)
}

/// `epoll_ctl(2)` for an unconnected TCP socket; `kernel` is the original.
pub(super) fn control(
    epfd: i32,
    operation: i32,
    fd: i32,
    wanted: Option<(u32, u64)>,
    kernel: impl Fn(*mut epoll_event) -> i32,
) -> i32 {
    let mut asked = wanted.map(|(events, data)| epoll_event { events, u64: data });
    let event = asked.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
    let Some(set) = table::epoll_set(epfd).or_else(|| errno::keep(|| table::add_epoll_set(epfd))) else {
        return kernel(event);
    };
    let Some(mut members) = set.lock() else { return kernel(event) };
    let result = kernel(event);
    match (operation, wanted) {
        _ if result != 0 => {}
        (libc::EPOLL_CTL_DEL, _) => {
            members.early.remove(&fd);
        }
        (_, Some(wanted)) => {
            members.early.insert(fd, wanted);
            let unconnected = table::watch_socket(fd);
            drop(members);
            if !unconnected {
                // Another thread has connected it meanwhile, and has not seen this.
                errno::keep(|| adopt(set, fd));
            }
        }
        _ => {}
    }
    result
}

/// A socket that sets have registered connects.
pub(crate) fn connects(fd: i32) {
    for set in set::all().unwrap_or_default() {
        adopt(set, fd);
    }
}

/// Such a socket is closed without having connected.
pub(crate) fn unwatched(fd: i32) {
    for set in set::all().unwrap_or_default() {
        if let Some(mut members) = set.lock() {
            members.early.remove(&fd);
        }
    }
}

fn adopt(set: &'static Set, fd: i32) {
    let Some(mut members) = set.lock() else { return };
    let Some((events, data)) = members.early.remove(&fd) else { return };
    drop(members);
    // Grows up, for which the set's lock must be free.
    let Some(call) = table::enter(fd) else { return };
    if events & EXCLUSIVE != 0 {
        call.connection().pin(fd, Reason::Exclusive);
    }
    let active = call.connection().is_active();
    if let Some(mut members) = set.lock() {
        let mut member = Member::new(call.slot, fd, events, data, false);
        if active {
            member.became_active();
        }
        members.insert(set, fd, member);
        members.settle(set, fd);
        members.sync(set, fd);
    }
}

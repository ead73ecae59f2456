//! What makes the kernel report a set of which no registration does: a descriptor of this library's own that always has room.

use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use libc::epoll_event;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use thallus_transport::ready::bit;
use thallus_transport::uninterrupted::Descriptor;

use crate::table;
use crate::{errno, real};

/// An eventfd(2) into which nobody ever writes, for all sets, also a forked child's; −1 before there is one.
static FD: AtomicI32 = AtomicI32::new(-1);

/// Its `epoll_data`: an address of this library's own, which a program has no use for.
pub(super) fn name() -> u64 {
    (&raw const FD).addr() as u64
}

/// Puts it into the set `epfd`. Returns its number, or `None` if there can be none.
pub(super) fn add(epfd: i32) -> Option<i32> {
    // A call that no hook has seen may have closed it.
    for _ in 0..2 {
        let fd = fd()?;
        let mut event = epoll_event { events: bit::OUT, u64: name() };
        // SAFETY: the event is valid.
        if unsafe { real::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, &raw mut event) } == 0 {
            return Some(fd);
        }
        match errno::now() {
            // A fork has put it there.
            Errno::EXIST => return Some(fd),
            Errno::BADF => _ = FD.compare_exchange(fd, -1, Ordering::Relaxed, Ordering::Relaxed),
            _ => return None,
        }
    }
    None
}

/// Takes it out again.
pub(super) fn remove(epfd: i32, fd: i32) {
    // SAFETY: deletion takes no event.
    unsafe { real::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
}

fn fd() -> Option<i32> {
    if let Some(fd) = internal_fd() {
        return Some(fd);
    }
    let new = table::place(eventfd(0, EventfdFlags::CLOEXEC).ok()?).ok()?.into_raw_fd();
    match FD.compare_exchange(-1, new, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => Some(new),
        Err(other) => {
            // SAFETY: made above, and nobody has seen it.
            drop(Descriptor::from(unsafe { OwnedFd::from_raw_fd(new) }));
            Some(other)
        }
    }
}

/// This module's descriptor, which may be a parent's.
pub(super) fn internal_fd() -> Option<i32> {
    Some(FD.load(Ordering::Relaxed)).filter(|&fd| fd >= 0)
}

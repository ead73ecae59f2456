//! This library's own descriptors, which the program neither uses nor closes.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags, RawDir};
use rustix::io::Errno;
use thallus_transport::uninterrupted::Uninterrupted;

use super::slot::for_each;
use super::{Entry, LIMIT, blocks, cell, decode, descriptors};
use crate::log;

/// Moves an internal descriptor out of the program's way: above those that it will use, close-on-exec.
pub(crate) fn place(fd: OwnedFd) -> Result<OwnedFd, Errno> {
    let _uninterrupted = Uninterrupted::begin();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(4096);
    let lowest = (limit - limit / 4).min(8192) as i32;
    let high = rustix::io::fcntl_dupfd_cloexec(&fd, lowest)?;
    if let Some((word, bit)) = internal_bit(high.as_raw_fd()) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
    LOWEST_INTERNAL.fetch_min(high.as_raw_fd(), Ordering::Relaxed);
    Ok(high)
}

/// Before this library closes one.
pub(crate) fn forget_placed(fd: i32) {
    if let Some((word, bit)) = internal_bit(fd) {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// Whether there never was one.
pub(super) fn is_empty() -> bool {
    LOWEST_INTERNAL.load(Ordering::Relaxed) == i32::MAX
}

/// The highest descriptor below `count` that the program has open, if it is not below `least`.
pub(crate) fn highest_of_program(least: i32, count: i32) -> Option<i32> {
    let _uninterrupted = Uninterrupted::begin();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(folder) = rustix::fs::open("/proc/self/fd", flags, Mode::empty()) else {
        // No /proc, or no descriptor for it.
        let most = i32::try_from(most_descriptors()).unwrap_or(i32::MAX);
        return (least..count.min(most)).rev().find(|&fd| {
            // SAFETY: a number; the kernel says whether it is open.
            rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(fd) }).is_ok() && !is_internal(fd)
        });
    };
    let mut room = [MaybeUninit::uninit(); 4096];
    let mut entries = RawDir::new(&folder, &mut room);
    let mut highest = None;
    while let Some(Ok(entry)) = entries.next() {
        let fd = entry.file_name().to_str().ok().and_then(|name| name.parse().ok()).unwrap_or(-1);
        if (least..count).contains(&fd) && Some(fd) > highest && fd != folder.as_raw_fd() && !is_internal(fd)
        {
            highest = Some(fd);
        }
    }
    highest
}

/// Most descriptors that the process may have open (`RLIMIT_NOFILE`).
pub(crate) fn most_descriptors() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX)
}

static LOWEST_INTERNAL: AtomicI32 = AtomicI32::new(i32::MAX);

/// One bit a descriptor that was once [`place`]d: not of each is it known when it is closed.
static INTERNAL: [AtomicU64; LIMIT / 64] = [const { AtomicU64::new(0) }; LIMIT / 64];

fn internal_bit(fd: i32) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((INTERNAL.get(fd / 64)?, 1 << (fd % 64)))
}

/// Whether `fd` is one of this library's own, which a loop that closes everything must not close.
pub(crate) fn is_internal(fd: i32) -> bool {
    if fd < LOWEST_INTERNAL.load(Ordering::Relaxed) {
        return false;
    }
    let known = internal_bit(fd);
    if let Some((word, bit)) = known
        && word.load(Ordering::Relaxed) & bit == 0
    {
        return false;
    }
    let internal = internal_fds().contains(&fd);
    if let (Some((word, bit)), false) = (known, internal) {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
    internal
}

/// All internal descriptors, ascending.
pub(crate) fn internal_fds() -> Vec<i32> {
    let _uninterrupted = Uninterrupted::begin();
    let mut all = Vec::new();
    all.extend(blocks::descriptors());
    all.extend(log::internal_fd());
    all.extend(thallus_transport::alarm::internal_fds());
    all.extend(thallus_transport::chime::internal_fds());
    all.extend(crate::ops::epoll::internal_fds());
    all.extend(thallus_transport::verbs::device::internal_fds());
    for_each(|_, connection, _| all.extend(connection.internal_fds().into_iter().flatten()));
    for fd in descriptors() {
        if let Some(Entry::Listener(listener)) =
            cell(fd).and_then(|cell| decode(cell.load(Ordering::Acquire)))
        {
            all.extend(listener.internal_fds());
        }
    }
    all.sort_unstable();
    all.dedup();
    all
}

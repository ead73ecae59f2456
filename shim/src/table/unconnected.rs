//! Sockets that have not connected: who else may use the connection that one becomes can only be told if it is known before.

use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fd::BorrowedFd;

use super::{HIGHEST, YOUNG, cell, cell_to_fill, descriptors, put};

/// A socket, unconnected: no young connection's entry, whose generation is never 0. It may have bits of those that follow.
const SOCKET: usize = YOUNG;
/// It is registered in an epoll set already.
const WATCHED: usize = 4;
/// It has had another name in this process. That may still be there, and may be the one by which it connects.
const COPIED: usize = 8;
/// It was there when the process forked, or has been passed on. The other process may use it, too, and nobody counts it in.
const SHARED: usize = 16;
/// It is a Unix stream that no epoll set has: whether it may ever leave the kernel has not been asked.
const LOCAL: usize = 32;

pub(super) fn is_unconnected(word: usize) -> bool {
    word & !(WATCHED | COPIED | SHARED | LOCAL) == SOCKET
}

pub(super) fn is_watched(word: usize) -> bool {
    is_unconnected(word) && word & WATCHED != 0
}

fn is_local(word: usize) -> bool {
    is_unconnected(word) && word & LOCAL != 0
}

/// Adds `bits` to what is known of an unconnected socket. False if it is something else.
fn mark(cell: &AtomicUsize, bits: usize) -> bool {
    let marked = |word| is_unconnected(word).then_some(word | bits);
    cell.fetch_update(Ordering::SeqCst, Ordering::SeqCst, marked).is_ok()
}

/// Notes that `fd` is a TCP socket that the program has just made.
pub(crate) fn add_socket(fd: i32) {
    put(fd, SOCKET);
}

/// Notes that `fd` is a Unix stream that the program has just made.
pub(crate) fn add_local(fd: i32) {
    put(fd, SOCKET | LOCAL);
}

/// Whether nothing is known of `fd`, or nothing but that it is a Unix stream.
pub(crate) fn is_unknown(fd: i32) -> bool {
    cell(fd).is_some_and(|cell| {
        let word = cell.load(Ordering::Relaxed);
        word == 0 || is_local(word)
    })
}

/// Notes that `fd`, of which [nothing is known](is_unknown), is an unconnected socket that may leave the kernel.
pub(crate) fn discover_socket(fd: i32) {
    if let Some(cell) = cell_to_fill(fd) {
        HIGHEST.fetch_max(fd as usize + 1, Ordering::SeqCst);
        let known = |word| match word {
            0 => Some(SOCKET),
            word => is_local(word).then_some(word & !LOCAL),
        };
        let _ = cell.fetch_update(Ordering::SeqCst, Ordering::SeqCst, known);
    }
}

/// Whether `fd` is a socket that has not connected: TCP, or a Unix stream that an epoll set has.
pub(crate) fn is_socket(fd: i32) -> bool {
    cell(fd).is_some_and(|cell| {
        let word = cell.load(Ordering::Relaxed);
        is_unconnected(word) && !is_local(word)
    })
}

/// Notes that an epoll set has the unconnected socket `fd`, and is to be told when it connects. False if it is something
/// else by now.
pub(crate) fn watch_socket(fd: i32) -> bool {
    cell(fd).is_some_and(|cell| mark(cell, WATCHED))
}

/// The program has given `old` another name, `new`: to be called for what may be an unconnected socket.
pub(crate) fn copied_unconnected(old: i32, new: i32) {
    if let Some(old) = cell(old)
        && mark(old, COPIED)
    {
        put(new, SOCKET | COPIED | old.load(Ordering::SeqCst) & (SHARED | LOCAL));
    }
}

/// The process is about to fork.
pub(crate) fn share_unconnected() {
    for cell in descriptors().filter_map(cell) {
        mark(cell, SHARED);
    }
}

/// `fd` is about to be sent to another process: to be called for what may be an unconnected socket.
pub(crate) fn pass_unconnected(fd: i32) {
    if let Some(cell) = cell(fd) {
        mark(cell, SHARED);
    }
}

/// Whether the socket `fd`, of which `word` was known before it connected, can be reached by a name that nobody will take for the
/// connection's.
pub(super) fn is_shared(word: usize, fd: i32) -> bool {
    if !is_unconnected(word) || word & (COPIED | SHARED) == 0 {
        return false;
    }
    let is_copied = |other: &i32| {
        let word = cell(*other).map_or(0, |cell| cell.load(Ordering::SeqCst));
        *other != fd && is_unconnected(word) && word & COPIED != 0
    };
    word & SHARED != 0 || descriptors().filter(is_copied).any(|other| are_same(fd, other))
}

/// Whether both are names of the same socket.
fn are_same(one: i32, other: i32) -> bool {
    let file = |fd| {
        // SAFETY: a number; the kernel says whether it is open.
        let status = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(fd) }).ok()?;
        Some((status.st_dev, status.st_ino))
    };
    file(one).is_some_and(|one| file(other) == Some(one))
}

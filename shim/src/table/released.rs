//! Connections that stay on TCP for good: calls on them are the kernel's alone, and only their bytes are counted.
//!
//! Whoever finds one pinned notes so in its entry ([`release`]). From then on its calls enter no slot, poll and select see a
//! foreign descriptor, and no epoll set of ours knows of it. What may still leave TCP is looked at in each call.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::slot::Slot;
use super::{Entering, TAG, cell, enter_slot};
use crate::ops;

/// In the entry of a connection with a [`Slot`], whose address has this bit free.
pub(super) const RELEASED: usize = 4;

const _: () = assert!(align_of::<Slot>() > RELEASED);

/// Whether this is the entry of a connection that stays on TCP for good.
#[inline]
pub(super) fn is_released(word: usize) -> bool {
    word & (TAG | RELEASED) == RELEASED
}

/// A connection that stays on TCP for good, in one call. Holds nothing: a thread may be cancelled meanwhile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Released {
    cell: &'static AtomicUsize,
    word: usize,
}

/// The connection behind `fd`, if it stays on TCP for good.
#[inline]
pub(crate) fn released(fd: i32) -> Option<Released> {
    let cell = cell(fd)?;
    let word = cell.load(Ordering::Relaxed);
    is_released(word).then_some(Released { cell, word })
}

impl Released {
    /// The call has sent what it returned.
    #[inline]
    pub(crate) fn sent(self, result: isize) {
        self.count(result, true);
    }

    /// The call, a receive with `flags`, has received what it returned.
    #[inline]
    pub(crate) fn received(self, result: isize, flags: i32) {
        if flags & (libc::MSG_PEEK | libc::MSG_OOB | libc::MSG_ERRQUEUE) == 0 {
            self.count(result, false);
        }
    }

    fn count(self, result: isize, sent: bool) {
        // If it was closed meanwhile, and its number is another's now, these are nobody's.
        if result > 0
            && let Entering::Inside(call) = enter_slot(self.cell, self.word)
        {
            let block = call.connection().block;
            let counter = if sent { &block.tcp_sent } else { &block.tcp_received };
            counter.fetch_add(result as u64, Ordering::Relaxed);
        }
    }
}

/// Notes that the connection in `slot`, which is pinned, is the kernel's alone as `fd`.
#[cold]
pub(super) fn release(fd: i32, slot: &'static Slot) {
    let address = std::ptr::from_ref(slot).expose_provenance();
    // Not again in each call that does more than to count.
    let Some(cell) = cell(fd).filter(|cell| cell.load(Ordering::Relaxed) == address) else { return };
    if ops::epoll::abandon(slot) {
        let _ = cell.compare_exchange(address, address | RELEASED, Ordering::SeqCst, Ordering::Relaxed);
    }
}

/// In a forked child, which has not used any connection yet: each of its calls looks again.
pub(super) fn forget() {
    for fd in super::descriptors() {
        let Some(cell) = cell(fd) else { continue };
        let word = cell.load(Ordering::SeqCst);
        if is_released(word) {
            cell.store(word & !RELEASED, Ordering::SeqCst);
        }
    }
}

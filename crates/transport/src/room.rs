//! How much a writer may be ahead: the outgoing window of an active connection grows when the ring is full, and is given back.
//!
//! Over RDMA a ring has one size, and nothing here changes it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::arena::flag;
use crate::connection::Connection;
use crate::control::end;
use crate::ring::{HOT_CLASS, Lie, WIDE_CLASS, class_size};
use crate::segment::{Outlet, Segment};
use crate::settings::settings;
use crate::{process, unix};

/// Bytes that a direction has to move before its window becomes wide: by then about as much time has been lost by its being narrow as
/// the new pages cost.
const LONG: u64 = 8 * class_size(WIDE_CLASS);

/// Directions of one process that have a wide window at a time.
const MOST_WIDE: u32 = 32;

static WIDE: AtomicU32 = AtomicU32::new(0);

/// Whether this process has made a direction's window wide. Counted among [`MOST_WIDE`] until it is given up, or dropped. Changed
/// with the send lock held.
#[derive(Debug, Default)]
pub(crate) struct Wide {
    taken: AtomicBool,
    /// Bytes that the direction had moved when memory for it ran out.
    starved_at: AtomicU64,
}

impl Wide {
    fn is_taken(&self) -> bool {
        self.taken.load(Ordering::Relaxed)
    }

    /// Whether a direction that has `moved` so many bytes is worth it: [`LONG`] of them, and as many again since memory ran out.
    fn is_due(&self, moved: u64) -> bool {
        // Fewer than then: the count has begun again.
        moved.checked_sub(self.starved_at.load(Ordering::Relaxed)).unwrap_or(moved) >= LONG
    }

    /// False if there are too many.
    fn take(&self) -> bool {
        let one_more = |count| (count < MOST_WIDE).then_some(count + 1);
        let may =
            self.is_taken() || WIDE.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok();
        self.taken.store(may, Ordering::Relaxed);
        may
    }

    fn give_up(&self) {
        if self.taken.swap(false, Ordering::Relaxed) {
            WIDE.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Gives it up for lack of memory.
    fn starve(&self, moved: u64) {
        self.give_up();
        self.starved_at.store(moved, Ordering::Relaxed);
    }
}

impl Drop for Wide {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// The window that the outgoing direction comes back to when it has needed a larger one.
pub(crate) fn home(segment: &Segment) -> u32 {
    if segment.wide.is_taken() { WIDE_CLASS } else { HOT_CLASS }
}

impl Connection {
    /// Whether a write would be taken by the ring, as poll(2) means it.
    pub(crate) fn ring_has_space(&self, segment: &Segment) -> bool {
        segment.outlet().has_room()
    }

    /// The calling thread is about to sleep in a call that wants to write. Always followed by [`Self::awaits_no_room`].
    pub fn awaits_room(&self) {
        self.writers.fetch_add(1, Ordering::SeqCst);
    }

    /// The calling thread is awake again.
    pub fn awaits_no_room(&self) {
        // A child that a signal handler has forked meanwhile begins with none.
        let _ =
            self.writers.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |writers| writers.checked_sub(1));
    }

    /// Whether a thread of this process sleeps in such a call.
    pub(crate) fn has_writers_asleep(&self) -> bool {
        self.writers.load(Ordering::SeqCst) != 0
    }

    /// In a forked child: the threads that slept are its parent's.
    pub fn forked(&self) {
        self.writers.store(0, Ordering::SeqCst);
    }

    /// Whether a sender that sleeps for space is to go on: there is some, or it need not wait for it any more.
    pub(crate) fn ends_waits_for_space(&self, segment: &Segment) -> bool {
        self.ring_has_space(segment)
            || self.block.has(flag::PEER_GONE | flag::SHUT_WR)
            || segment.link().is_some_and(|link| link.has_failed() || link.is_frozen())
            || segment.incoming().end() & end::UNWANTED != 0
            || self.block.has(flag::RETURNED)
            || self.is_asked_back(segment)
    }

    /// Grows the outgoing window for a sender that would sleep. Nobody sleeps while the ring could take more: the
    /// reader may have stopped for good, and on the kernel's buffers the sender would have gone on. False if it
    /// can't grow, or has no need to.
    pub(crate) fn grow_for_sleeper(&self, fd: i32, segment: &Segment) -> bool {
        if self.block.send_switched.load(Ordering::Acquire) == 0 || self.ring_has_space(segment) {
            return false;
        }
        let Ok(_guard) = self.lock_sending(fd) else { return false };
        let producer = segment.outlet();
        let grow = || -> Result<bool, Lie> {
            let within_cache = HOT_CLASS.min(settings().largest_class);
            Ok(producer.grow(1, within_cache)?
                || self.grow_beyond_cache(fd, &producer, class_size(HOT_CLASS))?)
        };
        !producer.has_room() && grow().unwrap_or(false)
    }

    /// Grows the outgoing window for a caller who asks whether it could write: a write now would make it grow. For one who
    /// `waits` not beyond what stays in cache, because [`Self::grow_for_sleeper`] follows. Whether there is room then.
    pub fn grow_for_asker(&self, fd: i32, waits: bool) -> bool {
        let Some(segment) = self.segment() else { return false };
        if self.block.send_switched.load(Ordering::Acquire) == 0 {
            return false;
        }
        if self.ring_has_space(segment) {
            return true;
        }
        let within_cache = HOT_CLASS.min(settings().largest_class);
        let producer = segment.outlet();
        if waits && producer.class().is_ok_and(|class| class >= within_cache) {
            return false;
        }
        let Ok(_guard) = self.lock_sending(fd) else { return false };
        let _ = if waits {
            // As a writer notes that it was full.
            self.block.full_at.store(segment.outgoing().tail(), Ordering::Relaxed);
            producer.grow(1, within_cache)
        } else {
            self.make_room(fd, segment, 1)
        };
        producer.has_room()
    }

    /// Whether [`Self::trim`] would give something back.
    pub fn has_grown(&self) -> bool {
        self.segment().is_some_and(|segment| segment.outlet().has_grown())
    }

    /// Gives memory of a window that has grown back, if the ring is empty and nobody uses it now.
    pub fn trim(&self) {
        let Some(segment) = self.segment() else { return };
        let Some(_guard) = self.block.send_lock.try_lock(process::thread()) else { return };
        if segment.outlet().shrink() == Ok(true) {
            self.block.roomy.store(0, Ordering::Relaxed);
            segment.wide.give_up();
        }
    }

    /// Opens a larger window if the ring is full: at once up to the wide one, if the stream is to have that, or as long as it stays
    /// in cache; beyond that only if the reader has taken nothing since the ring was last full or changed its window: then the
    /// program may count on the kernel's capacity. Whoever would sleep asks [`Self::grow_for_sleeper`]. If the ring is empty, and
    /// full for lack of memory alone, it comes home.
    pub(crate) fn make_room(&self, fd: i32, segment: &Segment, wanted: u64) -> Result<bool, Lie> {
        let producer = segment.outlet();
        let tail = segment.outgoing().tail();
        let stopped = self.block.full_at.swap(tail, Ordering::Relaxed) == tail;
        if producer.leave_unbacked()? {
            segment.wide.starve(producer.moved());
            self.block.roomy.store(0, Ordering::Relaxed);
            return Ok(true);
        }
        if self.widen(segment, &producer)?
            || producer.grow(wanted, HOT_CLASS.min(settings().largest_class))?
        {
            return Ok(true);
        }
        if !stopped {
            return Ok(false);
        }
        self.grow_beyond_cache(fd, &producer, wanted)
    }

    /// Makes the window wide, if the stream has moved much: round trips of 64 KiB between two cores are then up to three times as
    /// many, and bytes two to four times. Not where both ends share a processor, and with it its caches, nor on `AF_UNIX`, where
    /// that would let the writer get further ahead than the kernel does.
    pub(crate) fn widen(&self, segment: &Segment, producer: &Outlet<'_>) -> Result<bool, Lie> {
        let had = segment.wide.is_taken();
        let may = segment.wide.is_due(producer.moved())
            && settings().largest_class >= WIDE_CLASS
            && !self.is_unix()
            && !segment.shares_processor()
            && segment.wide.take();
        let widened = may && producer.grow(u64::MAX, WIDE_CLASS)?;
        if may && !widened {
            if producer.class()? < WIDE_CLASS {
                segment.wide.starve(producer.moved());
            } else if !had {
                // It is larger already.
                segment.wide.give_up();
            }
        }
        Ok(widened)
    }

    fn grow_beyond_cache(&self, fd: i32, producer: &Outlet<'_>, wanted: u64) -> Result<bool, Lie> {
        let grown = producer.grow(wanted, self.largest_class(fd))?;
        if grown {
            self.block.roomy.store(1, Ordering::Relaxed);
        }
        Ok(grown)
    }

    /// The largest window that this end may fill. On `AF_UNIX` little more than the kernel's socket would take: who closes it is
    /// told to the reader at once as a hang-up, and there are readers (libzmq) that then read no further.
    fn largest_class(&self, fd: i32) -> u32 {
        let largest = settings().largest_class;
        if !self.is_unix() {
            return largest;
        }
        let takes = unix::send_buffer(fd);
        (HOT_CLASS..largest).find(|&class| class_size(class) >= takes).unwrap_or(largest)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn so_many_windows_are_wide_at_a_time() {
        let mut wide: Vec<_> = (0..MOST_WIDE).map(|_| Wide::default()).collect();
        let one_more = Wide::default();
        assert!(wide.iter().all(Wide::take) && wide.iter().all(Wide::take));
        assert!(!one_more.take() && !one_more.is_taken());
        drop(wide.pop());
        assert!(one_more.take());
        one_more.give_up();
        one_more.give_up();
        let again = Wide::default();
        assert!(again.take() && !one_more.take());
    }

    #[test]
    fn where_memory_ran_out_a_window_becomes_wide_only_after_long() {
        let wide = Wide::default();
        assert!(!wide.is_due(LONG - 1) && wide.is_due(LONG));
        wide.starve(LONG + 5);
        assert!(!wide.is_due(2 * LONG + 4) && wide.is_due(2 * LONG + 5));
        // The window went back to the smallest.
        assert!(!wide.is_due(LONG - 1) && wide.is_due(LONG));
    }
}

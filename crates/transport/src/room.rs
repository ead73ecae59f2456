//! How much a writer may be ahead: the outgoing window of an active connection grows when the ring is full, and is given back.
//!
//! Over RDMA a ring has one size, and nothing here changes it.

use std::sync::atomic::Ordering;

use crate::connection::Connection;
use crate::control::Control;
use crate::ring::{HOT_CLASS, Lie, class_size};
use crate::segment::{Outlet, Segment};
use crate::settings::settings;
use crate::{process, unix};

impl Connection {
    /// Whether a write would be taken by the ring, as poll(2) means it.
    pub(crate) fn ring_has_space(&self, segment: &Segment) -> bool {
        segment.outlet().has_room()
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
    /// `waits` not beyond what stays in cache, because [`Self::grow_for_sleeper`] follows.
    pub fn grow_for_asker(&self, fd: i32, waits: bool) {
        let Some(segment) = self.segment() else { return };
        if self.block.send_switched.load(Ordering::Acquire) == 0 || self.ring_has_space(segment) {
            return;
        }
        let Ok(_guard) = self.lock_sending(fd) else { return };
        let producer = segment.outlet();
        let _ = if waits {
            producer.grow(1, HOT_CLASS.min(settings().largest_class))
        } else {
            self.make_room(fd, &producer, segment.outgoing(), 1)
        };
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
        }
    }

    /// Opens a larger window if the ring is full: at once while it stays in cache, beyond that only if the reader
    /// has taken nothing since the ring was last full or changed its window: then the program may count on the kernel's
    /// capacity. Whoever would sleep asks [`Self::grow_for_sleeper`].
    pub(crate) fn make_room(
        &self,
        fd: i32,
        producer: &Outlet<'_>,
        control: &Control,
        wanted: u64,
    ) -> Result<bool, Lie> {
        let largest = settings().largest_class;
        let tail = control.tail();
        let stopped = self.block.full_at.swap(tail, Ordering::Relaxed) == tail;
        if producer.grow(wanted, HOT_CLASS.min(largest))? {
            return Ok(true);
        }
        if !stopped {
            return Ok(false);
        }
        self.grow_beyond_cache(fd, producer, wanted)
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

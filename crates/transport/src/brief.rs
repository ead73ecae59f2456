//! The usual call, in few steps: some bytes go through a ring that the peer shares, and nothing else happens. Neither side waits, ends or
//! goes back, and no lock is contended.
//!
//! Whatever else there is, or might be, is left as it was found to [`Connection::send`] and [`Connection::recv`], which know all of it,
//! and of which this is a part: what they do for such a call is done here, too, and in the same order.

use std::sync::atomic::Ordering;

use rustix::io::Errno;

use crate::arena::flag;
use crate::buffers::{MOST_BYTES, may_be_of_program};
use crate::connection::Connection;
use crate::process;
use crate::segment::InMemory;
use crate::stream::BLIND_PUSHES;
use crate::waiting::add;

/// The longest message that is sent so, in bytes: whatever is longer takes its time for the copy.
const LONGEST: usize = 4096;

/// Facts with which a call has more to do.
const UNUSUAL: u32 = flag::SHUT_WR
    | flag::SHUT_RD
    | flag::PEER_GONE
    | flag::RESET
    | flag::RETURNED
    | flag::BELLS_FIRST
    | flag::MOVING
    | flag::LOST
    | flag::OWES_DOWN;

impl Connection {
    /// As [`Self::send`], of all the `length` bytes at `source`. `None` if there is more to it: then nothing has been done.
    ///
    /// # Safety
    /// `source` is the application's, which vouches for it.
    #[inline]
    pub unsafe fn send_briefly(&self, fd: i32, source: *const u8, length: usize) -> Option<usize> {
        let segment = self.segment()?;
        let (out, back) = segment.ends_in_memory()?;
        if length == 0 || length > LONGEST || !may_be_of_program(source.addr(), length) {
            return None;
        }
        let block = self.block;
        let guard = block.send_lock.try_lock(process::thread())?;
        let pushes = block.blind_pushes.load(Ordering::Relaxed) + 1;
        if block.send_switched.load(Ordering::Relaxed) == 0
            || pushes >= BLIND_PUSHES
            || block.roomy.load(Ordering::Relaxed) != 0
            || self.is_unusual(&out, &back)
        {
            return None;
        }
        // SAFETY: the application vouches for its buffer; the window bounds are the ring's.
        let pushed = unsafe { out.push_whole(segment.known(), source, length) }.ok()?;
        if pushed.bytes == 0 {
            return None;
        }
        block.blind_pushes.store(pushes, Ordering::Relaxed);
        if pushed.ring {
            self.ring(fd, segment);
        }
        if pushed.lapped {
            // The peer's lie is found by the next call.
            let _ = self.widen(segment, &segment.outlet());
        }
        add(&block.ring_sent, length as u64);
        drop(guard);
        if segment.has_request() {
            // What was published just now may be what the peer no longer takes.
            self.mend_if_failing(fd);
        }
        Some(length)
    }

    /// As [`Self::recv`], up to `length` bytes to `target`, of what is in the ring; `EAGAIN` if there is nothing, and the call must not
    /// wait, as it never does if `at_once`. `None` if there is more to it: then nothing has been done.
    ///
    /// # Safety
    /// `target` is the application's, which vouches for it.
    #[inline]
    pub unsafe fn recv_briefly(
        &self,
        fd: i32,
        target: *mut u8,
        length: usize,
        at_once: bool,
    ) -> Option<Result<usize, Errno>> {
        let segment = self.segment()?;
        let (back, from) = segment.ends_in_memory()?;
        if length == 0 || length > MOST_BYTES || !may_be_of_program(target.addr(), length) {
            return None;
        }
        let block = self.block;
        let is_usual = || {
            block.recv_switched.load(Ordering::Relaxed) != 0
                && self.side_length() == 0
                && !self.is_unusual(&from, &back)
        };
        if from.control.is_empty() {
            // The rest after that: bytes of the ring may be moved to the side buffer.
            let says_so = is_usual() && !self.is_kernels_turn_next() && self.answers_blindly(at_once);
            return says_so.then_some(Err(Errno::AGAIN));
        }
        let _guard = block.recv_lock.try_lock(process::thread())?;
        if !is_usual() {
            return None;
        }
        // SAFETY: the application vouches for its buffer; the window bounds are the ring's.
        let popped = unsafe { from.pop(target, length) }.ok()?;
        if popped.bytes == 0 {
            return None;
        }
        if popped.ring {
            self.ring(fd, segment);
        }
        if popped.emptied {
            self.drain(fd, segment);
        }
        add(&block.ring_received, popped.bytes as u64);
        self.blind_reads.store(0, Ordering::Relaxed);
        Some(Ok(popped.bytes))
    }

    /// Whether anything has happened to either direction but that bytes have moved.
    #[inline]
    fn is_unusual(&self, one: &InMemory<'_>, other: &InMemory<'_>) -> bool {
        self.block.has(UNUSUAL)
            || self.block.is_unwanted()
            || one.control.end() | other.control.end() != 0
            || self.is_closed()
    }
}

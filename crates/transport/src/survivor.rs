//! What a process leaves behind that is killed in the middle of a call, on a connection that it shares with others.
//!
//! Whoever gets a lock that its owner died with ([`Guard::was_left`]) finds every word as the dead process last stored
//! it, and each store of the ring's leaves it in order. Two things may have happened of which no word tells: bytes went
//! from or to the kernel's socket buffers before they could be counted, and a bell was owed but not sent. The kernel
//! has counted the bytes ([`tcp::counts`]), those of greetings too; a bell too many does no harm. Of an `AF_UNIX` connection it
//! counts nothing: where bytes may be missing, the connection ends by a reset.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use crate::arena::flag;
use crate::connection::Connection;
use crate::lock::Guard;
use crate::segment::{SIDE_BYTES, Segment};
use crate::waiting::{self, add};
use crate::{process, tcp};

impl Connection {
    /// Takes the receive lock, and puts in order what a dead owner left. Fails with `EDEADLK` as
    /// [`Lock::lock`](crate::lock::Lock::lock) does.
    #[inline]
    pub(crate) fn lock_receiving(&self, fd: i32) -> Result<Guard<'_>, Errno> {
        let guard = self.block.recv_lock.lock(process::thread())?;
        if guard.was_left() {
            self.inherit_receiving(fd);
        }
        Ok(guard)
    }

    /// As [`Self::lock_receiving`], for the send lock.
    #[inline]
    pub(crate) fn lock_sending(&self, fd: i32) -> Result<Guard<'_>, Errno> {
        let guard = self.block.send_lock.lock(process::thread())?;
        if guard.was_left() {
            self.inherit_sending(fd);
        }
        Ok(guard)
    }

    #[cold]
    fn inherit_receiving(&self, fd: i32) {
        let Some(segment) = self.segment() else { return };
        if self.is_closed() {
            return;
        }
        if segment.link().is_some() {
            return self.inherit_frames(fd, segment);
        }
        self.block.raise(flag::INHERITED);
        if self.is_unix() {
            return self.inherit_uncounted(fd, segment);
        }
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let Ok(read) = tcp::bytes_read(unsafe { BorrowedFd::borrow_raw(fd) }) else { return };
        self.inherit_hearing(segment, read);
        let block = self.block;
        let counted =
            block.tcp_received.load(Ordering::Relaxed).wrapping_add(block.drained.load(Ordering::Relaxed));
        let missing = read.wrapping_sub(counted).wrapping_sub(segment.greeted()[1]);
        let switched = block.recv_switched.load(Ordering::Acquire) != 0;
        let left = if switched { 0 } else { waiting::tcp_left(&self.socket(fd, segment)) };
        let ours = missing.min(left);
        add(&block.tcp_received, ours);
        add(&block.drained, missing - ours);
        let absorbing = block.absorbing.load(Ordering::Relaxed);
        if absorbing != 0 {
            let moved = block.tcp_received.load(Ordering::Relaxed).saturating_sub(absorbing - 1);
            let end = block.absorbing_at.load(Ordering::Relaxed) + moved;
            block.set_side_end(end.min(SIDE_BYTES as u64));
            block.absorbing.store(0, Ordering::Relaxed);
        }
        waiting::note_taken(&self.socket(fd, segment));
        if segment.incoming().space_armed.0.has_sleepers() {
            self.ring(fd, segment);
        }
    }

    /// As [`Self::inherit_receiving`] on `AF_UNIX`, where the kernel counts no bytes. A bell that was taken and not counted is looked
    /// for in vain, and so harmless.
    fn inherit_uncounted(&self, fd: i32, segment: &Segment) {
        let block = self.block;
        let is_counted = block.recv_switched.load(Ordering::Acquire) != 0 || self.needs_no_count(segment);
        if !is_counted || block.absorbing.load(Ordering::Relaxed) != 0 {
            return self.lose(fd);
        }
        if segment.incoming().space_armed.0.has_sleepers() {
            self.ring(fd, segment);
        }
    }

    /// Whether all that comes from the kernel's socket, and goes there, is the application's, and stays so.
    fn needs_no_count(&self, segment: &Segment) -> bool {
        let is_back = self.block.has(flag::RETURNED) && !self.block.has(flag::BELLS_FIRST);
        is_back || !segment.is_ready() && segment.refuse()
    }

    #[cold]
    fn inherit_sending(&self, fd: i32) {
        let Some(segment) = self.segment().filter(|segment| segment.link().is_none()) else { return };
        if self.is_closed() {
            return;
        }
        self.block.raise(flag::INHERITED);
        if self.block.has(flag::MOVING) {
            // Nobody knows how much of it the peer has.
            self.block.come_back();
            return self.lose(fd);
        }
        if self.block.send_switched.load(Ordering::Acquire) != 0 {
            if segment.outgoing().data_armed.0.has_sleepers() {
                self.ring(fd, segment);
            }
            return;
        }
        if self.is_unix() {
            if !self.needs_no_count(segment) {
                self.lose(fd);
            }
            return;
        }
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        if let Ok(counts) = tcp::counts(unsafe { BorrowedFd::borrow_raw(fd) }) {
            self.inherit_greeting(segment, counts.sent);
            let sent = counts.sent.saturating_sub(segment.greeted()[0]);
            self.block.tcp_sent.store(sent, Ordering::Relaxed);
        }
    }
}

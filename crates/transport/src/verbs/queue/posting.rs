//! Posting requests to a queue pair, and waiting until they have been done.

#[cfg(test)]
mod tests;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::super::ffi::{self, Completion, Piece, SendRequest};
use super::super::manager::Meeting;
use super::{DEPTH, QueuePair};
use crate::lock::Guard;
use crate::process;
use crate::uninterrupted::Uninterrupted;

/// One in so many is signalled.
const SIGNAL_EVERY: u64 = 32;
/// How long a device may take for the next completion of what has been posted, and to deliver what the peer has posted.
pub(in crate::verbs) const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// After so long without a completion the device is asked whether there is a queue pair still.
const UNANSWERED: Duration = Duration::from_millis(50);

impl QueuePair {
    /// Whether some requests could be posted without waiting, as far as completions have been taken.
    pub(in crate::verbs) fn has_room(&self) -> bool {
        self.posted.load(Ordering::Relaxed) - self.completed.load(Ordering::Relaxed) < DEPTH / 2
    }

    /// Begins to post `count` requests: waits until there is room for them.
    pub(in crate::verbs) fn begin(&self, count: u64) -> Result<Poster<'_>, Errno> {
        if !self.is_ours() || self.is_broken() || !self.connected.load(Ordering::Acquire) {
            return Err(Errno::CONNRESET);
        }
        let mut wait = Wait::default();
        loop {
            let poster = self.hold()?;
            if poster.has_room_for(count) {
                return Ok(poster);
            }
            poster.take_completions();
            if self.is_broken() {
                return Err(Errno::CONNRESET);
            }
            if poster.has_room_for(count) {
                return Ok(poster);
            }
            drop(poster);
            wait.pause(self);
        }
    }

    /// Takes the right to post. No signal handler of this thread runs meanwhile: it might use this very queue pair, or another one that
    /// shares a lock of the driver's with it.
    fn hold(&self) -> Result<Poster<'_>, Errno> {
        let uninterrupted = Uninterrupted::begin();
        let guard = self.posting.lock(process::thread())?;
        Ok(Poster { pair: self, _guard: guard, _uninterrupted: uninterrupted })
    }

    /// Waits until request `id` and all before it have been done. Fails with `ECONNRESET` if the queue pair has, and with
    /// `EPIPE` once the peer `has_gone`: then nobody answers, and the device would try again for a while.
    pub(in crate::verbs) fn wait_for(&self, id: u64, has_gone: impl Fn() -> bool) -> Result<(), Errno> {
        let mut wait = Wait::default();
        loop {
            if self.completed.load(Ordering::Acquire) >= id {
                return Ok(());
            }
            if wait.looks % 64 == 63 && has_gone() {
                return Err(Errno::PIPE);
            }
            if self.is_broken() {
                return Err(Errno::CONNRESET);
            }
            self.hold()?.take_completions();
            wait.pause(self);
        }
    }

    /// Whether request `id` and all before it have been done, or never will be. Without waiting.
    pub(in crate::verbs) fn has_done(&self, id: u64) -> bool {
        if self.completed.load(Ordering::Acquire) < id {
            let uninterrupted = Uninterrupted::begin();
            if let Some(guard) = self.posting.try_lock(process::thread()) {
                Poster { pair: self, _guard: guard, _uninterrupted: uninterrupted }.take_completions();
            }
        }
        self.completed.load(Ordering::Acquire) >= id || self.is_broken()
    }

    /// The last request posted.
    pub(in crate::verbs) fn last_posted(&self) -> u64 {
        self.posted.load(Ordering::Relaxed)
    }
}

/// A wait for completions. A RoCE queue pair fails by itself when its peer is out of reach, unless its device is removed: then
/// nothing completes any more; or the peer's asks for time, again and again (RNR NAK, which this library's never does). One of iWARP keeps
/// trying as long as TCP does, minutes; and Soft-iWARP does not complete what is posted after the peer has gone.
#[derive(Default)]
struct Wait {
    looks: u32,
    /// What had been completed at the last look, and until when there must be more.
    completed: u64,
    deadline: Option<Instant>,
    next_question: Option<Instant>,
}

impl Wait {
    fn pause(&mut self, pair: &QueuePair) {
        self.looks += 1;
        if !self.looks.is_multiple_of(64) {
            return std::hint::spin_loop();
        }
        let now = Instant::now();
        if now > *self.next_question.get_or_insert(now + UNANSWERED) {
            self.next_question = None;
            if !pair.is_alive() {
                pair.broken.store(true, Ordering::SeqCst);
            }
        }
        let completed = pair.completed.load(Ordering::Relaxed);
        if completed != self.completed {
            self.completed = completed;
            self.deadline = None;
        }
        if now > *self.deadline.get_or_insert(now + LONGEST_WAIT) {
            pair.fail_unanswered();
        }
        if pair.meeting.as_ref().is_some_and(Meeting::is_over) {
            pair.broken.store(true, Ordering::SeqCst);
        }
        rustix::thread::sched_yield();
    }
}

/// The right to post.
pub(in crate::verbs) struct Poster<'a> {
    pair: &'a QueuePair,
    // Unlocked in this order.
    _guard: Guard<'a>,
    _uninterrupted: Uninterrupted,
}

/// Where one end of a transfer is.
#[derive(Clone, Copy, Debug)]
pub(in crate::verbs) struct Spot {
    /// Its address.
    pub(in crate::verbs) address: u64,
    /// The key of its region.
    pub(in crate::verbs) key: u32,
}

/// One request: which bytes here, and where there.
#[derive(Clone, Copy, Debug)]
pub(in crate::verbs) struct Request {
    operation: u32,
    flags: u32,
    here: Spot,
    there: Spot,
    length: usize,
}

impl Request {
    /// RDMA WRITE of `length` bytes, not carried by the request itself.
    pub(in crate::verbs) fn write(from: Spot, to: Spot, length: usize) -> Self {
        Self { operation: ffi::RDMA_WRITE, flags: 0, here: from, there: to, length }
    }

    /// RDMA READ of `length` bytes, signalled.
    pub(in crate::verbs) fn read(into: Spot, from: Spot, length: usize) -> Self {
        Self { operation: ffi::RDMA_READ, flags: ffi::SIGNALED, here: into, there: from, length }
    }

    /// The same, carried by the request itself if it is a WRITE of at most `limit` bytes.
    pub(in crate::verbs) fn inline(mut self, limit: usize) -> Self {
        if self.operation == ffi::RDMA_WRITE && self.length <= limit {
            self.flags |= ffi::INLINE;
        }
        self
    }
}

impl Poster<'_> {
    /// RDMA READ of `length` bytes, signalled. Its number.
    pub(in crate::verbs) fn read(&self, into: Spot, from: Spot, length: usize) -> Result<u64, Errno> {
        self.post([Request::read(into, from, length)])
    }

    /// Bytes that a WRITE may have to be carried by its request.
    pub(in crate::verbs) fn inline(&self) -> usize {
        self.pair.inline
    }

    /// Posts requests in one call, which costs a device, or the kernel, one look at the queue instead of one for each. The number
    /// of the last.
    pub(in crate::verbs) fn post<const COUNT: usize>(&self, wanted: [Request; COUNT]) -> Result<u64, Errno> {
        let first = self.pair.posted.load(Ordering::Relaxed) + 1;
        let mut pieces = wanted.map(|Request { here, length, .. }| Piece {
            address: here.address,
            length: length as u32,
            key: here.key,
        });
        let mut requests: [SendRequest; COUNT] = std::array::from_fn(|index| {
            let Request { operation, flags, there, .. } = wanted[index];
            let id = first + index as u64;
            SendRequest {
                id,
                next: std::ptr::null_mut(),
                pieces: std::ptr::null_mut(),
                count: 1,
                operation,
                flags: flags | if id.is_multiple_of(SIGNAL_EVERY) { ffi::SIGNALED } else { 0 },
                immediate: 0,
                remote: there.address,
                remote_key: there.key,
                rest: [0; 9],
            }
        });
        // From the last to the first: who is pointed at does not change any more.
        let mut next = std::ptr::null_mut();
        for (request, piece) in requests.iter_mut().zip(&mut pieces).rev() {
            request.pieces = piece;
            request.next = next;
            next = request;
        }
        let Some(request) = std::ptr::NonNull::new(next) else { return Ok(first - 1) };
        // SAFETY: a live queue pair; requests and pieces live until the call returns, and the memory that they name is registered, or
        // copied now.
        if unsafe { ffi::post_send(self.pair.qp, request.as_ptr()) } != 0 {
            self.pair.broken.store(true, Ordering::SeqCst);
            return Err(Errno::CONNRESET);
        }
        let last = first + COUNT as u64 - 1;
        self.pair.posted.store(last, Ordering::Relaxed);
        Ok(last)
    }

    fn has_room_for(&self, count: u64) -> bool {
        let completed = self.pair.completed.load(Ordering::Relaxed);
        self.pair.posted.load(Ordering::Relaxed) + count - completed <= DEPTH
    }

    fn take_completions(&self) {
        let mut list = [Completion::default(); 16];
        // SAFETY: a live completion queue.
        let count = unsafe { ffi::poll_cq(self.pair.cq, &mut list) };
        if count < 0 {
            self.pair.broken.store(true, Ordering::SeqCst);
        }
        for done in &list[..usize::try_from(count).unwrap_or(0)] {
            match done.status {
                0 => self.pair.completed.store(done.id, Ordering::Release),
                ffi::RETRIES_EXCEEDED => self.pair.fail_unanswered(),
                _ => self.pair.broken.store(true, Ordering::SeqCst),
            }
        }
    }
}

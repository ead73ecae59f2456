//! The ring that the peer writes: what has arrived in it, and what the application has taken.
//!
//! Nobody tells when a message arrives. Whoever wants to know *scans*: goes on from message to message as far as they are
//! there, and raises the incoming `head` by their bytes. Any thread may; who reads bytes holds the receive lock.
//!
//! ```text
//!   consumed ────── scanned ────── (arrives)        positions in the ring
//!   tail     ────── head                            the same in the stream
//! ```

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::board::{BOARD_BYTES, Board, Figures, Place};
use super::message::{Kind, Message, Room};
use crate::control::{Control, end};
use crate::lock::Lock;
use crate::process;
use crate::ring::Lie;

/// A place in the ring that seems to be so far ahead of another is behind it: half of what can be told apart.
const BEHIND: u64 = 1 << 34;

/// The receiving half of a link.
#[derive(Debug)]
pub(super) struct Inbox {
    place: Place,
    pub(super) room: Room,
    /// How far the ring has been looked through: bytes of the stream in the upper half, eighths of bytes of the ring in the
    /// lower.
    scanned: AtomicU64,
    /// Bytes taken of the message that is next. Under the receive lock.
    within: AtomicU64,
    /// Held while [`Self::scanned`] moves on.
    scanning: Lock,
    lied: AtomicBool,
    /// Nothing that arrives counts any more.
    frozen: AtomicBool,
}

impl Inbox {
    /// Nothing has arrived in a ring of `size` bytes.
    ///
    /// # Safety
    /// The memory at `place` stays mapped as long as it is used.
    pub(super) unsafe fn new(place: Place, size: u64) -> Self {
        // SAFETY: inside the segment.
        let ring = unsafe { place.inbox.add(BOARD_BYTES as usize) };
        Self {
            place,
            // SAFETY: the caller's promise.
            room: unsafe { Room::new(ring, size) },
            scanned: AtomicU64::new(0),
            within: AtomicU64::new(0),
            scanning: Lock::new(),
            lied: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
        }
    }

    /// What the peer writes in front of the ring.
    pub(super) fn board(&self) -> &Board {
        // SAFETY: the inbox begins with a board of atomics, aligned to a page.
        unsafe { self.place.inbox.cast::<Board>().as_ref() }
    }

    /// What the peer reads.
    pub(super) fn figures(&self) -> &Figures {
        // SAFETY: inside the page, and aligned.
        let figures = unsafe { self.place.control.add(self.place.figures as usize) };
        // SAFETY: all atomics.
        unsafe { figures.cast::<Figures>().as_ref() }
    }

    /// Both halves of [`Self::scanned`], as positions not before `stream` and `ring`.
    fn unpack(word: u64, stream: u64, ring: u64) -> (u64, u64) {
        let stream = stream + u64::from(((word >> 32) as u32).wrapping_sub(stream as u32));
        let ring = ring + u64::from((word as u32).wrapping_sub((ring / 8) as u32)) * 8;
        (stream, ring)
    }

    /// Looks for messages that have arrived, and tells `control` of them. By any thread, without a direction's lock.
    pub(super) fn scan(&self, control: &Control) {
        if self.is_frozen() || !self.has_news(control) {
            return;
        }
        // One at a time: nobody is in the middle of it when it is frozen. A signal handler goes on where its own thread was.
        let _one = self.scanning.lock(process::thread());
        if !self.is_frozen() {
            self.scan_alone(control);
        }
    }

    /// Whether there may be something to tell `control`.
    fn has_news(&self, control: &Control) -> bool {
        let consumed = self.figures().consumed.load(Ordering::Acquire);
        let (_, position) = Self::unpack(self.scanned.load(Ordering::Acquire), 0, consumed);
        self.bells() > control.rung.0.count.load(Ordering::Relaxed)
            || position.wrapping_sub(consumed) >= self.room.size
            || self.room.message(position) != Ok(None)
    }

    /// Bells that the peer has counted.
    fn bells(&self) -> u64 {
        self.board().bells.read().map_or(0, |words| words[0])
    }

    /// The caller holds [`Self::scanning`], and nothing is frozen.
    fn scan_alone(&self, control: &Control) {
        // First: what these bells announced has arrived before their count.
        control.rung.0.count.fetch_max(self.bells(), Ordering::AcqRel);
        if self.try_scan(control).is_err() {
            self.lied.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the peer wrote something impossible.
    pub(super) fn peer_lied(&self) -> bool {
        self.lied.load(Ordering::Relaxed)
    }

    fn try_scan(&self, control: &Control) -> Result<(), Lie> {
        loop {
            let word = self.scanned.load(Ordering::Acquire);
            // Neither is ahead of what has been scanned; both are read after it was, so they may be ahead of `word`.
            let consumed = self.figures().consumed.load(Ordering::Acquire);
            let (_, position) = Self::unpack(word, 0, consumed);
            let ahead = position.wrapping_sub(consumed);
            if ahead > BEHIND {
                if self.scanned.load(Ordering::Acquire) == word {
                    // Another process has read on.
                    return Ok(());
                }
                continue;
            }
            // A sender never fills the ring to the last byte.
            if ahead >= self.room.size {
                return Err(Lie);
            }
            let Some(message) = self.room.message(position)? else { return Ok(()) };
            let mut stream = (word >> 32) as u32;
            match message.kind {
                Kind::Data => stream = stream.wrapping_add(message.length as u32),
                Kind::Pad => {}
                Kind::Switch => {
                    let count = self.room.control_payload(position, message);
                    control.rare.0.switched_at.store(count, Ordering::SeqCst);
                }
                Kind::End => {
                    let bits = self.room.control_payload(position, message) as u32;
                    control.rare.0.end.fetch_or(bits & end::OF_STREAM, Ordering::SeqCst);
                }
            }
            let ring = ((position + message.span) / 8) as u32;
            let next = u64::from(stream) << 32 | u64::from(ring);
            if self.scanned.compare_exchange(word, next, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                let tail = control.tail();
                control.head.0.fetch_max(Self::unpack(next, tail, 0).0, Ordering::AcqRel);
            }
        }
    }

    /// Copies up to `length` bytes that lie `skip` bytes ahead to `target`, and leaves them in the ring.
    ///
    /// # Safety
    /// `target` is writable for `length` bytes.
    pub(super) unsafe fn peek(
        &self,
        control: &Control,
        skip: u64,
        target: *mut u8,
        length: usize,
    ) -> Result<usize, Lie> {
        let available = control.used().saturating_sub(skip);
        let count = (length as u64).min(available);
        let mut done = 0;
        let mut skip = skip + self.within.load(Ordering::Relaxed);
        let start = self.figures().consumed.load(Ordering::Relaxed);
        let mut position = start;
        while done < count {
            // What was counted may have been written over since.
            if position - start >= self.room.size {
                return Err(Lie);
            }
            let message = self.room.message(position)?.ok_or(Lie)?;
            let data = if message.kind == Kind::Data { message.length } else { 0 };
            if skip < data {
                let step = (data - skip).min(count - done);
                let (offset, _) = self.room.locate(position);
                let from = self.room.at(offset + 4 + skip);
                let to = target.wrapping_add(done as usize);
                // SAFETY: a message that has been checked lies within the ring; done + step ≤ length.
                unsafe { std::ptr::copy_nonoverlapping(from, to, step as usize) };
                done += step;
                skip = 0;
            } else {
                skip -= data;
            }
            position += message.span;
        }
        Ok(count as usize)
    }

    /// Drops `count` bytes that [`Self::peek`] has seen. The position in the ring behind them.
    pub(super) fn drop_bytes(&self, control: &Control, count: u64) -> Result<u64, Lie> {
        if count > control.used() {
            return Err(Lie);
        }
        let figures = self.figures();
        let start = figures.consumed.load(Ordering::Relaxed);
        let mut position = start;
        let mut left = count + self.within.load(Ordering::Relaxed);
        // Control messages behind the last byte go, too, if they are there.
        while let Some(Message { kind, length, span }) = self.room.message(position)? {
            let data = if kind == Kind::Data { length } else { 0 };
            if data > left {
                break;
            }
            if position - start >= self.room.size {
                return Err(Lie);
            }
            left -= data;
            self.room.clear(position, span);
            position += span;
            if left == 0 && kind == Kind::Data {
                break;
            }
        }
        self.within.store(left, Ordering::Relaxed);
        let tail = control.tail() + count;
        figures.consumed_stream.store(tail, Ordering::Release);
        figures.consumed.store(position, Ordering::Release);
        control.tail.0.store(tail, Ordering::Release);
        Ok(position)
    }

    /// Bytes of the ring that hold messages not yet consumed.
    pub(super) fn scanned_ahead(&self, consumed: u64) -> u64 {
        let (_, scanned) = Self::unpack(self.scanned.load(Ordering::Acquire), 0, consumed);
        scanned - consumed
    }

    /// Whether [`Self::freeze`] was called.
    pub(super) fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Acquire)
    }

    /// Looks a last time for what has arrived: what comes later does not count.
    pub(super) fn freeze(&self, control: &Control) {
        let _one = self.scanning.lock(process::thread());
        self.scan_alone(control);
        self.frozen.store(true, Ordering::SeqCst);
    }
}

//! The ring that the peer writes: what has arrived in it, and what the application has taken.
//!
//! ```text
//!   consumed ────── scanned ────── (arrives)        positions in the ring
//!   tail     ────── head                            the same in the stream
//! ```
//!
//! Any thread scans ([`super::scan`]); who reads bytes holds the receive lock.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::board::{BOARD_BYTES, Board, Figures, Place};
use super::message::{Kind, Message, Room};
use super::scan::{Arrivals, Scan};
use crate::control::{Control, end};
use crate::ring::Lie;

/// The receiving half of a link.
#[derive(Debug)]
pub(crate) struct Inbox {
    place: Place,
    pub(super) room: Room,
    scan: Scan,
    /// Bytes taken of the message that is next. Under the receive lock.
    within: AtomicU64,
    lied: AtomicBool,
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
            scan: Scan::new(),
            within: AtomicU64::new(0),
            lied: AtomicBool::new(false),
        }
    }

    /// What the peer writes in front of the ring.
    pub(super) fn board(&self) -> &Board {
        // SAFETY: the inbox begins with a board of atomics, aligned to a page.
        unsafe { self.place.inbox.cast::<Board>().as_ref() }
    }

    /// What the peer reads.
    pub(super) fn figures(&self) -> &Figures {
        // SAFETY: the page begins with figures, all atomics.
        unsafe { self.place.figures.cast::<Figures>().as_ref() }
    }

    /// Looks for messages that have arrived, and tells `control` of them. By any thread, without a lock.
    pub(crate) fn scan(&self, control: &Control) {
        if self.is_frozen() {
            return;
        }
        // First: what these bells announced has arrived before their count.
        let bells = self.board().bells.read().map_or(0, |words| words[0]);
        if bells > control.rung.0.count.load(Ordering::Relaxed) {
            control.rung.0.count.fetch_max(bells, Ordering::AcqRel);
        }
        self.note(self.scan.go_on(self, control));
    }

    fn note(&self, scanned: Result<(), Lie>) {
        if scanned.is_err() {
            self.lied.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the peer wrote something impossible.
    pub(crate) fn peer_lied(&self) -> bool {
        self.lied.load(Ordering::Relaxed)
    }

    /// Copies up to `length` bytes that lie `skip` bytes ahead to `target`, and leaves them in the ring.
    ///
    /// # Safety
    /// `target` is writable for `length` bytes.
    pub(crate) unsafe fn peek(
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
            let data = message.data();
            if skip < data {
                let step = (data - skip).min(count - done);
                let to = target.wrapping_add(done as usize);
                // SAFETY: done + step ≤ length, and skip + step ≤ data.
                unsafe { self.room.copy(position, message, skip, to, step) };
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
        while let Some(message) = self.room.message(position)? {
            let (data, span) = (message.data(), message.span);
            if data > left {
                break;
            }
            if position - start >= self.room.size {
                return Err(Lie);
            }
            left -= data;
            self.room.clear(position, span);
            position += span;
            if left == 0 && data > 0 {
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

    /// Position in the ring behind all that has arrived.
    pub(super) fn arrived(&self) -> u64 {
        let consumed = self.figures().consumed.load(Ordering::Acquire);
        consumed + self.scan.ahead_of(consumed)
    }

    /// Bytes of the ring that hold messages not yet consumed.
    pub(super) fn scanned_ahead(&self, consumed: u64) -> u64 {
        self.scan.ahead_of(consumed)
    }

    /// Whether [`Self::freeze`] was called.
    pub(super) fn is_frozen(&self) -> bool {
        self.scan.is_frozen()
    }

    /// Looks a last time for what has arrived: what comes later does not count. The caller holds the receive lock.
    pub(super) fn freeze(&self, control: &Control) {
        self.note(self.scan.freeze(self, control));
    }
}

/// A message that has arrived.
#[derive(Clone, Copy)]
pub(crate) struct Arrival {
    message: Message,
    /// That of a control message.
    payload: u64,
}

impl Arrivals for Inbox {
    type Message = Arrival;

    fn size(&self) -> u64 {
        self.room.size
    }

    fn consumed(&self) -> u64 {
        self.figures().consumed.load(Ordering::Acquire)
    }

    fn message(&self, position: u64) -> Result<Option<Arrival>, Lie> {
        let Some(message) = self.room.message(position)? else { return Ok(None) };
        let payload = match message.kind {
            Kind::Switch | Kind::End => self.room.control_payload(position, message),
            Kind::Data | Kind::Packed | Kind::Pad => 0,
        };
        Ok(Some(Arrival { message, payload }))
    }

    fn extent(&self, Arrival { message, .. }: Arrival) -> (u64, u64) {
        (message.data(), message.span)
    }

    fn heed(&self, Arrival { message, payload }: Arrival, control: &Control) {
        let rare = &control.rare.0;
        match message.kind {
            Kind::Switch => rare.switched_at.store(payload, Ordering::SeqCst),
            Kind::End => drop(rare.end.fetch_or(payload as u32 & end::OF_STREAM, Ordering::SeqCst)),
            Kind::Data | Kind::Packed | Kind::Pad => {}
        }
    }
}

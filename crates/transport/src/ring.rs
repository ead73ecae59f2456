//! One direction of a stream through shared memory: a byte ring that grows by moving house.
//!
//! Positions count bytes since the direction's start and never wrap (2⁶⁴ bytes). Bytes live in a *window*, one of
//! [`CLASSES`] regions of growing size. The producer starts small, so that a busy connection stays in the
//! processor's cache and an idle one costs a few pages. When it runs out of space it may open a larger
//! window at its current position; the consumer follows when it gets there:
//!
//! ```text
//!   position   tail        start of class 2        head
//!                 │                │                 │
//!   class 0 ──────┼■■■■■■■■■■■■■■■■│                 │      window left behind
//!   class 2       │                │■■■■■■■■■■■■■■■■■│      window written to
//! ```
//!
//! A byte at position `p` lies in the window with the greatest start ≤ `p`, at `(p − start) mod size`. The producer
//! only ever opens a larger window, so it never rewrites the start of one that the consumer still needs. It
//! returns to the smallest when the ring is empty, and nobody needs any. So there is neither lock nor version.
//!
//! Each side is used by one thread at a time (the direction's lock). Every index that the peer can write is
//! checked or masked before memory is touched: a lie yields [`Lie`], never an access out of bounds.

use thiserror::Error;

use crate::control::{Control, UNUSED};
use crate::sync::{AtomicU64, Ordering};

/// Sizes of the windows: 8 KiB, 32 KiB, 128 KiB, 512 KiB, 2 MiB, 8 MiB.
pub const CLASSES: u32 = if cfg!(loom) { 2 } else { 6 };

/// Windows up to this class are taken whenever there is pressure; beyond it only for streams that have moved much, or while the
/// consumer takes nothing: a program may count on the kernel's buffers.
pub const HOT_CLASS: u32 = 3;

/// The window of streams that have moved much: larger than a processor's own caches. In a smaller one the producer writes to
/// lines that the consumer's cache still has, and each has to be taken away from there first.
pub const WIDE_CLASS: u32 = HOT_CLASS + 1;

/// Bytes of a larger window that get memory at a time, when the producer first gets there: zeroed pages cost ten times what it
/// costs to copy as much, and most of a window that was opened for one burst is never used.
pub const STEP: u64 = 256 << 10;

/// A model checker needs a window for each of its few bytes.
const SMALLEST: u64 = if cfg!(loom) { 8 } else { 8192 };

/// Size in bytes of a window of `class`.
pub const fn class_size(class: u32) -> u64 {
    SMALLEST << (2 * class)
}

/// Where the window of `class` begins in a direction's memory, in bytes.
pub const fn class_offset(class: u32) -> u64 {
    let mut offset = 0;
    let mut smaller = 0;
    while smaller < class {
        offset += class_size(smaller);
        smaller += 1;
    }
    offset
}

/// Bytes of (sparse) memory that a direction's windows span.
pub const DIRECTION_BYTES: u64 = class_offset(CLASSES);

/// Bytes that a direction holds at most, in all of its windows: as many as the largest has.
const MOST_UNREAD: u64 = class_size(CLASSES - 1);

/// The peer wrote something impossible into the control words.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the peer's ring indices are impossible")]
pub struct Lie;

/// A direction's memory of [`DIRECTION_BYTES`].
///
/// # Safety
/// `put` and `take` must be in bounds for every range below [`DIRECTION_BYTES`], and must not form references to
/// the memory: the peer may write to it at any time.
pub unsafe trait Memory {
    /// Copies `length` bytes from `source` to `offset`.
    ///
    /// # Safety
    /// `source` is readable for `length` bytes; `offset + length` ≤ [`DIRECTION_BYTES`].
    unsafe fn put(&self, offset: u64, source: *const u8, length: usize);
    /// Copies `length` bytes from `offset` to `target`.
    ///
    /// # Safety
    /// `target` is writable for `length` bytes; `offset + length` ≤ [`DIRECTION_BYTES`].
    unsafe fn take(&self, offset: u64, target: *mut u8, length: usize);
    /// Makes `length` bytes at `offset` safe to write to: memory is there. False if there is none. Both are multiples of the
    /// smallest window.
    fn populate(&self, offset: u64, length: u64) -> bool;
    /// Gives the memory of the window of `class` back to the system.
    fn discard(&self, class: u32);
}

/// A window and the position at which it begins.
#[derive(Clone, Copy)]
struct Window {
    start: u64,
    class: u32,
}

impl Window {
    /// The window that holds `position`, and where the next one begins ([`UNUSED`] if there is none). A larger window
    /// that begins where a smaller one does has replaced it.
    fn holding(control: &Control, position: u64) -> Result<(Self, u64), Lie> {
        let mut holding = None;
        let mut next = UNUSED;
        for (class, start) in (0..).zip(&control.rare.0.window_start) {
            let start = start.load(Ordering::Acquire);
            if start > position {
                next = next.min(start);
            } else if holding.is_none_or(|Window { start: other, .. }| other <= start) {
                holding = Some(Self { start, class });
            }
        }
        Ok((holding.ok_or(Lie)?, next))
    }

    /// The window that is written to now.
    fn current(control: &Control) -> Result<Self, Lie> {
        Self::holding(control, control.head()).map(|(window, _)| window)
    }

    /// Bytes that fit into this window, the current one, while the consumer has got to `tail`.
    fn space(self, control: &Control, tail: u64) -> Result<u64, Lie> {
        // The window came first: its start is never ahead of a head that is read after it.
        let head = control.head();
        let used = head.checked_sub(tail.max(self.start)).ok_or(Lie)?;
        let space = self.size().checked_sub(used).ok_or(Lie)?;
        Ok(space.min(MOST_UNREAD.saturating_sub(head.wrapping_sub(tail))))
    }

    fn size(self) -> u64 {
        class_size(self.class)
    }

    /// Offset in the direction's memory of `position`, and the bytes from there to the window's end.
    fn locate(self, position: u64) -> (u64, u64) {
        let within = position.wrapping_sub(self.start) & (self.size() - 1);
        (class_offset(self.class) + within, self.size() - within)
    }
}

/// The sending end.
#[derive(Debug)]
pub struct Producer<'a, M> {
    control: &'a Control,
    memory: &'a M,
    known: &'a Known,
}

/// What the producers of a direction in one process remember.
#[derive(Debug)]
pub struct Known {
    /// A tail that has been seen: never ahead of the true one. Each look at that costs both ends a cache line's way.
    tail: AtomicU64,
    /// A [`Backing`].
    backing: AtomicU64,
}

impl Known {
    /// Of a direction that has just begun, or whose past is not known.
    pub fn new() -> Self {
        Self { tail: AtomicU64::new(0), backing: AtomicU64::new(0) }
    }
}

impl Default for Known {
    fn default() -> Self {
        Self::new()
    }
}

/// How much of a window larger than [`HOT_CLASS`] has memory. In one word, so that a fork sees all of it; with the window, which
/// another process that has the connection may have left.
///
/// ```text
/// bit 63 ─────────────── 10 9 ── 7 6 ──── 0
///     start, lowest 54 bits  class   steps
/// ```
#[derive(Clone, Copy, Debug)]
struct Backing(u64);

impl Backing {
    fn new(window: Window, bytes: u64) -> Self {
        Self(window.start << 10 | u64::from(window.class) << 7 | (bytes / STEP))
    }

    /// Bytes from the window's start. None if nothing is known of `window`.
    fn bytes(self, window: Window) -> Option<u64> {
        let steps = self.0 & 127;
        (self.0 == Self::new(window, steps * STEP).0).then_some(steps * STEP)
    }
}

/// The receiving end.
#[derive(Debug)]
pub struct Consumer<'a, M> {
    control: &'a Control,
    memory: &'a M,
}

/// What [`Producer::push`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pushed {
    /// Bytes taken from the source.
    pub bytes: usize,
    /// A sleeping consumer has to be rung for.
    pub ring: bool,
    /// The end of a window was reached that is neither the smallest nor larger than [`HOT_CLASS`].
    pub lapped: bool,
}

/// What [`Consumer::pop`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Popped {
    /// Bytes given to the target.
    pub bytes: usize,
    /// A sleeping producer has to be rung for.
    pub ring: bool,
    /// Nothing was left when this call ended.
    pub emptied: bool,
}

impl<'a, M: Memory> Producer<'a, M> {
    /// The sending end of `control`. The caller holds the direction's send lock. `known` belongs to this direction alone.
    pub fn new(control: &'a Control, memory: &'a M, known: &'a Known) -> Self {
        Self { control, memory, known }
    }

    fn current(&self) -> Result<Window, Lie> {
        Window::current(self.control)
    }

    /// Bytes that fit now.
    #[cfg(test)]
    pub(crate) fn space(&self) -> Result<u64, Lie> {
        self.current()?.space(self.control, self.control.tail())
    }

    /// Bytes that fit now in `window`, the current one; as many as are `wanted` may do.
    fn space_for(&self, wanted: u64, window: Window) -> Result<u64, Lie> {
        let space = window.space(self.control, self.known.tail.load(Ordering::Relaxed));
        if space.is_ok_and(|space| space >= wanted) {
            return space;
        }
        let tail = self.control.tail();
        self.known.tail.store(tail, Ordering::Relaxed);
        window.space(self.control, tail)
    }

    /// Copies as much of `length` bytes at `source` as fits and publishes it.
    ///
    /// # Safety
    /// `source` is readable for `length` bytes.
    pub unsafe fn push(&self, source: *const u8, length: usize) -> Result<Pushed, Lie> {
        // SAFETY: the caller's promise.
        unsafe { self.push_at_least(1, source, length) }
    }

    /// As [`Self::push`], but all of it or nothing.
    ///
    /// # Safety
    /// As for [`Self::push`].
    pub unsafe fn push_whole(&self, source: *const u8, length: usize) -> Result<Pushed, Lie> {
        // SAFETY: the caller's promise.
        unsafe { self.push_at_least(length, source, length) }
    }

    /// As [`Self::push`], but nothing if fewer than `least` bytes fit.
    ///
    /// # Safety
    /// As for [`Self::push`].
    #[inline]
    unsafe fn push_at_least(&self, least: usize, source: *const u8, length: usize) -> Result<Pushed, Lie> {
        let window = self.current()?;
        let space = self.space_for(length as u64, window)?;
        let head = self.control.head();
        let count = self.back(window, head, length.min(usize::try_from(space).unwrap_or(usize::MAX)));
        if count < least || count == 0 {
            return Ok(Pushed::default());
        }
        let (offset, to_end) = window.locate(head);
        let first = count.min(usize::try_from(to_end).unwrap_or(usize::MAX));
        // SAFETY: `first` ≤ length bytes are readable, and locate() stays inside the window.
        unsafe { self.memory.put(offset, source, first) };
        if first < count {
            // SAFETY: first < count ≤ length.
            let rest = unsafe { source.add(first) };
            // SAFETY: the rest fits at the window's start: count ≤ space ≤ its size.
            unsafe { self.memory.put(class_offset(window.class), rest, count - first) };
        }
        let ring = self.control.publish(head + count as u64);
        let lapped = count as u64 >= to_end && (1..=HOT_CLASS).contains(&window.class);
        Ok(Pushed { bytes: count, ring, lapped })
    }

    /// Bytes that have gone through since this direction began, or went back to its smallest window by [`Self::shrink`].
    pub fn moved(&self) -> u64 {
        let start = self.control.rare.0.window_start[0].load(Ordering::Relaxed);
        self.control.head().saturating_sub(start)
    }

    /// How many of `count` bytes at `head` may be stored in `window`, the current one: those for which there is memory now. Without
    /// the send lock the window may be one that was left: then pages are had for nothing, until it is given back again.
    fn back(&self, window: Window, head: u64, count: usize) -> usize {
        let begin = head.wrapping_sub(window.start);
        // Others have all of it when they are opened, and this one once it has been filled.
        if window.class <= HOT_CLASS || begin >= window.size() {
            return count;
        }
        let end = (begin + count as u64).min(window.size());
        let mut backed = self.backed(window, begin);
        if backed < end {
            while backed < end && self.memory.populate(class_offset(window.class) + backed, STEP) {
                backed += STEP;
            }
            self.known.backing.store(Backing::new(window, backed).0, Ordering::Relaxed);
        }
        let there = usize::try_from(backed.saturating_sub(begin)).unwrap_or(usize::MAX);
        if backed < end { count.min(there) } else { count }
    }

    /// Bytes from the start of `window` that have memory, if `begin` of them have been written: by whoever it was.
    fn backed(&self, window: Window, begin: u64) -> u64 {
        let backing = Backing(self.known.backing.load(Ordering::Relaxed));
        backing.bytes(window).unwrap_or(begin / STEP * STEP)
    }

    /// As [`has_room`], but false if there is no memory for the bytes that are free: there is room when the ring is empty, then
    /// in a smaller window.
    pub fn has_room(&self) -> bool {
        let is_backed =
            || self.current().map_or(true, |window| self.back(window, self.control.head(), 1) > 0);
        has_room(self.control) && (self.control.is_empty() || is_backed())
    }

    /// Opens a larger window, enough for `wanted` more bytes where the limits allow. False if the current one
    /// is the largest, or memory is short. `limit` is the largest class allowed.
    pub fn grow(&self, wanted: u64, limit: u32) -> Result<bool, Lie> {
        let current = self.current()?;
        if current.class >= limit {
            return Ok(false);
        }
        let mut class = current.class + 1;
        while class < limit && class_size(class) < wanted.saturating_mul(2) {
            class += 1;
        }
        if !self.populate(class) {
            return Ok(false);
        }
        self.open(class);
        Ok(true)
    }

    /// Memory for a window that is about to be opened, or for its first step.
    fn populate(&self, class: u32) -> bool {
        let length = if class > HOT_CLASS { STEP } else { class_size(class) };
        self.memory.populate(class_offset(class), length)
    }

    /// Goes back to the smallest window if the ring is empty, and frees the larger ones' memory. Not before the current
    /// one has held something: it would seem to have replaced the smallest.
    pub fn shrink(&self) -> Result<bool, Lie> {
        let current = self.current()?;
        let used = current.start != self.control.head();
        if current.class == 0 || !used || !self.control.is_empty() || !self.populate(0) {
            return Ok(false);
        }
        self.open(0);
        (1..CLASSES).for_each(|class| self.memory.discard(class));
        Ok(true)
    }

    /// Goes back to the window of class `home` if the ring is empty and the current one is larger, and has held
    /// something; to the smallest if there is no memory for that one. The memory stays, for the next time.
    pub fn come_home(&self, home: u32) -> Result<bool, Lie> {
        let current = self.current()?;
        let used = current.start != self.control.head();
        // The ring may have grown past that window without having opened it.
        if current.class <= home || !used || !self.control.is_empty() {
            return Ok(false);
        }
        if !self.populate(home) {
            return self.shrink();
        }
        self.open(home);
        Ok(true)
    }

    /// Comes home, at most to [`HOT_CLASS`], from a window that has no memory for the next byte, if the ring is empty.
    pub fn leave_unbacked(&self) -> Result<bool, Lie> {
        if !self.control.is_empty() || self.back(self.current()?, self.control.head(), 1) > 0 {
            return Ok(false);
        }
        self.come_home(HOT_CLASS)
    }

    /// The class of the window that is written to now.
    pub fn class(&self) -> Result<u32, Lie> {
        self.current().map(|window| window.class)
    }

    fn open(&self, class: u32) {
        let start = &self.control.rare.0.window_start[class as usize];
        start.store(self.control.head(), Ordering::Release);
    }
}

impl<'a, M: Memory> Consumer<'a, M> {
    /// The receiving end of `control`. The caller holds the direction's receive lock.
    pub fn new(control: &'a Control, memory: &'a M) -> Self {
        Self { control, memory }
    }

    /// Where `position` lies, and how many bytes follow it without a break.
    fn locate(&self, position: u64) -> Result<(u64, u64), Lie> {
        let (window, next) = Window::holding(self.control, position)?;
        let (offset, to_end) = window.locate(position);
        // Nothing follows the last position of all.
        let run = next.checked_sub(position).filter(|&run| run > 0).ok_or(Lie)?;
        Ok((offset, to_end.min(run)))
    }

    /// Offset in the direction's memory of the byte at `position`, whether or not it has been written.
    pub fn offset(&self, position: u64) -> Result<u64, Lie> {
        self.locate(position).map(|(offset, _)| offset)
    }

    /// Bytes that can be taken now.
    pub fn available(&self) -> Result<u64, Lie> {
        let used = self.control.used();
        if used > DIRECTION_BYTES { Err(Lie) } else { Ok(used) }
    }

    /// Copies up to `length` bytes that lie `skip` bytes ahead to `target`, and leaves them in the ring.
    ///
    /// # Safety
    /// `target` is writable for `length` bytes.
    pub unsafe fn peek(&self, skip: u64, target: *mut u8, length: usize) -> Result<usize, Lie> {
        let available = self.available()?.saturating_sub(skip);
        let count = length.min(usize::try_from(available).unwrap_or(usize::MAX));
        let mut position = self.control.tail() + skip;
        let mut done = 0;
        while done < count {
            let (offset, run) = self.locate(position)?;
            let step = (count - done).min(usize::try_from(run).unwrap_or(usize::MAX));
            // SAFETY: done < count ≤ length.
            let part = unsafe { target.add(done) };
            // SAFETY: `step` bytes remain in the target, and locate() stays inside one window.
            unsafe { self.memory.take(offset, part, step) };
            done += step;
            position += step as u64;
        }
        Ok(count)
    }

    /// Drops `count` bytes that [`Self::peek`] or the caller has seen, and tells whom to wake.
    pub fn consume(&self, count: usize) -> Result<Popped, Lie> {
        let available = self.available()?;
        if count as u64 > available {
            return Err(Lie);
        }
        self.control.release(self.control.tail() + count as u64);
        let emptied = self.control.is_empty();
        // A producer that waits for space is woken when a good part of its window is free, not for each byte.
        let ring = self.control.space_armed.0.has_sleepers()
            && (emptied || has_room(self.control))
            && self.control.claim_space_bell();
        Ok(Popped { bytes: count, ring, emptied })
    }

    /// Takes up to `length` bytes out of the ring.
    ///
    /// # Safety
    /// `target` is writable for `length` bytes.
    pub unsafe fn pop(&self, target: *mut u8, length: usize) -> Result<Popped, Lie> {
        // SAFETY: the caller's promise.
        let count = unsafe { self.peek(0, target, length)? };
        if count == 0 { Ok(Popped { emptied: true, ..Popped::default() }) } else { self.consume(count) }
    }
}

/// Whether a sleeper for space has reason to wake. May be asked without the send lock, and by the consumer: what others
/// change meanwhile makes the words contradict each other, and then the answer is yes.
pub fn has_room(control: &Control) -> bool {
    let space = |window: Window| Ok((window.space(control, control.tail())?, window.class));
    match Window::current(control).and_then(space) {
        Ok((space, class)) => is_writable(space, class) || control.is_empty(),
        Err(Lie) => true,
    }
}

/// Whether `space` free bytes in a window of `class` make the stream writable for poll(2) and for sleepers: a
/// quarter of the window, where the kernel asks for a third of the socket's buffer.
pub fn is_writable(space: u64, class: u32) -> bool {
    space >= class_size(class.min(CLASSES - 1)) / 4
}

#[cfg(test)]
#[cfg(not(loom))]
#[path = "ring_tests.rs"]
mod tests;

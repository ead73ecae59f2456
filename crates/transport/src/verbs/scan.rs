//! How far the ring has been looked through that the peer writes.
//!
//! Nobody tells when a message arrives. Whoever wants to know *scans*: goes on from message to message as far as they are
//! there, and raises the incoming `head` by their bytes. Any thread may, at any time, without a lock: one that a signal handler
//! never returns to, or that a fork leaves behind, keeps nobody waiting.
//!
//! One word says how far everybody has come. Who moves it on has found a message there that nobody can have taken since; and
//! everybody first raises `head` to where the word is, so that nobody goes to sleep on a message that another thread has
//! found and not yet told of.
//!
//! [`Scan::freeze`] sets a bit of that word, on the way back to TCP: whatever has not moved it by then never will, and the
//! peer sends it again.

use crate::control::Control;
use crate::ring::Lie;
use crate::sync::{AtomicU64, Ordering, fence};

/// In [`Scan::word`]: nothing that arrives counts any more.
const FROZEN: u64 = 1 << 63;
/// The bits of a stream position that the word holds.
const STREAM: u32 = u32::MAX >> 1;

/// A position in the ring that seems to be so far ahead of another is behind it: half of what can be told apart.
const BEHIND: u64 = 1 << 34;

/// What a scan needs of the ring.
pub(crate) trait Arrivals {
    /// A complete message.
    type Message: Copy;

    /// Bytes of the ring.
    fn size(&self) -> u64;
    /// Bytes of the ring that have been consumed.
    fn consumed(&self) -> u64;
    /// The message at `position`, if it is complete. What it says is right as long as nobody has consumed it.
    fn message(&self, position: u64) -> Result<Option<Self::Message>, Lie>;
    /// Bytes that it adds to the stream, and that it takes in the ring.
    fn extent(&self, message: Self::Message) -> (u64, u64);
    /// What it tells besides, noted in `control`. More than one thread may do so.
    fn heed(&self, message: Self::Message, control: &Control);
}

/// How far the ring has been looked through.
#[derive(Debug)]
pub(crate) struct Scan {
    /// Eighths of bytes of the ring in the lower half; [`FROZEN`], and bytes of the stream, in the upper.
    word: AtomicU64,
}

impl Scan {
    /// Nothing has arrived.
    pub(crate) fn new() -> Self {
        Self { word: AtomicU64::new(0) }
    }

    fn pack(stream: u64, ring: u64) -> u64 {
        u64::from(stream as u32 & STREAM) << 32 | u64::from((ring / 8) as u32)
    }

    /// Both halves of `word`, as positions not before `stream` and `ring`.
    fn unpack(word: u64, stream: u64, ring: u64) -> (u64, u64) {
        let stream = stream + u64::from(((word >> 32) as u32).wrapping_sub(stream as u32) & STREAM);
        let ring = ring + u64::from((word as u32).wrapping_sub((ring / 8) as u32)) * 8;
        (stream, ring)
    }

    /// Whether [`Self::freeze`] was called.
    pub(crate) fn is_frozen(&self) -> bool {
        self.word.load(Ordering::Acquire) & FROZEN != 0
    }

    /// Bytes of the ring that follow `consumed` and have been looked through.
    pub(crate) fn ahead_of(&self, consumed: u64) -> u64 {
        Self::unpack(self.word.load(Ordering::Acquire), 0, consumed).1 - consumed
    }

    /// Looks for messages that have arrived, and tells `control` of them.
    pub(crate) fn go_on(&self, ring: &impl Arrivals, control: &Control) -> Result<(), Lie> {
        loop {
            // Before the word, so that neither is ahead of it.
            let tail = control.tail();
            let consumed = ring.consumed();
            let word = self.word.load(Ordering::Acquire);
            if word & FROZEN != 0 {
                return Ok(());
            }
            let (stream, position) = Self::unpack(word, tail, consumed);
            let ahead = position - consumed;
            if ahead > BEHIND {
                // Another process has read on.
                return Ok(());
            }
            raise(control, stream);
            if ahead >= ring.size() {
                if ring.consumed() != consumed {
                    continue;
                }
                // A sender never fills the ring to the last byte.
                return Err(Lie);
            }
            let found = ring.message(position);
            fence(Ordering::Acquire);
            if self.word.load(Ordering::Relaxed) != word {
                // It may have been consumed meanwhile, and something else been read.
                continue;
            }
            let Some(message) = found? else { return Ok(()) };
            ring.heed(message, control);
            let (bytes, span) = ring.extent(message);
            let next = Self::pack(stream + bytes, position + span);
            // Whoever was faster has found the same.
            let _ = self.word.compare_exchange(word, next, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Looks a last time: what comes later does not count, for nobody. `head` is final then. The caller holds the receive
    /// lock.
    pub(crate) fn freeze(&self, ring: &impl Arrivals, control: &Control) -> Result<(), Lie> {
        let looked = self.go_on(ring, control);
        let word = self.word.fetch_or(FROZEN, Ordering::AcqRel);
        raise(control, Self::unpack(word, control.tail(), 0).0);
        looked
    }
}

fn raise(control: &Control, head: u64) {
    if control.head() < head {
        control.head.0.position.fetch_max(head, Ordering::AcqRel);
    }
}

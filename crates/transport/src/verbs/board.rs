//! What one side shows the other: the memory that the peer writes to and reads by RDMA. Byte tables are in docs/wire.md.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::queue::DEPTH;

/// Two words that the peer writes again and again, and that may be there in part when somebody looks: an iWARP device
/// takes them from a TCP stream that is cut anywhere. So they bring a check. At first all is 0, which is valid.
#[repr(C)]
pub(super) struct Said {
    words: [AtomicU64; 2],
    check: AtomicU64,
}

impl Said {
    /// What to write for `words`.
    pub(super) fn of(words: [u64; 2]) -> [u64; 3] {
        [words[0], words[1], mix(words[0] ^ mix(words[1].wrapping_mul(3)))]
    }

    /// The words, unless others arrive at this moment.
    pub(super) fn read(&self) -> Option<[u64; 2]> {
        let words = [0, 1].map(|index: usize| self.words[index].load(Ordering::Acquire));
        (Self::of(words)[2] == self.check.load(Ordering::Acquire)).then_some(words)
    }

    /// Sets the words, before the peer can.
    pub(super) fn preset(&self, words: [u64; 2]) {
        let [first, second, check] = Self::of(words);
        self.words[0].store(first, Ordering::Relaxed);
        self.words[1].store(second, Ordering::Relaxed);
        self.check.store(check, Ordering::Release);
    }
}

/// The finalizer of splitmix64 (Steele, Lea, Flood 2014): each bit depends on all, and 0 stays 0.
fn mix(word: u64) -> u64 {
    let z = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What the peer may write to, before the ring itself.
#[repr(C)]
pub(super) struct Board {
    /// Bytes of our outgoing ring that the peer has consumed, and of the stream.
    pub(super) credit: Said,
    /// The peer's `data_armed` and `space_armed`.
    pub(super) armed: Said,
    /// The peer's word that it has nothing under way: what it had posted, and how often this side had rung. See
    /// [`super::word`]. A peer that goes to sleep writes all three at once.
    pub(super) word: Said,
    _pad0: [u64; 7],
    /// [`CONNECTED`] once the peer is, too: from then on bytes may come in the ring. [`LEAVES`] once it is about to go back to TCP: what
    /// is posted after that it may not see.
    pub(super) ready: AtomicU64,
    _pad1: [u64; 7],
    /// Bells that the peer has counted, and how often it has rung; written after what they announce.
    pub(super) bells: Said,
    _pad2: [u64; 5],
    /// Where our own reads arrive: what the peer has posted, consumed, consumed of the stream, and how often it has rung.
    pub(super) figures: [AtomicU64; 4],
    /// Where a read arrives that waits for what is before it: how often the peer has rung.
    pub(super) flushed: AtomicU64,
}

/// Values of [`Board::ready`].
pub(super) const CONNECTED: u64 = 1;
/// See there.
pub(super) const LEAVES: u64 = 2;

/// Bytes of the page with the figures.
pub(super) const FIGURES_BYTES: u64 = 4096;
/// Bytes before the ring.
pub(super) const BOARD_BYTES: u64 = 4096;
/// Bytes before the image of the peer's ring: where small writes come from.
pub(super) const STAGE_BYTES: u64 = 3 * 4096;
/// Bytes of a small write: three times two words and their check.
pub(super) const SLOT_BYTES: u64 = 72;

const _: () = assert!(size_of::<Board>() < BOARD_BYTES as usize);
const _: () = assert!(size_of::<Figures>() < FIGURES_BYTES as usize);
const _: () = assert!(DEPTH * SLOT_BYTES <= STAGE_BYTES);

/// Words that the peer reads before it sleeps.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Figures {
    pub(super) posted: AtomicU64,
    pub(super) consumed: AtomicU64,
    pub(super) consumed_stream: AtomicU64,
    pub(super) rings: AtomicU64,
}

/// What a peer must know of this side's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Address and key of the board and, behind it, the ring.
    pub inbox: u64,
    /// See [`Self::inbox`].
    pub inbox_key: u32,
    /// Bytes of the ring: a power of two.
    pub ring: u32,
    /// Address and key of the figures that the peer reads.
    pub figures: u64,
    /// See [`Self::figures`].
    pub figures_key: u32,
}

/// This side's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// [`Figures`], alone in [`FIGURES_BYTES`].
    pub(super) figures: NonNull<u8>,
    /// [`BOARD_BYTES`] and a ring.
    pub(super) inbox: NonNull<u8>,
    /// [`STAGE_BYTES`] and an image of the peer's ring.
    pub(super) outbox: NonNull<u8>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `new` with the bytes from `old` that `missing` names.
    fn torn(old: [u64; 3], new: [u64; 3], missing: impl Fn(usize) -> bool) -> Said {
        let [old, new] = [old, new].map(|words| words.map(u64::to_ne_bytes));
        let word = |index: usize| {
            let byte = |at: usize| if missing(index * 8 + at) { old[index][at] } else { new[index][at] };
            AtomicU64::new(u64::from_ne_bytes(std::array::from_fn(byte)))
        };
        Said { words: [word(0), word(1)], check: word(2) }
    }

    #[test]
    fn words_are_read_as_they_were_said_or_not_at_all() {
        assert_eq!(Said::of([0, 0]), [0; 3]);
        let steps = [[0, 0], [0xff, 7], [0x100, 7], [0x1_00ff, 8], [0x2_0000, u64::MAX]];
        for pair in steps.windows(2) {
            let [old, new] = [Said::of(pair[0]), Said::of(pair[1])];
            for cut in 0..=24 {
                for said in [torn(old, new, |byte| byte >= cut), torn(old, new, |byte| byte < cut)] {
                    let read = said.read();
                    assert!(read.is_none_or(|words| pair.contains(&words)), "{pair:x?} {cut} {read:x?}");
                }
            }
        }
    }
}

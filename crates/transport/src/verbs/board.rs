//! What one side shows the other: the memory that the peer writes to and reads by RDMA. Byte tables are in docs/wire.md.

use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use super::queue::DEPTH;

/// What the peer may write to, before the ring itself.
#[repr(C)]
pub(super) struct Board {
    /// Bytes of our outgoing ring that the peer has consumed, and of the stream.
    pub(super) credit: [AtomicU64; 2],
    _pad0: [u64; 6],
    /// The peer's `data_armed` and `space_armed`.
    pub(super) armed: [AtomicU64; 2],
    _pad1: [u64; 6],
    /// 1 once the peer is connected, too: from then on bytes may come in the ring.
    pub(super) ready: AtomicU64,
    _pad2: [u64; 7],
    /// Bells that the peer has counted; written after what they announce.
    pub(super) bells: AtomicU64,
    _pad3: [u64; 7],
    /// Where our own reads arrive: what the peer has posted, consumed, and consumed of the stream.
    pub(super) figures: [AtomicU64; 3],
    /// Where a read arrives that only waits for what is before it.
    pub(super) flushed: AtomicU64,
}

/// Bytes before the ring.
pub(super) const BOARD_BYTES: u64 = 4096;
/// Bytes before the image of the peer's ring: where small writes come from.
pub(super) const STAGE_BYTES: u64 = 4096;
pub(super) const SLOT_BYTES: u64 = 16;

const _: () = assert!(size_of::<Board>() < BOARD_BYTES as usize);
const _: () = assert!(DEPTH * SLOT_BYTES <= STAGE_BYTES);

/// Words that the peer reads before it sleeps.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Figures {
    pub(super) posted: AtomicU64,
    pub(super) consumed: AtomicU64,
    pub(super) consumed_stream: AtomicU64,
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
    /// Address and key of the page with the control words.
    pub control: u64,
    /// See [`Self::control`].
    pub control_key: u32,
}

/// This side's memory, in its segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// The page with the control words.
    pub(crate) control: NonNull<u8>,
    /// Offset in the page of [`Figures`].
    pub(crate) figures: u64,
    /// [`BOARD_BYTES`] and a ring.
    pub(crate) inbox: NonNull<u8>,
    /// [`STAGE_BYTES`] and an image of the peer's ring.
    pub(crate) outbox: NonNull<u8>,
}

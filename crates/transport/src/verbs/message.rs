//! Messages in a ring that the peer writes by RDMA: `u32 header | payload | u32 validity`, in zeroed memory.
//!
//! A message begins at a multiple of 8 bytes, and never wraps: what does not fit before the ring's end is split, as the
//! stream has no boundaries. The receiver zeroes what it has consumed.
//!
//! *When is a message there?* Its header tells where the validity word is, which is placed last: as the last bytes of the one
//! write that is the message, where a device places those in order, or by a second write ([`crate::settings::Order`]). A
//! reader need not know which. Both words may be there in part when it looks, for iWARP devices take a TCP stream that
//! is cut anywhere. So no byte of either is zero: a word of which a byte is missing is none, and nothing in a payload can
//! be taken for the end of a shorter message.
//!
//! A short payload may be *packed* instead: seven bits to a byte, whose highest bit is set, and no validity word. The message is
//! there when no byte of it is missing, so that one write does wherever a device places its bytes first.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::ring::Lie;
use crate::settings::Order;

/// The validity word. No byte of it is zero.
const VALID: u32 = 0x9d5f_c3a7;
/// Set in a whole header. The other 28 bits are a length of 24 bits, and above it the kind.
const MARKS: u32 = 0x8080_8080;
const LENGTH_BITS: u32 = 24;
/// Bytes of the validity word.
pub(super) const VALIDITY: usize = 4;
/// Bytes of header and validity.
pub(super) const OVERHEAD: u64 = 8;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Bytes of the stream.
    Data,
    /// Nothing: the next message is at the ring's start. Its validity word follows its length, and it spans all that is
    /// left of the ring.
    Pad,
    /// `u64`: application bytes that its sender had sent over TCP before this.
    Switch,
    /// `u32`: bits of [`crate::control::end`].
    End,
    /// Bytes of the stream, packed.
    Packed,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Data, Self::Pad, Self::Switch, Self::End, Self::Packed];

    fn code(self) -> u32 {
        match self {
            Self::Data => 0,
            Self::Pad => 1,
            Self::Switch => 2,
            Self::End => 3,
            Self::Packed => 4,
        }
    }

    /// How bytes of the stream go best, if a message may have `most` bytes of the ring: `length`, which fit there as [`Self::Data`].
    pub(super) fn of_data(length: u64, most: u64, order: Order) -> Self {
        let packs = order == Order::TwoWrites && length <= PACKED_MOST && Self::Packed.span(length) <= most;
        if packs { Self::Packed } else { Self::Data }
    }

    /// Bytes of a message, from its header to its last byte.
    pub(super) const fn size(self, length: u64) -> u64 {
        match self {
            Self::Packed => 4 + packed(length),
            _ => length + OVERHEAD,
        }
    }

    /// Bytes of the ring that `length` bytes of payload take.
    pub(super) const fn span(self, length: u64) -> u64 {
        (self.size(length) + 7) & !7
    }
}

/// A complete message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) kind: Kind,
    /// Bytes of payload.
    pub(super) length: u64,
    /// Bytes of the ring.
    pub(super) span: u64,
}

impl Message {
    /// Bytes that it adds to the stream.
    pub(super) fn data(self) -> u64 {
        if matches!(self.kind, Kind::Data | Kind::Packed) { self.length } else { 0 }
    }
}

/// The header of a message whose payload is shorter than 16 MiB.
fn header(kind: Kind, length: u64) -> u32 {
    let bits = kind.code() << LENGTH_BITS | length as u32;
    (0..4).fold(MARKS, |word, byte| word | (bits >> (7 * byte) & 0x7f) << (8 * byte))
}

/// What a header says, if it is whole.
fn read_header(word: u32) -> Result<Option<(Kind, u64)>, Lie> {
    if word & MARKS != MARKS {
        return Ok(None);
    }
    let bits = (0..4).fold(0, |bits, byte| bits | (word >> (8 * byte) & 0x7f) << (7 * byte));
    let kind = Kind::ALL.into_iter().find(|kind| kind.code() == bits >> LENGTH_BITS).ok_or(Lie)?;
    Ok(Some((kind, u64::from(bits & ((1 << LENGTH_BITS) - 1)))))
}

/// The longest payload that is packed: with it, a message can still be carried by its request.
const PACKED_MOST: u64 = 28 * PIECE as u64;
/// Bytes that eight bytes hold, packed.
const PIECE: usize = 7;
/// The highest bit of each byte.
const PRESENT: u64 = 0x8080_8080_8080_8080;

/// Bytes that `length` bytes take when they are packed.
const fn packed(length: u64) -> u64 {
    length + length.div_ceil(PIECE as u64)
}

/// The low 56 bits, seven to a byte.
fn spread(bits: u64) -> u64 {
    let x = (bits & 0x00ff_ffff_f000_0000) << 4 | bits & 0x0fff_ffff;
    let x = (x & 0x0fff_c000_0fff_c000) << 2 | x & 0x0000_3fff_0000_3fff;
    (x & 0x3f80_3f80_3f80_3f80) << 1 | x & 0x007f_007f_007f_007f
}

/// Undoes [`spread`].
fn gather(word: u64) -> u64 {
    let x = (word & 0x7f00_7f00_7f00_7f00) >> 1 | word & 0x007f_007f_007f_007f;
    let x = (x & 0x3fff_0000_3fff_0000) >> 2 | x & 0x0000_3fff_0000_3fff;
    (x & 0x0fff_ffff_0000_0000) >> 4 | x & 0x0fff_ffff
}

/// Memory of a ring of `size` bytes, a power of two.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    base: NonNull<u8>,
    pub(super) size: u64,
}

impl Room {
    /// # Safety
    /// `base` is aligned to 8 and valid for `size` bytes as long as the room is used. Others may write there at any time.
    pub(super) unsafe fn new(base: NonNull<u8>, size: u64) -> Self {
        Self { base, size }
    }

    /// Where `position` lies, and how many bytes follow it before the ring's end.
    pub(super) fn locate(self, position: u64) -> (u64, u64) {
        let offset = position & (self.size - 1);
        (offset, self.size - offset)
    }

    /// The byte at `offset`.
    pub(super) fn at(self, offset: u64) -> *mut u8 {
        debug_assert!(offset <= self.size);
        self.base.as_ptr().wrapping_add(offset as usize)
    }

    /// The message at `position`, if it is complete.
    pub(super) fn message(self, position: u64) -> Result<Option<Message>, Lie> {
        let (offset, left) = self.locate(position);
        if offset % 8 != 0 {
            return Err(Lie);
        }
        // SAFETY: offset < size, a multiple of 8.
        let word = unsafe { AtomicU32::from_ptr(self.at(offset).cast()) }.load(Ordering::Acquire);
        let Some((kind, length)) = read_header(word)? else { return Ok(None) };
        let wrong = match kind {
            Kind::Data => length == 0,
            Kind::Pad => length != 0,
            Kind::Switch => length != 8,
            Kind::End => length != 4,
            Kind::Packed => length == 0 || length > PACKED_MOST,
        };
        let span = if kind == Kind::Pad { left } else { kind.span(length) };
        if wrong || span > left {
            return Err(Lie);
        }
        if kind == Kind::Packed {
            let is_here = self.packed_words(offset, length).all(|word| word & PRESENT == PRESENT);
            fence(Ordering::Acquire);
            return Ok(is_here.then_some(Message { kind, length, span }));
        }
        // SAFETY: within the ring, by the check above; it may be unaligned.
        let valid = unsafe { self.at(offset + 4 + length).cast::<u32>().read_unaligned() };
        fence(Ordering::Acquire);
        Ok((valid == VALID).then_some(Message { kind, length, span }))
    }

    /// The words of a packed payload of `length` bytes, whose message is at `offset`. In the last, what is no part of it is there, and 0.
    fn packed_words(self, offset: u64, length: u64) -> impl Iterator<Item = u64> {
        let (start, end) = (offset + 4, offset + 4 + packed(length));
        (start..end).step_by(8).map(move |at| {
            let count = (end - at).min(8) as usize;
            let mut bytes = PRESENT.to_le_bytes();
            // SAFETY: within the ring, as the caller has checked.
            unsafe { std::ptr::copy_nonoverlapping(self.at(at), bytes.as_mut_ptr(), count) };
            u64::from_le_bytes(bytes)
        })
    }

    /// Copies `count` bytes of the payload of a `message` at `position`, from its byte `skip` on.
    ///
    /// # Safety
    /// `target` is writable for `count` bytes, and skip + count ≤ the message's length.
    pub(super) unsafe fn copy(self, position: u64, message: Message, skip: u64, target: *mut u8, count: u64) {
        let (offset, _) = self.locate(position);
        if message.kind != Kind::Packed {
            // SAFETY: a message that has been checked lies within the ring.
            unsafe { std::ptr::copy_nonoverlapping(self.at(offset + 4 + skip), target, count as usize) };
            return;
        }
        let mut bytes = [0u8; PACKED_MOST as usize];
        let length = message.length.min(PACKED_MOST);
        for (piece, word) in bytes.chunks_mut(PIECE).zip(self.packed_words(offset, length)) {
            piece.copy_from_slice(&gather(word).to_le_bytes()[..PIECE]);
        }
        let part = &bytes[skip as usize..][..count as usize];
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), target, part.len()) };
    }

    /// The payload of a control message at `position`.
    pub(super) fn control_payload(self, position: u64, message: Message) -> u64 {
        let mut bytes = [0u8; 8];
        let (offset, _) = self.locate(position);
        let count = (message.length as usize).min(bytes.len());
        // SAFETY: a message that has been checked lies within the ring.
        unsafe { std::ptr::copy_nonoverlapping(self.at(offset + 4), bytes.as_mut_ptr(), count) };
        u64::from_le_bytes(bytes)
    }

    /// Builds a message at `position`. How many bytes it has, from its header to its last byte.
    ///
    /// # Safety
    /// `payload` is readable for `length` bytes, and the message fits before the ring's end.
    pub(super) unsafe fn build(self, position: u64, kind: Kind, payload: *const u8, length: u64) -> usize {
        let (offset, _) = self.locate(position);
        // SAFETY: within the ring, by the caller's promise.
        unsafe { self.at(offset).cast::<u32>().write(header(kind, length)) };
        if kind == Kind::Packed {
            // SAFETY: the caller's promise.
            unsafe { self.pack(offset + 4, payload, length) };
        } else {
            // SAFETY: as above; the payload is readable.
            unsafe { std::ptr::copy_nonoverlapping(payload, self.at(offset + 4), length as usize) };
            // SAFETY: as above.
            unsafe { self.at(offset + 4 + length).cast::<u32>().write_unaligned(VALID) };
        }
        kind.size(length) as usize
    }

    /// Writes `length` bytes to `offset`, packed.
    ///
    /// # Safety
    /// As for [`Self::build`].
    unsafe fn pack(self, offset: u64, payload: *const u8, length: u64) {
        let mut at = offset;
        for start in (0..length as usize).step_by(PIECE) {
            let count = (length as usize - start).min(PIECE);
            let mut bytes = [0u8; 8];
            let piece = payload.wrapping_add(start);
            // SAFETY: start + count ≤ length.
            unsafe { std::ptr::copy_nonoverlapping(piece, bytes.as_mut_ptr(), count) };
            let word = (spread(u64::from_le_bytes(bytes)) | PRESENT).to_le_bytes();
            let size = packed(count as u64);
            // SAFETY: within the message, which fits.
            unsafe { std::ptr::copy_nonoverlapping(word.as_ptr(), self.at(at), size as usize) };
            at += size;
        }
    }

    /// Makes the memory of a consumed message ready for another.
    pub(super) fn clear(self, position: u64, span: u64) {
        let (offset, left) = self.locate(position);
        // SAFETY: within the ring.
        unsafe { self.at(offset).write_bytes(0, span.min(left) as usize) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Ring(Vec<u64>);

    impl Ring {
        fn new() -> Self {
            Self(vec![0; 16])
        }

        fn room(&mut self) -> Room {
            // SAFETY: 128 aligned bytes, alive as long as the test uses it.
            unsafe { Room::new(NonNull::new(self.0.as_mut_ptr().cast()).unwrap(), 128) }
        }
    }

    #[test]
    fn a_message_is_there_when_its_validity_word_is() {
        let mut ring = Ring::new();
        let room = ring.room();
        assert_eq!(room.message(0), Ok(None));
        // SAFETY: five readable bytes, and room for them.
        assert_eq!(unsafe { room.build(0, Kind::Data, b"hello".as_ptr(), 5) }, 13);
        assert_eq!(room.message(0), Ok(Some(Message { kind: Kind::Data, length: 5, span: 16 })));
        // SAFETY: inside the ring.
        unsafe { *room.at(9) = 0 };
        assert_eq!(room.message(0), Ok(None));
    }

    #[test]
    fn no_message_is_there_before_all_of_both_words_is() {
        // A payload that looks like the end of each shorter message.
        let payload: Vec<u8> = VALID.to_ne_bytes().into_iter().cycle().take(100).collect();
        for missing in 1..256u32 {
            let mut ring = Ring::new();
            let room = ring.room();
            // SAFETY: as many readable bytes, and room for them.
            let size = unsafe { room.build(0, Kind::Data, payload.as_ptr(), 100) } as u64;
            for byte in (0..8).filter(|byte| missing & 1 << byte != 0) {
                let at = if byte < 4 { byte } else { size - 8 + byte };
                // SAFETY: inside the ring.
                unsafe { *room.at(at) = 0 };
            }
            assert_eq!(room.message(0), Ok(None), "{missing:08b}");
        }
    }

    #[test]
    fn a_packed_message_is_there_when_every_byte_is_and_says_what_was_packed() {
        for length in 1..=PACKED_MOST {
            let mut ring = vec![0u64; 64];
            // SAFETY: 512 aligned bytes, alive as long as they are used.
            let room = unsafe { Room::new(NonNull::new(ring.as_mut_ptr().cast()).unwrap(), 512) };
            let payload: Vec<u8> = (0..length)
                .map(|byte| (byte * 37 + length) as u8 & if byte % 3 == 0 { 0 } else { 0xff })
                .collect();
            // SAFETY: as many readable bytes, and room for them.
            let size = unsafe { room.build(256, Kind::Packed, payload.as_ptr(), length) } as u64;
            let message = Message { kind: Kind::Packed, length, span: (size + 7) & !7 };
            assert_eq!(room.message(256), Ok(Some(message)));
            for at in 0..size {
                // SAFETY: inside the ring; also below.
                let byte = unsafe { std::mem::take(&mut *room.at(256 + at)) };
                assert_eq!(room.message(256), Ok(None), "byte {at} of {length}");
                // SAFETY: as above.
                unsafe { *room.at(256 + at) = byte };
            }
            for (skip, count) in
                [(0, length), (length / 2, length - length / 2), (length - 1, 1), (length / 3, length / 3)]
            {
                let mut read = vec![0xaa; count as usize];
                // SAFETY: as many writable bytes, of the message.
                unsafe { room.copy(256, message, skip, read.as_mut_ptr(), count) };
                assert_eq!(read, payload[skip as usize..][..count as usize]);
            }
            room.clear(256, message.span);
            assert!(ring.iter().all(|&word| word == 0));
        }
    }

    #[test]
    fn what_is_short_is_packed_where_it_fits_and_one_write_does_not_do() {
        let of = |length, most| Kind::of_data(length, most, Order::TwoWrites);
        assert_eq!([1, PACKED_MOST].map(|length| of(length, 4096)), [Kind::Packed; 2]);
        assert_eq!(of(PACKED_MOST + 1, 4096), Kind::Data);
        // 64 bytes take 72 of the ring, or 80 when they are packed.
        assert_eq!([of(64, 72), of(64, 79), of(64, 80)], [Kind::Data, Kind::Data, Kind::Packed]);
        assert_eq!(Kind::of_data(1, 4096, Order::OneWrite), Kind::Data);
    }

    #[test]
    fn headers_are_read_as_they_were_written() {
        for kind in Kind::ALL {
            for length in [0, 1, 127, 128, 0x7fff, 8 << 20, (1 << LENGTH_BITS) - 1] {
                assert_eq!(read_header(header(kind, length)), Ok(Some((kind, length))));
            }
        }
    }

    #[test]
    fn positions_go_round_and_cleared_room_is_empty() {
        let mut ring = Ring::new();
        let room = ring.room();
        // SAFETY: eight readable bytes, and room for them.
        unsafe { room.build(128 + 104, Kind::Switch, 77u64.to_le_bytes().as_ptr(), 8) };
        let message = room.message(104).unwrap().unwrap();
        assert_eq!((message.kind, room.control_payload(104, message)), (Kind::Switch, 77));
        room.clear(128 + 104, message.span);
        assert_eq!(room.message(104), Ok(None));
    }

    #[test]
    fn a_pad_spans_the_rest() {
        let mut ring = Ring::new();
        let room = ring.room();
        // SAFETY: a pad has no payload.
        unsafe { room.build(120, Kind::Pad, [].as_ptr(), 0) };
        assert_eq!(room.message(120), Ok(Some(Message { kind: Kind::Pad, length: 0, span: 8 })));
    }

    #[test]
    fn impossible_lengths_are_lies() {
        let mut ring = Ring::new();
        let room = ring.room();
        let unknown = header(Kind::End, 4) | 0x7f << 24;
        for word in [
            header(Kind::Data, 125),
            header(Kind::Data, 1 << 20),
            header(Kind::Data, 0),
            unknown,
            header(Kind::Switch, 4),
            header(Kind::Pad, 1),
            header(Kind::Packed, 0),
            header(Kind::Packed, 112),
            header(Kind::Packed, PACKED_MOST + 1),
        ] {
            // SAFETY: inside the ring.
            unsafe { room.at(0).cast::<u32>().write(word) };
            assert_eq!(room.message(0), Err(Lie), "{word:x}");
        }
        assert_eq!(room.message(4), Err(Lie));
    }
}

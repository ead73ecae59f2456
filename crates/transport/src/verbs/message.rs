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

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::ring::Lie;

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
}

impl Kind {
    const ALL: [Self; 4] = [Self::Data, Self::Pad, Self::Switch, Self::End];

    fn code(self) -> u32 {
        match self {
            Self::Data => 0,
            Self::Pad => 1,
            Self::Switch => 2,
            Self::End => 3,
        }
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

/// Bytes of the ring that `length` bytes of payload take.
pub(super) const fn span(length: u64) -> u64 {
    (length + OVERHEAD + 7) & !7
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
        };
        let span = if kind == Kind::Pad { left } else { span(length) };
        if wrong || span > left {
            return Err(Lie);
        }
        // SAFETY: within the ring, by the check above; it may be unaligned.
        let valid = unsafe { self.at(offset + 4 + length).cast::<u32>().read_unaligned() };
        fence(Ordering::Acquire);
        Ok((valid == VALID).then_some(Message { kind, length, span }))
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

    /// Builds a message at `position`. How many bytes it has, from its header to its validity word.
    ///
    /// # Safety
    /// `payload` is readable for `length` bytes, and the message fits before the ring's end.
    pub(super) unsafe fn build(self, position: u64, kind: Kind, payload: *const u8, length: u64) -> usize {
        let (offset, _) = self.locate(position);
        // SAFETY: within the ring, by the caller's promise.
        unsafe { self.at(offset).cast::<u32>().write(header(kind, length)) };
        // SAFETY: as above; the payload is readable.
        unsafe { std::ptr::copy_nonoverlapping(payload, self.at(offset + 4), length as usize) };
        // SAFETY: as above.
        unsafe { self.at(offset + 4 + length).cast::<u32>().write_unaligned(VALID) };
        (length + OVERHEAD) as usize
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
        ] {
            // SAFETY: inside the ring.
            unsafe { room.at(0).cast::<u32>().write(word) };
            assert_eq!(room.message(0), Err(Lie), "{word:x}");
        }
        assert_eq!(room.message(4), Err(Lie));
    }
}

//! Bytes between a process that asks and a worker. All numbers are little-endian.
//!
//! ```text
//!  greeting, once from each side       frame: a head of 32 bytes, then `length` bytes
//!   0  "THALWORK"                       0  length     u32
//!   8  version     u32                  4  kind       u32
//!  12  0…          20 bytes             8  request    u64   chosen by who asks
//!                                      16  partition  u32   of the request, from 0
//!                                      20  0          u32
//!                                      24  value      u64
//! ```

use thallus_shuffle::stream::LARGEST;

pub(crate) const GREETING: usize = 32;
pub(crate) const HEAD: usize = 32;

pub(crate) const MAGIC: [u8; 8] = *b"THALWORK";
const VERSION: u32 = 1;

/// Bytes of a plan, or another message of the engine.
pub(crate) const LARGEST_MESSAGE: usize = 64 << 20;

/// Bytes of a text that says why something failed.
pub(crate) const LARGEST_TEXT: usize = 64 << 10;

/// Partitions of one request.
pub(crate) const MOST_PARTITIONS: u64 = 1 << 16;

/// Bytes that may be allowed of a partition and not sent yet: as much may wait at a worker for a client that does not read.
pub(crate) const LARGEST_WINDOW: u64 = 1 << 30;

/// Instead of a partition: all of the request.
pub(crate) const ALL: u32 = u32::MAX;

/// Lengths of whole Arrow messages are multiples of this.
const GRAIN: usize = 64;

pub(crate) fn greeting() -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $number:literal, up to $most:expr;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Kind { $($(#[$doc])* $name = $number,)* }

        impl Kind {
            fn of(number: u32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// Bytes behind the head.
            fn most(self) -> usize {
                match self { $(Self::$name => $most,)* }
            }
        }
    };
}

kinds! {
    /// Opens the coordinator's channel of a task: headers. From who asks, as all below 16.
    Open = 1, up to LARGEST_MESSAGE;
    /// A message on it, to the worker.
    Tell = 2, up to LARGEST_MESSAGE;
    /// No more of those.
    Told = 3, up to 0;
    /// Partitions of a task, of which nothing is sent before credit has been given.
    Execute = 4, up to LARGEST_MESSAGE;
    /// `value` bytes more may be sent of a partition, [`LARGEST_WINDOW`] with those that have not been.
    Credit = 5, up to 0;
    /// A partition, or a whole request, is not wanted any more. There is no answer.
    Cancel = 6, up to 0;
    /// What does the worker do? Answered by Answer: JSON.
    Status = 7, up to 0;
    /// Which version is the worker of? Answered by Answer: text.
    Info = 8, up to 0;
    /// A message on a task's channel, from the worker, as all from here on.
    Report = 16, up to LARGEST_MESSAGE;
    /// Rows of a partition: messages of an Arrow IPC stream, which begins with the schema. Takes head and length from its credit;
    /// sent while any of that is left.
    Rows = 17, up to LARGEST;
    /// There is no more of a partition or, with ALL, of a channel.
    End = 18, up to 0;
    /// As End, but because of an error: UTF-8.
    Failed = 19, up to LARGEST_TEXT;
    /// To Status and Info.
    Answer = 20, up to LARGEST_MESSAGE;
}

impl Kind {
    /// Whether it is for the worker, not for who asks.
    pub(crate) fn asks(self) -> bool {
        (self as u32) < Self::Report as u32
    }
}

/// In front of each frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) kind: Kind,
    pub(crate) length: usize,
    pub(crate) request: u64,
    pub(crate) partition: u32,
    pub(crate) value: u64,
}

impl Head {
    pub(crate) fn new(kind: Kind, request: u64, partition: u32) -> Self {
        Self { kind, length: 0, request, partition, value: 0 }
    }

    pub(crate) fn to_bytes(self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        let length = u32::try_from(self.length).expect("bounded by what a frame may have");
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        bytes[4..8].copy_from_slice(&(self.kind as u32).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.request.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.partition.to_le_bytes());
        bytes[24..].copy_from_slice(&self.value.to_le_bytes());
        bytes
    }

    /// The text says what is wrong.
    pub(crate) fn from_bytes(bytes: &[u8; HEAD]) -> Result<Self, String> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let kind = Kind::of(u32_at(4)).ok_or_else(|| format!("a frame of kind {}", u32_at(4)))?;
        let length = u32_at(0) as usize;
        let uneven = kind == Kind::Rows && (length == 0 || !length.is_multiple_of(GRAIN));
        if length > kind.most() || uneven {
            return Err(format!("{kind:?} of {length} bytes"));
        }
        Ok(Self { kind, length, request: u64_at(8), partition: u32_at(16), value: u64_at(24) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read() {
        for kind in (0..64).filter_map(Kind::of) {
            let length = if kind.most() > 0 { 192 } else { 0 };
            let head = Head { kind, length, request: 1 << 40, partition: ALL, value: 1 << 50 };
            assert_eq!(Head::from_bytes(&head.to_bytes()), Ok(head));
        }
    }

    #[test]
    fn heads_that_make_no_sense_are_refused() {
        let head = |kind: u32, length: u32| {
            let mut bytes = [0; HEAD];
            bytes[..4].copy_from_slice(&length.to_le_bytes());
            bytes[4..8].copy_from_slice(&kind.to_le_bytes());
            Head::from_bytes(&bytes)
        };
        assert!(head(17, 2 << 30).is_ok());
        for (kind, length) in [
            (0, 0),
            (9, 0),
            (21, 0),
            (3, 1),
            (4, (64 << 20) + 1),
            (17, 0),
            (17, 65),
            (17, (2 << 30) + 64),
            (19, 65_537),
        ] {
            assert!(head(kind, length).is_err(), "{kind}, {length}");
        }
    }
}

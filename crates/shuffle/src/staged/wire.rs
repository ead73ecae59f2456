//! Bytes of the staged protocol. All numbers are little-endian.
//!
//! ```text
//!  request, 64 bytes                    chunk: a head of 64 bytes, then `length` bytes
//!   0  "THALFTCH"                        0  "THALCHNK"
//!   8  token of the cluster  u64         8  request   u64
//!  16  request               u64        16  status    u32   0: rows, 1: text of an error
//!  24  shuffle               u64        20  length    u32
//!  32  source worker         u32        24  sequence  u32
//!  36  target worker         u32        28  chunks    u32   of this answer
//!  40  first message         u64        32  bytes     u64   of this answer
//!  48  most                  u64        40  next      u64   message behind this answer
//!  56  0…                               48  messages  u64   of the block
//!                                       56  chunk size u64
//!
//!  hello, once from who is asked
//!   0  "THALHERE"
//!   8  token of the cluster  u64
//!  16  of this process       u64, at random
//!  24  0…                    40 bytes
//! ```

use crate::wire::{u32_at, u64_at};
use crate::{Cluster, WorkerId, stream};

pub(super) const REQUEST: usize = 64;
pub(super) const HEAD: usize = 64;
pub(super) const HELLO: usize = 64;

/// What who is asked says first. `process` tells it from one that is started later at its address.
pub(super) fn hello(cluster: &Cluster, process: u64) -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..8].copy_from_slice(b"THALHERE");
    bytes[8..16].copy_from_slice(&cluster.token().to_le_bytes());
    bytes[16..24].copy_from_slice(&process.to_le_bytes());
    bytes
}

/// Which process that is. None if it makes no sense in this cluster.
pub(super) fn process_of(bytes: &[u8; HELLO], cluster: &Cluster) -> Option<u64> {
    let process = u64_at(bytes, 16);
    (*bytes == hello(cluster, process)).then_some(process)
}

/// Bytes of an answer, with something around the largest piece.
const LARGEST: u64 = stream::LARGEST as u64 + (64 << 20);

/// For a part of a block: rows of one worker for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) id: u64,
    pub(super) shuffle: u64,
    pub(super) source: WorkerId,
    pub(super) target: WorkerId,
    /// The answer begins with this message of the block.
    pub(super) first: u64,
    /// And has no more bytes than this, unless a single message has.
    pub(super) most: u64,
}

impl Request {
    pub(super) fn to_bytes(self, cluster: &Cluster) -> [u8; REQUEST] {
        let mut bytes = [0; REQUEST];
        bytes[..8].copy_from_slice(b"THALFTCH");
        bytes[8..16].copy_from_slice(&cluster.token().to_le_bytes());
        bytes[16..24].copy_from_slice(&self.id.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.shuffle.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.source.0.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.target.0.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.first.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.most.to_le_bytes());
        bytes
    }

    /// None if it makes no sense in this cluster.
    pub(super) fn from_bytes(bytes: &[u8; REQUEST], cluster: &Cluster) -> Option<Self> {
        let request = Self {
            id: u64_at(bytes, 16),
            shuffle: u64_at(bytes, 24),
            source: WorkerId(u32_at(bytes, 32)),
            target: WorkerId(u32_at(bytes, 36)),
            first: u64_at(bytes, 40),
            most: u64_at(bytes, 48),
        };
        let known = request.source.index() < cluster.workers() && request.target.index() < cluster.workers();
        (bytes[..8] == *b"THALFTCH" && u64_at(bytes, 8) == cluster.token() && known).then_some(request)
    }
}

/// In front of each chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) request: u64,
    pub(super) failed: bool,
    pub(super) length: u32,
    pub(super) sequence: u32,
    pub(super) chunks: u32,
    pub(super) bytes: u64,
    pub(super) next: u64,
    pub(super) messages: u64,
    pub(super) chunk: u64,
}

impl Head {
    pub(super) fn to_bytes(self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        bytes[..8].copy_from_slice(b"THALCHNK");
        bytes[8..16].copy_from_slice(&self.request.to_le_bytes());
        bytes[16..20].copy_from_slice(&u32::from(self.failed).to_le_bytes());
        bytes[20..24].copy_from_slice(&self.length.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.chunks.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.next.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.messages.to_le_bytes());
        bytes[56..].copy_from_slice(&self.chunk.to_le_bytes());
        bytes
    }

    /// None if it makes no sense. What is returned lies inside of its answer.
    pub(super) fn from_bytes(bytes: &[u8; HEAD]) -> Option<Self> {
        let head = Self {
            request: u64_at(bytes, 8),
            failed: u32_at(bytes, 16) == 1,
            length: u32_at(bytes, 20),
            sequence: u32_at(bytes, 24),
            chunks: u32_at(bytes, 28),
            bytes: u64_at(bytes, 32),
            next: u64_at(bytes, 40),
            messages: u64_at(bytes, 48),
            chunk: u64_at(bytes, 56),
        };
        let begin = u64::from(head.sequence).checked_mul(head.chunk)?;
        let last = head.sequence.checked_add(1)? == head.chunks;
        let length = if last { head.bytes.checked_sub(begin)? } else { head.chunk };
        let fits = length == u64::from(head.length) && begin + length <= head.bytes && head.bytes <= LARGEST;
        let sense = bytes[..8] == *b"THALCHNK" && head.sequence < head.chunks && head.next <= head.messages;
        (sense && fits && u32_at(bytes, 16) <= 1).then_some(head)
    }

    /// Where it begins in its answer.
    pub(super) fn begin(&self) -> usize {
        usize::try_from(u64::from(self.sequence) * self.chunk).expect("inside of an answer")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read() {
        let cluster = Cluster::new(9, &[(([127, 0, 0, 1], 1).into(), 4)]).unwrap();
        let request =
            Request { id: 1, shuffle: 2, source: WorkerId(3), target: WorkerId(0), first: 4, most: 5 };
        assert_eq!(Request::from_bytes(&request.to_bytes(&cluster), &cluster), Some(request));
        let other = Cluster::new(8, &[(([127, 0, 0, 1], 1).into(), 4)]).unwrap();
        assert_eq!(Request::from_bytes(&request.to_bytes(&cluster), &other), None);
        assert_eq!(process_of(&hello(&cluster, 7), &cluster), Some(7));
        assert_eq!(process_of(&hello(&cluster, 7), &other), None);
        let unknown = Request { source: WorkerId(4), ..request };
        assert_eq!(Request::from_bytes(&unknown.to_bytes(&cluster), &cluster), None);
    }

    #[test]
    fn a_chunk_lies_inside_of_its_answer() {
        let head = |sequence, length, chunks, bytes| {
            let (request, failed, next, messages, chunk) = (1, false, 2, 3, 100);
            let head = Head { request, failed, length, sequence, chunks, bytes, next, messages, chunk };
            Head::from_bytes(&head.to_bytes()).inspect(|read| assert_eq!(*read, head))
        };
        assert_eq!(head(1, 100, 3, 250).unwrap().begin(), 100);
        assert!(head(2, 50, 3, 250).is_some());
        for (sequence, length, chunks, bytes) in [
            (3, 0, 3, 250),
            (2, 51, 3, 250),
            (1, 99, 3, 250),
            (2, 100, 3, 100),
            (1, 100, 3, 150),
            (u32::MAX, 100, 0, 250),
        ] {
            assert!(
                head(sequence, length, chunks, bytes).is_none(),
                "{sequence}, {length}, {chunks}, {bytes}"
            );
        }
    }
}

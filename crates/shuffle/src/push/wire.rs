//! Bytes of the push protocol. All numbers are little-endian.
//!
//! ```text
//!  HELLO, once from each side          frame: a head of 32 bytes, then `length` bytes
//!   0  "THALSHUF"                       0  length     u32
//!   8  version          u32             4  kind       u32
//!  12  process          u32             8  shuffle    u64
//!  16  cluster's token  u64            16  source     u32   worker
//!  24  processes        u32            20  target     u32   worker
//!  28  workers of all   u32            24  value      u64
//!  32  window           u64, bytes
//!  40  0…               24 bytes
//! ```

use crate::stream::LARGEST;
use crate::wire::{u32_at, u64_at};
use crate::{Cluster, Error, NodeId, Result, WorkerId};

pub(super) const HELLO: usize = 64;
pub(super) const HEAD: usize = 32;

/// Lengths of whole messages are multiples of this.
const GRAIN: usize = 64;

const MAGIC: [u8; 8] = *b"THALSHUF";
const VERSION: u32 = 1;

/// The beginning of a connection. Each side tells how many bytes of each shuffle it takes without having read them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) node: NodeId,
    pub(super) window: u64,
}

impl Hello {
    pub(super) fn to_bytes(self, cluster: &Cluster) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.node.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&cluster.token().to_le_bytes());
        bytes[24..28].copy_from_slice(&count(cluster.nodes()).to_le_bytes());
        bytes[28..32].copy_from_slice(&count(cluster.workers()).to_le_bytes());
        bytes[32..40].copy_from_slice(&self.window.to_le_bytes());
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8; HELLO], cluster: &Cluster) -> Result<Self> {
        if bytes[..8] != MAGIC || u32_at(bytes, 8) != VERSION {
            return Err(Error::Cluster("the other end speaks something else, or another version".into()));
        }
        let (nodes, workers) = (count(cluster.nodes()), count(cluster.workers()));
        if (u64_at(bytes, 16), u32_at(bytes, 24), u32_at(bytes, 28)) != (cluster.token(), nodes, workers) {
            return Err(Error::Cluster("the other end belongs to another cluster".into()));
        }
        match (u32_at(bytes, 12), u64_at(bytes, 32)) {
            (node, window) if node < nodes && window > 0 && i64::try_from(window).is_ok() => {
                Ok(Self { node: NodeId(node), window })
            }
            (node, window) => Err(Error::Cluster(format!("{} with a window of {window}", NodeId(node)))),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Rows from `source` for `target`: messages of an Arrow IPC stream that the two have for themselves.
    Rows,
    /// `source` has no more rows, for any worker of the receiving process.
    End,
    /// `source` can't go on, and why: text.
    GaveUp,
    /// `value` bytes of the shuffle's window are free again.
    Credit,
    /// The sender leaves; there is nothing behind this.
    Goodbye,
}

/// In front of each frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) kind: Kind,
    pub(super) length: usize,
    pub(super) shuffle: u64,
    pub(super) source: WorkerId,
    pub(super) target: WorkerId,
    pub(super) value: u64,
}

impl Head {
    pub(super) fn new(kind: Kind, shuffle: u64, source: WorkerId) -> Self {
        Self { kind, length: 0, shuffle, source, target: WorkerId(0), value: 0 }
    }

    pub(super) fn to_bytes(self) -> [u8; HEAD] {
        let kind: u32 = match self.kind {
            Kind::Rows => 1,
            Kind::End => 2,
            Kind::GaveUp => 3,
            Kind::Credit => 4,
            Kind::Goodbye => 5,
        };
        let mut bytes = [0; HEAD];
        bytes[..4].copy_from_slice(&count(self.length).to_le_bytes());
        bytes[4..8].copy_from_slice(&kind.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.shuffle.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.source.0.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.target.0.to_le_bytes());
        bytes[24..].copy_from_slice(&self.value.to_le_bytes());
        bytes
    }

    /// The text says what is wrong.
    pub(super) fn from_bytes(bytes: &[u8; HEAD]) -> std::result::Result<Self, String> {
        let kind = match u32_at(bytes, 4) {
            1 => Kind::Rows,
            2 => Kind::End,
            3 => Kind::GaveUp,
            4 => Kind::Credit,
            5 => Kind::Goodbye,
            other => return Err(format!("frame of kind {other}")),
        };
        let length = u32_at(bytes, 0) as usize;
        let most = match kind {
            Kind::Rows => LARGEST,
            Kind::GaveUp => 64 << 10,
            Kind::End | Kind::Credit | Kind::Goodbye => 0,
        };
        // Small ones would take much more memory than of the window.
        let uneven = kind == Kind::Rows && (length == 0 || !length.is_multiple_of(GRAIN));
        if length > most || uneven {
            return Err(format!("{kind:?} of {length} bytes"));
        }
        Ok(Self {
            kind,
            length,
            shuffle: u64_at(bytes, 8),
            source: WorkerId(u32_at(bytes, 16)),
            target: WorkerId(u32_at(bytes, 20)),
            value: u64_at(bytes, 24),
        })
    }
}

fn count(of: usize) -> u32 {
    u32::try_from(of).expect("bounded where it was made")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(token: u64, workers: usize) -> Cluster {
        Cluster::new(token, &[(([127, 0, 0, 1], 1).into(), workers), (([127, 0, 0, 1], 2).into(), 1)])
            .unwrap()
    }

    #[test]
    fn what_was_written_is_read() {
        let hello = Hello { node: NodeId(1), window: 1 << 20 };
        let bytes = hello.to_bytes(&cluster(7, 2));
        assert_eq!(Hello::from_bytes(&bytes, &cluster(7, 2)).unwrap(), hello);
        for kind in [Kind::Rows, Kind::End, Kind::GaveUp, Kind::Credit, Kind::Goodbye] {
            let length = if matches!(kind, Kind::Rows | Kind::GaveUp) { 192 } else { 0 };
            let (source, target) = (WorkerId(3), WorkerId(4));
            let head = Head { kind, length, shuffle: 1 << 40, source, target, value: 1 << 50 };
            assert_eq!(Head::from_bytes(&head.to_bytes()), Ok(head));
        }
    }

    #[test]
    fn strangers_are_refused() {
        let bytes = Hello { node: NodeId(1), window: 1 }.to_bytes(&cluster(7, 2));
        assert!(Hello::from_bytes(&bytes, &cluster(8, 2)).is_err());
        assert!(Hello::from_bytes(&bytes, &cluster(7, 3)).is_err());
        for (at, value) in [(0, 0), (8, 9), (12, 2), (39, 0x80), (32, 0)] {
            let mut wrong = bytes;
            wrong[at] = value;
            assert!(Hello::from_bytes(&wrong, &cluster(7, 2)).is_err(), "byte {at}");
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
        assert!(head(1, 2 << 30).is_ok());
        for (kind, length) in
            [(0, 0), (6, 0), (1, 0), (1, 65), (1, (2 << 30) + 1), (2, 1), (3, 65_537), (4, 1), (5, 1)]
        {
            assert!(head(kind, length).is_err(), "{kind}, {length}");
        }
    }
}

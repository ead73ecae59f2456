//! Messages that prove themselves.
//!
//! ```text
//! 0        8                                      size-8   size
//! | stamp  | a rotation of fixed noise            | !stamp |
//!
//! stamp, little endian:  phase (8 bits) | connection (16) | sequence (40)
//! ```
//!
//! Both stamps of every message are checked at both ends, so a lost, repeated, stale, torn or misdirected
//! message is noticed at once. Comparing every byte of 64 KiB would cost more than moving them, so that is done
//! for one message in [`SAMPLE`]; the noise turns at each of those, so that bytes left over from an earlier
//! lap of a buffer do not pass.

use anyhow::{bail, ensure};

/// One message in this many is compared byte by byte.
const SAMPLE: u64 = 64;
const STAMP: usize = 8;
const ROTATIONS: usize = 61;

/// Which part of a measurement a message belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Before the clock starts.
    WarmUp,
    /// While it runs.
    Measured,
    /// The last one: the server takes its own clocks down and expects no more.
    End,
}

/// Writes the messages of one connection and recognizes their echoes.
#[derive(Debug)]
pub(super) struct Author {
    noise: Noise,
    connection: u16,
    sequence: u64,
    message: Vec<u8>,
}

impl Author {
    /// Messages of `size` bytes, at least 16, on connection number `connection`.
    pub(super) fn new(connection: u16, size: usize) -> Self {
        Self { noise: Noise::new(size), connection, sequence: 0, message: vec![0; size] }
    }

    /// The next message.
    pub(super) fn next(&mut self, phase: Phase) -> &[u8] {
        let end = self.message.len() - STAMP;
        if self.sequence.is_multiple_of(SAMPLE) {
            self.message[STAMP..end].copy_from_slice(self.noise.body(self.sequence));
        }
        let stamp = stamp(phase, self.connection, self.sequence);
        self.message[..STAMP].copy_from_slice(&stamp.to_le_bytes());
        self.message[end..].copy_from_slice(&(!stamp).to_le_bytes());
        self.sequence += 1;
        &self.message
    }

    /// The last message again, for what a short write left over.
    pub(super) fn message(&self) -> &[u8] {
        &self.message
    }

    /// Checks that `echo` is the last message.
    ///
    /// # Errors
    /// It is not.
    pub(super) fn check(&self, echo: &[u8]) -> anyhow::Result<()> {
        let end = self.message.len() - STAMP;
        let same_stamps = echo[..STAMP] == self.message[..STAMP] && echo[end..] == self.message[end..];
        let sequence = self.sequence - 1;
        ensure!(same_stamps, "connection {}: the echo of message {sequence} is another's", self.connection);
        if sequence.is_multiple_of(SAMPLE) {
            ensure!(
                *echo == *self.message,
                "connection {}: echo {sequence} has other bytes",
                self.connection
            );
        }
        Ok(())
    }
}

/// Checks the messages that arrive on one connection.
#[derive(Debug)]
pub(super) struct Reader {
    noise: Noise,
    connection: Option<u16>,
    sequence: u64,
}

impl Reader {
    /// Messages of `size` bytes, at least 16.
    pub(super) fn new(size: usize) -> Self {
        Self { noise: Noise::new(size), connection: None, sequence: 0 }
    }

    /// Checks that `message` is the one that comes next on this connection, and says where it belongs.
    ///
    /// # Errors
    /// It is another one, or has bytes that were not written.
    pub(super) fn check(&mut self, message: &[u8]) -> anyhow::Result<Phase> {
        let end = message.len() - STAMP;
        let first = word(&message[..STAMP]);
        let connection = u16::try_from((first >> 40) & 0xffff).expect("16 bits are left");
        let sequence = first & ((1 << 40) - 1);
        ensure!(word(&message[end..]) == !first, "message {} is torn", self.sequence);
        ensure!(*self.connection.get_or_insert(connection) == connection, "a message of another connection");
        ensure!(sequence == self.sequence, "message {sequence} came in place of {}", self.sequence);
        if sequence.is_multiple_of(SAMPLE) {
            let intact = message[STAMP..end] == *self.noise.body(sequence);
            ensure!(intact, "message {sequence} has other bytes than were sent");
        }
        self.sequence += 1;
        match first >> 56 {
            0 => Ok(Phase::WarmUp),
            1 => Ok(Phase::Measured),
            2 => Ok(Phase::End),
            other => bail!("message {sequence} is of unknown phase {other}"),
        }
    }
}

fn stamp(phase: Phase, connection: u16, sequence: u64) -> u64 {
    let phase: u64 = match phase {
        Phase::WarmUp => 0,
        Phase::Measured => 1,
        Phase::End => 2,
    };
    phase << 56 | u64::from(connection) << 40 | sequence
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("a stamp has eight bytes"))
}

#[derive(Debug)]
struct Noise {
    bytes: Vec<u8>,
    body: usize,
}

impl Noise {
    /// For messages of `size` bytes.
    fn new(size: usize) -> Self {
        let body = size - 2 * STAMP;
        let words = (body + ROTATIONS).div_ceil(8) as u64;
        Self { bytes: (0..words).flat_map(|index| mix(index).to_le_bytes()).collect(), body }
    }

    fn body(&self, sequence: u64) -> &[u8] {
        let turn = usize::try_from(sequence / SAMPLE % ROTATIONS as u64).expect("below 61");
        &self.bytes[turn..turn + self.body]
    }
}

/// A number that says little about its neighbours (the finalizer of SplitMix64).
pub(super) fn mix(index: u64) -> u64 {
    let mut word = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 64;

    fn pair() -> (Author, Reader) {
        (Author::new(7, SIZE), Reader::new(SIZE))
    }

    #[test]
    fn every_message_of_a_long_run_is_recognized() {
        for size in [16, 64, 1000] {
            let (mut author, mut reader) = (Author::new(7, size), Reader::new(size));
            for _ in 0..SAMPLE * 130 {
                let message = author.next(Phase::Measured).to_vec();
                assert_eq!(reader.check(&message).unwrap(), Phase::Measured);
                author.check(&message).unwrap();
            }
        }
    }

    #[test]
    fn a_repeated_message_is_noticed_at_both_ends() {
        let (mut author, mut reader) = pair();
        let first = author.next(Phase::WarmUp).to_vec();
        reader.check(&first).unwrap();
        author.next(Phase::WarmUp);
        assert!(reader.check(&first).is_err());
        assert!(author.check(&first).is_err());
    }

    #[test]
    fn a_torn_message_is_noticed() {
        let (mut author, mut reader) = pair();
        let mut message = author.next(Phase::WarmUp).to_vec();
        reader.check(&message).unwrap();
        let tail = message[SIZE - STAMP..].to_vec();
        message.copy_from_slice(author.next(Phase::WarmUp));
        message[SIZE - STAMP..].copy_from_slice(&tail);
        assert!(reader.check(&message).is_err());
        assert!(author.check(&message).is_err());
    }

    #[test]
    fn one_wrong_byte_in_a_sampled_message_is_noticed() {
        for at in STAMP..SIZE - STAMP {
            let (mut author, mut reader) = pair();
            let mut message = author.next(Phase::End).to_vec();
            message[at] ^= 1;
            assert!(reader.check(&message).is_err());
            assert!(author.check(&message).is_err());
        }
    }

    #[test]
    fn the_body_of_an_earlier_lap_is_noticed() {
        let (mut author, mut reader) = pair();
        let old = author.next(Phase::WarmUp).to_vec();
        reader.check(&old).unwrap();
        for _ in 1..SAMPLE {
            let message = author.next(Phase::WarmUp).to_vec();
            reader.check(&message).unwrap();
        }
        let mut message = author.next(Phase::WarmUp).to_vec();
        message[STAMP..SIZE - STAMP].copy_from_slice(&old[STAMP..SIZE - STAMP]);
        assert!(reader.check(&message).is_err());
    }

    #[test]
    fn another_connections_message_is_noticed() {
        let (mut author, mut reader) = pair();
        reader.check(author.next(Phase::WarmUp)).unwrap();
        let mut other = Author::new(8, SIZE);
        other.next(Phase::WarmUp);
        assert!(reader.check(other.next(Phase::WarmUp)).is_err());
    }
}

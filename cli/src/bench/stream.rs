//! One-way stream: 64 KiB writes, as fast as they go.
//!
//! Both sides walk over their memory block by block, from the end back to the start: with 64 KiB everything
//! stays in the first-level caches, with 64 MiB nothing does. A block of `memory` is filled with noise once.
//! Eight words of each block are then stamped with its number before it is sent, and the receiver checks those
//! and eight of the noise words, at places that turn from block to block. That proves the order, the place and
//! the freshness of each block, and costs next to nothing against moving it.
//!
//! At the end of the warm-up and of the measurement the receiver answers with its count of blocks, and only
//! then goes the clock: what is still on its way counts for neither.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use super::message::{Phase, mix};
use super::plan::Wait;
use super::role::{Meter, Report, Session, Usage};
use super::socket::{Listener, Stream};

/// Bytes of one write.
pub(super) const BLOCK: usize = 64 * 1024;
const WORDS: usize = BLOCK / 8;
const STRIDE: usize = WORDS / 8;
const ANSWER: u64 = 1 << 63;
const END: u64 = 1 << 62;
const MEASURED: u64 = 1 << 61;
const NUMBER: u64 = MEASURED - 1;
/// Blocks between two looks at the clock.
const BATCH: u64 = 16;

/// Receives into `memory` bytes in turn, and checks.
pub(super) fn serve(listener: &Listener, memory: usize) -> anyhow::Result<Report> {
    let mut stream = listener.accept_stream().context("accept")?;
    let mut memory = vec![0; memory];
    let (mut meter, mut number) = (Meter::new(), 0);
    loop {
        let blocks = memory.len() / BLOCK;
        let place = usize::try_from(number)? % blocks;
        let block = &mut memory[place * BLOCK..][..BLOCK];
        if !stream.receive_all(block, Wait::Blocking).context("receive")? {
            return meter.finish();
        }
        let flags = check(block, number, blocks)?;
        number += 1;
        meter.observe(match flags {
            _ if flags & END != 0 => Phase::End,
            _ if flags & MEASURED != 0 => Phase::Measured,
            _ => Phase::WarmUp,
        })?;
        if flags & ANSWER != 0 {
            stream.transmit_all(&number.to_le_bytes()).context("answer")?;
        }
    }
}

/// Sends from `memory` bytes in turn.
pub(super) fn drive(session: &Session, memory: usize) -> anyhow::Result<Report> {
    let stream = session.endpoint.connect_stream().context("connect")?;
    let memory = (0..memory as u64 / 8).flat_map(|index| mix(index).to_le_bytes()).collect();
    let mut sender = Sender { stream, memory, number: 0 };
    sender.run(0, session.warm_up)?;
    let before = Usage::now(false)?;
    let (operations, elapsed) = sender.run(MEASURED, session.seconds)?;
    let used = Usage::now(false)?.since(&before, operations);
    sender.send(END | ANSWER)?;
    sender.receive_answer()?;
    Ok(Report { seconds: elapsed.as_secs_f64(), connections: 1, ..used })
}

struct Sender {
    stream: Stream,
    memory: Vec<u8>,
    number: u64,
}

impl Sender {
    /// Blocks for at least `seconds`, until the receiver has said that it has them; their number and time.
    fn run(&mut self, flags: u64, seconds: f64) -> anyhow::Result<(u64, Duration)> {
        let (start, limit, first) = (Instant::now(), Duration::from_secs_f64(seconds), self.number);
        while start.elapsed() < limit {
            for _ in 0..BATCH {
                self.send(flags)?;
            }
        }
        self.send(flags | ANSWER)?;
        self.receive_answer()?;
        Ok((self.number - first, start.elapsed()))
    }

    fn send(&mut self, flags: u64) -> anyhow::Result<()> {
        let place = usize::try_from(self.number)? % (self.memory.len() / BLOCK);
        let block = &mut self.memory[place * BLOCK..][..BLOCK];
        for word in (0..WORDS).step_by(STRIDE) {
            block[word * 8..][..8].copy_from_slice(&(self.number | flags).to_le_bytes());
        }
        self.number += 1;
        self.stream.transmit_all(block).context("send")
    }

    fn receive_answer(&mut self) -> anyhow::Result<()> {
        let mut answer = [0; 8];
        let open = self.stream.receive_all(&mut answer, Wait::Blocking).context("receive the answer")?;
        ensure!(open, "the receiver closed the connection");
        let answer = u64::from_le_bytes(answer);
        ensure!(answer == self.number, "the receiver has {answer} blocks of {}", self.number);
        Ok(())
    }
}

/// Checks that `block` is the block `number` of a sender that walks over `blocks` blocks; returns its flags.
fn check(block: &[u8], number: u64, blocks: usize) -> anyhow::Result<u64> {
    let word = |index: usize| u64::from_le_bytes(block[index * 8..][..8].try_into().expect("eight bytes"));
    let stamp = word(0);
    ensure!(stamp & NUMBER == number, "block {} came in place of {number}", stamp & NUMBER);
    let place = number % blocks as u64;
    // A turn of 1 to STRIDE-1 never meets a stamp.
    let turn = usize::try_from(number / blocks as u64 % (STRIDE as u64 - 1))? + 1;
    for index in (0..WORDS).step_by(STRIDE) {
        ensure!(word(index) == stamp, "block {number} is torn at word {index}");
        let index = index + turn;
        let expected = mix(place * WORDS as u64 + index as u64);
        ensure!(word(index) == expected, "block {number} has other bytes at word {index}");
    }
    Ok(stamp & !NUMBER)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(number: u64) -> Vec<u8> {
        let mut block: Vec<u8> = (0..WORDS as u64).flat_map(|index| mix(index).to_le_bytes()).collect();
        for word in (0..WORDS).step_by(STRIDE) {
            block[word * 8..][..8].copy_from_slice(&(number | MEASURED).to_le_bytes());
        }
        block
    }

    #[test]
    fn a_block_is_recognized_by_its_number() {
        assert_eq!(check(&block(5), 5, 1).unwrap(), MEASURED);
        assert!(check(&block(5), 6, 1).is_err());
    }

    #[test]
    fn a_tear_at_any_stamp_is_noticed() {
        for word in (0..WORDS).step_by(STRIDE) {
            let mut torn = block(5);
            torn[word * 8..][..8].copy_from_slice(&(4 | MEASURED).to_le_bytes());
            assert!(check(&torn, 5, 1).is_err());
        }
    }

    #[test]
    fn a_wrong_byte_anywhere_is_noticed_within_one_turn() {
        for at in [8, 4000, BLOCK / 2 + 8, BLOCK - 1] {
            let noticed = (0..STRIDE as u64).any(|number| {
                let mut wrong = block(number);
                wrong[at] ^= 1;
                check(&wrong, number, 1).is_err()
            });
            assert!(noticed, "byte {at}");
        }
    }
}

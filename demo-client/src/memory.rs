//! Reading a result's memory, and how fast this machine copies it: what no transport that copies can beat.

use std::hint::black_box;
use std::time::{Duration, Instant};

use arrow_array::{Array, RecordBatch};
use arrow_data::ArrayData;

/// Reads every byte of a batch.
pub(crate) fn read(batch: &RecordBatch) {
    let mut buffers = Vec::new();
    batch.columns().iter().for_each(|column| collect(&column.to_data(), &mut buffers));
    for buffer in buffers {
        let (words, rest) = buffer.as_chunks::<8>();
        let sum = words.iter().fold(0_u64, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)));
        black_box(rest.iter().fold(sum, |sum, byte| sum.wrapping_add(u64::from(*byte))));
    }
}

/// Bytes beyond which batches are not kept.
const MOST: usize = 256 << 20;

/// Copies, of which the first also brings the destination into being.
const ROUNDS: usize = 4;

/// The first batches of a result, kept for copying.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    buffers: Vec<arrow_buffer::Buffer>,
    bytes: usize,
}

impl Kept {
    pub(crate) fn add(&mut self, batch: &RecordBatch) {
        if self.bytes < MOST {
            let before = self.buffers.len();
            batch.columns().iter().for_each(|column| collect(&column.to_data(), &mut self.buffers));
            self.bytes += self.buffers[before..].iter().map(|buffer| buffer.len()).sum::<usize>();
        }
    }

    /// Bytes, and the fastest time of copying them buffer by buffer, from memory that is not in the caches if they are more than
    /// these hold.
    pub(crate) fn copy(&self) -> (usize, Duration) {
        let mut destination = vec![0_u8; self.bytes];
        let times = (0..ROUNDS).map(|_| {
            let started = Instant::now();
            let mut rest = &mut destination[..];
            for buffer in &self.buffers {
                let (part, behind) = rest.split_at_mut(buffer.len());
                part.copy_from_slice(buffer);
                rest = behind;
            }
            let time = started.elapsed();
            black_box(&destination);
            time
        });
        (self.bytes, times.skip(1).min().unwrap_or_default())
    }
}

fn collect(array: &ArrayData, buffers: &mut Vec<arrow_buffer::Buffer>) {
    buffers.extend(array.nulls().map(|nulls| nulls.buffer().clone()));
    buffers.extend(array.buffers().iter().cloned());
    array.child_data().iter().for_each(|child| collect(child, buffers));
}

//! Memory for what arrives, used again and again.
//!
//! Arrays are slices of the memory that they were received in, so it is free when the last of them has been dropped, wherever
//! that happens. The pool keeps one more reference to each area and looks, oldest first, for one that nobody else has any
//! more. Sizes are powers of two, so that areas suit many messages.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow_buffer::{Buffer, MutableBuffer};

/// Nothing smaller is allocated.
const SMALLEST: usize = 64;

/// Areas that are looked at before a new one is made.
const LOOKS: usize = 8;

/// Areas of memory, of which as many as fit below a bound are kept for later messages.
#[derive(Debug)]
pub struct Pool {
    bound: usize,
    kept: Mutex<Kept>,
    reused: AtomicU64,
    allocated: AtomicU64,
}

#[derive(Debug)]
struct Kept {
    bytes: usize,
    /// By the exponent of their size.
    areas: [VecDeque<Buffer>; usize::BITS as usize],
}

/// What a pool has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStatus {
    /// Areas that were used again.
    pub reused: u64,
    /// Areas that were allocated.
    pub allocated: u64,
    /// Bytes of the areas that it keeps, whether in use or not.
    pub kept_bytes: usize,
    /// Of these, bytes that are in use.
    pub used_bytes: usize,
}

impl Pool {
    /// A pool that keeps up to `bound` bytes. What is needed beyond that is allocated, and goes back to the system.
    pub fn new(bound: usize) -> Self {
        let kept = Mutex::new(Kept { bytes: 0, areas: std::array::from_fn(|_| VecDeque::new()) });
        Self { bound, kept, reused: AtomicU64::new(0), allocated: AtomicU64::new(0) }
    }

    /// Memory of at least so many bytes, which hold anything. It begins at a multiple of 64.
    pub fn take(&self, bytes: usize) -> MutableBuffer {
        let size = bytes.max(SMALLEST).next_power_of_two();
        let mut kept = self.lock();
        let areas = &mut kept.areas[size.trailing_zeros() as usize];
        for _ in 0..LOOKS.min(areas.len()) {
            let area = areas.pop_front().expect("as many as were counted");
            if area.strong_count() > 1 {
                areas.push_back(area);
                continue;
            }
            match area.into_mutable() {
                Ok(memory) => {
                    kept.bytes -= size;
                    self.reused.fetch_add(1, Ordering::Relaxed);
                    return memory;
                }
                Err(area) => areas.push_back(area),
            }
        }
        drop(kept);
        self.allocated.fetch_add(1, Ordering::Relaxed);
        MutableBuffer::from_len_zeroed(size)
    }

    /// The first `bytes` of memory that [`Pool::take`] gave, as something to make arrays of.
    pub fn filled(&self, memory: MutableBuffer, bytes: usize) -> Buffer {
        let area = Buffer::from(memory);
        let filled = area.slice_with_length(0, bytes);
        let mut kept = self.lock();
        if area.len() <= self.bound {
            kept.make_room(area.len(), self.bound);
        }
        if kept.bytes + area.len() <= self.bound {
            kept.bytes += area.len();
            kept.areas[area.len().trailing_zeros() as usize].push_back(area);
        }
        filled
    }

    pub fn status(&self) -> PoolStatus {
        let kept = self.lock();
        let used = kept.areas.iter().flatten().filter(|area| area.strong_count() > 1);
        PoolStatus {
            reused: self.reused.load(Ordering::Relaxed),
            allocated: self.allocated.load(Ordering::Relaxed),
            kept_bytes: kept.bytes,
            used_bytes: used.map(Buffer::len).sum(),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().expect("nobody panics with it")
    }
}

impl Kept {
    /// Drops areas of other sizes that nobody has any more, the largest first, until one of this size fits below the bound.
    fn make_room(&mut self, size: usize, bound: usize) {
        for class in (0..self.areas.len()).rev().filter(|class| *class != size.trailing_zeros() as usize) {
            for _ in 0..LOOKS.min(self.areas[class].len()) {
                if self.bytes + size <= bound {
                    return;
                }
                let area = self.areas[class].pop_front().expect("as many as were counted");
                match area.strong_count() {
                    1 => self.bytes -= area.len(),
                    _ => self.areas[class].push_back(area),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(pool: &Pool, bytes: usize) -> Buffer {
        pool.filled(pool.take(bytes), bytes)
    }

    #[test]
    fn memory_is_used_again_once_nobody_has_it() {
        let pool = Pool::new(1 << 20);
        let first = fill(&pool, 5_000);
        let slice = first.slice_with_length(64, 64);
        let address = first.as_ptr();
        drop(first);
        assert_ne!(fill(&pool, 5_000).as_ptr(), address, "a slice is in use");
        drop(slice);
        let both = [fill(&pool, 8_192), fill(&pool, 6_000)];
        assert!(both.iter().any(|buffer| buffer.as_ptr() == address));
        let status = pool.status();
        assert_eq!((status.allocated, status.reused), (2, 2));
        assert_eq!((status.kept_bytes, status.used_bytes), (16_384, 16_384));
        drop(both);
        assert_eq!(pool.status().used_bytes, 0);
    }

    #[test]
    fn no_more_is_kept_than_the_bound() {
        let pool = Pool::new(10_000);
        let many: Vec<Buffer> = (0..10).map(|_| fill(&pool, 4_096)).collect();
        assert_eq!(pool.status().kept_bytes, 8_192);
        drop(many);
        assert_eq!(fill(&pool, 1 << 20).len(), 1 << 20);
        assert_eq!(pool.status().kept_bytes, 8_192);
    }

    #[test]
    fn what_nobody_needs_any_more_makes_way_for_other_sizes() {
        let pool = Pool::new(10_000);
        let many: Vec<Buffer> = (0..10).map(|_| fill(&pool, 4_096)).collect();
        let used = fill(&pool, 1_000);
        drop(many);
        drop(fill(&pool, 8_000));
        let status = pool.status();
        assert_eq!((status.kept_bytes, status.used_bytes), (9_216, 1_024));
        let again = fill(&pool, 8_000);
        assert_eq!(pool.status().reused, 1);
        // What is in use stays.
        let many: Vec<Buffer> = (0..10).map(|_| fill(&pool, 4_096)).collect();
        assert_eq!(pool.status().kept_bytes, 9_216);
        drop((used, again, many));
    }

    #[test]
    fn what_is_small_takes_little() {
        let pool = Pool::new(1 << 20);
        let many: Vec<Buffer> = (0..1_000).map(|_| fill(&pool, 64)).collect();
        assert_eq!(pool.status().kept_bytes, 64_000);
        drop(many);
    }

    #[test]
    fn nothing_and_odd_sizes_are_served() {
        let pool = Pool::new(1 << 20);
        for bytes in [0, 1, 4_095, 4_096, 4_097, 100_000] {
            let buffer = fill(&pool, bytes);
            assert_eq!(buffer.len(), bytes);
            assert!(buffer.as_ptr().align_offset(64) == 0);
        }
    }
}

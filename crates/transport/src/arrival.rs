//! When the bytes that wait in a ring were put there: an event loop with several rings takes them in this order, as the kernel has its
//! ready list in the order of arrival (epoll_wait(2); `ep_poll_callback` of fs/eventpoll.c). Producers note the times for consumers that
//! have asked for it ([`crate::control::Armed::ask_for_times`]): reading the clock, and the cache line that is written, take up to a tenth of an exchange of small messages.
//!
//! Nothing depends on it but the order of reports. So the words may contradict each other while they are written, and a peer that lies
//! is reported earlier or later.

// No model asks for the order, and each atomic more would multiply the states.
use std::sync::atomic::{AtomicU64, Ordering};

/// Publishes of a direction that are remembered: as many as fit beside its head in one cache line.
const MARKS: usize = 3;

/// A publish.
#[derive(Debug, Default)]
#[repr(C)]
struct Mark {
    /// Where its bytes begin, as a stream position.
    from: AtomicU64,
    /// [`now`].
    at: AtomicU64,
}

/// The last publishes of a direction, the newest first. Written by the producer.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Marks([Mark; MARKS]);

impl Marks {
    /// Notes that bytes from position `from` on are about to be made visible, or the end that is there.
    pub(crate) fn note(&self, from: u64) {
        // First: the consumer looks at this cache line again and again, so all is written at once.
        let now = now();
        for older in (1..MARKS).rev() {
            let (target, source) = (&self.0[older], &self.0[older - 1]);
            target.at.store(source.at.load(Ordering::Relaxed), Ordering::Relaxed);
            target.from.store(source.from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.0[0].at.store(now, Ordering::Relaxed);
        self.0[0].from.store(from, Ordering::Relaxed);
    }

    /// When the byte at position `tail` was published, or, if that is forgotten, the oldest publish that is remembered.
    pub fn of(&self, tail: u64) -> u64 {
        let mut at = 0;
        for mark in &self.0 {
            at = mark.at.load(Ordering::Relaxed);
            if mark.from.load(Ordering::Relaxed) <= tail {
                break;
            }
        }
        at
    }
}

/// A clock that all processes of a host share, and that is read in some nanoseconds; in units of its own.
#[cfg(target_arch = "x86_64")]
pub fn now() -> u64 {
    // SAFETY: every processor of this kind has it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// A clock that all processes of a host share, in nanoseconds.
#[cfg(not(target_arch = "x86_64"))]
pub fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn bytes_came_when_the_publish_that_holds_them_was_made() {
        let marks = Marks::default();
        let mut times = Vec::new();
        for from in [0, 10, 25] {
            marks.note(from);
            times.push(marks.0[0].at.load(Ordering::Relaxed));
        }
        assert!(times.is_sorted(), "{times:?}");
        let expected = [(0, 0), (9, 0), (10, 1), (24, 1), (25, 2), (1000, 2)];
        for (position, publish) in expected {
            assert_eq!(marks.of(position), times[publish], "byte {position}");
        }
    }

    #[test]
    fn of_what_is_forgotten_the_oldest_publish_tells() {
        let marks = Marks::default();
        for from in [0, 10, 25, 40, 60] {
            marks.note(from);
        }
        assert_eq!(marks.of(3), marks.of(30));
        assert!(marks.of(3) < marks.of(60));
    }
}

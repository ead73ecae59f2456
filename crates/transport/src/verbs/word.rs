//! What a side may say of its peer's stream when the peer's process has died, and nothing but the kernel's FIN tells.
//!
//! A process's queue pair dies with it, and what it had posted last may not have arrived, although it was told that it had sent
//! it. So the end of the TCP connection alone means nothing: unless the peer has announced its end, or one of two things is known,
//! the stream counts as cut short, and the connection as reset.
//!
//! ```text
//!   vouched   this side slept: it had all that was posted, and has not been rung for since. Whoever posts for a
//!             sleeper rings before its call returns
//!   word      the peer slept, or was ending, and all that it had posted had arrived. Before a call returns that posts again, it
//!             rings, unless this side has rung meanwhile, which takes the word back as well
//!   last word its process ends: all has arrived, and nothing follows. If something does, from another of its threads, that
//!             waits until it has arrived, with a last word of its own
//! ```
//!
//! Bells are bytes on TCP, and the kernel delivers them when the process is gone. Their count is announced by RDMA behind the
//! message that they are for: so a bell that was not announced stands for a message that was lost. A kernel that sends a reset,
//! because the process has left bytes or bells unread, delivers nothing before it: only a last word tells then.

use std::sync::atomic::{AtomicU64, Ordering};

/// No position, and no count.
const NONE: u64 = u64::MAX;
/// In place of a count: the process ends, and sends nothing more.
pub(super) const ENDS: u64 = u64::MAX - 1;

/// The word that this side has given.
#[derive(Debug)]
pub(super) struct Promise {
    /// How often the peer had rung. [`NONE`]: it is not in force. [`ENDS`]: it is the last.
    rings: AtomicU64,
    /// What had been posted.
    posted: AtomicU64,
}

impl Promise {
    pub(super) fn new() -> Self {
        Self { rings: AtomicU64::new(NONE), posted: AtomicU64::new(NONE) }
    }

    /// To be called by who holds the right to post, and writes the word then: whether it is new.
    pub(super) fn give(&self, posted: u64, rings: u64) -> bool {
        if rings != ENDS && self.rings.load(Ordering::SeqCst) == ENDS {
            // Another thread sleeps while the process ends.
            return false;
        }
        let same = self.posted.swap(posted, Ordering::SeqCst) == posted;
        let before = self.rings.swap(rings, Ordering::SeqCst);
        !same || before != rings
    }

    /// Whether it is in force, and about all that has been `posted`.
    pub(super) fn stands(&self, posted: u64) -> bool {
        self.rings.load(Ordering::SeqCst) != NONE && self.posted.load(Ordering::SeqCst) == posted
    }

    /// After a message has been posted, under the send lock. `rung` tells how often the peer has rung, if that is known.
    pub(super) fn after_a_message(&self, rung: impl FnOnce() -> Option<u64>) -> Broken {
        match self.rings.load(Ordering::SeqCst) {
            NONE => Broken::No,
            ENDS => Broken::AtTheEnd,
            _ => match self.rings.swap(NONE, Ordering::SeqCst) {
                ENDS => {
                    self.rings.store(ENDS, Ordering::SeqCst);
                    Broken::AtTheEnd
                }
                rings if rung().is_none_or(|rung| rung <= rings) => Broken::ByThis,
                _ => Broken::No,
            },
        }
    }
}

/// What a message has done to the word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Broken {
    /// It was not in force, or the peer has taken it back.
    No,
    /// It was in force: a bell has to say that it is not any more.
    ByThis,
    /// It was the last, and has to be given again.
    AtTheEnd,
}

/// What this side has found out by sleeping. Written under the lock of those who do.
#[derive(Debug)]
pub(super) struct Vouched {
    /// All that the peer had posted. [`NONE`]: nothing is known.
    position: AtomicU64,
    /// Bells that it had announced.
    bells: AtomicU64,
    /// The sequence of sleepers that was announced last, and the bells that the peer had announced before.
    sequence: AtomicU64,
    before: AtomicU64,
}

impl Vouched {
    pub(super) fn new() -> Self {
        Self { position: none(), bells: none(), sequence: none(), before: none() }
    }

    /// Before `word` ([`crate::control::Armed`]) is written to the peer, which has announced so many `bells`.
    pub(super) fn arm(&self, word: u64, bells: Option<u64>) {
        if word as u32 == 0 {
            // It rings for nobody.
            self.position.store(NONE, Ordering::SeqCst);
            self.sequence.store(NONE, Ordering::Relaxed);
        } else if self.sequence.swap(word >> 32, Ordering::Relaxed) != word >> 32 {
            self.before.store(bells.unwrap_or(NONE), Ordering::Relaxed);
        }
    }

    /// All that the peer had `posted` when it could see that word has arrived, and it has announced so many `bells`.
    pub(super) fn confirm(&self, posted: u64, bells: Option<u64>) {
        // Else it may have rung for this sequence already, and does so once.
        let fresh = self.sequence.load(Ordering::Relaxed) != NONE;
        let Some(bells) = bells.filter(|&bells| fresh && bells == self.before.load(Ordering::Relaxed)) else {
            return;
        };
        self.position.store(NONE, Ordering::SeqCst);
        self.bells.store(bells, Ordering::SeqCst);
        self.position.store(posted, Ordering::SeqCst);
    }

    /// Whether the peer has rung for nothing since it had posted what has `arrived`, if it has announced so many `bells`.
    pub(super) fn is_for(&self, arrived: u64, bells: u64) -> bool {
        self.position.load(Ordering::SeqCst) == arrived && self.bells.load(Ordering::SeqCst) == bells
    }
}

fn none() -> AtomicU64 {
    AtomicU64::new(NONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE_SLEEPER: u64 = 5 << 32 | 1;

    #[test]
    fn a_message_after_the_word_rings_once() {
        let promise = Promise::new();
        assert_eq!(promise.after_a_message(|| Some(0)), Broken::No);
        assert!(promise.give(24, 0));
        assert!(!promise.give(24, 0), "the peer has it");
        assert!(promise.stands(24) && !promise.stands(32));
        assert_eq!(promise.after_a_message(|| Some(0)), Broken::ByThis);
        assert_eq!(promise.after_a_message(|| Some(0)), Broken::No);
        assert!(promise.give(24, 0), "it was taken back");
    }

    #[test]
    fn a_peer_that_has_rung_has_taken_the_word_back_itself() {
        let promise = Promise::new();
        promise.give(24, 3);
        assert_eq!(promise.after_a_message(|| Some(4)), Broken::No);
        promise.give(24, 4);
        assert_eq!(promise.after_a_message(|| None), Broken::ByThis, "it is not known whether it has");
    }

    #[test]
    fn the_last_word_stays_and_is_given_again_behind_each_message() {
        let promise = Promise::new();
        assert!(promise.give(24, 3) && promise.give(24, ENDS));
        assert!(!promise.give(24, 4), "a thread that sleeps");
        assert_eq!(promise.after_a_message(|| Some(9)), Broken::AtTheEnd);
        assert!(promise.give(48, ENDS));
        assert!(!promise.give(48, ENDS));
    }

    #[test]
    fn a_sleeper_vouches_for_what_it_had() {
        let vouched = Vouched::new();
        vouched.arm(ONE_SLEEPER, Some(2));
        assert!(!vouched.is_for(24, 2));
        vouched.confirm(24, Some(2));
        assert!(vouched.is_for(24, 2));
        assert!(!vouched.is_for(32, 2) && !vouched.is_for(24, 3));
        // The next sleep may not come to its end.
        vouched.arm(ONE_SLEEPER + (1 << 32), Some(2));
        assert!(vouched.is_for(24, 2));
    }

    #[test]
    fn nobody_vouches_for_a_peer_that_may_have_rung_already() {
        let vouched = Vouched::new();
        vouched.arm(ONE_SLEEPER, Some(2));
        vouched.confirm(24, Some(3));
        // The same sequence once more: it has been rung for.
        vouched.arm(ONE_SLEEPER, Some(3));
        vouched.confirm(24, Some(3));
        assert!(!vouched.is_for(24, 3));
        // Not known when it was announced.
        vouched.arm(ONE_SLEEPER + (1 << 32), None);
        vouched.confirm(24, Some(3));
        assert!(!vouched.is_for(24, 3));
    }

    #[test]
    fn who_is_not_asleep_vouches_for_nothing() {
        let vouched = Vouched::new();
        vouched.arm(ONE_SLEEPER, Some(0));
        vouched.confirm(24, Some(0));
        vouched.arm(6 << 32, Some(0));
        vouched.confirm(24, Some(0));
        assert!(!vouched.is_for(24, 0));
    }
}

//! The wish of another process to have a connection on TCP (`thallus pin`).
//!
//! Whoever asks maps the arena, and holds no lock: between its look at a block and its request the connection may be closed,
//! and the block be another's. So a block counts its connections, and a request names one.

use std::sync::atomic::Ordering;

use super::{Block, State, flag};
use crate::reason::Reason;

/// Which of the connections that a block has been used for, one after the other. A count of their beginnings and ends, in the
/// place that it has above the [`State`]: odd while there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Generation(u32);

impl Generation {
    pub(super) const STEP: u32 = 4;

    pub(super) fn of(word: u32) -> Self {
        Self(word - word % Self::STEP)
    }

    /// Whether it is a connection's, and not what is between two.
    pub(super) fn is_of_one(self) -> bool {
        self.0 & Self::STEP != 0
    }

    /// After the end of the connection.
    pub(super) fn ended(self) -> Self {
        if self.is_of_one() { self.next() } else { self }
    }

    pub(super) fn next(self) -> Self {
        Self(self.0.wrapping_add(Self::STEP))
    }

    pub(super) fn with(self, state: State) -> u32 {
        self.0 | state as u32
    }
}

/// What has come of the wish to have a connection on TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// It is there, for good.
    Granted,
    /// Whoever makes the next call on it has been asked to go back, once.
    Asked,
    /// It has been closed.
    Closed,
}

impl Block {
    /// Which connection the block is used for, if any. Who looks from outside asks for this first, so that
    /// [`Self::ask_for_tcp`] is about the connection that the words read after it are about.
    pub fn connection(&self) -> Option<Generation> {
        Some(self.generation()).filter(|generation| generation.is_of_one())
    }

    pub(crate) fn generation(&self) -> Generation {
        Generation::of(self.state.load(Ordering::Acquire))
    }

    /// Another process wants this connection on TCP, for good. Nothing is done to one that has the block after it.
    pub fn ask_for_tcp(&self, wanted: Generation) -> Wish {
        let returned = self.has(flag::RETURNED);
        let word = self.state.load(Ordering::Acquire);
        if Generation::of(word) != wanted {
            return Wish::Closed;
        }
        if returned || word == wanted.with(State::Pinned) {
            return Wish::Granted;
        }
        if self.exchange_state(wanted.with(State::Plain), wanted.with(State::Pinned)) {
            self.reason.store(Reason::ByRequest as u32, Ordering::Relaxed);
            return Wish::Granted;
        }
        self.unwanted.store(wanted.0, Ordering::SeqCst);
        Wish::Asked
    }

    /// As [`Self::ask_for_tcp`], by a process that has the connection.
    pub fn ask_again(&self) {
        self.unwanted.store(self.generation().0, Ordering::SeqCst);
    }

    /// Whether somebody wants the connection on TCP.
    #[inline]
    pub fn is_unwanted(&self) -> bool {
        let unwanted = self.unwanted.load(Ordering::Acquire);
        unwanted != 0 && unwanted == self.generation().0
    }

    /// Takes the request, if there is one.
    pub fn take_request(&self) -> bool {
        self.unwanted.swap(0, Ordering::SeqCst) == self.generation().0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{Chunk, Role};

    #[test]
    fn a_wish_is_about_one_connection_and_not_the_next_in_its_block() {
        let chunk = Chunk::create(Ok).unwrap();
        let first = chunk.allocate(Role::Client, std::process::id(), 3, 1).unwrap();
        let generation = first.connection().unwrap();
        assert!(first.advance(State::Plain, State::Active));
        assert_eq!(first.ask_for_tcp(generation), Wish::Asked);
        assert!(first.is_unwanted());

        chunk.free(first, generation);
        assert_eq!((first.connection(), first.ask_for_tcp(generation)), (None, Wish::Closed));
        let second = chunk.allocate(Role::Client, std::process::id(), 3, 2).unwrap();
        assert!(std::ptr::eq(first, second));
        assert_eq!(second.ask_for_tcp(generation), Wish::Closed);
        // A request that arrives late, behind the look at the generation.
        second.unwanted.store(generation.0, Ordering::SeqCst);
        assert!(!second.is_unwanted() && !second.take_request());
        assert_eq!(second.state(), State::Plain);

        assert!(second.advance(State::Plain, State::Active));
        second.ask_again();
        assert!(second.is_unwanted() && second.take_request() && !second.take_request());
    }
}

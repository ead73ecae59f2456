//! Moves the bytes of one TCP connection another way. Knows no hook and no Arrow.
//!
//! [`connection`] is one connection's life; [`stream`] its bytes; [`wait`] and [`ready`] its sleepers. Below them are
//! [`ring`], [`control`] and [`segment`] (what peers share), [`arena`] and [`lock`] (what forks share) and
//! [`rendezvous`] (how two ends on one host meet).

pub mod arena;
pub mod buffers;
#[cfg(not(loom))]
pub mod connection;
pub mod control;
pub mod lock;
pub mod process;
#[cfg(not(loom))]
pub mod ready;
pub mod reason;
pub mod rendezvous;
pub mod ring;
pub mod segment;
pub mod settings;
#[cfg(not(loom))]
pub mod stream;
mod sync;
pub mod tcp;
pub mod uninterrupted;
#[cfg(not(loom))]
pub mod wait;
mod waiting;

#[cfg(all(test, loom))]
mod loom_tests;

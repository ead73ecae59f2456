//! Moves the bytes of one TCP connection another way. Knows no hook and no Arrow.
//!
//! [`connection`] is one connection's life, [`search`] its way to its peer; [`stream`] its bytes, `brief` the usual
//! ones, and `room` how many of them may be unread; `socket` its bells; `wait`, [`spin`] and [`ready`] its sleepers. Below them are [`ring`], [`control`] and [`segment`] (what peers share), [`arena`] and [`lock`] (what forks share) and
//! [`rendezvous`] (how two ends on one host meet). With another host the fabric is [`verbs`], and both ends meet by a
//! [`greeting`] on the TCP connection itself.

#[cfg(not(loom))]
pub mod alarm;
pub mod arena;
#[cfg(not(loom))]
pub mod arming;
pub mod arrival;
#[cfg(not(loom))]
mod brief;
pub mod buffers;
#[cfg(not(loom))]
pub mod chime;
#[cfg(not(loom))]
pub mod configuration;
#[cfg(not(loom))]
pub mod connection;
pub mod control;
#[cfg(not(loom))]
mod count;
#[cfg(not(loom))]
mod ending;
#[cfg(not(loom))]
pub mod environment;
#[cfg(not(loom))]
pub mod experience;
#[cfg(not(loom))]
mod failover;
#[cfg(not(loom))]
pub mod greeting;
#[cfg(not(loom))]
mod handback;
#[cfg(not(loom))]
mod introduction;
#[cfg(not(loom))]
pub mod lending;
pub mod lock;
#[cfg(not(loom))]
mod passing;
pub mod peers;
pub mod process;
#[cfg(not(loom))]
pub mod ready;
pub mod reason;
#[cfg(not(loom))]
pub mod rendezvous;
#[cfg(not(loom))]
mod restart;
pub mod ring;
#[cfg(not(loom))]
mod room;
#[cfg(not(loom))]
pub mod search;
#[cfg(not(loom))]
pub mod segment;
#[cfg(not(loom))]
pub mod settings;
#[cfg(not(loom))]
pub mod settle;
#[cfg(not(loom))]
mod socket;
pub mod sparse;
#[cfg(not(loom))]
pub mod spin;
#[cfg(not(loom))]
pub mod stream;
#[cfg(not(loom))]
mod survivor;
mod sync;
pub mod tcp;
pub mod unheard;
pub mod uninterrupted;
pub mod unix;
pub mod verbs;
#[cfg(not(loom))]
mod wait;
mod waiting;

#[cfg(all(test, loom))]
mod loom_tests;

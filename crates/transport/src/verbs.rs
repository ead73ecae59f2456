//! The fabric between hosts: rings in registered memory, written by RDMA over a reliable-connection queue pair.
//!
//! [`device`] finds the port that has a connection's address, `queue` owns a queue pair and its memory, [`board`] is what each
//! side shows the other, `message` what lies in a ring, `inbox` the ring that the peer writes, and [`link`] one connection over
//! them. iWARP devices need the kernel's connection manager (`manager`). [`trial`] tells what a connection would get.
//! libibverbs is loaded when a connection needs it (`ffi`).

pub mod board;
pub mod device;
mod ffi;
mod inbox;
pub mod link;
mod manager;
mod message;
mod queue;
pub mod trial;

pub(crate) use manager::Progress;
pub use queue::Endpoint;

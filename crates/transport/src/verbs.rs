//! The fabric between hosts: rings in registered memory, written by RDMA over a reliable-connection queue pair.
//!
//! [`device`] finds the port that has a connection's address, `queue` owns a queue pair and its memory (`slab`),
//! [`board`] is what each side shows the other, `message` what lies in a ring, `inbox` the ring that the peer writes
//! (`scan`: how far it has been looked through), and [`link`] one connection over them (`word`: how its end is told from
//! its death). `routes` remembers where RDMA does not get through. iWARP devices need the kernel's connection manager (`manager`). [`trial`] tells what a connection would
//! get, and [`probe`] is for measuring a device. libibverbs is loaded when a connection needs it (`ffi`).

#[cfg(not(loom))]
pub mod board;
#[cfg(not(loom))]
pub mod device;
#[cfg(not(loom))]
mod ffi;
#[cfg(not(loom))]
mod inbox;
#[cfg(not(loom))]
pub mod link;
#[cfg(not(loom))]
mod manager;
#[cfg(not(loom))]
mod message;
#[cfg(not(loom))]
pub mod probe;
#[cfg(not(loom))]
mod queue;
#[cfg(not(loom))]
pub(crate) mod routes;
pub(crate) mod scan;
#[cfg(not(loom))]
mod slab;
#[cfg(not(loom))]
pub mod trial;
#[cfg(not(loom))]
mod word;

#[cfg(not(loom))]
pub(crate) use manager::Progress;
#[cfg(not(loom))]
pub use queue::Endpoint;
#[cfg(not(loom))]
pub use slab::discard_idle;

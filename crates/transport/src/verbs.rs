//! The fabric between hosts: rings in registered memory, written by RDMA over a reliable-connection queue pair.
//!
//! [`device`] finds the port that has a connection's address, `queue` owns a queue pair and its memory, `message` is what
//! lies in a ring, and [`link`] one connection over them. [`trial`] tells what a connection would get. libibverbs is loaded when a connection needs it (`ffi`).

pub mod device;
mod ffi;
pub mod link;
mod message;
mod queue;
pub mod trial;

pub use queue::Endpoint;

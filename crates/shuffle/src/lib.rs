//! Record batches exchanged between all workers of several processes: each worker sends rows to every worker, and gets
//! what every worker has sent to it.
//!
//! ```text
//!  process 0                                process 1
//!  worker 0 ─ partition ─┐                 ┌─► inbox of worker 2 ─► rows from 0, 1, 2, 3
//!  worker 1 ─ partition ─┴── one TCP ──────┴─► inbox of worker 3 ─► rows from 0, 1, 2, 3
//!                            connection
//! ```
//!
//! [`partition`] decides which rows go where. [`push`] moves them as they come (Gonçalves et al. 2016),
//! [`staged`] when they are fetched (Lu et al. 2014). Everything runs over
//! ordinary TCP sockets; with `libthallus_shim.so` in front, the bytes take shared memory or RDMA instead.
//!
//! `docs/shuffle.md` has the byte layouts, the design, and what was measured.

#![forbid(unsafe_code)]

mod cluster;
mod deadline;
mod error;
mod gather;
mod numbers;
mod pool;
mod seat;
mod socket;
mod wire;

pub mod halves;
pub mod partition;
pub mod push;
pub mod staged;
pub mod stream;

pub use cluster::{Cluster, NodeId, WorkerId};
pub use error::{Error, Result};
pub use gather::Gather;
pub use halves::{Receiver, Sender};
pub use partition::{Partition, Scatter};
pub use pool::{Pool, PoolStatus};
pub use seat::Seat;

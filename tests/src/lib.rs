//! Whole-system tests: behaviours of sockets on the kernel and under the shim, real applications, faults.
//!
//! A *behaviour* is a pair of functions that run in two processes connected by TCP, and note every call
//! and its outcome in a transcript. The harness runs each pair on the kernel and under the shim, and asserts
//! that both transcripts are equal line by line, and, from the counters that the library leaves behind, that
//! exactly the expected number of connections left TCP. A behaviour that passes because its connection
//! stayed on TCP proves nothing.
//!
//! - [`calls`]: libc's calls, noted in the transcript;
//! - [`side`]: what a behaviour is given;
//! - [`behaviours`]: the table of behaviours;
//! - [`harness`]: runs them, in processes of the `behaviour` binary.

pub mod behaviours;
pub mod calls;
pub mod differential;
#[cfg(test)]
mod documents;
pub mod harness;
pub mod side;

//! The differential test: random programs of socket operations, on the kernel and under the library.
//!
//! A *program* is some connections between two ends, each a process and its forks, and a list of steps. They are made one
//! after the other, on either end, so that a program does the same each time: each once what the one before has sent has
//! arrived. What can be seen of each is noted, and must be the same, on the kernel and under the library.
//!
//! - [`program`]: what a program is, and how it is written down;
//! - `rules`: **what is not compared, and why**;
//! - `run`, `model`: runs a program, knowing which bytes are where;
//! - `processes`, `wire`, `endpoint`: the processes that make the calls.

mod endpoint;
mod model;
mod processes;
pub mod program;
mod rules;
mod run;
mod wire;

pub use endpoint::serve;
pub use run::{Seen, run};

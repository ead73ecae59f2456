//! libc's calls as a program makes them, each noted in the transcript with its arguments and outcome.
//!
//! A behaviour calls these instead of std, so that every call passes through the symbol that the shim
//! hooks, and so that the same lines come out on the kernel and under the shim. All `unsafe` of the
//! behaviours is here. A line holds nothing that differs between two runs: no port, pid, pointer or time.

mod beside;
mod compound;
mod descriptors;
mod errno;
mod memory;
mod odd;
mod process;
mod show;
mod signal;
mod socket;
mod stream;
mod transcript;
mod wait;

pub use beside::*;
pub use compound::*;
pub use descriptors::*;
pub use errno::Errno;
pub use memory::*;
pub use odd::*;
pub use process::*;
pub use signal::*;
pub use socket::*;
pub use stream::*;
pub use transcript::{announce, at_least, quietly};
pub use wait::*;

/// A file descriptor as libc's calls take it; behaviours often pass one that is not open.
pub type Fd = libc::c_int;

/// What a call gave: its value, or the error that it left in `errno`.
pub type Outcome<T> = Result<T, Errno>;

/// Notes a line of the behaviour's own in the transcript.
#[macro_export]
macro_rules! say {
    ($($arg:tt)*) => { $crate::calls::announce(format_args!($($arg)*)) };
}

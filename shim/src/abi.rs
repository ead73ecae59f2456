//! The functions that the program calls instead of libc's. They only convert and forward.
//!
//! No panic crosses into the program: [`guard`] turns one into `ECONNRESET`, which on a connection that may have
//! left TCP is the honest answer.

mod descriptor;
mod open;
mod process;
mod stream;
mod wait;

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::errno;

/// What a hook returns when it failed.
trait Failure {
    const FAILED: Self;
}

impl Failure for i32 {
    const FAILED: Self = -1;
}

impl Failure for isize {
    const FAILED: Self = -1;
}

impl Failure for i64 {
    const FAILED: Self = -1;
}

/// Runs a hook's body.
fn guard<T: Failure>(body: impl FnOnce() -> T) -> T {
    if let Ok(result) = catch_unwind(AssertUnwindSafe(body)) {
        return result;
    }
    crate::log::warn!("a hook failed; its connection is reset");
    errno::set(rustix::io::Errno::CONNRESET);
    T::FAILED
}

/// Panics are this library's own bugs: they go to the log, never to the program's standard error.
pub(crate) fn silence_panics() {
    std::panic::set_hook(Box::new(|panic| crate::log::warn!("{panic}")));
}

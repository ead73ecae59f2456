//! The functions that the program calls instead of libc's. They only convert and forward.
//!
//! No panic crosses into the program: [`guard`] turns one into `ECONNRESET`, which on a connection that may have
//! left TCP is the honest answer.

pub(crate) mod api;
mod descriptor;
mod load;
mod memory;
mod message;
mod open;
mod process;
mod stream;
mod variadic;
mod wait;

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::{cancel, errno};

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

/// Runs a hook's body. A call of libc's that is a cancellation point stands outside of it, or in a
/// [`cancel::point`].
fn guard<T: Failure>(body: impl FnOnce() -> T) -> T {
    let result = catch_unwind(AssertUnwindSafe(body));
    cancel::act();
    result.unwrap_or_else(|_| {
        crate::log::warn!("a hook failed; its call says ECONNRESET");
        errno::set(rustix::io::Errno::CONNRESET);
        T::FAILED
    })
}

/// Runs the body of a hook on which threads may be cancelled.
fn cancellable<T: Failure>(body: impl FnOnce() -> T) -> T {
    cancel::test();
    guard(body)
}

/// Panics are this library's own bugs: they go to the log, never to the program's standard error.
pub(crate) fn silence_panics() {
    std::panic::set_hook(Box::new(|panic| crate::log::warn!("{panic}")));
}

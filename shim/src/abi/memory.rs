//! Locking of memory.

use libc::c_int;

use super::guard;
use crate::ops::memory;
use crate::real;

/// mlockall(2).
///
/// # Safety
/// As for mlockall(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    // SAFETY: takes a number.
    guard(|| memory::lock_all(flags, || unsafe { real::mlockall(flags) }))
}

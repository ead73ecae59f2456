//! From results to libc's convention and back.

use rustix::io::Errno;

/// Sets the calling thread's errno.
pub(crate) fn set(errno: Errno) {
    // SAFETY: libc returns a pointer to this thread's own errno.
    let slot = unsafe { libc::__errno_location() };
    // SAFETY: valid and this thread's own.
    unsafe { slot.write(errno.raw_os_error()) };
}

/// The calling thread's errno, after a call that failed.
pub(crate) fn now() -> Errno {
    match raw() {
        number @ 1..4096 => Errno::from_raw_os_error(number),
        // A libc that failed without saying why.
        _ => Errno::IO,
    }
}

fn raw() -> i32 {
    // SAFETY: libc returns a pointer to this thread's own errno.
    let slot = unsafe { libc::__errno_location() };
    // SAFETY: valid and this thread's own.
    unsafe { slot.read() }
}

/// Runs `work` and puts errno back to what it was.
pub(crate) fn keep<T>(work: impl FnOnce() -> T) -> T {
    let before = raw();
    let result = work();
    // SAFETY: libc returns a pointer to this thread's own errno.
    let slot = unsafe { libc::__errno_location() };
    // SAFETY: valid and this thread's own.
    unsafe { slot.write(before) };
    result
}

/// A count as `ssize_t`, or −1 with errno.
pub(crate) fn count(result: Result<usize, Errno>) -> isize {
    match result {
        Ok(count) => count.cast_signed(),
        Err(errno) => {
            set(errno);
            -1
        }
    }
}

/// A value as `int`, or −1 with errno.
pub(crate) fn int(result: Result<i32, Errno>) -> i32 {
    match result {
        Ok(value) => value,
        Err(errno) => {
            set(errno);
            -1
        }
    }
}

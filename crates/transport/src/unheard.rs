//! write(2) that the program's signals say nothing of: where nobody reads a pipe (`SIGPIPE`), or a file is as long as it may be
//! (`SIGXFSZ`), the kernel kills who has not asked for these signals. The program has not asked for what the library writes.

use std::os::fd::AsFd;

use rustix::io::Errno;
use syscalls::{Sysno, syscall};

/// The kernel's `sigset_t`: one bit a signal.
type Mask = u64;

const fn bit(signal: i32) -> Mask {
    1 << (signal - 1)
}

/// What write(2) may raise, in the thread that calls it (signal(7)).
const RAISED: Mask = bit(libc::SIGPIPE) | bit(libc::SIGXFSZ);

/// Writes as write(2). A signal that this raises is taken back before anybody sees it; one that was pending before stays. All other
/// signals come as ever: the write may have to wait.
///
/// # Errors
/// As write(2).
pub fn write(fd: impl AsFd, bytes: &[u8]) -> Result<usize, Errno> {
    let blocked = change_mask(libc::SIG_BLOCK, RAISED);
    let pending = pending();
    let result = rustix::io::write(fd, bytes);
    // A pipe may have taken some before its reader left.
    if result != Ok(bytes.len()) {
        take(RAISED & !pending);
    }
    change_mask(libc::SIG_SETMASK, blocked);
    result
}

/// Writes all of it, as [`write`] does.
///
/// # Errors
/// As write(2). Part of it may have been written.
pub fn write_all(fd: impl AsFd, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match write(&fd, bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// By the raw system call, as the others here: libc's sigtimedwait is a cancellation point. Returns the mask before.
fn change_mask(how: i32, mask: Mask) -> Mask {
    let mut before: Mask = 0;
    // SAFETY: both masks are of the size that is given.
    let _ =
        unsafe { syscall!(Sysno::rt_sigprocmask, how, &raw const mask, &raw mut before, size_of::<Mask>()) };
    before
}

/// Blocked signals that wait for this thread or its process.
fn pending() -> Mask {
    let mut pending: Mask = 0;
    // SAFETY: the mask is of the size that is given.
    let _ = unsafe { syscall!(Sysno::rt_sigpending, &raw mut pending, size_of::<Mask>()) };
    pending
}

/// Takes those of the signals of `mask` that are pending: the thread's own ones before the process's.
fn take(mask: Mask) {
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let nowhere: *mut libc::siginfo_t = std::ptr::null_mut();
    let next = || {
        // SAFETY: the mask is of the size that is given, the time is readable, and nothing is to be said of the signal.
        unsafe {
            syscall!(Sysno::rt_sigtimedwait, &raw const mask, nowhere, &raw const at_once, size_of::<Mask>())
        }
    };
    // One of each kind at most.
    let _ = next().and_then(|_| next());
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::io::pipe;
    use std::sync::atomic::{AtomicU32, Ordering};

    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    static HEARD: AtomicU32 = AtomicU32::new(0);

    extern "C" fn count(_: i32) {
        HEARD.fetch_add(1, Ordering::SeqCst);
    }

    fn heard() -> u32 {
        HEARD.load(Ordering::SeqCst)
    }

    /// Whether `check` holds in a process of its own: signals and limits are the whole process's.
    fn in_a_child(check: impl Fn() -> bool) -> bool {
        // SAFETY: the child makes system calls only, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let handler: extern "C" fn(i32) = count;
            for signal in [libc::SIGPIPE, libc::SIGXFSZ] {
                // SAFETY: the handler only adds to an atomic.
                unsafe { libc::signal(signal, handler as libc::sighandler_t) };
            }
            let status = i32::from(!check());
            // SAFETY: takes a number.
            unsafe { libc::_exit(status) };
        }
        let mut status = 0;
        // SAFETY: one writable word.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        status == 0
    }

    #[test]
    fn nobody_hears_of_a_pipe_without_a_reader() {
        assert!(in_a_child(|| {
            let Ok((reading, writing)) = pipe() else { return false };
            let first = write(&writing, b"x");
            drop(reading);
            first == Ok(1) && write(&writing, b"x") == Err(Errno::PIPE) && heard() == 0 && pending() == 0
        }));
    }

    #[test]
    fn nobody_hears_of_a_file_that_is_full() {
        assert!(in_a_child(|| {
            let limit = Rlimit { current: Some(3), ..getrlimit(Resource::Fsize) };
            let Ok(file) = memfd_create("short", MemfdFlags::CLOEXEC) else { return false };
            let limited = setrlimit(Resource::Fsize, limit).is_ok();
            let (some, more) = (write(&file, b"1234"), write_all(&file, b"4"));
            limited && (some, more) == (Ok(3), Err(Errno::FBIG)) && heard() == 0 && pending() == 0
        }));
    }

    #[test]
    fn a_signal_that_was_pending_before_is_still_to_be_heard() {
        assert!(in_a_child(|| {
            let Ok((_, writing)) = pipe() else { return false };
            change_mask(libc::SIG_BLOCK, bit(libc::SIGPIPE));
            // SAFETY: takes a number; the signal goes to this thread.
            unsafe { libc::raise(libc::SIGPIPE) };
            let result = write(&writing, b"x");
            let left = pending();
            change_mask(libc::SIG_UNBLOCK, bit(libc::SIGPIPE));
            result == Err(Errno::PIPE) && left == bit(libc::SIGPIPE) && heard() == 1
        }));
    }
}

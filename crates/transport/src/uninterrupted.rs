//! Short sections that no signal handler of the same thread may run in, and in which the thread can't be cancelled.
//!
//! A handler may do anything that POSIX calls async-signal-safe, which includes read(2), close(2) and `_exit`. Were it
//! to wait for a lock or a decision of the very thread that it interrupts, it would wait for ever. And a cancelled
//! thread ends in libc's next cancellation point (pthreads(7)), with all that it holds: even dropping an
//! [`OwnedFd`] is one.

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};

use syscalls::{Sysno, syscall};

/// The kernel's `sigset_t`: one bit a signal.
type Mask = u64;

thread_local! {
    /// Guards of this thread, and its mask and cancelability before the first.
    static GUARDS: Cell<(u32, Mask, i32)> = const { Cell::new((0, 0, 0)) };
}

/// `PTHREAD_CANCEL_DISABLE` of pthread.h.
const DISABLE: i32 = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: i32, before: *mut i32) -> i32;
}

/// Blocks all signals of the calling thread until dropped (sigprocmask(2)), and its cancellation
/// (`pthread_setcancelstate`). Guards may nest; the outermost one does it.
#[derive(Debug)]
pub struct Uninterrupted {
    /// The mask is the thread's: the guard must end where it began.
    _thread: PhantomData<*const ()>,
}

impl Uninterrupted {
    /// Begins the section.
    pub fn begin() -> Self {
        let (guards, mut before, mut cancelability) = GUARDS.get();
        if guards == 0 {
            let all = Mask::MAX;
            set_mask(&raw const all, &raw mut before);
            // SAFETY: one writable word.
            unsafe { pthread_setcancelstate(DISABLE, &raw mut cancelability) };
        }
        GUARDS.set((guards + 1, before, cancelability));
        Self { _thread: PhantomData }
    }
}

impl Drop for Uninterrupted {
    fn drop(&mut self) {
        let (guards, before, mut cancelability) = GUARDS.get();
        GUARDS.set((guards - 1, before, cancelability));
        if guards == 1 {
            // SAFETY: one writable word.
            unsafe { pthread_setcancelstate(cancelability, &raw mut cancelability) };
            set_mask(&raw const before, std::ptr::null_mut());
        }
    }
}

/// An internal descriptor that is closed by the bare system call: libc's close(2) is a cancellation point, this is none; and
/// a hook on it would have to find out whose it is.
#[derive(Debug)]
pub struct Descriptor(ManuallyDrop<OwnedFd>);

impl From<OwnedFd> for Descriptor {
    fn from(fd: OwnedFd) -> Self {
        Self(ManuallyDrop::new(fd))
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: taken once, here.
        let fd = unsafe { ManuallyDrop::take(&mut self.0) }.into_raw_fd();
        // Before somebody else can have the number.
        #[cfg(not(loom))]
        (crate::settings::settings().forget)(fd);
        // SAFETY: owned, and nobody refers to it any more.
        unsafe { rustix::io::close(fd) };
    }
}

/// By the raw system call: libc's functions keep its own signals out of the mask (thread cancellation, setuid), whose
/// handlers wait for no lock of ours but may end the thread.
fn set_mask(new: *const Mask, old: *mut Mask) {
    // SAFETY: `new` is readable and `old` null or writable, for the size that is given. It can't fail then.
    let _ = unsafe { syscall!(Sysno::rt_sigprocmask, libc::SIG_SETMASK, new, old, size_of::<Mask>()) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    static HANDLED: AtomicU32 = AtomicU32::new(0);

    extern "C" fn count(_: i32) {
        HANDLED.fetch_add(1, Ordering::SeqCst);
    }

    #[test]
    fn a_signal_is_handled_after_the_outermost_section() {
        let handler: extern "C" fn(i32) = count;
        // SAFETY: the handler only adds to an atomic.
        unsafe { libc::signal(libc::SIGUSR2, handler as libc::sighandler_t) };
        let outer = Uninterrupted::begin();
        let inner = Uninterrupted::begin();
        // SAFETY: takes a number; the signal goes to this thread.
        unsafe { libc::raise(libc::SIGUSR2) };
        drop(inner);
        assert_eq!(HANDLED.load(Ordering::SeqCst), 0);
        drop(outer);
        assert_eq!(HANDLED.load(Ordering::SeqCst), 1);
    }
}

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

/// What is ignored unless there is a handler (signal(7)).
const IGNORED_BY_DEFAULT: [i32; 4] = [libc::SIGCHLD, libc::SIGCONT, libc::SIGURG, libc::SIGWINCH];

fn bit(signal: i32) -> Mask {
    1 << (signal - 1)
}

/// Whether there is no handler for `signal`, one of [`IGNORED_BY_DEFAULT`].
fn is_ignored(signal: i32) -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the action is writable.
    let result = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: zeroes are an action, too.
    let action = unsafe { action.assume_init() };
    result == 0 && matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN)
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
        Self::begin_but_for(|| 0)
    }

    /// Begins a section that takes longer, in which signals that nobody handles go on being ignored: while this thread blocked them, the
    /// kernel would not ignore them (`sig_ignored` of kernel/signal.c), but wake another thread for them, whose sleep fails with `EINTR`.
    /// A handler that another thread installs for one of them meanwhile may run in it.
    pub fn begin_ignoring() -> Self {
        Self::begin_but_for(|| {
            IGNORED_BY_DEFAULT.into_iter().filter(|&signal| is_ignored(signal)).map(bit).sum()
        })
    }

    fn begin_but_for(unblocked: impl FnOnce() -> Mask) -> Self {
        let (guards, mut before, mut cancelability) = GUARDS.get();
        if guards == 0 {
            // What the program blocks stays so: it may wait for that.
            let blocked = !unblocked();
            set_mask(libc::SIG_BLOCK, &raw const blocked, &raw mut before);
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
            set_mask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
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
fn set_mask(how: i32, new: *const Mask, old: *mut Mask) {
    // SAFETY: `new` is readable and `old` null or writable, for the size that is given. It can't fail then.
    let _ = unsafe { syscall!(Sysno::rt_sigprocmask, how, new, old, size_of::<Mask>()) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    static HANDLED: AtomicU32 = AtomicU32::new(0);

    extern "C" fn count(_: i32) {
        HANDLED.fetch_add(1, Ordering::SeqCst);
    }

    /// The calling thread's mask.
    fn mask() -> Mask {
        let (none, mut now) = (0, 0);
        set_mask(libc::SIG_BLOCK, &raw const none, &raw mut now);
        now
    }

    #[test]
    fn what_nobody_handles_is_ignored_on_unless_the_program_blocks_it() {
        let handler: extern "C" fn(i32) = count;
        // SAFETY: the handler only adds to an atomic.
        unsafe { libc::signal(libc::SIGWINCH, handler as libc::sighandler_t) };
        let before = mask();
        let blocked = bit(libc::SIGURG);
        set_mask(libc::SIG_BLOCK, &raw const blocked, std::ptr::null_mut());
        let open = |mask: Mask| IGNORED_BY_DEFAULT.map(|signal| mask & bit(signal) == 0);
        {
            let _section = Uninterrupted::begin_ignoring();
            assert_eq!(open(mask()), [true, true, false, false]);
            assert_ne!(mask() & bit(libc::SIGTERM), 0);
            let _inner = Uninterrupted::begin();
            assert_eq!(open(mask()), [true, true, false, false]);
        }
        assert_eq!(mask(), before | blocked);
        {
            let _section = Uninterrupted::begin();
            assert_eq!(open(mask()), [false; 4]);
        }
        set_mask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
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

//! Signals: catching, counting, blocking and sending them.

use std::os::raw::c_int;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use super::transcript::noted_number;
use super::{Errno, Fd, Outcome};

static CAUGHT: [AtomicUsize; 65] = [const { AtomicUsize::new(0) }; 65];

extern "C" fn count(signal: c_int) {
    CAUGHT[signal as usize].fetch_add(1, Ordering::SeqCst);
}

/// Counts a signal from now on. `restart` is `SA_RESTART`.
pub fn catch(signal: c_int, restart: bool) {
    let handler: extern "C" fn(c_int) = count;
    act(signal, handler as libc::sighandler_t, if restart { libc::SA_RESTART } else { 0 });
    crate::say!("catch signal {signal}, restart {restart}");
}

/// What the handler of [`catch_and_send`] sends.
pub const HANDLER_BYTE: u8 = b'h';

static HANDLER_FD: AtomicI32 = AtomicI32::new(-1);
static HANDLER_RECEIVED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn send_one(signal: c_int) {
    let before = Errno::last();
    let byte = [HANDLER_BYTE];
    let fd = HANDLER_FD.load(Ordering::SeqCst);
    // SAFETY: pointer and length are those of `byte`; send is async-signal-safe.
    if unsafe { libc::send(fd, byte.as_ptr().cast(), 1, libc::MSG_DONTWAIT) } == 1 {
        count(signal);
    }
    restore(before);
}

extern "C" fn receive_some(signal: c_int) {
    let before = Errno::last();
    let mut buf = [0u8; 50];
    let fd = HANDLER_FD.load(Ordering::SeqCst);
    // SAFETY: pointer and length are those of `buf`; recv is async-signal-safe.
    let received = unsafe { libc::recv(fd, buf.as_mut_ptr().cast(), buf.len(), libc::MSG_DONTWAIT) };
    HANDLER_RECEIVED.fetch_add(usize::try_from(received).unwrap_or(0), Ordering::SeqCst);
    count(signal);
    restore(before);
}

/// A handler must leave `errno` as it found it.
fn restore(errno: Errno) {
    // SAFETY: takes no pointer.
    let location = unsafe { libc::__errno_location() };
    // SAFETY: the location is this thread's own for as long as it lives.
    unsafe { *location = errno.0 };
}

/// At each such signal sends [`HANDLER_BYTE`] without waiting, and counts the signal if that was taken.
pub fn catch_and_send(signal: c_int, fd: Fd) {
    HANDLER_FD.store(fd, Ordering::SeqCst);
    let handler: extern "C" fn(c_int) = send_one;
    act(signal, handler as libc::sighandler_t, libc::SA_RESTART);
}

/// At each such signal receives up to 50 bytes without waiting.
pub fn catch_and_receive(signal: c_int, fd: Fd) {
    HANDLER_FD.store(fd, Ordering::SeqCst);
    let handler: extern "C" fn(c_int) = receive_some;
    act(signal, handler as libc::sighandler_t, libc::SA_RESTART);
}

extern "C" fn copy_and_close(signal: c_int) {
    let before = Errno::last();
    // SAFETY: takes no pointer.
    let copy = unsafe { libc::dup(HANDLER_FD.load(Ordering::SeqCst)) };
    // SAFETY: takes no pointer.
    if copy >= 0 && unsafe { libc::close(copy) } == 0 {
        count(signal);
    }
    restore(before);
}

/// At each such signal makes a copy of the descriptor and closes it, and counts the signal if that could be done.
pub fn catch_and_copy(signal: c_int, fd: Fd) {
    HANDLER_FD.store(fd, Ordering::SeqCst);
    let handler: extern "C" fn(c_int) = copy_and_close;
    act(signal, handler as libc::sighandler_t, libc::SA_RESTART);
}

static FORKED: AtomicI32 = AtomicI32::new(-1);

extern "C" fn fork_one(signal: c_int) {
    let before = Errno::last();
    // SAFETY: the process has one thread, so that no lock is held by a thread that the child lacks.
    FORKED.store(unsafe { libc::fork() }, Ordering::SeqCst);
    count(signal);
    restore(before);
}

/// At each such signal makes a child, which returns from the handler as the parent does. Interrupts calls.
pub fn catch_and_fork(signal: c_int) {
    let handler: extern "C" fn(c_int) = fork_one;
    act(signal, handler as libc::sighandler_t, 0);
}

/// What the fork(2) in the handler of [`catch_and_fork`] has returned.
pub fn forked_by_handler() -> libc::pid_t {
    FORKED.load(Ordering::SeqCst)
}

/// Bytes that the handler of [`catch_and_receive`] received.
pub fn received_by_handler() -> usize {
    HANDLER_RECEIVED.load(Ordering::SeqCst)
}

/// Lets a signal do what it does by default.
pub fn default_action(signal: c_int) {
    act(signal, libc::SIG_DFL, 0);
}

fn act(signal: c_int, handler: libc::sighandler_t, flags: c_int) {
    // SAFETY: all-zero is a valid value of this plain C struct.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    action.sa_flags = flags;
    // SAFETY: the handler only adds to an atomic; the old action is not wanted.
    let ret = unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
    assert_eq!(ret, 0, "sigaction: {}", Errno::last());
}

/// How often a signal was caught.
pub fn caught(signal: c_int) -> usize {
    CAUGHT[signal as usize].load(Ordering::SeqCst)
}

/// A set of signals.
#[derive(Clone)]
pub struct SignalSet(libc::sigset_t);

impl std::fmt::Debug for SignalSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SignalSet")
    }
}

impl SignalSet {
    /// The set of these signals.
    pub fn of(signals: &[c_int]) -> Self {
        // SAFETY: all-zero is the empty set.
        let mut set = Self(unsafe { std::mem::zeroed() });
        for &signal in signals {
            // SAFETY: the set is initialised.
            let ret = unsafe { libc::sigaddset(&raw mut set.0, signal) };
            assert_eq!(ret, 0, "sigaddset: {}", Errno::last());
        }
        set
    }

    /// Makes this the calling thread's blocked signals.
    pub fn block_only(&self) {
        // SAFETY: the set outlives the call; the old one is not wanted.
        let ret =
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
        assert_eq!(ret, 0, "pthread_sigmask: {}", Errno(ret));
    }

    /// signalfd(2), non-blocking.
    pub fn descriptor(&self) -> Outcome<Fd> {
        // SAFETY: the set outlives the call.
        let ret = unsafe { libc::signalfd(-1, &raw const self.0, libc::SFD_NONBLOCK) };
        noted_number(Errno::check(ret as isize).map(|fd| fd as Fd), || "signalfd()".to_owned())
    }

    pub(super) fn pointer(set: Option<&Self>) -> *const libc::sigset_t {
        set.map_or(std::ptr::null(), |set| &raw const set.0)
    }
}

/// kill(2)
pub fn kill(pid: libc::pid_t, signal: c_int) -> Outcome<usize> {
    // SAFETY: takes no pointer.
    Errno::check(unsafe { libc::kill(pid, signal) } as isize)
}

/// tgkill(2) to a thread of this process.
pub fn signal_thread(thread: libc::pid_t, signal: c_int) {
    let process = std::process::id() as libc::pid_t;
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::tgkill(process, thread, signal) };
    assert_eq!(ret, 0, "tgkill: {}", Errno::last());
}

/// The calling thread's number, for [`signal_thread`] and `/proc/self/task`.
pub fn thread_id() -> libc::pid_t {
    // SAFETY: takes no pointer.
    unsafe { libc::gettid() }
}

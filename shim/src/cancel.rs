//! Thread cancellation (pthreads(7), `pthread_cancel`).
//!
//! glibc ends a cancelled thread by unwinding its stack out of the system call in which it sleeps. That must not go
//! through this library's frames: their destructors would run, but [`catch_unwind`](std::panic::catch_unwind), which
//! keeps panics out of the program, would end the process. So each sleep is a [`point`]: it registers a place to jump to,
//! as C's `pthread_cleanup_push` does, from which everything returns as after an error; [`act`] then goes on
//! ending the thread, outside all of it.
//!
//! A call that the kernel serves alone is not in here at all: the hook makes it before [`crate::abi`] catches panics.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::Timespec;
use rustix::io::Errno;
use thallus_transport::settings::Sleep;

use crate::{errno, real};

/// Whether any thread was ever cancelled in a sleep of this library's.
static EVER: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether the calling thread was, and has to end.
    static DUE: Cell<bool> = const { Cell::new(false) };
}

/// How a thread sleeps inside of a call: each is a cancellation point.
pub(crate) const SLEEP: Sleep = Sleep { recv, poll };

/// recv(2). `ECANCELED`: the thread is to end.
unsafe fn recv(fd: i32, buffer: *mut u8, length: usize, flags: i32) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    match point(|| unsafe { real::recv(fd, buffer.cast(), length, flags) }) {
        None => Err(Errno::CANCELED),
        Some(count) => usize::try_from(count).map_err(|_| errno::now()),
    }
}

/// poll(2) on one descriptor. `ECANCELED`: the thread is to end.
fn poll(fd: i32, events: i16, limit: Option<&Timespec>) -> Result<i16, Errno> {
    let mut list = libc::pollfd { fd, events, revents: 0 };
    let time = limit.map(|time| libc::timespec { tv_sec: time.tv_sec, tv_nsec: time.tv_nsec });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: one writable entry, and a time that lives.
    match point(|| unsafe { real::ppoll(&raw mut list, 1, time, std::ptr::null()) }) {
        None => Err(Errno::CANCELED),
        Some(..0) => Err(errno::now()),
        Some(_) => Ok(list.revents),
    }
}

unsafe extern "C-unwind" {
    fn pthread_testcancel();
    fn pthread_exit(result: *mut c_void) -> !;
}

/// Ends the calling thread if it has been cancelled: what a cancellation point does that does not sleep. The caller's
/// frames hold nothing.
pub(crate) fn test() {
    if !is_alone() {
        // SAFETY: takes nothing.
        unsafe { pthread_testcancel() };
    }
}

/// Whether the process has but one thread, which nobody cancels.
fn is_alone() -> bool {
    // SAFETY: a byte of libc's, or one that stands for it.
    unsafe { real::single_threaded().read_volatile() != 0 }
}

/// Ends the calling thread if a [`point`] was cancelled. The caller's frames hold nothing any more.
pub(crate) fn act() {
    if EVER.load(Ordering::Relaxed) && DUE.get() {
        let cancelled = std::ptr::without_provenance_mut(usize::MAX);
        // SAFETY: `PTHREAD_CANCELED` of pthread.h.
        unsafe { pthread_exit(cancelled) }
    }
}

/// Runs `sleep`, a call of libc's that is a cancellation point. `None`: the thread was cancelled in it; the caller
/// returns as soon as it can. `sleep` owns nothing that has to be dropped.
#[cfg(all(target_env = "gnu", target_arch = "x86_64"))]
pub(crate) fn point<T, F: FnOnce() -> T>(sleep: F) -> Option<T> {
    struct Task<T, F> {
        sleep: Option<F>,
        result: Option<T>,
    }

    /// # Safety
    /// `task` is a [`Task`] that nobody else uses.
    unsafe extern "C-unwind" fn run<T, F: FnOnce() -> T>(task: *mut c_void) {
        // SAFETY: the caller's promise.
        let task = unsafe { &mut *task.cast::<Task<T, F>>() };
        task.result = task.sleep.take().map(|sleep| sleep());
    }

    if is_alone() {
        return Some(sleep());
    }
    let mut task = Task { sleep: Some(sleep), result: None };
    // SAFETY: the task lives until the call returns, however it does.
    let cancelled = unsafe { thallus_run_cancellable(run::<T, F>, (&raw mut task).cast()) };
    if cancelled != 0 {
        DUE.set(true);
        EVER.store(true, Ordering::Relaxed);
        return None;
    }
    task.result
}

/// Elsewhere a thread is not cancelled while it sleeps here.
#[cfg(not(all(target_env = "gnu", target_arch = "x86_64")))]
pub(crate) fn point<T, F: FnOnce() -> T>(sleep: F) -> Option<T> {
    unsafe extern "C" {
        fn pthread_setcancelstate(state: i32, before: *mut i32) -> i32;
    }
    const DISABLE: i32 = 1;
    let mut before = 0;
    // SAFETY: one writable word.
    unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
    let result = sleep();
    // SAFETY: as above.
    unsafe { pthread_setcancelstate(before, &raw mut before) };
    Some(result)
}

#[cfg(all(target_env = "gnu", target_arch = "x86_64"))]
unsafe extern "C-unwind" {
    /// Calls `body(argument)` with a place registered to which cancellation jumps. Returns 0 after `body`, 1 after
    /// a jump. In assembly, because it calls a function that returns twice; the buffer is glibc's
    /// `__pthread_unwind_buf_t` (pthread.h).
    fn thallus_run_cancellable(body: unsafe extern "C-unwind" fn(*mut c_void), argument: *mut c_void) -> i32;
}

#[cfg(all(target_env = "gnu", target_arch = "x86_64"))]
std::arch::global_asm!(
    ".pushsection .text.thallus_run_cancellable, \"ax\", @progbits",
    ".hidden thallus_run_cancellable",
    ".globl thallus_run_cancellable",
    ".type thallus_run_cancellable, @function",
    "thallus_run_cancellable:",
    ".cfi_startproc",
    "push rbx",
    ".cfi_def_cfa_offset 16",
    ".cfi_offset rbx, -16",
    "push r12",
    ".cfi_def_cfa_offset 24",
    ".cfi_offset r12, -24",
    "sub rsp, 136",
    ".cfi_def_cfa_offset 160",
    "mov rbx, rdi",
    "mov r12, rsi",
    "mov rdi, rsp",
    "xor esi, esi",
    "call __sigsetjmp@PLT",
    "test eax, eax",
    "jne 2f",
    "mov rdi, rsp",
    "call __pthread_register_cancel@PLT",
    "mov rdi, r12",
    "call rbx",
    "xor ebx, ebx",
    "jmp 3f",
    "2:",
    "mov ebx, 1",
    "3:",
    "mov rdi, rsp",
    "call __pthread_unregister_cancel@PLT",
    "mov eax, ebx",
    "add rsp, 136",
    ".cfi_def_cfa_offset 24",
    "pop r12",
    ".cfi_def_cfa_offset 16",
    "pop rbx",
    ".cfi_def_cfa_offset 8",
    "ret",
    ".cfi_endproc",
    ".size thallus_run_cancellable, . - thallus_run_cancellable",
    ".popsection",
);

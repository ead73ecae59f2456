//! Thread cancellation (pthreads(7), `pthread_cancel`), and `pthread_exit` in a signal handler.
//!
//! glibc ends such a thread by unwinding its stack out of the system call in which it sleeps. That must not go through
//! this library's frames: their destructors would run, but [`catch_unwind`](std::panic::catch_unwind), which keeps panics
//! out of the program, would end the process. So each sleep is a [`point`], a frame whose personality routine stops the
//! unwinding, as a destructor's landing pad does, but then returns to its caller. Everything returns as after an error;
//! [`act`] goes on with the unwinding outside all of it.
//!
//! A call that the kernel serves alone is not in here at all: the hook makes it before [`crate::abi`] catches panics.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{pollfd, sigset_t};
use rustix::event::Timespec;
use rustix::io::Errno;
use thallus_transport::settings::Sleep;

use crate::{errno, real};

/// Whether any thread was ever to end in a sleep of this library's.
static EVER: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// What the calling thread is to go on unwinding with (`struct _Unwind_Exception`), or null.
    static DUE: Cell<*mut c_void> = const { Cell::new(std::ptr::null_mut()) };
}

/// How a thread sleeps inside of a call: each is a cancellation point.
pub(crate) const SLEEP: Sleep = Sleep { recv, send, poll };

/// recv(2). `ECANCELED`: the thread is to end.
unsafe fn recv(fd: i32, buffer: *mut u8, length: usize, flags: i32) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    match point(|| unsafe { real::recv(fd, buffer.cast(), length, flags) }) {
        None => Err(Errno::CANCELED),
        Some(count) => usize::try_from(count).map_err(|_| errno::now()),
    }
}

/// send(2). `ECANCELED`: the thread is to end.
unsafe fn send(fd: i32, buffer: *const u8, length: usize, flags: i32) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    match point(|| unsafe { real::send(fd, buffer.cast(), length, flags) }) {
        None => Err(Errno::CANCELED),
        Some(count) => usize::try_from(count).map_err(|_| errno::now()),
    }
}

/// ppoll(2). `ECANCELED`: the thread is to end.
fn poll(list: &mut [pollfd], limit: Option<&Timespec>, mask: Option<&sigset_t>) -> Result<(), Errno> {
    let time = limit.map(|time| libc::timespec { tv_sec: time.tv_sec, tv_nsec: time.tv_nsec });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let mask = mask.map_or(std::ptr::null(), std::ptr::from_ref);
    let (entries, count) = (list.as_mut_ptr(), list.len() as libc::nfds_t);
    // SAFETY: as many writable entries, and a time and a mask that live.
    match point(|| unsafe { real::ppoll(entries, count, time, mask) }) {
        None => Err(Errno::CANCELED),
        Some(..0) => Err(errno::now()),
        Some(_) => Ok(()),
    }
}

unsafe extern "C-unwind" {
    fn pthread_testcancel();
    fn _Unwind_Resume(exception: *mut c_void) -> !;
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

/// Ends the calling thread if a [`point`] was left for that. The caller's frames hold nothing any more.
pub(crate) fn act() {
    if EVER.load(Ordering::Relaxed) {
        let exception = DUE.replace(std::ptr::null_mut());
        if !exception.is_null() {
            // SAFETY: the unwinder gave it to `point`, and waits to go on.
            unsafe { _Unwind_Resume(exception) }
        }
    }
}

/// Runs `sleep`, a call of libc's that is a cancellation point. `None`: the thread is to end; the caller returns as soon as
/// it can. `sleep` owns nothing that has to be dropped.
#[cfg(target_env = "gnu")]
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

    let mut task = Task { sleep: Some(sleep), result: None };
    // SAFETY: the task lives until the call returns, however it does.
    let exception = unsafe { landing::thallus_run_cancellable(run::<T, F>, (&raw mut task).cast()) };
    if !exception.is_null() {
        DUE.set(exception);
        EVER.store(true, Ordering::Relaxed);
        return None;
    }
    task.result
}

/// Elsewhere a thread is not cancelled while it sleeps here.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn point<T, F: FnOnce() -> T>(sleep: F) -> Option<T> {
    Some(put_off(sleep))
}

/// Does `work`, in which the thread is not cancelled.
pub(crate) fn put_off<T>(work: impl FnOnce() -> T) -> T {
    unsafe extern "C" {
        fn pthread_setcancelstate(state: i32, before: *mut i32) -> i32;
    }
    const DISABLE: i32 = 1;
    let mut before = 0;
    // SAFETY: one writable word.
    unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
    let result = work();
    // SAFETY: as above.
    unsafe { pthread_setcancelstate(before, &raw mut before) };
    result
}

/// The frame at which unwinding stops (Itanium C++ ABI: Exception Handling, level I).
#[cfg(target_env = "gnu")]
mod landing {
    use std::ffi::c_void;

    unsafe extern "C-unwind" {
        /// Calls `body(argument)`. Returns null after it, or the exception with which somebody unwound out of it. In
        /// assembly, for the sake of its personality routine.
        pub(super) fn thallus_run_cancellable(
            body: unsafe extern "C-unwind" fn(*mut c_void),
            argument: *mut c_void,
        ) -> *mut c_void;
    }

    unsafe extern "C" {
        /// Where it goes on after that.
        static thallus_landing_pad: u8;
        fn _Unwind_SetGR(context: *mut c_void, register: i32, value: usize);
        fn _Unwind_SetIP(context: *mut c_void, address: usize);
    }

    const SEARCH_PHASE: i32 = 1;
    const INSTALL_CONTEXT: i32 = 7;
    const CONTINUE_UNWIND: i32 = 8;
    /// The register of a result, RAX or X0, by its DWARF number (System V ABI for AMD64, 3.6.2; DWARF for the Arm 64-bit
    /// Architecture, 4.1).
    const RESULT: i32 = 0;

    /// Handles no exception, and stops whatever unwinds through the frame.
    unsafe extern "C" fn personality(
        _version: i32,
        actions: i32,
        _class: u64,
        exception: *mut c_void,
        context: *mut c_void,
    ) -> i32 {
        if actions & SEARCH_PHASE != 0 {
            return CONTINUE_UNWIND;
        }
        // SAFETY: the unwinder's own context, and a register that the frame's caller expects to be changed.
        unsafe { _Unwind_SetGR(context, RESULT, exception.expose_provenance()) };
        // SAFETY: an address in that very frame's function.
        unsafe { _Unwind_SetIP(context, (&raw const thallus_landing_pad).addr()) };
        INSTALL_CONTEXT
    }

    #[cfg(target_arch = "x86_64")]
    std::arch::global_asm!(
        ".pushsection .text.thallus_run_cancellable, \"ax\", @progbits",
        ".hidden thallus_run_cancellable",
        ".globl thallus_run_cancellable",
        ".type thallus_run_cancellable, @function",
        ".hidden thallus_landing_pad",
        ".globl thallus_landing_pad",
        "thallus_run_cancellable:",
        ".cfi_startproc",
        // DW_EH_PE_pcrel | DW_EH_PE_sdata4
        ".cfi_personality 0x1b, {personality}",
        "sub rsp, 8",
        ".cfi_def_cfa_offset 16",
        "mov rax, rdi",
        "mov rdi, rsi",
        "call rax",
        "xor eax, eax",
        "thallus_landing_pad:",
        "add rsp, 8",
        ".cfi_def_cfa_offset 8",
        "ret",
        ".cfi_endproc",
        ".size thallus_run_cancellable, . - thallus_run_cancellable",
        ".popsection",
        personality = sym personality,
    );

    #[cfg(target_arch = "aarch64")]
    std::arch::global_asm!(
        ".pushsection .text.thallus_run_cancellable, \"ax\", %progbits",
        ".hidden thallus_run_cancellable",
        ".globl thallus_run_cancellable",
        ".type thallus_run_cancellable, %function",
        ".hidden thallus_landing_pad",
        ".globl thallus_landing_pad",
        "thallus_run_cancellable:",
        ".cfi_startproc",
        ".cfi_personality 0x1b, {personality}",
        "stp x29, x30, [sp, #-16]!",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset x29, -16",
        ".cfi_offset x30, -8",
        "mov x9, x0",
        "mov x0, x1",
        "blr x9",
        "mov x0, xzr",
        "thallus_landing_pad:",
        "ldp x29, x30, [sp], #16",
        ".cfi_def_cfa_offset 0",
        ".cfi_restore x29",
        ".cfi_restore x30",
        "ret",
        ".cfi_endproc",
        ".size thallus_run_cancellable, . - thallus_run_cancellable",
        ".popsection",
        personality = sym personality,
    );
}

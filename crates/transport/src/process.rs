//! Who runs: process and thread ids, cached, and made anew in a forked child.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::DumpableBehavior;

static GENERATION: AtomicU32 = AtomicU32::new(1);
static PID: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// The generation in which the thread id was asked for, and the id.
    static THREAD: Cell<(u32, u32)> = const { Cell::new((0, 0)) };
}

/// This process's id.
pub fn id() -> u32 {
    match PID.load(Ordering::Relaxed) {
        0 => {
            let pid = rustix::process::getpid().as_raw_nonzero().get().cast_unsigned();
            PID.store(pid, Ordering::Relaxed);
            pid
        }
        pid => pid,
    }
}

/// The calling thread's kernel id.
pub fn thread() -> u32 {
    let generation = GENERATION.load(Ordering::Relaxed);
    THREAD.with(|cell| match cell.get() {
        (known, thread) if known == generation => thread,
        _ => {
            let thread = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
            cell.set((generation, thread));
            thread
        }
    })
}

/// To be called before the calling thread vforks, and when it goes on: the child, whose id is another, has the same memory meanwhile.
pub fn renew_thread() {
    THREAD.with(|cell| cell.set((0, 0)));
}

/// What ids look like that have no mapping in this user namespace (user_namespaces(7)): anyone's.
const UNMAPPED: u32 = 65534;

/// Whether every process of `user` may trace the calling thread, and so do anything to it: all user ids are that one, and
/// the process may be dumped (ptrace(2), "Ptrace access mode checking"). Security modules may forbid it still.
pub(crate) fn is_open_to(user: u32) -> bool {
    let [mut real, mut effective, mut saved] = [UNMAPPED; 3];
    // SAFETY: all three can be written.
    let known = unsafe { libc::getresuid(&raw mut real, &raw mut effective, &raw mut saved) } == 0;
    known
        && user != UNMAPPED
        && [real, effective, saved] == [user; 3]
        && matches!(rustix::process::dumpable_behavior(), Ok(DumpableBehavior::Dumpable))
}

static FORKS: AtomicU32 = AtomicU32::new(0);

/// In [`FORKS`]: some are not counted.
const UNCOUNTED: u32 = 1 << 31;

/// Memory that was mapped at another value may have been inherited by a fork; `None`: all may have been.
pub(crate) fn forks() -> Option<u32> {
    Some(FORKS.load(Ordering::SeqCst)).filter(|forks| forks & UNCOUNTED == 0)
}

/// To be called before a fork, and after it in the parent.
pub fn forking() {
    FORKS.fetch_add(1, Ordering::SeqCst);
}

/// To be called before a fork that nobody will see return.
pub fn forking_unseen() {
    FORKS.fetch_or(UNCOUNTED, Ordering::SeqCst);
}

/// To be called first in a forked child.
pub fn forked() {
    PID.store(0, Ordering::Relaxed);
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

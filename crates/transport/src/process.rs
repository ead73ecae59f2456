//! Who runs: process and thread ids, cached, and made anew in a forked child.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

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

/// To be called first in a forked child.
pub fn forked() {
    PID.store(0, Ordering::Relaxed);
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

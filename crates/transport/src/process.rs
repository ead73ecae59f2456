//! Who runs: process and thread ids, cached, and made anew in a forked child.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::DumpableBehavior;

use crate::uninterrupted::Descriptor;

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
            let pid = own_id();
            PID.store(pid, Ordering::Relaxed);
            pid
        }
        pid => pid,
    }
}

fn own_id() -> u32 {
    rustix::process::getpid().as_raw_nonzero().get().cast_unsigned()
}

/// Whether this is a process in another one's memory (vfork(2)), which has copies of that one's descriptors.
pub(crate) fn is_guest() -> bool {
    own_id() != id()
}

/// Whether the process has certainly one thread (sys/single_threaded.h).
pub fn is_alone() -> bool {
    unsafe extern "C" {
        static __libc_single_threaded: u8;
    }
    // SAFETY: libc's, which it changes when a thread begins.
    unsafe { (&raw const __libc_single_threaded).read_volatile() != 0 }
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

/// Whether `user` says who that is. [`UNMAPPED`] does not, unless all ids have a mapping: a service with systemd's `PrivateUsers=` sees
/// all users of the host but two so.
pub fn is_somebody(user: u32) -> bool {
    user != UNMAPPED || maps_all_ids().unwrap_or(false)
}

/// Whether this user namespace has a mapping of every id, as the first one has (`uid_map`, proc(5)).
fn maps_all_ids() -> Result<bool, rustix::io::Errno> {
    use rustix::fs::{Mode, OFlags};
    let mut beginning = [0; 64];
    let file = rustix::fs::open(c"/proc/self/uid_map", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let file = Descriptor::from(file);
    let length = rustix::io::read(&file, &mut beginning)?;
    Ok(is_whole(&beginning[..length]))
}

/// Whether a line of `uid_map` is of all ids: from 0 on, to whatever they are outside.
fn is_whole(map: &[u8]) -> bool {
    let mut words = map.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    (words.next(), words.nth(1)) == (Some(b"0"), Some(u32::MAX.to_string().as_bytes()))
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

/// To be called first in a forked child. Its id is asked for at once: a child of its own that has the same memory would note another.
pub fn forked() {
    PID.store(own_id(), Ordering::Relaxed);
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_knows_its_id_before_a_guest_could_note_another() {
        forked();
        assert_eq!(PID.load(Ordering::Relaxed), std::process::id());
    }

    #[test]
    fn only_a_map_of_all_ids_is_whole() {
        // The first namespace; one that maps all as they are; then what has ids beside it: a container's, a service's with PrivateUsers, none yet.
        for (map, whole) in [
            ("         0          0 4294967295\n", true),
            ("0 0 4294967295\n", true),
            ("         0     100000      65536\n", false),
            ("         0          0          1\n       103        103          1\n", false),
            ("", false),
        ] {
            assert_eq!(is_whole(map.as_bytes()), whole, "{map}");
        }
    }

    #[test]
    fn an_id_of_no_mapping_is_nobody_in_particular() {
        assert!(is_somebody(0) && is_somebody(1000));
        assert_eq!(is_somebody(UNMAPPED), maps_all_ids().unwrap());
    }
}

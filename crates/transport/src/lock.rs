//! A direction's lock, shared by the forks of one process, that survives the death of its owner.
//!
//! The word is a priority-inheritance futex: 0 when free, else the owner's thread id. Uncontended use is
//! one compare-exchange each way. A waiter sleeps in `FUTEX_LOCK_PI`, and the kernel hands it the lock when the
//! owner unlocks *or dies*, so no time-out and no repair is needed (futex(2), "Priority-inheritance futexes"). An owner that died before
//! anyone waited is still named by the word: whoever comes next is told so (`ESRCH`), and puts itself in its place.
//! Whoever holds it copies first and publishes with one store. Only the kernel's buffers change before that can be told:
//! [`Guard::was_left`] says when to ask it ([`crate::survivor`]).
//!
//! A signal handler that calls into the same direction of the same connection that its own thread has
//! locked is refused ([`Errno::DEADLK`]) instead of waiting for itself.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use syscalls::{Sysno, syscall};

const FREE: u32 = 0;
/// Longest spin, in pauses, before the kernel is asked: copies under the lock are short.
const SPINS: u32 = 100;

/// Longest wait for the waiter whom the kernel has woken in a dead owner's place.
const UNTIL_HEIR_RUNS: Duration = Duration::from_secs(10);

/// A lock in shared memory. See the module's documentation.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Lock(AtomicU32);

/// Proof that the lock is held; unlocks when dropped.
#[derive(Debug)]
pub struct Guard<'a> {
    lock: &'a Lock,
    thread: u32,
    left: bool,
}

impl Guard<'_> {
    /// Whether the last owner died while it held the lock.
    #[inline]
    pub fn was_left(&self) -> bool {
        self.left
    }
}

impl Lock {
    /// A free lock.
    pub const fn new() -> Self {
        Self(AtomicU32::new(FREE))
    }

    /// Waits for the lock. `thread` is the caller's kernel thread id. Fails with `EDEADLK` if this thread
    /// already holds it.
    pub fn lock(&self, thread: u32) -> Result<Guard<'_>, Errno> {
        if let Some(guard) = self.try_lock(thread) {
            return Ok(guard);
        }
        self.lock_slow(thread)
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self, thread: u32) -> Option<Guard<'_>> {
        self.0.compare_exchange(FREE, thread, Ordering::Acquire, Ordering::Relaxed).ok().map(|_| Guard {
            lock: self,
            thread,
            left: false,
        })
    }

    #[cold]
    fn lock_slow(&self, thread: u32) -> Result<Guard<'_>, Errno> {
        if self.0.load(Ordering::Relaxed) & libc::FUTEX_TID_MASK == thread {
            return Err(Errno::DEADLK);
        }
        for _ in 0..SPINS {
            std::hint::spin_loop();
            if let Some(guard) = self.try_lock(thread) {
                return Ok(guard);
            }
        }
        let mut refused_since = None;
        loop {
            let owner = self.0.load(Ordering::Relaxed) & libc::FUTEX_TID_MASK;
            // SAFETY: FUTEX_LOCK_PI touches only the word, which lives as long as `self`.
            let result = unsafe { syscall!(Sysno::futex, self.0.as_ptr(), libc::FUTEX_LOCK_PI, 0, 0, 0, 0) };
            match result.map_err(|errno| Errno::from_raw_os_error(errno.into_raw())) {
                Ok(_) => {
                    // Set by the kernel when it hands on the lock of an owner that has exited.
                    let left = self.0.load(Ordering::Relaxed) & libc::FUTEX_OWNER_DIED != 0;
                    return Ok(Guard { lock: self, thread, left });
                }
                // The owner is gone and left no waiter to inherit. EPERM: its id is a kernel thread's by now.
                Err(errno) if errno == Errno::SRCH || errno == Errno::PERM && is_gone(owner) => {
                    if self.take_from(owner, thread) {
                        return Ok(Guard { lock: self, thread, left: true });
                    }
                }
                Err(Errno::INTR | Errno::AGAIN) => {}
                // The owner has died, and who is to have it after that has not run yet: until it has, the kernel takes the word, which still
                // names the dead one, for another lock's (`attach_to_pi_state` of kernel/futex/pi.c).
                Err(Errno::INVAL)
                    if refused_since.get_or_insert_with(Instant::now).elapsed() < UNTIL_HEIR_RUNS =>
                {
                    rustix::thread::sched_yield();
                }
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Takes it from `owner`, who is dead. False if it is somebody else's by now: another thread may have been told the same, and been
    /// faster. The kernel may have marked the word as waited for; but nobody waits behind an owner that is dead.
    fn take_from(&self, owner: u32, thread: u32) -> bool {
        let word = self.0.load(Ordering::Relaxed);
        // Asked after the word was read: else the dead one's id might be a new owner's by then.
        word & libc::FUTEX_TID_MASK == owner
            && is_gone(owner)
            && self.0.compare_exchange(word, thread, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
}

/// Whether no thread that could own a lock has the id `owner`, as the kernel itself sees it: a zombie owns none, nor does a kernel thread,
/// for which it says `EPERM`.
fn is_gone(owner: u32) -> bool {
    let word = AtomicU32::new(owner);
    let operation = libc::FUTEX_TRYLOCK_PI | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: FUTEX_TRYLOCK_PI touches only the word, and does not wait.
    let result = unsafe { syscall!(Sysno::futex, word.as_ptr(), operation, 0, 0, 0, 0) };
    matches!(
        result.map_err(|errno| Errno::from_raw_os_error(errno.into_raw())),
        Err(Errno::SRCH | Errno::PERM)
    )
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let word = &self.lock.0;
        if word.compare_exchange(self.thread, FREE, Ordering::Release, Ordering::Relaxed).is_err() {
            // SAFETY: FUTEX_UNLOCK_PI touches only the word, which lives as long as the lock.
            let _ = unsafe { syscall!(Sysno::futex, word.as_ptr(), libc::FUTEX_UNLOCK_PI, 0, 0, 0, 0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicU64;

    fn thread() -> u32 {
        rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned()
    }

    #[test]
    fn excludes_threads_under_contention() {
        let lock = Lock::new();
        let count = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..2_000 {
                        let _guard = lock.lock(thread()).unwrap();
                        let seen = count.load(Ordering::Relaxed);
                        std::hint::spin_loop();
                        count.store(seen + 1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(count.into_inner(), 16_000);
    }

    #[test]
    fn refuses_the_thread_that_holds_it() {
        let lock = Lock::new();
        let _guard = lock.lock(thread()).unwrap();
        assert_eq!(lock.lock(thread()).unwrap_err(), Errno::DEADLK);
    }

    #[test]
    fn is_taken_from_an_owner_that_died_before_anyone_waited() {
        let lock = Lock::new();
        std::thread::scope(|scope| {
            scope.spawn(|| std::mem::forget(lock.lock(thread()).unwrap()));
        });
        assert!(lock.lock(thread()).unwrap().was_left());
        assert!(!lock.lock(thread()).unwrap().was_left());
    }

    #[test]
    fn has_one_owner_when_many_take_it_from_one_that_died() {
        const SURVIVORS: usize = 3;
        for _ in 0..300 {
            let lock: &Lock = Box::leak(Box::new(Lock::new()));
            std::thread::spawn(|| std::mem::forget(lock.lock(thread()).unwrap())).join().unwrap();
            let inside: &AtomicU32 = Box::leak(Box::new(AtomicU32::new(0)));
            let start: &Barrier = Box::leak(Box::new(Barrier::new(SURVIVORS)));
            let (done, is_done) = std::sync::mpsc::channel();
            for _ in 0..SURVIVORS {
                let done = done.clone();
                std::thread::spawn(move || {
                    start.wait();
                    let guard = lock.lock(thread()).unwrap();
                    let alone = inside.fetch_add(1, Ordering::SeqCst) == 0;
                    for _ in 0..3_000 {
                        std::hint::spin_loop();
                    }
                    inside.fetch_sub(1, Ordering::SeqCst);
                    done.send((alone, guard.was_left())).unwrap();
                });
            }
            let wait = || is_done.recv_timeout(Duration::from_secs(10)).expect("a survivor sleeps on");
            let ended: Vec<_> = (0..SURVIVORS).map(|_| wait()).collect();
            assert!(ended.iter().all(|(alone, _)| *alone), "two owners at once");
            assert_eq!(ended.iter().filter(|(_, left)| *left).count(), 1);
        }
    }

    #[test]
    fn is_not_taken_from_an_owner_that_lives() {
        let lock = Lock::new();
        let _guard = lock.lock(thread()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert!(!is_gone(lock.0.load(Ordering::Relaxed)));
                assert!(!lock.take_from(lock.0.load(Ordering::Relaxed), thread()));
            });
        });
    }

    #[test]
    fn is_waited_for_while_it_is_handed_over_by_an_owner_that_died() {
        const OTHERS: usize = 6;
        for _ in 0..200 {
            let lock: &Lock = Box::leak(Box::new(Lock::new()));
            let (held, is_held) = std::sync::mpsc::channel();
            let owner = std::thread::spawn(move || {
                let guard = lock.lock(thread()).unwrap();
                held.send(()).unwrap();
                while lock.0.load(Ordering::Relaxed) & libc::FUTEX_WAITERS == 0 {
                    std::thread::yield_now();
                }
                std::mem::forget(guard);
            });
            is_held.recv().unwrap();
            let lock_often = move || (0..50).all(|_| lock.lock(thread()).is_ok());
            let others: Vec<_> = (0..OTHERS).map(|_| std::thread::spawn(lock_often)).collect();
            assert!(others.into_iter().all(|other| other.join().unwrap()));
            owner.join().unwrap();
        }
    }

    #[test]
    fn is_handed_over_by_an_owner_that_dies_while_someone_waits() {
        let lock = Lock::new();
        let (held, is_held) = std::sync::mpsc::channel();
        let (die, may_die) = std::sync::mpsc::channel::<()>();
        let lock = &lock;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::mem::forget(lock.lock(thread()).unwrap());
                held.send(()).unwrap();
                may_die.recv().unwrap();
            });
            is_held.recv().unwrap();
            let waiter = scope.spawn(|| assert!(lock.lock(thread()).unwrap().was_left()));
            while lock.0.load(Ordering::Relaxed) & libc::FUTEX_WAITERS == 0 {
                std::thread::yield_now();
            }
            die.send(()).unwrap();
            waiter.join().unwrap();
        });
        assert_eq!(lock.0.load(Ordering::Relaxed), FREE);
    }
}

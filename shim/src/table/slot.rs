//! Places for connections, and who holds them: threads in calls, and descriptors.

use std::cell::UnsafeCell;
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use thallus_transport::arena::State;
use thallus_transport::connection::Connection;
use thallus_transport::process;
use thallus_transport::search::Waits;
use thallus_transport::uninterrupted::Uninterrupted;

use super::{blocks, released};
use crate::{errno, log, ops};

/// One in [`Slot::holds`].
pub(super) const USER: u64 = 1;
/// One in [`Slot::holds`].
pub(super) const FD: u64 = 1 << 32;

/// A place for one connection of this process, used again and again.
pub(crate) struct Slot {
    /// Threads inside a call on the connection, a [`USER`] each, and this process's descriptors for it, an [`FD`] each:
    /// one word, so that exactly one thread finds that it was the last.
    pub(super) holds: AtomicU64,
    /// Odd while there is a connection; one more each time that it begins or ends.
    life: AtomicU32,
    /// Some epoll set makes the kernel report this connection, because it is ready in memory.
    pub(crate) kicked: AtomicBool,
    /// This process has waited for it by a hook: poll, select or an epoll set.
    pub(crate) awaited: AtomicBool,
    /// What follows from the connection's return to TCP has been done.
    returned: AtomicBool,
    /// Whether this process did I/O on it: if not, it is not in its statistics.
    pub(super) used: AtomicBool,
    /// Nobody else has the connection: its block is free once the last call has left.
    pub(super) last: AtomicBool,
    connection: UnsafeCell<MaybeUninit<Connection>>,
}

// SAFETY: the connection is written only while it is not alive and one thread has taken the slot from
// the free list, and dropped only by the thread that ended its life; in between it is shared, and Sync.
unsafe impl Sync for Slot {}
// SAFETY: as above; a Connection may be dropped by any thread.
unsafe impl Send for Slot {}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("holds", &self.holds).finish_non_exhaustive()
    }
}

/// A call on a connection: keeps it alive, and counts.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) slot: &'static Slot,
}

impl Call {
    /// The connection.
    pub(crate) fn connection(&self) -> &'static Connection {
        // SAFETY: counted in `holds` and the slot was in the table after that, so it stays alive.
        unsafe { self.slot.connection() }
    }

    /// Whether bytes may have left TCP. Tries to get there if they have not.
    pub(crate) fn is_active(&self, fd: i32) -> bool {
        let connection = self.connection();
        if connection.is_active() {
            if connection.is_failing() {
                let _ = errno::keep(|| connection.mend(fd));
                if connection.has_returned() {
                    log::warn!("fd {fd}: back on TCP");
                }
            }
            return true;
        }
        if !self.slot.used.load(Ordering::Relaxed) {
            self.slot.used.store(true, Ordering::Relaxed);
            connection.block.owner_pid.store(process::id(), Ordering::Relaxed);
            connection.block.owner_fd.store(fd.cast_unsigned(), Ordering::Relaxed);
        }
        if connection.block.state() == State::Pinned {
            if !connection.may_hear_hello() {
                errno::keep(|| released::release(fd, self.slot));
            }
            return false;
        }
        errno::keep(|| {
            connection.approach(fd, || self.is_sole(), || self.waits());
            self.note_active(fd);
        });
        connection.is_active()
    }

    fn is_sole(&self) -> bool {
        self.slot.holds.load(Ordering::SeqCst) % FD == USER
    }

    fn waits(&self) -> Waits {
        if self.slot.awaited.load(Ordering::Relaxed) { Waits::Seen } else { ops::epoll::waits(self.slot) }
    }

    fn note_active(&self, fd: i32) {
        let connection = self.connection();
        if connection.is_active() {
            log::info!("fd {fd}: {}", connection.fabric());
            ops::epoll::became_active(self.slot);
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if self.connection().has_returned() && !self.slot.returned.swap(true, Ordering::SeqCst) {
            // Event loops have to watch the socket for other things now.
            errno::keep(|| ops::epoll::stalled(self.slot));
        }
        self.slot.leave();
    }
}

impl Slot {
    /// A slot for `connection`, with one descriptor, and the caller counted in.
    pub(super) fn begin(connection: Connection, used: bool) -> &'static Self {
        let slot = Self::take();
        // SAFETY: the slot came from the free list (or is new), so nobody reads its connection.
        unsafe { (*slot.connection.get()).write(connection) };
        slot.used.store(used, Ordering::Relaxed);
        slot.last.store(false, Ordering::Relaxed);
        slot.returned.store(false, Ordering::Relaxed);
        slot.awaited.store(false, Ordering::Relaxed);
        // Whoever still looks at the slot's last connection comes and goes.
        slot.holds.fetch_add(FD + USER, Ordering::SeqCst);
        slot.life.fetch_add(1, Ordering::SeqCst);
        slot
    }

    fn take() -> &'static Self {
        if let Some(slot) = FREE.lock().ok().and_then(|mut free| free.pop()) {
            return slot;
        }
        let slot: &'static Self = Box::leak(Box::new(Self {
            holds: AtomicU64::new(0),
            life: AtomicU32::new(0),
            kicked: AtomicBool::new(false),
            awaited: AtomicBool::new(false),
            returned: AtomicBool::new(false),
            used: AtomicBool::new(false),
            last: AtomicBool::new(false),
            connection: UnsafeCell::new(MaybeUninit::uninit()),
        }));
        if let Ok(mut slots) = SLOTS.lock() {
            slots.push(slot);
        }
        slot
    }

    /// This process waits by a hook for `connection`, which is this slot's.
    #[inline]
    pub(crate) fn note_wait(&self, connection: &Connection) {
        if !self.awaited.load(Ordering::Relaxed) {
            self.awaited.store(true, Ordering::Relaxed);
            connection.wait_was_seen();
        }
    }

    /// Counts the caller in; it knows that the slot is alive.
    pub(crate) fn join(&'static self) -> Call {
        self.holds.fetch_add(USER, Ordering::SeqCst);
        Call { slot: self }
    }

    /// # Safety
    /// The slot is alive and stays so: the caller is counted in `holds`.
    pub(crate) unsafe fn connection(&self) -> &'static Connection {
        // SAFETY: alive, so initialized, and shared references only.
        let connection = unsafe { &*self.connection.get() };
        // SAFETY: slots are never freed; the caller keeps this one alive as long as it uses the reference.
        unsafe { &*connection.as_ptr() }
    }

    /// Whether this is where `connection` is, which is alive.
    pub(super) fn has(&self, connection: &Connection) -> bool {
        std::ptr::eq(self.connection.get().cast_const().cast(), connection)
    }

    /// Counts the caller in, which must [`Self::leave`]. `None` if nothing is open here.
    pub(super) fn count_in(&self) -> Option<&'static Connection> {
        let held = self.holds.fetch_add(USER, Ordering::SeqCst);
        let open = is_alive(self.life.load(Ordering::SeqCst)) && held >= FD;
        // SAFETY: alive after this thread had counted itself in.
        open.then(|| unsafe { self.connection() })
    }

    /// Counts the caller out. The last one ends the connection in this process.
    pub(super) fn leave(&'static self) {
        // Before it leaves: afterwards the slot may be another connection's.
        let life = self.life.load(Ordering::SeqCst);
        if self.holds.fetch_sub(USER, Ordering::SeqCst) == USER {
            errno::keep(|| self.retire(life));
        }
    }

    /// Ends the connection of this `life` in this process once nobody uses it any more.
    #[cold]
    fn retire(&'static self, life: u32) {
        let _uninterrupted = Uninterrupted::begin();
        let ends = || self.life.compare_exchange(life, life + 1, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if !is_alive(life) || !ends() {
            return;
        }
        // SAFETY: it was alive until this very call, and no one else gets past it.
        let connection = unsafe { &*self.connection.get() };
        // SAFETY: initialized while alive, and read out only here.
        let connection = unsafe { connection.assume_init_read() };
        let (block, generation) = (connection.block, connection.generation);
        drop(connection);
        if self.last.load(Ordering::SeqCst) {
            blocks::free(block, generation);
        }
        if let Ok(mut free) = FREE.lock() {
            free.push(self);
        }
    }
}

fn is_alive(life: u32) -> bool {
    life % 2 == 1
}

static SLOTS: Mutex<Vec<&'static Slot>> = Mutex::new(Vec::new());
static FREE: Mutex<Vec<&'static Slot>> = Mutex::new(Vec::new());

/// Calls `visit` for each connection that this process has, and whether it did I/O on it.
pub(crate) fn for_each(mut visit: impl FnMut(&'static Slot, &'static Connection, bool)) {
    let _uninterrupted = Uninterrupted::begin();
    let Some(slots) = patiently(&SLOTS) else { return };
    for slot in slots.iter() {
        if let Some(connection) = slot.count_in() {
            visit(slot, connection, slot.used.load(Ordering::Relaxed));
        }
        slot.leave();
    }
}

/// Waits for a lock that others hold for moments only, but not for ever: at the end of a process its holder may be
/// a thread that does not run any more.
pub(crate) fn patiently<T>(lock: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    const YIELDS: u32 = 10_000;
    for _ in 0..YIELDS {
        match lock.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::WouldBlock) => rustix::thread::sched_yield(),
            Err(TryLockError::Poisoned(_)) => return None,
        }
    }
    None
}

/// Keeps both lists over a fork: all slots, and the free ones.
pub(super) fn quiesce() -> Option<[MutexGuard<'static, Vec<&'static Slot>>; 2]> {
    Some([SLOTS.lock().ok()?, FREE.lock().ok()?])
}

//! Connections that have done little: one word in the table, and nothing else.
//!
//! Most of what a short connection would cost is the making of a [`Slot`] and of a block in the arena, with their locks,
//! and what they push out of the caches. So until its [`ADULT`]th call a connection is *young*: its entry holds all that
//! there is to know. Whatever needs more than to read, write, poll or close makes it grow up at once.
//!
//! A call on a young connection is a [`Visit`], counted in the word, for the same reason that a call on a slot is: nobody
//! may take the connection out of TCP beside it. If it grows up meanwhile, its visits become the slot's.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use thallus_transport::arena::Role;
use thallus_transport::reason::Reason;
use thallus_transport::settings::settings;
use thallus_transport::uninterrupted::Uninterrupted;

use super::{LIMIT, Slot, TABLE, TAG, YOUNG, cell, grow_up};
use crate::ops;

/// Calls after which a connection is worth a slot, if it is not to leave TCP before.
const ADULT: usize = 4;

/// The entry of a young connection.
///
/// ```text
///  63 … 32     31 … 16  15 … 7   6 … 5   4     3          2       1 … 0
///  generation  port     visits   calls   used  connected  server  YOUNG
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Young(usize);

const _: () = assert!(usize::BITS == 64);

const SERVER: usize = 1 << 2;
const CONNECTED: usize = 1 << 3;
const USED: usize = 1 << 4;
const CALL: usize = 1 << 5;
const CALLS: usize = 3 << 5;
const VISIT: usize = 1 << 7;
const VISITS: usize = 0x1ff << 7;

impl Young {
    /// A connection that nobody has used yet.
    pub(super) fn new(fd: i32, role: Role, port: u16, connected: bool) -> Self {
        BYTES[fd as usize].store(0, Ordering::SeqCst);
        static GENERATIONS: AtomicU32 = AtomicU32::new(1);
        // 0 is none.
        let generation = GENERATIONS.fetch_add(1, Ordering::Relaxed).max(1) as usize;
        let flags = if role == Role::Server { SERVER } else { 0 } | if connected { CONNECTED } else { 0 };
        Self(generation << 32 | usize::from(port) << 16 | flags | YOUNG)
    }

    /// The young connection of this entry, if it is one.
    pub(super) fn of(word: usize) -> Option<Self> {
        (word & TAG == YOUNG && word >> 32 != 0).then_some(Self(word))
    }

    /// The entry.
    pub(super) fn word(self) -> usize {
        self.0
    }

    /// Which end this is.
    pub(super) fn role(self) -> Role {
        if self.0 & SERVER != 0 { Role::Server } else { Role::Client }
    }

    /// The server's port.
    pub(super) fn port(self) -> u16 {
        (self.0 >> 16) as u16
    }

    /// Whether it was established when its call returned.
    pub(super) fn is_connected(self) -> bool {
        self.0 & CONNECTED != 0
    }

    /// Whether this process did I/O on it.
    pub(crate) fn is_used(self) -> bool {
        self.0 & USED != 0
    }

    /// Calls so far.
    pub(super) fn calls(self) -> u32 {
        ((self.0 & CALLS) / CALL) as u32
    }

    /// Calls that are inside now.
    pub(super) fn visits(self) -> u32 {
        ((self.0 & VISITS) / VISIT) as u32
    }

    /// Application bytes sent and received; `fd` is its descriptor.
    pub(crate) fn bytes(self, fd: i32) -> (u64, u64) {
        let bytes = BYTES[fd as usize].load(Ordering::SeqCst);
        (bytes & 0xffff_ffff, bytes >> 32)
    }

    /// Turns the entry of `fd` into `slot`, whose `users` the visits become. False if it is no longer this connection's.
    pub(super) fn becomes(self, slot: &'static Slot, users: &AtomicU32, fd: i32) -> bool {
        let Some(cell) = cell(fd) else { return false };
        let Ok(mut moved) = MOVED.lock() else { return false };
        let adult = std::ptr::from_ref(slot).expose_provenance();
        let mut now = self;
        loop {
            // Whoever still looks at the slot's last connection counts itself in and out.
            users.fetch_add(now.visits(), Ordering::SeqCst);
            match cell.compare_exchange(now.0, adult, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => {
                    moved.extend((0..now.visits()).map(|_| (self.generation(), slot)));
                    return true;
                }
                Err(word) => {
                    users.fetch_sub(now.visits(), Ordering::SeqCst);
                    match Self::of(word).filter(|other| other.generation() == self.generation()) {
                        Some(other) => now = other,
                        None => return false,
                    }
                }
            }
        }
    }

    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// With one more call, which is inside. `None` if it has to grow up first.
    fn visited(self) -> Option<Self> {
        let adult = ADULT.min(settings().upgrade_after as usize);
        let calls = (self.0 & CALLS) / CALL;
        // With others inside it would have to ask them; they will have left before long, or it takes many calls.
        if (calls + 1 >= adult && self.visits() == 0) || self.0 & VISITS == VISITS {
            return None;
        }
        let call = if self.0 & CALLS == CALLS { 0 } else { CALL };
        Some(Self((self.0 | USED) + call + VISIT))
    }

    /// Why it stayed on TCP, if it ends now.
    pub(crate) fn reason(self) -> Reason {
        if !settings().shm {
            Reason::Disabled
        } else if !settings().selects(self.port()) {
            Reason::NotSelected
        } else if ops::process::has_io_uring() {
            Reason::IoUring
        } else {
            Reason::Short
        }
    }
}

/// Application bytes of young connections: sent in the lower half, received in the upper.
static BYTES: [AtomicU64; LIMIT] = [const { AtomicU64::new(0) }; LIMIT];

/// Most that one call adds to them: three such fit.
const MOST_BYTES: u64 = 1 << 30;

/// Visits to connections that have grown up since: generation and slot, one entry for each.
static MOVED: Mutex<Vec<(u32, &'static Slot)>> = Mutex::new(Vec::new());

/// Keeps the list of [`Visit`]s that have moved, over a fork.
pub(super) fn quiesce() -> Option<MutexGuard<'static, Vec<(u32, &'static Slot)>>> {
    MOVED.lock().ok()
}

/// A call on a young connection.
#[derive(Debug)]
pub(crate) struct Visit {
    fd: i32,
    generation: u32,
    sent: u64,
    received: u64,
}

impl Visit {
    /// Counts a call in on the entry `word` of `fd`; else the entry as it is now.
    pub(super) fn begin(fd: i32, cell: &AtomicUsize, young: Young) -> Result<Self, Option<usize>> {
        let Some(next) = young.visited() else { return Err(None) };
        match cell.compare_exchange_weak(young.0, next.0, Ordering::SeqCst, Ordering::Relaxed) {
            Ok(_) => Ok(Self { fd, generation: young.generation(), sent: 0, received: 0 }),
            Err(now) => Err(Some(now)),
        }
    }

    /// The call has sent so many bytes.
    pub(crate) fn sent(&mut self, count: u64) {
        self.sent += count;
    }

    /// The call has received so many bytes.
    pub(crate) fn received(&mut self, count: u64) {
        self.received += count;
    }

    /// The connection is no longer young.
    #[cold]
    fn leave_moved(&self) {
        let _uninterrupted = Uninterrupted::begin();
        let slot = MOVED.lock().ok().and_then(|mut moved| {
            let index = moved.iter().position(|(generation, _)| *generation == self.generation)?;
            Some(moved.swap_remove(index).1)
        });
        // None: it was closed meanwhile.
        if let Some(slot) = slot {
            // SAFETY: this visit is counted in the slot's users until `leave`.
            let block = unsafe { slot.connection() }.block;
            block.tcp_sent.fetch_add(self.sent, Ordering::Relaxed);
            block.tcp_received.fetch_add(self.received, Ordering::Relaxed);
            slot.leave();
        }
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let cell = &TABLE[self.fd as usize];
        let counter = &BYTES[self.fd as usize];
        let mut word = cell.load(Ordering::SeqCst);
        if self.sent.max(self.received) > MOST_BYTES
            && let Some(young) = Young::of(word).filter(|young| young.generation() == self.generation)
        {
            grow_up(self.fd, young);
            word = cell.load(Ordering::SeqCst);
        }
        let bytes = self.sent | self.received << 32;
        while let Some(young) = Young::of(word).filter(|young| young.generation() == self.generation) {
            // Before the visit ends: whoever makes it grow up then finds all of its bytes.
            if bytes != 0 {
                counter.fetch_add(bytes, Ordering::SeqCst);
            }
            match cell.compare_exchange(word, young.0 - VISIT, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return,
                Err(now) => word = now,
            }
            if bytes != 0 {
                counter.fetch_sub(bytes, Ordering::SeqCst);
            }
        }
        self.leave_moved();
    }
}

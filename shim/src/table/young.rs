//! Connections that have done little: one word in the table, and nothing else.
//!
//! Most of what a short connection would cost is the making of a [`Slot`] and of a block in the arena, with their locks,
//! and what they push out of the caches. So until its [`ADULT`]th call, or where connections have been short for much longer, a
//! connection is *young*: its entry holds nearly all that there is to know. Whatever needs more than to read, write, poll or close,
//! or to be in one epoll set, makes it grow up at once.
//!
//! A call on a young connection is a [`Visit`], counted in the word, for the same reason that a call on a slot is: nobody
//! may take the connection out of TCP beside it. If it grows up meanwhile, its visits become the slot's.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use rustix::fd::BorrowedFd;
use thallus_transport::arena::{self, Block, Role};
use thallus_transport::experience;
use thallus_transport::reason::Reason;
use thallus_transport::rendezvous::{self, Service};
use thallus_transport::settings::settings;
use thallus_transport::uninterrupted::Uninterrupted;
use thallus_transport::unix::Name;

use super::cells::{beside, cell};
use super::slot::{Slot, USER};
use super::{TAG, YOUNG, grow_up, is_slot};
use crate::ops::epoll::Set;
use crate::{errno, ops};

/// Calls after which a connection is worth a slot, if it is not to leave TCP before.
const ADULT: usize = 4;
/// At ports whose connections have been short it is worth one only so many calls before it may look for its peer.
const AHEAD: usize = 4;

/// The entry of a young connection.
///
/// ```text
///  63 … 39     38    37 … 32  31 … 16  15          14 … 9  8        7     6 … 5     4     3          2       1 … 0
///  generation  unix  left     port     registered  visits  awaited  poor  patience  used  connected  server  YOUNG
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Young(usize);

const _: () = assert!(usize::BITS == 64);

const SERVER: usize = 1 << 2;
const CONNECTED: usize = 1 << 3;
const USED: usize = 1 << 4;
const POOR: usize = 1 << 7;
const AWAITED: usize = 1 << 8;
const VISIT: usize = 1 << 9;
const VISITS: usize = 0x3f << 9;
const REGISTERED: usize = 1 << 15;
/// Calls before it grows up: which of [`Young::most_calls`] they were, and how many are left.
const PATIENCE: usize = 1 << 5;
const PATIENCES: usize = 3 << 5;
const CALL: usize = 1 << 32;
const CALLS: usize = 0x3f << 32;
/// It is an `AF_UNIX` stream, and the port stands for its server's name.
const UNIX: usize = 1 << 38;
/// The generation's lowest bit.
const GENERATION: u32 = 39;

impl Young {
    /// A connection that nobody has used yet.
    pub(super) fn new(fd: i32, role: Role, service: Service, connected: bool) -> Self {
        let (port, unix) = match service {
            Service::Port(port) => (port, 0),
            Service::Unix(name) => (name.number(), UNIX),
        };
        let beside = beside(fd);
        beside.bytes.store(0, Ordering::SeqCst);
        beside.opened_ns.store(arena::now_ns(), Ordering::Relaxed);
        static GENERATIONS: AtomicU32 = AtomicU32::new(1);
        let generation =
            GENERATIONS.fetch_add(1, Ordering::Relaxed) as usize % (1 << (usize::BITS - GENERATION));
        let flags = if role == Role::Server { SERVER } else { 0 } | if connected { CONNECTED } else { 0 };
        let patience = experience::doublings(role, port).min(PATIENCES / PATIENCE);
        let calls = (patience * PATIENCE) | (Self::most_calls(patience) * CALL);
        // 0 is none.
        Self(generation.max(1) << GENERATION | usize::from(port) << 16 | calls | unix | flags | YOUNG)
    }

    /// The young connection of this entry, if it is one.
    pub(super) fn of(word: usize) -> Option<Self> {
        (word & TAG == YOUNG && word >> GENERATION != 0).then_some(Self(word))
    }

    /// The entry.
    pub(super) fn word(self) -> usize {
        self.0
    }

    /// Which end this is.
    pub(super) fn role(self) -> Role {
        if self.0 & SERVER != 0 { Role::Server } else { Role::Client }
    }

    /// Whether it is an `AF_UNIX` stream.
    pub(crate) fn is_unix(self) -> bool {
        self.0 & UNIX != 0
    }

    /// The server's port, or what stands for its name.
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
        (Self::most_calls((self.0 & PATIENCES) / PATIENCE) - (self.0 & CALLS) / CALL) as u32
    }

    /// Calls before it grows up, if those before it looks for its peer have been doubled so often.
    fn most_calls(doublings: usize) -> usize {
        let settings = settings();
        let first = settings.upgrade_after as usize;
        let adult = match doublings {
            // A peer on another host may begin with a greeting, which takes more than a word to deal with.
            _ if !settings.verbs.peers.is_empty() => 1,
            0 => ADULT.min(first),
            _ => (first << doublings).saturating_sub(AHEAD),
        };
        (adult.max(1) - 1).min(CALLS / CALL)
    }

    /// Calls that are inside now.
    pub(super) fn visits(self) -> u32 {
        ((self.0 & VISITS) / VISIT) as u32
    }

    /// Application bytes sent and received; `fd` is its descriptor.
    pub(crate) fn bytes(self, fd: i32) -> (u64, u64) {
        let bytes = beside(fd).bytes.load(Ordering::SeqCst);
        (bytes & 0xffff_ffff, bytes >> 32)
    }

    /// Turns the entry of `fd` into `slot`, in which the visits are counted on. Returns what it was last; `None` if it is no
    /// longer this connection's.
    pub(super) fn becomes(self, slot: &'static Slot, fd: i32) -> Option<Self> {
        let cell = cell(fd)?;
        let mut moved = MOVED.lock().ok()?;
        let adult = std::ptr::from_ref(slot).expose_provenance();
        let mut now = self;
        loop {
            slot.holds.fetch_add(u64::from(now.visits()) * USER, Ordering::SeqCst);
            match cell.compare_exchange(now.0, adult, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => {
                    if now.0 & AWAITED != 0 {
                        slot.awaited.store(true, Ordering::Relaxed);
                    }
                    moved.extend((0..now.visits()).map(|_| (self.generation(), slot)));
                    // SAFETY: the caller is counted in.
                    drain(fd, unsafe { slot.connection() }.block);
                    return Some(now);
                }
                Err(word) => {
                    slot.holds.fetch_sub(u64::from(now.visits()) * USER, Ordering::SeqCst);
                    match Self::of(word).filter(|other| other.generation() == self.generation()) {
                        Some(other) => now = other,
                        None => return None,
                    }
                }
            }
        }
    }

    /// Tells it from those that had its descriptor before. Never 0.
    pub(crate) fn generation(self) -> u32 {
        (self.0 >> GENERATION) as u32
    }

    /// Whether an epoll set has it.
    pub(crate) fn is_registered(self) -> bool {
        self.0 & REGISTERED != 0
    }

    /// The set that has it: the only one, since it grows up before a second. While two threads register it, it may be the other's.
    pub(crate) fn set(self, fd: i32) -> Option<&'static Set> {
        let set = beside(fd).set.load(Ordering::Acquire);
        // SAFETY: null, or a set, which is never freed.
        if self.is_registered() { unsafe { set.as_ref() } } else { None }
    }

    /// Notes that `set` has it as `fd`. False if it is no longer this young connection's entry, or another thread was faster.
    pub(crate) fn register(self, fd: i32, set: &'static Set) -> bool {
        let ours = std::ptr::from_ref(set).cast_mut();
        // Before the mark says that it is there. While two threads do this, it may be the wrong one: whoever does not find it there
        // looks in all sets.
        let kept = &beside(fd).set;
        let before = kept.swap(ours, Ordering::AcqRel);
        let registered = self.update(fd, |word| (word & REGISTERED == 0).then_some(word | REGISTERED));
        if !registered {
            let _ = kept.compare_exchange(ours, before, Ordering::AcqRel, Ordering::Relaxed);
        }
        registered
    }

    /// Notes that no set has it, and whether it was `awaited` in the one that had.
    pub(crate) fn unregister(self, fd: i32, awaited: bool) {
        self.update(fd, |word| Some(word & !REGISTERED | if awaited { AWAITED } else { 0 }));
    }

    fn update(self, fd: i32, change: impl Fn(usize) -> Option<usize>) -> bool {
        let ours = |word| Self::of(word).is_some_and(|young| young.generation() == self.generation());
        let change = |word| if ours(word) { change(word) } else { None };
        cell(fd).is_some_and(|cell| cell.fetch_update(Ordering::SeqCst, Ordering::SeqCst, change).is_ok())
    }

    /// Whether there was no memory for it to grow up.
    pub(super) fn is_poor(self) -> bool {
        self.0 & POOR != 0
    }

    /// Notes that there was no memory for it to grow up.
    pub(super) fn becomes_poor(self, fd: i32) {
        self.update(fd, |word| Some(word | POOR));
    }

    /// When it was opened as `fd` ([`arena::now_ns`]).
    pub(super) fn opened_ns(self, fd: i32) -> u64 {
        beside(fd).opened_ns.load(Ordering::Relaxed)
    }

    /// It has done enough to grow up: a client asks the server, once for each port, whether its connections are so short that this one had
    /// better wait, and then it does. False if there is no such advice.
    #[cold]
    pub(super) fn takes_advice(self, fd: i32) -> bool {
        let settings = settings();
        let port = self.port();
        let is_of_interest = settings.shm && (self.is_unix() || settings.selects(port));
        if self.role() != Role::Client
            || self.0 & (PATIENCES | CALLS | POOR) != 0
            || !is_of_interest
            || !experience::wants_advice(port)
        {
            return false;
        }
        errno::keep(|| {
            let _uninterrupted = Uninterrupted::begin();
            // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
            let socket = unsafe { BorrowedFd::borrow_raw(fd) };
            let service = match self.is_unix() {
                true => Name::of_peer(socket).map(Service::Unix),
                false => Some(Service::Port(port)),
            };
            if !service.is_some_and(|service| rendezvous::take_advice(service, settings.place)) {
                return false;
            }
            let patience = experience::doublings(Role::Client, port).min(PATIENCES / PATIENCE);
            let more = Self::most_calls(patience).saturating_sub(Self::most_calls(0));
            let has_done_enough = |word: usize| word & (PATIENCES | CALLS) == 0;
            let waits = (patience * PATIENCE) | (more * CALL);
            more > 0 && self.update(fd, |word| has_done_enough(word).then_some(word | waits))
        })
    }

    /// Has later connections learn from this one, which ends; `fd` is its descriptor.
    pub(super) fn teach(self, fd: i32) {
        let calls = u64::from(self.calls());
        let pace = || (arena::age(self.opened_ns(fd)), calls);
        experience::ended(self.role(), self.port(), calls, pace, None);
    }

    /// With one more call, which is inside.
    fn visited(self) -> Result<Self, Refusal> {
        let full = self.0 & VISITS == VISITS;
        match (self.is_poor(), full) {
            (true, true) => Err(Refusal::Crowded),
            (true, false) => Ok(Self((self.0 | USED) + VISIT)),
            (false, false) if self.0 & CALLS != 0 => Ok(Self((self.0 | USED) - CALL + VISIT)),
            (false, _) => Err(Refusal::Adult),
        }
    }

    /// Why it stayed on TCP, if it ends now.
    pub(crate) fn reason(self) -> Reason {
        if !settings().shm && settings().verbs.peers.is_empty() {
            Reason::Disabled
        } else if !self.is_unix() && !settings().selects(self.port()) {
            Reason::NotSelected
        } else if let Some(reason) = ops::process::out_of_sight() {
            reason
        } else if self.is_poor() {
            Reason::NoMemory
        } else {
            Reason::Short
        }
    }
}

/// So many of them in one direction make a connection grow up: what one call adds then still fits. A power of two.
const MOST_BYTES: u64 = 1 << 30;
/// The bits of a count that is not less.
const MUCH: u64 = u32::MAX as u64 & !(MOST_BYTES - 1);

/// Moves the bytes of a connection that has grown up to its block. Under the lock of [`MOVED`].
fn drain(fd: i32, block: &Block) {
    let bytes = beside(fd).bytes.swap(0, Ordering::SeqCst);
    block.tcp_sent.fetch_add(bytes & 0xffff_ffff, Ordering::Relaxed);
    block.tcp_received.fetch_add(bytes >> 32, Ordering::Relaxed);
}

/// Visits to connections that have grown up since: generation and slot, one entry for each.
static MOVED: Mutex<Vec<(u32, &'static Slot)>> = Mutex::new(Vec::new());

/// Keeps the list of [`Visit`]s that have moved, over a fork.
pub(super) fn quiesce() -> Option<MutexGuard<'static, Vec<(u32, &'static Slot)>>> {
    MOVED.lock().ok()
}

/// Why a call is no visit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The entry is another one now.
    Changed(usize),
    /// It is time to grow up.
    Adult,
    /// Too many are inside already, and it can't grow up.
    Crowded,
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
    /// Counts a call in on the connection `young`, the entry of `fd`.
    pub(super) fn begin(fd: i32, cell: &AtomicUsize, young: Young) -> Result<Self, Refusal> {
        let next = young.visited()?;
        match cell.compare_exchange_weak(young.0, next.0, Ordering::SeqCst, Ordering::Relaxed) {
            Ok(_) => Ok(Self { fd, generation: young.generation(), sent: 0, received: 0 }),
            Err(now) => Err(Refusal::Changed(now)),
        }
    }

    fn cell(&self) -> &'static AtomicUsize {
        cell(self.fd).expect("it has an entry")
    }

    /// The call has sent so many bytes.
    pub(crate) fn sent(&mut self, count: u64) {
        self.sent += count;
    }

    /// The call has received so many bytes.
    pub(crate) fn received(&mut self, count: u64) {
        self.received += count;
    }

    /// Whether the connection has carried bytes of the application's.
    pub(crate) fn has_carried(&self) -> bool {
        beside(self.fd).bytes.load(Ordering::SeqCst) != 0
    }

    /// This process waits by a hook for the connection.
    pub(crate) fn note_wait(&self) {
        let ours = |word: usize| Young::of(word).is_some_and(|young| young.generation() == self.generation);
        let awaited = |word: usize| (ours(word) && word & AWAITED == 0).then_some(word | AWAITED);
        let _ = self.cell().fetch_update(Ordering::SeqCst, Ordering::SeqCst, awaited);
    }

    /// Counts the bytes, with the connection's entry at `word`, which is returned as it is then.
    fn count(&self, word: usize) -> usize {
        let counter = &beside(self.fd).bytes;
        // The kernel moves less than 2 GiB in one call, and what was counted before is less than `MOST_BYTES`.
        let more = self.sent | self.received << 32;
        let much = |bytes: u64| bytes & (MUCH | MUCH << 32) != 0;
        let young = Young::of(word).filter(|young| young.generation() == self.generation);
        if young.is_some_and(Young::is_poor) && much(counter.load(Ordering::SeqCst) + more) {
            // What can't grow up counts only so far.
            return word;
        }
        // Before the visit ends, and once: whoever makes it grow up takes them, now or when this visit has left.
        let before = counter.fetch_add(more, Ordering::SeqCst);
        match young {
            Some(young) if much(before + more) => {
                grow_up(self.fd, young);
                self.cell().load(Ordering::SeqCst)
            }
            _ => word,
        }
    }

    /// The connection is no longer young.
    #[cold]
    fn leave_moved(&self, cell: &AtomicUsize) {
        let _uninterrupted = Uninterrupted::begin();
        let Ok(mut moved) = MOVED.lock() else { return };
        let index = moved.iter().position(|(generation, _)| *generation == self.generation);
        // None: it was closed meanwhile.
        let Some((_, slot)) = index.map(|index| moved.swap_remove(index)) else { return };
        if is_slot(cell.load(Ordering::SeqCst), slot) {
            // SAFETY: this visit is counted in the slot's holds until `leave`.
            drain(self.fd, unsafe { slot.connection() }.block);
        }
        drop(moved);
        slot.leave();
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let cell = self.cell();
        let ours = |word: usize| Young::of(word).filter(|young| young.generation() == self.generation);
        let mut word = cell.load(Ordering::SeqCst);
        if self.sent | self.received != 0 && (ours(word).is_some() || word & TAG == 0) {
            word = self.count(word);
        }
        while let Some(young) = ours(word) {
            match cell.compare_exchange(word, young.0 - VISIT, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
        errno::keep(|| self.leave_moved(cell));
    }
}

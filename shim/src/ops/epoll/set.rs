//! An epoll set of this process: its registrations, and who sleeps on it.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering, compiler_fence};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use libc::epoll_event;
use rustix::event::PollFlags;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd};
use smallvec::SmallVec;
use thallus_transport::chime;
use thallus_transport::ready::bit;
use thallus_transport::spin::Patience;
use thallus_transport::uninterrupted::{Descriptor, Uninterrupted};

use super::graves::Graves;
use super::member::{ET, Member, ONESHOT};
use super::strangers::Strangers;
use super::waiting::ready_in_kernel;
use crate::real;
use crate::table::{self, Slot};

/// One epoll set. Recycled, never freed.
#[derive(Debug)]
pub(crate) struct Set {
    members: Mutex<Members>,
    /// A descriptor of the set by which the kernel is told; −1 while only one is open that is being made. Changed under the lock.
    epfd: AtomicI32,
    descriptors: AtomicU32,
    /// How often it has been given up.
    pub(super) life: AtomicU32,
    /// There are, or were, one-shot registrations.
    pub(super) one_shots: AtomicBool,
    /// Something may be in it that no hook has seen come.
    opaque: AtomicBool,
    /// Registrations that have left TCP.
    pub(super) active: AtomicU32,
    /// The set is waited for from outside: the kernel alone must be able to tell its readiness.
    pub(super) nested: AtomicBool,
    /// The program has waited on it by a hook. If it never does it may wait by system calls of its own.
    pub(super) awaited: AtomicBool,
    /// Threads that sleep in the kernel on this set, and in the upper half those of them that [`Self::rest`].
    pub(super) sleepers: AtomicU64,
    /// Nothing is registered that is ours, as far as the last holder of the lock has left it.
    is_vacant: AtomicBool,
    /// How often the lock was taken and given back: odd while somebody has it.
    turns: AtomicU32,
    /// Waits that memory has answered since the kernel was asked.
    pub(super) answers: AtomicU32,
    /// When the kernel was last asked before memory ([`thallus_transport::arrival::now`]).
    pub(super) asked_at: AtomicU64,
    /// Numbers the looks at memory: each reports a registration once.
    pub(super) rounds: AtomicU32,
    /// Where among the hot registrations the next short look begins.
    pub(super) looked_at: AtomicUsize,
    pub(super) patience: Patience,
}

/// Hashes a descriptor, an address or the program's own `epoll_data` by one multiplication: they are looked up at every turn, and
/// nobody chooses them to collide.
#[derive(Debug, Default)]
pub(super) struct Number(u64);

impl Hasher for Number {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_i32(&mut self, number: i32) {
        self.write_u64(u64::from(number.cast_unsigned()));
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn write_u64(&mut self, number: u64) {
        // The map takes its bucket from the low bits and a tag from the high ones (2⁶⁴ ÷ the golden ratio).
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

pub(super) type ByFd = HashMap<i32, Member, BuildHasherDefault<Number>>;

/// Descriptors with the same `epoll_data`: nearly always one.
pub(super) type Named = SmallVec<[i32; 2]>;

/// Descriptors by their `epoll_data`.
#[derive(Debug, Default)]
pub(super) struct Names(HashMap<u64, Named, BuildHasherDefault<Number>>);

impl Names {
    pub(super) fn add(&mut self, data: u64, fd: i32) {
        self.0.entry(data).or_default().push(fd);
    }

    pub(super) fn remove(&mut self, data: u64, fd: i32) {
        if let Some(fds) = self.0.get_mut(&data) {
            if let Some(at) = fds.iter().position(|&known| known == fd) {
                fds.swap_remove(at);
            }
            if fds.is_empty() {
                self.0.remove(&data);
            }
        }
    }

    pub(super) fn of(&self, data: u64) -> &[i32] {
        self.0.get(&data).map_or(&[], |fds| fds)
    }

    fn has(&self, data: u64) -> bool {
        self.0.contains_key(&data)
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}

#[derive(Debug, Default)]
pub(super) struct Members {
    /// By [`Member::number`]; those whose number is another's by now have keys below [`OUSTED`].
    pub(super) by_fd: ByFd,
    /// These keys, and how many there have been.
    ousted: Vec<i32>,
    oustings: i32,
    /// Descriptors that the kernel has with the same `epoll_data`: its reports name only that.
    by_data: Names,
    pub(super) hot: Vec<i32>,
    /// The last look at them found as many as it could take.
    pub(super) is_crowded: bool,
    /// Registrations whose connections have memory to give back, and when they are to be looked at.
    grown: VecDeque<(Instant, i32)>,
    /// What is no member yet, by its descriptor.
    pub(super) early: HashMap<i32, Early, BuildHasherDefault<Number>>,
    pub(super) strangers: Strangers,
    /// Those two by their `epoll_data`.
    pub(super) others: Names,
    pub(super) graves: Graves,
}

/// A registration of a TCP socket that has not connected, or of a connection that is young. The kernel has it as it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Early {
    pub(super) events: u32,
    pub(super) data: u64,
    /// Of the young connection; 0 for a socket.
    pub(super) generation: u32,
}

/// No descriptor, nor is what is less.
const OUSTED: i32 = -2;

/// One in [`Set::sleepers`].
pub(super) const SLEEPING: u64 = 1;
/// One that rests, in both halves.
const RESTING: u64 = 1 << 32 | SLEEPING;

/// How long a registration is cold before its connection gives memory back: to free pages, and to get them again for the next
/// bytes, takes longer than to copy as much.
const KEEP: Duration = Duration::from_secs(1);
/// Connections that give back before one sleep, at most: each may take a millisecond.
const TRIMMED_AT_ONCE: usize = 2;

thread_local! {
    /// Whether this thread has one of this module's locks, or is about to get or to have given back one: a signal handler must not wait for it.
    static HOLDS: Cell<bool> = const { Cell::new(false) };
}

/// The right to take locks of this module: got before the first one, and given back after the last.
#[derive(Debug)]
struct Holder(PhantomData<*const ()>);

impl Holder {
    /// `None` in a signal handler that has interrupted one.
    fn begin() -> Option<Self> {
        if HOLDS.replace(true) {
            return None;
        }
        compiler_fence(Ordering::SeqCst);
        Some(Self(PhantomData))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        compiler_fence(Ordering::SeqCst);
        HOLDS.set(false);
    }
}

/// The lock of one set.
#[derive(Debug)]
pub(super) struct Guard {
    set: &'static Set,
    members: MutexGuard<'static, Members>,
    /// Dropped last.
    _holder: Holder,
}

impl std::ops::Deref for Guard {
    type Target = Members;
    fn deref(&self) -> &Members {
        &self.members
    }
}

impl std::ops::DerefMut for Guard {
    fn deref_mut(&mut self) -> &mut Members {
        &mut self.members
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.set.is_vacant.store(self.by_fd.is_empty() && self.early.is_empty(), Ordering::Relaxed);
        self.set.takes_turn();
    }
}

static SETS: Mutex<Vec<&'static Set>> = Mutex::new(Vec::new());
static FREE: Mutex<Vec<&'static Set>> = Mutex::new(Vec::new());

/// Where a slot is registered: nearly always once.
pub(super) type Places = SmallVec<[(&'static Set, i32); 1]>;
type Memberships = HashMap<usize, Places, BuildHasherDefault<Number>>;

/// The registrations of each slot, by its address.
static MEMBERSHIPS: Mutex<Option<Memberships>> = Mutex::new(None);

fn key(slot: &'static Slot) -> usize {
    std::ptr::from_ref(slot).addr()
}

/// Notes that `slot` is registered in `set` as `fd`.
pub(super) fn join(slot: &'static Slot, set: &'static Set, fd: i32) {
    if let Ok(mut all) = MEMBERSHIPS.lock() {
        all.get_or_insert_default().entry(key(slot)).or_default().push((set, fd));
    }
}

fn leave(slot: &'static Slot, set: &'static Set, fd: i32) {
    let Ok(mut all) = MEMBERSHIPS.lock() else { return };
    let Some(all) = all.as_mut() else { return };
    if let Some(list) = all.get_mut(&key(slot)) {
        if let Some(at) = list.iter().position(|&(known, as_fd)| std::ptr::eq(known, set) && as_fd == fd) {
            list.swap_remove(at);
        }
        if list.is_empty() {
            all.remove(&key(slot));
        }
    }
}

/// Every set that this process has had. `None` if a signal handler has interrupted this thread in between.
pub(super) fn all() -> Option<Vec<&'static Set>> {
    let _holder = Holder::begin()?;
    let sets = SETS.lock().ok()?;
    Some(sets.clone())
}

/// The registrations of `slot`. `None` if a signal handler has interrupted this thread in between.
pub(super) fn memberships(slot: &'static Slot) -> Option<Places> {
    let _holder = Holder::begin()?;
    let all = MEMBERSHIPS.lock().ok()?;
    Some(all.as_ref().and_then(|all| all.get(&key(slot)).cloned()).unwrap_or_default())
}

impl Set {
    /// A set for the descriptor `epfd`; `opaque` if the program has not just made it. `None` if a signal handler has interrupted this thread
    /// in between.
    pub(crate) fn create(epfd: i32, opaque: bool) -> Option<&'static Self> {
        let _holder = Holder::begin()?;
        if let Some(set) = FREE.lock().ok().and_then(|mut free| free.pop()) {
            set.epfd.store(epfd, Ordering::Relaxed);
            set.opaque.store(opaque, Ordering::Relaxed);
            set.descriptors.store(1, Ordering::SeqCst);
            set.nested.store(false, Ordering::SeqCst);
            set.awaited.store(false, Ordering::Relaxed);
            set.one_shots.store(false, Ordering::SeqCst);
            return Some(set);
        }
        let set: &'static Self = Box::leak(Box::new(Self {
            members: Mutex::new(Members::default()),
            epfd: AtomicI32::new(epfd),
            descriptors: AtomicU32::new(1),
            life: AtomicU32::new(0),
            one_shots: AtomicBool::new(false),
            opaque: AtomicBool::new(opaque),
            active: AtomicU32::new(0),
            nested: AtomicBool::new(false),
            awaited: AtomicBool::new(false),
            sleepers: AtomicU64::new(0),
            is_vacant: AtomicBool::new(true),
            turns: AtomicU32::new(0),
            answers: AtomicU32::new(0),
            asked_at: AtomicU64::new(0),
            rounds: AtomicU32::new(1),
            looked_at: AtomicUsize::new(0),
            patience: Patience::new(),
        }));
        if let Ok(mut sets) = SETS.lock() {
            sets.push(set);
        }
        Some(set)
    }

    /// The set's lock; `None` in a signal handler that interrupted its holder.
    pub(super) fn lock(&'static self) -> Option<Guard> {
        let holder = Holder::begin()?;
        let members = self.members.lock().ok()?;
        // Before what it does can be seen: whoever gets a report of the kernel's on that finds the count changed.
        self.takes_turn();
        Some(Guard { set: self, members, _holder: holder })
    }

    /// The lock has been taken, or is given back: by its holder alone.
    fn takes_turn(&self) {
        self.turns.store(self.turns.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }

    /// A thread is about to ask the kernel for reports. Always followed by [`Self::looked`].
    pub(super) fn looks(&'static self) -> Option<u64> {
        self.lock().map(|mut members| members.graves.begin())
    }

    /// The thread has sorted out what the kernel reported.
    pub(super) fn looked(&'static self, look: Option<u64>) {
        if let Some(look) = look
            && let Some(mut members) = self.lock()
        {
            members.graves.end(look, self.has_resting());
        }
    }

    /// As [`Self::looks`], of a thread that may sleep, and is counted, in a set of which nothing has left TCP. `None` if something
    /// has by now, which may be hot, and then rings for nobody. Else always followed by [`Self::woke`].
    pub(super) fn begins_to_sleep(&'static self) -> Option<Option<u64>> {
        let members = self.lock();
        if members.is_some() && self.active.load(Ordering::SeqCst) > 0 {
            return None;
        }
        self.sleepers.fetch_add(SLEEPING, Ordering::SeqCst);
        Some(members.map(|mut members| members.graves.begin()))
    }

    /// The thread has slept, and may have a report. True if that is the program's as it is, because nothing in the set is
    /// ours; else it has to be sorted out, and [`Self::looked`] called with the number.
    pub(super) fn woke(&'static self, look: Option<u64>) -> (Option<u64>, bool) {
        let members = self.lock();
        self.sleepers.fetch_sub(SLEEPING, Ordering::SeqCst);
        let plain = self.active.load(Ordering::SeqCst) == 0 && !self.one_shots.load(Ordering::SeqCst);
        match (members, look) {
            (Some(mut members), Some(look)) if plain => {
                members.graves.end(look, self.has_resting());
                (None, true)
            }
            _ => (look, plain),
        }
    }

    /// As [`Self::begins_to_sleep`], but without the lock, if nothing is registered that is ours. Always followed by [`Self::is_undisturbed`]
    /// with what it returns, and [`Self::rises`].
    ///
    /// What leaves TCP, or is registered having done so, is counted in `active` before it is looked whether anybody sleeps; here it is
    /// the other way round. So either this thread sees it, or it is armed for this thread.
    pub(super) fn rest(&'static self) -> Option<u32> {
        if !self.is_vacant.load(Ordering::Acquire) {
            return None;
        }
        self.sleepers.fetch_add(RESTING, Ordering::SeqCst);
        let turns = self.turns.load(Ordering::SeqCst);
        let is_free = turns.is_multiple_of(2);
        if is_free && self.active.load(Ordering::SeqCst) == 0 && self.is_vacant.load(Ordering::SeqCst) {
            return Some(turns);
        }
        self.rises();
        None
    }

    /// Whether the report that a thread may have that [`Self::rest`]ed is the program's as it is, because nobody has registered anything
    /// meanwhile.
    pub(super) fn is_undisturbed(&self, turns: u32) -> bool {
        self.turns.load(Ordering::SeqCst) == turns
    }

    /// The thread that [`Self::rest`]ed has sorted out what the kernel reported.
    pub(super) fn rises(&self) {
        self.sleepers.fetch_sub(RESTING, Ordering::SeqCst);
    }

    /// Whether some thread [`Self::rest`]s: nobody knows since when.
    fn has_resting(&self) -> bool {
        self.sleepers.load(Ordering::SeqCst) >> 32 != 0
    }

    /// Something is in it, from now on, of which nothing is known.
    pub(super) fn becomes_opaque(&self) {
        self.opaque.store(true, Ordering::Relaxed);
    }

    /// Whether something may be in it of which nothing is known.
    pub(super) fn is_opaque(&self) -> bool {
        self.opaque.load(Ordering::Relaxed)
    }

    /// The program has one more descriptor for the set.
    pub(crate) fn descriptor_added(&self) {
        self.descriptors.fetch_add(1, Ordering::SeqCst);
    }

    /// That one is `fd`.
    pub(crate) fn is_known_as(&'static self, fd: i32) {
        let Some(mut members) = self.lock() else { return };
        if self.epfd.compare_exchange(-1, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            let fds: Vec<i32> = members.by_fd.keys().copied().collect();
            for fd in fds {
                members.sync(self, fd);
            }
        }
    }

    /// The program has one descriptor less: `fd`, which nobody finds in the table any more, and which is not closed yet.
    pub(crate) fn descriptor_closed(&'static self, fd: i32) {
        if self.descriptors.fetch_sub(1, Ordering::SeqCst) != 1 {
            // Under the lock: then nobody is about to tell the kernel by this number.
            let _members = self.lock();
            if self.epfd.load(Ordering::Relaxed) == fd {
                self.epfd.store(table::descriptor_of_set(self).unwrap_or(-1), Ordering::Relaxed);
            }
            return;
        }
        self.life.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // The kernel takes it out of the set around it and the ear.
            chime::rouse();
        }
        let Some(mut members) = self.lock() else { return };
        let fds: Vec<i32> = members.by_fd.keys().copied().collect();
        for fd in fds {
            members.remove(self, fd);
        }
        members.early.clear();
        members.strangers.clear();
        members.others.clear();
        members.grown.clear();
        drop(members);
        if let Ok(mut free) = FREE.lock() {
            free.push(self);
        }
    }

    /// The program waits on it by a hook, for the first time.
    #[cold]
    pub(super) fn begin_to_wait(&'static self) {
        self.awaited.store(true, Ordering::Relaxed);
        let Some(members) = self.lock() else { return };
        for member in members.by_fd.values() {
            member.slot.note_wait(member.connection());
        }
    }

    /// Whether the hooks see how the program waits for what is registered.
    pub(super) fn is_awaited(&self) -> bool {
        self.awaited.load(Ordering::Relaxed) || self.nested.load(Ordering::SeqCst)
    }

    /// Whether registrations may be hot: nobody looks at this set but threads that are awake.
    pub(super) fn is_awake(&self) -> bool {
        self.sleepers.load(Ordering::SeqCst) == 0 && !self.nested.load(Ordering::SeqCst)
    }
}

impl Members {
    /// Turns a hot registration cold. False if there is something to report, and it stays hot.
    pub(super) fn cool(&mut self, fd: i32) -> bool {
        let Some(member) = self.by_fd.get_mut(&fd) else { return true };
        if !member.cool() {
            return false;
        }
        if member.connection().has_grown() {
            let now = Instant::now();
            if member.cooled.replace(now).is_none() {
                self.grown.push_back((now + KEEP, fd));
            }
        }
        true
    }

    /// Gives memory back of connections that have been idle for long.
    pub(super) fn trim(&mut self) {
        if self.grown.is_empty() {
            return;
        }
        let now = Instant::now();
        for _ in 0..TRIMMED_AT_ONCE {
            let Some((_, fd)) = self.grown.pop_front_if(|(due, _)| *due <= now) else { return };
            let Some(member) = self.by_fd.get_mut(&fd) else { continue };
            let Some(cooled) = member.cooled.take().filter(|_| !member.hot) else { continue };
            if cooled + KEEP > now {
                member.cooled = Some(cooled);
                self.grown.push_back((cooled + KEEP, fd));
            } else {
                member.connection().trim();
            }
        }
    }

    /// The key by which `slot` is known that was, or is, known as `fd`: others may have changed that since the caller asked for it.
    pub(super) fn key_of(&self, fd: i32, slot: &'static Slot) -> Option<i32> {
        let is_its = |member: &Member| std::ptr::eq(member.slot, slot);
        if self.by_fd.get(&fd).is_some_and(is_its) {
            return Some(fd);
        }
        self.by_fd.iter().find(|(_, member)| is_its(member)).map(|(&key, _)| key)
    }

    /// From now on `fd`, if it is known, means the connection of `slot`. That of another one, which had this number before, and lives on by
    /// another, stays in the set, as it does in the kernel's (epoll(7)); and if this one has been so before, it is known by its number again.
    pub(super) fn meet(&mut self, set: &'static Set, fd: i32, slot: &'static Slot) {
        if let Some(member) = self.by_fd.get(&fd)
            && !std::ptr::eq(member.slot, slot)
        {
            if member.io == fd || member.connection().is_closed() {
                self.remove(set, fd);
            } else {
                let key = OUSTED - self.oustings;
                self.oustings = (self.oustings + 1) % (i32::MAX / 2);
                self.ousted.push(key);
                self.rename(set, fd, key);
            }
        }
        let is_its = |key: &&i32| {
            self.by_fd.get(*key).is_some_and(|member| member.number == fd && std::ptr::eq(member.slot, slot))
        };
        if let Some(&key) = self.ousted.iter().find(is_its) {
            self.ousted.retain(|&other| other != key);
            self.rename(set, key, fd);
        }
    }

    fn rename(&mut self, set: &'static Set, from: i32, to: i32) {
        let Some(member) = self.by_fd.remove(&from) else { return };
        self.by_data.remove(member.kernel.1, from);
        self.by_data.add(member.kernel.1, to);
        let hot = self.hot.iter_mut();
        let grown = self.grown.iter_mut().map(|(_, fd)| fd);
        for fd in hot.chain(grown).filter(|fd| **fd == from) {
            *fd = to;
        }
        // In this order: who looks for all of a slot's finds one.
        join(member.slot, set, to);
        leave(member.slot, set, from);
        self.by_fd.insert(to, member);
    }

    pub(super) fn insert(&mut self, set: &'static Set, fd: i32, mut member: Member) {
        self.meet(set, fd, member.slot);
        self.remove(set, fd);
        self.remove_stranger(fd);
        self.make_way(set, member.kernel.1);
        join(member.slot, set, fd);
        if !member.active && member.connection().is_active() {
            // Taken out of TCP beside us: who did so may have looked for registrations before this was one.
            member.became_active(None);
        }
        if member.active {
            set.active.fetch_add(1, Ordering::SeqCst);
        }
        if member.events & ONESHOT != 0 {
            set.one_shots.store(true, Ordering::SeqCst);
        }
        self.by_data.add(member.kernel.1, fd);
        self.graves.unbury(member.kernel.1);
        self.by_fd.insert(fd, member);
    }

    /// What had come over TCP when the kernel had no report left in this set, and nobody has one that the program has not got yet. `None` if
    /// that is not so, or nobody asked for edges.
    pub(super) fn has_told(&self, set: &'static Set, fd: i32) -> Option<u64> {
        let member = self.by_fd.get(&fd).filter(|member| !member.active && member.events & ET != 0)?;
        if self.graves.is_looked_for() || set.has_resting() {
            return None;
        }
        // In this order: what comes in between is left to be told of.
        let received = member.received();
        let epfd = set.epfd.load(Ordering::Relaxed);
        (epfd >= 0 && ready_in_kernel(epfd, PollFlags::IN) == 0).then_some(received).flatten()
    }

    /// [`Self::insert`]s the member, unless its connection has been closed meanwhile.
    pub(super) fn take_in(&mut self, set: &'static Set, fd: i32, member: Member) {
        let slot = member.slot;
        self.insert(set, fd, member);
        // Who closes changes the table first, and then looks for members.
        if !table::is_of(fd, slot) {
            self.remove(set, fd);
        }
    }

    pub(super) fn remove(&mut self, set: &'static Set, fd: i32) {
        let Some(mut member) = self.by_fd.remove(&fd) else { return };
        if set.is_awaited() {
            // Programs that add and remove it for each wait may do I/O only in between.
            member.slot.note_wait(member.connection());
        }
        member.disarm();
        if member.active {
            set.active.fetch_sub(1, Ordering::SeqCst);
        }
        self.drop_data(set, member.kernel.1, fd);
        self.hot.retain(|&hot| hot != fd);
        if fd <= OUSTED {
            self.ousted.retain(|&ousted| ousted != fd);
        }
        leave(member.slot, set, fd);
    }

    /// The kernel has changed the registration of a connection that is on TCP.
    pub(super) fn changed(&mut self, set: &'static Set, fd: i32, events: u32, data: u64) {
        let Some(member) = self.by_fd.get_mut(&fd) else { return };
        let before = std::mem::replace(&mut member.kernel, (events, data)).1;
        member.ask(events, data);
        if events & ONESHOT != 0 {
            set.one_shots.store(true, Ordering::SeqCst);
        }
        if before != data {
            self.make_way(set, data);
            self.by_data.add(data, fd);
            self.drop_data(set, before, fd);
        }
        self.graves.unbury(data);
    }

    /// The connection registered as `fd`, if it is, stays on TCP for good: from now on the kernel alone knows of it. False if what the
    /// kernel has is not what the program asked for, because the connection was about to leave TCP.
    pub(super) fn abandon(&mut self, set: &'static Set, fd: i32) -> bool {
        let Some(member) = self.by_fd.get(&fd) else { return true };
        if member.active {
            return false;
        }
        let (events, data) = member.kernel;
        self.remove(set, fd);
        self.add_stranger(set, fd, events, data);
        true
    }

    /// The connection registered as `fd` is the kernel's alone from now on, which gets what the program has asked for.
    pub(super) fn hand_over(&mut self, set: &'static Set, fd: i32) {
        if !self.sync(set, fd) || self.abandon(set, fd) {
            return;
        }
        let Some(member) = self.by_fd.get(&fd) else { return };
        let epfd = set.epfd.load(Ordering::Relaxed);
        let data = member.data;
        let events = if member.spent { ONESHOT } else { member.events };
        if epfd >= 0 {
            let mut event = epoll_event { events, u64: data };
            tell(epfd, libc::EPOLL_CTL_MOD, member, &raw mut event);
        }
        self.remove(set, fd);
        self.add_stranger(set, fd, events, data);
    }

    /// The member `fd` has the name `data` no more: what the kernel reports by it is too late, unless something else has it.
    fn drop_data(&mut self, set: &'static Set, data: u64, fd: i32) {
        self.by_data.remove(data, fd);
        if !self.by_data.has(data) && !self.others.has(data) {
            self.graves.bury(data, set.has_resting());
        }
    }

    /// Something gets the name `data`: what has been taken out by that name in memory alone leaves the kernel, whose reports would be taken
    /// for its own.
    pub(super) fn make_way(&mut self, set: &'static Set, data: u64) {
        let is_deleted = |fd: &i32| self.by_fd.get(fd).is_some_and(|member| member.deleted);
        let deleted: Named = self.by_data.of(data).iter().copied().filter(is_deleted).collect();
        for fd in deleted {
            self.sync(set, fd);
        }
    }

    /// What has been taken out in memory alone leaves the kernel: a child might do so when it is in there again.
    fn tell_deletions(&mut self, set: &'static Set) {
        let is_deleted = |fd: &i32| self.by_fd.get(fd).is_some_and(|member| member.deleted);
        let deleted: Named = self.hot.iter().copied().filter(is_deleted).collect();
        for fd in deleted {
            self.sync(set, fd);
        }
    }

    /// The descriptors that a kernel report with `data` may mean.
    pub(super) fn named(&self, data: u64) -> Named {
        self.by_data.of(data).into()
    }

    /// Of how many by the name `data`, but connections that have left TCP, the kernel has any of `bits` to report, and which.
    pub(super) fn ready_beside(&self, data: u64, bits: u32) -> (usize, u32) {
        let members = self.by_data.of(data).iter().filter_map(|fd| {
            let member = self.by_fd.get(fd).filter(|member| !member.active && !member.spent)?;
            Some((member.io, member.kernel))
        });
        let others = self.others.of(data).iter().flat_map(|&fd| {
            let early = self.early.get(&fd).map(|early| (early.events, early.data));
            early.into_iter().chain(self.strangers.get(fd)).map(move |asked| (fd, asked))
        });
        let ready = members.chain(others).filter(|&(_, (_, of))| of == data).map(|(fd, (events, _))| {
            // It says of what has been closed that it is no descriptor, and that is none of the bits.
            let asked = events & bits | bit::ALWAYS;
            ready_in_kernel(fd, PollFlags::from_bits_retain(asked as u16)) & asked & bits
        });
        ready.filter(|&ready| ready != 0).fold((0, 0), |(count, all), ready| (count + 1, all | ready))
    }

    /// Finds the right state for a member that has changed: hot if only awake threads care, else armed, and
    /// reported by the kernel if it is ready although no bell will say so.
    pub(super) fn settle(&mut self, set: &'static Set, fd: i32) {
        let Some(member) = self.by_fd.get_mut(&fd) else { return };
        if !member.active {
            return;
        }
        if set.nested.load(Ordering::SeqCst) {
            member.connection().watched_for_edges(false);
        }
        if set.is_awake() {
            member.disarm();
            member.kicked = false;
            member.idle_sleeps = 0;
            if !member.hot {
                member.hot = true;
                self.hot.push(fd);
                // Who is alone has no order.
                let new = match self.hot.len() {
                    1 => 1,
                    2 => 0,
                    count => count - 1,
                };
                for member in self.hot[new..].iter().filter_map(|fd| self.by_fd.get(fd)) {
                    member.ask_for_times();
                }
            }
            return;
        }
        if std::mem::take(&mut member.hot) {
            self.hot.retain(|&hot| hot != fd);
        }
        member.arm();
        member.kick(member.due(0) != 0);
        if member.kicked {
            member.slot.kicked.store(true, Ordering::Relaxed);
        }
        self.sync(set, fd);
    }

    /// Tells the kernel what has changed in memory. False if the registration is gone now.
    pub(super) fn sync(&mut self, set: &'static Set, fd: i32) -> bool {
        let Some(member) = self.by_fd.get_mut(&fd) else { return false };
        let epfd = set.epfd.load(Ordering::Relaxed);
        if epfd < 0 {
            // As soon as there is one.
            return true;
        }
        if member.deleted {
            tell(epfd, libc::EPOLL_CTL_DEL, member, std::ptr::null_mut());
            self.remove(set, fd);
            return false;
        }
        let before = member.kernel;
        let nested = set.nested.load(Ordering::SeqCst);
        let wanted = (member.kernel_mask(nested), member.data);
        if member.active && !nested && wanted.0 & ET != 0 {
            member.connection().watched_for_edges(true);
        }
        if wanted != before || std::mem::take(&mut member.is_stale) {
            let mut event = epoll_event { events: wanted.0, u64: wanted.1 };
            tell(epfd, libc::EPOLL_CTL_MOD, member, &raw mut event);
            member.kernel = wanted;
            if before.1 != wanted.1 {
                self.by_data.remove(before.1, fd);
                self.make_way(set, wanted.1);
                self.by_data.add(wanted.1, fd);
            }
        }
        true
    }
}

/// epoll_ctl(2) for `member`; `event` is null, or valid. The kernel finds it only by both, the socket and the number, so if that has
/// been closed, and the connection lives on by another, the socket has this number for so long, if it is free.
fn tell(epfd: i32, operation: i32, member: &Member, event: *mut epoll_event) {
    let (io, number) = (member.io, member.number);
    // SAFETY: the set and the socket are the program's; the event is valid, or the operation takes none.
    let call = || unsafe { real::epoll_ctl(epfd, operation, number, event) };
    if io == number {
        call();
        return;
    }
    let _uninterrupted = Uninterrupted::begin();
    // SAFETY: known not to be closed.
    let socket = unsafe { BorrowedFd::borrow_raw(io) };
    let copy = rustix::io::fcntl_dupfd_cloexec(socket, number).map(Descriptor::from);
    if copy.as_ref().is_ok_and(|copy| copy.as_fd().as_raw_fd() == number) {
        call();
    }
}

/// Every lock of this module, held over a fork.
#[derive(Debug)]
pub(crate) struct Quiet {
    sets: MutexGuard<'static, Vec<&'static Set>>,
    members: Vec<MutexGuard<'static, Members>>,
    _free: MutexGuard<'static, Vec<&'static Set>>,
    _memberships: MutexGuard<'static, Option<Memberships>>,
}

/// Takes every lock of this module, for a fork.
pub(crate) fn quiesce() -> Option<Quiet> {
    if HOLDS.get() {
        return None;
    }
    let sets = SETS.lock().ok()?;
    let mut members: Vec<_> = sets.iter().filter_map(|set| set.members.lock().ok()).collect();
    for (set, members) in sets.iter().zip(&mut members) {
        members.tell_deletions(set);
    }
    Some(Quiet { sets, members, _free: FREE.lock().ok()?, _memberships: MEMBERSHIPS.lock().ok()? })
}

impl Quiet {
    /// In a forked child: no other thread sleeps, and what is armed is the parent's to disarm. Everything
    /// is hot, so that this process's next wait arms for itself.
    pub(crate) fn forked(&mut self) {
        for (set, members) in self.sets.iter().zip(&mut self.members) {
            set.sleepers.store(0, Ordering::SeqCst);
            // It is the parent's as well, whose changes are not seen here.
            set.becomes_opaque();
            let Members { by_fd, hot, .. } = &mut **members;
            for member in by_fd.values_mut() {
                member.inherited = true;
            }
            for (&fd, member) in by_fd.iter_mut().filter(|(_, member)| member.active) {
                member.armed = None;
                if !member.hot {
                    member.hot = true;
                    hot.push(fd);
                }
                member.ask_for_times();
            }
        }
    }
}

//! An epoll set of this process: its locks, its life, and who sleeps on it.

use std::cell::Cell;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering, compiler_fence};
use std::sync::{Mutex, MutexGuard};

use smallvec::SmallVec;
use thallus_transport::chime;
use thallus_transport::spin::Patience;

use super::members::{Members, Number};
use crate::table::{self, Slot};

/// One epoll set. Recycled, never freed.
#[derive(Debug)]
pub(crate) struct Set {
    members: Mutex<Members>,
    /// A descriptor of the set by which the kernel is told; −1 while only one is open that is being made. Changed under the lock.
    pub(super) epfd: AtomicI32,
    descriptors: AtomicU32,
    /// How often it has been given up.
    pub(super) life: AtomicU32,
    /// There are, or were, one-shot registrations.
    pub(super) one_shots: AtomicBool,
    /// The kernel has, or had, the [`kicker`](super::kicker) in it.
    pub(super) has_kicker: AtomicBool,
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
    /// A hot registration asks for room, as the last look at them all has found.
    pub(super) wants_room: AtomicBool,
    /// When the kernel was last asked before memory ([`thallus_transport::arrival::now`]).
    pub(super) asked_at: AtomicU64,
    /// [`returns`](thallus_transport::arena::returns) as of the last look for such among the hot registrations.
    pub(super) returns: AtomicU32,
    /// Numbers the looks at memory: each reports a registration once.
    pub(super) rounds: AtomicU32,
    /// Where among the hot registrations the next short look begins.
    pub(super) looked_at: AtomicUsize,
    pub(super) patience: Patience,
}

/// One in [`Set::sleepers`].
pub(super) const SLEEPING: u64 = 1;
/// One that rests, in both halves.
const RESTING: u64 = 1 << 32 | SLEEPING;

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
        let is_vacant = self.by_fd.is_empty() && self.early.is_empty();
        let has_kicker = self.set.has_kicker.load(Ordering::Relaxed);
        self.set.is_vacant.store(is_vacant && !has_kicker, Ordering::Relaxed);
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

pub(super) fn leave(slot: &'static Slot, set: &'static Set, fd: i32) {
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
            set.has_kicker.store(false, Ordering::SeqCst);
            return Some(set);
        }
        let set: &'static Self = Box::leak(Box::new(Self {
            members: Mutex::new(Members::default()),
            epfd: AtomicI32::new(epfd),
            descriptors: AtomicU32::new(1),
            life: AtomicU32::new(0),
            one_shots: AtomicBool::new(false),
            has_kicker: AtomicBool::new(false),
            opaque: AtomicBool::new(opaque),
            active: AtomicU32::new(0),
            nested: AtomicBool::new(false),
            awaited: AtomicBool::new(false),
            sleepers: AtomicU64::new(0),
            is_vacant: AtomicBool::new(true),
            turns: AtomicU32::new(0),
            answers: AtomicU32::new(0),
            wants_room: AtomicBool::new(false),
            asked_at: AtomicU64::new(0),
            returns: AtomicU32::new(0),
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
        let plain = self.active.load(Ordering::SeqCst) == 0
            && !self.one_shots.load(Ordering::SeqCst)
            && !self.has_kicker.load(Ordering::SeqCst);
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
    pub(super) fn has_resting(&self) -> bool {
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
    /// is hot, so that this process's next wait arms for itself. If the parent was `alone`, who sleeps is this thread, in a call that
    /// a signal handler has interrupted.
    pub(crate) fn forked(&mut self, alone: bool) {
        for (set, members) in self.sets.iter().zip(&mut self.members) {
            if !alone {
                set.sleepers.store(0, Ordering::SeqCst);
                members.graves.forked();
            }
            members.forked();
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

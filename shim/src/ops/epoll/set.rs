//! An epoll set of this process: its registrations, and who sleeps on it.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use libc::epoll_event;
use thallus_transport::spin::Patience;

use super::member::{ET, Member, ONESHOT};
use crate::real;
use crate::table::{self, Slot};

/// One epoll set. Recycled, never freed.
#[derive(Debug)]
pub(crate) struct Set {
    members: Mutex<Members>,
    /// A descriptor of the set.
    pub(super) epfd: AtomicI32,
    descriptors: AtomicU32,
    /// There are, or were, one-shot registrations.
    pub(super) one_shots: AtomicBool,
    /// Registrations that have left TCP.
    pub(super) active: AtomicU32,
    /// The set is waited for from outside: the kernel alone must be able to tell its readiness.
    pub(super) nested: AtomicBool,
    /// The program has waited on it by a hook. If it never does it may wait by system calls of its own.
    pub(super) awaited: AtomicBool,
    /// Threads that sleep in the kernel on this set; changed under the lock.
    pub(super) sleepers: AtomicU32,
    pub(super) rounds: AtomicU32,
    /// Where among the hot registrations the next short look begins.
    pub(super) looked_at: AtomicUsize,
    pub(super) patience: Patience,
}

/// Hashes a descriptor by one multiplication: descriptors are looked up at every turn, and nobody chooses them to
/// collide.
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

    fn write_u64(&mut self, number: u64) {
        // The map takes its bucket from the low bits and a tag from the high ones (2⁶⁴ ÷ the golden ratio).
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

pub(super) type ByFd = HashMap<i32, Member, BuildHasherDefault<Number>>;

#[derive(Debug, Default)]
pub(super) struct Members {
    pub(super) by_fd: ByFd,
    /// Descriptors that the kernel has with the same `epoll_data`: its reports name only that.
    by_data: HashMap<u64, Vec<i32>>,
    pub(super) hot: Vec<i32>,
    /// Registrations whose connections have memory to give back, and when they are to be looked at.
    grown: VecDeque<(Instant, i32)>,
    /// What is no member yet, by its descriptor.
    pub(super) early: HashMap<i32, Early, BuildHasherDefault<Number>>,
    graves: Graves,
}

/// A registration of a TCP socket that has not connected, or of a connection that is young. The kernel has it as it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Early {
    pub(super) events: u32,
    pub(super) data: u64,
    /// Of the young connection; 0 for a socket.
    pub(super) generation: u32,
}

/// How long a registration is cold before its connection gives memory back: to free pages, and to get them again for the next
/// bytes, takes longer than to copy as much.
const KEEP: Duration = Duration::from_secs(1);
/// Connections that give back before one sleep, at most: each may take a millisecond.
const TRIMMED_AT_ONCE: usize = 2;

/// Registrations that were removed while some thread may have had the kernel's report on them already. A one-shot
/// registration is reported to one thread only, which may close the connection, and free what its `epoll_data` names,
/// before the other one gets to see its report.
#[derive(Debug, Default)]
struct Graves {
    clock: u64,
    /// When each of the threads asked the kernel that have not sorted out its answer yet.
    lookers: Vec<u64>,
    /// The `epoll_data` of what was removed since, and when.
    buried: HashMap<u64, u64>,
}

impl Graves {
    fn begin(&mut self) -> u64 {
        self.clock += 1;
        self.lookers.push(self.clock);
        self.clock
    }

    fn end(&mut self, look: u64) {
        self.lookers.retain(|&other| other != look);
        if self.buried.is_empty() {
            return;
        }
        match self.lookers.iter().min() {
            Some(&oldest) => self.buried.retain(|_, &mut when| when >= oldest),
            None => self.buried.clear(),
        }
    }

    fn bury(&mut self, data: u64) {
        if !self.lookers.is_empty() {
            self.buried.insert(data, self.clock);
        }
    }
}

thread_local! {
    /// Whether this thread holds some set's lock: a signal handler must not wait for it.
    static HOLDS: Cell<bool> = const { Cell::new(false) };
}

/// The lock of one set.
#[derive(Debug)]
pub(super) struct Guard(MutexGuard<'static, Members>);

impl std::ops::Deref for Guard {
    type Target = Members;
    fn deref(&self) -> &Members {
        &self.0
    }
}

impl std::ops::DerefMut for Guard {
    fn deref_mut(&mut self) -> &mut Members {
        &mut self.0
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        HOLDS.set(false);
    }
}

static SETS: Mutex<Vec<&'static Set>> = Mutex::new(Vec::new());
static FREE: Mutex<Vec<&'static Set>> = Mutex::new(Vec::new());
type Memberships = HashMap<usize, Vec<(&'static Set, i32)>>;

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
    if HOLDS.get() {
        return None;
    }
    Some(SETS.lock().ok()?.clone())
}

/// The registrations of `slot`. `None` if a signal handler has interrupted this thread in between.
pub(super) fn memberships(slot: &'static Slot) -> Option<Vec<(&'static Set, i32)>> {
    if HOLDS.get() {
        return None;
    }
    let all = MEMBERSHIPS.lock().ok()?;
    Some(all.as_ref().and_then(|all| all.get(&key(slot)).cloned()).unwrap_or_default())
}

impl Set {
    /// A set for the descriptor `epfd`.
    pub(crate) fn create(epfd: i32) -> &'static Self {
        if let Some(set) = FREE.lock().ok().and_then(|mut free| free.pop()) {
            set.epfd.store(epfd, Ordering::Relaxed);
            set.descriptors.store(1, Ordering::SeqCst);
            set.nested.store(false, Ordering::SeqCst);
            set.awaited.store(false, Ordering::Relaxed);
            set.one_shots.store(false, Ordering::SeqCst);
            return set;
        }
        let set: &'static Self = Box::leak(Box::new(Self {
            members: Mutex::new(Members::default()),
            epfd: AtomicI32::new(epfd),
            descriptors: AtomicU32::new(1),
            one_shots: AtomicBool::new(false),
            active: AtomicU32::new(0),
            nested: AtomicBool::new(false),
            awaited: AtomicBool::new(false),
            sleepers: AtomicU32::new(0),
            rounds: AtomicU32::new(1),
            looked_at: AtomicUsize::new(0),
            patience: Patience::new(),
        }));
        if let Ok(mut sets) = SETS.lock() {
            sets.push(set);
        }
        set
    }

    /// The set's lock; `None` in a signal handler that interrupted its holder.
    pub(super) fn lock(&'static self) -> Option<Guard> {
        if HOLDS.get() {
            return None;
        }
        let guard = self.members.lock().ok()?;
        HOLDS.set(true);
        Some(Guard(guard))
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
            members.graves.end(look);
        }
    }

    /// As [`Self::looks`], of a thread that may sleep, and is counted, in a set of which nothing has left TCP. `None` if something
    /// has by now, which may be hot, and then rings for nobody. Else always followed by [`Self::woke`].
    pub(super) fn begins_to_sleep(&'static self) -> Option<Option<u64>> {
        let members = self.lock();
        if members.is_some() && self.active.load(Ordering::SeqCst) > 0 {
            return None;
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        Some(members.map(|mut members| members.graves.begin()))
    }

    /// The thread has slept, and may have a report. True if that is the program's as it is, because nothing in the set is
    /// ours; else it has to be sorted out, and [`Self::looked`] called with the number.
    pub(super) fn woke(&'static self, look: Option<u64>) -> (Option<u64>, bool) {
        let members = self.lock();
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        let plain = self.active.load(Ordering::SeqCst) == 0 && !self.one_shots.load(Ordering::SeqCst);
        match (members, look) {
            (Some(mut members), Some(look)) if plain => {
                members.graves.end(look);
                (None, true)
            }
            _ => (look, plain),
        }
    }

    /// The program registers another descriptor with `data`.
    pub(super) fn names(&'static self, data: u64) {
        if let Some(mut members) = self.lock() {
            members.unbury(data);
        }
    }

    /// The program has one more descriptor for the set.
    pub(crate) fn descriptor_added(&self) {
        self.descriptors.fetch_add(1, Ordering::SeqCst);
    }

    /// The program has one descriptor less.
    pub(crate) fn descriptor_closed(&'static self) {
        if self.descriptors.fetch_sub(1, Ordering::SeqCst) != 1 {
            return;
        }
        let Some(mut members) = self.lock() else { return };
        let fds: Vec<i32> = members.by_fd.keys().copied().collect();
        for fd in fds {
            members.remove(self, fd);
        }
        members.early.clear();
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

    pub(super) fn insert(&mut self, set: &'static Set, fd: i32, member: Member) {
        self.remove(set, fd);
        join(member.slot, set, fd);
        if member.active {
            set.active.fetch_add(1, Ordering::SeqCst);
        }
        if member.events & ONESHOT != 0 {
            set.one_shots.store(true, Ordering::SeqCst);
        }
        self.by_data.entry(member.kernel.1).or_default().push(fd);
        self.unbury(member.kernel.1);
        self.by_fd.insert(fd, member);
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

    /// Whether a report with `data` is on a registration that is no more.
    pub(super) fn is_buried(&self, data: u64) -> bool {
        self.graves.buried.contains_key(&data)
    }

    /// A report with `data` may be on something else from now on.
    pub(super) fn unbury(&mut self, data: u64) {
        if !self.graves.buried.is_empty() {
            self.graves.buried.remove(&data);
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
        self.drop_data(member.kernel.1, fd);
        self.graves.bury(member.kernel.1);
        self.hot.retain(|&hot| hot != fd);
        leave(member.slot, set, fd);
    }

    fn drop_data(&mut self, data: u64, fd: i32) {
        if let Some(fds) = self.by_data.get_mut(&data) {
            fds.retain(|&known| known != fd);
            if fds.is_empty() {
                self.by_data.remove(&data);
            }
        }
    }

    /// The descriptors that a kernel report with `data` may mean.
    pub(super) fn named(&self, data: u64) -> Vec<i32> {
        self.by_data.get(&data).cloned().unwrap_or_default()
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
            }
            return;
        }
        if std::mem::take(&mut member.hot) {
            self.hot.retain(|&hot| hot != fd);
        }
        member.arm();
        member.kicked = member.due(0) != 0;
        if member.kicked {
            member.slot.kicked.store(true, Ordering::Relaxed);
        }
        self.sync(set, fd);
    }

    /// Tells the kernel what has changed in memory. False if the registration is gone now.
    pub(super) fn sync(&mut self, set: &'static Set, fd: i32) -> bool {
        let Some(member) = self.by_fd.get_mut(&fd) else { return false };
        let epfd = set.epfd.load(Ordering::Relaxed);
        if member.deleted {
            // SAFETY: deletion takes no event.
            unsafe { real::epoll_ctl(epfd, libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
            self.remove(set, fd);
            return false;
        }
        let before = member.kernel;
        let nested = set.nested.load(Ordering::SeqCst);
        let wanted = (member.kernel_mask(nested), member.data);
        if member.active && !nested && wanted.0 & ET != 0 {
            member.connection().watched_for_edges(true);
        }
        if wanted != before {
            let mut event = epoll_event { events: wanted.0, u64: wanted.1 };
            // SAFETY: a valid event; the set and the socket are the program's.
            unsafe { real::epoll_ctl(epfd, libc::EPOLL_CTL_MOD, fd, &raw mut event) };
            member.kernel = wanted;
            if before.1 != wanted.1 {
                self.drop_data(before.1, fd);
                self.by_data.entry(wanted.1).or_default().push(fd);
            }
        }
        true
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
    let members = sets.iter().filter_map(|set| set.members.lock().ok()).collect();
    Some(Quiet { sets, members, _free: FREE.lock().ok()?, _memberships: MEMBERSHIPS.lock().ok()? })
}

impl Quiet {
    /// In a forked child: no other thread sleeps, and what is armed is the parent's to disarm. Everything
    /// is hot, so that this process's next wait arms for itself.
    pub(crate) fn forked(&mut self) {
        for (set, members) in self.sets.iter().zip(&mut self.members) {
            set.sleepers.store(0, Ordering::SeqCst);
            let Members { by_fd, hot, .. } = &mut **members;
            for (&fd, member) in by_fd.iter_mut().filter(|(_, member)| member.active) {
                member.armed = None;
                if !member.hot {
                    member.hot = true;
                    hot.push(fd);
                }
            }
        }
    }
}

//! Which file descriptors are ours: one array load tells that one is not.
//!
//! An entry is a [`Young`] connection, or a tagged pointer to a [`Slot`] (a connection that has done more than a few
//! calls), a [`Listener`] or an epoll set. Slots are
//! recycled, never freed, so that a thread that loaded a pointer which another thread then closed finds a
//! slot all the same: it counts itself in, looks at the entry again, and goes away if it has changed.

mod young;

use std::cell::UnsafeCell;
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use rustix::fd::BorrowedFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use thallus_transport::arena::{Block, Chunk, Role, flag};
use thallus_transport::connection::Connection;
use thallus_transport::reason::Reason;
use thallus_transport::uninterrupted::Uninterrupted;
use thallus_transport::{process, rendezvous, tcp};

use self::young::Visit;
pub(crate) use self::young::Young;
use crate::ops::epoll::Set;
use crate::{config, errno, log, ops, stats};

/// Descriptors from here on are never ours; Linux allows so many by default (`fs.nr_open`).
const LIMIT: usize = 1 << 20;

static TABLE: [AtomicUsize; LIMIT] = [const { AtomicUsize::new(0) }; LIMIT];
/// One more than the highest descriptor that ever had an entry.
static HIGHEST: AtomicUsize = AtomicUsize::new(0);

const TAG: usize = 3;
const LISTENER: usize = 1;
const EPOLL: usize = 2;
const YOUNG: usize = 3;
/// A TCP socket, unconnected: no young connection's entry, whose generation is never 0.
const SOCKET: usize = YOUNG;

const USER: u64 = 1;
const FD: u64 = 1 << 32;

/// A place for one connection of this process, used again and again.
pub(crate) struct Slot {
    /// Threads inside a call on the connection, a [`USER`] each, and this process's descriptors for it, an [`FD`] each:
    /// one word, so that exactly one thread finds that it was the last.
    holds: AtomicU64,
    /// Odd while there is a connection; one more each time that it begins or ends.
    life: AtomicU32,
    /// Some epoll set makes the kernel report this connection, because it is ready in memory.
    pub(crate) kicked: AtomicBool,
    /// Whether this process did I/O on it: if not, it is not in its statistics.
    used: AtomicBool,
    /// Nobody else has the connection: its block is free once the last call has left.
    last: AtomicBool,
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

/// A listening socket, or one that turned out not to be TCP.
#[derive(Debug)]
pub(crate) struct Listener {
    /// The port, if it is TCP.
    port: Option<u16>,
    hint: Mutex<Option<OwnedFd>>,
    fds: AtomicU32,
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
            return true;
        }
        if !self.slot.used.load(Ordering::Relaxed) {
            self.slot.used.store(true, Ordering::Relaxed);
            connection.block.owner_pid.store(process::id(), Ordering::Relaxed);
            connection.block.owner_fd.store(fd.cast_unsigned(), Ordering::Relaxed);
        }
        if connection.block.state() == thallus_transport::arena::State::Pinned {
            return false;
        }
        errno::keep(|| {
            connection.approach(fd, || self.slot.holds.load(Ordering::SeqCst) % FD == USER);
            if connection.is_active() {
                log::info!("fd {fd}: shared memory");
                ops::epoll::became_active(self.slot);
            }
        });
        connection.is_active()
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.slot.leave();
    }
}

impl Slot {
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

    /// Counts the caller in, which must [`Self::leave`]. `None` if nothing is open here.
    fn count_in(&self) -> Option<&'static Connection> {
        let held = self.holds.fetch_add(USER, Ordering::SeqCst);
        let open = is_alive(self.life.load(Ordering::SeqCst)) && held >= FD;
        // SAFETY: alive after this thread had counted itself in.
        open.then(|| unsafe { self.connection() })
    }

    fn leave(&'static self) {
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
        let block = connection.block;
        drop(connection);
        if self.last.load(Ordering::SeqCst) {
            free(block);
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
static CHUNKS: Mutex<Vec<&'static Chunk>> = Mutex::new(Vec::new());

/// What an entry is.
#[derive(Debug)]
enum Entry {
    Young,
    Connection(&'static Slot),
    Listener(&'static Listener),
    Epoll(&'static Set),
}

fn cell(fd: i32) -> Option<&'static AtomicUsize> {
    usize::try_from(fd).ok().and_then(|index| TABLE.get(index))
}

fn decode(word: usize) -> Option<Entry> {
    if word == 0 || word == SOCKET {
        return None;
    }
    let address = word & !TAG;
    Some(match word & TAG {
        // SAFETY: entries are only ever made by `put` from leaked references of the tagged type.
        LISTENER => Entry::Listener(unsafe { &*std::ptr::with_exposed_provenance(address) }),
        // SAFETY: as above.
        EPOLL => Entry::Epoll(unsafe { &*std::ptr::with_exposed_provenance(address) }),
        YOUNG => Entry::Young,
        // SAFETY: as above.
        _ => Entry::Connection(unsafe { &*std::ptr::with_exposed_provenance(address) }),
    })
}

/// Counts the caller in on the connection behind `fd`; `None` if it is not one. A young one grows up.
pub(crate) fn enter(fd: i32) -> Option<Call> {
    let cell = cell(fd)?;
    loop {
        let word = cell.load(Ordering::Acquire);
        if let Some(young) = Young::of(word) {
            grow_up(fd, young);
            continue;
        }
        return match enter_slot(cell, word) {
            Entering::Moved => continue,
            Entering::Inside(call) => Some(call),
            Entering::Nothing => None,
        };
    }
}

/// As [`enter`], but a young connection stays so; `None` for it, too.
pub(crate) fn enter_adult(fd: i32) -> Option<Call> {
    let cell = cell(fd)?;
    loop {
        match enter_slot(cell, cell.load(Ordering::Acquire)) {
            Entering::Moved => {}
            Entering::Inside(call) => return Some(call),
            Entering::Nothing => return None,
        }
    }
}

/// Who does I/O on a connection.
#[derive(Debug)]
pub(crate) enum Guest {
    /// A call on a young connection: the kernel does all of it, and the visit counts.
    Visit(Visit),
    /// A call on any other.
    Call(Call),
}

/// Counts the caller in for I/O on the connection behind `fd`; `None` if it is not one. A young one grows up if it
/// has done enough.
pub(crate) fn enter_for_io(fd: i32) -> Option<Guest> {
    let cell = cell(fd)?;
    let mut word = cell.load(Ordering::Acquire);
    loop {
        if let Some(young) = Young::of(word) {
            match Visit::begin(fd, cell, young) {
                Ok(visit) => return Some(Guest::Visit(visit)),
                Err(Some(now)) => word = now,
                Err(None) => {
                    grow_up(fd, young);
                    word = cell.load(Ordering::Acquire);
                }
            }
            continue;
        }
        match enter_slot(cell, word) {
            Entering::Moved => word = cell.load(Ordering::Acquire),
            Entering::Inside(call) => return Some(Guest::Call(call)),
            Entering::Nothing => return None,
        }
    }
}

enum Entering {
    /// The entry has changed.
    Moved,
    Inside(Call),
    /// It is no slot.
    Nothing,
}

#[inline]
fn enter_slot(cell: &AtomicUsize, word: usize) -> Entering {
    if word == 0 || word & TAG != 0 {
        return Entering::Nothing;
    }
    let Some(Entry::Connection(slot)) = decode(word) else { return Entering::Nothing };
    slot.holds.fetch_add(USER, Ordering::SeqCst);
    if cell.load(Ordering::SeqCst) == word {
        return Entering::Inside(Call { slot });
    }
    slot.leave();
    Entering::Moved
}

/// Gives a young connection a slot and a block. Without memory for them it is forgotten: nobody looks after it any
/// more, and it stays on TCP.
#[cold]
fn grow_up(fd: i32, young: Young) {
    errno::keep(|| {
        let _uninterrupted = Uninterrupted::begin();
        let Some(block) = allocate(young.role(), fd) else {
            if let Some(cell) = cell(fd) {
                let _ = cell.compare_exchange(young.word(), 0, Ordering::SeqCst, Ordering::SeqCst);
            }
            return;
        };
        if young.is_connected() {
            block.raise(flag::CONNECTED);
        }
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        let nonblocking =
            rustix::fs::fcntl_getfl(socket).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK));
        let connection = Connection::new(block, young.port(), nonblocking);
        let slot = take_slot();
        // SAFETY: the slot came from the free list (or is new), so nobody reads its connection.
        unsafe { (*slot.connection.get()).write(connection) };
        slot.used.store(young.is_used(), Ordering::Relaxed);
        slot.last.store(false, Ordering::Relaxed);
        // Counted in here, too. Whoever still looks at the slot's last connection comes and goes.
        slot.holds.fetch_add(FD + USER, Ordering::SeqCst);
        slot.life.fetch_add(1, Ordering::SeqCst);
        block.calls.store(young.calls(), Ordering::Relaxed);
        if !young.becomes(slot, fd) {
            slot.holds.fetch_sub(FD, Ordering::SeqCst);
            slot.last.store(block.release(process::id()), Ordering::SeqCst);
        } else if ops::process::has_io_uring() {
            // Set up meanwhile by a thread that did not see this one.
            // SAFETY: counted in.
            unsafe { slot.connection() }.pin(Reason::IoUring);
        }
        slot.leave();
    });
}

/// Whether `fd` is a TCP connection of ours.
pub(crate) fn is_connection(fd: i32) -> bool {
    cell(fd).is_some_and(|cell| {
        let word = cell.load(Ordering::Relaxed);
        Young::of(word).is_some() || (word != 0 && word & TAG == 0)
    })
}

/// Notes that `fd` is a TCP socket that the program has just made.
pub(crate) fn add_socket(fd: i32) {
    put(fd, SOCKET);
}

/// Notes that `fd` is something new that is none of ours.
pub(crate) fn add_other(fd: i32) {
    if let Some(cell) = cell(fd)
        && cell.load(Ordering::Relaxed) != 0
        && !is_borrowed()
    {
        errno::keep(|| forget(cell.swap(0, Ordering::SeqCst), fd, false));
    }
}

/// Whether `fd` is a TCP socket that has not connected.
pub(crate) fn is_socket(fd: i32) -> bool {
    cell(fd).is_some_and(|cell| cell.load(Ordering::Relaxed) == SOCKET)
}

/// Whether waiting for `fd` concerns this library: a TCP connection or an epoll set.
pub(crate) fn is_awaited(fd: i32) -> bool {
    is_connection(fd) || epoll_set(fd).is_some()
}

/// The epoll set behind `fd`, if connections of ours were ever added to it.
pub(crate) fn epoll_set(fd: i32) -> Option<&'static Set> {
    match decode(cell(fd)?.load(Ordering::Acquire)) {
        Some(Entry::Epoll(set)) => Some(set),
        _ => None,
    }
}

/// Makes `fd` an epoll set that we look after.
pub(crate) fn add_epoll_set(fd: i32) -> Option<&'static Set> {
    let set = Set::create(fd);
    let word = std::ptr::from_ref(set).expose_provenance() | EPOLL;
    put(fd, word).then_some(set)
}

fn put(fd: i32, word: usize) -> bool {
    let Some(cell) = cell(fd).filter(|_| !is_borrowed()) else { return false };
    if HIGHEST.load(Ordering::Relaxed) <= fd as usize {
        HIGHEST.fetch_max(fd as usize + 1, Ordering::SeqCst);
    }
    let stale = cell.swap(word, Ordering::SeqCst);
    // The program closed the last owner of this number in a way that no hook saw.
    forget(stale, fd, false);
    true
}

/// Whether this memory may be another process's: see [`ops::process::is_stranger`].
pub(crate) fn is_borrowed() -> bool {
    ops::process::is_stranger()
}

/// The program is about to close `fd`, or has replaced it.
pub(crate) fn remove(fd: i32) {
    let Some(cell) = cell(fd) else { return };
    if cell.load(Ordering::Relaxed) == 0 || is_borrowed() {
        return;
    }
    let word = cell.swap(0, Ordering::SeqCst);
    errno::keep(|| forget(word, fd, true));
}

/// Notes whether a connection that nobody has seen established, and that carried nothing, ever was.
fn note_connected(block: &Block, fd: i32) {
    if !stats::counts(block) {
        // SAFETY: the caller says that the descriptor still is the socket.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        if tcp::was_connected(socket) {
            block.raise(flag::CONNECTED);
        }
    }
}

/// Calls `visit` for each young connection: its descriptor, and what is known of it.
pub(crate) fn for_each_young(mut visit: impl FnMut(i32, Young)) {
    for fd in descriptors() {
        if let Some(young) = cell(fd).and_then(|cell| Young::of(cell.load(Ordering::SeqCst))) {
            visit(fd, young);
        }
    }
}

/// Whether a young connection is to be counted: a connect that failed is none.
pub(crate) fn counts(young: Young, fd: i32) -> bool {
    // SAFETY: a number; the kernel says whether it is open.
    let socket = || unsafe { BorrowedFd::borrow_raw(fd) };
    young.is_connected() || young.bytes(fd) != (0, 0) || tcp::was_connected(socket())
}

/// The process ends: it lets go of each of its connections, and visits those that nobody else has.
pub(crate) fn let_go_of_all(mut visit: impl FnMut(&'static Block)) {
    for_each(|slot, connection, _| {
        let block = connection.block;
        if !block.release(process::id()) {
            return;
        }
        let word = std::ptr::from_ref(slot).addr();
        let of_slot = |&fd: &i32| cell(fd).is_some_and(|cell| cell.load(Ordering::Relaxed) == word);
        if !stats::counts(block)
            && let Some(fd) = descriptors().find(of_slot)
        {
            note_connected(block, fd);
        }
        visit(block);
    });
}

/// Drops an entry's reference. `open`: the descriptor still is the socket, so its end can be announced.
fn forget(word: usize, fd: i32, open: bool) {
    if word == 0 || word == SOCKET {
        return;
    }
    if let Some(young) = Young::of(word) {
        // Closed unseen, it can't be asked any more.
        if stats::are_wanted() && (open || young.is_connected()) && counts(young, fd) {
            stats::closed_young(young, fd);
        }
        return;
    }
    let _uninterrupted = Uninterrupted::begin();
    match decode(word) {
        None | Some(Entry::Young) => {}
        Some(Entry::Connection(slot)) => {
            // Before the last descriptor goes: whoever leaves after that ends the connection.
            let held = slot.holds.fetch_add(USER, Ordering::SeqCst);
            debug_assert!(held >= FD);
            if slot.holds.fetch_sub(FD, Ordering::SeqCst) / FD != 1 {
                let other = descriptors()
                    .find(|&other| cell(other).is_some_and(|cell| cell.load(Ordering::Relaxed) == word));
                if let Some(other) = other {
                    ops::epoll::renamed(slot, fd, other);
                }
                slot.leave();
                return;
            }
            // SAFETY: counted in, and `fds` was above zero until just now.
            let connection = unsafe { slot.connection() };
            if !ops::epoll::closed(slot) {
                // Some set still knows the slot: counted in for ever, it is never used again.
                slot.holds.fetch_add(USER, Ordering::SeqCst);
            }
            let last = connection.block.release(process::id());
            if last {
                if open {
                    note_connected(connection.block, fd);
                }
                stats::closed(connection.block);
                if open && connection.is_active() {
                    connection.finish(fd, lingers_not(fd));
                }
                slot.last.store(true, Ordering::SeqCst);
            }
            connection.close();
            slot.leave();
        }
        Some(Entry::Listener(listener)) => {
            if listener.fds.fetch_sub(1, Ordering::SeqCst) == 1
                && let Ok(mut hint) = listener.hint.lock()
            {
                *hint = None;
            }
        }
        Some(Entry::Epoll(set)) => set.descriptor_closed(),
    }
}

/// Whether `SO_LINGER` with zero time asks for a reset instead of an orderly end.
fn lingers_not(fd: i32) -> bool {
    // SAFETY: the caller has not closed the descriptor yet.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    rustix::net::sockopt::socket_linger(fd).is_ok_and(|linger| linger == Some(std::time::Duration::ZERO))
}

/// A descriptor that is about to be made, counted already.
#[derive(Debug)]
pub(crate) struct Held {
    word: usize,
}

impl Held {
    /// The kernel has made it, as `new`, or has failed with −1.
    pub(crate) fn settle(self, new: i32) {
        errno::keep(|| {
            if new < 0 || !put(new, self.word) {
                forget(self.word, new, false);
            }
        });
    }
}

/// Counts one more descriptor for what `old` is. `None` if that is nothing of ours, or has just been closed.
pub(crate) fn hold(old: i32) -> Option<Held> {
    if is_borrowed() {
        return None;
    }
    let word = cell(old)?.load(Ordering::Acquire);
    match decode(word)? {
        Entry::Young | Entry::Connection(_) => {
            let call = enter(old)?;
            let more = |held: u64| (held >= FD).then_some(held + FD);
            call.slot.holds.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).ok()?;
            return Some(Held { word: std::ptr::from_ref(call.slot).expose_provenance() });
        }
        Entry::Listener(listener) => {
            listener.fds.fetch_add(1, Ordering::SeqCst);
        }
        Entry::Epoll(set) => set.descriptor_added(),
    }
    Some(Held { word })
}

/// Every descriptor that has an entry now.
pub(crate) fn descriptors() -> impl Iterator<Item = i32> {
    (0..HIGHEST.load(Ordering::SeqCst))
        .filter(|&fd| TABLE[fd].load(Ordering::Relaxed) != 0)
        .map(|fd| fd as i32)
}

/// A connection was made on `fd`, by connect or accept; or is being made, if it is not yet `connected`.
pub(crate) fn track(fd: i32, role: Role, server_port: u16, connected: bool) {
    ops::process::watch_forks();
    if let Some(cell) = cell(fd) {
        // What the number was before, and was closed in a way that no hook saw, goes first: it has the same counters.
        errno::keep(|| forget(cell.swap(0, Ordering::SeqCst), fd, false));
        put(fd, Young::new(fd, role, server_port, connected).word());
    }
}

fn take_slot() -> &'static Slot {
    if let Some(slot) = FREE.lock().ok().and_then(|mut free| free.pop()) {
        return slot;
    }
    let slot: &'static Slot = Box::leak(Box::new(Slot {
        holds: AtomicU64::new(0),
        life: AtomicU32::new(0),
        kicked: AtomicBool::new(false),
        used: AtomicBool::new(false),
        last: AtomicBool::new(false),
        connection: UnsafeCell::new(MaybeUninit::uninit()),
    }));
    if let Ok(mut slots) = SLOTS.lock() {
        slots.push(slot);
    }
    slot
}

fn allocate(role: Role, fd: i32) -> Option<&'static Block> {
    let chunks = CHUNKS.lock().ok()?;
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
    let from = |chunk: &'static Chunk| chunk.allocate(role, process::id(), fd as u32, now_ns);
    if let Some(block) = chunks.iter().find_map(|chunk| from(chunk)) {
        return Some(block);
    }
    if chunks.iter().map(|chunk| chunk.sweep()).sum::<usize>() > 0 {
        return chunks.iter().find_map(|chunk| from(chunk));
    }
    drop(chunks);
    from(add_chunk()?)
}

/// Makes one more chunk. Without the lock: what it closes on the way comes back to this table.
fn add_chunk() -> Option<&'static Chunk> {
    let chunk: &'static Chunk = Box::leak(Box::new(Chunk::create(place).ok()?));
    CHUNKS.lock().ok()?.push(chunk);
    Some(chunk)
}

/// Makes the first chunk, now that there is a connection: later there might not be the descriptor, or the memory.
pub(crate) fn prepare() {
    errno::keep(|| {
        let _uninterrupted = Uninterrupted::begin();
        add_chunk();
    });
}

fn free(block: &'static Block) {
    if let Ok(chunks) = CHUNKS.lock() {
        let _ = chunks.iter().any(|chunk| chunk.free(block));
    }
}

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

/// What a fork must not find locked by a thread that the child does not have.
#[derive(Debug)]
pub(crate) struct Quiet {
    // Unlocked in this order; signals come last.
    /// The epoll sets' locks.
    pub(crate) epoll: Option<ops::epoll::Quiet>,
    slots: MutexGuard<'static, Vec<&'static Slot>>,
    _free: MutexGuard<'static, Vec<&'static Slot>>,
    _chunks: MutexGuard<'static, Vec<&'static Chunk>>,
    _totals: stats::Quiet,
    moved: MutexGuard<'static, Vec<(u32, &'static Slot)>>,
    visited: Visited,
    _uninterrupted: Uninterrupted,
}

/// Slots that [`Quiet::for_each`] has counted itself in on. Leaving may need the very locks, so it comes after them.
#[derive(Debug, Default)]
struct Visited(Vec<&'static Slot>);

impl Drop for Visited {
    fn drop(&mut self) {
        for slot in self.0.drain(..) {
            slot.leave();
        }
    }
}

impl Quiet {
    /// Calls `visit` for each connection that this process has.
    pub(crate) fn for_each(&mut self, mut visit: impl FnMut(&'static Slot, &'static Connection)) {
        for slot in self.slots.iter() {
            self.visited.0.push(slot);
            if let Some(connection) = slot.count_in() {
                visit(slot, connection);
            }
        }
    }

    /// In a forked child: the other threads are gone, and so are their calls.
    pub(crate) fn only_one_thread_left(&mut self) {
        self.visited.0.clear();
        self.moved.clear();
        // Made by a thread that the fork overtook: the parent does not know that this process has it, too.
        for fd in descriptors() {
            if let Some(cell) = cell(fd).filter(|cell| Young::of(cell.load(Ordering::SeqCst)).is_some()) {
                cell.store(0, Ordering::SeqCst);
            }
        }
        for slot in self.slots.iter() {
            slot.holds.fetch_and(!(FD - 1), Ordering::SeqCst);
            slot.used.store(false, Ordering::Relaxed);
        }
    }
}

/// Makes every young connection grow up: only a block has holders.
pub(crate) fn grow_all_up() {
    for_each_young(grow_up);
}

/// Locks the table's lists for a fork. Every connection is grown up by then.
pub(crate) fn quiesce() -> Option<Quiet> {
    let uninterrupted = Uninterrupted::begin();
    grow_all_up();
    let epoll = ops::epoll::quiesce();
    // Before the slots, as `stats::write` does.
    let totals = stats::quiesce()?;
    let moved = young::quiesce()?;
    Some(Quiet {
        epoll,
        moved,
        slots: SLOTS.lock().ok()?,
        _free: FREE.lock().ok()?,
        _chunks: CHUNKS.lock().ok()?,
        _totals: totals,
        visited: Visited::default(),
        _uninterrupted: uninterrupted,
    })
}

/// `fd` listens now. Announces its port, so that clients on this host look for us.
pub(crate) fn listening(fd: i32) {
    if config::enabled() {
        errno::keep(|| listener(fd));
    }
}

/// The listener behind `fd`, made if the program got the socket from elsewhere. `None` if it is not TCP.
pub(crate) fn listener_port(fd: i32) -> Option<u16> {
    match decode(cell(fd)?.load(Ordering::Acquire)) {
        Some(Entry::Listener(listener)) => listener.port,
        _ => errno::keep(|| listener(fd)),
    }
}

fn listener(fd: i32) -> Option<u16> {
    // SAFETY: the program's call on this descriptor has just succeeded.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let port = tcp::is_tcp(borrowed)
        .then(|| rustix::net::getsockname(borrowed).ok())
        .flatten()
        .and_then(|address| std::net::SocketAddr::try_from(address).ok().map(|address| address.port()));
    let settings = thallus_transport::settings::settings();
    let hint = port
        .filter(|&port| settings.shm && settings.selects(port))
        .and_then(|port| rendezvous::announce(port, place).ok().flatten());
    let listener = Box::leak(Box::new(Listener { port, hint: Mutex::new(hint), fds: AtomicU32::new(1) }));
    put(fd, std::ptr::from_ref(listener).expose_provenance() | LISTENER);
    port
}

/// Moves an internal descriptor out of the program's way: above those that it will use, close-on-exec.
pub(crate) fn place(fd: OwnedFd) -> Result<OwnedFd, Errno> {
    let _uninterrupted = Uninterrupted::begin();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(4096);
    let lowest = (limit - limit / 4).min(8192) as i32;
    let high = rustix::io::fcntl_dupfd_cloexec(&fd, lowest)?;
    if let Some((word, bit)) = internal_bit(high.as_raw_fd()) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
    LOWEST_INTERNAL.fetch_min(high.as_raw_fd(), Ordering::Relaxed);
    Ok(high)
}

/// Whether there never was an entry, nor a descriptor of this library's.
pub(crate) fn is_empty() -> bool {
    HIGHEST.load(Ordering::Relaxed) == 0 && LOWEST_INTERNAL.load(Ordering::Relaxed) == i32::MAX
}

/// The highest descriptor that the program has open; −1 if /proc does not tell.
pub(crate) fn highest_of_program() -> i32 {
    let _uninterrupted = Uninterrupted::begin();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(folder) = rustix::fs::open("/proc/self/fd", flags, Mode::empty()) else { return -1 };
    let mut room = [MaybeUninit::uninit(); 4096];
    let mut entries = rustix::fs::RawDir::new(&folder, &mut room);
    let mut highest = -1;
    while let Some(Ok(entry)) = entries.next() {
        let fd = entry.file_name().to_str().ok().and_then(|name| name.parse().ok()).unwrap_or(-1);
        if fd > highest && fd != folder.as_raw_fd() && !is_internal(fd) {
            highest = fd;
        }
    }
    highest
}

/// Most descriptors that the process may have open (`RLIMIT_NOFILE`).
pub(crate) fn most_descriptors() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX)
}

static LOWEST_INTERNAL: AtomicI32 = AtomicI32::new(i32::MAX);

/// One bit a descriptor that was once [`place`]d: nothing tells when it is closed.
static INTERNAL: [AtomicU64; LIMIT / 64] = [const { AtomicU64::new(0) }; LIMIT / 64];

fn internal_bit(fd: i32) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((INTERNAL.get(fd / 64)?, 1 << (fd % 64)))
}

/// Whether `fd` is one of this library's own, which a loop that closes everything must not close.
pub(crate) fn is_internal(fd: i32) -> bool {
    if fd < LOWEST_INTERNAL.load(Ordering::Relaxed) {
        return false;
    }
    let known = internal_bit(fd);
    if let Some((word, bit)) = known
        && word.load(Ordering::Relaxed) & bit == 0
    {
        return false;
    }
    let internal = internal_fds().contains(&fd);
    if let (Some((word, bit)), false) = (known, internal) {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
    internal
}

/// All internal descriptors, ascending.
pub(crate) fn internal_fds() -> Vec<i32> {
    let _uninterrupted = Uninterrupted::begin();
    let mut all = Vec::new();
    if let Ok(chunks) = CHUNKS.lock() {
        all.extend(chunks.iter().filter_map(|chunk| chunk.fd()).map(|fd| fd.as_raw_fd()));
    }
    all.extend(log::internal_fd());
    for_each(|_, connection, _| all.extend(connection.internal_fds().into_iter().flatten()));
    for fd in descriptors() {
        if let Some(Entry::Listener(listener)) =
            cell(fd).and_then(|cell| decode(cell.load(Ordering::Acquire)))
            && let Ok(hint) = listener.hint.lock()
        {
            all.extend(hint.as_ref().map(AsRawFd::as_raw_fd));
        }
    }
    all.sort_unstable();
    all.dedup();
    all
}

const _: () = assert!(align_of::<Slot>() > TAG && align_of::<Listener>() > TAG && align_of::<Set>() > TAG);

//! Memory that the two ends of a connection on one host lend each other, beside the byte stream.
//!
//! Each end has an *area*, from which it allocates, and a table of *loans*. What it lends it names in a [`Handle`], which
//! the application sends to its peer in whatever protocol it speaks. The peer borrows the memory, or copies out of it,
//! and gives it back; then the owner may use it again.
//!
//! ```text
//!  owner     Memory ── lend ──▶ LENT ─ ─ ─ handle ─ ─ ─▶ peer
//!                                │ borrow
//!  FREE ◀── give back ── BORROWED
//! ```
//!
//! The bytes are not part of the stream: nothing waits for a loan, and a peer that keeps one costs its owner memory, up to
//! the area's limit. Either end can write to all of both areas. So the owner believes nothing in the table but its own
//! books; from a loan that comes back too early the peer itself reads rubbish. And what is borrowed can change while it
//! is read, so that only a peer who could anyway do everything to this process is to be borrowed from.

use std::collections::BTreeMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

use rustix::io::Errno;
use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap_anonymous, mremap, munlock, munmap,
};
use rustix::process::{Resource, getrlimit};

use crate::arena::Role;
use crate::buffers::Buffers;
use crate::process;
use crate::settings::settings;
use crate::sparse;

/// Bytes that each end can lend.
pub const AREA_BYTES: usize = 1 << 30;

/// Bytes of one end's table of loans.
pub(crate) const LOANS_BYTES: usize = 16 << 10;

/// Loans of one end at a time.
const LOANS: usize = 1024;

/// Allocations begin at multiples of this, which serves every kind of column and every page.
const PAGE: u64 = 4096;

/// Memory that an area keeps for the next allocation when nothing is lent.
const SPARE: u64 = 32 << 20;

const FREE: u64 = 0;
const LENT: u64 = 1;
const BORROWED: u64 = 2;

/// One end's loans, as its peer sees them.
#[repr(C)]
struct Table {
    /// Whoever first allocates puts its token here: forks of one end can't share an area.
    owner: AtomicU64,
    _pad: [u64; 15],
    /// The number of the loan in the upper half; [`FREE`], [`LENT`] or [`BORROWED`].
    loans: [AtomicU64; LOANS],
}

const _: () = assert!(size_of::<Table>() <= LOANS_BYTES);

fn word(number: u32, state: u64) -> u64 {
    u64::from(number) << 32 | state
}

/// What the peer has to know to find a loan. 32 bytes on the wire, of no use to anyone else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    offset: u64,
    bytes: u64,
    loan: u32,
    number: u32,
}

impl Handle {
    /// As the peer gets it: little-endian offset, bytes, loan and number, and 8 bytes of zero.
    pub fn to_bytes(self) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&self.offset.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.loan.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    /// Reads one that the peer sent. `EINVAL` if it lies outside of every area, or is none.
    pub fn of_bytes(bytes: &[u8; 32]) -> Result<Self, Errno> {
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let handle =
            Self { offset: long(0), bytes: long(8), loan: long(16) as u32, number: (long(16) >> 32) as u32 };
        let end = handle.offset.checked_add(handle.bytes).ok_or(Errno::INVAL)?;
        let possible = end <= AREA_BYTES as u64 && (handle.loan as usize) < LOANS && long(24) == 0;
        if possible { Ok(handle) } else { Err(Errno::INVAL) }
    }

    /// Size of the loan in bytes.
    pub fn bytes(self) -> usize {
        self.bytes as usize
    }
}

/// Both ends' areas, mapped into this process. Unmapped when the last that refers to it is dropped, which may be long
/// after the connection.
pub struct Area {
    /// The client's table, the server's table, the client's area, the server's area.
    base: NonNull<u8>,
    role: Role,
    pid: u32,
    token: u64,
    pool: Mutex<Pool>,
    /// Nothing more will be allocated, so no memory is kept for that.
    closed: AtomicBool,
    /// Of the process that this one was forked from.
    parents: OnceLock<Arc<Self>>,
}

// SAFETY: the mapping is shared memory made of atomics, and of bytes that belong to whoever holds a `Memory` or `Loan`.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl fmt::Debug for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Area").field("base", &self.base).field("role", &self.role).finish_non_exhaustive()
    }
}

const MAPPED_BYTES: usize = 2 * LOANS_BYTES + 2 * AREA_BYTES;

impl Drop for Area {
    fn drop(&mut self) {
        if self.is_this_process() {
            // The peer may have the file for long: it would keep what nobody uses.
            let pool = self.pool.get_mut().unwrap_or_else(PoisonError::into_inner);
            let mut pool = std::mem::take(pool);
            self.collect(&mut pool);
            self.discard(&mut pool, 0);
        }
        // SAFETY: this is the mapping that `map` made, and nobody refers to it any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), MAPPED_BYTES) };
    }
}

impl Area {
    /// Maps the tables at `tables` once more, with the areas behind them, and gives memory to the tables. Fails as mremap(2) and
    /// getrandom(2) do, and by `ENOMEM` without memory.
    ///
    /// # Safety
    /// `tables` is on a page of a shared mapping of a file that goes on behind the tables with both areas, and can't shrink.
    pub(crate) unsafe fn map(tables: NonNull<u8>, role: Role) -> Result<Self, Errno> {
        let mut token = [0; 8];
        rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty())?;
        // Else all of it would be given memory and locked, as the other mapping is: by an mlockall(2) that no hook has seen.
        // SAFETY: this changes nothing that anyone can see in memory.
        let _ = unsafe { munlock(tables.as_ptr().cast(), 2 * LOANS_BYTES) };
        // An old size of 0 leaves the old mapping where it is, and makes another of the same file (mremap(2)). So nobody
        // has to keep a descriptor.
        // SAFETY: the caller's promise; the new mapping is where the kernel likes.
        let base = unsafe { mremap(tables.as_ptr().cast(), 0, MAPPED_BYTES, MremapFlags::MAYMOVE)? };
        let area = Self {
            base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?,
            role,
            pid: process::id(),
            token: u64::from_ne_bytes(token) | 1,
            pool: Mutex::new(Pool {
                last_number: (u64::from_ne_bytes(token) >> 32) as u32,
                ..Pool::default()
            }),
            closed: AtomicBool::new(false),
            parents: OnceLock::new(),
        };
        // Later the lack of it would be SIGBUS.
        // SAFETY: the tables of this mapping.
        unsafe { sparse::populate(area.base, 2 * LOANS_BYTES)? };
        Ok(area)
    }

    /// Drops `parents`, the area that this one replaces, no earlier than this one.
    pub(crate) fn keep(&self, parents: Arc<Self>) {
        let _ = self.parents.set(parents);
    }

    /// Whether this process made it: a fork needs its own.
    pub(crate) fn is_this_process(&self) -> bool {
        self.pid == process::id()
    }

    fn table(&self, of: usize) -> &Table {
        // SAFETY: inside the mapping.
        let table = unsafe { self.base.add(of * LOANS_BYTES) };
        // SAFETY: a Table is all atomics, valid whatever they hold, and on a page of its own.
        unsafe { table.cast().as_ref() }
    }

    /// Where `offset` of an end's area lies.
    fn at(&self, of: usize, offset: u64) -> NonNull<u8> {
        // SAFETY: the caller has checked that the offset is in the area.
        unsafe { self.base.add(2 * LOANS_BYTES + of * AREA_BYTES + offset as usize) }
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ours(&self) -> usize {
        self.role as usize
    }

    fn theirs(&self) -> usize {
        1 - self.role as usize
    }

    /// Allocates `bytes`, which begin on a page. What they hold is undefined, but nobody else's.
    ///
    /// # Errors
    /// `ENOBUFS` if as much is not free within the limit (`THALLUS_LEND`); `EBUSY` in a process whose parent, child or
    /// sibling has allocated on the same connection; `EINVAL` for nothing; `ENOMEM` if the system has none; else as
    /// madvise(2), `MADV_POPULATE_WRITE`.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Memory, Errno> {
        match bytes {
            0 => return Err(Errno::INVAL),
            1..=AREA_BYTES => {}
            _ => return Err(Errno::NOBUFS),
        }
        let owner = &self.table(self.ours()).owner;
        match owner.compare_exchange(0, self.token, Ordering::Relaxed, Ordering::Relaxed) {
            Err(owner) if owner != self.token => return Err(Errno::BUSY),
            _ => {}
        }
        let limit = settings().lend_bytes.min(AREA_BYTES as u64);
        let length = rounded(bytes as u64);
        let mut pool = self.pool();
        self.collect(&mut pool);
        let spare = pool.take_spare(length);
        let (offset, length) = match spare {
            Some(spare) => spare,
            None => (self.find_room(&mut pool, length, limit)?, length),
        };
        pool.taken.insert(offset, Taken { length, loans: Vec::new(), dropped: false });
        drop(pool);
        if spare.is_none() {
            self.populate(offset, length)?;
        }
        Ok(Memory { area: Arc::clone(self), offset, bytes })
    }

    /// A place that has no pages.
    fn find_room(&self, pool: &mut Pool, length: u64, limit: u64) -> Result<u64, Errno> {
        if pool.used() + length > limit {
            return Err(Errno::NOBUFS);
        }
        let gap = pool.gap(length).filter(|_| pool.used() + pool.spare() + length <= limit);
        gap.or_else(|| {
            self.discard(pool, 0);
            pool.gap(length)
        })
        .ok_or(Errno::NOBUFS)
    }

    /// Gives memory to what has just been taken, or unmakes that. Not under the lock: it takes a while.
    fn populate(&self, offset: u64, length: u64) -> Result<(), Errno> {
        // SAFETY: inside the area.
        let populated = unsafe { sparse::populate(self.at(self.ours(), offset), length as usize) };
        if populated.is_err() {
            // A part may have pages.
            let _ = self.advise(offset, length, Advice::LinuxRemove);
            self.pool().taken.remove(&offset);
        }
        populated
    }

    fn advise(&self, offset: u64, length: u64, advice: Advice) -> Result<(), Errno> {
        let start = self.at(self.ours(), offset).as_ptr().cast();
        // SAFETY: whole pages of our own mapping that hold nothing in use.
        unsafe { madvise(start, length as usize, advice) }
    }

    /// Enters what the peer has given back.
    fn collect(&self, pool: &mut Pool) {
        let table = self.table(self.ours());
        let Pool { taken, spares, free_loans, .. } = pool;
        taken.retain(|&offset, taken| {
            taken.loans.retain(|&(loan, number)| {
                let lent = table.loans[loan as usize].load(Ordering::Acquire) != word(number, FREE);
                if !lent {
                    free_loans.push(loan);
                }
                lent
            });
            let kept = !taken.dropped || !taken.loans.is_empty();
            if !kept {
                spares.insert(offset, taken.length);
            }
            kept
        });
        if self.closed.load(Ordering::Relaxed) {
            self.discard(pool, 0);
        } else if pool.taken.is_empty() {
            self.discard(pool, SPARE);
        }
    }

    /// Gives memory back to the system until at most `most` bytes are kept.
    fn discard(&self, pool: &mut Pool, most: u64) {
        let mut spare = pool.spare();
        while spare > most
            && let Some((offset, length)) = pool.spares.pop_last()
        {
            let _ = self.advise(offset, length, Advice::LinuxRemove);
            spare -= length;
        }
    }

    /// Gives what is kept for later back to the system.
    pub fn trim(&self) {
        let mut pool = self.pool();
        self.collect(&mut pool);
        self.discard(&mut pool, 0);
    }

    /// This process has closed the connection: what is kept goes back to the system, and so does what comes back. Does not wait: a
    /// signal handler may close. Who has the lock does the same when it looks next, or [`Drop`] does.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        match self.pool.try_lock() {
            Ok(mut pool) => self.collect(&mut pool),
            Err(TryLockError::Poisoned(pool)) => self.collect(&mut pool.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
    }

    /// Whether this process is the one of its end that allocates.
    pub(crate) fn is_owner(&self) -> bool {
        self.table(self.ours()).owner.load(Ordering::Relaxed) == self.token
    }

    /// Bytes that are allocated or lent, and those that are kept for later, of this end's memory.
    pub fn usage(&self) -> (u64, u64) {
        let mut pool = self.pool();
        self.collect(&mut pool);
        (pool.used(), pool.spare())
    }

    /// Takes a loan of the peer's. Its bytes can be looked at until it is dropped.
    ///
    /// # Errors
    /// `EINVAL` if the peer has not lent this, or it has been taken before.
    pub fn borrow(self: &Arc<Self>, handle: Handle) -> Result<Loan, Errno> {
        let loan = &self.table(self.theirs()).loans[handle.loan as usize];
        let (lent, borrowed) = (word(handle.number, LENT), word(handle.number, BORROWED));
        loan.compare_exchange(lent, borrowed, Ordering::Acquire, Ordering::Relaxed)
            .map_err(|_| Errno::INVAL)?;
        Ok(Loan { area: Arc::clone(self), handle })
    }
}

/// Whether `THALLUS_LEND` leaves room for anything.
pub(crate) fn is_allowed() -> bool {
    settings().lend_bytes >= PAGE
}

/// Whether an [`Area`] could be mapped now, as far as `RLIMIT_AS` goes.
pub(crate) fn fits_address_space() -> bool {
    if getrlimit(Resource::As).current.is_none() {
        return true;
    }
    let (flags, nothing) = (MapFlags::PRIVATE | MapFlags::NORESERVE, ProtFlags::empty());
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
    let place = unsafe { mmap_anonymous(std::ptr::null_mut(), MAPPED_BYTES, nothing, flags) };
    // SAFETY: the mapping was made just now.
    place.is_ok_and(|place| unsafe { munmap(place, MAPPED_BYTES) }.is_ok())
}

/// What an end knows of its own memory.
#[derive(Debug, Default)]
struct Pool {
    /// By offset.
    taken: BTreeMap<u64, Taken>,
    /// Lengths of what has pages, but no use, by offset.
    spares: BTreeMap<u64, u64>,
    /// Loans that have been used and are free again.
    free_loans: Vec<u32>,
    /// Loans that were never used begin here.
    unused_loans: u32,
    /// The number of the last loan. The first is random, so that a handle means nothing on another connection.
    last_number: u32,
}

#[derive(Debug)]
struct Taken {
    length: u64,
    /// Loans, and their numbers, that have not come back.
    loans: Vec<(u32, u32)>,
    /// The [`Memory`] is gone.
    dropped: bool,
}

impl Pool {
    fn used(&self) -> u64 {
        self.taken.values().map(|taken| taken.length).sum()
    }

    fn spare(&self) -> u64 {
        self.spares.values().sum()
    }

    /// The smallest spare of at least `length`, and its own length, unless most of it would be wasted. It stays whole:
    /// pieces would fit nothing.
    fn take_spare(&mut self, length: u64) -> Option<(u64, u64)> {
        let fits = self.spares.iter().filter(|&(_, &spare)| (length..=2 * length).contains(&spare));
        let (&offset, _) = fits.min_by_key(|&(_, &spare)| spare)?;
        self.spares.remove_entry(&offset)
    }

    /// The first place of `length` bytes between what is taken and spare.
    fn gap(&self, length: u64) -> Option<u64> {
        let taken = self.taken.iter().map(|(&offset, taken)| (offset, taken.length));
        let mut used: Vec<_> =
            taken.chain(self.spares.iter().map(|(&offset, &spare)| (offset, spare))).collect();
        used.sort_unstable();
        let mut start = 0;
        for (offset, used) in used {
            if offset - start >= length {
                return Some(start);
            }
            start = offset + used;
        }
        (AREA_BYTES as u64 - start >= length).then_some(start)
    }
}

/// Sizes that differ little become the same, so that they can take each other's place.
fn rounded(bytes: u64) -> u64 {
    let step = (bytes.next_power_of_two() / 8).max(PAGE);
    bytes.next_multiple_of(step)
}

/// Memory of this end, which can be lent any number of times. Dropped, it is free once all loans are back.
#[derive(Debug)]
pub struct Memory {
    area: Arc<Area>,
    offset: u64,
    bytes: usize,
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !self.area.is_this_process() {
            return;
        }
        let mut pool = self.area.pool();
        if let Some(taken) = pool.taken.get_mut(&self.offset) {
            taken.dropped = true;
        }
        self.area.collect(&mut pool);
    }
}

impl Memory {
    /// Where it begins: on a page.
    pub fn address(&self) -> NonNull<u8> {
        self.area.at(self.area.ours(), self.offset)
    }

    /// Its size in bytes, as it was asked for.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Lends `bytes` from `offset` to the peer, once, and shows it what has been written there.
    ///
    /// # Errors
    /// `EINVAL` for what is not inside; `ENOBUFS` if 1,024 loans are out; `EBUSY` in a fork of the process that allocated it.
    pub fn lend(&self, offset: usize, bytes: usize) -> Result<Handle, Errno> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(Errno::INVAL);
        }
        if !self.area.is_this_process() {
            return Err(Errno::BUSY);
        }
        let mut pool = self.area.pool();
        if pool.free_loans.is_empty() && pool.unused_loans as usize == LOANS {
            self.area.collect(&mut pool);
        }
        let loan = match pool.free_loans.pop() {
            Some(loan) => loan,
            None if (pool.unused_loans as usize) < LOANS => {
                pool.unused_loans += 1;
                pool.unused_loans - 1
            }
            None => return Err(Errno::NOBUFS),
        };
        pool.last_number = pool.last_number.wrapping_add(1);
        let number = pool.last_number;
        if let Some(taken) = pool.taken.get_mut(&self.offset) {
            taken.loans.push((loan, number));
        }
        let table = self.area.table(self.area.ours());
        table.loans[loan as usize].store(word(number, LENT), Ordering::Release);
        Ok(Handle { offset: self.offset + offset as u64, bytes: bytes as u64, loan, number })
    }

    /// Loans of it that have not come back.
    pub fn loans(&self) -> usize {
        if !self.area.is_this_process() {
            return 0;
        }
        let mut pool = self.area.pool();
        self.area.collect(&mut pool);
        pool.taken.get(&self.offset).map_or(0, |taken| taken.loans.len())
    }
}

/// Memory of the peer's. It goes back when this is dropped.
#[derive(Debug)]
pub struct Loan {
    area: Arc<Area>,
    handle: Handle,
}

impl Drop for Loan {
    fn drop(&mut self) {
        // In a fork it is a copy; the process that borrowed gives it back.
        if self.area.is_this_process() {
            let loan = &self.area.table(self.area.theirs()).loans[self.handle.loan as usize];
            let (borrowed, free) = (word(self.handle.number, BORROWED), word(self.handle.number, FREE));
            let _ = loan.compare_exchange(borrowed, free, Ordering::Release, Ordering::Relaxed);
        }
    }
}

impl Loan {
    /// Where it begins. The peer can change what is there.
    pub fn address(&self) -> NonNull<u8> {
        self.area.at(self.area.theirs(), self.handle.offset)
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        self.handle.bytes as usize
    }

    /// Copies it to `target`, as much as fits there. Returns the bytes copied.
    pub fn copy_to(&self, target: &mut Buffers<'_>) -> usize {
        let mut done = 0;
        while done < self.bytes() {
            let (piece, length) = target.piece();
            let count = length.min(self.bytes() - done);
            if count == 0 {
                break;
            }
            // SAFETY: done < bytes, and the loan lies in the area.
            let source = unsafe { self.address().add(done) };
            // SAFETY: `count` bytes are left in both; the caller vouches for its buffers.
            unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), piece, count) };
            target.advance(count);
            done += count;
        }
        done
    }
}

#[cfg(test)]
#[path = "lending_tests.rs"]
mod tests;

//! What the forks of one process family share about its connections, and what `thallus status` reads.
//!
//! A server often accepts in one process and serves in another, so a connection's state can't live in
//! private memory. Each family of processes keeps it in *chunks*, memfds mapped `MAP_SHARED` before the
//! first connection; a fork inherits the mapping at the same address. A peer never sees this memory.
//!
//! ```text
//! chunk   0        magic, version, block size, block count
//!         64       bitmap: one bit a block, set while it is in use
//!         4096     block 0 | block 1 | …                          512 bytes each
//!
//! block   0        state, reason, role, flags, holders, owner     read by every call
//!         64       addresses, age                                 written once
//!         128      receive direction: lock, counts                written under its lock
//!         256      send direction: lock, counts                   written under its lock
//! ```
//!
//! A process that dies leaves nothing to repair: every change is published by one store, and a block
//! whose holders are all dead is found by [`Chunk::sweep`].

mod request;

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use rustix::process::{Pid, Resource, getrlimit, test_kill_process};

use crate::lock::Lock;
use crate::reason::Reason;

pub use request::{Generation, Wish};

/// The memfd's name, by which `thallus status` finds a process's chunks in `/proc/PID/fd`.
pub const MEMFD_NAME: &str = "thallus-arena";

const MAGIC: u64 = u64::from_le_bytes(*b"THALLUSa");
const VERSION: u32 = 2;
const BITMAP_WORDS: usize = 128;
const HEADER_BYTES: usize = 4096;

/// Connections that one chunk can hold.
pub const BLOCKS: usize = BITMAP_WORDS * 64;

/// Size of a chunk in bytes. Sparse: an unused block costs no memory.
pub const CHUNK_BYTES: usize = HEADER_BYTES + BLOCKS * size_of::<Block>();

/// A holder that has been promised to a child not yet born.
const UNBORN: u32 = u32::MAX;

/// Stands in the last place for holders that found none free. Nobody counts them, so it stays until the end: the
/// connection is shared for ever.
const OVERFLOW: u32 = u32::MAX - 1;

/// Where a connection stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// All bytes go through TCP; it may still be upgraded.
    Plain = 0,
    /// One thread is deciding; lasts a few instructions.
    Switching = 1,
    /// A segment is mapped; each direction moves over at its next write once both sides are ready.
    Active = 2,
    /// TCP for good, with a [`Reason`].
    Pinned = 3,
}

/// Which end of the TCP connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Role {
    /// The side that called `connect`.
    Client = 0,
    /// The side that called `accept`.
    Server = 1,
}

/// Facts about a connection beyond its [`State`]; bits of [`Block::flags`].
pub mod flag {
    /// This side shut down sending.
    pub const SHUT_WR: u32 = 1;
    /// This side shut down receiving.
    pub const SHUT_RD: u32 = 2;
    /// The kernel reported the end of the peer's TCP stream.
    pub const PEER_GONE: u32 = 4;
    /// The peer reset the connection, or broke the protocol.
    pub const RESET: u32 = 8;
    /// The application has been told of the reset; reads give end of stream from now on.
    pub const RESET_TOLD: u32 = 16;
    /// The segment's `ready` word was seen set: bytes may leave through the ring.
    pub const READY: u32 = 32;
    /// A write did not fit: an edge-triggered waiter is owed an edge once it would.
    pub const NO_SPACE: u32 = 64;
    /// A write after the peer's end was accepted, as the kernel accepts one before the peer's reset comes back.
    pub const VOID: u32 = 256;
    /// It was established: a connect that failed is no connection.
    pub const CONNECTED: u32 = 512;
    /// It left TCP for a queue pair.
    pub const VERBS: u32 = 1024;
    /// It went back to TCP.
    pub const RETURNED: u32 = 2048;
    /// A server's stream whose first bytes are known not to be a HELLO, or no longer one.
    pub const HEARD: u32 = 4096;
    /// The peer's stream has ended, and every byte that it sent over TCP has arrived, read or not.
    pub const ALL_HERE: u32 = 8192;
    /// Back on TCP, bells of the peer's may precede the application's bytes.
    pub const BELLS_FIRST: u32 = 16384;
    /// A process is sending over TCP what was in the ring.
    pub const MOVING: u32 = 32768;
    /// A process died that held one of the locks; the kernel has the last word on what was sent.
    pub const INHERITED: u32 = 65536;
    /// Nobody knows what the bytes on TCP are: none of them is the application's.
    pub const LOST: u32 = 131_072;
}

/// One connection, as the forks of a process share it. Sizes and counts in bytes unless said otherwise.
#[derive(Debug)]
#[repr(C, align(512))]
pub struct Block {
    /// [`State`] and [`Generation`].
    state: AtomicU32,
    reason: AtomicU32,
    role: AtomicU32,
    /// Bits of [`flag`].
    pub flags: AtomicU32,
    holders: [AtomicU32; 4],
    /// The process that last drove the connection, and the file descriptor it used.
    pub owner_pid: AtomicU32,
    /// See [`Self::owner_pid`].
    pub owner_fd: AtomicU32,
    /// I/O calls made while in [`State::Plain`].
    pub calls: AtomicU32,
    /// The [`Generation`] that somebody wants on TCP (`thallus pin`), or 0. Whoever makes the next call on it sees to that.
    unwanted: AtomicU32,
    _pad0: [u32; 4],

    local: AddressCell,
    peer: AddressCell,
    /// `CLOCK_BOOTTIME` at connect or accept, in nanoseconds.
    opened_ns: AtomicU64,
    _pad1: [u64; 1],

    /// Held while bytes are taken from the stream.
    pub recv_lock: Lock,
    /// 1 once every byte that the peer sent over TCP has been taken.
    pub recv_switched: AtomicU32,
    /// Application bytes received over TCP.
    pub tcp_received: AtomicU64,
    side: AtomicU64,
    /// Doorbells taken from the TCP stream.
    pub drained: AtomicU64,
    /// While bytes are moved from the kernel to the side buffer: [`Self::tcp_received`] before that, plus 1. Else 0.
    pub absorbing: AtomicU64,
    /// Where they go in the side buffer.
    pub absorbing_at: AtomicU64,
    /// Application bytes received through the ring.
    pub ring_received: AtomicU64,
    /// Times a thread went to sleep in the kernel for this connection.
    pub sleeps: AtomicU64,
    /// Times spinning found what it waited for.
    pub spin_hits: AtomicU64,
    _pad2: [u64; 7],

    /// Held while bytes are put into the stream.
    pub send_lock: Lock,
    /// 1 once this side sends through the ring.
    pub send_switched: AtomicU32,
    /// Application bytes sent over TCP.
    pub tcp_sent: AtomicU64,
    /// Application bytes sent through the ring.
    pub ring_sent: AtomicU64,
    /// Doorbells rung.
    pub doorbells: AtomicU64,
    /// The consumer's position when the ring was last found full.
    pub full_at: AtomicU64,
    /// The consumer's position at the last push,
    pub blind_at: AtomicU64,
    /// and how many pushes ago that was.
    pub blind_pushes: AtomicU64,
    /// What the application set `TCP_NODELAY` to; the socket itself has it on, for bells' sake.
    pub nodelay: AtomicU32,
    /// What the application set `TCP_CORK` to; the socket itself has it off.
    pub cork: AtomicU32,
    /// 1 while the outgoing window is larger than what stays in cache.
    pub roomy: AtomicU32,
    /// The errno with which the kernel ended the connection, if it was no reset: `ETIMEDOUT`, `EHOSTUNREACH` and the like.
    pub error: AtomicU32,
    _pad3: [u32; 44],
}

const _: () = assert!(size_of::<Block>() == 512);
const _: () = assert!(std::mem::offset_of!(Block, local) == 64);
const _: () = assert!(std::mem::offset_of!(Block, recv_lock) == 128);
const _: () = assert!(std::mem::offset_of!(Block, ring_received) == 176);
const _: () = assert!(std::mem::offset_of!(Block, send_lock) == 256);

/// An address in three words: 16 address bytes (v4 mapped), then the port with a presence bit.
#[derive(Debug)]
#[repr(C)]
struct AddressCell([AtomicU64; 3]);

impl AddressCell {
    const PRESENT: u64 = 1 << 16;

    fn store(&self, address: SocketAddr) {
        let ip = match address.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        let bits = ip.to_bits();
        self.0[0].store((bits >> 64) as u64, Ordering::Relaxed);
        self.0[1].store(bits as u64, Ordering::Relaxed);
        self.0[2].store(u64::from(address.port()) | Self::PRESENT, Ordering::Release);
    }

    fn load(&self) -> Option<SocketAddr> {
        let port = self.0[2].load(Ordering::Acquire);
        if port & Self::PRESENT == 0 {
            return None;
        }
        let high = u128::from(self.0[0].load(Ordering::Relaxed));
        let low = u128::from(self.0[1].load(Ordering::Relaxed));
        let ip = Ipv6Addr::from_bits(high << 64 | low).to_canonical();
        Some(SocketAddr::new(ip, (port & 0xffff) as u16))
    }
}

impl Block {
    /// Bytes taken from the kernel and not yet given to the application: where in the side buffer they are. Changed under
    /// the receive lock, in one store.
    pub fn side(&self) -> Range<u64> {
        let word = self.side.load(Ordering::Acquire);
        word >> 32..(word & u64::from(u32::MAX)).max(word >> 32)
    }

    /// Gives bytes of [`Self::side`] to the application: the next one is at `start`.
    pub fn set_side_start(&self, start: u64) {
        let end = self.side().end;
        self.side.store(if start == end { 0 } else { start << 32 | end }, Ordering::Release);
    }

    /// Adds bytes to [`Self::side`], up to `end`.
    pub fn set_side_end(&self, end: u64) {
        self.side.store(self.side().start << 32 | end, Ordering::Release);
    }

    /// Where the connection stands.
    pub fn state(&self) -> State {
        match self.state.load(Ordering::Acquire) % Generation::STEP {
            0 => State::Plain,
            1 => State::Switching,
            2 => State::Active,
            _ => State::Pinned,
        }
    }

    /// Moves from `from` to `to`; false if the connection was not at `from`.
    pub fn advance(&self, from: State, to: State) -> bool {
        // It does not change while the caller has the connection.
        let generation = self.generation();
        self.exchange_state(generation.with(from), generation.with(to))
    }

    fn exchange_state(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Keeps the connection on TCP for good, unless it has already left it. True if it is pinned now.
    pub fn pin(&self, reason: Reason) -> bool {
        if self.advance(State::Plain, State::Pinned) {
            self.reason.store(reason as u32, Ordering::Relaxed);
            return true;
        }
        self.state() == State::Pinned
    }

    /// As [`Self::pin`], from the thread that moved the connection to [`State::Switching`].
    pub fn pin_switching(&self, reason: Reason) {
        self.reason.store(reason as u32, Ordering::Relaxed);
        self.advance(State::Switching, State::Pinned);
    }

    /// Notes why the connection is on TCP so far, without deciding its future.
    pub fn note(&self, reason: Reason) {
        if self.state() != State::Pinned {
            self.reason.store(reason as u32, Ordering::Relaxed);
        }
    }

    /// It is back on TCP. Why, if it was not the fabric or the peer, is noted afterwards.
    pub fn come_back(&self) {
        self.note(Reason::Returned);
        self.raise(flag::RETURNED);
    }

    /// Why the connection is on TCP; [`Reason::Short`] until something better is known.
    pub fn reason(&self) -> Reason {
        Reason::from_code(self.reason.load(Ordering::Relaxed)).unwrap_or(Reason::Short)
    }

    /// Which end this is.
    pub fn role(&self) -> Role {
        if self.role.load(Ordering::Relaxed) == Role::Client as u32 { Role::Client } else { Role::Server }
    }

    /// Clears the bits of `bits` in [`Self::flags`]; true if any was set.
    pub fn lower(&self, bits: u32) -> bool {
        self.flags.fetch_and(!bits, Ordering::SeqCst) & bits != 0
    }

    /// Sets the bits of `bits` in [`Self::flags`].
    pub fn raise(&self, bits: u32) {
        self.flags.fetch_or(bits, Ordering::SeqCst);
    }

    /// Whether any of `bits` is set in [`Self::flags`].
    pub fn has(&self, bits: u32) -> bool {
        self.flags.load(Ordering::Acquire) & bits != 0
    }

    /// Stores both addresses, for `thallus status`.
    pub fn set_addresses(&self, local: SocketAddr, peer: SocketAddr) {
        self.local.store(local);
        self.peer.store(peer);
    }

    /// The address of this side, if it is known yet.
    pub fn local(&self) -> Option<SocketAddr> {
        self.local.load()
    }

    /// The address of the other side, if it is known yet.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.peer.load()
    }

    /// `CLOCK_BOOTTIME` at connect or accept, in nanoseconds.
    pub fn opened_ns(&self) -> u64 {
        self.opened_ns.load(Ordering::Relaxed)
    }

    /// Whether `pid` is the only process that has the connection. Holders that died are forgotten.
    pub fn held_only_by(&self, pid: u32) -> bool {
        self.holders.iter().all(|holder| match holder.load(Ordering::SeqCst) {
            0 => true,
            other if other == pid => true,
            UNBORN | OVERFLOW => false,
            other => forget_if_dead(holder, other),
        })
    }

    /// Promises the connection to a child about to be forked. If there are too many holders already, the
    /// connection counts as shared for ever: [`Self::held_only_by`] and [`Self::release`] say no from then on.
    pub fn hold_for_unborn(&self) {
        if self.add_holder(UNBORN) {
            return;
        }
        for holder in &self.holders {
            let pid = holder.load(Ordering::SeqCst);
            if !matches!(pid, 0 | UNBORN | OVERFLOW) {
                forget_if_dead(holder, pid);
            }
        }
        if !self.add_holder(UNBORN) {
            self.holders[self.holders.len() - 1].store(OVERFLOW, Ordering::SeqCst);
        }
    }

    /// In the child: takes over what [`Self::hold_for_unborn`] promised.
    pub fn born(&self, pid: u32) {
        self.replace_holder(UNBORN, pid);
    }

    /// In the parent of a fork that failed: withdraws the promise.
    pub fn stillborn(&self) {
        self.replace_holder(UNBORN, 0);
    }

    /// `pid` has closed its last file descriptor for the connection. True if nobody else has one.
    pub fn release(&self, pid: u32) -> bool {
        self.replace_holder(pid, 0);
        self.holders.iter().all(|holder| match holder.load(Ordering::SeqCst) {
            0 => true,
            UNBORN | OVERFLOW => false,
            other => forget_if_dead(holder, other),
        })
    }

    fn add_holder(&self, pid: u32) -> bool {
        self.holders
            .iter()
            .any(|holder| holder.compare_exchange(0, pid, Ordering::SeqCst, Ordering::SeqCst).is_ok())
    }

    fn replace_holder(&self, from: u32, to: u32) -> bool {
        self.holders
            .iter()
            .any(|holder| holder.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok())
    }

    fn reset(&self, role: Role, pid: u32, fd: u32, opened_ns: u64) {
        // The end of the former connection stays to be seen until all words are of this one.
        let ended = self.generation().ended();
        let behind_state = size_of_val(&self.state);
        // SAFETY: inside the block.
        let rest = unsafe { std::ptr::from_ref(self).cast_mut().byte_add(behind_state) };
        // SAFETY: a block is plain atomic integers, for which zero is valid, and its bit in the bitmap
        // gives it to this thread alone; readers of `thallus status` only ever load integers.
        unsafe { std::ptr::write_bytes(rest.cast::<u8>(), 0, size_of::<Self>() - behind_state) };
        self.role.store(role as u32, Ordering::Relaxed);
        self.holders[0].store(pid, Ordering::Relaxed);
        self.owner_pid.store(pid, Ordering::Relaxed);
        self.owner_fd.store(fd, Ordering::Relaxed);
        self.opened_ns.store(opened_ns, Ordering::Relaxed);
        self.full_at.store(u64::MAX, Ordering::Relaxed);
        self.state.store(ended.next().with(State::Plain), Ordering::Release);
    }
}

fn forget_if_dead(holder: &AtomicU32, pid: u32) -> bool {
    let alive = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .is_some_and(|pid| test_kill_process(pid) != Err(Errno::SRCH));
    if !alive {
        let _ = holder.compare_exchange(pid, 0, Ordering::SeqCst, Ordering::SeqCst);
    }
    !alive
}

#[repr(C)]
struct Header {
    magic: AtomicU64,
    version: AtomicU32,
    block_bytes: AtomicU32,
    block_count: AtomicU32,
    _pad: [u32; 11],
    bitmap: [AtomicU64; BITMAP_WORDS],
}

const _: () = assert!(std::mem::offset_of!(Header, bitmap) == 64);
const _: () = assert!(size_of::<Header>() <= HEADER_BYTES);

/// One mapped chunk. Mappings last as long as the process: blocks are handed out as `&'static`.
pub struct Chunk {
    base: NonNull<u8>,
    /// By which `thallus status` finds it.
    fd: Option<OwnedFd>,
}

// SAFETY: the mapping is never unmapped and holds nothing but atomics.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl fmt::Debug for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chunk").field("base", &self.base).field("fd", &self.fd).finish()
    }
}

impl Chunk {
    /// Creates an empty chunk, whose descriptor `place` moves out of the program's way. Without a free descriptor, or
    /// where files must be smaller (`RLIMIT_FSIZE`, which kills), it has none, and `thallus status` does not see it.
    /// Fails as memfd_create(2), ftruncate(2) or mmap(2) do.
    pub fn create(place: impl Fn(OwnedFd) -> Result<OwnedFd, Errno>) -> Result<Self, Errno> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let limit = getrlimit(Resource::Fsize).current;
        let file = match limit.is_some_and(|limit| limit < CHUNK_BYTES as u64) {
            true => Err(Errno::MFILE),
            false => memfd_create(MEMFD_NAME, flags),
        };
        let fd = match file.and_then(place) {
            Ok(fd) => {
                ftruncate(&fd, CHUNK_BYTES as u64)?;
                // Whoever looks at it must not find it cut short.
                fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
                Some(fd)
            }
            Err(Errno::MFILE | Errno::NFILE) => None,
            Err(errno) => return Err(errno),
        };
        let chunk = Self::map(fd, ProtFlags::READ | ProtFlags::WRITE)?;
        let header = chunk.header();
        header.version.store(VERSION, Ordering::Relaxed);
        header.block_bytes.store(size_of::<Block>() as u32, Ordering::Relaxed);
        header.block_count.store(BLOCKS as u32, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok(chunk)
    }

    /// Maps another process's chunk to look at it, and to raise flags if it `writes`. `None` if it is not one of this
    /// version.
    pub fn inspect(fd: OwnedFd, writes: bool) -> Option<Self> {
        let size = rustix::fs::fstat(&fd).ok()?.st_size;
        let sealed = fcntl_get_seals(&fd).ok()?.contains(SealFlags::SHRINK);
        if usize::try_from(size).ok()? != CHUNK_BYTES || !sealed {
            return None;
        }
        let write = if writes { ProtFlags::WRITE } else { ProtFlags::empty() };
        let chunk = Self::map(Some(fd), ProtFlags::READ | write).ok()?;
        let header = chunk.header();
        let fits = header.magic.load(Ordering::Acquire) == MAGIC
            && header.version.load(Ordering::Relaxed) == VERSION
            && header.block_bytes.load(Ordering::Relaxed) as usize == size_of::<Block>();
        fits.then_some(chunk)
    }

    fn map(fd: Option<OwnedFd>, protection: ProtFlags) -> Result<Self, Errno> {
        let null = std::ptr::null_mut();
        let base = match &fd {
            // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
            Some(fd) => unsafe { mmap(null, CHUNK_BYTES, protection, MapFlags::SHARED, fd, 0)? },
            // SAFETY: as above.
            None => unsafe { mmap_anonymous(null, CHUNK_BYTES, protection, MapFlags::SHARED)? },
        };
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { base, fd })
    }

    /// The descriptor by which `thallus status` finds it.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    fn header(&self) -> &'static Header {
        // SAFETY: the mapping is CHUNK_BYTES long, page-aligned, never unmapped, and starts with a Header.
        unsafe { self.base.cast::<Header>().as_ref() }
    }

    fn block(&self, index: usize) -> &'static Block {
        debug_assert!(index < BLOCKS);
        // SAFETY: index < BLOCKS, so the block lies inside the mapping.
        let block = unsafe { self.base.add(HEADER_BYTES + index * size_of::<Block>()) };
        // SAFETY: inside the mapping, aligned to 512, never unmapped, atomics only.
        unsafe { block.cast::<Block>().as_ref() }
    }

    /// Takes a free block for a connection that `pid` has just opened as `fd`. `None` if the chunk is full.
    pub fn allocate(&self, role: Role, pid: u32, fd: u32, opened_ns: u64) -> Option<&'static Block> {
        for (word_index, word) in self.header().bitmap.iter().enumerate() {
            let mut bits = word.load(Ordering::Relaxed);
            while bits != u64::MAX {
                let bit = bits.trailing_ones();
                match word.compare_exchange_weak(bits, bits | 1 << bit, Ordering::Acquire, Ordering::Relaxed)
                {
                    Ok(_) => {
                        let block = self.block(word_index * 64 + bit as usize);
                        block.reset(role, pid, fd, opened_ns);
                        return Some(block);
                    }
                    Err(now) => bits = now,
                }
            }
        }
        None
    }

    /// Gives a block back. Does nothing if `block` is not of this chunk.
    pub fn free(&self, block: &Block) -> bool {
        let Some(index) = self.index_of(block) else { return false };
        block.state.store(block.generation().ended().with(State::Pinned), Ordering::Release);
        self.give_back(index);
        true
    }

    fn give_back(&self, index: usize) {
        self.header().bitmap[index / 64].fetch_and(!(1 << (index % 64)), Ordering::Release);
    }

    fn index_of(&self, block: &Block) -> Option<usize> {
        let offset = std::ptr::from_ref(block).addr().checked_sub(self.base.addr().get() + HEADER_BYTES)?;
        let index = offset / size_of::<Block>();
        (index < BLOCKS).then_some(index)
    }

    /// The blocks in use, in no particular order.
    pub fn blocks(&self) -> impl Iterator<Item = &'static Block> + '_ {
        (0..BLOCKS)
            .filter(|index| self.header().bitmap[index / 64].load(Ordering::Acquire) & 1 << (index % 64) != 0)
            .map(|index| self.block(index))
    }

    /// Frees the blocks whose holders are all dead: processes that were killed could not. Returns how many.
    pub fn sweep(&self) -> usize {
        self.blocks()
            .filter(|block| {
                let word = block.state.load(Ordering::Acquire);
                let ended = Generation::of(word).ended().with(State::Pinned);
                let held = block.holders.iter().any(|holder| holder.load(Ordering::SeqCst) != 0);
                // Another process may be faster, and the block be in use again.
                held && block.release(0) && block.exchange_state(word, ended)
            })
            .filter_map(|block| self.index_of(block))
            .map(|index| self.give_back(index))
            .count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pid() -> u32 {
        std::process::id()
    }

    #[test]
    fn a_block_is_reused_only_after_it_was_freed() {
        let chunk = Chunk::create(Ok).unwrap();
        let first = chunk.allocate(Role::Client, pid(), 3, 1).unwrap();
        let second = chunk.allocate(Role::Server, pid(), 4, 1).unwrap();
        assert!(!std::ptr::eq(first, second));
        assert!(chunk.free(first));
        assert!(std::ptr::eq(first, chunk.allocate(Role::Server, pid(), 5, 2).unwrap()));
        assert_eq!(first.role(), Role::Server);
        assert_eq!(first.opened_ns(), 2);
    }

    #[test]
    fn a_full_chunk_has_no_block() {
        let chunk = Chunk::create(Ok).unwrap();
        for _ in 0..BLOCKS {
            assert!(chunk.allocate(Role::Client, pid(), 3, 1).is_some());
        }
        assert!(chunk.allocate(Role::Client, pid(), 3, 1).is_none());
        assert_eq!(chunk.blocks().count(), BLOCKS);
    }

    #[test]
    fn only_the_last_of_several_holders_closes_the_connection() {
        let chunk = Chunk::create(Ok).unwrap();
        let block = chunk.allocate(Role::Server, pid(), 3, 1).unwrap();
        assert!(block.held_only_by(pid()));
        block.hold_for_unborn();
        assert!(!block.held_only_by(pid()));
        assert!(!block.release(pid()));
        block.stillborn();
        assert!(block.release(pid()));
    }

    #[test]
    fn too_many_holders_make_a_connection_shared_for_ever() {
        let chunk = Chunk::create(Ok).unwrap();
        let block = chunk.allocate(Role::Server, pid(), 3, 1).unwrap();
        // This process stands for all of its children: each is alive for as long as it holds.
        let children = block.holders.len() as u32;
        for _ in 0..children {
            block.hold_for_unborn();
            block.born(pid());
        }
        for _ in 0..=children {
            assert!(!block.held_only_by(pid()));
            assert!(!block.release(pid()));
        }
        assert_eq!(chunk.sweep(), 0);
    }

    #[test]
    fn dead_holders_make_room_for_new_ones() {
        let chunk = Chunk::create(Ok).unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let block = chunk.allocate(Role::Server, pid(), 3, 1).unwrap();
        for holder in &block.holders[1..] {
            holder.store(child.id(), Ordering::SeqCst);
        }
        block.hold_for_unborn();
        block.stillborn();
        assert!(block.release(pid()));
    }

    #[test]
    fn blocks_of_killed_processes_are_swept() {
        let chunk = Chunk::create(Ok).unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let block = chunk.allocate(Role::Server, child.id(), 3, 1).unwrap();
        assert_eq!(chunk.sweep(), 0);
        assert!(!block.held_only_by(pid()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(chunk.sweep(), 1);
        assert_eq!(chunk.blocks().count(), 0);
    }

    #[test]
    fn another_process_can_look_at_a_chunk_but_not_at_something_else() {
        let chunk = Chunk::create(Ok).unwrap();
        let block = chunk.allocate(Role::Client, pid(), 7, 1).unwrap();
        let local = "127.0.0.1:4000".parse().unwrap();
        let peer = "[::ffff:127.0.0.1]:5432".parse().unwrap();
        block.set_addresses(local, peer);
        let view = Chunk::inspect(chunk.fd().unwrap().try_clone_to_owned().unwrap(), false).unwrap();
        let seen = view.blocks().next().unwrap();
        assert_eq!(seen.local(), Some(local));
        assert_eq!(seen.peer(), Some("127.0.0.1:5432".parse().unwrap()));

        let other = memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&other, CHUNK_BYTES as u64).unwrap();
        assert!(Chunk::inspect(other, false).is_none());
    }

    #[test]
    fn a_pinned_connection_keeps_its_first_reason() {
        let chunk = Chunk::create(Ok).unwrap();
        let block = chunk.allocate(Role::Client, pid(), 7, 1).unwrap();
        assert_eq!(block.reason(), Reason::Short);
        assert!(block.pin(Reason::Oob));
        assert!(block.pin(Reason::Stdio));
        assert_eq!(block.reason(), Reason::Oob);
        assert_eq!(block.state(), State::Pinned);
    }
}

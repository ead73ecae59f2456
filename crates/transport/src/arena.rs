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

mod chunk;
mod request;
mod snapshot;

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};

use crate::lock::Lock;
use crate::reason::Reason;
use crate::uninterrupted::Descriptor;
use crate::unix::{NAME_BYTES, Name};

pub use chunk::{BLOCKS, CHUNK_BYTES, Chunk, MEMFD_NAME, View};
pub use request::{Generation, Wish};
pub use snapshot::Snapshot;

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
    /// A write did not fit, and nobody has been told of room since ([`super::Block::lacks_room`]).
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
    /// A greeting that comes is not to be answered; [`Block::reason`] says why.
    pub const DECLINES: u32 = 262_144;
    /// It is an `AF_UNIX` stream, not TCP. What is said of TCP here is then said of that.
    pub const UNIX: u32 = 524_288;
    /// When it went back to TCP, this side had all that the peer's calls had sent; those that have sent more since have sent it again.
    pub const HAD_ALL: u32 = 1_048_576;
    /// Back on TCP, DOWN has not been sent, and precedes the next byte of the application's.
    pub const OWES_DOWN: u32 = 2_097_152;
    /// A process of this side has allocated memory to lend. No other one can.
    pub const LENDS: u32 = 4_194_304;
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
    /// Bytes that have ever been put in the side buffer.
    put_aside: AtomicU64,
    _pad2: [u64; 6],

    /// Held while bytes are put into the stream.
    pub send_lock: Lock,
    /// 1 once this side sends through the ring.
    pub send_switched: AtomicU32,
    /// Application bytes sent over TCP.
    pub tcp_sent: AtomicU64,
    /// Application bytes sent through the ring.
    pub ring_sent: AtomicU64,
    /// Doorbells rung over TCP.
    pub doorbells: AtomicU64,
    /// The consumer's position when the ring was last found full.
    pub full_at: AtomicU64,
    /// The consumer's position when it was last looked at,
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
    /// 1 while reads are to tell what they leave behind (`TCP_INQ`).
    pub inq: AtomicU32,
    /// How often a write did not fit, or somebody began to wait for room.
    lacks: AtomicU32,
    /// Of `AF_UNIX`, before it leaves the kernel's socket: calls whose bytes have not been counted yet. Who dies in one leaves it here.
    pub uncounted: AtomicU32,
    /// Of `AF_UNIX`: bytes of the server's name, and the name.
    name_length: AtomicU32,
    name: [AtomicU32; NAME_BYTES / size_of::<u32>()],
    /// Doorbells rung beside TCP ([`crate::chime`]).
    pub chimes: AtomicU64,
    /// Calls of shutdown(2) on it.
    pub shutdowns: AtomicU32,
    _pad3: [u32; 10],
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

/// `CLOCK_BOOTTIME`, in nanoseconds.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Time since a connection was opened, at `opened_ns` by [`now_ns`].
pub fn age(opened_ns: u64) -> Duration {
    Duration::from_nanos(now_ns().saturating_sub(opened_ns))
}

/// How many connections have gone back to TCP, as far as this process has noticed ([`returns`]).
static RETURNS: AtomicU32 = AtomicU32::new(0);

/// Changes when a connection goes back to TCP by this process: its kernel has to tell by itself from then on what the program waits for.
pub fn returns() -> u32 {
    RETURNS.load(Ordering::SeqCst)
}

impl Block {
    /// Times a sleeping peer was woken, whichever way.
    pub fn bells(&self) -> u64 {
        self.doorbells.load(Ordering::Relaxed).wrapping_add(self.chimes.load(Ordering::Relaxed))
    }

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
        let Range { start, end: before } = self.side();
        self.side.store(start << 32 | end, Ordering::Release);
        // Not before they can be seen: whoever knows the count has been told of them.
        let all = self.put_aside.load(Ordering::Relaxed).wrapping_add(end.saturating_sub(before));
        self.put_aside.store(all, Ordering::Release);
    }

    /// How many bytes [`Self::side`] has ever had.
    pub fn put_aside(&self) -> u64 {
        self.put_aside.load(Ordering::Acquire)
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

    /// It is back on TCP, as [`returns`] counts. Why, if it was not the fabric or the peer, is noted afterwards.
    pub fn come_back(&self) {
        self.note(Reason::Returned);
        self.raise(flag::RETURNED);
        RETURNS.fetch_add(1, Ordering::SeqCst);
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

    /// A write did not fit, or there is no room for one that somebody waits to make: each of those who wait for edges is owed one
    /// once there is.
    pub fn lacks_room(&self) {
        self.raise(flag::NO_SPACE);
        self.lacks.fetch_add(1, Ordering::SeqCst);
    }

    /// Tells one [`Self::lacks_room`] from the next.
    pub fn lacks(&self) -> u32 {
        self.lacks.load(Ordering::SeqCst)
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

    /// Stores the server's name, of an `AF_UNIX` connection, for `thallus status`.
    pub fn set_name(&self, name: Option<&Name>) {
        let bytes = name.map_or(&[][..], Name::bytes);
        for (word, part) in self.name.iter().zip(bytes.chunks(size_of::<u32>())) {
            let mut all = [0; size_of::<u32>()];
            all[..part.len()].copy_from_slice(part);
            word.store(u32::from_ne_bytes(all), Ordering::Relaxed);
        }
        self.name_length.store(bytes.len() as u32, Ordering::Release);
    }

    /// The server's name, if it is known yet and there is one.
    pub fn name(&self) -> Option<Name> {
        let length = self.name_length.load(Ordering::Acquire) as usize;
        let words = self.name.iter().map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
        let bytes: Vec<u8> = words.flatten().take(length).collect();
        Name::of(&bytes)
    }

    /// Time since connect or accept.
    pub fn age(&self) -> Duration {
        age(self.opened_ns())
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
            other => !forget_unless(exists, holder, other),
        })
    }

    /// Promises the connection to a child about to be forked. If there are too many holders already, the
    /// connection counts as shared for ever: [`Self::held_only_by`] and [`Self::release`] say no from then on.
    pub fn hold_for_unborn(&self) {
        self.hold(UNBORN);
    }

    /// `pid` has the connection as well. As [`Self::hold_for_unborn`] if there are too many.
    pub fn hold(&self, pid: u32) {
        if self.add_holder(pid) {
            return;
        }
        for holder in &self.holders {
            let other = holder.load(Ordering::SeqCst);
            if !matches!(other, 0 | UNBORN | OVERFLOW) {
                forget_unless(is_alive, holder, other);
            }
        }
        if !self.add_holder(pid) {
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
            other => !forget_unless(is_alive, holder, other),
        })
    }

    /// Whether processes have it, all of which are dead.
    fn is_left_by_the_dead(&self) -> bool {
        let holders = self.holders.each_ref().map(|holder| holder.load(Ordering::SeqCst));
        let is_dead = |&pid: &u32| !matches!(pid, UNBORN | OVERFLOW) && !pid_of(pid).is_some_and(is_alive);
        holders.iter().any(|&pid| pid != 0) && holders.iter().filter(|&&pid| pid != 0).all(is_dead)
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

    fn zero() -> Self {
        // SAFETY: a block is plain atomic integers, for which zero is valid.
        unsafe { std::mem::zeroed() }
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

/// Whether there is such a process, if only to be waited for by its parent. One system call where [`is_alive`] takes three: some calls on
/// shared connections ask each time.
fn exists(pid: Pid) -> bool {
    test_kill_process(pid) != Err(Errno::SRCH)
}

/// Whether process `pid` may have descriptors: a zombie has none (pidfd_open(2), poll(2)).
fn is_alive(pid: Pid) -> bool {
    match pidfd_open(pid, PidfdFlags::empty()).map(Descriptor::from) {
        Ok(process) => {
            let mut ended = [PollFd::new(&process, PollFlags::IN)];
            poll(&mut ended, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) != Ok(1)
        }
        // An old kernel, or no descriptor is left.
        Err(_) => exists(pid),
    }
}

/// Whether the holder may be there, according to `is_there`, or is forgotten.
fn forget_unless(is_there: impl Fn(Pid) -> bool, holder: &AtomicU32, pid: u32) -> bool {
    let is_there = pid_of(pid).is_some_and(is_there);
    if !is_there {
        let _ = holder.compare_exchange(pid, 0, Ordering::SeqCst, Ordering::SeqCst);
    }
    is_there
}

fn pid_of(pid: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(pid).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pid() -> u32 {
        std::process::id()
    }

    #[test]
    fn a_zombie_holds_nothing() {
        let chunk = Chunk::create(Ok).unwrap();
        let block = chunk.allocate(Role::Server, pid(), 3, 1).unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let id = Pid::from_child(&child);
        let exited = rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        rustix::process::waitid(rustix::process::WaitId::Pid(id), exited).unwrap();
        block.hold(child.id());
        assert!(exists(id) && !is_alive(id));
        assert!(block.release(pid()));
        child.wait().unwrap();
        assert!(!exists(id) && !is_alive(id));
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

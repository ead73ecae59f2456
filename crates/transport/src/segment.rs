//! The memory that the two ends of an upgraded connection share, and nobody else.
//!
//! ```text
//!        0  magic, version, nonce, ready, greeting and what else is said on TCP
//!      512  HELLO, until it is answered
//!     1024  control words, client → server      (crate::control)
//!     2048  control words, server → client
//!     4096  smallest window, client → server
//!    12288  smallest window, server → client
//!        …  larger windows, client → server     sparse
//!        …  larger windows, server → client     sparse
//!        …  side buffer of the client           SIDE_BYTES, sparse
//!        …  side buffer of the server           SIDE_BYTES, sparse
//!        …  loans of the client                 LOANS_BYTES, sparse  (crate::lending)
//!        …  loans of the server                 LOANS_BYTES, sparse
//!        …  memory that the client lends        AREA_BYTES, sparse, mapped by who uses it
//!        …  memory that the server lends        AREA_BYTES, sparse, mapped by who uses it
//! ```
//!
//! What an idle connection uses lies together: else the page tables for it would take more memory than it does.
//!
//! A memfd, sealed against shrinking so that neither side can make the other fault (memfd_create(2), "File sealing").
//! With a peer on another host ([`crate::verbs`]) the segment is this side's alone, its windows stay empty, and the fabric keeps
//! its words in step with the peer's.
//!
//! A *side buffer* holds bytes that its owner took from the kernel before the application asked for them; it lies
//! here, although only its owner uses it, because forks of the owner must find it.

mod areas;
mod ends;

use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate,
    memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, ProtFlags, madvise, munmap};
use rustix::thread::CpuSet;
use thiserror::Error;

use crate::arena::Role;
use crate::chime::Exchange;
use crate::control::{Control, end};
use crate::lending::{AREA_BYTES, Area, LOANS_BYTES};
use crate::process;
use crate::ring::{Consumer, DIRECTION_BYTES, Known, class_size};
use crate::room::Wide;
use crate::sparse;
use crate::verbs::link::Link;

use ends::Windows;
pub(crate) use ends::{InMemory, Inlet, Outlet};

const MAGIC: u64 = u64::from_le_bytes(*b"THALLUSs");
const VERSION: u32 = 6;
const HELLO_OFFSET: usize = 512;
const CONTROL_OFFSET: [usize; 2] = [1024, 2048];
const DATA_OFFSET: usize = 4096;
const WINDOWS: usize = DIRECTION_BYTES as usize;
/// Bytes of a direction's smallest window.
const SMALLEST: usize = class_size(0) as usize;

/// Bytes of a side buffer: more than the kernel buffers for one TCP direction under any usual
/// `tcp_rmem` and `tcp_wmem`.
pub const SIDE_BYTES: usize = 64 << 20;

const LOANS_OFFSET: usize = DATA_OFFSET + 2 * WINDOWS + 2 * SIDE_BYTES;

/// Bytes of a segment that are always mapped, nearly all of them never touched.
pub const SEGMENT_BYTES: usize = LOANS_OFFSET + 2 * LOANS_BYTES;

/// Size in bytes of a segment in which memory can be lent.
const LENDABLE_BYTES: usize = SEGMENT_BYTES + 2 * AREA_BYTES;

const READY: u32 = 1;
const REFUSED: u32 = 2;
const DOWN: u32 = 3;

/// Secret of one segment, by which the receiver knows it for the one that was announced.
pub type Nonce = [u8; 16];

/// Why a segment that arrived was refused.
#[derive(Debug, Error)]
pub enum OfferError {
    /// It could not be mapped or looked at.
    #[error("the segment cannot be mapped")]
    Map(#[from] Errno),
    /// It is smaller or larger than the protocol says, or could be truncated later.
    #[error("the segment has the wrong size or may shrink")]
    Shape,
    /// Its header is not the announced one.
    #[error("the segment is not the announced one")]
    Header,
}

#[repr(C)]
struct Header {
    magic: AtomicU64,
    version: AtomicU32,
    /// [`READY`] once the client has mapped the segment: from then on either side may send through it.
    /// [`REFUSED`] if the server withdrew before.
    ready: AtomicU32,
    nonce: [AtomicU64; 2],
    /// A [`Greeting`].
    greeting: AtomicU32,
    /// 1 once the client or server has tried to tell the peer by RDMA where its bytes leave TCP.
    switching: AtomicU32,
    again: Again,
    /// Bytes of greetings that have been sent on TCP, and taken from there.
    greeted: [AtomicU32; 2],
    /// The only processor on which the client and the server could run when they met: its number and one more; 0 if there
    /// were several, or nobody has said.
    processors: [AtomicU32; 2],
}

const _: () = assert!(std::mem::offset_of!(Header, processors) == 88, "docs/wire.md");

/// Bytes that come again after a return to TCP. What is noted before they are taken from the kernel tells whoever goes on
/// for a process that was killed how far that came.
#[repr(C)]
pub(crate) struct Again {
    /// How many are left, for [`Greeting::Skips`].
    pub(crate) left: AtomicU64,
    /// How many there were.
    pub(crate) all: AtomicU64,
    /// The kernel's count of bytes read where they begin, behind the peer's DOWN; 0 as long as none has been seen.
    pub(crate) from: AtomicU64,
    /// The same where all that the peer had sent before has come.
    pub(crate) until: AtomicU64,
    /// 1 if what is in the side buffer is what follows them.
    pub(crate) drops_side: AtomicU32,
}

/// What is still to be said on TCP in front of the application's bytes, with a peer on another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Greeting {
    /// Nothing, or no more.
    Done = 0,
    /// Server: a HELLO may come first.
    AwaitsHello = 1,
    /// Client: HELLO goes out with the next bytes.
    OwesHello = 2,
    /// Client: the reply may come first.
    AwaitsReply = 3,
    /// Server: the reply goes out with the next bytes.
    OwesReply = 4,
    /// Back on TCP: bells may come, and then the peer's DOWN.
    AwaitsDown = 5,
    /// Back on TCP: what comes first has come before.
    Skips = 6,
    /// Client: the server has replied, and the queue pair is being connected. What comes is the application's.
    Connects = 7,
}

/// A mapped segment, seen from one of its ends. Unmapped when dropped.
pub struct Segment {
    base: NonNull<u8>,
    role: Role,
    /// No peer maps it.
    alone: bool,
    /// Whether it reaches as far as the memory that is lent.
    lendable: bool,
    /// The effective user of the process at the other end, when they met.
    peer_uid: Option<u32>,
    /// Made of an [`Arc`] when first asked for; null before. A fork's may be its parent's. No lock: a fork could inherit it
    /// held.
    area: AtomicPtr<Area>,
    link: OnceLock<Link>,
    exchange: Exchange,
    /// Of the outgoing direction.
    known: Known,
    /// The same.
    pub(crate) wide: Wide,
    /// A position of the incoming direction, and the offset in memory of its byte: see [`Self::expect`].
    next: [crate::sync::AtomicU64; 2],
}

// SAFETY: the mapping is shared memory made of atomics and of bytes that are only copied.
unsafe impl Send for Segment {}
// SAFETY: as above; who may use which part when is the business of the direction locks.
unsafe impl Sync for Segment {}

/// The number of the only processor that this thread may run on, and one more; 0 if there are several.
fn only_processor() -> u32 {
    let Ok(allowed) = rustix::thread::sched_getaffinity(None) else { return 0 };
    let mut numbers = (1u32..).zip(0..CpuSet::MAX_CPU).filter(|(_, at)| allowed.is_set(*at));
    match (numbers.next(), numbers.next()) {
        (Some((number, _)), None) => number,
        _ => 0,
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment").field("base", &self.base).field("role", &self.role).finish()
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let area = *self.area.get_mut();
        if !area.is_null() {
            // SAFETY: `area` made it of an Arc, whose count it has kept.
            drop(unsafe { Arc::from_raw(area) });
        }
        // SAFETY: this is the mapping that `map` made, and nobody refers to it any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), SEGMENT_BYTES) };
    }
}

impl Segment {
    /// Server: creates a segment with the smallest windows. Fails as memfd_create(2), fallocate(2) and
    /// mmap(2) do; `EFBIG` when the process may not make files of this size (`RLIMIT_FSIZE`), `ENOSYS` when the
    /// kernel (before 5.14) can't reserve a window's pages ahead of use.
    pub fn create(nonce: Nonce) -> Result<(Self, OwnedFd), Errno> {
        let (segment, fd) = Self::create_for(Role::Server, false)?;
        fallocate(&fd, FallocateFlags::empty(), 0, (DATA_OFFSET + 2 * SMALLEST) as u64)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        if !segment.can_populate() {
            return Err(Errno::NOSYS);
        }
        let header = segment.header();
        for (word, half) in header.nonce.iter().zip(nonce_words(nonce)) {
            word.store(half, Ordering::Relaxed);
        }
        segment.note_processor();
        header.version.store(VERSION, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok((segment, fd))
    }

    /// A segment of this side alone, for a peer on another host, to whom something is still to be said. Its windows have
    /// no memory yet. Fails as [`Self::create`] does.
    pub fn create_alone(role: Role, greeting: Greeting) -> Result<Self, Errno> {
        let (segment, fd) = Self::create_for(role, true)?;
        fallocate(&fd, FallocateFlags::empty(), 0, DATA_OFFSET as u64)?;
        segment.set_greeting(greeting);
        Ok(segment)
    }

    fn create_for(role: Role, alone: bool) -> Result<(Self, OwnedFd), Errno> {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
        if limit.is_some_and(|limit| limit < SEGMENT_BYTES as u64) {
            return Err(Errno::FBIG);
        }
        let lendable = !alone && limit.is_none_or(|limit| limit >= LENDABLE_BYTES as u64);
        let fd = memfd_create("thallus-segment", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, if lendable { LENDABLE_BYTES } else { SEGMENT_BYTES } as u64)?;
        let mut segment = Self::map(&fd, role, alone)?;
        segment.lendable = lendable;
        // The rest of a new file is zero.
        for index in 0..CONTROL_OFFSET.len() {
            segment.direction(index).0.begin();
        }
        Ok((segment, fd))
    }

    /// Client: maps a segment that arrived with `nonce`.
    pub fn accept(fd: impl AsFd, nonce: Nonce) -> Result<Self, OfferError> {
        // First what can't wait: only memory has seals. The file of a file system in user space is whoever's runs that to answer for.
        if !fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return Err(OfferError::Shape);
        }
        let lendable = match usize::try_from(fstat(&fd)?.st_size) {
            Ok(SEGMENT_BYTES) => false,
            Ok(LENDABLE_BYTES) => true,
            _ => return Err(OfferError::Shape),
        };
        let mut segment = Self::map(fd, Role::Client, false)?;
        segment.lendable = lendable;
        let header = segment.header();
        let words = [header.nonce[0].load(Ordering::Relaxed), header.nonce[1].load(Ordering::Relaxed)];
        let announced = header.magic.load(Ordering::Acquire) == MAGIC
            && header.version.load(Ordering::Relaxed) == VERSION
            && words == nonce_words(nonce);
        if !announced {
            return Err(OfferError::Header);
        }
        segment.note_processor();
        Ok(segment)
    }

    fn note_processor(&self) {
        self.header().processors[self.role as usize].store(only_processor(), Ordering::Relaxed);
    }

    /// Whether both ends could run on one processor alone, the same, when they met.
    pub(crate) fn shares_processor(&self) -> bool {
        let [client, server] = self.header().processors.each_ref().map(|word| word.load(Ordering::Relaxed));
        client == server && client != 0
    }

    /// Whether the kernel knows `MADV_POPULATE_WRITE`, without which a window that grows could turn a full disk or
    /// memory limit into `SIGBUS`. Asked once, or by each of several threads at the same time: in a fork nobody waits for one that is at
    /// it. Of a window that has its pages already.
    fn can_populate(&self) -> bool {
        const ABLE: u8 = 1;
        const UNABLE: u8 = 2;
        static ANSWER: AtomicU8 = AtomicU8::new(0);
        if ANSWER.load(Ordering::Relaxed) == 0 {
            let advised = self.direction(0).1.advise(0, class_size(0), Advice::LinuxPopulateWrite);
            let unable = matches!(advised, Err(Errno::INVAL | Errno::NOSYS));
            ANSWER.store(if unable { UNABLE } else { ABLE }, Ordering::Relaxed);
        }
        ANSWER.load(Ordering::Relaxed) == ABLE
    }

    fn map(fd: impl AsFd, role: Role, alone: bool) -> Result<Self, Errno> {
        let base = sparse::shared(fd, SEGMENT_BYTES, ProtFlags::READ | ProtFlags::WRITE)?;
        // A core dump would give every page of it memory, and write it.
        // SAFETY: this only says what a core dump leaves out.
        let _ = unsafe { madvise(base.as_ptr().cast(), SEGMENT_BYTES, Advice::LinuxDontDump) };
        let area = AtomicPtr::new(std::ptr::null_mut());
        Ok(Self {
            base,
            role,
            alone,
            lendable: false,
            peer_uid: None,
            area,
            link: OnceLock::new(),
            exchange: Exchange::default(),
            known: Known::new(),
            wide: Wide::default(),
            next: [const { crate::sync::AtomicU64::new(0) }; 2],
        })
    }

    /// Notes who is at the other end.
    pub(crate) fn met(mut self, uid: u32) -> Self {
        self.peer_uid = Some(uid);
        self
    }

    /// Notes how far the exchange of mouths is.
    pub(crate) fn exchanging(mut self, exchange: Exchange) -> Self {
        self.exchange = exchange;
        self
    }

    /// By which each end's process is woken.
    pub(crate) fn exchange(&self) -> &Exchange {
        &self.exchange
    }

    /// Whether the process at the other end was one that may do anything to this one anyway.
    pub(crate) fn peer_is_trusted(&self) -> bool {
        self.peer_uid.is_some_and(process::is_open_to)
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping starts with a Header of atomics and lives as long as `self`.
        unsafe { self.base.cast::<Header>().as_ref() }
    }

    /// Whether the client has mapped the segment.
    pub fn is_ready(&self) -> bool {
        let ready = self.header().ready.load(Ordering::Acquire);
        ready == READY || (ready == 0 && self.link().is_some_and(Link::peer_is_ready) && self.settle(READY))
    }

    /// Client: tells the server that both sides have the segment. False if the server has withdrawn.
    pub fn set_ready(&self) -> bool {
        self.settle(READY)
    }

    /// Withdraws. False if the other side was faster: then the segment is in use. A peer on another host that has been
    /// replied to can't be told any more, but sees the end of the TCP stream.
    pub fn refuse(&self) -> bool {
        if self.link().is_some() { !self.is_ready() } else { self.settle(REFUSED) }
    }

    /// Whether [`Self::refuse`] was faster than [`Self::set_ready`].
    pub(crate) fn is_refused(&self) -> bool {
        self.header().ready.load(Ordering::Acquire) == REFUSED
    }

    /// What is still to be said on TCP. To a peer on this host nothing is, whatever it writes here: it must not be able to
    /// bring about a queue pair.
    pub fn greeting(&self) -> Greeting {
        if !self.alone {
            return Greeting::Done;
        }
        match self.header().greeting.load(Ordering::Acquire) {
            1 => Greeting::AwaitsHello,
            2 => Greeting::OwesHello,
            3 => Greeting::AwaitsReply,
            4 => Greeting::OwesReply,
            5 => Greeting::AwaitsDown,
            6 => Greeting::Skips,
            7 => Greeting::Connects,
            _ => Greeting::Done,
        }
    }

    /// See [`Self::greeting`].
    pub fn set_greeting(&self, greeting: Greeting) {
        self.header().greeting.store(greeting as u32, Ordering::Release);
    }

    /// Over for good: both directions are back on TCP, or go there.
    pub(crate) fn take_down(&self) {
        self.header().ready.store(DOWN, Ordering::SeqCst);
    }

    /// Whether one side has gone back to TCP. The other one follows, or has ended.
    pub fn is_down(&self) -> bool {
        self.header().ready.load(Ordering::Acquire) == DOWN
    }

    /// See [`Again`].
    pub(crate) fn again(&self) -> &Again {
        &self.header().again
    }

    /// Whether this side has tried to tell the peer where its bytes leave TCP.
    pub(crate) fn switching(&self) -> &AtomicU32 {
        &self.header().switching
    }

    /// Where a HELLO waits for the process that answers it: room for one. Used under the direction locks.
    pub(crate) fn hello(&self) -> NonNull<u8> {
        // SAFETY: inside the mapping; see the layout above.
        unsafe { self.base.add(HELLO_OFFSET) }
    }

    /// The queue pair to a peer on another host, once it is connected.
    pub fn link(&self) -> Option<&Link> {
        self.link.get()
    }

    /// Bytes of greetings that have been sent on TCP, and taken from there: the kernel counts them, the block does not.
    pub(crate) fn greeted(&self) -> [u64; 2] {
        // A peer could write anything here.
        let load = |count: &AtomicU32| if self.alone { count.load(Ordering::Relaxed).into() } else { 0 };
        self.header().greeted.each_ref().map(load)
    }

    /// Notes that a greeting of `bytes` has been sent. The caller holds the send lock.
    pub(crate) fn note_greeting_sent(&self, bytes: u32) {
        self.header().greeted[0].store(bytes, Ordering::Relaxed);
    }

    /// Notes that a greeting of `bytes` has been taken. The caller holds the receive lock.
    pub(crate) fn note_greeting_taken(&self, bytes: u32) {
        self.header().greeted[1].store(bytes, Ordering::Relaxed);
    }

    /// Whether no peer maps it: a rule names the peer as another host.
    pub(crate) fn is_alone(&self) -> bool {
        self.alone
    }

    /// Whether another process drives the queue pair: this one can neither send nor receive.
    pub(crate) fn is_out_of_reach(&self) -> bool {
        // In this order: who attaches it says so afterwards.
        self.alone && self.header().ready.load(Ordering::Acquire) == READY && self.link().is_none()
    }

    /// Whether the queue pair has failed, and the connection is still to go back to TCP. When the peer closes, an iWARP queue
    /// pair fails: then there is nothing to go back for.
    pub(crate) fn has_failed(&self) -> bool {
        self.link().is_some_and(Link::has_failed) && self.incoming().end() & end::CLOSED == 0
    }

    /// Uses `link` from now on.
    pub(crate) fn attach(&self, link: Link) {
        let _ = self.link.set(link);
    }

    fn settle(&self, outcome: u32) -> bool {
        match self.header().ready.compare_exchange(0, outcome, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => true,
            Err(already) => already == outcome,
        }
    }

    fn direction(&self, index: usize) -> (&Control, Windows) {
        // SAFETY: inside the mapping, and aligned; see the layout above.
        let control = unsafe { self.base.add(CONTROL_OFFSET[index]) };
        // SAFETY: a Control is all atomics, valid whatever they hold.
        let control = unsafe { control.cast::<Control>().as_ref() };
        // SAFETY: inside the mapping.
        let smallest = unsafe { self.base.add(DATA_OFFSET + index * SMALLEST) };
        // As if the smallest were in front of the others, where there is something else.
        let others = DATA_OFFSET + SMALLEST + index * (WINDOWS - SMALLEST);
        // SAFETY: inside the mapping.
        let base = unsafe { self.base.add(others) };
        (control, Windows { smallest, base })
    }

    /// The words of the direction in which this side sends.
    pub fn outgoing(&self) -> &Control {
        let control = self.direction(self.role as usize).0;
        if let Some(link) = self.link() {
            link.note_credit(control);
        }
        control
    }

    /// The words of the direction in which this side receives.
    pub fn incoming(&self) -> &Control {
        let control = self.direction(1 - self.role as usize).0;
        if let Some(link) = self.link() {
            link.inbox().scan(control);
        }
        control
    }

    /// The sending end. The caller holds the send lock.
    pub(crate) fn outlet(&self) -> Outlet<'_> {
        let control = self.outgoing();
        let memory = self.direction(self.role as usize).1;
        Outlet { control, memory, known: &self.known, link: self.link() }
    }

    /// The receiving end. The caller holds the receive lock.
    pub(crate) fn inlet(&self) -> Inlet<'_> {
        let control = self.incoming();
        Inlet { control, memory: self.direction(1 - self.role as usize).1, link: self.link() }
    }

    /// The sending end, and the receiving end, if the peer shares this memory. The caller holds the lock of the one that it uses.
    #[inline]
    pub(crate) fn ends_in_memory(&self) -> Option<(InMemory<'_>, InMemory<'_>)> {
        let end = |index| {
            let (control, windows) = self.direction(index);
            InMemory { control, windows }
        };
        let role = self.role as usize;
        (!self.alone).then(|| (end(role), end(1 - role)))
    }

    /// What this process remembers of the outgoing direction.
    #[inline]
    pub(crate) fn known(&self) -> &Known {
        &self.known
    }

    /// Asks for the memory of the next byte to be near this processor, for a reader that looks for it. Threads that meet here
    /// may ask for another.
    pub(crate) fn expect(&self) {
        if self.link().is_some() {
            return;
        }
        let (control, memory) = self.direction(1 - self.role as usize);
        let ([at, offset], tail) = (&self.next, control.tail());
        if at.load(Ordering::Relaxed) != tail
            && let Ok(found) = Consumer::new(control, &memory).offset(tail)
        {
            offset.store(found, Ordering::Relaxed);
            at.store(tail, Ordering::Relaxed);
        }
        memory.expect(offset.load(Ordering::Relaxed));
    }

    /// Whether either side has asked to go back to TCP.
    #[inline]
    pub(crate) fn has_request(&self) -> bool {
        (self.direction(0).0.end() | self.direction(1).0.end()) & end::RETURN != 0
    }

    /// What the peer has not taken from the outgoing ring. `None` if it has written impossible positions, or that is more
    /// than `most` bytes. The caller holds the send lock, and the peer moves nothing meanwhile.
    pub(crate) fn untaken(&self, most: u64) -> Option<Vec<u8>> {
        let (control, memory) = self.direction(self.role as usize);
        let ring = Consumer::new(control, &memory);
        let available = ring.available().ok().filter(|&available| available <= most)?;
        let mut bytes = vec![0; usize::try_from(available).ok()?];
        // SAFETY: the vector is writable for its length.
        let count = unsafe { ring.peek(0, bytes.as_mut_ptr(), bytes.len()) }.ok()?;
        bytes.truncate(count);
        Some(bytes)
    }

    /// Before a sleep, after the sleepers have been announced: makes the peer's host know of them, and this one of what
    /// it has done. On one host both do at once. `is_closed` tells whether the peer has closed its socket: then nothing more
    /// comes. Fails if the fabric has.
    pub(crate) fn sync(&self, is_closed: impl Fn() -> bool) -> Result<(), Errno> {
        match self.link_to_ask() {
            Some(link) => link.sync(self.incoming(), self.outgoing(), is_closed),
            None => Ok(()),
        }
    }

    /// The link by which [`Self::sync`] has to ask the peer's host.
    pub(crate) fn link_to_ask(&self) -> Option<&Link> {
        self.link().filter(|_| self.is_ready())
    }

    /// Marks the end of what this side sends; bits of [`crate::control::end`]. True if a sleeper has to be rung for.
    pub(crate) fn finish(&self, bits: u32) -> bool {
        let outgoing = self.outgoing();
        match self.link() {
            None => outgoing.finish(bits),
            Some(link) => link.announce_end(outgoing, bits),
        }
    }

    /// This side's side buffer: [`SIDE_BYTES`] at the pointer.
    pub fn side(&self) -> NonNull<u8> {
        self.side_of(self.role as usize)
    }

    /// Gives memory to a range of it that is about to be written to. False if there is none.
    pub(crate) fn populate_side(&self, range: Range<usize>) -> bool {
        // SAFETY: the caller's range is inside the side buffer.
        let start = unsafe { self.side().add(range.start) };
        // SAFETY: as above.
        let populated = unsafe { sparse::populate(start, range.len()) };
        // Between hosts the kernel may be an old one.
        matches!(populated, Ok(()) | Err(Errno::INVAL))
    }

    fn side_of(&self, role: usize) -> NonNull<u8> {
        // SAFETY: inside the mapping; see the layout above.
        unsafe { self.base.add(DATA_OFFSET + 2 * WINDOWS + role * SIDE_BYTES) }
    }

    /// Which bytes of its side buffer the peer wants to be sent again ([`crate::control::Rung::aside`]). `None` if it names
    /// what can't be there.
    pub(crate) fn aside_at_peer(&self) -> Option<Range<usize>> {
        let word = self.incoming().rung.0.aside.load(Ordering::SeqCst);
        let range = (word >> 32) as usize..word as u32 as usize;
        (range.start <= range.end && range.end <= SIDE_BYTES).then_some(range)
    }

    /// These bytes.
    pub(crate) fn copy_aside_of_peer(&self, range: Range<usize>) -> Vec<u8> {
        assert!(range.start <= range.end && range.end <= SIDE_BYTES, "not in the side buffer");
        let mut bytes = vec![0; range.len()];
        // SAFETY: the range is inside the peer's side buffer.
        let source = unsafe { self.side_of(1 - self.role as usize).add(range.start) };
        // SAFETY: the vector is as long. What the peer writes there meanwhile is its own stream.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        bytes
    }
}

fn nonce_words(nonce: Nonce) -> [u64; 2] {
    let both = u128::from_ne_bytes(nonce);
    [both as u64, (both >> 64) as u64]
}

#[cfg(test)]
#[path = "segment_tests.rs"]
mod tests;

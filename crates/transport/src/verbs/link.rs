//! One connection over a queue pair: the peer's ring seen from its sender, ours from its receiver, and what each must
//! know of the other before it sleeps.
//!
//! The control words are this side's own ([`crate::control`]); here they are kept in step with the peer's.
//!
//! ```text
//!  what            is written by RDMA into the peer's memory          is read by RDMA from it, before a sleep
//!  outgoing head   messages in its ring                               posted
//!  incoming tail   credit, at fractions of the ring                   consumed
//!  sleepers        data_armed, space_armed, before a sleep
//!  bells           their count, before each
//! ```
//!
//! *Sleeping.* The sleeper announces itself in its own words, writes them to the peer, and then reads what the peer has
//! posted and consumed: reads are executed after the writes before them. So either the peer sees the sleeper when it looks
//! after posting, or the sleeper learns of what was posted, and waits for that instead of sleeping. A count of bells
//! is written behind the message that they announce, so whoever knows of a bell can see its reason.

mod asking;
mod back;

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

use rustix::event::EventfdFlags;
use rustix::io::Errno;

pub(crate) use self::asking::Question;
use super::board::{
    BOARD_BYTES, Board, CONNECTED, FIGURES_BYTES, Figures, LEAVES, Memory, Place, SLOT_BYTES, STAGE_BYTES,
    Said,
};
use super::device;
use super::ffi::access;
use super::inbox::Inbox;
use super::manager::{Nonce, Progress};
use super::message::{Kind, OVERHEAD, Room, VALIDITY};
use super::queue::{DEPTH, Endpoint, INLINE_WANTED, Poster, QueuePair, Request, Spot};
use super::slab::Slab;
use super::word::{Broken, ENDS, Promise, Vouched};
use crate::arena::Role;
use crate::control::{Control, end};
use crate::lock::Lock;
use crate::reason::Reason;
use crate::ring::{Lie, Popped, Pushed};
use crate::settings::{Order, RINGS, settings};

/// Bytes of a ring that data leaves free: for a pad, and the control messages that may follow.
const RESERVE: u64 = 8 * OVERHEAD;

/// A connection's queue pair and rings.
#[derive(Debug)]
pub struct Link {
    pair: QueuePair,
    place: Place,
    ours: Memory,
    theirs: Memory,
    /// Keys of the inbox and of the outbox, for this side's own use.
    keys: [u32; 2],
    inbox: Inbox,
    outbox: Room,
    /// Bytes of the ring for which credit was given.
    credited: AtomicU64,
    /// Held from the reads of [`Self::sync`] until their results have been taken: bells never get ahead of the rest.
    syncing: Lock,
    promise: Promise,
    vouched: Vouched,
    /// The sleepers that this side has told the peer of last, for data and for space. Under `syncing`.
    told_sleepers: [AtomicU32; 2],
    /// The kernel has reported something since the peer was asked what it had posted.
    doubtful: AtomicBool,
    /// The greatest credit that has come: bytes of the outgoing ring, and of the stream.
    known_credit: [AtomicU64; 2],
    order: Order,
    /// Something was posted after the peer had said that it leaves.
    late: AtomicBool,
    /// Readable once nothing that arrives counts any more, for this side's sleepers.
    wake: OwnedFd,
}

// SAFETY: pointers into memory that the queue pair keeps; used by atomics and copies only.
unsafe impl Send for Link {}
// SAFETY: as above; who may use which part when is the business of the direction locks.
unsafe impl Sync for Link {}

impl Link {
    /// A queue pair on the device of the connection's local address, and memory for it.
    pub(crate) fn create(local: SocketAddr) -> Result<Self, Reason> {
        let port = device::of_connection(local)?;
        let mut rings = settings().verbs.rings().peekable();
        let slab = Slab::take(rings.peek().copied().unwrap_or(RINGS[0])).map_err(|_| Reason::NoMemory)?;
        let place = slab.place();
        let mut psn = [0u8; 4];
        rustix::rand::getrandom(&mut psn, rustix::rand::GetRandomFlags::empty())
            .map_err(|_| Reason::NoVerbs)?;
        let mut pair = QueuePair::create(port, u32::from_ne_bytes(psn), INLINE_WANTED, slab)?;
        let range =
            |base: NonNull<u8>, length: u64| base.as_ptr()..base.as_ptr().wrapping_add(length as usize);
        // SAFETY: of the slab, which the queue pair keeps; also below.
        let figures = unsafe { pair.register(range(place.figures, FIGURES_BYTES), access::REMOTE_READ) }?;
        let both = |pair: &mut QueuePair, ring| {
            // SAFETY: as above.
            let inbox =
                unsafe { pair.register(range(place.inbox, BOARD_BYTES + ring), access::REMOTE_WRITE) }
                    .ok()?;
            // SAFETY: as above.
            match unsafe { pair.register(range(place.outbox, STAGE_BYTES + ring), 0) } {
                Ok(outbox) => Some((ring, inbox, outbox)),
                Err(_) => {
                    pair.unregister_last();
                    None
                }
            }
        };
        // As much as the limit on locked memory allows.
        let (ring, inbox, outbox) = rings.find_map(|ring| both(&mut pair, ring)).ok_or(Reason::MemLock)?;
        let ours = Memory {
            inbox: inbox.address,
            inbox_key: inbox.remote_key,
            ring: ring as u32,
            figures: figures.address,
            figures_key: figures.remote_key,
        };
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        // SAFETY: inside the slab.
        let at = |base: NonNull<u8>, offset: u64| unsafe { base.add(offset as usize) };
        let link = Self {
            pair,
            place,
            ours,
            theirs: Memory::default(),
            keys: [inbox.local_key, outbox.local_key],
            // SAFETY: the slab stays as long as the queue pair.
            inbox: unsafe { Inbox::new(place, ring) },
            // SAFETY: as above.
            outbox: unsafe { Room::new(at(place.outbox, STAGE_BYTES), ring) },
            credited: AtomicU64::new(0),
            syncing: Lock::new(),
            promise: Promise::new(),
            vouched: Vouched::new(),
            told_sleepers: [const { AtomicU32::new(0) }; 2],
            doubtful: AtomicBool::new(false),
            known_credit: [const { AtomicU64::new(0) }; 2],
            order: settings().verbs.order,
            late: AtomicBool::new(false),
            wake: (settings().place)(wake.map_err(|_| Reason::NoFds)?).map_err(|_| Reason::NoFds)?,
        };
        // As if the peer slept, until it says otherwise: the first message rings.
        link.board().armed.preset([u64::from(u32::MAX) << 32 | 1; 2]);
        Ok(link)
    }

    /// The port that it uses.
    pub(super) fn port(&self) -> &device::Place {
        self.pair.port()
    }

    /// Whether the connection manager connects it: iWARP.
    pub(super) fn needs_manager(&self) -> bool {
        self.pair.needs_manager()
    }

    /// What the peer must know.
    pub(crate) fn introduction(&self) -> (Endpoint, Memory) {
        (self.pair.local(), self.ours)
    }

    /// Connects to the peer at `address`, or begins to: see [`Self::progress`].
    pub(crate) fn connect(
        &mut self,
        peer: Endpoint,
        memory: Memory,
        role: Role,
        address: SocketAddr,
        nonce: Nonce,
    ) -> Result<(), Reason> {
        let ring = u64::from(memory.ring);
        if !ring.is_power_of_two() || !(RINGS[1]..=RINGS[0]).contains(&ring) {
            return Err(Reason::BadOffer);
        }
        // Both use the smaller of the two.
        let ring = ring.min(self.inbox.room.size);
        self.inbox.room.size = ring;
        self.outbox.size = ring;
        self.theirs = memory;
        match (peer.manager, role) {
            (manager, _) if manager.is_some() != self.pair.needs_manager() => Err(Reason::OtherTransport),
            (None, _) => self.pair.admit(peer),
            (Some(_), Role::Server) => self.pair.listen(address.ip(), nonce),
            (Some(port), Role::Client) => self.pair.approach(SocketAddr::new(address.ip(), port), nonce),
        }
    }

    /// How far the connection has got; goes on with it, without waiting.
    pub(crate) fn progress(&self) -> Progress {
        self.pair.progress()
    }

    fn board(&self) -> &Board {
        self.inbox.board()
    }

    fn figures(&self) -> &Figures {
        self.inbox.figures()
    }

    /// Whether this process may use it.
    pub(crate) fn is_ours(&self) -> bool {
        self.pair.is_ours()
    }

    /// Whether this process may use it, and it works.
    pub(crate) fn is_usable(&self) -> bool {
        self.is_ours() && !self.pair.is_broken()
    }

    /// Whether the peer has said that it is connected.
    pub(crate) fn peer_is_ready(&self) -> bool {
        self.progress() == Progress::Connected && self.board().ready.load(Ordering::Acquire) != 0
    }

    /// Whether it has failed because the peer's host did not answer.
    pub(crate) fn was_unanswered(&self) -> bool {
        self.pair.was_unanswered()
    }

    /// Tells the peer that this side is connected, and waits until it can know. Fails with `EPIPE` once it `has_gone`.
    pub(crate) fn announce_ready(&self, has_gone: impl Fn() -> bool) -> Result<(), Errno> {
        self.write_words(&self.pair.begin(1)?, std::mem::offset_of!(Board, ready), &[CONNECTED])?;
        self.flush(has_gone)
    }

    fn their_board(&self, offset: usize) -> Spot {
        Spot { address: self.theirs.inbox + offset as u64, key: self.theirs.inbox_key }
    }

    /// Writes words to the peer's board, at this offset.
    fn write_words(&self, poster: &Poster<'_>, offset: usize, words: &[u64]) -> Result<(), Errno> {
        poster.post([self.words(poster, 0, offset, words)]).map(drop)
    }

    /// A request that writes words to the peer's board, at this offset; to be posted behind `before` others.
    fn words(&self, poster: &Poster<'_>, before: u64, offset: usize, words: &[u64]) -> Request {
        // They stay there as long as the request is in flight.
        let slot = (self.pair.last_posted() + 1 + before) % DEPTH * SLOT_BYTES;
        let target = self.place.outbox.as_ptr().wrapping_add(slot as usize).cast::<u64>();
        let count = words.len().min(SLOT_BYTES as usize / 8);
        // SAFETY: a slot of the stage, which has room for so many words.
        unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), target, count) };
        let from =
            Spot { address: self.place.outbox.as_ptr().expose_provenance() as u64 + slot, key: self.keys[1] };
        Request::write(from, self.their_board(offset), count * 8).inline(poster.inline())
    }

    /// Bytes of the outgoing ring, and of the stream, that the peer is known to have consumed.
    fn credit(&self) -> [u64; 2] {
        if let Some(credit) = self.board().credit.read() {
            self.learn_credit(credit);
        }
        [0, 1].map(|index: usize| self.known_credit[index].load(Ordering::Acquire))
    }

    fn learn_credit(&self, credit: [u64; 2]) {
        for (known, credit) in self.known_credit.iter().zip(credit) {
            known.fetch_max(credit, Ordering::AcqRel);
        }
    }

    // ---- receiving

    /// The half that receives.
    pub(crate) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// Drops `count` bytes that [`Inbox::peek`] has seen, and tells whether to wake a sender.
    pub(crate) fn consume(&self, control: &Control, count: usize) -> Result<Popped, Lie> {
        let position = self.inbox.drop_bytes(control, count as u64)?;
        fence(Ordering::SeqCst);
        let emptied = control.is_empty();
        if self.is_frozen() {
            // Nobody hears of it.
            return Ok(Popped { bytes: count, ring: false, emptied });
        }
        // A sender that sleeps for space has said so; it is woken when a good part is free.
        let size = self.inbox.room.size;
        let free = size.saturating_sub(self.inbox.scanned_ahead(position));
        let room = emptied || free >= size / 4;
        // While a sleeper's words arrive, nobody knows whom they leave asleep: one bell too many does no harm.
        let armed = self.board().armed.read();
        let ring = room && armed.is_none_or(|armed| control.claim_space_bell_of(armed[1]));
        if ring || position - self.credited.load(Ordering::Relaxed) >= size / 8 {
            let _ = self.give_credit();
        }
        Ok(Popped { bytes: count, ring, emptied })
    }

    /// Drops `count` bytes after [`Self::freeze`], without credit for them: the peer sends them again. False if they are not
    /// all there is.
    pub(crate) fn keep(&self, control: &Control, count: usize) -> bool {
        let all = control.used() == count as u64;
        if all {
            control.tail.0.store(control.head(), Ordering::Release);
        }
        all
    }

    fn give_credit(&self) -> Result<(), Errno> {
        let poster = self.pair.begin(1)?;
        let figures = self.figures();
        let stream = figures.consumed_stream.load(Ordering::Acquire);
        let consumed = figures.consumed.load(Ordering::Acquire);
        let said = Said::of([consumed, stream]);
        self.write_words(&poster, std::mem::offset_of!(Board, credit), &said)?;
        self.credited.store(consumed, Ordering::Relaxed);
        Ok(())
    }

    // ---- sending

    /// Notes what the peer has consumed, as far as it is known.
    pub(crate) fn note_credit(&self, control: &Control) {
        if self.is_frozen() {
            return;
        }
        let stream = self.credit()[1];
        // The peer may be faster than this side's note of what it has posted.
        control.tail.0.fetch_max(stream.min(control.head()), Ordering::AcqRel);
    }

    /// Bytes of the peer's ring that are free.
    fn free(&self) -> Result<u64, Lie> {
        let consumed = self.credit()[0];
        let posted = self.figures().posted.load(Ordering::Relaxed);
        let used = posted.checked_sub(consumed).ok_or(Lie)?;
        self.outbox.size.checked_sub(used).ok_or(Lie)
    }

    /// Whether the stream is writable for poll(2), and for sleepers: a quarter of the ring is free.
    pub(crate) fn has_room(&self) -> bool {
        // Without the send lock the peer may seem to be ahead of this side.
        self.free().map_or(true, |free| free >= self.outbox.size / 4)
    }

    /// Sends as much of `length` bytes as fits in one message.
    ///
    /// # Safety
    /// `source` is readable for `length` bytes.
    pub(crate) unsafe fn push(
        &self,
        control: &Control,
        source: *const u8,
        length: usize,
    ) -> Result<Pushed, Failed> {
        // SAFETY: the caller's promise.
        let bytes = unsafe { self.put(Kind::Data, source, length as u64) }?;
        if bytes == 0 {
            return Ok(Pushed::default());
        }
        control.head.0.position.store(control.head() + bytes, Ordering::Release);
        let broken = self.promise.after_a_message(|| self.board().bells.read().map(|words| words[1]));
        if broken == Broken::AtTheEnd {
            self.give_last_word(|| false);
        }
        let ring = self.claims_bell(control) | (broken == Broken::ByThis);
        Ok(Pushed { bytes: bytes as usize, ring, lapped: false })
    }

    /// After something was posted: whether a sleeping peer has to be rung for. To one that leaves ([`Self::depart`]) it may have come too
    /// late: the fabric has failed, so that this side goes back, too, and sends it again.
    fn claims_bell(&self, control: &Control) -> bool {
        fence(Ordering::SeqCst);
        if self.board().ready.load(Ordering::Relaxed) == LEAVES {
            self.late.store(true, Ordering::Relaxed);
            self.pair.give_up();
        }
        self.board().armed.read().is_none_or(|armed| control.claim_data_bell_of(armed[0]))
    }

    /// Posts one message. Bytes of its payload, 0 if there is no room.
    ///
    /// # Safety
    /// `payload` is readable for `length` bytes.
    unsafe fn put(&self, kind: Kind, payload: *const u8, length: u64) -> Result<u64, Failed> {
        let posted = &self.figures().posted;
        loop {
            let position = posted.load(Ordering::Relaxed);
            let (offset, to_end) = self.outbox.locate(position);
            let free = self.free()?;
            let control = kind != Kind::Data;
            let needed = if control { kind.span(length) } else { 2 * OVERHEAD };
            let reserve = if control { 0 } else { RESERVE };
            if to_end < needed {
                if free < to_end + reserve {
                    return Ok(0);
                }
                // SAFETY: a pad has no payload, and 8 bytes are left.
                let size = unsafe { self.outbox.build(position, Kind::Pad, payload, 0) };
                self.send(Kind::Pad, offset, size)?;
                posted.store(position + to_end, Ordering::Release);
                continue;
            }
            let most = free.saturating_sub(reserve).min(to_end);
            if most < needed {
                return Ok(0);
            }
            let length = length.min(most - OVERHEAD);
            let kind = if control { kind } else { Kind::of_data(length, most, self.order) };
            // SAFETY: readable by the caller's promise; it fits before the ring's end.
            let size = unsafe { self.outbox.build(position, kind, payload, length) };
            self.send(kind, offset, size)?;
            posted.store(position + kind.span(length), Ordering::Release);
            return Ok(length);
        }
    }

    fn send(&self, kind: Kind, offset: u64, size: usize) -> Result<(), Errno> {
        let poster = self.pair.begin(2)?;
        let part = |start: usize, end: usize| {
            let at = offset + start as u64;
            let from = Spot { address: self.outbox.at(at).expose_provenance() as u64, key: self.keys[1] };
            let to = Spot { address: self.theirs.inbox + BOARD_BYTES + at, key: self.theirs.inbox_key };
            Request::write(from, to, end - start).inline(poster.inline())
        };
        match (kind, self.order) {
            (Kind::Packed, _) | (_, Order::OneWrite) => poster.post([part(0, size)]),
            (_, Order::TwoWrites) => poster.post([part(0, size - VALIDITY), part(size - VALIDITY, size)]),
        }
        .map(drop)
    }

    /// Tells the peer how many bytes precede the ring on TCP, and waits until it can know: a bell on TCP must not
    /// overtake this. Fails with `EPIPE` once the peer has closed its end, or its socket, as `is_closed` tells.
    pub(crate) fn announce_switch(
        &self,
        incoming: &Control,
        count: u64,
        is_closed: impl Fn() -> bool,
    ) -> Result<(), Errno> {
        // SAFETY: eight readable bytes.
        match unsafe { self.put(Kind::Switch, count.to_le_bytes().as_ptr(), 8) } {
            Ok(8) => self.flush(|| self.peer_has_gone(incoming) || is_closed()),
            _ => Err(Errno::CONNRESET),
        }
    }

    /// Tells the peer how the stream ends. Whether a sleeper has to be rung for.
    pub(crate) fn announce_end(&self, control: &Control, bits: u32) -> bool {
        // SAFETY: four readable bytes.
        let put = unsafe { self.put(Kind::End, bits.to_le_bytes().as_ptr(), 4) };
        put.is_ok_and(|bytes| bytes > 0) && self.claims_bell(control)
    }

    // ---- sleeping and ending

    /// Whether the peer has closed its end: that has come before its queue pair went.
    fn peer_has_gone(&self, incoming: &Control) -> bool {
        self.inbox.scan(incoming);
        incoming.end() & end::CLOSED != 0
    }

    /// Waits until all that was posted has been done, in the peer's memory. Fails as [`QueuePair::wait_for`] does.
    fn flush(&self, has_gone: impl Fn() -> bool) -> Result<(), Errno> {
        let id = {
            let poster = self.pair.begin(1)?;
            let flushed = self.our_board(std::mem::offset_of!(Board, flushed));
            let Spot { address, key } = self.their_figures();
            let rings = address + std::mem::offset_of!(Figures, rings) as u64;
            poster.read(flushed, Spot { address: rings, key }, 8)?
        };
        self.pair.wait_for(id, has_gone)
    }

    /// Gives the peer this side's word ([`super::word`]). All that was posted before has arrived; the peer had rung `rings`
    /// times then.
    fn give_word(&self, rings: u64) -> Result<(), Errno> {
        let poster = self.pair.begin(1)?;
        let posted = self.figures().posted.load(Ordering::Acquire);
        if self.promise.give(posted, rings) {
            self.write_words(&poster, std::mem::offset_of!(Board, word), &Said::of([posted, rings]))?;
        }
        Ok(())
    }

    /// The process ends: waits until all has arrived, and the peer knows that nothing follows.
    fn give_last_word(&self, has_gone: impl Fn() -> bool) {
        if self.flush(&has_gone).is_ok() && self.give_word(ENDS).is_ok() {
            let _ = self.flush(has_gone);
        }
    }

    /// After [`Self::stop`]: whether the peer's process has ended by itself, without the end of its stream, and all that it
    /// sent has arrived.
    pub(crate) fn has_last_word(&self) -> bool {
        self.board().word.read() == Some([self.inbox.arrived(), ENDS])
    }

    /// The peer is gone: what comes later does not count.
    pub(crate) fn stop(&self, incoming: &Control, outgoing: &Control) {
        self.note_credit(outgoing);
        self.inbox.freeze(incoming);
    }

    /// After [`Self::stop`]: whether no call of the peer's can have sent anything that has not arrived, if `bells` have come in
    /// all.
    pub(crate) fn has_all(&self, bells: u64) -> bool {
        if self.has_last_word() {
            return true;
        }
        let arrived = self.inbox.arrived();
        let Some([announced, _]) = self.board().bells.read() else { return false };
        let word = [arrived, self.figures().rings.load(Ordering::SeqCst)];
        // A bell that nothing announced here was rung for what has been lost.
        bells <= announced
            && (self.vouched.is_for(arrived, announced) || self.board().word.read() == Some(word))
    }

    fn our_board(&self, offset: usize) -> Spot {
        Spot { address: self.ours.inbox + offset as u64, key: self.keys[0] }
    }

    fn their_figures(&self) -> Spot {
        Spot { address: self.theirs.figures, key: self.theirs.figures_key }
    }

    /// Tells the peer how many bells have been counted, before one is rung.
    pub(crate) fn announce_bells(&self, count: &AtomicU64) -> Result<(), Errno> {
        let poster = self.pair.begin(1);
        // With the right to post: of several threads that ring, the last to write says the most. And also in vain, for the bell rings all the same.
        let rings = self.figures().rings.fetch_add(1, Ordering::SeqCst) + 1;
        let (poster, count) = (poster?, count.load(Ordering::SeqCst));
        self.write_words(&poster, std::mem::offset_of!(Board, bells), &Said::of([count, rings]))
    }

    /// Bells that the peer has announced, unless others are at this moment.
    fn bells_announced(&self) -> Option<u64> {
        self.board().bells.read().map(|words| words[0])
    }

    /// Before [`Self::finish`] of many, without waiting: so that those whose peers do not answer find out at the same time, and
    /// not one after the other.
    pub(crate) fn begin_to_finish(&self) {
        // One that has a lot under way is waiting already.
        if self.pair.has_room() {
            let _ = self.give_credit();
        }
    }

    /// Tells the peer a last time what has been consumed, and waits until everything has arrived.
    pub(crate) fn finish(&self, incoming: &Control) {
        let _ = self.give_credit();
        let _ = self.flush(|| self.peer_has_gone(incoming));
    }

    /// As [`Self::finish`], where the end of the stream is not announced.
    pub(crate) fn settle(&self, incoming: &Control) {
        let _ = self.give_credit();
        self.give_last_word(|| self.peer_has_gone(incoming));
    }
}

/// Why nothing could be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failed {
    /// The peer wrote impossible positions.
    Lie,
    /// The queue pair has failed.
    Device(Errno),
}

impl From<Lie> for Failed {
    fn from(_: Lie) -> Self {
        Self::Lie
    }
}

impl From<Errno> for Failed {
    fn from(errno: Errno) -> Self {
        Self::Device(errno)
    }
}

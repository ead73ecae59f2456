//! Bare messages between two processes, for whoever measures what a device can do and what the parts of this fabric's message cost
//! (`thallus bench verbs`): a queue pair and its memory as a connection has them, and nothing above.
//!
//! Both sides send in turn: one message is under way, and all of a run are of one size. So there are no credits, and each
//! message has a slot that both know.
//!
//! ```text
//!   counted       payload │ by another WRITE: how many messages there are
//!   whole         u32 header | payload | u32 validity
//!   in two        u32 header | payload │ by another WRITE: u32 validity
//! ```

use std::net::SocketAddr;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use super::board::{BOARD_BYTES, Figures, Memory, Place, STAGE_BYTES};
use super::device;
use super::ffi::access;
use super::manager::Progress;
use super::message::{Kind, OVERHEAD, Room, VALIDITY};
use super::queue::{DEPTH, Endpoint, QueuePair, Request, Spot};
use super::slab::Slab;
use crate::arena::Role;
use crate::greeting::mapped;
use crate::reason::Reason;

/// Bytes of each side's ring.
const RING: u64 = 64 << 10;
/// Bytes that requests are to carry: more than a connection asks for, to see whether that would pay.
const INLINE_WANTED: u32 = 1024;
/// Slots begin at multiples of it.
const LINE: u64 = 64;

/// How a message is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Its payload, and by a second WRITE the number of messages so far: what a ring needs whose messages do not tell
    /// themselves when they are there.
    Counted,
    /// Header, payload and validity word by one WRITE.
    Whole,
    /// The same, with the validity word by a WRITE of its own.
    InTwo,
}

/// The bytes that one run's messages have, and how they are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The way of writing them.
    pub way: Way,
    /// Whether requests carry what they write, as far as the queue pair grants.
    pub inline: bool,
    /// Bytes of a payload, from 1 to [`LONGEST`].
    pub size: u32,
}

/// Bytes of the longest payload.
pub const LONGEST: u32 = 16 << 10;

/// One side: a queue pair, and memory that the other side writes to.
#[derive(Debug)]
pub struct Wire {
    pair: QueuePair,
    place: Place,
    ours: Memory,
    theirs: Memory,
    /// Key of the outbox, for this side's own use.
    key: u32,
    inbox: Room,
    outbox: Room,
    run: Run,
    sent: u64,
    received: u64,
}

// SAFETY: pointers into memory that the queue pair keeps; used by atomics and copies only.
unsafe impl Send for Wire {}

impl Wire {
    /// A queue pair on the device that has the address `local`, and memory for it.
    ///
    /// # Errors
    /// Why a connection from that address would stay on TCP.
    pub fn create(local: SocketAddr) -> Result<Self, Reason> {
        let port = device::of_connection(local)?;
        let slab = Slab::take(RING).map_err(|_| Reason::NoMemory)?;
        let place = slab.place();
        let mut psn = [0u8; 4];
        rustix::rand::getrandom(&mut psn, rustix::rand::GetRandomFlags::empty())
            .map_err(|_| Reason::NoVerbs)?;
        let mut pair = QueuePair::create(port, u32::from_ne_bytes(psn), INLINE_WANTED, slab)?;
        let range =
            |base: NonNull<u8>, length: u64| base.as_ptr()..base.as_ptr().wrapping_add(length as usize);
        // SAFETY: of the slab, which the queue pair keeps; also below.
        let inbox = unsafe { pair.register(range(place.inbox, BOARD_BYTES + RING), access::REMOTE_WRITE) }?;
        // SAFETY: as above.
        let outbox = unsafe { pair.register(range(place.outbox, STAGE_BYTES + RING), 0) }?;
        let ours = Memory {
            inbox: inbox.address,
            inbox_key: inbox.remote_key,
            ring: RING as u32,
            ..Memory::default()
        };
        // SAFETY: inside the slab.
        let at = |base: NonNull<u8>, offset: u64| unsafe { base.add(offset as usize) };
        // SAFETY: the slab stays as long as the queue pair.
        let room = |base: NonNull<u8>, before: u64| unsafe { Room::new(at(base, before), RING) };
        // SAFETY: the slab begins with figures, all atomics. They say that the whole outbox has to be cleared for whoever uses it next.
        unsafe { place.figures.cast::<Figures>().as_ref() }.posted.store(RING, Ordering::Relaxed);
        Ok(Self {
            pair,
            place,
            ours,
            theirs: Memory::default(),
            key: outbox.local_key,
            inbox: room(place.inbox, BOARD_BYTES),
            outbox: room(place.outbox, STAGE_BYTES),
            run: Run { way: Way::Whole, inline: false, size: 1 },
            sent: 0,
            received: 0,
        })
    }

    /// The port that it uses.
    pub fn port(&self) -> &device::Place {
        self.pair.port()
    }

    /// Bytes that a request may carry, as the device has granted.
    pub fn inline_limit(&self) -> usize {
        self.pair.inline
    }

    /// What the other side must know. A server's is complete once it has [connected](Self::connect).
    pub fn introduction(&self) -> (Endpoint, Memory) {
        (self.pair.local(), self.ours)
    }

    /// Connects to the side at `address`, or begins to: see [`Self::is_connected`]. The `nonce` is the client's choice.
    ///
    /// # Errors
    /// The other side has told something that can't be, or the device refuses.
    pub fn connect(
        &mut self,
        peer: Endpoint,
        memory: Memory,
        role: Role,
        address: SocketAddr,
        nonce: [u8; 16],
    ) -> Result<(), Reason> {
        if memory.ring != self.ours.ring {
            return Err(Reason::BadOffer);
        }
        self.theirs = memory;
        match (peer.manager, role) {
            (manager, _) if manager.is_some() != self.pair.needs_manager() => Err(Reason::OtherTransport),
            // As in a greeting: else the other side could make this one write to a third host's memory.
            (None, _) if peer.gid != mapped(address).octets() => Err(Reason::BadOffer),
            (None, _) => self.pair.admit(peer),
            (Some(_), Role::Server) => self.pair.listen(address.ip(), nonce),
            (Some(port), Role::Client) => self.pair.approach(SocketAddr::new(address.ip(), port), nonce),
        }
    }

    /// Whether messages can be sent; goes on with connecting, without waiting.
    ///
    /// # Errors
    /// It can't be connected.
    pub fn is_connected(&self) -> Result<bool, Reason> {
        match self.pair.progress() {
            Progress::Connected => Ok(true),
            Progress::Pending => Ok(false),
            Progress::Failed => Err(Reason::NoRoute),
        }
    }

    /// Begins a run. The other side sends nothing before this side has told it that it has begun.
    ///
    /// # Panics
    /// The size is 0, or beyond [`LONGEST`].
    pub fn begin(&mut self, run: Run) {
        assert!((1..=LONGEST).contains(&run.size), "a size that slots have");
        (self.run, self.sent, self.received) = (run, 0, 0);
        self.inbox.clear(0, RING);
        self.count().store(0, Ordering::Release);
    }

    /// Sends one message.
    ///
    /// # Errors
    /// The queue pair has failed.
    ///
    /// # Panics
    /// The payload has not the run's size.
    pub fn send(&mut self, payload: &[u8]) -> Result<(), Errno> {
        let size = payload.len();
        assert_eq!(size, self.run.size as usize, "as long as all of this run");
        let offset = self.slot(self.sent);
        let poster = self.pair.begin(2)?;
        let limit = if self.run.inline { poster.inline() } else { 0 };
        let part = |start: usize, end: usize| {
            let at = offset + start as u64;
            let from = Spot { address: self.outbox.at(at).expose_provenance() as u64, key: self.key };
            let to = Spot { address: self.theirs.inbox + BOARD_BYTES + at, key: self.theirs.inbox_key };
            Request::write(from, to, end - start).inline(limit)
        };
        let whole = size + OVERHEAD as usize;
        if self.run.way == Way::Counted {
            let target = self.outbox.at(offset);
            // SAFETY: the slot has room for any payload of the run, and nobody else writes there.
            unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), target, size) };
        } else {
            // SAFETY: readable for its length; the slot has room for it and its two words.
            unsafe { self.outbox.build(offset, Kind::Data, payload.as_ptr(), size as u64) };
        }
        match self.run.way {
            Way::Counted => {
                let slot = self.sent % DEPTH * size_of::<u64>() as u64;
                let word = self.place.outbox.as_ptr().wrapping_add(slot as usize).cast::<u64>();
                // SAFETY: in the stage, which has room for so many words.
                unsafe { word.write(self.sent + 1) };
                let from = Spot { address: word.expose_provenance() as u64, key: self.key };
                let to = Spot { address: self.theirs.inbox, key: self.theirs.inbox_key };
                poster.post([part(0, size), Request::write(from, to, size_of::<u64>()).inline(limit)])
            }
            Way::Whole => poster.post([part(0, whole)]),
            Way::InTwo => poster.post([part(0, whole - VALIDITY), part(whole - VALIDITY, whole)]),
        }?;
        drop(poster);
        self.sent += 1;
        Ok(())
    }

    /// Copies the next message's payload, if it is there, and leaves it there until [`Self::release`].
    ///
    /// # Errors
    /// The queue pair has failed, or the other side has written something else than messages.
    ///
    /// # Panics
    /// The target has not the run's size.
    pub fn look(&self, target: &mut [u8]) -> Result<bool, Errno> {
        assert_eq!(target.len(), self.run.size as usize, "as long as all of this run");
        let offset = self.slot(self.received);
        let begin = if self.run.way == Way::Counted {
            if self.count().load(Ordering::Acquire) <= self.received {
                return Ok(false);
            }
            offset
        } else {
            match self.inbox.message(offset) {
                Ok(Some(message)) if message.length == target.len() as u64 => offset + 4,
                Ok(None) => return Ok(false),
                Ok(Some(_)) | Err(_) => return Err(Errno::PROTO),
            }
        };
        // SAFETY: inside the slot, which is inside the ring.
        unsafe { std::ptr::copy_nonoverlapping(self.inbox.at(begin), target.as_mut_ptr(), target.len()) };
        Ok(true)
    }

    /// Whether nothing gets through any more, as far as that is known.
    pub fn is_broken(&self) -> bool {
        self.pair.is_broken()
    }

    /// Makes room where the message was that [`Self::look`] has found.
    pub fn release(&mut self) {
        if self.run.way != Way::Counted {
            self.inbox.clear(self.slot(self.received), Kind::Data.span(self.run.size.into()));
        }
        self.received += 1;
    }

    /// Where message `number` of the run begins.
    fn slot(&self, number: u64) -> u64 {
        let bytes = Kind::Data.span(self.run.size.into()).next_multiple_of(LINE);
        number % (RING / bytes) * bytes
    }

    /// How many messages the other side has written, by its account.
    fn count(&self) -> &AtomicU64 {
        // SAFETY: the inbox begins with a page of its own, aligned.
        unsafe { self.place.inbox.cast::<AtomicU64>().as_ref() }
    }
}

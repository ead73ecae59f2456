//! A reliable-connection queue pair with what belongs to it, and one-sided operations on it.
//!
//! Each has a protection domain of its own, so the keys that its peer learns open nothing but this connection's memory.

mod posting;

use std::ffi::c_void;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::device::{Device, Place};
use super::ffi::{
    self, Address, Attributes, Capacity, Cq, GlobalRoute, InitAttributes, Mr, Qp, Verbs, access, mask, state,
};
use super::manager::{Meeting, Nonce, Progress};
use super::slab::Slab;
use crate::lock::Lock;
use crate::process;
use crate::reason::Reason;
use crate::settings::settings;
use crate::uninterrupted::Uninterrupted;

pub(super) use posting::{LONGEST_WAIT, Poster, Request, Spot};

/// Work requests in flight.
pub(super) const DEPTH: u64 = 128;
/// What a connection asks for; the queue pair says what it grants.
pub(super) const INLINE_WANTED: u32 = 256;
/// RDMA READs in flight.
const READS: u8 = 4;

/// The largest number of `enum ibv_mtu`.
const LARGEST_MTU: u32 = 5;
/// Queue pairs and packets are numbered by 24 bits.
const NUMBERS: u32 = 1 << 24;

/// What a peer must know to reach a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Endpoint {
    /// Queue pair number.
    pub number: u32,
    /// First packet sequence number.
    pub psn: u32,
    /// Active MTU of the port (`enum ibv_mtu`).
    pub mtu: u32,
    /// GID of the port.
    pub gid: [u8; 16],
    /// For a device whose queue pairs the connection manager connects, iWARP: the port where the server listens.
    pub manager: Option<u16>,
}

impl Endpoint {
    /// Whether a queue pair can be connected to it without a connection manager: drivers are not relied upon to look at what they are given.
    fn is_sound(&self) -> bool {
        (1..=LARGEST_MTU).contains(&self.mtu) && self.number < NUMBERS && self.psn < NUMBERS
    }
}

/// Memory that the device may reach.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region {
    pub(super) address: u64,
    /// Key for this side's own requests.
    pub(super) local_key: u32,
    /// Key for the peer's.
    pub(super) remote_key: u32,
}

/// A queue pair.
#[derive(Debug)]
pub(super) struct QueuePair {
    verbs: &'static Verbs,
    pd: *mut c_void,
    cq: *mut Cq,
    qp: *mut Qp,
    registered: Vec<*mut Mr>,
    /// What is registered is in it.
    memory: Option<Slab>,
    /// Bytes of the longest region.
    reach: u64,
    place: Place,
    local: Endpoint,
    meeting: Option<Meeting>,
    /// Whether requests can be posted.
    connected: AtomicBool,
    /// Bytes that a request may carry itself.
    pub(super) inline: usize,
    /// The process that made it: forks must not touch it.
    owner: u32,
    /// Held while requests are posted or completions taken.
    posting: Lock,
    posted: AtomicU64,
    completed: AtomicU64,
    broken: AtomicBool,
    /// The peer's host has not answered, and that is why it failed.
    unanswered: AtomicBool,
}

// SAFETY: verbs may be called from any thread; the counters are atomics, changed under `posting`.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

impl std::fmt::Debug for Verbs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Verbs")
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let remains = Remains {
            verbs: self.verbs,
            pd: self.pd,
            cq: self.cq,
            qp: self.qp,
            registered: std::mem::take(&mut self.registered),
            memory: self.memory.take(),
            reach: self.reach,
            meeting: self.meeting.take(),
            owner: self.owner,
        };
        let _uninterrupted = Uninterrupted::begin();
        let mut kept = KEPT.try_lock();
        if let Ok(kept) = &mut kept {
            kept.retain(Remains::must_wait);
        }
        if !remains.must_wait() {
            return;
        }
        match kept {
            Ok(mut kept) => kept.push(remains),
            // Another thread ends one at this moment, or did so when this process was forked.
            Err(_) => std::mem::forget(remains),
        }
    }
}

/// What is left of a queue pair that nobody uses any more.
#[derive(Debug)]
struct Remains {
    verbs: &'static Verbs,
    pd: *mut c_void,
    cq: *mut Cq,
    qp: *mut Qp,
    registered: Vec<*mut Mr>,
    memory: Option<Slab>,
    reach: u64,
    meeting: Option<Meeting>,
    owner: u32,
}

// SAFETY: nobody else has the pointers.
unsafe impl Send for Remains {}

/// Those whose end would block, until another queue pair goes.
static KEPT: Mutex<Vec<Remains>> = Mutex::new(Vec::new());

/// Descriptors of what has not ended yet.
pub(super) fn kept_fds() -> Vec<i32> {
    let Ok(kept) = KEPT.try_lock() else { return Vec::new() };
    kept.iter().filter_map(|remains| remains.meeting.as_ref()).flat_map(Meeting::fds).flatten().collect()
}

impl Remains {
    fn must_wait(&self) -> bool {
        self.owner == process::id() && self.meeting.as_ref().is_some_and(Meeting::blocks)
    }
}

impl Drop for Remains {
    fn drop(&mut self) {
        // The parent's, which a fork has a copy of: its descriptor is the parent's, too.
        if self.owner != process::id() {
            return;
        }
        let verbs = self.verbs;
        let mut failed = 0;
        if !self.qp.is_null() {
            // SAFETY: made by this process, and nobody uses it any more.
            failed |= unsafe { (verbs.destroy_qp)(self.qp) };
        }
        if !self.cq.is_null() {
            // SAFETY: as above.
            unsafe { (verbs.destroy_cq)(self.cq) };
        }
        if let Some(meeting) = &self.meeting {
            meeting.end();
        }
        for &mr in &self.registered {
            // SAFETY: as above.
            failed |= unsafe { (verbs.dereg_mr)(mr) };
        }
        // SAFETY: as above.
        unsafe { (verbs.dealloc_pd)(self.pd) };
        // Otherwise the device may still reach it.
        if let Some(memory) = self.memory.take().filter(|_| failed == 0) {
            memory.put_by(self.reach);
        }
    }
}

impl QueuePair {
    /// Makes one on the port at `place`, ready to be connected: by [`Self::admit`], or by `meeting` if there is one. It keeps
    /// `memory`, and has its requests carry up to `inline` bytes, if the device grants them.
    pub(super) fn create(
        (place, device, meeting): (Place, &'static Device, Option<Meeting>),
        psn: u32,
        inline: u32,
        memory: Slab,
    ) -> Result<Self, Reason> {
        let verbs = Verbs::get().ok_or(Reason::NoVerbs)?;
        let mtu = device.mtu(place.port)?;
        // SAFETY: an open device.
        let pd = unsafe { (verbs.alloc_pd)(device.context) };
        if pd.is_null() {
            return Err(Reason::NoVerbs);
        }
        let manager = meeting.is_some().then_some(0);
        let local = Endpoint { number: 0, psn: psn & 0xff_ffff, mtu, gid: place.gid, manager };
        let mut pair = Self {
            verbs,
            pd,
            cq: std::ptr::null_mut(),
            qp: std::ptr::null_mut(),
            registered: Vec::new(),
            memory: Some(memory),
            reach: 0,
            place,
            local,
            meeting,
            connected: AtomicBool::new(false),
            inline: 0,
            owner: process::id(),
            posting: Lock::new(),
            posted: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            broken: AtomicBool::new(false),
            unanswered: AtomicBool::new(false),
        };
        let null = std::ptr::null_mut();
        // SAFETY: an open device.
        pair.cq = unsafe { (verbs.create_cq)(device.context, DEPTH as i32 + 1, null, null, 0) };
        if pair.cq.is_null() {
            return Err(Reason::NoMemory);
        }
        let mut attributes = InitAttributes {
            send_cq: pair.cq,
            recv_cq: pair.cq,
            capacity: Capacity {
                max_send_wr: DEPTH as u32,
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline,
            },
            kind: ffi::RC,
            ..InitAttributes::default()
        };
        // A device may refuse more than it has instead of granting what it has.
        while pair.qp.is_null() {
            // SAFETY: a live protection domain; the attributes are writable.
            pair.qp = unsafe { (verbs.create_qp)(pd, &raw mut attributes) };
            if pair.qp.is_null() && attributes.capacity.max_inline_data == 0 {
                return Err(Reason::NoMemory);
            }
            if pair.qp.is_null() {
                attributes.capacity.max_inline_data /= 2;
            }
        }
        pair.inline = attributes.capacity.max_inline_data as usize;
        // SAFETY: just made.
        pair.local.number = unsafe { (*pair.qp).number };
        Ok(pair)
    }

    /// Lets the device reach a part of its memory: read by the peer, written by it, or neither.
    ///
    /// # Safety
    /// It is a part of what [`Self::create`] was given.
    pub(super) unsafe fn register(&mut self, memory: Range<*mut u8>, remote: i32) -> Result<Region, Reason> {
        let length = memory.end.addr() - memory.start.addr();
        // SAFETY: a live protection domain; the caller's promise for the memory.
        let mr = unsafe {
            (self.verbs.reg_mr)(self.pd, memory.start.cast(), length, access::LOCAL_WRITE | remote)
        };
        if mr.is_null() {
            return Err(Reason::MemLock);
        }
        // SAFETY: just made.
        let Mr { lkey: local_key, rkey: remote_key, .. } = *unsafe { &*mr };
        self.registered.push(mr);
        self.reach = self.reach.max(length as u64);
        Ok(Region { address: memory.start.expose_provenance() as u64, local_key, remote_key })
    }

    /// Takes the device's reach of the memory that was registered last back.
    pub(super) fn unregister_last(&mut self) {
        if let Some(mr) = self.registered.pop() {
            // SAFETY: made by `register`, and no request refers to it yet.
            unsafe { (self.verbs.dereg_mr)(mr) };
        }
    }

    /// What the peer must know.
    pub(super) fn local(&self) -> Endpoint {
        self.local
    }

    fn initialize(&self) -> Result<(), Reason> {
        let mut attributes = Attributes {
            state: state::INIT,
            access: (access::REMOTE_WRITE | access::REMOTE_READ) as u32,
            port: self.place.port,
            ..Attributes::default()
        };
        self.modify(&mut attributes, mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::ACCESS)
    }

    /// The port that it is on.
    pub(super) fn port(&self) -> &Place {
        &self.place
    }

    /// Whether the connection manager connects it.
    pub(super) fn needs_manager(&self) -> bool {
        self.meeting.is_some()
    }

    /// Server: lets the peer at this address in, if it knows the nonce.
    pub(super) fn listen(&mut self, peer: IpAddr, nonce: Nonce) -> Result<(), Reason> {
        self.initialize()?;
        let meeting = self.meeting.as_ref().ok_or(Reason::NoDevice)?;
        self.local.manager = Some(meeting.listen(peer, nonce, self.local.number, READS)?);
        Ok(())
    }

    /// Client: begins to connect to where the server listens.
    pub(super) fn approach(&self, server: SocketAddr, nonce: Nonce) -> Result<(), Reason> {
        self.initialize()?;
        let meeting = self.meeting.as_ref().ok_or(Reason::NoDevice)?;
        meeting.approach(server, nonce, self.local.number, READS)
    }

    /// How far the connection has got; goes on with it.
    pub(super) fn progress(&self) -> Progress {
        if self.connected.load(Ordering::Acquire) {
            return Progress::Connected;
        }
        // A fork's events are its parent's.
        let Some(meeting) = self.meeting.as_ref().filter(|_| self.is_ours()) else {
            return Progress::Pending;
        };
        let progress = meeting.advance();
        if progress == Progress::Connected {
            self.connected.store(true, Ordering::Release);
        }
        progress
    }

    /// The connection manager's descriptors.
    pub(super) fn manager_fds(&self) -> [Option<i32>; 2] {
        self.meeting.as_ref().map(Meeting::fds).unwrap_or_default()
    }

    /// Lets the peer in: its requests are served from now on.
    pub(super) fn admit(&self, peer: Endpoint) -> Result<(), Reason> {
        if !peer.is_sound() {
            return Err(Reason::BadOffer);
        }
        let settings = &settings().verbs;
        self.initialize()?;
        let mut gid = [0u64; 2];
        for (half, bytes) in gid.iter_mut().zip(peer.gid.as_chunks::<8>().0) {
            *half = u64::from_ne_bytes(*bytes);
        }
        let mut attributes = Attributes {
            state: state::READY_TO_RECEIVE,
            path_mtu: self.local.mtu.min(peer.mtu),
            destination: peer.number,
            receive_psn: peer.psn,
            max_reads_served: READS,
            min_rnr_timer: 12,
            address: Address {
                route: GlobalRoute {
                    destination: gid,
                    source_index: self.place.index,
                    hop_limit: 64,
                    ..GlobalRoute::default()
                },
                service_level: settings.service_level,
                is_global: 1,
                port: self.place.port,
                ..Address::default()
            },
            ..Attributes::default()
        };
        self.modify(
            &mut attributes,
            mask::STATE
                | mask::ADDRESS
                | mask::PATH_MTU
                | mask::DESTINATION
                | mask::RECEIVE_PSN
                | mask::MAX_READS_SERVED
                | mask::MIN_RNR_TIMER,
        )?;
        let mut attributes = Attributes {
            state: state::READY_TO_SEND,
            timeout: settings.timeout,
            retries: settings.retries,
            // Nothing here needs a receive request. 7 would mean without end.
            rnr_retries: 6,
            send_psn: self.local.psn,
            max_reads: READS,
            ..Attributes::default()
        };
        self.modify(
            &mut attributes,
            mask::STATE
                | mask::TIMEOUT
                | mask::RETRIES
                | mask::RNR_RETRIES
                | mask::SEND_PSN
                | mask::MAX_READS,
        )?;
        self.connected.store(true, Ordering::Release);
        Ok(())
    }

    fn modify(&self, attributes: &mut Attributes, mask: u32) -> Result<(), Reason> {
        // SAFETY: a live queue pair.
        match unsafe { (self.verbs.modify_qp)(self.qp, attributes, mask.cast_signed()) } {
            0 => Ok(()),
            _ => Err(Reason::NoRoute),
        }
    }

    /// Whether the device still has it, and it has not failed.
    fn is_alive(&self) -> bool {
        let mut attributes = Attributes::default();
        let mut made_with = InitAttributes::default();
        let asked = mask::STATE.cast_signed();
        // SAFETY: a live queue pair; both structures are writable.
        let failed =
            unsafe { (self.verbs.query_qp)(self.qp, &raw mut attributes, asked, &raw mut made_with) };
        failed == 0 && attributes.state != state::ERROR
    }

    /// Ends all traffic: nothing that the peer still sends reaches this side's memory any more.
    pub(super) fn shut(&self) {
        self.broken.store(true, Ordering::SeqCst);
        if self.is_ours() {
            let mut attributes = Attributes { state: state::ERROR, ..Attributes::default() };
            let _ = self.modify(&mut attributes, mask::STATE);
        }
    }

    /// Uses it no more. The peer may.
    pub(super) fn give_up(&self) {
        self.broken.store(true, Ordering::SeqCst);
    }

    /// The peer's host does not answer.
    fn fail_unanswered(&self) {
        self.unanswered.store(true, Ordering::Relaxed);
        self.broken.store(true, Ordering::SeqCst);
    }

    /// Whether this process may use it.
    pub(super) fn is_ours(&self) -> bool {
        self.owner == process::id()
    }

    /// Whether it has failed: nothing gets through any more.
    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// Whether it has failed because the peer's host did not answer.
    pub(super) fn was_unanswered(&self) -> bool {
        self.is_broken() && self.unanswered.load(Ordering::Relaxed)
    }
}

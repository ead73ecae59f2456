//! One TCP connection as this process sees it: its life from `Plain` to `Active`, and its end.
//!
//! How it leaves TCP is the business of [`crate::search`], the bytes of [`crate::stream`], sleeping of [`crate::wait`].

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::io::Errno;

use crate::arena::{Block, Generation, Role, State, flag};
use crate::control::end;
use crate::experience;
use crate::introduction::{NO, UNKNOWN, YES};
use crate::lending::{self, Area, Memory};
use crate::process;
use crate::reason::Reason;
use crate::search::{Bargain, Waits};
use crate::segment::{Greeting, Nonce, Segment};
use crate::settings::settings;
use crate::spin::Patience;
use crate::uninterrupted::Uninterrupted;
use crate::verbs::link::Link;
use crate::{tcp, waiting};

/// A connection in this process. Forks have a copy each, and share the [`Block`] and the [`Segment`].
pub struct Connection {
    /// What forks share.
    pub block: &'static Block,
    /// Whose the block is as long as the connection lives.
    pub generation: Generation,
    segment: AtomicPtr<Segment>,
    /// As far as this process knows; the kernel decides ([`crate::stream`]).
    pub nonblocking: AtomicBool,
    /// Whose programs are meant to have the connection when they start: [`ANYBODY`]'s in this family, those that one process
    /// becomes, or none (0).
    bequeathed_by: AtomicU32,
    closed: AtomicBool,
    /// Event loops of this process watch the socket for edges only, so that bells may lie in it unread. See
    /// [`Self::watched_for_edges`].
    edges: AtomicU32,
    /// Reads in a row that found nothing, and did not ask the kernel.
    pub(crate) blind_reads: AtomicU32,
    /// Requests of the peer's to go back to TCP that came to nothing, as this process saw.
    pub(crate) refusals: AtomicU32,
    /// What this side had done when the last of them came.
    pub(crate) refused_at: AtomicU64,
    /// Threads of this process that sleep in a call for room, until there is something to read.
    pub(crate) writers: AtomicU32,
    /// How long to spin.
    pub patience: Patience,
    pub(crate) next_attempt: AtomicU32,
    server_port: u16,
    /// Whether a rule names the peer: see [`Self::is_covered`].
    pub(crate) covered: AtomicU8,
    /// Client: the queue pair that its HELLO offers, and by which nonce.
    pub(crate) pending: Mutex<Option<(Link, Nonce)>>,
    pub(crate) bargain: Mutex<Bargain>,
}

/// Of [`Connection::bequeathed_by`].
const ANYBODY: u32 = u32::MAX;

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("block", self.block).finish_non_exhaustive()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let segment = self.segment.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !segment.is_null() {
            // SAFETY: came from Box::into_raw in `enter`, and this is the only owner's last use.
            drop(unsafe { Box::from_raw(segment) });
        }
    }
}

impl Connection {
    /// A connection just made. `server_port` is the port of the end that accepted; of `AF_UNIX` ([`flag::UNIX`]) the
    /// [number](Name::number) of its name, which has been selected.
    pub fn new(block: &'static Block, server_port: u16, nonblocking: bool) -> Self {
        let settings = settings();
        let is_unix = block.has(flag::UNIX);
        if !settings.shm && (is_unix || settings.verbs.peers.is_empty()) {
            block.pin(Reason::Disabled);
        } else if !is_unix && !settings.selects(server_port) {
            block.pin(Reason::NotSelected);
        }
        let has_no_rule = is_unix || settings.verbs.peers.is_empty();
        Self {
            block,
            generation: block.generation(),
            segment: AtomicPtr::new(std::ptr::null_mut()),
            nonblocking: AtomicBool::new(nonblocking),
            bequeathed_by: AtomicU32::new(0),
            closed: AtomicBool::new(false),
            edges: AtomicU32::new(0),
            blind_reads: AtomicU32::new(0),
            refusals: AtomicU32::new(0),
            refused_at: AtomicU64::new(0),
            writers: AtomicU32::new(0),
            patience: Patience::new(),
            next_attempt: AtomicU32::new(experience::patience(block.role(), server_port)),
            server_port,
            covered: AtomicU8::new(if has_no_rule { NO } else { UNKNOWN }),
            pending: Mutex::new(None),
            bargain: Mutex::new(Bargain::default()),
        }
    }

    /// Finds out whether a rule names the peer, before anything else is done with the connection on `fd`.
    pub fn apply_rules(&self, fd: i32) {
        self.is_covered(fd);
    }

    /// An event loop watches the socket for edges, or for its level: then for good, as far as bells are concerned, because
    /// one that nobody takes away would keep such a loop awake.
    pub fn watched_for_edges(&self, edges: bool) {
        const EDGES: u32 = 1;
        const LEVEL: u32 = 2;
        if edges {
            let _ = self.edges.compare_exchange(0, EDGES, Ordering::Relaxed, Ordering::Relaxed);
        } else {
            self.edges.store(LEVEL, Ordering::Relaxed);
        }
    }

    /// Whether only edges on the socket are watched.
    pub(crate) fn is_watched_for_edges(&self) -> bool {
        self.edges.load(Ordering::Relaxed) == 1
    }

    /// The program has said that a descriptor of the connection is to stay open in the programs that it starts.
    pub fn bequeath(&self) {
        self.bequeathed_by.store(ANYBODY, Ordering::Relaxed);
    }

    /// The process `pid` has given the connection, which it was forked with, one more descriptor.
    pub fn copied_by(&self, pid: u32) {
        let _ = self
            .bequeathed_by
            .try_update(Ordering::Relaxed, Ordering::Relaxed, |by| (by != ANYBODY).then_some(pid));
    }

    /// Whether a program that this process starts is meant to use the connection, as far as one can tell.
    pub fn is_bequeathed(&self) -> bool {
        self.bequeathed_by.load(Ordering::Relaxed) == ANYBODY
    }

    /// Whether the program that the process `pid` becomes is: also of one that it has copied itself.
    pub fn is_bequeathed_by(&self, pid: u32) -> bool {
        matches!(self.bequeathed_by.load(Ordering::Relaxed), by if by == ANYBODY || by == pid)
    }

    /// This process has closed its last descriptor: calls still inside must not use the number again.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        if let Some(area) = self.segment().and_then(Segment::mapped_area) {
            area.close();
        }
    }

    /// Whether [`Self::close`] was called.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The segment, once there is one.
    pub fn segment(&self) -> Option<&Segment> {
        let segment = self.segment.load(Ordering::Acquire);
        // SAFETY: set once from a box that lives until `drop`.
        unsafe { segment.as_ref() }
    }

    /// What carries the bytes of an active connection, for logs.
    pub fn fabric(&self) -> &'static str {
        if self.covered.load(Ordering::Relaxed) == YES {
            "verbs, if the peer agrees"
        } else {
            "shared memory"
        }
    }

    /// Whether bytes may have left TCP, so that calls must not reach the kernel unexamined.
    pub fn is_active(&self) -> bool {
        match self.block.state() {
            State::Active => true,
            State::Plain | State::Pinned => false,
            State::Switching => self.settled() == State::Active,
        }
    }

    /// Waits out a decision that another thread is making (some microseconds).
    #[cold]
    fn settled(&self) -> State {
        loop {
            match self.block.state() {
                State::Switching => rustix::thread::sched_yield(),
                state => return state,
            }
        }
    }

    /// Notes one I/O call and, now and then, tries to leave TCP. To be called at the start of a call,
    /// while the connection is plain. `sole` says whether no other thread is inside a call on it, `waits` how this process
    /// waits for it.
    pub fn approach(&self, fd: i32, sole: impl Fn() -> bool, waits: impl Fn() -> Waits) {
        if self.is_covered(fd) {
            return self.await_greeting(fd);
        }
        if self.covered.load(Ordering::Relaxed) == UNKNOWN {
            // Not connected yet.
            return;
        }
        if !settings().shm {
            self.block.pin(Reason::Disabled);
            return;
        }
        let calls = self.block.calls.load(Ordering::Relaxed).wrapping_add(1);
        self.block.calls.store(calls, Ordering::Relaxed);
        if calls >= self.next_attempt.load(Ordering::Relaxed) {
            self.attempt(fd, calls, sole, waits);
        }
    }

    /// Whether it has carried bytes of the application's.
    pub fn has_carried(&self) -> bool {
        let moved = |count: &AtomicU64| count.load(Ordering::Relaxed) != 0;
        moved(&self.block.tcp_sent) || moved(&self.block.tcp_received) || self.is_active()
    }

    /// A hook has seen how the program waits. If that was what an attempt missed, the next call makes another.
    #[cold]
    pub fn wait_was_seen(&self) {
        if self.block.state() == State::Plain && self.block.reason() == Reason::UnseenWait {
            let next = self.block.calls.load(Ordering::Relaxed).saturating_add(1);
            self.next_attempt.fetch_min(next, Ordering::Relaxed);
        }
    }

    /// Has the kernel serve a call on a connection that has not left its socket, and `count` its bytes.
    pub fn by_kernel(&self, call: impl FnOnce() -> isize, count: impl FnOnce(isize)) -> isize {
        let uncounted = self.is_unix().then_some(&self.block.uncounted);
        if let Some(uncounted) = uncounted {
            uncounted.fetch_add(1, Ordering::SeqCst);
        }
        let result = call();
        count(result);
        if let Some(uncounted) = uncounted {
            uncounted.fetch_sub(1, Ordering::SeqCst);
        }
        result
    }

    /// Whether it is an `AF_UNIX` stream, not TCP.
    pub fn is_unix(&self) -> bool {
        self.block.has(flag::UNIX)
    }

    pub(crate) fn enter(&self, fd: BorrowedFd<'_>, segment: Segment) {
        use rustix::net::sockopt;
        waiting::note_taken(&self.socket(fd.as_raw_fd(), &segment));
        if self.is_unix() {
            self.segment.store(Box::into_raw(Box::new(segment)), Ordering::Release);
            return;
        }
        // A bell is one small segment: Nagle's algorithm would hold it back until the last one is acknowledged,
        // which the peer delays (40 ms).
        let nodelay = sockopt::tcp_nodelay(fd).unwrap_or(false);
        let cork = sockopt::tcp_cork(fd).unwrap_or(false);
        self.block.nodelay.store(u32::from(nodelay), Ordering::Relaxed);
        self.block.cork.store(u32::from(cork), Ordering::Relaxed);
        if tcp::tells_inq(fd) {
            // Nothing is stored if not: it may have been switched on since.
            self.block.inq.store(1, Ordering::Relaxed);
        }
        let _ = sockopt::set_tcp_cork(fd, false);
        let _ = sockopt::set_tcp_nodelay(fd, true);
        self.segment.store(Box::into_raw(Box::new(segment)), Ordering::Release);
        self.tell_linger(fd);
    }

    /// Tells the peer whether this side resets the connection when it dies: TCP's reset may be for bells alone, and does not tell.
    pub fn tell_linger(&self, fd: BorrowedFd<'_>) {
        let Some(segment) = self.segment().filter(|segment| !segment.is_alone() && !self.is_unix()) else {
            return;
        };
        let end = &segment.outgoing().rare.0.end;
        match rustix::net::sockopt::socket_linger(fd) {
            Ok(Some(Duration::ZERO)) => end.fetch_or(end::ABORTS, Ordering::SeqCst),
            _ => end.fetch_and(!end::ABORTS, Ordering::SeqCst),
        };
    }

    /// connect(2) is about to be called. Should it end the connection (`AF_UNSPEC`), the kernel's reset is to be one to the peer, whose
    /// threads it wakes before this one comes to say more. [`Self::tell_linger`] undoes it.
    pub fn may_be_disconnected(&self) {
        if let Some(segment) = self.segment().filter(|segment| !segment.is_alone() && !self.is_unix()) {
            segment.outgoing().rare.0.end.fetch_or(end::ABORTS, Ordering::SeqCst);
        }
    }

    /// Gives the socket the options back that the program has set, as far as [`Self::enter`] has changed them.
    pub(crate) fn restore_options(&self, fd: i32) {
        use rustix::net::sockopt;
        if self.is_unix() {
            return;
        }
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        let _ = sockopt::set_tcp_nodelay(socket, self.block.nodelay.load(Ordering::Relaxed) != 0);
        let _ = sockopt::set_tcp_cork(socket, self.block.cork.load(Ordering::Relaxed) != 0);
    }

    /// The program has set `TCP_NODELAY` or `TCP_CORK`, whichever `name` is, as the block tells. Bells need the one on and the other off; a
    /// socket that has none to carry any more is as the program wants it.
    pub fn keep_bells_prompt(&self, fd: i32, name: i32) {
        use rustix::net::sockopt;
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        let is_cork = name == libc::TCP_CORK;
        let set = |on| match is_cork {
            true => sockopt::set_tcp_cork(socket, on),
            false => sockopt::set_tcp_nodelay(socket, on),
        };
        let has_none = || {
            self.segment().is_none_or(|segment| {
                segment.link().is_none() && (self.has_returned() || segment.is_refused())
            })
        };
        if !has_none() {
            let _ = set(!is_cork);
        }
        if has_none() {
            // Another thread may just have given it back what was wanted before. To say it again would push what is held back.
            let wanted = if is_cork { &self.block.cork } else { &self.block.nodelay };
            let wanted = wanted.load(Ordering::SeqCst) != 0;
            let is = if is_cork { sockopt::tcp_cork(socket) } else { sockopt::tcp_nodelay(socket) };
            if is != Ok(wanted) {
                let _ = set(wanted);
            }
        }
    }

    /// Keeps the connection on TCP because of what the application is about to do. False if it has left TCP
    /// already.
    pub fn pin(&self, fd: i32, reason: Reason) -> bool {
        if !self.may_pin(reason) {
            return false;
        }
        loop {
            match self.block.state() {
                State::Plain | State::Pinned if self.block.pin(reason) => {
                    // A guest would close its copies of what this process has offered, which would then be lost.
                    if !process::is_guest()
                        && let Ok(mut bargain) = self.bargain.try_lock()
                    {
                        bargain.withdraw();
                    }
                    return true;
                }
                State::Active => return self.withdraw(fd, reason) || self.decline(fd, reason, None),
                _ => {
                    self.settled();
                }
            }
        }
    }

    /// Server: goes back to TCP for good, unless bytes may have left it, or the side buffer has taken some from it.
    fn withdraw(&self, fd: i32, reason: Reason) -> bool {
        let _uninterrupted = Uninterrupted::begin();
        // Whoever fills the side buffer does so under this lock, and only while the connection is active.
        let Ok(_guard) = self.lock_receiving(fd) else { return false };
        // The kernel has forgotten a reset of which this library has been told and the application has not.
        let knows_more = || self.segment().is_some_and(|segment| self.untold_reset(segment).is_some());
        let withdrawn = self.block.role() == Role::Server
            && self.side_length() == 0
            && !knows_more()
            && self
                .segment()
                .is_some_and(|segment| segment.greeting() == Greeting::Done && segment.link().is_none())
            && self.segment().is_some_and(Segment::refuse)
            && self.block.advance(State::Active, State::Switching);
        if withdrawn {
            self.restore_options(fd);
            self.block.pin_switching(reason);
        }
        withdrawn
    }

    /// Has later connections learn from this one, whose last descriptor on this host is closed.
    pub fn teach(&self) {
        let (block, load) = (self.block, |count: &AtomicU64| count.load(Ordering::Relaxed));
        let calls = u64::from(block.calls.load(Ordering::Relaxed));
        let (calls, shared) = match self.segment() {
            Some(segment) if segment.link().is_none() => {
                // Those over memory are not counted. They are taken to be as large as the ones before.
                let tcp = load(&block.tcp_sent) + load(&block.tcp_received);
                let ring = load(&block.ring_sent) + load(&block.ring_received);
                let calls = calls.saturating_add(ring.saturating_mul(calls) / tcp.max(1));
                (calls, Some(segment.shares_processor()))
            }
            None if block.state() == State::Plain => (calls, None),
            // What came after that could not leave TCP, and is not counted.
            None if block.reason() == Reason::ShutdownBeforeUpgrade => (calls, None),
            _ => return,
        };
        let pace = || match self.bargain.try_lock().ok().and_then(|bargain| bargain.begun) {
            Some((time, calls)) if shared.is_some() => (time, u64::from(calls)),
            _ => (block.age(), calls),
        };
        experience::ended(block.role(), self.server_port, calls, pace, shared);
    }

    /// Internal file descriptors that belong to this connection.
    pub fn internal_fds(&self) -> [Option<i32>; 6] {
        let bargain = self.bargain.try_lock().map_or([None; 2], |bargain| {
            [&bargain.offer, &bargain.arrived].map(|fd| fd.as_ref().map(|fd| fd.as_fd().as_raw_fd()))
        });
        let link = self
            .segment()
            .and_then(Segment::link)
            .map(Link::internal_fds)
            .or_else(|| self.pending.try_lock().ok()?.as_ref().map(|(link, _)| link.internal_fds()));
        let [wake, manager, way] = link.unwrap_or_default();
        let mail = self.segment().and_then(|segment| segment.exchange().mail_fd());
        [bargain[0], bargain[1], wake, manager, way, mail]
    }

    /// What a waiting call has to watch beside the socket: it becomes readable when the connection goes back to TCP.
    pub fn wake_fd(&self) -> Option<i32> {
        self.segment().and_then(Segment::link).map(|link| link.wake().as_raw_fd())
    }

    /// The memory that the two ends lend each other. What has been lent is of use also after a return to TCP, but no more
    /// is to be allocated then. Fails as [`Segment::area`] does.
    pub fn area(&self) -> Result<Arc<Area>, Errno> {
        self.segment().filter(|_| self.is_active()).ok_or(Errno::OPNOTSUPP)?.area()
    }

    /// [`Self::area`], if this process has used it before; nothing is mapped for that. `EOPNOTSUPP` where there is none.
    pub fn mapped_area(&self) -> Result<Option<&Area>, Errno> {
        let segment = self.segment().filter(|segment| self.is_active() && segment.has_areas());
        Ok(segment.ok_or(Errno::OPNOTSUPP)?.mapped_area())
    }

    /// Allocates memory of [`Self::area`].
    ///
    /// # Errors
    /// As [`Area::allocate`]; `EOPNOTSUPP` where there is no area, or the connection is back on TCP.
    pub fn allocate(&self, bytes: usize) -> Result<Memory, Errno> {
        if self.has_returned() {
            return Err(Errno::OPNOTSUPP);
        }
        let area = self.area()?;
        let memory = area.allocate(bytes);
        if !self.block.has(flag::LENDS) && area.is_owner() {
            self.block.raise(flag::LENDS);
        }
        memory
    }

    /// Whether [`Self::allocate`] may succeed in this process: looks at nothing that has to be mapped first.
    pub fn can_lend(&self) -> bool {
        let Ok(area) = self.mapped_area() else { return false };
        let is_others = self.block.has(flag::LENDS) && !area.is_some_and(Area::is_owner);
        let has_room = || area.is_some() || lending::fits_address_space();
        !self.has_returned() && lending::is_allowed() && !is_others && has_room()
    }

    /// Whether the process at the other end was, when they met on this host, one that may do anything to this one anyway.
    pub fn peer_is_trusted(&self) -> bool {
        self.segment().is_some_and(Segment::peer_is_trusted)
    }

    /// Whether it has left TCP and gone back.
    pub fn has_returned(&self) -> bool {
        self.block.has(flag::RETURNED)
    }
}

//! What poll(2) would say of an active connection, and what a kernel event on its socket means.
//!
//! The socket underneath is nearly always writable, and readable when bells lie in it: neither is the
//! application's readiness. Waiting calls ask [`Connection::readiness`] before they sleep, arm, sleep on
//! [`Connection::kernel_interest`], and pass what woke them to [`Connection::interpret`].

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use crate::arena::flag;
use crate::connection::Connection;
use crate::control::{NOT_SWITCHED, Wakes, end};
use crate::introduction::YES;
use crate::segment::{Greeting, Segment};
use crate::{tcp, waiting};

/// poll(2) bits, which epoll shares.
pub mod bit {
    /// Readable.
    pub const IN: u32 = 0x1;
    /// Urgent data.
    pub const PRI: u32 = 0x2;
    /// Writable.
    pub const OUT: u32 = 0x4;
    /// A pending error.
    pub const ERR: u32 = 0x8;
    /// Both directions are shut.
    pub const HUP: u32 = 0x10;
    /// `POLLRDNORM`.
    pub const RDNORM: u32 = 0x40;
    /// `POLLWRNORM`.
    pub const WRNORM: u32 = 0x100;
    /// `POLLWRBAND`, which only `AF_UNIX` reports.
    pub const WRBAND: u32 = 0x200;
    /// The peer sends nothing more.
    pub const RDHUP: u32 = 0x2000;
    /// Every bit that means readable.
    pub const READ: u32 = IN | RDNORM;
    /// Every bit that means writable.
    pub const WRITE: u32 = OUT | WRNORM;
    /// What poll reports unasked.
    pub const ALWAYS: u32 = ERR | HUP;

    /// Whether bytes, space or the end of the stream are `asked` for.
    pub fn is_specific(asked: u32) -> bool {
        asked & (READ | WRITE | RDHUP) != 0
    }
}

/// What a [`Connection::glimpse`] shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Glimpse {
    /// Nothing is to be reported.
    Nothing,
    /// Bytes, and nothing else.
    Bytes,
    /// [`Connection::readiness`] knows more.
    Unusual,
}

/// What may make poll(2) report more than bytes and space.
const ENDINGS: u32 = flag::PEER_GONE | flag::SHUT_RD | flag::SHUT_WR | flag::RESET;

impl Connection {
    /// The bits that hold now, as far as memory shows; those that mean writable only if some are `asked` for. What is still
    /// on TCP the kernel has to be asked for: see [`Self::kernel_interest`].
    pub fn readiness(&self, asked: u32) -> u32 {
        let Some(segment) = self.segment() else { return 0 };
        let ended = segment.incoming().end();
        let mut bits = if self.readable() { bit::READ } else { 0 };
        if ended & end::OF_STREAM != 0 || self.block.has(ENDINGS) {
            bits |= self.ending(segment, ended);
        }
        if asked & bit::WRITE == 0 {
            return bits;
        }
        let switched = self.block.send_switched.load(Ordering::Acquire) != 0;
        let by_kernel = !switched && !segment.is_ready();
        let unwanted = if self.is_unix() {
            // The kernel says so of a write that finds nobody.
            self.block.has(flag::PEER_GONE) || ended & (end::CLOSED | end::DEAF) != 0
        } else {
            // A write that fails at once. Of one by the kernel's socket the kernel says so: an end of the peer's stream alone makes no room.
            self.block.has(flag::SHUT_WR)
                || !by_kernel && (self.block.has(flag::PEER_GONE) || ended & (end::CLOSED | end::DEAF) != 0)
        };
        if unwanted || (!by_kernel && self.ring_has_space(segment)) {
            bits |= bit::WRITE | if self.is_unix() { bit::WRBAND } else { 0 };
        }
        bits
    }

    /// As [`Self::readiness`], once the connection has gone back to TCP if it has to: until then memory calls it readable, and the program
    /// might find nothing. The peer may ask for that at any moment.
    pub fn readiness_when_mended(&self, fd: i32, asked: u32) -> u32 {
        let mut bits = 0;
        for _ in 0..2 {
            let mended = if self.is_failing() { self.mend(fd) } else { Ok(()) };
            bits = self.readiness(asked);
            if bits & bit::READ == 0 || mended.is_err() || !self.is_failing() {
                break;
            }
        }
        bits
    }

    /// What there is for who does not ask for space, in few steps: an event loop asks that of each connection all the time.
    #[inline]
    pub fn glimpse(&self) -> Glimpse {
        const UNUSUAL: u32 = ENDINGS | flag::RETURNED;
        let Some(segment) = self.segment() else { return Glimpse::Unusual };
        let incoming = segment.incoming();
        if segment.is_alone()
            || self.block.has(UNUSUAL)
            || self.block.is_unwanted()
            || incoming.end() != 0
            || segment.has_request()
        {
            return Glimpse::Unusual;
        }
        // Both cache lines come at once, not the second after the first.
        segment.expect();
        if incoming.is_empty() {
            // After that: bytes of the ring may be moved there.
            if self.side_length() > 0 { Glimpse::Unusual } else { Glimpse::Nothing }
        } else if self.block.recv_switched.load(Ordering::Acquire) != 0 {
            Glimpse::Bytes
        } else {
            Glimpse::Unusual
        }
    }

    /// The bits that follow from a direction's end, where the peer has announced `ended`.
    #[cold]
    fn ending(&self, segment: &Segment, ended: u32) -> u32 {
        let mut bits = 0;
        let receive_shut = self.ends_with(ended) || self.block.has(flag::SHUT_RD);
        if receive_shut {
            bits |= bit::RDHUP | bit::READ;
        }
        // On `AF_UNIX` the peer's end shuts this side's sending, too (`unix_shutdown`, `unix_release_sock` of net/unix/af_unix.c).
        let refused = self.is_unix() && (self.block.has(flag::PEER_GONE) || ended & end::UNWANTED != 0);
        if receive_shut && (self.block.has(flag::SHUT_WR) || refused || self.reset(segment).is_some()) {
            bits |= bit::HUP;
        }
        if self.untold_reset(segment).is_some() {
            // It ends both directions at once, also where bytes before it are still on TCP.
            bits |= bit::ERR | bit::HUP | bit::RDHUP | bit::READ;
        }
        bits
    }

    /// Whether the end of the peer's stream is to be seen.
    pub fn peer_has_ended(&self) -> bool {
        self.segment().is_some_and(|segment| self.ends_with(segment.incoming().end()))
    }

    fn ends_with(&self, ended: u32) -> bool {
        (self.block.has(flag::PEER_GONE) || ended & end::FIN != 0)
            && (self.recv_settled() || self.block.has(flag::ALL_HERE))
    }

    /// Whether the peer is known to be gone, and the connection has not returned to TCP.
    pub fn is_gone(&self) -> bool {
        self.block.has(flag::PEER_GONE) && !self.block.has(flag::RETURNED)
    }

    /// What to tell whoever asks for nothing, so waits for hangups and errors, after the kernel has reported `events`. Its reset
    /// may be for bells alone, and no more than the end of the stream: as long as there is something to read, it says nothing.
    pub fn hangup(&self, events: u32, asked: u32) -> u32 {
        let told = events & bit::ALWAYS != 0 && !bit::is_specific(asked) && self.is_gone();
        if told && !self.has_unread() { bit::HUP } else { 0 }
    }

    /// Whether bytes are there to be read.
    pub fn has_unread(&self) -> bool {
        self.side_length() > 0 || self.segment().is_some_and(|segment| !segment.incoming().is_empty())
    }

    /// Whether bytes are still on TCP: memory does not show them.
    pub fn has_bytes_on_tcp(&self, fd: i32) -> bool {
        let is_greeted = || self.segment().is_some_and(|segment| segment.greeting() == Greeting::Done);
        if self.recv_settled()
            || self.block.has(flag::BELLS_FIRST)
            || self.covered.load(Ordering::Relaxed) == YES && !is_greeted()
        {
            // Or they may be a greeting, a frame, or bells.
            return false;
        }
        !tcp::has_nothing(fd)
    }

    /// Whether every byte that came over TCP has been taken.
    pub fn recv_settled(&self) -> bool {
        if self.block.recv_switched.load(Ordering::Acquire) != 0 || self.block.has(flag::PEER_GONE) {
            return true;
        }
        if self.block.has(flag::RETURNED) {
            return false;
        }
        let Some(segment) = self.segment() else { return false };
        let at = segment.incoming().rare.0.switched_at.load(Ordering::Acquire);
        at != NOT_SWITCHED && self.block.tcp_received.load(Ordering::Relaxed) >= at
    }

    /// How many bytes the peer has sent by the kernel's socket, if it sends no more there: over `AF_UNIX`, where the kernel counts none, all of
    /// them have come then. `None` as long as it may, or may again.
    pub fn all_of_kernel(&self) -> Option<u64> {
        let at = self.segment()?.incoming().rare.0.switched_at.load(Ordering::Acquire);
        (at != NOT_SWITCHED && !self.block.has(flag::RETURNED)).then_some(at)
    }

    /// Has [`Self::readiness`] tell of the end of the peer's stream, if bytes before it are all that is still to come.
    pub fn find_the_end(&self, fd: i32) {
        if let Some(segment) = self.segment() {
            self.look_for_the_end(fd, segment);
        }
    }

    /// Finds out whether the end of the peer's stream is all that is still to come, though bytes before it are unread: then
    /// it can be seen.
    fn look_for_the_end(&self, fd: i32, segment: &Segment) {
        if segment.incoming().end() & end::FIN == 0 || self.recv_settled() || self.block.has(flag::ALL_HERE) {
            return;
        }
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let unread = tcp::unread(unsafe { BorrowedFd::borrow_raw(fd) }).unwrap_or(0);
        if unread >= waiting::tcp_left(&self.socket(fd, segment)) {
            self.block.raise(flag::ALL_HERE);
        }
    }

    /// What a poll on the socket must ask for, given what the application asked: bells come as readable,
    /// and writable is the kernel's business only while this side still sends over TCP.
    pub fn kernel_interest(&self, asked: u32) -> u32 {
        let sends_by_tcp = self.block.send_switched.load(Ordering::Acquire) == 0
            && !self.segment().is_some_and(|segment| segment.is_ready());
        let write = if sends_by_tcp { asked & bit::WRITE } else { 0 };
        // Urgent data comes only before that.
        bit::IN | bit::RDHUP | write | (asked & bit::PRI)
    }

    /// Announces a sleeper in a waiting call: for data, and for space if `asked` wants to write. Takes
    /// spent bells away, so that the sleep is one. False if bells or bytes had to stay that would keep
    /// waking a call which does not ask for data. Always followed by [`Self::disarm`].
    pub fn arm(&self, fd: i32, asked: u32, wakes: Wakes) -> bool {
        let Some(segment) = self.segment() else { return true };
        if asked & bit::WRITE != 0 {
            self.grow_for_sleeper(fd, segment);
        }
        let side = self.socket(fd, segment);
        let clear = waiting::arm(&side, asked & bit::READ != 0, asked & bit::WRITE != 0, wakes);
        self.sleeps(fd, segment);
        clear
    }

    /// Undoes [`Self::arm`].
    pub fn disarm(&self, asked: u32, wakes: Wakes) {
        self.disarm_cold(asked & bit::WRITE != 0, wakes);
    }

    /// Which bells wake a thread of this process that sleeps on the connection, and on the process's ear if `listens`.
    pub fn wakes(&self, listens: bool) -> Wakes {
        let by_chime = listens && self.segment().is_some_and(|segment| segment.exchange().has_given());
        if by_chime { Wakes::ByChime } else { Wakes::ByTcp }
    }

    /// Arms for a registration in an event loop: for data, and for space if it `writes`. Bells that are left over
    /// are taken away if nobody needs them. Always followed by one [`Self::disarm_cold`] of the same kind.
    pub fn arm_cold(&self, fd: i32, writes: bool, wakes: Wakes) {
        let Some(segment) = self.segment() else { return };
        if writes {
            self.grow_for_sleeper(fd, segment);
            self.make_way(fd);
        }
        waiting::arm_words(&self.socket(fd, segment), writes, wakes);
        self.armed(fd, segment);
    }

    /// For a registration in an event loop that waits for space: takes bytes that the peer had sent over TCP, and that the program does not
    /// read yet, from before the bell, for which they may leave no room.
    pub fn make_way(&self, fd: i32) {
        let Some(segment) = self.segment() else { return };
        let side = self.socket(fd, segment);
        if !waiting::looks_settled(&side) {
            waiting::make_way(&side);
        }
    }

    /// A registration in an event loop has been announced, and the peer knows.
    pub(crate) fn armed(&self, fd: i32, segment: &Segment) {
        if !self.may_leave_bells(segment) {
            waiting::take_leftovers(&self.socket(fd, segment));
        }
        self.sleeps(fd, segment);
    }

    /// A sleeper has been announced, and looks whether it may sleep.
    pub(crate) fn sleeps(&self, fd: i32, segment: &Segment) {
        self.look_for_the_end(fd, segment);
        self.mend_if_failing(fd);
    }

    /// To be called by a sleeper after [`Self::arm`] that has taken a report of bells as old, before it looks once more: the
    /// peer may have rung for it already, and rings again.
    pub fn renew(&self, fd: i32, asked: u32) {
        if let Some(segment) = self.segment() {
            waiting::renew(&self.socket(fd, segment), true, asked & bit::WRITE != 0);
            // Its frame may be among what was reported, and so may its end, of which memory knows nothing.
            self.look_for_down(fd);
            if self.recv_settled() {
                self.peer_is_gone(fd);
            } else if self.peer_has_closed(fd) {
                // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
                let socket = unsafe { BorrowedFd::borrow_raw(fd) };
                if !self.is_before_frame() || tcp::unread(socket) == Ok(0) {
                    self.note_gone(fd);
                }
            }
            // The answer to a write after the end, which whoever made it may not have noted yet.
            if self.block.has(flag::VOID) && tcp::is_over(fd) {
                self.block.raise(flag::RESET);
            }
            self.mend_if_failing(fd);
        }
    }

    /// The kernel has reported something to read, and memory shows nothing, or no bell. Between hosts a bell may overtake what it announces, and
    /// nobody rings again for sleepers whom it was for: waits for that. To be called where such sleepers do not look by themselves;
    /// for data, and for space if it `writes`.
    pub fn overtaken(&self, fd: i32, writes: bool) {
        let Some(segment) = self.segment() else { return };
        if segment.link().is_some() {
            waiting::renew(&self.socket(fd, segment), true, writes);
            self.mend_if_failing(fd);
        }
    }

    /// Between hosts: whether what the kernel has reported may be a bell whose count has not arrived. Who drains one that is counted
    /// renews what sleepers have announced.
    pub fn may_have_uncounted_bell(&self) -> bool {
        self.segment().is_some_and(|segment| {
            segment.link().is_some() && self.recv_settled() && self.unread_bells(segment) == 0
        })
    }

    pub(crate) fn mend_if_failing(&self, fd: i32) {
        if self.is_failing() {
            let _ = self.mend(fd);
        }
    }

    /// Undoes [`Self::arm_cold`].
    pub fn disarm_cold(&self, writes: bool, wakes: Wakes) {
        let Some(segment) = self.segment() else { return };
        waiting::disarm(segment.incoming(), segment.outgoing(), writes, wakes);
    }

    /// The application's readiness, after the kernel reported `events` on the socket.
    pub fn interpret(&self, fd: i32, events: u32) -> u32 {
        self.observe(fd, events) | self.readiness_when_mended(fd, bit::WRITE)
    }

    /// Takes note of `events` that the kernel reported on the socket. The bits among them that are the application's,
    /// and that memory does not show.
    pub fn observe(&self, fd: i32, events: u32) -> u32 {
        let Some(segment) = self.segment() else { return events };
        if let Some(link) = segment.link() {
            link.doubt();
        }
        let mut bits = events & bit::PRI;
        if let Ok(_guard) = self.lock_receiving(fd) {
            self.look_for_down(fd);
            let _ = self.mend_locked(fd, segment);
            if !self.keeps_bells() && !self.greet(fd, segment) {
                // Nothing of the application's is there yet.
                bits |= events & bit::ALWAYS;
            } else if self.recv_settled() {
                if events & (bit::IN | bit::RDHUP | bit::ALWAYS) != 0 {
                    self.drain(fd, segment);
                }
                if events & bit::ERR != 0 {
                    bits |= self.take_error_of_kernel(fd);
                } else if events & (bit::RDHUP | bit::HUP) != 0 {
                    self.note_end(fd);
                }
            } else {
                // Whoever does not ask for bytes waits for what comes behind them.
                waiting::renew(&self.socket(fd, segment), true, false);
                self.look_for_the_end(fd, segment);
                let nothing = tcp::has_nothing(fd);
                let ended = events & (bit::RDHUP | bit::ALWAYS);
                // A peer that has died before it left TCP: no byte of its will come through the ring. Memory shows it.
                if events & bit::ERR != 0 {
                    bits |= self.take_error_of_kernel(fd);
                } else if (ended != 0 || nothing) && self.peer_has_closed(fd) {
                    self.note_gone(fd);
                }
                let known = self.block.has(flag::RESET) || segment.incoming().end() & end::RESET != 0;
                if events & bit::ALWAYS == bit::HUP && !known && tcp::is_over(fd) {
                    // The kernel has told the application why; memory goes on to tell of the hang-up.
                    self.block.raise(flag::RESET | flag::RESET_TOLD);
                }
                bits |= events & (bit::RDHUP | bit::HUP);
                // Real bytes: a lone bell would have been sent after the count that settles the direction. Unless they were a
                // greeting, or the frame or the last bell by which the peer went back to TCP; or another thread has taken them
                // since; or the kernel means that this side reads no more, which memory shows.
                let taken = ended == 0 || ended & bit::ALWAYS == 0 && self.block.has(flag::SHUT_RD);
                if events & (bit::IN | ended) != 0 && !(taken && nothing) {
                    bits |= bit::READ;
                }
            }
        }
        if events & bit::OUT != 0
            && self.block.send_switched.load(Ordering::Acquire) == 0
            && !segment.is_ready()
        {
            bits |= bit::WRITE;
        }
        bits
    }

    /// The kernel says that there is an error, and would say so for ever. The bit, if it is for a message in the socket's error
    /// queue (`tcp_poll` of net/ipv4/tcp.c), which the application will fetch.
    fn take_error_of_kernel(&self, fd: i32) -> u32 {
        if self.look_for_error(fd) {
            return 0;
        }
        if !self.is_unix() && !tcp::is_over(fd) {
            return bit::ERR;
        }
        self.note_reset(fd);
        0
    }

    /// Takes note of the kernel's pending error. False if there is none.
    pub(crate) fn look_for_error(&self, fd: i32) -> bool {
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let error = rustix::net::sockopt::socket_error(unsafe { BorrowedFd::borrow_raw(fd) });
        if let Ok(Err(errno)) = error {
            self.note_error(fd, errno);
        }
        matches!(error, Ok(Err(_)))
    }

    /// The pending error of `SO_ERROR`, cleared by telling. `kernel`: what the kernel has just told on the socket, which
    /// may be for bells alone.
    pub fn take_error(&self, fd: i32, kernel: Option<Errno>) -> Option<Errno> {
        match kernel {
            Some(errno) => self.note_error(fd, errno),
            None => self.look_for_death(fd),
        }
        self.untold_reset(self.segment()?).map(|errno| self.told(errno))
    }

    /// Asks the kernel whether the peer has died, of which nothing in memory tells: once all that it sent has been read, and unless the
    /// connection is the kernel's again.
    fn look_for_death(&self, fd: i32) {
        if !self.has_returned() && self.unread(fd) == Ok(0) {
            self.peer_is_gone(fd);
        }
    }

    /// What a read, or a write, says that the kernel is about to serve, if the connection has been reset, or of `AF_UNIX` the peer takes nothing
    /// more: its kernel may not know yet, or has told this library. A read that is told of the end receives nothing.
    pub fn said_after_reset(&self, fd: i32, reads: bool) -> Option<Result<usize, Errno>> {
        let segment = self.segment()?;
        if !self.look_for_error(fd) {
            self.look_for_death(fd);
        }
        if !reads && self.is_unix() {
            // Of a reset only reads tell.
            return self.refuses_writes(fd).then_some(Err(Errno::PIPE));
        }
        self.reset(segment)?;
        if !reads {
            return Some(Err(self.told(self.refusal(segment))));
        }
        let untold = (self.unread(fd) == Ok(0)).then(|| self.error_of_reads(segment))?;
        Some(untold.map_or(Ok(0), |errno| Err(self.told(errno))))
    }
}

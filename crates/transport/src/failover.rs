//! The way back to TCP, without a byte lost, repeated or out of order: because the queue pair has failed, the peer has
//! gone back, or the process is about to fork.
//!
//! Whoever goes first takes what has arrived in its ring, and sends on TCP, behind its bells, the frame DOWN and then all
//! that the peer has not credited, and from there on its stream as ever. DOWN tells the stream position where that begins:
//! the peer skips what it has already. It goes back as soon as it sees the frame, or finds out by itself; neither waits
//! for the other.
//!
//! ```text
//!   DOWN    u8 2 | u8 bits: KNOWS, HAD_ALL | u64 stream position | u64 bytes sent again
//! ```
//!
//! Afterwards the connection is as it was before it left TCP, with the hooks in between. What was in the ring is in the
//! side buffer.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::Shutdown;

use crate::arena::{flag, now_ns};
use crate::connection::Connection;
use crate::control::{Control, NOT_SWITCHED, end};
use crate::segment::{Greeting, SIDE_BYTES, Segment};
use crate::settle::{PATIENCE, SHORT_PATIENCE, nap, wait_until};
use crate::socket::ENDLESS_BELLS;
use crate::stream::{BELL, FAILED};
use crate::tcp::{self, wait_for};
use crate::uninterrupted::Uninterrupted;
use crate::verbs::link::Link;

/// The frame by which a side goes back to TCP.
const DOWN: u8 = 2;
/// A bit of its second byte: the peer's bytes have left TCP, as this side knows.
const KNOWS: u8 = 1;
/// Another: this side had all that the peer's calls had sent ([`flag::HAD_ALL`]).
const HAD_ALL: u8 = 2;
/// How long bytes may be under way between hosts that the peer has sent over TCP before it said so by RDMA.
const LONGEST_WAY: Duration = Duration::from_secs(10);
/// How often a side that closes asks whether the peer's kernel has acknowledged all: no event tells of that.
const ACKNOWLEDGEMENT: Duration = Duration::from_micros(200);
/// Bytes of that frame.
pub(crate) const DOWN_BYTES: usize = 18;

/// What becomes of bytes that have come over the fabric, and that the application has not read, when the peer sends them again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unread {
    /// They are kept, and skipped on TCP.
    Stays,
    /// They are dropped here, and left to the kernel.
    ComesAgain,
}

/// What the peer sends again: from which stream position on, and how many bytes.
#[derive(Clone, Copy)]
struct Rest {
    position: u64,
    bytes: u64,
}

/// What comes next on TCP, where frames do.
enum Next {
    /// Nothing yet.
    Nothing,
    /// A whole DOWN, which has not been taken, with its bits.
    Down(u8, Rest),
    /// The stream's end, or its error.
    End,
    /// No frame.
    Lie,
}

impl Connection {
    /// The fabric has failed.
    #[cold]
    pub(crate) fn fabric_failed(&self, segment: &Segment) -> Errno {
        if let Some(link) = segment.link() {
            link.fail();
        }
        FAILED
    }

    /// Whether the fabric has failed, or somebody wants the connection back on TCP, so that [`Self::mend`] has something to
    /// do.
    pub fn is_failing(&self) -> bool {
        self.block.is_unwanted()
            || self.segment().is_some_and(|segment| segment.has_failed() || self.is_asked_back(segment))
    }

    /// Goes back to TCP if the fabric has failed, or that is wanted. Fails with `EDEADLK` in a signal handler whose own thread
    /// is in the middle of a copy: then it has to wait until that goes on.
    #[cold]
    pub fn mend(&self, fd: i32) -> Result<(), Errno> {
        if self.block.take_request() {
            self.obey(fd);
        }
        let Some(segment) = self.segment() else { return Ok(()) };
        let _guard = self.lock_receiving(fd)?;
        self.mend_locked(fd, segment)
    }

    /// As [`Self::mend`]; the caller holds the receive lock.
    pub(crate) fn mend_locked(&self, fd: i32, segment: &Segment) -> Result<(), Errno> {
        if let Some(link) = segment.link().filter(|_| segment.has_failed()) {
            self.go_back(fd, segment, link)
        } else if self.is_asked_back(segment) {
            self.follow_back(fd, segment)
        } else {
            Ok(())
        }
    }

    /// Whether the peer has gone back to TCP: then the fabric counts as failed.
    pub(crate) fn look_for_down(&self, fd: i32) {
        let Some(link) = self.segment().and_then(Segment::link).filter(|link| !link.is_frozen()) else {
            return;
        };
        // Before the peer's bytes have left TCP, and have been taken, what comes is the application's.
        if !self.recv_settled() || self.is_closed() {
            return;
        }
        let mut bytes = [0u8; 64];
        let peek = libc::MSG_DONTWAIT | libc::MSG_PEEK;
        // SAFETY: the buffer is writable for its length.
        if let Ok(count) = unsafe { tcp::recv(fd, bytes.as_mut_ptr(), bytes.len(), peek) } {
            bells_before_frames(link, &bytes[..count]);
        }
    }

    /// Takes the bells at the beginning of what has been `seen` on TCP. How many there were. What is behind them stays for
    /// who reads next. The caller holds the receive lock.
    pub(crate) fn take_bells_before_frames(
        &self,
        fd: i32,
        link: &Link,
        seen: &mut [u8],
    ) -> Result<usize, Errno> {
        match bells_before_frames(link, seen) {
            0 => Ok(0),
            // SAFETY: writable for as much. It is there, and nobody else reads.
            bells => unsafe { tcp::recv(fd, seen.as_mut_ptr(), bells, libc::MSG_DONTWAIT) },
        }
    }

    /// Goes back to TCP on purpose, if this process drives a queue pair for it: a fork could not use that.
    pub fn leave_fabric(&self, fd: i32, deadline: Instant) {
        let Some(segment) = self.segment() else { return };
        self.stop_introduction(fd, segment);
        // One that has failed, too: it is for one process to say so to the peer.
        let drives = |link: &&Link| {
            (link.is_usable() && !link.is_frozen()) || (link.is_ours() && segment.has_failed())
        };
        let Some(link) = segment.link().filter(drives) else { return };
        if let Ok(_guard) = self.lock_receiving(fd) {
            if self.await_switch(fd, segment, link, deadline) {
                // What could not be awaited comes with the peer's next call.
                self.depart(segment, link, || Instant::now() >= deadline || self.has_gone(fd, segment));
            }
            let _ = self.go_back(fd, segment, link);
        }
    }

    /// Tells the peer that this side goes back on purpose, and waits until all is here that its calls have sent. False if that can't be, or
    /// once it `is_over`. The caller holds the receive lock.
    pub(crate) fn depart(&self, segment: &Segment, link: &Link, is_over: impl Fn() -> bool) -> bool {
        let has_all = link.depart(segment.incoming(), is_over).is_ok();
        if has_all {
            self.block.raise(flag::HAD_ALL);
        }
        has_all
    }

    /// Waits for both directions to have left TCP, which the peer's next call brings about if it has taken the greeting:
    /// frames can come only behind the end of its bytes on TCP. False if they have not by `deadline`. The caller holds the
    /// receive lock.
    pub(crate) fn await_switch(&self, fd: i32, segment: &Segment, link: &Link, deadline: Instant) -> bool {
        let incoming = segment.incoming();
        loop {
            let switched = self.lock_sending(fd).is_ok_and(|_guard| self.send_switched(fd, segment));
            link.inbox().scan(incoming);
            if switched && has_switched(incoming) {
                return true;
            }
            if !link.is_usable() || self.has_gone(fd, segment) || Instant::now() >= deadline {
                return false;
            }
            // By RDMA, so nothing wakes.
            nap();
        }
    }

    /// Whether the peer has closed the connection, or has died.
    pub(crate) fn has_gone(&self, fd: i32, segment: &Segment) -> bool {
        self.block.has(flag::PEER_GONE)
            || segment.incoming().end() & end::CLOSED != 0
            || tcp::peer_has_closed(fd)
    }

    /// The caller holds the receive lock.
    #[cold]
    fn go_back(&self, fd: i32, segment: &Segment, link: &Link) -> Result<(), Errno> {
        let _uninterrupted = Uninterrupted::begin();
        let _guard = self.lock_sending(fd)?;
        if self.block.has(flag::RETURNED) {
            // Another process has, and has told the peer.
            link.freeze(segment.incoming(), segment.outgoing());
        } else if !link.is_frozen() && !self.is_closed() {
            self.go_back_locked(fd, segment, link);
        }
        Ok(())
    }

    /// The caller holds both locks.
    pub(crate) fn go_back_locked(&self, fd: i32, segment: &Segment, link: &Link) {
        let block = self.block;
        // Where bytes leave TCP, frames may follow.
        if segment.is_ready() && link.is_usable() {
            self.send_switched(fd, segment);
        }
        let unsure = segment.switching().load(Ordering::SeqCst) != 0
            && block.send_switched.load(Ordering::Acquire) == 0;
        let (incoming, outgoing) = (segment.incoming(), segment.outgoing());
        if !has_switched(incoming) {
            // Nor can it any more, unless it has.
            link.fail();
        }
        link.freeze(incoming, outgoing);
        // While it is known what the peer has taken over the fabric.
        let gone = self.left_without_a_word(fd);
        let seen = has_switched(incoming);
        let kept = self.keep_what_came(fd, segment);
        if kept && incoming.end() & end::FIN != 0 {
            block.raise(flag::ALL_HERE);
        }
        segment.take_down();
        block.come_back();
        incoming.rare.0.switched_at.store(NOT_SWITCHED, Ordering::SeqCst);
        incoming.rung.0.count.store(block.drained.load(Ordering::Relaxed), Ordering::Relaxed);
        block.recv_switched.store(0, Ordering::SeqCst);
        segment.set_greeting(if seen { Greeting::AwaitsDown } else { Greeting::Done });
        // Without the peer's word nobody knows how it takes the next byte.
        let mut switched = block.send_switched.swap(0, Ordering::SeqCst) != 0;
        if unsure && seen {
            match self.await_frame(fd) {
                Next::Down(bits, rest) => {
                    self.begin_to_skip(fd, segment, rest, Unread::Stays);
                    switched = bits & KNOWS != 0;
                }
                // It takes nothing any more. Whether it had sent more than has come is known, or not.
                Next::End => {
                    self.note_end(fd);
                    segment.set_greeting(Greeting::Done);
                }
                Next::Nothing | Next::Lie => return self.lose(fd),
            }
        } else if unsure && !tcp::peer_has_closed(fd) {
            // Where the peer's own bytes have not left TCP, it can't send frames. But all that one has sent that is gone is there: no byte
            // of its leaves TCP before a READ behind its word of that has been answered here.
            return self.lose(fd);
        }
        outgoing.rare.0.switched_at.store(NOT_SWITCHED, Ordering::SeqCst);
        if !kept {
            return self.lose(fd);
        }
        if gone || self.left_without_a_word(fd) {
            // A frame would only make it reset the connection.
            self.note_gone(fd);
        } else if switched && self.can_owe_down(fd, segment, link) {
            block.raise(flag::OWES_DOWN);
            outgoing.tail.0.store(outgoing.head(), Ordering::Release);
        } else if switched {
            let Some((position, bytes)) = link.uncredited(outgoing) else { return self.lose(fd) };
            let bits = if seen { KNOWS } else { 0 } | if block.has(flag::HAD_ALL) { HAD_ALL } else { 0 };
            let mut frame = down(bits, position, bytes.len() as u64).to_vec();
            frame.extend(bytes);
            self.send_all(fd, segment, &frame);
            outgoing.tail.0.store(outgoing.head(), Ordering::Release);
        }
        self.shut_for_good(fd);
    }

    /// Whether the peer has gone back, lacks nothing that this side has sent, and has gone on since: then it may have closed its socket, and
    /// would answer a frame with a reset, which takes away what it has not got through yet. It needs the frame only in front of more bytes.
    fn can_owe_down(&self, fd: i32, segment: &Segment, link: &Link) -> bool {
        if segment.greeting() != Greeting::AwaitsDown || link.has_posted_late() {
            return false;
        }
        let Some(down) = down_of_who_had_all(fd) else { return false };
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let unread = tcp::unread(unsafe { BorrowedFd::borrow_raw(fd) });
        tcp::peer_has_closed(fd) || unread.is_ok_and(|unread| unread > down)
    }

    /// Sends the frame that is owed. The caller holds the send lock.
    #[cold]
    pub(crate) fn pay_down(&self, fd: i32, segment: &Segment) {
        self.send_or_wait(fd, &down(KNOWS, segment.outgoing().head(), 0), || {
            wait_for(fd, PollFlags::OUT, None);
        });
        self.block.lower(flag::OWES_DOWN);
    }

    /// Whether the peer has closed its socket, and no DOWN of its own precedes that.
    fn left_without_a_word(&self, fd: i32) -> bool {
        let mut bytes = [0u8; 64];
        // Before its bytes are looked at: they, too, may arrive in between.
        let has_closed = tcp::peer_has_closed(fd);
        let peek = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        // SAFETY: the buffer is writable for its length.
        match unsafe { tcp::recv(fd, bytes.as_mut_ptr(), bytes.len(), peek) } {
            Ok(count) => has_closed && bytes[..count].iter().all(|&byte| byte == BELL),
            Err(Errno::AGAIN | Errno::INTR) => false,
            Err(errno) => {
                self.note_error(fd, errno);
                true
            }
        }
    }

    /// Nothing can save the connection.
    pub(crate) fn lose(&self, fd: i32) {
        self.block.raise(flag::PEER_GONE | flag::RESET | flag::LOST);
        tcp::shutdown(fd, Shutdown::Both);
    }

    /// Moves what is in the ring to the side buffer, behind what still comes over TCP before it. False if it can't be.
    pub(crate) fn keep_what_came(&self, fd: i32, segment: &Segment) -> bool {
        let incoming = segment.incoming();
        if !self.absorb_the_rest(fd, segment) {
            return false;
        }
        let inlet = segment.inlet();
        loop {
            let used = usize::try_from(incoming.used()).unwrap_or(usize::MAX);
            let stop = self.block.side().end as usize;
            if used == 0 {
                return true;
            }
            if used > SIDE_BYTES - stop {
                return false;
            }
            if !segment.populate_side(stop..stop + used) {
                return false;
            }
            // SAFETY: stop < SIDE_BYTES.
            let target = unsafe { segment.side().add(stop) };
            // SAFETY: the side buffer has room for `used` bytes here.
            let Ok(count) = (unsafe { inlet.peek(0, target.as_ptr(), used) }) else { return false };
            if count == 0 {
                return false;
            }
            // Before they are taken from the ring: who looks there, and then here, finds them.
            self.block.set_side_end((stop + count) as u64);
            let taken = match segment.link() {
                Some(link) => link.keep(incoming, count),
                None => inlet.consume(count).is_ok(),
            };
            if !taken {
                return false;
            }
            self.block.ring_received.fetch_add(count as u64, Ordering::Relaxed);
        }
    }

    /// Takes what the peer sent before its bytes left TCP: it is under way. False if it does not come, so that the peer
    /// has lied or is out of reach.
    pub(crate) fn absorb_the_rest(&self, fd: i32, segment: &Segment) -> bool {
        let incoming = segment.incoming();
        let longest = if segment.link().is_some() { LONGEST_WAY } else { PATIENCE };
        let deadline = Instant::now() + longest;
        while incoming.rare.0.switched_at.load(Ordering::Acquire) != NOT_SWITCHED && !self.recv_settled() {
            let is_all = tcp::peer_has_closed(fd);
            self.absorb(fd, segment, false);
            if self.recv_settled() {
                break;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || is_all || !wait_for(fd, PollFlags::IN, Some(left)) {
                return false;
            }
        }
        true
    }

    /// Sends `bytes` on TCP, and takes out of the way meanwhile what the peer sends: it may do the same.
    pub(crate) fn send_all(&self, fd: i32, segment: &Segment, bytes: &[u8]) {
        self.send_or_wait(fd, bytes, || {
            self.absorb(fd, segment, false);
            wait_for(fd, PollFlags::IN | PollFlags::OUT, None);
        });
    }

    /// Sends `bytes` on TCP, and `waits` where there is no room.
    fn send_or_wait(&self, fd: i32, mut bytes: &[u8], waits: impl Fn()) {
        while !bytes.is_empty() {
            // SAFETY: readable for its length.
            let sent = unsafe {
                tcp::send(fd, bytes.as_ptr(), bytes.len(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
            };
            match sent {
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => waits(),
                // It reads no more, and that is all that its kernel says.
                Err(Errno::PIPE) if self.is_unix() && !self.peer_has_closed(fd) => return,
                Err(errno) => return self.note_error(fd, errno),
            }
        }
    }

    /// Before a read, after a return to TCP: takes what precedes the application's bytes. True if what is there now is the
    /// application's. The caller holds the receive lock.
    #[cold]
    pub(crate) fn take_down_frame(&self, fd: i32, segment: &Segment, unread: Unread) -> bool {
        let _uninterrupted = Uninterrupted::begin();
        if segment.greeting() == Greeting::AwaitsDown {
            match next_frame(fd) {
                Next::Nothing => return false,
                Next::Down(_, rest) => self.begin_to_skip(fd, segment, rest, unread),
                Next::End => {
                    self.note_end(fd);
                    segment.set_greeting(Greeting::Done);
                }
                Next::Lie => self.lose(fd),
            }
        }
        if self.block.has(flag::LOST) {
            return false;
        }
        while segment.greeting() == Greeting::Skips {
            let skip = segment.again().left.load(Ordering::Relaxed);
            if skip == 0 {
                segment.set_greeting(Greeting::Done);
                break;
            }
            let most = usize::try_from(skip).unwrap_or(usize::MAX).min(1 << 20);
            // SAFETY: with MSG_TRUNC tcp(7) discards the bytes and writes none.
            match unsafe { tcp::recv(fd, std::ptr::null_mut(), most, libc::MSG_DONTWAIT | libc::MSG_TRUNC) } {
                Ok(0) => segment.set_greeting(Greeting::Done),
                Ok(count) => {
                    segment.again().left.store(skip - count as u64, Ordering::Relaxed);
                }
                Err(Errno::AGAIN | Errno::INTR) => return false,
                Err(_) => segment.set_greeting(Greeting::Done),
            }
        }
        true
    }

    /// Waits for the peer's DOWN until `deadline`, and takes what precedes the application's bytes. The caller holds the receive lock.
    pub(crate) fn await_down(&self, fd: i32, segment: &Segment, unread: Unread, deadline: Instant) {
        while !self.has_taken_frames(fd, segment, unread) && wait_until(fd, deadline) {}
    }

    /// Takes what precedes the application's bytes, as far as it has come. False if more is to come.
    fn has_taken_frames(&self, fd: i32, segment: &Segment, unread: Unread) -> bool {
        !matches!(segment.greeting(), Greeting::AwaitsDown | Greeting::Skips)
            || self.take_down_frame(fd, segment, unread)
            || self.block.has(flag::LOST)
    }

    /// Before the kernel closes the last descriptor: it would reset the connection for a frame that is unread, and what is under way to the peer
    /// would be lost; and the same for one that comes later. So the end of this side's stream goes first, and once the peer's kernel has acknowledged
    /// it nothing is under way any more: what the peer sent before is here, and what it would send now it keeps ([`Self::can_owe_down`]).
    /// That is a round trip, for which this process waits briefly, unless it has just done so in vain.
    pub(crate) fn end_before_frames(&self, fd: i32) {
        /// When such a wait was last in vain ([`now_ns`]).
        static IN_VAIN: AtomicU64 = AtomicU64::new(0);
        let Some(segment) = self.segment() else { return };
        let Ok(_guard) = self.lock_receiving(fd) else { return };
        if self.has_taken_frames(fd, segment, Unread::Stays) {
            return;
        }
        tcp::shutdown(fd, Shutdown::Write);
        let since = now_ns().saturating_sub(IN_VAIN.load(Ordering::Relaxed));
        let patience = if since < PATIENCE.as_nanos() as u64 { Duration::ZERO } else { SHORT_PATIENCE };
        let deadline = Instant::now() + patience;
        loop {
            // In this order: what was sent before the acknowledgement is here.
            let has_arrived = tcp::queued(fd) == Some(0);
            if self.has_taken_frames(fd, segment, Unread::Stays) || has_arrived {
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            wait_for(fd, PollFlags::IN, Some(left.min(ACKNOWLEDGEMENT)));
        }
        if patience > Duration::ZERO {
            IN_VAIN.store(now_ns(), Ordering::Relaxed);
        }
    }

    /// As [`Self::end_before_frames`], if this side may not end its stream: what has come so far.
    pub(crate) fn take_leftover_frames(&self, fd: i32) {
        if let Some(segment) = self.segment()
            && let Ok(_guard) = self.lock_receiving(fd)
        {
            self.has_taken_frames(fd, segment, Unread::Stays);
        }
    }

    /// The peer's stream goes on with `rest`, on TCP, behind the DOWN that comes next.
    fn begin_to_skip(&self, fd: i32, segment: &Segment, rest: Rest, unread: Unread) {
        let Rest { position, bytes } = rest;
        let have = segment.incoming().tail();
        // The last of what is here came over the fabric; what came over TCP before that does not come again.
        let read = have.checked_sub(self.side_length()).filter(|&read| read >= position);
        let drops = read.filter(|_| unread == Unread::ComesAgain);
        // It does not send again what has not come.
        let Some(skip) = drops.unwrap_or(have).checked_sub(position) else { return self.lose(fd) };
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let Ok(taken) = tcp::bytes_read(unsafe { BorrowedFd::borrow_raw(fd) }) else { return self.lose(fd) };
        let again = segment.again();
        again.left.store(skip, Ordering::Relaxed);
        again.all.store(skip, Ordering::Relaxed);
        again.drops_side.store(u32::from(drops.is_some()), Ordering::Relaxed);
        let from = taken + DOWN_BYTES as u64;
        again.until.store(from.saturating_add(bytes), Ordering::SeqCst);
        again.from.store(from, Ordering::SeqCst);
        let mut frame = [0u8; DOWN_BYTES];
        // SAFETY: writable for its length. It is there, and nobody else reads.
        let _ = unsafe { tcp::recv(fd, frame.as_mut_ptr(), DOWN_BYTES, libc::MSG_DONTWAIT) };
        self.skip(segment);
    }

    /// The peer's DOWN has been taken.
    fn skip(&self, segment: &Segment) {
        if segment.again().drops_side.load(Ordering::Relaxed) != 0 {
            self.block.ring_received.fetch_sub(self.side_length(), Ordering::Relaxed);
            self.block.set_side_start(self.block.side().end);
        }
        segment.set_greeting(Greeting::Skips);
    }

    /// Goes on for a process that was killed while it took what precedes the application's bytes. The caller holds the
    /// receive lock.
    #[cold]
    pub(crate) fn inherit_frames(&self, fd: i32, segment: &Segment) {
        let again = segment.again();
        let from = again.from.load(Ordering::SeqCst);
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let Ok(read) = tcp::bytes_read(unsafe { BorrowedFd::borrow_raw(fd) }) else { return self.lose(fd) };
        match (segment.greeting(), read.checked_sub(from)) {
            (Greeting::AwaitsDown, Some(_)) if from != 0 => self.skip(segment),
            (Greeting::Skips, Some(skipped)) => {
                let left = again.all.load(Ordering::Relaxed).saturating_sub(skipped);
                again.left.store(left, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    /// As [`next_frame`], which comes soon if the peer has gone back.
    fn await_frame(&self, fd: i32) -> Next {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let next = next_frame(fd);
            let left = deadline.saturating_duration_since(Instant::now());
            if !matches!(next, Next::Nothing) || left.is_zero() || !wait_for(fd, PollFlags::IN, Some(left)) {
                return next;
            }
        }
    }
}

/// Takes bells, and looks for the frame behind them. The rest of one that has come in part comes at once, if it does.
fn next_frame(fd: i32) -> Next {
    let mut bytes = [0u8; 64];
    let mut begun = None;
    let mut taken = 0;
    while taken < ENDLESS_BELLS {
        let is_all = tcp::peer_has_closed(fd);
        // SAFETY: the buffer is writable for its length.
        let seen = match unsafe {
            tcp::recv(fd, bytes.as_mut_ptr(), bytes.len(), libc::MSG_DONTWAIT | libc::MSG_PEEK)
        } {
            Ok(0) => return Next::End,
            Ok(count) => &bytes[..count],
            Err(Errno::AGAIN | Errno::INTR) => return Next::Nothing,
            Err(_) => return Next::End,
        };
        let bells = seen.iter().take_while(|&&byte| byte == BELL).count();
        if bells == 0 && seen[0] != DOWN {
            return Next::Lie;
        }
        let frame = seen.first_chunk::<DOWN_BYTES>().copied();
        if bells == 0 && frame.is_none() {
            if is_all || begun.get_or_insert_with(Instant::now).elapsed() >= PATIENCE {
                return Next::Lie;
            }
            nap();
            continue;
        }
        if let (0, Some(frame)) = (bells, frame) {
            return Next::Down(frame[1], rest(&frame));
        }
        // SAFETY: as above; they are there, and nobody else reads.
        let _ = unsafe { tcp::recv(fd, bytes.as_mut_ptr(), bells, libc::MSG_DONTWAIT) };
        taken += bells as u64;
    }
    Next::Lie
}

/// How many bytes a DOWN is that has come, if the peer had all: with bells before it, and what it sends again. The bells stay: whoever
/// sleeps may not have heard them yet, or is to hear them, for what has been put aside.
fn down_of_who_had_all(fd: i32) -> Option<u64> {
    let mut bytes = [0u8; 1024];
    // SAFETY: the buffer is writable for its length.
    let count =
        unsafe { tcp::recv(fd, bytes.as_mut_ptr(), bytes.len(), libc::MSG_DONTWAIT | libc::MSG_PEEK) }
            .ok()?;
    let bells = bytes[..count].iter().take_while(|&&byte| byte == BELL).count();
    let frame = bytes[bells..count].first_chunk::<DOWN_BYTES>()?;
    let had_all = frame[0] == DOWN && frame[1] & HAD_ALL != 0;
    had_all.then(|| rest(frame).bytes.saturating_add((bells + DOWN_BYTES) as u64))
}

/// What is in a DOWN beside its bits.
fn rest(frame: &[u8; DOWN_BYTES]) -> Rest {
    let [position, bytes] = [2, 10].map(|at| u64::from_le_bytes(std::array::from_fn(|i| frame[at + i])));
    Rest { position, bytes }
}

/// The frame.
fn down(bits: u8, position: u64, bytes: u64) -> [u8; DOWN_BYTES] {
    let mut frame = [DOWN; DOWN_BYTES];
    frame[1] = bits;
    frame[2..10].copy_from_slice(&position.to_le_bytes());
    frame[10..].copy_from_slice(&bytes.to_le_bytes());
    frame
}

/// Whether the peer has said where its bytes leave TCP.
pub(crate) fn has_switched(incoming: &Control) -> bool {
    incoming.rare.0.switched_at.load(Ordering::Acquire) != NOT_SWITCHED
}

/// Bells at the beginning of what has come on TCP. Behind them only DOWN can follow: then the fabric counts as failed.
fn bells_before_frames(link: &Link, seen: &[u8]) -> usize {
    let bells = seen.iter().take_while(|&&byte| byte == BELL).count();
    if bells < seen.len() {
        link.fail();
    }
    bells
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    /// What follows `bytes`, which come first, and how long that takes to find out. If it `ends` the peer has closed.
    fn next_of(bytes: &[u8], ends: bool) -> (Next, Duration) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = listener.accept().unwrap().0;
        peer.write_all(bytes).unwrap();
        let _open = (!ends).then_some(peer);
        wait_for(socket.as_raw_fd(), if ends { PollFlags::RDHUP } else { PollFlags::IN }, None);
        let begun = Instant::now();
        (next_frame(socket.as_raw_fd()), begun.elapsed())
    }

    #[test]
    fn a_frame_is_found_behind_bells() {
        let frame = down(KNOWS, 7, 9);
        let stream: Vec<u8> = [&[BELL; 100][..], &frame, b"more"].concat();
        let Next::Down(bits, rest) = next_of(&stream, false).0 else { panic!("no frame") };
        assert_eq!((bits, rest.position, rest.bytes), (KNOWS, 7, 9));
        assert!(matches!(next_of(&[BELL; 3], true).0, Next::End));
        assert!(matches!(next_of(b"bytes", false).0, Next::Lie));
    }

    #[test]
    fn bells_without_end_are_a_lie() {
        let mut stream = vec![BELL; ENDLESS_BELLS as usize];
        stream.extend(down(KNOWS, 7, 9));
        assert!(matches!(next_of(&stream, false).0, Next::Lie));
    }

    #[test]
    fn a_frame_of_which_the_rest_does_not_come_is_none() {
        let part = &down(KNOWS, 7, 9)[..DOWN_BYTES - 1];
        let (next, time) = next_of(part, false);
        assert!(matches!(next, Next::Lie) && time >= PATIENCE);
        let (next, time) = next_of(part, true);
        assert!(matches!(next, Next::Lie) && time < PATIENCE);
    }
}

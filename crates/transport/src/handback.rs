//! The way back from shared memory to TCP, for a connection that is about to be used where no hook is: by another
//! program (`SCM_RIGHTS`, exec), by stdio, by io_uring.
//!
//! No frame announces it, because nobody would be there to take the peer's answer out of the stream. Both ends agree in
//! the segment instead. The side that wants to leave, under both locks of its end, so that neither its reads nor its writes
//! move any position:
//!
//! 1. sets [`end::RETURN`] and `handing`, and rings once more;
//! 2. goes on at once if the ring to it is empty ([`FINAL`]): whatever the peer publishes after that, it sees the request
//!    before it publishes more. Else it waits for the peer to take over ([`TAKEN`]), who declines if that could block
//!    it. If nothing comes, it takes its request back, and nothing has changed;
//! 3. takes the peer's last bells. From here on TCP carries only the application's bytes.
//!
//! The peer sees the request in whichever call it makes next. It moves what it has not read to its side buffer, sends over
//! TCP what the other side has not taken from the ring, and skips the bells that are still to come.
//!
//! What the side that asks has in its own side buffer, or has to put there because bells stand behind it in the kernel, it would have
//! to give to the application by itself, and can't. So it says where that is before it asks, and the peer, in whose memory the buffer
//! is, too, sends it once more in front of the rest.

use std::ops::ControlFlow;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{Shutdown, sockopt};
use rustix::thread::futex;

use crate::arena::{Role, State, flag};
use crate::connection::Connection;
use crate::control::{Control, NO_REQUEST, end};
use crate::failover::has_switched;
use crate::reason::Reason;
use crate::segment::Segment;
use crate::settle::{PATIENCE, SHORT_PATIENCE};
use crate::socket::ENDLESS_BELLS;
use crate::stream::PIECE;
use crate::tcp;
use crate::uninterrupted::Uninterrupted;
use crate::waiting::{self, add};

/// Values of [`crate::control::Rung::handing`] beside [`NO_REQUEST`]: this side asks, and may take that back; the peer sends on TCP
/// what is left in the ring; there is nothing left; this side is about to ask, and wants no more bells.
const ASKED: u32 = 1;
const TAKEN: u32 = 2;
const FINAL: u32 = 3;
pub(crate) const PREPARING: u32 = 4;

/// How long the peer has for an answer if a new request may need none.
const BRIEFLY: Duration = Duration::from_millis(1);

/// How long whoever was woken has to run.
const UNTIL_HEARD: Duration = Duration::from_millis(100);

/// Requests of one call, each of which takes over what the peer has sent meanwhile.
const MOST_REQUESTS: u32 = 100;

/// Requests that come to nothing before the peer is taken for one that lies.
const MOST_REFUSALS: u32 = 10_000;

/// The size of the kernel's buffer counts its own structures, which can be as large as what they hold; and a peer may
/// have a part of it in use.
pub(crate) const BUFFER_PER_BYTE: u64 = 4;

/// The same for bytes that are sent in one piece on an `AF_UNIX` socket, whose buffer is small, and the sender's alone.
const UNIX_BUFFER_PER_BYTE: u64 = 2;

/// What becomes of bytes that have come and that the application has not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    /// The kernel is to have them all, for no hook sees the calls that follow.
    Kernel,
    /// Those that have been moved aside may stay there: hooks see each call. Whoever sleeps will be woken.
    Aside,
    /// They are moved aside, unless somebody sleeps who would not hear of it.
    Taken,
    /// They are moved aside: whoever sleeps will be woken.
    TakenFromSleepers,
}

/// What comes of a request for the way back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// This side leaves.
    Granted,
    /// Not now: the peer asks, too, and goes first.
    Contended,
    Refused,
}

impl Connection {
    /// Goes back to TCP because somebody wants that, if it can be done now without waiting for the peer.
    #[cold]
    pub(crate) fn obey(&self, fd: i32) {
        if self.pin(fd, Reason::ByRequest) {
            return;
        }
        let Some(segment) = self.segment() else { return };
        if segment.link().is_some() {
            self.leave_fabric(fd, Instant::now() + SHORT_PATIENCE);
            if self.block.has(flag::RETURNED) {
                self.block.note(Reason::ByRequest);
            }
            return;
        }
        let _uninterrupted = Uninterrupted::begin();
        let Ok(_receiving) = self.lock_receiving(fd) else { return };
        let _ = self.mend_locked(fd, segment);
        if self.block.has(flag::RETURNED) || self.block.state() != State::Active || self.is_closed() {
            return;
        }
        if !segment.incoming().is_empty() {
            // Once it has been read.
            return self.block.ask_again();
        }
        if let Ok(_sending) = self.lock_sending(fd)
            && self.go_back_first(fd, segment, Instant::now() + PATIENCE, Rest::Kernel)
        {
            self.block.note(Reason::ByRequest);
        }
    }

    /// Whether the peer on this host has asked for the way back, and this side has not gone it; or a process of this side
    /// has, and died.
    #[inline]
    pub(crate) fn is_asked_back(&self, segment: &Segment) -> bool {
        segment.has_request() && self.has_to_follow(segment)
    }

    #[cold]
    fn has_to_follow(&self, segment: &Segment) -> bool {
        // Who has lied may ask without end: there is nothing to go back with.
        if self.block.has(flag::RETURNED | flag::LOST) {
            return false;
        }
        let incoming = segment.incoming();
        let handing = incoming.rung.0.handing.load(Ordering::SeqCst);
        (incoming.end() & end::RETURN != 0 && !matches!(handing, NO_REQUEST | PREPARING))
            || segment.outgoing().end() & end::RETURN != 0
    }

    /// The side that wants to leave; it waits for the peer until `deadline`. The caller holds both locks.
    pub(crate) fn go_back_first(&self, fd: i32, segment: &Segment, deadline: Instant, rest: Rest) -> bool {
        let (incoming, outgoing) = (segment.incoming(), segment.outgoing());
        let unread = || !incoming.is_empty();
        let gone = || self.block.has(flag::PEER_GONE) || incoming.end() & end::CLOSED != 0;
        if self.is_asked_back(segment) {
            // Whether it needs what another thread has just published only the way back of the second tells.
            self.go_back_second(fd, segment);
            return self.block.has(flag::RETURNED);
        }
        // Writers of ours that sleep for space would hear nothing more, unless the kernel is about to wake all.
        let wakes_all = matches!(rest, Rest::Aside | Rest::TakenFromSleepers);
        if outgoing.space_armed.0.has_sleepers() && !wakes_all || !self.send_switched(fd, segment) {
            return false;
        }
        for _ in 0..MOST_REQUESTS {
            if gone() || self.peer_has_closed(fd) {
                // Nobody is there to agree, or to send anything again. A bell would only make the peer's host reset the connection.
                let taken = !self.may_take_over(segment, rest) || self.take_over(fd, segment);
                let is_there = rest != Rest::Kernel || self.side_length() == 0;
                return taken && !unread() && is_there && self.leave(fd, segment);
            }
            // What has come since can be taken over then.
            let again = self.may_take_over(segment, rest) && Instant::now() < deadline;
            let briefly = Instant::now() + BRIEFLY;
            let answer =
                self.ask(fd, segment, if again { briefly.min(deadline) } else { deadline }, rest, gone);
            if answer == Answer::Granted {
                return self.leave(fd, segment);
            }
            self.take_back(fd, segment);
            // Both sides may want to leave.
            if self.is_asked_back(segment) {
                self.go_back_second(fd, segment);
            }
            let is_contended = answer == Answer::Contended && Instant::now() < deadline;
            if !(again || is_contended) || self.block.has(flag::RETURNED) {
                break;
            }
            if is_contended {
                rustix::thread::sched_yield();
            }
        }
        self.block.has(flag::RETURNED)
    }

    /// Asks for the way back.
    fn ask(
        &self,
        fd: i32,
        segment: &Segment,
        deadline: Instant,
        rest: Rest,
        gone: impl Fn() -> bool,
    ) -> Answer {
        let outgoing = segment.outgoing();
        outgoing.rung.0.handing.store(PREPARING, Ordering::SeqCst);
        outgoing.rare.0.end.fetch_or(end::RETURN, Ordering::SeqCst);
        // With the fence after each counted bell: the peer sees this, and rings no more, or this side sees that.
        fence(Ordering::SeqCst);
        let Some(aside) = self.put_rest_aside(fd, segment, rest) else { return Answer::Refused };
        outgoing.rung.0.aside.store(aside, Ordering::SeqCst);
        // The last bell, counted before the peer can see that it is asked: it must know how many to skip.
        let bells = &outgoing.rung.0.count;
        bells.fetch_add(1, Ordering::SeqCst);
        if !change(outgoing, PREPARING, ASKED) {
            // The peer has lost patience: it has a bell to ring.
            bells.fetch_sub(1, Ordering::SeqCst);
            return Answer::Refused;
        }
        // With the fence after each publish: the peer sees this, or this side sees that.
        fence(Ordering::SeqCst);
        if segment.incoming().rung.0.handing.load(Ordering::SeqCst) == FINAL {
            // The peer has left at the same moment. If it has not seen that bell counted, it would take it for the application's.
            bells.fetch_sub(1, Ordering::SeqCst);
            change(outgoing, ASKED, NO_REQUEST);
            return Answer::Contended;
        }
        // Also if nobody sleeps: who has seen it counted may be about to take it, and would take the application's next byte.
        if !self.put_bell(fd) {
            bells.fetch_sub(1, Ordering::SeqCst);
        }
        if aside == 0 && self.has_all(fd, segment) && change(outgoing, ASKED, FINAL) {
            return Answer::Granted;
        }
        self.await_taken(segment, deadline, gone)
    }

    /// A request has come to nothing.
    fn take_back(&self, fd: i32, segment: &Segment) {
        let (incoming, outgoing) = (segment.incoming(), segment.outgoing());
        change(outgoing, PREPARING, NO_REQUEST);
        stay(outgoing);
        if incoming.space_armed.0.has_sleepers() {
            // There may be more room for them.
            self.ring(fd, segment);
        }
    }

    /// Whether what has come is to be moved aside.
    fn may_take_over(&self, segment: &Segment, rest: Rest) -> bool {
        match rest {
            Rest::Kernel | Rest::Aside => false,
            Rest::Taken => !segment.incoming().data_armed.0.has_sleepers(),
            Rest::TakenFromSleepers => true,
        }
    }

    /// Moves what has come to the side buffer, if it has left TCP. False if it can't be. The caller holds both locks.
    fn take_over(&self, fd: i32, segment: &Segment) -> bool {
        if !has_switched(segment.incoming()) {
            return true;
        }
        self.block.raise(flag::MOVING);
        let kept = self.keep_what_came(fd, segment);
        self.block.lower(flag::MOVING);
        kept
    }

    /// What of the peer's bytes before the ring the kernel can't give to the application: those that have been put aside, and those
    /// before bells, which are put aside now. As [`crate::control::Rung::aside`]; nothing if they may stay there. `None` if some are not to be had. The caller holds both locks, and the peer rings no more.
    fn put_rest_aside(&self, fd: i32, segment: &Segment, rest: Rest) -> Option<u64> {
        if self.may_take_over(segment, rest) {
            return self.take_over(fd, segment).then_some(0);
        }
        let rung = segment.incoming().rung.0.count.load(Ordering::SeqCst);
        let has_bells = rung != self.block.drained.load(Ordering::Relaxed);
        if !has_bells && self.side_length() == 0 {
            return Some(0);
        }
        let complete = self.absorb_the_rest(fd, segment);
        if rest != Rest::Kernel {
            return complete.then_some(0);
        }
        // Bytes that come over TCP after these would come before them.
        let side = self.block.side();
        let settled = complete && waiting::is_settled(&self.socket(fd, segment));
        (settled || side.is_empty()).then_some(if side.is_empty() { 0 } else { side.start << 32 | side.end })
    }

    /// Whether nothing of the peer's is under way, not even a bell. The caller holds the receive lock, and has asked.
    fn has_all(&self, fd: i32, segment: &Segment) -> bool {
        let (side, incoming) = (self.socket(fd, segment), segment.incoming());
        // A peer that leaves TCP only now sees the request before it writes to the ring, or rings.
        (!has_switched(incoming) || waiting::is_settled(&side))
            && incoming.is_empty()
            && waiting::drain(&side)
            && incoming.rung.0.count.load(Ordering::SeqCst) == self.block.drained.load(Ordering::Relaxed)
    }

    /// Waits for the peer to take over what this side has not read. If it does not the request is withdrawn.
    fn await_taken(&self, segment: &Segment, deadline: Instant, gone: impl Fn() -> bool) -> Answer {
        let outgoing = segment.outgoing();
        let word = &outgoing.rung.0.handing;
        loop {
            let contended = match segment.incoming().rung.0.handing.load(Ordering::SeqCst) {
                FINAL => true,
                ASKED => self.block.role() == Role::Server,
                _ => false,
            };
            let left = deadline.saturating_duration_since(Instant::now());
            let gives_up = contended || gone() || left == Duration::ZERO;
            if gives_up && change(outgoing, ASKED, NO_REQUEST) {
                return if contended { Answer::Contended } else { Answer::Refused };
            }
            match word.load(Ordering::SeqCst) {
                ASKED => {}
                TAKEN => return Answer::Granted,
                _ => return Answer::Refused,
            }
            // Short: a peer that dies or asks, too, wakes nobody.
            let limit = left.min(Duration::from_millis(1));
            let timeout = futex::Timespec { tv_sec: 0, tv_nsec: limit.subsec_nanos().into() };
            let _ = futex::wait(word, futex::Flags::empty(), ASKED, Some(&timeout));
        }
    }

    /// The peer writes nothing more into the ring. The caller holds both locks.
    fn leave(&self, fd: i32, segment: &Segment) -> bool {
        let incoming = segment.incoming();
        let unread_bells = || {
            let count = incoming.rung.0.count.load(Ordering::SeqCst);
            count.wrapping_sub(self.block.drained.load(Ordering::Relaxed))
        };
        let deadline = Instant::now() + PATIENCE;
        let has_taken_all = || loop {
            // By looking first: one that was counted may be uncounted, and the application's bytes come in its place.
            if self.skip_last_bells(fd, segment)
                || self.block.has(flag::PEER_GONE)
                || self.peer_has_closed(fd)
            {
                return true;
            }
            // A bell that has been counted is sent at once, unless its sender dies, or lies.
            if Instant::now() >= deadline {
                return false;
            }
            rustix::thread::sched_yield();
        };
        // Bytes of the peer's that are still on TCP stand before its bells.
        let in_order = unread_bells() == 0 || (self.absorb_the_rest(fd, segment) && has_taken_all());
        let counted = self.count_bells(fd, segment);
        let has_ended = in_order && self.has_ended(fd, segment);
        self.be_back(segment);
        self.restore_options(fd);
        let rung = &segment.outgoing().rung.0;
        if rung.handing.load(Ordering::SeqCst) == TAKEN && rung.aside.load(Ordering::SeqCst) != 0 {
            // The peer sends it again.
            self.block.set_side_start(self.block.side().end);
        }
        if in_order && counted {
            self.shut_for_good(fd);
            if rung.handing.load(Ordering::SeqCst) != TAKEN {
                self.refuse_for_good(fd);
            }
            if self.is_refused() {
                // The peer's kernel is told so by its hooks, but only once they have seen the request. To this one it is the same.
                tcp::shutdown(fd, Shutdown::Write);
            }
            if has_ended {
                // The peer's kernel says so only once its hooks have seen the request.
                tcp::shutdown(fd, Shutdown::Read);
            }
        } else {
            self.lose(fd);
        }
        in_order && counted
    }

    /// Whether the peer's stream has ended in the ring, and all of it has been taken: nothing more comes, whether the peer follows or
    /// not. The caller holds both locks.
    fn has_ended(&self, fd: i32, segment: &Segment) -> bool {
        let incoming = segment.incoming();
        let is_final = segment.outgoing().rung.0.handing.load(Ordering::SeqCst) == FINAL;
        is_final
            && incoming.end() & end::FIN != 0
            // After that: what the peer has published before it ended is to be seen. It sends it again.
            && incoming.is_empty()
            && waiting::is_settled(&self.socket(fd, segment))
    }

    /// The peer has asked. The caller holds both locks.
    fn go_back_second(&self, fd: i32, segment: &Segment) {
        let (incoming, outgoing) = (segment.incoming(), segment.outgoing());
        let word = &incoming.rung.0.handing;
        // The peer takes nothing more, once it has asked.
        let mut most = outgoing.used();
        // Looked at once: the peer could make it more behind the checks.
        let Some(at_peer) = segment.aside_at_peer() else { return self.lose(fd) };
        let aside = at_peer.len() as u64;
        let fits = |bytes: u64| bytes == 0 && aside == 0 || self.fits(fd, bytes.saturating_add(aside));
        let answer = if fits(most) { TAKEN } else { NO_REQUEST };
        let asked = change(incoming, ASKED, answer);
        let _ = futex::wake(word, futex::Flags::empty(), i32::MAX.cast_unsigned());
        if (asked && answer == NO_REQUEST) || matches!(word.load(Ordering::SeqCst), NO_REQUEST | PREPARING) {
            if incoming.space_armed.0.has_sleepers() || outgoing.data_armed.0.has_sleepers() {
                // No bell was sent while the peer asked.
                self.ring(fd, segment);
            }
            return self.note_refusal(fd, segment);
        }
        if !asked {
            // Else a process of this side answered so, and died.
            let is_final = word.load(Ordering::SeqCst) == FINAL;
            if is_final {
                // It had taken everything, but for what was published before this side could see that it had asked.
                most = most.min(PIECE as u64);
            }
            self.make_fit(fd, most.saturating_add(aside));
            // A program that does not block must not, whatever the peer says.
            if (is_final && aside != 0) || !fits(most) {
                return self.lose(fd);
            }
        }
        let left = segment.untaken(most).map(|untaken| {
            let mut left = segment.copy_aside_of_peer(at_peer);
            left.extend(untaken);
            left
        });
        self.block.raise(flag::MOVING);
        let kept = self.keep_what_came(fd, segment);
        self.block.raise(flag::BELLS_FIRST);
        let counted = self.count_bells(fd, segment);
        self.be_back(segment);
        let (true, Some(left)) = (kept && counted, left) else {
            self.block.lower(flag::MOVING);
            return self.lose(fd);
        };
        self.send_all(fd, segment, &left);
        add(&self.block.tcp_sent, left.len() as u64);
        outgoing.tail.0.store(outgoing.head(), Ordering::Release);
        self.block.lower(flag::MOVING);
        if !incoming.data_armed.0.has_sleepers() && !outgoing.space_armed.0.has_sleepers() {
            // A program that never reads again would leave them to its end, which they would make a reset. Not if somebody may have to be
            // woken by them first.
            self.skip_last_bells(fd, segment);
        }
        self.restore_options(fd);
        self.shut_for_good(fd);
        self.refuse_for_good(fd);
    }

    /// A request came to nothing. A peer that asks without end would keep this side from doing anything else: so many it may have between
    /// two things that this side does.
    fn note_refusal(&self, fd: i32, segment: &Segment) {
        // By words that the peer does not write.
        let done = segment.incoming().tail().wrapping_add(segment.outgoing().head());
        if self.refused_at.swap(done, Ordering::Relaxed) != done {
            self.refusals.store(0, Ordering::Relaxed);
        }
        if self.refusals.fetch_add(1, Ordering::Relaxed) >= MOST_REFUSALS {
            self.lose(fd);
        }
    }

    /// See [`Self::go_back_second`]; the caller holds the receive lock.
    #[cold]
    pub(crate) fn follow_back(&self, fd: i32, segment: &Segment) -> Result<(), Errno> {
        let _uninterrupted = Uninterrupted::begin();
        if self.is_closed() {
            return Ok(());
        }
        if segment.outgoing().end() & end::RETURN != 0 {
            self.go_on_with_request(fd, segment);
        }
        let _guard = self.lock_sending(fd)?;
        if self.is_asked_back(segment) {
            self.go_back_second(fd, segment);
        }
        Ok(())
    }

    /// A process died that had asked: this end goes on where it was. The caller holds the receive lock.
    #[cold]
    fn go_on_with_request(&self, fd: i32, segment: &Segment) {
        let Ok(_guard) = self.lock_sending(fd) else { return };
        let outgoing = segment.outgoing();
        let withdrawn = change(outgoing, ASKED, NO_REQUEST) || change(outgoing, PREPARING, NO_REQUEST);
        if withdrawn || outgoing.rung.0.handing.load(Ordering::SeqCst) == NO_REQUEST {
            stay(outgoing);
            // A bell that the dead process owed.
            self.ring(fd, segment);
            self.note_refusal(fd, segment);
        } else {
            self.leave(fd, segment);
        }
    }

    /// Makes the count of this side's bells exact: who was killed in between has counted one that was never sent. False if that can't
    /// be, because the kernel of an `AF_UNIX` socket has not counted them. The caller holds both locks, so that nobody rings.
    fn count_bells(&self, fd: i32, segment: &Segment) -> bool {
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        if self.block.has(flag::INHERITED)
            && self.block.send_switched.load(Ordering::Relaxed) != 0
            && let Ok(counts) = tcp::counts(socket)
        {
            let bells = counts.sent.wrapping_sub(self.block.tcp_sent.load(Ordering::Relaxed));
            segment.outgoing().rung.0.count.store(bells, Ordering::SeqCst);
            return true;
        }
        let rang = self.block.send_switched.load(Ordering::Relaxed) != 0;
        !(self.is_unix() && rang && self.block.has(flag::INHERITED))
    }

    /// Both directions of this side are on TCP from now on. [`Connection::restore_options`] is to follow, behind what has to be sent at once.
    fn be_back(&self, segment: &Segment) {
        segment.take_down();
        // Also if this side has sent nothing since both were ready.
        self.block.raise(flag::READY);
        self.block.come_back();
        self.block.recv_switched.store(0, Ordering::SeqCst);
        self.block.send_switched.store(0, Ordering::SeqCst);
    }

    /// Hands ends of the stream that only the ring knows to the kernel.
    pub(crate) fn shut_for_good(&self, fd: i32) {
        if self.block.has(flag::SHUT_WR) {
            tcp::shutdown(fd, Shutdown::Write);
        }
    }

    /// Tells the kernel of an `AF_UNIX` socket that this side reads no more, which until now only the peer's hooks know ([`end::REFUSES`]).
    /// Not before the peer has sent again what it has promised: the kernel would take none of it.
    pub(crate) fn refuse_for_good(&self, fd: i32) {
        if self.is_unix() && self.block.has(flag::SHUT_RD) {
            tcp::shutdown(fd, Shutdown::Read);
        }
    }

    /// Before the last bells are taken: a writer of this process that sleeps for space until there is something to read is woken by them, and has
    /// to run first. Not for ever: its process may be stopped.
    pub(crate) fn let_writers_hear(&self) {
        if self.has_writers_asleep() {
            let deadline = Instant::now() + UNTIL_HEARD;
            while self.has_writers_asleep() && Instant::now() < deadline {
                rustix::thread::sched_yield();
            }
        }
    }

    /// Takes the bells that the peer had sent before it went back. True if what comes now is the application's. The caller
    /// holds the receive lock.
    #[cold]
    pub(crate) fn skip_last_bells(&self, fd: i32, segment: &Segment) -> bool {
        if self.is_closed() {
            return true;
        }
        let (mut bytes, mut taken) = ([0u8; 64], 0);
        loop {
            // SAFETY: the buffer is writable for its length.
            let seen = unsafe {
                tcp::recv(fd, bytes.as_mut_ptr(), bytes.len(), libc::MSG_DONTWAIT | libc::MSG_PEEK)
            };
            // After that: a bell that could not be sent was uncounted before anything else was sent.
            let count = segment.incoming().rung.0.count.load(Ordering::SeqCst);
            let left = count.wrapping_sub(self.block.drained.load(Ordering::Relaxed));
            if let Err(errno) = seen
                && !matches!(errno, Errno::AGAIN | Errno::INTR)
            {
                // The kernel says so once.
                self.note_error(fd, errno);
            }
            let take = match seen {
                _ if left == 0 => ControlFlow::Break(true),
                _ if taken >= ENDLESS_BELLS => ControlFlow::Break(false),
                Ok(seen) if seen > 0 => ControlFlow::Continue((seen as u64).min(left) as usize),
                Err(Errno::AGAIN | Errno::INTR) => ControlFlow::Break(false),
                // The read itself will tell.
                Ok(_) | Err(_) => ControlFlow::Break(true),
            };
            match take {
                ControlFlow::Continue(bells) => {
                    // SAFETY: as above; they are there, and nobody else reads.
                    if let Ok(bells) = unsafe { tcp::recv(fd, bytes.as_mut_ptr(), bells, libc::MSG_DONTWAIT) }
                    {
                        add(&self.block.drained, bells as u64);
                        taken += bells as u64;
                    }
                }
                ControlFlow::Break(through) => {
                    if taken > 0 {
                        self.acknowledge(fd);
                    }
                    if through {
                        self.block.lower(flag::BELLS_FIRST);
                    }
                    return through;
                }
            }
        }
    }

    /// Whether the kernel takes `bytes` for sending at once, whatever the peer reads: a program that does not block must not.
    pub(crate) fn fits(&self, fd: i32, bytes: u64) -> bool {
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        let buffer = sockopt::socket_send_buffer_size(socket).unwrap_or(0) as u64;
        tcp::queued(fd).is_some_and(|queued| match self.is_unix() {
            // What is queued is told with the kernel's own structures.
            true => bytes.saturating_mul(UNIX_BUFFER_PER_BYTE).saturating_add(queued) <= buffer,
            false => bytes.saturating_add(queued) <= buffer / BUFFER_PER_BYTE,
        })
    }

    /// Enlarges the kernel's buffer, if need be, so that `bytes` fit.
    pub(crate) fn make_fit(&self, fd: i32, bytes: u64) {
        if bytes == 0 || self.fits(fd, bytes) {
            return;
        }
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        let wanted = tcp::queued(fd).unwrap_or(0).saturating_add(bytes).saturating_mul(BUFFER_PER_BYTE);
        let _ = sockopt::set_socket_send_buffer_size(socket, usize::try_from(wanted).unwrap_or(usize::MAX));
    }

    /// Has the kernel acknowledge what has come. Behind a bell that is not acknowledged Nagle's algorithm holds what the peer sends
    /// next, some 40 ms, now that its socket is as the program wants it.
    fn acknowledge(&self, fd: i32) {
        if !self.is_unix() {
            // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
            let socket = unsafe { BorrowedFd::borrow_raw(fd) };
            let _ = rustix::net::sockopt::set_tcp_quickack(socket, true);
        }
    }
}

/// The request has been withdrawn.
fn stay(outgoing: &Control) {
    outgoing.rare.0.end.fetch_and(!end::RETURN, Ordering::SeqCst);
}

fn change(control: &Control, from: u32, to: u32) -> bool {
    control.rung.0.handing.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}

//! What it means that the kernel says that the peer is gone, and what the program is told of it.
//!
//! On one host the segment shows all that the peer did before. Between hosts bytes may have been lost with its queue pair:
//! see [`crate::verbs`], `word`.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use crate::arena::flag;
use crate::connection::Connection;
use crate::control::{NOT_SWITCHED, end};
use crate::failover::has_switched;
use crate::segment::{Greeting, Segment};
use crate::{tcp, waiting};

impl Connection {
    /// The kernel says reset. That may be for nothing but unread bells: where the peer has taken all that this side
    /// sent, plain TCP would have ended the stream in order; unless that has cut the peer's stream short. Or it answers a write after the end.
    pub(crate) fn note_reset(&self, fd: i32) {
        let block = self.block;
        // Where both directions had ended, TCP would have had nothing left to reset, whatever is unread.
        let resets = |segment| {
            self.has_lost_on_tcp(fd, segment)
                || !self.has_taken_all(segment) && (self.is_unix() || !self.both_have_ended(segment))
        };
        let unread = block.send_switched.load(Ordering::Acquire) == 0
            || block.has(flag::VOID)
            || self.segment().is_some_and(resets);
        if unread {
            block.raise(flag::RESET);
        }
        self.note_gone(fd);
    }

    /// The kernel ended the connection with `errno`, and says so once.
    pub(crate) fn note_error(&self, fd: i32, errno: Errno) {
        if matches!(errno, Errno::BADF | Errno::NOTSOCK) {
            // Another thread has closed this descriptor at this very moment: it says nothing of the connection.
            return;
        }
        // Those that tcp(7) passes on from the network. Others are about this call.
        let of_network = matches!(
            errno,
            Errno::TIMEDOUT
                | Errno::HOSTUNREACH
                | Errno::NETUNREACH
                | Errno::HOSTDOWN
                | Errno::NETDOWN
                | Errno::NONET
                | Errno::NOPROTOOPT
                | Errno::PROTO
                | Errno::CONNREFUSED
        );
        let is_on_tcp = || self.segment().is_some_and(|segment| self.is_on_tcp(segment));
        let of_kernel = of_network || matches!(errno, Errno::CONNRESET | Errno::PIPE) && is_on_tcp();
        if !of_kernel {
            return self.note_reset(fd);
        }
        if errno == Errno::CONNRESET && self.segment().is_some_and(|segment| self.is_for_bells(segment)) {
            return self.note_gone(fd);
        }
        self.block.error.store(errno.raw_os_error().cast_unsigned(), Ordering::Relaxed);
        self.block.raise(flag::PEER_GONE | flag::RESET);
    }

    /// Whether the reset of an `AF_UNIX` socket, once this side is back on it, can only be for the bells of the way back: the peer has died before
    /// it followed, and had taken all that this side sent.
    fn is_for_bells(&self, segment: &Segment) -> bool {
        let peer = &segment.incoming().rare.0;
        // On TCP it may answer a write, too.
        self.is_unix()
            && self.has_returned()
            && segment.incoming().end() & end::RETURN == 0
            && self.block.tcp_sent.load(Ordering::Relaxed) <= peer.taken.load(Ordering::Acquire)
    }

    /// Whether no byte and no bell is anywhere but on TCP: then which of its two errors a reset is, the kernel knows.
    pub(crate) fn is_on_tcp(&self, segment: &Segment) -> bool {
        self.has_returned()
            || (self.block.send_switched.load(Ordering::Acquire) == 0 && !has_switched(segment.incoming()))
    }

    /// The kernel says end of stream. After a `shutdown(SHUT_RD)` of our own it always does, so ask further.
    pub(crate) fn note_end(&self, fd: i32) {
        // On `AF_UNIX` it may have come before the switch, or after a return: then the kernel says so each time.
        if (!self.block.has(flag::SHUT_RD) && !self.is_unix()) || self.peer_has_closed(fd) {
            self.note_gone(fd);
        }
    }

    /// Whether the peer has closed its socket, as far as this side can know: an `AF_UNIX` socket that this side has shut down, or whose
    /// peer reads no more, either, looks the same.
    pub fn peer_has_closed(&self, fd: i32) -> bool {
        let sends_nothing = || self.block.has(flag::SHUT_WR) || self.is_refused();
        if self.is_unix() && self.block.has(flag::SHUT_RD) && sends_nothing() {
            return self.segment().is_some_and(|segment| segment.incoming().end() & end::CLOSED != 0);
        }
        tcp::peer_has_closed(fd)
    }

    /// The peer has closed its socket, or has died.
    pub(crate) fn note_gone(&self, fd: i32) {
        let known = self.block.has(flag::PEER_GONE);
        self.stop_fabric();
        let lost = !known && self.segment().is_some_and(|segment| self.has_lost(fd, segment));
        self.block.raise(flag::PEER_GONE | if lost { flag::RESET } else { 0 });
    }

    /// A read that has told of the end must be the last that finds bytes: some may still be on their way.
    fn stop_fabric(&self) {
        if let Some(segment) = self.segment().filter(|_| !self.block.has(flag::RETURNED))
            && let Some(link) = segment.link().filter(|link| !link.is_frozen())
        {
            link.stop(segment.incoming(), segment.outgoing());
        }
    }

    /// Whether bytes that the peer has sent over a queue pair may have been lost with it, unless something is known to the
    /// contrary: it has not announced an end.
    fn may_lack(&self, segment: &Segment) -> bool {
        let incoming = segment.incoming();
        let by_queue_pair = if self.block.has(flag::RETURNED) {
            segment.greeting() == Greeting::AwaitsDown && !self.block.has(flag::HAD_ALL)
        } else {
            has_switched(incoming)
        };
        segment.link().is_some() && by_queue_pair && incoming.end() & end::FIN == 0
    }

    /// Whether the stream of a peer that is gone may have been cut short.
    fn has_lost(&self, fd: i32, segment: &Segment) -> bool {
        let Some(link) = segment.link() else { return false };
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        let Ok(received) = tcp::counts(socket).map(|counts| counts.received) else { return true };
        if !self.may_lack(segment) {
            // What it began to send again over TCP must have come.
            return self.block.has(flag::RETURNED)
                && segment.incoming().end() & end::FIN == 0
                && received < segment.again().until.load(Ordering::SeqCst);
        }
        if tcp::is_over(fd) && !link.has_last_word() {
            // A reset does not wait for the bells before it, which would have told of what is missing.
            return true;
        }
        let switched_at = match segment.incoming().rare.0.switched_at.load(Ordering::Acquire) {
            NOT_SWITCHED => 0,
            at => at,
        };
        let before = switched_at.max(self.block.tcp_received.load(Ordering::Relaxed)) + segment.greeted()[1];
        !link.has_all(received.wrapping_sub(before))
    }

    /// How the peer reset the connection, if it did: `ECONNRESET`, or `EPIPE` if its stream had ended before
    /// (`tcp_reset` of net/ipv4/tcp_input.c), but not on `AF_UNIX`. A process that died without having taken all that this side sent has
    /// reset it, too.
    pub(crate) fn reset(&self, segment: &Segment) -> Option<Errno> {
        let ended = segment.incoming().end();
        let ended_before = !self.is_unix()
            && (self.block.has(flag::VOID)
                || (ended & end::FIN != 0 && (ended & end::RESET == 0 || ended & end::LATE != 0)));
        // Then a dead peer's kernel has nothing left to reset.
        let is_over = || !self.is_unix() && self.both_have_ended(segment);
        let died = self.block.has(flag::PEER_GONE) && ended & (end::CLOSED | end::DEAF) == 0 && !is_over();
        // Where both ends are on TCP the kernel says so, and the end of a stream may come before the process's.
        let aborts = ended & end::ABORTS != 0 && segment.is_ready();
        let was_reset = ended & end::RESET != 0
            || self.block.has(flag::RESET)
            || (died && (aborts || !self.has_taken_all(segment)));
        let error = self.block.error.load(Ordering::Relaxed);
        match i32::try_from(error) {
            Ok(error) if was_reset && error != 0 => Some(Errno::from_raw_os_error(error)),
            _ => was_reset.then_some(if ended_before { Errno::PIPE } else { Errno::CONNRESET }),
        }
    }

    /// The reset of which the application does not know yet.
    pub(crate) fn untold_reset(&self, segment: &Segment) -> Option<Errno> {
        self.reset(segment).filter(|_| !self.block.has(flag::RESET_TOLD))
    }

    /// Notes that the application has been told of `errno`, as the kernel forgets an error that it has reported.
    pub fn told(&self, errno: Errno) -> Errno {
        if self.segment().is_some_and(|segment| self.reset(segment) == Some(errno)) {
            self.block.raise(flag::RESET_TOLD);
        }
        errno
    }

    /// Whether the kernel says that the peer has closed or died. Looks once, without waiting.
    pub(crate) fn peer_is_gone(&self, fd: i32) -> bool {
        if self.is_closed() {
            return self.block.has(flag::PEER_GONE);
        }
        self.look_for_down(fd);
        let mut byte = 0;
        // SAFETY: one writable byte.
        match unsafe { tcp::recv(fd, &raw mut byte, 1, libc::MSG_PEEK | libc::MSG_DONTWAIT) } {
            Ok(0) => self.note_end(fd),
            // The end may lie behind a bell that had to stay. An orderly one, if the kernel knows of no error.
            Ok(_) if self.peer_has_closed(fd) => {
                self.look_for_down(fd);
                let is_known = || tcp::is_over(fd) && self.look_for_error(fd);
                if !self.is_before_frame() && !is_known() {
                    self.note_gone(fd);
                }
            }
            Err(Errno::AGAIN | Errno::INTR) | Ok(_) => {}
            Err(errno) => self.note_error(fd, errno),
        }
        self.block.has(flag::PEER_GONE)
    }

    /// Whether what is unread on TCP, if anything is, may be the frame by which the peer goes back: it tells what to make of the end behind it.
    pub(crate) fn is_before_frame(&self) -> bool {
        self.segment().is_some_and(|segment| {
            let awaits_it = || self.has_returned() && segment.greeting() == Greeting::AwaitsDown;
            segment.link().is_some() && (segment.has_failed() || awaits_it())
        })
    }

    /// Whether both directions have ended, or the peer has reset the connection: then the kernel's state is `TCP_CLOSE`.
    pub fn is_over(&self, fd: i32) -> bool {
        let Some(segment) = self.segment() else { return false };
        let ended = segment.incoming().end();
        let gone = self.block.has(flag::PEER_GONE) || tcp::peer_has_closed(fd);
        let died = gone && ended & (end::CLOSED | end::DEAF) == 0;
        // A reset may be for nothing but unread bells, as long as it is not known what the peer has taken.
        let sends_in_ring = self.block.send_switched.load(Ordering::Acquire) != 0;
        let unread =
            sends_in_ring && (self.reset(segment).is_some() || (died && !self.has_taken_all(segment)));
        // But there was never a bell, and what this side sends the kernel knows.
        let unread_on_tcp = || {
            !sends_in_ring && self.block.doorbells.load(Ordering::Relaxed) == 0 && gone && tcp::is_over(fd)
        };
        let peer_has_ended = gone || ended & (end::FIN | end::CLOSED | end::DEAF) != 0;
        // What the program has been told of was one.
        let known = ended & end::RESET != 0 || self.block.has(flag::RESET_TOLD);
        known || unread || (self.block.has(flag::SHUT_WR) && peer_has_ended) || unread_on_tcp()
    }

    /// This side is about to shut down a direction of a connection that [`Self::is_over`]. If the peer has reset it by dying, it did so
    /// before: the end of both directions would hide that.
    pub fn keep_reset(&self, fd: i32) {
        let Some(segment) = self.segment() else { return };
        if !self.block.has(flag::PEER_GONE) && self.peer_has_closed(fd) {
            self.note_gone(fd);
        }
        if self.reset(segment).is_some() {
            self.block.raise(flag::RESET);
        }
    }

    /// Whether the peer has taken all that this side has sent, as far as memory shows.
    fn has_taken_all(&self, segment: &Segment) -> bool {
        // What programs have taken without hooks, after a return, nobody knows.
        segment.outgoing().is_empty() && (!segment.is_ready() || !self.is_under_way(segment))
    }

    /// Whether some of what this side has sent over TCP has not been taken by the peer, as far as memory shows: should the kernel reset the
    /// connection, it would be lost. What a peer on another host has taken nobody knows.
    pub(crate) fn is_under_way(&self, segment: &Segment) -> bool {
        if segment.is_alone() {
            return false;
        }
        let sent = match segment.outgoing().rare.0.switched_at.load(Ordering::Acquire) {
            NOT_SWITCHED => self.block.tcp_sent.load(Ordering::Relaxed),
            at => at,
        };
        sent > segment.incoming().rare.0.taken.load(Ordering::Acquire)
    }

    /// Whether a reset has thrown away some of what the peer had sent over TCP before it left that: less is there than was to come.
    pub(crate) fn has_lost_on_tcp(&self, fd: i32, segment: &Segment) -> bool {
        let left = waiting::tcp_left(&self.socket(fd, segment));
        if left == u64::MAX || self.is_unix() || !tcp::is_over(fd) {
            return false;
        }
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        tcp::unread(socket).is_ok_and(|there| there < left)
    }
}

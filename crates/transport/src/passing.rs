//! What it means that the kernel says that the peer is gone.
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
use crate::tcp;

impl Connection {
    /// The kernel says reset. That may be for nothing but unread bells: where the peer has taken all that this side
    /// sent, plain TCP would have ended the stream in order. Or it answers a write after the end.
    pub(crate) fn note_reset(&self, fd: i32) {
        let block = self.block;
        let unread = block.send_switched.load(Ordering::Acquire) == 0
            || block.has(flag::VOID)
            || self.segment().is_some_and(|segment| !segment.outgoing().is_empty());
        if unread {
            block.raise(flag::RESET);
        }
        self.note_gone(fd);
    }

    /// The kernel ended the connection with `errno`, and says so once.
    pub(crate) fn note_error(&self, fd: i32, errno: Errno) {
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
        self.block.error.store(errno.raw_os_error().cast_unsigned(), Ordering::Relaxed);
        self.block.raise(flag::PEER_GONE | flag::RESET);
    }

    /// Whether no byte and no bell is anywhere but on TCP: then which of its two errors a reset is, the kernel knows.
    pub(crate) fn is_on_tcp(&self, segment: &Segment) -> bool {
        self.has_returned()
            || (self.block.send_switched.load(Ordering::Acquire) == 0 && !has_switched(segment.incoming()))
    }

    /// The kernel says end of stream. After a `shutdown(SHUT_RD)` of our own it always does, so ask further.
    pub(crate) fn note_end(&self, fd: i32) {
        if !self.block.has(flag::SHUT_RD) || tcp::peer_has_closed(fd) {
            self.note_gone(fd);
        }
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
            segment.greeting() == Greeting::AwaitsDown
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
}

//! How this side ends: a direction, by shutdown(2); its use of the connection, by close(2); its process. What it means that the peer has
//! ended is the business of [`crate::passing`].

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::Shutdown;

use crate::arena::flag;
use crate::connection::Connection;
use crate::control::end;
use crate::segment::Segment;
use crate::{tcp, waiting};

impl Connection {
    /// Shuts down sending: a mark in the ring. The kernel's own shutdown waits for close, because bells
    /// must still pass. `Ok(false)` if the connection is not in the ring and the kernel has to do it.
    /// With `both`, the program shuts down receiving by the same call.
    pub fn shut_sending(&self, fd: i32, both: bool) -> Result<bool, Errno> {
        let Some(segment) = self.segment() else { return Ok(false) };
        let _guard = self.lock_sending(fd)?;
        if !self.send_switched(fd, segment) {
            return Ok(false);
        }
        if segment.link().is_some() && self.block.has(flag::SHUT_WR) {
            // The ring has room for one such message, whatever is unread.
            return Ok(true);
        }
        self.block.raise(flag::SHUT_WR);
        self.note_repeat(segment, end::FIN);
        // On `AF_UNIX` the peer sees both at the same moment.
        let deaf = if both && self.is_unix() { end::DEAF } else { 0 };
        if segment.finish(end::FIN | deaf) {
            self.ring(fd, segment);
        }
        Ok(true)
    }

    /// Shuts down receiving, where the kernel must not be told because bells come that way (`AF_UNIX`): a mark for the peer.
    pub fn shut_receiving(&self, fd: i32) {
        let Some(segment) = self.segment() else { return };
        // While it is held nobody goes back to the kernel's socket, where a bell must not follow the application's bytes. A signal handler
        // that has interrupted its own thread's write does without.
        let _guard = self.lock_sending(fd);
        self.note_repeat(segment, end::REFUSES);
        let sleeps = segment.finish(end::REFUSES);
        if (segment.incoming().claim_space_bell() || sleeps) && self.send_switched(fd, segment) {
            self.ring(fd, segment);
        }
    }

    /// This side is about to shut down receiving, and may have shut down both directions before.
    pub fn note_deaf_again(&self) {
        if let Some(segment) = self.segment() {
            self.note_repeat(segment, end::DEAF);
        }
    }

    /// This side is about to set `bit` of [`end`]: an edge at the peer also if it has before.
    fn note_repeat(&self, segment: &Segment, bit: u32) {
        let rare = &segment.outgoing().rare.0;
        if self.is_unix() && rare.end.load(Ordering::Relaxed) & bit != 0 {
            rare.repeats.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Changes whenever the peer shuts down again what was shut down, as it does by closing its socket: an edge on `AF_UNIX`.
    pub fn repeated_shutdowns(&self) -> u32 {
        let Some(segment) = self.segment().filter(|_| self.is_unix()) else { return 0 };
        let ended = segment.incoming().end();
        let closed = ended & end::CLOSED != 0 || self.block.has(flag::PEER_GONE) && ended & end::DEAF == 0;
        segment.incoming().rare.0.repeats.load(Ordering::Acquire).wrapping_add(u32::from(closed))
    }

    /// Says that this side has shut down both directions, if so. To be called before the kernel is told: an end that comes without
    /// this word is a dead peer's.
    pub fn go_deaf(&self) -> bool {
        let Some(segment) = self.segment().filter(|segment| segment.link().is_none()) else { return false };
        let is_deaf = self.block.has(flag::SHUT_RD) && self.block.has(flag::SHUT_WR);
        if is_deaf {
            segment.finish(end::DEAF);
        }
        is_deaf
    }

    /// After [`Self::go_deaf`]: nobody waits for a bell of this side's any more, so the kernel may be told, too: it wakes the peer.
    pub fn shut_for_both(&self, fd: i32) {
        if self.go_deaf() {
            tcp::shutdown(fd, Shutdown::Both);
        }
    }

    /// The kernel has ended the connection, because the program wanted it to (connect(2) to `AF_UNSPEC`): with a reset, but where both
    /// directions had ended (`tcp_disconnect` of net/ipv4/tcp.c). The socket may be connected anew.
    pub fn disconnected(&self) {
        if let Some(segment) = self.segment().filter(|segment| segment.link().is_none())
            && segment.is_ready()
            && !self.has_returned()
        {
            segment.finish(end::FIN | end::CLOSED | self.reset_at_end(segment, false, true));
        }
    }

    /// Ends this side's use of the segment, before the socket's last descriptor on this host is closed.
    pub fn finish(&self, fd: i32) {
        let abort = tcp::lingers_not(fd);
        self.mend_if_failing(fd);
        let Some(segment) = self.segment() else { return };
        if segment.link().is_none() && segment.outgoing().end() & end::CLOSED != 0 {
            // The socket is another connection's by now, or none's.
            return;
        }
        if self.block.has(flag::BELLS_FIRST)
            && let Ok(_guard) = self.lock_receiving(fd)
        {
            // Unread, they would make a reset of the end.
            self.skip_last_bells(fd, segment);
        }
        // SAFETY: the caller's descriptor, which is open.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        // Or the peer would leave TCP for a ring that nobody reads. It may have been faster, or this side has refused before.
        let stays = !segment.is_ready() && (segment.refuse() || !segment.is_ready());
        if stays || self.has_returned() {
            self.end_by_kernel(fd, segment, abort);
        }
        if stays {
            return;
        }
        let in_memory = segment.link().is_none() && !self.has_returned();
        let settled = waiting::looks_settled(&self.socket(fd, segment));
        let on_tcp = in_memory && !settled && tcp::unread(socket).is_ok_and(|count| count > 0);
        self.take_leftover_bells(fd, segment);
        let incoming = segment.incoming();
        let unread = !incoming.is_empty() || self.side_length() > 0 || on_tcp;
        let reset = self.reset_at_end(segment, unread, abort);
        if in_memory && reset != 0 && self.is_reset_by_kernel(segment) {
            tcp::set_linger(fd, Some(Duration::ZERO));
        }
        let hears = incoming.end() & end::CLOSED == 0;
        if in_memory && abort && self.both_have_ended(segment) && hears {
            // Of the two ends the kernel has not been told, and a reset would be one to the peer. One that has closed hears of none; and if
            // its kernel's end came after this side's, this side's address would be kept for a while (TIME_WAIT).
            tcp::set_linger(fd, None);
        }
        // Over a fabric it is a message, and another thread may be in the middle of one.
        let sending = segment.link().map(|_| self.lock_sending(fd));
        if !matches!(sending, Some(Err(_))) {
            // No bell: the kernel's FIN follows at once and wakes everybody.
            segment.finish(end::FIN | end::CLOSED | reset);
        }
        drop(sending);
        // Asked just now: what is left in the ring could not follow later.
        self.mend_if_failing(fd);
        if segment.link().is_some() && self.has_returned() {
            return self.end_by_kernel(fd, segment, abort);
        }
        self.finish_fabric(fd, segment);
    }

    /// To be called between [`Self::shut_sending`] and a shutdown of both directions by the kernel, whose FIN would overtake what has been
    /// sent over a fabric: waits for it, as closing does.
    pub fn flush_fabric(&self, fd: i32) {
        if let Some(segment) = self.segment().filter(|_| !self.has_returned()) {
            self.finish_fabric(fd, segment);
        }
    }

    fn finish_fabric(&self, fd: i32, segment: &Segment) {
        // To a peer that has closed nothing gets through any more.
        let gone = || segment.incoming().end() & end::CLOSED != 0 || tcp::peer_has_closed(fd);
        if let Some(link) = segment.link().filter(|_| !gone()) {
            link.finish(segment.incoming());
        }
    }

    /// The kernel is about to end this side, and knows neither of bytes that are unread here nor of frames.
    fn end_by_kernel(&self, fd: i32, segment: &Segment, abort: bool) {
        if self.has_hidden_bytes(segment) {
            tcp::set_linger(fd, Some(Duration::ZERO));
            if self.is_unix() {
                // It resets nothing for that; the peer's hooks are told.
                segment.finish(end::FIN | end::CLOSED | end::RESET);
            }
        } else if !abort {
            self.end_before_frames(fd);
        }
    }

    /// Whether bytes are unread of which the kernel does not know: they have been put aside, or are in the ring of a peer that went back
    /// alone, because this side had told its kernel that it reads no more. It would end the stream in order.
    fn has_hidden_bytes(&self, segment: &Segment) -> bool {
        let in_ring = || !segment.is_ready() && !self.has_returned() && !segment.incoming().is_empty();
        self.side_length() > 0 || in_ring()
    }

    /// The bits of [`end`] by which the end of this side resets the other, if bytes are `unread`, or the program wants that (`abort`).
    fn reset_at_end(&self, segment: &Segment, unread: bool, abort: bool) -> u32 {
        let late = if self.block.has(flag::SHUT_WR) { end::LATE } else { 0 };
        match self.is_unix() {
            // Whatever has been shut down, and whatever lingers (`unix_release_sock` of net/unix/af_unix.c).
            true if unread => end::RESET,
            false if (abort || unread) && !self.both_have_ended(segment) => end::RESET | late,
            _ => 0,
        }
    }

    /// After that the kernel has nothing left to reset (`__tcp_close` of net/ipv4/tcp.c).
    pub(crate) fn both_have_ended(&self, segment: &Segment) -> bool {
        self.block.has(flag::SHUT_WR) && segment.incoming().end() & end::FIN != 0
    }

    /// Whether a reset that memory tells of is to be the kernel's, too: it then says itself that the connection is over (`ENOTCONN` of
    /// getpeername(2), and whatever it alone can answer). Once its FIN has been sent nothing else would wake the peer. Not where it takes
    /// bytes that are under way.
    fn is_reset_by_kernel(&self, segment: &Segment) -> bool {
        self.has_shut_both() || !self.is_unix() && !self.is_under_way(segment)
    }

    fn has_shut_both(&self) -> bool {
        self.block.has(flag::SHUT_RD) && self.block.has(flag::SHUT_WR)
    }

    /// The process ends, or becomes another program, without having closed it: what has been posted must arrive first, and the
    /// peer know that it has. To be called for all connections without, and then with waiting. `ends`: no other program inherits them.
    pub fn settle_fabric(&self, fd: i32, ends: bool, waits: bool) {
        let Some(segment) = self.segment() else { return };
        if !ends {
            self.take_leftover_frames(fd);
        } else if waits && self.has_returned() && self.block.held_only_by(crate::process::id()) {
            self.end_by_kernel(fd, segment, tcp::lingers_not(fd));
        }
        let gone = self.block.has(flag::PEER_GONE) || segment.incoming().end() & end::CLOSED != 0;
        match segment.link().filter(|link| !gone && link.is_usable()) {
            Some(link) if waits => {
                link.settle(segment.incoming());
                self.take_leftover_bells(fd, segment);
            }
            Some(link) => link.begin_to_finish(),
            None => {}
        }
    }

    /// The process ends without having closed it. Nothing else in memory would tell a peer that writes, and looks at nothing; and the
    /// kernel may not know of bytes that are unread. `fd` finds a descriptor of it; a thread that closes that at this very moment, and opens another
    /// socket as the same number, would have the kernel reset that one.
    pub fn announce_exit(&self, fd: impl FnOnce() -> Option<i32>) {
        let Some(segment) = self.segment().filter(|segment| segment.link().is_none()) else { return };
        if !self.block.held_only_by(crate::process::id()) {
            return;
        }
        let word = &segment.outgoing().rare.0.end;
        let reset = self.reset_at_end(segment, self.has_hidden_bytes(segment), false);
        word.fetch_or(end::LEAVES | reset, Ordering::SeqCst);
        let by_kernel = || self.has_returned() || !segment.is_ready() || self.has_shut_both();
        let peer_returned = || segment.incoming().end() & end::RETURN != 0 && !self.has_returned();
        let reset_loses = || !self.has_returned() && self.is_under_way(segment);
        if reset != 0 {
            if by_kernel()
                && let Some(fd) = fd()
            {
                tcp::set_linger(fd, Some(Duration::ZERO));
            }
        } else if (peer_returned() || reset_loses() || self.block.has(flag::BELLS_FIRST))
            && let Some(fd) = fd()
        {
            // For one that is back on the kernel's socket, the reset that unread bells cause would be one; and from any it takes what is
            // under way. What the peer has sent since is not ours to take.
            if !self.has_returned() {
                self.take_counted_bells(fd, segment);
            } else if let Ok(_guard) = self.lock_receiving(fd) {
                self.skip_last_bells(fd, segment);
            }
        }
    }
}

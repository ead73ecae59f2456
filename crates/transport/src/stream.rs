//! The byte stream of an active connection, through whichever door it goes now.
//!
//! Each direction runs through TCP up to a byte count that its sender publishes when it leaves, and through
//! the ring from there. After that count TCP carries only *frames*: [`BELL`], and between hosts DOWN ([`crate::failover`]).
//!
//! ```text
//!  sender     TCP bytes ………… switched_at │ ring bytes …………      bells when a sleeper armed
//!  receiver   side buffer, kernel ………… = │ ring …………            bells drained when the ring is empty
//! ```
//!
//! Every function here returns `EAGAIN` instead of sleeping while it holds a lock.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{Ordering, fence};

use rustix::io::Errno;

use crate::arena::flag;
use crate::buffers::{Buffers, ControlData};
use crate::connection::Connection;
use crate::control::{Control, end};
use crate::count::Way;
use crate::ring::{Lie, Pushed};
use crate::room::home;
use crate::segment::{Greeting, Outlet, Segment};
use crate::socket::Socket;
use crate::verbs::link::Failed;
use crate::waiting::{self, add};
use crate::{tcp, unix};

/// The frame that wakes: one byte, no content.
pub const BELL: u8 = 1;

/// The fabric has failed: the connection is to go back to TCP before anything else ([`Connection::mend`]). No application
/// sees it.
pub(crate) const FAILED: Errno = Errno::NOLINK;

/// Largest piece that is published at once, so that the reader of a long write starts early.
pub(crate) const PIECE: usize = 32 << 10;

/// Small pieces of one write are published together, up to so many bytes: a reader may count on seeing a header with what
/// follows it, as it does over TCP.
const GATHERED: usize = 2048;

/// Pushes without any progress of the consumer after which the sender asks the kernel whether the peer lives.
pub(crate) const BLIND_PUSHES: u64 = 16;

/// What a new TCP connection's kernel takes before its program reads, in bytes (half of `net.ipv4.tcp_rmem`'s second number).
const WINDOW: u64 = 64 << 10;

/// What came over TCP.
pub(crate) struct Taken {
    /// Bytes.
    pub(crate) count: usize,
    /// Whether that is all that was asked for, so that there may be more.
    pub(crate) filled: bool,
}

/// Whether an error says nothing of the connection.
fn is_of_this_call(errno: Errno) -> bool {
    matches!(errno, Errno::AGAIN | Errno::INTR | Errno::FAULT | Errno::BADF | Errno::NOTSOCK)
}

fn lie(_: Lie) -> Errno {
    Errno::CONNRESET
}

impl Connection {
    /// Receives as recv(2) does, without sleeping. `Ok(0)` is the end of the stream, or of what a call that has some bytes may have; `EAGAIN`
    /// nothing there.
    pub fn try_recv(&self, fd: i32, target: &mut Buffers<'_>, flags: i32) -> Result<usize, Errno> {
        let Some(segment) = self.segment() else { return Err(Errno::NOTCONN) };
        let _guard = self.lock_receiving(fd)?;
        if self.is_closed() {
            return Err(Errno::BADF);
        }
        if segment.is_out_of_reach() {
            return Err(Errno::NOTCONN);
        }
        self.mend_locked(fd, segment)?;
        self.switch_early(fd, segment);
        let peek = flags & libc::MSG_PEEK != 0;
        let socket = self.socket(fd, segment);
        let mut total = self.take_side(segment, target, flags);
        if total > 0 {
            waiting::note_taken(&socket);
        }
        if total > 0 && self.tells_senders(fd) {
            // Nobody had asked when they were sent, and what follows has another sender.
            if let Some(control) = target.control() {
                control.name_nobody();
            }
            return Ok(total);
        }
        if self.keeps_bells() {
            let more = if target.left() > 0 { self.peek_behind_bells(fd, segment, target, flags) } else { 0 };
            return Ok(total + more);
        }
        let greeted = self.greet(fd, segment);
        if total == 0 && self.has_ended_over_fabric(segment) {
            return self.error_of_reads(segment).map_or(Ok(0), Err);
        }
        if !greeted {
            return match self.block.has(flag::LOST) {
                _ if total > 0 => Ok(total),
                true => self.error_of_reads(segment).map_or(Ok(0), Err),
                false => Err(Errno::AGAIN),
            };
        }
        while target.left() > 0 && !waiting::is_settled(&socket) {
            if (total > 0 || target.has_some()) && tcp::is_at_mark(fd) {
                // A read ends before urgent data (`tcp_recvmsg_locked` of net/ipv4/tcp.c, `manage_oob` of net/unix/af_unix.c). One that
                // begins there takes it away.
                return Ok(total);
            }
            match self.take_tcp(&socket, target, flags) {
                None => break,
                Some(Ok(taken)) if taken.count > 0 => {
                    total += taken.count;
                    if target.has_control() {
                        return Ok(total);
                    }
                    let more = if peek {
                        // The ring follows, though the direction is settled only when these bytes are taken.
                        taken.count as u64 == waiting::tcp_left(&socket)
                    } else {
                        taken.filled || waiting::is_settled(&socket)
                    };
                    if !more {
                        return Ok(total);
                    }
                    if peek {
                        break;
                    }
                }
                Some(result) if total > 0 => {
                    if let Err(errno) = result
                        && !is_of_this_call(errno)
                    {
                        // The kernel has told of it now, and the program is to be told by its next call.
                        self.note_error(fd, errno);
                    }
                    return Ok(total);
                }
                // The kernel of an `AF_UNIX` socket has not been told, perhaps.
                Some(Err(Errno::AGAIN)) if self.is_unix() && self.block.has(flag::SHUT_RD) => {
                    return self.error_of_reads(segment).map_or(Ok(0), Err);
                }
                Some(Err(errno)) if is_of_this_call(errno) => return Err(errno),
                Some(result) => {
                    match result {
                        // It may be for nothing but unread bells.
                        Err(errno) => self.note_error(fd, errno),
                        // The kernel has told of it by another call.
                        Ok(_) if !self.block.has(flag::SHUT_RD) && self.has_lost_on_tcp(fd, segment) => {
                            self.block.raise(flag::RESET);
                        }
                        Ok(_) => {}
                    }
                    return self.error_of_reads(segment).map_or(Ok(0), Err);
                }
            }
        }
        let from_tcp = total;
        let consumer = segment.inlet();
        loop {
            let seen = if peek { (total - from_tcp) as u64 } else { 0 };
            let count = if flags & libc::MSG_TRUNC != 0 {
                let unseen = consumer.available().map_err(lie)?.saturating_sub(seen);
                let count = unseen.min(target.left() as u64) as usize;
                target.advance_over(count);
                count
            } else {
                let (piece, length) = target.piece();
                // SAFETY: the application vouches for its buffer; the window bounds are the ring's.
                let count = unsafe { consumer.peek(seen, piece, length) };
                let count = count.map_err(|lie_| self.broken(lie_))?;
                target.advance(count);
                count
            };
            if count == 0 {
                break;
            }
            total += count;
            if !peek {
                let popped = consumer.consume(count).map_err(|lie_| self.broken(lie_))?;
                if popped.ring {
                    self.ring(fd, segment);
                }
                if popped.emptied {
                    self.drain(fd, segment);
                }
            }
            if target.left() == 0 {
                break;
            }
        }
        if total == 0 {
            return self.nothing_there(segment);
        }
        if !peek {
            add(&self.block.ring_received, (total - from_tcp) as u64);
        }
        Ok(total)
    }

    /// Whether an `AF_UNIX` socket is to tell who has sent what is read.
    pub(crate) fn tells_senders(&self, fd: i32) -> bool {
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        self.is_unix() && unix::tells_senders(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Over a fabric that may fail, both directions leave TCP as soon as they can: only then may frames be sent, by which
    /// a side tells the other that it goes back.
    fn switch_early(&self, fd: i32, segment: &Segment) {
        if segment.link().is_some()
            && self.block.send_switched.load(Ordering::Relaxed) == 0
            && segment.is_ready()
            && let Ok(_guard) = self.lock_sending(fd)
        {
            self.send_switched(fd, segment);
        }
    }

    /// A peer that lies is treated as one that reset the connection.
    fn broken(&self, _: Lie) -> Errno {
        self.block.raise(flag::PEER_GONE | flag::RESET);
        Errno::CONNRESET
    }

    /// Whether this side has gone back to TCP between hosts when it had all of the peer's stream, and has taken it: the peer says so on
    /// TCP, too, but perhaps not before its next call.
    fn has_ended_over_fabric(&self, segment: &Segment) -> bool {
        segment.link().is_some()
            && self.block.has(flag::RETURNED)
            && segment.incoming().end() & end::FIN != 0
            && self.side_length() == 0
            // Else what was unread comes again.
            && segment.again().drops_side.load(Ordering::Relaxed) == 0
    }

    /// What a read of an empty ring means.
    fn nothing_there(&self, segment: &Segment) -> Result<usize, Errno> {
        let incoming = segment.incoming();
        let ended = incoming.end();
        let gone = self.block.has(flag::PEER_GONE);
        if !incoming.is_empty() {
            return Err(Errno::AGAIN);
        }
        if segment.link().is_some_and(|link| link.inbox().peer_lied()) {
            return Err(self.broken(Lie));
        }
        if let Some(errno) = self.error_of_reads(segment) {
            return Err(errno);
        }
        if gone || ended & (end::FIN | end::RESET) != 0 || self.block.has(flag::SHUT_RD) {
            Ok(0)
        } else {
            Err(Errno::AGAIN)
        }
    }

    /// The reset that a read is to report: after an orderly end there is none.
    pub(crate) fn error_of_reads(&self, segment: &Segment) -> Option<Errno> {
        self.untold_reset(segment).filter(|&errno| errno != Errno::PIPE)
    }

    /// Bytes in the side buffer.
    pub fn side_length(&self) -> u64 {
        let side = self.block.side();
        side.end - side.start
    }

    fn take_side(&self, segment: &Segment, target: &mut Buffers<'_>, flags: i32) -> usize {
        let Range { start, end: stop } = self.block.side();
        let count = target.left().min((stop - start) as usize);
        if flags & libc::MSG_TRUNC == 0 {
            // SAFETY: start <= SIDE_BYTES.
            let source = unsafe { segment.side().add(start as usize) };
            // SAFETY: the side buffer holds `count` bytes there.
            unsafe { target.put(source.as_ptr(), count) };
        } else {
            target.advance_over(count);
        }
        if count > 0 && flags & libc::MSG_PEEK == 0 {
            self.block.set_side_start(start + count as u64);
        }
        count
    }

    /// Peeks at what the peer has sent since it went back to the kernel's socket, behind bells that stay there.
    #[cold]
    fn peek_behind_bells(&self, fd: i32, segment: &Segment, target: &mut Buffers<'_>, flags: i32) -> usize {
        let bells = self.unread_bells(segment) as usize;
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let unread = tcp::unread(unsafe { BorrowedFd::borrow_raw(fd) }).unwrap_or(0) as usize;
        let mut bytes = vec![0u8; unread.min(bells.saturating_add(target.left()))];
        // SAFETY: writable for its length.
        let seen =
            unsafe { tcp::recv(fd, bytes.as_mut_ptr(), bytes.len(), libc::MSG_PEEK | libc::MSG_DONTWAIT) };
        match seen {
            Ok(seen) => {
                let found = bytes.get(bells..seen).unwrap_or_default();
                if flags & libc::MSG_TRUNC == 0 {
                    // SAFETY: a slice.
                    unsafe { target.put(found.as_ptr(), found.len()) };
                }
                found.len()
            }
            Err(errno) => {
                if !is_of_this_call(errno) {
                    self.note_error(fd, errno);
                }
                0
            }
        }
    }

    /// Receives what still comes over TCP: see [`waiting::take_tcp`]. On `AF_UNIX` with what comes beside the bytes.
    pub(crate) fn take_tcp(
        &self,
        socket: &Socket<'_>,
        target: &mut Buffers<'_>,
        flags: i32,
    ) -> Option<Result<Taken, Errno>> {
        let mut list = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 16];
        // By the first look, which another one for what it has found may follow.
        let mut asked = None;
        let receive = |most, peek| {
            let count = target.window(most, &mut list);
            asked.get_or_insert_with(|| list[..count].iter().map(|piece| piece.iov_len).sum::<usize>());
            let peek = if peek { libc::MSG_PEEK } else { 0 };
            // Another look follows.
            let is_last = peek & !flags == 0;
            let control = if is_last { target.control() } else { None };
            receive(socket.fd, &mut list[..count], control, flags | peek | libc::MSG_DONTWAIT)
        };
        let taken = self.counting(socket.segment, Way::In, || {
            waiting::take_tcp(socket, flags & libc::MSG_PEEK != 0, receive)
        })?;
        match taken {
            Ok(0) => self.note_end(socket.fd),
            Ok(count) => target.advance_over(count),
            Err(_) => {}
        }
        Some(taken.map(|count| Taken { count, filled: asked == Some(count) }))
    }

    /// Sends as send(2) does, without sleeping. `EAGAIN` if nothing fits, `EPIPE` if nobody reads any more.
    pub fn try_send(&self, fd: i32, source: &mut Buffers<'_>, flags: i32) -> Result<usize, Errno> {
        let Some(segment) = self.segment() else { return Err(Errno::NOTCONN) };
        let block = self.block;
        if segment.greeting() == Greeting::Connects
            && let Ok(_guard) = self.lock_receiving(fd)
            && !self.is_closed()
        {
            self.go_on_connecting(fd, segment);
        }
        let guard = self.lock_sending(fd)?;
        if block.has(flag::SHUT_WR) {
            if self.is_on_tcp(segment) {
                self.look_for_error(fd);
            }
            return Err(self.refusal(segment));
        }
        if self.is_closed() {
            return Err(Errno::BADF);
        }
        if segment.is_out_of_reach() {
            return Err(Errno::NOTCONN);
        }
        let switched = self.send_switched(fd, segment);
        if segment.has_failed() || self.is_asked_back(segment) {
            return Err(FAILED);
        }
        if !switched {
            if self.is_refused() {
                return Err(Errno::PIPE);
            }
            return self
                .counting(segment, Way::Out, || self.send_tcp(fd, source, flags))
                .map_err(|errno| self.error_of_kernel(fd, segment, errno));
        }
        let producer = segment.outlet();
        let control = segment.outgoing();
        if block.has(flag::PEER_GONE) || segment.incoming().end() & end::UNWANTED != 0 {
            return self.send_into_void(fd, segment, source);
        }
        if (self.is_blind(control) || self.may_have_lost_peer(segment)) && self.peer_is_gone(fd) {
            return self.send_into_void(fd, segment, source);
        }
        if block.roomy.load(Ordering::Relaxed) != 0 && producer.come_home(home(segment)).map_err(lie)? {
            block.roomy.store(0, Ordering::Relaxed);
            block.full_at.store(control.tail(), Ordering::Relaxed);
        }
        let mut total = 0;
        while source.left() > 0 {
            let (piece, length) = source.piece();
            let pushed = if length < source.left() && length < GATHERED {
                push_gathered(&producer, source)
            } else {
                // SAFETY: the application vouches for its buffer; the window bounds are the ring's.
                unsafe { producer.push(piece, length.min(PIECE)) }
            };
            let pushed = match pushed {
                Ok(pushed) => pushed,
                Err(Failed::Lie) => return Err(self.broken(Lie)),
                Err(Failed::Device(Errno::CONNRESET))
                    if total == 0 && segment.incoming().end() & end::CLOSED != 0 =>
                {
                    return self.send_into_void(fd, segment, source);
                }
                Err(Failed::Device(Errno::CONNRESET)) => {
                    // What has been posted is kept until it is credited, and sent again.
                    let failed = self.fabric_failed(segment);
                    if total == 0 {
                        return Err(failed);
                    }
                    break;
                }
                Err(Failed::Device(errno)) => return Err(errno),
            };
            if pushed.ring {
                self.ring(fd, segment);
            }
            if pushed.bytes == 0 {
                if self.make_room(fd, segment, source.left() as u64).map_err(lie)? {
                    continue;
                }
                break;
            }
            if pushed.lapped {
                self.widen(segment, &producer).map_err(lie)?;
            }
            source.advance_over(pushed.bytes);
            total += pushed.bytes;
            if self.is_asked_back(segment) {
                // The rest goes over TCP.
                break;
            }
        }
        if total == 0 && source.left() > 0 {
            block.lacks_room();
            return Err(Errno::AGAIN);
        }
        if source.left() > 0 {
            block.lacks_room();
        }
        add(&block.ring_sent, total as u64);
        drop(guard);
        // What has been posted, and may not have got through, must not wait for this side's next call.
        if segment.has_failed() {
            let _ = self.mend(fd);
        }
        Ok(total)
    }

    /// Whether the peer has left something untaken, and taken nothing, during the last [`BLIND_PUSHES`] pushes. Asked for
    /// each push; looks at its position once in so many.
    fn is_blind(&self, control: &Control) -> bool {
        let pushes = &self.block.blind_pushes;
        let count = pushes.load(Ordering::Relaxed) + 1;
        pushes.store(count % BLIND_PUSHES, Ordering::Relaxed);
        if count < BLIND_PUSHES {
            return false;
        }
        let tail = control.tail();
        self.block.blind_at.swap(tail, Ordering::Relaxed) == tail && control.head() != tail
    }

    /// Whether the peer may be gone without anybody having looked: it sends nothing more, or its process ends, or this side reads nothing.
    /// The kernel knows.
    fn may_have_lost_peer(&self, segment: &Segment) -> bool {
        let ends = || segment.incoming().end() & (end::FIN | end::LEAVES) != 0;
        segment.link().is_none() && (self.block.has(flag::SHUT_RD) || ends())
    }

    /// Whether this side sends through the ring; moves it there if both sides are ready. The caller holds
    /// the send lock.
    pub(crate) fn send_switched(&self, fd: i32, segment: &Segment) -> bool {
        if self.block.send_switched.load(Ordering::Relaxed) != 0 {
            return true;
        }
        if !segment.is_ready() {
            return false;
        }
        let verbs = if segment.link().is_some() { flag::VERBS } else { 0 };
        self.block.raise(flag::READY | verbs);
        // The hooks' own count: it was equal to the kernel's when the connection left `Plain`.
        let sent = self.block.tcp_sent.load(Ordering::Relaxed);
        if let Some(link) = segment.link() {
            segment.switching().store(1, Ordering::SeqCst);
            if link.announce_switch(segment.incoming(), sent, tcp::closed_unanswered(fd)).is_err() {
                self.fabric_failed(segment);
                return false;
            }
        }
        segment.outgoing().rare.0.switched_at.store(sent, Ordering::SeqCst);
        // A peer that asks for the way back sees that, or this side sees that it has asked.
        fence(Ordering::SeqCst);
        self.block.send_switched.store(1, Ordering::Release);
        // It would hold a descriptor until the peer sleeps.
        segment.exchange().mouth();
        true
    }

    pub(crate) fn send_tcp(&self, fd: i32, source: &mut Buffers<'_>, flags: i32) -> Result<usize, Errno> {
        if let Some(segment) = self.segment()
            && matches!(segment.greeting(), Greeting::OwesHello | Greeting::OwesReply)
        {
            return self.send_with_greeting(fd, segment, source, flags);
        }
        if let Some(segment) = self.segment().filter(|_| self.block.has(flag::OWES_DOWN)) {
            self.pay_down(fd, segment);
        }
        if source.left() == 0 && self.is_unix() {
            // The kernel looks whether anybody reads.
            return transmit(fd, &mut [], flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        }
        let mut list = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 16];
        let mut total = 0;
        // All of it, or as much as there is room for: programs take less for a sign that there is none.
        while source.left() > 0 {
            let count = source.window(u64::MAX, &mut list);
            let asked: usize = list[..count].iter().map(|piece| piece.iov_len).sum();
            let sent = transmit(fd, &mut list[..count], flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
            if sent == Err(Errno::AGAIN) || sent.is_ok_and(|sent| sent < asked) {
                // An edge is owed for room, in the ring if the direction leaves TCP before there is any here.
                self.block.lacks_room();
            }
            match sent {
                Ok(sent) => {
                    add(&self.block.tcp_sent, sent as u64);
                    source.advance_over(sent);
                    total += sent;
                    if sent < asked {
                        break;
                    }
                }
                Err(_) if total > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(total)
    }

    /// What a write is to say that the kernel refused with `errno`. Of a reset it tells once, and may have told this library; and
    /// nobody else will be told what this write is.
    fn error_of_kernel(&self, fd: i32, segment: &Segment, errno: Errno) -> Errno {
        if self.is_unix() {
            return errno;
        }
        if errno != Errno::PIPE {
            if errno != Errno::AGAIN && tcp::is_over(fd) {
                self.note_error(fd, errno);
            }
            return errno;
        }
        let untold = self.untold_reset(segment);
        if untold.is_none() {
            self.note_error(fd, errno);
            self.block.raise(flag::RESET_TOLD);
        }
        untold.unwrap_or(errno)
    }

    /// Whether the peer has shut down receiving on an `AF_UNIX` socket. Its kernel may not know yet.
    pub fn is_refused(&self) -> bool {
        let is_refused = |segment: &Segment| segment.incoming().end() & end::REFUSES != 0;
        self.is_unix() && self.segment().is_some_and(is_refused)
    }

    /// Whether a write fails at once, whatever way it would go.
    pub fn refuses_writes(&self, fd: i32) -> bool {
        // The kernel looks whether anybody reads.
        let by_kernel = || transmit(fd, &mut [], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) == Err(Errno::PIPE);
        let is_unwanted = |segment: &Segment| {
            let ended = segment.incoming().end() & end::UNWANTED != 0;
            self.is_unix() && (ended || self.peer_has_closed(fd) || by_kernel())
        };
        self.block.has(flag::SHUT_WR) || self.segment().is_some_and(is_unwanted)
    }

    /// The error of a write that can't be sent any more. A reset that it tells of is told; on `AF_UNIX` only reads tell of it.
    pub(crate) fn refusal(&self, segment: &Segment) -> Errno {
        let untold = if self.is_unix() { None } else { self.untold_reset(segment) };
        untold.unwrap_or(Errno::PIPE)
    }

    /// A write to a peer that is gone. After a reset it fails. After an orderly end the kernel accepts one write, and the
    /// peer's reset makes the next one fail: a bell takes the bytes' place, so that it does just that.
    fn send_into_void(&self, fd: i32, segment: &Segment, source: &mut Buffers<'_>) -> Result<usize, Errno> {
        if self.is_unix() || self.reset(segment).is_some() {
            return Err(self.refusal(segment));
        }
        if source.left() == 0 {
            return Ok(0);
        }
        let first = self.block.flags.fetch_or(flag::VOID, Ordering::SeqCst) & flag::VOID == 0;
        let deaf = segment.incoming().end() & (end::CLOSED | end::DEAF) == end::DEAF;
        if deaf {
            // Its kernel answers what came over TCP alone.
            segment.finish(end::RESET | if self.block.has(flag::SHUT_WR) { end::LATE } else { 0 });
        }
        // SAFETY: one readable byte.
        let sent = unsafe { tcp::send(fd, &BELL, 1, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        // On one host the answer is here already.
        if deaf || tcp::is_over(fd) {
            self.block.raise(flag::RESET);
        }
        match sent {
            Err(errno) if errno != Errno::AGAIN && !first => Err(Errno::PIPE),
            _ => {
                let all = source.left();
                source.advance_over(all);
                Ok(all)
            }
        }
    }

    /// Bytes that a read would find, for `FIONREAD`; `None` if the kernel has to be asked.
    pub fn unread(&self, fd: i32) -> Result<u64, Errno> {
        let Some(segment) = self.segment() else { return Err(Errno::NOTCONN) };
        let _guard = self.lock_receiving(fd)?;
        self.mend_locked(fd, segment)?;
        let mut total = self.side_length();
        if self.keeps_bells() {
            // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
            let waiting = tcp::unread(unsafe { BorrowedFd::borrow_raw(fd) })?;
            return Ok(total + waiting.saturating_sub(self.unread_bells(segment)));
        }
        if !self.greet(fd, segment) {
            return Ok(total);
        }
        if !waiting::is_settled(&self.socket(fd, segment)) {
            // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
            let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
            let left = waiting::tcp_left(&self.socket(fd, segment));
            let waiting = tcp::unread(borrowed)?;
            total += waiting.min(left);
            if waiting < left {
                return Ok(total);
            }
        }
        Ok(total + segment.inlet().available().map_err(lie)?)
    }

    /// Whether the next byte is behind urgent data, for `SIOCATMARK`.
    pub fn is_at_mark(&self, fd: i32) -> Result<bool, Errno> {
        let Some(segment) = self.segment() else { return Err(Errno::NOTCONN) };
        let _guard = self.lock_receiving(fd)?;
        self.mend_locked(fd, segment)?;
        Ok(self.side_length() == 0
            && !waiting::is_settled(&self.socket(fd, segment))
            && self.greet(fd, segment)
            && tcp::is_at_mark(fd))
    }

    /// What a read tells if the program has asked for `TCP_INQ`: the bytes that it has left, and one more for the end of the
    /// stream, so that the program reads on (`tcp_inq_hint` of net/ipv4/tcp.c). 1 if that can't be found out.
    pub fn inq(&self, fd: i32) -> u64 {
        let Some(segment) = self.segment() else { return 1 };
        let Ok(unread) = self.unread(fd) else { return 1 };
        let orderly = end::FIN | end::CLOSED | end::DEAF;
        let has_ended = self.block.has(flag::PEER_GONE)
            || segment.incoming().end() & orderly != 0
            || tcp::peer_has_closed(fd);
        unread + u64::from(has_ended && self.reset(segment).is_none())
    }

    /// For `SIOCOUTQ`, bytes sent that the peer has not taken. On TCP its kernel acknowledges as many as fit into its window, and a program
    /// may wait until all are; on `AF_UNIX` what is unread is counted.
    pub fn unsent(&self) -> u64 {
        let Some(segment) = self.segment() else { return 0 };
        let has_window = !self.is_unix() && segment.link().is_none();
        segment.outgoing().used().saturating_sub(if has_window { WINDOW } else { 0 })
    }
}

#[inline(never)]
fn push_gathered(producer: &Outlet<'_>, source: &Buffers<'_>) -> Result<Pushed, Failed> {
    let mut together = [0u8; GATHERED];
    let length = source.gather(&mut together);
    // SAFETY: `together` holds so many bytes.
    unsafe { producer.push(together.as_ptr(), length) }
}

fn receive(
    fd: i32,
    list: &mut [libc::iovec],
    control: Option<&mut ControlData>,
    flags: i32,
) -> Result<usize, Errno> {
    if list.is_empty() {
        return Err(Errno::AGAIN);
    }
    let mut message = message(list);
    if let Some(control) = &control {
        (message.msg_control, message.msg_controllen) = (control.buffer, control.room);
    }
    // SAFETY: the message refers to `list`, whose buffers the application vouches for, as for the control buffer.
    let result = unsafe { tcp::recvmsg(fd, &raw mut message, flags) };
    if let (Some(control), Ok(_)) = (control, result) {
        (control.length, control.flags) = (message.msg_controllen, message.msg_flags);
    }
    result
}

pub(crate) fn transmit(fd: i32, list: &mut [libc::iovec], flags: i32) -> Result<usize, Errno> {
    let message = message(list);
    // SAFETY: the message refers to `list`, whose buffers the application vouches for.
    unsafe { tcp::sendmsg(fd, &raw const message, flags) }
}

fn message(list: &mut [libc::iovec]) -> libc::msghdr {
    libc::msghdr {
        msg_name: std::ptr::null_mut(),
        msg_namelen: 0,
        msg_iov: list.as_mut_ptr(),
        msg_iovlen: list.len(),
        msg_control: std::ptr::null_mut(),
        msg_controllen: 0,
        msg_flags: 0,
    }
}

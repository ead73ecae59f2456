//! What an active connection does with its TCP socket besides the application's bytes: bells, and bytes that are in their
//! way. [`crate::waiting`] decides when.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::net::Shutdown;

use crate::arena::{State, flag};
use crate::buffers::Buffers;
use crate::chime::Mouth;
use crate::connection::Connection;
use crate::control::{Control, NO_REQUEST, end};
use crate::handback::PREPARING;
use crate::lock::Guard;
use crate::segment::{Greeting, SIDE_BYTES, Segment};
use crate::settings::settings;
use crate::stream::BELL;
use crate::tcp;
use crate::waiting::{self, Side, add};

/// Bells that may lie unread. The next one must get through, but TCP acknowledges bells that nobody reads only after
/// 40 ms, and sends no more than ten segments ahead of that (`TCP_DELACK_MIN`, `TCP_INIT_CWND` of net/tcp.h).
const MOST_BELLS: u64 = 4;

/// After how many bells they are taken. Between hosts at once: with one unread the kernel would reset the connection when this
/// process is killed, and a reset does not wait for bells that are to tell the peer whether it has all ([`crate::passing`]).
fn most_bells(segment: &Segment) -> u64 {
    if segment.link().is_some() { 1 } else { MOST_BELLS }
}

/// More bells than a peer can owe, which rings for sleepers alone. One that sends them as fast as they are taken is not waited for.
pub(crate) const ENDLESS_BELLS: u64 = 16 << 10;

/// How often a call lets others run while the peer prepares a request. It takes some system calls for that, unless it is stopped.
const MOST_YIELDS: u32 = 1000;

impl Connection {
    /// Wakes the peer's sleepers by a frame on the TCP connection. If the kernel has no room for it, the peer has
    /// unread bytes of the application's there, and looks at the ring once it has taken them: of bells there are never so many.
    pub(crate) fn ring(&self, fd: i32, segment: &Segment) {
        if self.block.send_switched.load(Ordering::Acquire) == 0 {
            // Called by a reader: frames may follow only after the count of what precedes them.
            let Ok(_guard) = self.lock_sending(fd) else { return };
            if !self.send_switched(fd, segment) {
                return;
            }
        }
        if !waiting::ring(&self.socket(fd, segment)) {
            self.ring_if_wanted_after_all(fd, segment);
        }
    }

    /// The peer was about to ask for the way back, and took no bells. Once it has asked, the call that rings finds that, and follows; but if
    /// it has given up before, its sleepers are owed theirs. One that takes longer than it should may be stopped, or dead: nothing comes of
    /// its request.
    #[cold]
    fn ring_if_wanted_after_all(&self, fd: i32, segment: &Segment) {
        let handing = &segment.incoming().rung.0.handing;
        for yields in 0..2 * MOST_YIELDS {
            match handing.load(Ordering::SeqCst) {
                PREPARING if yields < MOST_YIELDS => std::thread::yield_now(),
                PREPARING => {
                    let _ =
                        handing.compare_exchange(PREPARING, NO_REQUEST, Ordering::SeqCst, Ordering::SeqCst);
                }
                NO_REQUEST if waiting::ring(&self.socket(fd, segment)) => return,
                NO_REQUEST => {}
                _ => return,
            }
        }
    }

    /// Takes spent bells away, as [`waiting::drain`] does; but where nobody sleeps, not before there are some: each time
    /// costs a system call, and whoever goes to sleep looks after those that would wake it.
    pub(crate) fn drain(&self, fd: i32, segment: &Segment) {
        let (incoming, outgoing) = (segment.incoming(), segment.outgoing());
        let someone_sleeps = incoming.data_armed.0.has_sleepers() || outgoing.space_armed.0.has_sleepers();
        if someone_sleeps || !self.may_keep_bells(segment) {
            waiting::drain(&self.socket(fd, segment));
        }
    }

    pub(crate) fn unread_bells(&self, segment: &Segment) -> u64 {
        let rung = segment.incoming().rung.0.count.load(Ordering::Relaxed);
        rung.wrapping_sub(self.block.drained.load(Ordering::Relaxed))
    }

    /// Whether the bells before which this side has followed the peer back to the kernel's socket are to stay there: who was rung for bytes
    /// that were in the ring may not have run yet, and would sleep on without. They stay until these bytes have been read.
    pub(crate) fn keeps_bells(&self) -> bool {
        self.block.has(flag::BELLS_FIRST) && self.side_length() > 0
    }

    /// Whether a sleeper may leave unread bells where they are: each new one is an edge.
    pub(crate) fn may_leave_bells(&self, segment: &Segment) -> bool {
        self.is_watched_for_edges() && self.may_keep_bells(segment)
    }

    /// Whether it does no harm that so many bells are unread: should this process be killed, they make its kernel reset the connection, which
    /// throws away what is still under way to the peer.
    fn may_keep_bells(&self, segment: &Segment) -> bool {
        match self.unread_bells(segment) {
            0 => true,
            unread => unread < most_bells(segment) && !self.is_under_way(segment),
        }
    }

    /// This side, as the decisions of [`waiting`] see it.
    pub(crate) fn socket<'a>(&'a self, fd: i32, segment: &'a Segment) -> Socket<'a> {
        Socket { connection: self, fd, segment }
    }

    /// A descriptor by which the socket can be reached: `fd`, unless another thread has closed that, and there is another one.
    pub(crate) fn reach(&self, fd: i32) -> i32 {
        (settings().reach)(self, fd)
    }

    pub(crate) fn put_bell(&self, fd: i32) -> bool {
        if self.is_closed() {
            return false;
        }
        let fd = self.reach(fd);
        if self.spares_deaf(fd) {
            return false;
        }
        self.block.doorbells.fetch_add(1, Ordering::Relaxed);
        // SAFETY: one readable byte.
        let sent = unsafe { tcp::send(fd, &BELL, 1, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        if !matches!(sent, Ok(_) | Err(Errno::AGAIN | Errno::BADF | Errno::NOTSOCK))
            && !self.has_told_kernel(fd)
        {
            self.look_for_down(fd);
            if !self.is_before_frame() {
                self.note_gone(fd);
            }
        }
        sent.is_ok()
    }

    /// Whether the peer has shut down both directions, so that its kernel would answer a bell with a reset. If this side has ended its
    /// stream, too, the kernel says so instead, which wakes the peer as well.
    fn spares_deaf(&self, fd: i32) -> bool {
        let is_deaf = |segment: &Segment| segment.incoming().end() & (end::CLOSED | end::DEAF) == end::DEAF;
        let spares = !self.is_unix() && self.segment().is_some_and(is_deaf);
        if spares && self.block.has(flag::SHUT_WR) {
            tcp::shutdown(fd, Shutdown::Write);
        }
        spares
    }

    /// Whether the kernel takes no more because this side has shut down both directions: that says nothing of the peer.
    #[cold]
    fn has_told_kernel(&self, fd: i32) -> bool {
        self.block.has(flag::SHUT_RD) && self.block.has(flag::SHUT_WR) && !self.peer_has_closed(fd)
    }

    /// Reads up to `most` bells from the kernel, without waiting.
    pub(crate) fn take_bells(&self, fd: i32, most: u64) -> usize {
        // Another thread has closed the descriptor while this one slept: the number may be somebody else's.
        if self.is_closed() {
            return 0;
        }
        self.take_bells_by(self.reach(fd), most)
    }

    /// The same by this descriptor, which is the connection's.
    fn take_bells_by(&self, fd: i32, most: u64) -> usize {
        let mut scratch = [0u8; 64];
        let most = usize::try_from(most).unwrap_or(scratch.len()).min(scratch.len());
        let link = self.segment().and_then(Segment::link);
        // Where other frames may come, nothing is taken before it has been looked at.
        let peek = if link.is_some() { libc::MSG_PEEK } else { 0 };
        // SAFETY: `scratch` is writable for `most` bytes.
        let got = unsafe { tcp::recv(fd, scratch.as_mut_ptr(), most, libc::MSG_DONTWAIT | peek) };
        let taken = got.and_then(|count| match link {
            Some(link) if count > 0 => self.take_bells_before_frames(fd, link, &mut scratch[..count]),
            _ => Ok(count),
        });
        match taken {
            Ok(0) if got == Ok(0) => {
                self.note_end(fd);
                0
            }
            Ok(count) => {
                add(&self.block.drained, count as u64);
                count
            }
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(errno) => {
                self.note_error(fd, errno);
                0
            }
        }
    }

    /// Reads up to `most` bells, and leaves one of those that are there: of the last that was counted nobody knows whether it comes.
    #[cold]
    fn thin_out_bells(&self, fd: i32, most: u64) {
        if self.is_closed() {
            return;
        }
        let fd = self.reach(fd);
        // SAFETY: the connection's descriptor, which is open.
        let there = tcp::unread(unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }).unwrap_or(0);
        if there > 1 {
            self.take_bells_by(fd, most.min(there - 1));
        }
    }

    /// Before a close: unread bells would turn the kernel's FIN into a reset.
    pub(crate) fn take_leftover_bells(&self, fd: i32, segment: &Segment) {
        let Ok(_guard) = self.lock_receiving(fd) else { return };
        if waiting::is_settled(&self.socket(fd, segment)) {
            let mut left = ENDLESS_BELLS;
            while left > 0 {
                match self.take_bells_by(fd, left) {
                    0 => return,
                    count => left -= count as u64,
                }
            }
        }
    }

    /// The same of those alone that have been rung, where something else may follow.
    pub(crate) fn take_counted_bells(&self, fd: i32, segment: &Segment) {
        let Ok(_guard) = self.lock_receiving(fd) else { return };
        let counted = self.unread_bells(segment);
        // A read of nothing looks like the end.
        if counted > 0 && waiting::is_settled(&self.socket(fd, segment)) {
            self.take_bells(fd, counted);
        }
    }

    /// Moves TCP bytes that nobody has asked for yet out of the way of the bells behind them, but for the last if
    /// `keep_one`. True if none is left. The caller holds the receive lock.
    pub(crate) fn absorb(&self, fd: i32, segment: &Segment, keep_one: bool) -> bool {
        let socket = self.socket(fd, segment);
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
        if !self.greet(fd, segment) {
            return false;
        }
        // Not after a return to TCP: the kernel gives these bytes to the application.
        while self.block.state() == State::Active && !waiting::is_settled(&socket) {
            let stop = self.block.side().end as usize;
            let unread = tcp::unread(borrowed).unwrap_or(0).saturating_sub(u64::from(keep_one));
            let room = (SIDE_BYTES - stop).min(1 << 20).min(unread as usize);
            if room == 0 {
                break;
            }
            // SAFETY: stop < SIDE_BYTES.
            let base = unsafe { segment.side().add(stop) };
            // Who sends something beside them stays on the kernel's socket, or goes back there first: where it is known which of them are from
            // before, it is behind these. A peek would find it there, too, however little it asks for (`unix_stream_read_generic` of
            // net/unix/af_unix.c).
            let is_known = waiting::tcp_left(&socket) != u64::MAX;
            if self.is_unix() && !is_known && carries_control(fd, base, room) {
                // Only a read of the application's can take it.
                return false;
            }
            let list = [libc::iovec { iov_base: base.as_ptr().cast(), iov_len: room }];
            let Ok(mut target) = Buffers::new(&list) else { break };
            self.block.absorbing_at.store(stop as u64, Ordering::Relaxed);
            let before = self.block.tcp_received.load(Ordering::Relaxed);
            self.block.absorbing.store(before + 1, Ordering::Release);
            let taken = self.take_tcp(&socket, &mut target, 0);
            let count = if let Some(Ok(taken)) = &taken { taken.count } else { 0 };
            self.block.set_side_end((stop + count) as u64);
            self.block.absorbing.store(0, Ordering::Release);
            waiting::note_taken(&socket);
            if count == 0 {
                break;
            }
        }
        waiting::is_settled(&socket) || tcp::unread(borrowed) == Ok(0)
    }
}

/// Whether something comes beside the next `room` bytes of an `AF_UNIX` socket, for which `base` has room.
#[cold]
fn carries_control(fd: i32, base: std::ptr::NonNull<u8>, room: usize) -> bool {
    let mut list = libc::iovec { iov_base: base.as_ptr().cast(), iov_len: room };
    let mut message = libc::msghdr {
        msg_name: std::ptr::null_mut(),
        msg_namelen: 0,
        msg_iov: &raw mut list,
        msg_iovlen: 1,
        msg_control: std::ptr::null_mut(),
        msg_controllen: 0,
        msg_flags: 0,
    };
    // SAFETY: the caller's buffer, for one call.
    let seen = unsafe { tcp::recvmsg(fd, &raw mut message, libc::MSG_PEEK | libc::MSG_DONTWAIT) };
    seen.is_ok() && message.msg_flags & libc::MSG_CTRUNC != 0
}

/// An active connection and the descriptor of the call that is inside.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Socket<'a> {
    connection: &'a Connection,
    pub(crate) fd: i32,
    pub(crate) segment: &'a Segment,
}

impl Side for Socket<'_> {
    type Guard<'a>
        = Guard<'a>
    where
        Self: 'a;

    fn incoming(&self) -> &Control {
        self.segment.incoming()
    }

    fn outgoing(&self) -> &Control {
        self.segment.outgoing()
    }

    fn drained(&self) -> &AtomicU64 {
        &self.connection.block.drained
    }

    fn recv_switched(&self) -> &AtomicU32 {
        &self.connection.block.recv_switched
    }

    fn tcp_received(&self) -> &AtomicU64 {
        &self.connection.block.tcp_received
    }

    fn aside(&self) -> u64 {
        // Of `AF_UNIX` all counts until then, by which the client finds out whether the hooks have seen every byte.
        let counts_all = self.connection.is_unix() && !self.segment.is_ready();
        if counts_all { 0 } else { self.connection.side_length() }
    }

    fn has_frames(&self) -> bool {
        // With a reply that is owed, another thread may be about to bring the link about.
        self.segment.link().is_some() || self.segment.greeting() == Greeting::OwesReply
    }

    fn is_back(&self) -> bool {
        self.connection.block.has(flag::RETURNED)
    }

    fn lock(&self) -> Result<Guard<'_>, Errno> {
        self.connection.lock_receiving(self.fd)
    }

    fn is_readable(&self) -> bool {
        self.connection.readable()
    }

    fn has_space(&self) -> bool {
        self.connection.ends_waits_for_space(self.segment)
    }

    fn absorb(&self, keep_one: bool) -> bool {
        if self.is_back() {
            // They may be for another program.
            return false;
        }
        if self.segment.link().is_none() && !self.segment.is_ready() {
            // The peer may stay on the kernel's socket for good: should this side end before it has read them, the kernel has to know.
            // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
            return tcp::unread(unsafe { std::os::fd::BorrowedFd::borrow_raw(self.fd) }) == Ok(0);
        }
        self.connection.absorb(self.fd, self.segment, keep_one)
    }

    fn take_bells(&self, most: u64) {
        self.connection.take_bells(self.fd, most);
    }

    fn thin_out_bells(&self, most: u64) {
        // Each time costs two system calls.
        if most > most_bells(self.segment) {
            self.connection.thin_out_bells(self.fd, most);
        }
    }

    fn put_bell(&self) -> bool {
        self.connection.put_bell(self.fd)
    }

    fn chime(&self) -> bool {
        let rings = self.segment.exchange().mouth().is_some_and(Mouth::ring);
        if rings {
            self.connection.block.chimes.fetch_add(1, Ordering::Relaxed);
        }
        rings
    }

    fn pause(&self) {
        rustix::thread::sched_yield();
    }

    fn announce_bells(&self, count: &AtomicU64) {
        if let Some(link) = self.segment.link() {
            // If it can't be told, nothing else gets through either.
            let _ = link.announce_bells(count);
        }
    }

    fn sync(&self) {
        if self.segment.sync(|| tcp::peer_has_closed(self.fd)).is_err() {
            self.connection.fabric_failed(self.segment);
        }
    }
}

//! Waiting of a call on one connection: spin a while if that has paid lately, then sleep in the kernel on
//! the connection's own socket, so that the peer's end wakes too.
//!
//! A sleeper for data lies in a blocking `recv(MSG_PEEK)` of one byte: bells and the peer's FIN end it, and the kernel
//! itself applies `SO_RCVTIMEO`, `O_NONBLOCK` and `SA_RESTART`, exactly as for a program that reads from TCP.
//! A sleeper for space does the same when no unread byte lies before the bell it waits for, else it waits
//! for the next arrival (`EPOLLET`).

use std::cell::Cell;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::sockopt::Timeout;

use crate::alarm::Watch;
use crate::arena::flag;
use crate::buffers::Buffers;
use crate::connection::Connection;
use crate::control::{NOT_SWITCHED, end};
use crate::count::Way;
use crate::segment::Segment;
use crate::settings::settings;
use crate::spin::Spin;
use crate::stream::FAILED;
use crate::uninterrupted::Descriptor;
use crate::{process, restart, tcp, waiting};

/// Reads that find nothing in memory for each that asks the kernel, too.
const BLIND_READS: u32 = 8;

/// How often others may have taken a connection back to TCP that one call saw fail: once, or the call would never end.
const OFTEN: u32 = 16;

/// How long a write that waits sleeps before it looks again, where it has no descriptor to wait by, and bytes of the peer's lie in the way.
const WITHOUT_DESCRIPTOR: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// When a call's first sleep, or wait for room, began, and how long it may wait from then on.
type SleptAt = Option<(Instant, Option<Duration>)>;

impl Connection {
    /// Receives as recv(2) does, sleeping if the socket blocks and `flags` allow it.
    pub fn recv(&self, fd: i32, target: &mut Buffers<'_>, flags: i32) -> Result<usize, Errno> {
        if target.left() == 0 {
            return self.recv_nothing(fd, flags);
        }
        // Who looks whether there is anything wants to know whether the peer is alive: so do pools, once, before they use a connection.
        self.recv_some(fd, target, flags, flags & libc::MSG_PEEK != 0)
    }

    /// As [`Self::recv`], of some bytes. With `asks` the kernel is asked whenever there is nothing in memory.
    fn recv_some(
        &self,
        mut fd: i32,
        target: &mut Buffers<'_>,
        flags: i32,
        asks: bool,
    ) -> Result<usize, Errno> {
        let at_once = flags & libc::MSG_DONTWAIT != 0;
        // One that has begun to wait goes on, whatever becomes of `O_NONBLOCK`.
        let blocks = !at_once && !self.nonblocking.load(Ordering::Relaxed);
        // A read from an `AF_UNIX` socket that must not wait looks on all the same, and takes an error with it.
        let looks_on = !at_once || self.is_unix();
        let whole = flags & libc::MSG_WAITALL != 0 && flags & libc::MSG_PEEK == 0 && looks_on;
        let mut total = 0;
        let mut vain = VainWaits::default();
        let mut slept_at = None;
        let mut has_waited = false;
        loop {
            let brief = if has_waited { self.take_briefly(fd, target, flags) } else { None };
            match brief.unwrap_or_else(|| self.try_recv(fd, target, flags)) {
                Ok(0) => return Ok(total),
                Ok(count) => {
                    self.blind_reads.store(0, Ordering::Relaxed);
                    total += count;
                    if !whole || target.left() == 0 || self.is_cut(fd, target) {
                        return Ok(total);
                    }
                    target.note_some();
                }
                Err(Errno::AGAIN) if !blocks && !asks && self.answers_blindly(at_once) => {
                    return if total > 0 { Ok(total) } else { Err(Errno::AGAIN) };
                }
                Err(Errno::AGAIN) => {
                    match self.wait_readable(fd, at_once, blocks, total > 0, &mut slept_at) {
                        Ok(()) if !vain.are_enough(|| self.limit_of_call(fd, at_once, slept_at)) => {
                            has_waited = true;
                            fd = self.reach(fd);
                        }
                        Ok(()) => return if total > 0 { Ok(total) } else { Err(Errno::AGAIN) },
                        Err(errno) => return if total > 0 { Ok(total) } else { Err(errno) },
                    }
                }
                Err(Errno::BADF | Errno::NOTSOCK) if self.reach(fd) != fd => fd = self.reach(fd),
                // On `AF_UNIX` nobody will tell of it any more (`unix_stream_read_generic`).
                Err(errno) if total > 0 => {
                    if self.is_unix() {
                        self.told(errno);
                    }
                    return Ok(total);
                }
                Err(errno) => return Err(self.told(errno)),
            }
        }
    }

    /// Whether a read ends where it is, however much it asks for: with a message that came with descriptors, which are those of the bytes up to
    /// there (`unix_stream_read_generic`). The next one's would take their place.
    fn is_cut(&self, fd: i32, target: &Buffers<'_>) -> bool {
        // Of the senders' names, which may come as well, one is enough.
        target.has_control() && (target.has_all_control() || !self.tells_senders(fd))
    }

    /// As [`Self::recv_briefly`], for who has waited, and wants as soon as can be what has come.
    fn take_briefly(&self, fd: i32, target: &mut Buffers<'_>, flags: i32) -> Option<Result<usize, Errno>> {
        let (piece, length) = target.piece();
        // What there is fills one piece after the other.
        if flags & !libc::MSG_DONTWAIT != 0 || length < target.left() {
            return None;
        }
        // SAFETY: the application vouches for its buffer.
        let result = unsafe { self.recv_briefly(fd, piece, length, flags != 0) };
        result.inspect(|result| target.advance(result.unwrap_or(0)))
    }

    /// Whether a read that must not wait, and found nothing in memory, may say so without asking the kernel: only the
    /// peer's sudden death is news there. The kernel gets its turn after some reads.
    pub(crate) fn answers_blindly(&self, at_once: bool) -> bool {
        let must_not_wait =
            at_once || (self.nonblocking.load(Ordering::Relaxed) && self.block.held_only_by(process::id()));
        must_not_wait && self.recv_settled() && !self.is_kernels_turn()
    }

    /// Whether a call that memory can answer should ask the kernel all the same: every eighth time.
    pub fn is_kernels_turn(&self) -> bool {
        self.blind_reads.fetch_add(1, Ordering::Relaxed) % BLIND_READS == BLIND_READS - 1
    }

    /// Whether the next [`Self::is_kernels_turn`] is likely to be true.
    pub(crate) fn is_kernels_turn_next(&self) -> bool {
        self.blind_reads.load(Ordering::Relaxed) % BLIND_READS == BLIND_READS - 1
    }

    /// recv(2) of no bytes: waits as long as it would for one, and leaves it there. The kernel looks no further once it has waited,
    /// not even at an error (`tcp_recvmsg_locked`); that of an `AF_UNIX` socket does (`unix_stream_read_generic`).
    fn recv_nothing(&self, mut fd: i32, flags: i32) -> Result<usize, Errno> {
        let mut byte = 0u8;
        let list = [libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 }];
        let mut target = Buffers::new(&list)?;
        let at_once = flags & libc::MSG_DONTWAIT != 0;
        let flags = (flags | libc::MSG_PEEK | libc::MSG_DONTWAIT) & !libc::MSG_TRUNC;
        match self.recv_some(fd, &mut target, flags, false) {
            Err(Errno::AGAIN) if !at_once && !self.ask_whether_nonblocking(fd) => {}
            result => return result.map(|_| 0),
        }
        let without_news = |errno| if self.is_unix() { Err(errno) } else { Ok(0) };
        let mut vain = VainWaits::default();
        let mut slept_at = None;
        loop {
            match self.wait_readable(fd, false, true, false, &mut slept_at) {
                Ok(()) if vain.are_enough(|| self.limit_of_call(fd, false, slept_at)) => {
                    return without_news(Errno::AGAIN);
                }
                Ok(()) => fd = self.reach(fd),
                Err(errno @ (Errno::AGAIN | Errno::INTR)) => return without_news(errno),
                Err(errno) => return Err(errno),
            }
            match self.try_recv(fd, &mut Buffers::new(&list)?, flags) {
                Err(Errno::AGAIN) => {}
                Err(errno) if self.is_unix() => return Err(self.told(errno)),
                _ => return Ok(0),
            }
        }
    }

    /// Sends as send(2) does, sleeping if the socket blocks and `flags` allow it. Raises no signal.
    pub fn send(&self, mut fd: i32, source: &mut Buffers<'_>, flags: i32) -> Result<usize, Errno> {
        // As in `recv`.
        let blocks = flags & libc::MSG_DONTWAIT == 0 && !self.nonblocking.load(Ordering::Relaxed);
        let mut total = 0;
        let mut waits_since = None;
        let has_slept = Cell::new(false);
        let mut vain = VainWaits::default();
        let mut overtaken = 0;
        loop {
            match self.try_send(fd, source, flags) {
                Ok(count) => {
                    total += count;
                    if count > 0 && self.is_unix() {
                        // The limit is for each wait alone (`unix_stream_sendmsg`), not for all of them as on TCP (`tcp_sendmsg_locked`).
                        (waits_since, vain) = (None, VainWaits::default());
                    }
                    if count > 0 && self.segment().is_some_and(|segment| self.is_asked_back(segment)) {
                        // What was published just now may be what the peer no longer takes.
                        let mended = self.mend(fd);
                        if source.left() > 0 && mended.is_ok() {
                            continue;
                        }
                    }
                }
                Err(Errno::AGAIN) => {}
                // If nothing is failing any more, another thread has mended it since.
                Err(FAILED) if self.is_failing() || overtaken < OFTEN => {
                    overtaken += 1;
                    if let Err(errno) = self.mend(fd) {
                        return if total > 0 { Ok(total) } else { Err(errno) };
                    }
                    continue;
                }
                Err(FAILED) => return if total > 0 { Ok(total) } else { Err(Errno::CONNRESET) },
                Err(Errno::BADF | Errno::NOTSOCK) if self.reach(fd) != fd => {
                    fd = self.reach(fd);
                    continue;
                }
                Err(errno) => {
                    let errno = if source.has_waited() { self.told_while_waiting(errno) } else { errno };
                    return if total > 0 { Ok(total) } else { Err(self.told(errno)) };
                }
            }
            if source.left() == 0 {
                return Ok(total);
            }
            let at_once = flags & libc::MSG_DONTWAIT != 0 || !blocks && self.is_nonblocking(fd);
            source.note_wait();
            if !at_once && self.is_unix() && self.has_returned() && !self.ask_whether_nonblocking(fd) {
                let sent = self.send_by_kernel_alone(fd, source, flags);
                return match sent {
                    (0, Err(errno)) if total == 0 => Err(errno),
                    (count, _) => Ok(total + count),
                };
            }
            let waited = match at_once {
                true => Err(Errno::AGAIN),
                false => self.wait_writable(fd, &mut waits_since, &has_slept, total > 0 || source.has_some()),
            };
            match waited {
                Ok(()) if !vain.are_enough(|| waits_since.and_then(|(_, limit)| limit)) => {
                    fd = self.reach(fd)
                }
                Ok(()) => return if total > 0 { Ok(total) } else { Err(Errno::AGAIN) },
                Err(errno) => return if total > 0 { Ok(total) } else { Err(errno) },
            }
        }
    }

    /// Sends the rest as the kernel does, which sleeps. On `AF_UNIX` nothing else tells a sleeper that nobody reads any more
    /// (`unix_poll` of net/unix/af_unix.c). How much has been sent, and what ended it.
    #[cold]
    fn send_by_kernel_alone(
        &self,
        fd: i32,
        source: &mut Buffers<'_>,
        flags: i32,
    ) -> (usize, Result<(), Errno>) {
        self.block.sleeps.fetch_add(1, Ordering::Relaxed);
        let mut total = 0;
        while source.left() > 0 {
            let (piece, length) = source.piece();
            // SAFETY: the application vouches for its buffer.
            match unsafe { (settings().sleep.send)(fd, piece, length, flags | libc::MSG_NOSIGNAL) } {
                Ok(sent) => {
                    self.block.tcp_sent.fetch_add(sent as u64, Ordering::Relaxed);
                    source.advance_over(sent);
                    total += sent;
                    if sent < length {
                        break;
                    }
                }
                Err(errno) => return (total, Err(errno)),
            }
        }
        (total, Ok(()))
    }

    /// What a write that has waited for room says where it would otherwise say `errno`: on `AF_UNIX` only such a write tells of a
    /// reset, and then no read does (`sock_alloc_send_pskb` of net/core/sock.c).
    #[cold]
    fn told_while_waiting(&self, errno: Errno) -> Errno {
        let untold = self.segment().filter(|_| self.is_unix()).and_then(|segment| self.untold_reset(segment));
        untold.map_or(errno, |reset| self.told(reset))
    }

    /// How long a call may wait. `None`: as long as it takes.
    fn limit(&self, fd: i32, timeout: Timeout, at_once: bool) -> Option<Duration> {
        if at_once || self.is_nonblocking(fd) {
            return Some(Duration::ZERO);
        }
        self.limit_of_socket(fd, timeout)
    }

    /// As [`Self::limit`], of a read that may have slept already: what it knows from then.
    fn limit_of_call(&self, fd: i32, at_once: bool, slept_at: SleptAt) -> Option<Duration> {
        slept_at.map_or_else(|| self.limit(fd, Timeout::Recv, at_once), |(_, limit)| limit)
    }

    /// `SO_RCVTIMEO` or `SO_SNDTIMEO`.
    fn limit_of_socket(&self, fd: i32, timeout: Timeout) -> Option<Duration> {
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
        rustix::net::sockopt::socket_timeout(borrowed, timeout).ok().flatten()
    }

    /// Whether the socket is non-blocking. A process that shares it may have changed that, so the kernel has the
    /// last word whenever this process believes that it is.
    fn is_nonblocking(&self, fd: i32) -> bool {
        self.nonblocking.load(Ordering::Relaxed) && self.ask_whether_nonblocking(fd)
    }

    fn ask_whether_nonblocking(&self, fd: i32) -> bool {
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
        let nonblocking =
            rustix::fs::fcntl_getfl(borrowed).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK));
        self.nonblocking.store(nonblocking, Ordering::Relaxed);
        nonblocking
    }

    /// Whether a read would return at once, as far as memory shows; what still comes over TCP only the
    /// kernel knows.
    pub fn readable(&self) -> bool {
        let Some(segment) = self.segment() else { return false };
        if self.block.has(flag::PEER_GONE | flag::SHUT_RD) {
            return true;
        }
        // Nobody sleeps before it is mended. Nor for what only another process would get: a read says so.
        segment.has_failed()
            || segment.is_out_of_reach()
            || (!self.block.has(flag::RETURNED) && (self.is_asked_back(segment) || self.has_ring_news(segment)))
            // After that: bytes of the ring may be moved there.
            || self.side_length() > 0
    }

    /// Whether a read finds what is in the ring, or how the stream ended.
    fn has_ring_news(&self, segment: &Segment) -> bool {
        // Both cache lines come at once, not the second after the first.
        segment.expect();
        let incoming = segment.incoming();
        if !incoming.has_more() {
            return false;
        }
        if self.block.recv_switched.load(Ordering::Acquire) != 0 {
            return true;
        }
        let at = incoming.rare.0.switched_at.load(Ordering::Acquire);
        at != NOT_SWITCHED && self.block.tcp_received.load(Ordering::Relaxed) >= at
    }

    /// Whether there are bytes in the ring, though bytes that still come over TCP may precede them. Nobody rings for
    /// them again, and an edge on the socket for those may have been reported long ago. Not the end of a stream that never left
    /// TCP: that makes an edge on the socket, too.
    pub fn is_stirring(&self) -> bool {
        !self.has_returned()
            && self.segment().map(Segment::incoming).is_some_and(|incoming| {
                let has_left = incoming.rare.0.switched_at.load(Ordering::Acquire) != NOT_SWITCHED;
                incoming.end() & end::RETURN != 0 || has_left && incoming.has_more()
            })
    }

    /// Whether what is in the ring, or will be, comes after bytes that TCP has not delivered yet.
    pub fn is_behind_tcp(&self, fd: i32) -> bool {
        let Some(segment) = self.segment() else { return true };
        if self.block.recv_switched.load(Ordering::Acquire) != 0 || self.has_returned() {
            return false;
        }
        let left = waiting::tcp_left(&self.socket(fd, segment));
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
        left > 0 && (left == u64::MAX || tcp::unread(borrowed).is_ok_and(|unread| unread < left))
    }

    /// Waits in a call whose first sleep began at `slept_at`, with that limit, if it has slept, and notes that it does. What another process
    /// that shares the socket made of it before the first sleep holds for the call; what it makes of it later does not. `SO_RCVTIMEO` is
    /// for all sleeps together. A call that `has_some` of what it wants is ended by any signal.
    fn wait_readable(
        &self,
        fd: i32,
        at_once: bool,
        blocks: bool,
        has_some: bool,
        slept_at: &mut SleptAt,
    ) -> Result<(), Errno> {
        let Some(segment) = self.segment() else { return Err(Errno::NOTCONN) };
        let spin = if at_once || self.nonblocking.load(Ordering::Relaxed) {
            None
        } else {
            let spin = self.patience.spin(|| self.readable());
            if spin == Spin::Done {
                self.block.spin_hits.fetch_add(1, Ordering::Relaxed);
                return Ok(());
            }
            Some(spin)
        };
        let side = self.socket(fd, segment);
        let result = waiting::sleep_for_data(&side, |clear| {
            let has_slept = slept_at.is_some() && (blocks || !self.nonblocking.load(Ordering::Relaxed));
            let has_no_limit = has_slept && slept_at.is_some_and(|(_, limit)| limit.is_none());
            // What another thread makes of the limit while the call waits is for later calls.
            let first = || (Instant::now(), self.limit_of_socket(fd, Timeout::Recv));
            let mut begin = || *slept_at.get_or_insert_with(first);
            let until = |(began, limit): (Instant, Option<Duration>)| began.checked_add(limit?);
            if !clear && !at_once && segment.link().is_none() {
                let goes_on = has_slept || blocks && self.nonblocking.load(Ordering::Relaxed);
                if !goes_on && self.ask_whether_nonblocking(fd) {
                    return Err(Errno::AGAIN);
                }
                match self.sleep_for_arrival(fd, until(begin()), Way::In, None, has_some, || self.readable())
                {
                    // There is no descriptor, memory or watch for it.
                    Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOSPC) => {}
                    slept => return slept,
                }
            }
            let has_become_nonblocking = blocks && self.nonblocking.load(Ordering::Relaxed);
            let for_more = has_some && !at_once;
            // A read asks by itself, and keeps to the limit; poll(2) does neither.
            if for_more && !has_slept && !has_become_nonblocking && self.ask_whether_nonblocking(fd) {
                return Err(Errno::AGAIN);
            }
            let by_poll = has_become_nonblocking || for_more;
            let began = if blocks || for_more { Some(begin()) } else { None };
            let deadline = if has_slept || by_poll { began.and_then(until) } else { None };
            if by_poll || deadline.is_some() {
                return self.sleep_for_byte_by_poll(fd, None, deadline, has_some);
            }
            match self.sleep_for_byte(fd, at_once) {
                // Another has made it non-blocking meanwhile, or set a limit: this call waits on.
                Err(Errno::AGAIN) if blocks && has_no_limit => {
                    self.ask_whether_nonblocking(fd);
                    Ok(())
                }
                result => result,
            }
        });
        if let Some(spin) = spin {
            self.patience.learn(spin);
        }
        result
    }

    /// Sleeps until a byte or the end arrives on the TCP connection, as a blocking read would.
    fn sleep_for_byte(&self, fd: i32, at_once: bool) -> Result<(), Errno> {
        let flags = libc::MSG_PEEK | if at_once { libc::MSG_DONTWAIT } else { 0 };
        if !at_once {
            self.block.sleeps.fetch_add(1, Ordering::Relaxed);
        }
        let mut byte = 0u8;
        // SAFETY: one writable byte.
        let slept = unsafe { (settings().sleep.recv)(fd, &raw mut byte, 1, flags) };
        // Another thread may have closed it meanwhile.
        let fd = self.reach(fd);
        match slept {
            Ok(0) => self.note_end(fd),
            Ok(_) => self.look_for_down(fd),
            // `EPIPE`: another thread has ended the connection by connect(2), as of Linux 6.7.
            Err(errno @ (Errno::AGAIN | Errno::INTR | Errno::BADF | Errno::CANCELED | Errno::PIPE)) => {
                return Err(errno);
            }
            Err(errno) => self.note_error(fd, errno),
        }
        Ok(())
    }

    /// As [`Self::sleep_for_byte`], on a socket that has become non-blocking while the call waited, or of whose time a part is over, or for
    /// a call that `has_some` of what it wants. The `watch` ends it as well.
    fn sleep_for_byte_by_poll(
        &self,
        fd: i32,
        watch: Option<&Watch>,
        deadline: Option<Instant>,
        has_some: bool,
    ) -> Result<(), Errno> {
        self.block.sleeps.fetch_add(1, Ordering::Relaxed);
        // A read that has some bytes ends before urgent data, which alone is nothing to be read.
        let urgent = if has_some && !self.recv_settled() { libc::POLLPRI } else { 0 };
        if !restart::poll(fd, libc::POLLIN | urgent, watch, remaining(deadline)?.as_ref(), has_some)? {
            return Err(Errno::AGAIN);
        }
        match self.sleep_for_byte(self.reach(fd), true) {
            // Another thread was faster, or it was the watch.
            Err(Errno::AGAIN) => Ok(()),
            result => result,
        }
    }

    /// Waits for room in a call that `waits_since` then, and notes when it begins to. The first sleep of a call, which is its first if not
    /// `has_slept`, asks whether another process has made the socket non-blocking; one that has begun to wait goes on. If it `has_some` of its
    /// bytes sent, any signal ends it.
    fn wait_writable(
        &self,
        fd: i32,
        waits_since: &mut SleptAt,
        has_slept: &Cell<bool>,
        has_some: bool,
    ) -> Result<(), Errno> {
        let may_sleep = || match !has_slept.replace(true) && self.ask_whether_nonblocking(fd) {
            true => Err(Errno::AGAIN),
            false => Ok(()),
        };
        let Some(segment) = self.segment() else { return Err(Errno::NOTCONN) };
        // What another thread makes of the limit while the call waits is for later calls.
        let now = || (Instant::now(), self.limit_of_socket(fd, Timeout::Send));
        let (began, limit) = *waits_since.get_or_insert_with(now);
        // A limit beyond the clock's range is none.
        let deadline = limit.and_then(|limit| began.checked_add(limit));
        if self.block.send_switched.load(Ordering::Acquire) == 0 {
            return may_sleep().and_then(|()| self.sleep_for_kernel_space(fd, deadline, has_some));
        }
        let has_space = || self.ends_waits_for_space(segment);
        loop {
            let tail = segment.outgoing().tail();
            if self.patience.spin(has_space) == Spin::Done {
                self.block.spin_hits.fetch_add(1, Ordering::Relaxed);
                return Ok(());
            }
            // A reader at work soon makes room where the cache already is.
            if segment.outgoing().tail() == tail {
                break;
            }
            remaining(deadline)?;
        }
        if self.grow_for_sleeper(fd, segment) {
            return Ok(());
        }
        self.awaits_room();
        let watch = Watch::begin();
        let watch = watch.as_ref();
        let slept = waiting::sleep_for_space(&self.socket(fd, segment), has_space, |clear| {
            // A return to TCP is told by another descriptor.
            let told_here = segment.link().is_none();
            let sleeps_by_byte = clear && told_here && deadline.is_none() && !self.block.has(flag::SHUT_RD);
            if sleeps_by_byte && !self.nonblocking.load(Ordering::Relaxed) {
                // The kernel does not restart a read that has a limit, which is not this call's.
                if watch.is_none() && !has_some && self.limit_of_socket(fd, Timeout::Recv).is_none() {
                    has_slept.set(true);
                    return self.sleep_for_byte_or_retry(fd);
                }
                may_sleep()?;
                self.sleep_for_byte_by_poll(fd, watch, None, has_some)
            } else {
                may_sleep()?;
                match self.sleep_for_arrival(fd, deadline, Way::Out, watch, has_some, has_space) {
                    Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOSPC) => {
                        // There is no descriptor, memory or watch for it.
                        let left = remaining(deadline)?;
                        if clear && told_here {
                            let slept = restart::poll(fd, libc::POLLIN, watch, left.as_ref(), has_some);
                            return slept.map(drop);
                        }
                        restart::nap(WITHOUT_DESCRIPTOR, has_some)
                    }
                    slept => slept,
                }
            }
        });
        self.awaits_no_room();
        slept
    }

    /// As [`Self::sleep_for_byte`], for a sender.
    fn sleep_for_byte_or_retry(&self, fd: i32) -> Result<(), Errno> {
        match self.sleep_for_byte(fd, false) {
            // Another thread has just made it non-blocking: this call waits on, by other means.
            Err(Errno::AGAIN) if self.nonblocking.load(Ordering::Relaxed) => Ok(()),
            Err(Errno::AGAIN) if self.ask_whether_nonblocking(fd) => Err(Errno::AGAIN),
            Err(Errno::AGAIN) => Ok(()),
            other => other,
        }
    }

    fn sleep_for_kernel_space(
        &self,
        fd: i32,
        deadline: Option<Instant>,
        has_some: bool,
    ) -> Result<(), Errno> {
        self.block.sleeps.fetch_add(1, Ordering::Relaxed);
        match restart::poll(fd, libc::POLLOUT, None, remaining(deadline)?.as_ref(), has_some)? {
            false => Err(Errno::AGAIN),
            true => Ok(()),
        }
    }

    /// Sleeps until something more arrives on the TCP connection than already waits there unread, for what has been announced, or until the
    /// `watch` ends it.
    fn sleep_for_arrival(
        &self,
        fd: i32,
        deadline: Option<Instant>,
        way: Way,
        watch: Option<&Watch>,
        has_some: bool,
        done: impl Fn() -> bool,
    ) -> Result<(), Errno> {
        self.block.sleeps.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
        let news = Descriptor::from((settings().place)(epoll::create(epoll::CreateFlags::CLOEXEC)?)?);
        let edges = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        epoll::add(news.as_fd(), borrowed, epoll::EventData::new_u64(0), edges)?;
        if let Some(link) = self.segment().and_then(Segment::link) {
            epoll::add(news.as_fd(), link.wake(), epoll::EventData::new_u64(1), epoll::EventFlags::IN)?;
        }
        let mut events = [std::mem::MaybeUninit::uninit(); 1];
        // What is there already is reported once at once; only the next report is news. The bell for this sleeper may be
        // among it.
        epoll::wait(news.as_fd(), &mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
        if let Some(segment) = self.segment() {
            waiting::renew(&self.socket(fd, segment), way == Way::In, way == Way::Out);
        }
        if self.peer_is_gone(fd) || done() {
            return Ok(());
        }
        let limit = remaining(deadline)?;
        if !restart::poll(news.as_fd().as_raw_fd(), libc::POLLIN, watch, limit.as_ref(), has_some)? {
            return Err(Errno::AGAIN);
        }
        self.peer_is_gone(self.reach(fd));
        Ok(())
    }
}

/// Waits of one call that ended with nothing gained: others were faster, or the peer pretends. Each may last as long as
/// the socket allows, and spinning knows no limit of time; so beyond a number of them it counts from there.
#[derive(Default)]
struct VainWaits {
    times: u32,
    since: Option<Instant>,
}

impl VainWaits {
    const MANY: u32 = 64;

    /// One more. Whether the call has to end, by its time `limit`.
    fn are_enough(&mut self, limit: impl FnOnce() -> Option<Duration>) -> bool {
        self.times += 1;
        if self.times < Self::MANY {
            return false;
        }
        self.times = 0;
        let since = *self.since.get_or_insert_with(Instant::now);
        limit().is_some_and(|limit| since.elapsed() >= limit)
    }
}

/// Time left until `deadline`; `EAGAIN` if it has passed.
fn remaining(deadline: Option<Instant>) -> Result<Option<Timespec>, Errno> {
    let Some(deadline) = deadline else { return Ok(None) };
    let left = deadline.saturating_duration_since(Instant::now());
    if left == Duration::ZERO {
        return Err(Errno::AGAIN);
    }
    Ok(Some(Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: i64::from(left.subsec_nanos()) }))
}

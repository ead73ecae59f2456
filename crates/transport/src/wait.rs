//! Waiting of a call on one connection: spin a while if that has paid lately, then sleep in the kernel on
//! the connection's own socket, so that the peer's end wakes too.
//!
//! A sleeper for data lies in a blocking `recv(MSG_PEEK)` of one byte: bells and the peer's FIN end it, and the kernel
//! itself applies `SO_RCVTIMEO`, `O_NONBLOCK` and `SA_RESTART`, exactly as for a program that reads from TCP.
//! A sleeper for space does the same when no unread byte lies before the bell it waits for, else it waits
//! for the next arrival (`EPOLLET`).

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::sockopt::Timeout;

use crate::arena::flag;
use crate::buffers::Buffers;
use crate::connection::Connection;
use crate::control::{NOT_SWITCHED, end};
use crate::segment::Segment;
use crate::settings::settings;
use crate::stream::FAILED;
use crate::uninterrupted::Descriptor;
use crate::{process, restart, tcp, waiting};

/// How long one connection, or one set of them, spins: it follows how soon data used to come.
///
/// A wait that takes longer than the longest spin halves the next one's, down to none; a shorter wait restores it. But
/// two peers that both sleep before each message wait for two wake-ups each time, and would never find out
/// that they need not. So a waiter that does not spin tries it now and then, ever less often while that fails.
#[derive(Debug)]
pub struct Patience {
    budget_ns: AtomicU64,
    /// Waits since the last trial, and how many there are to be.
    waits: AtomicU32,
    trial_after: AtomicU32,
    /// Waits that the kernel's own descriptors have ended, less those that memory has.
    foreign: AtomicU32,
}

/// Waits that the kernel ended, less those that memory did, from which on a set does not spin, and most that are counted.
const FOREIGN: [u32; 2] = [8, 16];

/// Waits without a spin before the first trial, and most of them between two.
const TRIALS: [u32; 2] = [32, 4096];

impl Default for Patience {
    fn default() -> Self {
        Self::new()
    }
}

impl Patience {
    /// Full patience, until experience says otherwise.
    pub fn new() -> Self {
        Self {
            budget_ns: AtomicU64::new(settings().spin_ns),
            waits: AtomicU32::new(0),
            trial_after: AtomicU32::new(TRIALS[0]),
            foreign: AtomicU32::new(0),
        }
    }

    /// A wait for several has ended: because of one in memory, or of a descriptor that `foreign` tells is the kernel's. For that
    /// the kernel would have ended a sleep as soon as without this library, and at no cost to whoever needs the processor.
    pub fn ended(&self, foreign: bool) {
        let count = self.foreign.load(Ordering::Relaxed);
        let now = if foreign { (count + 1).min(FOREIGN[1]) } else { count.saturating_sub(1) };
        if now != count {
            self.foreign.store(now, Ordering::Relaxed);
        }
    }

    /// Longest spin of the wait that begins now, in nanoseconds.
    pub fn allowance_ns(&self) -> u64 {
        if self.foreign.load(Ordering::Relaxed) >= FOREIGN[0] {
            return 0;
        }
        let budget = self.budget_ns.load(Ordering::Relaxed);
        if budget > 0 {
            return budget;
        }
        let (waits, trial) =
            (self.waits.load(Ordering::Relaxed) + 1, self.trial_after.load(Ordering::Relaxed));
        if waits < trial {
            self.waits.store(waits, Ordering::Relaxed);
            return 0;
        }
        self.waits.store(0, Ordering::Relaxed);
        self.trial_after.store(trial.saturating_mul(2).min(TRIALS[1]), Ordering::Relaxed);
        settings().spin_ns
    }

    /// Spins until `done` or out of patience.
    pub fn spin(&self, mut done: impl FnMut() -> bool) -> Spin {
        let spin = spin_for(self.allowance_ns(), None, |_| done());
        if spin == Spin::Done {
            self.restore();
        }
        spin
    }

    /// Spinning has ended a wait, or would have.
    pub fn restore(&self) {
        if self.budget_ns.load(Ordering::Relaxed) != settings().spin_ns {
            self.budget_ns.store(settings().spin_ns, Ordering::Relaxed);
            self.trial_after.store(TRIALS[0], Ordering::Relaxed);
        }
    }

    /// Learns from a wait that ends now, and that `spin` did not end.
    pub fn learn(&self, spin: Spin) {
        let longest = settings().spin_ns;
        let (since, declined) = match spin {
            Spin::Done => return,
            Spin::Vain(since) => (since, false),
            Spin::Declined(since) => (since, true),
        };
        if since.elapsed() < Duration::from_nanos(longest) {
            self.restore();
        } else if !declined {
            let half = self.budget_ns.load(Ordering::Relaxed) / 2;
            self.budget_ns.store(if half < longest / 16 { 0 } else { half }, Ordering::Relaxed);
        }
    }
}

/// Reads that find nothing in memory for each that asks the kernel, too.
const BLIND_READS: u32 = 8;

/// How often others may have taken a connection back to TCP that one call saw fail: once, or the call would never end.
const OFTEN: u32 = 16;

/// Looks between two yields, some microseconds in all.
const LOOKS: u32 = 48;
/// Looks before the first yield: what is already on its way arrives meanwhile.
const FIRST_LOOKS: u32 = 24;
/// A yield that took longer gave the processor to somebody else.
const LONG_YIELD: Duration = Duration::from_nanos(1500);
/// Long yields in a row that brought nothing, after which a sleep and a bell would have cost less.
const VAIN_YIELDS: u32 = 16;

/// Longest spin of all, others' time included: a signal that arrives meanwhile ends no call.
const LONGEST: Duration = Duration::from_millis(5);

/// How [`spin_for`] ended; if what was waited for has not come, with the time since when it is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spin {
    /// What was waited for has come.
    Done,
    /// It has not.
    Vain(Instant),
    /// Nobody waited: on these processors sleeping is the better way now.
    Declined(Instant),
}

/// What this process has learned of its processors: is it better to yield them, or to sleep and be woken?
///
/// Spinning steals from whoever wants to run, and the kernel does not say whether anyone does. A yield tells: it
/// returns at once when nobody else is runnable here. If others are, and they are our peers, yielding is far cheaper
/// than bells. But a task that yields goes behind all others (Linux 6.18 makes it forfeit its slice): among programs that
/// never yield it loses milliseconds each time. So there is an account: a yield that others answered soon is worth
/// [`GAIN_NS`], one that took longer than [`ROBBED`] costs its time. Whoever is in debt sleeps at once for some waits, and
/// for twice as many the next time.
struct Crowd {
    /// The account, in nanoseconds.
    balance: AtomicI64,
    /// Waits that are still to sleep at once.
    retreat: AtomicU32,
    /// How many the next retreat lasts.
    lesson: AtomicU32,
}

static CROWD: Crowd =
    Crowd { balance: AtomicI64::new(0), retreat: AtomicU32::new(0), lesson: AtomicU32::new(LESSONS[0]) };

/// Waits of the first retreat, and of the longest.
const LESSONS: [u32; 2] = [64, 4096];
/// What yielding saves instead of sleeping: two wake-ups' time of a processor.
const GAIN_NS: i64 = 20_000;
/// Who lets others run loses no more than this among peers that wait for each other.
const ROBBED: Duration = Duration::from_millis(1);
/// Most that can be saved up: bad times must be noticed soon.
const WEALTH_NS: i64 = 10_000_000;

impl Crowd {
    /// Whether a wait should yield, now that looking has brought nothing.
    fn yields(&self) -> bool {
        let retreat = self.retreat.load(Ordering::Relaxed);
        if retreat > 0 {
            self.retreat.store(retreat - 1, Ordering::Relaxed);
        }
        retreat == 0
    }

    /// A yield let others run for `took`, and what was waited for has come. Threads that meet here may lose an entry.
    fn gained(&self, took: Duration) {
        if took >= ROBBED {
            self.robbed(took);
            return;
        }
        let balance = self.balance.load(Ordering::Relaxed) + GAIN_NS;
        self.balance.store(balance.min(WEALTH_NS), Ordering::Relaxed);
        if balance >= WEALTH_NS {
            self.lesson.store(LESSONS[0], Ordering::Relaxed);
        }
    }

    /// A yield let others run for `took`: too long.
    fn robbed(&self, took: Duration) {
        let balance = self.balance.load(Ordering::Relaxed).saturating_sub_unsigned(took.as_nanos() as u64);
        if balance >= 0 {
            self.balance.store(balance, Ordering::Relaxed);
            return;
        }
        self.balance.store(0, Ordering::Relaxed);
        let lesson = self.lesson.load(Ordering::Relaxed);
        self.retreat.store(lesson, Ordering::Relaxed);
        self.lesson.store(lesson.saturating_mul(2).min(LESSONS[1]), Ordering::Relaxed);
    }
}

/// Spins for up to `budget_ns` of this thread's own time until `done`, which is told whether others have just run for a
/// while; in all no longer than `limit`. Alone on its processor a thread just looks; if there are others it lets
/// them run: the peer may be among them.
pub fn spin_for(budget_ns: u64, limit: Option<Duration>, mut done: impl FnMut(bool) -> bool) -> Spin {
    if budget_ns == 0 {
        return Spin::Vain(Instant::now());
    }
    let limit = limit.unwrap_or(LONGEST).min(LONGEST);
    let budget = Duration::from_nanos(budget_ns).min(limit);
    fn look(times: u32, done: &mut impl FnMut(bool) -> bool) -> bool {
        (0..times).any(|_| {
            let found = done(false);
            if !found {
                std::hint::spin_loop();
            }
            found
        })
    }
    if look(FIRST_LOOKS, &mut done) {
        return Spin::Done;
    }
    let start = Instant::now();
    if !CROWD.yields() {
        return Spin::Declined(start);
    }
    let mut before = start;
    let (mut spent, mut vain) = (Duration::ZERO, 0);
    while spent < budget {
        rustix::thread::sched_yield();
        let after = Instant::now();
        let took = after.duration_since(before);
        if took < LONG_YIELD {
            if look(LOOKS, &mut done) {
                return Spin::Done;
            }
            let now = Instant::now();
            spent += now.duration_since(before);
            before = now;
            continue;
        }
        if done(true) {
            CROWD.gained(took);
            return Spin::Done;
        }
        if took >= ROBBED {
            CROWD.robbed(took);
            break;
        }
        vain += 1;
        if vain == VAIN_YIELDS || after.duration_since(start) >= limit {
            break;
        }
        spent += LONG_YIELD;
        before = after;
    }
    Spin::Vain(start)
}

impl Connection {
    /// Receives as recv(2) does, sleeping if the socket blocks and `flags` allow it.
    pub fn recv(&self, fd: i32, target: &mut Buffers<'_>, flags: i32) -> Result<usize, Errno> {
        if target.left() == 0 {
            return self.recv_nothing(fd, flags);
        }
        let at_once = flags & libc::MSG_DONTWAIT != 0;
        let whole = flags & libc::MSG_WAITALL != 0 && flags & libc::MSG_PEEK == 0 && !at_once;
        let mut total = 0;
        let mut vain = VainWaits::default();
        loop {
            match self.try_recv(fd, target, flags) {
                Ok(0) => return Ok(total),
                Ok(count) => {
                    self.blind_reads.store(0, Ordering::Relaxed);
                    total += count;
                    if !whole || target.left() == 0 {
                        return Ok(total);
                    }
                }
                Err(Errno::AGAIN) if self.answers_blindly(at_once) => {
                    return if total > 0 { Ok(total) } else { Err(Errno::AGAIN) };
                }
                Err(Errno::AGAIN) => match self.wait_readable(fd, at_once) {
                    Ok(()) if !vain.are_enough(|| self.limit(fd, Timeout::Recv, at_once)) => {}
                    Ok(()) => return if total > 0 { Ok(total) } else { Err(Errno::AGAIN) },
                    Err(errno) => return if total > 0 { Ok(total) } else { Err(errno) },
                },
                Err(errno) => return if total > 0 { Ok(total) } else { Err(self.told(errno)) },
            }
        }
    }

    /// Whether a read that must not wait, and found nothing in memory, may say so without asking the kernel: only the
    /// peer's sudden death is news there. The kernel gets its turn after some reads.
    fn answers_blindly(&self, at_once: bool) -> bool {
        let must_not_wait =
            at_once || (self.nonblocking.load(Ordering::Relaxed) && self.block.held_only_by(process::id()));
        must_not_wait && self.recv_settled() && !self.is_kernels_turn()
    }

    /// Whether a call that memory can answer should ask the kernel all the same: every eighth time.
    pub fn is_kernels_turn(&self) -> bool {
        self.blind_reads.fetch_add(1, Ordering::Relaxed) % BLIND_READS == BLIND_READS - 1
    }

    /// recv(2) of no bytes: waits as long as it would for one, and leaves it there.
    fn recv_nothing(&self, fd: i32, flags: i32) -> Result<usize, Errno> {
        let mut byte = 0u8;
        let list = [libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 }];
        let mut target = Buffers::new(&list)?;
        match self.recv(fd, &mut target, (flags | libc::MSG_PEEK) & !libc::MSG_TRUNC) {
            // Its time is up, or a signal came: the kernel looks no further once it has waited (`tcp_recvmsg_locked`).
            Err(Errno::AGAIN) if flags & libc::MSG_DONTWAIT == 0 && !self.is_nonblocking(fd) => Ok(0),
            Err(Errno::INTR) => Ok(0),
            result => result.map(|_| 0),
        }
    }

    /// Sends as send(2) does, sleeping if the socket blocks and `flags` allow it. Raises no signal.
    pub fn send(&self, fd: i32, source: &mut Buffers<'_>, flags: i32) -> Result<usize, Errno> {
        let mut total = 0;
        let mut deadline = None;
        let mut vain = VainWaits::default();
        let mut overtaken = 0;
        loop {
            match self.try_send(fd, source, flags) {
                Ok(count) => {
                    total += count;
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
                Err(errno) => return if total > 0 { Ok(total) } else { Err(self.told(errno)) },
            }
            if source.left() == 0 {
                return Ok(total);
            }
            let waited = if flags & libc::MSG_DONTWAIT != 0 || self.is_nonblocking(fd) {
                Err(Errno::AGAIN)
            } else {
                self.wait_writable(fd, &mut deadline)
            };
            match waited {
                Ok(()) if !vain.are_enough(|| self.limit(fd, Timeout::Send, false)) => {}
                Ok(()) => return if total > 0 { Ok(total) } else { Err(Errno::AGAIN) },
                Err(errno) => return if total > 0 { Ok(total) } else { Err(errno) },
            }
        }
    }

    /// How long a call may wait. `None`: as long as it takes.
    fn limit(&self, fd: i32, timeout: Timeout, at_once: bool) -> Option<Duration> {
        if at_once || self.is_nonblocking(fd) {
            return Some(Duration::ZERO);
        }
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
        rustix::net::sockopt::socket_timeout(borrowed, timeout).ok().flatten()
    }

    /// Whether the socket is non-blocking. A process that shares it may have changed that, so the kernel has the
    /// last word whenever this process believes that it is.
    fn is_nonblocking(&self, fd: i32) -> bool {
        if !self.nonblocking.load(Ordering::Relaxed) {
            return false;
        }
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
        if self.side_length() > 0 || self.block.has(flag::PEER_GONE | flag::SHUT_RD) {
            return true;
        }
        if segment.has_failed() {
            // Nobody sleeps before it is mended.
            return true;
        }
        let incoming = segment.incoming();
        if self.block.has(flag::RETURNED) {
            return false;
        }
        if self.is_asked_back(segment) {
            return true;
        }
        // Both cache lines come at once, not the second after the first.
        segment.expect();
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

    fn wait_readable(&self, fd: i32, at_once: bool) -> Result<(), Errno> {
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
        let result = waiting::sleep_for_data(&side, || self.sleep_for_byte(fd, at_once));
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
        match unsafe { (settings().sleep.recv)(fd, &raw mut byte, 1, flags) } {
            Ok(0) => self.note_end(fd),
            Ok(_) => self.look_for_down(fd),
            Err(errno @ (Errno::AGAIN | Errno::INTR | Errno::BADF | Errno::CANCELED)) => return Err(errno),
            Err(errno) => self.note_error(fd, errno),
        }
        Ok(())
    }

    fn wait_writable(&self, fd: i32, deadline: &mut Option<Instant>) -> Result<(), Errno> {
        let Some(segment) = self.segment() else { return Err(Errno::NOTCONN) };
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
        if deadline.is_none()
            && let Ok(Some(limit)) = rustix::net::sockopt::socket_timeout(borrowed, Timeout::Send)
        {
            // A limit beyond the clock's range is none.
            *deadline = Instant::now().checked_add(limit);
        }
        if self.block.send_switched.load(Ordering::Acquire) == 0 {
            return self.sleep_for_kernel_space(fd, *deadline);
        }
        let has_space = || {
            self.ring_has_space(segment)
                || self.block.has(flag::PEER_GONE)
                || segment.link().is_some_and(|link| link.has_failed() || link.is_frozen())
                || segment.incoming().end() & (end::CLOSED | end::DEAF) != 0
                || self.block.has(flag::RETURNED)
                || self.is_asked_back(segment)
        };
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
            remaining(*deadline)?;
        }
        if self.grow_for_sleeper(fd, segment) {
            return Ok(());
        }
        waiting::sleep_for_space(&self.socket(fd, segment), has_space, |clear| {
            // A return to TCP is told by another descriptor.
            let told_here = segment.link().is_none();
            if clear && told_here && deadline.is_none() && !self.block.has(flag::SHUT_RD) {
                self.sleep_for_byte_or_retry(fd)
            } else {
                self.sleep_for_arrival(fd, *deadline, has_space)
            }
        })
    }

    /// As [`Self::sleep_for_byte`], for a sender: `SO_RCVTIMEO` is not its business.
    fn sleep_for_byte_or_retry(&self, fd: i32) -> Result<(), Errno> {
        match self.sleep_for_byte(fd, false) {
            Err(Errno::AGAIN) => {
                self.nonblocking.store(true, Ordering::Relaxed);
                if self.is_nonblocking(fd) { Err(Errno::AGAIN) } else { Ok(()) }
            }
            other => other,
        }
    }

    fn sleep_for_kernel_space(&self, fd: i32, deadline: Option<Instant>) -> Result<(), Errno> {
        self.block.sleeps.fetch_add(1, Ordering::Relaxed);
        match restart::poll(fd, libc::POLLOUT, remaining(deadline)?.as_ref())? {
            0 => Err(Errno::AGAIN),
            _ => Ok(()),
        }
    }

    /// Sleeps until something more arrives on the TCP connection than already waits there unread.
    fn sleep_for_arrival(
        &self,
        fd: i32,
        deadline: Option<Instant>,
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
            waiting::renew(&self.socket(fd, segment), false, true);
        }
        if self.peer_is_gone(fd) || done() {
            return Ok(());
        }
        if restart::poll(news.as_fd().as_raw_fd(), libc::POLLIN, remaining(deadline)?.as_ref())? == 0 {
            return Err(Errno::AGAIN);
        }
        self.peer_is_gone(fd);
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

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn patience_follows_what_waits_are_like() {
        let longest = settings().spin_ns;
        let long =
            || Instant::now().checked_sub(Duration::from_secs(1)).expect("the machine runs for a second");
        let patience = Patience::new();
        let mut budgets = vec![];
        while patience.allowance_ns() > 0 {
            budgets.push(patience.budget_ns.load(Ordering::Relaxed));
            patience.learn(Spin::Vain(long()));
        }
        assert_eq!(budgets, [longest, longest / 2, longest / 4, longest / 8, longest / 16]);
        patience.learn(Spin::Declined(long()));
        assert_eq!(patience.budget_ns.load(Ordering::Relaxed), 0);
        // A spin would have ended this one.
        patience.learn(Spin::Vain(Instant::now()));
        assert_eq!(patience.allowance_ns(), longest);
        // Nobody tried.
        patience.learn(Spin::Declined(long()));
        assert_eq!(patience.allowance_ns(), longest);
    }

    #[test]
    fn a_set_that_the_kernel_wakes_more_often_than_memory_does_not_spin() {
        let patience = Patience::new();
        let spins = |kernel: u32, memory: u32| {
            (0..kernel).for_each(|_| patience.ended(true));
            (0..memory).for_each(|_| patience.ended(false));
            patience.allowance_ns() > 0
        };
        assert_eq!([spins(7, 0), spins(1, 0), spins(0, 1), spins(100, 8)], [true, false, true, false]);
        assert_eq!([spins(0, 1), spins(1, 1), spins(2, 1)], [true, true, false]);
    }

    #[test]
    fn a_waiter_that_does_not_spin_tries_it_ever_less_often() {
        let patience = Patience::new();
        patience.budget_ns.store(0, Ordering::Relaxed);
        let mut gaps = vec![];
        while gaps.len() < 9 {
            let waits = (1..).find(|_| patience.allowance_ns() > 0);
            gaps.push(waits.expect("a trial comes"));
        }
        assert_eq!(gaps, [32, 64, 128, 256, 512, 1024, 2048, 4096, 4096]);
    }
}

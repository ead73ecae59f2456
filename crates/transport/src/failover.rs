//! The way back to TCP, without a byte lost, repeated or out of order: because the queue pair has failed, the peer has
//! gone back, or the process is about to fork.
//!
//! Whoever goes first takes what has arrived in its ring, and sends on TCP, behind its bells, the frame DOWN and then all
//! that the peer has not credited, and from there on its stream as ever. DOWN tells the stream position where that begins:
//! the peer skips what it has already. It goes back as soon as it sees the frame, or finds out by itself; neither waits
//! for the other.
//!
//! ```text
//!   DOWN    u8 2 | u8 1 if the peer's bytes have left TCP, as this side knows | u64 stream position
//! ```
//!
//! Afterwards the connection is as it was before it left TCP, with the hooks in between. What was in the ring is in the
//! side buffer.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::arena::flag;
use crate::connection::Connection;
use crate::control::NOT_SWITCHED;
use crate::handback::PATIENCE;
use crate::segment::{Greeting, SIDE_BYTES, Segment};
use crate::stream::{BELL, FAILED};
use crate::tcp;
use crate::uninterrupted::Uninterrupted;
use crate::verbs::link::Link;

/// The frame by which a side goes back to TCP.
const DOWN: u8 = 2;
/// How long bytes may be under way between hosts that the peer has sent over TCP before it said so by RDMA.
const LONGEST_WAY: Duration = Duration::from_secs(10);
/// Bytes of that frame.
const LENGTH: usize = 10;

/// What comes next on TCP, where frames do.
enum Next {
    /// Nothing yet.
    Nothing,
    /// A whole DOWN, which has been taken: whether the peer knows that this side's bytes have left TCP, and the position.
    Down(bool, u64),
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
    pub fn leave_fabric(&self, fd: i32) {
        let Some(segment) = self.segment() else { return };
        self.stop_connecting(fd, segment);
        // One that has failed, too: it is for one process to say so to the peer.
        let drives = |link: &&Link| {
            (link.is_usable() && !link.is_frozen()) || (link.is_ours() && segment.has_failed())
        };
        let Some(link) = segment.link().filter(drives) else { return };
        if let Ok(_guard) = self.lock_receiving(fd) {
            let _ = self.go_back(fd, segment, link);
        }
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
    fn go_back_locked(&self, fd: i32, segment: &Segment, link: &Link) {
        let block = self.block;
        // Where bytes leave TCP, frames may follow.
        if segment.is_ready() && link.is_usable() {
            self.send_switched(segment);
        }
        let unsure = segment.switching().load(Ordering::SeqCst) != 0
            && block.send_switched.load(Ordering::Acquire) == 0;
        let (incoming, outgoing) = (segment.incoming(), segment.outgoing());
        link.freeze(incoming, outgoing);
        let seen = incoming.rare.0.switched_at.load(Ordering::Acquire) != NOT_SWITCHED;
        let kept = self.keep_what_came(fd, segment);
        segment.take_down();
        block.come_back();
        incoming.rare.0.switched_at.store(NOT_SWITCHED, Ordering::SeqCst);
        incoming.rung.0.count.store(block.drained.load(Ordering::Relaxed), Ordering::Relaxed);
        block.recv_switched.store(0, Ordering::SeqCst);
        segment.set_greeting(if seen { Greeting::AwaitsDown } else { Greeting::Done });
        // Without the peer's word nobody knows how it takes the next byte.
        let mut switched = block.send_switched.swap(0, Ordering::SeqCst) != 0;
        if unsure {
            // Where the peer's own bytes have not left TCP, it can't send frames.
            match if seen { self.next_frame(fd) } else { Next::Nothing } {
                Next::Down(knows, position) => {
                    self.begin_to_skip(fd, segment, position);
                    switched = knows;
                }
                _ => return self.lose(fd),
            }
        }
        outgoing.rare.0.switched_at.store(NOT_SWITCHED, Ordering::SeqCst);
        if !kept {
            return self.lose(fd);
        }
        if self.left_without_a_word(fd) {
            // A frame would only make it reset the connection.
            block.raise(flag::PEER_GONE);
        } else if switched {
            let Some((position, bytes)) = link.uncredited(outgoing) else { return self.lose(fd) };
            let mut frame = vec![DOWN, u8::from(seen)];
            frame.extend(position.to_le_bytes());
            frame.extend(bytes);
            self.send_all(fd, segment, &frame);
            outgoing.tail.0.store(outgoing.head(), Ordering::Release);
        }
        if block.has(flag::SHUT_WR) {
            // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
            let _ =
                rustix::net::shutdown(unsafe { BorrowedFd::borrow_raw(fd) }, rustix::net::Shutdown::Write);
        }
    }

    /// Whether the peer has closed its socket, and no DOWN of its own precedes that.
    fn left_without_a_word(&self, fd: i32) -> bool {
        let mut bytes = [0u8; 64];
        // SAFETY: the buffer is writable for its length.
        let seen =
            unsafe { tcp::recv(fd, bytes.as_mut_ptr(), bytes.len(), libc::MSG_PEEK | libc::MSG_DONTWAIT) };
        tcp::peer_has_closed(fd) && seen.is_ok_and(|count| bytes[..count].iter().all(|&byte| byte == BELL))
    }

    /// Nothing can save the connection.
    pub(crate) fn lose(&self, fd: i32) {
        self.block.raise(flag::PEER_GONE | flag::RESET | flag::LOST);
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let _ = rustix::net::shutdown(unsafe { BorrowedFd::borrow_raw(fd) }, rustix::net::Shutdown::Both);
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
            // SAFETY: stop < SIDE_BYTES.
            let target = unsafe { segment.side().add(stop) };
            // SAFETY: the side buffer has room for `used` bytes here.
            let Ok(count) = (unsafe { inlet.peek(0, target.as_ptr(), used) }) else { return false };
            if count == 0 || inlet.consume(count).is_err() {
                return false;
            }
            self.block.set_side_end((stop + count) as u64);
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
            self.absorb(fd, segment, false);
            if self.recv_settled() {
                break;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || tcp::peer_has_closed(fd) || !wait_for(fd, PollFlags::IN, Some(left)) {
                return false;
            }
        }
        true
    }

    /// Sends `bytes` on TCP, and takes out of the way meanwhile what the peer sends: it may do the same.
    pub(crate) fn send_all(&self, fd: i32, segment: &Segment, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            // SAFETY: readable for its length.
            let sent = unsafe {
                tcp::send(fd, bytes.as_ptr(), bytes.len(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
            };
            match sent {
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.absorb(fd, segment, false);
                    wait_for(fd, PollFlags::IN | PollFlags::OUT, None);
                }
                Err(errno) => return self.note_error(errno),
            }
        }
    }

    /// Before a read, after a return to TCP: takes what precedes the application's bytes. True if what is there now is the
    /// application's. The caller holds the receive lock.
    #[cold]
    pub(crate) fn take_down_frame(&self, fd: i32, segment: &Segment) -> bool {
        let _uninterrupted = Uninterrupted::begin();
        if segment.greeting() == Greeting::AwaitsDown {
            match self.next_frame(fd) {
                Next::Nothing => return false,
                Next::Down(_, position) => self.begin_to_skip(fd, segment, position),
                Next::End => segment.set_greeting(Greeting::Done),
                Next::Lie => self.lose(fd),
            }
        }
        if self.block.has(flag::LOST) {
            return false;
        }
        while segment.greeting() == Greeting::Skips {
            let skip = segment.skip().load(Ordering::Relaxed);
            let most = usize::try_from(skip).unwrap_or(usize::MAX).min(1 << 20);
            // SAFETY: with MSG_TRUNC tcp(7) discards the bytes and writes none.
            match unsafe { tcp::recv(fd, std::ptr::null_mut(), most, libc::MSG_DONTWAIT | libc::MSG_TRUNC) } {
                Ok(0) => segment.set_greeting(Greeting::Done),
                Ok(count) => {
                    segment.skip().store(skip - count as u64, Ordering::Relaxed);
                    if skip == count as u64 {
                        segment.set_greeting(Greeting::Done);
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => return false,
                Err(_) => segment.set_greeting(Greeting::Done),
            }
        }
        true
    }

    /// Before a close: an unread frame would turn the kernel's FIN into a reset.
    pub(crate) fn take_leftover_frames(&self, fd: i32) {
        let Some(segment) = self.segment() else { return };
        if matches!(segment.greeting(), Greeting::AwaitsDown | Greeting::Skips)
            && let Ok(_guard) = self.lock_receiving(fd)
        {
            self.take_down_frame(fd, segment);
        }
    }

    /// The peer's stream goes on at `position`, on TCP.
    fn begin_to_skip(&self, fd: i32, segment: &Segment, position: u64) {
        let skip = segment.incoming().tail().checked_sub(position);
        match skip {
            Some(0) => segment.set_greeting(Greeting::Done),
            Some(skip) => {
                segment.skip().store(skip, Ordering::Relaxed);
                segment.set_greeting(Greeting::Skips);
            }
            // It does not send again what has not come.
            None => self.lose(fd),
        }
    }

    /// Takes bells, and the frame behind them if it is there.
    fn next_frame(&self, fd: i32) -> Next {
        let mut bytes = [0u8; 64];
        loop {
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
            let frame = seen.first_chunk::<LENGTH>().copied();
            if bells == 0 && frame.is_none() {
                return if tcp::peer_has_closed(fd) { Next::End } else { Next::Nothing };
            }
            let take = if bells > 0 { bells } else { LENGTH };
            // SAFETY: as above; it is there, and nobody else reads.
            let _ = unsafe { tcp::recv(fd, bytes.as_mut_ptr(), take, libc::MSG_DONTWAIT) };
            if let (0, Some(frame)) = (bells, frame) {
                let position = u64::from_le_bytes(std::array::from_fn(|i| frame[2 + i]));
                return Next::Down(frame[1] != 0, position);
            }
        }
    }
}

/// Bells at the beginning of what has come on TCP. Behind them only DOWN can follow: then the fabric counts as failed.
fn bells_before_frames(link: &Link, seen: &[u8]) -> usize {
    let bells = seen.iter().take_while(|&&byte| byte == BELL).count();
    if bells < seen.len() {
        link.fail();
    }
    bells
}

/// Waits for some of `events`, no longer than `limit`. False if that fails.
fn wait_for(fd: i32, events: PollFlags, limit: Option<Duration>) -> bool {
    // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut list = [PollFd::from_borrowed_fd(socket, events)];
    let limit = limit.map(|limit| Timespec {
        tv_sec: limit.as_secs().cast_signed(),
        tv_nsec: i64::from(limit.subsec_nanos()),
    });
    !matches!(rustix::event::poll(&mut list, limit.as_ref()), Err(errno) if errno != Errno::INTR)
}

//! Whether the hooks have seen every byte of a connection that is about to leave the kernel's socket. If not, some call that they do
//! not see moves bytes, and would go on doing so.
//!
//! Of TCP the kernel keeps count, and each side asks it. Of `AF_UNIX` it does not, but says how many bytes wait at either end, and
//! all that has been sent is there at once. So what one side has sent is what the other has taken, and what waits there. The
//! server keeps its counts in the segment from its answer on ([`Rare`](crate::control::Rare)); the client, in a call of its own and
//! with no other, compares them with its own. The two are looked at twice, and must not have moved:
//!
//! ```text
//!  server                                client
//!  counting[way] odd                     counting[both]        even, or next time
//!  sends, or receives                    sent, taken
//!  sent, or taken                        what waits here, what waits there
//!  counting[way] even                    counting[both]        the same, or next time
//! ```

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use crate::connection::Connection;
use crate::reason::Reason;
use crate::rendezvous::{Failure, no_diag};
use crate::segment::Segment;
use crate::{tcp, unix};

/// How long a client waits for a call of the server's to end, which does not sleep.
const PATIENCE: Duration = Duration::from_millis(1);

/// A way that bytes go; which of [`Rare::counting`](crate::control::Rare::counting) is its.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Out,
    In,
}

impl Connection {
    /// TCP: whether the kernel has counted the bytes that the hooks have.
    pub(crate) fn check_counts(&self, fd: BorrowedFd<'_>) -> Result<(), Failure> {
        if self.is_unix() {
            return Ok(());
        }
        let sent = tcp::counts(fd).map_err(|_| Failure::Stay(Reason::KernelTooOld))?.sent;
        let read = tcp::bytes_read(fd).map_err(|_| Failure::Stay(Reason::KernelTooOld))?;
        match [sent, read] == self.counts() {
            true => Ok(()),
            // Reset meanwhile: nothing is left to move.
            false if tcp::is_closed(fd) => Err(Failure::NotYet),
            false => Err(Failure::Stay(Reason::UnseenBytes)),
        }
    }

    /// What the hooks have sent over the kernel's socket, and received.
    fn counts(&self) -> [u64; 2] {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        [load(&self.block.tcp_sent), load(&self.block.tcp_received)]
    }

    /// Server: tells the client its counts.
    pub(crate) fn tell_counts(&self, segment: &Segment) {
        let rare = &segment.outgoing().rare.0;
        let [sent, received] = self.counts();
        rare.sent.store(sent, Ordering::Relaxed);
        rare.taken.store(received, Ordering::Release);
    }

    /// Makes a `call` that moves bytes by the kernel's socket and counts them in the block. A client that has not decided yet can tell
    /// that it is made, and what the count is then. The caller holds the lock of its direction.
    #[inline]
    pub(crate) fn counting<T>(&self, segment: &Segment, way: Way, call: impl FnOnce() -> T) -> T {
        if !self.is_unix() || segment.is_ready() {
            return call();
        }
        let rare = &segment.outgoing().rare.0;
        let counting = &rare.counting[way as usize];
        counting.fetch_add(1, Ordering::SeqCst);
        // Whoever sees what the call does sees that it is made.
        fence(Ordering::SeqCst);
        let result = call();
        let count = match way {
            Way::Out => (&rare.sent, &self.block.tcp_sent),
            Way::In => (&rare.taken, &self.block.tcp_received),
        };
        count.0.store(count.1.load(Ordering::Relaxed), Ordering::Release);
        counting.fetch_add(1, Ordering::Release);
        result
    }

    /// Client: whether both ends of an `AF_UNIX` connection have counted the same bytes. To be asked while no other thread or process is
    /// in a call on this end.
    pub(crate) fn compare_counts(&self, fd: BorrowedFd<'_>, segment: &Segment) -> Result<(), Failure> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.compare_counts_once(fd, segment) {
                Err(Failure::NotYet) if Instant::now() < deadline => rustix::thread::sched_yield(),
                decided => return decided,
            }
        }
    }

    fn compare_counts_once(&self, fd: BorrowedFd<'_>, segment: &Segment) -> Result<(), Failure> {
        let theirs = &segment.incoming().rare.0;
        let counting = || theirs.counting.each_ref().map(|count| count.load(Ordering::SeqCst));
        let before = counting();
        let taken = theirs.taken.load(Ordering::Acquire);
        let sent = theirs.sent.load(Ordering::Acquire);
        let here = tcp::unread(fd).map_err(|_| Failure::NotYet)?;
        let there = unix::unread_by_peer(fd).map_err(no_diag)?;
        fence(Ordering::SeqCst);
        let moves = before.iter().any(|count| count % 2 != 0) || before != counting();
        // Nobody is there any more.
        let there = there.filter(|_| !moves).ok_or(Failure::NotYet)?;
        let [sent_here, taken_here] = self.counts();
        let seen = sent == taken_here.wrapping_add(here) && sent_here == taken.wrapping_add(there);
        seen.then_some(()).ok_or(Failure::Stay(Reason::UnseenBytes))
    }
}

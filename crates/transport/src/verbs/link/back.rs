//! The way back to TCP: what the fabric has to tell for it, and does no more afterwards. The frames are the business of
//! [`crate::failover`].

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use super::super::board::{Board, CONNECTED, LEAVES};
use super::Link;
use crate::control::Control;
use crate::process;
use crate::uninterrupted::Uninterrupted;

impl Link {
    /// Before a [`Self::freeze`] on purpose: tells the peer that this side leaves, and waits until all has arrived that it had posted before
    /// it could know. Whatever it posts later it sends again by itself, in the same call. Fails with `EPIPE` once it `is_over`.
    pub(crate) fn depart(&self, incoming: &Control, is_over: impl Fn() -> bool) -> Result<(), Errno> {
        let _uninterrupted = Uninterrupted::begin();
        let _one = self.syncing.lock(process::thread())?;
        let id = {
            let poster = self.pair.begin(2)?;
            let leaves = self.words(&poster, 0, std::mem::offset_of!(Board, ready), &[LEAVES]);
            poster.post([leaves, self.read_figures()])?
        };
        self.pair.wait_for(id, || self.peer_has_gone(incoming) || is_over())?;
        self.await_posted(incoming, is_over).map(drop)
    }

    /// Whether something was posted that a peer may lack, though it had all when it left ([`Self::depart`]).
    pub(crate) fn has_posted_late(&self) -> bool {
        self.late.load(Ordering::Relaxed)
    }

    /// Takes [`Self::depart`] back. A peer that knows of it already goes back to TCP.
    pub(crate) fn stay(&self) {
        if let Ok(poster) = self.pair.begin(1) {
            let _ = self.write_words(&poster, std::mem::offset_of!(Board, ready), &[CONNECTED]);
        }
    }

    /// Whether the queue pair has failed, and the connection is still to go back to TCP.
    pub(crate) fn has_failed(&self) -> bool {
        self.pair.is_broken() && !self.is_frozen()
    }

    /// Whether [`Self::freeze`] was called.
    pub(crate) fn is_frozen(&self) -> bool {
        self.inbox.is_frozen()
    }

    /// Notes that nothing gets through any more.
    pub(crate) fn fail(&self) {
        self.pair.shut();
    }

    /// Looks a last time for what has arrived: what comes later does not count, and is not read. The queue pair stays as
    /// it is, so that the peer's requests do not fail before it has been told.
    pub(crate) fn freeze(&self, incoming: &Control, outgoing: &Control) {
        self.note_credit(outgoing);
        self.inbox.freeze(incoming);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// A descriptor that is readable once [`Self::freeze`] was called: for sleepers whom no bell tells.
    pub(crate) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Descriptors of its own.
    pub(crate) fn internal_fds(&self) -> [Option<i32>; 3] {
        let [manager, way] = self.pair.manager_fds();
        [Some(self.wake.as_raw_fd()), manager, way]
    }

    /// What has been sent and not credited: the stream position where it begins, and the bytes. `None` if the peer has
    /// written impossible positions. The caller holds the send lock.
    pub(crate) fn uncredited(&self, control: &Control) -> Option<(u64, Vec<u8>)> {
        let posted = self.figures().posted.load(Ordering::Acquire);
        let mut position = self.credit()[0];
        if posted.checked_sub(position)? > self.outbox.size {
            return None;
        }
        let mut bytes = Vec::new();
        while position < posted {
            let message = self.outbox.message(position).ok()??;
            if message.span > posted - position {
                return None;
            }
            let (start, data) = (bytes.len(), message.data());
            bytes.resize(start + data as usize, 0);
            // SAFETY: all of the message's data, for which there is room.
            unsafe { self.outbox.copy(position, message, 0, bytes[start..].as_mut_ptr(), data) };
            position += message.span;
        }
        Some((control.head().checked_sub(bytes.len() as u64)?, bytes))
    }
}

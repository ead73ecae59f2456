//! A connection on which a call is about to be made that only the kernel can serve, here or in another program: it stays on
//! TCP, or goes back there, and the socket then carries nothing but the application's bytes.
//!
//! | where it stands | what is done |
//! |---|---|
//! | nobody has decided | it is pinned |
//! | this side owes a greeting | not sent; pinned |
//! | a greeting may be under way to this side | waited for, taken, not answered; pinned |
//! | it has left TCP on this host | both ends agree in the segment ([`crate::handback`]) |
//! | it has left TCP for another host | as for a fabric that fails ([`crate::failover`]), and the peer's DOWN is waited for |
//!
//! What has come over the fabric and has not been read comes again behind the peer's DOWN, so it is left to the kernel.

use std::os::fd::BorrowedFd;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::net::sockopt;

use crate::arena::{State, flag};
use crate::connection::Connection;
use crate::failover::{DOWN_BYTES, Unread};
use crate::handback::{BUFFER_PER_BYTE, Rest};
use crate::reason::Reason;
use crate::segment::{Greeting, Segment};
use crate::tcp::{self, wait_for};
use crate::uninterrupted::Uninterrupted;
use crate::verbs::link::Link;
use crate::waiting;

/// How long such a call waits for the peer. One that is in any call, or makes one, takes microseconds on one host, and a round
/// trip between two.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// The same for one that can do without.
pub const SHORT_PATIENCE: Duration = Duration::from_millis(100);

impl Connection {
    /// Keeps the connection on TCP, or takes it back there, because of what the application is about to do: from now on
    /// the kernel alone serves it. Waits for the peer until `deadline`. False if that can't be.
    pub fn settle(&self, fd: i32, reason: Reason, deadline: Instant) -> bool {
        self.pin(fd, reason)
            || self.decline(fd, reason, Some(deadline))
            || self.hand_back(fd, reason, deadline)
    }

    /// As [`Self::pin`], for a descriptor that another program inherits, by chance perhaps. Of a connection just accepted the
    /// first bytes are waited for, until `deadline`: they may be a HELLO.
    pub fn pin_inherited(&self, fd: i32, reason: Reason, deadline: Instant) {
        let hears = || self.segment().is_some_and(|segment| segment.greeting() == Greeting::AwaitsHello);
        if self.pin(fd, reason) || !(self.may_hear_hello() || hears()) {
            return;
        }
        self.decline(
            fd,
            reason,
            Some(deadline.min(Instant::now() + PATIENCE.saturating_sub(self.block.age()))),
        );
    }

    /// Has a connection stay on TCP that has not left it, though greetings are owed or awaited. One that may be under way is
    /// waited for until `deadline`, if there is one. False if it does not come.
    pub(crate) fn decline(&self, fd: i32, reason: Reason, deadline: Option<Instant>) -> bool {
        let _uninterrupted = Uninterrupted::begin();
        if deadline.is_some() && self.may_hear_hello() {
            self.await_greeting(fd);
        }
        let unlinked = |segment: &&Segment| segment.is_alone() && segment.link().is_none();
        let Some(segment) = self.segment().filter(unlinked) else { return false };
        let Ok(_receiving) = self.lock_receiving(fd) else { return false };
        while self.block.state() == State::Active && !self.is_closed() {
            let awaits = || matches!(segment.greeting(), Greeting::AwaitsHello | Greeting::AwaitsReply);
            if awaits() {
                let Some(deadline) = deadline else { return false };
                if matches!(reason, Reason::Oob | Reason::ZeroCopy) {
                    // The hooks see all reads, and take it when it comes.
                    self.block.note(reason);
                    self.block.raise(flag::DECLINES);
                    return true;
                }
                if !self.look_for_greeting(fd, segment, Some(reason)) && !wait_until(fd, deadline) {
                    return false;
                }
                continue;
            }
            let Ok(_sending) = self.lock_sending(fd) else { return false };
            if segment.link().is_some() {
                return false;
            }
            if !awaits() {
                segment.set_greeting(Greeting::Done);
                self.give_up(fd, reason);
                break;
            }
        }
        self.block.state() == State::Pinned
    }

    /// Has the kernel's socket carry whatever is sent from now on, because of something that only it can carry; calls still go by the
    /// hooks, which give to the application what came before. Waits for the peer until `deadline`. False if that can't be yet.
    #[cold]
    pub fn send_by_kernel(&self, fd: i32, reason: Reason, deadline: Instant) -> bool {
        self.pin(fd, reason) || self.come_back(fd, reason, deadline, Rest::Taken)
    }

    /// As [`Self::send_by_kernel`], because this side of an `AF_UNIX` connection, which has left its socket, is about to tell the kernel
    /// that it reads no more: that wakes whoever sleeps. What has come and is unread stays where the peer can see it if nobody does.
    #[cold]
    pub fn refuse_by_kernel(&self, fd: i32, deadline: Instant) -> bool {
        let Some(segment) = self.segment() else { return false };
        let sleeps = segment.incoming().data_armed.0.has_sleepers();
        // What is before bells would have to be moved.
        let moves = !waiting::looks_settled(&self.socket(fd, segment)) && self.unread_bells(segment) > 0;
        let rest = if sleeps { Rest::TakenFromSleepers } else { Rest::Aside };
        (sleeps || !moves)
            && self.has_little_unread()
            && self.come_back(fd, Reason::ShutdownBeforeUpgrade, deadline, rest)
    }

    fn come_back(&self, fd: i32, reason: Reason, deadline: Instant, rest: Rest) -> bool {
        let _uninterrupted = Uninterrupted::begin();
        let Some(segment) = self.segment() else { return false };
        let Ok(_receiving) = self.lock_receiving(fd) else { return false };
        let _ = self.mend_locked(fd, segment);
        // Also waits for a thread that is just sending what was in the ring.
        let Ok(_sending) = self.lock_sending(fd) else { return false };
        if !segment.is_ready() && (segment.refuse() || !segment.is_ready()) {
            // It has come back, or nothing will ever leave it.
            self.restore_options(fd);
            self.block.note(reason);
            return true;
        }
        if !self.is_closed() && self.go_back_first(fd, segment, deadline, rest) {
            self.block.note(reason);
            // What the peer has promised to send again is there when the program looks next.
            let unread = segment.incoming().used();
            // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
            let socket = unsafe { BorrowedFd::borrow_raw(fd) };
            let is_missing = || tcp::unread(socket).is_ok_and(|there| there < unread);
            self.yield_while(fd, deadline, is_missing);
            if !is_missing() {
                self.refuse_for_good(fd);
            }
        }
        self.block.has(flag::RETURNED)
    }

    /// Waits for what the peer is about to do, in a call of its own.
    fn yield_while(&self, fd: i32, deadline: Instant, lasts: impl Fn() -> bool) {
        while lasts() && Instant::now() < deadline && !self.peer_has_closed(fd) {
            rustix::thread::sched_yield();
        }
    }

    /// Whether the peer has room for writes on an `AF_UNIX` socket, also once what this side has not read is no longer in the ring:
    /// until a quarter of the kernel's usual buffer is full (`unix_writable`).
    fn has_little_unread(&self) -> bool {
        const LITTLE: u64 = 50 << 10;
        self.segment().is_some_and(|segment| {
            let incoming = segment.incoming();
            // Who sleeps though there is all the room is about to be woken.
            incoming.used() <= LITTLE && (incoming.is_empty() || !incoming.space_armed.0.has_sleepers())
        })
    }

    #[cold]
    fn hand_back(&self, fd: i32, reason: Reason, deadline: Instant) -> bool {
        let _uninterrupted = Uninterrupted::begin();
        let Some(segment) = self.segment() else { return false };
        let Ok(_receiving) = self.lock_receiving(fd) else { return false };
        let _ = self.mend_locked(fd, segment);
        if self.block.state() != State::Active || self.is_closed() {
            return false;
        }
        if !self.block.has(flag::RETURNED) {
            let left = match segment.link() {
                Some(link) => self.go_back_for_good(fd, segment, link, deadline),
                None => {
                    let Ok(_sending) = self.lock_sending(fd) else { return false };
                    self.go_back_first(fd, segment, deadline, Rest::Kernel)
                }
            };
            if !left {
                return false;
            }
            self.block.note(reason);
            if segment.link().is_none() {
                // As above. The ring is empty once the peer has sent it all.
                self.yield_while(fd, deadline, || !segment.incoming().is_empty());
                if segment.incoming().is_empty() {
                    self.refuse_for_good(fd);
                }
            }
        }
        if self.block.has(flag::OWES_DOWN) {
            let Ok(_sending) = self.lock_sending(fd) else { return false };
            self.pay_down(fd, segment);
        }
        if segment.link().is_some() {
            self.await_down(fd, segment, Unread::ComesAgain, deadline);
            self.restore_options(fd);
        }
        if self.side_length() == 0 {
            // The peer's last bells may have been counted, and not yet sent.
            self.yield_while(fd, deadline, || self.block.has(flag::BELLS_FIRST) && !self.greet(fd, segment));
        }
        // What is in the side buffer only a hook can give to the application.
        self.side_length() == 0 && self.greet(fd, segment) && !self.block.has(flag::BELLS_FIRST)
    }

    /// Leaves the fabric, if nothing will be missing on TCP once the peer has answered. The caller holds the receive lock.
    fn go_back_for_good(&self, fd: i32, segment: &Segment, link: &Link, deadline: Instant) -> bool {
        let incoming = segment.incoming();
        if !self.await_switch(fd, segment, link, deadline) {
            return false;
        }
        let Ok(_sending) = self.lock_sending(fd) else { return false };
        // What precedes the ring the kernel could not give back.
        if self.side_length() > 0 || !waiting::is_settled(&self.socket(fd, segment)) {
            return false;
        }
        // To the byte what the peer has not read.
        let gone = self.has_gone(fd, segment)
            || !self.depart(segment, link, || tcp::peer_has_closed(fd))
            || self.has_gone(fd, segment);
        let (unread, unsent) = (incoming.used(), segment.outgoing().used() + DOWN_BYTES as u64);
        let can_be_sent_again = if gone {
            // It sends nothing again.
            unread == 0
        } else {
            self.make_fit(fd, unsent);
            // The peer must not be blocked, nor this side.
            self.fits(fd, unsent) && has_room(fd, unread)
        };
        if !can_be_sent_again {
            self.block.lower(flag::HAD_ALL);
            link.stay();
            return false;
        }
        if link.is_usable() && !link.is_frozen() {
            self.go_back_locked(fd, segment, link);
        }
        self.block.has(flag::RETURNED)
    }
}

/// Waits until something can be read. False once the deadline has passed.
pub(crate) fn wait_until(fd: i32, deadline: Instant) -> bool {
    let left = deadline.saturating_duration_since(Instant::now());
    !left.is_zero() && wait_for(fd, rustix::event::PollFlags::IN, Some(left))
}

/// Waits a moment for what no event tells of.
pub(crate) fn nap() {
    let _ = rustix::thread::nanosleep(&Timespec { tv_sec: 0, tv_nsec: 1_000_000 });
}

/// Waits for a lock until `deadline`: a fork may have left it as that of a thread that there is not.
pub(crate) fn lock_until<T>(lock: &Mutex<T>, deadline: Instant) -> Option<MutexGuard<'_, T>> {
    loop {
        match lock.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => nap(),
            Err(_) => return None,
        }
    }
}

/// Whether the kernel can hold `bytes` that nobody reads yet.
fn has_room(fd: i32, bytes: u64) -> bool {
    // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let buffer = sockopt::socket_recv_buffer_size(socket).unwrap_or(0) as u64;
    bytes <= buffer / BUFFER_PER_BYTE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_waited_for_but_not_for_long() {
        let lock = Mutex::new(0);
        let (begun, has_begun) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut number = lock.lock().unwrap();
                begun.send(()).unwrap();
                std::thread::sleep(Duration::from_millis(50));
                *number = 1;
            });
            has_begun.recv().unwrap();
            let guard = lock_until(&lock, Instant::now() + Duration::from_secs(10)).unwrap();
            assert_eq!(*guard, 1);
            assert!(lock_until(&lock, Instant::now()).is_none());
        });
    }
}

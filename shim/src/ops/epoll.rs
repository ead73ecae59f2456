//! epoll(7) over sets that hold connections of ours, with the program's own `epoll_data`.
//!
//! A registration is *cold* or *hot*. Cold: armed for good, so that the peer rings for the first bytes and the kernel
//! reports the set; costs nothing while idle. Hot: had traffic lately; each wait looks at its ring in memory, and
//! arms it only while it sleeps. A wait thus costs in proportion to the hot ones. While a thread sleeps on the set,
//! what another thread adds or changes is armed at once ([`members::Members::settle`]).
//!
//! ```text
//!   Plain ── became_active ──► cold ── its bell rang ──► hot ── no traffic for IDLE_SLEEPS sleeps, ──► cold
//!                                                               or, among many, for many waits
//! ```
//!
//! While a registration is hot and nobody sleeps on the set, changes to it stay in memory: the kernel learns of them
//! before the next sleep (programs that add and remove a descriptor for each request are common).
//!
//! The kernel's registration of an upgraded connection asks for what wakes, not for what the program
//! asked; level, edge and one-shot triggering are made here. A set that is itself waited for (by poll, or in
//! another set) is *nested*: all of its registrations stay cold, so that the kernel alone can tell its readiness.

mod ear;
mod early;
mod graves;
mod kicker;
mod member;
mod members;
mod reports;
mod set;
mod strangers;
mod waiting;

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

use libc::epoll_event;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use thallus_transport::arena::State;
use thallus_transport::process;
use thallus_transport::reason::Reason;
use thallus_transport::search::Waits;

pub(crate) use self::early::{closed_young, connects, grown_up, unwatched};
use self::member::{EXCLUSIVE, Member};
use self::members::Members;
use self::set::memberships;
pub(crate) use self::set::{Quiet, Set, quiesce};
pub(crate) use self::waiting::wait;
use crate::table::{self, Call, Slot};
use crate::{errno, real};

/// What a registration with [`EXCLUSIVE`] may ask for (`EPOLLEXCLUSIVE_OK_BITS` of fs/eventpoll.c).
const BESIDE_EXCLUSIVE: u32 = EXCLUSIVE
    | (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLERR | libc::EPOLLHUP | libc::EPOLLWAKEUP | libc::EPOLLET)
        as u32;

/// The descriptors of this module, which may be a parent's.
pub(crate) fn internal_fds() -> impl Iterator<Item = i32> {
    [ear::internal_fd(), kicker::internal_fd()].into_iter().flatten()
}

/// The program made an epoll set.
pub(crate) fn created(epfd: i32) {
    if epfd >= 0 && crate::config::enabled() && !table::is_borrowed() {
        errno::keep(|| table::add_epoll_set(epfd, false));
    }
}

/// Whether the kernel takes `fd` for an epoll set.
pub(crate) fn is_epoll(fd: i32) -> bool {
    let Ok(stranger) = eventfd(0, EventfdFlags::CLOEXEC) else { return table::is_unknown(fd) };
    // SAFETY: deletion takes no event. What is in no set is told from what is no set (epoll_ctl(2), ENOENT and EINVAL).
    let deleted =
        unsafe { real::epoll_ctl(fd, libc::EPOLL_CTL_DEL, stranger.as_raw_fd(), std::ptr::null_mut()) };
    deleted < 0 && errno::now() == Errno::NOENT
}

/// `epoll_ctl(2)` on the set `epfd`.
///
/// # Safety
/// `event` is null or readable.
pub(crate) unsafe fn control(epfd: i32, operation: i32, fd: i32, event: *mut epoll_event) -> i32 {
    // SAFETY: the program's own arguments.
    let kernel = |event: *mut epoll_event| unsafe { real::epoll_ctl(epfd, operation, fd, event) };
    if let Some(inner) = table::epoll_set(fd) {
        errno::keep(|| inner.nest());
    }
    // SAFETY: null or readable, as the caller says.
    let wanted = unsafe { event.as_ref() }.map(|event| (event.events, event.u64));
    if let Some(result) = early::control_young(epfd, operation, fd, wanted, kernel) {
        return result;
    }
    let ours = if table::released(fd).is_some() { None } else { table::enter(fd) };
    let Some(call) = ours else {
        return if early::may_connect(fd) {
            early::control(epfd, operation, fd, wanted, kernel)
        } else if let Some(set) = table::epoll_set(epfd) {
            set.control_stranger(operation, fd, wanted, || kernel(event))
        } else {
            kernel(event)
        };
    };
    if operation == libc::EPOLL_CTL_ADD
        && let Some((events, _)) = wanted
        && events & EXCLUSIVE != 0
    {
        if events & !BESIDE_EXCLUSIVE != 0 {
            // The kernel refuses it, whatever the descriptor.
            return kernel(event);
        }
        call.connection().pin(fd, Reason::Exclusive);
    }
    let set = match (table::epoll_set(epfd), operation) {
        (Some(set), _) => set,
        (None, libc::EPOLL_CTL_ADD) => match table::discover_epoll_set(epfd) {
            Some(set) => set,
            None => return kernel(event),
        },
        (None, _) => return kernel(event),
    };
    let Some(mut members) = set.lock() else {
        set.becomes_opaque();
        return kernel(event);
    };
    members.meet(set, fd, call.slot);
    if call.connection().block.state() == State::Pinned && members.abandon(set, fd) {
        return members.control_stranger(set, operation, fd, wanted, || kernel(event));
    }
    if let Some(result) = members.change_in_memory(set, operation, fd, wanted) {
        return errno::int(result.map(|()| 0));
    }
    match operation {
        libc::EPOLL_CTL_ADD => members.add(set, &call, fd, wanted, kernel),
        libc::EPOLL_CTL_MOD => members.modify(set, fd, wanted, kernel),
        _ => {
            let result = kernel(event);
            if result == 0 && operation == libc::EPOLL_CTL_DEL {
                errno::keep(|| members.remove(set, fd));
            }
            result
        }
    }
}

impl Members {
    /// Applies a change to a hot registration in memory alone. `None` if the kernel has to know at once.
    fn change_in_memory(
        &mut self,
        set: &'static Set,
        operation: i32,
        fd: i32,
        wanted: Option<(u32, u64)>,
    ) -> Option<Result<(), Errno>> {
        let awake = set.is_awake();
        let member = self.by_fd.get_mut(&fd)?;
        // Of what is still on TCP only the kernel can tell once more.
        if !awake || !member.hot || !member.connection().recv_settled() {
            if member.deleted {
                self.sync(set, fd);
            }
            return None;
        }
        match (operation, wanted) {
            // Bad arguments come first, and are the kernel's to find.
            (libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD, None) => return None,
            (libc::EPOLL_CTL_ADD, _) if !member.deleted => return Some(Err(Errno::EXIST)),
            (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, _) if member.deleted => {
                return Some(Err(Errno::NOENT));
            }
            (libc::EPOLL_CTL_DEL, _) => member.deleted = true,
            (libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD, Some((events, data))) if events & EXCLUSIVE == 0 => {
                member.ask(events, data);
            }
            _ => {
                if member.deleted {
                    self.sync(set, fd);
                }
                return None;
            }
        }
        Some(Ok(()))
    }

    fn add(
        &mut self,
        set: &'static Set,
        call: &Call,
        fd: i32,
        wanted: Option<(u32, u64)>,
        kernel: impl Fn(*mut epoll_event) -> i32,
    ) -> i32 {
        let Some((events, data)) = wanted else { return kernel(std::ptr::null_mut()) };
        let active = call.connection().is_active();
        let events = if active { events & !EXCLUSIVE } else { events };
        let mut member = Member::new(call.slot, fd, events, data, active);
        member.kernel.0 = member.kernel_mask(set.nested.load(Ordering::SeqCst));
        let mut ours = epoll_event { events: member.kernel.0, u64: data };
        // Under the lock, so that a wait beside us never meets a report that it cannot place.
        let result = kernel(&raw mut ours);
        if result == 0 {
            errno::keep(|| {
                self.take_in(set, fd, member);
                self.settle(set, fd);
            });
        }
        result
    }

    fn modify(
        &mut self,
        set: &'static Set,
        fd: i32,
        wanted: Option<(u32, u64)>,
        kernel: impl Fn(*mut epoll_event) -> i32,
    ) -> i32 {
        let Some((events, data)) = wanted else { return kernel(std::ptr::null_mut()) };
        let mut plain = epoll_event { events, u64: data };
        let active = self.by_fd.get(&fd).is_some_and(|member| member.active);
        if !active {
            let result = kernel(&raw mut plain);
            if result == 0 {
                errno::keep(|| self.changed(set, fd, events, data));
            }
            return result;
        }
        if events & EXCLUSIVE != 0 {
            return errno::int(Err(Errno::INVAL));
        }
        errno::keep(|| {
            if let Some(member) = self.by_fd.get_mut(&fd) {
                member.ask(events, data);
                member.is_stale |= !member.connection().recv_settled();
            }
            self.settle(set, fd);
            self.sync(set, fd);
        });
        0
    }
}

/// How this process waits for the connection of this slot by epoll sets.
pub(crate) fn waits(slot: &'static Slot) -> Waits {
    match memberships(slot) {
        Some(all) if all.iter().any(|(set, _)| set.is_awaited()) => Waits::Seen,
        Some(all) if all.is_empty() => Waits::None,
        _ => Waits::Registered,
    }
}

/// A connection of this slot left TCP.
pub(crate) fn became_active(slot: &'static Slot) {
    for (set, fd) in memberships(slot).unwrap_or_default() {
        let Some(mut members) = set.lock() else { continue };
        let Some(fd) = members.key_of(fd, slot) else { continue };
        let told = members.has_told(set, fd);
        let (left, looks) = (members.may_tell_of_room(set, fd), members.graves.looks());
        let Some(member) = members.by_fd.get_mut(&fd) else { continue };
        if !member.active {
            member.became_active(told, left, looks);
            set.active.fetch_add(1, Ordering::SeqCst);
            members.settle(set, fd);
            members.sync(set, fd);
        }
    }
}

/// The connection of this slot stays on TCP for good: the kernel alone serves all of its registrations. False if one of them has to be
/// looked after all the same, or none can be changed now.
pub(crate) fn abandon(slot: &'static Slot) -> bool {
    memberships(slot).is_some_and(|all| {
        all.into_iter().all(|(set, fd)| {
            set.lock().is_some_and(|mut members| {
                members.key_of(fd, slot).is_none_or(|key| members.abandon(set, key))
            })
        })
    })
}

/// The connection behind `fd` is about to be the kernel's alone, back on TCP: so are its registrations, with what the program has asked for.
#[cold]
pub(crate) fn hand_over(fd: i32) {
    let Some(call) = table::enter_adult(fd) else { return };
    for (set, fd) in memberships(call.slot).unwrap_or_default() {
        if let Some(mut members) = set.lock()
            && let Some(key) = members.key_of(fd, call.slot)
        {
            members.hand_over(set, key);
        }
    }
}

/// The kernel reports this slot's connection although it has no longer anything to read.
#[cold]
pub(crate) fn calm(slot: &'static Slot) {
    slot.kicked.store(false, Ordering::Relaxed);
    stalled(slot);
}

/// A write on a connection of this slot did not fit: whoever waits for space must be rung for.
pub(crate) fn stalled(slot: &'static Slot) {
    for (set, fd) in memberships(slot).unwrap_or_default() {
        if let Some(mut members) = set.lock()
            && let Some(fd) = members.key_of(fd, slot)
            && members.by_fd.get(&fd).is_some_and(|member| member.active)
        {
            members.settle(set, fd);
        }
    }
}

/// The descriptor `fd` of this slot's connection is being closed, and is still `open`. What the program has taken out of a set
/// in memory alone leaves it now: until the kernel has closed the socket, or for as long as it has other descriptors, it would go
/// on reporting what nobody would know any more. So does a one-shot registration that has been reported: whatever its mask is, the
/// kernel tells of a hang-up. But one that was made before this process was forked is its parent's, as long as that has the connection.
/// False if that can't be done now, because a signal handler closes it.
fn taken_out(slot: &'static Slot, fd: i32, open: bool, last: bool) -> bool {
    let Some(all) = memberships(slot) else { return false };
    for (set, _) in all.into_iter().filter(|&(_, as_fd)| open && as_fd == fd) {
        let Some(mut members) = set.lock() else { return false };
        if let Some(member) = members.by_fd.get_mut(&fd).filter(|member| std::ptr::eq(member.slot, slot)) {
            let is_own = || !member.inherited || member.connection().block.held_only_by(process::id());
            member.deleted |= last && member.active && member.spent && is_own();
            if member.deleted {
                members.sync(set, fd);
            }
        }
    }
    true
}

/// The last descriptor, `fd`, of this slot's connection is being closed. False if that can't be noted now, because a
/// signal handler closes it: then the slot must never be used again.
pub(crate) fn closed(slot: &'static Slot, fd: i32, open: bool) -> bool {
    if !taken_out(slot, fd, open, true) {
        return false;
    }
    let Some(all) = memberships(slot) else { return false };
    for (set, fd) in all {
        let Some(mut members) = set.lock() else { return false };
        if let Some(key) = members.key_of(fd, slot) {
            members.remove(set, key);
        }
    }
    true
}

/// `fd` is being closed, but the connection lives on as `other`: so does the kernel's registration.
pub(crate) fn renamed(slot: &'static Slot, fd: i32, other: i32, open: bool) {
    taken_out(slot, fd, open, false);
    for (set, as_fd) in memberships(slot).unwrap_or_default() {
        if let Some(mut members) = set.lock()
            && let Some(key) = members.key_of(as_fd, slot)
            && let Some(member) = members.by_fd.get_mut(&key)
            && member.io == fd
        {
            member.io = other;
        }
    }
}

impl Set {
    /// The set is waited for from outside: the kernel must be able to tell whether it is ready.
    pub(crate) fn nest(&'static self) {
        if self.nested.swap(true, Ordering::SeqCst) {
            return;
        }
        let Some(mut members) = self.lock() else { return };
        let fds: Vec<i32> = members.by_fd.keys().copied().collect();
        for fd in fds {
            members.settle(self, fd);
        }
    }
}

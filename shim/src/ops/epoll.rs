//! epoll(7) over sets that hold connections of ours, with the program's own `epoll_data`.
//!
//! A registration is *cold* or *hot*. Cold: armed for good, so that the peer rings for the first bytes and the kernel
//! reports the set; costs nothing while idle. Hot: had traffic lately; each wait looks at its ring in memory, and
//! arms it only while it sleeps. A wait thus costs in proportion to the hot ones. While a thread sleeps on the set,
//! what another thread adds or changes is armed at once ([`set::Members::settle`]).
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

mod early;
mod member;
mod set;
mod strangers;

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libc::{epoll_event, sigset_t};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use smallvec::SmallVec;
use thallus_transport::arena::State;
use thallus_transport::connection::Waits;
use thallus_transport::ready::bit;
use thallus_transport::reason::Reason;
use thallus_transport::spin::{Spin, spin_for};

pub(crate) use self::early::{closed_young, connects, grown_up, unwatched};
use self::member::{EXCLUSIVE, Member, ONESHOT};
use self::set::{Members, SLEEPING, memberships};
pub(crate) use self::set::{Quiet, Set, quiesce};
use crate::cancel::point;
use crate::ops::poll::{Glances, remaining, to_timespec};
use crate::table::{self, Call, Slot};
use crate::{errno, real};

/// Sleeps without traffic after which a registration turns cold.
const IDLE_SLEEPS: u8 = 8;
/// Hot registrations that are no burden.
const FEW: usize = 64;
/// Looks in vain at so many hot registrations after which one turns cold: they have cost about as much as the bell that will
/// announce its next bytes. The more there are the dearer is each look, because caches hold fewer; but never less than the
/// second.
const VAIN_LOOKS: [usize; 2] = [512 * FEW, 16];
/// The part of the hot registrations that turns cold in one wait, at most: each may take a system call.
const COOLED_AT_ONCE: usize = 16;
/// Waits that memory alone answers between two looks at the kernel's own descriptors.
const MEMORY_ONLY: u32 = 8;
/// Reports on connections of ours that such a look passes over, at most, in search of others.
const PASSED_OVER: u32 = 64;

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
    if operation == libc::EPOLL_CTL_ADD && wanted.is_some_and(|(events, _)| events & EXCLUSIVE != 0) {
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
    if call.connection().block.state() == State::Pinned && members.abandon(set, fd) {
        return members.control_stranger(operation, fd, wanted, || kernel(event));
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
            (libc::EPOLL_CTL_ADD, _) if !member.deleted => return Some(Err(Errno::EXIST)),
            (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, _) if member.deleted => {
                return Some(Err(Errno::NOENT));
            }
            (libc::EPOLL_CTL_DEL, _) => member.deleted = true,
            (libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD, Some((events, data))) if events & EXCLUSIVE == 0 => {
                member.ask(events, data);
            }
            _ => return None,
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
        let Some(member) = members.by_fd.get_mut(&fd) else { continue };
        if !member.active {
            member.became_active();
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
        all.into_iter().all(|(set, fd)| set.lock().is_some_and(|mut members| members.abandon(set, fd)))
    })
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
            && members.by_fd.get(&fd).is_some_and(|member| member.active)
        {
            members.settle(set, fd);
        }
    }
}

/// The descriptor `fd` of this slot's connection is being closed, and is still `open`. What the program has taken out of a set
/// in memory alone leaves it now: until the kernel has closed the socket, or for as long as it has other descriptors, it would go
/// on reporting what nobody would know any more. False if that can't be done now, because a signal handler closes it.
fn taken_out(slot: &'static Slot, fd: i32, open: bool) -> bool {
    let Some(all) = memberships(slot) else { return false };
    for (set, _) in all.into_iter().filter(|&(_, as_fd)| open && as_fd == fd) {
        let Some(mut members) = set.lock() else { return false };
        if members.by_fd.get(&fd).is_some_and(|member| member.deleted) {
            members.sync(set, fd);
        }
    }
    true
}

/// The last descriptor, `fd`, of this slot's connection is being closed. False if that can't be noted now, because a
/// signal handler closes it: then the slot must never be used again.
pub(crate) fn closed(slot: &'static Slot, fd: i32, open: bool) -> bool {
    if !taken_out(slot, fd, open) {
        return false;
    }
    let Some(all) = memberships(slot) else { return false };
    for (set, fd) in all {
        let Some(mut members) = set.lock() else { return false };
        members.remove(set, fd);
    }
    true
}

/// `fd` is being closed, but the connection lives on as `other`: so does the kernel's registration.
pub(crate) fn renamed(slot: &'static Slot, fd: i32, other: i32, open: bool) {
    taken_out(slot, fd, open);
    for (set, as_fd) in memberships(slot).unwrap_or_default() {
        if let Some(mut members) = set.lock()
            && let Some(member) = members.by_fd.get_mut(&as_fd)
            && member.io == fd
        {
            member.io = other;
        }
    }
}

/// `epoll_wait(2)` and its relatives on `set`, whose descriptor is `epfd`; `original` is libc's, with all of these arguments.
pub(crate) fn wait(
    set: &'static Set,
    epfd: i32,
    events: &mut [epoll_event],
    timeout: Option<Duration>,
    mask: *const sigset_t,
    original: impl FnOnce() -> i32,
) -> Result<i32, Errno> {
    let count = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    if !set.awaited.load(Ordering::Relaxed) {
        set.begin_to_wait();
    }
    if set.active.load(Ordering::SeqCst) > 0 {
        return set.wait(epfd, events, timeout, mask).map(count);
    }
    let begun = timeout.is_some_and(|timeout| !timeout.is_zero()).then(coarse_now);
    let (mut left, mut original) = (timeout, Some(original));
    let mut ask = |events: &mut [epoll_event], left| match original.take() {
        Some(original) => outcome(point(original)),
        None => kernel(epfd, events, left, mask),
    };
    loop {
        // A connection that another thread adds, or that leaves TCP, while this thread sleeps is armed at
        // once, because the thread is counted: its bell ends the sleep, and the report is sorted out here.
        let (got, kept) = if let Some(turns) = set.rest() {
            let got = ask(events, left);
            let plain = set.is_undisturbed(turns);
            let kept = got.map(|got| if plain { got } else { set.sort_out(events, got, false).0 });
            set.rises();
            (got, kept)
        } else {
            let Some(look) = set.begins_to_sleep() else {
                return set.wait(epfd, events, left, mask).map(count);
            };
            let got = ask(events, left);
            let (look, plain) = set.woke(look);
            let kept = got.map(|got| if plain { got } else { set.sort_out(events, got, false).0 });
            set.looked(look);
            (got, kept)
        };
        match (got, kept) {
            (Ok(got), Ok(0)) if got > 0 => {}
            (_, kept) => return kept.map(count),
        }
        // Rather too late by a tick than too early, which a wait never is.
        left = timeout.zip(begun).map_or(timeout, |(timeout, begun)| {
            Some(timeout.saturating_add(TICK).saturating_sub(coarse_now().saturating_sub(begun)).min(timeout))
        });
    }
}

/// The longest time between two ticks of the clock of [`coarse_now`] (`CONFIG_HZ=100`).
const TICK: Duration = Duration::from_millis(10);

/// The time as of the last tick: some nanoseconds instead of some tens. Enough for a wait that nearly always ends with the
/// kernel's first answer.
fn coarse_now() -> Duration {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    Duration::new(now.tv_sec.cast_unsigned(), now.tv_nsec.cast_unsigned() as u32)
}

/// When a wait of `timeout` that begins now ends; `None` if it does not, or does not wait at all.
fn deadline_of(timeout: Option<Duration>) -> Option<Instant> {
    timeout.filter(|timeout| !timeout.is_zero()).and_then(|timeout| Instant::now().checked_add(timeout))
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

    fn wait(
        &'static self,
        epfd: i32,
        events: &mut [epoll_event],
        timeout: Option<Duration>,
        mask: *const sigset_t,
    ) -> Result<usize, Errno> {
        let mut begun = None;
        loop {
            let round = self.rounds.fetch_add(1, Ordering::Relaxed);
            // The kernel's own descriptors come first now and then, or busy rings would hide them. Not by the rounds: a wait
            // may take two, and with an odd number every time.
            let asked = self.waits.fetch_add(1, Ordering::Relaxed).is_multiple_of(MEMORY_ONLY);
            let have = if asked { self.glance(epfd, events)?.0 } else { 0 };
            let ready = have + self.collect(&mut events[have..], round, false);
            if ready > 0 {
                return Ok(ready);
            }
            if timeout == Some(Duration::ZERO) {
                let (have, anything) = if asked { (0, false) } else { self.glance(epfd, events)? };
                // What memory shows is news only if the kernel had something to say.
                let more = if anything { self.collect(&mut events[have..], round, false) } else { 0 };
                return Ok(have + more);
            }
            // Not before it is needed: most waits of a busy loop end above.
            let deadline = *begun.get_or_insert_with(|| deadline_of(timeout));
            let (spin, count) = self.spin(epfd, events, remaining(deadline))?;
            if count > 0 {
                return Ok(count);
            }
            let (count, own) = self.sleep(epfd, events, remaining(deadline), mask)?;
            if count > 0 {
                self.patience.ended(own == 0);
            }
            self.patience.learn(spin);
            if count > 0 || remaining(deadline) == Some(Duration::ZERO) {
                return Ok(count);
            }
        }
    }

    /// Reports what the rings of the hot registrations show, except what round `round` has reported already. `spun`: a spin
    /// has found it.
    fn collect(&'static self, events: &mut [epoll_event], round: u32, spun: bool) -> usize {
        let Some(mut members) = self.lock() else { return 0 };
        let mut count = 0;
        let (mut spent, mut idle) = (Vec::new(), SmallVec::<[usize; 16]>::new());
        let Members { by_fd, hot, .. } = &mut *members;
        let many = hot.len() > FEW;
        let enough = (VAIN_LOOKS[0] / hot.len().max(1)).max(VAIN_LOOKS[1]);
        let most = hot.len().div_ceil(COOLED_AT_ONCE);
        let mut looked_at = hot.len();
        for (index, &fd) in hot.iter().enumerate() {
            if count == events.len() {
                looked_at = index;
                break;
            }
            let Some(member) = by_fd.get_mut(&fd).filter(|member| member.round != round) else { continue };
            let bits = member.report(0, round);
            if bits != 0 {
                events[count] = epoll_event { events: bits, u64: member.data };
                count += 1;
                if spun {
                    member.connection().block.spin_hits.fetch_add(1, Ordering::Relaxed);
                }
                if member.spent {
                    spent.push(fd);
                }
            } else if many && member.has_idled(enough) && idle.len() < most {
                idle.push(index);
            }
        }
        // From behind, so that the numbers of the others stay.
        for index in idle.into_iter().rev() {
            let fd = members.hot.swap_remove(index);
            if members.sync(self, fd) && !members.cool(fd) {
                members.hot.push(fd);
            }
        }
        // Whoever was not reached comes first next time.
        let looked_at = looked_at.min(members.hot.len());
        members.hot.rotate_left(looked_at);
        for fd in spent {
            members.sync(self, fd);
        }
        count
    }

    /// Whether a hot registration has something to report.
    fn stirs(&'static self) -> bool {
        self.lock().is_none_or(|members| members.any_due(members.hot.iter()))
    }

    /// Whether one of some hot registrations has, of others at each look: so that looks are short.
    fn some_stir(&'static self) -> bool {
        self.lock().is_none_or(|members| {
            let hot = &members.hot;
            if hot.len() <= FEW {
                return members.any_due(hot.iter());
            }
            let (behind, before) = hot.split_at(self.looked_at.fetch_add(FEW, Ordering::Relaxed) % hot.len());
            members.any_due(before.iter().chain(behind).take(FEW))
        })
    }

    /// What the kernel reports at once, but for what memory shows of connections that are hot: [`Self::collect`] finds that,
    /// and it must not hide the kernel's own descriptors from who takes few events at a time. Also whether the kernel
    /// reported anything.
    fn glance(&'static self, epfd: i32, events: &mut [epoll_event]) -> Result<(usize, bool), Errno> {
        let look = self.looks();
        let mut turns = self.active.load(Ordering::Relaxed).min(PASSED_OVER);
        let mut anything = false;
        let kept = loop {
            let got = match kernel(epfd, events, Some(Duration::ZERO), std::ptr::null()) {
                Ok(got) => got,
                Err(errno) => break Err(errno),
            };
            anything |= got > 0;
            let (kept, _) = self.sort_out(events, got, self.is_awake());
            if kept > 0 || got < events.len() || turns == 0 {
                break Ok((kept, anything));
            }
            turns -= 1;
        };
        self.looked(look);
        kept
    }

    fn spin(
        &'static self,
        epfd: i32,
        events: &mut [epoll_event],
        limit: Option<Duration>,
    ) -> Result<(Spin, usize), Errno> {
        let budget = self.patience.allowance_ns();
        if budget == 0 || self.lock().is_none_or(|members| members.hot.is_empty()) {
            return Ok((Spin::Vain(Instant::now()), 0));
        }
        let (mut found, mut glances) = (Ok(0), Glances::default());
        let spin = spin_for(budget, limit, |others_ran| {
            if self.some_stir() {
                return true;
            }
            if glances.are_due(others_ran) {
                found = self.glance(epfd, events).map(|(kept, _)| kept);
                return found != Ok(0);
            }
            false
        });
        let mut count = found?;
        if spin == Spin::Done {
            self.patience.ended(count > 0);
        }
        if spin == Spin::Done && count == 0 {
            self.patience.restore();
            count = self.collect(events, self.rounds.fetch_add(1, Ordering::Relaxed), true);
        }
        Ok((spin, count))
    }

    fn sleep(
        &'static self,
        epfd: i32,
        events: &mut [epoll_event],
        timeout: Option<Duration>,
        mask: *const sigset_t,
    ) -> Result<(usize, usize), Errno> {
        let (armed, ready) = self.arm();
        let look = self.looks();
        let result = if ready || self.stirs() { Ok(0) } else { kernel(epfd, events, timeout, mask) };
        let woken = self.lock();
        self.sleepers.fetch_sub(SLEEPING, Ordering::SeqCst);
        drop(woken);
        for (call, writes) in armed {
            call.connection().disarm_cold(writes);
        }
        let kept = result.map(|count| self.sort_out(events, count, false));
        self.looked(look);
        kept
    }

    /// Counts a sleeper in, tells the kernel what it does not know yet, and arms the hot registrations; those that
    /// have been idle for long turn cold. True if one of these has become ready meanwhile.
    fn arm(&'static self) -> (Vec<(Call, bool)>, bool) {
        let Some(mut members) = self.lock() else {
            self.sleepers.fetch_add(SLEEPING, Ordering::SeqCst);
            return (Vec::new(), true);
        };
        self.sleepers.fetch_add(SLEEPING, Ordering::SeqCst);
        let mut armed = Vec::with_capacity(members.hot.len());
        let mut ready = false;
        let mut hot = std::mem::take(&mut members.hot);
        hot.retain(|&fd| {
            if !members.sync(self, fd) {
                return false;
            }
            let idle = members.by_fd.get(&fd).is_some_and(|member| member.idle_sleeps >= IDLE_SLEEPS);
            if idle {
                if members.cool(fd) {
                    return false;
                }
                ready = true;
            }
            let Some(member) = members.by_fd.get_mut(&fd) else { return false };
            member.idle_sleeps += 1;
            let writes = member.lacks_space();
            member.connection().arm_cold(member.io, writes);
            member.connection().block.sleeps.fetch_add(1, Ordering::Relaxed);
            armed.push((member.slot.join(), writes));
            true
        });
        members.hot = hot;
        members.trim();
        (armed, ready)
    }

    /// Sorts out what the kernel reported at `events[..count]`: reports on upgraded connections become what the
    /// program would see, all others stay. If `later`, what memory shows as well is left to it. Returns how many are left, and
    /// how many of these are on upgraded connections.
    fn sort_out(&'static self, events: &mut [epoll_event], count: usize, later: bool) -> (usize, usize) {
        if count == 0 {
            return (0, 0);
        }
        let round = self.rounds.load(Ordering::Relaxed).wrapping_sub(1);
        let Some(mut members) = self.lock() else { return (count, 0) };
        let (mut kept, mut own) = (0, 0);
        // What one report means beyond its own place, as far as there are places that the kernel has not filled.
        let mut more = SmallVec::<[epoll_event; 1]>::new();
        for index in 0..count {
            let most = 1 + events.len() - count - more.len();
            let mut told = members.translate(self, events[index], round, later, most).into_iter();
            if let Some((first, ours)) = told.next() {
                events[kept] = first;
                kept += 1;
                own += usize::from(ours);
            }
            more.extend(told.map(|(event, _)| event));
        }
        own += more.len();
        for event in more {
            events[kept] = event;
            kept += 1;
        }
        (kept, own)
    }
}

impl Members {
    fn any_due<'fd>(&self, mut fds: impl Iterator<Item = &'fd i32>) -> bool {
        fds.any(|fd| self.by_fd.get(fd).is_some_and(|member| member.due(0) != 0))
    }

    /// One kernel report in the program's terms, and whether it is on upgraded connections. None if it means nothing to the program;
    /// up to `most`, at least one, if several registrations have its `epoll_data`.
    fn translate(
        &mut self,
        set: &'static Set,
        event: epoll_event,
        round: u32,
        later: bool,
        most: usize,
    ) -> SmallVec<[(epoll_event, bool); 1]> {
        let (data, reported) = (event.u64, event.events);
        let mut told = SmallVec::new();
        let mut stranger = true;
        let named = self.named(data);
        let only = named.len() == 1;
        // What is on TCP may have any report.
        let mut known = !named.is_empty();
        for fd in named {
            let Some(member) = self.by_fd.get_mut(&fd) else { continue };
            known &= member.active;
            if !member.active {
                // The kernel has disabled it: known when it leaves TCP.
                member.spent |= only && member.events & ONESHOT != 0;
                continue;
            }
            let connection = member.connection();
            let before = connection.block.drained.load(Ordering::Relaxed);
            // Edges may be asked for without RDHUP: then the end comes as a bell does, and makes no other edge.
            let hidden = reported & bit::IN != 0 && member.kernel.0 & bit::RDHUP == 0;
            let end = if hidden { ready_in_kernel(member.io, PollFlags::RDHUP) } else { 0 };
            let tcp =
                connection.observe(member.io, reported | end) | connection.hangup(reported, member.events);
            let drained = connection.block.drained.load(Ordering::Relaxed) != before;
            let full = told.len() == most;
            if full {
                member.held |= tcp;
            }
            let later = (full || later && tcp == 0) && member.due(0) != 0;
            let mut bits = if full || later { 0 } else { member.report(tcp, round) };
            let nothing = bits == 0 && !full && !later && !drained;
            if nothing && reported & bit::IN != 0 && !set.is_awake() {
                // Others sleep on, or whoever polls the set: it stays cold, and nobody looks again before the next bell.
                connection.overtaken(member.io, member.armed == Some(true));
                bits = member.report(tcp, round);
            }
            if bits != 0 {
                told.push((epoll_event { events: bits, u64: member.data }, true));
            }
            let explained = drained || later || bits != 0 || member.spent || member.deleted || member.kicked;
            if explained || ready_in_kernel(member.io, PollFlags::IN | PollFlags::RDHUP) != 0 {
                stranger = false;
            }
            self.settle(set, fd);
            self.sync(set, fd);
        }
        // Nothing of ours explains the report: another descriptor has the same data, or it is stale.
        if told.is_empty() && stranger && self.is_strange(set, event, known) {
            told.push((event, false));
        }
        told
    }
}

/// Which of `events` the kernel has to report on the socket itself.
fn ready_in_kernel(fd: i32, events: PollFlags) -> u32 {
    // SAFETY: registered by the program, and known not to be closed.
    let fd = unsafe { rustix::fd::BorrowedFd::borrow_raw(fd) };
    let mut poll = [PollFd::from_borrowed_fd(fd, events)];
    match rustix::event::poll(&mut poll, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
        Ok(1..) => u32::from(poll[0].revents().bits()),
        _ => 0,
    }
}

fn kernel(
    epfd: i32,
    events: &mut [epoll_event],
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    let most = i32::try_from(events.len()).unwrap_or(i32::MAX);
    let count = match timeout {
        // SAFETY: the slice is writable, the mask the application's.
        None => point(|| unsafe { real::epoll_pwait(epfd, events.as_mut_ptr(), most, -1, mask) }),
        Some(Duration::ZERO) => {
            // SAFETY: as above.
            point(|| unsafe { real::epoll_pwait(epfd, events.as_mut_ptr(), most, 0, mask) })
        }
        Some(timeout) => {
            let time = to_timespec(timeout);
            // SAFETY: as above, and the time lives.
            let count = point(|| unsafe {
                real::epoll_pwait2(epfd, events.as_mut_ptr(), most, &raw const time, mask)
            });
            if count.is_some_and(|count| count < 0) && errno::now() == Errno::NOSYS {
                let millis = i32::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
                // SAFETY: as above.
                point(|| unsafe { real::epoll_pwait(epfd, events.as_mut_ptr(), most, millis, mask) })
            } else {
                count
            }
        }
    };
    outcome(count)
}

/// What a wait at a [`point`] has returned.
fn outcome(count: Option<i32>) -> Result<usize, Errno> {
    match count {
        None => Err(Errno::CANCELED),
        Some(..0) => Err(errno::now()),
        Some(count) => Ok(count as usize),
    }
}

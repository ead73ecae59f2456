//! Waiting on a set: `epoll_wait(2)` and its relatives. Memory is looked at first, and the kernel's own descriptors now and then; who
//! finds nothing spins where that has paid, and then sleeps in the kernel.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libc::{epoll_event, sigset_t};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use smallvec::SmallVec;
use thallus_transport::arena::returns;
use thallus_transport::arming::{Arming, arm_registrations};
use thallus_transport::arrival;
use thallus_transport::control::Wakes;
use thallus_transport::process;
use thallus_transport::ready::bit;
use thallus_transport::spin::{Spin, no_spin, spin_for};

use super::ear::Ear;
use super::member::Member;
use super::members::Members;
use super::set::{SLEEPING, Set};
use crate::cancel::point;
use crate::ops::poll::{Glances, remaining, to_timespec};
use crate::table::Call;
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
/// Waits that memory alone answers between two looks at the kernel's own descriptors, at most,
const MEMORY_ONLY: u32 = 32;
/// and how long it does, by [`arrival::now`]: some 10 to 20 µs.
const MEMORY_ONLY_FOR: u64 = if cfg!(target_arch = "x86_64") { 40_000 } else { 15_000 };
/// Reports on connections of ours that such a look passes over, at most, in search of others.
const PASSED_OVER: u32 = 64;

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
        let (got, kept) =
            if let Some(turns) = set.rest() {
                let got = ask(events, left);
                let plain = set.is_undisturbed(turns);
                let kept = got.map(|got| {
                    if plain { got } else { set.sort_out(events, got, set.last_round(), false, None).0 }
                });
                set.rises();
                (got, kept)
            } else {
                let Some(look) = set.begins_to_sleep() else {
                    return set.wait(epfd, events, left, mask).map(count);
                };
                let got = ask(events, left);
                let (look, plain) = set.woke(look);
                let kept = got.map(|got| {
                    if plain { got } else { set.sort_out(events, got, set.last_round(), false, look).0 }
                });
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
            // The kernel's own descriptors come first now and then, or busy rings would hide them.
            let asked = self.is_kernels_turn();
            let have = if asked { self.glance(epfd, events, round)?.0 } else { 0 };
            let ready = have + self.collect(&mut events[have..], round, false);
            if ready > have {
                // Where the kernel's own fill all places, it would else be their turn again and again.
                self.note_answer();
            }
            if ready > 0 {
                return Ok(ready);
            }
            if timeout == Some(Duration::ZERO) {
                let (have, anything) = if asked { (0, false) } else { self.glance(epfd, events, round)? };
                // What memory shows is news only if the kernel had something to say, or if nobody will sleep, and make room before.
                let more = if anything || self.makes_room() {
                    self.collect(&mut events[have..], round, false)
                } else {
                    0
                };
                return Ok(have + more);
            }
            // Not before it is needed: most waits of a busy loop end above.
            let deadline = *begun.get_or_insert_with(|| deadline_of(timeout));
            let (spin, count) = self.spin(epfd, events, round, remaining(deadline))?;
            if count > 0 {
                return Ok(count);
            }
            self.answers.store(0, Ordering::Relaxed);
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

    /// Whether memory has answered the last waits, and the kernel has not been asked for a while. Of threads that wait at once both may ask,
    /// and their waits may count as one.
    fn is_kernels_turn(&self) -> bool {
        let answers = self.answers.load(Ordering::Relaxed);
        if answers == 0 {
            // It has been asked, and will be if memory has nothing.
            return false;
        }
        let now = arrival::now();
        let is_due = answers >= MEMORY_ONLY
            || now.wrapping_sub(self.asked_at.load(Ordering::Relaxed)) >= MEMORY_ONLY_FOR;
        if is_due {
            self.asked_at.store(now, Ordering::Relaxed);
            self.answers.store(0, Ordering::Relaxed);
        }
        is_due
    }

    /// Memory has answered a wait.
    fn note_answer(&self) {
        self.answers.store(self.answers.load(Ordering::Relaxed).saturating_add(1), Ordering::Relaxed);
    }

    /// Reports what the rings of the hot registrations show, except what round `round` has reported already, in the order in which it
    /// came. `spun`: a spin has found it.
    fn collect(&'static self, events: &mut [epoll_event], round: u32, spun: bool) -> usize {
        let Some(mut members) = self.lock() else { return 0 };
        let stuck = if members.is_turn_of_stuck() { members.report_stuck(self, events, round) } else { 0 };
        let events = &mut events[stuck..];
        let Members { by_fd, hot, is_crowded, .. } = &mut *members;
        if let &[fd] = hot.as_slice() {
            // There is no order.
            *is_crowded = events.len() < 2;
            let (Some(event), Some(member)) = (events.first_mut(), by_fd.get_mut(&fd)) else {
                return stuck;
            };
            let bits = if member.round == round { 0 } else { member.report(0, round) };
            self.wants_room.store(member.wants_room(), Ordering::Relaxed);
            if bits == 0 {
                return stuck;
            }
            *event = epoll_event { events: bits, u64: member.data };
            if spun {
                member.connection().block.spin_hits.fetch_add(1, Ordering::Relaxed);
            }
            if member.spent {
                members.sync(self, fd);
            }
            return stuck + 1;
        }
        let many = hot.len() > FEW;
        let enough = (VAIN_LOOKS[0] / hot.len().max(1)).max(VAIN_LOOKS[1]);
        let most = hot.len().div_ceil(COOLED_AT_ONCE);
        let mut looked_at = hot.len();
        let mut wants_room = false;
        let mut idle = SmallVec::<[i32; 16]>::new();
        let mut found = Found::new(events, hot.len() > 1, spun);
        if found.events.len() < hot.len() && (found.events.len() == 1 || *is_crowded) {
            // Not all are likely to be reported.
            let is_due = |member: &&Member| member.due(0) != 0;
            hot.sort_by_cached_key(|fd| by_fd.get(fd).filter(is_due).map_or(u64::MAX, Member::turn));
        }
        for (index, &fd) in hot.iter().enumerate() {
            if found.is_full() {
                looked_at = index;
                break;
            }
            let Some(member) = by_fd.get_mut(&fd).filter(|member| member.round != round) else { continue };
            wants_room |= member.wants_room();
            if !found.take(member, fd, index, round) && many && member.has_idled(enough) && idle.len() < most
            {
                idle.push(fd);
            }
        }
        // What came while this thread looked may have come after what has come to a ring at which it had looked before.
        if let Some((latest, place)) = found.latest {
            for (index, &fd) in hot[..place].iter().enumerate() {
                let Some(member) = by_fd.get_mut(&fd).filter(|member| member.round != round) else {
                    continue;
                };
                if !found.is_full() && member.has_come_before(latest) {
                    found.take(member, fd, index, round);
                }
            }
        }
        self.wants_room.store(wants_room, Ordering::Relaxed);
        *is_crowded = found.is_full();
        found.bring_in_order(hot, looked_at);
        let (count, spent) = (found.places.len(), found.spent);
        if !idle.is_empty() {
            hot.retain(|fd| !idle.contains(fd));
        }
        for fd in idle {
            if members.sync(self, fd) && !members.cool(fd) {
                members.hot.push(fd);
            }
        }
        for fd in spent {
            members.sync(self, fd);
        }
        stuck + count
    }

    /// Makes room for who asks for it, if [`Self::collect`] has seen one. Whether any was made.
    fn makes_room(&'static self) -> bool {
        self.wants_room.load(Ordering::Relaxed)
            && self.lock().is_some_and(|members| {
                let lacks = |fd: &&i32| members.by_fd.get(fd).is_some_and(Member::makes_room);
                members.hot.iter().filter(lacks).count() > 0
            })
    }

    /// Tells the kernel what the program asks for of hot registrations whose connections have gone back to TCP, as before a sleep: from then on
    /// it alone knows what there is.
    fn tell_returned(&'static self) {
        let returns = returns();
        if self.returns.load(Ordering::Relaxed) == returns {
            return;
        }
        let Some(mut members) = self.lock() else { return };
        self.returns.store(returns, Ordering::Relaxed);
        let has_returned =
            |fd: &i32| members.by_fd.get(fd).is_some_and(|member| member.connection().has_returned());
        let returned: Vec<i32> = members.hot.iter().copied().filter(has_returned).collect();
        for fd in returned {
            members.sync(self, fd);
        }
    }

    /// Whether a hot registration has something to report.
    fn stirs(&'static self) -> bool {
        self.lock().is_none_or(|members| members.any_due(members.hot.iter().chain(&members.stuck)))
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

    /// What the kernel reports at once, in wait number `round`, but for what memory shows of connections that are hot: [`Self::collect`]
    /// finds that, and it must not hide the kernel's own descriptors from who takes few events at a time. Also whether the kernel
    /// reported anything.
    fn glance(
        &'static self,
        epfd: i32,
        events: &mut [epoll_event],
        round: u32,
    ) -> Result<(usize, bool), Errno> {
        self.tell_returned();
        let look = self.looks();
        let mut turns = self.active.load(Ordering::Relaxed).min(PASSED_OVER);
        let mut anything = false;
        let kept = loop {
            let got = match kernel(epfd, events, Some(Duration::ZERO), std::ptr::null()) {
                Ok(got) => got,
                Err(errno) => break Err(errno),
            };
            anything |= got > 0;
            let (kept, _) = self.sort_out(events, got, round, self.is_awake(), look);
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
        round: u32,
        limit: Option<Duration>,
    ) -> Result<(Spin, usize), Errno> {
        let budget = self.patience.allowance_ns();
        if budget == 0 || self.lock().is_none_or(|members| members.hot.is_empty()) {
            return Ok((no_spin(), 0));
        }
        let (mut found, mut glances) = (Ok(0), Glances::default());
        let spin = spin_for(budget, limit, |others_ran| {
            if self.some_stir() {
                return true;
            }
            if glances.are_due(others_ran) {
                found = self.glance(epfd, events, round).map(|(kept, _)| kept);
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
            if count > 0 {
                self.note_answer();
            }
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
        let ear = if self.nested.load(Ordering::SeqCst) { None } else { Ear::take(self, epfd) };
        let home = process::id();
        let (armed, ready) = self.arm(ear.is_some());
        let ringers = armed.iter().filter(|(_, _, wakes)| *wakes == Wakes::ByChime).count();
        let ear = ear.filter(|_| ringers > 0);
        let look = self.looks();
        let mut heard = false;
        let result = if ready || self.stirs() {
            Ok(0)
        } else if let Some(ear) = &ear {
            ear.sleep(self, epfd, ringers > 1, timeout, mask).and_then(|told| {
                heard = told.ear;
                if told.set { kernel(epfd, events, Some(Duration::ZERO), std::ptr::null()) } else { Ok(0) }
            })
        } else {
            kernel(epfd, events, timeout, mask)
        };
        let several = armed.len() > 1;
        let woken = self.lock();
        self.sleepers.fetch_sub(SLEEPING, Ordering::SeqCst);
        drop(woken);
        for (call, writes, wakes) in armed {
            // A child that a signal handler has made meanwhile has announced nothing.
            if process::id() == home {
                call.connection().disarm_cold(writes, wakes);
            }
        }
        drop(ear);
        let round = self.rounds.fetch_add(1, Ordering::Relaxed);
        // Among several, memory alone knows in which order their bytes came: some may have rung on TCP, and some not.
        let kept = result.map(|count| self.sort_out(events, count, round, several && self.is_awake(), look));
        self.looked(look);
        match kept {
            // What has come just in time is reported, though the time is over by now.
            Ok((kept, own)) if several || heard && kept == 0 => {
                let more = self.collect(&mut events[kept..], round, false);
                Ok((kept + more, own + more))
            }
            kept => kept,
        }
    }

    /// The number of the last look at memory.
    fn last_round(&self) -> u32 {
        self.rounds.load(Ordering::Relaxed).wrapping_sub(1)
    }

    /// Counts a sleeper in, tells the kernel what it does not know yet, and arms the hot registrations; those that
    /// have been idle for long turn cold. True if one of these has become ready meanwhile. The sleeper `listens` for chimes.
    fn arm(&'static self, listens: bool) -> (Vec<(Call, bool, Wakes)>, bool) {
        let Some(mut members) = self.lock() else {
            self.sleepers.fetch_add(SLEEPING, Ordering::SeqCst);
            return (Vec::new(), true);
        };
        self.sleepers.fetch_add(SLEEPING, Ordering::SeqCst);
        let mut armed = Vec::with_capacity(members.hot.len());
        let (mut far, mut ready) = (Vec::new(), false);
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
            let (connection, wakes) = (member.connection(), member.connection().wakes(listens));
            if connection.arms_by_asking() {
                let asked = if writes { bit::WRITE } else { 0 };
                far.push(Arming { connection, fd: member.io, asked, wakes });
            } else {
                connection.arm_cold(member.io, writes, wakes);
            }
            connection.block.sleeps.fetch_add(1, Ordering::Relaxed);
            armed.push((member.slot.join(), writes, wakes));
            true
        });
        members.hot = hot;
        if !far.is_empty() {
            arm_registrations(&far);
        }
        members.trim();
        (armed, ready)
    }
}

/// What a look at memory has found.
#[derive(Debug)]
struct Found<'events> {
    events: &'events mut [epoll_event],
    /// The turn of each event, and its registration's place among the hot.
    places: SmallVec<[(u64, usize); 16]>,
    /// The events are in the order of their turns.
    is_sorted: bool,
    /// Their registrations are neighbours among the hot, in the same order.
    is_run: bool,
    /// When the look began ([`arrival::now`]); 0 if it is at one ring, which has no order.
    begun: u64,
    /// When the last came of those that have come since then, and its place.
    latest: Option<(u64, usize)>,
    /// One-shot registrations.
    spent: SmallVec<[i32; 4]>,
    /// A spin has found it.
    spun: bool,
}

impl<'events> Found<'events> {
    fn new(events: &'events mut [epoll_event], several: bool, spun: bool) -> Self {
        Self {
            events,
            places: SmallVec::new(),
            is_sorted: true,
            is_run: true,
            begun: if several { arrival::now() } else { 0 },
            latest: None,
            spent: SmallVec::new(),
            spun,
        }
    }

    fn is_full(&self) -> bool {
        self.places.len() == self.events.len()
    }

    /// Takes what `member` has to report in wait number `round`, which is registered as `fd` and the hot one at `index`. False if it has
    /// nothing.
    #[inline]
    fn take(&mut self, member: &mut Member, fd: i32, index: usize, round: u32) -> bool {
        let bits = member.report(0, round);
        if bits != 0 {
            self.note(member, fd, index, bits);
        }
        bits != 0
    }

    #[inline(never)]
    fn note(&mut self, member: &mut Member, fd: i32, index: usize, bits: u32) {
        let mut turn = 0;
        if self.begun != 0 {
            turn = member.turn();
            member.reported_at = self.begun;
            if turn > self.begun {
                self.latest = self.latest.max(Some((turn, index)));
            }
            self.is_sorted &= self.places.last().is_none_or(|&(last, _)| last <= turn);
        }
        let count = self.places.len();
        self.is_run &= self.places.last().is_none_or(|&(_, last)| last + 1 == index);
        self.events[count] = epoll_event { events: bits, u64: member.data };
        self.places.push((turn, index));
        if self.spun {
            member.connection().block.spin_hits.fetch_add(1, Ordering::Relaxed);
        }
        if member.spent {
            self.spent.push(fd);
        }
    }

    /// Sorts the events by their turns, and brings to the front of the `hot` registrations who was not reached, behind the first `looked_at`,
    /// and to the end who is reported: in the order in which they are served, and so, most likely, will come again.
    fn bring_in_order(&mut self, hot: &mut Vec<i32>, looked_at: usize) {
        let count = self.places.len();
        let first = self.places.first().map_or(0, |&(_, first)| first);
        if self.is_sorted && self.is_run {
            if first == 0 && (count == looked_at || looked_at == hot.len()) {
                hot.rotate_left(count);
                return;
            }
            if first + count == hot.len() {
                return;
            }
        }
        let mut ordered = SmallVec::<[(u64, usize, epoll_event); 16]>::new();
        ordered.extend(
            self.places.iter().zip(&*self.events).map(|(&(turn, place), &event)| (turn, place, event)),
        );
        ordered.sort_by_key(|&(turn, ..)| turn);
        let order: SmallVec<[i32; 16]> = ordered.iter().map(|&(_, place, _)| hot[place]).collect();
        for (to, &(.., event)) in self.events.iter_mut().zip(&ordered) {
            *to = event;
        }
        self.places.sort_unstable_by_key(|&(_, place)| place);
        let (mut taken, mut place) = (self.places.iter().peekable(), 0);
        hot.retain(|_| {
            let stays = taken.next_if(|&&(_, taken)| taken == place).is_none();
            place += 1;
            stays
        });
        hot.rotate_left(looked_at - count);
        hot.extend(order);
    }
}

impl Members {
    fn any_due<'fd>(&self, mut fds: impl Iterator<Item = &'fd i32>) -> bool {
        fds.any(|fd| self.by_fd.get(fd).is_some_and(|member| member.due(0) != 0))
    }
}

/// Which of `events` the kernel has to report on the socket itself.
pub(super) fn ready_in_kernel(fd: i32, events: PollFlags) -> u32 {
    // SAFETY: registered by the program, and known not to be closed.
    let fd = unsafe { rustix::fd::BorrowedFd::borrow_raw(fd) };
    let mut poll = [PollFd::from_borrowed_fd(fd, events)];
    match rustix::event::poll(&mut poll, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
        Ok(1..) => u32::from(poll[0].revents().bits()),
        _ => 0,
    }
}

pub(super) fn kernel(
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

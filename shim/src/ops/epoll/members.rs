//! What an epoll set knows of its registrations, and of what else is in it.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libc::epoll_event;
use rustix::event::PollFlags;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd};
use smallvec::SmallVec;
use thallus_transport::ready::bit;
use thallus_transport::uninterrupted::{Descriptor, Uninterrupted};

use super::graves::Graves;
use super::kicker;
use super::member::{ET, Member, ONESHOT};
use super::set::{Set, join, leave};
use super::strangers::Strangers;
use super::waiting::ready_in_kernel;
use crate::real;
use crate::table::{self, Slot};

/// How long a registration is cold before its connection gives memory back: to free pages, and to get them again for the next
/// bytes, takes longer than to copy as much.
const KEEP: Duration = Duration::from_secs(1);
/// Connections that give back before one sleep, at most: each may take a millisecond.
const TRIMMED_AT_ONCE: usize = 2;

/// Hashes a descriptor, an address or the program's own `epoll_data` by one multiplication: they are looked up at every turn, and
/// nobody chooses them to collide.
#[derive(Debug, Default)]
pub(super) struct Number(u64);

impl Hasher for Number {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_i32(&mut self, number: i32) {
        self.write_u64(u64::from(number.cast_unsigned()));
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn write_u64(&mut self, number: u64) {
        // The map takes its bucket from the low bits and a tag from the high ones (2⁶⁴ ÷ the golden ratio).
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

pub(super) type ByFd = HashMap<i32, Member, BuildHasherDefault<Number>>;

/// Descriptors with the same `epoll_data`: nearly always one.
pub(super) type Named = SmallVec<[i32; 2]>;

/// Descriptors by their `epoll_data`.
#[derive(Debug, Default)]
pub(super) struct Names(HashMap<u64, Named, BuildHasherDefault<Number>>);

impl Names {
    pub(super) fn add(&mut self, data: u64, fd: i32) {
        self.0.entry(data).or_default().push(fd);
    }

    pub(super) fn remove(&mut self, data: u64, fd: i32) {
        if let Some(fds) = self.0.get_mut(&data) {
            if let Some(at) = fds.iter().position(|&known| known == fd) {
                fds.swap_remove(at);
            }
            if fds.is_empty() {
                self.0.remove(&data);
            }
        }
    }

    pub(super) fn of(&self, data: u64) -> &[i32] {
        self.0.get(&data).map_or(&[], |fds| fds)
    }

    fn has(&self, data: u64) -> bool {
        self.0.contains_key(&data)
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

#[derive(Debug, Default)]
pub(super) struct Members {
    /// By [`Member::number`]; those whose number is another's by now have keys below [`OUSTED`].
    pub(super) by_fd: ByFd,
    /// These keys, and how many there have been.
    ousted: Vec<i32>,
    oustings: i32,
    /// Descriptors that the kernel has with the same `epoll_data`: its reports name only that.
    by_data: Names,
    pub(super) hot: Vec<i32>,
    /// Cold ones with something to report that the kernel can't be made to report by room on their sockets: each look finds them.
    pub(super) stuck: Vec<i32>,
    /// Their turn is before that of the hot ones, and behind it, by turns.
    stuck_are_first: bool,
    /// The number by which the [`kicker`] is in the kernel's set, so that it reports something while any are stuck.
    kicker: Option<i32>,
    /// The last look at them found as many as it could take.
    pub(super) is_crowded: bool,
    /// Registrations whose connections have memory to give back, and when they are to be looked at.
    pub(super) grown: VecDeque<(Instant, i32)>,
    /// What is no member yet, by its descriptor.
    pub(super) early: HashMap<i32, Early, BuildHasherDefault<Number>>,
    pub(super) strangers: Strangers,
    /// Those two by their `epoll_data`.
    pub(super) others: Names,
    pub(super) graves: Graves,
}

/// A registration of a TCP socket that has not connected, or of a connection that is young. The kernel has it as it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Early {
    pub(super) events: u32,
    pub(super) data: u64,
    /// Of the young connection; 0 for a socket.
    pub(super) generation: u32,
    /// A one-shot registration of a socket that has been reported.
    pub(super) spent: bool,
}

/// No descriptor, nor is what is less.
const OUSTED: i32 = -2;

impl Members {
    /// Turns a hot registration cold. False if there is something to report, and it stays hot.
    pub(super) fn cool(&mut self, fd: i32) -> bool {
        let Some(member) = self.by_fd.get_mut(&fd) else { return true };
        if !member.cool() {
            return false;
        }
        if member.connection().has_grown() {
            let now = Instant::now();
            if member.cooled.replace(now).is_none() {
                self.grown.push_back((now + KEEP, fd));
            }
        }
        true
    }

    /// Gives memory back of connections that have been idle for long.
    pub(super) fn trim(&mut self) {
        if self.grown.is_empty() {
            return;
        }
        let now = Instant::now();
        for _ in 0..TRIMMED_AT_ONCE {
            let Some((_, fd)) = self.grown.pop_front_if(|(due, _)| *due <= now) else { return };
            let Some(member) = self.by_fd.get_mut(&fd) else { continue };
            let Some(cooled) = member.cooled.take().filter(|_| !member.hot) else { continue };
            if cooled + KEEP > now {
                member.cooled = Some(cooled);
                self.grown.push_back((cooled + KEEP, fd));
            } else {
                member.connection().trim();
            }
        }
    }

    /// The key by which `slot` is known that was, or is, known as `fd`: others may have changed that since the caller asked for it.
    pub(super) fn key_of(&self, fd: i32, slot: &'static Slot) -> Option<i32> {
        let is_its = |member: &Member| std::ptr::eq(member.slot, slot);
        if self.by_fd.get(&fd).is_some_and(is_its) {
            return Some(fd);
        }
        self.by_fd.iter().find(|(_, member)| is_its(member)).map(|(&key, _)| key)
    }

    /// From now on `fd`, if it is known, means the connection of `slot`. That of another one, which had this number before, and lives on by
    /// another, stays in the set, as it does in the kernel's (epoll(7)); and if this one has been so before, it is known by its number again.
    pub(super) fn meet(&mut self, set: &'static Set, fd: i32, slot: &'static Slot) {
        if let Some(member) = self.by_fd.get(&fd)
            && !std::ptr::eq(member.slot, slot)
        {
            if member.io == fd || member.connection().is_closed() {
                self.remove(set, fd);
            } else {
                let key = OUSTED - self.oustings;
                self.oustings = (self.oustings + 1) % (i32::MAX / 2);
                self.ousted.push(key);
                self.rename(set, fd, key);
            }
        }
        let is_its = |key: &&i32| {
            self.by_fd.get(*key).is_some_and(|member| member.number == fd && std::ptr::eq(member.slot, slot))
        };
        if let Some(&key) = self.ousted.iter().find(is_its) {
            self.ousted.retain(|&other| other != key);
            self.rename(set, key, fd);
        }
    }

    fn rename(&mut self, set: &'static Set, from: i32, to: i32) {
        let Some(member) = self.by_fd.remove(&from) else { return };
        self.by_data.remove(member.kernel.1, from);
        self.by_data.add(member.kernel.1, to);
        let looked_at = self.hot.iter_mut().chain(&mut self.stuck);
        let grown = self.grown.iter_mut().map(|(_, fd)| fd);
        for fd in looked_at.chain(grown).filter(|fd| **fd == from) {
            *fd = to;
        }
        // In this order: who looks for all of a slot's finds one.
        join(member.slot, set, to);
        leave(member.slot, set, from);
        self.by_fd.insert(to, member);
    }

    pub(super) fn insert(&mut self, set: &'static Set, fd: i32, mut member: Member) {
        self.meet(set, fd, member.slot);
        self.remove(set, fd);
        self.remove_stranger(fd);
        self.make_way(set, member.kernel.1);
        join(member.slot, set, fd);
        if !member.active && member.connection().is_active() {
            // Taken out of TCP beside us: who did so may have looked for registrations before this was one.
            member.became_active(None, true, self.graves.looks());
        }
        if member.active {
            set.active.fetch_add(1, Ordering::SeqCst);
        }
        if member.events & ONESHOT != 0 {
            set.one_shots.store(true, Ordering::SeqCst);
        }
        self.by_data.add(member.kernel.1, fd);
        self.graves.reuse(member.kernel.1, set.one_shots.load(Ordering::SeqCst));
        self.by_fd.insert(fd, member);
    }

    /// What had come over TCP when the kernel had no report left in this set, and nobody has one that the program has not got yet. `None` if
    /// that is not so, or nobody asked for edges.
    pub(super) fn has_told(&self, set: &'static Set, fd: i32) -> Option<u64> {
        let member = self.by_fd.get(&fd).filter(|member| !member.active && member.events & ET != 0)?;
        if self.graves.is_looked_for() || set.has_resting() {
            return None;
        }
        // In this order: what comes in between is left to be told of.
        let received = member.received();
        if has_report_left(set) { None } else { received }
    }

    /// Whether the kernel may have a report left on `fd` that tells an edge of room.
    pub(super) fn may_tell_of_room(&self, set: &'static Set, fd: i32) -> bool {
        let asks = |member: &Member| member.events & ET != 0 && member.wants_room();
        self.by_fd.get(&fd).is_some_and(asks) && has_report_left(set)
    }

    /// [`Self::insert`]s the member, unless its connection has been closed meanwhile.
    pub(super) fn take_in(&mut self, set: &'static Set, fd: i32, member: Member) {
        let slot = member.slot;
        self.insert(set, fd, member);
        // Who closes changes the table first, and then looks for members.
        if !table::is_of(fd, slot) {
            self.remove(set, fd);
        }
    }

    pub(super) fn remove(&mut self, set: &'static Set, fd: i32) {
        let Some(mut member) = self.by_fd.remove(&fd) else { return };
        if set.is_awaited() {
            // Programs that add and remove it for each wait may do I/O only in between.
            member.slot.note_wait(member.connection());
        }
        member.disarm();
        if member.is_stuck {
            self.unstick(set, fd);
        }
        if member.active {
            set.active.fetch_sub(1, Ordering::SeqCst);
        }
        self.drop_data(set, member.kernel.1, fd);
        self.hot.retain(|&hot| hot != fd);
        if fd <= OUSTED {
            self.ousted.retain(|&ousted| ousted != fd);
        }
        leave(member.slot, set, fd);
    }

    /// The kernel has changed the registration of a connection that is on TCP.
    pub(super) fn changed(&mut self, set: &'static Set, fd: i32, events: u32, data: u64) {
        let Some(member) = self.by_fd.get_mut(&fd) else { return };
        let before = std::mem::replace(&mut member.kernel, (events, data)).1;
        member.ask(events, data);
        member.doubt.asked(&self.graves, set.has_resting());
        if events & ONESHOT != 0 {
            set.one_shots.store(true, Ordering::SeqCst);
        }
        if before != data {
            self.make_way(set, data);
            self.by_data.add(data, fd);
            self.drop_data(set, before, fd);
        }
        self.graves.reuse(data, set.one_shots.load(Ordering::SeqCst));
    }

    /// The connection registered as `fd`, if it is, stays on TCP for good: from now on the kernel alone knows of it. False if what the
    /// kernel has is not what the program asked for, because the connection was about to leave TCP.
    pub(super) fn abandon(&mut self, set: &'static Set, fd: i32) -> bool {
        let Some(member) = self.by_fd.get(&fd) else { return true };
        if member.active {
            return false;
        }
        let (events, data) = member.kernel;
        self.remove(set, fd);
        self.add_stranger(set, fd, events, data);
        true
    }

    /// The connection registered as `fd` is the kernel's alone from now on, which gets what the program has asked for.
    pub(super) fn hand_over(&mut self, set: &'static Set, fd: i32) {
        if !self.sync(set, fd) || self.abandon(set, fd) {
            return;
        }
        let Some(member) = self.by_fd.get(&fd) else { return };
        let epfd = set.epfd.load(Ordering::Relaxed);
        let data = member.data;
        let events = if member.spent { ONESHOT } else { member.events };
        if epfd >= 0 {
            let mut event = epoll_event { events, u64: data };
            tell(epfd, libc::EPOLL_CTL_MOD, member, &raw mut event);
        }
        self.remove(set, fd);
        self.add_stranger(set, fd, events, data);
    }

    /// The member `fd` has the name `data` no more: what the kernel reports by it is too late, unless something else has it.
    fn drop_data(&mut self, set: &'static Set, data: u64, fd: i32) {
        self.by_data.remove(data, fd);
        if !self.by_data.has(data) && !self.others.has(data) {
            self.graves.bury(data, set.has_resting());
        }
    }

    /// Something gets the name `data`: what has been taken out by that name in memory alone leaves the kernel, whose reports would be taken
    /// for its own.
    pub(super) fn make_way(&mut self, set: &'static Set, data: u64) {
        let is_deleted = |fd: &i32| self.by_fd.get(fd).is_some_and(|member| member.deleted);
        let deleted: Named = self.by_data.of(data).iter().copied().filter(is_deleted).collect();
        for fd in deleted {
            self.sync(set, fd);
        }
    }

    /// What has been taken out in memory alone leaves the kernel: a child might do so when it is in there again.
    pub(super) fn tell_deletions(&mut self, set: &'static Set) {
        let is_deleted = |fd: &i32| self.by_fd.get(fd).is_some_and(|member| member.deleted);
        let deleted: Named = self.hot.iter().copied().filter(is_deleted).collect();
        for fd in deleted {
            self.sync(set, fd);
        }
    }

    /// The descriptors that a kernel report with `data` may mean.
    pub(super) fn named(&self, data: u64) -> Named {
        self.by_data.of(data).into()
    }

    /// Of how many by the name `data`, but connections that have left TCP, the kernel has any of `bits` to report, and which.
    pub(super) fn ready_beside(&self, data: u64, bits: u32) -> (usize, u32) {
        let members = self.by_data.of(data).iter().filter_map(|fd| {
            let member = self.by_fd.get(fd).filter(|member| !member.active && !member.spent)?;
            Some((member.io, member.kernel))
        });
        let others = self.others.of(data).iter().flat_map(|&fd| {
            let early = self.early.get(&fd).map(|early| (early.events, early.data));
            early.into_iter().chain(self.strangers.get(fd)).map(move |asked| (fd, asked))
        });
        let ready = members.chain(others).filter(|&(_, (_, of))| of == data).map(|(fd, (events, _))| {
            // It says of what has been closed that it is no descriptor, and that is none of the bits.
            let asked = events & bits | bit::ALWAYS;
            ready_in_kernel(fd, PollFlags::from_bits_retain(asked as u16)) & asked & bits
        });
        ready.filter(|&ready| ready != 0).fold((0, 0), |(count, all), ready| (count + 1, all | ready))
    }

    /// Finds the right state for a member that has changed: hot if only awake threads care, else armed, and
    /// reported by the kernel if it is ready although no bell will say so.
    pub(super) fn settle(&mut self, set: &'static Set, fd: i32) {
        let Some(member) = self.by_fd.get_mut(&fd) else { return };
        if !member.active {
            return;
        }
        if set.nested.load(Ordering::SeqCst) {
            member.connection().watched_for_edges(false);
        }
        if set.is_awake() {
            member.disarm();
            member.kicked = false;
            member.idle_sleeps = 0;
            if !member.hot {
                member.hot = true;
                self.hot.push(fd);
                // Who is alone has no order.
                let new = match self.hot.len() {
                    1 => 1,
                    2 => 0,
                    count => count - 1,
                };
                for member in self.hot[new..].iter().filter_map(|fd| self.by_fd.get(fd)) {
                    member.ask_for_times();
                }
            }
            return;
        }
        if std::mem::take(&mut member.hot) {
            self.hot.retain(|&hot| hot != fd);
        }
        member.arm();
        member.kick(member.due(0) != 0);
        if member.kicked {
            member.slot.kicked.store(true, Ordering::Relaxed);
        }
        self.sync(set, fd);
    }

    /// Tells the kernel what has changed in memory. False if the registration is gone now.
    pub(super) fn sync(&mut self, set: &'static Set, fd: i32) -> bool {
        let Some(member) = self.by_fd.get_mut(&fd) else { return false };
        let epfd = set.epfd.load(Ordering::Relaxed);
        if epfd < 0 {
            // As soon as there is one.
            return true;
        }
        if member.deleted {
            tell(epfd, libc::EPOLL_CTL_DEL, member, std::ptr::null_mut());
            self.remove(set, fd);
            return false;
        }
        let before = member.kernel;
        let nested = set.nested.load(Ordering::SeqCst);
        let wanted = (member.kernel_mask(nested), member.data);
        let may_stick = member.kicked || member.is_stuck;
        if member.active && !nested && wanted.0 & ET != 0 {
            member.connection().watched_for_edges(true);
        }
        if wanted != before || std::mem::take(&mut member.is_stale) {
            let mut event = epoll_event { events: wanted.0, u64: wanted.1 };
            tell(epfd, libc::EPOLL_CTL_MOD, member, &raw mut event);
            member.kernel = wanted;
            if before.0 != wanted.0 {
                member.is_masked_anew();
            }
            if before.1 != wanted.1 {
                self.make_way(set, wanted.1);
                self.by_data.add(wanted.1, fd);
                self.drop_data(set, before.1, fd);
                self.graves.reuse(wanted.1, set.one_shots.load(Ordering::SeqCst));
            }
        }
        if may_stick {
            self.stick(set, fd);
        }
        true
    }

    /// Notes whether `fd` is stuck, after the kernel has got what it should know.
    fn stick(&mut self, set: &'static Set, fd: i32) {
        let Some(member) = self.by_fd.get_mut(&fd) else { return };
        let sticks = member.kicked && !member.can_be_kicked();
        match (sticks, std::mem::replace(&mut member.is_stuck, sticks)) {
            (true, false) => {
                self.stuck.push(fd);
                self.kick(set);
            }
            (false, true) => self.unstick(set, fd),
            _ => {}
        }
    }

    fn unstick(&mut self, set: &'static Set, fd: i32) {
        self.stuck.retain(|&stuck| stuck != fd);
        if self.stuck.is_empty()
            && let Some(kicker) = self.kicker.take()
        {
            kicker::remove(set.epfd.load(Ordering::Relaxed), kicker);
        }
    }

    /// Has the kernel report the set, whoever waits for it. Without a descriptor for that only who waits from now on finds what is stuck.
    fn kick(&mut self, set: &'static Set) {
        if self.kicker.is_none() {
            set.has_kicker.store(true, Ordering::SeqCst);
            self.kicker = kicker::add(set.epfd.load(Ordering::Relaxed));
        }
    }

    /// Whether those that are stuck come before the hot ones in this look: else either could hide the others from who takes few events.
    pub(super) fn is_turn_of_stuck(&mut self) -> bool {
        if self.stuck.is_empty() {
            return false;
        }
        self.stuck_are_first = !self.stuck_are_first;
        self.stuck_are_first || self.hot.is_empty()
    }

    /// Reports what those have that are stuck, in wait number `round`. Returns how many events that are.
    pub(super) fn report_stuck(
        &mut self,
        set: &'static Set,
        events: &mut [epoll_event],
        round: u32,
    ) -> usize {
        let mut count = 0;
        for fd in Named::from(self.stuck.as_slice()) {
            let Some(event) = events.get_mut(count) else { break };
            let Some(member) = self.by_fd.get_mut(&fd) else { continue };
            let bits = if member.kicked && member.round != round { member.report(0, round) } else { 0 };
            if bits != 0 {
                *event = epoll_event { events: bits, u64: member.data };
                count += 1;
                // Behind those that have not been.
                self.stuck.retain(|&stuck| stuck != fd);
                self.stuck.push(fd);
            }
            self.settle(set, fd);
            self.sync(set, fd);
        }
        count
    }

    /// In a forked child, whose parent's the kernel's set is: nothing is stuck there that its own waits do not find.
    pub(super) fn forked(&mut self) {
        self.kicker = None;
        for fd in std::mem::take(&mut self.stuck) {
            if let Some(member) = self.by_fd.get_mut(&fd) {
                (member.kicked, member.is_stuck) = (false, false);
            }
        }
    }
}

/// Whether the kernel has a report in this set that no thread has got.
fn has_report_left(set: &Set) -> bool {
    let epfd = set.epfd.load(Ordering::Relaxed);
    epfd < 0 || ready_in_kernel(epfd, PollFlags::IN) != 0
}

/// epoll_ctl(2) for `member`; `event` is null, or valid. The kernel finds it only by both, the socket and the number, so if that has
/// been closed, and the connection lives on by another, the socket has this number for so long, if it is free.
fn tell(epfd: i32, operation: i32, member: &Member, event: *mut epoll_event) {
    let (io, number) = (member.io, member.number);
    // SAFETY: the set and the socket are the program's; the event is valid, or the operation takes none.
    let call = || unsafe { real::epoll_ctl(epfd, operation, number, event) };
    if io == number || table::is_of(number, member.slot) {
        call();
        return;
    }
    let _uninterrupted = Uninterrupted::begin();
    // SAFETY: known not to be closed.
    let socket = unsafe { BorrowedFd::borrow_raw(io) };
    let copy = rustix::io::fcntl_dupfd_cloexec(socket, number).map(Descriptor::from);
    if copy.as_ref().is_ok_and(|copy| copy.as_fd().as_raw_fd() == number) {
        call();
    }
}

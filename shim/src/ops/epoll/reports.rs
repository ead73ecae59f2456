//! What the kernel's reports on a set mean.

use std::sync::atomic::Ordering;

use libc::epoll_event;
use rustix::event::PollFlags;
use smallvec::SmallVec;
use thallus_transport::ready::bit;

use super::kicker;
use super::member::ONESHOT;
use super::members::Members;
use super::set::Set;
use super::waiting::ready_in_kernel;

/// What the kernel reports of ends, asked for or not.
const ENDS: u32 = bit::RDHUP | bit::ALWAYS;

/// What the kernel's reports may be on beside the connections that explain them.
#[derive(Debug, Default)]
struct Besides {
    /// The number of the look in which the kernel was asked, if it has one.
    look: Option<u64>,
    /// Names of such connections by which something else has been told of.
    told: SmallVec<[u64; 1]>,
    /// What nobody has been told of, by such names.
    untold: SmallVec<[(u64, u32); 1]>,
}

impl Set {
    /// Sorts out what the kernel reported at `events[..count]`: reports on upgraded connections become what the
    /// program would see, in wait number `round`, all others stay. If `later`, what memory shows as well is left to it. The kernel was asked
    /// in the `look` of that number, if it has one. Returns how many are left, and how many of these are on upgraded connections.
    pub(super) fn sort_out(
        &'static self,
        events: &mut [epoll_event],
        count: usize,
        round: u32,
        later: bool,
        look: Option<u64>,
    ) -> (usize, usize) {
        if count == 0 {
            return (0, 0);
        }
        let Some(mut members) = self.lock() else { return (count, 0) };
        let (mut kept, mut own) = (0, 0);
        // What one report means beyond its own place, as far as there are places that the kernel has not filled.
        let mut more = SmallVec::<[epoll_event; 1]>::new();
        let mut besides = Besides { look, ..Besides::default() };
        let mut kicked = false;
        for index in 0..count {
            if events[index].u64 == kicker::name() {
                kicked = true;
                continue;
            }
            let most = 1 + events.len() - count - more.len();
            let told = members.translate(self, events[index], round, later, most, &mut besides);
            let mut told = told.into_iter();
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
        for (data, untold) in besides.untold {
            let (count, bits) = members.ready_beside(data, untold);
            if count <= besides.told.iter().filter(|&&told| told == data).count() {
                continue;
            }
            besides.told.push(data);
            if let Some(place) = events.get_mut(kept) {
                *place = epoll_event { events: bits, u64: data };
                kept += 1;
            } else if let Some(same) = events.iter_mut().find(|event| event.u64 == data) {
                same.events |= bits;
            }
        }
        if kicked {
            let count = members.report_stuck(self, &mut events[kept..], round);
            (kept, own) = (kept + count, own + count);
        }
        (kept, own)
    }
}

impl Members {
    /// One kernel report in the program's terms, and whether it is on upgraded connections. None if it means nothing to the program;
    /// up to `most`, at least one, if several registrations have its `epoll_data`.
    fn translate(
        &mut self,
        set: &'static Set,
        event: epoll_event,
        round: u32,
        later: bool,
        most: usize,
        besides: &mut Besides,
    ) -> SmallVec<[(epoll_event, bool); 1]> {
        let (data, reported) = (event.u64, event.events);
        let mut told = SmallVec::new();
        let mut stranger = true;
        let named = self.named(data);
        let (only, named_so) = (named.len() == 1, !named.is_empty());
        // What is on TCP may have any report.
        let mut known = !named.is_empty();
        // It may be on one that had the name before: then nobody is told, and the kernel reports once more what it has of this one.
        let others = set.is_opaque() || !self.others.of(data).is_empty();
        let is_mixed = self.graves.are_mixed(data, besides.look) && !others;
        let mut is_old = is_mixed;
        for fd in named {
            let Some(member) = self.by_fd.get_mut(&fd) else { continue };
            known &= member.active;
            if !member.active {
                let is_doubtful = only && !others && member.doubt.is_on(besides.look);
                is_old |= is_doubtful;
                if is_mixed || is_doubtful {
                    if !member.spent {
                        member.is_stale = true;
                        member.doubt.renew();
                        self.sync(set, fd);
                    }
                    continue;
                }
                // Somebody has been told, and the kernel has been made to report it twice.
                is_old |= only && !others && member.spent && member.doubt.is_renewed();
                // The kernel has disabled it: known when it leaves TCP.
                member.spent |= only && member.events & ONESHOT != 0;
                continue;
            }
            member.was_reported(reported, besides.look);
            let connection = member.connection();
            let before = connection.block.drained.load(Ordering::Relaxed);
            // Edges may be asked for without RDHUP: then the end comes as a bell does, and makes no other edge.
            let hidden = reported & bit::IN != 0 && member.kernel.0 & bit::RDHUP == 0;
            let asks = hidden || reported & ENDS != 0;
            let ended = if asks { ready_in_kernel(member.io, PollFlags::RDHUP) } else { 0 };
            // That of a socket which had the name before is not this one's. An end stays.
            let reported = reported & (!ENDS | ended);
            let end = if hidden { ended } else { 0 };
            let observed =
                connection.observe(member.io, reported | end) | connection.hangup(reported, member.events);
            let tcp = member.without_echo(observed);
            let is_echo = tcp != observed;
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
            } else if !drained
                && reported & bit::IN != 0
                && !set.is_awake()
                && connection.may_have_uncounted_bell()
            {
                // Its bell was for what is found now, and nobody knows of it yet: the next bytes would not ring for those who sleep on.
                connection.overtaken(member.io, member.armed == Some(true));
            }
            if bits != 0 {
                told.push((epoll_event { events: bits, u64: member.data }, true));
            }
            if bits == 0 && reported & bit::IN != 0 && member.armed == Some(true) {
                // It waits for room on, and for the bell behind what has come.
                connection.make_way(member.io);
            }
            // Its edge has been used up: if there is something after all, once it has been armed, the kernel has to make another.
            member.is_stale |= nothing && member.kicked;
            let explained = drained || later || bits != 0 || member.spent || member.deleted || member.kicked;
            if explained || is_echo || ready_in_kernel(member.io, PollFlags::IN | PollFlags::RDHUP) != 0 {
                stranger = false;
            }
            self.settle(set, fd);
            self.sync(set, fd);
        }
        if let (false, &[fd]) = (named_so, self.others.of(data))
            && let Some(early) = self.early.get_mut(&fd)
        {
            // The kernel has disabled it: known when it connects.
            early.spent |= early.events & ONESHOT != 0;
        }
        if stranger {
            // Nothing of ours explains the report: another descriptor has the same data, or it is stale.
            if told.is_empty() && !is_old && self.is_strange(set, event, known) {
                told.push((event, false));
                if named_so {
                    besides.told.push(data);
                }
            }
            return told;
        }
        // It may be on another descriptor all the same, which has the same data, and which the kernel need not report again.
        let untold = reported & !told.iter().fold(0, |all, (event, _)| all | event.events);
        if untold != 0 {
            besides.untold.push((data, untold));
        }
        told
    }
}

//! One registration in an epoll set, and what it has to report.

use std::sync::atomic::Ordering;
use std::time::Instant;

use rustix::event::PollFlags;
use thallus_transport::arena::flag;
use thallus_transport::connection::Connection;
use thallus_transport::control::Wakes;
use thallus_transport::ready::{Glimpse, bit};
use thallus_transport::tcp;

use super::graves::Doubt;
use super::waiting::ready_in_kernel;
use crate::table::Slot;

pub(super) const ET: u32 = libc::EPOLLET as u32;
pub(super) const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
pub(super) const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
const MODES: u32 = ET | ONESHOT | EXCLUSIVE | libc::EPOLLWAKEUP as u32;

/// One registration.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) slot: &'static Slot,
    /// The descriptor by which the connection is reached: the registered one while that is open.
    pub(super) io: i32,
    /// The descriptor as which the kernel has it.
    pub(super) number: i32,
    /// What the program asked for, with its modes.
    pub(super) events: u32,
    pub(super) data: u64,
    /// The connection has left TCP.
    pub(super) active: bool,
    /// The last look at the kernel that had begun by then.
    active_after: u64,
    /// Armed while cold: for data, and for space if true.
    pub(super) armed: Option<bool>,
    pub(super) hot: bool,
    /// Sleeps since there was anything to report.
    pub(super) idle_sleeps: u8,
    /// Looks since there was anything to report, of those that many hot registrations make dear.
    vain_looks: u16,
    /// When it turned cold, if its connection had memory to give back.
    pub(super) cooled: Option<Instant>,
    /// A one-shot registration that has been reported.
    pub(super) spent: bool,
    /// The program has deleted it; the kernel does not know yet.
    pub(super) deleted: bool,
    /// It was made before this process was forked: its parent has it, too.
    pub(super) inherited: bool,
    /// There is something to report that no bell announced: the kernel is made to report it.
    pub(super) kicked: bool,
    /// The kernel can't be made to: [`Members::stuck`](super::members::Members::stuck).
    pub(super) is_stuck: bool,
    /// The kernel can be made to, for good: there was room on the socket, to which nothing is written any more but bells.
    has_room_below: bool,
    /// What the kernel had received over TCP before it was made to report it, and as of which the program has been told: until more comes
    /// the kernel's reports are no edges, but for the changes of its mask.
    kicked_at: Option<u64>,
    told: Option<u64>,
    /// The same, if it has been told of the end of the peer's stream, too.
    told_the_end: Option<u64>,
    /// It has been told of bytes since its connection went back to TCP.
    told_back: bool,
    /// The kernel's mask has been changed since then, and so the kernel reports once more what the program has been told of.
    echoes: bool,
    /// The mask and the data that the kernel has.
    pub(super) kernel: (u32, u64),
    /// The kernel is to look once more, even if nothing changes for it: the program has asked anew, and there may be bytes on TCP.
    pub(super) is_stale: bool,
    /// Whether it may be reported twice, while it is on TCP.
    pub(super) doubt: Doubt,
    /// The wait that reported it last.
    pub(super) round: u32,
    /// When a look began that reported it, beside others ([`thallus_transport::arrival::now`]).
    pub(super) reported_at: u64,
    /// What the kernel has reported beyond what memory shows, when there was no place to tell of it.
    pub(super) held: u32,
    seen: Option<Edge>,
    /// The last [`thallus_transport::arena::Block::lacks`] after which it was told of room: each registration of a connection is
    /// told for itself.
    roomy: u32,
}

/// What makes an edge of arrival: anything here changing, but for an error that the program has been told of meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Edge {
    /// How far the ring is filled, unless that lies behind bytes which TCP has not delivered yet: to the program they come
    /// with the last of these.
    head: Option<u64>,
    /// Bytes that have ever been put aside: the kernel has forgotten its own edge for them.
    aside: u64,
    ends: u32,
    /// How often this side has shut a direction down, whether the peer's has ended, and how often the peer has shut down again what was:
    /// the kernel wakes for each, also where that makes nothing ready that was not.
    shut: (u32, bool, u32),
}

impl Edge {
    const NONE: Self = Self { head: None, aside: 0, ends: 0, shut: (0, false, 0) };

    /// What there is now, but for the ends. To be looked at before readiness: what comes in between is then news once more, and
    /// else would never be.
    fn of(connection: &Connection, fd: i32) -> Self {
        let Some(segment) = connection.segment() else { return Self::NONE };
        let head = (!connection.is_behind_tcp(fd)).then(|| segment.incoming().head());
        let own = connection.block.shutdowns.load(Ordering::Relaxed);
        let aside = connection.block.put_aside();
        let shut = (own, connection.peer_has_ended(), connection.repeated_shutdowns());
        Self { head, aside, ends: 0, shut }
    }

    fn is_news_after(&self, seen: &Self) -> bool {
        Self { ends: self.ends | seen.ends, ..*self } != *seen
    }
}

impl Member {
    pub(super) fn new(slot: &'static Slot, fd: i32, events: u32, data: u64, active: bool) -> Self {
        Self {
            slot,
            io: fd,
            number: fd,
            events,
            data,
            active,
            active_after: 0,
            armed: None,
            hot: false,
            idle_sleeps: 0,
            vain_looks: 0,
            cooled: None,
            spent: false,
            deleted: false,
            inherited: false,
            kicked: false,
            is_stuck: false,
            has_room_below: false,
            kicked_at: None,
            told: None,
            told_the_end: None,
            told_back: false,
            echoes: false,
            kernel: (events, data),
            is_stale: false,
            doubt: Doubt::default(),
            round: 0,
            reported_at: 0,
            held: 0,
            seen: None,
            roomy: 0,
        }
    }

    pub(super) fn connection(&self) -> &'static Connection {
        // SAFETY: members are removed before the slot's last descriptor is given up (`closed`), or the slot
        // is never given up at all.
        unsafe { self.slot.connection() }
    }

    fn asked(&self) -> u32 {
        self.events & !MODES
    }

    /// The program asked anew: whatever is ready now is an edge.
    pub(super) fn ask(&mut self, events: u32, data: u64) {
        (self.events, self.data) = (events, data);
        (self.spent, self.deleted, self.seen, self.idle_sleeps, self.held) = (false, false, None, 0, 0);
        (self.kicked_at, self.told, self.told_the_end) = (None, None, None);
        self.echoes = false;
    }

    /// The connection left TCP. What came over TCP the kernel has reported, or still will; nothing has come
    /// through the ring yet. `told`: [`Members::has_told`](super::members::Members::has_told). `left`: the kernel may have a report on it that
    /// nobody has got. `looks`: the last that had begun.
    pub(super) fn became_active(&mut self, told: Option<u64>, left: bool, looks: u64) {
        self.active = true;
        self.active_after = looks;
        self.told = told;
        self.seen = Some(Edge::NONE);
        // Over TCP the kernel has told of room, unless it still owes that: with another mask it would not any more.
        let block = self.connection().block;
        self.roomy = block.lacks();
        if left || block.has(flag::NO_SPACE) {
            self.owe_room();
        }
    }

    /// Nobody has been told of the room that there is.
    fn owe_room(&mut self) {
        self.roomy = self.connection().block.lacks().wrapping_sub(1);
    }

    /// The kernel has `reported` this, for which it was asked in the `look` of that number, or nobody knows when. If that was before the
    /// connection left TCP, room is the program's to be told.
    pub(super) fn was_reported(&mut self, reported: u32, look: Option<u64>) {
        if reported & bit::OUT != 0 && self.wants_room() && look.is_none_or(|look| look <= self.active_after)
        {
            self.owe_room();
        }
    }

    /// Makes the peer note when bytes come.
    pub(super) fn ask_for_times(&self) {
        if let Some(segment) = self.connection().segment() {
            segment.incoming().data_armed.0.ask_for_times();
        }
    }

    /// When what there is to read came, if there is anything ([`thallus_transport::arrival::now`]); 0 if nobody knows.
    pub(super) fn came_at(&self) -> u64 {
        self.connection().segment().map_or(0, |segment| segment.incoming().came_at())
    }

    /// Whether there is something to read that came before `then`.
    pub(super) fn has_come_before(&self, then: u64) -> bool {
        // In this order: what comes in between would seem to have come when what was there before it did.
        self.connection().segment().is_some_and(|segment| segment.incoming().has_more())
            && self.came_at() < then
    }

    /// Its place among those that are reported: as in the kernel's ready list, who has been reported, and has left what was there, is behind those
    /// that came meanwhile.
    pub(super) fn turn(&self) -> u64 {
        self.came_at().max(self.reported_at)
    }

    /// The events that are due, if any. `tcp`: what the kernel has just reported beyond what memory shows.
    pub(super) fn due(&self, tcp: u32) -> u32 {
        self.look(tcp).0
    }

    /// The events that are due, and what makes the next edge once they have been reported.
    fn look(&self, tcp: u32) -> (u32, Option<Edge>) {
        let connection = self.connection();
        if self.spent || self.deleted || connection.is_closed() {
            return (0, None);
        }
        let tcp = tcp | self.held;
        if tcp == 0 && self.events & bit::WRITE == 0 {
            match connection.glimpse() {
                Glimpse::Nothing => return (0, None),
                Glimpse::Bytes if self.events & ET == 0 => return (self.events & bit::READ, None),
                _ => {}
            }
        }
        if connection.is_failing() {
            let _ = connection.mend(self.io);
        }
        connection.find_the_end(self.io);
        if self.events & ET == 0 {
            return ((tcp | self.readiness()) & (self.asked() | bit::ALWAYS), None);
        }
        let mut now = Edge::of(connection, self.io);
        let mut all = tcp | self.readiness();
        if connection.is_stirring() {
            all |= bit::READ;
        }
        now.ends = all & (bit::RDHUP | bit::ALWAYS);
        // Whoever has been told of a reset knows that both ends are over. Of a peer that has ended by the kernel alone the kernel has still
        // to tell, if this side had ended both.
        now.shut.1 |= now.ends & bit::ALWAYS == bit::ALWAYS
            || now.ends & bit::HUP != 0 && connection.block.has(flag::RESET_TOLD)
            || now.ends & bit::HUP != 0 && !connection.recv_settled() && connection.peer_has_closed(self.io);
        let bits = all & (self.asked() | bit::ALWAYS);
        let Some(seen) = self.seen.filter(|_| bits != 0) else { return (bits, Some(now)) };
        let is_news = now.is_news_after(&seen) || tcp & bit::READ != 0 && !self.is_old_end(tcp);
        // Of what arrives only who asks for it is told, but then of all that holds.
        let arrived = is_news && (self.asked() & bit::READ != 0 || bits & !bit::WRITE != 0);
        let freed = bits & bit::WRITE != 0 && self.is_owed_room();
        (if arrived || freed || now.shut != seen.shut { bits } else { 0 }, Some(now))
    }

    /// What memory shows. A window that a write would make grow is grown, because nobody else may do it before the peer reads.
    fn readiness(&self) -> u32 {
        let connection = self.connection();
        let bits = connection.readiness_when_mended(self.io, self.asked());
        let lacks_room = self.asked() & bit::WRITE != 0 && bits & bit::WRITE == 0;
        if lacks_room && connection.grow_for_asker(self.io, true) {
            bits | connection.readiness(bit::WRITE) & (bit::WRITE | bit::WRBAND)
        } else {
            bits
        }
    }

    /// Whether the program asks for room.
    pub(super) fn wants_room(&self) -> bool {
        self.events & bit::WRITE != 0
    }

    /// Makes room, if the program asks for that and a write now would do so. Whether there was none.
    pub(super) fn makes_room(&self) -> bool {
        let connection = self.connection();
        self.wants_room()
            && connection.readiness(bit::WRITE) & bit::WRITE == 0
            && connection.grow_for_asker(self.io, false)
    }

    /// Whether there is room, for a level that is asked for, where only the kernel knows: it might not have been told yet that it
    /// has to say so, and what memory shows is reported without it.
    fn room_in_kernel(&self) -> u32 {
        if self.events & bit::WRITE == 0 || self.events & ET != 0 {
            return 0;
        }
        let connection = self.connection();
        if connection.is_failing() {
            let _ = connection.mend(self.io);
        }
        if connection.has_returned() && !connection.is_closed() {
            ready_in_kernel(self.io, PollFlags::OUT) & self.events & bit::WRITE
        } else {
            0
        }
    }

    /// The kernel is about to be made to report it, or needs that no more.
    pub(super) fn kick(&mut self, due: bool) {
        if due && !self.kicked && self.events & ET != 0 {
            self.kicked_at = self.received();
        }
        self.kicked = due;
    }

    /// Whether there is room on the socket, by which the kernel is made to report it. There may be none as long as the peer has not read what
    /// was sent there.
    pub(super) fn can_be_kicked(&mut self) -> bool {
        let connection = self.connection();
        let for_good = connection.kernel_interest(bit::WRITE) & bit::WRITE == 0 && !connection.has_returned();
        if for_good && self.has_room_below {
            return true;
        }
        let has_room = ready_in_kernel(self.io, PollFlags::OUT) != 0;
        self.has_room_below = has_room && for_good;
        has_room
    }

    /// What of a kernel report beyond memory, `tcp`, is no echo of one that the program has been told of.
    pub(super) fn without_echo(&self, tcp: u32) -> u32 {
        // The end comes to the kernel late, with the peer's close or its second shutdown.
        let is_echo = match tcp & !bit::READ {
            0 => tcp != 0 && self.told.is_some() && self.told == self.received(),
            bit::WRITE => self.echoes && !self.is_owed_room() && self.told == self.received(),
            // By now the peer may count as gone.
            end if end & !(bit::RDHUP | bit::HUP) == 0 => {
                self.told_the_end.is_some() && self.told_the_end == self.counted()
            }
            _ => false,
        };
        if is_echo { 0 } else { tcp }
    }

    /// The kernel is about to have another mask for it than before.
    pub(super) fn is_masked_anew(&mut self) {
        self.echoes = self.told_back && self.told.is_some();
    }

    /// Bytes that have come over TCP, as long as the peer's may. `None` if the kernel does not tell.
    pub(super) fn received(&self) -> Option<u64> {
        let connection = self.connection();
        if connection.recv_settled() {
            None
        } else if connection.is_unix() {
            connection.all_of_kernel()
        } else {
            self.counted()
        }
    }

    /// Bytes and bells that have come over TCP. `None` if the kernel does not tell.
    fn counted(&self) -> Option<u64> {
        // SAFETY: registered by the program, and known not to be closed.
        let socket = unsafe { rustix::fd::BorrowedFd::borrow_raw(self.io) };
        tcp::counts(socket).ok().map(|counts| counts.received)
    }

    /// Whether the kernel has reported an end, behind which nothing is left to be read: memory may have told of it before.
    fn is_old_end(&self, tcp: u32) -> bool {
        // SAFETY: registered by the program, and known not to be closed.
        let socket = unsafe { rustix::fd::BorrowedFd::borrow_raw(self.io) };
        tcp & (bit::RDHUP | bit::HUP) != 0 && tcp::unread(socket) == Ok(0)
    }

    /// Takes the events that are due, to report them in wait number `round`.
    pub(super) fn report(&mut self, tcp: u32, round: u32) -> u32 {
        let lacks = self.connection().block.lacks();
        let tcp = tcp | self.room_in_kernel();
        let (mut bits, mut edge) = self.look(tcp);
        if bits == 0 {
            return 0;
        }
        if self.connection().has_returned() {
            // The kernel tells of bytes and the end behind them at once; here these may have been moved aside, and the end not.
            let ended = ready_in_kernel(self.io, PollFlags::RDHUP) & (bit::RDHUP | bit::ALWAYS);
            if ended != 0 {
                (bits, edge) = self.look(tcp | self.connection().observe(self.io, ended));
            }
            if edge.is_some() && self.wants_room() && bits & bit::WRITE == 0 {
                bits |= ready_in_kernel(self.io, PollFlags::OUT) & self.asked() & bit::WRITE;
            }
        }
        // An edge for them the kernel tells of by itself.
        let tells_once = edge.is_some() && self.events & ONESHOT == 0;
        if bits & bit::READ == 0
            && self.events & bit::READ != 0
            && !tells_once
            && self.connection().has_bytes_on_tcp(self.io)
        {
            bits |= self.events & bit::READ;
        }
        if let Some(edge) = edge {
            self.seen = Some(edge);
            let kicked_at = self.kicked_at.take();
            // Of what is on TCP the kernel has still to tell, if memory was faster; or if its report was on the frames or the bell by
            // which the peer went back, and bytes came before anybody looked.
            let is_first = bits & bit::READ != 0 && self.connection().has_returned() && !self.told_back;
            self.told_back |= is_first;
            let untold = || if tcp & bit::READ == 0 || is_first { self.received() } else { None };
            self.told = if bits & bit::READ == 0 { None } else { kicked_at.or_else(untold) };
            let has_ended = bits & bit::READ != 0 && edge.shut.1;
            self.told_the_end = if has_ended { self.received() } else { None };
            self.echoes = false;
            // A write that does not fit meanwhile is owed another report; and so is room, if this one can't tell of it.
            self.roomy = lacks.wrapping_sub(u32::from(bits & bit::WRITE == 0));
            let block = self.connection().block;
            if bits & bit::WRITE != 0 && block.has(flag::NO_SPACE) {
                block.lower(flag::NO_SPACE);
            }
        }
        self.spent = self.events & ONESHOT != 0;
        self.held = 0;
        (self.idle_sleeps, self.vain_looks) = (0, 0);
        self.round = round;
        bits
    }

    /// Whether the program waits for space that is not there: then an edge is owed, and a bell.
    pub(super) fn lacks_space(&self) -> bool {
        let lacks =
            self.asked() & bit::WRITE != 0 && self.connection().readiness(bit::WRITE) & bit::WRITE == 0;
        if lacks && !self.is_owed_room() {
            self.connection().block.lacks_room();
        }
        lacks
    }

    /// Whether a write has not fitted since it was last told of room.
    fn is_owed_room(&self) -> bool {
        self.connection().block.lacks() != self.roomy
    }

    /// What the kernel has to watch so that everything the program asked for wakes. Once only bells come over TCP, their
    /// arrival is all that matters, and they need not be taken away one by one; unless the set is `nested`.
    pub(super) fn kernel_mask(&self, nested: bool) -> u32 {
        if !self.active {
            return self.events;
        }
        if self.spent {
            return ONESHOT;
        }
        let asked = self.asked();
        let kick = if self.kicked { bit::OUT } else { 0 };
        if asked & (bit::READ | bit::WRITE | bit::RDHUP) == 0 {
            // HUP is reported unasked, and comes with the peer's end: an edge on the socket. Once it is there it stays. Only a bell tells
            // that the one direction ends after the other.
            let edge = if self.kicked { self.events & ET } else { ET };
            let connection = self.connection();
            let ended = if connection.is_unix() { flag::SHUT_WR | flag::SHUT_RD } else { flag::SHUT_WR };
            let rung = connection.block.has(ended);
            return if rung { bit::IN } else { 0 } | bit::RDHUP | edge | kick;
        }
        let mut interest = self.connection().kernel_interest(asked);
        if self.events & ET == 0 && asked & bit::READ == 0 && interest & bit::WRITE != 0 {
            // Room in TCP's buffers is a level, and only the kernel knows it. Unread bytes and bells would be one, too.
            return interest & (bit::WRITE | asked) | kick;
        }
        if self.events & ET != 0 && asked & bit::READ != 0 {
            // The end comes as readable, too: a mask that stays as it was makes no edge.
            interest &= asked | bit::READ | bit::WRITE;
        }
        // Unread bytes that the program does not ask for must not keep waking: then only arrivals do.
        let bells_only = !nested && interest & bit::WRITE == 0 && self.connection().recv_settled();
        let edge = if (bells_only || asked & bit::READ == 0) && !self.kicked { ET } else { self.events & ET };
        interest | edge | kick
    }

    /// Notes a look that found nothing. True if there have been `enough` of them.
    pub(super) fn has_idled(&mut self, enough: usize) -> bool {
        self.vain_looks = self.vain_looks.saturating_add(1);
        usize::from(self.vain_looks) >= enough
    }

    /// Turns cold; the kernel knows it as it is. False if there is something to report, and it stays hot.
    pub(super) fn cool(&mut self) -> bool {
        self.vain_looks = 0;
        self.arm();
        if self.due(0) == 0 {
            return true;
        }
        self.disarm();
        self.hot = true;
        false
    }

    /// Arms for good. Bells then announce whatever comes.
    pub(super) fn arm(&mut self) {
        self.hot = false;
        self.idle_sleeps = 0;
        let writes = self.lacks_space();
        if self.armed != Some(writes) {
            self.connection().arm_cold(self.io, writes, Wakes::ByTcp);
            if let Some(before) = self.armed.replace(writes) {
                self.connection().disarm_cold(before, Wakes::ByTcp);
            }
        }
    }

    /// Undoes [`Self::arm`].
    pub(super) fn disarm(&mut self) {
        if let Some(writes) = self.armed.take() {
            self.connection().disarm_cold(writes, Wakes::ByTcp);
        }
    }
}

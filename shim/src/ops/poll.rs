//! poll(2) and ppoll(2) over any mixture of descriptors.
//!
//! Connections that left TCP are asked in memory; everything else, and all sleeping, is the kernel's.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libc::{pollfd, sigset_t, timespec};
use rustix::io::Errno;
use smallvec::SmallVec;
use thallus_transport::alarm::Watch;
use thallus_transport::arena::flag;
use thallus_transport::arming::{Arming, arm_calls};
use thallus_transport::chime::Claim;
use thallus_transport::connection::Connection;
use thallus_transport::control::Wakes;
use thallus_transport::process;
use thallus_transport::ready::bit;
use thallus_transport::spin::{Spin, spin_for};
use thallus_transport::uninterrupted::Descriptor;

use crate::cancel::point;
use crate::table::{self, Call, Guest};
use crate::{errno, real};

/// When a spinning wait looks at the kernel's own descriptors.
#[derive(Debug, Default)]
pub(crate) struct Glances {
    rounds: u32,
    last: Option<Instant>,
}

impl Glances {
    /// Looks at memory between two looks at the clock.
    const ROUNDS: u32 = 32;
    /// How long spinning may go on without.
    const PAUSE: Duration = Duration::from_micros(20);

    /// To be asked after each look at memory, which is told whether others have just run for a while.
    pub(crate) fn are_due(&mut self, others_ran: bool) -> bool {
        self.rounds = self.rounds.wrapping_add(1);
        if !others_ran && !self.rounds.is_multiple_of(Self::ROUNDS) {
            return false;
        }
        let now = Instant::now();
        let due = self.last.map_or(others_ran, |last| now.duration_since(last) > Self::PAUSE);
        if due || self.last.is_none() {
            self.last = Some(now);
        }
        due
    }
}

/// Connections in one call that need no memory of their own: most programs that poll have one or two.
const FEW: usize = 4;

/// One connection among the polled descriptors.
struct Polled {
    index: usize,
    /// The descriptor, and the events that the program asks for. They are read once, as by the kernel: others may write there meanwhile.
    fd: i32,
    asked: u32,
    call: Call,
    /// For this sleep, and how it is woken.
    armed: Option<Wakes>,
    clear: bool,
}

/// Whether the kernel alone can't serve a wait on these.
pub(crate) fn concerns_us(fds: &[pollfd]) -> bool {
    fds.iter().any(|fd| table::is_awaited(fd.fd))
}

/// Whether a wait tells how the program waits for bytes. One for room tells nothing before the first of them: so the program's
/// library may have waited for a connect (`TcpStream::connect_timeout` of Rust's std), and its event loop waits otherwise.
fn is_telling(asked: &pollfd, has_carried: impl Fn() -> bool) -> bool {
    asked.events & (libc::POLLIN | libc::POLLRDNORM) != 0 || has_carried()
}

/// Waits as ppoll(2) does.
pub(crate) fn wait(
    fds: &mut [pollfd],
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Result<i32, Errno> {
    for fd in fds.iter() {
        if let Some(set) = table::epoll_set(fd.fd) {
            set.nest();
        }
    }
    // While we sleep no thread beside us takes one of the others out of TCP: it sees that our call is inside.
    let (mut polled, mut plain) = (SmallVec::<[Polled; FEW]>::new(), SmallVec::<[Guest; FEW]>::new());
    for (index, &fd) in fds.iter().enumerate() {
        match table::enter_for_io(fd.fd) {
            Some(Guest::Call(call)) => {
                if is_telling(&fd, || call.connection().has_carried()) {
                    call.slot.note_wait(call.connection());
                }
                if call.is_active(fd.fd) {
                    let asked = u32::from(fd.events.cast_unsigned());
                    polled.push(Polled { index, fd: fd.fd, asked, call, armed: None, clear: true });
                } else {
                    plain.push(Guest::Call(call));
                }
            }
            Some(Guest::Visit(visit)) => {
                if is_telling(&fd, || visit.has_carried()) {
                    visit.note_wait();
                }
                plain.push(Guest::Visit(visit));
            }
            None => {}
        }
    }
    if polled.is_empty() {
        return kernel(fds, timeout, mask);
    }
    wait_mixed(fds, &mut polled, timeout, mask)
}

fn wait_mixed(
    fds: &mut [pollfd],
    polled: &mut [Polled],
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Result<i32, Errno> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let only_ours = polled.len() == fds.len();
    for one in polled.iter().filter(|one| asks_for_room(one)) {
        let waits = timeout != Some(Duration::ZERO);
        one.call.connection().grow_for_asker(one.fd, waits);
    }
    loop {
        let ready = take_stock(fds, polled);
        if ready > 0 {
            if only_ours && !overlooks(fds, polled, timeout == Some(Duration::ZERO)) {
                return Ok(ready);
            }
            match glance(fds, polled, true, std::ptr::null()) {
                // Another thread has taken it meanwhile.
                Ok(0) if remaining(deadline) != Some(Duration::ZERO) => continue,
                result => return result,
            }
        }
        if timeout == Some(Duration::ZERO) {
            // A signal that is pending, and that the mask lets through, comes before nothing.
            return glance(fds, polled, true, mask);
        }
        let patience = |one: &Polled| one.call.connection().patience.allowance_ns();
        let budget = polled.iter().map(patience).max().unwrap_or(0);
        let (mut found, mut glances) = (None, Glances::default());
        let look = |others_ran: bool| {
            if polled.iter().any(|one| wanted(one) != 0) {
                return true;
            }
            if !only_ours && glances.are_due(others_ran) {
                match glance(fds, polled, false, std::ptr::null()) {
                    Ok(0) => {}
                    other => {
                        found = Some(other);
                        return true;
                    }
                }
            }
            false
        };
        let spin = spin_for(budget, remaining(deadline), look);
        if let Some(found) = found {
            return found;
        }
        if spin == Spin::Done {
            let ready = take_stock(fds, polled);
            for one in polled.iter().filter(|one| fds[one.index].revents != 0) {
                one.call.connection().patience.restore();
                let hits = &one.call.connection().block.spin_hits;
                hits.fetch_add(1, Ordering::Relaxed);
            }
            if ready > 0 && only_ours && !overlooks(fds, polled, false) {
                return Ok(ready);
            }
            continue;
        }
        let slept = sleep(fds, polled, remaining(deadline), mask);
        for one in polled.iter() {
            one.call.connection().patience.learn(spin);
        }
        match slept {
            Ok(0) if remaining(deadline) != Some(Duration::ZERO) => {}
            other => return other,
        }
    }
}

/// Whether the kernel may know of more than memory shows: of room to write, as long as that is over TCP; of the death of a peer
/// whose stream has ended, or its answer to what is sent over TCP; of anything that went back to TCP; of what still comes over TCP,
/// also behind bytes that have been put aside; and where nothing is there to be read, of the peer's death. For that it is asked now and
/// then, and always by a look `at_once` for something to read: so do pools, once, before they use a connection.
fn overlooks(fds: &[pollfd], polled: &[Polled], at_once: bool) -> bool {
    polled.iter().any(|one| {
        let (connection, asked) = (one.call.connection(), one.asked);
        let shown = u32::from(fds[one.index].revents.cast_unsigned());
        let sends_by_tcp = connection.kernel_interest(bit::WRITE) & bit::WRITE != 0;
        let may_be_reset = || sends_by_tcp && !connection.block.has(flag::RESET);
        connection.has_returned()
            || sends_by_tcp && asked & bit::WRITE & !shown != 0
            || connection.peer_has_ended() && (!connection.block.has(flag::PEER_GONE) || may_be_reset())
            || !connection.recv_settled()
            || shown & bit::READ == 0
                && (at_once && asked & (bit::READ | bit::RDHUP) != 0 || connection.is_kernels_turn())
    })
}

/// The bits of one connection that the program asked for and that hold, as far as memory shows: or it has to be mended first.
fn wanted(one: &Polled) -> u32 {
    let asked = one.asked;
    one.call.connection().readiness(asked) & (asked | bit::ALWAYS)
}

/// Fills in what memory shows; returns how many are ready.
fn take_stock(fds: &mut [pollfd], polled: &[Polled]) -> i32 {
    for fd in fds.iter_mut() {
        fd.revents = 0;
    }
    let mut ready = 0;
    for one in polled {
        let asked = one.asked;
        let bits = one.call.connection().readiness_when_mended(one.fd, asked) & (asked | bit::ALWAYS);
        fds[one.index].revents = (bits as u16).cast_signed();
        ready += i32::from(bits != 0);
    }
    ready
}

/// Asks the kernel without waiting, under this signal mask, and adds what memory shows. `settle`: report nothing as a result too.
fn glance(
    fds: &mut [pollfd],
    polled: &mut [Polled],
    settle: bool,
    mask: *const sigset_t,
) -> Result<i32, Errno> {
    let mut copy = kernel_view(fds, polled, None);
    let ready = kernel_with_others(&mut copy, fds.len(), Some(Duration::ZERO), mask)?;
    if ready == 0 && !settle {
        return Ok(0);
    }
    Ok(merge(fds, polled, &copy[..fds.len()]))
}

/// The descriptors as the kernel should watch them. `news` watches those whose unread bytes would keep waking.
fn kernel_view(fds: &[pollfd], polled: &[Polled], news: Option<i32>) -> Vec<pollfd> {
    let mut copy: Vec<pollfd> = fds.iter().map(|fd| pollfd { revents: 0, ..*fd }).collect();
    for one in polled {
        let connection = one.call.connection();
        let mut interest = connection.kernel_interest(one.asked);
        let entry = &mut copy[one.index];
        entry.fd = one.fd;
        if connection.is_gone() {
            // No more bells, and what the kernel would say for ever is known, unless the program waits for it. A reset it
            // tells unasked, also to who asks for nothing: it may mean nothing as long as there is something to read.
            interest &= one.asked | !(bit::IN | bit::RDHUP);
            if is_behind_bytes(one) {
                entry.fd = -1;
            }
        }
        entry.events = (interest as u16).cast_signed();
        if news.is_some() && is_stuck(one) {
            // The end can be told of before the bytes are taken.
            entry.events = (interest & !(bit::IN | bit::RDHUP) | one.asked & bit::RDHUP) as i16;
        }
    }
    let live = polled.iter().filter(|one| !one.call.connection().has_returned());
    for wake in live.filter_map(|one| one.call.connection().wake_fd()) {
        copy.push(pollfd { fd: wake, events: libc::POLLIN, revents: 0 });
    }
    if let Some(news) = news {
        copy.push(pollfd { fd: news, events: libc::POLLIN, revents: 0 });
    }
    copy
}

/// The kernel's answers, translated for our connections.
fn merge(fds: &mut [pollfd], polled: &[Polled], kernel: &[pollfd]) -> i32 {
    for (fd, answer) in fds.iter_mut().zip(kernel) {
        fd.revents = answer.revents;
    }
    for one in polled {
        let events = u32::from(kernel[one.index].revents.cast_unsigned());
        let asked = one.asked;
        let connection = one.call.connection();
        let invalid = u32::from(libc::POLLNVAL.cast_unsigned());
        let bits = if events & invalid != 0 {
            // Closed meanwhile by another thread: it is all that the kernel says.
            invalid
        } else if events == 0 {
            connection.readiness_when_mended(one.fd, asked)
        } else {
            connection.interpret(one.fd, events) | connection.hangup(events, asked)
        };
        fds[one.index].revents = ((bits & (asked | bit::ALWAYS | invalid)) as u16).cast_signed();
    }
    fds.iter().filter(|fd| fd.revents != 0).count() as i32
}

fn sleep(
    fds: &mut [pollfd],
    polled: &mut [Polled],
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Result<i32, Errno> {
    match sleep_with(fds, polled, timeout, mask, Claim::take(), true) {
        // There is no place for descriptors of the library's.
        Err(Errno::INVAL) => sleep_with(fds, polled, timeout, mask, None, false),
        result => result,
    }
}

/// [`sleep`]s, and may watch the ear besides, by this claim; and if `watches_news`, what is stuck by a set of its own.
fn sleep_with(
    fds: &mut [pollfd],
    polled: &mut [Polled],
    timeout: Option<Duration>,
    mask: *const sigset_t,
    claim: Option<Claim>,
    watches_news: bool,
) -> Result<i32, Errno> {
    let home = process::id();
    arm(polled, claim.is_some());
    let watch = if polled.iter().any(asks_for_room) { Watch::begin() } else { None };
    let news = match take_stock(fds, polled) {
        0 if watches_news => News::of(polled),
        0 => News::Plain,
        _ => News::Here,
    };
    let result = if matches!(news, News::Here) {
        note_writers(polled, Connection::awaits_no_room);
        glance(fds, polled, true, std::ptr::null())
    } else {
        let mut copy = kernel_view(fds, polled, news.fd());
        let claim = claim.filter(|_| polled.iter().any(|one| one.armed == Some(Wakes::ByChime)));
        let beside = watch.iter().map(Watch::fd).chain(claim.iter().map(Claim::fd));
        copy.extend(beside.map(|fd| pollfd { fd, events: libc::POLLIN, revents: 0 }));
        let woken = kernel_with_others(&mut copy, fds.len(), timeout, mask);
        // Before anything that may wait until those who sleep have run.
        note_writers(polled, Connection::awaits_no_room);
        woken.map(|_| {
            if let (Some(claim), Some(ear)) = (&claim, copy.last())
                && ear.revents != 0
            {
                claim.hear();
            }
            merge(fds, polled, &copy[..fds.len()])
        })
    };
    for one in polled.iter_mut() {
        // A child that a signal handler has made meanwhile has announced nothing.
        if let Some(wakes) = one.armed.take()
            && process::id() == home
        {
            one.call.connection().disarm(one.asked, wakes);
        }
        one.clear = true;
    }
    result
}

fn asks_for_room(one: &Polled) -> bool {
    one.asked & bit::WRITE != 0
}

/// Tells each connection that the program asks for room on.
fn note_writers(polled: &[Polled], note: fn(&Connection)) {
    polled.iter().filter(|one| asks_for_room(one)).for_each(|one| note(one.call.connection()));
}

/// Announces this sleeper, who `listens` for chimes, on each connection.
fn arm(polled: &mut [Polled], listens: bool) {
    note_writers(polled, Connection::awaits_room);
    let ask = polled.iter().filter(|one| one.call.connection().arms_by_asking()).count() > 1;
    let armings = polled.iter().map(|one| {
        let connection = one.call.connection();
        Arming { connection, fd: one.fd, asked: one.asked, wakes: connection.wakes(listens) }
    });
    let armed: SmallVec<[(Wakes, bool); FEW]> = if ask {
        let armings: Vec<_> = armings.collect();
        arm_calls(&armings).into_iter().zip(&armings).map(|(clear, arming)| (arming.wakes, clear)).collect()
    } else {
        let arm =
            |Arming { connection, fd, asked, wakes }: Arming<'_>| (wakes, connection.arm(fd, asked, wakes));
        armings.map(arm).collect()
    };
    for (one, (wakes, clear)) in polled.iter_mut().zip(armed) {
        (one.clear, one.armed) = (clear, Some(wakes));
        one.call.connection().block.sleeps.fetch_add(1, Ordering::Relaxed);
    }
}

/// Whether the kernel has more to say of a connection than the program is to know: bytes or an end that it did not ask for, a
/// reset that may mean nothing, or a bell that somebody else needs. Only further arrivals may wake.
fn is_stuck(one: &Polled) -> bool {
    let connection = one.call.connection();
    let is_unasked = one.asked & bit::READ == 0;
    !one.clear && (is_unasked || connection.recv_settled())
        || is_unasked && (connection.block.has(flag::SHUT_RD) || !connection.recv_settled())
        || is_behind_bytes(one)
}

/// Whether the program asks for nothing of a connection whose peer is gone and whose bytes are unread. It may be told of a reset
/// that answers a write, but of none before.
fn is_behind_bytes(one: &Polled) -> bool {
    let connection = one.call.connection();
    connection.is_gone() && connection.has_unread() && !bit::is_specific(one.asked)
}

/// What watches the sockets that are stuck with unread bytes.
enum News {
    /// Something that the program asked for has come meanwhile.
    Here,
    /// Nothing more than the sockets themselves: none is stuck, or there is no descriptor to watch them with. Then
    /// their bytes wake the sleeper again and again, but nothing is missed.
    Plain,
    /// An epoll set that reports arrivals.
    Set(Descriptor),
}

impl News {
    fn of(polled: &[Polled]) -> Self {
        if !polled.iter().any(is_stuck) {
            return Self::Plain;
        }
        let Ok(set) = watch(polled) else { return Self::Plain };
        // What came before the set's first report and after the last look is seen by looking once more. The bell that was
        // rung for it says nothing of what comes after it.
        for one in polled.iter().filter(|one| is_stuck(one)) {
            one.call.connection().renew(one.fd, one.asked);
        }
        if polled.iter().any(|one| wanted(one) != 0) { Self::Here } else { Self::Set(set) }
    }

    fn fd(&self) -> Option<i32> {
        use std::os::fd::{AsFd, AsRawFd};
        match self {
            Self::Set(set) => Some(set.as_fd().as_raw_fd()),
            Self::Here | Self::Plain => None,
        }
    }
}

fn watch(polled: &[Polled]) -> Result<Descriptor, Errno> {
    use rustix::event::epoll;
    let set = Descriptor::from(table::place(epoll::create(epoll::CreateFlags::CLOEXEC)?)?);
    for one in polled.iter().filter(|one| is_stuck(one)) {
        // SAFETY: the program polls this descriptor now.
        let fd = unsafe { rustix::fd::BorrowedFd::borrow_raw(one.fd) };
        let edges = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        match epoll::add(&set, fd, epoll::EventData::new_u64(0), edges) {
            // The same connection stands in the list twice.
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
    }
    // The first report is of what is there already.
    let mut events = Vec::with_capacity(polled.len());
    let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    epoll::wait(&set, rustix::buffer::spare_capacity(&mut events), Some(&none))?;
    Ok(set)
}

/// Time left until `deadline`.
pub(crate) fn remaining(deadline: Option<Instant>) -> Option<Duration> {
    deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
}

/// A duration as the kernel takes it.
pub(crate) fn to_timespec(duration: Duration) -> timespec {
    timespec {
        tv_sec: libc::time_t::try_from(duration.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(duration.subsec_nanos().cast_signed()),
    }
}

/// A timeout as the application gives it; `EINVAL` if it is none.
pub(crate) fn from_timespec(time: timespec) -> Result<Duration, Errno> {
    let seconds = u64::try_from(time.tv_sec).map_err(|_| Errno::INVAL)?;
    let nanos = u32::try_from(time.tv_nsec).map_err(|_| Errno::INVAL)?;
    if nanos >= 1_000_000_000 { Err(Errno::INVAL) } else { Ok(Duration::new(seconds, nanos)) }
}

/// [`kernel`], for `count` descriptors of the program's and others behind them. It takes no more than a process may have open: then those
/// are left out that are none.
fn kernel_with_others(
    fds: &mut [pollfd],
    count: usize,
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Result<i32, Errno> {
    let result = kernel(fds, timeout, mask);
    if result != Err(Errno::INVAL) || fds.len() == count || count as u64 > table::most_descriptors() {
        return result;
    }
    let mut some: Vec<pollfd> = fds.iter().copied().filter(|fd| fd.fd >= 0).collect();
    let ready = kernel(&mut some, timeout, mask)?;
    for (fd, answer) in fds.iter_mut().filter(|fd| fd.fd >= 0).zip(some) {
        fd.revents = answer.revents;
    }
    Ok(ready)
}

/// ppoll(2), as a cancellation point.
pub(super) fn kernel(
    fds: &mut [pollfd],
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Result<i32, Errno> {
    let time = timeout.map(to_timespec);
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the slice is writable, the time lives, and the mask is the application's.
    let ready = point(|| unsafe { real::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, time, mask) });
    match ready {
        None => Err(Errno::CANCELED),
        Some(..0) => Err(errno::now()),
        Some(ready) => Ok(ready),
    }
}

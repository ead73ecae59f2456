//! Which file descriptors are ours: one array load tells that one is not.
//!
//! An entry is a [`Young`] connection, or a tagged pointer to a [`Slot`] (a connection that has done more than a few
//! calls; another bit says that it is [`released`]), a [`Listener`] or an epoll set. Slots are recycled, never freed, so
//! that a thread that loaded a pointer which another thread then closed finds a slot all the same: it counts itself in,
//! looks at the entry again, and goes away if it has changed.

mod blocks;
mod cells;
mod fork;
mod internal;
mod listener;
mod released;
mod slot;
mod unconnected;
mod young;

use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fd::BorrowedFd;
use thallus_transport::arena::{Block, Role, flag};
use thallus_transport::connection::Connection;
use thallus_transport::rendezvous::Service;
use thallus_transport::settings::settings;
use thallus_transport::uninterrupted::Uninterrupted;
use thallus_transport::unix::Name;
use thallus_transport::{process, tcp, unix};

pub(crate) use self::blocks::prepare;
pub(crate) use self::cells::far_range;
use self::cells::{LIMIT, cell, cell_to_fill, near};
pub(crate) use self::fork::{Quiet, grow_all_up, quiesce};
pub(crate) use self::internal::{
    forget_placed, highest_of_program, internal_fds, is_internal, most_descriptors, place,
};
use self::listener::Listener;
pub(crate) use self::released::released;
use self::released::{RELEASED, is_released};
pub(crate) use self::slot::{Call, Slot, for_each, patiently};
use self::slot::{FD, USER};
pub(crate) use self::unconnected::{
    add_local, add_socket, copied_unconnected, discover_socket, is_socket, is_unknown, pass_unconnected,
    share_unconnected, watch_socket,
};
use self::unconnected::{is_shared, is_unconnected, is_watched};
pub(crate) use self::young::Young;
use self::young::{Refusal, Visit};
use crate::ops::epoll::Set;
use crate::{config, errno, ops, stats};

/// One more than the highest descriptor that ever had an entry.
static HIGHEST: AtomicUsize = AtomicUsize::new(0);

const TAG: usize = 3;
const LISTENER: usize = 1;
const EPOLL: usize = 2;
const YOUNG: usize = 3;
/// What an entry is.
#[derive(Debug)]
enum Entry {
    Young,
    Connection(&'static Slot),
    Listener(&'static Listener),
    Epoll(&'static Set),
}

fn decode(word: usize) -> Option<Entry> {
    if word == 0 || is_unconnected(word) {
        return None;
    }
    let address = word & !TAG;
    Some(match word & TAG {
        // SAFETY: entries are only ever made by `put` from leaked references of the tagged type.
        LISTENER => Entry::Listener(unsafe { &*std::ptr::with_exposed_provenance(address) }),
        // SAFETY: as above.
        EPOLL => Entry::Epoll(unsafe { &*std::ptr::with_exposed_provenance(address) }),
        YOUNG => Entry::Young,
        // SAFETY: as above.
        _ => Entry::Connection(unsafe { &*std::ptr::with_exposed_provenance(address & !RELEASED) }),
    })
}

/// Counts the caller in on the connection behind `fd`; `None` if it is not one. A young one grows up, or is
/// none without the memory for that.
pub(crate) fn enter(fd: i32) -> Option<Call> {
    let cell = cell(fd)?;
    loop {
        let word = cell.load(Ordering::Acquire);
        if let Some(young) = Young::of(word) {
            if young.is_poor() {
                return None;
            }
            grow_up(fd, young);
            continue;
        }
        return match enter_slot(cell, word) {
            Entering::Moved => continue,
            Entering::Inside(call) => Some(call),
            Entering::Nothing => None,
        };
    }
}

/// As [`enter`], but a young connection stays so; `None` for it, too.
pub(crate) fn enter_adult(fd: i32) -> Option<Call> {
    let cell = cell(fd)?;
    loop {
        match enter_slot(cell, cell.load(Ordering::Acquire)) {
            Entering::Moved => {}
            Entering::Inside(call) => return Some(call),
            Entering::Nothing => return None,
        }
    }
}

/// What is known of a connection.
#[derive(Debug)]
pub(crate) enum Known {
    /// It has done little.
    Young(Young),
    /// The caller is counted in.
    Adult(Call),
}

/// As [`enter_adult`], but the same look tells a young connection from none.
pub(crate) fn look(fd: i32) -> Option<Known> {
    let cell = cell(fd)?;
    loop {
        let word = cell.load(Ordering::Acquire);
        if let Some(young) = Young::of(word) {
            return Some(Known::Young(young));
        }
        match enter_slot(cell, word) {
            Entering::Moved => {}
            Entering::Inside(call) => return Some(Known::Adult(call)),
            Entering::Nothing => return None,
        }
    }
}

/// Whether `fd` is a connection that may leave TCP any moment, or has.
#[inline]
pub(crate) fn may_be_upgraded(fd: i32) -> bool {
    cell(fd).is_some_and(|cell| {
        let word = cell.load(Ordering::Relaxed);
        word != 0 && word & (TAG | released::RELEASED) == 0
    })
}

/// As [`enter_adult`], for who has another way if the entry is anything else, or changes.
#[inline]
pub(crate) fn enter_quickly(fd: i32) -> Option<Call> {
    let cell = cell(fd)?;
    match enter_slot(cell, cell.load(Ordering::Acquire)) {
        Entering::Inside(call) => Some(call),
        Entering::Moved | Entering::Nothing => None,
    }
}

/// What is known of `fd` if it is a connection that has done little.
pub(crate) fn young(fd: i32) -> Option<Young> {
    Young::of(cell(fd)?.load(Ordering::Acquire))
}

/// Who does I/O on a connection.
#[derive(Debug)]
pub(crate) enum Guest {
    /// A call on a young connection: the kernel does all of it, and the visit counts.
    Visit(Visit),
    /// A call on any other.
    Call(Call),
}

/// Counts the caller in for I/O on the connection behind `fd`; `None` if it is not one. A young one grows up if it
/// has done enough.
pub(crate) fn enter_for_io(fd: i32) -> Option<Guest> {
    let cell = cell(fd)?;
    let mut word = cell.load(Ordering::Acquire);
    loop {
        if let Some(young) = Young::of(word) {
            match Visit::begin(fd, cell, young) {
                Ok(visit) => return Some(Guest::Visit(visit)),
                Err(Refusal::Changed(now)) => word = now,
                Err(Refusal::Crowded) => return None,
                Err(Refusal::Adult) => {
                    if !young.takes_advice(fd) {
                        grow_up(fd, young);
                    }
                    word = cell.load(Ordering::Acquire);
                }
            }
            continue;
        }
        match enter_slot(cell, word) {
            Entering::Moved => word = cell.load(Ordering::Acquire),
            Entering::Inside(call) => return Some(Guest::Call(call)),
            Entering::Nothing => return None,
        }
    }
}

enum Entering {
    /// The entry has changed.
    Moved,
    Inside(Call),
    /// It is no slot.
    Nothing,
}

#[inline]
fn enter_slot(cell: &AtomicUsize, word: usize) -> Entering {
    if word == 0 || word & TAG != 0 {
        return Entering::Nothing;
    }
    let Some(Entry::Connection(slot)) = decode(word) else { return Entering::Nothing };
    slot.holds.fetch_add(USER, Ordering::SeqCst);
    if cell.load(Ordering::SeqCst) == word {
        return Entering::Inside(Call { slot });
    }
    slot.leave();
    Entering::Moved
}

/// Gives a young connection a slot and a block. Without memory for them it stays young, and on TCP, for good.
#[cold]
fn grow_up(fd: i32, young: Young) {
    errno::keep(|| {
        let _uninterrupted = Uninterrupted::begin();
        if young.is_poor() {
            return;
        }
        let Some(block) = blocks::allocate(young.role(), fd, young.opened_ns(fd)) else {
            young.becomes_poor(fd);
            return;
        };
        if young.is_connected() {
            block.raise(flag::CONNECTED);
        }
        if young.is_unix() {
            block.raise(flag::UNIX);
        }
        block.calls.store(young.calls(), Ordering::Relaxed);
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        let nonblocking =
            rustix::fs::fcntl_getfl(socket).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK));
        let connection = Connection::new(block, young.port(), nonblocking);
        connection.apply_rules(fd);
        let slot = Slot::begin(connection, young.is_used());
        match young.becomes(slot, fd) {
            None => {
                slot.holds.fetch_sub(FD, Ordering::SeqCst);
                slot.last.store(block.release(process::id()), Ordering::SeqCst);
            }
            Some(last) => {
                if let Some(reason) = ops::process::out_of_sight() {
                    // Asked after it has become visible: whoever sets an io_uring up either sees it, or is seen.
                    // SAFETY: counted in.
                    unsafe { slot.connection() }.pin(fd, reason);
                }
                if last.is_registered() {
                    // Counted in, so nobody takes it out of TCP before the set knows it.
                    ops::epoll::grown_up(fd, last, slot);
                }
            }
        }
        slot.leave();
    });
}

/// Whether there may be mappings of this library's that are large and hold little.
pub(crate) fn has_mappings() -> bool {
    blocks::exist() || far_range().is_some()
}

/// Whether `fd` is a TCP connection of ours.
pub(crate) fn is_connection(fd: i32) -> bool {
    cell(fd).is_some_and(is_of_connection)
}

/// As [`is_connection`], but high descriptors may all be: who only asks this needs no frame.
#[inline]
pub(crate) fn may_be_connection(fd: i32) -> bool {
    near(fd).is_none_or(is_of_connection)
}

fn is_of_connection(cell: &AtomicUsize) -> bool {
    let word = cell.load(Ordering::Relaxed);
    word != 0 && (word & TAG == 0 || Young::of(word).is_some())
}

/// Whether `fd` is a descriptor of the connection in `slot`.
pub(crate) fn is_of(fd: i32, slot: &'static Slot) -> bool {
    cell(fd).is_some_and(|cell| is_slot(cell.load(Ordering::SeqCst), slot))
}

/// Whether this is the entry of the connection in `slot`.
fn is_slot(word: usize, slot: &'static Slot) -> bool {
    word & !RELEASED == std::ptr::from_ref(slot).addr()
}

/// Whether `fd` is an `AF_UNIX` connection of ours.
#[cold]
pub(crate) fn is_unix(fd: i32) -> bool {
    let Some(cell) = cell(fd) else { return false };
    loop {
        let word = cell.load(Ordering::Acquire);
        if let Some(young) = Young::of(word) {
            return young.is_unix();
        }
        return match enter_slot(cell, word) {
            Entering::Moved => continue,
            Entering::Inside(call) => call.connection().is_unix(),
            Entering::Nothing => false,
        };
    }
}

/// Notes that `fd` is something new that is none of ours. What it was before was closed in a way that no hook saw.
pub(crate) fn add_other(fd: i32) {
    if let Some(cell) = cell(fd)
        && cell.load(Ordering::Relaxed) != 0
        && !is_borrowed()
    {
        errno::keep(|| forget(cell.swap(0, Ordering::SeqCst), fd, Parting::Unseen));
    }
}

/// Whether waiting for `fd` concerns this library: a TCP connection that may leave TCP, or has, or an epoll set.
pub(crate) fn is_awaited(fd: i32) -> bool {
    cell(fd).is_some_and(|cell| {
        let word = cell.load(Ordering::Relaxed);
        word != 0 && !is_released(word) && is_of_a_waiter(word)
    })
}

/// Not of what is most descriptors: a call for one of these should have no more to ask.
#[inline(never)]
fn is_of_a_waiter(word: usize) -> bool {
    !is_unconnected(word) && word & TAG != LISTENER
}

/// The epoll set behind `fd`, if connections of ours were ever added to it.
pub(crate) fn epoll_set(fd: i32) -> Option<&'static Set> {
    match decode(cell(fd)?.load(Ordering::Acquire)) {
        Some(Entry::Epoll(set)) => Some(set),
        _ => None,
    }
}

/// As [`add_epoll_set`], of one that the program has from elsewhere, if `fd` is one.
#[cold]
pub(crate) fn discover_epoll_set(fd: i32) -> Option<&'static Set> {
    errno::keep(|| ops::epoll::is_epoll(fd).then(|| add_epoll_set(fd, true)).flatten())
}

/// Makes `fd` an epoll set that we look after; `opaque` if the program has not just made it.
pub(crate) fn add_epoll_set(fd: i32, opaque: bool) -> Option<&'static Set> {
    let set = Set::create(fd, opaque)?;
    let word = std::ptr::from_ref(set).expose_provenance() | EPOLL;
    put(fd, word).then_some(set)
}

fn put(fd: i32, word: usize) -> bool {
    if is_borrowed() {
        return false;
    }
    let Some(cell) = cell_to_fill(fd) else { return false };
    note_highest(fd);
    let stale = cell.swap(word, Ordering::SeqCst);
    // The program closed the last owner of this number in a way that no hook saw.
    forget(stale, fd, Parting::Unseen);
    true
}

/// `fd` is about to have an entry.
fn note_highest(fd: i32) {
    if HIGHEST.load(Ordering::Relaxed) <= fd as usize {
        HIGHEST.fetch_max(fd as usize + 1, Ordering::SeqCst);
    }
}

/// Whether this memory may be another process's: see [`ops::process::is_stranger`].
pub(crate) fn is_borrowed() -> bool {
    ops::process::is_stranger()
}

/// How a descriptor and what is known of it part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parting {
    /// The program is about to close it, or has replaced it.
    Closes,
    /// It was closed in a way that no hook saw.
    Unseen,
    /// It stays open, and the kernel's alone: threads that sleep in a call on it go on there.
    Stays,
}

/// The program is about to close `fd`, or has replaced it.
pub(crate) fn remove(fd: i32) {
    part(fd, Parting::Closes);
}

/// The connection behind `fd` is back on TCP, where the program goes on past the hooks.
pub(crate) fn let_go(fd: i32) {
    part(fd, Parting::Stays);
}

#[inline]
fn part(fd: i32, parting: Parting) {
    let Some(cell) = cell(fd) else { return };
    if cell.load(Ordering::Relaxed) != 0 && !is_borrowed() {
        remove_known(cell, fd, parting);
    }
}

/// The connection that `call` is counted in on has ended, and its descriptors, which are open, are a plain socket's.
pub(crate) fn remove_all(call: &Call) {
    while let Some(fd) = descriptor_of(call.slot) {
        remove(fd);
    }
}

/// As [`part`]. Most descriptors are none of ours, and are closed without what this needs.
#[inline(never)]
fn remove_known(cell: &AtomicUsize, fd: i32, parting: Parting) {
    let word = cell.swap(0, Ordering::SeqCst);
    if word & TAG != EPOLL && !is_unconnected(word) {
        ops::process::closes();
    }
    errno::keep(|| forget(word, fd, parting));
}

/// Notes whether a connection that nobody has seen established, and that carried nothing, ever was.
fn note_connected(block: &Block, fd: i32) {
    if !stats::counts(block) {
        // SAFETY: the caller says that the descriptor still is the socket.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        if tcp::was_connected(socket) {
            block.raise(flag::CONNECTED);
        }
    }
}

/// Calls `visit` for each young connection: its descriptor, and what is known of it.
pub(crate) fn for_each_young(mut visit: impl FnMut(i32, Young)) {
    for fd in descriptors() {
        if let Some(young) = cell(fd).and_then(|cell| Young::of(cell.load(Ordering::SeqCst))) {
            visit(fd, young);
        }
    }
}

/// Whether a young connection is to be counted: a connect that failed is none.
pub(crate) fn counts(young: Young, fd: i32) -> bool {
    // SAFETY: a number; the kernel says whether it is open.
    let socket = || unsafe { BorrowedFd::borrow_raw(fd) };
    young.is_connected() || young.bytes(fd) != (0, 0) || tcp::was_connected(socket())
}

/// The process ends: it lets go of each of its connections, and visits those that nobody else has.
pub(crate) fn let_go_of_all(mut visit: impl FnMut(&'static Block)) {
    for_each(|slot, connection, _| {
        let block = connection.block;
        if !block.release(process::id()) {
            return;
        }
        // Other threads may use it to the very end: it is swept once the process is dead.
        block.hold(process::id());
        if !stats::counts(block)
            && let Some(fd) = descriptor_of(slot)
        {
            note_connected(block, fd);
        }
        visit(block);
    });
}

/// Drops an entry's reference. The end of a socket that the descriptor still is can be announced.
fn forget(word: usize, fd: i32, parting: Parting) {
    let open = parting != Parting::Unseen;
    if is_watched(word) {
        ops::epoll::unwatched(fd);
        return;
    }
    if word == 0 || is_unconnected(word) {
        return;
    }
    if let Some(young) = Young::of(word) {
        young.teach(fd);
        // Closed unseen, it can't be asked any more.
        if stats::are_wanted() && (open || young.is_connected()) && counts(young, fd) {
            stats::closed_young(young, fd);
        }
        if let Some(set) = young.set(fd) {
            ops::epoll::closed_young(set, fd, young);
        }
        return;
    }
    let _uninterrupted = Uninterrupted::begin();
    match decode(word) {
        None | Some(Entry::Young) => {}
        Some(Entry::Connection(slot)) => {
            // Before the last descriptor goes: whoever leaves after that ends the connection.
            slot.holds.fetch_add(USER, Ordering::SeqCst);
            if slot.holds.fetch_sub(FD, Ordering::SeqCst) / FD != 1 {
                if let Some(other) = descriptor_of(slot) {
                    ops::epoll::renamed(slot, fd, other, open);
                }
                slot.leave();
                return;
            }
            // SAFETY: counted in before its last descriptor went.
            let connection = unsafe { slot.connection() };
            if !ops::epoll::closed(slot, fd, open) {
                // Some set still knows the slot: counted in for ever, it is never used again.
                slot.holds.fetch_add(USER, Ordering::SeqCst);
            }
            let last = connection.block.release(process::id());
            if last {
                if open {
                    note_connected(connection.block, fd);
                }
                stats::closed(connection.block);
                connection.teach();
                if open && connection.is_active() {
                    connection.finish(fd);
                }
                slot.last.store(true, Ordering::SeqCst);
            }
            if parting != Parting::Stays {
                connection.close();
            }
            slot.leave();
        }
        Some(Entry::Listener(listener)) => {
            if listener.fds.fetch_sub(1, Ordering::SeqCst) == 1 {
                listener.withdraw();
            }
        }
        Some(Entry::Epoll(set)) => set.descriptor_closed(fd),
    }
}

/// A descriptor that is about to be made, counted already.
#[derive(Debug)]
pub(crate) struct Held {
    word: usize,
}

impl Held {
    /// The kernel has made it, as `new`, or has failed with −1.
    pub(crate) fn settle(self, new: i32) {
        errno::keep(|| {
            if new < 0 || !put(new, self.word) {
                forget(self.word, new, Parting::Unseen);
            } else if let Some(Entry::Epoll(set)) = decode(self.word) {
                set.is_known_as(new);
            }
        });
    }
}

/// Counts one more descriptor for what `old` is. `None` if that is nothing of ours, or has just been closed.
pub(crate) fn hold(old: i32) -> Option<Held> {
    if is_borrowed() {
        return None;
    }
    let word = cell(old)?.load(Ordering::Acquire);
    match decode(word)? {
        Entry::Young | Entry::Connection(_) => {
            let call = enter(old)?;
            let more = |held: u64| (held >= FD).then_some(held + FD);
            call.slot.holds.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).ok()?;
            return Some(Held { word: std::ptr::from_ref(call.slot).expose_provenance() });
        }
        Entry::Listener(listener) => {
            listener.fds.fetch_add(1, Ordering::SeqCst);
        }
        Entry::Epoll(set) => set.descriptor_added(),
    }
    Some(Held { word })
}

/// A descriptor of the connection in `slot`.
pub(crate) fn descriptor_of(slot: &'static Slot) -> Option<i32> {
    descriptors().find(|&fd| is_of(fd, slot))
}

/// `fd` while that is a descriptor of `connection`, or another one, if there is any: another thread may have closed it while the caller's call
/// went on, as it does in the kernel, and given the number to something else.
pub(crate) fn reach(connection: &Connection, fd: i32) -> i32 {
    let is_its = |&fd: &i32| {
        let word = cell(fd).map_or(0, |cell| cell.load(Ordering::SeqCst));
        matches!(decode(word), Some(Entry::Connection(slot)) if slot.has(connection))
    };
    if is_its(&fd) { fd } else { descriptors().find(is_its).unwrap_or(fd) }
}

/// A descriptor of `set`.
pub(crate) fn descriptor_of_set(set: &'static Set) -> Option<i32> {
    descriptors().find(|&fd| epoll_set(fd).is_some_and(|other| std::ptr::eq(other, set)))
}

/// Every descriptor that has an entry now.
pub(crate) fn descriptors() -> impl Iterator<Item = i32> {
    (0..HIGHEST.load(Ordering::SeqCst) as i32)
        .filter(|&fd| cell(fd).is_some_and(|cell| cell.load(Ordering::Relaxed) != 0))
}

/// A connection with a server there was made on `fd`, by connect or accept; or is being made, if it is not yet `connected`. True if
/// the socket may be reached by names that are not known as the connection's.
pub(crate) fn track(fd: i32, role: Role, service: Service, connected: bool) -> bool {
    ops::process::watch_forks();
    if is_borrowed() {
        return false;
    }
    let Some(cell) = cell_to_fill(fd) else { return false };
    let word = cell.load(Ordering::SeqCst);
    let is_shared = is_shared(word, fd);
    if !is_watched(word) {
        // What the number was before goes first: it has the same counters.
        add_other(fd);
    }
    let word = Young::new(fd, role, service, connected).word();
    HIGHEST.fetch_max(fd as usize + 1, Ordering::SeqCst);
    // A set may have become its watcher meanwhile.
    let before = cell.swap(word, Ordering::SeqCst);
    if is_watched(before) {
        ops::epoll::connects(fd);
    } else {
        forget(before, fd, Parting::Unseen);
    }
    is_shared
}

/// `fd` listens now. Announces its port, so that clients on this host look for us.
pub(crate) fn listening(fd: i32) {
    if !config::enabled() {
        return;
    }
    errno::keep(|| match cell(fd).and_then(|cell| decode(cell.load(Ordering::Acquire))) {
        // It did before: another listen(2) changes the backlog. Its name is the only one there can be.
        Some(Entry::Listener(listener)) if listener.service() == local_service(fd) => listener.announce(),
        _ => listener(fd),
    });
}

/// A connection was accepted as `accepted` on the listener `fd`: where it listens. The listener is made if the program got the socket from
/// elsewhere. `None` if it is of no interest.
pub(crate) fn service_of_listener(fd: i32, accepted: i32) -> Option<Service> {
    let cell = cell(fd)?;
    let word = cell.load(Ordering::Acquire);
    if let Some(Entry::Listener(listener)) = decode(word) {
        listener.accepts();
        return listener.service();
    }
    errno::keep(|| {
        if !listens(fd) {
            // Another thread has closed it since, and the number may be another connection's.
            return local_service(accepted);
        }
        let service = local_service(fd);
        let listener = Listener::create(service);
        let new = std::ptr::from_ref(listener).expose_provenance() | LISTENER;
        note_highest(fd);
        if cell.compare_exchange(word, new, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            forget(word, fd, Parting::Unseen);
            listener.announce();
        }
        service
    })
}

fn listens(fd: i32) -> bool {
    // SAFETY: a number; the kernel says what it is.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    rustix::net::sockopt::socket_acceptconn(socket) == Ok(true)
}

fn listener(fd: i32) {
    let listener = Listener::create(local_service(fd));
    listener.announce();
    put(fd, std::ptr::from_ref(listener).expose_provenance() | LISTENER);
}

/// Where the socket `fd` listens, if it is TCP, or an `AF_UNIX` stream of a name that is selected.
fn local_service(fd: i32) -> Option<Service> {
    // SAFETY: the program's call on this descriptor has just succeeded.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    if tcp::is_tcp(borrowed) {
        let address = rustix::net::getsockname(borrowed).ok()?;
        return Some(Service::Port(std::net::SocketAddr::try_from(address).ok()?.port()));
    }
    let settings = settings();
    if settings.unix.is_empty() || !settings.shm || !unix::is_stream(borrowed) {
        return None;
    }
    Name::of_socket(borrowed).filter(|name| settings.selects_unix(name)).map(Service::Unix)
}

/// Whether there never was an entry, nor a descriptor of this library's.
pub(crate) fn is_empty() -> bool {
    HIGHEST.load(Ordering::Relaxed) == 0 && internal::is_empty()
}

const _: () = assert!(align_of::<Slot>() > TAG && align_of::<Listener>() > TAG && align_of::<Set>() > TAG);

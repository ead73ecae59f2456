//! What is registered before it is worth a [`Member`]: sockets that have not connected, as nginx has those to its upstreams, and
//! young connections. The kernel does what the program asks, and the set keeps it, to make it a registration of the connection
//! as soon as there is one that may leave TCP.

use std::sync::atomic::Ordering;

use libc::epoll_event;
use rustix::fd::BorrowedFd;
use thallus_transport::reason::Reason;
use thallus_transport::settings::settings;
use thallus_transport::{tcp, unix};

use super::member::{EXCLUSIVE, Member, ONESHOT};
use super::members::{Early, Members};
use super::set::{self, Set};
use crate::table::{Slot, Young};
use crate::{config, errno, table};

/// Whether `fd`, which is no connection, may become one.
pub(super) fn may_connect(fd: i32) -> bool {
    if !config::enabled() || table::is_borrowed() {
        return false;
    }
    if table::is_unknown(fd) {
        errno::keep(|| {
            // SAFETY: a number; the kernel says whether it is a socket.
            let socket = unsafe { BorrowedFd::borrow_raw(fd) };
            // Made by another program, perhaps, or a copy, or AF_UNIX, of which nothing is known before.
            if fd >= 0 && (tcp::is_unconnected(socket) || may_become_unix(socket)) {
                table::discover_socket(fd);
            }
        });
    }
    table::is_socket(fd)
}

fn may_become_unix(socket: BorrowedFd<'_>) -> bool {
    let settings = settings();
    settings.shm && !settings.unix.is_empty() && unix::is_unconnected(socket)
}

/// `epoll_ctl(2)` for an unconnected socket; `kernel` is the original.
pub(super) fn control(
    epfd: i32,
    operation: i32,
    fd: i32,
    wanted: Option<(u32, u64)>,
    kernel: impl Fn(*mut epoll_event) -> i32,
) -> i32 {
    let mut asked = wanted.map(|(events, data)| epoll_event { events, u64: data });
    let event = asked.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
    let Some(set) = table::epoll_set(epfd).or_else(|| table::discover_epoll_set(epfd)) else {
        return kernel(event);
    };
    let Some(mut members) = set.lock() else {
        set.becomes_opaque();
        return kernel(event);
    };
    let result = kernel(event);
    match (operation, wanted) {
        _ if result != 0 => {}
        (libc::EPOLL_CTL_DEL, _) => {
            members.remove_early(fd);
        }
        (_, Some((events, data))) => {
            members.insert_early(set, fd, Early { events, data, generation: 0, spent: false });
            let unconnected = table::watch_socket(fd);
            drop(members);
            if !unconnected {
                // Another thread has connected it meanwhile, and has not seen this.
                errno::keep(|| become_member(set, fd));
            }
        }
        _ => {}
    }
    result
}

/// `epoll_ctl(2)` for a connection that is young, and stays so; `kernel` is the original. `None` if it has to grow up: for a
/// second set, for what the kernel disables by itself, or because a peer on another host may greet it.
pub(super) fn control_young(
    epfd: i32,
    operation: i32,
    fd: i32,
    wanted: Option<(u32, u64)>,
    kernel: impl Fn(*mut epoll_event) -> i32,
) -> Option<i32> {
    let young = table::young(fd)?;
    let mut asked = wanted.map(|(events, data)| epoll_event { events, u64: data });
    let plain = wanted.is_some_and(|(events, _)| events & (ONESHOT | EXCLUSIVE) == 0);
    let known = table::epoll_set(epfd);
    let at_home = young.set(fd).zip(known).is_some_and(|(its, set)| std::ptr::eq(its, set));
    match operation {
        libc::EPOLL_CTL_ADD if plain && !young.is_registered() && settings().verbs.peers.is_empty() => {}
        libc::EPOLL_CTL_MOD if plain && at_home => {}
        libc::EPOLL_CTL_DEL if at_home => {}
        _ => return None,
    }
    if table::is_borrowed() {
        return None;
    }
    let set = known.or_else(|| table::discover_epoll_set(epfd))?;
    let mut members = set.lock()?;
    // Another thread's call may make it grow up. From here on that waits for the lock, and then finds what is left below.
    let ours = if operation == libc::EPOLL_CTL_ADD {
        young.register(fd, set)
    } else {
        members.has_early(fd, young.generation())
    };
    if !ours {
        return None;
    }
    let result = kernel(asked.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut));
    match (operation, wanted) {
        (libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD, Some((events, data))) if result == 0 => {
            let generation = young.generation();
            members.insert_early(set, fd, Early { events, data, generation, spent: false });
        }
        (libc::EPOLL_CTL_ADD, _) => young.unregister(fd, false),
        (libc::EPOLL_CTL_DEL, _) if result == 0 => {
            members.remove_early(fd);
            young.unregister(fd, set.is_awaited());
        }
        _ => {}
    }
    Some(result)
}

/// A young connection has grown up to `slot`, in which the caller is counted in; it was `last` a registered one.
pub(crate) fn grown_up(fd: i32, last: Young, slot: &'static Slot) {
    let adopt = |set| adopt(set, fd, last.generation(), slot);
    let known = last.set(fd).map_or(Some(false), adopt).and_then(|found| {
        // Its number was given to another while it was being registered, or another thread tried to register it elsewhere.
        if found {
            Some(true)
        } else {
            set::all()?.into_iter().try_fold(false, |found, set| Some(found | adopt(set)?))
        }
    });
    if known.is_none() {
        // SAFETY: counted in.
        unsafe { slot.connection() }.pin(fd, Reason::UnsupportedCall);
    }
}

/// A young connection, registered in `set`, is closed.
pub(crate) fn closed_young(set: &'static Set, fd: i32, young: Young) {
    let forgets = |set: &'static Set| {
        set.lock().is_some_and(|mut members| {
            let known = members.has_early(fd, young.generation());
            if known {
                members.remove_early(fd);
            }
            known
        })
    };
    // Two threads may have registered it at the same time.
    if !forgets(set) {
        set::all().unwrap_or_default().into_iter().any(forgets);
    }
}

/// A socket that sets have registered connects.
pub(crate) fn connects(fd: i32) {
    for set in set::all().unwrap_or_default() {
        become_member(set, fd);
    }
}

/// Such a socket is closed without having connected.
pub(crate) fn unwatched(fd: i32) {
    for set in set::all().unwrap_or_default() {
        if let Some(mut members) = set.lock() {
            members.remove_early(fd);
        }
    }
}

fn become_member(set: &'static Set, fd: i32) {
    if set.lock().is_some_and(|members| members.has_early(fd, 0))
        // Grows up, for which the set's lock must be free.
        && let Some(call) = table::enter(fd)
    {
        adopt(set, fd, 0, call.slot);
    }
}

/// Makes what `set` has as `fd`, with this generation, a member for `slot`, in which the caller is counted in. Whether there was
/// such a thing; `None` if a signal handler interrupts a change of the set.
fn adopt(set: &'static Set, fd: i32, generation: u32, slot: &'static Slot) -> Option<bool> {
    let mut members = set.lock()?;
    let Some(early) = members.early.get(&fd).copied().filter(|early| early.generation == generation) else {
        return Some(false);
    };
    members.remove_early(fd);
    let Early { events, data, spent, .. } = early;
    // SAFETY: counted in.
    let connection = unsafe { slot.connection() };
    if events & EXCLUSIVE != 0 {
        connection.pin(fd, Reason::Exclusive);
    }
    let mut member = Member::new(slot, fd, events, data, false);
    member.spent = spent;
    members.take_in(set, fd, member);
    members.settle(set, fd);
    members.sync(set, fd);
    Some(true)
}

impl Members {
    fn insert_early(&mut self, set: &'static Set, fd: i32, early: Early) {
        self.remove_stranger(fd);
        self.remove_early(fd);
        self.make_way(set, early.data);
        self.graves.unbury(early.data);
        self.others.add(early.data, fd);
        if early.events & ONESHOT != 0 {
            set.one_shots.store(true, Ordering::SeqCst);
        }
        self.early.insert(fd, early);
    }

    fn remove_early(&mut self, fd: i32) {
        if let Some(early) = self.early.remove(&fd) {
            self.others.remove(early.data, fd);
        }
    }

    fn has_early(&self, fd: i32, generation: u32) -> bool {
        self.early.get(&fd).is_some_and(|early| early.generation == generation)
    }
}

//! Sleeping on a set and on the process's ear.
//!
//! The first set of a process that sleeps so has, with the ear, a set of this library's around both, in which the ear is edge-triggered: so
//! what it hears need not be taken out each time, and one wait asks for both. Any other set is polled beside the ear.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use libc::{epoll_event, pollfd, sigset_t};
use rustix::event::epoll;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use thallus_transport::chime::Claim;
use thallus_transport::process;
use thallus_transport::uninterrupted::Descriptor;

use super::set::Set;
use super::waiting::kernel;
use crate::ops::poll;
use crate::table;

/// What has ended a sleep.
#[derive(Clone, Copy, Debug)]
pub(super) struct Told {
    pub(super) set: bool,
    /// A bell has been heard.
    pub(super) ear: bool,
}

/// The set around a set and the ear.
#[derive(Debug)]
struct Both {
    /// Whose ear.
    pid: u32,
    inner: &'static Set,
    /// [`Set::life`] of `inner`.
    life: u32,
    outer: Arc<Descriptor>,
}

/// The only one, so that descriptors are few. Never waited for: who finds it locked polls.
static BOTH: Mutex<Option<Both>> = Mutex::new(None);

/// Its descriptor; −1 before there is one.
static OUTER: AtomicI32 = AtomicI32::new(-1);

/// What the outer set has of its two members (`epoll_data`).
const SET: u64 = 0;
const EAR: u64 = 1;

/// The right to sleep on a set and on the ear.
#[derive(Debug)]
pub(super) struct Ear {
    claim: Claim,
    /// Around both, and the [`Set::life`] for which it was made.
    outer: Option<(Arc<Descriptor>, u32)>,
}

impl Ear {
    /// As [`Claim::take`], before any registration of `set`, whose descriptor is `epfd`, is armed.
    pub(super) fn take(set: &'static Set, epfd: i32) -> Option<Self> {
        let claim = Claim::take_for_edges()?;
        let outer = around(set, epfd, &claim);
        if outer.is_none() {
            claim.hush();
        }
        Some(Self { claim, outer })
    }

    /// Sleeps until the set has something to report, or a bell is heard, which `several` connections may ring. The thread is counted
    /// among the set's sleepers.
    pub(super) fn sleep(
        &self,
        set: &'static Set,
        epfd: i32,
        several: bool,
        timeout: Option<Duration>,
        mask: *const sigset_t,
    ) -> Result<Told, Errno> {
        // Who closes the set's last descriptor ends its life, and then rouses sleepers: either this is seen here, or they have seen this one.
        let outer = self.outer.as_ref().filter(|(_, life)| set.life.load(Ordering::SeqCst) == *life);
        let Some((outer, _)) = outer else { return listen_by_poll(epfd, &self.claim, timeout, mask) };
        let mut events = [epoll_event { events: 0, u64: 0 }; 2];
        let count = match kernel(outer.as_fd().as_raw_fd(), &mut events, timeout, mask) {
            Err(Errno::BADF | Errno::INVAL) => {
                lose(outer);
                return listen_by_poll(epfd, &self.claim, timeout, mask);
            }
            told => told?,
        };
        let told = |of| events[..count].iter().any(|event| event.u64 == of);
        let told = Told { set: told(SET), ear: told(EAR) };
        if told.ear {
            self.claim.hear_edge(several);
        }
        Ok(told)
    }
}

/// The set as it is: a poll keeps it open. Bells that were left end it at once.
fn listen_by_poll(
    epfd: i32,
    claim: &Claim,
    timeout: Option<Duration>,
    mask: *const sigset_t,
) -> Result<Told, Errno> {
    let mut fds = [epfd, claim.fd()].map(|fd| pollfd { fd, events: libc::POLLIN, revents: 0 });
    poll::kernel(&mut fds, timeout, mask)?;
    let [set, ear] = fds.map(|fd| fd.revents != 0);
    if ear {
        claim.hear();
    }
    Ok(Told { set, ear })
}

/// The set around `set` and the ear. `None` if another set has it, or there can be none.
fn around(set: &'static Set, epfd: i32, claim: &Claim) -> Option<(Arc<Descriptor>, u32)> {
    let life = set.life.load(Ordering::SeqCst);
    let mut both = BOTH.try_lock().ok()?;
    if let Some(both) = &*both
        && both.pid == process::id()
        && both.inner.life.load(Ordering::SeqCst) == both.life
    {
        return (std::ptr::eq(both.inner, set) && both.life == life).then(|| (both.outer.clone(), life));
    }
    let outer = Arc::new(made(epfd, claim).ok()?);
    OUTER.store(outer.as_fd().as_raw_fd(), Ordering::Relaxed);
    *both = Some(Both { pid: process::id(), inner: set, life, outer: outer.clone() });
    Some((outer, life))
}

/// The descriptor of the outer set is that no more: a call that no hook has seen closed it, and its number may be another's.
#[cold]
fn lose(outer: &Arc<Descriptor>) {
    OUTER.store(-1, Ordering::Relaxed);
    // Never closed.
    std::mem::forget(outer.clone());
    if let Ok(mut both) = BOTH.try_lock() {
        *both = None;
    }
}

fn made(epfd: i32, claim: &Claim) -> Result<Descriptor, Errno> {
    let outer = Descriptor::from(table::place(epoll::create(epoll::CreateFlags::CLOEXEC)?)?);
    // SAFETY: the program waits on the one, and the other is claimed.
    let [inner, ear] = [epfd, claim.fd()].map(|fd| unsafe { BorrowedFd::borrow_raw(fd) });
    epoll::add(&outer, inner, epoll::EventData::new_u64(SET), epoll::EventFlags::IN)?;
    epoll::add(&outer, ear, epoll::EventData::new_u64(EAR), epoll::EventFlags::IN | epoll::EventFlags::ET)?;
    Ok(outer)
}

/// This module's descriptor, which may be a parent's.
pub(super) fn internal_fd() -> Option<i32> {
    Some(OUTER.load(Ordering::Relaxed)).filter(|&fd| fd >= 0)
}

//! The table over a fork.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard};

use thallus_transport::arena::Chunk;
use thallus_transport::connection::Connection;
use thallus_transport::uninterrupted::Uninterrupted;
use thallus_transport::verbs::device;
use thallus_transport::{alarm, chime, process};

use super::slot::{self, FD, Slot};
use super::{Young, blocks, cell, descriptors, for_each_young, grow_up, released, young};
use crate::{ops, stats};

/// One thread forks at a time.
static FORKING: Mutex<()> = Mutex::new(());

/// What a fork must not find locked by a thread that the child does not have.
#[derive(Debug)]
pub(crate) struct Quiet {
    /// The process had one thread: whatever calls are counted are its own. A signal handler that forks has interrupted them, and they
    /// return in the child as well.
    pub(crate) alone: bool,
    // Unlocked in this order; signals come last.
    /// The epoll sets' locks.
    pub(crate) epoll: Option<ops::epoll::Quiet>,
    /// All slots, and the free ones.
    slots: [MutexGuard<'static, Vec<&'static Slot>>; 2],
    _chunks: MutexGuard<'static, Vec<&'static Chunk>>,
    _totals: stats::Quiet,
    _mouths: chime::Quiet,
    _alarms: alarm::Quiet,
    moved: MutexGuard<'static, Vec<(u32, &'static Slot)>>,
    visited: Visited,
    /// None if a thread has been opening an RDMA device for too long.
    devices: Option<device::Quiet>,
    _forking: MutexGuard<'static, ()>,
    _uninterrupted: Uninterrupted,
}

/// Slots that [`Quiet::for_each`] has counted itself in on. Leaving may need the very locks, so it comes after them.
#[derive(Debug, Default)]
struct Visited(Vec<&'static Slot>);

impl Drop for Visited {
    fn drop(&mut self) {
        for slot in self.0.drain(..) {
            slot.leave();
        }
    }
}

impl Quiet {
    /// Calls `visit` for each connection that this process has.
    pub(crate) fn for_each(&mut self, mut visit: impl FnMut(&'static Slot, &'static Connection)) {
        for slot in self.slots[0].iter() {
            self.visited.0.push(slot);
            if let Some(connection) = slot.count_in() {
                visit(slot, connection);
            }
        }
    }

    /// In a forked child: the other threads are gone, and so are their calls.
    pub(crate) fn only_one_thread_left(&mut self) {
        if self.devices.is_none() {
            device::overtaken();
        }
        if !self.alone {
            self.visited.0.clear();
            self.moved.clear();
        }
        // Made by a thread that the fork overtook: the parent does not know that this process has it, too.
        for fd in descriptors() {
            if let Some(cell) = cell(fd).filter(|cell| Young::of(cell.load(Ordering::SeqCst)).is_some()) {
                cell.store(0, Ordering::SeqCst);
            }
        }
        released::forget();
        for slot in self.slots[0].iter() {
            if !self.alone {
                slot.holds.fetch_and(!(FD - 1), Ordering::SeqCst);
            }
            slot.used.store(false, Ordering::Relaxed);
        }
    }
}

/// Makes every young connection grow up: only a block has holders.
pub(crate) fn grow_all_up() {
    for_each_young(grow_up);
}

/// Locks the table's lists for a fork. Every connection is grown up by then.
pub(crate) fn quiesce() -> Option<Quiet> {
    // Longer than a fork: earlier children may end meanwhile.
    let uninterrupted = Uninterrupted::begin_ignoring();
    let forking = FORKING.lock().ok()?;
    // Before the others: whoever opens a device runs hooks, which may need them.
    let devices = device::quiesce();
    grow_all_up();
    let epoll = ops::epoll::quiesce();
    // Before the slots, as `stats::write` does.
    let totals = stats::quiesce()?;
    let moved = young::quiesce()?;
    Some(Quiet {
        alone: process::is_alone(),
        epoll,
        moved,
        slots: slot::quiesce()?,
        _chunks: blocks::quiesce()?,
        _totals: totals,
        _mouths: chime::quiesce()?,
        _alarms: alarm::quiesce()?,
        visited: Visited::default(),
        devices,
        _forking: forking,
        _uninterrupted: uninterrupted,
    })
}

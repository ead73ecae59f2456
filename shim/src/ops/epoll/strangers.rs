//! What is in a set beside the connections that it looks after: the kernel's reports name only their `epoll_data`, and one that says
//! nothing new of a connection is either a stranger's, or stale: another thread has done all that it announced, and to be told of
//! it once more would have two threads serve one connection.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use libc::epoll_event;

use super::set::{Members, Number, Set};

/// The descriptors in a set that are no members of it, as far as the hooks have seen them come, and their `epoll_data`. One that is
/// closed may stay until its number has another use in the set: then a stale report is told once more.
#[derive(Debug, Default)]
pub(super) struct Strangers(HashMap<i32, u64, BuildHasherDefault<Number>>);

impl Strangers {
    /// One is in the set, or named anew.
    pub(super) fn add(&mut self, fd: i32, data: u64) {
        self.0.insert(fd, data);
    }

    pub(super) fn remove(&mut self, fd: i32) {
        if !self.0.is_empty() {
            self.0.remove(&fd);
        }
    }

    /// Looks through all: asked for a report that nothing else explains.
    fn have(&self, data: u64) -> bool {
        self.0.values().any(|&other| other == data)
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

impl Set {
    /// `epoll_ctl(2)` for what is no connection; `kernel` is the original, and `event` the program's, of which `wanted` is a copy.
    pub(super) fn control_stranger(
        &'static self,
        operation: i32,
        fd: i32,
        wanted: Option<(u32, u64)>,
        kernel: impl FnOnce() -> i32,
    ) -> i32 {
        let Some(mut members) = self.lock() else {
            self.becomes_opaque();
            return kernel();
        };
        members.control_stranger(operation, fd, wanted, kernel)
    }
}

impl Members {
    /// As [`Set::control_stranger`]. The kernel is told under the lock, so that a wait beside us never meets a report that it takes for
    /// stale.
    pub(super) fn control_stranger(
        &mut self,
        operation: i32,
        fd: i32,
        wanted: Option<(u32, u64)>,
        kernel: impl FnOnce() -> i32,
    ) -> i32 {
        let result = kernel();
        match (operation, wanted) {
            _ if result != 0 => {}
            (libc::EPOLL_CTL_DEL, _) => self.strangers.remove(fd),
            (_, Some((_, data))) => {
                self.strangers.add(fd, data);
                self.graves.unbury(data);
            }
            _ => {}
        }
        result
    }

    /// Whether a report with the data of `event`, of which nothing in the set knows the reason, may be on something else than what
    /// is known by `named`.
    pub(super) fn is_strange(&self, set: &Set, event: epoll_event, has_member: bool) -> bool {
        let data = event.u64;
        let is_early = || self.early.values().any(|early| early.data == data);
        !self.graves.have(data) && (!has_member || set.is_opaque() || self.strangers.have(data) || is_early())
    }
}

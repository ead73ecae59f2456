//! What is in a set beside the connections that it looks after: the kernel's reports name only their `epoll_data`, and one that says
//! nothing new of a connection is either a stranger's, or stale: another thread has done all that it announced, and to be told of
//! it once more would have two threads serve one connection.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use libc::epoll_event;

use super::members::{Members, Number};
use super::set::Set;

/// The descriptors in a set that are no members of it, as far as the hooks have seen them come, with their masks and their `epoll_data`.
/// One that is closed may stay until its number has another use in the set: then a stale report is told once more.
#[derive(Debug, Default)]
pub(super) struct Strangers(HashMap<i32, (u32, u64), BuildHasherDefault<Number>>);

impl Strangers {
    pub(super) fn get(&self, fd: i32) -> Option<(u32, u64)> {
        self.0.get(&fd).copied()
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
        members.control_stranger(self, operation, fd, wanted, kernel)
    }
}

impl Members {
    /// Something that is no member is in the set, or asked for anew.
    pub(super) fn add_stranger(&mut self, set: &'static Set, fd: i32, events: u32, data: u64) {
        let before = self.strangers.0.insert(fd, (events, data)).map(|(_, before)| before);
        if before != Some(data) {
            if let Some(before) = before {
                self.others.remove(before, fd);
            }
            self.make_way(set, data);
            self.others.add(data, fd);
        }
        self.graves.unbury(data);
    }

    pub(super) fn remove_stranger(&mut self, fd: i32) {
        if !self.strangers.0.is_empty()
            && let Some((_, data)) = self.strangers.0.remove(&fd)
        {
            self.others.remove(data, fd);
        }
    }

    /// As [`Set::control_stranger`]. The kernel is told under the lock, so that a wait beside us never meets a report that it takes for
    /// stale.
    pub(super) fn control_stranger(
        &mut self,
        set: &'static Set,
        operation: i32,
        fd: i32,
        wanted: Option<(u32, u64)>,
        kernel: impl FnOnce() -> i32,
    ) -> i32 {
        let result = kernel();
        match (operation, wanted) {
            _ if result != 0 => {}
            (libc::EPOLL_CTL_DEL, _) => self.remove_stranger(fd),
            (_, Some((events, data))) => self.add_stranger(set, fd, events, data),
            _ => {}
        }
        result
    }

    /// Whether a report with the data of `event`, of which nothing in the set knows the reason, may be on something else than what
    /// is known by `named`.
    pub(super) fn is_strange(&self, set: &Set, event: epoll_event, has_member: bool) -> bool {
        let data = event.u64;
        !self.graves.have(data) && (!has_member || set.is_opaque() || !self.others.of(data).is_empty())
    }
}

//! Reports that come too late.

use std::collections::HashMap;

/// Registrations that were removed while some thread may have had the kernel's report on them already. A one-shot
/// registration is reported to one thread only, which may close the connection, and free what its `epoll_data` names,
/// before the other one gets to see its report.
#[derive(Debug, Default)]
pub(super) struct Graves {
    clock: u64,
    /// When each of the threads asked the kernel that have not sorted out its answer yet.
    lookers: Vec<u64>,
    /// The `epoll_data` of what was removed since, and when.
    buried: HashMap<u64, u64>,
}

impl Graves {
    /// A thread asks the kernel.
    pub(super) fn begin(&mut self) -> u64 {
        self.clock += 1;
        self.lookers.push(self.clock);
        self.clock
    }

    /// The thread that [`Self::begin`] gave this number has sorted out its answer. `rests`: some thread rests that is none of these, and may
    /// have such a report, too.
    pub(super) fn end(&mut self, look: u64, rests: bool) {
        self.lookers.retain(|&other| other != look);
        if self.buried.is_empty() || rests {
            return;
        }
        match self.lookers.iter().min() {
            Some(&oldest) => self.buried.retain(|_, &mut when| when >= oldest),
            None => self.buried.clear(),
        }
    }

    /// In a forked child, which has none of the threads that asked.
    pub(super) fn forked(&mut self) {
        self.lookers.clear();
    }

    /// Whether some thread has asked the kernel, and has not sorted out its answer yet.
    pub(super) fn is_looked_for(&self) -> bool {
        !self.lookers.is_empty()
    }

    /// Something with `data` is removed. `rests`: as for [`Self::end`].
    pub(super) fn bury(&mut self, data: u64, rests: bool) {
        if rests || !self.lookers.is_empty() {
            self.buried.insert(data, self.clock);
        }
    }

    /// Whether a report with `data` is on a registration that is no more.
    pub(super) fn have(&self, data: u64) -> bool {
        self.buried.contains_key(&data)
    }

    /// A report with `data` may be on something else from now on.
    pub(super) fn unbury(&mut self, data: u64) {
        if !self.buried.is_empty() {
            self.buried.remove(&data);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reports_asked_for_before_come_too_late() {
        let mut graves = Graves::default();
        graves.bury(1, false);
        assert!(!graves.have(1), "nobody has asked");
        let look = graves.begin();
        graves.bury(1, false);
        assert!(graves.have(1));
        graves.end(look, false);
        assert!(!graves.have(1), "whoever had asked has sorted it out");
    }

    #[test]
    fn a_child_waits_for_no_thread_of_its_parents() {
        let mut graves = Graves::default();
        graves.begin();
        graves.forked();
        assert!(!graves.is_looked_for());
        let own = graves.begin();
        graves.bury(1, false);
        graves.end(own, false);
        assert!(!graves.have(1));
    }
}

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
    /// The `epoll_data` of what was removed since.
    buried: HashMap<u64, Grave>,
}

#[derive(Clone, Copy, Debug)]
struct Grave {
    /// The last look that had begun by then.
    when: u64,
    /// A connection has got the name since.
    is_reused: bool,
}

impl Graves {
    /// A thread asks the kernel.
    pub(super) fn begin(&mut self) -> u64 {
        self.clock += 1;
        self.lookers.push(self.clock);
        self.clock
    }

    /// The last look that has begun.
    pub(super) fn looks(&self) -> u64 {
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
            Some(&oldest) => self.buried.retain(|_, grave| grave.when >= oldest),
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
            self.buried.insert(data, Grave { when: self.clock, is_reused: false });
        }
    }

    /// Whether a report with `data` is on a registration that is no more.
    pub(super) fn have(&self, data: u64) -> bool {
        self.buried.get(&data).is_some_and(|grave| !grave.is_reused)
    }

    /// Whether a report with `data`, for which the kernel was asked in this `look`, or nobody knows when, may be on a registration that is no
    /// more, or on the connection that has its name now.
    pub(super) fn are_mixed(&self, data: u64, look: Option<u64>) -> bool {
        if self.buried.is_empty() {
            return false;
        }
        let reused = self.buried.get(&data).filter(|grave| grave.is_reused);
        reused.is_some_and(|grave| look.is_none_or(|look| look <= grave.when))
    }

    /// A connection gets the name `data`. Where there are `one_shots`, a thread that has an older report must not take it for this one's: who was
    /// told of this one believes that nobody else is.
    pub(super) fn reuse(&mut self, data: u64, one_shots: bool) {
        if !one_shots {
            return self.unbury(data);
        }
        if !self.buried.is_empty()
            && let Some(grave) = self.buried.get_mut(&data)
        {
            grave.is_reused = true;
        }
    }

    /// A report with `data` may be on something else from now on.
    pub(super) fn unbury(&mut self, data: u64) {
        if !self.buried.is_empty() {
            self.buried.remove(&data);
        }
    }
}

/// Which reports of a one-shot registration that is on TCP have been taken for its by somebody else already: the kernel has been made to
/// report it once more, because a thread had a report that may have been on what had its name before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Doubt {
    /// It has been made to since the program has asked.
    is_renewed: bool,
    /// The last look that had begun when the program asked anew, of one that had been renewed before: that look, and older ones, may have the
    /// second report still, and the program has been told by the first.
    until: Option<u64>,
}

impl Doubt {
    /// The kernel is made to report it once more.
    pub(super) fn renew(&mut self) {
        self.is_renewed = true;
    }

    /// Whether it has been since the program has asked.
    pub(super) fn is_renewed(&self) -> bool {
        self.is_renewed
    }

    /// The program asks anew. `rests`: as for [`Graves::end`].
    pub(super) fn asked(&mut self, graves: &Graves, rests: bool) {
        let is_held = |until| rests || graves.lookers.iter().any(|&look| look <= until);
        self.until = (self.is_renewed || self.until.is_some_and(is_held)).then_some(graves.clock);
        self.is_renewed = false;
    }

    /// Whether a report for which the kernel was asked in this `look`, or nobody knows when, may be such a one.
    pub(super) fn is_on(&self, look: Option<u64>) -> bool {
        self.until.is_some_and(|until| look.is_none_or(|look| look <= until))
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
    fn where_there_are_one_shots_a_name_that_is_used_again_is_doubtful_to_older_looks_alone() {
        let mut graves = Graves::default();
        let [older, old] = [graves.begin(), graves.begin()];
        graves.bury(1, false);
        graves.reuse(1, true);
        let new = graves.begin();
        assert!(!graves.have(1));
        assert_eq!(
            [Some(older), Some(old), Some(new), None].map(|look| graves.are_mixed(1, look)),
            [true, true, false, true]
        );
        assert!(!graves.are_mixed(2, Some(old)));
        graves.end(older, false);
        graves.end(old, false);
        assert!(graves.buried.is_empty());
        let look = graves.begin();
        graves.bury(1, false);
        graves.reuse(1, false);
        assert!(!graves.are_mixed(1, Some(look)));
    }

    #[test]
    fn what_has_been_renewed_is_in_doubt_until_older_looks_have_ended() {
        let (mut graves, mut doubt) = (Graves::default(), Doubt::default());
        let old = graves.begin();
        doubt.asked(&graves, false);
        assert!(!doubt.is_on(Some(old)) && !doubt.is_on(None), "the kernel reports it once");
        doubt.renew();
        assert!(doubt.is_renewed());
        doubt.asked(&graves, false);
        let new = graves.begin();
        assert!(!doubt.is_renewed());
        assert_eq!([Some(old), Some(new), None].map(|look| doubt.is_on(look)), [true, false, true]);
        // The old look may have it through any number of turns.
        doubt.asked(&graves, false);
        assert_eq!([Some(old), Some(new)].map(|look| doubt.is_on(look)), [true, true]);
        graves.end(old, false);
        doubt.asked(&graves, true);
        assert!(doubt.is_on(None), "somebody rests");
        graves.end(new, false);
        doubt.asked(&graves, false);
        assert!(!doubt.is_on(None));
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

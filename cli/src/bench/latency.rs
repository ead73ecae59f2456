//! How long round trips take: some of them are timed, because a look at the clock takes as long as a tenth of the shortest.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Of so many round trips one is timed.
pub(super) const SAMPLED: u64 = 16;
/// Longest time that is told apart from longer ones, in nanoseconds.
const LONGEST: u64 = 60_000_000_000;
/// Decimal digits that times are told apart by.
const DIGITS: u8 = 2;

/// Times of round trips.
#[derive(Debug)]
pub(super) struct Latency(Histogram<u64>);

/// The same as a process reports it, and as it is in the JSON: nanoseconds, and how many round trips took so long (two digits
/// are right), shortest first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Times(pub(super) Vec<(u64, u64)>);

impl Latency {
    /// None yet.
    pub(super) fn new() -> Self {
        Self(Histogram::new_with_bounds(1, LONGEST, DIGITS).expect("the bounds are constants, and sensible"))
    }

    /// Notes the round trip that began at `start` and has just ended.
    pub(super) fn note(&mut self, start: Instant) {
        self.0.saturating_record(u64::try_from(start.elapsed().as_nanos()).unwrap_or(LONGEST).max(1));
    }

    pub(super) fn times(&self) -> Times {
        Times(self.0.iter_recorded().map(|step| (step.value_iterated_to(), step.count_at_value())).collect())
    }
}

impl Times {
    /// Those of several measurements together.
    pub(super) fn together<'a>(all: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut sum = std::collections::BTreeMap::new();
        for &(time, count) in all.into_iter().flat_map(|times| &times.0) {
            *sum.entry(time).or_default() += count;
        }
        Self(sum.into_iter().collect())
    }

    /// The time that a part `share` of the round trips does not exceed; `None` without any.
    pub(super) fn quantile(&self, share: f64) -> Option<Duration> {
        let points = self.cumulated();
        let at = points.iter().find(|(_, below)| *below >= share).or(points.last())?;
        Some(Duration::from_nanos(at.0))
    }

    /// Nanoseconds, and the share of round trips that took at most so long.
    pub(super) fn cumulated(&self) -> Vec<(u64, f64)> {
        let all: u64 = self.0.iter().map(|&(_, count)| count).sum();
        let mut below = 0;
        let step = |&(time, count): &(u64, u64)| {
            below += count;
            (time, below as f64 / all as f64)
        };
        self.0.iter().map(step).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_all_measurements_together() {
        let (short, long) = (Times(vec![(10, 3), (20, 1)]), Times(vec![(20, 3), (1000, 1)]));
        let all = Times::together([&short, &long]);
        assert_eq!(all.0, [(10, 3), (20, 4), (1000, 1)]);
        let nanos = |share| all.quantile(share).unwrap().as_nanos();
        assert_eq!(
            [nanos(0.0), nanos(0.3), nanos(0.5), nanos(0.8), nanos(0.99), nanos(1.0)],
            [10, 10, 20, 20, 1000, 1000]
        );
        assert_eq!(Times::default().quantile(0.5), None);
    }

    #[test]
    fn what_is_noted_is_told_with_two_digits() {
        let mut latency = Latency::new();
        latency.note(Instant::now() - Duration::from_millis(500));
        latency.note(Instant::now() - Duration::from_secs(500));
        let times = latency.times();
        let nanos: Vec<u64> = times.0.iter().map(|&(time, _)| time).collect();
        assert!((499_000_000..520_000_000).contains(&nanos[0]), "{nanos:?}");
        assert!((LONGEST..LONGEST / 100 * 102).contains(&nanos[1]), "{nanos:?}");
    }
}

//! Numbers that have been used.

use std::collections::BTreeMap;

/// As ranges, from the first to the last of each: numbers that follow each other take no more than one does.
#[derive(Debug, Default)]
pub(crate) struct Numbers(BTreeMap<u64, u64>);

impl Numbers {
    pub(crate) fn contains(&self, number: u64) -> bool {
        self.0.range(..=number).next_back().is_some_and(|(_, last)| *last >= number)
    }

    pub(crate) fn insert(&mut self, number: u64) {
        if self.contains(number) {
            return;
        }
        let range_before = self.0.range(..number).next_back();
        let joined = range_before.filter(|(_, last)| **last + 1 == number).map(|(first, _)| *first);
        let behind = number.checked_add(1).and_then(|behind| self.0.remove(&behind));
        self.0.insert(joined.unwrap_or(number), behind.unwrap_or(number));
    }

    #[cfg(test)]
    pub(crate) fn ranges(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_any_order_become_one_range() {
        let mut numbers = Numbers::default();
        for number in [5, 1, 3, 3, 2, u64::MAX, 0, u64::MAX - 1] {
            assert_eq!(numbers.contains(number), number == 3 && numbers.0.len() == 3);
            numbers.insert(number);
            assert!(numbers.contains(number));
        }
        assert_eq!(numbers.0, [(0, 3), (5, 5), (u64::MAX - 1, u64::MAX)].into());
        numbers.insert(4);
        assert_eq!(numbers.0, [(0, 5), (u64::MAX - 1, u64::MAX)].into());
        assert!(!numbers.contains(6) && !numbers.contains(u64::MAX - 2));
        fastrand::seed(7);
        let mut all: Vec<u64> = (0..1_000).collect();
        fastrand::shuffle(&mut all);
        all.into_iter().for_each(|number| numbers.insert(number));
        assert_eq!(numbers.ranges(), 2);
    }
}

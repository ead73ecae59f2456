//! What was measured, and what follows from it.

use serde_json::{Value, json};

use super::plan::{Case, OURS, WAYS, Way};
use crate::bench::counters::Counters;
use crate::bench::machine::Machine;
use crate::bench::report::Spread;

/// One case by all ways.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) case: Case,
    pub(super) rows: u64,
    /// Of the result as Thallus sends it.
    pub(super) bytes: u64,
    pub(super) checksum: String,
    /// By way, one for each round.
    pub(super) samples: [Vec<Sample>; WAYS.len()],
    pub(super) memcpy: Vec<Memcpy>,
}

/// One client's times, in seconds.
#[derive(Debug)]
pub(super) struct Sample {
    /// Of the first result on the connection.
    pub(super) first: f64,
    /// Of the others.
    pub(super) warm: Vec<f64>,
    /// Of the client's library, if it had one.
    pub(super) counters: Option<Counters>,
    /// Share of the last result's batches that the server lent.
    pub(super) lent: f64,
}

/// The same bytes copied within the client's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memcpy {
    pub(super) bytes: u64,
    pub(super) seconds: f64,
}

/// A case in which Thallus was slower than something else.
#[derive(Debug)]
pub(super) struct Loss<'a> {
    pub(super) measured: &'a Measured,
    pub(super) to: Way,
    /// The other's time ÷ ours.
    pub(super) ratio: f64,
}

impl Measured {
    fn samples(&self, way: Way) -> &[Sample] {
        let index = WAYS.iter().position(|other| *other == way).expect("every way is one of them");
        &self.samples[index]
    }

    /// Seconds of a result on a connection that has been used before: of each round the median, of these median and spread.
    pub(super) fn seconds(&self, way: Way) -> Option<Spread> {
        let warm = |sample: &Sample| Some(Spread::of(sample.warm.iter().copied())?.median);
        Spread::of(self.samples(way).iter().filter_map(warm))
    }

    /// Seconds of the first result on a connection.
    fn first(&self, way: Way) -> Option<Spread> {
        Spread::of(self.samples(way).iter().map(|sample| sample.first))
    }

    /// Bytes of the result each second.
    pub(super) fn rate(&self, way: Way) -> Option<f64> {
        Some(self.bytes as f64 / self.seconds(way)?.median)
    }

    /// Bytes copied each second within memory.
    pub(super) fn memcpy_rate(&self) -> Option<f64> {
        let rate = |copy: &Memcpy| copy.bytes as f64 / copy.seconds;
        Some(Spread::of(self.memcpy.iter().filter(|copy| copy.seconds > 0.0).map(rate))?.median)
    }

    /// How many times as long `way` takes as Thallus does.
    pub(super) fn ratio(&self, way: Way) -> Option<f64> {
        Some(self.seconds(way)?.median / self.seconds(OURS)?.median)
    }

    /// Which path the clients' connections took.
    pub(super) fn path(&self, way: Way) -> String {
        let samples = self.samples(way);
        let mut sum = Counters::default();
        let counted: Vec<_> = samples.iter().filter_map(|sample| sample.counters.as_ref()).collect();
        if counted.is_empty() {
            return "TCP, without the library".to_owned();
        }
        counted.iter().for_each(|counters| sum.add(counters));
        let reasons: Vec<_> =
            sum.not_upgraded.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
        let upgraded = counted.iter().filter(|counters| counters.upgraded() > 0).count();
        let lent = Spread::of(samples.iter().map(|sample| sample.lent)).map_or(0.0, |lent| lent.median);
        let lent =
            if lent > 0.0 { format!(", {:.0} % of the batches lent", 100.0 * lent) } else { String::new() };
        let text = format!(
            "{upgraded} of {} upgraded, {:.0} % of the bytes in the stream{lent}",
            samples.len(),
            100.0 * sum.ring_share()
        );
        if reasons.is_empty() { text } else { format!("{text} ({})", reasons.join(", ")) }
    }

    /// Whether all of a way's connections left TCP, and none came back.
    pub(super) fn moved(&self, way: Way) -> bool {
        self.samples(way).iter().all(|sample| {
            sample.counters.as_ref().is_some_and(|counters| counters.all_left(counters.upgraded().max(1)))
        })
    }
}

/// Where Thallus is slower than any way over TCP, the worst first.
pub(super) fn losses(results: &[Measured]) -> Vec<Loss<'_>> {
    let over_tcp = || WAYS.into_iter().filter(|way| !way.library);
    let against = |measured, to| Some((measured, to, Measured::ratio(measured, to)?));
    let mut losses: Vec<_> = results
        .iter()
        .flat_map(|measured| over_tcp().filter_map(move |to| against(measured, to)))
        .filter(|(_, _, ratio)| *ratio < 1.0)
        .map(|(measured, to, ratio)| Loss { measured, to, ratio })
        .collect();
    losses.sort_by(|one, other| one.ratio.total_cmp(&other.ratio));
    losses
}

pub(super) fn json(machine: &Machine, results: &[Measured], rounds: u32) -> Value {
    let spread = |spread: Option<Spread>| {
        spread.map(|spread| json!({ "median": spread.median, "low": spread.low, "high": spread.high }))
    };
    let way = |measured: &Measured, way: Way| {
        json!({
            "way": way.name(),
            "seconds": spread(measured.seconds(way)),
            "first_seconds": spread(measured.first(way)),
            "bytes_per_second": measured.rate(way),
            "path": measured.path(way),
        })
    };
    let cases: Vec<_> = results
        .iter()
        .map(|measured| {
            json!({
                "case": measured.case.name(),
                "sql": measured.case.sql,
                "rows": measured.rows,
                "bytes": measured.bytes,
                "checksum": measured.checksum,
                "memcpy_bytes_per_second": measured.memcpy_rate(),
                "ways": WAYS.map(|one| way(measured, one)),
            })
        })
        .collect();
    json!({ "machine": machine, "rounds": rounds, "cases": cases })
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::plan::{FLIGHT, cases};
    use super::*;

    /// Every way takes a second, but Thallus `ours` and Flight `flight`.
    pub(in super::super) fn measured(ours: f64, flight: f64) -> Measured {
        let samples = WAYS.map(|way| {
            let seconds = match way {
                OURS => ours,
                FLIGHT => flight,
                _ => 1.0,
            };
            let counters = way.library.then(|| Counters {
                upgraded: [("shm".to_owned(), 1)].into(),
                ring_bytes_received: 99,
                tcp_bytes_received: 1,
                ..Counters::default()
            });
            vec![Sample { first: 9.0, warm: vec![seconds, seconds], counters, lent: 0.5 }]
        });
        let memcpy = vec![Memcpy { bytes: 4000, seconds: 2.0 }];
        let case = cases(&[]).remove(0);
        Measured { case, rows: 5, bytes: 1000, checksum: "1".to_owned(), samples, memcpy }
    }

    #[test]
    fn the_first_result_of_a_connection_is_told_apart() {
        let measured = measured(0.5, 0.25);
        assert_eq!(measured.rate(OURS), Some(2000.0));
        assert_eq!(measured.memcpy_rate(), Some(2000.0));
        assert_eq!(
            json(&super::super::super::machine::facts(), &[measured], 1)["cases"][0]["ways"][0]["first_seconds"]
                ["low"],
            9.0
        );
    }

    #[test]
    fn what_is_slower_than_a_baseline_is_a_loss() {
        let results = [measured(0.5, 0.25), measured(0.5, 2.0)];
        let losses = losses(&results);
        assert_eq!(losses.len(), 1);
        assert_eq!((losses[0].to, losses[0].ratio), (FLIGHT, 0.5));
    }

    #[test]
    fn the_path_is_what_the_library_counted() {
        let mut measured = measured(0.5, 0.5);
        assert!(measured.moved(OURS));
        assert_eq!(
            measured.path(OURS),
            "1 of 1 upgraded, 99 % of the bytes in the stream, 50 % of the batches lent"
        );
        assert_eq!(measured.path(FLIGHT), "TCP, without the library");
        let stayed = Counters { not_upgraded: [("short".to_owned(), 1)].into(), ..Counters::default() };
        measured.samples[WAYS.len() - 1][0].counters = Some(stayed);
        assert!(!measured.moved(OURS));
        assert!(measured.path(OURS).contains("short 1"));
    }
}

//! Two reports beside each other: what got worse by more than the rounds of one report differ among themselves.
//!
//! Two runs may have met two machines, even on one host: another neighbour, other processors. So a result that is worse counts
//! only if it is worse beside TCP as well, which was measured in turn with it: otherwise TCP has lost as much.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use serde::Deserialize;
use serde_json::Value;

use super::counters::Counters;
use super::report::{Spread, number, put};

/// Rounds below which a spread says nothing.
const FEWEST_ROUNDS: usize = 3;

/// A report as `report::json` writes it: what this needs of it, and all.
#[derive(Debug)]
pub(super) struct Report {
    needed: Needed,
    json: Value,
}

#[derive(Debug, Deserialize)]
struct Needed {
    machine: Machine,
    seconds: Option<f64>,
    results: Vec<Workload>,
    failures: Vec<String>,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
struct Machine {
    cpu: String,
    cpus: usize,
    kernel: String,
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} CPUs, Linux {}", self.cpu, self.cpus, self.kernel)
    }
}

#[derive(Debug, Deserialize)]
struct Workload {
    name: String,
    unit: String,
    server_cpu: Option<usize>,
    client_cpu: Option<usize>,
    transports: BTreeMap<String, Series>,
}

#[derive(Debug, Deserialize)]
struct Series {
    /// None where it is not claimed: some connections have stayed on TCP.
    ratio_to_tcp: Option<f64>,
    samples: Vec<Sample>,
}

#[derive(Debug, Deserialize)]
struct Sample {
    value: f64,
    cpu_seconds_per_million: Option<f64>,
    connections: Option<u64>,
    client: Option<Counters>,
    server: Option<Counters>,
}

impl Series {
    /// Whether all connections have left TCP at both ends, and none came back.
    fn has_left(&self) -> bool {
        let all = |counters: &Option<Counters>, opened| {
            counters.as_ref().is_some_and(|counters| counters.all_left(opened))
        };
        let left = |Sample { connections, client, server, .. }: &Sample| {
            connections.is_some_and(|opened| all(client, opened) && all(server, opened))
        };
        !self.samples.is_empty() && self.samples.iter().all(left)
    }
}

/// A column of numbers: what, of a sample.
struct Measure {
    unit: String,
    of: fn(&Sample) -> Option<f64>,
    more_is_better: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Within the spread.
    Same,
    Better,
    Worse,
    /// Worse, but no more so than TCP.
    WorseAsTcp,
    /// Not ours to judge.
    Baseline,
}

impl Verdict {
    fn text(self) -> &'static str {
        match self {
            Self::Same => "",
            Self::Better => "better",
            Self::Worse => "**worse**",
            Self::WorseAsTcp => "worse, as TCP is",
            Self::Baseline => "not judged",
        }
    }
}

/// What a comparison gives: a text, and whether anything got worse.
#[derive(Debug)]
pub(super) struct Comparison {
    pub(super) text: String,
    pub(super) is_worse: bool,
}

impl Report {
    /// Reads a report. Fails if the file is none.
    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let name = || path.display().to_string();
        let text = fs::read_to_string(path).with_context(name)?;
        let json = serde_json::from_str(&text).with_context(name)?;
        let report = Self::of(json).with_context(name)?;
        let series = report.needed.results.iter().flat_map(|workload| workload.transports.values());
        ensure!(
            series.into_iter().any(|series| series.samples.len() >= FEWEST_ROUNDS),
            "{}: nothing has {FEWEST_ROUNDS} rounds, and so a spread",
            name()
        );
        Ok(report)
    }

    fn of(json: Value) -> Result<Self, serde_json::Error> {
        Ok(Self { needed: Needed::deserialize(&json)?, json })
    }

    pub(super) fn json(&self) -> &Value {
        &self.json
    }
}

/// Compares all that is in the old report.
pub(super) fn compare(old: &Report, new: &Report) -> Comparison {
    let (old, new) = (&old.needed, &new.needed);
    let mut text = String::new();
    if old.machine != new.machine {
        put(&mut text, format_args!("Not the same machine: {}, then {}.\n", old.machine, new.machine));
    }
    if let (Some(before), Some(now)) = (old.seconds, new.seconds)
        && before.to_bits() != now.to_bits()
    {
        put(&mut text, format_args!("Not measured for the same time: {before} s, then {now} s.\n"));
    }
    let elsewhere = |before: &&Workload| {
        let same =
            |now: &Workload| (now.server_cpu, now.client_cpu) == (before.server_cpu, before.client_cpu);
        new.results.iter().any(|now| now.name == before.name && !same(now))
    };
    let elsewhere: Vec<_> = old.results.iter().filter(elsewhere).map(|before| before.name.as_str()).collect();
    if !elsewhere.is_empty() {
        put(&mut text, format_args!("Not on the same processors: {}.\n", elsewhere.join(", ")));
    }
    put(
        &mut text,
        format_args!(
            "Medians (lowest–highest). Judged is what differs by more than that; worse is what is so beside TCP, too.\n"
        ),
    );
    put(&mut text, format_args!("| workload | over | unit | old | new | new ÷ old | verdict |"));
    put(&mut text, format_args!("|---|---|---|--:|--:|--:|---|"));
    let mut remarks = Vec::new();
    let mut counts = [0; 3];
    for before in &old.results {
        let Some(now) = new.results.iter().find(|workload| workload.name == before.name) else {
            remarks.push(format!("{} is not in the new report", before.name));
            continue;
        };
        if now.unit != before.unit {
            remarks.push(format!("{} was in {}, and is in {} now", before.name, before.unit, now.unit));
            continue;
        }
        for (transport, series) in &before.transports {
            let Some(later) = now.transports.get(transport) else {
                remarks.push(format!("{} over {transport} is not in the new report", before.name));
                continue;
            };
            if series.samples.len() < FEWEST_ROUNDS || later.samples.len() < FEWEST_ROUNDS {
                remarks.push(format!("{} over {transport} has too few rounds", before.name));
                continue;
            }
            let has_tcp = before.transports.contains_key("tcp") && now.transports.contains_key("tcp");
            // Short connections may stay as they like.
            let stays = before.unit != "connections/s" && series.has_left() && !later.has_left();
            if stays || has_tcp && series.ratio_to_tcp.is_some() && later.ratio_to_tcp.is_none() {
                remarks.push(format!("{} over {transport}: connections stay on TCP now", before.name));
            }
            for measure in measures(&before.unit) {
                let Some(pair) = Pair::of(&measure, [before, now], transport) else { continue };
                let [old, new] = &pair.own;
                let verdict = pair.verdict(&measure, transport);
                match verdict {
                    Verdict::Better => counts[0] += 1,
                    Verdict::Worse => counts[1] += 1,
                    Verdict::WorseAsTcp => counts[2] += 1,
                    Verdict::Same | Verdict::Baseline => {}
                }
                put(
                    &mut text,
                    format_args!(
                        "| {} | {transport} | {} | {} | {} | {} | {} |",
                        before.name,
                        measure.unit,
                        spread(old),
                        spread(new),
                        ratio(old, new).map_or("–".to_owned(), |ratio| format!(
                            "{:.2} ({:.2}–{:.2})",
                            ratio.median, ratio.low, ratio.high
                        )),
                        verdict.text()
                    ),
                );
            }
        }
    }
    remarks.extend(new.failures.iter().map(|failure| format!("failed: {failure}")));
    text.push('\n');
    for remark in &remarks {
        put(&mut text, format_args!("**{remark}**"));
    }
    let [better, worse, as_tcp] = counts;
    put(&mut text, format_args!("{better} better, {worse} worse, {as_tcp} worse as TCP is."));
    Comparison { text, is_worse: worse > 0 || !remarks.is_empty() }
}

fn measures(unit: &str) -> [Measure; 2] {
    let cpu = "CPU s per million".to_owned();
    [
        Measure {
            more_is_better: unit != "bytes/connection",
            unit: unit.to_owned(),
            of: |sample| Some(sample.value),
        },
        Measure { unit: cpu, of: |sample| sample.cpu_seconds_per_million, more_is_better: false },
    ]
}

/// The same, old and new, and TCP beside each.
struct Pair {
    own: [Spread; 2],
    tcp: Option<[Spread; 2]>,
}

impl Pair {
    fn of(measure: &Measure, workloads: [&Workload; 2], transport: &str) -> Option<Self> {
        let spreads = |transport: &str| {
            let of = |workload: &Workload| {
                let samples = &workload.transports.get(transport)?.samples;
                let values = || samples.iter().filter_map(measure.of);
                Spread::of(values()).filter(|_| values().count() >= FEWEST_ROUNDS)
            };
            Some([of(workloads[0])?, of(workloads[1])?])
        };
        Some(Self { own: spreads(transport)?, tcp: spreads("tcp") })
    }

    fn verdict(&self, measure: &Measure, transport: &str) -> Verdict {
        let apart = |[old, new]: &[Spread; 2]| {
            let (less, more) = (new.high < old.low, new.low > old.high);
            match measure.more_is_better {
                true => (more, less),
                false => (less, more),
            }
        };
        let (better, worse) = apart(&self.own);
        if matches!(transport, "tcp" | "unix" | "bare") {
            return if better || worse { Verdict::Baseline } else { Verdict::Same };
        }
        let beside_tcp = || {
            let [old, new] = self.tcp.as_ref()?;
            Some([ratio(old, &self.own[0])?, ratio(new, &self.own[1])?])
        };
        match (better, worse) {
            (true, _) => Verdict::Better,
            (_, true) if beside_tcp().is_none_or(|pair| apart(&pair).1) => Verdict::Worse,
            (_, true) => Verdict::WorseAsTcp,
            _ => Verdict::Same,
        }
    }
}

/// `new` ÷ `old`, at most and at least; `None` if that means nothing.
fn ratio(old: &Spread, new: &Spread) -> Option<Spread> {
    (old.low > 0.0 && new.low >= 0.0).then(|| Spread {
        median: new.median / old.median,
        low: new.low / old.high,
        high: new.high / old.low,
    })
}

fn spread(spread: &Spread) -> String {
    format!("{} ({}–{})", number(spread.median), number(spread.low), number(spread.high))
}

#[cfg(test)]
mod tests {
    use super::*;

    use serde_json::json;

    /// A report on one workload: values of three rounds over each transport.
    fn report(unit: &str, transports: &[(&str, [f64; 3])]) -> Value {
        let series = transports.iter().map(|(name, values)| {
            let samples: Vec<_> =
                values.iter().map(|value| json!({"value": value, "cpu_seconds_per_million": null})).collect();
            ((*name).to_owned(), json!({"ratio_to_tcp": 1.5, "samples": samples}))
        });
        let transports: serde_json::Map<_, _> = series.collect();
        json!({
            "machine": {"cpu": "c", "cpus": 2, "kernel": "k", "more": 1},
            "results": [{"name": "w", "unit": unit, "transports": transports}],
            "failures": [],
        })
    }

    fn compared(old: &Value, new: &Value) -> Comparison {
        let read = |value: &Value| Report::of(value.clone()).unwrap();
        compare(&read(old), &read(new))
    }

    const RATE: &str = "round trips/s";

    fn verdict(unit: &str, old: [f64; 3], new: [f64; 3]) -> (String, bool) {
        let tcp = ("tcp", [10.0, 10.0, 10.0]);
        let result =
            compared(&report(unit, &[("thallus", old), tcp]), &report(unit, &[("thallus", new), tcp]));
        let line = result.text.lines().find(|line| line.contains("| thallus |")).unwrap();
        (line.split('|').rev().nth(1).unwrap().trim().to_owned(), result.is_worse)
    }

    #[test]
    fn only_what_lies_apart_is_judged_and_more_is_better_but_for_memory() {
        let old = [100.0, 110.0, 120.0];
        assert_eq!(verdict(RATE, old, old), (String::new(), false));
        assert_eq!(verdict(RATE, old, [80.0, 90.0, 100.0]), (String::new(), false));
        assert_eq!(verdict(RATE, old, [80.0, 90.0, 99.0]), ("**worse**".to_owned(), true));
        assert_eq!(verdict(RATE, old, [121.0, 130.0, 140.0]), ("better".to_owned(), false));
        assert_eq!(verdict("bytes/connection", old, [121.0, 130.0, 140.0]), ("**worse**".to_owned(), true));
        assert_eq!(verdict("bytes/connection", old, [80.0, 90.0, 99.0]), ("better".to_owned(), false));
    }

    #[test]
    fn what_tcp_has_lost_as_well_is_told_and_does_not_count() {
        let old = report(RATE, &[("thallus", [100.0, 110.0, 120.0]), ("tcp", [10.0, 10.0, 11.0])]);
        let both = report(RATE, &[("thallus", [50.0, 55.0, 60.0]), ("tcp", [5.0, 5.0, 5.5])]);
        let result = compared(&old, &both);
        assert!(result.text.contains("| 0.50 (0.42–0.60) | worse, as TCP is |"), "{}", result.text);
        assert!(result.text.contains("| not judged |") && !result.is_worse, "{}", result.text);
        assert!(result.text.ends_with("0 better, 0 worse, 1 worse as TCP is.\n"), "{}", result.text);
        let alone = report(RATE, &[("thallus", [50.0, 55.0, 60.0])]);
        let without_tcp = report(RATE, &[("thallus", [100.0, 110.0, 120.0])]);
        assert!(compared(&without_tcp, &alone).is_worse);
    }

    #[test]
    fn what_has_nothing_of_the_library_is_not_judged() {
        let with = |value: f64| {
            let others = ["unix", "bare"].map(|name| (name, [value; 3]));
            report(RATE, &[&others[..], &[("tcp", [10.0; 3])]].concat())
        };
        let result = compared(&with(100.0), &with(50.0));
        assert_eq!(
            (result.text.matches("| not judged |").count(), result.is_worse),
            (2, false),
            "{}",
            result.text
        );
    }

    #[test]
    fn what_too_few_rounds_have_is_not_judged() {
        let with_cpu = |cpu: [Option<f64>; 3]| {
            let mut report = report(RATE, &[("thallus", [1.0; 3]), ("tcp", [1.0; 3])]);
            for (sample, cpu) in report["results"][0]["transports"]["thallus"]["samples"]
                .as_array_mut()
                .unwrap()
                .iter_mut()
                .zip(cpu)
            {
                sample["cpu_seconds_per_million"] = cpu.into();
            }
            report
        };
        let old = with_cpu([Some(1.0); 3]);
        assert!(compared(&old, &with_cpu([Some(2.0); 3])).is_worse);
        assert!(!compared(&old, &with_cpu([None, None, Some(2.0)])).is_worse);
    }

    #[test]
    fn what_is_missing_failed_or_stays_on_tcp_counts_as_worse() {
        let full = report(RATE, &[("thallus", [1.0; 3]), ("tcp", [1.0; 3])]);
        let worse = |change: &dyn Fn(&mut Value), remark: &str| {
            let mut new = full.clone();
            change(&mut new);
            let result = compared(&full, &new);
            assert!(result.is_worse && result.text.contains(remark), "{}", result.text);
        };
        assert!(!compared(&full, &full).is_worse);
        worse(&|new| new["results"] = json!([]), "w is not in the new report");
        worse(&|new| new["failures"] = json!(["hung"]), "failed: hung");
        worse(&|new| new["results"][0]["unit"] = "GB/s".into(), "w was in round trips/s, and is in GB/s now");
        worse(
            &|new| new["results"][0]["transports"]["thallus"]["ratio_to_tcp"] = Value::Null,
            "w over thallus: connections stay on TCP now",
        );
        worse(
            &|new| {
                new["results"][0]["transports"]["thallus"]["samples"].as_array_mut().unwrap().pop();
            },
            "w over thallus has too few rounds",
        );
        let counted = |upgraded: u64, returned: u64| {
            let mut report = report(RATE, &[("thallus-unix", [1.0; 3])]);
            let counters = json!({"upgraded": {"shm": upgraded}, "not_upgraded": {}, "returned_to_tcp": returned,
                "ring_bytes_sent": 0, "ring_bytes_received": 0, "tcp_bytes_sent": 0, "tcp_bytes_received": 0,
                "doorbells_sent": 0, "sleeps": 0, "spin_hits": 0});
            for sample in
                report["results"][0]["transports"]["thallus-unix"]["samples"].as_array_mut().unwrap()
            {
                sample["connections"] = 1.into();
                sample["client"] = counters.clone();
                sample["server"] = counters.clone();
            }
            report
        };
        assert!(
            !compared(&counted(1, 0), &counted(1, 0)).is_worse
                && !compared(&counted(0, 0), &counted(0, 0)).is_worse
        );
        for new in [counted(0, 0), counted(1, 1)] {
            let result = compared(&counted(1, 0), &new);
            let remark = "**w over thallus-unix: connections stay on TCP now**";
            assert!(result.is_worse && result.text.contains(remark), "{}", result.text);
        }
        let mut elsewhere = full.clone();
        elsewhere["machine"]["kernel"] = "other".into();
        let result = compared(&full, &elsewhere);
        let machines = "Not the same machine: c, 2 CPUs, Linux k, then c, 2 CPUs, Linux other.\n";
        assert!(result.text.starts_with(machines) && !result.is_worse);
        let (mut short, mut moved) = (full.clone(), full.clone());
        short["seconds"] = 0.1.into();
        moved["seconds"] = 1.0.into();
        moved["results"][0]["client_cpu"] = 3.into();
        let result = compared(&short, &moved);
        let unlike = "Not measured for the same time: 0.1 s, then 1 s.\n\nNot on the same processors: w.\n";
        assert!(result.text.starts_with(unlike) && !result.is_worse, "{}", result.text);
    }
}

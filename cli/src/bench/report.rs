//! The result as a Markdown table and as JSON: medians, spread, ratios, and the path that the bytes took.
//!
//! A ratio is claimed only where it is about Thallus: if every connection of the measurement was upgraded on
//! both sides, and none went back. Where staying on TCP is the point (short connections, a peer without the library), it always is.

use std::fmt::Write;

use serde_json::{Value, json};

use super::counters::Counters;
use super::latency::Times;
use super::machine::Machine;
use super::measure::{Measured, Outcome, Sample, Series};
use super::plan::{Placement, Transport, Workload};

/// The tables, with the facts that belong to them.
pub(super) fn markdown(machine: &Machine, outcome: &Outcome, rounds: u32, seconds: f64) -> String {
    let mut text = String::new();
    let kind = if machine.is_virtual { "virtual machine" } else { "machine" };
    let gib = machine.memory_bytes >> 30;
    put(
        &mut text,
        format_args!("{}, {} CPUs, {gib} GiB ({kind}), Linux {}", machine.cpu, machine.cpus, machine.kernel),
    );
    put(
        &mut text,
        format_args!("Median (lowest–highest) of {rounds} rounds of {seconds} s, transports in turn."),
    );
    let on_one = |one: &Measured| matches!(one.variant.placement, Placement::Cores { apart: false, .. });
    let cores = match outcome.measured.iter().any(on_one) {
        true => "each on a hardware thread of its own, of the only core that there is",
        false => "each on its own",
    };
    put(&mut text, format_args!("cores: server and client {cores}; one-core: both on the same; unpinned.\n"));
    let idle = |measured: &&Measured| matches!(measured.variant.workload, Workload::Idle { .. });
    let one_sided = |measured: &&Measured| measured.variant.one_sided;
    let speed: Vec<_> = outcome.measured.iter().filter(|one| !idle(one) && !one_sided(one)).collect();
    if !speed.is_empty() {
        let columns = [Transport::Tcp, Transport::Unix, Transport::Thallus, Transport::ThallusUnix];
        text += &table(
            &speed,
            &columns,
            "Thallus ÷ TCP, Thallus over Unix ÷ Unix",
            "CPU s per million: TCP / Unix / Thallus / Thallus over Unix",
        );
    }
    let timed: Vec<_> = speed.iter().copied().filter(|one| one.series.iter().any(is_timed)).collect();
    if !timed.is_empty() {
        put(
            &mut text,
            format_args!("How long round trips take, µs; half of them, 99 % and 99.9 % take no longer:\n"),
        );
        text += &times_table(&timed);
    }
    let beside_yardstick: Vec<_> =
        speed.iter().copied().filter(|measured| measured.series(Transport::Bare).is_some()).collect();
    if !beside_yardstick.is_empty() {
        put(
            &mut text,
            format_args!("Beside a bare ring of 1 MiB in shared memory, on which both sides spin:\n"),
        );
        text += &yardstick_table(&beside_yardstick);
    }
    let one_sided: Vec<_> = outcome.measured.iter().filter(one_sided).collect();
    if !one_sided.is_empty() {
        put(&mut text, format_args!("A peer without Thallus:\n"));
        let columns = [Transport::Tcp, Transport::ClientOnly, Transport::ServerOnly];
        text += &table(
            &one_sided,
            &columns,
            "client ÷ TCP, server ÷ TCP",
            "CPU s per million: TCP / client / server",
        );
    }
    for measured in outcome.measured.iter().filter(idle) {
        put(
            &mut text,
            format_args!("Resident memory per idle connection, client and server together (Pss):\n"),
        );
        text += &memory_table(measured);
    }
    for failure in &outcome.failures {
        put(&mut text, format_args!("FAILED: {failure}"));
    }
    text
}

fn table(rows: &[&Measured], columns: &[Transport], ratio: &str, cpu: &str) -> String {
    let mut text = String::from("| workload | unit |");
    for transport in columns {
        put_part(&mut text, format_args!(" {} |", title(*transport)));
    }
    put(&mut text, format_args!(" {ratio} | {cpu} | path |"));
    put(&mut text, format_args!("|---|---|{}---|---|---|", "--:|".repeat(columns.len())));
    for measured in rows {
        put_part(
            &mut text,
            format_args!("| {} | {} |", measured.variant.name(), unit(measured.variant.workload)),
        );
        for &column in columns {
            put_part(
                &mut text,
                format_args!(" {} |", measured.series(column).map_or("–".to_owned(), spread)),
            );
        }
        let ratios = columns[1..].iter().filter(|&&column| column != Transport::Unix);
        let ratios: Vec<_> = ratios.map(|&column| ratio_text(measured, column)).collect();
        let cpu: Vec<_> = columns.iter().map(|&column| cpu_text(measured.series(column))).collect();
        let paths: Vec<_> =
            columns.iter().filter_map(|&column| path_text(measured.series(column)?)).collect();
        put(&mut text, format_args!(" {} | {} | {} |", ratios.join(", "), cpu.join(" / "), paths.join("; ")));
    }
    text.push('\n');
    text
}

fn title(transport: Transport) -> &'static str {
    match transport {
        Transport::Tcp => "TCP",
        Transport::Unix => "Unix socket",
        Transport::Thallus => "Thallus",
        Transport::ThallusUnix => "Thallus over a Unix socket",
        Transport::ClientOnly => "only the client has it",
        Transport::ServerOnly => "only the server has it",
        Transport::Bare => "bare ring",
    }
}

fn is_timed(series: &Series) -> bool {
    series.samples.iter().any(|sample| !sample.times.0.is_empty())
}

fn times_table(rows: &[&Measured]) -> String {
    let columns = [Transport::Tcp, Transport::Unix, Transport::Thallus, Transport::ThallusUnix];
    let mut text = String::from("| workload |");
    columns.iter().for_each(|&column| put_part(&mut text, format_args!(" {} |", title(column))));
    put(&mut text, format_args!("\n|---|{}", "--:|".repeat(columns.len())));
    for measured in rows {
        put_part(&mut text, format_args!("| {} |", measured.variant.name()));
        for column in columns {
            let times = measured.series(column).map(times).unwrap_or_default();
            let micros = |share| Some(number(times.quantile(share)?.as_nanos() as f64 / 1000.0));
            let cells: Option<Vec<_>> = [0.5, 0.99, 0.999].into_iter().map(micros).collect();
            put_part(
                &mut text,
                format_args!(" {} |", cells.map_or("–".to_owned(), |cells| cells.join(" / "))),
            );
        }
        text.push('\n');
    }
    text.push('\n');
    text
}

fn yardstick_table(rows: &[&Measured]) -> String {
    let mut text = String::from(
        "| workload | unit | bare ring | Thallus | Thallus ÷ bare ring |\n|---|---|--:|--:|--:|\n",
    );
    for measured in rows {
        let shown = |transport| measured.series(transport).map_or("–".to_owned(), spread);
        let share = ratio(measured, Transport::Thallus, Transport::Bare);
        put(
            &mut text,
            format_args!(
                "| {} | {} | {} | {} | {} |",
                measured.variant.name(),
                unit(measured.variant.workload),
                shown(Transport::Bare),
                shown(Transport::Thallus),
                share.map_or_else(str::to_owned, |share| format!("{share:.2}")),
            ),
        );
    }
    text.push('\n');
    text
}

fn memory_table(measured: &Measured) -> String {
    let mut text = String::from("| transport | KiB | path |\n|---|--:|---|\n");
    for series in &measured.series {
        let Some(Spread { median, low, high }) =
            Spread::of(series.samples.iter().map(|sample| sample.value / 1024.0))
        else {
            continue;
        };
        let path = path_text(series).unwrap_or_default();
        let name = series.transport.name();
        put(&mut text, format_args!("| {name} | {median:.1} ({low:.1}–{high:.1}) | {path} |"));
    }
    text.push('\n');
    text
}

/// Everything that was measured, each round for itself.
pub(super) fn json(machine: &Machine, outcome: &Outcome, rounds: u32, seconds: f64) -> Value {
    let results: Vec<_> = outcome.measured.iter().map(result_json).collect();
    json!({
        "machine": machine,
        "rounds": rounds,
        "seconds": seconds,
        "results": results,
        "failures": outcome.failures,
    })
}

fn result_json(measured: &Measured) -> Value {
    let mut transports = serde_json::Map::new();
    for series in &measured.series {
        let spread = Spread::of(series.samples.iter().map(|sample| sample.value));
        let samples: Vec<_> = series.samples.iter().map(sample_json).collect();
        let entry = json!({
            "median": spread.as_ref().map(|spread| spread.median),
            "min": spread.as_ref().map(|spread| spread.low),
            "max": spread.as_ref().map(|spread| spread.high),
            "cpu_seconds_per_million": cpu(series),
            "ratio_to_tcp": ratio(measured, series.transport, Transport::Tcp).ok(),
            "path": path_text(series),
            "microseconds": quantiles(series),
            "times": times(series),
            "samples": samples,
        });
        transports.insert(series.transport.name().to_owned(), entry);
    }
    json!({
        "name": measured.variant.name(),
        "unit": unit(measured.variant.workload),
        "placement": measured.variant.placement.name(),
        "server_cpu": measured.variant.placement.server(),
        "client_cpu": measured.variant.placement.client(),
        "transports": transports,
    })
}

/// Of all rounds together.
fn times(series: &Series) -> Times {
    Times::together(series.samples.iter().map(|sample| &sample.times))
}

/// Null where nothing was timed.
fn quantiles(series: &Series) -> Value {
    let times = times(series);
    let at = |share| times.quantile(share).map(|time| time.as_nanos() as f64 / 1000.0);
    match at(0.5) {
        None => Value::Null,
        median => {
            json!({"p50": median, "p90": at(0.9), "p99": at(0.99), "p99.9": at(0.999), "most": at(1.0)})
        }
    }
}

fn sample_json(sample: &Sample) -> Value {
    json!({
        "value": sample.value,
        "cpu_seconds_per_million": sample.cpu_per_million,
        "connections": sample.connections,
        "client_memory": sample.memory.map(|memory| memory.0),
        "server_memory": sample.memory.map(|memory| memory.1),
        "client": sample.client,
        "server": sample.server,
    })
}

fn unit(workload: Workload) -> &'static str {
    match workload {
        Workload::PingPong { .. } | Workload::Paced { .. } | Workload::Herd { .. } => "round trips/s",
        Workload::Stream { .. } => "GB/s",
        Workload::Connect { .. } => "connections/s",
        Workload::Idle { .. } => "bytes/connection",
    }
}

/// How the connections of a series went: `None` without the library on either side.
fn path_text(series: &Series) -> Option<String> {
    let transport = series.transport;
    let sides = [("client", transport.preloads_client()), ("server", transport.preloads_server())];
    let opened: u64 = series.samples.iter().map(|sample| sample.connections).sum();
    let mut texts = Vec::new();
    for (side, preloaded) in sides {
        if preloaded {
            texts.push((
                side,
                counters(series, side)
                    .map_or("no counters were written".to_owned(), |counters| describe(&counters, opened)),
            ));
        }
    }
    match &texts[..] {
        [] => None,
        [(_, client), (_, server)] if client == server => Some(client.clone()),
        texts => {
            Some(texts.iter().map(|(side, text)| format!("{side}: {text}")).collect::<Vec<_>>().join(", "))
        }
    }
}

fn describe(counters: &Counters, opened: u64) -> String {
    let mut text = format!("{} of {opened} upgraded", counters.upgraded());
    if counters.upgraded() > 0 {
        // Rounded down: 100 % means all.
        let percent = (counters.ring_share() * 1000.0).floor() / 10.0;
        put_part(&mut text, format_args!(" ({percent} % of the bytes)"));
    }
    for (reason, count) in &counters.not_upgraded {
        put_part(&mut text, format_args!(", {reason} {count}"));
    }
    if counters.returned_to_tcp > 0 {
        put_part(&mut text, format_args!(", {} returned to TCP", counters.returned_to_tcp));
    }
    text
}

/// The counts of one side over all rounds; `None` if a round has none.
fn counters(series: &Series, side: &str) -> Option<Counters> {
    let mut sum = Counters::default();
    for sample in &series.samples {
        sum.add(if side == "client" { sample.client.as_ref()? } else { sample.server.as_ref()? });
    }
    (!series.samples.is_empty()).then_some(sum)
}

/// The ratio of the medians of two transports, or why there is none.
fn ratio(measured: &Measured, transport: Transport, baseline: Transport) -> Result<f64, &'static str> {
    let median = |transport| {
        let series = measured.series(transport)?;
        Some(Spread::of(series.samples.iter().map(|sample| sample.value))?.median)
    };
    let (Some(baseline), Some(own)) = (median(baseline), median(transport)) else { return Err("–") };
    let about_upgrades = matches!(transport, Transport::Thallus | Transport::ThallusUnix)
        && !matches!(measured.variant.workload, Workload::Connect { .. });
    if about_upgrades && !measured.series(transport).is_some_and(all_left) {
        return Err("not claimed: not upgraded, or not for long");
    }
    Ok(own / baseline)
}

fn all_left(series: &Series) -> bool {
    let opened: u64 = series.samples.iter().map(|sample| sample.connections).sum();
    let left = |side| counters(series, side).is_some_and(|counters| counters.all_left(opened));
    left("client") && left("server")
}

fn ratio_text(measured: &Measured, transport: Transport) -> String {
    ratio(measured, transport, transport.baseline())
        .map_or_else(str::to_owned, |ratio| format!("{ratio:.2}×"))
}

fn cpu(series: &Series) -> Option<f64> {
    Some(Spread::of(series.samples.iter().filter_map(|sample| sample.cpu_per_million))?.median)
}

fn cpu_text(series: Option<&Series>) -> String {
    series.and_then(cpu).map_or("–".to_owned(), |cpu| format!("{cpu:.2}"))
}

fn spread(series: &Series) -> String {
    match Spread::of(series.samples.iter().map(|sample| sample.value)) {
        Some(Spread { median, low, high }) => {
            format!("{} ({}–{})", number(median), number(low), number(high))
        }
        None => "failed".to_owned(),
    }
}

/// `12,345` from a thousand on, else three digits: `4.37`, `43.7`, `437`.
pub(super) fn number(value: f64) -> String {
    if value < 1000.0 {
        let decimals = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
        return format!("{value:.decimals$}");
    }
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Of several measurements of the same.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Spread {
    /// `None` of nothing.
    pub(super) fn of(values: impl Iterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let (&low, &high) = (values.first()?, values.last()?);
        let middle = values.len() / 2;
        let median = if values.len().is_multiple_of(2) {
            f64::midpoint(values[middle - 1], values[middle])
        } else {
            values[middle]
        };
        Some(Self { median, low, high })
    }
}

impl Measured {
    fn series(&self, transport: Transport) -> Option<&Series> {
        self.series.iter().find(|series| series.transport == transport)
    }
}

pub(super) fn put(text: &mut String, line: std::fmt::Arguments<'_>) {
    put_part(text, line);
    text.push('\n');
}

pub(super) fn put_part(text: &mut String, part: std::fmt::Arguments<'_>) {
    text.write_fmt(part).expect("a string takes everything");
}

#[cfg(test)]
mod tests {
    use super::super::plan::{Variant, Wait};
    use super::*;

    fn sample(value: f64, upgraded: Option<u64>) -> Sample {
        let counters = upgraded.map(|count| Counters {
            upgraded: [("shm".to_owned(), count)].into(),
            not_upgraded: if count == 0 { [("short".to_owned(), 1)].into() } else { [].into() },
            ring_bytes_sent: count * 1000,
            ..Counters::default()
        });
        let (client, server) = (counters.clone(), counters);
        let times = Times::default();
        Sample { value, cpu_per_million: Some(2.0), memory: None, connections: 1, times, client, server }
    }

    fn measured(thallus: Vec<Sample>) -> Measured {
        let workload = Workload::PingPong { wait: Wait::Poll, size: 64, connections: 1 };
        let transports = vec![Transport::Tcp, Transport::Thallus];
        let tcp = Series { transport: Transport::Tcp, samples: vec![sample(1.0, None), sample(2.0, None)] };
        Measured {
            variant: Variant { workload, placement: Placement::Unpinned, one_sided: false, transports },
            series: vec![tcp, Series { transport: Transport::Thallus, samples: thallus }],
        }
    }

    #[test]
    fn a_ratio_is_claimed_when_all_connections_were_upgraded() {
        let measured = measured(vec![sample(30.0, Some(1)), sample(60.0, Some(1))]);
        assert_eq!(ratio(&measured, Transport::Thallus, Transport::Tcp), Ok(30.0));
        let path = path_text(&measured.series[1]).unwrap();
        assert_eq!(path, "2 of 2 upgraded (100 % of the bytes)");
    }

    #[test]
    fn no_ratio_is_claimed_for_connections_that_stayed_on_tcp() {
        let some = measured(vec![sample(30.0, Some(1)), sample(60.0, Some(0))]);
        assert!(ratio(&some, Transport::Thallus, Transport::Tcp).is_err());
        assert!(path_text(&some.series[1]).unwrap().contains("1 of 2 upgraded"));
        assert!(path_text(&some.series[1]).unwrap().contains("short 1"));
    }

    #[test]
    fn no_ratio_is_claimed_for_connections_that_went_back() {
        let mut back = sample(60.0, Some(1));
        back.server.as_mut().unwrap().returned_to_tcp = 1;
        let some = measured(vec![sample(30.0, Some(1)), back]);
        assert!(ratio(&some, Transport::Thallus, Transport::Tcp).is_err());
        assert!(
            path_text(&some.series[1])
                .unwrap()
                .contains("2 of 2 upgraded (100 % of the bytes), 1 returned to TCP")
        );
    }

    #[test]
    fn no_ratio_is_claimed_without_counters() {
        let unknown = measured(vec![sample(30.0, Some(1)), sample(60.0, None)]);
        assert!(ratio(&unknown, Transport::Thallus, Transport::Tcp).is_err());
        assert_eq!(path_text(&unknown.series[1]).unwrap(), "no counters were written");
    }

    #[test]
    fn times_are_those_of_all_rounds() {
        let timed = |times: &[(u64, u64)]| Sample { times: Times(times.to_vec()), ..sample(1.0, Some(1)) };
        let measured = measured(vec![timed(&[(400, 60)]), timed(&[(400, 38), (1500, 1), (20_000, 1)])]);
        assert!(is_timed(&measured.series[1]) && !is_timed(&measured.series[0]));
        let table = times_table(&[&measured]);
        assert!(
            table.ends_with("| ping-pong/64/poll/unpinned | – | – | 0.40 / 1.50 / 20.0 | – |\n\n"),
            "{table}"
        );
    }

    #[test]
    fn the_share_of_a_bare_ring_is_told_of_what_left_tcp() {
        let bare = || Series { transport: Transport::Bare, samples: vec![sample(80.0, None)] };
        let mut all = measured(vec![sample(40.0, Some(1))]);
        all.series.push(bare());
        assert!(yardstick_table(&[&all]).contains("| 80.0 (80.0–80.0) | 40.0 (40.0–40.0) | 0.50 |"));
        let mut none = measured(vec![sample(40.0, Some(0))]);
        none.series.push(bare());
        assert!(yardstick_table(&[&none]).contains("not claimed"));
    }

    #[test]
    fn a_median_of_an_even_number_lies_between() {
        let spread = Spread::of([4.0, 1.0, 3.0, 2.0].into_iter()).unwrap();
        assert_eq!((spread.median, spread.low, spread.high), (2.5, 1.0, 4.0));
        assert!(Spread::of([].into_iter()).is_none());
    }

    #[test]
    fn numbers_are_grouped_by_thousands() {
        assert_eq!(number(1_234_567.4), "1,234,567");
        assert_eq!(number(1000.0), "1,000");
        assert_eq!(number(4.367), "4.37");
        assert_eq!(number(43.67), "43.7");
    }
}

//! The tables: medians of the rounds with the least and the greatest, and ratios of medians.

use serde_json::{Value, json};

use super::plan::{INLINE_SIZES, Path, SIZE};
use super::session::{Host, Measured, Outcome};
use crate::bench::report::{Spread, number, put, put_part};

/// Both tables, with where they were measured.
pub(super) fn markdown(outcome: &Outcome, rounds: u32, seconds: f64) -> String {
    let mut text = String::new();
    for (side, host) in [("client", &outcome.client), ("server", &outcome.server)] {
        put(&mut text, format_args!("- {side} {}", describe(host)));
    }
    put(
        &mut text,
        format_args!(
            "- round trips/s, one message under way: median (least–greatest) of {rounds} rounds of {seconds} s, in turn. TCP \
             sleeps in `recv`, RDMA looks at memory all the time\n"
        ),
    );
    text.push_str(&ways(outcome));
    text.push_str(&inline(outcome));
    for measured in outcome.results.iter().filter(|measured| measured.early > 0) {
        let Measured { case, messages, early, .. } = measured;
        put(
            &mut text,
            format_args!(
                "\n{}, {} bytes: {early} of {messages} messages seemed complete before all of their bytes were there. A device here \
                 does not place those of a WRITE in order: do not set `THALLUS_RDMA_ORDER=one-write`",
                case.path.title(),
                case.size
            ),
        );
    }
    text
}

fn describe(Host { address, machine, device }: &Host) -> String {
    let kind = if machine.is_virtual { ", virtual" } else { "" };
    let cpus = machine.cpus;
    format!("{address}: {device}; {}, {cpus} CPUs{kind}, Linux {}", machine.cpu, machine.kernel)
}

fn ways(outcome: &Outcome) -> String {
    let mut text = format!("| {SIZE} bytes | round trips/s | of TCP's |\n|---|--:|--:|\n");
    let median = |path| Some(spread(find(outcome, path, SIZE)?)?.median);
    let tcp = median(Path::Tcp);
    for path in Path::ALL {
        let found = find(outcome, path, SIZE);
        let ratio = median(path).zip(tcp).map_or("–".to_owned(), |(own, tcp)| format!("{:.2}×", own / tcp));
        put(&mut text, format_args!("| {} | {} | {ratio} |", path.title(), shown(found)));
    }
    text
}

fn inline(outcome: &Outcome) -> String {
    let mut text = String::from("\n| bytes | one WRITE | inline | ratio |\n|--:|--:|--:|--:|\n");
    let mut is_empty = true;
    for size in INLINE_SIZES {
        let [plain, inline] = [Path::Framed, Path::FramedInline].map(|path| find(outcome, path, size));
        let Some((plain, inline)) = plain.zip(inline) else { continue };
        is_empty = false;
        put_part(&mut text, format_args!("| {size} | {} | {} |", shown(Some(plain)), shown(Some(inline))));
        let ratio = spread(inline).zip(spread(plain)).map(|(inline, plain)| inline.median / plain.median);
        put(&mut text, format_args!(" {} |", ratio.map_or("–".to_owned(), |ratio| format!("{ratio:.2}×"))));
    }
    if is_empty { "\nThe devices grant no inline sends of such sizes.\n".to_owned() } else { text }
}

fn find(outcome: &Outcome, path: Path, size: u32) -> Option<&Measured> {
    outcome.results.iter().find(|measured| measured.case.path == path && measured.case.size == size)
}

fn spread(measured: &Measured) -> Option<Spread> {
    Spread::of(measured.rates.iter().copied())
}

fn shown(measured: Option<&Measured>) -> String {
    measured.and_then(spread).map_or("not granted".to_owned(), |Spread { median, low, high }| {
        format!("{} ({}–{})", number(median), number(low), number(high))
    })
}

/// Everything that was measured, each round for itself.
pub(super) fn json(outcome: &Outcome, rounds: u32, seconds: f64) -> Value {
    let results: Vec<_> = outcome.results.iter().map(result).collect();
    json!({
        "client": outcome.client,
        "server": outcome.server,
        "rounds": rounds,
        "seconds": seconds,
        "results": results,
    })
}

fn result(measured: &Measured) -> Value {
    let spread = spread(measured);
    json!({
        "path": measured.case.path,
        "bytes": measured.case.size,
        "unit": "round trips/s",
        "median": spread.map(|spread| spread.median),
        "min": spread.map(|spread| spread.low),
        "max": spread.map(|spread| spread.high),
        "rounds": measured.rates,
        "messages": measured.messages,
        "seemed_complete_too_early": measured.early,
    })
}

#[cfg(test)]
mod tests {
    use super::super::device::Device;
    use super::super::plan::Case;
    use super::*;
    use crate::bench::machine;

    fn outcome(results: Vec<Measured>) -> Outcome {
        let device = Device {
            name: "rxe0".to_owned(),
            port: 1,
            gid: "::ffff:10.0.0.1".parse().unwrap(),
            link_layer: "Ethernet".to_owned(),
            rate: "2.5 Gb/sec (1X SDR)".to_owned(),
            mtu_bytes: Some(1024),
            firmware: "unknown".to_owned(),
            driver: None,
            inline_bytes: 512,
        };
        let host = Host { address: "10.0.0.1".to_owned(), machine: machine::facts(), device };
        Outcome { client: host.clone(), server: host, results }
    }

    fn measured(path: Path, size: u32, rates: &[f64], early: u64) -> Measured {
        Measured { case: Case { path, size }, rates: rates.to_vec(), messages: 100, early }
    }

    #[test]
    fn ratios_are_those_of_medians() {
        let outcome = outcome(vec![
            measured(Path::Tcp, 64, &[10.0, 30.0, 20.0], 0),
            measured(Path::Framed, 64, &[100.0, 80.0, 90.0], 0),
            measured(Path::FramedInline, 64, &[180.0, 1000.0, 10.0], 0),
        ]);
        let text = markdown(&outcome, 3, 1.0);
        assert!(text.contains("| TCP | 20.0 (10.0–30.0) | 1.00× |"), "{text}");
        assert!(text.contains("| + inline | 180 (10.0–1,000) | 9.00× |"), "{text}");
        assert!(text.contains("| 64 | 90.0 (80.0–100) | 180 (10.0–1,000) | 2.00× |"), "{text}");
        assert!(text.contains("own, both inline | not granted | – |"), "{text}");
        assert!(text.contains("rxe0 (made of software, firmware unknown), port 1: Ethernet"), "{text}");
        assert!(!text.contains("in order"), "{text}");
    }

    #[test]
    fn a_device_that_does_not_keep_the_order_is_told_of() {
        let text = markdown(&outcome(vec![measured(Path::Framed, 192, &[1.0], 3)]), 1, 1.0);
        assert!(text.contains("192 bytes: 3 of 100 messages"), "{text}");
    }
}

//! Judges a run: against the kernel's transcript, the counters, and how the processes ended.

use std::fmt::Write;

use super::AT_LEAST;
use super::pair::{Network, Preloaded, Report, Run, Variant};
use super::stats::Stats;
use crate::behaviours::{Behaviour, Tally};
use crate::calls::Family;
use crate::side::{SETTLING_ROUNDS, WARM_UP_BYTES};

/// Why any connection with an unshimmed peer may stay on TCP.
const ALONE: &[&str] =
    &["peer-without-thallus", "short", "no-answer", "shutdown-before-upgrade", "unseen-wait", "nothing-read"];

/// Why any connection may stay on TCP with a peer that a rule names, where no device has its address: the client says no
/// HELLO, unless the server has said something before, and no server hears one.
const WITHOUT_DEVICE: &[&str] =
    &["no-device", "peer-without-thallus", "peer-spoke-first", "short", "shutdown-before-upgrade"];

/// Why any connection stays on TCP that is not to leave it.
const SWITCHED_OFF: &[&str] = &["disabled"];

/// Whether both runs on the kernel went well and told the same.
///
/// # Errors
/// What was wrong, in full.
pub fn check_on_kernel(behaviour: &Behaviour, first: &Run, second: &Run) -> Result<(), String> {
    let mut faults = ended_well(behaviour, first);
    faults.push_str(&ended_well(behaviour, second));
    faults.push_str(&compare("first run", first, "second run", second));
    settle(faults, &[("first run", first), ("second run", second)])
}

/// Whether a run with the library went as on the kernel, over the fabric that was expected.
///
/// # Errors
/// What was wrong, in full.
pub fn check(
    behaviour: &Behaviour,
    variant: Variant,
    preloaded: Preloaded,
    kernel: &Run,
    shimmed: &Run,
) -> Result<(), String> {
    let mut faults = ended_well(behaviour, kernel);
    faults.push_str(&ended_well(behaviour, shimmed));
    faults.push_str(&compare("kernel", kernel, "shim", shimmed));
    let sides = shimmed.sides.iter().zip(behaviour.tally).zip(behaviour.chimes);
    for (left, ((report, tally), chimes)) in [true, false].into_iter().zip(sides) {
        let fault = match preloaded {
            Preloaded::Neither => continue,
            Preloaded::Both if variant.off => alone_tally(behaviour, SWITCHED_OFF, &report.stats, tally)
                .or_else(|| uncounted(behaviour, variant, &report.stats, tally)),
            Preloaded::Both if variant.named => alone_tally(behaviour, WITHOUT_DEVICE, &report.stats, tally),
            Preloaded::Both if variant.rounds >= Variant::USUAL.rounds => {
                warm_tally(behaviour, variant, report, tally)
                    .or_else(|| too_few_chimes(&report.stats, chimes))
            }
            Preloaded::Both => total_tally(&report.stats, tally),
            Preloaded::Left if !left => continue,
            Preloaded::Right if left => continue,
            Preloaded::Left | Preloaded::Right => {
                let reasons = if variant.named { WITHOUT_DEVICE } else { ALONE };
                alone_tally(behaviour, reasons, &report.stats, tally)
            }
        };
        if let Some(fault) = fault {
            let side = if left { "left" } else { "right" };
            let _ = writeln!(faults, "{side} side: {fault}: {:?}", report.stats);
        }
    }
    let [left, right] = [0, 1].map(|side| &shimmed.sides[side].stats);
    // Each side's connections are the other's: then what is received was sent.
    let opposite = behaviour.tally.iter().all(|&tally| total(tally).is_some())
        && left.connections() == right.connections();
    if preloaded == Preloaded::Both && opposite {
        for (from, to) in [(left, right), (right, left)] {
            if from.sent() < to.received() {
                let _ = writeln!(faults, "{} bytes sent, {} received", from.sent(), to.received());
            }
        }
    }
    settle(faults, &[("kernel", kernel), ("shim", shimmed)])
}

/// Lines of a transcript that a failure shows: the last ones, and those before a difference.
const SHOWN: usize = 12;

fn settle(faults: String, runs: &[(&str, &Run)]) -> Result<(), String> {
    if faults.is_empty() {
        return Ok(());
    }
    let mut text = faults;
    for (name, run) in runs {
        for (side, report) in ["left", "right"].iter().zip(&run.sides) {
            let _ = writeln!(text, "--- {name}, {side} side, {}", report.status);
            show_until(&mut text, &report.transcript, usize::MAX);
            text.push_str(&report.stderr);
        }
        if let Some(overdue) = &run.overdue {
            let _ = writeln!(text, "--- {name}: {overdue}");
        }
    }
    Err(text)
}

/// Shows the lines of a transcript before line `end`.
fn show_until(text: &mut String, transcript: &str, end: usize) {
    let count = transcript.lines().count().min(end);
    let skipped = count.saturating_sub(SHOWN);
    if skipped > 0 {
        let _ = writeln!(text, "  … {skipped} lines");
    }
    for line in transcript.lines().take(count).skip(skipped) {
        let _ = writeln!(text, "  {line}");
    }
}

fn ended_well(behaviour: &Behaviour, run: &Run) -> String {
    let mut faults = String::new();
    if run.overdue.is_some() {
        faults.push_str("it hangs\n");
    }
    for ((side, report), &end) in ["left", "right"].iter().zip(&run.sides).zip(&behaviour.end) {
        if report.end() != end {
            let _ = writeln!(faults, "the {side} side ended with {:?}, not {end:?}", report.end());
        }
    }
    faults
}

fn compare(first_name: &str, first: &Run, second_name: &str, second: &Run) -> String {
    let mut faults = String::new();
    for (side, (first, second)) in ["left", "right"].iter().zip(first.sides.iter().zip(&second.sides)) {
        let mut ours = first.transcript.lines();
        let mut theirs = second.transcript.lines();
        for number in 0.. {
            match (ours.next(), theirs.next()) {
                (None, None) => break,
                (Some(ours), Some(theirs)) if agree(ours, theirs) => {}
                (ours, theirs) => {
                    let show = |line: Option<&str>| line.unwrap_or("(nothing more)").to_owned();
                    let _ = writeln!(faults, "{side} side:");
                    show_until(&mut faults, &first.transcript, number);
                    let _ = writeln!(
                        faults,
                        "then  {first_name}: {}\n      {second_name}: {}",
                        show(ours),
                        show(theirs)
                    );
                    break;
                }
            }
        }
    }
    faults
}

/// Lines agree if they are equal, or state amounts of the same thing of which the second is not smaller.
fn agree(first: &str, second: &str) -> bool {
    let amount = |line: &str| -> Option<(String, u64)> {
        let (what, amount) = line.strip_prefix(AT_LEAST)?.rsplit_once(' ')?;
        Some((what.to_owned(), amount.parse().ok()?))
    };
    match (amount(first), amount(second)) {
        (Some((what, least)), Some((same, amount))) => what == same && amount >= least,
        _ => first == second,
    }
}

fn warm_tally(behaviour: &Behaviour, variant: Variant, report: &Report, tally: Tally) -> Option<String> {
    let stats = &report.stats;
    let counted = match tally {
        Tally::Upgraded(count) => (upgraded(stats) == count && stats.connections() == count)
            .then_some(())
            .ok_or(format!("{count} connections should have left TCP")),
        Tally::Mixed(count, reasons) => {
            let wanted = reasons.iter().map(|&(reason, count)| (reason.to_owned(), count)).collect();
            (upgraded(stats) == count && stats.not_upgraded == wanted)
                .then_some(())
                .ok_or(format!("{count} connections should have left TCP, and {reasons:?} stayed"))
        }
        Tally::Returned(count) => (upgraded(stats) == count && stats.returned_to_tcp == count)
            .then_some(())
            .ok_or(format!("{count} connections should have left TCP, and gone back")),
        Tally::StayedOrUncounted => {
            (upgraded(stats) == 0).then_some(()).ok_or("no connection should have left TCP".to_owned())
        }
        // Between hosts a connection whose server speaks first stays on TCP; which side is faster depends on timing.
        Tally::AtLeast(_, total) if between_hosts() => return total_tally(stats, Tally::Total(total)),
        Tally::AtLeast(count, total) => (upgraded(stats) >= count && stats.connections() == total)
            .then_some(())
            .ok_or(format!("{count} of {total} connections should have left TCP")),
        Tally::Stayed(count) => (upgraded(stats) == 0 && stats.connections() == count)
            .then_some(())
            .ok_or(format!("{count} connections should have stayed on TCP")),
        Tally::Total(_) | Tally::Unknown => return total_tally(stats, tally),
    };
    if let Err(fault) = counted {
        return Some(fault);
    }
    // After the warm-up every byte takes the ring; unless the process has forked, which could not use a queue pair, or one of the
    // two has shut down reading, which an `AF_UNIX` connection goes back for.
    let rounds = variant.rounds + if between_hosts() { SETTLING_ROUNDS } else { 0 };
    let warm_up = (rounds * WARM_UP_BYTES) as u64;
    let returned = (between_hosts() || variant.family == Family::Unix) && stats.returned_to_tcp > 0;
    (behaviour.is_connected() && tally == Tally::Upgraded(1) && !returned && stats.tcp_bytes_sent > warm_up)
        .then(|| format!("more than {warm_up} bytes went over TCP"))
}

/// Whether the other process was woken by its ear as often as it should.
fn too_few_chimes(stats: &Stats, least: u64) -> Option<String> {
    let few = if between_hosts() { stats.chimes_sent > 0 } else { stats.chimes_sent < least };
    few.then(|| format!("{} of {} bells were chimes", stats.chimes_sent, stats.doorbells_sent))
}

/// Connections that left TCP as they should.
fn upgraded(stats: &Stats) -> u64 {
    Network::of_environment().map_or(0, |network| stats.over(network.fabric()))
}

fn between_hosts() -> bool {
    Network::of_environment().is_ok_and(|network| network != Network::Loopback)
}

fn total_tally(stats: &Stats, tally: Tally) -> Option<String> {
    let total = total(tally)?;
    (stats.connections() != total).then(|| format!("{total} connections should be counted"))
}

fn alone_tally(behaviour: &Behaviour, reasons: &[&str], stats: &Stats, tally: Tally) -> Option<String> {
    if upgraded(stats) != 0 {
        return Some("nothing can leave TCP without the other side's library, or a device".to_owned());
    }
    // What stayed for a reason of its own may have that reason here as well.
    let own: &[(&str, u64)] = if let Tally::Mixed(_, reasons) = tally { reasons } else { &[] };
    let strange = stats.not_upgraded.keys().find(|reason| {
        ![reasons, behaviour.alone].concat().contains(&reason.as_str())
            && !own.iter().any(|(other, _)| other == reason)
    });
    if let Some(reason) = strange {
        return Some(format!("{reason} is not why it stayed on TCP"));
    }
    total_tally(stats, tally)
}

/// The bytes of the warm-up, which went over TCP, have to be counted, although the kernel alone serves most of its calls.
fn uncounted(behaviour: &Behaviour, variant: Variant, stats: &Stats, tally: Tally) -> Option<String> {
    let warm_up = (variant.rounds * WARM_UP_BYTES) as u64;
    let fewest = stats.tcp_bytes_sent.min(stats.tcp_bytes_received);
    (behaviour.is_connected() && tally == Tally::Upgraded(1) && fewest < warm_up)
        .then(|| format!("less than {warm_up} bytes each way were counted"))
}

fn total(tally: Tally) -> Option<u64> {
    match tally {
        Tally::Upgraded(count) | Tally::Returned(count) | Tally::Stayed(count) | Tally::Total(count) => {
            Some(count)
        }
        Tally::AtLeast(_, count) => Some(count),
        Tally::Mixed(count, reasons) => Some(count + reasons.iter().map(|(_, count)| count).sum::<u64>()),
        Tally::StayedOrUncounted | Tally::Unknown => None,
    }
}

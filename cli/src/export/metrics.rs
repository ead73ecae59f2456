//! The metrics' names and their text (Prometheus, "Exposition formats", text-based format 0.0.4; names and units as in "Metric
//! and label naming"). Labels take a bounded number of values: three fabrics, and the reasons of one build.

use prometheus::core::Collector;
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder};

use super::totals::{FABRICS, Totals};
use crate::status::Report;

/// All metrics. Fails only if a name is none.
pub(super) fn text(report: &Report, totals: &Totals) -> prometheus::Result<String> {
    let registry = Registry::new();
    gauge(
        &registry,
        "thallus_processes",
        "Live processes that use the library and have had connections.",
        report.processes.len(),
    )?;
    gauge(
        &registry,
        "thallus_hidden_processes",
        "Processes that could not be looked at for lack of permission; nobody knows whether they use the library.",
        report.hidden_processes,
    )?;
    gauge(
        &registry,
        "thallus_other_version_processes",
        "Processes whose library is of another version; they are in no other metric.",
        report.other_versions,
    )?;
    gauge(
        &registry,
        "thallus_arenas_not_shown",
        "Arenas (of up to 8192 connection ends) that are in no other metric, for one user has too many.",
        report.arenas_not_shown,
    )?;
    let help = "Open connection ends, by what carries their bytes, and for tcp and unix why; a connection between two processes of \
                this host has two.";
    let ends = register(
        &registry,
        IntGaugeVec::new(Opts::new("thallus_connection_ends", help), &["fabric", "reason"])?,
    )?;
    // What was there once stays, so that it is seen to be gone.
    for (fabric, reason) in [("shm", ""), ("verbs", "")].into_iter().chain(totals.reasons.iter().copied()) {
        ends.with_label_values(&[fabric, reason]);
    }
    for end in &report.connections {
        ends.with_label_values(&[end.fabric, end.reason.unwrap_or_default()]).inc();
    }

    let sums = &totals.sums;
    counter(
        &registry,
        "thallus_connection_ends_seen_total",
        "Connection ends that have been seen.",
        sums.ends,
    )?;
    let bytes = [
        ("thallus_sent_bytes_total", "Application bytes that the connections seen have sent.", sums.sent),
        (
            "thallus_received_bytes_total",
            "Application bytes that the connections seen have received.",
            sums.received,
        ),
    ];
    for (name, help, sums) in bytes {
        let counter = register(&registry, IntCounterVec::new(Opts::new(name, help), &["fabric"])?)?;
        for (fabric, bytes) in FABRICS.iter().zip(sums) {
            counter.with_label_values(&[*fabric]).inc_by(bytes);
        }
    }
    let counters = [
        ("thallus_doorbells_sent_total", "Times a sleeping peer was woken.", sums.doorbells),
        (
            "thallus_sleeps_total",
            "Times a thread slept in the kernel for a connection that had left TCP.",
            sums.sleeps,
        ),
        ("thallus_spin_hits_total", "Times spinning ended such a wait before the sleep.", sums.spin_hits),
    ];
    for (name, help, value) in counters {
        counter(&registry, name, help, value)?;
    }
    let help = "The version of this command; always 1.";
    let info = register(&registry, IntGaugeVec::new(Opts::new("thallus_build_info", help), &["version"])?)?;
    info.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
    TextEncoder::new().encode_to_string(&registry.gather())
}

fn register<C: Collector + Clone + 'static>(registry: &Registry, metric: C) -> prometheus::Result<C> {
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

fn gauge(registry: &Registry, name: &str, help: &str, value: usize) -> prometheus::Result<()> {
    register(registry, IntGauge::new(name, help)?)?.set(i64::try_from(value).unwrap_or(i64::MAX));
    Ok(())
}

fn counter(registry: &Registry, name: &str, help: &str, value: u64) -> prometheus::Result<()> {
    register(registry, IntCounter::new(name, help)?)?.inc_by(value);
    Ok(())
}

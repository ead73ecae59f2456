//! What happened between two looks at all connections.

use std::collections::HashMap;
use std::time::Duration;

use serde::Serialize;

use crate::status::{Connection, Report};

/// One end of a connection, and what it did in an interval.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub(super) connection: Connection,
    #[serde(flatten)]
    pub(super) rates: Rates,
}

/// Means of an interval. Bytes are an application's, over whatever fabric.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Rates {
    #[serde(rename = "sent_per_second")]
    pub(super) sent: f64,
    #[serde(rename = "received_per_second")]
    pub(super) received: f64,
    #[serde(rename = "waits_per_second")]
    pub(super) waits: f64,
    #[serde(rename = "doorbells_per_second")]
    pub(super) doorbells: f64,
    /// The share of waits that spinning ended.
    pub(super) spun: Option<f64>,
    pub(super) seconds_per_wait: Option<f64>,
}

/// All rows, in no order, and what the report says besides.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) seconds: f64,
    pub(super) rows: Vec<Row>,
    pub(super) summary: String,
}

impl Snapshot {
    /// A connection that is not in `before` is counted from its beginning.
    pub(super) fn between(before: &Report, now: &Report, interval: Duration) -> Self {
        let seconds = interval.as_secs_f64();
        let known: HashMap<_, _> = before.connections.iter().map(|end| (key(end), end)).collect();
        Self::of(now, seconds, |end| (known.get(&key(end)).copied(), seconds))
    }

    /// Rates since each connection began.
    pub(super) fn first(report: &Report) -> Self {
        Self::of(report, 0.0, |end| (None, end.age_seconds))
    }

    fn of<'before>(
        report: &Report,
        seconds: f64,
        since: impl Fn(&Connection) -> (Option<&'before Connection>, f64),
    ) -> Self {
        let mut summary = String::new();
        crate::status::table::write_summary(&mut summary, report);
        let rows = report.connections.iter().map(|connection| {
            let (before, seconds) = since(connection);
            Row { connection: connection.clone(), rates: Rates::between(before, connection, seconds) }
        });
        Self { seconds, rows: rows.collect(), summary }
    }
}

/// Tells connections apart that had the same descriptor one after the other.
fn key(end: &Connection) -> (u32, u32, u64) {
    (end.pid, end.fd, end.opened_ns)
}

impl Rates {
    fn between(before: Option<&Connection>, now: &Connection, seconds: f64) -> Self {
        // A counter that another process is about to add to may seem to go back.
        let more = |count: fn(&Connection) -> u64| count(now).saturating_sub(before.map_or(0, count)) as f64;
        let per_second = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        let (spins, sleeps) = (more(|end| end.spin_hits), more(|end| end.sleeps));
        let waits = spins + sleeps;
        Self {
            sent: per_second(more(|end| end.bytes_sent)),
            received: per_second(more(|end| end.bytes_received)),
            waits: per_second(waits),
            doorbells: per_second(more(|end| end.doorbells_sent)),
            spun: (waits > 0.0).then(|| spins / waits),
            seconds_per_wait: (waits > 0.0).then(|| seconds / waits),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(opened_ns: u64, bytes: u64, spin_hits: u64, sleeps: u64) -> Connection {
        Connection {
            pid: 1,
            command: String::new(),
            fd: 3,
            role: "client",
            local: None,
            peer: None,
            fabric: "shm",
            reason: None,
            bytes_sent: bytes,
            bytes_received: 2 * bytes,
            ring_bytes_sent: 0,
            ring_bytes_received: 0,
            tcp_bytes_sent: 0,
            tcp_bytes_received: 0,
            doorbells_sent: 7,
            sleeps,
            spin_hits,
            age_seconds: 4.0,
            opened_ns,
        }
    }

    #[test]
    fn rates_are_of_the_interval_and_of_this_connection() {
        let known = [end(1, 100, 10, 10)];
        let known: HashMap<_, _> = known.iter().map(|end| (key(end), end)).collect();
        let rates = |now: &Connection| Rates::between(known.get(&key(now)).copied(), now, 2.0);

        let expected = Rates {
            sent: 50.0,
            received: 100.0,
            waits: 20.0,
            doorbells: 0.0,
            spun: Some(0.75),
            seconds_per_wait: Some(0.05),
        };
        assert_eq!(rates(&end(1, 200, 40, 20)), expected);
        // The same descriptor, opened anew: nothing to subtract.
        assert_eq!(rates(&end(2, 200, 0, 0)).sent, 100.0);
        assert_eq!((rates(&end(2, 200, 0, 0)).spun, rates(&end(2, 200, 0, 0)).doorbells), (None, 3.5));
        // Seen too early, a counter lags.
        assert_eq!(rates(&end(1, 99, 10, 10)).sent, 0.0);
    }
}

//! The library's own account of a process: what became of its connections, and what they carried.
//!
//! A process that runs with `THALLUS_STATS=DIR` leaves `DIR/PID.json` when it exits.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use anyhow::Context;
use serde::{Deserialize, Serialize};

/// Counts of one process, or of several added up.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Counters {
    /// Fabric → connections.
    pub(super) upgraded: BTreeMap<String, u64>,
    /// Reason → connections.
    pub(super) not_upgraded: BTreeMap<String, u64>,
    /// Those of `upgraded` that went back.
    #[serde(default)]
    pub(super) returned_to_tcp: u64,
    pub(super) ring_bytes_sent: u64,
    pub(super) ring_bytes_received: u64,
    pub(super) tcp_bytes_sent: u64,
    pub(super) tcp_bytes_received: u64,
    pub(super) doorbells_sent: u64,
    pub(super) sleeps: u64,
    pub(super) spin_hits: u64,
}

impl Counters {
    /// What the process `pid` left in `directory`; `None` if it left nothing.
    ///
    /// # Errors
    /// There is a file, and it can't be read or has another form.
    pub(super) fn read(directory: &Path, pid: u32) -> anyhow::Result<Option<Self>> {
        let path = directory.join(format!("{pid}.json"));
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("read {}", path.display())),
        };
        serde_json::from_str(&text).map(Some).with_context(|| format!("{} has another form", path.display()))
    }

    /// Adds another process's counts.
    pub(super) fn add(&mut self, other: &Self) {
        for (sum, part) in
            [(&mut self.upgraded, &other.upgraded), (&mut self.not_upgraded, &other.not_upgraded)]
        {
            for (name, count) in part {
                *sum.entry(name.clone()).or_default() += count;
            }
        }
        self.returned_to_tcp += other.returned_to_tcp;
        self.ring_bytes_sent += other.ring_bytes_sent;
        self.ring_bytes_received += other.ring_bytes_received;
        self.tcp_bytes_sent += other.tcp_bytes_sent;
        self.tcp_bytes_received += other.tcp_bytes_received;
        self.doorbells_sent += other.doorbells_sent;
        self.sleeps += other.sleeps;
        self.spin_hits += other.spin_hits;
    }

    /// Connections that left TCP.
    pub(super) fn upgraded(&self) -> u64 {
        self.upgraded.values().sum()
    }

    /// Whether `opened` connections left TCP, and none came back.
    pub(super) fn all_left(&self, opened: u64) -> bool {
        self.upgraded() == opened && self.returned_to_tcp == 0
    }

    /// The part of the bytes, sent and received, that did not go through TCP; 0 if there were none.
    pub(super) fn ring_share(&self) -> f64 {
        let ring = (self.ring_bytes_sent + self.ring_bytes_received) as f64;
        let tcp = (self.tcp_bytes_sent + self.tcp_bytes_received) as f64;
        if ring == 0.0 { 0.0 } else { ring / (ring + tcp) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JSON: &str = r#"{"pid": 4, "command": "thallus", "upgraded": {"shm": 2}, "not_upgraded": {"short": 1},
        "returned_to_tcp": 1, "ring_bytes_sent": 30, "ring_bytes_received": 60, "tcp_bytes_sent": 5, "tcp_bytes_received": 5,
        "doorbells_sent": 3, "sleeps": 2, "spin_hits": 9}"#;

    #[test]
    fn counts_of_processes_add_up() {
        let one: Counters = serde_json::from_str(JSON).unwrap();
        let mut sum = one.clone();
        sum.add(&one);
        assert_eq!(sum.upgraded(), 4);
        assert_eq!(sum.not_upgraded["short"], 2);
        assert_eq!(sum.returned_to_tcp, 2);
        assert_eq!(sum.ring_bytes_received, 120);
        assert!((sum.ring_share() - 0.9).abs() < 1e-9);
    }

    #[test]
    fn a_process_that_left_nothing_has_no_counts() {
        assert_eq!(Counters::read(Path::new("/nonexistent"), 1).unwrap(), None);
    }
}

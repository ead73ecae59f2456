//! What the library writes about a process when it ends (`THALLUS_STATS`).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Why a connection may stay on TCP although both ends have the library: it ended before it was worth it, or while one
/// end was still looking for the other.
pub const TOO_SHORT: &[&str] = &["short", "no-answer", "peer-without-thallus", "nothing-read"];

/// The sums over all processes of one side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Processes that wrote a file.
    pub processes: u64,
    /// Connections that left TCP, by fabric.
    pub upgraded: BTreeMap<String, u64>,
    /// Connections that stayed, by reason.
    pub not_upgraded: BTreeMap<String, u64>,
    /// Connections that left TCP, and went back.
    pub returned_to_tcp: u64,
    /// Application bytes sent through a ring.
    pub ring_bytes_sent: u64,
    /// Application bytes received through a ring.
    pub ring_bytes_received: u64,
    /// Application bytes sent over TCP.
    pub tcp_bytes_sent: u64,
    /// Application bytes received over TCP.
    pub tcp_bytes_received: u64,
    /// Bells rung.
    pub doorbells_sent: u64,
    /// Those that took another way than the connection's socket.
    pub chimes_sent: u64,
    /// Times a thread went to sleep in the kernel.
    pub sleeps: u64,
    /// Times spinning found what it waited for.
    pub spin_hits: u64,
}

impl Stats {
    /// Connections over shared memory.
    pub fn over_shared_memory(&self) -> u64 {
        self.over("shm")
    }

    /// Connections that left TCP for `fabric`.
    pub fn over(&self, fabric: &str) -> u64 {
        self.upgraded.get(fabric).copied().unwrap_or(0)
    }

    /// Connections counted, whatever became of them.
    pub fn connections(&self) -> u64 {
        self.upgraded.values().chain(self.not_upgraded.values()).sum()
    }

    /// Application bytes sent, over whatever.
    pub fn sent(&self) -> u64 {
        self.ring_bytes_sent + self.tcp_bytes_sent
    }

    /// Application bytes received, over whatever.
    pub fn received(&self) -> u64 {
        self.ring_bytes_received + self.tcp_bytes_received
    }

    fn add_file(&mut self, file: &Value) -> Result<()> {
        file["pid"].as_u64().context("pid")?;
        file["command"].as_str().context("command")?;
        self.processes += 1;
        add_counts(&mut self.upgraded, &file["upgraded"]).context("upgraded")?;
        add_counts(&mut self.not_upgraded, &file["not_upgraded"]).context("not_upgraded")?;
        for (name, sum) in [
            ("returned_to_tcp", &mut self.returned_to_tcp),
            ("ring_bytes_sent", &mut self.ring_bytes_sent),
            ("ring_bytes_received", &mut self.ring_bytes_received),
            ("tcp_bytes_sent", &mut self.tcp_bytes_sent),
            ("tcp_bytes_received", &mut self.tcp_bytes_received),
            ("doorbells_sent", &mut self.doorbells_sent),
            ("chimes_sent", &mut self.chimes_sent),
            ("sleeps", &mut self.sleeps),
            ("spin_hits", &mut self.spin_hits),
        ] {
            *sum += file[name].as_u64().context(name)?;
        }
        Ok(())
    }
}

fn add_counts(sums: &mut BTreeMap<String, u64>, counts: &Value) -> Result<()> {
    for (name, count) in counts.as_object().context("not an object")? {
        let count = count.as_u64().context("not a count")?;
        if count > 0 {
            *sums.entry(name.clone()).or_default() += count;
        }
    }
    Ok(())
}

/// The sums over all files of `folder`.
///
/// # Errors
/// If a file is not JSON, or lacks a key.
pub fn read_stats(folder: &Path) -> Result<Stats> {
    let mut stats = Stats::default();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        ensure!(
            path.extension().is_some_and(|extension| extension == "json"),
            "{} is no statistics file",
            path.display()
        );
        let text = fs::read_to_string(&path)?;
        serde_json::from_str(&text)
            .map_err(anyhow::Error::from)
            .and_then(|file| stats.add_file(&file))
            .with_context(|| format!("{}: {text}", path.display()))?;
    }
    Ok(stats)
}

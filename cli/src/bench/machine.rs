//! Where it was measured.

use std::fs;

use serde::{Deserialize, Serialize};

use super::plan::allowed_cpus;

/// What a reader of the numbers has to know about the machine.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Machine {
    pub(super) cpu: String,
    /// CPUs that the benchmark may use.
    pub(super) cpus: usize,
    pub(super) is_virtual: bool,
    pub(super) memory_bytes: u64,
    pub(super) kernel: String,
}

/// Reads the facts from /proc; what is not there is called unknown.
pub(super) fn facts() -> Machine {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let meminfo = read("/proc/meminfo");
    let kib: Option<u64> = meminfo.split_whitespace().nth(1).and_then(|total| total.parse().ok());
    Machine {
        cpu: field("model name").unwrap_or_else(|| format!("unknown {}", std::env::consts::ARCH)),
        cpus: allowed_cpus().map_or(0, |cpus| cpus.len()),
        is_virtual: field("flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
        memory_bytes: kib.unwrap_or(0) * 1024,
        kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
    }
}

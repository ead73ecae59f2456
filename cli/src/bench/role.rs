//! The two processes of a measurement: what they are told, and what they report.
//!
//! A session comes as one JSON argument. The server prints the endpoint it listens on, then, when its client
//! has left, its report; the client prints its report. Both as one line of JSON on standard output.

use std::path::Path;

use anyhow::Context;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::Signal;
use nix::sys::time::TimeVal;
use nix::unistd::Pid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::latency::Times;
use super::message::Phase;
use super::plan::{Wait, Workload};
use super::socket::{Endpoint, Listener};
use super::{connect, event_loop, idle, ping_pong, stream};

/// What one process of a measurement is to do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Session {
    pub(super) workload: Workload,
    pub(super) endpoint: Endpoint,
    /// The CPU to stay on.
    pub(super) cpu: Option<usize>,
    /// Seconds before the clock starts.
    pub(super) warm_up: f64,
    /// Seconds that the clock runs.
    pub(super) seconds: f64,
}

/// What one process of a measurement saw.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Report {
    /// Messages (or blocks, or connections) while the clock ran.
    pub(super) operations: u64,
    /// Wall time that those took. Zero in the server's report.
    pub(super) seconds: f64,
    /// CPU time of this process, user and system, over the same time.
    pub(super) cpu_seconds: f64,
    /// Connections opened, warm-up included. Zero in the server's report.
    pub(super) connections: u64,
    /// What this process holds when idle, in bytes over what it held before (workload `idle`).
    pub(super) memory: Option<Memory>,
    /// How long round trips took, of which some were timed. Empty in the server's report.
    #[serde(default)]
    pub(super) times: Times,
}

/// Resident memory in bytes, as `/proc/PID/smaps_rollup` counts it (proc(5)).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Memory {
    /// Resident set size.
    pub(super) rss: i64,
    /// The same, a page that n processes share counted as 1/n.
    pub(super) pss: i64,
}

/// Bytes of a message that is sent at a given rate.
const PACED_SIZE: usize = 64;

/// Serves one session.
pub(super) fn serve(session: &str) -> anyhow::Result<()> {
    let session = start(session)?;
    let (listener, endpoint) = Listener::bind(&session.endpoint).context("listen")?;
    say(&endpoint)?;
    let report = match session.workload {
        Workload::PingPong { wait: Wait::Epoll, size, .. } => {
            event_loop::serve(&listener, size, Meter::new())
        }
        Workload::PingPong { wait, size, .. } => ping_pong::serve(&listener, wait, size),
        Workload::Stream { memory } => stream::serve(&listener, memory),
        Workload::Paced { .. } => ping_pong::serve(&listener, Wait::Blocking, PACED_SIZE),
        Workload::Herd { .. } => event_loop::serve(&listener, event_loop::HERD_SIZE, Meter::new()),
        Workload::Connect { .. } => connect::serve(&listener),
        Workload::Idle { .. } => idle::serve(&listener),
    };
    say(&report?)
}

/// Drives one session.
pub(super) fn drive(session: &str) -> anyhow::Result<()> {
    let session = start(session)?;
    let report = match session.workload {
        Workload::PingPong { wait: Wait::Epoll, size, connections } => {
            event_loop::drive(&session, size, connections)
        }
        Workload::Herd { active, connections } => event_loop::drive_herd(&session, active, connections),
        Workload::PingPong { wait, size, .. } => ping_pong::drive(&session, wait, size),
        Workload::Stream { memory } => stream::drive(&session, memory),
        Workload::Paced { rate } => ping_pong::drive_paced(&session, PACED_SIZE, rate),
        Workload::Connect { requests } => connect::drive(&session, requests),
        Workload::Idle { connections } => idle::drive(&session, connections),
    };
    say(&report?)
}

fn start(session: &str) -> anyhow::Result<Session> {
    set_pdeathsig(Signal::SIGKILL).context("follow the parent")?;
    let session: Session = from_json(session)?;
    if let Workload::Herd { connections, .. } | Workload::PingPong { connections, .. } = session.workload {
        event_loop::allow_connections(connections)?;
    }
    if let Some(cpu) = session.cpu {
        let mut set = CpuSet::new();
        set.set(cpu).context("CPU number")?;
        sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("stay on CPU {cpu}"))?;
    }
    Ok(session)
}

fn say(line: &impl Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string(line)?);
    Ok(())
}

/// Reads one line that a role printed.
pub(super) fn from_json<T: DeserializeOwned>(line: &str) -> anyhow::Result<T> {
    serde_json::from_str(line).with_context(|| format!("unexpected line {line:?}"))
}

/// Takes a server's clocks down where the client's stamps say that the measurement starts and ends.
#[derive(Debug)]
pub(super) struct Meter {
    operations: u64,
    started: Option<Usage>,
    report: Option<Report>,
    with_memory: bool,
}

impl Meter {
    pub(super) fn new() -> Self {
        Self { operations: 0, started: None, report: None, with_memory: false }
    }

    /// One that also notes what memory the process holds.
    pub(super) fn with_memory() -> Self {
        Self { with_memory: true, ..Self::new() }
    }

    /// Notes that a message of `phase` has come.
    pub(super) fn observe(&mut self, phase: Phase) -> anyhow::Result<()> {
        match phase {
            Phase::WarmUp => {}
            Phase::Measured => {
                if self.started.is_none() {
                    self.started = Some(Usage::now(self.with_memory)?);
                }
                self.operations += 1;
            }
            Phase::End => {
                let started = self.started.as_ref().context("the end came before the start")?;
                let report = Usage::now(self.with_memory)?.since(started, self.operations);
                self.report = Some(report);
            }
        }
        Ok(())
    }

    /// Whether the last message has come.
    pub(super) fn has_ended(&self) -> bool {
        self.report.is_some()
    }

    /// The server's report.
    ///
    /// # Errors
    /// The client left without sending its last message.
    pub(super) fn finish(self) -> anyhow::Result<Report> {
        self.report.context("the client left before the end")
    }
}

/// What this process has used up to now.
#[derive(Debug, Clone, Copy)]
pub(super) struct Usage {
    cpu_seconds: f64,
    memory: Option<Memory>,
}

impl Usage {
    pub(super) fn now(with_memory: bool) -> anyhow::Result<Self> {
        let memory = if with_memory { Some(resident(Path::new("/proc/self/smaps_rollup"))?) } else { None };
        let usage = getrusage(UsageWho::RUSAGE_SELF).context("getrusage")?;
        Ok(Self { cpu_seconds: as_seconds(usage.user_time()) + as_seconds(usage.system_time()), memory })
    }

    /// A report on what was used from `earlier` to this; wall time and connections are left to the caller.
    pub(super) fn since(&self, earlier: &Self, operations: u64) -> Report {
        let memory = self
            .memory
            .zip(earlier.memory)
            .map(|(now, then)| Memory { rss: now.rss - then.rss, pss: now.pss - then.pss });
        Report {
            operations,
            cpu_seconds: self.cpu_seconds - earlier.cpu_seconds,
            memory,
            ..Report::default()
        }
    }
}

fn as_seconds(time: TimeVal) -> f64 {
    time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6
}

/// Reads the `Rss` and `Pss` lines of a `smaps_rollup` file.
fn resident(path: &Path) -> anyhow::Result<Memory> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let bytes = |name: &str| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .with_context(|| format!("{name} is missing"))?;
        let kib: i64 =
            line.trim().trim_end_matches(" kB").parse().with_context(|| format!("{name}{line}"))?;
        anyhow::Ok(kib * 1024)
    };
    Ok(Memory { rss: bytes("Rss:")?, pss: bytes("Pss:")? })
}

//! Runs the plan: for each variant, its transports in turn, round by round.
//!
//! TCP, Unix and Thallus alternate within one variant, so that a machine that grows slower or faster while
//! the benchmark runs does so for all of them.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::sys::signal::{SigSet, Signal};
use serde::de::DeserializeOwned;

use super::counters::Counters;
use super::latency::Times;
use super::plan::{Transport, Variant, Workload};
use super::role::{self, Memory, Report, Session};
use super::socket::Endpoint;
use super::stream;
use crate::{library, tell};

/// Seconds on the same connections before the clock starts: long enough for windows to open, and for a
/// connection to find out whether its other side can do better than TCP.
const WARM_UP: f64 = 0.25;
/// Seconds that a measurement may take over what it was asked for, before it counts as hung.
const GRACE: f64 = 30.0;

/// One measurement.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    /// In the workload's own unit.
    pub(super) value: f64,
    /// CPU seconds of both processes for a million messages (blocks, connections).
    pub(super) cpu_per_million: Option<f64>,
    /// Bytes that client and server hold (workload `idle`).
    pub(super) memory: Option<(Memory, Memory)>,
    /// Connections that the client opened.
    pub(super) connections: u64,
    /// How long round trips took; empty for other workloads.
    pub(super) times: Times,
    /// What the library of the client counted, where there was one.
    pub(super) client: Option<Counters>,
    /// The same of the server.
    pub(super) server: Option<Counters>,
}

/// All measurements of a variant over one transport.
#[derive(Debug)]
pub(super) struct Series {
    pub(super) transport: Transport,
    pub(super) samples: Vec<Sample>,
}

/// All measurements of a variant.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) variant: Variant,
    pub(super) series: Vec<Series>,
}

/// What a run of the plan gave.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) measured: Vec<Measured>,
    /// Which measurement failed, and how.
    pub(super) failures: Vec<String>,
}

/// Measures every variant `rounds` times over each of its transports, telling about it on standard error.
///
/// # Errors
/// The library is missing, or there is no place for temporary files. A measurement that fails is only noted.
pub(super) fn run(plan: &[Variant], rounds: u32, seconds: f64) -> anyhow::Result<Outcome> {
    let program = std::env::current_exe().context("find this program")?;
    let needs_library = |variant: &Variant| {
        variant.transports.iter().any(|transport| transport.preloads_client() || transport.preloads_server())
    };
    let library = library::beside(&program);
    if plan.iter().any(needs_library) {
        let found = library.as_deref().with_context(|| {
            let places = library::places(&program);
            format!("there is no {} in {places}: build it, or measure without it (--transport tcp --transport unix)", library::NAME)
        })?;
        library::check_path(found)?;
    }
    let scratch = Scratch::new(|| {})?;
    let bench = Bench { program, library, scratch: &scratch.0, seconds };
    let mut outcome = Outcome::default();
    for (index, variant) in plan.iter().enumerate() {
        tell(format_args!("[{}/{}] {}:", index + 1, plan.len(), variant.name()));
        let mut series: Vec<_> =
            variant.transports.iter().map(|&transport| Series { transport, samples: Vec::new() }).collect();
        for round in 0..rounds {
            for Series { transport, samples } in &mut series {
                match bench.one(variant, *transport) {
                    Ok(sample) => {
                        tell(format_args!(" {} {}", transport.name(), Short(sample.value)));
                        samples.push(sample);
                    }
                    Err(error) => {
                        let name = transport.name();
                        tell(format_args!("\n  {name} failed in round {}: {error:#}\n", round + 1));
                        outcome.failures.push(format!(
                            "{} over {}: {error:#}",
                            variant.name(),
                            transport.name()
                        ));
                    }
                }
            }
        }
        tell(format_args!("\n"));
        outcome.measured.push(Measured { variant: variant.clone(), series });
    }
    Ok(outcome)
}

struct Bench<'a> {
    program: PathBuf,
    library: Option<PathBuf>,
    scratch: &'a Path,
    seconds: f64,
}

impl Bench<'_> {
    fn one(&self, variant: &Variant, transport: Transport) -> anyhow::Result<Sample> {
        let folder = self.scratch.join("one");
        std::fs::create_dir(&folder).context("make a folder for the measurement")?;
        let sample = self.pair(variant, transport, &folder);
        std::fs::remove_dir_all(&folder).context("remove it")?;
        sample
    }

    /// Leaves its socket and the library's counters in `folder`.
    fn pair(&self, variant: &Variant, transport: Transport, folder: &Path) -> anyhow::Result<Sample> {
        let deadline = Instant::now() + Duration::from_secs_f64(WARM_UP + self.seconds + GRACE);
        let endpoint = match transport {
            Transport::Unix | Transport::ThallusUnix => Endpoint::Unix(folder.join("socket")),
            Transport::Bare => Endpoint::Bare(PathBuf::new()),
            _ => Endpoint::free_port(),
        };
        let (workload, seconds) = (variant.workload, self.seconds);
        let session =
            Session { workload, endpoint, cpu: variant.placement.server(), warm_up: WARM_UP, seconds };
        let mut server = self.start("serve", &session, transport.preloads_server(), folder)?;
        let endpoint = server.say(deadline).context("server")?;
        let session = Session { endpoint, cpu: variant.placement.client(), ..session };
        let mut client = self.start("drive", &session, transport.preloads_client(), folder)?;
        let seen_by_client: Report = client.say(deadline).context("client")?;
        let seen_by_server: Report = server.say(deadline).context("server")?;
        client.finish(deadline).context("client")?;
        server.finish(deadline).context("server")?;
        let (client, server) = (Counters::read(folder, client.id())?, Counters::read(folder, server.id())?);
        Ok(Sample { client, server, ..evaluate(workload, &seen_by_client, &seen_by_server)? })
    }

    fn start(&self, role: &str, session: &Session, preload: bool, counts: &Path) -> anyhow::Result<Process> {
        let mut command = Command::new(&self.program);
        command.args(["bench", role, &serde_json::to_string(session)?]);
        // Whoever measures under `thallus run` must not get a preloaded baseline.
        command.env_remove("LD_PRELOAD").env_remove("THALLUS_STATS");
        if preload {
            let library = self.library.as_ref().context("no library to preload")?;
            command.env("LD_PRELOAD", library).env("THALLUS_STATS", counts);
        }
        Process::start(command)
    }
}

fn evaluate(workload: Workload, client: &Report, server: &Report) -> anyhow::Result<Sample> {
    let operations = client.operations as f64;
    let value = match workload {
        Workload::PingPong { .. }
        | Workload::Paced { .. }
        | Workload::Herd { .. }
        | Workload::Connect { .. } => operations / client.seconds,
        Workload::Stream { .. } => operations * stream::BLOCK as f64 / client.seconds / 1e9,
        Workload::Idle { connections } => {
            let memory = client.memory.zip(server.memory).context("no memory in the reports")?;
            (memory.0.pss + memory.1.pss) as f64 / connections as f64
        }
    };
    let is_idle = matches!(workload, Workload::Idle { .. });
    let requests = if let Workload::Connect { requests } = workload { requests as u64 } else { 1 };
    let messages = client.operations * requests;
    let agree = is_idle || messages == server.operations;
    ensure!(agree, "the client counted {messages} messages, the server {}", server.operations);
    Ok(Sample {
        value,
        cpu_per_million: (!is_idle).then(|| (client.cpu_seconds + server.cpu_seconds) / operations * 1e6),
        memory: client.memory.zip(server.memory),
        connections: client.connections,
        times: client.times.clone(),
        client: None,
        server: None,
    })
}

/// A running role. It dies with this value, and with this process.
pub(super) struct Process {
    child: Child,
    lines: Receiver<String>,
}

impl Process {
    pub(super) fn start(mut command: Command) -> anyhow::Result<Self> {
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("start a role")?;
        let output = BufReader::new(child.stdout.take().expect("it was asked for"));
        let (sender, lines) = channel();
        // The reader ends with the child's output; nobody else holds that pipe.
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Ok(Self { child, lines })
    }

    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// The next line of its output, which is JSON.
    fn say<T: DeserializeOwned>(&mut self, deadline: Instant) -> anyhow::Result<T> {
        role::from_json(&self.line(deadline)?)
    }

    /// The next line of its output.
    pub(super) fn line(&mut self, deadline: Instant) -> anyhow::Result<String> {
        match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => bail!("no result in time"),
            Err(RecvTimeoutError::Disconnected) => bail!("it left without a result: {}", self.child.wait()?),
        }
    }

    /// Waits until it has left.
    pub(super) fn finish(&mut self, deadline: Instant) -> anyhow::Result<()> {
        match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => bail!("unexpected line {line:?}"),
            Err(RecvTimeoutError::Timeout) => bail!("it does not exit"),
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.child.wait()?;
                ensure!(status.success(), "{status}");
                Ok(())
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only for a child that has been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A folder of our own, which is also removed when a signal ends the benchmark.
pub(super) struct Scratch(pub(super) PathBuf);

impl Scratch {
    /// `farewell` is called before a signal ends this process.
    pub(super) fn new(farewell: impl FnOnce() + Send + 'static) -> anyhow::Result<Self> {
        let path = std::env::temp_dir().join(format!("thallus-bench.{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| format!("make {}", path.display()))?;
        let mut signals = SigSet::empty();
        for signal in [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM] {
            signals.add(signal);
        }
        signals.thread_block().context("block signals")?;
        let scratch = Self(path.clone());
        std::thread::spawn(move || {
            let code = signals.wait().map_or(1, |signal| 128 + signal as i32);
            farewell();
            drop(Self(path));
            // The roles follow their parent.
            std::process::exit(code);
        });
        Ok(scratch)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Nothing to be done about it: the system clears its temporary folder some day.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A value in four digits, for the progress line.
struct Short(f64);

impl std::fmt::Display for Short {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            value if value.abs() >= 1e6 => write!(out, "{:.2}M", value / 1e6),
            value if value.abs() >= 1e4 => write!(out, "{:.1}k", value / 1e3),
            value => write!(out, "{value:.2}"),
        }
    }
}

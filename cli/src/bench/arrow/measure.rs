//! Starts `demo-server` and `demo-client`, and reads what the client says.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

use super::plan::{Case, OURS, WAYS, Way};
use super::results::{Measured, Memcpy, Sample};
use crate::bench::counters::Counters;
use crate::bench::measure::{Process, Scratch};
use crate::{library, tell};

/// Nothing takes so long.
const PATIENCE: Duration = Duration::from_secs(300);

/// What demo-client --summary prints.
#[derive(Debug, Deserialize)]
struct Summary {
    rows: u64,
    bytes: u64,
    batches: u64,
    pulled: u64,
    borrowed: u64,
    rounds: Vec<f64>,
    checksum: Option<String>,
    memcpy_bytes: Option<u64>,
    memcpy_seconds: Option<f64>,
}

/// Measures all cases, telling about it on standard error.
pub(super) fn run(dataset: &Path, cases: &[Case], rounds: u32) -> anyhow::Result<Vec<Measured>> {
    let bench = Bench::new(dataset)?;
    let mut results = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        tell(format_args!("[{}/{}] {}\n", index + 1, cases.len(), case.name()));
        results.push(bench.case(case, rounds).with_context(|| case.name())?);
    }
    Ok(results)
}

struct Bench {
    server: PathBuf,
    client: PathBuf,
    library: PathBuf,
    dataset: PathBuf,
    servers: Servers,
    scratch: Scratch,
}

/// Those that run now. They end with the value, and when a signal ends this process.
#[derive(Clone, Default)]
struct Servers(Arc<Mutex<Vec<Process>>>);

impl Servers {
    fn end(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Where two servers listen, one with the library.
struct Addresses {
    plain: [String; 2],
    library: [String; 2],
}

impl Bench {
    fn new(dataset: &Path) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("find this program")?;
        let beside = |name: &str| {
            let path = program.with_file_name(name);
            ensure!(path.exists(), "there is no {}: build it (see docs/columns.md)", path.display());
            Ok(path)
        };
        let library = library::beside(&program);
        let library = library
            .with_context(|| format!("there is no {} in {}", library::NAME, library::places(&program)))?;
        library::check_path(&library)?;
        let servers = Servers::default();
        let farewell = servers.clone();
        Ok(Self {
            server: beside("demo-server")?,
            client: beside("demo-client")?,
            library,
            dataset: dataset.to_owned(),
            scratch: Scratch::new(move || farewell.end())?,
            servers,
        })
    }

    fn case(&self, case: &Case, rounds: u32) -> anyhow::Result<Measured> {
        let addresses =
            Addresses { plain: self.start_server(case, false)?, library: self.start_server(case, true)? };
        let measured = self.measure(case, rounds, &addresses);
        self.servers.end();
        measured
    }

    fn measure(&self, case: &Case, rounds: u32, addresses: &Addresses) -> anyhow::Result<Measured> {
        // Also fills the memory of servers that answer from there.
        let mut reference = None;
        for way in WAYS {
            let (summary, _) = self.ask(case, way, addresses, &["--checksum"])?;
            let rows = (summary.rows, summary.checksum.context("no checksum")?);
            let first = reference.get_or_insert_with(|| rows.clone());
            ensure!(rows == *first, "{}: {first:?}, {}: {rows:?}", WAYS[0].name(), way.name());
        }
        let (rows, checksum) = reference.context("no way")?;

        let mut samples = WAYS.map(|_| Vec::new());
        let mut memcpy = Vec::new();
        let mut bytes = 0;
        for _ in 0..rounds {
            for (way, samples) in WAYS.into_iter().zip(&mut samples) {
                let repeat = case.repetitions().to_string();
                let mut options = vec!["--repeat", &repeat];
                if way == OURS {
                    options.push("--memcpy");
                }
                let (summary, counters) = self.ask(case, way, addresses, &options)?;
                if let (Some(copied), Some(seconds)) = (summary.memcpy_bytes, summary.memcpy_seconds) {
                    memcpy.push(Memcpy { bytes: copied, seconds });
                }
                if way == OURS {
                    bytes = summary.bytes; // others pad, repeat or compress
                }
                samples.push(Sample {
                    first: summary.rounds[0],
                    warm: summary.rounds[1..].to_vec(),
                    counters,
                    lent: (summary.pulled + summary.borrowed) as f64 / summary.batches.max(1) as f64,
                });
            }
        }
        Ok(Measured { case: case.clone(), rows, bytes, checksum, samples, memcpy })
    }

    fn start_server(&self, case: &Case, library: bool) -> anyhow::Result<[String; 2]> {
        let mut command = self.command(&self.server, library);
        command.args(["--listen", "127.0.0.1:0", "--flight-listen", "127.0.0.1:0", "--dataset"]);
        let log = self.scratch.0.join("server.log");
        command.arg(&self.dataset).stderr(File::create(&log).context("a file for demo-server's log")?);
        command.args(case.figure.server_options());
        let deadline = Instant::now() + PATIENCE;
        let mut server = Process::start(command)?;
        let told = || std::fs::read_to_string(&log).unwrap_or_default();
        let address = server.line(deadline).with_context(|| format!("demo-server: {}", told().trim_end()))?;
        let addresses = [address, server.line(deadline)?];
        self.servers.0.lock().unwrap_or_else(PoisonError::into_inner).push(server);
        Ok(addresses)
    }

    /// Also returns what the client's library counted, where it had one.
    fn ask(
        &self,
        case: &Case,
        way: Way,
        addresses: &Addresses,
        options: &[&str],
    ) -> anyhow::Result<(Summary, Option<Counters>)> {
        let [scan, flight] = if way.library { &addresses.library } else { &addresses.plain };
        let address = if way.transport == "flight" { flight } else { scan };
        let mut command = self.command(&self.client, way.library);
        command.args(["--connect", address, "--sql", &case.sql, "--transport", way.transport, "--summary"]);
        command.args(case.figure.client_options()).args(options);
        if way.lz4 {
            command.args(["--compression", "lz4"]);
        }
        let deadline = Instant::now() + PATIENCE;
        let mut client = Process::start(command)?;
        let line = client.line(deadline).with_context(|| format!("demo-client over {}", way.name()))?;
        let summary: Summary = serde_json::from_str(&line).context("demo-client's summary")?;
        client.finish(deadline).context("demo-client")?;
        let counters = Counters::read(&self.scratch.0, client.id())?;
        if way.library && counters.is_none() {
            bail!("the library has left no counters of demo-client");
        }
        Ok((summary, counters))
    }

    /// Whoever measures under `thallus run` must not get a preloaded baseline.
    fn command(&self, program: &Path, library: bool) -> Command {
        let mut command = Command::new(program);
        command.env_remove("LD_PRELOAD").env_remove("THALLUS_STATS");
        if library {
            command.env("LD_PRELOAD", &self.library).env("THALLUS_STATS", &self.scratch.0);
        }
        command
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.servers.end();
    }
}

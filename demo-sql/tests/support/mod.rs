//! Processes: workers and those that ask them.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_thallus-shuffle-sql");

/// After which something counts as a hang.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The same for a process, which may have many queries to run.
const LONG_PATIENCE: Duration = Duration::from_secs(240);

/// Joins by shuffling, and scans in as many tasks as there are workers, however small the tables are.
pub(crate) const SPREAD: [&str; 5] = [
    "--scan-bytes=1",
    "--partitions=2",
    "--set=datafusion.optimizer.hash_join_single_partition_threshold=0",
    "--set=datafusion.optimizer.hash_join_single_partition_threshold_rows=0",
    "--set=datafusion.optimizer.enable_dynamic_filter_pushdown=false",
];

pub(crate) fn library() -> String {
    std::env::var("THALLUS_LIBRARY").expect("THALLUS_LIBRARY: the path of libthallus_shim.so")
}

pub(crate) fn program(library: Option<&str>) -> Command {
    let mut command = Command::new(PROGRAM);
    command.env_remove("LD_PRELOAD").env("RUST_BACKTRACE", "0");
    command.envs(library.map(|library| ("LD_PRELOAD", library)));
    command
}

/// Tables of so many lines.
pub(crate) struct Tables {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

impl Tables {
    pub(crate) fn new(rows: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tables");
        let made = program(None).arg("generate").arg(&path).arg(format!("--rows={rows}")).status().unwrap();
        assert!(made.success());
        Self { _folder: folder, path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Killed when it is dropped.
pub(crate) struct Process(pub(crate) Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have ended
        let _ = self.0.wait();
    }
}

impl Process {
    /// What it said, once it has ended.
    pub(crate) fn output(mut self) -> Output {
        let (stdout, stderr) = (self.0.stdout.take().unwrap(), self.0.stderr.take().unwrap());
        let (stdout, stderr) = (thread::spawn(|| read_all(stdout)), thread::spawn(|| read_all(stderr)));
        let status = within(LONG_PATIENCE, "the end of a process", || self.0.try_wait().unwrap());
        if status.is_err() {
            self.0.kill().unwrap();
        }
        let (stdout, stderr) = (stdout.join().unwrap(), stderr.join().unwrap());
        let status = status.unwrap_or_else(|why| panic!("{why}: {}", String::from_utf8_lossy(&stderr)));
        Output { status, stdout, stderr }
    }
}

fn read_all(mut pipe: impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    pipe.read_to_end(&mut bytes).unwrap();
    bytes
}

/// Asks until there is an answer, or a hang.
pub(crate) fn until<T>(what: &str, ask: impl FnMut() -> Option<T>) -> Result<T, String> {
    within(PATIENCE, what, ask)
}

fn within<T>(time: Duration, what: &str, mut ask: impl FnMut() -> Option<T>) -> Result<T, String> {
    let began = Instant::now();
    while began.elapsed() < time {
        if let Some(answer) = ask() {
            return Ok(answer);
        }
        thread::sleep(Duration::from_millis(5));
    }
    Err(format!("waited for {what}"))
}

pub(crate) struct Worker {
    pub(crate) process: Process,
    pub(crate) address: String,
    log: Arc<Mutex<String>>,
}

impl Worker {
    pub(crate) fn start(library: Option<&str>) -> Self {
        let mut command = program(library);
        command.args(["worker", "--listen", "127.0.0.1:0"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut address = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut address).unwrap();
        let log = Arc::<Mutex<String>>::default();
        let (lines, into) = (BufReader::new(child.stderr.take().unwrap()).lines(), log.clone());
        thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|line| into.lock().unwrap().push_str(&(line + "\n")));
        });
        Self { process: Process(child), address: address.trim().to_owned(), log }
    }

    pub(crate) fn has_logged(&self, text: &str) {
        until(text, || self.log.lock().unwrap().contains(text).then_some(()))
            .unwrap_or_else(|why| panic!("{why}; {}", self.log.lock().unwrap()));
    }
}

pub(crate) fn workers(count: usize, library: Option<&str>) -> Vec<Worker> {
    (0..count).map(|_| Worker::start(library)).collect()
}

fn addresses(workers: &[&Worker]) -> String {
    workers.iter().map(|worker| worker.address.as_str()).collect::<Vec<_>>().join(",")
}

/// Starts a command over tables.
pub(crate) fn begin(
    command: &str,
    workers: &[&Worker],
    tables: &Tables,
    library: Option<&str>,
    rest: &[&str],
) -> Process {
    let mut process = program(library);
    process.arg(command).args(SPREAD).arg("--data").arg(tables.path());
    if !workers.is_empty() {
        process.arg("--workers").arg(addresses(workers));
    }
    process.args(rest).stdout(Stdio::piped()).stderr(Stdio::piped());
    Process(process.spawn().unwrap())
}

/// The lines of JSON that a process prints, which succeeds.
pub(crate) fn lines(process: Process) -> Vec<Value> {
    let output = process.output();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

pub(crate) fn statuses(workers: &[&Worker]) -> Vec<Value> {
    let mut command = program(None);
    command.args(["status", "--workers", &addresses(workers)]).stdout(Stdio::piped()).stderr(Stdio::piped());
    lines(Process(command.spawn().unwrap()))
}

/// Until no worker has anything at work.
pub(crate) fn are_idle(workers: &[&Worker]) {
    let idle = |status: &Value| status["partitions"] == 0 && status["plans"] == 0;
    until("workers to be idle", || statuses(workers).iter().all(idle).then_some(()))
        .unwrap_or_else(|why| panic!("{why}: {:?}", statuses(workers)));
}

/// Until all workers send rows.
pub(crate) fn are_busy(workers: &[&Worker]) {
    let busy = |status: &Value| status["partitions"].as_u64() > Some(0);
    until("workers to be busy", || statuses(workers).iter().all(busy).then_some(())).unwrap();
}

//! The driver: starts the processes of each way, round by round, and compares what they say.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::design::Carried;
use crate::worker::{Farewell, Outcome, Plan, Ready, check, mix};
use crate::{Design, Options};

/// A design, and whether the library is in front.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Way {
    design: Design,
    thallus: bool,
}

/// What one start of all processes gave.
#[derive(Debug, Serialize)]
struct Sample {
    way: Way,
    /// Seconds of each repetition, from the first worker that began to the last that ended.
    seconds: Vec<f64>,
    connections: usize,
    carried: Carried,
    user: f64,
    system: f64,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    ensure!(options.processes > 0 && options.workers >= options.processes, "fewer workers than processes");
    ensure!(options.rounds > 0 && options.repeat > 1, "one round and two repetitions at least");
    // By a name without a folder the loader would look elsewhere.
    let library = options.library.as_ref();
    let library = library.map(|path| path.canonicalize().with_context(|| path.display().to_string()));
    let options = &Options { library: library.transpose()?, ..options.clone() };
    let ways = |design: &Design| {
        let way = |thallus| Way { design: *design, thallus };
        std::iter::once(way(false)).chain(options.library.is_some().then(|| way(true)))
    };
    let ways: Vec<Way> = options.designs.iter().flat_map(ways).collect();
    let mut samples = Vec::new();
    for round in 0..options.rounds {
        // Not always in the same order.
        for at in 0..ways.len() {
            let sample = measure(ways[(at + round) % ways.len()], options)?;
            if options.json {
                say!("{}", serde_json::to_string(&sample)?)?;
            }
            samples.push(sample);
        }
    }
    if !options.json {
        print(options, &ways, &samples)?;
    }
    Ok(())
}

/// A process and its two ends.
struct Process {
    child: Child,
    /// None once it is to end.
    input: Option<ChildStdin>,
    output: Receiver<String>,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
    }
}

impl Process {
    fn start(library: Option<&Path>) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("worker").stdin(Stdio::piped()).stdout(Stdio::piped());
        command.env_remove("LD_PRELOAD");
        if let Some(library) = library {
            command.env("LD_PRELOAD", library);
        }
        let mut child = command.spawn()?;
        let input = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().context("a pipe")?).lines();
        let (sender, output) = channel();
        thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Ok(Self { child, input, output })
    }

    fn tell(&mut self, line: &str) -> Result<()> {
        let input = self.input.as_mut().context("it has been told to end")?;
        writeln!(input, "{line}").with_context(|| format!("process {} is gone", self.child.id()))
    }

    fn hear<T: DeserializeOwned>(&mut self, deadline: Instant) -> Result<T> {
        let rest = deadline.saturating_duration_since(Instant::now());
        match self.output.recv_timeout(rest) {
            Ok(line) => Ok(serde_json::from_str(&line)?),
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => bail!("process {} hangs", self.child.id()),
            Err(_) => bail!("process {} is gone: {}", self.child.id(), self.child.wait()?),
        }
    }
}

fn measure(way: Way, options: &Options) -> Result<Sample> {
    let deadline = Instant::now() + Duration::from_secs(options.limit);
    let library = options.library.as_deref().filter(|_| way.thallus);
    let mut processes =
        (0..options.processes).map(|_| Process::start(library)).collect::<Result<Vec<_>>>()?;
    for (process, of) in processes.iter_mut().enumerate() {
        let plan = Plan { design: way.design, process, options: options.clone() };
        of.tell(&serde_json::to_string(&plan)?)?;
    }
    let addresses =
        processes.iter_mut().map(|of| of.hear(deadline)).collect::<Result<Vec<Vec<SocketAddr>>>>()?;
    let addresses = serde_json::to_string(&addresses)?;
    processes.iter_mut().try_for_each(|of| of.tell(&addresses))?;
    for of in &mut *processes {
        let Ready { library: loaded } = of.hear(deadline)?;
        ensure!(loaded || library.is_none(), "{} is not loaded", library.unwrap_or(Path::new("")).display());
    }
    let mut seconds = Vec::new();
    for _ in 0..options.repeat {
        processes.iter_mut().try_for_each(|of| of.tell("go"))?;
        let outcomes = processes.iter_mut().map(|of| of.hear(deadline)).collect::<Result<Vec<Outcome>>>()?;
        verify(&outcomes, options.rows)?;
        let began = outcomes.iter().map(|outcome| outcome.began).fold(f64::INFINITY, f64::min);
        let ended = outcomes.iter().map(|outcome| outcome.ended).fold(0.0, f64::max);
        seconds.push(ended - began);
    }
    // Before anybody leaves.
    processes.iter_mut().try_for_each(|of| of.tell("count"))?;
    let mut sample =
        Sample { way, seconds, connections: 0, carried: Carried::default(), user: 0.0, system: 0.0 };
    for of in &mut *processes {
        let Farewell { carried, connections, user, system } = of.hear(deadline)?;
        sample.carried.add(&carried);
        sample.connections += connections;
        sample.user += user;
        sample.system += system;
    }
    processes.iter_mut().try_for_each(|of| of.tell("end"))?;
    for of in &mut *processes {
        of.hear::<String>(deadline)?;
        let status = of.child.wait()?;
        ensure!(status.success(), "process {}: {status}", of.child.id());
    }
    Ok(sample)
}

/// That all rows came once.
fn verify(outcomes: &[Outcome], rows: u64) -> Result<()> {
    let mut sums = (0_u64, 0_i64, 0_u64);
    for outcome in outcomes {
        sums.0 += outcome.rows;
        sums.1 = sums.1.wrapping_add(outcome.sum);
        sums.2 = sums.2.wrapping_add(outcome.mixed);
    }
    let add = |(sum, mixed): (i64, u64), n| (sum.wrapping_add(mix(n)), mixed.wrapping_add(check(mix(n))));
    let (sum, mixed) = (0..rows).fold((0_i64, 0_u64), add);
    ensure!(sums == (rows, sum, mixed), "wrong rows: {sums:?} instead of {:?}", (rows, sum, mixed));
    Ok(())
}

fn print(options: &Options, ways: &[Way], samples: &[Sample]) -> Result<()> {
    let Options { rows, workers, processes, rounds, repeat, .. } = options;
    say!(
        "{rows} integers, shuffled twice by {workers} workers in {processes} processes; {rounds} rounds of {repeat}"
    )?;
    say!("milliseconds: median (least to most)\n")?;
    say!("| | new connections | used ones | CPU s | connections | ends in memory | on TCP | ring bytes |")?;
    say!("|---|--:|--:|--:|--:|--:|--:|--:|")?;
    for way in ways {
        let of_way: Vec<&Sample> = samples.iter().filter(|sample| sample.way == *way).collect();
        let new = spread(of_way.iter().map(|sample| sample.seconds[0]).collect());
        let used = spread(of_way.iter().flat_map(|sample| sample.seconds[1..].iter().copied()).collect());
        let cpu = median(of_way.iter().map(|sample| sample.user + sample.system).collect());
        let Sample { connections, carried, .. } = of_way[0];
        let share =
            100.0 * carried.ring_bytes as f64 / (carried.ring_bytes + carried.tcp_bytes).max(1) as f64;
        say!(
            "| {:?}, {} | {new} | {used} | {cpu:.2} | {connections} | {} | {} | {share:.1} % |",
            way.design,
            if way.thallus { "Thallus" } else { "TCP" },
            carried.in_memory,
            if way.thallus { carried.on_tcp.to_string() } else { "all".into() },
        )?;
    }
    for sample in samples {
        if !sample.carried.reasons.is_empty() && sample.way.thallus {
            say!("\n{:?} on TCP: {:?}", sample.way.design, sample.carried.reasons)?;
        }
    }
    Ok(())
}

fn median(values: Vec<f64>) -> f64 {
    let mut values = values;
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn spread(seconds: Vec<f64>) -> String {
    let least = seconds.iter().copied().fold(f64::INFINITY, f64::min);
    let most = seconds.iter().copied().fold(0.0, f64::max);
    format!("{:.0} ({:.0} to {:.0})", 1e3 * median(seconds), 1e3 * least, 1e3 * most)
}

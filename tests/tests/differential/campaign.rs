//! Runs programs, compares, and makes those smaller that differ.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use tempfile::TempDir;
use thallus_tests::differential::program::Program;
use thallus_tests::differential::{Seen, run};
use thallus_tests::harness::TOO_SHORT;

use super::generate::programs;

/// Programs at a time: a pair of ends takes turns, so each occupies one processor.
const AT_ONCE: usize = 2;

/// How long a program that differs is made smaller.
const SHRINKING: Duration = Duration::from_secs(20);

/// How often the kernel is asked again whether it may do what the library did: its own outcome may depend on timing.
const SECOND_OPINIONS: usize = 4;

/// Of 1,000 programs, how many may have more than one outcome on the kernel.
const UNSTEADY: u64 = 10;

/// Programs, and what was seen.
#[derive(Debug)]
pub(crate) struct Campaign {
    folder: TempDir,
    sum: Sum,
}

#[derive(Clone, Debug, Default)]
struct Sum {
    programs: u64,
    observations: u64,
    left_out: u64,
    unsteady: Vec<String>,
    upgraded: u64,
    returned: u64,
    not_upgraded: BTreeMap<String, u64>,
    ring_bytes: u64,
    tcp_bytes: u64,
    elapsed: Duration,
}

enum Verdict {
    Same,
    /// The kernel has several outcomes, and the library one of these.
    Unsteady,
    /// What both did, and where they part.
    Differs(String),
}

impl Campaign {
    pub(crate) fn new() -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("thallus-differential-").tempdir()?;
        Ok(Self { folder, sum: Sum::default() })
    }

    /// Runs a program, which must not differ.
    pub(crate) fn replay(&mut self, program: &Program) -> Result<()> {
        let (verdict, sum) = judge(program, self.folder.path())?;
        self.sum.add(&sum);
        match verdict {
            Verdict::Same | Verdict::Unsteady => Ok(()),
            Verdict::Differs(report) => bail!("{report}"),
        }
    }

    /// Prints what is seen of one program.
    pub(crate) fn print(&mut self, program: &Program) -> Result<()> {
        for library in [false, true] {
            let seen = seen(program, self.folder.path(), library)?;
            println!("\n{}\n{}\n{}", name(library), seen.transcript.join("\n"), seen.remarks);
            for stats in &seen.stats {
                println!("upgraded {:?}, not {:?}", stats.upgraded, stats.not_upgraded);
            }
        }
        self.replay(program)
    }

    /// Makes programs up for some time, until one differs.
    pub(crate) fn explore(&mut self, seed: u64, steps: usize, time: Duration) -> Result<()> {
        let on_and_on = std::env::var_os("DIFFERENTIAL_ALL").is_some();
        let (start, next, stop) = (Instant::now(), AtomicU64::new(seed), AtomicBool::new(false));
        let (sum, failures) = (Mutex::new(Sum::default()), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for worker in 0..AT_ONCE {
                let folder = self.folder.path().join(worker.to_string());
                let (next, stop, sum, failures) = (&next, &stop, &sum, &failures);
                scope.spawn(move || {
                    while start.elapsed() < time && !stop.load(Ordering::Relaxed) {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        let (outcome, one) = explore_one(seed, steps, &folder);
                        sum.lock().expect("no worker panics").add(&one);
                        if let Err(error) = outcome {
                            stop.store(!on_and_on, Ordering::Relaxed);
                            failures
                                .lock()
                                .expect("no worker panics")
                                .push(format!("seed {seed}: {error:#}"));
                        }
                    }
                });
            }
        });
        self.sum.add(&sum.into_inner().expect("no worker panics"));
        self.sum.elapsed = start.elapsed();
        let failures = failures.into_inner().expect("no worker panics");
        ensure!(failures.is_empty(), "{}", failures.join("\n\n"));
        let unsteady = self.sum.unsteady.len() as u64;
        ensure!(
            unsteady * 1_000 <= UNSTEADY * self.sum.programs.max(1_000),
            "the outcome of {unsteady} programs depends on timing:\n{}",
            self.sum.unsteady.join("\n")
        );
        Ok(())
    }

    /// A comparison of the kernel with itself would prove nothing.
    pub(crate) fn expect_upgrades(&self) -> Result<()> {
        let stayed: u64 = self.sum.not_upgraded.values().sum();
        let short: u64 = TOO_SHORT.iter().filter_map(|&reason| self.sum.not_upgraded.get(reason)).sum();
        ensure!(
            self.sum.upgraded * 2 > stayed + self.sum.upgraded,
            "of {} ends of connections only {} left TCP, {short} were too short",
            stayed + self.sum.upgraded,
            self.sum.upgraded
        );
        ensure!(self.sum.ring_bytes > 0, "no byte took the ring");
        Ok(())
    }
}

impl fmt::Display for Campaign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sum = &self.sum;
        write!(
            f,
            "{} programs in {} s, {} lines compared, of which {} say that an operation was left out; {} depend on timing on \
             the kernel; {} ends of connections left TCP, {} of them went back, others did not: {:?}; {} bytes by the ring, \
             {} by TCP",
            sum.programs,
            sum.elapsed.as_secs(),
            sum.observations,
            sum.left_out,
            sum.unsteady.len(),
            sum.upgraded,
            sum.returned,
            sum.not_upgraded,
            sum.ring_bytes,
            sum.tcp_bytes
        )
    }
}

impl Sum {
    fn add(&mut self, other: &Self) {
        self.programs += other.programs;
        self.observations += other.observations;
        self.left_out += other.left_out;
        self.unsteady.extend(other.unsteady.iter().cloned());
        self.upgraded += other.upgraded;
        self.returned += other.returned;
        for (reason, count) in &other.not_upgraded {
            *self.not_upgraded.entry(reason.clone()).or_default() += count;
        }
        self.ring_bytes += other.ring_bytes;
        self.tcp_bytes += other.tcp_bytes;
    }

    fn of(seen: &Seen) -> Self {
        let mut sum = Self {
            programs: 1,
            observations: seen.transcript.len() as u64,
            left_out: seen.transcript.iter().filter(|line| line.contains(": left out: ")).count() as u64,
            ..Self::default()
        };
        for stats in &seen.stats {
            sum.upgraded += stats.over_shared_memory();
            sum.returned += stats.returned_to_tcp;
            for (reason, count) in &stats.not_upgraded {
                *sum.not_upgraded.entry(reason.clone()).or_default() += count;
            }
            sum.ring_bytes += stats.ring_bytes_sent;
            sum.tcp_bytes += stats.tcp_bytes_sent;
        }
        sum
    }
}

fn name(library: bool) -> &'static str {
    if library { "library" } else { "kernel" }
}

fn seen(program: &Program, folder: &Path, library: bool) -> Result<Seen> {
    run(program, Path::new(env!("CARGO_BIN_EXE_endpoint")), &folder.join(name(library)), library)
}

fn explore_one(seed: u64, steps: usize, folder: &Path) -> (Result<()>, Sum) {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let mut tree = match programs(steps).new_tree(&mut runner) {
        Ok(tree) => tree,
        Err(reason) => return (Err(anyhow::anyhow!("no program: {reason}")), Sum::default()),
    };
    match judge(&tree.current(), folder) {
        Ok((Verdict::Same, sum)) => (Ok(()), sum),
        Ok((Verdict::Unsteady, sum)) => (Ok(()), Sum { unsteady: vec![format!("seed {seed}")], ..sum }),
        Ok((Verdict::Differs(report), sum)) => (Err(smaller(&mut tree, report, folder)), sum),
        Err(error) => (Err(error), Sum::default()),
    }
}

/// The smallest program that still differs, with what it does.
fn smaller(tree: &mut impl ValueTree<Value = Program>, first: String, folder: &Path) -> anyhow::Error {
    let start = Instant::now();
    let (mut report, mut smallest) = (first, tree.current());
    let mut runs = 0;
    while start.elapsed() < SHRINKING {
        // The program is a tree of choices: each becomes simpler, or is taken back.
        if !tree.simplify() {
            break;
        }
        runs += 1;
        loop {
            match judge(&tree.current(), folder) {
                Ok((Verdict::Differs(other), _)) => {
                    (report, smallest) = (other, tree.current());
                    break;
                }
                Ok(_) => {}
                Err(error) => return error,
            }
            if start.elapsed() >= SHRINKING || !tree.complicate() {
                break;
            }
            runs += 1;
        }
    }
    anyhow::anyhow!(
        "{report}\nthe program, after {runs} attempts to make it smaller:\n{}",
        smallest.to_text()
    )
}

/// Whether the library does what the kernel does.
fn judge(program: &Program, folder: &Path) -> Result<(Verdict, Sum)> {
    let kernel = seen(program, folder, false)?;
    let library = seen(program, folder, true)?;
    let sum = Sum::of(&library);
    if kernel.is_out_of_step {
        let seen = kernel.transcript.join("\n  ");
        return Ok((
            Verdict::Differs(format!("  {seen}\non the kernel: a rule is missing\n{}", kernel.remarks)),
            sum,
        ));
    }
    if kernel.transcript == library.transcript {
        return Ok((Verdict::Same, sum));
    }
    for _ in 0..SECOND_OPINIONS {
        if seen(program, folder, false)?.transcript == library.transcript {
            return Ok((Verdict::Unsteady, sum));
        }
    }
    let same =
        kernel.transcript.iter().zip(&library.transcript).take_while(|(kernel, library)| kernel == library);
    let same = same.count();
    let side = |seen: &Seen| {
        let end = seen.transcript.len().min(same + 3);
        format!("    {}", seen.transcript[same.min(end)..end].join("\n    "))
    };
    let common = kernel.transcript[..same].join("\n  ");
    Ok((
        Verdict::Differs(format!(
            "  {common}\n  kernel:\n{}\n  library:\n{}\n{}",
            side(&kernel),
            side(&library),
            library.remarks
        )),
        sum,
    ))
}

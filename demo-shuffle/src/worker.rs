//! One process of the experiment. The driver speaks to it in lines: a plan, the addresses, and "go" for each repetition.

use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use arrow_array::{Array, Int64Array, RecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use serde::{Deserialize, Serialize};
use thallus_api::Thallus;
use thallus_shuffle::Partition;

use crate::design::{Carried, Process, Receiver, Seats, Sender, workers_of};
use crate::{Design, Options};

/// Rows of a batch that a worker begins with.
const BATCH: u64 = 8192;

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Plan {
    pub(crate) design: Design,
    pub(crate) process: usize,
    pub(crate) options: Options,
}

/// That a process has met the others.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Ready {
    /// It has the library: the loader goes on without one that it can't load.
    pub(crate) library: bool,
}

/// What the workers of a process got, and when, on the clock that all processes of a host share.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Outcome {
    pub(crate) began: f64,
    pub(crate) ended: f64,
    pub(crate) rows: u64,
    pub(crate) sum: i64,
    pub(crate) mixed: u64,
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Farewell {
    pub(crate) carried: Carried,
    pub(crate) connections: usize,
    /// CPU time of this process, in seconds: in the program and in the kernel.
    pub(crate) user: f64,
    pub(crate) system: f64,
}

pub(crate) fn run() -> Result<()> {
    let mut lines = std::io::stdin().lock().lines();
    let mut line = || lines.next().context("the driver is gone")?.context("the driver is gone");
    let plan: Plan = serde_json::from_str(&line()?)?;
    let Plan { design, process, options } = &plan;
    let seats = Seats::bind(*design, options, *process)?;
    say(&seats.addresses()?)?;
    let addresses: Vec<Vec<SocketAddr>> = serde_json::from_str(&line()?)?;
    let mut this = seats.join(*design, options, *process, &addresses)?;
    let schema: SchemaRef = Arc::new(Schema::new(vec![Field::new("n", DataType::Int64, false)]));
    let rows: Vec<Vec<RecordBatch>> =
        workers_of(options, *process).map(|worker| rows_of(options, worker, &schema)).collect();
    say(&Ready { library: Thallus::find().is_some() })?;
    for repetition in 0.. {
        match line()?.as_str() {
            "go" => say(&shuffle(&mut *this, repetition, &rows, &schema, options)?)?,
            "count" => {
                let (user, system) = cpu_time()?;
                let (carried, connections) = (Carried::of(&this.carried()), this.connections());
                say(&Farewell { carried, connections, user, system })?;
            }
            _ => break,
        }
    }
    this.leave()?;
    say(&"left")
}

fn say(what: &impl Serialize) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, what)?;
    writeln!(out)?;
    Ok(out.flush()?)
}

/// The numbers that a worker begins with: all different, and in no order.
pub(crate) fn mix(n: u64) -> i64 {
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (n ^ (n >> 31)).cast_signed()
}

fn rows_of(options: &Options, worker: usize, schema: &SchemaRef) -> Vec<RecordBatch> {
    let (worker, workers) = (worker as u64, options.workers as u64);
    let range = options.rows * worker / workers..options.rows * (worker + 1) / workers;
    let batch = |from: u64| {
        let numbers = (from..range.end.min(from + BATCH)).map(mix);
        RecordBatch::try_new(schema.clone(), vec![Arc::new(Int64Array::from_iter_values(numbers))])
    };
    range.clone().step_by(BATCH as usize).map(|from| batch(from).expect("a column of the schema")).collect()
}

/// Spread by value, then at random. With `skewed`, first all to the last worker.
fn shuffle(
    process: &mut dyn Process,
    repetition: u64,
    rows: &[Vec<RecordBatch>],
    schema: &SchemaRef,
    options: &Options,
) -> Result<Outcome> {
    let began = now()?;
    let first = match options.skewed {
        true => Partition::Range {
            column: 0,
            bounds: Arc::new(Int64Array::from(vec![i64::MIN; options.workers - 1])),
        },
        false => Partition::Hash(vec![0]),
    };
    let (first, second) = (&first, &Partition::Random(repetition + 1));
    let one = process.shuffle(2 * repetition, schema)?;
    let two = process.shuffle(2 * repetition + 1, schema)?;
    let mut all = Outcome { began, ..Outcome::default() };
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for ((rows, (sender, middle)), (next, receiver)) in rows.iter().zip(one).zip(two) {
            threads.push(scope.spawn(move || {
                send(sender, first, rows.iter().cloned().map(Ok)).map(|()| Outcome::default())
            }));
            threads.push(scope.spawn(move || send(next, second, middle).map(|()| Outcome::default())));
            threads.push(scope.spawn(move || receive(receiver)));
        }
        for thread in threads {
            let outcome = thread.join().map_err(|_| anyhow!("a worker panicked"))??;
            all.rows += outcome.rows;
            all.sum = all.sum.wrapping_add(outcome.sum);
            all.mixed = all.mixed.wrapping_add(outcome.mixed);
        }
        anyhow::Ok(())
    })?;
    all.ended = now()?;
    Ok(all)
}

fn send(
    mut sender: Box<dyn Sender>,
    by: &Partition,
    rows: impl Iterator<Item = Result<RecordBatch>>,
) -> Result<()> {
    sender.partition(by)?;
    for batch in rows {
        sender.send(batch?)?;
    }
    sender.finish()
}

fn receive(receiver: Receiver) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for batch in receiver {
        let batch = batch?;
        outcome.rows += batch.num_rows() as u64;
        let (sum, mixed) = sums(&batch)?;
        outcome.sum = outcome.sum.wrapping_add(sum);
        outcome.mixed = outcome.mixed.wrapping_add(mixed);
    }
    Ok(outcome)
}

/// The sum of the values, and one that also changes if two values change against each other.
fn sums(batch: &RecordBatch) -> Result<(i64, u64)> {
    let numbers = batch.column(0).as_any().downcast_ref::<Int64Array>().context("no integers")?;
    anyhow::ensure!(numbers.null_count() == 0, "nulls");
    let add = |(sum, mixed): (i64, u64), n: &i64| (sum.wrapping_add(*n), mixed.wrapping_add(check(*n)));
    Ok(numbers.values().iter().fold((0, 0), add))
}

pub(crate) fn check(n: i64) -> u64 {
    n.cast_unsigned().wrapping_mul(n.cast_unsigned() | 1)
}

/// Seconds, by the clock of the host.
fn now() -> Result<f64> {
    let uptime = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    Ok(Duration::as_secs_f64(&uptime))
}

/// From `/proc/self/stat`, in hundredths of a second.
fn cpu_time() -> Result<(f64, f64)> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let field = |at: usize| anyhow::Ok(fields.get(at).context("/proc/self/stat")?.parse::<f64>()? / 100.0);
    Ok((field(11)?, field(12)?))
}

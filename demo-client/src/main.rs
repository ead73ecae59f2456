//! Runs one query on `demo-server`, and shows the result or writes it to a file.
//!
//! Exit status: 0 the whole result is there, 1 it is not, 2 wrong options, 130 interrupted by Ctrl-C.

#![deny(unsafe_code)]

/// A line on standard error. That nobody reads it is no reason to panic, as `eprintln!` would.
macro_rules! tell {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

mod checksum;
mod connection;
mod flight;
mod interrupt;
mod loans;
mod memory;
mod output;
mod parquet_file;
mod progress;
mod tail;
mod text;
mod transport;

use std::io::Write;
use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use arrow_array::RecordBatch;
use clap::Parser;

use crate::checksum::Checksum;
use crate::interrupt::Interrupt;
use crate::loans::{Believe, Ways};
use crate::memory::Kept;
use crate::output::Output;
use crate::progress::Progress;
use crate::transport::{Compression, Connection, Scan, Transport};

/// As a shell has it: 128 and the signal's number.
const INTERRUPTED: u8 = 130;

/// Batches that may be on their way, unless each is asked for.
const CREDITS: u32 = 4;

/// Runs SQL on demo-server.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The server
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:7575")]
    connect: String,

    /// The query
    #[arg(long)]
    sql: String,

    /// The server's dataset, if it must be that of this name
    #[arg(long, value_name = "NAME", default_value = "")]
    dataset: String,

    /// A file that ends in .parquet, .arrow or .csv, or - for CSV on standard output [default: a table on a terminal,
    /// else CSV]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// What stands for NULL in CSV and tables, where it can't be told from an empty text otherwise
    #[arg(long, value_name = "TEXT", default_value = "")]
    null: String,

    #[arg(long, value_enum, default_value_t = Transport::Auto)]
    transport: Transport,

    /// Of the batches, by the server; only for flight
    #[arg(long, value_enum, default_value_t = Compression::None)]
    compression: Compression,

    /// Check also what the server lends if it runs as the same user on the same host
    #[arg(long)]
    validate: bool,

    /// Batches that the server may send ahead; not for rpc, ipc and flight
    #[arg(long, value_name = "N", default_value_t = CREDITS, value_parser = clap::value_parser!(u32).range(1..))]
    credits: u32,

    /// Print one line of JSON about the transfer; without --out the result is thrown away
    #[arg(long)]
    summary: bool,

    /// Read every byte of the result, and count that as part of its transfer
    #[arg(long)]
    read: bool,

    /// Add to the summary a checksum of the rows, whatever their order; if there are several answers it must be that of all
    #[arg(long, requires = "summary")]
    checksum: bool,

    /// Ask so many times on the same connection; the summary has the seconds of each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..), requires = "summary",
          conflicts_with = "out")]
    repeat: u32,

    /// Then ask once more, and add to the summary how long copying the result within memory takes
    #[arg(long, requires = "summary", conflicts_with = "out")]
    memcpy: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.transport != Transport::Flight && arguments.compression != Compression::None {
        tell!("demo-client: only flight compresses");
        return ExitCode::from(2);
    }
    let interrupt = match Interrupt::install() {
        Ok(interrupt) => interrupt,
        Err(error) => return failed(&error),
    };
    match caught(|| run(&arguments, &interrupt)) {
        _ if interrupt.happened() => {
            tell!("demo-client: interrupted");
            ExitCode::from(INTERRUPTED)
        }
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

/// What `work` comes to. At some of what a hostile server may send arrow-ipc panics, and so arrow-flight: that is an error as others.
fn caught(work: impl FnOnce() -> Result<()>) -> Result<()> {
    let told = Arc::new(Mutex::new(String::new()));
    let teller = told.clone();
    panic::set_hook(Box::new(move |panic| {
        *teller.lock().unwrap_or_else(PoisonError::into_inner) = panic.to_string().replace('\n', " ");
    }));
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        let told = told.lock().unwrap_or_else(PoisonError::into_inner);
        bail!("can't go on with what the server has sent: {told}")
    })
}

fn failed(error: &anyhow::Error) -> ExitCode {
    tell!("demo-client: {}", text::printable(&format!("{error:#}")));
    ExitCode::FAILURE
}

/// What came.
#[derive(Default)]
struct Totals {
    rows: u64,
    batches: u64,
    bytes: u64,
    /// From the request to the last batch, without the time to write them.
    time: Duration,
}

fn run(arguments: &Arguments, interrupt: &Interrupt) -> Result<()> {
    let believe = if arguments.validate { Believe::None } else { Believe::OwnUser };
    let (mut connection, transport) =
        Connection::open(arguments.transport, &arguments.connect, believe, interrupt)?;
    let mut rounds = Vec::new();
    let mut checksum: Option<u64> = None;
    let mut totals = Totals::default();
    let mut ways = Ways::default();
    for _ in 0..arguments.repeat {
        let mut sum = arguments.checksum.then(Checksum::default);
        let asked = ask(arguments, connection, transport, interrupt, |batch| match &mut sum {
            Some(sum) => sum.add(batch),
            None => Ok(()),
        })?;
        let Some(asked) = asked else { return Ok(()) };
        (connection, totals) = asked;
        ways = connection.ways();
        rounds.push(totals.time.as_secs_f64());
        if let Some(sum) = sum.map(Checksum::value) {
            let first = *checksum.get_or_insert(sum);
            ensure!(first == sum, "the answers differ: their checksums are {first:016x} and {sum:016x}");
        }
    }
    let mut kept = None;
    if arguments.memcpy {
        let kept = kept.insert(Kept::default());
        let asked = ask(arguments, connection, transport, interrupt, |batch| {
            kept.add(batch);
            Ok(())
        });
        if asked?.is_none() {
            return Ok(());
        }
    }
    if arguments.summary {
        let copied = kept.map(|kept| kept.copy());
        let Ways { streamed, pulled, borrowed } = ways;
        let summary = serde_json::json!({
            "transport": transport.name(),
            "rows": totals.rows,
            "batches": totals.batches,
            "bytes": totals.bytes,
            "streamed": streamed,
            "pulled": pulled,
            "borrowed": borrowed,
            "seconds": totals.time.as_secs_f64(),
            "rounds": rounds,
            "checksum": checksum.map(|checksum| format!("{checksum:016x}")),
            "memcpy_bytes": copied.map(|(bytes, _)| bytes),
            "memcpy_seconds": copied.map(|(_, time)| time.as_secs_f64()),
        });
        writeln!(std::io::stdout(), "{summary}").context("standard output")?;
    }
    Ok(())
}

/// Runs the query, and hands every batch to `take` and to the output; none if it was interrupted.
fn ask<'a>(
    arguments: &Arguments,
    connection: Connection<'a>,
    transport: Transport,
    interrupt: &Interrupt,
    mut take: impl FnMut(&RecordBatch) -> Result<()>,
) -> Result<Option<(Connection<'a>, Totals)>> {
    let started = Instant::now();
    let mut scan = connection.query(&arguments.dataset, &arguments.sql, arguments.compression)?;
    let Arguments { out, summary, null, .. } = arguments;
    let mut output = Output::open(out.as_deref(), *summary, null, scan.schema(), interrupt)?;
    let progress = Progress::new();
    let credits = if transport == Transport::Rpc { 1 } else { arguments.credits };
    let totals = receive(&mut scan, credits, arguments.read, started, |batch, totals| {
        take(batch)?;
        progress.show(totals.rows, totals.bytes, started);
        output.write(batch)
    })?;
    progress.finish();
    if interrupt.happened() {
        return Ok(None); // and what was written so far goes
    }
    let connection = scan.finish()?;
    output.finish(totals.rows)?;
    Ok(Some((connection, totals)))
}

/// Hands every batch to `take`. Each message that has been taken is one more credit.
fn receive(
    scan: &mut Scan<'_>,
    credits: u32,
    read: bool,
    started: Instant,
    mut take: impl FnMut(&RecordBatch, &Totals) -> Result<()>,
) -> Result<Totals> {
    let mut totals = Totals::default();
    let mut writing = Duration::ZERO;
    scan.allow(credits)?;
    while let Some((batches, bytes)) = scan.next()? {
        totals.batches += 1;
        totals.bytes += bytes;
        if read {
            batches.iter().for_each(memory::read);
        }
        let received = Instant::now();
        for batch in &batches {
            totals.rows += batch.num_rows() as u64;
            take(batch, &totals)?;
        }
        writing += received.elapsed();
        drop(batches);
        scan.allow(1)?;
    }
    totals.time = started.elapsed().saturating_sub(writing);
    Ok(totals)
}

//! Runs one query on `demo-server`, and shows the result or writes it to a file.
//!
//! Exit status: 0 the whole result is there, 1 it is not, 2 wrong options, 130 interrupted by Ctrl-C.

#![deny(unsafe_code)]

mod checksum;
mod connection;
mod interrupt;
mod loans;
mod output;
mod tail;

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressStyle};

use crate::checksum::Checksum;
use crate::connection::{Connection, Options, Scan};
use crate::interrupt::Interrupt;
use crate::loans::{Loans, Ways};
use crate::output::Output;

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

    #[arg(long, value_enum, default_value_t = Transport::Auto)]
    transport: Transport,

    /// Check what comes also if the server runs as the same user on the same host
    #[arg(long)]
    validate: bool,

    /// Batches that the server may send ahead; not for rpc
    #[arg(long, value_name = "N", default_value_t = CREDITS, value_parser = clap::value_parser!(u32).range(1..))]
    credits: u32,

    /// Print one line of JSON about the transfer; without --out the result is thrown away
    #[arg(long)]
    summary: bool,

    /// Add to the summary a checksum of the rows, whatever their order
    #[arg(long, requires = "summary")]
    checksum: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Transport {
    /// Read from the server's memory where that is possible, else as scatter
    Auto,
    /// Column buffers as they are in the stream, pushed as far as there are credits
    Scatter,
    /// Copied from the server's memory; where that is not possible, as scatter
    Pull,
    /// The baseline: each batch copied into one buffer, and sent as the reply to a request
    Rpc,
    /// Not there yet
    Ipc,
    /// Not there yet
    Flight,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if matches!(arguments.transport, Transport::Ipc | Transport::Flight) {
        eprintln!("demo-client: this transport is not there yet; use auto, scatter, pull or rpc");
        return ExitCode::from(2);
    }
    let interrupt = match Interrupt::install() {
        Ok(interrupt) => interrupt,
        Err(error) => return failed(&error),
    };
    match run(&arguments, &interrupt) {
        _ if interrupt.happened() => {
            eprintln!("demo-client: interrupted");
            ExitCode::from(INTERRUPTED)
        }
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

fn failed(error: &anyhow::Error) -> ExitCode {
    eprintln!("demo-client: {error:#}");
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
    let rpc = arguments.transport == Transport::Rpc;
    let address = &arguments.connect;
    let loans = match arguments.transport {
        Transport::Auto => Loans::Borrow,
        Transport::Pull => Loans::Pull,
        _ => Loans::None,
    };
    let options = Options { baseline: rpc, loans, validate: arguments.validate };
    let connection = Connection::open(address, options, interrupt)
        .with_context(|| format!("can't use the server {address}"))?;
    let started = Instant::now();
    let mut scan = connection.query(&arguments.dataset, &arguments.sql)?;

    let mut output = Output::open(arguments.out.as_deref(), arguments.summary, scan.schema())?;
    let mut checksum = arguments.checksum.then(Checksum::default);
    let progress = Progress::new();
    let totals = receive(&mut scan, if rpc { 1 } else { arguments.credits }, started, |batch, totals| {
        if let Some(checksum) = &mut checksum {
            checksum.add(batch)?;
        }
        progress.show(totals, started);
        output.write(batch)
    })?;
    progress.finish();
    if interrupt.happened() {
        return Ok(()); // and what was written so far goes
    }
    let ways = scan.ways();
    scan.finish()?;
    output.finish(totals.rows)?;
    if arguments.summary {
        print_summary(&totals, arguments.transport, ways, checksum.map(|checksum| checksum.value()))?;
    }
    Ok(())
}

/// Hands every batch to `take`. Each message that has been taken is one more credit.
fn receive(
    scan: &mut Scan<'_>,
    credits: u32,
    started: Instant,
    mut take: impl FnMut(&arrow_array::RecordBatch, &Totals) -> Result<()>,
) -> Result<Totals> {
    let mut totals = Totals::default();
    let mut writing = Duration::ZERO;
    scan.allow(credits)?;
    while let Some((batches, bytes)) = scan.next()? {
        totals.batches += 1;
        totals.bytes += bytes;
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

fn print_summary(totals: &Totals, transport: Transport, ways: Ways, checksum: Option<u64>) -> Result<()> {
    let summary = serde_json::json!({
        "transport": transport.to_possible_value().map(|value| value.get_name().to_owned()),
        "streamed": ways.streamed,
        "pulled": ways.pulled,
        "borrowed": ways.borrowed,
        "rows": totals.rows,
        "batches": totals.batches,
        "bytes": totals.bytes,
        "seconds": totals.time.as_secs_f64(),
        "checksum": checksum.map(|checksum| format!("{checksum:016x}")),
    });
    writeln!(std::io::stdout(), "{summary}").context("standard output")
}

/// Rows, bytes and rate, if standard error is a terminal.
struct Progress(Option<ProgressBar>);

impl Progress {
    fn new() -> Self {
        Self(std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        }))
    }

    fn show(&self, totals: &Totals, started: Instant) {
        if let Some(bar) = &self.0 {
            let rate = totals.bytes as f64 / started.elapsed().as_secs_f64().max(1e-6);
            bar.set_message(format!(
                "{} rows, {}, {}/s",
                HumanCount(totals.rows),
                HumanBytes(totals.bytes),
                HumanBytes(rate as u64)
            ));
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Progress {
    /// Also after an error, whose message would end up behind the bar.
    fn drop(&mut self) {
        self.finish();
    }
}

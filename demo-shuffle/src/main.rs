//! `thallus-shuffle`: the experiment of both papers, rows that are shuffled twice between the workers of several processes, by both
//! designs and the plain socket programs that they were compared with, over TCP and under the library.

/// A line on standard output.
macro_rules! say {
    ($($text:tt)*) => { $crate::say(format_args!($($text)*)) };
}

mod bench;
mod design;
mod twin;
mod worker;

use std::fmt::Arguments as Text;
use std::io::{ErrorKind, Write};
use std::path::PathBuf;

use anyhow::Context;
use clap::{Parser, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};

#[derive(Debug, Parser)]
#[command(name = "thallus-shuffle", version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Shuffle integers twice, by each design, over TCP and under the library in turn
    Bench(Options),
    /// One process of the experiment; told what to do on standard input
    #[command(hide = true)]
    Worker,
}

/// How rows are moved.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum Design {
    /// Circular buffers, credits, one connection for each pair of processes
    Push,
    /// A connection for each pair of workers, one serialized message at a time
    PushTwin,
    /// Blocks in chunks, staged server, shared connections
    Staged,
    /// A connection for each pair of workers, a whole serialized block at a time
    StagedTwin,
}

#[derive(Clone, Debug, Deserialize, clap::Args, Serialize)]
struct Options {
    /// Rows of all workers
    #[arg(long, default_value_t = 5_000_000, value_parser = clap::value_parser!(u64).range(..=1 << 40))]
    rows: u64,
    /// Workers of all processes
    #[arg(long, default_value_t = 8)]
    workers: usize,
    #[arg(long, default_value_t = 8)]
    processes: usize,
    /// Times that each way is taken, in turn
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Times that the rows are shuffled by the same processes; the first is told apart
    #[arg(long, default_value_t = 4)]
    repeat: usize,
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["push", "push-twin", "staged", "staged-twin"])]
    designs: Vec<Design>,
    /// libthallus_shim.so; without it TCP alone is measured
    #[arg(long)]
    library: Option<PathBuf>,
    /// A connection for each pair of workers instead of each pair of processes
    #[arg(long)]
    no_share: bool,
    /// Bytes of push's windows and outgoing buffers
    #[arg(long, default_value_t = 4 << 20)]
    window: usize,
    /// Bytes of staged's chunks
    #[arg(long, default_value_t = 512 << 10)]
    chunk: usize,
    /// Rows that are gathered for each worker
    #[arg(long, default_value_t = 8192)]
    batch_rows: usize,
    /// All rows to one worker in the first shuffle
    #[arg(long)]
    skewed: bool,
    /// Seconds that a process waits for the others when they meet and leave
    #[arg(long, default_value_t = 30)]
    patience: u64,
    /// Seconds for each way, after which it counts as a hang
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u64).range(..=1 << 30))]
    limit: u64,
    /// Each result as a line of JSON
    #[arg(long)]
    json: bool,
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Command::Bench(options) => bench::run(&options),
        Command::Worker => worker::run(),
    }
}

/// Of a reader who has seen enough, as in `… | head`, nobody wants anything more.
fn say(line: Text<'_>) -> anyhow::Result<()> {
    match writeln!(std::io::stdout(), "{line}") {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        outcome => outcome.context("can't write to standard output"),
    }
}

//! `thallus-shuffle-sql`: SQL on several processes and machines, by DataFusion, whose workers send rows to each other by a transport of
//! ours (`thallus`) or its own (`grpc`).
//!
//! ```text
//!  sql ── plans, requests, credit ──► worker ── requests, credit ──► worker
//!      ◄── rows, errors ────────────         ◄── rows, errors ──────
//! ```

#![forbid(unsafe_code)]

/// A line of the log, on standard error. That nobody reads it is no reason to panic, as `eprintln!` would.
macro_rules! log {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

/// A line on standard output.
macro_rules! say {
    ($($text:tt)*) => { $crate::say(format_args!($($text)*)) };
}

mod carried;
mod client;
mod link;
mod messages;
mod run;
mod serve;
mod session;
mod tables;
mod wire;
mod worker;

#[cfg(test)]
mod tests;

use std::fmt::Arguments as Text;
use std::io::{ErrorKind, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::builder::RangedU64ValueParser;
use clap::{Parser, Subcommand, ValueEnum};
use serde::Serialize;

use crate::client::{Resolver, WINDOW};
use crate::session::Planning;
use crate::tables::Size;
use crate::wire::LARGEST_WINDOW;

/// Plans are trees, and the engine walks them by recursion.
const STACK: usize = 16 << 20;

#[derive(Debug, Parser)]
#[command(name = "thallus-shuffle-sql", version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run plans for whoever reaches this port: there is no authentication. The address is printed
    Worker {
        /// With port 0 the kernel chooses one
        #[arg(long, value_name = "ADDR:PORT")]
        listen: String,
        /// Bytes of a partition that other workers may send before they are read
        #[arg(long, default_value_t = WINDOW, value_parser = RangedU64ValueParser::<usize>::new().range(1..=LARGEST_WINDOW))]
        window: usize,
    },
    /// Run a query
    Sql(Sql),
    /// Run queries by each transport in turn, compare their rows with those of one process, and print a line of JSON for each
    Bench(Bench),
    /// Show the distributed plan of a query
    Explain {
        #[arg(long, value_delimiter = ',', required = true, value_name = "HOST:PORT,…")]
        workers: Vec<String>,
        #[command(flatten)]
        planning: Planning,
        query: String,
    },
    /// Print what each worker has at work and what its connections have carried, as JSON
    Status {
        #[arg(long, value_delimiter = ',', required = true, value_name = "HOST:PORT,…")]
        workers: Vec<String>,
    },
    /// Make a folder of tables to try things with
    Generate {
        folder: PathBuf,
        /// Of the largest table
        #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(..=3_000_000_000))]
        rows: u64,
        /// Four tables of TPC-C instead: customer, orders, new_order, order_line
        #[arg(long, value_name = "N", conflicts_with = "rows", value_parser = clap::value_parser!(u64).range(1..=5000))]
        warehouses: Option<u64>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum Transport {
    Thallus,
    /// The engine's own: Arrow Flight over HTTP/2
    Grpc,
}

#[derive(Debug, clap::Args)]
struct Sql {
    /// Without any, this process does it all
    #[arg(long, value_delimiter = ',', value_name = "HOST:PORT,…")]
    workers: Vec<String>,
    #[arg(long, value_enum, default_value = "thallus")]
    transport: Transport,
    #[command(flatten)]
    planning: Planning,
    /// Print how many rows there are, and a checksum that does not depend on their order
    #[arg(long)]
    count: bool,
    /// Give the query up after so many rows; implies --count
    #[arg(long, value_name = "ROWS")]
    stop_after: Option<u64>,
    query: String,
}

#[derive(Debug, clap::Args)]
struct Bench {
    #[arg(long, value_delimiter = ',', required = true, value_name = "HOST:PORT,…")]
    workers: Vec<String>,
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["thallus", "grpc"])]
    transports: Vec<Transport>,
    #[command(flatten)]
    planning: Planning,
    /// Times that each query is run by each transport, in turn
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// [default: over the tables of `generate`: four, or two of those of TPC-C]
    queries: Vec<String>,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Without causes that an error has in its own text.
            let mut text = error.to_string();
            for cause in error.chain().skip(1).map(ToString::to_string) {
                if !text.contains(&cause) {
                    text = format!("{text}: {cause}");
                }
            }
            log!("thallus-shuffle-sql: {text}");
            ExitCode::FAILURE
        }
    }
}

/// Of a reader who has seen enough, as in `… | head`, nobody wants anything more: the process ends, and with it what workers do for it.
fn say(line: Text<'_>) -> Result<()> {
    match writeln!(std::io::stdout(), "{line}") {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        outcome => outcome.context("can't write to standard output"),
    }
}

fn run() -> Result<()> {
    let arguments = Arguments::parse();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().thread_stack_size(STACK).enable_all().build()?;
    // On one of its threads: the main one has another stack.
    let outcome = runtime.block_on(async { tokio::spawn(execute(arguments.command)).await });
    runtime.shutdown_background();
    outcome.context("it panicked")?
}

async fn execute(command: Command) -> Result<()> {
    match command {
        Command::Worker { listen, window } => {
            let listener = TcpListener::bind(&listen).with_context(|| listen.clone())?;
            let mut out = std::io::stdout();
            writeln!(out, "{}", listener.local_addr()?)?;
            out.flush()?;
            Ok(worker::run(listener, Resolver::new(window)).await?)
        }
        Command::Sql(arguments) => run::sql(&arguments).await,
        Command::Bench(arguments) => run::bench(&arguments).await,
        Command::Explain { workers, planning, query } => run::explain(&workers, &planning, &query).await,
        Command::Status { workers } => run::status(&workers).await,
        Command::Generate { folder, rows, warehouses } => {
            tables::generate(&folder, warehouses.map_or(Size::Rows(rows), Size::Warehouses)).await
        }
    }
}

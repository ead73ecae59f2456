//! SQL over a folder of Parquet, CSV and DuckDB files, for clients of the scan protocol (`docs/wire-scan.md`).
//!
//! ```text
//!  client ── frames ──► session   reads frames, keeps the books    one thread for each client
//!                          │
//!                          ▼
//!                       cursor    runs the query, sends batches    one thread for each running query
//!                          │
//!                          ▼
//!                       dataset   DuckDB, with a view for each file
//! ```

#![forbid(unsafe_code)]

/// A line of the log, on standard error. That nobody reads it is no reason to panic, as `eprintln!` would.
macro_rules! log {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

mod cursor;
mod dataset;
mod encoding;
mod flight;
mod incoming;
mod interrupt;
mod lending;
mod rows;
mod server;
mod session;
mod sql;
mod store;
mod unfit;

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::dataset::Dataset;
use crate::server::{Limits, Server};
use crate::store::Store;

/// How long the server waits for its queries once it is to end.
const LEAVING: Duration = Duration::from_secs(5);

/// Answers SQL on the data files of a folder. Queries only read: see docs/columns.md.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Where to listen; with port 0 the kernel chooses one. The address is printed
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:7575")]
    listen: SocketAddr,

    /// Listen for Arrow Flight, too. The address is printed in a second line
    #[arg(long, value_name = "ADDR:PORT")]
    flight_listen: Option<SocketAddr>,

    /// A folder: its .parquet, .csv and .duckdb files become views of the same name
    #[arg(long, value_name = "DIR")]
    dataset: PathBuf,

    /// Memory for all queries together, such as 2GB; nothing is spilled to disk [default: 80% of the machine's]
    #[arg(long, value_name = "SIZE")]
    memory: Option<String>,

    /// Cursors that one client may have
    #[arg(long, value_name = "N", default_value_t = 16)]
    max_cursors: usize,

    /// Queries that may run for all clients together
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_queries: usize,

    /// Connections at a time
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_clients: usize,

    /// How long a cursor waits for its client, and a batch for being taken off
    #[arg(long, value_name = "SECONDS", default_value_t = 300,
          value_parser = clap::value_parser!(u64).range(1..=u64::from(u32::MAX)))]
    idle: u64,

    /// Keep results of up to so many MiB, and answer the same query from there as long as the files are the same, whatever
    /// functions it calls. As much is kept for each client in memory that it is lent again
    #[arg(long, value_name = "MIB", conflicts_with = "transport_alone")]
    keep: Option<usize>,

    /// Keep every result, and copy it for each answer: for measurements of the transport alone
    #[arg(long)]
    transport_alone: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo-server: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let dataset = Dataset::open(&arguments.dataset, arguments.memory.as_deref())?;
    let (listener, mut addresses) = listen(arguments.listen)?;
    let flight = arguments.flight_listen.map(listen).transpose()?;

    let server = Arc::new(Server::new(
        dataset,
        Limits {
            cursors: arguments.max_cursors,
            queries: arguments.max_queries,
            clients: arguments.max_clients,
            idle: Duration::from_secs(arguments.idle),
        },
        store(arguments),
    ));
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("signal handlers")?;
    let signalled = server.clone();
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        if signals.forever().next().is_some() {
            // If there is no thread for it, queries are waited for.
            let _ = std::thread::Builder::new().name("impatience".into()).spawn(|| {
                std::thread::sleep(LEAVING);
                log!("a query can't be interrupted; the server ends without it");
                // Without what exit(3) runs, while threads of DuckDB are at work.
                signal_hook::low_level::exit(0);
            });
            signalled.close();
            std::process::exit(0);
        }
    })?;

    if let Some((listener, address)) = flight {
        flight::start(server.clone(), listener)?;
        addresses = format!("{addresses}\n{address}");
    }
    let mut output = std::io::stdout();
    writeln!(output, "{addresses}").and_then(|()| output.flush()).context("standard output")?;
    server.serve(&listener)
}

/// What keeps results, if they are kept.
fn store(arguments: &Arguments) -> Option<Store> {
    let kept = arguments.keep.map(|mebibytes| Store::new(mebibytes.saturating_mul(1 << 20), true));
    kept.or_else(|| arguments.transport_alone.then(|| Store::new(usize::MAX, false)))
}

/// A listener, and where it listens.
fn listen(address: SocketAddr) -> Result<(TcpListener, String)> {
    let listener = TcpListener::bind(address).with_context(|| format!("can't listen on {address}"))?;
    let address = listener.local_addr().context("the address listened on")?;
    Ok((listener, address.to_string()))
}

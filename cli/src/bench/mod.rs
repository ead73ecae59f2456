//! `thallus bench`: what a connection costs over TCP, a Unix socket and Thallus.
//!
//! Server and client are two processes, as they would be in real life: this binary, started again with a
//! hidden subcommand. They know nothing of Thallus. They call libc's `send`, `recv`, `poll` and `epoll_wait`
//! as any program does, and whether those calls reach the kernel or the library is decided by the
//! environment that they are started in:
//!
//! ```text
//! thallus bench ─┬─ thallus bench serve SESSION   tcp, unix: as it is
//!   (measure)    │        ▲ │                     thallus: LD_PRELOAD=libthallus_shim.so
//!                │        │ ▼                     client-only, server-only: one of the two with it
//!                └─ thallus bench drive SESSION
//! ```
//!
//! | module | |
//! |---|---|
//! | `plan` | what is measured, and over what |
//! | `measure` | one measurement: starts the pair, reads both reports and the library's counters |
//! | `counters` | the library's own account of what became of the connections |
//! | `role` | what a server and a client do: session, placement, report |
//! | `ping_pong`, `event_loop`, `stream`, `connect`, `idle` | the workloads, both sides of each |
//! | `latency` | how long round trips take |
//! | `message`, `socket` | messages that prove themselves; the calls they travel by |
//! | `bare` | what they travel by without a socket: the most that this machine gives |
//! | `verbs` | an RDMA device between two hosts, with nothing preloaded |
//! | `arrow` | query results of demo-server, which are not this binary's |
//! | `compare` | two reports |
//! | `page`, `plot` | HTML with SVG in it |
//! | `report`, `machine` | median and spread, the table, the JSON; where it was measured |

mod arrow;
mod bare;
mod compare;
mod connect;
mod counters;
mod event_loop;
mod idle;
mod latency;
mod machine;
mod measure;
mod message;
mod output;
mod page;
mod ping_pong;
mod plan;
mod plot;
mod report;
mod role;
mod socket;
mod stream;
mod verbs;

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::ensure;
use compare::Report;
use output::Output;
use page::Titled;
use plan::Transport;

/// Measure this machine: round trips, stream throughput, connections, memory.
///
/// Exit status: 0; 1 if a measurement failed, or with --compare if something got worse, failed, is missing, or stays on TCP now; 2 for
/// wrong arguments, also reports that can't be compared.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    /// Measurements of each workload over each transport, in turn.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Seconds of one measurement, after a warm-up on the same connections.
    #[arg(long, default_value_t = 1.0, value_parser = seconds)]
    seconds: f64,
    /// Only workloads whose name contains this text (repeatable; --list shows the names).
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Only over these transports (repeatable).
    #[arg(long, value_enum)]
    transport: Vec<Transport>,
    /// Also write the results as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also write a page with plots, and with the JSON in it.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Measure nothing: compare two reports of --json, with three rounds or more.
    #[arg(long, num_args = 2, value_names = ["OLD", "NEW"],
        conflicts_with_all = ["rounds", "seconds", "only", "transport", "json", "list"])]
    compare: Option<Vec<PathBuf>>,
    /// Print the names of the workloads and exit.
    #[arg(long)]
    list: bool,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, clap::Subcommand)]
enum Role {
    Arrow(arrow::Args),
    Verbs(verbs::Args),
    /// The server of one measurement.
    #[command(hide = true)]
    Serve {
        session: String,
    },
    /// The client of one measurement.
    #[command(hide = true)]
    Drive {
        session: String,
    },
}

/// Runs the benchmark, or one of its two roles.
///
/// # Errors
/// The library is missing, or a measurement failed: a role died, saw bytes that
/// were not sent to it, or gave no result in time. What was measured until the end is reported all the same.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let done = |()| ExitCode::SUCCESS;
    match (&args.role, args.compare.as_deref()) {
        (Some(Role::Arrow(args)), _) => arrow::run(args),
        (Some(Role::Verbs(args)), _) => verbs::run(args).map(done),
        (Some(Role::Serve { session }), _) => role::serve(session).map(done),
        (Some(Role::Drive { session }), _) => role::drive(session).map(done),
        (None, Some([old, new])) => compare_files(old, new, args.html.as_deref()),
        (None, _) => measure_all(args),
    }
}

fn compare_files(old: &Path, new: &Path, html: Option<&Path>) -> anyhow::Result<ExitCode> {
    let (old, new) = match (Report::read(old), Report::read(new)) {
        (Ok(old), Ok(new)) => (old, new),
        (Err(error), _) | (_, Err(error)) => {
            return Ok(wrong_arguments(&format!("{error:#}")));
        }
    };
    let comparison = compare::compare(&old, &new);
    let pair = [Titled { title: "new", report: new.json() }, Titled { title: "old", report: old.json() }];
    let html = Output::open(html)?;
    // What can't be written is not to take the rest with it.
    let outcomes = [crate::print(&comparison.text), html.write(|| page::html(&comparison.text, &pair))];
    outcomes.into_iter().collect::<anyhow::Result<()>>()?;
    Ok(if comparison.is_worse { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Says what is wrong with them.
fn wrong_arguments(text: &str) -> ExitCode {
    crate::tell(format_args!("thallus: {text}\n"));
    ExitCode::from(2)
}

fn measure_all(args: &Args) -> anyhow::Result<ExitCode> {
    let plan = plan::plan(&args.only, &args.transport)?;
    if plan.is_empty() {
        let wrong = "no workload has such a name and transport (see `thallus bench --list`)";
        return Ok(wrong_arguments(wrong));
    }
    if args.list {
        let names: String = plan.iter().map(|variant| format!("{}\n", variant.name())).collect();
        return crate::print(&names).map(|()| ExitCode::SUCCESS);
    }
    let machine = machine::facts();
    let (file, html) = (Output::open(args.json.as_deref())?, Output::open(args.html.as_deref())?);
    let outcome = measure::run(&plan, args.rounds, args.seconds)?;
    let json = report::json(&machine, &outcome, args.rounds, args.seconds);
    let tables = report::markdown(&machine, &outcome, args.rounds, args.seconds);
    // It took long: what can't be written is not to take the rest with it.
    let outcomes = [
        crate::print(&tables),
        file.write(|| Ok(format!("{json:#}\n"))),
        html.write(|| page::html(&tables, &[Titled { title: "", report: &json }])),
    ];
    outcomes.into_iter().collect::<anyhow::Result<()>>()?;
    ensure!(outcome.failures.is_empty(), "{} measurements failed", outcome.failures.len());
    Ok(ExitCode::SUCCESS)
}

/// How long a measurement may take.
const SECONDS: RangeInclusive<f64> = 0.01..=600.0;

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if SECONDS.contains(&seconds) => Ok(seconds),
        _ => Err("a number of seconds from 0.01 to 600".to_owned()),
    }
}

//! `thallus bench arrow`: results of `demo-server`, by each transport that `demo-client` has.
//!
//! Both are programs of their own, so that this one need not bring DuckDB. A case is a query. For each case servers are
//! started, with the library and without; then, round by round, every way in turn is taken by a client, which asks several times
//! on one connection. In between the client also measures how fast it copies the same bytes within its memory.
//!
//! | module | |
//! |---|---|
//! | `plan` | cases and ways |
//! | `measure` | starts the programs, compares checksums, reads counters |
//! | `results` | medians; what was won and lost |
//! | `page`, `plot` | HTML with SVG in it; tables |

mod measure;
mod page;
mod plan;
mod plot;
mod results;

use std::path::PathBuf;
use std::process::ExitCode;

use super::output::Output;

/// Measure query results of demo-server: columns of lineitem, sizes, types; the transport alone and with the query.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A folder with TPC-H's lineitem.parquet (scripts/bench-arrow makes one).
    #[arg(long, value_name = "DIR")]
    dataset: PathBuf,
    /// Measurements of each case by each way, in turn.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Only cases whose name contains this text (repeatable; --list shows the names).
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Write the results as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page with plots.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print the names of the cases and exit.
    #[arg(long)]
    list: bool,
}

/// # Errors
/// A program or the library is missing, one of them failed, or two ways gave different rows.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let cases = plan::cases(&args.only);
    if cases.is_empty() {
        return Ok(super::wrong_arguments("no case has such a name; see --list"));
    }
    if args.list {
        let names: String = cases.iter().map(|case| format!("{}\n", case.name())).collect();
        return crate::print(&names).map(|()| ExitCode::SUCCESS);
    }
    let machine = super::machine::facts();
    let (json, html) = (Output::open(args.json.as_deref())?, Output::open(args.html.as_deref())?);
    let results = measure::run(&args.dataset, &cases, args.rounds)?;
    // It took long: what can't be written is not to take the rest with it.
    let outcomes = [
        crate::print(&page::markdown(&machine, &results, args.rounds)),
        json.write(|| Ok(format!("{:#}\n", results::json(&machine, &results, args.rounds)))),
        html.write(|| page::html(&machine, &results, args.rounds)),
    ];
    outcomes.into_iter().collect::<anyhow::Result<()>>()?;
    Ok(ExitCode::SUCCESS)
}

//! `thallus export`: what `thallus status` sees, as metrics for Prometheus.

mod http;
mod metrics;
mod totals;

use std::net::{SocketAddr, TcpListener};
use std::sync::Mutex;

use anyhow::{Context, anyhow};

use crate::status::{report, scan};
use totals::Totals;

/// Offer what live processes and their connections do as metrics for Prometheus
///
/// Answers GET /metrics in Prometheus' text format. The metrics are of this user's processes, or of everybody's for
/// root: sums only, without addresses and commands. Every answer is a look at that moment; between two of them nothing is done.
///
/// Counters hold what has been seen since this command began, and never go back: a connection that ends leaves what it
/// had when it was last looked at. What it did after that, and connections that were never seen, are not counted.
/// The names are in docs/metrics.md.
///
/// Exit status: 0 with --once; 1 if ADDRESS:PORT can't be listened at, or /proc can't be read; 2 for wrong arguments.
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// Where to listen; with port 0 one that is free. The address is printed to standard error
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9477")]
    listen: SocketAddr,
    /// Print the metrics once, and end
    #[arg(long, conflicts_with = "listen")]
    once: bool,
}

/// Prints the metrics, or answers for ever. Fails if it can't look, print or listen.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let seen = Mutex::default();
    if args.once {
        return crate::print(&look(&seen)?);
    }
    let cannot = || format!("can't listen at {}", args.listen);
    let listener = TcpListener::bind(args.listen).with_context(cannot)?;
    let address = listener.local_addr().with_context(cannot)?;
    crate::tell(format_args!("thallus: http://{address}/metrics\n"));
    http::serve(&listener, &|| look(&seen));
    Ok(())
}

/// The metrics at this moment. One look at a time.
fn look(seen: &Mutex<Totals>) -> anyhow::Result<String> {
    let mut totals = seen.lock().map_err(|_| anyhow!("an earlier look failed"))?;
    let scan = scan::scan().context("can't read /proc")?;
    totals.add(&scan);
    metrics::text(&report(&scan), &totals).context("metrics")
}

//! `thallus pin`: takes a live connection back to TCP.

use std::fs;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use thallus_transport::arena::{Generation, Wish};

use crate::library::NAME;
use crate::status::scan::{Family, Scan, is_alive};

/// Take a live connection back to TCP, and keep it there
///
/// The process itself goes back, in its next call on the connection; not a byte is lost. A process that sleeps makes
/// its next call when something arrives. `thallus status` shows pids and descriptors.
///
/// Exit status: 0 if the connection is on TCP. 1 if not, or not yet: then the request stands. 2 for wrong
/// arguments.
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// The process
    #[arg(long)]
    pid: u32,
    /// Its descriptor of the connection
    #[arg(long)]
    fd: u32,
    /// How long to wait for the process's next call, in seconds
    #[arg(long, default_value_t = 2.0, value_parser = seconds)]
    wait: f64,
    /// Where the bytes are to go
    #[arg(value_enum)]
    fabric: Fabric,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Fabric {
    Tcp,
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.0..=86_400.0).contains(&seconds) { Ok(seconds) } else { Err("not in 0 to 86400".to_owned()) }
}

/// How often the process is looked at.
const STEP: Duration = Duration::from_millis(5);

/// Fails if there is no such connection, it may not be touched, or has not gone back in time.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let Fabric::Tcp = args.fabric;
    let scan = Scan::of(args.pid).context("can't read /proc")?;
    if !is_alive(args.pid) {
        bail!("there is no process {}", args.pid);
    }
    if scan.hidden.contains_key(&args.pid) {
        bail!(
            "no permission to look at process {}: run this as its user or as root, in its container",
            args.pid
        );
    }
    if scan.other_versions > 0 {
        bail!("process {} uses another version of the library", args.pid);
    }
    if scan.families.is_empty() && !has_library(args.pid) {
        bail!("process {} runs without the library: it was not started with thallus run", args.pid);
    }
    let Found { family, index, generation } = find(&scan, args)?;
    let closed = || format!("process {} has closed connection {} meanwhile", args.pid, args.fd);
    let view = family.view().context("can't reach what the process shares")?.with_context(closed)?;
    let block = view.block(index).with_context(closed)?;
    let deadline = Instant::now() + Duration::from_secs_f64(args.wait);
    loop {
        match block.ask_for_tcp(generation) {
            Wish::Granted => return crate::print("on TCP\n"),
            Wish::Closed => bail!(closed()),
            Wish::Asked if !is_alive(args.pid) => bail!("process {} has ended meanwhile", args.pid),
            Wish::Asked if Instant::now() >= deadline => bail!(
                "not yet: the process has made no call on the connection, or has unread data; the request stands"
            ),
            Wish::Asked => sleep(STEP),
        }
    }
}

/// Whether the library is mapped by the process, or nobody can tell.
fn has_library(pid: u32) -> bool {
    let maps = fs::read(format!("/proc/{pid}/maps"));
    maps.map_or(true, |maps| maps.windows(NAME.len()).any(|part| part == NAME.as_bytes()))
}

struct Found<'scan> {
    family: &'scan Family,
    /// The block's place.
    index: usize,
    generation: Generation,
}

fn find<'scan>(scan: &'scan Scan, args: &Args) -> anyhow::Result<Found<'scan>> {
    let Args { pid, fd, .. } = args;
    let mut found = scan.families.iter().flat_map(|family| {
        family.connections.blocks().filter_map(move |(index, block)| {
            let generation = block.connection()?;
            let owner = scan.owner(family, block.owner_pid.load(Relaxed), block.opened_ns())?;
            let is_it = owner.pid == *pid && block.owner_fd.load(Relaxed) == *fd;
            is_it.then_some(Found { family, index, generation })
        })
    });
    let first = found.next().with_context(|| {
        format!(
            "process {pid} has no connection {fd} that the library has in its table; young connections are not yet there"
        )
    })?;
    // One that a fork serves is still under the descriptor that the process had for it.
    if found.next().is_some() {
        bail!("process {pid} has had several connections as {fd} that are still open in it or its forks");
    }
    Ok(first)
}

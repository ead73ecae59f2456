//! `thallus pin`: takes a live connection back to TCP.

use std::sync::atomic::Ordering::Relaxed;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use thallus_transport::arena::Block;

use crate::status::scan::Scan;

/// Take a live connection back to TCP, and keep it there
///
/// The process itself goes back, in its next call on the connection; not a byte is lost. A process that sleeps makes
/// its next call when something arrives. `thallus status` shows pids and descriptors.
///
/// Exit status: 0 if the connection is on TCP, 1 if not, or not yet: then the request stands.
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
    let scan = Scan::of(args.pid);
    if scan.hidden.contains_key(&args.pid) {
        bail!("process {} belongs to another user: ask root", args.pid);
    }
    if scan.other_versions > 0 {
        bail!("process {} uses another version of the library", args.pid);
    }
    let block = find(&scan, args).with_context(|| {
        format!(
            "process {} has no connection {} that the library has in its table; young connections are not yet there",
            args.pid, args.fd
        )
    })?;
    let deadline = Instant::now() + Duration::from_secs_f64(args.wait);
    loop {
        if block.ask_for_tcp() {
            return crate::print("on TCP\n");
        }
        if Instant::now() >= deadline {
            bail!(
                "not yet: the process has made no call on the connection, or has unread data; the request stands"
            );
        }
        sleep(STEP);
    }
}

fn find(scan: &Scan, args: &Args) -> Option<&'static Block> {
    scan.families.iter().find_map(|family| {
        family.chunk.blocks().find(|block| {
            let owner = scan.owner(family, block.owner_pid.load(Relaxed));
            owner.is_some_and(|owner| owner.pid == args.pid) && block.owner_fd.load(Relaxed) == args.fd
        })
    })
}

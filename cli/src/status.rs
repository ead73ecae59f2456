//! `thallus status`: the live processes that use the library, and what their connections do.

pub(crate) mod scan;
pub(crate) mod sockets;
pub(crate) mod table;

use std::collections::HashMap;
use std::net::SocketAddr;

use anyhow::Context;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use thallus_transport::arena::{Block, Role, flag};

use sockets::Sockets;

/// Show live processes and where the bytes of their connections go
///
/// One line for each end of a connection: a connection between two processes of this host has two.
/// FABRIC is shm, verbs, or tcp or unix with the reason. Other users' processes are seen by root only.
///
/// Exit status: 0, also if there are none; 1 if /proc can't be read; 2 for wrong arguments.
///
/// With --json: an object with
///   processes    array: pid, command, connections (how many)
///   connections  array: pid, command, fd, role (client or server), local and peer (ADDRESS:PORT, the name of
///                an AF_UNIX socket, or null), fabric (shm, verbs, tcp or unix), reason (null but for the last two), bytes_sent, bytes_received,
///                ring_bytes_sent, ring_bytes_received, tcp_bytes_sent, tcp_bytes_received, doorbells_sent, sleeps,
///                spin_hits, age_seconds
///   hidden_processes  processes that could not be looked at for lack of permission
///   other_versions    processes whose library is of another version
///   arenas_not_shown  parts of the processes' shared memory, of up to 8,192 connection ends each, that are left out: of one
///                     user's ends about 131,072 are shown
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Everything that `thallus status` shows. The names of the fields are part of the interface.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Sorted by pid.
    pub(crate) processes: Vec<ProcessSummary>,
    /// Sorted by pid, then file descriptor.
    pub(crate) connections: Vec<Connection>,
    /// Processes that could not be looked at for lack of permission.
    pub(crate) hidden_processes: usize,
    /// Processes whose library is of a version that this command does not know.
    pub(crate) other_versions: usize,
    /// Parts of what processes share about their connections that are not shown, for one user has too many.
    pub(crate) arenas_not_shown: usize,
}

#[derive(Debug, Serialize)]
pub(crate) struct ProcessSummary {
    pid: u32,
    command: String,
    connections: usize,
}

/// One end of a connection. Sizes in bytes.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Connection {
    pub(crate) pid: u32,
    pub(crate) command: String,
    pub(crate) fd: u32,
    pub(crate) role: &'static str,
    pub(crate) local: Option<String>,
    pub(crate) peer: Option<String>,
    pub(crate) fabric: &'static str,
    pub(crate) reason: Option<&'static str>,
    pub(crate) bytes_sent: u64,
    pub(crate) bytes_received: u64,
    pub(crate) ring_bytes_sent: u64,
    pub(crate) ring_bytes_received: u64,
    pub(crate) tcp_bytes_sent: u64,
    pub(crate) tcp_bytes_received: u64,
    pub(crate) doorbells_sent: u64,
    pub(crate) sleeps: u64,
    pub(crate) spin_hits: u64,
    pub(crate) age_seconds: f64,
    /// When it was opened; tells apart what had the same descriptor.
    #[serde(skip)]
    pub(crate) opened_ns: u64,
}

/// Prints the report. Fails if `/proc` can't be read or standard output can't be written.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let report = Report::now(&mut Sockets::default())?;
    let text = if args.json {
        let mut text = serde_json::to_string_pretty(&report)?;
        text.push('\n');
        text
    } else {
        table::render(&report)
    };
    crate::print(&text)
}

impl Report {
    /// Looks at all processes, and at `sockets` for addresses that the library does not know. Fails if `/proc` can't be read.
    pub(crate) fn now(sockets: &mut Sockets) -> anyhow::Result<Self> {
        let mut report = report(&scan::scan().context("can't read /proc")?);
        sockets.complete(&mut report.connections);
        Ok(report)
    }
}

/// What is shown of this.
pub(crate) fn report(scan: &scan::Scan) -> Report {
    let now_ns = boot_time_ns();
    let mut connections: Vec<_> = scan
        .families
        .iter()
        .flat_map(|family| {
            family.connections.blocks().filter_map(move |(_, block)| {
                let owner = scan.owner(family, block.owner_pid.load(ORDERING), block.opened_ns())?;
                Some(Connection::new(block, owner, now_ns))
            })
        })
        .collect();
    connections.sort_by_key(|connection| (connection.pid, connection.fd));

    let processes = scan.processes();
    let mut counts: HashMap<u32, usize> = HashMap::new();
    for connection in &connections {
        *counts.entry(connection.pid).or_default() += 1;
    }
    let processes = processes.into_iter().map(|process| ProcessSummary {
        pid: process.pid,
        command: process.command.to_string(),
        connections: counts.get(&process.pid).copied().unwrap_or_default(),
    });
    Report {
        processes: processes.collect(),
        connections,
        hidden_processes: scan.hidden.len(),
        other_versions: scan.other_versions,
        arenas_not_shown: scan.arenas_not_shown(),
    }
}

/// Counters are looked at while their owners go on; each is exact, together they are not.
pub(crate) const ORDERING: std::sync::atomic::Ordering = std::sync::atomic::Ordering::Relaxed;

/// Whether bytes go another way than TCP.
pub(crate) fn is_in_ring(block: &Block) -> bool {
    let has_left = block.has(flag::READY)
        || block.recv_switched.load(ORDERING) == 1
        || block.send_switched.load(ORDERING) == 1;
    has_left && !block.has(flag::RETURNED)
}

/// What carries the bytes of a connection that is in no ring.
pub(crate) fn kernels_fabric(block: &Block) -> &'static str {
    if block.has(flag::UNIX) { "unix" } else { "tcp" }
}

/// An address of a TCP connection, or the name of an `AF_UNIX` server, at the end that `has_name`.
fn address(block: &Block, has_name: Role, address: Option<SocketAddr>) -> Option<String> {
    if block.has(flag::UNIX) {
        return block.name().filter(|_| block.role() == has_name).map(|name| name.to_string());
    }
    address.map(|address| address.to_string())
}

impl Connection {
    fn new(block: &Block, owner: scan::Process, now_ns: u64) -> Self {
        let in_ring = is_in_ring(block);
        let ring_bytes_sent = block.ring_sent.load(ORDERING);
        let ring_bytes_received = block.ring_received.load(ORDERING);
        let tcp_bytes_sent = block.tcp_sent.load(ORDERING);
        let tcp_bytes_received = block.tcp_received.load(ORDERING);
        Self {
            pid: owner.pid,
            command: owner.command.to_string(),
            fd: block.owner_fd.load(ORDERING),
            role: match block.role() {
                Role::Client => "client",
                Role::Server => "server",
            },
            local: address(block, Role::Server, block.local()),
            peer: address(block, Role::Client, block.peer()),
            fabric: match in_ring {
                true if block.has(flag::VERBS) => "verbs",
                true => "shm",
                false => kernels_fabric(block),
            },
            reason: (!in_ring).then(|| block.reason().name()),
            bytes_sent: ring_bytes_sent.saturating_add(tcp_bytes_sent),
            bytes_received: ring_bytes_received.saturating_add(tcp_bytes_received),
            ring_bytes_sent,
            ring_bytes_received,
            tcp_bytes_sent,
            tcp_bytes_received,
            doorbells_sent: block.bells(),
            sleeps: block.sleeps.load(ORDERING),
            spin_hits: block.spin_hits.load(ORDERING),
            age_seconds: now_ns.saturating_sub(block.opened_ns()) as f64 / 1e9,
            opened_ns: block.opened_ns(),
        }
    }
}

/// The clock of [`Block::opened_ns`].
fn boot_time_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let nanoseconds = i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec);
    u64::try_from(nanoseconds).unwrap_or(0)
}

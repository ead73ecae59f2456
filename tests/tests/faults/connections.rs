//! Many connections one after the other, that end in every way: neither side gets more descriptors, mappings or memory with them.
//!
//! `CONNECTIONS` says how many, beside the first.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use thallus_tests::harness::{Scene, Service, free_port, program, turn};

use super::kills::{ends, holds, soon};

/// After so many, all that is made once is there.
const FIRST: u64 = 2000;

/// How much memory the others may add, in KiB, however many they are: allocators take some at random.
const SOME: u64 = 512;

/// The same of what the library knows of connections: 128 that children left behind may wait to be found.
const LITTLE: u64 = 64;

/// Why connections may stay on the kernel's socket: they are short, shared or shut down before they could leave it, or one side is
/// done with them while the other looks for it.
const STAYS: [&str; 7] = [
    "short",
    "no-answer",
    "nothing-read",
    "peer-without-thallus",
    "shared-before-upgrade",
    "shutdown-before-upgrade",
    "unsupported-call",
];

/// How long a thousand may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a process has when it has no connection.
#[derive(Debug)]
struct Holds {
    descriptors: usize,
    mappings: usize,
    /// In KiB.
    resident: u64,
    /// What of that is about connections (`thallus-arena`).
    arena: u64,
}

impl Holds {
    fn new(pid: u32) -> Result<Self> {
        let (descriptors, mappings) = holds(pid);
        let (mut resident, mut arena, mut is_arena) = (0, 0, false);
        for line in fs::read_to_string(format!("/proc/{pid}/smaps"))?.lines() {
            if let Some(rest) = line.strip_prefix("Rss:") {
                let kib: u64 = rest.trim().strip_suffix(" kB").context("Rss")?.parse()?;
                resident += kib;
                arena += if is_arena { kib } else { 0 };
            } else if line.split_once(' ').is_some_and(|(range, _)| range.contains('-')) {
                is_arena = line.contains("thallus-arena");
            }
        }
        Ok(Self { descriptors, mappings, resident, arena })
    }

    /// When the server, too, has done with its last connections.
    fn at_rest(pid: u32) -> Result<Self> {
        let mut before = Self::new(pid)?;
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let now = Self::new(pid)?;
            if (now.descriptors, now.mappings) == (before.descriptors, before.mappings) {
                return Ok(now);
            }
            before = now;
        }
    }

    fn exceeds(&self, other: &Self) -> bool {
        self.descriptors > other.descriptors
            || self.mappings > other.mappings
            || self.resident > other.resident + SOME
            || self.arena > other.arena + LITTLE
    }
}

/// Waits until the client has printed `line`, after so many connections. Else tells what both do.
fn await_line(client: &mut Service, server: &Service, line: &str, count: u64) -> Result<()> {
    let start = Instant::now();
    while client.log().lines().last() != Some(line) {
        ensure!(client.ended()?.is_none(), "the client ended\n{}", client.log());
        ensure!(
            start.elapsed() < PATIENCE * (count / 1000 + 1) as u32,
            "{}\n{}",
            client.diagnosis(),
            server.diagnosis()
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Makes connections to a server at `address`, a port of TCP or the name of a Unix socket.
fn leave_nothing(address: &str) -> Result<()> {
    let _turn = turn();
    let given = std::env::var("CONNECTIONS").ok();
    let rest = given.map_or(Ok(3000), |text| text.parse()).context("CONNECTIONS")?;
    let scene = Scene::new()?;
    fs::write(scene.path("connections.py"), include_str!("connections.py"))?;
    let start = |role: &str, counts: &[u64]| -> Result<Service> {
        let mut command = scene.shimmed(role, program("python3", "python3")?)?;
        // Else what malloc keeps for itself hides what the library does.
        command.env("MALLOC_ARENA_MAX", "1").env("MALLOC_MMAP_THRESHOLD_", "65536");
        command.args(["connections.py", role, address]);
        command.args(counts.iter().map(u64::to_string));
        scene.start(role, command)
    };
    let mut server = start("server", &[])?;
    match address.parse() {
        Ok(port) => server.await_port(port)?,
        Err(_) => server.await_ready(|| scene.path(address).exists())?,
    }
    let mut client = start("client", &[FIRST, rest])?;
    await_line(&mut client, &server, "first", FIRST)?;
    let pids = [server.pid(), client.pid()];
    let before = pids.map(Holds::at_rest);
    fs::write(scene.path("go on"), "")?;
    await_line(&mut client, &server, "all", rest)?;
    for (pid, before) in pids.into_iter().zip(before) {
        let before = before?;
        let seen = || format!("had {before:?}, has {:?}", Holds::new(pid));
        let told = || format!("{}\n{}\n{}", seen(), client.diagnosis(), server.diagnosis());
        soon("something is left", told, || Holds::new(pid).is_ok_and(|now| !now.exceeds(&before)))?;
        println!("{rest} connections to {address}: {}", seen());
    }
    fs::write(scene.path("end"), "")?;
    ensure!(ends(client, "the client")?.ends_with("all\n"));
    server.stop(Signal::TERM)?;
    for side in ["server", "client"] {
        let stats = scene.stats(side)?;
        // Two kinds in twelve are too short.
        ensure!(stats.over_shared_memory() >= (FIRST + rest) / 2, "{side}: {stats:?}");
        ensure!(stats.returned_to_tcp >= (FIRST + rest) / 24, "{side}: {stats:?}");
        let stays = stats.not_upgraded.keys().map(String::as_str);
        let strange: Vec<_> = stays.filter(|reason| !STAYS.contains(reason)).collect();
        ensure!(strange.is_empty(), "{side}: {strange:?} in {stats:?}");
    }
    Ok(())
}

#[test]
fn over_tcp() -> Result<()> {
    leave_nothing(&free_port()?.to_string())
}

#[test]
fn over_a_unix_socket() -> Result<()> {
    leave_nothing("socket")
}

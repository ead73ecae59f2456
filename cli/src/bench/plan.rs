//! What is measured: workload × placement, each over several transports.

use std::fmt;

use super::stream;
use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// How the bytes of a measurement travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Transport {
    /// TCP over 127.0.0.1.
    Tcp,
    /// A Unix stream socket.
    Unix,
    /// TCP over 127.0.0.1, both processes with the library preloaded.
    Thallus,
    /// TCP over 127.0.0.1, only the client with the library.
    ClientOnly,
    /// TCP over 127.0.0.1, only the server with the library.
    ServerOnly,
    /// A Unix stream socket, both processes with the library preloaded, which may take it out of the kernel.
    ThallusUnix,
    /// No socket, but two rings of 1 MiB in shared memory on which both processes spin: what this machine gives at most.
    Bare,
}

impl Transport {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Unix => "unix",
            Self::Thallus => "thallus",
            Self::ClientOnly => "client-only",
            Self::ServerOnly => "server-only",
            Self::ThallusUnix => "thallus-unix",
            Self::Bare => "bare",
        }
    }

    pub(super) fn preloads_client(self) -> bool {
        matches!(self, Self::Thallus | Self::ThallusUnix | Self::ClientOnly)
    }

    pub(super) fn preloads_server(self) -> bool {
        matches!(self, Self::Thallus | Self::ThallusUnix | Self::ServerOnly)
    }

    /// What it is compared with.
    pub(super) fn baseline(self) -> Self {
        if self == Self::ThallusUnix { Self::Unix } else { Self::Tcp }
    }
}

/// How a process waits for the other side's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Wait {
    /// In `recv` and `send`.
    Blocking,
    /// In `poll`, on non-blocking sockets.
    Poll,
    /// In a level-triggered `epoll_wait`, on non-blocking sockets.
    Epoll,
}

/// What the client asks of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Workload {
    /// Messages of `size` bytes, echoed; one outstanding on each connection. Round trips per second.
    PingPong { wait: Wait, size: usize, connections: usize },
    /// The same with 64 bytes, in `epoll_wait`, on the first `active` of `connections`; the others are idle, and have been used.
    Herd { active: usize, connections: usize },
    /// Messages of 64 bytes on one connection, echoed, in `recv` and `send`: `rate` a second, if they go so fast. Round trips
    /// per second; its point is what CPU time they take.
    Paced { rate: u32 },
    /// 64 KiB writes one way, from and into `memory` bytes in turn. Gigabytes (10⁹) per second.
    Stream { memory: usize },
    /// Connect, 64-byte requests and replies in turn, close; one connection after the other. Connections per second.
    Connect { requests: usize },
    /// Memory of `connections` idle connections, both processes together. Bytes per connection.
    Idle { connections: usize },
}

impl Workload {
    /// Whether it is also measured over [`Transport::Bare`]: where both sides have a core to spin on.
    fn has_yardstick(self) -> bool {
        matches!(self, Self::PingPong { wait: Wait::Blocking, .. } | Self::Stream { .. })
    }
}

/// The CPUs that the processes may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placement {
    /// The server on one core, the client on another; where there is but one, on two hardware threads of it.
    Cores { server: usize, client: usize, apart: bool },
    /// Both on this core.
    OneCore(usize),
    /// Where the scheduler puts them.
    Unpinned,
}

impl Placement {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Cores { .. } => "cores",
            Self::OneCore(_) => "one-core",
            Self::Unpinned => "unpinned",
        }
    }

    pub(super) fn server(self) -> Option<usize> {
        match self {
            Self::Cores { server, .. } => Some(server),
            Self::OneCore(cpu) => Some(cpu),
            Self::Unpinned => None,
        }
    }

    pub(super) fn client(self) -> Option<usize> {
        match self {
            Self::Cores { client, .. } => Some(client),
            Self::OneCore(cpu) => Some(cpu),
            Self::Unpinned => None,
        }
    }
}

/// One line of the result.
#[derive(Debug, Clone)]
pub(super) struct Variant {
    pub(super) workload: Workload,
    pub(super) placement: Placement,
    /// Whether this is about a peer that has no library.
    pub(super) one_sided: bool,
    /// TCP first, as what the others are compared with.
    pub(super) transports: Vec<Transport>,
}

impl Variant {
    /// Its name, as `--only` and the JSON use it: `ping-pong/64/epoll/cores`.
    pub(super) fn name(&self) -> String {
        let group = if self.one_sided { "one-sided/" } else { "" };
        format!("{group}{}/{}", self.workload, self.placement.name())
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PingPong { wait, size, connections } => {
                let wait = match wait {
                    Wait::Blocking => "blocking",
                    Wait::Poll => "poll",
                    Wait::Epoll => "epoll",
                };
                write!(out, "ping-pong/{size}/{wait}")?;
                if *connections > 1 {
                    write!(out, "-{connections}")?;
                }
                Ok(())
            }
            Self::Stream { memory } if *memory < MIB => write!(out, "stream/{}KiB", memory / 1024),
            Self::Stream { memory } => write!(out, "stream/{}MiB", memory / MIB),
            Self::Paced { rate } => write!(out, "paced/64/{rate}-per-second"),
            Self::Herd { active, connections } => write!(out, "herd/64/{active}-of-{connections}"),
            Self::Connect { requests: 1 } => out.write_str("connect/64"),
            Self::Connect { requests } => write!(out, "connect/64-{requests}-times"),
            Self::Idle { connections } => write!(out, "idle/{connections}"),
        }
    }
}

/// All variants whose name contains one of `only` (all, if empty), over those of `transports` (all, if empty).
///
/// # Errors
/// The CPUs of this process can't be read.
pub(super) fn plan(only: &[String], transports: &[Transport]) -> anyhow::Result<Vec<Variant>> {
    let mut plan = all(&allowed_cpus()?, threads_beside);
    plan.retain(|variant| only.is_empty() || only.iter().any(|text| variant.name().contains(text)));
    for variant in &mut plan {
        variant.transports.retain(|transport| transports.is_empty() || transports.contains(transport));
    }
    plan.retain(|variant| match variant.transports[..] {
        // One-sided without either side is plain TCP, which is in the plan anyway.
        [] => false,
        [Transport::Tcp] => !variant.one_sided,
        _ => true,
    });
    Ok(plan)
}

fn all(cpus: &[usize], threads_beside: impl Fn(usize) -> Vec<usize>) -> Vec<Variant> {
    let mut workloads = Vec::new();
    for size in [64, 1024, 65536] {
        for wait in [Wait::Blocking, Wait::Poll, Wait::Epoll] {
            workloads.push(Workload::PingPong { wait, size, connections: 1 });
        }
    }
    let small = Workload::PingPong { wait: Wait::Blocking, size: 64, connections: 1 };
    let many = Workload::PingPong { wait: Wait::Epoll, size: 64, connections: 50 };
    let cached = Workload::Stream { memory: stream::BLOCK };
    let connect = Workload::Connect { requests: 1 };
    workloads.extend([many, cached, Workload::Stream { memory: 64 * MIB }, connect]);
    // Around the length at which leaving TCP pays.
    workloads.extend([6, 12, 40].map(|requests| Workload::Connect { requests }));

    let placements = placements(cpus, threads_beside);
    let everywhere = |workload: Workload, one_sided: bool| {
        let transports = if one_sided { &ONE_SIDED[..] } else { &EACH };
        let variant = move |&placement: &Placement| {
            let mut transports = transports.to_vec();
            if !one_sided && workload.has_yardstick() && matches!(placement, Placement::Cores { .. }) {
                transports.push(Transport::Bare);
            }
            Variant { workload, placement, one_sided, transports }
        };
        placements.iter().map(variant).collect::<Vec<_>>()
    };
    let mut plan: Vec<_> = workloads.into_iter().flat_map(|workload| everywhere(workload, false)).collect();
    let mut once = |workload: Workload, wanted: &str| {
        plan.extend(
            everywhere(workload, false).into_iter().filter(|variant| variant.placement.name() == wanted),
        );
    };
    once(Workload::Idle { connections: 200 }, "unpinned");
    for size in [4096, 16 << 10, 256 << 10, MIB] {
        once(Workload::PingPong { wait: Wait::Blocking, size, connections: 1 }, "cores");
    }
    for connections in [8, 200, 1000] {
        once(Workload::PingPong { wait: Wait::Epoll, size: 64, connections }, "cores");
    }
    for rate in [100, 1000, 10_000] {
        once(Workload::Paced { rate }, "unpinned");
    }
    for connections in [100, 10_000] {
        once(Workload::Herd { active: 100, connections }, "cores");
    }
    let one_sided = [small, many, cached, connect];
    plan.extend(one_sided.into_iter().flat_map(|workload| everywhere(workload, true)));
    plan
}

fn placements(cpus: &[usize], threads_beside: impl Fn(usize) -> Vec<usize>) -> Vec<Placement> {
    let mut placements = Vec::new();
    if let [server, next, ..] = *cpus {
        let same_core = threads_beside(server);
        let other = cpus.iter().copied().find(|cpu| *cpu != server && !same_core.contains(cpu));
        placements.push(Placement::Cores { server, client: other.unwrap_or(next), apart: other.is_some() });
    }
    if let [cpu, ..] = *cpus {
        placements.push(Placement::OneCore(cpu));
    }
    placements.push(Placement::Unpinned);
    placements
}

/// The hardware threads of the core that a CPU is one of, as sysfs lists them (Documentation/ABI/stable/sysfs-devices-system-cpu in
/// Linux); none if it does not.
fn threads_beside(cpu: usize) -> Vec<usize> {
    let list = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    numbers(&std::fs::read_to_string(list).unwrap_or_default())
}

/// Those of a list such as `0-1,8`.
fn numbers(list: &str) -> Vec<usize> {
    let range = |item: &str| {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        Some(first.parse::<usize>().ok()?..=last.parse().ok()?)
    };
    list.trim().split(',').filter_map(range).flatten().collect()
}

/// The CPUs that this process may run on, lowest first.
pub(super) fn allowed_cpus() -> nix::Result<Vec<usize>> {
    let set = sched_getaffinity(Pid::from_raw(0))?;
    Ok((0..CpuSet::count()).filter(|&cpu| set.is_set(cpu) == Ok(true)).collect())
}

const MIB: usize = 1 << 20;
const EACH: [Transport; 4] = [Transport::Tcp, Transport::Unix, Transport::Thallus, Transport::ThallusUnix];
const ONE_SIDED: [Transport; 3] = [Transport::Tcp, Transport::ClientOnly, Transport::ServerOnly];

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique() {
        let plan = all(&[0, 1], |_| Vec::new());
        let names: HashSet<_> = plan.iter().map(Variant::name).collect();
        assert_eq!(names.len(), plan.len());
        assert!(names.contains("ping-pong/64/epoll-50/cores"));
        assert!(names.contains("stream/64MiB/one-core"));
        assert!(names.contains("one-sided/connect/64/unpinned"));
    }

    #[test]
    fn a_single_cpu_leaves_two_placements() {
        assert_eq!(placements(&[3], |_| vec![3]), [Placement::OneCore(3), Placement::Unpinned]);
    }

    #[test]
    fn two_threads_of_a_core_are_no_two_cores() {
        let pairs = |cpu: usize| vec![cpu & !1, cpu | 1];
        assert_eq!(
            placements(&[0, 1, 2, 3], pairs)[0],
            Placement::Cores { server: 0, client: 2, apart: true }
        );
        assert_eq!(placements(&[1, 4], pairs)[0], Placement::Cores { server: 1, client: 4, apart: true });
        assert_eq!(placements(&[2, 3], pairs)[0], Placement::Cores { server: 2, client: 3, apart: false });
        assert_eq!(
            placements(&[0, 1], |_| Vec::new())[0],
            Placement::Cores { server: 0, client: 1, apart: true }
        );
        assert_eq!(numbers("0-1,8\n"), [0, 1, 8]);
        assert!(numbers("").is_empty());
    }

    #[test]
    fn a_filter_that_matches_nothing_is_an_error() {
        assert!(plan(&["no-such-workload".to_owned()], &[]).unwrap().is_empty());
        assert!(plan(&["one-sided/".to_owned()], &[Transport::Unix]).unwrap().is_empty());
    }

    #[test]
    fn the_yardstick_wants_two_cores_and_no_event_loop() {
        let over = |variant: &&Variant| variant.transports.contains(&Transport::Bare);
        let none = |_| Vec::new();
        let names: Vec<_> = all(&[0, 1], none).iter().filter(over).map(Variant::name).collect();
        assert!(names.contains(&"ping-pong/64/blocking/cores".to_owned()));
        assert!(names.contains(&"stream/64KiB/cores".to_owned()));
        assert!(names.iter().all(|name| name.ends_with("/cores") && !name.contains("poll")));
        assert_eq!(all(&[0], none).iter().filter(over).count(), 0);
    }
}

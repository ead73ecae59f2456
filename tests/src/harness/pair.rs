//! Starts the two processes of a behaviour and waits for them.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::diagnosis::{end_group, group_members, report};
use super::library::library;
use super::stats::{Stats, read_stats};
use crate::behaviours::Behaviour;
use crate::calls::{End, Family, Fd, open_descriptors, quietly, set_close_on_exec};
use crate::side::WARM_UP_ROUNDS;

/// How long the two sides of a behaviour usually may take. A hang is a failure.
const DEADLINE: Duration = Duration::from_secs(30);

/// Which sides have the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preloaded {
    /// None: the kernel's own behaviour.
    Neither,
    /// Both: connections can leave TCP.
    Both,
    /// The left side.
    Left,
    /// The right side.
    Right,
}

impl Preloaded {
    fn includes(self, left: bool) -> bool {
        self == Self::Both || self == if left { Self::Left } else { Self::Right }
    }
}

/// How a behaviour is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// The address family.
    pub family: Family,
    /// Rounds of warm-up: with 0 the connection is upgraded, if at all, in the middle of the behaviour.
    pub rounds: usize,
    /// Calls before a connection may be upgraded (`THALLUS_UPGRADE_AFTER`).
    pub upgrade_after: u32,
    /// Whether a rule names the other side as a host to reach by RDMA, for which there is no device.
    pub named: bool,
    /// Whether connections stay on TCP from the start, for good (`THALLUS_FABRIC=off`).
    pub off: bool,
    /// Whether both sides have one processor.
    pub one_processor: bool,
    /// Whether the left side connects and the right one listens.
    pub swapped: bool,
    /// How the left and the right side write messages over RDMA (`THALLUS_RDMA_ORDER`), if not as the device needs it.
    pub orders: [Option<&'static str>; 2],
    /// How long both sides may take.
    pub patience: Duration,
}

impl Variant {
    /// Over 127.0.0.1, warmed up, left side listening.
    pub const USUAL: Self = Self {
        family: Family::V4,
        rounds: WARM_UP_ROUNDS,
        upgrade_after: 1,
        named: false,
        off: false,
        one_processor: false,
        swapped: false,
        orders: [None; 2],
        patience: DEADLINE,
    };
}

/// Where the two sides meet (`THALLUS_TEST_NETWORK`): in a virtual machine of scripts/rdma-vm they leave TCP for verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// `loopback`, if nothing is said.
    Loopback,
    /// `one-host`: at one address, which a device has.
    OneHost,
    /// `two-hosts`: in two network namespaces with a device each.
    TwoHosts,
}

impl Network {
    /// What the environment asks for.
    ///
    /// # Errors
    /// If it asks for none of these.
    pub fn of_environment() -> Result<Self> {
        match std::env::var("THALLUS_TEST_NETWORK").as_deref() {
            Err(_) | Ok("loopback") => Ok(Self::Loopback),
            Ok("one-host") => Ok(Self::OneHost),
            Ok("two-hosts") => Ok(Self::TwoHosts),
            Ok(other) => bail!("THALLUS_TEST_NETWORK={other}: loopback, one-host or two-hosts"),
        }
    }

    /// What connections are to leave TCP for.
    pub fn fabric(self) -> &'static str {
        if self == Self::Loopback { "shm" } else { "verbs" }
    }

    fn host(self, left: bool) -> Option<&'static str> {
        (self == Self::TwoHosts).then_some(if left { "a" } else { "b" })
    }

    fn addresses(self, left: bool) -> Option<[&'static str; 2]> {
        match (self, left) {
            (Self::Loopback, _) => None,
            (Self::OneHost, _) => Some(["10.0.0.1"; 2]),
            (Self::TwoHosts, true) => Some(["10.0.0.1", "10.0.0.2"]),
            (Self::TwoHosts, false) => Some(["10.0.0.2", "10.0.0.1"]),
        }
    }
}

/// What one side left.
#[derive(Clone, Debug)]
pub struct Report {
    /// How its process ended.
    pub status: ExitStatus,
    /// Its transcript.
    pub transcript: String,
    /// Its standard error: what a failed assertion said.
    pub stderr: String,
    /// Its counters, if it had the library.
    pub stats: Stats,
}

impl Report {
    /// How its process ended.
    pub fn end(&self) -> End {
        self.status.signal().map_or_else(|| End::Exit(self.status.code().unwrap_or(-1)), End::Signal)
    }
}

/// What both sides left.
#[derive(Clone, Debug)]
pub struct Run {
    /// The left and the right side.
    pub sides: [Report; 2],
    /// Why the run was cut short, with the state of the processes that hung.
    pub overdue: Option<String>,
}

/// Runs both sides of a behaviour, in processes of `program`.
///
/// # Errors
/// If a process cannot be started, or leaves unreadable statistics.
pub fn run(
    program: &Path,
    name: &str,
    behaviour: &Behaviour,
    variant: Variant,
    preloaded: Preloaded,
) -> Result<Run> {
    keep_inherited_descriptors_here();
    let folder = tempfile::Builder::new().prefix("thallus-test-").tempdir()?;
    // Some sides change their user, and still write statistics.
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
    let (left, right) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .context("socketpair")?;
    let start = |left: bool, control: OwnedFd| {
        let place = Place { folder: folder.path(), left };
        place.start(program, name, behaviour, variant, preloaded.includes(left), control)
    };
    let pinned = variant.one_processor.then(OneProcessor::enter).transpose()?;
    let mut children = [start(true, left)?, start(false, right)?];
    drop(pinned);
    let overdue = wait_for_both(&mut children, variant.patience)?;
    let mut statuses = Vec::new();
    for child in &mut children {
        // Whatever a side leaves running would disturb the tests that follow.
        end_group(child.id());
        statuses.push(child.wait()?);
    }
    let report = |left: bool| -> Result<Report> {
        let place = Place { folder: folder.path(), left };
        Ok(Report {
            status: statuses[usize::from(!left)],
            transcript: place.text("transcript")?,
            stderr: place.text("stderr")?,
            stats: read_stats(&place.file("stats"))?,
        })
    };
    Ok(Run { sides: [report(true)?, report(false)?], overdue })
}

/// While it lives, this thread, and each process that it starts for good, has one of the processors.
struct OneProcessor {
    before: CpuSet,
}

impl OneProcessor {
    fn enter() -> Result<Self> {
        static TURN: AtomicUsize = AtomicUsize::new(0);
        let before = sched_getaffinity(None).context("sched_getaffinity")?;
        let processors: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| before.is_set(cpu)).collect();
        let mut one = CpuSet::new();
        one.set(processors[TURN.fetch_add(1, Ordering::Relaxed) % processors.len()]);
        sched_setaffinity(None, &one).context("sched_setaffinity")?;
        Ok(Self { before })
    }
}

impl Drop for OneProcessor {
    fn drop(&mut self) {
        // They were allowed a moment ago.
        let _ = sched_setaffinity(None, &self.before);
    }
}

/// A behaviour's descriptors start at 3, whatever the shell that runs the tests has open.
pub(crate) fn keep_inherited_descriptors_here() {
    static INHERITED: Once = Once::new();
    INHERITED.call_once(|| {
        quietly(|| {
            for fd in open_descriptors(Fd::MAX).into_iter().filter(|&fd| fd > 2) {
                // The one that listed them is gone by now.
                let _ = set_close_on_exec(fd, true);
            }
        });
    });
}

struct Place<'a> {
    folder: &'a Path,
    left: bool,
}

impl Place<'_> {
    fn file(&self, name: &str) -> std::path::PathBuf {
        self.folder.join(format!("{}-{name}", if self.left { "left" } else { "right" }))
    }

    fn text(&self, name: &str) -> Result<String> {
        Ok(String::from_utf8_lossy(&fs::read(self.file(name))?).into_owned())
    }

    fn create(&self, name: &str) -> Result<File> {
        Ok(OpenOptions::new().create(true).append(true).open(self.file(name))?)
    }

    fn start(
        &self,
        program: &Path,
        name: &str,
        behaviour: &Behaviour,
        variant: Variant,
        preloaded: bool,
        control: OwnedFd,
    ) -> Result<Child> {
        let stats = self.file("stats");
        fs::create_dir(&stats)?;
        fs::set_permissions(&stats, fs::Permissions::from_mode(0o777))?;
        let listens = self.left != variant.swapped;
        let network = Network::of_environment()?;
        let mut command = Command::new("env");
        if let Some(host) = network.host(self.left) {
            command = Command::new("on");
            command.args([host, "env"]);
        }
        command.arg("-i").args(["PATH=/usr/bin:/bin", "RUST_BACKTRACE=0"]);
        if let Some([own, other]) = network.addresses(self.left) {
            command.arg(format!("THALLUS_TEST_OWN={own}")).arg(format!("THALLUS_TEST_OTHER={other}"));
        }
        if preloaded {
            let mut set = |name: &str, value: &OsStr| {
                let mut assignment = OsString::from(name);
                assignment.push("=");
                assignment.push(value);
                command.arg(assignment);
            };
            set("LD_PRELOAD", library()?.as_os_str());
            set("THALLUS_UPGRADE_AFTER", variant.upgrade_after.to_string().as_ref());
            if self.left || !behaviour.right_is_uncounted {
                set("THALLUS_STATS", stats.as_os_str());
            }
            if network != Network::Loopback {
                set("THALLUS_FABRIC", "verbs".as_ref());
                set("THALLUS_PEERS", "10.0.0.0/24".as_ref());
                if let Some(order) = variant.orders[usize::from(!self.left)] {
                    set("THALLUS_RDMA_ORDER", order.as_ref());
                }
            } else if variant.off {
                set("THALLUS_FABRIC", "off".as_ref());
            } else if variant.named {
                set("THALLUS_FABRIC", "verbs".as_ref());
                set("THALLUS_PEERS", "0.0.0.0/0,::/0".as_ref());
            }
            for (name, value) in behaviour.environment {
                set(name, value.as_ref());
            }
            if let Some(level) = std::env::var_os("THALLUS_TEST_LOG") {
                set("THALLUS_LOG", &level);
            }
        }
        command
            .arg(program)
            .arg(name)
            .arg(if self.left { "left" } else { "right" })
            .arg(if listens { "listens" } else { "connects" })
            .arg(variant.family.name())
            .arg(variant.rounds.to_string())
            .current_dir("/")
            .stdin(Stdio::from(control))
            .stdout(self.create("transcript")?)
            .stderr(self.create("stderr")?)
            .process_group(0);
        command.spawn().with_context(|| program.display().to_string())
    }
}

/// Waits for both processes. Past the deadline: what they were doing; the caller kills them.
fn wait_for_both(children: &mut [Child; 2], patience: Duration) -> Result<Option<String>> {
    let end = Instant::now() + patience;
    for child in children.iter() {
        if !wait_until(child, end)? {
            let members = children.iter().flat_map(|child| group_members(child.id()));
            let reports: String = members.map(report).collect();
            return Ok(Some(format!("not done within {patience:?}\n{reports}")));
        }
    }
    Ok(None)
}

/// Waits for a process until `end`; whether it has ended.
pub(super) fn wait_until(child: &Child, end: Instant) -> Result<bool> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("a pid")?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).context("pidfd_open")?;
    let left = end.saturating_duration_since(Instant::now());
    let timeout = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
    let mut polled = [PollFd::new(&pidfd, PollFlags::IN)];
    Ok(poll(&mut polled, Some(&timeout)).context("poll")? > 0)
}

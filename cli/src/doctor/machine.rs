//! The library, the kernel, the container if there is one, and the limits of this process.

use std::env;
use std::fs;
use std::path::Path;

use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use thallus_transport::segment::SEGMENT_BYTES;

use super::sheet::Sheet;
use super::{Problem, bytes};
use crate::{elf, library};

/// `libthallus_shim.so`.
#[derive(Debug, Serialize)]
pub(super) struct Library {
    /// What is not UTF-8 in it is replaced: JSON has no bytes.
    path: Option<String>,
    version: Option<String>,
    /// The version of this command.
    command_version: &'static str,
    /// Whether `thallus run` can preload it.
    pub(super) usable: bool,
}

/// Looks for the library where `thallus run` does.
pub(super) fn library(problems: &mut Vec<Problem>) -> Library {
    let mut complain = |text: String, remedy: &str| problems.push(Problem::new("library", text, remedy));
    let command_version = env!("CARGO_PKG_VERSION");
    let executable = env::current_exe();
    let Some(path) = executable.as_ref().ok().and_then(|executable| library::beside(executable)) else {
        match executable {
            Ok(executable) => complain(
                format!("{} is missing: looked in {}", library::NAME, library::places(&executable)),
                "install it into one of these folders",
            ),
            Err(error) => complain(
                format!("can't tell where this executable is, and so where {} is: {error}", library::NAME),
                "mount -t proc proc /proc",
            ),
        }
        return Library { path: None, version: None, command_version, usable: false };
    };
    let version = fs::read(&path).ok().and_then(|bytes| elf::version(&bytes));
    let mut usable = true;
    if let Some(character) = library::unusable_character(&path) {
        usable = false;
        complain(
            format!("its path has {character}, which LD_PRELOAD can't express"),
            "install it under another path",
        );
    }
    match &version {
        Some(version) if version == command_version => {}
        Some(version) => complain(
            format!("its version is {version}, this command's {command_version}"),
            "install both from one build: connections leave TCP only between ends of one build",
        ),
        None => {
            usable = false;
            complain("it bears no version: it is no Thallus library, or damaged".into(), "install it anew");
        }
    }
    let path = Some(path.to_string_lossy().into_owned());
    Library { path, version, command_version, usable }
}

impl Library {
    pub(super) fn show(&self, sheet: &mut Sheet) {
        sheet.fact("file", self.path.as_deref().unwrap_or("none"));
        sheet.fact("version", self.version.as_deref().unwrap_or("unknown"));
    }
}

/// What this process runs on.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    kernel: String,
    architecture: String,
    /// What tells that this is a container; empty if nothing does.
    container_hints: Vec<String>,
    /// Whether the PID namespace is the kernel's first one; null if that can't be known.
    first_pid_namespace: Option<bool>,
    /// The cgroup of the memory controller, as this process sees it.
    cgroup: Option<String>,
    /// Smallest limit on the way from that cgroup to the root; null for none.
    memory_limit_bytes: Option<u64>,
    /// Smallest quota on that way, in processors; null for none.
    cpu_quota: Option<f64>,
    /// List such as 0-3,8.
    cpus_allowed: String,
}

/// Looks at the machine.
pub(super) fn look(problems: &mut Vec<Problem>) -> Machine {
    let system = rustix::system::uname();
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mounts = Path::new("/sys/fs/cgroup");
    let memory_limit_bytes = smallest_memory_limit(mounts, &cgroups);
    // A segment takes 20 KiB, the table of descriptors what is used of it.
    if memory_limit_bytes.is_some_and(|limit| limit < 64 << 20) {
        problems.push(Problem::new(
            "machine",
            "the cgroup's memory limit leaves little room: each busy direction of a connection may take 10.7 MiB",
            "raise it (docker run --memory, systemd MemoryMax=), or lower THALLUS_RING",
        ));
    }
    Machine {
        kernel: system.release().to_string_lossy().into_owned(),
        architecture: system.machine().to_string_lossy().into_owned(),
        container_hints: container_hints(),
        first_pid_namespace: first_pid_namespace(),
        cgroup: path_of(&cgroups, "memory").map(|(_, path)| path.to_owned()),
        memory_limit_bytes,
        cpu_quota: smallest_quota(mounts, &cgroups),
        cpus_allowed: status_line("Cpus_allowed_list").unwrap_or_default(),
    }
}

fn container_hints() -> Vec<String> {
    let mut hints: Vec<String> = ["/.dockerenv", "/run/.containerenv", "/run/systemd/container"]
        .into_iter()
        .filter(|path| Path::new(path).exists())
        .map(|path| format!("{path} exists"))
        .collect();
    let cgroups = fs::read_to_string("/proc/1/cgroup").unwrap_or_default();
    let ordinary = |path: &str| path == "/" || path.starts_with("/init");
    let strange = cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2)).find(|path| !ordinary(path));
    hints.extend(strange.map(|path| format!("process 1 is in cgroup {path}")));
    hints
}

/// The first PID namespace has a fixed number (`PROC_PID_INIT_INO` in linux/proc_ns.h).
fn first_pid_namespace() -> Option<bool> {
    let link = fs::read_link("/proc/self/ns/pid").ok()?;
    Some(link.to_str()? == "pid:[4026531836]")
}

fn status_line(name: &str) -> Option<String> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(value.trim().to_owned())
}

/// Of the hierarchy of control groups that a controller is in. A host may have both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cgroups {
    /// One for each controller, or a few.
    First,
    Second,
}

/// The path in `/proc/self/cgroup` for a controller: of version 1 if it is mounted there, else of version 2
/// (cgroups(7)).
fn path_of<'text>(cgroups: &'text str, controller: &str) -> Option<(Cgroups, &'text str)> {
    let rows = || {
        cgroups.lines().filter_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            Some((fields.next()?, fields.next()?))
        })
    };
    let first = rows().find(|(controllers, _)| controllers.split(',').any(|name| name == controller));
    let second = || rows().find(|(controllers, _)| controllers.is_empty());
    let first = first.map(|(_, path)| (Cgroups::First, path));
    first.or_else(|| second().map(|(_, path)| (Cgroups::Second, path)))
}

/// The contents of a file in the controller's cgroup and in each above it.
fn up_the_tree(mounts: &Path, cgroups: &str, controller: &str, file: &str) -> Vec<String> {
    let Some((version, path)) = path_of(cgroups, controller) else { return Vec::new() };
    let mounts = match version {
        Cgroups::First => vec![mounts.join(controller)],
        // Beside version 1 it has a folder of its own.
        Cgroups::Second => vec![mounts.to_owned(), mounts.join("unified")],
    };
    // A path with .. lies outside of what this namespace sees.
    let path = Path::new(path.trim_start_matches('/'));
    let folders = mounts.iter().flat_map(|mount| path.ancestors().map(move |path| mount.join(path)));
    folders.filter_map(|folder| fs::read_to_string(folder.join(file)).ok()).collect()
}

fn smallest_memory_limit(mounts: &Path, cgroups: &str) -> Option<u64> {
    // Version 1 says "none" as the largest multiple of a page.
    const NONE: u64 = 1 << 62;
    ["memory.max", "memory.limit_in_bytes"]
        .into_iter()
        .flat_map(|file| up_the_tree(mounts, cgroups, "memory", file))
        .filter_map(|text| text.trim().parse().ok())
        .filter(|&limit| limit < NONE)
        .min()
}

fn smallest_quota(mounts: &Path, cgroups: &str) -> Option<f64> {
    let read = |file| up_the_tree(mounts, cgroups, "cpu", file);
    let (second, first, periods) = (read("cpu.max"), read("cpu.cfs_quota_us"), read("cpu.cfs_period_us"));
    let first = first.iter().zip(&periods).map(|(quota, period)| format!("{} {period}", quota.trim()));
    second.into_iter().chain(first).filter_map(|text| quota(&text)).reduce(f64::min)
}

/// `cpu.max`: microseconds, or max, in a period of microseconds. In processors.
fn quota(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    let quota: f64 = quota.parse().ok().filter(|&quota| quota > 0.0)?;
    let period: f64 = period.trim().parse().ok().filter(|&period| period > 0.0)?;
    Some(quota / period)
}

impl Machine {
    pub(super) fn show(&self, sheet: &mut Sheet) {
        sheet.fact("kernel", format!("{} {}", self.kernel, self.architecture));
        let hints = if self.container_hints.is_empty() {
            "nothing tells of one".to_owned()
        } else {
            self.container_hints.join("; ")
        };
        sheet.fact("container", hints);
        let namespace = match self.first_pid_namespace {
            Some(true) => "the first",
            Some(false) => "not the first",
            None => "unknown",
        };
        sheet.fact("PID namespace", namespace);
        sheet.fact("cgroup", self.cgroup.as_deref().unwrap_or("unknown"));
        sheet.fact("memory limit", self.memory_limit_bytes.map_or("none".to_owned(), bytes));
        let quota = self.cpu_quota.map_or("none".to_owned(), |quota| format!("{quota} processors"));
        sheet.fact("processor quota", quota);
        sheet.fact("processors", &*self.cpus_allowed);
    }
}

/// A soft and a hard limit; null for none.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Limit {
    pub(super) soft: Option<u64>,
    hard: Option<u64>,
}

impl Limit {
    fn of(resource: Resource) -> Self {
        let limit = getrlimit(resource);
        Self { soft: limit.current, hard: limit.maximum }
    }

    fn below(self, needed: u64) -> bool {
        self.soft.is_some_and(|soft| soft < needed)
    }

    fn text(self, show: impl Fn(u64) -> String) -> String {
        let [soft, hard] = [self.soft, self.hard].map(|limit| limit.map_or("none".to_owned(), &show));
        if soft == hard { soft } else { format!("{soft}, may be raised to {hard}") }
    }
}

/// The limits that matter, of this process (getrlimit(2)). Open files is a count, the rest are bytes.
#[derive(Debug, Serialize)]
pub(super) struct Limits {
    open_files: Limit,
    file_size: Limit,
    address_space: Limit,
    pub(super) locked_memory: Limit,
}

/// Looks at the limits.
pub(super) fn limits(problems: &mut Vec<Problem>) -> Limits {
    let limits = Limits {
        open_files: Limit::of(Resource::Nofile),
        file_size: Limit::of(Resource::Fsize),
        address_space: Limit::of(Resource::As),
        locked_memory: Limit::of(Resource::Memlock),
    };
    let segment = SEGMENT_BYTES as u64;
    if limits.file_size.below(segment) {
        problems.push(Problem::new(
            "limits",
            format!(
                "RLIMIT_FSIZE is less than the {} of a connection's (sparse) memory: no-memory",
                bytes(segment)
            ),
            "ulimit -f unlimited, systemd LimitFSIZE=infinity, docker run --ulimit fsize=-1",
        ));
    }
    // The library, its table, and the program besides.
    if limits.address_space.below(segment + (64 << 20)) {
        problems.push(Problem::new(
            "limits",
            format!(
                "RLIMIT_AS leaves no room for the {} that each connection maps: no-memory",
                bytes(segment)
            ),
            "ulimit -v unlimited, systemd LimitAS=infinity",
        ));
    }
    if limits.open_files.below(64) {
        problems.push(Problem::new(
            "limits",
            "RLIMIT_NOFILE is very low, and a connection that looks for its peer takes one or two descriptors more: no-fds",
            "ulimit -n 65536, systemd LimitNOFILE=65536, docker run --ulimit nofile=65536",
        ));
    }
    limits
}

impl Limits {
    pub(super) fn show(&self, sheet: &mut Sheet) {
        sheet.fact("open files", self.open_files.text(|count| count.to_string()));
        sheet.fact("file size", self.file_size.text(bytes));
        sheet.fact("address space", self.address_space.text(bytes));
        sheet.fact("locked memory", self.locked_memory.text(bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIXED: &str = "12:memory:/docker/a\n5:cpu,cpuacct:/docker/b\n0::/user.slice\n";

    #[test]
    fn a_controller_of_version_1_has_a_path_of_its_own() {
        use Cgroups::{First, Second};
        assert_eq!(path_of(MIXED, "memory"), Some((First, "/docker/a")));
        assert_eq!(path_of(MIXED, "cpu"), Some((First, "/docker/b")));
        assert_eq!(path_of(MIXED, "pids"), Some((Second, "/user.slice")));
        assert_eq!(path_of("0::/\n", "memory"), Some((Second, "/")));
        assert_eq!(path_of("", "memory"), None);
    }

    #[test]
    fn limits_are_found_where_their_version_is_mounted() {
        let of = |files: &[(&str, &str)], cgroups: &str| {
            let mounts = tempfile::tempdir().unwrap();
            for (file, text) in files {
                let file = mounts.path().join(file);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, text).unwrap();
            }
            (smallest_memory_limit(mounts.path(), cgroups), smallest_quota(mounts.path(), cgroups))
        };
        // Both versions have the same path.
        let both = "4:memory:/a/b\n3:cpu,cpuacct:/a/b\n0::/a/b\n";
        let first = [
            ("memory/a/b/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/a/memory.limit_in_bytes", "1000\n"),
            ("cpu/a/b/cpu.cfs_quota_us", "50000\n"),
            ("cpu/a/b/cpu.cfs_period_us", "100000\n"),
        ];
        assert_eq!(of(&first, both), (Some(1000), Some(0.5)));
        let second =
            [("a/memory.max", "max\n"), ("a/b/memory.max", "3000\n"), ("a/cpu.max", "200000 100000\n")];
        assert_eq!(of(&second, "0::/a/b\n"), (Some(3000), Some(2.0)));
        let unified = [("unified/a/b/memory.max", "2000\n"), ("cpu/cpu.cfs_quota_us", "-1\n")];
        assert_eq!(of(&unified, "3:cpu,cpuacct:/\n0::/a/b\n"), (Some(2000), None));
    }

    #[test]
    fn a_quota_is_a_number_of_processors() {
        assert_eq!(quota("max 100000\n"), None);
        assert_eq!(quota("150000 100000\n"), Some(1.5));
        assert_eq!(quota("-1 100000"), None);
    }
}

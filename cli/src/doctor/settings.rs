//! The settings in force: what each variable or line of the configuration says, and what the library makes of it.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, absolute};

use rustix::fs::Access;
use serde::Serialize;
use thallus_transport::configuration::Configuration;
use thallus_transport::environment::{self, CONFIG, Complaints, Given, Level, Log};
use thallus_transport::ring::class_size;
use thallus_transport::settings::{IoUring, Order, Settings};
use thallus_transport::spin::LONGEST;

use super::sheet::Sheet;
use super::{Problem, bytes};
use crate::run::check_log;

/// Every variable that the library reads, in the order of the README.
const NAMES: [&str; 19] = [
    CONFIG,
    "THALLUS",
    "THALLUS_FABRIC",
    "THALLUS_PEERS",
    "THALLUS_PEERS_FILE",
    "THALLUS_KEY_FILE",
    "THALLUS_RDMA_TIMEOUT",
    "THALLUS_RDMA_RETRY",
    "THALLUS_RDMA_SL",
    "THALLUS_RDMA_ORDER",
    "THALLUS_PORTS",
    "THALLUS_UNIX",
    "THALLUS_UPGRADE_AFTER",
    "THALLUS_SPIN_US",
    "THALLUS_RING",
    "THALLUS_LEND",
    "THALLUS_IO_URING",
    "THALLUS_STATS",
    "THALLUS_LOG",
];

/// All settings.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(super) struct InForce {
    /// Of the configuration.
    #[serde(skip)]
    path: String,
    list: Vec<Setting>,
}

#[derive(Debug, Serialize)]
struct Setting {
    name: &'static str,
    /// As the environment or the configuration has it; null if neither does.
    given: Option<String>,
    /// The line of the configuration that has it, if the environment has not.
    line: Option<usize>,
    /// What the library uses.
    used: String,
    /// Where that comes from.
    source: Source,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Source {
    /// Nothing was given.
    Default,
    /// What was given.
    Given,
    /// What was given can't be used.
    Wrong,
    /// What was given is not looked at, because of another setting.
    Unused,
}

/// The configuration file.
pub(super) struct File {
    /// Its path; empty if none is named.
    path: String,
    read: Configuration,
    /// What is wrong with it.
    complaints: Vec<String>,
    usable: bool,
}

/// The configuration at `path`, or where the environment says.
pub(super) fn configuration(path: Option<&str>) -> File {
    let is_chosen = path.is_some();
    let named = || env::var_os(CONFIG).map(|path| path.to_string_lossy().into_owned());
    let path = path.map(str::to_owned).or_else(named).unwrap_or_default();
    let none =
        || File { path: path.clone(), read: Configuration::default(), complaints: Vec::new(), usable: true };
    if path.is_empty() {
        return none();
    }
    let read = match environment::not_text(CONFIG).filter(|_| !is_chosen) {
        Some(_) => Err(io::Error::other("not UTF-8")),
        None => environment::read_configuration(&path),
    };
    match read {
        Ok(read) => {
            let complaints = environment::check(&path, &read).0.iter().map(ToString::to_string).collect();
            File { read, complaints, ..none() }
        }
        Err(error) => {
            let complaint = format!("{CONFIG}={path}: {error}; the library goes on without it");
            File { complaints: vec![complaint], usable: false, ..none() }
        }
    }
}

impl File {
    /// What is asked for in a process of the program at `program`.
    pub(super) fn given(&self, program: &OsStr) -> Given {
        match self.usable {
            true => Given::of(self.path.clone(), &self.read, program.as_bytes()),
            false => Given::without(self.path.clone()),
        }
    }
}

/// What has been asked for.
pub(super) struct Wanted<'a> {
    pub(super) given: &'a Given,
    pub(super) configuration: &'a File,
    /// About that.
    pub(super) complaints: &'a Complaints,
}

impl Wanted<'_> {
    /// What the library would use in this environment.
    pub(super) fn in_force(
        &self,
        chosen: &Settings,
        log: Option<&Log>,
        problems: &mut Vec<Problem>,
    ) -> InForce {
        let mut complain = |text: String, remedy: &str| problems.push(Problem::new("settings", text, remedy));
        // Those of lines are among those of the whole file.
        for complaint in self.complaints.0.iter().filter(|complaint| complaint.place.is_none()) {
            complain(complaint.to_string(), "correct it, or unset it");
        }
        for complaint in &self.configuration.complaints {
            complain(complaint.clone(), "correct it: docs/configuration.md");
        }
        let mut list: Vec<_> = NAMES.into_iter().map(|name| self.setting(name, chosen, log)).collect();
        for setting in &mut list {
            let Setting { name, given: Some(given), source, .. } = setting else { continue };
            // Its bytes, for the library takes any path.
            let folder = || env::var_os("THALLUS_STATS").unwrap_or_default();
            if *name == "THALLUS_STATS"
                && *source == Source::Given
                && rustix::fs::access(Path::new(&folder()).join("."), Access::WRITE_OK).is_err()
            {
                *source = Source::Wrong;
                complain(
                    format!("THALLUS_STATS={given}: no folder that can be written to; nothing is written"),
                    "create the folder, or use thallus run --stats",
                );
            }
            if *name == "THALLUS_LOG"
                && let Some(error) = log.and_then(unwritable)
            {
                *source = Source::Wrong;
                complain(
                    format!("THALLUS_LOG={given}: {error}; nothing is logged"),
                    "name a file that can be written to, in a folder that is there",
                );
            }
        }
        for (name, _) in env::vars_os() {
            let name = name.to_string_lossy();
            if name.starts_with("THALLUS") && !NAMES.contains(&&*name) {
                complain(
                    format!("{name}: the library knows no such variable"),
                    "correct its name, or unset it",
                );
            }
        }
        InForce { path: self.configuration.path.clone(), list }
    }

    fn setting(&self, name: &'static str, chosen: &Settings, log: Option<&Log>) -> Setting {
        let variable = env::var_os(name);
        let unreadable =
            name != "THALLUS_STATS" && variable.as_ref().is_some_and(|value| value.to_str().is_none());
        let value = self.given.value(name);
        let line = value.as_ref().and_then(|value| value.line.as_ref()).map(|entry| entry.line);
        let given = match (name, value) {
            (CONFIG, _) if !self.configuration.path.is_empty() => Some(self.configuration.path.clone()),
            (_, Some(value)) => Some(value.text),
            (_, None) => variable.map(|value| value.to_string_lossy().into_owned()),
        };
        let wrong = match name {
            CONFIG => !self.configuration.usable,
            _ => unreadable || self.complaints.0.iter().any(|complaint| complaint.name == name),
        };
        let source = match &given {
            None => Source::Default,
            Some(_) if wrong => Source::Wrong,
            Some(value) if value.is_empty() => Source::Default,
            Some(_) if self.is_unused(name, chosen) => Source::Unused,
            Some(_) => Source::Given,
        };
        Setting { name, used: self.used(name, chosen, log), given, line, source }
    }

    /// Whether other settings keep the library from looking at this one.
    fn is_unused(&self, name: &str, chosen: &Settings) -> bool {
        let fabric = self.given.value("THALLUS_FABRIC");
        let verbs = !fabric.is_some_and(|fabric| matches!(fabric.text.as_str(), "shm" | "off" | "tcp"));
        match name {
            CONFIG | "THALLUS" | "THALLUS_FABRIC" | "THALLUS_LOG" => false,
            _ if self.given.is_off() => true,
            "THALLUS_PEERS" | "THALLUS_PEERS_FILE" | "THALLUS_KEY_FILE" => !verbs,
            _ if name.starts_with("THALLUS_RDMA_") => chosen.verbs.peers.is_empty(),
            _ => false,
        }
    }

    fn used(&self, name: &str, chosen: &Settings, log: Option<&Log>) -> String {
        let verbs = &chosen.verbs;
        match name {
            CONFIG if self.configuration.path.is_empty() || !self.configuration.usable => "none".into(),
            CONFIG => self.configuration.path.clone(),
            "THALLUS" => if self.given.is_off() { "off" } else { "on" }.into(),
            "THALLUS_FABRIC" => match (
                chosen.shm,
                self.given.value("THALLUS_FABRIC").as_ref().map(|value| value.text.as_str()),
            ) {
                (true, Some("shm")) => "shm",
                (true, _) => "auto",
                (false, Some("verbs")) => "verbs",
                (false, _) => "off",
            }
            .into(),
            // With those of the file.
            "THALLUS_PEERS" => {
                let rules: Vec<_> = verbs.peers.iter().map(ToString::to_string).collect();
                if rules.is_empty() { "none".into() } else { rules.join(",") }
            }
            "THALLUS_PEERS_FILE" => self.given.value(name).map_or("none".into(), |value| value.text),
            "THALLUS_STATS" => env::var_os(name)
                .filter(|folder| !folder.is_empty())
                .map_or("none".into(), |folder| folder.to_string_lossy().into_owned()),
            "THALLUS_KEY_FILE" => {
                verbs.key.as_ref().map_or("none".into(), |key| format!("a key of {} bytes", key.len()))
            }
            "THALLUS_RDMA_TIMEOUT" => verbs.timeout.to_string(),
            "THALLUS_RDMA_RETRY" => verbs.retries.to_string(),
            "THALLUS_RDMA_SL" => verbs.service_level.to_string(),
            "THALLUS_RDMA_ORDER" => match verbs.order {
                Order::OneWrite => "one-write".into(),
                Order::TwoWrites => "two-writes".into(),
            },
            "THALLUS_PORTS" if chosen.ports.is_empty() => "all".into(),
            "THALLUS_PORTS" => {
                let ranges = chosen.ports.iter().map(|&(first, last)| match first == last {
                    true => first.to_string(),
                    false => format!("{first}-{last}"),
                });
                ranges.collect::<Vec<_>>().join(",")
            }
            "THALLUS_UNIX" if chosen.unix.is_empty() => "off".into(),
            "THALLUS_UNIX" => chosen.unix.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
            "THALLUS_LEND" => bytes(chosen.lend_bytes),
            "THALLUS_IO_URING" => match chosen.io_uring {
                IoUring::Auto => "auto",
                IoUring::Allow => "allow",
                IoUring::Deny => "deny",
            }
            .into(),
            "THALLUS_UPGRADE_AFTER" => chosen.upgrade_after.to_string(),
            "THALLUS_SPIN_US" => u128::from(chosen.spin_ns / 1000).min(LONGEST.as_micros()).to_string(),
            "THALLUS_RING" => {
                let window = class_size(chosen.largest_class);
                let ring = verbs.rings().next().unwrap_or(0);
                format!("{}; over RDMA {}", bytes(window), bytes(ring))
            }
            _ => log.map_or("off".into(), |log| {
                let level = format!("{:?}", log.level).to_lowercase();
                log.path.as_ref().map_or(level.clone(), |path| format!("{level}:{path}"))
            }),
        }
    }
}

/// Why nothing can be logged to the file that is named, if any is.
fn unwritable(log: &Log) -> Option<String> {
    let file = log.path.as_deref().filter(|_| log.level != Level::Off)?;
    match absolute(file) {
        Ok(file) => check_log(&file).err().map(|failure| failure.to_string()),
        Err(error) => Some(error.to_string()),
    }
}

/// Without a server to ask about: what keeps every connection of this host on TCP.
pub(super) fn check_one_host(chosen: &Settings, given: &Given, problems: &mut Vec<Problem>) {
    let mut complain = |text: &str, remedy: &str| problems.push(Problem::new("settings", text, remedy));
    if given.is_off() {
        complain("THALLUS=off: the library does nothing", "unset THALLUS, or mode in the configuration");
    } else if !chosen.shm {
        complain("THALLUS_FABRIC allows no shared memory", "unset it, or THALLUS_FABRIC=auto");
    }
}

impl InForce {
    pub(super) fn show(&self, sheet: &mut Sheet) {
        for Setting { name, given, line, used, source } in &self.list {
            let given = given.as_deref().unwrap_or_default();
            let given = &*match line {
                Some(line) => format!("{}:{line}: {given}", self.path),
                None => given.to_owned(),
            };
            let value = match source {
                Source::Default => format!("{used} (default)"),
                Source::Given if given == used => used.clone(),
                Source::Given => format!("{used} (given: {given})"),
                Source::Wrong => format!("{used} (wrong: {given})"),
                Source::Unused => format!("{used} (given, but not looked at: {given})"),
            };
            sheet.fact(name, value);
        }
    }
}

//! The settings in force: what each variable says, and what the library makes of it.

use std::env;
use std::path::Path;

use rustix::fs::Access;
use serde::Serialize;
use thallus_transport::environment::{self, Complaints, Log};
use thallus_transport::ring::class_size;
use thallus_transport::settings::{Order, Settings};

use super::sheet::Sheet;
use super::{Problem, bytes};

/// Every variable that the library reads, in the order of the README.
const NAMES: [&str; 15] = [
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
    "THALLUS_UPGRADE_AFTER",
    "THALLUS_SPIN_US",
    "THALLUS_RING",
    "THALLUS_STATS",
    "THALLUS_LOG",
];

/// All settings.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(super) struct InForce {
    list: Vec<Setting>,
}

#[derive(Debug, Serialize)]
struct Setting {
    name: &'static str,
    /// As the environment has it; null if it does not.
    given: Option<String>,
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

/// What the library would use in this environment.
pub(super) fn in_force(
    chosen: &Settings,
    log: Option<&Log>,
    complaints: &Complaints,
    problems: &mut Vec<Problem>,
) -> InForce {
    for complaint in &complaints.0 {
        problems.push(Problem::new("settings", complaint.to_string(), "correct it, or unset it"));
    }
    let setting = |name| {
        let given = env::var_os(name);
        let unreadable = given.as_ref().is_some_and(|value| value.to_str().is_none());
        let given = given.map(|value| value.to_string_lossy().into_owned());
        let wrong = unreadable || complaints.0.iter().any(|complaint| complaint.name == name);
        let source = match &given {
            None => Source::Default,
            Some(_) if wrong => Source::Wrong,
            Some(value) if value.is_empty() => Source::Default,
            Some(_) if is_unused(name, chosen) => Source::Unused,
            Some(_) => Source::Given,
        };
        Setting { name, used: used(name, chosen, log), given, source }
    };
    let mut list: Vec<_> = NAMES.into_iter().map(setting).collect();
    for setting in &mut list {
        if setting.source == Source::Wrong
            && !complaints.0.iter().any(|complaint| complaint.name == setting.name)
        {
            let text = format!("{} is not UTF-8; taking the default", setting.name);
            problems.push(Problem::new("settings", text, "correct it, or unset it"));
        }
        if setting.name == "THALLUS_STATS"
            && setting.source == Source::Given
            && let Some(folder) = &setting.given
            && rustix::fs::access(Path::new(folder).join("."), Access::WRITE_OK).is_err()
        {
            setting.source = Source::Wrong;
            let text =
                format!("THALLUS_STATS={folder}: no folder that can be written to; nothing is written");
            problems.push(Problem::new("settings", text, "create the folder, or use thallus run --stats"));
        }
    }
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("THALLUS") && !NAMES.contains(&&*name) {
            let text = format!("{name}: the library knows no such variable");
            problems.push(Problem::new("settings", text, "correct its name, or unset it"));
        }
    }
    InForce { list }
}

/// Without a server to ask about: what keeps every connection of this host on TCP.
pub(super) fn check_one_host(chosen: &Settings, problems: &mut Vec<Problem>) {
    let mut complain = |text: &str, remedy: &str| problems.push(Problem::new("settings", text, remedy));
    if environment::is_off() {
        complain("THALLUS=off: the library does nothing", "unset THALLUS");
    } else if !chosen.shm {
        complain("THALLUS_FABRIC allows no shared memory", "unset it, or THALLUS_FABRIC=auto");
    }
}

/// Whether other settings keep the library from looking at this one.
fn is_unused(name: &str, chosen: &Settings) -> bool {
    let verbs = !matches!(env::var("THALLUS_FABRIC").as_deref(), Ok("shm" | "off" | "tcp"));
    match name {
        "THALLUS" | "THALLUS_FABRIC" | "THALLUS_LOG" => false,
        _ if environment::is_off() => true,
        "THALLUS_PEERS" | "THALLUS_PEERS_FILE" | "THALLUS_KEY_FILE" => !verbs,
        _ if name.starts_with("THALLUS_RDMA_") => chosen.verbs.peers.is_empty(),
        _ => false,
    }
}

fn used(name: &str, chosen: &Settings, log: Option<&Log>) -> String {
    let verbs = &chosen.verbs;
    match name {
        "THALLUS" => if environment::is_off() { "off" } else { "on" }.into(),
        "THALLUS_FABRIC" => match (chosen.shm, env::var("THALLUS_FABRIC").as_deref()) {
            (true, Ok("shm")) => "shm",
            (true, _) => "auto",
            (false, Ok("verbs")) => "verbs",
            (false, _) => "off",
        }
        .into(),
        // With those of the file.
        "THALLUS_PEERS" => {
            let rules: Vec<_> = verbs.peers.iter().map(ToString::to_string).collect();
            if rules.is_empty() { "none".into() } else { rules.join(",") }
        }
        "THALLUS_PEERS_FILE" | "THALLUS_STATS" => {
            env::var(name).ok().filter(|path| !path.is_empty()).unwrap_or("none".into())
        }
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
        "THALLUS_UPGRADE_AFTER" => chosen.upgrade_after.to_string(),
        "THALLUS_SPIN_US" => (chosen.spin_ns / 1000).to_string(),
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

impl InForce {
    pub(super) fn show(&self, sheet: &mut Sheet) {
        for Setting { name, given, used, source } in &self.list {
            let given = given.as_deref().unwrap_or_default();
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

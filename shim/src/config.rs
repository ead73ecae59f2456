//! The environment: read once, before the first connection. A wrong value is reported in the log, and the
//! default is used.

use std::env::var;
use std::sync::OnceLock;

use thallus_transport::peers::Rule;
use thallus_transport::settings::{self, Order, Settings, class_within};

use crate::log;

/// Whether the library does anything in this process. Reads the environment on the first call.
pub(crate) fn enabled() -> bool {
    static ENABLED: OnceLock<bool> = OnceLock::new();
    *ENABLED.get_or_init(start)
}

/// Whether the environment switches the library off.
pub(crate) fn is_off() -> bool {
    matches!(var("THALLUS").as_deref(), Ok("off" | "0"))
}

fn start() -> bool {
    if let Ok(text) = var("THALLUS_LOG") {
        let (name, path) =
            text.split_once(':').map_or((text.as_str(), None), |(name, path)| (name, Some(path)));
        match log::level(name) {
            Some(level) => log::start(level, path),
            None => {
                log::start(log::Level::Warn, path);
                log::warn!("THALLUS_LOG={text}: the level is off, error, warn, info or debug; taking warn");
            }
        }
    }
    let off = is_off();
    if let (Ok(other), false) = (var("THALLUS"), off)
        && !matches!(other.as_str(), "" | "on" | "1")
    {
        log::warn!("THALLUS={other}: on or off; taking on");
    }
    let mut chosen =
        Settings { place: crate::table::place, sleep: crate::cancel::SLEEP, ..Settings::default() };
    let fabric = var("THALLUS_FABRIC").unwrap_or_default();
    let (shm, verbs) = match fabric.as_str() {
        "" | "auto" => (true, true),
        "shm" => (true, false),
        "verbs" => (false, true),
        "off" | "tcp" => (false, false),
        other => {
            log::warn!("THALLUS_FABRIC={other}: auto, shm, verbs or off; taking auto");
            (true, true)
        }
    };
    chosen.shm = shm;
    if verbs {
        chosen.verbs.on_one_host = !shm;
        chosen.verbs.peers = peers();
        chosen.verbs.key = key(&mut chosen.verbs.peers);
    }
    read(
        "THALLUS_RDMA_TIMEOUT",
        "a number from 0 to 31",
        |text| number(text).filter(|&n| n < 32),
        |timeout| {
            chosen.verbs.timeout = timeout as u8;
        },
    );
    read(
        "THALLUS_RDMA_RETRY",
        "a number from 0 to 7",
        |text| number(text).filter(|&n| n < 8),
        |retries| {
            chosen.verbs.retries = retries as u8;
        },
    );
    read("THALLUS_RDMA_ORDER", "one-write or two-writes", order, |order| chosen.verbs.order = Some(order));
    read(
        "THALLUS_RDMA_SL",
        "a number from 0 to 15",
        |text| number(text).filter(|&n| n < 16),
        |level| {
            chosen.verbs.service_level = level as u8;
        },
    );
    read("THALLUS_PORTS", "a list such as 5432,8000-8100", ports, |ports| chosen.ports = ports);
    read("THALLUS_UPGRADE_AFTER", "a number of calls from 1", number, |calls| {
        chosen.upgrade_after = u32::try_from(calls).unwrap_or(u32::MAX).max(1);
    });
    read("THALLUS_SPIN_US", "a number of microseconds", number, |us| {
        chosen.spin_ns = us.saturating_mul(1000)
    });
    read("THALLUS_RING", "a size from 8K", size, |bytes| {
        chosen.largest_class = class_within(bytes);
        chosen.verbs.ring = bytes;
    });
    settings::set(chosen);
    !off
}

/// Whether some peers on other hosts are said to have this library.
pub(crate) fn has_peers() -> bool {
    enabled() && !settings::settings().verbs.peers.is_empty()
}

/// Whether the environment may name peers on other hosts.
pub(crate) fn may_have_peers() -> bool {
    ["THALLUS_PEERS", "THALLUS_PEERS_FILE"].iter().any(|name| std::env::var_os(name).is_some())
}

fn peers() -> Vec<Rule> {
    let mut rules = Vec::new();
    read("THALLUS_PEERS", "a list such as 10.0.0.0/24:5432,10.1.2.3", Rule::parse_list, |list| rules = list);
    if let Ok(path) = var("THALLUS_PEERS_FILE") {
        let read = std::fs::read_to_string(&path).map(|text| {
            let lines: Vec<_> = text.lines().map(|line| line.split('#').next().unwrap_or_default()).collect();
            Rule::parse_list(&lines.join("\n"))
        });
        match read {
            Ok(Some(list)) => rules.extend(list),
            Ok(None) => {
                log::warn!("THALLUS_PEERS_FILE={path}: not a list such as 10.0.0.0/24:5432; ignoring it")
            }
            Err(error) => log::warn!("THALLUS_PEERS_FILE={path}: {error}; ignoring it"),
        }
    }
    rules
}

/// The shared key. One that is asked for and can't be read leaves nobody to greet: unsigned greetings would be worse.
fn key(peers: &mut Vec<Rule>) -> Option<Vec<u8>> {
    let path = var("THALLUS_KEY_FILE").ok().filter(|path| !path.is_empty())?;
    match std::fs::read(&path) {
        Ok(key) if !key.trim_ascii().is_empty() => return Some(key.trim_ascii().to_vec()),
        Ok(_) => log::warn!("THALLUS_KEY_FILE={path}: it is empty; staying on TCP with other hosts"),
        Err(error) => log::warn!("THALLUS_KEY_FILE={path}: {error}; staying on TCP with other hosts"),
    }
    peers.clear();
    None
}

fn read<T>(name: &str, wanted: &str, parse: impl Fn(&str) -> Option<T>, mut apply: impl FnMut(T)) {
    let Ok(text) = var(name) else { return };
    if text.is_empty() {
        return;
    }
    match parse(&text) {
        Some(value) => apply(value),
        None => log::warn!("{name}={text}: not {wanted}; taking the default"),
    }
}

fn order(text: &str) -> Option<Order> {
    match text {
        "one-write" => Some(Order::OneWrite),
        "two-writes" => Some(Order::TwoWrites),
        _ => None,
    }
}

fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

fn size(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, factor) = match text.as_bytes().last()? {
        b'k' | b'K' => (&text[..text.len() - 1], 1 << 10),
        b'm' | b'M' => (&text[..text.len() - 1], 1 << 20),
        b'g' | b'G' => (&text[..text.len() - 1], 1 << 30),
        _ => (text, 1),
    };
    let size = digits.parse::<u64>().ok()?.checked_mul(factor)?;
    (size >= 8192).then_some(size)
}

fn ports(text: &str) -> Option<Vec<(u16, u16)>> {
    text.split(',')
        .map(|part| {
            let part = part.trim();
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let range = (first.parse().ok()?, last.parse().ok()?);
            (range.0 <= range.1).then_some(range)
        })
        .collect()
}

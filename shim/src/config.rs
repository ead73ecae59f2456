//! The environment: read once, before the first connection. A wrong value is reported in the log, and the
//! default is used.

use std::env::var;
use std::sync::OnceLock;

use thallus_transport::settings::{self, Settings, class_within};

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
    chosen.shm = match var("THALLUS_FABRIC").as_deref() {
        Err(_) | Ok("" | "auto" | "shm") => true,
        Ok("off" | "tcp") => false,
        Ok(other) => {
            log::warn!("THALLUS_FABRIC={other}: auto, shm or off; taking auto");
            true
        }
    };
    read("THALLUS_PORTS", "a list such as 5432,8000-8100", ports, |ports| chosen.ports = ports);
    read("THALLUS_UPGRADE_AFTER", "a number of calls from 1", number, |calls| {
        chosen.upgrade_after = u32::try_from(calls).unwrap_or(u32::MAX).max(1);
    });
    read("THALLUS_SPIN_US", "a number of microseconds", number, |us| {
        chosen.spin_ns = us.saturating_mul(1000)
    });
    read("THALLUS_RING", "a size from 8K", size, |bytes| chosen.largest_class = class_within(bytes));
    settings::set(chosen);
    !off
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

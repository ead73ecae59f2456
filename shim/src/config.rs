//! The environment, and the file that it may name: read once, before the first connection. A wrong value is reported in
//! the log, and the default is used.

use std::sync::atomic::{AtomicBool, Ordering};

use once_cell::race::OnceBool;
pub(crate) use thallus_transport::environment::is_off;
use thallus_transport::environment::{self, CONFIG, Complaints, Given};
use thallus_transport::settings::{self, Settings};
use thallus_transport::uninterrupted::Uninterrupted;

use crate::log;

static ENABLED: OnceBool = OnceBool::new();

/// Whether the library does anything in this process. Reads the environment on the first call.
pub(crate) fn enabled() -> bool {
    ENABLED.get_or_init(start) && !is_suspended()
}

static SUSPENDED: AtomicBool = AtomicBool::new(false);

/// From now on the library does nothing more in this process, as if it were switched off; or does so again.
pub(crate) fn suspend(yes: bool) {
    SUSPENDED.store(yes, Ordering::SeqCst);
}

/// Whether [`suspend`] has been called.
pub(crate) fn is_suspended() -> bool {
    SUSPENDED.load(Ordering::Relaxed)
}

/// Complaints about one process that are logged: a file may be something else altogether.
const MOST_COMPLAINTS: usize = 20;

/// Threads that come at the same time each read for themselves, and the settings of one count: a signal handler would wait
/// for ever for the thread that it has interrupted, and a forked child for one that is in its parent.
fn start() -> bool {
    let _uninterrupted = Uninterrupted::begin();
    let mut complaints = Complaints::default();
    let given = Given::here(&mut complaints);
    let log = environment::log(&given, &mut complaints);
    let ours = Settings {
        place: crate::table::place,
        forget: crate::table::forget_placed,
        reach: crate::table::reach,
        sleep: crate::cancel::SLEEP,
        ..Settings::default()
    };
    let first = settings::set(environment::settings(ours, &given, &mut complaints));
    if let Some(wanted) = log {
        log::start(wanted.level, wanted.path.as_deref());
    }
    if first {
        tell(&complaints);
    }
    !given.is_off()
}

fn tell(complaints: &Complaints) {
    for complaint in complaints.0.iter().take(MOST_COMPLAINTS) {
        log::warn!("{complaint}");
    }
    if let Some(more) = complaints.0.len().checked_sub(MOST_COMPLAINTS).filter(|&more| more > 0) {
        log::warn!("and {more} more: see thallus doctor");
    }
}

/// Whether some peers on other hosts are said to have this library. Before the first connection none are.
pub(crate) fn has_peers() -> bool {
    ENABLED.get() == Some(true) && !is_suspended() && !settings::settings().verbs.peers.is_empty()
}

/// Whether the environment may name peers on other hosts.
pub(crate) fn may_have_peers() -> bool {
    ["THALLUS_PEERS", "THALLUS_PEERS_FILE", CONFIG].iter().any(|name| std::env::var_os(name).is_some())
}

/// Whether this process tells what it did. A file may say otherwise, which is read for that alone if it has not been.
pub(crate) fn tells() -> bool {
    if std::env::var_os(CONFIG).is_some() { enabled() } else { !is_suspended() }
}

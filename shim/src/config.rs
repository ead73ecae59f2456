//! The environment: read once, before the first connection. A wrong value is reported in the log, and the
//! default is used.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) use thallus_transport::environment::is_off;
use thallus_transport::environment::{self, Complaints};
use thallus_transport::settings::{self, Settings};

use crate::log;

/// Whether the library does anything in this process. Reads the environment on the first call.
pub(crate) fn enabled() -> bool {
    static ENABLED: OnceLock<bool> = OnceLock::new();
    *ENABLED.get_or_init(start) && !is_suspended()
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

fn start() -> bool {
    let mut complaints = Complaints::default();
    if let Some(wanted) = environment::log(&mut complaints) {
        log::start(wanted.level, wanted.path.as_deref());
    }
    let ours = Settings {
        place: crate::table::place,
        forget: crate::table::forget_placed,
        sleep: crate::cancel::SLEEP,
        ..Settings::default()
    };
    settings::set(environment::settings(ours, &mut complaints));
    for complaint in complaints.0 {
        log::warn!("{complaint}");
    }
    !is_off()
}

/// Whether some peers on other hosts are said to have this library.
pub(crate) fn has_peers() -> bool {
    enabled() && !settings::settings().verbs.peers.is_empty()
}

/// Whether the environment may name peers on other hosts.
pub(crate) fn may_have_peers() -> bool {
    ["THALLUS_PEERS", "THALLUS_PEERS_FILE"].iter().any(|name| std::env::var_os(name).is_some())
}

//! How long somebody is waited for.

use std::time::{Duration, Instant};

/// When no later time can be told: years.
const LONGEST: Duration = Duration::from_secs(1 << 30);

/// The end of a time that begins now.
pub(crate) fn after(patience: Duration) -> Instant {
    Instant::now() + patience.min(LONGEST)
}

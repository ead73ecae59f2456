//! Rows, bytes and rate while a result comes, if standard error is a terminal.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressStyle};

pub(crate) struct Progress(Option<ProgressBar>);

impl Progress {
    pub(crate) fn new() -> Self {
        Self(std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        }))
    }

    pub(crate) fn show(&self, rows: u64, bytes: u64, started: Instant) {
        if let Some(bar) = &self.0 {
            let rate = bytes as f64 / started.elapsed().as_secs_f64().max(1e-6);
            bar.set_message(format!(
                "{} rows, {}, {}/s",
                HumanCount(rows),
                HumanBytes(bytes),
                HumanBytes(rate as u64)
            ));
        }
    }

    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Progress {
    /// Also after an error, whose message would end up behind the bar.
    fn drop(&mut self) {
        self.finish();
    }
}

//! Ctrl-C: the server is told, and what it still sends is awaited. A second Ctrl-C ends the program at once. SIGTERM is the same, and
//! so is SIGHUP unless it is ignored.

use std::net::{Shutdown, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use thallus_columnar::scan::{Client, CursorId, Frame};
use thallus_columnar::write_all_vectored;
use tokio::sync::Notify;

/// What the program and the signals' thread share.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt {
    /// The sending half of the connection.
    sender: Arc<Mutex<Sender>>,
    /// A file without its name yet, which must not be left behind. Locked while it is made or named.
    unfinished: Arc<Mutex<Option<PathBuf>>>,
}

#[derive(Debug, Default)]
pub(crate) struct Sender {
    pub(crate) books: Client,
    pub(crate) stream: Option<TcpStream>,
    pub(crate) cursor: Option<CursorId>,
    pub(crate) happened: bool,
    /// Wakes who waits in another way than by reading from `stream`.
    notice: Arc<Notify>,
}

impl Sender {
    pub(crate) fn send(&mut self, frame: &Frame) -> Result<()> {
        let mut stream = self.stream.as_ref().context("not connected")?;
        let bytes = frame.encode(0)?;
        write_all_vectored(&mut stream, std::iter::once(&bytes[..]))?;
        Ok(())
    }

    /// A query without a cursor can only be ended with the connection.
    fn cancel(&mut self) {
        let told = match self.cursor {
            Some(cursor) => {
                self.books.cancel(cursor).map_err(Into::into).and_then(|frame| self.send(&frame)).is_ok()
            }
            None => false,
        };
        if let (false, Some(stream)) = (told, &self.stream) {
            // It fails if the connection has ended, which is as good.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Interrupt {
    /// # Errors
    ///
    /// No thread, or no signal handler.
    pub(crate) fn install() -> Result<Self> {
        let interrupt = Self::default();
        let hangups = [SIGHUP].into_iter().filter(|_| !ignores_hangups());
        let mut signals =
            Signals::new([SIGINT, SIGTERM].into_iter().chain(hangups)).context("signal handlers")?;
        let shared = interrupt.clone();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for _ in signals.forever() {
                let mut sender = shared.sender();
                if std::mem::replace(&mut sender.happened, true) {
                    let unfinished = shared.unfinished();
                    if let Some(path) = &*unfinished {
                        // It may have gone.
                        let _ = std::fs::remove_file(path);
                    }
                    std::process::exit(crate::INTERRUPTED.into());
                }
                sender.notice.notify_one();
                sender.cancel();
            }
        })?;
        Ok(interrupt)
    }

    pub(crate) fn happened(&self) -> bool {
        self.sender().happened
    }

    pub(crate) fn notice(&self) -> Arc<Notify> {
        self.sender().notice.clone()
    }

    pub(crate) fn sender(&self) -> MutexGuard<'_, Sender> {
        self.sender.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn unfinished(&self) -> MutexGuard<'_, Option<PathBuf>> {
        self.unfinished.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As nohup has it.
fn ignores_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    // See proc_pid_status(5): signal 1 is bit 0.
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & 1 != 0))
}

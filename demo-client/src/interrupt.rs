//! Ctrl-C: the server is told, and what it still sends is awaited. A second Ctrl-C ends the program at once.

use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use thallus_columnar::scan::{Client, CursorId, Frame};
use thallus_columnar::write_all_vectored;
use tokio::sync::Notify;

/// The sending half of the connection, which the program and the signal's thread share.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt(Arc<Mutex<Sender>>);

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
        let mut signals = Signals::new([SIGINT, SIGTERM]).context("signal handlers")?;
        let shared = interrupt.clone();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for _ in signals.forever() {
                let mut sender = shared.sender();
                if std::mem::replace(&mut sender.happened, true) {
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
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

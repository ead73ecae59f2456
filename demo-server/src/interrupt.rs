//! Connections to DuckDB that another thread may interrupt at any time.
//!
//! The handle of the duckdb crate (1.10506) forgets its connection only after that has been freed (`InnerConnection::close`), so an interrupt
//! just then is one of freed memory. Here it is forgotten before, and an interrupt that is under way is waited for.

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use duckdb::{Connection, InterruptHandle};

/// A connection; until it is dropped its queries can be ended.
#[derive(Debug)]
pub(crate) struct Interruptible {
    interrupter: Arc<Interrupter>,
    connection: Connection,
}

impl From<Connection> for Interruptible {
    fn from(connection: Connection) -> Self {
        let handle = Some(connection.interrupt_handle());
        Self { interrupter: Arc::new(Interrupter(Mutex::new(handle))), connection }
    }
}

impl Deref for Interruptible {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

impl Interruptible {
    /// What interrupts it.
    pub(crate) fn interrupter(&self) -> Arc<Interrupter> {
        self.interrupter.clone()
    }
}

impl Drop for Interruptible {
    fn drop(&mut self) {
        *self.interrupter.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Ends what a connection does, if it is there.
pub(crate) struct Interrupter(Mutex<Option<Arc<InterruptHandle>>>);

impl std::fmt::Debug for Interrupter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Interrupter").finish_non_exhaustive()
    }
}

impl Interrupter {
    /// Ends the query that runs, if one does: one that begins after it knows nothing of it.
    pub(crate) fn interrupt(&self) {
        if let Some(handle) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            handle.interrupt();
        }
    }
}

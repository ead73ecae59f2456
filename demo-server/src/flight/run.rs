//! The queries of Arrow Flight's clients, as those see them who may end them.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::interrupt::Interrupter;
use crate::session::AGAIN;

/// All that run.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    all: Mutex<Numbered>,
    fewer: Condvar,
}

#[derive(Debug, Default)]
struct Numbered {
    last: u64,
    runs: HashMap<u64, Arc<Run>>,
}

/// One query, from its start to when all that it held has been dropped.
#[derive(Debug)]
pub(crate) struct Run {
    number: u64,
    interrupt: Arc<Interrupter>,
    stopped: watch::Sender<bool>,
}

impl Runs {
    pub(crate) fn begin(&self, interrupt: Arc<Interrupter>) -> Arc<Run> {
        let mut all = self.all();
        all.last += 1;
        let run = Arc::new(Run { number: all.last, interrupt, stopped: watch::Sender::new(false) });
        all.runs.insert(run.number, run.clone());
        run
    }

    pub(crate) fn end(&self, run: &Run) {
        self.all().runs.remove(&run.number);
        self.fewer.notify_all();
    }

    /// Stops a query, again and again: an interrupt is forgotten by a query that begins after it.
    pub(crate) fn stop(&self, run: &Run) {
        self.stop_while(|all| all.contains_key(&run.number).then(|| run.stop()).is_some());
    }

    pub(crate) fn stop_all(&self) {
        self.stop_while(|all| {
            all.values().for_each(|run| run.stop());
            !all.is_empty()
        });
    }

    fn stop_while(&self, stop: impl Fn(&HashMap<u64, Arc<Run>>) -> bool) {
        let mut all = self.all();
        while stop(&all.runs) {
            all = self.fewer.wait_timeout(all, AGAIN).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn all(&self) -> MutexGuard<'_, Numbered> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Run {
    fn stop(&self) {
        self.stopped.send_replace(true);
        self.interrupt.interrupt();
    }

    pub(crate) fn is_stopped(&self) -> bool {
        *self.stopped.borrow()
    }

    pub(crate) async fn stopped(&self) {
        // It fails only if the sender is gone, which is `self`.
        let _ = self.stopped.subscribe().wait_for(|stopped| *stopped).await;
    }
}

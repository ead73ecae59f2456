//! One shuffle in this process: the inboxes of its workers, and who has ended.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::inbox::{Inbox, Item};
use crate::{Cluster, Error, NodeId, WorkerId};

#[derive(Debug)]
struct State {
    /// Its halves have been handed out.
    opened: bool,
    /// Of all workers: it will send no more.
    ended: Vec<bool>,
    open_sources: usize,
    /// Halves that are in use.
    senders: usize,
    receivers: usize,
    failed: Option<Error>,
}

#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) id: u64,
    /// The first worker of this process.
    first: u32,
    pub(super) inboxes: Vec<Inbox>,
    /// By process: bytes that arrived and were not read yet.
    unread: Vec<AtomicU64>,
    /// By process: bytes that were read, and the process has not been told.
    owed: Vec<AtomicU64>,
    state: Mutex<State>,
}

/// What a frame may do wrong.
pub(super) type Fault = String;

impl Exchange {
    pub(super) fn new(id: u64, cluster: &Cluster, me: NodeId, capacity: usize) -> Self {
        let mine = cluster.workers_of(me);
        let counters = || (0..cluster.nodes()).map(|_| AtomicU64::new(0)).collect();
        let state = State {
            opened: false,
            ended: vec![false; cluster.workers()],
            open_sources: cluster.workers(),
            senders: 0,
            receivers: 0,
            failed: None,
        };
        Self {
            id,
            first: mine.start,
            inboxes: mine.map(|_| Inbox::new(cluster.workers(), capacity)).collect(),
            unread: counters(),
            owed: counters(),
            state: Mutex::new(state),
        }
    }

    /// False if it has been opened before.
    pub(super) fn open(&self) -> bool {
        let mut state = self.lock();
        if std::mem::replace(&mut state.opened, true) {
            return false;
        }
        state.senders = self.inboxes.len();
        state.receivers = self.inboxes.len();
        true
    }

    pub(super) fn inbox(&self, worker: WorkerId) -> Option<&Inbox> {
        self.inboxes.get(worker.0.checked_sub(self.first)? as usize)
    }

    /// Rows from another process. Returns the bytes of which the process should be told that they are free again.
    ///
    /// # Errors
    ///
    /// Rows of a worker that has ended, for no worker of this process, or beyond the window.
    pub(super) fn rows(&self, item: Item, target: WorkerId, window: u64) -> Result<u64, Fault> {
        let Item::Frame { source, node, memory } = &item else { unreachable!("from another process") };
        let (source, node, bytes) = (*source, *node, memory.len() as u64);
        if self.lock().ended[source.index()] {
            return Err(format!("rows of {source} after its end"));
        }
        let Some(inbox) = self.inbox(target) else { return Err(format!("rows for {target}")) };
        let before = self.unread[node.index()].fetch_add(bytes, Ordering::Relaxed);
        if before > 0 && before + bytes > window {
            return Err(format!("{bytes} bytes beyond the window"));
        }
        match inbox.add(item) {
            Ok(()) => Ok(0),
            Err(_) => Ok(self.read(node, bytes, 0)),
        }
    }

    /// So many bytes of a process have been read. Returns what it should be told, once that is `enough`.
    pub(super) fn read(&self, node: NodeId, bytes: u64, enough: u64) -> u64 {
        let owed = self.owed[node.index()].fetch_add(bytes, Ordering::Relaxed) + bytes;
        if owed < enough { 0 } else { self.settle(node) }
    }

    /// What a process should be told now.
    pub(super) fn settle(&self, node: NodeId) -> u64 {
        let owed = self.owed[node.index()].swap(0, Ordering::Relaxed);
        // Before the process can send as many again.
        self.unread[node.index()].fetch_sub(owed, Ordering::Relaxed);
        owed
    }

    /// A worker has no more rows.
    ///
    /// # Errors
    ///
    /// It had ended.
    pub(super) fn source_ended(&self, source: WorkerId) -> Result<(), Fault> {
        {
            let mut state = self.lock();
            if std::mem::replace(&mut state.ended[source.index()], true) {
                return Err(format!("a second end of {source}"));
            }
            state.open_sources -= 1;
        }
        self.inboxes.iter().for_each(Inbox::source_ended);
        Ok(())
    }

    /// False if it had failed before. What nobody will read is owed to those who have sent it: they may have to go on.
    pub(super) fn fail(&self, error: &Error) -> bool {
        let mut state = self.lock();
        if state.failed.is_some() {
            return false;
        }
        state.failed = Some(error.clone());
        drop(state);
        for item in self.inboxes.iter().flat_map(|inbox| inbox.fail(error)) {
            if let Item::Frame { node, memory, .. } = item {
                self.owed[node.index()].fetch_add(memory.len() as u64, Ordering::Relaxed);
            }
        }
        true
    }

    pub(super) fn failed(&self) -> Option<Error> {
        self.lock().failed.clone()
    }

    pub(super) fn opened(&self) -> bool {
        self.lock().opened
    }

    /// Whether some worker of the process may still send.
    pub(super) fn needs(&self, cluster: &Cluster, node: NodeId) -> bool {
        let state = self.lock();
        cluster.workers_of(node).any(|worker| !state.ended[worker as usize])
    }

    /// Returns whether it was the last.
    pub(super) fn sender_gone(&self) -> bool {
        let mut state = self.lock();
        state.senders -= 1;
        state.senders == 0
    }

    pub(super) fn receiver_gone(&self) {
        self.lock().receivers -= 1;
    }

    /// Nothing will happen in it any more.
    pub(super) fn is_over(&self) -> bool {
        let state = self.lock();
        let unused = state.opened && state.senders == 0 && state.receivers == 0;
        unused && (state.open_sources == 0 || state.failed.is_some())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics with it")
    }
}

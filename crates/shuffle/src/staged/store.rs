//! What the workers of this process have for others: blocks, until they have been fetched.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use arrow_array::RecordBatch;
use thallus_columnar::Message;

use crate::numbers::Numbers;
use crate::{Error, Result, WorkerId};

/// Shuffles that others ask for and nobody here has opened.
const UNOPENED: usize = 4096;

/// Of which it is remembered why they have failed.
const FAILURES: usize = 4096;

/// The rows of one worker for another, in the memory of the batches.
#[derive(Debug, Default)]
pub(super) struct Rows {
    /// For another process: an Arrow IPC stream.
    pub(super) messages: Vec<Message>,
    /// For this one.
    pub(super) batches: Vec<RecordBatch>,
}

pub(super) type Block = Arc<Rows>;

/// A shuffle, who sends, and who receives.
pub(super) type Name = (u64, WorkerId, WorkerId);

/// What is to be done for a block once it is complete, or never will be.
pub(super) type Then<R> = (R, Result<Block>);

#[derive(Debug)]
struct Shuffle<R> {
    /// By worker of this process: its blocks, by target; none yet; or why there won't be any.
    outcome: HashMap<WorkerId, Result<HashMap<WorkerId, Block>>>,
    /// Who waits for a worker to finish.
    waiting: Vec<(WorkerId, WorkerId, R)>,
    /// Blocks that nobody wants, of workers that have not finished.
    unwanted: HashSet<(WorkerId, WorkerId)>,
    /// Blocks that have not been fetched.
    left: usize,
    /// Workers that have not finished, and readers in use.
    halves: usize,
    opened: bool,
    /// Opened and over, but not as it should: others may ask later why.
    remembered: bool,
    failed: Option<Error>,
}

#[derive(Debug)]
struct State<R> {
    shuffles: HashMap<u64, Shuffle<R>>,
    /// Those that are over, so that nobody waits for them.
    over: Numbers,
    /// Those that are over, but not as they should, from the oldest on.
    failures: VecDeque<u64>,
    /// Workers of processes that are gone, who fetch nothing any more.
    lost: HashSet<WorkerId>,
    closed: bool,
}

/// `R` is a request from elsewhere.
#[derive(Debug)]
pub(super) struct Store<R> {
    state: Mutex<State<R>>,
    news: Condvar,
}

impl<R> Store<R> {
    pub(super) fn new() -> Self {
        let state = State {
            shuffles: HashMap::new(),
            over: Numbers::default(),
            failures: VecDeque::new(),
            lost: HashSet::new(),
            closed: false,
        };
        Self { state: Mutex::new(state), news: Condvar::new() }
    }

    /// A shuffle with `workers` in this process, of which each will have a block for each of `targets`.
    pub(super) fn open(&self, id: u64, workers: usize, targets: usize) -> Result<()> {
        let mut state = self.lock();
        if state.closed {
            return Err(Error::Closed);
        }
        if state.over.contains(id) {
            return Err(Error::Taken(format!("shuffle {id}")));
        }
        let shuffle = state.shuffle(id);
        if std::mem::replace(&mut shuffle.opened, true) {
            return Err(Error::Taken(format!("shuffle {id}")));
        }
        shuffle.halves = 2 * workers;
        shuffle.left = workers * targets;
        Ok(())
    }

    /// A worker has all its blocks, or none. Returns who waited for them.
    #[must_use]
    pub(super) fn finish(
        &self,
        id: u64,
        worker: WorkerId,
        targets: usize,
        outcome: Result<HashMap<WorkerId, Block>>,
    ) -> Vec<Then<R>> {
        let mut state = self.lock();
        if state.closed {
            return Vec::new(); // who waited is being disconnected
        }
        let mut outcome = outcome;
        let before = outcome.as_ref().map_or(0, HashMap::len);
        if let Ok(blocks) = &mut outcome {
            blocks.retain(|target, _| !state.lost.contains(target));
        }
        let shuffle = state.shuffle(id);
        if shuffle.failed.is_some() {
            return Vec::new(); // who waited has been told
        }
        match &mut outcome {
            Err(_) => shuffle.left -= targets,
            Ok(blocks) => {
                blocks.retain(|target, _| !shuffle.unwanted.contains(&(worker, *target)));
                shuffle.left -= before - blocks.len();
            }
        }
        shuffle.outcome.insert(worker, outcome);
        let waiting = std::mem::take(&mut shuffle.waiting);
        let (now, later): (Vec<_>, Vec<_>) =
            waiting.into_iter().partition(|(source, _, _)| *source == worker);
        shuffle.waiting = later;
        let then = now
            .into_iter()
            .map(|(source, target, request)| {
                let block = shuffle.block(source, target).expect("it has just been entered");
                (request, block)
            })
            .collect();
        state.tidy(id);
        self.news.notify_all();
        then
    }

    /// A block for a request from elsewhere. None: it will be answered when the worker has finished.
    pub(super) fn ask(&self, (id, source, target): Name, request: R) -> Option<Then<R>> {
        let mut state = self.lock();
        if state.closed || state.over.contains(id) {
            return Some((request, Err(Error::Closed)));
        }
        let Some(shuffle) = state.of_others(id) else {
            return Some((request, Err(Error::Cluster("too many shuffles at a time".into()))));
        };
        match shuffle.block(source, target) {
            Some(block) => Some((request, block)),
            None => {
                shuffle.waiting.push((source, target, request));
                None
            }
        }
    }

    /// Drops requests of somebody who is gone, and what is known of shuffles only by them.
    pub(super) fn forget(&self, gone: impl Fn(&R) -> bool) {
        let mut state = self.lock();
        state.shuffles.retain(|_, shuffle| {
            shuffle.waiting.retain(|(_, _, request)| !gone(request));
            shuffle.opened || !shuffle.waiting.is_empty() || !shuffle.unwanted.is_empty()
        });
    }

    /// A block for a worker of this process. Sleeps until there is one.
    pub(super) fn wait(&self, (id, source, target): Name) -> Result<Block> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return Err(Error::Closed);
            }
            if let Some(block) = state.shuffle(id).block(source, target) {
                return block;
            }
            state = self.news.wait(state).expect("nobody panics with it");
        }
    }

    /// A worker of this process can't go on: nobody gets rows of any of them. Returns who waited for some.
    #[must_use]
    pub(super) fn fail(&self, id: u64, error: &Error) -> Vec<Then<R>> {
        let mut state = self.lock();
        let Some(shuffle) = state.shuffles.get_mut(&id) else { return Vec::new() };
        shuffle.failed.get_or_insert_with(|| error.clone());
        shuffle.left = 0;
        shuffle.outcome.clear();
        let then = std::mem::take(&mut shuffle.waiting).into_iter();
        let then = then.map(|(_, _, request)| (request, Err(error.clone()))).collect();
        self.news.notify_all();
        then
    }

    /// A block has been fetched, or nobody wants it.
    pub(super) fn fetched(&self, (id, source, target): Name) {
        let mut state = self.lock();
        if state.closed || state.over.contains(id) {
            return;
        }
        let Some(shuffle) = state.of_others(id) else { return };
        match shuffle.outcome.get_mut(&source) {
            Some(Ok(blocks)) => {
                shuffle.left -= usize::from(blocks.remove(&target).is_some());
                state.tidy(id);
                self.news.notify_all();
            }
            Some(Err(_)) => {}
            None => {
                shuffle.unwanted.insert((source, target));
            }
        }
    }

    /// A process is gone, with these workers: what nobody else would fetch is dropped, now and later.
    pub(super) fn lost(&self, workers: Range<u32>) {
        let mut state = self.lock();
        state.lost.extend(workers.clone().map(WorkerId));
        for Shuffle { outcome, left, .. } in state.shuffles.values_mut() {
            for blocks in outcome.values_mut().flatten() {
                let before = blocks.len();
                blocks.retain(|target, _| !workers.contains(&target.0));
                *left -= before - blocks.len();
            }
        }
        let all: Vec<_> = state.shuffles.keys().copied().collect();
        all.into_iter().for_each(|id| state.tidy(id));
        self.news.notify_all();
    }

    /// A worker has dropped one of its halves.
    pub(super) fn half_gone(&self, id: u64) {
        let mut state = self.lock();
        if let Some(shuffle) = state.shuffles.get_mut(&id) {
            shuffle.halves -= 1;
            state.tidy(id);
            self.news.notify_all();
        }
    }

    /// Waits until all shuffles that were opened are over, or until `deadline`; then nothing is answered any more.
    pub(super) fn close(&self, deadline: Instant) -> bool {
        let mut state = self.lock();
        let all = loop {
            if !state.shuffles.values().any(|shuffle| shuffle.opened && !shuffle.remembered) {
                break true;
            }
            let Some(rest) = deadline.checked_duration_since(Instant::now()) else { break false };
            state = self.news.wait_timeout(state, rest).expect("nobody panics with it").0;
        };
        state.closed = true;
        state.shuffles.clear();
        self.news.notify_all();
        all
    }

    fn lock(&self) -> MutexGuard<'_, State<R>> {
        self.state.lock().expect("nobody panics with it")
    }
}

impl<R> State<R> {
    fn shuffle(&mut self, id: u64) -> &mut Shuffle<R> {
        self.shuffles.entry(id).or_insert_with(|| Shuffle {
            outcome: HashMap::new(),
            waiting: Vec::new(),
            unwanted: HashSet::new(),
            left: 0,
            halves: 0,
            opened: false,
            remembered: false,
            failed: None,
        })
    }

    /// As [`Self::shuffle`], for a process that this one may know nothing of. None if there are too many that nobody here has opened.
    fn of_others(&mut self, id: u64) -> Option<&mut Shuffle<R>> {
        let known = self.shuffles.contains_key(&id);
        let unopened = || self.shuffles.values().filter(|shuffle| !shuffle.opened).count();
        (known || unopened() < UNOPENED).then(|| self.shuffle(id))
    }

    fn tidy(&mut self, id: u64) {
        let Some(shuffle) = self.shuffles.get_mut(&id) else { return };
        if !shuffle.opened || shuffle.halves > 0 || shuffle.left > 0 {
            return;
        }
        if shuffle.remembered {
            return;
        }
        shuffle.remembered = shuffle.failed.is_some() || shuffle.outcome.values().any(Result::is_err);
        let mut forgotten = Some(id);
        if shuffle.remembered {
            self.failures.push_back(id);
            forgotten = if self.failures.len() > FAILURES { self.failures.pop_front() } else { None };
        }
        if let Some(id) = forgotten {
            self.shuffles.remove(&id);
            self.over.insert(id);
        }
    }
}

impl<R> Shuffle<R> {
    /// None if the worker has not finished. A block that is not there has been fetched before.
    fn block(&self, source: WorkerId, target: WorkerId) -> Option<Result<Block>> {
        if let Some(failed) = &self.failed {
            return Some(Err(failed.clone()));
        }
        Some(match self.outcome.get(&source)? {
            Ok(blocks) => match blocks.get(&target) {
                Some(block) => Ok(block.clone()),
                None => Err(Error::Taken(format!("rows of {source} for {target}"))),
            },
            Err(error) => Err(error.clone()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffles_that_are_over_take_no_memory() {
        let store: Store<()> = Store::new();
        let worker = WorkerId(0);
        for id in 0..10_000 {
            store.open(id, 1, 1).unwrap();
            let outcome = match id % 2 {
                0 => Ok([(worker, Block::default())].into()),
                _ => Err(Error::GaveUp { worker, why: "the disk is full".into() }),
            };
            assert!(store.finish(id, worker, 1, outcome).is_empty());
            store.fetched((id, worker, worker));
            (0..2).for_each(|_| store.half_gone(id));
        }
        assert_eq!(store.lock().shuffles.len(), FAILURES);
        // The last ones are still known.
        let why = |id| store.ask((id, worker, worker), ()).unwrap().1.unwrap_err().to_string();
        assert_eq!(why(9_999), "worker 0 gave up: the disk is full");
        assert_eq!(why(1), Error::Closed.to_string());
        assert!(matches!(store.open(1, 1, 1), Err(Error::Taken(_))));
        assert!(store.lock().over.ranges() <= FAILURES + 1);
    }
}

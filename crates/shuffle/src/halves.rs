//! What a worker has of a shuffle, whatever the design: the half that sends and the half that receives.

use std::collections::VecDeque;
use std::fmt::Debug;

use arrow_array::RecordBatch;

use crate::{Error, Gather, Partition, Result, WorkerId};

/// Where a design takes a worker's rows.
pub trait Outlet: Debug {
    fn worker(&self) -> WorkerId;

    /// Takes rows for one worker, which must exist.
    ///
    /// # Errors
    ///
    /// Those of [`Sender::send_to`].
    fn deliver(&mut self, target: WorkerId, batch: RecordBatch) -> Result<()>;

    /// Everything has been delivered.
    ///
    /// # Errors
    ///
    /// Those of [`Sender::finish`].
    fn finish(&mut self) -> Result<()>;

    /// The sender is gone: after [`Outlet::finish`], or without, and why.
    fn gone(&mut self, gave_up: Option<String>);
}

/// Where a design takes a worker's rows from.
pub trait Inlet: Debug {
    fn worker(&self) -> WorkerId;

    /// Adds what comes next, which may be nothing. Sleeps until there is something. False at the end.
    ///
    /// # Errors
    ///
    /// Those of the shuffle; what came can't be understood.
    fn next(&mut self, ready: &mut VecDeque<RecordBatch>) -> Result<bool>;

    /// Nothing more will be read.
    fn close(&mut self, error: Option<&Error>);

    /// The receiver is gone, after [`Inlet::close`].
    fn gone(&mut self);
}

/// Sends the rows of one worker. Dropped without [`Sender::finish`], it makes the shuffle fail for everybody who needs them.
#[derive(Debug)]
pub struct Sender<O: Outlet> {
    outlet: O,
    gather: Gather,
    /// What the others are told instead of its rows, whatever comes behind it.
    failed: Option<Error>,
    /// Why it ended early.
    why: Option<String>,
    finished: bool,
}

impl<O: Outlet> Sender<O> {
    pub(crate) fn new(outlet: O, gather: Gather) -> Self {
        Self { outlet, gather, failed: None, why: None, finished: false }
    }

    pub fn worker(&self) -> WorkerId {
        self.outlet.worker()
    }

    /// How [`Sender::send`] spreads rows from here on.
    ///
    /// # Errors
    ///
    /// Those of [`Scatter::new`](crate::Scatter::new), and of sending what has been gathered.
    pub fn partition(&mut self, partition: &Partition) -> Result<()> {
        self.flush()?;
        self.gather.partition(partition).map_err(|error| self.failed(error))
    }

    /// Spreads rows over all workers by [`Sender::partition`]. They are gathered first, so that each worker gets batches of some
    /// size. With push it sleeps while there is no room; staged, it never waits.
    ///
    /// # Errors
    ///
    /// Other columns; no partition; with push, that a worker or a process is gone, or gave up. After an error it is the same again,
    /// to the end: the shuffle has failed for everybody who needs the rows.
    pub fn send(&mut self, batch: RecordBatch) -> Result<()> {
        self.goes_on()?;
        match self.gather.add(batch) {
            Ok(true) => self.flush(),
            Ok(false) => Ok(()),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Sends what has been gathered.
    ///
    /// # Errors
    ///
    /// Those of [`Sender::send`].
    pub fn flush(&mut self) -> Result<()> {
        self.goes_on()?;
        let parts = self.gather.take().map_err(|error| self.failed(error))?;
        parts.into_iter().try_for_each(|(target, part)| self.send_to(target, part))
    }

    /// Sends rows to one worker now.
    ///
    /// # Errors
    ///
    /// Those of [`Sender::send`].
    ///
    /// # Panics
    ///
    /// If there is no such worker.
    pub fn send_to(&mut self, target: WorkerId, batch: RecordBatch) -> Result<()> {
        self.goes_on()?;
        self.outlet.deliver(target, batch).map_err(|error| self.failed(error))
    }

    /// Sends what has been gathered, and that there is nothing more. Staged, the rows can be fetched now.
    ///
    /// # Errors
    ///
    /// Those of [`Sender::send`].
    pub fn finish(mut self) -> Result<()> {
        self.flush()?;
        self.outlet.finish().map_err(|error| self.failed(error))?;
        self.finished = true;
        Ok(())
    }

    /// Ends the shuffle for everybody who needs the rows, and says why.
    pub fn give_up(mut self, why: &str) {
        self.why = Some(why.to_owned());
    }

    fn goes_on(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn failed(&mut self, error: Error) -> Error {
        self.failed.get_or_insert(error).clone()
    }
}

impl<O: Outlet> Drop for Sender<O> {
    fn drop(&mut self) {
        let why = self.why.take().or_else(|| self.failed.as_ref().map(Error::to_string));
        self.outlet.gone(why.or_else(|| (!self.finished).then(|| "it stopped before its end".to_owned())));
    }
}

/// The rows for one worker, in no particular order but that of each sender. After an error, or the end, there are no more.
#[derive(Debug)]
pub struct Receiver<I: Inlet> {
    inlet: I,
    ready: VecDeque<RecordBatch>,
    over: bool,
}

impl<I: Inlet> Receiver<I> {
    pub(crate) fn new(inlet: I) -> Self {
        Self { inlet, ready: VecDeque::new(), over: false }
    }

    pub fn worker(&self) -> WorkerId {
        self.inlet.worker()
    }
}

impl<I: Inlet> Iterator for Receiver<I> {
    type Item = Result<RecordBatch>;

    /// Sleeps until there are rows, or an end.
    fn next(&mut self) -> Option<Self::Item> {
        while !self.over {
            if let Some(batch) = self.ready.pop_front() {
                return Some(Ok(batch));
            }
            match self.inlet.next(&mut self.ready) {
                Ok(more) => self.over = !more,
                Err(error) => {
                    self.over = true;
                    self.ready.clear();
                    self.inlet.close(Some(&error));
                    return Some(Err(error));
                }
            }
        }
        None
    }
}

impl<I: Inlet> Drop for Receiver<I> {
    fn drop(&mut self) {
        if !self.over {
            self.inlet.close(None);
        }
        self.inlet.gone();
    }
}

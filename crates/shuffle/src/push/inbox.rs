//! What has arrived for one worker: a queue that it sleeps on.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;

use crate::{Error, NodeId, Result, WorkerId, stream};

#[derive(Debug)]
pub(super) enum Item {
    /// From another process.
    Frame { source: WorkerId, node: NodeId, memory: Buffer },
    /// From a worker of this one, and its size.
    Batch { batch: RecordBatch, bytes: usize },
}

#[derive(Debug)]
struct Queue {
    items: VecDeque<Item>,
    /// Workers that have not ended.
    open_sources: usize,
    failed: Option<Error>,
    /// Nobody will read.
    closed: bool,
    /// Of batches from this process.
    bytes: usize,
    reader_sleeps: bool,
    writers_sleep: usize,
}

#[derive(Debug)]
pub(super) struct Inbox {
    /// Bytes of batches from this process. Frames are bounded by their windows.
    capacity: usize,
    queue: Mutex<Queue>,
    arrived: Condvar,
    room: Condvar,
}

impl Inbox {
    pub(super) fn new(sources: usize, capacity: usize) -> Self {
        let queue = Queue {
            items: VecDeque::new(),
            open_sources: sources,
            failed: None,
            closed: false,
            bytes: 0,
            reader_sleeps: false,
            writers_sleep: 0,
        };
        Self { capacity, queue: Mutex::new(queue), arrived: Condvar::new(), room: Condvar::new() }
    }

    /// Adds what came from another process, without waiting. Gives it back if nobody will read it.
    pub(super) fn add(&self, item: Item) -> std::result::Result<(), Item> {
        let mut queue = self.lock();
        if queue.closed || queue.failed.is_some() {
            return Err(item);
        }
        queue.items.push_back(item);
        self.wake_reader(&mut queue);
        Ok(())
    }

    /// Adds a batch of this process. Sleeps while there is no room.
    pub(super) fn add_batch(&self, batch: RecordBatch) -> Result<()> {
        let bytes = stream::bytes(&batch);
        let mut queue = self.lock();
        loop {
            if let Some(failed) = &queue.failed {
                return Err(failed.clone());
            }
            if queue.closed {
                return Ok(());
            }
            if queue.bytes == 0 || queue.bytes + bytes <= self.capacity {
                break;
            }
            queue.writers_sleep += 1;
            queue = self.room.wait(queue).expect("nobody panics with it");
            queue.writers_sleep -= 1;
        }
        queue.bytes += bytes;
        queue.items.push_back(Item::Batch { batch, bytes });
        self.wake_reader(&mut queue);
        Ok(())
    }

    pub(super) fn source_ended(&self) {
        let mut queue = self.lock();
        queue.open_sources -= 1;
        self.wake_reader(&mut queue);
    }

    /// The first error counts. Returns what has not been read.
    pub(super) fn fail(&self, error: &Error) -> VecDeque<Item> {
        let mut queue = self.lock();
        queue.failed.get_or_insert_with(|| error.clone());
        queue.bytes = 0;
        self.wake_reader(&mut queue);
        self.room.notify_all();
        std::mem::take(&mut queue.items)
    }

    /// Nobody will read any more. Returns what is there.
    pub(super) fn close(&self) -> VecDeque<Item> {
        let mut queue = self.lock();
        queue.closed = true;
        queue.bytes = 0;
        self.room.notify_all();
        std::mem::take(&mut queue.items)
    }

    /// Everything that is there, into `items`, which is empty. Sleeps while nothing is, after `before_sleep`. False if nothing
    /// more will come.
    pub(super) fn take(&self, items: &mut VecDeque<Item>, before_sleep: impl Fn()) -> Result<bool> {
        let mut told = false;
        let mut queue = self.lock();
        loop {
            if let Some(failed) = &queue.failed {
                return Err(failed.clone());
            }
            if !queue.items.is_empty() {
                std::mem::swap(&mut queue.items, items);
                return Ok(true);
            }
            if queue.open_sources == 0 {
                return Ok(false);
            }
            if !told {
                told = true;
                drop(queue);
                before_sleep();
                queue = self.lock();
                continue;
            }
            queue.reader_sleeps = true;
            queue = self.arrived.wait(queue).expect("nobody panics with it");
            queue.reader_sleeps = false;
        }
    }

    /// A batch of this process has been read.
    pub(super) fn read(&self, bytes: usize) {
        let mut queue = self.lock();
        queue.bytes = queue.bytes.saturating_sub(bytes);
        if queue.writers_sleep > 0 {
            self.room.notify_all();
        }
    }

    fn wake_reader(&self, queue: &mut Queue) {
        if std::mem::take(&mut queue.reader_sleeps) {
            self.arrived.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("nobody panics with it")
    }
}

//! Bodies in memory that the client is lent, where both run with the library on one host (`thallus.h`).
//!
//! What a result that is kept ([`crate::store`]) has been copied to stays, and is lent again when the same client asks again. It
//! is of use to that client alone: what one may write to must not be read by another.

use std::net::TcpStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thallus_api::{Memory, Thallus};
use thallus_columnar::Message;
use thallus_columnar::scan::Frame;

use crate::encoding::Tail;
use crate::store::{Held, Store};

/// Less than this is not worth a loan.
const LEAST: usize = 32 << 10;

/// What one frame takes to the client.
pub(crate) struct Packed {
    tail: Tail,
    bodies: Option<Bodies>,
    pub(crate) rows: u64,
}

/// The bodies of some messages, one after the other, and their headers.
struct Bodies {
    memory: Memory,
    headers: Tail,
}

impl Packed {
    pub(crate) fn new(tail: Tail, rows: u64) -> Self {
        Self { tail, bodies: None, rows }
    }

    /// Copies the bodies, once, to where they can be lent. Returns false if the connection can't lend so much now.
    pub(crate) fn lendable(&mut self, stream: &TcpStream) -> bool {
        let Tail::Scatter(messages) = &self.tail else { return true };
        let bytes = messages.iter().map(Message::body_len).sum();
        if bytes < LEAST {
            return true;
        }
        self.bodies = Bodies::copy(stream, messages, bytes);
        self.bodies.is_some()
    }

    /// The frame in place of `batch`, and what follows it. A loan that is not possible after all is a batch. To be sent at once: a
    /// handle that does not arrive is memory that does not come back before the connection's end.
    pub(crate) fn announced(&self, batch: Frame) -> (Frame, &Tail) {
        let lent = self.bodies.as_ref().and_then(|bodies| Some((bodies.lend(&batch)?, &bodies.headers)));
        lent.unwrap_or((batch, &self.tail))
    }

    /// All of it, for the stream.
    pub(crate) fn tail(&self) -> &Tail {
        &self.tail
    }

    /// Bytes of headers and bodies, wherever they are.
    pub(crate) fn bytes(&self) -> usize {
        self.tail.len()
    }

    pub(crate) fn lendable_bytes(&self) -> usize {
        self.bodies.as_ref().map_or(0, |bodies| bodies.memory.bytes())
    }

    /// Bytes of columns that were copied to make it.
    pub(crate) fn copied_bytes(&self) -> usize {
        self.tail.copied_bytes() + self.lendable_bytes()
    }
}

impl Bodies {
    fn copy(stream: &TcpStream, messages: &[Message], bytes: usize) -> Option<Self> {
        let mut memory = Thallus::find()?.allocate(stream, bytes).ok()?;
        let mut headers = Vec::new();
        let mut offset = 0;
        for message in messages {
            headers.extend_from_slice(message.header());
            for segment in message.body() {
                let bytes = segment.as_slice();
                memory.write_at(offset, bytes);
                offset += bytes.len();
            }
        }
        Some(Self { memory, headers: Tail::Contiguous(headers) })
    }

    fn lend(&self, batch: &Frame) -> Option<Frame> {
        let &Frame::Batch { cursor, number } = batch else { return None };
        let bytes = self.memory.bytes();
        let handle = self.memory.lend(0, bytes).ok()?;
        Some(Frame::Lent { cursor, number, bytes: bytes as u64, handle: handle.bytes })
    }
}

/// What a client can be lent again.
#[derive(Default)]
pub(crate) struct Again(Mutex<Vec<Kept>>);

/// All frames of a result.
struct Kept {
    held: Arc<Held>,
    frames: Arc<[Arc<Packed>]>,
    bytes: usize,
}

impl Again {
    /// The frames of a result, if they are there. Those of results that are no longer kept go.
    pub(crate) fn find(&self, store: &Store, held: &Arc<Held>) -> Option<Arc<[Arc<Packed>]>> {
        let mut all = self.all();
        all.retain(|kept| store.has(&kept.held));
        let found = all.iter().position(|kept| Arc::ptr_eq(&kept.held, held))?;
        let kept = all.remove(found);
        let frames = kept.frames.clone();
        all.push(kept);
        Some(frames)
    }

    /// Keeps as much as results may have together, the last used longest.
    pub(crate) fn insert(&self, store: &Store, held: Arc<Held>, frames: Vec<Arc<Packed>>) {
        let bytes = frames.iter().map(|frame| frame.lendable_bytes()).sum();
        if bytes == 0 {
            return;
        }
        let mut all = self.all();
        all.retain(|kept| !Arc::ptr_eq(&kept.held, &held));
        all.push(Kept { held, frames: frames.into(), bytes });
        let mut bytes: usize = all.iter().map(|kept| kept.bytes).sum();
        while bytes > store.limit() {
            bytes -= all.remove(0).bytes;
        }
    }

    /// Gives all memory up. Returns false if there was none.
    pub(crate) fn clear(&self) -> bool {
        !std::mem::take(&mut *self.all()).is_empty()
    }

    fn all(&self) -> MutexGuard<'_, Vec<Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Again {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Again").field("results", &self.all().len()).finish_non_exhaustive()
    }
}

//! The accepted ends of connections, how many bytes they have carried, and over what: by the library's own counts.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};
use socket2::SockRef;
use thallus_api::{Fabric, Thallus};
use tokio::net::TcpStream;

/// A socket that several may use, and its bytes.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) stream: TcpStream,
    received: AtomicU64,
    sent: AtomicU64,
}

impl End {
    pub(crate) fn new(stream: TcpStream) -> Arc<Self> {
        Arc::new(Self { stream, received: AtomicU64::new(0), sent: AtomicU64::new(0) })
    }

    pub(crate) fn received(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn sent(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// For whoever uses it, at both sides.
    pub(crate) fn close(&self) {
        let _ = SockRef::from(&self.stream).shutdown(std::net::Shutdown::Both); // it may be closed
    }
}

/// Ends of connections by what carries them, and bytes in both directions.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct Carried {
    pub(crate) connections: u64,
    pub(crate) in_memory: u64,
    pub(crate) over_verbs: u64,
    pub(crate) on_tcp: u64,
    /// Why those are; empty without the library.
    pub(crate) reasons: Vec<String>,
    pub(crate) bytes: u64,
    /// Of the bytes, those that did not go through TCP.
    pub(crate) ring_bytes: u64,
}

impl Carried {
    fn of(end: &End) -> Self {
        let bytes = end.received.load(Ordering::Relaxed) + end.sent.load(Ordering::Relaxed);
        let mut carried = Self { connections: 1, bytes, ..Self::default() };
        let status = Thallus::find().and_then(|library| library.status(&end.stream).ok());
        match status.as_ref().map(|status| status.fabric) {
            Some(Fabric::SharedMemory) => carried.in_memory = 1,
            Some(Fabric::Verbs) => carried.over_verbs = 1,
            _ => carried.on_tcp = 1,
        }
        if let Some(status) = status {
            carried.ring_bytes = status.ring_bytes_sent + status.ring_bytes_received;
            carried.reasons.extend((!status.reason.is_empty()).then_some(status.reason));
        }
        carried
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.connections += other.connections;
        self.in_memory += other.in_memory;
        self.over_verbs += other.over_verbs;
        self.on_tcp += other.on_tcp;
        self.reasons.extend(other.reasons.iter().cloned());
        self.bytes += other.bytes;
        self.ring_bytes += other.ring_bytes;
    }
}

/// The accepted ends of one kind.
#[derive(Debug, Default)]
pub(crate) struct Ends(Mutex<Books>);

#[derive(Debug, Default)]
struct Books {
    next: u64,
    open: HashMap<u64, Arc<End>>,
    /// Bytes of those that were closed.
    bytes: u64,
    ring_bytes: u64,
}

/// An end in the books. Dropped, its bytes stay there.
#[derive(Debug)]
pub(crate) struct Entry {
    ends: Arc<Ends>,
    number: u64,
    pub(crate) end: Arc<End>,
}

impl Ends {
    /// # Errors
    ///
    /// There are `most` already.
    pub(crate) fn enter(self: &Arc<Self>, end: Arc<End>, most: usize) -> io::Result<Entry> {
        let mut books = self.lock();
        if books.open.len() >= most {
            return Err(io::Error::other(format!("there are {most} connections")));
        }
        let number = books.next;
        books.next += 1;
        books.open.insert(number, end.clone());
        Ok(Entry { ends: self.clone(), number, end })
    }

    pub(crate) fn carried(&self) -> Carried {
        let books = self.lock();
        let mut all = Carried { bytes: books.bytes, ring_bytes: books.ring_bytes, ..Carried::default() };
        books.open.values().for_each(|end| all.add(&Carried::of(end)));
        all
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.0.lock().expect("nobody panics with it")
    }
}

impl Entry {
    /// In the books of another kind.
    ///
    /// # Errors
    ///
    /// There are `most` already.
    pub(crate) fn into(self, ends: &Arc<Ends>, most: usize) -> io::Result<Self> {
        self.ends.lock().open.remove(&self.number);
        ends.enter(self.end.clone(), most)
    }
}

impl Drop for Entry {
    /// One that is not in the books any more leaves nothing there.
    fn drop(&mut self) {
        let carried = Carried::of(&self.end);
        let mut books = self.ends.lock();
        if books.open.remove(&self.number).is_some() {
            books.bytes += carried.bytes;
            books.ring_bytes += carried.ring_bytes;
        }
    }
}

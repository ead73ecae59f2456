//! All clients: accepting them, counting what they have, and letting them go.

use std::collections::HashMap;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::dataset::Dataset;
use crate::flight::Runs;
use crate::session::Session;
use crate::store::Store;

/// Clients beyond the limit that are answered at a time, which is to say refused. Others are closed without a word.
const REFUSED: usize = 16;

/// How long a refused `accept` is left alone: it is refused for want of descriptors or memory, which others give back.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Cursors of a client.
    pub(crate) cursors: usize,
    /// Running queries of all.
    pub(crate) queries: usize,
    pub(crate) clients: usize,
    /// How long a cursor or a send may wait for the client.
    pub(crate) idle: Duration,
}

#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) dataset: Dataset,
    pub(crate) limits: Limits,
    /// Results that are kept, if they are.
    pub(crate) store: Option<Store>,
    started: Instant,
    queries: AtomicUsize,
    /// Queries that came with Arrow Flight.
    pub(crate) runs: Runs,
    clients: Mutex<Clients>,
}

#[derive(Debug, Default)]
struct Clients {
    last: u64,
    sessions: HashMap<u64, Arc<Session>>,
    /// Connections of Arrow Flight.
    flights: usize,
    closed: bool,
}

/// The place of a connection of Arrow Flight among the clients.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) server: Arc<Server>,
    pub(crate) id: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.server.clients().flights -= 1;
        log!("client {}: gone; {} queries are running", self.id, self.server.queries());
    }
}

impl Clients {
    /// The number of a new client, if there may be one more, and `beyond` so many others are only refused.
    fn one_more(&mut self, limit: usize, beyond: usize) -> Option<(u64, Admission)> {
        let refused =
            self.sessions.values().filter(|session| session.admission == Admission::Refused).count();
        let clients = self.sessions.len() - refused + self.flights;
        let admission = if clients < limit { Admission::Client } else { Admission::Refused };
        if self.closed || (admission == Admission::Refused && refused >= beyond) {
            log!("a connection was closed: {clients} clients are connected");
            return None;
        }
        self.last += 1;
        Some((self.last, admission))
    }
}

/// What may be asked on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Client,
    /// Nothing: there are as many clients as may be.
    Refused,
}

/// The right to run a query.
#[derive(Debug)]
pub(crate) struct Permit(Arc<Server>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.queries.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Server {
    pub(crate) fn new(dataset: Dataset, limits: Limits, store: Option<Store>) -> Self {
        Self {
            dataset,
            limits,
            store,
            started: Instant::now(),
            queries: AtomicUsize::new(0),
            runs: Runs::default(),
            clients: Mutex::default(),
        }
    }

    /// Time since the start, which the books go by.
    pub(crate) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Queries that run now.
    pub(crate) fn queries(&self) -> usize {
        self.queries.load(Ordering::Relaxed)
    }

    /// None if as many run as may.
    pub(crate) fn permit(self: &Arc<Self>) -> Option<Permit> {
        let one_more = |queries| (queries < self.limits.queries).then_some(queries + 1);
        self.queries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(Permit(self.clone()))
    }

    /// Accepts clients for ever.
    pub(crate) fn serve(self: &Arc<Self>, listener: &TcpListener) -> Result<()> {
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => self.accept(stream),
                Err(error) => {
                    log!("accept: {error}");
                    thread::sleep(PAUSE);
                }
            }
        }
        Ok(())
    }

    fn accept(self: &Arc<Self>, stream: TcpStream) {
        let mut clients = self.clients();
        let Some((id, admission)) = clients.one_more(self.limits.clients, REFUSED) else { return };
        let session = match Session::new(self.clone(), id, stream, admission) {
            Ok(session) => Arc::new(session),
            Err(error) => return log!("client {id}: {error}"),
        };
        clients.sessions.insert(id, session.clone());
        let server = self.clone();
        let thread = thread::Builder::new().name(format!("client {id}")).spawn(move || {
            let how = session.serve();
            server.clients().sessions.remove(&id);
            log!("client {id}: {how}; {} queries are running", server.queries());
        });
        if let Err(error) = thread {
            clients.sessions.remove(&id);
            log!("client {id}: no thread: {error}");
        }
    }

    /// None if there are as many clients as may be.
    pub(crate) fn place(self: &Arc<Self>) -> Option<Place> {
        let mut clients = self.clients();
        let (id, _) = clients.one_more(self.limits.clients, 0)?;
        clients.flights += 1;
        Some(Place { server: self.clone(), id })
    }

    /// Ends all connections and queries, then DuckDB. Connections of Arrow Flight end with the
    /// process.
    pub(crate) fn close(&self) {
        let sessions: Vec<_> = {
            let mut clients = self.clients();
            clients.closed = true;
            clients.sessions.values().cloned().collect()
        };
        for session in sessions {
            session.close();
        }
        self.runs.stop_all();
        self.dataset.close();
    }

    fn clients(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

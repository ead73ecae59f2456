//! One client: its frames come in here, and all frames to it go out under one lock, in the order of its books.

use std::collections::HashMap;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};
use thallus_columnar::scan::{self, Action, Code, CursorId, Failure, Frame, HEADER, RequestId, ServerLimits};
use thallus_columnar::write_all_vectored;

use crate::cursor::{Query, Stop};
use crate::encoding::{Encoding, Tail};
use crate::incoming::{Begin, Incoming, has_left};
use crate::lending::{Again, Packed};
use crate::server::{Admission, Server};

/// What a client of the baseline sends before its first frame (docs/wire-scan.md).
const BASELINE: &[u8; HEADER] = b"thallus baseline";

/// What one sends that wants plain IPC streams.
const STREAM: &[u8; HEADER] = b"thallus streamed";

/// Time for a client to say HELLO.
const GREETING: Duration = Duration::from_secs(10);

/// DuckDB plans by recursion: 900 common table expressions, each of which reads from the one before, overflow 2 MiB. Only
/// what is used takes memory. [`sql::LENGTH`](crate::sql::LENGTH) bounds the depth.
pub(crate) const STACK: usize = 256 << 20;

/// An interrupt is forgotten by a query that begins after it, so it is repeated.
pub(crate) const AGAIN: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) server: Arc<Server>,
    id: u64,
    stream: TcpStream,
    pub(crate) admission: Admission,
    /// What the client can be lent again.
    pub(crate) again: Again,
    state: Mutex<State>,
    /// Credits have come, a query was stopped or has ended.
    changed: Condvar,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) books: scan::Server,
    /// Threads that are alive, by a number of their own.
    queries: HashMap<u64, Arc<Query>>,
    /// Of those, until their threads have dropped everything.
    cursors: HashMap<CursorId, u64>,
    last_query: u64,
    /// When the client's last frame came, or its last query ended.
    quiet_since: Duration,
    /// Nothing more can be sent.
    closed: bool,
}

impl Session {
    pub(crate) fn new(
        server: Arc<Server>,
        id: u64,
        stream: TcpStream,
        admission: Admission,
    ) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(server.limits.idle))?;
        let books =
            scan::Server::new(ServerLimits { cursors: server.limits.cursors, idle: server.limits.idle });
        let state = State {
            books,
            queries: HashMap::new(),
            cursors: HashMap::new(),
            last_query: 0,
            quiet_since: server.now(),
            closed: false,
        };
        let again = Again::default();
        Ok(Self { server, id, stream, admission, again, state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Answers the client until it goes, then ends what it has left. Returns why it has gone.
    pub(crate) fn serve(self: &Arc<Self>) -> String {
        let address = self.stream.peer_addr().map_or_else(|error| error.to_string(), |peer| peer.to_string());
        log!("client {}: connected from {address}", self.id);
        let how = match self.converse() {
            Ok(()) => "gone".to_owned(),
            Err(error) if error.downcast_ref().is_some_and(has_left) => "gone".to_owned(),
            Err(error) => format!("{error:#}"),
        };
        self.close();
        how
    }

    fn converse(self: &Arc<Self>) -> Result<()> {
        let mut incoming = Incoming::new(&self.stream);
        let mut encoding = Encoding::Scatter;
        let mut first = match incoming.begin(GREETING)? {
            Begin::Header(header) => header,
            Begin::Silence => bail!("has said nothing for {} s", GREETING.as_secs()),
            Begin::End => return Ok(()),
        };
        // Not before the client's first bytes: between hosts they bring what the library needs to know (docs/wire.md).
        self.send(&mut self.state(), &Frame::hello(), &Tail::None)?;
        let other = [(BASELINE, Encoding::Contiguous), (STREAM, Encoding::Stream)];
        if let Some((_, wanted)) = other.iter().find(|(preface, _)| **preface == first) {
            encoding = *wanted;
            let Begin::Header(header) = incoming.begin(GREETING)? else {
                bail!("no frame after the preface")
            };
            first = header;
        }
        incoming.frame(&first, GREETING)?.check_hello()?;

        let idle = match self.admission {
            Admission::Client => self.server.limits.idle,
            Admission::Refused => GREETING.min(self.server.limits.idle),
        };
        loop {
            match incoming.begin(idle)? {
                Begin::Header(header) => self.received(incoming.frame(&header, idle)?, encoding)?,
                // A query that runs is waited for, and one that waits for the client expires.
                Begin::Silence if self.is_used(idle) => {}
                Begin::Silence => bail!("has said nothing for {} s", idle.as_secs()),
                Begin::End => return Ok(()),
            }
        }
    }

    fn is_used(&self, idle: Duration) -> bool {
        let state = self.state();
        !state.queries.is_empty() || self.server.now().saturating_sub(state.quiet_since) < idle
    }

    fn received(self: &Arc<Self>, frame: Frame, encoding: Encoding) -> Result<()> {
        let mut state = self.state();
        state.quiet_since = self.server.now();
        // The thread of one that was refused may still be there.
        let is_answering =
            !state.cursors.is_empty() || state.books.has_requests() || state.books.cursors().next().is_some();
        if encoding == Encoding::Stream && matches!(frame, Frame::Init { .. }) && is_answering {
            bail!("a request in the midst of a stream");
        }
        match state.books.received(frame, self.server.now())? {
            Action::Open { request, dataset, sql } => {
                if let Err(failure) = self.open(&mut state, request, dataset, sql, encoding) {
                    let frame = state.books.refused(request, failure)?;
                    self.send(&mut state, &frame, &Tail::None)?;
                }
            }
            Action::Resume(_) => self.changed.notify_all(),
            Action::Interrupt(id) => self.stop(&state, id, Stop::Cancelled),
            Action::Close(id, frame) => match state.cursors.get(&id) {
                // Sent by the query's thread, once it has dropped what the query holds.
                Some(_) => self.stop(&state, id, Stop::Finalized(frame)),
                None => self.send(&mut state, &frame, &Tail::None)?,
            },
            Action::Refuse(frame) => self.send(&mut state, &frame, &Tail::None)?,
            Action::None => {}
        }
        Ok(())
    }

    /// Starts the thread that answers.
    fn open(
        self: &Arc<Self>,
        state: &mut State,
        request: RequestId,
        dataset: String,
        sql: String,
        encoding: Encoding,
    ) -> Result<(), Failure> {
        if self.admission == Admission::Refused {
            let message = format!("The server has {} clients already", self.server.limits.clients);
            return Err(Failure { code: Code::Limit, message });
        }
        let Some(permit) = self.server.permit() else {
            let message = format!("The server runs {} queries already", self.server.limits.queries);
            return Err(Failure { code: Code::Limit, message });
        };
        let failed = |message| Failure { code: Code::Dataset, message };
        let connection = self.server.dataset.connect(&dataset).map_err(failed)?;
        let query = Arc::new(Query::new(request, connection.interrupter()));
        state.last_query += 1;
        let number = state.last_query;
        let (session, running) = (self.clone(), query.clone());
        let builder = thread::Builder::new().name(format!("query {}.{number}", self.id)).stack_size(STACK);
        let thread = builder.spawn(move || {
            let run = || crate::cursor::run(&session, &running, connection, &sql, encoding, permit);
            if catch_unwind(AssertUnwindSafe(run)).is_err() {
                // A bug, here or in a library: the client must not wait for an answer for ever.
                let _ = session.stream.shutdown(Shutdown::Both);
            }
            session.ended(number, &running);
        });
        match thread {
            Ok(_) => {
                state.queries.insert(number, query);
                Ok(())
            }
            Err(error) => Err(Failure { code: Code::Other(0), message: format!("no thread: {error}") }),
        }
    }

    /// The query's cursor may be named by the client from now on.
    pub(crate) fn name(&self, state: &mut State, query: &Arc<Query>, id: CursorId) {
        let number =
            state.queries.iter().find(|(_, other)| Arc::ptr_eq(other, query)).map(|(number, _)| *number);
        if let Some(number) = number {
            state.cursors.insert(id, number);
        }
    }

    /// A query's thread has dropped everything.
    fn ended(&self, number: u64, query: &Query) {
        let mut state = self.state();
        state.queries.remove(&number);
        state.quiet_since = self.server.now();
        state.cursors.retain(|_, other| *other != number);
        log!("client {}: {}; {} queries are running", self.id, query.summary(), self.server.queries());
        if let Some(Stop::Finalized(frame)) = query.stopped() {
            // A failure closes the connection, which its reader finds out.
            let _ = self.send(&mut state, &frame, &Tail::None);
        }
        drop(state);
        self.changed.notify_all();
    }

    fn stop(&self, state: &State, id: CursorId, why: Stop) {
        if let Some(query) = state.cursors.get(&id).and_then(|number| state.queries.get(number)) {
            query.stop(why);
            self.changed.notify_all();
        }
    }

    /// Waits until `ready` has a value, or the query is stopped; ends cursors that have waited for too long.
    pub(crate) fn wait<T>(
        &self,
        query: &Query,
        ready: impl Fn(&mut State) -> Option<T>,
    ) -> Option<(MutexGuard<'_, State>, T)> {
        let mut state = self.state();
        loop {
            if query.stopped().is_some() || state.closed {
                return None;
            }
            if let Some(value) = ready(&mut state) {
                return Some((state, value));
            }
            let expired = state.books.expired(self.server.now());
            if !expired.is_empty() {
                for (id, frame) in expired {
                    self.send(&mut state, &frame, &Tail::None).ok()?;
                    self.stop(&state, id, Stop::Expired);
                }
                continue;
            }
            let pause = (self.server.limits.idle / 16).max(AGAIN);
            state = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether the client takes loans.
    pub(crate) fn lends(&self) -> bool {
        self.state().books.lends()
    }

    /// Puts the bodies of a frame where the client can borrow them; what is kept for it makes room. Returns false if that was
    /// not possible.
    pub(crate) fn make_lendable(&self, packed: &mut Packed) -> bool {
        packed.lendable(&self.stream) || (self.again.clear() && packed.lendable(&self.stream))
    }

    /// # Errors
    ///
    /// Those of the socket. Nothing can be sent after one, and the session ends.
    pub(crate) fn send(&self, state: &mut State, frame: &Frame, tail: &Tail) -> Result<()> {
        let head = frame.encode(tail.len() as u64)?;
        self.write(state, std::iter::once(&head[..]).chain(tail.slices()))
    }

    /// Sends what belongs to no frame.
    ///
    /// # Errors
    ///
    /// As [`Session::send`].
    pub(crate) fn send_tail(&self, state: &mut State, tail: &Tail) -> Result<()> {
        self.write(state, tail.slices())
    }

    fn write<'a>(&self, state: &mut State, slices: impl Iterator<Item = &'a [u8]>) -> Result<()> {
        if state.closed {
            bail!("the connection is closed");
        }
        let Err(error) = write_all_vectored(&mut &self.stream, slices) else { return Ok(()) };
        state.closed = true;
        // Ends the reader; if it fails, the connection has gone already.
        let _ = self.stream.shutdown(Shutdown::Both);
        if error.kind() == io::ErrorKind::WouldBlock {
            bail!("the client has taken nothing for {} s", self.server.limits.idle.as_secs());
        }
        Err(error.into())
    }

    /// Ends the connection, and returns when no query is left. That can take as long as DuckDB plans a query, which nothing
    /// interrupts.
    pub(crate) fn close(&self) {
        // Before the lock, which a send to a client that does not read may hold.
        let _ = self.stream.shutdown(Shutdown::Both);
        let mut state = self.state();
        state.closed = true;
        while !state.queries.is_empty() {
            state.queries.values().for_each(|query| query.stop(Stop::Gone));
            self.changed.notify_all();
            state = self.changed.wait_timeout(state, AGAIN).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

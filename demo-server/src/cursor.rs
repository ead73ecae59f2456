//! One query: run by DuckDB as far as the client has given credit, and one frame ahead of that.

use std::sync::{Arc, Mutex, PoisonError};

use duckdb::Connection;
use thallus_columnar::scan::{Code, CursorId, Failure, Frame, RequestId};
use uuid::Uuid;

use crate::encoding::{END, Encoding, Tail, Tails};
use crate::interrupt::{Interrupter, Interruptible};
use crate::lending::Packed;
use crate::rows::{BYTES, CHUNKS, Rows, own};
use crate::server::Permit;
use crate::session::Session;
use crate::store::Held;

/// Why a query ends before its result does.
#[derive(Clone, Debug)]
pub(crate) enum Stop {
    Cancelled,
    Expired,
    /// The frame is to be sent when all is dropped.
    Finalized(Frame),
    /// The client is.
    Gone,
}

/// What others may see and do while a query runs.
#[derive(Debug)]
pub(crate) struct Query {
    request: RequestId,
    interrupt: Arc<Interrupter>,
    progress: Mutex<Progress>,
}

#[derive(Debug, Default)]
struct Progress {
    cursor: Option<CursorId>,
    stop: Option<Stop>,
    batches: u64,
    rows: u64,
    bytes: u64,
    /// Of columns, by this program, before they were sent.
    copied: u64,
    end: Option<String>,
}

impl Query {
    pub(crate) fn new(request: RequestId, interrupt: Arc<Interrupter>) -> Self {
        Self { request, interrupt, progress: Mutex::default() }
    }

    /// Interrupts DuckDB, too. Only finalizing and the end of the connection replace an earlier reason.
    pub(crate) fn stop(&self, why: Stop) {
        self.update(|progress| {
            if progress.stop.is_none() || matches!(why, Stop::Finalized(_) | Stop::Gone) {
                progress.stop = Some(why);
            }
        });
        self.interrupt.interrupt();
    }

    /// Nothing more can be sent.
    fn lost(&self, error: &anyhow::Error) {
        self.update(|progress| {
            progress.end = Some(format!("client gone: {error}"));
            progress.stop = Some(Stop::Gone);
        });
    }

    pub(crate) fn stopped(&self) -> Option<Stop> {
        self.update(|progress| progress.stop.clone())
    }

    /// For the log.
    pub(crate) fn summary(&self) -> String {
        self.update(|progress| {
            let Progress { cursor, stop, batches, rows, bytes, copied, end } = progress;
            let cursor = cursor.map_or_else(|| "no cursor".to_owned(), |cursor| format!("cursor {cursor}"));
            let end = match (end.as_deref(), stop) {
                (Some(end), _) => end,
                (None, Some(Stop::Cancelled)) => "cancelled",
                (None, Some(Stop::Expired)) => "expired",
                (None, Some(Stop::Finalized(_))) => "finalized",
                (None, Some(Stop::Gone)) => "client gone",
                (None, None) => "ended",
            };
            format!("{cursor}: {end}; sent {batches} batches, {rows} rows, {bytes} bytes, {copied} copied")
        })
    }

    fn update<T>(&self, change: impl FnOnce(&mut Progress) -> T) -> T {
        change(&mut self.progress.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Runs a query to its end, and answers its INIT. Drops `connection`, and with it all that DuckDB has of the query. The last frame is
/// sent when others may run: who gets it may ask again at once.
pub(crate) fn run(
    session: &Session,
    query: &Arc<Query>,
    connection: Interruptible,
    sql: &str,
    encoding: Encoding,
    permit: Permit,
) {
    let mut cursor = None;
    let outcome = stream(session, query, &connection, sql, encoding, &mut cursor);
    drop(connection);
    drop(permit);
    let mut state = session.state();
    if encoding == Encoding::Stream && cursor.is_some() {
        // A failure closes the connection, as below.
        let _ = session.send_tail(&mut state, &END);
    }
    let end = match (outcome, query.stopped(), cursor) {
        // Nobody listens any more; or the cursor's end was sent when it expired.
        (_, Some(Stop::Finalized(_) | Stop::Gone | Stop::Expired), _) => None,
        (Ok(()), None, Some(cursor)) => {
            query.update(|progress| progress.end = Some("done".to_owned()));
            state.books.done(cursor)
        }
        (outcome, stopped, cursor) => {
            let failure = if stopped.is_some() {
                Failure { code: Code::Cancelled, message: "cancelled".to_owned() }
            } else {
                outcome.err().unwrap_or_else(|| own("the query has no cursor"))
            };
            if stopped.is_none() {
                query.update(|progress| {
                    progress.end = Some(format!("failed: {}", one_line(&failure.message)))
                });
            }
            match cursor {
                Some(cursor) => state.books.failed(cursor, failure),
                None => state.books.refused(query.request, failure).ok(),
            }
        }
    };
    if let Some(frame) = end {
        // A failure closes the connection, which its reader finds out.
        let _ = session.send(&mut state, &frame, &Tail::None);
    }
}

/// Ends without an error also when the query was stopped.
fn stream(
    session: &Session,
    query: &Arc<Query>,
    connection: &Connection,
    sql: &str,
    encoding: Encoding,
    cursor: &mut Option<CursorId>,
) -> Result<(), Failure> {
    let mut rows = Rows::answer(&session.server, connection, sql)?;
    let mut tails = Tails::new(encoding, rows.schema()).map_err(|error| own(&error.to_string()))?;

    let id = CursorId(*Uuid::new_v4().as_bytes());
    {
        let mut state = session.state();
        let frame = state.books.opened(query.request, id, session.server.now());
        let frame = frame.map_err(|error| own(&error.to_string()))?;
        query.update(|progress| progress.cursor = Some(id));
        session.name(&mut state, query, id);
        *cursor = Some(id);
        let schema = tails.take();
        let sent = match encoding {
            Encoding::Stream => session
                .send(&mut state, &frame, &Tail::None)
                .and_then(|()| session.send_tail(&mut state, &schema)),
            _ => session.send(&mut state, &frame, &schema),
        };
        if let Err(error) = sent {
            query.lost(&error);
            return Ok(());
        }
        state.books.sent(id, session.server.now());
    }

    let mut frames = Frames::new(session, rows.held(), encoding);
    while let Some(packed) = frames.next(query, &mut rows, &mut tails)? {
        // A plain stream has no credits: the connection itself says when it is full.
        let credit = session.wait(query, |state| match encoding {
            Encoding::Stream => Some(None),
            _ => state.books.batch(id, session.server.now()).map(Some),
        });
        let Some((mut state, frame)) = credit else {
            if query.stopped().is_none() {
                query.lost(&anyhow::anyhow!("the connection is closed"));
            }
            return Ok(());
        };
        let sent = match frame {
            Some(frame) => {
                let (frame, tail) = packed.announced(frame);
                session.send(&mut state, &frame, tail)
            }
            None => session.send_tail(&mut state, packed.tail()),
        };
        if let Err(error) = sent {
            query.lost(&error);
            return Ok(());
        }
        state.books.sent(id, session.server.now());
        drop(state);
        query.update(|progress| {
            progress.batches += 1;
            progress.rows += packed.rows;
            progress.bytes += packed.bytes() as u64;
        });
    }
    Ok(())
}

/// What is sent for a result.
struct Frames<'a> {
    session: &'a Session,
    /// The client takes loans.
    lends: bool,
    /// Frames of an earlier answer, of which so many have been taken.
    again: Option<(Arc<[Arc<Packed>]>, usize)>,
    /// Those of this answer, for later ones.
    kept: Option<(Arc<Held>, Vec<Arc<Packed>>)>,
}

impl<'a> Frames<'a> {
    fn new(session: &'a Session, held: Option<&Arc<Held>>, encoding: Encoding) -> Self {
        let lends = encoding == Encoding::Scatter && session.lends();
        let mut frames = Self { session, lends, again: None, kept: None };
        let store = session.server.store.as_ref().filter(|store| store.lends_again && lends);
        if let (Some(store), Some(held)) = (store, held) {
            match session.again.find(store, held) {
                Some(earlier) => frames.again = Some((earlier, 0)),
                None => frames.kept = Some((held.clone(), Vec::new())),
            }
        }
        frames
    }

    /// None at the end, and if the query was stopped.
    fn next(
        &mut self,
        query: &Query,
        rows: &mut Rows<'_>,
        tails: &mut Tails,
    ) -> Result<Option<Arc<Packed>>, Failure> {
        if let Some((frames, taken)) = &mut self.again {
            *taken += 1;
            return Ok(frames.get(*taken - 1).cloned());
        }
        let count = fill(query, rows, tails)?;
        if query.stopped().is_some() {
            return Ok(None);
        }
        if count == 0 {
            if let (Some((held, frames)), Some(store)) = (self.kept.take(), &self.session.server.store) {
                self.session.again.insert(store, held, frames);
            }
            return Ok(None);
        }
        let mut packed = Packed::new(tails.take(), count);
        // A result is lent again as a whole: not if the connection was still on TCP when it began.
        if self.lends && !self.session.make_lendable(&mut packed) {
            self.kept = None;
        }
        query.update(|progress| progress.copied += packed.copied_bytes() as u64);
        let packed = Arc::new(packed);
        if let Some((_, frames)) = &mut self.kept {
            frames.push(packed.clone());
        }
        Ok(Some(packed))
    }
}

/// Fetches batches for one frame. Returns their rows, 0 at the end.
fn fill(query: &Query, rows: &mut Rows<'_>, tails: &mut Tails) -> Result<u64, Failure> {
    let mut count = 0;
    for _ in 0..CHUNKS {
        if query.stopped().is_some() || tails.len() >= BYTES {
            break;
        }
        let Some(batch) = rows.next()? else { break };
        tails.push(&batch).map_err(|error| own(&error.to_string()))?;
        count += batch.num_rows() as u64;
    }
    Ok(count)
}

fn one_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

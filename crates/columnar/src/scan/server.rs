//! A server's books of one client: its cursors, their credits, and when they expire.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use crate::scan::{Code, CursorId, Failure, Frame, RequestId, ScanError};

/// What one client may hold.
#[derive(Clone, Copy, Debug)]
pub struct ServerLimits {
    /// Cursors, and INITs without an answer.
    pub cursors: usize,
    /// How long a cursor may wait for its client.
    pub idle: Duration,
}

impl Default for ServerLimits {
    /// 16 cursors, 5 minutes.
    fn default() -> Self {
        Self { cursors: 16, idle: Duration::from_secs(300) }
    }
}

/// What the server has to do about a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start a query, then [`Server::opened`] or [`Server::refused`].
    Open { request: RequestId, dataset: String, sql: String },
    /// There are credits: send batches.
    Resume(CursorId),
    /// Interrupt the query, then [`Server::failed`] or [`Server::done`].
    Interrupt(CursorId),
    /// Drop the query and all that it holds, then send this frame.
    Close(CursorId, Frame),
    /// Only send this frame: the client has as many cursors as it may.
    Refuse(Frame),
    /// Nothing.
    None,
}

/// One end of one connection. Frames that it returns are to be sent in that order.
#[derive(Debug)]
pub struct Server {
    limits: ServerLimits,
    requests: HashSet<RequestId>,
    cursors: HashMap<CursorId, Cursor>,
    lends: bool,
}

#[derive(Debug)]
struct Cursor {
    credits: u64,
    sent: u64,
    /// DONE or FAILED was sent.
    ended: bool,
    /// The client's last frame, or the end of what was sent last.
    used: Duration,
}

impl Server {
    pub fn new(limits: ServerLimits) -> Self {
        Self { limits, requests: HashSet::new(), cursors: HashMap::new(), lends: false }
    }

    /// Enters a frame of the client. `now` is the time since any fixed moment.
    ///
    /// # Errors
    ///
    /// Frames that only a server sends, a request number that waits for an answer already, or a cursor that the client does
    /// not have.
    pub fn received(&mut self, frame: Frame, now: Duration) -> Result<Action, ScanError> {
        match frame {
            Frame::Init { request, dataset, sql } => {
                if self.requests.contains(&request) {
                    return Err(ScanError::Unexpected);
                }
                let limit = self.limits.cursors;
                if self.cursors.len() + self.requests.len() >= limit {
                    let message = format!("a client may have {limit} cursors");
                    let failure = Failure { code: Code::Limit, message };
                    return Ok(Action::Refuse(Frame::Refused { request, failure }));
                }
                self.requests.insert(request);
                Ok(Action::Open { request, dataset, sql })
            }
            Frame::Iterate { cursor: id, credits } => {
                let cursor = self.touch(id, now)?;
                cursor.credits = cursor.credits.saturating_add(credits.into());
                Ok(if cursor.ended || credits == 0 { Action::None } else { Action::Resume(id) })
            }
            Frame::Cancel { cursor: id } => {
                Ok(if self.touch(id, now)?.ended { Action::None } else { Action::Interrupt(id) })
            }
            Frame::AcceptLoans => {
                self.lends = true;
                Ok(Action::None)
            }
            Frame::Finalize { cursor: id } => {
                self.touch(id, now)?;
                self.cursors.remove(&id);
                Ok(Action::Close(id, Frame::Finalized { cursor: id }))
            }
            _ => Err(ScanError::Unexpected),
        }
    }

    /// Answers INIT; the schema message is the tail.
    ///
    /// # Errors
    ///
    /// [`ScanError::Unexpected`] if there is no such request, or a cursor of this number already.
    pub fn opened(&mut self, request: RequestId, id: CursorId, now: Duration) -> Result<Frame, ScanError> {
        if self.cursors.contains_key(&id) || !self.requests.remove(&request) {
            return Err(ScanError::Unexpected);
        }
        self.cursors.insert(id, Cursor { credits: 0, sent: 0, ended: false, used: now });
        Ok(Frame::Opened { request, cursor: id })
    }

    /// Answers INIT with an error.
    ///
    /// # Errors
    ///
    /// [`ScanError::Unexpected`] if there is no such request.
    pub fn refused(&mut self, request: RequestId, failure: Failure) -> Result<Frame, ScanError> {
        if !self.requests.remove(&request) {
            return Err(ScanError::Unexpected);
        }
        Ok(Frame::Refused { request, failure })
    }

    /// The next batch, whose messages are the tail; none without credit or after the end. To be asked before the batch is
    /// computed.
    pub fn batch(&mut self, id: CursorId, now: Duration) -> Option<Frame> {
        let cursor = self.cursors.get_mut(&id).filter(|cursor| !cursor.ended)?;
        cursor.credits = cursor.credits.checked_sub(1)?;
        cursor.used = now;
        cursor.sent += 1;
        Some(Frame::Batch { cursor: id, number: cursor.sent - 1 })
    }

    /// OPENED or a batch is with the client, or on its way: from now on the cursor waits for its client, which may have taken long
    /// to take that.
    pub fn sent(&mut self, id: CursorId, now: Duration) {
        if let Some(cursor) = self.cursors.get_mut(&id) {
            cursor.used = now;
        }
    }

    /// Whether the client takes bodies that are lent: then [`Frame::Batch`] may become [`Frame::Lent`].
    pub fn lends(&self) -> bool {
        self.lends
    }

    /// None after the end.
    pub fn progress(&self, id: CursorId, rows: u64, permille: Option<u16>) -> Option<Frame> {
        self.cursors.get(&id).filter(|cursor| !cursor.ended)?;
        Some(Frame::Progress { cursor: id, rows, permille })
    }

    /// There are no more batches. None if the cursor has ended already, or is gone.
    pub fn done(&mut self, id: CursorId) -> Option<Frame> {
        let batches = self.end(id)?;
        Some(Frame::Done { cursor: id, batches })
    }

    /// As [`Server::done`], with an error.
    pub fn failed(&mut self, id: CursorId, failure: Failure) -> Option<Frame> {
        self.end(id)?;
        Some(Frame::Failed { cursor: id, failure })
    }

    /// Cursors that have waited for their client for too long, without credit. Their queries are to be dropped, and the frames
    /// sent; the client still finalizes them.
    pub fn expired(&mut self, now: Duration) -> Vec<(CursorId, Frame)> {
        let idle = self.limits.idle;
        let waits =
            |cursor: &Cursor| !cursor.ended && cursor.credits == 0 && now.saturating_sub(cursor.used) >= idle;
        let mut ids: Vec<_> =
            self.cursors.iter().filter(|(_, cursor)| waits(cursor)).map(|(id, _)| *id).collect();
        ids.sort_unstable();
        let message = format!("no request for {} s", idle.as_secs());
        let failure = Failure { code: Code::Expired, message };
        ids.into_iter().filter_map(|id| Some((id, self.failed(id, failure.clone())?))).collect()
    }

    /// Whether an INIT has no answer yet.
    pub fn has_requests(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Cursors of the client, for one that has gone: their queries are to be dropped.
    pub fn cursors(&self) -> impl Iterator<Item = CursorId> {
        self.cursors.keys().copied()
    }

    fn touch(&mut self, id: CursorId, now: Duration) -> Result<&mut Cursor, ScanError> {
        let cursor = self.cursors.get_mut(&id).ok_or(ScanError::UnknownCursor(id))?;
        cursor.used = now;
        Ok(cursor)
    }

    fn end(&mut self, id: CursorId) -> Option<u64> {
        let cursor = self.cursors.get_mut(&id).filter(|cursor| !cursor.ended)?;
        cursor.ended = true;
        Some(cursor.sent)
    }
}

//! A client's books: which requests and cursors it has, and what the server may send.

use std::collections::{HashMap, HashSet};

use crate::scan::{CursorId, Frame, RequestId, ScanError};

/// One end of one connection. Frames that it returns are to be sent in that order.
#[derive(Debug, Default)]
pub struct Client {
    last_request: u32,
    requests: HashSet<RequestId>,
    cursors: HashMap<CursorId, Cursor>,
    accepts_loans: bool,
}

#[derive(Debug, Default)]
struct Cursor {
    /// Batches that the server may still send.
    credits: u64,
    received: u64,
    /// DONE or FAILED has come.
    ended: bool,
    finalizing: bool,
}

impl Client {
    /// Asks for a cursor over the result of `sql`.
    pub fn init(&mut self, dataset: &str, sql: &str) -> (RequestId, Frame) {
        self.last_request = self.last_request.wrapping_add(1);
        let request = RequestId(self.last_request);
        self.requests.insert(request);
        (request, Frame::Init { request, dataset: dataset.to_owned(), sql: sql.to_owned() })
    }

    /// Allows `credits` more batches.
    ///
    /// # Errors
    ///
    /// [`ScanError::UnknownCursor`], also after [`Client::finalize`].
    pub fn iterate(&mut self, cursor: CursorId, credits: u32) -> Result<Frame, ScanError> {
        self.live(cursor)?.credits += u64::from(credits);
        Ok(Frame::Iterate { cursor, credits })
    }

    /// Ends a query. DONE or FAILED will come, batches may come before.
    ///
    /// # Errors
    ///
    /// [`ScanError::UnknownCursor`].
    pub fn cancel(&mut self, cursor: CursorId) -> Result<Frame, ScanError> {
        self.live(cursor)?;
        Ok(Frame::Cancel { cursor })
    }

    /// Has the server forget a cursor, at its end or before. Frames of it may come until FINALIZED.
    ///
    /// # Errors
    ///
    /// [`ScanError::UnknownCursor`].
    pub fn finalize(&mut self, cursor: CursorId) -> Result<Frame, ScanError> {
        self.live(cursor)?.finalizing = true;
        Ok(Frame::Finalize { cursor })
    }

    /// Tells the server that bodies may be lent, from now on.
    pub fn accept_loans(&mut self) -> Frame {
        self.accepts_loans = true;
        Frame::AcceptLoans
    }

    /// Batches of a cursor that are allowed and have not come.
    pub fn credits(&self, cursor: CursorId) -> u64 {
        self.cursors.get(&cursor).map_or(0, |cursor| cursor.credits)
    }

    /// Enters a frame of the server, before its tail is read.
    ///
    /// # Errors
    ///
    /// The frame belongs to nothing that was asked for, exceeds the credits, or comes twice or too late.
    pub fn received(&mut self, frame: &Frame) -> Result<(), ScanError> {
        match *frame {
            Frame::Opened { request, cursor } => {
                let new = self.requests.remove(&request) && !self.cursors.contains_key(&cursor);
                if !new {
                    return Err(ScanError::Unexpected);
                }
                self.cursors.insert(cursor, Cursor::default());
            }
            Frame::Refused { request, .. } if self.requests.remove(&request) => {}
            Frame::Lent { .. } if !self.accepts_loans => return Err(ScanError::Unexpected),
            Frame::Batch { cursor: id, number } | Frame::Lent { cursor: id, number, .. } => {
                let cursor = self.running(id)?;
                if cursor.credits == 0 || number != cursor.received {
                    return Err(ScanError::Credits(id));
                }
                cursor.credits -= 1;
                cursor.received += 1;
            }
            Frame::Progress { cursor, .. } => {
                self.running(cursor)?;
            }
            Frame::Done { cursor, batches } => {
                let cursor = self.running(cursor)?;
                if batches != cursor.received {
                    return Err(ScanError::Unexpected);
                }
                cursor.ended = true;
            }
            Frame::Failed { cursor, .. } => self.running(cursor)?.ended = true,
            Frame::Finalized { cursor } if self.cursors.get(&cursor).is_some_and(|c| c.finalizing) => {
                self.cursors.remove(&cursor);
            }
            _ => return Err(ScanError::Unexpected),
        }
        Ok(())
    }

    fn live(&mut self, id: CursorId) -> Result<&mut Cursor, ScanError> {
        self.cursors.get_mut(&id).filter(|cursor| !cursor.finalizing).ok_or(ScanError::UnknownCursor(id))
    }

    fn running(&mut self, id: CursorId) -> Result<&mut Cursor, ScanError> {
        let cursor = self.cursors.get_mut(&id).ok_or(ScanError::UnknownCursor(id))?;
        if cursor.ended { Err(ScanError::Unexpected) } else { Ok(cursor) }
    }
}

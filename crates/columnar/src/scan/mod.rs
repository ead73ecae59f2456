//! The scan protocol: a query's result as a cursor whose batches are pushed as far as the client has given credit.
//!
//! ```text
//!  client                                     server
//!  HELLO ────────────────────────────────────►
//!        ◄──────────────────────────────────── HELLO
//!  INIT request, dataset, SQL ───────────────► starts the query
//!        ◄──────────────────────────────────── OPENED request, cursor + schema   or REFUSED request, why
//!  ITERATE cursor, 4 credits ────────────────►
//!        ◄──────────────────────────────────── BATCH 0, BATCH 1, PROGRESS, BATCH 2, BATCH 3
//!  ITERATE cursor, 2 credits ────────────────►
//!        ◄──────────────────────────────────── BATCH 4, DONE   or FAILED why
//!  FINALIZE cursor ──────────────────────────►
//!        ◄──────────────────────────────────── FINALIZED
//! ```
//!
//! A client that has said ACCEPT LOANS may get LENT in place of BATCH: the bodies are in memory that the transport lends.
//!
//! Any number of cursors share a connection. CANCEL ends a query early; the server answers with FAILED, or with DONE if that
//! was on its way. Only FINALIZE forgets a cursor, and only that one. Errors of a cursor are frames; what breaks the
//! protocol is a [`ScanError`], after which the connection is closed.
//!
//! Nothing here does I/O: [`Header`] and [`Frame`] are bytes, [`Client`] and [`Server`] keep the books of one connection. The
//! byte layout is in `docs/wire-scan.md`.

mod client;
mod frame;
mod server;

use std::fmt;

use thiserror::Error;

pub use client::Client;
pub use frame::{Code, Failure, Frame, FrameLimits, HEADER, Header};
pub use server::{Action, Server, ServerLimits};

/// The version that this crate speaks.
pub const VERSION: u16 = 2;

/// A cursor's UUID, made up by the server so that nobody else can guess it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CursorId(pub [u8; 16]);

impl fmt::Display for CursorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            let dash = if matches!(index, 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

/// Numbers a client's INITs, so that it knows the answers apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(pub u32);

/// How the other end, or the caller, broke the protocol.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScanError {
    #[error("the other end does not speak the scan protocol")]
    Magic,
    #[error("the other end speaks versions {lowest} to {highest}, this one {VERSION}")]
    Version { lowest: u16, highest: u16 },
    #[error("unknown kind of frame: {0}")]
    Kind(u8),
    #[error("a frame's reserved bytes are not zero")]
    Reserved,
    #[error("{actual} bytes of a frame; the limit is {limit}")]
    TooLarge { actual: u64, limit: u64 },
    #[error("a frame is shorter or longer than its contents")]
    Length,
    #[error("a text is not UTF-8")]
    Utf8,
    #[error("a frame that does not belong here")]
    Unexpected,
    #[error("no such cursor: {0}")]
    UnknownCursor(CursorId),
    #[error("a batch beyond the credits of cursor {0}, or not the next one")]
    Credits(CursorId),
}

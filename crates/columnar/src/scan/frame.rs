//! Frames as bytes: a header of 16 bytes, a head, and for two kinds a tail of Arrow IPC messages that is not looked into.

use crate::scan::{CursorId, RequestId, ScanError, VERSION};

/// Bytes of a [`Header`].
pub const HEADER: usize = 16;

/// Bytes of a failure's message that are told: a database may put any value into it.
const MESSAGE: usize = 64 << 10;

const MAGIC: [u8; 8] = *b"thallusq";

/// Why a request or a cursor failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The database refused the SQL or failed in it; the message is its own.
    Query,
    Dataset,
    /// Too many cursors.
    Limit,
    Cancelled,
    /// The client neither asked for more nor finalized for too long.
    Expired,
    /// One that this version does not know, or the server's own trouble (0).
    Other(u16),
}

impl Code {
    fn number(self) -> u16 {
        match self {
            Self::Query => 1,
            Self::Dataset => 2,
            Self::Limit => 3,
            Self::Cancelled => 4,
            Self::Expired => 5,
            Self::Other(number) => number,
        }
    }

    fn of(number: u16) -> Self {
        match number {
            1 => Self::Query,
            2 => Self::Dataset,
            3 => Self::Limit,
            4 => Self::Cancelled,
            5 => Self::Expired,
            other => Self::Other(other),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub code: Code,
    pub message: String,
}

/// A frame without its tail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The first in each direction: the versions that its sender speaks.
    Hello {
        lowest: u16,
        highest: u16,
    },
    Init {
        request: RequestId,
        dataset: String,
        sql: String,
    },
    /// Allows so many more batches.
    Iterate {
        cursor: CursorId,
        credits: u32,
    },
    Finalize {
        cursor: CursorId,
    },
    Cancel {
        cursor: CursorId,
    },
    /// The client takes bodies that are lent, from now on.
    AcceptLoans,
    /// The tail is the schema message.
    Opened {
        request: RequestId,
        cursor: CursorId,
    },
    Refused {
        request: RequestId,
        failure: Failure,
    },
    /// The tail is one or more record batches, each behind the dictionaries that are new. Frames are numbered from 0.
    Batch {
        cursor: CursorId,
        number: u64,
    },
    /// As a batch, but the tail has only the headers of the messages: their bodies lie one after the other, `bytes` in
    /// all, in memory that the transport lends under `handle` (`thallus.h`). The client takes it, whatever becomes of the cursor.
    Lent {
        cursor: CursorId,
        number: u64,
        bytes: u64,
        handle: [u8; 32],
    },
    /// Rows read so far; thousandths of the query done, if known.
    Progress {
        cursor: CursorId,
        rows: u64,
        permille: Option<u16>,
    },
    Done {
        cursor: CursorId,
        batches: u64,
    },
    Failed {
        cursor: CursorId,
        failure: Failure,
    },
    Finalized {
        cursor: CursorId,
    },
}

/// The beginning of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    kind: u8,
    /// Bytes of the head.
    pub head: usize,
    /// Bytes of the tail.
    pub tail: u64,
}

/// What a frame may ask the other end to hold.
#[derive(Clone, Copy, Debug)]
pub struct FrameLimits {
    pub head: usize,
    pub tail: u64,
}

impl Default for FrameLimits {
    /// 1 MiB of head, which holds SQL and messages; 4 GiB of tail.
    fn default() -> Self {
        Self { head: 1 << 20, tail: 4 << 30 }
    }
}

const HELLO: u8 = 0;
const INIT: u8 = 1;
const ITERATE: u8 = 2;
const FINALIZE: u8 = 3;
const CANCEL: u8 = 4;
const ACCEPT_LOANS: u8 = 5;
const OPENED: u8 = 16;
const REFUSED: u8 = 17;
const BATCH: u8 = 18;
const PROGRESS: u8 = 19;
const DONE: u8 = 20;
const FAILED: u8 = 21;
const FINALIZED: u8 = 22;
const LENT: u8 = 23;

/// PROGRESS: thousandths are not known.
const UNKNOWN: u16 = u16::MAX;

impl Header {
    /// # Errors
    ///
    /// An unknown kind, reserved bytes, lengths above `limits`, a tail where there is none.
    pub fn parse(bytes: &[u8; HEADER], limits: &FrameLimits) -> Result<Self, ScanError> {
        let mut fields = Fields(bytes);
        let [kind, reserved @ ..] = fields.array::<4>()?;
        if !matches!(kind, HELLO..=ACCEPT_LOANS | OPENED..=LENT) {
            return Err(ScanError::Kind(kind));
        }
        if reserved != [0; 3] {
            return Err(ScanError::Reserved);
        }
        let head = fields.u32()?;
        let tail = fields.u64()?;
        let limit = limits.head as u64;
        if u64::from(head) > limit {
            return Err(ScanError::TooLarge { actual: head.into(), limit });
        }
        let limit = if matches!(kind, OPENED | BATCH | LENT) { limits.tail } else { 0 };
        if tail > limit {
            return Err(ScanError::TooLarge { actual: tail, limit });
        }
        Ok(Self { kind, head: head as usize, tail })
    }
}

impl Frame {
    /// Header and head. The caller sends `tail` bytes behind them, which only OPENED, BATCH and LENT have.
    ///
    /// # Errors
    ///
    /// [`ScanError::TooLarge`] for texts of 4 GiB.
    pub fn encode(&self, tail: u64) -> Result<Vec<u8>, ScanError> {
        let mut bytes = vec![0; HEADER];
        let kind = match self {
            Self::Hello { lowest, highest } => {
                bytes.extend(MAGIC);
                bytes.extend(lowest.to_le_bytes());
                bytes.extend(highest.to_le_bytes());
                HELLO
            }
            Self::Init { request, dataset, sql } => {
                bytes.extend(request.0.to_le_bytes());
                bytes.extend(length(dataset)?.to_le_bytes());
                bytes.extend(dataset.as_bytes());
                bytes.extend(sql.as_bytes());
                INIT
            }
            Self::Iterate { cursor, credits } => {
                bytes.extend(cursor.0);
                bytes.extend(credits.to_le_bytes());
                ITERATE
            }
            Self::Finalize { cursor } => with_cursor(&mut bytes, cursor, FINALIZE),
            Self::Cancel { cursor } => with_cursor(&mut bytes, cursor, CANCEL),
            Self::AcceptLoans => ACCEPT_LOANS,
            Self::Opened { request, cursor } => {
                bytes.extend(request.0.to_le_bytes());
                with_cursor(&mut bytes, cursor, OPENED)
            }
            Self::Refused { request, failure } => {
                bytes.extend(request.0.to_le_bytes());
                with_failure(&mut bytes, failure, REFUSED)
            }
            Self::Batch { cursor, number } => {
                bytes.extend(cursor.0);
                bytes.extend(number.to_le_bytes());
                BATCH
            }
            Self::Lent { cursor, number, bytes: lent, handle } => {
                bytes.extend(cursor.0);
                bytes.extend(number.to_le_bytes());
                bytes.extend(lent.to_le_bytes());
                bytes.extend(handle);
                LENT
            }
            Self::Progress { cursor, rows, permille } => {
                bytes.extend(cursor.0);
                bytes.extend(rows.to_le_bytes());
                bytes.extend(permille.map_or(UNKNOWN, |permille| permille.min(1000)).to_le_bytes());
                PROGRESS
            }
            Self::Done { cursor, batches } => {
                bytes.extend(cursor.0);
                bytes.extend(batches.to_le_bytes());
                DONE
            }
            Self::Failed { cursor, failure } => {
                bytes.extend(cursor.0);
                with_failure(&mut bytes, failure, FAILED)
            }
            Self::Finalized { cursor } => with_cursor(&mut bytes, cursor, FINALIZED),
        };
        let actual = bytes.len() - HEADER;
        let too_large = ScanError::TooLarge { actual: actual as u64, limit: u32::MAX.into() };
        let head = u32::try_from(actual).map_err(|_| too_large)?;
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&head.to_le_bytes());
        bytes[8..HEADER].copy_from_slice(&tail.to_le_bytes());
        Ok(bytes)
    }

    /// The frame whose head follows `header`.
    ///
    /// # Errors
    ///
    /// A head that is too short or too long for its kind, or holds texts that are not UTF-8.
    pub fn parse(header: &Header, head: &[u8]) -> Result<Self, ScanError> {
        if head.len() != header.head {
            return Err(ScanError::Length);
        }
        let mut fields = Fields(head);
        let frame = match header.kind {
            HELLO => {
                if fields.array()? != MAGIC {
                    return Err(ScanError::Magic);
                }
                Self::Hello { lowest: fields.u16()?, highest: fields.u16()? }
            }
            INIT => {
                let request = RequestId(fields.u32()?);
                let dataset = fields.u32()?;
                Self::Init { request, dataset: fields.text(dataset as usize)?, sql: fields.rest()? }
            }
            ITERATE => Self::Iterate { cursor: fields.cursor()?, credits: fields.u32()? },
            FINALIZE => Self::Finalize { cursor: fields.cursor()? },
            CANCEL => Self::Cancel { cursor: fields.cursor()? },
            ACCEPT_LOANS => Self::AcceptLoans,
            OPENED => Self::Opened { request: RequestId(fields.u32()?), cursor: fields.cursor()? },
            REFUSED => Self::Refused { request: RequestId(fields.u32()?), failure: fields.failure()? },
            BATCH => Self::Batch { cursor: fields.cursor()?, number: fields.u64()? },
            LENT => Self::Lent {
                cursor: fields.cursor()?,
                number: fields.u64()?,
                bytes: fields.u64()?,
                handle: fields.array()?,
            },
            PROGRESS => {
                let (cursor, rows) = (fields.cursor()?, fields.u64()?);
                let permille = match fields.u16()? {
                    UNKNOWN => None,
                    permille if permille <= 1000 => Some(permille),
                    _ => return Err(ScanError::Reserved),
                };
                Self::Progress { cursor, rows, permille }
            }
            DONE => Self::Done { cursor: fields.cursor()?, batches: fields.u64()? },
            FAILED => Self::Failed { cursor: fields.cursor()?, failure: fields.failure()? },
            FINALIZED => Self::Finalized { cursor: fields.cursor()? },
            kind => return Err(ScanError::Kind(kind)),
        };
        if fields.0.is_empty() { Ok(frame) } else { Err(ScanError::Length) }
    }

    /// The first frame of this end.
    pub fn hello() -> Self {
        Self::Hello { lowest: VERSION, highest: VERSION }
    }

    /// Checks the first frame of the other end.
    ///
    /// # Errors
    ///
    /// No common version; another frame.
    pub fn check_hello(&self) -> Result<(), ScanError> {
        match *self {
            Self::Hello { lowest, highest } if (lowest..=highest).contains(&VERSION) => Ok(()),
            Self::Hello { lowest, highest } => Err(ScanError::Version { lowest, highest }),
            _ => Err(ScanError::Unexpected),
        }
    }
}

fn length(text: &str) -> Result<u32, ScanError> {
    let too_large = |_| ScanError::TooLarge { actual: text.len() as u64, limit: u32::MAX.into() };
    u32::try_from(text.len()).map_err(too_large)
}

fn with_cursor(bytes: &mut Vec<u8>, cursor: &CursorId, kind: u8) -> u8 {
    bytes.extend(cursor.0);
    kind
}

/// A message that would make the head too large is told in part.
fn with_failure(bytes: &mut Vec<u8>, failure: &Failure, kind: u8) -> u8 {
    let message = &failure.message;
    let end = message.floor_char_boundary(MESSAGE);
    bytes.extend(failure.code.number().to_le_bytes());
    bytes.extend(&message.as_bytes()[..end]);
    if end < message.len() {
        bytes.extend(" …".as_bytes());
    }
    kind
}

/// What of a head has not been read.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], ScanError> {
        self.0.split_off(..bytes).ok_or(ScanError::Length)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ScanError> {
        let (array, rest) = self.0.split_first_chunk().ok_or(ScanError::Length)?;
        self.0 = rest;
        Ok(*array)
    }

    fn u16(&mut self) -> Result<u16, ScanError> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, ScanError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, ScanError> {
        self.array().map(u64::from_le_bytes)
    }

    fn cursor(&mut self) -> Result<CursorId, ScanError> {
        self.array().map(CursorId)
    }

    fn text(&mut self, bytes: usize) -> Result<String, ScanError> {
        let text = self.take(bytes)?;
        std::str::from_utf8(text).map(str::to_owned).map_err(|_| ScanError::Utf8)
    }

    fn rest(&mut self) -> Result<String, ScanError> {
        self.text(self.0.len())
    }

    fn failure(&mut self) -> Result<Failure, ScanError> {
        Ok(Failure { code: Code::of(self.u16()?), message: self.rest()? })
    }
}

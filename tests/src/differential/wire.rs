//! What the two processes of a program are told, and what they answer: one message each, over a Unix socket that the
//! library leaves alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::program::Op;
use crate::calls::{Family, Fd};

/// What a process is to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Command {
    /// Listen, and say where.
    Listen(Family),
    /// Connect to where the other side listens.
    Connect(Family, u16),
    /// Take a connection.
    Accept,
    /// An operation.
    Do(Call),
    /// The same in a thread. The answer comes when it is done or sleeps.
    Start(Call),
    /// Wait until the thread's call is done or sleeps.
    Check,
    /// Wait until something has come; quietly, and with calls that the library sees only if it holds what has come.
    Settle { fd: Fd, wanted: Arrival },
    /// End.
    Quit,
}

/// An operation with what belongs to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Call {
    /// With the process's descriptors.
    pub(super) op: Op,
    /// Which stream is sent, and from where.
    pub(super) stream: Stream,
    /// Not to be made if the descriptor is not readable: it would wait.
    pub(super) guarded: bool,
    /// What [`Op::Poll`] asks about, or what is registered by [`Op::Control`].
    pub(super) fds: Vec<Fd>,
    /// The data of [`Op::Control`].
    pub(super) data: u64,
}

/// A place in a stream of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stream {
    /// Which stream.
    pub(super) seed: u64,
    /// Bytes before it.
    pub(super) at: u64,
}

/// What is waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Arrival {
    /// So many unread bytes, or more.
    pub(super) unread: u64,
    /// The peer's end of stream.
    pub(super) end: bool,
    /// The end of the connection.
    pub(super) hangup: bool,
    /// Room to write.
    pub(super) room: bool,
    /// The peer's process has ended without closing: not before the library knows.
    pub(super) sudden: bool,
}

/// What came of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Reply {
    /// The call's value, or its error.
    pub(super) value: i64,
    /// The error number, or 0.
    pub(super) error: i32,
    /// Of the bytes received.
    pub(super) digest: u64,
    /// What is ready, and how.
    pub(super) ready: Vec<(u64, u32)>,
    /// What else can be seen.
    pub(super) detail: String,
    /// SIGPIPE since the last answer.
    pub(super) pipe_signals: usize,
    /// Whether the call was not made, because it would have waited; or, of a thread, whether it waits.
    pub(super) waits: bool,
    /// Of [`Command::Check`]: the call that is done.
    pub(super) done: Option<Box<Reply>>,
}

/// Room for any message.
pub(super) const MESSAGE_ROOM: usize = 64 << 10;

/// Where forks ask to be told what to do, in the folder of their end.
pub(super) fn control_path(folder: &Path) -> PathBuf {
    folder.join("control")
}

/// Bytes `stream.at` and following of a stream. Its period is a prime, so that no power of two is one.
pub(super) fn bytes_of(stream: Stream, len: usize) -> Vec<u8> {
    static TABLES: Mutex<BTreeMap<u64, Arc<Vec<u8>>>> = Mutex::new(BTreeMap::new());
    let table = {
        let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(tables.entry(stream.seed).or_insert_with(|| Arc::new(period_of(stream.seed))))
    };
    let mut bytes = Vec::with_capacity(len);
    let mut at = (stream.at % PERIOD as u64) as usize;
    while bytes.len() < len {
        let piece = (PERIOD - at).min(len - bytes.len());
        bytes.extend_from_slice(&table[at..at + piece]);
        at = 0;
    }
    bytes
}

const PERIOD: usize = 65_521;

/// By xorshift64 (Marsaglia 2003).
fn period_of(seed: u64) -> Vec<u8> {
    let mut word = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let words = std::iter::repeat_with(|| {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        word.to_le_bytes()
    });
    words.flatten().take(PERIOD).collect()
}

/// A number that other bytes hardly have: FNV-1a over words of 8 bytes.
pub(super) fn digest(bytes: &[u8]) -> u64 {
    let words = bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    words.fold(0xcbf2_9ce4_8422_2325 ^ bytes.len() as u64, |hash, word| {
        let mixed = (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        mixed ^ (mixed >> 29)
    })
}

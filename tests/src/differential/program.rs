//! What a program of socket operations is, and how it is written down: one JSON value a line, first how it is run, then
//! its steps.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::calls::{Family, Fd};

/// One of the two ends of every connection of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum End {
    /// The end that accepts.
    Server,
    /// The end that connects.
    Client,
}

impl End {
    /// Both ends.
    pub const BOTH: [Self; 2] = [Self::Server, Self::Client];

    /// The end at the other side.
    pub fn other(self) -> Self {
        if self == Self::Server { Self::Client } else { Self::Server }
    }
}

/// A program: connections between two processes, and what is done to them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// How it is run.
    pub setting: Setting,
    /// What is done, one after the other.
    pub steps: Vec<Step>,
}

/// How a program is run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// The address family of its connections.
    pub family: Family,
    /// Calls before the library looks for the peer (`THALLUS_UPGRADE_AFTER`).
    pub upgrade_after: u32,
    /// The longest spin (`THALLUS_SPIN_US`), if not the default.
    pub spin: Option<u32>,
    /// For each connection, the requests and responses that come before the first step.
    pub warm_up: Vec<u32>,
    /// Whether the connections are without delay (`TCP_NODELAY`).
    pub without_delay: bool,
}

/// One operation of one process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// The end.
    pub end: End,
    /// Which of the processes of that end, in the order of their forks.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub process: usize,
    /// What it does.
    #[serde(rename = "do")]
    pub op: Op,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// An operation. In a program, each descriptor is a choice among those that the process has then; a process is told
/// the descriptors themselves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// The next bytes of the stream.
    Send { fd: Fd, len: usize, by: SendBy, flags: Vec<Flag> },
    /// Up to `len` bytes.
    Receive { fd: Fd, len: usize, by: ReceiveBy, flags: Vec<Flag> },
    /// All descriptors of the process, without waiting.
    Poll { by: PollBy, events: i16 },
    /// epoll_create1(2)
    NewSet,
    /// epoll_ctl(2)
    Control { set: Fd, fd: Fd, how: Control, events: u32 },
    /// epoll_wait(2), without waiting.
    Wait { set: Fd },
    /// shutdown(2)
    Shutdown { fd: Fd, how: How },
    /// close(2)
    Close { fd: Fd },
    /// dup(2)
    Dup { fd: Fd },
    /// dup2(2)
    Dup2 { fd: Fd, onto: Fd },
    /// setsockopt(2)
    SetOption { fd: Fd, option: SocketOption, value: i32 },
    /// getsockopt(2)
    GetOption { fd: Fd, option: SocketOption },
    /// fcntl(2) with `O_NONBLOCK`
    Nonblocking { fd: Fd, on: bool },
    /// ioctl(2) with `FIONREAD`
    Unread { fd: Fd },
    /// ioctl(2) with `SIOCOUTQ`
    Unsent { fd: Fd },
    /// getsockname(2) and getpeername(2)
    Addresses { fd: Fd },
    /// sendfile(2) of the next bytes of the stream.
    SendFile { fd: Fd, len: usize },
    /// splice(2) of the next bytes of the stream, from a pipe.
    Splice { fd: Fd, len: usize },
    /// A call that waits, made by a thread; without one to make it, and for ever where the call has a time limit.
    Start { op: Box<Op> },
    /// A signal for the thread of [`Op::Start`].
    Interrupt,
    /// Reads until all that was sent is read.
    Drain { fd: Fd },
    /// fork(2)
    Fork,
    /// exit(3)
    Exit,
    /// `kill -9`
    Kill,
}

/// How bytes are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SendBy {
    Send,
    Write,
    Sendto,
    /// writev(2) of three pieces, one of them empty.
    Writev,
    /// sendmsg(2) of two pieces.
    Sendmsg,
    /// sendmmsg(2) of two messages.
    Sendmmsg,
    /// The first half with `MSG_MORE`.
    More,
    /// Two halves under `TCP_CORK`.
    Corked,
}

/// How bytes are received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReceiveBy {
    Recv,
    Read,
    Recvfrom,
    /// readv(2) into three pieces, one of them empty.
    Readv,
    /// recvmsg(2) into two pieces.
    Recvmsg,
    /// recvmmsg(2) into two messages, without waiting.
    Recvmmsg,
    /// `__recv_chk`
    RecvChk,
    /// `__read_chk`
    ReadChk,
}

/// A flag of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Flag {
    DontWait,
    NoSignal,
    Peek,
    Trunc,
    WaitAll,
}

impl Flag {
    /// The kernel's value of several.
    pub fn bits(flags: &[Self]) -> i32 {
        flags.iter().fold(0, |bits, flag| {
            bits | match flag {
                Self::DontWait => libc::MSG_DONTWAIT,
                Self::NoSignal => libc::MSG_NOSIGNAL,
                Self::Peek => libc::MSG_PEEK,
                Self::Trunc => libc::MSG_TRUNC,
                Self::WaitAll => libc::MSG_WAITALL,
            }
        })
    }
}

/// How readiness is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PollBy {
    Poll,
    Ppoll,
    Select,
}

/// How a set is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Control {
    Add,
    Modify,
    Delete,
}

/// What is shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum How {
    Reading,
    Writing,
    Both,
}

/// An option of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SocketOption {
    /// `SO_ERROR`, which can only be read.
    Error,
    /// `SO_TYPE`, which can only be read.
    Type,
    /// `TCP_NODELAY`
    NoDelay,
    /// `SO_KEEPALIVE`
    KeepAlive,
    /// `SO_OOBINLINE`
    UrgentInline,
    /// `SO_RCVTIMEO` in milliseconds; 0 is for ever.
    ReceiveTimeout,
    /// `SO_LINGER` of no time.
    Linger,
}

impl SendBy {
    /// Whether the call takes flags.
    pub fn has_flags(self) -> bool {
        matches!(self, Self::Send | Self::Sendto | Self::Sendmsg | Self::Sendmmsg)
    }

    /// Whether the bytes may leave in several pieces.
    pub fn is_in_pieces(self) -> bool {
        matches!(self, Self::Sendmmsg | Self::More | Self::Corked)
    }
}

impl ReceiveBy {
    /// Whether the call takes flags.
    pub fn has_flags(self) -> bool {
        matches!(self, Self::Recv | Self::Recvfrom | Self::Recvmsg | Self::Recvmmsg | Self::RecvChk)
    }
}

impl Program {
    /// One line for the setting and each step.
    pub fn to_text(&self) -> String {
        let setting = serde_json::to_string(&self.setting);
        let steps = self.steps.iter().map(serde_json::to_string);
        let lines = std::iter::once(setting).chain(steps);
        lines.map(|line| line.expect("a program has no map with strange keys") + "\n").collect()
    }

    /// Reads what [`Self::to_text`] writes; lines that begin with # are remarks.
    ///
    /// # Errors
    /// If a line is neither.
    pub fn of_text(text: &str) -> Result<Self> {
        let mut lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
        let setting = lines.next().context("a program begins with its setting")?;
        let setting = serde_json::from_str(setting).with_context(|| setting.to_owned())?;
        let steps = lines.map(|line| serde_json::from_str(line).with_context(|| line.to_owned()));
        Ok(Self { setting, steps: steps.collect::<Result<_>>()? })
    }
}

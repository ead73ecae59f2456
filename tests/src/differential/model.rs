//! What is known of a program's connections while it runs: which descriptors there are, and how many bytes are where.

use std::collections::{BTreeMap, BTreeSet};

use super::program::{End, Flag, Op};
use super::wire::Stream;
use crate::calls::Fd;

/// What a descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Listener,
    Connection(usize),
    /// An epoll set, with a number of its own.
    Set(u32),
}

/// A process of an end.
#[derive(Clone, Debug, Default)]
pub(super) struct Actor {
    pub(super) fds: BTreeMap<Fd, Kind>,
    /// The descriptor that was closed last: it may have been given out again.
    pub(super) closed: Option<Fd>,
    pub(super) gone: bool,
    pub(super) killed: bool,
    /// What its thread does. A large write counts until it has been read: how soon it is done depends on buffers.
    pub(super) started: Option<Op>,
    /// Such a write is done.
    pub(super) has_written: bool,
}

/// One direction of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Flow {
    pub(super) sent: u64,
    pub(super) received: u64,
    /// More has been sent than buffers surely hold: how much of it is where depends on their sizes.
    pub(super) loose: bool,
    /// No more will be sent.
    pub(super) ended: bool,
    /// What counts, over `AF_UNIX`, of what has been sent since it was empty: at least what the kernel counts.
    pub(super) charge: u64,
}

/// A connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Connection {
    /// By the end that sends.
    pub(super) flows: [Flow; 2],
    pub(super) nonblocking: [bool; 2],
    pub(super) times_out: [bool; 2],
    pub(super) resets_at_close: [bool; 2],
    pub(super) closed: [bool; 2],
    /// Directions that an end has shut down: reading, writing.
    pub(super) shut: [[bool; 2]; 2],
    /// It has exchanged so much before the first step that both ends have left TCP, if they ever do.
    pub(super) warm: bool,
    /// It has been given back to the kernel's socket, if it had left that.
    pub(super) came_back: bool,
    /// An end has closed it with bytes unread, or asked for a reset.
    pub(super) reset: bool,
    /// Which edges an epoll set has reported is not known to be the same.
    pub(super) smeared: bool,
    /// What became of bytes depends on timing.
    pub(super) wild: bool,
}

#[derive(Debug, Default)]
pub(super) struct Model {
    /// The connections are of `AF_UNIX`: what one end shuts down is shut at the other at once, and nothing that is sent is
    /// ever answered by a reset.
    pub(super) is_unix: bool,
    pub(super) actors: [Vec<Actor>; 2],
    pub(super) connections: Vec<Connection>,
    /// How many epoll sets there have been.
    pub(super) sets: u32,
    /// Those in which room has been asked for by edges.
    pub(super) tell_of_room: BTreeSet<u32>,
    /// Those in which nothing has been asked for of a connection.
    pub(super) ask_for_nothing: BTreeSet<u32>,
    /// Registrations of connections: the set, the descriptor, the connection.
    pub(super) registered: BTreeSet<(u32, Fd, usize)>,
    /// Those that have been polled.
    pub(super) polled: BTreeSet<u32>,
}

/// A process: its end, and its place among those of the end.
pub(super) type Who = (End, usize);

impl Flow {
    pub(super) fn unread(&self) -> u64 {
        self.sent.saturating_sub(self.received)
    }

    /// [`Self::charge`] once `len` bytes more have been sent, in up to two messages.
    pub(super) fn charge_with(&self, len: u64) -> u64 {
        // A message is counted with the memory that its buffers take, as long as any byte of it is unread.
        let before = if self.unread() == 0 { 0 } else { self.charge };
        before + 2 * len + 2048
    }
}

impl Model {
    pub(super) fn actor(&self, who: Who) -> &Actor {
        &self.actors[who.0 as usize][who.1]
    }

    pub(super) fn actor_mut(&mut self, who: Who) -> &mut Actor {
        &mut self.actors[who.0 as usize][who.1]
    }

    /// The processes of an end that have not ended.
    pub(super) fn living(&self, end: End) -> Vec<Who> {
        let actors = self.actors[end as usize].iter().enumerate();
        actors.filter(|(_, actor)| !actor.gone).map(|(place, _)| (end, place)).collect()
    }

    /// A process of the end that has the connection, with its lowest descriptor; one whose thread waits, if there is one.
    pub(super) fn holder(&self, end: End, connection: usize) -> Option<(Who, Fd)> {
        let mut holders = self.living(end);
        holders.sort_by_key(|&who| self.actor(who).started.is_none());
        holders.into_iter().find_map(|who| {
            let fds = &self.actor(who).fds;
            let fd = fds.iter().find(|&(_, &kind)| kind == Kind::Connection(connection));
            fd.map(|(&fd, _)| (who, fd))
        })
    }

    pub(super) fn connection_of(&self, who: Who, fd: Fd) -> Option<usize> {
        match self.actor(who).fds.get(&fd) {
            Some(&Kind::Connection(connection)) => Some(connection),
            _ => None,
        }
    }

    /// The call in which a thread of the end waits.
    pub(super) fn started(&self, end: End) -> Option<(Who, &Op)> {
        let mut living = self.living(end).into_iter();
        living.find_map(|who| self.actor(who).started.as_ref().map(|op| (who, op)))
    }

    /// Whether a thread of `end` waits in a read until a buffer is full: then nobody knows where the bytes are.
    pub(super) fn fills_a_buffer(&self, end: End, connection: usize) -> bool {
        self.started(end).is_some_and(|(who, op)| {
            matches!(op, Op::Receive { fd, flags, .. }
                if flags.contains(&Flag::WaitAll) && self.connection_of(who, *fd) == Some(connection))
        })
    }

    /// Whether a thread of `end` waits in a read from this connection.
    pub(super) fn is_receiving(&self, end: End, connection: usize) -> bool {
        self.started(end).is_some_and(|(who, op)| {
            matches!(op, Op::Receive { fd, .. } if self.connection_of(who, *fd) == Some(connection))
        })
    }

    /// Whether a thread of `end` is in a large write to this connection, or was, and it has not been read.
    pub(super) fn is_sending(&self, end: End, connection: usize) -> bool {
        self.started(end).is_some_and(
            |(who, op)| matches!(op, Op::Send { fd, .. } if self.connection_of(who, *fd) == Some(connection)),
        )
    }

    /// Whether the process has an epoll set of which it can't be known whether it is readable.
    pub(super) fn has_vague_set(&self, who: Who) -> bool {
        let tells = |kind: &Kind| matches!(kind, Kind::Set(set) if self.tell_of_room.contains(set));
        self.actor(who).fds.values().any(tells)
    }

    /// Whether another process has the epoll set that `who` knows as `fd`.
    pub(super) fn is_shared(&self, who: Who, fd: Fd) -> bool {
        let set = self.actor(who).fds.get(&fd);
        self.living(who.0).into_iter().any(|other| {
            other != who && set.is_some_and(|set| self.actor(other).fds.values().any(|kind| kind == set))
        })
    }

    /// Whether `fd` is the process's last descriptor of a connection that another process has, and is registered in one of its sets.
    pub(super) fn leaves_a_registration(&self, who: Who, fd: Fd) -> bool {
        let Some(index) = self.connection_of(who, fd) else { return false };
        let kinds = || self.actor(who).fds.values();
        let has = |other: Who| self.actor(other).fds.values().any(|&kind| kind == Kind::Connection(index));
        kinds().filter(|&&kind| kind == Kind::Connection(index)).count() == 1
            && self.living(who.0).into_iter().any(|other| other != who && has(other))
            && self
                .registered
                .iter()
                .any(|&(set, _, of)| of == index && kinds().any(|&kind| kind == Kind::Set(set)))
    }

    /// Whether what the other end sends is answered by a reset, or refused.
    pub(super) fn is_deaf(&self, end: End, connection: usize) -> bool {
        let connection = &self.connections[connection];
        connection.closed[end as usize] || connection.shut[end as usize] == [true; 2]
    }

    /// The place in the stream that `end` sends.
    pub(super) fn stream(&self, connection: usize, end: End, at: u64) -> Stream {
        Stream { seed: 2 * connection as u64 + end as u64, at }
    }

    /// Turns the choices of an operation into descriptors that the process has.
    pub(super) fn resolve(&self, who: Who, op: &Op) -> Option<Op> {
        let actor = self.actor(who);
        let choose = |choice: Fd, wanted: &dyn Fn(Kind) -> bool| -> Option<Fd> {
            let fds: Vec<Fd> =
                actor.fds.iter().filter(|&(_, &kind)| wanted(kind)).map(|(&fd, _)| fd).collect();
            match usize::try_from(choice) {
                Ok(choice) if !fds.is_empty() => Some(fds[choice % fds.len()]),
                Ok(_) => None,
                Err(_) => actor.closed,
            }
        };
        let connection = |choice| choose(choice, &|kind| matches!(kind, Kind::Connection(_)));
        let set = |choice| choose(choice, &|kind| matches!(kind, Kind::Set(_)));
        let any = |choice| choose(choice, &|kind| kind != Kind::Listener);
        let mut op = op.clone();
        match &mut op {
            Op::Send { fd, .. }
            | Op::Receive { fd, .. }
            | Op::Shutdown { fd, .. }
            | Op::SetOption { fd, .. }
            | Op::GetOption { fd, .. }
            | Op::Nonblocking { fd, .. }
            | Op::Unread { fd }
            | Op::Unsent { fd }
            | Op::Addresses { fd }
            | Op::SendFile { fd, .. }
            | Op::Splice { fd, .. }
            | Op::Drain { fd } => *fd = connection(*fd)?,
            Op::Control { set: of, fd, .. } => (*of, *fd) = (set(*of)?, connection(*fd)?),
            Op::Wait { set: of } => *of = set(*of)?,
            Op::Close { fd } | Op::Dup { fd } => *fd = any(*fd)?,
            Op::Dup2 { fd, onto } => (*fd, *onto) = (any(*fd)?, any(*onto)?),
            Op::Start { op } => **op = self.resolve(who, op)?,
            Op::Poll { .. } | Op::NewSet | Op::Interrupt | Op::Fork | Op::Exit | Op::Kill => {}
        }
        Some(op)
    }
}

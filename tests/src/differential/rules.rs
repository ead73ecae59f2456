//! What is compared, and what is not. **Everything that the kernel and the library may do differently is here.**
//!
//! Of every call the value, the error number, the bytes, the events and the count of `SIGPIPE` are compared, and
//! whether a call waits. Between two steps everything that was sent has arrived.
//!
//! What is not made, because the outcome depends on timing or sizes, or because docs/limitations.md says that it differs:
//! [`admit`]. What is made, but not compared, or not in full: [`show`].

use super::model::{Connection, Flow, Kind, Model, Who};
use super::program::{Control, End, Flag, How, Op, PollBy, ReceiveBy, SendBy, SocketOption};
use super::wire::{Reply, bytes_of, digest};
use crate::calls::{Errno, Fd};

/// So much may be under way without any buffer being full.
pub(super) const SURELY_HELD: u64 = 64 << 10;

/// So much arrives at once: the smallest window of a ring.
pub(super) const AT_ONCE: usize = 8 << 10;

/// What a socket of `AF_UNIX` surely takes before a write waits: `net.core.wmem_default` is 208 KiB.
const SURELY_TAKEN: u64 = 150 << 10;

/// With so much of it in use it tells of no more room (`unix_writable`): a quarter.
pub(super) const SURELY_ROOM: u64 = 52 << 10;

/// With so much unread, epoll(7) without waiting says that there is room (docs/limitations.md).
pub(super) const LEAVES_ROOM: u64 = 6 << 10;

/// So much of several buffers arrives at once.
pub(super) const TOGETHER: usize = 2048;

/// So many waits in a row see all that an epoll set has to report: one for which memory alone has an answer puts off a look at
/// connections on TCP for some microseconds (docs/limitations.md).
pub(super) const WAITS: usize = 9;

/// Processes of one end.
const PROCESSES: usize = 3;

/// How an operation is to be made.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Manner {
    /// Not if it would wait.
    pub(super) guarded: bool,
    /// In a thread.
    pub(super) in_thread: bool,
    /// From now on it depends on the sizes of buffers where bytes are.
    pub(super) overfills: bool,
}

/// Whether a thread of the other end polls, and an epoll set that it polls has that connection.
fn is_in_a_set_being_polled(model: &Model, who: Who, fd: Fd) -> bool {
    let polls = model.started(who.0.other()).is_some_and(|(_, op)| matches!(op, Op::Poll { .. }));
    let index = model.connection_of(who, fd);
    let has_it = |&(set, _, of): &(u32, Fd, usize)| model.polled.contains(&set) && index == Some(of);
    polls && model.registered.iter().any(has_it)
}

/// How to make `op`, which may be changed for that; or why it is not made.
pub(super) fn admit(model: &Model, who: Who, op: &mut Op, in_thread: bool) -> Result<Manner, &'static str> {
    let end = who.0;
    // Two threads that wait for the same: which of them is served is chance.
    if in_thread && model.started(end).is_some() {
        return Err("a thread of this end waits already");
    }
    // It might wait for what comes in time, or too late.
    if in_thread && model.connections.iter().any(|connection| connection.wild) {
        return Err("what comes depends on timing");
    }
    let waits = in_thread && matches!(op, Op::Poll { .. } | Op::Wait { .. });
    let depends_on_room = |flow: &Flow| flow.loose || model.is_unix && lacks_room(flow);
    if waits && model.connections.iter().any(|connection| connection.flows.iter().any(depends_on_room)) {
        return Err("how soon there is room or data depends on the sizes of buffers");
    }
    let mut manner = Manner { in_thread, ..Manner::default() };
    match op {
        Op::Send { .. } | Op::SendFile { .. } | Op::Splice { .. } => admit_send(model, who, op, &mut manner)?,
        // The acknowledgement of this end's, which may come late, wakes it (`tcp_rcv_state_process` of net/ipv4/tcp_input.c).
        Op::Receive { fd, len: 0, .. }
            if in_thread
                && !model.is_unix
                && model
                    .connection_of(who, *fd)
                    .is_some_and(|index| model.connections[index].flows[end as usize].ended) =>
        {
            return Err("the acknowledgement of this end's may wake it");
        }
        Op::Receive { .. } => admit_receive(model, who, op, &mut manner)?,
        // docs/limitations.md: room is told of by edges, or not.
        Op::Poll { .. } if in_thread && model.has_vague_set(who) => {
            return Err("an epoll set may be readable or not");
        }
        Op::Poll { by, .. } if in_thread => {
            // The sets of select(2) have no place for the events that are not compared.
            *by = if *by == PollBy::Select { PollBy::Poll } else { *by };
        }
        // docs/limitations.md: epoll sets that processes share.
        Op::Wait { set } | Op::Control { set, .. } if model.is_shared(who, *set) => {
            return Err("another process has the set");
        }
        // As above: the registration tells the thread that waits at once, or later.
        Op::Control { fd, how: Control::Add | Control::Modify, .. }
            if model.started(end).is_some_and(|(_, op)| matches!(op, Op::Poll { .. } | Op::Wait { .. }))
                && model
                    .connection_of(who, *fd)
                    .is_some_and(|index| model.connections[index].flows.iter().any(depends_on_room)) =>
        {
            return Err("a thread of this end waits, for how soon depends on the sizes of buffers");
        }
        // Over `AF_UNIX`, whatever the other end reads is an edge of room.
        Op::Wait { set } if in_thread && model.is_unix && tells_of_room(model, who, *set) => {
            return Err("what the other end reads wakes it");
        }
        // docs/limitations.md: bytes that another thread has read by then.
        Op::Wait { set } if in_thread && tells_of_room(model, who, *set) && is_polled(model, who, *set) => {
            return Err("an edge may tell of room again");
        }
        Op::Wait { .. } => {}
        _ if in_thread => return Err("it never waits"),
        // docs/limitations.md: what happens to the other direction does not end a read of nothing.
        Op::Shutdown { how: How::Writing, .. }
            if model.started(end).is_some_and(|(_, op)| matches!(op, Op::Receive { len: 0, .. })) =>
        {
            return Err("a thread of this end waits for nothing");
        }
        // What has been sent may not have come (Nagle's algorithm), and nobody can ask as long as the thread has it.
        Op::Shutdown { fd, how } if *how != How::Writing && has_some_of_all(model, who, *fd) => {
            return Err("a thread of this end waits for more");
        }
        Op::Interrupt
            if !model.is_unix && model.actor(who).fds.keys().any(|&fd| has_some_of_all(model, who, fd)) =>
        {
            return Err("a thread of this end waits for more");
        }
        // An end lies behind bytes that buffers did not hold.
        Op::Shutdown { fd, .. }
            if model.connection_of(who, *fd).is_some_and(|index| {
                model.connections[index].flows.iter().any(|flow| flow.loose && flow.ended)
            }) =>
        {
            return Err("whether both directions have ended depends on the sizes of buffers");
        }
        // docs/limitations.md: the set is readable once, for what nobody has asked of it.
        Op::Shutdown { fd, how }
            if *how != How::Writing && model.is_unix && is_in_a_set_being_polled(model, who, *fd) =>
        {
            return Err("a thread of the other end waits for an epoll set");
        }
        // docs/limitations.md: then both directions have ended, and poll(2) is not told.
        Op::Shutdown { fd, how } if *how != How::Reading || model.is_unix => {
            let polls = model.started(end).is_some_and(|(_, op)| matches!(op, Op::Poll { .. }));
            let ended = |index: usize| {
                let flows = &model.connections[index].flows;
                // Over `AF_UNIX`, who reads no more has ended the other direction as well.
                let ends = if *how == How::Reading { end.other() } else { end };
                *how == How::Both && model.is_unix || flows[ends.other() as usize].ended
            };
            if polls && model.connection_of(who, *fd).is_some_and(ended) {
                return Err("a thread of this end waits");
            }
        }
        // docs/limitations.md: close while another thread waits.
        Op::Close { fd } | Op::Dup2 { onto: fd, .. }
            if model.actor(who).started.as_ref().is_some_and(|op| match op {
                Op::Wait { set } => set == fd,
                _ => true,
            }) =>
        {
            return Err("a thread of this process waits");
        }
        // docs/limitations.md: the kernel goes on with the registration.
        Op::Close { fd } | Op::Dup2 { onto: fd, .. } if model.leaves_a_registration(who, *fd) => {
            return Err("it is registered, and another process has the connection");
        }
        Op::Drain { fd } => {
            let Some(connection) = model.connection_of(who, *fd) else { return Err("no connection") };
            if model.is_receiving(end, connection) {
                return Err("a thread reads");
            }
        }
        // docs/limitations.md: a process that has shut down both directions resets nothing when it dies.
        Op::Exit | Op::Kill if is_awaited_after_both_shuts(model, who) => {
            return Err("a thread of the other end waits for a reset");
        }
        Op::Fork if model.actors[end as usize].len() == PROCESSES => {
            return Err("there are enough processes");
        }
        _ => {}
    }
    Ok(manner)
}

/// Whether, over `AF_UNIX`, the sender may be told that there is no room.
fn lacks_room(flow: &Flow) -> bool {
    flow.unread() > 0 && flow.charge > SURELY_ROOM
}

/// Whether a thread of this end waits in a read for all that it has asked for, and some of that has been sent.
fn has_some_of_all(model: &Model, who: Who, fd: Fd) -> bool {
    let end = who.0;
    let Some(index) = model.connection_of(who, fd) else { return false };
    let flow = model.connections[index].flows[end.other() as usize];
    let waits_for_all =
        |(_, op): (Who, &Op)| matches!(op, Op::Receive { flags, .. } if flags.contains(&Flag::WaitAll));
    flow.unread() > 0 && model.is_receiving(end, index) && model.started(end).is_some_and(waits_for_all)
}

fn tells_of_room(model: &Model, who: Who, set: Fd) -> bool {
    let kind = model.actor(who).fds.get(&set);
    matches!(kind, Some(Kind::Set(set)) if model.tell_of_room.contains(set))
}

fn is_polled(model: &Model, who: Who, set: Fd) -> bool {
    let kind = model.actor(who).fds.get(&set);
    matches!(kind, Some(Kind::Set(set)) if model.polled.contains(set))
}

fn is_awaited_after_both_shuts(model: &Model, who: Who) -> bool {
    let waits = |(_, op): (Who, &Op)| matches!(op, Op::Poll { .. } | Op::Wait { .. });
    model.started(who.0.other()).is_some_and(waits)
        && model.connections.iter().any(|connection| connection.shut[who.0 as usize] == [true; 2])
}

fn admit_send(model: &Model, who: Who, op: &mut Op, manner: &mut Manner) -> Result<(), &'static str> {
    let (fd, len) = match op {
        Op::Send { fd, len, .. } | Op::SendFile { fd, len } | Op::Splice { fd, len } => (*fd, *len),
        _ => unreachable!("only what sends"),
    };
    let Some(index) = model.connection_of(who, fd) else {
        return if manner.in_thread { Err("it never waits") } else { Ok(()) };
    };
    let (end, connection) = (who.0, &model.connections[index]);
    let flow = connection.flows[end as usize];
    // Whether a thread still does is not known either.
    if connection.wild {
        return Err("what becomes of it depends on timing");
    }
    let in_pieces = match op {
        Op::Send { by: SendBy::Writev | SendBy::Sendmsg, .. } => len > TOGETHER,
        Op::Send { by, .. } => by.is_in_pieces(),
        _ => true,
    };
    if model.is_sending(end, index) {
        return Err("a thread sends");
    }
    // Who waits may wake at the first of several pieces.
    if model.started(end.other()).is_some() && (in_pieces || len > AT_ONCE) {
        return Err("the other end waits, and may wake too early");
    }
    // Over `AF_UNIX` it fails at once.
    if model.is_unix && flow.ended && len > 0 {
        return if manner.in_thread { Err("it does not wait") } else { Ok(()) };
    }
    // A reset may come between two pieces.
    if model.is_deaf(end.other(), index) && (in_pieces || len > AT_ONCE) {
        return Err("the other end takes nothing more");
    }
    // docs/limitations.md: a write of no bytes does not ask the kernel for news.
    let is_refused = model.is_unix && flow.ended;
    if len == 0 && (connection.reset || model.is_deaf(end.other(), index) || is_refused) {
        return Err("it writes nothing");
    }
    if let Op::Splice { .. } = op {
        // docs/limitations.md: what is unread has to be sent again by the peer, and one that is about to leave TCP has to go
        // back, but it makes no call meanwhile.
        let quiet = connection.warm
            && connection.flows.iter().all(|flow| flow.unread() == 0 && !flow.loose && !flow.ended);
        if !quiet || model.started(end).is_some() || model.started(end.other()).is_some() {
            return Err("only an idle connection goes back to TCP at once");
        }
    }
    let overfills = flow.unread() + len as u64 > SURELY_HELD
        || model.is_unix && flow.charge_with(len as u64) > SURELY_TAKEN;
    manner.overfills = overfills;
    if !overfills && !flow.loose {
        return if manner.in_thread { Err("it does not wait") } else { Ok(()) };
    }
    let blocking = !connection.nonblocking[end as usize];
    match op {
        Op::Send { by, flags, .. } if manner.in_thread => {
            flags.retain(|&flag| flag != Flag::DontWait);
            if by.is_in_pieces() || !blocking {
                return Err("it does not wait");
            }
        }
        Op::Send { by, flags, .. } if by.has_flags() => add(flags, Flag::DontWait),
        _ if blocking => return Err("it may wait"),
        _ => {}
    }
    Ok(())
}

fn admit_receive(model: &Model, who: Who, op: &mut Op, manner: &mut Manner) -> Result<(), &'static str> {
    let Op::Receive { fd, len, by, flags } = op else { unreachable!("only what receives") };
    // docs/limitations.md: MSG_PEEK with MSG_WAITALL returns what is there.
    if flags.contains(&Flag::Peek) {
        flags.retain(|&flag| flag != Flag::WaitAll);
    }
    if !by.has_flags() {
        flags.clear();
    }
    let Some(index) = model.connection_of(who, *fd) else {
        return if manner.in_thread { Err("it never waits") } else { Ok(()) };
    };
    let (end, connection) = (who.0, &model.connections[index]);
    let flow = connection.flows[end.other() as usize];
    let loose = flow.loose || connection.wild;
    if model.fills_a_buffer(end, index) {
        return Err("a thread fills a buffer");
    }
    let blocking = !connection.nonblocking[end as usize];
    let times_out = blocking && connection.times_out[end as usize];
    if manner.in_thread {
        flags.retain(|&flag| flag != Flag::DontWait);
        if loose || !blocking || *by == ReceiveBy::Recvmmsg {
            return Err("it does not wait");
        }
        // It ends by itself, at a time that is not known.
        manner.in_thread = !times_out;
        return Ok(());
    }
    let waits_for_all = flags.contains(&Flag::WaitAll);
    if loose {
        if waits_for_all {
            return Err("it may wait");
        }
        if by.has_flags() {
            add(flags, Flag::DontWait)
        } else {
            manner.guarded = blocking
        }
        return Ok(());
    }
    let may_wait = blocking && !times_out && !flags.contains(&Flag::DontWait);
    if may_wait && waits_for_all && flow.unread() < *len as u64 && !flow.ended {
        return Err("it waits");
    }
    manner.guarded = may_wait && flow.unread() == 0;
    Ok(())
}

fn add(flags: &mut Vec<Flag>, flag: Flag) {
    if !flags.contains(&flag) {
        flags.push(flag);
    }
}

/// What of an answer is compared.
pub(super) fn show(model: &Model, who: Who, op: &Op, reply: &Reply) -> String {
    let mut text = shown(model, who, op, reply);
    if !reply.detail.is_empty() && text != "some" && !text.contains(" or not") {
        text.push_str(&format!(" {}", reply.detail));
    }
    if reply.pipe_signals > 0 && !text.contains(" or not") {
        text.push_str(&format!(" SIGPIPE {}", reply.pipe_signals));
    }
    text
}

fn shown(model: &Model, who: Who, op: &Op, reply: &Reply) -> String {
    let end = who.0;
    let flow_of = |fd: Fd, sender: End| {
        model.connection_of(who, fd).map(|index| {
            let connection = &model.connections[index];
            (index, connection, connection.flows[sender as usize])
        })
    };
    let plain = || match (reply.waits, reply.error) {
        (true, _) => "would wait".to_owned(),
        (_, 0) => reply.value.to_string(),
        (_, error) => Errno(error).to_string(),
    };
    match op {
        Op::Send { fd, .. } | Op::SendFile { fd, .. } | Op::Splice { fd, .. } => match flow_of(*fd, end) {
            // How much a buffer takes.
            Some((_, connection, flow)) if flow.loose || connection.wild => "sent or not".to_owned(),
            // Whether the other end's has arrived, behind what buffers did not hold: then an answer to bytes for nobody is another.
            Some((_, connection, _)) if connection.flows[end.other() as usize].loose && reply.error != 0 => {
                "failed or not".to_owned()
            }
            _ => plain(),
        },
        Op::Receive { fd, flags, by, .. } => match flow_of(*fd, end.other()) {
            Some((index, connection, flow)) => {
                // Several messages that are looked at begin with the same bytes.
                let is_twice = *by == ReceiveBy::Recvmmsg && flags.contains(&Flag::Peek);
                // TCP then stores nothing.
                let is_discarded = flags.contains(&Flag::Trunc) && !model.is_unix;
                if reply.error == 0 && !reply.waits && !is_discarded && !is_twice {
                    let stream = model.stream(index, end.other(), flow.received);
                    if digest(&bytes_of(stream, reply.value as usize)) != reply.digest {
                        return format!("{} WRONG BYTES", plain());
                    }
                }
                // How much has arrived of more than buffers hold.
                if flow.loose || connection.wild { "received or not".to_owned() } else { plain() }
            }
            None => plain(),
        },
        Op::Unread { fd } => match flow_of(*fd, end.other()) {
            Some((index, connection, flow))
                if flow.loose || connection.wild || model.fills_a_buffer(end, index) =>
            {
                "some".to_owned()
            }
            _ => plain(),
        },
        // Whether a reset has come, and before or after the other end's end, behind what buffers did not hold.
        Op::GetOption { fd, option: SocketOption::Error }
            if flow_of(*fd, end).is_some_and(|(_, connection, _)| {
                connection.wild || connection.flows[end.other() as usize].loose && reply.value != 0
            }) =>
        {
            "some".to_owned()
        }
        // docs/limitations.md: once the connection is over there may be a peer's address, where the kernel forgets it.
        Op::Addresses { fd }
            if flow_of(*fd, end).is_some_and(|(_, connection, _)| {
                connection.reset || connection.wild || connection.flows.iter().all(|flow| flow.ended)
            }) =>
        {
            "some".to_owned()
        }
        // docs/limitations.md: of some ends of a process it is not known that they were resets.
        Op::Shutdown { fd, .. } if flow_of(*fd, end).is_some_and(|(_, connection, _)| connection.wild) => {
            "some".to_owned()
        }
        // The kernel counts what is not acknowledged, the library what is not read.
        Op::Unsent { .. } if reply.error == 0 => "some".to_owned(),
        Op::Poll { .. } => format!("{} {}", plain(), polled(model, who, op, reply)),
        Op::Wait { .. } => format!("{} {}", plain(), waited(model, reply)),
        _ => plain(),
    }
}

/// Readable or writable is not compared where it depends on the sizes of buffers.
fn polled(model: &Model, who: Who, op: &Op, reply: &Reply) -> String {
    const READABLE: u32 = (libc::POLLIN | libc::POLLRDNORM) as u32;
    const WRITABLE: u32 = (libc::POLLOUT | libc::POLLWRNORM) as u32;
    /// Comes behind the bytes.
    const END: u32 = (libc::POLLRDHUP | libc::POLLHUP) as u32;
    let end = who.0;
    let by_select = matches!(op, Op::Poll { by: PollBy::Select, .. });
    let seen = reply.ready.iter().filter_map(|&(fd, events)| {
        let hidden = match model.actor(who).fds.get(&(fd as Fd)) {
            Some(&Kind::Connection(index)) => {
                let connection = &model.connections[index];
                let [incoming, outgoing] = [end.other(), end].map(|end| connection.flows[end as usize]);
                let mut hidden = 0;
                if incoming.loose {
                    hidden |= END;
                }
                if incoming.loose || model.fills_a_buffer(end, index) {
                    hidden |= READABLE;
                }
                if outgoing.loose || model.is_unix && lacks_room(&outgoing) {
                    hidden |= WRITABLE;
                }
                if connection.wild { u32::MAX } else { hidden }
            }
            // docs/limitations.md: the end of a connection makes a set readable for others also if nobody asks for it.
            Some(Kind::Set(_)) if model.connections.iter().any(is_smeared_or_ended) => u32::MAX,
            // docs/limitations.md: so does the end of reading.
            Some(Kind::Set(set))
                if model.ask_for_nothing.contains(set) && model.connections.iter().any(reads_no_more) =>
            {
                u32::MAX
            }
            // docs/limitations.md: room may be told of with bytes that are taken by now.
            Some(Kind::Set(set)) if model.tell_of_room.contains(set) => u32::MAX,
            _ => 0,
        };
        let events = events & !hidden;
        (events != 0).then(|| format!("{fd}:{}", names(events, by_select)))
    });
    format!("[{}]", seen.collect::<Vec<_>>().join(" "))
}

fn is_smeared_or_ended(connection: &Connection) -> bool {
    connection.smeared || connection.flows.iter().any(|flow| flow.ended)
}

fn reads_no_more(connection: &Connection) -> bool {
    connection.shut.iter().any(|&[reading, _]| reading)
}

/// Room to write is no news where it never lacked, so the kernel tells of it now and then, with other news; the library may
/// tell of it once more by itself. Otherwise edges are compared.
///
/// A connection of which an epoll set may have seen other edges is left out.
fn waited(model: &Model, reply: &Reply) -> String {
    let seen = reply.ready.iter().filter_map(|&(data, events)| {
        let (index, fd) = (data >> 32, data as u32 & !(BY_EDGES | ONCE | FOR_ROOM));
        let connection = &model.connections[index as usize];
        let events = if data as u32 & BY_EDGES != 0 { events & !(libc::EPOLLOUT as u32) } else { events };
        // Over `AF_UNIX`, whatever the other end reads is news of room, with which all is told again.
        let is_told_again = model.is_unix && data as u32 & BY_EDGES != 0 && data as u32 & FOR_ROOM != 0;
        let compared = !connection.smeared && !connection.wild && !is_told_again && events != 0;
        compared.then(|| format!("{fd}:{}", names(events, false)))
    });
    format!("[{}]", seen.collect::<Vec<_>>().join(" "))
}

/// Part of [`data_of`]: registered for edges.
const BY_EDGES: u32 = 1 << 31;

/// Part of [`data_of`]: registered for one report.
const ONCE: u32 = 1 << 30;

/// Part of [`data_of`]: registered for room.
const FOR_ROOM: u32 = 1 << 29;

/// The data with which a connection's descriptor is registered for `events`.
pub(super) fn data_of(connection: usize, fd: Fd, events: u32) -> u64 {
    let by_edges = if events & libc::EPOLLET as u32 != 0 { BY_EDGES } else { 0 };
    let once = if events & libc::EPOLLONESHOT as u32 != 0 { ONCE } else { 0 };
    let for_room = if events & libc::EPOLLOUT as u32 != 0 { FOR_ROOM } else { 0 };
    (connection as u64) << 32 | u64::from(fd.cast_unsigned() | by_edges | once | for_room)
}

/// Whether what is registered with `data` reports once what has come.
pub(super) fn reports_once(data: u64) -> bool {
    data as u32 & (BY_EDGES | ONCE) != 0
}

fn names(events: u32, by_select: bool) -> String {
    if by_select {
        let names = [(1, "read"), (4, "write"), (2, "except")];
        return names
            .iter()
            .filter(|&&(bit, _)| events & bit != 0)
            .map(|&(_, name)| name)
            .collect::<Vec<_>>()
            .join("|");
    }
    // epoll's are the same numbers.
    let known = [
        (libc::POLLIN, "IN"),
        (libc::POLLPRI, "PRI"),
        (libc::POLLOUT, "OUT"),
        (libc::POLLERR, "ERR"),
        (libc::POLLHUP, "HUP"),
        (libc::POLLNVAL, "NVAL"),
        (libc::POLLRDNORM, "RDNORM"),
        (libc::POLLRDHUP, "RDHUP"),
    ];
    let names = known.iter().filter(|&&(bit, _)| events & u32::from(bit.cast_unsigned()) != 0);
    names.map(|&(_, name)| name).collect::<Vec<_>>().join("|")
}

//! The outgoing half of a connection to another process, shared by all workers of this one.
//!
//! ```text
//!  worker ─► lane of shuffle 1 ─┐
//!  worker ─► lane of shuffle 1 ─┤ in turn, as far as     ┌─────────┐
//!  worker ─► lane of shuffle 2 ─┼─ each has credit ────► │ writer  │ ─► socket
//!  worker ─► notifications ─────┘                        └─────────┘
//! ```
//!
//! A lane is the outgoing buffer of one shuffle: frames, up to `capacity` bytes, whose column memory is referred to. A
//! worker that finds it full sleeps. Each lane has its own credit, the room that the shuffle has in the peer's incoming
//! buffer: with one for all, a stage whose rows nobody reads would hold up the stage that would have to read them.
//!
//! Whoever adds a frame writes, unless another thread is at it, who then takes it along. Nobody waits in a write: what the
//! socket does not take is left to the network thread, which waits for room there.

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSlice, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use thallus_columnar::Message;

use super::exchange::Exchange;
use super::wire::{HEAD, Head, Kind};
use crate::{Error, NodeId, Result, WorkerId, wire};

/// Areas and bytes of one write. writev(2) takes 1,024 areas.
const AREAS: usize = 512;
const BYTES: usize = 1 << 20;

/// Writes in a row by one thread, before it leaves the rest to the network thread.
const WRITES: usize = 16;

/// What goes out in one piece.
#[derive(Debug)]
pub(super) struct Frame {
    head: Head,
    messages: Vec<Message>,
    text: Vec<u8>,
}

impl Frame {
    pub(super) fn rows(shuffle: u64, source: WorkerId, target: WorkerId, messages: Vec<Message>) -> Self {
        let length = messages.iter().map(Message::encoded_len).sum();
        let head = Head { length, target, ..Head::new(Kind::Rows, shuffle, source) };
        Self { head, messages, text: Vec::new() }
    }

    pub(super) fn of(head: Head) -> Self {
        Self { head, messages: Vec::new(), text: Vec::new() }
    }

    pub(super) fn gave_up(shuffle: u64, source: WorkerId, why: &str) -> Self {
        let text = wire::text(why);
        let head = Head { length: text.len(), ..Head::new(Kind::GaveUp, shuffle, source) };
        Self { head, messages: Vec::new(), text }
    }

    /// What it takes of the window: notifications take nothing.
    fn cost(&self) -> usize {
        if self.head.kind == Kind::Rows { self.head.length } else { 0 }
    }

    fn areas(&self) -> usize {
        2 + self.messages.iter().map(|message| 1 + message.body().len()).sum::<usize>()
    }
}

#[derive(Debug)]
struct Lane {
    frames: VecDeque<Frame>,
    /// Of frames that have not been written as a whole.
    bytes: usize,
    /// Below zero after a frame that is larger than the window.
    credit: i64,
    /// It is among those that have a turn.
    listed: bool,
    /// Nobody will add frames: to be removed when it is empty.
    closing: bool,
}

/// Frames of which the socket has taken a part.
#[derive(Debug, Default)]
struct Writer {
    frames: Vec<(Frame, [u8; HEAD])>,
    written: usize,
}

#[derive(Debug)]
struct Outgoing {
    notifications: VecDeque<Frame>,
    lanes: HashMap<u64, Lane>,
    turns: VecDeque<u64>,
    /// None while a thread writes.
    writer: Option<Writer>,
    /// The network thread waits for room in the socket.
    armed: bool,
    /// Why nothing can be sent any more.
    end: Option<Error>,
    /// Threads that sleep.
    waiting: usize,
    sent: LinkStatus,
}

/// What has been sent to a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkStatus {
    pub frames: u64,
    pub bytes: u64,
    /// System calls that wrote.
    pub writes: u64,
    /// Times that the socket had no room.
    pub full_socket: u64,
    /// Times that a worker slept because a lane was full.
    pub full_lane: u64,
}

#[derive(Debug)]
pub(super) struct Link {
    pub(super) node: NodeId,
    pub(super) stream: TcpStream,
    /// The peer's, of each shuffle.
    window: i64,
    /// Bytes of a lane.
    capacity: usize,
    epoll: Arc<Epoll>,
    outgoing: Mutex<Outgoing>,
    room: Condvar,
}

impl Link {
    /// For a socket that does not block.
    pub(super) fn new(
        node: NodeId,
        stream: TcpStream,
        window: u64,
        capacity: usize,
        epoll: Arc<Epoll>,
    ) -> Self {
        let outgoing = Outgoing {
            notifications: VecDeque::new(),
            lanes: HashMap::new(),
            turns: VecDeque::new(),
            writer: Some(Writer::default()),
            armed: false,
            end: None,
            waiting: 0,
            sent: LinkStatus::default(),
        };
        let window = i64::try_from(window).expect("looked at with the greeting");
        Self { node, stream, window, capacity, epoll, outgoing: Mutex::new(outgoing), room: Condvar::new() }
    }

    /// Bytes of a shuffle that the peer takes without having read them.
    pub(super) fn window(&self) -> usize {
        usize::try_from(self.window).expect("above zero")
    }

    /// The event that the network thread waits for.
    pub(super) fn event(&self, room: bool) -> EpollEvent {
        let flags = if room { EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT } else { EpollFlags::EPOLLIN };
        EpollEvent::new(flags, u64::from(self.node.0))
    }

    /// Adds a frame to its lane, behind those that are there. Sleeps while the lane is full.
    ///
    /// # Errors
    ///
    /// Those of the connection and of the shuffle.
    pub(super) fn send(&self, frame: Frame, exchange: &Exchange) -> Result<()> {
        let (shuffle, cost) = (frame.head.shuffle, frame.cost());
        let mut outgoing = self.lock();
        loop {
            if let Some(end) = &outgoing.end {
                return Err(end.clone());
            }
            // Under the lock: who fails it says so first, and then wakes those who sleep on this link.
            if let Some(failed) = exchange.failed() {
                return Err(failed);
            }
            let lane = outgoing.lane(shuffle, self.window);
            if cost == 0 || lane.bytes == 0 || lane.bytes + cost <= self.capacity {
                lane.bytes += cost;
                lane.frames.push_back(frame);
                break;
            }
            outgoing.sent.full_lane += 1;
            outgoing.waiting += 1;
            outgoing = self.room.wait(outgoing).expect("nobody panics with it");
            outgoing.waiting -= 1;
        }
        outgoing.list(shuffle, self.window);
        self.flush(outgoing);
        Ok(())
    }

    /// Adds a notification, which waits for nothing but what has been begun.
    pub(super) fn notify(&self, frame: Frame) {
        let mut outgoing = self.lock();
        if outgoing.end.is_none() {
            outgoing.notifications.push_back(frame);
            self.flush(outgoing);
        }
    }

    /// Tells the peer that so many bytes of a shuffle's window are free again. What has not been told yet is told together, so that
    /// a peer that sends and does not read leaves no more than one notification for each shuffle here.
    pub(super) fn free(&self, shuffle: u64, bytes: u64) {
        let mut outgoing = self.lock();
        if outgoing.end.is_some() {
            return;
        }
        let mut heads = outgoing.notifications.iter_mut().map(|frame| &mut frame.head);
        match heads.find(|head| head.kind == Kind::Credit && head.shuffle == shuffle) {
            Some(head) => head.value = head.value.saturating_add(bytes),
            None => {
                let head = Head { value: bytes, ..Head::new(Kind::Credit, shuffle, WorkerId(0)) };
                outgoing.notifications.push_back(Frame::of(head));
            }
        }
        self.flush(outgoing);
    }

    /// The peer has read so many bytes. False if it never got as many.
    pub(super) fn credit(&self, shuffle: u64, bytes: u64) -> bool {
        let mut outgoing = self.lock();
        let Some(lane) = outgoing.lanes.get_mut(&shuffle) else { return true };
        let credit = i64::try_from(bytes).ok().and_then(|bytes| lane.credit.checked_add(bytes));
        match credit {
            Some(credit) if credit <= self.window => lane.credit = credit,
            _ => return false,
        }
        outgoing.list(shuffle, self.window);
        self.flush(outgoing);
        true
    }

    /// There is room in the socket again.
    pub(super) fn writable(&self) {
        let mut outgoing = self.lock();
        outgoing.armed = false;
        let _ = self.epoll.modify(&self.stream, &mut self.event(false)); // fails only for one that is gone
        self.flush(outgoing);
    }

    /// No worker of this process will send in the shuffle any more.
    pub(super) fn close_lane(&self, shuffle: u64) {
        let mut outgoing = self.lock();
        if let Some(lane) = outgoing.lanes.get_mut(&shuffle) {
            lane.closing = true;
            outgoing.tidy(shuffle);
        }
        self.wake(&outgoing);
    }

    /// A shuffle has failed: who waits for room is woken. Frames stay, since the peer may need those of workers that have ended, and
    /// takes what it does not need.
    pub(super) fn fail_lane(&self) {
        self.wake(&self.lock());
    }

    /// Nothing can be sent any more. The first error counts.
    pub(super) fn end(&self, error: &Error, how: Shutdown) {
        let mut outgoing = self.lock();
        outgoing.end.get_or_insert_with(|| error.clone());
        outgoing.notifications.clear();
        outgoing.lanes.clear();
        outgoing.turns.clear();
        if let Some(writer) = &mut outgoing.writer {
            *writer = Writer::default();
        }
        self.wake(&outgoing);
        drop(outgoing);
        let _ = self.stream.shutdown(how); // it may be gone
    }

    pub(super) fn ended(&self) -> Option<Error> {
        self.lock().end.clone()
    }

    /// Waits until everything has been written, or can't be, or until `deadline`. Whether nothing is left.
    pub(super) fn drained(&self, deadline: std::time::Instant) -> bool {
        let mut outgoing = self.lock();
        loop {
            let idle = outgoing.writer.as_ref().is_some_and(|writer| writer.frames.is_empty());
            let empty = outgoing.notifications.is_empty()
                && outgoing.lanes.values().all(|lane| lane.frames.is_empty());
            if outgoing.end.is_some() || (idle && empty) {
                return true;
            }
            let Some(rest) = deadline.checked_duration_since(std::time::Instant::now()) else { return false };
            outgoing.waiting += 1;
            outgoing = self.room.wait_timeout(outgoing, rest).expect("nobody panics with it").0;
            outgoing.waiting -= 1;
        }
    }

    pub(super) fn status(&self) -> LinkStatus {
        self.lock().sent
    }

    fn lock(&self) -> MutexGuard<'_, Outgoing> {
        self.outgoing.lock().expect("nobody panics with it")
    }

    fn wake(&self, outgoing: &Outgoing) {
        if outgoing.waiting > 0 {
            self.room.notify_all();
        }
    }

    /// Writes what may be written. Without the lock while in a system call: others add frames meanwhile, and the thread that
    /// writes takes them along.
    fn flush<'a>(&'a self, outgoing: MutexGuard<'a, Outgoing>) {
        let mut outgoing = outgoing;
        if outgoing.armed {
            return;
        }
        let Some(mut writer) = outgoing.writer.take() else { return };
        for _ in 0..WRITES {
            if outgoing.end.is_some() {
                break;
            }
            outgoing.fill(&mut writer, self.window);
            if writer.frames.is_empty() {
                break;
            }
            drop(outgoing);
            let result = writer.write(&self.stream);
            outgoing = self.lock();
            outgoing.sent.writes += 1;
            match result {
                Ok(done) => outgoing.written(done),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    outgoing.sent.full_socket += 1;
                    self.arm(&mut outgoing);
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // The network thread learns why by reading, which also says what came before.
                    let why = error.to_string();
                    outgoing.end.get_or_insert(Error::Gone { node: self.node, why });
                }
            }
            self.wake(&outgoing);
        }
        if outgoing.end.is_some() {
            writer = Writer::default();
        } else if !outgoing.armed && outgoing.more(&writer, self.window) {
            self.arm(&mut outgoing);
        }
        outgoing.writer = Some(writer);
        self.wake(&outgoing);
    }

    fn arm(&self, outgoing: &mut Outgoing) {
        outgoing.armed = true;
        let _ = self.epoll.modify(&self.stream, &mut self.event(true)); // fails only for one that is gone
    }
}

impl Outgoing {
    fn lane(&mut self, shuffle: u64, window: i64) -> &mut Lane {
        self.lanes.entry(shuffle).or_insert_with(|| Lane {
            frames: VecDeque::new(),
            bytes: 0,
            credit: window,
            listed: false,
            closing: false,
        })
    }

    /// Gives a lane a turn if it has something that may be sent.
    fn list(&mut self, shuffle: u64, window: i64) {
        if let Some(lane) = self.lanes.get_mut(&shuffle)
            && !lane.listed
            && lane.may_send(window)
        {
            lane.listed = true;
            self.turns.push_back(shuffle);
        }
    }

    /// Whether there is something to write.
    fn more(&self, writer: &Writer, window: i64) -> bool {
        let may_send = |shuffle| self.lanes.get(shuffle).is_some_and(|lane: &Lane| lane.may_send(window));
        !writer.frames.is_empty() || !self.notifications.is_empty() || self.turns.iter().any(may_send)
    }

    /// Moves frames to the writer: notifications first, then one from each lane in turn.
    fn fill(&mut self, writer: &mut Writer, window: i64) {
        let (mut areas, mut bytes) = (0, 0);
        for (frame, _) in &writer.frames {
            areas += frame.areas();
            bytes += frame.head.length;
        }
        while areas < AREAS && bytes < BYTES {
            let frame = match self.notifications.pop_front() {
                Some(frame) => frame,
                None => match self.next(window) {
                    Some(frame) => frame,
                    None => return,
                },
            };
            areas += frame.areas();
            bytes += frame.head.length;
            let head = frame.head.to_bytes();
            writer.frames.push((frame, head));
        }
    }

    fn next(&mut self, window: i64) -> Option<Frame> {
        loop {
            let shuffle = self.turns.pop_front()?;
            let Some(lane) = self.lanes.get_mut(&shuffle) else { continue };
            lane.listed = false;
            if !lane.may_send(window) {
                continue;
            }
            let frame = lane.frames.pop_front().expect("it may be sent");
            lane.credit -= i64::try_from(frame.cost()).expect("below 2 GiB");
            self.list(shuffle, window);
            return Some(frame);
        }
    }

    /// Takes what was written off the lanes.
    fn written(&mut self, done: Vec<Frame>) {
        for frame in done {
            self.sent.frames += 1;
            self.sent.bytes += (HEAD + frame.head.length) as u64;
            if let Some(lane) = self.lanes.get_mut(&frame.head.shuffle) {
                lane.bytes = lane.bytes.saturating_sub(frame.cost());
                self.tidy(frame.head.shuffle);
            }
        }
    }

    fn tidy(&mut self, shuffle: u64) {
        if self
            .lanes
            .get(&shuffle)
            .is_some_and(|lane| lane.closing && lane.frames.is_empty() && lane.bytes == 0)
        {
            self.lanes.remove(&shuffle);
        }
    }
}

impl Lane {
    /// A frame larger than the window waits until all of it is free.
    fn may_send(&self, window: i64) -> bool {
        self.frames.front().is_some_and(|frame| {
            let cost = i64::try_from(frame.cost()).expect("below 2 GiB");
            cost == 0 || self.credit >= cost.min(window)
        })
    }
}

impl Writer {
    /// One write. Returns the frames that are out as a whole.
    fn write(&mut self, stream: &TcpStream) -> io::Result<Vec<Frame>> {
        let mut areas = Vec::with_capacity(AREAS);
        let mut skip = self.written;
        'frames: for (frame, head) in &self.frames {
            let body = frame.messages.iter().flat_map(Message::slices);
            for area in std::iter::once(&head[..]).chain(body).chain(std::iter::once(&frame.text[..])) {
                if skip >= area.len() {
                    skip -= area.len();
                    continue;
                }
                areas.push(IoSlice::new(&area[skip..]));
                skip = 0;
                if areas.len() == 1024 {
                    break 'frames;
                }
            }
        }
        let mut socket = stream;
        let written = socket.write_vectored(&areas)?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.written += written;
        let mut out = 0;
        while let Some((frame, _)) = self.frames.get(out)
            && self.written >= HEAD + frame.head.length
        {
            self.written -= HEAD + frame.head.length;
            out += 1;
        }
        Ok(self.frames.drain(..out).map(|(frame, _)| frame).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use nix::sys::epoll::EpollCreateFlags;

    use super::*;

    /// A link to somebody who does not read.
    fn link() -> (Link, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        stream.set_nonblocking(true).unwrap();
        let epoll = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap());
        let link = Link::new(NodeId(1), stream, 1 << 20, 1 << 20, epoll);
        link.epoll.add(&link.stream, link.event(false)).unwrap();
        (link, listener.accept().unwrap().0)
    }

    #[test]
    fn credit_that_nobody_reads_is_kept_in_one_piece() {
        let (link, _deaf) = link();
        while link.status().full_socket == 0 {
            link.free(1, 64);
        }
        (0..1_000).for_each(|_| link.free(1, 64));
        (0..1_000).for_each(|_| link.free(2, 1));
        let outgoing = link.lock();
        let waiting: Vec<_> = outgoing.notifications.iter().map(|frame| frame.head).collect();
        assert_eq!(
            waiting.iter().map(|head| (head.shuffle, head.value)).collect::<Vec<_>>(),
            [(1, 64_000), (2, 1_000)]
        );
    }
}

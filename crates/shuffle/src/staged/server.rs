//! The serving side: stages joined by bounded queues.
//!
//! ```text
//!  listener ─► receiver ═► handlers ═► responders ─► sockets
//!   accepts     reads       find the    send chunks,
//!               requests    block,      as far as the
//!               of all      cut it      socket takes
//! ```
//!
//! A full queue holds up the stage before it, at last the receiver, which then reads no more requests. No stage waits for a
//! client: a responder that finds a socket full leaves the connection to the receiver, which waits for room in all of them.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use thallus_columnar::Message;

use super::Config;
use super::queue::Queue;
use super::store::{Block, Name, Store, Then};
use super::wire::{self, HEAD, HELLO, Head, REQUEST, Request};
use crate::{Cluster, Error, NodeId, Result, socket, stream};

/// The eventfd among the connections' numbers.
const STOP: u64 = u64::MAX;

/// Until it is tried again to accept a connection for which there was no descriptor or no memory.
const PAUSE_MS: u8 = 100;

/// Bytes that a responder sends on one connection before others have their turn.
const TURN: usize = 2 << 20;

/// Requests of one connection that could be answered. At so many no more are read until half of them are.
const REQUESTS: usize = 4096;

/// Those that wait for workers to finish included: a client that has more is sent away.
const UNANSWERED: usize = 1 << 16;

/// What a client gets for one request.
#[derive(Debug)]
struct Answer {
    name: Name,
    head: Head,
    /// Those of `block` that it consists of, and a text instead.
    messages: std::ops::Range<usize>,
    block: Block,
    text: Vec<u8>,
    /// Bytes of the chunk that is being sent, with its head, that are out.
    written: usize,
    chunks: u32,
    /// Its request waited for a worker to finish.
    waited: bool,
}

#[derive(Debug, Default)]
struct Sending {
    /// The first has begun a chunk. After each chunk it goes to the end.
    answers: VecDeque<Answer>,
    /// It is in the responders' queue, or with one of them, or waits for room.
    busy: bool,
    /// Requests that have not been answered.
    unanswered: usize,
    /// Of these, those that do not wait for a worker to finish.
    requests: usize,
    /// There are too many of these: nothing is read.
    held: bool,
    /// The receiver waits for room in the socket.
    full: bool,
    /// Nobody is there any more.
    gone: bool,
}

/// A client.
#[derive(Debug)]
pub(super) struct Connection {
    number: u64,
    stream: TcpStream,
    sending: Mutex<Sending>,
}

/// What has been served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerStatus {
    /// Connections that were accepted.
    pub connections: u64,
    pub requests: u64,
    pub chunks: u64,
    pub bytes: u64,
    /// Times that a socket had no room.
    pub full_socket: u64,
    /// Times that there was no descriptor, or no memory, for a connection. It is tried again every 100 ms.
    pub scarce: u64,
}

#[derive(Debug, Default)]
struct Counters {
    connections: AtomicU64,
    requests: AtomicU64,
    chunks: AtomicU64,
    bytes: AtomicU64,
    full_socket: AtomicU64,
    scarce: AtomicU64,
}

pub(super) type Asked = (Arc<Connection>, Request);

#[derive(Debug)]
pub(super) struct Server {
    cluster: Cluster,
    me: NodeId,
    config: Config,
    /// Connections that are accepted at a time.
    most: usize,
    hello: [u8; HELLO],
    pub(super) store: Store<Asked>,
    epoll: Epoll,
    stop: EventFd,
    connections: Mutex<HashMap<u64, Arc<Connection>>>,
    /// A connection is gone.
    fewer: Condvar,
    leaving: AtomicBool,
    /// By process: its workers have asked for something, so it has been there.
    seen: Vec<AtomicBool>,
    requests: Queue<Asked>,
    responses: Queue<Arc<Connection>>,
    counters: Counters,
}

impl Server {
    pub(super) fn new(cluster: Cluster, me: NodeId, config: Config) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let stop = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        epoll.add(&stop, EpollEvent::new(EpollFlags::EPOLLIN, STOP))?;
        let hello = wire::hello(&cluster, RandomState::new().build_hasher().finish());
        let others = match config.share {
            true => cluster.nodes() - 1,
            false => cluster.workers() - cluster.workers_of(me).len(),
        };
        // Twice: one that is closed for idleness may be made anew before its end has been seen here.
        let most = config.connections.max(2 * others);
        let seen = (0..cluster.nodes()).map(|_| AtomicBool::new(false)).collect();
        Ok(Self {
            cluster,
            me,
            config,
            most,
            hello,
            store: Store::new(),
            epoll,
            stop,
            connections: Mutex::default(),
            fewer: Condvar::new(),
            leaving: AtomicBool::new(false),
            seen,
            requests: Queue::new(config.queue),
            responses: Queue::new(config.queue),
            counters: Counters::default(),
        })
    }

    pub(super) fn status(&self) -> ServerStatus {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { connections, requests, chunks, bytes, full_socket, scarce } = &self.counters;
        ServerStatus {
            connections: load(connections),
            requests: load(requests),
            chunks: load(chunks),
            bytes: load(bytes),
            full_socket: load(full_socket),
            scarce: load(scarce),
        }
    }

    /// Whether a process has been there, and asked.
    pub(super) fn has_seen(&self, node: NodeId) -> bool {
        self.seen[node.index()].load(Ordering::Relaxed)
    }

    /// The open connections.
    pub(super) fn carried(&self) -> Vec<thallus_api::Status> {
        let Some(thallus) = thallus_api::Thallus::find() else { return Vec::new() };
        self.all().values().filter_map(|connection| thallus.status(&connection.stream).ok()).collect()
    }

    fn all(&self) -> MutexGuard<'_, HashMap<u64, Arc<Connection>>> {
        self.connections.lock().expect("nobody panics with it")
    }

    /// Ends each connection behind what is sent on it, and waits until its client has read that and closes it, or until
    /// `deadline`. Closed at once, a request that still comes would be answered by a reset, and with that the client would lose
    /// what it has not read.
    pub(super) fn see_off(&self, deadline: Instant) -> bool {
        let mut all = self.all();
        self.leaving.store(true, Ordering::SeqCst);
        for connection in all.values() {
            let sending = connection.lock();
            if !sending.busy {
                let _ = connection.stream.shutdown(Shutdown::Write); // it may be gone
            }
        }
        while !all.is_empty() {
            let Some(rest) = deadline.checked_duration_since(Instant::now()) else { return false };
            all = self.fewer.wait_timeout(all, rest).expect("nobody panics with it").0;
        }
        true
    }

    /// Lets every stage end.
    pub(super) fn shut(&self) {
        let _ = self.stop.write(1); // fails only if it had been written 2⁶⁴ times
        self.requests.close();
        self.responses.close();
        let mut all = self.all();
        self.leaving.store(true, Ordering::SeqCst);
        all.drain().for_each(|(_, connection)| drop(connection.stream.shutdown(Shutdown::Both)));
    }

    #[cfg(test)]
    pub(super) fn are_prepared(&self) -> bool {
        self.all().values().all(|connection| socket::is_prepared(&connection.stream))
    }

    /// The listener.
    pub(super) fn listen(&self, listener: &TcpListener) {
        let mut paused = false;
        for number in 0.. {
            let mut waited = [
                PollFd::new(self.stop.as_fd(), PollFlags::POLLIN),
                PollFd::new(listener.as_fd(), PollFlags::POLLIN),
            ];
            // A connection that can't be accepted keeps the listener readable.
            let (waited, limit) = if paused {
                (&mut waited[..1], PollTimeout::from(PAUSE_MS))
            } else {
                (&mut waited[..], PollTimeout::NONE)
            };
            match poll(waited, limit) {
                Ok(_) if waited[0].any() == Some(true) => return,
                Ok(_) => {}
                Err(nix::errno::Errno::EINTR) => continue,
                Err(_) => return, // no memory
            }
            paused = false;
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => {
                    if let Some(
                        nix::libc::EMFILE | nix::libc::ENFILE | nix::libc::ENOBUFS | nix::libc::ENOMEM,
                    ) = error.raw_os_error()
                    {
                        self.counters.scarce.fetch_add(1, Ordering::Relaxed);
                        paused = true;
                    }
                    continue;
                }
            };
            if stream.set_nonblocking(true).and_then(|()| socket::prepare(&stream)).is_err() {
                continue;
            }
            // Who leaves says so with these in hand, and then ends all that are there.
            let mut all = self.all();
            if all.len() >= self.most || self.leaving.load(Ordering::SeqCst) {
                continue; // closed at once
            }
            // There is room in a new socket.
            if (&stream).write(&self.hello).is_ok_and(|written| written == HELLO)
                && self.epoll.add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, number)).is_ok()
            {
                self.counters.connections.fetch_add(1, Ordering::Relaxed);
                all.insert(number, Arc::new(Connection { number, stream, sending: Mutex::default() }));
            }
        }
    }

    /// The receiver.
    pub(super) fn receive(&self) {
        let mut partial: HashMap<u64, (usize, [u8; REQUEST])> = HashMap::new();
        let mut events = vec![EpollEvent::empty(); 64];
        loop {
            let count = match self.epoll.wait(&mut events, EpollTimeout::NONE) {
                Ok(count) => count,
                Err(nix::errno::Errno::EINTR) => 0,
                Err(_) => return,
            };
            for event in &events[..count] {
                if event.data() == STOP {
                    return;
                }
                let Some(connection) = self.all().get(&event.data()).cloned() else { continue };
                if event.events().contains(EpollFlags::EPOLLOUT) {
                    let mut sending = connection.lock();
                    sending.full = false;
                    self.watch(&connection, &sending);
                    drop(sending);
                    self.responses.push(connection.clone());
                }
                if connection.lock().held {
                    // Nobody reads, who would see the end.
                    if event.events().intersects(EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR) {
                        partial.remove(&connection.number);
                        self.drop_connection(&connection);
                    }
                    continue;
                }
                let readable = !(event.events() - EpollFlags::EPOLLOUT).is_empty();
                let partial_of = partial.entry(connection.number).or_insert((0, [0; REQUEST]));
                if readable && !self.requests_of(&connection, partial_of) {
                    partial.remove(&connection.number);
                    self.drop_connection(&connection);
                }
            }
        }
    }

    /// Reads requests. False at the end of the connection, or of what can be understood.
    fn requests_of(&self, connection: &Arc<Connection>, (have, bytes): &mut (usize, [u8; REQUEST])) -> bool {
        for _ in 0..64 {
            match (&connection.stream).read(&mut bytes[*have..]) {
                Ok(0) => return false,
                Ok(read) => *have += read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
            if *have < REQUEST {
                continue;
            }
            *have = 0;
            let Some(request) = Request::from_bytes(bytes, &self.cluster) else { return false };
            if !self.cluster.workers_of(self.me).contains(&request.source.0) {
                return false;
            }
            self.seen[self.cluster.node_of(request.target).index()].store(true, Ordering::Relaxed);
            let mut held = false;
            if request.most > 0 {
                let mut sending = connection.lock();
                sending.unanswered += 1;
                sending.requests += 1;
                if sending.unanswered > UNANSWERED {
                    return false;
                }
                if sending.requests >= REQUESTS {
                    held = true;
                    sending.held = true;
                    self.watch(connection, &sending);
                }
            }
            self.counters.requests.fetch_add(1, Ordering::Relaxed);
            self.requests.push((connection.clone(), request));
            if held {
                break;
            }
        }
        true
    }

    fn drop_connection(&self, connection: &Arc<Connection>) {
        let _ = self.epoll.delete(&connection.stream); // it may be gone
        let _ = connection.stream.shutdown(Shutdown::Both);
        self.all().remove(&connection.number);
        self.fewer.notify_all();
        {
            let mut sending = connection.lock();
            sending.gone = true;
            sending.answers.clear();
        }
        self.forget(connection);
    }

    /// What waits for blocks on behalf of a connection that is gone.
    fn forget(&self, gone: &Arc<Connection>) {
        self.store.forget(|(connection, _)| Arc::ptr_eq(connection, gone));
    }

    /// A handler.
    pub(super) fn handle(&self) {
        while let Some((connection, request)) = self.requests.pop() {
            let name = (request.shuffle, request.source, request.target);
            if request.most == 0 {
                self.store.fetched(name);
                continue;
            }
            match self.store.ask(name, (connection.clone(), request)) {
                Some((asked, block)) => self.answer(asked, block, false),
                None => {
                    let mut sending = connection.lock();
                    self.one_less(&connection, &mut sending);
                    let gone = sending.gone;
                    drop(sending);
                    if gone {
                        self.forget(&connection);
                    }
                }
            }
        }
    }

    /// A request has been answered, or waits for a worker to finish, which may need what others ask for.
    fn one_less(&self, connection: &Connection, sending: &mut Sending) {
        sending.requests -= 1;
        if sending.held && sending.requests <= REQUESTS / 2 {
            sending.held = false;
            self.watch(connection, sending);
        }
    }

    /// What the receiver waits for.
    fn watch(&self, connection: &Connection, sending: &Sending) {
        let mut flags = EpollFlags::empty();
        flags.set(EpollFlags::EPOLLIN, !sending.held);
        flags.set(EpollFlags::EPOLLOUT, sending.full);
        // Fails only for one that is gone.
        let _ = self.epoll.modify(&connection.stream, &mut EpollEvent::new(flags, connection.number));
    }

    /// Answers those who have waited.
    pub(super) fn answer_all(&self, then: Vec<Then<Asked>>) {
        then.into_iter().for_each(|(asked, block)| self.answer(asked, block, true));
    }

    fn answer(&self, (connection, request): Asked, block: Result<Block>, waited: bool) {
        let mut answer = match block {
            Ok(block) => Answer::new(&request, block, self.config.chunk),
            Err(error) => Answer::failed(&request, &error),
        };
        answer.waited = waited;
        let wake = {
            let mut sending = connection.lock();
            sending.answers.push_back(answer);
            !std::mem::replace(&mut sending.busy, true)
        };
        if wake {
            self.responses.push(connection);
        }
    }

    /// A responder.
    pub(super) fn respond(&self) {
        while let Some(connection) = self.responses.pop() {
            let mut sent = 0;
            loop {
                let mut sending = connection.lock();
                let Some(mut answer) = sending.next() else {
                    if self.leaving.load(Ordering::SeqCst) {
                        let _ = connection.stream.shutdown(Shutdown::Write); // it may be gone
                    }
                    break;
                };
                drop(sending);
                match answer.write(&connection.stream) {
                    Ok(written) => {
                        sent += written;
                        self.counters.bytes.fetch_add(written as u64, Ordering::Relaxed);
                        self.done(&connection, answer);
                    }
                    Err(error) => {
                        let full = error.kind() == io::ErrorKind::WouldBlock;
                        if full || error.kind() == io::ErrorKind::Interrupted {
                            connection.lock().answers.push_front(answer);
                        }
                        if full {
                            self.counters.full_socket.fetch_add(1, Ordering::Relaxed);
                            // It stays busy: the receiver brings it back when there is room, or drops it.
                            let mut sending = connection.lock();
                            sending.full = true;
                            self.watch(&connection, &sending);
                            break;
                        }
                    }
                }
                if sent >= TURN {
                    self.responses.put_back(connection);
                    break;
                }
            }
        }
    }

    fn done(&self, connection: &Connection, answer: Answer) {
        let mut sending = connection.lock();
        match answer.state() {
            State::InChunk => sending.answers.push_front(answer),
            State::BetweenChunks => sending.answers.push_back(answer),
            State::Out => {
                sending.unanswered -= 1;
                if !answer.waited {
                    self.one_less(connection, &mut sending);
                }
                drop(sending);
                if !answer.head.failed && answer.head.next == answer.head.messages {
                    self.store.fetched(answer.name);
                }
                self.counters.chunks.fetch_add(u64::from(answer.head.chunks), Ordering::Relaxed);
            }
        }
    }
}

impl Connection {
    fn lock(&self) -> MutexGuard<'_, Sending> {
        self.sending.lock().expect("nobody panics with it")
    }
}

impl Sending {
    /// What is to be sent next. Without it the connection is idle.
    fn next(&mut self) -> Option<Answer> {
        let next = self.answers.pop_front();
        self.busy = next.is_some();
        next
    }
}

enum State {
    InChunk,
    BetweenChunks,
    Out,
}

impl Answer {
    fn new(request: &Request, block: Block, chunk: usize) -> Self {
        let first = usize::try_from(request.first).unwrap_or(usize::MAX).min(block.messages.len());
        let (mut last, mut bytes) = (first, 0_u64);
        let most = request.most.min(stream::LARGEST as u64);
        while let Some(message) = block.messages.get(last)
            && (last == first || bytes + message.encoded_len() as u64 <= most)
        {
            bytes += message.encoded_len() as u64;
            last += 1;
        }
        let chunk = chunk as u64;
        let head = Head {
            request: request.id,
            failed: false,
            length: 0,
            sequence: 0,
            chunks: u32::try_from(bytes.div_ceil(chunk).max(1)).expect("2 GiB in chunks of some size"),
            bytes,
            next: last as u64,
            messages: block.messages.len() as u64,
            chunk,
        };
        Self::begin(request, head, first..last, block, Vec::new())
    }

    fn failed(request: &Request, error: &Error) -> Self {
        let text = crate::wire::text(&error.to_string());
        let bytes = text.len() as u64;
        let (request_id, chunk) = (request.id, bytes.max(1));
        let head = Head {
            request: request_id,
            failed: true,
            length: 0,
            sequence: 0,
            chunks: 1,
            bytes,
            next: 0,
            messages: 0,
            chunk,
        };
        Self::begin(request, head, 0..0, Block::default(), text)
    }

    fn begin(
        request: &Request,
        head: Head,
        messages: std::ops::Range<usize>,
        block: Block,
        text: Vec<u8>,
    ) -> Self {
        let name = (request.shuffle, request.source, request.target);
        let chunks = head.chunks;
        let mut answer = Self { name, head, messages, block, text, written: 0, chunks, waited: false };
        answer.head.length = answer.length();
        answer
    }

    /// Of the present chunk.
    fn length(&self) -> u32 {
        let begin = u64::from(self.head.sequence) * self.head.chunk;
        u32::try_from((self.head.bytes - begin).min(self.head.chunk)).expect("a chunk's size is bounded")
    }

    fn state(&self) -> State {
        match (self.written, self.head.sequence == self.chunks) {
            (_, true) => State::Out,
            (0, false) => State::BetweenChunks,
            (_, false) => State::InChunk,
        }
    }

    /// One write of the present chunk. Returns its bytes.
    fn write(&mut self, stream: &TcpStream) -> io::Result<usize> {
        let head = self.head.to_bytes();
        let length = self.head.length as usize;
        let mut areas = Vec::with_capacity(64);
        if self.written < HEAD {
            areas.push(IoSlice::new(&head[self.written..]));
        }
        let mut skip = self.head.begin() + self.written.saturating_sub(HEAD);
        let mut left = length - self.written.saturating_sub(HEAD);
        let messages = self.block.messages[self.messages.clone()].iter().flat_map(Message::slices);
        for area in messages.chain(std::iter::once(&self.text[..])) {
            if left == 0 || areas.len() == 1024 {
                break;
            }
            if skip >= area.len() {
                skip -= area.len();
                continue;
            }
            let area = &area[skip..];
            let area = &area[..area.len().min(left)];
            skip = 0;
            left -= area.len();
            areas.push(IoSlice::new(area));
        }
        let mut socket = stream;
        let written = socket.write_vectored(&areas)?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.written += written;
        if self.written == HEAD + length {
            self.written = 0;
            self.head.sequence += 1;
            if self.head.sequence < self.chunks {
                self.head.length = self.length();
            }
        }
        Ok(written)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{ArrayRef, Int64Array, RecordBatch};

    use super::*;
    use crate::WorkerId;
    use crate::stream::Out;

    #[test]
    fn whoever_asks_for_too_much_gets_what_a_client_takes() {
        let column: ArrayRef = Arc::new(Int64Array::from(vec![0; 8 << 20]));
        let batch = RecordBatch::try_from_iter([("n", column)]).unwrap();
        let mut out = Out::new(&batch.schema()).unwrap();
        // Of 2.5 GiB, all the same memory.
        let messages = (0..40).flat_map(|_| out.frame(&batch).unwrap()).collect();
        let block = Arc::new(super::super::store::Rows { messages, batches: Vec::new() });
        let (source, target) = (WorkerId(0), WorkerId(1));
        let request = Request { id: 1, shuffle: 1, source, target, first: 0, most: u64::MAX };
        let head = Answer::new(&request, block, 1).head;
        assert!(head.next > 30 && head.next < head.messages);
        assert_eq!(Head::from_bytes(&head.to_bytes()), Some(head));
    }
}

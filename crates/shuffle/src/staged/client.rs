//! The asking side: connections, each shared by all workers of this process, and answers put together from their chunks.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use arrow_buffer::{Buffer, MutableBuffer};

use super::Config;
use super::server::Server;
use super::wire::{HEAD, HELLO, Head, Request, process_of};
use crate::{Cluster, Error, NodeId, Pool, Result, WorkerId, deadline, socket};

/// Between two tries to connect.
const PAUSE: Duration = Duration::from_millis(20);

/// How long it may take to connect to say something that nobody waits for, and until that is tried again.
const BRIEFLY: Duration = Duration::from_secs(1);

/// Blocks that nobody wants, of a process that is not there to be told.
const UNSAID: usize = 4096;

/// What is said of a process whose address has another.
const ANEW: &str = "it has been started anew";

/// An answer as a whole: messages of a stream.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) memory: Buffer,
    /// The message behind it, and how many there are in the block.
    pub(super) next: u64,
    pub(super) messages: u64,
}

/// What becomes of a request.
#[derive(Debug, Default)]
pub(super) struct Pending {
    result: Mutex<Option<Result<Answer>>>,
    news: Condvar,
}

impl Pending {
    /// Sleeps until there is an answer.
    pub(super) fn wait(&self) -> Result<Answer> {
        let result = self.result.lock().expect("nobody panics with it");
        let mut result =
            self.news.wait_while(result, |result| result.is_none()).expect("nobody panics with it");
        result.take().expect("waited for")
    }

    fn complete(&self, result: Result<Answer>) {
        *self.result.lock().expect("nobody panics with it") = Some(result);
        self.news.notify_one();
    }
}

#[derive(Debug, Default)]
struct Waiting {
    pending: HashMap<u64, Arc<Pending>>,
    /// Threads that write a request: it is in use.
    writing: usize,
    /// Nothing can be asked any more.
    closed: bool,
}

#[derive(Debug)]
struct Connection {
    node: NodeId,
    stream: TcpStream,
    /// Held while a request is written.
    writing: Mutex<()>,
    waiting: Mutex<Waiting>,
}

/// What has been fetched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientStatus {
    /// Connections that were made.
    pub connections: u64,
    /// Of these, closed because nobody had used them for a while.
    pub idle: u64,
    pub requests: u64,
    pub chunks: u64,
    pub bytes: u64,
}

#[derive(Debug, Default)]
struct Counters {
    connections: AtomicU64,
    idle: AtomicU64,
    requests: AtomicU64,
    chunks: AtomicU64,
    bytes: AtomicU64,
}

/// To whom, and for whom if connections are not shared.
type Key = (NodeId, Option<WorkerId>);

#[derive(Debug, Default)]
struct Open {
    connections: HashMap<Key, Arc<Connection>>,
    /// Somebody is making this one.
    connecting: HashSet<Key>,
    /// Processes that there was a connection to.
    met: HashSet<NodeId>,
    /// What each said it is.
    processes: HashMap<NodeId, u64>,
    /// Processes of which another has taken the address. It would wait for what the one before had begun.
    replaced: HashSet<NodeId>,
    /// Until when a process that can't be reached is waited for, by all workers together.
    deadlines: HashMap<NodeId, Instant>,
    /// When a process that was to be told something could last not be connected to.
    unreached: HashMap<NodeId, Instant>,
    /// Of blocks that nobody wants: to be said on the next connection.
    unsaid: HashMap<Key, Vec<Request>>,
    readers: Vec<JoinHandle<()>>,
    closed: bool,
}

#[derive(Debug)]
pub(super) struct Client {
    cluster: Cluster,
    config: Config,
    /// Which is told who is gone.
    server: Arc<Server>,
    pub(super) pool: Pool,
    open: Mutex<Open>,
    /// A connection has been made, or can't be.
    connected: Condvar,
    next: AtomicU64,
    counters: Counters,
}

impl Client {
    pub(super) fn new(cluster: Cluster, config: Config, server: Arc<Server>) -> Arc<Self> {
        let (open, next, counters) = (Mutex::default(), AtomicU64::new(1), Counters::default());
        let (pool, connected) = (Pool::new(config.pool), Condvar::new());
        Arc::new(Self { cluster, config, server, pool, open, connected, next, counters })
    }

    pub(super) fn status(&self) -> ClientStatus {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { connections, idle, requests, chunks, bytes } = &self.counters;
        ClientStatus {
            connections: load(connections),
            idle: load(idle),
            requests: load(requests),
            chunks: load(chunks),
            bytes: load(bytes),
        }
    }

    pub(super) fn carried(&self) -> Vec<thallus_api::Status> {
        let Some(thallus) = thallus_api::Thallus::find() else { return Vec::new() };
        self.lock()
            .connections
            .values()
            .filter_map(|connection| thallus.status(&connection.stream).ok())
            .collect()
    }

    /// Asks for a part of a block.
    pub(super) fn ask(
        self: &Arc<Self>,
        shuffle: u64,
        source: WorkerId,
        target: WorkerId,
        first: u64,
        most: u64,
    ) -> Result<Arc<Pending>> {
        let node = self.cluster.node_of(source);
        let key = self.key(source, target);
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let request = Request { id, shuffle, source, target, first, most };
        let pending = Arc::new(Pending::default());
        // One that is just being closed for idleness makes way for another; two in a row would be a coincidence, three an error.
        for _ in 0..3 {
            let connection = self.connection(key, true)?;
            if self.send(key, &connection, request, Some(&pending)) {
                return Ok(pending);
            }
        }
        Err(not_taken(node, "it closed three connections"))
    }

    /// Says that nobody wants a block, to which there is no answer. Does not wait for a process that is not there: it is told with
    /// the next connection.
    pub(super) fn decline(self: &Arc<Self>, shuffle: u64, source: WorkerId, target: WorkerId) {
        let key = self.key(source, target);
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let request = Request { id, shuffle, source, target, first: 0, most: 0 };
        for _ in 0..3 {
            let mut open = self.lock();
            if open.closed {
                return;
            }
            let Some(connection) = open.connections.get(&key).cloned() else {
                let unsaid = open.unsaid.entry(key).or_default();
                if unsaid.len() < UNSAID {
                    unsaid.push(request);
                }
                let is_due = |unreached: &Instant| unreached.elapsed() > BRIEFLY;
                if open.unreached.get(&key.0).is_none_or(is_due) {
                    drop(open);
                    self.try_to_tell(key);
                }
                return;
            };
            drop(open);
            if self.send(key, &connection, request, None) {
                return;
            }
        }
    }

    /// Connects to those who have not been told that nobody wants their blocks, until `deadline`.
    pub(super) fn tell(self: &Arc<Self>, deadline: Instant) {
        let keys: Vec<_> = self.lock().unsaid.keys().copied().collect();
        keys.into_iter().take_while(|_| Instant::now() < deadline).for_each(|key| self.try_to_tell(key));
    }

    fn try_to_tell(self: &Arc<Self>, key: Key) {
        if self.connection(key, false).is_ok() {
            return;
        }
        let has_been_there = self.has_been_there(key.0);
        let mut open = self.lock();
        // Who is connecting takes it along.
        if !open.connecting.contains(&key) {
            open.unreached.insert(key.0, Instant::now());
            if has_been_there {
                open.unsaid.remove(&key); // it is gone
            }
        }
    }

    fn key(&self, source: WorkerId, target: WorkerId) -> Key {
        (self.cluster.node_of(source), (!self.config.share).then_some(target))
    }

    /// False if the connection is being closed.
    fn send(
        &self,
        key: Key,
        connection: &Arc<Connection>,
        request: Request,
        pending: Option<&Arc<Pending>>,
    ) -> bool {
        let mut waiting = connection.lock();
        if waiting.closed {
            drop(waiting);
            self.lock().forget(key, connection);
            return false;
        }
        if let Some(pending) = pending {
            waiting.pending.insert(request.id, pending.clone());
        }
        waiting.writing += 1;
        drop(waiting);
        self.counters.requests.fetch_add(1, Ordering::Relaxed);
        connection.send(&request.to_bytes(&self.cluster));
        connection.lock().writing -= 1;
        true
    }

    /// One that is there, or is made. Without `waits` an error if that takes time.
    fn connection(self: &Arc<Self>, key: Key, waits: bool) -> Result<Arc<Connection>> {
        {
            let mut open = self.lock();
            loop {
                if open.closed {
                    return Err(Error::Closed);
                }
                if open.replaced.contains(&key.0) {
                    return Err(Error::Gone { node: key.0, why: ANEW.into() });
                }
                if let Some(connection) = open.connections.get(&key) {
                    return Ok(connection.clone());
                }
                if open.connecting.insert(key) {
                    break;
                }
                if !waits {
                    return Err(Error::Gone { node: key.0, why: "it is not there yet".into() });
                }
                open = self.connected.wait(open).expect("nobody panics with it");
            }
        }
        let stream = self.connect(key.0, waits);
        let mut open = self.lock();
        open.connecting.remove(&key);
        self.connected.notify_all();
        let stream = stream?;
        if open.closed {
            return Err(Error::Closed);
        }
        open.met.insert(key.0);
        open.deadlines.remove(&key.0);
        let connection = Arc::new(Connection {
            node: key.0,
            stream,
            writing: Mutex::default(),
            waiting: Mutex::default(),
        });
        let reader = {
            let (client, connection) = (self.clone(), connection.clone());
            let name = format!("fetch {}", key.0.0);
            thread::Builder::new()
                .name(name)
                .spawn(move || client.read(key, &connection))
                .map_err(Error::io("thread"))?
        };
        open.readers.retain(|reader| !reader.is_finished());
        open.readers.push(reader);
        open.connections.insert(key, connection.clone());
        let unsaid = open.unsaid.remove(&key).unwrap_or_default();
        drop(open);
        self.counters.connections.fetch_add(1, Ordering::Relaxed);
        for request in unsaid {
            self.send(key, &connection, request, None);
        }
        Ok(connection)
    }

    /// Until when a process is waited for. Who asks when that has passed does not wait again, for as long.
    fn deadline(&self, node: NodeId) -> Instant {
        let patience = self.config.patience;
        let mut open = self.lock();
        let deadline = open.deadlines.entry(node).or_insert_with(|| deadline::after(patience));
        if Instant::now().saturating_duration_since(*deadline) > patience {
            *deadline = deadline::after(patience);
        }
        *deadline
    }

    fn connect(&self, node: NodeId, waits: bool) -> Result<TcpStream> {
        let address = self.cluster.address(node);
        let (deadline, least) = if waits { (self.deadline(node), PAUSE) } else { (Instant::now(), BRIEFLY) };
        loop {
            let rest = deadline.saturating_duration_since(Instant::now()).max(least);
            let connected = socket::connect(&address, rest).and_then(|stream| {
                socket::prepare(&stream)?;
                stream.set_read_timeout(Some(self.config.idle.max(Duration::from_millis(1))))?;
                Ok(stream)
            });
            match connected {
                Ok(stream) => return Ok(stream),
                // Not there yet.
                Err(error) if socket::is_nobody(&error) && Instant::now() < deadline => {
                    if self.lock().closed {
                        return Err(Error::Closed);
                    }
                    if self.has_been_there(node) {
                        self.lost(node);
                        return Err(Error::Gone { node, why: error.to_string() });
                    }
                    thread::sleep(PAUSE);
                }
                Err(error) => {
                    if socket::is_nobody(&error) && self.has_been_there(node) {
                        self.lost(node);
                    }
                    return Err(Error::Gone { node, why: format!("connect to {address}: {error}") });
                }
            }
        }
    }

    /// Whether a process has been connected to, or has connected and asked: who refuses a connection then is gone.
    fn has_been_there(&self, node: NodeId) -> bool {
        self.server.has_seen(node) || self.lock().met.contains(&node)
    }

    /// A process that was there is not any more: nothing is kept for its workers.
    fn lost(&self, node: NodeId) {
        self.server.store.lost(self.cluster.workers_of(node));
    }

    /// Whether a process is what it was, if it was there before.
    fn is_same(&self, node: NodeId, hello: &[u8; HELLO]) -> std::result::Result<(), String> {
        let Some(process) = process_of(hello, &self.cluster) else {
            return Err("it speaks something else, or belongs to another cluster".into());
        };
        let mut open = self.lock();
        if *open.processes.entry(node).or_insert(process) == process {
            return Ok(());
        }
        open.replaced.insert(node);
        drop(open);
        self.lost(node);
        Err(ANEW.into())
    }

    /// A connection has ended, and perhaps its process.
    fn look_for(&self, node: NodeId) {
        let deadline = Instant::now() + BRIEFLY;
        while !self.lock().closed && Instant::now() < deadline {
            match socket::connect(&self.cluster.address(node), BRIEFLY) {
                Err(error) if socket::is_nobody(&error) => return self.lost(node),
                Err(_) => return,
                Ok(mut stream) => {
                    // One that is just ending may still be connected to, and then closes.
                    let mut hello = [0; HELLO];
                    let heard =
                        stream.set_read_timeout(Some(BRIEFLY)).and_then(|()| stream.read_exact(&mut hello));
                    match heard {
                        Ok(()) => return drop(self.is_same(node, &hello)),
                        Err(error) if is_timeout(&error) => return,
                        Err(_) => thread::sleep(PAUSE),
                    }
                }
            }
        }
    }

    /// The thread of a connection.
    fn read(&self, key: Key, connection: &Arc<Connection>) {
        let ended = self.read_chunks(connection);
        let pending = {
            let mut waiting = connection.lock();
            waiting.closed = true;
            std::mem::take(&mut waiting.pending)
        };
        let mut open = self.lock();
        open.forget(key, connection);
        let closed = open.closed;
        drop(open);
        let _ = connection.stream.shutdown(Shutdown::Both);
        match ended {
            None => {
                self.counters.idle.fetch_add(1, Ordering::Relaxed);
            }
            Some(error) => {
                let error = if closed { Error::Closed } else { error };
                pending.into_values().for_each(|pending| pending.complete(Err(error.clone())));
                self.look_for(connection.node);
            }
        }
    }

    /// Reads until the end, which it returns; None if that is for idleness.
    fn read_chunks(&self, connection: &Connection) -> Option<Error> {
        let node = connection.node;
        let gone = |why: &str| Some(Error::Gone { node, why: why.to_owned() });
        let ended = |heard: bool, why: &str| if heard { gone(why) } else { Some(not_taken(node, why)) };
        let mut answers: HashMap<u64, Assembly> = HashMap::new();
        let mut heard = false;
        loop {
            let mut head = [0; HEAD];
            let mut have = 0;
            while have < HEAD {
                match (&connection.stream).read(&mut head[have..]) {
                    Ok(0) => return ended(heard, "it closed the connection"),
                    Ok(read) => have += read,
                    Err(error) if is_timeout(&error) && have == 0 => {
                        let mut waiting = connection.lock();
                        if waiting.pending.is_empty() && waiting.writing == 0 {
                            waiting.closed = true;
                            return None;
                        }
                    }
                    Err(error) if is_timeout(&error) || error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return ended(heard, &error.to_string()),
                }
            }
            // As long as a head.
            if !std::mem::replace(&mut heard, true) {
                match self.is_same(connection.node, &head) {
                    Ok(()) => continue,
                    Err(why) => return gone(&why),
                }
            }
            let Some(head) = Head::from_bytes(&head) else {
                return gone("a chunk that makes no sense");
            };
            if !connection.lock().pending.contains_key(&head.request) {
                return gone("a chunk that nobody has asked for");
            }
            let answer = answers.entry(head.request).or_insert_with(|| Assembly::new(&head, &self.pool));
            let Some(target) = answer.place(&head) else {
                return gone("chunks that do not fit together");
            };
            if let Err(why) = fill(&connection.stream, target) {
                return gone(&why);
            }
            self.counters.chunks.fetch_add(1, Ordering::Relaxed);
            self.counters.bytes.fetch_add(u64::from(head.length), Ordering::Relaxed);
            if answer.arrived(&head) {
                let answer = answers.remove(&head.request).expect("it was just there");
                let pending = connection.lock().pending.remove(&head.request).expect("looked at above");
                pending.complete(answer.whole(connection.node, &self.pool));
            }
        }
    }

    /// Ends all connections, and waits for their threads.
    pub(super) fn shut(&self) {
        let readers = {
            let mut open = self.lock();
            open.closed = true;
            open.connections.values().for_each(|connection| drop(connection.stream.shutdown(Shutdown::Both)));
            std::mem::take(&mut open.readers)
        };
        readers.into_iter().for_each(|reader| reader.join().expect("it does not panic"));
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().expect("nobody panics with it")
    }
}

impl Open {
    /// A connection is closed, and not to be found again.
    fn forget(&mut self, key: Key, closed: &Arc<Connection>) {
        if self.connections.get(&key).is_some_and(|current| Arc::ptr_eq(current, closed)) {
            self.connections.remove(&key);
        }
    }
}

impl Connection {
    /// A failure is told by the thread that reads.
    fn send(&self, request: &[u8]) {
        let _writing = self.writing.lock().expect("nobody panics with it");
        if (&self.stream).write_all(request).is_err() {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().expect("nobody panics with it")
    }
}

/// Of a connection on which a process has said nothing.
fn not_taken(node: NodeId, ended: &str) -> Error {
    Error::Refused { node, why: format!("it is gone, or has too many connections: {ended}") }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Reads as much as fits, however long it takes.
fn fill(stream: &TcpStream, target: &mut [u8]) -> std::result::Result<(), String> {
    let mut rest = target;
    let mut socket = stream;
    while !rest.is_empty() {
        match socket.read(rest) {
            Ok(0) => return Err("it closed the connection in a chunk".into()),
            Ok(read) => rest = &mut rest[read..],
            Err(error) if is_timeout(&error) || error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.to_string()),
        }
    }
    Ok(())
}

/// An answer of which chunks are missing. They come in any order, each to its place.
#[derive(Debug)]
struct Assembly {
    head: Head,
    memory: MutableBuffer,
    arrived: Vec<bool>,
    missing: usize,
}

impl Assembly {
    fn new(head: &Head, pool: &Pool) -> Self {
        // A head is that of its chunk: so many chunks have bytes, or there is one of none.
        let bytes = usize::try_from(head.bytes).expect("bounded");
        let chunks = head.bytes.div_ceil(head.chunk.max(1)).max(1);
        let arrived = vec![false; usize::try_from(chunks).expect("bounded by the bytes")];
        Self { head: *head, memory: pool.take(bytes), missing: arrived.len(), arrived }
    }

    /// Where a chunk goes. None if it belongs to another answer, or has arrived.
    fn place(&mut self, head: &Head) -> Option<&mut [u8]> {
        let Head { length, sequence, .. } = *head;
        let alike =
            Head { length, sequence, ..self.head } == *head && head.chunks as usize == self.arrived.len();
        let sequence = sequence as usize;
        (alike && !self.arrived[sequence])
            .then(|| &mut self.memory[head.begin()..head.begin() + length as usize])
    }

    /// Whether it is whole now.
    fn arrived(&mut self, head: &Head) -> bool {
        self.arrived[head.sequence as usize] = true;
        self.missing -= 1;
        self.missing == 0
    }

    fn whole(self, node: NodeId, pool: &Pool) -> Result<Answer> {
        let Head { failed, bytes, next, messages, .. } = self.head;
        let memory = pool.filled(self.memory, usize::try_from(bytes).expect("bounded"));
        match failed {
            true => Err(Error::Refused { node, why: String::from_utf8_lossy(&memory).into_owned() }),
            false => Ok(Answer { memory, next, messages }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::REQUEST;
    use super::*;

    fn client(cluster: &Cluster) -> Arc<Client> {
        let server = Server::new(cluster.clone(), NodeId(0), Config::default()).unwrap();
        Client::new(cluster.clone(), Config::default(), Arc::new(server))
    }

    /// What asks while a connection is closed for idleness takes another, also to say that nobody wants a block.
    #[test]
    fn a_connection_that_is_being_closed_is_not_used() {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let cluster = Cluster::new(1, &[(address, 1)]).unwrap();
        for most in [1, 0] {
            let client = self::client(&cluster);
            let closing = Connection {
                node: NodeId(0),
                stream: TcpStream::connect(address).unwrap(),
                writing: Mutex::default(),
                waiting: Mutex::new(Waiting { closed: true, ..Waiting::default() }),
            };
            let (mut first, _) = listener.accept().unwrap();
            client.lock().connections.insert((NodeId(0), None), Arc::new(closing));
            match most {
                0 => client.decline(7, WorkerId(0), WorkerId(0)),
                _ => drop(client.ask(7, WorkerId(0), WorkerId(0), 0, most).unwrap()),
            }
            let (mut second, _) = listener.accept().unwrap();
            let mut request = [0; REQUEST];
            second.read_exact(&mut request).unwrap();
            assert_eq!(Request::from_bytes(&request, &cluster).unwrap().shuffle, 7);
            drop(second);
            client.shut();
            assert_eq!(first.read(&mut request).unwrap(), 0, "nothing went there");
        }
    }

    /// Of a process that has been there, and that another thread is just connecting to again.
    #[test]
    fn that_nobody_wants_a_block_is_kept_for_the_connection_that_is_being_made() {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let cluster = Cluster::new(1, &[(listener.local_addr().unwrap(), 1)]).unwrap();
        let client = self::client(&cluster);
        let key = (NodeId(0), None);
        client.lock().met.insert(NodeId(0));
        client.lock().connecting.insert(key);
        client.decline(7, WorkerId(0), WorkerId(0));
        // The other thread goes on.
        client.lock().connecting.remove(&key);
        drop(client.connection(key, true).unwrap());
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let mut request = [0; REQUEST];
        stream.read_exact(&mut request).unwrap();
        assert_eq!(Request::from_bytes(&request, &cluster).unwrap().most, 0);
        drop(stream);
        client.shut();
    }

    #[test]
    fn a_host_that_is_gone_without_a_word_is_noticed() {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let cluster = Cluster::new(1, &[(listener.local_addr().unwrap(), 1)]).unwrap();
        let client = self::client(&cluster);
        client.ask(7, WorkerId(0), WorkerId(0), 0, 1).unwrap();
        assert!(client.lock().connections.values().all(|made| socket::is_prepared(&made.stream)));
        client.shut();
    }

    #[test]
    fn a_connection_that_is_written_to_is_not_idle() {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let client = self::client(&Cluster::new(1, &[(address, 1)]).unwrap());
        let connection = Arc::new(Connection {
            node: NodeId(0),
            stream: TcpStream::connect(address).unwrap(),
            writing: Mutex::default(),
            waiting: Mutex::new(Waiting { writing: 1, ..Waiting::default() }),
        });
        connection.stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let reading = {
            let connection = connection.clone();
            thread::spawn(move || client.read_chunks(&connection))
        };
        let (mut server, _) = listener.accept().unwrap();
        server.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        assert!(is_timeout(&server.read(&mut [0]).unwrap_err()));
        assert!(!reading.is_finished());
        connection.lock().writing = 0;
        assert!(reading.join().unwrap().is_none(), "now it is");
    }

    fn chunk(sequence: u32, length: u32) -> Head {
        Head {
            request: 1,
            failed: false,
            length,
            sequence,
            chunks: 3,
            bytes: 250,
            next: 7,
            messages: 9,
            chunk: 100,
        }
    }

    #[test]
    fn chunks_in_any_order_make_the_same_answer() {
        let pool = Pool::new(0);
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let mut assembly = Assembly::new(&chunk(order[0], 0), &pool);
            for (n, sequence) in order.into_iter().enumerate() {
                let head = chunk(sequence, if sequence == 2 { 50 } else { 100 });
                assembly.head.length = head.length;
                assembly.place(&head).unwrap().fill(u8::try_from(sequence).unwrap());
                assert_eq!(assembly.arrived(&head), n == 2);
                assert!(assembly.place(&head).is_none(), "it has arrived");
            }
            let answer = assembly.whole(NodeId(1), &pool).unwrap();
            let whole: Vec<u8> = (0..250).map(|at| u8::try_from(at / 100).unwrap()).collect();
            assert_eq!((&answer.memory[..], answer.next, answer.messages), (&whole[..], 7, 9));
        }
    }

    #[test]
    fn chunks_of_another_answer_do_not_fit() {
        let pool = Pool::new(0);
        let mut assembly = Assembly::new(&chunk(0, 100), &pool);
        assert!(assembly.place(&Head { bytes: 251, ..chunk(1, 100) }).is_none());
        assert!(assembly.place(&Head { next: 8, ..chunk(1, 100) }).is_none());
        assert!(assembly.place(&chunk(1, 100)).is_some());
    }
}

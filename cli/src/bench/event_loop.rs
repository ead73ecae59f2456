//! Ping-pong on many connections from one level-triggered epoll loop on each side.
//!
//! One message is outstanding on each connection. A connection either receives or sends, and is registered
//! for that alone; a loop turns to a connection once for each event, as servers do.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::latency::{Latency, SAMPLED, Times};
use super::message::{Author, Phase, Reader};
use super::role::{Meter, Report, Session, Usage};
use super::socket::{Endpoint, Listener, Moved, receive, set_nonblocking, transmit};

const LISTENER: u64 = u64::MAX;

/// Echoes the messages of all connections until the last one has come and all are closed.
pub(super) fn serve(listener: &Listener, size: usize, mut meter: Meter) -> anyhow::Result<Report> {
    let mut events = Events::new()?;
    listener.set_nonblocking()?;
    events.add(listener, LISTENER)?;
    let mut connections: Vec<Option<Echo>> = Vec::new();
    let mut open = 0;
    while open > 0 || !meter.has_ended() {
        for token in events.wait()? {
            if token == LISTENER {
                while let Some(stream) = accept(listener)? {
                    events.add(&stream, connections.len() as u64)?;
                    connections
                        .push(Some(Echo { channel: Channel::new(stream, size), reader: Reader::new(size) }));
                    open += 1;
                }
                continue;
            }
            let slot = usize::try_from(token)?;
            let echo = connections[slot].as_mut().context("an event of a closed connection")?;
            if !echo.turn(&events, token, &mut meter)? {
                connections[slot] = None;
                open -= 1;
            }
        }
    }
    meter.finish()
}

/// Keeps one message outstanding on each of `connections` connections.
pub(super) fn drive(session: &Session, size: usize, connections: usize) -> anyhow::Result<Report> {
    let mut clients = Clients::new(size)?;
    clients.open(&session.endpoint, connections)?;
    // Of many each would be used too little in the time of the warm-up to find its peer.
    clients.use_all()?;
    clients.measure(session)
}

/// Bytes of a message in a herd.
pub(super) const HERD_SIZE: usize = 64;
/// Round trips on each connection before the warm-up.
const ROUND_TRIPS: usize = 12;
/// Descriptors that are not connections. The library needs some while they look for their peers.
const OTHERS: u64 = 1024;

/// Keeps one message outstanding on each of `active` connections, while others are open.
pub(super) fn drive_herd(session: &Session, active: usize, connections: usize) -> anyhow::Result<Report> {
    let mut clients = Clients::new(HERD_SIZE)?;
    clients.open(&session.endpoint, connections)?;
    clients.use_all()?;
    clients.active = active;
    clients.measure(session)
}

/// Lets this process, and those that it starts, open so many connections.
pub(super) fn allow_connections(count: usize) -> anyhow::Result<()> {
    let wanted = count as u64 + OTHERS;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("RLIMIT_NOFILE")?;
    if soft < wanted {
        ensure!(hard >= wanted, "it needs {wanted} descriptors, and the limit is {hard} (ulimit -Hn)");
        setrlimit(Resource::RLIMIT_NOFILE, wanted, hard).context("RLIMIT_NOFILE")?;
    }
    Ok(())
}

/// The connections of a client.
pub(super) struct Clients {
    events: Events,
    all: Vec<Client>,
    /// How many of them are used.
    active: usize,
    size: usize,
}

struct Client {
    channel: Channel,
    author: Author,
}

impl Clients {
    /// None yet, for messages of `size` bytes.
    pub(super) fn new(size: usize) -> anyhow::Result<Self> {
        Ok(Self { events: Events::new()?, all: Vec::new(), active: 0, size })
    }

    /// Opens `count` more connections.
    pub(super) fn open(&mut self, endpoint: &Endpoint, count: usize) -> anyhow::Result<()> {
        for _ in 0..count {
            let stream = set_nonblocking(endpoint.connect().context("connect")?)?;
            let number = self.all.len();
            self.events.add(&stream, number as u64)?;
            let author = Author::new(u16::try_from(number)?, self.size);
            self.all.push(Client { channel: Channel::new(stream, self.size), author });
        }
        self.active = self.all.len();
        Ok(())
    }

    /// Round trips on all active connections at once for at least `limit`, and at least one on each; returns their
    /// number, the time until the last reply was in, and how long some of those on the first connection took.
    pub(super) fn run(&mut self, phase: Phase, limit: Duration) -> anyhow::Result<(u64, Duration, Times)> {
        let start = Instant::now();
        let (mut count, mut of_first) = (0, 0_u64);
        let (mut latency, mut began) = (Latency::new(), None);
        let mut outstanding = self.active;
        for number in 0..self.active {
            self.begin(number, phase)?;
        }
        let mut expired = false;
        while outstanding > 0 {
            for token in self.events.wait()? {
                let number = usize::try_from(token)?;
                if !self.turn(number)? {
                    continue;
                }
                count += 1;
                if number == 0 {
                    began.take().into_iter().for_each(|began| latency.note(began));
                    of_first += 1;
                }
                if expired {
                    outstanding -= 1;
                } else {
                    began = began
                        .or_else(|| (number == 0 && of_first.is_multiple_of(SAMPLED)).then(Instant::now));
                    self.begin(number, phase)?;
                }
            }
            expired = expired || start.elapsed() >= limit;
        }
        Ok((count, start.elapsed(), latency.times()))
    }

    /// Some round trips on each connection.
    fn use_all(&mut self) -> anyhow::Result<()> {
        for _ in 0..ROUND_TRIPS {
            self.run(Phase::WarmUp, Duration::ZERO)?;
        }
        Ok(())
    }

    /// Warms up and measures the active connections, then tells the server that this was all.
    fn measure(&mut self, session: &Session) -> anyhow::Result<Report> {
        self.run(Phase::WarmUp, Duration::from_secs_f64(session.warm_up))?;
        let before = Usage::now(false)?;
        let (operations, elapsed, times) =
            self.run(Phase::Measured, Duration::from_secs_f64(session.seconds))?;
        let used = Usage::now(false)?.since(&before, operations);
        self.say_once(Phase::End)?;
        Ok(Report { seconds: elapsed.as_secs_f64(), connections: self.all.len() as u64, times, ..used })
    }

    /// One round trip on the first connection.
    pub(super) fn say_once(&mut self, phase: Phase) -> anyhow::Result<()> {
        self.begin(0, phase)?;
        loop {
            for token in self.events.wait()? {
                ensure!(token == 0, "connection {token} has a message that nobody asked for");
                if self.turn(0)? {
                    return Ok(());
                }
            }
        }
    }

    fn begin(&mut self, number: usize, phase: Phase) -> anyhow::Result<()> {
        let Client { channel, author } = &mut self.all[number];
        author.next(phase);
        channel.begin_sending();
        channel.send(author.message(), &self.events, number as u64)
    }

    /// Goes on with a connection that is ready; `true` when its echo is complete.
    fn turn(&mut self, number: usize) -> anyhow::Result<bool> {
        let Client { channel, author } = &mut self.all[number];
        if channel.sending {
            channel.send(author.message(), &self.events, number as u64)?;
            return Ok(false);
        }
        match channel.receive()? {
            Received::Message => author.check(&channel.buffer).map(|()| true),
            Received::Part => Ok(false),
            Received::End => bail!("the server closed connection {number}"),
        }
    }
}

struct Echo {
    channel: Channel,
    reader: Reader,
}

impl Echo {
    /// Goes on with a connection that is ready; `false` when it has been closed.
    fn turn(&mut self, events: &Events, token: u64, meter: &mut Meter) -> anyhow::Result<bool> {
        if !self.channel.sending {
            match self.channel.receive()? {
                Received::Message => meter.observe(self.reader.check(&self.channel.buffer)?)?,
                Received::Part => return Ok(true),
                Received::End => return Ok(false),
            }
            self.channel.begin_sending();
        }
        self.channel.send_back(events, token)?;
        Ok(true)
    }
}

/// A non-blocking connection that moves one message at a time.
struct Channel {
    stream: OwnedFd,
    /// The message being received, and for an echo also the one being sent.
    buffer: Vec<u8>,
    /// Bytes of the message that have been moved.
    done: usize,
    sending: bool,
    /// What the epoll instance has been asked for.
    wants_space: bool,
}

enum Received {
    Message,
    Part,
    End,
}

impl Channel {
    fn new(stream: OwnedFd, size: usize) -> Self {
        Self { stream, buffer: vec![0; size], done: 0, sending: false, wants_space: false }
    }

    fn receive(&mut self) -> anyhow::Result<Received> {
        match receive(&self.stream, &mut self.buffer[self.done..]).context("receive")? {
            Moved::Bytes(count) => self.done += count,
            Moved::NotNow => {}
            Moved::End => {
                ensure!(self.done == 0, "the stream ended within a message");
                return Ok(Received::End);
            }
        }
        if self.done < self.buffer.len() {
            return Ok(Received::Part);
        }
        self.done = 0;
        Ok(Received::Message)
    }

    fn begin_sending(&mut self) {
        self.done = 0;
        self.sending = true;
    }

    fn send_back(&mut self, events: &Events, token: u64) -> anyhow::Result<()> {
        let message = std::mem::take(&mut self.buffer);
        let sent = self.send(&message, events, token);
        self.buffer = message;
        sent
    }

    /// Sends what is left of `message`; if that has to wait, the next event says when to go on.
    fn send(&mut self, message: &[u8], events: &Events, token: u64) -> anyhow::Result<()> {
        while self.done < message.len() {
            match transmit(&self.stream, &message[self.done..]).context("send")? {
                Moved::Bytes(count) => self.done += count,
                Moved::NotNow => return self.want_space(true, events, token),
                Moved::End => unreachable!("send reports no end"),
            }
        }
        self.done = 0;
        self.sending = false;
        self.want_space(false, events, token)
    }

    fn want_space(&mut self, wanted: bool, events: &Events, token: u64) -> anyhow::Result<()> {
        if self.wants_space != wanted {
            let interest = if wanted { EpollFlags::EPOLLOUT } else { EpollFlags::EPOLLIN };
            events.epoll.modify(&self.stream, &mut EpollEvent::new(interest, token)).context("epoll_ctl")?;
            self.wants_space = wanted;
        }
        Ok(())
    }
}

struct Events {
    epoll: Epoll,
    ready: [EpollEvent; 64],
}

impl Events {
    fn new() -> anyhow::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("epoll_create")?;
        Ok(Self { epoll, ready: [EpollEvent::empty(); 64] })
    }

    fn add(&self, fd: impl AsFd, token: u64) -> anyhow::Result<()> {
        self.epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, token)).context("epoll_ctl")
    }

    /// The tokens that are ready, at least one.
    fn wait(&mut self) -> anyhow::Result<impl Iterator<Item = u64> + use<>> {
        let count = loop {
            match self.epoll.wait(&mut self.ready, EpollTimeout::NONE) {
                Ok(count) => break count,
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error).context("epoll_wait"),
            }
        };
        // A copy, so that the connections can change their registration meanwhile.
        let ready = self.ready;
        Ok(ready.into_iter().take(count).map(|event| event.data()))
    }
}

fn accept(listener: &Listener) -> anyhow::Result<Option<OwnedFd>> {
    match listener.accept() {
        Ok(stream) => Ok(Some(set_nonblocking(stream)?)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error).context("accept"),
    }
}

//! The two sides. On a TCP connection they introduce their queue pairs, and then the client says what comes next: an [`Order`] for each
//! measurement, which the server answers before the first message and after the last. Messages prove themselves
//! (`bench::message`), on another TCP connection or over the device.
//!
//! ```text
//!   client                                          server
//!   {"hello": version, queue pair, memory, nonce}
//!                                                   {"welcome": queue pair, memory, device, machine}
//!   {"measure": case, seconds} ………………………………………………  "ready"
//!     messages, echoed, until one says that it is the last
//!                                                   {"served": …}
//!   "done"
//! ```

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::yield_now;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thallus_transport::arena::Role;
use thallus_transport::reason::Reason;
use thallus_transport::verbs::Endpoint;
use thallus_transport::verbs::board::Memory;
use thallus_transport::verbs::probe::Wire;

use super::device::{self, Device};
use super::plan::{self, Case, Path};
use crate::bench::machine::{self, Machine};
use crate::bench::message::{Author, Phase, Reader};
use crate::bench::plan::allowed_cpus;
use crate::tell;

/// Of what the two sides tell each other. Both have to be of the same.
const VERSION: u32 = 1;
/// Bytes of the longest line.
const LONGEST_LINE: u64 = 64 << 10;
/// How long a side waits for the other, beyond what a measurement takes.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long the rest of a message may take whose end is there: on a device that does not place bytes in order.
const REST: Duration = Duration::from_secs(1);
/// The part of a measurement's time that precedes it.
const WARM_UP: f64 = 0.2;
/// Round trips between two looks at the clock.
const BATCH: u64 = 16;
/// Looks for a message between two looks at the clock.
const LOOKS: u32 = 1000;

/// What was measured, and where.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) client: Host,
    pub(super) server: Host,
    pub(super) results: Vec<Measured>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Host {
    pub(super) address: String,
    pub(super) machine: Machine,
    pub(super) device: Device,
}

/// All measurements of one case.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) case: Case,
    /// Round trips per second.
    pub(super) rates: Vec<f64>,
    /// Messages that had been sent.
    pub(super) messages: u64,
    /// Those of them that seemed complete before all of their bytes were there.
    pub(super) early: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Introduction {
    number: u32,
    psn: u32,
    mtu: u32,
    gid: [u8; 16],
    manager: Option<u16>,
    inbox: u64,
    inbox_key: u32,
    ring: u32,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Order {
    Hello { version: u32, introduction: Introduction, nonce: [u8; 16], inline_bytes: usize },
    Measure { case: Case, seconds: f64 },
    Done,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Answer {
    Welcome { introduction: Introduction, host: Box<Host> },
    Refused(String),
    Ready,
    Served { messages: u64, early: u64 },
}

/// Serves one client.
pub(super) fn serve(listener: &TcpListener) -> anyhow::Result<()> {
    let (stream, client) = listener.accept().context("accept")?;
    let mut control = Lines::new(stream)?;
    let Order::Hello { version, introduction, nonce, .. } = control.hear()? else {
        bail!("{client} does not introduce itself");
    };
    let (mut wire, host) = match greet(&control, version) {
        Ok(side) => side,
        Err(error) => {
            control.say(&Answer::Refused(format!("{error:#}")))?;
            return Err(error);
        }
    };
    let (endpoint, memory) = introduction.parts();
    wire.connect(endpoint, memory, Role::Server, client, nonce).map_err(unconnected)?;
    control.say(&Answer::Welcome { introduction: Introduction::of(&wire), host: Box::new(host) })?;
    await_queue_pair(&wire)?;
    let (stream, other) = listener.accept().context("accept")?;
    ensure!(other.ip() == client.ip(), "{other} comes in between");
    stream.set_nodelay(true)?;
    let mut way = Ways::new(wire, stream);
    loop {
        match control.hear()? {
            Order::Measure { case, seconds } => {
                plan::check(case, seconds)?;
                way.begin(case, seconds)?;
                control.say(&Answer::Ready)?;
                let (messages, early) = way.echo(case, seconds)?;
                control.say(&Answer::Served { messages, early })?;
            }
            Order::Done => return Ok(()),
            Order::Hello { .. } => bail!("{client} introduces itself twice"),
        }
    }
}

fn greet(control: &Lines, version: u32) -> anyhow::Result<(Wire, Host)> {
    ensure!(version == VERSION, "the client speaks version {version}, this side {VERSION}");
    control.wire()
}

/// Measures all cases with the server at one of these addresses.
pub(super) fn drive(addresses: &[SocketAddr], rounds: u32, seconds: f64) -> anyhow::Result<Outcome> {
    let stream = TcpStream::connect(addresses)
        .with_context(|| format!("{}: is thallus bench verbs --listen running there?", addresses[0]))?;
    let server = stream.peer_addr()?;
    let mut control = Lines::new(stream)?;
    let (mut wire, client) = control.wire()?;
    let mut nonce = [0; 16];
    std::fs::File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut nonce))?;
    let inline_bytes = wire.inline_limit();
    let introduction = Introduction::of(&wire);
    control.say(&Order::Hello { version: VERSION, introduction, nonce, inline_bytes })?;
    let (introduction, server_host) = match control.hear()? {
        Answer::Welcome { introduction, host } => (introduction, *host),
        Answer::Refused(why) => bail!("the server refuses: {why}"),
        other => bail!("unexpected answer {other:?}"),
    };
    let (endpoint, memory) = introduction.parts();
    wire.connect(endpoint, memory, Role::Client, server, nonce).map_err(unconnected)?;
    await_queue_pair(&wire)?;
    let stream = TcpStream::connect(server).context("connect once more, for TCP")?;
    stream.set_nodelay(true)?;
    let mut way = Ways::new(wire, stream);
    let cases = plan::plan(inline_bytes.min(server_host.device.inline_bytes));
    let mut results: Vec<_> =
        cases.into_iter().map(|case| Measured { case, rates: Vec::new(), messages: 0, early: 0 }).collect();
    for round in 1..=rounds {
        tell(format_args!("round {round} of {rounds}\n"));
        for Measured { case, rates, messages, early } in &mut results {
            way.begin(*case, seconds)?;
            control.say(&Order::Measure { case: *case, seconds })?;
            ensure!(matches!(control.hear()?, Answer::Ready), "the server is not ready");
            let asked = way.ask(*case, seconds).with_context(|| format!("{case:?}"))?;
            let Answer::Served { messages: served, early: early_there } = control.hear()? else {
                bail!("the server does not report");
            };
            ensure!(served == asked.messages, "{} messages sent, {served} served", asked.messages);
            rates.push(asked.rate);
            *messages += 2 * served;
            *early += asked.early + early_there;
        }
    }
    control.say(&Order::Done)?;
    Ok(Outcome { client, server: server_host, results })
}

fn await_queue_pair(wire: &Wire) -> anyhow::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !wire.is_connected().map_err(unconnected)? {
        ensure!(Instant::now() < deadline, "the queue pair does not connect");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn unconnected(reason: Reason) -> anyhow::Error {
    anyhow::anyhow!("the queue pair can't be connected ({reason})")
}

/// What a client found out about one measurement.
struct Asked {
    rate: f64,
    messages: u64,
    early: u64,
}

/// The two roads between the sides.
struct Ways {
    wire: Wire,
    stream: TcpStream,
    /// Whether there is but one processor: the kernel, or the other side, may need it.
    shares: bool,
}

impl Ways {
    fn new(wire: Wire, stream: TcpStream) -> Self {
        Self { wire, stream, shares: allowed_cpus().is_ok_and(|cpus| cpus.len() < 2) }
    }

    fn begin(&mut self, case: Case, seconds: f64) -> anyhow::Result<()> {
        if let Some(run) = case.run() {
            self.wire.begin(run);
        }
        let limit = Duration::from_secs_f64(seconds) + PATIENCE;
        self.stream.set_read_timeout(Some(limit)).context("set a limit")
    }

    /// Sends messages, and waits for the echo of each.
    fn ask(&mut self, case: Case, seconds: f64) -> anyhow::Result<Asked> {
        let mut author = Author::new(0, case.size as usize);
        let mut echo = vec![0; case.size as usize];
        let (mut messages, mut early, mut rate) = (0, 0, 0.0);
        let one = |way: &mut Self, author: &mut Author, echo: &mut [u8], phase| -> anyhow::Result<u64> {
            way.send(case.path, author.next(phase))?;
            way.receive(case.path, echo, |echo| author.check(echo))
        };
        for (phase, part) in [(Phase::WarmUp, WARM_UP), (Phase::Measured, 1.0)] {
            let (start, before) = (Instant::now(), messages);
            let limit = Duration::from_secs_f64(seconds * part);
            loop {
                for _ in 0..BATCH {
                    early += one(self, &mut author, &mut echo, phase)?;
                }
                messages += BATCH;
                let elapsed = start.elapsed();
                if elapsed >= limit {
                    rate = (messages - before) as f64 / elapsed.as_secs_f64();
                    break;
                }
            }
        }
        early += one(self, &mut author, &mut echo, Phase::End)?;
        Ok(Asked { rate, messages: messages + 1, early })
    }

    /// Echoes messages until the last: how many, and how many of them came early.
    fn echo(&mut self, case: Case, seconds: f64) -> anyhow::Result<(u64, u64)> {
        let mut reader = Reader::new(case.size as usize);
        let mut message = vec![0; case.size as usize];
        let (mut messages, mut early) = (0, 0);
        let deadline = Instant::now() + Duration::from_secs_f64(2.0 * seconds) + PATIENCE;
        loop {
            let mut phase = Phase::WarmUp;
            early += self.receive(case.path, &mut message, |message| {
                phase = reader.check(message)?;
                Ok(())
            })?;
            self.send(case.path, &message)?;
            messages += 1;
            if phase == Phase::End {
                return Ok((messages, early));
            }
            if messages % (64 * BATCH) == 0 {
                ensure!(Instant::now() < deadline, "the client does not come to an end");
            }
        }
    }

    fn send(&mut self, path: Path, message: &[u8]) -> anyhow::Result<()> {
        match path {
            Path::Tcp => self.stream.write_all(message).context("send over TCP"),
            _ => self.wire.send(message).context("post to the queue pair"),
        }
    }

    /// Waits for a message that passes `check`. 1 if it seemed complete before it did, else 0.
    fn receive(
        &mut self,
        path: Path,
        target: &mut [u8],
        mut check: impl FnMut(&[u8]) -> anyhow::Result<()>,
    ) -> anyhow::Result<u64> {
        if path == Path::Tcp {
            self.stream.read_exact(target).context("receive over TCP")?;
            return check(target).map(|()| 0);
        }
        let (mut looks, mut deadline, mut since) = (0u32, None, None);
        loop {
            if self.wire.look(target).context("read from the ring")? {
                match check(target) {
                    Ok(()) => {
                        self.wire.release();
                        return Ok(u64::from(since.is_some()));
                    }
                    Err(error) if since.is_some_and(|since: Instant| since.elapsed() > REST) => {
                        return Err(error);
                    }
                    Err(_) => drop(since.get_or_insert_with(Instant::now)),
                }
            }
            looks += 1;
            if self.shares {
                yield_now();
            } else {
                std::hint::spin_loop();
            }
            if looks.is_multiple_of(LOOKS) {
                let now = Instant::now();
                ensure!(now < *deadline.get_or_insert(now + PATIENCE), "no message comes");
                ensure!(!self.wire.is_broken(), "the queue pair has failed");
                yield_now();
            }
        }
    }
}

impl Introduction {
    fn of(wire: &Wire) -> Self {
        let (Endpoint { number, psn, mtu, gid, manager }, Memory { inbox, inbox_key, ring, .. }) =
            wire.introduction();
        Self { number, psn, mtu, gid, manager, inbox, inbox_key, ring }
    }

    fn parts(&self) -> (Endpoint, Memory) {
        let &Self { number, psn, mtu, gid, manager, inbox, inbox_key, ring } = self;
        (Endpoint { number, psn, mtu, gid, manager }, Memory { inbox, inbox_key, ring, ..Memory::default() })
    }
}

/// The TCP connection on which the sides agree: a line of JSON each way.
struct Lines {
    stream: TcpStream,
    reader: BufReader<TcpStream>,
}

impl Lines {
    fn new(stream: TcpStream) -> anyhow::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE * 30))?;
        let reader = BufReader::new(stream.try_clone()?);
        Ok(Self { stream, reader })
    }

    /// A queue pair for this connection's own address, and what to say of it.
    fn wire(&self) -> anyhow::Result<(Wire, Host)> {
        let local = self.stream.local_addr()?;
        let local = SocketAddr::new(local.ip().to_canonical(), local.port());
        let wire =
            Wire::create(local).map_err(|reason| anyhow::anyhow!(device::refusal(reason, local.ip())))?;
        let host =
            Host { address: local.ip().to_string(), machine: machine::facts(), device: Device::of(&wire) };
        Ok((wire, host))
    }

    fn say(&mut self, line: &impl Serialize) -> anyhow::Result<()> {
        let mut text = serde_json::to_string(line)?;
        text.push('\n');
        self.stream.write_all(text.as_bytes()).context("the other side is gone")
    }

    fn hear<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
        let mut line = String::new();
        let count = (&mut self.reader).take(LONGEST_LINE).read_line(&mut line).context("the other side")?;
        ensure!(count > 0, "the other side has left");
        serde_json::from_str(&line).with_context(|| format!("unexpected line {line:?}"))
    }
}

//! What a behaviour is given: its place in the pair, and a control channel to the other side.
//!
//! The two sides keep in step over the control channel, an `AF_UNIX` socket at descriptor 0, so that
//! nothing depends on time: where arrival matters one side syncs after its send and the other polls with
//! a deadline; where absence matters, both sync first and poll with none. Standard output is the
//! transcript. Descriptors from 3 up are the behaviour's own.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno as RawErrno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::time::{ClockId, clock_gettime};
use thallus_api::{Fabric, Thallus};

use crate::calls::{self, Family, Fd, Outcome, quietly};

/// Longest wait for bytes that must come, in milliseconds.
pub const ARRIVAL: libc::c_int = 20_000;

/// Bytes of one warm-up message.
pub const WARM_UP_BYTES: usize = 8;
/// Rounds of warm-up after which a connection on one host has left TCP.
pub const WARM_UP_ROUNDS: usize = 16;
/// Most rounds that are added between hosts, where queue pairs take their time to connect.
pub const SETTLING_ROUNDS: usize = 1000;

/// One of the two processes of a behaviour.
#[derive(Debug)]
pub struct Side {
    /// The address family of its connections.
    pub family: Family,
    /// Request/response rounds that [`Self::warm_up`] makes.
    pub rounds: usize,
    /// Whether this process listens, in a behaviour that leaves connecting to [`Self::connection`].
    pub listens: bool,
}

impl Side {
    /// Has small messages sent at once (`TCP_NODELAY`), as those of `AF_UNIX` always are.
    pub fn send_at_once(&self, fd: Fd) {
        if self.family != Family::Unix {
            calls::set_option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1).expect("TCP_NODELAY");
        }
    }

    /// sendto(2), with an address if that is ignored; a connected socket of `AF_UNIX` refuses any.
    pub fn sendto(&self, fd: Fd, data: &[u8]) -> Outcome<usize> {
        if self.family == Family::Unix { calls::sendto_peer(fd, data, 0) } else { calls::sendto(fd, data, 0) }
    }

    /// What any kernel of the last years takes before anyone reads, in bytes; the exact amount varies from run to run.
    pub fn always_taken(&self) -> usize {
        // `net.core.wmem_default` is 208 KiB, and counts what a buffer needs beside its bytes.
        if self.family == Family::Unix { 128 << 10 } else { 1 << 20 }
    }

    /// What poll(2) adds to its events once the peer's process has ended: `AF_UNIX` then knows that nobody reads, and TCP
    /// learns it from an answer.
    pub fn hangup_at_end(&self) -> libc::c_short {
        if self.family == Family::Unix { libc::POLLHUP } else { 0 }
    }

    /// Waits until the other side gets to the same place.
    pub fn sync(&self, place: &str) {
        self.post(&format!("sync {place}"));
        let theirs = self.next();
        assert_eq!(theirs, format!("sync {place}"), "the two sides are out of step");
    }

    /// Hands a number to the other side's [`Self::told`].
    pub fn tell(&self, value: u64) {
        self.post(&format!("value {value}"));
    }

    /// Takes a number from the other side's [`Self::tell`].
    pub fn told(&self) -> u64 {
        let message = self.next();
        let value = message.strip_prefix("value ").and_then(|value| value.parse().ok());
        value.unwrap_or_else(|| panic!("the two sides are out of step: {message}"))
    }

    /// Whether the other side has got to the next place where the two meet.
    pub fn is_awaited(&self) -> bool {
        let stdin = rustix::stdio::stdin();
        let mut control = [PollFd::new(&stdin, PollFlags::IN)];
        rustix::event::poll(&mut control, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    fn post(&self, message: &str) {
        loop {
            match rustix::net::send(rustix::stdio::stdin(), message.as_bytes(), SendFlags::NOSIGNAL) {
                Err(RawErrno::INTR) => {}
                result => {
                    result.expect("the other side is there");
                    return;
                }
            }
        }
    }

    fn next(&self) -> String {
        let mut buf = [0; 256];
        loop {
            match rustix::net::recv(rustix::stdio::stdin(), &mut buf[..], RecvFlags::empty()) {
                Err(RawErrno::INTR) => {}
                Ok((0, _)) => panic!("the other side is gone"),
                result => {
                    let (len, _) = result.expect("the control channel works");
                    return String::from_utf8_lossy(&buf[..len]).into_owned();
                }
            }
        }
    }

    /// Listens on a free port of the loopback address, and tells the other side's [`Self::connect`].
    pub fn listen(&self) -> Fd {
        let listener = self.listen_quietly();
        self.tell(u64::from(listening_port(listener)));
        listener
    }

    /// As [`Self::listen`], for a side that tells the port itself.
    pub fn listen_quietly(&self) -> Fd {
        quietly(|| {
            let listener = calls::stream_socket(self.family, 0).expect("socket");
            calls::bind(listener, self.family.own(0)).expect("bind");
            calls::listen(listener, 64).expect("listen");
            listener
        })
    }

    /// Takes one connection.
    pub fn accept(&self, listener: Fd) -> Fd {
        calls::accept(listener).expect("accept")
    }

    /// Where the other side's [`Self::listen`] listens.
    pub fn destination(&self) -> SocketAddr {
        self.family.other(self.told() as u16)
    }

    /// Connects to the other side's [`Self::listen`].
    pub fn connect(&self) -> Fd {
        let destination = self.destination();
        self.connect_to(destination)
    }

    /// Connects to `destination`.
    pub fn connect_to(&self, destination: SocketAddr) -> Fd {
        let fd = self.socket();
        calls::connect(fd, destination).expect("connect");
        fd
    }

    /// A socket that can connect to the other side.
    pub fn socket(&self) -> Fd {
        calls::stream_socket(self.family, 0).expect("socket")
    }

    /// One connection to the other side's `connection`, warmed up. The listener stays open, as it does in
    /// a server.
    pub fn connection(&self) -> Fd {
        if self.listens {
            let listener = self.listen();
            let fd = self.accept(listener);
            self.answer_warm_up(fd);
            fd
        } else {
            let fd = self.connect();
            self.warm_up(fd);
            fd
        }
    }

    /// [`Self::rounds`] small requests, each awaiting its response: after these an upgrade is over.
    pub fn warm_up(&self, fd: Fd) {
        self.warm_up_with(fd, self.rounds);
        if self.settles() {
            quietly(|| {
                for _ in 0..SETTLING_ROUNDS {
                    let ours = Progress::of(fd);
                    assert_eq!(calls::send(fd, &[ours as u8; WARM_UP_BYTES], 0), Ok(WARM_UP_BYTES));
                    if Progress::is_final(ours as u8, receive_exactly(fd, WARM_UP_BYTES)[0]) {
                        return;
                    }
                }
            });
        }
    }

    /// The other side of [`Self::warm_up`].
    pub fn answer_warm_up(&self, fd: Fd) {
        self.answer_warm_up_with(fd, self.rounds);
        if self.settles() {
            quietly(|| {
                for _ in 0..SETTLING_ROUNDS {
                    let theirs = receive_exactly(fd, WARM_UP_BYTES)[0];
                    let ours = Progress::of(fd);
                    assert_eq!(calls::send(fd, &[ours as u8; WARM_UP_BYTES], 0), Ok(WARM_UP_BYTES));
                    if Progress::is_final(theirs, ours as u8) {
                        return;
                    }
                }
            });
        }
    }

    /// Whether a warm-up lasts until both sides have left TCP.
    fn settles(&self) -> bool {
        self.rounds >= WARM_UP_ROUNDS && std::env::var_os("THALLUS_TEST_OWN").is_some()
    }

    /// As [`Self::warm_up`], with a fixed number of rounds.
    pub fn warm_up_with(&self, fd: Fd, rounds: usize) {
        quietly(|| {
            for round in 0..rounds {
                let request = (round as u64).to_be_bytes();
                assert_eq!(calls::send(fd, &request, 0), Ok(WARM_UP_BYTES), "request {round}");
                assert_eq!(receive_exactly(fd, WARM_UP_BYTES), request, "response {round}");
            }
        });
    }

    /// The other side of [`Self::warm_up_with`].
    pub fn answer_warm_up_with(&self, fd: Fd, rounds: usize) {
        quietly(|| {
            for round in 0..rounds {
                let request = receive_exactly(fd, WARM_UP_BYTES);
                assert_eq!(request, (round as u64).to_be_bytes(), "request {round}");
                assert_eq!(calls::send(fd, &request, 0), Ok(WARM_UP_BYTES), "response {round}");
            }
        });
    }
}

/// How far one side of a warm-up between hosts is.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Progress {
    Unaware,
    OnTcp,
    OverVerbs,
}

impl Progress {
    fn of(fd: Fd) -> Self {
        let Some(thallus) = Thallus::find() else { return Self::Unaware };
        // SAFETY: the behaviour keeps the descriptor open meanwhile.
        let status = thallus.status(unsafe { BorrowedFd::borrow_raw(fd) });
        if status.is_ok_and(|status| status.fabric == Fabric::Verbs) { Self::OverVerbs } else { Self::OnTcp }
    }

    /// Whether more rounds would change nothing.
    fn is_final(client: u8, server: u8) -> bool {
        let both = [client, server];
        both.contains(&(Self::Unaware as u8)) || both == [Self::OverVerbs as u8; 2]
    }
}

/// The port that a socket is bound to.
pub fn listening_port(fd: Fd) -> u16 {
    quietly(|| calls::local_address(fd)).expect("a bound socket has an address").port()
}

/// Receives until there are `len` bytes.
///
/// # Panics
/// If the stream ends or fails first.
pub fn receive_exactly(fd: Fd, len: usize) -> Vec<u8> {
    let mut data = Vec::with_capacity(len);
    while data.len() < len {
        let piece = quietly(|| calls::recv(fd, len - data.len(), 0)).expect("recv");
        assert!(!piece.is_empty(), "the stream ended {} bytes short", len - data.len());
        data.extend(piece);
    }
    data
}

/// Waits for something to read, which must come: bytes, the end, or an error.
pub fn await_readable(fd: Fd) {
    let ready = quietly(|| calls::poll(&[(fd, libc::POLLIN)], ARRIVAL)).expect("poll");
    assert_ne!(ready[0], 0, "nothing came");
}

/// Lets others run for a moment, in a loop that waits for what they do. A yield would give each of them a whole slice of
/// time: with ten busy processes beside, it took 4 ms (Linux 6.18), and this 0.2.
pub fn pause() {
    std::thread::sleep(Duration::from_micros(1));
}

/// Waits until `len` bytes can be read at once.
pub fn await_unread(fd: Fd, len: usize) {
    let start = Instant::now();
    while quietly(|| calls::unread(fd)).expect("FIONREAD") < len {
        assert!(start.elapsed() < Duration::from_millis(ARRIVAL as u64), "less than {len} bytes came");
        pause();
    }
}

/// Waits for the events that say that the connection is gone.
pub fn await_hangup(fd: Fd) {
    let ready = quietly(|| calls::poll(&[(fd, 0)], ARRIVAL)).expect("poll");
    assert_ne!(ready[0] & (libc::POLLHUP | libc::POLLERR), 0, "no hangup came");
}

/// Waits until a thread of this process sleeps in the kernel.
pub fn await_asleep(thread: libc::pid_t) {
    await_state(&format!("/proc/self/task/{thread}/stat"), 'S');
}

/// Waits until the first thread of the process `pid` sleeps in the kernel.
pub fn await_process_asleep(pid: libc::pid_t) {
    await_state(&format!("/proc/{pid}/stat"), 'S');
}

/// Waits until the process `pid` has been stopped by a signal.
pub fn await_stopped(pid: libc::pid_t) {
    await_state(&format!("/proc/{pid}/stat"), 'T');
}

fn await_state(stat: &str, wanted: char) {
    loop {
        let line = std::fs::read_to_string(stat).expect("it lives");
        // The state follows the name, which stands in parentheses and may hold any character.
        let state = line.rsplit(") ").next().and_then(|rest| rest.chars().next());
        if state == Some(wanted) {
            return;
        }
        assert!(!matches!(state, Some('Z' | 'X')), "it has ended");
        pause();
    }
}

/// Whether a process has ended, and has no descriptors any more. Somebody may still wait for it.
pub fn has_ended(process: libc::pid_t) -> bool {
    // As in `await_asleep`.
    std::fs::read_to_string(format!("/proc/{process}/stat"))
        .map_or(true, |stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['Z', 'X'])))
}

/// Waits until [`has_ended`].
pub fn await_end_of(process: libc::pid_t) {
    let start = Instant::now();
    while !has_ended(process) {
        assert!(start.elapsed() < Duration::from_millis(ARRIVAL as u64), "process {process} lives on");
        std::thread::yield_now();
    }
}

/// Makes a call that must block; once it does, runs `then` on another thread.
pub fn while_blocked<T>(call: impl FnOnce() -> T, then: impl FnOnce() + Send) -> T {
    let thread = calls::thread_id();
    let calling = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !calling.load(Ordering::SeqCst) {
                pause();
            }
            await_asleep(thread);
            then();
        });
        calling.store(true, Ordering::SeqCst);
        call()
    })
}

/// Lets `time` pass, in which nothing may happen to who waits: only a wrong implementation ends that wait.
pub fn let_pass(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::thread::park_timeout(time);
    }
}

/// When a wait began, by the clock, and by the kernel's ticks, in which it counts `SO_RCVTIMEO` (`schedule_timeout`). They may be late, by more
/// than one where the processor is a virtual machine's, and catch up during the wait.
#[derive(Clone, Copy, Debug)]
pub struct Start(Instant, Timespec);

impl Start {
    pub fn now() -> Self {
        Self(Instant::now(), clock_gettime(ClockId::MonotonicCoarse))
    }

    /// By the clock that says more.
    fn elapsed(self) -> Duration {
        let by_ticks = clock_gettime(ClockId::MonotonicCoarse) - self.1;
        self.0.elapsed().max(by_ticks.try_into().expect("no clock goes back"))
    }
}

/// Asserts that a wait took no less than a timeout. Timers may fire a clock tick early in the caller's
/// view, hence the tenth.
pub fn assert_waited(start: Start, timeout: Duration) {
    let waited = start.elapsed();
    assert!(waited >= timeout * 9 / 10, "waited {waited:?} of {timeout:?}");
}

/// A reproducible stream of bytes, of which any part can be made or checked.
#[derive(Clone, Copy)]
pub struct Pattern {
    seed: u64,
    offset: u64,
}

impl Pattern {
    /// The stream of this seed, from its start.
    pub fn new(seed: u64) -> Self {
        Self { seed, offset: 0 }
    }

    /// Bytes made or checked so far.
    pub fn position(&self) -> u64 {
        self.offset
    }

    /// The next `len` bytes.
    pub fn take(&mut self, len: usize) -> Vec<u8> {
        let start = self.offset;
        self.offset += len as u64;
        let first = start / 8;
        let last = self.offset.div_ceil(8);
        let bytes: Vec<u8> = (first..last).flat_map(|word| self.word(word).to_le_bytes()).collect();
        let skip = (start - first * 8) as usize;
        bytes[skip..skip + len].to_vec()
    }

    /// Steps back over bytes that were made but not sent.
    pub fn put_back(&mut self, len: usize) {
        self.offset -= len as u64;
    }

    /// Checks that `data` is what comes next.
    ///
    /// # Panics
    /// At the first byte that differs.
    pub fn expect(&mut self, data: &[u8]) {
        let start = self.offset;
        let wanted = self.take(data.len());
        if let Some(at) = wanted.iter().zip(data).position(|(wanted, byte)| wanted != byte) {
            let end = data.len().min(at + 16);
            panic!(
                "byte {} of the stream is wrong: {:02x?} should be {:02x?}",
                start + at as u64,
                &data[at..end],
                &wanted[at..end]
            );
        }
    }

    /// Word `index`: splitmix64 (Steele, Lea, Flood 2014), which gives each index its own value.
    fn word(&self, index: u64) -> u64 {
        let mut z = self
            .seed
            .wrapping_mul(0xd134_2543_de82_ef95)
            .wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pattern({}, at {})", self.seed, self.offset)
    }
}

/// Sends the next `len` bytes of a pattern, in pieces of up to `piece` bytes.
pub fn send_pattern(fd: Fd, pattern: &mut Pattern, len: usize, piece: usize) {
    let mut left = len;
    while left > 0 {
        let data = pattern.take(left.min(piece));
        let sent = quietly(|| calls::send(fd, &data, 0)).expect("send");
        pattern.put_back(data.len() - sent);
        left -= sent;
    }
}

/// Receives and checks the next `len` bytes of a pattern, in pieces of up to `piece` bytes.
pub fn receive_pattern(fd: Fd, pattern: &mut Pattern, len: usize, piece: usize) {
    let mut left = len;
    while left > 0 {
        let data = quietly(|| calls::recv(fd, left.min(piece), 0)).expect("recv");
        assert!(!data.is_empty(), "the stream ended {left} bytes short");
        pattern.expect(&data);
        left -= data.len();
    }
}

/// Receives and checks bytes of a pattern until the stream ends; how many there were.
pub fn receive_pattern_to_end(fd: Fd, pattern: &mut Pattern) -> usize {
    let mut total = 0;
    loop {
        let data = quietly(|| calls::recv(fd, 65536, 0)).expect("recv");
        if data.is_empty() {
            return total;
        }
        pattern.expect(&data);
        total += data.len();
    }
}

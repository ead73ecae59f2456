//! `thallus export` on arenas of this very process and its children. Sums are of everything on this machine, so that only the
//! least that they must be is known here; what they are exactly is tested beside `Totals`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use prometheus_parse::{Scrape, Value};
use rustix::io::{FdFlags, fcntl_setfd};
use thallus_transport::arena::{Block, Chunk, Role, State, flag};
use thallus_transport::reason::Reason;

/// More than anybody moves in earnest meanwhile.
const MANY: u64 = 1 << 44;

fn thallus(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_thallus"));
    command.arg("export").args(arguments);
    command
}

/// A server, until it is dropped.
struct Exporter {
    child: Child,
    address: String,
}

impl Exporter {
    fn start() -> Self {
        Self::of(&mut thallus(&[]))
    }

    fn of(command: &mut Command) -> Self {
        let mut child = command.args(["--listen", "127.0.0.1:0"]).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.strip_prefix("thallus: http://").unwrap().strip_suffix("/metrics\n").unwrap();
        Self { address: address.to_owned(), child }
    }

    fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.address).unwrap()
    }

    /// Sends this, and reads to the end.
    fn exchange(&self, request: &[u8]) -> String {
        let mut stream = self.connect();
        stream.write_all(request).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn scrape(&self) -> Metrics {
        let answer = self.exchange(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.contains("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{head}");
        assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{head}");
        Metrics::read(body)
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Values by name and labels, such as `thallus_sent_bytes_total{fabric="shm"}`.
struct Metrics {
    counters: BTreeMap<String, f64>,
    gauges: BTreeMap<String, f64>,
}

impl Metrics {
    fn read(text: &str) -> Self {
        let mut metrics = Self { counters: BTreeMap::new(), gauges: BTreeMap::new() };
        let scrape = Scrape::parse(text.lines().map(|line| Ok(line.to_owned()))).unwrap();
        for sample in scrape.samples {
            assert!(scrape.docs.contains_key(&sample.metric), "{} has no HELP", sample.metric);
            let labels: BTreeMap<_, _> = sample.labels.iter().collect();
            let labels: Vec<_> = labels.iter().map(|(name, value)| format!("{name}={value:?}")).collect();
            let name = format!("{}{{{}}}", sample.metric, labels.join(","));
            let counts = sample.metric.ends_with("_total");
            let twice = match sample.value {
                Value::Counter(value) if counts => metrics.counters.insert(name, value),
                Value::Gauge(value) if !counts => metrics.gauges.insert(name, value),
                other => panic!("{name} is of another type: {other:?}"),
            };
            assert_eq!(twice, None);
        }
        metrics
    }

    fn counter(&self, name: &str) -> f64 {
        self.counters[name]
    }

    /// In units of [`MANY`].
    fn many_more(&self, before: &Self, name: &str) -> u64 {
        (self.counter(name) - before.counter(name)) as u64 / MANY
    }

    /// No counter is missing that was there before, or less.
    fn assert_not_before(&self, before: &Self) {
        for (name, value) in &before.counters {
            assert!(self.counters[name] >= *value, "{name}: {} after {value}", self.counters[name]);
        }
    }
}

const SENT: &str = "thallus_sent_bytes_total{fabric=\"shm\"}";
const SENT_BY_RDMA: &str = "thallus_sent_bytes_total{fabric=\"verbs\"}";
const SENT_BY_TCP: &str = "thallus_sent_bytes_total{fabric=\"tcp\"}";
const RECEIVED: &str = "thallus_received_bytes_total{fabric=\"shm\"}";

fn connect(chunk: &Chunk) -> &'static Block {
    let block = chunk.allocate(Role::Client, std::process::id(), 9, 1).unwrap();
    block.raise(flag::READY);
    block
}

#[test]
fn counters_grow_with_traffic_by_fabric() {
    let chunk = Chunk::create(Ok).unwrap();
    let (block, other) = (connect(&chunk), connect(&chunk));
    let exporter = Exporter::start();
    let before = exporter.scrape();

    block.ring_sent.store(3 * MANY, Relaxed);
    block.ring_received.store(5 * MANY, Relaxed);
    block.tcp_sent.store(7 * MANY, Relaxed);
    for counter in [&block.chimes, &block.sleeps, &block.spin_hits] {
        counter.store(2 * MANY, Relaxed);
    }
    other.raise(flag::VERBS | flag::RETURNED);
    other.ring_sent.store(4 * MANY, Relaxed);
    let after = exporter.scrape();

    let expected = [
        (SENT, 3),
        (SENT_BY_RDMA, 4),
        (SENT_BY_TCP, 7),
        (RECEIVED, 5),
        ("thallus_doorbells_sent_total{}", 2),
        ("thallus_sleeps_total{}", 2),
        ("thallus_spin_hits_total{}", 2),
    ];
    for (name, more) in expected {
        assert!(after.many_more(&before, name) >= more, "{name}");
    }
    after.assert_not_before(&before);
    exporter.scrape().assert_not_before(&after);
}

#[test]
fn a_process_that_ends_takes_nothing_back() {
    // The child's alone, from here on.
    let chunk = Chunk::create(Ok).unwrap();
    let block = connect(&chunk);
    fcntl_setfd(chunk.fd().unwrap(), FdFlags::empty()).unwrap();
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();
    let exporter = Exporter::start();
    let start = exporter.scrape();
    block.owner_pid.store(child.id(), Relaxed);
    block.ring_sent.store(6 * MANY, Relaxed);
    let alive = exporter.scrape();
    drop(chunk);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(alive.many_more(&start, SENT) >= 6);
    exporter.scrape().assert_not_before(&alive);
}

#[test]
fn open_connections_are_counted_by_fabric_and_reason() {
    const ENDS: &str = "thallus_connection_ends{fabric=\"tcp\",reason=\"bad-offer\"}";
    let chunk = Chunk::create(Ok).unwrap();
    let blocks = [(); 3].map(|()| chunk.allocate(Role::Server, std::process::id(), 9, 1).unwrap());
    for block in blocks {
        assert!(block.pin(Reason::BadOffer) && block.state() == State::Pinned);
    }
    connect(&chunk);
    let exporter = Exporter::start();
    let open = exporter.scrape();
    assert!(open.gauges[ENDS] >= 3.0);
    assert!(open.gauges["thallus_connection_ends{fabric=\"shm\",reason=\"\"}"] >= 1.0);
    assert!(open.gauges["thallus_processes{}"] >= 1.0);
    assert!(open.counter("thallus_connection_ends_seen_total{}") >= 4.0);
    for block in blocks {
        chunk.free(block, block.connection().unwrap());
    }
    // None any more is a number, too.
    assert!(exporter.scrape().gauges.contains_key(ENDS));
}

#[test]
fn once_prints_the_same_metrics() {
    let names = |metrics: &Metrics| metrics.counters.keys().cloned().collect::<Vec<_>>();
    let output = thallus(&["--once"]).stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success());
    let printed = Metrics::read(&String::from_utf8(output.stdout).unwrap());
    assert_eq!(names(&printed), names(&Exporter::start().scrape()));
    assert!(
        printed
            .gauges
            .contains_key(&format!("thallus_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION")))
    );
}

#[test]
fn two_scrapers_never_see_a_counter_go_back() {
    let chunk = Chunk::create(Ok).unwrap();
    let exporter = Exporter::start();
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut last = exporter.scrape();
                for _ in 0..20 {
                    let now = exporter.scrape();
                    now.assert_not_before(&last);
                    last = now;
                }
            });
        }
        for _ in 0..2000 {
            let block = connect(&chunk);
            block.ring_sent.store(12345, Relaxed);
            chunk.free(block, block.connection().unwrap());
            thread::yield_now();
        }
    });
}

#[test]
fn other_requests_are_answered_and_disturb_nothing() {
    let exporter = Exporter::start();
    let status = |request: &[u8]| exporter.exchange(request).lines().next().unwrap_or_default().to_owned();
    let long = [b"GET /metrics HTTP/1.1\r\nX: ".as_slice(), &[b'x'; 20_000]].concat();
    let expected: [(&[u8], &str); 12] = [
        (b"\0\x01\xff garbage\r\n\r\n", "HTTP/1.1 400 Bad Request"),
        (b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03", "HTTP/1.1 400 Bad Request"),
        (b"GET /metrics HTTP/9.9\r\n\r\n", "HTTP/1.1 400 Bad Request"),
        (&long, "HTTP/1.1 431 Request Header Fields Too Large"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", "HTTP/1.1 405 Method Not Allowed"),
        (b"GET /other HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
        (b"GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK"),
        (b"GET /metrics?debug=1 HTTP/1.0\r\n\r\n", "HTTP/1.1 200 OK"),
        (b"GET http://localhost:9477/metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK"),
        (b"GET http://localhost/other HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
        (b"GET /metr", ""),
        (b"", ""),
    ];
    for (request, answer) in expected {
        assert_eq!(status(request), answer, "{}", String::from_utf8_lossy(request));
    }
    let head = exporter.exchange(b"HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.ends_with("\r\n\r\n"), "{head}");
    exporter.scrape();
}

#[test]
fn slow_clients_hold_nobody_up_and_are_left_in_the_end() {
    let exporter = Exporter::start();
    let half = |text: &[u8]| {
        let mut stream = exporter.connect();
        stream.write_all(text).unwrap();
        stream
    };
    // More than are served at once.
    let slow: Vec<_> = (0..40).map(|_| half(b"GET /metrics HTTP/1.1\r\nHost: ")).collect();
    exporter.scrape();
    for mut stream in slow {
        assert_eq!(stream.read(&mut [0; 1]).unwrap_or(0), 0);
    }
}

#[test]
fn one_thread_serves_where_there_may_be_no_more() {
    // The stack of another would be larger than any address space.
    let exporter = Exporter::of(thallus(&[]).env("RUST_MIN_STACK", (1_u64 << 60).to_string()));
    exporter.scrape();
    let threads = std::fs::read_dir(format!("/proc/{}/task", exporter.child.id())).unwrap();
    assert_eq!(threads.count(), 1);
}

#[test]
fn an_address_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = thallus(&["--listen", &address]).output().unwrap();
    let expected = format!("thallus: can't listen at {address}: Address already in use (os error 98)\n");
    assert_eq!((output.status.code(), output.stderr), (Some(1), expected.into_bytes()));
    assert_eq!(output.stdout, b"");
}

#[test]
fn wrong_arguments_have_status_2() {
    for arguments in [&["--listen", "9477"][..], &["--listen", "x:1"], &["--once", "--listen", "[::1]:1"]] {
        assert_eq!(thallus(arguments).output().unwrap().status.code(), Some(2), "{arguments:?}");
    }
}

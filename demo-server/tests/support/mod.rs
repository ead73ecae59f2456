//! A server with a dataset, its log, the client's program, and a client that sends single frames.

#![allow(dead_code, reason = "no test uses all of it")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use arrow_array::RecordBatch;
use duckdb::Connection;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use thallus_api::{Handle, Thallus};
use thallus_columnar::scan::{Client, CursorId, Failure, Frame, FrameLimits, HEADER, Header};
use thallus_columnar::write_all_vectored;

pub(crate) const TRANSPORTS: [&str; 4] = ["scatter", "rpc", "ipc", "flight"];

/// Nothing that is waited for takes this long.
const PATIENCE: Duration = Duration::from_secs(120);

/// Rows of `types` and `numbers`.
pub(crate) const ROWS: u64 = 10_000;

/// Of every type that Parquet has.
const PLAIN: &str = "
    i AS id,
    (i % 200 - 100)::TINYINT AS tiny, i::SMALLINT AS small, (i * 7919)::INTEGER AS int, i * 1000003 AS big,
    (i % 256)::UTINYINT AS utiny, i::USMALLINT AS usmall, i::UINTEGER AS uint, i::UBIGINT AS ubig,
    i % 3 = 0 AS bool, (i / 7)::FLOAT AS float, i / 9 AS double,
    (i / 100)::DECIMAL(9, 2) AS small_decimal, (i * 1234567 / 1000)::DECIMAL(38, 5) AS decimal,
    'string ' || repeat('ü', (i % 40)::INTEGER) AS text, ('blob' || i)::BLOB AS bytes,
    DATE '1970-01-01' + i::INTEGER AS day, TIME '00:00:00' + to_seconds(i) AS clock,
    TIMESTAMP '2001-02-03 04:05:06.789' + to_minutes(i) AS stamp,
    TIMESTAMPTZ '2001-02-03 04:05:06+00' + to_minutes(i) AS zoned,
    CASE WHEN i % 5 = 0 THEN NULL ELSE i END AS sparse, NULL::INTEGER AS nothing,
    CASE WHEN i % 7 = 0 THEN NULL ELSE 'short' END AS sparse_text,
    range(i % 4) AS list, [NULL, [i, NULL], []] AS lists,
    {'a': i, 'b': {'c': 'x' || i, 'd': [i]}} AS struct, MAP {'k' || i: i, 'other': NULL} AS map,
    uuid_of(i) AS uuid";

/// Of those that it does not have.
const FURTHER: &str = "
    to_months(i::INTEGER) + to_days(3) + to_microseconds(i) AS span,
    ['red', 'green', 'blue'][i % 3 + 1]::ENUM ('red', 'green', 'blue') AS colour,
    CASE WHEN i % 2 = 0 THEN union_value(number := i)::UNION(number BIGINT, text VARCHAR)
    ELSE union_value(text := 'u' || i)::UNION(number BIGINT, text VARCHAR) END AS either,
    (CASE WHEN i % 2 = 0 THEN NULL ELSE [i, NULL, 3] END)::INTEGER[3] AS fixed,
    [union_value(number := i)::UNION(number BIGINT, text VARCHAR)] AS list_of_unions,
    (i * 12345678901234567890)::HUGEINT AS huge, '101'::BIT AS bits";

/// A folder with `plain.parquet`, `types.duckdb` of all types, `numbers.parquet` of many rows, `pairs.csv`, and beside it
/// `secret.csv`.
pub(crate) fn dataset() -> TempDir {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::create_dir(path("data")).unwrap();
    let database = Connection::open(path("data/types.duckdb")).unwrap();
    database
        .execute_batch(&format!(
            "SET TimeZone = 'UTC';
             CREATE TEMP MACRO uuid_of(i) AS
                 ('00000000-0000-4000-8000-' || lpad(i::VARCHAR, 12, '0'))::UUID;
             COPY (SELECT {PLAIN} FROM range({ROWS}) AS t(i)) TO '{}';
             CREATE TABLE types AS SELECT {PLAIN}, {FURTHER} FROM range({ROWS}) AS t(i);
             CREATE TABLE other AS SELECT 1 AS one;
             COPY (SELECT i, i * 2 AS twice, 'name ' || i AS name FROM range(3000000) AS t(i)) TO '{}';
             COPY (SELECT i, 'value ' || i AS value FROM range(10) AS t(i)) TO '{}';
             COPY (SELECT 'secret' AS secret) TO '{}';",
            path("data/plain.parquet"),
            path("data/numbers.parquet"),
            path("data/pairs.csv"),
            path("secret.csv"),
        ))
        .unwrap();
    folder
}

/// What DuckDB computes here, over the same files.
pub(crate) fn expected(folder: &TempDir, sql: &str) -> RecordBatch {
    let database = Connection::open_in_memory().unwrap();
    let path = |name: &str| folder.path().join("data").join(name).to_str().unwrap().to_owned();
    database
        .execute_batch(&format!(
            "CREATE VIEW plain AS FROM '{}'; CREATE VIEW numbers AS FROM '{}'; CREATE VIEW pairs AS FROM '{}';
             ATTACH '{}' AS types (READ_ONLY)",
            path("plain.parquet"),
            path("numbers.parquet"),
            path("pairs.csv"),
            path("types.duckdb"),
        ))
        .unwrap();
    let mut statement = database.prepare(sql).unwrap();
    let result = statement.query_arrow([]).unwrap();
    let schema = result.get_schema();
    arrow_select::concat::concat_batches(&schema, &result.collect::<Vec<_>>()).unwrap()
}

/// A program without settings of the caller.
pub(crate) fn program(path: impl AsRef<Path>) -> Command {
    let mut command = Command::new(path.as_ref());
    for (name, _) in std::env::vars_os() {
        if name == "LD_PRELOAD" || name.to_string_lossy().starts_with("THALLUS") {
            command.env_remove(name);
        }
    }
    command
}

pub(crate) fn server_program() -> Command {
    program(env!("CARGO_BIN_EXE_demo-server"))
}

/// The program beside the server's.
pub(crate) fn client_program() -> Command {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_demo-server")).with_file_name("demo-client");
    assert!(path.exists(), "{} is missing: run cargo build -p demo-client first", path.display());
    program(path)
}

/// What the library counted in the one process that has left a file here.
pub(crate) fn statistics(folder: &Path) -> serde_json::Value {
    let files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [file] = &files[..] else { panic!("{files:?}") };
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// A server that ends with its value.
pub(crate) struct Server {
    pub(crate) process: Child,
    pub(crate) address: String,
    /// Of Arrow Flight.
    pub(crate) flight: String,
    log: Receiver<String>,
}

impl Server {
    pub(crate) fn start(folder: &TempDir, options: &[&str]) -> Self {
        Self::spawn(server_program().arg("--dataset").arg(folder.path().join("data")).args(options))
    }

    /// The command lacks only where to listen.
    pub(crate) fn spawn(command: &mut Command) -> Self {
        let command = command.args(["--listen", "127.0.0.1:0", "--flight-listen", "127.0.0.1:0"]);
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, log) = channel();
        let errors = BufReader::new(process.stderr.take().unwrap());
        std::thread::spawn(move || {
            errors.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
        let (Some(address), Some(flight)) = (lines.next(), lines.next()) else {
            panic!("the server did not start: {:?}", log.iter().collect::<Vec<_>>());
        };
        Self { process, address, flight, log }
    }

    /// Waits for a line of the log with all `words`.
    pub(crate) fn logged(&self, words: &[&str]) -> String {
        let mut seen = Vec::new();
        loop {
            let line = self.log.recv_timeout(PATIENCE);
            let line = line.unwrap_or_else(|_| panic!("no line with {words:?} after {seen:#?}"));
            if words.iter().all(|word| line.contains(word)) {
                return line;
            }
            seen.push(line);
        }
    }

    /// Waits until the server has used so much time of a CPU.
    pub(crate) fn worked(&self, time: Duration) {
        let ticks = |field: usize| {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap();
            // See proc_pid_stat(5): user time is field 14, system time 15; the name, which ends with `)`, field 2.
            let fields = stat.rsplit_once(") ").unwrap().1;
            fields.split(' ').nth(field - 3).unwrap().parse::<u64>().unwrap()
        };
        let wanted =
            ticks(14) + ticks(15) + time.as_millis() as u64 * rustix::param::clock_ticks_per_second() / 1000;
        while ticks(14) + ticks(15) < wanted {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Bytes of memory that the server occupies.
    pub(crate) fn resident(&self) -> u64 {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.process.id())).unwrap();
        // See proc_pid_statm(5): the second number, in pages.
        statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * rustix::param::page_size() as u64
    }

    /// Asks the server to end, and expects that it does so well.
    pub(crate) fn stop(mut self) {
        signal(&self.process, Signal::TERM);
        let status = self.process.wait().unwrap();
        assert_eq!(status.code(), Some(0), "{status}: {:#?}", self.log.iter().collect::<Vec<_>>());
    }

    /// The client's program with these options.
    pub(crate) fn client(&self, options: &[&str]) -> Command {
        let mut command = client_program();
        let address = if options.contains(&"flight") { &self.flight } else { &self.address };
        command.args(["--connect", address]).args(options);
        command
    }

    /// Runs the client to its end.
    pub(crate) fn run(&self, options: &[&str]) -> Outcome {
        Outcome::of(&mut self.client(options))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub(crate) fn signal(process: &Child, signal: Signal) {
    kill_process(Pid::from_child(process), signal).unwrap();
}

#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) status: Option<i32>,
    pub(crate) output: String,
    pub(crate) errors: String,
}

impl Outcome {
    pub(crate) fn of(command: &mut Command) -> Self {
        let Output { status, stdout, stderr } = command.output().unwrap();
        Self {
            status: status.code(),
            output: String::from_utf8(stdout).unwrap(),
            errors: String::from_utf8(stderr).unwrap(),
        }
    }

    pub(crate) fn assert_ok(&self) {
        assert_eq!((self.status, self.errors.as_str()), (Some(0), ""), "{self:?}");
    }

    /// Of --summary.
    pub(crate) fn summary(&self) -> serde_json::Value {
        self.assert_ok();
        serde_json::from_str(&self.output).unwrap()
    }
}

/// A client that does one step at a time.
pub(crate) struct Steps {
    stream: TcpStream,
    books: Client,
}

impl Steps {
    pub(crate) fn connect(server: &Server) -> Self {
        Self::to(&server.address)
    }

    pub(crate) fn to(address: &str) -> Self {
        Self::with_preface(address, b"")
    }

    /// One that says first which other form it wants.
    pub(crate) fn with_preface(address: &str, preface: &[u8]) -> Self {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(preface).unwrap();
        let mut steps = Self { stream, books: Client::default() };
        steps.send(&Frame::hello());
        steps.read().0.check_hello().unwrap();
        steps
    }

    pub(crate) fn send(&mut self, frame: &Frame) {
        let bytes = frame.encode(0).unwrap();
        write_all_vectored(&mut self.stream, std::iter::once(&bytes[..])).unwrap();
    }

    pub(crate) fn accept_loans(&mut self) {
        let frame = self.books.accept_loans();
        self.send(&frame);
    }

    /// Gives a loan back unread.
    pub(crate) fn give_back(&self, handle: [u8; 32]) {
        let thallus = Thallus::find().expect("the library is here");
        thallus.pull(&self.stream, &Handle { bytes: handle }, &mut []).unwrap();
    }

    pub(crate) fn init(&mut self, sql: &str) {
        let (_, frame) = self.books.init("", sql);
        self.send(&frame);
    }

    /// A cursor, or why there is none.
    pub(crate) fn open(&mut self, sql: &str) -> Result<CursorId, Failure> {
        self.init(sql);
        match self.next() {
            Frame::Opened { cursor, .. } => Ok(cursor),
            Frame::Refused { failure, .. } => Err(failure),
            frame => panic!("{frame:?}"),
        }
    }

    pub(crate) fn iterate(&mut self, cursor: CursorId, credits: u32) {
        let frame = self.books.iterate(cursor, credits).unwrap();
        self.send(&frame);
    }

    pub(crate) fn cancel(&mut self, cursor: CursorId) {
        let frame = self.books.cancel(cursor).unwrap();
        self.send(&frame);
    }

    /// Waits for FINALIZED. Batches that were on their way may come before.
    pub(crate) fn finalize(&mut self, cursor: CursorId) {
        let frame = self.books.finalize(cursor).unwrap();
        self.send(&frame);
        loop {
            match self.next() {
                Frame::Finalized { cursor: of } => return assert_eq!(of, cursor),
                Frame::Batch { .. } | Frame::Done { .. } | Frame::Failed { .. } => {}
                frame => panic!("{frame:?}"),
            }
        }
    }

    /// The next frame, which the books allow.
    pub(crate) fn next(&mut self) -> Frame {
        let (frame, _) = self.read();
        self.books.received(&frame).unwrap();
        frame
    }

    /// The number of the next batch.
    pub(crate) fn batch(&mut self, of: CursorId) -> u64 {
        match self.next() {
            Frame::Batch { cursor, number } if cursor == of => number,
            frame => panic!("{frame:?}"),
        }
    }

    /// Takes all that is left of a cursor, one batch at a time. Returns how many there are in all.
    pub(crate) fn drain(&mut self, of: CursorId) -> u64 {
        loop {
            self.iterate(of, 1);
            match self.next() {
                Frame::Batch { .. } => {}
                Frame::Done { cursor, batches } if cursor == of => return batches,
                frame => panic!("{frame:?}"),
            }
        }
    }

    pub(crate) fn read(&mut self) -> (Frame, Vec<u8>) {
        read(&self.stream)
    }

    /// The next frame, of whose tail a megabyte is read in each `pause`.
    pub(crate) fn next_slowly(&mut self, pause: Duration) -> Frame {
        let (frame, tail) = read_head(&self.stream);
        self.books.received(&frame).unwrap();
        let mut left = tail;
        while left > 0 {
            let mut part = vec![0; left.min(1 << 20)];
            self.stream.read_exact(&mut part).unwrap();
            left -= part.len();
            std::thread::sleep(pause);
        }
        frame
    }

    /// The server has closed the connection.
    pub(crate) fn assert_closed(&mut self) {
        let read = self.stream.read(&mut [0]);
        assert!(matches!(read, Ok(0)) || read.is_err_and(|error| error.raw_os_error() == Some(104)));
    }
}

/// A frame's head, and how many bytes its tail has.
fn read_head(mut stream: &TcpStream) -> (Frame, usize) {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header).unwrap();
    let header = Header::parse(&header, &FrameLimits::default()).unwrap();
    let mut head = vec![0; header.head];
    stream.read_exact(&mut head).unwrap();
    (Frame::parse(&header, &head).unwrap(), header.tail as usize)
}

fn read(mut stream: &TcpStream) -> (Frame, Vec<u8>) {
    let (frame, tail) = read_head(stream);
    let mut tail = vec![0; tail];
    stream.read_exact(&mut tail).unwrap();
    (frame, tail)
}

/// The server's end of a connection, for a test that is the server.
pub(crate) struct Pose {
    pub(crate) stream: TcpStream,
    pub(crate) cursor: CursorId,
}

impl Pose {
    /// Waits for a client and its query, and answers with a cursor. The client says `preface` first.
    pub(crate) fn accept(listener: &TcpListener, preface: &[u8], schema: &[u8]) -> Self {
        let stream = listener.accept().unwrap().0;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut said = vec![0; preface.len()];
        (&stream).read_exact(&mut said).unwrap();
        assert_eq!(said, preface);
        let pose = Self { stream, cursor: CursorId([7; 16]) };
        pose.read().check_hello().unwrap();
        pose.send(&Frame::hello(), &[]);
        loop {
            if let Frame::Init { request, .. } = pose.read() {
                pose.send(&Frame::Opened { request, cursor: pose.cursor }, schema);
                return pose;
            }
        }
    }

    pub(crate) fn read(&self) -> Frame {
        read(&self.stream).0
    }

    pub(crate) fn send(&self, frame: &Frame, tail: &[u8]) {
        let head = frame.encode(tail.len() as u64).unwrap();
        write_all_vectored(&mut &self.stream, [&head[..], tail].into_iter()).unwrap();
    }
}

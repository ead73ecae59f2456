//! Both programs with the library: bodies are read from the server's memory, and it has all of it back. Wants
//! THALLUS_LIBRARY, the path of libthallus_shim.so.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use serde_json::Value;
use support::{Outcome, Pose, Server, Steps, client_program, dataset, program, server_program};
use thallus_api::{Fabric, Thallus};
use thallus_columnar::scan::Frame;
use thallus_columnar::{EncodeOptions, Encoder};

const SQL: &str = "FROM numbers";

/// Runs a query, and returns its summary and the client's statistics.
fn run(server: &Server, library: &str, folder: &Path, options: &[&str]) -> (Value, Value) {
    let stats = folder.join("stats");
    fs::create_dir(&stats).unwrap();
    let mut command = server.client(&[&["--sql", SQL, "--summary", "--checksum"], options].concat());
    command.env("LD_PRELOAD", library).env("THALLUS_STATS", &stats);
    let summary = Outcome::of(&mut command).summary();
    let file = fs::read_dir(&stats).unwrap().next().expect("a client leaves one").unwrap().path();
    let statistics = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    fs::remove_dir_all(&stats).unwrap();
    (summary, statistics)
}

#[test]
fn bodies_are_lent_and_come_back() {
    let library = std::env::var("THALLUS_LIBRARY").expect("THALLUS_LIBRARY: the path of libthallus_shim.so");
    let folder = dataset();
    let plain = Server::start(&folder, &[]);
    let expected = plain.run(&["--sql", SQL, "--summary", "--checksum"]).summary();
    assert_eq!((&expected["borrowed"], &expected["pulled"]), (&0.into(), &0.into()));
    let mut command = server_program();
    command.arg("--dataset").arg(folder.path().join("data")).env("LD_PRELOAD", &library);
    let server = Server::spawn(&mut command);
    for (options, way) in [
        (&["--transport", "auto"][..], "borrowed"),
        (&["--transport", "auto", "--validate"], "borrowed"),
        (&["--transport", "pull"], "pulled"),
    ] {
        let (summary, statistics) = run(&server, &library, folder.path(), options);
        assert_eq!(summary["checksum"], expected["checksum"], "{options:?}");
        assert_eq!(statistics["upgraded"]["shm"], 1, "{statistics}");
        let count = |name: &str| summary[name].as_u64().unwrap();
        // A few come before the connection has left TCP, and the last may be too small.
        assert!(count(way) * 2 > count("batches"), "{summary}");
        assert_eq!(count(way) + count("streamed"), count("batches"), "{summary}");
        // Beside the bodies that were not lent only headers are in the stream: what is lent is copied once, by the server,
        // and again only where it is pulled.
        let streamed =
            ["ring_bytes_received", "tcp_bytes_received"].map(|name| statistics[name].as_u64().unwrap());
        let share = count("streamed") as f64 / count("batches") as f64 + 0.05;
        assert!(
            (streamed[0] + streamed[1]) as f64 <= share * count("bytes") as f64,
            "{summary}, {statistics}"
        );
    }
    server.stop();
}

/// Runs a query several times on one connection of a server that keeps results. Returns the summary, and of each answer the bytes
/// that the server has copied.
fn ask_again(server: &Server, library: &str, sql: &str, options: &[&str], times: usize) -> (Value, Vec<u64>) {
    let times = times.to_string();
    let asked = ["--sql", sql, "--summary", "--checksum", "--repeat", &times];
    let mut command = server.client(&[&asked[..], options].concat());
    let summary = Outcome::of(command.env("LD_PRELOAD", library)).summary();
    let copied = summary["rounds"].as_array().unwrap().iter().map(|_| copied(server)).collect();
    (summary, copied)
}

/// Bytes of columns that the server has copied for the next answer in its log.
fn copied(server: &Server) -> u64 {
    let line = server.logged(&["done; sent", "copied"]);
    let (before, _) = line.split_once(" copied").unwrap();
    before.rsplit_once(' ').unwrap().1.parse().unwrap()
}

#[test]
fn a_kept_result_is_lent_again_without_a_copy() {
    let library = std::env::var("THALLUS_LIBRARY").expect("THALLUS_LIBRARY: the path of libthallus_shim.so");
    let folder = dataset();
    let plain = Server::start(&folder, &[]);
    let expected = plain.run(&["--sql", SQL, "--summary", "--checksum"]).summary();
    let mut command = server_program();
    command.arg("--dataset").arg(folder.path().join("data")).env("LD_PRELOAD", &library);
    let server = Server::spawn(command.args(["--keep", "1024"]));
    for (options, way) in [(&[][..], "borrowed"), (&["--transport", "pull"], "pulled")] {
        let (summary, copied) = ask_again(&server, &library, SQL, options, 8);
        assert_eq!(summary["checksum"], expected["checksum"]);
        assert_eq!(summary[way], summary["batches"], "{summary}");
        // Once, to where it stays. Whether the first answers were lent, and copied for that, depends on when the connection
        // left TCP.
        assert!(copied.iter().any(|copied| *copied > 10_000_000), "{copied:?}");
        assert_eq!(copied.last(), Some(&0), "{copied:?}");
    }
    // Without loans nothing is kept for the client.
    let (summary, copied) = ask_again(&server, &library, SQL, &["--transport", "rpc"], 2);
    assert_eq!(summary["checksum"], expected["checksum"]);
    assert!(copied.iter().all(|copied| *copied > 10_000_000), "{copied:?}");
    server.stop();
}

/// Set where this test is the client, which has the library: the server's address.
const CLIENT_OF: &str = "TEST_CLIENT_OF";

/// Results of 24 MB, which THALLUS_LEND lets a server keep one of.
const TWO: [&str; 2] =
    ["SELECT i, twice FROM numbers LIMIT 1500000", "SELECT twice, i FROM numbers LIMIT 1500000"];

#[test]
fn what_is_kept_for_a_client_makes_room_for_what_it_asks_next() {
    if let Ok(address) = std::env::var(CLIENT_OF) {
        return ask_in_turn(&address);
    }
    let library = std::env::var("THALLUS_LIBRARY").expect("THALLUS_LIBRARY: the path of libthallus_shim.so");
    let folder = dataset();
    let mut command = server_program();
    command.arg("--dataset").arg(folder.path().join("data")).env("LD_PRELOAD", &library);
    let server = Server::spawn(command.args(["--keep", "1024"]).env("THALLUS_LEND", "40M"));
    let mut client = program(std::env::current_exe().unwrap());
    let name = "what_is_kept_for_a_client_makes_room_for_what_it_asks_next";
    client.args(["--exact", "--nocapture", name]);
    let client = client.env(CLIENT_OF, &server.address).env("LD_PRELOAD", &library);
    let outcome = Outcome::of(client);
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    let before = outcome.output.lines().find_map(|line| line.split_once(BEFORE)?.1.parse().ok());
    for _ in 0..before.expect("the client says how often it has asked before") {
        copied(&server);
    }
    let copied = [(); 5].map(|()| copied(&server));
    assert_eq!(copied.map(|copied| copied > 0), [false, true, true, false, true], "{copied:?}");
    server.stop();
}

/// What precedes the number of answers before those that count.
const BEFORE: &str = "asked before: ";

/// Asks for one result until it has been copied to where it stays, and once more; for another three times; for the first again.
fn ask_in_turn(address: &str) {
    let mut steps = Steps::to(address);
    steps.accept_loans();
    // The first answer comes from DuckDB. Later ones are kept that are lent as a whole, once the connection has left TCP.
    all_lent(&mut steps, TWO[0]);
    let mut before = 2;
    while !all_lent(&mut steps, TWO[0]) {
        before += 1;
        assert!(before < 20, "the connection stays on TCP");
    }
    println!("{BEFORE}{before}");
    for sql in [0, 1, 1, 1, 0] {
        assert!(all_lent(&mut steps, TWO[sql]), "{sql}");
    }
}

/// Whether all of a result was lent.
fn all_lent(steps: &mut Steps, sql: &str) -> bool {
    let cursor = steps.open(sql).unwrap();
    steps.iterate(cursor, 100);
    let mut lent = 0;
    let batches = loop {
        match steps.next() {
            Frame::Lent { handle, .. } => {
                steps.give_back(handle);
                lent += 1;
            }
            Frame::Batch { .. } => {}
            Frame::Done { batches, .. } => break batches,
            frame => panic!("{frame:?}"),
        }
    };
    steps.finalize(cursor);
    lent == batches
}

#[test]
fn a_server_without_memory_to_lend_sends() {
    let library = std::env::var("THALLUS_LIBRARY").expect("THALLUS_LIBRARY: the path of libthallus_shim.so");
    let folder = dataset();
    for (limit, keep) in [("0", &[][..]), ("6M", &[]), ("6M", &["--keep", "1024"])] {
        let mut command = server_program();
        command.arg("--dataset").arg(folder.path().join("data")).env("LD_PRELOAD", &library).args(keep);
        let server = Server::spawn(command.env("THALLUS_LEND", limit));
        let (summary, statistics) =
            run(&server, &library, folder.path(), &["--credits", "8", "--repeat", "3"]);
        assert_eq!(summary["rows"], 3_000_000);
        assert_eq!(statistics["upgraded"]["shm"], 1, "{statistics}");
        assert!(summary["streamed"].as_u64().unwrap() > 1, "{summary}");
        assert_eq!(summary["borrowed"].as_u64().unwrap() > 0, limit != "0", "{summary}");
        server.stop();
    }
}

/// Set where this test is the server, which has the library.
const SERVER: &str = "TEST_SERVER";

/// What precedes its address.
const LISTENS: &str = "listens at ";

/// The process at the other end may be a relay of the same user, such as ssh, for a server that is not.
#[test]
fn what_comes_in_the_stream_is_validated_whoever_runs_the_server() {
    if std::env::var(SERVER).is_ok() {
        return send_a_string_that_is_none();
    }
    let library = std::env::var("THALLUS_LIBRARY").expect("THALLUS_LIBRARY: the path of libthallus_shim.so");
    let mut server = program(std::env::current_exe().unwrap());
    let name = "what_comes_in_the_stream_is_validated_whoever_runs_the_server";
    server.args(["--exact", "--nocapture", name]).env(SERVER, "1").env("LD_PRELOAD", &library);
    let mut server = server.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines().map_while(Result::ok);
    let address = lines.find_map(|line| Some(line.split_once(LISTENS)?.1.to_owned())).unwrap();
    let mut client = client_program();
    client.args(["--connect", &address, "--sql", "SELECT 1", "--summary"]).env("LD_PRELOAD", &library);
    let outcome = Outcome::of(&mut client);
    let _ = lines.count();
    assert!(server.wait().unwrap().success());
    assert_eq!(outcome.status, Some(1), "{outcome:?}");
    assert!(outcome.errors.contains("a string is not UTF-8"), "{outcome:?}");
}

fn send_a_string_that_is_none() {
    let text: ArrayRef = Arc::new(StringArray::from(vec!["xxxxxxxxxxxx"]));
    let batch = RecordBatch::try_from_iter([("c", text)]).unwrap();
    let mut encoder = Encoder::new(&batch.schema(), EncodeOptions::default()).unwrap();
    let message = encoder.batch(&batch).unwrap().remove(0);
    let good: Vec<u8> = message.slices().flatten().copied().collect();
    let mut bad = good.clone();
    let at = bad.windows(12).position(|bytes| bytes == b"xxxxxxxxxxxx").unwrap();
    bad[at] = 0xff;

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{LISTENS}{}", listener.local_addr().unwrap());
    let pose = Pose::accept(&listener, b"", encoder.schema().header());
    let thallus = Thallus::find().expect("the library is here");
    for number in 0..1000 {
        let Frame::Iterate { .. } = pose.read() else { panic!("no credit") };
        let status = thallus.status(&pose.stream).unwrap();
        let is_trusted = status.fabric == Fabric::SharedMemory && number > 100;
        let tail = if is_trusted { &bad } else { &good };
        pose.send(&Frame::Batch { cursor: pose.cursor, number }, tail);
        if is_trusted {
            assert!(status.trusted);
            return pose.send(&Frame::Done { cursor: pose.cursor, batches: number + 1 }, &[]);
        }
    }
    panic!("the connection stays on TCP");
}

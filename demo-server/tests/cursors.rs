//! Cursors come and go: credits, cancelling, limits, expiry, and clients that die.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use arrow_schema::{DataType, Field, Schema};
use rustix::process::Signal;
use support::{Pose, Server, Steps, TRANSPORTS, dataset, signal};
use thallus_columnar::scan::{Code, Frame};
use thallus_columnar::{EncodeOptions, Encoder};

/// More than anybody will read.
const ENDLESS: &str = "SELECT range AS i FROM range(1000000000000)";
/// Minutes of work before the first row.
const HARD: &str = "SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b";

#[test]
fn the_server_sends_no_more_than_the_credits_allow() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let mut client = Steps::connect(&server);
    let slow = client.open(ENDLESS).unwrap();
    client.iterate(slow, 3);
    for number in 0..3 {
        assert_eq!(client.batch(slow), number);
    }
    // Meanwhile another cursor has dozens of batches; `Steps` would not take one of the first.
    let other = client.open("SELECT i FROM numbers").unwrap();
    assert!(client.drain(other) >= 23);
    client.finalize(other);
    client.cancel(slow);
    assert!(
        matches!(client.next(), Frame::Failed { cursor, failure } if cursor == slow && failure.code == Code::Cancelled)
    );
    server.logged(&[&slow.to_string(), "cancelled", "sent 3 batches"]);
    client.finalize(slow);
}

#[test]
fn twenty_cancelled_scans_leave_nothing() {
    let folder = dataset();
    // A cursor or a query that was left over would be one too many.
    let server = Server::start(&folder, &["--max-cursors", "1", "--max-queries", "1"]);
    let mut client = Steps::connect(&server);
    for round in 0..20 {
        let cursor = client.open(ENDLESS).unwrap();
        client.iterate(cursor, round % 4);
        if round % 4 > 0 && round % 3 > 0 {
            assert_eq!(client.batch(cursor), 0);
        }
        client.cancel(cursor);
        loop {
            match client.next() {
                Frame::Batch { .. } => {}
                Frame::Failed { failure, .. } => break assert_eq!(failure.code, Code::Cancelled),
                frame => panic!("{frame:?}"),
            }
        }
        server.logged(&["cancelled", "0 queries are running"]);
        client.finalize(cursor);
    }
    let cursor = client.open("FROM pairs").unwrap();
    assert_eq!(client.drain(cursor), 1);
}

#[test]
fn memory_is_bounded_by_credits_and_comes_back() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let sql = "SELECT range AS i, 'name ' || range AS name FROM range(1000000000000)";
    server.run(&["--sql", "FROM numbers", "--summary"]).summary();
    let before = server.resident();
    let mut slow: Vec<_> = (0..8).map(|_| Steps::connect(&server)).collect();
    for client in &mut slow {
        let cursor = client.open(sql).unwrap();
        client.iterate(cursor, 1000);
        assert_eq!(client.batch(cursor), 0);
    }
    // Each query has a frame of 4 MiB and a little on its way and one that waits, and DuckDB its buffers.
    let during = server.resident();
    assert!(during < before + 8 * (24 << 20), "{before} {during}");
    drop(slow);
    for _ in 0..8 {
        server.logged(&["client gone", "queries are running"]);
    }
    let mut client = Steps::connect(&server);
    for _ in 0..1000 {
        let cursor = client.open(sql).unwrap();
        client.cancel(cursor);
        client.finalize(cursor);
    }
    let after = server.resident();
    assert!(after < before + (96 << 20), "{before} {during} {after}");
}

#[test]
fn finalizing_ends_one_cursor_alone() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let mut client = Steps::connect(&server);
    let (first, second) = (client.open(ENDLESS).unwrap(), client.open("SELECT i FROM numbers").unwrap());
    client.iterate(first, 1);
    assert_eq!(client.batch(first), 0);
    client.finalize(first);
    server.logged(&[&first.to_string(), "finalized", "1 queries are running"]);
    assert!(client.drain(second) >= 23);
    client.finalize(second);
    // It is forgotten: naming it again breaks the protocol.
    client.send(&Frame::Cancel { cursor: second });
    client.assert_closed();
    server.logged(&["no such cursor"]);
}

#[test]
fn cursors_are_limited_for_each_client_and_for_all() {
    let folder = dataset();
    let server = Server::start(&folder, &["--max-cursors", "2", "--max-queries", "3", "--max-clients", "2"]);
    let (mut one, mut two) = (Steps::connect(&server), Steps::connect(&server));
    let cursor = one.open(ENDLESS).unwrap();
    one.open(ENDLESS).unwrap();
    let failure = one.open(ENDLESS).unwrap_err();
    assert_eq!((failure.code, failure.message.contains('2')), (Code::Limit, true), "{failure:?}");
    two.open(ENDLESS).unwrap();
    let failure = two.open(ENDLESS).unwrap_err();
    assert_eq!((failure.code, failure.message.contains('3')), (Code::Limit, true), "{failure:?}");
    one.finalize(cursor);
    two.open(ENDLESS).unwrap();

    for transport in ["auto", "rpc", "ipc"] {
        let outcome = server.run(&["--sql", "SELECT 1", "--transport", transport]);
        let told = "demo-client: The server has 2 clients already\n";
        assert_eq!((outcome.status, outcome.errors.as_str()), (Some(1), told), "{outcome:?}");
    }
    // So many are told so at a time; who is closed without a word gets no greeting.
    let _refused: Vec<_> = (0..16).map(|_| Steps::connect(&server)).collect();
    let outcome = server.run(&["--sql", "SELECT 1"]);
    assert_eq!(outcome.status, Some(1), "{outcome:?}");
    assert!(outcome.errors.contains("can't use the server"), "{outcome:?}");
    server.logged(&["2 clients are connected"]);
    drop(one);
    server.logged(&["client 1: gone"]);
    server.run(&["--sql", "SELECT 1"]).assert_ok();
}

#[test]
fn a_cursor_that_nobody_asks_for_expires() {
    let folder = dataset();
    let server = Server::start(&folder, &["--idle", "1"]);
    let mut client = Steps::connect(&server);
    let cursor = client.open(ENDLESS).unwrap();
    assert!(matches!(client.next(), Frame::Failed { failure, .. } if failure.code == Code::Expired));
    server.logged(&["expired", "sent 0 batches", "0 queries are running"]);
    client.finalize(cursor);
}

#[test]
fn a_client_that_reads_slowly_keeps_its_cursor() {
    let folder = dataset();
    let server = Server::start(&folder, &["--idle", "2"]);
    let mut client = Steps::connect(&server);
    // A row fills a frame, more than the connection holds.
    let cursor = client.open("SELECT repeat('x', 40000000) AS s FROM range(2)").unwrap();
    for expected in 0..2 {
        client.iterate(cursor, 1);
        let frame = client.next_slowly(Duration::from_millis(100));
        assert!(matches!(frame, Frame::Batch { number, .. } if number == expected), "{frame:?}");
    }
    assert!(matches!(client.next(), Frame::Done { batches: 2, .. }));
}

#[test]
fn a_client_of_flight_that_reads_slowly_keeps_its_query() {
    let folder = dataset();
    let server = Server::start(&folder, &["--idle", "2"]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let flight = server.flight.clone();
    // A megabyte in each 250 ms at most.
    let between = std::thread::spawn(move || {
        let (near, far) = (listener.accept().unwrap().0, TcpStream::connect(flight).unwrap());
        let (mut there, mut back) = (far.try_clone().unwrap(), near.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut &near, &mut there));
        let mut part = vec![0; 16 << 10];
        loop {
            match (&far).read(&mut part) {
                Ok(bytes) if bytes > 0 => back.write_all(&part[..bytes]).unwrap(),
                _ => return,
            }
            std::thread::sleep(Duration::from_millis(4));
        }
    });
    let sql = "SELECT repeat('x', 12000000) AS s FROM range(4)";
    let mut command = support::client_program();
    command.args(["--connect", &address, "--sql", sql, "--transport", "flight", "--summary"]);
    let summary = support::Outcome::of(&mut command).summary();
    assert_eq!((&summary["rows"], &summary["batches"]), (&4.into(), &4.into()), "{summary}");
    drop(server);
    between.join().unwrap();
}

#[test]
fn who_has_been_answered_may_ask_again_at_once() {
    let folder = dataset();
    let server = Server::start(&folder, &["--max-queries", "1"]);
    for preface in [&b""[..], b"thallus streamed"] {
        let mut client = Steps::with_preface(&server.address, preface);
        for round in 0..300 {
            let failure = client.open("SELEC 1").unwrap_err();
            assert_eq!(failure.code, Code::Query, "{round}: {failure:?}");
        }
    }
    let mut client = Steps::connect(&server);
    let mut before = None;
    for round in 0..300 {
        let cursor = client.open("SELECT 1").unwrap_or_else(|failure| panic!("{round}: {failure:?}"));
        if let Some(before) = before.replace(cursor) {
            client.finalize(before);
        }
        assert_eq!(client.drain(cursor), 1);
    }
}

#[test]
fn a_client_that_dies_releases_everything() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    for transport in TRANSPORTS {
        let mut command = server.client(&["--sql", ENDLESS, "--out", "-", "--transport", transport]);
        let mut client = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        // It is in the midst of the result, and can't write on.
        let mut output = BufReader::new(client.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        client.kill().unwrap();
        client.wait().unwrap();
        server.logged(&["client gone", "0 queries are running"]);
    }
    let mut client = Steps::connect(&server);
    client.init(HARD);
    drop(client);
    server.logged(&["no cursor: client gone", "0 queries are running"]);
    let mut client = server.client(&["--sql", HARD, "--transport", "flight"]).spawn().unwrap();
    server.logged(&["connected", "with Arrow Flight"]);
    server.worked(Duration::from_millis(500));
    client.kill().unwrap();
    client.wait().unwrap();
    server.logged(&["client gone", "0 queries are running"]);
    server.run(&["--sql", "FROM pairs"]).assert_ok();
}

#[test]
fn a_client_that_does_not_read_its_batches_loses_its_connection() {
    let folder = dataset();
    let server = Server::start(&folder, &["--idle", "3"]);
    let mut client = Steps::connect(&server);
    let cursor = client.open(ENDLESS).unwrap();
    client.iterate(cursor, 1000);
    server.logged(&[&cursor.to_string(), "has taken nothing for 3 s", "0 queries are running"]);
}

#[test]
fn a_client_that_says_nothing_loses_its_connection() {
    let folder = dataset();
    let server = Server::start(&folder, &["--idle", "1"]);
    let mut busy = Steps::connect(&server);
    busy.init(HARD);
    Steps::connect(&server).assert_closed();
    server.logged(&["has said nothing for 1 s"]);
    // Nor does half a frame keep it.
    let mut half = TcpStream::connect(&server.address).unwrap();
    half.write_all(&Frame::hello().encode(0).unwrap()).unwrap();
    half.write_all(&[0; 3]).unwrap();
    server.logged(&["a frame is not complete after 1 s"]);
    // Meanwhile the one whose query has no result yet was let alone.
    busy.init("SELECT 1");
    assert!(matches!(busy.next(), Frame::Opened { .. }));
}

#[test]
fn long_strings_travel_in_many_frames() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let sql = "SELECT range AS i, repeat('x', 40000) AS s FROM range(2048)";
    for transport in ["scatter", "rpc"] {
        let summary = server.run(&["--sql", sql, "--summary", "--transport", transport]).summary();
        assert_eq!(summary["rows"], 2048);
        assert!(summary["bytes"].as_u64().unwrap() > 80_000_000, "{summary}");
        // Of little more than 4 MiB each; in DuckDB it is one chunk.
        assert!((10..=20).contains(&summary["batches"].as_u64().unwrap()), "{summary}");
    }
}

#[test]
fn ctrl_c_cancels_on_the_server() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    for transport in TRANSPORTS {
        let mut command = server.client(&["--sql", ENDLESS, "--out", "-", "--transport", transport]);
        let mut client = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(client.stdout.take().unwrap());
        output.read_line(&mut String::new()).unwrap();
        signal(&client, Signal::INT);
        // Until then the client may wait for its output to be taken.
        std::thread::scope(|scope| {
            scope.spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
            assert_eq!(client.wait().unwrap().code(), Some(130));
        });
        // Arrow Flight has no other way than to drop the stream.
        let how = if transport == "flight" { "client gone" } else { "cancelled" };
        server.logged(&[how, "0 queries are running"]);
    }
}

/// Files in a folder.
fn files(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

#[test]
fn a_client_that_ends_at_once_leaves_no_file() {
    let folder = dataset();
    let out = folder.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let path = out.join("x.arrow");
    let schema = Schema::new(vec![Field::new("c", DataType::Int64, true)]);
    let schema = Encoder::new(&schema, EncodeOptions::default()).unwrap().schema();
    for interrupt in [Signal::INT, Signal::TERM, Signal::HUP] {
        // A server that says nothing more, also when the client has cancelled.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let client = support::client_program();
        let mut command = support::program("env");
        // Who runs this may ignore it, and then so would the client.
        command.arg("--default-signal=HUP").arg(client.get_program());
        command.args(["--connect", &address, "--sql", "SELECT 1", "--out", path.to_str().unwrap()]);
        let mut client = command.spawn().unwrap();
        let pose = Pose::accept(&listener, b"", schema.header());
        while files(&out) == 0 {
            assert!(client.try_wait().unwrap().is_none(), "it has ended without a file");
            std::thread::sleep(Duration::from_millis(10));
        }
        signal(&client, interrupt);
        while !matches!(pose.read(), Frame::Cancel { .. }) {}
        signal(&client, interrupt);
        assert_eq!(client.wait().unwrap().code(), Some(130), "{interrupt:?}");
        assert_eq!(files(&out), 0, "{interrupt:?}: something was left");
    }
}

/// As nohup has it.
#[test]
fn a_client_that_ignores_hangups_goes_on_to_do_so() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let client = server.client(&["--sql", "SELECT count(*) FROM numbers a, range(1000) b", "--out", "-"]);
    let mut command = support::program("nohup");
    command.arg(client.get_program()).args(client.get_args());
    let client = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    server.logged(&["connected"]);
    server.worked(Duration::from_millis(100));
    signal(&client, Signal::HUP);
    let output = client.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(String::from_utf8(output.stdout).unwrap().ends_with("3000000000\n"));
}

#[test]
fn ctrl_c_ends_a_query_that_has_not_answered() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    for transport in TRANSPORTS {
        let mut client = server.client(&["--sql", HARD, "--transport", transport]).spawn().unwrap();
        server.logged(&["connected"]);
        signal(&client, Signal::INT);
        assert_eq!(client.wait().unwrap().code(), Some(130));
        server.logged(&["gone; 0 queries are running"]);
    }
}

#[test]
fn who_leaves_without_reading_is_gone_too() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    for frame in [&[][..], &[0][..]] {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        stream.write_all(&Frame::hello().encode(0).unwrap()).unwrap();
        // The server's greeting is there, and nobody reads it.
        assert_eq!(stream.peek(&mut [0]).unwrap(), 1);
        stream.write_all(frame).unwrap();
        drop(stream);
        let how =
            if frame.is_empty() { "client 1: gone" } else { "client 2: the connection ended in mid-frame" };
        server.logged(&[how, "0 queries are running"]);
    }
}

#[test]
fn clients_do_not_wait_for_each_other() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let mut one = Steps::connect(&server);
    let cursor = one.open("SELECT i FROM numbers").unwrap();
    one.iterate(cursor, 1);
    assert_eq!(one.batch(cursor), 0);
    let command = |transport| {
        let options = ["--sql", "FROM numbers", "--summary", "--checksum", "--transport", transport];
        let mut command = server.client(&options);
        command.stdout(Stdio::piped());
        command
    };
    let clients = TRANSPORTS.map(|transport| command(transport).spawn().unwrap());
    let sums = clients.map(|client| {
        let output = client.wait_with_output().unwrap();
        assert!(output.status.success());
        let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        summary["checksum"].as_str().unwrap().to_owned()
    });
    assert!(sums.iter().all(|sum| *sum == sums[0]), "{sums:?}");
    assert!(one.drain(cursor) >= 23);
}

#[test]
fn flight_has_the_same_limits() {
    let folder = dataset();
    let options = ["--max-cursors", "1", "--max-queries", "2", "--max-clients", "2"];
    let server = Server::start(&folder, &options);
    let endless = || {
        let mut command = server.client(&["--sql", ENDLESS, "--out", "-", "--transport", "flight"]);
        let mut client = command.stdout(Stdio::piped()).spawn().unwrap();
        // It takes no more than what it can write, which nobody reads.
        let mut output = BufReader::new(client.stdout.take().unwrap());
        output.read_line(&mut String::new()).unwrap();
        (client, output)
    };
    let mut steps = Steps::connect(&server);
    steps.open(ENDLESS).unwrap();
    assert_eq!(steps.open(ENDLESS).unwrap_err().code, Code::Limit);
    let (mut client, output) = endless();
    let refused = server.run(&["--sql", "SELECT 1", "--transport", "flight"]);
    assert_eq!(refused.status, Some(1), "{refused:?}");
    server.logged(&["2 clients are connected"]);
    drop(output);
    client.wait().unwrap();
    server.logged(&["gone; 1 queries are running"]);

    let mut other = Steps::connect(&server);
    other.open(ENDLESS).unwrap();
    drop(steps);
    server.logged(&["gone; 1 queries are running"]);
    let mut third = Steps::connect(&server);
    third.open(ENDLESS).unwrap();
    drop(other);
    server.logged(&["gone; 1 queries are running"]);
    server.run(&["--sql", "FROM pairs", "--transport", "flight"]).assert_ok();
}

#[test]
fn flight_clients_that_say_or_read_nothing_are_cut_off() {
    let folder = dataset();
    let server = Server::start(&folder, &["--idle", "2"]);
    let _silent = TcpStream::connect(&server.flight).unwrap();
    server.logged(&["has said nothing for 2 s"]);
    let mut command = server.client(&["--sql", ENDLESS, "--out", "-", "--transport", "flight"]);
    let mut client = command.stdout(Stdio::piped()).spawn().unwrap();
    server.logged(&["no request for 2 s; sent", "0 queries are running"]);
    // It learns so when it reads on.
    let mut output = client.stdout.take().unwrap();
    std::io::copy(&mut output, &mut std::io::sink()).unwrap();
    assert_eq!(client.wait().unwrap().code(), Some(1));
}

#[test]
fn what_is_not_the_protocol_ends_that_connection_only() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let mut client = Steps::connect(&server);
    for bytes in [&b"GET / HTTP/1.1\r\nHost: example\r\n\r\n"[..], &[0xff; 64], &[0; 64], b"thallus baseline"]
    {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        // The server's greeting, and then its end of the connection.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
        server.logged(&["client", "; 0 queries are running"]);
    }
    let failure = client.open("SELECT 1 \0; DROP VIEW pairs").unwrap_err();
    assert_eq!(failure.code, Code::Query, "{failure:?}");
    let cursor = client.open("FROM pairs").unwrap();
    assert_eq!(client.drain(cursor), 1);
}

/// Structs in structs take DuckDB minutes to plan, and nothing interrupts that.
#[test]
fn a_server_that_is_told_to_ends_also_while_a_query_is_planned() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let mut client = Steps::connect(&server);
    client.init(&format!("SELECT {}1{}", "ROW(".repeat(900), ")".repeat(900)));
    server.worked(Duration::from_secs(1));
    signal(&server.process, Signal::TERM);
    server.logged(&["a query can't be interrupted"]);
    server.stop();
}

#[test]
fn a_server_that_is_told_to_ends_in_the_midst_of_queries() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let mut client = Steps::connect(&server);
    let cursor = client.open(ENDLESS).unwrap();
    client.iterate(cursor, 1);
    assert_eq!(client.batch(cursor), 0);
    client.init(HARD);
    server.stop();
    client.assert_closed();
}

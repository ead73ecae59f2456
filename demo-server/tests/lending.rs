//! Both programs with the library: bodies are read from the server's memory, and it has all of it back. Wants
//! THALLUS_LIBRARY, the path of libthallus_shim.so.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::fs;
use std::path::Path;

use serde_json::Value;
use support::{Outcome, Server, dataset, server_program};

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

#[test]
fn a_server_without_memory_to_lend_sends() {
    let library = std::env::var("THALLUS_LIBRARY").expect("THALLUS_LIBRARY: the path of libthallus_shim.so");
    let folder = dataset();
    for limit in ["0", "6M"] {
        let mut command = server_program();
        command.arg("--dataset").arg(folder.path().join("data")).env("LD_PRELOAD", &library);
        let server = Server::spawn(command.env("THALLUS_LEND", limit));
        let (summary, statistics) = run(&server, &library, folder.path(), &["--credits", "8"]);
        assert_eq!(summary["rows"], 3_000_000);
        assert_eq!(statistics["upgraded"]["shm"], 1, "{statistics}");
        assert!(summary["streamed"].as_u64().unwrap() > 1, "{summary}");
        assert_eq!(summary["borrowed"].as_u64().unwrap() > 0, limit != "0", "{summary}");
        server.stop();
    }
}

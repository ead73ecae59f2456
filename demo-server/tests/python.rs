//! The pyarrow client in examples/python, on a plain socket and with the library. Wants THALLUS_LIBRARY, the path of
//! libthallus_shim.so, and THALLUS_PYTHON, a Python that has pyarrow.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::path::Path;
use std::process::Command;

use support::{Outcome, Server, dataset, program, server_program, statistics};

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: see the head of {}", file!()))
}

fn example(server: &Server, sql: &str) -> Command {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/python/scan.py");
    let mut command = program(variable("THALLUS_PYTHON"));
    command.arg("-B").arg(path).args(["--connect", &server.address, "--sql", sql, "--summary"]);
    command
}

/// Of the types that the example's checksum has; the second is of several batches.
const QUERIES: [&str; 3] = [
    "SELECT id, tiny, uint, double, decimal, text, bytes, day, clock, zoned, sparse, nothing, sparse_text FROM plain",
    "SELECT i, name FROM numbers WHERE i % 20 = 0",
    "SELECT 1 AS one WHERE false",
];

#[test]
fn python_gets_the_same_rows() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    for sql in QUERIES {
        let expected = server.run(&["--sql", sql, "--summary", "--checksum"]).summary();
        let got = Outcome::of(&mut example(&server, sql)).summary();
        for field in ["rows", "bytes", "checksum"] {
            assert_eq!(got[field], expected[field], "{sql}: {field}");
        }
    }
    for (sql, word) in [
        ("SELEC 1", "Parser Error"),
        ("SELECT CASE WHEN i > 2900000 THEN error('late trouble') ELSE i END FROM numbers", "late trouble"),
    ] {
        let outcome = Outcome::of(&mut example(&server, sql));
        assert_eq!((outcome.status, outcome.errors.contains(word)), (Some(1), true), "{outcome:?}");
    }
    server.stop();
}

#[test]
fn python_gets_them_over_shared_memory() {
    let library = variable("THALLUS_LIBRARY");
    let folder = dataset();
    let stats = ["server", "client"].map(|name| {
        let path = folder.path().join(name);
        std::fs::create_dir(&path).unwrap();
        path
    });
    let mut command = server_program();
    command.arg("--dataset").arg(folder.path().join("data"));
    let server = Server::spawn(command.env("LD_PRELOAD", &library).env("THALLUS_STATS", &stats[0]));
    let sql = QUERIES[1];
    // Without the library, so it counts as not upgraded.
    let expected = server.run(&["--sql", sql, "--summary", "--checksum"]).summary();
    let mut command = example(&server, sql);
    let got = Outcome::of(command.env("LD_PRELOAD", &library).env("THALLUS_STATS", &stats[1])).summary();
    assert_eq!(got["checksum"], expected["checksum"]);
    server.stop();

    let [server, client] = stats.each_ref().map(|folder| statistics(folder));
    for end in [&server, &client] {
        assert_eq!(end["upgraded"]["shm"], 1, "{end}");
    }
    let ring = client["ring_bytes_received"].as_u64().unwrap();
    assert!(ring > got["bytes"].as_u64().unwrap() / 2, "{ring} of {}: {client}", got["bytes"]);
}

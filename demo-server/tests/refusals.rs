//! What can't be done is told in a sentence, and the server serves on.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::process::Command;
use std::thread;

use arrow_schema::{DataType, Field, Schema};
use support::{Outcome, Pose, Server, TRANSPORTS, client_program, dataset, server_program};
use thallus_columnar::{EncodeOptions, Encoder, PREFIX};

fn assert_failed(outcome: &Outcome, words: &[&str]) {
    assert_eq!((outcome.status, outcome.output.as_str()), (Some(1), ""), "{outcome:?}");
    for word in words {
        assert!(outcome.errors.contains(word), "no {word:?} in {outcome:?}");
    }
}

#[test]
fn errors_of_a_query_are_duckdbs() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    for (sql, words) in [
        ("SELEC 1", &["Parser Error", "SELEC", "LINE 1"][..]),
        ("SELECT nonsense FROM pairs", &["Binder Error", "\"nonsense\"", "LINE 1"]),
        ("SELECT * FROM nowhere", &["Catalog Error", "nowhere"]),
        ("SELECT 'x'::INTEGER", &["Conversion Error", "'x'"]),
        (
            "SELECT CASE WHEN i > 2900000 THEN error('late trouble') ELSE i END FROM numbers",
            &["late trouble"],
        ),
    ] {
        for transport in TRANSPORTS {
            let outcome = server.run(&["--sql", sql, "--transport", transport, "--summary"]);
            assert_failed(&outcome, words);
        }
    }
    server.run(&["--sql", "FROM pairs"]).assert_ok();
}

#[test]
fn errors_with_large_values_are_told_in_part() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    for (sql, word) in [
        ("SELECT repeat('ä', 1000000)::INTEGER", "Conversion Error"),
        ("SELECT CASE WHEN i > 2900000 THEN error(repeat('x', 2000000)) ELSE i END FROM numbers", "xxx …"),
        ("SELECT error(repeat('\"', 20000))", "\"\"\""),
    ] {
        for transport in TRANSPORTS {
            let outcome = server.run(&["--sql", sql, "--transport", transport, "--summary"]);
            assert_failed(&outcome, &[word, "…"]);
            assert!(outcome.errors.len() < 5000, "{} bytes", outcome.errors.len());
        }
    }
}

/// DuckDB's Arrow export makes -1 of the largest UHUGEINT, and an INTERVAL below zero of three million hours.
#[test]
fn numbers_that_arrow_has_not_are_told() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let x = "170141183460469231731687303715884105728::UHUGEINT AS x, to_microseconds(9223372036854776) AS s";
    for (column, told) in [
        ("x", Some("UHUGEINT")),
        ("x - 1", None),
        ("[NULL, x]", Some("UHUGEINT")),
        ("[[1, x - 1]]", None),
        ("{'a': 1, 'b': [{'c': x}]}", Some("UHUGEINT")),
        ("MAP {x: 1}", Some("UHUGEINT")),
        ("MAP {1: x}", Some("UHUGEINT")),
        ("[x]::UHUGEINT[1]", Some("UHUGEINT")),
        ("union_value(a := x)", Some("UHUGEINT")),
        ("-1::HUGEINT", None),
        ("s", Some("INTERVAL")),
        ("s - to_microseconds(1)", None),
        ("-s", Some("INTERVAL")),
        ("to_microseconds(1) - s", None),
        ("to_hours(3000000)", Some("INTERVAL")),
        ("to_months(12000000) + to_days(2000000000)", None),
        ("[{'a': NULL, 'b': s}]", Some("INTERVAL")),
    ] {
        let sql = format!("SELECT 0 AS i, {column} AS u FROM (SELECT {x}) UNION ALL SELECT 1, NULL");
        for transport in TRANSPORTS {
            let outcome = server.run(&["--sql", &sql, "--transport", transport, "--summary"]);
            if let Some(told) = told {
                assert_failed(&outcome, &[told, "column \"u\""]);
            } else {
                outcome.assert_ok();
            }
        }
    }
}

#[test]
fn queries_only_read_and_only_the_dataset() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let secret = folder.path().join("secret.csv");
    let new = folder.path().join("new.csv");
    let inside = folder.path().join("data/new.parquet");
    let data = folder.path().join("data/pairs.csv");
    let (secret, new, inside, data) =
        (secret.to_str().unwrap(), new.to_str().unwrap(), inside.to_str().unwrap(), data.to_str().unwrap());
    let files = "file system operations are disabled";
    for (sql, word) in [
        (format!("FROM '{secret}'"), files),
        (format!("FROM read_csv('{secret}')"), files),
        (format!("FROM '{data}/../../secret.csv'"), files),
        (format!("FROM '{data}/../../data/../secret.csv'"), files),
        (format!("FROM read_csv(['{data}', '{secret}'])"), files),
        (format!("FROM read_csv('file://{secret}')"), files),
        ("FROM read_csv('http://127.0.0.1:1/x.csv')".to_owned(), files),
        ("FROM read_csv('/dev/stdin')".to_owned(), files),
        (format!("EXPLAIN ANALYZE FROM read_csv('{secret}')"), files),
        (format!("WITH x AS (SELECT (SELECT count(*) FROM read_csv('{secret}'))) FROM x"), files),
        (format!("SELECT read_text('{secret}')"), "table function"),
        ("SELECT getenv('HOME')".to_owned(), "getenv"),
        ("FROM read_parquet('/etc/*')".to_owned(), files),
        (format!("FROM read_text('{secret}')"), "table function \"read_text\""),
        ("FROM glob('/etc/*')".to_owned(), "table function \"glob\""),
        ("FROM query('SELECT 1')".to_owned(), "table function \"query\""),
        (format!("FROM enable_logging(storage = 'file', storage_path = '{new}')"), "\"enable_logging\""),
        (format!("COPY pairs TO '{new}'"), "only reads"),
        (format!("COPY pairs TO '{inside}'"), "only reads"),
        (format!("ATTACH '{new}' AS other"), "only reads"),
        (format!("SELECT 1; COPY pairs TO '{new}'"), "only reads"),
        ("SELECT 1; SELECT 2".to_owned(), "one query"),
        ("INSTALL httpfs".to_owned(), "only reads"),
        ("LOAD httpfs".to_owned(), "only reads"),
        ("SET enable_external_access = true".to_owned(), "only reads"),
        ("SET threads = 1".to_owned(), "only reads"),
        ("DROP VIEW pairs".to_owned(), "only reads"),
        ("CREATE TABLE t AS SELECT 1".to_owned(), "only reads"),
        ("INSERT INTO types.other VALUES (2)".to_owned(), "only reads"),
        ("DETACH types".to_owned(), "only reads"),
        ("RESET lock_configuration".to_owned(), "only reads"),
        ("PRAGMA database_list".to_owned(), "only reads"),
        ("PREPARE p AS SELECT 1".to_owned(), "only reads"),
    ] {
        assert_failed(&server.run(&["--sql", &sql]), &[word]);
        assert_failed(&server.run(&["--sql", &sql, "--transport", "flight"]), &[word]);
    }
    let outcome = server.run(&["--sql", "SELECT count(*) AS n FROM pairs, types.other"]);
    assert_eq!(outcome.output, "n\n10\n", "{outcome:?}");
    assert!(!folder.path().join("new.csv").exists());
    assert!(!folder.path().join("data/new.parquet").exists());
    server.run(&["--sql", "EXPLAIN SELECT * FROM pairs"]).assert_ok();
}

/// None of these may overflow a stack: they are planned by recursion.
#[test]
fn deep_queries_are_answered_or_refused() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    for depth in [100, 2500] {
        let chain: String = (1..depth).map(|i| format!(",t{i} as(from t{})", i - 1)).collect();
        for sql in [
            format!("SELECT {}1{}", "(".repeat(depth), ")".repeat(depth)),
            format!("SELECT 1{}", "+1".repeat(depth)),
            format!("SELECT {}1{}", "[".repeat(depth), "]".repeat(depth)),
            format!("SELECT {}true", "NOT ".repeat(depth)),
            format!("SELECT 1{}", " UNION ALL SELECT 1".repeat(depth)),
            format!("FROM {}(SELECT 1){}", "(FROM ".repeat(depth), ")".repeat(depth)),
            format!("WITH t0 as(select 1){chain} from t{}", depth - 1),
        ] {
            let outcome = server.run(&["--sql", &sql, "--summary"]);
            let told = ["Max expression depth", "memory exhausted", "nesting this deep"];
            let refused = || told.iter().any(|told| outcome.errors.contains(told));
            assert!(outcome.status == Some(0) || refused(), "{depth}: {outcome:?}");
        }
    }
    let long = format!("SELECT '{}'", "x".repeat(100_000));
    assert_failed(&server.run(&["--sql", &long]), &["100009 bytes", "65536"]);
    server.run(&["--sql", "FROM pairs"]).assert_ok();
}

#[test]
fn memory_is_limited_and_running_out_of_it_is_an_error() {
    let folder = dataset();
    let server = Server::start(&folder, &["--memory", "60MB"]);
    let outcome = server.run(&["--sql", "FROM numbers ORDER BY name DESC", "--summary"]);
    assert_failed(&outcome, &["Out of Memory Error"]);
    // What is streamed is never in memory as a whole.
    let summary = server.run(&["--sql", "FROM numbers", "--summary"]).summary();
    assert!(summary["bytes"].as_u64().unwrap() > 80_000_000, "{summary}");
}

#[test]
fn a_dataset_that_is_none_is_told_at_the_start() {
    let folder = dataset();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    for name in ["empty", "same", "broken", "own", "link"] {
        fs::create_dir(path(name)).unwrap();
    }
    fs::write(path("empty/notes.txt"), "").unwrap();
    fs::write(path("same/a.csv"), "x\n1\n").unwrap();
    fs::write(path("same/A.parquet"), "").unwrap();
    fs::write(path("broken/a.parquet"), "this is no Parquet file").unwrap();
    fs::write(path("own/temp.csv"), "x\n1\n").unwrap();
    symlink("../secret.csv", path("link/inside.csv")).unwrap();
    for (name, words) in [
        ("missing", &["missing", "No such file or directory"][..]),
        ("secret.csv", &["secret.csv", "Not a directory"]),
        ("empty", &["empty", "has no .parquet, .csv or .duckdb file"]),
        ("same", &["a.csv", "A.parquet", "the same name"]),
        ("broken", &["a.parquet", "No magic bytes found"]),
        ("own", &["temp.csv", "DuckDB's own"]),
        ("link", &["link/inside.csv leads out of the folder", "secret.csv"]),
    ] {
        let outcome =
            Outcome::of(server_program().args(["--listen", "127.0.0.1:0", "--dataset", &path(name)]));
        assert_failed(&outcome, words);
        assert!(!outcome.errors.contains("Unknown error code"), "{outcome:?}");
    }
    let outcome = Outcome::of(server_program().args(["--dataset", &path("data"), "--memory", "much"]));
    assert_failed(&outcome, &["much"]);
    // More than the clock has.
    let idle = u64::MAX.to_string();
    let outcome = Outcome::of(server_program().args(["--dataset", &path("data"), "--idle", &idle]));
    assert_eq!(outcome.status, Some(2), "{outcome:?}");
}

#[test]
fn another_dataset_than_the_servers_is_refused() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    server.run(&["--sql", "FROM pairs", "--dataset", "data"]).assert_ok();
    for transport in TRANSPORTS {
        let outcome = server.run(&["--sql", "FROM pairs", "--dataset", "tpch", "--transport", transport]);
        assert_failed(&outcome, &["no dataset \"tpch\"", "\"data\""]);
    }
}

#[test]
fn nobody_listening_is_told() {
    let outcome = Outcome::of(client_program().args(["--connect", "127.0.0.1:1", "--sql", "SELECT 1"]));
    assert_failed(&outcome, &["127.0.0.1:1", "Connection refused"]);
}

#[test]
fn an_error_that_nobody_can_be_told_has_its_status() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut client = client_program();
    client.args(["--connect", "127.0.0.1:1", "--sql", "SELECT 1"]).stderr(full);
    assert_eq!(client.status().unwrap().code(), Some(1));
}

#[test]
fn wrong_options_have_status_2() {
    for options in [
        &["--sql", "SELECT 1", "--compression", "lz4"][..],
        &["--sql", "SELECT 1", "--transport", "pull", "--compression", "lz4"],
        &["--sql", "SELECT 1", "--transport", "ipc", "--compression", "lz4"],
        &["--sql", "SELECT 1", "--repeat", "2"],
        &["--sql", "SELECT 1", "--transport", "pigeon"],
        &["--sql", "SELECT 1", "--credits", "0"],
        &[],
    ] {
        let outcome = Outcome::of(client_program().args(options));
        assert_eq!(outcome.status, Some(2), "{outcome:?}");
    }
}

#[test]
fn an_unknown_ending_and_a_type_that_the_format_lacks_are_told() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let out = folder.path().join("out");
    fs::create_dir(&out).unwrap();
    let path = |name: &str| out.join(name).to_str().unwrap().to_owned();
    let outcome = server.run(&["--sql", "FROM pairs", "--out", &path("x.json")]);
    assert_failed(&outcome, &["x.json", ".parquet, .arrow or .csv"]);
    let outcome = server.run(&["--sql", "SELECT list FROM plain", "--out", &path("x.csv")]);
    assert_failed(&outcome, &["x.csv", "\"list\"", "List"]);
    // Not even a header is written, and it does not depend on the rows.
    for sql in ["SELECT list FROM plain", "SELECT list FROM plain WHERE false", "SHOW ALL TABLES"] {
        assert_failed(&server.run(&["--sql", sql]), &["standard output", "CSV has no List"]);
    }
    for column in ["either", "list_of_unions"] {
        let sql = format!("SELECT {column} FROM types.types");
        let outcome = server.run(&["--sql", &sql, "--out", &path("x.parquet")]);
        assert_failed(&outcome, &["x.parquet", column, "Union"]);
    }
    let outcome = server.run(&["--sql", "SELECT span FROM types.types", "--out", &path("x.parquet")]);
    assert_failed(&outcome, &["x.parquet", "interval"]);
    let outcome = server.run(&["--sql", "FROM pairs", "--out", &path("missing/x.csv")]);
    assert_failed(&outcome, &["missing/x.csv", "No such file"]);
    assert_eq!(fs::read_dir(&out).unwrap().count(), 0, "something was left");
}

#[test]
fn a_full_disk_is_told_and_the_server_serves_on() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    for name in ["full.parquet", "full.arrow", "full.csv"] {
        let path = folder.path().join(name);
        symlink("/dev/full", &path).unwrap();
        let outcome = server.run(&["--sql", "FROM numbers", "--out", path.to_str().unwrap()]);
        assert_failed(&outcome, &[name, "No space left on device"]);
        server.logged(&["client gone", "0 queries are running"]);
    }
    server.run(&["--sql", "FROM pairs"]).assert_ok();
}

#[test]
fn a_file_that_fails_half_way_does_not_appear() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let out = folder.path().join("out");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("kept.csv"), "before").unwrap();
    let sql = "SELECT CASE WHEN i > 2900000 THEN error('late trouble') ELSE i END AS i FROM numbers";
    for name in ["kept.csv", "new.csv", "new.parquet", "new.arrow"] {
        let path = out.join(name);
        let outcome = server.run(&["--sql", sql, "--out", path.to_str().unwrap()]);
        assert_failed(&outcome, &["late trouble"]);
    }
    assert_eq!(fs::read_to_string(out.join("kept.csv")).unwrap(), "before");
    assert_eq!(fs::read_dir(&out).unwrap().count(), 1, "something was left");
}

/// A schema message of one number, whose bits are `bits`.
fn number_of_bits(bits: u8) -> Vec<u8> {
    let schema = Schema::new(vec![Field::new("c", DataType::Int64, true)]);
    let message = Encoder::new(&schema, EncodeOptions::default()).unwrap().schema();
    let bits_of = |message: &[u8]| {
        let message = arrow_ipc::root_as_message(&message[PREFIX..]).ok()?;
        Some(message.header_as_schema()?.fields()?.get(0).type_as_int()?.bitWidth())
    };
    let changed = (0..message.header().len()).find_map(|at| {
        let mut changed = message.header().to_vec();
        let place = changed.get_mut(at..at + 4).filter(|place| **place == [64, 0, 0, 0])?;
        place.copy_from_slice(&[bits, 0, 0, 0]);
        (bits_of(&changed) == Some(bits.into())).then_some(changed)
    });
    changed.expect("64 stands for the type's bits")
}

/// arrow-ipc panics at such a type.
#[test]
fn a_server_that_sends_nonsense_is_told() {
    let nonsense = number_of_bits(7);
    let run = |transport: &str, preface: &[u8], tail: &[u8], behind: &[u8]| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let mut command = client_program();
        command.args(["--connect", &address, "--sql", "SELECT 1", "--transport", transport, "--summary"]);
        thread::scope(|scope| {
            let client = scope.spawn(move || Outcome::of(&mut command));
            let mut pose = Pose::accept(&listener, preface, tail);
            pose.stream.write_all(behind).unwrap();
            client.join().unwrap()
        })
    };
    let in_stream = run("ipc", b"thallus streamed", &[], &nonsense);
    let in_frame = run("scatter", b"", &nonsense, &[]);
    for outcome in [in_stream, in_frame] {
        assert_failed(&outcome, &["demo-client: "]);
        assert_eq!(outcome.errors.lines().count(), 1, "{outcome:?}");
    }
}

/// As on a file system that has no room for what it has taken, or a disk that fails.
#[test]
fn a_file_that_does_not_reach_the_disk_does_not_appear() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let source = "#include <errno.h>\nint fsync(int fd) { errno = EIO; return -1; }\n";
    fs::write(path("fsync.c"), source).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o", &path("fsync.so"), &path("fsync.c")]);
    assert!(compiler.status().unwrap().success());
    for name in ["out.csv", "out.parquet", "out.arrow"] {
        let mut command = server.client(&["--sql", "FROM pairs", "--out", &path(name)]);
        let outcome = Outcome::of(command.env("LD_PRELOAD", path("fsync.so")));
        assert_failed(&outcome, &[name, "Input/output error"]);
        assert!(!folder.path().join(name).exists());
    }
    // There is no disk behind this one.
    let mut command = server.client(&["--sql", "FROM pairs", "--out", "-"]);
    Outcome::of(command.env("LD_PRELOAD", path("fsync.so"))).assert_ok();
}

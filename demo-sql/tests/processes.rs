//! Queries over real processes: right rows by both transports, what carries the bytes, and what is left when somebody dies or gives up.
//! Wants THALLUS_LIBRARY, the path of libthallus_shim.so.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::Stdio;

use serde_json::Value;
use support::{
    PATIENCE, Tables, Worker, are_busy, are_idle, begin, library, lines, program, statuses, workers,
};

const JOIN: &str = "SELECT c.segment, count(*), sum(l.cents * l.quantity), max(l.note) FROM lines l
    JOIN orders o ON l.order_id = o.id JOIN customers c ON o.customer = c.id GROUP BY c.segment";

/// 400 million rows, from all workers: their client reads for minutes.
const LONG: &str = "SELECT a.note, b.note FROM lines a JOIN lines b ON a.item + b.item >= 0";

fn all(workers: &[Worker]) -> Vec<&Worker> {
    workers.iter().collect()
}

fn number(sample: &Value, name: &str) -> u64 {
    sample[name].as_u64().unwrap_or_else(|| panic!("{name}: {sample}"))
}

/// The bench compares the rows with those of one process.
#[test]
fn the_same_rows_as_in_one_process_by_both_transports() {
    let (workers, tables) = (workers(3, None), Tables::new(20_000));
    let huge = "SELECT id, repeat('x', 16777216) FROM orders WHERE id = 77";
    let queries = [
        JOIN,
        huge,
        // No rows, and no columns.
        "SELECT a.id, b.name FROM orders a JOIN customers b ON a.customer = b.id WHERE a.day > 1000",
        "SELECT count(*) FROM lines WHERE item < 500",
        // Nine of ten rows to one partition.
        "SELECT skewed, count(*), sum(cents) FROM lines GROUP BY skewed",
        "SELECT a.skewed, a.note, b.id FROM lines a JOIN orders b ON a.skewed = b.id + 1",
        "SELECT l.note, o.day FROM lines l LEFT JOIN orders o ON l.order_id = o.id AND o.day < 5",
        "SELECT note, row_number() OVER (PARTITION BY item ORDER BY cents, note) FROM lines",
        "SELECT item FROM lines UNION ALL SELECT day FROM orders UNION ALL SELECT segment FROM customers",
        "SELECT item, sum(cents) AS s FROM lines GROUP BY item ORDER BY s DESC, item LIMIT 100",
        "SELECT CASE WHEN item % 3 = 0 THEN NULL ELSE item END AS i, count(DISTINCT note), avg(cents) FROM lines GROUP BY 1",
    ];
    let arguments: Vec<&str> = ["--rounds", "1"].into_iter().chain(queries).collect();
    let samples = lines(begin("bench", &all(&workers), &tables, None, &arguments));
    assert_eq!(samples.len(), 2 * queries.len());
    for sample in &samples {
        let query = queries[number(sample, "query") as usize];
        assert_eq!((number(sample, "ring_bytes"), number(sample, "in_memory")), (0, 0));
        assert!(number(sample, "bytes") > 500, "{query}: {sample}");
        if query == huge {
            assert!(number(sample, "bytes") > 16 << 20, "{sample}");
        }
    }
    are_idle(&all(&workers));
}

#[test]
fn with_the_library_all_connections_leave_tcp() {
    let library = library();
    let (workers, tables) = (workers(3, Some(&library)), Tables::new(20_000));
    let bench = begin("bench", &all(&workers), &tables, Some(&library), &["--rounds", "10", JOIN]);
    let samples = lines(bench);
    assert_eq!(samples.len(), 20);
    for transport in ["thallus", "grpc"] {
        let last = samples.iter().rfind(|sample| sample["transport"] == transport).unwrap();
        // From the client to each worker, and from each worker to each other.
        assert_eq!((number(last, "in_memory"), number(last, "on_tcp")), (9, 0), "{last}");
        assert_eq!(last["reasons"].as_array().unwrap().len(), 0);
        assert!(number(last, "ring_bytes") * 10 > number(last, "bytes") * 9, "{last}");
    }
}

fn a_killed_worker_is_named_and_others_go_on(library: Option<&str>) {
    let (workers, tables) = (workers(3, library), Tables::new(20_000));
    let [first, killed, last] = &workers[..] else { unreachable!("three") };
    let query = begin("sql", &all(&workers), &tables, library, &["--count", LONG]);
    are_busy(&all(&workers));
    let others = begin("bench", &[first, last], &tables, library, &["--rounds", "5", JOIN]);
    let pid = killed.process.0.id().to_string();
    assert!(std::process::Command::new("kill").args(["-9", &pid]).status().unwrap().success());
    let output = query.output();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(said.contains(&format!("worker {} is gone", killed.address)), "{said}");
    assert_eq!(lines(others).len(), 10);
    are_idle(&[first, last]);
    // A new query that needs it says so, too.
    let said = begin("sql", &all(&workers), &tables, library, &[JOIN]).output().stderr;
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(said.contains(&format!("worker {} can't be reached", killed.address)), "{said}");
    are_idle(&[first, last]);
}

#[test]
fn a_killed_worker_ends_its_queries_by_name_and_no_others() {
    a_killed_worker_is_named_and_others_go_on(None);
}

#[test]
fn a_killed_worker_ends_its_queries_with_the_library_too() {
    a_killed_worker_is_named_and_others_go_on(Some(&library()));
}

#[test]
fn a_client_that_is_killed_leaves_nothing_at_work() {
    for library in [None, Some(library())] {
        let (workers, tables) = (workers(3, library.as_deref()), Tables::new(20_000));
        let query = begin("sql", &all(&workers), &tables, library.as_deref(), &["--count", LONG]);
        are_busy(&all(&workers));
        drop(query);
        are_idle(&all(&workers));
    }
}

#[test]
fn a_limit_or_a_reader_that_has_enough_ends_early() {
    let (workers, tables) = (workers(3, None), Tables::new(20_000));
    // 18,000 lines have the same key: 324 million rows.
    let endless = "SELECT a.note, b.note FROM lines a JOIN lines b ON a.skewed = b.skewed";
    let limited = format!("{endless} LIMIT 10");
    for _ in 0..5 {
        let rows = lines(begin("sql", &all(&workers), &tables, None, &["--count", &limited]));
        assert_eq!(rows[0]["rows"], 10);
        are_idle(&all(&workers));
    }
    let rows = lines(begin("sql", &all(&workers), &tables, None, &["--stop-after", "20000", endless]));
    assert!(number(&rows[0], "rows") >= 20_000);
    are_idle(&all(&workers));
}

#[test]
fn a_reader_who_has_seen_enough_is_no_error_and_a_full_disk_is_one() {
    for arguments in [["sql", "SELECT 1"].as_slice(), &["sql", "--count", "SELECT 1"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = program(None).args(arguments).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        assert_eq!((output.status.code(), &*String::from_utf8_lossy(&output.stderr)), (Some(0), ""));
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = program(None).args(arguments).stdout(full).stderr(Stdio::piped()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1));
        assert!(said.contains("can't write to standard output: No space left"), "{said}");
    }
}

/// They decide what a plan computes, also where a worker runs it.
#[test]
fn options_reach_the_workers() {
    let (workers, tables) = (workers(2, None), Tables::new(1_000));
    let local = "SELECT item, min(CAST(to_timestamp(item) AS VARCHAR)) FROM lines GROUP BY item";
    for option in ["datafusion.execution.time_zone=+05:00", "distributed.max_tasks_per_stage=1"] {
        let arguments = ["--rounds", "1", "--set", option, local];
        assert_eq!(lines(begin("bench", &all(&workers), &tables, None, &arguments)).len(), 2);
    }
    let output = begin("sql", &all(&workers), &tables, None, &["--set=datafusion.no=1", local]).output();
    assert!(!output.status.success());
}

#[test]
fn numbers_that_make_no_sense_are_refused() {
    let commands = [
        ["sql", "--partitions=0", "SELECT 1"],
        ["sql", "--partitions=1025", "SELECT 1"],
        ["sql", "--scan-bytes=0", "SELECT 1"],
        ["generate", "--rows=3000000001", "/nonexistent"],
    ];
    for arguments in commands {
        let output = program(None).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains("is not in "), "{said}");
    }
}

#[test]
fn the_status_of_a_worker_does_not_need_the_others() {
    let (workers, gone) = (workers(2, None), "127.0.0.1:1");
    let addresses = [&workers[0].address, gone, &workers[1].address];
    let output = program(None).args(["status", "--workers", &addresses.join(",")]).output().unwrap();
    let (out, said) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    let lines = out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let named: Vec<_> = lines.map(|line| line["worker"].as_str().unwrap().to_owned()).collect();
    assert_eq!(named, [&*workers[0].address, &*workers[1].address]);
    assert!(
        output.status.code() == Some(1) && said.contains(&format!("worker {gone} can't be reached")),
        "{said}"
    );
}

#[test]
fn tables_and_their_columns_are_shown() {
    let (workers, tables) = (workers(2, None), Tables::new(1_000));
    for workers in [all(&workers), Vec::new()] {
        for (query, says) in [("SHOW TABLES", "| customers "), ("SHOW COLUMNS FROM lines", "| quantity ")] {
            let output = begin("sql", &workers, &tables, None, &[query]).output();
            let said = String::from_utf8(output.stdout).unwrap();
            assert!(said.contains(says), "{said}{}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

#[test]
fn tables_that_can_not_be_made_leave_no_folder() {
    let outside = tempfile::tempdir().unwrap();
    let folder = outside.path().join("tables");
    // Files may have 64 blocks of 512 bytes.
    let limited = "ulimit -f 64; trap '' XFSZ; exec \"$0\" generate \"$1\" --rows 100000";
    let generate = program(None);
    let mut shell = std::process::Command::new("sh");
    let output = shell.args(["-c", limited]).arg(generate.get_program()).arg(&folder).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(!folder.exists());
}

#[test]
fn tables_have_any_names_and_anything_may_lie_beside_them() {
    let outside = tempfile::tempdir().unwrap();
    let folder = outside.path().join("it's a *[1]? %20#");
    assert!(program(None).arg("generate").arg(&folder).arg("--rows=400").status().unwrap().success());
    let listed = |folder: &std::path::Path| std::fs::read_dir(folder).unwrap().count();
    assert_eq!((listed(outside.path()), listed(&folder)), (1, 3));
    for beside in ["empty", ".hidden", "many/part=1", "round"] {
        std::fs::create_dir_all(folder.join(beside)).unwrap();
    }
    for link in ["round/here", "round/there"] {
        std::os::unix::fs::symlink(".", folder.join(link)).unwrap();
    }
    std::fs::write(folder.join("notes.txt"), "").unwrap();
    for copy in ["My.copy*.parquet", "many/part=1/0.parquet"] {
        std::fs::copy(folder.join("customers.parquet"), folder.join(copy)).unwrap();
    }
    for (table, rows) in [("lines", 400), ("customers", 10), ("\"my.copy*\"", 10), ("many", 10)] {
        let mut query = program(None);
        query.arg("sql").arg("--data").arg(&folder).args(["--count", &format!("SELECT * FROM {table}")]);
        let output = query.output().unwrap();
        assert!(output.status.success(), "{table}: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(number(&serde_json::from_slice(&output.stdout).unwrap(), "rows"), rows, "{table}");
    }
}

#[test]
fn a_table_of_no_rows_has_its_columns() {
    let (workers, tables) = (workers(2, None), Tables::new(1_000));
    let none = "SELECT item AS i, count(*) AS n FROM lines WHERE cents < 0 GROUP BY item";
    for workers in [all(&workers), Vec::new()] {
        let output = begin("sql", &workers, &tables, None, &[none]).output();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && said.contains("| i | n |"), "{said}");
    }
}

/// What a worker answers until it closes the connection.
fn answer(worker: &Worker, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(&worker.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(bytes).unwrap();
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
    }
    answer
}

#[test]
fn strangers_are_shown_the_door_and_the_worker_goes_on() {
    let (workers, tables) = (workers(2, None), Tables::new(2_000));
    let worker = &workers[0];
    assert_eq!(answer(worker, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"), b"");
    worker.has_logged("it speaks neither protocol");
    let mut greeting = *b"THALWORK\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    greeting[8] = 9;
    answer(worker, &greeting);
    worker.has_logged("another version");
    greeting[8] = 1;
    let head = |length: u32, kind: u32, request: u64| {
        let mut head = [0; 32];
        head[..4].copy_from_slice(&length.to_le_bytes());
        head[4..8].copy_from_slice(&kind.to_le_bytes());
        head[8..16].copy_from_slice(&request.to_le_bytes());
        head
    };
    let faults: [(&str, Vec<u8>); 5] = [
        ("a frame of kind 0", head(0, 0, 1).into()),
        ("Execute of 67108865 bytes", head((64 << 20) + 1, 4, 1).into()),
        ("Rows to a worker", [&head(64, 17, 1)[..], &[0; 64]].concat()),
        ("Rows of 65 bytes", head(65, 17, 1).into()),
        ("a second request 7", [head(0, 1, 7), head(0, 1, 7)].concat()),
    ];
    for (says, bytes) in faults {
        let answered = answer(worker, &[&greeting[..], &bytes].concat());
        assert!(answered.is_empty() || answered[..32] == greeting, "{says}");
        worker.has_logged(says);
    }
    // No fault of the connection, but of a request: it is answered, and the next one too.
    let mut stream = TcpStream::connect(&worker.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let garbage = [&greeting[..], &head(8, 4, 1), &[0xff; 8], &head(0, 7, 2)].concat();
    stream.write_all(&garbage).unwrap();
    stream.read_exact(&mut [0; 32]).unwrap();
    for (request, kind) in [(1, 19), (2, 20)] {
        let mut head = [0; 32];
        stream.read_exact(&mut head).unwrap();
        assert_eq!((head[4], head[8]), (kind, request));
        let length = u32::from_le_bytes(head[..4].try_into().unwrap()) as usize;
        stream.read_exact(&mut vec![0; length]).unwrap();
    }
    // HTTP/2 that is none.
    answer(worker, &[&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &[0xff; 64]].concat());
    are_idle(&all(&workers));
    assert_eq!(lines(begin("bench", &all(&workers), &tables, None, &["--rounds", "1", JOIN])).len(), 2);
    assert_eq!(statuses(&[worker]).len(), 1);
}

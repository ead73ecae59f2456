//! What the client gets is what DuckDB computes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::thread;
use std::time::Duration;

use arrow_array::RecordBatch;
use arrow_select::concat::concat_batches;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use support::{Outcome, ROWS, Server, TRANSPORTS, client_program, dataset, expected, server_program};

fn arrow_file(path: &Path) -> RecordBatch {
    let reader = arrow_ipc::reader::FileReader::try_new(File::open(path).unwrap(), None).unwrap();
    let schema = reader.schema();
    concat_batches(&schema, &reader.map(Result::unwrap).collect::<Vec<_>>()).unwrap()
}

/// Every type, over all transports, in several batches.
#[test]
fn every_type_arrives_as_duckdb_has_it() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    for sql in [
        "SELECT * FROM types.types ORDER BY id",
        "SELECT * FROM plain ORDER BY id",
        "SELECT * FROM pairs",
        "SELECT * FROM plain WHERE false",
        "SELECT NULL AS nothing, id FROM plain ORDER BY id",
        "SELECT NULL AS nothing",
        "SELECT colour, list_of_unions FROM types.types ORDER BY id LIMIT 3000 OFFSET 5000",
        "SELECT * EXCLUDE (\"union\", uhugeint) FROM test_all_types()",
        "DESCRIBE plain",
        "SELECT one AS \"a b\", one AS \"a b\" FROM types.other",
    ] {
        let expected = expected(&folder, sql);
        let unions = format!("{:?}", expected.schema()).contains("Union");
        for transport in TRANSPORTS {
            if transport == "flight" && unions {
                continue; // arrow-flight says that they are not nullable; their values are compared by checksum below
            }
            let path = folder.path().join("out.arrow");
            server
                .run(&["--sql", sql, "--transport", transport, "--out", path.to_str().unwrap()])
                .assert_ok();
            let got = arrow_file(&path);
            assert_eq!(got.schema(), expected.schema(), "{sql}");
            assert!(got == expected, "{sql} over {transport} differs");
        }
    }
    server.stop();
}

/// DuckDB would take a column from the folder's name, in place of the file's if that has it.
#[test]
fn a_view_has_the_columns_of_its_file_whatever_its_folder_is_called() {
    let folder = dataset();
    let renamed = folder.path().join("i=7");
    fs::create_dir(&renamed).unwrap();
    for file in ["numbers.parquet", "pairs.csv"] {
        fs::copy(folder.path().join("data").join(file), renamed.join(file)).unwrap();
    }
    let server = Server::spawn(server_program().arg("--dataset").arg(&renamed));
    for (view, rows) in [("numbers", "i,twice,name\n5,10,name 5\n"), ("pairs", "i,value\n5,value 5\n")] {
        let outcome = server.run(&["--sql", &format!("FROM {view} WHERE i = 5")]);
        assert_eq!(outcome.output, rows, "{outcome:?}");
    }
}

#[test]
fn a_server_without_a_time_zone_is_in_utc() {
    let folder = dataset();
    let mut command = server_program();
    let server = Server::spawn(command.env("TZ", "").arg("--dataset").arg(folder.path().join("data")));
    let sql = "SELECT TIMESTAMPTZ '2001-02-03 04:05:06+02' AS zoned, zoned::VARCHAR AS text";
    let outcome = server.run(&["--sql", sql]);
    assert_eq!(outcome.output, "zoned,text\n2001-02-03T02:05:06Z,2001-02-03 02:05:06+00\n", "{outcome:?}");
}

#[test]
fn all_transports_have_one_checksum_which_depends_on_the_rows() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let checksum = |sql: &str, transport: &str, rows: u64| {
        let outcome = server.run(&["--sql", sql, "--transport", transport, "--summary", "--checksum"]);
        let summary = outcome.summary();
        assert_eq!(summary["rows"], rows, "{sql}");
        assert_eq!(summary["transport"], transport);
        summary["checksum"].as_str().unwrap().to_owned()
    };
    let all = "SELECT * FROM types.types";
    let sum = checksum(all, "scatter", ROWS);
    for transport in TRANSPORTS {
        assert_eq!(sum, checksum(all, transport, ROWS), "{transport}");
    }
    assert_eq!(sum, checksum(all, "auto", ROWS));
    assert_eq!(sum, checksum("SELECT * FROM types.types ORDER BY id DESC", "rpc", ROWS));
    for other in [
        "SELECT * REPLACE (CASE WHEN id = 77 THEN 1 ELSE sparse END AS sparse) FROM types.types",
        "SELECT * REPLACE (CASE WHEN id = 77 THEN [9] ELSE list END AS list) FROM types.types",
        "SELECT * REPLACE (CASE id WHEN 1 THEN 'string 2' ELSE text END AS text) FROM types.types",
    ] {
        assert_ne!(sum, checksum(other, "scatter", ROWS), "{other}");
    }
    let third = "FROM numbers WHERE i % 3 = 0";
    let numbers = checksum(third, "scatter", 1_000_000);
    for transport in TRANSPORTS {
        assert_eq!(numbers, checksum(third, transport, 1_000_000), "{transport}");
    }
}

/// A chunk of long strings is sent in parts, which are slices of what DuckDB made.
#[test]
fn unions_in_lists_are_the_same_in_parts_over_all_transports() {
    let folder = dataset();
    let union = "union_value(number := i)::UNION(number BIGINT, text VARCHAR)";
    let other = "union_value(text := 'u' || i)::UNION(number BIGINT, text VARCHAR)";
    let either = format!("CASE WHEN i % 3 = 0 THEN {union} ELSE {other} END");
    for column in [
        format!("[{union}]"),
        format!("CASE WHEN i % 5 = 0 THEN NULL ELSE [{either}, NULL, {other}] END"),
        format!("[{{'a': i, 'u': {either}}}]"),
        format!("[[{either}], [], [{union}, {other}]]"),
        format!("MAP {{'k' || i: {either}}}"),
        format!("[[{either}, {union}]::UNION(number BIGINT, text VARCHAR)[2]]"),
    ] {
        let sql = format!("SELECT {column} AS u, repeat('x', 4000) AS s FROM range(2048) t(i)");
        let mut sums = Vec::new();
        for how in [&[][..], &["--keep", "64"], &["--transport-alone"]] {
            let server = Server::start(&folder, how);
            for transport in TRANSPORTS {
                let options = ["--sql", &sql, "--transport", transport, "--summary", "--checksum"];
                let summary = server.run(&[&options[..], &["--repeat", "2"]].concat()).summary();
                assert_eq!(summary["rows"], 2048);
                sums.push((summary["checksum"].clone(), options[3], how));
            }
        }
        assert!(sums.iter().all(|(sum, ..)| *sum == sums[0].0), "{sql}: {sums:?}");
    }
}

/// Each chunk has a dictionary of its own, which arrow puts one behind the other where they lie in maps and arrays: too many values.
#[test]
fn dictionaries_that_do_not_fit_together_arrive_and_are_kept() {
    let folder = dataset();
    let colour = "['red', 'green', 'blue', 'black', 'white'][i % 5 + 1]::ENUM ('red', 'green', 'blue', 'black', 'white')";
    let sql = format!(
        "SELECT random() < 2 AS yes, {colour} AS plain, MAP {{'colour': {colour}}} AS map,
         array_value({colour}, 'red') AS fixed FROM range(150000) t(i)"
    );
    let mut sums = Vec::new();
    for how in [&[][..], &["--keep", "64"]] {
        let server = Server::start(&folder, how);
        for transport in TRANSPORTS {
            let options =
                ["--sql", &sql, "--transport", transport, "--summary", "--checksum", "--repeat", "2"];
            let summary = server.run(&options).summary();
            assert_eq!(summary["rows"], 150_000);
            sums.push((summary["checksum"].clone(), transport, how));
        }
        // What it computes shows that it is the same.
        let sql = sql.replace("random() < 2", "random()");
        let ask = || server.run(&["--sql", &sql, "--summary", "--checksum"]).summary()["checksum"].clone();
        assert_eq!(ask() == ask(), !how.is_empty(), "{how:?}");
    }
    assert!(sums.iter().all(|(sum, ..)| *sum == sums[0].0), "{sums:?}");
}

#[test]
fn flight_compresses_if_it_is_asked_to() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let run = |compression| {
        let options =
            ["--sql", "FROM numbers WHERE i % 3 = 0", "--transport", "flight", "--summary", "--checksum"];
        server.run(&[&options[..], &["--compression", compression]].concat()).summary()
    };
    let (plain, lz4) = (run("none"), run("lz4"));
    assert_eq!(plain["checksum"], lz4["checksum"]);
    assert!(lz4["bytes"].as_u64().unwrap() < plain["bytes"].as_u64().unwrap() * 2 / 3, "{plain} {lz4}");
}

#[test]
fn auto_is_flight_where_the_server_speaks_nothing_else() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let transport = |address: &str| {
        let options = ["--connect", address, "--sql", "SELECT 1", "--summary"];
        Outcome::of(client_program().args(options)).summary()["transport"].clone()
    };
    assert_eq!(transport(&server.flight), "flight");

    // A server may close what it doesn't understand before it has read all of it, and so reset it, or afterwards.
    for read in [1, usize::MAX] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let flight = server.flight.clone();
        let front = thread::spawn(move || {
            let first = listener.accept().unwrap().0;
            first.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            let mut bytes = vec![];
            let _ = (&first).take(read as u64).read_to_end(&mut bytes);
            assert!(!bytes.is_empty());
            drop(first);
            let (near, far) = (listener.accept().unwrap().0, TcpStream::connect(flight).unwrap());
            let back = (far.try_clone().unwrap(), near.try_clone().unwrap());
            let back = thread::spawn(move || io::copy(&mut &back.0, &mut &back.1));
            io::copy(&mut &near, &mut &far).unwrap();
            far.shutdown(Shutdown::Write).unwrap();
            back.join().unwrap().unwrap();
        });
        assert_eq!(transport(&address), "flight");
        front.join().unwrap();
    }
}

#[test]
fn a_query_is_asked_again_on_the_same_connection() {
    let folder = dataset();
    for option in ["--max-cursors=1", "--transport-alone"] {
        let server = Server::start(&folder, &[option]);
        for transport in TRANSPORTS {
            let options = ["--sql", "FROM plain", "--transport", transport, "--summary", "--checksum"];
            let once = server.run(&options).summary();
            let again = server.run(&[&options[..], &["--repeat", "3", "--memcpy"]].concat()).summary();
            assert_eq!(again["checksum"], once["checksum"], "{transport}");
            assert_eq!((again["rows"].as_u64(), again["rounds"].as_array().unwrap().len()), (Some(ROWS), 3));
            assert!(again["memcpy_bytes"].as_u64().unwrap() > 8 * ROWS, "{again}");
        }
    }
}

#[test]
fn parquet_and_csv_hold_what_duckdb_reads_back() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let sql = "SELECT * FROM plain ORDER BY id";
    let path = folder.path().join("out.parquet");
    server.run(&["--sql", sql, "--out", path.to_str().unwrap()]).assert_ok();
    let reader =
        ParquetRecordBatchReaderBuilder::try_new(File::open(&path).unwrap()).unwrap().build().unwrap();
    let batches: Vec<_> = reader.map(Result::unwrap).collect();
    let got = concat_batches(&batches[0].schema(), &batches).unwrap();
    assert!(got.columns() == expected(&folder, sql).columns());

    let csv = "i,value\n0,value 0\n1,value 1\n";
    let sql = "FROM pairs ORDER BY i LIMIT 2";
    for options in [&["--out", "-"][..], &[]] {
        let outcome = server.run(&[&["--sql", sql], options].concat());
        outcome.assert_ok();
        assert_eq!(outcome.output, csv);
    }
    let path = folder.path().join("out.csv");
    server.run(&["--sql", sql, "--out", path.to_str().unwrap()]).assert_ok();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), csv);
}

/// Parquet has no seconds, of which its writer makes plain integers.
#[test]
fn seconds_are_times_in_parquet_too() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let path = folder.path().join("out.parquet");
    let path = path.to_str().unwrap();
    let stamp = "CASE i WHEN 0 THEN TIMESTAMP_S '1969-02-03 04:05:06' WHEN 1 THEN TIMESTAMP_S 'infinity'
                 WHEN 2 THEN TIMESTAMP_S '-infinity' WHEN 3 THEN TIMESTAMP_S '290000-01-01' END";
    let sql = format!(
        "SELECT i, {stamp} AS s, [{stamp}, NULL] AS list, CASE WHEN i > 1 THEN {{'a': [{{'s': {stamp}}}]}} END AS struct,
         MAP {{i: {stamp}}} AS map, [{stamp}]::TIMESTAMP_S[1] AS fixed FROM range(5) t(i) ORDER BY i"
    );
    server.run(&["--sql", &sql, "--out", path]).assert_ok();
    // Arrays come back as lists, which have another text.
    let texts = "SELECT COLUMNS(* EXCLUDE fixed)::VARCHAR, fixed[1]::VARCHAR FROM";
    let read = expected(&folder, &format!("{texts} '{path}' ORDER BY i"));
    assert_eq!(read.columns(), expected(&folder, &format!("{texts} ({sql})")).columns());
    let types = expected(&folder, &format!("SELECT column_type FROM (DESCRIBE FROM '{path}')"));
    let types = format!("{:?}", types.column(0));
    assert_eq!(types.matches("TIMESTAMP").count(), 5, "{types}");
}

#[test]
fn a_result_without_rows_has_its_header_in_csv() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let sql = "SELECT * FROM pairs WHERE i < 0";
    for options in [&["--out", "-"][..], &[]] {
        for transport in TRANSPORTS {
            let outcome = server.run(&[&["--sql", sql, "--transport", transport], options].concat());
            outcome.assert_ok();
            assert_eq!(outcome.output, "i,value\n", "{transport}");
        }
    }
    let path = folder.path().join("none.csv");
    server.run(&["--sql", sql, "--out", path.to_str().unwrap()]).assert_ok();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "i,value\n");
}

#[test]
fn csv_has_every_date_time_and_integer_of_duckdb() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    for (value, expected) in [
        ("DATE 'infinity'", "infinity"),
        ("DATE '-infinity'", "-infinity"),
        ("DATE '2001-02-03'", "2001-02-03"),
        ("DATE '5881580-07-10'", "5881580-07-10"),
        ("DATE '300000-02-29'", "300000-02-29"),
        ("DATE '5877642-06-25 (BC)'", "5877642-06-25 (BC)"),
        ("TIMESTAMP 'infinity'", "infinity"),
        ("TIMESTAMP '-infinity'", "-infinity"),
        ("TIMESTAMP_S 'infinity'", "infinity"),
        ("TIMESTAMP_MS '-infinity'", "-infinity"),
        ("TIMESTAMP_NS 'infinity'", "infinity"),
        ("TIMESTAMPTZ 'infinity'", "infinity"),
        ("TIMESTAMP '2001-02-03 04:05:06.789'", "2001-02-03T04:05:06.789"),
        ("TIMESTAMP '294246-12-31 04:05:06.5'", "294246-12-31 04:05:06.5"),
        ("TIME '24:00:00'", "24:00:00"),
        ("TIME '23:59:59'", "23:59:59"),
        ("NULL::TIME", ""),
        ("'-170141183460469231731687303715884105728'::HUGEINT", "-170141183460469231731687303715884105728"),
        ("100000000000000000000000000000000000000::HUGEINT", "100000000000000000000000000000000000000"),
        ("99999999999999999999999999999999999999::HUGEINT", "99999999999999999999999999999999999999"),
        ("-1.25::DECIMAL(38, 2)", "-1.25"),
    ] {
        // Beside a row of the ordinary kind.
        let sql = format!("SELECT i, CASE i WHEN 1 THEN {value} END AS x FROM range(2) t(i) ORDER BY i");
        let outcome = server.run(&["--sql", &sql, "--out", "-"]);
        assert_eq!(
            (outcome.status, outcome.output.as_str()),
            (Some(0), &*format!("i,x\n0,\n1,{expected}\n")),
            "{value}: {outcome:?}"
        );
    }
}

#[test]
fn null_has_the_text_that_is_asked_for() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let sql = "SELECT NULL AS a, '' AS b, DATE 'infinity' AS c UNION ALL SELECT 1, NULL, NULL ORDER BY a";
    let outcome = server.run(&["--sql", sql, "--null", "\\N"]);
    outcome.assert_ok();
    assert_eq!(outcome.output, "a,b,c\n1,\\N,\\N\n\\N,,infinity\n");
}

#[test]
fn a_file_keeps_its_mode() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    for name in ["private.csv", "private.parquet", "private.arrow"] {
        let path = folder.path().join(name);
        for mode in [0o600, 0o640, 0o666] {
            std::fs::write(&path, "before").unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            server.run(&["--sql", "FROM pairs", "--out", path.to_str().unwrap()]).assert_ok();
            let metadata = path.metadata().unwrap();
            assert!(metadata.len() > 10);
            assert_eq!(metadata.permissions().mode() & 0o777, mode, "{name}");
        }
    }
}

#[test]
fn what_a_link_leads_to_is_written_and_the_link_stays() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("results")).unwrap();
    symlink("results/second.csv", path("first.csv")).unwrap();
    symlink("../last.csv", path("results/second.csv")).unwrap();
    // At first it is not there.
    for value in ["1", "2"] {
        let sql = format!("SELECT {value} AS n");
        server.run(&["--sql", &sql, "--out", path("first.csv").to_str().unwrap()]).assert_ok();
        assert_eq!(fs::read_to_string(path("last.csv")).unwrap(), format!("n\n{value}\n"));
        assert!(path("first.csv").is_symlink() && path("results/second.csv").is_symlink());
    }
    symlink("loop.csv", path("loop.csv")).unwrap();
    let outcome = server.run(&["--sql", "SELECT 1", "--out", path("loop.csv").to_str().unwrap()]);
    assert!(outcome.status == Some(1) && outcome.errors.contains("symbolic links"), "{outcome:?}");
}

#[test]
fn a_result_of_many_chunks_travels_in_few_frames() {
    let folder = dataset();
    let server = Server::start(&folder, &[]);
    let summary = server.run(&["--sql", "SELECT i FROM numbers", "--summary"]).summary();
    assert_eq!(summary["rows"], 3_000_000);
    // 64 chunks of 2,048 rows in each but the last; a scan may end its row groups with short ones.
    let batches = summary["batches"].as_u64().unwrap();
    assert!((23..60).contains(&batches), "{summary}");
}

#[test]
fn a_kept_result_is_that_of_the_files_as_they_are() {
    let folder = dataset();
    let server = Server::start(&folder, &["--keep", "64"]);
    let ask = |transport: &str| {
        let outcome = server.run(&["--sql", "SELECT value FROM pairs", "--transport", transport]);
        outcome.assert_ok();
        outcome.output
    };
    let first = ask("scatter");
    assert!(first.contains("value 9"), "{first}");
    for transport in TRANSPORTS {
        assert_eq!(ask(transport), first, "{transport}");
    }
    let path = folder.path().join("data/pairs.csv");
    let other = std::fs::read_to_string(&path).unwrap().replace("value 9", "other 9");
    std::fs::write(folder.path().join("new.csv"), other).unwrap();
    std::fs::rename(folder.path().join("new.csv"), path).unwrap();
    for transport in TRANSPORTS {
        assert_eq!(ask(transport), first.replace("value 9", "other 9"), "{transport}");
    }
}

#[test]
fn a_result_that_is_kept_did_not_run_again() {
    let folder = dataset();
    let server = Server::start(&folder, &["--keep", "1"]);
    let ask = |sql: &str, transport: &str| {
        let outcome = server.run(&["--sql", sql, "--transport", transport]);
        outcome.assert_ok();
        outcome.output
    };
    // What it computes shows that it is the same, in whichever way it comes.
    let small = "SELECT random() AS x FROM range(3)";
    let first = ask(small, "scatter");
    for transport in TRANSPORTS {
        assert_eq!(ask(small, transport), first, "{transport}");
    }
    // 1.6 MB are not kept, and what is stays.
    let large = "SELECT random() AS x FROM range(200000)";
    assert_ne!(ask(large, "scatter"), ask(large, "scatter"));
    assert_eq!(ask(small, "scatter"), first);
}

#[test]
fn a_result_of_large_chunks_is_kept_too() {
    let folder = dataset();
    let server = Server::start(&folder, &["--keep", "64"]);
    // 40 MB in one chunk.
    let wide = "SELECT random() AS x, repeat('x', 20000) AS y FROM range(2000)";
    let ask = || {
        let outcome = server.run(&["--sql", wide, "--summary", "--checksum"]);
        outcome.assert_ok();
        let summary: serde_json::Value = serde_json::from_str(&outcome.output).unwrap();
        summary["checksum"].clone()
    };
    assert_eq!(ask(), ask());
}

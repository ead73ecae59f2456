//! The experiment in miniature, with real processes: right results, and what carries the bytes; and what the others say when one of
//! them is killed. Wants THALLUS_LIBRARY, the path of libthallus_shim.so.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_thallus-shuffle");

fn library() -> String {
    std::env::var("THALLUS_LIBRARY").expect("THALLUS_LIBRARY: the path of libthallus_shim.so")
}

fn bench(arguments: &[&str]) -> Output {
    let small = ["bench", "--rows", "200000", "--rounds", "1", "--repeat", "3", "--limit", "60", "--json"];
    Command::new(PROGRAM).args(small).args(arguments).output().unwrap()
}

fn samples(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout.clone()).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Rows are verified by the driver.
#[test]
fn all_ways_give_all_rows_and_the_designs_leave_tcp() {
    let samples = samples(&bench(&["--workers", "6", "--processes", "3", "--library", &library()]));
    assert_eq!(samples.len(), 8);
    for sample in &samples {
        let (design, thallus) = (sample["way"]["design"].as_str().unwrap(), &sample["way"]["thallus"]);
        let carried = &sample["carried"];
        let connections = sample["connections"].as_u64().unwrap();
        // Of three pairs of processes; who fetches connects. Of twelve pairs of workers the twins have two connections each.
        let wanted = match design {
            "push" => 3,
            "staged" => 6,
            _ => 24,
        };
        assert_eq!(connections, wanted, "{design}");
        if thallus == true && (design == "push" || design == "staged") {
            assert_eq!(
                (carried["in_memory"].as_u64(), carried["on_tcp"].as_u64()),
                (Some(2 * wanted), Some(0)),
                "{design}"
            );
            assert_eq!(carried["reasons"].as_array().unwrap().len(), 0);
            assert!(carried["ring_bytes"].as_u64() > carried["tcp_bytes"].as_u64(), "{sample}");
        }
        if thallus == false {
            assert_eq!(carried["in_memory"].as_u64(), Some(0));
        }
    }
}

#[test]
fn connections_that_are_not_shared_and_all_rows_for_one_worker() {
    for arguments in [["--no-share", "--window=65536"], ["--skewed", "--window=65536"]] {
        let common = ["--workers", "6", "--processes", "3", "--designs", "push,staged", "--chunk", "8192"];
        let arguments: Vec<&str> = common.into_iter().chain(arguments).collect();
        for sample in samples(&bench(&arguments)) {
            let (push, shared) = (sample["way"]["design"] == "push", !arguments.contains(&"--no-share"));
            let wanted = match (push, shared) {
                (true, true) => 3,
                // Every pair of workers.
                (true, false) => 15,
                (false, true) => 6,
                // Every worker to both other processes.
                (false, false) => 12,
            };
            assert_eq!(sample["connections"].as_u64(), Some(wanted), "{sample}");
        }
    }
}

/// Then TCP would be measured in its place.
#[test]
fn a_library_that_can_not_be_loaded_is_an_error() {
    let no_library = env!("CARGO_MANIFEST_DIR").to_owned() + "/Cargo.toml";
    for (library, says) in [("/nonexistent.so", "No such file"), (&*no_library, "is not loaded")] {
        let output =
            bench(&["--workers", "2", "--processes", "2", "--designs", "push", "--library", library]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(says), "{said}");
    }
    // By a name in the current folder.
    let library = library();
    let (folder, name) = library.rsplit_once('/').unwrap();
    let mut driver = Command::new(PROGRAM);
    driver.args([
        "bench",
        "--rows=1000",
        "--workers=2",
        "--processes=2",
        "--rounds=1",
        "--repeat=2",
        "--json",
    ]);
    let output = driver.args(["--designs=push", "--library", name]).current_dir(folder).output().unwrap();
    assert_eq!(samples(&output)[1]["carried"]["in_memory"], 2);
}

#[test]
fn a_reader_who_has_seen_enough_is_no_error_and_a_full_disk_is_one() {
    let bench = |stdout: std::process::Stdio| {
        let mut driver = Command::new(PROGRAM);
        driver.args(["bench", "--rows=1000", "--workers=2", "--processes=2", "--rounds=1", "--repeat=2"]);
        driver.arg("--designs=push").stdout(stdout).stderr(std::process::Stdio::piped()).output().unwrap()
    };
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = bench(writer.into());
    assert_eq!((output.status.code(), &*String::from_utf8_lossy(&output.stderr)), (Some(0), ""));
    let output = bench(std::fs::File::options().write(true).open("/dev/full").unwrap().into());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("can't write to standard output"), "{said}");
}

#[test]
fn numbers_that_make_no_sense_are_refused() {
    for option in ["--rows=18446744073709551615", "--limit=18446744073709551615"] {
        let output = Command::new(PROGRAM).args(["bench", option]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{option}");
    }
}

/// The processes of a driver.
fn children(of: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{of}/task")).unwrap();
    let listed = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("children")).ok());
    listed
        .flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<u32>>())
        .collect()
}

/// Kills one process after some time, in whatever stage it is then. The driver's own limit is 60 seconds; every other process has to
/// end by itself, with an error, long before.
#[test]
fn the_others_end_when_one_is_killed_in_any_stage() {
    for design in ["push", "staged"] {
        for library in [None, Some(library())] {
            for after in [5, 20, 60, 120, 200] {
                let mut command = Command::new(PROGRAM);
                command.args([
                    "bench",
                    "--rows",
                    "400000",
                    "--workers",
                    "6",
                    "--processes",
                    "3",
                    "--rounds",
                    "1",
                ]);
                command.args([
                    "--repeat",
                    "100000",
                    "--limit",
                    "60",
                    "--json",
                    "--designs",
                    design,
                    "--window",
                    "65536",
                    "--patience",
                    "2",
                ]);
                command.args(library.iter().flat_map(|library| ["--library", library]));
                let child = command
                    .stdout(std::process::Stdio::null())
                    .stderr(std::process::Stdio::piped())
                    .spawn()
                    .unwrap();
                let driver = child.id();
                let deadline = Instant::now() + Duration::from_secs(30);
                let processes = loop {
                    let processes = children(driver);
                    if processes.len() == 3 || Instant::now() > deadline {
                        break processes;
                    }
                    std::thread::yield_now();
                };
                std::thread::sleep(Duration::from_millis(after));
                let killed = Command::new("kill").args(["-9", &processes[1].to_string()]).status().unwrap();
                assert!(killed.success());
                let output = child.wait_with_output().unwrap();
                let said = String::from_utf8_lossy(&output.stderr);
                assert!(!output.status.success());
                assert!(said.contains("is gone"), "{design}, after {after} ms: {said}");
                assert!(!said.contains("hangs"), "{design}, after {after} ms: {said}");
                for process in processes {
                    assert!(!std::path::Path::new(&format!("/proc/{process}")).exists(), "it is there yet");
                }
            }
        }
    }
}

//! `thallus bench --compare` on reports that `thallus bench --json` has written.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn bench(arguments: &[&Path]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_thallus")).arg("bench").args(arguments).output().unwrap()
}

fn compare(old: &Path, new: &Path) -> (Option<i32>, String, String) {
    let output = bench(&["--compare".as_ref(), old, new]);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn a_report_is_also_a_page_with_plots() {
    let folder = tempfile::tempdir().unwrap();
    let [page, json] = ["page", "json"].map(|name| folder.path().join(name));
    let options = "--transport tcp --transport unix --only ping-pong/64/epoll/unpinned --only ping-pong/64/blocking/unpinned \
                   --only paced/64/100-per-second --seconds 0.1 --rounds 1 --html";
    let options = options.split_whitespace().map(Path::new);
    let arguments: Vec<&Path> = options.chain([page.as_path(), "--json".as_ref(), &json]).collect();
    let output = bench(&arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page = fs::read_to_string(page).unwrap();
    for wanted in [
        "<svg",
        "How long round trips take: ping-pong/64/epoll/unpinned",
        "<td>paced/64/100-per-second/unpinned</td>",
    ] {
        assert!(page.contains(wanted), "{wanted}: {page}");
    }
    let report: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let results = report["results"].as_array().unwrap();
    assert_eq!(results.len(), 3);
    for result in results {
        for transport in ["tcp", "unix"] {
            let median = result["transports"][transport]["microseconds"]["p50"].as_f64().unwrap();
            assert!(median > 0.0, "{result}");
        }
    }
    let paced = results.iter().find(|result| result["name"] == "paced/64/100-per-second/unpinned").unwrap();
    let rate = paced["transports"]["tcp"]["median"].as_f64().unwrap();
    // Never faster; that it goes so fast depends on the machine.
    assert!(rate <= 200.0, "{rate}");
}

#[test]
fn a_name_that_no_workload_has_is_a_wrong_argument() {
    for arguments in [&["--only", "nosuch"][..], &["arrow", "--dataset", "/nowhere", "--only", "nosuch"]] {
        let arguments: Vec<_> = arguments.iter().map(Path::new).collect();
        let output = bench(&arguments);
        assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(2), true), "{output:?}");
        assert!(output.stderr.starts_with(b"thallus: no "), "{output:?}");
    }
}

#[test]
fn a_report_that_cannot_be_written_does_not_take_the_others_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page");
    let options = "--transport tcp --only ping-pong/64/blocking/unpinned --seconds 0.05 --rounds 1 --json /dev/full --html";
    let arguments: Vec<&Path> = options.split(' ').map(Path::new).chain([page.as_path()]).collect();
    let output = bench(&arguments);
    let [text, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert_eq!(output.status.code(), Some(1));
    assert!(
        errors.ends_with("thallus: can't write /dev/full: No space left on device (os error 28)\n"),
        "{errors}"
    );
    assert!(text.contains("| ping-pong/64/blocking/unpinned |"), "{text}");
    assert!(fs::read_to_string(page).unwrap().contains("<td>ping-pong/64/blocking/unpinned</td>"));
}

#[test]
fn a_report_for_which_there_is_no_room_leaves_the_older_one() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report");
    fs::write(&file, "an older one").unwrap();
    // No file may have more than two KiB.
    let limited = "trap '' XFSZ; ulimit -f 4; exec \"$0\" bench --transport tcp --only ping-pong/64/blocking/unpinned \
                   --seconds 0.05 --rounds 1 --json \"$1\"";
    let output = Command::new("dash")
        .args(["-c", limited, env!("CARGO_BIN_EXE_thallus")])
        .arg(&file)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.ends_with("report: File too large (os error 27)\n"), "{errors}");
    assert_eq!(fs::read_to_string(file).unwrap(), "an older one");
}

#[test]
fn a_report_of_its_own_can_be_compared() {
    let folder = tempfile::tempdir().unwrap();
    let [old, new, few] = ["old", "new", "few"].map(|name| folder.path().join(name));
    let measure = |rounds: &str, file: &Path| {
        let options =
            "--transport tcp --transport unix --only ping-pong/64/blocking/unpinned --seconds 0.05 --rounds";
        let options = options.split(' ').chain([rounds, "--json"]).map(Path::new);
        let arguments: Vec<&Path> = options.chain([file]).collect();
        let output = bench(&arguments);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    measure("3", &old);
    let (status, text, errors) = compare(&old, &old);
    assert_eq!((status, errors.as_str()), (Some(0), ""), "{text}");
    assert!(text.ends_with("0 better, 0 worse, 0 worse as TCP is.\n"), "{text}");

    // As if the library had been measured, which is not there, and had grown slower.
    let report: Value = serde_json::from_slice(&fs::read(&old).unwrap()).unwrap();
    let with_thallus = |factor: f64| {
        let mut report = report.clone();
        let transports = report["results"][0]["transports"].as_object_mut().unwrap();
        let mut series = transports["tcp"].clone();
        for sample in series["samples"].as_array_mut().unwrap() {
            sample["value"] = (sample["value"].as_f64().unwrap() * factor).into();
        }
        transports.insert("thallus".to_owned(), series);
        report.to_string()
    };
    fs::write(&old, with_thallus(1e6)).unwrap();
    fs::write(&new, with_thallus(1.0)).unwrap();
    let (status, text, _) = compare(&old, &new);
    assert_eq!(status, Some(1), "{text}");
    assert!(
        text.contains("| **worse** |") && text.ends_with("0 better, 1 worse, 0 worse as TCP is.\n"),
        "{text}"
    );
    assert_eq!(compare(&new, &old).0, Some(0));
    let page = folder.path().join("page.html");
    let html: [&Path; 5] = ["--compare".as_ref(), &old, &new, "--html".as_ref(), &page];
    assert_eq!(bench(&html).status.code(), Some(1));
    let page = fs::read_to_string(page).unwrap();
    assert!(
        page.contains("<svg") && page.contains("TCP, old") && page.contains("Unix socket, new"),
        "{page}"
    );
    assert!(page.contains("<td>worse</td>"), "{page}");

    measure("2", &few);
    let (status, text, errors) = compare(&old, &few);
    assert_eq!((status, text.as_str()), (Some(2), ""));
    assert_eq!(errors, format!("thallus: {}: nothing has 3 rounds, and so a spread\n", few.display()));
}

#[test]
fn a_library_that_cannot_be_preloaded_is_not_measured() {
    let folder = tempfile::Builder::new().prefix("a b").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let [program, library] = ["thallus", "libthallus_shim.so"].map(|name| folder.path().join(name));
    // A copy could still be open for writing in a child that another thread has just forked.
    fs::hard_link(env!("CARGO_BIN_EXE_thallus"), &program).unwrap();
    fs::write(&library, "").unwrap();
    let options = "bench --only ping-pong/64/blocking/unpinned --seconds 0.05 --rounds 1";
    let output = Command::new(program).args(options.split(' ')).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("can't be preloaded: its path has a space"), "{errors}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn what_is_no_report_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "{}").unwrap();
    let (status, text, errors) = compare(&file, &file);
    assert_eq!((status, text.as_str()), (Some(2), ""));
    assert!(errors.starts_with(&format!("thallus: {}: missing field", file.display())), "{errors}");
    let (status, _, errors) = compare(Path::new("/nowhere"), &file);
    assert_eq!(
        (status, errors.as_str()),
        (Some(2), "thallus: /nowhere: No such file or directory (os error 2)\n")
    );
    for arguments in
        [&["--compare", "a"][..], &["--compare", "a", "b", "c"], &["--compare", "a", "b", "--rounds", "3"]]
    {
        let arguments: Vec<_> = arguments.iter().map(Path::new).collect();
        assert_eq!(bench(&arguments).status.code(), Some(2), "{arguments:?}");
    }
}

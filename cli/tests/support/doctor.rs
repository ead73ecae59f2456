//! `thallus doctor` with the real library, and what it reports.

#![allow(dead_code, reason = "each test uses a part of this")]

use std::collections::BTreeSet;
use std::fs::{self, copy};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::{Installation, Outcome, outcome};

/// The real library: `THALLUS_LIBRARY`, or the one beside the command.
pub(crate) fn library() -> PathBuf {
    let beside = || Path::new(env!("CARGO_BIN_EXE_thallus")).with_file_name("libthallus_shim.so");
    let path = std::env::var_os("THALLUS_LIBRARY").map_or_else(beside, PathBuf::from);
    assert!(
        path.exists(),
        "{}: build it (cargo build -p thallus-shim), or set THALLUS_LIBRARY",
        path.display()
    );
    path
}

/// The command with the real library.
pub(crate) fn installation() -> Installation {
    let installation = Installation::without_library();
    copy(library(), installation.path("bin/libthallus_shim.so")).unwrap();
    installation
}

/// `program arguments… thallus doctor`, from an environment without settings of ours.
pub(crate) fn through(installation: &Installation, program: &[&str]) -> Command {
    let thallus = installation.path("bin/thallus");
    let mut command = match program {
        [] => Command::new(&thallus),
        [program, arguments @ ..] => {
            let mut command = Command::new(program);
            command.args(arguments).arg(&thallus);
            command
        }
    };
    command.arg("doctor");
    for (name, _) in std::env::vars_os() {
        if name == "LD_PRELOAD" || name.to_string_lossy().starts_with("THALLUS") {
            command.env_remove(name);
        }
    }
    command
}

pub(crate) fn doctor(installation: &Installation) -> Command {
    through(installation, &[])
}

/// The exit status and the report.
pub(crate) fn report(command: &mut Command) -> (i32, Value) {
    let Outcome { status, output, errors } = outcome(command.arg("--json"));
    assert_eq!(errors, "");
    (status.unwrap(), serde_json::from_str(&output).unwrap())
}

pub(crate) fn problems(report: &Value, part: &str) -> Vec<String> {
    let problems = report["problems"].as_array().unwrap().iter();
    let of_part = problems.filter(|problem| problem["part"] == part);
    of_part.map(|problem| problem["problem"].as_str().unwrap().to_owned()).collect()
}

/// The only address of the server, and what was concluded about it.
pub(crate) fn conclusion(report: &Value) -> (&Value, &Value) {
    let [way] = report["connection"]["addresses"].as_array().unwrap().as_slice() else {
        panic!("one address expected: {report:#}");
    };
    (way, &way["conclusion"])
}

/// Each name in the JSON, with `[]` for the entries of an array. Only those that hold no others.
pub(crate) fn names(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                names(value, &if path.is_empty() { name.clone() } else { format!("{path}.{name}") }, found);
            }
        }
        Value::Array(list) if list.iter().all(Value::is_object) && !list.is_empty() => {
            list.iter().for_each(|value| names(value, &format!("{path}[]"), found));
        }
        _ => {
            found.insert(path.to_owned());
        }
    }
}

/// The names that docs/doctor.md lists.
pub(crate) fn documented() -> BTreeSet<String> {
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/doctor.md")).unwrap();
    let table = text.split("| name | content |").nth(1).unwrap();
    let cells = table.lines().filter_map(|row| row.strip_prefix("| `")?.split(" |").next());
    cells.flat_map(|cell| cell.split(", ")).map(|name| name.trim_matches('`').to_owned()).collect()
}

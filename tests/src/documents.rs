//! What the documents list is what there is.

use std::collections::BTreeSet;
use std::path::Path;

use crate::behaviours::AREAS;

fn read(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    std::fs::read_to_string(root.join(path)).expect("a file of the project")
}

/// The words in backquotes.
fn quoted(text: &str) -> BTreeSet<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

fn missing<'name>(names: impl IntoIterator<Item = &'name str>, listed: &BTreeSet<&str>) -> Vec<&'name str> {
    names.into_iter().filter(|name| !listed.contains(name)).collect()
}

#[test]
fn every_hooked_call_is_listed() {
    let (exports, document) = (read("shim/exports.txt"), read("docs/compatibility.md"));
    let calls = exports.lines().filter_map(|line| line.split('#').next()).map(str::trim);
    let calls: Vec<_> = calls.filter(|line| !line.is_empty()).collect();
    assert!(calls.len() > 50);
    assert_eq!(missing(calls, &quoted(&document)), [""; 0]);
}

#[test]
fn every_system_call_that_syscall_hooks_is_listed() {
    let (source, document) = (read("shim/src/abi/process.rs"), read("docs/compatibility.md"));
    let row = document.lines().find(|line| line.starts_with("| `syscall` |")).expect("a row");
    let arms = source.split_once("fn syscall(").expect("the hook").1;
    let calls: Vec<_> = arms
        .split("libc::SYS_")
        .skip(1)
        .filter_map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next())
        .collect();
    assert!(calls.len() > 30);
    assert_eq!(missing(calls, &quoted(row)), [""; 0]);
}

#[test]
fn every_area_is_listed() {
    let document = read("docs/compatibility.md");
    assert_eq!(missing(AREAS.iter().map(|(area, _)| *area), &quoted(&document)), [""; 0]);
}

#[test]
fn every_key_of_the_configuration_is_listed() {
    let document = read("docs/configuration.md");
    let keys = thallus_transport::configuration::KEYS.iter().map(|(key, _)| *key);
    assert_eq!(missing(keys, &quoted(&document)), [""; 0]);
}

#[test]
fn every_reason_is_listed() {
    let document = read("ARCHITECTURE.md");
    let reasons = thallus_transport::reason::Reason::ALL.iter().map(|reason| reason.name());
    assert_eq!(missing(reasons, &quoted(&document)), [""; 0]);
}

//! A C program that does what only C programs do, natively and with the library: it prints the same.

use std::fs;

use anyhow::{Context, Result, ensure};
use thallus_tests::harness::{Scene, Stats, program, turn};

/// Runs one part of the program; the library's statistics.
fn same(part: &str) -> Result<Stats> {
    same_with(part, "")
}

/// As [`same`], with this configuration.
fn same_with(part: &str, configuration: &str) -> Result<Stats> {
    run(include_str!("calls.c"), part, configuration)
}

fn run(source: &str, part: &str, configuration: &str) -> Result<Stats> {
    let _turn = turn();
    let scene = Scene::new()?;
    let (path, built) = (scene.path("calls.c"), scene.path("calls"));
    fs::write(&path, source)?;
    let mut compile = scene.plain(program("gcc", "gcc")?);
    compile.args(["-O1", "-pthread", "-o"]).arg(&built).arg(&path);
    scene.succeed(compile).context("compile")?;
    let mut natively = scene.plain(&built);
    natively.arg(part);
    let mut shimmed = scene.shimmed("calls", &built)?;
    // At the pace that users have.
    shimmed.arg(part).env_remove("THALLUS_UPGRADE_AFTER");
    if !configuration.is_empty() {
        let path = scene.path("thallus.conf");
        fs::write(&path, configuration)?;
        shimmed.env("THALLUS_CONFIG", path);
    }
    let printed = scene.succeed(natively)?;
    ensure!(!printed.is_empty(), "{part} prints nothing");
    assert_eq!(scene.succeed(shimmed)?, printed, "{part}");
    scene.stats("calls")
}

/// As [`same`]; so many connections left TCP, of so many in all.
fn same_and_upgraded(part: &str, upgraded: u64, total: u64) -> Result<()> {
    let stats = same(part)?;
    assert_eq!((stats.over_shared_memory(), stats.connections()), (upgraded, total), "{stats:?}");
    Ok(())
}

#[test]
fn a_signal_handler_leaves_a_read() -> Result<()> {
    // The call that was left counts as one that is still inside: the young connection's end stays on TCP, and so does the
    // other.
    same_and_upgraded("leaves-a-read", 2, 4)
}

#[test]
fn a_signal_handler_ends_its_thread() -> Result<()> {
    same_and_upgraded("exits-in-a-handler", 4, 4)
}

#[test]
fn select_and_poll_are_asked_for_more_than_there_is() -> Result<()> {
    same_and_upgraded("selects-and-polls", 2, 2)
}

#[test]
fn a_child_that_no_handler_sees_changes_nothing() -> Result<()> {
    same_and_upgraded("cloned", 12, 16)
}

#[test]
fn a_malloc_of_the_programs_own_is_locked_over_a_fork() -> Result<()> {
    let stats = run(include_str!("malloc.c"), "", "")?;
    // Of ten children and their parent, whoever lets go of an end last has counted it.
    assert_eq!((stats.over_shared_memory(), stats.connections()), (2, 2), "{stats:?}");
    Ok(())
}

#[test]
fn calls_are_made_by_syscall() -> Result<()> {
    same_and_upgraded("by-syscall", 2, 2)
}

#[test]
fn a_number_is_used_again_for_datagrams() -> Result<()> {
    same_and_upgraded("numbers-again", 0, 0)
}

#[test]
fn nobody_waits_for_the_thread_that_reads_the_configuration() -> Result<()> {
    // As long a file as there may be, so that it is being read.
    let configuration = "[program a b c d]\n".repeat(3600);
    for part in ["meanwhile-a-handler", "meanwhile-a-fork"] {
        same_with(part, &configuration)?;
    }
    Ok(())
}

//! A C program that does what only C programs do, natively and with the library: it prints the same.

use std::fs;

use anyhow::{Context, Result, ensure};
use thallus_tests::harness::{Scene, Stats, program, turn};

/// Runs one part of the program; the library's statistics.
fn same(part: &str) -> Result<Stats> {
    let _turn = turn();
    let scene = Scene::new()?;
    let source = scene.path("calls.c");
    fs::write(&source, include_str!("calls.c"))?;
    let built = scene.path("calls");
    let mut compile = scene.plain(program("gcc", "gcc")?);
    compile.args(["-O1", "-pthread", "-o"]).arg(&built).arg(&source);
    scene.succeed(compile).context("compile calls.c")?;
    let mut natively = scene.plain(&built);
    natively.arg(part);
    let mut shimmed = scene.shimmed("calls", &built)?;
    shimmed.arg(part);
    let printed = scene.succeed(natively)?;
    ensure!(!printed.is_empty(), "{part} prints nothing");
    assert_eq!(scene.succeed(shimmed)?, printed, "{part}");
    scene.stats("calls")
}

#[test]
fn a_signal_handler_leaves_a_read() -> Result<()> {
    let stats = same("leaves-a-read")?;
    // The call that was left counts as one that is still inside: the young connection's end stays on TCP, and so does the
    // other.
    assert_eq!((stats.over_shared_memory(), stats.connections()), (2, 4), "{stats:?}");
    Ok(())
}

#[test]
fn a_signal_handler_ends_its_thread() -> Result<()> {
    let stats = same("exits-in-a-handler")?;
    assert_eq!((stats.over_shared_memory(), stats.connections()), (4, 4), "{stats:?}");
    Ok(())
}

#[test]
fn select_and_poll_are_asked_for_more_than_there_is() -> Result<()> {
    let stats = same("selects-and-polls")?;
    assert_eq!((stats.over_shared_memory(), stats.connections()), (2, 2), "{stats:?}");
    Ok(())
}

#[test]
fn a_child_that_no_handler_sees_changes_nothing() -> Result<()> {
    let stats = same("cloned")?;
    assert_eq!(stats.connections(), 16, "{stats:?}");
    assert!(stats.over_shared_memory() >= 12, "{stats:?}");
    Ok(())
}

#[test]
fn a_number_is_used_again_for_datagrams() -> Result<()> {
    assert_eq!(same("numbers-again")?.connections(), 0);
    Ok(())
}

//! Nothing is left when both sides have gone, however they went.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::thread::UnshareFlags;
use thallus_tests::behaviours;
use thallus_tests::calls::is_root;
use thallus_tests::harness::{Preloaded, Run, Scene, Variant, run, turn};

/// Runs a behaviour in a network namespace of its own, where no other test's names are; then what that
/// namespace holds.
fn run_alone(name: &'static str) -> Result<(Run, String)> {
    ensure!(is_root(), "only root can make a network namespace");
    std::thread::spawn(move || {
        // SAFETY: a new network namespace, of this thread alone, breaks no promise of safe code.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.context("unshare")?;
        let scene = Scene::new()?;
        let mut up = scene.plain("ip");
        up.args(["link", "set", "lo", "up"]);
        scene.succeed(up).context("ip is needed: install iproute2")?;
        let behaviour = behaviours::find(name).context("no such behaviour")?;
        let program = Path::new(env!("CARGO_BIN_EXE_behaviour"));
        let run = run(program, name, &behaviour, Variant::USUAL, Preloaded::Both)?;
        Ok((run, fs::read_to_string("/proc/thread-self/net/unix")?))
    })
    .join()
    .map_err(|_| anyhow::anyhow!("the thread panicked"))?
}

pub(super) fn shared_memory_files() -> Result<BTreeSet<String>> {
    let entries = fs::read_dir("/dev/shm").context("/dev/shm")?;
    Ok(entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
}

fn leaves_nothing(name: &'static str) -> Result<()> {
    let _turn = turn();
    let before = shared_memory_files()?;
    let (run, names) = run_alone(name)?;
    ensure!(run.overdue.is_none(), "{run:?}");
    ensure!(!names.contains("thallus"), "names are left:\n{names}");
    let after: Vec<_> = shared_memory_files()?.difference(&before).cloned().collect();
    ensure!(after.iter().all(|file| !file.contains("thallus")), "files are left: {after:?}");
    Ok(())
}

#[test]
fn after_a_plain_end() -> Result<()> {
    leaves_nothing("ending::end_after_data")
}

#[test]
fn after_an_exit_without_close() -> Result<()> {
    leaves_nothing("ending::exit_without_close")
}

#[test]
fn after_a_kill() -> Result<()> {
    leaves_nothing("ending::killed_while_busy")
}

#[test]
fn after_many_connections() -> Result<()> {
    leaves_nothing("connecting::one_request_for_each_connection")
}

#[test]
fn after_offers_that_nobody_answered() -> Result<()> {
    leaves_nothing("handing_on::accepted_by_an_unshimmed_child")
}

#[test]
fn after_children() -> Result<()> {
    leaves_nothing("processes::a_child_for_each_connection")
}

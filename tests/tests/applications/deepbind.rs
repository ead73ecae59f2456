//! A C program with modules that look for libc's names in libc itself (`RTLD_DEEPBIND`), or that does so, or whose constructors
//! need them, natively and with the library: it prints the same.

use std::fs;

use anyhow::{Context, Result, ensure};
use thallus_tests::harness::{Scene, Stats, program, turn};

/// How the module is linked: what it calls is found at the first call, or when it is loaded.
const LAZY: &str = "-Wl,-z,lazy";
const NOW: &str = "-Wl,-z,now,-z,relro";

/// A scene with the program and all that it loads.
fn built(linked: &str) -> Result<Scene> {
    let scene = Scene::new()?;
    fs::write(scene.path("deepbind.c"), include_str!("deepbind.c"))?;
    fs::write(scene.path("module.c"), include_str!("module.c"))?;
    fs::create_dir(scene.path("plugins"))?;
    let module = ["-shared", "-fPIC", linked, "module.c"];
    let beside_itself = "-Wl,-rpath,$ORIGIN";
    let steps: [&[&str]; 6] = [
        &["-DHELPER", "-o", "libhelper.so"],
        &["-DCALLER", "-o", "caller.so", "-Wl,-rpath,$ORIGIN/plugins:$ORIGIN"],
        &["-DBESIDE", "-o", "beside.so"],
        &["-DSTARTING", "-pthread", "-o", "starting.so"],
        &["-o", "module.so", beside_itself, "-L.", "-lhelper"],
        &["-o", "plugins/plugin.so", "-Wl,-rpath,$ORIGIN/..", "-L.", "-lhelper"],
    ];
    let steps = steps.iter().map(|step| [&module, *step].concat());
    let program_itself = vec!["-pthread", "-rdynamic", "deepbind.c", "-o", "deepbind"];
    for arguments in steps.chain([program_itself]) {
        let mut compile = scene.plain(program("gcc", "gcc")?);
        compile.args(["-O1", "-Wall", "-Wextra", "-Werror"]).args(&arguments);
        scene.succeed(compile).with_context(|| format!("compile {arguments:?}"))?;
    }
    Ok(scene)
}

/// Runs one part of the program, with more libraries preloaded; the library's statistics.
fn same_beside(linked: &str, part: &str, beside: &str) -> Result<Stats> {
    let _turn = turn();
    let scene = built(linked)?;
    let mut natively = scene.plain(scene.path("deepbind"));
    natively.arg(part);
    let printed = scene.succeed(natively)?;
    ensure!(!printed.is_empty(), "{part} prints nothing");
    let mut shimmed = scene.shimmed("deepbind", scene.path("deepbind"))?;
    shimmed.arg(part);
    if !beside.is_empty() {
        let preloaded = format!("{}:{}", scene.library().display(), scene.path(beside).display());
        shimmed.env("LD_PRELOAD", preloaded);
    }
    assert_eq!(scene.succeed(shimmed)?, printed, "{part}");
    scene.stats("deepbind")
}

/// As [`same_beside`]; both ends of the one connection left TCP.
fn same(linked: &str, part: &str) -> Result<()> {
    let stats = same_beside(linked, part, "")?;
    assert_eq!((stats.over_shared_memory(), stats.connections()), (2, 2), "{part} {linked}: {stats:?}");
    Ok(())
}

#[test]
fn it_serves_a_connection_that_has_left_tcp() -> Result<()> {
    same(LAZY, "lazy")?;
    same(LAZY, "now")?;
    same(NOW, "now")
}

#[test]
fn it_is_there_before_the_connection() -> Result<()> {
    same(LAZY, "later")
}

#[test]
fn its_constructor_serves() -> Result<()> {
    same(NOW, "constructor")
}

#[test]
fn it_is_loaded_by_dlmopen() -> Result<()> {
    same(NOW, "dlmopen")
}

#[test]
fn it_is_found_along_the_path_of_who_loads_it() -> Result<()> {
    same(LAZY, "caller")
}

#[test]
fn several_threads_load_it() -> Result<()> {
    same(LAZY, "threads")
}

#[test]
fn a_child_loads_it() -> Result<()> {
    same(LAZY, "child")
}

#[test]
fn libc_is_asked_for_its_functions() -> Result<()> {
    same(LAZY, "asked")
}

#[test]
fn its_constructor_waits_for_a_thread_that_serves() -> Result<()> {
    same(LAZY, "starting")
}

#[test]
fn it_is_said_why_there_is_none() -> Result<()> {
    same(LAZY, "message")
}

#[test]
fn connections_stay_on_tcp_where_another_preloaded_library_has_such_a_name() -> Result<()> {
    let stats = same_beside(LAZY, "later", "beside.so")?;
    assert_eq!(stats.over_shared_memory(), 0, "{stats:?}");
    assert_eq!(stats.not_upgraded.keys().collect::<Vec<_>>(), ["unseen-calls"], "{stats:?}");
    // They had left TCP before.
    let stats = same_beside(LAZY, "back", "beside.so")?;
    assert_eq!((stats.over_shared_memory(), stats.returned_to_tcp), (2, 2), "{stats:?}");
    Ok(())
}

/// Where the module's `poll` leads to.
fn leads_to(environment: &[(&str, &str)]) -> Result<String> {
    let _turn = turn();
    let scene = built(LAZY)?;
    let mut shimmed = scene.shimmed("deepbind", scene.path("deepbind"))?;
    shimmed.arg("names").envs(environment.iter().copied());
    Ok(scene.succeed(shimmed)?.trim().to_owned())
}

#[test]
fn nothing_is_touched_where_the_library_is_off() -> Result<()> {
    assert_eq!(leads_to(&[])?, "libthallus_shim.so");
    assert_eq!(leads_to(&[("THALLUS", "off")])?, "libc.so.6");
    Ok(())
}

//! A C program with `thallus.h`, natively and with the library.

use std::fs;

use anyhow::{Context, Result, ensure};
use thallus_tests::harness::{Scene, program, turn};

const HEADER: &str = include_str!("../../../include/thallus.h");

#[test]
fn bodies_are_lent_where_the_library_is_and_sent_elsewhere() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    fs::write(scene.path("thallus.h"), HEADER)?;
    fs::write(scene.path("lending.c"), include_str!("lending.c"))?;
    let built = scene.path("lending");
    let mut compile = scene.plain(program("gcc", "gcc")?);
    compile.args(["-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o"]);
    scene.succeed({
        compile.arg(&built).arg(scene.path("lending.c"));
        compile
    })?;

    let mut natively = scene.plain(&built);
    natively.arg(scene.path("natively"));
    let printed = scene.succeed(natively)?;
    ensure!(!printed.is_empty(), "it prints nothing");
    ensure!(fs::read_to_string(scene.path("natively"))? == "0\n");

    let mut shimmed = scene.shimmed("lending", &built)?;
    shimmed.arg(scene.path("shimmed"));
    assert_eq!(scene.succeed(shimmed)?, printed);
    let stats = scene.stats("lending")?;
    assert_eq!((stats.over_shared_memory(), stats.connections()), (2, 2), "{stats:?}");
    // The first few bodies come before the connection has left TCP.
    let lent: u32 = fs::read_to_string(scene.path("shimmed"))?.trim().parse().context("a number")?;
    ensure!((50..=100).contains(&lent), "{lent} of 100 bodies were lent");
    Ok(())
}

#[test]
fn the_header_is_also_cpp_and_old_c() -> Result<()> {
    let scene = Scene::new()?;
    fs::write(scene.path("thallus.h"), HEADER)?;
    for (compiler, package, arguments) in [
        ("gcc", "gcc", &["-std=c99", "-D_DEFAULT_SOURCE", "-x", "c"][..]),
        ("g++", "g++", &["-std=c++11", "-x", "c++"][..]),
    ] {
        let source = scene.path("only.c");
        fs::write(
            &source,
            "#include \"thallus.h\"\nint use(struct thallus_functions *f) { return thallus_find(f); }\n",
        )?;
        let mut compile = scene.plain(program(compiler, package)?);
        compile
            .args(arguments)
            .args([
                "-fsyntax-only",
                "-O2",
                "-Wall",
                "-Wextra",
                "-Wpedantic",
                "-Wshadow",
                "-Wstrict-aliasing=1",
                "-Werror",
            ])
            .arg(source);
        scene.succeed(compile).context(compiler)?;
    }
    Ok(())
}

//! Another preloaded library, whose functions of the hooked names make their calls by `syscall`.

use std::fs;

use anyhow::{Context, Result};
use thallus_tests::harness::{Scene, program, turn};

/// Runs the program with the libraries in the order that `preloaded` puts this one's path and the other's in.
fn works(preloaded: impl FnOnce([String; 2]) -> [String; 2]) -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let (source, built, other) =
        (scene.path("wrapping.c"), scene.path("wrapping"), scene.path("wrapping.so"));
    fs::write(&source, include_str!("wrapping.c"))?;
    for (arguments, output) in [(["-pthread", "-O1"], &built), (["-DLIBRARY", "-shared"], &other)] {
        let mut compile = scene.plain(program("gcc", "gcc")?);
        compile
            .args(["-Wall", "-Wextra", "-Werror", "-fPIC"])
            .args(arguments)
            .arg(&source)
            .arg("-o")
            .arg(output);
        scene.succeed(compile).context("compile")?;
    }
    let mut shimmed = scene.shimmed("wrapping", &built)?;
    let paths = [scene.library(), other].map(|path| path.display().to_string());
    shimmed.env("LD_PRELOAD", preloaded(paths).join(":"));
    let output = scene.run(shimmed)?;
    assert!(output.status.success(), "{output}");
    assert_eq!((output.stdout.as_str(), output.stderr.as_str()), ("2000 rounds\n", "wrapped\n"));
    let stats = scene.stats("wrapping")?;
    assert_eq!((stats.over_shared_memory(), stats.connections()), (2, 2), "{stats:?}");
    Ok(())
}

#[test]
fn it_is_behind_this_one() -> Result<()> {
    works(|paths| paths)
}

#[test]
fn it_is_in_front() -> Result<()> {
    works(|[this, other]| [other, this])
}

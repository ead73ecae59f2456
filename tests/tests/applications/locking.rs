//! A C program that locks its memory, of which it may lock no more than is usual, natively and with the library.

use std::fs;

use anyhow::{Result, ensure};
use thallus_tests::harness::{Scene, program, turn};

#[test]
fn a_small_program_may_lock_all_of_its_memory() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    fs::write(scene.path("locking.c"), include_str!("locking.c"))?;
    let built = scene.path("locking");
    let mut compile = scene.plain(program("gcc", "gcc")?);
    compile.args(["-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o"]);
    scene.succeed({
        compile.arg(&built).arg(scene.path("locking.c"));
        compile
    })?;
    let printed = scene.succeed(scene.plain(&built))?;
    ensure!(printed.matches("locked").count() == 3, "{printed}");
    assert_eq!(scene.succeed(scene.shimmed("locking", &built)?)?, printed);
    let stats = scene.stats("locking")?;
    assert_eq!((stats.over_shared_memory(), stats.connections()), (8, 8), "{stats:?}");
    Ok(())
}

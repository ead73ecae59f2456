//! A C program that is linked to a library with fork handlers, natively and with the library.

use std::fs;

use anyhow::{Result, ensure};
use thallus_tests::harness::{Scene, program, turn};

#[test]
fn a_librarys_fork_handlers_wait_for_who_closes_connections() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let source = scene.path("handlers.c");
    fs::write(&source, include_str!("handlers.c"))?;
    let [library, built] = ["libhandlers.so", "handlers"].map(|name| scene.path(name));
    let compile = || -> Result<_> {
        let mut compile = scene.plain(program("gcc", "gcc")?);
        compile.args(["-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]);
        Ok(compile)
    };
    let mut compile_library = compile()?;
    compile_library.arg(&library).args(["-shared", "-fPIC", "-DLIBRARY"]).arg(&source);
    scene.succeed(compile_library)?;
    let mut compile_program = compile()?;
    compile_program.arg(&built).args([&source, &library]);
    scene.succeed(compile_program)?;
    let printed = scene.succeed(scene.plain(&built))?;
    ensure!(printed == "300 children\n", "{printed}");
    assert_eq!(scene.succeed(scene.shimmed("handlers", &built)?)?, printed);
    let stats = scene.stats("handlers")?;
    ensure!(stats.over_shared_memory() > 0, "{stats:?}");
    Ok(())
}

//! `thallus shuffle`: becomes `thallus-shuffle-sql`, which is a program of its own, since it is many times as large.

use std::env;
use std::ffi::OsString;

use anyhow::{Context, Result};

use crate::start;

/// What it becomes.
const PROGRAM: &str = "thallus-shuffle-sql";

/// SQL on several processes, by DataFusion with a shuffle over plain sockets: worker, sql, bench, status, …
///
/// Starts thallus-shuffle-sql, which has to lie beside this command (cargo build --profile engine -p demo-sql), with
/// these arguments. It has the library in front if this command has: thallus run thallus shuffle worker …
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment, disable_help_flag = true, override_usage = "thallus shuffle [ARGUMENT]...")]
pub(crate) struct Args {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    arguments: Vec<OsString>,
}

/// Returns only if that fails.
pub(crate) fn exec(args: &Args) -> Result<()> {
    let executable = env::current_exe().context("can't tell where this executable is")?;
    let program = executable.canonicalize().unwrap_or(executable).with_file_name(PROGRAM);
    let arguments: Vec<_> =
        std::iter::once(program.clone().into_os_string()).chain(args.arguments.iter().cloned()).collect();
    let error = start::become_program(&program, &arguments, env::vars_os());
    let remedy = if program.exists() { "" } else { " (cargo build --profile engine -p demo-sql makes it)" };
    Err(error).with_context(|| format!("can't start {}{remedy}", program.display()))
}

//! The `thallus` command: starts programs with the library, shows what their connections do, tells why they
//! would stay on TCP, measures it.

#![deny(unsafe_code)]

mod bench;
mod doctor;
mod elf;
mod export;
mod library;
mod pin;
mod program;
mod run;
mod shuffle;
mod start;
mod status;
mod top;

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use rustix::io::Errno;

/// Moves TCP and Unix connections of unmodified programs to shared memory, and TCP between hosts that are named to RDMA.
#[derive(Debug, Parser)]
#[command(name = "thallus", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::Args),
    Status(status::Args),
    Top(top::Args),
    Export(export::Args),
    Pin(pin::Args),
    Doctor(doctor::Args),
    Bench(bench::Args),
    Shuffle(shuffle::Args),
}

/// Writes to standard output, whose reader may have seen enough, as in `thallus status | head`.
fn print(text: &str) -> anyhow::Result<()> {
    // Then /dev/null is there, and takes everything.
    if start::was_closed(io::stdout().as_fd()) {
        return Err(io::Error::from(Errno::BADF)).context("can't write to standard output");
    }
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.context("can't write to standard output"),
    }
}

/// Writes to standard error, if anybody takes it: `eprint!` panics where it can't.
fn tell(text: Arguments<'_>) {
    let _ = io::stderr().write_fmt(text);
}

fn main() -> ExitCode {
    let done = |()| ExitCode::SUCCESS;
    let outcome = match Cli::parse().command {
        // Returns only if the program could not be started.
        Command::Run(args) => {
            let failure = run::exec(&args);
            tell(format_args!("thallus: {failure}\n"));
            return ExitCode::from(failure.exit_status());
        }
        Command::Status(args) => status::run(&args).map(done),
        Command::Top(args) => top::run(&args).map(done),
        Command::Export(args) => export::run(&args).map(done),
        Command::Pin(args) => pin::run(&args).map(done),
        Command::Doctor(args) => doctor::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Shuffle(args) => shuffle::exec(&args).map(done),
    };
    match outcome {
        Ok(status) => status,
        Err(error) => {
            tell(format_args!("thallus: {error:#}\n"));
            ExitCode::FAILURE
        }
    }
}

//! The transcript: one line for each observation, written to standard output as it is made.
//!
//! Lines leave by a raw system call: a killed process loses none, and the hooks never see them.

use std::cell::Cell;
use std::fmt;

use super::Outcome;

thread_local! {
    static QUIET: Cell<u32> = const { Cell::new(0) };
}

/// Notes one line. Behaviours use [`crate::say!`].
pub fn announce(line: fmt::Arguments<'_>) {
    if QUIET.get() == 0 {
        write_line(&format!("{line}\n"));
    }
}

/// Notes a number that may differ between runs, but under the shim must not be below the kernel's.
pub fn at_least(what: &str, value: u64) {
    write_line(&format!("{}{what} {value}\n", crate::harness::AT_LEAST));
}

/// Runs `body` without noting its calls: for bulk transfers, whose pieces depend on timing.
pub fn quietly<T>(body: impl FnOnce() -> T) -> T {
    QUIET.set(QUIET.get() + 1);
    let result = body();
    QUIET.set(QUIET.get() - 1);
    result
}

/// Notes a call and its outcome, and hands the outcome on.
pub(super) fn noted<T>(
    outcome: Outcome<T>,
    call: impl FnOnce() -> String,
    value: impl FnOnce(&T) -> String,
) -> Outcome<T> {
    if QUIET.get() == 0 {
        match &outcome {
            Ok(result) => announce(format_args!("{} = {}", call(), value(result))),
            Err(errno) => announce(format_args!("{} = {errno}", call())),
        }
    }
    outcome
}

/// Notes a call whose value is a number.
pub(super) fn noted_number<T: fmt::Display>(
    outcome: Outcome<T>,
    call: impl FnOnce() -> String,
) -> Outcome<T> {
    noted(outcome, call, ToString::to_string)
}

fn write_line(line: &str) {
    let mut rest = line.as_bytes();
    while !rest.is_empty() {
        match rustix::io::write(rustix::stdio::stdout(), rest) {
            Ok(written) => rest = &rest[written..],
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => panic!("cannot write the transcript: {errno}"),
        }
    }
}

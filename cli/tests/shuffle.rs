//! `thallus shuffle`: what it starts.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::process::Command;

use support::{Installation, outcome};

#[test]
fn the_program_beside_the_command_gets_all_arguments() {
    let installation = Installation::without_library();
    let thallus = installation.path("bin/thallus");
    let arguments = ["shuffle", "sql", "--help", "--", "-x", "SELECT 1"];
    let missing = outcome(Command::new(&thallus).args(arguments));
    assert_eq!(missing.status, Some(1));
    assert!(
        missing
            .errors
            .contains("bin/thallus-shuffle-sql (cargo build --profile engine -p demo-sql makes it)"),
        "{missing:?}"
    );

    installation.add_script("bin/thallus-shuffle-sql", "#!/bin/sh\nprintf '%s,' \"$@\"\nexit 7\n");
    let started = outcome(Command::new(&thallus).args(arguments));
    assert_eq!((started.status, started.output.as_str()), (Some(7), "sql,--help,--,-x,SELECT 1,"));
}

//! `thallus run` on real programs: what it starts, with what environment, and what it refuses.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::fs::{Permissions, copy, create_dir, set_permissions, write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

use support::{Installation, LOADED, Outcome, outcome};

const LIBRARY: &str = "bin/libthallus_shim.so";

fn shell(installation: &Installation, options: &[&str], script: &str) -> Outcome {
    outcome(installation.run(options).args(["--", "/bin/sh", "-c", script]))
}

/// Refused: exit status 2, every one of `words` on standard error, and the program did not run.
fn assert_refused(outcome: &Outcome, words: &[&str]) {
    assert_eq!(outcome.status, Some(2), "{outcome:?}");
    assert_eq!(outcome.output, "", "{outcome:?}");
    assert!(outcome.errors.starts_with("thallus: "), "{outcome:?}");
    assert!(!outcome.errors.contains(LOADED), "{outcome:?}");
    for word in words {
        assert!(outcome.errors.contains(word), "no {word:?} in {outcome:?}");
    }
}

#[test]
fn the_library_is_found_beside_the_command_and_in_lib() {
    for place in [LIBRARY, "lib/libthallus_shim.so", "lib/thallus/libthallus_shim.so"] {
        let installation = Installation::with_library(place);
        let outcome = shell(&installation, &[], "echo \"$LD_PRELOAD\"");
        assert_eq!(outcome.status, Some(0));
        assert_eq!(outcome.errors, LOADED);
        assert_eq!(outcome.output.trim(), installation.path(place).canonicalize().unwrap().to_str().unwrap());
    }
}

#[test]
fn the_library_is_found_through_a_link_to_the_command() {
    let installation = Installation::with_library(LIBRARY);
    let link = installation.path("link");
    symlink(installation.path("bin/thallus"), &link).unwrap();
    let outcome = outcome(Command::new(link).args(["run", "true"]));
    assert_eq!((outcome.status, outcome.errors.as_str()), (Some(0), LOADED));
}

#[test]
fn a_missing_library_is_reported_with_the_places_searched() {
    let installation = Installation::without_library();
    let outcome = installation.run_program(Path::new("true"));
    assert_refused(&outcome, &["libthallus_shim.so is missing", "/bin, ", "/lib, ", "/lib/thallus"]);
}

#[test]
fn a_configuration_is_checked_and_handed_on() {
    let installation = Installation::with_library(LIBRARY);
    let file = installation.path("thallus.conf");
    write(&file, "ports = 5432\n[program redis-server]\nmode = off\n").unwrap();
    let mut command =
        installation.run(&["--config", "thallus.conf", "--", "/bin/sh", "-c", "echo $THALLUS_CONFIG"]);
    let handed_on = outcome(command.current_dir(installation.path("")));
    assert_eq!(handed_on.status, Some(0), "{handed_on:?}");
    assert_eq!(handed_on.output.trim(), file.canonicalize().unwrap().to_str().unwrap());

    let option = file.to_str().unwrap();
    write(&file, "ports = 5432\nmodes = off\n[program redis-server]\nmode = of\n").unwrap();
    let refused = shell(&installation, &["--config", option], "true");
    let of_line_4 = ":4: mode = of: on or off\n";
    assert_refused(&refused, &[":2: modes = off: the library knows no such key\n", of_line_4]);
    let missing = shell(&installation, &["--config", "/nowhere/thallus.conf"], "true");
    assert_refused(&missing, &["can't read /nowhere/thallus.conf: No such file or directory"]);
}

#[test]
fn a_library_that_is_none_is_reported() {
    let installation = Installation::without_library();
    write(installation.path(LIBRARY), "no library").unwrap();
    assert_refused(&installation.run_program(Path::new("true")), &["it is not a shared library"]);
}

#[test]
fn a_library_path_that_ld_preload_cannot_express_is_reported() {
    for (prefix, word) in [("a b", "a space"), ("a:b", "a colon"), ("a$b", "a dollar sign")] {
        let folder = tempfile::Builder::new().prefix(prefix).tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let installation = Installation::in_folder(folder);
        installation.add_library(LIBRARY);
        assert_refused(&installation.run_program(Path::new("true")), &[word, "LD_PRELOAD"]);
    }
}

#[test]
fn a_preloaded_library_is_kept() {
    let installation = Installation::with_library(LIBRARY);
    let other = installation.add_marking_library("other.so", "[other loaded]");
    let mut command = installation.run(&["--", "/bin/sh", "-c", "echo \"$LD_PRELOAD\""]);
    let outcome = outcome(command.env("LD_PRELOAD", &other));
    assert!(outcome.errors.contains(LOADED), "{outcome:?}");
    assert!(outcome.errors.contains("[other loaded]"), "{outcome:?}");
    let expected = format!("{}:{}\n", installation.path(LIBRARY).display(), other.display());
    assert_eq!(outcome.output, expected);
}

#[test]
fn run_within_run_preloads_once() {
    let installation = Installation::with_library(LIBRARY);
    let thallus = installation.path("bin/thallus");
    let script = format!("{} run -- /bin/sh -c 'echo \"$LD_PRELOAD\"'", thallus.display());
    let outcome = shell(&installation, &[], &script);
    assert_eq!(outcome.output.trim(), installation.path(LIBRARY).to_str().unwrap());
}

#[test]
fn another_copy_of_the_library_is_not_preloaded_beside_ours() {
    let installation = Installation::with_library(LIBRARY);
    let copy = installation.add_marking_library("other/libthallus_shim.so", "[copy loaded]");
    let mut command = installation.run(&["--", "/bin/sh", "-c", "echo \"$LD_PRELOAD\""]);
    let outcome = outcome(command.env("LD_PRELOAD", format!("{}:/lib/nothing.so", copy.display())));
    assert_eq!(outcome.output, format!("{}:/lib/nothing.so\n", installation.path(LIBRARY).display()));
    // The command itself has had it.
    assert_eq!(outcome.errors.matches("[copy loaded]").count(), 1, "{outcome:?}");
}

#[test]
fn options_become_settings_of_the_library() {
    let installation = Installation::with_library(LIBRARY);
    let log = installation.path("log");
    let options = ["--ports", "5432,8000-8100", "--fabric", "shm", "--spin-us", "50", "--log"];
    let log_option = format!("debug:{}", log.display());
    let options = [&options[..], &[&log_option]].concat();
    let outcome = shell(&installation, &options, "env | grep ^THALLUS | sort");
    let expected = format!(
        "THALLUS_FABRIC=shm\nTHALLUS_LOG={log_option}\nTHALLUS_PORTS=5432,8000-8100\nTHALLUS_SPIN_US=50\n"
    );
    assert_eq!(outcome.output, expected);
}

#[test]
fn options_take_what_the_variables_take() {
    let installation = Installation::with_library(LIBRARY);
    let options = ["--ports", "5432, 6379", "--fabric", "tcp", "--log", "trace"];
    let outcome = shell(&installation, &options, "env | grep ^THALLUS | sort");
    assert_eq!(outcome.output, "THALLUS_FABRIC=off\nTHALLUS_LOG=trace\nTHALLUS_PORTS=5432, 6379\n");
}

#[test]
fn settings_without_an_option_stay_as_they_are() {
    let installation = Installation::with_library(LIBRARY);
    let mut command =
        installation.run(&["--fabric", "off", "--", "/bin/sh", "-c", "env | grep ^THALLUS | sort"]);
    let outcome = outcome(command.env("THALLUS_FABRIC", "shm").env("THALLUS_RING", "8M"));
    assert_eq!(outcome.output, "THALLUS_FABRIC=off\nTHALLUS_RING=8M\n");
}

#[test]
fn the_folder_for_statistics_is_created_and_passed_as_an_absolute_path() {
    let installation = Installation::with_library(LIBRARY);
    let mut command =
        installation.run(&["--stats", "new/stats", "--", "/bin/sh", "-c", "echo \"$THALLUS_STATS\""]);
    let outcome = outcome(command.current_dir(installation.path("")));
    let stats = installation.path("new/stats");
    assert!(stats.is_dir());
    assert_eq!(outcome.output.trim(), stats.canonicalize().unwrap().to_str().unwrap());
}

#[test]
fn a_folder_for_statistics_that_cannot_be_created_is_reported() {
    let installation = Installation::with_library(LIBRARY);
    let stats = installation.path("bin/thallus/stats");
    let mut command = installation.run(&["--stats", stats.to_str().unwrap(), "--", "echo", "ran"]);
    assert_refused(&outcome(&mut command), &["can't create", "Not a directory"]);
}

/// Whom the permissions of files bind: not root as it is.
fn bound_by_permissions(command: &Command) -> Command {
    let mut bound = Command::new("env");
    if rustix::process::geteuid().is_root() {
        bound.args(["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]);
    }
    bound.arg(command.get_program()).args(command.get_args());
    bound
}

#[test]
fn what_is_to_be_written_has_to_be_writable() {
    let installation = Installation::with_library(LIBRARY);
    let closed = installation.path("closed");
    create_dir(&closed).unwrap();
    write(closed.join("log"), "").unwrap();
    set_permissions(closed.join("log"), Permissions::from_mode(0o400)).unwrap();
    set_permissions(&closed, Permissions::from_mode(0o500)).unwrap();
    let folder = closed.display();
    for options in [
        ["--stats".to_owned(), format!("{folder}")],
        ["--log".to_owned(), format!("info:{folder}/new")],
        ["--log".to_owned(), format!("info:{folder}/log")],
    ] {
        let options = options.each_ref().map(String::as_str);
        let command = installation.run(&[&options[..], &["--", "echo", "ran"]].concat());
        let outcome = outcome(&mut bound_by_permissions(&command));
        assert_refused(&outcome, &["can't write to", "Permission denied"]);
    }
}

#[test]
fn a_folder_is_no_log() {
    let installation = Installation::with_library(LIBRARY);
    let log = format!("debug:{}", installation.path("").display());
    assert_refused(
        &shell(&installation, &["--log", &log], "echo ran"),
        &["can't write to", "Is a directory"],
    );
}

#[test]
fn a_library_that_may_not_be_read_is_reported_as_such() {
    let installation = Installation::with_library(LIBRARY);
    set_permissions(installation.path(LIBRARY), Permissions::from_mode(0o000)).unwrap();
    let outcome = outcome(&mut bound_by_permissions(&installation.run(&["true"])));
    assert_refused(&outcome, &["can't be preloaded: Permission denied"]);
}

#[test]
fn an_output_that_takes_nothing_changes_no_exit_status() {
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let installation = Installation::with_library(LIBRARY);
    let status = |arguments: &[&str]| {
        let mut command = Command::new(installation.path("bin/thallus"));
        command.args(arguments).stdout(full()).stderr(full()).status().unwrap().code()
    };
    assert_eq!(status(&["run", "/nowhere/at/all"]), Some(127));
    assert_eq!(status(&["pin", "--pid", "0", "--fd", "0", "tcp"]), Some(1));
    assert_eq!(status(&["status"]), Some(1));
    let closed = format!("'{}' status >&-", installation.path("bin/thallus").display());
    let closed = outcome(Command::new("/bin/sh").args(["-c", &closed]));
    assert_eq!(closed.status, Some(1), "{closed:?}");
    assert!(closed.errors.starts_with("thallus: can't write to standard output: "), "{closed:?}");
}

#[test]
fn wrong_options_are_refused() {
    let installation = Installation::with_library(LIBRARY);
    for options in [
        &["--ports", "5432,x"][..],
        &["--ports", "9-8"],
        &["--fabric", "carrier-pigeon"],
        &["--log", "loud"],
        &["--spin-us", "-1"],
        &["--fabrc", "shm"],
        &["-x"],
    ] {
        let outcome = shell(&installation, options, "echo ran");
        assert_eq!((outcome.status, outcome.output.as_str()), (Some(2), ""), "{outcome:?}");
    }
}

#[test]
fn the_program_gets_its_arguments_name_input_and_exit_status() {
    let installation = Installation::with_library(LIBRARY);
    let outcome_of_sh = shell(&installation, &[], "echo $0; exit 41");
    assert_eq!((outcome_of_sh.status, outcome_of_sh.output.as_str()), (Some(41), "/bin/sh\n"));

    // Found in PATH, but called by the name that was given; options after it are its own.
    let outcome = outcome(&mut installation.run(&["sh", "-c", "echo $0 $1", "--fabric", "shm"]));
    assert_eq!((outcome.status, outcome.output.as_str()), (Some(0), "--fabric shm\n"));
}

#[test]
fn the_program_takes_the_place_of_the_command() {
    let installation = Installation::with_library(LIBRARY);
    let mut child = installation.run(&["--", "/bin/sh", "-c", "kill -TERM $$"]).spawn().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(15));

    // A pipe that nobody reads ends the program as it would without us, by SIGPIPE.
    let script = format!("{} run -- yes | head -n 1", installation.path("bin/thallus").display());
    let outcome = outcome(Command::new("bash").args(["-c", &format!("{script}; exit ${{PIPESTATUS[0]}}")]));
    assert_eq!((outcome.status, outcome.output.as_str()), (Some(128 + 13), "y\n"));
}

#[test]
fn the_program_gets_the_signals_and_descriptors_that_the_command_had() {
    let installation = Installation::with_library(LIBRARY);
    let of_status = "grep -E '^Sig(Blk|Ign)' /proc/self/status; for fd in 0 1 2; do [ -e /proc/$$/fd/$fd ] && echo $fd; done";
    let seen = |before: &str, wrapper: &str| {
        // What another shell does in the same place is the measure.
        let script = format!("{before} exec {wrapper} /bin/bash -c \"$0\" 0<&- 2>&-");
        let outcome = outcome(Command::new("/bin/bash").args(["-c", &script, of_status]));
        assert_eq!(outcome.errors, "", "{outcome:?}");
        outcome.output
    };
    let wrapper = format!("{} run --", installation.path("bin/thallus").display());
    // As a parent that ignores the signal has it, and as one that doesn't.
    for before in ["trap '' PIPE;", "trap - PIPE;"] {
        let under = seen(before, &wrapper);
        assert_eq!(under, seen(before, ""), "{before}");
        assert!(under.ends_with("\n1\n"), "{under}");
    }
}

#[test]
fn a_program_that_is_no_program_is_tried_as_a_script() {
    let installation = Installation::with_library(LIBRARY);
    let script = installation.add_script("script", "echo $0\n");
    let outcome = installation.run_program(&script);
    assert_eq!((outcome.status, outcome.output.trim()), (Some(0), script.to_str().unwrap()), "{outcome:?}");
}

#[test]
fn a_missing_program_gives_127_and_one_without_permission_126() {
    let installation = Installation::with_library(LIBRARY);
    let missing = installation.run_program(Path::new("/nowhere/program"));
    assert_eq!(missing.status, Some(127), "{missing:?}");
    assert_eq!(missing.errors, "thallus: /nowhere/program: not found\n");
    assert_eq!(installation.run_program(Path::new("no-such-program")).status, Some(127));

    write(installation.path("data"), "").unwrap();
    let data = installation.run_program(&installation.path("data"));
    assert_eq!(data.status, Some(126), "{data:?}");
    assert!(data.errors.contains("not executable"), "{data:?}");
    create_dir(installation.path("folder")).unwrap();
    assert_eq!(installation.run_program(&installation.path("folder")).status, Some(126));
}

#[test]
fn a_script_with_a_missing_interpreter_gives_127_and_says_which_file() {
    let installation = Installation::with_library(LIBRARY);
    let script = installation.add_script("script", "#!/nowhere/interpreter\n");
    let outcome = installation.run_program(&script);
    assert_eq!(outcome.status, Some(127), "{outcome:?}");
    assert!(outcome.errors.contains("script: its interpreter or loader is missing"), "{outcome:?}");
}

#[test]
fn a_static_program_is_refused() {
    let installation = Installation::with_library(LIBRARY);
    for option in ["-static", "-static-pie"] {
        let program = installation.compile("program", "int main(void) { return 0; }", &[option]);
        assert_refused(
            &installation.run_program(&program),
            &["program can't be accelerated", "statically linked", "no dynamic loader"],
        );
    }
}

#[test]
fn a_program_that_changes_privileges_is_refused() {
    let installation = Installation::with_library(LIBRARY);
    let program = installation.path("program");
    copy("/bin/echo", &program).unwrap();
    for (mode, words) in [(0o4755, "set-user-ID"), (0o2755, "set-group-ID"), (0o4711, "set-user-ID")] {
        set_permissions(&program, Permissions::from_mode(mode)).unwrap();
        assert_refused(&installation.run_program(&program), &[words, "change privileges", "LD_PRELOAD"]);
    }
    set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    assert_eq!(installation.run_program(&program).status, Some(0));
}

#[test]
fn a_program_with_file_capabilities_is_refused() {
    let installation = Installation::with_library(LIBRARY);
    let program = installation.path("program");
    copy("/bin/echo", &program).unwrap();
    let mut setcap = if rustix::process::geteuid().is_root() {
        Command::new("setcap")
    } else {
        let mut sudo = Command::new("sudo");
        sudo.args(["-n", "setcap"]);
        sudo
    };
    let granted = outcome(setcap.arg("cap_net_raw+ep").arg(&program));
    assert_eq!(granted.status, Some(0), "setcap must work, as root or with sudo: {granted:?}");
    assert_refused(&installation.run_program(&program), &["file capabilities", "change privileges"]);
}

#[test]
fn a_program_of_another_word_size_or_libc_is_refused() {
    let installation = Installation::with_library(LIBRARY);
    let musl = "-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1";
    let program = installation.compile("program", "int main(void) { return 0; }", &[musl]);
    assert_refused(&installation.run_program(&program), &["musl (/lib/ld-musl-x86_64.so.1)", "glibc"]);

    // A 32-bit header is enough to be recognized; it must not reach exec.
    let mut image = vec![0; 128];
    image[..7].copy_from_slice(b"\x7fELF\x01\x01\x01");
    image[16..20].copy_from_slice(&[2, 0, 3, 0]);
    write(&program, image).unwrap();
    assert_refused(&installation.run_program(&program), &["32-bit 386", "the library is 64-bit"]);
}

#[test]
fn a_script_is_judged_by_its_interpreter() {
    let installation = Installation::with_library(LIBRARY);
    let script = installation.add_script("script", "#!/bin/sh\necho from the script\n");
    let by_env = installation.add_script("by-env", &format!("#!/usr/bin/env -S {}\n", script.display()));
    for program in [&script, &by_env] {
        let outcome = installation.run_program(program);
        assert_eq!((outcome.status, outcome.output.as_str()), (Some(0), "from the script\n"), "{outcome:?}");
        assert!(outcome.errors.contains(LOADED), "{outcome:?}");
    }

    let interpreter = installation.compile("static", "int main(void) { return 0; }", &["-static"]);
    let inner = installation.add_script("inner", &format!("#!{}\n", interpreter.display()));
    let outer = installation.add_script("outer", &format!("#!/usr/bin/env {}\n", inner.display()));
    for program in [inner, outer] {
        let name = program.file_name().unwrap().to_str().unwrap().to_owned();
        let words =
            format!("{name} can't be accelerated: its interpreter {} is statically", interpreter.display());
        assert_refused(&installation.run_program(&program), &[&words]);
    }
}

//! The configuration file: a line does what its variable does, for the programs that it names, and nothing is worse for what is
//! wrong in one.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

use anyhow::{Result, ensure};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use thallus_tests::harness::{Scene, Stats, turn};

/// Two ends in one process; prints what a program may rely on.
const TALK: &str = "
import socket
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
echo = b''
for _ in range(8):
    client.send(b'?')
    server.send(server.recv(1))
    echo += client.recv(1)
print(listener.fileno(), client.fileno(), server.fileno(), echo.decode())
";

/// What came of [`TALK`], with these variables and this file, and what was logged. Where that goes a variable says, unless the file
/// does: with `LOG`.
fn talk(name: &str, variables: &[(&str, &str)], file: Option<&str>) -> Result<(Stats, String)> {
    let scene = Scene::new()?;
    let mut python = scene.shimmed(name, "python3")?;
    // The scene's own choice would win.
    python.env_remove("THALLUS_UPGRADE_AFTER").args(["-c", TALK]).envs(variables.iter().copied());
    let (log, config) = (scene.path("log"), scene.path("thallus.conf"));
    let log_option = format!("warn:{}", log.display());
    if let Some(text) = file {
        fs::write(&config, text.replace("LOG", &log_option))?;
        python.env("THALLUS_CONFIG", config);
    }
    if !file.is_some_and(|text| text.contains("LOG")) {
        python.env("THALLUS_LOG", log_option);
    }
    succeeds(&scene, python)?;
    Ok((scene.stats(name)?, fs::read_to_string(log).unwrap_or_default()))
}

/// It must print what it prints without the library.
fn succeeds(scene: &Scene, python: Command) -> Result<()> {
    let mut plain = scene.plain("python3");
    plain.args(["-c", TALK]);
    let (native, printed) = (scene.succeed(plain)?, scene.succeed(python)?);
    ensure!(native == printed && native.ends_with("????????\n"), "{native:?} {printed:?}");
    Ok(())
}

/// Why connections stayed, and how many left; `None` if the process told nothing.
fn came_of(stats: &Stats) -> Option<(Vec<(&str, u64)>, u64)> {
    let reasons = stats.not_upgraded.iter().map(|(reason, count)| (reason.as_str(), *count)).collect();
    (stats.processes > 0).then_some((reasons, stats.over_shared_memory()))
}

#[test]
fn a_line_does_what_its_variable_does() -> Result<()> {
    let _turn = turn();
    type Case<'a> = (&'a [(&'a str, &'a str)], &'a str, Option<&'a [(&'a str, u64)]>);
    let cases: [Case<'_>; 5] = [
        (&[("THALLUS_UPGRADE_AFTER", "1")], "upgrade-after = 1", Some(&[])),
        (&[("THALLUS_UPGRADE_AFTER", "1000")], "upgrade-after = 1000", Some(&[("short", 2)])),
        (&[("THALLUS_PORTS", "1")], "ports = 1", Some(&[("not-selected", 2)])),
        (&[("THALLUS_FABRIC", "off")], "fabric = off", Some(&[("disabled", 2)])),
        (&[("THALLUS", "off")], "mode = off", None),
    ];
    for (variables, lines, expected) in cases {
        let (by_variable, said) = talk("variable", variables, None)?;
        let (by_file, said_of_file) = talk("file", &[], Some(lines))?;
        let expected = expected.map(|reasons| (reasons.to_vec(), if reasons.is_empty() { 2 } else { 0 }));
        assert_eq!(came_of(&by_variable), expected, "{variables:?}");
        assert_eq!(came_of(&by_file), expected, "{lines}");
        assert_eq!((said.as_str(), said_of_file.as_str()), ("", ""));
    }
    Ok(())
}

#[test]
fn peers_in_the_file_are_greeted() -> Result<()> {
    let _turn = turn();
    let variables = [("THALLUS_FABRIC", "verbs"), ("THALLUS_PEERS", "10.0.0.1,127.0.0.0/8")];
    let (by_variable, _) = talk("variable", &variables, None)?;
    let (by_file, _) = talk("file", &[], Some("fabric = verbs\npeers = 10.0.0.1, 127.0.0.0/8"))?;
    // What comes of it depends on the machine; nothing would, without peers.
    assert_eq!((by_variable.connections(), by_file.not_upgraded.get("disabled")), (2, None), "{by_file:?}");
    assert_eq!(
        (&by_variable.upgraded, &by_variable.not_upgraded),
        (&by_file.upgraded, &by_file.not_upgraded)
    );
    Ok(())
}

#[test]
fn a_variable_wins_over_the_file_unless_it_is_empty() -> Result<()> {
    let _turn = turn();
    let file = Some("ports = 1\nupgrade-after = 1\nmode = off");
    let (stats, _) = talk("wins", &[("THALLUS_PORTS", "1-65535"), ("THALLUS", "on")], file)?;
    assert_eq!(came_of(&stats), Some((vec![], 2)));
    let (stats, _) = talk("empty", &[("THALLUS_PORTS", ""), ("THALLUS", "on")], file)?;
    assert_eq!(came_of(&stats), Some((vec![("not-selected", 2)], 0)));
    Ok(())
}

#[test]
fn a_section_is_for_the_programs_that_it_names() -> Result<()> {
    let _turn = turn();
    let all = "upgrade-after = 1\nfabric = off\n";
    let own = "[program python3* redis-server]\nfabric = shm\n";
    let other = "[program redis-server /opt/*]\nmode = off\n";
    let (stats, said) = talk("own", &[], Some(&format!("{all}{own}{other}")))?;
    assert_eq!((came_of(&stats), said.as_str()), (Some((vec![], 2)), ""));
    let (stats, _) = talk("other", &[], Some(&format!("{all}{other}")))?;
    assert_eq!(came_of(&stats), Some((vec![("disabled", 2)], 0)));
    Ok(())
}

#[test]
fn a_program_in_a_folder_whose_name_is_no_text_is_named_by_its_own() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let folder = scene.path("").join(OsStr::from_bytes(b"caf\xe9"));
    fs::create_dir(&folder)?;
    let program = folder.join("a-python");
    fs::copy(fs::canonicalize("/usr/bin/python3")?, &program)?;
    let config = scene.path("thallus.conf");
    fs::write(&config, "upgrade-after = 1\n[program a-python]\nports = 1")?;
    let mut python = scene.shimmed("odd", program)?;
    python.env("THALLUS_CONFIG", config).args(["-c", TALK]);
    succeeds(&scene, python)?;
    assert_eq!(came_of(&scene.stats("odd")?), Some((vec![("not-selected", 2)], 0)));
    Ok(())
}

#[test]
fn without_proc_nobody_knows_the_program_and_the_log_says_so() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let (config, log) = (scene.path("thallus.conf"), scene.path("log"));
    let own_mounts = if rustix::process::geteuid().is_root() { "-m" } else { "-rm" };
    let script = "library=$LD_PRELOAD; unset LD_PRELOAD
        mount -t tmpfs none /proc; LD_PRELOAD=$library exec python3 -c \"$0\"";
    for (sections, says) in [("", false), ("[program a]\nports = 1", true)] {
        fs::write(&config, format!("fabric = off\n{sections}"))?;
        let mut shell = scene.shimmed(if says { "sections" } else { "none" }, "unshare")?;
        shell.env("THALLUS_CONFIG", &config).env("THALLUS_LOG", format!("warn:{}", log.display()));
        shell.args([own_mounts, "sh", "-c", script, TALK]);
        scene.succeed(shell)?;
        let said = fs::read_to_string(&log).unwrap_or_default();
        ensure!(said.contains("which of its sections count") == says, "{said:?}");
    }
    // Then statistics are written under their name at once: there is no other way to give them one.
    assert_eq!(scene.stats("sections")?.not_upgraded.get("disabled"), Some(&2));
    Ok(())
}

#[test]
fn what_is_wrong_in_a_file_is_logged_and_the_rest_counts() -> Result<()> {
    let _turn = turn();
    let file = "log = LOG\nprots = 5432\nupgrade-after = 1\nspin-us = soon\n\x7f\x01\n";
    let (stats, said) = talk("wrong", &[], Some(file))?;
    assert_eq!(came_of(&stats), Some((vec![], 2)));
    let said: Vec<_> = said.lines().filter_map(|line| line.split_once("thallus.conf:")).collect();
    let said: Vec<_> = said.into_iter().map(|(_, what)| what).collect();
    let expected = [
        "2: prots = 5432: the library knows no such key; ignoring the line",
        "5: : a control character; ignoring the line",
        "4: spin-us = soon: not a number of microseconds; taking the default",
    ];
    assert_eq!(said, expected);
    let (_, said) = talk("much", &[], Some(&"nonsense\n".repeat(1000)))?;
    assert_eq!(said.lines().count(), 21, "{said}");
    assert!(said.ends_with("Warn: and 980 more: see thallus doctor\n"), "{said}");
    Ok(())
}

#[test]
fn a_program_without_sockets_does_not_read_it() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let log = scene.path("log");
    for (program, arguments, reads) in [("true", ["", ""], false), ("python3", ["-c", TALK], true)] {
        let mut command = scene.shimmed("none", program)?;
        command.args(arguments).env_remove("THALLUS_STATS").env("THALLUS_CONFIG", scene.path("missing"));
        command.env("THALLUS_LOG", format!("warn:{}", log.display()));
        scene.succeed(command)?;
        assert_eq!(log.exists(), reads, "{program}");
    }
    Ok(())
}

#[test]
fn a_file_that_cannot_be_read_is_as_good_as_none() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    mknodat(CWD, scene.path("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    fs::write(scene.path("large"), "# much\n".repeat(10_000))?;
    let wrong = [
        ("missing", "No such file or directory (os error 2)"),
        ("pipe", "it is no regular file"),
        ("large", "file too large"),
    ];
    for (name, error) in wrong {
        let mut python = scene.shimmed(name, "python3")?;
        let (path, log) = (scene.path(name), scene.path(&format!("{name}.log")));
        python.env("THALLUS_CONFIG", &path).env("THALLUS_LOG", format!("warn:{}", log.display()));
        python.args(["-c", TALK]);
        succeeds(&scene, python)?;
        let said = fs::read_to_string(log)?;
        let expected = format!("Warn: THALLUS_CONFIG={}: {error}; going on without it\n", path.display());
        ensure!(said.ends_with(&expected) && said.lines().count() == 1, "{said}");
        assert_eq!(came_of(&scene.stats(name)?), Some((vec![], 2)));
    }
    Ok(())
}

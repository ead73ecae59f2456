//! `thallus doctor`: what it says, against what others say of the same machine.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use support::doctor::{conclusion, doctor, documented, installation, names, problems, report, through};
use support::{Installation, Outcome, outcome};

fn setting<'report>(report: &'report Value, name: &str) -> &'report Value {
    let settings = report["settings"].as_array().unwrap();
    settings.iter().find(|setting| setting["name"] == name).unwrap()
}

fn says(program: &str, arguments: &[&str]) -> String {
    outcome(Command::new(program).args(arguments)).output.trim().to_owned()
}

/// Listens on a port of the kernel's choice until it is dropped.
struct Listener {
    process: Child,
    port: u16,
}

const LISTEN: &str = r#"
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
int main(int argc, char **argv) {
    if (argc > 1 && setuid(atoi(argv[1]))) return 1;
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t length = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    char byte;
    if (bind(fd, (void *)&address, length) || listen(fd, 1)) return 1;
    if (getsockname(fd, (void *)&address, &length)) return 1;
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    return read(0, &byte, 1) != 0;
}
"#;

impl Listener {
    fn start(installation: &Installation, prepare: impl Fn(&mut Command)) -> Self {
        let program = installation.compile("listen", LISTEN, &[]);
        let mut command = Command::new(program);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        prepare(&mut command);
        let mut process = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Self { process, port: line.trim().parse().unwrap() }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        self.process.wait().unwrap();
    }
}

#[test]
fn facts_are_those_that_other_tools_tell() {
    let installation = installation();
    let (status, report) = report(&mut through(&installation, &["taskset", "-c", "0"]));
    assert_eq!(status, 0, "{report:#}");
    assert_eq!(report["machine"]["kernel"], says("uname", &["-r"]));
    assert_eq!(report["machine"]["architecture"], says("uname", &["-m"]));
    assert_eq!(report["machine"]["cpus_allowed"], "0");
    let container = Path::new("/.dockerenv").exists();
    let hints = report["machine"]["container_hints"].to_string();
    assert_eq!(hints.contains("/.dockerenv"), container, "{hints}");
    let library = installation.path("bin/libthallus_shim.so").canonicalize().unwrap();
    assert_eq!(report["library"]["path"], library.to_str().unwrap());
    assert_eq!(report["library"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["one_host"]["works"], true, "{report:#}");
    assert_eq!(report["connection"], Value::Null);
}

#[test]
fn limits_are_those_of_the_process() {
    let installation = installation();
    let limits = ["prlimit", "--nofile=300:301", "--memlock=65536:65537", "--fsize=200000000"];
    let (status, report) = report(&mut through(&installation, &limits));
    assert_eq!(status, 0, "{report:#}");
    assert_eq!(report["limits"]["open_files"], serde_json::json!({"soft": 300, "hard": 301}));
    assert_eq!(report["limits"]["locked_memory"], serde_json::json!({"soft": 65536, "hard": 65537}));
    assert_eq!(report["limits"]["file_size"]["soft"], 200_000_000);
}

#[test]
fn a_limit_that_keeps_connections_on_tcp_is_found_by_trying() {
    let installation = installation();
    for (limit, name) in [("--fsize=1000000", "RLIMIT_FSIZE"), ("--as=120000000", "RLIMIT_AS")] {
        let (status, report) = report(&mut through(&installation, &["prlimit", limit]));
        assert_eq!(status, 1, "{report:#}");
        assert_eq!(report["one_host"]["works"], false, "{report:#}");
        assert_eq!(report["one_host"]["reason"], "no-memory");
        assert!(problems(&report, "limits")[0].contains(name), "{report:#}");
        let failed = &report["one_host"]["checks"][0];
        assert_eq!((&failed["name"], &failed["works"]), (&"memfd".into(), &false.into()));
    }
}

#[test]
fn without_a_library_nothing_leaves_tcp() {
    let installation = Installation::without_library();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = listener.local_addr().unwrap().to_string();
    assert_eq!(report(&mut doctor(&installation)).0, 1);
    let (status, report) = report(doctor(&installation).arg(server));
    assert_eq!(status, 1);
    assert!(problems(&report, "library")[0].contains("is missing"), "{report:#}");
    assert!(conclusion(&report).1["text"].as_str().unwrap().contains("no library"), "{report:#}");
}

#[test]
fn a_file_that_is_not_the_library_is_noticed() {
    let installation = Installation::with_library("bin/libthallus_shim.so");
    let (status, report) = report(&mut doctor(&installation));
    assert_eq!((status, &report["library"]["version"]), (1, &Value::Null));
    assert!(problems(&report, "library")[0].contains("no version"), "{report:#}");
}

#[test]
fn values_that_cannot_be_used_are_named_as_the_library_names_them() {
    let installation = installation();
    let log = installation.path("log");
    let wrong = [
        ("THALLUS_SPIN_US", "soon"),
        ("THALLUS_RING", "1"),
        ("THALLUS_PEERS", "10.0.0.0/33"),
        ("THALLUS_PORTS", "9-8"),
        ("THALLUS_RDMA_RETRY", "8"),
        ("THALLUS_UPGRADE_AFTER", "0"),
        ("THALLUS_IO_URING", "off"),
        ("THALLUS_UNIX", "somewhere"),
        ("THALLUS", "perhaps"),
        ("THALLUS_KEY_FILE", "/nowhere/at/all"),
    ];
    let (status, report) = report(doctor(&installation).envs(wrong));
    assert_eq!(status, 0, "{report:#}");
    for (name, value) in wrong {
        assert_eq!(setting(&report, name)["source"], "wrong", "{name}");
        assert_eq!(setting(&report, name)["given"], value);
    }
    assert_eq!(setting(&report, "THALLUS_SPIN_US")["used"], "100");
    assert_eq!(setting(&report, "THALLUS_PEERS")["used"], "none");

    // The same values, and the library's own complaints.
    let _listener = Listener::start(&installation, |command| {
        let library = installation.path("bin/libthallus_shim.so");
        command.env("LD_PRELOAD", library).envs(wrong);
        command.env("THALLUS_LOG", format!("warn:{}", log.display()));
    });
    let log = fs::read_to_string(&log).unwrap();
    let logged: BTreeSet<_> = log.lines().map(|line| line.split_once("Warn: ").unwrap().1).collect();
    let shown = problems(&report, "settings");
    assert_eq!(shown.iter().map(String::as_str).collect::<BTreeSet<_>>(), logged);
    assert_eq!(logged.len(), wrong.len());
}

#[test]
fn nobody_is_greeted_unsigned_if_the_path_to_a_key_is_no_text() {
    let installation = installation();
    let path = OsStr::from_bytes(b"/etc/k\xe9y");
    for name in ["THALLUS_KEY_FILE", "THALLUS_CONFIG"] {
        let (_, report) = report(doctor(&installation).env("THALLUS_PEERS", "10.0.0.1").env(name, path));
        assert_eq!(setting(&report, "THALLUS_PEERS")["used"], "none", "{report:#}");
        assert_eq!(setting(&report, name)["source"], "wrong");
        let said = problems(&report, "settings");
        assert!(
            said.iter().any(|text| text.starts_with(&format!("{name}=/etc/k\u{fffd}y: not UTF-8; "))),
            "{said:?}"
        );
    }
}

#[test]
fn values_that_are_no_text_are_named_as_the_library_names_them() {
    let installation = installation();
    let log = installation.path("log");
    let names =
        ["THALLUS", "THALLUS_FABRIC", "THALLUS_PEERS", "THALLUS_PORTS", "THALLUS_RING", "THALLUS_UNIX"];
    let wrong = names.map(|name| (name, OsStr::from_bytes(b"5\xff")));
    let (status, report_) = report(doctor(&installation).envs(wrong));
    assert_eq!(status, 0, "{report_:#}");
    let mut expected: Vec<_> =
        names.iter().map(|name| format!("{name}=5\u{fffd}: not UTF-8; going on without it")).collect();
    expected.sort();
    let mut said = problems(&report_, "settings");
    said.sort();
    assert_eq!(said, expected);
    let listen = |log: &OsStr, errors: &Path| {
        let _listener = Listener::start(&installation, |command| {
            command.env("LD_PRELOAD", installation.path("bin/libthallus_shim.so")).envs(wrong);
            command.env("THALLUS_LOG", log).stderr(fs::File::create(errors).unwrap());
        });
    };
    let errors = installation.path("errors");
    listen(OsStr::new(&format!("warn:{}", log.display())), &errors);
    let logged = fs::read_to_string(&log).unwrap();
    let mut logged: Vec<_> = logged.lines().map(|line| line.split_once("Warn: ").unwrap().1).collect();
    logged.sort_unstable();
    assert_eq!(logged, expected);

    // A level that is no text counts as warn; a file that is none can't be named.
    listen(OsStr::from_bytes(b"\xff"), &errors);
    let logged = fs::read_to_string(&errors).unwrap();
    assert!(logged.contains("Warn: THALLUS_LOG=\u{fffd}: the level is off, "), "{logged}");
    assert!(logged.contains(&expected[0]), "{logged}");
    listen(OsStr::from_bytes(b"info:/tmp/\xff"), &errors);
    assert_eq!(fs::read_to_string(&errors).unwrap(), "");

    // Statistics go to any folder.
    let folder = installation.path("").join(OsStr::from_bytes(b"caf\xe9"));
    fs::create_dir(&folder).unwrap();
    let (_, report) = report(doctor(&installation).env("THALLUS_STATS", &folder));
    assert_eq!(problems(&report, "settings"), Vec::<String>::new());
    assert_eq!(setting(&report, "THALLUS_STATS")["source"], "given");
    assert!(setting(&report, "THALLUS_STATS")["used"].as_str().unwrap().ends_with("caf\u{fffd}"));
}

#[test]
fn an_empty_variable_is_as_good_as_none() {
    let installation = installation();
    let (status, unset) = report(&mut doctor(&installation));
    assert_eq!(status, 0);
    let names = unset["settings"].as_array().unwrap().iter().map(|setting| setting["name"].as_str().unwrap());
    let empty = names.map(|name| (name, ""));
    let (status, report) = report(doctor(&installation).envs(empty));
    assert_eq!((status, &report["problems"]), (0, &unset["problems"]));
    for (setting, unset) in
        std::iter::zip(report["settings"].as_array().unwrap(), unset["settings"].as_array().unwrap())
    {
        assert_eq!(
            (&setting["source"], &setting["used"]),
            (&Value::from("default"), &unset["used"]),
            "{setting}"
        );
    }
}

#[test]
fn settings_without_effect_are_told_from_those_in_force() {
    let installation = installation();
    let given = [("THALLUS_FABRIC", "shm"), ("THALLUS_PEERS", "10.0.0.1"), ("THALLUS_SPINN", "1")];
    let (status, report) = report(doctor(&installation).envs(given).env("THALLUS_SPIN_US", "7"));
    assert_eq!(status, 0);
    assert_eq!(setting(&report, "THALLUS_FABRIC")["used"], "shm");
    assert_eq!(setting(&report, "THALLUS_PEERS")["source"], "unused");
    assert_eq!(setting(&report, "THALLUS_PEERS")["used"], "none");
    assert_eq!(setting(&report, "THALLUS_SPIN_US")["source"], "given");
    assert_eq!(setting(&report, "THALLUS_SPIN_US")["used"], "7");
    assert_eq!(setting(&report, "THALLUS_RING")["source"], "default");
    assert_eq!(problems(&report, "settings"), ["THALLUS_SPINN: the library knows no such variable"]);
}

#[test]
fn what_is_beyond_the_most_that_counts_is_shown_as_that() {
    let installation = installation();
    let given = [("THALLUS_SPIN_US", "5001"), ("THALLUS_LEND", "2G"), ("THALLUS_RING", "1G")];
    let (_, report) = report(doctor(&installation).envs(given));
    let used = given.map(|(name, _)| setting(&report, name)["used"].as_str().unwrap());
    assert_eq!(used, ["5000", "1 GiB", "8 MiB; over RDMA 8 MiB"]);
    assert_eq!(problems(&report, "settings"), ["THALLUS_LEND=2G: no more than 1G can be lent; taking 1G"]);
}

#[test]
fn a_log_that_cannot_be_written_is_a_problem() {
    let installation = installation();
    let folder = installation.path("");
    let look = |log: &str| {
        let (_, report) = report(doctor(&installation).current_dir(&folder).env("THALLUS_LOG", log));
        let source = setting(&report, "THALLUS_LOG")["source"].as_str().unwrap().to_owned();
        (source, problems(&report, "settings"))
    };
    for good in ["info", "info:new", "off:/nowhere/log"] {
        assert_eq!(look(good), ("given".to_owned(), vec![]), "{good}");
    }
    for (bad, error) in [
        ("info:/nowhere/log", "can't write to /nowhere: No such file or directory (os error 2)"),
        ("info:bin", "Is a directory (os error 21)"),
        ("info:", "no path behind the colon"),
        ("loud:", "no path behind the colon"),
    ] {
        let (source, said) = look(bad);
        assert_eq!((source.as_str(), said.len()), ("wrong", 1), "{bad}: {said:?}");
        let [begin, end] = [format!("THALLUS_LOG={bad}: "), format!("{error}; nothing is logged")];
        assert!(said[0].starts_with(&begin) && said[0].ends_with(&end), "{said:?}");
    }
}

#[test]
fn without_proc_nobody_is_told_to_install_the_library() {
    let installation = installation();
    let own_mounts = if rustix::process::geteuid().is_root() { "-m" } else { "-rm" };
    let script = "mount -t tmpfs none /proc && exec \"$0\" \"$@\"";
    let (status, report) = report(&mut through(&installation, &["unshare", own_mounts, "sh", "-c", script]));
    assert_eq!(status, 1);
    let said = problems(&report, "library");
    assert!(said.len() == 1 && said[0].starts_with("can't tell where this executable is"), "{said:?}");
}

#[test]
fn a_configuration_is_checked_line_by_line_and_applied_as_to_a_program() {
    let installation = installation();
    let path = installation.path("thallus.conf");
    let file = path.to_str().unwrap();
    let text = "ports = 1\nspin-us = 7\nprots = 2\n[program postgres]\nring = 8K\nring = 9K\n\
        [program redis-server]\nports = 5432\nlog = loud\n";
    fs::write(&path, text).unwrap();
    let listener = Listener::start(&installation, |_| {});
    let server = format!("127.0.0.1:{}", listener.port);
    let (status, all) =
        report(doctor(&installation).args(["--config", file, &server]).env("THALLUS_SPIN_US", "8"));
    assert_eq!((status, conclusion(&all).1["reason"].as_str()), (1, Some("not-selected")), "{all:#}");
    let expected = [
        format!("{file}:3: prots = 2: the library knows no such key; ignoring the line"),
        format!("{file}:6: ring = 9K: given twice in this section; ignoring the line"),
        format!("{file}:9: log = loud: the level is off, error, warn, info or debug; taking warn"),
    ];
    assert_eq!(problems(&all, "settings"), expected);
    let ports = setting(&all, "THALLUS_PORTS");
    assert_eq!((&ports["used"], &ports["line"], &ports["source"]), (&"1".into(), &1.into(), &"given".into()));
    let spin = setting(&all, "THALLUS_SPIN_US");
    assert_eq!((&spin["used"], &spin["line"]), (&"8".into(), &Value::Null));
    assert_eq!(setting(&all, "THALLUS_CONFIG")["used"], file);
    assert_eq!(setting(&all, "THALLUS_LOG")["source"], "default");

    // Debian's own is a symbolic link to a program of another name.
    let program = installation.path("redis-server");
    fs::copy("/bin/true", &program).unwrap();
    let mut redis = doctor(&installation);
    let (_, redis) = report(redis.env("THALLUS_CONFIG", file).arg("--program").arg(&program));
    assert_eq!(setting(&redis, "THALLUS_PORTS")["used"], "5432");
    assert_eq!(setting(&redis, "THALLUS_PORTS")["line"], 8);
    assert_eq!(setting(&redis, "THALLUS_LOG")["source"], "wrong");
    assert_eq!(problems(&redis, "settings"), expected);

    let (status, missing) = report(doctor(&installation).env("THALLUS_CONFIG", "/nowhere/file"));
    assert_eq!((status, setting(&missing, "THALLUS_CONFIG")["source"].as_str()), (0, Some("wrong")));
    let expected = "THALLUS_CONFIG=/nowhere/file: No such file or directory (os error 2); the library goes on without it";
    assert_eq!(problems(&missing, "settings"), [expected]);
}

#[test]
fn a_program_is_looked_at_as_run_would_find_it() {
    let installation = installation();
    let interpreter = fs::canonicalize("/bin/sh").unwrap();
    let name = interpreter.file_name().unwrap().to_str().unwrap();
    let config = installation.path("thallus.conf");
    fs::write(&config, format!("[program {name}]\nports = 5432\n")).unwrap();
    let script = installation.add_script("script", "#!/bin/sh\n");
    let static_program = installation.compile("static", "int main(void) { return 0; }", &["-static"]);
    let script_of_none = installation.add_script("orphan", "#!/nowhere/interpreter\n");
    let look = |program: &Path| {
        let mut command = doctor(&installation);
        report(command.arg("--config").arg(&config).arg("--program").arg(program))
    };
    for program in [Path::new("sh"), Path::new("/bin/sh"), &script] {
        let (status, report) = look(program);
        assert_eq!((status, problems(&report, "program")), (0, vec![]), "{report:#}");
        assert_eq!(report["program"]["path"], interpreter.to_str().unwrap());
        assert_eq!(setting(&report, "THALLUS_PORTS")["used"], "5432", "{report:#}");
    }
    for (program, error) in [
        (&*static_program, "it is statically linked"),
        (Path::new("no-such-program"), "no-such-program: not found"),
        (&installation.path("thallus.conf"), "thallus.conf: not executable"),
        (&script_of_none, "orphan: its interpreter or loader is missing"),
    ] {
        let (status, report) = look(program);
        assert_eq!((status, &report["program"]["usable"]), (1, &false.into()), "{report:#}");
        let said = problems(&report, "program");
        assert!(said.len() == 1 && said[0].contains(error), "{said:?}");
    }
    let command = ["--program", static_program.to_str().unwrap(), ELSEWHERE];
    let (_, report) = report(doctor(&installation).args(command));
    assert!(
        conclusion(&report).1["text"].as_str().unwrap().contains("preloaded into the program"),
        "{report:#}"
    );
}

#[test]
fn each_problem_is_followed_by_its_remedy() {
    let installation = installation();
    let Outcome { output, .. } = outcome(doctor(&installation).env("THALLUS_SPIN_US", "soon"));
    let lines: Vec<_> = output.lines().collect();
    let at = lines.iter().position(|line| line.starts_with("  problem: THALLUS_SPIN_US=soon: ")).unwrap();
    for (line, next) in lines.iter().zip(&lines[1..]) {
        assert_eq!(line.starts_with("  problem: "), next.starts_with("  remedy:  "), "{line}\n{next}");
    }
    assert!(lines[..at].contains(&"settings"));
}

#[test]
fn a_listener_with_the_library_is_reached_by_shared_memory() {
    let installation = installation();
    let library = installation.path("bin/libthallus_shim.so");
    let listener = Listener::start(&installation, |command| {
        command.env("LD_PRELOAD", &library);
    });
    let server = format!("127.0.0.1:{}", listener.port);
    let (status, report_) = report(doctor(&installation).arg(&server));
    let (way, concluded) = conclusion(&report_);
    assert_eq!((status, &concluded["fabric"]), (0, &"shm".into()), "{report_:#}");
    assert_eq!(
        (&way["announced"], &way["listening"], &way["on_this_host"]),
        (&true.into(), &true.into(), &true.into())
    );
    assert_eq!(way["local"], "127.0.0.1");

    let (status, other) = report(doctor(&installation).arg(format!("127.0.0.2:{}", listener.port)));
    let (way, concluded) = conclusion(&other);
    assert_eq!((status, &way["announced"], &way["listening"]), (1, &true.into(), &false.into()));
    assert_eq!(concluded["reason"], "peer-without-thallus", "{other:#}");

    let but = |name: &str, value: &str| report(doctor(&installation).arg(&server).env(name, value));
    for (name, value, reason) in [
        ("THALLUS_PORTS", "1", "not-selected"),
        ("THALLUS_FABRIC", "off", "disabled"),
        ("THALLUS_FABRIC", "verbs", "disabled"),
    ] {
        let (status, report) = but(name, value);
        assert_eq!((status, &conclusion(&report).1["reason"]), (1, &reason.into()), "{name}={value}");
    }
    let (status, report) = but("THALLUS", "off");
    assert_eq!((status, &conclusion(&report).1["fabric"]), (1, &"tcp".into()));
}

#[test]
fn who_has_no_id_in_the_user_namespace_is_told_to_have_one() {
    let installation = installation();
    let (status, report) = report(&mut through(&installation, &["unshare", "--user"]));
    let said = problems(&report, "one_host");
    assert_eq!((status, said.len()), (1, 1), "{said:?}");
    assert!(said[0].contains("not-owner"), "{said:?}");
    let all = report["problems"].as_array().unwrap();
    let remedy =
        all.iter().find(|problem| problem["part"] == "one_host").unwrap()["remedy"].as_str().unwrap();
    assert!(remedy.starts_with("a user that has an id"), "{remedy}");
}

/// Only root can be two users.
#[test]
fn a_listener_without_an_id_in_the_user_namespace_is_reached_by_tcp() {
    let installation = installation();
    let library = installation.path("bin/libthallus_shim.so");
    let is_root = rustix::process::geteuid().is_root();
    let listener = Listener::start(&installation, |command| {
        command.env("LD_PRELOAD", &library);
        if is_root {
            command.arg("65533");
        }
    });
    let server = format!("127.0.0.1:{}", listener.port);
    let (status, report) = report(through(&installation, &["unshare", "--map-root-user"]).arg(&server));
    let expected = if is_root { (1, "no-answer".into()) } else { (0, Value::Null) };
    assert_eq!((status, &conclusion(&report).1["reason"]), (expected.0, &expected.1), "{report:#}");
}

#[test]
fn a_listener_without_the_library_is_reached_by_tcp() {
    let installation = installation();
    let listener = Listener::start(&installation, |_| {});
    let server = format!("127.0.0.1:{}", listener.port);
    let (status, report_) = report(doctor(&installation).arg(&server));
    let (way, concluded) = conclusion(&report_);
    assert_eq!((status, &concluded["reason"]), (1, &"peer-without-thallus".into()));
    assert_eq!(concluded["text"], "TCP: the listener has no Thallus (peer-without-thallus)");
    assert_eq!((&way["listening"], &way["announced"]), (&true.into(), &false.into()));
    drop(listener);

    let (status, report) = report(doctor(&installation).arg(&server));
    assert_eq!((status, &conclusion(&report).0["listening"]), (1, &false.into()));
    assert!(conclusion(&report).1["text"].as_str().unwrap().contains("nobody listens"), "{report:#}");
}

/// An address for documentation (RFC 5737), to which the machine needs a route.
const ELSEWHERE: &str = "192.0.2.77:5432";

#[test]
fn another_host_without_a_rule_is_reached_by_tcp() {
    let installation = installation();
    let (status, report) = report(doctor(&installation).arg(ELSEWHERE));
    let (way, concluded) = conclusion(&report);
    assert_eq!((status, &concluded["reason"]), (1, &"peer-without-thallus".into()), "{report:#}");
    assert_eq!((&way["on_this_host"], &way["rule"]), (&false.into(), &Value::Null));
    let remedy = concluded["remedy"].as_str().unwrap();
    assert!(remedy.contains("THALLUS_PEERS=192.0.2.77:5432"), "{remedy}");
    // Or in a container with a network of its own, which nobody can tell from another host.
    assert!(remedy.contains("one network namespace for both"), "{remedy}");
}

#[test]
fn rules_that_do_not_count_for_want_of_a_key_are_not_called_missing() {
    let installation = installation();
    for (fabric, reason) in [("auto", "peer-without-thallus"), ("verbs", "disabled")] {
        let mut command = doctor(&installation);
        command.env("THALLUS_PEERS", "192.0.2.77").env("THALLUS_KEY_FILE", "/nowhere/key");
        let (_, report) = report(command.env("THALLUS_FABRIC", fabric).arg(ELSEWHERE));
        let concluded = conclusion(&report).1;
        assert_eq!(concluded["reason"], reason, "{report:#}");
        let (text, remedy) = (concluded["text"].as_str().unwrap(), concluded["remedy"].as_str().unwrap());
        assert!(text.contains("without the key that is asked for no rule of THALLUS_PEERS counts"), "{text}");
        assert!(
            remedy.contains("correct THALLUS_KEY_FILE") && !remedy.contains("THALLUS_PEERS="),
            "{remedy}"
        );
    }
}

#[test]
fn an_address_that_can_be_bound_to_is_not_for_that_this_hosts() {
    let installation = installation();
    let own_network = if rustix::process::geteuid().is_root() { "-n" } else { "-rn" };
    let script = "echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind && exec \"$0\" \"$@\"";
    let mut command = through(&installation, &["unshare", own_network, "sh", "-c", script]);
    let (_, report) = report(command.arg("192.0.2.1:80"));
    assert_eq!(report["connection"]["addresses"][0]["on_this_host"], false, "{report:#}");
}

#[test]
fn a_path_that_is_no_text_is_shown_as_well_as_it_can_be() {
    let name = OsStr::from_bytes(b"caf\xe9");
    let folder = tempfile::Builder::new().prefix(name).tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let installation = Installation::in_folder(folder);
    fs::copy(support::doctor::library(), installation.path("bin/libthallus_shim.so")).unwrap();
    let (_, report) = report(&mut doctor(&installation));
    assert!(report["library"]["path"].as_str().unwrap().contains("/caf\u{fffd}"), "{report:#}");
}

#[test]
fn a_rule_without_a_device_leads_to_tcp() {
    let installation = installation();
    let devices = fs::read_dir("/sys/class/infiniband").map_or(0, Iterator::count);
    let (status, report) =
        report(doctor(&installation).arg(ELSEWHERE).env("THALLUS_PEERS", "10.0.0.1, 192.0.2.0/24:5432"));
    let (way, concluded) = conclusion(&report);
    assert_eq!(way["rule"], "192.0.2.0/24:5432");
    assert_eq!(report["rdma"]["devices"].as_array().unwrap().len(), devices);
    if devices == 0 {
        assert_eq!((status, &concluded["reason"]), (1, &"no-device".into()), "{report:#}");
    }
}

#[test]
fn wrong_arguments_are_a_usage_error() {
    let installation = installation();
    for argument in ["db", "db:0", "::1:80", "--loud"] {
        assert_eq!(outcome(doctor(&installation).arg(argument)).status, Some(2), "{argument}");
    }
    let (status, report) = report(doctor(&installation).arg("no-such-host.invalid:1"));
    assert_eq!(status, 1);
    assert!(problems(&report, "connection")[0].contains("no-such-host.invalid"), "{report:#}");
}

#[test]
fn the_names_of_the_json_are_the_documented_ones() {
    let installation = installation();
    let arguments = [ELSEWHERE, "--program", "sh"];
    let (_, report) = report(doctor(&installation).args(arguments).env("THALLUS_SPIN_US", "soon"));
    let mut found = BTreeSet::new();
    names(&report, "", &mut found);
    let documented = documented();
    // An empty array, and what has no parts here.
    let whole = ["rdma.devices", "machine.container_hints"];
    let unknown: Vec<_> =
        found.iter().filter(|name| !documented.contains(*name) && !whole.contains(&name.as_str())).collect();
    assert_eq!(unknown, Vec::<&String>::new());
    let absent: Vec<_> = documented.iter().filter(|name| !found.contains(*name)).collect();
    let hardware = |name: &&&String| name.starts_with("rdma.devices[]") || name.contains("].device.");
    let whole = |name: &&&String| matches!(name.as_str(), "connection" | "program");
    assert_eq!(absent.iter().find(|name| !hardware(name) && !whole(name)), None);
}

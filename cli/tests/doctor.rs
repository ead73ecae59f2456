//! `thallus doctor`: what it says, against what others say of the same machine.
//!
//! Tests whose name begins with `rdma_` run in the virtual machine of scripts/test-rdma.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeSet;
use std::fs::{self, Permissions, copy, create_dir_all, set_permissions};
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use support::{Installation, Outcome, outcome};

/// The real library: `THALLUS_LIBRARY`, or the one beside the command.
fn library() -> PathBuf {
    let beside = || Path::new(env!("CARGO_BIN_EXE_thallus")).with_file_name("libthallus_shim.so");
    let path = std::env::var_os("THALLUS_LIBRARY").map_or_else(beside, PathBuf::from);
    assert!(
        path.exists(),
        "{}: build it (cargo build -p thallus-shim), or set THALLUS_LIBRARY",
        path.display()
    );
    path
}

/// The command with the real library.
fn installation() -> Installation {
    let installation = Installation::without_library();
    copy(library(), installation.path("bin/libthallus_shim.so")).unwrap();
    installation
}

/// `program arguments… thallus doctor`, from an environment without settings of ours.
fn through(installation: &Installation, program: &[&str]) -> Command {
    let thallus = installation.path("bin/thallus");
    let mut command = match program {
        [] => Command::new(&thallus),
        [program, arguments @ ..] => {
            let mut command = Command::new(program);
            command.args(arguments).arg(&thallus);
            command
        }
    };
    command.arg("doctor");
    for (name, _) in std::env::vars_os() {
        if name == "LD_PRELOAD" || name.to_string_lossy().starts_with("THALLUS") {
            command.env_remove(name);
        }
    }
    command
}

fn doctor(installation: &Installation) -> Command {
    through(installation, &[])
}

/// The exit status and the report.
fn report(command: &mut Command) -> (i32, Value) {
    let Outcome { status, output, errors } = outcome(command.arg("--json"));
    assert_eq!(errors, "");
    (status.unwrap(), serde_json::from_str(&output).unwrap())
}

fn problems(report: &Value, part: &str) -> Vec<String> {
    let problems = report["problems"].as_array().unwrap().iter();
    let of_part = problems.filter(|problem| problem["part"] == part);
    of_part.map(|problem| problem["problem"].as_str().unwrap().to_owned()).collect()
}

fn setting<'report>(report: &'report Value, name: &str) -> &'report Value {
    let settings = report["settings"].as_array().unwrap();
    settings.iter().find(|setting| setting["name"] == name).unwrap()
}

/// The only address of the server, and what was concluded about it.
fn conclusion(report: &Value) -> (&Value, &Value) {
    let [way] = report["connection"]["addresses"].as_array().unwrap().as_slice() else {
        panic!("one address expected: {report:#}");
    };
    (way, &way["conclusion"])
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
#include <sys/socket.h>
#include <unistd.h>
int main(void) {
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

/// Each name in the JSON, with `[]` for the entries of an array. Only those that hold no others.
fn names(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                names(value, &if path.is_empty() { name.clone() } else { format!("{path}.{name}") }, found);
            }
        }
        Value::Array(list) if list.iter().all(Value::is_object) && !list.is_empty() => {
            list.iter().for_each(|value| names(value, &format!("{path}[]"), found));
        }
        _ => {
            found.insert(path.to_owned());
        }
    }
}

/// The names that docs/doctor.md lists.
fn documented() -> BTreeSet<String> {
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/doctor.md")).unwrap();
    let table = text.split("| name | content |").nth(1).unwrap();
    let cells = table.lines().filter_map(|row| row.strip_prefix("| `")?.split(" |").next());
    cells.flat_map(|cell| cell.split(", ")).map(|name| name.trim_matches('`').to_owned()).collect()
}

#[test]
fn the_names_of_the_json_are_the_documented_ones() {
    let installation = installation();
    let (_, report) = report(doctor(&installation).arg(ELSEWHERE).env("THALLUS_SPIN_US", "soon"));
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
    let whole = |name: &&&String| name.as_str() == "connection";
    assert_eq!(absent.iter().find(|name| !hardware(name) && !whole(name)), None);
}

/// An installation that every user may read.
fn public_installation() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let bin = folder.path().join("bin");
    create_dir_all(&bin).unwrap();
    copy(env!("CARGO_BIN_EXE_thallus"), bin.join("thallus")).unwrap();
    copy(library(), bin.join("libthallus_shim.so")).unwrap();
    for path in [folder.path(), &bin, &bin.join("thallus"), &bin.join("libthallus_shim.so")] {
        set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }
    folder
}

/// The GID that is 10.0.0.1, of the virtual machine's rxe0.
fn gid_of_the_machine(report: &Value) -> &Value {
    let port = &report["rdma"]["devices"][0]["ports"][0];
    let gids = port["gids"].as_array().unwrap();
    gids.iter().find(|gid| gid["address"] == "10.0.0.1").unwrap()
}

#[test]
#[ignore = "needs soft-RoCE: scripts/test-rdma"]
fn rdma_is_what_a_rule_leads_to() {
    let installation = installation();
    let (_, report_) = report(doctor(&installation).arg("10.0.0.2:5432").env("THALLUS_PEERS", "10.0.0.0/24"));
    let device = &report_["rdma"]["devices"][0];
    assert_eq!((&device["name"], &device["transport"]), (&"rxe0".into(), &"roce".into()), "{report_:#}");
    assert_eq!((&device["node_accessible"], &device["ports"][0]["state"]), (&true.into(), &"ACTIVE".into()));
    let port = outcome(Command::new("ibv_devinfo").args(["-d", "rxe0"])).output;
    let mtu = port.lines().find_map(|line| line.trim().strip_prefix("active_mtu:")).unwrap();
    let mtu = mtu.split_whitespace().next().unwrap();
    assert_eq!(device["ports"][0]["mtu_bytes"].to_string(), mtu);
    let gid = gid_of_the_machine(&report_);
    assert_eq!(
        (&gid["index"], &gid["kind"], &gid["interface"]),
        (&1.into(), &"roce_v2".into(), &"eth0".into())
    );
    assert_eq!((&gid["used"], &gid["ring_bytes"]), (&true.into(), &(2 << 20).into()));
    let (way, concluded) = conclusion(&report_);
    assert_eq!((&way["local"], &concluded["fabric"]), (&"10.0.0.1".into(), &"verbs".into()), "{report_:#}");
    assert_eq!((&way["device"]["name"], &way["device"]["gid_index"]), (&"rxe0".into(), &1.into()));

    let mut found = BTreeSet::new();
    names(&report_, "", &mut found);
    let documented = documented();
    assert_eq!(found.iter().find(|name| name.contains("device") && !documented.contains(*name)), None);

    let (status, report) = report(doctor(&installation).arg("10.0.0.2:5432"));
    let (_, concluded) = conclusion(&report);
    assert_eq!((status, &concluded["reason"]), (1, &"peer-without-thallus".into()), "{report:#}");
}

#[test]
#[ignore = "needs soft-RoCE: scripts/test-rdma"]
fn rdma_without_memory_to_lock_is_no_rdma() {
    let folder = public_installation();
    let installation = Installation::at(folder);
    let nobody =
        ["prlimit", "--memlock=65536", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let asked = |memlock: &str| {
        let mut program = nobody;
        program[1] = memlock;
        let mut command = through(&installation, &program);
        report(command.arg("10.0.0.2:5432").env("THALLUS_PEERS", "10.0.0.0/24"))
    };
    let (status, report) = asked("--memlock=32768");
    assert_eq!((status, &conclusion(&report).1["reason"]), (1, &"memlock".into()), "{report:#}");
    assert_eq!(gid_of_the_machine(&report)["reason"], "memlock");
    assert!(problems(&report, "rdma").iter().any(|problem| problem.contains("RLIMIT_MEMLOCK is 32 KiB")));

    let (status, report) = asked("--memlock=1048576");
    assert_eq!((status, &conclusion(&report).1["fabric"]), (0, &"verbs".into()), "{report:#}");
    assert_eq!(gid_of_the_machine(&report)["ring_bytes"], 128 << 10);
}

#[test]
#[ignore = "needs soft-RoCE: scripts/test-rdma"]
fn rdma_on_a_port_that_is_down_is_no_rdma() {
    let installation = installation();
    let link = |state: &str| {
        assert_eq!(outcome(Command::new("ip").args(["link", "set", "eth0", state])).status, Some(0))
    };
    link("down");
    let (_, report) = report(&mut doctor(&installation));
    link("up");
    assert_ne!(report["rdma"]["devices"][0]["ports"][0]["state"], "ACTIVE", "{report:#}");
    assert!(problems(&report, "rdma").iter().any(|problem| problem.contains("port-down")), "{report:#}");
}

//! `thallus doctor` where there is RDMA: in the virtual machine of scripts/test-rdma, with soft-RoCE.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeSet;
use std::fs::{Permissions, copy, create_dir_all, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use serde_json::Value;
use support::doctor::{
    conclusion, doctor, documented, installation, library, names, problems, report, through,
};
use support::{Installation, outcome};

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

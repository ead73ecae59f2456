//! Containers that share a network namespace, as those of a pod do, and have the other namespaces for themselves: by unshare(1), which makes
//! what a container's runtime makes.

use std::fs;
use std::process::Command;

use anyhow::{Result, ensure};
use thallus_tests::calls::is_root;
use thallus_tests::harness::{Scene, Stats, free_port, program, turn};

/// A program in namespaces of its own, the user namespace last: with a mapping of the user who starts it, or with none.
const OWN: [&str; 6] = ["--fork", "--pid", "--mount-proc", "--ipc", "--uts", "--cgroup"];
const MAPPED: &[&str] = &["--map-root-user"];
const UNMAPPED: &[&str] = &["--user"];
const SHARED: &[&str] = &[];
/// Without the network that the other side has.
const APART: &[&str] = &["--map-root-user", "--net"];

fn container(scene: &Scene, name: &str, users: &[&str], command: &Command) -> Result<Command> {
    let mut contained = scene.shimmed(name, program("unshare", "util-linux")?)?;
    // Who finds all answers by looking on is never woken.
    contained.env("THALLUS_SPIN_US", "0");
    let users = if users.is_empty() && !is_root() { MAPPED } else { users };
    // Without a mapping there is nobody who might mount.
    let own = if users == UNMAPPED { &OWN[..0] } else { &OWN[..] };
    contained.args(own).args(users).arg("--").arg(command.get_program()).args(command.get_args());
    Ok(contained)
}

/// Both sides' statistics, of `clients` connections of redis-benchmark: over TCP, or to a path.
fn meet(clients: u64, over_tcp: bool, [of_server, of_client]: [&[&str]; 2]) -> Result<[Stats; 2]> {
    let scene = Scene::new()?;
    let port = free_port()?.to_string();
    let mut server = scene.plain(program("redis-server", "redis-server")?);
    server.args(["--port", &port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
    server.arg("--unixsocket").arg(scene.path("redis.sock"));
    let mut service = scene.start("redis", container(&scene, "server", of_server, &server)?)?;
    let log = scene.path("redis.log");
    service.await_ready(|| fs::read_to_string(&log).is_ok_and(|text| text.contains("accept connections")))?;

    let mut client = scene.plain(program("redis-benchmark", "redis-tools")?);
    match over_tcp {
        true => client.args(["-h", "127.0.0.1", "-p", &port]),
        false => client.arg("-s").arg(scene.path("redis.sock")),
    };
    client.args(["-t", "get", "-n", "20000", "-q", "-c", &clients.to_string()]);
    scene.succeed(container(&scene, "client", of_client, &client)?)?;

    // A signal would end unshare, and with it the namespace.
    let mut shutdown = scene.plain(program("redis-cli", "redis-tools")?);
    shutdown.args(["-h", "127.0.0.1", "-p", &port, "shutdown", "nosave"]);
    scene.succeed(shutdown)?;
    scene.await_that("the server ends", || matches!(service.ended(), Ok(Some(_))))?;
    Ok([scene.stats("server")?, scene.stats("client")?])
}

fn stays(stats: &Stats, reason: &str) -> bool {
    stats.not_upgraded.get(reason).is_some_and(|&count| count >= 2)
}

#[test]
fn those_of_a_pod_leave_tcp() -> Result<()> {
    let _turn = turn();
    for users in [SHARED, MAPPED] {
        let [server, client] = meet(8, true, [users, users])?;
        for stats in [&server, &client] {
            // redis-benchmark makes one more when one has made all its requests.
            ensure!(stats.over_shared_memory() >= 8, "{users:?}: {server:?} {client:?}");
        }
        // Each side has woken the other by what they hold of each other, not by TCP alone.
        ensure!(server.chimes_sent > 0 && client.chimes_sent > 0, "{users:?}: {server:?} {client:?}");
    }
    Ok(())
}

#[test]
fn one_that_knows_the_other_by_no_id_stays_on_tcp_and_both_sides_say_so() -> Result<()> {
    let _turn = turn();
    let [server, client] = meet(2, true, [SHARED, UNMAPPED])?;
    for stats in [&server, &client] {
        assert_eq!(stats.over_shared_memory(), 0, "{server:?} {client:?}");
        assert!(stays(stats, "no-answer"), "{server:?} {client:?}");
    }
    Ok(())
}

#[test]
fn a_path_that_leads_into_another_network_namespace_is_no_lack_of_sock_diag() -> Result<()> {
    let _turn = turn();
    let [server, client] = meet(2, false, [SHARED, APART])?;
    for (stats, reason) in [(&server, "remote"), (&client, "peer-without-thallus")] {
        assert_eq!(stats.over_shared_memory(), 0, "{server:?} {client:?}");
        assert!(stays(stats, reason), "{server:?} {client:?}");
    }
    Ok(())
}

//! memcached, Node, Java and Arrow Flight: servers that wait for many connections, each in its own way.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use thallus_tests::harness::{Scene, TOO_SHORT, free_port, program, turn};

use super::exchange::{Exchange, Outcome, listens, printed_ports};

/// A side of the conversation, from a script beside this file.
fn scripted(
    scene: &Scene,
    shimmed: bool,
    side: &str,
    interpreter: PathBuf,
    script: (&str, &str),
) -> Result<Command> {
    fs::write(scene.path(script.0), script.1)?;
    let mut command = scene.command(shimmed, side, interpreter)?;
    command.arg(scene.path(script.0));
    Ok(command)
}

/// Some connections end before an upgrade is worth it, or while one side still looks for the other.
fn most_upgraded(outcome: &Outcome, server: u64, client: u64) {
    let reasons = [TOO_SHORT, &["shutdown-before-upgrade"]].concat();
    for (stats, least) in [(&outcome.server, server), (&outcome.client, client)] {
        assert!(stats.over_shared_memory() >= least, "{outcome:?}");
        assert!(stats.not_upgraded.keys().all(|reason| reasons.contains(&reason.as_str())), "{outcome:?}");
    }
}

#[test]
fn memcached_in_all_its_protocols() -> Result<()> {
    let _turn = turn();
    let port = free_port()?;
    let outcome = Exchange {
        server: &|scene, shimmed| {
            let mut command = scene.command(shimmed, "server", program("memcached", "memcached")?)?;
            command.args([
                "-u",
                "nobody",
                "-l",
                "127.0.0.1",
                "-p",
                &port.to_string(),
                "-t",
                "3",
                "-m",
                "256",
            ]);
            Ok(command)
        },
        ports: &|_| listens(port).then(|| vec![port.to_string()]),
        client: &|scene, shimmed, ports| {
            let script = ("memcached_client.py", include_str!("memcached_client.py"));
            let mut command = scripted(scene, shimmed, "client", program("python3", "python3")?, script)?;
            command.args(ports);
            Ok(command)
        },
    }
    .same_everywhere()?;
    for stats in [&outcome.server, &outcome.client] {
        assert_eq!((stats.over_shared_memory(), stats.connections()), (9, 9), "{outcome:?}");
    }
    Ok(())
}

/// `THALLUS_NODE`, else the system's.
fn node() -> Result<PathBuf> {
    std::env::var_os("THALLUS_NODE").map_or_else(|| program("node", "nodejs"), |path| Ok(path.into()))
}

fn node_talks(mode: &str, environment: &[(&str, &str)], everywhere: bool) -> Result<Outcome> {
    let file = "abcdefghijk".repeat(200_000);
    let exchange = Exchange {
        server: &|scene, shimmed| {
            fs::write(scene.path("file"), &file)?;
            let script = ("node_server.js", include_str!("node_server.js"));
            let mut command = scripted(scene, shimmed, "server", node()?, script)?;
            command.arg(mode).arg(scene.path("file")).envs(environment.iter().copied());
            Ok(command)
        },
        ports: &printed_ports,
        client: &|scene, shimmed, ports| {
            let script = ("node_client.js", include_str!("node_client.js"));
            let mut command = scripted(scene, shimmed, "client", node()?, script)?;
            command.args(ports).envs(environment.iter().copied());
            Ok(command)
        },
    };
    if everywhere { exchange.same_everywhere() } else { exchange.run(true, true) }
}

#[test]
fn node_serves_http_streams_and_what_was_http() -> Result<()> {
    let _turn = turn();
    most_upgraded(&node_talks("single", &[], true)?, 10, 10);
    Ok(())
}

#[test]
fn node_workers_are_handed_listeners_and_connections() -> Result<()> {
    let _turn = turn();
    let alone = node_talks("single", &[], false)?;
    let shared = node_talks("shared", &[], false)?;
    ensure!(alone.printed == shared.printed, "{shared:?}");
    most_upgraded(&shared, 10, 10);
    // The master accepts, and sends each connection to a worker.
    let passed = node_talks("round-robin", &[], false)?;
    ensure!(alone.printed == passed.printed, "{passed:?}");
    assert!(passed.server.not_upgraded.contains_key("passed-to-process"), "{passed:?}");
    assert_eq!(
        (passed.server.over_shared_memory(), passed.client.over_shared_memory()),
        (0, 0),
        "{passed:?}"
    );
    Ok(())
}

#[test]
fn node_with_io_uring_stays_on_tcp() -> Result<()> {
    let _turn = turn();
    let alone = node_talks("single", &[], false)?;
    let outcome = node_talks("single", &[("UV_USE_IO_URING", "1")], false)?;
    ensure!(alone.printed == outcome.printed, "{outcome:?}");
    for stats in [&outcome.server, &outcome.client] {
        assert_eq!(
            stats.not_upgraded.keys().map(String::as_str).collect::<Vec<_>>(),
            ["io-uring"],
            "{outcome:?}"
        );
        assert_eq!(stats.over_shared_memory(), 0, "{outcome:?}");
    }
    Ok(())
}

#[test]
fn node_that_may_not_use_io_uring_leaves_tcp() -> Result<()> {
    let _turn = turn();
    let alone = node_talks("single", &[], false)?;
    let outcome = node_talks("single", &[("UV_USE_IO_URING", "1"), ("THALLUS_IO_URING", "deny")], false)?;
    ensure!(alone.printed == outcome.printed, "{outcome:?}");
    most_upgraded(&outcome, 10, 10);
    Ok(())
}

#[test]
fn java_selectors_sockets_and_http() -> Result<()> {
    let _turn = turn();
    let classes = Scene::new()?;
    fs::write(classes.path("NetServer.java"), include_str!("NetServer.java"))?;
    fs::write(classes.path("NetClient.java"), include_str!("NetClient.java"))?;
    let mut compile = classes.plain(program("javac", "openjdk-17-jdk-headless")?);
    compile.args(["NetServer.java", "NetClient.java"]);
    classes.succeed(compile)?;
    let java = |scene: &Scene, shimmed, side: &str, class: &str| -> Result<Command> {
        let mut command = scene.command(shimmed, side, program("java", "openjdk-17-jdk-headless")?)?;
        command.args(["-Xmx300m", "-cp"]).arg(classes.path("")).arg(class);
        Ok(command)
    };
    let outcome = Exchange {
        server: &|scene, shimmed| java(scene, shimmed, "server", "NetServer"),
        ports: &printed_ports,
        client: &|scene, shimmed, ports| {
            let mut command = java(scene, shimmed, "client", "NetClient")?;
            command.args(ports);
            Ok(command)
        },
    }
    .same_everywhere()?;
    most_upgraded(&outcome, 100, 110);
    Ok(())
}

#[test]
fn arrow_flight_by_grpc() -> Result<()> {
    let _turn = turn();
    let python = || {
        let python = std::env::var_os("THALLUS_PYTHON").map(PathBuf::from);
        python.context("THALLUS_PYTHON is not set: a Python with pyarrow, as scripts/test installs it")
    };
    let outcome = Exchange {
        server: &|scene, shimmed| {
            scripted(
                scene,
                shimmed,
                "server",
                python()?,
                ("flight_server.py", include_str!("flight_server.py")),
            )
        },
        ports: &printed_ports,
        client: &|scene, shimmed, ports| {
            let script = ("flight_client.py", include_str!("flight_client.py"));
            let mut command = scripted(scene, shimmed, "client", python()?, script)?;
            command.args(ports).arg("10000");
            Ok(command)
        },
    }
    .same_everywhere()?;
    for stats in [&outcome.server, &outcome.client] {
        assert_eq!((stats.over_shared_memory(), stats.connections()), (4, 4), "{outcome:?}");
    }
    Ok(())
}

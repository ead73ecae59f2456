//! Python: asyncio, sockets, socketserver and http, whose servers print their port when they listen.

use std::fs;

use anyhow::{Context, Result};
use rustix::process::Signal;
use thallus_tests::harness::{Scene, Service, Stats, program, turn};

/// A script of the folder beside this file.
macro_rules! script {
    ($name:literal) => {
        ($name, include_str!($name))
    };
}

fn python(
    scene: &Scene,
    shimmed: bool,
    name: &str,
    script: (&str, &str),
    arguments: &[&str],
) -> Result<std::process::Command> {
    let path = scene.path(script.0);
    fs::write(&path, script.1)?;
    let mut command = scene.command(shimmed, name, program("python3", "python3")?)?;
    command.arg("-B").arg(path).args(arguments);
    Ok(command)
}

/// Starts a script that prints the port it listens on, and finds out which it is.
fn serve(
    scene: &Scene,
    shimmed: bool,
    script: (&str, &str),
    arguments: &[&str],
) -> Result<(Service, String)> {
    started(scene, python(scene, shimmed, "server", script, arguments)?)
}

fn started(scene: &Scene, command: std::process::Command) -> Result<(Service, String)> {
    let mut service = scene.start("server", command)?;
    let log = scene.path("server.log");
    let mut port = String::new();
    service.await_ready(|| {
        let text = fs::read_to_string(&log).unwrap_or_default();
        let listening = text.lines().find_map(|line| line.strip_prefix("port "));
        listening.filter(|_| text.contains('\n')).is_some_and(|found| {
            port = found.to_owned();
            true
        })
    })?;
    Ok((service, port))
}

/// Runs a client script against a server script; what the client printed, and both sides' statistics.
fn talk(
    [server, client]: [(&str, &str); 2],
    arguments: &[&str],
    shimmed_server: bool,
    shimmed_client: bool,
) -> Result<(String, [Stats; 2])> {
    let scene = Scene::new()?;
    let (service, port) = serve(&scene, shimmed_server, server, arguments)?;
    let arguments: Vec<&str> = [port.as_str()].into_iter().chain(arguments.iter().copied()).collect();
    let command = python(&scene, shimmed_client, "client", client, &arguments)?;
    let printed = scene.succeed(command).with_context(|| service.log())?;
    service.stop(Signal::TERM)?;
    Ok((printed, [scene.stats("server")?, scene.stats("client")?]))
}

/// The client prints the same whoever has the library; with both, `connections` left TCP.
fn same_everywhere(scripts: [(&str, &str); 2], arguments: &[&str], connections: u64) -> Result<()> {
    let (expected, _) = talk(scripts, arguments, false, false)?;
    for (server, client) in [(true, true), (true, false), (false, true)] {
        let (printed, [server_stats, client_stats]) = talk(scripts, arguments, server, client)?;
        assert_eq!(expected, printed, "with the library on {server} {client}");
        let upgraded = if server && client { connections } else { 0 };
        for (stats, shimmed) in [(server_stats, server), (client_stats, client)] {
            assert_eq!(stats.over_shared_memory(), if shimmed { upgraded } else { 0 }, "{stats:?}");
            assert_eq!(stats.connections(), if shimmed { connections } else { 0 }, "{stats:?}");
        }
    }
    Ok(())
}

#[test]
fn asyncio_streams() -> Result<()> {
    let _turn = turn();
    same_everywhere([script!("asyncio_server.py"), script!("asyncio_client.py")], &[], 20)
}

#[test]
fn socketserver_in_threads() -> Result<()> {
    let _turn = turn();
    same_everywhere([script!("socket_server.py"), script!("socket_client.py")], &["threads"], 8)
}

#[test]
fn socketserver_in_forks() -> Result<()> {
    let _turn = turn();
    same_everywhere([script!("socket_server.py"), script!("socket_client.py")], &["forks"], 8)
}

#[test]
fn selectors_event_loop() -> Result<()> {
    let _turn = turn();
    same_everywhere([script!("socket_server.py"), script!("socket_client.py")], &["selectors"], 8)
}

#[test]
fn http_kept_alive() -> Result<()> {
    let _turn = turn();
    same_everywhere([script!("http_server.py"), script!("http_client.py")], &["keep"], 1)
}

#[test]
fn http_with_a_connection_for_each_request() -> Result<()> {
    let _turn = turn();
    let scripts = [script!("http_server.py"), script!("http_client.py")];
    let (expected, _) = talk(scripts, &["close"], false, false)?;
    let (printed, [server, client]) = talk(scripts, &["close"], true, true)?;
    assert_eq!(expected, printed);
    // Each is as short as it may be: how many are worth an upgrade is not for this test to say.
    assert_eq!(server.connections(), 40, "{server:?}");
    assert_eq!(client.connections(), 40, "{client:?}");
    Ok(())
}

/// With the time to leave TCP that users have.
fn as_usual(mut command: std::process::Command) -> std::process::Command {
    command.env_remove("THALLUS_UPGRADE_AFTER");
    command
}

/// A port whose connections are short is left alone, until they get longer.
#[test]
fn short_connections_and_long_ones() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let server = as_usual(python(&scene, true, "server", script!("socket_server.py"), &["selectors"])?);
    let (service, port) = started(&scene, server)?;
    let client = as_usual(python(&scene, true, "client", script!("short_client.py"), &[&port])?);
    scene.succeed(client).with_context(|| service.log())?;
    service.stop(Signal::TERM)?;
    for stats in [scene.stats("server")?, scene.stats("client")?] {
        assert_eq!(stats.connections(), 140, "{stats:?}");
        // The long ones, and at most the short ones that went before the lesson.
        assert!((20..=20 + 40).contains(&stats.over_shared_memory()), "{stats:?}");
    }
    Ok(())
}

/// What a server has learned in its forks, programs that connect but once are told.
#[test]
fn short_connections_each_from_a_process_to_a_fork() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let server = as_usual(python(&scene, true, "server", script!("socket_server.py"), &["forks"])?);
    let (service, port) = started(&scene, server)?;
    let clients = |name: &str, count: usize, how: &[&str]| -> Result<()> {
        for _ in 0..count {
            let client = python(&scene, true, name, script!("short_client.py"), &[&[&*port], how].concat())?;
            scene.succeed(as_usual(client)).with_context(|| service.log())?;
        }
        Ok(())
    };
    clients("teacher", 60, &["5", "1"])?;
    clients("pupil", 10, &["7", "1"])?;
    // It grows up before it would ask.
    clients("grown-up", 10, &["7", "1", "dup"])?;
    clients("long", 1, &["1500", "1"])?;
    service.stop(Signal::TERM)?;
    for pupils in [scene.stats("pupil")?, scene.stats("grown-up")?] {
        assert_eq!(pupils.not_upgraded.get("short"), Some(&10), "{pupils:?}");
    }
    let (server, long) = (scene.stats("server")?, scene.stats("long")?);
    assert_eq!((long.connections(), long.over_shared_memory()), (1, 1), "{long:?}");
    assert_eq!(server.connections(), 60 + 10 + 10 + 1, "{server:?}");
    Ok(())
}

#[test]
fn children_that_use_subprocess() -> Result<()> {
    let _turn = turn();
    same_everywhere([script!("socket_server.py"), script!("socket_client.py")], &["subprocess"], 8)
}

#[test]
fn multiprocessing_managers() -> Result<()> {
    let _turn = turn();
    same_everywhere([script!("manager_server.py"), script!("manager_client.py")], &[], 6)
}

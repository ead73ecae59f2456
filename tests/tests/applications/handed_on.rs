//! Servers that hand an accepted connection or their listener to another program, and peers that can't be preloaded.

use std::fs;
use std::process::Command;

use anyhow::{Result, ensure};
use thallus_tests::harness::{Scene, free_port, program, turn};

use super::exchange::{Exchange, Outcome, listens};

/// What echo_client.py gets from a server that listens at the port it is given.
fn echoes(server: &dyn Fn(&Scene, bool, u16) -> Result<Command>) -> Result<Outcome> {
    let port = free_port()?;
    Exchange {
        server: &|scene, shimmed| server(scene, shimmed, port),
        ports: &|_| listens(port).then(|| vec![port.to_string()]),
        client: &|scene, shimmed, ports| {
            fs::write(scene.path("echo_client.py"), include_str!("echo_client.py"))?;
            let mut command = scene.command(shimmed, "client", program("python3", "python3")?)?;
            command.arg(scene.path("echo_client.py")).args(ports);
            Ok(command)
        },
    }
    .same_everywhere()
}

const CONNECTIONS: u64 = 5;

/// The program that has the connection in the end has never heard of it: nothing may have left TCP before.
fn stays(outcome: &Outcome) {
    assert_eq!(outcome.client.over_shared_memory(), 0, "{outcome:?}");
    assert_eq!(outcome.client.connections(), CONNECTIONS, "{outcome:?}");
}

#[test]
fn inetd_starts_a_program_on_each_connection() -> Result<()> {
    let _turn = turn();
    let outcome = echoes(&|scene, shimmed, port| {
        let user = if rustix::process::geteuid().is_root() { "root" } else { "nobody" };
        fs::write(
            scene.path("inetd.conf"),
            format!("127.0.0.1:{port} stream tcp4 nowait {user} /bin/cat cat\n"),
        )?;
        let mut command = scene.command(shimmed, "server", program("inetd", "openbsd-inetd")?)?;
        command.arg("-d").arg("-i").arg(scene.path("inetd.conf"));
        Ok(command)
    })?;
    stays(&outcome);
    Ok(())
}

fn socat(scene: &Scene, shimmed: bool, port: u16, target: &str) -> Result<Command> {
    let mut command = scene.command(shimmed, "server", program("socat", "socat")?)?;
    command.arg(format!("TCP4-LISTEN:{port},bind=127.0.0.1,reuseaddr,fork")).arg(target);
    Ok(command)
}

#[test]
fn socat_becomes_a_program() -> Result<()> {
    let _turn = turn();
    stays(&echoes(&|scene, shimmed, port| socat(scene, shimmed, port, "EXEC:cat,nofork"))?);
    Ok(())
}

#[test]
fn socat_stands_before_a_program() -> Result<()> {
    let _turn = turn();
    let outcome = echoes(&|scene, shimmed, port| socat(scene, shimmed, port, "EXEC:cat"))?;
    assert_eq!(outcome.client.over_shared_memory(), CONNECTIONS, "{outcome:?}");
    Ok(())
}

fn socket_activate(scene: &Scene, shimmed: bool, port: u16, arguments: &[&str]) -> Result<Command> {
    let mut command = scene.command(shimmed, "server", program("systemd-socket-activate", "systemd")?)?;
    command.arg(format!("--listen=127.0.0.1:{port}"));
    for name in ["LD_PRELOAD", "THALLUS_STATS", "THALLUS_UPGRADE_AFTER"] {
        // It passes nothing on by itself.
        command.arg(format!("--setenv={name}"));
    }
    command.args(arguments);
    Ok(command)
}

#[test]
fn systemd_hands_over_connections() -> Result<()> {
    let _turn = turn();
    stays(&echoes(&|scene, shimmed, port| {
        socket_activate(scene, shimmed, port, &["--inetd", "--accept", "/bin/cat"])
    })?);
    Ok(())
}

/// Takes connections on descriptor 3, as sd_listen_fds(3) says.
const ACTIVATED: &str = "\
import os, socket, threading
assert os.environ['LISTEN_FDS'] == '1' and os.environ['LISTEN_PID'] == str(os.getpid())
listener = socket.socket(fileno=3)
def serve(connection):
    while data := connection.recv(65536):
        connection.sendall(data)
    connection.close()
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
";

#[test]
fn systemd_hands_over_a_listener() -> Result<()> {
    let _turn = turn();
    let python = program("python3", "python3")?.display().to_string();
    let outcome = echoes(&|scene, shimmed, port| {
        fs::write(scene.path("activated.py"), ACTIVATED)?;
        let script = scene.path("activated.py").display().to_string();
        socket_activate(scene, shimmed, port, &[&python, &script])
    })?;
    // The program announces the port when it accepts: clients that had looked before stay.
    assert_eq!(outcome.client.connections(), CONNECTIONS, "{outcome:?}");
    let reasons: Vec<_> = outcome.client.not_upgraded.keys().collect();
    assert!(reasons.iter().all(|reason| *reason == "peer-without-thallus"), "{outcome:?}");
    Ok(())
}

#[test]
fn a_static_program_at_the_other_end() -> Result<()> {
    let _turn = turn();
    for (compiler, package) in [("gcc", "gcc"), ("musl-gcc", "musl-tools")] {
        let built = Scene::new()?;
        fs::write(built.path("echo.c"), include_str!("echo.c"))?;
        let mut compile = built.plain(program(compiler, package)?);
        compile.args(["-O1", "-static", "-Wall", "-Wextra", "-Werror", "-o", "echo", "echo.c"]);
        built.succeed(compile)?;
        let program = built.path("echo");
        let outcome = echoes(&|scene, shimmed, port| {
            let mut command = scene.command(shimmed, "server", &program)?;
            command.arg(port.to_string());
            Ok(command)
        })?;
        stays(&outcome);
        ensure!(outcome.client.not_upgraded.get("peer-without-thallus") == Some(&CONNECTIONS), "{outcome:?}");
        assert_eq!(outcome.server.processes, 0, "{outcome:?}");
    }
    Ok(())
}

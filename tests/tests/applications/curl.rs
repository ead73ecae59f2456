//! curl and wrk against Python's http.server.

use std::fs;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use thallus_tests::harness::{Scene, Service, Stats, TOO_SHORT, free_port, program, turn};
use thallus_tests::side::Pattern;

use super::exchange::listens;

const LENGTH: usize = 50 << 20;

/// Serves the folder "files" of the scene.
pub(super) fn serve(scene: &Scene, shimmed: bool, protocol: &str) -> Result<(Service, u16)> {
    let port = free_port()?;
    let mut command = scene.command(shimmed, "server", program("python3", "python3")?)?;
    command.args(["-m", "http.server", "--bind", "127.0.0.1", "--protocol", protocol, "--directory"]);
    command.arg(scene.shared_folder("files")?).arg(port.to_string());
    let mut service = scene.start("server", command)?;
    // Not by connecting, which would count.
    service.await_ready(|| listens(port))?;
    Ok((service, port))
}

fn download(shimmed_server: bool, shimmed_client: bool) -> Result<[Stats; 2]> {
    let scene = Scene::new()?;
    let content = Pattern::new(50).take(LENGTH);
    fs::write(scene.shared_folder("files")?.join("large"), &content)?;
    let (service, port) = serve(&scene, shimmed_server, "HTTP/1.0")?;
    let mut command = scene.command(shimmed_client, "client", program("curl", "curl")?)?;
    command.args(["-sS", "--fail", "-o", "copy", &format!("http://127.0.0.1:{port}/large")]);
    scene.succeed(command).with_context(|| service.log())?;
    ensure!(fs::read(scene.path("copy"))? == content, "the copy differs");
    service.stop(Signal::INT)?;
    Ok([scene.stats("server")?, scene.stats("client")?])
}

#[test]
fn curl_downloads_fifty_megabytes() -> Result<()> {
    let _turn = turn();
    for (server, client) in [(true, true), (true, false), (false, true)] {
        let [server_stats, client_stats] = download(server, client)?;
        let upgraded = u64::from(server && client);
        for (stats, shimmed) in [(&server_stats, server), (&client_stats, client)] {
            assert_eq!(stats.over_shared_memory(), if shimmed { upgraded } else { 0 }, "{stats:?}");
            assert_eq!(stats.connections(), u64::from(shimmed), "{stats:?}");
        }
        if upgraded == 1 {
            assert!(client_stats.ring_bytes_received > LENGTH as u64 / 2, "{client_stats:?}");
            assert_eq!(client_stats.ring_bytes_received, server_stats.ring_bytes_sent);
        }
    }
    Ok(())
}

#[test]
fn curl_reuses_a_connection() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let files = scene.shared_folder("files")?;
    for n in 0..20usize {
        fs::write(files.join(n.to_string()), Pattern::new(n as u64).take(n * 30_000))?;
    }
    let (service, port) = serve(&scene, true, "HTTP/1.1")?;
    let mut command = scene.shimmed("client", program("curl", "curl")?)?;
    command.args(["-sS", "--fail", "-o", "copy-#1", &format!("http://127.0.0.1:{port}/[0-19]")]);
    scene.succeed(command).with_context(|| service.log())?;
    for n in 0..20usize {
        ensure!(
            fs::read(scene.path(&format!("copy-{n}")))? == Pattern::new(n as u64).take(n * 30_000),
            "file {n} differs"
        );
    }
    service.stop(Signal::INT)?;
    for side in ["server", "client"] {
        let stats = scene.stats(side)?;
        assert_eq!((stats.over_shared_memory(), stats.connections()), (1, 1), "{stats:?}");
    }
    Ok(())
}

#[test]
fn wrk_keeps_connections_busy() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    fs::write(scene.shared_folder("files")?.join("small"), b"small")?;
    let (service, port) = serve(&scene, true, "HTTP/1.1")?;
    let mut command = scene.shimmed("client", program("wrk", "wrk")?)?;
    command.args(["-t", "2", "-c", "6", "-d", "3s", &format!("http://127.0.0.1:{port}/small")]);
    let printed = scene.succeed(command).with_context(|| service.log())?;
    ensure!(printed.contains("requests in") && !printed.contains("Non-2xx"), "{printed}");
    ensure!(!printed.contains("Socket errors"), "{printed}");
    service.stop(Signal::INT)?;
    let stats = scene.stats("client")?;
    assert!(stats.over_shared_memory() >= 6, "{stats:?}");
    assert!(stats.not_upgraded.keys().all(|reason| TOO_SHORT.contains(&reason.as_str())), "{stats:?}");
    Ok(())
}

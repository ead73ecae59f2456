//! Apache, whose listening thread hands connections to others and takes them back (the event MPM), before lighttpd.

use std::fs;

use anyhow::{Result, ensure};
use rustix::process::Signal;
use thallus_tests::harness::{Scene, Service, free_port, program, turn};
use thallus_tests::side::Pattern;

use super::nginx::{Load, SIZES, send};

/// Serves the scene's folder "files": waits for room alone while it sends.
fn lighttpd(scene: &Scene, shimmed: bool) -> Result<(Service, u16)> {
    let (port, files) = (free_port()?, scene.shared_folder("files")?);
    for size in SIZES {
        fs::write(files.join(size.to_string()), Pattern::new(*size as u64).take(*size))?;
    }
    let configuration = scene.path("lighttpd.conf");
    let (files, log) = (files.display(), scene.path("lighttpd.log").display().to_string());
    fs::write(
        &configuration,
        format!(
            "server.port = {port}\nserver.bind = \"127.0.0.1\"\nserver.document-root = \"{files}\"
             server.errorlog = \"{log}\"\nserver.max-keep-alive-requests = 200\n"
        ),
    )?;
    let mut command = scene.command(shimmed, "origin", program("lighttpd", "lighttpd")?)?;
    command.arg("-D").arg("-f").arg(configuration);
    let mut service = scene.start("lighttpd", command)?;
    service.await_port(port)?;
    Ok((service, port))
}

/// Serves the folder, too, and passes "proxy/" on to `origin`.
fn apache(scene: &Scene, shimmed: bool, origin: u16) -> Result<(Service, u16)> {
    let (port, program) = (free_port()?, program("apache2", "apache2-bin")?);
    let modules: String = ["mpm_event", "authz_core", "proxy", "proxy_http"]
        .iter()
        .map(|name| format!("LoadModule {name}_module /usr/lib/apache2/modules/mod_{name}.so\n"))
        .collect();
    let configuration = scene.path("httpd.conf");
    let (folder, files) = (scene.path("").display().to_string(), scene.path("files").display().to_string());
    fs::write(
        &configuration,
        format!(
            "ServerRoot {folder}\nServerName localhost\nPidFile {folder}httpd.pid\nErrorLog {folder}httpd.log
             Listen 127.0.0.1:{port}\n{modules}User nobody\nGroup nogroup\nDefaultRuntimeDir {folder}
             DocumentRoot {files}\nMaxKeepAliveRequests 200\nStartServers 2
             ProxyPass /proxy/ http://127.0.0.1:{origin}/\n"
        ),
    )?;
    let mut command = scene.command(shimmed, "server", program)?;
    command.arg("-f").arg(configuration).arg("-DFOREGROUND");
    let mut service = scene.start("apache", command)?;
    service.await_port(port)?;
    Ok((service, port))
}

#[test]
fn apache_passes_on_what_lighttpd_serves() -> Result<()> {
    let _turn = turn();
    for (server, client) in [(true, true), (true, false), (false, true)] {
        let scene = Scene::new()?;
        let (origin, origin_port) = lighttpd(&scene, server)?;
        let (apache, port) = apache(&scene, server, origin_port)?;
        let mut load = Load::start(&scene, client, "client", port, 8, ",proxy,proxy")?;
        load.go_on(300)?;
        // New processes serve; the old ones end when their connections do.
        send(apache.pid(), Signal::USR1)?;
        load.go_on(300)?;
        load.stop()?;
        // Each request has a connection of its own, which the listening thread sees again at its end.
        let mut command = scene.command(client, "client", program("ab", "apache2-utils")?)?;
        command.args(["-q", "-n", "600", "-c", "8"]).arg(format!("http://127.0.0.1:{port}/proxy/1000000"));
        let report = scene.succeed(command)?;
        let failed = |line: &str| line.split_whitespace().eq(["Failed", "requests:", "0"]);
        ensure!(report.lines().any(failed), "{report}");
        let ended = apache.stop(Signal::TERM)?;
        let log = fs::read_to_string(scene.path("httpd.log"))?;
        ensure!(ended.success() && !log.contains("exit signal"), "{ended}\n{log}");
        origin.stop(Signal::TERM)?;

        let asked = scene.stats("client")?;
        if server && client {
            // Of ab's hardly any does: Apache's thread writes an answer before anybody has waited for the connection.
            assert!(asked.over_shared_memory() > 10, "{asked:?}");
            assert!(asked.ring_bytes_received > 100 << 20, "{asked:?}");
        } else if client {
            assert_eq!(asked.over_shared_memory(), 0, "{asked:?}");
        }
        if server {
            assert!(scene.stats("origin")?.over_shared_memory() > 10);
        }
    }
    Ok(())
}

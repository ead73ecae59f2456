//! sshd with keys of its own: commands, scp, and a port that it forwards.

use std::fs::{self, File};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use thallus_tests::harness::{Scene, Stats, free_port, program, turn};
use thallus_tests::side::Pattern;

use super::curl::serve;
use super::exchange::listens;

const LENGTH: usize = 50 << 20;

/// A client's command, up to its options.
fn ssh(scene: &Scene, shimmed: bool, client: &str) -> Result<Command> {
    let mut command = scene.command(shimmed, "client", program(client, "openssh-client")?)?;
    command.args([
        "-F",
        "none",
        "-i",
        "client_key",
        "-o",
        "StrictHostKeyChecking=no",
        "-o",
        "LogLevel=ERROR",
    ]);
    command.arg("-o").arg(format!("UserKnownHostsFile={}", scene.path("known").display()));
    Ok(command)
}

fn talk(shimmed_server: bool, shimmed_client: bool) -> Result<[Stats; 3]> {
    let scene = Scene::new()?;
    let port = free_port()?.to_string();
    for key in ["host_key", "client_key"] {
        let mut keygen = scene.plain(program("ssh-keygen", "openssh-client")?);
        keygen.args(["-q", "-t", "ed25519", "-N", "", "-f", key]);
        scene.succeed(keygen)?;
    }
    let folder = scene.path("").display().to_string();
    fs::write(
        scene.path("sshd_config"),
        format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}host_key\nAuthorizedKeysFile {folder}client_key.pub\n\
             PermitRootLogin yes\nStrictModes no\nUsePAM no\nPidFile none\nSubsystem sftp internal-sftp\n"
        ),
    )?;
    if rustix::process::geteuid().is_root() {
        // For its unprivileged part.
        fs::create_dir_all("/run/sshd")?;
    }
    let mut command = scene.command(shimmed_server, "server", program("sshd", "openssh-server")?)?;
    command.arg("-D").arg("-e").arg("-f").arg(scene.path("sshd_config"));
    let mut sshd = scene.start("sshd", command)?;
    sshd.await_ready(|| listens(port.parse().unwrap_or(0)))?;

    let content = Pattern::new(22).take(LENGTH);
    let large = scene.shared_folder("files")?.join("large");
    fs::write(&large, &content)?;
    let user = String::from_utf8(scene.plain("id").arg("-un").output()?.stdout)?.trim().to_owned();
    let host = format!("{user}@127.0.0.1");

    let mut sum = ssh(&scene, shimmed_client, "ssh")?;
    sum.args(["-p", &port, &host, "sha256sum"]).stdin(File::open(&large)?);
    let mut own_sum = scene.plain("sha256sum");
    own_sum.stdin(File::open(&large)?);
    ensure!(scene.succeed(sum).with_context(|| sshd.log())? == scene.succeed(own_sum)?, "sha256sum differs");

    let mut copy = ssh(&scene, shimmed_client, "scp")?;
    copy.args(["-q", "-P", &port]).arg(format!("{host}:{}", large.display())).arg("copy");
    scene.succeed(copy).with_context(|| sshd.log())?;
    ensure!(fs::read(scene.path("copy"))? == content, "the copy differs");

    let (web, web_port) = serve(&scene, shimmed_server, "HTTP/1.1")?;
    let forwarded = free_port()?;
    let mut forward = ssh(&scene, shimmed_client, "ssh")?;
    forward.args(["-N", "-L", &format!("127.0.0.1:{forwarded}:127.0.0.1:{web_port}"), "-p", &port, &host]);
    let mut forward = scene.start("forward", forward)?;
    forward.await_ready(|| listens(forwarded))?;
    let mut curl = scene.command(shimmed_client, "curl", program("curl", "curl")?)?;
    curl.args(["-sS", "--fail", "-o", "download", &format!("http://127.0.0.1:{forwarded}/large")]);
    scene.succeed(curl).with_context(|| forward.diagnosis())?;
    ensure!(fs::read(scene.path("download"))? == content, "the download differs");

    forward.stop(Signal::TERM)?;
    // The processes of its connections, which end when they see that, are killed with it.
    let children = format!("/proc/{0}/task/{0}/children", sshd.pid());
    sshd.await_ready(|| fs::read_to_string(&children).is_ok_and(|list| list.trim().is_empty()))?;
    sshd.stop(Signal::TERM)?;
    web.stop(Signal::INT)?;
    Ok([scene.stats("server")?, scene.stats("client")?, scene.stats("curl")?])
}

#[test]
fn ssh_runs_commands_copies_and_forwards() -> Result<()> {
    let _turn = turn();
    talk(false, false)?;
    for (server, client) in [(true, true), (true, false), (false, true)] {
        let [servers, ssh, curl] = talk(server, client)?;
        // The web server's end of the forwarded connection, and sshd's: both are of this host.
        assert_eq!(servers.over_shared_memory(), if server { 2 } else { 0 }, "{servers:?}");
        // ssh's end of the connection from curl. Its own to sshd stay: sshd hands what it accepts to another process.
        assert_eq!(ssh.over_shared_memory(), u64::from(client), "{ssh:?}");
        assert_eq!(curl.over_shared_memory(), u64::from(client), "{curl:?}");
    }
    Ok(())
}

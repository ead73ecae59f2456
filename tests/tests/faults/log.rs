//! Where the log goes is no trouble of the program's.

use anyhow::{Result, ensure};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use thallus_tests::harness::{Scene, turn};

const ONE_BYTE: &str = "
import socket
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
for _ in range(8):
    client.send(b'?')
    server.send(server.recv(1))
    print(client.recv(1).decode(), end='')
";

#[test]
fn a_log_that_nobody_reads_holds_nobody_up() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let pipe = scene.path("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    let mut python = scene.shimmed("log", "python3")?;
    python.env("THALLUS_LOG", format!("debug:{}", pipe.display())).args(["-c", ONE_BYTE]);
    let output = scene.succeed(python)?;
    ensure!(output == "????????", "{output:?}");
    let stats = scene.stats("log")?;
    ensure!(stats.over_shared_memory() == 2, "{stats:?}");
    Ok(())
}

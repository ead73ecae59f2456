//! Where the log goes is no trouble of the program's.

use std::fs;

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

/// Python has these ignored, other programs don't.
const AS_OTHER_PROGRAMS: &str = "
import signal
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
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

#[test]
fn standard_error_that_nobody_reads_holds_nobody_up() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let fills = "
import os, subprocess, sys
_, full = os.pipe()
os.set_blocking(full, False)
try:
    while True:
        os.write(full, bytes(4096))
except BlockingIOError:
    os.set_blocking(full, True)
log = {'THALLUS_LOG': 'debug', 'THALLUS_RING': 'none'}
subprocess.run([sys.executable, '-c', sys.argv[1]], stderr=full, env=os.environ | log, check=True)
";
    let mut python = scene.shimmed("full", "python3")?;
    python.args(["-c", fills, ONE_BYTE]);
    let output = scene.succeed(python)?;
    ensure!(output == "????????", "{output:?}");
    let stats = scene.stats("full")?;
    ensure!(stats.over_shared_memory() == 2, "{stats:?}");
    Ok(())
}

#[test]
fn what_is_opened_in_the_place_of_standard_error_gets_no_line() -> Result<()> {
    let _turn = turn();
    let open = "import os; os.close(2); file = os.open('data', os.O_RDWR | os.O_CREAT | os.O_TRUNC); assert file == 2\n";
    for code in [[open, ONE_BYTE].concat(), [ONE_BYTE, open, ONE_BYTE].concat()] {
        let scene = Scene::new()?;
        let mut python = scene.shimmed("log", "python3")?;
        python.env("THALLUS_LOG", "debug").args(["-c", &code]);
        scene.succeed(python)?;
        let (data, stats) = (fs::read_to_string(scene.path("data"))?, scene.stats("log")?);
        ensure!(data.is_empty() && stats.over_shared_memory() >= 2, "{data:?} {stats:?}");
    }
    // What it is started with is standard error, whatever that is.
    let scene = Scene::new()?;
    let mut python = scene.shimmed("log", "python3")?;
    python.env("THALLUS_LOG", "info").args(["-c", ONE_BYTE]);
    let output = scene.run(python)?;
    ensure!(output.stderr.contains("Info: fd "), "{output}");
    Ok(())
}

#[test]
fn a_log_whose_reader_leaves_kills_nobody() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let await_end = "import select; poll = select.poll(); poll.register(2, 0); poll.poll()\n";
    let code = [AS_OTHER_PROGRAMS, await_end, ONE_BYTE].concat();
    let mut shell = scene.shimmed("error", "bash")?;
    let script = "{ python3 -c \"$1\" 2>&1 >&3 | true; } 3>&1; exit ${PIPESTATUS[0]}";
    shell.env("THALLUS_LOG", "debug").args(["-c", script, "bash", &code]);
    let output = scene.succeed(shell)?;
    ensure!(output == "????????" && scene.stats("error")?.over_shared_memory() == 2, "{output:?}");

    let pipe = scene.path("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    let reads = "import os; reader = os.open('pipe', os.O_RDONLY | os.O_NONBLOCK)\n";
    let leaves = "assert b'thallus' in os.read(reader, 10000); os.close(reader)\n";
    let code = [AS_OTHER_PROGRAMS, reads, ONE_BYTE, leaves, ONE_BYTE].concat();
    let mut python = scene.shimmed("pipe", "python3")?;
    python.env("THALLUS_LOG", format!("debug:{}", pipe.display())).args(["-c", &code]);
    let output = scene.succeed(python)?;
    ensure!(output.len() == 16 && scene.stats("pipe")?.over_shared_memory() == 4, "{output:?}");
    Ok(())
}

#[test]
fn where_files_must_be_small_neither_log_nor_statistics_kill() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    for most in [0, 60] {
        let limit = format!("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, -1))\n");
        // What is printed would not fit either.
        let code = [AS_OTHER_PROGRAMS, &limit, &ONE_BYTE.replace("print", "str")].concat();
        let code = code.replace(", end=''", "");
        let mut python = scene.shimmed("small", "python3")?;
        python.env("THALLUS_LOG", format!("debug:{}", scene.path("log").display())).args(["-c", &code]);
        scene.succeed(python)?;
        let files = fs::read_dir(scene.path("stats-small"))?.count();
        ensure!(files == 0, "{files}");
    }
    Ok(())
}

#[test]
fn statistics_that_do_not_fit_leave_nothing_and_a_warning() -> Result<()> {
    let _turn = turn();
    // Mounting needs root, or a user namespace in which one is.
    let own_mounts = if rustix::process::geteuid().is_root() { "-m" } else { "-rm" };
    let scene = Scene::new()?;
    let mut shell = scene.shimmed("full", "unshare")?;
    let script = "library=$LD_PRELOAD; unset LD_PRELOAD
        mount -t tmpfs -o size=8k none stats-full; head -c 8192 /dev/zero > stats-full/rest
        LD_PRELOAD=$library python3 -c \"$1\"; ls stats-full";
    let log = scene.path("log");
    shell.env("THALLUS_LOG", format!("warn:{}", log.display()));
    shell.args([own_mounts, "bash", "-c", script, "bash", ONE_BYTE]);
    let (output, said) = (scene.succeed(shell)?, fs::read_to_string(log)?);
    ensure!(output == "????????rest\n", "{output:?}");
    ensure!(said.contains("Warn: no statistics in ") && said.contains("No space left"), "{said:?}");
    Ok(())
}

#[test]
fn a_process_that_has_left_a_hundred_files_leaves_more() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let many = "
import os
for name in [''] + [f'.{number}' for number in range(1, 100)]:
    open(f'{os.environ[\"THALLUS_STATS\"]}/{os.getpid()}{name}.json', 'x')
";
    let mut python = scene.shimmed("many", "python3")?;
    python.args(["-c", &[many, ONE_BYTE].concat()]);
    scene.succeed(python)?;
    let files: Vec<_> = fs::read_dir(scene.path("stats-many"))?.collect::<Result<_, _>>()?;
    let written: Vec<_> =
        files.iter().filter(|file| file.metadata().is_ok_and(|file| file.len() > 0)).collect();
    ensure!((files.len(), written.len()) == (101, 1), "{files:?}");
    let text = fs::read_to_string(written[0].path())?;
    ensure!(text.contains("\"shm\":2"), "{text}");
    Ok(())
}

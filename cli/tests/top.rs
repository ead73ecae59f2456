//! `thallus top` on an arena of this very process.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::tcgetattr;
use nix::unistd::Pid;
use serde_json::Value;
use thallus_transport::arena::{Block, Chunk, Role, flag};

fn thallus(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_thallus"));
    command.arg("top").args(arguments);
    command
}

/// Opened at the beginning of time, so that no rate since then is large.
fn connect(chunk: &Chunk, local: &str) -> &'static Block {
    let block = chunk.allocate(Role::Client, std::process::id(), 9, 0).unwrap();
    block.set_addresses(local.parse().unwrap(), "127.0.0.1:5432".parse().unwrap());
    block.raise(flag::READY);
    block.ring_received.store(1 << 40, Relaxed);
    block
}

/// Has a connection receive 4 KiB again and again, four times by spinning to each sleep, during `call`.
fn busy<T>(block: &'static Block, call: impl FnOnce() -> T) -> T {
    static DONE: AtomicBool = AtomicBool::new(false);
    let worker = thread::spawn(move || {
        while !DONE.load(Relaxed) {
            block.ring_received.fetch_add(5 * 4096, Relaxed);
            block.spin_hits.fetch_add(4, Relaxed);
            block.sleeps.fetch_add(1, Relaxed);
            thread::yield_now();
        }
    });
    let result = call();
    DONE.store(true, Relaxed);
    worker.join().unwrap();
    result
}

#[test]
fn once_shows_what_happened_in_the_interval() {
    let chunk = Chunk::create(Ok).unwrap();
    let (block, quiet) = (connect(&chunk, "127.0.0.1:2001"), connect(&chunk, "127.0.0.1:2002"));
    let output = busy(block, || {
        let mut command = thallus(&["--once", "--json", "--interval", "0.2", "--filter", "127.0.0.1:200"]);
        command.stderr(Stdio::inherit()).output().unwrap()
    });
    assert!(output.status.success());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["interval_seconds"].as_f64().unwrap() >= 0.2);
    let ends: Vec<_> = report["connections"].as_array().unwrap().iter().collect();
    assert_eq!(
        ends.iter().map(|end| &end["local"]).collect::<Vec<_>>(),
        ["127.0.0.1:2001", "127.0.0.1:2002"]
    );

    let number = |name: &str| ends[0][name].as_f64().unwrap();
    let waits = number("waits_per_second");
    assert!(waits > 0.0, "{report:#}");
    // The counters are not looked at in one instant.
    assert!((number("received_per_second") / waits / 4096.0 - 1.0).abs() < 0.1, "{report:#}");
    assert!((number("spun") - 0.8).abs() < 0.1, "{report:#}");
    assert!((number("seconds_per_wait") * waits - 1.0).abs() < 1e-6);
    assert_eq!((number("sent_per_second"), &ends[0]["fabric"]), (0.0, &Value::from("shm")));
    assert_eq!((&ends[1]["received_per_second"], &ends[1]["spun"]), (&Value::from(0.0), &Value::Null));
    assert_eq!(quiet.sleeps.load(Relaxed), 0);
}

#[test]
fn a_terminal_shows_the_table_until_q_and_is_left_as_it_was() {
    let chunk = Chunk::create(Ok).unwrap();
    connect(&chunk, "127.0.0.1:2011");
    let size = Winsize { ws_row: 24, ws_col: 150, ws_xpixel: 0, ws_ypixel: 0 };
    let terminal = openpty(&size, None).unwrap();
    let side = || Stdio::from(terminal.slave.try_clone().unwrap());
    let mut command = thallus(&["--filter", "127.0.0.1:2011"]);
    let mut child = command.env("TERM", "xterm").stdin(side()).stdout(side()).stderr(side()).spawn().unwrap();
    drop(command);
    drop(terminal.slave);

    let mut master = File::from(terminal.master);
    let mut seen = String::new();
    let mut bytes = [0; 4096];
    let mut asked = false;
    // Once the other side is closed: EIO.
    while let Ok(count) = master.read(&mut bytes) {
        seen.push_str(&String::from_utf8_lossy(&bytes[..count]));
        if !asked && seen.contains("PER WAIT") && seen.contains("127.0.0.1:2011") {
            master.write_all(b"q").unwrap();
            asked = true;
        }
    }
    assert!(child.wait().unwrap().success(), "{seen}");
    assert!(asked, "{seen}");
    let (entered, left) = (seen.find("\u{1b}[?1049h").unwrap(), seen.find("\u{1b}[?1049l").unwrap());
    assert!(entered < left, "{seen}");
}

#[test]
fn a_signal_that_ends_it_leaves_the_terminal_as_it_was() {
    for signal in [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGINT] {
        let size = Winsize { ws_row: 24, ws_col: 150, ws_xpixel: 0, ws_ypixel: 0 };
        let terminal = openpty(&size, None).unwrap();
        let before = tcgetattr(&terminal.slave).unwrap();
        let side = || Stdio::from(terminal.slave.try_clone().unwrap());
        let mut command = thallus(&["--interval", "3600"]);
        let mut child =
            command.env("TERM", "xterm").stdin(side()).stdout(side()).stderr(side()).spawn().unwrap();
        let mut master = File::from(terminal.master);
        let mut seen = String::new();
        let mut bytes = [0; 4096];
        while !seen.contains("PER WAIT") {
            let count = master.read(&mut bytes).unwrap();
            seen.push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
        assert_ne!(tcgetattr(&terminal.slave).unwrap(), before);
        kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(signal as i32));
        assert_eq!(tcgetattr(&terminal.slave).unwrap(), before, "{signal}");
    }
}

#[test]
fn without_a_terminal_it_says_what_to_do() {
    let output = thallus(&[]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    assert_eq!(output.stderr, b"thallus: standard output is no terminal: use --once\n");
}

#[test]
fn wrong_arguments_have_status_2() {
    for arguments in [&["--interval", "0"][..], &["--interval", "x"], &["--json"], &["--sort", "colour"]] {
        assert_eq!(thallus(arguments).output().unwrap().status.code(), Some(2), "{arguments:?}");
    }
}

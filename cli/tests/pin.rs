//! `thallus pin` on an arena of this very process.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use thallus_transport::arena::{Block, Chunk, Role, State, flag};
use thallus_transport::reason::Reason;

fn pin(pid: u32, fd: u32, wait: &str) -> Output {
    let (pid, fd) = (pid.to_string(), fd.to_string());
    let mut command = Command::new(env!("CARGO_BIN_EXE_thallus"));
    command.args(["pin", "--pid", &pid, "--fd", &fd, "--wait", wait, "tcp"]).output().unwrap()
}

/// Until `pinning` has asked for the connection of `block`.
fn await_request(block: &Block, pinning: &mut Child) {
    while !block.is_unwanted() {
        assert_eq!(pinning.try_wait().unwrap(), None, "ended without a request");
        std::thread::yield_now();
    }
}

fn said(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn a_connection_that_has_not_left_tcp_stays_there() {
    let chunk = Chunk::create(Ok).unwrap();
    let block = chunk.allocate(Role::Client, std::process::id(), 2001, 1).unwrap();
    let output = pin(std::process::id(), 2001, "0");
    assert!(output.status.success(), "{output:?}");
    assert_eq!((block.state(), block.reason()), (State::Pinned, Reason::ByRequest));
    assert_eq!(output.stdout, b"on TCP\n");
}

#[test]
fn the_process_itself_takes_the_connection_back() {
    let chunk = Chunk::create(Ok).unwrap();
    let block = chunk.allocate(Role::Server, std::process::id(), 2002, 1).unwrap();
    assert!(block.advance(State::Plain, State::Active));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // As the library would in the next call.
            while !done.load(Ordering::SeqCst) {
                if block.take_request() {
                    block.raise(flag::RETURNED);
                }
                std::thread::yield_now();
            }
        });
        let output = pin(std::process::id(), 2002, "60");
        done.store(true, Ordering::SeqCst);
        assert!(output.status.success(), "{output:?}");
    });
    assert!(block.has(flag::RETURNED));
}

#[test]
fn a_process_that_makes_no_call_is_told_of() {
    let chunk = Chunk::create(Ok).unwrap();
    let block = chunk.allocate(Role::Server, std::process::id(), 2003, 1).unwrap();
    assert!(block.advance(State::Plain, State::Active));
    let output = pin(std::process::id(), 2003, "0");
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("not yet"), "{}", said(&output));
    assert!(block.is_unwanted(), "the request stands");
}

#[test]
fn what_is_not_there_is_named() {
    let chunk = Chunk::create(Ok).unwrap();
    chunk.allocate(Role::Server, std::process::id(), 2004, 1).unwrap();
    let output = pin(std::process::id(), 2005, "0");
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("has no connection 2005"), "{}", said(&output));
    assert_eq!(pin(std::process::id(), 2004, "-1").status.code(), Some(2));
    // Larger than any pid on Linux.
    let output = pin(5_000_000, 2004, "0");
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("there is no process 5000000"), "{}", said(&output));
}

#[test]
fn a_process_without_the_library_is_told_from_one_without_the_connection() {
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();
    let output = pin(child.id(), 3, "0");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("runs without the library"), "{}", said(&output));
}

#[test]
fn the_next_connection_in_the_same_place_is_left_alone() {
    let chunk = Chunk::create(Ok).unwrap();
    let first = chunk.allocate(Role::Server, std::process::id(), 2006, 1).unwrap();
    assert!(first.advance(State::Plain, State::Active));
    let mut command = Command::new(env!("CARGO_BIN_EXE_thallus"));
    command.args(["pin", "--pid", &std::process::id().to_string(), "--fd", "2006", "--wait", "60", "tcp"]);
    let mut pinning = command.stderr(Stdio::piped()).spawn().unwrap();
    await_request(first, &mut pinning);
    chunk.free(first, first.connection().unwrap());
    let second = chunk.allocate(Role::Server, std::process::id(), 2006, 2).unwrap();
    assert!(std::ptr::eq(first, second));
    assert!(second.advance(State::Plain, State::Active));
    let output = pinning.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("has closed connection 2006"), "{}", said(&output));
    assert!(!second.is_unwanted());
}

#[test]
fn of_several_connections_none_is_guessed() {
    let chunk = Chunk::create(Ok).unwrap();
    let blocks =
        [1, 2].map(|opened_ns| chunk.allocate(Role::Server, std::process::id(), 2007, opened_ns).unwrap());
    let output = pin(std::process::id(), 2007, "0");
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("several connections as 2007"), "{}", said(&output));
    assert!(blocks.iter().all(|block| block.state() == State::Plain));
}

#[test]
fn a_process_that_ends_is_not_waited_for() {
    let chunk = Chunk::create(Ok).unwrap();
    // So that this child alone has it: other tests make theirs meanwhile.
    let arena = Stdio::from(chunk.fd().unwrap().try_clone_to_owned().unwrap());
    let mut child = Command::new("sleep").arg("600").stdin(arena).spawn().unwrap();
    let block = chunk.allocate(Role::Server, child.id(), 2008, 1).unwrap();
    assert!(block.advance(State::Plain, State::Active));
    let mut command = Command::new(env!("CARGO_BIN_EXE_thallus"));
    command.args(["pin", "--pid", &child.id().to_string(), "--fd", "2008", "--wait", "86400", "tcp"]);
    let mut pinning = command.stderr(Stdio::piped()).spawn().unwrap();
    await_request(block, &mut pinning);
    child.kill().unwrap();
    // Not waited for yet: a zombie has ended, too.
    let output = pinning.wait_with_output().unwrap();
    child.wait().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("has ended"), "{}", said(&output));
}

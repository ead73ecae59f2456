//! `thallus status` on arenas of this very process and its children.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd, pread, pwrite, write};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use thallus_transport::arena::{BLOCKS, Block, CHUNK_BYTES, Chunk, MEMFD_NAME, Role, State, flag};
use thallus_transport::reason::Reason;
use thallus_transport::unix::Name;

fn thallus(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_thallus"));
    command.arg("status").args(arguments);
    command
}

fn text(command: &mut Command) -> String {
    let output = command.stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

fn report() -> Value {
    serde_json::from_str(&text(&mut thallus(&["--json"]))).unwrap()
}

/// This process's connections in a report whose local address is `local`: other tests have theirs.
fn at<'report>(report: &'report Value, local: &str) -> Vec<&'report Value> {
    of(own_pid(), report, local)
}

fn of<'report>(pid: u32, report: &'report Value, local: &str) -> Vec<&'report Value> {
    let connections = report["connections"].as_array().unwrap();
    connections.iter().filter(|connection| connection["pid"] == pid && connection["local"] == local).collect()
}

fn own_pid() -> u32 {
    std::process::id()
}

fn own_name() -> String {
    std::fs::read_to_string("/proc/self/comm").unwrap().trim_end().to_owned()
}

/// `CLOCK_BOOTTIME` `seconds` ago, in nanoseconds.
fn ago(seconds: u64) -> u64 {
    u64::try_from(clock_gettime(ClockId::Boottime).tv_sec).unwrap().saturating_sub(seconds) * 1_000_000_000
}

fn connect(chunk: &Chunk, role: Role, pid: u32, local: &str) -> &'static Block {
    let block = chunk.allocate(role, pid, 9, ago(90)).unwrap();
    block.set_addresses(local.parse().unwrap(), "127.0.0.1:5432".parse().unwrap());
    block
}

#[test]
fn a_connection_over_shared_memory_is_shown_with_all_its_numbers() {
    let chunk = Chunk::create(Ok).unwrap();
    let block = connect(&chunk, Role::Client, own_pid(), "127.0.0.1:1001");
    block.raise(flag::READY);
    block.tcp_sent.store(1, Relaxed);
    block.tcp_received.store(2, Relaxed);
    block.ring_sent.store(30, Relaxed);
    block.ring_received.store(40, Relaxed);
    block.doorbells.store(4, Relaxed);
    block.chimes.store(1, Relaxed);
    block.sleeps.store(6, Relaxed);
    block.spin_hits.store(7, Relaxed);

    let report = report();
    let mut found: Vec<_> = at(&report, "127.0.0.1:1001").into_iter().cloned().collect();
    assert_eq!(found.len(), 1, "{report:#}");
    let age = found[0].as_object_mut().unwrap().remove("age_seconds").unwrap().as_f64().unwrap();
    assert!(age >= 89.0, "{age}");
    let expected = json!({
        "pid": own_pid(), "command": own_name(), "fd": 9, "role": "client",
        "local": "127.0.0.1:1001", "peer": "127.0.0.1:5432", "fabric": "shm", "reason": null,
        "bytes_sent": 31, "bytes_received": 42,
        "ring_bytes_sent": 30, "ring_bytes_received": 40, "tcp_bytes_sent": 1, "tcp_bytes_received": 2,
        "doorbells_sent": 5, "sleeps": 6, "spin_hits": 7,
    });
    assert_eq!(found[0], expected);

    let processes = report["processes"].as_array().unwrap();
    let own: Vec<_> = processes.iter().filter(|process| process["pid"] == own_pid()).collect();
    assert_eq!(own.len(), 1);
    assert_eq!(own[0]["command"], own_name());
    assert!(own[0]["connections"].as_u64().unwrap() >= 1);
}

#[test]
fn one_direction_over_the_ring_is_enough_to_be_shm() {
    let chunk = Chunk::create(Ok).unwrap();
    connect(&chunk, Role::Server, own_pid(), "127.0.0.1:1011").recv_switched.store(1, Relaxed);
    connect(&chunk, Role::Server, own_pid(), "127.0.0.1:1012").send_switched.store(1, Relaxed);
    let report = report();
    for local in ["127.0.0.1:1011", "127.0.0.1:1012"] {
        assert_eq!(at(&report, local)[0]["fabric"], "shm");
    }
}

#[test]
fn a_unix_connection_shows_its_servers_name_where_the_server_is() {
    let chunk = Chunk::create(Ok).unwrap();
    let connect = |role, name: &[u8]| {
        let block = chunk.allocate(role, own_pid(), 9, ago(1)).unwrap();
        block.raise(flag::UNIX);
        block.set_name(Name::of(name).as_ref());
        block
    };
    connect(Role::Server, b"/tmp/1081");
    connect(Role::Client, b"\0name of 1082").raise(flag::READY);
    connect(Role::Server, b"\0\x1b[31m1083");
    let report = report();
    let server = at(&report, "/tmp/1081");
    assert_eq!((server.len(), &server[0]["peer"], &server[0]["fabric"]), (1, &json!(null), &json!("unix")));
    let client = json!("@name of 1082");
    let connections = report["connections"].as_array().unwrap();
    let client = connections.iter().find(|connection| connection["peer"] == client).unwrap();
    assert_eq!((&client["local"], &client["fabric"]), (&json!(null), &json!("shm")));
    // A program may give its socket any name.
    let table = text(&mut thallus(&[]));
    assert!(table.contains("@?[31m1083") && !table.contains('\x1b'), "{table}");
}

#[test]
fn a_connection_that_come_back_is_over_tcp() {
    let chunk = Chunk::create(Ok).unwrap();
    let blocks = ["127.0.0.1:1071", "127.0.0.1:1072"].map(|local| {
        let block = connect(&chunk, Role::Server, own_pid(), local);
        assert!(block.advance(State::Plain, State::Active));
        block.raise(flag::READY);
        block.come_back();
        block
    });
    blocks[1].note(Reason::ByRequest);
    let report = report();
    for (local, reason) in [("127.0.0.1:1071", "returned"), ("127.0.0.1:1072", "by-request")] {
        let end = at(&report, local)[0];
        assert_eq!((&end["fabric"], &end["reason"]), (&json!("tcp"), &json!(reason)));
    }
}

#[test]
fn a_connection_over_tcp_is_shown_with_its_reason() {
    let chunk = Chunk::create(Ok).unwrap();
    connect(&chunk, Role::Server, own_pid(), "127.0.0.1:1021").pin(Reason::UnsupportedCall);
    connect(&chunk, Role::Server, own_pid(), "[::1]:1022");
    // Accepted a moment ago: no address yet.
    chunk.allocate(Role::Client, own_pid(), 77, ago(0)).unwrap();

    let report = report();
    assert_eq!(at(&report, "127.0.0.1:1021")[0]["fabric"], "tcp");
    assert_eq!(at(&report, "127.0.0.1:1021")[0]["reason"], "unsupported-call");
    assert_eq!(at(&report, "[::1]:1022")[0]["reason"], "short");
    let mut connections = report["connections"].as_array().unwrap().iter();
    let unknown = connections.find(|end| end["pid"] == own_pid() && end["fd"] == 77).unwrap();
    assert_eq!((&unknown["local"], &unknown["peer"]), (&Value::Null, &Value::Null));
}

#[test]
fn addresses_that_the_library_has_not_asked_for_are_the_kernels() {
    for host in ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"] {
        let chunk = Chunk::create(Ok).unwrap();
        let listener = TcpListener::bind(format!("{host}:0")).unwrap();
        let client = high(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let server = high(listener.accept().unwrap().0);
        let ends = [(&client, Role::Client), (&server, Role::Server)];
        for (end, role) in ends {
            chunk.allocate(role, own_pid(), fd(end), ago(0)).unwrap().pin(Reason::NotSelected);
        }
        // Not connected.
        let listener = high(listener);
        chunk.allocate(Role::Client, own_pid(), fd(&listener), ago(0)).unwrap();
        let report = report();
        let text =
            |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port()).to_string();
        for (end, _) in ends {
            let local = text(end.local_addr().unwrap());
            let found = at(&report, &local);
            assert_eq!(found.len(), 1, "{report:#}");
            assert_eq!(found[0]["peer"], text(end.peer_addr().unwrap()));
            assert_eq!((&found[0]["fd"], &found[0]["reason"]), (&json!(fd(end)), &json!("not-selected")));
        }
        assert!(
            at(&report, &text(listener.local_addr().unwrap())).iter().all(|end| end["fd"] != fd(&listener))
        );

        // One of the two has closed it, and has a copy.
        chunk.allocate(Role::Client, own_pid(), fd(&client), ago(90)).unwrap();
        assert!(at(&crate::report(), &text(client.local_addr().unwrap())).is_empty());
    }
}

/// The socket by a number that no other test has its connections at.
fn high<Socket: AsFd + From<OwnedFd>>(socket: Socket) -> Socket {
    fcntl_dupfd_cloexec(&socket, 500).unwrap().into()
}

fn fd(socket: &impl AsRawFd) -> u32 {
    socket.as_raw_fd().cast_unsigned()
}

#[test]
fn an_arena_shared_by_forks_is_shown_once_and_its_dead_owners_not_at_all() {
    let chunk = Chunk::create(Ok).unwrap();
    fcntl_setfd(chunk.fd().unwrap(), FdFlags::empty()).unwrap();
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();
    fcntl_setfd(chunk.fd().unwrap(), FdFlags::CLOEXEC).unwrap();
    // Lives, but has nothing to do with the arena: someone got a dead owner's pid.
    let mut stranger = Command::new("sleep").arg("600").spawn().unwrap();

    connect(&chunk, Role::Server, child.id(), "127.0.0.1:1031");
    connect(&chunk, Role::Server, stranger.id(), "127.0.0.1:1032");
    let alive = report();
    child.kill().unwrap();
    child.wait().unwrap();
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    let dead = report();

    let found = of(child.id(), &alive, "127.0.0.1:1031");
    assert_eq!(found.len(), 1, "{alive:#}");
    assert_eq!(found[0]["command"], "sleep");
    assert!(of(stranger.id(), &alive, "127.0.0.1:1032").is_empty());
    assert!(of(child.id(), &dead, "127.0.0.1:1031").is_empty());
}

#[test]
fn a_process_that_only_looks_at_an_arena_is_not_shown() {
    let chunk = Chunk::create(Ok).unwrap();
    connect(&chunk, Role::Server, own_pid(), "127.0.0.1:1081");
    let link = format!("/proc/self/fd/{}", chunk.fd().unwrap().as_raw_fd());
    let child = |writes| {
        let file = File::options().read(true).write(writes).open(&link).unwrap();
        Command::new("sleep").arg("600").stdin(file).spawn().unwrap()
    };
    let mut children = [false, true].map(child);
    let processes = report()["processes"].as_array().unwrap().clone();
    let shown = children.each_ref().map(|child| processes.iter().any(|process| process["pid"] == child.id()));
    for child in &mut children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert_eq!(shown, [false, true]);
}

#[test]
fn a_closed_connection_is_not_shown() {
    let chunk = Chunk::create(Ok).unwrap();
    let block = connect(&chunk, Role::Client, own_pid(), "127.0.0.1:1041");
    assert_eq!(at(&report(), "127.0.0.1:1041").len(), 1);
    chunk.free(block, block.connection().unwrap());
    assert!(at(&report(), "127.0.0.1:1041").is_empty());
}

#[test]
fn an_arena_of_another_version_is_counted_and_not_shown() {
    let arena = memfd_create(MEMFD_NAME, MemfdFlags::CLOEXEC).unwrap();
    assert_eq!(write(&arena, b"another"), Ok(7));
    let table = text(&mut thallus(&[]));
    assert!(report()["other_versions"].as_u64().unwrap() >= 1);
    assert!(table.contains("another version of the library"), "{table}");
}

#[test]
fn an_arena_costs_no_memory_for_what_was_never_written_to() {
    // In use, all of them, if one believes the bitmap.
    let model = Chunk::create(Ok).unwrap();
    let mut header = vec![0; 64];
    assert_eq!(pread(model.fd().unwrap(), &mut header[..], 0), Ok(64));
    header.resize(64 + BLOCKS / 8, 0xff);
    let arena = memfd_create(MEMFD_NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&arena, CHUNK_BYTES as u64).unwrap();
    fcntl_add_seals(&arena, SealFlags::SHRINK).unwrap();
    assert_eq!(pwrite(&arena, &header, 0), Ok(header.len()));
    let report = report();
    assert!(report["arenas_not_shown"].is_u64(), "{report:#}");
    assert!(report["processes"].as_array().unwrap().iter().any(|process| process["pid"] == own_pid()));
    // The header's page.
    assert_eq!(fstat(&arena).unwrap().st_blocks, 8);
}

#[test]
fn the_table_has_a_line_for_each_end_and_a_summary() {
    let chunk = Chunk::create(Ok).unwrap();
    connect(&chunk, Role::Client, own_pid(), "127.0.0.1:1051").raise(flag::READY);
    connect(&chunk, Role::Client, own_pid(), "127.0.0.1:1052").pin(Reason::PeerWithoutThallus);
    let table = text(&mut thallus(&[]));
    let start = format!("{} ", own_pid());
    let own = |line: &&str| line.trim_start().starts_with(&start);
    // Columns are as wide as the connections of the whole machine need.
    let line = |local: &str| {
        let line = table.lines().filter(own).find(|line| line.contains(local)).unwrap();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert!(table.lines().next().unwrap().trim_start().starts_with("PID  COMMAND"), "{table}");
    assert!(line("127.0.0.1:1051").contains("127.0.0.1:5432 shm "), "{table}");
    assert!(line("127.0.0.1:1052").contains("tcp: peer-without-thallus"), "{table}");
    assert!(table.contains(" connection ends in ") && table.contains(" over shared memory, "), "{table}");
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let chunk = Chunk::create(Ok).unwrap();
    connect(&chunk, Role::Client, own_pid(), "127.0.0.1:1061");
    let mut child = thallus(&[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(output.stderr, b"");
}

#[test]
fn a_process_may_have_more_arenas_than_this_one_descriptors() {
    let chunks = [(); 20].map(|()| Chunk::create(Ok).unwrap());
    for chunk in &chunks {
        connect(chunk, Role::Client, own_pid(), "127.0.0.1:1009");
    }
    let mut shell = Command::new("sh");
    let few = shell.args(["-c", "ulimit -n 16; exec \"$0\" status --json", env!("CARGO_BIN_EXE_thallus")]);
    let report: Value = serde_json::from_str(&text(few)).unwrap();
    assert_eq!(at(&report, "127.0.0.1:1009").len(), 20);
}

#[test]
fn who_has_too_few_descriptors_to_look_says_so() {
    let _chunk = Chunk::create(Ok).unwrap();
    let mut shell = Command::new("sh");
    // What another test lets its children have might leave it none to start with.
    shell.args(["-c", "exec 3>&- 4>&-; ulimit -n 5; exec \"$0\" status", env!("CARGO_BIN_EXE_thallus")]);
    let output = shell.output().unwrap();
    let expected = "thallus: can't read /proc: Too many open files (os error 24)\n";
    assert_eq!(
        (output.status.code(), String::from_utf8(output.stderr).unwrap()),
        (Some(1), expected.to_owned())
    );
    assert_eq!(output.stdout, b"");
}

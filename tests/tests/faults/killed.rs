//! `kill -9` of real servers and clients while they are busy: nobody hangs, and whoever is left goes on.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use thallus_tests::harness::{Postgres, Scene, Service, free_port, program, turn};

pub(super) fn kill(pid: u32) -> Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).context("a pid")?;
    kill_process(pid, Signal::KILL).context("kill")
}

/// A server with pgbench's tables, and pgbench at work on it.
fn busy(scene: &Scene) -> Result<(Postgres, Service)> {
    let server = Postgres::start(scene, true)?;
    let mut init = server.observer(scene, "pgbench")?;
    init.args(["-i", "-q"]);
    scene.succeed(init)?;
    let mut command = server.client(scene, true, "client", "pgbench")?;
    command.args(["-n", "-c", "4", "-j", "2", "-T", "600"]);
    let mut bench = scene.start("pgbench", command)?;
    bench.await_ready(|| {
        server
            .ask(scene, "select count(*) from pgbench_history")
            .is_ok_and(|count| count.parse().is_ok_and(|count: u32| count > 50))
    })?;
    Ok((server, bench))
}

/// Waits until a process that must end has done so.
fn ends(scene: &Scene, mut service: Service, what: &str) -> Result<String> {
    let name = scene.path("pgbench.log");
    let start = Instant::now();
    while service.ended()?.is_none() {
        ensure!(start.elapsed() < Duration::from_secs(60), "{what} hangs\n{}", service.diagnosis());
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(std::fs::read_to_string(name)?)
}

/// The server does useful work for a new client, over shared memory.
fn serves_again(scene: &Scene, server: &Postgres) -> Result<()> {
    let start = Instant::now();
    while server.ask(scene, "select 1").is_err() {
        ensure!(start.elapsed() < Duration::from_secs(60), "the server does not recover\n{}", server.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut bench = server.client(scene, true, "again", "pgbench")?;
    bench.args(["-n", "-c", "4", "-t", "100"]);
    scene.succeed(bench)?;
    let stats = scene.stats("again")?;
    ensure!(stats.over_shared_memory() >= 4, "{stats:?}");
    Ok(())
}

#[test]
fn a_backend() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let (server, bench) = busy(&scene)?;
    let backend =
        server.ask(&scene, "select pid from pg_stat_activity where application_name = 'pgbench' limit 1")?;
    kill(backend.parse()?)?;
    // The postmaster restarts all backends; each of pgbench's clients sees its connection end.
    let printed = ends(&scene, bench, "pgbench")?;
    ensure!(printed.contains("Run was aborted"), "{printed}");
    serves_again(&scene, &server)?;
    server.stop()?;
    Ok(())
}

#[test]
fn the_postmaster() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let (server, bench) = busy(&scene)?;
    kill(server.pid())?;
    // Its backends notice when they next look, and end.
    let printed = ends(&scene, bench, "pgbench")?;
    ensure!(printed.contains("connection") || printed.contains("terminat"), "{printed}");
    let start = Instant::now();
    while !server.processes().is_empty() {
        ensure!(start.elapsed() < Duration::from_secs(60), "processes are left: {:?}", server.processes());
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

#[test]
fn a_client() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let (server, bench) = busy(&scene)?;
    kill(bench.pid())?;
    ends(&scene, bench, "pgbench")?;
    let start = Instant::now();
    while server.ask(&scene, "select count(*) from pg_stat_activity where application_name = 'pgbench'")?
        != "0"
    {
        ensure!(
            start.elapsed() < Duration::from_secs(60),
            "backends stay without their client\n{}",
            server.diagnosis()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    serves_again(&scene, &server)?;
    let sums = server.ask(
        &scene,
        "select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history)",
    )?;
    assert_eq!(sums, "t", "half a transaction was kept");
    server.stop()?;
    Ok(())
}

#[test]
fn a_redis_server() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let port = free_port()?.to_string();
    let mut command = scene.shimmed("server", program("redis-server", "redis-server")?)?;
    command.args(["--port", &port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
    let mut server = scene.start("redis", command)?;
    server.await_port(port.parse()?)?;
    let mut command = scene.shimmed("client", program("redis-cli", "redis-tools")?)?;
    // Each answer takes a while, so that the client is waiting when its server dies.
    command.args(["-h", "127.0.0.1", "-p", &port, "-r", "1000000", "incr", "counter"]);
    let mut client = scene.start("pgbench", command)?;
    let log = scene.path("pgbench.log");
    client.await_ready(|| std::fs::read_to_string(&log).is_ok_and(|text| text.lines().count() > 200))?;
    kill(server.pid())?;
    let printed = ends(&scene, client, "redis-cli")?;
    // Every answer but a last, broken one is the next number.
    let numbers: Vec<u64> = printed.lines().map_while(|line| line.parse().ok()).collect();
    assert!(numbers.iter().zip(1..).all(|(&number, wanted)| number == wanted), "{numbers:?}");
    Ok(())
}

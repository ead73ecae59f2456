//! `kill -9` at random points, again and again: of servers, of what they have forked, and of clients, while they connect, leave
//! TCP and are busy. Whoever is left ends, or goes on; and nothing is left behind.
//!
//! `KILLS` says how many, `KILLS_SEED` which.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use rustix::thread::UnshareFlags;
use thallus_tests::calls::is_root;
use thallus_tests::harness::{Postgres, Scene, Service, program, report, turn};

use super::killed::kill;
use super::leftovers::shared_memory_files;

/// How long whoever is left may take to notice.
const PATIENCE: Duration = Duration::from_secs(60);

/// A victim lives so long after the load has been started, or is there, at most.
const LONGEST_LIFE: Duration = Duration::from_millis(200);

#[test]
fn at_random_points() -> Result<()> {
    let _turn = turn();
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().context(name)).transpose();
    let kills = number("KILLS")?.unwrap_or(20);
    let seed = number("KILLS_SEED")?.unwrap_or_else(|| u64::from(std::process::id()));
    println!("KILLS={kills} KILLS_SEED={seed}");
    ensure!(is_root(), "only root can make a network namespace");
    let before = shared_memory_files()?;
    let start = Instant::now();
    // Names are looked for in a network namespace of their own, where no other test's are.
    let sums = std::thread::spawn(move || -> Result<[Sums; 2]> {
        // SAFETY: a new network namespace, of this thread and those that it starts, breaks no promise of safe code.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.context("unshare")?;
        let scene = Scene::new()?;
        let mut up = scene.plain("ip");
        up.args(["link", "set", "lo", "up"]);
        scene.succeed(up).context("ip is needed: install iproute2")?;
        // PostgreSQL takes longer to get up again.
        let of_postgres = kills * 2 / 5;
        let postgres = std::thread::spawn(move || kills_of_postgres(of_postgres, Chance(seed)));
        let redis = kills_of_redis(kills - of_postgres, Chance(!seed));
        let postgres = postgres.join().map_err(|_| anyhow::anyhow!("the thread panicked"))?;
        let sums = [redis?, postgres?];
        let names = fs::read_to_string("/proc/thread-self/net/unix")?;
        ensure!(!names.contains("thallus"), "names are left:\n{names}");
        Ok(sums)
    });
    let sums = sums.join().map_err(|_| anyhow::anyhow!("the thread panicked"))??;
    let left: Vec<_> = shared_memory_files()?.difference(&before).cloned().collect();
    ensure!(left.iter().all(|file| !file.contains("thallus")), "files are left: {left:?}");
    println!("{:?}: {sums:#?}", start.elapsed());
    let killed: u64 = sums.iter().flat_map(|sums| sums.killed.values()).sum();
    assert_eq!(killed, kills);
    // Of those that were left, which alone can tell.
    for Sums { upgraded, killed, .. } in &sums {
        assert!(*upgraded >= killed.values().sum(), "{sums:?}");
    }
    Ok(())
}

/// What was killed, and ends of connections that had left TCP.
#[derive(Debug, Default)]
struct Sums {
    killed: BTreeMap<&'static str, u64>,
    upgraded: u64,
}

impl Sums {
    fn add(&mut self, victim: &'static str) {
        *self.killed.entry(victim).or_default() += 1;
    }
}

/// Random numbers: splitmix64.
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }

    /// Lets the load run for a while: from its start, or from when it is there.
    fn wait(&mut self, load: &Service, is_there: impl FnMut() -> bool) -> Result<()> {
        if self.below(2) == 0 {
            soon("there is no load", || load.diagnosis(), is_there)?;
        }
        std::thread::sleep(Duration::from_nanos(self.below(LONGEST_LIFE.as_nanos() as u64)));
        Ok(())
    }
}

/// Waits until something holds that must.
pub(super) fn soon(what: &str, seen: impl Fn() -> String, mut holds: impl FnMut() -> bool) -> Result<()> {
    let start = Instant::now();
    while !holds() {
        ensure!(start.elapsed() < PATIENCE, "{what}\n{}", seen());
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Waits until a program that has lost its peer has ended; what it printed.
pub(super) fn ends(mut service: Service, what: &str) -> Result<String> {
    let start = Instant::now();
    while service.ended()?.is_none() {
        ensure!(start.elapsed() < PATIENCE, "{what} hangs\n{}", service.diagnosis());
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(service.log())
}

/// Descriptors that are this high are the library's.
const HIGH: u32 = 512;

/// Descriptors and mappings of a process, of which it must not get more with every peer that is killed. But for one set and one timer of
/// the library's, which are made when an event loop, or one of several threads that write, sleeps for the first time.
pub(super) fn holds(pid: u32) -> (usize, usize) {
    let open: Vec<_> =
        fs::read_dir(format!("/proc/{pid}/fd")).map_or(Vec::new(), |entries| entries.flatten().collect());
    let is_high = |name: &str| name.parse::<u32>().is_ok_and(|fd| fd >= HIGH);
    let high: Vec<_> = open.iter().filter(|entry| entry.file_name().to_str().is_some_and(is_high)).collect();
    let has = |kind: &str| {
        let is_one = |path| fs::read_link(path).is_ok_and(|link| link.as_os_str() == kind);
        usize::from(high.iter().any(|entry| is_one(entry.path())))
    };
    let made_late = has("anon_inode:[eventpoll]") + has("anon_inode:[timerfd]");
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    (open.len() - made_late, maps.lines().filter(|line| line.contains("thallus")).count())
}

/// A process that outlives its peers, and what it had after the first of them.
struct Survivor {
    pid: u32,
    had: (usize, usize),
}

impl Survivor {
    /// One that has served a connection that left TCP, and has none.
    fn new(pid: u32) -> Self {
        Self { pid, had: holds(pid) }
    }

    /// It has no peer any more, or not for long.
    fn is_as_before(&self) -> Result<()> {
        let Self { pid, had } = *self;
        let seen = || format!("had {had:?}, has {:?}", holds(pid));
        soon("descriptors or mappings are left", seen, || {
            let has = holds(pid);
            has.0 <= had.0 && has.1 <= had.1
        })
    }
}

/// In a namespace of its own any will do.
const REDIS_PORT: u16 = 6379;

/// A server that has had a client.
fn start_redis(scene: &Scene) -> Result<(Service, Survivor)> {
    let mut command = scene.shimmed("server", program("redis-server", "redis-server")?)?;
    command.args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--port"]);
    command.arg(REDIS_PORT.to_string());
    let mut server = scene.start("redis", command)?;
    server.await_port(REDIS_PORT)?;
    serves_one(scene, &server)?;
    let survivor = Survivor::new(server.pid());
    Ok((server, survivor))
}

/// Lets it serve a client that leaves TCP and ends by itself, so that its end of the connection is counted, and waits until nobody is
/// connected.
fn serves_one(scene: &Scene, server: &Service) -> Result<()> {
    let mut client = scene.shimmed("client", program("redis-cli", "redis-tools")?)?;
    client.args(["-h", "127.0.0.1", "-p", &REDIS_PORT.to_string(), "-r", "100", "incr", "first"]);
    scene.succeed(client)?;
    soon("the server has clients", || server.diagnosis(), || connections_to(REDIS_PORT) == 0)
}

/// Work without end.
const NEVER: &str = "1000000000";

fn kills_of_redis(kills: u64, mut chance: Chance) -> Result<Sums> {
    let scene = Scene::new()?;
    fs::write(scene.path("redis_load.py"), include_str!("redis_load.py"))?;
    let mut sums = Sums::default();
    let (mut server, mut survivor) = start_redis(&scene)?;
    for _ in 0..kills {
        let redis = |name: &str, arguments: &[&str]| -> Result<Service> {
            let mut command = scene.shimmed("client", program(name, "redis-tools")?)?;
            command.args(["-h", "127.0.0.1", "-p", &REDIS_PORT.to_string()]).args(arguments);
            scene.start(name, command)
        };
        let mut command = scene.shimmed("client", program("python3", "python3")?)?;
        command.args([
            "redis_load.py",
            &REDIS_PORT.to_string(),
            ["8", "3000", "300000"][chance.below(3) as usize],
        ]);
        let load = scene.start("load", command)?;
        let counter = redis("redis-cli", &["-r", NEVER, "incr", "counter"])?;
        let victim = ["redis-server", "redis-cli", "redis-benchmark", "Python"][chance.below(4) as usize];
        sums.add(victim);
        let mut bench = None;
        if victim == "redis-benchmark" {
            // Where there is nothing else to be killed: if a write fails, it tries again for ever, also over TCP.
            let pipeline = ["1", "16"][chance.below(2) as usize];
            let much = ["-q", "-c", "4", "-n", NEVER, "-t", "set,get", "-P", pipeline, "-d", "3000"];
            bench = Some(redis("redis-benchmark", &much)?);
        }
        chance.wait(&load, || connections_to(REDIS_PORT) > 4)?;
        match (victim, bench) {
            ("redis-server", _) => {
                kill(server.pid())?;
                in_order(&ends(counter, "redis-cli")?)?;
                let printed = ends(load, "redis_load.py")?;
                let expected = ["EOF", "ECONNRESET", "EPIPE", "ECONNREFUSED"];
                let all =
                    printed.lines().count() == 4 && printed.lines().all(|line| expected.contains(&line));
                ensure!(all, "{printed}");
                drop(server);
                (server, survivor) = start_redis(&scene)?;
                continue;
            }
            ("redis-cli", _) => {
                kill(counter.pid())?;
                in_order(&ends(counter, "redis-cli")?)?;
                goes_on(load)?;
            }
            (_, Some(bench)) => {
                kill(bench.pid())?;
                ends(bench, "redis-benchmark")?;
                goes_on(load)?;
                still_counts(counter, &server)?;
            }
            _ => {
                kill(load.pid())?;
                ends(load, "redis_load.py")?;
                still_counts(counter, &server)?;
            }
        }
        // After a server that is killed, as after any other: the dice may leave nobody else to tell what has left TCP.
        serves_one(&scene, &server)?;
        survivor.is_as_before()?;
    }
    server.stop(Signal::TERM)?;
    sums.upgraded = scene.stats("server")?.over_shared_memory() + scene.stats("client")?.over_shared_memory();
    Ok(sums)
}

/// Ends it; none of its connections had.
fn goes_on(load: Service) -> Result<()> {
    ensure!(load.log().is_empty(), "{}", load.log());
    load.stop(Signal::TERM)?;
    Ok(())
}

/// Ends it; another client's death is nothing to it.
fn still_counts(counter: Service, server: &Service) -> Result<()> {
    let lines = || counter.log().lines().count();
    let before = lines();
    let seen = || format!("{}\n{}", server.diagnosis(), counter.diagnosis());
    soon("redis-cli stands still", seen, || lines() > before)?;
    in_order(&counter.log())?;
    counter.stop(Signal::TERM)?;
    Ok(())
}

/// Every answer but a last, broken one is the next number.
fn in_order(printed: &str) -> Result<()> {
    let mut numbers = printed.lines().map_while(|line| line.parse::<u64>().ok()).peekable();
    let first = numbers.peek().copied().unwrap_or(0);
    for (number, wanted) in numbers.zip(first..) {
        ensure!(number == wanted, "{number} in the place of {wanted}");
    }
    Ok(())
}

/// Ends of connections at a server's `port` in this namespace that are not closed.
fn connections_to(port: u16) -> usize {
    let table = fs::read_to_string("/proc/thread-self/net/tcp").unwrap_or_default();
    // The local address, and the states ESTABLISHED and CLOSE_WAIT.
    let is_open = |line: &&str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        fields.get(1).is_some_and(|local| local.ends_with(&format!(":{port:04X}")))
            && fields.get(3).is_some_and(|state| matches!(*state, "01" | "08"))
    };
    table.lines().filter(is_open).count()
}

/// The backends of a server that have come over TCP.
fn backends(server: &Postgres) -> Vec<u32> {
    let title = |pid: u32| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let serves = |&pid: &u32| String::from_utf8_lossy(&title(pid)).contains("127.0.0.1(");
    server.processes().into_iter().filter(serves).collect()
}

/// A server's postmaster after a client.
fn first_client(scene: &Scene, server: &Postgres) -> Result<Survivor> {
    let mut client = server.client(scene, true, "client", "pgbench")?;
    client.args(["-n", "-S", "-t", "30"]);
    scene.succeed(client)?;
    soon("backends are left", || server.diagnosis(), || backends(server).is_empty())?;
    Ok(Survivor::new(server.pid()))
}

fn kills_of_postgres(kills: u64, mut chance: Chance) -> Result<Sums> {
    let scene = Scene::new()?;
    let mut sums = Sums::default();
    let mut server = Postgres::start(&scene, true)?;
    let mut init = server.observer(&scene, "pgbench")?;
    init.args(["-i", "-q"]);
    scene.succeed(init)?;
    let mut survivor = first_client(&scene, &server)?;
    for _ in 0..kills {
        let victim = ["a backend", "pgbench", "the postmaster"][chance.below(3) as usize];
        sums.add(victim);
        let mut command = server.client(&scene, true, "client", "pgbench")?;
        command.args(["-n", "-c", "4", "-j", "2", "-T", "600"]);
        // Who makes a connection for each transaction may find the server up again, and go on.
        let loads: [&[&str]; 4] = [&["-S"], &["-M", "prepared"], &[], &["-C", "-S"]];
        let some = if victim == "a backend" { 3 } else { 4 };
        command.args(loads[chance.below(some) as usize]);
        let mut bench = scene.start("pgbench", command)?;
        chance.wait(&bench, || !backends(&server).is_empty())?;
        match victim {
            "a backend" => {
                let start = Instant::now();
                // Those of short connections may be gone before they are killed.
                loop {
                    let serving = backends(&server);
                    let chosen = serving.get(chance.below(serving.len().max(1) as u64) as usize);
                    if chosen.is_some_and(|&pid| kill(pid).is_ok()) {
                        break;
                    }
                    ensure!(start.elapsed() < PATIENCE && bench.ended()?.is_none(), "{}", bench.diagnosis());
                }
                let printed = ends(bench, "pgbench")?;
                ensure!(printed.contains("aborted") || printed.contains("connection"), "{printed}");
            }
            "pgbench" => {
                kill(bench.pid())?;
                ends(bench, "pgbench")?;
            }
            _ => {
                kill(server.pid())?;
                ends(bench, "pgbench")?;
                let left = || server.processes().into_iter().map(report).collect();
                soon("processes are left", left, || server.processes().is_empty())?;
                drop(server);
                server = Postgres::start_again(&scene, true)?;
                survivor = first_client(&scene, &server)?;
                continue;
            }
        }
        let left = || backends(&server).into_iter().map(report).collect();
        soon("backends are left", left, || backends(&server).is_empty())?;
        soon("the server does not recover", || server.log(), || server.ask(&scene, "select 1").is_ok())?;
        survivor.is_as_before()?;
    }
    let sums_agree = server.ask(
        &scene,
        "select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history)",
    )?;
    ensure!(matches!(&*sums_agree, "t" | ""), "half a transaction was kept");
    server.stop()?;
    sums.upgraded = scene.stats("server")?.over_shared_memory() + scene.stats("client")?.over_shared_memory();
    Ok(sums)
}

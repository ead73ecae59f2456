//! Redis with redis-cli and redis-benchmark.

use std::fs::{self, File};
use std::process::Command;

use anyhow::{Result, ensure};
use rustix::process::Signal;
use thallus_tests::harness::{Scene, Service, Stats, TOO_SHORT, free_port, program, turn};

struct Redis {
    service: Service,
    port: String,
    over: Over,
}

/// How clients connect.
#[derive(Clone, Copy, Debug)]
enum Over {
    Tcp,
    Unix,
}

/// Where it listens besides TCP, in the scene's folder.
const SOCKET: &str = "redis.sock";

const BOTH: [Over; 2] = [Over::Tcp, Over::Unix];

impl Redis {
    fn start(scene: &Scene, shimmed: bool, over: Over) -> Result<Self> {
        let port = free_port()?.to_string();
        let mut command = scene.command(shimmed, "server", program("redis-server", "redis-server")?)?;
        command.args(["--port", &port, "--bind", "127.0.0.1"]).arg("--unixsocket").arg(scene.path(SOCKET));
        command.args(["--save", "", "--appendonly", "no", "--daemonize", "no"]);
        let mut service = scene.start("redis", command)?;
        // It is not asked: that would be a connection to count.
        let log = scene.path("redis.log");
        service
            .await_ready(|| fs::read_to_string(&log).is_ok_and(|text| text.contains("accept connections")))?;
        Ok(Self { service, port, over })
    }

    fn client(&self, scene: &Scene, shimmed: bool, name: &str, client: &str) -> Result<Command> {
        let mut command = scene.command(shimmed, name, program(client, "redis-tools")?)?;
        match self.over {
            Over::Tcp => command.args(["-h", "127.0.0.1", "-p", &self.port]),
            Over::Unix => command.arg("-s").arg(scene.path(SOCKET)),
        };
        Ok(command)
    }

    fn stop(self) -> Result<()> {
        let status = self.service.stop(Signal::TERM)?;
        ensure!(status.success(), "redis-server: {status}");
        Ok(())
    }
}

/// One connection carries all commands of a file.
const COMMANDS: &str = "\
SET greeting hello
GET greeting
INCRBY counter 40
INCRBY counter 2
RPUSH list a b c d e
LRANGE list 0 -1
HSET hash field value other thing
HGETALL hash
GET nothing
NOSUCHCOMMAND
SETRANGE large 3000000 end
STRLEN large
EVAL \"return string.rep('lua', 200000)\" 0
DBSIZE
";

fn cli(over: Over, shimmed_server: bool, shimmed_client: bool) -> Result<(String, [Stats; 2])> {
    let scene = Scene::new()?;
    let server = Redis::start(&scene, shimmed_server, over)?;
    fs::write(scene.path("commands"), COMMANDS)?;
    let mut command = server.client(&scene, shimmed_client, "client", "redis-cli")?;
    command.stdin(File::open(scene.path("commands"))?);
    let printed = scene.succeed(command)?;
    server.stop()?;
    Ok((printed, [scene.stats("server")?, scene.stats("client")?]))
}

#[test]
fn redis_cli_prints_the_same() -> Result<()> {
    let _turn = turn();
    let (expected, _) = cli(Over::Tcp, false, false)?;
    assert!(expected.contains("42"), "{expected}");
    let cases =
        BOTH.into_iter().flat_map(|over| [(over, true, true), (over, true, false), (over, false, true)]);
    for (over, server, client) in cases {
        let (printed, [server_stats, client_stats]) = cli(over, server, client)?;
        assert!(
            expected == printed,
            "{over:?}, with the library on {server} {client}, redis-cli printed\n{printed}"
        );
        let upgraded = u64::from(server && client);
        for (stats, shimmed) in [(server_stats, server), (client_stats, client)] {
            assert_eq!(stats.over_shared_memory(), if shimmed { upgraded } else { 0 }, "{stats:?}");
            assert_eq!(stats.connections(), u64::from(shimmed), "{stats:?}");
        }
    }
    Ok(())
}

/// Runs redis-benchmark; both sides' statistics.
fn benchmark(over: Over, clients: u64, arguments: &[&str]) -> Result<[Stats; 2]> {
    let scene = Scene::new()?;
    let server = Redis::start(&scene, true, over)?;
    let mut bench = server.client(&scene, true, "client", "redis-benchmark")?;
    bench.args(["-q", "-c", &clients.to_string()]).args(arguments);
    let printed = scene.succeed(bench)?;
    ensure!(printed.contains("requests per second"), "{printed}");
    server.stop()?;
    Ok([scene.stats("server")?, scene.stats("client")?])
}

/// All connections of `tests` tests left TCP. redis-benchmark makes one more, to ask for the configuration:
/// two questions, so that it may be gone before both sides have switched.
fn all_upgraded([server, client]: &[Stats; 2], clients: u64, tests: u64) {
    for stats in [server, client] {
        assert!(stats.over_shared_memory() >= clients * tests, "{stats:?}");
        assert!(stats.connections() <= clients * tests + 1, "{stats:?}");
        assert!(stats.not_upgraded.keys().all(|reason| TOO_SHORT.contains(&reason.as_str())), "{stats:?}");
    }
    assert_eq!(client.connections(), server.connections(), "{client:?} {server:?}");
}

#[test]
fn redis_benchmark_one_client() -> Result<()> {
    let _turn = turn();
    for over in BOTH {
        let sides = benchmark(over, 1, &["-n", "3000", "-t", "set,get", "-d", "64"])?;
        all_upgraded(&sides, 1, 2);
        // Both are event loops, which ask the kernel last.
        assert!(sides.iter().all(|stats| stats.spin_hits > 0), "{sides:?}");
    }
    Ok(())
}

#[test]
fn redis_benchmark_fifty_clients() -> Result<()> {
    let _turn = turn();
    for over in BOTH {
        all_upgraded(&benchmark(over, 50, &["-n", "200000", "-t", "set,get", "-d", "64"])?, 50, 2);
    }
    Ok(())
}

#[test]
fn redis_benchmark_pipelines() -> Result<()> {
    let _turn = turn();
    for over in BOTH {
        let options = ["-n", "60000", "-t", "set,get", "-P", "16", "-d", "3000"];
        all_upgraded(&benchmark(over, 10, &options)?, 10, 2);
    }
    Ok(())
}

#[test]
fn redis_benchmark_in_threads() -> Result<()> {
    let _turn = turn();
    for over in BOTH {
        all_upgraded(&benchmark(over, 10, &["-n", "60000", "-t", "get", "--threads", "2"])?, 10, 1);
    }
    Ok(())
}

#[test]
fn redis_cli_inserts_in_bulk() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let server = Redis::start(&scene, true, Over::Tcp)?;
    let bulk: String = (0..30_000).map(|n| format!("SET key:{n} value-of-{n}\r\n")).collect();
    fs::write(scene.path("bulk"), bulk)?;
    let mut pipe = server.client(&scene, true, "pipe", "redis-cli")?;
    pipe.arg("--pipe").stdin(File::open(scene.path("bulk"))?);
    let printed = scene.succeed(pipe)?;
    assert!(printed.contains("errors: 0, replies: 30000"), "{printed}");
    let mut ask = server.client(&scene, false, "", "redis-cli")?;
    ask.args(["eval", "local n = 0 for i = 0, 29999 do if redis.call('get', 'key:' .. i) == 'value-of-' .. i then n = n + 1 end end return n", "0"]);
    assert_eq!(scene.succeed(ask)?.trim(), "30000");
    server.stop()?;
    assert_eq!(scene.stats("pipe")?.over_shared_memory(), 1);
    Ok(())
}

#[test]
fn redis_delivers_what_is_published() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let server = Redis::start(&scene, true, Over::Tcp)?;
    let mut subscribe = server.client(&scene, true, "subscriber", "redis-cli")?;
    subscribe.args(["--csv", "subscribe", "news"]);
    let mut subscriber = scene.start("subscriber", subscribe)?;
    subscriber.await_ready(|| {
        let numbers = server.client(&scene, false, "", "redis-cli").and_then(|mut ask| {
            ask.args(["pubsub", "numsub", "news"]);
            scene.succeed(ask)
        });
        numbers.is_ok_and(|numbers| numbers.trim().ends_with('1'))
    })?;
    let commands: String = (0..100).map(|n| format!("PUBLISH news item-{n}\n")).collect();
    fs::write(scene.path("publish"), commands)?;
    let mut publish = server.client(&scene, true, "publisher", "redis-cli")?;
    publish.stdin(File::open(scene.path("publish"))?);
    scene.succeed(publish)?;
    let log = scene.path("subscriber.log");
    subscriber.await_ready(|| fs::read_to_string(&log).is_ok_and(|text| text.contains("item-99")))?;
    let text = fs::read_to_string(&log)?;
    for n in 0..100 {
        assert!(text.contains(&format!("\"item-{n}\"")), "item {n} is missing:\n{text}");
    }
    subscriber.stop(Signal::INT)?;
    server.stop()?;
    assert_eq!(scene.stats("publisher")?.over_shared_memory(), 1);
    Ok(())
}

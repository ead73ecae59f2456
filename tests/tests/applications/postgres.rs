//! PostgreSQL with pgbench and psql.

use std::fs;
use std::io::Write;
use std::process::Command;

use anyhow::{Result, ensure};
use thallus_tests::harness::{Postgres, Scene, Stats, TOO_SHORT, turn};

/// A command of [`Postgres`] for a client: over TCP or a Unix socket.
type Client = fn(&Postgres, &Scene, bool, &str, &str) -> Result<Command>;

const BOTH: [Client; 2] = [Postgres::client, Postgres::unix_client];

/// Runs pgbench with the library on both sides; both sides' statistics.
fn pgbench(
    client: Client,
    scale: u32,
    arguments: &[&str],
    check: impl Fn(&Scene, &Postgres) -> Result<()>,
) -> Result<[Stats; 2]> {
    let scene = Scene::new()?;
    let server = Postgres::start(&scene, true)?;
    let mut init = server.observer(&scene, "pgbench")?;
    init.args(["-i", "-q", "-s", &scale.to_string()]);
    scene.succeed(init)?;
    let mut bench = client(&server, &scene, true, "client", "pgbench")?;
    bench.args(["-n"]).args(arguments);
    let printed = scene.succeed(bench)?;
    ensure!(printed.contains("number of failed transactions: 0"), "{printed}");
    check(&scene, &server)?;
    server.stop()?;
    Ok([scene.stats("server")?, scene.stats("client")?])
}

/// All of `clients` connections left TCP. pgbench makes one more before them, to ask for the scale: a few
/// questions and gone, so that it may be gone before both sides have switched, before it has had to wait for an answer, or, while its
/// backend is young, before the postmaster has closed its own copy.
fn all_upgraded([server, client]: &[Stats; 2], clients: u64) {
    for stats in [server, client] {
        assert_eq!(stats.connections(), clients + 1, "{stats:?}");
        assert!(stats.over_shared_memory() >= clients, "{stats:?}");
        let reasons = [TOO_SHORT, &["unseen-wait", "shared-before-upgrade"]].concat();
        assert!(stats.not_upgraded.keys().all(|reason| reasons.contains(&reason.as_str())), "{stats:?}");
    }
    assert_eq!(server.ring_bytes_sent, client.ring_bytes_received, "{server:?} {client:?}");
    assert_eq!(client.ring_bytes_sent, server.ring_bytes_received, "{server:?} {client:?}");
}

#[test]
fn pgbench_selects_in_every_protocol() -> Result<()> {
    let _turn = turn();
    for client in BOTH {
        for protocol in ["simple", "extended", "prepared"] {
            let options = ["-S", "-M", protocol, "-c", "4", "-j", "2", "-t", "500"];
            all_upgraded(&pgbench(client, 1, &options, |_, _| Ok(()))?, 4);
        }
    }
    Ok(())
}

#[test]
fn pgbench_transactions_keep_the_balances() -> Result<()> {
    let _turn = turn();
    let check = |scene: &Scene, server: &Postgres| {
        let sums = server.ask(
            scene,
            "select (select count(*) from pgbench_history), \
             (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history), \
             (select sum(bbalance) from pgbench_branches) = (select sum(delta) from pgbench_history), \
             (select sum(tbalance) from pgbench_tellers) = (select sum(delta) from pgbench_history)",
        )?;
        assert_eq!(sums, "800|t|t|t");
        Ok(())
    };
    for client in BOTH {
        all_upgraded(&pgbench(client, 2, &["-c", "8", "-j", "2", "-t", "100"], check)?, 8);
    }
    Ok(())
}

#[test]
fn pgbench_with_a_connection_for_each_transaction() -> Result<()> {
    let _turn = turn();
    for client in BOTH {
        let [server, client] = pgbench(client, 1, &["-S", "-C", "-c", "2", "-t", "50"], |_, _| Ok(()))?;
        assert_eq!(client.connections(), server.connections(), "{client:?} {server:?}");
        assert!(client.connections() >= 100, "{client:?}");
    }
    Ok(())
}

#[test]
fn pgbench_pipelines() -> Result<()> {
    let _turn = turn();
    let script = "\\startpipeline\nselect 1;\nselect repeat('x', 3000);\nselect 3;\n\\endpipeline\n";
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("pipeline.sql");
    fs::write(&path, script)?;
    let file = path.display().to_string();
    for client in BOTH {
        let options = ["-M", "extended", "-c", "2", "-t", "200", "-f", &file];
        all_upgraded(&pgbench(client, 1, &options, |_, _| Ok(()))?, 2);
    }
    Ok(())
}

/// What psql runs in [`psql_prints_the_same`]: small and large results both ways, errors, notifications.
const SCRIPT: &str = "\
create table numbers as select n, md5(n::text) as hash from generate_series(1, 50000) n;
select count(*), md5(string_agg(hash, '' order by n)) from numbers;
select n, repeat(hash, 20) from numbers where n % 5 = 0 order by n;
select 1 / 0;
begin;
insert into numbers values (0, 'none');
rollback;
select nothing;
select min(n) from numbers;
listen news;
notify news, 'it works';
select 'after the news';
\\copy numbers to 'numbers.copy'
truncate numbers;
\\copy numbers from 'numbers.copy'
select count(*), md5(string_agg(hash, '' order by n)) from numbers;
set statement_timeout = 100;
select pg_sleep(60);
set statement_timeout = 0;
select length(repeat('large', 4000000));
select repeat('large', 1000000);
do $$ begin for i in 1..50 loop raise warning 'warning %', i; end loop; end $$;
";

fn psql(client: Client, shimmed_server: bool, shimmed_client: bool) -> Result<(String, String, [Stats; 2])> {
    let scene = Scene::new()?;
    let server = Postgres::start(&scene, shimmed_server)?;
    fs::write(scene.path("script.sql"), SCRIPT)?;
    let mut command = client(&server, &scene, shimmed_client, "client", "psql")?;
    command.args(["-X", "-a", "-f", "script.sql"]);
    let output = scene.run(command)?;
    ensure!(output.status.success(), "{output}");
    server.stop()?;
    // The sender's process is in the notification.
    let stdout =
        output.stdout.lines().map(|line| line.split(" received from server process").next().unwrap_or(line));
    let stdout = stdout.collect::<Vec<_>>().join("\n");
    Ok((stdout, output.stderr, [scene.stats("server")?, scene.stats("client")?]))
}

#[test]
fn psql_prints_the_same() -> Result<()> {
    let _turn = turn();
    let (stdout, stderr, _) = psql(Postgres::client, false, false)?;
    assert!(stdout.contains("it works"), "{stdout}");
    assert!(stderr.contains("division by zero"), "{stderr}");
    let cases =
        BOTH.into_iter().flat_map(|over| [(over, true, true), (over, true, false), (over, false, true)]);
    for (over, server, client) in cases {
        let (shimmed_stdout, shimmed_stderr, [server_stats, client_stats]) = psql(over, server, client)?;
        assert!(
            stdout == shimmed_stdout,
            "with the library on {server} {client}, psql printed\n{shimmed_stdout}"
        );
        assert_eq!(stderr, shimmed_stderr);
        let upgraded = u64::from(server && client);
        for (stats, shimmed) in [(server_stats, server), (client_stats, client)] {
            assert_eq!(stats.over_shared_memory(), if shimmed { upgraded } else { 0 }, "{stats:?}");
            assert_eq!(stats.connections(), u64::from(shimmed), "{stats:?}");
            if shimmed && upgraded == 0 {
                assert!(stats.not_upgraded.contains_key("peer-without-thallus"), "{stats:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn psql_cancels_a_query() -> Result<()> {
    let _turn = turn();
    let scene = Scene::new()?;
    let server = Postgres::start(&scene, true)?;
    let mut command = server.client(&scene, true, "client", "psql")?;
    command.args(["-X", "-f", "-"]);
    // psql runs each line as it comes, and ends with the last.
    let (script, mut writer) = std::io::pipe()?;
    command.stdin(script);
    let mut psql = scene.start("psql", command)?;
    let backend =
        "select count(*) from pg_stat_activity where backend_type = 'client backend' and client_port > 0";
    // A backend that finds each query before it has to wait for one does not leave TCP: `unseen-wait`.
    for _ in 0..8 {
        psql.await_ready(|| {
            let waiting = server.ask(&scene, &format!("{backend} and wait_event = 'ClientRead'"));
            waiting.is_ok_and(|count| count == "1")
        })?;
        writeln!(writer, "select 1;")?;
    }
    writeln!(writer, "select pg_sleep(100);")?;
    drop(writer);
    psql.await_ready(|| {
        let running = server.ask(&scene, &format!("{backend} and query like 'select pg_sleep(%'"));
        running.is_ok_and(|count| count == "1")
    })?;
    // Ctrl-C: psql sends a cancel request over a connection of its own.
    let log = scene.path("psql.log");
    let status = psql.stop(rustix::process::Signal::INT)?;
    let printed = fs::read_to_string(log)?;
    assert!(printed.contains("canceling statement due to user request"), "{status} {printed}");
    server.stop()?;
    let stats = scene.stats("client")?;
    assert_eq!(stats.over_shared_memory(), 1, "{stats:?}");
    Ok(())
}

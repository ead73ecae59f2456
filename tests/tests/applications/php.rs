//! PHP, whose extensions are modules that look for libc's names in libc itself, and MariaDB.

use std::fs;

use anyhow::Result;
use thallus_tests::harness::{Scene, free_port, program, turn};

use super::exchange::{Exchange, listens};

#[test]
fn php_asks_mariadb_many_questions_at_once() -> Result<()> {
    let _turn = turn();
    let tables = Scene::new()?;
    let data = tables.shared_folder("data")?;
    let mut install = tables.plain(program("mariadb-install-db", "mariadb-server")?);
    install.args([
        "--no-defaults",
        "--auth-root-authentication-method=normal",
        "--skip-test-db",
        "--user=root",
    ]);
    install
        .args(["--innodb-log-file-size=4M", "--innodb-flush-method=nosync", "--innodb-use-native-aio=0"])
        .arg(format!("--datadir={}", data.display()));
    tables.succeed(install)?;
    let port = free_port()?;
    let outcome = Exchange {
        server: &|scene, shimmed| {
            let mut command = scene.command(shimmed, "server", program("mariadbd", "mariadb-server")?)?;
            command.args(["--no-defaults", "--user=root", "--bind-address=127.0.0.1", "--skip-name-resolve"]);
            command.args([
                "--innodb-log-file-size=4M",
                "--innodb-flush-method=nosync",
                "--innodb-use-native-aio=0",
            ]);
            command.arg(format!("--port={port}")).arg(format!("--datadir={}", data.display()));
            command.arg("--socket").arg(scene.path("socket"));
            Ok(command)
        },
        ports: &|_| listens(port).then(|| vec![port.to_string()]),
        client: &|scene, shimmed, ports| {
            fs::write(scene.path("client.php"), include_str!("mysqli_client.php"))?;
            let mut command = scene.command(shimmed, "client", program("php", "php-cli and php-mysql")?)?;
            command.arg(scene.path("client.php")).args(ports);
            Ok(command)
        },
    }
    .same_everywhere()?;
    // mysqli's four, and PDO's.
    for stats in [&outcome.server, &outcome.client] {
        assert_eq!((stats.over_shared_memory(), stats.connections()), (5, 5), "{outcome:?}");
    }
    Ok(())
}

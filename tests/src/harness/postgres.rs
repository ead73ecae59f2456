//! A private PostgreSQL server.

use std::fs;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};

use anyhow::{Context, Result};
use rustix::process::Signal;

use super::diagnosis::processes;
use super::scene::{Scene, Service, free_port, program};
use crate::calls::is_root;

/// The user that runs it if root runs the test: PostgreSQL refuses to run as root.
const NOBODY: u32 = 65534;

/// A server with a cluster of its own, in the scene's folder.
#[derive(Debug)]
pub struct Postgres {
    service: Service,
    data: PathBuf,
    observers: PathBuf,
    /// Where it listens on 127.0.0.1.
    pub port: u16,
}

impl Postgres {
    /// Makes a cluster and starts a server on it; its processes write statistics under "server".
    ///
    /// # Errors
    /// If PostgreSQL is missing or does not start.
    pub fn start(scene: &Scene, shimmed: bool) -> Result<Self> {
        let data = scene.shared_folder("data")?;
        let observers = scene.shared_folder("observers")?;
        if is_root() {
            for folder in [&data, &observers] {
                chown(folder, Some(NOBODY), Some(NOBODY)).context("chown")?;
            }
        }
        let mut initdb = as_server(scene.plain(program("initdb", "postgresql")?));
        initdb.arg("-D").arg(&data).args(["-A", "trust", "-U", "postgres", "--no-sync", "-E", "UTF8"]);
        scene.succeed(initdb)?;
        Self::start_on(scene, shimmed, data)
    }

    /// Starts another server on the cluster of one that has ended.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start_again(scene: &Scene, shimmed: bool) -> Result<Self> {
        Self::start_on(scene, shimmed, scene.path("data"))
    }

    /// Starts a server on a cluster that is there.
    fn start_on(scene: &Scene, shimmed: bool, data: PathBuf) -> Result<Self> {
        let port = free_port()?;
        let observers = scene.path("observers");
        let mut command = as_server(scene.command(shimmed, "server", program("postgres", "postgresql")?)?);
        // What observers do is nothing to count.
        command
            .env("THALLUS_UNIX", format!("!{}/*", observers.display()))
            .arg("-D")
            .arg(&data)
            .args(["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-c", "shared_buffers=16MB"])
            .arg("-c")
            .arg(format!("port={port}"))
            .arg("-c")
            .arg(format!("unix_socket_directories={},{}", data.display(), observers.display()));
        let mut service = scene.start("postgres", command)?;
        service.await_ready(|| {
            let mut ready = scene.plain("pg_isready");
            ready.arg("-q").arg("-h").arg(&observers).args(["-p", &port.to_string()]);
            ready.status().is_ok_and(|status| status.success())
        })?;
        Ok(Self { service, data, observers, port })
    }

    /// A client's command: `pgbench` or `psql`, with the server's address in the environment.
    ///
    /// # Errors
    /// If the program is missing.
    pub fn client(&self, scene: &Scene, shimmed: bool, name: &str, client: &str) -> Result<Command> {
        let mut command = scene.command(shimmed, name, program(client, "postgresql")?)?;
        command
            .env("PGHOST", "127.0.0.1")
            .env("PGPORT", self.port.to_string())
            .env("PGUSER", "postgres")
            .env("PGDATABASE", "postgres")
            .env("PGSSLMODE", "disable")
            .env("PGGSSENCMODE", "disable")
            .env("PGOPTIONS", "-c client_min_messages=warning");
        Ok(command)
    }

    /// As [`Self::client`], over a Unix socket.
    ///
    /// # Errors
    /// If the program is missing.
    pub fn unix_client(&self, scene: &Scene, shimmed: bool, name: &str, client: &str) -> Result<Command> {
        let mut command = self.client(scene, shimmed, name, client)?;
        command.env("PGHOST", &self.data);
        Ok(command)
    }

    /// As [`Self::client`], without the library and over a Unix socket that the server's leaves alone: not counted, whatever it does.
    ///
    /// # Errors
    /// If the program is missing.
    pub fn observer(&self, scene: &Scene, client: &str) -> Result<Command> {
        let mut command = self.client(scene, false, "", client)?;
        command.env("PGHOST", &self.observers);
        Ok(command)
    }

    /// The rows that a query gives, asked by an observer.
    ///
    /// # Errors
    /// If the query fails.
    pub fn ask(&self, scene: &Scene, query: &str) -> Result<String> {
        let mut psql = self.observer(scene, "psql")?;
        psql.args(["-X", "-A", "-t", "-c", query]);
        Ok(scene.succeed(psql)?.trim().to_owned())
    }

    /// Its main process.
    pub fn pid(&self) -> u32 {
        self.service.pid()
    }

    /// All of its processes, which work in its folder. Each is a process group of its own.
    pub fn processes(&self) -> Vec<u32> {
        let works_there =
            |&pid: &u32| fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|folder| folder == self.data);
        processes().filter(works_there).collect()
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        self.service.log()
    }

    /// What its processes are doing.
    pub fn diagnosis(&self) -> String {
        self.service.diagnosis()
    }

    /// Stops it (a "smart" shutdown: it waits for every session to end by itself), so that all of its processes have
    /// read what was sent to them, and leave their statistics.
    ///
    /// # Errors
    /// If it does not end.
    pub fn stop(self) -> Result<ExitStatus> {
        self.service.stop(Signal::TERM)
    }
}

fn as_server(mut command: Command) -> Command {
    if is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    command
}

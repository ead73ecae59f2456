//! A client that talks to a server, natively and with the library at either side or both, and prints the same.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use thallus_tests::harness::{Scene, Stats};

/// A client's command, with the library or without, given the server's ports.
type Client<'a> = dyn Fn(&Scene, bool, &[String]) -> Result<Command> + 'a;

/// What a server and a client are started with.
pub(super) struct Exchange<'a> {
    /// The server; with the library, if so.
    pub(super) server: &'a dyn Fn(&Scene, bool) -> Result<Command>,
    /// The ports of a server that has printed this, once it listens.
    pub(super) ports: &'a dyn Fn(&str) -> Option<Vec<String>>,
    /// The client.
    pub(super) client: &'a Client<'a>,
}

/// What the client printed, and the statistics of both sides.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) printed: String,
    pub(super) server: Stats,
    pub(super) client: Stats,
}

impl Exchange<'_> {
    /// Runs both, with the library or without.
    pub(super) fn run(&self, server: bool, client: bool) -> Result<Outcome> {
        let scene = Scene::new()?;
        let mut service = scene.start("server", (self.server)(&scene, server)?)?;
        let log = scene.path("server.log");
        let mut ports = None;
        service.await_ready(|| {
            ports = fs::read_to_string(&log).ok().and_then(|text| (self.ports)(&text));
            ports.is_some()
        })?;
        let command = (self.client)(&scene, client, &ports.context("it is ready")?)?;
        let printed = scene.succeed(command).with_context(|| service.diagnosis())?;
        service.stop(Signal::TERM)?;
        Ok(Outcome { printed, server: scene.stats("server")?, client: scene.stats("client")? })
    }

    /// The client prints the same whoever has the library. What both count if both have it.
    pub(super) fn same_everywhere(&self) -> Result<Outcome> {
        let native = self.run(false, false)?;
        ensure!(!native.printed.is_empty(), "the client prints nothing");
        for (server, client) in [(true, false), (false, true)] {
            let one_sided = self.run(server, client)?;
            ensure!(
                native.printed == one_sided.printed,
                "with the library on {server} {client}: {one_sided:?}"
            );
            for stats in [&one_sided.server, &one_sided.client] {
                assert_eq!(stats.over_shared_memory(), 0, "{one_sided:?}");
            }
        }
        let both = self.run(true, true)?;
        ensure!(native.printed == both.printed, "{}\nand with the library:\n{both:?}", native.printed);
        Ok(both)
    }
}

/// The ports in a line that begins so.
pub(super) fn printed_ports(text: &str) -> Option<Vec<String>> {
    let (line, _) = text.split_once("ports ")?.1.split_once('\n')?;
    Some(line.split(' ').map(str::to_owned).collect())
}

/// Whether some socket listens at 127.0.0.1:`port`. To connect would count.
pub(super) fn listens(port: u16) -> bool {
    let wanted = format!("0100007F:{port:04X} 00000000:0000 0A");
    fs::read_to_string("/proc/net/tcp").is_ok_and(|table| table.contains(&wanted))
}

//! `thallus doctor`: what this machine offers, and what a connection to a server would use, and why.
//!
//! What can be tried is tried, with the code that the library runs: a kernel, a container or a limit may refuse what
//! their settings seem to allow.

mod machine;
mod one_host;
mod program;
mod rdma;
mod route;
mod settings;
mod sheet;

use std::ffi::OsString;
use std::process::ExitCode;

use serde::Serialize;
use thallus_transport::environment::{self, Complaints};
use thallus_transport::settings::{Settings, set};

use sheet::Sheet;

/// Show what this machine offers, and what a connection to HOST:PORT would use and why
///
/// Nothing is sent to HOST. What concerns a process (limits, settings, namespaces) is that of this
/// command: run it where the program runs, as the same user.
///
/// Exit status: 0 if all that was asked for is possible. 1 if not: the connection would stay on TCP or
/// HOST can't be reached; without HOST:PORT, no connection on this host could leave TCP; the library can't
/// be preloaded into --program. 2 for wrong arguments.
///
/// The names of --json are in docs/doctor.md.
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// The server: a name or an address, and a port, such as db:5432 or [::1]:80
    #[arg(value_name = "HOST:PORT", value_parser = route::Target::parse)]
    server: Option<route::Target>,

    /// The configuration to look at: docs/configuration.md [THALLUS_CONFIG]
    #[arg(long, value_name = "FILE")]
    config: Option<String>,

    /// The program that the settings are to be for, found as by thallus run; without it, what the configuration has for
    /// every program
    #[arg(long, value_name = "COMMAND")]
    program: Option<OsString>,

    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

/// Everything that `thallus doctor` shows. The names of the fields are part of the interface.
#[derive(Debug, Serialize)]
struct Report {
    library: machine::Library,
    machine: machine::Machine,
    limits: machine::Limits,
    one_host: one_host::OneHost,
    rdma: rdma::Rdma,
    /// The program that was named, if any.
    program: Option<program::Program>,
    settings: settings::InForce,
    /// What a connection to the server would use, if one was named.
    connection: Option<route::Route>,
    problems: Vec<Problem>,
}

/// Something that is not as it should be, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Problem {
    /// The part of the report that it belongs to: the name of a field of [`Report`].
    part: &'static str,
    problem: String,
    remedy: String,
}

impl Problem {
    fn new(part: &'static str, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { part, problem: problem.into(), remedy: remedy.into() }
    }
}

/// Prints the report. The exit status that belongs to it.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut complaints = Complaints::default();
    let configuration = settings::configuration(args.config.as_deref());
    let mut problems = Vec::new();
    let (program, path) = args.program.as_deref().map(|name| program::look(name, &mut problems)).unzip();
    let given = configuration.given(&path.unwrap_or_default());
    let log = environment::log(&given, &mut complaints);
    let chosen = environment::settings(Settings::default(), &given, &mut complaints);
    // What is tried below follows the settings.
    set(chosen.clone());

    let library = machine::library(&mut problems);
    let machine = machine::look(&mut problems);
    let limits = machine::limits(&mut problems);
    let one_host = one_host::look(&mut problems);
    let rdma = rdma::look(&chosen, &limits, &mut problems);
    let wanted = settings::Wanted { given: &given, configuration: &configuration, complaints: &complaints };
    let in_force = wanted.in_force(&chosen, log.as_ref(), &mut problems);
    let takes_library = program.as_ref().is_none_or(|program| program.usable);
    let connection = args.server.as_ref().map(|server| {
        let around = route::Around {
            settings: &chosen,
            off: given.is_off(),
            library: library.usable,
            program: takes_library,
            one_host: &one_host,
            key: chosen.verbs.key.is_some(),
            no_peers: complaints.0.iter().any(|complaint| complaint.instead == environment::NO_PEERS),
        };
        route::look(server, &around, &mut problems)
    });
    let possible = match &connection {
        Some(route) => route.leaves_tcp(),
        None => takes_library && library.usable && one_host.works && chosen.shm && !given.is_off(),
    };
    if connection.is_none() {
        settings::check_one_host(&chosen, &given, &mut problems);
    }

    let report = Report {
        library,
        machine,
        limits,
        one_host,
        rdma,
        program,
        settings: in_force,
        connection,
        problems,
    };
    let text = if args.json {
        let mut text = serde_json::to_string_pretty(&report)?;
        text.push('\n');
        text
    } else {
        render(&report)
    };
    crate::print(&text)?;
    Ok(if possible { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn render(report: &Report) -> String {
    let mut sheet = Sheet::default();
    let mut part = |name: &str, title: &str, show: &dyn Fn(&mut Sheet)| {
        sheet.part(title);
        show(&mut sheet);
        for Problem { problem, remedy, .. } in report.problems.iter().filter(|problem| problem.part == name) {
            sheet.problem(problem, remedy);
        }
    };
    part("library", "library", &|sheet| report.library.show(sheet));
    part("machine", "machine", &|sheet| report.machine.show(sheet));
    part("limits", "limits of this process", &|sheet| report.limits.show(sheet));
    part("one_host", "shared memory, on one host", &|sheet| report.one_host.show(sheet));
    part("rdma", "RDMA, between hosts", &|sheet| report.rdma.show(sheet));
    if let Some(program) = &report.program {
        part("program", &format!("program {}", program.name), &|sheet| program.show(sheet));
    }
    part("settings", "settings", &|sheet| report.settings.show(sheet));
    if let Some(connection) = &report.connection {
        let title = format!("a connection to {}", connection.server);
        part("connection", &title, &|sheet| connection.show(sheet));
    }
    sheet.text()
}

/// A number of bytes as people write it, exact or with one decimal.
fn bytes(count: u64) -> String {
    let units = [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match units.into_iter().find(|(_, unit)| count >= *unit) {
        None => format!("{count} B"),
        Some((name, unit)) if count.is_multiple_of(unit) => format!("{} {name}", count / unit),
        Some((name, unit)) => format!("{:.1} {name}", count as f64 / unit as f64),
    }
}

fn yes_or_no(yes: bool) -> &'static str {
    if yes { "yes" } else { "no" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_shown_in_the_largest_unit_that_fits() {
        assert_eq!(bytes(100), "100 B");
        assert_eq!(bytes(8192), "8 KiB");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(4 << 20), "4 MiB");
        assert_eq!(bytes(3 << 30), "3 GiB");
    }
}

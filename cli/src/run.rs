//! `thallus run`: checks that the program can be accelerated, and becomes it.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{File, create_dir_all};
use std::io;
use std::path::{Path, PathBuf, absolute};

use clap::ValueEnum;
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;
use thallus_transport::environment::{self, CONFIG, Complaint};
use thallus_transport::settings::UnixRule;
use thiserror::Error;

use crate::elf::{Abi, Image};
use crate::library;
use crate::program::{self, Missing, Obstacle};
use crate::start;

/// Start a program with its connections over shared memory where possible
///
/// The program and everything it starts are preloaded with the library. A connection over
/// TCP or a Unix socket leaves it when both of its ends are: for shared memory on one host,
/// TCP also for RDMA where THALLUS_PEERS names the peer; all others work as always. An
/// option that is not given leaves its variable in the environment as it is.
///
/// Exit status: the program's own; 127 if it is not found, 126 if it can't be executed,
/// 2 if it can't be accelerated (statically linked, set-user-ID, file capabilities,
/// another machine or libc), if the library is missing, --stats or --log can't be written to,
/// for a line of --config that makes no sense, or for wrong arguments.
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment, override_usage = "thallus run [OPTIONS] [--] COMMAND [ARGUMENT]...")]
pub(crate) struct Args {
    /// Write what each process did to DIR/PID.json when it exits; DIR is created [THALLUS_STATS]
    #[arg(long, value_name = "DIR")]
    stats: Option<PathBuf>,

    /// Settings for what no option or variable is given, by program: docs/configuration.md [THALLUS_CONFIG]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Only these server ports, such as 5432,6379,8000-8100 [THALLUS_PORTS]
    #[arg(long, value_name = "LIST", value_parser = ports)]
    ports: Option<String>,

    /// AF_UNIX connections to these servers only: all, off or names, such as /run/postgresql/*,@name or !/run/other [THALLUS_UNIX]
    #[arg(long, value_name = "LIST", value_parser = unix)]
    unix: Option<String>,

    /// What may carry the bytes of a connection instead of TCP [THALLUS_FABRIC]
    #[arg(long, value_enum)]
    fabric: Option<Fabric>,

    /// Log to standard error or PATH: off, error, warn, info or debug [THALLUS_LOG]
    #[arg(long, value_name = "LEVEL[:PATH]", value_parser = log)]
    log: Option<OsString>,

    /// Longest time to spin for data before sleeping, in microseconds; 0 never spins [THALLUS_SPIN_US]
    #[arg(long, value_name = "N")]
    spin_us: Option<u32>,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Fabric {
    /// Whatever is best for each connection
    Auto,
    /// Shared memory, to peers on this host
    Shm,
    /// RDMA, to the peers that THALLUS_PEERS names, also on this host
    Verbs,
    /// None: count and report only
    #[value(alias = "tcp")]
    Off,
}

/// Why the program was not started.
#[derive(Debug, Error)]
pub(crate) enum Failure {
    #[error("can't tell where this executable is, and so where {} is: {_0}", library::NAME)]
    Executable(#[source] io::Error),
    #[error("{} is missing: looked in {places}", library::NAME)]
    NoLibrary { places: String },
    #[error("{} can't be preloaded: its path has {character}, which LD_PRELOAD can't express", .library.display())]
    UnusablePath { library: PathBuf, character: &'static str },
    #[error("{} can't be preloaded: {source}", .library.display())]
    UnreadableLibrary { library: PathBuf, source: io::Error },
    #[error("{} can't be preloaded: it is not a shared library", .0.display())]
    NotALibrary(PathBuf),
    #[error("can't create {}: {source}", .folder.display())]
    Stats { folder: PathBuf, source: io::Error },
    #[error("can't write to {}: {source}", .path.display())]
    Output { path: PathBuf, source: io::Error },
    #[error("can't read {}: {source}", .path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{}", .0.iter().map(Complaint::wrong).collect::<Vec<_>>().join("\nthallus: "))]
    Configuration(Vec<Complaint>),
    #[error("{}: not found", .0.display())]
    NotFound(PathBuf),
    #[error("{}: not executable", .0.display())]
    NotExecutable(PathBuf),
    #[error("{_0}")]
    Obstacle(Obstacle),
    #[error("{}: its interpreter or loader is missing", .0.display())]
    NoInterpreter(PathBuf),
    #[error("can't execute {}: {source}", .program.display())]
    Exec { program: PathBuf, source: io::Error },
}

impl Failure {
    /// As shells and env(1) do for what concerns the program; 2 for what concerns us.
    pub(crate) fn exit_status(&self) -> u8 {
        match self {
            Self::NotFound(_) | Self::NoInterpreter(_) => 127,
            Self::NotExecutable(_) | Self::Exec { .. } => 126,
            _ => 2,
        }
    }
}

/// Replaces this process by the program; returns only if that fails.
pub(crate) fn exec(args: &Args) -> Failure {
    match prepare(args) {
        Err(failure) => failure,
        Ok((program, arguments, environment)) => {
            match start::become_program(&program, &arguments, environment) {
                source if source.kind() == io::ErrorKind::NotFound => Failure::NoInterpreter(program),
                source => Failure::Exec { program, source },
            }
        }
    }
}

/// The program's path, its arguments with its name, and its environment.
type Prepared = (PathBuf, Vec<OsString>, BTreeMap<OsString, OsString>);

fn prepare(args: &Args) -> Result<Prepared, Failure> {
    let name = args.command.first().expect("clap requires a command");
    let path = env::var_os("PATH");
    let program = program::find(name, path.as_deref()).map_err(|missing| match missing {
        Missing::NotFound => Failure::NotFound(name.into()),
        Missing::NotExecutable => Failure::NotExecutable(name.into()),
    })?;

    let (library, abi) = usable_library()?;
    if let Some(obstacle) = program::obstacle(&program, path.as_deref(), abi) {
        return Err(Failure::Obstacle(obstacle));
    }

    let mut environment: BTreeMap<_, _> = env::vars_os().collect();
    let mut set = |name: &str, value: OsString| _ = environment.insert(name.into(), value);
    set("LD_PRELOAD", library::prepend(&library, env::var_os("LD_PRELOAD").as_deref()));
    if let Some(folder) = &args.stats {
        let failed = |source| Failure::Stats { folder: folder.clone(), source };
        create_dir_all(folder).map_err(failed)?;
        writable(folder)?;
        // The program and its children may change their current folder.
        set("THALLUS_STATS", folder.canonicalize().map_err(failed)?.into());
    }
    if let Some((_, file)) = args.log.as_ref().and_then(|log| log.to_str()?.split_once(':')) {
        check_log(Path::new(file))?;
    }
    if let Some(file) = &args.config {
        // As for the folder above.
        set(CONFIG, checked(file)?.into());
    }
    for (name, value) in settings(args) {
        set(name, value);
    }
    Ok((program, args.command.clone(), environment))
}

/// The whole path of a configuration that makes sense. The library would go on without what does not.
fn checked(file: &Path) -> Result<String, Failure> {
    let unreadable = |source| Failure::Unreadable { path: file.to_owned(), source };
    let path = file.canonicalize().map_err(unreadable)?;
    let path = path.into_os_string().into_string();
    let path = path.map_err(|_| unreadable(io::Error::other("its path is not UTF-8")))?;
    let read = environment::read_configuration(&path).map_err(unreadable)?;
    let complaints = environment::check(&path, &read).0;
    if complaints.is_empty() { Ok(path) } else { Err(Failure::Configuration(complaints)) }
}

/// Whether there can be a log at this absolute path.
pub(crate) fn check_log(file: &Path) -> Result<(), Failure> {
    if file.is_dir() {
        return Err(Failure::Output { path: file.to_owned(), source: Errno::ISDIR.into() });
    }
    writable(if file.exists() { file } else { file.parent().unwrap_or(file) })
}

/// The library says nothing where it can't write, so that the program's output stays its own.
fn writable(path: &Path) -> Result<(), Failure> {
    let needed = if path.is_dir() { Access::WRITE_OK | Access::EXEC_OK } else { Access::WRITE_OK };
    accessat(CWD, path, needed, AtFlags::EACCESS)
        .map_err(|errno| Failure::Output { path: path.to_owned(), source: errno.into() })
}

/// The library beside this command, and what programs it is for.
pub(crate) fn usable_library() -> Result<(PathBuf, Abi), Failure> {
    let executable = env::current_exe().map_err(Failure::Executable)?;
    let library = library::beside(&executable)
        .ok_or_else(|| Failure::NoLibrary { places: library::places(&executable) })?;
    if let Some(character) = library::unusable_character(&library) {
        return Err(Failure::UnusablePath { library, character });
    }
    match File::open(&library).and_then(|file| Image::read(&file)) {
        Ok(Some(image)) => Ok((library, image.abi)),
        Ok(None) => Err(Failure::NotALibrary(library)),
        Err(source) => Err(Failure::UnreadableLibrary { library, source }),
    }
}

/// The variables that hand the options on to the library.
fn settings(args: &Args) -> impl Iterator<Item = (&'static str, OsString)> {
    let fabric = args.fabric.map(|fabric| match fabric {
        Fabric::Auto => "auto",
        Fabric::Shm => "shm",
        Fabric::Verbs => "verbs",
        Fabric::Off => "off",
    });
    [
        ("THALLUS_PORTS", args.ports.as_ref().map(OsString::from)),
        ("THALLUS_UNIX", args.unix.as_ref().map(OsString::from)),
        ("THALLUS_FABRIC", fabric.map(OsString::from)),
        ("THALLUS_LOG", args.log.clone()),
        ("THALLUS_SPIN_US", args.spin_us.map(|limit| limit.to_string().into())),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name, value?)))
}

/// Checks a list of ports and ranges, both ends included.
fn ports(list: &str) -> Result<String, String> {
    let wrong = || format!("{list:?} is not a list such as 5432,8000-8100");
    environment::ports(list).map(|_| list.to_owned()).ok_or_else(wrong)
}

/// Checks a list of names of `AF_UNIX` sockets.
fn unix(list: &str) -> Result<String, String> {
    let wrong =
        || format!("{list:?} is not all, off or a list such as /run/postgresql/*,@name or !/run/other");
    UnixRule::parse_list(list).map(|_| list.to_owned()).ok_or_else(wrong)
}

/// Checks a log level, and makes the path behind it absolute: the program may change its folder.
fn log(value: &str) -> Result<OsString, String> {
    let (level, path) = match value.split_once(':') {
        Some((level, path)) => (level, Some(path)),
        None => (value, None),
    };
    if environment::level(level).is_none() {
        return Err("the level is off, error, warn, info or debug".to_owned());
    }
    let mut value = OsString::from(level);
    if let Some(path) = path {
        value.push(OsStr::new(":"));
        value.push(absolute(path).map_err(|error| error.to_string())?);
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_numbers_and_ranges() {
        for good in ["5432", "5432, 6379", " 5432 , 6379-6380 ", "8000-8100,1", "0-65535"] {
            assert_eq!(ports(good), Ok(good.to_owned()));
        }
        for bad in ["", "a", "1,", "70000", "9-8", "1-2-3", "1 - 2", "-1"] {
            assert!(ports(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_log_is_a_level_and_perhaps_a_path() {
        assert_eq!(log("debug"), Ok("debug".into()));
        assert_eq!(log("trace"), Ok("trace".into()));
        assert_eq!(log("info:/tmp/a:b"), Ok("info:/tmp/a:b".into()));
        let here = env::current_dir().unwrap().join("file");
        assert_eq!(log("warn:file"), Ok(format!("warn:{}", here.display()).into()));
        for bad in ["loud", "", ":x", "info:"] {
            assert!(log(bad).is_err(), "{bad:?}");
        }
    }
}

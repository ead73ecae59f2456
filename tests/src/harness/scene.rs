//! A temporary folder with what a test of real programs needs: the library, statistics, output, servers.

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use super::diagnosis::{end_group, group_members, report};
use super::library::library;
use super::pair::wait_until;
use super::stats::{Stats, read_stats};

/// How long a program may take that is expected to end by itself.
const DEADLINE: Duration = Duration::from_secs(120);

/// Where programs are looked for: not in the PATH of whoever runs the tests.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A temporary folder that every user can read, with a copy of the library.
#[derive(Debug)]
pub struct Scene {
    folder: TempDir,
}

impl Scene {
    /// A new folder.
    ///
    /// # Errors
    /// If it cannot be made, or there is no library.
    pub fn new() -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("thallus-test-").tempdir()?;
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
        let scene = Self { folder };
        // The build may lie where another user cannot go.
        fs::copy(library()?, scene.library()).context("copying the library")?;
        fs::set_permissions(scene.library(), Permissions::from_mode(0o755))?;
        Ok(scene)
    }

    /// A path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The library, where every user can load it.
    pub fn library(&self) -> PathBuf {
        self.path("libthallus_shim.so")
    }

    /// Makes a folder in which every user can write.
    ///
    /// # Errors
    /// As mkdir(2).
    pub fn shared_folder(&self, name: &str) -> Result<PathBuf> {
        let path = self.path(name);
        fs::create_dir_all(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o777))?;
        Ok(path)
    }

    /// A command without the library.
    pub fn plain(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env_clear()
            .env("PATH", PATH)
            .env("HOME", self.folder.path())
            .env("LC_ALL", "C.UTF-8")
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .process_group(0);
        command
    }

    /// A command with the library, whose processes write statistics under `name`.
    ///
    /// # Errors
    /// If the folder for them cannot be made.
    pub fn shimmed(&self, name: &str, program: impl AsRef<OsStr>) -> Result<Command> {
        let stats = self.shared_folder(&format!("stats-{name}"))?;
        let mut command = self.plain(program);
        command
            .env("LD_PRELOAD", self.library())
            .env("THALLUS_STATS", stats)
            .env("THALLUS_UPGRADE_AFTER", "1");
        Ok(command)
    }

    /// The command with or without the library.
    ///
    /// # Errors
    /// As [`Self::shimmed`].
    pub fn command(&self, shimmed: bool, name: &str, program: impl AsRef<OsStr>) -> Result<Command> {
        if shimmed { self.shimmed(name, program) } else { Ok(self.plain(program)) }
    }

    /// The statistics that processes have written under `name`.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn stats(&self, name: &str) -> Result<Stats> {
        read_stats(&self.shared_folder(&format!("stats-{name}"))?)
    }

    /// Runs a program to its end.
    ///
    /// # Errors
    /// If it cannot be started, or hangs; then the error tells what it was doing.
    pub fn run(&self, mut command: Command) -> Result<Output> {
        let (stdout, stderr) =
            (tempfile::tempfile_in(self.folder.path())?, tempfile::tempfile_in(self.folder.path())?);
        command.stdout(stdout.try_clone()?).stderr(stderr.try_clone()?);
        let mut child = command.spawn().with_context(|| format!("{command:?}"))?;
        let in_time = wait_until(&child, Instant::now() + DEADLINE)?;
        let reports: String = if in_time { String::new() } else { hung(&child) };
        end_group(child.id());
        let status = child.wait()?;
        let output = Output { status, stdout: contents(stdout)?, stderr: contents(stderr)? };
        ensure!(in_time, "{command:?} was not done within {DEADLINE:?}\n{output}\n{reports}");
        Ok(output)
    }

    /// Runs a program that must succeed; its standard output.
    ///
    /// # Errors
    /// If it fails or hangs, with what it printed.
    pub fn succeed(&self, command: Command) -> Result<String> {
        let shown = format!("{command:?}");
        let output = self.run(command)?;
        ensure!(output.status.success(), "{shown}: {output}");
        Ok(output.stdout)
    }

    /// Waits for something that no [`Service`] of its own does.
    ///
    /// # Errors
    /// If it takes too long.
    pub fn await_that(&self, what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
        let start = Instant::now();
        while !holds() {
            ensure!(start.elapsed() < DEADLINE, "waited in vain: {what}");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Starts a program that runs until [`Service`] is dropped or stopped.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(&self, name: &str, mut command: Command) -> Result<Service> {
        let log = self.path(&format!("{name}.log"));
        let file = File::create(&log)?;
        command.stdout(file.try_clone()?).stderr(file);
        // SAFETY: it calls nothing but signal(2), which may be called after fork.
        unsafe { command.pre_exec(heed_interrupts) };
        let child = command.spawn().with_context(|| format!("{command:?}"))?;
        Ok(Service { child, log })
    }
}

/// A shell that runs the tests in the background ignores `SIGINT`, and a server that inherits that never ends.
fn heed_interrupts() -> io::Result<()> {
    // SAFETY: no handler is installed.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
    Ok(())
}

fn contents(mut file: File) -> Result<String> {
    use std::io::{Read, Seek};
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn hung(child: &Child) -> String {
    group_members(child.id()).into_iter().map(report).collect()
}

/// What a program left.
#[derive(Clone, Debug)]
pub struct Output {
    /// How it ended.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl std::fmt::Display for Output {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}\n{}{}", self.status, self.stdout, self.stderr)
    }
}

/// A server, whose whole process group is killed when this is dropped.
#[derive(Debug)]
pub struct Service {
    child: Child,
    log: PathBuf,
}

impl Service {
    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has printed.
    pub fn log(&self) -> String {
        fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// If it cannot be waited for.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// What its processes are doing.
    pub fn diagnosis(&self) -> String {
        format!("{}\n{}", self.log(), hung(&self.child))
    }

    /// Waits until `ready` says so.
    ///
    /// # Errors
    /// If the server ends first, or takes too long.
    pub fn await_ready(&mut self, mut ready: impl FnMut() -> bool) -> Result<()> {
        let start = Instant::now();
        while !ready() {
            if let Some(status) = self.child.try_wait()? {
                bail!("the server ended: {status}\n{}", self.log());
            }
            ensure!(
                start.elapsed() < DEADLINE,
                "the server is not ready\n{}\n{}",
                self.log(),
                hung(&self.child)
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Waits until something accepts connections at `port`.
    ///
    /// # Errors
    /// As [`Self::await_ready`].
    pub fn await_port(&mut self, port: u16) -> Result<()> {
        self.await_ready(|| TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok())
    }

    /// Asks it to end with `signal`, and waits until it has.
    ///
    /// # Errors
    /// If it does not end.
    pub fn stop(mut self, signal: rustix::process::Signal) -> Result<ExitStatus> {
        let pid = i32::try_from(self.pid()).ok().and_then(rustix::process::Pid::from_raw).context("a pid")?;
        rustix::process::kill_process(pid, signal).context("kill")?;
        ensure!(
            wait_until(&self.child, Instant::now() + DEADLINE)?,
            "the server does not end\n{}\n{}",
            self.log(),
            hung(&self.child)
        );
        Ok(self.child.wait()?)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        end_group(self.child.id());
        // Nothing can be done about a process that cannot be waited for.
        let _ = self.child.wait();
    }
}

/// A port that is free now, and will not be given to another socket that asks for any.
///
/// # Errors
/// If there is none.
pub fn free_port() -> Result<u16> {
    // A connection that was accepted on the port and closed by the accepting side first keeps it from being
    // handed out for a while, but not from being bound with SO_REUSEADDR, as servers do.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    let _client = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    drop(listener.accept()?);
    Ok(port)
}

/// Finds a program that a test needs.
///
/// # Errors
/// If it is missing: the test fails, and says what to install.
pub fn program(name: &str, package: &str) -> Result<PathBuf> {
    let postgres = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().join("bin"));
    let mut folders: Vec<PathBuf> = postgres.collect();
    // The newest version of several first.
    folders.sort_unstable_by(|a, b| b.cmp(a));
    folders.extend(PATH.split(':').map(PathBuf::from));
    folders
        .iter()
        .map(|folder| folder.join(name))
        .find(|path| is_executable(path))
        .with_context(|| format!("{name} is missing: install {package}"))
}

fn is_executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

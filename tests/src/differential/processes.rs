//! Starts the processes of a program, and talks to them.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Program, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen,
    recv, send, socket_with, socketpair,
};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use super::program::Setting;
use super::wire::{Command, MESSAGE_ROOM, Reply, control_path};
use crate::harness::{
    Stats, end_group, group_members, keep_inherited_descriptors_here, library, read_stats, report,
};

/// How long a process may take for one answer. A hang is a difference.
const DEADLINE: Duration = Duration::from_secs(5);

/// The processes of one end, all of which are killed when this is dropped.
#[derive(Debug)]
pub(super) struct Processes {
    first: Child,
    folder: PathBuf,
    forks: OwnedFd,
}

/// How to talk to one process.
#[derive(Debug)]
pub(super) struct Process {
    control: OwnedFd,
    pid: Pid,
}

/// Why a process gave no answer.
#[derive(Debug)]
pub(super) enum Silence {
    /// It is gone.
    Ended,
    /// It did not answer in time.
    Hangs,
}

impl Processes {
    /// Starts the first process of an end.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(super) fn start(
        program: &Path,
        folder: &Path,
        library: bool,
        setting: &Setting,
    ) -> Result<(Self, Process)> {
        keep_inherited_descriptors_here();
        let folder = folder.to_owned();
        fs::create_dir_all(folder.join("stats"))?;
        let forks = sequential_socket()?;
        bind(&forks, &SocketAddrUnix::new(control_path(&folder))?)?;
        listen(&forks, 8)?;
        let (control, other) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let mut command = Program::new(program);
        command
            .arg(&folder)
            .env_clear()
            .env("RUST_BACKTRACE", "0")
            .current_dir("/")
            .stdin(Stdio::from(other))
            .stdout(Stdio::null())
            .stderr(File::create(folder.join("stderr"))?)
            .process_group(0);
        if library {
            command
                .env("LD_PRELOAD", self::library()?)
                .env("THALLUS_STATS", folder.join("stats"))
                .env("THALLUS_UPGRADE_AFTER", setting.upgrade_after.to_string());
            if let Some(spin) = setting.spin {
                command.env("THALLUS_SPIN_US", spin.to_string());
            }
            if let Some(level) = std::env::var_os("THALLUS_TEST_LOG") {
                command.env("THALLUS_LOG", level);
            }
        }
        let first = command.spawn().with_context(|| program.display().to_string())?;
        let pid = pid_of(first.id())?;
        Ok((Self { first, folder, forks }, Process { control, pid }))
    }

    /// Waits for a fork to present itself.
    ///
    /// # Errors
    /// If none comes.
    pub(super) fn next_fork(&self, pid: i64) -> Result<Process> {
        if !is_readable(&self.forks)? {
            bail!("the fork does not begin");
        }
        Ok(Process {
            control: accept_with(&self.forks, SocketFlags::CLOEXEC)?,
            pid: pid_of(u32::try_from(pid)?)?,
        })
    }

    /// What all processes are doing.
    pub(super) fn diagnosis(&self) -> String {
        group_members(self.first.id()).into_iter().map(report).collect()
    }

    /// What the processes wrote to standard error: what an assertion said.
    pub(super) fn stderr(&self) -> String {
        fs::read(self.folder.join("stderr"))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// What the library counted in processes that have ended.
    ///
    /// # Errors
    /// If that is unreadable.
    pub(super) fn stats(&self) -> Result<Stats> {
        read_stats(&self.folder.join("stats"))
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        end_group(self.first.id());
        // Nothing can be done about a process that cannot be waited for.
        let _ = self.first.wait();
    }
}

impl Process {
    /// Has a command done.
    pub(super) fn ask(&self, command: &Command) -> Result<Reply, Silence> {
        self.tell(command).map_err(|_| Silence::Ended)?;
        if !is_readable(&self.control).map_err(|_| Silence::Ended)? {
            return Err(Silence::Hangs);
        }
        let mut room = vec![0; MESSAGE_ROOM];
        match recv(&self.control, &mut room[..], RecvFlags::empty()) {
            Ok((len, _)) if len > 0 => {
                Ok(serde_json::from_slice(&room[..len]).expect("replies are well-formed"))
            }
            _ => Err(Silence::Ended),
        }
    }

    /// Ends the process, and waits for that. Whether it did end.
    ///
    /// # Errors
    /// If it cannot be told.
    pub(super) fn end(&self, kill: bool) -> Result<bool> {
        let pidfd = pidfd_open(self.pid, PidfdFlags::empty()).context("pidfd_open")?;
        if kill {
            kill_process(self.pid, Signal::KILL).context("kill")?;
        } else {
            self.tell(&Command::Quit)?;
        }
        is_readable(&pidfd)
    }

    fn tell(&self, command: &Command) -> Result<()> {
        let text = serde_json::to_vec(command).context("commands have no map with strange keys")?;
        send(&self.control, &text, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

fn sequential_socket() -> Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

fn pid_of(id: u32) -> Result<Pid> {
    i32::try_from(id).ok().and_then(Pid::from_raw).context("a pid")
}

fn is_readable(fd: &OwnedFd) -> Result<bool> {
    let mut polled = [PollFd::new(fd, PollFlags::IN)];
    let timeout = Timespec { tv_sec: DEADLINE.as_secs().cast_signed(), tv_nsec: 0 };
    loop {
        match poll(&mut polled, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result? > 0),
        }
    }
}

//! Finds the processes that use the library, by the memfds of their arenas in `/proc/PID/fd`.
//!
//! An arena is shared by the forks of one family, so it is found once for each of them and told apart by
//! its inode. Its blocks name their owners by the pid that the owner itself sees: in a container, another
//! one than ours.

use std::collections::BTreeMap;
use std::fs::{read, read_dir, read_link, read_to_string};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, fstat, openat};
use rustix::io::Errno;
use thallus_transport::arena::{MEMFD_NAME, View};

/// What a look at all processes has found.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    pub(crate) families: Vec<Family>,
    /// Processes that could not be looked at for lack of permission, by pid.
    pub(crate) hidden: BTreeMap<u32, Process>,
    /// Processes with an arena of another version.
    pub(crate) other_versions: usize,
    /// Whether the arenas can be written to.
    writes: bool,
}

/// Processes that share one arena.
#[derive(Debug)]
pub(crate) struct Family {
    pub(crate) inode: Inode,
    pub(crate) view: View,
    /// By the pid that each sees itself.
    pub(crate) members: BTreeMap<u32, Process>,
}

/// A live process.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    /// Its pid as this command sees it.
    pub(crate) pid: u32,
    /// Its name as in `/proc/PID/comm`.
    pub(crate) command: String,
}

/// Device and inode number.
pub(crate) type Inode = (u64, u64);

/// Looks at every process but this one. Fails if `/proc` itself can't be read, or if this process has too few descriptors or too
/// little memory to look at all.
pub(crate) fn scan() -> io::Result<Scan> {
    let mut scan = Scan::default();
    is_mounted()?;
    for entry in read_dir("/proc")? {
        let pid = entry?.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(pid) = pid.filter(|&pid| pid != std::process::id()) {
            scan.look_at(pid)?;
        }
    }
    Ok(scan)
}

impl Scan {
    /// Looks at the process `pid` alone, so that what is found can be written to. Fails as [`scan`] does.
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        let mut scan = Self { writes: true, ..Self::default() };
        is_mounted()?;
        scan.look_at(pid)?;
        Ok(scan)
    }

    /// The live process that a block of `family` names as `pid`; `None` if it has died.
    pub(crate) fn owner(&self, family: &Family, pid: u32) -> Option<Process> {
        // A pid can be used again, but not by another holder of the same arena. Members of a family may
        // run as another user, whose file descriptors we do not see.
        family.members.get(&pid).or_else(|| self.hidden.get(&pid)).cloned()
    }

    /// All processes with an arena, in the order of their pids.
    pub(crate) fn processes(&self) -> Vec<&Process> {
        let members = self.families.iter().flat_map(|family| family.members.values());
        let by_pid: BTreeMap<_, _> = members.map(|process| (process.pid, process)).collect();
        by_pid.into_values().collect()
    }

    fn look_at(&mut self, pid: u32) -> io::Result<()> {
        let folder = PathBuf::from(format!("/proc/{pid}"));
        match self.arenas(&folder) {
            Ok(arenas) if arenas.is_empty() => {}
            Ok(arenas) => {
                let Some(command) = command(&folder)? else { return Ok(()) };
                let inner_pid = innermost_pid(&folder).unwrap_or(pid);
                self.other_versions += usize::from(arenas.contains(&None));
                for index in arenas.into_iter().flatten() {
                    let process = Process { pid, command: command.clone() };
                    self.families[index].members.insert(inner_pid, process);
                }
            }
            Err(error) if error.kind() == ErrorKind::PermissionDenied && has_memory(&folder) => {
                if let Some(command) = command(&folder)? {
                    self.hidden.insert(pid, Process { pid, command });
                }
            }
            Err(error) => has_ended(error)?,
        }
        Ok(())
    }

    /// The arenas that the process of `folder` has open, as places among the families; `None` for one of another version.
    fn arenas(&mut self, folder: &Path) -> io::Result<Vec<Option<usize>>> {
        let wanted = format!("/memfd:{MEMFD_NAME} (deleted)");
        let mut arenas = Vec::new();
        for entry in read_dir(folder.join("fd"))? {
            let link = entry?.path();
            match read_link(&link) {
                Ok(target) if target.as_os_str() == wanted.as_str() && is_writable(&link) => {}
                Err(error) if error.kind() == ErrorKind::PermissionDenied => return Err(error),
                // Another file, or one that was closed meanwhile.
                _ => continue,
            }
            // Anyone can name a file so; were it a FIFO or a terminal, opening it must do nothing.
            let access = if self.writes { OFlags::RDWR } else { OFlags::RDONLY };
            let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
            match openat(CWD, &link, flags, Mode::empty()) {
                Ok(fd) => arenas.push(self.family(fd)?),
                Err(Errno::ACCESS) => return Err(ErrorKind::PermissionDenied.into()),
                Err(errno) => has_ended(errno.into())?,
            }
        }
        Ok(arenas)
    }

    /// The place of the arena behind a descriptor, which is closed here: a process may have more than this one may have open.
    fn family(&mut self, fd: OwnedFd) -> io::Result<Option<usize>> {
        let stat = fstat(&fd)?;
        let inode = (stat.st_dev, stat.st_ino);
        if let Some(index) = self.families.iter().position(|family| family.inode == inode) {
            return Ok(Some(index));
        }
        let Some(view) = View::open(fd, self.writes) else { return Ok(None) };
        self.families.push(Family { inode, view, members: BTreeMap::new() });
        Ok(Some(self.families.len() - 1))
    }
}

/// Without it, its folder is still there, and as empty as if no process ran.
fn is_mounted() -> io::Result<()> {
    read_link("/proc/self").map(drop)
}

/// Whether a descriptor in `/proc/PID/fd` can be written to (proc_pid_fd(5)): who can't only looks, as this command does.
fn is_writable(link: &Path) -> bool {
    link.symlink_metadata().is_ok_and(|link| link.mode() & 0o200 != 0)
}

/// Whether there is such a process, and it has not ended.
pub(crate) fn is_alive(pid: u32) -> bool {
    has_memory(Path::new(&format!("/proc/{pid}")))
}

/// Kernel threads and zombies have none, and nothing to hide.
fn has_memory(folder: &Path) -> bool {
    read(folder.join("statm")).is_ok_and(|pages| !pages.starts_with(b"0 "))
}

/// The name of a process; `None` if it has ended.
fn command(folder: &Path) -> io::Result<Option<String>> {
    match read(folder.join("comm")) {
        Ok(name) => Ok(Some(String::from_utf8_lossy(&name).trim_end_matches('\n').to_owned())),
        Err(error) => has_ended(error).map(|()| None),
    }
}

/// What could not be opened or read is gone by now, unless it is this process that lacks something: then nobody is missing without
/// a word.
fn has_ended(error: io::Error) -> io::Result<()> {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Err(error),
        _ => Ok(()),
    }
}

/// The pid that the process sees itself, the last of `NSpid` in `/proc/PID/status`.
fn innermost_pid(folder: &Path) -> Option<u32> {
    let status = read_to_string(folder.join("status")).ok()?;
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    pids.split_whitespace().next_back()?.parse().ok()
}

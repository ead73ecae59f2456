//! Finds the processes that use the library, by the memfds of their arenas in `/proc/PID/fd`.
//!
//! An arena is shared by the forks of one family, so it is found once for each of them and told apart by
//! its inode. Its blocks name their owners by the pid that the owner itself sees: in a container, another
//! one than ours.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::{read, read_dir, read_link, read_to_string};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rustix::fs::{CWD, Mode, OFlags, fstat, openat};
use rustix::io::Errno;
use rustix::param::clock_ticks_per_second;
use thallus_transport::arena::{MEMFD_NAME, Snapshot, View};

/// What a look at all processes has found.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    pub(crate) families: Vec<Family>,
    /// Processes that could not be looked at for lack of permission, by pid.
    pub(crate) hidden: BTreeMap<u32, Process>,
    /// Their pids, by the pid that each sees itself.
    hidden_inside: HashMap<u32, Vec<u32>>,
    /// Processes with an arena of another version.
    pub(crate) other_versions: usize,
    /// What has become of each arena.
    arenas: HashMap<Inode, Arena>,
    /// Those that are not shown, or not with all of their processes: [`Budget`].
    beyond: HashSet<Inode>,
    budget: Budget,
}

/// Processes that share one arena.
#[derive(Debug)]
pub(crate) struct Family {
    pub(crate) inode: Inode,
    pub(crate) connections: Snapshot,
    /// By the pid that each sees itself.
    pub(crate) members: BTreeMap<u32, Process>,
    /// By which the arena was found.
    link: PathBuf,
}

/// A live process.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    /// Its pid as this command sees it.
    pub(crate) pid: u32,
    /// Its name as in `/proc/PID/comm`.
    pub(crate) command: Rc<str>,
}

/// Device and inode number.
pub(crate) type Inode = (u64, u64);

/// An arena that has been looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Arena {
    /// Its place among the families.
    Family(usize),
    OtherVersion,
    /// There was no room for it.
    Beyond,
}

/// How much memory the looked at may cost who looks. Anybody may have any number of arenas with as many connections as they hold, or
/// that look like it, and share them with any number of processes.
#[derive(Debug, Default)]
struct Budget {
    /// Parts that have been spent for each user: one for a connection end or a process that has an arena, [`PARTS_OF_AN_ARENA`] for
    /// the arena.
    of_users: HashMap<u32, usize>,
    /// For all of them: a user may have several ids, by a user namespace.
    spent: usize,
}

/// About 1.5 KB are kept and printed for one, so that these are 200 MB for a user.
const PARTS_FOR_A_USER: usize = 1 << 17;
const PARTS: usize = 1 << 19;
const PARTS_OF_AN_ARENA: usize = 16;

impl Budget {
    /// Spends as many parts for a user. False if all have been spent before.
    fn spend(&mut self, user: u32, parts: usize) -> bool {
        let of_user = self.of_users.entry(user).or_default();
        let has_room = *of_user < PARTS_FOR_A_USER && self.spent < PARTS;
        if has_room {
            *of_user += parts;
            self.spent += parts;
        }
        has_room
    }
}

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
    /// Looks at the process `pid` alone. Fails as [`scan`] does.
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        let mut scan = Self::default();
        is_mounted()?;
        scan.look_at(pid)?;
        Ok(scan)
    }

    /// The live process that a block of `family` names as `pid`; `None` if it has died. The connection was opened at `opened_ns`
    /// (`CLOCK_BOOTTIME`).
    pub(crate) fn owner(&self, family: &Family, pid: u32, opened_ns: u64) -> Option<Process> {
        // A pid can be used again, but not by another holder of the same arena.
        family.members.get(&pid).cloned().or_else(|| self.hidden_owner(pid, opened_ns))
    }

    /// Members of a family may run as another user, whose file descriptors we do not see. Then the one that sees this pid itself is taken
    /// for the owner, unless there are several, as in containers, or it began after the connection: it has got the pid of one that
    /// died.
    fn hidden_owner(&self, pid: u32, opened_ns: u64) -> Option<Process> {
        let &[outer] = &self.hidden_inside.get(&pid)?[..] else { return None };
        let process = self.hidden.get(&outer)?;
        (started_ns(outer)? <= opened_ns).then(|| process.clone())
    }

    /// All processes with an arena, in the order of their pids.
    pub(crate) fn processes(&self) -> Vec<&Process> {
        let members = self.families.iter().flat_map(|family| family.members.values());
        let by_pid: BTreeMap<_, _> = members.map(|process| (process.pid, process)).collect();
        by_pid.into_values().collect()
    }

    /// Arenas that are not shown, or not with all of their processes, for there are too many of one user's.
    pub(crate) fn arenas_not_shown(&self) -> usize {
        self.beyond.len()
    }

    fn look_at(&mut self, pid: u32) -> io::Result<()> {
        let folder = PathBuf::from(format!("/proc/{pid}"));
        match self.arenas(&folder) {
            Ok(arenas) if arenas.is_empty() => {}
            Ok(arenas) => {
                let Some(command) = command(&folder)? else { return Ok(()) };
                let inner_pid = innermost_pid(&folder).unwrap_or(pid);
                self.other_versions +=
                    usize::from(arenas.iter().any(|(arena, _)| *arena == Arena::OtherVersion));
                for (arena, user) in arenas {
                    let Arena::Family(index) = arena else { continue };
                    let family = &mut self.families[index];
                    if self.budget.spend(user, 1) {
                        let process = Process { pid, command: command.clone() };
                        family.members.insert(inner_pid, process);
                    } else {
                        self.beyond.insert(family.inode);
                    }
                }
            }
            Err(error) if error.kind() == ErrorKind::PermissionDenied && has_memory(&folder) => {
                if let Some(command) = command(&folder)? {
                    self.hidden.insert(pid, Process { pid, command });
                    self.hidden_inside.entry(innermost_pid(&folder).unwrap_or(pid)).or_default().push(pid);
                }
            }
            Err(error) => has_ended(error)?,
        }
        Ok(())
    }

    /// The arenas that the process of `folder` has open, each with the user whose it is.
    fn arenas(&mut self, folder: &Path) -> io::Result<BTreeSet<(Arena, u32)>> {
        let wanted = format!("/memfd:{MEMFD_NAME} (deleted)");
        let mut arenas = BTreeSet::new();
        for entry in read_dir(folder.join("fd"))? {
            let link = entry?.path();
            match read_link(&link) {
                Ok(target) if target.as_os_str() == wanted.as_str() && is_writable(&link) => {}
                Err(error) if error.kind() == ErrorKind::PermissionDenied => return Err(error),
                // Another file, or one that was closed meanwhile.
                _ => continue,
            }
            match open(&link, OFlags::RDONLY).map_err(io::Error::from).and_then(|fd| self.arena(fd, link)) {
                Ok(arena) => _ = arenas.insert(arena),
                Err(error) if error.kind() == ErrorKind::PermissionDenied => return Err(error),
                Err(error) => has_ended(error)?,
            }
        }
        Ok(arenas)
    }

    /// The arena behind a descriptor, which is closed here: a process may have more than this one may have open. And the user who
    /// made it.
    fn arena(&mut self, fd: OwnedFd, link: PathBuf) -> io::Result<(Arena, u32)> {
        let stat = fstat(&fd)?;
        let (inode, user) = ((stat.st_dev, stat.st_ino), stat.st_uid);
        if let Some(known) = self.arenas.get(&inode) {
            return Ok((*known, user));
        }
        let arena = if self.budget.spend(user, PARTS_OF_AN_ARENA) {
            self.new_arena(fd, inode, user, link)?
        } else {
            self.beyond.insert(inode);
            Arena::Beyond
        };
        self.arenas.insert(inode, arena);
        Ok((arena, user))
    }

    fn new_arena(&mut self, fd: OwnedFd, inode: Inode, user: u32, link: PathBuf) -> io::Result<Arena> {
        let Some(connections) = Snapshot::of(fd)? else { return Ok(Arena::OtherVersion) };
        self.budget.spend(user, connections.len());
        self.families.push(Family { inode, connections, members: BTreeMap::new(), link });
        Ok(Arena::Family(self.families.len() - 1))
    }
}

impl Family {
    /// A family of these members alone.
    #[cfg(test)]
    pub(crate) fn of(inode: Inode, connections: Snapshot, members: BTreeMap<u32, Process>) -> Self {
        Self { inode, connections, members, link: PathBuf::new() }
    }

    /// The arena itself, where something can be asked for. `None` if the process has closed it meanwhile.
    pub(crate) fn view(&self) -> io::Result<Option<View>> {
        let fd = open(&self.link, OFlags::RDWR)?;
        let stat = fstat(&fd)?;
        if (stat.st_dev, stat.st_ino) == self.inode { Ok(View::open(fd)?) } else { Ok(None) }
    }
}

/// Anyone can name a file as arenas are; were it a FIFO or a terminal, opening it must do nothing.
fn open(link: &Path, access: OFlags) -> rustix::io::Result<OwnedFd> {
    let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    openat(CWD, link, flags, Mode::empty())
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
fn command(folder: &Path) -> io::Result<Option<Rc<str>>> {
    match read(folder.join("comm")) {
        Ok(name) => Ok(Some(String::from_utf8_lossy(&name).trim_end_matches('\n').into())),
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

/// When a process began, by `CLOCK_BOOTTIME`, rounded down to clock ticks.
fn started_ns(pid: u32) -> Option<u64> {
    let stat = read(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may have brackets. What follows begins with field 3 (proc_pid_stat(5)).
    let name_end = stat.iter().rposition(|&byte| byte == b')')?;
    let rest = str::from_utf8(&stat[name_end + 1..]).ok()?;
    let ticks: u64 = rest.split_whitespace().nth(22 - 3)?.parse().ok()?;
    ticks.checked_mul(1_000_000_000 / clock_ticks_per_second())
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::process::Command;

    use rustix::time::{ClockId, clock_gettime};
    use thallus_transport::arena::{Chunk, Role};

    fn now_ns() -> u64 {
        let now = clock_gettime(ClockId::Boottime);
        now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
    }

    #[test]
    fn a_user_with_too_much_hides_nobody_elses() {
        let mut budget = Budget::default();
        assert!(budget.spend(1, PARTS_FOR_A_USER - 1));
        assert!(budget.spend(1, 100) && !budget.spend(1, 1));
        assert!(budget.spend(2, 1));
        for user in 3.. {
            if !budget.spend(user, PARTS_FOR_A_USER) {
                break;
            }
        }
        assert!(!budget.spend(2, 1));
        assert!((PARTS..PARTS + 2 * PARTS_FOR_A_USER).contains(&budget.spent), "{}", budget.spent);
    }

    #[test]
    fn arenas_for_which_there_is_no_room_are_counted_once() {
        let chunks = [(); 2].map(|()| Chunk::create(Ok).unwrap());
        for chunk in &chunks {
            chunk.allocate(Role::Client, std::process::id(), 3, 1).unwrap();
        }
        let user = fstat(chunks[0].fd().unwrap()).unwrap().st_uid;
        let mut scan = Scan::default();
        let look = |scan: &mut Scan, chunk: &Chunk| {
            scan.arena(chunk.fd().unwrap().try_clone_to_owned().unwrap(), PathBuf::new()).unwrap().0
        };
        assert_eq!(look(&mut scan, &chunks[0]), Arena::Family(0));
        assert_eq!(scan.budget.spent, PARTS_OF_AN_ARENA + 1);
        scan.budget.spend(user, PARTS_FOR_A_USER);
        assert_eq!(
            [0, 1, 1].map(|index| look(&mut scan, &chunks[index])),
            [Arena::Family(0), Arena::Beyond, Arena::Beyond]
        );
        assert_eq!((scan.families.len(), scan.arenas_not_shown()), (1, 1));
    }

    #[test]
    fn who_cannot_be_looked_at_owns_what_was_opened_while_it_lived() {
        let chunk = Chunk::create(Ok).unwrap();
        let connections = Snapshot::of(chunk.fd().unwrap()).unwrap().unwrap();
        let family = Family::of((1, 2), connections, BTreeMap::new());
        let before = now_ns();
        std::thread::sleep(std::time::Duration::from_millis(20));
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = child.id();
        let mut scan = Scan::default();
        scan.hidden.insert(pid, Process { pid, command: "sleep".into() });
        // In its container it is process 7.
        scan.hidden_inside.insert(7, vec![pid]);
        let owner =
            |scan: &Scan, inner, opened_ns| scan.owner(&family, inner, opened_ns).map(|owner| owner.pid);
        let now = now_ns();
        let found = [(7, now), (7, before), (pid, now)].map(|(inner, opened)| owner(&scan, inner, opened));
        scan.hidden_inside.insert(7, vec![pid, 1]);
        let of_two = owner(&scan, 7, now);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((found, of_two), ([Some(pid), None, None], None));
    }
}

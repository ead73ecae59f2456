//! What this process's connections did, written to `THALLUS_STATS=DIR/<pid>.json` when it ends.
//!
//! A connection counts in the process that last did I/O on it, once, when that process closes it or ends.

use std::ffi::OsString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, open, unlink};
use rustix::io::Errno;
use serde_json::{Map, Value, json};
use thallus_transport::arena::{Block, flag, now_ns};
use thallus_transport::reason::Reason;
use thallus_transport::uninterrupted::Uninterrupted;
use thallus_transport::{process, unheard};

use crate::table::Young;
use crate::{config, log, table};

/// Sums over the connections that are gone.
#[derive(Clone, Debug, Default)]
struct Totals {
    shm: u64,
    verbs: u64,
    returned: u64,
    reasons: Vec<(Reason, u64)>,
    ring_sent: u64,
    ring_received: u64,
    tcp_sent: u64,
    tcp_received: u64,
    doorbells: u64,
    chimes: u64,
    sleeps: u64,
    spin_hits: u64,
}

impl Totals {
    const fn new() -> Self {
        Self {
            shm: 0,
            verbs: 0,
            returned: 0,
            reasons: Vec::new(),
            ring_sent: 0,
            ring_received: 0,
            tcp_sent: 0,
            tcp_received: 0,
            doorbells: 0,
            chimes: 0,
            sleeps: 0,
            spin_hits: 0,
        }
    }

    fn add(&mut self, block: &Block) {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let switched = |word: &AtomicU32| word.load(Ordering::Relaxed) != 0;
        if block.has(flag::READY) || switched(&block.recv_switched) || switched(&block.send_switched) {
            *(if block.has(flag::VERBS) { &mut self.verbs } else { &mut self.shm }) += 1;
        } else {
            self.add_reasons(block.reason(), 1);
        }
        self.returned += u64::from(block.has(flag::RETURNED));
        self.ring_sent += load(&block.ring_sent);
        self.ring_received += load(&block.ring_received);
        self.tcp_sent += load(&block.tcp_sent);
        self.tcp_received += load(&block.tcp_received);
        self.doorbells += block.bells();
        self.chimes += load(&block.chimes);
        self.sleeps += load(&block.sleeps);
        self.spin_hits += load(&block.spin_hits);
    }

    /// Takes over what [`GONE_YOUNG`] has counted.
    fn add_gone_young(&mut self) {
        for (&reason, count) in Reason::ALL.iter().zip(&GONE_YOUNG.reasons) {
            let count = count.swap(0, Ordering::Relaxed);
            if count > 0 {
                self.add_reasons(reason, count);
            }
        }
        self.tcp_sent += GONE_YOUNG.tcp_sent.swap(0, Ordering::Relaxed);
        self.tcp_received += GONE_YOUNG.tcp_received.swap(0, Ordering::Relaxed);
    }

    /// One that is young, and open.
    fn add_young(&mut self, young: Young, fd: i32) {
        let (sent, received) = young.bytes(fd);
        self.add_reasons(young.reason(), 1);
        self.tcp_sent += sent;
        self.tcp_received += received;
    }

    fn add_reasons(&mut self, reason: Reason, more: u64) {
        match self.reasons.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, count)) => *count += more,
            None => self.reasons.push((reason, more)),
        }
    }

    fn to_json(&self) -> Value {
        let mut upgraded = Map::new();
        for (fabric, count) in [("shm", self.shm), ("verbs", self.verbs)] {
            if count > 0 {
                upgraded.insert(fabric.into(), count.into());
            }
        }
        let reasons: Map<_, _> =
            self.reasons.iter().map(|(reason, count)| (reason.name().into(), (*count).into())).collect();
        json!({
            "pid": process::id(),
            "command": command(),
            "upgraded": upgraded,
            "not_upgraded": reasons,
            "returned_to_tcp": self.returned,
            "ring_bytes_sent": self.ring_sent,
            "ring_bytes_received": self.ring_received,
            "tcp_bytes_sent": self.tcp_sent,
            "tcp_bytes_received": self.tcp_received,
            "doorbells_sent": self.doorbells,
            "chimes_sent": self.chimes,
            "sleeps": self.sleeps,
            "spin_hits": self.spin_hits,
        })
    }
}

static GONE: Mutex<Totals> = Mutex::new(Totals::new());

/// Of those that were young to their end: without a lock, for which signals would have to be blocked. A short connection would
/// feel that.
#[derive(Debug)]
struct YoungTotals {
    /// By [`Reason::ALL`].
    reasons: [AtomicU64; Reason::ALL.len()],
    tcp_sent: AtomicU64,
    tcp_received: AtomicU64,
}

static GONE_YOUNG: YoungTotals = YoungTotals {
    reasons: [const { AtomicU64::new(0) }; Reason::ALL.len()],
    tcp_sent: AtomicU64::new(0),
    tcp_received: AtomicU64::new(0),
};

const FIRST_CODE: usize = Reason::ALL[0] as usize;
const _: () = assert!(
    Reason::ALL[Reason::ALL.len() - 1] as usize - FIRST_CODE + 1 == Reason::ALL.len(),
    "codes leave none out"
);

impl YoungTotals {
    fn add(&self, young: Young, fd: i32) {
        let (sent, received) = young.bytes(fd);
        self.reasons[young.reason() as usize - FIRST_CODE].fetch_add(1, Ordering::Relaxed);
        self.tcp_sent.fetch_add(sent, Ordering::Relaxed);
        self.tcp_received.fetch_add(received, Ordering::Relaxed);
    }

    fn is_empty(&self) -> bool {
        self.reasons.iter().all(|count| count.load(Ordering::Relaxed) == 0)
    }
}

fn directory() -> Option<&'static OsString> {
    static DIRECTORY: OnceLock<Option<OsString>> = OnceLock::new();
    DIRECTORY
        .get_or_init(|| {
            std::env::var_os("THALLUS_STATS").filter(|path| !path.is_empty() && !config::is_off())
        })
        .as_ref()
}

/// Keeps the sums as they are over a fork, so that the child does not find them locked.
#[derive(Debug)]
pub(crate) struct Quiet {
    _totals: MutexGuard<'static, Totals>,
}

/// Locks the sums for a fork.
pub(crate) fn quiesce() -> Option<Quiet> {
    // Nor must another thread be finding that out.
    directory();
    Some(Quiet { _totals: GONE.lock().ok()? })
}

/// Whether there is anything to count: a connect that failed is no connection.
pub(crate) fn counts(block: &Block) -> bool {
    block.has(flag::CONNECTED)
        || block.tcp_sent.load(Ordering::Relaxed) > 0
        || block.tcp_received.load(Ordering::Relaxed) > 0
}

/// This process was the last to let go of a connection, so it counts here. The caller lets no signal handler in between.
pub(crate) fn closed(block: &Block) {
    if directory().is_some()
        && counts(block)
        && let Ok(mut totals) = GONE.lock()
    {
        totals.add(block);
    }
}

/// Whether anybody will read the sums.
pub(crate) fn are_wanted() -> bool {
    directory().is_some()
}

/// As [`closed`], for a connection that was young to its end.
pub(crate) fn closed_young(young: Young, fd: i32) {
    GONE_YOUNG.add(young, fd);
}

/// In a forked child: what happened before was the parent's.
pub(crate) fn forked() {
    if let Ok(mut totals) = GONE.try_lock() {
        totals.add_gone_young();
        *totals = Totals::new();
    }
}

/// Whether anything has been counted, or is open.
pub(crate) fn has_connections() -> bool {
    let _uninterrupted = Uninterrupted::begin();
    let gone = table::patiently(&GONE)
        .is_some_and(|totals| totals.shm + totals.verbs > 0 || !totals.reasons.is_empty());
    let mut open = false;
    table::for_each(|_, _, used| open |= used);
    table::for_each_young(|_, young| open |= young.is_used());
    gone || open || !GONE_YOUNG.is_empty()
}

/// Writes the file, if one is wanted, and gives its path back. Connections that are still open count where they are let go of last: here,
/// unless another process has them, if this one `ends`. A second program in the same process (after exec) writes a
/// second file.
pub(crate) fn write(ends: bool) -> Option<PathBuf> {
    let directory = directory().filter(|_| config::tells())?;
    let _uninterrupted = Uninterrupted::begin();
    let mut gone = table::patiently(&GONE)?;
    gone.add_gone_young();
    let mut totals = gone.clone();
    if ends {
        table::let_go_of_all(|block| {
            if counts(block) {
                totals.add(block);
            }
        });
    } else {
        table::for_each(|_, connection, _| {
            if connection.block.held_only_by(process::id()) && counts(connection.block) {
                totals.add(connection.block);
            }
        });
    }
    table::for_each_young(|fd, young| {
        if table::counts(young, fd) {
            totals.add_young(young, fd);
        }
    });
    drop(gone);
    let text = totals.to_json().to_string();
    let folder = Path::new(directory);
    let mut result = write_new(folder, text.as_bytes());
    if result == Err(Errno::MFILE) {
        result = beyond_the_limit(|| write_new(folder, text.as_bytes()));
    }
    result.inspect_err(|errno| log::warn!("no statistics in {}: {errno}", folder.display())).ok()
}

/// The process goes on as the program that it was, which will tell all that has been [written](write).
pub(crate) fn take_back(written: Option<PathBuf>) {
    if let Some(path) = written {
        let _ = unlink(&path);
    }
}

/// Runs `work` with as many descriptors as the hard limit allows: a process that has used up its own still has
/// something to tell.
fn beyond_the_limit<T>(work: impl FnOnce() -> T) -> T {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let before = getrlimit(Resource::Nofile);
    let mut most = before;
    most.current = before.maximum;
    let raised = setrlimit(Resource::Nofile, most).is_ok();
    let result = work();
    if raised {
        let _ = setrlimit(Resource::Nofile, before);
    }
    result
}

/// The names that a file of this process may have, in their order. Of a process that executes one program after the other there may be
/// any number: then the time since the boot, in nanoseconds, takes the number's place.
fn names() -> impl Iterator<Item = String> {
    let pid = process::id();
    let numbered = (1..LAST_NUMBER).map(move |number| format!("{pid}.{number}.json"));
    let timed = (0..TIMED_NAMES).map(move |_| format!("{pid}.{}.json", now_ns()));
    std::iter::once(format!("{pid}.json")).chain(numbered).chain(timed)
}

const LAST_NUMBER: u32 = 100;
const TIMED_NAMES: u32 = 10;

/// Makes a file of `text` in `folder` under the first name that is free. It appears when it is whole where the file system can do
/// that; what can't be written whole does not stay.
fn write_new(folder: &Path, text: &[u8]) -> Result<PathBuf, Errno> {
    if let Some(file) = unnamed(folder)? {
        unheard::write_all(&file, text)?;
        let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
        let link = |path: &Path| linkat(CWD, &itself, CWD, path, AtFlags::SYMLINK_FOLLOW);
        match under_a_free_name(folder, link) {
            Err(errno) if !is_final(errno) => {}
            outcome => return outcome,
        }
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    under_a_free_name(folder, |path| {
        let file = open(path, flags, Mode::from_raw_mode(0o644))?;
        let outcome = unheard::write_all(&file, text);
        if outcome.is_err() {
            let _ = unlink(path);
        }
        outcome
    })
}

/// A file without a name; none where there is no such thing.
fn unnamed(folder: &Path) -> Result<Option<OwnedFd>, Errno> {
    let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
    match open(folder, flags, Mode::from_raw_mode(0o644)) {
        Ok(file) => Ok(Some(file)),
        Err(errno) if is_final(errno) => Err(errno),
        Err(_) => Ok(None),
    }
}

/// Whether it would be no better with a name. Else the file system has no files without one, or `/proc` is missing, by which they get
/// one.
fn is_final(errno: Errno) -> bool {
    matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOSPC | Errno::DQUOT | Errno::EXIST)
}

fn under_a_free_name(folder: &Path, make: impl Fn(&Path) -> Result<(), Errno>) -> Result<PathBuf, Errno> {
    let mut outcomes = names().map(|name| {
        let path = folder.join(name);
        make(&path).map(|()| path)
    });
    outcomes.find(|outcome| !matches!(outcome, Err(Errno::EXIST))).unwrap_or(Err(Errno::EXIST))
}

/// The process's command line, its arguments joined by spaces.
fn command() -> String {
    let bytes = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    text.trim_end_matches('\0').replace('\0', " ")
}

extern "C" fn at_exit() {
    crate::ops::process::exiting();
}

extern "C" fn at_load() {
    crate::abi::silence_panics();
    log::loaded();
    crate::ops::process::loaded();
    // SAFETY: the handler lives as long as this library, which is never unloaded.
    unsafe { libc::atexit(at_exit) };
}

/// Runs when the library is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

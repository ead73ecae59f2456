//! `THALLUS_LOG=level[:path]`. Silent unless asked for; never on the program's standard output.
//!
//! A logging library would allocate and lock in the middle of somebody else's system calls; one line is one
//! `write` here.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU8, Ordering};

use once_cell::race::OnceBox;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use thallus_transport::environment::CONFIG;
pub(crate) use thallus_transport::environment::Level;
use thallus_transport::unheard;
use thallus_transport::uninterrupted::Descriptor;

static LEVEL: AtomicU8 = AtomicU8::new(Level::Off as u8);
static FILE: OnceBox<Descriptor> = OnceBox::new();
static STANDARD_ERROR: OnceBox<Option<Identity>> = OnceBox::new();

/// Which file a descriptor is: device and inode, and the device that a special file stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity(u64, u64, u64);

impl Identity {
    fn of(fd: BorrowedFd<'_>) -> Option<Self> {
        let file = rustix::fs::fstat(fd).ok()?;
        Some(Self(file.st_dev, file.st_ino, file.st_rdev))
    }
}

/// Remembers what standard error is while it surely is: when the library is loaded. A program that closes descriptor 2 opens
/// something else there, of which no line may become part. A copy of the descriptor would keep a reader of it waiting
/// for the end.
pub(crate) fn loaded() {
    if ["THALLUS_LOG", CONFIG].iter().any(|name| std::env::var_os(name).is_some()) {
        standard_error();
    }
}

/// What standard error was when this was called first.
fn standard_error() -> Option<Identity> {
    *STANDARD_ERROR.get_or_init(|| Box::new(Identity::of(rustix::stdio::stderr())))
}

/// Starts logging to `path`, or to standard error without one. Several threads may do so at the same time: the first one's
/// descriptor stays.
pub(crate) fn start(level: Level, path: Option<&str>) {
    use rustix::fs::{Mode, OFlags};
    if let Some(path) = path {
        // A pipe that nobody reads, or not fast enough, must not hold the program up.
        let never_waits = OFlags::NONBLOCK | OFlags::NOCTTY;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::CLOEXEC | never_waits;
        let Ok(file) = rustix::fs::open(path, flags, Mode::from_raw_mode(0o644)) else { return };
        let Ok(file) = crate::table::place(file) else { return };
        let _ = FILE.set(Box::new(file.into()));
    } else {
        standard_error();
    }
    LEVEL.store(level as u8, Ordering::Relaxed);
}

/// The log file's descriptor, which the program must not close.
pub(crate) fn internal_fd() -> Option<i32> {
    use std::os::fd::AsRawFd;
    FILE.get().map(|file| file.as_fd().as_raw_fd())
}

/// Whether lines of this level are wanted.
pub(crate) fn wants(level: Level) -> bool {
    level as u8 <= LEVEL.load(Ordering::Relaxed)
}

/// Writes one line. The last one, if nobody reads any more.
pub(crate) fn line(level: Level, text: std::fmt::Arguments<'_>) {
    if !wants(level) {
        return;
    }
    let Some(target) = target().filter(|target| !would_wait(*target)) else { return };
    let mut line = String::with_capacity(128);
    let _ = writeln!(line, "thallus[{}] {level:?}: {text}", thallus_transport::process::id());
    if unheard::write(target, line.as_bytes()) == Err(Errno::PIPE) {
        LEVEL.store(Level::Off as u8, Ordering::Relaxed);
    }
}

/// Whether a line would hold the program up: standard error may be a pipe that nobody reads just now.
fn would_wait(target: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(target, PollFlags::OUT)];
    rustix::event::poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(0)
}

/// The log file, or standard error, while descriptor 2 is that.
fn target() -> Option<BorrowedFd<'static>> {
    if let Some(file) = FILE.get() {
        return Some(file.as_fd());
    }
    let file = rustix::stdio::stderr();
    Identity::of(file).filter(|&now| standard_error() == Some(now)).map(|_| file)
}

macro_rules! info {
    ($($part:tt)*) => { $crate::log::line($crate::log::Level::Info, format_args!($($part)*)) };
}
macro_rules! warn_ {
    ($($part:tt)*) => { $crate::log::line($crate::log::Level::Warn, format_args!($($part)*)) };
}
pub(crate) use {info, warn_ as warn};

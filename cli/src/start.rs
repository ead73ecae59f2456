//! What this process was started with, and becoming another program with the same.
//!
//! Before `main` std has `SIGPIPE` ignored and `/dev/null` opened for those of descriptors 0 to 2 that are closed; when it executes a
//! program, it sets that signal to its default and empties the signal mask. A program that is started by `thallus run` is to have
//! all of this as `thallus run` had it.

#![allow(unsafe_code, reason = "code that runs before main has no safe form, nor have signals' dispositions")]

use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{SigHandler, Signal, signal};
use nix::unistd::execvpe;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::stdio::{stderr, stdin, stdout};

static PIPE_IGNORED: AtomicBool = AtomicBool::new(false);
static CLOSED: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];

/// Runs before std does anything.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = note;

extern "C" fn note() {
    // SAFETY: integers and a mask, for which zero is valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: nothing is changed, and the action is writable.
    let known = unsafe { libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut action) } == 0;
    PIPE_IGNORED.store(known && action.sa_sigaction == libc::SIG_IGN, Ordering::Relaxed);
    for (fd, closed) in (0..).zip(&CLOSED) {
        // SAFETY: only looks whether there is such a descriptor.
        closed.store(unsafe { libc::fcntl(fd, libc::F_GETFD) } == -1, Ordering::Relaxed);
    }
}

/// Whether this process was started without this one of descriptors 0 to 2.
pub(crate) fn was_closed(fd: BorrowedFd<'_>) -> bool {
    let fd = usize::try_from(fd.as_raw_fd()).ok();
    fd.and_then(|fd| CLOSED.get(fd)).is_some_and(|closed| closed.load(Ordering::Relaxed))
}

/// Replaces this process by the program at a path with a slash in it. The first argument is its name. Returns only if that fails.
pub(crate) fn become_program(
    program: &Path,
    arguments: &[OsString],
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> io::Error {
    let text = |bytes: Vec<u8>| CString::new(bytes).map_err(io::Error::from);
    let variable =
        |(name, value): (OsString, OsString)| text([name.as_bytes(), b"=", value.as_bytes()].concat());
    let all = || {
        let arguments: Vec<_> =
            arguments.iter().map(|argument| text(argument.clone().into_vec())).collect::<Result<_, _>>()?;
        let environment: Vec<_> = environment.into_iter().map(variable).collect::<Result<_, _>>()?;
        Ok::<_, io::Error>((text(program.as_os_str().as_bytes().to_vec())?, arguments, environment))
    };
    let (program, arguments, environment) = match all() {
        Ok(all) => all,
        Err(error) => return error,
    };
    for (fd, closed) in [stdin(), stdout(), stderr()].into_iter().zip(&CLOSED) {
        if closed.load(Ordering::Relaxed) {
            // Should the program not start, it is still needed. It fails for no descriptor that is open.
            let _ = fcntl_setfd(fd, FdFlags::CLOEXEC);
        }
    }
    let disposition =
        if PIPE_IGNORED.load(Ordering::Relaxed) { SigHandler::SigIgn } else { SigHandler::SigDfl };
    // SAFETY: there is no handler.
    let _ = unsafe { signal(Signal::SIGPIPE, disposition) };
    let Err(errno) = execvpe(&program, &arguments, &environment);
    // What is said of it may meet a closed pipe.
    // SAFETY: there is no handler.
    let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigIgn) };
    errno.into()
}

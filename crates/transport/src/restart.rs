//! The sleep of a send, which a signal ends or does not, as its handler was installed without or with `SA_RESTART`
//! (signal(7)). poll(2), in which it sleeps, says `EINTR` for either, and does not tell which.
//!
//! Where there are handlers of both kinds, the signals of those that end nothing are kept back during the poll. A signalfd(2)
//! among what it waits for tells that one has come, and poll lets it through as it returns.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use libc::{pollfd, sigset_t};
use rustix::event::Timespec;
use rustix::io::Errno;

use crate::alarm::Watch;
use crate::settings::settings;
use crate::uninterrupted::Descriptor;

/// What the handlers say that the program has installed.
enum Handlers {
    /// Each ends a call.
    End,
    /// None does.
    Restart,
    /// These signals, which the calling thread does not block, do not.
    Some(sigset_t),
}

/// poll(2) on one descriptor, and the `watch`, for a call that may wait for `limit`, or for as long as it takes. False if nothing came
/// before that. A call that `has_some` of its bytes moved says how many at any signal (`tcp_sendmsg_locked` and `tcp_recvmsg_locked`).
pub(crate) fn poll(
    fd: i32,
    events: i16,
    watch: Option<&Watch>,
    limit: Option<&Timespec>,
    has_some: bool,
) -> Result<bool, Errno> {
    let poll = settings().sleep.poll;
    let count = 1 + usize::from(watch.is_some());
    loop {
        let mut list = [pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; 3];
        list[0] = pollfd { fd, events, revents: 0 };
        list[1].fd = watch.map_or(-1, Watch::fd);
        // A call with a limit ends in any case (signal(7)).
        let handlers = if limit.is_some() || has_some { Handlers::End } else { handlers() };
        match handlers {
            Handlers::End => poll(&mut list[..count], limit, None)?,
            Handlers::Restart => match poll(&mut list[..count], None, None) {
                Err(Errno::INTR) => continue,
                done => done?,
            },
            Handlers::Some(restarting) => match signals(&restarting) {
                Ok(pending) => {
                    list[count].fd = pending.as_fd().as_raw_fd();
                    poll(&mut list[..=count], None, Some(&with(blocked(), &restarting)))?;
                    if list[..count].iter().all(|one| one.revents == 0) {
                        continue;
                    }
                }
                // Without a descriptor for it each of them ends the call.
                Err(_) => poll(&mut list[..count], None, None)?,
            },
        }
        return Ok(list.iter().any(|one| one.revents != 0));
    }
}

/// Sleeps for `time`. A signal ends that, and the call unless all handlers restart it; as [`poll`].
pub(crate) fn nap(time: Timespec, has_some: bool) -> Result<(), Errno> {
    match (settings().sleep.poll)(&mut [], Some(&time), None) {
        Err(Errno::INTR) if !has_some && matches!(handlers(), Handlers::Restart) => Ok(()),
        slept => slept.map(drop),
    }
}

/// Every signal that the program may handle: libc keeps those between for itself.
fn all() -> impl Iterator<Item = i32> {
    (1..32).chain(libc::SIGRTMIN()..=libc::SIGRTMAX())
}

fn handlers() -> Handlers {
    let (mut restarting, blocked) = (empty(), blocked());
    let (mut restart, mut end) = (false, false);
    for signal in all() {
        // SAFETY: plain numbers and pointers, of which 0 is a value.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: writable; nothing is installed.
        let known = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) } == 0;
        // SAFETY: an initialized set.
        let comes = unsafe { libc::sigismember(&raw const blocked, signal) } == 0;
        if !known || !comes || matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN) {
            continue;
        }
        if action.sa_flags & libc::SA_RESTART == 0 {
            end = true;
        } else {
            restart = true;
            // SAFETY: an initialized set, and a signal.
            unsafe { libc::sigaddset(&raw mut restarting, signal) };
        }
    }
    match (restart, end) {
        (false, _) => Handlers::End,
        (true, false) => Handlers::Restart,
        (true, true) => Handlers::Some(restarting),
    }
}

/// A descriptor that is readable while one of `signals` is pending.
fn signals(signals: &sigset_t) -> Result<Descriptor, Errno> {
    // SAFETY: an initialized set.
    let fd = unsafe { libc::signalfd(-1, signals, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd < 0 {
        return Err(Errno::MFILE);
    }
    // SAFETY: just made, and nobody else knows of it.
    Ok((settings().place)(unsafe { OwnedFd::from_raw_fd(fd) })?.into())
}

fn empty() -> sigset_t {
    // SAFETY: an array of numbers.
    let mut set = unsafe { std::mem::zeroed() };
    // SAFETY: writable.
    unsafe { libc::sigemptyset(&raw mut set) };
    set
}

/// What the calling thread blocks.
fn blocked() -> sigset_t {
    let mut set = empty();
    // SAFETY: writable; nothing is changed.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, std::ptr::null(), &raw mut set) };
    set
}

fn with(mut set: sigset_t, more: &sigset_t) -> sigset_t {
    for signal in all() {
        // SAFETY: an initialized set.
        if unsafe { libc::sigismember(more, signal) } == 1 {
            // SAFETY: as above.
            unsafe { libc::sigaddset(&raw mut set, signal) };
        }
    }
    set
}

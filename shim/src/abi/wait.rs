//! poll, select, epoll and their relatives.

use std::time::{Duration, Instant};

use libc::{c_int, c_long, epoll_event, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};
use rustix::io::Errno;
use thallus_transport::buffers::may_be_of_program;

use super::{cancellable, guard};
use crate::ops::select::Sets;
use crate::ops::{epoll, poll, select as selecting};
use crate::{errno, real, table};

fn millis(timeout: c_int) -> Option<Duration> {
    u64::try_from(timeout).ok().map(Duration::from_millis)
}

/// As many descriptors as every process may have.
const FEW: nfds_t = 64;

/// The program's array of descriptors.
///
/// # Safety
/// `fds` is writable for `count` entries, or where the program can have nothing.
unsafe fn entries<'a>(fds: *mut pollfd, count: nfds_t) -> &'a mut [pollfd] {
    // More than may be open: the kernel refuses it unseen.
    if !may_be_of_program(fds.addr(), size_of::<pollfd>())
        || (count > FEW && count > table::most_descriptors())
    {
        return &mut [];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(fds, count as usize) }
}

/// poll(2).
///
/// # Safety
/// As for poll(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the program's own array.
    let ours = unsafe { entries(fds, count) };
    if !poll::concerns_us(ours) {
        // SAFETY: the program's own arguments.
        return unsafe { real::poll(fds, count, timeout) };
    }
    cancellable(|| errno::int(poll::wait(ours, millis(timeout), std::ptr::null())))
}

/// `poll` as fortified programs call it.
///
/// # Safety
/// As for poll(2); `room` is the array's size in bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, room: size_t) -> c_int {
    check(count, room);
    // SAFETY: the program's own arguments.
    unsafe { poll(fds, count, timeout) }
}

/// ppoll(2).
///
/// # Safety
/// As for ppoll(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's own array.
    let ours = unsafe { entries(fds, count) };
    // SAFETY: null or the program's own time.
    match unsafe { timeout.as_ref() }.map(|time| poll::from_timespec(*time)).transpose() {
        Ok(limit) if poll::concerns_us(ours) => cancellable(|| errno::int(poll::wait(ours, limit, mask))),
        // SAFETY: the program's own arguments.
        _ => unsafe { real::ppoll(fds, count, timeout, mask) },
    }
}

/// `ppoll` as fortified programs call it.
///
/// # Safety
/// As for ppoll(2); `room` is the array's size in bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __ppoll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    room: size_t,
) -> c_int {
    check(count, room);
    // SAFETY: the program's own arguments.
    unsafe { ppoll(fds, count, timeout, mask) }
}

fn check(count: nfds_t, room: size_t) {
    if room / size_of::<pollfd>() < count as usize {
        std::process::abort();
    }
}

/// select(2). As Linux does, it leaves the time that was left in `timeout`.
///
/// # Safety
/// As for select(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    let count = selecting::within(count);
    // SAFETY: null or the program's own time.
    let limit = match unsafe { timeout.as_ref() } {
        None => Ok(None),
        Some(time) => from_timeval(*time).map(Some),
    };
    // SAFETY: the program's own sets.
    let sets = unsafe { Sets::new(count, read, write, except) };
    let (Ok(limit), true) = (limit, sets.concern_us()) else {
        // SAFETY: the program's own arguments.
        return unsafe { real::select(count, read, write, except, timeout) };
    };
    cancellable(|| {
        let started = Instant::now();
        let result = selecting::wait(sets, limit, std::ptr::null());
        if let (Some(limit), false) = (limit, timeout.is_null()) {
            let left = limit.saturating_sub(started.elapsed());
            let time = timeval {
                tv_sec: libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX),
                tv_usec: libc::suseconds_t::from(left.subsec_micros().cast_signed()),
            };
            // SAFETY: the program's own time.
            unsafe { timeout.write(time) };
        }
        errno::int(result)
    })
}

fn from_timeval(time: timeval) -> Result<Duration, Errno> {
    let seconds = u64::try_from(time.tv_sec).map_err(|_| Errno::INVAL)?;
    let micros = u64::try_from(time.tv_usec).map_err(|_| Errno::INVAL)?;
    Ok(Duration::from_secs(seconds).saturating_add(Duration::from_micros(micros)))
}

/// pselect(2).
///
/// # Safety
/// As for pselect(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pselect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    let count = selecting::within(count);
    // SAFETY: null or the program's own time.
    let limit = unsafe { timeout.as_ref() }.map(|time| poll::from_timespec(*time)).transpose();
    // SAFETY: the program's own sets.
    let sets = unsafe { Sets::new(count, read, write, except) };
    match limit {
        Ok(limit) if sets.concern_us() => cancellable(|| errno::int(selecting::wait(sets, limit, mask))),
        // SAFETY: the program's own arguments.
        _ => unsafe { real::pselect(count, read, write, except, timeout, mask) },
    }
}

/// What pselect6 has in place of a mask.
#[repr(C)]
pub(super) struct Masked {
    mask: *const sigset_t,
    bytes: size_t,
}

/// `pselect6`, the system call, which is made by `kernel` where that alone can serve it.
///
/// # Safety
/// As for the system call.
pub(super) unsafe fn pselect6(
    count: c_int,
    sets: [*mut fd_set; 3],
    time: *mut timespec,
    mask: *const Masked,
    kernel: impl FnOnce() -> c_long,
) -> c_long {
    let [read, write, except] = sets;
    // SAFETY: the program's own sets.
    if !unsafe { Sets::new(selecting::within(count), read, write, except) }.concern_us() {
        return kernel();
    }
    // SAFETY: null, or the program's own.
    let mask = unsafe { mask.as_ref() }.map_or(std::ptr::null(), |masked| masked.mask);
    // SAFETY: the program's own arguments.
    leaving_time(time, || unsafe { pselect(count, read, write, except, time, mask) })
}

/// `ppoll`, the system call, which is made by `kernel` where that alone can serve it.
///
/// # Safety
/// As for the system call.
pub(super) unsafe fn ppoll_itself(
    fds: *mut pollfd,
    count: nfds_t,
    time: *mut timespec,
    mask: *const sigset_t,
    kernel: impl FnOnce() -> c_long,
) -> c_long {
    // SAFETY: the program's own array.
    if !poll::concerns_us(unsafe { entries(fds, count) }) {
        return kernel();
    }
    // SAFETY: the program's own arguments.
    leaving_time(time, || unsafe { ppoll(fds, count, time, mask) })
}

/// Leaves in the program's `time`, if there is one, what `wait` did not use of it: so do these system calls, but not their functions.
fn leaving_time(time: *mut timespec, wait: impl FnOnce() -> c_int) -> c_long {
    // SAFETY: null or the program's own time.
    let limit = unsafe { time.as_ref() }
        .and_then(|time| poll::from_timespec(*time).ok())
        .filter(|limit| !limit.is_zero());
    let started = Instant::now();
    let result = wait();
    if let Some(limit) = limit {
        let left = poll::to_timespec(limit.saturating_sub(started.elapsed()));
        let [from, to] = [(&raw const left).cast_mut(), time]
            .map(|place| libc::iovec { iov_base: place.cast(), iov_len: size_of::<timespec>() });
        // Where it can't be written to, it stays, and nothing is said of it.
        // SAFETY: one list each; the kernel looks whether it may write there.
        errno::keep(|| unsafe {
            libc::process_vm_writev(libc::getpid(), &raw const from, 1, &raw const to, 1, 0)
        });
    }
    result.into()
}

/// `epoll_create(2)`.
#[unsafe(no_mangle)]
pub extern "C" fn epoll_create(size: c_int) -> c_int {
    guard(|| {
        // SAFETY: takes a number.
        let set = unsafe { real::epoll_create(size) };
        epoll::created(set);
        set
    })
}

/// `epoll_create1(2)`.
#[unsafe(no_mangle)]
pub extern "C" fn epoll_create1(flags: c_int) -> c_int {
    guard(|| {
        // SAFETY: takes a number.
        let set = unsafe { real::epoll_create1(flags) };
        epoll::created(set);
        set
    })
}

/// `epoll_ctl(2)`.
///
/// # Safety
/// As for `epoll_ctl(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_ctl(
    set: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: the program's own arguments.
    guard(|| unsafe { epoll::control(set, operation, fd, event) })
}

/// The most events that one wait can ask for (`EP_MAX_EVENTS` of fs/eventpoll.c).
const MOST_EVENTS: usize = i32::MAX as usize / size_of::<epoll_event>();

/// Waits on an epoll set, by memory or by `kernel`.
///
/// # Safety
/// `events` is writable for `most` entries.
unsafe fn wait_on(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: Option<Duration>,
    mask: *const sigset_t,
    kernel: impl FnOnce() -> c_int,
) -> c_int {
    let (Some(set_of_ours), Ok(most @ 1..=MOST_EVENTS)) = (table::epoll_set(set), usize::try_from(most))
    else {
        return kernel();
    };
    // The kernel looks at the address when it has something to report.
    let mut unheard = epoll_event { events: 0, u64: 0 };
    let is_nowhere = !may_be_of_program(events.addr(), size_of::<epoll_event>());
    let (place, most) = if is_nowhere { (&raw mut unheard, 1) } else { (events, most) };
    // SAFETY: the caller's promise, or one of our own.
    let ours = unsafe { std::slice::from_raw_parts_mut(place, most) };
    let ready = cancellable(|| errno::int(epoll::wait(set_of_ours, set, ours, timeout, mask, kernel)));
    if ready > 0 && is_nowhere { errno::int(Err(Errno::FAULT)) } else { ready }
}

/// `epoll_wait(2)`.
///
/// # Safety
/// As for `epoll_wait(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_wait(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: the program's own arguments.
    unsafe {
        wait_on(set, events, most, millis(timeout), std::ptr::null(), || {
            real::epoll_wait(set, events, most, timeout)
        })
    }
}

/// `epoll_pwait(2)`.
///
/// # Safety
/// As for `epoll_pwait(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's own arguments.
    unsafe {
        wait_on(set, events, most, millis(timeout), mask, || {
            real::epoll_pwait(set, events, most, timeout, mask)
        })
    }
}

/// `epoll_pwait2(2)`.
///
/// # Safety
/// As for `epoll_pwait2(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait2(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: null or the program's own time.
    let limit = unsafe { timeout.as_ref() }.map(|time| poll::from_timespec(*time)).transpose();
    // SAFETY: the program's own arguments.
    let kernel = || unsafe { real::epoll_pwait2(set, events, most, timeout, mask) };
    match limit {
        // SAFETY: the program's own arguments.
        Ok(limit) => unsafe { wait_on(set, events, most, limit, mask, kernel) },
        Err(_) => kernel(),
    }
}

const _: () = assert!(size_of::<c_long>() == size_of::<libc::c_ulong>());

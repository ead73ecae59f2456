//! Waiting: poll, select and epoll in all their forms.

use std::os::raw::{c_int, c_short};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::fd::BorrowedFd;

use super::show::{epoll_events, poll_events};
use super::signal::SignalSet;
use super::transcript::{noted, noted_number};
use super::{Errno, Fd, Outcome};

unsafe extern "C" {
    fn __poll_chk(fds: *mut libc::pollfd, count: libc::nfds_t, timeout: c_int, fds_len: usize) -> c_int;
    fn __ppoll_chk(
        fds: *mut libc::pollfd,
        count: libc::nfds_t,
        timeout: *const libc::timespec,
        mask: *const libc::sigset_t,
        fds_len: usize,
    ) -> c_int;
    fn epoll_pwait2(
        epfd: c_int,
        events: *mut libc::epoll_event,
        max: c_int,
        timeout: *const libc::timespec,
        mask: *const libc::sigset_t,
    ) -> c_int;
}

/// What one poll is asked: descriptors and the events wanted of each.
pub type Wanted<'a> = &'a [(Fd, c_short)];

/// poll(2), `timeout` in milliseconds. The events of each descriptor, in the order asked.
pub fn poll(wanted: Wanted<'_>, timeout: c_int) -> Outcome<Vec<c_short>> {
    polled("poll", wanted, &timeout.to_string(), |fds| {
        // SAFETY: pointer and count are those of `fds`.
        unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout) }
    })
}

/// `__poll_chk`, the fortified poll(2).
pub fn poll_chk(wanted: Wanted<'_>, timeout: c_int) -> Outcome<Vec<c_short>> {
    polled("__poll_chk", wanted, &timeout.to_string(), |fds| {
        // SAFETY: pointer, count and length are those of `fds`.
        unsafe { __poll_chk(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout, size_of_val(fds)) }
    })
}

/// ppoll(2); no timeout is for ever.
pub fn ppoll(
    wanted: Wanted<'_>,
    timeout: Option<Duration>,
    mask: Option<&SignalSet>,
) -> Outcome<Vec<c_short>> {
    let spec = timeout.map(timespec);
    polled("ppoll", wanted, &show_timeout(timeout), |fds| {
        let count = fds.len() as libc::nfds_t;
        // SAFETY: pointer and count are those of `fds`; timeout and mask are null or outlive the call.
        unsafe { libc::ppoll(fds.as_mut_ptr(), count, pointer(spec.as_ref()), SignalSet::pointer(mask)) }
    })
}

/// `__ppoll_chk`, the fortified ppoll(2).
pub fn ppoll_chk(wanted: Wanted<'_>, timeout: Option<Duration>) -> Outcome<Vec<c_short>> {
    let spec = timeout.map(timespec);
    polled("__ppoll_chk", wanted, &show_timeout(timeout), |fds| {
        let (count, len) = (fds.len() as libc::nfds_t, size_of_val(fds));
        // SAFETY: pointer, count and length are those of `fds`; the timeout is null or outlives the call.
        unsafe { __ppoll_chk(fds.as_mut_ptr(), count, pointer(spec.as_ref()), std::ptr::null(), len) }
    })
}

fn polled(
    name: &str,
    wanted: Wanted<'_>,
    timeout: &str,
    call: impl FnOnce(&mut [libc::pollfd]) -> c_int,
) -> Outcome<Vec<c_short>> {
    let mut fds: Vec<_> =
        wanted.iter().map(|&(fd, events)| libc::pollfd { fd, events, revents: 0 }).collect();
    let ret = call(&mut fds);
    let outcome = Errno::check(ret as isize).map(|_| fds.iter().map(|fd| fd.revents).collect::<Vec<_>>());
    let show_all = |pairs: &mut dyn Iterator<Item = (Fd, c_short)>| {
        let shown: Vec<_> = pairs.map(|(fd, events)| format!("{fd}:{}", poll_events(events))).collect();
        shown.join(" ")
    };
    noted(
        outcome,
        || format!("{name}([{}], {timeout})", show_all(&mut wanted.iter().copied())),
        |revents| {
            let ready = wanted.iter().zip(revents).filter(|&(_, &revents)| revents != 0);
            format!("{ret} [{}]", show_all(&mut ready.map(|(&(fd, _), &revents)| (fd, revents))))
        },
    )
}

/// What select(2) watches, and what it found ready.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selected {
    /// Descriptors with something to read.
    pub read: Vec<Fd>,
    /// Descriptors with room to write.
    pub write: Vec<Fd>,
    /// Descriptors with urgent data.
    pub except: Vec<Fd>,
}

/// select(2); no timeout is for ever.
pub fn select(read: &[Fd], write: &[Fd], except: &[Fd], timeout: Option<Duration>) -> Outcome<Selected> {
    let mut value = timeout.map(|timeout| libc::timeval {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_usec: libc::suseconds_t::from(timeout.subsec_micros()),
    });
    selected("select", [read, write, except], timeout, |count, [read, write, except]| {
        let timeout = value.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
        // SAFETY: the sets hold every descriptor below `count`; the timeout is null or outlives the call.
        unsafe { libc::select(count, read, write, except, timeout) }
    })
}

/// pselect(2); no timeout is for ever.
pub fn pselect(
    read: &[Fd],
    write: &[Fd],
    except: &[Fd],
    timeout: Option<Duration>,
    mask: Option<&SignalSet>,
) -> Outcome<Selected> {
    let spec = timeout.map(timespec);
    selected("pselect", [read, write, except], timeout, |count, [read, write, except]| {
        // SAFETY: as in `select`; the mask is null or outlives the call.
        unsafe { libc::pselect(count, read, write, except, pointer(spec.as_ref()), SignalSet::pointer(mask)) }
    })
}

fn selected(
    name: &str,
    wanted: [&[Fd]; 3],
    timeout: Option<Duration>,
    call: impl FnOnce(c_int, &mut [libc::fd_set; 3]) -> c_int,
) -> Outcome<Selected> {
    let mut sets = wanted.map(fd_set);
    let count = wanted.iter().flat_map(|fds| fds.iter()).max().map_or(0, |&fd| fd + 1);
    let ret = call(count, &mut sets);
    let [read, write, except] = [0, 1, 2].map(|index| {
        let set = &sets[index];
        // SAFETY: the set is initialised, and each descriptor was put into it, so is in its range.
        wanted[index].iter().copied().filter(|&fd| unsafe { libc::FD_ISSET(fd, set) }).collect::<Vec<_>>()
    });
    if ret < 0 {
        assert_eq!([&read[..], &write, &except], wanted, "{name} has failed, and has changed the sets");
    }
    let found = Errno::check(ret as isize).map(|_| Selected { read, write, except });
    noted(
        found,
        || format!("{name}({wanted:?}, {})", show_timeout(timeout)),
        |found| format!("{ret} [{:?}, {:?}, {:?}]", found.read, found.write, found.except),
    )
}

fn fd_set(fds: &[Fd]) -> libc::fd_set {
    // SAFETY: all-zero is the empty set.
    let mut set: libc::fd_set = unsafe { std::mem::zeroed() };
    for &fd in fds {
        assert!((fd as usize) < libc::FD_SETSIZE, "select takes no descriptor as high as {fd}");
        // SAFETY: the descriptor is below FD_SETSIZE.
        unsafe { libc::FD_SET(fd, &raw mut set) };
    }
    set
}

/// epoll_create1(2)
pub fn epoll_create() -> Outcome<Fd> {
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::epoll_create1(0) };
    noted_number(Errno::check(ret as isize).map(|fd| fd as Fd), || "epoll_create1()".to_owned())
}

/// epoll_ctl(2) with `EPOLL_CTL_ADD`
pub fn epoll_add(epfd: Fd, fd: Fd, events: c_int, data: u64) -> Outcome<usize> {
    epoll_ctl("ADD", libc::EPOLL_CTL_ADD, epfd, fd, events, data)
}

/// epoll_ctl(2) with `EPOLL_CTL_MOD`
pub fn epoll_modify(epfd: Fd, fd: Fd, events: c_int, data: u64) -> Outcome<usize> {
    epoll_ctl("MOD", libc::EPOLL_CTL_MOD, epfd, fd, events, data)
}

/// epoll_ctl(2) with `EPOLL_CTL_DEL`
pub fn epoll_delete(epfd: Fd, fd: Fd) -> Outcome<usize> {
    epoll_ctl("DEL", libc::EPOLL_CTL_DEL, epfd, fd, 0, 0)
}

/// epoll_ctl(2) without an event, which only a deletion may do.
pub fn epoll_ctl_from_nowhere(epfd: Fd, op: c_int, fd: Fd) -> Outcome<usize> {
    // SAFETY: the kernel takes null for an address that can't be read.
    let ret = unsafe { libc::epoll_ctl(epfd, op, fd, std::ptr::null_mut()) };
    noted_number(Errno::check(ret as isize), || format!("epoll_ctl({epfd}, {op}, {fd}, null)"))
}

fn epoll_ctl(name: &str, op: c_int, epfd: Fd, fd: Fd, events: c_int, data: u64) -> Outcome<usize> {
    let mut event = libc::epoll_event { events: events as u32, u64: data };
    // SAFETY: the event outlives the call.
    let ret = unsafe { libc::epoll_ctl(epfd, op, fd, &raw mut event) };
    noted_number(Errno::check(ret as isize), || {
        format!("epoll_ctl({epfd}, {name}, {fd}, {}, {data})", epoll_events(events as u32))
    })
}

/// One event of an epoll wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ready {
    /// What the descriptor was added with.
    pub data: u64,
    /// What happened.
    pub events: u32,
}

impl Ready {
    /// Whether any of `events` happened.
    pub fn has(self, events: c_int) -> bool {
        self.events & events as u32 != 0
    }
}

/// epoll_wait(2), `timeout` in milliseconds. Sorted by data: the kernel promises no order.
pub fn epoll_wait(epfd: Fd, max: usize, timeout: c_int) -> Outcome<Vec<Ready>> {
    epoll_waited("epoll_wait", epfd, max, &timeout.to_string(), |events, max| {
        // SAFETY: there is room for `max` events.
        unsafe { libc::epoll_wait(epfd, events, max, timeout) }
    })
}

/// epoll_wait(2): the `epoll_data` of what it reports, in the order in which it does. Not noted.
pub fn epoll_wait_in_order(epfd: Fd, max: usize, timeout: c_int) -> Outcome<Vec<u64>> {
    let mut events = vec![libc::epoll_event { events: 0, u64: 0 }; max];
    // SAFETY: there is room for `max` events.
    let ret = unsafe { libc::epoll_wait(epfd, events.as_mut_ptr(), max as c_int, timeout) };
    Errno::check(ret as isize).map(|count| events[..count].iter().map(|event| event.u64).collect())
}

/// epoll_pwait(2)
pub fn epoll_pwait(epfd: Fd, max: usize, timeout: c_int, mask: Option<&SignalSet>) -> Outcome<Vec<Ready>> {
    epoll_waited("epoll_pwait", epfd, max, &timeout.to_string(), |events, max| {
        // SAFETY: there is room for `max` events; the mask is null or outlives the call.
        unsafe { libc::epoll_pwait(epfd, events, max, timeout, SignalSet::pointer(mask)) }
    })
}

/// epoll_pwait2(2); no timeout is for ever.
pub fn epoll_pwait_until(
    epfd: Fd,
    max: usize,
    timeout: Option<Duration>,
    mask: Option<&SignalSet>,
) -> Outcome<Vec<Ready>> {
    let spec = timeout.map(timespec);
    epoll_waited("epoll_pwait2", epfd, max, &show_timeout(timeout), |events, max| {
        // SAFETY: there is room for `max` events; timeout and mask are null or outlive the call.
        unsafe { epoll_pwait2(epfd, events, max, pointer(spec.as_ref()), SignalSet::pointer(mask)) }
    })
}

/// epoll_pwait2(2) for ever, by syscall(2).
pub fn epoll_pwait_by_syscall(epfd: Fd, max: usize) -> Outcome<Vec<Ready>> {
    epoll_waited("syscall(SYS_epoll_pwait2)", epfd, max, "for ever", |events, max| {
        let none = std::ptr::null::<libc::c_void>();
        // SAFETY: there is room for `max` events.
        unsafe { libc::syscall(libc::SYS_epoll_pwait2, epfd, events, max, none, none, 8_usize) as c_int }
    })
}

/// epoll_wait(2) for ever, by a system call that no hook sees. How many are ready.
pub fn unseen_epoll_wait(epfd: Fd) -> Outcome<usize> {
    // SAFETY: the caller's descriptor, which is open.
    let epfd = unsafe { BorrowedFd::borrow_raw(epfd) };
    let mut events = Vec::with_capacity(4);
    rustix::event::epoll::wait(epfd, rustix::buffer::spare_capacity(&mut events), None).map_err(Errno::from)
}

/// Closes each epoll set whose descriptor is not below `least`, by system calls that no hook sees. How many there were.
pub fn close_sets_unseen(least: Fd) -> usize {
    let entries = std::fs::read_dir("/proc/self/fd").expect("/proc").flatten();
    let is_set = |fd: &Fd| {
        let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
        *fd >= least && link.is_ok_and(|link| link.as_os_str() == "anon_inode:[eventpoll]")
    };
    let sets: Vec<Fd> =
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_set).collect();
    for &set in &sets {
        // SAFETY: whoever has it is to notice.
        unsafe { rustix::io::close(set) };
    }
    sets.len()
}

/// close(2) by a system call that no hook sees.
pub fn unseen_close(fd: Fd) {
    // SAFETY: whoever has it is to notice.
    unsafe { rustix::io::close(fd) };
}

/// poll(2) for ever on one descriptor, by a system call that no hook sees. How many are ready.
pub fn unseen_poll(fd: Fd, events: c_short) -> Outcome<usize> {
    // SAFETY: the caller's descriptor, which is open.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::from_bits_retain(events.cast_unsigned()))];
    rustix::event::poll(&mut fds, None).map_err(Errno::from)
}

fn epoll_waited(
    name: &str,
    epfd: Fd,
    max: usize,
    timeout: &str,
    call: impl FnOnce(*mut libc::epoll_event, c_int) -> c_int,
) -> Outcome<Vec<Ready>> {
    let mut events = vec![libc::epoll_event { events: 0, u64: 0 }; max];
    let ret = call(events.as_mut_ptr(), max as c_int);
    let outcome = Errno::check(ret as isize).map(|count| {
        let mut ready: Vec<_> =
            events[..count].iter().map(|event| Ready { data: event.u64, events: event.events }).collect();
        ready.sort_unstable();
        ready
    });
    noted(
        outcome,
        || format!("{name}({epfd}, {max}, {timeout})"),
        |ready| {
            let shown: Vec<_> =
                ready.iter().map(|ready| format!("{}:{}", ready.data, epoll_events(ready.events))).collect();
            format!("{ret} [{}]", shown.join(" "))
        },
    )
}

pub(super) fn timespec(duration: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: duration.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(duration.subsec_nanos()),
    }
}

fn pointer<T>(value: Option<&T>) -> *const T {
    value.map_or(std::ptr::null(), std::ptr::from_ref)
}

fn show_timeout(timeout: Option<Duration>) -> String {
    timeout.map_or("for ever".to_owned(), |timeout| format!("{timeout:?}"))
}

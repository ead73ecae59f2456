//! File descriptors: making, copying, closing and asking about them.

use std::ffi::CString;
use std::os::raw::{c_int, c_uint};
use std::time::Duration;

use super::show::status_flags;
use super::transcript::{noted, noted_number};
use super::{Errno, Fd, Outcome};

fn check_fd(ret: c_int) -> Outcome<Fd> {
    Errno::check(ret as isize).map(|fd| fd as Fd)
}

fn check_unit(ret: c_int) -> Outcome<()> {
    Errno::check(ret as isize).map(|_| ())
}

fn noted_unit(outcome: Outcome<()>, call: impl FnOnce() -> String) -> Outcome<()> {
    noted(outcome, call, |()| "0".to_owned())
}

/// close(2)
pub fn close(fd: Fd) -> Outcome<()> {
    // SAFETY: behaviours own all of their process's descriptors, by number.
    let ret = unsafe { libc::close(fd) };
    noted_unit(check_unit(ret), || format!("close({fd})"))
}

/// close_range(2)
pub fn close_range(first: Fd, last: c_uint, flags: c_int) -> Outcome<()> {
    // SAFETY: as in `close`.
    let ret = unsafe { libc::close_range(first as c_uint, last, flags) };
    noted_unit(check_unit(ret), || format!("close_range({first}, {last}, {flags})"))
}

/// closefrom(3)
pub fn closefrom(first: Fd) {
    unsafe extern "C" {
        fn closefrom(first: c_int);
    }
    // SAFETY: as in `close`.
    unsafe { closefrom(first) };
    crate::say!("closefrom({first})");
}

/// dup(2)
pub fn dup(fd: Fd) -> Outcome<Fd> {
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::dup(fd) };
    noted_number(check_fd(ret), || format!("dup({fd})"))
}

/// dup2(2)
pub fn dup2(fd: Fd, onto: Fd) -> Outcome<Fd> {
    // SAFETY: as in `close`.
    let ret = unsafe { libc::dup2(fd, onto) };
    noted_number(check_fd(ret), || format!("dup2({fd}, {onto})"))
}

/// dup3(2)
pub fn dup3(fd: Fd, onto: Fd, flags: c_int) -> Outcome<Fd> {
    // SAFETY: as in `close`.
    let ret = unsafe { libc::dup3(fd, onto, flags) };
    noted_number(check_fd(ret), || format!("dup3({fd}, {onto}, {})", status_flags(flags)))
}

/// fcntl(2) with `F_DUPFD`
pub fn dup_from(fd: Fd, lowest: Fd) -> Outcome<Fd> {
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::fcntl(fd, libc::F_DUPFD, lowest) };
    noted_number(check_fd(ret), || format!("fcntl({fd}, F_DUPFD, {lowest})"))
}

/// fcntl(2) with `F_DUPFD_CLOEXEC`
pub fn dup_cloexec_from(fd: Fd, lowest: Fd) -> Outcome<Fd> {
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, lowest) };
    noted_number(check_fd(ret), || format!("fcntl({fd}, F_DUPFD_CLOEXEC, {lowest})"))
}

/// fcntl(2) with `F_GETFD`: whether the descriptor closes on exec.
pub fn closes_on_exec(fd: Fd) -> Outcome<bool> {
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    let outcome = Errno::check(ret as isize).map(|flags| flags as c_int & libc::FD_CLOEXEC != 0);
    noted_number(outcome, || format!("fcntl({fd}, F_GETFD)"))
}

/// fcntl(2) with `F_SETFD`
pub fn set_close_on_exec(fd: Fd, on: bool) -> Outcome<()> {
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::fcntl(fd, libc::F_SETFD, if on { libc::FD_CLOEXEC } else { 0 }) };
    noted_unit(check_unit(ret), || format!("fcntl({fd}, F_SETFD, {on})"))
}

/// ioctl(2) with `FIONCLEX`
pub fn keep_on_exec(fd: Fd) -> Outcome<()> {
    // SAFETY: the request takes no argument.
    let ret = unsafe { libc::ioctl(fd, libc::FIONCLEX) };
    noted_unit(check_unit(ret), || format!("ioctl({fd}, FIONCLEX)"))
}

/// fcntl(2) with `F_GETFL`
pub fn status(fd: Fd) -> Outcome<c_int> {
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    let outcome = Errno::check(ret as isize).map(|flags| flags as c_int);
    noted(outcome, || format!("fcntl({fd}, F_GETFL)"), |&flags| status_flags(flags))
}

/// fcntl(2) with `F_SETFL`
pub fn set_status(fd: Fd, flags: c_int) -> Outcome<()> {
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::fcntl(fd, libc::F_SETFL, flags) };
    noted_unit(check_unit(ret), || format!("fcntl({fd}, F_SETFL, {})", status_flags(flags)))
}

/// ioctl(2) with `FIONBIO`
pub fn set_nonblocking(fd: Fd, on: bool) -> Outcome<()> {
    let on = c_int::from(on);
    // SAFETY: FIONBIO reads one int.
    let ret = unsafe { libc::ioctl(fd, libc::FIONBIO, &raw const on) };
    noted_unit(check_unit(ret), || format!("ioctl({fd}, FIONBIO, {on})"))
}

/// ioctl(2) with `FIONREAD`: bytes that a read would give.
pub fn unread(fd: Fd) -> Outcome<usize> {
    let mut bytes: c_int = 0;
    // SAFETY: FIONREAD writes one int.
    let ret = unsafe { libc::ioctl(fd, libc::FIONREAD, &raw mut bytes) };
    noted_number(Errno::check(ret as isize).map(|_| bytes as usize), || format!("ioctl({fd}, FIONREAD)"))
}

/// ioctl(2) with `SIOCOUTQ`: bytes that the peer has not acknowledged.
pub fn unsent(fd: Fd) -> Outcome<usize> {
    let mut bytes: c_int = 0;
    // SAFETY: TIOCOUTQ, which is the same, writes one int.
    let ret = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut bytes) };
    noted_number(Errno::check(ret as isize).map(|_| bytes as usize), || format!("ioctl({fd}, SIOCOUTQ)"))
}

/// open(2)
pub fn open(path: &str, flags: c_int) -> Outcome<Fd> {
    let c_path = CString::new(path).expect("no path has a NUL byte");
    // SAFETY: the path ends with NUL.
    let ret = unsafe { libc::open(c_path.as_ptr(), flags, 0o600) };
    noted_number(check_fd(ret), || format!("open({path}, {})", status_flags(flags)))
}

/// memfd_create(2) holding `data`, at offset 0.
pub fn file_with(data: &[u8]) -> Outcome<Fd> {
    // SAFETY: the name ends with NUL.
    let fd = check_fd(unsafe { libc::memfd_create(c"behaviour".as_ptr(), 0) })?;
    // SAFETY: pointer and length are those of `data`.
    Errno::check(unsafe { libc::pwrite(fd, data.as_ptr().cast(), data.len(), 0) })?;
    crate::say!("file of {} bytes = {fd}", data.len());
    Ok(fd)
}

/// pipe(2): the reading end, the writing end.
pub fn pipe() -> Outcome<(Fd, Fd)> {
    let mut ends = [0; 2];
    // SAFETY: pipe writes two ints.
    let ret = unsafe { libc::pipe(ends.as_mut_ptr()) };
    noted(check_unit(ret).map(|()| (ends[0], ends[1])), || "pipe()".to_owned(), |ends| format!("{ends:?}"))
}

/// eventfd(2), non-blocking.
pub fn eventfd() -> Outcome<Fd> {
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK) };
    noted_number(check_fd(ret), || "eventfd()".to_owned())
}

/// timerfd_create(2), which expires once after `after`.
pub fn timerfd(after: Duration) -> Outcome<Fd> {
    // SAFETY: takes no pointer.
    let fd = check_fd(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_NONBLOCK) })?;
    let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let spec = libc::itimerspec { it_interval: zero, it_value: super::wait::timespec(after) };
    // SAFETY: the new value is a valid itimerspec; the old one is not wanted.
    let ret = unsafe { libc::timerfd_settime(fd, 0, &raw const spec, std::ptr::null_mut()) };
    noted_number(check_unit(ret).map(|()| fd), || "timerfd()".to_owned())
}

/// The process's open descriptors below `limit`, as `ls /proc/self/fd` shows them.
pub fn open_descriptors(limit: Fd) -> Vec<Fd> {
    let listing = std::fs::read_dir("/proc/self/fd").expect("/proc is mounted");
    let mut fds: Vec<Fd> = listing
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|&fd| fd < limit)
        .collect();
    fds.sort_unstable();
    crate::say!("/proc/self/fd below {limit}: {fds:?}");
    fds
}

/// What kind of file a descriptor is, by fstat(2).
pub fn file_kind(fd: Fd) -> Outcome<&'static str> {
    // SAFETY: all-zero is a valid value of this plain C struct.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: fstat writes one stat.
    let ret = unsafe { libc::fstat(fd, &raw mut stat) };
    let kind = check_unit(ret).map(|()| match stat.st_mode & libc::S_IFMT {
        libc::S_IFSOCK => "socket",
        libc::S_IFIFO => "pipe",
        libc::S_IFREG => "file",
        libc::S_IFCHR => "device",
        _ => "other",
    });
    noted_number(kind, || format!("fstat({fd})"))
}

/// lseek(2)
pub fn seek(fd: Fd, offset: i64) -> Outcome<usize> {
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::lseek(fd, offset, libc::SEEK_SET) };
    noted_number(Errno::check(ret as isize), || format!("lseek({fd}, {offset})"))
}

/// pread(2)
pub fn pread(fd: Fd, len: usize, offset: i64) -> Outcome<usize> {
    let mut buf = vec![0u8; len];
    // SAFETY: pointer and length are those of `buf`.
    let ret = unsafe { libc::pread(fd, buf.as_mut_ptr().cast(), len, offset) };
    noted_number(Errno::check(ret), || format!("pread({fd}, {len}, {offset})"))
}

/// A C stdio stream over a descriptor.
#[derive(Debug)]
pub struct Stdio(*mut libc::FILE);

impl Stdio {
    /// fdopen(3)
    pub fn open(fd: Fd) -> Self {
        // SAFETY: the mode ends with NUL.
        let file = unsafe { libc::fdopen(fd, c"r+".as_ptr()) };
        assert!(!file.is_null(), "fdopen({fd}): {}", Errno::last());
        crate::say!("fdopen({fd})");
        Self(file)
    }

    /// fgets(3): one line.
    pub fn line(&mut self) -> Option<String> {
        let mut buf = [0u8; 256];
        // SAFETY: the stream is open, and the length is that of `buf`.
        let ret = unsafe { libc::fgets(buf.as_mut_ptr().cast(), buf.len() as c_int, self.0) };
        let line = (!ret.is_null()).then(|| {
            let text = std::ffi::CStr::from_bytes_until_nul(&buf).expect("fgets ends its line with NUL");
            text.to_string_lossy().into_owned()
        });
        crate::say!("fgets = {line:?}");
        line
    }

    /// fputs(3), then fflush(3).
    pub fn put(&mut self, text: &str) {
        let c_text = CString::new(text).expect("no text has a NUL byte");
        // SAFETY: the stream is open, the text ends with NUL.
        let put = unsafe { libc::fputs(c_text.as_ptr(), self.0) };
        // SAFETY: the stream is open.
        let flushed = unsafe { libc::fflush(self.0) };
        crate::say!("fputs({text:?}) = {}, fflush = {flushed}", put >= 0);
    }

    /// fclose(3)
    pub fn close(self) {
        // SAFETY: the stream is open, and nobody uses it again.
        let ret = unsafe { libc::fclose(self.0) };
        crate::say!("fclose = {ret}");
    }
}

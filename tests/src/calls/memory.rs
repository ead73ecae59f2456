//! Memory: locking it, and how much of it there is.

use std::os::raw::{c_int, c_void};

use super::transcript::noted;
use super::{Errno, Fd, Outcome};

fn noted_unit(ret: c_int, call: impl FnOnce() -> String) -> Outcome<()> {
    noted(Errno::check(ret as isize).map(drop), call, |()| "0".to_owned())
}

/// mlockall(2)
pub fn mlockall(flags: c_int) -> Outcome<()> {
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::mlockall(flags) };
    noted_unit(ret, || format!("mlockall({flags})"))
}

/// mlockall(2), by syscall(2).
pub fn mlockall_by_number(flags: c_int) -> Outcome<()> {
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::syscall(libc::SYS_mlockall, flags) };
    noted_unit(ret as c_int, || format!("mlockall({flags})"))
}

/// What `/proc/self/status` says of this process's memory in the line that begins with `name`, in bytes (proc(5)).
pub fn memory(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc is mounted");
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kilobytes.expect("the kernel counts it") << 10
}

/// Pages that nobody has touched. They stay mapped.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    start: *mut libc::c_void,
    count: usize,
}

impl Pages {
    const BYTES: usize = 4096;

    /// Maps so many.
    pub fn new(count: usize) -> Self {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), count * Self::BYTES, access, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED, "mmap: {}", Errno::last());
        Self { start, count }
    }

    /// How many have memory: mincore(2).
    pub fn resident(self) -> usize {
        let mut resident = vec![0u8; self.count];
        // SAFETY: a byte for each page of a mapping that stays.
        let ret = unsafe { libc::mincore(self.start, self.count * Self::BYTES, resident.as_mut_ptr()) };
        assert_eq!(ret, 0, "mincore: {}", Errno::last());
        resident.iter().filter(|&&page| page & 1 != 0).count()
    }
}

/// Waits in all ways for what `fd` echoes while malloc(3) has nothing left to give. The results, in the order of the calls: send(2), poll(2),
/// select(2), epoll_wait(2) on `set`, which has it, recv(2).
pub fn wait_without_memory(fd: Fd, set: Fd) -> [isize; 5] {
    super::limit_resource(libc::RLIMIT_AS, memory("VmSize"));
    let hoard = Hoard::of_all();
    let results = wait(fd, set);
    drop(hoard);
    super::limit_resource(libc::RLIMIT_AS, libc::RLIM_INFINITY);
    results
}

/// As its name says; nothing here asks for memory.
fn wait(fd: Fd, set: Fd) -> [isize; 5] {
    let mut polled = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    let mut byte = 0u8;
    // SAFETY: all-zero is a valid value of this plain C struct.
    let mut readable: libc::fd_set = unsafe { std::mem::zeroed() };
    // SAFETY: the set is writable, and the number below its size.
    unsafe { libc::FD_SET(fd, &raw mut readable) };
    let none = std::ptr::null_mut();
    // SAFETY: readable for one byte.
    let sent = unsafe { libc::send(fd, c"x".as_ptr().cast(), 1, 0) };
    // SAFETY: one entry.
    let by_poll = unsafe { libc::poll(&raw mut polled, 1, -1) };
    // SAFETY: the set is writable; a null time waits.
    let by_select = unsafe { libc::select(fd + 1, &raw mut readable, none, none, std::ptr::null_mut()) };
    // SAFETY: room for one event.
    let by_set = unsafe { libc::epoll_wait(set, &raw mut event, 1, -1) };
    // SAFETY: room for one byte.
    let received = unsafe { libc::recv(fd, (&raw mut byte).cast(), 1, 0) };
    [sent, by_poll as isize, by_select as isize, by_set as isize, received]
}

/// All that malloc(3) has, each piece with the address of the one before.
struct Hoard(*mut c_void);

impl Hoard {
    fn of_all() -> Self {
        let (mut last, mut size) = (std::ptr::null_mut(), 1 << 20);
        while size >= 16 {
            // SAFETY: any size may be asked for.
            let piece = unsafe { libc::malloc(size) };
            if piece.is_null() {
                // Free pieces are of any size below.
                size -= if size > 2048 { size / 2 } else { 16 };
            } else {
                // SAFETY: aligned, and as large as a pointer.
                unsafe { piece.cast::<*mut c_void>().write(last) };
                last = piece;
            }
        }
        Self(last)
    }
}

impl Drop for Hoard {
    fn drop(&mut self) {
        while !self.0.is_null() {
            // SAFETY: written when it was made.
            let before = unsafe { self.0.cast::<*mut c_void>().read() };
            // SAFETY: malloc's, and used no more.
            unsafe { libc::free(self.0) };
            self.0 = before;
        }
    }
}

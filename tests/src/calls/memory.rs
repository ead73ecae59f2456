//! Memory: locking it, and how much of it there is.

use std::os::raw::c_int;

use super::transcript::noted;
use super::{Errno, Outcome};

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

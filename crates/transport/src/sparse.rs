//! Large mappings, of which little ever gets memory.
//!
//! After mlockall(2) with `MCL_FUTURE` the kernel gives a new mapping all of its memory at once, and refuses one that is larger
//! than what may be locked (`RLIMIT_MEMLOCK`). What a mapping grows by it treats as it does the mapping (mremap(2)). So these
//! begin with one page, which is unlocked before it grows. Nobody needs to know whether there was such a call.
//!
//! Nor do they get huge pages (madvise(2), `MADV_NOHUGEPAGE`), where the machine gives these to all memory, or to all that is shared
//! (`transparent_hugepage/enabled` and `shmem_enabled`): one of 2 MiB would hold the few pages that a connection uses. What fallocate(2)
//! gives asks no mapping, but makes no huge page where there is a page already.

use std::os::fd::AsFd;
use std::ptr::{NonNull, null_mut};

use rustix::io::Errno;
use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mremap, munlock, munmap,
};

pub(crate) const PAGE: usize = 4096;

/// Maps `length` bytes of a file, from its beginning, shared. Fails as mmap(2) and mremap(2) do; by `ENOMEM` also if no more
/// may be locked, by `ENOSYS` where pages are larger than [`PAGE`], by which both sides count.
pub fn shared(file: impl AsFd, length: usize, access: ProtFlags) -> Result<NonNull<u8>, Errno> {
    if rustix::param::page_size() != PAGE {
        return Err(Errno::NOSYS);
    }
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
    let page = unsafe { mmap(null_mut(), PAGE, access, MapFlags::SHARED | MapFlags::NORESERVE, file, 0) };
    grown(page, length)
}

/// Maps `length` bytes of zeros, private. Fails as [`shared`] does.
pub fn private(length: usize) -> Result<NonNull<u8>, Errno> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
    let page = unsafe { mmap_anonymous(null_mut(), PAGE, access, flags) };
    grown(page, length)
}

fn grown<T>(page: Result<*mut T, Errno>, length: usize) -> Result<NonNull<u8>, Errno> {
    let page = page.map_err(|errno| match errno {
        // With MCL_FUTURE; the second if nothing may be locked at all.
        Errno::AGAIN | Errno::PERM => Errno::NOMEM,
        other => other,
    })?;
    let page = page.cast();
    // SAFETY: the page just mapped, which nobody else knows.
    let _ = unsafe { munlock(page, PAGE) };
    // SAFETY: as above; it may go where the kernel likes.
    let grown = unsafe { mremap(page, PAGE, length, MremapFlags::MAYMOVE) };
    if grown.is_err() {
        // SAFETY: as above.
        let _ = unsafe { munmap(page, PAGE) };
    }
    let start = grown?;
    // SAFETY: the mapping just made. A kernel that knows no huge pages refuses, and gives none.
    let _ = unsafe { madvise(start, length, Advice::LinuxNoHugepage) };
    NonNull::new(start.cast()).ok_or(Errno::NOMEM)
}

/// Gives memory to the pages that `length` bytes from `start` lie in, whose first use would else end by `SIGBUS` if there is none.
/// Fails by `ENOMEM` then, and else as madvise(2), `MADV_POPULATE_WRITE`: by `EINVAL` before Linux 5.14.
///
/// # Safety
/// They are inside a mapping of this library's that can be written to.
pub unsafe fn populate(start: NonNull<u8>, length: usize) -> Result<(), Errno> {
    let before = start.addr().get() % PAGE;
    let page = start.as_ptr().wrapping_sub(before).cast();
    // SAFETY: the caller's promise; what is there stays.
    let populated = unsafe { madvise(page, before + length, Advice::LinuxPopulateWrite) };
    populated.map_err(|errno| if errno == Errno::FAULT { Errno::NOMEM } else { errno })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of the mapping that begins at `start` (proc_pid_smaps(5), `VmFlags`).
    fn flags_of(start: NonNull<u8>) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let first = format!("{:x}-", start.addr());
        let lines = maps.lines().skip_while(|line| !line.starts_with(&first));
        let flags = lines.filter_map(|line| line.strip_prefix("VmFlags: ")).next();
        flags.expect("there is such a mapping").to_owned()
    }

    #[test]
    fn all_of_a_mapping_can_be_written_to() {
        const LENGTH: usize = 64 << 20;
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, LENGTH as u64).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        for mapped in [shared(&file, LENGTH, access), private(LENGTH)] {
            let start = mapped.unwrap();
            for offset in [0, PAGE, LENGTH - 1] {
                // SAFETY: inside the mapping.
                let byte = unsafe { start.add(offset) };
                // SAFETY: as above; nobody else has it.
                assert_eq!(unsafe { byte.replace(7) }, 0);
            }
            let flags = flags_of(start);
            assert!(flags.split(' ').any(|flag| flag == "nh"), "huge pages: {flags}");
            // SAFETY: mapped above.
            unsafe { munmap(start.as_ptr().cast(), LENGTH) }.unwrap();
        }
        let mut last = [0];
        rustix::io::pread(&file, &mut last, LENGTH as u64 - 1).unwrap();
        assert_eq!(last, [7]);
        assert!(shared(&file, 1 << 56, access).is_err());
    }
}

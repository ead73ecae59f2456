//! mlockall(2): the program's memory is locked, and this library's large mappings are not.
//!
//! Little of those has memory, and the kernel would give them all of it: 149 MiB for each upgraded connection. New ones see to
//! that themselves ([`thallus_transport::sparse`]). For those that there are:
//!
//! 1. the kernel marks every mapping as locked, but gives none memory yet (`MCL_ONFAULT`);
//! 2. ours are unlocked;
//! 3. the program's are locked one by one without that flag, and so get memory;
//! 4. `MCL_FUTURE` holds without it, too.
//!
//! The kernel refuses 1 if the process has mapped more than it may lock (`RLIMIT_MEMLOCK`). If that is because of ours, the rest
//! is done without it.

use std::ops::Range;

use libc::{MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT, c_int};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MlockAllFlags, MlockFlags, mlock, mlock_with, mlockall, munlock, munlockall};
use rustix::process::{Resource, getrlimit};
use thallus_transport::uninterrupted::{Descriptor, Uninterrupted};

use crate::ops::process::is_stranger;
use crate::{config, errno, table};

/// mlockall(2), whose original is `call`.
pub(crate) fn lock_all(flags: c_int, call: impl FnOnce() -> c_int) -> c_int {
    let concerns_ours =
        flags & MCL_CURRENT != 0 && table::has_mappings() && config::enabled() && !is_stranger();
    if !concerns_ours {
        return call();
    }
    let result = errno::keep(|| {
        let _uninterrupted = Uninterrupted::begin();
        lock_others(flags)
    });
    errno::int(result.map(|()| 0))
}

fn lock_others(flags: c_int) -> Result<(), Errno> {
    let all = |flags: c_int| mlockall(MlockAllFlags::from_bits_retain(flags.cast_unsigned()));
    let marked = all(flags | MCL_ONFAULT);
    if !matches!(marked, Ok(()) | Err(Errno::NOMEM)) {
        return marked;
    }
    let Ok(mappings) = mappings() else { return all(flags) };
    if marked.is_err() {
        let others: usize = mappings.iter().filter(|mapping| !mapping.is_ours).map(Mapping::bytes).sum();
        if getrlimit(Resource::Memlock).current.is_some_and(|limit| others as u64 > limit) {
            return marked;
        }
        // As the call would have done.
        munlockall()?;
    }
    let on_fault = flags & MCL_ONFAULT != 0;
    for mapping in &mappings {
        let (start, bytes) = (std::ptr::with_exposed_provenance_mut(mapping.place.start), mapping.bytes());
        // What can't be locked, or has gone, mlockall does not mind either.
        let _ = match (mapping.is_ours, on_fault) {
            // SAFETY: locking changes nothing that anyone can see in memory.
            (true, _) => unsafe { munlock(start, bytes) },
            // SAFETY: as above.
            (false, true) if marked.is_err() => unsafe { mlock_with(start, bytes, MlockFlags::ONFAULT) },
            (false, true) => Ok(()),
            // SAFETY: as above.
            (false, false) => unsafe { mlock(start, bytes) },
        };
    }
    match flags & MCL_FUTURE {
        0 => Ok(()),
        _ => all(flags & !MCL_CURRENT),
    }
}

/// A line of `/proc/self/maps` (proc(5)).
#[derive(Debug)]
struct Mapping {
    place: Range<usize>,
    is_ours: bool,
}

impl Mapping {
    fn of(line: &str, ours: Option<&Range<usize>>) -> Option<Self> {
        let (start, rest) = line.split_once('-')?;
        let (end, rest) = rest.split_once(' ')?;
        let number = |text| usize::from_str_radix(text, 16).ok();
        let place = number(start)?..number(end)?;
        // The kernel's, beyond what a process has.
        if rest.ends_with("[vsyscall]") {
            return None;
        }
        let is_inside = |ours: &Range<usize>| ours.start < place.end && place.start < ours.end;
        // Offset, device and inode come between, and no memfd has another name.
        let is_ours = rest.contains(" /memfd:thallus-") || ours.is_some_and(is_inside);
        Some(Self { place, is_ours })
    }

    fn bytes(&self) -> usize {
        self.place.len()
    }
}

/// All there are.
fn mappings() -> Result<Vec<Mapping>, Errno> {
    let file = rustix::fs::open("/proc/self/maps", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let file = Descriptor::from(file);
    let (mut text, mut part) = (Vec::new(), [0; 4096]);
    loop {
        match rustix::io::retry_on_intr(|| rustix::io::read(&file, &mut part))? {
            0 => break,
            count => text.extend_from_slice(&part[..count]),
        }
    }
    let ours = table::far_range();
    Ok(String::from_utf8_lossy(&text).lines().filter_map(|line| Mapping::of(line, ours.as_ref())).collect())
}

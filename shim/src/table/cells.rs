//! Where the table's entries are, and what else there is of young connections.
//!
//! Those of low descriptors are in this library's own data, the others in a mapping that is made once there is one: mlockall(2),
//! which many programs call when they start, would give all of it memory, and count it against a limit.

use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use thallus_transport::sparse;

use crate::ops::epoll::Set;

/// Descriptors from here on are never ours; Linux allows so many by default (`fs.nr_open`).
pub(super) const LIMIT: usize = 1 << 20;

/// Descriptors from here on have their entries elsewhere.
const NEAR: usize = 1 << 12;

/// What else there is of a young connection, by its descriptor.
pub(super) struct Beside {
    /// Application bytes: sent in the lower half, received in the upper.
    pub(super) bytes: AtomicU64,
    /// When it was opened ([`thallus_transport::arena::now_ns`]).
    pub(super) opened_ns: AtomicU64,
    /// The epoll set that has it.
    pub(super) set: AtomicPtr<Set>,
}

static TABLE: [AtomicUsize; NEAR] = [const { AtomicUsize::new(0) }; NEAR];

/// In one place: a fork copies each page that is written to after it.
static BESIDE: [Beside; NEAR] = [const {
    Beside {
        bytes: AtomicU64::new(0),
        opened_ns: AtomicU64::new(0),
        set: AtomicPtr::new(std::ptr::null_mut()),
    }
}; NEAR];

/// The same for the other descriptors.
struct Far {
    table: [AtomicUsize; LIMIT - NEAR],
    beside: [Beside; LIMIT - NEAR],
}

/// Null until there is one of these. Never unmapped.
static FAR: AtomicPtr<Far> = AtomicPtr::new(std::ptr::null_mut());

/// The entry of `fd`, if there may be something in it.
#[inline]
pub(super) fn cell(fd: i32) -> Option<&'static AtomicUsize> {
    near(fd).or_else(|| far_cell(fd))
}

/// The same of a low descriptor, whose entry is always there.
#[inline]
pub(super) fn near(fd: i32) -> Option<&'static AtomicUsize> {
    TABLE.get(fd.cast_unsigned() as usize)
}

#[cold]
#[inline(never)]
fn far_cell(fd: i32) -> Option<&'static AtomicUsize> {
    far()?.table.get((fd.cast_unsigned() as usize).checked_sub(NEAR)?)
}

fn far() -> Option<&'static Far> {
    // SAFETY: null, or mapped for good; atomics, of which any value is one.
    unsafe { FAR.load(Ordering::Acquire).as_ref() }
}

/// The entry of `fd`, for something to be put there. `None` if it is never ours, or without memory.
pub(super) fn cell_to_fill(fd: i32) -> Option<&'static AtomicUsize> {
    let is_far = (NEAR..LIMIT).contains(&(fd.cast_unsigned() as usize));
    if is_far && far().is_none() {
        map();
    }
    cell(fd)
}

#[cold]
fn map() {
    let Ok(made) = sparse::private(size_of::<Far>()) else { return };
    let (null, far) = (std::ptr::null_mut(), made.cast().as_ptr());
    if FAR.compare_exchange(null, far, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: made above, and nobody has seen it.
        let _ = unsafe { rustix::mm::munmap(made.as_ptr().cast(), size_of::<Far>()) };
    }
}

/// What else there is of the young connection `fd`.
#[inline]
pub(super) fn beside(fd: i32) -> &'static Beside {
    match BESIDE.get(fd.cast_unsigned() as usize) {
        Some(beside) => beside,
        None => far_beside(fd),
    }
}

#[cold]
#[inline(never)]
fn far_beside(fd: i32) -> &'static Beside {
    &far().expect("it has an entry").beside[fd as usize - NEAR]
}

/// Where those of high descriptors are, if there are any.
pub(crate) fn far_range() -> Option<Range<usize>> {
    let start = FAR.load(Ordering::Acquire).addr();
    (start != 0).then(|| start..start + size_of::<Far>())
}

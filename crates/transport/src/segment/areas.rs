//! The memory behind a segment that its two ends lend each other.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use super::{DOWN, LOANS_OFFSET, READY, Segment};
use crate::lending::Area;

impl Segment {
    /// The memory that the two ends lend each other, mapped into this process when first asked for. Stays of use when the
    /// connection has gone back to TCP. Fails with `EOPNOTSUPP` where there is none, else as mremap(2).
    pub(crate) fn area(&self) -> Result<Arc<Area>, Errno> {
        if !self.has_areas() {
            return Err(Errno::OPNOTSUPP);
        }
        let mut known = self.area.load(Ordering::Acquire);
        // SAFETY: null, or made of an Arc that is kept as long as `self`.
        if unsafe { known.as_ref() }.is_none_or(|area| !area.is_this_process()) {
            known = self.map_area(known)?;
        }
        // SAFETY: as above; this count is the caller's.
        unsafe { Arc::increment_strong_count(known) };
        // SAFETY: as above.
        Ok(unsafe { Arc::from_raw(known) })
    }

    /// Whether there is memory for the two ends to lend each other, and both have the segment, or had it.
    pub(crate) fn has_areas(&self) -> bool {
        self.lendable && matches!(self.header().ready.load(Ordering::Acquire), READY | DOWN)
    }

    /// [`Self::area`], if this process has asked for it before: else it has neither lent anything nor kept any.
    pub(crate) fn mapped_area(&self) -> Option<&Area> {
        // SAFETY: null, or made of an Arc that is kept as long as `self`.
        let known = unsafe { self.area.load(Ordering::Acquire).as_ref() };
        known.filter(|area| area.is_this_process())
    }

    /// Puts a new area in place of `known`, unless another thread has been faster.
    #[cold]
    fn map_area(&self, known: *mut Area) -> Result<*mut Area, Errno> {
        // SAFETY: inside the mapping; see the layout above.
        let loans = unsafe { self.base.add(LOANS_OFFSET) };
        // SAFETY: a shared mapping of a file that goes on as the layout says, because it is sealed at that size.
        let area = Arc::into_raw(Arc::new(unsafe { Area::map(loans, self.role) }?)).cast_mut();
        match self.area.compare_exchange(known, area, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) if known.is_null() => {}
            Ok(_) => {
                // SAFETY: the count that the segment had; other threads may still look at it, so it stays as long.
                let parents = unsafe { Arc::from_raw(known) };
                // SAFETY: made above, and kept as long as `self`.
                unsafe { &*area }.keep(parents);
            }
            Err(faster) => {
                // SAFETY: made above, and nobody has seen it.
                drop(unsafe { Arc::from_raw(area) });
                return Ok(faster);
            }
        }
        Ok(area)
    }
}

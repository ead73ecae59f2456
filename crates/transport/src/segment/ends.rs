//! The two ends of a direction, whichever fabric moves its bytes, and the windows that they lie in on one host.

use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

use crate::control::Control;
use crate::ring::{
    CLASSES, Consumer, Known, Lie, Memory, Popped, Producer, Pushed, class_offset, class_size,
};
use crate::verbs::link::{Failed, Link};

/// The sending end of a direction, over whichever fabric.
#[derive(Debug)]
pub(crate) struct Outlet<'a> {
    pub(super) control: &'a Control,
    pub(super) memory: Windows,
    pub(super) known: &'a Known,
    pub(super) link: Option<&'a Link>,
}

impl Outlet<'_> {
    fn ring(&self) -> Producer<'_, Windows> {
        Producer::new(self.control, &self.memory, self.known)
    }

    /// See [`Producer::has_room`].
    pub(crate) fn has_room(&self) -> bool {
        self.link.map_or_else(|| self.ring().has_room(), Link::has_room)
    }

    /// See [`Producer::push`].
    ///
    /// # Safety
    /// `source` is readable for `length` bytes.
    pub(crate) unsafe fn push(&self, source: *const u8, length: usize) -> Result<Pushed, Failed> {
        match self.link {
            // SAFETY: the caller's promise.
            None => Ok(unsafe { self.ring().push(source, length) }?),
            // SAFETY: the caller's promise.
            Some(link) => unsafe { link.push(self.control, source, length) },
        }
    }

    /// See [`Producer::grow`]. Registered memory does not grow.
    pub(crate) fn grow(&self, wanted: u64, limit: u32) -> Result<bool, Lie> {
        if self.link.is_some() { Ok(false) } else { self.ring().grow(wanted, limit) }
    }

    /// See [`Producer::class`]. 0 over a fabric.
    pub(crate) fn class(&self) -> Result<u32, Lie> {
        if self.link.is_some() { Ok(0) } else { self.ring().class() }
    }

    /// Whether there are larger windows than the smallest.
    pub(crate) fn has_grown(&self) -> bool {
        self.class().is_ok_and(|class| class > 0)
    }

    /// See [`Producer::shrink`].
    pub(crate) fn shrink(&self) -> Result<bool, Lie> {
        if self.link.is_some() { Ok(false) } else { self.ring().shrink() }
    }

    /// See [`Producer::come_home`].
    pub(crate) fn come_home(&self, home: u32) -> Result<bool, Lie> {
        if self.link.is_some() { Ok(false) } else { self.ring().come_home(home) }
    }

    /// See [`Producer::leave_unbacked`].
    pub(crate) fn leave_unbacked(&self) -> Result<bool, Lie> {
        if self.link.is_some() { Ok(false) } else { self.ring().leave_unbacked() }
    }

    /// See [`Producer::moved`]. 0 over a fabric, whose rings have one window.
    pub(crate) fn moved(&self) -> u64 {
        if self.link.is_some() { 0 } else { self.ring().moved() }
    }
}

/// The receiving end of a direction, over whichever fabric.
#[derive(Debug)]
pub(crate) struct Inlet<'a> {
    pub(super) control: &'a Control,
    pub(super) memory: Windows,
    pub(super) link: Option<&'a Link>,
}

impl Inlet<'_> {
    pub(super) fn ring(&self) -> Consumer<'_, Windows> {
        Consumer::new(self.control, &self.memory)
    }

    /// See [`Consumer::available`].
    pub(crate) fn available(&self) -> Result<u64, Lie> {
        if self.link.is_some() { Ok(self.control.used()) } else { self.ring().available() }
    }

    /// See [`Consumer::peek`].
    ///
    /// # Safety
    /// `target` is writable for `length` bytes.
    pub(crate) unsafe fn peek(&self, skip: u64, target: *mut u8, length: usize) -> Result<usize, Lie> {
        match self.link {
            // SAFETY: the caller's promise.
            None => unsafe { self.ring().peek(skip, target, length) },
            // SAFETY: the caller's promise.
            Some(link) => unsafe { link.inbox().peek(self.control, skip, target, length) },
        }
    }

    /// See [`Consumer::consume`].
    pub(crate) fn consume(&self, count: usize) -> Result<Popped, Lie> {
        match self.link {
            None => self.ring().consume(count),
            Some(link) => link.consume(self.control, count),
        }
    }
}

/// One direction that the peer shares.
#[derive(Debug)]
pub(crate) struct InMemory<'a> {
    pub(crate) control: &'a Control,
    pub(super) windows: Windows,
}

impl InMemory<'_> {
    /// See [`Producer::push_whole`].
    ///
    /// # Safety
    /// `source` is readable for `length` bytes.
    #[inline]
    pub(crate) unsafe fn push_whole(
        &self,
        known: &Known,
        source: *const u8,
        length: usize,
    ) -> Result<Pushed, Lie> {
        // SAFETY: the caller's promise.
        unsafe { Producer::new(self.control, &self.windows, known).push_whole(source, length) }
    }

    /// See [`Consumer::pop`].
    ///
    /// # Safety
    /// `target` is writable for `length` bytes.
    #[inline]
    pub(crate) unsafe fn pop(&self, target: *mut u8, length: usize) -> Result<Popped, Lie> {
        // SAFETY: the caller's promise.
        unsafe { Consumer::new(self.control, &self.windows).pop(target, length) }
    }
}

/// The windows of one direction in a mapped segment. Valid while the segment is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Windows {
    /// Of the smallest window.
    pub(super) smallest: NonNull<u8>,
    /// That offsets of the others count from.
    pub(super) base: NonNull<u8>,
}

// SAFETY: each window is mapped memory where `at` says, reached through raw copies only.
unsafe impl Memory for Windows {
    unsafe fn put(&self, offset: u64, source: *const u8, length: usize) {
        let target = self.at(offset);
        // SAFETY: `source` is readable, and an application's buffer never overlaps our mapping.
        unsafe { std::ptr::copy_nonoverlapping(source, target, length) };
    }

    unsafe fn take(&self, offset: u64, target: *mut u8, length: usize) {
        let source = self.at(offset);
        // SAFETY: `target` is writable, and an application's buffer never overlaps our mapping.
        unsafe { std::ptr::copy_nonoverlapping(source, target, length) };
    }

    fn populate(&self, offset: u64, length: u64) -> bool {
        self.advise(offset, length, Advice::LinuxPopulateWrite).is_ok()
    }

    fn discard(&self, class: u32) {
        let class = class.min(CLASSES - 1);
        let _ = self.advise(class_offset(class), class_size(class), Advice::LinuxRemove);
    }
}

impl Windows {
    /// Where `offset` of the direction lies. No copy reaches from one window into the next.
    fn at(self, offset: u64) -> *mut u8 {
        let window = if offset < class_size(0) { self.smallest } else { self.base };
        window.as_ptr().wrapping_add(offset as usize)
    }

    /// Asks for what lies at `offset` to be near this processor, whether or not it has been written. No more than a hint.
    pub(super) fn expect(self, offset: u64) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: every processor of this architecture has the instruction, and it reads nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.at(offset).cast()) };
        }
        #[cfg(target_arch = "aarch64")]
        {
            // SAFETY: it reads nothing.
            unsafe {
                std::arch::asm!("prfm pldl1keep, [{at}]", at = in(reg) self.at(offset), options(nostack, readonly, preserves_flags));
            }
        }
    }

    /// `offset` and `length` lie in one window, and are of whole pages.
    pub(super) fn advise(&self, offset: u64, length: u64, advice: Advice) -> Result<(), Errno> {
        // SAFETY: whole pages of our own mapping that hold nothing in use: of a window about to be opened, or not yet written
        // to, or left for good by both sides. To populate what is in use changes nothing.
        unsafe { madvise(self.at(offset).cast(), length as usize, advice) }
    }
}

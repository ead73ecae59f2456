//! The memory of a queue pair, kept for the next: getting it from the kernel, page by page, takes ten times as long as all
//! else that a connection needs.
//!
//! ```text
//!        0  figures, which the peer reads        FIGURES_BYTES
//!     4096  board, which the peer writes         BOARD_BYTES
//!     8192  ring, which the peer writes
//!        …  stage                                STAGE_BYTES
//!        …  image of the peer's ring
//! ```
//!
//! Idle memory holds zeros only, and no device may reach it: each queue pair registers it anew, in its own protection
//! domain, so the keys of the one before open nothing.
//!
//! The mapping is shared with forks, because a device goes on writing to a page while a copy on write would give the
//! process another. So memory that a fork may still look at is never used again.

use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::board::{BOARD_BYTES, FIGURES_BYTES, Figures, Place, STAGE_BYTES};
use crate::process;

/// Bytes of idle memory that a process keeps.
const KEPT_BYTES: u64 = 64 << 20;

static IDLE: Mutex<Vec<Slab>> = Mutex::new(Vec::new());

/// Zeroed memory for one queue pair, unmapped when dropped.
#[derive(Debug)]
pub(super) struct Slab {
    base: NonNull<u8>,
    /// Bytes of each ring.
    ring: u64,
    /// [`process::forks`] when it was mapped.
    forks: Option<u32>,
}

// SAFETY: a mapping of its own, reached by atomics and copies.
unsafe impl Send for Slab {}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and nobody refers to it any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), Self::bytes(self.ring) as usize) };
    }
}

impl Slab {
    /// For two rings of `ring` bytes: idle memory, or new. Fails as mmap(2) does.
    pub(super) fn take(ring: u64) -> Result<Self, Errno> {
        // Only a fork leaves it locked for long.
        if let Ok(mut idle) = IDLE.try_lock() {
            while let Some(slab) = idle.pop() {
                if slab.is_sole() && slab.ring == ring {
                    return Ok(slab);
                }
            }
        }
        Self::map(ring)
    }

    fn map(ring: u64) -> Result<Self, Errno> {
        // First: a fork that comes in between may inherit the mapping.
        let forks = process::forks();
        let length = Self::bytes(ring) as usize;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), length, access, MapFlags::SHARED) }?;
        // SAFETY: this only says what a core dump leaves out.
        let _ = unsafe { madvise(base, length, Advice::LinuxDontDump) };
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Self { base, ring, forks })
    }

    /// Keeps it for another queue pair. No device reaches it any more; none has reached more than `reach` bytes of a part.
    pub(super) fn put_by(self, reach: u64) {
        if !self.is_sole() {
            return;
        }
        let used = reach.min(self.ring);
        let posted = self.figures().posted.load(Ordering::Relaxed).min(used);
        // Whatever the peer has written, not only where it should.
        self.clear(0, FIGURES_BYTES + BOARD_BYTES + used);
        self.clear(Self::outbox_offset(self.ring), STAGE_BYTES + posted);
        if let Ok(mut idle) = IDLE.try_lock()
            && (idle.len() as u64 + 1) * Self::bytes(self.ring) <= KEPT_BYTES
        {
            idle.push(self);
        }
    }

    /// Where its parts are. They stay as long as the slab.
    pub(super) fn place(&self) -> Place {
        // SAFETY: all inside the mapping; see the layout above.
        let at = |offset: u64| unsafe { self.base.add(offset as usize) };
        Place { figures: self.base, inbox: at(FIGURES_BYTES), outbox: at(Self::outbox_offset(self.ring)) }
    }

    /// Whether no fork can have inherited it.
    fn is_sole(&self) -> bool {
        self.forks.is_some() && self.forks == process::forks()
    }

    fn figures(&self) -> &Figures {
        // SAFETY: the mapping begins with figures, all atomics.
        unsafe { self.base.cast::<Figures>().as_ref() }
    }

    const fn outbox_offset(ring: u64) -> u64 {
        FIGURES_BYTES + BOARD_BYTES + ring
    }

    const fn bytes(ring: u64) -> u64 {
        Self::outbox_offset(ring) + STAGE_BYTES + ring
    }

    /// Zeroes what is not zero: most of it is, and stays as it is in the processor's cache.
    fn clear(&self, offset: u64, length: u64) {
        for at in (offset..offset + length).step_by(8) {
            let word = self.base.as_ptr().wrapping_add(at as usize).cast::<u64>();
            // SAFETY: inside the mapping, and aligned.
            let word = unsafe { AtomicU64::from_ptr(word) };
            if word.load(Ordering::Relaxed) != 0 {
                word.store(0, Ordering::Relaxed);
            }
        }
    }
}

/// Gives idle memory back to the kernel, before a fork.
pub fn discard_idle() {
    if let Ok(mut idle) = IDLE.try_lock() {
        idle.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RING: u64 = 64 << 10;

    /// All of its bytes.
    fn content(slab: &Slab) -> Vec<u8> {
        let mut bytes = vec![0; Slab::bytes(RING) as usize];
        // SAFETY: the whole mapping.
        unsafe { std::ptr::copy_nonoverlapping(slab.base.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        bytes
    }

    /// One test: the idle memory is the process's.
    #[test]
    fn memory_comes_again_empty_unless_a_fork_may_have_it() {
        let slab = Slab::take(RING).unwrap();
        let base = slab.base;
        // What a hostile peer can reach, and what was sent to it.
        let place = slab.place();
        // SAFETY: board and ring.
        unsafe { place.inbox.write_bytes(0xff, (BOARD_BYTES + RING) as usize) };
        // SAFETY: the stage, and the beginning of the image.
        unsafe { place.outbox.write_bytes(0xff, STAGE_BYTES as usize + 1000) };
        slab.figures().posted.store(1000, Ordering::Relaxed);
        slab.put_by(RING);
        let again = Slab::take(RING).unwrap();
        assert_eq!(again.base, base);
        assert!(content(&again).iter().all(|&byte| byte == 0));

        // All round the ring, with the page before it.
        // SAFETY: stage and image.
        unsafe { place.outbox.write_bytes(0xff, (STAGE_BYTES + RING) as usize) };
        again.figures().posted.store(3 * RING, Ordering::Relaxed);
        again.put_by(STAGE_BYTES + RING);
        let again = Slab::take(RING).unwrap();
        assert!(content(&again).iter().all(|&byte| byte == 0));
        again.put_by(RING);
        let other = Slab::take(2 * RING).unwrap();
        assert_ne!(other.base, base, "it has another size");
        drop(other);

        let old = Slab::take(RING).unwrap();
        process::forking();
        old.put_by(RING);
        assert!(IDLE.lock().unwrap().is_empty());
        let slab = Slab::take(RING).unwrap();
        slab.put_by(RING);
        process::forking();
        let _new = Slab::take(RING).unwrap();
        assert!(IDLE.lock().unwrap().is_empty());
    }

    #[test]
    fn the_parts_of_a_slab_follow_each_other() {
        let slab = Slab::map(RING).unwrap();
        let Place { figures, inbox, outbox } = slab.place();
        let offset = |part: NonNull<u8>| (part.addr().get() - slab.base.addr().get()) as u64;
        assert_eq!([figures, inbox, outbox].map(offset), [0, 4096, 8192 + RING]);
        assert_eq!(Slab::bytes(RING), 8192 + RING + 12288 + RING);
    }
}

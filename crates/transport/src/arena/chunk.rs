//! The memory that holds blocks: which of them are in use, and who finds it.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use rustix::process::{Resource, getrlimit};

use super::{Block, Generation, Role, State};
use crate::sparse::{self, PAGE};

/// The memfd's name, by which `thallus status` finds a process's chunks in `/proc/PID/fd`.
pub const MEMFD_NAME: &str = "thallus-arena";

const MAGIC: u64 = u64::from_le_bytes(*b"THALLUSa");
const VERSION: u32 = 2;
const BITMAP_WORDS: usize = 128;
pub(super) const HEADER_BYTES: usize = PAGE;

/// Connections that one chunk can hold.
pub const BLOCKS: usize = BITMAP_WORDS * 64;

/// Size of a chunk in bytes. Sparse: an unused block costs no memory.
pub const CHUNK_BYTES: usize = HEADER_BYTES + BLOCKS * size_of::<Block>();

#[repr(C)]
pub(super) struct Header {
    magic: AtomicU64,
    version: AtomicU32,
    block_bytes: AtomicU32,
    block_count: AtomicU32,
    _pad: [u32; 11],
    bitmap: [AtomicU64; BITMAP_WORDS],
}

const _: () = assert!(std::mem::offset_of!(Header, bitmap) == 64);
const _: () = assert!(size_of::<Header>() <= HEADER_BYTES);

impl Header {
    pub(super) fn zero() -> Self {
        // SAFETY: integers, for which zero is valid.
        unsafe { std::mem::zeroed() }
    }

    /// Whether the process that makes the chunk has got this far. What it writes first is of no version yet.
    pub(super) fn is_written(&self) -> bool {
        self.magic.load(Ordering::Acquire) != 0
    }

    /// Whether a chunk is of this version.
    pub(super) fn fits(&self) -> bool {
        self.magic.load(Ordering::Acquire) == MAGIC
            && self.version.load(Ordering::Relaxed) == VERSION
            && self.block_bytes.load(Ordering::Relaxed) as usize == size_of::<Block>()
    }

    /// Of the bitmap.
    pub(super) fn words(&self) -> impl Iterator<Item = u64> + '_ {
        self.bitmap.iter().map(|word| word.load(Ordering::Acquire))
    }
}

/// One chunk of this process family. It stays mapped as long as the process: blocks are handed out as `&'static`.
pub struct Chunk {
    base: NonNull<u8>,
    /// By which `thallus status` finds it.
    fd: Option<OwnedFd>,
    /// So many bytes have been given memory.
    populated: AtomicUsize,
    /// Blocks that only dead processes had at the last [`Self::sweep`], with their states.
    suspects: Mutex<Vec<(usize, u32)>>,
}

// SAFETY: the mapping is never unmapped and holds nothing but atomics.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl fmt::Debug for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chunk").field("base", &self.base).field("fd", &self.fd).finish()
    }
}

impl Chunk {
    /// Creates an empty chunk, whose descriptor `place` moves out of the program's way. Without a free descriptor, or
    /// where files must be smaller (`RLIMIT_FSIZE`, which kills), or memory files are forbidden, it has none, and `thallus status` does not see it.
    /// Fails as memfd_create(2), ftruncate(2) or mmap(2) do, and by `ENOMEM` without memory for some blocks.
    pub fn create(place: impl Fn(OwnedFd) -> Result<OwnedFd, Errno>) -> Result<Self, Errno> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let limit = getrlimit(Resource::Fsize).current;
        let file = match limit.is_some_and(|limit| limit < CHUNK_BYTES as u64) {
            true => Err(Errno::MFILE),
            false => memfd_create(MEMFD_NAME, flags),
        };
        let fd = match file.and_then(place) {
            Ok(fd) => {
                ftruncate(&fd, CHUNK_BYTES as u64)?;
                // Whoever looks at it must not find it cut short.
                fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
                Some(fd)
            }
            Err(Errno::MFILE | Errno::NFILE | Errno::ACCESS | Errno::PERM) => None,
            Err(errno) => return Err(errno),
        };
        let chunk = Self::map(fd, ProtFlags::READ | ProtFlags::WRITE)?;
        chunk.populate(0)?;
        let header = chunk.header();
        header.version.store(VERSION, Ordering::Relaxed);
        header.block_bytes.store(size_of::<Block>() as u32, Ordering::Relaxed);
        header.block_count.store(BLOCKS as u32, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok(chunk)
    }

    fn map(fd: Option<OwnedFd>, protection: ProtFlags) -> Result<Self, Errno> {
        let null = std::ptr::null_mut();
        let base = match &fd {
            Some(fd) => sparse::shared(fd, CHUNK_BYTES, protection)?,
            None => {
                // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
                let base = unsafe { mmap_anonymous(null, CHUNK_BYTES, protection, MapFlags::SHARED)? };
                NonNull::new(base.cast()).ok_or(Errno::NOMEM)?
            }
        };
        Ok(Self { base, fd, populated: AtomicUsize::new(0), suspects: Mutex::default() })
    }

    /// The descriptor by which `thallus status` finds it.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    fn header(&self) -> &'static Header {
        // SAFETY: the mapping is CHUNK_BYTES long, page-aligned, never unmapped, and starts with a Header.
        unsafe { self.base.cast::<Header>().as_ref() }
    }

    fn block(&self, index: usize) -> &'static Block {
        debug_assert!(index < BLOCKS);
        // SAFETY: index < BLOCKS, so the block lies inside the mapping.
        let block = unsafe { self.base.add(HEADER_BYTES + index * size_of::<Block>()) };
        // SAFETY: inside the mapping, aligned to 512, never unmapped, atomics only.
        unsafe { block.cast::<Block>().as_ref() }
    }

    /// Gives memory to the block of this `index` and those before it: used without, it would end the process by `SIGBUS`.
    fn populate(&self, index: usize) -> Result<(), Errno> {
        let end = HEADER_BYTES + (index + 1) * size_of::<Block>();
        let start = self.populated.load(Ordering::Relaxed);
        if end <= start {
            return Ok(());
        }
        let end = end.next_multiple_of(PAGE);
        // SAFETY: inside the mapping.
        let place = unsafe { self.base.add(start) };
        // SAFETY: as above.
        match unsafe { sparse::populate(place, end - start) } {
            // An old kernel, on which nothing leaves TCP, but is counted.
            Ok(()) | Err(Errno::INVAL) => {
                self.populated.fetch_max(end, Ordering::Relaxed);
                Ok(())
            }
            other => other,
        }
    }

    /// Takes a free block for a connection that `pid` has just opened as `fd`. `None` if the chunk is full, or without memory.
    pub fn allocate(&self, role: Role, pid: u32, fd: u32, opened_ns: u64) -> Option<&'static Block> {
        for (word_index, word) in self.header().bitmap.iter().enumerate() {
            let mut bits = word.load(Ordering::Relaxed);
            while bits != u64::MAX {
                let bit = bits.trailing_ones();
                match word.compare_exchange_weak(bits, bits | 1 << bit, Ordering::Acquire, Ordering::Relaxed)
                {
                    Ok(_) => {
                        let index = word_index * 64 + bit as usize;
                        if self.populate(index).is_err() {
                            self.give_back(index);
                            return None;
                        }
                        let block = self.block(index);
                        block.reset(role, pid, fd, opened_ns);
                        return Some(block);
                    }
                    Err(now) => bits = now,
                }
            }
        }
        None
    }

    /// Gives a block back that was used for the connection of a `generation`, unless that has been swept. False if `block` is not of
    /// this chunk.
    pub fn free(&self, block: &Block, generation: Generation) -> bool {
        let Some(index) = self.index_of(block) else { return false };
        loop {
            let word = block.state.load(Ordering::Acquire);
            if Generation::of(word) != generation || self.end(block, index, word) {
                return true;
            }
        }
    }

    /// Gives a block back whose state is `word`. False if that has changed: a connection ends once.
    fn end(&self, block: &Block, index: usize, word: u32) -> bool {
        let ended = block.exchange_state(word, Generation::of(word).ended().with(State::Pinned));
        if ended {
            self.give_back(index);
        }
        ended
    }

    fn give_back(&self, index: usize) {
        self.header().bitmap[index / 64].fetch_and(!(1 << (index % 64)), Ordering::Release);
    }

    /// The place of a block. `None` if it is not of this chunk.
    pub fn index_of(&self, block: &Block) -> Option<usize> {
        let offset = std::ptr::from_ref(block).addr().checked_sub(self.base.addr().get() + HEADER_BYTES)?;
        let index = offset / size_of::<Block>();
        (index < BLOCKS).then_some(index)
    }

    /// The blocks in use, in no particular order.
    pub fn blocks(&self) -> impl Iterator<Item = &'static Block> + '_ {
        self.in_use().map(|index| self.block(index))
    }

    fn in_use(&self) -> impl Iterator<Item = usize> + '_ {
        let words = &self.header().bitmap;
        (0..BLOCKS).filter(|index| words[index / 64].load(Ordering::Acquire) & 1 << (index % 64) != 0)
    }

    /// Frees the blocks whose holders were all dead at the last look, too: processes that were killed could not. Not at the first: a
    /// process that lets go of a block uses it to the end of its call, and for a moment the dead alone seem to have it. Returns how
    /// many.
    pub fn sweep(&self) -> usize {
        let Ok(mut suspects) = self.suspects.lock() else { return 0 };
        let before = std::mem::take(&mut *suspects);
        let mut count = 0;
        for index in self.in_use() {
            let block = self.block(index);
            let word = block.state.load(Ordering::Acquire);
            if !Generation::of(word).is_of_one() || !block.is_left_by_the_dead() {
                continue;
            }
            let suspect = (index, word);
            // Sorted, for places are looked at in their order.
            if before.binary_search(&suspect).is_ok() && self.end(block, index, word) {
                count += 1;
            } else {
                suspects.push(suspect);
            }
        }
        count
    }

    /// How many the next [`Self::sweep`] frees, if they are still so.
    pub fn suspects(&self) -> usize {
        self.suspects.lock().map_or(0, |suspects| suspects.len())
    }
}

/// What a file with the name of chunks is, by its length and its seals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Perhaps a chunk: as long as one, for good.
    Chunk,
    /// [`Chunk::create`] is not there yet.
    Begun,
    Other,
}

impl Kind {
    pub(super) fn of(fd: BorrowedFd<'_>) -> Self {
        let length = rustix::fs::fstat(fd).map(|file| usize::try_from(file.st_size));
        let is_sealed = fcntl_get_seals(fd).map(|seals| seals.contains(SealFlags::SHRINK));
        match (length, is_sealed) {
            (Ok(Ok(CHUNK_BYTES)), Ok(true)) => Self::Chunk,
            (Ok(Ok(0)), Ok(_)) | (Ok(Ok(CHUNK_BYTES)), Ok(false)) => Self::Begun,
            _ => Self::Other,
        }
    }
}

/// Another process's chunk, mapped for as long as this lives: for who wants something done to a connection. Whoever only looks takes a
/// [`Snapshot`](super::Snapshot).
#[derive(Debug)]
pub struct View(Chunk);

impl View {
    /// Maps a chunk that can be written to. `None` if it is not one of this version.
    ///
    /// # Errors
    /// As mmap(2).
    pub fn open(fd: OwnedFd) -> Result<Option<Self>, Errno> {
        if Kind::of(fd.as_fd()) != Kind::Chunk {
            return Ok(None);
        }
        let mut view = Self(Chunk::map(Some(fd), ProtFlags::READ | ProtFlags::WRITE)?);
        // Who looks at this process meanwhile must not take it for one that has the arena.
        view.0.fd = None;
        Ok(view.0.header().fits().then_some(view))
    }

    /// The blocks in use, each with its place in the chunk.
    pub fn blocks(&self) -> impl Iterator<Item = (usize, &Block)> {
        self.0.in_use().map(|index| (index, self.0.block(index)))
    }

    /// The block at a place, in use or not. `None` if there is no such place.
    pub fn block(&self, index: usize) -> Option<&Block> {
        (index < BLOCKS).then(|| self.0.block(index))
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: the whole mapping that `map` made; what `blocks` lends does not outlive this.
        let _ = unsafe { munmap(self.0.base.as_ptr().cast(), CHUNK_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pid() -> u32 {
        std::process::id()
    }

    #[test]
    fn a_block_is_reused_only_after_it_was_freed() {
        let chunk = Chunk::create(Ok).unwrap();
        let first = chunk.allocate(Role::Client, pid(), 3, 1).unwrap();
        let second = chunk.allocate(Role::Server, pid(), 4, 1).unwrap();
        assert!(!std::ptr::eq(first, second));
        assert!(chunk.free(first, first.generation()));
        assert!(std::ptr::eq(first, chunk.allocate(Role::Server, pid(), 5, 2).unwrap()));
        assert_eq!(first.role(), Role::Server);
        assert_eq!(first.opened_ns(), 2);
    }

    #[test]
    fn a_full_chunk_has_no_block() {
        let chunk = Chunk::create(Ok).unwrap();
        for _ in 0..BLOCKS {
            assert!(chunk.allocate(Role::Client, pid(), 3, 1).is_some());
        }
        assert!(chunk.allocate(Role::Client, pid(), 3, 1).is_none());
        assert_eq!(chunk.blocks().count(), BLOCKS);
    }

    #[test]
    fn blocks_of_killed_processes_are_swept() {
        let chunk = Chunk::create(Ok).unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let block = chunk.allocate(Role::Server, child.id(), 3, 1).unwrap();
        assert_eq!(chunk.sweep(), 0);
        assert!(!block.held_only_by(pid()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((chunk.sweep(), chunk.sweep()), (0, 1));
        assert_eq!(chunk.blocks().count(), 0);
    }

    #[test]
    fn who_ends_a_connection_that_was_swept_does_not_end_the_next() {
        let chunk = Chunk::create(Ok).unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let swept = chunk.allocate(Role::Server, child.id(), 3, 1).unwrap();
        let generation = swept.generation();
        assert_eq!((chunk.sweep(), chunk.sweep()), (0, 1));
        let next = chunk.allocate(Role::Server, pid(), 3, 1).unwrap();
        assert!(std::ptr::eq(swept, next));
        assert!(chunk.free(swept, generation));
        assert_eq!(chunk.blocks().count(), 1);
        assert!(chunk.free(next, next.generation()));
        assert_eq!(chunk.blocks().count(), 0);
    }

    #[test]
    fn another_process_can_look_at_a_chunk_but_not_at_something_else() {
        let chunk = Chunk::create(Ok).unwrap();
        let block = chunk.allocate(Role::Client, pid(), 7, 1).unwrap();
        let local = "127.0.0.1:4000".parse().unwrap();
        let peer = "[::ffff:127.0.0.1]:5432".parse().unwrap();
        block.set_addresses(local, peer);
        let view = View::open(chunk.fd().unwrap().try_clone_to_owned().unwrap()).unwrap().unwrap();
        let (index, seen) = view.blocks().next().unwrap();
        assert_eq!(index, 0);
        assert_eq!(seen.local(), Some(local));
        assert_eq!(seen.peer(), Some("127.0.0.1:5432".parse().unwrap()));

        let other = memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&other, CHUNK_BYTES as u64).unwrap();
        assert!(View::open(other).unwrap().is_none());
    }

    #[test]
    fn a_view_that_is_dropped_leaves_no_mapping() {
        let chunk = Chunk::create(Ok).unwrap();
        let file = rustix::fs::fstat(chunk.fd().unwrap()).unwrap().st_ino.to_string();
        let mappings = || {
            let table = std::fs::read_to_string("/proc/self/maps").unwrap();
            table.lines().filter(|line| line.split_whitespace().nth(4) == Some(&file)).count()
        };
        let view = View::open(chunk.fd().unwrap().try_clone_to_owned().unwrap()).unwrap().unwrap();
        assert_eq!(mappings(), 2);
        drop(view);
        assert_eq!(mappings(), 1);
    }
}

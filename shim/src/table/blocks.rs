//! Where connections' blocks come from: the chunks of this family of processes.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use thallus_transport::arena::{Block, Chunk, Generation, Role};
use thallus_transport::process;
use thallus_transport::uninterrupted::Uninterrupted;

use super::place;
use crate::errno;

static CHUNKS: Mutex<Vec<&'static Chunk>> = Mutex::new(Vec::new());

/// Fewer blocks than these are not worth a search for those that children have left behind.
const FEW: usize = 64;

/// The place in a chunk from which on they are searched for. The lowest free place is taken first, so that more connections than
/// before are open, or there are such blocks.
static SEARCH_FROM: AtomicUsize = AtomicUsize::new(FEW);

/// Takes a block for a connection that was opened as `fd`, at `opened_ns`. `None` without memory for one more chunk.
pub(super) fn allocate(role: Role, fd: i32, opened_ns: u64) -> Option<&'static Block> {
    let chunks = CHUNKS.lock().ok()?;
    let from = |chunk: &'static Chunk| chunk.allocate(role, process::id(), fd as u32, opened_ns);
    if let Some((chunk, block)) = chunks.iter().find_map(|chunk| Some((chunk, from(chunk)?))) {
        if chunk.index_of(block).is_some_and(|index| index >= SEARCH_FROM.load(Ordering::Relaxed)) {
            chunk.sweep();
            let (all, suspects) = (chunk.blocks().count(), chunk.suspects());
            SEARCH_FROM.store(all + all.saturating_sub(suspects) + FEW, Ordering::Relaxed);
        }
        return Some(block);
    }
    if chunks.iter().map(|chunk| chunk.sweep()).sum::<usize>() > 0 {
        return chunks.iter().find_map(|chunk| from(chunk));
    }
    drop(chunks);
    from(add_chunk()?)
}

/// Makes one more chunk. Without the lock: what it closes on the way comes back to this table.
fn add_chunk() -> Option<&'static Chunk> {
    let chunk: &'static Chunk = Box::leak(Box::new(Chunk::create(place).ok()?));
    CHUNKS.lock().ok()?.push(chunk);
    Some(chunk)
}

/// Makes the first chunk, now that there is a connection: later there might not be the descriptor, or the memory.
pub(crate) fn prepare() {
    errno::keep(|| {
        let _uninterrupted = Uninterrupted::begin();
        add_chunk();
    });
}

/// Whether there may be a chunk. Waits for nobody.
pub(super) fn exist() -> bool {
    !matches!(CHUNKS.try_lock(), Ok(chunks) if chunks.is_empty())
}

/// Gives a block back that was used for the connection of a `generation`.
pub(super) fn free(block: &'static Block, generation: Generation) {
    if let Ok(chunks) = CHUNKS.lock() {
        let _ = chunks.iter().any(|chunk| chunk.free(block, generation));
    }
}

/// The chunks' descriptors.
pub(super) fn descriptors() -> Vec<i32> {
    let Ok(chunks) = CHUNKS.lock() else { return Vec::new() };
    chunks.iter().filter_map(|chunk| chunk.fd()).map(|fd: BorrowedFd<'_>| fd.as_raw_fd()).collect()
}

/// Keeps the list over a fork.
pub(super) fn quiesce() -> Option<MutexGuard<'static, Vec<&'static Chunk>>> {
    CHUNKS.lock().ok()
}

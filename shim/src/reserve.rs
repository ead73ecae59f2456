//! Memory for when the program has none left. Rust ends a process that gets none, with lines on its standard error; what the library's calls
//! need while the program looks for a way out is little, and soon given back.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

struct Allocator;

/// How many pieces there are.
const COUNT: usize = 16;
/// Bytes of a piece.
const SIZE: usize = 4096;

#[repr(align(64))]
struct Pieces(UnsafeCell<[[u8; SIZE]; COUNT]>);

// SAFETY: a piece is its owner's alone, as `TAKEN` says.
unsafe impl Sync for Pieces {}

static PIECES: Pieces = Pieces(UnsafeCell::new([[0; SIZE]; COUNT]));

/// A bit for each piece that is taken.
static TAKEN: AtomicU32 = AtomicU32::new(0);

/// Whether so much is taken that what lasts must not take more.
pub(crate) fn is_low() -> bool {
    TAKEN.load(Ordering::Relaxed).count_ones() as usize >= COUNT / 2
}

/// A piece for that, if one is large enough and free; else null.
#[cold]
fn take(layout: Layout) -> *mut u8 {
    let mut taken = TAKEN.load(Ordering::Relaxed);
    while layout.size() <= SIZE && layout.align() <= align_of::<Pieces>() {
        let free = taken.trailing_ones();
        if free as usize == COUNT {
            break;
        }
        match TAKEN.compare_exchange_weak(taken, taken | 1 << free, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => return PIECES.0.get().cast::<u8>().wrapping_add(free as usize * SIZE),
            Err(now) => taken = now,
        }
    }
    std::ptr::null_mut()
}

/// Which piece that is, if it is one.
#[inline]
fn piece(memory: *mut u8) -> Option<usize> {
    let offset = memory.addr().wrapping_sub(PIECES.0.get().addr());
    (offset < COUNT * SIZE).then_some(offset / SIZE)
}

// SAFETY: the system's allocator; and pieces that are as large as asked for, aligned, and nobody else's until they are given back.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller says.
        let memory = unsafe { System.alloc(layout) };
        if memory.is_null() { take(layout) } else { memory }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller says.
        let memory = unsafe { System.alloc_zeroed(layout) };
        if !memory.is_null() {
            return memory;
        }
        let piece = take(layout);
        if !piece.is_null() {
            // SAFETY: it is as large, and nobody else's.
            unsafe { piece.write_bytes(0, layout.size()) };
        }
        piece
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        match piece(memory) {
            Some(piece) => drop(TAKEN.fetch_and(!(1 << piece), Ordering::Release)),
            // SAFETY: as the caller says; it is the system's.
            None => unsafe { System.dealloc(memory, layout) },
        }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let is_piece = piece(memory).is_some();
        if !is_piece {
            // SAFETY: as the caller says; it is the system's.
            let moved = unsafe { System.realloc(memory, layout, size) };
            if !moved.is_null() {
                return moved;
            }
        }
        // SAFETY: the caller says that the size is one of a layout.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        // SAFETY: as the caller says.
        let moved = if is_piece { unsafe { self.alloc(wanted) } } else { take(wanted) };
        if !moved.is_null() {
            // SAFETY: both are as large, and not the same.
            unsafe { moved.copy_from_nonoverlapping(memory, layout.size().min(size)) };
            // SAFETY: as the caller says.
            unsafe { self.dealloc(memory, layout) };
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has(memory: *mut u8, value: u8) -> bool {
        // SAFETY: taken, and written, by the test.
        let bytes = unsafe { std::slice::from_raw_parts(memory, SIZE) };
        bytes.iter().all(|&byte| byte == value)
    }

    fn give_back(memory: *mut u8, size: usize) {
        let layout = Layout::from_size_align(size, 64).unwrap();
        // SAFETY: taken by the test, and so large.
        unsafe { ALLOCATOR.dealloc(memory, layout) };
    }

    #[test]
    fn pieces_are_taken_once_and_given_back() {
        let layout = Layout::from_size_align(SIZE, 64).unwrap();
        let pieces: Vec<_> = (0..COUNT).map(|_| take(layout)).collect();
        for (index, &memory) in pieces.iter().enumerate() {
            assert_eq!(piece(memory), Some(index));
            assert_eq!(memory.align_offset(64), 0);
            // SAFETY: taken above.
            unsafe { memory.write_bytes(index as u8, SIZE) };
        }
        assert!(is_low() && take(layout).is_null());
        assert!(pieces.iter().enumerate().all(|(index, &memory)| has(memory, index as u8)));
        // SAFETY: taken above, and moved by that.
        let moved = unsafe { ALLOCATOR.realloc(pieces[7], layout, 2 * SIZE) };
        assert!(piece(moved).is_none() && has(moved, 7));
        assert_eq!(take(layout), pieces[7]);
        give_back(moved, 2 * SIZE);
        pieces.into_iter().for_each(|memory| give_back(memory, SIZE));
        assert_eq!(TAKEN.load(Ordering::Relaxed), 0);
        assert!(take(Layout::from_size_align(SIZE + 1, 1).unwrap()).is_null());
        assert!(take(Layout::from_size_align(1, 128).unwrap()).is_null());
    }
}

//! A look at another process's chunk that maps nothing: whoever touches a hole of a mapped file gets memory for it, and pays. Any
//! process may have a chunk all of whose blocks are in use and none of which it has ever written to; read(2) copies zeros from
//! those.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{SeekFrom, seek};
use rustix::io::{Errno, pread, retry_on_intr};

use super::Block;
use super::chunk::{HEADER_BYTES, Header, Kind};

/// Blocks whose bits are one word of the bitmap.
const BATCH: usize = u64::BITS as usize;

/// Another process's connections at one moment: copies, which no longer change.
#[derive(Debug)]
pub struct Snapshot(Vec<(usize, Block)>);

impl Snapshot {
    /// Looks at a chunk. `None` if it is not one of this version. One that its process is about to make has no connections.
    ///
    /// # Errors
    /// As pread(2).
    pub fn of(fd: impl AsFd) -> Result<Option<Self>, Errno> {
        let fd = fd.as_fd();
        match Kind::of(fd) {
            Kind::Chunk => {}
            Kind::Begun => return Ok(Some(Self(Vec::new()))),
            Kind::Other => return Ok(None),
        }
        let mut header = [Header::zero()];
        read(fd, bytes_of(&mut header), 0)?;
        let [header] = header;
        if !header.is_written() {
            return Ok(Some(Self(Vec::new())));
        }
        if !header.fits() {
            return Ok(None);
        }
        let mut blocks = Vec::new();
        let [mut seen, mut again] = [(); 2].map(|()| (0..BATCH).map(|_| Block::zero()).collect::<Vec<_>>());
        // There is nothing before it that has not been looked at.
        let mut written = 0;
        for (word, bits) in header.words().enumerate().filter(|&(_, bits)| bits != 0) {
            let used = bits.trailing_zeros() as usize..BATCH - bits.leading_zeros() as usize;
            let offset = HEADER_BYTES + (word * BATCH + used.start) * size_of::<Block>();
            let end = offset + used.len() * size_of::<Block>();
            if written < end as u64 {
                written = written.max(next_written(fd, offset)?);
            }
            if written >= end as u64 {
                continue;
            }
            for batch in [&mut seen, &mut again] {
                read(fd, bytes_of(&mut batch[used.clone()]), offset)?;
            }
            for bit in used.filter(|bit| bits & 1 << bit != 0) {
                let block = &mut seen[bit];
                // A state is read before the words behind it. If it is of the same connection after them, so are they.
                if block.connection().is_some_and(|connection| again[bit].connection() == Some(connection)) {
                    blocks.push((word * BATCH + bit, std::mem::replace(block, Block::zero())));
                }
            }
        }
        Ok(Some(Self(blocks)))
    }

    /// The blocks that connections have, each with its place in the chunk.
    pub fn blocks(&self) -> impl Iterator<Item = (usize, &Block)> {
        self.0.iter().map(|(index, block)| (*index, block))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The first byte from `offset` on that may have been written to: zeros, too, take time to be copied.
fn next_written(fd: BorrowedFd<'_>, offset: usize) -> Result<u64, Errno> {
    match seek(fd, SeekFrom::Data(offset as u64)) {
        Err(Errno::NXIO) => Ok(u64::MAX),
        outcome => outcome,
    }
}

fn read(fd: BorrowedFd<'_>, mut bytes: &mut [u8], offset: usize) -> Result<(), Errno> {
    let mut offset = offset as u64;
    while !bytes.is_empty() {
        let count = retry_on_intr(|| pread(fd, &mut *bytes, offset))?;
        if count == 0 {
            // Cut short, which its seals forbid.
            return Err(Errno::IO);
        }
        offset += count as u64;
        bytes = &mut bytes[count..];
    }
    Ok(())
}

/// What is nothing but integers, so that any bytes make one.
pub(super) trait Plain {}

impl Plain for Header {}
impl Plain for Block {}

fn bytes_of<T: Plain>(all: &mut [T]) -> &mut [u8] {
    let length = size_of_val(all);
    // SAFETY: as long as the slice, borrowed as it is, and any bytes are valid for what it holds.
    unsafe { std::slice::from_raw_parts_mut(all.as_mut_ptr().cast(), length) }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::os::fd::OwnedFd;
    use std::sync::atomic::Ordering;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
    use rustix::io::pwrite;

    use crate::arena::{BLOCKS, CHUNK_BYTES, Chunk, Role};

    fn own(chunk: &Chunk) -> OwnedFd {
        chunk.fd().unwrap().try_clone_to_owned().unwrap()
    }

    #[test]
    fn connections_are_copied_and_free_blocks_are_not() {
        let chunk = Chunk::create(Ok).unwrap();
        let all: Vec<_> =
            (0..200).map(|fd| chunk.allocate(Role::Server, std::process::id(), fd, 1).unwrap()).collect();
        for (index, block) in all.iter().enumerate().filter(|(index, _)| ![3, 63, 64, 199].contains(index)) {
            assert_eq!(chunk.index_of(block), Some(index));
            assert!(chunk.free(block, block.generation()));
        }
        let seen = Snapshot::of(own(&chunk)).unwrap().unwrap();
        all[3].ring_sent.store(9, Ordering::Relaxed);
        let fds = |(index, block): (usize, &Block)| {
            (index, block.owner_fd.load(Ordering::Relaxed), block.ring_sent.load(Ordering::Relaxed))
        };
        assert_eq!(
            seen.blocks().map(fds).collect::<Vec<_>>(),
            [(3, 3, 0), (63, 63, 0), (64, 64, 0), (199, 199, 0)]
        );
        assert_eq!((seen.len(), seen.is_empty()), (4, false));
    }

    #[test]
    fn a_chunk_that_is_being_made_is_of_no_other_version() {
        let file = memfd_create("begun", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        let is_empty = || Snapshot::of(&file).unwrap().map(|seen| seen.is_empty());
        assert_eq!(is_empty(), Some(true));
        ftruncate(&file, CHUNK_BYTES as u64).unwrap();
        assert_eq!(is_empty(), Some(true));
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        assert_eq!(is_empty(), Some(true));
        // The magic, at the start, is written last.
        assert_eq!(pwrite(&file, &2u32.to_ne_bytes(), 8), Ok(4));
        assert_eq!(is_empty(), Some(true));
        assert_eq!(pwrite(&file, b"THALLUSa", 0), Ok(8));
        assert_eq!(is_empty(), None, "blocks of no size");

        let shorter = memfd_create("shorter", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&shorter, CHUNK_BYTES as u64 - 512).unwrap();
        assert!(Snapshot::of(&shorter).unwrap().is_none());
    }

    #[test]
    fn blocks_that_were_never_written_to_cost_nobody_memory() {
        let chunk = Chunk::create(Ok).unwrap();
        let mut header = vec![0; 64];
        assert_eq!(pread(chunk.fd().unwrap(), &mut header[..], 0), Ok(64));
        header.resize(64 + BLOCKS / 8, 0xff);
        let file = memfd_create("hostile", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, CHUNK_BYTES as u64).unwrap();
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        assert_eq!(pwrite(&file, &header, 0), Ok(header.len()));
        let before = fstat(&file).unwrap().st_blocks;
        let seen = Snapshot::of(&file).unwrap().unwrap();
        assert_eq!((seen.len(), fstat(&file).unwrap().st_blocks), (0, before));

        // One that has been written to, between holes: its state is a connection's.
        let far = 100 * BATCH + 7;
        assert_eq!(
            pwrite(&file, &4u32.to_ne_bytes(), (HEADER_BYTES + far * size_of::<Block>()) as u64),
            Ok(4)
        );
        let seen = Snapshot::of(&file).unwrap().unwrap();
        assert_eq!(seen.blocks().map(|(index, _)| index).collect::<Vec<_>>(), [far]);

        assert_eq!(pwrite(&file, &[0], 8), Ok(1));
        assert!(Snapshot::of(&file).unwrap().is_none());
    }
}

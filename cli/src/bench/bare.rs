//! The yardstick: two rings in shared memory, one for each direction, on which both processes spin. No wait sleeps, nothing is
//! shared between threads, a peer that lies or dies is not noticed: what is left is what the machine itself takes.

#![allow(unsafe_code, reason = "memory that another process writes to has no safe form")]

use std::fs::File;
use std::hint::spin_loop;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, memfd_create};

/// Bytes of a ring.
const RING: usize = 1 << 20;
/// Bytes in front of a ring: its words, each two cache lines from the next, since processors fetch lines in pairs.
const WORDS: usize = 4096;
const HEAD: usize = 0;
const TAIL: usize = 128;
const CLOSED: usize = 256;
const DIRECTION: usize = WORDS + RING;
/// Bytes after which a long message is published, so that the reader starts early.
const PIECE: usize = 32 << 10;

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Bare {
    memory: MmapRaw,
    outgoing: Ring,
    incoming: Ring,
}

/// What an end knows of one direction.
#[derive(Debug)]
struct Ring {
    /// Bytes from the start of the memory.
    at: usize,
    /// Bytes that this end has moved.
    moved: u64,
    /// The other end's count when it was last looked at.
    theirs: u64,
}

impl Bare {
    /// The server's end, of memory that lives as long as it, and the path by which the client gets it.
    pub(super) fn listen() -> io::Result<(Self, OwnedFd, PathBuf)> {
        let memory = memfd_create("thallus-bench", MemfdFlags::CLOEXEC)?;
        let file = File::from(memory);
        file.set_len(2 * DIRECTION as u64)?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        Ok((Self::map(&file, [0, DIRECTION])?, file.into(), path.into()))
    }

    /// The client's end.
    pub(super) fn connect(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(path)?;
        Self::map(&file, [DIRECTION, 0])
    }

    fn map(file: &File, [incoming, outgoing]: [usize; 2]) -> io::Result<Self> {
        // Populated, as rings are that have been in use.
        let memory = MmapOptions::new().len(2 * DIRECTION).populate().map_raw(file)?;
        let ring = |at| Ring { at, moved: 0, theirs: 0 };
        Ok(Self { memory, outgoing: ring(outgoing), incoming: ring(incoming) })
    }

    /// Sends all of `bytes`.
    pub(super) fn transmit_all(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let Ring { at, moved, theirs } = self.outgoing;
            let tail = self.await_other(at + TAIL, theirs, |tail| moved - tail < RING as u64);
            let room = RING - usize::try_from(moved - tail).expect("at most a ring");
            let offset = usize::try_from(moved).expect("64 bits") % RING;
            let count = bytes.len().min(room).min(RING - offset).min(PIECE);
            let target = self.memory.as_mut_ptr().wrapping_add(at + WORDS + offset);
            // SAFETY: target lies in the ring, and behind it at least `count` bytes, which the reader leaves alone: they are free.
            unsafe { target.copy_from_nonoverlapping(bytes.as_ptr(), count) };
            bytes = &bytes[count..];
            self.outgoing = Ring { at, moved: moved + count as u64, theirs: tail };
            self.word(at + HEAD).store(self.outgoing.moved, Ordering::Release);
        }
    }

    /// Fills `buffer`; `false` if the other end was closed before its first byte.
    ///
    /// # Errors
    /// It was closed within.
    pub(super) fn receive_all(&mut self, buffer: &mut [u8]) -> io::Result<bool> {
        let mut filled = 0;
        while filled < buffer.len() {
            let Ring { at, moved, theirs } = self.incoming;
            let head = self.await_other(at + HEAD, theirs, |head| {
                head > moved || self.word(at + CLOSED).load(Ordering::Acquire) == head + 1
            });
            if head == moved {
                return if filled == 0 { Ok(false) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            }
            let there = usize::try_from(head - moved).expect("at most a ring");
            let offset = usize::try_from(moved).expect("64 bits") % RING;
            let count = there.min(buffer.len() - filled).min(RING - offset);
            let source = self.memory.as_ptr().wrapping_add(at + WORDS + offset);
            // SAFETY: source lies in the ring, with `count` bytes behind it that the writer has published and not taken back.
            unsafe { buffer[filled..].as_mut_ptr().copy_from_nonoverlapping(source, count) };
            filled += count;
            self.incoming = Ring { at, moved: moved + count as u64, theirs: head };
            self.word(at + TAIL).store(self.incoming.moved, Ordering::Release);
        }
        Ok(true)
    }

    /// Looks at the other end's word, at which `seen` was read before, until it is `enough`. Not at all if that does.
    fn await_other(&self, word: usize, seen: u64, enough: impl Fn(u64) -> bool) -> u64 {
        let mut seen = seen;
        while !enough(seen) {
            let now = self.word(word).load(Ordering::Acquire);
            if now == seen {
                spin_loop();
            }
            seen = now;
        }
        seen
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        let word = self.memory.as_mut_ptr().wrapping_add(at).cast();
        // SAFETY: it lies in the mapping, which lives as long as `self`, is aligned, and is only used as an atomic by both ends.
        unsafe { AtomicU64::from_ptr(word) }
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        // One more than the bytes before the end: a number that is never 0.
        self.word(self.outgoing.at + CLOSED).store(self.outgoing.moved + 1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_every_size_arrive_in_order_and_then_the_end() {
        let (mut server, _memory, path) = Bare::listen().unwrap();
        let mut client = Bare::connect(&path).unwrap();
        let sizes = [1, 64, 65_536, RING + 1, 3 * RING + 7];
        let noise = |size: usize| (0..size).map(|at| (at * 31 % 251) as u8).collect::<Vec<_>>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for size in sizes {
                    client.transmit_all(&noise(size));
                    let mut echo = vec![0; size];
                    assert!(client.receive_all(&mut echo).unwrap());
                    assert!(echo == noise(size), "{size}");
                }
            });
            for size in sizes {
                let mut message = vec![0; size];
                assert!(server.receive_all(&mut message).unwrap());
                server.transmit_all(&message);
            }
            assert!(!server.receive_all(&mut [0]).unwrap());
        });
    }

    #[test]
    fn an_end_within_a_message_is_an_error() {
        let (mut server, _memory, path) = Bare::listen().unwrap();
        let mut client = Bare::connect(&path).unwrap();
        client.transmit_all(b"half");
        drop(client);
        let error = server.receive_all(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}

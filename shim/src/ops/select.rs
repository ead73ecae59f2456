//! select(2) and pselect(2), by way of poll: the sets become a list, and the answers sets again.

use std::time::{Duration, Instant};

use libc::{c_ulong, fd_set, pollfd, sigset_t};
use rustix::io::Errno;
use thallus_transport::buffers::may_be_of_program;

use crate::ops::poll;
use crate::{errno, table};

const BITS: usize = libc::c_long::BITS as usize;
const IN: i16 = libc::POLLIN | libc::POLLRDNORM;
const OUT: i16 = libc::POLLOUT | libc::POLLWRNORM;
/// What the kernel counts as readable, writable, exceptional (fs/select.c).
const READ_ANSWER: i16 = IN | libc::POLLHUP | libc::POLLERR;
const WRITE_ANSWER: i16 = OUT | libc::POLLERR;

/// The three sets of one call, as arrays of words: programs may use more than `FD_SETSIZE` bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sets {
    count: usize,
    sets: [*mut c_ulong; 3],
}

impl Sets {
    /// # Safety
    /// Each set is null or has at least `count` bits.
    pub(crate) unsafe fn new(count: i32, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set) -> Self {
        Self { count: usize::try_from(count).unwrap_or(0), sets: [read.cast(), write.cast(), except.cast()] }
    }

    fn has(&self, set: usize, fd: usize) -> bool {
        let words = self.sets[set];
        if words.is_null() {
            return false;
        }
        // SAFETY: fd < count, so the word is inside the set.
        let word = unsafe { words.add(fd / BITS) };
        // SAFETY: readable.
        let word = unsafe { word.read() };
        word >> (fd % BITS) & 1 != 0
    }

    fn clear(&self) {
        for words in self.sets.into_iter().filter(|words| !words.is_null()) {
            // SAFETY: this many words hold `count` bits.
            unsafe { std::ptr::write_bytes(words, 0, self.count.div_ceil(BITS)) };
        }
    }

    fn put(&self, set: usize, fd: usize) {
        // SAFETY: fd < count, and only sets that had the bit get it back.
        let word = unsafe { self.sets[set].add(fd / BITS) };
        // SAFETY: readable.
        let bits = unsafe { word.read() };
        // SAFETY: writable.
        unsafe { word.write(bits | 1 << (fd % BITS)) };
    }

    /// Whether the kernel alone can't serve a wait on them.
    pub(crate) fn concern_us(&self) -> bool {
        let is_here = |fd| self.has(0, fd) || self.has(1, fd) || self.has(2, fd);
        !self.is_refused() && (0..self.count).any(|fd| table::is_awaited(fd as i32) && is_here(fd))
    }

    /// Whether one is where the program can have nothing.
    fn is_refused(&self) -> bool {
        let is_nowhere = |words: &*mut c_ulong| !may_be_of_program(words.addr(), size_of::<c_ulong>());
        self.sets.iter().any(|words| !words.is_null() && is_nowhere(words))
    }

    fn to_list(self) -> Vec<pollfd> {
        (0..self.count)
            .filter_map(|fd| {
                let mut events = 0;
                for (set, bits) in [(0, IN), (1, OUT), (2, libc::POLLPRI)] {
                    if self.has(set, fd) {
                        events |= bits;
                    }
                }
                (events != 0).then_some(pollfd { fd: fd as i32, events, revents: 0 })
            })
            .collect()
    }

    fn fill_from(&self, list: &[pollfd]) -> i32 {
        self.clear();
        let mut bits = 0;
        for (set, fd) in answers(list) {
            self.put(set, fd as usize);
            bits += 1;
        }
        bits
    }
}

/// What select tells of these: sets, by their number, and descriptors in them.
fn answers(list: &[pollfd]) -> impl Iterator<Item = (usize, i32)> {
    let sets = [(0, IN, READ_ANSWER), (1, OUT, WRITE_ANSWER), (2, libc::POLLPRI, libc::POLLPRI)];
    list.iter().flat_map(move |entry| {
        let told = sets
            .into_iter()
            .filter(|(_, asked, answer)| entry.events & asked != 0 && entry.revents & answer != 0);
        told.map(|(set, ..)| (set, entry.fd))
    })
}

/// As many descriptors of `count` as the kernel would look at if this library had none: it stops at the size of the
/// process's table, and programs that ask for `getdtablesize()` of them count on that, with sets that are no larger
/// than `FD_SETSIZE`.
pub(crate) fn within(count: i32) -> i32 {
    if count <= libc::FD_SETSIZE as i32 || table::is_empty() {
        return count;
    }
    let least = libc::FD_SETSIZE as i32;
    errno::keep(|| table::highest_of_program(least, count)).map_or(least, |highest| highest + 1)
}

/// How often the end of a direction is looked at again which a program waits for that wants to write: there may be room now.
const AGAIN: Duration = Duration::from_millis(10);

/// Waits as pselect(2) does. What poll(2) tells unasked, an end or an error, ends no wait for anything else: who tells it is set aside.
pub(crate) fn wait(sets: Sets, timeout: Option<Duration>, mask: *const sigset_t) -> Result<i32, Errno> {
    let mut list = sets.to_list();
    let mut aside = Vec::new();
    let deadline = timeout.and_then(|limit| Instant::now().checked_add(limit));
    let mut limit = timeout;
    loop {
        poll::wait(&mut list, limit, mask)?;
        if list.iter().any(|entry| entry.revents & libc::POLLNVAL != 0) {
            return Err(Errno::BADF);
        }
        // The sets stay as they are as long as the call may fail.
        if answers(&list).next().is_some() {
            return Ok(sets.fill_from(&list));
        }
        let (told, silent): (Vec<_>, Vec<_>) = list.into_iter().partition(|entry| entry.revents != 0);
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if told.is_empty() && aside.is_empty() || left == Some(Duration::ZERO) {
            return Ok(sets.fill_from(&[]));
        }
        list = silent;
        if told.is_empty() {
            list.append(&mut aside);
        }
        aside.extend(told.into_iter().filter(|entry| entry.events & OUT != 0));
        limit = if aside.is_empty() { left } else { Some(left.map_or(AGAIN, |left| left.min(AGAIN))) };
    }
}

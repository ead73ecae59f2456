//! The application's buffers, walked piece by piece. Pointers stay raw: the application may
//! change the bytes at any time.

use rustix::io::Errno;

/// Most bytes in one call (read(2): `0x7ffff000`).
pub const MOST_BYTES: usize = 0x7fff_f000;
/// No memory of a program's is so long that has not asked for addresses above these (x86-64 with four-level paging, AArch64 with 48
/// bits of an address).
pub const TOO_LONG: usize = if cfg!(target_arch = "aarch64") { 1 << 48 } else { 1 << 47 };
/// Nothing is mapped below, so that a null pointer with an offset is caught too.
const LOWEST: usize = 4096;
/// End of user addresses (x86-64 with five-level paging; above it only the kernel lives. On AArch64 what is above is a tag, which
/// [`address`] takes away).
const HIGHEST: usize = 1 << 56;

/// Whether the application's memory may have `length` bytes at the address `start`.
#[inline]
pub fn may_be_of_program(start: usize, length: usize) -> bool {
    let start = address(start);
    start >= LOWEST && start <= HIGHEST - length.min(HIGHEST)
}

/// Where a pointer leads to: AArch64 ignores its highest byte, in which HWASan and MTE keep a tag. The kernel does so for programs that
/// ask for it (`PR_SET_TAGGED_ADDR_CTRL`); for others it says `EFAULT`, which this does not. A kernel's address has the bits below set, too.
const fn address(pointer: usize) -> usize {
    let of_kernel = pointer >> 55 & 1 != 0;
    if cfg!(target_arch = "aarch64") && !of_kernel { pointer & (HIGHEST - 1) } else { pointer }
}

/// A cursor over a list of `iovec`s.
#[derive(Debug)]
pub struct Buffers<'a> {
    list: &'a [libc::iovec],
    within: usize,
    left: usize,
    control: Option<&'a mut ControlData>,
    has_waited: bool,
    has_some: bool,
}

/// Where recvmsg(2) puts what comes beside the bytes, and what it has put there.
#[derive(Debug)]
pub struct ControlData {
    /// The application's buffer.
    pub buffer: *mut libc::c_void,
    /// Its bytes.
    pub room: usize,
    /// Bytes in use.
    pub length: usize,
    /// `msg_flags`, as the kernel has set them.
    pub flags: i32,
    /// What is there is not that of the bytes which follow.
    ends: bool,
}

impl ControlData {
    /// Nowhere: of what comes only that it came is to be known.
    pub const fn none() -> Self {
        Self::new(std::ptr::null_mut(), 0)
    }

    /// In `room` bytes at `buffer`, if that is not null.
    pub const fn new(buffer: *mut libc::c_void, room: usize) -> Self {
        let room = if buffer.is_null() { 0 } else { room };
        Self { buffer, room, length: 0, flags: 0, ends: false }
    }

    /// Whether the bytes that follow must not be added: descriptors are among what has come (`SCM_RIGHTS`), or it names another sender.
    fn is_complete(&self) -> bool {
        if self.ends {
            return true;
        }
        let mut at = 0;
        while self.length.saturating_sub(at) >= size_of::<libc::cmsghdr>() {
            let header = self.buffer.cast::<u8>().wrapping_add(at).cast::<libc::cmsghdr>();
            // SAFETY: the kernel has put a header there.
            let header = unsafe { header.read_unaligned() };
            if (header.cmsg_level, header.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                return true;
            }
            // Other threads may change what is there.
            at += header.cmsg_len.clamp(size_of::<libc::cmsghdr>(), self.length).next_multiple_of(8);
        }
        false
    }

    /// Names the sender of bytes that were sent when nobody had asked who sends them, as the kernel does (`scm_recv` of
    /// net/core/scm.c): process 0 of the user and group that stand for those that are not known.
    pub(crate) fn name_nobody(&mut self) {
        const UNKNOWN: u32 = 65534;
        #[repr(C)]
        struct Credentials {
            header: libc::cmsghdr,
            sender: libc::ucred,
        }
        const LENGTH: usize = std::mem::offset_of!(Credentials, sender) + size_of::<libc::ucred>();
        self.ends = true;
        let room = self.room - self.length;
        let length = LENGTH.min(room);
        if length < LENGTH {
            self.flags |= libc::MSG_CTRUNC;
        }
        if room < size_of::<libc::cmsghdr>() {
            return;
        }
        let header = libc::cmsghdr {
            cmsg_len: length,
            cmsg_level: libc::SOL_SOCKET,
            cmsg_type: libc::SCM_CREDENTIALS,
        };
        let message = Credentials { header, sender: libc::ucred { pid: 0, uid: UNKNOWN, gid: UNKNOWN } };
        let target = self.buffer.cast::<u8>().wrapping_add(self.length);
        // SAFETY: the application's buffer has `room` bytes there.
        unsafe { std::ptr::copy_nonoverlapping((&raw const message).cast(), target, length) };
        self.length += size_of::<Credentials>().min(room);
    }
}

impl<'a> Buffers<'a> {
    /// Most buffers in one call (readv(2), `IOV_MAX`).
    pub const MOST: usize = 1024;

    /// Checks the list as the kernel does: `EINVAL` for too many buffers or bytes, `EFAULT` for pointers
    /// that can't be the application's.
    pub fn new(list: &'a [libc::iovec]) -> Result<Self, Errno> {
        Self::checked(list, LOWEST)
    }

    /// As [`Self::new`], of buffers that nothing will be written to: they may be null.
    pub fn untouched(list: &'a [libc::iovec]) -> Result<Self, Errno> {
        Self::checked(list, 0)
    }

    fn checked(list: &'a [libc::iovec], lowest: usize) -> Result<Self, Errno> {
        if list.len() > Self::MOST {
            return Err(Errno::INVAL);
        }
        // A single one is cut before the kernel looks where it ends, one of several afterwards (`import_ubuf` and `__import_iovec`
        // of lib/iov_iter.c).
        let most = if list.len() == 1 { MOST_BYTES } else { usize::MAX };
        let (mut left, mut is_bad) = (0usize, false);
        for buffer in list {
            if buffer.iov_len > isize::MAX as usize {
                return Err(Errno::INVAL);
            }
            let length = buffer.iov_len.min(most);
            let start = address(buffer.iov_base.addr());
            let lowest = if length == 0 { 0 } else { lowest };
            is_bad |= start < lowest || length >= TOO_LONG || start > HIGHEST - length;
            left = left.saturating_add(length);
        }
        if is_bad {
            return Err(Errno::FAULT);
        }
        let mut buffers = Self {
            list,
            within: 0,
            left: left.min(MOST_BYTES),
            control: None,
            has_waited: false,
            has_some: false,
        };
        buffers.skip_empty();
        Ok(buffers)
    }

    /// With a place for what comes beside the bytes on `AF_UNIX`.
    pub fn with_control(self, control: &'a mut ControlData) -> Self {
        Self { control: Some(control), ..self }
    }

    /// Of a call that takes them in pieces: notes that it has moved some before, so that any signal ends it, and a read before urgent data.
    pub fn note_some(&mut self) {
        self.has_some = true;
    }

    /// Whether [`Self::note_some`] has been called.
    pub(crate) fn has_some(&self) -> bool {
        self.has_some
    }

    /// Notes that the call has waited for room.
    pub(crate) fn note_wait(&mut self) {
        self.has_waited = true;
    }

    /// Whether the call has waited for room.
    pub fn has_waited(&self) -> bool {
        self.has_waited
    }

    /// That place.
    pub(crate) fn control(&mut self) -> Option<&mut ControlData> {
        self.control.as_deref_mut()
    }

    /// Whether something has come there.
    pub(crate) fn has_control(&self) -> bool {
        self.control
            .as_ref()
            .is_some_and(|control| control.length > 0 || control.flags & libc::MSG_CTRUNC != 0)
    }

    /// Whether something has come there that belongs to no more bytes than these.
    pub(crate) fn has_all_control(&self) -> bool {
        self.control.as_ref().is_some_and(|control| control.is_complete())
    }

    fn skip_empty(&mut self) {
        while self.list.first().is_some_and(|buffer| self.within == buffer.iov_len) {
            self.list = &self.list[1..];
            self.within = 0;
        }
    }

    /// Bytes left.
    pub fn left(&self) -> usize {
        self.left
    }

    /// The next piece: where it is and how long. Length 0 at the end.
    pub fn piece(&self) -> (*mut u8, usize) {
        match self.list.first() {
            Some(buffer) => (
                buffer.iov_base.cast::<u8>().wrapping_add(self.within),
                (buffer.iov_len - self.within).min(self.left),
            ),
            None => (std::ptr::null_mut(), 0),
        }
    }

    /// Moves on by `count` bytes, at most the length of the current piece.
    pub fn advance(&mut self, count: usize) {
        self.within += count;
        self.left -= count;
        self.skip_empty();
    }

    /// Moves on by `count` bytes, over as many pieces as that takes.
    pub fn advance_over(&mut self, mut count: usize) {
        while count > 0 {
            let step = self.piece().1.min(count);
            if step == 0 {
                break;
            }
            self.advance(step);
            count -= step;
        }
    }

    /// Copies `count` bytes from `source`, at most as many as are left, over as many pieces as that takes, and moves on.
    ///
    /// # Safety
    /// They are readable.
    pub(crate) unsafe fn put(&mut self, mut source: *const u8, count: usize) {
        let stop = source.wrapping_add(count);
        while source < stop {
            let (piece, length) = self.piece();
            let step = length.min(stop.addr() - source.addr());
            // SAFETY: the caller vouches for these, the application for its buffer.
            unsafe { std::ptr::copy_nonoverlapping(source, piece, step) };
            self.advance(step);
            source = source.wrapping_add(step);
        }
    }

    /// Copies the next bytes, over as many pieces as that takes; returns how many.
    pub fn gather(&self, out: &mut [u8]) -> usize {
        let (mut skip, mut count) = (self.within, 0);
        let most = out.len().min(self.left);
        for buffer in self.list {
            let length = (buffer.iov_len - skip).min(most - count);
            let source = buffer.iov_base.wrapping_byte_add(skip).cast::<u8>();
            let target = out[count..].as_mut_ptr();
            // SAFETY: the application vouches for its buffer; `out` has room for `length` bytes from `count` on.
            unsafe { std::ptr::copy_nonoverlapping(source, target, length) };
            count += length;
            skip = 0;
        }
        count
    }

    /// The next pieces as `iovec`s of at most `limit` bytes in all, written to `out`; returns how many.
    pub fn window(&self, limit: u64, out: &mut [libc::iovec; 16]) -> usize {
        let mut room = usize::try_from(limit).unwrap_or(usize::MAX).min(self.left);
        let mut skip = self.within;
        let mut count = 0;
        for buffer in self.list {
            if count == out.len() || room == 0 {
                break;
            }
            let length = (buffer.iov_len - skip).min(room);
            out[count] = libc::iovec { iov_base: buffer.iov_base.wrapping_byte_add(skip), iov_len: length };
            count += usize::from(length > 0);
            room -= length;
            skip = 0;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn iovec(bytes: &mut [u8]) -> libc::iovec {
        libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
    }

    #[test]
    fn pieces_cover_every_byte_once_and_skip_empty_ones() {
        let (mut a, mut b, mut c) = ([1u8, 2, 3], [0u8; 0], [4u8, 5, 6, 7, 8]);
        let list = [iovec(&mut a), iovec(&mut b), iovec(&mut c)];
        let mut buffers = Buffers::new(&list).unwrap();
        assert_eq!(buffers.left(), 8);
        buffers.advance(2);
        assert_eq!(buffers.piece(), (a.as_mut_ptr().wrapping_add(2), 1));
        let mut out = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 16];
        assert_eq!(buffers.window(4, &mut out), 2);
        assert_eq!((out[0].iov_len, out[1].iov_len), (1, 3));
        let mut together = [0u8; 4];
        assert_eq!((buffers.gather(&mut together), together), (4, [3, 4, 5, 6]));
        buffers.advance_over(4);
        assert_eq!(buffers.piece(), (c.as_mut_ptr().wrapping_add(3), 2));
        buffers.advance(2);
        assert_eq!(buffers.piece().1, 0);
    }

    #[test]
    fn bad_pointers_and_lengths_are_named_as_the_kernel_does() {
        let null = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 1 };
        assert_eq!(Buffers::new(&[null]).unwrap_err(), Errno::FAULT);
        let kernel = libc::iovec { iov_base: std::ptr::without_provenance_mut(usize::MAX - 10), iov_len: 5 };
        assert_eq!(Buffers::new(&[kernel]).unwrap_err(), Errno::FAULT);
        let huge = libc::iovec { iov_base: std::ptr::without_provenance_mut(8192), iov_len: usize::MAX };
        assert_eq!(Buffers::new(&[huge]).unwrap_err(), Errno::INVAL);
        assert_eq!(Buffers::new(&[null, huge]).unwrap_err(), Errno::INVAL);
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        assert_eq!(Buffers::new(&[empty]).unwrap().left(), 0);
        let nowhere = libc::iovec { iov_base: std::ptr::without_provenance_mut(usize::MAX), iov_len: 0 };
        assert_eq!(Buffers::new(&[nowhere]).unwrap_err(), Errno::FAULT);
    }

    #[test]
    fn a_single_buffer_is_cut_before_it_is_looked_at() {
        let long =
            libc::iovec { iov_base: std::ptr::without_provenance_mut(8192), iov_len: isize::MAX as usize };
        let list = [long];
        let mut buffers = Buffers::new(&list).unwrap();
        assert_eq!((buffers.left(), buffers.piece().1), (MOST_BYTES, MOST_BYTES));
        buffers.advance(MOST_BYTES);
        assert_eq!((buffers.left(), buffers.piece().1), (0, 0));
        assert_eq!(Buffers::new(&[long, long]).unwrap_err(), Errno::FAULT);
    }

    #[test]
    fn what_stays_untouched_may_be_null() {
        let null = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 5 };
        let list = [null];
        let mut buffers = Buffers::untouched(&list).unwrap();
        buffers.advance_over(3);
        assert_eq!(buffers.left(), 2);
        let kernel = libc::iovec { iov_base: std::ptr::without_provenance_mut(usize::MAX - 10), iov_len: 5 };
        assert_eq!(Buffers::untouched(&[kernel]).unwrap_err(), Errno::FAULT);
    }
}

//! `thallus.h` for Rust: what a program that knows of Thallus can ask of it.
//!
//! Nothing is linked: [`Thallus::find`] looks for the functions in the running process, where they are if the program was
//! started with `libthallus_shim.so`. Without it the program does what it would do over TCP.

pub mod raw;

use std::ffi::CStr;
use std::io::{self, IoSliceMut};
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::OnceLock;

pub use raw::Handle;

/// The library in this process.
#[derive(Debug)]
pub struct Thallus {
    status: raw::StatusFn,
    allocate: raw::AllocateFn,
    lend: raw::LendFn,
    loans: raw::LoansFn,
    free: raw::FreeFn,
    borrow: raw::BorrowFn,
    give_back: raw::ReturnFn,
    pull: raw::PullFn,
    trim: raw::TrimFn,
}

/// What carries the bytes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fabric {
    Tcp,
    SharedMemory,
    Verbs,
    /// One that this version does not know.
    Other(u32),
}

/// The status of a connection. Bytes are the application's.
#[derive(Clone, Debug)]
pub struct Status {
    pub fabric: Fabric,
    /// [`Thallus::allocate`] may succeed, as far as can be told without trying.
    pub can_lend: bool,
    /// The peer was a process of the same user when they met: [`Thallus::borrow`] may succeed.
    pub trusted: bool,
    /// It had left TCP, and went back.
    pub returned: bool,
    pub ring_bytes_sent: u64,
    pub ring_bytes_received: u64,
    pub tcp_bytes_sent: u64,
    pub tcp_bytes_received: u64,
    /// Of this end's memory: allocated, or freed and not yet given back.
    pub lent_bytes: u64,
    /// Of this end's memory: kept for the next allocation.
    pub spare_bytes: u64,
    /// Why it is on TCP; empty otherwise.
    pub reason: String,
}

impl Thallus {
    /// The library, if the program was started with it.
    pub fn find() -> Option<&'static Self> {
        static FOUND: OnceLock<Option<Thallus>> = OnceLock::new();
        FOUND.get_or_init(Self::look).as_ref()
    }

    fn look() -> Option<Self> {
        let itself = libloading::os::unix::Library::this();
        /// # Safety
        /// `T` is the type of the function.
        unsafe fn function<T: Copy>(library: &libloading::os::unix::Library, name: &CStr) -> Option<T> {
            // SAFETY: the caller's promise.
            unsafe { library.get::<T>(name.to_bytes_with_nul()) }.ok().map(|symbol| *symbol)
        }
        // SAFETY: these names are Thallus' own, and this is the type that thallus.h gives it.
        let api = unsafe { function::<raw::ApiFn>(&itself, c"thallus_api") }?;
        // SAFETY: it takes nothing.
        if unsafe { api() } < raw::API {
            return None;
        }
        Some(Self {
            // SAFETY: as above, here and below.
            status: unsafe { function(&itself, c"thallus_status") }?,
            // SAFETY: as above.
            allocate: unsafe { function(&itself, c"thallus_allocate") }?,
            // SAFETY: as above.
            lend: unsafe { function(&itself, c"thallus_lend") }?,
            // SAFETY: as above.
            loans: unsafe { function(&itself, c"thallus_loans") }?,
            // SAFETY: as above.
            free: unsafe { function(&itself, c"thallus_free") }?,
            // SAFETY: as above.
            borrow: unsafe { function(&itself, c"thallus_borrow") }?,
            // SAFETY: as above.
            give_back: unsafe { function(&itself, c"thallus_return") }?,
            // SAFETY: as above.
            pull: unsafe { function(&itself, c"thallus_pull") }?,
            // SAFETY: as above.
            trim: unsafe { function(&itself, c"thallus_trim") }?,
        })
    }

    /// The status of a connection. Also enters what the peer has given back.
    ///
    /// # Errors
    /// `ENOTCONN` if it is no connection that the library knows.
    pub fn status(&self, fd: impl AsFd) -> io::Result<Status> {
        let mut status = raw::Status { size: size_of::<raw::Status>() as u32, ..raw::Status::default() };
        // SAFETY: the status is writable, and says how long it is.
        if unsafe { (self.status)(fd.as_fd().as_raw_fd(), &raw mut status) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let reason = status.reason.map(|character| character.to_ne_bytes()[0]);
        let reason = CStr::from_bytes_until_nul(&reason).unwrap_or_default();
        Ok(Status {
            fabric: match status.fabric {
                raw::TCP => Fabric::Tcp,
                raw::SHM => Fabric::SharedMemory,
                raw::VERBS => Fabric::Verbs,
                other => Fabric::Other(other),
            },
            can_lend: status.flags & raw::CAN_LEND != 0,
            trusted: status.flags & raw::TRUSTED != 0,
            returned: status.flags & raw::RETURNED != 0,
            ring_bytes_sent: status.ring_bytes_sent,
            ring_bytes_received: status.ring_bytes_received,
            tcp_bytes_sent: status.tcp_bytes_sent,
            tcp_bytes_received: status.tcp_bytes_received,
            lent_bytes: status.lent_bytes,
            spare_bytes: status.spare_bytes,
            reason: reason.to_string_lossy().into_owned(),
        })
    }

    /// Allocates memory that can be lent to the peer of `fd`. What it holds at first is undefined.
    ///
    /// # Errors
    /// `EOPNOTSUPP` if the connection is not over shared memory; `ENOBUFS` if as much is not free; others in `thallus.h`.
    pub fn allocate(&'static self, fd: impl AsFd, bytes: usize) -> io::Result<Memory> {
        let mut address = std::ptr::null_mut();
        // SAFETY: the address is writable.
        let memory = unsafe { (self.allocate)(fd.as_fd().as_raw_fd(), bytes, &raw mut address) };
        match (NonNull::new(memory), NonNull::new(address.cast())) {
            (Some(memory), Some(address)) => Ok(Memory { thallus: self, memory, address, bytes }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Takes a loan of the peer of `fd`, to be read in place.
    ///
    /// # Errors
    /// `EPERM` if the peer is not trusted; `EINVAL` if there is no such loan, or it has been taken; others in `thallus.h`.
    ///
    /// # Safety
    /// The peer does not change the memory while it is lent. The library asks no more of a peer than that it was a process of
    /// the same user.
    pub unsafe fn borrow(&'static self, fd: impl AsFd, handle: &Handle) -> io::Result<Loan> {
        let (mut address, mut bytes) = (std::ptr::null(), 0);
        // SAFETY: all three can be read or written.
        let loan = unsafe {
            (self.borrow)(fd.as_fd().as_raw_fd(), &raw const *handle, &raw mut address, &raw mut bytes)
        };
        match (NonNull::new(loan), NonNull::new(address.cast_mut().cast())) {
            (Some(loan), Some(address)) => Ok(Loan { thallus: self, loan, address, bytes }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Takes a loan of the peer of `fd`, copies it to `target`, and gives it back. Returns its bytes. Without buffers it goes
    /// back unread.
    ///
    /// # Errors
    /// `EMSGSIZE` if it does not fit: then it is not taken; `EINVAL` if there is no such loan, or it has been taken; others
    /// in `thallus.h`.
    pub fn pull(&self, fd: impl AsFd, handle: &Handle, target: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let count = i32::try_from(target.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: an IoSliceMut is an iovec of writable memory.
        let pulled =
            unsafe { (self.pull)(fd.as_fd().as_raw_fd(), &raw const *handle, target.as_ptr().cast(), count) };
        usize::try_from(pulled).map_err(|_| io::Error::last_os_error())
    }
}

impl Thallus {
    /// Gives memory of this end that is kept for later allocations back to the system.
    ///
    /// # Errors
    /// `EOPNOTSUPP` if the connection never was over shared memory; `ENOTCONN` if it is none that the library knows.
    pub fn trim(&self, fd: impl AsFd) -> io::Result<()> {
        // SAFETY: it takes a number.
        let result = unsafe { (self.trim)(fd.as_fd().as_raw_fd()) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Memory of this end. Dropped, it is free once all loans are back.
#[derive(Debug)]
pub struct Memory {
    thallus: &'static Thallus,
    memory: NonNull<raw::Memory>,
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the library's functions may be called by any thread.
unsafe impl Send for Memory {}
// SAFETY: as above; bytes are only copied, by `&mut self`.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated, and not freed before.
        unsafe { (self.thallus.free)(self.memory.as_ptr()) };
    }
}

impl Memory {
    /// Where it begins: on a page. The peer can read and write it.
    pub fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies `source` to `offset`.
    ///
    /// # Panics
    /// If it does not fit.
    pub fn write_at(&mut self, offset: usize, source: &[u8]) {
        assert!(offset.checked_add(source.len()).is_some_and(|end| end <= self.bytes), "it fits");
        // SAFETY: inside the memory.
        let target = unsafe { self.address.add(offset) };
        // SAFETY: as above; safe code has no reference into it that `source` could be.
        unsafe { target.copy_from_nonoverlapping(NonNull::from(source).cast(), source.len()) };
    }

    /// Lends `bytes` from `offset` on to the peer.
    ///
    /// # Errors
    /// `ENOBUFS` if 1,024 loans of the connection are out; `EINVAL` for what is not inside; `EBUSY` in a fork.
    pub fn lend(&self, offset: usize, bytes: usize) -> io::Result<Handle> {
        let mut handle = Handle { bytes: [0; 32] };
        // SAFETY: the memory is allocated, the handle writable.
        let result = unsafe { (self.thallus.lend)(self.memory.as_ptr(), offset, bytes, &raw mut handle) };
        if result == 0 { Ok(handle) } else { Err(io::Error::last_os_error()) }
    }

    /// Loans that are not back yet. What the peer never takes does not come back, nor what it had when it was killed: who waits for 0
    /// must watch the connection, too, and drop this when that has ended.
    pub fn loans(&self) -> usize {
        // SAFETY: the memory is allocated.
        unsafe { (self.thallus.loans)(self.memory.as_ptr()) }.try_into().unwrap_or(0)
    }
}

/// Memory of the peer's. Dropped, it goes back.
#[derive(Debug)]
pub struct Loan {
    thallus: &'static Thallus,
    loan: NonNull<raw::Loan>,
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the library's functions may be called by any thread.
unsafe impl Send for Loan {}
// SAFETY: nothing but reading is possible.
unsafe impl Sync for Loan {}

impl Drop for Loan {
    fn drop(&mut self) {
        // SAFETY: borrowed, and not given back before.
        unsafe { (self.thallus.give_back)(self.loan.as_ptr()) };
    }
}

impl Deref for Loan {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped until it is given back; nobody changes it, as whoever borrowed has promised.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_library_there_is_none() {
        assert!(Thallus::find().is_none());
    }
}

//! The types of `thallus.h`, which says what they mean.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `THALLUS_API`.
pub const API: c_uint = 1;

/// `THALLUS_TCP`.
pub const TCP: u32 = 0;
/// `THALLUS_SHM`.
pub const SHM: u32 = 1;
/// `THALLUS_VERBS`.
pub const VERBS: u32 = 2;

/// `THALLUS_CAN_LEND`.
pub const CAN_LEND: u32 = 1;
/// `THALLUS_TRUSTED`.
pub const TRUSTED: u32 = 2;
/// `THALLUS_RETURNED`.
pub const RETURNED: u32 = 4;

/// `struct thallus_status`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Status {
    /// Bytes of this, as the caller knows it; then as much as has been filled in.
    pub size: u32,
    pub fabric: u32,
    pub flags: u32,
    pub reserved: u32,
    pub ring_bytes_sent: u64,
    pub ring_bytes_received: u64,
    pub tcp_bytes_sent: u64,
    pub tcp_bytes_received: u64,
    pub lent_bytes: u64,
    pub spare_bytes: u64,
    pub reason: [c_char; 32],
}

/// `struct thallus_handle`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Handle {
    pub bytes: [u8; 32],
}

/// `struct thallus_memory`.
#[derive(Debug)]
#[repr(C)]
pub struct Memory {
    _opaque: [u8; 0],
}

/// `struct thallus_loan`.
#[derive(Debug)]
#[repr(C)]
pub struct Loan {
    _opaque: [u8; 0],
}

pub type ApiFn = unsafe extern "C" fn() -> c_uint;
pub type StatusFn = unsafe extern "C" fn(c_int, *mut Status) -> c_int;
pub type AllocateFn = unsafe extern "C" fn(c_int, usize, *mut *mut c_void) -> *mut Memory;
pub type LendFn = unsafe extern "C" fn(*mut Memory, usize, usize, *mut Handle) -> c_int;
pub type LoansFn = unsafe extern "C" fn(*mut Memory) -> c_int;
pub type FreeFn = unsafe extern "C" fn(*mut Memory);
pub type BorrowFn = unsafe extern "C" fn(c_int, *const Handle, *mut *const c_void, *mut usize) -> *mut Loan;
pub type ReturnFn = unsafe extern "C" fn(*mut Loan);
pub type PullFn = unsafe extern "C" fn(c_int, *const Handle, *const libc::iovec, c_int) -> isize;
pub type TrimFn = unsafe extern "C" fn(c_int) -> c_int;

// As thallus.h has them; tests/tests/applications/lending.c asserts the same there.
const _: () = assert!(size_of::<Status>() == 96 && std::mem::offset_of!(Status, ring_bytes_sent) == 16);
const _: () =
    assert!(std::mem::offset_of!(Status, spare_bytes) == 56 && std::mem::offset_of!(Status, reason) == 64);
const _: () = assert!(size_of::<Handle>() == 32 && align_of::<Handle>() == 1);

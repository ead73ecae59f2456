//! dlopen, dlmopen.
//!
//! What they look along, and which list of modules they add to, depends on who calls them, which libc tells by the return
//! address. So the entry points are in assembly (see [`super::variadic`]), and jump there.

use std::arch::naked_asm;
use std::ffi::CStr;
use std::panic::{AssertUnwindSafe, catch_unwind};

use libc::{Lmid_t, RTLD_DEEPBIND, c_char, c_int, c_void};

use crate::ops::load;
use crate::real;

/// dlopen(3).
///
/// # Safety
/// As for dlopen(3).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {before}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        before = sym before_dlopen,
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        "stp x29, x30, [sp, #-32]!",
        "stp x0, x1, [sp, #16]",
        "bl {before}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "br x16",
        before = sym before_dlopen,
    );
}

/// dlmopen(3).
///
/// # Safety
/// As for dlmopen(3).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlmopen(space: Lmid_t, file: *const c_char, flags: c_int) -> *mut c_void {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "call {before}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        before = sym before_dlmopen,
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        "stp x29, x30, [sp, #-48]!",
        "stp x0, x1, [sp, #16]",
        "str x2, [sp, #32]",
        "bl {before}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldr x2, [sp, #32]",
        "ldp x29, x30, [sp], #48",
        "br x16",
        before = sym before_dlmopen,
    );
}

/// Gives back libc's own, never null.
///
/// # Safety
/// As for dlopen(3).
unsafe extern "C" fn before_dlopen(file: *const c_char, flags: c_int) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { before(file, flags) };
    real::dlopen()
}

/// Gives back libc's own, never null. Another space than the first has a libc of its own.
///
/// # Safety
/// As for dlmopen(3).
unsafe extern "C" fn before_dlmopen(space: Lmid_t, file: *const c_char, flags: c_int) -> *mut c_void {
    if space == libc::LM_ID_BASE {
        // SAFETY: the caller's promise.
        unsafe { before(file, flags) };
    } else {
        real::resolve_all();
    }
    real::dlmopen()
}

/// Not by [`super::guard`], which is for cancellation points.
///
/// # Safety
/// As for dlopen(3).
unsafe fn before(file: *const c_char, flags: c_int) {
    real::resolve_all();
    // SAFETY: the caller's promise.
    let name = if file.is_null() { c"" } else { unsafe { CStr::from_ptr(file) } };
    if flags & RTLD_DEEPBIND != 0 || load::is_libc(name) {
        // What it says is in the log.
        let _ = catch_unwind(AssertUnwindSafe(load::before_passing_by));
    }
}

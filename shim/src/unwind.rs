//! The unwinder, looked up when a panic or a cancelled thread first needs it.
//!
//! std takes it from libgcc_s. As a library that ours needs, that would be loaded into every program that is started, at more
//! than half of what preloading costs. glibc does as is done here: it opens libgcc_s when a thread is cancelled. The copy
//! that a static libgcc has would not do: a cancelled thread is unwound by the real one, whose contexts only it can read.
//!
//! The functions go by the names that std asks for, hidden from everybody else. Each only jumps, so that it has no frame.

use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

macro_rules! forward {
    ($($index:literal $name:literal,)*) => {
        const NAMES: &[&CStr] = &[$(
            match CStr::from_bytes_with_nul(concat!($name, "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => unreachable!(),
            },
        )*];

        static FUNCTIONS: [AtomicPtr<libc::c_void>; NAMES.len()] =
            [const { AtomicPtr::new(std::ptr::null_mut()) }; NAMES.len()];

        #[cfg(target_arch = "x86_64")]
        std::arch::global_asm!(
            $(
                concat!(".globl ", $name),
                concat!(".hidden ", $name),
                concat!(".type ", $name, ", @function"),
                concat!($name, ":"),
                concat!("mov rax, [rip + {functions} + 8 * ", $index, "]"),
                "test rax, rax",
                "jz 2f",
                "jmp rax",
                // The arguments, and what keeps the stack aligned.
                "2: push rdi",
                "push rsi",
                "push rdx",
                "push rcx",
                "sub rsp, 8",
                "call {find}",
                "add rsp, 8",
                "pop rcx",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                concat!("jmp [rip + {functions} + 8 * ", $index, "]"),
                concat!(".size ", $name, ", . - ", $name),
            )*
            functions = sym FUNCTIONS,
            find = sym find,
        );

        #[cfg(target_arch = "aarch64")]
        std::arch::global_asm!(
            $(
                concat!(".globl ", $name),
                concat!(".hidden ", $name),
                concat!(".type ", $name, ", %function"),
                concat!($name, ":"),
                concat!("adrp x16, {functions} + 8 * ", $index),
                concat!("ldr x16, [x16, :lo12:{functions} + 8 * ", $index, "]"),
                "cbz x16, 2f",
                "br x16",
                // The arguments, and where to return to.
                "2: stp x29, x30, [sp, #-48]!",
                "stp x0, x1, [sp, #16]",
                "stp x2, x3, [sp, #32]",
                "bl {find}",
                "ldp x0, x1, [sp, #16]",
                "ldp x2, x3, [sp, #32]",
                "ldp x29, x30, [sp], #48",
                concat!("b ", $name),
                concat!(".size ", $name, ", . - ", $name),
            )*
            functions = sym FUNCTIONS,
            find = sym find,
        );
    };
}

forward! {
    0 "_Unwind_Backtrace",
    1 "_Unwind_DeleteException",
    2 "_Unwind_GetDataRelBase",
    3 "_Unwind_GetIP",
    4 "_Unwind_GetIPInfo",
    5 "_Unwind_GetLanguageSpecificData",
    6 "_Unwind_GetRegionStart",
    7 "_Unwind_GetTextRelBase",
    8 "_Unwind_RaiseException",
    9 "_Unwind_Resume",
    10 "_Unwind_SetGR",
    11 "_Unwind_SetIP",
}

/// Looks all of them up. Without libgcc_s nobody can unwind, and the process ends, as glibc ends one whose thread is to be
/// cancelled.
extern "C" fn find() {
    // SAFETY: a name with a zero at its end.
    let library = unsafe { libc::dlopen(c"libgcc_s.so.1".as_ptr(), libc::RTLD_NOW) };
    for (function, name) in FUNCTIONS.iter().zip(NAMES) {
        // SAFETY: a name with a zero at its end, and a library that was opened, or none.
        let found = if library.is_null() { library } else { unsafe { libc::dlsym(library, name.as_ptr()) } };
        if found.is_null() {
            std::process::abort();
        }
        function.store(found, Ordering::Release);
    }
}

/// Whether that has happened.
#[cfg(test)]
#[allow(dead_code, reason = "tests/tests/unwinding.rs asks, which has this file for a module")]
pub(crate) fn is_found() -> bool {
    FUNCTIONS.iter().all(|function| !function.load(Ordering::Acquire).is_null())
}

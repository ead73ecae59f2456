//! execl and dprintf: functions that C gives any number of arguments.
//!
//! Rust can't define one, so the entry points are in assembly, for x86-64 (System V Application Binary Interface, AMD64
//! supplement, sections 3.2.3 and 3.5.7) and AArch64 (Procedure Call Standard for the Arm 64-bit Architecture, 6.8 and
//! appendix B). They make of the arguments what the functions with a list take, `execv` and `vdprintf`, and go there.

use std::arch::naked_asm;

use libc::{c_char, c_int, c_void};

use super::cancellable;
use super::process::{Strings, execv, execve, execvp};
use crate::ops::stream::{self, one};
use crate::{errno, real, table};

/// What C calls `va_list` where it is handed on: the address of what it is kept in.
type Arguments = *mut c_void;

/// An entry point of a function like execl(3). Those of its arguments that came in registers are put in front of those on the
/// stack, which makes a list of them, and `list(path, arguments)` is called. The return address is above it meanwhile.
macro_rules! takes_strings {
    ($($name:ident => $list:path;)*) => {$(
        /// The function of that name in exec(3).
        ///
        /// # Safety
        /// As for that function.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char) -> c_int {
            #[cfg(target_arch = "x86_64")]
            naked_asm!(
                "pop rax",
                "push r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                "mov rsi, rsp",
                "push rax",
                "call {list}",
                "pop rdx",
                "add rsp, 40",
                "push rdx",
                "ret",
                list = sym $list,
            );
            #[cfg(target_arch = "aarch64")]
            naked_asm!(
                "stp x30, x1, [sp, #-64]!",
                "stp x2, x3, [sp, #16]",
                "stp x4, x5, [sp, #32]",
                "stp x6, x7, [sp, #48]",
                "add x1, sp, #8",
                "bl {list}",
                "ldr x30, [sp], #64",
                "ret",
                list = sym $list,
            );
        }
    )*};
}

takes_strings! {
    execl => execv;
    execlp => execvp;
    execle => execute_with_environment;
}

/// execle(3): the environment follows the null that ends the arguments.
///
/// # Safety
/// `list` has both.
unsafe extern "C" fn execute_with_environment(path: *const c_char, list: Strings) -> c_int {
    let mut end = list;
    // SAFETY: the caller's promise: a null comes, with the environment behind it.
    unsafe {
        while !(*end).is_null() {
            end = end.add(1);
        }
        execve(path, list, (*end.add(1)).cast())
    }
}

/// An entry point of a function like dprintf(3) with `named` words before its other arguments, and the register that the
/// list of these goes to, on either processor. It is made on the stack: how many bytes of each kind of register are used up, or left,
/// where on the stack arguments go on, and the registers themselves.
macro_rules! takes_arguments {
    ($($name:ident($($arg:ident: $type:ty),*) => $list:path, $named:literal, $x86:literal, $arm:literal;)*) => {$(
        /// The function of that name in libc.
        ///
        /// # Safety
        /// As for that function.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
            #[cfg(target_arch = "x86_64")]
            naked_asm!(
                "sub rsp, 216",
                "mov [rsp + 48], rdx",
                "mov [rsp + 56], rcx",
                "mov [rsp + 64], r8",
                "mov [rsp + 72], r9",
                "test al, al",
                "jz 2f",
                "movaps [rsp + 80], xmm0",
                "movaps [rsp + 96], xmm1",
                "movaps [rsp + 112], xmm2",
                "movaps [rsp + 128], xmm3",
                "movaps [rsp + 144], xmm4",
                "movaps [rsp + 160], xmm5",
                "movaps [rsp + 176], xmm6",
                "movaps [rsp + 192], xmm7",
                "2:",
                "mov dword ptr [rsp], {used}",
                "mov dword ptr [rsp + 4], 48",
                "lea rax, [rsp + 224]",
                "mov [rsp + 8], rax",
                "lea rax, [rsp + 32]",
                "mov [rsp + 16], rax",
                concat!("mov ", $x86, ", rsp"),
                "call {list}",
                "add rsp, 216",
                "ret",
                used = const 8 * $named,
                list = sym $list,
            );
            #[cfg(target_arch = "aarch64")]
            naked_asm!(
                "sub sp, sp, #240",
                "stp x29, x30, [sp]",
                "stp x0, x1, [sp, #48]",
                "stp x2, x3, [sp, #64]",
                "stp x4, x5, [sp, #80]",
                "stp x6, x7, [sp, #96]",
                "stp q0, q1, [sp, #112]",
                "stp q2, q3, [sp, #144]",
                "stp q4, q5, [sp, #176]",
                "stp q6, q7, [sp, #208]",
                "add x9, sp, #240",
                "add x10, sp, #112",
                "stp x9, x10, [sp, #16]",
                "str x9, [sp, #32]",
                "mov w9, {left}",
                "mov w10, #-128",
                "stp w9, w10, [sp, #40]",
                concat!("add ", $arm, ", sp, #16"),
                "bl {list}",
                "ldp x29, x30, [sp]",
                "add sp, sp, #240",
                "ret",
                left = const -8 * (8 - $named),
                list = sym $list,
            );
        }
    )*};
}

takes_arguments! {
    dprintf(fd: c_int, format: *const c_char) => vdprintf, 2, "rdx", "x2";
    __dprintf_chk(fd: c_int, flag: c_int, format: *const c_char) => __vdprintf_chk, 3, "rcx", "x3";
}

/// vdprintf(3).
///
/// # Safety
/// As for vdprintf(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdprintf(fd: c_int, format: *const c_char, arguments: Arguments) -> c_int {
    // SAFETY: the program's own arguments, which are used once.
    unsafe {
        if !table::is_connection(fd) {
            return real::vdprintf(fd, format, arguments);
        }
        print(fd, |text| real::vasprintf(text, format, arguments))
    }
}

/// `__vdprintf_chk`: vdprintf(3) of a fortified program.
///
/// # Safety
/// As for vdprintf(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __vdprintf_chk(
    fd: c_int,
    flag: c_int,
    format: *const c_char,
    arguments: Arguments,
) -> c_int {
    // SAFETY: the program's own arguments, which are used once.
    unsafe {
        if !table::is_connection(fd) {
            return real::__vdprintf_chk(fd, flag, format, arguments);
        }
        print(fd, |text| real::__vasprintf_chk(text, flag, format, arguments))
    }
}

/// What `format` puts into memory of libc's, and counts.
struct Text(*mut c_char);

impl Drop for Text {
    fn drop(&mut self) {
        // SAFETY: libc's own, or null.
        unsafe { libc::free(self.0.cast()) };
    }
}

/// Writes what `format` makes, as libc's stdio would: until all is written, or a write fails.
fn print(fd: c_int, format: impl FnOnce(*mut *mut c_char) -> c_int) -> c_int {
    cancellable(|| {
        let mut text = Text(std::ptr::null_mut());
        let count = format(&raw mut text.0);
        let Ok(length) = usize::try_from(count) else {
            // What libc leaves there then is not defined.
            std::mem::forget(text);
            return -1;
        };
        let mut done = 0;
        while done < length {
            // SAFETY: `length` bytes are there.
            let rest = unsafe { text.0.add(done) };
            let list = one(rest.cast(), length - done);
            // SAFETY: as above.
            let sent =
                unsafe { stream::transmit(fd, &list, 0, || real::write(fd, rest.cast(), length - done)) };
            let Ok(sent) = usize::try_from(sent) else {
                errno::keep(|| drop(text));
                return -1;
            };
            done += sent;
        }
        count
    })
}

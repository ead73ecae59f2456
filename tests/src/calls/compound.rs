//! What libc does in several calls of its own: dprintf, system, popen, execl.

use std::ffi::CStr;
use std::os::raw::{c_char, c_int};

use super::transcript::noted_number;
use super::{Errno, Fd, Outcome, Program};

unsafe extern "C" {
    fn dprintf(fd: c_int, format: *const c_char, ...) -> c_int;
    fn __dprintf_chk(fd: c_int, flag: c_int, format: *const c_char, ...) -> c_int;
}

/// Calls a function like printf(3) with words and numbers of all kinds, more of each than there are registers for arguments.
macro_rules! with_many {
    ($seed:expr, $print:path, $($before:expr),*) => {{
        let (seed, half) = ($seed, f64::from($seed) / 2.0);
        $print(
            $($before,)*
            c"%s %d %.1f %d %.1f %.1f %ld %.1f %.1f %c %.1f %.1f %.1f %d %.1f %s %.2f %d\n".as_ptr(),
            c"many".as_ptr(),
            seed,
            half,
            seed + 1,
            half + 1.0,
            half + 2.0,
            libc::c_long::from(seed) << 33,
            half + 3.0,
            half + 4.0,
            c_int::from(b'x'),
            half + 5.0,
            half + 6.0,
            half + 7.0,
            seed + 2,
            half + 8.0,
            c"arguments".as_ptr(),
            half + 9.0,
            seed + 3,
        )
    }};
}

/// What [`print_many`] prints.
pub fn many(seed: c_int) -> Vec<u8> {
    let mut text = vec![0u8; 500];
    // SAFETY: there is room for so many bytes, and the arguments are those that the format asks for.
    let length = unsafe { with_many!(seed, libc::snprintf, text.as_mut_ptr().cast(), text.len()) };
    text.truncate(length as usize);
    text
}

/// dprintf(3); `checked`: as a fortified program makes it.
pub fn print_many(fd: Fd, seed: c_int, checked: bool) -> Outcome<usize> {
    let ret = if checked {
        // SAFETY: the arguments are those that the format asks for.
        unsafe { with_many!(seed, __dprintf_chk, fd, 1) }
    } else {
        // SAFETY: as above.
        unsafe { with_many!(seed, dprintf, fd) }
    };
    noted_number(Errno::check(ret as isize), || format!("dprintf({fd}, {seed}, {checked})"))
}

/// dprintf(3) of a text as long as it is.
pub fn print_text(fd: Fd, text: &CStr) -> Outcome<usize> {
    // SAFETY: the argument is what the format asks for.
    let ret = unsafe { dprintf(fd, c"%s".as_ptr(), text.as_ptr()) };
    noted_number(Errno::check(ret as isize), || format!("dprintf({fd}, {} bytes)", text.count_bytes()))
}

/// system(3)
pub fn system(command: &CStr) -> c_int {
    // SAFETY: the command ends with NUL.
    let status = unsafe { libc::system(command.as_ptr()) };
    crate::say!("system({command:?}) = {status}");
    status
}

/// popen(3) to read, and pclose(3).
pub fn popen(command: &CStr) -> c_int {
    // SAFETY: both end with NUL.
    let stream = unsafe { libc::popen(command.as_ptr(), c"r".as_ptr()) };
    assert!(!stream.is_null(), "popen: {}", Errno::last());
    // SAFETY: popen's own.
    let status = unsafe { libc::pclose(stream) };
    crate::say!("popen({command:?}), pclose = {status}");
    status
}

/// A way to start a program with its arguments one by one.
#[derive(Clone, Copy, Debug)]
pub enum Listed {
    Execl,
    Execlp,
    Execle,
}

impl Program {
    /// execl(3) and the like, of eight arguments. Does not return unless it fails.
    pub fn exec_listed(&self, how: Listed) -> Errno {
        let (path, arguments, environment) = self.pointers();
        let nothing: *const c_char = std::ptr::null();
        let [a, b, c, d, e, f, g, h, _] =
            <[_; 9]>::try_from(arguments).expect("the functions are called with eight arguments");
        match how {
            // SAFETY: strings that end with NUL, and a null at the end.
            Listed::Execl => unsafe { libc::execl(path, a, b, c, d, e, f, g, h, nothing) },
            // SAFETY: as above.
            Listed::Execlp => unsafe { libc::execlp(path, a, b, c, d, e, f, g, h, nothing) },
            Listed::Execle => {
                let environment = environment.as_ptr();
                // SAFETY: as above, and a list of such strings.
                unsafe { libc::execle(path, a, b, c, d, e, f, g, h, nothing, environment) }
            }
        };
        Errno::last()
    }
}

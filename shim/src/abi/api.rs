//! The functions of `thallus.h`, which says what they do.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::io::Errno;
use thallus_api::raw;
use thallus_transport::buffers::Buffers;
use thallus_transport::lending::{Handle, Loan, Memory};

use crate::{errno, ops, reserve};

/// Runs the body of a function that returns an object, or null with errno.
fn object<Public, Ours>(body: impl FnOnce() -> Result<Ours, Errno>) -> *mut Public {
    let made = if reserve::is_low() {
        Err(Errno::NOMEM)
    } else {
        catch_unwind(AssertUnwindSafe(|| errno::keep(body))).unwrap_or(Err(Errno::IO))
    };
    match made {
        Ok(made) => Box::into_raw(Box::new(made)).cast(),
        Err(errno) => {
            errno::set(errno);
            std::ptr::null_mut()
        }
    }
}

/// Runs the body of a function that returns a number, or −1 with errno.
fn number(body: impl FnOnce() -> Result<isize, Errno>) -> isize {
    let result = catch_unwind(AssertUnwindSafe(|| errno::keep(body))).unwrap_or(Err(Errno::IO));
    result.unwrap_or_else(|errno| {
        errno::set(errno);
        -1
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn thallus_api() -> c_uint {
    raw::API
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn thallus_status(fd: c_int, status: *mut raw::Status) -> c_int {
    number(|| {
        there(status)?;
        // SAFETY: the caller's struct begins with its size.
        let size = unsafe { (*status).size } as usize;
        if size < std::mem::offset_of!(raw::Status, ring_bytes_sent) {
            return Err(Errno::INVAL);
        }
        let filled = size.min(size_of::<raw::Status>());
        let mut ours = ops::lending::status(fd)?;
        ours.size = filled as u32;
        // SAFETY: as much is the caller's, and ours.
        unsafe { std::ptr::copy_nonoverlapping((&raw const ours).cast::<u8>(), status.cast(), filled) };
        Ok(0)
    }) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn thallus_allocate(
    fd: c_int,
    bytes: usize,
    address: *mut *mut c_void,
) -> *mut raw::Memory {
    object(|| {
        there(address)?;
        let memory = ops::lending::allocate(fd, bytes)?;
        // SAFETY: the caller's pointer.
        unsafe { address.write(memory.address().as_ptr().cast()) };
        Ok(memory)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn thallus_lend(
    memory: *mut raw::Memory,
    offset: usize,
    bytes: usize,
    handle: *mut raw::Handle,
) -> c_int {
    number(|| {
        there(memory)?;
        there(handle)?;
        // SAFETY: `thallus_allocate` made it of this type, and it has not been freed.
        let lent = unsafe { &*memory.cast::<Memory>() }.lend(offset, bytes)?;
        // SAFETY: the caller's handle.
        unsafe { handle.write(raw::Handle { bytes: lent.to_bytes() }) };
        Ok(0)
    }) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn thallus_loans(memory: *mut raw::Memory) -> c_int {
    number(|| {
        there(memory)?;
        // SAFETY: `thallus_allocate` made it of this type, and it has not been freed.
        Ok(unsafe { &*memory.cast::<Memory>() }.loans() as isize)
    }) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn thallus_free(memory: *mut raw::Memory) {
    if !memory.is_null() {
        number(|| {
            // SAFETY: `object` made it of a box of this type, and it has not been freed.
            drop(unsafe { Box::from_raw(memory.cast::<Memory>()) });
            Ok(0)
        });
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn thallus_borrow(
    fd: c_int,
    handle: *const raw::Handle,
    address: *mut *const c_void,
    bytes: *mut usize,
) -> *mut raw::Loan {
    object(|| {
        there(address)?;
        there(bytes)?;
        let loan = ops::lending::borrow(fd, handle_at(handle)?)?;
        // SAFETY: the caller's pointer.
        unsafe { address.write(loan.address().as_ptr().cast()) };
        // SAFETY: the caller's pointer.
        unsafe { bytes.write(loan.bytes()) };
        Ok(loan)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn thallus_return(loan: *mut raw::Loan) {
    if !loan.is_null() {
        number(|| {
            // SAFETY: `object` made it of a box of this type, and it has not been given back.
            drop(unsafe { Box::from_raw(loan.cast::<Loan>()) });
            Ok(0)
        });
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn thallus_pull(
    fd: c_int,
    handle: *const raw::Handle,
    target: *const libc::iovec,
    count: c_int,
) -> isize {
    number(|| {
        let list = match usize::try_from(count) {
            Ok(0) => &[],
            Ok(count @ 1..=Buffers::MOST) => {
                there(target)?;
                // SAFETY: the caller's list of so many.
                unsafe { std::slice::from_raw_parts(target, count) }
            }
            _ => return Err(Errno::INVAL),
        };
        ops::lending::pull(fd, handle_at(handle)?, list).map(usize::cast_signed)
    })
}

/// As the kernel says it of a null pointer.
fn there<T>(pointer: *const T) -> Result<(), Errno> {
    if pointer.is_null() { Err(Errno::FAULT) } else { Ok(()) }
}

#[unsafe(no_mangle)]
pub extern "C" fn thallus_trim(fd: c_int) -> c_int {
    number(|| {
        ops::lending::trim(fd)?;
        Ok(0)
    }) as c_int
}

fn handle_at(handle: *const raw::Handle) -> Result<Handle, Errno> {
    there(handle)?;
    // SAFETY: the caller's handle.
    Handle::of_bytes(&unsafe { handle.read() }.bytes)
}

/// `name` with a zero behind it, and as much of it as fits.
pub(crate) fn text(name: &str) -> [c_char; 32] {
    let mut text = [0; 32];
    for (slot, byte) in text[..31].iter_mut().zip(name.bytes()) {
        *slot = c_char::from_ne_bytes([byte]);
    }
    text
}

//! What programs ask that know of this library: `thallus.h`.

use std::sync::atomic::Ordering;

use rustix::io::Errno;
use thallus_api::raw;
use thallus_transport::arena::flag;
use thallus_transport::buffers::Buffers;
use thallus_transport::lending::{Handle, Loan, Memory};

use crate::abi::api::text;
use crate::table::{self, Call, Known, Young};

/// See `thallus_status`.
pub(crate) fn status(fd: i32) -> Result<raw::Status, Errno> {
    loop {
        match table::look(fd).ok_or(Errno::NOTCONN)? {
            Known::Adult(call) => return Ok(status_of(&call)),
            Known::Young(young) => {
                let status = status_of_young(fd, young);
                // Not if it has grown up meanwhile: then its bytes were elsewhere.
                if table::young(fd).is_some_and(|now| now.generation() == young.generation()) {
                    return Ok(status);
                }
            }
        }
    }
}

fn status_of_young(fd: i32, young: Young) -> raw::Status {
    let (sent, received) = young.bytes(fd);
    raw::Status {
        tcp_bytes_sent: sent,
        tcp_bytes_received: received,
        reason: text(young.reason().name()),
        ..raw::Status::default()
    }
}

fn status_of(call: &Call) -> raw::Status {
    let connection = call.connection();
    let block = connection.block;
    let mut status = raw::Status {
        ring_bytes_sent: block.ring_sent.load(Ordering::Relaxed),
        ring_bytes_received: block.ring_received.load(Ordering::Relaxed),
        tcp_bytes_sent: block.tcp_sent.load(Ordering::Relaxed),
        tcp_bytes_received: block.tcp_received.load(Ordering::Relaxed),
        ..raw::Status::default()
    };
    let area = connection.mapped_area();
    if let Ok(Some(area)) = area {
        (status.lent_bytes, status.spare_bytes) = area.usage();
    }
    let has_left = area.is_ok() || block.has(flag::READY);
    // What was lent can be taken after a return, too.
    if has_left && connection.peer_is_trusted() {
        status.flags |= raw::TRUSTED;
    }
    if connection.has_returned() {
        status.flags |= raw::RETURNED;
    }
    if connection.has_returned() || !has_left {
        status.reason = text(block.reason().name());
        return status;
    }
    status.fabric = if block.has(flag::VERBS) { raw::VERBS } else { raw::SHM };
    if connection.can_lend() {
        status.flags |= raw::CAN_LEND;
    }
    status
}

/// Counts the caller in on a connection that may have left TCP.
fn enter(fd: i32) -> Result<Call, Errno> {
    match table::look(fd) {
        Some(Known::Adult(call)) => Ok(call),
        Some(Known::Young(_)) => Err(Errno::OPNOTSUPP),
        None => Err(Errno::NOTCONN),
    }
}

/// See `thallus_allocate`.
pub(crate) fn allocate(fd: i32, bytes: usize) -> Result<Memory, Errno> {
    enter(fd)?.connection().allocate(bytes)
}

/// See `thallus_trim`.
pub(crate) fn trim(fd: i32) -> Result<(), Errno> {
    let call = enter(fd)?;
    if let Some(area) = call.connection().mapped_area()? {
        area.trim();
    }
    Ok(())
}

/// See `thallus_borrow`.
pub(crate) fn borrow(fd: i32, handle: Handle) -> Result<Loan, Errno> {
    let call = enter(fd)?;
    let area = call.connection().area()?;
    if call.connection().peer_is_trusted() { area.borrow(handle) } else { Err(Errno::PERM) }
}

/// See `thallus_pull`.
pub(crate) fn pull(fd: i32, handle: Handle, list: &[libc::iovec]) -> Result<usize, Errno> {
    let mut target = Buffers::new(list)?;
    if !list.is_empty() && target.left() < handle.bytes() {
        return Err(Errno::MSGSIZE);
    }
    let loan = enter(fd)?.connection().area()?.borrow(handle)?;
    loan.copy_to(&mut target);
    Ok(loan.bytes())
}

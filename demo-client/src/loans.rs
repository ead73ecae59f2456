//! Bodies that the server lends, where both run with the library on one host (`thallus.h`).

#![allow(unsafe_code, reason = "only the user can know whether whoever runs the server is to be believed")]

use std::io::IoSliceMut;
use std::net::TcpStream;
use std::ptr::NonNull;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use arrow_buffer::{Buffer, MutableBuffer};
use thallus_api::{Handle, Thallus};
use thallus_columnar::Decoder;

/// What to do about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loans {
    /// Never asked for.
    None,
    /// Read where they are, if the server is trusted, else copied.
    Borrow,
    /// Copied.
    Pull,
}

/// Which servers are believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Believe {
    /// What they send is validated.
    None,
    /// Processes of the same user on the same host, for what they lend.
    OwnUser,
}

/// Ways in which bodies have come.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ways {
    pub(crate) streamed: u64,
    pub(crate) pulled: u64,
    pub(crate) borrowed: u64,
}

/// Whether the server is a process of the same user on the same host.
fn is_trusted(stream: &TcpStream) -> bool {
    Thallus::find().and_then(|thallus| thallus.status(stream).ok()).is_some_and(|status| status.trusted)
}

/// Has the loan that comes next validated, unless the server could do anything to this process anyway. The process at the other
/// end must have made the loan itself: only bytes in the stream may be another's that it passes on.
pub(crate) fn choose_trust(decoder: &mut Decoder, stream: &TcpStream, believe: Believe) {
    if believe == Believe::OwnUser && is_trusted(stream) {
        // SAFETY: a process of the same user. It could trace this one, so nothing is gained by not believing it.
        unsafe { decoder.trust_sender() };
    } else {
        decoder.validate();
    }
}

/// Takes a loan of `bytes`.
pub(crate) fn take(
    stream: &TcpStream,
    loans: Loans,
    handle: [u8; 32],
    bytes: usize,
    ways: &mut Ways,
) -> Result<Buffer> {
    let thallus = Thallus::find().context("the server lends, but the library is not here")?;
    let handle = Handle { bytes: handle };
    if loans == Loans::Borrow && is_trusted(stream) {
        // SAFETY: a process of the same user, as above. Our server leaves alone what it has lent.
        let loan = unsafe { thallus.borrow(stream, &handle) }.context("what the server has lent")?;
        ensure!(loan.len() == bytes, "the server has lent {} bytes, not {bytes}", loan.len());
        ways.borrowed += 1;
        let start = NonNull::from(&*loan).cast();
        // SAFETY: the loan is there as long as the buffer.
        return Ok(unsafe { Buffer::from_custom_allocation(start, bytes, Arc::new(loan)) });
    }
    let mut body = MutableBuffer::from_len_zeroed(bytes);
    let pulled = thallus.pull(stream, &handle, &mut [IoSliceMut::new(&mut body)]);
    let pulled = pulled.context("what the server has lent")?;
    ensure!(pulled == bytes, "the server has lent {pulled} bytes, not {bytes}");
    ways.pulled += 1;
    Ok(body.into())
}

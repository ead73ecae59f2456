//! Bodies in memory that the client is lent, where both run with the library on one host (`thallus.h`).

use std::net::TcpStream;

use thallus_api::{Memory, Thallus};
use thallus_columnar::Message;
use thallus_columnar::scan::Frame;

/// Less than this is not worth a loan.
const LEAST: usize = 32 << 10;

/// The bodies of some messages, one after the other, and their headers.
pub(crate) struct Bodies {
    memory: Memory,
    pub(crate) headers: Vec<u8>,
}

impl Bodies {
    /// Copies the bodies, once; the messages are kept until the loan is sent. None if the connection can't lend so much, or not now.
    pub(crate) fn copy(stream: &TcpStream, messages: &[Message]) -> Option<Self> {
        let bytes = messages.iter().map(Message::body_len).sum();
        if bytes < LEAST {
            return None;
        }
        let mut memory = Thallus::find()?.allocate(stream, bytes).ok()?;
        let mut headers = Vec::new();
        let mut offset = 0;
        for message in messages {
            headers.extend_from_slice(message.header());
            for segment in message.body() {
                let bytes = segment.as_slice();
                memory.write_at(offset, bytes);
                offset += bytes.len();
            }
        }
        Some(Self { memory, headers })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// The frame in place of `batch`. To be sent at once: a handle that does not arrive is memory that does not come back before
    /// the connection's end. Fails where too many loans are out.
    pub(crate) fn lend(&self, batch: &Frame) -> Option<Frame> {
        let &Frame::Batch { cursor, number } = batch else { return None };
        let handle = self.memory.lend(0, self.bytes()).ok()?;
        Some(Frame::Lent { cursor, number, bytes: self.bytes() as u64, handle: handle.bytes })
    }
}

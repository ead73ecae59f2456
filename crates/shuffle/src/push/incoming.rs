//! The incoming half of a connection: frames, each body in memory of the pool.

use std::io::{self, IoSliceMut, Read};

use arrow_buffer::{Buffer, MutableBuffer};

use super::link::Link;
use super::node::Shared;
use super::wire::{HEAD, Head, Kind};
use crate::{Error, NodeId, Result};

#[derive(Debug)]
pub(super) enum Progress {
    /// The socket has nothing now.
    Empty,
    /// Something, but no whole frame.
    Some,
    Frame(Head, Buffer),
}

#[derive(Debug)]
pub(super) struct Incoming {
    node: NodeId,
    head: [u8; HEAD],
    /// Bytes of the head that are there.
    have: usize,
    /// The frame whose head is complete, its memory, and how many of its bytes are there.
    body: Option<(Head, MutableBuffer, usize)>,
}

impl Incoming {
    pub(super) fn new(node: NodeId) -> Self {
        Self { node, head: [0; HEAD], have: 0, body: None }
    }

    pub(super) fn node(&self) -> NodeId {
        self.node
    }

    pub(super) fn link<'a>(&self, shared: &'a Shared) -> &'a Link {
        shared.links[self.node.index()].as_ref().expect("another process")
    }

    /// Whether a frame's head is complete, and the frame not begun.
    pub(super) fn has_head(&self) -> bool {
        self.body.is_none() && self.have == HEAD
    }

    /// One read: of what is missing of a frame, and of the next one's head.
    ///
    /// # Errors
    ///
    /// The end of the stream, or of what can be understood.
    pub(super) fn progress(&mut self, shared: &Shared) -> Result<Progress> {
        if self.has_head() {
            return self.begin(shared);
        }
        let mut socket = &self.link(shared).stream;
        let read = match &mut self.body {
            Some((head, memory, filled)) => {
                let rest = IoSliceMut::new(&mut memory[*filled..head.length]);
                socket.read_vectored(&mut [rest, IoSliceMut::new(&mut self.head)])
            }
            None => socket.read(&mut self.head[self.have..]),
        };
        let read = match read {
            Ok(0) => return Err(self.gone("it closed the connection")),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Progress::Empty),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(Progress::Some),
            Err(error) => return Err(self.gone(&error.to_string())),
        };
        let Some((head, memory, filled)) = self.body.take() else {
            self.have += read;
            return Ok(Progress::Some);
        };
        let of_body = read.min(head.length - filled);
        if filled + of_body < head.length {
            self.body = Some((head, memory, filled + of_body));
            return Ok(Progress::Some);
        }
        self.have = read - of_body;
        Ok(Progress::Frame(head, shared.pool.filled(memory, head.length)))
    }

    /// A head is complete.
    fn begin(&mut self, shared: &Shared) -> Result<Progress> {
        let head = Head::from_bytes(&self.head).map_err(|why| Error::Protocol { node: self.node, why })?;
        self.have = 0;
        if head.length == 0 {
            return Ok(Progress::Frame(head, Buffer::default()));
        }
        debug_assert!(matches!(head.kind, Kind::Rows | Kind::GaveUp));
        self.body = Some((head, shared.pool.take(head.length), 0));
        Ok(Progress::Some)
    }

    fn gone(&self, why: &str) -> Error {
        Error::Gone { node: self.node, why: why.to_owned() }
    }
}

//! Batches as the tail of a frame.

use arrow_array::RecordBatch;
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{ArrowError, Schema};
use thallus_columnar::{EncodeOptions, Encoder, Error, Message};

/// How a connection's batches are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// As lists of buffers, sent from where they are.
    Scatter,
    /// The baseline: copied into one buffer by arrow-ipc.
    Contiguous,
    /// Likewise, but not in frames: one IPC stream with its end between OPENED and what follows.
    Stream,
}

/// What stands at the end of an IPC stream.
pub(crate) const END: Tail = Tail::Static(&[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]);

/// Messages of one cursor's stream.
pub(crate) enum Tails {
    Scatter(Box<Encoder>, Vec<Message>),
    Contiguous(Box<StreamWriter<Vec<u8>>>),
}

/// Bytes behind a frame's head.
pub(crate) enum Tail {
    None,
    Scatter(Vec<Message>),
    Contiguous(Vec<u8>),
    Static(&'static [u8]),
}

impl Tails {
    /// The schema is the first tail.
    pub(crate) fn new(encoding: Encoding, schema: &Schema) -> Result<Self, Error> {
        Ok(match encoding {
            Encoding::Scatter => {
                let encoder = Encoder::new(schema, EncodeOptions::default())?;
                let message = encoder.schema();
                Self::Scatter(Box::new(encoder), vec![message])
            }
            Encoding::Contiguous | Encoding::Stream => {
                Self::Contiguous(Box::new(StreamWriter::try_new(Vec::new(), schema).map_err(arrow)?))
            }
        })
    }

    pub(crate) fn push(&mut self, batch: &RecordBatch) -> Result<(), Error> {
        match self {
            Self::Scatter(encoder, messages) => messages.extend(encoder.batch(batch)?),
            Self::Contiguous(writer) => writer.write(batch).map_err(arrow)?,
        }
        Ok(())
    }

    /// Bytes since the last tail.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Scatter(_, messages) => messages.iter().map(Message::encoded_len).sum(),
            Self::Contiguous(writer) => writer.get_ref().len(),
        }
    }

    pub(crate) fn take(&mut self) -> Tail {
        match self {
            Self::Scatter(_, messages) => Tail::Scatter(std::mem::take(messages)),
            Self::Contiguous(writer) => {
                let bytes = writer.get_mut();
                // The next is likely to be as long, and not grown into by copying.
                let next = Vec::with_capacity(bytes.len());
                Tail::Contiguous(std::mem::replace(bytes, next))
            }
        }
    }
}

impl Tail {
    pub(crate) fn len(&self) -> usize {
        self.slices().map(<[u8]>::len).sum()
    }

    /// What could not be taken from where it was.
    pub(crate) fn copied_bytes(&self) -> usize {
        match self {
            Self::Scatter(messages) => messages.iter().map(Message::copied_bytes).sum(),
            Self::Contiguous(bytes) => bytes.len(),
            Self::None | Self::Static(_) => 0,
        }
    }

    pub(crate) fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let (messages, bytes): (&[Message], &[u8]) = match self {
            Self::None => (&[], &[]),
            Self::Scatter(messages) => (messages, &[]),
            Self::Contiguous(bytes) => (&[], bytes),
            Self::Static(bytes) => (&[], bytes),
        };
        messages.iter().flat_map(Message::slices).chain(std::iter::once(bytes))
    }
}

fn arrow(error: ArrowError) -> Error {
    error.into()
}

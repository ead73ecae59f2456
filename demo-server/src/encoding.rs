//! Batches as the tail of a frame.

use arrow_array::{ArrayRef, RecordBatch, RecordBatchOptions, UInt64Array};
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{ArrowError, DataType, Schema};
use arrow_select::take::take;
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
            Self::Contiguous(writer) => {
                unsliced(batch).and_then(|batch| writer.write(&batch)).map_err(arrow)?;
            }
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

/// The batch as arrow-ipc writes it rightly. Of lists that are a slice it writes only the values that are theirs, but where these
/// are unions, or have some within, the first ones of all; so such columns are copied.
pub(crate) fn unsliced(batch: &RecordBatch) -> Result<RecordBatch, ArrowError> {
    let schema = batch.schema();
    if !schema.fields().iter().any(|field| has_union(field.data_type(), false)) {
        return Ok(batch.clone());
    }
    let rows: UInt64Array = (0..batch.num_rows() as u64).collect();
    let copied = |column: &ArrayRef| match has_union(column.data_type(), false) {
        true => take(column, &rows, None),
        false => Ok(column.clone()),
    };
    let columns = batch.columns().iter().map(copied).collect::<Result<_, _>>()?;
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(schema, columns, &options)
}

/// Whether there is a union in a list, or, `in_list`, any.
fn has_union(data_type: &DataType, in_list: bool) -> bool {
    match data_type {
        DataType::Union(fields, _) => {
            in_list || fields.iter().any(|(_, field)| has_union(field.data_type(), false))
        }
        DataType::Struct(fields) => fields.iter().any(|field| has_union(field.data_type(), in_list)),
        DataType::List(field)
        | DataType::LargeList(field)
        | DataType::ListView(field)
        | DataType::LargeListView(field)
        | DataType::FixedSizeList(field, _)
        | DataType::Map(field, _) => has_union(field.data_type(), true),
        DataType::Dictionary(_, values) => has_union(values, in_list),
        DataType::RunEndEncoded(_, values) => has_union(values.data_type(), in_list),
        _ => false,
    }
}

fn arrow(error: ArrowError) -> Error {
    error.into()
}

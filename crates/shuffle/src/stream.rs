//! What one worker sends to another: an Arrow IPC stream of its own, of which each frame carries whole messages.
//!
//! The first frame has the schema in front, frames with new dictionaries have those. All lengths are multiples of 64, so that a
//! frame's arrays lie in its memory as aligned as the memory is.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use arrow_array::{Array, RecordBatch, RecordBatchOptions};
use arrow_buffer::{ArrowNativeType, Buffer, ScalarBuffer};
use arrow_data::{ArrayData, ByteView, MAX_INLINE_VIEW_LEN};
use arrow_schema::{DataType, SchemaRef};
use thallus_columnar::{
    DecodeOptions, Decoder, EncodeOptions, Encoder, Event, Message, Misaligned, Need, PREFIX,
};

use crate::{Error, Result, WorkerId};

/// Bytes of a frame: what a decoder takes as one body.
pub const LARGEST: usize = 2 << 30;

/// The sending end.
#[derive(Debug)]
pub struct Out {
    encoder: Encoder,
    begun: bool,
}

impl Out {
    /// # Errors
    ///
    /// Types that the format can't express.
    pub fn new(schema: &SchemaRef) -> Result<Self> {
        // What goes to others are parts of one batch.
        let options = EncodeOptions { compact_views: true, ..EncodeOptions::default() };
        Ok(Self { encoder: Encoder::new(schema, options)?, begun: false })
    }

    /// The messages of a frame, whose memory is the batch's own. Views that need less than half of theirs are copied.
    ///
    /// # Errors
    ///
    /// Other columns than the schema's; more than 2 GiB, which nobody would take.
    pub fn frame(&mut self, batch: &RecordBatch) -> Result<Vec<Message>> {
        let mut messages = self.encoder.batch(batch)?;
        if !self.begun {
            messages.insert(0, self.encoder.schema());
            self.begun = true;
        }
        let bytes: usize = messages.iter().map(Message::encoded_len).sum();
        if bytes > LARGEST {
            let (actual, limit) = (bytes as u64, LARGEST as u64);
            return Err(thallus_columnar::Error::Limit { what: "rows in one piece", actual, limit }.into());
        }
        Ok(messages)
    }
}

/// The receiving end.
#[derive(Debug)]
pub struct In {
    decoder: Decoder,
    /// None until the sender has said it, for a receiver that takes any.
    schema: Option<SchemaRef>,
}

impl In {
    pub fn new(schema: SchemaRef) -> Self {
        Self { schema: Some(schema), ..Self::of_any_schema() }
    }

    /// A receiver that takes the sender's schema.
    pub fn of_any_schema() -> Self {
        let options = DecodeOptions::default().with_misaligned(Misaligned::Copy);
        Self { decoder: Decoder::new(options), schema: None }
    }

    /// The batches of a frame, whose columns are slices of it.
    ///
    /// # Errors
    ///
    /// Anything but whole messages; another schema than the receiver's.
    pub fn frame(&mut self, frame: &Buffer) -> Result<Vec<RecordBatch>> {
        let mut batches = Vec::with_capacity(1);
        let mut at = 0;
        while at < frame.len() {
            let take = |bytes: usize| match frame.len() - at {
                rest if rest >= bytes => Ok(bytes),
                _ => Err(thallus_columnar::Error::Metadata("a frame ends within a message")),
            };
            match self.decoder.need() {
                Need::Prefix => {
                    let bytes = &frame[at..at + take(PREFIX)?];
                    self.decoder.prefix(bytes.try_into().expect("as many as were taken"))?;
                    at += PREFIX;
                }
                Need::Metadata(bytes) => {
                    let metadata = &frame[at..at + take(bytes)?];
                    self.decoder.metadata(metadata)?;
                    at += bytes;
                    // A body of nothing comes without a further byte.
                    if let Need::Body(0) = self.decoder.need() {
                        self.event(Buffer::default(), &mut batches)?;
                    }
                }
                Need::Body(bytes) => {
                    let body = frame.slice_with_length(at, take(bytes)?);
                    self.event(body, &mut batches)?;
                    at += bytes;
                }
                Need::Nothing => {
                    return Err(thallus_columnar::Error::Metadata("a message behind the end").into());
                }
            }
        }
        match self.decoder.need() {
            Need::Prefix => Ok(batches),
            _ => Err(thallus_columnar::Error::Metadata("a frame ends within a message").into()),
        }
    }

    fn event(&mut self, body: Buffer, batches: &mut Vec<RecordBatch>) -> Result<()> {
        match (self.decoder.body(body)?, &self.schema) {
            (Event::Schema(schema), Some(wanted)) if schema.fields() != wanted.fields() => {
                return Err(Error::Schema);
            }
            (Event::Schema(schema), None) => self.schema = Some(schema),
            (Event::Schema(_) | Event::Dictionary, _) => {}
            (Event::Batch(batch), Some(schema)) => batches.push(of_schema(&batch, schema)?),
            (Event::Batch(batch), None) => batches.push(batch),
        }
        Ok(())
    }
}

/// A batch with another schema: what is said about the columns may differ, and counts for nothing.
pub(crate) fn of_schema(batch: &RecordBatch, schema: &SchemaRef) -> Result<RecordBatch> {
    if Arc::ptr_eq(batch.schema_ref(), schema) {
        return Ok(batch.clone());
    }
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    Ok(RecordBatch::try_new_with_options(schema.clone(), batch.columns().to_vec(), &options)?)
}

/// The sending ends of one worker.
#[derive(Debug)]
pub struct Outs {
    schema: SchemaRef,
    by_target: HashMap<WorkerId, Out>,
}

impl Outs {
    pub fn new(schema: SchemaRef) -> Self {
        Self { schema, by_target: HashMap::new() }
    }

    /// As [`Out::frame`], for one worker.
    ///
    /// # Errors
    ///
    /// Those of [`Out::new`] and [`Out::frame`].
    pub fn frame(&mut self, target: WorkerId, batch: &RecordBatch) -> Result<Vec<Message>> {
        match self.by_target.entry(target) {
            Entry::Occupied(out) => out.into_mut(),
            Entry::Vacant(none) => none.insert(Out::new(&self.schema)?),
        }
        .frame(batch)
    }
}

/// The receiving ends of one worker.
#[derive(Debug)]
pub struct Ins {
    schema: SchemaRef,
    by_source: HashMap<WorkerId, In>,
}

impl Ins {
    pub fn new(schema: SchemaRef) -> Self {
        Self { schema, by_source: HashMap::new() }
    }

    /// As [`In::frame`], from one worker.
    ///
    /// # Errors
    ///
    /// Those of [`In::frame`].
    pub fn frame(&mut self, source: WorkerId, frame: &Buffer) -> Result<Vec<RecordBatch>> {
        let schema = &self.schema;
        self.by_source.entry(source).or_insert_with(|| In::new(schema.clone())).frame(frame)
    }
}

/// About what a batch's rows take, without what its arrays share with others.
pub fn bytes(batch: &RecordBatch) -> usize {
    batch.columns().iter().map(|column| size(&column.to_data())).sum()
}

fn size(array: &ArrayData) -> usize {
    let shallow = |array: &ArrayData| array.get_slice_memory_size().unwrap_or_default();
    let children = array.child_data();
    let own = shallow(array).saturating_sub(children.iter().map(shallow).sum());
    // A slice of lists has all of the child.
    let child = match array.data_type() {
        DataType::List(_) | DataType::Map(_, _) => part::<i32>(array),
        DataType::LargeList(_) => part::<i64>(array),
        DataType::Utf8View | DataType::BinaryView => return own + viewed(array),
        _ => None,
    };
    match child {
        Some(child) => own + size(&child),
        None => own + children.iter().map(size).sum::<usize>(),
    }
}

/// What a slice of lists refers to.
fn part<T: ArrowNativeType>(lists: &ArrayData) -> Option<ArrayData> {
    let offsets = &lists.buffers()[0].typed_data::<T>();
    let first = offsets.get(lists.offset())?.as_usize();
    let last = offsets.get(lists.offset() + lists.len())?.as_usize();
    Some(lists.child_data()[0].slice(first, last - first))
}

/// What views refer to, which is sent behind them.
fn viewed(array: &ArrayData) -> usize {
    let views = ScalarBuffer::<u128>::new(array.buffers()[0].clone(), array.offset(), array.len());
    let long =
        views.iter().map(|view| ByteView::from(*view).length).filter(|length| *length > MAX_INLINE_VIEW_LEN);
    let has = array.buffers()[1..].iter().map(Buffer::len).sum();
    long.map(|length| length as usize).fold(0, usize::saturating_add).min(has)
}

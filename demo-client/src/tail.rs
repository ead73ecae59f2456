//! Arrow messages in the tails of frames, which have been read into one buffer each.

use anyhow::{Context, Result, bail};
use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_schema::SchemaRef;
use thallus_columnar::{Decoder, Event, Need, PREFIX};

/// Reads the first tail of a cursor.
pub(crate) fn schema(decoder: &mut Decoder, tail: Buffer) -> Result<SchemaRef> {
    batches(decoder, tail)?;
    decoder.schema().cloned().context("the server has sent none")
}

/// Reads another tail. Columns are slices of it.
pub(crate) fn batches(decoder: &mut Decoder, mut tail: Buffer) -> Result<Vec<RecordBatch>> {
    let mut batches = Vec::new();
    while !tail.is_empty() {
        if let Event::Batch(batch) = message(decoder, &mut tail)? {
            batches.push(batch);
        }
    }
    Ok(batches)
}

/// Takes one message from the front of `tail`.
fn message(decoder: &mut Decoder, tail: &mut Buffer) -> Result<Event> {
    loop {
        match decoder.need() {
            Need::Prefix => {
                let prefix = take(tail, PREFIX)?;
                decoder.prefix(prefix.as_slice().try_into()?)?;
            }
            Need::Metadata(bytes) => {
                let metadata = take(tail, bytes)?;
                decoder.metadata(&metadata)?;
            }
            Need::Body(bytes) => return Ok(decoder.body(take(tail, bytes)?)?),
            Need::Nothing => bail!("the stream has ended in mid-frame"),
        }
    }
}

fn take(tail: &mut Buffer, bytes: usize) -> Result<Buffer> {
    if bytes > tail.len() {
        bail!("a message is longer than its frame");
    }
    let taken = tail.slice_with_length(0, bytes);
    tail.advance(bytes);
    Ok(taken)
}

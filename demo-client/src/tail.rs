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
pub(crate) fn batches(decoder: &mut Decoder, tail: Buffer) -> Result<Vec<RecordBatch>> {
    read(decoder, tail, None)
}

/// Reads a tail of headers, whose bodies are elsewhere. Columns are slices of those.
pub(crate) fn lent_batches(
    decoder: &mut Decoder,
    headers: Buffer,
    bodies: Buffer,
) -> Result<Vec<RecordBatch>> {
    read(decoder, headers, Some(bodies))
}

fn read(decoder: &mut Decoder, mut tail: Buffer, mut bodies: Option<Buffer>) -> Result<Vec<RecordBatch>> {
    let mut batches = Vec::new();
    while !tail.is_empty() {
        if let Event::Batch(batch) = message(decoder, &mut tail, &mut bodies)? {
            batches.push(batch);
        }
    }
    if bodies.is_some_and(|bodies| !bodies.is_empty()) {
        bail!("the server has lent more than the messages have");
    }
    Ok(batches)
}

/// Takes one message from the front of `tail`, and its body from the front of `bodies` if they are there.
fn message(decoder: &mut Decoder, tail: &mut Buffer, bodies: &mut Option<Buffer>) -> Result<Event> {
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
            Need::Body(bytes) => {
                return Ok(decoder.body(take(bodies.as_mut().unwrap_or(tail), bytes)?)?);
            }
            Need::Nothing => bail!("the stream has ended in mid-frame"),
        }
    }
}

fn take(from: &mut Buffer, bytes: usize) -> Result<Buffer> {
    if bytes > from.len() {
        bail!("a message is longer than its frame");
    }
    let taken = from.slice_with_length(0, bytes);
    from.advance(bytes);
    Ok(taken)
}

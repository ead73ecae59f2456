//! Reads a stream from anything that blocks.

use std::io::{self, Read};

use arrow_array::RecordBatch;
use arrow_buffer::{Buffer, MutableBuffer};
use arrow_schema::SchemaRef;

use crate::{DecodeOptions, Decoder, Error, Event, Need, PREFIX};

/// The record batches of a stream. Each body is allocated once, aligned to 64 bytes, and read into; the columns are slices of
/// it. After an error there are no more.
///
/// A message takes three reads: wrap a reader whose calls are dear in a [`BufReader`](io::BufReader), which hands large
/// reads through.
#[derive(Debug)]
pub struct StreamReader<R> {
    reader: R,
    decoder: Decoder,
    schema: SchemaRef,
}

impl<R: Read> StreamReader<R> {
    /// Reads the schema.
    ///
    /// # Errors
    ///
    /// The reader's and the decoder's; `UnexpectedEof` if there is no schema.
    pub fn new(reader: R, options: DecodeOptions) -> Result<Self, Error> {
        let mut reader = reader;
        let mut decoder = Decoder::new(options);
        match next_event(&mut reader, &mut decoder)? {
            Some(Event::Schema(schema)) => Ok(Self { reader, decoder, schema }),
            _ => Err(Error::Io(io::ErrorKind::UnexpectedEof.into())),
        }
    }

    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// The reader, which stands behind the end-of-stream marker once there are no more batches.
    pub fn into_inner(self) -> R {
        self.reader
    }
}

impl<R: Read> Iterator for StreamReader<R> {
    type Item = Result<RecordBatch, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match next_event(&mut self.reader, &mut self.decoder).transpose()? {
                Ok(Event::Batch(batch)) => return Some(Ok(batch)),
                Ok(_) => {}
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

/// The next message; none at the end of the stream, or of what the reader has, if that is between two messages.
fn next_event(reader: &mut impl Read, decoder: &mut Decoder) -> Result<Option<Event>, Error> {
    loop {
        match decoder.need() {
            Need::Prefix => {
                let mut prefix = [0; PREFIX];
                if !read_or_end(reader, &mut prefix)? {
                    return Ok(None);
                }
                decoder.prefix(prefix)?;
            }
            Need::Metadata(bytes) => {
                let mut metadata = vec![0; bytes];
                reader.read_exact(&mut metadata)?;
                decoder.metadata(&metadata)?;
            }
            Need::Body(bytes) => {
                // Zeroed memory of this size is the kernel's and costs nothing before it is written.
                let mut body = MutableBuffer::from_len_zeroed(bytes);
                reader.read_exact(&mut body)?;
                return Ok(Some(decoder.body(Buffer::from(body))?));
            }
            Need::Nothing => return Ok(None),
        }
    }
}

/// Fills `buffer`. False if the reader is at its end before the first byte.
fn read_or_end(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    let read = loop {
        match reader.read(buffer) {
            Ok(0) => return Ok(false),
            Ok(read) => break read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    };
    reader.read_exact(&mut buffer[read..])?;
    Ok(true)
}

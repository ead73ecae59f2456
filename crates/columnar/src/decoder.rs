//! The stream as a state machine without I/O.
//!
//! ```text
//!         prefix(8 bytes)            metadata(n bytes)           body(Buffer of n bytes, perhaps 0)
//!  Prefix ───────────────► Metadata ───────────────────► Body ──────────────────────────────────► Prefix, and an Event
//!     │ length 0
//!     └──────────────────► Nothing: the end of the stream
//! ```

use std::collections::HashMap;

use arrow_array::{RecordBatch, RecordBatchOptions, make_array};
use arrow_buffer::Buffer;
use arrow_schema::SchemaRef;

use crate::assemble::Assembler;
use crate::dictionaries::Dictionaries;
use crate::metadata::{BatchHeader, Header, Metadata};
use crate::schema::Layout;
use crate::{CONTINUATION, DecodeOptions, Error, PREFIX, Trust};

/// What a [`Decoder`] needs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// [`PREFIX`] bytes for [`Decoder::prefix`]. Here the stream may also end without having said so.
    Prefix,
    /// So many bytes for [`Decoder::metadata`].
    Metadata(usize),
    /// A buffer of so many bytes, perhaps none, for [`Decoder::body`].
    Body(usize),
    /// The stream is at its end, or wrong.
    Nothing,
}

/// What a message was.
#[derive(Debug)]
pub enum Event {
    Schema(SchemaRef),
    /// A dictionary that the next batches use.
    Dictionary,
    Batch(RecordBatch),
}

#[derive(Debug)]
enum State {
    Prefix,
    Metadata(usize),
    Body(Metadata),
    Nothing,
}

/// Reads one stream. An error ends it.
#[derive(Debug)]
pub struct Decoder {
    options: DecodeOptions,
    state: State,
    layout: Option<Layout>,
    dictionaries: Dictionaries,
    custom_metadata: HashMap<String, String>,
    copied_bytes: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new(DecodeOptions::default())
    }
}

impl Decoder {
    pub fn new(options: DecodeOptions) -> Self {
        Self {
            options,
            state: State::Prefix,
            layout: None,
            dictionaries: Dictionaries::default(),
            custom_metadata: HashMap::new(),
            copied_bytes: 0,
        }
    }

    pub fn need(&self) -> Need {
        match &self.state {
            State::Prefix => Need::Prefix,
            State::Metadata(bytes) => Need::Metadata(*bytes),
            State::Body(metadata) => Need::Body(metadata.body_len),
            State::Nothing => Need::Nothing,
        }
    }

    /// The schema, once it has been read.
    pub fn schema(&self) -> Option<&SchemaRef> {
        self.layout.as_ref().map(|layout| &layout.schema)
    }

    /// Key-value pairs of the message whose metadata was read last.
    pub fn custom_metadata(&self) -> &HashMap<String, String> {
        &self.custom_metadata
    }

    /// Bytes that were copied out of bodies so far: misaligned buffers, if that is allowed, and dictionaries that a delta
    /// was added to.
    pub fn copied_bytes(&self) -> usize {
        self.copied_bytes
    }

    /// As [`DecodeOptions::trust_sender`], for the messages from here on.
    ///
    /// # Safety
    ///
    /// What that asks for holds for them.
    #[allow(unsafe_code, reason = "it is the caller's promise that makes skipping sound")]
    pub unsafe fn trust_sender(&mut self) {
        self.options = self.options.with_trust(Trust::Trusted);
    }

    /// Validates the messages from here on.
    pub fn validate(&mut self) {
        self.options = self.options.with_trust(Trust::Validate);
    }

    /// Reads a message's beginning.
    ///
    /// # Errors
    ///
    /// No continuation marker; a length that is negative or above the limit; not [`Need::Prefix`].
    pub fn prefix(&mut self, bytes: [u8; PREFIX]) -> Result<Need, Error> {
        let State::Prefix = self.take_state() else { return Err(Error::OutOfOrder) };
        let (marker, length) = bytes.split_at(CONTINUATION.len());
        if marker != CONTINUATION {
            return Err(Error::Continuation);
        }
        let length = i32::from_le_bytes(length.try_into().expect("8 bytes less 4"));
        let bytes = usize::try_from(length).map_err(|_| Error::NegativeLength(length))?;
        let limit = self.options.limits.metadata;
        if bytes > limit {
            return Err(Error::Limit { what: "metadata", actual: bytes as u64, limit: limit as u64 });
        }
        if bytes > 0 {
            self.state = State::Metadata(bytes);
        }
        Ok(self.need())
    }

    /// Reads a message's metadata, which need not be aligned.
    ///
    /// # Errors
    ///
    /// Metadata that is malformed, unsupported, or asks for more than the limits; [`Error::WrongSize`]; not
    /// [`Need::Metadata`].
    pub fn metadata(&mut self, bytes: &[u8]) -> Result<Need, Error> {
        let State::Metadata(needed) = self.take_state() else { return Err(Error::OutOfOrder) };
        if bytes.len() != needed {
            return Err(Error::WrongSize { needed, given: bytes.len() });
        }
        let mut metadata = Metadata::parse(bytes, &self.options.limits)?;
        match (&metadata.header, &self.layout) {
            (Header::Schema(_), None) | (Header::Batch(_), Some(_)) => {}
            (Header::Schema(_), Some(_)) => return Err(Error::Metadata("a second schema")),
            (Header::Dictionary { id, .. }, Some(layout)) => {
                if !layout.dictionaries.contains_key(id) {
                    return Err(Error::UnknownDictionary(*id));
                }
            }
            (_, None) => return Err(Error::Metadata("the stream does not begin with a schema")),
        }
        self.custom_metadata = std::mem::take(&mut metadata.custom);
        self.state = State::Body(metadata);
        Ok(self.need())
    }

    /// Reads a message's body. Arrays are slices of it and keep it alive: whoever lends the memory learns from the
    /// buffer's drop that it is free again ([`Buffer::from_custom_allocation`]). It should begin at a multiple of 64.
    ///
    /// # Errors
    ///
    /// Arrays that are malformed or, unless trusted, invalid; [`Fault::Misaligned`](crate::Fault); [`Error::WrongSize`];
    /// not [`Need::Body`].
    pub fn body(&mut self, body: Buffer) -> Result<Event, Error> {
        let State::Body(metadata) = self.take_state() else { return Err(Error::OutOfOrder) };
        if body.len() != metadata.body_len {
            return Err(Error::WrongSize { needed: metadata.body_len, given: body.len() });
        }
        let event = match metadata.header {
            Header::Schema(layout) => {
                let schema = layout.schema.clone();
                self.layout = Some(layout);
                Event::Schema(schema)
            }
            Header::Dictionary { id, delta, batch } => {
                self.dictionary(id, delta, &batch, &body)?;
                Event::Dictionary
            }
            Header::Batch(batch) => Event::Batch(self.batch(&batch, &body)?),
        };
        self.state = State::Prefix;
        Ok(event)
    }

    /// What is not put back ends the stream.
    fn take_state(&mut self) -> State {
        std::mem::replace(&mut self.state, State::Nothing)
    }

    fn join_dictionaries(&mut self) -> Result<(), Error> {
        let joined = self.dictionaries.join(&self.options.limits);
        self.copied_bytes += joined.map_err(|(id, fault)| Error::Dictionary { id, fault })?;
        Ok(())
    }

    fn dictionary(&mut self, id: i64, delta: bool, batch: &BatchHeader, body: &Buffer) -> Result<(), Error> {
        let layout = self.layout.as_ref().expect("metadata() has looked");
        let dictionary = layout.dictionaries[&id].clone();
        if !dictionary.plan.children.is_empty() {
            self.join_dictionaries()?; // of which its values may consist
        }
        let mut assembler = Assembler::new(batch, body, &self.dictionaries, &self.options);
        let values = assembler.array(&dictionary.values, &dictionary.plan).and_then(|values| {
            self.copied_bytes += assembler.finish()?;
            Ok(values)
        });
        let limit = self.options.limits.dictionaries;
        values
            .and_then(|values| self.dictionaries.insert(id, delta, values, body.len(), limit))
            .map_err(|fault| Error::Dictionary { id, fault })
    }

    fn batch(&mut self, batch: &BatchHeader, body: &Buffer) -> Result<RecordBatch, Error> {
        self.join_dictionaries()?;
        let layout = self.layout.as_ref().expect("metadata() has looked");
        let mut assembler = Assembler::new(batch, body, &self.dictionaries, &self.options);
        let mut columns = Vec::with_capacity(layout.plans.len());
        for (field, plan) in layout.schema.fields().iter().zip(&layout.plans) {
            let column = assembler.array(field.data_type(), plan);
            let column = column.map_err(|fault| Error::Column { column: field.name().clone(), fault })?;
            columns.push(make_array(column));
        }
        let column = || layout.schema.fields().last().map(|field| field.name().clone()).unwrap_or_default();
        self.copied_bytes += assembler.finish().map_err(|fault| Error::Column { column: column(), fault })?;
        let options = RecordBatchOptions::new().with_row_count(Some(batch.rows));
        Ok(RecordBatch::try_new_with_options(layout.schema.clone(), columns, &options)?)
    }
}

//! The metadata of one message, checked and taken out of its flatbuffer before the body arrives.

use std::collections::HashMap;
use std::ops::Range;

use arrow_ipc as ipc;
use flatbuffers::{InvalidFlatbuffer, VerifierOptions};

use crate::schema::{Layout, key_values};
use crate::{Error, Limits};

/// Length and number of nulls of one array.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    pub(crate) len: usize,
    pub(crate) nulls: usize,
}

/// What the arrays of one record batch, or of a dictionary's values, are made of.
#[derive(Debug)]
pub(crate) struct BatchHeader {
    pub(crate) rows: usize,
    /// Depth-first.
    pub(crate) nodes: Vec<Node>,
    /// In the body, within it and together no longer than it.
    pub(crate) buffers: Vec<Range<usize>>,
    /// Number of data buffers of each view array.
    pub(crate) variadic: Vec<usize>,
    /// By metadata version 4 unions and run-end encoded arrays have a validity bitmap, too.
    pub(crate) all_have_validity: bool,
}

#[derive(Debug)]
pub(crate) enum Header {
    Schema(Layout),
    Dictionary { id: i64, delta: bool, batch: BatchHeader },
    Batch(BatchHeader),
}

#[derive(Debug)]
pub(crate) struct Metadata {
    pub(crate) header: Header,
    pub(crate) body_len: usize,
    pub(crate) custom: HashMap<String, String>,
}

impl Metadata {
    pub(crate) fn parse(bytes: &[u8], limits: &Limits) -> Result<Self, Error> {
        let message = root(bytes, limits.depth)?;
        let version = message.version();
        if !matches!(version, ipc::MetadataVersion::V4 | ipc::MetadataVersion::V5) {
            return Err(Error::Unsupported("a metadata version other than 4 and 5"));
        }
        let body_len = within("body", message.bodyLength(), limits.body)?;
        let batch = |batch| parse_batch(batch, body_len, version, limits);

        let header = match message.header_type() {
            ipc::MessageHeader::Schema => {
                let schema = message.header_as_schema().ok_or(Error::Metadata("no schema"))?;
                Header::Schema(Layout::parse(schema, limits.depth)?)
            }
            ipc::MessageHeader::RecordBatch => {
                let header = message.header_as_record_batch().ok_or(Error::Metadata("no record batch"))?;
                Header::Batch(batch(header)?)
            }
            ipc::MessageHeader::DictionaryBatch => {
                let header = message.header_as_dictionary_batch().ok_or(Error::Metadata("no dictionary"))?;
                let values = header.data().ok_or(Error::Metadata("a dictionary without values"))?;
                Header::Dictionary { id: header.id(), delta: header.isDelta(), batch: batch(values)? }
            }
            _ => return Err(Error::Unsupported("a message other than schema, dictionary and record batch")),
        };
        Ok(Self { header, body_len, custom: key_values(message.custom_metadata()) })
    }
}

/// The flatbuffer of a message, in which fields may be nested `depth` levels deep.
pub(crate) fn root(bytes: &[u8], depth: usize) -> Result<ipc::Message<'_>, InvalidFlatbuffer> {
    let verifier = VerifierOptions {
        // A field is a table in a table; above the outermost are schema and message, below the innermost its type.
        max_depth: depth.saturating_add(8),
        // Tables may be shared, so that few bytes describe a tree of exponential size. One that is not takes 8.
        max_tables: bytes.len() / 8 + 8,
        max_apparent_size: bytes.len().saturating_mul(16).saturating_add(1 << 16),
        ignore_missing_null_terminator: false,
    };
    ipc::root_as_message_with_opts(&verifier, bytes)
}

fn within(what: &'static str, value: i64, limit: usize) -> Result<usize, Error> {
    match usize::try_from(value) {
        Ok(value) if value <= limit => Ok(value),
        Ok(_) => Err(Error::Limit { what, actual: value.cast_unsigned(), limit: limit as u64 }),
        Err(_) => Err(Error::Metadata("a negative length")),
    }
}

fn parse_batch(
    batch: ipc::RecordBatch<'_>,
    body_len: usize,
    version: ipc::MetadataVersion,
    limits: &Limits,
) -> Result<BatchHeader, Error> {
    if batch.compression().is_some() {
        return Err(Error::Unsupported("a compressed body"));
    }
    let rows = within("rows", batch.length(), limits.rows)?;
    let nodes = batch.nodes().into_iter().flatten().map(|node| {
        let len = within("rows", node.length(), limits.rows)?;
        let nulls = usize::try_from(node.null_count()).ok().filter(|nulls| *nulls <= len);
        Ok(Node { len, nulls: nulls.ok_or(Error::Metadata("more nulls than values"))? })
    });
    let nodes = nodes.collect::<Result<Vec<_>, Error>>()?;

    // Buffers that overlap would let a small message cost as much to validate as many large ones, unless they had a limit together.
    let mut total = 0_usize;
    let buffers = batch.buffers().into_iter().flatten().map(|buffer| {
        let offset = usize::try_from(buffer.offset()).ok()?;
        let end = offset.checked_add(usize::try_from(buffer.length()).ok()?)?;
        total = total.checked_add(end - offset)?;
        (end <= body_len && total <= body_len).then_some(offset..end)
    });
    let buffers = buffers.collect::<Option<Vec<_>>>().ok_or(Error::Buffers)?;

    let variadic = batch.variadicBufferCounts().into_iter().flatten().map(usize::try_from);
    let variadic = variadic.collect::<Result<_, _>>().map_err(|_| Error::Metadata("a negative count"))?;
    let all_have_validity = version == ipc::MetadataVersion::V4;
    Ok(BatchHeader { rows, nodes, buffers, variadic, all_have_validity })
}

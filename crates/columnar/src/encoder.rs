//! A stream, message by message.

use std::collections::HashMap;

use arrow_array::{Array, RecordBatch};
use arrow_data::ArrayData;
use arrow_ipc as ipc;
use arrow_ipc::convert::{IpcSchemaEncoder, metadata_to_fb};
use arrow_ipc::writer::DictionaryTracker;
use arrow_schema::{DataType, Schema};
use flatbuffers::{FlatBufferBuilder, UnionWIPOffset, WIPOffset};

use crate::cut::Cut;
use crate::dictionaries::can_grow;
use crate::message::{Kind, Message};
use crate::schema::{Layout, Plan};
use crate::{ALIGNMENT, CONTINUATION, Error, Limits, PREFIX, metadata};

/// How an [`Encoder`] writes.
#[derive(Clone, Copy, Debug, Default)]
pub struct EncodeOptions {
    /// Sends only the new values of a dictionary that has grown at its end. Not all readers know such deltas; without
    /// this, the dictionary is sent anew.
    pub dictionary_deltas: bool,
    /// Copies what views refer to, if that is less than half of the memory that would be sent. Parts of one batch for many
    /// readers share that memory, of which each would get all.
    pub compact_views: bool,
}

/// Writes one stream: [`Encoder::schema`], any number of [`Encoder::batch`], [`Encoder::end`].
#[derive(Debug)]
pub struct Encoder {
    options: EncodeOptions,
    types: Vec<DataType>,
    /// One for each column.
    plans: Vec<Plan>,
    schema: Message,
    /// The values that the reader has of each dictionary.
    sent: HashMap<i64, ArrayData>,
}

/// What became of a dictionary.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    None,
    New,
    Grown,
    Replaced,
}

impl Encoder {
    /// # Errors
    ///
    /// A schema that the format can't express: dictionaries of dictionaries, or more than 64 levels.
    pub fn new(schema: &Schema, options: EncodeOptions) -> Result<Self, Error> {
        let limits = Limits::default();
        for field in schema.fields() {
            check(field.data_type(), limits.depth)?;
        }
        let header = framed(0, &HashMap::new(), |builder| {
            let mut tracker = DictionaryTracker::new(false);
            let mut encoder = IpcSchemaEncoder::new().with_dictionary_tracker(&mut tracker);
            let root = encoder.schema_to_fb_offset(builder, schema).as_union_value();
            (ipc::MessageHeader::Schema, root)
        })?;
        // Read back, so that both ends take the dictionaries' numbers from the same bytes.
        let message = metadata::root(&header[PREFIX..], limits.depth)?;
        let root = message.header_as_schema().ok_or(Error::Metadata("no schema"))?;
        let plans = Layout::parse(root, limits.depth)?.plans;
        let types = schema.fields().iter().map(|field| field.data_type().clone()).collect();
        let schema = Message::of_header(Kind::Schema, header);
        Ok(Self { options, types, plans, schema, sent: HashMap::new() })
    }

    /// The stream's first message.
    pub fn schema(&self) -> Message {
        self.schema.clone()
    }

    /// The messages of one batch: dictionaries that the reader lacks, then the batch itself, always last. Its columns' memory
    /// is referred to, not copied, except for [`Message::copied_bytes`].
    ///
    /// # Errors
    ///
    /// [`Error::SchemaMismatch`] if the types are not those of the schema.
    pub fn batch(&mut self, batch: &RecordBatch) -> Result<Vec<Message>, Error> {
        self.batch_with_metadata(batch, &HashMap::new())
    }

    /// As [`Encoder::batch`]; the batch's message carries key-value pairs.
    ///
    /// # Errors
    ///
    /// Those of [`Encoder::batch`].
    pub fn batch_with_metadata(
        &mut self,
        batch: &RecordBatch,
        metadata: &HashMap<String, String>,
    ) -> Result<Vec<Message>, Error> {
        if !self.types.iter().eq(batch.columns().iter().map(Array::data_type)) {
            return Err(Error::SchemaMismatch);
        }
        let columns: Vec<ArrayData> = batch.columns().iter().map(Array::to_data).collect();
        let mut messages = Vec::new();
        let plans = std::mem::take(&mut self.plans);
        let sent = columns
            .iter()
            .zip(&plans)
            .try_for_each(|(column, plan)| self.dictionaries(column, plan, &mut messages).map(|_| ()));
        self.plans = plans;
        sent?;

        let mut cut = Cut { compact_views: self.options.compact_views, ..Cut::default() };
        columns.iter().for_each(|column| cut.array(column));
        let header = framed(cut.body_len, metadata, |builder| {
            let root = record_batch(builder, batch.num_rows(), &cut).as_union_value();
            (ipc::MessageHeader::RecordBatch, root)
        })?;
        messages.push(message(Kind::Batch, header, cut));
        Ok(messages)
    }

    /// The end-of-stream marker.
    pub fn end(&self) -> Message {
        Message::of_header(Kind::End, [CONTINUATION, [0; 4]].concat())
    }

    /// Adds messages for dictionaries in and below `array` that have changed, inner ones before those that they are part of.
    /// Returns whether one was replaced: keys that were sent before then mean something else.
    fn dictionaries(
        &mut self,
        array: &ArrayData,
        plan: &Plan,
        messages: &mut Vec<Message>,
    ) -> Result<bool, Error> {
        let mut replaced = false;
        let Some(id) = plan.dictionary else {
            for (child, plan) in array.child_data().iter().zip(&plan.children) {
                replaced |= self.dictionaries(child, plan, messages)?;
            }
            return Ok(replaced);
        };
        let values = &array.child_data()[0];
        for (child, plan) in values.child_data().iter().zip(&plan.children) {
            replaced |= self.dictionaries(child, plan, messages)?;
        }
        let before = self.sent.get(&id);
        let change = match before {
            Some(_) if replaced => Change::Replaced,
            before => change(before, values, self.options.dictionary_deltas),
        };
        let (kind, part) = match (change, before) {
            (Change::None, _) => return Ok(false),
            (Change::Grown, Some(before)) => {
                (Kind::Delta, values.slice(before.len(), values.len() - before.len()))
            }
            _ => (Kind::Dictionary, values.clone()),
        };
        self.sent.insert(id, values.clone());

        let mut cut = Cut { compact_views: self.options.compact_views, ..Cut::default() };
        cut.array(&part);
        let header = framed(cut.body_len, &HashMap::new(), |builder| {
            let values = record_batch(builder, part.len(), &cut);
            let mut dictionary = ipc::DictionaryBatchBuilder::new(builder);
            dictionary.add_id(id);
            dictionary.add_data(values);
            dictionary.add_isDelta(kind == Kind::Delta);
            let root = dictionary.finish().as_union_value();
            (ipc::MessageHeader::DictionaryBatch, root)
        })?;
        messages.push(message(kind, header, cut));
        Ok(change == Change::Replaced)
    }
}

fn change(before: Option<&ArrayData>, values: &ArrayData, deltas: bool) -> Change {
    let Some(before) = before else { return Change::New };
    if before.ptr_eq(values) || before == values {
        return Change::None;
    }
    let grown = deltas && can_grow(values.data_type()) && values.len() > before.len();
    if grown && *before == values.slice(0, before.len()) { Change::Grown } else { Change::Replaced }
}

/// Types that the format has no place for.
fn check(data_type: &DataType, depth: usize) -> Result<(), Error> {
    let Some(depth) = depth.checked_sub(1) else { return Err(Error::Unsupported("nesting this deep")) };
    match data_type {
        DataType::Dictionary(_, values) => match **values {
            DataType::Dictionary(_, _) => {
                Err(Error::Unsupported("a dictionary whose values are a dictionary"))
            }
            _ => check(values, depth + 1), // the same field
        },
        DataType::List(field)
        | DataType::LargeList(field)
        | DataType::ListView(field)
        | DataType::LargeListView(field)
        | DataType::FixedSizeList(field, _)
        | DataType::Map(field, _) => check(field.data_type(), depth),
        DataType::Struct(fields) => fields.iter().try_for_each(|field| check(field.data_type(), depth)),
        DataType::Union(fields, _) => {
            fields.iter().try_for_each(|(_, field)| check(field.data_type(), depth))
        }
        DataType::RunEndEncoded(_, values) => check(values.data_type(), depth),
        _ => Ok(()),
    }
}

fn message(kind: Kind, header: Vec<u8>, cut: Cut) -> Message {
    Message { kind, header, body: cut.body, body_len: cut.body_len, copied_bytes: cut.copied_bytes }
}

fn record_batch<'a>(
    builder: &mut FlatBufferBuilder<'a>,
    rows: usize,
    cut: &Cut,
) -> WIPOffset<ipc::RecordBatch<'a>> {
    let nodes = builder.create_vector(&cut.nodes);
    let buffers = builder.create_vector(&cut.buffers);
    let variadic = (!cut.variadic.is_empty()).then(|| builder.create_vector(&cut.variadic));
    let mut batch = ipc::RecordBatchBuilder::new(builder);
    batch.add_length(rows as i64);
    batch.add_nodes(nodes);
    batch.add_buffers(buffers);
    if let Some(variadic) = variadic {
        batch.add_variadicBufferCounts(variadic);
    }
    batch.finish()
}

/// Marker, length and the metadata of a message: around the header that `content` builds, with a body of `body_len` bytes.
fn framed(
    body_len: usize,
    custom: &HashMap<String, String>,
    content: impl FnOnce(&mut FlatBufferBuilder<'_>) -> (ipc::MessageHeader, WIPOffset<UnionWIPOffset>),
) -> Result<Vec<u8>, Error> {
    let mut builder = FlatBufferBuilder::with_capacity(1024);
    let (header_type, header) = content(&mut builder);
    let custom = (!custom.is_empty()).then(|| metadata_to_fb(&mut builder, custom));
    let mut message = ipc::MessageBuilder::new(&mut builder);
    message.add_version(ipc::MetadataVersion::V5);
    message.add_header_type(header_type);
    message.add_header(header);
    message.add_bodyLength(body_len as i64);
    if let Some(custom) = custom {
        message.add_custom_metadata(custom);
    }
    let root = message.finish();
    builder.finish(root, None);

    let metadata = builder.finished_data();
    let total = (PREFIX + metadata.len()).next_multiple_of(ALIGNMENT);
    let length = i32::try_from(total - PREFIX).map_err(|_| Error::Unsupported("metadata above 2 GiB"))?;
    let mut framed = Vec::with_capacity(total);
    framed.extend_from_slice(&CONTINUATION);
    framed.extend_from_slice(&length.to_le_bytes());
    framed.extend_from_slice(metadata);
    framed.resize(total, 0);
    Ok(framed)
}

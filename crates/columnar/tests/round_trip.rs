//! What goes in comes out: through our own two ends, and with arrow-ipc at either end.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod arrays;

use std::io::Cursor;
use std::sync::Arc;

use arrow_array::{Array, RecordBatch};
use arrow_buffer::{Buffer, MutableBuffer};
use arrow_schema::{DataType, Schema, SchemaRef};
use proptest::prelude::*;
use thallus_columnar::{
    DecodeOptions, Decoder, EncodeOptions, Encoder, Event, Kind, Message, Need, PREFIX, Segment,
};

use arrays::{Random, Shape, any_array, any_batch, any_schema, any_type, contains, dictionary, memory};

const WHOLE: Shape = Shape { sliced: false, tame: false };
const SLICED: Shape = Shape { sliced: true, tame: false };

fn encode(schema: &Schema, batches: &[RecordBatch], options: EncodeOptions) -> Vec<Message> {
    let mut encoder = Encoder::new(schema, options).unwrap();
    let mut messages = vec![encoder.schema()];
    messages.extend(batches.iter().flat_map(|batch| encoder.batch(batch).unwrap()));
    messages.push(encoder.end());
    messages
}

fn bytes(messages: &[Message]) -> Vec<u8> {
    let mut stream = Vec::new();
    messages.iter().for_each(|message| message.write_to(&mut stream).unwrap());
    assert_eq!(stream.len(), messages.iter().map(Message::encoded_len).sum::<usize>());
    stream
}

/// Hands the stream to a decoder, each body in memory of its own. Returns the batches, these bodies, and the bytes copied.
fn decode(stream: &[u8], options: DecodeOptions) -> (SchemaRef, Vec<RecordBatch>, Vec<Buffer>, usize) {
    let mut decoder = Decoder::new(options);
    let (mut batches, mut bodies, mut rest) = (Vec::new(), Vec::new(), stream);
    loop {
        match decoder.need() {
            Need::Prefix => {
                decoder.prefix(rest.split_off(..PREFIX).unwrap().try_into().unwrap()).unwrap();
            }
            Need::Metadata(len) => {
                decoder.metadata(rest.split_off(..len).unwrap()).unwrap();
            }
            Need::Body(len) => {
                let mut body = MutableBuffer::new(len);
                body.extend_from_slice(rest.split_off(..len).unwrap());
                let body = Buffer::from(body);
                bodies.push(body.clone());
                if let Event::Batch(batch) = decoder.body(body).unwrap() {
                    batches.push(batch);
                }
            }
            Need::Nothing => break,
        }
    }
    assert!(rest.is_empty());
    (decoder.schema().unwrap().clone(), batches, bodies, decoder.copied_bytes())
}

fn any_stream(seed: u64, shape: Shape) -> (SchemaRef, Vec<RecordBatch>) {
    let mut random = Random(seed);
    let columns = random.below(5);
    let schema = any_schema(&mut random, columns, 3);
    let batches = (0..random.below(4)).map(|_| {
        let rows = if random.one_in(4) { 0 } else { random.below(100) };
        any_batch(&mut random, &schema, rows, shape)
    });
    let batches = batches.collect();
    (schema, batches)
}

fn check_all_ways(schema: &SchemaRef, batches: &[RecordBatch], options: EncodeOptions) {
    let messages = encode(schema, batches, options);
    let stream = bytes(&messages);
    assert!(messages.iter().all(|message| message.body_len().is_multiple_of(64)));

    let (got_schema, got, bodies, copied) = decode(&stream, DecodeOptions::default());
    assert_eq!(&got_schema, schema);
    assert_eq!(got, batches);
    if !messages.iter().any(|message| message.kind() == Kind::Delta) {
        assert_eq!(copied, 0);
        for column in got.iter().flat_map(RecordBatch::columns) {
            column.to_data().validate_full().unwrap();
            assert!(memory(&column.to_data()).iter().all(|buffer| contains(&bodies, buffer)));
        }
    }

    let theirs = arrow_ipc::reader::StreamReader::try_new(Cursor::new(&stream), None).unwrap();
    assert_eq!(&theirs.schema(), schema);
    assert_eq!(theirs.collect::<Result<Vec<_>, _>>().unwrap(), batches);

    let mut theirs = arrow_ipc::writer::StreamWriter::try_new(Vec::new(), schema).unwrap();
    batches.iter().for_each(|batch| theirs.write(batch).unwrap());
    let stream = theirs.into_inner().unwrap();
    if schema.fields().iter().any(|field| has_runs_or_union(field.data_type())) {
        // arrow-ipc 58 writes some slices of these wrongly: it does not get them back itself.
        let theirs = arrow_ipc::reader::StreamReader::try_new(Cursor::new(&stream), None).unwrap();
        if !theirs.collect::<Result<Vec<_>, _>>().is_ok_and(|theirs| theirs == batches) {
            return;
        }
    }
    let (got_schema, got, _, copied) = decode(&stream, DecodeOptions::default());
    assert_eq!((&got_schema, &got[..], copied), (schema, batches, 0));
}

fn has_runs_or_union(data_type: &DataType) -> bool {
    use DataType::*;
    match data_type {
        RunEndEncoded(..) | Union(..) => true,
        List(field)
        | LargeList(field)
        | ListView(field)
        | LargeListView(field)
        | FixedSizeList(field, _)
        | Map(field, _) => has_runs_or_union(field.data_type()),
        Struct(fields) => fields.iter().any(|field| has_runs_or_union(field.data_type())),
        Dictionary(_, values) => has_runs_or_union(values),
        _ => false,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whole_arrays_round_trip_without_a_copy(seed: u64) {
        let (schema, batches) = any_stream(seed, WHOLE);
        check_all_ways(&schema, &batches, EncodeOptions::default());
        let messages = encode(&schema, &batches, EncodeOptions::default());
        prop_assert!(messages.iter().all(|message| message.copied_bytes() == 0));
        let sources: Vec<_> = batches
            .iter()
            .flat_map(|batch| batch.columns().iter().flat_map(|column| memory(&column.to_data())))
            .collect();
        for segment in messages.iter().flat_map(Message::body) {
            prop_assert!(!segment.as_slice().is_empty());
            if let Segment::Buffer(buffer) = segment {
                prop_assert!(contains(&sources, buffer));
            }
        }
    }

    #[test]
    fn sliced_arrays_round_trip(seed: u64) {
        let (schema, batches) = any_stream(seed, SLICED);
        check_all_ways(&schema, &batches, EncodeOptions::default());
        check_all_ways(&schema, &batches, EncodeOptions { dictionary_deltas: true, ..EncodeOptions::default() });
    }

    #[test]
    fn dictionaries_grow_by_deltas(seed: u64) {
        let random = &mut Random(seed);
        let value_type = any_type(random, 2);
        prop_assume!(!matches!(value_type, DataType::Dictionary(..))); // the format has no such dictionaries
        let values = any_array(random, &value_type, 40, true, SLICED);
        let grown = [10, 10, 11, 40].map(|len| {
            let column = dictionary(random, &DataType::UInt8, values.slice(0, len), 30, None);
            RecordBatch::try_from_iter([("c", column)]).unwrap()
        });
        let options = EncodeOptions { dictionary_deltas: true, ..EncodeOptions::default() };
        let messages = encode(&grown[0].schema(), &grown, options);
        if !value_type.is_nested() && !has_runs_or_union(&value_type) {
            use Kind::{Batch, Delta, Dictionary, End};
            let kinds: Vec<_> = messages.iter().map(Message::kind).collect();
            let expected = [Kind::Schema, Dictionary, Batch, Batch, Delta, Batch, Delta, Batch, End];
            prop_assert_eq!(&kinds, &expected);
        }
        check_all_ways(&grown[0].schema(), &grown, options);
    }

    #[test]
    fn a_trusted_stream_reads_the_same(seed: u64) {
        let (schema, batches) = any_stream(seed, SLICED);
        let stream = bytes(&encode(&schema, &batches, EncodeOptions::default()));
        // SAFETY: the stream was made just above.
        let options = unsafe { DecodeOptions::default().trust_sender() };
        prop_assert_eq!(decode(&stream, options).1, batches);
    }
}

#[test]
fn every_flat_type_and_each_at_every_length_around_a_byte() {
    for data_type in arrays::flat_types() {
        let nullable = true;
        let schema = Arc::new(Schema::new(vec![arrays::field("c", data_type, nullable)]));
        for shape in [WHOLE, SLICED] {
            for rows in [0, 1, 7, 8, 9, 63, 64, 65] {
                let batches: Vec<_> =
                    (0..4).map(|seed| any_batch(&mut Random(seed), &schema, rows, shape)).collect();
                check_all_ways(&schema, &batches, EncodeOptions::default());
            }
        }
    }
}

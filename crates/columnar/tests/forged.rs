//! Messages as a hostile sender would make them, one fault each.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod arrays;

use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray, make_array};
use arrow_buffer::{Buffer, NullBuffer};
use arrow_data::ArrayData;
use arrow_ipc as ipc;
use arrow_schema::{DataType, Field, Schema, UnionFields, UnionMode};
use thallus_columnar::{
    DecodeOptions, Decoder, EncodeOptions, Encoder, Error, Fault, Limits, Message, PREFIX,
};

use arrays::{aligned, feed, stream};

/// A record batch message as a hostile writer would make it.
fn forged(
    nodes: &[(i64, i64)],
    buffers: &[(i64, i64)],
    variadic: &[i64],
    compressed: bool,
    body: &[u8],
) -> Vec<u8> {
    let mut builder = flatbuffers::FlatBufferBuilder::new();
    let nodes: Vec<_> = nodes.iter().map(|(len, nulls)| ipc::FieldNode::new(*len, *nulls)).collect();
    let buffers: Vec<_> = buffers.iter().map(|(offset, len)| ipc::Buffer::new(*offset, *len)).collect();
    let rows = nodes[0].length();
    let nodes = builder.create_vector(&nodes);
    let buffers = builder.create_vector(&buffers);
    let variadic = builder.create_vector(variadic);
    let compression = ipc::BodyCompressionBuilder::new(&mut builder).finish();
    let mut batch = ipc::RecordBatchBuilder::new(&mut builder);
    batch.add_length(rows);
    batch.add_nodes(nodes);
    batch.add_buffers(buffers);
    batch.add_variadicBufferCounts(variadic);
    if compressed {
        batch.add_compression(compression);
    }
    let batch = batch.finish().as_union_value();
    let mut message = ipc::MessageBuilder::new(&mut builder);
    message.add_version(ipc::MetadataVersion::V5);
    message.add_header_type(ipc::MessageHeader::RecordBatch);
    message.add_header(batch);
    message.add_bodyLength(body.len() as i64);
    let message = message.finish();
    builder.finish(message, None);
    let metadata = builder.finished_data();
    [&[255; 4], &(metadata.len() as u32).to_le_bytes()[..], metadata, body].concat()
}

fn refusal(data_type: DataType, message: &[u8]) -> Error {
    let schema = Schema::new(vec![Field::new("c", data_type, true)]);
    let mut stream = Encoder::new(&schema, EncodeOptions::default()).unwrap().schema().header().to_vec();
    stream.extend_from_slice(message);
    feed(&mut Decoder::default(), &stream, aligned).unwrap_err()
}

fn refusal_of_none(data_type: DataType, message: &[u8]) {
    let schema = Schema::new(vec![Field::new("c", data_type, true)]);
    let encoder = Encoder::new(&schema, EncodeOptions::default()).unwrap();
    let stream = [encoder.schema().header(), message, encoder.end().header()].concat();
    let batches = feed(&mut Decoder::default(), &stream, aligned).unwrap();
    assert_eq!(batches.len(), 1);
    batches[0].column(0).to_data().validate_full().unwrap();
}

#[test]
fn forged_batches_are_refused() {
    let body = [0; 64];
    let compressed = forged(&[(1, 0)], &[(0, 0), (0, 4)], &[], true, &body);
    assert!(matches!(refusal(DataType::Int32, &compressed), Error::Unsupported("a compressed body")));

    for buffers in [[(0, 0), (64, 4)], [(0, 0), (i64::MAX, 4)], [(0, 0), (-8, 8)], [(0, 0), (0, -1)]] {
        let outside = forged(&[(1, 0)], &buffers, &[], false, &body);
        assert!(matches!(refusal(DataType::Int32, &outside), Error::Buffers));
    }
    let overlapping = forged(&[(1, 0)], &[(0, 40), (0, 40)], &[], false, &body);
    assert!(matches!(refusal(DataType::Int32, &overlapping), Error::Buffers));

    let fault = |data_type, message: &[u8]| match refusal(data_type, message) {
        Error::Column { fault, .. } => fault,
        error => panic!("{error}"),
    };
    let short = forged(&[(17, 0)], &[(0, 0), (0, 64)], &[], false, &body);
    assert!(matches!(fault(DataType::Int32, &short), Fault::Short { needed: 68, actual: 64 }));
    let no_nulls = forged(&[(1, 1)], &[(0, 1), (8, 4)], &[], false, &[255; 64]);
    assert!(matches!(fault(DataType::Int32, &no_nulls), Fault::NullCount));
    let left_over = forged(&[(1, 0)], &[(0, 0), (0, 4), (8, 4)], &[], false, &body);
    assert!(matches!(fault(DataType::Int32, &left_over), Fault::Shape));
    let many_views = forged(&[(1, 0)], &[(0, 0), (0, 16)], &[i64::MAX], false, &body);
    assert!(matches!(fault(DataType::Utf8View, &many_views), Fault::Shape));
    let descending: Vec<u8> = [0_i32, 3, 1].iter().flat_map(|offset| offset.to_le_bytes()).collect();
    let descending =
        forged(&[(2, 0)], &[(0, 0), (0, 12), (12, 3)], &[], false, &[&descending[..], b"abc"].concat());
    assert!(matches!(fault(DataType::Utf8, &descending), Fault::Offsets));
    let huge = DataType::new_fixed_size_list(DataType::Null, i32::MAX, true);
    let endless = forged(&[(i32::MAX.into(), 0), (1, 1)], &[(0, 0)], &[], false, &[]);
    assert!(matches!(fault(huge, &endless), Fault::Child { actual: 1, .. }));
}

/// A batch of one array, whose buffers are `buffers`, each padded to 16 bytes.
fn forged_array(nodes: &[(i64, i64)], buffers: &[&[u8]], variadic: &[i64]) -> Vec<u8> {
    let (mut ranges, mut body) = (Vec::new(), Vec::new());
    for buffer in buffers {
        ranges.push((body.len() as i64, buffer.len() as i64));
        body.extend_from_slice(buffer);
        body.resize(body.len().next_multiple_of(16), 0);
    }
    forged(nodes, &ranges, variadic, false, &body)
}

/// C++ writes the offsets of an array that is cut to no rows as they were.
#[test]
fn offsets_of_nothing_may_be_any() {
    let offsets = [3_i32, 5].map(i32::to_le_bytes).concat();
    let long = [3_i64, 5].map(i64::to_le_bytes).concat();
    let item = || Arc::new(Field::new_list_field(DataType::Int32, true));
    refusal_of_none(DataType::Utf8, &forged_array(&[(0, 0)], &[&[], &offsets, &[]], &[]));
    refusal_of_none(DataType::LargeBinary, &forged_array(&[(0, 0)], &[&[], &long, &[]], &[]));
    refusal_of_none(
        DataType::List(item()),
        &forged_array(&[(0, 0), (0, 0)], &[&[], &offsets, &[], &[]], &[]),
    );
    refusal_of_none(
        DataType::LargeList(item()),
        &forged_array(&[(0, 0), (0, 0)], &[&[], &long, &[], &[]], &[]),
    );
}

/// Each of these numbers is used as an index, without a check, by whoever reads the array.
#[test]
fn values_that_point_outside_are_refused() {
    let bytes = |numbers: &[i32]| numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
    let long = |numbers: &[i64]| numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
    let view = |len: u32, buffer: u32, offset: u32| {
        bytes(&[len, u32::from_le_bytes(*b"aaaa"), buffer, offset].map(u32::cast_signed))
    };
    let text = [b'a'; 20];
    let item = || Arc::new(Field::new_list_field(DataType::Int32, true));
    let members =
        || UnionFields::try_new([3, 5], ["x", "y"].map(|n| Field::new(n, DataType::Int32, true))).unwrap();
    let (dense, sparse) =
        (DataType::Union(members(), UnionMode::Dense), DataType::Union(members(), UnionMode::Sparse));
    let run_ends = |ends: &[i32]| {
        forged_array(&[(4, 0), (2, 0), (2, 0)], &[&[], &bytes(ends), &[], &bytes(&[7, 8])], &[])
    };
    let runs = || {
        let ends = Arc::new(Field::new("run_ends", DataType::Int32, false));
        DataType::RunEndEncoded(ends, Arc::new(Field::new("values", DataType::Int32, true)))
    };
    let lists = |offset: &[u8], size: &[u8]| {
        forged_array(&[(1, 0), (2, 0)], &[&[], offset, size, &[], &bytes(&[1, 2])], &[])
    };
    let unions = |ids: &[u8], offsets: Option<&[u8]>| {
        let mut buffers = vec![ids];
        buffers.extend(offsets);
        let (none, values) = (&[][..], bytes(&[1, 2]));
        buffers.extend([none, &values, none, &values]);
        forged_array(&[(2, 0), (2, 0), (2, 0)], &buffers, &[])
    };
    let dictionary = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
    let strings = |offsets: &[u8]| forged_array(&[(2, 0)], &[&[], offsets, b"abc"], &[]);
    for (data_type, message) in [
        (DataType::Utf8, strings(&bytes(&[0, 2, 4]))),
        (DataType::Utf8, strings(&bytes(&[-1, 2, 3]))),
        (DataType::Binary, strings(&bytes(&[0, 4, 3]))),
        (DataType::LargeUtf8, strings(&long(&[0, 1, i64::MAX]))),
        (DataType::LargeBinary, strings(&long(&[0, i64::MIN, 3]))),
        (DataType::Utf8View, forged_array(&[(1, 0)], &[&[], &view(20, 1, 0), &text], &[1])),
        (DataType::Utf8View, forged_array(&[(1, 0)], &[&[], &view(20, 0, 0)], &[0])),
        (DataType::BinaryView, forged_array(&[(1, 0)], &[&[], &view(20, 0, 1), &text], &[1])),
        (DataType::BinaryView, forged_array(&[(1, 0)], &[&[], &view(20, 0, u32::MAX), &text], &[1])),
        (DataType::BinaryView, forged_array(&[(1, 0)], &[&[], &view(u32::MAX, 0, 0), &text], &[1])),
        (DataType::ListView(item()), lists(&bytes(&[1]), &bytes(&[2]))),
        (DataType::ListView(item()), lists(&bytes(&[-1]), &bytes(&[1]))),
        (DataType::LargeListView(item()), lists(&long(&[i64::MAX]), &long(&[i64::MAX]))),
        (dense.clone(), unions(&[3, 4], Some(&bytes(&[0, 0])))),
        (dense.clone(), unions(&[3, 5], Some(&bytes(&[0, 2])))),
        (dense, unions(&[3, 5], Some(&bytes(&[0, -1])))),
        (sparse.clone(), unions(&[3, 255], None)),
        (sparse, unions(&[0, 3], None)),
        (runs(), run_ends(&[2, 3])),
        (runs(), run_ends(&[0, 4])),
        (runs(), run_ends(&[4, 4])),
        (runs(), run_ends(&[-1, 4])),
        // There is no dictionary, so no key is right.
        (dictionary, forged_array(&[(1, 0)], &[&[], &bytes(&[0])], &[])),
    ] {
        let error = refusal(data_type.clone(), &message);
        let Error::Column { fault, .. } = error else { panic!("{data_type}: {error}") };
        use Fault::{Key, ListView, Offsets, RunEnds, Union, View};
        assert!(
            matches!(fault, Offsets | View | ListView | Union | RunEnds | Key { .. }),
            "{data_type}: {fault}"
        );
    }
    // They are refused for that alone.
    for (data_type, message) in [
        (DataType::Utf8, strings(&bytes(&[0, 2, 3]))),
        (DataType::BinaryView, forged_array(&[(1, 0)], &[&[], &view(20, 0, 0), &text], &[1])),
        (DataType::ListView(item()), lists(&bytes(&[1]), &bytes(&[1]))),
        (runs(), run_ends(&[2, 4])),
        (DataType::Union(members(), UnionMode::Dense), unions(&[3, 5], Some(&bytes(&[0, 1])))),
        (DataType::Union(members(), UnionMode::Sparse), unions(&[3, 5], None)),
    ] {
        refusal_of_none(data_type, &message);
    }
}

#[test]
fn a_view_does_not_cut_a_character() {
    // "é" is bytes 4 and 5, and the last two.
    let data = "aaaaé".repeat(4);
    let views = |start: usize, len: usize| {
        let data = data.as_bytes();
        let prefix = u32::from_le_bytes(data[start..start + 4].try_into().unwrap());
        let view = len as u128 | u128::from(prefix) << 32 | (start as u128) << 96;
        let body = [&view.to_le_bytes(), data].concat();
        forged(&[(1, 0)], &[(0, 0), (0, 16), (16, data.len() as i64)], &[1], false, &body)
    };
    for (start, len) in [(5, 13), (0, 17), (5, 14)] {
        let error = refusal(DataType::Utf8View, &views(start, len));
        assert!(matches!(error, Error::Column { fault: Fault::Utf8, .. }), "{start} {len} {error}");
        refusal_of_none(DataType::BinaryView, &views(start, len));
    }
    refusal_of_none(DataType::Utf8View, &views(0, 24));
    refusal_of_none(DataType::Utf8View, &views(4, 14));
}

/// A delta of no values for dictionary `id`.
fn empty_delta(id: i64) -> Vec<u8> {
    delta_without_body(id, &[0], 3)
}

/// A delta without a body for dictionary `id`: of arrays of these lengths, and so many buffers, all empty.
fn delta_without_body(id: i64, lengths: &[i64], buffers: usize) -> Vec<u8> {
    let mut builder = flatbuffers::FlatBufferBuilder::new();
    let nodes: Vec<_> = lengths.iter().map(|len| ipc::FieldNode::new(*len, 0)).collect();
    let nodes = builder.create_vector(&nodes);
    let buffers = builder.create_vector(&vec![ipc::Buffer::new(0, 0); buffers]);
    let mut batch = ipc::RecordBatchBuilder::new(&mut builder);
    batch.add_length(lengths[0]);
    batch.add_nodes(nodes);
    batch.add_buffers(buffers);
    let batch = batch.finish();
    let mut dictionary = ipc::DictionaryBatchBuilder::new(&mut builder);
    dictionary.add_id(id);
    dictionary.add_isDelta(true);
    dictionary.add_data(batch);
    let dictionary = dictionary.finish().as_union_value();
    let mut message = ipc::MessageBuilder::new(&mut builder);
    message.add_version(ipc::MetadataVersion::V5);
    message.add_header_type(ipc::MessageHeader::DictionaryBatch);
    message.add_header(dictionary);
    let message = message.finish();
    builder.finish(message, None);
    let metadata = builder.finished_data();
    [&[255; 4], &(metadata.len() as u32).to_le_bytes()[..], metadata].concat()
}

#[test]
fn deltas_of_nothing_do_not_pile_up() {
    let words: ArrayRef = Arc::new(StringArray::from(vec!["a"]));
    let words = arrays::dictionary(&mut arrays::Random(1), &DataType::Int8, words, 3, None);
    let mut stream = stream(&[RecordBatch::try_from_iter([("c", words)]).unwrap()]);
    stream.truncate(stream.len() - PREFIX); // without its end
    let limits = Limits { dictionaries: 100_000, ..Limits::default() };
    let decode = |deltas: usize| {
        let stream = [&stream[..], &empty_delta(0).repeat(deltas), &[255; 4], &[0; 4]].concat();
        feed(&mut Decoder::new(DecodeOptions::default().with_limits(limits)), &stream, aligned)
    };
    assert_eq!(decode(100).unwrap().len(), 1);
    let error = decode(1000).unwrap_err();
    assert!(matches!(error, Error::Dictionary { fault: Fault::TooLarge { .. }, .. }), "{error}");
}

/// Values of no bytes, as many as an array may have, many times over. Joined, they would take a bit each, since one is null.
#[test]
fn deltas_without_bytes_have_no_more_values_than_an_array_may() {
    let null = || Some(NullBuffer::new_null(1));
    let nothing =
        |len| ArrayData::builder(DataType::FixedSizeBinary(0)).len(len).add_buffer(Buffer::default());
    let item = Arc::new(Field::new_list_field(DataType::FixedSizeBinary(0), true));
    let list = DataType::FixedSizeList(item, 1 << 30);
    let lists =
        ArrayData::builder(list).len(1).nulls(null()).add_child_data(nothing(1 << 30).build().unwrap());
    for (values, delta) in [
        (nothing(1).nulls(null()), delta_without_body(0, &[i32::MAX.into()], 2)),
        (lists, delta_without_body(0, &[1, 1 << 30], 3)),
    ] {
        let values = make_array(values.build().unwrap());
        let array = arrays::dictionary(&mut arrays::Random(1), &DataType::Int8, values, 3, None);
        let batch = RecordBatch::try_from_iter([("c", array)]).unwrap();
        let mut encoder = Encoder::new(&batch.schema(), EncodeOptions::default()).unwrap();
        let bytes = |message: &Message| message.slices().flatten().copied().collect::<Vec<u8>>();
        let schema = bytes(&encoder.schema());
        let [dictionary, batch] = &encoder.batch(&batch).unwrap()[..] else { panic!("two messages") };
        let decode = |deltas: usize| {
            let deltas = delta.repeat(deltas);
            let end = [&[255; 4][..], &[0; 4]].concat();
            let stream = [schema.clone(), bytes(dictionary), deltas, bytes(batch), end].concat();
            feed(&mut Decoder::default(), &stream, aligned)
        };
        assert_eq!(decode(0).unwrap().len(), 1);
        let error = decode(1000).unwrap_err();
        assert!(matches!(error, Error::Dictionary { id: 0, fault: Fault::Length }), "{error}");
    }
}

/// A hundred thousand views that name nearly the same million bytes, which are no string as a whole: each begins one further on.
/// All bytes are those of a string, so that none ends the reading but what it costs.
#[test]
fn strings_that_share_bytes_cost_no_more_than_there_are() {
    let (views, bytes) = (100_000_usize, 1_000_000_usize);
    let prefix = u128::from(u32::from_le_bytes(*b"aaaa")) << 32;
    let view = |first: usize| (bytes - 1 - first) as u128 | prefix | (first as u128) << 96;
    let mut body: Vec<u8> = (0..views).flat_map(|first| view(first).to_le_bytes()).collect();
    body.resize(views * 16 + bytes - 1, b'a');
    body.push(0xff);
    let buffers = [(0, 0), (0, views as i64 * 16), (views as i64 * 16, bytes as i64)];
    let message = forged(&[(views as i64, 0)], &buffers, &[1], false, &body);
    let error = refusal(DataType::Utf8View, &message);
    assert!(matches!(error, Error::Column { fault: Fault::SharedViews, .. }), "{error}");
}

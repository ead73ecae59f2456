//! What is copied and what is not, what is sent again, what is refused.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod arrays;

use std::collections::HashMap;
use std::io::Cursor;
use std::sync::Arc;

use arrow_array::types::Int32Type;
use arrow_array::{
    Array, ArrayRef, BooleanArray, Decimal128Array, Int32Array, Int64Array, ListViewArray, RecordBatch,
    RecordBatchOptions, RunArray, StringArray, StringViewArray, UnionArray, make_array,
};
use arrow_buffer::{Buffer, NullBuffer, ScalarBuffer};
use arrow_data::{ArrayData, ByteView};
use arrow_ipc::MetadataVersion;
use arrow_ipc::writer::{IpcWriteOptions, StreamWriter};
use arrow_schema::{DataType, Field, Schema, UnionFields, UnionMode};
use thallus_columnar::{
    DecodeOptions, Decoder, EncodeOptions, Encoder, Error, Fault, Kind, Limits, Message, Misaligned, Need,
    StreamReader,
};

use arrays::{aligned, feed, stream};

fn batch(column: ArrayRef) -> RecordBatch {
    RecordBatch::try_from_iter([("c", column)]).unwrap()
}

/// The message of a batch without dictionaries.
fn encoded(column: impl Array + 'static) -> Message {
    let batch = batch(Arc::new(column));
    let mut messages =
        Encoder::new(&batch.schema(), EncodeOptions::default()).unwrap().batch(&batch).unwrap();
    assert_eq!(messages.len(), 1);
    messages.remove(0)
}

#[test]
fn slices_copy_only_bitmaps_inside_a_byte_and_offsets() {
    let numbers = Int64Array::from_iter((0..1000).map(|i| (i % 3 > 0).then_some(i)));
    let bits = BooleanArray::from_iter((0..1000).map(|i| Some(i % 3 > 0)));
    let strings = StringArray::from_iter_values((0..1000).map(|i| format!("{i:04}")));
    let whole = Int64Array::from_iter_values(0..1000);

    assert_eq!(encoded(whole.slice(3, 500)).copied_bytes(), 0);
    assert_eq!(encoded(numbers.slice(16, 500)).copied_bytes(), 0);
    assert_eq!(encoded(numbers.slice(3, 500)).copied_bytes(), 500_usize.div_ceil(8));
    assert_eq!(encoded(bits.slice(8, 500)).copied_bytes(), 0);
    assert_eq!(encoded(bits.slice(9, 500)).copied_bytes(), 500_usize.div_ceil(8));
    assert_eq!(encoded(strings.slice(0, 500)).copied_bytes(), 0);
    assert_eq!(encoded(strings.slice(1, 500)).copied_bytes(), 501 * 4);

    // What lies outside of the slice is not sent: 10 offsets and 10 strings of 4 bytes, each in 64.
    assert_eq!(encoded(strings.slice(700, 10)).body_len(), 128);
    assert_eq!(encoded(whole.slice(700, 8)).body_len(), 64);
}

#[test]
fn views_leave_out_buffers_that_no_view_uses() {
    let long = "x".repeat(5000);
    let mut builder = arrow_array::builder::StringViewBuilder::new().with_fixed_block_size(5000);
    (0..10).for_each(|_| builder.append_value(&long));
    let views: StringViewArray = builder.finish();
    assert_eq!(views.data_buffers().len(), 10);
    let one = encoded(views.slice(4, 1));
    assert_eq!((one.body_len(), one.copied_bytes()), (64 + 5000_usize.next_multiple_of(64), 0));
}

#[test]
fn views_are_copied_if_that_is_asked_for_and_pays() {
    let text = |n: usize| match n % 4 {
        0 => Some("short".to_owned()),
        1 => None,
        _ => Some(format!("{n:1000}")),
    };
    let mut builder = arrow_array::builder::StringViewBuilder::new().with_fixed_block_size(1 << 20);
    (0..1000).for_each(|n| builder.append_option(text(n)));
    let whole = builder.finish();
    let part = batch(Arc::new(whole.slice(500, 100)));
    let options = EncodeOptions { compact_views: true, ..EncodeOptions::default() };
    for (options, sent) in [(EncodeOptions::default(), 300_000), (options, 50_000)] {
        let mut encoder = Encoder::new(&part.schema(), options).unwrap();
        let message = encoder.batch(&part).unwrap().remove(0);
        assert!((sent..sent + 3_000).contains(&message.body_len()), "{}", message.body_len());
        let mut bytes = Vec::new();
        [encoder.schema(), message, encoder.end()].iter().for_each(|one| one.write_to(&mut bytes).unwrap());
        let mut decoder = Decoder::new(DecodeOptions::default());
        assert_eq!(feed(&mut decoder, &bytes, aligned).unwrap(), std::slice::from_ref(&part));
    }
    // Most of it is used.
    let mut encoder = Encoder::new(&part.schema(), options).unwrap();
    assert_eq!(encoder.batch(&batch(Arc::new(whole.slice(0, 600)))).unwrap()[0].copied_bytes(), 0);
}

/// As the Parquet reader makes them from a page with a dictionary: few strings, each behind its length, which many rows name.
#[test]
fn strings_that_many_rows_name_may_lie_between_other_bytes() {
    let (mut page, mut distinct) = (Vec::new(), Vec::new());
    for n in 0..3 {
        let text = format!("{n:0200}");
        page.extend_from_slice(&200_u32.to_le_bytes());
        let offset = u32::try_from(page.len()).unwrap();
        page.extend_from_slice(text.as_bytes());
        let prefix = u32::from_le_bytes(*b"0000");
        distinct.push(ByteView { length: 200, prefix, buffer_index: 0, offset }.as_u128());
    }
    assert!(std::str::from_utf8(&page).is_err());
    let views: ScalarBuffer<u128> = (0..8192).map(|row| distinct[row % 3]).collect();
    let views = StringViewArray::try_new(views, vec![Buffer::from_vec(page)], None).unwrap();
    let batch = batch(Arc::new(views));
    let bytes = stream(std::slice::from_ref(&batch));
    assert_eq!(feed(&mut Decoder::default(), &bytes, aligned).unwrap(), [batch]);
}

#[test]
fn unused_values_of_list_views_and_dense_unions_are_cut_off_if_it_pays() {
    let field = Arc::new(Field::new_list_field(DataType::Int32, true));
    let values: ArrayRef = Arc::new(Int32Array::from_iter_values(0..1000));
    let offsets: ScalarBuffer<i32> = (0..10).map(|i| 500 + i).collect();
    let sizes = ScalarBuffer::from(vec![2; 10]);
    let far = encoded(ListViewArray::new(field.clone(), offsets, sizes.clone(), values.clone(), None));
    assert_eq!((far.copied_bytes(), far.body_len()), (10 * 4, 64 * 3));
    let near: ScalarBuffer<i32> = (0..10).map(|i| 9 + i).collect();
    let near = encoded(ListViewArray::new(field, near, sizes, values.clone(), None));
    assert_eq!((near.copied_bytes(), near.body_len()), (0, 64 * 4));

    let fields = UnionFields::try_new([7], [Field::new("u", DataType::Int32, true)]).unwrap();
    let union = UnionArray::try_new(fields, vec![7; 1000].into(), Some((0..1000).collect()), vec![values]);
    let union = union.unwrap();
    assert_eq!(encoded(union.clone()).copied_bytes(), 0);
    assert_eq!(encoded(union.slice(0, 16)).copied_bytes(), 0);
    let far = encoded(union.slice(900, 16));
    assert_eq!((far.copied_bytes(), far.body_len()), (16 * 4, 64 * 3));
}

#[test]
#[allow(unsafe_code, reason = "what another language may hand over, and no safe constructor makes")]
fn what_stands_below_a_null_does_not_matter() {
    let nulls = NullBuffer::from(vec![true, false, true]);
    let item = Arc::new(Field::new_list_field(DataType::Int32, true));
    let values = Int32Array::from_iter_values(0..1000).to_data();
    let lists = ArrayData::builder(DataType::ListView(item))
        .len(3)
        .buffers(vec![vec![600, i32::MIN, 700].into(), vec![1, -7, 2].into()])
        .nulls(Some(nulls.clone()))
        .add_child_data(values);
    let long = Buffer::from(vec![b'a'; 1000]);
    let view = |index: u128| 20 | u128::from(u32::from_le_bytes(*b"aaaa")) << 32 | index << 64;
    let views = ArrayData::builder(DataType::Utf8View)
        .len(3)
        .buffers(vec![vec![view(0), view(77) | u128::from(u32::MAX) << 96, view(0)].into(), long])
        .nulls(Some(nulls));
    for (array, body_len) in [(lists, 64 * 3 + 4000_usize.next_multiple_of(64)), (views, 64 * 3)] {
        // SAFETY: only the encoder reads it, which expects this.
        let array = make_array(unsafe { array.build_unchecked() });
        let message = encoded(array);
        assert_eq!((message.copied_bytes(), message.body_len()), (0, body_len));
    }
}

#[test]
fn run_ends_are_copied_only_behind_the_first() {
    let ends = Int32Array::from(vec![10, 20, 30, 40]);
    let runs = RunArray::<Int32Type>::try_new(&ends, &Int64Array::from(vec![1, 2, 3, 4])).unwrap();
    assert_eq!(encoded(runs.clone()).copied_bytes(), 0);
    assert_eq!(encoded(runs.slice(0, 15)).copied_bytes(), 0);
    assert_eq!(encoded(runs.slice(15, 10)).copied_bytes(), 2 * 4);
}

#[test]
fn unions_and_run_ends_of_metadata_version_4_have_a_bitmap() {
    let runs =
        RunArray::<Int32Type>::try_new(&vec![2, 3].into(), &StringArray::from(vec!["a", "b"])).unwrap();
    let fields = UnionFields::try_new([0], [Field::new("x", DataType::Int32, true)]).unwrap();
    let union =
        UnionArray::try_new(fields, vec![0; 3].into(), None, vec![Arc::new(Int32Array::from(vec![1, 2, 3]))]);
    let columns: [(_, ArrayRef); 2] = [("runs", Arc::new(runs)), ("union", Arc::new(union.unwrap()))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let options = IpcWriteOptions::try_new(8, false, MetadataVersion::V4).unwrap();
    let mut writer = StreamWriter::try_new_with_options(Vec::new(), &batch.schema(), options).unwrap();
    writer.write(&batch).unwrap();
    let stream = writer.into_inner().unwrap();
    let got = StreamReader::new(Cursor::new(&stream), DecodeOptions::default()).unwrap();
    assert_eq!(got.collect::<Result<Vec<_>, _>>().unwrap(), [batch]);
}

#[test]
fn a_dictionary_is_sent_once_and_again_when_it_changes() {
    let words = |words: [&str; 2]| -> ArrayRef { Arc::new(StringArray::from(words.to_vec())) };
    let random = &mut arrays::Random(3);
    let mut column =
        |values: &ArrayRef| batch(arrays::dictionary(random, &DataType::UInt8, values.clone(), 9, None));
    let first = words(["a", "b"]);
    let batches = [column(&first), column(&first), column(&words(["a", "b"])), column(&words(["a", "c"]))];
    let mut encoder = Encoder::new(&batches[0].schema(), EncodeOptions::default()).unwrap();
    let kinds: Vec<Vec<Kind>> = batches
        .iter()
        .map(|batch| encoder.batch(batch).unwrap().iter().map(Message::kind).collect())
        .collect();
    use Kind::{Batch, Dictionary};
    assert_eq!(kinds, [vec![Dictionary, Batch], vec![Batch], vec![Batch], vec![Dictionary, Batch]]);
}

#[test]
fn rows_without_columns_and_columns_without_rows() {
    let options = RecordBatchOptions::new().with_row_count(Some(7));
    let no_columns = RecordBatch::try_new_with_options(Arc::new(Schema::empty()), vec![], &options).unwrap();
    let no_rows = batch(Arc::new(StringArray::from(Vec::<&str>::new())));
    for batch in [no_columns, no_rows] {
        let stream = stream(std::slice::from_ref(&batch));
        let got: Vec<_> = StreamReader::new(Cursor::new(&stream), DecodeOptions::default())
            .unwrap()
            .collect::<Result<_, _>>()
            .unwrap();
        assert_eq!(got, [batch]);
    }
}

#[test]
fn a_batch_carries_metadata() {
    let batch = batch(Arc::new(Int32Array::from(vec![1])));
    let mut encoder = Encoder::new(&batch.schema(), EncodeOptions::default()).unwrap();
    let metadata = HashMap::from([("a".to_owned(), "b".to_owned())]);
    let mut bytes = Vec::new();
    encoder.schema().write_to(&mut bytes).unwrap();
    encoder.batch_with_metadata(&batch, &metadata).unwrap()[0].write_to(&mut bytes).unwrap();
    let mut reader = StreamReader::new(Cursor::new(&bytes), DecodeOptions::default()).unwrap();
    assert!(reader.decoder().custom_metadata().is_empty());
    reader.next().unwrap().unwrap();
    assert_eq!(reader.decoder().custom_metadata(), &metadata);
    assert!(reader.next().is_none(), "a stream may end without its marker");
}

#[test]
fn an_encoder_refuses_other_columns_and_what_the_format_lacks() {
    let numbers = batch(Arc::new(Int32Array::from(vec![1])));
    let strings = batch(Arc::new(StringArray::from(vec!["a"])));
    let mut encoder = Encoder::new(&numbers.schema(), EncodeOptions::default()).unwrap();
    assert!(matches!(encoder.batch(&strings), Err(Error::SchemaMismatch)));

    let inner = DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Utf8));
    let outer = DataType::Dictionary(Box::new(DataType::Int8), Box::new(inner));
    let schema = Schema::new(vec![Field::new("c", outer, true)]);
    assert!(matches!(Encoder::new(&schema, EncodeOptions::default()), Err(Error::Unsupported(_))));

    let nested = |levels| (1..levels).fold(DataType::Int8, |inner, _| DataType::new_list(inner, true));
    let schema = |levels| Schema::new(vec![Field::new("c", nested(levels), true)]);
    assert!(matches!(Encoder::new(&schema(65), EncodeOptions::default()), Err(Error::Unsupported(_))));
    let deepest = Encoder::new(&schema(64), EncodeOptions::default()).unwrap();
    let stream = [deepest.schema().header(), deepest.end().header()].concat();
    assert_eq!(feed(&mut Decoder::default(), &stream, aligned).unwrap(), []);

    let nothing = DataType::Union(UnionFields::empty(), UnionMode::Sparse);
    let schema = Schema::new(vec![Field::new("c", nothing, true)]);
    assert!(matches!(Encoder::new(&schema, EncodeOptions::default()), Err(Error::Field { .. })));
}

#[test]
fn a_body_is_given_back_when_the_last_column_is_dropped() {
    let columns: [(&str, ArrayRef); 2] =
        [("a", Arc::new(Int32Array::from(vec![1, 2]))), ("b", Arc::new(StringArray::from(vec!["x", "y"])))];
    let stream = stream(&[RecordBatch::try_from_iter(columns).unwrap()]);
    let mut lent = Vec::new();
    let batches = feed(&mut Decoder::default(), &stream, |body| {
        lent.push(aligned(body));
        lent.last().unwrap().clone()
    });
    let body = lent.pop().unwrap();
    let column = batches.unwrap()[0].column(1).clone();
    assert!(body.strong_count() > 1);
    drop(column);
    assert_eq!(body.strong_count(), 1);
}

#[test]
fn a_misaligned_body_is_refused_or_copied_buffer_by_buffer() {
    let column = Decimal128Array::from(vec![1, 2, 3]).with_precision_and_scale(10, 2).unwrap();
    let batch = batch(Arc::new(column));
    let stream = stream(std::slice::from_ref(&batch));
    let lend = |body: &[u8]| aligned(&[&[0; 8], body].concat()).slice(8);

    let mut strict = Decoder::default();
    let error = feed(&mut strict, &stream, lend).unwrap_err();
    assert!(matches!(&error, Error::Column { fault: Fault::Misaligned { alignment: 16 }, .. }), "{error}");
    assert_eq!(strict.need(), Need::Nothing);

    let mut lenient = Decoder::new(DecodeOptions::default().with_misaligned(Misaligned::Copy));
    assert_eq!(feed(&mut lenient, &stream, lend).unwrap(), [batch]);
    assert_eq!(lenient.copied_bytes(), 3 * 16);
}

#[test]
fn limits_hold_before_anything_is_allocated() {
    let nested = (0..40).fold(DataType::Int8, |inner, _| DataType::new_list(inner, true));
    let deep = RecordBatch::new_empty(Arc::new(Schema::new(vec![Field::new("c", nested, true)])));
    let wide = batch(Arc::new(Int32Array::from_iter_values(0..1000)));
    let words: ArrayRef = Arc::new(StringArray::from(vec!["a".repeat(1000)]));
    let words = batch(arrays::dictionary(&mut arrays::Random(1), &DataType::Int8, words, 3, None));

    let refused = |batch: &RecordBatch, limits: Limits| {
        let mut decoder = Decoder::new(DecodeOptions::default().with_limits(limits));
        feed(&mut decoder, &stream(std::slice::from_ref(batch)), aligned).unwrap_err()
    };
    let all = Limits::default();
    assert!(matches!(refused(&wide, Limits { metadata: 100, ..all }), Error::Limit { what: "metadata", .. }));
    assert!(matches!(refused(&wide, Limits { body: 3999, ..all }), Error::Limit { what: "body", .. }));
    assert!(matches!(refused(&wide, Limits { rows: 999, ..all }), Error::Limit { what: "rows", .. }));
    assert!(matches!(
        refused(&deep, Limits { depth: 40, ..all }),
        Error::Field { .. } | Error::Flatbuffer(_)
    ));
    let error = refused(&words, Limits { dictionaries: 1000, ..all });
    assert!(matches!(error, Error::Dictionary { fault: Fault::TooLarge { .. }, .. }), "{error}");
    let depth = Limits { depth: 41, ..all };
    let mut decoder = Decoder::new(DecodeOptions::default().with_limits(depth));
    feed(&mut decoder, &stream(&[deep]), aligned).unwrap();
}

#[test]
fn a_decoder_that_is_used_wrongly_says_so() {
    let mut decoder = Decoder::default();
    assert!(matches!(decoder.metadata(&[]), Err(Error::OutOfOrder)));
    assert_eq!(decoder.need(), Need::Nothing);
    let mut decoder = Decoder::default();
    assert!(matches!(decoder.prefix(*b"ARROW1\0\0"), Err(Error::Continuation)));
    let mut decoder = Decoder::default();
    assert!(matches!(decoder.prefix([255; 8]), Err(Error::NegativeLength(-1))));

    let stream = stream(&[batch(Arc::new(Int32Array::from(vec![1])))]);
    let schema_len = 8 + u32::from_le_bytes(stream[4..8].try_into().unwrap()) as usize;
    let error = feed(&mut Decoder::default(), &stream[schema_len..], aligned).unwrap_err();
    assert!(matches!(error, Error::Metadata(_)), "{error}");
    let twice = [&stream[..schema_len], &stream].concat();
    let error = feed(&mut Decoder::default(), &twice, aligned).unwrap_err();
    assert!(matches!(error, Error::Metadata("a second schema")), "{error}");
}

//! Arrays of any type, made up from a seed, and streams of them.

#![allow(dead_code, reason = "each test uses its part")]

use std::sync::Arc;

use arrow_array::builder::GenericByteViewBuilder;
use arrow_array::types::{BinaryViewType, ByteViewType, Int16Type, Int32Type, Int64Type, StringViewType};
use arrow_array::{
    Array, ArrayRef, BinaryArray, BooleanArray, FixedSizeListArray, GenericListArray, GenericListViewArray,
    LargeBinaryArray, LargeStringArray, MapArray, NullArray, OffsetSizeTrait, RecordBatch,
    RecordBatchOptions, RunArray, StringArray, StructArray, UnionArray, make_array,
};
use arrow_buffer::{ArrowNativeType, Buffer, MutableBuffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_data::{ArrayData, BufferSpec, layout};
use arrow_schema::{
    DataType, Field, FieldRef, Fields, IntervalUnit, Schema, SchemaRef, TimeUnit, UnionFields, UnionMode,
};
use thallus_columnar::{Decoder, EncodeOptions, Encoder, Error, Event, Need, PREFIX};

/// SplitMix64: seeds that proptest shrinks and prints are all the state there is.
#[derive(Debug, Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Less than `bound`, which is above 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }

    fn string(&mut self) -> String {
        const LETTERS: [&str; 8] = ["a", "B", "7", " ", "é", "ß", "→", "𝄞"];
        let len = if self.one_in(6) { 40 } else { 9 };
        (0..self.below(len)).map(|_| LETTERS[self.below(8)]).collect()
    }
}

pub(crate) fn field(name: &str, data_type: DataType, nullable: bool) -> FieldRef {
    Arc::new(Field::new(name, data_type, nullable))
}

/// One of each type without children.
pub(crate) fn flat_types() -> Vec<DataType> {
    use DataType::*;
    let mut types = vec![Null, Boolean, Int8, Int16, Int32, Int64, UInt8, UInt16, UInt32, UInt64];
    types.extend([Float16, Float32, Float64, Date32, Date64]);
    types.extend([Time32(TimeUnit::Second), Time32(TimeUnit::Millisecond)]);
    types.extend([Time64(TimeUnit::Microsecond), Time64(TimeUnit::Nanosecond)]);
    for unit in [TimeUnit::Second, TimeUnit::Millisecond, TimeUnit::Microsecond, TimeUnit::Nanosecond] {
        types.extend([Timestamp(unit, None), Timestamp(unit, Some("Europe/Berlin".into())), Duration(unit)]);
    }
    types.extend([IntervalUnit::YearMonth, IntervalUnit::DayTime, IntervalUnit::MonthDayNano].map(Interval));
    types.extend([Decimal32(7, 2), Decimal64(15, 3), Decimal128(38, 10), Decimal256(60, 0)]);
    types.extend([Utf8, LargeUtf8, Utf8View, Binary, LargeBinary, BinaryView]);
    types.extend([FixedSizeBinary(5), FixedSizeBinary(0)]);
    types
}

/// A type that nests at most `depth` levels.
pub(crate) fn any_type(random: &mut Random, depth: usize) -> DataType {
    let flat = flat_types();
    if depth == 0 || random.one_in(3) {
        return flat[random.below(flat.len())].clone();
    }
    let child = |random: &mut Random, name: &str| {
        let data_type = any_type(random, depth - 1);
        let nullable = any_nullable(random, &data_type);
        field(name, data_type, nullable)
    };
    match random.below(11) {
        0 => DataType::List(child(random, "item")),
        1 => DataType::LargeList(child(random, "item")),
        2 => DataType::ListView(child(random, "item")),
        3 => DataType::LargeListView(child(random, "item")),
        4 => DataType::FixedSizeList(child(random, "item"), random.below(4) as i32),
        5 => {
            let fields = (0..random.below(4)).map(|i| child(random, &format!("f{i}")));
            DataType::Struct(fields.collect())
        }
        6 => {
            let entries = Fields::from(vec![field("key", DataType::Utf8, false), child(random, "value")]);
            DataType::Map(field("entries", DataType::Struct(entries), false), random.one_in(2))
        }
        7 | 8 => {
            let fields: Vec<_> = (0..1 + random.below(3))
                .map(|i| field(&format!("u{i}"), any_type(random, depth - 1), true))
                .collect();
            let ids = (0..fields.len() as i8).map(|id| id * 3 + 2);
            let mode = if random.one_in(2) { UnionMode::Sparse } else { UnionMode::Dense };
            DataType::Union(UnionFields::try_new(ids, fields).unwrap(), mode)
        }
        9 => {
            let keys = [DataType::Int8, DataType::Int16, DataType::Int32, DataType::Int64, DataType::UInt8];
            let values = match any_type(random, depth - 1) {
                DataType::Dictionary(_, values) => *values,
                other => other,
            };
            DataType::Dictionary(Box::new(keys[random.below(5)].clone()), Box::new(values))
        }
        _ => {
            let ends = [DataType::Int16, DataType::Int32, DataType::Int64][random.below(3)].clone();
            // C++ has no values without nulls here.
            let values = field("values", any_type(random, depth - 1), true);
            DataType::RunEndEncoded(field("run_ends", ends, false), values)
        }
    }
}

/// Types that may hold nulls without a bitmap of their own are always nullable.
fn any_nullable(random: &mut Random, data_type: &DataType) -> bool {
    use DataType::{Dictionary, Null, RunEndEncoded, Union};
    matches!(data_type, Null | Dictionary(..) | RunEndEncoded(..) | Union(..)) || !random.one_in(4)
}

/// How arrays are made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    /// Arrays at any level may be slices of longer ones, with any offset.
    pub(crate) sliced: bool,
    /// Numbers are small, so that they are valid dates, times of day and decimals too.
    pub(crate) tame: bool,
}

pub(crate) fn any_array(
    random: &mut Random,
    data_type: &DataType,
    len: usize,
    nullable: bool,
    shape: Shape,
) -> ArrayRef {
    if shape.sliced && random.one_in(2) {
        let (before, after) = (random.below(70), random.below(9));
        return whole(random, data_type, before + len + after, nullable, shape).slice(before, len);
    }
    whole(random, data_type, len, nullable, shape)
}

fn any_nulls(random: &mut Random, len: usize, nullable: bool) -> Option<NullBuffer> {
    (nullable && !random.one_in(3)).then(|| (0..len).map(|_| !random.one_in(4)).collect())
}

fn whole(random: &mut Random, data_type: &DataType, len: usize, nullable: bool, shape: Shape) -> ArrayRef {
    let nulls = any_nulls(random, len, nullable);
    match data_type {
        DataType::Null => Arc::new(NullArray::new(len)),
        DataType::Boolean => Arc::new(BooleanArray::new((0..len).map(|_| random.one_in(2)).collect(), nulls)),
        DataType::Utf8 => Arc::new(StringArray::from_iter(strings(random, len, nulls.as_ref()))),
        DataType::LargeUtf8 => Arc::new(LargeStringArray::from_iter(strings(random, len, nulls.as_ref()))),
        DataType::Binary => Arc::new(BinaryArray::from_iter(strings(random, len, nulls.as_ref()))),
        DataType::LargeBinary => Arc::new(LargeBinaryArray::from_iter(strings(random, len, nulls.as_ref()))),
        DataType::Utf8View => views::<StringViewType>(random, len, nulls.as_ref()),
        DataType::BinaryView => views::<BinaryViewType>(random, len, nulls.as_ref()),
        DataType::List(item) => list::<i32>(random, item, len, nulls, shape),
        DataType::LargeList(item) => list::<i64>(random, item, len, nulls, shape),
        DataType::ListView(item) => list_view::<i32>(random, item, len, nulls, shape),
        DataType::LargeListView(item) => list_view::<i64>(random, item, len, nulls, shape),
        DataType::FixedSizeList(item, size) => {
            let values = any_array(random, item.data_type(), len * *size as usize, item.is_nullable(), shape);
            Arc::new(
                FixedSizeListArray::try_new_with_length(item.clone(), *size, values, nulls, len).unwrap(),
            )
        }
        DataType::Struct(fields) => Arc::new(struct_array(random, fields, len, nulls, shape)),
        DataType::Map(entries, sorted) => {
            let offsets = OffsetBuffer::<i32>::from_lengths((0..len).map(|_| random.below(3)));
            let DataType::Struct(fields) = entries.data_type() else { panic!("entries are a struct") };
            let values = struct_array(random, fields, offsets[len].as_usize(), None, shape);
            Arc::new(MapArray::new(entries.clone(), offsets, values, nulls, *sorted))
        }
        DataType::Union(fields, mode) => union(random, fields, *mode, len, shape),
        DataType::Dictionary(keys, values) => {
            let values = {
                let count = 1 + random.below(20);
                any_array(random, values, count, true, shape)
            };
            dictionary(random, keys, values, len, nulls)
        }
        DataType::RunEndEncoded(ends, values) => match ends.data_type() {
            DataType::Int16 => runs::<Int16Type>(random, values, len, shape),
            DataType::Int32 => runs::<Int32Type>(random, values, len, shape),
            _ => runs::<Int64Type>(random, values, len, shape),
        },
        _ => {
            let [BufferSpec::FixedWidth { byte_width, .. }] = layout(data_type).buffers[..] else {
                panic!("{data_type} is not done");
            };
            let mut bytes = MutableBuffer::new(len * byte_width);
            bytes.extend_from_slice(&random.bytes(len * byte_width));
            if shape.tame {
                let most = if *data_type == DataType::Date64 { 0 } else { 63 };
                for value in bytes.chunks_exact_mut(byte_width.max(1)) {
                    value[0] &= most;
                    value[1..].fill(0);
                }
            }
            fixed(data_type, len, bytes.into(), nulls)
        }
    }
}

fn fixed(data_type: &DataType, len: usize, bytes: Buffer, nulls: Option<NullBuffer>) -> ArrayRef {
    let data = ArrayData::builder(data_type.clone()).len(len).add_buffer(bytes).nulls(nulls);
    make_array(data.build().unwrap())
}

fn strings(random: &mut Random, len: usize, nulls: Option<&NullBuffer>) -> Vec<Option<String>> {
    let value = |row| nulls.is_none_or(|nulls| nulls.is_valid(row)).then(|| random.string());
    (0..len).map(value).collect()
}

fn views<T: ByteViewType>(random: &mut Random, len: usize, nulls: Option<&NullBuffer>) -> ArrayRef
where
    String: AsRef<T::Native>,
{
    let mut builder = GenericByteViewBuilder::<T>::new().with_fixed_block_size(64);
    strings(random, len, nulls).iter().for_each(|value| builder.append_option(value.as_ref()));
    Arc::new(builder.finish())
}

fn struct_array(
    random: &mut Random,
    fields: &Fields,
    len: usize,
    nulls: Option<NullBuffer>,
    shape: Shape,
) -> StructArray {
    let child = |field: &FieldRef| any_array(random, field.data_type(), len, field.is_nullable(), shape);
    let children = fields.iter().map(child).collect();
    StructArray::try_new_with_length(fields.clone(), children, nulls, len).unwrap()
}

fn list<O: OffsetSizeTrait>(
    random: &mut Random,
    item: &FieldRef,
    len: usize,
    nulls: Option<NullBuffer>,
    shape: Shape,
) -> ArrayRef {
    let offsets = OffsetBuffer::<O>::from_lengths((0..len).map(|_| random.below(4)));
    let values = any_array(random, item.data_type(), offsets[len].as_usize(), item.is_nullable(), shape);
    Arc::new(GenericListArray::new(item.clone(), offsets, values, nulls))
}

fn list_view<O: OffsetSizeTrait>(
    random: &mut Random,
    item: &FieldRef,
    len: usize,
    nulls: Option<NullBuffer>,
    shape: Shape,
) -> ArrayRef {
    let count = random.below(200);
    let values = any_array(random, item.data_type(), count, item.is_nullable(), shape);
    let mut offsets: Vec<_> = (0..len).map(|_| random.below(count + 1)).collect();
    if let (false, Some(first)) = (shape.sliced, offsets.first_mut()) {
        *first = 0;
    }
    let sizes: Vec<_> = offsets.iter().map(|offset| random.below((count - offset).min(5) + 1)).collect();
    let numbers = |numbers: Vec<usize>| ScalarBuffer::from_iter(numbers.into_iter().map(O::usize_as));
    Arc::new(GenericListViewArray::new(item.clone(), numbers(offsets), numbers(sizes), values, nulls))
}

fn union(random: &mut Random, fields: &UnionFields, mode: UnionMode, len: usize, shape: Shape) -> ArrayRef {
    let ids: Vec<i8> = fields.iter().map(|(id, _)| id).collect();
    let type_ids: Vec<i8> = (0..len).map(|_| ids[random.below(ids.len())]).collect();
    let mut counts = [0_usize; 128];
    let offsets: Vec<i32> = type_ids
        .iter()
        .map(|id| {
            counts[id.as_usize()] += 1;
            counts[id.as_usize()] as i32 - 1
        })
        .collect();
    let children = fields.iter().map(|(id, field)| {
        let len = if mode == UnionMode::Dense { counts[id.as_usize()] } else { len };
        any_array(random, field.data_type(), len, true, shape)
    });
    let children = children.collect();
    let offsets = (mode == UnionMode::Dense).then(|| offsets.into());
    Arc::new(UnionArray::try_new(fields.clone(), type_ids.into(), offsets, children).unwrap())
}

/// Below a null stands any key.
pub(crate) fn dictionary(
    random: &mut Random,
    keys: &DataType,
    values: ArrayRef,
    len: usize,
    nulls: Option<NullBuffer>,
) -> ArrayRef {
    let width = keys.primitive_width().unwrap();
    let mut bytes = MutableBuffer::new(len * width);
    for row in 0..len {
        let valid = nulls.as_ref().is_none_or(|nulls| nulls.is_valid(row));
        let key = if valid { random.below(values.len()) as u64 } else { random.next() };
        bytes.extend_from_slice(&key.to_le_bytes()[..width]);
    }
    let data_type = DataType::Dictionary(Box::new(keys.clone()), Box::new(values.data_type().clone()));
    let data = ArrayData::builder(data_type).len(len).add_buffer(bytes.into()).nulls(nulls);
    make_array(data.add_child_data(values.to_data()).build().unwrap())
}

fn runs<R: arrow_array::types::RunEndIndexType>(
    random: &mut Random,
    values: &FieldRef,
    len: usize,
    shape: Shape,
) -> ArrayRef {
    let mut ends = Vec::new();
    let mut end = 0;
    while end < len {
        end = (end + 1 + random.below(5)).min(len);
        ends.push(R::Native::usize_as(end));
    }
    let count = ends.len();
    let ends = arrow_array::PrimitiveArray::<R>::new(ends.into(), None);
    let array = any_array(random, values.data_type(), count, values.is_nullable(), shape);
    let data_type = DataType::RunEndEncoded(field("run_ends", R::DATA_TYPE, false), values.clone());
    let data = ArrayData::builder(data_type).len(len);
    let data = data.add_child_data(ends.to_data()).add_child_data(array.to_data()).build().unwrap();
    Arc::new(RunArray::<R>::from(data))
}

pub(crate) fn any_schema(random: &mut Random, columns: usize, depth: usize) -> SchemaRef {
    let column = |i| {
        let data_type = any_type(random, depth);
        let nullable = any_nullable(random, &data_type);
        let metadata = if random.one_in(3) { vec![("key".to_owned(), format!("value {i}"))] } else { vec![] };
        Field::new(format!("c{i}"), data_type, nullable).with_metadata(metadata.into_iter().collect())
    };
    let fields: Vec<_> = (0..columns).map(column).collect();
    Arc::new(Schema::new_with_metadata(fields, [("of".to_owned(), "schema".to_owned())].into()))
}

pub(crate) fn any_batch(random: &mut Random, schema: &SchemaRef, rows: usize, shape: Shape) -> RecordBatch {
    let column = |field: &FieldRef| any_array(random, field.data_type(), rows, field.is_nullable(), shape);
    let columns = schema.fields().iter().map(column).collect();
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(schema.clone(), columns, &options).unwrap()
}

/// All memory that an array refers to, with that of its children and dictionaries.
pub(crate) fn memory(array: &ArrayData) -> Vec<Buffer> {
    let mut buffers = array.buffers().to_vec();
    buffers.extend(array.nulls().map(|nulls| nulls.buffer().clone()));
    buffers.extend(array.child_data().iter().flat_map(memory));
    buffers.retain(|buffer| !buffer.is_empty());
    buffers
}

pub(crate) fn contains(outer: &[Buffer], inner: &[u8]) -> bool {
    outer.iter().any(|outer| {
        let (outer, inner) = (outer.as_slice().as_ptr_range(), inner.as_ptr_range());
        outer.start <= inner.start && inner.end <= outer.end
    })
}

pub(crate) fn stream(batches: &[RecordBatch]) -> Vec<u8> {
    let mut encoder = Encoder::new(&batches[0].schema(), EncodeOptions::default()).unwrap();
    let mut bytes = Vec::new();
    encoder.schema().write_to(&mut bytes).unwrap();
    for batch in batches {
        encoder.batch(batch).unwrap().iter().for_each(|message| message.write_to(&mut bytes).unwrap());
    }
    encoder.end().write_to(&mut bytes).unwrap();
    bytes
}

pub(crate) fn aligned(bytes: &[u8]) -> Buffer {
    let mut buffer = MutableBuffer::new(bytes.len());
    buffer.extend_from_slice(bytes);
    buffer.into()
}

/// Feeds a whole stream, with `lend` making memory of each body.
pub(crate) fn feed(
    decoder: &mut Decoder,
    mut rest: &[u8],
    mut lend: impl FnMut(&[u8]) -> Buffer,
) -> Result<Vec<RecordBatch>, Error> {
    let mut batches = Vec::new();
    loop {
        match decoder.need() {
            Need::Prefix => {
                decoder.prefix(rest.split_off(..PREFIX).unwrap().try_into().unwrap())?;
            }
            Need::Metadata(len) => {
                decoder.metadata(rest.split_off(..len).unwrap())?;
            }
            Need::Body(len) => {
                if let Event::Batch(batch) = decoder.body(lend(rest.split_off(..len).unwrap()))? {
                    batches.push(batch);
                }
            }
            Need::Nothing => return Ok(batches),
        }
    }
}

//! Batches made one, as far as they fit together.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Int8Type, Int16Type};
use arrow_array::{
    Array, ArrayRef, DictionaryArray, FixedSizeListArray, Int16Array, Int64Array, MapArray, RecordBatch,
    RunArray, StringArray, StructArray,
};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{DataType, Field};
use thallus_columnar::join;

/// Of so many values, from number `first` on.
fn dictionary(first: usize, values: usize) -> ArrayRef {
    let values: Vec<_> = (first..first + values).map(|n| format!("value {n}")).collect();
    Arc::new(values.iter().map(String::as_str).collect::<DictionaryArray<Int8Type>>())
}

fn map(values: ArrayRef) -> ArrayRef {
    let keys: ArrayRef = Arc::new(StringArray::from_iter_values((0..values.len()).map(|n| n.to_string())));
    let (key, value) =
        (Field::new("key", DataType::Utf8, false), Field::new("value", values.data_type().clone(), true));
    let lengths = OffsetBuffer::from_lengths(vec![1; values.len()]);
    let entries = StructArray::from(vec![(Arc::new(key), keys), (Arc::new(value), values)]);
    let field = Arc::new(Field::new("entries", entries.data_type().clone(), false));
    Arc::new(MapArray::new(field, lengths, entries, None, false))
}

fn fixed(values: ArrayRef) -> ArrayRef {
    let field = Arc::new(Field::new_list_field(values.data_type().clone(), true));
    Arc::new(FixedSizeListArray::new(field, 1, values, None))
}

fn structure(values: ArrayRef) -> ArrayRef {
    let field = Arc::new(Field::new("d", values.data_type().clone(), true));
    Arc::new(StructArray::from(vec![(field, values)]))
}

/// Of how many each is made. Together they have the rows of all.
fn made_of(columns: impl IntoIterator<Item = ArrayRef>) -> Vec<usize> {
    let batches: Vec<_> =
        columns.into_iter().map(|column| RecordBatch::try_from_iter([("c", column)]).unwrap()).collect();
    let joined = join(&batches[0].schema(), &batches);
    let mut rest = batches.iter();
    for (count, batch) in &joined {
        let mut first = 0;
        for one in rest.by_ref().take(*count) {
            assert_eq!(batch.slice(first, one.num_rows()), *one);
            first += one.num_rows();
        }
        assert_eq!(batch.num_rows(), first);
    }
    assert!(rest.next().is_none());
    joined.into_iter().map(|(count, _)| count).collect()
}

#[test]
fn dictionaries_that_arrow_puts_one_behind_the_other_stay_apart() {
    for nested in [map, fixed] {
        assert_eq!(made_of((0..5).map(|_| nested(dictionary(0, 60)))), [2, 2, 1], "127 values in one");
        assert_eq!(made_of((0..5).map(|n| nested(dictionary(60 * n, 60)))), [2, 2, 1]);
        let shared = dictionary(0, 60);
        assert_eq!(made_of((0..5).map(|_| nested(shared.clone()))), [5]);
    }
}

#[test]
fn dictionaries_of_the_same_values_are_merged() {
    for nested in [std::convert::identity, structure] {
        assert_eq!(made_of((0..5).map(|_| nested(dictionary(0, 5)))), [5]);
        assert_eq!(made_of((0..4).map(|n| nested(dictionary(100 * n, 100)))), [1; 4], "too many values");
    }
    let [one, other] = [dictionary(0, 60), dictionary(0, 60)];
    let merged = join(&batch_of(&one).schema(), &[batch_of(&one), batch_of(&other), batch_of(&one)]);
    assert!(merged[0].1.column(0).as_dictionary::<Int8Type>().values().len() <= 127);
}

fn batch_of(column: &ArrayRef) -> RecordBatch {
    RecordBatch::try_from_iter([("c", column.clone())]).unwrap()
}

#[test]
fn runs_end_within_their_type() {
    let ends = Int16Array::from(vec![10_000, 20_000]);
    let runs: ArrayRef =
        Arc::new(RunArray::<Int16Type>::try_new(&ends, &Int64Array::from(vec![1, 2])).unwrap());
    assert_eq!(made_of(vec![runs.slice(0, 10_000), runs.slice(5_000, 10_000), runs.clone()]), [2, 1]);
}

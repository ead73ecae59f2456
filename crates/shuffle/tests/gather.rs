//! Rows that are gathered and taken apart, whatever their columns are.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use arrow_array::types::{Int8Type, Int16Type};
use arrow_array::{
    Array, ArrayRef, DictionaryArray, Int64Array, RecordBatch, RunArray, StringArray, StructArray,
};
use arrow_schema::Field;
use thallus_shuffle::{Gather, Partition};

fn gather(batch: &RecordBatch, workers: usize, batch_rows: usize, by: &Partition) -> Gather {
    let mut gather = Gather::new(batch.schema(), workers, batch_rows);
    gather.partition(by).unwrap();
    gather
}

/// Adds all, and returns how many rows come out.
fn rows(batches: Vec<RecordBatch>, by: &Partition) -> usize {
    let mut gather = gather(&batches[0], 3, 1 << 20, by);
    batches.into_iter().for_each(|batch| assert!(!gather.add(batch).unwrap()));
    gather.take().unwrap().iter().map(|(_, part)| part.num_rows()).sum()
}

#[test]
fn large_rows_are_enough_before_there_are_many() {
    let text: ArrayRef = Arc::new(StringArray::from_iter_values((0..32).map(|_| "x".repeat(32 << 10))));
    let batch = RecordBatch::try_from_iter([("t", text)]).unwrap();
    let mut gather = gather(&batch, 8, 8192, &Partition::Random(1));
    let added = (1..=100).find(|_| gather.add(batch.clone()).unwrap());
    assert_eq!(added, Some(32), "4 MiB for each worker");
    let parts = gather.take().unwrap();
    assert_eq!(parts.iter().map(|(_, part)| part.num_rows()).sum::<usize>(), 1024);
    assert!(!gather.add(batch).unwrap(), "it begins anew");
}

fn dictionary(batch: usize) -> ArrayRef {
    let values: Vec<_> = (0..100).map(|n| format!("{batch} {n}")).collect();
    Arc::new(values.iter().map(String::as_str).collect::<DictionaryArray<Int8Type>>())
}

/// Each can be sent. Together they have more values than there are keys.
#[test]
fn dictionaries_that_do_not_fit_together_stay_apart() {
    let batches = |column: fn(usize) -> ArrayRef| {
        (0..4).map(|n| RecordBatch::try_from_iter([("d", column(n))]).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(rows(batches(dictionary), &Partition::Random(1)), 400);
    let nested: fn(usize) -> ArrayRef = |n| {
        let field = Arc::new(Field::new("d", dictionary(n).data_type().clone(), true));
        Arc::new(StructArray::from(vec![(field, dictionary(n))]))
    };
    assert_eq!(rows(batches(nested), &Partition::Random(1)), 400);
    let shared: fn(usize) -> ArrayRef = |_| dictionary(0);
    let same = batches(shared)[0].clone();
    let mut gather = gather(&same, 1, 1 << 20, &Partition::Random(1));
    (0..4).for_each(|_| assert!(!gather.add(same.clone()).unwrap()));
    assert_eq!(gather.take().unwrap().len(), 1, "one dictionary fits, however often it is there");
}

#[test]
fn runs_that_end_beyond_their_type_stay_apart() {
    let ends = arrow_array::Int16Array::from(vec![10_000, 20_000]);
    let runs = RunArray::<Int16Type>::try_new(&ends, &Int64Array::from(vec![1, 2])).unwrap();
    let batch = RecordBatch::try_from_iter([("r", Arc::new(runs) as ArrayRef)]).unwrap();
    assert_eq!(rows(vec![batch; 4], &Partition::Random(1)), 80_000);
}

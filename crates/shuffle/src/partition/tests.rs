use std::collections::BTreeMap;
use std::sync::Arc;

use arrow_array::{Array, Float64Array, Int32Array, Int64Array, StringArray};
use arrow_schema::Field;

use super::*;

fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, array)| (name, array, true)))
        .unwrap()
}

fn integers(values: impl IntoIterator<Item = i64>) -> RecordBatch {
    batch(vec![("n", Arc::new(Int64Array::from_iter_values(values)))])
}

fn split(partition: &Partition, batch: &RecordBatch, targets: usize) -> Vec<(usize, RecordBatch)> {
    Scatter::new(partition, &batch.schema(), targets).unwrap().split(batch).unwrap()
}

fn numbers(batch: &RecordBatch) -> Vec<i64> {
    batch.column(0).as_any().downcast_ref::<Int64Array>().unwrap().values().to_vec()
}

#[test]
fn every_row_goes_to_one_target_and_rows_keep_their_order() {
    let batch = integers(0..10_000);
    for partition in [Partition::Hash(vec![0]), Partition::Random(7)] {
        let parts = split(&partition, &batch, 8);
        let mut all: Vec<i64> = parts.iter().flat_map(|(_, part)| numbers(part)).collect();
        assert!(parts.iter().all(|(_, part)| numbers(part).is_sorted()), "{partition:?}");
        assert!(parts.iter().all(|(_, part)| (1_000..1_500).contains(&part.num_rows())), "{partition:?}");
        all.sort_unstable();
        assert_eq!(all, (0..10_000).collect::<Vec<_>>(), "{partition:?}");
    }
}

#[test]
fn equal_values_meet_whatever_batch_or_slice_they_are_in() {
    let text = |range: std::ops::Range<i64>| -> ArrayRef {
        Arc::new(range.map(|n| (n % 7 != 0).then(|| format!("key {}", n % 100))).collect::<StringArray>())
    };
    let number = |range: std::ops::Range<i64>| -> ArrayRef {
        Arc::new(
            range.map(|n| (n % 5 != 0).then_some(i32::try_from(n % 100).unwrap())).collect::<Int32Array>(),
        )
    };
    let float = |range: std::ops::Range<i64>| -> ArrayRef {
        Arc::new(range.map(|n| (n % 3 != 0).then_some(n as f64 % 100.0)).collect::<Float64Array>())
    };
    for columns in [vec![0], vec![1], vec![2], vec![0, 1, 2], vec![1, 1]] {
        let mut home = BTreeMap::new();
        for range in [0..500, 300..1000, 977..978] {
            let whole =
                batch(vec![("t", text(range.clone())), ("n", number(range.clone())), ("f", float(range))]);
            for batch in [whole.clone(), whole.slice(whole.num_rows() / 3, whole.num_rows() / 2)] {
                for (target, part) in split(&Partition::Hash(columns.clone()), &batch, 5) {
                    for row in 0..part.num_rows() {
                        let key =
                            columns.iter().map(|column| format!("{:?}", part.column(*column).slice(row, 1)));
                        let key = key.collect::<Vec<_>>();
                        assert_eq!(*home.entry(key.clone()).or_insert(target), target, "{key:?}");
                    }
                }
            }
        }
        assert!(home.len() > 50);
    }
}

#[test]
fn a_range_begins_with_its_bound() {
    let bounds: ArrayRef = Arc::new(Int64Array::from(vec![10, 20, 20]));
    let rows = batch(vec![(
        "n",
        Arc::new(Int64Array::from(vec![Some(9), Some(20), None, Some(10), Some(99), Some(19)])),
    )]);
    let parts = split(&Partition::Range { column: 0, bounds }, &rows, 4);
    let parts: Vec<_> = parts
        .iter()
        .map(|(target, part)| {
            (
                *target,
                part.column(0).as_any().downcast_ref::<Int64Array>().unwrap().iter().collect::<Vec<_>>(),
            )
        })
        .collect();
    assert_eq!(
        parts,
        [(0, vec![Some(9), None]), (1, vec![Some(10), Some(19)]), (3, vec![Some(20), Some(99)])]
    );
}

#[test]
fn a_broadcast_copies_nothing() {
    let batch = integers(0..100);
    let parts = split(&Partition::Broadcast, &batch, 3);
    assert_eq!(parts.iter().map(|(target, _)| *target).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(parts.iter().all(|(_, part)| part.column(0).to_data().ptr_eq(&batch.column(0).to_data())));
}

#[test]
fn a_skewed_key_takes_one_target_and_no_copy() {
    let batch = integers(std::iter::repeat_n(42, 1_000));
    let parts = split(&Partition::Hash(vec![0]), &batch, 8);
    assert_eq!(parts.len(), 1);
    assert!(parts[0].1.column(0).to_data().ptr_eq(&batch.column(0).to_data()));
}

#[test]
fn no_rows_are_for_nobody() {
    for partition in [Partition::Hash(vec![0]), Partition::Random(1), Partition::Broadcast] {
        assert!(split(&partition, &integers([]), 8).is_empty());
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let schema = Schema::new(vec![Field::new("n", DataType::Int64, false)]);
    let refused = |partition: &Partition, targets| match Scatter::new(partition, &schema, targets) {
        Err(Error::Partition(why)) => why,
        other => panic!("{other:?}"),
    };
    let bounds =
        |bounds: Vec<i64>| Partition::Range { column: 0, bounds: Arc::new(Int64Array::from(bounds)) };
    assert_eq!(refused(&Partition::Broadcast, 0), "rows can't be spread over 0 workers");
    assert_eq!(refused(&Partition::Hash(vec![]), 2), "no column to hash");
    assert_eq!(refused(&Partition::Hash(vec![1]), 2), "there is no column 1");
    assert_eq!(refused(&bounds(vec![1, 2]), 2), "2 bounds for 2 workers");
    assert_eq!(refused(&bounds(vec![2, 1]), 3), "bounds that do not ascend");
    let text = Partition::Range { column: 0, bounds: Arc::new(StringArray::from(vec!["a"])) };
    assert_eq!(refused(&text, 2), "bounds of type Utf8 for a column of Int64");
}

//! Rows that are gathered and taken apart, whatever their columns are.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::thread;

use arrow_array::cast::AsArray;
use arrow_array::types::{Int8Type, Int16Type};
use arrow_array::{
    Array, ArrayRef, DictionaryArray, Int64Array, ListArray, RecordBatch, RecordBatchOptions, RunArray,
    StringArray, StringViewArray, StructArray,
};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{DataType, Field, Schema};
use thallus_shuffle::{Error, Gather, Partition, WorkerId, push, staged, stream};

use common::within;

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

/// Of which arrow does not make one.
#[test]
fn lists_of_runs_without_any_value_are_gathered() {
    let runs = RunArray::<Int16Type>::try_new(
        &arrow_array::Int16Array::from(Vec::<i16>::new()),
        &Int64Array::from(Vec::<i64>::new()),
    );
    let runs: ArrayRef = Arc::new(runs.unwrap());
    let field = Arc::new(Field::new_list_field(runs.data_type().clone(), true));
    let lists = ListArray::new(field, OffsetBuffer::from_lengths([0, 0]), runs, None);
    let batch = RecordBatch::try_from_iter([("l", Arc::new(lists) as ArrayRef)]).unwrap();
    assert_eq!(rows(vec![batch; 4], &Partition::Random(1)), 8);
}

/// Text that lies behind views, also in lists.
fn views(rows: usize, bytes: usize) -> RecordBatch {
    let views: StringViewArray = (0..rows).map(|n| (n % 5 > 0).then(|| format!("{n:0bytes$}"))).collect();
    let views: ArrayRef = Arc::new(views);
    let field = Arc::new(Field::new_list_field(DataType::Utf8View, true));
    let lists = ListArray::new(field, OffsetBuffer::from_lengths(vec![1; rows]), views.clone(), None);
    RecordBatch::try_from_iter([("v", views), ("l", Arc::new(lists) as ArrayRef)]).unwrap()
}

#[test]
fn what_lies_behind_views_is_counted() {
    let batch = views(1_000, 1_000);
    let all = stream::bytes(&batch);
    assert!((1_600_000..1_700_000).contains(&all), "{all}");
    let part = stream::bytes(&batch.slice(900, 100));
    assert!((160_000..170_000).contains(&part), "{part}");
    assert!(stream::bytes(&views(1_000, 10)) < 50_000);
}

/// Each target gets its own text, not that of all. In pieces that fit.
#[test]
fn parts_of_views_leave_the_others_out() {
    within(|| {
        let config = push::Config { window: 256 << 10, ..push::Config::default() };
        let nodes: Vec<push::Node> = common::nodes(&[1; 4], config);
        let batch = views(1_000, 10_000);
        let halves = nodes.iter().flat_map(|node| node.shuffle(1, &batch.schema()).unwrap());
        let (mut senders, receivers): (Vec<_>, Vec<_>) = halves.unzip();
        let reading: Vec<_> = receivers
            .into_iter()
            .map(|receiver| thread::spawn(move || receiver.map(Result::unwrap).collect::<Vec<_>>()))
            .collect();
        let mut sender = senders.remove(0);
        senders.into_iter().for_each(|sender| sender.finish().unwrap());
        sender.partition(&Partition::Random(1)).unwrap();
        sender.send(batch.clone()).unwrap();
        sender.finish().unwrap();
        let batches: Vec<_> = reading.into_iter().flat_map(|reading| reading.join().unwrap()).collect();
        let text = |batch: &RecordBatch| -> Vec<_> {
            batch.column(0).as_string_view().iter().flatten().map(str::to_owned).collect()
        };
        let mut arrived: Vec<_> = batches.iter().flat_map(text).collect();
        arrived.sort_unstable();
        assert_eq!(arrived, text(&batch));
        for (_, link, _) in nodes[0].links() {
            // Of 8 MB in each of two columns a quarter, in pieces of a quarter of the window.
            assert!((3_000_000..5_000_000).contains(&link.bytes), "{link:?}");
            assert!(link.frames > 40, "{link:?}");
        }
        common::leave(nodes);
    });
}

/// A batch of the shuffle's columns, with something said about them.
fn remarked(remark: &str) -> RecordBatch {
    let metadata = [("remark".to_owned(), remark.to_owned())].into();
    let schema = Schema::clone(&common::schema()).with_metadata(metadata);
    RecordBatch::try_new(Arc::new(schema), common::batch(0..10).columns().to_vec()).unwrap()
}

macro_rules! remarks {
    ($design:ident) => {
        within(|| {
            let nodes: Vec<$design::Node> = common::nodes(&[1, 1], Default::default());
            let shuffle = |remark: &str| {
                let schema = remarked(remark).schema();
                nodes.iter().flat_map(|node| node.shuffle(1, &schema).unwrap()).collect::<Vec<_>>()
            };
            let (senders, receivers): (Vec<_>, Vec<_>) = shuffle("the shuffle's").into_iter().unzip();
            let reading: Vec<_> = receivers
                .into_iter()
                .map(|receiver| thread::spawn(move || common::sum(receiver.map(Result::unwrap)).0))
                .collect();
            for mut sender in senders {
                sender.partition(&Partition::Broadcast).unwrap();
                sender.send(remarked("another")).unwrap();
                sender.flush().unwrap();
                sender.send_to(WorkerId(0), common::batch(0..10)).unwrap();
                sender.send_to(WorkerId(1), remarked("a third")).unwrap();
                sender.finish().unwrap();
            }
            for reading in reading {
                assert_eq!(reading.join().unwrap(), 40);
            }
            common::leave(nodes);
        })
    };
}

#[test]
fn what_is_said_about_columns_does_not_matter() {
    remarks!(push);
    remarks!(staged);
}

/// Of two processes each says something else.
#[test]
fn processes_may_say_different_things_about_columns() {
    within(|| {
        let nodes: Vec<push::Node> = common::nodes(&[1, 1], Default::default());
        let (mut sender, _) = nodes[0].shuffle(1, &remarked("one").schema()).unwrap().remove(0);
        let (other, receiver) = nodes[1].shuffle(1, &remarked("two").schema()).unwrap().remove(0);
        sender.send_to(WorkerId(1), remarked("one")).unwrap();
        sender.finish().unwrap();
        other.finish().unwrap();
        let batches: Vec<_> = receiver.map(Result::unwrap).collect();
        assert_eq!(batches.len(), 1);
        assert_eq!(batches[0].schema(), remarked("two").schema());
        common::leave(nodes);
    });
}

#[test]
fn rows_without_columns_are_spread() {
    let options = RecordBatchOptions::new().with_row_count(Some(1_000));
    let batch = RecordBatch::try_new_with_options(Arc::new(Schema::empty()), vec![], &options).unwrap();
    let mut gather = gather(&batch, 4, 1, &Partition::Random(1));
    assert!(gather.add(batch).unwrap());
    let parts = gather.take().unwrap();
    assert_eq!(parts.len(), 4);
    assert_eq!(parts.iter().map(|(_, part)| part.num_rows()).sum::<usize>(), 1_000);
}

/// By both designs, to all processes.
#[test]
fn rows_without_columns_arrive() {
    macro_rules! arrive {
        ($design:ident) => {
            within(|| {
                let options = RecordBatchOptions::new().with_row_count(Some(1_000));
                let schema = Arc::new(Schema::empty());
                let batch = RecordBatch::try_new_with_options(schema.clone(), vec![], &options).unwrap();
                let nodes: Vec<$design::Node> = common::nodes(&[1, 1], Default::default());
                let halves = nodes.iter().flat_map(|node| node.shuffle(1, &schema).unwrap());
                let (senders, receivers): (Vec<_>, Vec<_>) = halves.unzip();
                for mut sender in senders {
                    sender.partition(&Partition::Random(1)).unwrap();
                    sender.send(batch.clone()).unwrap();
                    sender.finish().unwrap();
                }
                let rows = |batch: thallus_shuffle::Result<RecordBatch>| batch.unwrap().num_rows();
                assert_eq!(receivers.into_iter().flatten().map(rows).sum::<usize>(), 2_000);
                common::leave(nodes);
            })
        };
    }
    arrive!(push);
    arrive!(staged);
}

/// Everybody has been told, or will be, that this worker gave up: it may not take that for a success.
#[test]
fn a_sender_that_has_failed_once_does_not_finish() {
    macro_rules! fails {
        ($design:ident) => {
            within(|| {
                let nodes: Vec<$design::Node> = common::nodes(&[1, 1], Default::default());
                let other: ArrayRef = Arc::new(StringArray::from(vec!["x"]));
                let other = RecordBatch::try_from_iter([("n", other)]).unwrap();
                let (mut sender, own) = nodes[0].shuffle(1, &common::schema()).unwrap().remove(0);
                let (peer, receiver) = nodes[1].shuffle(1, &common::schema()).unwrap().remove(0);
                peer.finish().unwrap();
                sender.partition(&Partition::Broadcast).unwrap();
                sender.send(other).unwrap_err();
                let outcomes = [
                    sender.send(common::batch(0..10)),
                    sender.send_to(WorkerId(1), common::batch(0..10)),
                    sender.flush(),
                    sender.partition(&Partition::Broadcast),
                    sender.finish(),
                ];
                assert!(outcomes.iter().all(|one| matches!(one, Err(Error::Schema))), "{outcomes:?}");
                let why = "worker 0 gave up: rows of other columns than the shuffle's";
                for told in common::errors([own, receiver]) {
                    assert!(told.ends_with(why), "{told}");
                }
                common::leave(nodes);
            })
        };
    }
    fails!(push);
    fails!(staged);
}

#[test]
fn a_partition_that_makes_no_sense_is_told_to_the_others() {
    within(|| {
        let nodes: Vec<push::Node> = common::nodes(&[1, 1], Default::default());
        let (mut sender, _) = nodes[0].shuffle(1, &common::schema()).unwrap().remove(0);
        let (_other, receiver) = nodes[1].shuffle(1, &common::schema()).unwrap().remove(0);
        sender.partition(&Partition::Hash(vec![7])).unwrap_err();
        drop(sender);
        let told = common::errors([receiver]);
        assert_eq!(told, ["worker 0 gave up: partition: there is no column 7"]);
    });
}

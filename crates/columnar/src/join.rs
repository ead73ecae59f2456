//! Several batches made one.

use arrow_array::{Array, RecordBatch};
use arrow_data::ArrayData;
use arrow_schema::{DataType, SchemaRef};
use arrow_select::concat::concat_batches;

/// The rows of all `batches`, which have the columns of `schema`, in their order: in one batch if arrow can make one of them, and
/// otherwise in as many as that takes. Each comes with the number of those that it is made of; a single one has not been copied.
///
/// Dictionaries together may have more values than there are keys, and runs end beyond what their type can say.
pub fn join(schema: &SchemaRef, batches: &[RecordBatch]) -> Vec<(usize, RecordBatch)> {
    let mut joined = Vec::new();
    let mut rest = batches;
    while !rest.is_empty() {
        let (together, behind) = rest.split_at(fitting(rest));
        rest = behind;
        concat(schema, together, &mut joined);
    }
    joined
}

/// In halves what does not become one: whether merged dictionaries fit is known only when they have been.
fn concat(schema: &SchemaRef, batches: &[RecordBatch], joined: &mut Vec<(usize, RecordBatch)>) {
    if let [batch] = batches {
        return joined.push((1, batch.clone()));
    }
    if let Ok(batch) = concat_batches(schema, batches) {
        return joined.push((batches.len(), batch));
    }
    let (first, second) = batches.split_at(batches.len() / 2);
    concat(schema, first, joined);
    concat(schema, second, joined);
}

/// How many of the first batches arrow takes as one without panicking: at least one.
fn fitting(batches: &[RecordBatch]) -> usize {
    let parts = |batch: &RecordBatch| {
        let mut parts = Vec::new();
        batch.columns().iter().for_each(|column| bounded(&column.to_data(), true, &mut parts));
        parts
    };
    let mut so_far = parts(&batches[0]);
    let fits =
        |batch: &&RecordBatch| so_far.iter_mut().zip(parts(batch)).all(|(so_far, other)| so_far.add(&other));
    1 + batches[1..].iter().take_while(fits).count()
}

/// A part of a column that can't have any number of values.
#[derive(Debug)]
struct Bounded {
    most: usize,
    has: usize,
    /// The values of a dictionary, while all batches have the same.
    same: Option<ArrayData>,
}

impl Bounded {
    /// Whether the other's fit in.
    fn add(&mut self, other: &Self) -> bool {
        self.has = self.has.saturating_add(other.has);
        self.same = self.same.take().filter(|same| other.same.as_ref().is_some_and(|one| same.ptr_eq(one)));
        self.same.is_some() || self.has <= self.most
    }
}

/// Those in an array: dictionaries, by their keys, unless arrow merges them, and rows in runs, by the ends of these. Arrays of one
/// type have as many.
fn bounded(array: &ArrayData, merges: bool, found: &mut Vec<Bounded>) {
    match array.data_type() {
        DataType::Dictionary(_, values) if merges && can_merge(values) => {}
        DataType::Dictionary(keys, _) => {
            let values = &array.child_data()[0];
            found.push(Bounded { most: largest(keys), has: values.len(), same: Some(values.clone()) });
        }
        DataType::RunEndEncoded(ends, _) => {
            found.push(Bounded { most: largest(ends.data_type()), has: array.len(), same: None });
        }
        _ => {}
    }
    // In others `concat` puts one dictionary behind the other (arrow-select 58.4).
    let merges = merges
        && matches!(
            array.data_type(),
            DataType::Struct(_)
                | DataType::List(_)
                | DataType::LargeList(_)
                | DataType::ListView(_)
                | DataType::LargeListView(_)
                | DataType::RunEndEncoded(..)
        );
    array.child_data().iter().for_each(|child| bounded(child, merges, found));
}

/// Whether `concat` merges dictionaries of such values if together they have too many.
fn can_merge(values: &DataType) -> bool {
    let bytes = [DataType::Utf8, DataType::LargeUtf8, DataType::Binary, DataType::LargeBinary];
    values.is_primitive() || bytes.contains(values)
}

/// The largest number of a type, as far as that matters.
fn largest(of: &DataType) -> usize {
    match of {
        DataType::Int8 => i8::MAX as usize,
        DataType::UInt8 => u8::MAX as usize,
        DataType::Int16 => i16::MAX as usize,
        DataType::UInt16 => u16::MAX as usize,
        _ => i32::MAX as usize,
    }
}

//! What a sender gathers before it takes it apart.

use arrow_array::{Array, RecordBatch};
use arrow_data::ArrayData;
use arrow_schema::{DataType, Schema, SchemaRef};
use arrow_select::concat::concat_batches;

use crate::{Error, Partition, Result, Scatter, WorkerId, stream};

/// Bytes of rows that are enough for a worker, however few rows they are.
const BYTES: usize = 4 << 20;

/// Bytes of rows that are made one batch: its offsets may have 31 bits.
const TOGETHER: usize = 1 << 30;

/// Rows for all workers, until there are enough for batches of some size for each.
#[derive(Debug)]
pub struct Gather {
    schema: SchemaRef,
    workers: usize,
    /// Of all workers' rows together.
    enough: usize,
    enough_bytes: usize,
    batches: Vec<RecordBatch>,
    rows: usize,
    bytes: usize,
    scatter: Option<Scatter>,
}

impl Gather {
    /// For so many `workers`, each of which is to get batches of about `batch_rows`, or of 4 MiB if that is less.
    pub fn new(schema: SchemaRef, workers: usize, batch_rows: usize) -> Self {
        let enough = batch_rows.saturating_mul(workers);
        let enough_bytes = BYTES.saturating_mul(workers).min(TOGETHER);
        Self { schema, workers, enough, enough_bytes, batches: Vec::new(), rows: 0, bytes: 0, scatter: None }
    }

    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// How rows are spread from here on. What has been gathered is to be taken before.
    ///
    /// # Errors
    ///
    /// Those of [`Scatter::new`].
    pub fn partition(&mut self, partition: &Partition) -> Result<()> {
        self.scatter = Some(Scatter::new(partition, &self.schema, self.workers)?);
        Ok(())
    }

    /// Adds rows. True once there are enough to be taken.
    ///
    /// # Errors
    ///
    /// Other columns.
    pub fn add(&mut self, batch: RecordBatch) -> Result<bool> {
        if Schema::fields(&batch.schema()) != self.schema.fields() {
            return Err(Error::Schema);
        }
        self.rows += batch.num_rows();
        if batch.num_rows() > 0 {
            self.bytes = self.bytes.saturating_add(stream::bytes(&batch));
            self.batches.push(stream::of_schema(&batch, &self.schema)?);
        }
        Ok(self.rows >= self.enough || self.bytes >= self.enough_bytes)
    }

    /// What has been gathered: each worker that gets rows, with its rows. More than once if the batches do not fit into one.
    ///
    /// # Errors
    ///
    /// No partition; those of [`Scatter::split`].
    pub fn take(&mut self) -> Result<Vec<(WorkerId, RecordBatch)>> {
        let batches = std::mem::take(&mut self.batches);
        (self.rows, self.bytes) = (0, 0);
        let worker = |target| WorkerId(u32::try_from(target).expect("a worker's number"));
        let mut parts = Vec::new();
        let mut rest = &batches[..];
        while !rest.is_empty() {
            let (together, behind) = rest.split_at(fitting(rest));
            rest = behind;
            let batch = match together {
                [batch] => batch.clone(),
                batches => concat_batches(&self.schema, batches)?,
            };
            let Some(scatter) = &mut self.scatter else {
                return Err(Error::Partition("nobody has said how".into()));
            };
            parts.extend(scatter.split(&batch)?.into_iter().map(|(target, part)| (worker(target), part)));
        }
        Ok(parts)
    }
}

/// How many of the first batches can become one: at least one.
fn fitting(batches: &[RecordBatch]) -> usize {
    let parts = |batch: &RecordBatch| {
        let mut parts = Vec::new();
        batch.columns().iter().for_each(|column| bounded(&column.to_data(), &mut parts));
        parts
    };
    let (mut bytes, mut so_far) = (stream::bytes(&batches[0]), parts(&batches[0]));
    let fits = |batch: &&RecordBatch| {
        bytes = bytes.saturating_add(stream::bytes(batch));
        bytes <= TOGETHER && so_far.iter_mut().zip(parts(batch)).all(|(so_far, other)| so_far.add(&other))
    };
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

/// Those in an array: dictionaries, by their keys, and rows in runs, by the ends of these. Arrays of one type have as many.
fn bounded(array: &ArrayData, found: &mut Vec<Bounded>) {
    match array.data_type() {
        DataType::Dictionary(keys, _) => {
            let values = &array.child_data()[0];
            found.push(Bounded { most: largest(keys), has: values.len(), same: Some(values.clone()) });
        }
        DataType::RunEndEncoded(ends, _) => {
            found.push(Bounded { most: largest(ends.data_type()), has: array.len(), same: None });
        }
        _ => {}
    }
    array.child_data().iter().for_each(|child| bounded(child, found));
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

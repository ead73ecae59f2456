//! What a sender gathers before it takes it apart.

use arrow_array::RecordBatch;
use arrow_schema::{Schema, SchemaRef};
use thallus_columnar::join;

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
            let Some(scatter) = &mut self.scatter else {
                return Err(Error::Partition("nobody has said how".into()));
            };
            let (together, behind) = rest.split_at(near(rest));
            rest = behind;
            for (_, batch) in join(&self.schema, together) {
                parts.extend(scatter.split(&batch)?.into_iter().map(|(target, part)| (worker(target), part)));
            }
        }
        Ok(parts)
    }
}

/// How many of the first batches may become one: at least one.
fn near(batches: &[RecordBatch]) -> usize {
    let mut bytes = stream::bytes(&batches[0]);
    let fits = |batch: &&RecordBatch| {
        bytes = bytes.saturating_add(stream::bytes(batch));
        bytes <= TOGETHER
    };
    1 + batches[1..].iter().take_while(fits).count()
}

//! What a sender gathers before it takes it apart.

use arrow_array::RecordBatch;
use arrow_schema::{Schema, SchemaRef};
use arrow_select::concat::concat_batches;

use crate::{Error, Partition, Result, Scatter, WorkerId};

/// Rows for all workers, until there are enough for batches of some size for each.
#[derive(Debug)]
pub struct Gather {
    schema: SchemaRef,
    workers: usize,
    /// Of all workers' rows together.
    enough: usize,
    batches: Vec<RecordBatch>,
    rows: usize,
    scatter: Option<Scatter>,
}

impl Gather {
    /// For so many `workers`, each of which is to get batches of about `batch_rows`.
    pub fn new(schema: SchemaRef, workers: usize, batch_rows: usize) -> Self {
        let enough = batch_rows.saturating_mul(workers);
        Self { schema, workers, enough, batches: Vec::new(), rows: 0, scatter: None }
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
            self.batches.push(batch);
        }
        Ok(self.rows >= self.enough)
    }

    /// What has been gathered: each worker that gets rows, with its rows.
    ///
    /// # Errors
    ///
    /// No partition; those of [`Scatter::split`].
    pub fn take(&mut self) -> Result<Vec<(WorkerId, RecordBatch)>> {
        let batches = std::mem::take(&mut self.batches);
        self.rows = 0;
        let batch = match &batches[..] {
            [] => return Ok(Vec::new()),
            [batch] => batch.clone(),
            batches => concat_batches(&self.schema, batches)?,
        };
        drop(batches);
        let Some(scatter) = &mut self.scatter else {
            return Err(Error::Partition("nobody has said how".into()));
        };
        let worker = |target| WorkerId(u32::try_from(target).expect("a worker's number"));
        Ok(scatter.split(&batch)?.into_iter().map(|(target, part)| (worker(target), part)).collect())
    }
}

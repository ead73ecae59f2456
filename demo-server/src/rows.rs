//! The batches of a query's result, as DuckDB computes them.

use std::collections::VecDeque;

use arrow_array::{RecordBatch, RecordBatchOptions};
use arrow_schema::SchemaRef;
use duckdb::{Connection, Statement};
use thallus_columnar::scan::{Code, Failure};

use crate::sql;

/// Bytes of a batch above which it is handed out in several, by rows: DuckDB's 2,048 may have long strings.
const BYTES: usize = 4 << 20;

/// A result, from which batches are taken one by one.
pub(crate) struct Rows<'a> {
    statement: Statement<'a>,
    schema: SchemaRef,
    /// The rest of a batch that was too large.
    parts: VecDeque<RecordBatch>,
}

impl<'a> Rows<'a> {
    /// Begins a query, if it may be asked.
    pub(crate) fn select(connection: &'a Connection, sql: &str) -> Result<Self, Failure> {
        let refused = |message| Failure { code: Code::Query, message };
        let database = |error: duckdb::Error| refused(sql::message(&error));
        sql::check(connection, sql).map_err(refused)?;
        // Should anything have passed the check.
        connection.execute_batch("BEGIN TRANSACTION READ ONLY").map_err(database)?;
        let mut statement = connection.prepare(sql).map_err(database)?;
        let schema = statement.stream_arrow([]).map_err(database)?.get_schema();
        Ok(Self { statement, schema, parts: VecDeque::new() })
    }

    pub(crate) fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// None at the end.
    pub(crate) fn next(&mut self) -> Result<Option<RecordBatch>, Failure> {
        if let Some(part) = self.parts.pop_front() {
            return Ok(Some(part));
        }
        let chunk = self.statement.step();
        let chunk = chunk.map_err(|error| Failure { code: Code::Query, message: sql::message(&error) })?;
        let Some(chunk) = chunk else { return Ok(None) };
        let (_, columns, _) = chunk.into_parts();
        let count = columns.first().map_or(0, |column| column.len());
        let options = RecordBatchOptions::new().with_row_count(Some(count));
        let batch = RecordBatch::try_new_with_options(self.schema.clone(), columns, &options);
        let batch =
            batch.map_err(|error| own(&format!("DuckDB's chunk does not fit its schema: {error}")))?;
        self.parts.extend(split(batch));
        Ok(self.parts.pop_front())
    }
}

/// The batch, or parts of it that are slices.
fn split(batch: RecordBatch) -> Vec<RecordBatch> {
    let (rows, bytes) = (batch.num_rows(), batch.get_array_memory_size());
    if bytes <= BYTES || rows < 2 {
        return vec![batch];
    }
    let most = rows.div_ceil(bytes.div_ceil(BYTES));
    (0..rows).step_by(most).map(|first| batch.slice(first, most.min(rows - first))).collect()
}

/// The server's own trouble.
pub(crate) fn own(message: &str) -> Failure {
    Failure { code: Code::Other(0), message: message.to_owned() }
}

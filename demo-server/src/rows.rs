//! The batches of a query's result: as DuckDB computes them, or from memory.

use std::collections::VecDeque;
use std::sync::Arc;

use arrow_array::{RecordBatch, RecordBatchOptions};
use arrow_schema::SchemaRef;
use duckdb::{Connection, Statement};
use thallus_columnar::join;
use thallus_columnar::scan::{Code, Failure};

use crate::encoding::unsliced;
use crate::server::Server;
use crate::sql;
use crate::store::{Held, Keeping};
use crate::unfit::Unfit;

/// What is sent at a time holds DuckDB's chunks, of 2,048 rows each, up to this number …
pub(crate) const CHUNKS: usize = 64;
/// … or until it has so many bytes.
pub(crate) const BYTES: usize = 4 << 20;

/// A result, from which batches are taken one by one.
pub(crate) struct Rows<'a> {
    schema: SchemaRef,
    source: Source<'a>,
    /// Where the result goes, too.
    keeping: Option<Keeping<'a>>,
    /// What [`Self::joined`] has made and not returned.
    ready: VecDeque<RecordBatch>,
}

enum Source<'a> {
    /// With the rest of a batch that was too large.
    Query(Box<Statement<'a>>, Unfit, VecDeque<RecordBatch>),
    /// Of which so many batches have been taken.
    Held(Arc<Held>, usize),
}

impl<'a> Rows<'a> {
    /// The result that is kept, or begins a query, whose result is kept if it ends well.
    pub(crate) fn answer(server: &'a Server, connection: &'a Connection, sql: &str) -> Result<Self, Failure> {
        let Some(store) = &server.store else { return Self::select(connection, sql) };
        // Before the query reads the files.
        let version = server.dataset.version();
        if let Some(held) = store.find(sql, &version) {
            return Ok(Self::of(held.schema.clone(), Source::Held(held, 0)));
        }
        let mut rows = Self::select(connection, sql)?;
        rows.keeping = Some(Keeping::new(store, sql, version, rows.schema.clone()));
        Ok(rows)
    }

    /// Begins a query, if it may be asked.
    fn select(connection: &'a Connection, sql: &str) -> Result<Self, Failure> {
        let refused = |message| Failure { code: Code::Query, message };
        let database = |error: duckdb::Error| refused(sql::message(&error));
        sql::check(connection, sql).map_err(refused)?;
        // Should anything have passed the check.
        connection.execute_batch("BEGIN TRANSACTION READ ONLY").map_err(database)?;
        let mut statement = connection.prepare(sql).map_err(database)?;
        let schema = statement.stream_arrow([]).map_err(database)?.get_schema();
        let unfit = Unfit::of(&statement);
        let source = Source::Query(Box::new(statement), unfit, VecDeque::new());
        Ok(Self::of(schema, source))
    }

    fn of(schema: SchemaRef, source: Source<'a>) -> Self {
        Self { schema, source, keeping: None, ready: VecDeque::new() }
    }

    /// The kept result that these are of.
    pub(crate) fn held(&self) -> Option<&Arc<Held>> {
        if let Source::Held(held, _) = &self.source { Some(held) } else { None }
    }

    pub(crate) fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// None at the end.
    pub(crate) fn next(&mut self) -> Result<Option<RecordBatch>, Failure> {
        let batch = self.produced()?;
        match (&batch, self.keeping.take()) {
            (Some(batch), Some(keeping)) => self.keeping = keeping.add(batch),
            (None, Some(keeping)) => keeping.end(),
            _ => {}
        }
        Ok(batch)
    }

    fn produced(&mut self) -> Result<Option<RecordBatch>, Failure> {
        let (statement, unfit, parts) = match &mut self.source {
            Source::Query(statement, unfit, parts) => (statement, unfit, parts),
            Source::Held(held, taken) => {
                *taken += 1;
                return Ok(held.batches.get(*taken - 1).cloned());
            }
        };
        if let Some(part) = parts.pop_front() {
            return Ok(Some(part));
        }
        let chunk = statement.step();
        let chunk = chunk.map_err(|error| Failure { code: Code::Query, message: sql::message(&error) })?;
        let Some(chunk) = chunk else { return Ok(None) };
        let (_, columns, _) = chunk.into_parts();
        if let Some((column, what)) = unfit.wrong(&columns) {
            let name = self.schema.field(column).name();
            let message = format!("Arrow has no {what}: cast column {name:?} to VARCHAR");
            return Err(Failure { code: Code::Query, message });
        }
        let count = columns.first().map_or(0, |column| column.len());
        let options = RecordBatchOptions::new().with_row_count(Some(count));
        let batch = RecordBatch::try_new_with_options(self.schema.clone(), columns, &options);
        let batch =
            batch.map_err(|error| own(&format!("DuckDB's chunk does not fit its schema: {error}")))?;
        parts.extend(split(batch));
        Ok(parts.pop_front())
    }

    /// Batches for one message; none at the end.
    fn some(&mut self) -> Result<Vec<RecordBatch>, Failure> {
        let (mut batches, mut bytes) = (Vec::new(), 0);
        while batches.len() < CHUNKS && bytes < BYTES {
            let Some(batch) = self.next()? else { break };
            bytes += batch.get_array_memory_size();
            batches.push(batch);
        }
        Ok(batches)
    }

    /// Those in one batch, by copying if there are several, as arrow-ipc can write it. What does not fit into it comes next.
    pub(crate) fn joined(&mut self) -> Result<Option<RecordBatch>, Failure> {
        if self.ready.is_empty() {
            let batches = self.some()?;
            for (count, batch) in join(&self.schema, &batches) {
                let batch = if count == 1 { unsliced(&batch) } else { Ok(batch) };
                self.ready.push_back(batch.map_err(|error| own(&error.to_string()))?);
            }
        }
        Ok(self.ready.pop_front())
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

//! Results that are kept (`--keep`), so that the same query is answered without DuckDB.
//!
//! A result is kept while it is streamed for the first time, and only if it ends well. It holds as long as the dataset's files are
//! as they were when its query began. The least used one goes first.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use arrow_select::concat::concat_batches;

use crate::dataset::Version;
use crate::rows::{BYTES, CHUNKS};

/// Results, however small.
const MOST: usize = 1024;

/// A whole result, in batches as large as what is sent at a time.
#[derive(Debug)]
pub(crate) struct Held {
    sql: String,
    version: Version,
    pub(crate) schema: SchemaRef,
    pub(crate) batches: Vec<RecordBatch>,
    bytes: usize,
}

#[derive(Debug)]
pub(crate) struct Store {
    /// Bytes of all results together.
    limit: usize,
    /// Clients are lent their copy of a result again, instead of a new one.
    pub(crate) lends_again: bool,
    /// The last used at the end.
    results: Mutex<Vec<Arc<Held>>>,
}

impl Store {
    pub(crate) fn new(limit: usize, lends_again: bool) -> Self {
        Self { limit, lends_again, results: Mutex::default() }
    }

    /// Bytes that may be kept for each client, too.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// The result of a query, unless the files have changed since.
    pub(crate) fn find(&self, sql: &str, version: &Version) -> Option<Arc<Held>> {
        let mut results = self.results();
        let found = results.iter().position(|held| held.sql == sql)?;
        let held = results.remove(found);
        if held.version != *version {
            return None;
        }
        results.push(held.clone());
        Some(held)
    }

    /// Whether this result would still be found.
    pub(crate) fn has(&self, held: &Arc<Held>) -> bool {
        self.results().iter().any(|other| Arc::ptr_eq(other, held))
    }

    fn insert(&self, held: Held) {
        let mut results = self.results();
        results.retain(|other| other.sql != held.sql);
        results.push(Arc::new(held));
        let mut bytes: usize = results.iter().map(|held| held.bytes).sum();
        while bytes > self.limit || results.len() > MOST {
            bytes -= results.remove(0).bytes;
        }
    }

    fn results(&self) -> MutexGuard<'_, Vec<Arc<Held>>> {
        self.results.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A result that is being kept.
pub(crate) struct Keeping<'a> {
    store: &'a Store,
    held: Held,
    /// For the next batch.
    chunks: Vec<RecordBatch>,
    chunk_bytes: usize,
}

impl<'a> Keeping<'a> {
    /// `version` is that of the files before the query began.
    pub(crate) fn new(store: &'a Store, sql: &str, version: Version, schema: SchemaRef) -> Self {
        let held = Held { sql: sql.to_owned(), version, schema, batches: Vec::new(), bytes: sql.len() };
        Self { store, held, chunks: Vec::new(), chunk_bytes: 0 }
    }

    /// None if the result is too large, or Arrow can't join its batches.
    pub(crate) fn add(mut self, chunk: &RecordBatch) -> Option<Self> {
        self.chunk_bytes += chunk.get_array_memory_size();
        self.chunks.push(chunk.clone());
        let full = self.chunks.len() >= CHUNKS || self.chunk_bytes >= BYTES;
        let fits = self.held.bytes + self.chunk_bytes <= self.store.limit;
        if full && fits { self.join() } else { fits.then_some(self) }
    }

    /// The result is complete.
    pub(crate) fn end(self) {
        let store = self.store;
        if let Some(Self { held, .. }) = self.join() {
            store.insert(held);
        }
    }

    fn join(mut self) -> Option<Self> {
        if !self.chunks.is_empty() {
            let batch = concat_batches(&self.held.schema, &self.chunks).ok()?;
            self.held.bytes += batch.get_array_memory_size();
            self.held.batches.push(batch);
            self.chunks.clear();
            self.chunk_bytes = 0;
        }
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use arrow_array::Int64Array;

    use super::*;

    const RESULT: usize = 100 << 10;

    fn keep(store: &Store, sql: &str, version: &Version) {
        let column: arrow_array::ArrayRef = Arc::new(Int64Array::from(vec![1; RESULT / 8]));
        let batch = RecordBatch::try_from_iter([("column", column)]).unwrap();
        let keeping = Keeping::new(store, sql, version.clone(), batch.schema());
        if let Some(keeping) = keeping.add(&batch) {
            keeping.end();
        }
    }

    #[test]
    fn the_least_used_result_goes_first() {
        let store = Store::new(3 * RESULT, true);
        let version = Version::default();
        for sql in ["a", "b"] {
            keep(&store, sql, &version);
        }
        let first = store.find("a", &version).unwrap();
        keep(&store, "c", &version);
        assert!(store.has(&first) && store.find("b", &version).is_none());
        keep(&Store::new(RESULT / 2, true), "too large", &version);
        assert_eq!(first.batches[0].num_rows(), RESULT / 8);
    }

    #[test]
    fn a_result_of_other_files_is_forgotten() {
        let store = Store::new(3 * RESULT, true);
        keep(&store, "a", &Version::default());
        assert!(store.find("a", &Version::of([std::path::Path::new("/")])).is_none());
        assert!(store.find("a", &Version::default()).is_none());
    }
}

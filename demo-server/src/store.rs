//! Results that are kept (`--keep`), so that the same query is answered without DuckDB.
//!
//! A result is kept while it is streamed for the first time, and only if it ends well. It holds as long as the dataset's files are
//! as they were when its query began. The least used one goes first.
//!
//! Results may take as much memory again that are being kept, or are kept no longer but still sent or lent. While there are more,
//! none is added.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrow_array::{Array, RecordBatch};
use arrow_schema::SchemaRef;
use thallus_columnar::join;

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
    size: Size,
}

/// Bytes of a result, which count among those of all as long as it is there.
#[derive(Debug)]
struct Size {
    bytes: usize,
    all: Arc<AtomicUsize>,
}

#[derive(Debug)]
pub(crate) struct Store {
    /// Bytes of all results together.
    limit: usize,
    /// Bytes of those, of what is being kept, and of what is kept no longer but still in use.
    all: Arc<AtomicUsize>,
    /// Clients are lent their copy of a result again, instead of a new one.
    pub(crate) lends_again: bool,
    /// The last used at the end.
    results: Mutex<Vec<Arc<Held>>>,
}

impl Store {
    pub(crate) fn new(limit: usize, lends_again: bool) -> Self {
        Self { limit, all: Arc::default(), lends_again, results: Mutex::default() }
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
        let mut bytes: usize = results.iter().map(|held| held.size.bytes).sum();
        while bytes > self.limit || results.len() > MOST {
            bytes -= results.remove(0).size.bytes;
        }
    }

    fn results(&self) -> MutexGuard<'_, Vec<Arc<Held>>> {
        self.results.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Size {
    /// Returns false if there is no room for so much more.
    fn grow(&mut self, bytes: usize, limit: usize) -> bool {
        let more = |all: usize| all.checked_add(bytes).filter(|&all| all <= limit.saturating_mul(2));
        let grows = self.bytes.saturating_add(bytes) <= limit
            && self.all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        self.bytes += if grows { bytes } else { 0 };
        grows
    }

    fn replace(&mut self, before: usize, now: usize) {
        self.all.fetch_add(now, Ordering::Relaxed);
        self.all.fetch_sub(before, Ordering::Relaxed);
        self.bytes = self.bytes - before + now;
    }
}

impl Drop for Size {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
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
        let mut size = Size { bytes: 0, all: store.all.clone() };
        size.replace(0, sql.len());
        let held = Held { sql: sql.to_owned(), version, schema, batches: Vec::new(), size };
        Self { store, held, chunks: Vec::new(), chunk_bytes: 0 }
    }

    /// None if the result is too large, or others leave it no room.
    pub(crate) fn add(mut self, chunk: &RecordBatch) -> Option<Self> {
        let bytes = size(chunk);
        if !self.held.size.grow(bytes, self.store.limit) {
            return None;
        }
        self.chunk_bytes += bytes;
        self.chunks.push(chunk.clone());
        if self.chunks.len() >= CHUNKS || self.chunk_bytes >= BYTES {
            self.join();
        }
        Some(self)
    }

    /// The result is complete.
    pub(crate) fn end(mut self) {
        self.join();
        self.store.insert(self.held);
    }

    fn join(&mut self) {
        let mut bytes = 0;
        for (count, batch) in join(&self.held.schema, &self.chunks) {
            // Several have been copied; a single one has not, and may share its buffers with others.
            bytes += if count > 1 { batch.get_array_memory_size() } else { size(&batch) };
            self.held.batches.push(batch);
        }
        self.held.size.replace(self.chunk_bytes, bytes);
        self.chunks.clear();
        self.chunk_bytes = 0;
    }
}

/// Bytes of a batch, which may be part of a larger one.
fn size(batch: &RecordBatch) -> usize {
    let size = |column: &Arc<dyn Array>| column.to_data().get_slice_memory_size();
    batch.columns().iter().map(|column| size(column).unwrap_or_else(|_| column.get_array_memory_size())).sum()
}

#[cfg(test)]
mod tests {
    use arrow_array::Int64Array;

    use super::*;

    const RESULT: usize = 100 << 10;

    fn batch() -> RecordBatch {
        let column: arrow_array::ArrayRef = Arc::new(Int64Array::from(vec![1; RESULT / 8]));
        RecordBatch::try_from_iter([("column", column)]).unwrap()
    }

    fn begin<'a>(store: &'a Store, sql: &str, version: &Version) -> Option<Keeping<'a>> {
        Keeping::new(store, sql, version.clone(), batch().schema()).add(&batch())
    }

    fn keep(store: &Store, sql: &str, version: &Version) {
        if let Some(keeping) = begin(store, sql, version) {
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
    fn results_that_are_being_kept_or_still_used_have_a_limit_too() {
        let store = Store::new(RESULT * 3 / 2, true);
        let version = Version::default();
        let [first, second] = ["a", "b"].map(|sql| begin(&store, sql, &version).unwrap());
        assert!(begin(&store, "c", &version).is_none());
        first.end();
        let in_use = store.find("a", &version).unwrap();
        second.end();
        assert!(!store.has(&in_use) && begin(&store, "c", &version).is_none());
        drop(in_use);
        assert!(begin(&store, "c", &version).is_some());
    }

    #[test]
    fn parts_of_a_batch_count_for_what_they_are() {
        let store = Store::new(RESULT * 3 / 2, true);
        let batch = batch();
        let part = batch.num_rows() / 4;
        let keeping = Keeping::new(&store, "a", Version::default(), batch.schema());
        let parts = (0..4).map(|number| batch.slice(number * part, part));
        let kept = parts.into_iter().try_fold(keeping, |mut keeping, part| {
            keeping.join();
            keeping.add(&part)
        });
        kept.unwrap().end();
        assert!(store.find("a", &Version::default()).is_some());
    }

    #[test]
    fn a_result_of_other_files_is_forgotten() {
        let store = Store::new(3 * RESULT, true);
        keep(&store, "a", &Version::default());
        assert!(store.find("a", &Version::of([std::path::Path::new("/")])).is_none());
        assert!(store.find("a", &Version::default()).is_none());
    }
}

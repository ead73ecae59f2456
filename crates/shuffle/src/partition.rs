//! Which rows of a batch go to which worker.
//!
//! A row's place depends on its values, the kind of partition and the number of workers alone, so all processes of one build
//! agree. Rows keep their order within a target.

use std::hash::{BuildHasher, Hasher};

use arrow_array::{Array, ArrayRef, RecordBatch, UInt32Array};
use arrow_row::{OwnedRow, RowConverter, SortField};
use arrow_schema::{ArrowError, DataType, Schema, SortOptions};
use arrow_select::take::take_record_batch;
use foldhash::quality::FixedState;

use crate::{Error, Result};

/// How rows are spread over the workers.
#[derive(Clone, Debug)]
pub enum Partition {
    /// By the values of these columns: equal values meet at one worker. Nulls are equal to each other. Floating-point numbers
    /// are compared by their bits.
    Hash(Vec<usize>),
    /// Each row to any worker, all equally likely, by a generator that begins with this seed.
    Random(u64),
    /// By one column, whose values are compared to ascending bounds, one fewer than there are workers: a worker gets what is not
    /// below the bound before it and below its own. Nulls come first.
    Range { column: usize, bounds: ArrayRef },
    /// Every row to every worker.
    Broadcast,
}

/// Takes batches apart.
#[derive(Debug)]
pub struct Scatter {
    rule: Rule,
    targets: usize,
    /// The target of each row, of one batch at a time.
    of_row: Vec<u32>,
}

#[derive(Debug)]
enum Rule {
    Hash { columns: Vec<usize>, rows: Option<RowConverter>, hashes: Vec<u64> },
    Random(fastrand::Rng),
    Range { column: usize, rows: RowConverter, bounds: Vec<OwnedRow> },
    Broadcast,
}

/// Spreads what was hashed once more, so that partitions of two kinds do not fall together with a hash table's buckets.
const SEED: u64 = 0x7468_616c_6c75_7331;

/// Of a null, in any column.
const NULL: u64 = 0x9e6c_63d0_876a_3f1b;

impl Scatter {
    /// # Errors
    ///
    /// No target; a column that the schema does not have, or whose type can't be compared; bounds of another type, in disorder,
    /// or not one fewer than targets.
    pub fn new(partition: &Partition, schema: &Schema, targets: usize) -> Result<Self> {
        if targets == 0 || u32::try_from(targets).is_err() {
            return Err(Error::Partition(format!("rows can't be spread over {targets} workers")));
        }
        let data_type = |column: usize| match schema.fields().get(column) {
            Some(field) => Ok(field.data_type()),
            None => Err(Error::Partition(format!("there is no column {column}"))),
        };
        let rule = match partition {
            Partition::Hash(columns) => {
                if columns.is_empty() {
                    return Err(Error::Partition("no column to hash".into()));
                }
                let types = columns.iter().map(|column| data_type(*column)).collect::<Result<Vec<_>>>()?;
                let rows = match types.iter().all(|data_type| is_word(data_type)) {
                    true => None,
                    false => Some(converter(types.into_iter().cloned())?),
                };
                Rule::Hash { columns: columns.clone(), rows, hashes: Vec::new() }
            }
            Partition::Random(seed) => Rule::Random(fastrand::Rng::with_seed(*seed)),
            Partition::Range { column, bounds } => {
                let of_column = data_type(*column)?;
                if bounds.data_type() != of_column {
                    let other = bounds.data_type();
                    return Err(Error::Partition(format!(
                        "bounds of type {other} for a column of {of_column}"
                    )));
                }
                if bounds.len() != targets - 1 {
                    let bounds = bounds.len();
                    return Err(Error::Partition(format!("{bounds} bounds for {targets} workers")));
                }
                let rows = converter(std::iter::once(of_column.clone()))?;
                let bounds: Vec<_> = rows
                    .convert_columns(std::slice::from_ref(bounds))?
                    .iter()
                    .map(|row| row.owned())
                    .collect();
                if !bounds.is_sorted() {
                    return Err(Error::Partition("bounds that do not ascend".into()));
                }
                Rule::Range { column: *column, rows, bounds }
            }
            Partition::Broadcast => Rule::Broadcast,
        };
        Ok(Self { rule, targets, of_row: Vec::new() })
    }

    /// The parts of a batch: each target that gets rows, with its rows. The parts share memory, so one that is kept keeps all.
    ///
    /// # Errors
    ///
    /// More than 2³² − 1 rows; a batch without the columns that decide.
    pub fn split(&mut self, batch: &RecordBatch) -> Result<Vec<(usize, RecordBatch)>> {
        let rows = batch.num_rows();
        if rows == 0 {
            return Ok(Vec::new());
        }
        if u32::try_from(rows).is_err() {
            return Err(Error::Partition(format!("{rows} rows in one batch")));
        }
        if let Rule::Broadcast = self.rule {
            return Ok((0..self.targets).map(|target| (target, batch.clone())).collect());
        }
        self.of_row.clear();
        self.rule.targets(batch, self.targets, &mut self.of_row)?;
        // Where each target's rows begin, of all rows sorted by target: a counting sort, which keeps their order.
        let mut starts = vec![0_usize; self.targets + 1];
        self.of_row.iter().for_each(|target| starts[*target as usize + 1] += 1);
        let counts = starts[1..].to_vec();
        if let Some(target) = counts.iter().position(|count| *count == rows) {
            return Ok(vec![(target, batch.clone())]);
        }
        for target in 0..self.targets {
            starts[target + 1] += starts[target];
        }
        let parts = (0..self.targets).filter(|target| counts[*target] > 0);
        if batch.num_columns() == 0 {
            return Ok(parts.map(|target| (target, batch.slice(0, counts[target]))).collect());
        }
        let mut order = vec![0_u32; rows];
        let mut next = starts.clone();
        for (row, target) in (0_u32..).zip(&self.of_row) {
            let place = &mut next[*target as usize];
            order[*place] = row;
            *place += 1;
        }
        let sorted = take_record_batch(batch, &UInt32Array::from(order))?;
        Ok(parts.map(|target| (target, sorted.slice(starts[target], counts[target]))).collect())
    }
}

impl Rule {
    fn targets(&mut self, batch: &RecordBatch, targets: usize, of_row: &mut Vec<u32>) -> Result<()> {
        let column = |column: usize| match batch.columns().get(column) {
            Some(array) => Ok(array.clone()),
            None => Err(Error::Partition(format!("a batch without column {column}"))),
        };
        match self {
            Self::Hash { columns, rows: None, hashes } => {
                hashes.clear();
                hashes.resize(batch.num_rows(), SEED);
                for index in columns {
                    hash_words(&column(*index)?, hashes)?;
                }
                of_row.extend(hashes.iter().map(|hash| spread(*hash, targets)));
            }
            Self::Hash { columns, rows: Some(rows), .. } => {
                let columns = columns.iter().map(|index| column(*index)).collect::<Result<Vec<_>>>()?;
                let state = FixedState::with_seed(SEED);
                of_row.extend(rows.convert_columns(&columns)?.iter().map(|row| {
                    let mut hasher = state.build_hasher();
                    hasher.write(row.data());
                    spread(hasher.finish(), targets)
                }));
            }
            Self::Random(random) => {
                of_row.extend((0..batch.num_rows()).map(|_| spread(random.u64(..), targets)));
            }
            Self::Range { column: index, rows, bounds } => {
                let rows = rows.convert_columns(&[column(*index)?])?;
                of_row.extend(rows.iter().map(|row| {
                    let target = bounds.partition_point(|bound| bound.row() <= row);
                    u32::try_from(target).expect("no more than there are targets")
                }));
            }
            Self::Broadcast => {}
        }
        Ok(())
    }
}

fn converter(types: impl Iterator<Item = DataType>) -> Result<RowConverter> {
    let ascending = SortOptions { descending: false, nulls_first: true };
    Ok(RowConverter::new(types.map(|of| SortField::new_with_options(of, ascending)).collect())?)
}

/// The upper bits decide, without a division.
fn spread(hash: u64, targets: usize) -> u32 {
    let target = (u128::from(hash) * targets as u128) >> 64;
    u32::try_from(target).expect("below the number of targets, which is a u32")
}

/// Whether a value is one machine word or less, and equal values have equal bits.
fn is_word(data_type: &DataType) -> bool {
    data_type.is_integer() || (data_type.is_temporal() && !matches!(data_type, DataType::Interval(_)))
}

fn hash_words(array: &ArrayRef, hashes: &mut [u64]) -> Result<()> {
    let data = array.to_data();
    let (from, to) = (array.offset(), array.offset() + array.len());
    let nulls = array.nulls().filter(|nulls| nulls.null_count() > 0);
    let mut each = |row: usize, word: u64| {
        let word = if nulls.is_some_and(|nulls| nulls.is_null(row)) { NULL } else { word };
        hashes[row] = fold(hashes[row] ^ word);
    };
    let values = &data.buffers()[0];
    match array.data_type().primitive_width() {
        Some(1) => words(&values.typed_data::<u8>()[from..to]).for_each(|(row, word)| each(row, word)),
        Some(2) => words(&values.typed_data::<u16>()[from..to]).for_each(|(row, word)| each(row, word)),
        Some(4) => words(&values.typed_data::<u32>()[from..to]).for_each(|(row, word)| each(row, word)),
        Some(8) => words(&values.typed_data::<u64>()[from..to]).for_each(|(row, word)| each(row, word)),
        width => {
            return Err(ArrowError::NotYetImplemented(format!("hash of values of {width:?} bytes")).into());
        }
    }
    Ok(())
}

fn words<T: Copy + Into<u64>>(values: &[T]) -> impl Iterator<Item = (usize, u64)> {
    values.iter().map(|value| (*value).into()).enumerate()
}

/// Each bit of a word changes about half of the result's: the two halves of a product, folded together twice.
fn fold(word: u64) -> u64 {
    let half = |word: u64, factor: u64| {
        let product = u128::from(word) * u128::from(factor);
        #[allow(clippy::cast_possible_truncation, reason = "the lower half is what is wanted")]
        let low = product as u64;
        low ^ (product >> 64) as u64
    };
    half(half(word, 0xa076_1d64_78bd_642f) ^ 0x8ebc_6af0_9c88_c6e3, 0xe703_7ed1_a0b4_28db)
}

#[cfg(test)]
mod tests;

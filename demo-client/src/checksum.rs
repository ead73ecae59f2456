//! A number that two results share if they have the same rows, in whatever order and batches.

use anyhow::Result;
use arrow_array::cast::AsArray;
use arrow_array::{Array, RecordBatch};
use arrow_cast::display::{ArrayFormatter, FormatOptions};
use arrow_schema::DataType;

/// An odd number without a pattern (2⁶⁴ divided by the golden ratio).
const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
const NULL: u64 = 0x6e75_6c6c;

/// The sum of the rows' hashes. Not for keeping anybody from forging a result.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Checksum(u64);

impl Checksum {
    /// # Errors
    ///
    /// A type that can't be shown: those without a fast way are hashed as text.
    pub(crate) fn add(&mut self, batch: &RecordBatch) -> Result<()> {
        let mut rows = vec![0; batch.num_rows()];
        for column in batch.columns() {
            add_column(&mut rows, column)?;
        }
        self.0 = rows.iter().fold(self.0, |sum, row| sum.wrapping_add(mix(*row, MULTIPLIER)));
        Ok(())
    }

    pub(crate) fn value(self) -> u64 {
        self.0
    }
}

fn add_column(rows: &mut [u64], column: &dyn Array) -> Result<()> {
    let mut each = |value: &dyn Fn(usize) -> u64| {
        for (index, row) in rows.iter_mut().enumerate() {
            *row = mix(*row, if column.is_null(index) { NULL } else { value(index) });
        }
    };
    match column.data_type() {
        DataType::Utf8 => {
            let strings = column.as_string::<i32>();
            each(&|index| hash(strings.value(index).as_bytes()));
        }
        DataType::Binary => {
            let bytes = column.as_binary::<i32>();
            each(&|index| hash(bytes.value(index)));
        }
        data_type if let Some(width) = data_type.primitive_width() => {
            let data = column.to_data();
            let values = &data.buffers()[0][data.offset() * width..];
            each(&|index| hash(&values[index * width..][..width]));
        }
        _ => {
            let options = FormatOptions::default().with_null("null");
            let formatter = ArrayFormatter::try_new(column, &options)?;
            for (index, row) in rows.iter_mut().enumerate() {
                let mut text = String::new();
                formatter.value(index).write(&mut text)?;
                *row = mix(*row, hash(text.as_bytes()));
            }
        }
    }
    Ok(())
}

fn hash(bytes: &[u8]) -> u64 {
    let words = bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    words.fold(bytes.len() as u64, mix)
}

fn mix(hash: u64, word: u64) -> u64 {
    let product = (hash.rotate_left(23) ^ word).wrapping_mul(MULTIPLIER);
    product ^ (product >> 32)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{ArrayRef, Int64Array, StringArray};

    use super::*;

    fn checksum(rows: &[(Option<i64>, &str)], batch: usize) -> u64 {
        let mut checksum = Checksum::default();
        for rows in rows.chunks(batch) {
            let numbers: Int64Array = rows.iter().map(|row| row.0).collect();
            let texts: StringArray = rows.iter().map(|row| Some(row.1)).collect();
            let columns: [(_, ArrayRef); 2] = [("number", Arc::new(numbers)), ("text", Arc::new(texts))];
            checksum.add(&RecordBatch::try_from_iter(columns).unwrap()).unwrap();
        }
        checksum.value()
    }

    #[test]
    fn rows_count_and_their_order_does_not() {
        let rows = [(Some(1), "a"), (Some(2), "b"), (None, "c")];
        let sum = checksum(&rows, 3);
        assert_eq!(sum, checksum(&rows, 1));
        assert_eq!(sum, checksum(&[rows[2], rows[0], rows[1]], 2));
        for other in [
            &[rows[0], rows[1]][..],
            &[rows[0], rows[1], rows[2], rows[2]],
            &[(Some(1), "b"), (Some(2), "a"), rows[2]],
            &[rows[0], rows[1], (Some(0), "c")],
            &[(Some(1), "a\0"), rows[1], rows[2]],
        ] {
            assert_ne!(sum, checksum(other, 3), "{other:?}");
        }
    }
}

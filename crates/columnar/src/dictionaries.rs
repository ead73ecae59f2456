//! The dictionaries that a stream has sent so far.

use std::collections::HashMap;

use arrow_array::{Array, ArrayRef, make_array};
use arrow_buffer::Buffer;
use arrow_data::ArrayData;
use arrow_schema::DataType;
use arrow_select::concat::concat;

use crate::{Fault, Limits};

/// Values of one dictionary, as they came.
#[derive(Debug, Default)]
struct Dictionary {
    /// The first, then its deltas.
    parts: Vec<ArrayData>,
    /// Memory that the parts keep, and that they are themselves.
    bytes: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Dictionaries {
    by_id: HashMap<i64, Dictionary>,
    bytes: usize,
    /// There are deltas that have not been joined to what they add to.
    unjoined: bool,
}

impl Dictionaries {
    /// Adds `values`, which keep `bytes` of memory beside their own. Those of no bytes count too, or a sender could add them for
    /// ever.
    pub(crate) fn insert(
        &mut self,
        id: i64,
        delta: bool,
        values: ArrayData,
        bytes: usize,
        limit: usize,
    ) -> Result<(), Fault> {
        let entry = self.by_id.entry(id).or_default();
        if delta {
            if entry.parts.is_empty() {
                return Err(Fault::DeltaWithoutBase);
            }
            if !can_grow(values.data_type()) {
                return Err(Fault::DeltaType);
            }
            self.unjoined = true;
        } else {
            self.bytes -= entry.bytes;
            *entry = Dictionary::default();
        }
        let bytes = bytes + size_of_tree(&values);
        entry.parts.push(values);
        entry.bytes += bytes;
        self.bytes += bytes;
        if self.bytes > limit {
            return Err(Fault::TooLarge { actual: self.bytes as u64, limit: limit as u64 });
        }
        Ok(())
    }

    /// Joins deltas, so that [`Dictionaries::values`] has all of each dictionary. Arrow's dictionary arrays have one array
    /// of values, so this copies them; a caller waits with it for the batch that uses them. Returns the bytes copied.
    ///
    /// Neither may a dictionary have more than `limits.rows` values then, also below, nor all of them take more memory than they may:
    /// values of no bytes, too, have a bit each for whether they are null.
    pub(crate) fn join(&mut self, limits: &Limits) -> Result<usize, (i64, Fault)> {
        let mut copied = 0;
        if !std::mem::take(&mut self.unjoined) {
            return Ok(copied);
        }
        for (id, dictionary) in self.by_id.iter_mut().filter(|(_, dictionary)| dictionary.parts.len() > 1) {
            let joined = joined(&dictionary.parts, limits.rows).map_err(|fault| (*id, fault))?;
            copied += joined.get_buffer_memory_size();
            self.bytes -= dictionary.bytes;
            dictionary.bytes = size_of_tree(&joined) + size_of_buffers(&joined);
            self.bytes += dictionary.bytes;
            dictionary.parts = vec![joined];
            if self.bytes > limits.dictionaries {
                let (actual, limit) = (self.bytes as u64, limits.dictionaries as u64);
                return Err((*id, Fault::TooLarge { actual, limit }));
            }
        }
        Ok(copied)
    }

    /// The values of dictionary `id`. A dictionary whose every key is null need not be sent: then there are none.
    pub(crate) fn values(&self, id: i64, value_type: &DataType) -> ArrayData {
        match self.by_id.get(&id).and_then(|dictionary| dictionary.parts.first()) {
            Some(values) => values.clone(),
            None => ArrayData::new_empty(value_type),
        }
    }
}

/// Memory of an array's description.
fn size_of_tree(array: &ArrayData) -> usize {
    size_of_val(array)
        + size_of_val(array.buffers())
        + array.child_data().iter().map(size_of_tree).sum::<usize>()
}

/// Bytes that it keeps. Views may be slices of one body, which counts once.
fn size_of_buffers(array: &ArrayData) -> usize {
    array.buffers().iter().map(Buffer::len).sum::<usize>()
        + array.nulls().map_or(0, |nulls| nulls.buffer().len())
        + array.child_data().iter().map(size_of_buffers).sum::<usize>()
}

/// Whether dictionaries of such values are sent and read in parts. Others are sent anew: joining what holds dictionaries
/// itself, or what may repeat values without taking memory for it, can grow without bound.
pub(crate) fn can_grow(values: &DataType) -> bool {
    match values {
        DataType::List(field)
        | DataType::LargeList(field)
        | DataType::FixedSizeList(field, _)
        | DataType::Map(field, _) => can_grow(field.data_type()),
        DataType::Struct(fields) => fields.iter().all(|field| can_grow(field.data_type())),
        DataType::ListView(_)
        | DataType::LargeListView(_)
        | DataType::Union(_, _)
        | DataType::Dictionary(_, _)
        | DataType::RunEndEncoded(_, _) => false,
        _ => true,
    }
}

fn joined(parts: &[ArrayData], rows: usize) -> Result<ArrayData, Fault> {
    check_lengths(&parts.iter().collect::<Vec<_>>(), rows)?;
    let arrays: Vec<ArrayRef> = parts.iter().cloned().map(make_array).collect();
    Ok(concat(&arrays.iter().map(|array| array.as_ref()).collect::<Vec<_>>())?.to_data())
}

/// The parts, and what they are made of, have together at most `rows` values, and what 32-bit offsets point to can be joined without
/// passing their largest.
fn check_lengths(parts: &[&ArrayData], rows: usize) -> Result<(), Fault> {
    if parts.iter().map(|part| part.len()).sum::<usize>() > rows {
        return Err(Fault::Length);
    }
    let pointed_to = |part: &&ArrayData| match part.data_type() {
        DataType::Utf8 | DataType::Binary => part.buffers()[1].len(),
        DataType::List(_) | DataType::Map(_, _) => part.child_data()[0].len(),
        _ => 0,
    };
    let total: usize = parts.iter().map(pointed_to).sum();
    if i32::try_from(total).is_err() {
        return Err(Fault::TooLarge { actual: total as u64, limit: i32::MAX as u64 });
    }
    (0..parts[0].child_data().len()).try_for_each(|child| {
        check_lengths(&parts.iter().map(|part| &part.child_data()[child]).collect::<Vec<_>>(), rows)
    })
}

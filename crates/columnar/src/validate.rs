//! Checks that look at every row. All run in time linear in the size of the message, also on what a hostile sender makes up.

use std::collections::HashSet;

use arrow_buffer::{ArrowNativeType, Buffer, NullBuffer, ScalarBuffer};
use arrow_data::{ByteView, MAX_INLINE_VIEW_LEN};
use arrow_schema::UnionFields;

use crate::Fault;

/// `offsets` ascend from at least 0 to at most `limit`.
pub(crate) fn offsets<T: ArrowNativeType + PartialOrd>(offsets: &[T], limit: usize) -> Result<(), Fault> {
    // Without an early exit, so that it is done for many at once.
    let ascending = offsets.windows(2).fold(true, |so_far, pair| so_far & (pair[0] <= pair[1]));
    if ascending { ends(offsets, limit).map(|_| ()) } else { Err(Fault::Offsets) }
}

/// First and last offset, which alone are checked.
pub(crate) fn ends<T: ArrowNativeType>(offsets: &[T], limit: usize) -> Result<(usize, usize), Fault> {
    let (Some(first), Some(last)) = (offsets.first(), offsets.last()) else { return Ok((0, 0)) };
    match (first.to_usize(), last.to_usize()) {
        (Some(first), Some(last)) if first <= last && last <= limit => Ok((first, last)),
        _ => Err(Fault::Offsets),
    }
}

/// The strings between valid `offsets` are UTF-8.
pub(crate) fn utf8<T: ArrowNativeType>(offsets: &[T], values: &[u8]) -> Result<(), Fault> {
    let (first, last) = ends(offsets, values.len())?;
    let used = &values[first..last];
    if used.is_ascii() {
        return Ok(());
    }
    // Strings one after the other are UTF-8 exactly if all of it is and none begins inside a character.
    std::str::from_utf8(used).map_err(|_| Fault::Utf8)?;
    let inside = |offset: &T| values[..last].get(offset.as_usize()).is_some_and(|byte| !is_boundary(*byte));
    if offsets.iter().any(inside) { Err(Fault::Utf8) } else { Ok(()) }
}

/// Whether a character of UTF-8 begins with this byte.
fn is_boundary(byte: u8) -> bool {
    byte & 0xc0 != 0x80
}

/// Offset and size of every list lie within `limit` values.
pub(crate) fn list_views<T: ArrowNativeType>(offsets: &[T], sizes: &[T], limit: usize) -> Result<(), Fault> {
    let inside = |(offset, size): (&T, &T)| {
        let end = offset.to_usize().zip(size.to_usize()).and_then(|(offset, size)| offset.checked_add(size));
        end.is_some_and(|end| end <= limit)
    };
    if offsets.iter().zip(sizes).all(inside) { Ok(()) } else { Err(Fault::ListView) }
}

/// Views point into `buffers`, repeat the first four bytes rightly, and are UTF-8 if `utf8`.
pub(crate) fn views(views: &[u128], buffers: &[Buffer], utf8: bool) -> Result<(), Fault> {
    // Many views may name the same bytes, so each buffer is read once, as a whole. One that is no string as a whole may
    // still hold strings; then these are read one by one, as long as that is not much more than all there is. Rows that name
    // the very same string, as those of a Parquet page with a dictionary do, have it read once.
    let whole: Vec<bool> = buffers.iter().map(|buffer| utf8 && std::str::from_utf8(buffer).is_ok()).collect();
    let all: usize = buffers.iter().map(Buffer::len).sum();
    let mut budget = all.saturating_mul(8).saturating_add(size_of_val(views));
    let mut checked = HashSet::new();

    for view in views {
        let bits = *view;
        let view = ByteView::from(bits);
        if view.length <= MAX_INLINE_VIEW_LEN {
            if view.length < MAX_INLINE_VIEW_LEN && bits >> (32 + 8 * view.length) != 0 {
                return Err(Fault::View);
            }
            let string = &bits.to_le_bytes()[4..4 + view.length as usize];
            if utf8 && !string.is_ascii() && std::str::from_utf8(string).is_err() {
                return Err(Fault::Utf8);
            }
            continue;
        }
        let index = view.buffer_index as usize;
        let buffer = buffers.get(index).ok_or(Fault::View)?;
        let start = view.offset as usize;
        let string = buffer.get(start..start + view.length as usize).ok_or(Fault::View)?;
        if string[..4] != view.prefix.to_le_bytes() {
            return Err(Fault::View);
        }
        if !utf8 {
            continue;
        }
        if whole[index] {
            let end = start + string.len();
            if !is_boundary(string[0]) || buffer.get(end).is_some_and(|byte| !is_boundary(*byte)) {
                return Err(Fault::Utf8);
            }
        } else if checked.insert(bits) {
            budget = budget.checked_sub(string.len()).ok_or(Fault::SharedViews)?;
            std::str::from_utf8(string).map_err(|_| Fault::Utf8)?;
        }
    }
    Ok(())
}

/// Keys that are not null are below `values`.
pub(crate) fn keys<T: ArrowNativeType>(
    keys: &[T],
    nulls: Option<&NullBuffer>,
    values: usize,
) -> Result<(), Fault> {
    let valid = |key: &T| key.to_usize().is_some_and(|key| key < values);
    if keys.iter().fold(true, |so_far, key| so_far & valid(key)) {
        return Ok(());
    }
    // Below a null anything may stand.
    let nulls = nulls.ok_or(Fault::Key { values })?;
    if nulls.valid_indices().all(|row| valid(&keys[row])) { Ok(()) } else { Err(Fault::Key { values }) }
}

/// Every type id is a field's; `offsets` of a dense union lie within their child. `lengths` are the children's.
pub(crate) fn union(
    fields: &UnionFields,
    type_ids: &[i8],
    offsets: Option<&ScalarBuffer<i32>>,
    lengths: &[usize],
) -> Result<(), Fault> {
    let mut of_id = [None; 256];
    for ((id, _), length) in fields.iter().zip(lengths) {
        of_id[usize::from(id.cast_unsigned())] = Some(*length);
    }
    let length = |id: &i8| of_id[usize::from(id.cast_unsigned())];
    let valid = match offsets {
        None => type_ids.iter().all(|id| length(id).is_some()),
        Some(offsets) => type_ids.iter().zip(offsets.iter()).all(|(id, offset)| {
            length(id).is_some_and(|length| usize::try_from(*offset).is_ok_and(|offset| offset < length))
        }),
    };
    if valid { Ok(()) } else { Err(Fault::Union) }
}

/// Run ends ascend from at least 1 to at least `len`.
pub(crate) fn run_ends<T: ArrowNativeType + PartialOrd>(ends: &[T], len: usize) -> Result<(), Fault> {
    let ascending = ends.windows(2).fold(true, |so_far, pair| so_far & (pair[0] < pair[1]));
    let positive = ends.first().is_none_or(|first| first.to_usize().is_some_and(|first| first > 0));
    let reaches = ends.last().map_or(0, |last| last.to_usize().unwrap_or(0)) >= len;
    if ascending && positive && reaches { Ok(()) } else { Err(Fault::RunEnds) }
}

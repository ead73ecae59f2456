//! Arrays as field nodes and buffers of a body, cut to what the array uses and, where possible, not copied.
//!
//! A slice of an array shares the whole array's buffers. What lies outside of it should not be sent:
//!
//! | buffer | cut without a copy | copied |
//! |---|---|---|
//! | bitmap | the slice begins at a multiple of 8 | it does not |
//! | fixed width, keys, type ids, views | always | never |
//! | offsets of strings and lists | the first is 0 | to begin at 0 |
//! | values of strings, children of lists | always | never |
//! | data of views | behind the last byte used | if asked for, and that spares more than half |
//! | children of list views and dense unions | behind the last value used | their offsets, if that spares more values than there are rows |
//! | run ends | the slice begins with the array | it does not |

use arrow_buffer::{ArrowNativeType, BooleanBuffer, Buffer, ScalarBuffer};
use arrow_data::{ArrayData, ByteView, MAX_INLINE_VIEW_LEN, layout};
use arrow_ipc as ipc;
use arrow_schema::{DataType, UnionFields, UnionMode};

use crate::ALIGNMENT;
use crate::message::Segment;

/// What a record batch's metadata lists, and its body.
#[derive(Debug, Default)]
pub(crate) struct Cut {
    pub(crate) nodes: Vec<ipc::FieldNode>,
    pub(crate) buffers: Vec<ipc::Buffer>,
    pub(crate) variadic: Vec<i64>,
    pub(crate) body: Vec<Segment>,
    pub(crate) body_len: usize,
    pub(crate) copied_bytes: usize,
    pub(crate) compact_views: bool,
}

impl Cut {
    /// Adds an array and, depth-first, those below it. The values of dictionaries have messages of their own.
    pub(crate) fn array(&mut self, array: &ArrayData) {
        let (offset, len) = (array.offset(), array.len());
        let nulls = match array.data_type() {
            DataType::Null => len,
            _ => array.null_count(),
        };
        self.nodes.push(ipc::FieldNode::new(len as i64, nulls as i64));
        // Unions since metadata version 5, run-end encoded arrays and nulls have no bitmap.
        if layout(array.data_type()).can_contain_null_mask {
            match array.nulls() {
                Some(nulls) if nulls.null_count() > 0 => self.bitmap(nulls.inner()),
                _ => self.buffer(Buffer::default()),
            }
        }
        match array.data_type() {
            DataType::Null => {}
            DataType::Boolean => {
                self.bitmap(&BooleanBuffer::new(array.buffers()[0].clone(), offset, len));
            }
            DataType::Utf8 | DataType::Binary => self.bytes::<i32>(array),
            DataType::LargeUtf8 | DataType::LargeBinary => self.bytes::<i64>(array),
            DataType::Utf8View | DataType::BinaryView => self.views(array),
            DataType::List(_) | DataType::Map(_, _) => self.list::<i32>(array),
            DataType::LargeList(_) => self.list::<i64>(array),
            DataType::ListView(_) => self.list_view::<i32>(array),
            DataType::LargeListView(_) => self.list_view::<i64>(array),
            DataType::FixedSizeList(_, size) => {
                let size = size.as_usize();
                self.child(&array.child_data()[0], offset * size, len * size);
            }
            DataType::Struct(_) => {
                for child in array.child_data() {
                    self.child(child, 0, len);
                }
            }
            DataType::Union(fields, UnionMode::Dense) => self.dense_union(array, fields),
            DataType::Union(_, UnionMode::Sparse) => {
                self.numbers(&numbers::<i8>(array, 0, len));
                for child in array.child_data() {
                    self.child(child, offset, len);
                }
            }
            DataType::RunEndEncoded(ends, _) => match ends.data_type() {
                DataType::Int16 => self.runs::<i16>(array),
                DataType::Int32 => self.runs::<i32>(array),
                _ => self.runs::<i64>(array),
            },
            data_type => {
                let width = match layout(data_type).buffers[..] {
                    [arrow_data::BufferSpec::FixedWidth { byte_width, .. }] => byte_width,
                    _ => unreachable!("types with any other layout are listed above"),
                };
                self.buffer(array.buffers()[0].slice_with_length(offset * width, len * width));
            }
        }
    }

    fn buffer(&mut self, buffer: Buffer) {
        let len = buffer.len();
        self.range(len);
        if len > 0 {
            self.body.push(Segment::Buffer(buffer));
            self.pad(len);
        }
    }

    fn copied(&mut self, buffer: Buffer) {
        self.copied_bytes += buffer.len();
        self.buffer(buffer);
    }

    fn range(&mut self, len: usize) {
        self.buffers.push(ipc::Buffer::new(self.body_len as i64, len as i64));
        self.body_len += len.next_multiple_of(ALIGNMENT);
    }

    fn pad(&mut self, len: usize) {
        match len.next_multiple_of(ALIGNMENT) - len {
            0 => {}
            padding => self.body.push(Segment::Zeros(padding)),
        }
    }

    fn numbers<T: ArrowNativeType>(&mut self, numbers: &ScalarBuffer<T>) {
        self.buffer(numbers.inner().clone());
    }

    fn bitmap(&mut self, bits: &BooleanBuffer) {
        let (offset, len) = (bits.offset(), bits.len());
        if offset.is_multiple_of(8) {
            // The bits behind the last are whatever follows in the array.
            self.buffer(bits.inner().slice_with_length(offset / 8, len.div_ceil(8)));
        } else {
            self.copied(bits.inner().bit_slice(offset, len));
        }
    }

    /// Part of a child.
    fn child(&mut self, child: &ArrayData, offset: usize, len: usize) {
        if (offset, len) == (0, child.len()) {
            self.array(child);
        } else {
            self.array(&child.slice(offset, len));
        }
    }

    /// Offsets of strings or lists. Returns the range of what they point to.
    fn offsets<T: ArrowNativeType + std::ops::Sub<Output = T>>(
        &mut self,
        array: &ArrayData,
    ) -> (usize, usize) {
        if array.is_empty() {
            // There is one offset more than values, but an array may lack it if there are none.
            self.range(size_of::<T>());
            self.body.push(Segment::Zeros(ALIGNMENT));
            return (0, 0);
        }
        let offsets = numbers::<T>(array, 0, array.len() + 1);
        let (first, last) = (offsets[0], offsets[array.len()]);
        if first.as_usize() == 0 {
            self.numbers(&offsets);
        } else {
            self.copied(offsets.iter().map(|offset| *offset - first).collect());
        }
        (first.as_usize(), last.as_usize())
    }

    fn bytes<T: ArrowNativeType + std::ops::Sub<Output = T>>(&mut self, array: &ArrayData) {
        let (first, last) = self.offsets::<T>(array);
        self.buffer(array.buffers()[1].slice_with_length(first, last - first));
    }

    fn list<T: ArrowNativeType + std::ops::Sub<Output = T>>(&mut self, array: &ArrayData) {
        let (first, last) = self.offsets::<T>(array);
        self.child(&array.child_data()[0], first, last - first);
    }

    fn views(&mut self, array: &ArrayData) {
        let views = numbers::<u128>(array, 0, array.len());
        let data = &array.buffers()[1..];
        // Looking at all views costs 16 bytes of reading for each row; it is done where it may spare more.
        let bytes: usize = data.iter().map(Buffer::len).sum();
        if bytes <= 64 * views.len() {
            self.variadic.push(data.len() as i64);
            self.numbers(&views);
            data.iter().for_each(|buffer| self.buffer(buffer.clone()));
            return;
        }
        let mut used = vec![0; data.len()];
        let mut needed = 0_usize;
        for view in views.iter().map(|view| ByteView::from(*view)) {
            // Arrays that came over the C data interface may hold anything below a null.
            if let Some(used) = used.get_mut(view.buffer_index as usize)
                && view.length > MAX_INLINE_VIEW_LEN
            {
                *used = (view.offset as usize + view.length as usize).max(*used);
                needed = needed.saturating_add(view.length as usize);
            }
        }
        let cut: Vec<_> = data
            .iter()
            .zip(used)
            .map(|(buffer, used)| buffer.slice_with_length(0, used.min(buffer.len())))
            .collect();
        let spared = cut.iter().map(Buffer::len).sum::<usize>() / 2;
        if self.compact_views && needed < spared.min(i32::MAX as usize) {
            let (views, data) = compact(&views, &cut, needed);
            self.variadic.push(1);
            self.copied(views);
            self.copied(data);
            return;
        }
        self.variadic.push(data.len() as i64);
        self.numbers(&views);
        cut.into_iter().for_each(|buffer| self.buffer(buffer));
    }

    fn list_view<T: ArrowNativeType + std::ops::Sub<Output = T>>(&mut self, array: &ArrayData) {
        let offsets = numbers::<T>(array, 0, array.len());
        let sizes = numbers::<T>(array, 1, array.len());
        let values = &array.child_data()[0];
        let ends = offsets
            .iter()
            .zip(&sizes)
            .map(|(offset, size)| offset.as_usize().saturating_add(size.as_usize()));
        let (mut start, mut end) = (0, ends.max().unwrap_or(0));
        let first = offsets.iter().copied().min_by_key(|offset| offset.as_usize()).unwrap_or_default();
        if end > values.len() {
            end = values.len(); // below a null stands anything; nothing is cut off
            self.numbers(&offsets);
        } else if first.as_usize() > array.len() {
            start = first.as_usize();
            self.copied(offsets.iter().map(|offset| *offset - first).collect());
        } else {
            self.numbers(&offsets);
        }
        self.numbers(&sizes);
        self.child(values, start, end - start);
    }

    fn dense_union(&mut self, array: &ArrayData, fields: &UnionFields) {
        let type_ids = numbers::<i8>(array, 0, array.len());
        let offsets = numbers::<i32>(array, 1, array.len());
        self.numbers(&type_ids);

        // By type id: the first value that is used, and the one behind the last.
        let mut used = [(usize::MAX, 0); 256];
        for (id, offset) in type_ids.iter().zip(&offsets) {
            let (first, end) = &mut used[usize::from(id.cast_unsigned())];
            *first = offset.as_usize().min(*first);
            *end = offset.as_usize().saturating_add(1).max(*end);
        }
        for (first, end) in &mut used {
            *first = (*first).min(*end);
        }
        let of_id = |id: i8| usize::from(id.cast_unsigned());
        let children = || fields.iter().map(|(id, _)| of_id(id)).zip(array.child_data());
        if children().any(|(id, child)| used[id].1 > child.len()) {
            children().for_each(|(id, child)| used[id] = (0, child.len())); // below a parent's null stands anything
        } else if children().map(|(id, _)| used[id].0).sum::<usize>() <= array.len() {
            children().for_each(|(id, _)| used[id].0 = 0);
        }
        if children().all(|(id, _)| used[id].0 == 0) {
            self.numbers(&offsets);
        } else {
            let from_first = |(id, offset): (&i8, &i32)| offset - i32::usize_as(used[of_id(*id)].0);
            self.copied(type_ids.iter().zip(&offsets).map(from_first).collect());
        }
        for (id, child) in children() {
            let (first, end) = used[id];
            self.child(child, first, end - first);
        }
    }

    fn runs<T: ArrowNativeType + PartialOrd>(&mut self, array: &ArrayData) {
        let (offset, len) = (array.offset(), array.len());
        let [ends, values] = array.child_data() else { unreachable!("run ends and values") };
        let run_ends = numbers::<T>(ends, 0, ends.len());
        let first = run_ends.partition_point(|end| end.as_usize() <= offset);
        let runs = match len {
            0 => 0,
            _ => run_ends[first..].partition_point(|end| end.as_usize() < offset + len) + 1,
        };
        self.nodes.push(ipc::FieldNode::new(runs as i64, 0));
        self.buffer(Buffer::default());
        if offset == 0 {
            self.numbers(&run_ends.slice(0, runs)); // the last may reach beyond the array
        } else {
            let shifted = |end: &T| T::usize_as(end.as_usize().min(offset + len) - offset);
            self.copied(run_ends[first..first + runs].iter().map(shifted).collect());
        }
        self.child(values, if runs == 0 { 0 } else { first }, runs);
    }
}

/// Views, and the one buffer that holds what they refer to, `bytes` at most. What refers to nothing stood below a null.
fn compact(views: &[u128], data: &[Buffer], bytes: usize) -> (Buffer, Buffer) {
    let mut all = Vec::with_capacity(bytes);
    let views: Vec<u128> = views
        .iter()
        .map(|word| {
            let view = ByteView::from(*word);
            if view.length <= MAX_INLINE_VIEW_LEN {
                return *word;
            }
            let begin = view.offset as usize;
            let buffer = data.get(view.buffer_index as usize);
            let Some(value) = buffer.and_then(|buffer| buffer.get(begin..begin + view.length as usize))
            else {
                return 0;
            };
            let offset = u32::try_from(all.len()).expect("below 2 GiB");
            all.extend_from_slice(value);
            ByteView { buffer_index: 0, offset, ..view }.as_u128()
        })
        .collect();
    (Buffer::from_vec(views), Buffer::from_vec(all))
}

/// `len` numbers of buffer `index`, from the array's offset on.
fn numbers<T: ArrowNativeType>(array: &ArrayData, index: usize, len: usize) -> ScalarBuffer<T> {
    ScalarBuffer::new(array.buffers()[index].clone(), array.offset(), len)
}

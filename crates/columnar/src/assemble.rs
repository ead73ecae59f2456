//! Arrays from field nodes and ranges of a body. Each is a slice of the body; nothing is copied unless a misaligned buffer
//! may be.

use std::ops::Range;
use std::slice;

use arrow_buffer::{ArrowNativeType, BooleanBuffer, Buffer, MutableBuffer, NullBuffer, ScalarBuffer};
use arrow_data::{ArrayData, ArrayDataBuilder, BufferSpec, layout};
use arrow_schema::{DataType, Field, FieldRef, UnionFields, UnionMode};

use crate::dictionaries::Dictionaries;
use crate::metadata::{BatchHeader, Node};
use crate::schema::Plan;
use crate::{DecodeOptions, Fault, Misaligned, Trust, validate};

/// Walks the types of a batch depth-first and takes nodes and buffers as it goes.
#[derive(Debug)]
pub(crate) struct Assembler<'a> {
    nodes: slice::Iter<'a, Node>,
    buffers: slice::Iter<'a, Range<usize>>,
    variadic: slice::Iter<'a, usize>,
    all_have_validity: bool,
    body: &'a Buffer,
    dictionaries: &'a Dictionaries,
    misaligned: Misaligned,
    validate: bool,
    copied: usize,
}

impl<'a> Assembler<'a> {
    /// `body` is as long as the message said, and `dictionaries` are joined.
    pub(crate) fn new(
        header: &'a BatchHeader,
        body: &'a Buffer,
        dictionaries: &'a Dictionaries,
        options: &DecodeOptions,
    ) -> Self {
        Self {
            nodes: header.nodes.iter(),
            buffers: header.buffers.iter(),
            variadic: header.variadic.iter(),
            all_have_validity: header.all_have_validity,
            body,
            dictionaries,
            misaligned: options.misaligned,
            validate: options.trust() == Trust::Validate,
            copied: 0,
        }
    }

    /// Checks that nothing of the message is left over. Returns the bytes copied.
    pub(crate) fn finish(mut self) -> Result<usize, Fault> {
        let left = (self.nodes.next(), self.buffers.next(), self.variadic.next());
        if let (None, None, None) = left { Ok(self.copied) } else { Err(Fault::Shape) }
    }

    /// The next array, which is one of `data_type`.
    pub(crate) fn array(&mut self, data_type: &DataType, plan: &Plan) -> Result<ArrayData, Fault> {
        let node = *self.nodes.next().ok_or(Fault::Shape)?;
        let array = ArrayData::builder(data_type.clone()).len(node.len);
        let array = match data_type {
            DataType::Null => array, // its count of nulls is its length for some writers, zero for others
            DataType::Boolean => {
                let nulls = self.validity(node)?;
                let bits = self.buffer(node.len.div_ceil(8), 1)?;
                array.nulls(nulls).add_buffer(bits)
            }
            DataType::Utf8 | DataType::Binary => self.bytes::<i32>(array, node, data_type)?,
            DataType::LargeUtf8 | DataType::LargeBinary => self.bytes::<i64>(array, node, data_type)?,
            DataType::Utf8View | DataType::BinaryView => self.views(array, node, data_type)?,
            DataType::List(field) | DataType::Map(field, _) => {
                self.list::<i32>(array, node, (field, plan))?
            }
            DataType::LargeList(field) => self.list::<i64>(array, node, (field, plan))?,
            DataType::ListView(field) => self.list_view::<i32>(array, node, (field, plan))?,
            DataType::LargeListView(field) => self.list_view::<i64>(array, node, (field, plan))?,
            DataType::FixedSizeList(field, size) => {
                let nulls = self.validity(node)?;
                let size = usize::try_from(*size).map_err(|_| Fault::Length)?;
                let len = node.len.checked_mul(size).ok_or(Fault::Length)?;
                let values = self.child(field, child_plan(plan, 0)?, len)?;
                // Expanded only if there are nulls below, so not to more bits than these take.
                let below = || nulls.as_ref().map(|nulls| nulls.expand(size));
                if self.validate && !field.is_nullable() && values.nulls().is_some() {
                    not_null(below().as_ref(), &values)?;
                }
                array.nulls(nulls).add_child_data(values)
            }
            DataType::Struct(fields) => {
                let nulls = self.validity(node)?;
                let mut children = Vec::with_capacity(fields.len());
                for (index, field) in fields.iter().enumerate() {
                    let child = self.child(field, child_plan(plan, index)?, node.len)?;
                    if self.validate && !field.is_nullable() {
                        not_null(nulls.as_ref(), &child)?;
                    }
                    children.push(child);
                }
                array.nulls(nulls).child_data(children)
            }
            DataType::Union(fields, mode) => self.union(array, node, fields, *mode, plan)?,
            DataType::Dictionary(keys, values) => self.dictionary(array, node, keys, values, plan)?,
            DataType::RunEndEncoded(ends, values) => self.runs(array, node, ends, values, plan)?,
            _ => {
                let nulls = self.validity(node)?;
                array.nulls(nulls).add_buffer(self.fixed(data_type, node.len)?)
            }
        };
        build(array)
    }

    fn next_range(&mut self) -> Result<Range<usize>, Fault> {
        self.buffers.next().cloned().ok_or(Fault::Shape)
    }

    /// The next buffer, cut to `needed` bytes.
    fn buffer(&mut self, needed: usize, alignment: usize) -> Result<Buffer, Fault> {
        let range = self.next_range()?;
        if range.len() < needed {
            return Err(Fault::Short { needed, actual: range.len() });
        }
        self.slice(range.start..range.start + needed, alignment)
    }

    /// Part of the body. The header's ranges lie within it.
    fn slice(&mut self, range: Range<usize>, alignment: usize) -> Result<Buffer, Fault> {
        if range.is_empty() {
            return Ok(Buffer::default());
        }
        let buffer = self.body.slice_with_length(range.start, range.len());
        if buffer.as_ptr().align_offset(alignment) == 0 {
            return Ok(buffer);
        }
        match self.misaligned {
            Misaligned::Refuse => Err(Fault::Misaligned { alignment }),
            Misaligned::Copy => {
                self.copied += buffer.len();
                let mut aligned = MutableBuffer::with_capacity(buffer.len());
                aligned.extend_from_slice(&buffer);
                Ok(aligned.into())
            }
        }
    }

    /// The next buffer as `len` numbers.
    fn numbers<T: ArrowNativeType>(&mut self, len: usize) -> Result<ScalarBuffer<T>, Fault> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or(Fault::Length)?;
        Ok(ScalarBuffer::new(self.buffer(bytes, align_of::<T>())?, 0, len))
    }

    /// The next buffer as `len` values of a type that has one such buffer.
    fn fixed(&mut self, data_type: &DataType, len: usize) -> Result<Buffer, Fault> {
        let [BufferSpec::FixedWidth { byte_width, alignment }] = layout(data_type).buffers[..] else {
            return Err(Fault::Shape);
        };
        self.buffer(len.checked_mul(byte_width).ok_or(Fault::Length)?, alignment)
    }

    /// The validity bitmap, which is always there and may be empty if nothing is null.
    fn validity(&mut self, node: Node) -> Result<Option<NullBuffer>, Fault> {
        if node.nulls == 0 {
            self.next_range()?;
            return Ok(None);
        }
        let bits = self.buffer(node.len.div_ceil(8), 1)?;
        let nulls = NullBuffer::new(BooleanBuffer::new(bits, 0, node.len));
        if nulls.null_count() == node.nulls { Ok(Some(nulls)) } else { Err(Fault::NullCount) }
    }

    /// Offsets of `len` strings or lists. Without any, the first, if there is one, says nothing: C++ leaves what it was in a longer array.
    fn offsets<T: ArrowNativeType>(&mut self, len: usize) -> Result<ScalarBuffer<T>, Fault> {
        if len > 0 {
            return self.numbers(len.checked_add(1).ok_or(Fault::Length)?);
        }
        let range = self.next_range()?;
        let end = range.start + range.len().min(size_of::<T>());
        let buffer = self.slice(range.start..end, align_of::<T>())?;
        let len = buffer.len() / size_of::<T>();
        let first = ScalarBuffer::<T>::new(buffer, 0, len);
        Ok(if first.iter().all(|offset| offset.to_usize() == Some(0)) { first } else { Vec::new().into() })
    }

    fn check_offsets<T: ArrowNativeType + PartialOrd>(
        &self,
        offsets: &[T],
        limit: usize,
    ) -> Result<(), Fault> {
        if self.validate {
            validate::offsets(offsets, limit)
        } else {
            validate::ends(offsets, limit).map(|_| ())
        }
    }

    fn bytes<T: ArrowNativeType + PartialOrd>(
        &mut self,
        array: ArrayDataBuilder,
        node: Node,
        data_type: &DataType,
    ) -> Result<ArrayDataBuilder, Fault> {
        let nulls = self.validity(node)?;
        let offsets = self.offsets::<T>(node.len)?;
        let range = self.next_range()?;
        let values = self.slice(range, 1)?;
        self.check_offsets(&offsets, values.len())?;
        if self.validate && matches!(data_type, DataType::Utf8 | DataType::LargeUtf8) {
            validate::utf8(&offsets, &values)?;
        }
        Ok(array.nulls(nulls).buffers(vec![offsets.into_inner(), values]))
    }

    fn views(
        &mut self,
        array: ArrayDataBuilder,
        node: Node,
        data_type: &DataType,
    ) -> Result<ArrayDataBuilder, Fault> {
        let nulls = self.validity(node)?;
        let views = self.numbers::<u128>(node.len)?;
        let count = *self.variadic.next().ok_or(Fault::Shape)?;
        if count > self.buffers.len() {
            return Err(Fault::Shape);
        }
        let mut buffers = Vec::with_capacity(count + 1);
        for _ in 0..count {
            let range = self.next_range()?;
            buffers.push(self.slice(range, 1)?);
        }
        if self.validate {
            validate::views(&views, &buffers, *data_type == DataType::Utf8View)?;
        }
        buffers.insert(0, views.into_inner());
        Ok(array.nulls(nulls).buffers(buffers))
    }

    /// A child of exactly `len` values. More are cut off: a parent that is a slice may have them.
    fn child(&mut self, field: &Field, plan: &Plan, len: usize) -> Result<ArrayData, Fault> {
        let child = self.array(field.data_type(), plan)?;
        match child.len() {
            actual if actual == len => Ok(child),
            actual if actual > len => Ok(child.slice(0, len)),
            actual => Err(Fault::Child { needed: len, actual }),
        }
    }

    fn list<T: ArrowNativeType + PartialOrd>(
        &mut self,
        array: ArrayDataBuilder,
        node: Node,
        values: (&FieldRef, &Plan),
    ) -> Result<ArrayDataBuilder, Fault> {
        let nulls = self.validity(node)?;
        let offsets = self.offsets::<T>(node.len)?;
        let values = self.list_values(values)?;
        self.check_offsets(&offsets, values.len())?;
        Ok(array.nulls(nulls).add_buffer(offsets.into_inner()).add_child_data(values))
    }

    fn list_view<T: ArrowNativeType>(
        &mut self,
        array: ArrayDataBuilder,
        node: Node,
        values: (&FieldRef, &Plan),
    ) -> Result<ArrayDataBuilder, Fault> {
        let nulls = self.validity(node)?;
        let (offsets, sizes) = (self.numbers::<T>(node.len)?, self.numbers::<T>(node.len)?);
        let values = self.list_values(values)?;
        if self.validate {
            validate::list_views(&offsets, &sizes, values.len())?;
        }
        let buffers = vec![offsets.into_inner(), sizes.into_inner()];
        Ok(array.nulls(nulls).buffers(buffers).add_child_data(values))
    }

    /// What the lists consist of, of whatever number.
    fn list_values(&mut self, (field, plan): (&FieldRef, &Plan)) -> Result<ArrayData, Fault> {
        let values = self.array(field.data_type(), child_plan(plan, 0)?)?;
        if self.validate && !field.is_nullable() {
            not_null(None, &values)?;
        }
        Ok(values)
    }

    fn union(
        &mut self,
        array: ArrayDataBuilder,
        node: Node,
        fields: &UnionFields,
        mode: UnionMode,
        plan: &Plan,
    ) -> Result<ArrayDataBuilder, Fault> {
        if self.all_have_validity {
            self.next_range()?;
        }
        if node.nulls > 0 {
            return Err(Fault::NullCount);
        }
        let type_ids = self.numbers::<i8>(node.len)?;
        let offsets = match mode {
            UnionMode::Dense => Some(self.numbers::<i32>(node.len)?),
            UnionMode::Sparse => None,
        };
        let mut children = Vec::with_capacity(fields.len());
        for (index, (_, field)) in fields.iter().enumerate() {
            let plan = child_plan(plan, index)?;
            children.push(match mode {
                UnionMode::Dense => self.array(field.data_type(), plan)?,
                UnionMode::Sparse => self.child(field, plan, node.len)?,
            });
        }
        if self.validate {
            let lengths: Vec<_> = children.iter().map(ArrayData::len).collect();
            validate::union(fields, &type_ids, offsets.as_ref(), &lengths)?;
        }
        let offsets = offsets.map(ScalarBuffer::into_inner);
        Ok(array.add_buffer(type_ids.into_inner()).add_buffers(offsets).child_data(children))
    }

    fn dictionary(
        &mut self,
        array: ArrayDataBuilder,
        node: Node,
        key_type: &DataType,
        value_type: &DataType,
        plan: &Plan,
    ) -> Result<ArrayDataBuilder, Fault> {
        let nulls = self.validity(node)?;
        let buffer = self.fixed(key_type, node.len)?;
        let id = plan.dictionary.ok_or(Fault::Shape)?;
        let values = self.dictionaries.values(id, value_type);
        if self.validate {
            check_keys(key_type, &buffer, node.len, nulls.as_ref(), values.len())?;
        }
        Ok(array.nulls(nulls).add_buffer(buffer).add_child_data(values))
    }

    fn runs(
        &mut self,
        array: ArrayDataBuilder,
        node: Node,
        ends: &FieldRef,
        values: &FieldRef,
        plan: &Plan,
    ) -> Result<ArrayDataBuilder, Fault> {
        if self.all_have_validity {
            self.next_range()?;
        }
        if node.nulls > 0 {
            return Err(Fault::NullCount);
        }
        let run_ends = self.array(ends.data_type(), child_plan(plan, 0)?)?;
        if run_ends.nulls().is_some() {
            return Err(Fault::NullCount);
        }
        let values = self.child(values, child_plan(plan, 1)?, run_ends.len())?;
        if node.len == 0 {
            // Some writers (arrow-rs 58) have a run that ends at 0 here.
            return Ok(array.add_child_data(run_ends.slice(0, 0)).add_child_data(values.slice(0, 0)));
        }
        let only_last = !self.validate;
        match ends.data_type() {
            DataType::Int16 => check_runs::<i16>(&run_ends, node.len, only_last),
            DataType::Int32 => check_runs::<i32>(&run_ends, node.len, only_last),
            _ => check_runs::<i64>(&run_ends, node.len, only_last),
        }?;
        Ok(array.add_child_data(run_ends).add_child_data(values))
    }
}

fn check_runs<T: ArrowNativeType + PartialOrd>(
    ends: &ArrayData,
    len: usize,
    only_last: bool,
) -> Result<(), Fault> {
    let ends = ScalarBuffer::<T>::new(ends.buffers()[0].clone(), 0, ends.len());
    let checked = if only_last { &ends[ends.len().saturating_sub(1)..] } else { &ends[..] };
    validate::run_ends(checked, len)
}

fn check_keys(
    key_type: &DataType,
    keys: &Buffer,
    len: usize,
    nulls: Option<&NullBuffer>,
    values: usize,
) -> Result<(), Fault> {
    fn check<T: ArrowNativeType>(
        keys: &Buffer,
        len: usize,
        nulls: Option<&NullBuffer>,
        values: usize,
    ) -> Result<(), Fault> {
        validate::keys(&ScalarBuffer::<T>::new(keys.clone(), 0, len), nulls, values)
    }
    match key_type {
        DataType::Int8 => check::<i8>(keys, len, nulls, values),
        DataType::Int16 => check::<i16>(keys, len, nulls, values),
        DataType::Int32 => check::<i32>(keys, len, nulls, values),
        DataType::Int64 => check::<i64>(keys, len, nulls, values),
        DataType::UInt8 => check::<u8>(keys, len, nulls, values),
        DataType::UInt16 => check::<u16>(keys, len, nulls, values),
        DataType::UInt32 => check::<u32>(keys, len, nulls, values),
        DataType::UInt64 => check::<u64>(keys, len, nulls, values),
        _ => Err(Fault::Shape),
    }
}

fn child_plan(plan: &Plan, index: usize) -> Result<&Plan, Fault> {
    plan.children.get(index).ok_or(Fault::Shape)
}

/// The values of a field without nulls have none, except where the parent is null.
fn not_null(parent: Option<&NullBuffer>, child: &ArrayData) -> Result<(), Fault> {
    match (child.nulls(), parent) {
        (None, _) => Ok(()),
        (Some(nulls), Some(parent)) if parent.contains(nulls) => Ok(()),
        _ => Err(Fault::NotNullable),
    }
}

#[allow(unsafe_code, reason = "arrow's own validation is slower, and quadratic on views that share bytes")]
fn build(array: ArrayDataBuilder) -> Result<ArrayData, Fault> {
    // SAFETY: `Assembler` has checked all that `ArrayData::validate_data` would, as the tests with hostile bytes
    // compare; except what looks at every row, if by `DecodeOptions::trust_sender` the caller vouches for it.
    let array = unsafe { array.skip_validation(true) };
    Ok(array.build()?)
}

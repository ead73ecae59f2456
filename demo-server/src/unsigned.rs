//! UHUGEINT, which DuckDB's Arrow export makes a signed number of: from 2¹²⁷ on, one below zero.

use arrow_array::cast::AsArray;
use arrow_array::types::Decimal128Type;
use arrow_array::{Array, ArrayRef};
use duckdb::Statement;
use duckdb::core::{LogicalTypeHandle, LogicalTypeId};

/// The columns of a result that have UHUGEINT, or have some within.
#[derive(Debug)]
pub(crate) struct Unsigned(Vec<(usize, LogicalTypeHandle)>);

impl Unsigned {
    /// Of a statement that has begun.
    pub(crate) fn of(statement: &Statement<'_>) -> Self {
        let columns =
            (0..statement.column_count()).map(|index| (index, statement.column_logical_type(index)));
        Self(columns.filter(|(_, kind)| has_some(kind)).collect())
    }

    /// The column of a chunk that has a number which would be another one.
    pub(crate) fn wrong(&self, columns: &[ArrayRef]) -> Option<usize> {
        let wrong = |(index, kind): &&(usize, LogicalTypeHandle)| is_wrong(kind, columns[*index].as_ref());
        self.0.iter().find(wrong).map(|(index, _)| *index)
    }
}

fn has_some(kind: &LogicalTypeHandle) -> bool {
    kind.id() == LogicalTypeId::UHugeint || (0..kind.num_children()).any(|child| has_some(&kind.child(child)))
}

fn is_wrong(kind: &LogicalTypeHandle, array: &dyn Array) -> bool {
    let child = |index: usize, array: &dyn Array| is_wrong(&kind.child(index), array);
    match kind.id() {
        LogicalTypeId::UHugeint => {
            let numbers = array.as_primitive_opt::<Decimal128Type>();
            numbers.is_some_and(|numbers| numbers.iter().flatten().any(|number| number < 0))
        }
        LogicalTypeId::List => array.as_list_opt::<i32>().is_some_and(|list| child(0, list.values())),
        LogicalTypeId::Array => array.as_fixed_size_list_opt().is_some_and(|list| child(0, list.values())),
        LogicalTypeId::Map => {
            array.as_map_opt().is_some_and(|map| child(0, map.keys()) || child(1, map.values()))
        }
        LogicalTypeId::Struct => array.as_struct_opt().is_some_and(|fields| {
            fields.columns().iter().enumerate().any(|(index, field)| child(index, field))
        }),
        LogicalTypeId::Union => array.as_union_opt().is_some_and(|union| {
            (0..kind.num_children()).zip(0..).any(|(index, id)| child(index, union.child(id)))
        }),
        _ => false,
    }
}

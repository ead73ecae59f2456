//! Numbers of which DuckDB's Arrow export makes others: UHUGEINT becomes a signed number, from 2¹²⁷ on one below zero; the
//! microseconds of an INTERVAL become nanoseconds, which from 2⁶³ on begin again at the other end.

use arrow_array::cast::AsArray;
use arrow_array::types::{Decimal128Type, IntervalMonthDayNanoType};
use arrow_array::{Array, ArrayRef};
use duckdb::Statement;
use duckdb::core::{LogicalTypeHandle, LogicalTypeId};

/// The columns of a result that have such types, or have some within.
#[derive(Debug)]
pub(crate) struct Unfit(Vec<(usize, LogicalTypeHandle)>);

impl Unfit {
    /// Of a statement that has begun.
    pub(crate) fn of(statement: &Statement<'_>) -> Self {
        let columns =
            (0..statement.column_count()).map(|index| (index, statement.column_logical_type(index)));
        Self(columns.filter(|(_, kind)| has_some(kind)).collect())
    }

    /// The column of a chunk that has a number which would be another one, and what Arrow has not.
    pub(crate) fn wrong(&self, columns: &[ArrayRef]) -> Option<(usize, &'static str)> {
        self.0.iter().find_map(|(index, kind)| Some((*index, wrong(kind, columns[*index].as_ref())?)))
    }
}

fn has_some(kind: &LogicalTypeHandle) -> bool {
    matches!(kind.id(), LogicalTypeId::UHugeint | LogicalTypeId::Interval)
        || (0..kind.num_children()).any(|child| has_some(&kind.child(child)))
}

fn wrong(kind: &LogicalTypeHandle, array: &dyn Array) -> Option<&'static str> {
    let child = |index: usize, array: &dyn Array| wrong(&kind.child(index), array);
    match kind.id() {
        LogicalTypeId::UHugeint => {
            let numbers = array.as_primitive_opt::<Decimal128Type>()?;
            numbers.iter().flatten().any(|number| number < 0).then_some("UHUGEINT of 2^127 or more")
        }
        LogicalTypeId::Interval => {
            let spans = array.as_primitive_opt::<IntervalMonthDayNanoType>()?;
            // 2⁶⁴ is no multiple of a thousand. Only one that has been gone round 125 times, or a multiple of that, is not seen.
            let wrong = spans.iter().flatten().any(|span| span.nanoseconds % 1000 != 0);
            wrong.then_some("INTERVAL of 2^63 nanoseconds or more beside days and months")
        }
        LogicalTypeId::List => child(0, array.as_list_opt::<i32>()?.values()),
        LogicalTypeId::Array => child(0, array.as_fixed_size_list_opt()?.values()),
        LogicalTypeId::Map => {
            let map = array.as_map_opt()?;
            child(0, map.keys()).or_else(|| child(1, map.values()))
        }
        LogicalTypeId::Struct => {
            let fields = array.as_struct_opt()?.columns();
            fields.iter().enumerate().find_map(|(index, field)| child(index, field))
        }
        LogicalTypeId::Union => {
            let union = array.as_union_opt()?;
            (0..kind.num_children()).zip(0..).find_map(|(index, id)| child(index, union.child(id)))
        }
        _ => None,
    }
}

//! The schema of a stream: Arrow's types from their flatbuffer form, and where in them the dictionaries are.
//!
//! arrow-ipc has this conversion too, for schemas of one's own: it panics on what a hostile sender can write.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_ipc as ipc;
use arrow_schema::{
    DECIMAL32_MAX_PRECISION, DECIMAL64_MAX_PRECISION, DECIMAL128_MAX_PRECISION, DECIMAL256_MAX_PRECISION,
    DataType, Field, FieldRef, Fields, IntervalUnit, Schema, SchemaRef, TimeUnit, UnionFields, UnionMode,
};

use crate::Error;

/// The dictionary of a field and of those below it. Children are those of the type, for a dictionary those of its
/// values' type, in the order of [`ArrayData::child_data`](arrow_data::ArrayData::child_data).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) dictionary: Option<i64>,
    pub(crate) children: Vec<Plan>,
}

/// A dictionary of the stream, which one or more fields use.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DictionaryType {
    pub(crate) values: DataType,
    /// Of the values.
    pub(crate) plan: Plan,
}

#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) schema: SchemaRef,
    /// One for each column.
    pub(crate) plans: Vec<Plan>,
    pub(crate) dictionaries: HashMap<i64, DictionaryType>,
}

impl Layout {
    /// Fields nested deeper than `depth` are an error.
    pub(crate) fn parse(schema: ipc::Schema<'_>, depth: usize) -> Result<Self, Error> {
        if schema.endianness() != ipc::Endianness::Little {
            return Err(Error::Unsupported("a big-endian stream"));
        }
        let mut dictionaries = HashMap::new();
        let mut plans = Vec::new();
        let mut fields = Vec::new();
        for field in schema.fields().into_iter().flatten() {
            let (field, plan) = parse_field(field, depth, &mut dictionaries)?;
            fields.push(field);
            plans.push(plan);
        }
        let metadata = key_values(schema.custom_metadata());
        Ok(Self { schema: Arc::new(Schema::new_with_metadata(fields, metadata)), plans, dictionaries })
    }
}

type KeyValues<'a> = flatbuffers::Vector<'a, flatbuffers::ForwardsUOffset<ipc::KeyValue<'a>>>;

pub(crate) fn key_values(list: Option<KeyValues<'_>>) -> HashMap<String, String> {
    let pair = |kv: ipc::KeyValue<'_>| Some((kv.key()?.to_owned(), kv.value()?.to_owned()));
    list.into_iter().flatten().filter_map(pair).collect()
}

fn parse_field(
    field: ipc::Field<'_>,
    depth: usize,
    dictionaries: &mut HashMap<i64, DictionaryType>,
) -> Result<(FieldRef, Plan), Error> {
    let name = field.name().unwrap_or_default();
    let wrong = |why: &str| Error::Field { field: name.to_owned(), why: why.to_owned() };
    let Some(depth) = depth.checked_sub(1) else { return Err(wrong("nested too deeply")) };

    let mut children = Vec::new();
    let mut plans = Vec::new();
    for child in field.children().into_iter().flatten() {
        let (child, plan) = parse_field(child, depth, dictionaries)?;
        children.push(child);
        plans.push(plan);
    }
    let mut data_type = parse_type(field, children).map_err(|why| wrong(&why))?;
    let mut plan = Plan { dictionary: None, children: plans };
    let mut ordered = false;

    if let Some(encoding) = field.dictionary() {
        if encoding.dictionaryKind() != ipc::DictionaryKind::DenseArray {
            return Err(wrong("unknown kind of dictionary"));
        }
        let keys = match encoding.indexType() {
            Some(int) => integer(int).map_err(|why| wrong(&why))?,
            None => DataType::Int32, // the default by Schema.fbs
        };
        let dictionary = DictionaryType { values: data_type.clone(), plan: plan.clone() };
        if *dictionaries.entry(encoding.id()).or_insert_with(|| dictionary.clone()) != dictionary {
            return Err(wrong("shares a dictionary with a field of another type"));
        }
        data_type = DataType::Dictionary(Box::new(keys), Box::new(data_type));
        plan.dictionary = Some(encoding.id());
        ordered = encoding.isOrdered();
    }
    let field = Field::new(name, data_type, field.nullable())
        .with_metadata(key_values(field.custom_metadata()))
        .with_dict_is_ordered(ordered);
    Ok((Arc::new(field), plan))
}

fn integer(int: ipc::Int<'_>) -> Result<DataType, String> {
    Ok(match (int.bitWidth(), int.is_signed()) {
        (8, true) => DataType::Int8,
        (16, true) => DataType::Int16,
        (32, true) => DataType::Int32,
        (64, true) => DataType::Int64,
        (8, false) => DataType::UInt8,
        (16, false) => DataType::UInt16,
        (32, false) => DataType::UInt32,
        (64, false) => DataType::UInt64,
        (bits, _) => return Err(format!("integer of {bits} bits")),
    })
}

fn time_unit(unit: ipc::TimeUnit) -> Result<TimeUnit, String> {
    Ok(match unit {
        ipc::TimeUnit::SECOND => TimeUnit::Second,
        ipc::TimeUnit::MILLISECOND => TimeUnit::Millisecond,
        ipc::TimeUnit::MICROSECOND => TimeUnit::Microsecond,
        ipc::TimeUnit::NANOSECOND => TimeUnit::Nanosecond,
        other => return Err(format!("unknown time unit {}", other.0)),
    })
}

fn parse_type(field: ipc::Field<'_>, children: Vec<FieldRef>) -> Result<DataType, String> {
    const MISSING: &str = "the type's parameters are missing";
    let leaf = |data_type: DataType, children: &[FieldRef]| match children {
        [] => Ok(data_type),
        _ => Err(format!("{data_type} with children")),
    };
    let only_child = |children: Vec<FieldRef>| {
        let found = children.len();
        <[FieldRef; 1]>::try_from(children)
            .map(|[child]| child)
            .map_err(|_| format!("one child is needed, there are {found}"))
    };
    let data_type = match field.type_type() {
        ipc::Type::List => return Ok(DataType::List(only_child(children)?)),
        ipc::Type::LargeList => return Ok(DataType::LargeList(only_child(children)?)),
        ipc::Type::ListView => return Ok(DataType::ListView(only_child(children)?)),
        ipc::Type::LargeListView => return Ok(DataType::LargeListView(only_child(children)?)),
        ipc::Type::FixedSizeList => {
            let size = field.type_as_fixed_size_list().ok_or(MISSING)?.listSize();
            if size < 0 {
                return Err(format!("lists of {size} values"));
            }
            return Ok(DataType::FixedSizeList(only_child(children)?, size));
        }
        ipc::Type::Struct_ => return Ok(DataType::Struct(Fields::from(children))),
        ipc::Type::Map => {
            let sorted = field.type_as_map().ok_or(MISSING)?.keysSorted();
            let entries = only_child(children)?;
            if !matches!(entries.data_type(), DataType::Struct(fields) if fields.len() == 2) {
                return Err("a map's entries are no struct of key and value".to_owned());
            }
            return Ok(DataType::Map(entries, sorted));
        }
        ipc::Type::RunEndEncoded => {
            let [ends, values] = <[FieldRef; 2]>::try_from(children)
                .map_err(|children| format!("two children are needed, there are {}", children.len()))?;
            if !ends.data_type().is_run_ends_type() || ends.is_nullable() {
                return Err("run ends are 16, 32 or 64 bit integers without nulls".to_owned());
            }
            return Ok(DataType::RunEndEncoded(ends, values));
        }
        ipc::Type::Union => return union(field.type_as_union().ok_or(MISSING)?, children),

        ipc::Type::Null => DataType::Null,
        ipc::Type::Bool => DataType::Boolean,
        ipc::Type::Int => integer(field.type_as_int().ok_or(MISSING)?)?,
        ipc::Type::FloatingPoint => match field.type_as_floating_point().ok_or(MISSING)?.precision() {
            ipc::Precision::HALF => DataType::Float16,
            ipc::Precision::SINGLE => DataType::Float32,
            ipc::Precision::DOUBLE => DataType::Float64,
            other => return Err(format!("unknown precision {}", other.0)),
        },
        ipc::Type::Utf8 => DataType::Utf8,
        ipc::Type::LargeUtf8 => DataType::LargeUtf8,
        ipc::Type::Utf8View => DataType::Utf8View,
        ipc::Type::Binary => DataType::Binary,
        ipc::Type::LargeBinary => DataType::LargeBinary,
        ipc::Type::BinaryView => DataType::BinaryView,
        ipc::Type::FixedSizeBinary => {
            let width = field.type_as_fixed_size_binary().ok_or(MISSING)?.byteWidth();
            if width < 0 {
                return Err(format!("values of {width} bytes"));
            }
            DataType::FixedSizeBinary(width)
        }
        ipc::Type::Decimal => decimal(field.type_as_decimal().ok_or(MISSING)?)?,
        ipc::Type::Date => match field.type_as_date().ok_or(MISSING)?.unit() {
            ipc::DateUnit::DAY => DataType::Date32,
            ipc::DateUnit::MILLISECOND => DataType::Date64,
            other => return Err(format!("unknown date unit {}", other.0)),
        },
        ipc::Type::Time => {
            let time = field.type_as_time().ok_or(MISSING)?;
            match (time.bitWidth(), time_unit(time.unit())?) {
                (32, unit @ (TimeUnit::Second | TimeUnit::Millisecond)) => DataType::Time32(unit),
                (64, unit @ (TimeUnit::Microsecond | TimeUnit::Nanosecond)) => DataType::Time64(unit),
                (bits, unit) => return Err(format!("time of {bits} bits in {unit:?}s")),
            }
        }
        ipc::Type::Timestamp => {
            let timestamp = field.type_as_timestamp().ok_or(MISSING)?;
            DataType::Timestamp(time_unit(timestamp.unit())?, timestamp.timezone().map(Arc::from))
        }
        ipc::Type::Duration => {
            DataType::Duration(time_unit(field.type_as_duration().ok_or(MISSING)?.unit())?)
        }
        ipc::Type::Interval => match field.type_as_interval().ok_or(MISSING)?.unit() {
            ipc::IntervalUnit::YEAR_MONTH => DataType::Interval(IntervalUnit::YearMonth),
            ipc::IntervalUnit::DAY_TIME => DataType::Interval(IntervalUnit::DayTime),
            ipc::IntervalUnit::MONTH_DAY_NANO => DataType::Interval(IntervalUnit::MonthDayNano),
            other => return Err(format!("unknown interval unit {}", other.0)),
        },
        other => return Err(format!("unknown type {}", other.0)),
    };
    leaf(data_type, &children)
}

fn decimal(decimal: ipc::Decimal<'_>) -> Result<DataType, String> {
    let out_of_range = || format!("decimal of precision {}, scale {}", decimal.precision(), decimal.scale());
    let precision = u8::try_from(decimal.precision()).map_err(|_| out_of_range())?;
    let scale = i8::try_from(decimal.scale()).map_err(|_| out_of_range())?;
    let (data_type, most) = match decimal.bitWidth() {
        32 => (DataType::Decimal32(precision, scale), DECIMAL32_MAX_PRECISION),
        64 => (DataType::Decimal64(precision, scale), DECIMAL64_MAX_PRECISION),
        128 => (DataType::Decimal128(precision, scale), DECIMAL128_MAX_PRECISION),
        256 => (DataType::Decimal256(precision, scale), DECIMAL256_MAX_PRECISION),
        bits => return Err(format!("decimal of {bits} bits")),
    };
    if (1..=most).contains(&precision) { Ok(data_type) } else { Err(out_of_range()) }
}

fn union(union: ipc::Union<'_>, children: Vec<FieldRef>) -> Result<DataType, String> {
    let mode = match union.mode() {
        ipc::UnionMode::Sparse => UnionMode::Sparse,
        ipc::UnionMode::Dense => UnionMode::Dense,
        other => return Err(format!("unknown union mode {}", other.0)),
    };
    if children.is_empty() {
        return Err("a union without children".to_owned()); // of which arrow can't make even an empty array
    }
    let ids: Vec<i8> = match union.typeIds() {
        Some(ids) => ids.iter().map(i8::try_from).collect::<Result<_, _>>(),
        None => (0..children.len()).map(i8::try_from).collect::<Result<_, _>>(),
    }
    .map_err(|_| "type ids of a union are 0 to 127")?;
    if ids.len() != children.len() {
        return Err(format!("{} type ids for {} children", ids.len(), children.len()));
    }
    let fields = UnionFields::try_new(ids, children).map_err(|error| error.to_string())?;
    Ok(DataType::Union(fields, mode))
}

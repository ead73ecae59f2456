//! Results as Parquet, which has no unions, and no times in seconds: these become microseconds, as in DuckDB's own files.

use std::fs::File;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use arrow_array::{RecordBatch, RecordBatchOptions, make_array};
use arrow_buffer::{Buffer, ScalarBuffer};
use arrow_data::ArrayData;
use arrow_schema::{DataType, Field, FieldRef, Schema, SchemaRef, TimeUnit};
use parquet::arrow::ArrowWriter;

const MICROSECONDS: i64 = 1_000_000;

pub(crate) struct Writer {
    writer: ArrowWriter<File>,
    schema: SchemaRef,
}

impl Writer {
    /// Unions are looked for first, since the writer panics at them.
    pub(crate) fn new(file: File, schema: &SchemaRef) -> Result<Self> {
        if let Some(field) = schema.fields().iter().find(|field| has_union(field.data_type())) {
            bail!("column {:?}: Parquet has no Union", field.name());
        }
        let fields = schema.fields().iter().map(finer_field).collect::<Vec<_>>();
        let schema = Arc::new(Schema::new_with_metadata(fields, schema.metadata().clone()));
        Ok(Self { writer: ArrowWriter::try_new(file, schema.clone(), None)?, schema })
    }

    pub(crate) fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        if batch.schema_ref().fields() == self.schema.fields() {
            return Ok(self.writer.write(batch)?);
        }
        let mut columns = batch.columns().to_vec();
        for (column, field) in columns.iter_mut().zip(self.schema.fields()) {
            if column.data_type() != field.data_type() {
                let finer = finer(column.to_data(), field.data_type());
                *column = make_array(finer.with_context(|| format!("column {:?}", field.name()))?);
            }
        }
        let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        Ok(self.writer.write(&RecordBatch::try_new_with_options(self.schema.clone(), columns, &options)?)?)
    }

    pub(crate) fn close(self) -> Result<()> {
        self.writer.close()?;
        Ok(())
    }
}

/// The field with microseconds in place of seconds.
fn finer_field(field: &FieldRef) -> FieldRef {
    let data_type = match field.data_type() {
        DataType::Timestamp(TimeUnit::Second, zone) => {
            DataType::Timestamp(TimeUnit::Microsecond, zone.clone())
        }
        DataType::List(field) => DataType::List(finer_field(field)),
        DataType::LargeList(field) => DataType::LargeList(finer_field(field)),
        DataType::FixedSizeList(field, size) => DataType::FixedSizeList(finer_field(field), *size),
        DataType::Map(field, sorted) => DataType::Map(finer_field(field), *sorted),
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(finer_field).collect()),
        _ => return field.clone(),
    };
    Arc::new(Field::clone(field).with_data_type(data_type))
}

/// The array with microseconds in place of seconds, as `data_type` has it.
fn finer(array: ArrayData, data_type: &DataType) -> Result<ArrayData> {
    if array.data_type() == data_type {
        return Ok(array);
    }
    let array = if let DataType::Timestamp(..) = data_type {
        let seconds = ScalarBuffer::<i64>::new(array.buffers()[0].clone(), array.offset(), array.len());
        let finer = seconds.iter().enumerate().map(|(row, &seconds)| match seconds {
            // Anything may stand below a null.
            _ if array.is_null(row) => Ok(0),
            // Infinite.
            _ if seconds.unsigned_abs() == i64::MAX.unsigned_abs() => Ok(seconds),
            _ => seconds
                .checked_mul(MICROSECONDS)
                .with_context(|| format!("Parquet has no time of {seconds} s")),
        });
        let finer = Buffer::from(finer.collect::<Result<Vec<i64>>>()?);
        let nulls = array.nulls().cloned();
        ArrayData::builder(data_type.clone()).len(array.len()).nulls(nulls).add_buffer(finer)
    } else {
        let types = children(data_type);
        let finer =
            array.child_data().iter().zip(types).map(|(child, data_type)| finer(child.clone(), data_type));
        let finer = finer.collect::<Result<_>>()?;
        array.into_builder().data_type(data_type.clone()).child_data(finer)
    };
    Ok(array.build()?)
}

/// The types below one that `finer_field` changes.
fn children(data_type: &DataType) -> Vec<&DataType> {
    match data_type {
        DataType::List(field)
        | DataType::LargeList(field)
        | DataType::FixedSizeList(field, _)
        | DataType::Map(field, _) => vec![field.data_type()],
        DataType::Struct(fields) => fields.iter().map(|field| field.data_type()).collect(),
        _ => Vec::new(),
    }
}

fn has_union(data_type: &DataType) -> bool {
    match data_type {
        DataType::Union(_, _) => true,
        DataType::Struct(fields) => fields.iter().any(|field| has_union(field.data_type())),
        DataType::List(field)
        | DataType::LargeList(field)
        | DataType::ListView(field)
        | DataType::LargeListView(field)
        | DataType::FixedSizeList(field, _)
        | DataType::Map(field, _) => has_union(field.data_type()),
        DataType::Dictionary(_, values) => has_union(values),
        DataType::RunEndEncoded(_, values) => has_union(values.data_type()),
        _ => false,
    }
}

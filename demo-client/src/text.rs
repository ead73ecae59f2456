//! Dates and times of DuckDB's that arrow has no text for: infinity, 24:00:00, and years that are far away.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Date32Type, Int64Type};
use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchOptions, StringArray};
use arrow_cast::display::{ArrayFormatter, FormatOptions};
use arrow_schema::{ArrowError, DataType, Schema, TimeUnit};

const SECONDS: i64 = 24 * 60 * 60;

/// Arrow has all dates within so many days of 1970, 260,000 years.
const DAYS: i64 = 95_000_000;

/// The batch with text, as DuckDB writes it, in place of what arrow has none for. Columns with such values become text as a whole.
pub(crate) fn readable(batch: &RecordBatch) -> Result<RecordBatch, ArrowError> {
    let mut fields = batch.schema().fields().to_vec();
    let mut columns = batch.columns().to_vec();
    for (field, column) in fields.iter_mut().zip(&mut columns) {
        if let Some(text) = as_text(column)? {
            *field = Arc::new(field.as_ref().clone().with_data_type(DataType::Utf8));
            *column = Arc::new(text);
        }
    }
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(Arc::new(Schema::new(fields)), columns, &options)
}

/// None if arrow has a text for each value.
fn as_text(column: &ArrayRef) -> Result<Option<StringArray>, ArrowError> {
    let (data_type, rows) = (column.data_type(), 0..column.len());
    let numbers: Box<dyn Fn(usize) -> i64> = match data_type {
        DataType::Date32 => {
            let days = column.as_primitive::<Date32Type>().clone();
            Box::new(move |row| days.value(row).into())
        }
        DataType::Time64(_) | DataType::Timestamp(_, _) => {
            let data = column.to_data().into_builder().data_type(DataType::Int64).build()?;
            let numbers = arrow_array::make_array(data).as_primitive::<Int64Type>().clone();
            Box::new(move |row| numbers.value(row))
        }
        _ => return Ok(None),
    };
    let unusual = |row| if column.is_valid(row) { unusual(data_type, numbers(row)) } else { None };
    if !rows.clone().any(|row| unusual(row).is_some()) {
        return Ok(None);
    }
    let options = FormatOptions::default();
    let usual = ArrayFormatter::try_new(column, &options)?;
    let text = |row| match unusual(row) {
        Some(text) => Ok(Some(text)),
        None if column.is_null(row) => Ok(None),
        None => usual.value(row).try_to_string().map(Some),
    };
    Ok(Some(rows.map(text).collect::<Result<_, _>>()?))
}

/// The text of a value that arrow has none for.
fn unusual(data_type: &DataType, number: i64) -> Option<String> {
    let infinite = |most: i64| match number {
        _ if number == most => Some("infinity".to_owned()),
        _ if number == -most => Some("-infinity".to_owned()),
        _ => None,
    };
    match data_type {
        DataType::Date32 if number.abs() > DAYS => {
            Some(infinite(i32::MAX.into()).unwrap_or_else(|| date(number)))
        }
        DataType::Timestamp(unit, zone) => {
            let (seconds, fraction) = divided(number, *unit);
            let days = seconds.div_euclid(SECONDS);
            let far = || {
                let zone = if zone.is_some() { "+00" } else { "" };
                format!("{} {}{zone}", date(days), time(seconds.rem_euclid(SECONDS), fraction, *unit))
            };
            (!(-DAYS..=DAYS).contains(&days))
                .then(|| infinite(i64::MAX).unwrap_or_else(far))
                .or_else(|| infinite(i64::MAX))
        }
        DataType::Time64(unit) => {
            let (seconds, fraction) = divided(number, *unit);
            (seconds >= SECONDS).then(|| time(seconds, fraction, *unit))
        }
        _ => None,
    }
}

fn per_second(unit: TimeUnit) -> i64 {
    match unit {
        TimeUnit::Second => 1,
        TimeUnit::Millisecond => 1_000,
        TimeUnit::Microsecond => 1_000_000,
        TimeUnit::Nanosecond => 1_000_000_000,
    }
}

/// Seconds, and what is left.
fn divided(number: i64, unit: TimeUnit) -> (i64, i64) {
    (number.div_euclid(per_second(unit)), number.rem_euclid(per_second(unit)))
}

fn time(seconds: i64, fraction: i64, unit: TimeUnit) -> String {
    let (minutes, seconds) = (seconds / 60, seconds % 60);
    let text = format!("{:02}:{:02}:{seconds:02}", minutes / 60, minutes % 60);
    if fraction == 0 {
        return text;
    }
    let digits = per_second(unit).ilog10() as usize;
    format!("{text}.{}", format!("{fraction:0digits$}").trim_end_matches('0'))
}

/// A day of the Gregorian calendar, by the number of days since 1970. Years begin in March here, and 400 of them have as many days as
/// any other 400.
fn date(days: i64) -> String {
    let since = days + 719_468; // 0000-03-01
    let (era, day) = (since.div_euclid(146_097), since.rem_euclid(146_097));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = year + 400 * era + next;
    if year > 0 {
        format!("{year:04}-{month:02}-{day:02}")
    } else {
        format!("{:04}-{month:02}-{day:02} (BC)", 1 - year)
    }
}

//! Text for what arrow has none for: infinite dates and times, 24:00:00, years that are far away, and integers of more digits than
//! a decimal has.

use std::fmt::Write;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Date32Type, Decimal128Type, Int64Type};
use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchOptions, StringArray};
use arrow_cast::display::{ArrayFormatter, ArrayFormatterFactory, DisplayIndex, FormatOptions, FormatResult};
use arrow_schema::{ArrowError, DataType, Field, Schema, TimeUnit};

const SECONDS: i64 = 24 * 60 * 60;

/// Arrow has all dates within so many days of 1970, 260,000 years.
const DAYS: i64 = 95_000_000;

/// Makes text of all values, also within others.
#[derive(Debug)]
pub(crate) struct Formatters;

impl ArrayFormatterFactory for Formatters {
    fn create_array_formatter<'a>(
        &self,
        array: &'a dyn Array,
        options: &FormatOptions<'a>,
        _: Option<&'a Field>,
    ) -> Result<Option<ArrayFormatter<'a>>, ArrowError> {
        let Some(unusual) = unusual(array)? else { return Ok(None) };
        let usual = ArrayFormatter::try_new(array, options)?;
        let text = Text { array, unusual, usual };
        Ok(Some(ArrayFormatter::new(Box::new(text), options.safe())))
    }
}

/// The text of a row's value, if arrow has none for it.
type Unusual<'a> = Box<dyn Fn(usize) -> Option<String> + 'a>;

struct Text<'a> {
    array: &'a dyn Array,
    unusual: Unusual<'a>,
    usual: ArrayFormatter<'a>,
}

impl DisplayIndex for Text<'_> {
    fn write(&self, row: usize, to: &mut dyn Write) -> FormatResult {
        // Below a null anything may stand.
        match if self.array.is_valid(row) { (self.unusual)(row) } else { None } {
            Some(text) => to.write_str(&text)?,
            None => self.usual.value(row).write(to)?,
        }
        Ok(())
    }
}

/// The text without what a terminal would obey, such as the escape sequences that a hostile server or dataset may have.
pub(crate) fn printable(text: &str) -> String {
    let hidden = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    text.replace(hidden, "\u{fffd}")
}

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
    let Some(unusual) = unusual(column)? else { return Ok(None) };
    let mut rows = 0..column.len();
    if !rows.clone().any(|row| column.is_valid(row) && unusual(row).is_some()) {
        return Ok(None);
    }
    let options = FormatOptions::default();
    let usual = ArrayFormatter::try_new(column, &options)?;
    let text = Text { array: column, unusual, usual };
    let formatter = ArrayFormatter::new(Box::new(text), false);
    let text = rows.try_fold(Vec::with_capacity(column.len()), |mut texts, row| {
        let text = column.is_valid(row).then(|| formatter.value(row).try_to_string());
        texts.push(text.transpose()?);
        Ok::<_, ArrowError>(texts)
    });
    Ok(Some(text?.into()))
}

/// None for types of which arrow has a text for each value.
fn unusual(array: &dyn Array) -> Result<Option<Unusual<'_>>, ArrowError> {
    let data_type = array.data_type();
    Ok(Some(match *data_type {
        DataType::Date32 => {
            let days = array.as_primitive::<Date32Type>();
            Box::new(|row| unusual_time(data_type, days.value(row).into()))
        }
        DataType::Time64(_) | DataType::Timestamp(_, _) => {
            let data = array.to_data().into_builder().data_type(DataType::Int64).build()?;
            let numbers = arrow_array::make_array(data).as_primitive::<Int64Type>().clone();
            Box::new(move |row| unusual_time(data_type, numbers.value(row)))
        }
        DataType::Decimal128(precision, 0) => {
            let numbers = array.as_primitive::<Decimal128Type>();
            let end = 10_u128.checked_pow(precision.into()).unwrap_or(u128::MAX);
            Box::new(move |row| {
                let number = numbers.value(row);
                (number.unsigned_abs() >= end).then(|| number.to_string())
            })
        }
        _ => return Ok(None),
    }))
}

/// The text of a date or time that arrow has none for.
fn unusual_time(data_type: &DataType, number: i64) -> Option<String> {
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

#[cfg(test)]
mod tests {
    use arrow_array::{Date32Array, Decimal128Array, StructArray, Time64MicrosecondArray};
    use arrow_cast::pretty::pretty_format_batches_with_options;

    use super::*;

    #[test]
    fn a_terminal_is_told_nothing_by_a_text() {
        assert_eq!(printable("a\tü\n"), "a\tü\n");
        assert_eq!(printable("\x1b[2Ja\r\u{9b}1m\0"), "\u{fffd}[2Ja\u{fffd}\u{fffd}1m\u{fffd}");
    }

    #[test]
    fn values_within_others_have_their_text_in_tables() {
        let field = |name: &str, data_type: DataType| Arc::new(Field::new(name, data_type, true));
        let all = StructArray::from(vec![
            (
                field("day", DataType::Date32),
                Arc::new(Date32Array::from(vec![Some(i32::MAX), Some(0), None])) as ArrayRef,
            ),
            (
                field("clock", DataType::Time64(TimeUnit::Microsecond)),
                Arc::new(Time64MicrosecondArray::from(vec![86_400_000_000, 1, 0])),
            ),
            (
                field("number", DataType::Decimal128(38, 0)),
                Arc::new(
                    Decimal128Array::from(vec![i128::MIN, 7, -7]).with_precision_and_scale(38, 0).unwrap(),
                ),
            ),
        ]);
        let batch = RecordBatch::try_from_iter([("all", Arc::new(all) as ArrayRef)]).unwrap();
        let options = FormatOptions::default().with_formatter_factory(Some(&Formatters));
        let table = pretty_format_batches_with_options(&[batch], &options).unwrap().to_string();
        let rows: Vec<_> = table.lines().skip(3).map(|row| row.trim_matches(['|', ' '])).collect();
        assert_eq!(
            rows[..3],
            [
                "{day: infinity, clock: 24:00:00, number: -170141183460469231731687303715884105728}",
                "{day: 1970-01-01, clock: 00:00:00.000001, number: 7}",
                "{day: , clock: 00:00:00, number: -7}",
            ]
        );
    }
}

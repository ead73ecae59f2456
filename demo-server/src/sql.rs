//! What a client may ask: one query, which changes nothing.
//!
//! DuckDB's settings keep a query from files and extensions ([`crate::dataset`]). They do not keep it from dropping a view, or
//! from calling a table function that switches logging on for all. So DuckDB's own parser is asked what the text is: it
//! serializes nothing but SELECT (and what it treats as such: FROM, VALUES, DESCRIBE, SUMMARIZE, SHOW). In that tree table
//! functions are looked up in a list, and others in one of those that sleep.

use duckdb::Connection;
use serde::Deserialize;
use serde_json::Value;

/// Bytes of a query. What is nested takes stack: see [`crate::session`].
pub(crate) const LENGTH: usize = 64 << 10;

/// Bytes of an error's message. Of HTTP/2's headers, in which Flight has it, clients take 16 KiB, and each byte may become three there.
const MESSAGE: usize = 4 << 10;

/// Lambdas inside lambdas. DuckDB binds each of them twice or more, so 30 of them, one in the other, keep it busy for minutes in
/// which nothing interrupts it.
const LAMBDAS: usize = 8;

/// Table functions that only compute, or read what the settings let them.
const TABLE_FUNCTIONS: &[&str] = &[
    "duckdb_columns",
    "duckdb_databases",
    "duckdb_functions",
    "duckdb_keywords",
    "duckdb_memory",
    "duckdb_schemas",
    "duckdb_settings",
    "duckdb_tables",
    "duckdb_types",
    "duckdb_views",
    "generate_series",
    "json_each",
    "json_tree",
    "parquet_file_metadata",
    "parquet_metadata",
    "parquet_scan",
    "parquet_schema",
    "pragma_table_info",
    "pragma_version",
    "range",
    "read_csv",
    "read_csv_auto",
    "read_parquet",
    "repeat",
    "repeat_row",
    "summary",
    "test_all_types",
    "unnest",
];

/// Functions that sleep, which nothing interrupts: what a query holds they would hold for as long as it says, whether or not its
/// client is still there.
const SLEEPING: &[&str] = &["pg_sleep", "sleep_ms"];

/// # Errors
///
/// The message for the client: DuckDB's, if it can't parse the text.
pub(crate) fn check(connection: &Connection, sql: &str) -> Result<(), String> {
    if sql.len() > LENGTH {
        return Err(format!("The query has {} bytes; this server takes {LENGTH}", sql.len()));
    }
    let query = without_explain(sql);
    let tree: String = connection
        .query_row("SELECT json_serialize_sql(?::VARCHAR)::VARCHAR", [query], |row| row.get(0))
        .map_err(|error| message(&error))?;
    // DuckDB limits the depth of expressions, and LENGTH all else.
    let mut reader = serde_json::Deserializer::from_str(&tree);
    reader.disable_recursion_limit();
    let tree =
        Value::deserialize(&mut reader).map_err(|error| format!("DuckDB's tree of the query: {error}"))?;
    if tree["error"] != Value::Bool(false) {
        let told = tree["error_message"].as_str().unwrap_or("it can't be parsed");
        if tree["error_type"] == "parser" {
            // The same again, from where the message shows the place.
            return Err(match connection.prepare(query) {
                Err(error) => message(&error),
                Ok(_) => format!("Parser Error: {told}"),
            });
        }
        return Err("This server only reads: a query must be SELECT, FROM, VALUES, WITH, DESCRIBE, SUMMARIZE, SHOW, or \
                    EXPLAIN of one"
            .to_owned());
    }
    match tree["statements"].as_array().map_or(0, Vec::len) {
        0 => return Err("There is no query".to_owned()),
        1 => {}
        _ => return Err("Only one query at a time".to_owned()),
    }
    if lambdas(&tree) > LAMBDAS {
        return Err(format!("Lambdas may be nested {LAMBDAS} deep"));
    }
    match refused_function(&tree) {
        Some((kind, name)) => Err(format!("This server does not let queries call the {kind} \"{name}\"")),
        None => Ok(()),
    }
}

/// What DuckDB says, which may have a value of any size in it, up to [`MESSAGE`].
pub(crate) fn message(error: &duckdb::Error) -> String {
    let mut message = match error {
        duckdb::Error::DuckDBFailure(_, Some(message)) => message.clone(),
        error => error.to_string(),
    };
    if message.len() > MESSAGE {
        message.truncate(message.floor_char_boundary(MESSAGE));
        message.push_str(" …");
    }
    message
}

/// The query that is to be explained, or the whole.
fn without_explain(sql: &str) -> &str {
    let explained = after_word(sql, "explain");
    explained.map_or(sql, |rest| after_word(rest, "analyze").unwrap_or(rest))
}

/// What follows `word` and a blank.
fn after_word<'a>(text: &'a str, word: &str) -> Option<&'a str> {
    let (first, rest) = text.trim_start().split_once(char::is_whitespace)?;
    first.eq_ignore_ascii_case(word).then_some(rest)
}

/// A table function in the tree that is not on the list, or another that sleeps: what it is, and its name.
fn refused_function(tree: &Value) -> Option<(&str, &str)> {
    let is_on = |list: &[&str], name: &str| list.contains(&name.to_ascii_lowercase().as_str());
    match tree {
        Value::Object(fields) => {
            let table = (fields.get("type").is_some_and(|kind| kind == "TABLE_FUNCTION"))
                .then(|| fields["function"]["function_name"].as_str().unwrap_or_default())
                .filter(|name| !is_on(TABLE_FUNCTIONS, name))
                .map(|name| ("table function", name));
            let sleeps = (fields.get("function_name").and_then(Value::as_str))
                .filter(|name| is_on(SLEEPING, name))
                .map(|name| ("function", name));
            table.or(sleeps).or_else(|| fields.values().find_map(refused_function))
        }
        Value::Array(items) => items.iter().find_map(refused_function),
        _ => None,
    }
}

/// How deeply lambdas are nested in the tree.
fn lambdas(tree: &Value) -> usize {
    let below = |values: &mut dyn Iterator<Item = &Value>| values.map(lambdas).max().unwrap_or(0);
    match tree {
        Value::Object(fields) => {
            usize::from(fields.get("class").is_some_and(|class| class == "LAMBDA"))
                + below(&mut fields.values())
        }
        Value::Array(items) => below(&mut items.iter()),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nested_lambdas(depth: usize, arrow: &str) -> String {
        let lambda = format!("list_transform([1], {arrow} ");
        format!("SELECT {}1{}", lambda.repeat(depth), ")".repeat(depth))
    }

    #[test]
    fn queries_pass() {
        let connection = Connection::open_in_memory().unwrap();
        for sql in [
            "SELECT 1",
            "from range(3)",
            "VALUES (1), (2);",
            "with x as (select 1) from x",
            "DESCRIBE SELECT 1",
            "SUMMARIZE SELECT 1",
            "SHOW TABLES",
            "explain select 1",
            " EXPLAIN\nANALYZE SELECT 1 -- a remark",
            "select * from unnest([1, 2])",
            &nested_lambdas(LAMBDAS, "lambda x:"),
        ] {
            assert_eq!(check(&connection, sql), Ok(()), "{sql}");
        }
    }

    #[test]
    fn everything_else_is_refused() {
        let connection = Connection::open_in_memory().unwrap();
        for (sql, why) in [
            ("drop view a", "only reads"),
            ("create table t as select 1", "only reads"),
            ("copy (select 1) to 'x'", "only reads"),
            ("set threads = 1", "only reads"),
            ("pragma threads = 1", "only reads"),
            ("call enable_logging()", "only reads"),
            ("explain drop view a", "only reads"),
            ("explain analyze create table t as select 1", "only reads"),
            ("begin", "only reads"),
            ("select 1; drop view a", "only reads"),
            ("select 1; select 2", "one query"),
            ("explain select 1; select 2", "one query"),
            ("", "no query"),
            ("-- nothing", "no query"),
            ("explain", "Parser Error"),
            ("selec 1", "Parser Error"),
            ("select 1 frm t t", "LINE 1"),
            ("from enable_logging(storage = 'file')", "\"enable_logging\""),
            ("from system.main.Enable_Logging()", "\"enable_logging\""),
            ("select (select count(*) from checkpoint())", "\"checkpoint\""),
            ("with x as (from query('select 1')) from x", "\"query\""),
            ("explain analyze from force_checkpoint()", "\"force_checkpoint\""),
            ("select 1 union all (select 1 from range(2), duckdb_secrets())", "\"duckdb_secrets\""),
            ("describe from enable_logging()", "\"enable_logging\""),
            ("from range((select 1 from checkpoint()))", "\"checkpoint\""),
            ("select sum(1) filter ((select true from checkpoint()))", "\"checkpoint\""),
            ("from (pivot range(3) on range using count(*))", "only reads"),
            ("select sleep_ms(range) from range(9)", "function \"sleep_ms\""),
            ("from range(9) order by main.Pg_Sleep(1)", "function \"pg_sleep\""),
            ("explain analyze select (1000).sleep_ms()", "function \"sleep_ms\""),
            ("reset lock_configuration", "only reads"),
            ("prepare p as select 1", "only reads"),
            ("explain (format json) select 1", "Parser Error"),
            (&nested_lambdas(LAMBDAS + 1, "lambda x:"), "nested"),
            (&nested_lambdas(25, "x ->"), "nested"),
        ] {
            let told = check(&connection, sql).expect_err(sql);
            assert!(told.contains(why), "{sql}: {told}");
        }
    }
}

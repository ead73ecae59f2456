//! Tables to try things with, made by the engine itself. The same for the same size; numbers are whole or decimal, so that sums do
//! not depend on an order.

use std::path::Path;

use anyhow::{Context, Result};
use datafusion::prelude::{SessionConfig, SessionContext};
use url::Url;

/// Rows of a row group, the least that a scan is divided into.
const ROW_GROUP: usize = 1 << 12;

/// Tables by name; `{rows}` lines, four for each order, ten orders for each customer.
const TABLES: [(&str, &str); 3] = [
    (
        "customers",
        "SELECT value AS id, 'customer ' || value AS name, value * 7919 % 5 AS segment
         FROM generate_series(1, greatest({rows} / 40, 1))",
    ),
    (
        "orders",
        "SELECT value AS id, value * 104729 % greatest({rows} / 40, 1) + 1 AS customer, value % 365 AS day
         FROM generate_series(1, greatest({rows} / 4, 1))",
    ),
    (
        "lines",
        "SELECT value % greatest({rows} / 4, 1) + 1 AS order_id, value * 31 % 1000 AS item, value % 50 AS quantity,
             value * 6151 % 100000 AS cents, 'note ' || (value * 2654435761 % 4294967296) AS note,
             CASE WHEN value % 10 < 9 THEN 0 ELSE value END AS skewed
         FROM generate_series(1, {rows})",
    ),
];

/// Four tables of TPC-C, as the initial population has them (TPC Benchmark C, revision 5.11, clause 4.3.3.1), with the columns that keys
/// and analytic queries need: for each warehouse 10 districts, for each of these 3,000 customers with an order each, in another order, of
/// which the last 900 are new. Where the standard says at random, a hash of the row's number stands.
const TPC_C: [(&str, &str); 4] = [
    (
        "customer",
        "SELECT n % 3000 + 1 AS c_id, n / 3000 % 10 + 1 AS c_d_id, n / 30000 + 1 AS c_w_id,
             chr(65 + h % 26) || chr(65 + h / 26 % 26) AS c_state, CASE WHEN h / 676 % 10 = 0 THEN 'BC' ELSE 'GC' END AS c_credit,
             CAST(h % 5001 AS DECIMAL(8, 0)) / 10000 AS c_discount, CAST(-10 AS DECIMAL(12, 2)) AS c_balance
         FROM (SELECT value - 1 AS n, value * 2654435761 % 4294967296 / 64 AS h FROM generate_series(1, {warehouses} * 30000))",
    ),
    ("orders", ORDERS),
    ("new_order", "SELECT o_id AS no_o_id, o_d_id AS no_d_id, o_w_id AS no_w_id FROM ({orders}) WHERE o_id > 2100"),
    (
        "order_line",
        "SELECT o_id AS ol_o_id, o_d_id AS ol_d_id, o_w_id AS ol_w_id, number AS ol_number, h % 100000 + 1 AS ol_i_id,
             o_w_id AS ol_supply_w_id, CASE WHEN o_id <= 2100 THEN o_entry_d END AS ol_delivery_d, 5 AS ol_quantity,
             CAST(CASE WHEN o_id <= 2100 THEN 0 ELSE CAST(h % 999999 + 1 AS DECIMAL(8, 0)) / 100 END AS DECIMAL(6, 2)) AS ol_amount
         FROM (SELECT *, (o_id * 15 + number + o_d_id * 45000 + o_w_id * 450000) * 2654435761 % 4294967296 / 64 AS h
               FROM ({orders}) CROSS JOIN (SELECT value AS number FROM generate_series(1, 15)) WHERE number <= o_ol_cnt)",
    ),
];

const ORDERS: &str = "SELECT n % 3000 + 1 AS o_id, n / 3000 % 10 + 1 AS o_d_id, n / 30000 + 1 AS o_w_id,
             (n * 1621 + n / 3000) % 3000 + 1 AS o_c_id, to_timestamp_seconds(1767225600 + n % 3000 * 60) AS o_entry_d,
             CASE WHEN n % 3000 < 2100 THEN h / 11 % 10 + 1 END AS o_carrier_id, h % 11 + 5 AS o_ol_cnt, 1 AS o_all_local
         FROM (SELECT value - 1 AS n, value * 2246822519 % 4294967296 / 64 AS h FROM generate_series(1, {warehouses} * 30000))";

/// What is made.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Size {
    /// Of the largest of [`TABLES`].
    Rows(u64),
    /// Of [`TPC_C`].
    Warehouses(u64),
}

/// Queries over [`TABLES`] whose rows go from worker to worker.
const QUERIES: [&str; 4] = [
    "SELECT c.segment, count(*), sum(l.cents * l.quantity) FROM lines l JOIN orders o ON l.order_id = o.id
     JOIN customers c ON o.customer = c.id GROUP BY c.segment",
    "SELECT customer, count(*), min(day), max(day) FROM orders GROUP BY customer",
    "SELECT count(*), sum(l.cents), max(l.note) FROM lines l JOIN orders o ON l.order_id = o.id WHERE o.day < 180",
    "SELECT count(DISTINCT note), count(DISTINCT skewed) FROM lines",
];

/// Over [`TPC_C`]: orders that are not delivered, by what they bring in, and totals of those that are; after queries 3 and 1 of TPC-H.
const TPC_C_QUERIES: [&str; 2] = [
    "SELECT ol_o_id, ol_w_id, ol_d_id, sum(ol_amount) AS revenue, o_entry_d
     FROM customer JOIN orders ON o_c_id = c_id AND o_d_id = c_d_id AND o_w_id = c_w_id
         JOIN new_order ON no_o_id = o_id AND no_d_id = o_d_id AND no_w_id = o_w_id
         JOIN order_line ON ol_o_id = o_id AND ol_d_id = o_d_id AND ol_w_id = o_w_id
     WHERE c_state LIKE 'A%' AND o_entry_d > TIMESTAMP '2026-01-02 00:00:00'
     GROUP BY ol_o_id, ol_w_id, ol_d_id, o_entry_d ORDER BY revenue DESC, o_entry_d, ol_w_id, ol_d_id",
    "SELECT ol_number, sum(ol_quantity), sum(ol_amount), avg(ol_quantity), avg(ol_amount), count(*)
     FROM order_line WHERE ol_delivery_d > TIMESTAMP '2026-01-01 01:00:00' GROUP BY ol_number ORDER BY ol_number",
];

/// Queries over what [`generate`] has made, and `context` has as tables.
pub(crate) fn queries(context: &SessionContext) -> Result<&'static [&'static str]> {
    Ok(if context.table_exist("order_line")? { &TPC_C_QUERIES } else { &QUERIES })
}

/// # Errors
///
/// The folder exists. After any other error it does not.
pub(crate) async fn generate(folder: &Path, size: Size) -> Result<()> {
    std::fs::create_dir(folder).with_context(|| folder.display().to_string())?;
    let made = fill(folder, size).await;
    if made.is_err() {
        let _ = std::fs::remove_dir_all(folder); // the error says what is wrong
    }
    made
}

async fn fill(folder: &Path, size: Size) -> Result<()> {
    let folder = folder.canonicalize()?;
    let mut config = SessionConfig::new();
    let parquet = &mut config.options_mut().execution.parquet;
    parquet.max_row_group_size = ROW_GROUP;
    parquet.compression = Some("uncompressed".to_owned());
    let context = SessionContext::new_with_config(config);
    let (tables, unit, count) = match size {
        Size::Rows(rows) => (TABLES.as_slice(), "{rows}", rows),
        Size::Warehouses(warehouses) => (TPC_C.as_slice(), "{warehouses}", warehouses),
    };
    for (name, query) in tables {
        let query = query.replace("{orders}", ORDERS).replace(unit, &count.to_string());
        // In a path the engine would take some characters for a pattern.
        let file = Url::from_file_path(folder.join(format!("{name}.parquet"))).expect("an absolute path");
        let file = file.as_str().replace('\'', "''");
        context.sql(&format!("COPY ({query}) TO '{file}' STORED AS PARQUET")).await?.collect().await?;
    }
    Ok(())
}

//! Tables to try things with, made by the engine itself. The same for the same number of rows; numbers are whole, so that sums do
//! not depend on an order.

use std::path::Path;

use anyhow::{Context, Result};
use datafusion::prelude::{SessionConfig, SessionContext};

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

/// Queries over these tables whose rows go from worker to worker.
pub(crate) const QUERIES: [&str; 4] = [
    "SELECT c.segment, count(*), sum(l.cents * l.quantity) FROM lines l JOIN orders o ON l.order_id = o.id
     JOIN customers c ON o.customer = c.id GROUP BY c.segment",
    "SELECT customer, count(*), min(day), max(day) FROM orders GROUP BY customer",
    "SELECT count(*), sum(l.cents), max(l.note) FROM lines l JOIN orders o ON l.order_id = o.id WHERE o.day < 180",
    "SELECT count(DISTINCT note), count(DISTINCT skewed) FROM lines",
];

/// # Errors
///
/// The folder exists.
pub(crate) async fn generate(folder: &Path, rows: u64) -> Result<()> {
    std::fs::create_dir(folder).with_context(|| folder.display().to_string())?;
    let folder = folder.to_str().context("a path that is no UTF-8")?;
    let mut config = SessionConfig::new();
    let parquet = &mut config.options_mut().execution.parquet;
    parquet.max_row_group_size = ROW_GROUP;
    parquet.compression = Some("uncompressed".to_owned());
    let context = SessionContext::new_with_config(config);
    for (name, query) in TABLES {
        let query = query.replace("{rows}", &rows.to_string());
        let path = format!("{folder}/{name}.parquet").replace('\'', "''");
        context.sql(&format!("COPY ({query}) TO '{path}' STORED AS PARQUET")).await?.collect().await?;
    }
    Ok(())
}

//! Queries: their rows, a sum of these that does not depend on their order, and the time.

use std::hash::{DefaultHasher, Hasher};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use arrow_array::RecordBatch;
use datafusion::arrow::util::display::{ArrayFormatter, FormatOptions};
use datafusion::arrow::util::pretty::pretty_format_batches_with_schema;
use datafusion::prelude::SessionContext;
use futures_util::{StreamExt, TryStreamExt};
use serde::Serialize;

use crate::client::{Resolver, WINDOW};
use crate::session::{Planning, session, url};
use crate::tables::queries;
use crate::worker::Status;
use crate::{Bench, Sql, Transport};

/// What a query gave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct Sum {
    rows: u64,
    /// Of all rows, in any order.
    checksum: u64,
}

impl Sum {
    fn add(&mut self, batch: &RecordBatch) -> Result<()> {
        // Nothing and an empty text are not the same.
        let options = FormatOptions::default().with_null("\0");
        let columns = batch.columns().iter().map(|column| ArrayFormatter::try_new(column, &options));
        let columns = columns.collect::<Result<Vec<_>, _>>()?;
        for row in 0..batch.num_rows() {
            let mut hasher = DefaultHasher::new();
            for column in &columns {
                hasher.write(column.value(row).try_to_string()?.as_bytes());
                hasher.write_u8(0xff);
            }
            self.checksum = self.checksum.wrapping_add(hasher.finish());
        }
        self.rows += batch.num_rows() as u64;
        Ok(())
    }
}

pub(crate) async fn sql(arguments: &Sql) -> Result<()> {
    let resolver = Resolver::new(WINDOW);
    let workers =
        arguments.workers.iter().map(|worker| url(arguments.transport, worker)).collect::<Result<_>>()?;
    let context = session(workers, &resolver, &arguments.planning).await?;
    let mut stream = context.sql(&arguments.query).await?.execute_stream().await?;
    if arguments.count || arguments.stop_after.is_some() {
        let mut sum = Sum::default();
        while sum.rows < arguments.stop_after.unwrap_or(u64::MAX)
            && let Some(batch) = stream.next().await
        {
            sum.add(&batch?)?;
        }
        return say!("{}", serde_json::to_string(&sum)?);
    }
    // Of no rows at all the columns are shown, too.
    let schema = stream.schema();
    let batches: Vec<RecordBatch> = stream.try_collect().await?;
    say!("{}", pretty_format_batches_with_schema(schema, &batches)?)
}

pub(crate) async fn statuses(workers: &[String], resolver: &Resolver) -> Result<Vec<Status>> {
    let mut statuses = Vec::new();
    for worker in workers {
        statuses.push(status_of(worker, resolver).await?);
    }
    Ok(statuses)
}

async fn status_of(worker: &str, resolver: &Resolver) -> Result<Status> {
    let connection = resolver.connection(&url(Transport::Thallus, worker)?).await?;
    serde_json::from_slice(&connection.status().await?).context("a worker's status")
}

/// Prints what each worker says of itself. One that can't be asked keeps nobody else's answer back.
///
/// # Errors
///
/// Those of all that can't be asked, together.
pub(crate) async fn status(workers: &[String]) -> Result<()> {
    #[derive(Serialize)]
    struct Line<'a> {
        worker: &'a str,
        #[serde(flatten)]
        status: Status,
    }

    let resolver = Resolver::new(WINDOW);
    let mut errors = Vec::new();
    for worker in workers {
        match status_of(worker, &resolver).await {
            Ok(status) => say!("{}", serde_json::to_string(&Line { worker, status })?)?,
            Err(error) => errors.push(error.to_string()),
        }
    }
    ensure!(errors.is_empty(), "{}", errors.join("; "));
    Ok(())
}

/// One query, once.
#[derive(Debug, Serialize)]
struct Sample {
    query: usize,
    transport: Transport,
    round: usize,
    /// From the text of the query to its last row.
    seconds: f64,
    #[serde(flatten)]
    sum: Sum,
    /// What the workers' connections have carried meanwhile, in both directions, plans and all.
    bytes: u64,
    ring_bytes: u64,
    /// Connections that workers have accepted, afterwards, by what carries them.
    in_memory: u64,
    over_verbs: u64,
    on_tcp: u64,
    reasons: Vec<String>,
}

pub(crate) async fn bench(arguments: &Bench) -> Result<()> {
    let resolver = Resolver::new(WINDOW);
    let planning = &arguments.planning;
    let alone = session(Vec::new(), &resolver, planning).await?;
    let queries: Vec<&str> = match arguments.queries.is_empty() {
        true => queries(&alone)?.into(),
        false => arguments.queries.iter().map(String::as_str).collect(),
    };
    let mut sessions = Vec::new();
    for transport in &arguments.transports {
        let workers =
            arguments.workers.iter().map(|worker| url(*transport, worker)).collect::<Result<_>>()?;
        sessions.push((*transport, session(workers, &resolver, planning).await?));
    }
    for (number, query) in queries.iter().enumerate() {
        let (wanted, _) = timed(&alone, query).await?;
        for round in 0..arguments.rounds {
            // Not always in the same order.
            for at in 0..sessions.len() {
                let (transport, session) = &sessions[(at + round) % sessions.len()];
                let before = statuses(&arguments.workers, &resolver).await?;
                let (sum, seconds) = timed(session, query).await?;
                let after = statuses(&arguments.workers, &resolver).await?;
                ensure!(sum == wanted, "{transport:?}, {query}: {sum:?}, and in one process {wanted:?}");
                let sample = sample(number, *transport, round, seconds, sum, &before, &after);
                say!("{}", serde_json::to_string(&sample)?)?;
            }
        }
    }
    Ok(())
}

fn sample(
    query: usize,
    transport: Transport,
    round: usize,
    seconds: f64,
    sum: Sum,
    before: &[Status],
    after: &[Status],
) -> Sample {
    let carried = |statuses: &[Status]| {
        let mut all = crate::carried::Carried::default();
        for status in statuses {
            all.add(match transport {
                Transport::Thallus => &status.thallus,
                Transport::Grpc => &status.grpc,
            });
        }
        all
    };
    let (before, after) = (carried(before), carried(after));
    Sample {
        query,
        transport,
        round,
        seconds,
        sum,
        bytes: after.bytes - before.bytes,
        ring_bytes: after.ring_bytes - before.ring_bytes,
        in_memory: after.in_memory,
        over_verbs: after.over_verbs,
        on_tcp: after.on_tcp,
        reasons: after.reasons,
    }
}

async fn timed(session: &SessionContext, query: &str) -> Result<(Sum, f64)> {
    let began = Instant::now();
    let batches = session.sql(query).await?.collect().await?;
    let seconds = began.elapsed().as_secs_f64();
    let mut sum = Sum::default();
    batches.iter().try_for_each(|batch| sum.add(batch))?;
    Ok((sum, seconds))
}

/// Says what would be done, and by which tasks.
pub(crate) async fn explain(workers: &[String], planning: &Planning, query: &str) -> Result<()> {
    let workers = workers.iter().map(|worker| url(Transport::Thallus, worker)).collect::<Result<_>>()?;
    let context = session(workers, &Resolver::new(WINDOW), planning).await?;
    let plan = context.sql(query).await?.create_physical_plan().await?;
    say!("{}", datafusion_distributed::display_plan_ascii(plan.as_ref(), false))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{ArrayRef, StringArray};

    use super::*;

    #[test]
    fn rows_that_differ_have_another_checksum() {
        let checksum = |values: [Option<&str>; 2]| {
            let column: ArrayRef = Arc::new(StringArray::from(values.to_vec()));
            let mut sum = Sum::default();
            sum.add(&RecordBatch::try_from_iter_with_nullable([("s", column, true)]).unwrap()).unwrap();
            sum.checksum
        };
        let some = checksum([None, Some("a")]);
        assert_eq!(some, checksum([Some("a"), None]));
        for other in [[Some(""), Some("a")], [Some("NULL"), Some("a")], [None, Some("b")]] {
            assert_ne!(some, checksum(other), "{other:?}");
        }
    }
}

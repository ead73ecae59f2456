//! A query whose batches are pulled by a stream of Arrow Flight.

use std::pin::pin;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use duckdb::Connection;
use futures_util::future::{Either, select};
use futures_util::stream::{self, Stream};
use thallus_columnar::scan::{Code, Failure};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use crate::flight::AHEAD;
use crate::flight::link::{Client, Cursor};
use crate::flight::run::Run;
use crate::interrupt::Interruptible;
use crate::rows::{Rows, own};
use crate::server::{Permit, Server};
use crate::session::STACK;

/// Starts a query, and waits for its schema. When the stream is dropped, so is the query.
pub(crate) async fn start(
    client: &Arc<Client>,
    dataset: String,
    sql: String,
) -> Result<(SchemaRef, impl Stream<Item = Result<RecordBatch, Status>> + Send + 'static), Status> {
    let server = client.place.server.clone();
    let limited = |message| refusal(Failure { code: Code::Limit, message });
    let cursor = client
        .cursor()
        .ok_or_else(|| limited(format!("a client may have {} cursors", server.limits.cursors)))?;
    let permit = server
        .permit()
        .ok_or_else(|| limited(format!("The server runs {} queries already", server.limits.queries)))?;
    let connection = server
        .dataset
        .connect(&dataset)
        .map_err(|message| refusal(Failure { code: Code::Dataset, message }))?;
    let run = server.runs.begin(connection.interrupter());
    let (opened, schema) = oneshot::channel();
    let (ended, end) = oneshot::channel();
    let (batches, taken) = mpsc::channel(AHEAD);
    let guard = Guard { server: server.clone(), run: run.clone() };
    let work = Work { batches, running: Running { server, run }, permit, cursor, runtime: Handle::current() };
    std::thread::Builder::new()
        .name(format!("query {}", client.place.id))
        .stack_size(STACK)
        .spawn(move || work.run(connection, &sql, opened, ended))
        .map_err(|error| refusal(own(&format!("no thread: {error}"))))?;
    let schema = match schema.await {
        Ok(schema) => schema,
        Err(_) => match end.await {
            Ok(Err(failure)) => return Err(refusal(failure)),
            _ => return Err(bug()),
        },
    };
    let batches = stream::unfold((taken, Some(end), guard), async |(mut taken, mut end, guard)| {
        let batch = match taken.recv().await {
            Some(batch) => Ok(batch),
            // That there are no more is only the end if the query says so.
            None => match end.take()?.await {
                Ok(Ok(())) => return None,
                Ok(Err(failure)) => Err(refusal(failure)),
                Err(_) => Err(bug()),
            },
        };
        Some((batch, (taken, end, guard)))
    });
    Ok((schema, batches))
}

fn refusal(failure: Failure) -> Status {
    match failure.code {
        Code::Query => Status::invalid_argument(failure.message),
        Code::Dataset => Status::not_found(failure.message),
        Code::Limit => Status::resource_exhausted(failure.message),
        Code::Cancelled | Code::Expired => Status::cancelled(failure.message),
        Code::Other(_) => Status::internal(failure.message),
    }
}

/// The query's thread has panicked, here or in a library.
fn bug() -> Status {
    Status::internal("the query has ended without an answer")
}

/// Ends the query when nobody wants its batches any more.
struct Guard {
    server: Arc<Server>,
    run: Arc<Run>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let (server, run) = (self.server.clone(), self.run.clone());
        // It can take as long as DuckDB plans a query.
        tokio::task::spawn_blocking(move || server.runs.stop(&run));
    }
}

/// A query that is among those of the server.
struct Running {
    server: Arc<Server>,
    run: Arc<Run>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.server.runs.end(&self.run);
    }
}

/// What the query's thread has.
struct Work {
    batches: mpsc::Sender<RecordBatch>,
    running: Running,
    permit: Permit,
    cursor: Cursor,
    runtime: Handle,
}

impl Work {
    fn run(
        self,
        connection: Interruptible,
        sql: &str,
        opened: oneshot::Sender<SchemaRef>,
        ended: oneshot::Sender<Result<(), Failure>>,
    ) {
        let mut sent = 0;
        let outcome = self.stream(&connection, sql, opened, &mut sent);
        drop(connection);
        let how = match &outcome {
            _ if self.running.run.is_stopped() => "client gone",
            Ok(()) => "done",
            Err(failure) => failure.message.lines().next().unwrap_or_default(),
        };
        let Self { batches, running, permit, cursor, runtime: _ } = self;
        drop(permit);
        let (client, queries) = (&cursor.0.place, running.server.queries());
        log!("client {}: {how}; sent {sent} batches; {queries} queries are running", client.id);
        drop(cursor);
        drop(running);
        // Nobody listens if it fails.
        let _ = ended.send(outcome);
        drop(batches);
    }

    fn stream(
        &self,
        connection: &Connection,
        sql: &str,
        opened: oneshot::Sender<SchemaRef>,
        sent: &mut u64,
    ) -> Result<(), Failure> {
        let mut rows = Rows::answer(&self.running.server, connection, sql)?;
        // Nobody listens if it fails, and the query is stopped.
        let _ = opened.send(rows.schema().clone());
        while !self.running.run.is_stopped()
            && let Some(batch) = rows.joined()?
        {
            self.send(batch)?;
            *sent += 1;
        }
        Ok(())
    }

    /// Waits until there is room, as long as the client takes anything from time to time.
    fn send(&self, batch: RecordBatch) -> Result<(), Failure> {
        let Running { server, run } = &self.running;
        let idle = server.limits.idle;
        self.runtime.block_on(async {
            let (room, stopped) = (pin!(self.batches.reserve()), pin!(run.stopped()));
            let mut room = select(room, stopped);
            let since = server.now();
            loop {
                let end = since.max(self.cursor.0.took()) + idle;
                match tokio::time::timeout(end.saturating_sub(server.now()), &mut room).await {
                    Ok(Either::Left((Ok(place), _))) => {
                        place.send(batch);
                        return Ok(());
                    }
                    Ok(_) => return Ok(()),
                    Err(_) if since.max(self.cursor.0.took()) + idle > server.now() => {}
                    Err(_) => {
                        let message = format!("no request for {} s", idle.as_secs());
                        return Err(Failure { code: Code::Expired, message });
                    }
                }
            }
        })
    }
}

//! The result of a query by Arrow Flight.

use std::error::Error;

use anyhow::{Result, anyhow, bail};
use arrow_array::RecordBatch;
use arrow_flight::decode::{DecodedPayload, FlightDataDecoder};
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::{Empty, Ticket};
use arrow_schema::SchemaRef;
use futures_util::future::{Either, select};
use futures_util::{StreamExt, TryStreamExt};
use tokio::runtime::Runtime;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use crate::connection::TAIL;
use crate::interrupt::Interrupt;

/// A connection, with its own thread-less runtime: its work is done while something is waited for.
#[derive(Debug)]
pub(crate) struct Connection<'a> {
    runtime: Runtime,
    client: FlightServiceClient<Channel>,
    interrupt: &'a Interrupt,
}

pub(crate) struct Scan<'a> {
    connection: Connection<'a>,
    /// Dropping it tells the server that no more is wanted.
    messages: FlightDataDecoder,
    schema: SchemaRef,
}

impl<'a> Connection<'a> {
    pub(crate) fn open(address: &str, interrupt: &'a Interrupt) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?.tcp_nodelay(true);
        let connected = unless_interrupted(&runtime, interrupt, endpoint.connect())?;
        let channel = connected.map_err(|error| anyhow!(innermost(&error)))?;
        let limit = usize::try_from(TAIL)?;
        let client = FlightServiceClient::new(channel).max_decoding_message_size(limit);
        Ok(Self { runtime, client, interrupt })
    }

    /// Fails if nobody answers in gRPC, which connecting does not tell.
    pub(crate) fn answering(mut self) -> Result<Self> {
        match unless_interrupted(&self.runtime, self.interrupt, self.client.list_actions(Empty {}))? {
            // Not the server's own.
            Err(status) if status.source().is_some() => Err(told(status)),
            _ => Ok(self),
        }
    }

    pub(crate) fn query(mut self, dataset: &str, sql: &str, lz4: bool) -> Result<Scan<'a>> {
        let compression = if lz4 { "lz4" } else { "none" };
        let ticket = serde_json::json!({ "sql": sql, "dataset": dataset, "compression": compression });
        let ticket = Ticket { ticket: ticket.to_string().into() };
        let answer = unless_interrupted(&self.runtime, self.interrupt, self.client.do_get(ticket))?;
        let messages = answer.map_err(told)?.into_inner().map_err(FlightError::from);
        let mut messages = FlightDataDecoder::new(messages);
        let first = unless_interrupted(&self.runtime, self.interrupt, messages.next())?;
        match first.transpose().map_err(failed)?.map(|message| message.payload) {
            Some(DecodedPayload::Schema(schema)) => Ok(Scan { connection: self, messages, schema }),
            _ => bail!("the server has sent no schema"),
        }
    }
}

impl<'a> Scan<'a> {
    pub(crate) fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// The next batch, and the bytes of its messages; none at the end.
    pub(crate) fn next(&mut self) -> Result<Option<(Vec<RecordBatch>, u64)>> {
        let Connection { runtime, interrupt, .. } = &self.connection;
        let mut bytes = 0;
        while let Some(message) = unless_interrupted(runtime, interrupt, self.messages.next())? {
            let message = message.map_err(failed)?;
            bytes += (message.inner.data_header.len() + message.inner.data_body.len()) as u64;
            match message.payload {
                DecodedPayload::RecordBatch(batch) => return Ok(Some((vec![batch], bytes))),
                DecodedPayload::None => {}
                DecodedPayload::Schema(_) => bail!("a second schema"),
            }
        }
        Ok(None)
    }

    pub(crate) fn finish(self) -> Connection<'a> {
        self.connection
    }
}

/// What comes of `work`, unless Ctrl-C comes first.
fn unless_interrupted<T>(
    runtime: &Runtime,
    interrupt: &Interrupt,
    work: impl Future<Output = T>,
) -> Result<T> {
    let notice = interrupt.notice();
    runtime.block_on(async {
        let (work, notified) = (std::pin::pin!(work), std::pin::pin!(notice.notified()));
        match select(work, notified).await {
            Either::Left((done, _)) => Ok(done),
            Either::Right(_) => bail!("interrupted"),
        }
    })
}

/// What the server, or its database, says.
fn told(status: Status) -> anyhow::Error {
    anyhow!(status.message().to_owned())
}

fn failed(error: FlightError) -> anyhow::Error {
    match error {
        FlightError::Tonic(status) => told(*status),
        error => anyhow::Error::new(error).context("the server's stream"),
    }
}

fn innermost(error: &dyn Error) -> String {
    error.source().map_or_else(|| error.to_string(), innermost)
}

//! The same queries for clients of Arrow Flight: `DoGet`, and nothing else of it.
//!
//! The ticket is JSON: `{"sql": "…", "dataset": "…", "compression": "lz4"}`, of which only `sql` must be there. Errors have the
//! database's message. A query runs in a thread of its own, as for the scan protocol, and as far as HTTP/2's windows allow, and
//! two batches ahead.

mod link;
mod query;
mod run;

use std::net::TcpListener;
use std::sync::Arc;

use anyhow::{Context, Result};
use arrow_flight::encode::{DictionaryHandling, FlightDataEncoderBuilder};
use arrow_flight::flight_service_server::{FlightService, FlightServiceServer};
use arrow_flight::{
    Action, ActionType, Criteria, Empty, FlightData, FlightDescriptor, FlightInfo, HandshakeRequest,
    HandshakeResponse, PollInfo, PutResult, SchemaResult, Ticket,
};
use arrow_ipc::CompressionType;
use arrow_ipc::writer::IpcWriteOptions;
use futures_util::stream::{self, BoxStream, StreamExt, TryStreamExt};
use serde::Deserialize;
use tonic::transport::server::Router;
use tonic::{Request, Response, Status, Streaming};

use crate::flight::link::{Client, Link};
use crate::server::Server;

pub(crate) use run::Runs;

/// Batches that are ready before the client takes them.
const AHEAD: usize = 1;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    sql: String,
    #[serde(default)]
    dataset: String,
    #[serde(default)]
    compression: Compression,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Compression {
    #[default]
    None,
    Lz4,
}

/// Answers until the process ends, from threads of its own.
pub(crate) fn start(server: Arc<Server>, listener: TcpListener) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .thread_name("flight")
        .enable_all()
        .build()
        .context("threads for Arrow Flight")?;
    listener.set_nonblocking(true).context("the listener of Arrow Flight")?;
    let listener = {
        let _inside = runtime.enter();
        tokio::net::TcpListener::from_std(listener).context("the listener of Arrow Flight")?
    };
    let serving = serve(server, listener);
    std::thread::Builder::new().name("flight".into()).spawn(move || runtime.block_on(serving))?;
    Ok(())
}

async fn serve(server: Arc<Server>, listener: tokio::net::TcpListener) {
    let links = stream::unfold((server, listener), async |(server, listener)| {
        let link = accept(&server, &listener).await;
        Some((Ok::<_, std::io::Error>(link), (server, listener)))
    });
    let router: Router = tonic::transport::Server::builder().add_service(FlightServiceServer::new(Flight));
    if let Err(error) = router.serve_with_incoming(links).await {
        log!("Arrow Flight: {error}");
    }
}

async fn accept(server: &Arc<Server>, listener: &tokio::net::TcpListener) -> Link {
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                log!("accept: {error}");
                tokio::time::sleep(crate::server::PAUSE).await;
                continue;
            }
        };
        let Some(place) = server.place() else { continue };
        log!("client {}: connected from {address}, with Arrow Flight", place.id);
        if let Err(error) = stream.set_nodelay(true) {
            log!("client {}: {error}", place.id);
            continue;
        }
        return Link::new(stream, Client::new(place));
    }
}

#[derive(Debug)]
struct Flight;

type Answers<T> = BoxStream<'static, Result<T, Status>>;

fn not_there<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("this server has DoGet alone"))
}

#[tonic::async_trait]
impl FlightService for Flight {
    type HandshakeStream = Answers<HandshakeResponse>;
    type ListFlightsStream = Answers<FlightInfo>;
    type DoGetStream = Answers<FlightData>;
    type DoPutStream = Answers<PutResult>;
    type DoActionStream = Answers<arrow_flight::Result>;
    type ListActionsStream = Answers<ActionType>;
    type DoExchangeStream = Answers<FlightData>;

    async fn do_get(&self, request: Request<Ticket>) -> Result<Response<Self::DoGetStream>, Status> {
        let client = request.extensions().get::<Arc<Client>>();
        let client = client.ok_or_else(|| Status::internal("a request without a connection"))?.clone();
        let asked: Asked = serde_json::from_slice(&request.get_ref().ticket)
            .map_err(|error| Status::invalid_argument(format!("the ticket: {error}")))?;
        let (schema, batches) = query::start(&client, asked.dataset, asked.sql).await?;
        let compression = match asked.compression {
            Compression::None => None,
            Compression::Lz4 => Some(CompressionType::LZ4_FRAME),
        };
        let options = IpcWriteOptions::default()
            .try_with_compression(compression)
            .map_err(|error| Status::internal(error.to_string()))?;
        let messages = FlightDataEncoderBuilder::new()
            .with_schema(schema)
            // Batches are small already, and arrow-ipc writes slices of lists of unions wrongly.
            .with_max_flight_data_size(usize::MAX)
            .with_options(options)
            .with_dictionary_handling(DictionaryHandling::Resend)
            .build(batches.map_err(|status| status.into()));
        Ok(Response::new(messages.map_err(Status::from).boxed()))
    }

    async fn handshake(
        &self,
        _: Request<Streaming<HandshakeRequest>>,
    ) -> Result<Response<Self::HandshakeStream>, Status> {
        not_there()
    }

    async fn list_flights(&self, _: Request<Criteria>) -> Result<Response<Self::ListFlightsStream>, Status> {
        not_there()
    }

    async fn get_flight_info(&self, _: Request<FlightDescriptor>) -> Result<Response<FlightInfo>, Status> {
        not_there()
    }

    async fn poll_flight_info(&self, _: Request<FlightDescriptor>) -> Result<Response<PollInfo>, Status> {
        not_there()
    }

    async fn get_schema(&self, _: Request<FlightDescriptor>) -> Result<Response<SchemaResult>, Status> {
        not_there()
    }

    async fn do_put(&self, _: Request<Streaming<FlightData>>) -> Result<Response<Self::DoPutStream>, Status> {
        not_there()
    }

    async fn do_action(&self, _: Request<Action>) -> Result<Response<Self::DoActionStream>, Status> {
        not_there()
    }

    async fn list_actions(&self, _: Request<Empty>) -> Result<Response<Self::ListActionsStream>, Status> {
        not_there()
    }

    async fn do_exchange(
        &self,
        _: Request<Streaming<FlightData>>,
    ) -> Result<Response<Self::DoExchangeStream>, Status> {
        not_there()
    }
}

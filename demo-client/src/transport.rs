//! The ways of a result to this program.

use std::io;

use anyhow::{Context, Result};
use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use clap::ValueEnum;
use thallus_columnar::scan::ScanError;

use crate::connection::{self, Form};
use crate::flight;
use crate::interrupt::Interrupt;
use crate::loans::{Believe, Loans, Ways};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    /// Read from the server's memory where that is possible, else scatter; flight if the server speaks nothing else
    Auto,
    /// Column buffers as they are, in the stream, pushed as far as there are credits
    Scatter,
    /// Copied from the server's memory; where that is not possible, as scatter
    Pull,
    /// Each batch copied into one buffer, and sent as the reply to a request
    Rpc,
    /// One Arrow IPC stream, written and read by arrow-ipc
    Ipc,
    /// Arrow Flight, at the address of the server's --flight-listen
    Flight,
}

impl Transport {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Scatter => "scatter",
            Self::Rpc => "rpc",
            Self::Ipc => "ipc",
            Self::Flight => "flight",
            Self::Pull => "pull",
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Compression {
    #[default]
    None,
    Lz4,
}

#[derive(Debug)]
pub(crate) enum Connection<'a> {
    Scan(connection::Connection<'a>),
    Flight(Box<flight::Connection<'a>>),
}

pub(crate) enum Scan<'a> {
    Scan(connection::Scan<'a>),
    Flight(Box<flight::Scan<'a>>),
}

impl<'a> Connection<'a> {
    /// Also returns the transport: flight, if that is what [`Transport::Auto`] had to take.
    pub(crate) fn open(
        transport: Transport,
        address: &str,
        believe: Believe,
        interrupt: &'a Interrupt,
    ) -> Result<(Self, Transport)> {
        let scan = |form, loans| {
            connection::Connection::open(address, form, loans, believe, interrupt).map(Self::Scan)
        };
        let flight = || flight::Connection::open(address, interrupt);
        let boxed = |connection| Self::Flight(Box::new(connection));
        let opened = match transport {
            Transport::Auto => match scan(Form::Frames, Loans::Borrow) {
                Err(error) if speaks_something_else(&error) => {
                    let connection = flight().and_then(flight::Connection::answering).map_err(|_| error);
                    return Ok((
                        connection.map(boxed).with_context(|| unusable(address))?,
                        Transport::Flight,
                    ));
                }
                opened => opened,
            },
            Transport::Rpc => scan(Form::Contiguous, Loans::None),
            Transport::Ipc => scan(Form::Stream, Loans::None),
            Transport::Flight => flight().map(boxed),
            Transport::Scatter => scan(Form::Frames, Loans::None),
            Transport::Pull => scan(Form::Frames, Loans::Pull),
        };
        Ok((opened.with_context(|| unusable(address))?, transport))
    }

    /// How the bodies of the last query came.
    pub(crate) fn ways(&self) -> Ways {
        match self {
            Self::Scan(connection) => connection.ways(),
            Self::Flight(_) => Ways::default(),
        }
    }

    pub(crate) fn query(self, dataset: &str, sql: &str, compression: Compression) -> Result<Scan<'a>> {
        match self {
            Self::Scan(connection) => connection.query(dataset, sql).map(Scan::Scan),
            Self::Flight(connection) => {
                let scan = connection.query(dataset, sql, compression == Compression::Lz4)?;
                Ok(Scan::Flight(Box::new(scan)))
            }
        }
    }
}

/// Whether a peer to which there was a connection answered with other bytes, or, as HTTP/2 servers may, by closing it.
fn speaks_something_else(error: &anyhow::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    let kind = error.downcast_ref().map(io::Error::kind);
    error.is::<ScanError>() || matches!(kind, Some(BrokenPipe | ConnectionReset | UnexpectedEof))
}

fn unusable(address: &str) -> String {
    format!("can't use the server {address}")
}

impl<'a> Scan<'a> {
    pub(crate) fn schema(&self) -> &SchemaRef {
        match self {
            Self::Scan(scan) => scan.schema(),
            Self::Flight(scan) => scan.schema(),
        }
    }

    /// Lets the server send more messages, where it needs leave.
    pub(crate) fn allow(&mut self, credits: u32) -> Result<()> {
        match self {
            Self::Scan(scan) => scan.allow(credits),
            Self::Flight(_) => Ok(()),
        }
    }

    /// The batches of the next message, and its bytes; none at the end.
    pub(crate) fn next(&mut self) -> Result<Option<(Vec<RecordBatch>, u64)>> {
        match self {
            Self::Scan(scan) => scan.next(),
            Self::Flight(scan) => scan.next(),
        }
    }

    /// The connection, once the server has forgotten the query.
    pub(crate) fn finish(self) -> Result<Connection<'a>> {
        Ok(match self {
            Self::Scan(scan) => Connection::Scan(scan.finish()?),
            Self::Flight(scan) => Connection::Flight(Box::new(scan.finish())),
        })
    }
}

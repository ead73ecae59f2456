//! What can end a shuffle.

use std::io;
use std::sync::Arc;

use arrow_schema::ArrowError;
use thiserror::Error;

use crate::{NodeId, WorkerId};

pub type Result<T> = std::result::Result<T, Error>;

/// Why rows can't be moved. One error is told to every worker that it concerns, so it can be cloned.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum Error {
    #[error("partition: {0}")]
    Partition(String),
    #[error("cluster: {0}")]
    Cluster(String),
    /// The connection to a process ended before its workers had.
    #[error("{node} is gone before its workers have ended: {why}")]
    Gone { node: NodeId, why: String },
    /// A process left in order, but its workers had not ended this shuffle.
    #[error("{0} has left")]
    Left(NodeId),
    /// Another process can't say what it was asked for, or takes no connection.
    #[error("{node}: {why}")]
    Refused { node: NodeId, why: String },
    /// A worker can't go on with the shuffle.
    #[error("{worker} gave up: {why}")]
    GaveUp { worker: WorkerId, why: String },
    #[error("{node} breaks the protocol: {why}")]
    Protocol { node: NodeId, why: String },
    #[error("not everybody came within the time: {0}")]
    Join(String),
    #[error("this process has left the cluster")]
    Closed,
    #[error("a shuffle's halves can be taken once: {0}")]
    Taken(String),
    #[error("rows of other columns than the shuffle's")]
    Schema,
    #[error(transparent)]
    Columns(Arc<thallus_columnar::Error>),
    #[error(transparent)]
    Arrow(Arc<ArrowError>),
    #[error("{what}: {error}")]
    Io { what: &'static str, error: Arc<io::Error> },
}

impl Error {
    /// For `map_err`: says at what an operation failed.
    pub(crate) fn io(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |error| Self::Io { what, error: Arc::new(error) }
    }
}

impl From<thallus_columnar::Error> for Error {
    fn from(error: thallus_columnar::Error) -> Self {
        Self::Columns(Arc::new(error))
    }
}

impl From<ArrowError> for Error {
    fn from(error: ArrowError) -> Self {
        Self::Arrow(Arc::new(error))
    }
}

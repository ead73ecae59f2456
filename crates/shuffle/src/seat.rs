//! A process' place at its address.

use std::net::{SocketAddr, TcpListener};

use crate::{Cluster, Error, NodeId, Result};

/// A process that listens, and has not joined a cluster.
#[derive(Debug)]
pub struct Seat(TcpListener);

impl Seat {
    /// # Errors
    ///
    /// Those of bind(2).
    pub fn bind(address: SocketAddr) -> Result<Self> {
        TcpListener::bind(address).map(Self).map_err(Error::io("listen"))
    }

    /// # Errors
    ///
    /// Those of getsockname(2).
    pub fn address(&self) -> Result<SocketAddr> {
        self.0.local_addr().map_err(Error::io("listen"))
    }

    /// For process `me` of a cluster.
    pub(crate) fn of(self, cluster: &Cluster, me: NodeId) -> Result<TcpListener> {
        if me.index() >= cluster.nodes() {
            return Err(Error::Cluster(format!("{me} of {}", cluster.nodes())));
        }
        Ok(self.0)
    }
}

impl From<Seat> for TcpListener {
    fn from(seat: Seat) -> Self {
        seat.0
    }
}

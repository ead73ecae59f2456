//! Who takes part: processes, and the workers in each.

use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;

use crate::{Error, Result};

/// The number of a process, from 0.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeId(pub u32);

/// The number of a worker among those of all processes, from 0.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, PartialOrd, Ord)]
pub struct WorkerId(pub u32);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}", self.0)
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "worker {}", self.0)
    }
}

impl NodeId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

impl WorkerId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// What all processes know of each other, and must agree upon. Workers are numbered process by process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Tells this cluster from others at the same addresses. Not a secret.
    token: u64,
    addresses: Vec<SocketAddr>,
    /// The first worker of each process, and the number of all workers behind the last.
    first: Vec<u32>,
}

impl Cluster {
    /// `processes` has the address of each, and how many workers it has.
    ///
    /// # Errors
    ///
    /// No process, a process without a worker, more than 65,535 workers.
    pub fn new(token: u64, processes: &[(SocketAddr, usize)]) -> Result<Self> {
        let mut first = vec![0];
        for (address, workers) in processes {
            let before = *first.last().expect("there is one from the beginning");
            match u16::try_from(before as usize + workers) {
                Ok(sum) if *workers > 0 => first.push(u32::from(sum)),
                Ok(_) => return Err(Error::Cluster(format!("no worker at {address}"))),
                Err(_) => return Err(Error::Cluster("more than 65,535 workers".into())),
            }
        }
        if processes.is_empty() {
            return Err(Error::Cluster("no process".into()));
        }
        let addresses = processes.iter().map(|(address, _)| *address).collect();
        Ok(Self { token, addresses, first })
    }

    pub fn token(&self) -> u64 {
        self.token
    }

    pub fn nodes(&self) -> usize {
        self.addresses.len()
    }

    /// The workers of all processes.
    pub fn workers(&self) -> usize {
        self.first[self.nodes()] as usize
    }

    /// # Panics
    ///
    /// If there is no such process.
    pub fn address(&self, node: NodeId) -> SocketAddr {
        self.addresses[node.index()]
    }

    /// # Panics
    ///
    /// If there is no such process.
    pub fn workers_of(&self, node: NodeId) -> Range<u32> {
        self.first[node.index()]..self.first[node.index() + 1]
    }

    /// # Panics
    ///
    /// If there is no such worker.
    pub fn node_of(&self, worker: WorkerId) -> NodeId {
        assert!(worker.index() < self.workers(), "{worker} of {}", self.workers());
        let nodes = self.first.partition_point(|first| *first <= worker.0);
        NodeId(u32::try_from(nodes - 1).expect("fewer than 65,536"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_numbered_process_by_process() {
        let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let cluster = Cluster::new(1, &[(address(1), 2), (address(2), 1), (address(3), 3)]).unwrap();
        assert_eq!((cluster.nodes(), cluster.workers()), (3, 6));
        assert_eq!(cluster.workers_of(NodeId(2)), 3..6);
        let nodes: Vec<_> = (0..6).map(|worker| cluster.node_of(WorkerId(worker)).0).collect();
        assert_eq!(nodes, [0, 0, 1, 2, 2, 2]);
    }

    #[test]
    fn nobody_and_too_many_are_refused() {
        let address = SocketAddr::from(([127, 0, 0, 1], 1));
        assert!(Cluster::new(1, &[]).is_err());
        assert!(Cluster::new(1, &[(address, 0)]).is_err());
        assert!(Cluster::new(1, &[(address, 65_535)]).is_ok());
        assert!(Cluster::new(1, &[(address, 65_535), (address, 1)]).is_err());
    }
}

//! Addresses of connections whose library has not asked for them, which it does only where it looks for the peer. The kernel lists
//! them in `/proc/PID/net/tcp` (proc_pid_net(5)) by the inode numbers that `/proc/PID/fd` shows.

use std::collections::HashMap;
use std::fs::metadata;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;

use procfs::process::{FDTarget, Process};
use thallus_transport::tcp::canonical;

use super::Connection;

/// Of one end: local, peer.
type Addresses = (SocketAddr, SocketAddr);

/// What has been found out at earlier looks, which are dear where there are many sockets.
#[derive(Debug, Default)]
pub(crate) struct Sockets {
    /// By pid, descriptor, and when the connection was opened.
    known: HashMap<(u32, u32, u64), Addresses>,
}

/// Sockets with a peer by their inode, for each network namespace by the inode of that.
type Tables = HashMap<u64, HashMap<u64, Addresses>>;

impl Sockets {
    /// Fills in the addresses that are missing, of all connections there are, sorted by pid and descriptor. They stay missing where
    /// the kernel does not tell this process.
    pub(super) fn complete(&mut self, connections: &mut [Connection]) {
        let mut tables = Tables::new();
        let before = std::mem::take(&mut self.known);
        // A copy may have outlived the descriptor that is noted, which another connection has now.
        for claimants in connections.chunk_by_mut(|one, other| (one.pid, one.fd) == (other.pid, other.fd)) {
            let [end] = claimants else { continue };
            if end.fabric != "tcp" || end.local.is_some() || end.peer.is_some() {
                continue;
            }
            let key = (end.pid, end.fd, end.opened_ns);
            let found = before.get(&key).copied().or_else(|| look_up(&mut tables, end.pid, end.fd));
            if let Some((local, peer)) = found {
                self.known.insert(key, (local, peer));
                (end.local, end.peer) = (Some(local.to_string()), Some(peer.to_string()));
            }
        }
    }
}

/// `None` if the descriptor is of no connected TCP socket, or can't be looked at.
fn look_up(tables: &mut Tables, pid: u32, fd: u32) -> Option<Addresses> {
    let process = Process::new(pid.cast_signed()).ok()?;
    let FDTarget::Socket(inode) = process.fd_from_fd(fd.cast_signed()).ok()?.target else { return None };
    let network = metadata(format!("/proc/{pid}/ns/net")).ok()?.ino();
    tables.entry(network).or_insert_with(|| connected(&process)).get(&inode).copied()
}

/// The connected TCP sockets of a process's network namespace. Without IPv6 there is but one table.
fn connected(process: &Process) -> HashMap<u64, Addresses> {
    let tables = [process.tcp(), process.tcp6()].into_iter().flatten();
    let sockets = tables.flatten().filter(|socket| socket.remote_address.port() != 0);
    sockets
        .map(|socket| (socket.inode, (canonical(socket.local_address), canonical(socket.remote_address))))
        .collect()
}

//! What both designs want of a connection.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};

/// Without a sign of life, until the kernel asks for one; between two questions; and how many of them.
const SILENCE: u32 = 10;
const INTERVAL: u32 = 5;
const PROBES: u32 = 3;

/// Connects. At a port from which this host's own connections may begin, and where nobody listens yet, one of many tries begins at just that
/// port, and is connected to itself: that is nobody, too.
pub(crate) fn connect(address: &SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(address, limit)?;
    match stream.local_addr()? == *address {
        true => Err(io::ErrorKind::ConnectionRefused.into()),
        false => Ok(stream),
    }
}

/// Whether nobody can be connected to there, which may change: nobody listens, or the network or its host is not there.
pub(crate) fn is_nobody(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable};
    matches!(error.kind(), ConnectionRefused | HostUnreachable | NetworkUnreachable)
}

/// No delay, and news of a host that is gone without a word. While bytes are under way the kernel does not ask, but sends them again for some 15
/// minutes (tcp(7), `tcp_retries2`): `TCP_USER_TIMEOUT` would also end connections to a process that is stopped, or reads slowly.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &SILENCE)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &INTERVAL)?;
    setsockopt(stream, sockopt::TcpKeepCount, &PROBES)?;
    Ok(())
}

/// For tests: whether it would be noticed that the other host is gone.
#[cfg(test)]
pub(crate) fn is_prepared(stream: &TcpStream) -> bool {
    use nix::sys::socket::getsockopt;
    let times = getsockopt(stream, sockopt::TcpKeepIdle).unwrap()
        + getsockopt(stream, sockopt::TcpKeepInterval).unwrap()
            * getsockopt(stream, sockopt::TcpKeepCount).unwrap();
    let keeps_alive = getsockopt(stream, sockopt::KeepAlive).unwrap();
    keeps_alive && times == 25
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_connected_to_where_nobody_listens() {
        let seat = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut address = seat.local_addr().unwrap();
        drop(seat);
        // Connections begin at ports of this kind first (inet_hash_connect), one after the other.
        address.set_port(address.port() & !1);
        let connected = (0..30_000).find_map(|_| connect(&address, Duration::from_secs(1)).ok());
        assert!(connected.is_none(), "{connected:?}");
    }
}

//! What both designs want of a connection.

use std::io;
use std::net::TcpStream;

use nix::sys::socket::{setsockopt, sockopt};

/// Without a sign of life, until the kernel asks for one; between two questions; and how many of them.
const SILENCE: u32 = 10;
const INTERVAL: u32 = 5;
const PROBES: u32 = 3;

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

//! The sockets of the workloads, and the libc calls that bytes travel by.
//!
//! Everything here goes through libc's functions by their names (`nix` and `std` call them), never through a
//! system call of our own: a preloaded library sees what it would see of any other program. Both kinds of
//! socket use the same calls.

use std::cell::RefCell;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv, send};
use serde::{Deserialize, Serialize};

use super::bare::Bare;
use super::plan::Wait;

/// Where the server listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Endpoint {
    Tcp(SocketAddr),
    Unix(PathBuf),
    /// Memory that both map; the server chooses the path.
    Bare(PathBuf),
}

impl Endpoint {
    /// A free TCP port of 127.0.0.1, chosen when it is listened on.
    pub(super) fn free_port() -> Self {
        Self::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
    }

    /// Opens a connection to this endpoint, blocking, without Nagle's delay.
    pub(super) fn connect(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Tcp(address) => {
                let stream = TcpStream::connect(address)?;
                stream.set_nodelay(true)?;
                Ok(stream.into())
            }
            Self::Unix(path) => Ok(UnixStream::connect(path)?.into()),
            Self::Bare(_) => Err(no_socket()),
        }
    }

    /// The same of a workload that may also do without a socket.
    pub(super) fn connect_stream(&self) -> io::Result<Stream> {
        match self {
            Self::Bare(path) => Ok(Stream::Bare(Bare::connect(path)?)),
            _ => self.connect().map(Stream::Socket),
        }
    }
}

fn no_socket() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "this workload wants sockets")
}

#[derive(Debug)]
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
    /// The server's end, until it is taken, and the memory, until the client has it.
    Bare(RefCell<Option<Bare>>, OwnedFd),
}

impl Listener {
    /// Listens on `endpoint`; returns the endpoint that clients reach it by.
    pub(super) fn bind(endpoint: &Endpoint) -> io::Result<(Self, Endpoint)> {
        match endpoint {
            Endpoint::Tcp(address) => {
                let listener = TcpListener::bind(address)?;
                let address = listener.local_addr()?;
                Ok((Self::Tcp(listener), Endpoint::Tcp(address)))
            }
            Endpoint::Unix(path) => Ok((Self::Unix(UnixListener::bind(path)?), endpoint.clone())),
            Endpoint::Bare(_) => {
                let (end, memory, path) = Bare::listen()?;
                Ok((Self::Bare(RefCell::new(Some(end)), memory), Endpoint::Bare(path)))
            }
        }
    }

    /// The next connection, blocking, without Nagle's delay.
    pub(super) fn accept(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nodelay(true)?;
                Ok(stream.into())
            }
            Self::Unix(listener) => Ok(listener.accept()?.0.into()),
            Self::Bare(..) => Err(no_socket()),
        }
    }

    /// The same of a workload that may also do without a socket.
    pub(super) fn accept_stream(&self) -> io::Result<Stream> {
        match self {
            Self::Bare(end, _) => end.take().map(Stream::Bare).ok_or_else(no_socket),
            _ => self.accept().map(Stream::Socket),
        }
    }

    pub(super) fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Tcp(listener) => listener.set_nonblocking(true),
            Self::Unix(listener) => listener.set_nonblocking(true),
            Self::Bare(..) => Err(no_socket()),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener) => listener.as_fd(),
            Self::Bare(_, memory) => memory.as_fd(),
        }
    }
}

/// A connection of those workloads that may do without a socket.
#[derive(Debug)]
pub(super) enum Stream {
    Socket(OwnedFd),
    Bare(Bare),
}

impl Stream {
    /// As the function.
    pub(super) fn receive_all(&mut self, buffer: &mut [u8], wait: Wait) -> io::Result<bool> {
        match self {
            Self::Socket(stream) => receive_all(stream, buffer, wait),
            Self::Bare(bare) => bare.receive_all(buffer),
        }
    }

    /// As the function.
    pub(super) fn transmit_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Socket(stream) => transmit_all(stream, bytes),
            Self::Bare(bare) => {
                bare.transmit_all(bytes);
                Ok(())
            }
        }
    }
}

/// Makes the calls on `stream` return EAGAIN where they would wait.
pub(super) fn set_nonblocking(stream: OwnedFd) -> io::Result<OwnedFd> {
    // `FIONBIO` does not care which kind of socket it is.
    let stream = TcpStream::from(stream);
    stream.set_nonblocking(true)?;
    Ok(stream.into())
}

/// What one call moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moved {
    Bytes(usize),
    /// Nothing: it would have had to wait.
    NotNow,
    /// Nothing more will come.
    End,
}

/// One `recv` into `buffer`, which is not empty.
pub(super) fn receive(stream: &OwnedFd, buffer: &mut [u8]) -> io::Result<Moved> {
    loop {
        return match recv(stream.as_raw_fd(), buffer, MsgFlags::empty()) {
            Ok(0) => Ok(Moved::End),
            Ok(count) => Ok(Moved::Bytes(count)),
            Err(Errno::EINTR) => continue,
            Err(Errno::EAGAIN) => Ok(Moved::NotNow),
            Err(error) => Err(error.into()),
        };
    }
}

/// One `send` from `bytes`, which is not empty.
pub(super) fn transmit(stream: &OwnedFd, bytes: &[u8]) -> io::Result<Moved> {
    loop {
        return match send(stream.as_raw_fd(), bytes, MsgFlags::MSG_NOSIGNAL) {
            Ok(count) => Ok(Moved::Bytes(count)),
            Err(Errno::EINTR) => continue,
            Err(Errno::EAGAIN) => Ok(Moved::NotNow),
            Err(error) => Err(error.into()),
        };
    }
}

/// Fills `buffer`; `false` if the stream ended before its first byte.
///
/// # Errors
/// The stream ended within, or the connection failed.
pub(super) fn receive_all(stream: &OwnedFd, buffer: &mut [u8], wait: Wait) -> io::Result<bool> {
    let mut filled = 0;
    while filled < buffer.len() {
        if wait == Wait::Poll {
            await_event(stream, PollFlags::POLLIN)?;
        }
        match receive(stream, &mut buffer[filled..])? {
            Moved::Bytes(count) => filled += count,
            Moved::NotNow => await_event(stream, PollFlags::POLLIN)?,
            Moved::End if filled == 0 => return Ok(false),
            Moved::End => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
    Ok(true)
}

/// Sends all of `bytes`.
pub(super) fn transmit_all(stream: &OwnedFd, bytes: &[u8]) -> io::Result<()> {
    let mut sent = 0;
    while sent < bytes.len() {
        match transmit(stream, &bytes[sent..])? {
            Moved::Bytes(count) => sent += count,
            Moved::NotNow => await_event(stream, PollFlags::POLLOUT)?,
            Moved::End => unreachable!("send reports no end"),
        }
    }
    Ok(())
}

fn await_event(stream: &OwnedFd, event: PollFlags) -> io::Result<()> {
    loop {
        match poll(&mut [PollFd::new(stream.as_fd(), event)], PollTimeout::NONE) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

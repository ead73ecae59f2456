//! A connection of Arrow Flight: ordinary TCP, with the server's limits.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};
use tonic::transport::server::Connected;

use crate::server::Place;

/// Whose connection it is. Every request has it among its extensions.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) place: Place,
    cursors: AtomicUsize,
    /// When the connection last took bytes, in milliseconds of the server's time.
    took: AtomicU64,
}

/// One of a client's cursors.
#[derive(Debug)]
pub(crate) struct Cursor(pub(crate) Arc<Client>);

impl Client {
    pub(crate) fn new(place: Place) -> Self {
        Self { place, cursors: AtomicUsize::new(0), took: AtomicU64::new(0) }
    }

    /// When it last took bytes, in the server's time.
    pub(crate) fn took(&self) -> Duration {
        Duration::from_millis(self.took.load(Ordering::Relaxed))
    }

    fn takes(&self, written: &Poll<io::Result<usize>>) {
        if let Poll::Ready(Ok(_)) = written {
            let now = self.place.server.now().as_millis();
            self.took.store(now.try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }

    /// None if the client has as many as it may.
    pub(crate) fn cursor(self: &Arc<Self>) -> Option<Cursor> {
        let limit = self.place.server.limits.cursors;
        let one_more = |cursors| (cursors < limit).then_some(cursors + 1);
        self.cursors.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(Cursor(self.clone()))
    }
}

impl Drop for Cursor {
    fn drop(&mut self) {
        self.0.cursors.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub(crate) struct Link {
    stream: TcpStream,
    client: Arc<Client>,
    idle: Duration,
    /// When a client without cursors has said nothing for too long.
    silence: Pin<Box<Sleep>>,
}

impl Link {
    pub(crate) fn new(stream: TcpStream, client: Client) -> Self {
        let idle = client.place.server.limits.idle;
        Self { stream, client: Arc::new(client), idle, silence: Box::pin(sleep(idle)) }
    }
}

impl Connected for Link {
    type ConnectInfo = Arc<Client>;

    fn connect_info(&self) -> Arc<Client> {
        self.client.clone()
    }
}

impl AsyncRead for Link {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let idle = self.idle;
        if let Poll::Ready(result) = Pin::new(&mut self.stream).poll_read(context, buffer) {
            self.silence.as_mut().reset(Instant::now() + idle);
            return Poll::Ready(result);
        }
        loop {
            ready!(self.silence.as_mut().poll(context));
            if self.client.cursors.load(Ordering::Relaxed) == 0 {
                log!("client {}: has said nothing for {} s", self.client.place.id, idle.as_secs());
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            self.silence.as_mut().reset(Instant::now() + idle);
        }
    }
}

impl AsyncWrite for Link {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.client.takes(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.client.takes(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

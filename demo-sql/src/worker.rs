//! A worker: one port for this transport and the engine's own, which the first bytes of a connection tell apart.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use datafusion_distributed::{DistributedExt, Worker, WorkerQueryContext};
use futures_util::stream;
use serde::{Deserialize, Serialize};
use socket2::SockRef;
use thallus_shuffle::Pool;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::timeout;
use tonic::transport::Server;
use tonic::transport::server::Connected;

use crate::carried::{Carried, End, Ends, Entry};
use crate::client::Resolver;
use crate::link::{self, greet, prepare, read_exact};
use crate::serve::{Host, Live, serve};
use crate::session::set_options_of;
use crate::wire::MAGIC;

/// What HTTP/2 begins with (RFC 9113, 3.4), as far as it is looked at.
const HTTP2: [u8; 8] = *b"PRI * HT";

/// Until a stranger has said what it wants.
const PATIENCE: Duration = Duration::from_secs(10);

/// Connections of each kind, strangers included.
const MOST_CONNECTIONS: usize = 1024;

/// Bytes of received memory that are kept for later frames.
const KEPT: usize = 64 << 20;

/// What a worker says of itself.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct Status {
    /// Partitions that are being sent over this transport.
    pub(crate) partitions: usize,
    /// Plans that came over it.
    pub(crate) plans: usize,
    pub(crate) thallus: Carried,
    pub(crate) grpc: Carried,
}

/// Serves until the listener fails.
///
/// # Errors
///
/// Those of accept(2) that do not go away.
pub(crate) async fn run(listener: std::net::TcpListener, resolver: Resolver) -> io::Result<()> {
    let worker = Worker::from_session_builder(move |mut query: WorkerQueryContext| {
        let resolver = resolver.clone();
        async move {
            set_options_of(&query.headers, query.builder.config().get_or_insert_default())?;
            Ok(query.builder.with_distributed_channel_resolver(resolver).build())
        }
    })
    .with_version(env!("CARGO_PKG_VERSION"));

    let (sender, accepted) = unbounded_channel();
    tokio::spawn(
        Server::builder()
            .add_service(worker.clone().into_worker_server())
            .serve_with_incoming(incoming(accepted)),
    );
    let (ours, theirs, live) = (Arc::<Ends>::default(), Arc::<Ends>::default(), Arc::<Live>::default());
    let status = {
        let (ours, theirs, live) = (ours.clone(), theirs.clone(), live.clone());
        move || {
            let status = Status {
                partitions: live.partitions.load(Ordering::Relaxed),
                plans: live.plans.load(Ordering::Relaxed),
                thallus: ours.carried(),
                grpc: theirs.carried(),
            };
            serde_json::to_vec(&status).expect("numbers and texts")
        }
    };
    let (engine, pool, status) = (Handle::current(), Arc::new(Pool::new(KEPT)), Box::new(status));
    let host = Arc::new(Host { worker, engine, pool, live, status, served: Mutex::default() });
    let place = Arc::new(Place { host, ours, theirs, sender });
    link::io().spawn(accept(listener, place)).await?
}

async fn accept(listener: std::net::TcpListener, place: Arc<Place>) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let place = place.clone();
                tokio::spawn(async move {
                    if let Err(error) = place.welcome(stream, peer).await {
                        log!("{peer}: {error}");
                    }
                });
            }
            Err(error) if passes(&error) => {
                log!("accept: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Of a connection that was gone before it was accepted, or is forbidden, or for want of descriptors or memory (accept(2)).
fn passes(error: &io::Error) -> bool {
    const EPERM: i32 = 1;
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    const ENOBUFS: i32 = 105;
    let kind = error.kind();
    matches!(error.raw_os_error(), Some(EPERM | ENFILE | EMFILE | ENOBUFS))
        || matches!(
            kind,
            io::ErrorKind::ConnectionAborted | io::ErrorKind::OutOfMemory | io::ErrorKind::Interrupted
        )
}

struct Place {
    host: Arc<Host>,
    ours: Arc<Ends>,
    theirs: Arc<Ends>,
    sender: UnboundedSender<Link>,
}

impl Place {
    /// # Errors
    ///
    /// What a stranger has done wrong. Afterwards it is closed.
    async fn welcome(&self, stream: TcpStream, peer: SocketAddr) -> io::Result<()> {
        prepare(&stream)?;
        let entry = self.ours.enter(End::new(stream), MOST_CONNECTIONS)?;
        let end = entry.end.clone();
        let mut first = [0; 8];
        timeout(PATIENCE, read_exact(&end, &mut first)).await.map_err(|_| said("it says nothing"))??;
        match first {
            MAGIC => {
                timeout(PATIENCE, greet(&end, &first))
                    .await
                    .map_err(|_| said("it does not finish its greeting"))??;
                let why = serve(self.host.clone(), end).await;
                if why.starts_with("it breaks") {
                    log!("{peer}: {why}");
                }
                drop(entry);
            }
            HTTP2 => {
                let entry = entry.into(&self.theirs, MOST_CONNECTIONS)?;
                let _ = self.sender.send(Link { entry, first, read: 0 }); // the server ends with the process
            }
            _ => return Err(said("it speaks neither protocol")),
        }
        Ok(())
    }
}

fn said(what: &'static str) -> io::Error {
    io::Error::other(what)
}

/// What tonic takes connections from.
fn incoming(accepted: UnboundedReceiver<Link>) -> impl stream::Stream<Item = io::Result<Link>> {
    stream::unfold(accepted, |mut accepted| async { Some((Ok(accepted.recv().await?), accepted)) })
}

/// A connection of the engine's own transport, whose first bytes have been read.
#[derive(Debug)]
struct Link {
    entry: Entry,
    first: [u8; 8],
    /// Of the first bytes.
    read: usize,
}

impl Connected for Link {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Link {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let rest = &self.first[self.read..];
        if !rest.is_empty() {
            let bytes = rest.len().min(buffer.remaining());
            buffer.put_slice(&rest[..bytes]);
            self.read += bytes;
            return Poll::Ready(Ok(()));
        }
        let end = &self.entry.end;
        loop {
            ready!(end.stream.poll_read_ready(context))?;
            match end.stream.try_read(buffer.initialize_unfilled()) {
                Ok(bytes) => {
                    buffer.advance(bytes);
                    end.received(bytes);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Link {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[io::IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let end = &self.entry.end;
        loop {
            ready!(end.stream.poll_write_ready(context))?;
            match end.stream.try_write_vectored(slices) {
                Ok(bytes) => {
                    end.sent(bytes);
                    return Poll::Ready(Ok(bytes));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(SockRef::from(&self.entry.end.stream).shutdown(std::net::Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_outlives_what_keeps_one_connection_out() {
        // ECONNABORTED, EPERM, EINTR, ENFILE, EMFILE, ENOBUFS, ENOMEM.
        for errno in [103, 1, 4, 23, 24, 105, 12] {
            assert!(passes(&io::Error::from_raw_os_error(errno)), "{errno}");
        }
        // EBADF, EINVAL: of the listener itself.
        for errno in [9, 22] {
            assert!(!passes(&io::Error::from_raw_os_error(errno)), "{errno}");
        }
    }
}

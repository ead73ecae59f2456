//! One connection: frames that wait to be written, and frames that are read.
//!
//! Rows are only sent against credit, so what waits here is bounded by the windows of all partitions, and the connection is never
//! held up by one that nobody reads.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use arrow_buffer::{Buffer, MutableBuffer};
use socket2::{SockRef, TcpKeepalive};
use thallus_columnar::Message;
use thallus_shuffle::Pool;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::carried::End;
use crate::wire::{GREETING, HEAD, Head, Kind, LARGEST_TEXT, greeting};

/// Frames other than rows that may wait to be written. Who does not read its answers is not answered for ever.
const MOST_WAITING: usize = 1 << 16;

/// Areas that one system call takes (`IOV_MAX` of Linux, see writev(2)).
const AREAS: usize = 1024;

/// Frames that are taken from the queue at once.
const TAKEN: usize = 64;

/// A host that does not answer for about 25 seconds is gone.
const SILENCE: Duration = Duration::from_secs(10);
const INTERVAL: Duration = Duration::from_secs(5);
const PROBES: u32 = 3;

/// A thread of its own for all connections: the engine computes in its tasks for as long as it likes, and what comes meanwhile (credit,
/// cancellation, the end of a worker) must not wait for it.
pub(crate) fn io() -> &'static Runtime {
    static IO: LazyLock<Runtime> = LazyLock::new(|| {
        let builder = &mut Builder::new_multi_thread();
        builder
            .worker_threads(1)
            .thread_name("connections")
            .enable_all()
            .build()
            .expect("a thread can be started")
    });
    &IO
}

#[derive(Debug)]
pub(crate) enum Body {
    Bytes(Vec<u8>),
    Messages(Vec<Message>),
}

#[derive(Debug)]
struct Frame {
    head: [u8; HEAD],
    body: Body,
    /// Of [`MOST_WAITING`].
    counts: bool,
}

impl Frame {
    fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let (bytes, messages) = match &self.body {
            Body::Bytes(bytes) => (&bytes[..], &[][..]),
            Body::Messages(messages) => (&[][..], &messages[..]),
        };
        [&self.head[..], bytes].into_iter().chain(messages.iter().flat_map(Message::slices))
    }
}

/// The end to which frames are given. What is given after the connection has ended is dropped.
#[derive(Debug)]
pub(crate) struct Link {
    end: Arc<End>,
    queue: UnboundedSender<Frame>,
    waiting: Arc<AtomicUsize>,
}

impl Link {
    /// A connection whose greetings have been exchanged. Its frames are written by a task that ends with it.
    pub(crate) fn new(end: Arc<End>) -> Self {
        let (queue, frames) = unbounded_channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let link = Self { end: end.clone(), queue, waiting: waiting.clone() };
        io().spawn(async move {
            // Whoever reads hears of the error.
            let _ = write(&end, frames, &waiting).await;
            end.close();
        });
        link
    }

    pub(crate) fn end(&self) -> &Arc<End> {
        &self.end
    }

    pub(crate) fn send(&self, head: Head, body: Body) {
        let counts = head.kind != Kind::Rows;
        if counts && self.waiting.fetch_add(1, Ordering::Relaxed) >= MOST_WAITING {
            return self.end.close();
        }
        let length = match &body {
            Body::Bytes(bytes) => bytes.len(),
            Body::Messages(messages) => messages.iter().map(Message::encoded_len).sum(),
        };
        let head = Head { length, ..head }.to_bytes();
        let _ = self.queue.send(Frame { head, body, counts }); // the writer has ended with the connection
    }

    /// A frame without a body.
    pub(crate) fn say(&self, head: Head) {
        self.send(head, Body::Bytes(Vec::new()));
    }

    pub(crate) fn fail(&self, request: u64, partition: u32, why: &str) {
        let why = &why[..why.floor_char_boundary(LARGEST_TEXT)];
        self.send(Head::new(Kind::Failed, request, partition), Body::Bytes(why.into()));
    }
}

async fn write(end: &End, mut queue: UnboundedReceiver<Frame>, waiting: &AtomicUsize) -> io::Result<()> {
    let mut frames = Vec::with_capacity(TAKEN);
    while queue.recv_many(&mut frames, TAKEN).await > 0 {
        waiting.fetch_sub(frames.iter().filter(|frame| frame.counts).count(), Ordering::Relaxed);
        write_all(end, frames.iter().flat_map(Frame::slices)).await?;
        frames.clear();
    }
    Ok(())
}

async fn write_all<'a>(end: &End, slices: impl Iterator<Item = &'a [u8]> + Send) -> io::Result<()> {
    let mut slices = slices.filter(|slice| !slice.is_empty()).map(IoSlice::new);
    loop {
        let mut window: Vec<IoSlice<'_>> = slices.by_ref().take(AREAS).collect();
        if window.is_empty() {
            return Ok(());
        }
        let mut rest = &mut window[..];
        while !rest.is_empty() {
            end.stream.writable().await?;
            match end.stream.try_write_vectored(rest) {
                Ok(written) => {
                    end.sent(written);
                    IoSlice::advance_slices(&mut rest, written);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Sends this side's greeting, and takes the other's, of which `have` is there.
pub(crate) async fn greet(end: &End, have: &[u8]) -> io::Result<()> {
    write_all(end, std::iter::once(&greeting()[..])).await?;
    let mut bytes = [0; GREETING];
    bytes[..have.len()].copy_from_slice(have);
    read_exact(end, &mut bytes[have.len()..]).await?;
    match bytes == greeting() {
        true => Ok(()),
        false => Err(io::Error::other("the other end speaks something else, or another version")),
    }
}

pub(crate) async fn read_exact(end: &End, mut rest: &mut [u8]) -> io::Result<()> {
    while !rest.is_empty() {
        let read = read(end, &mut [IoSliceMut::new(rest)]).await?;
        rest = &mut rest[read..];
    }
    Ok(())
}

/// At least a byte.
async fn read(end: &End, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
    loop {
        end.stream.readable().await?;
        match end.stream.try_read_vectored(into) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")),
            Ok(read) => {
                end.received(read);
                return Ok(read);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

/// Hands each frame to `take`, until the connection ends or breaks the rules; returns why.
pub(crate) async fn read_frames(
    end: &End,
    pool: &Pool,
    mut take: impl FnMut(Head, Buffer) -> Result<(), String>,
) -> String {
    let mut bytes = [0; HEAD];
    let mut have = 0;
    loop {
        if let Err(error) = read_exact(end, &mut bytes[have..]).await {
            return error.to_string();
        }
        have = 0;
        let head = match Head::from_bytes(&bytes) {
            Ok(head) => head,
            Err(why) => return format!("it breaks the protocol: {why}"),
        };
        let body = match head.length {
            0 => Buffer::default(),
            length => match read_body(end, pool.take(length), length, &mut bytes).await {
                Ok((memory, read)) => {
                    have = read;
                    pool.filled(memory, length)
                }
                Err(error) => return error.to_string(),
            },
        };
        if let Err(why) = take(head, body) {
            return format!("it breaks the protocol: {why}");
        }
    }
}

/// A body, and as much of the next head as came with it.
async fn read_body(
    end: &End,
    mut memory: MutableBuffer,
    length: usize,
    head: &mut [u8; HEAD],
) -> io::Result<(MutableBuffer, usize)> {
    let mut filled = 0;
    while filled < length {
        filled +=
            read(end, &mut [IoSliceMut::new(&mut memory[filled..length]), IoSliceMut::new(head)]).await?;
    }
    Ok((memory, filled - length))
}

/// No delay, and news of a host that is gone.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(SILENCE).with_interval(INTERVAL).with_retries(PROBES);
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(SILENCE + INTERVAL * PROBES))
}

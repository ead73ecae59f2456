//! What a client sends, and how long it may take for that.

use std::io::{self, BufReader, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use thallus_columnar::scan::{Frame, FrameLimits, HEADER, Header};

/// Reads frames. Each must be there as a whole some time after it was asked for, however slowly its bytes come.
#[derive(Debug)]
pub(crate) struct Incoming<'a> {
    reader: BufReader<Until<'a>>,
}

/// What came in place of a frame's first 16 bytes.
#[derive(Debug)]
pub(crate) enum Begin {
    Header([u8; HEADER]),
    /// Not one byte came in time.
    Silence,
    /// The client has gone in between two frames, whether or not it has read all that it was sent.
    End,
}

#[derive(Debug)]
struct Until<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut stream = self.stream;
        stream.read(buffer)
    }
}

impl<'a> Incoming<'a> {
    pub(crate) fn new(stream: &'a TcpStream) -> Self {
        Self { reader: BufReader::new(Until { stream, deadline: Instant::now() }) }
    }

    /// The beginning of the next frame. With its first byte the time begins anew.
    pub(crate) fn begin(&mut self, patience: Duration) -> Result<Begin> {
        let mut header = [0; HEADER];
        let mut filled = 0;
        self.allow(patience);
        while filled < HEADER {
            match self.reader.read(&mut header[filled..]) {
                Ok(0) if filled == 0 => return Ok(Begin::End),
                Ok(0) => bail!("the connection ended in mid-frame"),
                Ok(read) => {
                    if filled == 0 {
                        self.allow(patience);
                    }
                    filled += read;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_late(&error) && filled == 0 => return Ok(Begin::Silence),
                Err(error) if has_left(&error) && filled == 0 => return Ok(Begin::End),
                Err(error) => return Err(told(error, patience)),
            }
        }
        Ok(Begin::Header(header))
    }

    /// The rest of the frame.
    pub(crate) fn frame(&mut self, header: &[u8; HEADER], patience: Duration) -> Result<Frame> {
        // A client's frames have no tail.
        let header = Header::parse(header, &FrameLimits { tail: 0, ..FrameLimits::default() })?;
        let mut head = vec![0; header.head];
        self.reader.read_exact(&mut head).map_err(|error| told(error, patience))?;
        Ok(Frame::parse(&header, &head)?)
    }

    fn allow(&mut self, patience: Duration) {
        self.reader.get_mut().deadline = Instant::now() + patience;
    }
}

fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Whether the client has gone without having read all that it was sent, as tcp(7) tells it.
pub(crate) fn has_left(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

fn told(error: io::Error, patience: Duration) -> anyhow::Error {
    if is_late(&error) {
        return anyhow::anyhow!("a frame is not complete after {} s", patience.as_secs());
    }
    anyhow::anyhow!("the connection ended in mid-frame: {error}")
}

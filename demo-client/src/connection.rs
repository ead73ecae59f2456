//! The client's end of the scan protocol.

use std::io::{BufReader, Read};
use std::net::TcpStream;

use anyhow::{Context, Result, anyhow, bail, ensure};
use arrow_array::RecordBatch;
use arrow_buffer::{Buffer, MutableBuffer};
use arrow_schema::SchemaRef;
use thallus_columnar::Decoder;
use thallus_columnar::scan::{CursorId, Failure, Frame, FrameLimits, HEADER, Header};

use crate::interrupt::Interrupt;
use crate::loans::{self, Loans, Ways};
use crate::tail;

/// Says that batches are to be copied into one buffer each (docs/wire-scan.md).
const BASELINE: &[u8; HEADER] = b"thallus baseline";

/// The largest tail. The server's have 4 MiB and one chunk more, which may hold long strings.
const TAIL: u64 = 1 << 30;

#[derive(Debug)]
pub(crate) struct Connection<'a> {
    reader: BufReader<TcpStream>,
    interrupt: &'a Interrupt,
    options: Options,
}

/// How results are to come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// Each batch copied into one buffer by the server.
    pub(crate) baseline: bool,
    pub(crate) loans: Loans,
    /// Whoever runs the server.
    pub(crate) validate: bool,
}

/// A query's result.
pub(crate) struct Scan<'a> {
    connection: Connection<'a>,
    cursor: CursorId,
    decoder: Decoder,
    schema: SchemaRef,
    ways: Ways,
}

impl<'a> Connection<'a> {
    pub(crate) fn open(address: &str, options: Options, interrupt: &'a Interrupt) -> Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        if options.baseline {
            std::io::Write::write_all(&mut &stream, BASELINE)?;
        }
        let mut sender = interrupt.sender();
        if sender.happened {
            bail!("interrupted");
        }
        sender.stream = Some(stream.try_clone()?);
        sender.send(&Frame::hello())?;
        if options.loans != Loans::None {
            let frame = sender.books.accept_loans();
            sender.send(&frame)?;
        }
        drop(sender);
        let mut connection = Self { reader: BufReader::new(stream), interrupt, options };
        connection.read_frame()?.0.check_hello()?;
        Ok(connection)
    }

    pub(crate) fn query(mut self, dataset: &str, sql: &str) -> Result<Scan<'a>> {
        let mut sender = self.interrupt.sender();
        let (_, init) = sender.books.init(dataset, sql);
        sender.send(&init)?;
        drop(sender);
        let (frame, tail) = self.receive()?;
        match frame {
            Frame::Opened { cursor, .. } => {
                let mut sender = self.interrupt.sender();
                sender.cursor = Some(cursor);
                drop(sender);
                let mut decoder = Decoder::default();
                let schema = tail::schema(&mut decoder, tail).context("the result's schema")?;
                Ok(Scan { connection: self, cursor, decoder, schema, ways: Ways::default() })
            }
            Frame::Refused { failure, .. } => Err(told(failure)),
            frame => Err(unexpected(&frame)),
        }
    }

    /// The next frame, entered into the books, and its tail.
    fn receive(&mut self) -> Result<(Frame, Buffer)> {
        let (frame, tail) = self.read_frame()?;
        self.interrupt.sender().books.received(&frame)?;
        Ok((frame, tail))
    }

    fn read_frame(&mut self) -> Result<(Frame, Buffer)> {
        let ended = "the server has closed the connection";
        let mut header = [0; HEADER];
        self.reader.read_exact(&mut header).context(ended)?;
        let header = Header::parse(&header, &FrameLimits { tail: TAIL, ..FrameLimits::default() })?;
        let mut head = vec![0; header.head];
        self.reader.read_exact(&mut head).context(ended)?;
        let frame = Frame::parse(&header, &head)?;
        // Aligned to 64 bytes, and of zeros that cost nothing before they are overwritten.
        let mut tail = MutableBuffer::from_len_zeroed(usize::try_from(header.tail)?);
        self.reader.read_exact(&mut tail).context(ended)?;
        Ok((frame, tail.into()))
    }
}

impl Scan<'_> {
    pub(crate) fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// How the bodies came so far.
    pub(crate) fn ways(&self) -> Ways {
        self.ways
    }

    fn choose_trust(&mut self) {
        let Connection { reader, options, .. } = &self.connection;
        loans::choose_trust(&mut self.decoder, reader.get_ref(), options.validate);
    }

    pub(crate) fn allow(&mut self, credits: u32) -> Result<()> {
        let mut sender = self.connection.interrupt.sender();
        let frame = sender.books.iterate(self.cursor, credits)?;
        sender.send(&frame)
    }

    /// The batches of the next message, and its bytes; none at the end.
    pub(crate) fn next(&mut self) -> Result<Option<(Vec<RecordBatch>, u64)>> {
        loop {
            let (frame, tail) = self.connection.receive()?;
            match frame {
                Frame::Batch { .. } => {
                    let bytes = tail.len() as u64;
                    self.choose_trust();
                    self.ways.streamed += 1;
                    return Ok(Some((tail::batches(&mut self.decoder, tail)?, bytes)));
                }
                Frame::Lent { bytes, handle, .. } => {
                    let Connection { reader, options, .. } = &self.connection;
                    ensure!(bytes <= TAIL, "the server has lent {bytes} bytes; the limit is {TAIL}");
                    let (stream, loans) = (reader.get_ref(), options.loans);
                    let bodies = loans::take(stream, loans, handle, usize::try_from(bytes)?, &mut self.ways)?;
                    let bytes = bytes + tail.len() as u64;
                    self.choose_trust();
                    return Ok(Some((tail::lent_batches(&mut self.decoder, tail, bodies)?, bytes)));
                }
                Frame::Done { .. } => return Ok(None),
                Frame::Failed { failure, .. } => return Err(told(failure)),
                Frame::Progress { .. } => {}
                frame => return Err(unexpected(&frame)),
            }
        }
    }

    /// Has the server forget the cursor, and waits until it has.
    pub(crate) fn finish(mut self) -> Result<()> {
        let mut sender = self.connection.interrupt.sender();
        let frame = sender.books.finalize(self.cursor)?;
        sender.cursor = None;
        sender.send(&frame)?;
        drop(sender);
        match self.connection.receive()?.0 {
            Frame::Finalized { .. } => Ok(()),
            frame => bail!(unexpected(&frame)),
        }
    }
}

/// What the server, or its database, says.
fn told(failure: Failure) -> anyhow::Error {
    anyhow!(failure.message)
}

fn unexpected(frame: &Frame) -> anyhow::Error {
    anyhow!("the server sent a frame that does not belong here: {frame:?}")
}

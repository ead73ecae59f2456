//! The client's end of the scan protocol.

use std::cell::{Cell, RefCell};
use std::io::{self, BufReader, Read, Write};
use std::net::TcpStream;
use std::rc::Rc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use arrow_array::RecordBatch;
use arrow_buffer::{Buffer, MutableBuffer};
use arrow_ipc::reader::StreamReader;
use arrow_schema::SchemaRef;
use thallus_columnar::Decoder;
use thallus_columnar::scan::{CursorId, Failure, Frame, FrameLimits, HEADER, Header};

use crate::interrupt::Interrupt;
use crate::loans::{self, Believe, Loans, Ways};
use crate::tail;

/// The largest tail, or message. The server's have little more than 4 MiB, unless a single row has more.
pub(crate) const TAIL: u64 = 1 << 30;

/// How batches come (docs/wire-scan.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// In frames, with credits.
    Frames,
    /// The same, after having been copied into one buffer each.
    Contiguous,
    /// As one Arrow IPC stream.
    Stream,
}

impl Form {
    /// What the server is told, in front of HELLO.
    fn preface(self) -> &'static [u8] {
        match self {
            Self::Frames => b"",
            Self::Contiguous => b"thallus baseline",
            Self::Stream => b"thallus streamed",
        }
    }
}

#[derive(Debug)]
pub(crate) struct Connection<'a> {
    reader: Rc<RefCell<BufReader<TcpStream>>>,
    form: Form,
    loans: Loans,
    believe: Believe,
    ways: Ways,
    interrupt: &'a Interrupt,
}

/// A query's result.
pub(crate) struct Scan<'a> {
    connection: Connection<'a>,
    cursor: CursorId,
    source: Source,
    schema: SchemaRef,
}

enum Source {
    Frames(Box<Decoder>),
    Stream(Box<StreamReader<Counted>>, Rc<Cell<u64>>),
}

/// Counts what is read by way of it.
struct Counted {
    reader: Rc<RefCell<BufReader<TcpStream>>>,
    bytes: Rc<Cell<u64>>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.borrow_mut().read(buffer)?;
        self.bytes.set(self.bytes.get() + read as u64);
        Ok(read)
    }
}

impl<'a> Connection<'a> {
    pub(crate) fn open(
        address: &str,
        form: Form,
        loans: Loans,
        believe: Believe,
        interrupt: &'a Interrupt,
    ) -> Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        let mut sender = interrupt.sender();
        if sender.happened {
            bail!("interrupted");
        }
        (&stream).write_all(form.preface())?;
        sender.stream = Some(stream.try_clone()?);
        sender.send(&Frame::hello())?;
        if loans != Loans::None {
            let frame = sender.books.accept_loans();
            sender.send(&frame)?;
        }
        drop(sender);
        let reader = Rc::new(RefCell::new(BufReader::new(stream)));
        let mut connection = Self { reader, form, loans, believe, ways: Ways::default(), interrupt };
        connection.read_frame()?.0.check_hello()?;
        Ok(connection)
    }

    pub(crate) fn query(mut self, dataset: &str, sql: &str) -> Result<Scan<'a>> {
        self.ways = Ways::default();
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
                let (source, schema) = self.begin(tail).context("the result's schema")?;
                Ok(Scan { connection: self, cursor, source, schema })
            }
            Frame::Refused { failure, .. } => Err(told(failure)),
            frame => Err(unexpected(&frame)),
        }
    }

    /// How the bodies of the last query came.
    pub(crate) fn ways(&self) -> Ways {
        self.ways
    }

    fn begin(&self, tail: Buffer) -> Result<(Source, SchemaRef)> {
        if self.form == Form::Stream {
            let bytes = Rc::new(Cell::new(0));
            let reader = Counted { reader: self.reader.clone(), bytes: bytes.clone() };
            let stream = StreamReader::try_new(reader, None)?;
            let schema = stream.schema();
            return Ok((Source::Stream(Box::new(stream), bytes), schema));
        }
        let mut decoder = Decoder::default();
        let schema = tail::schema(&mut decoder, tail)?;
        Ok((Source::Frames(Box::new(decoder)), schema))
    }

    /// The next frame, entered into the books, and its tail.
    fn receive(&mut self) -> Result<(Frame, Buffer)> {
        let (frame, tail) = self.read_frame()?;
        self.interrupt.sender().books.received(&frame)?;
        Ok((frame, tail))
    }

    fn read_frame(&mut self) -> Result<(Frame, Buffer)> {
        let ended = "the server has closed the connection";
        let mut reader = self.reader.borrow_mut();
        let mut header = [0; HEADER];
        reader.read_exact(&mut header).context(ended)?;
        let header = Header::parse(&header, &FrameLimits { tail: TAIL, ..FrameLimits::default() })?;
        let mut head = vec![0; header.head];
        reader.read_exact(&mut head).context(ended)?;
        let frame = Frame::parse(&header, &head)?;
        // Aligned to 64 bytes, and of zeros that cost nothing before they are overwritten.
        let mut tail = MutableBuffer::from_len_zeroed(usize::try_from(header.tail)?);
        reader.read_exact(&mut tail).context(ended)?;
        Ok((frame, tail.into()))
    }
}

impl<'a> Scan<'a> {
    pub(crate) fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// Lets the server send more. A plain stream needs no leave.
    pub(crate) fn allow(&mut self, credits: u32) -> Result<()> {
        if matches!(self.source, Source::Stream(..)) {
            return Ok(());
        }
        let mut sender = self.connection.interrupt.sender();
        let frame = sender.books.iterate(self.cursor, credits)?;
        sender.send(&frame)
    }

    /// The batches of the next message, and its bytes; none at the end.
    pub(crate) fn next(&mut self) -> Result<Option<(Vec<RecordBatch>, u64)>> {
        if let Source::Stream(stream, bytes) = &mut self.source {
            let before = bytes.get();
            if let Some(batch) = stream.next() {
                return Ok(Some((vec![batch?], bytes.get() - before)));
            }
        }
        loop {
            let (frame, tail) = self.connection.receive()?;
            match (frame, &mut self.source) {
                (Frame::Batch { .. }, Source::Frames(decoder)) => {
                    let bytes = tail.len() as u64;
                    // Whoever is at the other end may only pass on what comes from elsewhere, as ssh does.
                    decoder.validate();
                    self.connection.ways.streamed += 1;
                    return Ok(Some((tail::batches(decoder, tail)?, bytes)));
                }
                (Frame::Lent { bytes, handle, .. }, Source::Frames(decoder)) => {
                    ensure!(bytes <= TAIL, "the server has lent {bytes} bytes; the limit is {TAIL}");
                    let Connection { reader, loans, believe, ways, .. } = &mut self.connection;
                    let reader = reader.borrow();
                    let bodies =
                        loans::take(reader.get_ref(), *loans, handle, usize::try_from(bytes)?, ways)?;
                    loans::choose_trust(decoder, reader.get_ref(), *believe);
                    let bytes = bytes + tail.len() as u64;
                    return Ok(Some((tail::lent_batches(decoder, tail, bodies)?, bytes)));
                }
                (Frame::Done { .. }, _) => return Ok(None),
                (Frame::Failed { failure, .. }, _) => return Err(told(failure)),
                (Frame::Progress { .. }, _) => {}
                (frame, _) => return Err(unexpected(&frame)),
            }
        }
    }

    /// Has the server forget the cursor, and waits until it has.
    pub(crate) fn finish(mut self) -> Result<Connection<'a>> {
        let mut sender = self.connection.interrupt.sender();
        let frame = sender.books.finalize(self.cursor)?;
        sender.cursor = None;
        sender.send(&frame)?;
        drop(sender);
        match self.connection.receive()?.0 {
            Frame::Finalized { .. } => Ok(self.connection),
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

//! An encapsulated message as a list of memory areas, and its way into a writer.

use std::io::{self, IoSlice, Write};

use arrow_buffer::Buffer;

use crate::ALIGNMENT;

/// The most areas that one `writev` takes (`IOV_MAX` of Linux, see writev(2)).
const IOV_MAX: usize = 1024;

static ZEROS: [u8; ALIGNMENT] = [0; ALIGNMENT];

/// What a [`Message`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Schema,
    /// A dictionary, new or in place of the one before.
    Dictionary,
    /// Values that are added to a dictionary.
    Delta,
    Batch,
    End,
}

/// A piece of a body.
#[derive(Clone, Debug)]
pub enum Segment {
    /// Memory of an array.
    Buffer(Buffer),
    /// 1 to 64 zero bytes.
    Zeros(usize),
}

impl Segment {
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Self::Buffer(buffer) => buffer,
            Self::Zeros(bytes) => &ZEROS[..*bytes],
        }
    }
}

/// One message of a stream. The body's buffers stay alive as long as the message.
#[derive(Clone, Debug)]
pub struct Message {
    pub(crate) kind: Kind,
    pub(crate) header: Vec<u8>,
    pub(crate) body: Vec<Segment>,
    pub(crate) body_len: usize,
    pub(crate) copied_bytes: usize,
}

impl Message {
    /// A message without a body.
    pub(crate) fn of_header(kind: Kind, header: Vec<u8>) -> Self {
        Self { kind, header, body: Vec::new(), body_len: 0, copied_bytes: 0 }
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Continuation marker, length and metadata; a multiple of 64 bytes, except at the end of the stream.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// No segment is empty. Every buffer is followed by zeros up to a multiple of 64 bytes.
    pub fn body(&self) -> &[Segment] {
        &self.body
    }

    /// Bytes of the body, a multiple of 64.
    pub fn body_len(&self) -> usize {
        self.body_len
    }

    /// Bytes of header and body.
    pub fn encoded_len(&self) -> usize {
        self.header.len() + self.body_len
    }

    /// Bytes of column memory that had to be written anew: offsets that did not start at zero, and bitmaps that did not
    /// start at a byte. Zero for arrays that were never sliced.
    pub fn copied_bytes(&self) -> usize {
        self.copied_bytes
    }

    /// Header and segments in the order of the stream.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(&self.header[..]).chain(self.body.iter().map(Segment::as_slice))
    }

    /// [`Message::slices`] for a vectored send. A caller passes at most `IOV_MAX` at once and takes partial sends into
    /// account, as [`write_all_vectored`] does.
    pub fn io_slices(&self) -> impl Iterator<Item = IoSlice<'_>> {
        self.slices().map(IoSlice::new)
    }

    /// # Errors
    ///
    /// Those of [`write_all_vectored`].
    pub fn write_to(&self, writer: &mut impl Write) -> io::Result<()> {
        write_all_vectored(writer, self.slices())
    }
}

/// Writes all slices, up to 1,024 in one call, in as many calls as the writer needs. Pass those of several messages to send
/// them at once: `messages.iter().flat_map(Message::slices)`.
///
/// # Errors
///
/// The writer's, except `Interrupted`; `WriteZero` if it takes nothing.
pub fn write_all_vectored<'a>(
    writer: &mut impl Write,
    slices: impl Iterator<Item = &'a [u8]>,
) -> io::Result<()> {
    let mut slices = slices.filter(|slice| !slice.is_empty()).map(IoSlice::new);
    let mut window = Vec::with_capacity(IOV_MAX.min(slices.size_hint().0.max(16)));
    loop {
        window.clear();
        window.extend(slices.by_ref().take(IOV_MAX));
        if window.is_empty() {
            return Ok(());
        }
        let mut rest = &mut window[..];
        while !rest.is_empty() {
            match writer.write_vectored(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => IoSlice::advance_slices(&mut rest, written),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes a few bytes in each call, and is interrupted now and then.
    struct Sluggish {
        taken: Vec<u8>,
        calls: usize,
        most: usize,
        widest: usize,
    }

    impl Write for Sluggish {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.write_vectored(&[IoSlice::new(bytes)])
        }

        fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
            self.calls += 1;
            self.widest = self.widest.max(slices.len());
            if self.calls.is_multiple_of(3) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let before = self.taken.len();
            for slice in slices {
                let room = self.most - (self.taken.len() - before);
                self.taken.extend_from_slice(&slice[..slice.len().min(room)]);
            }
            Ok(self.taken.len() - before)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn partial_and_interrupted_writes_lose_nothing() {
        let pieces: Vec<Vec<u8>> = (0..3000_usize).map(|i| vec![i as u8; i % 7]).collect();
        for most in [1, 5, 4096, usize::MAX] {
            let mut writer = Sluggish { taken: Vec::new(), calls: 0, most, widest: 0 };
            write_all_vectored(&mut writer, pieces.iter().map(Vec::as_slice)).unwrap();
            assert_eq!(writer.taken, pieces.concat());
            assert_eq!(writer.widest, IOV_MAX);
        }
    }

    #[test]
    fn a_writer_that_takes_nothing_is_an_error() {
        let mut writer = Sluggish { taken: Vec::new(), calls: 0, most: 0, widest: 0 };
        let error = write_all_vectored(&mut writer, [&[1_u8][..]].into_iter()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WriteZero);
    }
}

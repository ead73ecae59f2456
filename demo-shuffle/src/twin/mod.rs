//! What the designs are compared with: programs that use sockets plainly. They take rows apart in the same way, in batches of the same
//! size; but each batch is copied into one message, and each pair of workers has connections of its own.

pub(crate) mod push;
pub(crate) mod staged;

use std::io::{Read, Write};
use std::net::TcpStream;

use anyhow::Result;
use arrow_array::RecordBatch;
use thallus_api::{Status, Thallus};
use thallus_shuffle::stream::Outs;
use thallus_shuffle::{Gather, Partition, WorkerId};

use crate::design::Sender;

/// Where a twin takes rows.
trait Target: Send {
    fn deliver(&mut self, target: WorkerId, batch: RecordBatch) -> Result<()>;
    fn finish(&mut self) -> Result<()>;
}

/// Gathers rows and takes them apart, as the senders of the designs do.
struct Plain<T> {
    gather: Gather,
    target: T,
}

impl<T: Target> Plain<T> {
    fn flush(&mut self) -> Result<()> {
        self.gather.take()?.into_iter().try_for_each(|(target, part)| self.target.deliver(target, part))
    }
}

impl<T: Target> Sender for Plain<T> {
    fn partition(&mut self, partition: &Partition) -> Result<()> {
        Ok(self.gather.partition(partition)?)
    }

    fn send(&mut self, batch: RecordBatch) -> Result<()> {
        if self.gather.add(batch)? { self.flush() } else { Ok(()) }
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        self.flush()?;
        self.target.finish()
    }
}

/// What carries connections; nothing without the library.
fn carried<'a>(streams: impl Iterator<Item = &'a TcpStream>) -> Vec<Status> {
    let Some(thallus) = Thallus::find() else { return Vec::new() };
    streams.filter_map(|stream| thallus.status(stream).ok()).collect()
}

/// Adds a batch to serialized ones.
fn serialize(outs: &mut Outs, target: WorkerId, batch: &RecordBatch, to: &mut Vec<u8>) -> Result<()> {
    for message in outs.frame(target, batch)? {
        message.write_to(to)?;
    }
    Ok(())
}

fn read_u64(mut stream: &TcpStream) -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn write_numbers(mut stream: &TcpStream, numbers: &[u64]) -> std::io::Result<()> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    stream.write_all(&bytes)
}

/// A number of bytes, and as many bytes, which no longer message than 2 GiB has.
fn read_message(mut stream: &TcpStream) -> Result<Vec<u8>> {
    let length = read_u64(stream)?;
    anyhow::ensure!(length <= 2 << 30, "a message of {length} bytes");
    let mut message = vec![0; usize::try_from(length)?];
    stream.read_exact(&mut message)?;
    Ok(message)
}

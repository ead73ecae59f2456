//! What the designs are compared with: programs that use sockets plainly. They take rows apart in the same way, in batches of the same
//! size; but each batch is copied into one message, and each pair of workers has connections of its own.

pub(crate) mod push;
pub(crate) mod staged;

use std::io::{Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result};
use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use arrow_select::concat::concat_batches;
use thallus_shuffle::stream::Out;
use thallus_shuffle::{Partition, Scatter};

/// Gathers rows and takes them apart, as the senders of the designs do.
struct Gather {
    schema: SchemaRef,
    targets: usize,
    batch_rows: usize,
    gathered: Vec<RecordBatch>,
    rows: usize,
    scatter: Option<Scatter>,
}

impl Gather {
    fn new(schema: SchemaRef, targets: usize, batch_rows: usize) -> Self {
        Self { schema, targets, batch_rows, gathered: Vec::new(), rows: 0, scatter: None }
    }

    fn partition(&mut self, partition: &Partition) -> Result<()> {
        self.scatter = Some(Scatter::new(partition, &self.schema, self.targets)?);
        Ok(())
    }

    /// The parts, once there are enough.
    fn add(&mut self, batch: RecordBatch) -> Result<Vec<(usize, RecordBatch)>> {
        self.rows += batch.num_rows();
        self.gathered.push(batch);
        if self.rows >= self.batch_rows * self.targets { self.rest() } else { Ok(Vec::new()) }
    }

    fn rest(&mut self) -> Result<Vec<(usize, RecordBatch)>> {
        self.rows = 0;
        let batch = concat_batches(&self.schema, &std::mem::take(&mut self.gathered))?;
        Ok(self.scatter.as_mut().context("no partition")?.split(&batch)?)
    }
}

/// Adds a batch to serialized ones.
fn serialize(out: &mut Out, batch: &RecordBatch, to: &mut Vec<u8>) -> Result<()> {
    for message in out.frame(batch)? {
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

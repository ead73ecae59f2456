//! pyarrow at the other end of a plain socket reads what we write, and we read what it writes.
//!
//! `scripts/test columns` installs pyarrow and names its interpreter in `THALLUS_PYTHON`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod arrays;

use std::collections::HashMap;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, Int32Array, RecordBatch, StringArray, StructArray};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use thallus_columnar::{
    DecodeOptions, EncodeOptions, Encoder, Error, Kind, Message, Misaligned, StreamReader, write_all_vectored,
};

use arrays::{Random, Shape, any_array, any_batch, any_schema, dictionary, field, flat_types};

struct Peer {
    child: Child,
    connection: TcpStream,
}

impl Peer {
    fn start(mode: &str) -> Self {
        let python = std::env::var_os("THALLUS_PYTHON").expect("THALLUS_PYTHON is a Python that has pyarrow");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pyarrow_peer.py");
        let port = listener.local_addr().unwrap().port().to_string();
        let mut child = Command::new(python).arg(script).args([mode, &port]).spawn().unwrap();
        listener.set_nonblocking(true).unwrap();
        let connection = loop {
            match listener.accept() {
                Ok((connection, _)) => break connection,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    assert!(child.try_wait().unwrap().is_none(), "the peer ended before it connected");
                    std::thread::sleep(std::time::Duration::from_millis(10));
                }
                Err(error) => panic!("{error}"),
            }
        };
        connection.set_nonblocking(false).unwrap();
        Self { child, connection }
    }

    fn send(&mut self, messages: &[Message]) {
        write_all_vectored(&mut self.connection, messages.iter().flat_map(Message::slices)).unwrap();
    }

    fn reader(&mut self) -> StreamReader<&mut TcpStream> {
        StreamReader::new(&mut self.connection, aligning()).unwrap()
    }

    fn finish(mut self) {
        drop(self.connection);
        assert!(self.child.wait().unwrap().success());
    }
}

/// C++ aligns to 8 bytes, and some types want 16 here.
fn aligning() -> DecodeOptions {
    DecodeOptions::default().with_misaligned(Misaligned::Copy)
}

/// Sends batches with pyarrow reading them, and compares what it made of them. Returns the kinds of messages sent.
fn through_pyarrow(peer: &mut Peer, schema: &SchemaRef, batches: &[RecordBatch], deltas: bool) -> Vec<Kind> {
    let mut encoder =
        Encoder::new(schema, EncodeOptions { dictionary_deltas: deltas, ..EncodeOptions::default() })
            .unwrap();
    let mut messages = vec![encoder.schema()];
    for (number, batch) in batches.iter().enumerate() {
        let metadata = HashMap::from([("number".to_owned(), number.to_string())]);
        messages.extend(encoder.batch_with_metadata(batch, &metadata).unwrap());
    }
    messages.push(encoder.end());
    peer.send(&messages);

    let mut reader = peer.reader();
    assert_eq!(reader.schema(), schema);
    for (number, batch) in batches.iter().enumerate() {
        assert_eq!(&reader.next().unwrap().unwrap(), batch);
        assert_eq!(reader.decoder().custom_metadata()["number"], number.to_string());
    }
    assert!(reader.next().is_none());
    messages.iter().map(Message::kind).collect()
}

#[test]
fn pyarrow_reads_every_type_and_writes_it_back() {
    let mut peer = Peer::start("echo");
    for data_type in flat_types() {
        let schema = Arc::new(Schema::new(vec![Field::new("c", data_type, true)]));
        for sliced in [false, true] {
            let batches: Vec<_> = [0, 1, 8, 65]
                .map(|rows| any_batch(&mut Random(rows as u64), &schema, rows, Shape { sliced, tame: true }))
                .into();
            through_pyarrow(&mut peer, &schema, &batches, false);
        }
    }
    for seed in 0..300 {
        let mut random = Random(seed);
        let columns = random.below(5);
        let schema = any_schema(&mut random, columns, 3);
        let batches: Vec<_> = (0..random.below(4))
            .map(|_| {
                let rows = random.below(100);
                any_batch(&mut random, &schema, rows, Shape { sliced: seed % 2 == 0, tame: true })
            })
            .collect();
        through_pyarrow(&mut peer, &schema, &batches, false);
    }
    peer.finish();
}

/// Asks the peer to write deltas too.
fn with_deltas(batch: RecordBatch) -> RecordBatch {
    let schema = Schema::clone(&batch.schema()).with_metadata([("deltas".into(), String::new())].into());
    batch.with_schema(Arc::new(schema)).unwrap()
}

#[test]
fn pyarrow_follows_dictionaries_that_grow_and_change() {
    let mut peer = Peer::start("echo");
    let random = &mut Random(1);
    let grown: [&[&str]; 3] = [&["a", "b"], &["a", "b", "c"], &["c"]];
    let mut batch = |words: &[&str]| {
        let values: ArrayRef = Arc::new(StringArray::from(words.to_vec()));
        let column = dictionary(random, &DataType::Int8, values, 20, None);
        with_deltas(RecordBatch::try_from_iter([("word", column)]).unwrap())
    };
    let batches = grown.map(&mut batch);
    let kinds = through_pyarrow(&mut peer, &batches[0].schema(), &batches, true);
    use Kind::{Batch, Delta, Dictionary, End};
    assert_eq!(kinds, [Kind::Schema, Dictionary, Batch, Delta, Batch, Dictionary, Batch, End]);

    // The outer dictionary's values are the same each time, its inner one's are not.
    let outer = |words: [&str; 2], keys: [i8; 2]| {
        let inner = DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Utf8));
        let keys = arrow_array::Int8Array::from(keys.to_vec());
        let words = Arc::new(StringArray::from(words.to_vec()));
        let inner_array = arrow_array::Int8DictionaryArray::new(keys, words);
        let fields = vec![field("inner", inner, true)].into();
        let values: ArrayRef = Arc::new(StructArray::new(fields, vec![Arc::new(inner_array)], None));
        let keys = Int32Array::from(vec![0, 1, 1]);
        let column: ArrayRef = Arc::new(arrow_array::Int32DictionaryArray::new(keys, values));
        RecordBatch::try_from_iter([("outer", column)]).unwrap()
    };
    let batches = [outer(["x", "y"], [0, 1]), outer(["y", "x"], [1, 0])];
    let kinds = through_pyarrow(&mut peer, &batches[0].schema(), &batches, true);
    assert_eq!(kinds, [Kind::Schema, Dictionary, Dictionary, Batch, Dictionary, Dictionary, Batch, End]);
    peer.finish();
}

#[test]
fn we_read_what_pyarrow_writes() {
    let mut peer = Peer::start("own");
    let mut names = Vec::new();
    loop {
        let mut reader = peer.reader();
        let schema = reader.schema().clone();
        // The last stream has no name: it is compressed, which is refused.
        let Some(name) = schema.metadata().get("name") else {
            let error = reader.next().unwrap().unwrap_err();
            assert!(matches!(error, Error::Unsupported("a compressed body")), "{error}");
            break;
        };
        names.push(name.clone());
        let mut encoder = Encoder::new(&schema, EncodeOptions::default()).unwrap();
        let mut messages = vec![encoder.schema()];
        while let Some(batch) = reader.next() {
            let metadata = reader.decoder().custom_metadata().clone();
            messages.extend(encoder.batch_with_metadata(&batch.unwrap(), &metadata).unwrap());
        }
        messages.push(encoder.end());
        peer.send(&messages);
    }
    let expected = "columns,slices,dictionary deltas,dictionary replacement,no rows,no columns,no batches,metadata version 4";
    assert_eq!(names.join(","), expected);
    peer.finish();
}

#[test]
fn pyarrow_reads_large_columns_in_pieces() {
    let mut peer = Peer::start("echo");
    let schema = Arc::new(Schema::new(vec![
        Field::new("number", DataType::Int64, true),
        Field::new("text", DataType::Utf8View, true),
    ]));
    let rows = 300_000;
    let mut random = Random(7);
    let shape = Shape { sliced: false, tame: true };
    let columns = schema.fields().iter().map(|f| any_array(&mut random, f.data_type(), rows, true, shape));
    let batch = RecordBatch::try_new(schema.clone(), columns.collect()).unwrap();
    // Many data buffers: more areas than one writev takes.
    assert!(batch.column(1).to_data().buffers().len() > 2048);
    through_pyarrow(
        &mut peer,
        &schema,
        &[batch.clone(), batch.slice(100_000, 2048), batch.slice(3, 70_001)],
        false,
    );
    peer.finish();
}

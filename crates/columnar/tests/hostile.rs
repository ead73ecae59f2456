//! Streams that were tampered with end in an error or in valid arrays, never in a panic.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod arrays;

use std::io::Cursor;

use arrow_array::{Array, RecordBatch};
use arrow_buffer::{Buffer, MutableBuffer};
use proptest::prelude::*;
use thallus_columnar::{
    DecodeOptions, Decoder, EncodeOptions, Encoder, Event, Limits, Misaligned, Need, PREFIX,
};

use arrays::{Random, Shape, any_batch, any_schema};

/// A stream, and the ranges of its prefixes and metadata.
fn any_stream(random: &mut Random) -> (Vec<u8>, Vec<(usize, usize)>) {
    let columns = 1 + random.below(4);
    let schema = any_schema(random, columns, 3);
    let options = EncodeOptions { dictionary_deltas: true, ..EncodeOptions::default() };
    let mut encoder = Encoder::new(&schema, options).unwrap();
    let mut messages = vec![encoder.schema()];
    for _ in 0..1 + random.below(3) {
        let rows = random.below(40);
        let batch = any_batch(random, &schema, rows, Shape { sliced: true, tame: false });
        messages.extend(encoder.batch(&batch).unwrap());
    }
    messages.push(encoder.end());
    let (mut stream, mut headers) = (Vec::new(), Vec::new());
    for message in messages {
        headers.push((stream.len(), stream.len() + message.header().len()));
        message.write_to(&mut stream).unwrap();
    }
    (stream, headers)
}

/// Changes a few places, mostly in the metadata: there they reach furthest.
fn tamper(random: &mut Random, stream: &mut Vec<u8>, headers: &[(usize, usize)]) {
    for _ in 0..1 + random.below(3) {
        let (start, end) = match headers[random.below(headers.len())] {
            header if !random.one_in(3) => header,
            _ => (0, stream.len()),
        };
        let place = start + random.below(end - start);
        let old = stream[place];
        match random.below(7) {
            0 => stream[place] ^= 1 << random.below(8),
            1 => stream[place] = random.next() as u8,
            2 => stream[place] = old.wrapping_add(1),
            3 => stream[place] = old.wrapping_sub(1),
            4 => {
                let numbers = [0, 1, -1, i64::from(i32::MAX), i64::MAX, i64::MIN, 64, 8, 1 << 32];
                let number = numbers[random.below(numbers.len())].to_le_bytes();
                let place = place & !7;
                let width = [2, 4, 8][random.below(3)].min(stream.len() - place);
                stream[place..place + width].copy_from_slice(&number[..width]);
            }
            5 => {
                let from = random.below(stream.len());
                let len = random.below(16).min(stream.len() - from.max(place));
                stream.copy_within(from..from + len, place);
            }
            _ => stream.truncate(place.max(8)),
        }
        if stream.len() < headers.last().map_or(0, |last| last.1) {
            return; // the ranges hold no longer
        }
    }
}

/// Batches up to the first error.
fn decode(mut rest: &[u8], options: DecodeOptions) -> (Vec<RecordBatch>, bool) {
    let mut decoder = Decoder::new(options);
    let mut batches = Vec::new();
    loop {
        let result = match decoder.need() {
            Need::Prefix => match rest.split_off(..PREFIX) {
                Some(prefix) => decoder.prefix(prefix.try_into().unwrap()).map(|_| ()),
                None => return (batches, false),
            },
            Need::Metadata(len) => match rest.split_off(..len) {
                Some(metadata) => decoder.metadata(metadata).map(|_| ()),
                None => return (batches, false),
            },
            Need::Body(len) => match rest.split_off(..len) {
                Some(bytes) => {
                    let mut body = MutableBuffer::new(len);
                    body.extend_from_slice(bytes);
                    decoder.body(Buffer::from(body)).map(|event| {
                        if let Event::Batch(batch) = event {
                            batches.push(batch);
                        }
                    })
                }
                None => return (batches, false),
            },
            Need::Nothing => return (batches, true),
        };
        if result.is_err() {
            assert_eq!(decoder.need(), Need::Nothing);
            return (batches, false);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// What is accepted is also valid by arrow's own, slower, validation.
    #[test]
    fn tampered_streams_are_refused_or_valid(seed: u64) {
        let mut random = Random(seed);
        let (mut stream, headers) = any_stream(&mut random);
        tamper(&mut random, &mut stream, &headers);
        let misaligned = if random.one_in(2) { Misaligned::Copy } else { Misaligned::Refuse };
        let limits = Limits { rows: 1 << 20, ..Limits::default() };
        let options = DecodeOptions::default().with_limits(limits).with_misaligned(misaligned);
        for batch in decode(&stream, options).0 {
            for column in batch.columns() {
                column.to_data().validate_full().unwrap();
            }
        }
    }

    #[test]
    fn noise_is_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300), frame: bool) {
        let mut stream = bytes.clone();
        if frame {
            let length = (bytes.len() as i32).to_le_bytes();
            stream = [&[0xff; 4][..], &length, &bytes].concat();
        }
        let (batches, complete) = decode(&stream, DecodeOptions::default());
        prop_assert!(batches.is_empty());
        prop_assert_eq!(complete, frame && bytes.is_empty() || bytes.starts_with(&[255, 255, 255, 255, 0, 0, 0, 0]));
    }
}

#[test]
fn a_stream_cut_anywhere_gives_whole_batches_and_an_error() {
    for seed in 0..20 {
        let (stream, headers) = any_stream(&mut Random(seed));
        for end in 0..stream.len() {
            let mut reader = Cursor::new(&stream[..end]);
            let reader = thallus_columnar::StreamReader::new(&mut reader, DecodeOptions::default());
            let at_message = headers.iter().skip(1).any(|(start, _)| *start == end);
            match reader {
                Ok(mut reader) => assert_eq!(reader.all(|batch| batch.is_ok()), at_message),
                Err(_) => assert!(end < headers[1].0),
            }
        }
    }
}

//! Any bytes as a stream: an error, or arrays that are valid by arrow's own validation.
#![no_main]

use arrow_array::Array;
use arrow_buffer::{Buffer, MutableBuffer};
use libfuzzer_sys::fuzz_target;
use thallus_columnar::{DecodeOptions, Decoder, Event, Limits, Misaligned, Need, PREFIX};

fuzz_target!(|stream: &[u8]| {
    // Lengths of arrays without memory cost arrow's validation what they claim.
    let limits = Limits { rows: 1 << 16, ..Limits::default() };
    let options = DecodeOptions::default().with_limits(limits).with_misaligned(Misaligned::Copy);
    let mut decoder = Decoder::new(options);
    let mut rest = stream;
    loop {
        let len = match decoder.need() {
            Need::Prefix => PREFIX,
            Need::Metadata(len) | Need::Body(len) => len,
            Need::Nothing => return,
        };
        let Some(bytes) = rest.split_off(..len) else { return };
        let result = match decoder.need() {
            Need::Prefix => decoder.prefix(bytes.try_into().expect("as long as it said")).map(|_| ()),
            Need::Metadata(_) => decoder.metadata(bytes).map(|_| ()),
            _ => {
                let mut body = MutableBuffer::new(len);
                body.extend_from_slice(bytes);
                decoder.body(Buffer::from(body)).map(|event| {
                    if let Event::Batch(batch) = event {
                        for column in batch.columns() {
                            column.to_data().validate_full().expect("arrow finds it valid too");
                        }
                    }
                })
            }
        };
        if result.is_err() {
            return;
        }
    }
});

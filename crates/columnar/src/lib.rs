//! Record batches to the standard Arrow IPC stream as a list of buffers, and back onto borrowed memory.
//!
//! The wire format is [Arrow's own][ipc], so any IPC reader can read what [`Encoder`] makes and [`Decoder`] reads what
//! other writers make, unless it is compressed. What differs is memory. A usual writer copies all columns into one
//! contiguous body. Here a [`Message`] is a header and the column buffers where they are, for one vectored send:
//!
//! ```text
//!  FFFFFFFF  length  flatbuffer  0…   │ validity 0… │ offsets 0… │ values 0… │ …
//!  └──────── header (Vec<u8>) ─────┘    └ Buffer: a reference to the array's own memory
//!                                                0… └ zeros up to the next multiple of 64, from a static block
//! ```
//!
//! A usual reader allocates the body. Here whoever does the I/O hands the body in as a [`Buffer`](arrow_buffer::Buffer),
//! which may be borrowed memory, and the columns are slices of it. Neither side does I/O; [`StreamReader`] and
//! [`Message::write_to`] are conveniences on top.
//!
//! [`scan`] is the protocol by which queries and their results share a connection, also without I/O.
//!
//! By default a sender is not trusted: see [`Trust`]. `docs/columns.md` lists what is copied and what is refused.
//!
//! [ipc]: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc

#![deny(unsafe_code)]

#[cfg(not(target_endian = "little"))]
compile_error!("Arrow IPC streams are written in the byte order of the machine; only little-endian is done");

mod assemble;
mod cut;
mod decoder;
mod dictionaries;
mod encoder;
mod error;
mod join;
mod message;
mod metadata;
mod options;
mod reader;
pub mod scan;
mod schema;
mod validate;

pub use decoder::{Decoder, Event, Need};
pub use encoder::{EncodeOptions, Encoder};
pub use error::{Error, Fault};
pub use join::join;
pub use message::{Kind, Message, Segment, write_all_vectored};
pub use options::{DecodeOptions, Limits, Misaligned, Trust};
pub use reader::StreamReader;

/// Buffers of a body begin at multiples of this many bytes. The format asks for 8 and recommends 64.
pub const ALIGNMENT: usize = 64;

/// Bytes in front of each message's metadata: the continuation marker and the metadata's length.
pub const PREFIX: usize = 8;

/// Marks the beginning of a message since Arrow 0.15.
const CONTINUATION: [u8; 4] = [0xff; 4];

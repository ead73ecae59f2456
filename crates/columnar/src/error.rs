//! What can be wrong with a stream.

use arrow_schema::ArrowError;
use thiserror::Error;

/// Why a stream can't be written or read. A [`Decoder`](crate::Decoder) that has returned one is finished.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    #[error("a message does not begin with the continuation marker FFFFFFFF")]
    Continuation,
    #[error("negative length of metadata: {0}")]
    NegativeLength(i32),
    #[error("{what}: {actual} is above the limit of {limit}")]
    Limit { what: &'static str, actual: u64, limit: u64 },
    #[error("malformed metadata: {0}")]
    Flatbuffer(#[from] flatbuffers::InvalidFlatbuffer),
    #[error("malformed metadata: {0}")]
    Metadata(&'static str),
    #[error("schema, field '{field}': {why}")]
    Field { field: String, why: String },
    #[error("{0} is not supported")]
    Unsupported(&'static str),
    #[error("a buffer of the body lies outside of it, or the buffers are longer than it together")]
    Buffers,
    #[error("column '{column}': {fault}")]
    Column { column: String, fault: Fault },
    #[error("dictionary {id}: {fault}")]
    Dictionary { id: i64, fault: Fault },
    #[error("dictionary {0} is not in the schema")]
    UnknownDictionary(i64),
    #[error("the batch has other columns than the stream")]
    SchemaMismatch,
    #[error("{given} bytes were given, {needed} are needed")]
    WrongSize { needed: usize, given: usize },
    #[error("the decoder does not need this now")]
    OutOfOrder,
    #[error(transparent)]
    Arrow(#[from] ArrowError),
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// What is wrong with one array.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Fault {
    #[error("the message has too few or too many field nodes or buffers")]
    Shape,
    #[error("a buffer has {actual} bytes, {needed} are needed")]
    Short { needed: usize, actual: usize },
    #[error("a buffer is not aligned to {alignment} bytes, and copying it was not allowed")]
    Misaligned { alignment: usize },
    #[error("a length is negative or beyond the limit")]
    Length,
    #[error("the count of nulls does not match the validity bitmap, or the type has none")]
    NullCount,
    #[error("nulls in a field that has none by its schema")]
    NotNullable,
    #[error("offsets are not ascending or point outside of the values")]
    Offsets,
    #[error("offset and size of a list view point outside of the values")]
    ListView,
    #[error("a string is not UTF-8")]
    Utf8,
    #[error("a view is malformed or points outside of its buffers")]
    View,
    #[error("strings share bytes too often to be validated")]
    SharedViews,
    #[error("a child has {actual} values, {needed} are needed")]
    Child { needed: usize, actual: usize },
    #[error("a type id or offset of a union is not valid")]
    Union,
    #[error("a key is not in the dictionary of {values} values")]
    Key { values: usize },
    #[error("run ends are not ascending or do not reach the array's length")]
    RunEnds,
    #[error("a delta without a dictionary that it adds to")]
    DeltaWithoutBase,
    #[error("a delta of a dictionary of this type")]
    DeltaType,
    #[error("dictionaries of {actual} bytes in all; the limit is {limit}")]
    TooLarge { actual: u64, limit: u64 },
    #[error(transparent)]
    Arrow(#[from] ArrowError),
}

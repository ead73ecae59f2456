"""The other end of tests/pyarrow.rs: pyarrow on a plain socket.

pyarrow_peer.py echo PORT   reads streams, validates them and writes them back, until the connection ends
pyarrow_peer.py own PORT    writes streams of its own, and checks what comes back
"""

import decimal
import socket
import sys

import pyarrow as pa

DELTAS = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
VERSION_4 = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)


def read(stream):
    reader = pa.ipc.open_stream(stream)
    batches = []
    while True:
        try:
            batches.append(reader.read_next_batch_with_custom_metadata())
        except StopIteration:
            return reader.schema, batches


def write(stream, schema, batches, options):
    with pa.ipc.new_stream(stream, schema, options=options) as writer:
        for batch, metadata in batches:
            writer.write_batch(batch, custom_metadata=metadata)
    stream.flush()


def echo(stream):
    while stream.peek(1):
        schema, batches = read(stream)
        for batch, _ in batches:
            batch.validate(full=True)
        write(stream, schema, batches, DELTAS if b"deltas" in (schema.metadata or {}) else None)


def dictionaries():
    grown = [["a", "b"], ["a", "b", "a string that is long"], ["x"]]
    for words in grown:
        keys = pa.array([0, None, len(words) - 1], pa.int16())
        yield pa.record_batch([pa.DictionaryArray.from_arrays(keys, words)], names=["word"])


def columns():
    long = "a string of more than twelve bytes"
    union = pa.UnionArray.from_dense(
        pa.array([0, 1, 1, 0, 1], pa.int8()),
        pa.array([0, 0, 1, 1, 2], pa.int32()),
        [pa.array([1, 2]), pa.array(["x", None, "z"])],
    )
    sparse = pa.UnionArray.from_sparse(
        pa.array([1, 0, 1, 0, 0], pa.int8()), [pa.array([1, 2, 3, 4, 5]), pa.array(list("abcde"))]
    )
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3, 5], pa.int32()), ["p", None, "q"])
    inner = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1], pa.int8()), ["deep", "deeper"])
    nested = pa.DictionaryArray.from_arrays(
        pa.array([2, 0, None, 1, 1], pa.uint8()), pa.StructArray.from_arrays([inner], names=["inner"])
    )
    money = [decimal.Decimal(n) / 100 for n in (1, -2, 3)] + [None, decimal.Decimal("12.34")]
    return pa.record_batch(
        {
            "bool": pa.array([True, None, False, True, True]),
            "text": ["ä", None, "", long, "c"],
            "view": pa.array(["short", long, None, long * 2, ""], pa.string_view()),
            "bytes view": pa.array([b"\xff", long.encode(), None, b"", b"z"], pa.binary_view()),
            "odd": pa.array([1, 2, None, 4, 5], pa.int8()),
            "decimal": pa.array(money, pa.decimal128(20, 4)),
            "decimal256": pa.array(money, pa.decimal256(50, 4)),
            "interval": pa.array([(1, 2, 3), None, (0, 0, 1), (4, 5, 6), (7, 8, 9)], pa.month_day_nano_interval()),
            "list": pa.array([[1], None, [], [2, None], [3]], pa.list_(pa.int16())),
            "list view": pa.array([[1], None, [], [2, None], [3]], pa.list_view(pa.int16())),
            "map": pa.array([[("k", 1)], None, [], [("l", None)], []], pa.map_(pa.string(), pa.int64())),
            "dense": union,
            "sparse": sparse,
            "runs": runs,
            "nested": nested,
            "null": pa.nulls(5),
            "stamp": pa.array([0, 1, None, 2, 3], pa.timestamp("us", "UTC")),
        }
    )


def own(stream):
    batch = columns()
    words = list(dictionaries())
    lists = pa.ListArray.from_arrays([1, 2, 3], ["a", "b", "c", "d"])
    cut = pa.record_batch({"list": lists, "map": pa.MapArray.from_arrays([2, 3, 3], ["k", "l", "m"], [1, 2, 3])})
    no_columns = pa.RecordBatch.from_struct_array(pa.array([{}] * 7, pa.struct([])))
    for name, batches, options in [
        ("columns", [batch], None),
        ("slices", [batch.slice(1, 3), batch.slice(4), batch.slice(2, 0)], None),
        ("dictionary deltas", words, DELTAS),
        ("dictionary replacement", words, None),
        ("no rows", [cut.slice(0, 0)], None),
        ("no columns", [no_columns], None),
        ("no batches", [], None),
        ("metadata version 4", [batch.select(["text", "list", "sparse", "dense", "runs"])], VERSION_4),
    ]:
        schema = batches[0].schema if batches else batch.schema
        schema = schema.with_metadata({"name": name})
        batches = [batch.replace_schema_metadata({"name": name}) for batch in batches]
        sent = [(batch, pa.KeyValueMetadata({"number": str(n)})) for n, batch in enumerate(batches)]
        write(stream, schema, sent, options)
        got_schema, got = read(stream)
        assert got_schema.equals(schema, check_metadata=True), f"{name}: {got_schema}"
        assert len(got) == len(sent), name
        for (left, left_metadata), (right, right_metadata) in zip(got, sent):
            left.validate(full=True)
            assert left.equals(right), f"{name}:\n{left.to_pylist()}\n{right.to_pylist()}"
            assert left_metadata == right_metadata, name
    write(stream, batch.schema, [(batch, None)], pa.ipc.IpcWriteOptions(compression="lz4"))
    stream.flush()


def main():
    mode, port = sys.argv[1], int(sys.argv[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        reader, writer = connection.makefile("rb"), connection.makefile("wb")
        with reader, writer:
            {"echo": echo, "own": own}[mode](Both(reader, writer))


class Both:
    """One file object for the two directions of a socket."""

    def __init__(self, reader, writer):
        self.read, self.peek = reader.read, reader.peek
        self.write, self.flush = writer.write, writer.flush
        self.closed = False

    def readable(self):
        return True

    def writable(self):
        return True

    def seekable(self):
        return False

    def close(self):
        pass


if __name__ == "__main__":
    main()

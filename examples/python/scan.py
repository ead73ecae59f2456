#!/usr/bin/env python3
"""Query results from demo-server as pyarrow record batches, over an ordinary socket.

    import scan
    with scan.connect("127.0.0.1", 7575) as server:
        with server.query("SELECT l_orderkey, l_comment FROM lineitem") as result:
            for batch in result:
                ...

The protocol is docs/wire-scan.md. The program knows nothing of Thallus: with the library (`thallus run python3 scan.py …`) its
connection moves to shared memory, without it everything is the same over TCP.

    scan.py --connect 127.0.0.1:7575 --sql 'FROM lineitem LIMIT 5'
"""

import argparse
import io
import json
import socket
import struct
import sys
import time

import pyarrow as pa

import checksum

HELLO, INIT, ITERATE, FINALIZE, CANCEL = range(5)
OPENED, REFUSED, BATCH, PROGRESS, DONE, FAILED, FINALIZED = range(16, 23)

MAGIC = b"thallusq"
VERSION = 2
CREDITS = 4


class Failed(Exception):
    """What the server, or its database, says."""


def connect(host, port):
    return Server(socket.create_connection((host, port)))


class Server:
    """A connection. Queries one after the other."""

    def __init__(self, connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.requests = 0
        self.send(HELLO, MAGIC + struct.pack("<HH", VERSION, VERSION))
        kind, head, _ = self.receive()
        lowest, highest = struct.unpack_from("<HH", head, 8) if kind == HELLO and head[:8] == MAGIC else (0, 0)
        if not lowest <= VERSION <= highest:
            raise Failed("the other end does not speak this version of the scan protocol")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()

    def query(self, sql, dataset=""):
        self.requests += 1
        dataset = dataset.encode()
        self.send(INIT, struct.pack("<II", self.requests, len(dataset)) + dataset + sql.encode())
        kind, head, tail = self.receive()
        if kind == REFUSED:
            raise Failed(bytes(head[6:]).decode())
        if kind != OPENED:
            raise Failed(f"a frame that does not belong here: {kind}")
        return Result(self, bytes(head[4:20]), tail)

    def send(self, kind, head):
        self.connection.sendall(struct.pack("<B3xIQ", kind, len(head), 0) + head)

    def receive(self):
        """A frame: its kind, head and tail."""
        kind, head, tail = struct.unpack("<B3xIQ", self.read(16))
        return kind, self.read(head), self.read(tail)

    def read(self, size):
        """`size` bytes, in memory of Arrow's own: columns are parts of it."""
        buffer = pa.allocate_buffer(size)
        rest = memoryview(buffer)
        while rest:
            received = self.connection.recv_into(rest)
            if not received:
                raise Failed("the server has closed the connection")
            rest = rest[received:]
        return memoryview(buffer)


class Result(io.RawIOBase):
    """A query's record batches; also, as a file, its tails one after the other, which are an Arrow IPC stream."""

    def __init__(self, server, cursor, tail):
        super().__init__()
        self.server, self.cursor, self.tail = server, cursor, tail
        self.ended = False
        self.bytes = 0
        self.reader = pa.ipc.open_stream(self)
        self.schema = self.reader.schema
        self.allow(CREDITS)

    def __exit__(self, *_):
        self.finish()

    def __iter__(self):
        return iter(self.reader)

    def allow(self, credits):
        self.server.send(ITERATE, self.cursor + struct.pack("<I", credits))

    def cancel(self):
        """Ends the query early: what is on its way still comes, then Failed."""
        self.server.send(CANCEL, self.cursor)

    def finish(self):
        """Has the server forget the result, read or not."""
        self.server.send(FINALIZE, self.cursor)
        while self.server.receive()[0] != FINALIZED:
            pass

    def readable(self):
        return True

    def read(self, size=-1):
        """As much of the tails as there is, up to `size`; nothing at the end."""
        parts = []
        while size > 0 and (self.tail or self.next_tail()):
            part, self.tail = self.tail[:size], self.tail[size:]
            parts.append(part)
            size -= len(part)
        # One part is handed on where it is.
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def next_tail(self):
        while not self.ended:
            kind, head, tail = self.server.receive()
            if kind == BATCH:
                self.tail = tail
                self.bytes += len(tail)
                self.allow(1)
                return True
            if kind == FAILED:
                self.ended = True
                raise Failed(bytes(head[18:]).decode())
            self.ended = kind == DONE
        return False


def main():
    parser = argparse.ArgumentParser(description="Runs SQL on demo-server.")
    parser.add_argument("--connect", default="127.0.0.1:7575", metavar="ADDR:PORT")
    parser.add_argument("--sql", required=True)
    parser.add_argument("--summary", action="store_true", help="one line of JSON in place of the rows")
    arguments = parser.parse_args()
    host, port = arguments.connect.rsplit(":", 1)
    try:
        with connect(host, int(port)) as server:
            started = time.perf_counter()
            with server.query(arguments.sql) as result:
                batches = list(result)
                seconds = time.perf_counter() - started
    except (Failed, OSError) as error:
        print(f"scan.py: {error}", file=sys.stderr)
        return 1
    if arguments.summary:
        rows = sum(batch.num_rows for batch in batches)
        of_rows = checksum.of(batches)
        print(json.dumps({"rows": rows, "bytes": result.bytes, "seconds": seconds, "checksum": of_rows}))
    else:
        print(pa.Table.from_batches(batches, result.schema).to_string(preview_cols=20))
    return 0


if __name__ == "__main__":
    sys.exit(main())

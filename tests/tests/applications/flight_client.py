"""Reads, writes and exchanges tables with flight_server.py, on one connection for each of some threads."""
import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.flight as flight

rows = int(sys.argv[2])


def digest(table):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return hashlib.sha256(sink.getvalue()).hexdigest()[:16]


def talk(number):
    # Each its own: gRPC shares connections among channels with the same arguments.
    options = [("grpc.use_local_subchannel_pool", 1)]
    client = flight.connect(f"grpc://127.0.0.1:{sys.argv[1]}", generic_options=options)
    said = []
    for round in range(4):
        got = client.do_get(flight.Ticket(str(rows + number))).read_all()
        said.append(digest(got))
        name = f"{number}-{round}"
        writer, _ = client.do_put(flight.FlightDescriptor.for_path(name), got.schema)
        writer.write_table(got, max_chunksize=4000)
        writer.close()
        said.append(digest(client.do_get(flight.Ticket(name)).read_all()))
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"echo"))
        with writer:
            writer.begin(got.schema)
            for batch in got.to_batches(max_chunksize=3000):
                writer.write_batch(batch)
                assert reader.read_chunk().data.num_rows == batch.num_rows
            writer.done_writing()
        for n in range(30):
            result = next(iter(client.do_action(flight.Action("reverse", b"abc" * n))))
            said.append(result.body.to_pybytes().decode()[:3])
    client.close()
    return f"{number}: {' '.join(said)}"


with ThreadPoolExecutor(4) as pool:
    for line in pool.map(talk, range(4)):
        print(line)

"""An Arrow Flight server by gRPC C++: streams made-up tables, keeps what it is sent, answers exchanges."""
import signal
import threading

import pyarrow as pa
import pyarrow.flight as flight


def table(rows):
    return pa.table({"n": pa.array(range(rows), pa.int64()), "text": [f"row {n} " * (n % 7) for n in range(rows)]})


class Server(flight.FlightServerBase):
    def __init__(self):
        super().__init__("grpc://127.0.0.1:0")
        self.kept = {}

    def do_get(self, context, ticket):
        name = ticket.ticket.decode()
        if name in self.kept:
            return flight.RecordBatchStream(self.kept[name])
        return flight.RecordBatchStream(pa.Table.from_batches(table(int(name)).to_batches(max_chunksize=5000)))

    def do_put(self, context, descriptor, reader, writer):
        self.kept[descriptor.path[0].decode()] = reader.read_all()

    def do_exchange(self, context, descriptor, reader, writer):
        writer.begin(reader.schema)
        for chunk in reader:
            writer.write_batch(chunk.data)

    def do_action(self, context, action):
        yield flight.Result(action.body.to_pybytes()[::-1])


def stop():
    signal.sigwait({signal.SIGTERM})
    server.shutdown()


# Whichever thread takes it, gRPC's included.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
server = Server()
threading.Thread(target=stop, daemon=True).start()
print("ports", server.port, flush=True)
server.wait()

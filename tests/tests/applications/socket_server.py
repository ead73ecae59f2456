"""Echoes frames (a length in four bytes, then as many bytes), in the way that the argument names."""

import selectors
import signal
import socket
import socketserver
import subprocess
import sys

way = sys.argv[1]


class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while header := self.request.recv(4, socket.MSG_WAITALL):
            frame = self.request.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL)
            if way == "subprocess":
                frame = subprocess.run(["cat"], input=frame, capture_output=True, check=True).stdout
            self.request.sendall(header + frame)


class Threads(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 20


class Forks(socketserver.ForkingTCPServer):
    request_queue_size = 20


def stop(*_):
    sys.exit()


def serve_by_selectors():
    selector = selectors.DefaultSelector()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    selector.register(listener, selectors.EVENT_READ)
    pending = {}
    print("port", listener.getsockname()[1], flush=True)
    while True:
        for key, events in selector.select():
            conn = key.fileobj
            if conn is listener:
                conn, _ = listener.accept()
                conn.setblocking(False)
                pending[conn] = bytearray()
                selector.register(conn, selectors.EVENT_READ)
                continue
            if events & selectors.EVENT_READ:
                data = conn.recv(50_000)
                if not data:
                    selector.unregister(conn)
                    conn.close()
                    continue
                pending[conn] += data
            try:
                sent = conn.send(pending[conn])
            except BlockingIOError:
                sent = 0
            del pending[conn][:sent]
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if pending[conn] else 0)
            selector.modify(conn, wanted)


signal.signal(signal.SIGTERM, stop)
if way == "selectors":
    serve_by_selectors()
else:
    with (Forks if way == "forks" else Threads)(("127.0.0.1", 0), Echo) as server:
        print("port", server.server_address[1], flush=True)
        server.serve_forever(poll_interval=0.05)

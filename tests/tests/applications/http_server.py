"""Answers GET /N with N bytes and POST with the sum of the body's bytes."""

import http.server
import signal
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1" if sys.argv[1] == "keep" else "HTTP/1.0"

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        size = int(self.path[1:])
        self.answer(bytes(range(256)) * (size // 256) + bytes(range(size % 256)))

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(str(sum(body)).encode())

    def log_message(self, *_):
        pass


def stop(*_):
    sys.exit()


signal.signal(signal.SIGTERM, stop)
with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    server.daemon_threads = True
    print("port", server.server_address[1], flush=True)
    server.serve_forever(poll_interval=0.05)

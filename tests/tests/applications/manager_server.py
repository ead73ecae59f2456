"""A dictionary that other processes share over TCP."""

import signal
import sys
from multiprocessing.managers import BaseManager

shared = {}


class Manager(BaseManager):
    pass


def stop(*_):
    sys.exit()


Manager.register("shared", callable=lambda: shared)
signal.signal(signal.SIGTERM, stop)
server = Manager(address=("127.0.0.1", 0), authkey=b"key").get_server()
print("port", server.address[1], flush=True)
server.serve_forever()

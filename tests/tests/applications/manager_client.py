"""Uses a manager's dictionary; prints what it holds."""

import sys
from multiprocessing.managers import BaseManager


class Manager(BaseManager):
    pass


Manager.register("shared")
manager = Manager(address=("127.0.0.1", int(sys.argv[1])), authkey=b"key")
manager.connect()
shared = manager.shared()
for n in range(100):
    shared.update({f"key {n}": "value" * n})
print(sum(len(shared.get(f"key {n}")) for n in range(100)))

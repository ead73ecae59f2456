"""RDMA that does not get through between two hosts, in a guest of scripts/rdma-vm --hosts 2 --device rxe: one connection finds that out,
and the next ones stay on TCP at once.

    blocked.py LIBRARY
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

SERVER = ("10.0.0.2", 7500)
LIBRARY = "/run/libthallus_shim.so"
DEADLINE = 120


def serve() -> None:
    import socket

    def echo(connection: socket.socket) -> None:
        while received := connection.recv(4096):
            connection.sendall(received)

    listener = socket.create_server(SERVER)
    print("listens", flush=True)
    while True:
        threading.Thread(target=echo, args=[listener.accept()[0]], daemon=True).start()


def ask() -> None:
    """For each line on standard input a connection: prints the seconds until its first answer. Each is used on, until the input ends."""
    import socket

    connections = []
    for _ in sys.stdin:
        connections.append(socket.create_connection(SERVER))
        begun = time.monotonic()
        for connection in [connections[-1]] + connections * 4:
            connection.sendall(b"question")
            assert connection.recv(4096) == b"question"
            if connection is connections[-1] and begun:
                print(time.monotonic() - begun, flush=True)
                begun = 0
    print("ends", flush=True)


def start(host: str, role: str, stats: Path) -> subprocess.Popen:
    stats.mkdir()
    settings = {"PATH": os.environ["PATH"], "LD_PRELOAD": LIBRARY, "THALLUS_PEERS": "10.0.0.0/24", "THALLUS_STATS": stats}
    command = ["on", host, "env", "-i", *(f"{key}={value}" for key, value in settings.items()), "/usr/bin/python3", __file__, role]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def block() -> None:
    """On host b, packets of RoCE that come in. The local table comes first, unless it is moved."""
    rules = [["add", "pref", "10", "lookup", "local"], ["del", "pref", "0"],
             ["add", "pref", "5", "iif", "eth0", "ipproto", "udp", "dport", "4791", "blackhole"]]
    for rule in rules:
        subprocess.run(["on", "b", "ip", "rule", *rule], check=True)
    subprocess.run(["on", "b", "ip", "route", "flush", "cache"], check=True)


def counts(stats: Path) -> tuple[Counter, Counter]:
    upgraded, stayed = Counter(), Counter()
    for file in stats.glob("*.json"):
        process = json.loads(file.read_text())
        upgraded.update(process["upgraded"])
        stayed.update(process["not_upgraded"])
    return +upgraded, +stayed


def main(library: str) -> None:
    shutil.copy(library, LIBRARY)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        server = start("b", "serve", Path(folder) / "server")
        assert server.stdout.readline() == "listens\n"
        client = start("a", "ask", Path(folder) / "client")

        def first_answer() -> float:
            client.stdin.write("\n")
            return float(client.stdout.readline())

        through = [first_answer() for _ in range(2)]
        client.stdin.close()
        assert client.stdout.readline() == "ends\n" and client.wait(DEADLINE) == 0
        block()
        client = start("a", "ask", Path(folder) / "blocked")
        blocked = [first_answer() for _ in range(4)]
        client.stdin.close()
        assert client.stdout.readline() == "ends\n" and client.wait(DEADLINE) == 0
        server.kill()
        print("seconds until the first answer:", *(f"{each:.2f}" for each in [*through, *blocked]))
        seen = counts(Path(folder) / "client")
        assert seen == (Counter(verbs=2), Counter()), seen
        seen = counts(Path(folder) / "blocked")
        assert seen == (Counter(), Counter({"no-route": 4})), seen
        assert blocked[0] > 3 * max(blocked[1:]), "the others did not ask again"
    print("blocked: found out once")


if __name__ == "__main__":
    match sys.argv[1]:
        case "serve":
            serve()
        case "ask":
            ask()
        case library:
            main(library)

"""Connections to an echo server. By arguments: its port, the rounds of each, and how many; `dup` makes and closes a copy of each first.
With the port alone, many short ones and then some longer ones."""

import socket
import sys

port = int(sys.argv[1])
copies = "dup" in sys.argv[4:]
frame = (4).to_bytes(4, "big") + b"ping"


def talk(rounds):
    with socket.create_connection(("127.0.0.1", port)) as conn:
        if copies:
            conn.dup().close()
        for _ in range(rounds):
            conn.sendall(frame)
            assert conn.recv(len(frame), socket.MSG_WAITALL) == frame


wanted = [tuple(map(int, sys.argv[2:4]))] if len(sys.argv) > 2 else [(5, 120), (60, 20)]
for rounds, connections in wanted:
    for _ in range(connections):
        talk(rounds)
print("done")

"""Many short connections to an echo server, then some longer ones."""

import socket
import sys

port = int(sys.argv[1])
frame = (4).to_bytes(4, "big") + b"ping"


def talk(rounds):
    with socket.create_connection(("127.0.0.1", port)) as conn:
        for _ in range(rounds):
            conn.sendall(frame)
            assert conn.recv(len(frame), socket.MSG_WAITALL) == frame


for rounds, connections in ((5, 120), (60, 20)):
    for _ in range(connections):
        talk(rounds)
print("done")

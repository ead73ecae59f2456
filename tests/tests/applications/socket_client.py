"""Eight threads, each with a connection of its own, send frames of growing length and compare the echo."""

import socket
import sys
import threading

port, way = int(sys.argv[1]), sys.argv[2]
frames = 10 if way == "subprocess" else 60
lengths = []


def talk(number):
    with socket.create_connection(("127.0.0.1", port)) as conn:
        conn.settimeout(60)
        total = 0
        for turn in range(frames):
            frame = bytes((number + turn + i) % 256 for i in range(1 + turn * turn * 13))
            conn.sendall(len(frame).to_bytes(4, "big") + frame)
            stream = conn.makefile("rb", buffering=0)
            answer = b""
            while len(answer) < 4 + len(frame):
                answer += stream.read(4 + len(frame) - len(answer))
            assert answer[4:] == frame, (number, turn)
            total += len(frame)
        lengths.append(total)


threads = [threading.Thread(target=talk, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("echoed", sum(lengths), "on", len(lengths))

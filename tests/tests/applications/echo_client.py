"""Threads that ask an echo server for what they send, until they shut down. Argument: its port."""
import random
import socket
import sys
import threading

THREADS = 5
right = []


def work(who):
    choice = random.Random(who)
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
        stream = connection.makefile("rb")
        for _ in range(60):
            message = bytes([choice.randrange(256)]) * choice.choice([1, 10, 4000, 60_000])
            connection.sendall(message)
            assert stream.read(len(message)) == message
        connection.sendall(b"z" * 30_000)
        connection.shutdown(socket.SHUT_WR)
        assert stream.read() == b"z" * 30_000
    right.append(who)


threads = [threading.Thread(target=work, args=(who,)) for who in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sorted(right))

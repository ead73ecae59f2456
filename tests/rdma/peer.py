"""One side of a connection, for tests that need to say when it does what. Commands come on standard input, one a line;
each is answered by one line on standard output.

    serve ADDRESS PORT              listens, and echoes whatever comes, on every connection, in one process
    ask ADDRESS PORT                then: open N | echo BYTES ROUNDS | close | stream SECONDS | quit
"""

import errno
import selectors
import socket
import sys
import time


def serve(address: str, port: int) -> None:
    listener = socket.create_server((address, port), backlog=256)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    print("listening", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                selector.register(connection, selectors.EVENT_READ)
                continue
            connection = key.fileobj
            try:
                data = connection.recv(65536)
                if data:
                    connection.sendall(data)
                    continue
            except OSError:
                pass
            selector.unregister(connection)
            connection.close()


def echo(connection: socket.socket, size: int, number: int) -> None:
    request = bytes((number + i) % 251 for i in range(size))
    connection.sendall(request)
    answer = bytearray()
    while len(answer) < size:
        piece = connection.recv(size - len(answer))
        if not piece:
            raise EOFError(f"the stream ended after {len(answer)} of {size} bytes")
        answer += piece
    if answer != request:
        raise ValueError("another answer than was sent")


def stream(connection: socket.socket, seconds: float) -> str:
    """Echoes until something happens, and says what."""
    end = time.monotonic() + seconds
    number = 0
    # As long as TCP itself is given.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000)
    try:
        while time.monotonic() < end:
            echo(connection, 3000, number)
            number += 1
    except EOFError:
        return "end"
    except OSError as error:
        return errno.errorcode[error.errno]
    return "nothing"


def ask(address: str, port: int) -> None:
    connections: list[socket.socket] = []
    for line in sys.stdin:
        command, *numbers = line.split()
        answer = "done"
        match command:
            case "open":
                for _ in range(int(numbers[0])):
                    connections.append(socket.create_connection((address, port)))
            case "echo":
                size, rounds = map(int, numbers)
                for number in range(rounds):
                    for connection in connections:
                        echo(connection, size, number)
            case "close":
                while connections:
                    connections.pop().close()
            case "stream":
                answer = stream(connections[0], float(numbers[0]))
            case "quit":
                return
            case _:
                raise ValueError(line)
        print(answer, flush=True)


if __name__ == "__main__":
    role, address, port = sys.argv[1:]
    {"serve": serve, "ask": ask}[role](address, int(port))

"""Connections one after the other, in four threads, that end in every way: `connections.py server ADDRESS` serves them until SIGTERM;
`connections.py client ADDRESS FIRST OTHERS` makes FIRST, prints "first", waits for a file named "go on", makes the
others, prints "all" and waits for a file named "end".

ADDRESS is a port, of which every address of 127.0.0.0/16 is used in turn, or the name of a Unix socket."""

import os
import random
import signal
import socket
import struct
import sys
import threading
import time

THREADS = 4
SIZE = 64
EXCHANGES = 20
MUCH = 1 << 20

# The first byte that the client sends is how the connection is to end.
IN_ORDER, BY_SERVER, HALF, RESET, RESET_BY_SERVER, UNREAD, SHORT, BACK, COPY, CHILD, LARGE = range(11)
UNUSED = 11
KINDS = UNUSED + 1


def receive(link, size):
    data = bytearray()
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def reset(link):
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def ended(link):
    """Waits for the end, or a reset."""
    try:
        while link.recv(SIZE):
            pass
    except ConnectionResetError:
        pass


def serve(link):
    with link:
        try:
            first = receive(link, SIZE)
            kind = first[0]
            link.sendall(first)
            if kind == LARGE:
                for _ in range(2):
                    link.sendall(receive(link, MUCH))
            elif kind != SHORT:
                for _ in range(EXCHANGES):
                    link.sendall(receive(link, SIZE))
            if kind == BY_SERVER:
                return
            if kind == RESET_BY_SERVER:
                reset(link)
                return
            if kind == UNREAD:
                link.sendall(bytes(SIZE))
            while data := link.recv(SIZE):
                link.sendall(data)
            if kind == HALF:
                link.sendall(bytes(SIZE))
        except (EOFError, ConnectionResetError, BrokenPipeError):
            pass


def exchange(link, data):
    link.sendall(data)
    answer = receive(link, len(data))
    if answer != data:
        raise AssertionError("wrong bytes")


def use(address, family, chance):
    kind = chance.randrange(KINDS)
    with socket.socket(family) as link:
        link.connect(address)
        if kind == UNUSED:
            return
        exchange(link, bytes([kind]) + chance.randbytes(SIZE - 1))
        if kind == SHORT:
            return
        if kind == LARGE:
            data = chance.randbytes(MUCH)
            for _ in range(2):
                sender = threading.Thread(target=link.sendall, args=(data,))
                sender.start()
                if receive(link, MUCH) != data:
                    raise AssertionError("wrong bytes")
                sender.join()
            return
        for _ in range(EXCHANGES):
            exchange(link, chance.randbytes(SIZE))
        if kind in (BY_SERVER, RESET_BY_SERVER):
            ended(link)
        elif kind == HALF:
            link.shutdown(socket.SHUT_WR)
            receive(link, SIZE)
            ended(link)
        elif kind == RESET:
            reset(link)
        elif kind == BACK:
            ours, theirs = os.pipe()
            os.write(theirs, bytes(SIZE))
            os.splice(ours, link.fileno(), SIZE)
            os.close(ours)
            os.close(theirs)
            receive(link, SIZE)
        elif kind == COPY:
            with link.dup() as copy:
                link.close()
                exchange(copy, bytes(SIZE))
        elif kind == CHILD:
            child = os.fork()
            if child == 0:
                exchange(link, bytes(SIZE))
                os._exit(0)
            if os.waitpid(child, 0)[1] != 0:
                raise AssertionError("the child failed")
            exchange(link, bytes(SIZE))


def in_threads(work):
    failed = []

    def guarded(number):
        try:
            work(number)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        sys.exit(1)


def main(role, name, *counts):
    family = socket.AF_INET if name.isdigit() else socket.AF_UNIX
    if role == "server":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        server = socket.socket(family)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", int(name)) if family == socket.AF_INET else name)
        server.listen(64)

        def accept(_):
            while True:
                serve(server.accept()[0])

        in_threads(accept)
    first, rest = map(int, counts)

    def make(count):
        def some(number):
            chance = random.Random(number * KINDS + count)
            for turn in range(count // THREADS):
                # Another address each time: there are not enough ports for those that wait (TIME_WAIT).
                ip = f"127.0.{number}.{turn % 250 + 1}"
                use((ip, int(name)) if family == socket.AF_INET else name, family, chance)

        in_threads(some)

    make(first)
    print("first", flush=True)
    while not os.path.exists("go on"):
        time.sleep(0.01)
    make(rest)
    print("all", flush=True)
    while not os.path.exists("end"):
        time.sleep(0.01)


main(*sys.argv[1:])

"""Threads that talk to a memcached in its three protocols, and print a digest of all answers. Argument: its port."""
import hashlib
import random
import socket
import struct
import sys
import threading

ROUNDS = 150
printed = []


def connect():
    return socket.create_connection(("127.0.0.1", int(sys.argv[1]))).makefile("rwb")


def text(who):
    choice, stream, digest = random.Random(who), connect(), hashlib.sha256()

    def lines(last):
        stream.flush()
        while (line := stream.readline()) != last:
            assert line, "the connection ended"
            digest.update(line)
            if line.startswith((b"VALUE", b"VA ")):
                digest.update(stream.read(int(line.split()[3 if line.startswith(b"VALUE") else 1]) + 2))

    for round in range(ROUNDS):
        key = f"{who}-{round % 50}".encode()
        length = choice.choice([0, 1, 10, 1000, 20_000, 900_000 if round % 40 == 0 else 5000])
        value = bytes([choice.randrange(256)]) * length
        kind = choice.randrange(5)
        if kind == 0:
            stream.write(b"set %s 0 0 %d\r\n%s\r\n" % (key, length, value))
            lines(b"STORED\r\n")
        elif kind == 1:
            # Meta commands, quietly, up to a no-op.
            stream.write(b"ms %s %d T0\r\n%s\r\nmg %s v s\r\nmn\r\n" % (key, length, value, key))
            lines(b"MN\r\n")
        elif kind == 2:
            stream.write(b"get %s\r\n" % b" ".join(b"%d-%d" % (who, n) for n in range(50)))
            lines(b"END\r\n")
        elif kind == 3:
            for n in range(60):
                stream.write(b"set n%d-%d 0 0 5 noreply\r\nhello\r\n" % (who, n))
            stream.write(b"get n%d-59\r\n" % who)
            lines(b"END\r\n")
        else:
            stream.write(b"delete %s\r\nmn\r\n" % key)
            lines(b"MN\r\n")
    stream.write(b"quit\r\n")
    stream.flush()
    assert stream.read() == b""
    printed.append(f"{who} {digest.hexdigest()}")


def binary(who):
    choice, stream, digest = random.Random(who), connect(), hashlib.sha256()
    header = struct.Struct(">BBHBBHIIQ")
    GETKQ, SET, NOOP = 0x0D, 0x01, 0x0A

    def request(operation, key=b"", value=b"", extras=b"", opaque=0):
        body = extras + key + value
        stream.write(header.pack(0x80, operation, len(key), len(extras), 0, 0, len(body), opaque, 0) + body)

    def response():
        stream.flush()
        fields = header.unpack(stream.read(header.size))
        digest.update(struct.pack(">BHI", fields[1], fields[5], fields[7]) + stream.read(fields[6]))
        return fields[7]

    for round in range(ROUNDS):
        value = bytes([choice.randrange(256)]) * choice.choice([0, 3, 3000, 200_000])
        request(SET, b"b%d-%d" % (who, round % 20), value, bytes(8))
        response()
        for n in range(20):
            request(GETKQ, b"b%d-%d" % (who, n), opaque=n)
        request(NOOP, opaque=99)
        while response() != 99:
            pass
    printed.append(f"{who} {digest.hexdigest()}")


threads = [threading.Thread(target=text if who % 3 else binary, args=(who,)) for who in range(9)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*sorted(printed), sep="\n")

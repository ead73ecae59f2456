"""Keeps a Redis server busy over four connections, checks its answers, and says how each ended: two wait for one socket in a
thread, two in an event loop."""

import errno
import os
import selectors
import socket
import sys
import threading

port, size = int(sys.argv[1]), int(sys.argv[2])


def exchange(number, turn):
    key = b"key%d" % number
    value = b"%08d" % turn * (size // 8 + 1)
    count = b"%d" % len(value)
    request = b"*3\r\n$3\r\nSET\r\n$4\r\n%s\r\n$%s\r\n%s\r\n*2\r\n$3\r\nGET\r\n$4\r\n%s\r\n" % (key, count, value, key)
    return request, b"+OK\r\n$%s\r\n%s\r\n" % (count, value)


class Ended(Exception):
    pass


def check(data, answer):
    if not data:
        raise Ended("EOF")
    if not answer.startswith(data):
        raise Ended("wrong bytes")
    return answer[len(data):]


def tell(work):
    try:
        work()
    except Ended as ended:
        how = str(ended)
    except OSError as error:
        how = errno.errorcode.get(error.errno, str(error))
    else:
        return
    os.write(1, f"{how}\n".encode())
    raise SystemExit


def blocking(number):
    def work():
        link = socket.create_connection(("127.0.0.1", port))
        turn = 0
        while True:
            request, answer = exchange(number, turn)
            turn += 1
            link.sendall(request)
            while answer:
                answer = check(link.recv(len(answer)), answer)

    tell(work)


class Loop:
    def __init__(self, number):
        self.number, self.turn = number, 0
        self.request = self.answer = b""
        self.link = socket.create_connection(("127.0.0.1", port))
        self.link.setblocking(False)

    def step(self):
        if not self.request and not self.answer:
            self.request, self.answer = exchange(self.number, self.turn)
            self.turn += 1
        try:
            while self.request:
                self.request = self.request[self.link.send(self.request):]
        except BlockingIOError:
            pass
        try:
            while self.answer:
                self.answer = check(self.link.recv(1 << 16), self.answer)
        except BlockingIOError:
            pass

    def events(self):
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.request or not self.answer else 0)


def event_loop(numbers):
    selector = selectors.DefaultSelector()
    for number in numbers:
        try:
            loop = []
            tell(lambda: loop.append(Loop(number)))
            selector.register(loop[0].link, selectors.EVENT_READ | selectors.EVENT_WRITE, loop[0])
        except SystemExit:
            pass
    while selector.get_map():
        for key, _ in selector.select():
            loop = key.data
            try:
                tell(loop.step)
                selector.modify(loop.link, loop.events(), loop)
            except SystemExit:
                selector.unregister(loop.link)
                loop.link.close()


threads = [threading.Thread(target=blocking, args=(number,)) for number in range(2)]
for thread in threads:
    thread.start()
event_loop(range(2, 4))
for thread in threads:
    thread.join()

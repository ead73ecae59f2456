"""Twenty connections at once, each with many short lines and one long answer."""

import asyncio
import sys


async def talk(port, number):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for turn in range(50):
        line = f"client {number} turn {turn} {'x' * (turn * 37)}\n".encode()
        writer.write(line)
        await writer.drain()
        assert await asyncio.wait_for(reader.readline(), 60) == line.upper()
    size = 50_000 * (number + 1)
    writer.write(f"bulk {size}\n".encode())
    answer = await asyncio.wait_for(reader.readexactly(size), 60)
    assert answer == bytes(i % 251 for i in range(size))
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    return size


async def main():
    sizes = await asyncio.gather(*(talk(int(sys.argv[1]), number) for number in range(20)))
    print("received", sum(sizes))


asyncio.run(main())

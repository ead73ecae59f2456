"""Echoes lines in upper case on any number of connections; "bulk N" is answered with N bytes."""

import asyncio
import signal


async def serve(reader, writer):
    while line := await reader.readline():
        if line.startswith(b"bulk "):
            size = int(line[5:])
            for start in range(0, size, 100_000):
                writer.write(bytes(i % 251 for i in range(start, min(size, start + 100_000))))
                await writer.drain()
        else:
            writer.write(line.upper())
            await writer.drain()
    writer.close()


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print("port", server.sockets[0].getsockname()[1], flush=True)
    await stop.wait()


asyncio.run(main())

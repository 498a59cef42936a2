"""A server seen from far away: a proxy on loopback that hands on every byte, but later.

    python delaying_proxy.py --listen 127.0.0.1:7200 --to 127.0.0.1:7100 --delay-ms 30

What comes is stamped, and written when its time has come, in both directions: to the bytes it is a long line,
not a narrow one, so that what is under way at once is not held back by what came before it.
"""

import argparse
import asyncio
from asyncio import AbstractEventLoop, Queue, StreamReader, StreamWriter
from contextlib import suppress
from typing import Final, TypeAlias

CHUNK_BYTES: Final = 64 * 1024
# What one direction of a connection may have under way; then its sender has to wait, as on a real line.
CHUNKS_MAX: Final = 1_024
MILLISECONDS: Final = 1e3

# When to write which bytes; no bytes are the end.
Delayed: TypeAlias = tuple[float, bytes]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="where clients come")
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="the server itself")
    parser.add_argument("--delay-ms", type=float, required=True, help="for each direction")
    options = parser.parse_args()
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(options.listen, options.to, options.delay_ms / MILLISECONDS))


async def serve(listen: str, to: str, delay_seconds: float) -> None:
    """Take connections until the process ends."""

    async def connect(from_client: StreamReader, to_client: StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection(*_split(to))
        except OSError:
            to_client.close()
            return
        await asyncio.gather(
            carry(from_client, to_server, delay_seconds), carry(from_server, to_client, delay_seconds)
        )

    server = await asyncio.start_server(connect, *_split(listen))
    async with server:
        await server.serve_forever()


async def carry(reader: StreamReader, writer: StreamWriter, delay_seconds: float) -> None:
    """Hand on what comes in one direction of a connection, until it ends."""
    under_way: Queue[Delayed] = Queue(CHUNKS_MAX)
    loop = asyncio.get_running_loop()
    taking = asyncio.create_task(_take(reader, under_way, loop, delay_seconds))
    try:
        await _hand_on(writer, under_way, loop)
    except OSError:
        # Nobody listens any more, so there is nothing to take.
        taking.cancel()
    finally:
        writer.close()


async def _take(
    reader: StreamReader, under_way: Queue[Delayed], loop: AbstractEventLoop, delay_seconds: float
) -> None:
    chunk = b"\0"
    while chunk:
        try:
            chunk = await reader.read(CHUNK_BYTES)
        except OSError:
            chunk = b""
        await under_way.put((loop.time() + delay_seconds, chunk))


async def _hand_on(writer: StreamWriter, under_way: Queue[Delayed], loop: AbstractEventLoop) -> None:
    while True:
        moment, chunk = await under_way.get()
        await asyncio.sleep(moment - loop.time())
        if not chunk:
            return
        writer.write(chunk)
        await writer.drain()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


if __name__ == "__main__":
    main()

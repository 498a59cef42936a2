"""A proxy on loopback that simulates a distant server: it forwards every byte after a delay.

    python delaying_proxy.py --listen 127.0.0.1:7200 --to 127.0.0.1:7100 --delay-ms 30

In both directions, each chunk is queued with the time at which it is due.  The proxy adds latency but does
not limit the bandwidth: chunks in flight do not delay each other.
"""

import argparse
import asyncio
from asyncio import AbstractEventLoop, Queue, StreamReader, StreamWriter
from contextlib import suppress
from typing import Final, TypeAlias

CHUNK_BYTES: Final = 64 * 1024
# The most chunks in flight in one direction of a connection; then its sender must wait, as on a real line.
CHUNKS_MAX: Final = 1_024
MILLISECONDS: Final = 1e3

# The time at which to write, and the bytes; empty bytes mark the end of the stream.
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
    """Accept connections until the process ends."""

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
    """Forward one direction of a connection until it ends."""
    under_way: Queue[Delayed] = Queue(CHUNKS_MAX)
    loop = asyncio.get_running_loop()
    taking = asyncio.create_task(_take(reader, under_way, loop, delay_seconds))
    try:
        await _hand_on(writer, under_way, loop)
    except OSError:
        # The receiver has closed the connection, so stop reading.
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

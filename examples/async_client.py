"""A site from asyncio: many tasks share a few connections, and one reads the changes.

python examples/async_client.py
"""

import asyncio
import tempfile

import floodmark
from floodmark.server import serve


async def visit(url: str) -> None:
    """Count visits from twenty tasks; then write a user, and read the changes."""
    async with await floodmark.connect_async(url) as site:
        visits = await site.create_namespace("visits", merge="counter")
        await asyncio.gather(*(visits.add(b"home") for _ in range(20)))
        print("visits of home:", await visits.get(b"home"))
        users = await site.create_namespace("users")
        await users.put(b"ada", b"countess")
        print("set again:", await users.compare_and_set(b"ada", b"countess", b"programmer"))
        async for change in site.changes("users"):
            print("change:", change.key, change.value)
        print("users:", [pair async for pair in users.scan()])


def main() -> None:
    """Serve a site in a new directory, and visit it."""
    with tempfile.TemporaryDirectory() as directory:
        site = floodmark.open(directory, site="oslo")
        with serve(site, "127.0.0.1:0") as server:
            asyncio.run(visit(server.url))


if __name__ == "__main__":
    main()

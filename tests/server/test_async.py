"""A site from asyncio does what a blocking client does, on the same server."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tests.server.certificates import Certificates
from tests.server.support import intercept, serving, token_of, write_roles
from tests.waiting import HANG_SECONDS

import floodmark
from floodmark import AsyncSite
from floodmark.layers.large_values import CHUNK_BYTES
from floodmark.model.access import Role
from floodmark.model.errors import (
    InvalidKey,
    KeyNotFound,
    NamespaceNotFound,
    NotAllowed,
    OutcomeUnknown,
    Unreachable,
    WrongPolicy,
)
from floodmark.server import Server, ServerOptions


def run(server: Server, work: Callable[[AsyncSite], Awaitable[None]], **options: Any) -> None:
    """Do something with a client of a server."""

    async def visit() -> None:
        async with (
            asyncio.timeout(HANG_SECONDS),
            await floodmark.connect_async(server.url, **options) as site,
        ):
            await work(site)

    asyncio.run(visit())


def answered(server: Server, name: str) -> float:
    """How many calls of a name were answered over RESP."""
    assert server._door is not None
    return sum(server._door.tallies[name].outcomes.values())


async def use_everything(site: AsyncSite) -> None:
    users = await site.create_namespace("users")
    counts = await site.create_namespace("counts", merge="counter")
    records = await site.create_namespace("records", merge="fields")
    first = await users.put(b"ada", b"1")
    await users.put(b"ada", b"2", ttl=timedelta(hours=1))
    assert await users.get(b"ada") == b"2"
    assert await users.get(b"ada", at=first) == b"1"
    record = await users.record(b"ada")
    assert record is not None
    assert record.expires_at is not None
    await users.put_many({b"bob": b"3", b"cyd": b"4"})
    assert await users.get_many([b"cyd", b"ada", b"none", b"cyd"]) == [b"4", b"2", None, b"4"]
    assert await users.compare_and_set(b"bob", b"3", b"5")
    assert not await users.compare_and_set(b"bob", b"3", b"6")
    assert not await users.compare_and_set(b"bob", bytes(20_000_000), b"6")
    watched = await site.watch(users, b"cyd")
    assert await users.delete(b"cyd") == await watched
    await asyncio.gather(*(counts.add(b"home") for _ in range(100)))
    assert await counts.get(b"home") == 100
    assert await counts.get_many([b"home", b"none"]) == [100, None]
    assert [pair async for pair in counts.scan()] == [(b"home", 100)]
    await records.put(b"ada", {"city": "London", "born": 1815})
    await records.update(b"ada", {"title": "countess"})
    await records.delete_field(b"ada", "city")
    assert await records.get(b"ada") == b'{"born":1815,"title":"countess"}'
    async with site.atomic() as batch:
        batch.put(users, b"bob", b"5", ttl=timedelta(hours=1))
        batch.add(counts, b"home", 1)
    record = await users.record(b"bob")
    assert record is not None
    assert record.version == batch.version > 0
    pairs = [(users, b"bob"), (counts, b"home"), (users, b"none")]
    assert await site.read_atomic(pairs) == [b"5", 101, None]
    assert await site.read_atomic_many(pairs) == dict(zip(pairs, (b"5", 101, None), strict=True))

    async def fail() -> None:
        async with site.atomic() as batch:
            batch.put(users, b"bob", b"6")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert [pair async for pair in users.scan()] == [(b"ada", b"2"), (b"bob", b"5")]
    assert [pair async for pair in users.scan(reverse=True, limit=1)] == [(b"bob", b"5")]
    keys = [change.key async for change in site.changes("users")]
    assert keys == [b"ada", b"ada", b"bob", b"cyd", b"bob", b"cyd", b"bob"]
    with pytest.raises(InvalidKey):
        await users.get(b"")
    with pytest.raises(NamespaceNotFound):
        await site.namespace("nothing")


def test_calls_go_over_resp(server: Server) -> None:
    run(server, use_everything)
    assert answered(server, "merge") == 103
    assert answered(server, "compare_and_set") == 2


def test_a_server_without_resp_is_called_all_the_same() -> None:
    with serving(ServerOptions(resp_listen=None)) as (_, server):
        run(server, use_everything)


def test_tokens_and_certificates_are_shown(certificates: Certificates, tmp_path: Path) -> None:
    options = ServerOptions(
        tls_certificate=certificates.server.certificate_path,
        tls_key=certificates.server.key_path,
        access=write_roles(tmp_path / "access.toml"),
    )

    async def read(site: AsyncSite) -> None:
        users = await site.namespace("users")
        for _ in range(2):
            assert await users.get(b"ada") == b"1"
        with pytest.raises(NotAllowed):
            await users.put(b"ada", b"2")

    with serving(options) as (site, server):
        site.create_namespace("users").put(b"ada", b"1")
        run(server, read, token=token_of(Role.READ), tls_root=certificates.root_path)
        assert answered(server, "get") == 2


def test_calls_follow_a_partition_that_was_split(server: Server) -> None:
    async def write(site: AsyncSite) -> None:
        users = await site.create_namespace("users")
        await users.put(b"a", b"1")
        await asyncio.to_thread(site._site.split, "users", b"m")
        await users.put(b"z", b"2")
        await users.put_many({b"b": b"3", b"y": b"4"})
        assert await users.get_many([b"a", b"z", b"b", b"y"]) == [b"1", b"2", b"3", b"4"]

    run(server, write)


def test_a_follower_gets_changes_as_they_come_and_can_leave(server: Server) -> None:
    async def follow(site: AsyncSite) -> None:
        users = await site.create_namespace("users")
        changes: Any = site.changes("users", follow=True)
        for number in range(5):
            await users.put(b"%d" % number, b"x")
            assert (await anext(changes)).key == b"%d" % number
        await changes.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(changes)

    run(server, follow)


def test_a_lost_line_leaves_a_write_unknown_and_repeats_a_read(server: Server) -> None:
    async def lose(site: AsyncSite) -> None:
        users = await site.create_namespace("users")
        for _ in range(2):
            await users.put(b"ada", b"1")
        (lines,) = site._router._lines.values()

        async def cut(call: Awaitable[Any]) -> Any:
            task = asyncio.ensure_future(call)
            while not task.done() and not lines._open - set(lines._resting):
                await asyncio.sleep(0)
            for line in list(lines._open):
                line.transport.abort()
            return await task

        with pytest.raises(OutcomeUnknown):
            await cut(users.put(b"ada", b"2"))
        await users.put(b"ada", b"3")
        assert await cut(users.get(b"ada")) == b"3"

    run(server, lose)


def test_a_write_without_an_answer_in_time_is_of_unknown_outcome(server: Server) -> None:
    let_go = Event()

    def answer_late(handle: Callable[[], bytes]) -> bytes:
        assert let_go.wait(HANG_SECONDS)
        return handle()

    async def wait(site: AsyncSite) -> None:
        users = await site.create_namespace("users")
        for _ in range(2):
            await users.put(b"ada", b"1")
        assert intercept(server, "put", answer_late)
        (lines,) = site._router._lines.values()
        lines._connection.timeout_seconds = 0.3
        with pytest.raises(OutcomeUnknown, match=r"no answer within 0\.3 s"):
            await users.put(b"ada", b"2")
        let_go.set()

    run(server, wait)


def test_a_cancelled_call_does_not_disturb_the_next(server: Server) -> None:
    async def cancel(site: AsyncSite) -> None:
        users = await site.create_namespace("users")
        await users.put_many({b"%d" % number: b"%d" % number for number in range(50)})
        for number in range(50):
            task = asyncio.ensure_future(users.get(b"%d" % number))
            await asyncio.sleep(0)
            task.cancel()
            assert await users.get(b"%d" % (49 - number)) == b"%d" % (49 - number)

    run(server, cancel)


def test_a_server_that_is_not_there_is_told() -> None:
    with serving() as (_, server):
        url = server.url
    with pytest.raises(Unreachable):
        asyncio.run(floodmark.connect_async(url))


async def use_large_values(site: AsyncSite) -> None:
    blobs = await site.create_namespace("blobs", large_values=True)
    value = bytes(range(256)) * 20_000
    first = await blobs.put(b"disk", BytesIO(value))
    blobs = await site.namespace("blobs", large_values=True)
    await asyncio.gather(blobs.put(b"disk", value[::-1]), blobs.put(b"small", b"1"))
    assert await blobs.get(b"disk") == value[::-1]
    assert len(await anext(blobs.chunks(b"disk"))) == CHUNK_BYTES
    assert b"".join([chunk async for chunk in blobs.chunks(b"disk", at=first)]) == value
    assert [row async for row in blobs.sizes(prefix=b"d")] == [(b"disk", len(value))]
    await blobs.delete(b"disk")
    assert await blobs.sweep() == 0
    assert await blobs.get(b"disk") is None
    with pytest.raises(KeyNotFound):
        await anext(blobs.chunks(b"disk"))
    users = await site.create_namespace("users")
    await users.put(b"ada", b"1")
    with pytest.raises(WrongPolicy):
        await site.namespace("users", large_values=True)


def test_large_values_are_put_and_read_as_streams(server: Server) -> None:
    run(server, use_large_values)

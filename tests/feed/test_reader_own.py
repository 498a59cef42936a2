"""Streams of a site's own changes leave out what came from other sites, whichever way they are read."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from tests.feed.support import LARGE, World, open_world, raw_changes, read_batches, request_of, trim_log
from tests.site.support import host_of

from floodmark.codec.ordered import NAMESPACE_BYTES, encode_namespace
from floodmark.codec.values import encode_value
from floodmark.model.change import Stamp
from floodmark.model.partition import ApplyStream
from floodmark.model.stream import Way

OTHER = 9


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(log_retention=timedelta(minutes=1)) as world:
        yield world


def apply(world: World, *keys: bytes, value: bytes = b"copied", site: int = OTHER) -> None:
    """Apply changes that were first written elsewhere, as one commit."""
    host = host_of(world.site)
    prefix = encode_namespace(host.namespaces.find_namespace("users").id)
    origin = Stamp(host.versions.now(), site)
    stream = host.write_stream(ApplyStream(True))
    stream.send({prefix + key: encode_value(value, origin=origin) for key in keys}).result()


def write_both(world: World) -> list[bytes]:
    """Changes of both kinds, in commits of one and of several keys, small and large; the keys of our own."""
    world.users.put(b"a", b"1")
    apply(world, b"b")
    world.users.put_many({b"c": b"2", b"d": LARGE})
    apply(world, b"e", b"f", b"g")
    apply(world, b"h", value=LARGE)
    apply(world, b"i", b"j", value=LARGE)
    world.users.delete(b"b")
    # What this site had lost, and got back from another one.
    own = host_of(world.site).identity.site_id
    apply(world, b"k", site=own)
    apply(world, b"l", b"m", value=LARGE, site=own)
    return [b"a", b"c", b"d", b"b", b"k", b"l", b"m"]


def keys_of(world: World, **options: object) -> tuple[list[bytes], set[Way]]:
    batches = read_batches(world.site, "users", **options)
    keys = [change.key[NAMESPACE_BYTES:] for change in raw_changes(batches)]
    return keys, {batch.way for batch in batches if batch.keys}


def test_from_the_log(world: World) -> None:
    own = write_both(world)
    assert keys_of(world, own=True) == (own, {Way.LOG})
    assert len(keys_of(world)[0]) == len(own) + 7


def test_from_the_tail(world: World) -> None:
    stream = world.site.host.changes(request_of(world.site, "users", own=True, follow=True))
    next(stream)
    own = write_both(world)
    seen: list[bytes] = []
    ways = set()
    while len(seen) < len(own):
        batch = next(stream)
        seen += [key[NAMESPACE_BYTES:] for key in batch.keys]
        if batch.keys:
            ways.add(batch.way)
    assert (seen, ways) == (own, {Way.TAIL})


def test_from_a_scan(world: World) -> None:
    own = write_both(world)
    trim_log(world)
    assert keys_of(world, own=True) == (own, {Way.SCAN})

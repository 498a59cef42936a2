"""Change capture where data sets are published: one call back a change, over rewinds and restarts."""

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Any

import msgspec
import pytest

from floodmark import Change, ChangeType, Site
from floodmark.engine import MemoryEngine
from floodmark.feed.reading.capture import CaptureState, ChangeCapture, Had, Span, _Reading
from floodmark.model.errors import InvalidArgument
from floodmark.partition import FAMILIES
from floodmark.site.embedding import open_engine


@pytest.fixture
def site() -> Iterator[Site]:
    with open_engine(MemoryEngine(FAMILIES), site="oslo", background=False) as site:
        yield site


def capture(site: Site, told: list[Change], state: CaptureState | None = None) -> ChangeCapture:
    ids = {site.namespace("users").id: "users"}
    return ChangeCapture(told.append, lambda _site_id: ids, state)


def read(site: Site, since: int, way: Any = "difference") -> Iterator[Any]:
    return site.changes("users", since=since, heartbeats=True, resolved_markers=True, on_generation=way)


def write_and_publish(site: Site, random: Random) -> None:
    users, keys = site.namespace("users"), [b"%02d" % number for number in range(8)]
    for number in range(4):
        users.put(random.choice(keys), b"%d" % number)
        users.delete(random.choice(keys))
        if random.randrange(2):
            site.host.versions.heartbeat()
    site.generations.publish("users", dict.fromkeys(random.sample(keys, 4), b"%d" % random.randrange(9)))


def run(site: Site, seed: int) -> None:
    """A client that reads some items, rewinds, and begins anew with its stored state."""
    random = Random(seed)
    site.create_namespace("users")
    start = site.now()
    told: list[Change] = []
    state = CaptureState()
    for _ in range(4):
        write_and_publish(site, random)
        for left in (*random.choices(range(30), k=4), 100_000):
            client = capture(site, told, state)
            reached = max(client.since(site.id), start)
            since = random.choice([reached, max(start, reached - random.randrange(1 << 20)), start])
            client.begin(site.id, since)
            for item in islice(read(site, since), left):
                client.accept(site.id, item)
            state = msgspec.json.decode(msgspec.json.encode(client.state()), type=CaptureState)
    wanted = [each for each in read(site, start) if isinstance(each, Change)]
    assert [(each.version, each.key) for each in told] == [(each.version, each.key) for each in wanted]
    assert [each.value for each in told] == [each.value for each in wanted]


@pytest.mark.parametrize("seed", range(8))
def test_each_change_and_each_row_of_a_swap_is_called_back_once(site: Site, seed: int) -> None:
    run(site, seed)


def test_the_check_finds_rows_of_a_swap_that_are_called_back_twice(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = _Reading.has
    monkeypatch.setattr(
        _Reading, "has", lambda self, version, seen: version != self.swap and has(self, version, seen)
    )
    with pytest.raises(AssertionError):
        run(site, 1)


def test_what_another_feed_says_of_stamps_holds_back_no_row_of_a_swap(site: Site) -> None:
    users = site.create_namespace("users")
    before = users.put(b"ada", b"1")
    site.generations.publish("users", {b"bob": b"2"})
    told: list[Change] = []
    had = Had("users", site.id, (Span(0, site.now()),))
    client = capture(site, told, CaptureState(had=(had,)))
    client.begin(site.id, before)
    for item in read(site, before):
        client.accept(site.id, item)
    assert [(change.type, change.key) for change in told] == [
        (ChangeType.GENERATION, b""),
        (ChangeType.DELETE, b"ada"),
        (ChangeType.UPSERT, b"bob"),
    ]


def test_a_snapshot_at_a_swap_is_refused(site: Site) -> None:
    users = site.create_namespace("users")
    before = users.put(b"ada", b"1")
    site.generations.publish("users", {b"bob": b"2"})
    client = capture(site, [])
    client.begin(site.id, before)
    marker = next(item for item in read(site, before, "snapshot") if isinstance(item, Change))
    with pytest.raises(InvalidArgument, match="voids"):
        client.accept(site.id, marker)

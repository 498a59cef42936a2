"""Large values: whole or absent whatever fails, and no chunk is left behind after a sweep."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from io import SEEK_END, BytesIO, RawIOBase, StringIO
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.layers.conftest import CHUNK, Place, cut_at_every_write
from tests.site.support import HookedEngine, open_memory

from floodmark.layers import LargeValues, OrderedLog, large_values
from floodmark.layers.ports import LAYER
from floodmark.model.errors import (
    Corruption,
    InvalidArgument,
    InvalidKey,
    InvalidValue,
    KeyNotFound,
    NamespaceExists,
    NamespaceNotFound,
    TransactionEnded,
    WrongPolicy,
)
from floodmark.site import Site
from floodmark.testing.clock import SimulatedTime

pytestmark = pytest.mark.usefixtures("small_chunks")

HOUR_MS = 3_600_000
NAME = "configs"


def content(size: int, seed: int = 0) -> bytes:
    return Random(seed).randbytes(size)


def rows(values: LargeValues) -> list[bytes]:
    """The keys of everything that the layer has stored, but for its name."""
    return [key for key, _ in values.stored.scan() if key != LAYER]


def spread(place: Place) -> None:
    """Make the namespace, with records, chunks and garbage rows in different partitions."""
    place.site.create_namespace(NAME, exist_ok=True)
    place.site.split(NAME, b"d")
    place.site.split(NAME, b"h")
    if place.site.host.node_port.nodes():
        for node, partition in zip((1, 2, 3), place.site.partitions()[-3:], strict=True):
            if partition.node != node:
                place.site.host.node_port.move(partition.id, node)


def over_nodes(place: Place) -> LargeValues:
    """Large values, whose records, chunks and garbage rows lie in different partitions."""
    spread(place)
    return LargeValues(place.site, NAME)


# Reading and writing


def test_a_value_is_read_back_whatever_its_size(place: Place) -> None:
    values = over_nodes(place)
    sizes = (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 20 * CHUNK + 7)
    for size in sizes:
        values.put(b"%04d" % size, content(size))
        values.put(b"f%04d" % size, BytesIO(content(size)))
    for size in sizes:
        assert values.get(b"%04d" % size) == values.get(b"f%04d" % size) == content(size)
        with values.open(b"%04d" % size) as stream:
            assert stream.read() == content(size)
    assert list(values.sizes(end=b"f")) == [(b"%04d" % size, size) for size in sizes]
    assert [key for key, _ in values.sizes(b"f0101", b"f03", prefix=b"f")] == [b"f0101"]
    assert list(values.scan(prefix=b"f", limit=2, reverse=True)) == [
        (b"f2007", content(2007)),
        (b"f0300", content(300)),
    ]


def test_a_value_that_was_replaced_or_deleted_leaves_no_row_after_a_sweep(place: Place) -> None:
    values = over_nodes(place)
    for seed in range(3):
        values.put(b"switch", content(10 * CHUNK, seed))
    first = place.site.now()
    values.put(b"router", content(5 * CHUNK))
    values.delete(b"router")
    values.put(b"firewall", content(5 * CHUNK))
    values.put(b"firewall", b"small")
    assert values.get(b"router") is None
    assert b"router" not in values
    place.advance(HOUR_MS // 2)
    assert values.sweep() == 0
    place.advance(HOUR_MS)
    assert values.sweep() == 4
    assert dict(values.scan()) == {b"switch": content(10 * CHUNK, 2), b"firewall": b"small"}
    assert len(rows(values)) == 2 + 10
    assert values.sweep() == 0
    # Chunks are versioned like everything: the past can be read.
    assert values.get(b"switch", at=first) == content(10 * CHUNK, 2)


def test_a_stream_reads_on_under_a_sweep(place: Place) -> None:
    values = over_nodes(place)
    values.put(b"switch", content(30 * CHUNK, 1))
    with values.open(b"switch") as stream:
        assert stream.read(CHUNK) == content(30 * CHUNK, 1)[:CHUNK]
        values.put(b"switch", content(30 * CHUNK, 2))
        place.advance(2 * HOUR_MS)
        assert values.sweep() == 1
        place.site.collect_garbage()
        assert stream.seek(-CHUNK, SEEK_END) == 29 * CHUNK
        assert stream.read() == content(30 * CHUNK, 1)[-CHUNK:]
        stream.seek(5)
        assert stream.read() == content(30 * CHUNK, 1)[5:]
    assert values.get(b"switch") == content(30 * CHUNK, 2)


@given(
    size=st.integers(0, 7 * CHUNK),
    steps=st.lists(
        st.tuples(st.sampled_from(["read", "readinto", "line", "seek", "end", "skip"]), st.integers(0, 300))
    ),
)
def test_a_stream_reads_as_a_file_does(size: int, steps: list[tuple[str, int]]) -> None:
    with open_memory(HookedEngine(), SimulatedTime()) as site:
        values = LargeValues(site, NAME)
        values.put(b"switch", content(size))
        with values.open(b"switch") as stream:
            plain = BytesIO(content(size))
            for step, number in steps:
                assert _step(stream, step, number) == _step(plain, step, number)
                assert stream.tell() == plain.tell()
            assert stream.read() == plain.read()


def _step(stream: Any, step: str, number: int) -> object:
    match step:
        case "read":
            return stream.read(number)
        case "readinto":
            buffer = bytearray(number)
            return stream.readinto(buffer), bytes(buffer)
        case "line":
            return stream.readline()
        case "seek":
            return stream.seek(number)
        case "end":
            return stream.seek(-min(number, stream.seek(0, SEEK_END)), SEEK_END)
        case _:
            return stream.seek(number, 1)


# Faults


def at_every_write(work: Callable[[LargeValues], object]) -> Iterator[tuple[LargeValues, SimulatedTime]]:
    """The layer after a power cut at each write of `work`, and at last after all of them."""

    def prepare(site: Site, time: SimulatedTime) -> None:
        LargeValues(site, NAME).put(b"switch", content(7 * CHUNK, 1))
        time.advance(2 * HOUR_MS)

    for site, time in cut_at_every_write(prepare, lambda site, _: work(LargeValues(site, NAME))):
        yield LargeValues(site, NAME), time


def collect(values: LargeValues, time: SimulatedTime) -> None:
    time.advance(2 * HOUR_MS)
    values.sweep()


# A lease, three commits of chunks, and the move; or all at once.
@pytest.mark.parametrize(("count", "writes"), [(8, 5), (2, 1)])
def test_a_put_that_fails_anywhere_leaves_the_old_value_and_after_a_sweep_nothing_else(
    count: int, writes: int
) -> None:
    outcomes = []
    new = content(count * CHUNK, 2)
    for values, time in at_every_write(lambda values: values.put(b"switch", new)):
        found = values.get(b"switch")
        collect(values, time)
        assert values.get(b"switch") == found
        assert found in (content(7 * CHUNK, 1), new)
        assert len(rows(values)) == 1 + (count if found == new else 7)
        outcomes.append(found == new)
    assert outcomes == sorted(outcomes)
    assert outcomes.count(False) >= writes


def test_a_delete_and_its_sweep_that_fail_anywhere_leave_all_or_nothing() -> None:
    def remove(values: LargeValues) -> None:
        values.delete(b"switch")
        values.sweep(older_than=timedelta(milliseconds=-1))

    outcomes = []
    for values, time in at_every_write(remove):
        found = values.get(b"switch")
        assert found in (None, content(7 * CHUNK, 1))
        collect(values, time)
        assert values.get(b"switch") == found
        assert len(rows(values)) == (0 if found is None else 8)
        outcomes.append(found is None)
    assert outcomes == sorted(outcomes)
    assert outcomes.count(True) >= 3


class Stalling(RawIOBase):
    """A file whose reader lets `pause` happen after some chunks."""

    def __init__(self, size: int, after: int, pause: Callable[[], object]) -> None:
        self._left, self._after, self._pause = size, after, pause

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._after -= 1
        if self._after == 0:
            self._pause()
        count = min(self._left, len(buffer))
        buffer[:count] = b"x" * count
        self._left -= count
        return count


def test_a_put_that_was_swept_meanwhile_fails_and_leaves_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No commit is under way while time passes: it would find the lease old, and renew it.
    monkeypatch.setattr(large_values, "COMMITS", 1)
    values = over_nodes(place)
    values.put(b"switch", b"old")

    def pause() -> None:
        place.advance(2 * HOUR_MS)
        assert values.sweep() == 1

    for after in (4, 9):
        with pytest.raises(TransactionEnded, match="Put it again") as raised:
            values.put(b"switch", Stalling(8 * CHUNK, after, pause))  # type: ignore[arg-type]
        assert raised.value.details == {"key": b"switch"}
        assert rows(values) == [b"rswitch"]
        assert values.get(b"switch") == b"old"


def test_a_slow_put_keeps_its_chunks_from_sweeps(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_values, "COMMITS", 1)
    values = over_nodes(place)

    def pause() -> None:
        place.advance(HOUR_MS // 4 + 1)
        assert values.sweep() == 0

    class Slow(Stalling):
        def readinto(self, buffer: Any) -> int:
            pause()
            return super().readinto(buffer)

    values.put(b"switch", Slow(13 * CHUNK, 0, pause))  # type: ignore[arg-type]
    assert values.get(b"switch") == b"x" * 13 * CHUNK
    assert len(rows(values)) == 14


def test_two_puts_of_one_key_leave_one_value(place: Place) -> None:
    values = over_nodes(place)

    def other() -> None:
        values.put(b"switch", content(9 * CHUNK))

    values.put(b"switch", Stalling(4 * CHUNK, 3, other))  # type: ignore[arg-type]
    assert values.get(b"switch") == b"x" * 4 * CHUNK
    place.advance(2 * HOUR_MS)
    assert values.sweep() == 1
    assert len(rows(values)) == 5


# Damage


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda chunk: chunk[:50] + b"?" + chunk[51:], "chunk 2 is not what was written"),
        (lambda chunk: chunk[:-1], "chunk 2 is missing or cut"),
        (lambda _: None, "chunk 2 is missing or cut"),
    ],
)
def test_a_damaged_chunk_is_corruption_that_names_the_key(
    damage: Callable[[bytes], bytes | None], what: str
) -> None:
    with open_memory(HookedEngine(), SimulatedTime()) as site:
        values = LargeValues(site, NAME)
        values.put(b"switch", content(5 * CHUNK))
        stored = site.namespace(NAME)
        key, chunk = list(stored.scan(prefix=b"c"))[2]
        damaged = damage(chunk)
        _ = stored.delete(key) if damaged is None else stored.put(key, damaged)
        with values.open(b"switch") as stream:
            assert stream.read(2 * CHUNK) == content(5 * CHUNK)[: 2 * CHUNK]
            with pytest.raises(Corruption, match=what) as raised:
                stream.read(1)
        assert raised.value.details == {"key": b"switch"}


def test_chunks_that_were_exchanged_are_corruption() -> None:
    with open_memory(HookedEngine(), SimulatedTime()) as site:
        values = LargeValues(site, NAME)
        values.put(b"switch", content(5 * CHUNK))
        stored = site.namespace(NAME)
        (first, one), (second, other), *_ = stored.scan(prefix=b"c")
        stored.put_many({first: other, second: one})
        with pytest.raises(Corruption, match="chunk 0 is not what was written"):
            values.get(b"switch")


# Refusals


def test_a_layer_has_a_namespace_of_its_own(place: Place) -> None:
    site: Site = place.site
    values = LargeValues(site, NAME)
    values.put(b"switch", b"small")
    assert LargeValues(site, NAME).get(b"switch") == b"small"
    site.create_namespace("plain").put(b"ada", b"countess")
    with pytest.raises(WrongPolicy, match="holds other records"):
        LargeValues(site, "plain")
    site.create_namespace("visits", merge="counter")
    with pytest.raises(WrongPolicy, match="merges or expires"):
        LargeValues(site, "visits")
    site.create_namespace("sessions", ttl=timedelta(hours=1))
    with pytest.raises(WrongPolicy, match="merges or expires"):
        LargeValues(site, "sessions")


def test_a_namespace_of_a_layer_is_given_no_time_to_live(place: Place) -> None:
    site: Site = place.site
    LargeValues(site, NAME).put(b"switch", content(3 * CHUNK))
    OrderedLog(site, "audit").append(b"one")
    for name in (NAME, "audit"):
        with pytest.raises(WrongPolicy, match="must not expire"):
            site.update_namespace(name, ttl=timedelta(hours=1))
        site.update_namespace(name, ttl=None, retention=timedelta(hours=2))
        assert site.namespace(name).settings.ttl is None
    site.create_namespace("plain")
    assert site.update_namespace("plain", ttl=timedelta(hours=1)).settings.ttl == timedelta(hours=1)


def test_a_namespace_can_be_created_for_large_values(place: Place) -> None:
    values = place.site.create_namespace(NAME, large_values=True)
    values.put(b"switch", content(3 * CHUNK))
    assert place.site.namespace(NAME, large_values=True).get(b"switch") == content(3 * CHUNK)
    assert place.site.create_namespace(NAME, large_values=True, exist_ok=True).get(b"switch") is not None
    with pytest.raises(NamespaceExists):
        place.site.create_namespace(NAME, large_values=True)
    with pytest.raises(InvalidArgument, match="leave these out"):
        place.site.create_namespace("counts", large_values=True, merge="counter")
    assert "counts" not in place.site.namespaces()
    with pytest.raises(InvalidArgument, match="leave these out"):
        place.site.namespace(NAME, large_values=True, codec="json")  # type: ignore[call-overload]
    with pytest.raises(NamespaceNotFound):
        place.site.namespace("counts", large_values=True)
    place.site.create_namespace("plain").put(b"switch", b"up")
    with pytest.raises(WrongPolicy, match="holds other records"):
        place.site.namespace("plain", large_values=True)


def test_what_cannot_be_stored_is_refused(place: Place) -> None:
    values = LargeValues(place.site, NAME)
    refused: list[Any] = [None, "text", StringIO("text"), 5]
    for value in refused:
        with pytest.raises(InvalidValue, match="must be bytes or a blocking file"):
            values.put(b"switch", value)
    keys: list[Any] = [b"", "switch", b"x" * 4096]
    for key in keys:
        with pytest.raises(InvalidKey):
            values.put(key, b"")
    with pytest.raises(KeyNotFound, match="no key b'switch'"):
        values.open(b"switch")
    texts: list[Any] = ["switch", 5]
    for text in texts:
        with pytest.raises(InvalidArgument, match="bytes"):
            list(values.scan(text))
        with pytest.raises(InvalidArgument, match="timedelta"):
            values.sweep(older_than=text)
    values.put(b"switch", content(300))
    with values.open(b"switch") as stream, pytest.raises(InvalidArgument, match="begins at 0"):
        stream.seek(-1)
    assert rows(values)[-1] == b"rswitch"

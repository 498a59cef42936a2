"""Records as columns: what `scan` finds, with versions, as stored, and the dead on demand."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.site.support import START_MS, HookedEngine, node_of, open_memory

from floodmark.codec.columns import records_schema
from floodmark.codec.ordered import encode_key, encode_namespace
from floodmark.codec.records import split_values
from floodmark.codec.values import encode_value
from floodmark.engine.rocks import RocksEngine
from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption
from floodmark.model.limits import KEY_BYTES_MAX, MIB, PAGE_BYTES_MAX, VALUE_BYTES_MAX
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.record import Record
from floodmark.model.version import Version, compose, physical_ms
from floodmark.partition import FAMILIES, FILTERED_BYTES
from floodmark.partition.families import DATA
from floodmark.partition.read.records import RECORDS_PAGE_ROWS_MAX
from floodmark.site import Namespace, Site, open_engine
from floodmark.testing.clock import SimulatedTime

KEYS = [b"a", b"ab", b"abcd", b"abcde", b"abcdefgh", b"abcdefghijkl", b"b", b"\xff", b"k" * 100]
SECOND_MS = 1_000

# Which key, what happens to it, and how many milliseconds pass then.
STEPS = st.lists(
    st.tuples(
        st.integers(0, len(KEYS) - 1),
        st.sampled_from(["put", "delete", "expire", "apply"]),
        st.integers(0, 1_500),
    ),
    min_size=1,
    max_size=40,
)


class History:
    """A plain list of everything that was stored, newest last, and what a reader finds in it."""

    def __init__(self, site: Site, users: Namespace, time: SimulatedTime) -> None:
        self.facts: list[tuple[Version, bytes, Record]] = []
        self._site, self._users, self._time = site, users, time
        self._namespace = encode_namespace(users.id)

    def take_step(self, number: int, key: bytes, kind: str) -> None:
        router = self._site._host.router
        value = b"%d" % number
        expires_at: int | None = None
        origin: Stamp | None = None
        if kind == "expire":
            expires_at = self._time() // SECOND_MS + 2
        if kind == "apply":
            # Above what the key has, and not in the future: it wins.
            origin = Stamp(node_of(self._site).clock.now(), 9)
        record = Record(b"" if kind == "delete" else value, expires_at, kind == "delete", origin)
        stored = {self._namespace + key: encode(record)}
        write = router.apply if origin is not None else router.put
        self.facts.append((write(stored, durable=True), key, record))

    def newest(self, at: Version) -> dict[bytes, tuple[Version, Record]]:
        found = {key: (version, record) for version, key, record in self.facts if version <= at}
        return dict(sorted(found.items()))

    def live(self, at: Version) -> dict[bytes, tuple[Version, Record]]:
        newest = self.newest(at).items()
        return {key: fact for key, fact in newest if not fact[1].is_dead_at(physical_ms(at))}


def encode(record: Record) -> bytes:
    return encode_value(record.value, record.expires_at, record.deleted, origin=record.origin)


def whole(namespace: Namespace) -> KeyRange:
    start = encode_namespace(namespace.id)
    return KeyRange(start, prefix_end(start))


def read(site: Site, namespace: Namespace, at: Version | None = None, **options: Any) -> pyarrow.Table:
    """All records of a namespace in one table."""
    host = site._host
    version = host.versions.read_version() if at is None else at
    batches = list(host.router.scan_records(whole(namespace), version, **options))
    for batch in batches:
        batch.validate(full=True)
    schema = records_schema(options.get("content", Content.WHOLE))
    return pyarrow.Table.from_batches(batches, schema)


def found_in(table: pyarrow.Table) -> dict[bytes, tuple[Version, bytes]]:
    keys = table.column("key").to_pylist()
    assert keys == sorted(set(keys)), "keys stand in order, each once"
    versions, values = table.column("version").to_pylist(), table.column("value").to_pylist()
    return dict(zip(keys, zip(versions, values, strict=True), strict=True))


@pytest.fixture(params=["memory", "rocks"])
def any_site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    engine: Any = (
        HookedEngine()
        if request.param == "memory"
        else RocksEngine(tmp_path / "engine", FAMILIES, prefix_bytes=FILTERED_BYTES)
    )
    with open_engine(engine, site="oslo", site_id=7) as site:
        yield site


@given(STEPS, st.sampled_from([None, b"ab", b"abcdefgh"]))
def test_records_at_every_version_are_those_of_a_plain_list(
    steps: list[tuple[int, str, int]], border: bytes | None
) -> None:
    time = SimulatedTime(START_MS)
    with open_memory(HookedEngine(), time) as site:
        users = site.create_namespace("users")
        site.create_namespace("others").put(b"a", b"not of users")
        if border is not None:
            site.split("users", border)
        history = History(site, users, time)
        for number, (key, kind, pause_ms) in enumerate(steps):
            history.take_step(number, KEYS[key], kind)
            time.advance(pause_ms)
        for at in [version for version, _, _ in history.facts] + [compose(time(), 0)]:
            expected = {key: (version, encode(record)) for key, (version, record) in history.live(at).items()}
            assert found_in(read(site, users, at)) == expected
            everything = history.newest(at).items()
            expected = {key: (version, encode(record)) for key, (version, record) in everything}
            assert found_in(read(site, users, at, dead=True)) == expected
            assert split_values(
                read(site, users, at).column("value").combine_chunks()
            ).values.to_pylist() == [value for _, value in users.scan(at=at)]


def test_pages_end_between_keys_and_between_versions_of_one_key(any_site: Site) -> None:
    users = any_site.create_namespace("users")
    chance = Random(1)
    keys = [b"key-%05d" % number for number in range(RECORDS_PAGE_ROWS_MAX // 3)]
    moments: list[Version] = []
    for round_number in range(7):
        written = keys if round_number % 3 == 0 else chance.sample(keys, len(keys) // 2)
        moments.append(users.put_many(dict.fromkeys(written, b"%d" % round_number), durability="async"))
    for at in moments:
        table = read(any_site, users, at)
        rows = zip(table.column("key").to_pylist(), table.column("value").to_pylist(), strict=True)
        assert [(key, value[:-1]) for key, value in rows] == list(users.scan(at=at))


def test_key_with_more_versions_than_a_page_is_found_at_each_end(any_site: Site) -> None:
    users = any_site.create_namespace("users")
    first = users.put(b"busy", b"first")
    users.put(b"zoe", b"last")
    for number in range(2 * RECORDS_PAGE_ROWS_MAX + 3):
        users.put(b"busy", b"%d" % number, durability="async")
    assert found_in(read(any_site, users, first)) == {b"busy": (first, encode_value(b"first"))}
    newest = found_in(read(any_site, users))
    assert newest[b"busy"][1] == encode_value(b"%d" % number)
    assert list(newest) == [b"busy", b"zoe"]


@pytest.mark.slow
def test_largest_keys_and_values_come_in_batches_of_a_few_megabytes(any_site: Site) -> None:
    users = any_site.create_namespace("users")
    rows = {b"large-%02d" % number: bytes([number]) * VALUE_BYTES_MAX for number in range(40)}
    rows |= {b"long-%04d" % number + b"\xfe" * (KEY_BYTES_MAX - 9): b"x" for number in range(3_000)}
    rows |= {b"length" * (length // 6) + b"y" * (length % 6 + 1): b"z" for length in range(0, 4_000, 7)}
    for start in range(0, len(rows), 25):
        users.put_many(dict(list(rows.items())[start : start + 25]), durability="async")
    version = any_site._host.versions.read_version()
    found: dict[bytes, bytes] = {}
    for batch in any_site._host.router.scan_records(whole(users), version):
        assert batch.nbytes < PAGE_BYTES_MAX + 6 * MIB
        found |= dict(zip(batch.column(0).to_pylist(), batch.column(3).to_pylist(), strict=True))
    assert found == {key: encode_value(value) for key, value in rows.items()}


def test_partition_column_names_the_partition_of_each_key(any_site: Site) -> None:
    users = any_site.create_namespace("users")
    left, right = any_site.split("users", b"m")
    users.put_many({b"a": b"1", b"m": b"2", b"z": b"3"})
    assert read(any_site, users).column("partition").to_pylist() == [left, right, right]


def test_scan_goes_on_behind_the_last_key_when_its_partition_is_split(any_site: Site) -> None:
    users = any_site.create_namespace("users")
    count = 3 * RECORDS_PAGE_ROWS_MAX
    users.put_many({b"key-%06d" % number: b"x" for number in range(count)})
    version = any_site._host.versions.read_version()
    batches = any_site._host.router.scan_records(whole(users), version)
    found = next(batches).column(0).to_pylist()
    any_site.split("users", b"key-%06d" % (len(found) + 10))
    any_site.split("users", b"key-%06d" % (count - 5))
    for batch in batches:
        found += batch.column(0).to_pylist()
    assert found == [b"key-%06d" % number for number in range(count)]
    assert len({partition.id for partition in any_site.partitions()}) == 3


def test_digests_stand_for_values_and_leave_stamps_and_expiries(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    history = History(site, users, time)
    for number, kind in enumerate(["put", "delete", "expire", "apply"]):
        history.take_step(number, KEYS[number], kind)
    full = read(site, users, dead=True)
    brief = read(site, users, dead=True, content=Content.DIGESTS)
    shared = ["key", "version", "partition"]
    assert brief.select(shared).equals(full.select(shared))
    columns, bare = (split_values(table.column("value").combine_chunks()) for table in (full, brief))
    assert bare[1:] == columns[1:]
    assert set(bare.values.to_pylist()) == {b""}
    assert len(set(brief.column("digest").to_pylist())) == 4


@pytest.mark.parametrize(
    "options", [{}, {"dead": True}, {"content": Content.DIGESTS}, {"content": Content.THIN}]
)
def test_damaged_record_is_named(
    site: Site, engine: HookedEngine, users: Namespace, options: dict[str, Any]
) -> None:
    users.put(b"ada", b"sound")
    version = users.put(b"bob", b"sound")
    engine.write([(DATA, encode_key(users.id, b"bob", version), b"damaged\x08")])
    with pytest.raises(Corruption, match="key b'bob' of namespace") as caught:
        read(site, users, **options)
    assert caught.value.details["key"] == b"bob"

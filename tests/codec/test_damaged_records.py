"""Damaged bytes in the engine, seen from outside: the key is named, the rest lives, a write heals."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.clock.fakes import FakeTime

from floodmark import Namespace, Site
from floodmark.codec.ordered import encode_bytes, encode_key, encode_version
from floodmark.engine import Engine, MemoryEngine
from floodmark.engine.rocks import RocksEngine
from floodmark.model.errors import Corruption
from floodmark.model.version import Version
from floodmark.partition import FAMILIES
from floodmark.site import open_engine

DAMAGE = {
    "empty": b"",
    "unknown flags": b"value\x08",
    "another flag byte": b"value\x00\x80",
    "expiry without its bytes": b"short\x01",
    "origin without its bytes": b"short\x04",
    "stamps without their bytes": b"\x01\x00\x00\x00\x09\x20",
    "stamps of an unknown kind": b"\x09\x00\x00\x00\x01\x20",
}


class Store:
    """A site on an engine that the test can reach behind its back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.time = FakeTime()
        self.site: Site = open_engine(engine, site="oslo", time_source=self.time)
        self.users: Namespace = self.site.create_namespace("users", retention=timedelta(minutes=1))
        self.versions = {
            key: self.users.put(key, b"value of " + key) for key in (b"ada", b"bob", b"cem", b"dot")
        }

    def damage(self, key: bytes, stored: bytes, version: Version | None = None) -> None:
        (namespace,) = self.site.statistics().namespaces
        engine_key = encode_key(namespace.id, key, version or self.versions[key])
        self.engine.write([("data", engine_key, stored)])


@pytest.fixture(params=["memory", "rocks"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    engine: Engine = (
        MemoryEngine(FAMILIES) if request.param == "memory" else RocksEngine(tmp_path / "engine", FAMILIES)
    )
    made = Store(engine)
    yield made
    made.site.close()


READS: dict[str, Callable[[Namespace, Version | None], object]] = {
    "get": lambda users, at: users.get(b"bob", at=at),
    "get_many": lambda users, at: users.get_many([b"ada", b"bob"], at=at),
    "record": lambda users, at: users.record(b"bob", at=at),
    "scan": lambda users, at: list(users.scan(at=at)),
    "scan backwards": lambda users, at: list(users.scan(at=at, reverse=True)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_record_is_named_and_the_others_stay_readable(store: Store, damage: str) -> None:
    store.damage(b"bob", DAMAGE[damage])
    for read in READS.values():
        for at in (None, store.site.now()):
            with pytest.raises(Corruption, match=r"b'bob'.*overwrite") as refused:
                read(store.users, at)
            assert refused.value.details["key"] == b"bob"
            assert refused.value.details["version"] == store.versions[b"bob"]
    for key in (b"ada", b"cem", b"dot"):
        assert store.users.get(key) == b"value of " + key
    assert [key for key, _ in store.users.scan(end=b"bob")] == [b"ada"]
    assert [key for key, _ in store.users.scan(b"c", reverse=True)] == [b"dot", b"cem"]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("heal", ["put", "delete", "put_many"])
def test_overwriting_a_damaged_record_heals_it(store: Store, damage: str, heal: str) -> None:
    store.damage(b"bob", DAMAGE[damage])
    before = store.site.now()
    if heal == "put":
        store.users.put(b"bob", b"new")
    elif heal == "delete":
        store.users.delete(b"bob")
    else:
        store.users.put_many({b"bob": b"new"})
    healed = None if heal == "delete" else b"new"
    assert store.users.get(b"bob") == healed
    expected = {key: b"value of " + key for key in (b"ada", b"cem", b"dot")}
    if healed:
        expected[b"bob"] = healed
    assert dict(store.users.scan()) == dict(store.users.scan(reverse=True)) == expected
    with pytest.raises(Corruption, match="b'bob'"):
        store.users.get(b"bob", at=before)


def test_decisions_about_a_damaged_record_are_refused(store: Store) -> None:
    store.damage(b"bob", b"")
    for expected in (b"value of bob", None):
        with pytest.raises(Corruption, match="b'bob'"):
            store.users.compare_and_set(b"bob", expected, b"new")
    with pytest.raises(Corruption, match="b'bob'"):
        store.users.delete_range(b"b", b"c")
    assert store.users.put(b"ada", b"still writing") > 0
    assert len(list(store.site.changes("users"))) == 5


def test_old_damage_behind_a_good_version_disturbs_nobody(store: Store) -> None:
    store.users.put(b"bob", b"new")
    store.damage(b"bob", b"")
    assert store.users.get(b"bob") == b"new"
    assert len(list(store.users.scan())) == len(list(store.users.scan(reverse=True))) == 4
    store.time.ms += 120_000
    store.users.put(b"ada", b"later")
    assert store.site.collect_garbage().versions_removed > 0
    assert store.users.get(b"bob") == b"new"


def test_garbage_collection_names_a_damaged_record(store: Store) -> None:
    store.damage(b"bob", b"")
    store.time.ms += 120_000
    with pytest.raises(Corruption, match="b'bob'"):
        store.site.collect_garbage()
    store.users.put(b"bob", b"new")
    assert store.users.get(b"bob") == b"new"


def test_damage_of_a_value_that_the_change_log_refers_to_is_named(store: Store) -> None:
    version = store.users.put(b"eve", bytes(10_000))
    store.damage(b"eve", b"", version)
    with pytest.raises(Corruption, match="b'eve'"):
        list(store.site.changes("users"))


@pytest.mark.parametrize(
    "prefix",
    [
        encode_bytes(b"r\x00\x00\x01bob") + b"\x00",
        encode_bytes(b"r\x00\x00\x01bob")[:-2],
        encode_bytes(b"r\x00\x00\x01bob")[:-1] + b"\x00",
    ],
)
def test_scan_over_a_damaged_key_is_refused_as_corrupt(store: Store, prefix: bytes) -> None:
    store.engine.write([("data", prefix + encode_version(5), b"value\x00")])
    for reverse in (False, True):
        with pytest.raises(Corruption):
            list(store.users.scan(reverse=reverse))
    assert store.users.get(b"ada") == b"value of ada"


@pytest.mark.parametrize("dropped", [False, True], ids=["collected", "dropped"])
def test_large_value_that_another_namespace_has_collected_is_no_damage(store: Store, dropped: bool) -> None:
    """Logs are trimmed by the longest retention, so they name large values that are rightly gone."""
    orders = store.site.create_namespace("orders", retention=timedelta(hours=5))
    kept = [orders.put(b"1", b"book")]
    store.users.put(b"bob", bytes(10_000))
    store.time.ms += 1000
    store.users.put(b"bob", b"small")
    kept.append(orders.put(b"1", bytes(20_000)))
    if dropped:
        store.site.drop_namespace("users")
    store.time.ms += 120_000
    report = store.site.collect_garbage()
    assert report.versions_removed + report.namespaces_removed > 0
    assert [change.version for change in store.site.changes("orders", since=kept[0] - 1)] == kept

"""Atomic batches of one node: whole or not at all, whatever fails, and in one order in every reading."""

from dataclasses import replace
from itertools import groupby, pairwise
from random import Random

import numpy
import pytest
from tests.site.support import START_MS, host_of
from tests.sizes import only

from floodmark.codec.columns import StoredRows
from floodmark.codec.ordered import encode_namespace, encode_prefix, encode_version
from floodmark.codec.thin import digest_record, thin_record
from floodmark.codec.values import IN_BATCH, decode_value, encode_value, mark_batch, unmark_batch
from floodmark.merge.counter import add_to_counter
from floodmark.merge.states import stamp_state
from floodmark.model.change import Change, Stamp
from floodmark.model.errors import FloodmarkError, InvalidValue, LimitExceeded, OutcomeUnknown
from floodmark.model.partition import Content
from floodmark.model.version import Version
from floodmark.partition import FAMILIES
from floodmark.partition.commit.entering import WriteKind
from floodmark.partition.families import DATA
from floodmark.site import CounterNamespace, Namespace, Site, open_engine
from floodmark.testing.clock import SimulatedTime
from floodmark.testing.engine import Fault, FaultPlan, FaultyEngine, SimulatedCrash

KEYS = (b"a", b"h", b"q", b"z")


def open_site(engine: FaultyEngine) -> Site:
    return open_engine(engine, site="oslo", site_id=7, time_source=SimulatedTime(START_MS))


def make_site(engine: FaultyEngine) -> tuple[Site, Namespace, CounterNamespace]:
    """A site of four partitions, with a namespace of values and one of counters over all of them."""
    site = open_site(engine)
    users, unread = site.create_namespace("users"), site.create_namespace("unread", merge="counter")
    for name, key in (("users", b"m"), ("unread", b"d"), ("unread", b"p")):
        site.split(name, key)
    return site, users, unread


def write_batch(site: Site, users: Namespace, unread: CounterNamespace, value: bytes) -> Version:
    with site.atomic() as batch:
        for key in KEYS:
            batch.put(users, key, value)
            batch.add(unread, key, 1)
    return batch.version


def values_of(site: Site) -> set[tuple[bytes | None, int | None]]:
    """What the keys of all batches hold: one pair if no batch is there in part."""
    users, unread = site.namespace("users"), site.namespace("unread")
    return {(users.get(key), unread.get(key)) for key in KEYS}


def batches_of(site: Site) -> dict[Version, list[tuple[str, bytes]]]:
    """The changes of each batch, in the order of reading."""
    found = [change for change in site.changes() if change.batch is not None]
    assert all(change.batch == change.version for change in found)
    grouped = groupby(found, lambda change: change.version)
    return {version: [(change.namespace, change.key) for change in changes] for version, changes in grouped}


WHOLE = [(name, key) for name in ("users", "unread") for key in KEYS]


@pytest.mark.parametrize("kind", list(Fault))
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_batch_is_there_whole_or_not_at_all_whatever_fails(kind: Fault, at: int) -> None:
    engine = FaultyEngine(FAMILIES)
    site, users, unread = make_site(engine)
    write_batch(site, users, unread, b"first")
    engine.arm(FaultPlan(at=at, kind=kind))
    certain: bool | None = True
    try:
        write_batch(site, users, unread, b"second")
    except OutcomeUnknown:
        certain = None
    except FloodmarkError:
        certain = False
    except SimulatedCrash:
        certain = None
    expected = {(b"second", 2)} if certain else {(b"first", 1)}
    for keep in range(engine.unsynced + 1):
        with open_site(engine.crash(keep)) as survivor:
            found = values_of(survivor)
            assert len(found) == 1
            assert certain is None or found == expected
            assert list(batches_of(survivor).values()) == [WHOLE] * (2 if (b"second", 2) in found else 1)
    if kind is not Fault.CRASH:
        engine.heal()
        users.put(b"k", b"after")
        assert len(values_of(site)) == 1
        assert set(map(tuple, batches_of(site).values())) == {tuple(WHOLE)}
        site.heartbeat()


@pytest.mark.parametrize("seed", only(range(5), range(20)))
def test_batches_among_other_writes_are_whole_in_every_reading(seed: int) -> None:
    chance = Random(seed)
    engine = FaultyEngine(FAMILIES)
    site, users, unread = make_site(engine)
    counts = dict.fromkeys(KEYS, 0)
    held: dict[bytes, bytes] = {}
    written: dict[Version, set[tuple[str, bytes]]] = {}
    tail = site.changes(follow=True)
    for step in range(60):
        keys = chance.sample(KEYS, chance.randint(1, len(KEYS)))
        value = b"%d" % step
        match chance.choice(["batch", "batch", "put_many", "add", "delete", "split", "merge", "range"]):
            case "batch":
                added: list[tuple[str, bytes]] = []
                with site.atomic(durability=chance.choice(["fsync", "async"])) as batch:
                    for key in keys:
                        batch.put(users, key, value)
                        held[key] = value
                    for key in chance.sample(KEYS, 2):
                        batch.add(unread, key, step)
                        counts[key] += step
                        added.append(("unread", key))
                written[batch.version] = {*added, *(("users", key) for key in keys)}
            case "put_many":
                users.put_many(dict.fromkeys(keys, value))
                held |= dict.fromkeys(keys, value)
            case "add":
                unread.add(keys[0], 1)
                counts[keys[0]] += 1
            case "delete":
                users.delete(keys[0])
                held.pop(keys[0], None)
            case "range":
                gone = [key for key in held if key < b"i"]
                assert users.delete_range(end=b"i") == len([held.pop(key) for key in gone])
            case "split":
                try:
                    site.split(chance.choice(["users", "unread"]), bytes([chance.randrange(97, 123)]))
                except FloodmarkError:
                    continue
            case "merge":
                if neighbours := list(pairwise(site.partitions())):
                    left, right = chance.choice(neighbours)
                    site.merge(left.id, right.id)
    assert dict(users.scan()) == held
    assert {key: unread.get(key) or 0 for key in KEYS} == counts
    logged = list(site.changes())
    found: dict[Version, set[tuple[str, bytes]]] = {}
    for change in logged:
        if change.batch is not None:
            found.setdefault(change.version, set()).add((change.namespace, change.key))
    assert found == written
    ids = {"users": users.id, "unread": unread.id}
    places = [(change.version, ids[change.namespace], change.key) for change in logged]
    assert places == sorted(set(places))
    followed: list[Change] = []
    while len(followed) < len(logged):
        followed.append(next(tail))
    assert followed == logged
    node = host_of(site).node
    site.heartbeat()
    node.trim_logs(site.resolved_version())
    scanned = list(site.changes(since=node.born_version()))
    assert [(each.version, each.key, each.batch) for each in scanned] == [
        (each.version, each.key, each.batch) for each in logged
    ]


def test_a_batch_keeps_its_mark_when_a_prepared_write_commits_below_it() -> None:
    engine = FaultyEngine(FAMILIES)
    site, users, unread = make_site(engine)
    node = host_of(site).node
    qualified = encode_namespace(unread.id) + b"a"
    partition = node.map.route(qualified)
    prepared = partition.prepare("0-1", [qualified], [add_to_counter(5)])
    version = write_batch(site, users, unread, b"1")
    assert version > prepared
    partition.commit_prepared("0-1", prepared)
    assert unread.get(b"a") == 6
    stored = engine.get(DATA, encode_prefix(qualified) + encode_version(version))
    assert stored is not None
    assert decode_value(stored).batched
    changes = {(change.version, change.batch) for change in site.changes("unread") if change.key == b"a"}
    assert changes == {(prepared, None), (version, version)}
    assert batches_of(site) == {version: WHOLE}


def test_a_batch_that_the_engine_does_not_take_in_one_write_is_refused() -> None:
    engine = FaultyEngine(FAMILIES)
    site, users, unread = make_site(engine)
    # Below what the values alone take: they pass the limit of a commit, and their rows do not fit.
    engine.limits = replace(engine.limits, batch_rows_max=len(WHOLE))
    with pytest.raises(LimitExceeded, match="Nothing was written"):
        write_batch(site, users, unread, b"1")
    assert list(site.changes()) == []
    engine.limits = FaultyEngine.limits
    write_batch(site, users, unread, b"1")
    assert values_of(site) == {(b"1", 1)}


RECORDS = [
    encode_value(b"plain"),
    encode_value(b"", deleted=True),
    encode_value(b"expiring", 4),
    encode_value(b"copy", origin=Stamp(7, 2)),
    encode_value(b"both", 4, origin=Stamp(7, 2)),
    stamp_state(add_to_counter(3), None, 9, 1),
]


@pytest.mark.parametrize("stored", RECORDS)
def test_the_mark_changes_nothing_that_sites_compare(stored: bytes) -> None:
    marked = mark_batch(stored)
    assert marked[-1] & IN_BATCH
    assert unmark_batch(marked) == stored
    assert digest_record(marked) == digest_record(stored)
    assert thin_record(marked) == thin_record(stored)
    rows = [(encode_prefix(b"\0\0\1key") + encode_version(9), record) for record in (stored, marked)]
    for content in (Content.THIN, Content.DIGESTS):
        bare, compared = (StoredRows([row]).take(numpy.arange(1), 1, content) for row in rows)
        assert bare == compared


def test_only_a_batch_marks_a_record() -> None:
    site, users, _ = make_site(FaultyEngine(FAMILIES))
    entrance = host_of(site).node.storage.entrance
    key, marked = encode_namespace(users.id) + b"a", mark_batch(encode_value(b"1"))
    for kind in (WriteKind.PUT, WriteKind.WRITE):
        with pytest.raises(InvalidValue, match="the mark of an atomic batch"):
            entrance.check([key], [marked], kind)
    entrance.check([key], [mark_batch(encode_value(b"1", origin=Stamp(7, 2)))], WriteKind.COPY)

"""Heartbeats: what a node vouches for is what its change logs hold, to the last byte.

The checker reads the logs as a stage of a feed would: it recomputes each account that claims to have
seen its whole interval.  A log that was sealed in an interval has an account of its own.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from typing import NamedTuple

import pytest
from tests.site.support import HookedEngine, node_of, nothing, open_memory, rows_of
from tests.sizes import only

from floodmark.codec.changelog import CommitRow, decode_row, encode_log_key
from floodmark.codec.digest import digest_change
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.stamps import digest_copies
from floodmark.codec.values import HAS_ORIGIN, encode_value
from floodmark.model.change import Heartbeat, Stamp, Sums, Tally
from floodmark.model.errors import FloodmarkError, OutcomeUnknown, StorageFailed
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.partition import counting, recounting, version_of
from floodmark.site import Namespace, Site
from floodmark.testing.clock import SimulatedTime

LARGE = b"large" * 2000


@pytest.fixture(autouse=True)
def unhook(engine: HookedEngine) -> Iterator[None]:
    """Take the hooks away before the site is closed."""
    yield
    engine.before = engine.after = nothing


class LogEntry(NamedTuple):
    version: Version
    log: int
    row: CommitRow | Heartbeat


def entries(site: Site) -> list[LogEntry]:
    site.sync()
    pages = node_of(site).read_log(0, site.resolved_version(), KeyRange(), heartbeats=True)
    return [
        LogEntry(version_of(line), line[2].id, decode_row(version_of(line), line[1]))
        for page in pages
        for line in page
    ]


def accounts(site: Site) -> list[Heartbeat]:
    return [entry.row for entry in entries(site) if isinstance(entry.row, Heartbeat)]


def recompute(site: Site, beat: Heartbeat, logs: list[LogEntry]) -> dict[int, Sums]:
    """The sums that an account should hold."""
    sealed = {
        entry.log
        for entry in logs
        if isinstance(entry.row, Heartbeat) and entry.row.log is not None and entry.version <= beat.through
    }
    sums: dict[int, Sums] = {}
    for entry in logs:
        covered = entry.log == beat.log if beat.log is not None else entry.log not in sealed
        if isinstance(entry.row, CommitRow) and covered and beat.since < entry.version <= beat.through:
            for key, value in zip(entry.row.keys, entry.row.values, strict=True):
                stored = value or node_of(site).look_up_value(key, entry.version)
                own, digest = True, digest_change(entry.version, site.id, key[3:], stored)
                if stored[-1] & HAS_ORIGIN:
                    ((_, _, digest, own),) = digest_copies([key], [stored], site.id)
                tally, namespace = Tally(1, digest), int.from_bytes(key[:3], "big")
                added = Sums(tally if own else Tally(), tally)
                sums[namespace] = sums.get(namespace, Sums()).plus(added)
    return sums


def wrong_accounts(site: Site) -> list[Heartbeat]:
    """The accounts that claim to be complete and are not right."""
    logs = entries(site)
    beats = [entry.row for entry in logs if isinstance(entry.row, Heartbeat)]
    return [beat for beat in beats if beat.since and beat.sums != recompute(site, beat, logs)]


def test_first_account_is_unobserved_and_the_next_begins_where_it_ended(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    users.put(b"key", b"1")
    first = site.heartbeat()
    time.advance(1000)
    second, third = site.heartbeat(), site.heartbeat()
    assert first.since == 0
    assert (second.since, third.since) == (first.through, second.through)
    assert accounts(site) == [first, second, third]
    assert (second.node, second.log, second.wall_ms, second.watermark) == (0, None, time(), {})
    assert first.through < first.version < second.through < second.version


@pytest.mark.parametrize("crashed", [False, True])
def test_reopened_site_goes_on_where_the_last_account_ended(
    engine: HookedEngine, time: SimulatedTime, crashed: bool
) -> None:
    """Own changes, copies, large values, partitions that were split since: all of it is counted again."""
    with open_memory(engine, time) as site:
        users = site.create_namespace("users")
        users.put(b"ada", b"1")
        first = site.heartbeat()
        before = site.now()
        users.put_many({b"ada": LARGE, b"bob": b"2", b"zoe": b"3"})
        key = encode_namespace(users.id) + b"eve"
        copy = encode_value(b"4", origin=Stamp(before, 3))
        site.host.router.apply({key: copy}, durable=True)
        site.split("users", b"m")
        users.put(b"zoe", b"5")
        users.delete(b"ada")
    with open_memory(engine.crashed() if crashed else engine, time) as site:
        site.namespace("users").put(b"later", b"6")
        second = site.heartbeat()
        assert (second.since, second.sums[users.id].own.changes) == (first.through, 3)
        told = [beat for beat in accounts(site) if beat.log is not None]
        assert [(beat.since, beat.sums[users.id].all.changes) for beat in told] == [(first.through, 4)]
        assert wrong_accounts(site) == []


def test_reopened_site_vouches_for_nothing_where_the_log_does_not_tell(
    engine: HookedEngine, time: SimulatedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recounting, "CHANGES_MAX", 2)
    with open_memory(engine, time) as site:
        users = site.create_namespace("users")
        site.heartbeat()
        users.put_many({b"ada": b"1", b"bob": b"2", b"eve": b"3"})
    with open_memory(engine, time) as site:
        assert site.heartbeat().since == 0
        assert site.heartbeat().since != 0


@pytest.fixture
def few_tallies(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many tallies a partition may keep, in a site that is opened after this."""
    number = 100
    monkeypatch.setattr(counting, "TALLIES_MAX", number)
    return number


def test_tallies_of_a_site_without_heartbeats_do_not_pile_up(
    few_tallies: int, site: Site, users: Namespace
) -> None:
    site.heartbeat()
    (partition,) = node_of(site).map.partitions
    for number in range(few_tallies + 100):
        users.put(b"%d" % (number % 7), b"%d" % number, durability="async")
    assert len(partition.tallies) <= few_tallies
    for number in range(few_tallies + 100):
        users.put_many({b"a": b"%d" % number, b"b": b"2"}, durability="async")
    assert len(partition.tallies) <= few_tallies
    site.split("users", b"b")
    for number in range(few_tallies + 100):
        users.put_many({b"a": b"%d" % number, b"b": b"2"}, durability="async")
    assert all(len(each.tallies) <= few_tallies for each in node_of(site).map.partitions)
    assert site.heartbeat().since
    assert wrong_accounts(site) == []


def test_account_names_the_digest_of_each_change(site: Site, users: Namespace) -> None:
    orders = site.create_namespace("orders")
    site.heartbeat()
    put = users.put(b"key", b"value")
    delete = users.delete(b"key")
    expiring = orders.put(b"other", b"1", ttl=10)
    expires_at = next(site.changes("orders")).expires_at or 0
    users_digest = digest_change(put, site.id, b"key", b"value\x00") ^ digest_change(
        delete, site.id, b"key", b"\x02"
    )
    content = b"1" + expires_at.to_bytes(8, "big") + b"\x01"
    orders_digest = digest_change(expiring, site.id, b"other", content)
    assert site.heartbeat().sums == {
        1: Sums(Tally(2, users_digest), Tally(2, users_digest)),
        2: Sums(Tally(1, orders_digest), Tally(1, orders_digest)),
    }
    assert site.heartbeat().sums == {}


@pytest.mark.parametrize("seed", only(range(5), range(15)))
def test_accounts_are_right_through_splits_merges_and_asynchronous_writes(
    site: Site, users: Namespace, seed: int
) -> None:
    orders = site.create_namespace("orders")
    chance = Random(seed)
    for step in range(120):
        key = b"key-%02d" % chance.randrange(30)
        space = chance.choice([users, orders])
        kind = chance.choice(["put", "async", "many", "delete", "range", "split", "merge", "beat", "beat"])
        partitions = site.partitions()
        if kind == "put":
            space.put(key, chance.choice([b"%d" % step, LARGE]), ttl=chance.choice([None, 100]))
        elif kind == "async":
            space.put(key, b"%d" % step, durability="async")
        elif kind == "many":
            space.put_many({b"key-%02d" % index: b"%d" % step for index in range(0, 30, 4)})
        elif kind == "delete":
            space.delete(key)
        elif kind == "range":
            space.delete_range(key, limit_of(key))
        elif kind == "split" and b"\0\0\1" + key not in [part.range.start for part in partitions]:
            site.split("users", key)
        elif kind == "merge" and len(partitions) > 1:
            site.merge(partitions[0].id, partitions[1].id)
        elif kind == "beat":
            site.heartbeat()
    site.heartbeat()
    assert wrong_accounts(site) == []
    node_beats = [beat for beat in accounts(site) if beat.log is None]
    assert all(later.since == earlier.through for earlier, later in pairwise(node_beats))
    assert sum(1 for beat in accounts(site) if beat.since) > 10


def limit_of(key: bytes) -> bytes:
    return key[:-1] + b"\xff"


def test_every_change_is_in_exactly_one_account(site: Site, users: Namespace) -> None:
    site.heartbeat()
    begin = site.now()
    for step in range(40):
        users.put(b"key-%02d" % step, b"1")
        if step % 7 == 3:
            site.split("users", b"key-%02d" % step)
        if step % 5 == 4:
            site.heartbeat()
    site.heartbeat()
    counted = [sums.all.changes for beat in accounts(site) for sums in beat.sums.values()]
    assert sum(counted) == len(list(site.changes("users", since=begin))) == 40


@pytest.mark.parametrize("lost", ["log row", "value"])
def test_checker_finds_a_lost_change(site: Site, users: Namespace, engine: HookedEngine, lost: str) -> None:
    """The canary."""
    site.heartbeat()
    log_id = node_of(site).map.partitions[0].log_id
    versions = [users.put(b"key-%d" % index, LARGE if lost == "value" else b"1") for index in range(3)]
    beat = site.heartbeat()
    assert wrong_accounts(site) == []
    if lost == "log row":
        engine.write([("log", encode_log_key(log_id, versions[2]), None)])
    else:
        data = rows_of(engine)["data"]
        engine.write([("data", data[0][0], b"another\x00")])
    assert wrong_accounts(site) == [beat]


def test_idle_heartbeats_move_the_resolved_version_and_cost_little(
    site: Site, users: Namespace, engine: HookedEngine, time: SimulatedTime
) -> None:
    users.put(b"key", b"1")
    site.heartbeat()

    def size() -> int:
        return sum(len(key) + len(value) for rows in rows_of(engine).values() for key, value in rows)

    for _ in range(10):
        before = site.heartbeat()
        bytes_before = size()
        time.advance(1000)
        after = site.heartbeat()
        assert after.through >> 18 == time()
        assert after.through > before.through
        assert size() - bytes_before < 100


def test_heartbeat_makes_asynchronous_writes_durable(
    site: Site, users: Namespace, engine: HookedEngine
) -> None:
    version = users.put(b"key", b"1", durability="async")
    beat = site.heartbeat()
    assert beat.through > version
    with open_memory(engine.crashed(), SimulatedTime()) as after_power_cut:
        assert [change.version for change in after_power_cut.changes("users")] == [version]


# Failures


def fail_once(engine: HookedEngine, *failing: str, error: BaseException) -> None:
    """Let each of these operations fail once."""
    left = list(failing)

    def before(operation: str) -> None:
        if operation in left:
            left.remove(operation)
            raise error

    engine.before = before


UNKNOWN = OutcomeUnknown("no answer")


@pytest.mark.parametrize("operation", ["write", "sync"])
@pytest.mark.parametrize("error", [StorageFailed("no"), UNKNOWN], ids=["no", "unknown"])
def test_account_after_a_failure_that_was_settled_is_exact(
    site: Site, users: Namespace, engine: HookedEngine, operation: str, error: FloodmarkError
) -> None:
    """If the engine had to recover, the account may also be given up: others may have lost a write."""
    users.put(b"key", b"0")
    first = site.heartbeat()
    users.put(b"key", b"1")
    fail_once(engine, operation, error=error)
    happened = operation == "sync"
    if happened:
        users.put(b"key", b"2")
    else:
        with pytest.raises(FloodmarkError):
            users.put(b"key", b"2")
    users.put(b"key", b"3")
    beat = site.heartbeat()
    assert beat.since in ({first.through} if isinstance(error, StorageFailed) else {first.through, 0})
    if beat.since:
        assert beat.sums[1].all.changes == 2 + happened
    assert wrong_accounts(site) == []


Act = Callable[[Site, Namespace], object]
ACTS: dict[str, Act] = {
    "put": lambda _, users: users.put(b"key", b"2"),
    "put_many": lambda _, users: users.put_many({b"key": b"2", b"other": b"2"}),
    "compare_and_set": lambda _, users: users.compare_and_set(b"key", b"1", b"2"),
    "split": lambda site, _: site.split("users", b"m"),
    "heartbeat": lambda site, _: site.heartbeat(),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("error", [UNKNOWN, KeyboardInterrupt()], ids=["unknown", "interrupt"])
@pytest.mark.parametrize("operation", ["write", "sync"])
@pytest.mark.parametrize("lost", [False, True], ids=["kept", "lost"])
def test_account_after_an_open_failure_is_unobserved(
    site: Site,
    users: Namespace,
    engine: HookedEngine,
    act: str,
    error: BaseException,
    operation: str,
    lost: bool,
) -> None:
    """Whatever the recovery finds, no account may claim to know what it does not."""
    users.put(b"key", b"0")
    site.heartbeat()
    users.put(b"key", b"1")
    fail_once(engine, operation, "recover", error=error)
    with pytest.raises((FloodmarkError, KeyboardInterrupt)):
        ACTS[act](site, users)
    engine.before = lambda begun: engine.lose_unsynced() if lost and begun == "recover" else None
    users.put(b"key", b"3")
    beat = site.heartbeat()
    assert beat.since == 0
    users.put(b"key", b"4")
    assert site.heartbeat().since == beat.through
    assert wrong_accounts(site) == []


def test_account_of_asynchronous_writes_that_a_recovery_lost_is_unobserved(
    site: Site, users: Namespace, engine: HookedEngine
) -> None:
    """They were counted when they were written; then they were never published."""
    site.heartbeat()
    users.put(b"lost", b"1", durability="async")
    fail_once(engine, "write", error=UNKNOWN)
    lose = engine.before

    def lose_others(operation: str) -> None:
        if operation == "recover":
            engine.lose_unsynced()
        lose(operation)

    engine.before = lose_others
    with pytest.raises(FloodmarkError):
        users.put(b"key", b"1")
    assert users.get(b"lost") is None
    site.heartbeat()
    assert wrong_accounts(site) == []

"""A whole site against a plain list of changes, through every operation, in every order.

The machine remembers each change with the version that the site gave it.  Whatever is asked of the site
later, now or as of any earlier moment, must follow from that list.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.site.support import START_MS, HookedEngine, open_memory
from tests.site.support_model import ModelNamespace, Written, written
from tests.sizes import SEARCH, scaled

import floodmark
from floodmark.codec.values import TOMBSTONE
from floodmark.engine import Guard, WriteRow
from floodmark.model.change import Stamp
from floodmark.model.errors import Closed, NamespaceNotFound, PartitionNotFound, VersionCollected
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.version import Version, moment_of, version_at
from floodmark.site import Namespace, Site
from floodmark.testing.clock import SimulatedTime

RETENTION = {"short": timedelta(seconds=5), "long": timedelta(seconds=60)}

Result = TypeVar("Result")
Durability = Literal["fsync", "async"]

# Few keys, so that they meet again; some are prefixes of others, some fill groups of eight bytes.
KEYS = [b"a", b"a\x00", b"ab", b"abcdefgh", b"abcdefghi", b"b", b"c" * 17, b"\xfe", b"\xff", b"\xff\xff"]
keys = st.sampled_from(KEYS)
names = st.sampled_from(sorted(RETENTION))
# The last is too large for the change log, which names it instead.
values = st.sampled_from([b"", b"1", b"22", b"\x00" * 9, b"large" * 1000])
ttls = st.sampled_from([None, None, None, timedelta(seconds=1), timedelta(seconds=7)])
durabilities: st.SearchStrategy[Durability] = st.sampled_from(["fsync", "async"])
bounds = st.one_of(st.just(b""), keys)
ranges = st.tuples(bounds, st.one_of(st.none(), bounds)).map(
    lambda pair: KeyRange(*pair) if pair[1] is None or pair[0] <= pair[1] else KeyRange(pair[1], pair[0])
)
# A moment is chosen among those that the machine remembers, and may be named by its wall-clock time.
moments = st.tuples(st.integers(0, 10**6), st.booleans())
Moment = tuple[int, bool]


class SiteMachine(RuleBasedStateMachine):
    """Does to a site and to the model the same."""

    site: Site

    def __init__(self) -> None:
        super().__init__()
        self.time = SimulatedTime(START_MS)
        self.trimmed: Version = 0
        self.models: dict[str, ModelNamespace] = {}
        self.moments: list[Version] = []

    def open_site(self) -> Site:
        raise NotImplementedError

    @initialize()
    def start(self) -> None:
        self.site = self.open_site()
        for name in RETENTION:
            self.create(name)

    def create(self, name: str) -> None:
        namespace = self.site.create_namespace(name, retention=RETENTION[name])
        self.models[name] = ModelNamespace(namespace, created=self.site.now())

    def teardown(self) -> None:
        if hasattr(self, "site"):
            self.site.close()

    # Writes

    def commit(self, name: str, *changes: Written) -> None:
        self.models[name].write(*changes)
        self.moments += [change.version for change in changes]

    def expiry(self, ttl: timedelta | None) -> int | None:
        return None if ttl is None else -(-(self.time() + ttl.seconds * 1000) // 1000)

    @rule(name=names, key=keys, value=values, ttl=ttls, durability=durabilities)
    def put(self, name: str, key: bytes, value: bytes, ttl: timedelta | None, durability: Durability) -> None:
        version = self.models[name].namespace.put(key, value, ttl=ttl, durability=durability)
        self.commit(name, Written(version, key, value, self.expiry(ttl)))

    @rule(name=names, key=keys, durability=durabilities)
    def delete(self, name: str, key: bytes, durability: Durability) -> None:
        version = self.models[name].namespace.delete(key, durability=durability)
        self.commit(name, Written(version, key, None))

    @rule(name=names, pairs=st.dictionaries(keys, values), ttl=ttls, durability=durabilities)
    def put_many(
        self, name: str, pairs: dict[bytes, bytes], ttl: timedelta | None, durability: Durability
    ) -> None:
        namespace = self.models[name].namespace
        highest = namespace.put_many(pairs, ttl=ttl, durability=durability)
        records = [record for key in pairs if (record := namespace.record(key))]
        assert max((record.version for record in records), default=0) == highest
        changes = [
            Written(record.version, record.key, pairs[record.key], self.expiry(ttl)) for record in records
        ]
        self.commit(name, *changes)

    @rule(name=names, key=keys, right=st.booleans(), value=st.one_of(st.none(), values), ttl=ttls)
    def compare_and_set(
        self, name: str, key: bytes, right: bool, value: bytes | None, ttl: timedelta | None
    ) -> None:
        model = self.models[name]
        before = self.site.now()
        present = model.find(key, before, self.time())
        expected = present.value if present else None
        if not right:
            expected = b"something else"
        assert model.namespace.compare_and_set(key, expected, value, ttl=ttl) is right
        if right:
            expires_at = None if value is None else self.expiry(ttl)
            self.commit_unseen(name, before, {key: (value, expires_at)})

    @rule(name=names, within=ranges, durability=durabilities)
    def delete_range(self, name: str, within: KeyRange, durability: Durability) -> None:
        model = self.models[name]
        before = self.site.now()
        doomed = model.rows(within, before)
        assert model.namespace.delete_range(*within, durability=durability) == len(doomed)
        self.commit_unseen(name, before, {key: (None, None) for key, _ in doomed})

    def commit_unseen(
        self, name: str, before: Version, expected: dict[bytes, tuple[bytes | None, int | None]]
    ) -> None:
        """Enter changes whose versions the call did not tell: the change log must hold just these."""
        changes = [written(change) for change in self.site.changes(name, since=before)]
        assert {change.key: (change.value, change.expires_at) for change in changes} == expected
        assert len(changes) == len(expected)
        self.commit(name, *changes)

    # Reads

    def resolve(self, moment: Moment) -> tuple[Version | datetime, Version]:
        """A moment as a user names it, and as a version."""
        index, by_time = moment
        version = self.moments[index % len(self.moments)] if self.moments else self.site.now()
        return (moment_of(version), version_at(moment_of(version))) if by_time else (version, version)

    def expect(self, name: str, at: Version, read: Callable[[Namespace], Result], expected: Result) -> None:
        """A read gives what the model has, or is refused if garbage collection has passed it."""
        model = self.models[name]
        if at < model.collected:
            with pytest.raises(VersionCollected):
                read(model.namespace)
        else:
            assert read(model.namespace) == expected

    @rule(name=names, key=keys)
    def get(self, name: str, key: bytes) -> None:
        model = self.models[name]
        found = model.find(key, self.site.now(), self.time())
        record = model.namespace.record(key)
        assert model.namespace.get(key) == (found.value if found else None)
        assert (record and Written(record.version, key, record.value, record.expires_at)) == found
        assert record is None or record.stamp == Stamp(record.version, self.site.id)

    @rule(name=names, key=keys, moment=moments)
    def get_at(self, name: str, key: bytes, moment: Moment) -> None:
        at, version = self.resolve(moment)
        found = self.models[name].find(key, version)
        self.expect(name, version, lambda users: users.get(key, at=at), found.value if found else None)

    @rule(name=names, some=st.lists(keys), moment=moments)
    def get_many_at(self, name: str, some: list[bytes], moment: Moment) -> None:
        at, version = self.resolve(moment)
        if some:
            found = [self.models[name].find(key, version) for key in some]
            expected = [change.value if change else None for change in found]
            self.expect(name, version, lambda users: users.get_many(some, at=at), expected)
            self.expect(name, version, lambda users: users.as_of(at).get_many(some), expected)

    @rule(
        name=names,
        within=ranges,
        prefix=st.one_of(st.none(), bounds),
        limit=st.one_of(st.none(), st.integers(0, 5)),
        reverse=st.booleans(),
    )
    def scan(
        self, name: str, within: KeyRange, prefix: bytes | None, limit: int | None, reverse: bool
    ) -> None:
        model = self.models[name]
        expected = self.rows(name, within, prefix, limit, reverse, self.site.now())
        found = model.namespace.scan(*within, prefix=prefix, limit=limit, reverse=reverse)
        assert list(found) == expected

    @rule(
        name=names,
        within=ranges,
        limit=st.one_of(st.none(), st.integers(0, 5)),
        reverse=st.booleans(),
        moment=moments,
    )
    def scan_at(self, name: str, within: KeyRange, limit: int | None, reverse: bool, moment: Moment) -> None:
        at, version = self.resolve(moment)
        expected = self.rows(name, within, None, limit, reverse, version)
        start, end = within

        def scan(users: Namespace) -> list[tuple[bytes, bytes]]:
            return list(users.as_of(at).scan(start, end, limit=limit, reverse=reverse))

        self.expect(name, version, scan, expected)

    def rows(
        self,
        name: str,
        within: KeyRange,
        prefix: bytes | None,
        limit: int | None,
        reverse: bool,
        at: Version,
    ) -> list[tuple[bytes, bytes]]:
        rows = self.models[name].rows(within, at)
        if prefix is not None:
            rows = [row for row in rows if KeyRange(prefix, prefix_end(prefix)).contains(row[0])]
        return (rows[::-1] if reverse else rows)[:limit]

    @rule(name=names, moment=moments, from_start=st.booleans())
    def changes(self, name: str, moment: Moment, from_start: bool) -> None:
        """All changes since a version, in commit order; never silently fewer."""
        model = self.models[name]
        since = 0 if from_start else self.resolve(moment)[1]
        until = self.site.now()
        try:
            found = [written(change) for change in self.site.changes(name, since=since)]
        except VersionCollected:
            assert since < max(model.collected, self.trimmed)
            return
        assert found == model.since(since, until, self.site.host.physical_ms())

    # What the site does with itself

    @rule(name=names, key=keys)
    def split(self, name: str, key: bytes) -> None:
        try:
            left, right = self.site.split(name, key)
        except PartitionNotFound:
            return
        ids = [partition.id for partition in self.site.partitions()]
        assert ids[ids.index(left) + 1] == right

    @precondition(lambda self: len(self.site.partitions()) > 1)
    @rule(index=st.integers(0, 100))
    def merge(self, index: int) -> None:
        ids = [partition.id for partition in self.site.partitions()]
        index %= len(ids) - 1
        joined = self.site.merge(ids[index], ids[index + 1])
        assert [partition.id for partition in self.site.partitions()][index] == joined

    @rule()
    def heartbeat(self) -> None:
        through = self.site.heartbeat().through
        assert all(through >= model.changes[-1].version for model in self.models.values() if model.changes)

    @rule(seconds=st.sampled_from([1, 2, 4, 20]))
    def advance(self, seconds: int) -> None:
        self.time.advance(seconds * 1000)
        self.moments.append(self.site.now())

    @rule()
    def reopen(self) -> None:
        self.site.close()
        for model in self.models.values():
            with pytest.raises(Closed):
                model.namespace.get(b"a")
        self.site = self.open_site()
        for name, model in self.models.items():
            model.namespace = self.site.namespace(name)

    @rule(name=names)
    def drop_and_create_again(self, name: str) -> None:
        dropped = self.models[name].namespace
        self.site.drop_namespace(name)
        self.create(name)
        with pytest.raises(NamespaceNotFound):
            dropped.get(b"a")

    @rule()
    def collect(self) -> None:
        resolved = self.site.resolved_version()
        before = self.site.now()
        self.trimmed = self.site.collect_garbage().log_trimmed_version
        for name, model in self.models.items():
            newest = model.newest(before).values()
            expired = [each for each in newest if each.value is not None and not each.is_live(self.time())]
            self.commit_unseen(name, before, {each.key: (None, each.expires_at) for each in expired})
        oldest = {space.name: space.oldest_version for space in self.site.statistics().namespaces}
        for name, model in self.models.items():
            model.collect(oldest[name], self.time(), (resolved, self.site.resolved_version()))

    @invariant()
    def resolved_covers_what_is_durable(self) -> None:
        if self.models:
            assert self.site.resolved_version() <= self.site.now()


class MemoryMachine(SiteMachine):
    """A site over an engine in memory that outlives its closing."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = HookedEngine()

    def open_site(self) -> Site:
        return open_memory(self.engine, self.time)


class RocksMachine(SiteMachine):
    """A site over RocksDB."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = TemporaryDirectory(prefix="floodmark-")

    def open_site(self) -> Site:
        path = Path(self.directory.name) / "oslo"
        return floodmark.open(path, site="oslo", site_id=7, background=False, time_source=self.time)

    def teardown(self) -> None:
        super().teardown()
        self.directory.cleanup()


def test_reads_agree_on_expiry_after_time_has_jumped_back(
    site: Site, users: Namespace, time: SimulatedTime
) -> None:
    """Versions go on from where they were, an hour ahead.  What was just written must still be seen."""
    users.put(b"early", b"1")
    time.advance(-3_600_000)
    users.put(b"key", b"1", ttl=timedelta(minutes=1))
    assert users.get(b"key") == b"1"
    assert users.get(b"key", at=site.now()) == b"1"
    assert dict(users.scan()) == {b"early": b"1", b"key": b"1"}
    assert not users.compare_and_set(b"key", None, b"2")
    for _ in range(3):
        time.advance(1_800_000)
        value = users.get(b"key")
        assert value == users.get(b"key", at=site.now()) == dict(users.scan()).get(b"key")
    assert value is None


class LossyEngine(HookedEngine):
    """The canary: it forgets the change log of every deletion."""

    def write(self, rows: Iterable[WriteRow], guards: Sequence[Guard] = ()) -> bool:
        kept = [row for row in rows if not (row[0] == "log" and row[2] and row[2].endswith(TOMBSTONE))]
        return super().write(kept, guards)


class LossyMachine(MemoryMachine):
    """A site over an engine that loses changes."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = LossyEngine()


def test_machine_finds_a_lost_change() -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(LossyMachine, settings=SEARCH)


TestMemory = MemoryMachine.TestCase
TestMemory.settings = scaled(2)

TestRocks = RocksMachine.TestCase
TestRocks.settings = scaled(0.3, stateful_step_count=40)

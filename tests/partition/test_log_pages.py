"""Reading many change logs as one: exactly in order of versions, page by page, in bounded memory."""

from collections.abc import Iterator, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.site.support import START_MS, HookedEngine, node_of, open_memory

from floodmark.codec.changelog import CommitRow, decode_row, encode_log_key
from floodmark.engine import MemoryEngine, Row
from floodmark.model.errors import VersionCollected
from floodmark.model.limits import MIB, PAGE_BYTES_MAX, PAGE_ROWS_MAX
from floodmark.model.ranges import KeyRange
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition import FAMILIES, LogLine, version_of
from floodmark.partition.layout import LogRow
from floodmark.partition.read.changelog import read_logs
from floodmark.site import Namespace, Site, open_engine
from floodmark.testing.clock import SimulatedTime

LOG_KEY_BYTES = len(encode_log_key(0, 0))


class CountingEngine(MemoryEngine):
    """Knows how many bytes of change log it has handed out."""

    def __init__(self) -> None:
        super().__init__(FAMILIES)
        self.log_bytes_read = 0

    def scan(
        self,
        family: str,
        start: bytes,
        end: bytes | None,
        *,
        rows_max: int,
        bytes_max: int,
        reverse: bool = False,
    ) -> list[Row]:
        rows = super().scan(family, start, end, rows_max=rows_max, bytes_max=bytes_max, reverse=reverse)
        if family == "log":
            self.log_bytes_read += sum(len(key) + len(row) for key, row in rows)
        return rows


def log(identity: int, opened_at: Version = 0, sealed_at: Version | None = None) -> LogRow:
    return LogRow(identity, identity, b"", None, [], opened_at, sealed_at)


def write_lines(engine: MemoryEngine, lines: Sequence[tuple[int, Version, int]], size: int = 10) -> None:
    engine.write([("log", encode_log_key(*line), b"\x01" * size) for line in lines])


def orders(pages: Iterator[list[LogLine]]) -> list[tuple[Version, int, int]]:
    """Version, chunk and log of each line."""
    return [
        (version_of(line), int.from_bytes(line[0][-2:], "big"), line[2].id) for page in pages for line in page
    ]


def untrimmed() -> Version:
    return 0


@given(
    owners=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), max_size=60),
    size=st.sampled_from([10, 300_000]),
    since=st.integers(0, 70),
    until=st.integers(0, 70),
)
def test_lines_of_all_logs_come_in_order_of_versions(
    owners: list[tuple[int, int]], size: int, since: Version, until: Version
) -> None:
    """Each version belongs to one log and has some chunks; pages end anywhere, also in a commit."""
    engine = MemoryEngine(FAMILIES)
    lines = [
        (owner, version, chunk)
        for version, (owner, chunks) in enumerate(owners, start=1)
        for chunk in range(chunks)
    ]
    write_lines(engine, lines, size)
    logs = [log(identity) for identity in range(7)]
    found = orders(read_logs(engine, logs, since, until, untrimmed))
    assert found == [(version, chunk, owner) for owner, version, chunk in lines if since < version <= until]


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_no_line_is_read_from_logs_that_lie_elsewhere(count: int) -> None:
    engine = CountingEngine()
    logs = [log(identity, 10 * identity, 10 * identity + 10) for identity in range(count)]
    write_lines(engine, [(each.id, 10 * each.id + 5, 0) for each in logs])
    assert orders(read_logs(engine, logs, 200, 250, untrimmed)) == [
        (10 * each.id + 5, 0, each.id) for each in logs if 200 < 10 * each.id + 5 <= 250
    ]
    assert engine.log_bytes_read <= 5 * 30


def test_last_version_of_all_can_be_read() -> None:
    engine = MemoryEngine(FAMILIES)
    write_lines(engine, [(1, VERSION_MAX - 1, 0), (1, VERSION_MAX, 0), (2, 1, 0)])
    found = orders(read_logs(engine, [log(1)], VERSION_MAX - 1, VERSION_MAX, untrimmed))
    assert found == [(VERSION_MAX, 0, 1)]


# What a site leaves behind


def write_and_reshape(site: Site, users: Namespace, seed: int, commits: int) -> list[tuple[Version, bytes]]:
    """Write to random keys while partitions come and go; what was written, in order."""
    chance = Random(seed)
    written: list[tuple[Version, bytes]] = []
    for _ in range(commits):
        keys = sorted({b"key-%02d" % chance.randrange(60) for _ in range(chance.choice([1, 1, 4]))})
        before = {partition.id for partition in site.partitions()}
        version = users.put_many(dict.fromkeys(keys, b"1"))
        if len(before) == 1:
            written += [(version, key) for key in keys]
        else:
            written += sorted(
                (change.version, change.key)
                for change in site.changes("users", since=written[-1][0] if written else 0)
            )
        partitions = site.partitions()
        if chance.random() < 0.4 and len(partitions) < 12:
            key = b"key-%02d" % chance.randrange(60)
            if b"\0\0\1" + key not in [partition.range.start for partition in partitions]:
                site.split("users", key)
        elif chance.random() < 0.5 and len(partitions) > 1:
            left = chance.randrange(len(partitions) - 1)
            site.merge(partitions[left].id, partitions[left + 1].id)
    return written


@pytest.mark.parametrize("seed", range(4))
def test_logs_of_many_splits_and_merges_make_one_history(site: Site, users: Namespace, seed: int) -> None:
    written = write_and_reshape(site, users, seed, 120)
    node = node_of(site)
    assert len(node.logs) > 50
    found: list[tuple[Version, bytes]] = []
    last = b""
    for page in node.read_log(0, site.resolved_version(), KeyRange()):
        assert page
        for line in page:
            assert line[0] >= last, "a line came too late"
            last = line[0]
            decoded = decode_row(version_of(line), line[1])
            if isinstance(decoded, CommitRow):
                found += [(version_of(line), key[3:]) for key in decoded.keys]
    assert found == written
    chance = Random(seed)
    for _ in range(20):
        since, until = sorted(chance.choices(written, k=2))
        part = orders(node.read_log(since[0], until[0], KeyRange()))
        assert {version for version, _, _ in part} >= {
            version for version, _ in written if since[0] < version <= until[0]
        }
        assert all(since[0] < version <= until[0] for version, _, _ in part)


def test_logs_of_a_key_range_hold_all_its_changes(site: Site, users: Namespace) -> None:
    written = write_and_reshape(site, users, 9, 120)
    for start, end in [(b"key-00", b"key-10"), (b"key-30", b"key-31"), (b"key-55", None)]:
        found = site.changes("users", start_key=start, end_key=end)
        assert [(change.version, change.key) for change in found] == [
            (version, key) for version, key in written if key >= start and (end is None or key < end)
        ]


# Memory


def read_ahead(engine: CountingEngine, pages: Iterator[list[LogLine]]) -> int:
    """The most bytes that were read from the engine and not handed on yet."""
    handed_on = largest = 0
    before = engine.log_bytes_read
    for page in pages:
        largest = max(largest, engine.log_bytes_read - before - handed_on)
        handed_on += sum(LOG_KEY_BYTES + len(row) for _, row, _ in page)
    return largest


@pytest.mark.parametrize("logs", [1, 5, 60])
def test_pages_of_all_logs_together_stay_near_one_page(logs: int) -> None:
    """Busy logs side by side, with rows of ordinary size."""
    engine = CountingEngine()
    rows = 3000
    write_lines(engine, [(version % logs, version, 0) for version in range(1, rows)], size=8_000)
    pages = read_logs(engine, [log(identity) for identity in range(logs)], 0, rows, untrimmed)
    assert read_ahead(engine, pages) <= 2 * PAGE_BYTES_MAX


def test_logs_that_follow_each_other_are_not_all_held_at_once() -> None:
    """A partition that was split and merged often has left many logs, and rows may be large.

    Behind its parents' seal a log cannot be needed yet, so its first row need not be in memory.
    """
    engine = CountingEngine()
    count = 100
    logs = [log(identity, 10 * identity, 10 * identity + 10) for identity in range(count)]
    write_lines(engine, [(each.id, 10 * each.id + 5, 0) for each in logs], size=MIB)
    pages = read_logs(engine, logs, 0, 10 * count, untrimmed)
    assert read_ahead(engine, pages) <= 4 * PAGE_BYTES_MAX


def test_page_holds_no_more_rows_than_a_page_may() -> None:
    engine = CountingEngine()
    write_lines(engine, [(1, version, 0) for version in range(1, 2500)], size=1)
    sizes = [len(page) for page in read_logs(engine, [log(1)], 0, 2500, untrimmed)]
    assert sizes == [PAGE_ROWS_MAX, PAGE_ROWS_MAX, 499]


# Trimming


class Trim:
    """A trim that happens at a chosen moment of the reading: the mark first, the rows second."""

    def __init__(self, engine: MemoryEngine) -> None:
        self._engine = engine
        self._version: Version = 0

    def __call__(self) -> Version:
        return self._version

    def trim(self, logs: Sequence[LogRow], through: Version) -> None:
        self._version = through
        for each in logs:
            self._engine.delete_range("log", encode_log_key(each.id, 0), encode_log_key(each.id, through + 1))


@pytest.mark.parametrize("logs", [1, 3])
@pytest.mark.parametrize("pages_before", [0, 1, 2, 5])
@pytest.mark.parametrize("through", [1, 14, 25, 40])
def test_trim_under_a_reader_is_told_unless_the_reader_has_passed_it(
    logs: int, pages_before: int, through: Version
) -> None:
    """Commits of three large chunks: each page ends in the middle of one."""
    engine = MemoryEngine(FAMILIES)
    lines = [(version % logs, version, chunk) for version in range(1, 41) for chunk in range(3)]
    write_lines(engine, lines, size=MIB // 2)
    rows = [log(identity) for identity in range(logs)]
    trim = Trim(engine)
    pages = read_logs(engine, rows, 0, 40, trim)
    found: list[LogLine] = []
    for _ in range(pages_before):
        found += next(pages)
    trim.trim(rows, through)
    told = False
    try:
        for page in pages:
            found += page
    except VersionCollected:
        told = True
    delivered = orders(iter([found]))
    whole = [(version, chunk, owner) for owner, version, chunk in lines]
    assert delivered == (whole[: len(delivered)] if told else whole)
    if pages_before == 5 and through == 1:
        assert not told, "what lies far behind the reader is no longer its business"


def test_reader_of_a_trimmed_log_is_told_at_the_call() -> None:
    engine = MemoryEngine(FAMILIES)
    write_lines(engine, [(1, 5, 0), (1, 9, 0)])
    with pytest.raises(VersionCollected):
        read_logs(engine, [log(1)], 4, 9, lambda: 5)
    with pytest.raises(VersionCollected):
        read_logs(engine, [], 4, 9, lambda: 5)
    assert orders(read_logs(engine, [log(1)], 5, 9, lambda: 5)) == [(9, 0, 1)]


def test_trimmed_and_forgotten_logs_leave_the_others_in_order(time: SimulatedTime) -> None:
    engine = HookedEngine()
    with open_memory(engine, time) as opened:
        users = opened.create_namespace("users")
        write_and_reshape(opened, users, 3, 60)
        time.advance(2 * 24 * 60 * 60 * 1000)
        since = opened.now()
        later = [(users.put(b"key-%02d" % index, b"2"), b"key-%02d" % index) for index in range(20)]
        before = len(node_of(opened).logs)
        opened.collect_garbage()
        assert len(node_of(opened).logs) < before
        found = [(change.version, change.key) for change in opened.changes("users", since=since)]
        assert found == later


def test_site_with_logs_of_large_rows_reads_its_changes_in_bounded_memory() -> None:
    """The same as above, through a site: splits and merges between large commits."""
    engine = CountingEngine()
    with open_engine(engine, site="oslo", site_id=7, time_source=SimulatedTime(START_MS)) as site:
        users = site.create_namespace("users")
        for index in range(40):
            if index % 2:
                left, right = site.partitions()
                site.merge(left.id, right.id)
            else:
                site.split("users", b"m")
            users.put_many({b"a-%03d" % key: b"%d" % index * 1900 for key in range(250)})
        engine.log_bytes_read = 0
        changes = site.changes("users")
        next(changes)
        assert engine.log_bytes_read <= 4 * PAGE_BYTES_MAX
        assert sum(1 for _ in changes) == 40 * 250 - 1

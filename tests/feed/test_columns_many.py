"""Lines of the change log that are taken apart many at once: the same columns as one by one."""

from random import Random

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.codec.changelog import encode_commit, encode_heartbeat, encode_log_key, encode_single
from floodmark.codec.values import FIELDS, TOMBSTONE, encode_value
from floodmark.columns.column import Column
from floodmark.feed.reading.columns import BATCH_BYTES_MAX, Columns
from floodmark.model.change import Heartbeat, Stamp
from floodmark.model.errors import Corruption
from floodmark.model.limits import LOG_INLINE_VALUE_BYTES_MAX
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, Way
from floodmark.model.version import Version
from floodmark.partition import LogLine
from floodmark.partition.layout import LogRow

HERE = 1
LOGS = [LogRow(65, 64, b"", None, [], 0), LogRow(66, 7, b"", None, [], 0)]
NODE_LOG = LogRow(0, None, b"", None, [], 0)
EVERYTHING = KeyRange()

USUAL = [encode_value(b"1"), encode_value(b"some value"), TOMBSTONE, encode_value(b"2", 99)]
UNUSUAL = [
    bytes(LOG_INLINE_VALUE_BYTES_MAX) + encode_value(b""),
    encode_value(b"{}", stamps=bytes([FIELDS]) + b"stamps"),
    encode_value(b"elsewhere", origin=Stamp(7, 2)),
    encode_value(b"got back", origin=Stamp(7, HERE)),
]


def look_up(key: bytes, version: Version) -> bytes | None:
    return encode_value(b"%d" % version + key)


def make_line(random: Random, version: Version, unusual: float) -> LogLine:
    """A commit of one kind or of several, or a heartbeat."""
    log = random.choice(LOGS)
    if random.random() < 0.1:
        beat = Heartbeat(version=version, node=0, wall_ms=0, since=0, through=version, watermark={}, sums={})
        return encode_log_key(NODE_LOG.id, version)[4:], encode_heartbeat(beat), NODE_LOG
    keys = sorted(random.sample([b"%02d" % number for number in range(40)], random.choice([1, 2, 30])))
    kinds = UNUSUAL if random.random() < unusual else USUAL
    kinds = random.choice([kinds, random.sample(kinds, 1)])
    values = [random.choice(kinds) for _ in keys]
    row = encode_single(keys[0], values[0]) if len(keys) == 1 else encode_commit(keys, values)[0]
    return encode_log_key(log.id, version)[4:], row, log


def gather(
    lines: list[LogLine], keys: KeyRange, own: int | None, drains: set[int], *, alone: bool
) -> list[ChangeBatch]:
    """Add lines, and drain at some places."""
    columns = Columns(keys, look_up, None, heartbeats=True, own=own, partial=True)
    if alone:
        columns._may_wait = False
    batches: list[ChangeBatch] = []
    for number, line in enumerate(lines):
        columns.add_line(line)
        if number in drains and not columns.is_empty:
            batches += columns.drain(number + 1, Way.LOG)
    batches += columns.drain(len(lines), Way.LOG)
    assert columns.is_empty
    assert columns.gathered_bytes == 0
    return batches


@given(
    seed=st.integers(0, 999),
    count=st.integers(0, 60),
    unusual=st.sampled_from([0, 0, 0.03, 0.5]),
    keys=st.sampled_from([KeyRange(), KeyRange(b"1", b"3"), KeyRange(b"2", None), KeyRange(b"x", None)]),
    own=st.sampled_from([None, HERE]),
    drains=st.sets(st.integers(0, 60), max_size=2),
)
def test_lines_taken_apart_at_once_give_the_columns_of_each_alone(
    seed: int, count: int, unusual: float, keys: KeyRange, own: int | None, drains: set[int]
) -> None:
    random = Random(seed)
    lines = [make_line(random, version, unusual) for version in range(1, count + 1)]
    found = gather(lines, keys, own, drains, alone=False)
    assert found == gather(lines, keys, own, drains, alone=True)


def fill(columns: Columns, lines: int, size: int = 10, first: int = 1) -> None:
    """Commits of a hundred keys."""
    keys = [b"%03d" % number for number in range(100)]
    for version in range(first, first + lines):
        row = encode_commit(keys, [bytes(size) + encode_value(b"")] * len(keys))[0]
        columns.add_line((encode_log_key(65, version)[4:], row, LOGS[0]))


def partial(keys: KeyRange = EVERYTHING) -> Columns:
    return Columns(keys, look_up, None, partial=True)


def test_many_changes_become_arrays() -> None:
    columns = partial()
    fill(columns, 3)
    (batch,) = columns.drain(3, Way.LOG)
    assert isinstance(batch.keys, Column)
    assert pyarrow.array(batch.keys, pyarrow.binary()) is batch.keys.array
    assert list(batch.versions) == [1] * 100 + [2] * 100 + [3] * 100
    fill(columns, 1)
    (batch,) = columns.drain(3, Way.LOG)
    assert batch.keys == [b"%03d" % number for number in range(100)]


def test_what_is_added_behind_lines_that_wait_stands_behind_them() -> None:
    columns = partial()
    fill(columns, 2)
    columns.add_change(5, 64, b"one", b"1\x00")
    fill(columns, 2, first=6)
    columns.add_commit(9, 64, [b"two"], [b"2\x00"])
    (batch,) = columns.drain(9, Way.LOG)
    assert list(batch.versions) == [1] * 100 + [2] * 100 + [5] + [6] * 100 + [7] * 100 + [9]


def test_lines_that_wait_count_only_with_what_lies_in_the_range() -> None:
    """About: more than there is may be told, but not when it is enough for a batch."""
    columns = partial(KeyRange(b"050", b"051"))
    lines = 2 * BATCH_BYTES_MAX // (100 * 1000)
    fill(columns, lines, 1000)
    assert 1000 * lines <= columns.gathered_bytes < BATCH_BYTES_MAX
    columns = partial()
    fill(columns, lines, 1000)
    assert columns.gathered_bytes >= 2 * BATCH_BYTES_MAX - 100 * 1000


def test_cleared_lines_are_gone() -> None:
    columns = partial()
    fill(columns, 3)
    columns.clear()
    assert columns.is_empty
    fill(columns, 3)
    assert not columns.is_empty
    columns.clear()
    assert columns.is_empty


@pytest.mark.parametrize("row", [b"\x01\x01", b"\x01\x05\x00\x00\x00ab", b"\x01\xff\xff\xff\xffab"])
def test_damaged_line_is_told_among_many(row: bytes) -> None:
    columns = partial()
    fill(columns, 3)

    def read() -> None:
        columns.add_line((encode_log_key(65, 4)[4:], row, LOGS[0]))
        list(columns.drain(4, Way.LOG))

    with pytest.raises(Corruption):
        read()

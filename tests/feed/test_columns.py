"""Columns of changes: the keys that were asked for, with their values, in batches that know their end."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.codec.changelog import encode_commit, encode_heartbeat, encode_log_key, encode_single
from floodmark.codec.values import PLAIN, TOMBSTONE, encode_value
from floodmark.feed.reading.columns import BATCH_BYTES_MAX, Columns
from floodmark.model.change import Heartbeat
from floodmark.model.errors import Corruption
from floodmark.model.limits import LOG_INLINE_VALUE_BYTES_MAX
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch, Way
from floodmark.model.version import Version, compose
from floodmark.partition import LogLine
from floodmark.partition.layout import LogRow

LOG = LogRow(65, 64, b"", None, [], 0)
NODE_LOG = LogRow(0, None, b"", None, [], 0)
EVERYTHING = KeyRange()
LARGE = b"L" * LOG_INLINE_VALUE_BYTES_MAX + PLAIN

Row = tuple[Version, int, bytes, bytes]


class Data:
    """What the engine holds under a key and version, for values that the log only names."""

    def __init__(self, values: dict[tuple[bytes, Version], bytes]) -> None:
        self.values = values
        self.asked: list[tuple[bytes, Version]] = []

    def __call__(self, key: bytes, version: Version) -> bytes | None:
        self.asked.append((key, version))
        return self.values.get((key, version))


def line(version: Version, row: bytes, chunk: int = 0, log: LogRow = LOG) -> LogLine:
    return encode_log_key(log.id, version, chunk)[4:], row, log


def heartbeat(version: Version) -> Heartbeat:
    return Heartbeat(version=version, node=0, wall_ms=0, since=0, through=version, watermark={}, sums={})


def beat_line(version: Version, log: LogRow = NODE_LOG) -> LogLine:
    return line(version, encode_heartbeat(heartbeat(version)), log=log)


def rows_of(batches: Iterable[ChangeBatch]) -> list[Row]:
    return [
        row
        for batch in batches
        for row in zip(batch.versions, batch.partitions, batch.keys, batch.values, strict=True)
    ]


def columns(keys: KeyRange = EVERYTHING, data: Data | None = None, *, heartbeats: bool = False) -> Columns:
    return Columns(keys, data or Data({}), None, heartbeats=heartbeats)


commits = st.lists(
    st.dictionaries(
        st.sampled_from([b"a", b"b", b"bb", b"c", b"d"]),
        st.sampled_from(
            [PLAIN, b"1" + PLAIN, TOMBSTONE, LARGE, b"x" * (LOG_INLINE_VALUE_BYTES_MAX - 1) + PLAIN]
        ),
        min_size=1,
    ),
    max_size=6,
)
ranges = st.builds(
    KeyRange, st.sampled_from([b"", b"b", b"bb", b"e"]), st.sampled_from([None, b"b", b"c", b"z"])
)


@given(commits=commits, keys=ranges)
def test_lines_and_commits_give_the_same_columns(commits: list[dict[bytes, bytes]], keys: KeyRange) -> None:
    """By the log, with large values looked up, or by the tail, with all values in hand."""
    data = Data(
        {
            (key, version): value
            for version, commit in enumerate(commits, start=1)
            for key, value in commit.items()
        }
    )
    by_log, by_tail = columns(keys, data), columns(keys)
    expected: list[Row] = []
    for version, commit in enumerate(commits, start=1):
        ordered = sorted(commit)
        values = [commit[key] for key in ordered]
        if len(ordered) == 1:
            by_log.add_line(line(version, encode_single(ordered[0], values[0])))
        else:
            for chunk, row in enumerate(encode_commit(ordered, values)):
                by_log.add_line(line(version, row, chunk))
        by_tail.add_commit(version, 64, ordered, values)
        expected += [(version, 64, key, commit[key]) for key in ordered if keys.contains(key)]
    assert by_log.is_empty == by_tail.is_empty == (not expected)
    assert rows_of(by_log.drain(99, Way.LOG)) == rows_of(by_tail.drain(99, Way.TAIL)) == expected
    assert all(keys.contains(key) for key, _ in data.asked), "what is not wanted is not looked up"


def test_chunks_of_a_commit_follow_each_other() -> None:
    keys = [b"key-%04d" % index for index in range(1000)]
    values = [b"%d" % index * 800 + PLAIN for index in range(1000)]
    gathered = columns()
    rows = encode_commit(keys, values)
    assert len(rows) > 1
    for chunk, row in enumerate(rows):
        gathered.add_line(line(7, row, chunk))
    assert rows_of(gathered.drain(7, Way.LOG)) == [
        (7, 64, key, value) for key, value in zip(keys, values, strict=True)
    ]


def test_value_that_went_with_its_namespace_is_left_out() -> None:
    data = Data({(b"kept", 5): b"large" + PLAIN})
    gathered = columns(data=data)
    gathered.add_line(line(4, encode_single(b"gone", LARGE)))
    (row,) = encode_commit([b"gone", b"kept", b"small"], [LARGE, LARGE, b"1" + PLAIN])
    gathered.add_line(line(5, row))
    assert rows_of(gathered.drain(9, Way.LOG)) == [
        (5, 64, b"kept", b"large" + PLAIN),
        (5, 64, b"small", b"1" + PLAIN),
    ]


def test_bytes_grow_with_what_is_gathered_and_not_with_what_is_left_out() -> None:
    gathered = columns(KeyRange(b"b", b"c"), Data({(b"b-large", 3): b"x" * 50_000}))
    gathered.add_line(line(1, encode_single(b"a", b"x" * 1000)))
    gathered.add_commit(2, 64, [b"a", b"d"], [b"x" * 1000, b"x" * 1000])
    assert gathered.gathered_bytes == 0
    gathered.add_line(line(3, encode_single(b"b-large", LARGE)))
    assert gathered.gathered_bytes >= 50_000
    gathered.add_commit(4, 64, [b"b1", b"b2"], [b"x" * 1000 + PLAIN] * 2)
    assert gathered.gathered_bytes >= 52_000
    list(gathered.drain(4, Way.LOG))
    assert gathered.gathered_bytes == 0
    assert gathered.is_empty


def test_heartbeats_are_gathered_only_for_those_who_want_them() -> None:
    for wanted in (False, True):
        gathered = columns(heartbeats=wanted)
        gathered.add_line(beat_line(3))
        gathered.add_line(beat_line(5, LOG))
        assert gathered.is_empty is not wanted
        (batch,) = gathered.drain(6, Way.LOG)
        assert [beat.version for beat in batch.heartbeats] == ([3, 5] if wanted else [])
        assert gathered.is_empty


def test_cleared_columns_are_empty() -> None:
    gathered = columns(heartbeats=True)
    gathered.add_line(beat_line(3))
    gathered.add_commit(4, 64, [b"a"], [b"1" + PLAIN])
    gathered.clear()
    (batch,) = gathered.drain(9, Way.SCAN)
    assert (batch.through, batch.way, rows_of([batch]), list(batch.heartbeats)) == (9, Way.SCAN, [], [])


def test_batches_that_were_given_away_do_not_change() -> None:
    gathered = columns()
    gathered.add_commit(1, 64, [b"a"], [b"1" + PLAIN])
    (first,) = gathered.drain(1, Way.TAIL)
    gathered.add_commit(2, 64, [b"b"], [b"2" + PLAIN])
    (second,) = gathered.drain(2, Way.TAIL)
    assert rows_of([first]) == [(1, 64, b"a", b"1" + PLAIN)]
    assert rows_of([second]) == [(2, 64, b"b", b"2" + PLAIN)]


@pytest.mark.parametrize("row", [b"", b"\x07", b"\x01\x01", b"\x01\x05\x00\x00\x00ab"])
def test_damaged_line_is_told(row: bytes) -> None:
    with pytest.raises(Corruption):
        columns().add_line(line(5, row))


# Before-images


def with_images(images: dict[bytes, bytes], rows: Sequence[tuple[Version, bytes]]) -> list[ChangeBatch]:
    """Drain some deletions, with heartbeats around and between them."""
    gathered = Columns(
        KeyRange(), Data({}), lambda wanted: [images.get(key) for key, _, _ in wanted], heartbeats=True
    )
    gathered.add_line(beat_line(1))
    for version, key in rows:
        gathered.add_commit(version, 64, [key], [TOMBSTONE])
    last = max((version for version, _ in rows), default=1)
    gathered.add_line(beat_line(last + 1))
    return list(gathered.drain(last + 1, Way.LOG))


@given(
    sizes=st.lists(st.sampled_from([0, 10, BATCH_BYTES_MAX // 3, BATCH_BYTES_MAX]), max_size=12),
    commit=st.sampled_from([1, 3, 20]),
)
def test_before_images_cut_batches_behind_commits(sizes: list[int], commit: int) -> None:
    """A batch is as small as whole commits allow, and nothing is lost or doubled by a cut."""
    images = {b"key-%02d" % index: b"x" * size for index, size in enumerate(sizes)}
    rows = [(2 + index // commit * 2, key) for index, key in enumerate(images)]
    batches = with_images(images, rows)
    assert [(version, key) for version, _, key, _ in rows_of(batches)] == rows
    assert [image for batch in batches for image in batch.befores or ()] == list(images.values())
    assert [beat.version for batch in batches for beat in batch.heartbeats] == [
        1,
        max((version for version, _ in rows), default=1) + 1,
    ]
    seen: list[Version] = []
    for batch in batches:
        seen += batch.versions
        assert seen == [version for version, _ in rows if version <= batch.through]
        assert all(beat.version <= batch.through for beat in batch.heartbeats)
        images_in = zip(batch.versions, batch.befores or (), strict=True)
        sizes_in = [len(image or b"") for version, image in images_in if version < batch.versions[-1]]
        assert sum(sizes_in) < BATCH_BYTES_MAX
    assert [batch.through for batch in batches] == sorted(batch.through for batch in batches)


def test_no_image_is_asked_for_without_need() -> None:
    gathered = columns()
    gathered.add_commit(1, 64, [b"a"], [b"1" + PLAIN])
    (batch,) = gathered.drain(1, Way.LOG)
    assert batch.befores is None


@pytest.mark.parametrize(("options", "asked"), [({}, 1), ({"own": 7}, 4), ({"partial": True}, 4)])
def test_what_an_earlier_change_of_the_batch_stored_is_not_looked_up(
    options: dict[str, Any], asked: int
) -> None:
    """Unless changes are left out, or are only parts of what was stored."""
    expired = encode_value(b"3", expires_at=1)
    values = [b"1" + PLAIN, b"2" + PLAIN, expired, TOMBSTONE]
    history = [b"0" + PLAIN, *values[:2], None]
    calls: list[Version] = []

    def before(wanted: Sequence[tuple[bytes, Version, int]]) -> list[bytes | None]:
        calls.extend(version for _, version, _ in wanted)
        return history[: len(wanted)]

    gathered = Columns(KeyRange(), Data({}), before, **options)
    versions = [compose(5_000 + number, 0) for number in range(4)]
    for version, value in zip(versions, values, strict=True):
        gathered.add_commit(version, 1, [b"key"], [value])
    (batch,) = gathered.drain(versions[-1], Way.LOG)
    assert list(batch.befores or ()) == history
    assert len(calls) == asked

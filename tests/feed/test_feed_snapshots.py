"""Feeds that begin with a snapshot: killed, cut anew and stopped in the middle of it, they miss nothing."""

import signal
from dataclasses import replace
from pathlib import Path

import pyarrow.dataset
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contracts.site.base import fill, state_after
from tests.feed.test_runner_processes import runner_process
from tests.server.support import serving
from tests.waiting import wait_until

from floodmark.codec.ordered import encode_namespace
from floodmark.feed.named.feeds import FeedState, RangeProgress, SinkOptions, advance, recut
from floodmark.feed.named.round import RangeBatch, RangeBuffer
from floodmark.feed.sinks.base import SinkContext
from floodmark.feed.sinks.parquet import ParquetSink
from floodmark.files.directory import directory_at
from floodmark.model.change import Change, ChangeType, Stamp
from floodmark.model.ranges import KeyRange
from floodmark.site import Site
from floodmark.testing.sinks import context

KEYS = 3_000
KILLS = 2
AT = 1_000
PREFIX = encode_namespace(1)


@pytest.mark.slow
def test_runners_that_are_killed_in_the_middle_of_a_snapshot_lose_nothing(tmp_path: Path) -> None:
    """The directory holds each row of the snapshot and each change above it exactly once."""
    target = tmp_path / "rows"
    with serving() as (site, server):
        users = site.create_namespace("users")
        rows = fill(users, KEYS)
        slowly = SinkOptions(batch_records=20, rate_bytes_max=4_000)
        feed = site.feeds.create("export", "users", f"parquet:{target}", ranges=4, options=slowly)
        for number in range(KILLS):
            with runner_process(server, f"runner-{number}") as process:
                wait_until_the_snapshot_moves(site)
                users.delete(b"key-%05d" % (KEYS - 1 - number))
                users.put(b"key-%05d" % number, b"new")
                process.send_signal(signal.SIGKILL)
                process.wait()
            assert site.feeds.show("export").is_at_snapshot
            if number == 1:
                site.split("users", b"key-01000")
                assert len(site.feeds.rebalance("export").ranges) == 2
        site.feeds.pause("export")
        site.feeds.update("export", until=users.put(b"last", b"last"), options=SinkOptions())
        site.feeds.resume("export")
        with runner_process(server, "the-last-runner") as process:
            assert process.stdout is not None
            assert process.stdout.read().strip() == "finished"
        assert site.feeds.show("export").state is FeedState.FINISHED
        found = pyarrow.dataset.dataset(target, format="parquet").to_table().to_pylist()
        snapshot = sorted((row["key"], row["value"]) for row in found if row["_snapshot"])
        assert snapshot == sorted(rows.items())
        changes = sorted((row["_commit_version"], row["key"]) for row in found if not row["_snapshot"])
        wanted = [(change.version, change.key) for change in site.changes("users", since=feed.checkpoint)]
        assert changes == wanted
        ordered = sorted(found, key=lambda row: row["_commit_version"])
        assert state_after((row["key"], row["value"]) for row in ordered) == dict(users.scan())


def wait_until_the_snapshot_moves(site: Site) -> None:
    """Return when a runner has delivered some more of the snapshot."""

    def places() -> list[bytes | None]:
        return [part.snapshot for part in site.feeds.show("export").ranges]

    before = places()
    wait_until(lambda: places() != before, "the runner does not deliver")


@given(data=st.data())
def test_ranges_that_are_cut_anew_in_a_snapshot_skip_no_key(data: st.DataObject) -> None:
    """Reports and cuts in any order: of all keys up to a range's place, the sink has the snapshot."""
    keys = [PREFIX + bytes([letter]) for letter in range(ord("a"), ord("i"))]
    whole = KeyRange(PREFIX, encode_namespace(2))
    ranges = [RangeProgress(id=1, keys=whole, checkpoint=AT, snapshot=b"")]
    has_snapshot: set[bytes] = set()
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()):
            part = data.draw(st.sampled_from(ranges))
            inside = [key for key in keys if part.keys.contains(key)]
            place = data.draw(st.sampled_from([*inside, None]))
            report = RangeProgress(id=part.id, keys=part.keys, checkpoint=AT, snapshot=place)
            if place is None:
                report = RangeProgress(id=part.id, keys=part.keys, checkpoint=AT + 5)
            has_snapshot.update(key for key in inside if place is None or key <= place)
            ranges = advance(ranges, [report])
        else:
            cuts = sorted(data.draw(st.sets(st.sampled_from(keys[1:]), max_size=3)))
            starts, ends = [whole.start, *cuts], [*cuts, whole.end]
            cut = [KeyRange(start, end) for start, end in zip(starts, ends, strict=True)]
            ranges = recut(ranges, cut, max(part.id for part in ranges) + 1)
        for part in ranges:
            for key in filter(part.keys.contains, keys):
                assert key in has_snapshot or (part.snapshot is not None and key > part.snapshot)


# The buffer between reader and writer


def row(key: bytes, version: int = AT, *, snapshot: bool = True) -> Change:
    stamp = Stamp(version, 7)
    return Change("users", key, b"x", ChangeType.UPSERT, version, stamp, 1, snapshot=snapshot)


def test_snapshot_is_taken_in_batches_that_end_behind_any_key() -> None:
    buffer = RangeBuffer(AT, b"", prefix=PREFIX)
    rows = [row(b"a"), row(b"b"), row(b"c")]
    assert not buffer.has_more
    buffer.put(rows, AT, PREFIX + b"c")
    assert buffer.take(2) == RangeBatch(AT, rows[:2], AT, PREFIX + b"b")
    change = row(b"a", AT + 3, snapshot=False)
    buffer.put([], AT)
    buffer.put([change], AT + 3)
    assert buffer.take(2) == RangeBatch(AT, rows[2:], AT, PREFIX + b"c")
    assert buffer.take(2) == RangeBatch(AT, [change], AT + 3)
    assert not buffer.has_more


def test_pages_without_a_live_record_move_the_place_on() -> None:
    buffer = RangeBuffer(AT, b"", prefix=PREFIX)
    buffer.put([], AT, PREFIX + b"m")
    assert buffer.take(10) == RangeBatch(AT, [], AT, PREFIX + b"m")
    buffer.put([], AT)
    assert buffer.take(10) == RangeBatch(AT, [], AT)


def test_snapshot_waits_when_the_buffer_is_full() -> None:
    """However large a snapshot is, what is read and not written stays below a limit."""
    buffer = RangeBuffer(AT, b"", prefix=PREFIX, bytes_max=1_000)
    written: list[Change] = []
    for number in range(100):
        rows = [row(b"%05d-%d" % (number, index)) for index in range(3)]
        buffer.put(rows, AT, PREFIX + rows[-1].key)
        assert buffer.bytes < 3_000
        while buffer.has_more and buffer.bytes >= 1_000:
            batch = buffer.take(2)
            assert batch is not None
            written += batch.changes
    assert len(written) > 290


# Files


def at(since: int, snapshot: bytes | None = None) -> SinkContext:
    return replace(context(), since=since, snapshot=snapshot)


@pytest.mark.parametrize("place", [b"", b"b", b"d"])
def test_files_of_a_snapshot_that_come_again_are_there_once(tmp_path: Path, place: bytes) -> None:
    first = ParquetSink(directory_at(str(tmp_path)), at(AT, b""))
    for rows in ([row(b"a"), row(b"b")], [row(b"c"), row(b"d")]):
        first.write(rows, since=AT, through=AT)
        first.flush()
    first.close()
    again = ParquetSink(directory_at(str(tmp_path)), at(AT, place))
    left = [row(key) for key in (b"a", b"b", b"c", b"d", b"e") if key > place]
    again.write(left, since=AT, through=AT)
    again.write([row(b"a", AT + 1, snapshot=False)], since=AT, through=AT + 1)
    again.flush()
    again.close()
    later = ParquetSink(directory_at(str(tmp_path)), at(AT + 1))
    later.close()
    table = pyarrow.dataset.dataset(tmp_path, format="parquet").to_table()
    found = sorted(zip(*(table[name].to_pylist() for name in ("_commit_version", "key")), strict=True))
    assert found == [(AT, b"a"), (AT, b"b"), (AT, b"c"), (AT, b"d"), (AT, b"e"), (AT + 1, b"a")]

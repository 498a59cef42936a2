"""What lies between reading and writing is bounded, and never divides a commit."""

from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feed.support_feeds import Task
from tests.feed.support_runner import Stage

from floodmark.feed.named.feeds import FeedState
from floodmark.feed.named.round import RangeBatch, RangeBuffer, weigh
from floodmark.feed.reading import reader
from floodmark.feed.reading.items import OnDamaged
from floodmark.model.change import Change
from floodmark.model.stream import ChangeBatch
from floodmark.testing.sinks import HANG_SECONDS, SINCE, change


def drain(buffer: RangeBuffer, records_max: int) -> list[RangeBatch]:
    buffer.finish()
    batches = []
    while (batch := buffer.take(records_max)) is not None:
        batches.append(batch)
    return batches


@st.composite
def streams(draw: st.DrawFn) -> list[tuple[list[Change], int]]:
    """Commits of several changes, cut into portions anywhere; each with what the reader has through it."""
    sizes = draw(st.lists(st.integers(1, 5), max_size=12))
    changes = [
        change(2 * number, b"%d" % index)
        for number, size in enumerate(sizes, start=1)
        for index in range(size)
    ]
    cuts = sorted(draw(st.sets(st.integers(0, len(changes)), max_size=6)))
    portions = []
    for start, end in zip([0, *cuts], [*cuts, len(changes)], strict=True):
        following = changes[end].version if end < len(changes) else SINCE + 2 * len(sizes) + 1
        complete = [each.version for each in changes[:end] if each.version < following]
        portions.append((changes[start:end], max(complete, default=SINCE)))
    return portions


@given(portions=streams(), records_max=st.integers(1, 7))
def test_batches_follow_each_other_and_end_with_commits(
    portions: list[tuple[list[Change], int]], records_max: int
) -> None:
    buffer = RangeBuffer(SINCE)
    for changes, through in portions:
        assert buffer.put(changes, through)
    batches = drain(buffer, records_max)
    everything = [each for changes, _ in portions for each in changes]
    assert [each for batch in batches for each in batch.changes] == everything
    position = SINCE
    for batch in batches:
        assert batch.since == position
        position = batch.through
        assert all(batch.since < each.version <= batch.through for each in batch.changes)
        # Without its last commit it would still be too small.
        last = batch.changes[-1].version if batch.changes else 0
        assert sum(each.version < last for each in batch.changes) < records_max
    assert position == buffer.through
    assert buffer.bytes == 0


def test_a_commit_larger_than_the_buffer_comes_through() -> None:
    buffer = RangeBuffer(SINCE, bytes_max=1_000)
    commit = [change(1, b"%d" % number, bytes(500)) for number in range(10)]
    assert buffer.put(commit, SINCE + 1)
    assert drain(buffer, 1) == [RangeBatch(SINCE, commit, SINCE + 1)]


def test_a_full_buffer_lets_the_reader_wait() -> None:
    buffer = RangeBuffer(SINCE, bytes_max=1_000)
    buffer.put([change(1, b"a", bytes(1_000))], SINCE + 1)
    putting = Task(lambda: buffer.put([change(2, b"b")], SINCE + 2))
    # It cannot be in the batch: it gets in only when this one is out.
    batch = buffer.take(10)
    assert batch is not None
    assert [each.key for each in batch.changes] == [b"a"]
    assert putting.result() is True
    assert buffer.through == SINCE + 2


HOURS = 100_000.0


def test_a_batch_that_may_linger_waits_until_it_is_full() -> None:
    buffer = RangeBuffer(SINCE)
    taking = Task(lambda: buffer.take(3, HOURS))
    for number in range(1, 4):
        buffer.put([change(number, b"a")], SINCE + number)
    batch = taking.result()
    assert isinstance(batch, RangeBatch)
    assert (batch.since, len(batch.changes), batch.through) == (SINCE, 3, SINCE + 3)


def test_a_batch_that_may_linger_does_not_wait_for_what_will_not_come() -> None:
    finished = RangeBuffer(SINCE)
    finished.put([change(1, b"a")], SINCE + 1)
    taking = Task(lambda: finished.take(3, HOURS))
    finished.finish()
    assert taking.result() == RangeBatch(SINCE, [change(1, b"a")], SINCE + 1)
    full = RangeBuffer(SINCE, bytes_max=1)
    full.put([change(1, b"a")], SINCE + 1)
    assert full.take(3, HOURS) == RangeBatch(SINCE, [change(1, b"a")], SINCE + 1)


def test_a_checkpoint_does_not_linger_where_there_are_no_changes() -> None:
    buffer = RangeBuffer(SINCE)
    buffer.put([], SINCE + 5)
    assert buffer.take(3, HOURS) == RangeBatch(SINCE, [], SINCE + 5)


def test_a_batch_lingers_no_longer_than_it_may() -> None:
    buffer = RangeBuffer(SINCE)
    buffer.put([change(1, b"a")], SINCE + 1)
    assert buffer.take(3, 0.001) == RangeBatch(SINCE, [change(1, b"a")], SINCE + 1)


def test_closing_sends_everyone_away() -> None:
    full = RangeBuffer(SINCE, bytes_max=1)
    full.put([change(1, b"a")], SINCE + 1)
    putting = Task(lambda: full.put([change(2, b"b")], SINCE + 2))
    empty = RangeBuffer(SINCE)
    taking = Task(lambda: empty.take(1))
    full.close()
    empty.close()
    assert putting.result() is False
    assert taking.result() is None


BUFFER_BYTES = 50_000
BATCH_BYTES = 10_000


def most_buffered(monkeypatch: pytest.MonkeyPatch, bytes_max: int) -> int:
    """Run a feed whose sink is blocked until the reader could have filled it; the most that was buffered."""
    stage = Stage()
    world = stage.world
    monkeypatch.setattr(reader, "BATCH_BYTES_MAX", BATCH_BYTES)
    for number in range(500):
        world.put(b"%d" % number, bytes(1_000))
    world.create(until=world.put(b"last"), ranges=1)
    enough_read, decoded, most = Event(), 0, 0

    def decode(batch: ChangeBatch, on_damaged: OnDamaged) -> list[Change]:
        nonlocal decoded, most
        changes = world.decoder.decode(batch, on_damaged)
        most = max(most, runner.statistics().buffered_bytes)
        decoded += weigh(changes)
        if decoded > 3 * BUFFER_BYTES or (decoded > BUFFER_BYTES and most >= bytes_max):
            enough_read.set()
        return changes

    def blocked(operation: str, _range_id: int) -> None:
        if operation == "write":
            assert enough_read.wait(HANG_SECONDS)

    stage.sinks.before = blocked
    runner = stage.runner(buffer_bytes_max=bytes_max, decode=decode)
    assert runner.run() is FeedState.FINISHED
    assert stage.sinks.changes == world.changes()
    return most


def test_a_blocked_sink_does_not_grow_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_buffered(monkeypatch, BUFFER_BYTES) <= BUFFER_BYTES + 2 * BATCH_BYTES


def test_the_check_of_memory_finds_a_buffer_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_buffered(monkeypatch, 10**9) > BUFFER_BYTES + 2 * BATCH_BYTES

"""Named feeds that go on where a data set was published, also if their runner ends anywhere."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
from tests.sizes import only
from tests.waiting import run_threads, wait_until

from floodmark import Change, ChangeType, Site
from floodmark.accounting.counting import Counting
from floodmark.codec.ordered import encode_namespace
from floodmark.engine import MemoryEngine
from floodmark.feed.named.feeds import FeedState, SinkOptions
from floodmark.feed.named.round import BeginRound, Counters, RangeBatch, RangeBuffer, ThreadRound
from floodmark.feed.named.runner import FeedRunner
from floodmark.feed.sinks.base import Sink, SinkContext
from floodmark.model.change import Stamp
from floodmark.model.errors import InvalidArgument
from floodmark.model.stream import OnGeneration, SwapPlace
from floodmark.partition import FAMILIES
from floodmark.site.embedding import open_engine
from floodmark.site.feeds import surroundings_of

# So that a snapshot ends, and a data set begins, in the middle of a batch.
FEW = SinkOptions(batch_records=2, concurrency=1)


@pytest.fixture
def site() -> Iterator[Site]:
    with open_engine(MemoryEngine(FAMILIES), site="oslo", background=False) as site:
        yield site


class Ending:
    """A sink whose runner ends after some more writes, before or after what it wrote is durable."""

    def __init__(self, sink: Sink, left: list[int]) -> None:
        self._sink, self._left = sink, left

    def write(self, changes: Sequence[Change], *, since: int, through: int) -> None:
        self._spend()
        self._sink.write(changes, since=since, through=through)

    def flush(self) -> None:
        self._sink.flush()
        self._spend()

    def close(self) -> None:
        self._sink.close()

    def _spend(self) -> None:
        self._left[0] -= 1
        if self._left[0] < 0:
            raise InvalidArgument("this runner has ended")


def ending_round(site: Site, left: int) -> BeginRound:
    """Begins rounds of a feed that end after so many steps of its sinks."""
    surroundings, steps = surroundings_of(site.host, ["parquet:"]), [left]

    def open_sink(uri: str, context: SinkContext) -> Sink:
        return Ending(surroundings.open_sink(uri, context), steps)

    return partial(ThreadRound, replace(surroundings, open_sink=open_sink))


def run_until(site: Site, left: int) -> bool:
    """Run the feed until its target, or so many steps of its sinks; whether it reached the target."""
    runner = FeedRunner(site.host.feeds, "lake", ending_round(site, left), holder="me")
    try:
        return runner.run() is FeedState.FINISHED
    except InvalidArgument:
        return False


def rows_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pyarrow.dataset.dataset(path, format="parquet").to_table().to_pylist()
    return sorted(found, key=lambda row: (row["_commit_version"], row["key"]))


def state_of(rows: Sequence[dict[str, Any]]) -> dict[bytes, bytes]:
    state: dict[bytes, bytes] = {}
    for row in rows:
        if row["_change_type"] == "generation":
            state = {} if row["_snapshot"] else state
        elif row["value"] is None:
            state.pop(row["key"], None)
        else:
            state[row["key"]] = row["value"]
    return state


@pytest.mark.parametrize("way", ["difference", "snapshot"])
@pytest.mark.parametrize("steps", only([3], [2, 3, 5, 8]))
def test_a_feed_delivers_each_row_of_a_swap_once_wherever_its_runners_end(
    site: Site, tmp_path: Path, way: Any, steps: int
) -> None:
    users = site.create_namespace("users")
    users.put_many({b"%02d" % number: b"1" for number in range(7)})
    sink = f"parquet:{tmp_path}/lake"
    site.feeds.create("lake", "users", sink, ranges=1, options=FEW, on_generation=way)
    users.put(b"03", b"2")
    first = site.generations.publish("users", {b"%02d" % number: b"3" for number in range(3, 10)})
    users.delete(b"05")
    site.generations.rollback("users")
    last = users.put(b"last", b"4")
    site.feeds.pause("lake")
    site.feeds.update("lake", until=last)
    site.feeds.resume("lake")
    for _ in range(200):
        if run_until(site, steps):
            break
        assert site.feeds.show("lake").state is FeedState.ERROR
    assert site.feeds.show("lake").state is FeedState.FINISHED
    rows = rows_of(tmp_path / "lake")
    assert state_of(rows) == dict(users.scan())
    assert state_of([row for row in rows if row["_commit_version"] <= first.version]) == dict(
        users.scan(at=first.version)
    )
    known = [(row["_commit_version"], row["key"], row["_snapshot"]) for row in rows]
    assert len(known) == len(set(known))
    assert [row["key"] for row in rows if row["_change_type"] == "generation"] == [b"", b""]


def test_ranges_cross_a_swap_by_themselves_and_the_counts_are_right(site: Site, tmp_path: Path) -> None:
    users = site.create_namespace("users")
    users.put_many({b"%02d" % number: b"1" for number in range(20)})
    site.split("users", b"10")
    sink = f"parquet:{tmp_path}/lake"
    site.feeds.create("lake", "users", sink, ranges=2, on_generation="difference")
    site.host.versions.heartbeat()
    users.put(b"05", b"2")
    site.generations.publish("users", {b"%02d" % number: b"3" for number in range(5, 25)})
    users.put(b"15", b"4")
    site.host.versions.heartbeat()
    users.put(b"16", b"4")
    site.host.versions.heartbeat()
    site.feeds.pause("lake")
    site.feeds.update("lake", until=users.put(b"last", b"5"))
    site.feeds.resume("lake")
    assert run_until(site, 1_000)
    rows = rows_of(tmp_path / "lake")
    assert state_of(rows) == dict(users.scan())
    # A range that begins when the file of another one is there leaves out what that holds.
    assert {row["key"] for row in rows if row["_change_type"] == "generation"} == {b""}
    checks = site.feeds.show("lake").checked
    assert checks.intervals_wrong == 0
    assert checks.intervals_checked > 0


def test_a_feed_that_failed_at_a_swap_goes_on_after_an_update(site: Site, tmp_path: Path) -> None:
    users = site.create_namespace("users")
    users.put(b"ada", b"1")
    site.feeds.create("lake", "users", f"parquet:{tmp_path}/lake", since="beginning")
    until = site.generations.publish("users", {b"bob": b"2"}).version
    with pytest.raises(Exception, match="a data set was published"):
        run_until(site, 1_000)
    site.feeds.update("lake", on_generation="difference", until=until)
    site.feeds.resume("lake")
    assert run_until(site, 1_000)
    assert state_of(rows_of(tmp_path / "lake")) == {b"bob": b"2"}
    with pytest.raises(InvalidArgument, match="on_generation is one of"):
        site.feeds.update("lake", on_generation="ignore")


def test_what_comes_at_a_swap_is_taken_by_itself() -> None:
    prefix = encode_namespace(1)

    def place(key: bytes) -> bytes:
        return SwapPlace(OnGeneration.DIFFERENCE, key).encode()

    buffer = RangeBuffer(7, place(b""), prefix=prefix)
    buffer.put([], 7, place(prefix + b"a"))
    assert buffer.take(10) == RangeBatch(7, [], 7, place(prefix + b"a"))
    buffer.put([], 8)
    assert buffer.take(10) == RangeBatch(7, [], 8)
    assert not buffer.has_more


def change(version: int, key: bytes, kind: ChangeType = ChangeType.UPSERT) -> Change:
    return Change("users", key, None, kind, version, Stamp(version, 7), 1)


def test_a_swap_is_at_its_version_though_no_empty_batch_comes_before_or_behind_it() -> None:
    """A server leaves out empty batches that others follow soon."""
    buffer, batches = RangeBuffer(5, prefix=encode_namespace(1)), list[RangeBatch]()

    def put() -> None:
        for through, version in ((6, 6), (8, 9), (10, 11), (12, 12)):
            if through == version:
                assert buffer.put([change(version, b"a")], through)
            else:
                marker = change(version, b"", ChangeType.GENERATION)
                assert buffer.put([marker], through, SwapPlace(OnGeneration.DIFFERENCE).encode())
        buffer.finish()

    def take() -> None:
        while (batch := buffer.take(10)) is not None:
            batches.append(batch)

    run_threads(put, take)
    assert [batch.since for batch in batches] == [5, *(batch.through for batch in batches[:-1])]
    written = [(batch.span, batch.changes[0].version) for batch in batches if batch.changes]
    before, *swaps, behind = written
    assert before in (((5, 6), 6), ((5, 8), 6))
    assert swaps == [((9, 9), 9), ((11, 11), 11)]
    assert behind in (((10, 12), 12), ((11, 12), 12))


def test_a_report_holds_one_place_though_the_range_comes_to_a_swap_meanwhile(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.create_namespace("users")
    feed = site.feeds.create("lake", "users", f"parquet:{tmp_path}/lake", since="beginning", ranges=1)
    surroundings = surroundings_of(site.host, ["parquet:"])
    work = ThreadRound(surroundings, feed, Counters(), require_lease=lambda: None, nudge=lambda: None)
    (worker,) = work._workers
    since, report, place = worker.progress().checkpoint, Counting.report, SwapPlace(OnGeneration.DIFFERENCE)

    def move_meanwhile(self: Counting) -> Any:
        counted = report(self)
        monkeypatch.setattr(Counting, "report", report)
        worker.buffer.put([], since + 5)
        worker.buffer.put([change(since + 6, b"", ChangeType.GENERATION)], since + 5, place.encode())
        # The range moves on, unless it waits for the report.
        wait_until(lambda: worker.progress().snapshot or worker._moving.locked(), "it does not move on")
        return counted

    monkeypatch.setattr(Counting, "report", move_meanwhile)
    writing = work.thread(worker.write, "write")
    writing.start()
    (progress,) = work.report()
    work.stop()
    writing.join()
    assert (progress.checkpoint, progress.snapshot) in (
        (since, None),
        (since + 5, None),
        (since + 5, place.encode()),
    )

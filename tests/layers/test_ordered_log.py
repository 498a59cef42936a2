"""Ordered logs: entries in the order of their commits, all of them, wherever they lie."""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.layers.conftest import Place, cut_at_every_write
from tests.replication.support_links import Mesh, topology_of
from tests.site.support import HookedEngine, open_memory

import floodmark
from floodmark.layers import LogPosition, OrderedLog
from floodmark.layers.ordered_log import Ordering
from floodmark.model.errors import Conflict, InvalidArgument, InvalidValue, VersionCollected, WrongPolicy
from floodmark.replication.topology import MemberSite, SiteState
from floodmark.site import Site
from floodmark.site.transaction import Transaction
from floodmark.testing.clock import SimulatedTime

NAME = "audit"
ORDERINGS: tuple[Ordering, ...] = ("commit", "conflicts")


@pytest.fixture(params=["commit", pytest.param("conflicts", marks=pytest.mark.slow)])
def log(place: Place, request: pytest.FixtureRequest) -> OrderedLog:
    log = OrderedLog(place.site, NAME, ordering=request.param)
    owners = [partition.node for partition in place.site.partitions()]
    for key in log.split_keys(4) if len(owners) > 1 else ():
        _, right = place.site.split(NAME, key)
        place.site.host.node_port.move(right, owners[len(place.site.partitions()) % 3])
    return log


def at_once(place: Place) -> None:
    """Let all nodes resolve to the present."""
    place.advance(5)


def entries(log: OrderedLog, **options: object) -> list[bytes]:
    return [entry for _, entry in log.read(**options)]  # type: ignore[arg-type]


def append(log: OrderedLog, entry: bytes) -> LogPosition:
    position = log.append(entry)
    assert position is not None
    return position


def test_entries_are_read_in_order_over_buckets_and_spans_and_from_each_position(
    place: Place, log: OrderedLog
) -> None:
    appended = []
    for number in range(30):
        appended.append((append(log, b"%d" % number), b"%d" % number))
        place.advance((0, 100, 700, 20_000)[number % 4])
    assert list(log.read()) == appended
    for place_in_log in range(0, 30, 7):
        assert list(log.read(since=appended[place_in_log][0])) == appended[place_in_log + 1 :]
        assert list(log.read(since=appended[place_in_log][0].version)) == appended[place_in_log + 1 :]


def test_an_entry_is_appended_with_the_writes_of_its_transaction_or_not_at_all(
    place: Place, log: OrderedLog
) -> None:
    site = place.site
    accounts = site.create_namespace("accounts")
    append(log, b"before")
    for number in range(6):
        place.advance(400)
        with site.transaction() as transaction:
            transaction.put(accounts, b"ada", b"%d" % number)
            log.append(b"first %d" % number, transaction=transaction)
            log.append(b"second %d" % number, transaction=transaction)
        record = accounts.record(b"ada")
        assert record is not None
        at_once(place)
        assert [*log.read()][-2:] == [
            (LogPosition(record.version, 0), b"first %d" % number),
            (LogPosition(record.version, 1), b"second %d" % number),
        ]
    transaction = site.transaction()
    log.append(b"never", transaction=transaction)
    transaction.abort()
    assert len(entries(log)) == 13


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_appends_that_fail_anywhere_leave_what_has_returned_in_order_and_no_part_of_a_transaction(
    ordering: Ordering,
) -> None:
    appended: list[bytes] = []

    def prepare(site: Site, _: SimulatedTime) -> None:
        site.create_namespace("accounts")
        append(OrderedLog(site, NAME, ordering=ordering), b"before")
        appended[:] = [b"before"]

    def work(site: Site, time: SimulatedTime) -> None:
        log = OrderedLog(site, NAME, ordering=ordering)
        append(log, b"alone")
        appended.append(b"alone")
        # In another span, which is marked first.
        time.advance(20_000)
        with site.transaction() as transaction:
            transaction.put(site.namespace("accounts"), b"ada", b"10")
            log.append(b"together", transaction=transaction)
        appended.append(b"together")
        append(log, b"last")
        appended.append(b"last")

    cuts = 0
    for site, _ in cut_at_every_write(prepare, work):
        log = OrderedLog(site, NAME, ordering=ordering)
        found = entries(log)
        assert found in (appended, [*appended, *[b"alone", b"together", b"last"][len(appended) - 1 :][:1]])
        assert (site.namespace("accounts").get(b"ada") is not None) == (b"together" in found)
        append(log, b"after")
        assert entries(log) == [*found, b"after"]
        cuts += 1
    # Three appends and the mark of a span, each at least; and no cut.
    assert cuts >= 5


def test_a_follower_gets_what_was_there_and_what_comes(place: Place, log: OrderedLog) -> None:
    first = append(log, b"a")
    append(log, b"b")
    at_once(place)
    following = log.read(since=first, follow=True)
    assert next(following)[1] == b"b"
    found: list[bytes] = []
    reader = Thread(target=lambda: found.extend(entry for _, entry in _take(following, 2)))
    reader.start()
    append(log, b"c")
    place.advance(700)
    append(log, b"d")
    at_once(place)
    reader.join(60)
    assert found == [b"c", b"d"]


def _take(following: Iterator[tuple[LogPosition, bytes]], count: int) -> Iterator[tuple[LogPosition, bytes]]:
    for _ in range(count):
        yield next(following)


def test_trimmed_entries_are_gone_and_a_reader_that_missed_them_is_told(
    place: Place, log: OrderedLog
) -> None:
    positions = []
    for number in range(8):
        positions.append(append(log, b"%d" % number))
        place.advance(9_000)
    assert log.trim(before=positions[5]) == 5
    assert entries(log) == [b"5", b"6", b"7"]
    assert entries(log, since=positions[4]) == [b"5", b"6", b"7"]
    with pytest.raises(VersionCollected, match="trimmed"):
        entries(log, since=positions[3])
    assert log.trim(before=positions[5]) == 0
    append(log, b"8")
    at_once(place)
    assert log.trim(before=(1 << 64) - 1) == 4
    append(log, b"9")
    at_once(place)
    assert entries(log)[-1] == b"9"


def test_the_interval_changes_while_appends_go_on(place: Place, log: OrderedLog) -> None:
    appended = []
    other = OrderedLog(place.site, NAME, ordering=log.ordering)
    intervals: list[timedelta | None] = [
        timedelta(milliseconds=500),
        None,
        timedelta(hours=1),
        timedelta(seconds=2),
    ]
    for number in range(60):
        appended.append(append((log, other)[number % 2], b"%d" % number))
        place.advance(2_000)
        if number % 8 == 0:
            log.change_interval(intervals[number // 8 % 4])
    assert [position for position, _ in other.read()] == appended
    log.change_interval(None)
    place.advance(40_000)
    assert log.interval is None


def test_after_thirty_idle_days_a_reader_looks_at_few_rows(
    place: Place, log: OrderedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = append(log, b"a")
    place.advance(30 * 24 * 3_600_000)
    append(log, b"b")
    at_once(place)
    calls = count_reads(log, monkeypatch)
    assert entries(log, since=first) == [b"b"]
    assert calls.total() < 20


def count_reads(log: OrderedLog, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The calls that a reader makes from here on, by name."""
    calls: Counter[str] = Counter()

    def counted(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def call(*keys: bytes, **options: Any) -> Any:
            calls[name] += 1
            return read(*keys, **options)

        return call

    for name in ("pages", "first", "get"):
        monkeypatch.setattr(log.stored, name, counted(name, getattr(log.stored, name)))
    return calls


def test_where_entries_are_sparse_a_reader_makes_few_calls(
    place: Place, log: OrderedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    appended = []
    for number in range(40):
        appended.append(b"%d" % number)
        append(log, appended[-1])
        place.advance(17_000)
    calls = count_reads(log, monkeypatch)
    assert entries(log) == appended
    # 40 spans have 2,560 buckets, most of which lie in gaps that an earlier call told of.
    assert calls["first"] < 2_560 / 8
    assert calls.total() - calls["first"] < 40


def test_a_reader_that_is_overtaken_by_a_trim_misses_nothing_or_is_told(
    place: Place, log: OrderedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        append(log, b"%d" % number)
        place.advance(9_000)
    look = log._look

    def look_early(since: LogPosition) -> int:
        """What the reader scans later is held, so it looks at an earlier version."""
        at = look(since)
        place.advance(1)
        return at

    monkeypatch.setattr(log, "_look", look_early)
    reading = log.read(since=LogPosition(1))
    found = [next(reading)[1] for _ in range(3)]
    log.trim(before=(1 << 64) - 1)
    # What the reader looks at was collected.
    place.advance(3 * 24 * 3_600_000)
    place.site.collect_garbage()
    with pytest.raises(VersionCollected, match="trimmed"):
        found += [entry for _, entry in reading]
    assert found == [b"%d" % number for number in range(len(found))]


def test_a_log_refuses_what_it_cannot_keep(place: Place) -> None:
    log = OrderedLog(place.site, NAME, bucketing=False)
    assert log.interval is None
    append(log, b"a")
    at_once(place)
    with pytest.raises(WrongPolicy, match="orders its entries"):
        OrderedLog(place.site, NAME, ordering="conflicts")
    with pytest.raises(InvalidArgument, match="interval"):
        log.change_interval(timedelta(0))
    refused: list[Any] = ["text", None, bytes(1_048_577)]
    for entry in refused:
        with pytest.raises(InvalidValue, match="an entry of a log is bytes"):
            log.append(entry)
        with pytest.raises(InvalidValue, match="an entry"), place.site.transaction() as transaction:
            log.append(entry, transaction=transaction)
    # A position that the site has not come to, as that of another site.
    assert list(log.read(since=1 << 63)) == []
    with pytest.raises(InvalidArgument, match="position"):
        list(log.read(since=-1))
    with pytest.raises(InvalidArgument, match="ordering"):
        OrderedLog(place.site, "other", ordering="any")  # type: ignore[arg-type]
    assert entries(log) == [b"a"]


# Against a plain list


@given(
    ordering=st.sampled_from(ORDERINGS), steps=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 40_000)))
)
def test_a_log_is_a_plain_list_whatever_the_clock_does(
    ordering: Ordering, steps: list[tuple[int, int]]
) -> None:
    time = SimulatedTime()
    model: list[tuple[LogPosition, bytes]] = []
    with open_memory(HookedEngine(), time) as site:
        handles = [OrderedLog(site, NAME, ordering=ordering) for _ in range(2)]
        for number, (kind, size) in enumerate(steps):
            log, entry = handles[number % 2], b"%d" % number
            match kind:
                case 0 | 1 | 2:
                    model.append((append(log, entry), entry))
                case 3:
                    with site.transaction() as transaction:
                        log.append(entry, transaction=transaction)
                    model.append((LogPosition(transaction.version), entry))
                case 4:
                    time.advance(size)
                case 5:
                    # The clock is set back.
                    time.advance(-size)
                case 6:
                    log.change_interval(timedelta(milliseconds=size) if size else None)
                case 7 if model:
                    del model[: size % len(model)]
                    log.trim(before=model[0][0])
                case 8 if model:
                    since = model[size % len(model)][0]
                    assert [*log.read(since=since)] == [each for each in model if each[0] > since]
        assert [*handles[1].read()] == model


# Many at once


def keep_reading(log: OrderedLog, count: int) -> list[bytes]:
    """Read again and again, each time on from the last position, until there are so many entries."""
    position = LogPosition(0)
    found: list[bytes] = []
    while len(found) < count:
        for at, entry in log.read(since=position):
            assert at > position
            position = at
            found.append(entry)
    return found


def append_from_threads(log: OrderedLog, threads: int, each: int) -> list[tuple[LogPosition, bytes]]:
    """Entries of many threads, each of which numbers its own."""

    def run(thread: int) -> list[tuple[LogPosition, bytes]]:
        names = [b"%d/%d" % (thread, number) for number in range(each)]
        return [(append(log, name), name) for name in names]

    with ThreadPoolExecutor(threads) as pool:
        return sorted(pair for done in pool.map(run, range(threads)) for pair in done)


def test_32_threads_append_and_a_reader_misses_nothing_and_meets_nothing_late(tmp_path: Path) -> None:
    with floodmark.open(tmp_path, site="oslo") as site:
        log = OrderedLog(site, NAME, interval=timedelta(milliseconds=4))
        for key in log.split_keys(8):
            site.split(NAME, key)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(keep_reading, log, 32 * 20)
            appended = append_from_threads(log, 32, 20)
            assert reading.result(120) == [entry for _, entry in appended]
        assert all(sum(sample.writes for sample in each.samples) for each in site.heat()[1:])


@pytest.mark.slow
@pytest.mark.parametrize("ordering", ORDERINGS)
def test_32_threads_append_over_three_nodes(place: Place, ordering: Ordering) -> None:
    log = OrderedLog(place.site, NAME, interval=timedelta(milliseconds=64), ordering=ordering)
    appended = append_from_threads(log, 32, 10)
    at_once(place)
    assert [*log.read()] == appended


def test_the_check_of_readers_sees_an_entry_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a transaction takes the bucket of its reads, and nothing tells of later ones."""
    monkeypatch.setattr(Transaction, "add_write_conflict", lambda *_, **__: None)
    time = SimulatedTime()
    with open_memory(HookedEngine(), time) as site:
        log = OrderedLog(site, NAME, ordering="conflicts", interval=timedelta(milliseconds=64))
        append(log, b"first")
        with site.transaction() as transaction:
            log.append(b"late", transaction=transaction)
            time.advance(64)
            newer = append(log, b"newer")
        assert transaction.version > newer.version
        # The late entry stands in an earlier bucket, and a reader that has met it does not turn back.
        assert entries(log) != [b"first", b"newer", b"late"]


def test_by_conflicts_a_transaction_that_is_overtaken_by_a_later_bucket_is_refused() -> None:
    time = SimulatedTime()
    with open_memory(HookedEngine(), time) as site:
        log = OrderedLog(site, NAME, ordering="conflicts", interval=timedelta(milliseconds=64))
        append(log, b"first")
        # Two buckets on, nothing is declared that the transaction has read.
        for buckets, entry in ((1, b"newer"), (2, b"newest")):
            transaction = site.transaction()
            log.append(b"late", transaction=transaction)
            time.advance(64 * buckets)
            append(log, entry)
            with pytest.raises(Conflict):
                transaction.commit()
        assert entries(log) == [b"first", b"newer", b"newest"]


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_site_reads_the_entries_of_one_that_it_has_replaced(ordering: Ordering) -> None:
    mesh = Mesh("oslo", "rome")
    log = OrderedLog(mesh["oslo"], "users", ordering=ordering)
    for number in range(40):
        append(log, b"%d" % number)
        mesh.time.advance((0, 100, 700, 20_000)[number % 4])
    log.trim(before=[*log.read()][3][0])
    mesh.exchange()
    # Entries may be appended here in another order.
    there = OrderedLog(mesh["rome"], "users")
    append(there, b"here")
    mesh.exchange()
    oslo, expected = mesh["oslo"].id, [*log.read()]
    with pytest.raises(InvalidArgument, match="read them at that site"):
        there.read(site=oslo)
    removed = MemberSite(id=oslo, state=SiteState.REMOVED, final=mesh.watermark("rome")[oslo])
    mesh["rome"].set_topology(topology_of("rome", epoch=2, oslo=removed))
    assert [*there.read(site=oslo)] == expected
    assert [*there.read(expected[20][0], site=oslo)] == expected[21:]
    with pytest.raises(VersionCollected, match="was trimmed"):
        list(there.read(LogPosition(1), site=oslo))
    assert entries(there) == entries(there, site=mesh["rome"].id) == [b"here"]
    assert entries(there, site=99) == []
    with pytest.raises(InvalidArgument, match="can be followed"):
        there.read(site=oslo, follow=True)
    unknown: list[Any] = [0, 256, "oslo"]
    for site in unknown:
        with pytest.raises(InvalidArgument, match="id of a site"):
            there.read(site=site)

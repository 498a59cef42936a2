"""The site's contract: scans, and reading the past."""

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from random import Random
from typing import Any

import pyarrow
import pytest
from tests.contracts.site.base import HOUR_MS, SiteContractBase, age, check_rows, fill, oldest, refused
from tests.waiting import wait_until

from floodmark.codec.columns import RECORDS, RECORDS_WITH_DIGESTS
from floodmark.codec.digest import SEED, hash_bytes
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.records import split_values
from floodmark.model.errors import PartitionNotFound, VersionCollected, VersionInFuture
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.version import COUNTER_BITS, Version, compose, moment_of, version_at
from floodmark.site import Namespace, Site, View
from floodmark.testing.clock import SimulatedTime

KEYS = [b"a", b"ab", b"ab\x00", b"abc", b"ab\xff", b"ac", b"b", b"\xff", b"\xff\xff"]
# Skew that a site allows for, so that a reader may ask for a version that another site has just given.
SKEW_MS = 250


class ScanContract(SiteContractBase):
    """Ranges of keys in order, as they were at one moment, whatever happens meanwhile."""

    @pytest.mark.parametrize("split", [False, True], ids=["one partition", "three partitions"])
    def test_range_prefix_limit_and_direction_choose_rows(
        self, site: Site, users: Namespace, split: bool
    ) -> None:
        if split:
            site.split("users", b"ab\x00")
            site.split("users", b"b")
        users.put_many(dict.fromkeys(KEYS, b"x"))
        users.put(b"gone", b"x")
        users.delete(b"gone")
        chosen = [
            ((b"", None, None), sorted(KEYS)),
            ((b"ab", b"b", None), [b"ab", b"ab\x00", b"abc", b"ab\xff", b"ac"]),
            ((b"b", None, None), [b"b", b"\xff", b"\xff\xff"]),
            ((b"", b"ab", None), [b"a"]),
            ((b"aa", b"aaa", None), []),
            ((b"b", b"b", None), []),
            ((b"", b"", None), []),
            ((b"", None, b"ab"), [b"ab", b"ab\x00", b"abc", b"ab\xff"]),
            ((b"", None, b"\xff"), [b"\xff", b"\xff\xff"]),
            ((b"", None, b""), sorted(KEYS)),
            ((b"abc", None, b"ab"), [b"abc", b"ab\xff"]),
            ((b"", b"abc", b"ab"), [b"ab", b"ab\x00"]),
            ((b"b", None, b"ab"), []),
            ((b"", b"a", b"ab"), []),
            ((b"", None, b"nobody"), []),
        ]
        for (start, end, prefix), keys in chosen:
            for limit in (None, 0, 1, 3, 100):
                expected = [(key, b"x") for key in keys][:limit]
                assert list(users.scan(start, end, prefix=prefix, limit=limit)) == expected
                expected = [(key, b"x") for key in reversed(keys)][:limit]
                assert list(users.scan(start, end, prefix=prefix, limit=limit, reverse=True)) == expected

    @pytest.mark.parametrize("split", [False, True], ids=["one partition", "three partitions"])
    def test_first_is_the_first_row_of_a_scan(self, site: Site, users: Namespace, split: bool) -> None:
        if split:
            site.split("users", b"ab\x00")
            site.split("users", b"b")
        site.create_namespace("next").put(b"a", b"of another namespace")
        before = site.now()
        full = users.put_many({key: b"of " + key for key in KEYS})
        users.delete(b"abc")
        users.put(b"ab\xff", b"short-lived", ttl=3600)
        bounds = [b"\x00", *KEYS, b"\xff\xff\xff"]
        for start in bounds:
            for end in bounds:
                if start <= end:
                    assert users.first(start, end) == next(users.scan(start, end), None)
                    for at in (before, full, site.now()):
                        assert users.first(start, end, at=at) == next(users.scan(start, end, at=at), None)

    def test_scan_is_an_iterator_of_pairs(self, users: Namespace) -> None:
        users.put(b"ada", b"countess")
        rows = users.scan()
        assert isinstance(rows, Iterator)
        row = next(rows)
        assert (type(row), row) == (tuple, (b"ada", b"countess"))
        assert next(rows, None) is None
        assert next(rows, None) is None

    @pytest.mark.parametrize("reverse", [False, True])
    def test_long_scan_goes_over_pages_and_partitions(
        self, site: Site, users: Namespace, reverse: bool
    ) -> None:
        expected = sorted(fill(users, 4_321).items(), reverse=reverse)
        for boundary in (b"key-00010", b"key-01500", b"key-04320"):
            site.split("users", boundary)
        check_rows(users.scan(reverse=reverse), expected)
        for limit in (999, 1_000, 1_001, 3_000, 4_320, 4_321, 5_000):
            check_rows(users.scan(limit=limit, reverse=reverse), expected[:limit])
        pages = list(users.pages(reverse=reverse))
        assert [row for page in pages for row in page] == expected
        assert len(pages) < 10
        assert all(pages)
        within = [row for row in expected if b"key-00005" <= row[0] < b"key-03007"]
        check_rows(users.scan(b"key-00005", b"key-03007", reverse=reverse), within)

    def test_scan_of_large_values(self, users: Namespace) -> None:
        rows = {b"%02d" % index: bytes([index]) * 400_000 for index in range(40)}
        users.put_many(rows)
        check_rows(users.scan(), rows.items())
        check_rows(users.scan(reverse=True), reversed(rows.items()))

    # Records

    def test_records_are_the_pairs_of_a_scan_with_their_versions_and_partitions(
        self, site: Site, users: Namespace
    ) -> None:
        fill(users, 20_000)
        left, right = site.split("users", b"key-01000")
        last = users.put(b"key-00999", b"later")
        batches = list(records(users, last))
        check_rows(rows_of(batches), users.scan(at=last))
        table = pyarrow.Table.from_batches(batches, RECORDS)
        check_rows(table.column("partition").to_pylist(), [left] * 1_000 + [right] * 19_000)
        assert table.column("version")[999].as_py() == last

    def test_dead_records_come_if_they_are_wanted(self, users: Namespace, time: SimulatedTime) -> None:
        users.put(b"ada", b"countess")
        users.put(b"bob", b"builder", ttl=5)
        deleted = users.delete(b"ada")
        assert rows_of(records(users, deleted)) == [(b"bob", b"builder")]
        time.advance(10_000)
        later = users.put(b"cleo", b"queen")
        assert rows_of(records(users, later)) == [(b"cleo", b"queen")]
        table = pyarrow.Table.from_batches(list(records(users, later, dead=True)), RECORDS)
        assert table.column("key").to_pylist() == [b"ada", b"bob", b"cleo"]
        columns = split_values(table.column("value").combine_chunks())
        assert columns.deleted.to_pylist() == [True, False, False]
        assert columns.values.to_pylist() == [b"", b"builder", b"queen"]
        assert [moment is None for moment in columns.expires_at.to_pylist()] == [True, False, True]

    def test_digests_of_values_come_in_their_place(self, users: Namespace) -> None:
        rows = {b"%d" % length: bytes(length) for length in (0, 1, 31, 32, 100_000)}
        users.put_many(rows)
        version = users.put(b"9", b"nine")
        batches = list(records(users, version, content=Content.DIGESTS))
        assert sum(batch.nbytes for batch in batches) < 1_000
        table = pyarrow.Table.from_batches(batches, RECORDS_WITH_DIGESTS)
        expected = {key: hash_bytes(value, SEED) for key, value in {**rows, b"9": b"nine"}.items()}
        digests = [digest % (1 << 64) for digest in table.column("digest").to_pylist()]
        assert dict(zip(table.column("key").to_pylist(), digests, strict=True)) == expected

    def test_records_across_splits_and_merges_come_once(self, site: Site, users: Namespace) -> None:
        chance = Random(3)
        expected = list(fill(users, 30_000).items())
        reshape(site, chance, 4)
        found: list[tuple[bytes, bytes]] = []
        for batch in records(users, site._host.versions.read_version()):
            found += rows_of([batch])
            reshape(site, chance, 2)
            users.put(b"key-%05d" % chance.randrange(30_000), b"later")
        check_rows(found, expected)

    # One moment

    def test_scan_shows_the_moment_of_its_call(self, users: Namespace) -> None:
        rows = fill(users, 2_100)
        begun, not_begun = users.scan(), users.scan(reverse=True)
        first = next(begun)
        users.put_many(dict.fromkeys(rows, b"later"))
        users.put(b"key-00000x", b"later")
        users.delete_range(b"key-01000")
        check_rows([first, *begun], rows.items())
        check_rows(not_begun, reversed(rows.items()))

    @pytest.mark.parametrize("seed", range(2))
    @pytest.mark.parametrize("reverse", [False, True])
    def test_scan_across_splits_and_merges_sees_each_row_once(
        self, site: Site, users: Namespace, seed: int, reverse: bool
    ) -> None:
        chance = Random(seed)
        expected = sorted(fill(users, 3_300).items(), reverse=reverse)
        reshape(site, chance, 4)
        rows = users.scan(reverse=reverse)
        found = []
        for number, row in enumerate(rows):
            found.append(row)
            if number % 300 == 0:
                reshape(site, chance, 2)
                users.put(b"key-%05d" % chance.randrange(3_300), b"later")
        check_rows(found, expected)

    # What a reader needs is held from the call on

    @pytest.mark.parametrize("split", [False, True], ids=["one partition", "three partitions"])
    @pytest.mark.parametrize("begun", [False, True])
    def test_open_scan_keeps_what_it_has_to_read(
        self, site: Site, users: Namespace, time: SimulatedTime, split: bool, begun: bool
    ) -> None:
        rows = fill(users, 2_500, b"old" * 300)
        if split:
            site.split("users", b"key-00800")
            site.split("users", b"key-01600")
        for reverse in (False, True):
            expected = sorted(rows.items(), reverse=reverse)
            scan = users.scan(reverse=reverse)
            found = [next(scan)] if begun else []
            users.put_many(dict.fromkeys(rows, b"new"))
            users.delete_range()
            age(site, time)
            check_rows([*found, *scan], expected)
            users.put_many(rows)

    def test_scan_of_a_past_version_keeps_it_from_the_call_on(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        version = users.put(b"ada", b"countess")
        users.put(b"ada", b"programmer")
        rows = users.as_of(version).scan()
        age(site, time)
        assert list(rows) == [(b"ada", b"countess")]

    @pytest.mark.parametrize("end", ["closed", "forgotten", "read"])
    def test_scan_that_has_ended_keeps_nothing(
        self, site: Site, users: Namespace, time: SimulatedTime, end: str
    ) -> None:
        fill(users, 2_500)
        rows = users.scan()
        next(rows)
        if end == "closed":
            rows.close()  # type: ignore[attr-defined]
        elif end == "read":
            assert len(list(rows)) == 2_499
        del rows
        time.advance(2 * HOUR_MS)
        expected = (time() - HOUR_MS) << COUNTER_BITS

        def let_go() -> bool:
            site.collect_garbage()
            return oldest(site) == expected

        wait_until(let_go, "the scan still holds its version")

    # The past

    def test_every_version_can_be_read(self, users: Namespace) -> None:
        first = users.put(b"ada", b"countess")
        second = users.put_many({b"ada": b"programmer", b"bob": b"builder"})
        third = users.delete(b"ada")
        past: list[tuple[int, dict[bytes, bytes]]] = [
            (first - 1, {}),
            (first, {b"ada": b"countess"}),
            (second, {b"ada": b"programmer", b"bob": b"builder"}),
            (third, {b"bob": b"builder"}),
        ]
        for version, rows in past:
            view = users.as_of(version)
            assert type(view) is View
            assert view.version == version
            assert repr(view) == f"View('users', version={version})"
            keys = [b"bob", b"ada", b"nobody"]
            for get_many in (view.get_many, lambda keys, at=version: users.get_many(keys, at=at)):
                assert get_many(keys) == [rows.get(key) for key in keys]
            assert [view.get(key) for key in keys] == [rows.get(key) for key in keys]
            assert [users.get(key, at=version) for key in keys] == [rows.get(key) for key in keys]
            assert list(view.scan()) == list(users.scan(at=version)) == sorted(rows.items())
            assert list(view.scan(b"b", b"c", limit=1, reverse=True)) == [
                row for row in rows.items() if row[0] == b"bob"
            ]
            assert list(view.scan(prefix=b"a")) == [row for row in rows.items() if row[0] == b"ada"]
            record = view.record(b"ada")
            assert record == users.record(b"ada", at=version)
            assert (record and record.value) == rows.get(b"ada")

    def test_moments_name_versions(self, users: Namespace, time: SimulatedTime) -> None:
        first = users.put(b"ada", b"1")
        users.put(b"ada", b"2")
        time.advance(10)
        last = users.put(b"ada", b"3")
        moment = moment_of(first)
        assert isinstance(moment, datetime)
        # All that was written in a moment's millisecond belongs to it.
        assert users.get(b"ada", at=moment) == b"2"
        assert users.get(b"ada", at=moment + timedelta(milliseconds=9)) == b"2"
        assert users.get(b"ada", at=moment_of(last)) == b"3"
        assert users.get(b"ada", at=moment - timedelta(milliseconds=1)) is None
        assert users.as_of(moment).version == version_at(moment)
        assert list(users.scan(at=moment)) == [(b"ada", b"2")]

    def test_expiry_is_judged_at_the_version_that_is_read(
        self, users: Namespace, time: SimulatedTime
    ) -> None:
        version = users.put(b"ada", b"countess", ttl=5)
        time.advance(10_000)
        later = users.put(b"bob", b"builder")
        assert users.get(b"ada", at=version) == b"countess"
        assert users.get(b"ada", at=later) is None
        assert list(users.scan(at=version)) == [(b"ada", b"countess")]
        assert list(users.scan(at=later)) == [(b"bob", b"builder")]

    def test_version_in_the_future_is_refused(self, users: Namespace, time: SimulatedTime) -> None:
        users.put(b"ada", b"countess")
        for at in (compose(time() + SKEW_MS + 1, 0), (1 << 64) - 1):
            for read in reads_at(users, at):
                error = refused(VersionInFuture, read, version=at)
                assert "lies in the future of this site" in str(error)
        for read in reads_at(users, compose(time() + SKEW_MS, 0)):
            read()

    def test_version_that_was_collected_is_refused(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        version = users.put(b"ada", b"countess")
        site.split("users", b"m")
        age(site, time)
        kept = oldest(site)
        assert kept == (time() - HOUR_MS) << COUNTER_BITS
        for at in (version, kept - 1):
            for read in reads_at(users, at):
                error = refused(VersionCollected, read, version=at, oldest=kept)
                assert "was collected; the oldest that can" in str(error)
        assert users.get(b"ada", at=kept) == b"countess"

    def test_range_without_rows_at_a_collected_version_is_refused_as_well(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        version = users.put(b"ada", b"countess")
        age(site, time)
        for read in (
            lambda: users.scan(b"b", at=version),
            lambda: users.scan(b"b", b"b", at=version),
            lambda: users.scan(b"b", prefix=b"a", at=version),
            lambda: users.scan(limit=0, at=version),
        ):
            refused(VersionCollected, read, version=version, oldest=oldest(site))


def reads_at(users: Namespace, at: int) -> list[Callable[[], object]]:
    """Every way to read a namespace at a version."""
    return [
        lambda: users.get(b"ada", at=at),
        lambda: users.get_many([b"zoe", b"ada"], at=at),
        lambda: users.record(b"ada", at=at),
        lambda: users.as_of(at).get(b"ada"),
        lambda: list(users.scan(at=at)),
        lambda: list(users.scan(at=at, reverse=True)),
        lambda: list(records(users, at)),
    ]


def records(users: Namespace, at: Version, **options: Any) -> Iterator[pyarrow.RecordBatch]:
    """The records of a namespace as columns."""
    start = encode_namespace(users.id)
    return users.host.router.scan_records(KeyRange(start, prefix_end(start)), at, **options)


def rows_of(batches: Iterable[pyarrow.RecordBatch]) -> list[tuple[bytes, bytes]]:
    """The keys and values of records, as users see them."""
    return [
        row
        for batch in batches
        for row in zip(
            batch.column("key").to_pylist(),
            split_values(batch.column("value")).values.to_pylist(),
            strict=True,
        )
    ]


def reshape(site: Site, chance: Random, times: int = 1) -> None:
    """Split and merge the partitions of `users`, whose keys are those of `fill`, at random."""
    for _ in range(times):
        ids = [partition.id for partition in site.partitions()]
        if len(ids) > 1 and chance.random() < 0.5:
            index = chance.randrange(len(ids) - 1)
            site.merge(ids[index], ids[index + 1])
        else:
            try:
                site.split("users", b"key-%05d" % chance.randrange(3_300))
            except PartitionNotFound:
                # It is cut there already.
                continue

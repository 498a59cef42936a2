"""The site's contract: streams of writes."""

from concurrent.futures import Future
from contextlib import closing
from datetime import timedelta
from itertools import islice
from typing import Final

import pytest
from tests.contracts.site.base import SiteContractBase, check_rows, refused
from tests.contracts.site.writes import COMMITS

from floodmark.model.change import Change
from floodmark.model.errors import Closed, InvalidArgument, InvalidKey, InvalidValue, StorageFailed
from floodmark.model.limits import MIB, VALUE_BYTES_MAX
from floodmark.model.version import Version
from floodmark.partition import FAMILIES
from floodmark.site import Namespace, Site, Writer
from floodmark.testing.clock import SimulatedTime
from floodmark.testing.engine import Fault, FaultPlan, FaultyEngine

HANG_SECONDS: Final = 600.0


class Interrupted(Exception):
    """What goes wrong in a block that has nothing to do with the site."""


def write(writer: Writer, *keys: bytes) -> None:
    """Put some keys, and wait until they are written."""
    for key in keys:
        writer.put(key, b"x")
    writer.flush()


def write_and_fail(writer: Writer, *keys: bytes) -> None:
    """Put some keys in a block that does not get to its end."""
    with writer:
        for key in keys:
            writer.put(key, b"x")
        raise Interrupted


class WriterContract(SiteContractBase):
    """Batches on their way, committed in order and acknowledged in order."""

    @pytest.fixture(autouse=True)
    def _no_linger(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let no batch be sent by time, however slowly a test is run."""
        monkeypatch.setattr("floodmark.site.writer.LINGER_SECONDS", HANG_SECONDS)

    def test_a_batch_that_is_not_full_is_sent_by_itself(
        self, site: Site, users: Namespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("floodmark.site.writer.LINGER_SECONDS", 0.01)
        followed = site.changes("users", since="now", follow=True, resolved_markers=True)
        with closing(users.writer()) as writer:
            writer.put(b"ada", b"1")
            # The markers come also while nothing is written, so that waiting has an end.
            assert any(isinstance(item, Change) for item in islice(followed, 500))
            writer.put(b"bob", b"2")
            assert any(isinstance(item, Change) for item in islice(followed, 500))
        assert writer.acknowledged == 2

    def test_an_error_of_a_batch_that_was_sent_by_itself_is_told_at_the_next_call(
        self, users: Namespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writer = users.writer()
        writer.put(b"ada", b"1")

        def fail(_: object) -> Future[Version]:
            raise StorageFailed("it rains")

        monkeypatch.setattr(writer._stream, "send", fail)
        writer.send_if_left(0)
        for call in (lambda: writer.put(b"bob", b"2"), writer.flush):
            refused(StorageFailed, call)
        writer.close()
        assert writer.acknowledged == 0

    def test_everything_is_written_when_the_block_has_ended(self, users: Namespace) -> None:
        rows = {b"key-%05d" % index: b"%d" % index for index in range(3_210)}
        with users.writer() as writer:
            assert type(writer) is Writer
            for key, value in rows.items():
                writer.put(key, value)
        check_rows(users.scan(), rows.items())
        assert writer.acknowledged == len(rows)

    def test_writes_are_committed_in_their_order(self, site: Site, users: Namespace) -> None:
        written = []
        with users.writer(batch_records=2) as writer:
            for index in range(101):
                key, value = b"key-%d" % (index % 3), b"%d" % index
                writer.put(key, value)
                written.append((key, value))
        found = [(change.key, change.value) for change in site.changes("users")]
        # Batches in their order; within a commit, changes stand in order of keys.
        pairs = [sorted(written[index : index + 2]) for index in range(0, 101, 2)]
        assert found == [pair for batch in pairs for pair in batch]
        assert writer.acknowledged == 101

    def test_batch_is_one_commit_and_its_version_is_told(self, site: Site, users: Namespace) -> None:
        with users.writer(batch_records=10) as writer:
            for index in range(35):
                writer.put(b"%02d" % index, b"x")
        versions = [change.version for change in site.changes("users")]
        assert [versions.count(version) for version in sorted(set(versions))] == [10, 10, 10, 5]
        assert writer.version == max(versions)

    def test_batches_are_divided_among_partitions(self, site: Site, users: Namespace) -> None:
        site.split("users", b"m")
        with users.writer(batch_records=4) as writer:
            for index in range(20):
                writer.put(b"%c%d" % (b"az"[index % 2], index), b"x")
        assert writer.acknowledged == len(list(users.scan())) == 20

    def test_flush_returns_when_everything_so_far_is_written(self, users: Namespace) -> None:
        with users.writer() as writer:
            assert writer.flush() == 0
            writer.put(b"ada", b"countess")
            version = writer.flush()
            record = users.record(b"ada")
            assert record is not None
            assert record.version == version == writer.version
            assert writer.acknowledged == 1
            writer.delete(b"ada")
            assert writer.flush() > version
            assert users.get(b"ada") is None
            assert writer.acknowledged == 2

    def test_of_a_key_that_comes_twice_in_a_batch_the_last_counts(self, site: Site, users: Namespace) -> None:
        with users.writer() as writer:
            writer.put(b"ada", b"1")
            writer.delete(b"ada")
            writer.put(b"ada", b"2")
            writer.put(b"bob", b"3")
            writer.delete(b"bob")
        assert list(users.scan()) == [(b"ada", b"2")]
        assert writer.acknowledged == 5
        assert len(list(site.changes("users"))) == 2

    def test_large_values_are_written(self, users: Namespace) -> None:
        value = bytes(VALUE_BYTES_MAX)
        with users.writer() as writer:
            for index in range(20):
                writer.put(b"%02d" % index, value)
        assert writer.acknowledged == 20
        assert sum(len(value) for _, value in users.scan()) == 20 * MIB

    def test_nothing_written_is_nothing_done(self, site: Site, users: Namespace) -> None:
        with users.writer() as writer:
            pass
        assert (writer.acknowledged, writer.version) == (0, 0)
        assert list(site.changes("users")) == []

    def test_times_to_live_are_those_of_the_namespace_or_of_the_write(
        self, site: Site, time: SimulatedTime
    ) -> None:
        brief = site.create_namespace("brief", ttl=timedelta(seconds=10))
        with brief.writer() as writer:
            writer.put(b"usual", b"x")
            writer.put(b"longer", b"x", ttl=100)
        time.advance(11_000)
        assert [key for key, _ in brief.scan()] == [b"longer"]

    # The end

    def test_block_that_ends_with_an_error_leaves_out_what_was_not_sent(
        self, site: Site, users: Namespace
    ) -> None:
        writer = users.writer(batch_records=2)
        with pytest.raises(Interrupted):
            write_and_fail(writer, b"a", b"b", b"c")
        assert [key for key, _ in users.scan()] == [b"a", b"b"]
        assert writer.acknowledged == 2
        assert len(list(site.changes("users"))) == 2

    def test_closed_writer_takes_nothing_more(self, users: Namespace) -> None:
        writer = users.writer()
        writer.put(b"ada", b"countess")
        writer.close()
        writer.close()
        assert users.get(b"ada") == b"countess"
        for ask in (
            lambda: writer.put(b"bob", b"builder"),
            lambda: writer.delete(b"ada"),
            writer.flush,
        ):
            assert "open another one with namespace.writer()" in str(refused(Closed, ask))
        assert [key for key, _ in users.scan()] == [b"ada"]

    # Errors

    def test_bad_record_is_refused_and_the_writer_goes_on(self, users: Namespace) -> None:
        large = bytes(VALUE_BYTES_MAX + 1)
        with users.writer() as writer:
            writer.put(b"ada", b"countess")
            refused(InvalidKey, lambda: writer.put(b"", b"x"))
            refused(InvalidKey, lambda: writer.delete(b""))
            refused(InvalidValue, lambda: writer.put(b"bob", large), key=b"bob", size=len(large))
            writer.put(b"carl", b"composer")
        assert writer.acknowledged == 2
        assert [key for key, _ in users.scan()] == [b"ada", b"carl"]

    def test_batches_have_at_least_one_record(self, users: Namespace) -> None:
        for batch_records in (0, -1, True, 1.5, "9", None):
            wrong: object = batch_records
            refused(InvalidArgument, lambda wrong=wrong: users.writer(batch_records=wrong))  # type: ignore[misc]

    def test_batch_that_fails_is_told_and_those_before_it_are_counted(self, time: SimulatedTime) -> None:
        engine = FaultyEngine(FAMILIES)
        with self.open_on(engine, time) as site:
            users = site.create_namespace("users")
            writer = users.writer(batch_records=2)
            writer.put(b"a", b"1")
            writer.put(b"b", b"1")
            writer.flush()
            engine.arm(FaultPlan(at=1, kind=Fault.TRANSIENT, counts=COMMITS))
            # It is told by the put that makes the batch full or by what follows, and again to everyone
            # who goes on.
            for ask in (lambda: write(writer, b"c", b"d"), writer.flush, lambda: writer.put(b"e", b"3")):
                assert str(refused(StorageFailed, ask)) == "planned: write, operation 1, failed"
                assert writer.acknowledged == 2
            writer.close()
            assert [key for key, _ in users.scan()] == [b"a", b"b"]
            assert writer.acknowledged == 2

    def test_error_of_the_last_batch_is_raised_at_the_end_of_the_block(self, time: SimulatedTime) -> None:
        engine = FaultyEngine(FAMILIES)
        with self.open_on(engine, time) as site:
            users = site.create_namespace("users")
            engine.arm(FaultPlan(at=1, kind=Fault.TRANSIENT, counts=COMMITS))
            with pytest.raises(StorageFailed), users.writer() as writer:
                writer.put(b"ada", b"countess")
            assert writer.acknowledged == 0
            assert list(users.scan()) == []

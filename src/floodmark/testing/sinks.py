"""The contract of sinks as tests, and a sink in memory for the tests of feeds.

    class TestMySink(SinkContract):
        @pytest.fixture
        def subject(self, tmp_path):
            return MySubject(tmp_path)

A subject opens sinks and reads back what they hold; `keeps` says what can be expected of that.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from threading import Condition
from typing import Final, NamedTuple, Protocol

import pytest

from floodmark.feed.sinks.base import Sink, SinkContext
from floodmark.model.change import Change, ChangeType, Stamp
from floodmark.model.errors import Closed
from floodmark.model.limits import MIB
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version, compose

SITE: Final = 7
SINCE: Final = compose(1_700_000_000_000, 0)
# Later than any time in a test, so a record that expires then is live.
EXPIRES_AT: Final = 4_000_000_000
ALL_KEYS: Final = KeyRange()

HANG_SECONDS: Final = 60.0


class Keeps(Enum):
    """Which of the changes written to it a sink keeps."""

    NOTHING = auto()
    EVERY_DELIVERY = auto()
    """What is delivered twice is there twice."""

    EVERY_CHANGE = auto()
    """What is delivered twice is there once."""


class Delivered(NamedTuple):
    """A change as it is read back from a sink."""

    key: bytes
    value: bytes | None
    stamp: Stamp
    expires_at: int | None = None


class Subject(Protocol):
    """A kind of sink under test."""

    keeps: Keeps

    def open(self, context: SinkContext) -> Sink:
        """Open a sink for a range."""
        ...

    def read(self) -> list[Delivered]:
        """The changes that all sinks together hold, those of each key in the order for readers."""
        ...


def change(
    number: int, key: bytes, value: bytes | None = b"value", *, expires_at: int | None = None
) -> Change:
    """The change at the version `SINCE + number`."""
    return Change(
        namespace="users",
        key=key,
        value=value,
        type=ChangeType.DELETE if value is None else ChangeType.UPSERT,
        version=SINCE + number,
        stamp=Stamp(SINCE + number, SITE),
        partition=65,
        expires_at=expires_at,
    )


def context(
    since: int = 0, *, range_id: int = 1, keys: KeyRange = ALL_KEYS, feed: str = "copy"
) -> SinkContext:
    """The context of a range of a feed that begins at the version `SINCE + since`."""
    return SinkContext(
        site="oslo", feed=feed, namespace="users", range_id=range_id, keys=keys, since=SINCE + since
    )


def delivered(changes: Iterable[Change]) -> list[Delivered]:
    """Changes as they should be read back."""
    return [Delivered(each.key, each.value, each.stamp, each.expires_at) for each in changes]


def write(sink: Sink, changes: Sequence[Change], *, since: int, through: int) -> None:
    """Write and flush a batch of the changes in `(since, through]`."""
    inside = [each for each in changes if SINCE + since < each.version <= SINCE + through]
    if inside:
        sink.write(inside, since=SINCE + since, through=SINCE + through)
        sink.flush()


class SinkContract:
    """The contract of `floodmark.feed.sinks.Sink`, sentence by sentence."""

    def read(self, subject: Subject) -> list[Delivered]:
        """The changes that the sinks hold; skips the test if the sink cannot be read back."""
        if subject.keeps is Keeps.NOTHING:
            pytest.skip("this sink keeps nothing")
        return subject.read()

    def read_sorted(self, subject: Subject) -> list[Delivered]:
        """The changes that the sinks hold, in the order in which they were first written."""
        return sorted(self.read(subject), key=lambda each: each.stamp)

    def test_what_was_flushed_is_there(self, subject: Subject) -> None:
        changes = [change(1, b"a"), change(2, b"b", b"other"), change(3, b"c")]
        sink = subject.open(context())
        write(sink, changes, since=0, through=3)
        assert self.read_sorted(subject) == delivered(changes)
        sink.close()
        assert self.read_sorted(subject) == delivered(changes)

    def test_batches_follow_each_other(self, subject: Subject) -> None:
        changes = [change(number, b"key %d" % number) for number in range(1, 10)]
        sink = subject.open(context())
        for since, through in ((0, 4), (4, 5), (5, 9)):
            write(sink, changes, since=since, through=through)
        sink.close()
        assert self.read_sorted(subject) == delivered(changes)

    def test_the_changes_of_a_key_keep_their_order(self, subject: Subject) -> None:
        changes = [
            change(1, b"a", b"1"),
            change(2, b"a", None),
            change(3, b"b", b"2"),
            change(4, b"a", b"3"),
            change(5, b"b", None),
            change(6, b"a", b"4"),
        ]
        sink = subject.open(context())
        write(sink, changes, since=0, through=4)
        write(sink, changes, since=4, through=6)
        sink.close()
        held = self.read(subject)
        for key in (b"a", b"b"):
            of_key = [each for each in delivered(changes) if each.key == key]
            assert [each for each in held if each.key == key] == of_key

    @pytest.mark.parametrize("flushed", [False, True])
    def test_what_is_delivered_again_does_no_harm(self, subject: Subject, flushed: bool) -> None:
        changes = [change(number, b"key %d" % (number % 4)) for number in range(1, 13)]
        first = subject.open(context())
        write(first, changes, since=0, through=3)
        write(first, changes, since=3, through=7)
        if flushed:
            write(first, changes, since=7, through=10)
        else:
            first.write(changes[7:10], since=SINCE + 7, through=SINCE + 10)
        first.close()
        # The checkpoint is only at 3, and now the batches have other ends.
        second = subject.open(context(3))
        write(second, changes, since=3, through=5)
        write(second, changes, since=5, through=12)
        second.close()
        held = self.read(subject)
        assert set(held) == set(delivered(changes))
        if subject.keeps is Keeps.EVERY_CHANGE:
            assert len(held) == len(changes)

    def test_going_on_keeps_what_is_there(self, subject: Subject) -> None:
        changes = [change(number, b"key %d" % number) for number in range(1, 7)]
        first = subject.open(context())
        write(first, changes, since=0, through=3)
        first.close()
        second = subject.open(context(3))
        write(second, changes, since=3, through=6)
        second.close()
        assert self.read_sorted(subject) == delivered(changes)

    def test_ranges_work_side_by_side(self, subject: Subject) -> None:
        changes = [change(number, b"%c" % (97 + number % 2)) for number in range(1, 9)]
        low, high = KeyRange(b"", b"b"), KeyRange(b"b", None)
        sinks = [
            (subject.open(context(range_id=number, keys=keys)), keys)
            for number, keys in enumerate((low, high), start=1)
        ]
        for since, through in ((0, 4), (4, 8)):
            for sink, keys in sinks:
                inside = [each for each in changes if keys.contains(each.key)]
                write(sink, inside, since=since, through=through)
        for sink, _ in sinks:
            sink.close()
        assert self.read_sorted(subject) == delivered(changes)

    def test_all_bytes_come_through(self, subject: Subject) -> None:
        changes = [
            change(1, b"\x00", b""),
            change(2, bytes(range(256)), bytes(range(256))),
            change(3, "ключ\n\t".encode(), "значение\r\n\x00".encode()),
            change(4, b"\xff" * 300, b"\xff"),
            change(5, b"large", bytes(MIB)),
            change(6, b"expires", b"soon", expires_at=EXPIRES_AT),
        ]
        sink = subject.open(context())
        write(sink, changes, since=0, through=6)
        sink.close()
        assert self.read_sorted(subject) == delivered(changes)

    def test_a_large_batch_is_taken(self, subject: Subject) -> None:
        changes = [change(number, b"key %06d" % number, b"v" * 500) for number in range(1, 20_001)]
        sink = subject.open(context())
        write(sink, changes, since=0, through=20_000)
        sink.close()
        assert self.read_sorted(subject) == delivered(changes)

    def test_closing_twice_is_harmless_and_writing_after_it_is_refused(self, subject: Subject) -> None:
        sink = subject.open(context())
        sink.close()
        sink.close()
        with pytest.raises(Closed):
            sink.write([change(1, b"a")], since=SINCE, through=SINCE + 1)

    def test_a_sink_that_is_closed_at_once_leaves_nothing(self, subject: Subject) -> None:
        subject.open(context()).close()
        assert self.read(subject) == []


class MemorySinks:
    """Opens sinks that keep what is flushed to them in memory, in the order of the flushes.

    `before` is called with the name of each operation ("open", "write", "flush", "close") and the range's
    id; it may wait, or raise to make the operation fail.
    """

    keeps = Keeps.EVERY_DELIVERY

    def __init__(self, before: Callable[[str, int], None] = lambda *_: None) -> None:
        self.before = before
        self.changes: list[Change] = []
        self.contexts: list[SinkContext] = []
        # By range, the version up to which it has been flushed.
        self.through: dict[int, Version] = {}
        self._changed = Condition()

    def open(self, context: SinkContext) -> Sink:
        """Open a sink for a range."""
        self.before("open", context.range_id)
        with self._changed:
            self.contexts.append(context)
            self._changed.notify_all()
        return _MemorySink(self, context)

    def open_uri(self, _uri: str, context: SinkContext) -> Sink:
        """Open a sink in the place of `floodmark.feed.sinks.open_sink`."""
        return self.open(context)

    def read(self) -> list[Delivered]:
        """The flushed changes."""
        return delivered(self.changes)

    def keep(self, range_id: int, changes: Sequence[Change], through: Version) -> None:
        """Add the changes that a sink has flushed."""
        with self._changed:
            self.changes += changes
            self.through[range_id] = through
            self._changed.notify_all()

    def wait_until(self, condition: Callable[["MemorySinks"], bool]) -> None:
        """Wait until a condition holds.  It is checked after each opening and each flush."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), HANG_SECONDS), "it never came to that"


class _MemorySink:
    def __init__(self, sinks: MemorySinks, context: SinkContext) -> None:
        self._sinks = sinks
        self._range_id = context.range_id
        self._written: list[Change] = []
        self._through = context.since
        self._closed = False

    def write(self, changes: Sequence[Change], *, since: Version, through: Version) -> None:
        if self._closed:
            raise Closed("the sink was closed")
        self._sinks.before("write", self._range_id)
        assert changes, "a batch without changes need not be written"
        assert since >= self._through, "batches come in order"
        assert all(since < change.version <= through for change in changes)
        self._written += changes
        self._through = through

    def flush(self) -> None:
        self._sinks.before("flush", self._range_id)
        self._sinks.keep(self._range_id, self._written, self._through)
        self._written = []

    def close(self) -> None:
        self._sinks.before("close", self._range_id)
        self._closed = True

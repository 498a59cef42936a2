"""Objects and their states over time, in the time that their users give (valid time).

    name | 0 | ~valid from: 8      valid to: 8 | state

Times are microseconds since 1970, offset so that they sort as unsigned numbers; the highest number stands for
"still".  Spans are stored newest first, so that the span at a moment is the first one at or after a key.

The spans `[from, to)` of an object do not overlap.  A state holds from its time to the next known change: a
change that arrives late cuts the span that it falls into.  Adjacent spans with equal bytes are joined, and
the moment between them is not kept.  Two sites that change one object concurrently may leave rows that
overlap: whatever a row says, its span ends where the next one begins.

The change log is an ordered log in a namespace of its own.  An entry is written with the change:

    name | 0 | from: 8 | 1, or 0 for the end of a state | state
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, islice, pairwise
from typing import Any, Final, Generic, NamedTuple, TypeVar

from floodmark.codec.objects import Codec, CodecName, find_codec
from floodmark.feed import at_present
from floodmark.layers.ordered_log import LogPosition, OrderedLog
from floodmark.layers.ports import LayerSite, LayerTransaction, claim, present
from floodmark.model.errors import InvalidArgument, InvalidKey, InvalidRange, InvalidValue
from floodmark.model.limits import KEY_BYTES_MAX
from floodmark.model.version import Version, physical_ms

OBJECT_HISTORY: Final = b"object history 1"

_TIME_BYTES: Final = 8
_GIVEN: Final = (b"\x00", b"\x01")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_OFFSET: Final = 1 << 63
_STILL: Final = (1 << 64) - 1
# After the row with the name of the layer, and before all names of objects.
_NAMES: Final = b"\x01"
_ABSENT: Final = object()

State = TypeVar("State")


@dataclass(frozen=True)
class StateSpan(Generic[State]):
    """A state that held from `valid_from` to `valid_to`, exclusive; `valid_to` is None if it still holds."""

    valid_from: datetime
    valid_to: datetime | None
    state: State


@dataclass(frozen=True)
class StateDifference(Generic[State]):
    """The states of an object at two moments; None where there was none."""

    before: State | None
    after: State | None

    @property
    def fields(self) -> dict[str, tuple[Any, Any]]:
        """The fields of JSON objects that differ, with both values; None where a field is absent."""
        old, new = _fields(self.before), _fields(self.after)
        differing = [name for name in {**old, **new} if old.get(name, _ABSENT) != new.get(name, _ABSENT)]
        return {name: (old.get(name), new.get(name)) for name in differing}


@dataclass(frozen=True)
class StateChange(Generic[State]):
    """A change by `set`: the state from a moment on; or by `end`, with None as the state."""

    name: str
    valid_from: datetime
    state: State | None


class _Row(NamedTuple):
    """A span as stored."""

    start: int
    end: int
    state: bytes


class ObjectHistory(Generic[State]):
    """The states of objects over time, in a namespace of their own.  Safe to use from many threads.

    Each object should be written at one site.  If two sites change it concurrently, each change holds up to
    the next one, but a change to the end of the same span, such as an `end`, can be lost.

    With `max_age` or `max_states`, each `set` removes the spans of its object that ended longer ago than
    `max_age`, and all but the newest `max_states`; `trim` does so for all objects.

    >>> import floodmark, tempfile
    >>> from datetime import datetime, timezone
    >>> from floodmark.layers import ObjectHistory
    >>> noon, later = (datetime(2026, 1, 31, hour, tzinfo=timezone.utc) for hour in (12, 15))
    >>> with floodmark.open(tempfile.mkdtemp(), site="oslo") as site:
    ...     devices = ObjectHistory(site, "devices")
    ...     _ = devices.set("router-1", {"up": False}, at=later)
    ...     _ = devices.set("router-1", {"up": True}, at=noon)
    ...     devices.at("router-1", noon), devices.diff("router-1", noon, later).fields
    ({'up': True}, {'up': (True, False)})
    """

    def __init__(
        self,
        site: LayerSite,
        name: str,
        *,
        codec: CodecName | Codec[State] = "json",
        max_age: timedelta | None = None,
        max_states: int | None = None,
        change_log: str | None = None,
    ) -> None:
        coder = find_codec(codec)
        if coder is None:
            raise InvalidArgument("an object history needs a codec: json, text or a floodmark.Codec")
        if max_age is not None and max_age < timedelta(0):
            raise InvalidArgument(f"max_age is a duration, not {max_age}")
        if max_states is not None and max_states < 1:
            raise InvalidArgument(f"an object has at least one state, not max_states={max_states!r:.60}")
        self._codec: Codec[State] = coder
        # The changes, in commit order.
        self.change_log = None if change_log is None else OrderedLog(site, change_log)
        self._max_age = max_age
        self._max_states = max_states
        self._site = site
        # The namespace that holds the rows of the layer.
        self.stored = claim(site, name, OBJECT_HISTORY)

    @property
    def name(self) -> str:
        """The name of the namespace."""
        return self.stored.name

    def __repr__(self) -> str:
        return f"ObjectHistory({self.name!r})"

    # Reads

    def at(self, name: str, moment: datetime) -> State | None:
        """The state of an object at a moment; None if it had none."""
        time, prefix = _micros(moment), _prefix(name)
        found = self.stored.first(prefix + _from(time), _after(prefix))
        if found is None or (row := _read(*found)).end <= time:
            return None
        return self._decode(name, row.state)

    def history(
        self, name: str, since: datetime | None = None, until: datetime | None = None
    ) -> Iterator[StateSpan[State]]:
        """The spans of an object that overlap `[since, until)`, in order, as of one version."""
        prefix = _prefix(name)
        first = 0 if since is None else _micros(since)
        last = _STILL if until is None else _micros(until)
        if last < first:
            raise InvalidRange(f"until {until} lies before since {since}")

        def read(version: Version) -> Iterator[tuple[bytes, bytes]]:
            end = prefix + _from(first)
            # The span that contains `first` is the last one to return.
            for key, _ in self.stored.scan(end, _after(prefix), limit=1, at=version):
                end = key + b"\x00"
            behind = prefix + _from(last - 1)
            return chain(
                self.stored.scan(behind, end, reverse=True, at=version),
                self.stored.scan(prefix, behind, limit=1, reverse=True, at=version),
            )

        for row in _in_order(at_present(lambda: present(self._site), read) if first < last else ()):
            if row.start < last and row.end > first:
                yield self._span(name, row)

    def diff(self, name: str, before: datetime, after: datetime) -> StateDifference[State]:
        """The states of an object at two moments, and their fields that differ."""
        return StateDifference(self.at(name, before), self.at(name, after))

    def as_of(self, moment: datetime) -> "HistoryView[State]":
        """All objects as they were at a moment."""
        _micros(moment)
        return HistoryView(self, moment)

    def names(self, *, prefix: str = "") -> Iterator[str]:
        """The names of the objects that have a history, in order."""
        last = None
        for key, _ in self._rows(prefix):
            if (name := _name(key)) != last:
                yield name
                last = name

    def changes(
        self, since: LogPosition | Version | None = None, *, follow: bool = False, site: int | None = None
    ) -> Iterator[tuple[LogPosition, StateChange[State]]]:
        """The changes by `set` and `end`, in commit order, from the `change_log`.  See `OrderedLog.read`.

        Raises InvalidArgument without a change log.
        """
        if self.change_log is None:
            raise InvalidArgument(
                f"{self!r} has no change log; open it with change_log=, and a name for that"
            )
        for position, entry in self.change_log.read(since, follow=follow, site=site):
            encoded, _, rest = entry.partition(b"\x00")
            name, state = encoded.decode(), rest[_TIME_BYTES + 1 :]
            moment = _moment(int.from_bytes(rest[:_TIME_BYTES], "big"))
            yield (
                position,
                StateChange(name, moment, self._decode(name, state) if rest[_TIME_BYTES] else None),
            )

    def scan_at(self, moment: datetime, prefix: str = "") -> Iterator[tuple[str, State]]:
        """The objects with a state at a moment, and that state, in order of names.  Reads all spans."""
        time, last = _micros(moment), None
        for key, value in self._rows(prefix):
            row, name = _read(key, value), _name(key)
            # The newest of the spans that began by then; earlier ones end where it begins.
            if row.start > time or name == last:
                continue
            last = name
            if time < row.end:
                yield name, self._decode(name, row.state)

    # Writes

    def set(self, name: str, state: State, *, at: datetime) -> Version:
        """Set the state of an object from a moment on, until the next known change.

        Returns the version of the commit; 0 if the object was already in this state at that moment.
        """
        try:
            encoded = self._codec.encode(state)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidValue(f"the state of {name!r:.60} cannot be encoded: {error}", key=name) from error
        return self._change(name, encoded, _micros(at))

    def end(self, name: str, *, at: datetime) -> Version:
        """End the state of an object at a moment: it has none until the next known state."""
        return self._change(name, None, _micros(at))

    def trim(self) -> int:
        """Remove the spans that `max_age` and `max_states` exclude, of all objects; return their number."""
        return sum(
            self._site.run_transaction(lambda t, name=name: self._trim(t, _prefix(name)))  # type: ignore[misc]
            for name in self.names()
        )

    def _change(self, name: str, state: bytes | None, time: int) -> Version:
        prefix = _prefix(name)

        def change(transaction: LayerTransaction) -> LayerTransaction:
            if self._place(transaction, prefix, state, time) and self.change_log is not None:
                entry = b"".join(
                    (prefix, time.to_bytes(_TIME_BYTES, "big"), _GIVEN[state is not None], state or b"")
                )
                self.change_log.append(entry, transaction=transaction)
            self._trim(transaction, prefix)
            return transaction

        return self._site.run_transaction(change).version

    def _place(self, transaction: LayerTransaction, prefix: bytes, state: bytes | None, time: int) -> bool:
        """Cut the span around a moment, write the new one, and join it with equal neighbours.

        Returns whether that changes anything.
        """
        here = prefix + _from(time)
        before = [*transaction.scan(self.stored, here, _after(prefix), limit=2)]
        behind = [*transaction.scan(self.stored, prefix, here, limit=2, reverse=True)]
        rows = [*_in_order(chain(reversed(before), behind))]
        earlier, later = rows[: len(before)][::-1], rows[len(before) :]
        covering = earlier.pop(0) if earlier and earlier[0].end > time else None
        if (covering is None and state is None) or (covering is not None and covering.state == state):
            return False
        new = _Row(time, later[0].start if later else _STILL, state or b"")
        if covering is not None:
            new = new._replace(end=covering.end)
            self._remove(transaction, prefix, covering)
            if covering.start < time:
                self._write(transaction, prefix, covering._replace(end=time))
            elif state is None and earlier and earlier[0] != _read(*before[1]):
                # The row that cut it is gone.
                self._write(transaction, prefix, earlier[0])
        if state is None:
            return True
        if earlier and earlier[0].end == time and earlier[0].state == state:
            new = new._replace(start=earlier[0].start)
        if later and later[0].start == new.end and later[0].state == state:
            new = new._replace(end=later[0].end)
            self._remove(transaction, prefix, later[0])
        self._write(transaction, prefix, new)
        return True

    def _trim(self, transaction: LayerTransaction, prefix: bytes) -> int:
        """Remove the spans of an object that ended too long ago or are too many; return their number."""
        removed: set[_Row] = set()
        if self._max_age is not None:
            now = physical_ms(transaction.read_version) * 1_000
            horizon = _OFFSET + now - self._max_age // timedelta(microseconds=1)
            for row in _in_order(transaction.scan(self.stored, prefix, _after(prefix), reverse=True)):
                if row.end > horizon:
                    break
                removed.add(row)
        if self._max_states is not None:
            newest_first = transaction.scan(self.stored, prefix, _after(prefix))
            removed.update(_read(*pair) for pair in islice(newest_first, self._max_states, None))
        for row in removed:
            self._remove(transaction, prefix, row)
        return len(removed)

    def _write(self, transaction: LayerTransaction, prefix: bytes, row: _Row) -> None:
        end = row.end.to_bytes(_TIME_BYTES, "big")
        transaction.put(self.stored, prefix + _from(row.start), end + row.state)

    def _remove(self, transaction: LayerTransaction, prefix: bytes, row: _Row) -> None:
        transaction.delete(self.stored, prefix + _from(row.start))

    def _rows(self, prefix: str) -> Iterator[tuple[bytes, bytes]]:
        return self.stored.scan(prefix=prefix.encode()) if prefix else self.stored.scan(_NAMES)

    def _span(self, name: str, row: _Row) -> StateSpan[State]:
        end = None if row.end == _STILL else _moment(row.end)
        return StateSpan(_moment(row.start), end, self._decode(name, row.state))

    def _decode(self, name: str, state: bytes) -> State:
        try:
            return self._codec.decode(state)
        except (TypeError, ValueError) as error:
            raise InvalidValue(f"the state of {name!r:.60} cannot be decoded: {error}", key=name) from error


class HistoryView(Generic[State]):
    """All objects as they were at a moment.  Read-only."""

    def __init__(self, history: ObjectHistory[State], moment: datetime) -> None:
        self.moment = moment
        self._history = history

    def get(self, name: str) -> State | None:
        """The state of an object; None if it had none."""
        return self._history.at(name, self.moment)

    def scan(self, *, prefix: str = "") -> Iterator[tuple[str, State]]:
        """The objects with their states, in order of names.  It reads all spans of these names."""
        return self._history.scan_at(self.moment, prefix)


def _fields(state: object) -> Mapping[str, Any]:
    return state if isinstance(state, Mapping) else {}


def _prefix(name: str) -> bytes:
    """The prefix of an object's keys.  It ends with 0, so that no object's prefix begins another's."""
    if not isinstance(name, str) or not name or "\x00" in name:
        raise InvalidKey(f"an object's name is text without NUL, not {name!r:.60}", key=name)
    encoded = name.encode()
    if len(encoded) > KEY_BYTES_MAX - _TIME_BYTES - 1:
        raise InvalidKey(f"the name {name!r:.60} has {len(encoded):,} bytes; shorten it", key=name)
    return encoded + b"\x00"


def _after(prefix: bytes) -> bytes:
    """The end of the keys of an object."""
    return prefix[:-1] + b"\x01"


def _name(key: bytes) -> str:
    return key[: -_TIME_BYTES - 1].decode()


def _read(key: bytes, value: bytes) -> _Row:
    return _Row(
        _STILL - int.from_bytes(key[-_TIME_BYTES:], "big"),
        int.from_bytes(value[:_TIME_BYTES], "big"),
        value[_TIME_BYTES:],
    )


def _in_order(pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[_Row]:
    """The rows of an object, given in order of time, each ended at the latest where the next one begins."""
    rows: Iterator[_Row | None] = chain((_read(*pair) for pair in pairs), [None])
    for row, behind in pairwise(rows):
        if row is not None:
            yield row if behind is None else row._replace(end=min(row.end, behind.start))


def _from(time: int) -> bytes:
    """The encoding of a span's beginning in a key: later ones sort first."""
    return (_STILL - time).to_bytes(_TIME_BYTES, "big")


def _micros(moment: datetime) -> int:
    """A moment as a sortable number.  Raises InvalidArgument for one without a time zone."""
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise InvalidArgument(f"a moment is a datetime with a time zone, not {moment!r:.60}")
    since = moment - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds + _OFFSET


def _moment(time: int) -> datetime:
    return _EPOCH + timedelta(microseconds=time - _OFFSET)

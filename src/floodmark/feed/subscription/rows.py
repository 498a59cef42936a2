"""A subscription as it is stored: a row with all of it, and a small row for each change since.

    subscriptions/<name>                        all of it, as JSON
    subscription-changes/<name>/<version: 8 bytes, big-endian>
                                                what a consumer told, or what a transaction acknowledged, as
                                                messagepack

An acknowledgement clears a few bits among thousands.  It is written as such, as a step of the round of group
commit in which it comes, under a version that the step mints.  So it shares a sync with all other commits of
that moment, and subscriptions do not wait for each other.

When there are many changes they are compacted: the whole row is written anew and they are removed, in one
atomic write.  The row names the last change that it includes: a reader begins behind that one, and does not
have to step over the tombstones of those before.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import RLock
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from floodmark.engine import Engine, WriteRow
from floodmark.feed.subscription.acknowledgement import Deliveries, Progress
from floodmark.feed.subscription.subscriptions import SubscriptionRow
from floodmark.model.errors import Corruption
from floodmark.model.limits import PAGE_BYTES_MAX, PAGE_ROWS_MAX
from floodmark.model.ranges import after
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition import META, load_metadata
from floodmark.partition.commit.commit import Mint, Step

# Changes are compacted when there are so many, or when they have so many bytes.
CHANGES_MAX: Final = 1_000
CHANGES_BYTES_MAX: Final = 256 * 1_024

_SUBSCRIPTIONS: Final = b"subscriptions/"
_CHANGES: Final = b"subscription-changes/"
_VERSION_BYTES: Final = 8


class SubscriptionChange(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """What changes: deliveries, acknowledgements, and until when the lease lasts, if it was renewed."""

    progress: Progress
    expires_at_ms: int | None = None


# Versions of changes, with what is stored of each.
Changes: TypeAlias = Iterable[tuple[Version, bytes]]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SubscriptionChange)


class SubscriptionState:
    """A subscription in memory, as the row and the changes say.

    Only the thread that has the turn changes it, and holds the lock while it does; so does a reader.  The
    lock is taken after the turn, never before it.
    """

    def __init__(self, row: SubscriptionRow, changes: Changes = ()) -> None:
        self.lock = RLock()
        self.load(row, changes)

    def load(self, row: SubscriptionRow, changes: Changes = ()) -> None:
        """Take the place of what was known."""
        with self.lock:
            # Of its `through` and `live`, the deliveries know better.
            self.row = row
            self.deliveries = Deliveries(row.through, row.live)
            self._versions: list[Version] = []
            self._bytes = 0
            for version, encoded in changes:
                self._enter(version, len(encoded), _decode(row.name, version, encoded))

    def show(self) -> SubscriptionRow:
        """The subscription as it is now."""
        with self.lock:
            through, live = self.deliveries.through, self.deliveries.live()
            return replace(self.row, through=through, live=live, changed=0)

    def change(self, version: Version, change: SubscriptionChange) -> tuple[WriteRow, bool]:
        """Take a change in: the row that stores it, and whether compaction is due."""
        encoded = _encoder.encode(change)
        before = self._length()
        self._enter(version, len(encoded), change)
        return (META, _change_key(self.row.name, version), encoded), self._length() > before

    def store(self, row: SubscriptionRow) -> tuple[SubscriptionRow, list[WriteRow]]:
        """The whole row as it is stored, and the writes that store it and remove the changes before."""
        stored = replace(row, changed=self.row.changed)
        return stored, [(META, _key(row.name), msgspec.json.encode(stored)), *self._remove_changes()]

    def remove(self) -> list[WriteRow]:
        """The writes that forget the subscription."""
        return [(META, _key(self.row.name), None), *self._remove_changes()]

    def _remove_changes(self) -> Iterator[WriteRow]:
        return ((META, _change_key(self.row.name, version), None) for version in self._versions)

    def _enter(self, version: Version, size: int, change: SubscriptionChange) -> None:
        self.deliveries.learn(change.progress)
        self.deliveries.acknowledge(change.progress.acknowledgement)
        lease, expires_at_ms = self.row.lease, change.expires_at_ms
        if expires_at_ms is not None and lease is not None:
            lease = replace(lease, expires_at_ms=expires_at_ms)
        mark = change.progress.mark or self.row.mark
        self.row = replace(self.row, lease=lease, mark=mark, changed=version)
        self._versions.append(version)
        self._bytes += size

    def _length(self) -> int:
        """How often the changes would fill what they may: compaction that failed is due again later."""
        return max(len(self._versions) // CHANGES_MAX, self._bytes // CHANGES_BYTES_MAX)


# Judges a change in the turn, with the lock of the subscription; None if nothing is to be changed.
Judge: TypeAlias = Callable[[SubscriptionState], SubscriptionChange | None]


class ChangeStep(Step):
    """A change of one subscription, in a round.

    `find` finds the subscription, and `reload` makes it what the engine says.
    """

    frees = True

    def __init__(
        self, engine: Engine, find: Callable[[], SubscriptionState], judge: Judge, reload: Callable[[], None]
    ) -> None:
        super().__init__(None)
        # It reads nothing from the engine, so the round may write it together with what comes before it.
        self.decide = None
        self.is_compaction_due = False
        self._engine = engine
        self._find = find
        self._judge = judge
        self._reload = reload
        self._row: WriteRow | None = None

    def take(self, mint: Mint) -> Sequence[WriteRow]:
        state = self._find()
        with state.lock:
            change = self._judge(state)
            if change is None:
                return ()
            version = mint()
            self._row, self.is_compaction_due = state.change(version, change)
        self.version = version
        return [self._row]

    def is_written(self) -> bool:
        assert self._row is not None
        family, key, _ = self._row
        return self._engine.get(family, key) is not None

    def undo(self) -> None:
        if self._row is not None:
            self._reload()


def load_subscriptions(engine: Engine) -> Iterator[tuple[SubscriptionRow, Changes]]:
    """All subscriptions, each with its changes."""
    for row in load_metadata(engine, _SUBSCRIPTIONS, SubscriptionRow):
        yield row, _read_changes(engine, row)


def load_subscription(engine: Engine, name: str) -> tuple[SubscriptionRow, Changes] | None:
    """One subscription with its changes, if it is there."""
    # Of the rows whose keys begin like this one, it is the first.
    row = next(load_metadata(engine, _key(name), SubscriptionRow), None)
    return None if row is None or row.name != name else (row, _read_changes(engine, row))


def _read_changes(engine: Engine, row: SubscriptionRow) -> Changes:
    start, end = _change_key(row.name, row.changed + 1), after(_change_key(row.name, VERSION_MAX))
    while page := engine.scan(META, start, end, rows_max=PAGE_ROWS_MAX, bytes_max=PAGE_BYTES_MAX):
        for key, encoded in page:
            yield int.from_bytes(key[-_VERSION_BYTES:], "big"), encoded
        start = after(page[-1][0])


def _decode(name: str, version: Version, encoded: bytes) -> SubscriptionChange:
    try:
        return _decoder.decode(encoded)
    except msgspec.MsgspecError as error:
        raise Corruption(
            f"change {version} of subscription {name!r} is damaged: {error}. Restore the site from a backup",
            subscription=name,
        ) from error


def _key(name: str) -> bytes:
    return _SUBSCRIPTIONS + name.encode()


def _change_key(name: str, version: Version) -> bytes:
    return _CHANGES + name.encode() + b"/" + version.to_bytes(_VERSION_BYTES, "big")

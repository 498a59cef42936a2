"""The stored form of a subscription: a whole row, and a small row for each later change.

    subscriptions/<name>                        the whole row, as JSON
    subscription-changes/<name>/<version: 8 bytes, big-endian>
                                                the progress of a consumer, or the acknowledgements of a
                                                transaction, as messagepack

An acknowledgement clears a few bits among thousands.  It is written as a step of a round of group commit,
under a version that the step mints: it shares a sync with all other commits of that moment, and subscriptions
do not wait for each other.

When there are many changes, they are compacted: one write stores the whole row again and deletes them, or as
many as fit into one engine write; further writes delete the rest.  The row names the last change that it
includes, so that loading begins after this one and does not scan the engine's tombstones of earlier ones.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from floodmark.engine import Engine, WriteRow
from floodmark.engine.base import scan_rows
from floodmark.feed.leased import ReaderKind, RowState
from floodmark.feed.subscription.acknowledgement import Deliveries, Progress
from floodmark.feed.subscription.subscriptions import SubscriptionRow
from floodmark.model.errors import Corruption, SubscriptionNotFound
from floodmark.model.limits import SUBSCRIPTIONS_MAX
from floodmark.model.ranges import after
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition import META, load_metadata
from floodmark.partition.commit.commit import Mint, RoundStep

# The number and the total bytes of stored changes at which they are compacted.
CHANGES_MAX: Final = 1_000
CHANGES_BYTES_MAX: Final = 256 * 1_024

SUBSCRIPTIONS: Final = ReaderKind(
    noun="subscription",
    used="consumed",
    free="close that consumer",
    again="subscribe again",
    anew="subscribe",
    prefix=b"subscriptions/",
    rows_max=SUBSCRIPTIONS_MAX,
    not_found=SubscriptionNotFound,
)

_CHANGES: Final = b"subscription-changes/"
_VERSION_BYTES: Final = 8


class SubscriptionChange(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Deliveries and acknowledgements, with the new time of expiry if the lease was renewed."""

    progress: Progress
    expires_at_ms: int | None = None


# Stored changes by version.
Changes: TypeAlias = Iterable[tuple[Version, bytes]]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SubscriptionChange)


class SubscriptionState(RowState[SubscriptionRow]):
    """A subscription in memory: its deliveries, and its row, whose `through` and `live` are outdated."""

    def __init__(self, row: SubscriptionRow, changes: Changes = ()) -> None:
        super().__init__(SUBSCRIPTIONS, row)
        self.take_over(row, changes)

    def take_over(self, stored: SubscriptionRow, changes: Changes = ()) -> None:
        with self.lock:
            self.row = stored
            self.deliveries = Deliveries(stored.through, stored.live)
            self._versions: list[Version] = []
            self._bytes = 0
            for version, encoded in changes:
                self._enter(version, len(encoded), _decode(stored.name, version, encoded))

    def show(self) -> SubscriptionRow:
        with self.lock:
            through, live = self.deliveries.through, self.deliveries.live()
            return replace(self.row, through=through, live=live, changed=0)

    def change(self, version: Version, change: SubscriptionChange) -> tuple[WriteRow, bool]:
        """Enter a change; return the write that stores it, and whether compaction is due."""
        encoded = _encoder.encode(change)
        before = self._length()
        self._enter(version, len(encoded), change)
        return (META, _change_key(self.row.name, version), encoded), self._length() > before

    def store(self, row: SubscriptionRow) -> tuple[SubscriptionRow, list[WriteRow]]:
        """The whole row as it is stored, and the writes that store it and delete the changes it includes."""
        stored, rows = super().store(replace(row, changed=self.row.changed))
        return stored, [*rows, *self._remove_changes()]

    def remove(self) -> list[WriteRow]:
        # In reverse order, so that a failure in between leaves a consistent subscription.
        return [*reversed(list(self._remove_changes())), *super().remove()]

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
        """How often the limits are exceeded: a failed compaction is due again at the next multiple."""
        return max(len(self._versions) // CHANGES_MAX, self._bytes // CHANGES_BYTES_MAX)


# Returns the change, or None for none.  Called in the write turn, with the subscription's lock held.
Judge: TypeAlias = Callable[[SubscriptionState], SubscriptionChange | None]


class ChangeStep(RoundStep):
    """A change of one subscription, in a round of group commit.

    `find` returns the subscription, and `reload` loads it from the engine again.
    """

    frees = True

    def __init__(
        self, engine: Engine, find: Callable[[], SubscriptionState], judge: Judge, reload: Callable[[], None]
    ) -> None:
        super().__init__(None)
        # The step reads nothing from the engine, so the round may write it together with earlier steps.
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


def load_subscriptions(engine: Engine) -> Iterator[SubscriptionState]:
    for row in load_metadata(engine, SUBSCRIPTIONS.prefix, SubscriptionRow):
        yield SubscriptionState(row, _read_changes(engine, row))


def load_subscription(engine: Engine, name: str) -> SubscriptionState | None:
    """One subscription as loaded from the engine, or None."""
    # It is the first of the rows whose keys have this prefix.
    row = next(load_metadata(engine, SUBSCRIPTIONS.key(name), SubscriptionRow), None)
    if row is None or row.name != name:
        return None
    return SubscriptionState(row, _read_changes(engine, row))


def _read_changes(engine: Engine, row: SubscriptionRow) -> Changes:
    start, end = _change_key(row.name, row.changed + 1), after(_change_key(row.name, VERSION_MAX))
    for key, encoded in scan_rows(engine, META, start, end):
        yield int.from_bytes(key[-_VERSION_BYTES:], "big"), encoded


def _decode(name: str, version: Version, encoded: bytes) -> SubscriptionChange:
    try:
        return _decoder.decode(encoded)
    except msgspec.MsgspecError as error:
        raise Corruption(
            f"change {version} of subscription {name!r} is damaged: {error}. Restore the site from a backup",
            subscription=name,
        ) from error


def _change_key(name: str, version: Version) -> bytes:
    return _CHANGES + name.encode() + b"/" + version.to_bytes(_VERSION_BYTES, "big")

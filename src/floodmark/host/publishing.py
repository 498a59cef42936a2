"""Publishes data sets: loads a new generation of a namespace beside the current one, and swaps.

1. **Load.**  A record is stored under the physical id of the new generation, *at the base version*.  That is
   its stamp as well: (base, this site).  So a row that is sent twice replaces itself.  No reader finds it,
   and it is no change: nothing stands in the change log.
2. **Rewind.**  What was written since the base is copied from the change log, at the versions that it has.
   Base and changes have ascending stamps, so on each key the newest version wins, as everywhere.  Each pass
   leaves less to do: the writes of the time that it took.
3. **Join.**  From a change of the catalog on, all writes go to both generations
   (`partition/generations.py`).  What was written before is copied once it is resolved; then the new
   generation has all changes.  No writer waits.
4. **Swap.**  The catalog is stored once more, at a fresh version X.  Before a reader can be at X, the engine
   shows the new generation.

**Several nodes.**  The keeper publishes.  A change of the catalog raises its epoch, so a node that has not
loaded it writes nothing more.  X lies above the ceilings of all nodes, and these guard the write of the swap.
So no node has announced or answered for a version at or above X.  One that raises its ceiling later
looks at the catalog before it answers as of a version up to there (`partition/learning.py`).

A crash before the swap leaves the old generation, and the publisher goes on.  If it does not, its safe point
expires, and garbage collection removes what was loaded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Event, RLock
from typing import Final

import msgspec
import numpy
from numpy.typing import NDArray

from floodmark.clock.backoff import Backoff
from floodmark.codec.ordered import (
    RAW,
    VERSION_BYTES,
    decode_user_key,
    decode_version,
    encode_namespace,
    encode_prefixes,
    encode_version,
    qualify_range,
)
from floodmark.codec.records import add_origins, rename_keys
from floodmark.codec.stamps import find_origins
from floodmark.codec.values import DELETED
from floodmark.columns.column import Column
from floodmark.columns.packed import pack
from floodmark.columns.pairs import Pairs
from floodmark.engine import Engine, WriteRow
from floodmark.engine.base import scan_pages
from floodmark.feed.reading.columns import Columns
from floodmark.feed.reading.reader import ChangeReader, gather_lines
from floodmark.host.catalog import GenerationRow, GenerationState, NamespaceRow, Rewound, stored, with_changes
from floodmark.host.parts import LocalPort, SiteParts
from floodmark.merge.policies import LAST_WRITE
from floodmark.model.errors import (
    CatalogChanged,
    FloodmarkError,
    InvalidArgument,
    InvalidConfiguration,
    NotKeeper,
    PartitionStopped,
    PublicationConflict,
    VersionCollected,
    WrongPolicy,
)
from floodmark.model.limits import PAGE_ROWS_MAX
from floodmark.model.ranges import prefix_end
from floodmark.model.stream import ChangeBatch
from floodmark.model.version import Version, moment_of, physical_ms
from floodmark.partition.commit.entering import WriteKind
from floodmark.partition.commit.expiry_index import index_rows, may_expire
from floodmark.partition.families import DATA
from floodmark.partition.generations import below, is_above, place
from floodmark.partition.node import Node

# A publication whose publisher has made no call for this long is abandoned.
PUBLISHING: Final = timedelta(hours=1)
# How long earlier generations, and all changes made since, are kept for a rollback.
KEPT_FOR: Final = timedelta(days=3)
# The maximum duration of a pass of the rewind.  The publisher requests the next pass.
PASS_MS_MAX: Final = 5_000
# The number of passes that may copy changes without reducing the lag, as in a dense part of the change log.
FUTILE_MAX: Final = 20
# How long the swap waits for earlier writes to be resolved; a takeover takes 5 to 8 seconds.
JOIN_MS_MAX: Final = 30_000
SWAP_TRIES_MAX: Final = 50
# The number of records that a rollback copies in one portion.
_COPIED_ROWS_MAX: Final = 50_000
_RENEWED_EVERY_MS: Final = PUBLISHING // timedelta(milliseconds=1) // 10


class LocalGenerations(LocalPort):
    """The port to the generations of namespaces."""

    def __init__(self, site: SiteParts, reader: ChangeReader) -> None:
        super().__init__(site)
        self._reader = reader
        # Held by the calls that begin, replay and swap, so that there is one at a time.
        self._lock = RLock()
        # Held by a call that loads rows, and while a generation ceases to take any; taken after `_lock`.
        self._loads = RLock()
        # By the id of the namespace, as several may be published at once.
        self._renewed_at_ms: dict[int, int] = {}

    # From begin to swap

    def begin_generation(
        self,
        namespace: str,
        base: Version,
        publisher: str,
        origin: int | None = None,
        brought: bool = False,
    ) -> GenerationRow:
        with self._lock:
            row = self._require_publishable(namespace, everywhere=origin is not None)
            is_first_of_its_stamp = origin is not None and not brought
            origin, left = origin or self._node.site_id, row.loading
            if left is not None and left.publisher != publisher:
                raise PublicationConflict(
                    f"generation {left.number} of {namespace!r} at site {self._members.site!r} is being "
                    f"published by {left.publisher!r}; wait for its end, or drop it there (`floodmark "
                    "generation drop`)",
                    namespace=namespace,
                    generation=left.number,
                )
            if left is not None and origin == self._node.site_id:
                # The site of the stamps keeps the base with which the publisher began; other sites take
                # `base`.
                if base not in (0, left.base) or origin != left.origin:
                    raise PublicationConflict(
                        f"publisher {publisher!r} has begun to publish {namespace!r} as of version "
                        f"{left.base}, and cannot go on as of {base}; leave the base out, or drop "
                        f"generation {left.number} first",
                        namespace=namespace,
                    )
                base = left.base
            if base:
                self._node.observe(base)
                if is_first_of_its_stamp:
                    _require_another_base(row, base)
                self._require_later(row, base, 0 if brought else self._node.retention.trimmed_version())
            base = base or self._site.nodes.fresh_version()
            self._hold(row, max(base, self._node.retention.collected_version(row.id)) if brought else base)
            return self._begin(row, base, publisher, source=None, origin=origin)

    def _begin(
        self, row: NamespaceRow, base: Version, publisher: str, *, source: int | None, origin: int
    ) -> GenerationRow:
        """Begin a generation; it replaces one that an earlier call of the same publisher has left unfinished.

        That one is not resumed, because its rows may be others.
        """
        with self._loads:
            now = self._node.clock.now()
            self._catalog.begin_generation(row, base, publisher, source=source, origin=origin, now=now)
        for each in row.generations:
            if each.state is GenerationState.ENDED:
                self.remove_generation(row, each)
        loading = row.loading
        assert loading is not None
        return loading

    def load_generation(self, namespace: int, number: int, rows: Mapping[bytes, bytes]) -> int:
        """Store records of a data set durably, as one file of the engine; return their number."""
        if not rows:
            return 0
        ordered = rows if isinstance(rows, Pairs) and rows.is_ordered else Pairs.of(rows)
        keys, values = ordered.columns()
        # At a node that does not keep the site.
        self._node.storage.entrance.catch_up()
        row = self._row(namespace)
        self._node.storage.entrance.check(keys, values, WriteKind.PUT)
        if any(not key.startswith(encode_namespace(namespace)) for key in (keys[0], keys[-1])):
            raise InvalidArgument(f"rows of a generation of {row.name!r} must be keys of that namespace")
        flags = _flags_of(values)
        if (flags & DELETED).any():
            raise InvalidArgument(f"a data set for {row.name!r} holds a deletion; leave the key out")
        generation = self._require_loading(row, number)
        if generation.origin != self._node.site_id:
            bases = numpy.full(len(keys), generation.base, numpy.uint64)
            values = Column(add_origins(pack(values).to_arrow(), bases, generation.origin))
        self._renew(row, generation)
        version = encode_version(generation.base)
        engine_keys = [prefix + version for prefix in encode_prefixes(rename_keys(keys, generation.id))]
        self._load(row, number, engine_keys, list(values))
        return len(keys)

    def count_generation(self, namespace: str, number: int) -> int:
        generation = self._require_loading(self._catalog.get(namespace), number)
        start = RAW + encode_namespace(generation.id)
        return sum(map(len, scan_pages(below(self._node.engine), DATA, start, prefix_end(start))))

    def rewind_generation(self, namespace: str, number: int) -> Rewound:
        with self._lock:
            return self._rewind(self._catalog.get(namespace), number)

    def swap_generation(self, namespace: str, number: int, keep: int) -> GenerationRow:
        with self._lock:
            row = self._require_publishable(namespace, everywhere=True)
            if row.present.number != number:
                self._join(row, number)
                # Outside the write turn, because this flushes everything loaded to disk.
                self._node.engine.sync()
                with self._loads:
                    self._swap(row, number)
            self._hold_kept(row, keep)
            if row.loading is None:
                # This may be a repeated call, and another publisher may have begun since.
                self._release(_safe_point(row))
            # All nodes read it.
            self._site.nodes.settled_version()
            return row.present

    def drop_generation(self, namespace: str, number: int) -> None:
        with self._lock:
            row = self._catalog.get(namespace)
            found = next((each for each in row.generations if each.number == number), None)
            if found is None or found.number == row.present.number:
                raise PublicationConflict(
                    f"generation {number} of {namespace!r} is "
                    + ("not there" if found is None else "the one that is read; publish or roll back first"),
                    namespace=namespace,
                )
            if found.since is None:
                if found.state is GenerationState.LOADING:
                    self._end(row, number)
                if row.loading is None:
                    self._release(_safe_point(row))
            else:
                self._release(_kept_point(row))
                _require_passed(self._node, row, found)
            self.remove_generation(row, found)

    def rollback_generation(
        self, namespace: str, number: int | None, publisher: str, keep: int
    ) -> GenerationRow:
        """A new generation with the records of an earlier one and the changes made since."""
        with self._lock:
            row = self._require_publishable(namespace, everywhere=False)
            source = row.earlier(number)
            if (left := row.loading) is not None:
                raise PublicationConflict(
                    f"{namespace!r} cannot go back to an earlier generation: {left.publisher!r} publishes "
                    f"generation {left.number}; wait for its end, or drop it (`floodmark generation drop`)",
                    namespace=namespace,
                    generation=left.number,
                )
            assert source.until is not None
            self._hold(row, source.until - 1)
            loading = self._begin(row, source.until - 1, publisher, source=source.number, origin=0)
            try:
                physical = encode_namespace(loading.id)
                for keys, values in _stored_records(self._node.engine, source, _COPIED_ROWS_MAX):
                    self._load(row, loading.number, [place(key, physical) for key in keys], values)
                    self._renew(row, loading)
                for _ in rewind_until(PASS_MS_MAX, partial(self._rewind, row, loading.number)):
                    pass
                return self.swap_generation(namespace, loading.number, keep)
            except BaseException:
                with suppress(FloodmarkError):
                    self.drop_generation(namespace, loading.number)
                raise

    # Upkeep

    def collect(self, row: NamespaceRow, safe_point: Version) -> None:
        """Remove generations that ended at or below the safe point, and abandoned publications.

        Does nothing during a call of a publisher, so as not to block the calling thread, which also writes
        heartbeats; the next run does the work.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            held = {point.name for point in self._site.safe_points.list()}
            if row.loading is not None and _safe_point(row) not in held:
                self._end(row, row.loading.number)
            for each in list(row.generations):
                if each.until is not None and (each.since is None or each.until <= safe_point):
                    self.remove_generation(row, each)
        finally:
            self._lock.release()

    def remove_generation(self, row: NamespaceRow, generation: GenerationRow) -> None:
        """Remove the records of a generation, and then its row."""
        self._node.retention.remove_generation(generation.id)
        with self._node.storage.settled():
            left = [each for each in row.generations if each.number != generation.number]
            self._catalog.set_generations(row, left)

    # Steps

    def _join(self, row: NamespaceRow, number: int) -> None:
        """Direct all new writes to a generation, too, and copy the earlier ones that it lacks."""
        with self._node.storage.settled():
            if not self._require_loading(row, number).joined:
                self._catalog.change_generation(row, number, joined=True)
        through = self._site.nodes.settled_version()
        _wait_resolved(self._node, through)
        while self._require_loading(row, number).position < through:
            self._rewind(row, number)

    def _swap(self, row: NamespaceRow, number: int) -> None:
        """Make a joined generation the current one, at a version that no node has announced."""
        storage, nodes = self._node.storage, self._site.nodes
        with storage.settled():
            generation = self._require_loading(row, number)
            self._require_publishable(row.name, everywhere=True)
            # Keys that the data set lacks vanish without a tombstone.  Older writes of other sites that
            # arrive later are dropped (`published_stamps`).
            is_shared = bool(self._members.of(row.name))
            horizon = [] if is_shared else [self._node.retention.raise_horizon(row.id, generation.base)]

            # Looked up once: after a recovery the catalog may show the swap before `show` is called.
            present = row.present.number

            def swapped(version: Version) -> list[GenerationRow]:
                return [
                    msgspec.structs.replace(each, until=version) if each.number == present else each
                    for each in with_changes(row, number, since=version, position=version)
                ]

            def build(version: Version) -> list[WriteRow]:
                return [stored(msgspec.structs.replace(row, generations=swapped(version))), *horizon]

            def show(version: Version) -> None:
                self._catalog.show(row, swapped(version))

            self._node.committer.sync_in_turn()
            for _ in range(SWAP_TRIES_MAX):
                if self._node.committer.store_in_turn(build, nodes.pass_ceilings(), stored=show):
                    return
        raise PartitionStopped(
            f"the clocks of other nodes went on while generation {number} of {row.name!r} was to be read; "
            "try again",
            namespace=row.name,
        )

    def _rewind(self, row: NamespaceRow, number: int) -> Rewound:
        node = self._node
        generation = self._require_loading(row, number)
        node.committer.sync()
        resolved = node.resolved_version()
        replayed, position, begun_ms = 0, generation.position, node.clock.time_source()
        if position < (begin := _log_begin(self._node, row)):
            # Changes that the change log lacks are taken from the records, which have the newest change of
            # each key.
            for engine_keys, values in _stored_records(node.engine, row.present):
                keys, versions = _decode(row, engine_keys)
                copied = _above_base(keys, values, versions, generation, node.site_id)
                self._store(row, number, _rows(generation, *copied))
                replayed += len(copied[0])
            position = min(begin, resolved)
        if resolved > position:
            for batch in self._changes(row, position, resolved):
                copied = _above_base(batch.keys, batch.values, batch.versions, generation, node.site_id)
                self._store(row, number, _rows(generation, *copied))
                replayed += len(copied[0])
                position = batch.through
                if node.clock.time_source() - begun_ms > PASS_MS_MAX:
                    break
            # A publisher that resumes begins at the base again.
            self._hold(row)
            with node.storage.settled():
                self._require_loading(row, number)
                self._catalog.change_generation(
                    row, number, position=position, replayed=generation.replayed + replayed
                )
        behind_ms = max(0, node.clock.physical_ms() - physical_ms(position))
        return Rewound(replayed, behind_ms)

    def _changes(self, row: NamespaceRow, since: Version, until: Version) -> Iterator[ChangeBatch]:
        """The changes in `(since, until]` from the change log."""
        keys = qualify_range(row.id)
        since = max(since, self._node.born_version(), row.created_at)
        columns = Columns(keys, self._reader.look_up, None)
        return gather_lines(self._node.read_log(since, until, keys), until, columns)

    def _store(self, row: NamespaceRow, number: int, rows: Sequence[WriteRow]) -> None:
        """Store records of a generation that is loading; the next sync makes them durable."""
        storage = self._node.storage
        for portion in storage.cut(rows):
            with storage.settled():
                storage.require_wanted()
                self._require_loading(row, number)
                storage.store_later(portion)

    def _load(
        self, row: NamespaceRow, number: int, engine_keys: Sequence[bytes], values: Sequence[bytes]
    ) -> None:
        """Store records of a generation that is loading, durably, in order of their keys in the engine."""
        # Outside the write turn, so that others can write meanwhile.
        with self._loads:
            if may_expire(values):
                namespace = encode_namespace(row.id)
                shown = (place(key, namespace) for key in engine_keys)
                self._store(row, number, index_rows(shown, values))
            while True:
                self._require_loading(row, number)
                try:
                    self._node.storage.load(below(self._node.engine), DATA, engine_keys, values)
                    return
                except CatalogChanged:
                    continue

    def _end(self, row: NamespaceRow, number: int) -> None:
        """End the publication of a generation: it accepts no more rows."""
        with self._loads, self._node.storage.settled():
            self._catalog.change_generation(row, number, until=self._node.clock.now())

    # Conditions

    def _require_publishable(self, namespace: str, *, everywhere: bool) -> NamespaceRow:
        """The namespace, if a data set can be published into it.

        `everywhere` is whether all sites that share it get the data set, as is required for a shared one.
        """
        row = self._catalog.get(namespace)
        require_last_write(row)
        if self._members.of(namespace) and not everywhere:
            raise InvalidConfiguration(
                f"namespace {namespace!r} is shared with other sites, which would not get the data set; "
                "publish it, or roll back, at all of them (`--topology`)",
                namespace=namespace,
            )
        return row

    def _require_loading(self, row: NamespaceRow, number: int) -> GenerationRow:
        generation = row.loading
        if generation is None or generation.number != number or row.dropped_at is not None:
            raise PublicationConflict(
                f"generation {number} of {row.name!r} is not being published any more; "
                "floodmark generation list shows what became of it",
                namespace=row.name,
                generation=number,
            )
        return generation

    def _require_later(self, row: NamespaceRow, base: Version, trimmed: Version) -> None:
        """Raise VersionCollected for a base after which changes are missing in the change log."""
        present = row.present
        if base < max(present.base, trimmed):
            known = (
                f"that of generation {present.number}" if present.base > trimmed else "the change log begins"
            )
            raise VersionCollected(
                f"base {base} ({moment_of(base).isoformat()}) of a data set for {row.name!r} lies before "
                f"{max(present.base, trimmed)} ({known}), so that changes made since would be missing; "
                "publish data of a later moment, or leave the base out",
                namespace=row.name,
                version=base,
                oldest=max(present.base, trimmed),
            )

    def _row(self, namespace: int) -> NamespaceRow:
        name = self._catalog.name_of(namespace)
        if name is None:
            raise PublicationConflict(f"there is no namespace with id {namespace}, or it was dropped")
        return self._catalog.get(name)

    def _hold(self, row: NamespaceRow, version: Version | None = None) -> None:
        """Hold the changes above a version for a publication; by default, above the version already held."""
        if version is None:
            points = self._site.safe_points.list()
            loading = row.loading
            base = 0 if loading is None else loading.base
            version = next((point.version for point in points if point.name == _safe_point(row)), base)
        version = max(version, _log_begin(self._node, row))
        self._site.safe_points.hold(_safe_point(row), version, PUBLISHING, row.id)
        self._renewed_at_ms[row.id] = self._node.clock.time_source()

    def _renew(self, row: NamespaceRow, generation: GenerationRow) -> None:
        """Renew the hold of a publication at intervals while its rows are loaded."""
        if self._node.clock.time_source() - self._renewed_at_ms.get(row.id, 0) <= _RENEWED_EVERY_MS:
            return
        try:
            self._site.nodes.require_keeper()
        except NotKeeper:
            self._site.nodes.renew_publication(row.name, generation.number)
            self._renewed_at_ms[row.id] = self._node.clock.time_source()
            return
        with self._lock:
            self._hold(row)

    def _hold_kept(self, row: NamespaceRow, keep: int) -> None:
        """Hold the changes made since the end of the kept generations, because a rollback copies them."""
        kept = [each.until for each in row.generations if each.since is not None and each.until is not None]
        if keep and kept:
            self._site.safe_points.hold(_kept_point(row), kept[-keep:][0] - 1, KEPT_FOR, row.id)
        else:
            self._release(_kept_point(row))

    def _release(self, safe_point: str) -> None:
        if safe_point in {point.name for point in self._site.safe_points.list()}:
            self._site.safe_points.release(safe_point)


def rewind_until(near_ms: int, rewind: Callable[[], Rewound]) -> Iterator[Rewound]:
    """Call `rewind` repeatedly, until the lag is at most `near_ms` or does not shrink any more.

    Others may write changes as fast as they are copied, and a prepared write limits what can be copied.
    """
    futile, least_ms = 0, None
    while futile < FUTILE_MAX:
        rewound = rewind()
        yield rewound
        if rewound.behind_ms <= near_ms:
            return
        if least_ms is None or rewound.behind_ms < least_ms:
            futile, least_ms = 0, rewound.behind_ms
        else:
            futile += 1 if rewound.replayed else FUTILE_MAX


def require_last_write(row: NamespaceRow) -> None:
    """Raise WrongPolicy for a namespace into which no data set can be published."""
    if row.merge != LAST_WRITE:
        raise WrongPolicy(
            f"namespace {row.name!r} merges by {row.merge!r}; a data set can be published into one that "
            "merges by 'last_write'",
            namespace=row.name,
        )


def _require_another_base(row: NamespaceRow, base: Version) -> None:
    """Refuse the base of the present data set: sites and links tell data sets apart by their stamps."""
    present = row.present
    if base == present.base:
        raise PublicationConflict(
            f"generation {present.number} of {row.name!r}, published by {present.publisher!r}, has the base "
            f"{base} ({moment_of(base).isoformat()}) as well, so a site that is away would not see that this "
            "is another data set; publish data of a later moment, or leave the base out. A site that lacks "
            f"generation {present.number} gets it by its links",
            namespace=row.name,
            base=base,
        )


def _require_passed(node: Node, row: NamespaceRow, generation: GenerationRow) -> None:
    """Refuse to remove a generation that readers of the past may still request."""
    oldest = node.retention.collected_version(row.id)
    if generation.until is not None and generation.until > oldest:
        raise PublicationConflict(
            f"generation {generation.number} of {row.name!r} is the history before "
            f"{moment_of(generation.until).isoformat()}, which readers may still ask for; garbage "
            "collection removes it after the retention of the namespace",
            namespace=row.name,
        )


def _wait_resolved(node: Node, through: Version) -> None:
    """Wait for prepared writes below a version, and for partitions that have to be taken over."""
    backoff = Backoff(1, longest_ms=250, budget_ms=JOIN_MS_MAX)
    while (resolved := node.resolved_version()) < through:
        pause_ms = backoff.next_ms()
        if pause_ms is None:
            raise PartitionStopped(
                f"what was written up to version {through} is not resolved yet, only up to {resolved}: a "
                "transaction is open, or a partition has no owner. Try again",
                version=through,
                waited=True,
            )
        Event().wait(pause_ms / 1_000)


def _log_begin(node: Node, row: NamespaceRow) -> Version:
    """The version above which all changes of a namespace are in the change log.

    What a new or restored site was loaded with is not.
    """
    return max(node.retention.loaded_version(row.id), node.retention.trimmed_version())


def _safe_point(row: NamespaceRow) -> str:
    return f"publish/{row.name}"


def _kept_point(row: NamespaceRow) -> str:
    return f"generation/{row.name}"


def _above_base(
    keys: Sequence[bytes],
    values: Sequence[bytes],
    versions: Sequence[Version],
    generation: GenerationRow,
    site_id: int,
) -> tuple[list[bytes], list[bytes], list[Version]]:
    """The keys, values and versions of the changes whose stamps are above that of the data set."""
    copied = [
        (key, value, version)
        for key, value, version, origin in zip(keys, values, versions, find_origins(values), strict=True)
        if is_above(generation, origin, version, site_id)
    ]
    return [key for key, _, _ in copied], [value for _, value, _ in copied], [each for _, _, each in copied]


def _stored_records(
    engine: Engine, generation: GenerationRow, rows_max: int = PAGE_ROWS_MAX
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Engine keys and stored values of the newest records of a generation."""
    start = RAW + encode_namespace(generation.id)
    seen = b""
    for page in scan_pages(below(engine), DATA, start, prefix_end(start), rows_max=rows_max):
        keys, values = [], []
        for engine_key, value in page:
            if not engine_key.startswith(seen) or not seen:
                keys.append(engine_key)
                values.append(value)
                seen = engine_key[:-VERSION_BYTES]
        if keys:
            yield keys, values


def _decode(row: NamespaceRow, engine_keys: Sequence[bytes]) -> tuple[list[bytes], list[Version]]:
    """The qualified keys and the versions of engine keys of a generation."""
    namespace = encode_namespace(row.id)
    keys = [namespace + decode_user_key(each[:-VERSION_BYTES]) for each in engine_keys]
    return keys, [decode_version(each) for each in engine_keys]


def _flags_of(values: Sequence[bytes]) -> NDArray[numpy.uint8]:
    """The last byte of each stored value."""
    packed = pack(values)
    return numpy.frombuffer(packed.data, numpy.uint8)[packed.borders[1:] - 1]


def _rows(
    generation: GenerationRow, keys: Sequence[bytes], values: Sequence[bytes], versions: Sequence[Version]
) -> list[WriteRow]:
    """Records of a generation as rows of the engine, with the rows of their index of expiries.

    The index has the keys under which readers find the records once the generation is current.
    """
    if not keys:
        return []
    physical = encode_namespace(generation.id)
    engine_keys = [
        prefix + encode_version(version)
        for prefix, version in zip(encode_prefixes(keys), versions, strict=True)
    ]
    rows: list[WriteRow] = [
        (DATA, place(engine_key, physical), value)
        for engine_key, value in zip(engine_keys, values, strict=True)
    ]
    return [*rows, *index_rows(engine_keys, values)] if may_expire(values) else rows

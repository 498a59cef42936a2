"""How far back the history of a node reaches: collected versions of namespaces, and trimmed logs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from floodmark.codec.changelog import encode_log_range
from floodmark.codec.ordered import RAW, encode_namespace
from floodmark.engine import Engine, Guard, WriteRow
from floodmark.model.ranges import prefix_end
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition.commit.storage import Storage
from floodmark.partition.families import COLLECTED, DATA, HORIZON, LOADED, LOG, LOG_TRIMMED, META
from floodmark.partition.generations import below
from floodmark.partition.layout import load_version, read_metadata, store_version
from floodmark.partition.prepared.writes import prepared_prefixes
from floodmark.partition.retention.collect import Collected, Collector

# Without other sites, a tombstone can be removed as soon as no reader can read below it.
SETTLED: Final = VERSION_MAX


class Retention:
    """Removes history, and stores up to which versions it was removed.

    A version is durably declared as collected before any of its rows is removed, so a reader gets either the
    right answer or `VersionCollected`.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._engine = storage.engine
        # By encoded namespace; shared with the partitions, which check reads against it.
        self.collected: dict[bytes, Version] = {}
        self._loaded: dict[bytes, Version] = {}
        self._trimmed: Version = 0
        self.is_shared = False
        self._load()
        storage.on_recovery.append(self._load)

    def _load(self) -> None:
        # It only grows: a refused version stays refused.
        for key, stored in read_metadata(self._engine, COLLECTED):
            namespace, version = key[len(COLLECTED) :], int.from_bytes(stored, "big")
            self.collected[namespace] = max(version, self.collected.get(namespace, 0))
        self._loaded = {
            key[len(LOADED) :]: int.from_bytes(stored, "big")
            for key, stored in read_metadata(self._engine, LOADED)
        }
        self._trimmed = max(self._trimmed, load_version(self._engine, LOG_TRIMMED))

    def share(self) -> None:
        """Read the versions from the engine from now on, since other nodes may collect and trim."""
        self.is_shared = True
        self.collected = _StoredCollected(self._engine)

    def collected_version(self, namespace: int) -> Version:
        """The oldest version at which a namespace can still be read."""
        return self.collected.get(encode_namespace(namespace), 0)

    def collected_horizon(self, namespace: int) -> Version:
        """The highest stamp of a tombstone or expired record that was removed."""
        return load_version(self._engine, HORIZON + encode_namespace(namespace))

    def loaded_version(self, namespace: int) -> Version:
        """The version at or below which rows were loaded and are no changes; 0 if nothing was loaded."""
        encoded = encode_namespace(namespace)
        return (
            load_version(self._engine, LOADED + encoded) if self.is_shared else self._loaded.get(encoded, 0)
        )

    def declare_loaded(self, namespace: int, version: Version) -> None:
        """Make the history of a namespace begin above its loaded rows.  The caller holds the turn."""
        encoded = encode_namespace(namespace)
        collected = max(version, self.collected.get(encoded, 0))
        self._storage.store(
            [store_version(LOADED + encoded, version), store_version(COLLECTED + encoded, collected)]
        )
        self._load()

    def raise_horizon(self, namespace: int, horizon: Version) -> WriteRow:
        """The row that raises the collected horizon of a namespace."""
        raised = max(horizon, self.collected_horizon(namespace))
        return store_version(HORIZON + encode_namespace(namespace), raised)

    def trimmed_version(self) -> Version:
        """The version at or below which changes are no longer in the logs."""
        return load_version(self._engine, LOG_TRIMMED) if self.is_shared else self._trimmed

    def declare_collected(self, safe_points: Mapping[int, Version], guards: Sequence[Guard] = ()) -> None:
        """Declare that namespaces can no longer be read below some versions.  The caller holds the turn."""
        raised = {
            encode_namespace(namespace): safe_point
            for namespace, safe_point in safe_points.items()
            if safe_point > self.collected_version(namespace)
        }
        if raised:
            rows = [store_version(COLLECTED + namespace, version) for namespace, version in raised.items()]
            self._storage.store_in_portions(rows, guards)
            self.collected.update(raised)

    def collect(
        self,
        namespace: int,
        pause: Callable[[], bool],
        settled: Version = SETTLED,
        *,
        told_through: int,
        guards: Sequence[Guard] = (),
    ) -> Collected:
        """Remove the rows that no reader at or above the namespace's collected version can see.

        A dead record with a stamp above `settled` stays, since an older change may still arrive.  So does a
        record that has expired after the second `told_through`.
        """
        encoded = encode_namespace(namespace)
        collector = Collector(
            self._storage,
            encoded,
            safe_point=self.collected.get(encoded, 0),
            settled=settled,
            horizon=self.collected_horizon(namespace),
            told_through=told_through,
            pause=pause,
            guards=guards,
            # Read after the caller has found what is settled.
            prepared=prepared_prefixes(self._engine, encoded),
        )
        return collector.run(*_namespace_bounds(encoded))

    def trim(self, logs: Iterable[int], through: Version) -> bool:
        """Remove the rows of logs at or below a version; False if they were removed before."""
        with self._storage.settled():
            if through <= self.trimmed_version():
                return False
            self._storage.store([store_version(LOG_TRIMMED, through)])
            self._trimmed = through
        for log in logs:
            self._storage.remove_range(LOG, *encode_log_range(log, 0, through))
        return True

    def remove_namespace(self, namespace: int) -> None:
        """Remove all data of a namespace that was dropped."""
        encoded = encode_namespace(namespace)
        self.remove_generation(namespace)
        self._storage.remove([(META, kind + encoded, None) for kind in (COLLECTED, HORIZON, LOADED)])
        self.collected.pop(encoded, None)
        self._loaded.pop(encoded, None)

    def remove_generation(self, physical: int) -> None:
        """Remove all records of a generation, by the id under which they are stored."""
        bounds = _namespace_bounds(encode_namespace(physical))
        self._storage.remove_range(DATA, *bounds, engine=below(self._engine))


class _StoredCollected(dict[bytes, Version]):
    """The collected versions of namespaces, which any node of the site may raise: read each time."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def get(self, namespace: bytes, default: Version = 0) -> Version:  # type: ignore[override]
        return load_version(self._engine, COLLECTED + namespace) or default


def _namespace_bounds(encoded: bytes) -> tuple[bytes, bytes]:
    """The bounds of a namespace's engine keys; its id is in their first group, so a prefix bounds them."""
    start = RAW + encoded
    end = prefix_end(start)
    assert end is not None
    return start, end

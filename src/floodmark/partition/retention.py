"""How far back a node remembers: what was collected of each namespace, and trimmed of the logs."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from floodmark.codec.changelog import encode_log_range
from floodmark.codec.ordered import RAW, encode_namespace
from floodmark.engine import Engine
from floodmark.model.ranges import prefix_end
from floodmark.model.version import VERSION_MAX, Version
from floodmark.partition.collect import Collected, Collector
from floodmark.partition.families import COLLECTED, DATA, HORIZON, LOG, LOG_TRIMMED, META
from floodmark.partition.layout import load_version, read_metadata, store_version

# Without other sites, every tombstone has done its work once no reader here can see behind it.
SETTLED: Final = VERSION_MAX


class Retention:
    """Removes history, and knows what was removed.

    A version is declared collected on stable storage before anything of it goes, so that a reader gets
    the truth or `VersionCollected`, and nothing in between.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # By the namespace's bytes; shared with the partitions, which check their readers against it.
        self.collected: dict[bytes, Version] = {
            key[len(COLLECTED) :]: int.from_bytes(stored, "big")
            for key, stored in read_metadata(engine, COLLECTED)
        }
        self._trimmed = load_version(engine, LOG_TRIMMED)

    def collected_version(self, namespace: int) -> Version:
        """The oldest version at which a namespace can still be read."""
        return self.collected.get(encode_namespace(namespace), 0)

    def collected_horizon(self, namespace: int) -> Version:
        """The highest stamp of a tombstone or expired record that was removed."""
        return load_version(self._engine, HORIZON + encode_namespace(namespace))

    def trimmed_version(self) -> Version:
        """Changes at or below this are no longer in the logs."""
        return self._trimmed

    def declare_collected(self, safe_points: Mapping[int, Version]) -> None:
        """Declare that the namespaces can no longer be read below these versions."""
        raised = {
            encode_namespace(namespace): safe_point
            for namespace, safe_point in safe_points.items()
            if safe_point > self.collected_version(namespace)
        }
        if raised:
            self._engine.write(
                [store_version(COLLECTED + namespace, version) for namespace, version in raised.items()]
            )
            self._engine.sync()
            self.collected.update(raised)

    def collect(self, namespace: int, pause: Callable[[], bool]) -> Collected:
        """Remove what no reader at or above the namespace's collected version can see."""
        encoded = encode_namespace(namespace)
        collector = Collector(
            self._engine,
            encoded,
            safe_point=self.collected.get(encoded, 0),
            settled=SETTLED,
            horizon=self.collected_horizon(namespace),
            pause=pause,
        )
        return collector.run(*_namespace_bounds(encoded))

    def declare_trimmed(self, through: Version) -> bool:
        """Declare that changes at or below a version are gone; False if they were already."""
        if through <= self._trimmed:
            return False
        self._engine.write([store_version(LOG_TRIMMED, through)])
        self._engine.sync()
        self._trimmed = through
        return True

    def trim(self, logs: Iterable[int]) -> None:
        """Remove the rows of the logs that were declared trimmed."""
        for log in logs:
            self._engine.delete_range(LOG, *encode_log_range(log, 0, self._trimmed))

    def remove_namespace(self, namespace: int) -> None:
        """Remove all data of a namespace that was dropped."""
        encoded = encode_namespace(namespace)
        self._engine.delete_range(DATA, *_namespace_bounds(encoded))
        self._engine.write([(META, COLLECTED + encoded, None), (META, HORIZON + encoded, None)])
        self._engine.sync()
        self.collected.pop(encoded, None)


def _namespace_bounds(encoded: bytes) -> tuple[bytes, bytes]:
    """The engine keys of a namespace: its bytes stand in the first group, so plain prefixes bound them."""
    start = RAW + encoded
    end = prefix_end(start)
    assert end is not None
    return start, end

"""The plainest thing that a namespace can be compared with: a list of changes, and what follows from it."""

from typing import NamedTuple

from floodmark.model.change import Change
from floodmark.model.ranges import KeyRange
from floodmark.model.version import COUNTER_BITS, Version, physical_ms
from floodmark.site import Namespace


class Written(NamedTuple):
    """One change as the model remembers it; a value of None is a deletion."""

    version: Version
    key: bytes
    value: bytes | None
    expires_at: int | None = None

    def is_live(self, at_ms: int) -> bool:
        return self.value is not None and (self.expires_at is None or self.expires_at * 1000 > at_ms)


def written(change: Change) -> Written:
    """A change in the model's words."""
    return Written(change.version, change.key, change.value, change.expires_at)


class ModelNamespace:
    """A namespace as a list of changes in commit order."""

    def __init__(self, namespace: Namespace, created: Version) -> None:
        self.namespace = namespace
        self.created = created
        self.retention_ms = namespace.settings.retention.seconds * 1000
        self.changes: list[Written] = []
        self.collected: Version = 0

    def write(self, *changes: Written) -> None:
        """Append changes, which must lie above all that came before."""
        for change in sorted(changes):
            assert not self.changes or change.version >= self.changes[-1].version, "versions went back"
            self.changes.append(change)

    def since(self, version: Version, until: Version, at_ms: int) -> list[Written]:
        """The changes in `(version, until]` as a reader gets them: one that is expired is a deletion."""
        return [
            change if change.is_live(at_ms) else change._replace(value=None)
            for change in self.changes
            if version < change.version <= until
        ]

    def newest(self, at: Version) -> dict[bytes, Written]:
        """The newest change of each key at or below a version, dead or alive."""
        return {change.key: change for change in self.changes if change.version <= at}

    def find(self, key: bytes, at: Version, at_ms: int | None = None) -> Written | None:
        """The live record of a key at a version; expiry is judged at `at_ms` if it is given."""
        found = self.newest(at).get(key)
        return found if found and found.is_live(physical_ms(at) if at_ms is None else at_ms) else None

    def rows(self, keys: KeyRange, at: Version) -> list[tuple[bytes, bytes]]:
        """The live rows of a range at a version, in order of keys."""
        live = [change for change in self.newest(at).values() if change.is_live(physical_ms(at))]
        return sorted((change.key, change.value or b"") for change in live if keys.contains(change.key))

    def collect(self, oldest: Version, now_ms: int, resolved: tuple[Version, Version]) -> None:
        """Let go of what lies behind `oldest`: the retention's age, but never what is not resolved.

        `resolved` is the version before the collection and the one after it: writing expiries moves it.
        """
        least, most = (min((now_ms - self.retention_ms) << COUNTER_BITS, each) for each in resolved)
        assert self.collected <= oldest <= max(self.collected, most)
        assert oldest >= least or least <= self.created, "garbage was left"
        self.collected = oldest

"""A time source that a test sets, and storage for the clock's bound that remembers and can fail."""

from floodmark.model.errors import StorageFailed
from floodmark.model.version import Version


class FakeTime:
    """Physical time as the test wants it, forwards or backwards."""

    def __init__(self, ms: int = 1_700_000_000_000) -> None:
        self.ms = ms

    def __call__(self) -> int:
        return self.ms


class FakeBound:
    """An upper bound that outlives the clocks which use it."""

    def __init__(self) -> None:
        self.stored: Version = 0
        self.events: list[Version] = []
        self.failing = False

    def load(self) -> Version:
        return self.stored

    def store(self, bound: Version) -> None:
        if self.failing:
            raise StorageFailed("the disk refused")
        self.events.append(bound)
        self.stored = bound

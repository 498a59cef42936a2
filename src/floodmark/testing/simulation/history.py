"""The history of a run, and the selection of the events that concern a violation.

A run has thousands of events, and a violation concerns one key or one version.  So each event names the keys
and versions that it is about.  The report of a violation shows the events about the same ones, and those that
concern whole sites: crashes, restarts, clock jumps.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Final, NamedTuple

from floodmark.model.version import Version, physical_ms
from floodmark.testing.clock import START_MS

TOLD_MAX: Final = 60


class Key(NamedTuple):
    """A key of a namespace."""

    namespace: str
    key: bytes

    def __str__(self) -> str:
        return f"{self.namespace}/{self.key.decode()}"


class Violation(AssertionError):
    """A promise was broken.  It is named by its number in the design, or by a word if it has none."""

    def __init__(
        self,
        promise: str,
        site: str,
        finding: str,
        *,
        keys: Iterable[Key] = (),
        version: Version | None = None,
    ) -> None:
        super().__init__(f"promise {promise} at {site}: {finding}")
        self.promise = promise
        self.keys = frozenset(keys)
        self.version = version


class Event(NamedTuple):
    """Something that happened at a site; without keys it concerns all of them."""

    at_ms: int
    site: str
    what: str
    keys: frozenset[Key] = frozenset()
    version: Version | None = None

    def __str__(self) -> str:
        keys = " ".join(sorted(map(str, self.keys)))
        version = "" if self.version is None else f" at {show_version(self.version)}"
        return f"{self.at_ms - START_MS:>8} ms  {self.site:<5} {self.what} {keys}{version}".rstrip()


class RunHistory:
    """All events of a run, in their order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(
        self, at_ms: int, site: str, what: str, *, keys: Iterable[Key] = (), version: Version | None = None
    ) -> None:
        """Record an event."""
        self.events.append(Event(at_ms, site, what, frozenset(keys), version))

    def digest(self) -> str:
        """A digest of the whole history, equal for two runs of one seed."""
        return blake2b("\n".join(map(str, self.events)).encode(), digest_size=8).hexdigest()

    def concerning(self, violation: Violation) -> list[str]:
        """The events that concern a violation, only the last ones if there are many."""
        told = [
            str(event)
            for event in self.events
            if (not event.keys and event.version is None)
            or event.keys & violation.keys
            or (violation.version is not None and event.version == violation.version)
        ]
        left_out = len(told) - TOLD_MAX
        return told if left_out <= 0 else [f"({left_out} earlier events are left out)", *told[-TOLD_MAX:]]


def show_version(version: Version) -> str:
    """A version in readable form: milliseconds since the run began, and the counter.

    >>> show_version((START_MS + 1500) << 18 | 3)
    '1500.3'
    """
    return f"{physical_ms(version) - START_MS}.{version & ((1 << 18) - 1)}"

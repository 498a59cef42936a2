"""Reading the changes of a subscription, each with its position: new ones, and live ones once more."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias

from floodmark.feed.acknowledgement import LiveCommit, Position
from floodmark.feed.subscriptions import OpenChanges, SubscriptionRow
from floodmark.model.change import Change
from floodmark.model.errors import Corruption
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version, physical_ms

Decode: TypeAlias = Callable[[ChangeBatch], list[Change]]

# Live commits that are closer than this are read again in one go, with all that lies between them.
NEARBY_MS: Final = 100


class Step(NamedTuple):
    """A change that was read, or none; with it, the reader has everything at or below `through`."""

    change: Change | None
    position: Position
    through: Version
    is_redelivered: bool = False


class SubscriptionReader:
    """Reads what a subscription is about.

    A stream that follows must give an empty batch now and then: whoever waits for a change then learns
    that the subscription was closed, moved or lost meanwhile.
    """

    def __init__(self, row: SubscriptionRow, open_changes: OpenChanges, decode: Decode) -> None:
        self._row = row
        self._open_changes = open_changes
        self._decode = decode

    def read(self, since: Version, *, follow: bool) -> Iterator[Step]:
        """The changes after a version."""
        return self._steps(self._row.request(since, follow=follow))

    def read_again(self, commits: Iterable[LiveCommit]) -> Iterator[Step]:
        """The live changes of some commits, in order."""
        for group in _nearby(commits):
            yield from self._read_group(group)

    def _read_group(self, commits: list[LiveCommit]) -> Iterator[Step]:
        by_version = {commit.version: commit for commit in commits}
        missing = sum(commit.unacked for commit in commits)
        first, last = commits[0].version, commits[-1].version
        for step in self._steps(self._row.request(first - 1, last)):
            commit = by_version.get(step.position.version)
            if step.change is not None and commit is not None and commit.is_live(step.position.index):
                missing -= 1
                yield step._replace(is_redelivered=True)
        if missing:
            raise Corruption(
                f"{missing} changes that subscription {self._row.name!r} delivered between versions {first} "
                f"and {last} cannot be read again. Read a snapshot with scan(at=...), and seek the "
                "subscription to its version",
                subscription=self._row.name,
            )

    def _steps(self, request: ChangesRequest) -> Iterator[Step]:
        """Number the changes of each commit, which may go on in the next batch."""
        version, index = 0, 0
        for batch in self._open_changes(request):
            changes = self._decode(batch)
            for left, change in zip(reversed(range(len(changes))), changes, strict=True):
                version, index = change.version, index + 1 if change.version == version else 0
                yield Step(change, Position(version, index), 0 if left else batch.through)
            if not changes:
                yield Step(None, Position(batch.through, 0), batch.through)


def _nearby(commits: Iterable[LiveCommit]) -> Iterator[list[LiveCommit]]:
    """The commits with live changes, those together that are close to each other."""
    group: list[LiveCommit] = []
    for commit in commits:
        if not commit.runs:
            continue
        if group and physical_ms(commit.version) - physical_ms(group[-1].version) > NEARBY_MS:
            yield group
            group = []
        group.append(commit)
    if group:
        yield group

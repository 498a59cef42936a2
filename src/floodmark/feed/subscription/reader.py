"""The changes of a subscription, each with its position: live ones once more, then new ones."""

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias

from floodmark.feed.subscription.acknowledgement import ChangePosition, LiveCommit, SnapshotMark, commits_of
from floodmark.feed.subscription.bookkeeping import Bookkeeping
from floodmark.feed.subscription.subscriptions import OpenChanges, SubscriptionRow
from floodmark.model.change import Change
from floodmark.model.errors import Corruption
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import Version, physical_ms

Decode: TypeAlias = Callable[[ChangeBatch], list[Change]]

# Live commits that are closer than this are read again in one stream, with all between them.
NEARBY_MS: Final = 100


class ReadStep(NamedTuple):
    """A change that was read, or none; with it, the reader has everything at or below `through`.

    A row of a snapshot may come with a `mark`, a place that it is found from.
    """

    change: Change | None
    position: ChangePosition
    through: Version
    is_redelivered: bool = False
    mark: SnapshotMark | None = None


class SnapshotPlace(NamedTuple):
    """A place in the snapshot at a version."""

    version: Version
    mark: SnapshotMark


class SubscriptionReader:
    """Reads the changes of a subscription.

    A stream that follows must give an empty batch now and then: a thread that waits for a change then notices
    that the subscription was closed, moved or lost.
    """

    def __init__(self, row: SubscriptionRow, open_changes: OpenChanges, decode: Decode) -> None:
        self._row = row
        self._open_changes = open_changes
        self._decode = decode

    def read(
        self, since: Version, *, follow: bool, snapshot: SnapshotPlace | None = None
    ) -> Iterator[ReadStep]:
        """The changes after a version, or first the rows of a snapshot from a place on."""
        if snapshot is None:
            return self._steps(self._row.request(since, follow=follow))
        version, mark = snapshot
        return self._steps(self._row.request(version, follow=follow, snapshot=mark.key), snapshot)

    def read_again(
        self, commits: Iterable[LiveCommit], snapshot: SnapshotPlace | None = None
    ) -> Iterator[ReadStep]:
        """The live changes of some commits, in order; the first may be a snapshot, read from a place on."""
        left = list(commits)
        if snapshot is not None and left and left[0].version == snapshot.version:
            version, mark = snapshot
            request = self._row.request(version, version, snapshot=mark.key)
            yield from self._find_live(left[:1], self._steps(request, snapshot))
            del left[0]
        for group in _nearby(left):
            request = self._row.request(group[0].version - 1, group[-1].version)
            yield from self._find_live(group, self._steps(request))

    def _find_live(self, commits: list[LiveCommit], steps: Iterator[ReadStep]) -> Iterator[ReadStep]:
        by_version = {commit.version: commit for commit in commits}
        missing = sum(commit.unacked for commit in commits)
        for step in steps:
            commit = by_version.get(step.position.version)
            if step.change is not None and commit is not None and commit.is_live(step.position.index):
                missing -= 1
                yield step._replace(is_redelivered=True)
            if not missing:
                return
        if missing:
            first, last = commits[0].version, commits[-1].version
            raise Corruption(
                f"{missing} changes that subscription {self._row.name!r} delivered between versions {first} "
                f"and {last} cannot be read again. Seek the subscription to a snapshot, which has every key",
                subscription=self._row.name,
            )

    def _steps(self, request: ChangesRequest, snapshot: SnapshotPlace | None = None) -> Iterator[ReadStep]:
        """Number the changes of each commit, which may go on in the next batch.

        A snapshot is one commit, whose rows are counted from the place on.
        """
        version, index, mark = 0, 0, None
        if snapshot is not None:
            version, index = snapshot.version, snapshot.mark.index - 1
        for batch in self._open_changes(request):
            changes = self._decode(batch)
            # In the middle of a snapshot, a reader does not have all of any version.
            through = batch.through if batch.snapshot is None else 0
            for left, change in zip(reversed(range(len(changes))), changes, strict=True):
                version, index = change.version, index + 1 if change.version == version else 0
                yield ReadStep(change, ChangePosition(version, index), 0 if left else through, mark=mark)
                mark = None
            if not changes:
                yield ReadStep(None, ChangePosition(batch.through, 0), through)
            if batch.snapshot is not None:
                mark = SnapshotMark(index + 1, batch.snapshot)


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


class DeliveryStream:
    """The stream of a consumer's next deliveries.  For one thread at a time.

    When the generation of the books changes, the stream is opened anew.
    """

    def __init__(self, reader: SubscriptionReader, book: Bookkeeping, *, follow: bool) -> None:
        self._reader = reader
        self._book = book
        self._follow = follow
        self._steps: Generator[ReadStep, None, None] | None = None
        self._generation = 0

    @property
    def is_current(self) -> bool:
        """Whether the last step still counts.  The books are locked."""
        return self._generation == self._book.generation

    def next(self) -> ReadStep | None:
        """The next step; None at the end."""
        with self._book.changed:
            generation = self._book.generation
        if self._steps is None or self._generation != generation:
            self.close()
            self._steps = _read_due(self._reader, self._book, generation, follow=self._follow)
            self._generation = generation
        try:
            step = next(self._steps, None)
        except BaseException:
            # The next call opens the stream again.
            self._steps = None
            raise
        if step is None:
            self._steps = None
        return step

    def close(self) -> None:
        """Close the stream.  Closing twice is harmless."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None


def _read_due(
    reader: SubscriptionReader, book: Bookkeeping, generation: int, *, follow: bool
) -> Generator[ReadStep, None, None]:
    """The changes that are due again, then new ones.

    It does not refer to its stream, so that a subscription which is dropped unclosed frees both at once.
    """
    with book.changed:
        due = commits_of(filter(book.is_available, book.due))
        place = _find_place(book, due[0].runs[0]) if due else None
    yield from reader.read_again(due, place)
    with book.changed:
        if generation == book.generation:
            # Held changes may come back.
            book.due = {each for each in book.due if each in book.held}
        since = book.account.deliveries.through
        place = _find_place(book) if book.account.is_at_snapshot else None
    yield from reader.read(since, follow=follow, snapshot=place)


def _find_place(book: Bookkeeping, index: int | None = None) -> SnapshotPlace | None:
    """The place from which a row of the snapshot is read, or the next; None if there is no snapshot."""
    account = book.account
    return None if account.snapshot is None else SnapshotPlace(account.snapshot, account.find_mark(index))

"""Chooses the end of the next step of a reader that works in steps.

A step may end at any version up to the resolved one: a commit has one version, so no commit is divided.  The
changes of a step are counted in the change log, without reading values.

Where the log was trimmed, changes can be read by a scan but not counted.  Such a step ends where the log
begins.
"""

from collections.abc import Callable, Iterator
from itertools import chain, groupby

import msgspec

from floodmark.codec.changelog import count_changes, decode_row, is_own, may_be_batch
from floodmark.codec.ordered import qualify_range
from floodmark.feed.reading.swaps import Swap, end_before_swap, no_swap
from floodmark.feed.safepoints import SafePoints
from floodmark.model.change import Heartbeat
from floodmark.model.errors import InvalidArgument, VersionCollected
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import OnGeneration
from floodmark.model.version import Version
from floodmark.partition import Node, version_of

# The key range of a request for heartbeats only.
_NO_KEYS = KeyRange(b"", b"")


class ChangesCut(msgspec.Struct, frozen=True):
    """A step: its last version, its number of changes, and the resolved version when it was chosen.

    `changes` is exact if a limit was given; without one, counting ends at the first commit.  None means that
    the change log was trimmed.  `batches` is False if none of the changes is of an atomic batch.
    """

    version: Version
    changes: int | None
    resolved: Version
    batches: bool = True


class CutRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A step after `since` in the changes of a namespace, named by its id.

    It goes up to `until` or the resolved version, and holds at most `changes_max` changes, but always a
    whole commit.  With `at_heartbeat` it ends at the `through` of its last heartbeat, if it has one, so that
    several readers come to the same end.  With `own`, only changes first written at this site are counted.
    Unless `on_generation` is to fail, a swap is a step of its own.
    """

    namespace: int
    since: Version
    until: Version | None = None
    changes_max: int | None = None
    at_heartbeat: bool = False
    own: bool = False
    on_generation: OnGeneration = OnGeneration.FAIL

    def __post_init__(self) -> None:
        if self.changes_max is not None and self.changes_max < 1:
            raise InvalidArgument(f"a step holds at least one change, not {self.changes_max}")


def cut_changes(
    node: Node,
    safe_points: SafePoints,
    request: CutRequest,
    swap_after: Callable[[int | None, Version], Swap | None] = no_swap,
) -> ChangesCut:
    """The highest version at which a step may end, never below `since`.

    Raises VersionCollected if changes after `since` have been collected.  A step does not pass a version at
    which a data set was published, except a step of a link, whose target gets the data set separately.
    """
    # Nothing is older than the node itself.
    since = max(request.since, node.born_version())
    with safe_points.reading(since, request.namespace):
        # Writes that did not wait for the disk are not published without a sync.
        node.committer.sync()
        resolved = node.resolved_version()
        end = resolved if request.until is None else min(resolved, request.until)
        # Looked up after the resolved version: a swap that is missed here lies above it.
        swap = None if request.own else swap_after(request.namespace, since)
        if (
            swap is not None
            and swap.version == since + 1 <= end
            and request.on_generation != OnGeneration.FAIL
        ):
            return ChangesCut(swap.version, None, resolved, batches=False)
        end = end_before_swap(swap, since, end)
        if end <= since:
            return ChangesCut(max(end, request.since), 0, resolved, batches=False)
        keys = qualify_range(request.namespace)
        version, changes, batches = _cut(node, keys, since, end, request)
        if request.at_heartbeat:
            through = _last_heartbeat(node, since, version)
            if since < through < version:
                version, changes, batches = _cut(node, keys, since, through, request)
        return ChangesCut(version, changes, resolved, batches)


def has_own_changes(node: Node, namespace: int, since: Version, until: Version) -> bool:
    """Whether this site wrote to a namespace in `(since, until]`; True if the log was trimmed."""
    keys = qualify_range(namespace)
    try:
        return any(_commits(node, keys, max(since, node.born_version()), until, own=True))
    except VersionCollected:
        return True


def _cut(
    node: Node, keys: KeyRange, since: Version, end: Version, request: CutRequest
) -> tuple[Version, int | None, bool]:
    try:
        return _count(node, keys, since, end, request)
    except VersionCollected:
        return end if request.changes_max is None else min(end, node.retention.trimmed_version()), None, True


def _count(
    node: Node, keys: KeyRange, since: Version, end: Version, request: CutRequest
) -> tuple[Version, int, bool]:
    """Count commits until the next would exceed the limit."""
    total, changes_max, batches = 0, request.changes_max, False
    for version, changes, is_batch in _commits(node, keys, since, end, own=request.own):
        if changes_max is None:
            return end, changes, True
        if total and total + changes > changes_max:
            return version - 1, total, batches
        total += changes
        batches = batches or is_batch
    return end, total, batches


def _commits(
    node: Node, keys: KeyRange, since: Version, end: Version, *, own: bool
) -> Iterator[tuple[Version, int, bool]]:
    """The commits with changes of some keys: version, number of changes, and whether they may be of a batch.

    A large commit has several lines.
    """
    lines = chain.from_iterable(node.read_log(since, end, keys))
    for version, parts in groupby(lines, version_of):
        counted = [row for _, row, _ in parts if not own or is_own(row, node.site_id)]
        changes = sum([count_changes(row, keys) for row in counted])
        if changes:
            yield version, changes, any(map(may_be_batch, counted))


def _last_heartbeat(node: Node, since: Version, until: Version) -> Version:
    """The `through` of the last heartbeat in `(since, until]`; 0 if there is none."""
    last = None
    try:
        start = max(since, node.retention.trimmed_version())
        for page in node.read_log(start, until, _NO_KEYS, heartbeats=True):
            last = page[-1]
    except VersionCollected:
        # The log was trimmed meanwhile.  A heartbeat that was found before is still valid.
        pass
    if last is None:
        return 0
    heartbeat = decode_row(version_of(last), last[1])
    assert isinstance(heartbeat, Heartbeat)
    return heartbeat.through

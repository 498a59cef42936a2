"""What a site shows to its users, taken down as a whole, and checked to be all of one piece."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final, NamedTuple

from floodmark.codec.changelog import CommitRow, decode_log_key, decode_row
from floodmark.codec.ordered import NAMESPACE_BYTES
from floodmark.model import Heartbeat, KeyRange, Version
from floodmark.model.errors import VersionCollected
from floodmark.site import Namespace, NamespaceSettings, Site, open_engine
from floodmark.testing import FaultyEngine, SimulatedTime

HOUR_MS: Final = 3_600_000

# What the harness itself writes to see whether a site is usable; not part of what is compared.
PROBE_KEY: Final = b"~probe"
PROBE_NAME: Final = "probe"


class Violation(AssertionError):
    """A checker has found something.  It names itself, so that its canary can tell."""

    def __init__(self, checker: str, finding: str) -> None:
        super().__init__(f"{checker}: {finding}")
        self.checker = checker


class Written(NamedTuple):
    """One change; the value is None for a delete."""

    namespace: str
    key: bytes
    value: bytes | None


class SeenCommit(NamedTuple):
    """The changes of one version."""

    version: Version
    changes: tuple[Written, ...]


class Layout(NamedTuple):
    """What is not data: all of it changes whole or not at all."""

    namespaces: tuple[tuple[str, NamespaceSettings], ...]
    partitions: tuple[KeyRange, ...]
    safe_points: tuple[tuple[str, Version], ...]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A site as its users see it.  Commits at or below `trimmed` are no longer told."""

    commits: tuple[SeenCommit, ...]
    layout: Layout
    trimmed: Version
    next_version: Version

    def without_probes(self) -> "Observation":
        """The same without what the harness wrote."""
        commits = [
            SeenCommit(version, tuple(change for change in changes if change.key != PROBE_KEY))
            for version, changes in self.commits
        ]
        points = tuple(point for point in self.layout.safe_points if point[0] != PROBE_NAME)
        return Observation(
            commits=tuple(commit for commit in commits if commit.changes),
            layout=self.layout._replace(safe_points=points),
            trimmed=self.trimmed,
            next_version=self.next_version,
        )


def observe(site: Site, next_version: Version, *, past: bool) -> Observation:
    """Take down a site, after checking that its data and its change log agree, now or also in the past."""
    trimmed = 0
    while True:
        try:
            changes = list(site.changes(since=trimmed))
            break
        except VersionCollected as error:
            oldest = error.details["oldest"]
            assert isinstance(oldest, int)
            assert oldest > trimmed
            trimmed = oldest
    commits = tuple(
        SeenCommit(version, tuple(Written(change.namespace, change.key, change.value) for change in group))
        for version, group in groupby(changes, key=lambda change: change.version)
    )
    check_whole(site, commits, trimmed, past=past)
    return Observation(
        commits=commits,
        layout=Layout(
            namespaces=tuple((name, site.namespace(name).settings) for name in site.namespaces()),
            partitions=tuple(partition.range for partition in site.partitions()),
            safe_points=tuple((point.name, point.version) for point in site.safe_points()),
        ),
        trimmed=trimmed,
        next_version=next_version,
    )


def check_whole(site: Site, commits: Sequence[SeenCommit], trimmed: Version, *, past: bool) -> None:
    """The change log, replayed into a dict, gives what reading gives, now or also at each version."""
    if any(left.version >= right.version for left, right in pairwise(commits)):
        raise Violation("whole", f"changes are not in commit order: {commits}")
    for name in site.namespaces():
        namespace = site.namespace(name).stored
        replayed = dict(namespace.scan(at=trimmed)) if trimmed else {}
        for version, changes in commits:
            mine = [change for change in changes if change.namespace == name]
            for change in mine:
                if change.value is None:
                    replayed.pop(change.key, None)
                else:
                    replayed[change.key] = change.value
            if mine and past:
                _compare(f"{name} at {version}", dict(namespace.scan(at=version)), replayed)
        _compare(name, dict(namespace.scan()), replayed)
        _compare(f"{name} backwards", dict(namespace.scan(reverse=True)), replayed)
        keys = {change.key for _, changes in commits for change in changes if change.namespace == name}
        read = {key: value for key in keys | set(replayed) if (value := namespace.get(key)) is not None}
        _compare(f"{name} key by key", read, replayed)


def _compare(what: str, read: Mapping[bytes, bytes], replayed: Mapping[bytes, bytes]) -> None:
    if read != replayed:
        raise Violation("whole", f"{what} reads {dict(read)}, its change log says {dict(replayed)}")


def reopen(image: FaultyEngine, now_ms: int) -> Observation:
    """Open what a crash left, with the clock set back an hour, and see that it works."""
    time = SimulatedTime(now_ms - HOUR_MS)
    written = max((decode_log_key(key)[1] for key, _ in image.contents()["log"]), default=0)
    with open_engine(image, site="oslo", site_id=7, time_source=time) as site:
        next_version = site.now()
        if next_version <= written:
            raise Violation("versions", f"{next_version} comes after {written} was written")
        observation = observe(site, next_version, past=True)
        site.heartbeat()
        for name in site.namespaces():
            namespace = site.namespace(name)
            version = probe(namespace)
            if version <= next_version or namespace.get(PROBE_KEY) is None:
                raise Violation("versions", f"a write after the crash, at {version}, is not the newest")
        site.heartbeat()
        check_accounts(image, observation.trimmed)
    return observation


def probe(namespace: Namespace) -> Version:
    """Write something that the namespace can hold."""
    if namespace.settings.merge == "counter":
        return namespace.add(PROBE_KEY)
    return namespace.put(PROBE_KEY, b'{"after":"the crash"}')


def check_accounts(image: FaultyEngine, trimmed: Version) -> None:
    """Every heartbeat that vouches for an interval counts exactly the changes in it.

    A node's heartbeat leaves out logs that were sealed in its interval: those end with a heartbeat of
    their own.
    """
    commits: list[tuple[int, Version, CommitRow]] = []
    heartbeats: list[tuple[int, Heartbeat]] = []
    for key, stored in image.contents()["log"]:
        log, version, _ = decode_log_key(key)
        row = decode_row(version, stored)
        if isinstance(row, Heartbeat):
            heartbeats.append((log, row))
        else:
            commits.append((log, version, row))
    for _, beat in heartbeats:
        # 0 says that the interval was not observed from its beginning.
        if beat.since == 0 or beat.since < trimmed:
            continue
        sealed = {other.log for _, other in heartbeats if beat.since < other.version <= beat.through}
        counts: dict[int, int] = {}
        for log, version, row in commits:
            vouched = log not in sealed if beat.log is None else log == beat.log
            if vouched and beat.since < version <= beat.through:
                for key in row.keys:
                    namespace = int.from_bytes(key[:NAMESPACE_BYTES], "big")
                    counts[namespace] = counts.get(namespace, 0) + 1
        claimed = {namespace: sums.all.changes for namespace, sums in beat.sums.items()}
        if claimed != counts:
            raise Violation(
                "accounts", f"the heartbeat at {beat.version} counts {claimed}, its logs hold {counts}"
            )

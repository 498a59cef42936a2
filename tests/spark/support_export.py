"""What the tests of exports share: what a site says, and what a target says, in one form."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeAlias

import pyarrow

from floodmark.model.version import COUNTER_BITS, Version, moment_of
from floodmark.site import Namespace, Site
from floodmark.spark.jobs import read_export

Row: TypeAlias = tuple[Any, ...]


def history_of(site: Site, namespace: str, until: Version) -> list[Row]:
    """Every change up to a version, as rows of an export."""
    return [
        (
            change.key,
            change.value,
            str(change.type),
            change.version,
            moment_of(change.version),
            change.stamp.site,
            change.stamp.version,
            change.partition,
            None if change.expires_at is None else moment_of(change.expires_at * 1000 << COUNTER_BITS),
            change.snapshot,
            change.batch,
        )
        for change in sorted(
            site.changes(namespace, until=until), key=lambda change: (change.key, change.version)
        )
    ]


def exported(target: Path, at: Version | None = None) -> list[Row]:
    """The rows of a target."""
    table = pyarrow.table(read_export(str(target), at).to_table())
    rows = table.sort_by([("key", "ascending"), ("_commit_version", "ascending")]).to_pylist()
    return [tuple(row.values()) for row in rows]


def current_of(site: Site, namespace: str, at: Version) -> dict[bytes, bytes]:
    """What is live in a namespace."""
    return dict(site.namespace(namespace).scan(at=at))


def exported_current(target: Path, at: Version | None = None) -> dict[bytes, bytes]:
    """What a current view says is live, in which no key is twice."""
    rows = exported(target, at)
    found = {row[0]: row[1] for row in rows}
    assert len(found) == len(rows), "a key is twice in the view"
    return found


@contextmanager
def writing_pairs(left: Namespace, right: Namespace) -> Iterator[None]:
    """Somebody who writes to one namespace and then to another, again and again, until the block ends."""
    ended = Event()

    def write() -> None:
        for number in count():
            if ended.wait(0.001):
                return
            for namespace in (left, right):
                namespace.put(b"%06d" % number, b"%d" % number)
                namespace.put(b"same", b"%d" % number)

    writer = Thread(target=write, name="pairs")
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


def require_agreement(left: dict[bytes, bytes], right: dict[bytes, bytes]) -> None:
    """What was written in pairs differs by the one pair under way at most, and not by less than nothing."""
    behind = {key: value for key, value in left.items() if right.get(key) != value}
    assert set(right) <= set(left)
    assert len(behind) <= 2, f"{len(behind)} keys differ"
    assert len(right) > 10, "too little was written to tell"


def newest(rows: list[Row]) -> dict[bytes, bytes]:
    """Of each key the value with the highest version."""
    return {row[0]: row[1] for row in sorted(rows, key=lambda row: row[3])}

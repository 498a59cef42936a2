"""Repairs of single keys: a record replaces the one that was compared, if that is still there.

Sites that have exchanged all changes hold equal records.  If they differ, applying the winner again does not
help, because the site already counts it as merged.  So a repair is conditional on the version that was
*seen*, checked inside the commit, and not on stamps.  It is stored at a new commit version with its own
stamp; a key that was written meanwhile is left alone and has to be compared again.

A repair is a change like any other: it is in the change log, and the sums count it by its origin.
"""

from collections.abc import Sequence

from floodmark.codec.ordered import NAMESPACE_BYTES, decode_version, encode_version
from floodmark.codec.stamps import find_origins, stamp_version
from floodmark.engine import Engine, Row
from floodmark.model.errors import InvalidArgument
from floodmark.model.version import Version
from floodmark.partition.commit.commit import Decide, Mint, Writes
from floodmark.partition.commit.merging import stamp_of
from floodmark.partition.families import DATA
from floodmark.partition.generations import as_of
from floodmark.partition.read.stamps import newest_rows


def find_rows(engine: Engine, prefixes: Sequence[bytes], at: Version) -> list[Row | None]:
    """The newest stored version at or below `at` under each of some encoded keys, which are in order."""
    engine = as_of(engine, at)
    rows = newest_rows(engine, prefixes)
    for index, row in enumerate(rows):
        if row is not None and decode_version(row[0]) > at:
            prefix = prefixes[index]
            rows[index] = engine.ceiling(DATA, prefix + encode_version(at), prefix)
    return rows


def write_where_seen(engine: Engine, writes: Writes, seen: Sequence[Version], site_id: int) -> Decide:
    """A commit of the records whose keys still have the versions that were seen; 0 stands for no record."""

    def decide(_: Mint) -> Writes | None:
        rows = newest_rows(engine, writes.prefixes)
        wanted = [_version_of(row) == version for row, version in zip(rows, seen, strict=True)]
        for key, row, value, is_wanted in zip(writes.keys, rows, writes.values, wanted, strict=True):
            if is_wanted:
                _require_not_older(key, row, value, site_id)
        return writes.only(wanted)

    return decide


def _version_of(row: Row | None) -> Version:
    return 0 if row is None else decode_version(row[0])


def _require_not_older(key: bytes, row: Row | None, value: bytes, site_id: int) -> None:
    """Raise if a repair is older than the record that it replaces: on each key the newest stamp is on top.

    A record whose stamp exceeds its own version is damaged, and may be replaced.
    """
    held = stamp_of(row, site_id)
    if find_origins([value])[0] < held and stamp_version(held) <= _version_of(row):
        raise InvalidArgument(
            f"a repair of {key[NAMESPACE_BYTES:]!r:.60} is older than what is there; the record with the "
            "higher stamp is the one to repair by",
            key=key[NAMESPACE_BYTES:],
        )

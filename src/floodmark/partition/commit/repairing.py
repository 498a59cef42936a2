"""Records that are looked at and put right, key by key, whatever is in their place.

Sites that have exchanged all changes hold equal records.  Where they do not, something went wrong that no
rule of merging mends: to apply the winner again is to bring a site what it believes to have.  So a repair
goes by what was *seen*.  It is stored, under a new commit version and with the stamp that it always had, if
the key's newest version is still the one that somebody has looked at, and that is asked inside the commit.
Whatever was written meanwhile stays, and is for whoever repairs to compare anew.

A repair is a change like any other: it stands in the change log, and the sums count it by its origin.
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
from floodmark.partition.read.stamps import newest_rows


def find_rows(engine: Engine, prefixes: Sequence[bytes], at: Version) -> list[Row | None]:
    """The newest stored version at or below `at` under each of some encoded keys, which are in order."""
    rows = newest_rows(engine, prefixes)
    for index, row in enumerate(rows):
        if row is not None and decode_version(row[0]) > at:
            prefix = prefixes[index]
            rows[index] = engine.ceiling(DATA, prefix + encode_version(at), prefix)
    return rows


def write_where_seen(engine: Engine, writes: Writes, seen: Sequence[Version], site_id: int) -> Decide:
    """A commit of those records whose keys still have the versions that were seen; 0 stands for none."""

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
    """On each key the newest record has the highest stamp: what is older never comes to stand above it.

    A stamp above the record's own version is damage, which nothing could ever win over: it gives way.
    """
    held = stamp_of(row, site_id)
    if find_origins([value])[0] < held and stamp_version(held) <= _version_of(row):
        raise InvalidArgument(
            f"a repair of {key[NAMESPACE_BYTES:]!r:.60} is older than what is there; the record with the "
            "higher stamp is the one to repair by",
            key=key[NAMESPACE_BYTES:],
        )

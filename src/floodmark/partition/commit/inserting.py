"""Commits below newer records: rewrites the records above a commit, of the keys that it writes.

A prepared write commits at a version c, and its keys may have newer records by then.  A copy from another
site is compared with the newest record at or below c alone.  If it loses to that, it is not stored.  If it
loses only to a record above c, it is stored below the winner: else a snapshot between the two would see half
of its batch.  The same engine batch rewrites the records above c as if the commit had come first:

- a copy from another site with a lower stamp would have lost: it is removed, also from the change log;
- a record of fields includes the change, and a copy that adds nothing to it any more is removed;
- a counter to which this site has added continues from the new total.  The log holds totals, so it is
  rewritten too; otherwise another site would keep the old total.

Only plain gets can have read these records before (`prepared/writes.py` says why).

A decision is always carried out: no limit is checked here, and a total that would not fit is capped.  Commits
above an open write leave room for this in an engine batch, or wait (`PreparedWrites.on_crowded`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from floodmark.codec.changelog import (
    CommitRow,
    decode_log_key,
    decode_row,
    encode_commit,
    encode_log_key,
    encode_log_range,
)
from floodmark.codec.ordered import decode_version, encode_prefixes, encode_version
from floodmark.codec.stamps import NO_STAMP, digest_copies, encode_stamp, find_origins, is_later
from floodmark.codec.states import CounterEntry, CounterState, decode_state, encode_state
from floodmark.codec.values import HAS_ORIGIN
from floodmark.engine import Engine, Row, WriteRow
from floodmark.engine.base import scan_rows
from floodmark.merge.states import Written, merge_states, stamp_state
from floodmark.model.change import Stamp
from floodmark.model.limits import (
    COUNTER_TOTAL_MAX,
    LOG_INLINE_VALUE_BYTES_MAX,
    PAGE_BYTES_MAX,
    PAGE_ROWS_MAX,
)
from floodmark.model.version import Version
from floodmark.partition.commit.commit import CommitTally, tally_one
from floodmark.partition.commit.expiry_index import index_rows
from floodmark.partition.commit.merging import is_state, kind_of, mark_like
from floodmark.partition.families import DATA, LOG
from floodmark.partition.generations import published_stamps
from floodmark.partition.read.records import find_stored

# Keys whose newest records are read at once: the values of more might need too much memory.
_READ_KEYS: Final = 32
# Rows of the first page above a commit; usually one row is enough.
_PROBE_ROWS: Final = 4
# The log holds no large value, so any large value makes the same row.
_LARGE: Final = bytes(LOG_INLINE_VALUE_BYTES_MAX + 1)


class Correction(NamedTuple):
    """A correction of the change log; `before` is None for a new change, `after` for one that is removed."""

    version: Version
    key: bytes
    before: bytes | None
    after: bytes | None

    def tallies(self, site: int) -> Iterator[CommitTally]:
        """The tallies that correct the sums of its commit."""
        if self.before is not None:
            version, namespace, changes, digest, own = _tally(self.version, site, self.key, self.before)
            yield version, namespace, -changes, digest, own
        if self.after is not None:
            yield _tally(self.version, site, self.key, self.after)


class Insertion:
    """A commit at a version below others, built key by key with `add`; `rows` returns all that it writes."""

    def __init__(self, engine: Engine, log: int, version: Version, site: int, log_row_bytes_max: int) -> None:
        # The keys that log a change at the version, and the changes.
        self.keys: list[bytes] = []
        self.logged: list[bytes] = []
        self.corrections: list[Correction] = []
        self._engine = engine
        self._log = LoggedCommits(engine, log, log_row_bytes_max)
        self._log_id = log
        self._version = version
        self._site = site
        self._log_row_bytes_max = log_row_bytes_max
        self._rows: list[WriteRow] = []

    def add(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Insert the writes of qualified keys, which are in order."""
        for start in range(0, len(keys), _READ_KEYS):
            some = keys[start : start + _READ_KEYS]
            prefixes = encode_prefixes(some)
            newest = self._engine.ceilings(DATA, prefixes)
            published = published_stamps(self._engine, some) or [NO_STAMP] * len(some)
            rows = zip(some, prefixes, values[start : start + _READ_KEYS], newest, strict=True)
            for row, data_set in zip(rows, published, strict=True):
                # A data set may have been published since the copy was prepared.
                origin = find_origins([row[2]])[0] if data_set else NO_STAMP
                if not origin or is_later(origin, data_set):
                    self._add(*row)

    def _add(self, key: bytes, prefix: bytes, value: bytes, newest: Row | None) -> None:
        written: Written | None
        base = None if newest is None else (decode_version(newest[0]), newest[1])
        is_below = base is not None and base[0] > self._version
        if is_below:
            base = find_stored(self._engine, prefix, self._version)
        before = None if base is None else base[1]
        if value[-1] & HAS_ORIGIN:
            written = _copy(base, value, self._version, self._site)
        else:
            written = _write(before, value, self._version, self._site)
        if written is None:
            return
        written = mark_like(value, written)
        self._rows.append((DATA, prefix + encode_version(self._version), written.stored))
        self.keys.append(key)
        self.logged.append(written.logged)
        if not is_below:
            return
        below = self._version, written.stored
        for engine_key, stored in _rows_above(self._engine, prefix, self._version):
            version = decode_version(engine_key)
            found = self._log.find(version, key, stored)
            logged = stored if found is None else found
            redone = _redo(below, before, version, stored, logged, self._site)
            before = stored
            if redone is None:
                self._rows.append((DATA, engine_key, None))
                self._correct(version, key, found, None)
                continue
            if redone == Written(logged, stored):
                # This record stays as it is, and so do the records above, which were made from it.
                return
            below = version, redone.stored
            self._rows.append((DATA, engine_key, redone.stored))
            if found is not None and redone.logged != logged:
                self._correct(version, key, found, redone.logged)

    def tallies(self) -> list[CommitTally]:
        """The part of the commit in the sums."""
        return [
            _tally(self._version, self._site, *change) for change in zip(self.keys, self.logged, strict=True)
        ]

    def rows(self) -> list[WriteRow]:
        """All rows of the commit, and of the records and changes that it corrects above it."""
        if not self.keys:
            return []
        rows = self._rows + self._log.rewritten(self.corrections)
        for chunk, row in enumerate(encode_commit(self.keys, self.logged, self._log_row_bytes_max)):
            rows.append((LOG, encode_log_key(self._log_id, self._version, chunk), row))
        stored = [(engine_key, value) for _, engine_key, value in self._rows if value is not None]
        return rows + index_rows(*zip(*stored, strict=True))

    def _correct(self, version: Version, key: bytes, before: bytes | None, after: bytes | None) -> None:
        if before is not None:
            self.corrections.append(Correction(version, key, before, after))


class LoggedCommits:
    """The commits of a change log, to look up by version and key, and to rewrite."""

    def __init__(self, engine: Engine, log: int, row_bytes_max: int) -> None:
        self._engine = engine
        self._log = log
        self._row_bytes_max = row_bytes_max
        self._commits: dict[Version, dict[bytes, bytes | None]] = {}
        self._chunks: dict[Version, list[bytes]] = {}

    def find(self, version: Version, key: bytes, stored: bytes) -> bytes | None:
        """The logged value of a qualified key in a commit; None if it was not logged, as a load is not."""
        if version not in self._commits:
            self._read(version)
        commit = self._commits[version]
        if key not in commit:
            return None
        logged = commit[key]
        return stored if logged is None else logged

    def rewritten(self, corrections: Sequence[Correction]) -> list[WriteRow]:
        """The writes that apply corrections to the log."""
        touched: dict[Version, dict[bytes, bytes | None]] = {}
        for correction in corrections:
            touched.setdefault(correction.version, {})[correction.key] = correction.after
        rows: list[WriteRow] = []
        for version, changes in touched.items():
            rows += self._rewrite(version, changes)
        return rows

    def _rewrite(self, version: Version, changes: Mapping[bytes, bytes | None]) -> Iterator[WriteRow]:
        left = {
            key: (_LARGE if logged is None else logged)
            for key, logged in self._commits[version].items()
            if key not in changes
        }
        left |= {key: after for key, after in changes.items() if after is not None}
        keys = sorted(left)
        values = [left[key] for key in keys]
        encoded = encode_commit(keys, values, self._row_bytes_max) if keys else []
        for chunk, row in enumerate(encoded):
            yield LOG, encode_log_key(self._log, version, chunk), row
        for row_key in self._chunks[version]:
            if decode_log_key(row_key)[2] >= len(encoded):
                yield LOG, row_key, None

    def _read(self, version: Version) -> None:
        commit: dict[bytes, bytes | None] = {}
        chunks: list[bytes] = []
        start, end = encode_log_range(self._log, version - 1, version)
        for row_key, row in scan_rows(self._engine, LOG, start, end):
            chunks.append(row_key)
            decoded = decode_row(version, row)
            assert isinstance(decoded, CommitRow)
            commit |= zip(decoded.keys, decoded.values, strict=True)
        self._commits[version] = commit
        self._chunks[version] = chunks


def _rows_above(engine: Engine, prefix: bytes, version: Version) -> Iterator[Row]:
    """The records of an encoded key above a version, the lowest version first."""
    end, rows_max = prefix + encode_version(version), _PROBE_ROWS
    # The newest version of a key comes first in the engine, so this goes against its order.
    while page := engine.scan(DATA, prefix, end, rows_max=rows_max, bytes_max=PAGE_BYTES_MAX, reverse=True):
        yield from page
        end, rows_max = page[-1][0], PAGE_ROWS_MAX


def _write(current: bytes | None, value: bytes, version: Version, site: int) -> Written:
    """The record that a write at a version makes from the record below it."""
    if not is_state(value):
        return Written(value, value)
    if kind_of(value) == "fields":
        logged = stamp_state(value, None, version, site)
    else:
        logged = _stamp_counter(current, value, version, site)
    if not _is_alike(current, logged):
        return Written(logged, logged)
    return Written(logged, merge_states(current, logged, own=Stamp(version, site)))


def _copy(base: tuple[Version, bytes] | None, value: bytes, version: Version, site: int) -> Written | None:
    """The record that a copy makes from the record below it; None if it loses to that."""
    if not is_state(value):
        loses = base is not None and _stamp(*base, site) >= find_origins([value])[0]
        return None if loses else Written(value, value)
    current = base[1] if base is not None and _is_alike(base[1], value) else None
    stored = merge_states(current, value, own=Stamp(version, site))
    return None if stored is current else Written(value, stored)


def _stamp_counter(current: bytes | None, value: bytes, version: Version, site: int) -> bytes:
    write = _decode_counter(value)
    if write.deleted is not None:
        return stamp_state(value, None, version, site)
    return _encode_total(_total(current, site) + write.entries[0].total, version, site)


def _redo(
    below: tuple[Version, bytes],
    before: bytes | None,
    version: Version,
    stored: bytes,
    logged: bytes,
    site: int,
) -> Written | None:
    """A record remade from the new record below it instead of from `before`; None if it is removed."""
    current = below[1]
    if not _is_alike(current, stored):
        wins = _stamp(version, stored, site) > _stamp(*below, site)
        return Written(logged, stored) if wins else None
    is_copy = logged[-1] & HAS_ORIGIN != 0
    if not is_copy and kind_of(logged) == "counter":
        logged = _count_again(current, before, version, logged, site)
    joined = merge_states(current, logged, own=Stamp(version, site))
    return None if is_copy and joined is current else mark_like(stored, Written(logged, joined))


def _count_again(current: bytes, before: bytes | None, version: Version, logged: bytes, site: int) -> bytes:
    """The logged state of a write to a counter: its addition, made to the new total of this site."""
    entries = _decode_counter(logged).entries
    if not entries:
        return logged
    added = entries[0].total - _total(before, site)
    return _encode_total(_total(current, site) + added, version, site)


def _total(stored: bytes | None, site: int) -> int:
    """A site's total of a counter."""
    if stored is None or not is_state(stored) or kind_of(stored) != "counter":
        return 0
    return sum(entry.total for entry in _decode_counter(stored).entries if entry.site == site)


def _encode_total(total: int, version: Version, site: int) -> bytes:
    total = max(-COUNTER_TOTAL_MAX, min(total, COUNTER_TOTAL_MAX))
    return encode_state(CounterState(None, (CounterEntry(site, version, total),)))


def _decode_counter(stored: bytes) -> CounterState:
    state = decode_state(stored)
    assert isinstance(state, CounterState)
    return state


def _is_alike(stored: bytes | None, other: bytes) -> bool:
    """Whether two records are merged; otherwise one replaces the other."""
    return stored is not None and is_state(stored) and is_state(other) and kind_of(stored) == kind_of(other)


def _stamp(version: Version, stored: bytes, site: int) -> bytes:
    return find_origins([stored])[0] or encode_stamp(version, site)


def _tally(version: Version, site: int, key: bytes, logged: bytes) -> CommitTally:
    if not logged[-1] & HAS_ORIGIN:
        return tally_one(version, site, key, logged)
    ((namespace, changes, digest, own),) = digest_copies([key], [logged], site)
    return version, namespace, changes, digest, own

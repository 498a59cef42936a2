"""The end of a run: all faults are repaired, all links drain, and all sites must hold the same (promise 8).

The expected records are computed from the writes in the sites' own change logs, merged in any order.  Of a
lost or removed site, those writes count that another site or the copy from which it was restored has
received: none of these may be lost.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import reduce
from typing import Final, TypeAlias

from floodmark.codec.stamps import NO_STAMP, encode_stamp, stamp_version
from floodmark.codec.states import decode_state, encode_state, live_value
from floodmark.codec.values import decode_value, encode_value
from floodmark.merge.parts import prune_state
from floodmark.merge.states import merge_states, stamps_of
from floodmark.model.change import Stamp
from floodmark.model.version import VERSION_MAX, Version, compose, physical_ms
from floodmark.testing.simulation.chronicle import NAMESPACES, POLICIES, Chronicle, DataSet, qualified
from floodmark.testing.simulation.copies import SiteCopy
from floodmark.testing.simulation.history import Key, Violation, show_version
from floodmark.testing.simulation.sites import SimulatedSite, embedded
from floodmark.testing.simulation.workload import DELETED_COUNTERS, KEYS

ALL_KEYS: Final = tuple(Key(namespace, key) for namespace in NAMESPACES for key in KEYS)

# A written record, with its stamp.
Writing: TypeAlias = tuple[Stamp, bytes]


def check_convergence(
    sites: Sequence[SimulatedSite],
    now_ms: int,
    lost: bool = False,
    copies: Collection[SiteCopy] = (),
    published: tuple[bytes, DataSet] = (NO_STAMP, {}),
) -> None:
    """Compare the sites with each other, and with all writes.

    `lost` means that some sites have lost the log of their own writes; `copies` are the copies from which
    such sites were restored.  `published` is the newest data set with its stamp.
    """
    written = _find_written(sites)
    _replace_older(written, *published)
    if lost:
        _add_known(written, sites, copies)
    for key in ALL_KEYS:
        expected = _true_value(written.get(key, []), key, now_ms)
        stored = {site.name: _find_stored(site, key, now_ms) for site in sites}
        for site, record in stored.items():
            value = None if record is None else live_value(record, now_ms)
            if value != expected:
                raise Violation("8", site, f"{key} is {value!r} and should be {expected!r}", keys=[key])
        essences = {
            site: None if record is None else _essence(record, now_ms) for site, record in stored.items()
        }
        if len(set(essences.values())) > 1:
            raise Violation(
                "8", "all sites", f"{key} has equal values and other bytes: {essences}", keys=[key]
            )
        if not lost:
            _check_total(sites, key, expected)


def _find_stored(site: SimulatedSite, key: Key, now_ms: int) -> bytes | None:
    present = compose(now_ms, 0)
    return site.call_host(
        lambda host: embedded(host).node.find_before([(qualified(key), present, physical_ms(present))])[0]
    )


def _essence(stored: bytes, now_ms: int) -> bytes:
    """A record without its origin, and without the deletes that garbage collection may have removed.

    All changes have arrived everywhere, so all deletes may have been removed, at each site at another time.
    """
    record = decode_value(stored)
    if record.stamps is None:
        return encode_value(record.value, record.expires_at, record.deleted)
    return encode_state(prune_state(decode_state(stored), VERSION_MAX, now_ms))


def _find_written(sites: Sequence[SimulatedSite]) -> dict[Key, list[Writing]]:
    """All writes of the present sites, by key."""
    written: dict[Key, list[Writing]] = {}
    for site in sites:
        for key, writing in _own_writes(site.chronicle):
            written.setdefault(key, []).append(writing)
    return written


def _replace_older(written: dict[Key, list[Writing]], stamp: bytes, rows: DataSet) -> None:
    """Replace what was written up to the stamp of a data set by its rows."""
    for key in [Key(NAMESPACES[0], key) for key in KEYS] if stamp else ():
        newer = [each for each in written.get(key, []) if encode_stamp(each[0].version, each[0].site) > stamp]
        row = [(Stamp(stamp_version(stamp), 0), rows[key.key])] if key.key in rows else []
        written[key] = newer + row


def _add_known(
    written: dict[Key, list[Writing]], sites: Sequence[SimulatedSite], copies: Collection[SiteCopy]
) -> None:
    """Add all changes that the sites received from others, so that the writes of absent sites count."""
    known = [(seen.key, seen.stored) for site in sites for seen in site.chronicle.changes]
    for copy in copies:
        for namespace, records in copy.records.items():
            known += [(Key(namespace, key), stored) for key, stored in records.items()]
    stamps: set[tuple[Key, Stamp]] = set()
    for key, stored in known:
        record = decode_value(stored)
        if record.origin is not None:
            written.setdefault(key, []).append((record.origin, stored))
        if record.stamps is not None:
            stamps |= {(key, stamp) for stamp in stamps_of(decode_state(stored))}
        elif record.origin is not None:
            stamps.add((key, record.origin))
    for site in sites:
        for earlier in site.past:
            survived = [stamp for key, (stamp, _) in _own_writes(earlier) if (key, stamp) in stamps]
            _check_no_stamp_twice(site, max((stamp.version for stamp in survived), default=0))


def _own_writes(chronicle: Chronicle) -> Iterator[tuple[Key, Writing]]:
    for seen in chronicle.changes:
        if decode_value(seen.stored).origin is None:
            yield seen.key, (Stamp(seen.version, chronicle.site_id), seen.stored)


def _check_no_stamp_twice(site: SimulatedSite, last: Version) -> None:
    """Check that the writes of a later incarnation are above all writes known from an earlier one."""
    for key, (stamp, _) in _own_writes(site.chronicle):
        if stamp.version <= last:
            raise Violation(
                "2",
                site.name,
                f"{key} was written after a restore, and others have {show_version(last)} of it",
                keys=[key],
                version=stamp.version,
            )


def _true_value(written: Sequence[Writing], key: Key, now_ms: int) -> bytes | None:
    if not written:
        return None
    if POLICIES[key.namespace] == "last_write":
        return live_value(max(written)[1], now_ms)
    return live_value(reduce(merge_states, [stored for _, stored in written]), now_ms)


def _check_total(sites: Sequence[SimulatedSite], key: Key, value: bytes | None) -> None:
    if POLICIES[key.namespace] != "counter" or key.key in DELETED_COUNTERS:
        return
    total = sum(site.chronicle.totals.get(key, 0) for site in sites)
    if int(value or 0) != total:
        raise Violation("8", "all sites", f"{key} is {value!r}, and {total} was added", keys=[key])

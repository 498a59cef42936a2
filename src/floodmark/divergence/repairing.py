"""Sites that have drifted apart, brought together again.

What each of them should hold is what they would hold if everything had arrived everywhere: the record with
the highest stamp, or the join of all states.  Where the same stamp stands over different bytes, one of them
is damaged, and the site where it was first written is believed.  A record that only some sites have is given
to the others: nothing is ever deleted because it is missing elsewhere.

A repair is written under its original stamp, so it is no new write and wins over nothing that it should not.
It is conditional on the version that was seen: what has changed meanwhile is left for the next comparison.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

import msgspec

from floodmark.codec.states import CounterState, Entry, Field, FieldsState, State, decode_state, encode_state
from floodmark.codec.thin import digest_record
from floodmark.codec.values import decode_value, encode_value
from floodmark.divergence.comparing import Drift
from floodmark.divergence.ports import RepairedSite
from floodmark.merge.states import merge_states, newest_stamp
from floodmark.model.change import Stamp
from floodmark.model.record import FoundRecord, Repair
from floodmark.model.version import Version

# Whole values may be large.
KEYS_AT_ONCE: Final = 64
PROBLEMS_TOLD: Final = 10

Part: TypeAlias = Field | Entry


class Copy(NamedTuple):
    """The whole record of a key that a site holds, as it is stored there."""

    site_id: int
    version: Version
    stored: bytes

    @property
    def stamp(self) -> Stamp:
        """Where and when it was first written; of a state, where it was last written to."""
        return decode_value(self.stored).origin or Stamp(self.version, self.site_id)


class Choice(NamedTuple):
    """The record that all sites should hold, with its origin; or the reason why it cannot be known."""

    stored: bytes | None
    problem: str | None = None


class RepairSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How many keys were repaired, had changed meanwhile or cannot be repaired; why, of the first few."""

    repaired: int = 0
    changed_meanwhile: int = 0
    impossible: int = 0
    problems: tuple[str, ...] = ()


def choose_repair(copies: Sequence[Copy]) -> Choice:
    """The record that all sites should hold of a key, by what those hold that have a record of it.

    >>> old, new = encode_value(b"old", origin=Stamp(5, 2)), encode_value(b"new")
    >>> chosen = choose_repair([Copy(1, 9, new), Copy(2, 6, old)])
    >>> chosen.stored == encode_value(b"new", origin=Stamp(9, 1))
    True
    >>> damaged = encode_value(b"nev", origin=Stamp(9, 1))
    >>> chosen == choose_repair([Copy(3, 10, damaged), Copy(1, 9, new)])
    True
    """
    states = {copy.site_id: _state_of(copy) for copy in copies}
    kinds = {type(state) for state in states.values()}
    if len(kinds) > 1:
        return Choice(None, "the sites do not merge it in the same way; they need the same merge policy")
    merged = {site_id: state for site_id, state in states.items() if state is not None}
    return _choose_join(merged) if merged else _choose_last_write(copies)


def repair(sites: Sequence[RepairedSite], namespace: str, drifts: Iterable[Drift]) -> RepairSummary:
    """Mend what has drifted.  `sites` are all that are looked at: any of them may have the right record.

    Only sites that are named in a drift of a key are written to.
    """
    keys: dict[bytes, list[Drift]] = {}
    for drift in drifts:
        keys.setdefault(drift.key, []).append(drift)
    summary, waiting = RepairSummary(), iter(sorted(keys))
    while some := list(islice(waiting, KEYS_AT_ONCE)):
        summary = _repair_some(sites, namespace, {key: keys[key] for key in some}, summary)
    return summary


def _repair_some(
    sites: Sequence[RepairedSite],
    namespace: str,
    keys: Mapping[bytes, Sequence[Drift]],
    summary: RepairSummary,
) -> RepairSummary:
    found = [_find_whole(site, namespace, list(keys)) for site in sites]
    changed = impossible = 0
    problems: list[str] = []
    writes: dict[int, list[Repair]] = {place: [] for place in range(len(sites))}
    for index, (key, drifts) in enumerate(keys.items()):
        held = [records[index] for records in found]
        if not _are_as_seen(sites, held, drifts):
            changed += 1
            continue
        choice = choose_repair(_copies(sites, held))
        if choice.stored is None:
            impossible += 1
            problems.append(f"{key!r}: {choice.problem}")
            continue
        for place, record in enumerate(held):
            if _is_named(sites[place], drifts) and _is_wrong(record, choice.stored):
                seen = 0 if record is None else record.version
                writes[place].append(Repair(key, seen, choice.stored))
    failed = _write(sites, namespace, writes)
    written = {each.key for repairs in writes.values() for each in repairs}
    return RepairSummary(
        repaired=summary.repaired + len(written - failed),
        changed_meanwhile=summary.changed_meanwhile + changed + len(failed),
        impossible=summary.impossible + impossible,
        problems=(*summary.problems, *problems)[:PROBLEMS_TOLD],
    )


def _write(sites: Sequence[RepairedSite], namespace: str, writes: Mapping[int, list[Repair]]) -> set[bytes]:
    """Write repairs to the sites, by their places; the keys that had changed somewhere."""
    failed: set[bytes] = set()
    for place, repairs in writes.items():
        if repairs:
            done = sites[place].administration.repair_records(namespace, repairs)
            failed.update(each.key for each, stored in zip(repairs, done, strict=True) if not stored)
    return failed


def _find_whole(site: RepairedSite, namespace: str, keys: list[bytes]) -> Sequence[FoundRecord | None]:
    administration = site.administration
    return administration.find_records(namespace, keys, administration.read_version(), False)


def _are_as_seen(
    sites: Sequence[RepairedSite], held: Sequence[FoundRecord | None], drifts: Sequence[Drift]
) -> bool:
    versions = {
        site.identity.site: 0 if record is None else record.version
        for site, record in zip(sites, held, strict=True)
    }
    seen = {(side.site, side.version) for drift in drifts for side in (drift.left, drift.right)}
    return seen <= versions.items()


def _copies(sites: Sequence[RepairedSite], held: Sequence[FoundRecord | None]) -> list[Copy]:
    return [
        Copy(site.identity.site_id, record.version, record.stored)
        for site, record in zip(sites, held, strict=True)
        if record is not None
    ]


def _is_named(site: RepairedSite, drifts: Sequence[Drift]) -> bool:
    return any(site.identity.site in (drift.left.site, drift.right.site) for drift in drifts)


def _is_wrong(record: FoundRecord | None, chosen: bytes) -> bool:
    """Whether a site does not hold what it should.  One without a record needs no tombstone."""
    if record is None:
        return not decode_value(chosen).deleted
    return record.digest != digest_record(chosen)


# Which record wins


def _state_of(copy: Copy) -> State | None:
    return None if decode_value(copy.stored).stamps is None else decode_state(copy.stored)


def _choose_last_write(copies: Sequence[Copy]) -> Choice:
    stamp = max(copy.stamp for copy in copies)
    newest = {copy.site_id: _with_origin(copy, stamp) for copy in copies if copy.stamp == stamp}
    if len(set(newest.values())) == 1:
        return Choice(next(iter(newest.values())))
    if stamp.site not in newest:
        return Choice(None, _unknown_origin(stamp))
    return Choice(newest[stamp.site])


def _with_origin(copy: Copy, stamp: Stamp) -> bytes:
    record = decode_value(copy.stored)
    return encode_value(record.value, record.expires_at, record.deleted, origin=stamp)


def _choose_join(states: Mapping[int, State]) -> Choice:
    """The join of states, after each part was set right by the state of the site that wrote it."""
    originals = {
        (site_id, _name_of(part), part.stamp): part
        for site_id, state in states.items()
        for part in _parts_of(state)
    }
    corrected: list[State] = []
    known: dict[tuple[str | int, Stamp], Part] = {}
    for state in states.values():
        parts = [
            originals.get((part.stamp.site, _name_of(part), part.stamp), part) for part in _parts_of(state)
        ]
        for part in parts:
            if known.setdefault((_name_of(part), part.stamp), part) != part:
                return Choice(None, _unknown_origin(part.stamp))
        corrected.append(_with_parts(state, parts))
    joined = decode_state(reduce(merge_states, map(encode_state, corrected)))
    return Choice(encode_state(joined, newest_stamp(joined)))


def _parts_of(state: State) -> Sequence[Part]:
    return state.fields if isinstance(state, FieldsState) else state.entries


def _name_of(part: Part) -> str | int:
    return part.name if isinstance(part, Field) else part.site


def _with_parts(state: State, parts: Sequence[Part]) -> State:
    if isinstance(state, FieldsState):
        return FieldsState(state.deleted, tuple(part for part in parts if isinstance(part, Field)))
    return CounterState(state.deleted, tuple(part for part in parts if isinstance(part, Entry)))


def _unknown_origin(stamp: Stamp) -> str:
    return (
        f"sites hold different bytes under one stamp, and site {stamp.site}, where they were first written, "
        "is not among the sites looked at, or has something else; name it as well, or write the key anew"
    )

"""Repairs sites that have drifted apart.

All sites should hold what they would hold if every change had arrived everywhere: the record with the highest
stamp, or the join of all states.  If copies with the same stamp have different bytes, one is damaged, and the
copy at the site of the stamp is used.  A record that some sites lack is copied to them: nothing is deleted
because it is missing elsewhere.  But if such a site has collected deletions newer than the record, a deletion
of this record may be among them, and may have been lost on the way to the others.  This cannot be decided, so
the key is not repaired.

A high stamp wins everywhere, so a damaged stamp must not be used: a record is no source if no commit can have
given its stamp, or if the stamp's site is unknown.  Sites that have not drifted are sources too, but may lag:
a part that only they have is used if the site of its stamp holds it as well.

A repair is written under its original stamp, so it never wins over a newer change.  It is conditional on the
version that was seen: a key that has changed meanwhile is left for the next comparison.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial, reduce
from itertools import islice
from typing import Final, NamedTuple, TypeVar

import msgspec

from floodmark.codec.states import Field, Part, State, choose_parts, decode_state, encode_state
from floodmark.codec.thin import digest_record
from floodmark.codec.values import decode_value, encode_value
from floodmark.divergence.comparing import Drift, read_horizon
from floodmark.divergence.rules import PartName
from floodmark.host.ports import Host
from floodmark.merge.states import merge_states, newest_stamp, stamps_of
from floodmark.model.change import Stamp
from floodmark.model.errors import (
    ClockSkew,
    Corruption,
    FloodmarkError,
    InvalidArgument,
    LimitExceeded,
    OutcomeUnknown,
    Retryable,
    WrongPolicy,
)
from floodmark.model.record import FoundRecord, Repair
from floodmark.model.version import Version

# Whole values may be large.
KEYS_AT_ONCE: Final = 64
PROBLEMS_TOLD: Final = 10

# Errors that one key of many may cause; others concern the whole site.
_OF_ONE_KEY: Final = (ClockSkew, Corruption, InvalidArgument, LimitExceeded, OutcomeUnknown, WrongPolicy)

Item = TypeVar("Item")
Result = TypeVar("Result")


class Copy(NamedTuple):
    """The whole record of a key as a site stores it; the site has drifted in this key if `is_named`."""

    site_id: int
    version: Version
    stored: bytes
    is_named: bool = True
    mark: Mapping[int, Version] = {}

    @property
    def stamp(self) -> Stamp:
        """The stamp of the first write; of a state, that of the last."""
        return decode_value(self.stored).origin or Stamp(self.version, self.site_id)


class Choice(NamedTuple):
    """The record that all sites should hold, with its origin; or the reason why it cannot be determined."""

    stored: bytes | None
    problem: str | None = None


class RepairSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The number of keys that were repaired, had changed, or cannot be repaired, and the first reasons."""

    repaired: int = 0
    changed_meanwhile: int = 0
    impossible: int = 0
    problems: tuple[str, ...] = ()


def choose_repair(copies: Sequence[Copy], known: Collection[int] | None = None) -> Choice:
    """The record of a key that all sites should hold, determined from the existing copies.

    `known` are the ids of all sites that may have written; None stands for any.

    >>> old, new = encode_value(b"old", origin=Stamp(5, 2)), encode_value(b"new")
    >>> chosen = choose_repair([Copy(1, 9, new), Copy(2, 6, old)])
    >>> chosen.stored == encode_value(b"new", origin=Stamp(9, 1))
    True
    >>> damaged = encode_value(b"nev", origin=Stamp(9, 1))
    >>> chosen == choose_repair([Copy(3, 10, damaged), Copy(1, 9, new)])
    True
    """
    merged = [copy for copy in copies if decode_value(copy.stored).stamps is not None]
    if not merged:
        return _choose_last_write(copies, known)
    states = {copy.site_id: decode_state(copy.stored) for copy in merged}
    if len(merged) < len(copies) or len({type(state) for state in states.values()}) > 1:
        return Choice(None, "the sites do not merge it in the same way; they need the same merge policy")
    return _choose_join(copies, states, known)


def repair(sites: Sequence[Host], namespace: str, drifts: Iterable[Drift]) -> RepairSummary:
    """Repair keys that have drifted.  `sites` are all that were compared: any may have the right record.

    Writes only to sites that are named in a drift of the key.  A key that a site cannot show, or does not
    take, is counted as impossible.
    """
    keys: dict[bytes, list[Drift]] = {}
    for drift in drifts:
        keys.setdefault(drift.key, []).append(drift)
    summary, waiting = RepairSummary(), iter(sorted(keys))
    while some := list(islice(waiting, KEYS_AT_ONCE)):
        summary = _repair_some(sites, namespace, {key: keys[key] for key in some}, summary)
    return summary


def _repair_some(
    sites: Sequence[Host],
    namespace: str,
    keys: Mapping[bytes, Sequence[Drift]],
    summary: RepairSummary,
) -> RepairSummary:
    problems: dict[bytes, str] = {}
    found = _find_everywhere(sites, namespace, list(keys), problems)
    changed: set[bytes] = set()
    writes: dict[int, list[Repair]] = {place: [] for place in range(len(sites))}
    sides = [side for drifts in keys.values() for drift in drifts for side in (drift.left, drift.right)]
    known = {site_id for side in sides for site_id in side.mark}
    # Read after the records, for a tombstone may be collected meanwhile.
    horizon_of = cache(lambda place: read_horizon(sites[place], namespace, known))
    for key, drifts in keys.items():
        if key in problems:
            continue
        held = [records[key] for records in found]
        if not _are_as_seen(sites, held, drifts):
            changed.add(key)
            continue
        choice = _choose(sites, held, drifts)
        if choice.stored is None:
            problems[key] = choice.problem or ""
            continue
        wrong = {
            place: record
            for place, record in enumerate(held)
            if _is_named(sites[place], drifts) and _is_wrong(record, choice.stored)
        }
        forgotten = _find_forgotten(sites, wrong, choice.stored, horizon_of)
        if forgotten is not None:
            problems[key] = forgotten
            continue
        for place, record in wrong.items():
            seen = 0 if record is None else record.version
            writes[place].append(Repair(key, seen, choice.stored))
    changed |= _write(sites, namespace, writes, problems)
    written = {each.key for repairs in writes.values() for each in repairs}
    told = [f"{key!r}: {problem}" for key, problem in problems.items()]
    return RepairSummary(
        repaired=summary.repaired + len(written - changed - problems.keys()),
        changed_meanwhile=summary.changed_meanwhile + len(changed - problems.keys()),
        impossible=summary.impossible + len(problems),
        problems=(*summary.problems, *told)[:PROBLEMS_TOLD],
    )


def _find_everywhere(
    sites: Sequence[Host], namespace: str, keys: list[bytes], problems: dict[bytes, str]
) -> list[dict[bytes, FoundRecord | None]]:
    """The records of some keys at every site.  Keys that a site cannot show become problems."""
    found: list[dict[bytes, FoundRecord | None]] = []
    for site in sites:
        records: dict[bytes, FoundRecord | None] = {}
        for some, result in divide(keys, partial(_find_whole, site, namespace)):
            if isinstance(result, FloodmarkError):
                problems.update(dict.fromkeys(some, f"{site.identity.site} cannot show it: {result}"))
            else:
                records |= zip(some, result, strict=True)
        found.append(records)
    return found


def _write(
    sites: Sequence[Host],
    namespace: str,
    writes: Mapping[int, list[Repair]],
    problems: dict[bytes, str],
) -> set[bytes]:
    """Write repairs to the sites, by their places; returns the keys that had changed somewhere.

    Keys that a site does not take become problems.
    """
    changed: set[bytes] = set()
    for place, repairs in writes.items():
        site = sites[place]
        for some, result in divide(repairs, partial(site.verification.repair_records, namespace)):
            if isinstance(result, FloodmarkError):
                problems.update(
                    {each.key: f"{site.identity.site} does not take it: {result}" for each in some}
                )
            else:
                changed.update(each.key for each, stored in zip(some, result, strict=True) if not stored)
    return changed


def divide(
    items: list[Item], work: Callable[[list[Item]], Result]
) -> Iterator[tuple[list[Item], Result | FloodmarkError]]:
    """Do work on all items together, and again in halves if a single item may have caused its failure.

    The result of an item that fails is its error, so that one key does not prevent the repair of the others.
    """
    if not items:
        return
    result: Result | FloodmarkError
    try:
        result = work(items)
    except FloodmarkError as error:
        middle = len(items) // 2
        # The error of a prepared write on a key has no class of its own.
        if middle and (isinstance(error, _OF_ONE_KEY) or type(error) is Retryable):
            yield from divide(items[:middle], work)
            yield from divide(items[middle:], work)
            return
        result = error
    yield items, result


def _find_whole(site: Host, namespace: str, keys: list[bytes]) -> Sequence[FoundRecord | None]:
    return site.verification.find_records(namespace, keys, site.versions.read_version(), False)


def _are_as_seen(sites: Sequence[Host], held: Sequence[FoundRecord | None], drifts: Sequence[Drift]) -> bool:
    versions = {
        site.identity.site: 0 if record is None else record.version
        for site, record in zip(sites, held, strict=True)
    }
    seen = {(side.site, side.version) for drift in drifts for side in (drift.left, drift.right)}
    return seen <= versions.items()


def _choose(sites: Sequence[Host], held: Sequence[FoundRecord | None], drifts: Sequence[Drift]) -> Choice:
    marks = {side.site: side.mark for drift in drifts for side in (drift.left, drift.right)}
    copies = [
        Copy(
            site.identity.site_id,
            record.version,
            record.stored,
            is_named=site.identity.site in marks,
            mark=marks.get(site.identity.site, {}),
        )
        for site, record in zip(sites, held, strict=True)
        if record is not None
    ]
    known = {site.identity.site_id for site in sites}.union(*marks.values())
    try:
        return choose_repair(copies, known)
    except FloodmarkError as error:
        return Choice(None, str(error))


def _is_named(site: Host, drifts: Sequence[Drift]) -> bool:
    return any(site.identity.site in (drift.left.site, drift.right.site) for drift in drifts)


def _is_wrong(record: FoundRecord | None, chosen: bytes) -> bool:
    """Whether a site holds the wrong record.  A site without a record needs no tombstone.

    The right bytes under an impossible stamp are wrong as well: no newer write would win over them.
    """
    if record is None:
        return not decode_value(chosen).deleted
    origin = decode_value(record.stored).origin
    is_ahead = origin is not None and origin.version > record.version
    return is_ahead or record.digest != digest_record(chosen)


def _find_forgotten(
    sites: Sequence[Host],
    wrong: Mapping[int, FoundRecord | None],
    chosen: bytes,
    horizon_of: Callable[[int], Version],
) -> str | None:
    """Why sites, by their places, may lack a part of the chosen record because they have deleted it; or None.

    All changes up to the collected horizon of a site have come there: what it lacks of them was lost there,
    or deleted.
    """
    live = _live_parts(chosen)
    for place, record in wrong.items():
        lacking = live.keys() - (_part_names(record.stored) if record is not None else ())
        if not lacking:
            continue
        try:
            horizon = horizon_of(place)
        except FloodmarkError as error:
            return f"{sites[place].identity.site} does not tell which deletions it has collected: {error}"
        if min(live[name].version for name in lacking) <= horizon:
            return _forgotten(sites[place].identity.site)
    return None


def _live_parts(stored: bytes) -> dict[PartName, Stamp]:
    """The parts of a chosen record that are not deleted, and their stamps; that of a plain record is None."""
    record = decode_value(stored)
    if record.stamps is None:
        return {} if record.deleted or record.origin is None else {None: record.origin}
    parts = decode_state(stored).parts
    return {part.name: part.stamp for part in parts if not isinstance(part, Field) or part.text is not None}


def _part_names(stored: bytes) -> set[PartName]:
    """The parts of a record that a site has, deleted ones included."""
    is_plain = decode_value(stored).stamps is None
    return {None} if is_plain else {part.name for part in decode_state(stored).parts}


def _choose_last_write(copies: Sequence[Copy], known: Collection[int] | None) -> Choice:
    believed = [copy for copy in copies if _can_be(copy.stamp, copy.version, known)]
    if not believed:
        return Choice(None, _NOT_POSSIBLE)
    stamp = max(copy.stamp for copy in believed)
    winners = [copy for copy in believed if copy.stamp == stamp]
    newest = {}
    for copy in winners:
        record = decode_value(copy.stored)
        newest[copy.site_id] = encode_value(record.value, record.expires_at, record.deleted, origin=stamp)
    damaged = [copy for copy in copies if copy.is_named and copy not in believed]
    if not all(any(_has_heard_of(copy, each) for copy in winners) for each in damaged):
        return Choice(None, _NOT_HEARD)
    if stamp.site in newest:
        return Choice(newest[stamp.site])
    if not any(copy.is_named for copy in winners):
        return Choice(None, _unconfirmed(stamp))
    if len(set(newest.values())) > 1:
        return Choice(None, _unknown_origin(stamp))
    return Choice(next(iter(newest.values())))


def _has_heard_of(copy: Copy, damaged: Copy) -> bool:
    """Whether a site has every record that the one with a damaged stamp may originally have been.

    The true stamp was at or below the record's version.  A site that lags behind that may have an older
    record.
    """
    sites = {*copy.mark, *damaged.mark}
    return bool(sites) and all(copy.mark.get(site, 0) >= damaged.version for site in sites)


def _choose_join(
    copies: Sequence[Copy], states: Mapping[int, State], known: Collection[int] | None
) -> Choice:
    """The join of states, after each part was corrected by the state of the site that wrote it."""
    altered = [
        copy
        for copy in copies
        if not all(_can_be(stamp, copy.version, known) for stamp in stamps_of(states[copy.site_id]))
    ]
    sound = [copy for copy in copies if copy not in altered]
    for copy in altered:
        if copy.is_named and not any(_has_heard_of(each, copy) for each in sound):
            return Choice(None, _NOT_HEARD)
    # Other parts of a state that a repair replaces may exist nowhere else.
    kept = {}
    for copy in altered:
        if copy.is_named:
            state = states[copy.site_id]
            can_be = partial(_can_be, version=copy.version, known=known)
            kept[copy.site_id] = choose_parts(state, state.parts, can_be)
    left_out = {copy.site_id for copy in altered} - kept.keys()
    states = {site: state for site, state in {**states, **kept}.items() if site not in left_out}
    named = {copy.site_id for copy in copies if copy.is_named}
    own = {
        (part.name, part.stamp): part
        for site_id, state in states.items()
        for part in state.parts
        if part.stamp.site == site_id
    }
    believed: list[State] = []
    seen: dict[tuple[str | int, Stamp], Part] = {}
    for site_id, state in states.items():
        parts = [own.get((part.name, part.stamp), part) for part in state.parts]
        for part in parts:
            if seen.setdefault((part.name, part.stamp), part) != part:
                return Choice(None, _unknown_origin(part.stamp))
        corrected = choose_parts(state, parts)
        believed.append(corrected if site_id in named else _confirmed(corrected, states, own.keys()))
    encoded = [encode_state(state) for state in believed if stamps_of(state)]
    if not encoded:
        return Choice(None, _NOT_POSSIBLE)
    joined = decode_state(reduce(merge_states, encoded))
    return Choice(encode_state(joined, newest_stamp(joined)))


def _can_be(stamp: Stamp, version: Version, known: Collection[int] | None) -> bool:
    return stamp.version <= version and (known is None or stamp.site in known)


def _confirmed(state: State, states: Mapping[int, State], own: Collection[tuple[str | int, Stamp]]) -> State:
    """The parts of a state that the sites which wrote them hold as well.

    The state is of a site that has not drifted.  Its other parts are under way, and arrive by themselves.
    """
    origin = None if state.deleted is None else states.get(state.deleted.site)
    is_deleted_there = origin is not None and origin.deleted == state.deleted
    confirmed = choose_parts(state, [part for part in state.parts if (part.name, part.stamp) in own])
    return confirmed if is_deleted_there else msgspec.structs.replace(confirmed, deleted=None)


_NOT_POSSIBLE: Final = (
    "a stamp is above the version it is stored under, or of a site that is in no topology, so that the "
    "right record cannot be known; write the key anew"
)


_NOT_HEARD: Final = (
    "the stamp of a record is damaged, and no other site that is looked at has heard of all that this one "
    "may have been; name all sites that share it, and repair again when they have caught up"
)


def _forgotten(site: str) -> str:
    return (
        f"{site!r} lacks it, or a part of it, and may have deleted that: it has collected newer deletions, "
        "so that the right record cannot be known. Write the key anew if it should be there, and delete it "
        "if not"
    )


def _unknown_origin(stamp: Stamp) -> str:
    return (
        f"sites hold different bytes under one stamp, and site {stamp.site}, where they were first written, "
        "is not among the sites looked at, or has something else; name it as well, or write the key anew"
    )


def _unconfirmed(stamp: Stamp) -> str:
    return (
        f"the newest record is at a site that only lags, and site {stamp.site}, where it was first written, "
        "is not among the sites looked at, or has something else; verify again when it has come, or write "
        "the key anew"
    )

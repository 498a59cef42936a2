"""Leap Frog: whether two sites that differ in a record have not heard of each other yet, or have drifted.

Each site is read as of a version, together with its watermark as of that version, whose entry for the site
itself is the version.  If the record of either site bears only stamps that the other's watermark covers, each
of them has merged what the other holds, and what two sites hold that have merged the same is equal.  If it is
not, something was lost or altered, and no waiting will mend it.  In all other cases the difference may be
lag, and is called so.

A site that has no record at all bears no stamp.  It may have had a tombstone that won over what the other
holds, and have collected it since.  The *collected horizon* is the highest stamp so forgotten: once all of
the other's watermark has reached it, the other must have heard of that tombstone as well.  The horizon has to
be read after the site was, for a tombstone may be collected under the reader's eyes.

A merged record is judged part by part: each field, and what each site has added to a counter.  A part that
is older than the record's delete has been deleted there, under the delete's stamp; otherwise a part that is
not there is absent, and the rule of absence holds for it as well.

All this trusts the stamps, and they lie on the same disks as the values.  A record with a stamp that no
commit can have given it is drift at once: no watermark would ever cover it, and it would pass for lag for
ever.
"""

from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import msgspec

from floodmark.codec.states import CounterState, FieldsState, State
from floodmark.divergence.evidence import Evidence
from floodmark.model.change import Stamp
from floodmark.model.version import Version, physical_ms


class Verdict(StrEnum):
    """What is to be said about a record of two sites.

    >>> [verdict.value for verdict in Verdict if verdict.is_drift]
    ['value_mismatch', 'missing_left', 'missing_right']
    """

    AGREE = "agree"
    LAG = "lag"
    VALUE_MISMATCH = "value_mismatch"
    MISSING_LEFT = "missing_left"
    MISSING_RIGHT = "missing_right"

    @property
    def is_drift(self) -> bool:
        """Whether the difference lasts."""
        return self is not Verdict.AGREE and self is not Verdict.LAG


# The name of a field, or the id of the site whose entry of a counter it is; None is the record as a whole.
PartName: TypeAlias = str | int | None


class Side(msgspec.Struct, frozen=True):
    """One of two sites, as far as a record is concerned.

    `at` is the version as of which it was read and `mark` its watermark then, with `at` as its entry for
    itself and an entry for every site that shares the namespace: 0 if nothing came from there.  `horizon` is
    the site's collected horizon, read later than the record.
    """

    record: Evidence | None
    mark: Mapping[int, Version]
    horizon: Version
    at: Version


class Judgement(NamedTuple):
    """A verdict, and what decided it: which part, and the stamps that the two sides hold of it."""

    verdict: Verdict
    part: PartName = None
    left: Stamp | None = None
    right: Stamp | None = None


def covers(mark: Mapping[int, Version], vector: Mapping[int, Version]) -> bool:
    """Whether all that a vector names lies within a watermark.

    A site that is missing in the vector has no part in what it describes; one that is missing in the mark is
    one from which nothing may have come.  Nothing can be said about an empty mark or an empty vector.

    >>> covers({1: 10, 2: 20, 3: 1500}, {1: 3}), covers({1: 10, 2: 20, 3: 1500}, {1: 20, 2: 19})
    (True, False)
    >>> covers({1: 10}, {1: 3, 2: 0}), covers({}, {1: 3}), covers({1: 10}, {})
    (False, False, False)
    """
    return (
        bool(mark)
        and bool(vector)
        and all(site in mark and version <= mark[site] for site, version in vector.items())
    )


def verdict(left: Side, right: Side) -> Verdict:
    """Whether two sites agree on a record, or one lags behind, or they have drifted apart.

    Ada was renamed at site 1, and site 2 does not have it.  Whether it should depends on its watermark.

    >>> new, old = Evidence(9, Stamp(9, 1), digest=0xADA), Evidence(5, Stamp(4, 1), digest=0xA1A)
    >>> left = Side(new, {1: 20, 2: 15}, horizon=0, at=20)
    >>> verdict(left, Side(old, {1: 8, 2: 16}, horizon=0, at=16)).value
    'lag'
    >>> verdict(left, Side(old, {1: 9, 2: 17}, horizon=0, at=17)).value
    'value_mismatch'
    """
    return judge(left, right).verdict


def judge(left: Side, right: Side) -> Judgement:
    """The verdict on a record, and what decided it.  A drift of one part outweighs lag of others."""
    now_ms = physical_ms(max(left.at, right.at))
    alive = _is_alive(left.record, now_ms), _is_alive(right.record, now_ms)
    if not any(alive) or _are_equal(left.record, right.record):
        return Judgement(Verdict.AGREE)
    if not (_is_possible(left.record) and _is_possible(right.record)):
        return _judge_whole(left, right, drifted=True)
    if not _are_of_one_kind(left.record, right.record):
        # One policy makes one kind, so that one of the two did not come to be by merging.
        return _judge_whole(left, right, drifted=_has_all(left, right) and _has_all(right, left))
    lagging: Judgement | None = None
    for part, on_left, on_right in _pair_parts(left.record, right.record, now_ms):
        found = _judge_part(left, right, on_left, on_right)
        if found is Verdict.AGREE:
            continue
        judgement = Judgement(_name(alive), part, _stamp_of(on_left), _stamp_of(on_right))
        if found is not Verdict.LAG:
            return judgement
        lagging = lagging or judgement._replace(verdict=Verdict.LAG)
    return lagging or Judgement(Verdict.AGREE)


def find_doubt(left: Evidence | None, right: Evidence | None, known: Collection[int]) -> str | None:
    """Why a difference that counts as lag may never end; None if nothing speaks for that.

    `known` are the sites of which any that are compared has heard.  A stamp of another one may be damaged, or
    from a site that no link replicates from: no watermark will ever cover it.

    >>> find_doubt(Evidence(9, Stamp(7, 130), digest=1), None, {1, 2})
    'has a stamp of site 130, which is in no topology or watermark'
    >>> find_doubt(Evidence(9, Stamp(7, 2), digest=1), None, {1, 2})
    """
    for record in (left, right):
        if record is None or (record.state is None and record.stamp.site in known):
            continue
        strangers = [stamp.site for stamp in record.stamps if stamp.site not in known]
        if strangers:
            return f"has a stamp of site {min(strangers)}, which is in no topology or watermark"
    if not _are_of_one_kind(left, right):
        return "is not of the same kind at both sites, as if they did not merge it in the same way"
    return None


class _Part(NamedTuple):
    """What a site holds of a part.  Contents are compared only if both are alive."""

    stamp: Stamp
    is_alive: bool
    content: object = None


def _is_alive(record: Evidence | None, now_ms: int) -> bool:
    return record is not None and record.is_alive_at(now_ms)


def _are_equal(left: Evidence | None, right: Evidence | None) -> bool:
    return left is not None and right is not None and left.digest == right.digest


def _is_possible(record: Evidence | None) -> bool:
    return record is None or record.is_possible


def _are_of_one_kind(left: Evidence | None, right: Evidence | None) -> bool:
    """Whether two records can be compared part by part."""
    return left is None or right is None or type(left.state) is type(right.state)


def _has_all(side: Side, other: Side) -> bool:
    """Whether all that another site's record is made of has come to a site."""
    stamps = [] if other.record is None else other.record.stamps
    return all(covers(side.mark, {stamp.site: stamp.version}) for stamp in stamps)


def _judge_whole(left: Side, right: Side, *, drifted: bool) -> Judgement:
    stamps = (None if side.record is None else side.record.stamp for side in (left, right))
    return Judgement(Verdict.VALUE_MISMATCH if drifted else Verdict.LAG, None, *stamps)


def _stamp_of(part: _Part | None) -> Stamp | None:
    return None if part is None else part.stamp


def _name(alive: tuple[bool, bool]) -> Verdict:
    """What a drift is called: something is missing if only one side has anything."""
    if all(alive):
        return Verdict.VALUE_MISMATCH
    return Verdict.MISSING_RIGHT if alive[0] else Verdict.MISSING_LEFT


def _judge_part(left: Side, right: Side, on_left: _Part | None, on_right: _Part | None) -> Verdict:
    """AGREE, LAG, or VALUE_MISMATCH for any drift."""
    if on_left is None and on_right is None:
        return Verdict.AGREE
    if on_left is None or on_right is None:
        present = on_right if on_left is None else on_left
        absent, other = (left, right) if on_left is None else (right, left)
        assert present is not None
        if not present.is_alive:
            return Verdict.AGREE
        drifted = _has_come(absent, present) and _knows_what_was_collected(other, absent)
    else:
        if not (on_left.is_alive or on_right.is_alive):
            return Verdict.AGREE
        if on_left.is_alive and on_right.is_alive and on_left.content == on_right.content:
            return Verdict.AGREE
        drifted = _has_come(left, on_right) and _has_come(right, on_left)
    return Verdict.VALUE_MISMATCH if drifted else Verdict.LAG


def _has_come(side: Side, part: _Part) -> bool:
    """Whether what is held elsewhere has been merged at a site as well."""
    return covers(side.mark, {part.stamp.site: part.stamp.version})


def _knows_what_was_collected(side: Side, absent: Side) -> bool:
    """Whether every tombstone that was forgotten at the site without a record has come to the other.

    A site that only the other one knows of has joined meanwhile, and counts: the tombstone may be from there.
    """
    return all(side.mark.get(site, 0) >= absent.horizon for site in {*side.mark, *absent.mark})


# Parts


def _pair_parts(
    left: Evidence | None, right: Evidence | None, now_ms: int
) -> Iterator[tuple[PartName, _Part | None, _Part | None]]:
    """What the two sides hold of each part that one of them has; the record itself if it is not merged."""
    known = left or right
    assert known is not None
    if known.state is None:
        yield None, _whole(left, now_ms), _whole(right, now_ms)
        return
    on_left, on_right = _parts_of(left, now_ms), _parts_of(right, now_ms)
    for part in on_left | on_right:
        here, there = on_left.get(part), on_right.get(part)
        if here is None and there is not None:
            here = _deleted_part(left, there.stamp)
        elif there is None and here is not None:
            there = _deleted_part(right, here.stamp)
        yield part, here, there


def _whole(record: Evidence | None, now_ms: int) -> _Part | None:
    return None if record is None else _Part(record.stamp, record.is_alive_at(now_ms), record.digest)


def _parts_of(record: Evidence | None, now_ms: int) -> dict[str | int, _Part]:
    state: State | None = None if record is None else record.state
    if isinstance(state, FieldsState):
        return {
            field.name: _Part(field.stamp, field.is_live_at(now_ms), (field.text, field.expires_at))
            for field in state.fields
        }
    if isinstance(state, CounterState):
        return {entry.site: _Part(entry.stamp, True, entry.total) for entry in state.entries}
    return {}


def _deleted_part(record: Evidence | None, stamp: Stamp) -> _Part | None:
    """What a record whose delete took a part away holds of it; None if it never had it, or forgot it."""
    state = None if record is None else record.state
    if state is None or state.deleted is None:
        return None
    is_gone = stamp < state.deleted if isinstance(state, FieldsState) else stamp <= state.deleted
    return _Part(state.deleted, False) if is_gone else None

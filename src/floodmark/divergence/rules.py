"""Leap Frog: decides whether two sites that differ in a record lag behind each other, or have drifted apart.

Each site is read as of a version, with its watermark as of that version, whose entry for the site itself is
the version.  If each watermark covers all stamps of the other site's record, each site has merged the other's
record, and the two must be equal.  If they are not, a change was lost or altered, and waiting does not help:
this is drift.  Everything else may be lag.

A site without a record may have had a tombstone that won, and have collected it.  The *collected horizon* is
the highest stamp so forgotten: once every entry of the other's watermark has reached it, the other has that
tombstone as well.  The horizon is read after the records, for a tombstone may be collected meanwhile.

A merged record is judged part by part: each field, and each site's entry of a counter.  A part that is older
than the record's delete was deleted there, under the delete's stamp; otherwise a missing part is absent, and
the rule of absence holds for it.

A data set that was published replaces all records at once, at each site at a moment of its own.  Sites that
hold different data sets lag.

Stamps are stored on the same disks as values, and can be damaged.  A record with a stamp that no commit can
have given is drift at once: no watermark would ever cover the stamp, so the record would count as lag for
ever.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import msgspec

from floodmark.codec.states import CounterState, FieldsState, State, decode_state
from floodmark.codec.values import decode_value
from floodmark.merge.states import stamps_of
from floodmark.model.change import Stamp
from floodmark.model.version import Version, physical_ms


class Evidence(msgspec.Struct, frozen=True):
    """A record, dead or alive, as a site stores it: its stamps, and digests in place of values.

    `version` is that of the commit which stored it, and `stamp` that of the first write.  `digest` covers the
    whole record but its origin (`codec/thin.py`).  A merged record has a `state` as well: fields, whose texts
    are digests, or a counter as it is.
    """

    version: Version
    stamp: Stamp
    digest: int
    deleted: bool = False
    expires_at: int | None = None
    state: State | None = None

    def is_alive_at(self, physical_ms: int) -> bool:
        """Whether a reader at this time finds the record."""
        return not self.deleted and (self.expires_at is None or self.expires_at * 1000 > physical_ms)

    @property
    def stamps(self) -> list[Stamp]:
        """The stamp of the record, or those of its parts and of its delete."""
        return [self.stamp] if self.state is None else stamps_of(self.state)

    @property
    def is_possible(self) -> bool:
        """Whether a commit can have stored it: its clock has passed all stamps that it applies.

        >>> Evidence(9, Stamp(7, 2), digest=0).is_possible, Evidence(9, Stamp(10, 2), digest=0).is_possible
        (True, False)
        """
        return all(stamp.version <= self.version for stamp in (self.stamp, *self.stamps))


def evidence_of(version: Version, site_id: int, thin: bytes, digest: int) -> Evidence:
    """The evidence of a thin record that a site stores at a version.

    >>> from floodmark.codec.thin import thin_record
    >>> from floodmark.codec.values import encode_value
    >>> evidence_of(9, 1, *thin_record(encode_value(b"ada", origin=Stamp(7, 2)))).stamp
    Stamp(version=7, site=2)
    >>> evidence_of(9, 1, *thin_record(encode_value(b"ada"))).stamp
    Stamp(version=9, site=1)
    """
    record = decode_value(thin)
    return Evidence(
        version,
        record.origin or Stamp(version, site_id),
        digest,
        record.deleted,
        record.expires_at,
        None if record.stamps is None else decode_state(thin),
    )


class Verdict(StrEnum):
    """The result of comparing a record of two sites.

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
        """Whether the verdict is drift, a difference that lasts."""
        return self is not Verdict.AGREE and self is not Verdict.LAG


# The name of a field, or the id of the site whose entry of a counter it is; None is the record as a whole.
PartName: TypeAlias = str | int | None


class Side(msgspec.Struct, frozen=True):
    """A record at one of two sites, read as of the version `at`.

    `mark` is the watermark then, with `at` as its own entry and an entry for every site that shares the
    namespace: 0 if nothing came from there.  `horizon` is the collected horizon, read after the record, and
    `data_set` the stamp of the data set that was published last.
    """

    record: Evidence | None
    mark: Mapping[int, Version]
    horizon: Version
    at: Version
    data_set: bytes = b""


class Judgement(NamedTuple):
    """A verdict, the part that decided it, and the stamps of that part on both sides."""

    verdict: Verdict
    part: PartName = None
    left: Stamp | None = None
    right: Stamp | None = None


def covers(mark: Mapping[int, Version], vector: Mapping[int, Version]) -> bool:
    """Whether a watermark has an entry at or above each entry of a vector; False if either is empty.

    >>> covers({1: 10, 2: 20, 3: 1500}, {1: 3}), covers({1: 10, 2: 20, 3: 1500}, {1: 20, 2: 19})
    (True, False)
    >>> covers({1: 10}, {1: 3, 2: 0}), covers({}, {1: 3}), covers({1: 10}, {})
    (False, False, False)
    """
    return bool(vector) and all(site in mark and version <= mark[site] for site, version in vector.items())


def verdict(left: Side, right: Side) -> Verdict:
    """Whether two sites agree on a record, lag, or have drifted apart.

    Ada was renamed at site 1, and site 2 does not have it.  Its watermark decides whether it should.

    >>> new, old = Evidence(9, Stamp(9, 1), digest=0xADA), Evidence(5, Stamp(4, 1), digest=0xA1A)
    >>> left = Side(new, {1: 20, 2: 15}, horizon=0, at=20)
    >>> verdict(left, Side(old, {1: 8, 2: 16}, horizon=0, at=16)).value
    'lag'
    >>> verdict(left, Side(old, {1: 9, 2: 17}, horizon=0, at=17)).value
    'value_mismatch'
    """
    return judge(left, right).verdict


def judge(left: Side, right: Side) -> Judgement:
    """The verdict on a record, and the part that decided it.  Drift of one part outweighs lag of others."""
    now_ms = physical_ms(max(left.at, right.at))
    records = left.record, right.record
    alive = [record is not None and record.is_alive_at(now_ms) for record in records]
    digests = {None if record is None else record.digest for record in records}
    if not any(alive) or len(digests) == 1:
        return Judgement(Verdict.AGREE)
    if not all(record is None or record.is_possible for record in records):
        return _judge_whole(left, right, drifted=True)
    if left.data_set != right.data_set:
        return _judge_whole(left, right, drifted=False)
    if not _are_of_one_kind(left.record, right.record):
        # A merge policy makes records of one kind, so one of these two does not result from merging.
        return _judge_whole(left, right, drifted=_has_all(left, right) and _has_all(right, left))
    lagging: Judgement | None = None
    for part, on_left, on_right in _pair_parts(left.record, right.record, now_ms):
        found = _judge_part(left, right, on_left, on_right)
        if found is Verdict.AGREE:
            continue
        judgement = Judgement(_name(alive), part, on_left and on_left.stamp, on_right and on_right.stamp)
        if found is not Verdict.LAG:
            return judgement
        lagging = lagging or judgement._replace(verdict=Verdict.LAG)
    return lagging or Judgement(Verdict.AGREE)


def find_doubt(left: Evidence | None, right: Evidence | None, known: Collection[int]) -> str | None:
    """The reason why a difference that counts as lag may never end; None if there is no such reason.

    `known` are the sites in the watermarks of the compared sites.  A stamp of another site may be damaged, or
    of a site that no link replicates from: no watermark will ever cover it.

    >>> find_doubt(Evidence(9, Stamp(7, 130), digest=1), None, {1, 2})
    'has a stamp of site 130, which is in no topology or watermark'
    >>> find_doubt(Evidence(9, Stamp(7, 2), digest=1), None, {1, 2})
    """
    for record in (left, right):
        strangers = [stamp.site for stamp in record.stamps if stamp.site not in known] if record else []
        if strangers:
            return f"has a stamp of site {min(strangers)}, which is in no topology or watermark"
    if not _are_of_one_kind(left, right):
        return "is not of the same kind at both sites, as if they did not merge it in the same way"
    return None


class _ComparedPart(NamedTuple):
    """A part at a site.  Contents are compared only if both are alive."""

    stamp: Stamp
    is_alive: bool
    content: object = None


def _are_of_one_kind(left: Evidence | None, right: Evidence | None) -> bool:
    """Whether two records can be compared part by part."""
    return left is None or right is None or type(left.state) is type(right.state)


def _has_all(side: Side, other: Side) -> bool:
    """Whether a site's watermark covers all stamps of the other's record."""
    return other.record is None or all(_has_come(side, stamp) for stamp in other.record.stamps)


def _judge_whole(left: Side, right: Side, *, drifted: bool) -> Judgement:
    stamps = (None if side.record is None else side.record.stamp for side in (left, right))
    return Judgement(Verdict.VALUE_MISMATCH if drifted else Verdict.LAG, None, *stamps)


def _name(alive: Sequence[bool]) -> Verdict:
    """The verdict on a drift: a record is missing if only one side has it alive."""
    if all(alive):
        return Verdict.VALUE_MISMATCH
    return Verdict.MISSING_RIGHT if alive[0] else Verdict.MISSING_LEFT


def _judge_part(
    left: Side, right: Side, on_left: _ComparedPart | None, on_right: _ComparedPart | None
) -> Verdict:
    """AGREE, LAG, or VALUE_MISMATCH for any drift."""
    alive = [part for part in (on_left, on_right) if part is not None and part.is_alive]
    if not alive or (len(alive) == 2 and alive[0].content == alive[1].content):
        return Verdict.AGREE
    if on_left is None:
        drifted = _has_come(left, alive[0].stamp) and _knows_what_was_collected(right, left)
    elif on_right is None:
        drifted = _has_come(right, alive[0].stamp) and _knows_what_was_collected(left, right)
    else:
        drifted = _has_come(left, on_right.stamp) and _has_come(right, on_left.stamp)
    return Verdict.VALUE_MISMATCH if drifted else Verdict.LAG


def _has_come(side: Side, stamp: Stamp) -> bool:
    """Whether a site has merged the write with a stamp."""
    return covers(side.mark, {stamp.site: stamp.version})


def _knows_what_was_collected(side: Side, absent: Side) -> bool:
    """Whether the other site has every tombstone that the site without a record has collected.

    A site that is only in the watermark of the latter has joined meanwhile, and counts as 0: the collected
    tombstone may be from there.
    """
    return all(side.mark.get(site, 0) >= absent.horizon for site in {*side.mark, *absent.mark})


def _pair_parts(
    left: Evidence | None, right: Evidence | None, now_ms: int
) -> Iterator[tuple[PartName, _ComparedPart | None, _ComparedPart | None]]:
    """Each part that a side has, on both sides; the record itself if it is not merged."""
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


def _whole(record: Evidence | None, now_ms: int) -> _ComparedPart | None:
    return None if record is None else _ComparedPart(record.stamp, record.is_alive_at(now_ms), record.digest)


def _parts_of(record: Evidence | None, now_ms: int) -> dict[str | int, _ComparedPart]:
    state: State | None = None if record is None else record.state
    if isinstance(state, FieldsState):
        return {
            field.name: _ComparedPart(field.stamp, field.is_live_at(now_ms), (field.text, field.expires_at))
            for field in state.fields
        }
    if isinstance(state, CounterState):
        return {entry.site: _ComparedPart(entry.stamp, True, entry.total) for entry in state.entries}
    return {}


def _deleted_part(record: Evidence | None, stamp: Stamp) -> _ComparedPart | None:
    """A part that a record's delete took away; None if the record never had it, or forgot it."""
    state = None if record is None else record.state
    if state is None or state.deleted is None:
        return None
    is_gone = stamp < state.deleted if isinstance(state, FieldsState) else stamp <= state.deleted
    return _ComparedPart(state.deleted, False) if is_gone else None

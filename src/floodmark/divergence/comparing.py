"""Compares the records of sites, over a range of keys or a list of keys.

Equal records are only counted (`alignment.py`); the others are judged (`rules.py`).  A verdict that depends
on a collected horizon waits, because the horizon is read after the records.  When too many wait, the horizons
are read in between: each counts only for the records that were read before it.

The version of each site is fixed first, and everything else is read as of that version or later.  A site that
joins in between is not yet in the watermark, and then nothing is concluded from absence.

A site that fails is left out from there on, and its error is raised when the others have been compared.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice
from typing import Final, NamedTuple, TypeAlias

import msgspec
import pyarrow

from floodmark.divergence.alignment import Aligned, Alignment, Failed, Unlike, align
from floodmark.divergence.rules import (
    Evidence,
    Judgement,
    PartName,
    Side,
    Verdict,
    evidence_of,
    find_doubt,
    judge,
)
from floodmark.host.ports import Host
from floodmark.model.change import Stamp
from floodmark.model.errors import FloodmarkError, InvalidConfiguration
from floodmark.model.record import FoundRecord
from floodmark.model.version import VERSION_MAX, Version
from floodmark.replication.topology import MemberSite

# The keys that a site looks up in one call.
KEYS_AT_ONCE: Final = 10_000
WAITING_MAX: Final = 100_000


@dataclass(frozen=True)
class Vantage:
    """A site as of a version, with its watermark then and the stamp of the data set (`Side`).

    `horizon_of` returns its collected horizon; it is called after the records have been read.
    """

    site: str
    site_id: int
    version: Version
    mark: Mapping[int, Version]
    horizon_of: Callable[[], Version]
    data_set: bytes = b""


class Pair(NamedTuple):
    """Two sites that are compared, by name."""

    left: str
    right: str


class DriftSide(msgspec.Struct, frozen=True):
    """A key that has drifted, at one of two sites.

    Without a record, `version` is 0 and `digest` None.  `stamp` is that of the part that decided, None if the
    site lacks it.
    """

    site: str
    version: Version
    stamp: Stamp | None
    mark: dict[int, Version]
    digest: int | None
    deleted: bool


class Drift(msgspec.Struct, frozen=True):
    """A key in which two sites differ, though each has merged what the other holds.

    `part` is the first field of a merged record that has drifted, or the site whose count has.
    """

    key: bytes
    verdict: Verdict
    left: DriftSide
    right: DriftSide
    part: PartName = None


class Lag(msgspec.Struct, frozen=True):
    """A key in which two sites differ, and at least one lacks changes.  `doubt` says why it may be drift."""

    key: bytes
    left: str
    right: str
    doubt: str | None = None


Finding: TypeAlias = Drift | Lag


class ComparedTally(msgspec.Struct, frozen=True):
    """The number of keys that were compared at two sites, and of each verdict."""

    compared: int = 0
    agree: int = 0
    lag: int = 0
    value_mismatch: int = 0
    missing_left: int = 0
    missing_right: int = 0

    @property
    def drift(self) -> int:
        """The number of keys that have drifted."""
        return self.value_mismatch + self.missing_left + self.missing_right

    def plus(self, other: "ComparedTally") -> "ComparedTally":
        """The tally of two disjoint sets of keys.

        >>> ComparedTally(2, agree=1, lag=1).plus(ComparedTally(3, agree=2, missing_left=1))
        ComparedTally(compared=5, agree=3, lag=1, value_mismatch=0, missing_left=1, missing_right=0)
        """
        names = self.__struct_fields__
        return ComparedTally(*(getattr(self, name) + getattr(other, name) for name in names))


class Comparison:
    """Yields findings when it is iterated over, once; after that, `tallies` has the numbers of each pair.

    `failures` has the errors of sites that could not be read to the end, by name.
    """

    def __init__(self, vantages: Sequence[Vantage], aligned: Iterable[Alignment], waiting_max: int) -> None:
        self.vantages = vantages
        self.failures: dict[str, FloodmarkError] = {}
        self._aligned = aligned
        self._waiting_max = waiting_max
        self._waiting: list[_Waiting] = []
        # Sites whose horizons could not be read.
        self._mute: set[str] = set()
        self._pairs = {
            (left, right): Pair(vantages[left].site, vantages[right].site)
            for left, right in combinations(range(len(vantages)), 2)
        }
        self._numbers = {pair: dict.fromkeys(Verdict, 0) for pair in self._pairs}
        self._compared = dict.fromkeys(self._pairs, 0)
        self._known = frozenset[int]().union(*(vantage.mark for vantage in vantages))

    @property
    def tallies(self) -> dict[Pair, ComparedTally]:
        """The numbers so far, for every two sites in the order in which they were given."""
        return {
            name: ComparedTally(
                compared=self._compared[pair],
                **{str(verdict): number for verdict, number in self._numbers[pair].items()},
            )
            for pair, name in self._pairs.items()
        }

    def __iter__(self) -> Iterator[Finding]:
        for window in self.windows():
            yield from window

    def windows(self) -> Iterator[list[Finding]]:
        """The findings of all pairs of sites in the same keys together.

        If a key waits for horizons, some pairs may come later, unless none may wait (`waiting_max`).
        """
        found: list[Finding] = []
        before = None
        try:
            for each in self._aligned:
                if isinstance(each, Failed):
                    self.failures.setdefault(self.vantages[each.place].site, each.error)
                    continue
                pair = each.left, each.right
                if before is not None and pair <= before:
                    if len(self._waiting) > self._waiting_max:
                        found += self._settle()
                    if found:
                        yield found
                        found = []
                before = pair
                self._compared[pair] += each.compared
                self._numbers[pair][Verdict.AGREE] += each.compared - len(each.unlike)
                for unlike in each.unlike:
                    found += self._examine(pair, unlike)
        except FloodmarkError:
            yield [*found, *self._settle()]
            raise
        yield [*found, *self._settle()]
        for error in self.failures.values():
            raise error

    def _examine(self, pair: tuple[int, int], unlike: Unlike) -> Iterator[Finding]:
        left, right = (self.vantages[place] for place in pair)
        waiting = _Waiting(pair, unlike.key, _evidence(left, unlike.left), _evidence(right, unlike.right))
        # A horizon of 0 gives the strictest verdict, and one above everything the most lenient.
        harsh = self._judge(waiting, 0, 0)
        if harsh.verdict.is_drift and self._judge(waiting, VERSION_MAX, VERSION_MAX) != harsh:
            self._waiting.append(waiting)
        else:
            yield from self._tell(waiting, harsh)

    def _settle(self) -> Iterator[Finding]:
        """Read the horizons, and judge the differences that waited for them."""
        waiting, self._waiting = self._waiting, []
        places = {place for each in waiting for place in each.pair}
        horizons = {place: self._read_horizon(self.vantages[place]) for place in sorted(places)}
        for each in waiting:
            left, right = each.pair
            yield from self._tell(each, self._judge(each, horizons[left], horizons[right]))

    def _read_horizon(self, vantage: Vantage) -> Version:
        """The collected horizon; above everything if the site does not answer."""
        if vantage.site in self._mute:
            return VERSION_MAX
        try:
            return vantage.horizon_of()
        except FloodmarkError as error:
            self._mute.add(vantage.site)
            self.failures.setdefault(vantage.site, error)
            return VERSION_MAX

    def _judge(self, waiting: "_Waiting", left_horizon: Version, right_horizon: Version) -> Judgement:
        left, right = (self.vantages[place] for place in waiting.pair)
        return judge(
            Side(waiting.left, left.mark, left_horizon, left.version, left.data_set),
            Side(waiting.right, right.mark, right_horizon, right.version, right.data_set),
        )

    def _tell(self, waiting: "_Waiting", judgement: Judgement) -> Iterator[Finding]:
        verdict = judgement.verdict
        self._numbers[waiting.pair][verdict] += 1
        if verdict is Verdict.LAG:
            doubt = find_doubt(waiting.left, waiting.right, self._known)
            yield Lag(waiting.key, *self._pairs[waiting.pair], doubt)
        elif verdict.is_drift:
            left, right = (self.vantages[place] for place in waiting.pair)
            yield Drift(
                waiting.key,
                verdict,
                _side(left, waiting.left, judgement.left),
                _side(right, waiting.right, judgement.right),
                judgement.part,
            )


class _Waiting(NamedTuple):
    """A difference that is not judged yet."""

    pair: tuple[int, int]
    key: bytes
    left: Evidence | None
    right: Evidence | None


def compare(
    vantages: Sequence[Vantage],
    streams: Sequence[Iterable[pyarrow.RecordBatch]],
    *,
    waiting_max: int = WAITING_MAX,
) -> Comparison:
    """Compare sites, each with each, over one range of keys.

    `streams` are the thin records of the range at each site, dead ones included, as of the version of its
    vantage and in key order.  The comparison reads them when it is iterated over.
    """
    return Comparison(vantages, align(streams), waiting_max)


def take_vantage(site: Host, namespace: str) -> Vantage:
    """A site as of now.  The caller keeps the version readable by a safe point.

    Raises InvalidConfiguration if the site does not share the namespace, and Rejoining while a restored site
    does not know what it has lost.
    """
    own = site.identity
    version = site.versions.read_version()
    watermark = site.replication.watermark(namespace, version)
    members = _find_members(site, namespace)
    # Raises Rejoining.
    site.replication.links()
    if own.site_id not in members and not watermark:
        raise InvalidConfiguration(
            f"site {own.site!r} does not share namespace {namespace!r} and has got no changes of it from "
            "others, so that it cannot be told what it should hold. Name sites that replicate it",
            site=own.site,
            namespace=namespace,
        )
    mark = dict(watermark)
    for site_id, member in members.items():
        through = watermark.get(site_id, 0)
        # All changes of a site that has ended are in, up to any version.
        mark[site_id] = max(through, version) if member.has_ended(through) else through
    mark[own.site_id] = version
    horizon_of = partial(read_horizon, site, namespace, tuple(mark))
    data_set = site.namespaces.find_namespace(namespace).at(version).stamp
    return Vantage(own.site, own.site_id, version, mark, horizon_of, data_set)


def read_horizon(site: Host, namespace: str, known: Collection[int]) -> Version:
    """The collected horizon of a namespace now, for a vantage that knows of some sites, by their ids.

    It is above everything if another site has joined since: a tombstone of that site may be collected.
    """
    facts = site.status.statistics().namespaces
    horizon = next((each.collected_horizon for each in facts if each.name == namespace), VERSION_MAX)
    joined = _find_members(site, namespace).keys() - set(known)
    return VERSION_MAX if joined else horizon


def _find_members(site: Host, namespace: str) -> dict[int, MemberSite]:
    topology = site.membership.topology()
    members = {} if topology is None else topology.members(namespace)
    return {member.id: member for member in members.values()}


def compare_keys(
    sites: Sequence[Host],
    namespace: str,
    keys: Iterable[bytes],
    vantages: Sequence[Vantage] | None = None,
) -> Comparison:
    """Compare some keys of sites, each site with each, as of now or from vantages taken before."""
    taken = [take_vantage(site, namespace) for site in sites] if vantages is None else vantages
    return Comparison(taken, _align_keys(sites, taken, namespace, iter(keys)), WAITING_MAX)


def _align_keys(
    sites: Sequence[Host], vantages: Sequence[Vantage], namespace: str, keys: Iterator[bytes]
) -> Iterator[Aligned]:
    while some := list(islice(keys, KEYS_AT_ONCE)):
        found = [
            site.verification.find_records(namespace, some, vantage.version, True)
            for site, vantage in zip(sites, vantages, strict=True)
        ]
        for key, *records in zip(some, *found, strict=True):
            for left, right in combinations(range(len(records)), 2):
                unlike = Unlike(key, records[left], records[right])
                digests = {record and record.digest for record in unlike[1:]}
                yield Aligned(left, right, 1, [unlike] if len(digests) > 1 else [])


def _evidence(vantage: Vantage, row: FoundRecord | None) -> Evidence | None:
    return None if row is None else evidence_of(row.version, vantage.site_id, row.stored, row.digest)


def _side(vantage: Vantage, record: Evidence | None, stamp: Stamp | None) -> DriftSide:
    return DriftSide(
        site=vantage.site,
        version=0 if record is None else record.version,
        stamp=stamp,
        mark=dict(vantage.mark),
        digest=None if record is None else record.digest,
        deleted=record is not None and record.deleted,
    )

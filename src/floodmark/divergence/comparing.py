"""Sites compared with each other, record by record, over a range of keys or a list of them.

Records that are equal are only counted (`alignment.py`); the others are judged (`rules.py`).  A verdict that
hangs on what a site has collected has to wait: the collected horizon must be read after the records.  Such
differences are kept until the end, or until there are too many of them.  Then the horizons are read in
between, and once more whenever there are too many again, for each counts only for what was read before it.

A site that fails is left out from there on, and the error is raised when the others have been compared.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, NamedTuple, TypeAlias

import msgspec
import pyarrow

from floodmark.divergence.alignment import Aligned, Alignment, Failed, Row, Unlike, align
from floodmark.divergence.evidence import Evidence, evidence_of
from floodmark.divergence.rules import Judgement, PartName, Side, Verdict, find_doubt, judge
from floodmark.model.change import Stamp
from floodmark.model.errors import FloodmarkError
from floodmark.model.version import VERSION_MAX, Version

WAITING_MAX: Final = 100_000


@dataclass(frozen=True)
class Vantage:
    """A site as of a version: what it could have heard of by then, and how to learn its collected horizon.

    `mark` is the site's watermark as of the version, as `Side` wants it.  `horizon_of` is called when all
    records have been read.
    """

    site: str
    site_id: int
    version: Version
    mark: Mapping[int, Version]
    horizon_of: Callable[[], Version]


class Pair(NamedTuple):
    """Two sites that are compared, by name."""

    left: str
    right: str


class DriftSide(msgspec.Struct, frozen=True):
    """What one of two sites holds of a key that has drifted.

    `version` is 0 and `digest` is None where there is no record.  `stamp` is that of the part that decided,
    and None where the site has nothing of it.
    """

    site: str
    version: Version
    stamp: Stamp | None
    mark: dict[int, Version]
    digest: int | None
    deleted: bool


class Drift(msgspec.Struct, frozen=True):
    """A key of which two sites hold something else, though each has heard of all that the other holds.

    `part` is the first field that has drifted, or the site whose count has, in a record that is merged.
    """

    key: bytes
    verdict: Verdict
    left: DriftSide
    right: DriftSide
    part: PartName = None


class Lag(msgspec.Struct, frozen=True):
    """A key of which two sites hold something else, and at least one has not heard of all yet.

    `doubt` says why it may be more than that.
    """

    key: bytes
    left: str
    right: str
    doubt: str | None = None


Finding: TypeAlias = Drift | Lag


class ComparedTally(msgspec.Struct, frozen=True):
    """How many keys of two sites were compared, and what came of it."""

    compared: int = 0
    agree: int = 0
    lag: int = 0
    value_mismatch: int = 0
    missing_left: int = 0
    missing_right: int = 0

    @property
    def drift(self) -> int:
        """How many keys have drifted, in whatever way."""
        return self.value_mismatch + self.missing_left + self.missing_right

    def plus(self, other: "ComparedTally") -> "ComparedTally":
        """The tally of two disjoint sets of keys.

        >>> ComparedTally(2, agree=1, lag=1).plus(ComparedTally(3, agree=2, missing_left=1))
        ComparedTally(compared=5, agree=3, lag=1, value_mismatch=0, missing_left=1, missing_right=0)
        """
        names = self.__struct_fields__
        return ComparedTally(*(getattr(self, name) + getattr(other, name) for name in names))


class Comparison:
    """What is found when it is iterated over, once; after that, `tallies` has the numbers of each pair.

    `failures` says which sites could not be read to the end, by name, and why.
    """

    def __init__(self, vantages: Sequence[Vantage], aligned: Iterable[Alignment], waiting_max: int) -> None:
        self.vantages = vantages
        self.failures: dict[str, FloodmarkError] = {}
        self._aligned = aligned
        self._waiting_max = waiting_max
        self._waiting: list[_Waiting] = []
        # Sites that did not even tell their horizons.
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
        """What was counted so far, for every two sites in the order in which they were given."""
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
        """What is found, and not in parts: all pairs of sites that were compared in the same keys.

        Of a key that waits for horizons some pairs may come later, unless nothing may wait (`waiting_max`).
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
            # What was read before something failed still counts.
            yield [*found, *self._settle()]
            raise
        yield [*found, *self._settle()]
        for error in self.failures.values():
            raise error

    def _examine(self, pair: tuple[int, int], unlike: Unlike) -> Iterator[Finding]:
        left, right = (self.vantages[place] for place in pair)
        waiting = _Waiting(pair, unlike.key, _evidence(left, unlike.left), _evidence(right, unlike.right))
        # A horizon of 0 condemns whatever can be condemned, one above everything only what is sure.
        harsh = self._judge(waiting, 0, 0)
        if harsh.verdict.is_drift and self._judge(waiting, VERSION_MAX, VERSION_MAX) != harsh:
            self._waiting.append(waiting)
        else:
            yield from self._tell(waiting, harsh)

    def _settle(self) -> Iterator[Finding]:
        """Judge what had to wait until all that it hangs on was read."""
        waiting, self._waiting = self._waiting, []
        places = {place for each in waiting for place in each.pair}
        horizons = {place: self._read_horizon(self.vantages[place]) for place in sorted(places)}
        for each in waiting:
            left, right = each.pair
            yield from self._tell(each, self._judge(each, horizons[left], horizons[right]))

    def _read_horizon(self, vantage: Vantage) -> Version:
        """The collected horizon; where it cannot be told, nothing is concluded from absence."""
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
            Side(waiting.left, left.mark, left_horizon, left.version),
            Side(waiting.right, right.mark, right_horizon, right.version),
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
    vantage and in order of keys.  Nothing is read before the comparison is iterated over.
    """
    return Comparison(vantages, align(streams), waiting_max)


def compare_rows(
    vantages: Sequence[Vantage], rows: Iterable[tuple[bytes, Sequence[Row | None]]]
) -> Comparison:
    """`compare` for single keys, each with what every site holds of it."""
    return Comparison(vantages, _align_rows(rows), WAITING_MAX)


def _align_rows(rows: Iterable[tuple[bytes, Sequence[Row | None]]]) -> Iterator[Aligned]:
    for key, found in rows:
        for left, right in combinations(range(len(found)), 2):
            on_left, on_right = found[left], found[right]
            is_unlike = _digest_of(on_left) != _digest_of(on_right)
            yield Aligned(left, right, 1, [Unlike(key, on_left, on_right)] if is_unlike else [])


def _digest_of(row: Row | None) -> int | None:
    return None if row is None else row.digest


def _evidence(vantage: Vantage, row: Row | None) -> Evidence | None:
    return None if row is None else evidence_of(row.version, vantage.site_id, row.thin, row.digest)


def _side(vantage: Vantage, record: Evidence | None, stamp: Stamp | None) -> DriftSide:
    return DriftSide(
        site=vantage.site,
        version=0 if record is None else record.version,
        stamp=stamp,
        mark=dict(vantage.mark),
        digest=None if record is None else record.digest,
        deleted=record is not None and record.deleted,
    )

"""Which differences each form of Leap Frog finds, and when: the table of docs/verifying.md, computed.

Two sites are modelled as Venice has them: what is stored, the log that it was stored by, heartbeats in that
log, and how far each site has consumed the other.  Every form looks at the same two sites.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from doctest import DocTestParser, DocTestRunner
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from floodmark.divergence import (
    BoundedSide,
    Evidence,
    History,
    HistoryChange,
    Side,
    heartbeat_bounds,
    verdict,
    verdict_bounded,
    walk_histories,
)
from floodmark.model.change import Stamp
from floodmark.model.version import Version

PAGE: Final = Path(__file__).parents[2] / "docs" / "verifying.md"
KEY: Final = b"ada"
Positions = dict[int, Version]


class Held(NamedTuple):
    """A record, or a tombstone, whose value is 0."""

    version: Version
    stamp: Stamp
    value: int
    vector: Positions
    bounds: Positions


@dataclass
class ModelSite:
    """A site with one key."""

    id: int
    mark: Positions = field(default_factory=lambda: {1: 0, 2: 0})
    beat: Positions = field(default_factory=lambda: {1: 0, 2: 0})
    stored: Held | None = None
    logged: Held | None = None
    writes: list[tuple[Stamp, int]] = field(default_factory=list)
    journal: list[HistoryChange] = field(default_factory=list)
    marks: list[tuple[Version, Positions]] = field(default_factory=list)
    horizon: Version = 0

    def store(self, version: Version, stamp: Stamp, value: int) -> None:
        """Store something, and log it."""
        before = {} if self.logged is None else self.logged.vector
        record = {stamp.site: stamp.version}
        bounds = dict(heartbeat_bounds(self.beat, record).upper)
        self.stored = self.logged = Held(version, stamp, value, {**before, **record}, bounds)
        self.journal.append(HistoryChange(version, KEY, stamp, value))
        self.mark[self.id] = version

    def side(self) -> Side:
        """The site as its records show it, now."""
        held = self.stored
        record = None if held is None else Evidence(held.version, held.stamp, held.value, not held.value)
        return Side(record, self.mark, self.horizon, self.mark[self.id])

    def bounded_side(self, *, whole: bool) -> BoundedSide:
        """The site as its log shows it, with whole vectors or with heartbeats."""
        held = self.logged
        if held is None:
            return BoundedSide(None, {}, self.mark)
        return BoundedSide(held.value, held.vector if whole else held.bounds, self.mark)

    def history(self) -> History:
        """All that is in the log."""
        return History(str(self.id), self.id, self.journal, self.marks)


class Pair:
    """Two sites that agree on a record, until something happens."""

    def __init__(self) -> None:
        self.now = 0
        self.left, self.right = ModelSite(1), ModelSite(2)
        self.beat()
        self.write(self.left, 5)
        self.go_on()

    def tick(self) -> Version:
        self.now += 1
        return self.now

    def write(self, site: ModelSite, value: int) -> None:
        """Write at a site; 0 deletes."""
        site.writes.append((Stamp(self.tick(), site.id), value))
        site.store(self.now, *site.writes[-1])

    def copy(self, source: ModelSite, target: ModelSite, *, lost: bool = False, wrong: bool = False) -> None:
        """Consume a site at the other one, where something may be lost, or win without right."""
        for stamp, value in source.writes:
            newest = target.stored
            if stamp.version <= target.mark[source.id] or lost:
                continue
            if newest is None or stamp > newest.stamp or wrong:
                target.store(self.tick(), stamp, value)
        target.mark[source.id] = source.mark[source.id]

    def beat(self) -> None:
        """Both sites write a heartbeat."""
        for site in (self.left, self.right):
            site.mark[site.id] = self.tick()
            site.beat = dict(site.mark)
            site.marks.append((self.now, site.beat))

    def go_on(self) -> None:
        """Everything is consumed everywhere, and everybody says so."""
        self.copy(self.left, self.right)
        self.copy(self.right, self.left)
        self.beat()
        self.copy(self.left, self.right)
        self.copy(self.right, self.left)


FORMS: Final[dict[str, Callable[[Pair], bool]]] = {
    "stamps": lambda pair: verdict(pair.left.side(), pair.right.side()).is_drift,
    "vectors": lambda pair: (
        verdict_bounded(pair.left.bounded_side(whole=True), pair.right.bounded_side(whole=True)).is_drift
    ),
    "heartbeats": lambda pair: (
        verdict_bounded(pair.left.bounded_side(whole=False), pair.right.bounded_side(whole=False)).is_drift
    ),
    "histories": lambda pair: bool(walk_histories(pair.left.history(), pair.right.history())),
}


# What happens


def lose_update(pair: Pair) -> None:
    pair.write(pair.left, 6)
    pair.copy(pair.left, pair.right, lost=True)


def lose_update_before_a_heartbeat(pair: Pair) -> None:
    lose_update(pair)
    pair.write(pair.left, 7)
    pair.copy(pair.left, pair.right)


def lose_update_of_who_is_ahead(pair: Pair) -> None:
    pair.beat()
    pair.write(pair.left, 7)
    pair.copy(pair.left, pair.right)
    lose_update(pair)


def lose_delete(pair: Pair) -> None:
    pair.write(pair.left, 0)
    pair.copy(pair.left, pair.right, lost=True)


def damage(pair: Pair) -> None:
    assert pair.right.stored is not None
    pair.right.stored = pair.right.stored._replace(value=9)


def resolve_wrongly(pair: Pair) -> None:
    pair.write(pair.left, 6)
    pair.write(pair.right, 7)
    pair.copy(pair.right, pair.left)
    pair.copy(pair.left, pair.right, wrong=True)


def resurrect(pair: Pair) -> None:
    pair.write(pair.left, 6)
    pair.write(pair.right, 0)
    collect(pair.right)
    pair.copy(pair.right, pair.left)
    pair.copy(pair.left, pair.right)


def lag(pair: Pair) -> None:
    pair.write(pair.left, 6)


def write_at_once(pair: Pair) -> None:
    pair.write(pair.left, 6)
    pair.write(pair.right, 7)
    pair.copy(pair.left, pair.right)


def collect_while_the_other_lags(pair: Pair) -> None:
    pair.write(pair.left, 0)
    collect(pair.left)


def collect(site: ModelSite) -> None:
    assert site.stored is not None
    site.horizon = site.stored.stamp.version
    site.stored = site.logged = None


FAULTS: Final = {
    "an update is lost": lose_update,
    "an update is lost where a heartbeat was not yet consumed by the other": lose_update_of_who_is_ahead,
    "an update is lost, and written over before the next heartbeat": lose_update_before_a_heartbeat,
    "a delete is lost": lose_delete,
    "a stored value turns into another": damage,
    "one site lets the older write win": resolve_wrongly,
    "a tombstone goes too early, and an older write comes": resurrect,
}
HARMLESS: Final = {
    "a change is under way": lag,
    "two sites write at once, and one write has to lose": write_at_once,
    "a tombstone is collected that is not yet known elsewhere": collect_while_the_other_lags,
}


def describe_fault(happen: Callable[[Pair], None], find: Callable[[Pair], bool]) -> str:
    """When a form finds a fault, and whether it still does when the key was written to once more."""
    pair = Pair()
    happen(pair)
    at_once = find(pair)
    pair.go_on()
    then = find(pair)
    pair.write(pair.left, 8)
    pair.go_on()
    if not (at_once or then):
        return "no"
    return ("at once" if at_once else "with the next heartbeats") + (", for good" if find(pair) else "")


def describe_harmless(happen: Callable[[Pair], None], find: Callable[[Pair], bool]) -> str:
    """Whether a form says anything about what is no fault."""
    pair = Pair()
    happen(pair)
    return "false report" if find(pair) else "silent"


def table() -> list[list[str]]:
    rows = [
        [what, *(describe_fault(happen, find) for find in FORMS.values())] for what, happen in FAULTS.items()
    ]
    return rows + [
        [what, *(describe_harmless(happen, find) for find in FORMS.values())]
        for what, happen in HARMLESS.items()
    ]


def shown() -> list[list[str]]:
    """The table of the page."""
    lines = PAGE.read_text("utf-8").partition("| what happens ")[2].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_page_shows_what_each_form_finds() -> None:
    lines = ["| " + " | ".join(row) + " |" for row in table()]
    assert shown() == table(), "the table should be:\n" + "\n".join(lines)


def test_examples_of_the_page_are_right() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    example = DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, str(PAGE), 0)
    told: list[str] = []
    assert DocTestRunner().run(example, out=told.append).failed == 0, "".join(told)


def test_forms_are_silent_about_sites_that_agree() -> None:
    pair = Pair()
    assert [form for form, find in FORMS.items() if find(pair)] == []


@pytest.mark.parametrize("what", FAULTS)
def test_stamps_find_every_fault_that_has_not_been_written_over(what: str) -> None:
    expected = "no" if "written over" in what else "at once"
    assert describe_fault(FAULTS[what], FORMS["stamps"]) == expected


@pytest.mark.parametrize("what", HARMLESS)
def test_stamps_are_silent_about_what_is_no_fault(what: str) -> None:
    assert describe_harmless(HARMLESS[what], FORMS["stamps"]) == "silent"

"""Which differences each form of Leap Frog finds, and when: the table of docs/verifying.md, computed.

Two sites are modelled as Venice has them: what is stored, the log that it was stored by, heartbeats in that
log, and how far each site has consumed the other.  Every form looks at the same two sites.  A third one only
writes.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from doctest import DocTestParser, DocTestRunner
from pathlib import Path
from typing import Final, Literal, NamedTuple

import pytest

from floodmark.codec.states import Field, FieldsState
from floodmark.divergence.bounds import BoundedSide, heartbeat_bounds, high_watermark, verdict_bounded
from floodmark.divergence.histories import History, HistoryChange, walk_histories
from floodmark.divergence.rules import Evidence, PartName, Side, verdict
from floodmark.model.change import Stamp
from floodmark.model.version import Version

PAGE: Final = Path(__file__).parents[2] / "docs" / "verifying.md"
KEY: Final = b"ada"
Positions = dict[int, Version]
Form = Literal["vectors", "heartbeats", "heartbeats and log"]


class Held(NamedTuple):
    """A record, or a tombstone, whose value is 0; if it is merged, its value is the sum of its fields."""

    version: Version
    stamp: Stamp
    value: int
    vector: Positions
    bounds: dict[Form, Positions]
    fields: dict[str, tuple[Stamp, int]]


@dataclass
class ModelSite:
    """A site with one key."""

    id: int
    mark: Positions = field(default_factory=lambda: {1: 0, 2: 0, 3: 0})
    beat: Positions = field(default_factory=lambda: {1: 0, 2: 0, 3: 0})
    since_beat: list[Positions] = field(default_factory=list)
    stored: Held | None = None
    logged: Held | None = None
    writes: list[tuple[Stamp, int]] = field(default_factory=list)
    journal: list[HistoryChange] = field(default_factory=list)
    marks: list[tuple[Version, Positions]] = field(default_factory=list)
    horizon: Version = 0

    def store(self, version: Version, stamp: Stamp, value: int, field_name: str | None = None) -> None:
        """Store something, or a field of it, and log it."""
        before = {} if self.logged is None else self.logged.vector
        fields = {} if self.logged is None or field_name is None else dict(self.logged.fields)
        if field_name is not None:
            fields[field_name] = stamp, value
        whole = sum(each for _, each in fields.values()) if fields else value
        record = {stamp.site: stamp.version}
        vector = {**before, **record}
        self.stored = self.logged = Held(version, stamp, whole, vector, self._bounds(vector, record), fields)
        parts: dict[PartName, Stamp] | None = None if field_name is None else {field_name: stamp}
        self.journal.append(HistoryChange(version, KEY, stamp, value, parts=parts))
        self.since_beat.append(record)
        self.mark[self.id] = version

    def _bounds(self, vector: Positions, record: Positions) -> dict[Form, Positions]:
        consumed = high_watermark(self.beat, self.since_beat)
        return {
            "vectors": vector,
            "heartbeats": dict(heartbeat_bounds(self.beat, record).upper),
            "heartbeats and log": dict(heartbeat_bounds(consumed, record).upper),
        }

    def side(self) -> Side:
        """The site as its records show it, now."""
        held = self.stored
        record = None
        if held is not None:
            fields = tuple(Field(name, b"%d" % each, stamp) for name, (stamp, each) in held.fields.items())
            state = FieldsState(None, fields) if fields else None
            record = Evidence(held.version, held.stamp, held.value, not held.value, state=state)
        return Side(record, self.mark, self.horizon, self.mark[self.id])

    def bounded_side(self, form: Form) -> BoundedSide:
        """The site as its log shows it, with whole vectors or with bounds."""
        held = self.logged
        if held is None:
            return BoundedSide(None, {}, self.mark)
        return BoundedSide(held.value, held.bounds[form], self.mark)

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
            site.beat, site.since_beat = dict(site.mark), []
            site.marks.append((self.now, site.beat))

    def go_on(self) -> None:
        """Everything is consumed everywhere, and everybody says so."""
        self.copy(self.left, self.right)
        self.copy(self.right, self.left)
        self.beat()
        self.copy(self.left, self.right)
        self.copy(self.right, self.left)


def is_drift_bounded(pair: Pair, form: Form) -> bool:
    """What the two logs say."""
    return verdict_bounded(pair.left.bounded_side(form), pair.right.bounded_side(form)).is_drift


FORMS: Final[dict[str, Callable[[Pair], bool]]] = {
    "stamps": lambda pair: verdict(pair.left.side(), pair.right.side()).is_drift,
    "vectors": lambda pair: is_drift_bounded(pair, "vectors"),
    "heartbeats": lambda pair: is_drift_bounded(pair, "heartbeats"),
    "heartbeats and log": lambda pair: is_drift_bounded(pair, "heartbeats and log"),
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


def lose_field(pair: Pair) -> None:
    """The right writes another field after that, which comes to the left."""
    here, there = Stamp(pair.tick(), 1), Stamp(pair.tick(), 2)
    pair.left.store(here.version, here, 10, "city")
    pair.right.store(there.version, there, 20, "name")
    pair.left.store(pair.tick(), there, 20, "name")
    pair.left.mark[2], pair.right.mark[1] = there.version, here.version


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


def lag_behind_another_field(pair: Pair) -> None:
    """A field from a third site comes to the left, which then writes another one; only this comes on."""
    third = Stamp(pair.tick(), 3)
    pair.left.store(pair.tick(), third, 10, "city")
    pair.left.mark[3] = third.version
    here = Stamp(pair.tick(), 1)
    pair.left.store(here.version, here, 20, "name")
    pair.right.store(pair.tick(), here, 20, "name")
    pair.right.mark[1] = here.version


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
    "the update of a field is lost, and another site writes another field": lose_field,
    "a stored value turns into another": damage,
    "one site lets the older write win": resolve_wrongly,
    "a tombstone goes too early, and an older write comes": resurrect,
}
HARMLESS: Final = {
    "a change is under way": lag,
    "of two fields that two sites have written, one is under way": lag_behind_another_field,
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

"""Objects with a history: the states are those of a plain model, in whatever order they arrive."""

from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.layers.conftest import Place
from tests.replication.support_links import Mesh
from tests.site.support import HookedEngine, open_memory

from floodmark import Codec
from floodmark.layers import LargeValues, ObjectHistory, StateChange, StateSpan
from floodmark.layers.object_history import _STILL, _micros, _prefix, _Row
from floodmark.model.errors import InvalidArgument, InvalidKey, InvalidRange, InvalidValue, WrongPolicy
from floodmark.testing.clock import SimulatedTime

NAME = "devices"
HOURS = 12


def hour(number: int) -> datetime:
    return datetime(2023, 11, 14, tzinfo=UTC) + timedelta(hours=number)


class Model:
    """The state of one object in each hour; the last one goes on for ever."""

    def __init__(self) -> None:
        self.states: list[str | None] = [None] * HOURS

    def set(self, number: int, state: str | None) -> None:
        """A state holds up to the next change."""
        held = self.states[number]
        end = next((each for each in range(number, HOURS) if self.states[each] != held), HOURS)
        self.states[number:end] = [state] * (end - number)

    def spans(self) -> list[StateSpan[str]]:
        found = []
        for state, numbers in groupby(range(HOURS), self.states.__getitem__):
            first, *_, last = [*numbers] * 2
            if state is not None:
                found.append(StateSpan(hour(first), None if last == HOURS - 1 else hour(last + 1), state))
        return found


@given(
    changes=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, HOURS - 1), st.sampled_from([None, "x", "y", ""]))
    ),
    bounds=st.tuples(st.integers(0, HOURS), st.integers(0, HOURS)).map(sorted),
)
def test_histories_are_those_of_a_plain_model(
    changes: list[tuple[str, int, str | None]], bounds: list[int]
) -> None:
    models = {"a": Model(), "b": Model()}
    with open_memory(HookedEngine(), SimulatedTime()) as site:
        objects: ObjectHistory[str] = ObjectHistory(site, NAME, codec="text")
        for name, number, state in changes:
            before = list(models[name].states)
            models[name].set(number, state)
            moment = hour(number)
            version = objects.end(name, at=moment) if state is None else objects.set(name, state, at=moment)
            assert (version == 0) == (before == models[name].states)
        since, until = map(hour, bounds)
        for name, model in models.items():
            assert list(objects.history(name)) == model.spans()
            for number, state in enumerate(model.states):
                assert objects.at(name, hour(number)) == state
            assert list(objects.history(name, since, until)) == [
                each
                for each in model.spans()
                if since < until
                and each.valid_from < until
                and (each.valid_to is None or each.valid_to > since)
            ]
        for number in range(HOURS):
            held = {name: model.states[number] for name, model in models.items()}
            expected = [(name, state) for name, state in held.items() if state is not None]
            assert list(objects.as_of(hour(number)).scan()) == expected


@given(
    rows=st.dictionaries(st.integers(0, HOURS - 1), st.integers(1, HOURS)),
    changes=st.lists(st.tuples(st.integers(0, HOURS - 1), st.sampled_from([None, "x", "y"]))),
    bounds=st.tuples(st.integers(0, HOURS), st.integers(0, HOURS)).map(sorted),
)
def test_rows_of_two_sites_that_overlap_are_read_and_changed_as_spans_that_follow_each_other(
    rows: dict[int, int], changes: list[tuple[int, str | None]], bounds: list[int]
) -> None:
    model = Model()
    with open_memory(HookedEngine(), SimulatedTime()) as site:
        objects: ObjectHistory[str] = ObjectHistory(site, NAME, codec="text")
        for start, hours in sorted(rows.items()):
            end = min(start + hours, HOURS)
            model.states[start:] = [f"from {start}"] * (end - start) + [None] * (HOURS - end)
            row = _Row(
                _micros(hour(start)), _STILL if end == HOURS else _micros(hour(end)), b"from %d" % start
            )
            site.run_transaction(lambda t, row=row: objects._write(t, _prefix("a"), row))  # type: ignore[misc]
        for number, state in changes:
            model.set(number, state)
            moment = hour(number)
            _ = objects.end("a", at=moment) if state is None else objects.set("a", state, at=moment)
        since, until = map(hour, bounds)
        assert list(objects.history("a")) == model.spans()
        assert list(objects.history("a", since, until)) == [
            each
            for each in model.spans()
            if since < until and each.valid_from < until and (each.valid_to is None or each.valid_to > since)
        ]
        for number, state in enumerate(model.states):
            assert objects.at("a", hour(number)) == state
            assert dict(objects.as_of(hour(number)).scan()) == ({} if state is None else {"a": state})


def test_spans_that_two_sites_write_before_they_hear_of_each_other_do_not_overlap() -> None:
    mesh = Mesh("oslo", "rome")
    oslo: ObjectHistory[str] = ObjectHistory(mesh["oslo"], "users", codec="text")
    oslo.set("router-1", "a", at=hour(0))
    mesh.exchange()
    rome: ObjectHistory[str] = ObjectHistory(mesh["rome"], "users", codec="text")
    oslo.set("router-1", "b", at=hour(1))
    rome.set("router-1", "c", at=hour(2))
    mesh.exchange()
    expected = [
        StateSpan(hour(0), hour(1), "a"),
        StateSpan(hour(1), hour(2), "b"),
        StateSpan(hour(2), None, "c"),
    ]
    for objects in (oslo, rome):
        assert list(objects.history("router-1")) == expected
        assert list(objects.as_of(hour(3)).scan()) == [("router-1", "c")]
    oslo.end("router-1", at=hour(5))
    assert list(oslo.as_of(hour(6)).scan()) == []


def test_a_late_state_cuts_and_equal_neighbours_are_joined(place: Place) -> None:
    devices: ObjectHistory[Any] = ObjectHistory(place.site, NAME)
    up, down = {"up": True, "ports": 4}, {"up": False, "name": "r"}
    assert devices.set("router-1", up, at=hour(1))
    assert devices.set("router-1", down, at=hour(5))
    assert devices.set("router-1", up, at=hour(9))
    assert devices.set("router-1", up, at=hour(3)) == 0
    assert list(devices.history("router-1")) == [
        StateSpan(hour(1), hour(5), up),
        StateSpan(hour(5), hour(9), down),
        StateSpan(hour(9), None, up),
    ]
    assert devices.set("router-1", up, at=hour(5))
    assert list(devices.history("router-1")) == [StateSpan(hour(1), None, up)]
    assert devices.end("router-1", at=hour(7))
    assert list(devices.history("router-1")) == [StateSpan(hour(1), hour(7), up)]
    assert devices.diff("router-1", hour(6), hour(7)).fields == {"up": (True, None), "ports": (4, None)}
    devices.set("router-1", down, at=hour(8))
    assert devices.diff("router-1", hour(2), hour(8)).fields == {
        "up": (True, False),
        "ports": (4, None),
        "name": (None, "r"),
    }
    devices.set("router-10", down, at=hour(0))
    devices.set("switch", down, at=hour(0))
    assert dict(devices.as_of(hour(2)).scan(prefix="router-")) == {"router-1": up, "router-10": down}
    assert devices.as_of(hour(2)).get("switch") == down
    assert list(devices.names()) == ["router-1", "router-10", "switch"]


def test_times_before_1970_and_of_other_zones_sort(place: Place) -> None:
    devices: ObjectHistory[Any] = ObjectHistory(place.site, NAME)
    old = datetime(1815, 12, 10, tzinfo=UTC)
    devices.set("ada", 1, at=hour(0).astimezone())
    devices.set("ada", 0, at=old)
    assert list(devices.history("ada")) == [StateSpan(old, hour(0), 0), StateSpan(hour(0), None, 1)]
    assert devices.at("ada", old - timedelta(microseconds=1)) is None
    assert devices.at("ada", hour(0) - timedelta(microseconds=1)) == 0


def test_spans_that_are_too_old_or_too_many_go(place: Place) -> None:
    few: ObjectHistory[Any] = ObjectHistory(place.site, NAME, max_states=3)
    for number in range(6):
        few.set("router-1", number, at=hour(number))
    assert [span.state for span in few.history("router-1")] == [3, 4, 5]
    now = datetime.fromtimestamp(place.site.now() / (1 << 18) / 1_000, UTC)
    young: ObjectHistory[Any] = ObjectHistory(place.site, NAME, max_age=timedelta(hours=2))
    for ago in (5, 4, 3, 1):
        young.set("router-2", ago, at=now - timedelta(hours=ago))
    # The state of three hours ago ended an hour ago.
    assert [span.state for span in young.history("router-2")] == [3, 1]
    place.advance(int(timedelta(hours=2) / timedelta(milliseconds=1)))
    assert [span.state for span in young.history("router-1")] == [3, 4, 5]
    assert young.trim() == 3
    assert [span.state for span in young.history("router-2")] == [1]
    assert [span.state for span in young.history("router-1")] == [5]


def test_what_cannot_be_stored_is_refused(place: Place) -> None:
    devices: ObjectHistory[Any] = ObjectHistory(place.site, NAME)
    for name in ("", "a\x00b", b"router-1", "x" * 4096):
        with pytest.raises(InvalidKey):
            devices.set(name, 1, at=hour(0))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="time zone"):
        devices.set("router-1", 1, at=datetime(2026, 1, 1))
    with pytest.raises(InvalidArgument, match="time zone"):
        devices.as_of(datetime(2026, 1, 1))
    with pytest.raises(InvalidValue, match="cannot be encoded"):
        devices.set("router-1", object(), at=hour(0))
    with pytest.raises(InvalidRange):
        list(devices.history("router-1", hour(2), hour(1)))
    with pytest.raises(InvalidArgument, match="at least one state"):
        ObjectHistory(place.site, NAME, max_states=0)
    with pytest.raises(WrongPolicy, match="holds object history 1, not large values 1"):
        LargeValues(place.site, NAME)
    devices.set("router-1", "up", at=hour(0))
    broken: ObjectHistory[Any] = ObjectHistory(place.site, NAME, codec=Codec(bytes, _fail))
    with pytest.raises(InvalidValue, match="'router-1' cannot be decoded: no"):
        broken.at("router-1", hour(0))


def _fail(_: bytes) -> Any:
    raise ValueError("no")


def test_a_change_log_tells_what_was_changed_in_the_order_of_the_commits(place: Place) -> None:
    objects: ObjectHistory[str] = ObjectHistory(place.site, NAME, codec="text", change_log="changes")
    objects.set("b", "late", at=hour(5))
    objects.set("a", "early", at=hour(1))
    # Nothing changes.
    objects.set("a", "early", at=hour(1))
    place.advance(700)
    objects.end("b", at=hour(9))
    place.advance(5)
    changes = [
        StateChange("b", hour(5), "late"),
        StateChange("a", hour(1), "early"),
        StateChange("b", hour(9), None),
    ]
    found = [*objects.changes()]
    assert [change for _, change in found] == changes
    assert [*objects.changes(since=found[0][0])] == found[1:]
    with pytest.raises(InvalidArgument, match="change_log"):
        next(ObjectHistory(place.site, NAME, codec="text").changes())

"""States of every shape, for property tests."""

from hypothesis import strategies as st

from floodmark.codec.states import DELETE_HERE, HERE, CounterEntry, CounterState, Field, FieldsState, State
from floodmark.model.change import Stamp
from floodmark.model.version import VERSION_MAX

TOTAL_MAX = (1 << 63) - 1

STAMPS = st.builds(Stamp, st.integers(1, VERSION_MAX), st.integers(1, 255))
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ["a", "b", "", '"', "\\", ",", "\x00", "ø", "\U0001f600", "a,b"]
)
TEXTS = st.sampled_from([b"1", b'"x"', b"[1, 2]", b'{"a": "},{"}', b'"\\u002c"', b"true", b"-1e5", b"{}"])
EXPIRIES = st.none() | st.integers(0, 50) | st.just(VERSION_MAX)


@st.composite
def fields_states(draw: st.DrawFn) -> FieldsState:
    """Whole and small states of fields, stamped."""
    deleted = draw(st.none() | STAMPS)
    names = sorted(draw(st.sets(NAMES, min_size=deleted is None, max_size=5)))
    fields = []
    for name in names:
        stamp = draw(STAMPS)
        text = draw(st.none() | TEXTS)
        expires_at = None if text is None else draw(EXPIRIES)
        fields.append(Field(name, text, stamp if deleted is None else max(stamp, deleted), expires_at))
    return FieldsState(deleted, tuple(fields))


@st.composite
def counter_states(draw: st.DrawFn) -> CounterState:
    """Whole and small states of counters, stamped."""
    deleted = draw(st.none() | st.builds(Stamp, st.integers(1, 100), st.integers(1, 255)))
    sites = sorted(draw(st.sets(st.integers(1, 255), min_size=deleted is None, max_size=5)))
    lowest = 1 if deleted is None else deleted.version + 1
    return CounterState(
        deleted,
        tuple(
            CounterEntry(
                site, draw(st.integers(lowest, VERSION_MAX)), draw(st.integers(-TOTAL_MAX - 1, TOTAL_MAX))
            )
            for site in sites
        ),
    )


@st.composite
def unstamped_fields(draw: st.DrawFn) -> FieldsState:
    """Writes of fields that wait for their commit."""
    deleted = draw(st.sampled_from([None, DELETE_HERE]))
    names = sorted(draw(st.sets(NAMES, min_size=deleted is None, max_size=5)))
    texts = {name: draw(TEXTS if deleted else st.none() | TEXTS) for name in names}
    return FieldsState(
        deleted,
        tuple(
            Field(name, text, HERE, None if text is None else draw(EXPIRIES)) for name, text in texts.items()
        ),
    )


UNSTAMPED_COUNTERS = st.just(CounterState(DELETE_HERE, ())) | st.builds(
    lambda total: CounterState(None, (CounterEntry(0, 0, total),)), st.integers(-TOTAL_MAX, TOTAL_MAX)
)
STAMPED: st.SearchStrategy[State] = fields_states() | counter_states()
UNSTAMPED: st.SearchStrategy[State] = unstamped_fields() | UNSTAMPED_COUNTERS
STATES: st.SearchStrategy[State] = STAMPED | UNSTAMPED

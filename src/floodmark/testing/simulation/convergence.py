"""The end of a run: everything heals, all links drain, and all sites must hold the same (promise 8).

What they must hold is known without any network: it is what all the writes that are in the sites' own change
logs make of a key, in whatever order they are taken.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Final

from floodmark.codec.states import CounterState, FieldsState, State, decode_state
from floodmark.codec.values import decode_value, encode_value
from floodmark.merge.states import live_value, merge_states
from floodmark.model.change import Stamp
from floodmark.model.version import compose
from floodmark.testing.simulation.chronicle import NAMESPACES, POLICIES, qualified
from floodmark.testing.simulation.history import Key, Violation
from floodmark.testing.simulation.sites import SimulatedSite, embedded
from floodmark.testing.simulation.workload import DELETED_COUNTERS, KEYS

ALL_KEYS: Final = tuple(Key(namespace, key) for namespace in NAMESPACES for key in KEYS)


def check_convergence(sites: Sequence[SimulatedSite], now_ms: int) -> None:
    """Compare the sites with each other, and with what was written."""
    for key in ALL_KEYS:
        expected = _true_value(sites, key, now_ms)
        stored = {site.name: _find_stored(site, key, now_ms) for site in sites}
        for site, record in stored.items():
            value = None if record is None else live_value(record, now_ms)
            if value != expected:
                raise Violation("8", site, f"{key} is {value!r} and should be {expected!r}", keys=[key])
        essences = {
            site: None if record is None else _essence(record, now_ms) for site, record in stored.items()
        }
        if len(set(essences.values())) > 1:
            raise Violation(
                "8", "all sites", f"{key} has equal values and other bytes: {essences}", keys=[key]
            )
        _check_total(sites, key, expected)


def _find_stored(site: SimulatedSite, key: Key, now_ms: int) -> bytes | None:
    present = compose(now_ms, 0)
    return site.call_host(lambda host: embedded(host).node.find_before(qualified(key), present))


def _essence(stored: bytes, now_ms: int) -> bytes | State:
    """A record without the place that it came from, and without what is dead in it.

    What is dead goes at each site in its own time, with the whole record; it may linger in another that was
    written to before that.
    """
    record = decode_value(stored)
    if record.stamps is None:
        return encode_value(record.value, record.expires_at, record.deleted)
    state = decode_state(stored)
    if isinstance(state, CounterState):
        return CounterState(None, state.entries)
    return FieldsState(None, tuple(field for field in state.fields if field.is_live_at(now_ms)))


def _true_value(sites: Sequence[SimulatedSite], key: Key, now_ms: int) -> bytes | None:
    written = [
        (Stamp(seen.version, site.id), seen.stored)
        for site in sites
        for seen in site.chronicle.changes
        if seen.key == key and decode_value(seen.stored).origin is None
    ]
    if not written:
        return None
    if POLICIES[key.namespace] == "last_write":
        return live_value(max(written)[1], now_ms)
    states = [stored for _, stored in written]
    return live_value(reduce(merge_states, states), now_ms)


def _check_total(sites: Sequence[SimulatedSite], key: Key, value: bytes | None) -> None:
    if POLICIES[key.namespace] != "counter" or key.key in DELETED_COUNTERS:
        return
    total = sum(site.chronicle.totals.get(key, 0) for site in sites)
    if int(value or 0) != total:
        raise Violation("8", "all sites", f"{key} is {value!r}, and {total} was added", keys=[key])

"""Sites that have exchanged all that was written hold equal bytes, whatever the order, and the right ones."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.merge.histories import SITES_MAX, Replica, Step, exchange, run, steps

from floodmark.codec.states import CounterState, decode_state, encode_state, live_value
from floodmark.merge.counter import add_to_counter
from floodmark.merge.fields import delete_fields, put_fields, update_fields
from floodmark.merge.states import delete_record, newest_stamp
from floodmark.model.change import Stamp

NAMES = ("a", "b", "c")
SITES = st.integers(2, SITES_MAX)
ORDERS = st.integers(0, 50)

Members = dict[str, str | None]


def put_members(other: int, choice: int) -> Members:
    return {name: f"put {other} {choice}" for index, name in enumerate(NAMES) if choice >> index & 1}


def updated_members(other: int, choice: int) -> Members:
    text = None if choice % 4 == 0 else f"update {other} {choice}"
    return {NAMES[other % len(NAMES)]: text, NAMES[choice % len(NAMES)]: f"also {choice}"}


def deleted_members(other: int, choice: int) -> Members:
    return {NAMES[other % len(NAMES)]: None, NAMES[choice % len(NAMES)]: None}


FIELD_WRITES = {
    "put": lambda other, choice: put_fields(put_members(other, choice)),
    "update": lambda other, choice: update_fields(updated_members(other, choice)),
    "delete field": lambda other, choice: delete_fields(list(deleted_members(other, choice))),
    "delete": lambda _other, _choice: delete_record("fields"),
}
COUNTER_WRITES = {
    "add": lambda other, choice: add_to_counter(choice * 10 + other - 50),
    "delete": lambda _other, _choice: delete_record("counter"),
}


def expect_fields(written: list[tuple[str, Step, Stamp]]) -> dict[str, str]:
    """What the rules say, by a look at all writes at once."""
    whole = [stamp for action, _, stamp in written if action in ("put", "delete")]
    members = {"put": put_members, "update": updated_members, "delete field": deleted_members}
    newest: dict[str, tuple[Stamp, str | None]] = {}
    for action, step, stamp in sorted(written, key=lambda each: each[2]):
        for name, text in members[action](step.other, step.choice).items() if action in members else ():
            newest[name] = stamp, text
    return {
        name: text
        for name, (stamp, text) in newest.items()
        if text is not None and (not whole or stamp >= max(whole))
    }


def contents(replicas: list[Replica]) -> set[bytes | None]:
    return {replica.content() for replica in replicas}


@given(steps("put", "update", "update", "delete field", "delete", "hear", "hear", "hear all"), SITES, ORDERS)
def test_sites_end_with_the_same_fields(history: list[Step], sites: int, order: int) -> None:
    replicas, written = run(history, sites, FIELD_WRITES)
    exchange(replicas, order)
    assert len(contents(replicas)) == 1
    if replicas[0].stored is not None:
        value = live_value(replicas[0].stored, 0)
        assert (json.loads(value) if value else {}) == expect_fields(written)


@given(steps("add", "add", "hear", "hear all"), SITES, ORDERS)
def test_counters_without_deletes_end_with_the_true_sum(history: list[Step], sites: int, order: int) -> None:
    replicas, written = run(history, sites, COUNTER_WRITES)
    exchange(replicas, order)
    assert len(contents(replicas)) == 1
    total = sum(step.choice * 10 + step.other - 50 for _, step, _ in written)
    for replica in replicas if written else ():
        assert replica.stored is not None
        assert live_value(replica.stored, 0) == b"%d" % total


@given(steps("add", "add", "add", "delete", "hear", "hear", "hear all"), SITES, ORDERS)
def test_counters_with_deletes_end_equal_and_above_the_last_delete(
    history: list[Step], sites: int, order: int
) -> None:
    replicas, written = run(history, sites, COUNTER_WRITES)
    exchange(replicas, order)
    assert len(contents(replicas)) == 1
    if replicas[0].stored is None:
        return
    state = decode_state(replicas[0].stored)
    assert isinstance(state, CounterState)
    deletes = [stamp for action, _, stamp in written if action == "delete"]
    assert state.deleted == max(deletes, default=None)
    # A site that added after the last delete counts, with the stamp of its last addition.
    adds = {stamp.site: stamp for action, _, stamp in written if action == "add"}
    last = {site: stamp for site, stamp in adds.items() if not deletes or stamp > max(deletes)}
    assert {entry.site: entry.stamp for entry in state.entries} == last


@pytest.mark.parametrize("sites", [2, 3, 4])
def test_what_is_added_after_all_have_seen_a_delete_counts_from_zero(sites: int) -> None:
    replicas = [Replica(site + 1) for site in range(sites)]
    for replica in replicas:
        replica.write(add_to_counter(100))
    exchange(replicas, 1)
    replicas[0].write(delete_record("counter"))
    exchange(replicas, 2)
    assert replicas[1].stored is not None
    assert live_value(replicas[1].stored, 0) is None
    for number, replica in enumerate(replicas):
        replica.write(add_to_counter(number))
    exchange(replicas, 3)
    for replica in replicas:
        assert replica.stored is not None
        assert live_value(replica.stored, 0) == b"%d" % sum(range(sites))


def test_a_delete_that_is_older_than_a_field_keeps_the_field() -> None:
    oslo, rome = Replica(1), Replica(2)
    oslo.write(put_fields({"city": "Oslo", "zip": "0150"}))
    rome.hear(oslo.logged[0])
    oslo.write(delete_record("fields"))
    rome.write(update_fields({"city": "Rome"}))
    exchange([oslo, rome], 1)
    for site in (oslo, rome):
        assert site.stored is not None
        assert live_value(site.stored, 0) == b'{"city":"Rome"}'


def take_last_arrival(_current: bytes | None, incoming: bytes, **_own: Stamp | None) -> bytes:
    state = decode_state(incoming)
    return encode_state(state, newest_stamp(state))


def test_checker_sees_sites_that_take_the_last_arrival() -> None:
    """The canary: without the rule, sites that hear of writes in different orders differ."""
    replicas = [Replica(1, take_last_arrival), Replica(2, take_last_arrival)]
    for replica, city in zip(replicas, ("Oslo", "Rome"), strict=True):
        replica.write(put_fields({"city": city}))
    first, second = (replica.logged[0] for replica in replicas)
    replicas[0].hear(second)
    replicas[1].hear(first)
    assert len(contents(replicas)) == 2

"""A server takes only what a namespace holds, whoever sends it, and whatever the client has checked."""

from collections.abc import Callable, Iterator

import pytest
from tests.server.support import connected, qualify, serving

from floodmark.codec.states import (
    DELETE_HERE,
    HERE,
    CounterEntry,
    CounterState,
    Field,
    FieldsState,
    encode_state,
)
from floodmark.codec.values import TOMBSTONE, encode_value
from floodmark.merge.counter import add_to_counter
from floodmark.merge.fields import update_fields
from floodmark.merge.policies import MergePolicy
from floodmark.merge.states import delete_record
from floodmark.model.change import Stamp
from floodmark.model.errors import FloodmarkError, InvalidValue, WrongPolicy
from floodmark.model.partition import ApplyStream, MergeStream, Partition, PutStream
from floodmark.model.ranges import KeyRange, after
from floodmark.site import Site

PLAIN = encode_value(b"value")
UPDATE = update_fields(b'{"a":1}')
ADD = add_to_counter(1)
ORIGIN = Stamp(5, 9)

Send = Callable[[Partition, bytes, bytes], object]

# What a client may send that decides by itself what it sends.
SENDS: dict[str, Send] = {
    "put": lambda partition, key, value: partition.put([key], [value], durable=True),
    "merge": lambda partition, key, value: partition.merge([key], [value], durable=True),
    "compare_and_set": lambda partition, key, value: partition.compare_and_set(
        key, None, value, durable=True
    ),
    "put_unchanged": lambda partition, key, value: partition.put_unchanged([key], [value], 1, durable=True),
}


@pytest.fixture
def site() -> Iterator[Site]:
    with serving() as (_, server), connected(server) as site:
        kinds: dict[str, MergePolicy] = {"users": "last_write", "people": "fields", "visits": "counter"}
        for name, merge in kinds.items():
            site.create_namespace(name, merge=merge)
        yield site


def refusal(call: Callable[[], object]) -> type[FloodmarkError] | None:
    try:
        call()
    except FloodmarkError as error:
        return type(error)
    return None


def send(site: Site, how: str, name: str, value: bytes) -> type[FloodmarkError] | None:
    partition, key = site.host.router.maps.map.partitions[0], qualify(site.namespace(name), b"ada")
    return refusal(lambda: SENDS[how](partition, key, value))


@pytest.mark.parametrize("how", SENDS)
def test_namespace_takes_only_its_own_kind(site: Site, how: str) -> None:
    kinds = {"users": [PLAIN, TOMBSTONE], "people": [UPDATE, delete_record("fields")], "visits": [ADD]}
    for name in kinds:
        for other, values in kinds.items():
            if name != other:
                assert [send(site, how, name, value) for value in values] == [WrongPolicy] * len(values)
    assert [list(site.namespace(name).scan()) for name in kinds] == [[], [], []]


def test_put_is_for_values_and_merge_for_states(site: Site) -> None:
    assert send(site, "put", "people", UPDATE) is WrongPolicy
    assert send(site, "merge", "users", PLAIN) is WrongPolicy
    assert send(site, "merge", "people", UPDATE) is None
    assert send(site, "put_unchanged", "visits", ADD) is WrongPolicy
    for command, name, value in ((MergeStream(True), "users", PLAIN), (PutStream(True), "people", UPDATE)):
        stream = site.host.write_stream(command)
        sent = stream.send({qualify(site.namespace(name), b"ada"): value})
        assert refusal(sent.result) is WrongPolicy
        stream.close()


@pytest.mark.parametrize(
    "state",
    [
        FieldsState(None, (Field("a", b"nonsense", HERE),)),
        FieldsState(None, (Field("a", b"1}", HERE),)),
        FieldsState(None, (Field("a", b"", HERE),)),
        FieldsState(None, (Field("a", b"1", Stamp(7, 1)),)),
        FieldsState(Stamp(7, 1), ()),
        FieldsState(None, ()),
        FieldsState(DELETE_HERE, (Field("a", b"1", Stamp(7, 1)),)),
    ],
)
def test_state_that_nobody_may_write_is_refused(site: Site, state: FieldsState) -> None:
    value = encode_state(state)
    assert send(site, "merge", "people", value) is InvalidValue
    assert send(site, "put_unchanged", "people", value) is InvalidValue
    assert list(site.namespace("people").scan()) == []


def test_counter_entry_of_another_site_is_refused(site: Site) -> None:
    assert (
        send(site, "merge", "visits", encode_state(CounterState(None, (CounterEntry(3, 7, 1),))))
        is InvalidValue
    )
    assert send(site, "merge", "visits", encode_state(CounterState(None, ()))) is InvalidValue


def test_copy_must_have_stamps(site: Site) -> None:
    router, key = site.host.router, qualify(site.namespace("people"), b"ada")
    unstamped = encode_state(FieldsState(None, (Field("a", b"1", HERE),)), ORIGIN)
    assert refusal(lambda: router.apply({key: unstamped}, durable=True)) is InvalidValue
    plain = encode_value(b"{}", origin=ORIGIN)
    assert refusal(lambda: router.apply({key: plain}, durable=True)) is WrongPolicy
    whole = encode_state(FieldsState(None, (Field("a", b"1", ORIGIN),)), ORIGIN)
    assert router.apply({key: whole}, durable=True)
    stream = site.host.write_stream(ApplyStream(True))
    assert refusal(stream.send({key: plain}).result) is WrongPolicy
    assert stream.send({key: whole}).result() == 0
    stream.close()
    assert site.namespace("people").get(b"ada") == b'{"a":1}'


def test_record_that_grew_at_several_sites_is_taken_in_beyond_the_limit(site: Site) -> None:
    key = qualify(site.namespace("people"), b"ada")
    text = b'"%s"' % (b"x" * (600 << 10))
    for name, site_id in (("a", 8), ("b", 9)):
        stamp = Stamp(5, site_id)
        state = encode_state(FieldsState(None, (Field(name, text, stamp),)), stamp)
        assert site.host.router.apply({key: state}, durable=True)
    whole = site.namespace("people").get(b"ada")
    assert whole is not None
    assert len(whole) > 1 << 20
    batches = site.host.router.scan_records(KeyRange(key, after(key)), site.now())
    (record,) = [value.as_py() for batch in batches for value in batch["value"]]
    with serving() as (other, server), connected(server) as copy:
        other.create_namespace("users")
        other.create_namespace("people", merge="fields")
        assert copy.host.router.apply({key: record}, durable=True)
        assert copy.namespace("people").get(b"ada") == whole

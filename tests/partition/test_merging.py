"""Commits of states: what is stored is the join of what was logged, at every site that hears of it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.site.support import START_MS, HookedEngine, node_of

from floodmark.codec.ordered import encode_namespace, encode_prefix, encode_version
from floodmark.codec.states import FieldsState, State, decode_state, encode_state
from floodmark.codec.values import TOMBSTONE, decode_value, encode_value
from floodmark.engine import MemoryEngine
from floodmark.merge.counter import add_to_counter
from floodmark.merge.fields import put_fields, update_fields
from floodmark.merge.states import merge_states, stamp_state
from floodmark.model.change import Stamp
from floodmark.model.errors import ClockSkew, Corruption, InvalidArgument, InvalidValue, WrongPolicy
from floodmark.model.stream import ChangeBatch, ChangesRequest, Way
from floodmark.model.version import Version, compose
from floodmark.partition import FAMILIES
from floodmark.partition.commit.merging import contains
from floodmark.partition.families import DATA
from floodmark.site import Namespace, Site, open_engine
from floodmark.testing.clock import SimulatedTime

HERE = 7
ELSEWHERE = 9
KEYS = [b"a", b"b"]


@contextmanager
def open_site(site_id: int, time: SimulatedTime) -> Iterator[Site]:
    with open_engine(MemoryEngine(FAMILIES), site="oslo", site_id=site_id, time_source=time) as site:
        site.create_namespace("people", merge="fields")
        site.create_namespace("visits", merge="counter")
        site.create_namespace("users")
        yield site


@pytest.fixture
def people(site: Site) -> Namespace:
    return site.create_namespace("people", merge="fields")


def qualify(namespace: Namespace, key: bytes) -> bytes:
    return encode_namespace(namespace.id) + key


def read(site: Site, *, partial: bool, since: Version = 0) -> list[ChangeBatch]:
    return list(site.host.changes(ChangesRequest(since=since, partial=partial)))


def rows(site: Site, *, partial: bool, since: Version = 0) -> list[tuple[Version, bytes, bytes]]:
    return [
        row
        for batch in read(site, partial=partial, since=since)
        for row in zip(batch.versions, batch.keys, batch.values, strict=True)
    ]


def stored(site: Site, key: bytes, version: Version) -> bytes:
    found = node_of(site).engine.get(DATA, encode_prefix(key) + encode_version(version))
    assert found is not None
    return found


def states(site: Site) -> dict[bytes, State | bytes]:
    """What a site holds under each key, dead or alive, without its own versions."""
    found: dict[bytes, State | bytes] = {}
    for _, key, value in rows(site, partial=False):
        record = decode_value(value)
        plain = encode_value(record.value, record.expires_at, record.deleted)
        found[key] = plain if record.stamps is None else decode_state(value)
    return found


def copies(site: Site, site_id: int) -> list[tuple[bytes, bytes]]:
    """What was first written at a site, as it travels to others."""
    return [
        (key, with_origin(value, Stamp(version, site_id)))
        for version, key, value in rows(site, partial=True)
        if decode_value(value).origin is None
    ]


def with_origin(value: bytes, origin: Stamp) -> bytes:
    record = decode_value(value)
    return encode_value(record.value, record.expires_at, record.deleted, origin=origin, stamps=record.stamps)


def apply(site: Site, key: bytes, value: bytes) -> Version:
    return site.host.router.apply({key: value}, durable=True)


# Histories

names = st.sampled_from(["x", "y", "z"])
fields = st.dictionaries(names, st.none() | st.integers(0, 9), min_size=1)
writes: st.SearchStrategy[Callable[[Site, bytes], object]] = st.one_of(
    fields.map(lambda given: lambda site, key: site.namespace("people").update(key, given)),
    fields.map(lambda given: lambda site, key: site.namespace("people").put(key, given)),
    names.map(lambda name: lambda site, key: site.namespace("people").delete_field(key, name)),
    st.integers(-3, 9).map(lambda number: lambda site, key: site.namespace("visits").add(key, number)),
    st.sampled_from(["people", "visits", "users"]).map(
        lambda name: lambda site, key: site.namespace(name).delete(key)
    ),
    st.integers(0, 9).map(lambda number: lambda site, key: site.namespace("users").put(key, b"%d" % number)),
)
histories = st.lists(st.tuples(st.booleans(), st.sampled_from(KEYS), writes, st.integers(0, 2)), max_size=20)


@given(history=histories, random=st.randoms(use_true_random=False))
def test_sites_that_hear_of_all_writes_hold_the_same(
    history: list[tuple[bool, bytes, Callable[[Site, bytes], object], int]], random: Random
) -> None:
    """In whatever order, however often, and with writes in between."""
    time = SimulatedTime(START_MS)
    with open_site(HERE, time) as here, open_site(ELSEWHERE, time) as elsewhere:
        for is_here, key, write, exchanged in history:
            write(here if is_here else elsewhere, key)
            for source, source_id, target in ((here, HERE, elsewhere), (elsewhere, ELSEWHERE, here)):
                known = copies(source, source_id)
                for copy in random.choices(known, k=exchanged) if known else []:
                    apply(target, *copy)
            time.advance(random.choice([0, 1]))
        exchange(here, HERE, elsewhere, random)
        exchange(elsewhere, ELSEWHERE, here, random)
        assert states(here) == states(elsewhere)
        for name in ("people", "visits", "users"):
            assert list(here.namespace(name).scan()) == list(elsewhere.namespace(name).scan())
        check_logged(here)
        check_logged(elsewhere)


def exchange(source: Site, source_id: int, target: Site, random: Random) -> None:
    known = copies(source, source_id)
    random.shuffle(known)
    for copy in known:
        apply(target, *copy)
        assert apply(target, *copy) == 0


def check_logged(site: Site) -> None:
    """Each record is the join of what the change log says was written to it, and its stamp is the newest."""
    joined: dict[bytes, bytes] = {}
    for version, key, value in rows(site, partial=True):
        whole = stored(site, key, version)
        if decode_value(value).stamps is None:
            assert whole == value
            continue
        own = Stamp(version, site.id)
        joined[key] = merge_states(joined.get(key), value, own=own)
        assert whole == joined[key]
        assert contains(whole, value)


@given(history=histories)
def test_change_has_the_value_that_a_reader_at_its_version_finds(
    history: list[tuple[bool, bytes, Callable[[Site, bytes], object], int]],
) -> None:
    with open_site(HERE, SimulatedTime(START_MS)) as site:
        for _, key, write, _ in history:
            write(site, key)
        for change in site.changes():
            assert site.namespace(change.namespace).stored.get(change.key, at=change.version) == change.value


# Ways to read


def test_scan_gives_whole_states_where_the_log_is_trimmed(site: Site, people: Namespace) -> None:
    people.put(b"ada", {"name": "Ada"})
    since = people.update(b"ada", {"born": 1815})
    people.update(b"ada", {"city": "London"})
    node_of(site).trim_logs(site.now())
    expected = b'{"born":1815,"city":"London","name":"Ada"}'
    for partial in (False, True):
        batches = [batch for batch in read(site, partial=partial, since=since) if batch.keys]
        assert {batch.way for batch in batches} == {Way.SCAN}
        assert [decode_value(value).value for batch in batches for value in batch.values] == [expected]
    assert [change.value for change in site.changes("people", since=since)] == [expected]


def test_large_writes_are_in_the_log_as_they_were_written(site: Site, people: Namespace) -> None:
    people.put(b"ada", {"text": "x" * 100_000})
    version = people.update(b"ada", {"more": "y" * 10_000})
    (_, _, value) = rows(site, partial=True)[-1]
    state = decode_state(value)
    assert isinstance(state, FieldsState)
    assert [field.name for field in state.fields] == ["more"]
    assert stored(site, qualify(people, b"ada"), version) != value


# Applying


def test_states_and_plain_records_are_applied_in_one_commit(site: Site, people: Namespace) -> None:
    users = site.create_namespace("users")
    users.put_many({b"new": b"old", b"old": b"new"})
    people.put(b"ada", {"name": "Ada"})
    late, early = compose(START_MS + 5, 0), compose(START_MS - 5, 0)
    state = stamp_state(update_fields(b'{"city":"Rome"}'), None, late, ELSEWHERE)
    batch = {
        qualify(people, b"ada"): with_origin(state, Stamp(late, ELSEWHERE)),
        qualify(users, b"new"): encode_value(b"newer", origin=Stamp(late, ELSEWHERE)),
        qualify(users, b"old"): encode_value(b"older", origin=Stamp(early, ELSEWHERE)),
    }
    version = site.host.router.apply(batch, durable=True)
    found = [(row[0], row[1]) for row in rows(site, partial=True)[-2:]]
    assert sorted(found) == sorted((version, key) for key in list(batch)[:2])
    assert people.get(b"ada") == b'{"city":"Rome","name":"Ada"}'
    assert dict(users.scan()) == {b"new": b"newer", b"old": b"new"}
    assert site.host.router.apply(batch, durable=True) == 0


def test_copies_have_the_digests_of_what_was_written() -> None:
    time = SimulatedTime(START_MS)
    with open_site(HERE, time) as here, open_site(ELSEWHERE, time) as elsewhere:
        here.heartbeat()
        elsewhere.heartbeat()
        here.namespace("people").put(b"ada", {"name": "Ada", "text": "x" * 10_000})
        here.namespace("people").update(b"ada", {"name": None}, ttl=60)
        here.namespace("people").delete(b"ada")
        here.namespace("visits").add(b"home", 2)
        here.namespace("visits").add(b"home", 3)
        elsewhere.namespace("visits").add(b"home", 1)
        own = elsewhere.heartbeat().sums
        for copy in copies(here, HERE):
            assert apply(elsewhere, *copy)
        written, copied = here.heartbeat().sums, elsewhere.heartbeat().sums
        assert {each: sums.own for each, sums in written.items()} == {
            each: sums.all for each, sums in copied.items()
        }
        assert {sums.own.changes for sums in copied.values()} == {0}
        assert len(own) == 1


def test_every_stamp_of_a_state_moves_the_clock(site: Site, people: Namespace) -> None:
    """A state whose origin is not the newest of its stamps must not hide what is written here later."""
    late, early = compose(START_MS + 50, 0), compose(START_MS - 50, 0)
    state = stamp_state(update_fields(b'{"city":"Rome"}'), None, late, ELSEWHERE)
    apply(site, qualify(people, b"ada"), with_origin(state, Stamp(early, ELSEWHERE)))
    assert people.update(b"ada", {"city": "Oslo"}) > late
    assert people.get(b"ada") == b'{"city":"Oslo"}'


def test_state_from_the_far_future_is_refused(site: Site, people: Namespace) -> None:
    future = compose(START_MS + 86_400_000, 0)
    state = stamp_state(update_fields(b'{"city":"Rome"}'), None, future, ELSEWHERE)
    with pytest.raises(ClockSkew):
        apply(site, qualify(people, b"ada"), with_origin(state, Stamp(1, ELSEWHERE)))
    assert list(people.scan()) == []


# Refusals


def test_merge_takes_unstamped_states_of_distinct_keys(site: Site, people: Namespace) -> None:
    partition, key = node_of(site).map.partitions[0], qualify(people, b"ada")
    with pytest.raises(WrongPolicy):
        partition.merge([key], [b"value\x00"], durable=True)
    with pytest.raises(InvalidArgument):
        partition.merge([key, key], [put_fields(b"{}")] * 2, durable=True)
    with pytest.raises(InvalidValue):
        partition.merge([key], [stamp_state(put_fields(b'{"a":1}'), None, 5, HERE)], durable=True)
    with pytest.raises(InvalidValue):
        apply(site, key, with_origin(put_fields(b'{"a":1}'), Stamp(5, ELSEWHERE)))
    assert list(site.changes()) == []


def test_other_kind_of_record_is_left_as_it_is(site: Site, people: Namespace) -> None:
    people.put(b"ada", {"name": "Ada"})
    users = site.create_namespace("users")
    users.put(b"ada", b"plain")
    router = site.host.router
    for namespace, state in (
        (people, add_to_counter(1)),
        (users, put_fields(b"{}")),
        (users, add_to_counter(1)),
    ):
        key = qualify(namespace, b"ada")
        with pytest.raises(WrongPolicy):
            router.merge({key: state}, durable=True)
        with pytest.raises(WrongPolicy):
            router.put_unchanged({key: state}, site.now(), durable=True)
    assert (people.get(b"ada"), users.get(b"ada")) == (b'{"name":"Ada"}', b"plain")


def test_damaged_state_names_its_key(site: Site, engine: HookedEngine, people: Namespace) -> None:
    version = people.put(b"ada", {"name": "Ada"})
    engine_key = encode_prefix(qualify(people, b"ada")) + encode_version(version)
    good = stored(site, qualify(people, b"ada"), version)
    engine.write([(DATA, engine_key, good.replace(b'"Ada"', b'"Ad"'))])
    calls: Mapping[str, Callable[[], object]] = {
        "update": lambda: people.update(b"ada", {"a": 1}),
        "compare_and_set": lambda: people.compare_and_set(b"ada", b"?", {"a": 1}),
        "put": lambda: people.put(b"ada", {"a": 1}),
    }
    for name in ("update", "put"):
        with pytest.raises(Corruption) as caught:
            calls[name]()
        assert caught.value.details["key"] == b"ada"
    assert not calls["compare_and_set"]()


def test_contains_tells_what_a_record_has_taken_in() -> None:
    first = stamp_state(update_fields(b'{"a":1}'), None, 5, HERE)
    second = stamp_state(update_fields(b'{"b":1}'), None, 6, HERE)
    both = merge_states(first, second)
    assert contains(both, first)
    assert contains(both, second)
    assert contains(encode_state(decode_state(both), Stamp(6, HERE)), second)
    assert not contains(first, second)
    assert not contains(both, stamp_state(add_to_counter(1), None, 6, HERE))
    assert not contains(both, TOMBSTONE)
    assert contains(TOMBSTONE, TOMBSTONE)
    assert not contains(TOMBSTONE, first)


# Streams from outside


@given(
    stream=st.lists(st.tuples(st.sampled_from(KEYS), fields), max_size=6),
    others=st.lists(st.tuples(st.integers(0, 6), st.sampled_from(KEYS), fields), max_size=4),
    replayed=st.integers(0, 6),
)
def test_stream_that_is_repeated_never_undoes_what_came_later(
    stream: list[tuple[bytes, dict[str, int | None]]],
    others: list[tuple[int, bytes, dict[str, int | None]]],
    replayed: int,
) -> None:
    """Each field is what was last written to it, where the stream's rows count once."""
    with open_site(HERE, SimulatedTime(START_MS)) as site:
        people = site.namespace("people")
        since = site.now()
        expected: dict[tuple[bytes, str], int | None] = {}
        changed: set[tuple[bytes, str]] = set()

        def send(key: bytes, row: Mapping[str, int | None]) -> None:
            rows = {qualify(people, key): update_fields(dict(row))}
            site.host.router.put_unchanged(rows, since, durable=True)
            for name, value in row.items():
                if (key, name) not in changed:
                    expected[key, name] = value
                    changed.add((key, name))

        for index, (key, row) in enumerate(stream):
            for _, other_key, written in (other for other in others if other[0] == index):
                people.update(other_key, written)
                for name, value in written.items():
                    expected[other_key, name] = value
                    changed.add((other_key, name))
            send(key, row)
        before = states(site)
        for key, row in stream[:replayed]:
            send(key, row)
        assert states(site) == before
        found = {
            (key, field.name): None if field.text is None else int(field.text)
            for key in KEYS
            if isinstance(state := before.get(qualify(people, key)), FieldsState)
            for field in state.fields
        }
        assert found == expected

"""The site's contract: namespaces whose records are merged, by fields or as counters."""

import json
from datetime import timedelta
from typing import Any, Final

import pytest
from tests.contracts.site.base import HOUR, START_MS, SiteContractBase, age
from tests.contracts.site.subscriptions import BY_HAND
from tests.waiting import run_threads

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.states import FieldsState, State, decode_state, encode_state
from floodmark.merge.fields import update_fields
from floodmark.merge.states import stamp_state
from floodmark.model.change import ChangeType, Stamp
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangesRequest
from floodmark.model.version import Version, compose
from floodmark.site import CounterNamespace, Namespace, Site
from floodmark.testing.clock import SimulatedTime

ELSEWHERE: Final = 9


def keys_of(namespace: Namespace) -> KeyRange:
    """The qualified keys of a namespace."""
    number = namespace.id
    return KeyRange(encode_namespace(number), encode_namespace(number + 1))


def qualify(namespace: Namespace[Any], key: bytes) -> bytes:
    """A key with its namespace."""
    return encode_namespace(namespace.id) + key


def elsewhere(state: bytes, milliseconds: int) -> bytes:
    """What another site wrote some time after the start, with its origin."""
    version = compose(START_MS + milliseconds, 0)
    return encode_state(decode_state(stamp_state(state, None, version, ELSEWHERE)), Stamp(version, ELSEWHERE))


def apply(site: Site, namespace: Namespace[Any], key: bytes, state: bytes) -> Version:
    """Take in what another site wrote."""
    return site.host.router.apply({qualify(namespace, key): state}, durable=True)


def logged(site: Site, namespace: Namespace[Any]) -> list[dict[str, object]]:
    """The values of a namespace's changes as they are told to other sites."""
    request = ChangesRequest(keys=keys_of(namespace), namespace=namespace.id, partial=True)
    values = [value for batch in site.host.changes(request) for value in batch.values]
    return [_show(decode_state(value)) for value in values]


def _show(state: State) -> dict[str, object]:
    if isinstance(state, FieldsState):
        return {field.name: None if field.text is None else json.loads(field.text) for field in state.fields}
    return {str(entry.site): entry.total for entry in state.entries}


class MergedBase(SiteContractBase):
    """Two namespaces whose records are merged."""

    @pytest.fixture
    def people(self, site: Site) -> Namespace:
        """A namespace of fields."""
        return site.create_namespace("people", merge="fields", retention=HOUR)

    @pytest.fixture
    def visits(self, site: Site) -> CounterNamespace:
        """A namespace of counters."""
        return site.create_namespace("visits", merge="counter", retention=HOUR)


class MergingContract(MergedBase):
    """What was written to a record is merged into it, and no more than that is told to others."""

    # Fields

    def test_update_writes_the_fields_that_it_names(self, people: Namespace) -> None:
        people.put(b"ada", {"name": "Ada", "born": 1815})
        version = people.update(b"ada", b'{"city":  "London", "tags":[1, 2]}')
        people.update(b"ada", {"born": None, "name": "Ada King"})
        assert people.get(b"ada") == b'{"city":"London","name":"Ada King","tags":[1, 2]}'
        assert people.get(b"ada", at=version) == b'{"born":1815,"city":"London","name":"Ada","tags":[1, 2]}'
        assert people.get_many([b"bob", b"ada"]) == [None, people.get(b"ada")]
        record = people.record(b"ada")
        assert record is not None
        assert (record.value, record.stamp) == (people.get(b"ada"), Stamp(record.version, 7))

    def test_update_of_what_is_not_there_makes_it(self, people: Namespace) -> None:
        people.update(b"ada", {"name": "Ada"})
        assert people.get(b"ada") == b'{"name":"Ada"}'

    def test_put_replaces_the_record_with_all_its_fields(self, people: Namespace) -> None:
        people.put(b"ada", {"name": "Ada", "born": 1815})
        people.put(b"ada", {"title": "countess", "city": None})
        assert people.get(b"ada") == b'{"title":"countess"}'

    def test_record_without_fields_is_not_there(self, people: Namespace) -> None:
        people.put(b"ada", {"name": "Ada", "born": 1815})
        people.put(b"bob", {"name": "Bob"})
        people.delete_field(b"ada", "name", "born", "never there")
        people.put(b"bob", {})
        assert list(people.scan()) == []
        assert people.get(b"ada") is None
        people.update(b"ada", {"name": "Ada"})
        assert people.get(b"ada") == b'{"name":"Ada"}'

    def test_delete_takes_all_fields(self, people: Namespace) -> None:
        version = people.put(b"ada", {"name": "Ada"})
        people.update(b"ada", {"born": 1815})
        people.delete(b"ada")
        assert people.get(b"ada") is None
        assert people.get(b"ada", at=version) == b'{"name":"Ada"}'
        people.update(b"ada", {"city": "London"})
        assert people.get(b"ada") == b'{"city":"London"}'

    def test_many_records_are_put_in_one_commit(self, site: Site, people: Namespace) -> None:
        people.update(b"key-1", {"old": 1})
        rows = [(b"key-%d" % index, {"number": index}) for index in range(100)]
        version = people.put_many([(b"key-7", {"gone": 1}), *rows])
        assert dict(people.scan()) == {
            key: json.dumps(value).replace(" ", "").encode() for key, value in rows
        }
        changes = list(site.changes("people"))[1:]
        assert {change.version for change in changes} == {version}
        assert [change.key for change in changes] == sorted(key for key, _ in rows)

    def test_delete_range_deletes_fields(self, people: Namespace) -> None:
        people.put_many({b"key-%03d" % index: {"number": index} for index in range(100)})
        assert people.delete_range(b"key-010", b"key-090") == 80
        assert len(list(people.scan())) == 20
        people.update(b"key-010", {"other": 1})
        assert people.get(b"key-010") == b'{"other":1}'

    def test_compare_and_set_looks_at_the_whole_record(self, people: Namespace) -> None:
        assert people.compare_and_set(b"ada", None, {"name": "Ada"})
        people.update(b"ada", {"born": 1815})
        assert not people.compare_and_set(b"ada", b'{"name":"Ada"}', {"name": "Bob"})
        assert people.compare_and_set(b"ada", b'{"born":1815,"name":"Ada"}', b'{"name": "Ada King"}')
        assert people.get(b"ada") == b'{"name":"Ada King"}'
        assert people.compare_and_set(b"ada", b'{"name":"Ada King"}', None)
        assert people.get(b"ada") is None

    def test_fields_expire_one_by_one(self, time: SimulatedTime, people: Namespace) -> None:
        people.put(b"ada", {"name": "Ada"})
        people.update(b"ada", {"session": "x"}, ttl=timedelta(minutes=1))
        people.put(b"bob", {"name": "Bob"}, ttl=timedelta(minutes=2))
        people.update(b"bob", {"session": "y"}, ttl=timedelta(minutes=1))
        both = [(b"ada", b'{"name":"Ada","session":"x"}'), (b"bob", b'{"name":"Bob","session":"y"}')]
        assert list(people.scan()) == both
        version = people.put(b"zoe", {})
        time.advance(61_000)
        later = [(b"ada", b'{"name":"Ada"}'), (b"bob", b'{"name":"Bob"}')]
        assert list(people.scan()) == later
        assert list(people.scan(reverse=True)) == later[::-1]
        assert people.get_many([b"ada", b"bob"]) == [value for _, value in later]
        assert list(people.scan(at=version)) == both
        assert people.compare_and_set(b"ada", b'{"name":"Ada"}', {"name": "Ada King"})
        time.advance(61_000)
        assert list(people.scan()) == [(b"ada", b'{"name":"Ada King"}')]

    def test_time_to_live_of_the_namespace_holds_for_fields(self, site: Site, time: SimulatedTime) -> None:
        brief = site.create_namespace("brief", merge="fields", ttl=timedelta(minutes=1))
        brief.put(b"ada", {"name": "Ada"})
        time.advance(30_000)
        brief.update(b"ada", {"city": "London"})
        time.advance(31_000)
        assert brief.get(b"ada") == b'{"city":"London"}'
        time.advance(30_000)
        assert brief.get(b"ada") is None

    # Counters

    def test_counter_adds_up(self, site: Site, people: Namespace, visits: CounterNamespace) -> None:
        version = visits.add(b"home")
        visits.add(b"home", 41)
        visits.add(b"away", -3)
        assert list(visits.scan()) == [(b"away", -3), (b"home", 42)]
        assert visits.get_many([b"home", b"none"]) == [42, None]
        assert (visits[b"home"], visits.as_of(version)[b"home"], b"none" in visits) == (42, 1, False)
        assert dict(visits.as_of(version).scan()) == {b"home": 1}
        assert visits.first(b"b", b"z") == (b"home", 42)
        assert dict(site.namespace("visits").scan()) == dict(visits.scan())
        assert visits.get(b"home", at=version) == 1
        visits.add(b"home", -42)
        assert visits.get(b"home") == 0
        assert b"home" in visits, "zero is a value"

    def test_deleted_counter_begins_at_nothing(self, visits: CounterNamespace) -> None:
        visits.add(b"home", 5)
        visits.delete(b"home")
        assert visits.get(b"home") is None
        visits.add(b"home", 2)
        assert visits.get(b"home") == 2
        assert visits.delete_range() == 1
        assert visits.add(b"home") > 0
        assert visits.get(b"home") == 1

    def test_nothing_that_several_add_at_once_is_lost(self, visits: CounterNamespace) -> None:
        def count() -> None:
            for _ in range(50):
                visits.add(b"home", durability="async")

        run_threads(*[count] * 4)
        assert visits.get(b"home") == 200

    # Streams of writes

    def test_writer_merges_what_is_written_to_one_key(self, site: Site, people: Namespace) -> None:
        people.put(b"ada", {"name": "Ada"})
        with people.writer() as writer:
            writer.update(b"ada", {"born": 1815, "city": "Paris"})
            writer.update(b"ada", {"city": "London"})
            writer.delete_field(b"ada", "born")
            writer.put(b"bob", {"name": "Bob", "city": "Rome"})
            writer.update(b"bob", {"city": None, "born": 1820})
            writer.put(b"eve", {"name": "Eve"})
            writer.delete(b"eve")
            writer.update(b"eve", {"born": 1830}, ttl=60)
        assert writer.acknowledged == 8
        assert dict(people.scan()) == {
            b"ada": b'{"city":"London","name":"Ada"}',
            b"bob": b'{"born":1820,"name":"Bob"}',
            b"eve": b'{"born":1830}',
        }
        assert len(list(site.changes("people"))) == 4

    def test_writer_counts_everything(self, visits: CounterNamespace) -> None:
        visits.add(b"page-3", 1_000)
        with visits.writer(batch_records=100) as writer:
            for number in range(2_000):
                writer.add(b"page-%d" % (number % 7), number)
            writer.delete(b"page-5")
            writer.add(b"page-5", 3)
            writer.add(b"page-5")
        expected = {b"page-%d" % page: sum(range(page, 2_000, 7)) for page in range(7)}
        expected |= {b"page-3": expected[b"page-3"] + 1_000, b"page-5": 4}
        assert dict(visits.scan()) == expected

    # Changes

    def test_changes_show_whole_records(
        self, site: Site, people: Namespace, visits: CounterNamespace
    ) -> None:
        people.put(b"ada", {"name": "Ada"})
        people.put_many({b"bob": {"name": "Bob"}, b"eve": {"name": "Eve"}})
        people.update(b"ada", {"city": "London"})
        visits.add(b"home", 2)
        people.delete(b"bob")
        visits.add(b"home", 3)
        found = [(change.key, change.value) for change in site.changes()]
        assert found == [
            (b"ada", b'{"name":"Ada"}'),
            (b"bob", b'{"name":"Bob"}'),
            (b"eve", b'{"name":"Eve"}'),
            (b"ada", b'{"city":"London","name":"Ada"}'),
            (b"home", b"2"),
            (b"bob", None),
            (b"home", b"5"),
        ]
        for change in site.changes():
            namespace = site.namespace(change.namespace).stored
            assert namespace.get(change.key, at=change.version) == change.value

    def test_changes_show_what_was_there_before(self, site: Site, people: Namespace) -> None:
        people.put(b"ada", {"name": "Ada"})
        people.update(b"ada", {"city": "London"})
        people.delete(b"ada")
        images = [(change.type, change.value) for change in site.changes("people", before_images=True)]
        assert images == [
            (ChangeType.INSERT, b'{"name":"Ada"}'),
            (ChangeType.UPDATE_PREIMAGE, b'{"name":"Ada"}'),
            (ChangeType.UPDATE_POSTIMAGE, b'{"city":"London","name":"Ada"}'),
            (ChangeType.DELETE, b'{"city":"London","name":"Ada"}'),
        ]

    def test_follower_sees_whole_records(self, site: Site, people: Namespace) -> None:
        people.put(b"ada", {"name": "Ada"})
        changes = site.changes("people", follow=True)
        assert next(changes).value == b'{"name":"Ada"}'
        for number in range(3):
            people.update(b"ada", {"number": number})
            people.put_many({b"bob": {"number": number}, b"eve": {"number": number}})
            found = [next(changes).value for _ in range(3)]
            assert found == [b'{"name":"Ada","number":%d}' % number] + [b'{"number":%d}' % number] * 2

    def test_field_that_has_expired_is_gone_from_changes(
        self, site: Site, time: SimulatedTime, people: Namespace
    ) -> None:
        people.put(b"ada", {"name": "Ada"})
        people.update(b"ada", {"session": "x"}, ttl=60)
        people.put(b"bob", {"session": "y"}, ttl=60)
        time.advance(61_000)
        found = [(change.key, change.type, change.value) for change in site.changes("people")]
        assert found == [
            (b"ada", ChangeType.UPSERT, b'{"name":"Ada"}'),
            (b"ada", ChangeType.UPSERT, b'{"name":"Ada"}'),
            (b"bob", ChangeType.DELETE, None),
        ]

    def test_subscription_gets_whole_records(self, site: Site, people: Namespace) -> None:
        people.put(b"ada", {"name": "Ada"})
        people.update(b"ada", {"city": "London"})
        with site.subscribe("indexer", "people", start="beginning", options=BY_HAND) as subscription:
            found = [delivery.change.value for delivery in subscription]
        assert found == [b'{"name":"Ada"}', b'{"city":"London","name":"Ada"}']

    def test_other_sites_are_told_what_was_written(
        self, site: Site, people: Namespace, visits: CounterNamespace
    ) -> None:
        large = "x" * 10_000
        people.put(b"ada", {"name": "Ada"})
        people.update(b"ada", {"city": "London", "name": None, "text": large})
        people.delete(b"ada")
        visits.add(b"home", 2)
        visits.add(b"home", 3)
        assert logged(site, people) == [{"name": "Ada"}, {"city": "London", "name": None, "text": large}, {}]
        assert logged(site, visits) == [{"7": 2}, {"7": 5}]

    # Garbage

    def test_garbage_collection_removes_what_has_no_field_left(
        self, site: Site, time: SimulatedTime, people: Namespace, visits: CounterNamespace
    ) -> None:
        people.put(b"ada", {"name": "Ada", "born": 1815})
        people.delete_field(b"ada", "name")
        people.put(b"bob", {"name": "Bob"})
        people.delete_field(b"bob", "name")
        people.put(b"eve", {"name": "Eve"}, ttl=60)
        visits.add(b"home", 2)
        visits.add(b"away", 2)
        visits.delete(b"away")
        age(site, time)
        assert list(people.scan()) == [(b"ada", b'{"born":1815}')]
        assert list(visits.scan()) == [(b"home", 2)]
        assert site.statistics().garbage.keys_removed == 3
        visits.add(b"away")
        visits.add(b"home")
        assert list(visits.scan()) == [(b"away", 1), (b"home", 3)]

    def test_examination_finds_nothing_wrong(
        self, site: Site, people: Namespace, visits: CounterNamespace
    ) -> None:
        people.put(b"ada", {"name": "Ada"})
        people.update(b"ada", {"city": "London", "name": None})
        apply(site, people, b"ada", elsewhere(update_fields(b'{"zip":1}'), -5))
        visits.add(b"home", 2)
        visits.delete(b"home")
        problems = [
            finding.message
            for finding in site.host.verification.examine(False)
            if finding.check in ("records", "change log") and finding.severity != "ok"
        ]
        assert problems == []

"""The site's contract: what comes to merged records from elsewhere, and what they refuse."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from tests.contracts.site.base import START_MS, refused
from tests.contracts.site.merging import ELSEWHERE, MergedBase, apply, elsewhere, qualify

from floodmark.merge.counter import add_to_counter
from floodmark.merge.fields import update_fields
from floodmark.merge.states import delete_record
from floodmark.model.change import Stamp
from floodmark.model.errors import (
    CommitTooLarge,
    FloodmarkError,
    InvalidKey,
    InvalidName,
    InvalidValue,
    LimitExceeded,
    WrongPolicy,
)
from floodmark.model.limits import FIELDS_MAX, VALUE_BYTES_MAX
from floodmark.model.version import Version, compose
from floodmark.site import CounterNamespace, Namespace, Site


def put_unchanged(site: Site, namespace: Namespace[Any], key: bytes, state: bytes, since: Version) -> int:
    """Write to a key what was not changed since a version."""
    return site.host.router.put_unchanged({qualify(namespace, key): state}, since, durable=True)


def update_all(namespace: Namespace, keys: list[bytes], *, batch_records: int) -> None:
    """Write a small field to each of some records."""
    with namespace.writer(batch_records=batch_records) as writer:
        for key in keys:
            writer.update(key, {"small": 1})


class MergedCopiesContract(MergedBase):
    """Sites that hear of the same writes hold the same, and nobody writes what a namespace does not hold."""

    # Copies from other sites

    def test_fields_of_two_sites_are_merged(self, site: Site, people: Namespace) -> None:
        people.put(b"ada", {"name": "Ada", "city": "London"})
        late = elsewhere(update_fields(b'{"city":"Paris","born":1815}'), 5)
        early = elsewhere(update_fields(b'{"title":"countess"}'), -5)
        version = apply(site, people, b"ada", late)
        assert people.get(b"ada") == b'{"born":1815,"city":"Paris","name":"Ada"}'
        # What was written before the put is gone with it, and what is known is not stored again.
        assert apply(site, people, b"ada", early) == 0
        assert apply(site, people, b"ada", late) == 0
        record = people.record(b"ada")
        assert record is not None
        assert record.version == version
        assert record.stamp == Stamp(compose(START_MS + 5, 0), ELSEWHERE)
        people.update(b"ada", {"city": "Rome"})
        assert people.get(b"ada") == b'{"born":1815,"city":"Rome","name":"Ada"}'

    def test_a_record_that_copies_have_made_larger_than_a_value_is_compared(
        self, site: Site, people: Namespace
    ) -> None:
        large = "x" * (VALUE_BYTES_MAX * 2 // 3)
        people.update(b"ada", {"here": large})
        apply(site, people, b"ada", elsewhere(update_fields({"there": large}), 5))
        found = people.get(b"ada")
        assert found is not None
        assert len(found) > VALUE_BYTES_MAX
        assert not people.compare_and_set(b"ada", found + b" ", {"small": 1})
        assert people.compare_and_set(b"ada", found, {"small": 1})
        assert people.get(b"ada") == b'{"small":1}'

    def test_counters_of_two_sites_add_up(self, site: Site, visits: CounterNamespace) -> None:
        visits.add(b"home", 2)
        there = elsewhere(add_to_counter(40), -5)
        assert apply(site, visits, b"home", there) > 0
        assert apply(site, visits, b"home", there) == 0
        assert visits.get(b"home") == 42
        visits.add(b"home", 1)
        assert visits.get(b"home") == 43
        apply(site, visits, b"home", elsewhere(delete_record("counter"), 5))
        assert visits.get(b"home") is None
        visits.add(b"home", 1)
        assert visits.get(b"home") == 1

    def test_heartbeat_counts_what_is_told_to_others(self, site: Site, people: Namespace) -> None:
        site.heartbeat()
        people.put(b"ada", {"name": "Ada"})
        people.update(b"ada", {"city": "London"})
        apply(site, people, b"ada", elsewhere(update_fields(b'{"zip":1}'), 5))
        sums = site.heartbeat().sums[people.id]
        assert (sums.own.changes, sums.all.changes) == (2, 3)

    # Streams from outside

    def test_fields_that_were_changed_since_are_left_alone(self, site: Site, people: Namespace) -> None:
        people.put(b"ada", {"name": "Ada", "city": "London", "born": 1815})
        since = site.now()
        row = update_fields(b'{"name":"Ada King","city":"Paris"}')
        people.update(b"ada", {"city": "Rome"})
        assert put_unchanged(site, people, b"ada", row, since) == 1
        assert people.get(b"ada") == b'{"born":1815,"city":"Rome","name":"Ada King"}'
        people.update(b"ada", {"name": "Ada"})
        assert put_unchanged(site, people, b"ada", row, since) == 0
        assert put_unchanged(site, people, b"ada", delete_record("fields"), since) == 1
        assert people.get(b"ada") == b'{"city":"Rome","name":"Ada"}'
        people.delete(b"ada")
        assert put_unchanged(site, people, b"ada", update_fields(b'{"new":1}'), since) == 0
        assert put_unchanged(site, people, b"ada", row, site.now()) == 1

    def test_stream_from_outside_cannot_add_to_a_counter(self, site: Site, visits: CounterNamespace) -> None:
        refused(
            WrongPolicy,
            lambda: put_unchanged(site, visits, b"home", add_to_counter(1), site.now()),
            key=b"home",
        )
        assert visits.get(b"home") is None

    # Refusals

    def test_policy_refuses_what_it_does_not_hold(
        self, users: Namespace, people: Namespace, visits: CounterNamespace
    ) -> None:
        calls: dict[str, list[tuple[Namespace[Any], Callable[[], object]]]] = {
            "update": [
                (users, lambda: users.update(b"key", {"a": 1})),
                (visits, lambda: visits.update(b"key", {"a": 1})),
                (users, lambda: users.writer().update(b"key", {"a": 1})),
            ],
            "delete_field": [
                (users, lambda: users.delete_field(b"key", "a")),
                (visits, lambda: visits.delete_field(b"key", "a")),
            ],
            "add": [(users, lambda: users.add(b"key")), (people, lambda: people.add(b"key"))],
            "put": [
                (visits, lambda: visits.put(b"key", b"1")),
                (visits, lambda: visits.put(b"key", b"1", ttl=60)),
                (visits, lambda: visits.put_many({b"key": b"1"})),
                (visits, lambda: visits.writer().put(b"key", b"1")),
            ],
            "compare_and_set": [(visits, lambda: visits.compare_and_set(b"key", None, b"1"))],
        }
        for operation, refusals in calls.items():
            for namespace, call in refusals:
                refused(WrongPolicy, call, namespace=namespace.name, operation=operation)
        for untouched in (users, people, visits.stored):
            assert list(untouched.scan()) == []

    @pytest.mark.parametrize("bad", [b"", b"[]", b"1", b"{", b'{"a":}', b'{"a":1}x', b"\xff", "{}", None, 7])
    def test_record_of_fields_is_a_json_object(self, people: Namespace, bad: bytes) -> None:
        refused(InvalidValue, lambda: people.put(b"ada", bad), key=b"ada")
        refused(InvalidValue, lambda: people.update(b"ada", bad), key=b"ada")
        refused(InvalidValue, lambda: people.put_many({b"ada": bad}), key=b"ada")
        assert people.get(b"ada") is None

    def test_bad_arguments_of_merged_records_are_refused(
        self, people: Namespace, visits: CounterNamespace
    ) -> None:
        refused(InvalidKey, lambda: people.update(b"", {"a": 1}))
        refused(InvalidKey, lambda: visits.add(b""))
        refused(InvalidValue, lambda: people.update(b"ada", {}), key=b"ada")
        refused(InvalidValue, lambda: people.delete_field(b"ada"), key=b"ada")
        refused(InvalidValue, lambda: people.delete_field(b"ada", b"a"), key=b"ada")  # type: ignore[arg-type]
        refused(InvalidValue, lambda: people.update(b"ada", {"x" * 1_025: 1}), key=b"ada")
        refused(InvalidValue, lambda: people.update(b"ada", {"a": object()}), key=b"ada")
        for bad in ("1", 1.0, True, None):
            refused(InvalidValue, lambda bad=bad: visits.add(b"home", bad), key=b"home")  # type: ignore[misc]
        refused(LimitExceeded, lambda: visits.add(b"home", 1 << 63), key=b"home")

    def test_limits_hold_for_the_whole_record(self, people: Namespace, visits: CounterNamespace) -> None:
        half = "x" * (VALUE_BYTES_MAX // 2)
        people.put(b"ada", {"a": half})
        size = len(b'{"a":"","b":""}') + 2 * len(half)
        refused(InvalidValue, lambda: people.update(b"ada", {"b": half}), key=b"ada", size=size)
        assert people.get(b"ada") == b'{"a":"%s"}' % half.encode()
        people.put(b"bob", {f"field-{number}": number for number in range(FIELDS_MAX)})
        people.delete_field(b"bob", "field-7")
        refused(LimitExceeded, lambda: people.update(b"bob", {"more": 1}), key=b"bob")
        visits.add(b"home", (1 << 63) - 1)
        with pytest.raises(LimitExceeded):
            visits.add(b"home")
        assert visits.get(b"home") == (1 << 63) - 1

    def test_small_writes_to_large_records_must_fit_into_a_commit(self, people: Namespace) -> None:
        text = "x" * (VALUE_BYTES_MAX - 100)
        keys = [b"key-%02d" % index for index in range(66)]
        with people.writer(batch_records=8) as writer:
            for key in keys:
                writer.put(key, {"text": text})
        with pytest.raises(CommitTooLarge):
            update_all(people, keys, batch_records=1_000)
        update_all(people, keys, batch_records=32)
        assert all(value.startswith(b'{"small":1,') for _, value in people.scan())

    def test_counters_do_not_expire(self, site: Site) -> None:
        refused(
            InvalidName, lambda: site.create_namespace("visits", merge="counter", ttl=timedelta(minutes=1))
        )
        site.create_namespace("visits", merge="counter")
        refused(InvalidName, lambda: site.update_namespace("visits", ttl=timedelta(minutes=1)))

    def test_wrong_kind_of_record_is_refused_by_the_partition(
        self, site: Site, users: Namespace, people: Namespace, visits: CounterNamespace
    ) -> None:
        """Whoever does not ask a namespace first: an older client, or another site with other settings."""
        users.put(b"key", b"value")
        people.put(b"key", {"a": 1})
        visits.add(b"key")
        states = {people: elsewhere(update_fields(b'{"a":2}'), 5), visits: elsewhere(add_to_counter(1), 5)}
        for namespace in (users, people, visits):
            for other, state in states.items():
                if namespace is not other:
                    with pytest.raises(FloodmarkError) as caught:
                        apply(site, namespace, b"key", state)
                    assert type(caught.value) is WrongPolicy
        assert (users.get(b"key"), people.get(b"key"), visits.get(b"key")) == (b"value", b'{"a":1}', 1)

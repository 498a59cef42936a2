"""The site's contract: what those need who compare sites and put right what differs."""

from typing import Any

import pyarrow
import pytest
from tests.contracts.site.base import HOUR_MS, SITE_ID, START_MS, age, refused
from tests.contracts.site.merging import ELSEWHERE, MergedBase, apply, elsewhere

from floodmark.codec.ordered import encode_namespace
from floodmark.codec.states import decode_state, encode_state
from floodmark.codec.thin import thin_record
from floodmark.codec.values import decode_value, encode_value
from floodmark.merge.counter import add_to_counter
from floodmark.merge.fields import update_fields
from floodmark.merge.states import merge_states, newest_stamp
from floodmark.model.change import Stamp
from floodmark.model.errors import (
    InvalidArgument,
    InvalidKey,
    InvalidValue,
    LimitExceeded,
    NamespaceNotFound,
    VersionCollected,
    WrongPolicy,
)
from floodmark.model.limits import KEY_BYTES_MAX, LOG_INLINE_VALUE_BYTES_MAX, RECORDS_FOUND_MAX
from floodmark.model.partition import Content
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.record import FoundRecord, Repair
from floodmark.model.stream import ChangesRequest
from floodmark.model.version import Version, compose
from floodmark.site import Namespace, Site
from floodmark.testing.clock import SimulatedTime

EARLIER = Stamp(compose(START_MS - 60_000, 0), ELSEWHERE)
LATER = Stamp(compose(START_MS, 1 << 17), ELSEWHERE)


def copy(value: bytes | None, origin: Stamp = LATER, expires_at: int | None = None) -> bytes:
    """A stored record that was first written at another site; a tombstone without a value."""
    return encode_value(value or b"", expires_at, value is None, origin=origin)


def find(namespace: Namespace, *keys: bytes, at: Version | None = None) -> list[FoundRecord | None]:
    """What is stored under keys."""
    return namespace.host.verification.find_records(namespace.name, list(keys), at, False)


def find_one(namespace: Namespace, key: bytes) -> FoundRecord:
    """What is stored under a key that has something."""
    (found,) = find(namespace, key)
    assert found is not None
    return found


def repair(namespace: Namespace, *repairs: tuple[bytes, Version, bytes]) -> list[bool]:
    """Put keys right that still have the versions that were seen."""
    return namespace.host.verification.repair_records(namespace.name, [Repair(*each) for each in repairs])


def scan(namespace: Namespace, content: Content) -> pyarrow.Table:
    """All records of a namespace, the dead ones too."""
    host, start = namespace.host, encode_namespace(namespace.id)
    keys = KeyRange(start, prefix_end(start))
    at = host.versions.read_version()
    return pyarrow.Table.from_batches(host.router.scan_records(keys, at, dead=True, content=content))


def write_all_kinds(site: Site, users: Namespace, people: Namespace, visits: Namespace) -> None:
    """Records of every kind, from here and from elsewhere, dead and alive."""
    users.put_many({b"own": b"1", b"gone": b"2", b"empty": b""})
    users.put(b"brief", b"3", ttl=60)
    users.delete(b"gone")
    apply(site, users, b"copied", copy(b"1"))
    apply(site, users, b"copied, brief", copy(b"1", expires_at=START_MS // 1000 + 60))
    apply(site, users, b"deleted there", copy(None))
    people.put(b"ada", {"name": "Ada", "city": "London"})
    people.update(b"ada", {"city": None, "born": 1815}, ttl=60)
    apply(site, people, b"bob", elsewhere(update_fields(b'{"name":"Bob"}'), 5))
    people.put(b"eve", {"name": "Eve"})
    people.delete(b"eve")
    visits.add(b"home", 2)
    apply(site, visits, b"home", elsewhere(add_to_counter(40), -5))


class VerifyingContract(MergedBase):
    """Whoever compares sites sees what is stored, and changes only what he has seen."""

    # Looking

    def test_scan_of_thin_records_shows_all_but_values(
        self, site: Site, users: Namespace, people: Namespace, visits: Namespace
    ) -> None:
        write_all_kinds(site, users, people, visits)
        for namespace in (users, people, visits):
            whole, thin = scan(namespace, Content.WHOLE), scan(namespace, Content.THIN)
            shared = ["key", "version", "partition"]
            assert thin.select(shared).equals(whole.select(shared))
            expected = [thin_record(stored) for stored in whole["value"].to_pylist()]
            assert thin["value"].to_pylist() == [record for record, _ in expected]
            assert [digest % (1 << 64) for digest in thin["digest"].to_pylist()] == [
                digest for _, digest in expected
            ]

    def test_records_are_found_in_the_order_asked_for_dead_or_alive(
        self, site: Site, users: Namespace, people: Namespace, visits: Namespace
    ) -> None:
        write_all_kinds(site, users, people, visits)
        site.split("users", b"d")
        for namespace in (users, people, visits):
            table = scan(namespace, Content.WHOLE)
            keys = table["key"].to_pylist()[::-1]
            rows = zip(table["version"].to_pylist(), table["value"].to_pylist(), strict=True)
            expected = [FoundRecord(version, stored, thin_record(stored)[1]) for version, stored in rows]
            assert find(namespace, b"missing", *keys, keys[0]) == [None, *expected[::-1], expected[-1]]
            host = site.host
            at = host.versions.read_version()
            assert host.verification.find_records(namespace.name, keys, at, True) == [
                FoundRecord(found.version, thin_record(found.stored)[0], found.digest)
                for found in expected[::-1]
            ]

    def test_records_are_found_as_of_a_version(
        self, site: Site, users: Namespace, time: SimulatedTime
    ) -> None:
        first = users.put(b"key", b"1")
        users.put(b"key", b"2")
        deleted = users.delete(b"key")
        assert find(users, b"key", at=first - 1) == [None]
        (found,) = find(users, b"key", at=first)
        assert found is not None
        assert (found.version, decode_value(found.stored).value) == (first, b"1")
        assert find_one(users, b"key").version == deleted
        age(site, time)
        with pytest.raises(VersionCollected):
            find(users, b"key", at=first)

    def test_no_key_too_many_is_looked_up(self, site: Site, users: Namespace) -> None:
        keys = [b"%d" % number for number in range(RECORDS_FOUND_MAX + 1)]
        assert find(users, *keys[1:]) == [None] * RECORDS_FOUND_MAX
        refused(LimitExceeded, lambda: find(users, *keys))
        refused(LimitExceeded, lambda: repair(users, *((key, 0, copy(b"x")) for key in keys)))
        assert find(users) == []
        refused(InvalidKey, lambda: find(users, b"key", b""))
        refused(InvalidKey, lambda: find(users, b"k" * (KEY_BYTES_MAX + 1)), size=KEY_BYTES_MAX + 1)
        host = site.host
        refused(
            NamespaceNotFound,
            lambda: host.verification.find_records("nowhere", [b"key"], site.now(), True),
            namespace="nowhere",
        )

    # Changes without values

    def test_changes_come_without_values(self, site: Site, users: Namespace, visits: Namespace) -> None:
        users.put(b"small", b"1")
        users.put_many({b"large": bytes(LOG_INLINE_VALUE_BYTES_MAX + 1), b"other": b"2"})
        apply(site, users, b"copied", copy(b"3"))
        users.delete(b"small")
        visits.add(b"home", 1)
        for own in (False, True):
            told, keys_only = (
                [
                    change
                    for batch in site.host.changes(ChangesRequest(keys_only=keys_only, own=own))
                    for change in zip(batch.versions, batch.keys, batch.values, strict=True)
                ]
                for keys_only in (False, True)
            )
            assert [change[:2] for change in keys_only] == [change[:2] for change in told]
            assert {value for _, _, value in keys_only} == {b""}

    # Repairs

    def test_repair_is_a_change_with_its_original_stamp(self, site: Site, users: Namespace) -> None:
        site.heartbeat()
        seen = users.put(b"key", b"wrong")
        assert repair(users, (b"key", seen, copy(b"right"))) == [True]
        record = users.record(b"key")
        assert record is not None
        assert (record.value, record.stamp) == (b"right", LATER)
        assert record.version > max(seen, LATER.version)
        assert users.get(b"key", at=seen) == b"wrong"
        last = list(site.changes("users"))[-1]
        assert (last.key, last.value, last.version, last.stamp) == (b"key", b"right", record.version, LATER)
        sums = site.heartbeat().sums[users.id]
        assert (sums.own.changes, sums.all.changes) == (1, 2)

    def test_repair_is_stored_only_where_what_was_seen_still_stands(
        self, site: Site, users: Namespace
    ) -> None:
        seen = users.put_many({b"changed": b"1", b"deleted": b"1", b"same": b"1"})
        users.put(b"changed", b"2")
        users.delete(b"deleted")
        users.put(b"new", b"3")
        site.split("users", b"m")
        repairs = [(key, seen, copy(b"right")) for key in (b"same", b"deleted", b"changed")]
        absent = [(key, 0, copy(b"right")) for key in (b"new", b"absent")]
        assert repair(users, *repairs, *absent) == [True, False, False, False, True]
        found = dict(users.scan())
        assert found == {b"same": b"right", b"changed": b"2", b"new": b"3", b"absent": b"right"}
        assert repair(users, *repairs, *absent) == [False] * 5
        assert repair(users) == []

    def test_equal_stamps_are_rewritten_with_other_bytes(self, site: Site, users: Namespace) -> None:
        apply(site, users, b"key", copy(b"corrupted"))
        seen = find_one(users, b"key").version
        assert repair(users, (b"key", seen, copy(b"sound"))) == [True]
        assert users.get(b"key") == b"sound"

    def test_what_was_first_written_here_and_lost_comes_back_under_its_stamp(
        self, site: Site, users: Namespace
    ) -> None:
        own = Stamp(LATER.version, SITE_ID)
        assert repair(users, (b"key", 0, copy(b"lost", own))) == [True]
        record = users.record(b"key")
        assert record is not None
        assert (record.value, record.stamp) == (b"lost", own)
        users.put(b"key", b"newer")
        assert users.get(b"key") == b"newer"

    def test_record_can_be_repaired_by_its_deletion(self, users: Namespace) -> None:
        seen = users.put(b"key", b"resurrected")
        assert repair(users, (b"key", seen, copy(None))) == [True]
        assert users.get(b"key") is None
        assert find_one(users, b"key").version > seen

    def test_older_stamp_never_comes_to_stand_above_a_newer_one(self, users: Namespace) -> None:
        seen = users.put(b"key", b"newer")
        refused(InvalidArgument, lambda: repair(users, (b"key", seen, copy(b"older", EARLIER))), key=b"key")
        assert users.get(b"key") == b"newer"

    def test_what_was_not_seen_may_have_any_stamp(self, users: Namespace) -> None:
        users.put(b"key", b"newer")
        assert repair(users, (b"key", 1, copy(b"older", EARLIER))) == [False]

    def test_merged_records_are_repaired_as_a_whole(
        self, site: Site, people: Namespace, visits: Namespace
    ) -> None:
        visits.add(b"home", 1)
        people.put(b"ada", {"name": "Ada", "city": "Rome"})
        people.delete_field(b"ada", "city")
        for namespace, key, there, expected in (
            (visits, b"home", elsewhere(add_to_counter(41), 5), b"42"),
            (people, b"ada", elsewhere(update_fields(b'{"born":1815}'), 5), b'{"born":1815,"name":"Ada"}'),
        ):
            seen = find_one(namespace, key)
            joined = join(seen.stored, there)
            assert repair(namespace, (key, seen.version, joined)) == [True]
            assert namespace.stored.get(key) == expected
            assert repair(namespace, (key, seen.version, joined)) == [False]
            # Nothing of it is new to those who bring the same once more.
            assert apply(site, namespace, key, there) == 0

    @pytest.mark.parametrize(
        "stored",
        [b"", b"x", b"\x00", b"\x80", encode_value(b"no origin"), encode_value(b"", origin=Stamp(0, 1))],
    )
    def test_repair_is_a_sound_record_with_an_origin(self, users: Namespace, stored: bytes) -> None:
        refused(InvalidValue, lambda: repair(users, (b"key", 0, stored)), key=b"key")
        assert find(users, b"key") == [None]

    def test_repair_is_of_the_kind_that_the_namespace_holds(
        self, users: Namespace, people: Namespace, visits: Namespace
    ) -> None:
        counter, fields = elsewhere(add_to_counter(1), 5), elsewhere(update_fields(b'{"a":1}'), 5)
        wrong: list[tuple[Namespace, bytes]] = [
            (users, counter),
            (users, fields),
            (people, copy(b"x")),
            (people, counter),
            (visits, fields),
        ]
        for namespace, stored in wrong:
            refused(WrongPolicy, self._repairing(namespace, stored), key=b"key")
        for namespace, unstamped in ((people, update_fields(b'{"a":1}')), (visits, add_to_counter(1))):
            refused(InvalidValue, self._repairing(namespace, unstamped), key=b"key")
        refused(InvalidArgument, lambda: repair(users, (b"key", 0, copy(b"1")), (b"key", 0, copy(b"2"))))
        for namespace in (users, people, visits):
            assert find(namespace, b"key") == [None]

    def _repairing(self, namespace: Namespace, stored: bytes) -> Any:
        return lambda: repair(namespace, (b"key", 0, stored))

    def test_repaired_record_expires_like_others(self, users: Namespace, time: SimulatedTime) -> None:
        seen = users.put(b"key", b"wrong")
        repair(users, (b"key", seen, copy(b"right", expires_at=time() // 1000 + 60)))
        assert users.get(b"key") == b"right"
        time.advance(HOUR_MS)
        assert users.get(b"key") is None


def join(here: bytes, there: bytes) -> bytes:
    """Two states of a record as one, with the origin that a copy of it has."""
    state = decode_state(merge_states(here, there))
    return encode_state(state, newest_stamp(state))

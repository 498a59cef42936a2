"""Looking records up and putting them right, at a site of this process: limits, moves and damage."""

from collections.abc import Sequence
from threading import Event

import pytest
from tests.site.support import HookedEngine, host_of, node_of
from tests.waiting import run_threads

from floodmark.codec.ordered import encode_key
from floodmark.codec.values import encode_value
from floodmark.host import verifying
from floodmark.model.change import Stamp
from floodmark.model.errors import Corruption, InvalidArgument, LimitExceeded, Rejoining
from floodmark.model.record import Repair
from floodmark.model.version import Version
from floodmark.partition import LocalPartition
from floodmark.partition.families import DATA
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology
from floodmark.site import Namespace, Site

KEYS = [b"key-%02d" % number for number in range(20)]


def repairs(site: Site, seen: Version, keys: Sequence[bytes] = KEYS) -> list[Repair]:
    stored = encode_value(b"right", origin=Stamp(site.now(), 3))
    return [Repair(key, seen, stored) for key in keys]


def test_answer_holds_no_more_than_fits(
    site: Site, users: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    users.put_many(dict.fromkeys(KEYS, bytes(100)))
    monkeypatch.setattr(verifying, "FOUND_BYTES_MAX", 1_000)
    host = site.host
    assert len(host.verification.find_records("users", KEYS[:9], site.now(), False)) == 9
    with pytest.raises(LimitExceeded, match="ask for fewer"):
        host.verification.find_records("users", KEYS, site.now(), False)
    assert len(host.verification.find_records("users", KEYS, site.now(), True)) == 20


def test_repairs_that_one_commit_cannot_hold_become_several(site: Site, users: Namespace) -> None:
    seen = users.put_many(dict.fromkeys(KEYS, b"wrong"))
    partition = node_of(site).map.partitions[0]
    partition.limits = partition.limits._replace(bytes_max=100)
    assert site.host.verification.repair_records("users", repairs(site, seen)) == [True] * len(KEYS)
    repaired = [change.version for change in site.changes("users", since=seen)]
    assert (len(repaired), len(set(repaired))) == (len(KEYS), 5)


def test_keys_are_found_and_repaired_where_they_have_moved(
    site: Site, users: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partition is split when the keys were given to it, and it has not looked yet."""
    seen = users.put_many(dict.fromkeys(KEYS, b"wrong"))
    for name, border in (("settle", KEYS[5]), ("repair", KEYS[15])):
        original, splits = getattr(LocalPartition, name), [border]

        def late(
            self: LocalPartition,
            *arguments: object,
            original: object = original,
            splits: list[bytes] = splits,
        ) -> object:
            if splits:
                site.split("users", splits.pop())
            return original(self, *arguments)  # type: ignore[operator]

        monkeypatch.setattr(LocalPartition, name, late)
    found = site.host.verification.find_records("users", KEYS, site.now(), True)
    assert [record is not None and record.version for record in found] == [seen] * len(KEYS)
    assert site.host.verification.repair_records("users", repairs(site, seen)) == [True] * len(KEYS)
    assert [value for _, value in users.scan()] == [b"right"] * len(KEYS)
    assert len(site.partitions()) == 3


def test_write_in_the_middle_of_a_repair_wins(site: Site, users: Namespace) -> None:
    """Whatever comes between the look and the repair, what users write is never lost."""
    seen = users.put(b"key", b"wrong")
    begun = Event()

    def write() -> None:
        begun.wait()
        for number in range(50):
            users.put(b"key", b"%d" % number)

    def mend() -> None:
        begun.set()
        for _ in range(50):
            site.host.verification.repair_records("users", repairs(site, seen, [b"key"]))

    run_threads(write, mend)
    assert users.get(b"key") == b"49"


def test_record_with_a_stamp_from_its_own_future_gives_way_to_an_older_one(
    site: Site, engine: HookedEngine, users: Namespace
) -> None:
    version = users.put(b"key", b"right")
    mended = Repair(b"key", version, encode_value(b"right", origin=Stamp(version - 1, 3)))
    with pytest.raises(InvalidArgument, match="older than what is there"):
        site.host.verification.repair_records("users", [mended])
    for ahead, is_damaged in ((0, False), (1, True)):
        rotten = encode_value(b"rotten", origin=Stamp(version + ahead, 3))
        engine.write([(DATA, encode_key(users.id, b"key", version), rotten)])
        if is_damaged:
            assert site.host.verification.repair_records("users", [mended]) == [True]
        else:
            with pytest.raises(InvalidArgument, match="older than what is there"):
                site.host.verification.repair_records("users", [mended])
    assert users.get(b"key") == b"right"


def test_damaged_record_is_named(site: Site, engine: HookedEngine, users: Namespace) -> None:
    version = users.put(b"bob", b"sound")
    engine.write([(DATA, encode_key(users.id, b"bob", version), b"damaged\x08")])
    with pytest.raises(Corruption, match="key b'bob' of namespace"):
        site.host.verification.find_records("users", [b"bob"], site.now(), True)


def test_site_that_is_rejoining_is_not_repaired(site: Site, users: Namespace) -> None:
    sites = {site.name: MemberSite(id=site.id, incarnation=2), "rome": MemberSite(id=9)}
    host_of(site).membership.set_topology(
        Topology(epoch=1, sites=sites, namespaces={"users": SharedNamespace()})
    )
    with pytest.raises(Rejoining):
        site.host.verification.repair_records("users", repairs(site, 0, [b"key"]))
    assert users.get(b"key") is None

"""Rewriting a namespace: everything old gets a new stamp, and nothing newer is touched."""

from datetime import timedelta

import msgspec
import pytest
from tests.replication.support_links import IDS, Mesh, open_one, topology_of

from floodmark.engine import MemoryEngine
from floodmark.links.steps import run_step
from floodmark.model.errors import InvalidConfiguration, StaleLink
from floodmark.partition import FAMILIES
from floodmark.replication.topology import SharedNamespace
from floodmark.site import Site
from floodmark.site.rewriting import rewrite
from floodmark.testing.clock import SimulatedTime

# More than are read at once.
MANY = [b"%05d" % number for number in range(12_000)]


@pytest.fixture
def site() -> Site:
    return open_one(MemoryEngine(FAMILIES), "oslo", SimulatedTime())


def test_values_and_expiries_stay_and_stamps_are_new(site: Site) -> None:
    users = site.create_namespace("users")
    users.put_many({b"%04d" % number: b"value %d" % number for number in range(2_500)})
    users.put(b"session", b"short", ttl=timedelta(hours=1))
    users.put(b"gone", b"x")
    users.delete(b"gone")
    before = dict(users.scan())
    expires_at = users.record(b"session")
    told: list[int] = []
    rewritten = rewrite(site.host, "users", told.append)
    assert (rewritten.records_read, rewritten.records_written) == (2_501, 2_501)
    assert told[-1] == 2_501
    assert dict(users.scan()) == before
    records = [users.record(key) for key in before]
    assert all(record is not None and record.stamp.version > rewritten.since for record in records)
    session = users.record(b"session")
    assert session is not None
    assert expires_at is not None
    assert session.expires_at == expires_at.expires_at


def test_rewritten_namespace_may_be_shared(site: Site) -> None:
    site.create_namespace("users").put(b"ada", b"countess")
    rewrite(site.host, "users")
    site.set_topology(topology_of("oslo", "rome"))


def test_what_is_written_meanwhile_is_left_alone(site: Site) -> None:
    users = site.create_namespace("users")
    users.put_many(dict.fromkeys(MANY, b"old"))

    def write_ahead(read: int) -> None:
        if read < len(MANY):
            users.put(MANY[-1], b"new")
            users.delete(MANY[-2])

    rewritten = rewrite(site.host, "users", write_ahead)
    assert rewritten.records_written == len(MANY) - 2
    assert (users.get(MANY[-1]), users.get(MANY[-2])) == (b"new", None)


def test_rewriting_twice_changes_no_value(site: Site) -> None:
    users = site.create_namespace("users")
    users.put(b"ada", b"countess")
    first, second = rewrite(site.host, "users"), rewrite(site.host, "users")
    assert second.since > first.since
    assert dict(users.scan()) == {b"ada": b"countess"}


def test_change_that_arrives_meanwhile_is_left_alone_though_it_was_written_before() -> None:
    mesh = Mesh("oslo", "rome")
    oslo, rome = (mesh[name].namespace("users") for name in ("oslo", "rome"))
    oslo.put_many(dict.fromkeys(MANY, b"old"))
    mesh.exchange()
    mesh.exchange()
    written = rome.put(MANY[-1], b"new")
    mesh.time.advance(10)

    def receive(read: int) -> None:
        if read < len(MANY):
            mesh.step("rome", "oslo")

    rewritten = rewrite(mesh["oslo"].host, "users", receive)
    assert rewritten.since < written
    assert rewritten.records_written == len(MANY) - 1
    mesh.exchange()
    assert (oslo.get(MANY[-1]), rome.get(MANY[-1])) == (b"new", b"new")


def test_record_of_the_other_site_becomes_one_of_this_site() -> None:
    mesh = Mesh("oslo", "rome")
    mesh.put("rome", b"ada")
    mesh.exchange()
    mesh.exchange()
    rewrite(mesh["oslo"].host, "users")
    record = mesh["oslo"].namespace("users").record(b"ada")
    assert record is not None
    assert record.stamp.site == IDS["oslo"]


def test_nothing_is_rewritten_while_a_member_has_sent_nothing() -> None:
    mesh = Mesh("oslo", "rome")
    mesh.put("oslo", b"ada")
    with pytest.raises(StaleLink, match="let replication run"):
        rewrite(mesh["oslo"].host, "users")


def test_fields_keep_their_texts_and_expiries_and_deleted_ones_stay_away(site: Site) -> None:
    users = site.create_namespace("users", merge="fields")
    users.put(b"ada", {"name": "Ada", "born": 1815, "title": "countess"})
    users.delete_field(b"ada", "title")
    users.update(b"ada", {"session": "short"}, ttl=timedelta(hours=1))
    before = users.get(b"ada")
    rewritten = rewrite(site.host, "users")
    assert (rewritten.records_read, rewritten.records_written) == (1, 1)
    assert users.get(b"ada") == before == b'{"born":1815,"name":"Ada","session":"short"}'
    record = users.record(b"ada")
    assert record is not None
    assert record.stamp.version > rewritten.since


def test_counters_keep_their_sums(site: Site) -> None:
    counts = site.create_namespace("counts", merge="counter")
    counts.add(b"ada", 7)
    counts.add(b"alan", -2)
    rewritten = rewrite(site.host, "counts")
    assert (rewritten.records_read, rewritten.records_written) == (2, None)
    assert dict(counts.scan()) == {b"ada": 7, b"alan": -2}
    record = counts.record(b"ada")
    assert record is not None
    assert record.stamp.version > rewritten.since


def test_counter_of_a_site_that_shares_it_no_longer_is_not_rewritten() -> None:
    """Only who counted can write it again, and those who come later would never hear of it."""
    mesh = Mesh("oslo", "rome")
    shared = topology_of("oslo", "rome", "bonn", epoch=2)
    counts = SharedNamespace(sites=("oslo", "rome"), merge="counter")
    for site in mesh.sites.values():
        site.set_topology(msgspec.structs.replace(shared, namespaces={"counts": counts}))
        site.namespace("counts").add(b"ada", 7)
    mesh.beat()
    run_step(mesh["rome"].host, mesh["oslo"].host, mesh.plan("rome", "oslo", ["counts"]))
    rewrite(mesh["oslo"].host, "counts")
    mesh["oslo"].set_topology(msgspec.structs.replace(shared, epoch=3, namespaces={}))
    with pytest.raises(InvalidConfiguration, match=r"site 2 has counted.*a new namespace"):
        rewrite(mesh["oslo"].host, "counts")
    assert mesh["oslo"].namespace("counts").get(b"ada") == 14

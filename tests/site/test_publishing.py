"""Data sets that replace a namespace at once."""

from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pyarrow
import pytest
from tests.replication.support_links import Mesh, embedded
from tests.site.support import node_of
from tests.waiting import HANG_SECONDS, run_threads

import floodmark
from floodmark import Site
from floodmark.codec.ordered import encode_namespace, qualify_range
from floodmark.codec.values import encode_value
from floodmark.engine import MemoryEngine
from floodmark.host.catalog import GenerationRow, Rewound
from floodmark.host.publishing import FUTILE_MAX, PASS_MS_MAX, PUBLISHING, LocalGenerations, rewind_until
from floodmark.host.secondary import open_directory
from floodmark.model.errors import (
    Conflict,
    GenerationSwapped,
    InvalidArgument,
    InvalidConfiguration,
    InvalidKey,
    InvalidValue,
    PartitionStopped,
    PublicationConflict,
    SchemaMismatch,
    VersionCollected,
    VersionInFuture,
    WrongPolicy,
)
from floodmark.model.limits import PAGE_ROWS_MAX
from floodmark.model.partition import Decision, Fate, GenerationStream
from floodmark.model.stream import ChangesRequest
from floodmark.partition import FAMILIES
from floodmark.partition.read.records import _read_forward as read_page
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology
from floodmark.site.embedding import open_engine
from floodmark.testing import FaultyEngine
from floodmark.testing.clock import SimulatedTime


@pytest.fixture
def site() -> Iterator[Site]:
    with open_engine(MemoryEngine(FAMILIES), site="oslo") as site:
        yield site


def load(site: Site, name: str, generation: GenerationRow, pairs: dict[bytes, bytes]) -> None:
    namespace = site.namespace(name)
    prefix = encode_namespace(namespace.id)
    stream = site.host.write_stream(GenerationStream(namespace.id, generation.number))
    stream.send({prefix + key: encode_value(value) for key, value in pairs.items()}).result()
    stream.close()


def publish(site: Site, name: str, pairs: dict[bytes, bytes], base: int = 0) -> GenerationRow:
    generation = site.host.generations.begin_generation(name, base, "test")
    load(site, name, generation, pairs)
    return site.host.generations.swap_generation(name, generation.number, 1)


def test_a_data_set_replaces_everything_at_one_version(site: Site) -> None:
    users = site.create_namespace("users")
    before = users.put_many({b"ada": b"1", b"bob": b"1"})
    published = publish(site, "users", {b"bob": b"2", b"cyd": b"2"})
    assert published.since is not None
    assert dict(users.scan()) == {b"bob": b"2", b"cyd": b"2"}
    assert users.get_many([b"ada", b"bob", b"cyd"]) == [None, b"2", b"2"]
    assert dict(users.scan(reverse=True, limit=1)) == {b"cyd": b"2"}
    for version in (before, published.since - 1):
        assert dict(users.scan(at=version)) == {b"ada": b"1", b"bob": b"1"}
        assert users.get(b"ada", at=version) == b"1"
    users.put(b"ada", b"3")
    users.delete(b"cyd")
    assert dict(users.scan()) == {b"ada": b"3", b"bob": b"2"}
    assert dict(users.scan(at=published.since)) == {b"bob": b"2", b"cyd": b"2"}


def test_changes_made_since_the_base_go_on_in_the_new_generation(site: Site) -> None:
    users = site.create_namespace("users")
    base = users.put_many({b"old": b"1", b"changed": b"1", b"deleted": b"1"})
    generation = site.host.generations.begin_generation("users", base, "test")
    users.put(b"changed", b"2")
    users.delete(b"deleted")
    load(site, "users", generation, {b"changed": b"0", b"deleted": b"0", b"new": b"0"})
    users.put(b"late", b"3")
    swapped = site.host.generations.swap_generation("users", generation.number, 1)
    assert dict(users.scan()) == {b"changed": b"2", b"late": b"3", b"new": b"0"}
    assert swapped.replayed == 3


def test_keys_that_expire_are_told_of_also_if_they_were_loaded() -> None:
    now_ms = 1_700_000_000_000
    with open_engine(MemoryEngine(FAMILIES), site="oslo", time_source=lambda: now_ms) as site:
        users = site.create_namespace("users", ttl=timedelta(minutes=1))
        published = site.generations.publish("users", {b"ada": b"1"})
        assert users.get(b"ada") == b"1"
        now_ms += 120_000
        site.host.versions.heartbeat()
        site.host.retention.collect_garbage()
        assert users.get(b"ada") is None
        told = [(change.key, change.value) for change in site.changes("users", since=published.version)]
        assert told == [(b"ada", None)]


def test_a_site_that_lost_power_counts_large_values_of_the_present_generation() -> None:
    engine = FaultyEngine(FAMILIES)
    site = open_engine(engine, site="oslo", background=False)
    users = site.create_namespace("users")
    site.heartbeat()
    site.generations.publish("users", {b"ada": b"1"})
    users.put(b"ada", bytes(100_000))
    with open_engine(engine.crash(keep=0), site="oslo", background=False) as again:
        assert again.namespace("users").get(b"ada") == bytes(100_000)
        beat = again.heartbeat()
        assert beat.since > 0
        assert beat.sums[users.id].own.changes == 1


def test_another_publisher_is_refused_and_the_same_one_goes_on(site: Site) -> None:
    site.create_namespace("users")
    begin = site.host.generations.begin_generation
    first = begin("users", 0, "first")
    with pytest.raises(PublicationConflict, match="being published by 'first'"):
        site.generations.publish("users", {b"ada": b"1"})
    site.generations.drop("users", first.number)
    assert site.generations.publish("users", {b"ada": b"1"}).rows == 1
    with pytest.raises(PublicationConflict, match="not being published any more"):
        load(site, "users", first, {b"ada": b"late"})
    assert site.namespace("users").get(b"ada") == b"1"


def test_two_calls_of_one_process_are_two_publishers(site: Site) -> None:
    site.create_namespace("users")

    def rows() -> Iterator[tuple[bytes, bytes]]:
        with pytest.raises(PublicationConflict, match="is being published"):
            site.generations.publish("users", {b"bob": b"2"})
        yield b"ada", b"1"

    assert site.generations.publish("users", rows()).rows == 1
    assert dict(site.namespace("users").scan()) == {b"ada": b"1"}


def test_publishers_that_began_at_different_sites_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("floodmark.site.generations._WAIT_SECONDS", 0)
    mesh = Mesh("oslo", "bonn")
    oslo, bonn = mesh["oslo"], mesh["bonn"]
    here, there, origin = oslo.host.generations, bonn.host.generations, bonn.host.identity.site_id
    begun = there.begin_generation("users", 0, "other", origin)
    begin, calls = here.begin_generation, list[str]()

    def publish_other_first(*arguments: Any) -> GenerationRow:
        calls.append("begin")
        if len(calls) == 2:
            # The publisher has dropped what it had begun before the other one.
            second = begin("users", begun.base, "other", origin)
            for port, number in ((there, begun.number), (here, second.number)):
                port.swap_generation("users", number, 1)
        return begin(*arguments)

    monkeypatch.setattr(here, "begin_generation", publish_other_first)
    wait = timedelta(seconds=HANG_SECONDS)
    published = oslo.generations.publish("users", {b"ada": b"1"}, others=[bonn], wait=wait)
    assert published.base > begun.base
    assert [dict(each.namespace("users").scan()) for each in (oslo, bonn)] == [{b"ada": b"1"}] * 2


def test_a_publisher_does_not_wait_for_itself(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.create_namespace("users")
    site.host.generations.begin_generation("users", 0, "nightly")

    def refuse_wait() -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr("floodmark.site.generations.Event", refuse_wait)
    with pytest.raises(PublicationConflict, match="leave the base out"):
        site.generations.publish("users", {}, base=site.now(), publisher="nightly", wait=timedelta(hours=1))


@pytest.mark.parametrize("turn", ["publish", "rollback"])
def test_a_publisher_waits_only_so_long_for_a_prepared_write(
    turn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floodmark.host.publishing.JOIN_MS_MAX", 10)
    time = SimulatedTime()
    with open_engine(MemoryEngine(FAMILIES), site="oslo", background=False, time_source=time) as site:
        users = site.create_namespace("users")
        users.put(b"ada", b"1")
        site.generations.publish("users", {b"ada": b"2"})
        time.advance(1_000)
        node = node_of(site)
        node.settle_by(lambda _: Fate(Decision.UNDECIDED))
        (partition,) = node.map.partitions
        partition.prepare("0-7", [encode_namespace(users.id) + b"ada"], [encode_value(b"3")])
        # More than a publisher is behind when it swaps.
        time.advance(PASS_MS_MAX + 1_000)

        def work() -> None:
            if turn == "publish":
                site.generations.publish("users", {b"ada": b"4"})
            else:
                site.generations.rollback("users")

        with pytest.raises(PartitionStopped, match="a transaction is open"):
            run_threads(work)
        assert users.get(b"ada") == b"2"
        partition.commit_prepared("0-7", site.now())
        work()
        assert users.get(b"ada") == (b"4" if turn == "publish" else b"3")


@pytest.mark.parametrize(
    ("passes", "taken"),
    [
        pytest.param([(9, 50), (0, 10), (9, 0)], 2, id="near"),
        pytest.param([(9, 50), (0, 50), (9, 0)], 2, id="held back"),
        pytest.param([(9, 50), (9, 60), (9, 70), (9, 5)], 4, id="slow for a while"),
        pytest.param([(9, 50)] * 100, 1 + FUTILE_MAX, id="slower than others write"),
    ],
)
def test_changes_are_copied_as_long_as_that_helps(passes: list[tuple[int, int]], taken: int) -> None:
    rewound = iter([Rewound(*each) for each in passes])
    assert len([*rewind_until(10, lambda: next(rewound))]) == taken


def test_background_work_goes_on_while_a_publisher_waits(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.create_namespace("users")
    site.generations.publish("users", {b"ada": b"1"})
    waited = list[bool]()

    def wait(*_: object) -> None:
        # Heartbeats come from the same thread.
        run_threads(site.host.retention.collect_garbage)
        waited.append(True)

    monkeypatch.setattr("floodmark.host.publishing._wait_resolved", wait)
    site.generations.publish("users", {b"ada": b"2"})
    site.generations.rollback("users")
    assert waited == [True, True]
    assert site.namespace("users").get(b"ada") == b"1"


def test_a_publisher_that_goes_on_keeps_its_base_and_leaves_none_of_its_earlier_rows(site: Site) -> None:
    users = site.create_namespace("users")
    users.put(b"old", b"1")
    begin = site.host.generations.begin_generation
    first = begin("users", 0, "nightly")
    users.put(b"ada", b"since the base")
    load(site, "users", first, {b"ada": b"1", b"bob": b"1"})
    site.host.generations.rewind_generation("users", first.number)
    # What was copied already is copied again.
    site.host.retention.collect_garbage()
    with pytest.raises(PublicationConflict, match="leave the base out"):
        begin("users", site.now(), "nightly")
    published = site.generations.publish("users", {b"eve": b"2"}, publisher="nightly")
    assert (published.base, published.replayed) == (first.base, 1)
    with pytest.raises(PublicationConflict, match="not being published any more"):
        load(site, "users", first, {b"ada": b"late"})
    assert dict(users.scan()) == {b"ada": b"since the base", b"eve": b"2"}
    assert [each.number for each in site.generations.list("users")] == [1, published.generation]


def test_records_are_compared_as_of_a_version_before_a_swap(site: Site) -> None:
    users = site.create_namespace("users")
    users.put_many({b"ada": b"1", b"bob": b"1"})
    base = site.now()
    at = site.now()
    site.generations.publish("users", {b"ada": b"2", b"eve": b"2"}, base=base)
    found = site.host.verification.find_records("users", [b"ada", b"bob", b"eve"], at, False)
    assert [each and each.stored[:-1] for each in found] == [b"1", b"1", None]


def test_a_late_task_changes_nothing_once_the_generation_is_read(site: Site) -> None:
    users = site.create_namespace("users")
    generation = site.host.generations.begin_generation("users", 0, "test")
    load(site, "users", generation, {b"ada": b"1"})
    site.host.generations.swap_generation("users", generation.number, 1)
    users.delete(b"ada")
    with pytest.raises(PublicationConflict):
        load(site, "users", generation, {b"ada": b"1"})
    assert users.get(b"ada") is None


def test_a_call_that_comes_twice_takes_nothing_from_the_next_publisher(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    users, generations = site.create_namespace("users"), site.host.generations
    first = generations.begin_generation("users", 0, "first")
    generations.swap_generation("users", first.number, 1)
    with monkeypatch.context() as patch:
        # One of which the removal has not ended.
        patch.setattr(LocalGenerations, "remove_generation", lambda *_: None)
        left = generations.begin_generation("users", 0, "second")
        second = generations.begin_generation("users", 0, "second")
    generations.swap_generation("users", first.number, 1)
    generations.drop_generation("users", left.number)
    site.host.retention.collect_garbage()
    load(site, "users", second, {b"ada": b"2"})
    generations.swap_generation("users", second.number, 1)
    assert dict(users.scan()) == {b"ada": b"2"}


def test_a_publication_that_fails_leaves_the_namespace_as_it_was(site: Site) -> None:
    users = site.create_namespace("users")
    users.put(b"ada", b"1")
    rows = iter([(b"bob", b"2"), (b"", b"3")])
    with pytest.raises(InvalidKey):
        site.generations.publish("users", rows)
    assert dict(users.scan()) == {b"ada": b"1"}
    assert [each.number for each in site.generations.list("users")] == [1]
    refused: list[object] = []
    mixed: list[Any] = [(b"bob", b"2"), (None, b"3")]
    published = site.generations.publish("users", mixed, on_refused=lambda pair, _: refused.append(pair))
    assert (published.rows, published.refused, refused) == (1, 1, [(None, b"3")])


def test_a_rollback_that_is_interrupted_leaves_nothing_in_the_way_of_the_next(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = site.create_namespace("users")
    users.put(b"ada", b"1")
    site.generations.publish("users", {b"ada": b"2"})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalGenerations, "_load", interrupt)
        with pytest.raises(KeyboardInterrupt):
            site.generations.rollback("users")
    assert [each.number for each in site.generations.list("users")] == [1, 2]
    site.host.generations.begin_generation("users", 0, "nightly")
    with pytest.raises(PublicationConflict, match=r"'nightly' publishes generation 3; .*generation drop"):
        site.generations.rollback("users")
    site.generations.drop("users", 3)
    site.generations.rollback("users")
    assert users.get(b"ada") == b"1"


def test_a_key_that_comes_twice_fails_the_publication_or_its_last_row_counts(site: Site) -> None:
    users = site.create_namespace("users")
    rows = [(b"bob", b"1"), (b"ada", b"2"), (b"bob", b"3")]
    with pytest.raises(InvalidKey, match="stands in several rows") as raised:
        site.generations.publish("users", rows)
    assert raised.value.details["key"] == b"bob"
    assert [each.number for each in site.generations.list("users")] == [1]
    with pytest.raises(InvalidArgument):
        site.generations.publish("users", rows, duplicates="first")
    assert site.generations.publish("users", rows, duplicates="last").rows == 2
    assert dict(users.scan()) == {b"ada": b"2", b"bob": b"3"}


def test_rows_may_be_arrow_tables_and_batches(site: Site) -> None:
    users = site.create_namespace("users")
    table = pyarrow.table(
        {"key": ["bob", "ada", None, "", "k" * 5_000], "value": [b"1", b"2", b"3", b"4", b"5"]}
    )
    refused: list[tuple[bytes | None, str]] = []
    published = site.generations.publish(
        "users", table, on_refused=lambda pair, error: refused.append((pair[0], type(error).__name__))
    )
    assert (published.rows, published.refused) == (2, 3)
    assert refused == [(None, "InvalidKey"), (b"", "InvalidKey"), (b"k" * 5_000, "InvalidKey")]
    assert dict(users.scan()) == {b"ada": b"2", b"bob": b"1"}
    with pytest.raises(InvalidKey):
        site.generations.publish("users", table)
    nulls = pyarrow.table({"key": [b"ada"], "value": pyarrow.array([None], pyarrow.large_binary())})
    with pytest.raises(InvalidValue):
        site.generations.publish("users", nulls)
    with pytest.raises(SchemaMismatch, match="have the columns key and value"):
        site.generations.publish("users", pyarrow.table({"key": [1], "value": [b"1"]}))
    assert site.generations.check("users", table.slice(0, 2)) == (2, 0)
    assert dict(users.scan()) == {b"ada": b"2", b"bob": b"1"}


def test_a_partition_that_splits_while_rows_are_loaded_loses_none(tmp_path: Path) -> None:
    with floodmark.open(tmp_path, site="oslo", background=False) as site:
        users = site.create_namespace("users")
        generation = site.host.generations.begin_generation("users", 0, "test")
        load(site, "users", generation, {b"%03d" % number: b"1" for number in range(300)})
        site.split("users", b"150")
        users.put(b"149", b"2")
        users.put(b"150", b"2")
        load(site, "users", generation, {b"%03d" % number: b"1" for number in range(100, 400)})
        site.host.generations.swap_generation("users", generation.number, 1)
        expected = {b"%03d" % number: b"2" if number in (149, 150) else b"1" for number in range(400)}
        assert dict(users.scan()) == expected


def test_a_data_set_in_any_order_is_loaded_as_sorted_files(tmp_path: Path) -> None:
    with floodmark.open(tmp_path, site="oslo", background=False) as site:
        users = site.create_namespace("users")
        rows = {b"user-%d" % (number * 7_919 % 20_000): bytes(50) for number in range(20_000)}
        published = site.generations.publish("users", rows)
        assert published.rows == 20_000
        assert dict(users.scan()) == rows
        measures = site.host.engine_measures()
        # Nothing of it is in the memory of writes.
        assert measures is not None
        assert measures.families["data"]["files_bytes"] > 0
        assert measures.families["data"]["memtables_bytes"] < 100_000
        site.generations.publish("users", {b"end": b"1"}, keep=0)
    with floodmark.open(tmp_path, site="oslo", background=False) as site:
        assert dict(site.namespace("users").scan()) == {b"end": b"1"}
        assert dict(site.namespace("users").scan(at=published.version)) == rows


def test_what_cannot_be_published_is_refused(site: Site) -> None:
    site.create_namespace("counts", merge="counter")
    site.create_namespace("users")
    now = site.host.versions.now()
    with pytest.raises(WrongPolicy):
        site.generations.publish("counts", {b"ada": b"1"})
    site.create_namespace("files", large_values=True).put(b"ada", b"1")
    for publish in (site.generations.publish, site.generations.check):
        with pytest.raises(WrongPolicy, match="holds large values 1"):
            publish("files", {b"ada": b"1"})
    with pytest.raises(VersionInFuture):
        site.generations.publish("users", {b"ada": b"1"}, base=now + (3_600_000 << 18))
    site.generations.publish("users", {b"ada": b"1"})
    with pytest.raises(VersionCollected, match="changes made since would be missing"):
        site.generations.publish("users", {b"ada": b"1"}, base=now)
    shared = Topology(
        epoch=1,
        sites={"oslo": MemberSite(id=site.id), "rome": MemberSite(id=2, url="grpc://rome:7100")},
        namespaces={"shared": SharedNamespace(merge="last_write")},
    )
    site.host.membership.set_topology(shared)
    with pytest.raises(InvalidConfiguration, match="shared with rome; publish at all sites"):
        site.generations.publish("shared", {b"ada": b"1"})


def test_changes_that_are_found_by_a_scan_are_all_there_although_a_swap_comes_in_between(site: Site) -> None:
    users = site.create_namespace("users")
    written = {b"%05d" % number: b"1" for number in range(2 * PAGE_ROWS_MAX)}
    until = users.put_many(written)
    node = embedded(site).node
    node.trim_logs(node.resolved_version())
    request = ChangesRequest(keys=qualify_range(users.id), namespace=users.id, since=0, until=until)
    changes = site.host.changes(request)
    found = list(next(changes).keys)
    site.generations.publish("users", {})
    for batch in changes:
        found += batch.keys
    assert [key[3:] for key in found] == list(written)


def test_a_scan_goes_on_in_the_generation_in_which_a_page_began(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = site.create_namespace("users")
    site.generations.publish("users", {b"ada": b"old"})
    at, swaps = site.host.versions.read_version(), list[int]()

    def swap_first(*arguments: Any) -> Any:
        if not swaps:
            swaps.append(site.generations.publish("users", {b"ada": b"new"}, base=at).version)
        return read_page(*arguments)

    monkeypatch.setattr("floodmark.partition.read.records._read_forward", swap_first)
    assert dict(users.scan(at=at)) == {b"ada": b"old"}
    assert dict(users.scan(at=swaps[0])) == {b"ada": b"new"}


def test_the_first_key_as_of_a_version_is_that_of_its_generation(site: Site) -> None:
    users = site.create_namespace("users")
    before = users.put(b"ada", b"1")
    published = publish(site, "users", {b"abe": b"2", b"ada": b"2"}, base=before)
    assert users.first(b"a", b"b", at=before) == (b"ada", b"1")
    assert users.first(b"a", b"b", at=published.since) == users.first(b"a", b"b") == (b"abe", b"2")


def test_a_transaction_that_read_before_a_swap_conflicts(site: Site) -> None:
    users, other = site.create_namespace("users"), site.create_namespace("other")
    users.put(b"ada", b"1")
    site.generations.publish("users", {b"ada": b"2"})
    # The generation has records at versions below those at which it is read.
    transaction = site.transaction()
    seen = transaction.get(users, b"ada")
    site.generations.publish("users", {b"ada": b"3"})
    transaction.put(other, b"seen", seen or b"")
    with pytest.raises(Conflict, match="a data set was published"):
        transaction.commit()
    assert other.get(b"seen") is None


def test_delete_range_leaves_what_a_swap_brought(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    users = site.create_namespace("users")
    users.put(b"ada", b"1")
    delete, swaps = site.host.router.delete_unchanged, [True]

    def publish_first(keys: list[bytes], since: int, *, durable: bool) -> int:
        if swaps.pop():
            site.generations.publish("users", {b"ada": b"2"})
        return delete(keys, since, durable=durable)

    monkeypatch.setattr(site.host.router, "delete_unchanged", publish_first)
    assert users.delete_range() == 0
    assert users.get(b"ada") == b"2"


def test_followers_and_subscriptions_fail_at_a_swap_and_go_on_with_a_snapshot(site: Site) -> None:
    users = site.create_namespace("users")
    users.put(b"ada", b"1")
    following = site.changes("users", since="beginning", follow=True)
    assert next(following).key == b"ada"
    published = site.generations.publish("users", {b"bob": b"2"})
    with pytest.raises(GenerationSwapped, match="complete up to"):
        next(following)
    with pytest.raises(GenerationSwapped):
        list(site.changes())
    assert [change.key for change in site.changes("users", since="snapshot")] == [b"bob"]
    users.put(b"cyd", b"3")
    assert [change.key for change in site.changes("users", since=published.version)] == [b"cyd"]


def test_steps_of_readers_do_not_pass_over_a_swap(site: Site) -> None:
    users = site.create_namespace("users")
    version = users.put(b"ada", b"1")
    published = site.generations.publish("users", {b"ada": b"1"})
    cut = site.host.versions.cut_changes
    assert cut("users", version - 1, None, None, False).version == published.version - 1
    with pytest.raises(GenerationSwapped):
        cut("users", published.version - 1, None, None, False)


def test_a_named_feed_fails_at_a_swap_and_resumes_with_a_snapshot(site: Site, tmp_path: Path) -> None:
    users = site.create_namespace("users")
    users.put(b"ada", b"1")
    site.feeds.create("lake", "users", f"parquet:{tmp_path}/lake")
    site.generations.publish("users", {b"bob": b"2"})
    with pytest.raises(VersionCollected, match="a data set was published"):
        site.feeds.runner("lake", sinks=[f"parquet:{tmp_path}"]).run()
    assert site.feeds.show("lake").state == "failed"
    assert site.feeds.resume("lake", since="snapshot").state != "failed"


def test_writers_and_readers_go_on_over_swaps(site: Site) -> None:
    """Every acknowledged write is there afterwards, and every snapshot is of one generation."""
    users = site.create_namespace("users")
    base = users.put(b"gone", b"0")
    written: dict[bytes, bytes] = {}
    done, failures = Event(), []

    def write() -> None:
        try:
            for number in count():
                key, value = b"w%03d" % (number % 50), b"%d" % number
                users.put(key, value, durability="async")
                written[key] = value
                if done.is_set():
                    return
        except Exception as error:
            failures.append(error)

    def read() -> None:
        keys = [(users, b"a"), (users, b"b")]
        try:
            while not done.is_set():
                first, second = site.read_atomic(keys)
                rows = dict(users.scan(b"a", b"c"))
                if first != second or rows.get(b"a") != rows.get(b"b"):
                    failures.append(AssertionError(f"{first!r}, {second!r}, {rows!r}"))
        except Exception as error:
            failures.append(error)

    threads = [Thread(target=write), Thread(target=read)]
    for thread in threads:
        thread.start()
    for number in range(5):
        site.generations.publish("users", {b"a": b"%d" % number, b"b": b"%d" % number}, base=base)
    done.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert written.items() <= dict(users.scan()).items()


def test_garbage_collection_that_a_rollback_overtakes_removes_nothing_of_its_records() -> None:
    """The last key of a page had its newest record there; in the next generation that is an older one."""
    time = SimulatedTime()
    with open_engine(MemoryEngine(FAMILIES), site="oslo", time_source=time) as site:
        users = site.create_namespace("users", retention=timedelta(seconds=1))
        old = {b"%05d" % number: b"old" for number in range(PAGE_ROWS_MAX + 1)}
        users.put_many(old)
        time.advance(60_000)
        site.generations.publish("users", dict.fromkeys(old, b"new"))
        time.advance(60_000)
        collected, node = embedded(site).garbage, embedded(site).node
        rolled_back: list[int] = []

        def pause() -> bool:
            if node.retention.collected_version(users.id) and not rolled_back:
                rolled_back.append(site.generations.rollback("users").number)
            return True

        collected.run(pause)
        assert rolled_back == [3]
        assert dict(users.scan()) == old


def test_generations_that_are_not_needed_any_more_are_removed() -> None:
    now_ms = 1_700_000_000_000
    engine = MemoryEngine(FAMILIES)
    with open_engine(engine, site="oslo", time_source=lambda: now_ms) as site:
        users = site.create_namespace("users")
        users.put(b"ada", b"1")
        site.generations.publish("users", {b"ada": b"2"})
        left = site.host.generations.begin_generation("users", 0, "left")
        load(site, "users", left, {b"bob": b"3"})
        site.host.retention.collect_garbage()
        assert [each.number for each in site.generations.list("users")] == [1, 2, 3]
        now_ms += 4 * 24 * 3_600_000
        site.host.retention.collect_garbage()
        assert [each.number for each in site.generations.list("users")] == [2]
        assert dict(users.scan()) == {b"ada": b"2"}
        rows = engine.scan("data", b"", None, rows_max=10, bytes_max=10_000)
        assert len(rows) == 1
        site.drop_namespace("users")
        now_ms += 4 * 24 * 3_600_000
        site.host.retention.collect_garbage()
        assert engine.scan("data", b"", None, rows_max=10, bytes_max=10_000) == []


def test_publications_at_work_at_the_same_time_are_not_taken_for_ones_that_were_left() -> None:
    time = SimulatedTime()
    with open_engine(MemoryEngine(FAMILIES), site="oslo", background=False, time_source=time) as site:
        loading = {}
        for name in ("users", "prices"):
            site.create_namespace(name)
            loading[name] = site.host.generations.begin_generation(name, 0, "nightly")
        for _ in range(3):
            time.advance(PUBLISHING // timedelta(milliseconds=1) * 2 // 3)
            for name, generation in loading.items():
                load(site, name, generation, {b"ada": b"1"})
            site.host.retention.collect_garbage()
        for name, generation in loading.items():
            site.host.generations.swap_generation(name, generation.number, 1)
            assert dict(site.namespace(name).scan()) == {b"ada": b"1"}


def test_a_directory_that_another_process_reads_shows_the_present_generation(tmp_path: Path) -> None:
    with floodmark.open(tmp_path, site="oslo", background=False) as site:
        users = site.create_namespace("users")
        version = users.put(b"ada", b"1")
        published = site.generations.publish("users", {b"bob": b"2"})
        request = ChangesRequest(keys=qualify_range(users.id), namespace=users.id, since=version - 1)
    with open_directory(tmp_path) as reader:
        for at, key in ((version, b"ada"), (published.version, b"bob")):
            pages = reader.scan_records(qualify_range(users.id), at)
            assert [each for page in pages for each in page.column(0).to_pylist()] == [key]
        with pytest.raises(GenerationSwapped):
            list(reader.changes(request))
    with floodmark.open(tmp_path, site="oslo", background=False) as site:
        assert dict(site.namespace("users").scan()) == {b"bob": b"2"}

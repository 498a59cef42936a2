"""A task of verify always gives its report: whoever leaves, refuses or is damaged hides nothing of others."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import msgspec
import pyarrow
import pytest
from pyspark.sql import SparkSession
from tests.links.support import ServeSite
from tests.spark.support_verify import World

from floodmark.codec.values import decode_value, encode_value
from floodmark.divergence.comparing import compare_keys
from floodmark.divergence.outcome import Outcome, tell_doubts
from floodmark.host.catalog import NamespaceRow
from floodmark.host.verifying import LocalVerification
from floodmark.model.change import Stamp
from floodmark.model.errors import ClockSkew, Corruption, FloodmarkError, InvalidArgument, NotAllowed
from floodmark.model.ranges import KeyRange
from floodmark.model.record import Repair
from floodmark.spark import SiteAddress
from floodmark.spark.jobs import verify
from floodmark.spark.jobs.verifying import comparing as verifying
from floodmark.spark.jobs.verifying.comparing import REPORT, Comparing, ComparisonReport, RangeComparison
from floodmark.spark.jobs.verifying.verify import ComparedSites, Verification
from floodmark.spark.jobs.verifying.watch import Watcher

MAX_LAG = timedelta(hours=1)
AWAY = SiteAddress(location="grpc://127.0.0.1:1", timeout=timedelta(seconds=1))


@pytest.fixture
def world(serve_site: ServeSite) -> World:
    world = World(serve_site, ("oslo", "rome", "bonn"))
    world.fill()
    return world


def plan(sites: ComparedSites, namespace: str = "users") -> list[RangeComparison]:
    """A range that is the whole namespace."""
    look = sites.look(namespace, sites.sites)
    assert look is not None
    return [replace(sites.plan(look, 1, history=True)[0], keys=KeyRange())]


def run_task(
    ranges: Sequence[RangeComparison], *, repair: bool = False, rows: bool = False
) -> ComparisonReport:
    """What a task says of whole namespaces, in this process."""
    task = Comparing(ranges=ranges, sample=20, repair=repair, rows=rows)
    batches = list(task([pyarrow.RecordBatch.from_pydict({"id": [0]})]))
    (told,) = [row for batch in batches for row in batch.column(REPORT).to_pylist() if row is not None]
    return msgspec.msgpack.decode(told, type=ComparisonReport)


def drifts_of(report: ComparisonReport) -> dict[tuple[str, str], int]:
    return {pair: tally.drift for pair, tally in report.tallies.items()}


@pytest.mark.slow
def test_a_site_that_is_gone_when_a_task_begins_hides_no_drift_of_the_others(world: World) -> None:
    world.forget("rome", "users", b"oslo-07")
    with ComparedSites(world.addresses) as sites:
        ranges = plan(sites)
        world.served["bonn"].server.close()
        report = run_task(ranges)
    assert drifts_of(report) == {("oslo", "rome"): 1}
    assert [drift.key for drift in report.sample] == [b"oslo-07"]
    assert [doubt.partition(":")[0] for doubt in tell_doubts(report.doubts)] == [
        "'users' of bonn cannot be compared"
    ]


def test_a_stamp_that_is_damaged_beyond_what_spark_can_count_is_reported(world: World) -> None:
    found = world.find("rome", "users", b"oslo-07")
    record = decode_value(found.stored)
    assert record.origin is not None
    damaged = Stamp(record.origin.version | 1 << 63, record.origin.site)
    world.overwrite("rome", "users", b"oslo-07", found.version, encode_value(b"rotten", origin=damaged))
    with ComparedSites(world.addresses) as sites:
        report = run_task(plan(sites), repair=True, rows=True)
    assert sum(drifts_of(report).values()) == 2


def test_a_damaged_record_at_one_site_hides_no_drift_of_the_others(world: World) -> None:
    world.forget("rome", "users", b"oslo-07")
    version = world.find("bonn", "users", b"bonn-00").version
    world.overwrite("bonn", "users", b"bonn-00", version, b"damaged\x08")
    with ComparedSites(world.addresses) as sites:
        report = run_task(plan(sites), repair=True)
    assert drifts_of(report)["oslo", "rome"] == 1
    assert any("not all of 'users' of bonn was compared" in doubt for doubt in tell_doubts(report.doubts))
    assert report.repair is not None
    assert report.repair.repaired == 1
    assert world["rome"].namespace("users").get(b"oslo-07") == b"first"


@pytest.mark.parametrize("error", [ClockSkew, InvalidArgument])
def test_a_key_that_a_site_does_not_take_is_named_and_the_others_are_repaired(
    world: World, monkeypatch: pytest.MonkeyPatch, error: type[FloodmarkError]
) -> None:
    take = LocalVerification.repair_records

    def refuse(self: LocalVerification, namespace: str, repairs: list[Repair]) -> list[bool]:
        if any(each.key == b"oslo-03" for each in repairs):
            raise error("not this one")
        return take(self, namespace, repairs)

    monkeypatch.setattr(LocalVerification, "repair_records", refuse)
    for number in range(10):
        world.forget("rome", "users", b"oslo-%02d" % number)
    with ComparedSites(world.addresses) as sites:
        report = run_task(plan(sites), repair=True)
    assert report.repair is not None
    assert (report.repair.repaired, report.repair.impossible) == (9, 1)
    (problem,) = report.repair.problems
    assert problem == "b'oslo-03': rome does not take it: not this one"
    assert {pair: tally.drift for pair, tally in report.left.items()} == {
        ("oslo", "rome"): 1,
        ("oslo", "bonn"): 0,
        ("rome", "bonn"): 1,
    }


def test_a_site_that_may_not_be_repaired_is_reported_with_all_that_was_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> list[bool]:
        raise NotAllowed("read only")

    monkeypatch.setattr(LocalVerification, "repair_records", refuse)
    for number in range(10):
        world.forget("rome", "users", b"oslo-%02d" % number)
    with ComparedSites(world.addresses) as sites:
        report = run_task(plan(sites), repair=True)
    assert report.repair is not None
    assert (report.repair.repaired, report.repair.impossible) == (0, 10)
    assert drifts_of(report)["oslo", "rome"] == 10


def test_what_cannot_be_looked_at_again_counts_as_it_was_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object, __: str, keys: list[bytes]) -> object:
        if b"oslo-03" in keys:
            raise Corruption("damaged meanwhile")
        return compare_keys(*found, keys)

    with ComparedSites(world.addresses) as sites:
        found = [site.host for site in sites.sites], "users"
        monkeypatch.setattr(verifying, "compare_keys", refuse)
        for number in range(5):
            world.forget("rome", "users", b"oslo-%02d" % number)
        report = run_task(plan(sites), repair=True)
    assert {pair: tally.drift for pair, tally in report.left.items()} == {
        ("oslo", "rome"): 1,
        ("oslo", "bonn"): 0,
        ("rome", "bonn"): 1,
    }
    assert report.doubts == ["repaired keys of 'users' were not compared again: damaged meanwhile"]


def test_each_key_is_repaired_once_whatever_pairs_it_has_drifted_in(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some keys are lost at one site and altered at another: what waits for a horizon comes with the rest."""
    monkeypatch.setattr(verifying, "REPAIRED_AT_ONCE", 10)
    for number in range(40):
        key = b"oslo-%02d" % number
        world.forget("rome", "users", key)
        if number % 2:
            found = world.find("bonn", "users", key)
            rotten = encode_value(b"rotten", origin=decode_value(found.stored).origin)
            world.overwrite("bonn", "users", key, found.version, rotten)
    with ComparedSites(world.addresses) as sites:
        report = run_task(plan(sites), repair=True)
    assert report.repair is not None
    assert (report.repair.repaired, report.repair.changed_meanwhile, report.repair.impossible) == (40, 0, 0)
    assert [tally.compared for tally in report.left.values()] == [40] * 3
    assert sum(tally.drift for tally in report.left.values()) == 0
    for name in ("rome", "bonn"):
        users = world[name].namespace("users")
        assert {users.get(b"oslo-%02d" % number) for number in range(40)} == {b"first"}


def test_damage_of_a_stamp_is_found_and_mended_or_its_key_is_named(world: World) -> None:
    for key, ahead, turned in ((b"oslo-01", 1 << 40, 0), (b"oslo-02", 0, 128)):
        found = world.find("rome", "users", key)
        origin = decode_value(found.stored).origin
        assert origin is not None
        rotten = encode_value(b"rotten", origin=Stamp(origin.version + ahead, origin.site ^ turned))
        world.overwrite("rome", "users", key, found.version, rotten)
        world.forget("bonn", "users", key)
    with ComparedSites(world.addresses) as sites:
        report = run_task(plan(sites), repair=True)
    assert report.repair is not None
    assert (report.repair.repaired, report.repair.impossible) == (2, 0)
    held = {
        name: [site.namespace("users").get(b"oslo-%02d" % n) for n in (1, 2)]
        for name, site in world.sites.items()
    }
    assert held == {"oslo": [b"first"] * 2, "rome": [b"first", b"rotten"], "bonn": [b"first"] * 2}
    (doubt,) = tell_doubts(report.doubts)
    assert doubt.startswith("b'oslo-02' of 'users' at oslo or rome has a stamp of site")


# The driver


def test_of_three_sites_one_that_merges_in_another_way_is_left_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ComparedSites(world.addresses) as sites:
        host = sites.sites[0].host
        find = host.namespaces.find_namespace

        def find_other(name: str) -> NamespaceRow:
            return msgspec.structs.replace(find(name), merge="fields")

        monkeypatch.setattr(host.namespaces, "find_namespace", find_other)
        look = sites.look("users", sites.sites)
        assert look is not None
        assert [site.name for site in look.sites] == ["rome", "bonn"]
        assert [doubt.partition(":")[0] for doubt in tell_doubts(sites.doubts)] == [
            "'users' has several merge policies"
        ]


def test_a_site_that_shares_nothing_was_named_in_vain(
    world: World, serve_site: ServeSite, spark: SparkSession
) -> None:
    alien = serve_site("alien")
    alien.site.create_namespace("users").put(b"x", b"y")
    with ComparedSites([*world.addresses, SiteAddress(location=alien.url)]) as sites:
        assert len(Verification(sites, spark).look(None)) == 3
        assert [doubt.partition(":")[0] for doubt in tell_doubts(sites.doubts)] == [
            "alien was compared in no namespace"
        ]
    with ComparedSites(world.addresses) as sites:
        Verification(sites, spark).look(None)
        assert sites.doubts == []


def test_who_does_not_answer_is_in_doubt_also_when_the_look_begins_anew(world: World) -> None:
    with ComparedSites([*world.addresses, AWAY]) as sites:
        (away,) = sites.doubts
        assert sites.look("nowhere", sites.sites) is None
        assert len(sites.doubts) > 1
        sites.begin_anew()
        assert sites.doubts == [away]


@pytest.mark.slow
def test_a_site_that_leaves_before_the_tasks_begin_is_in_doubt_and_the_others_are_compared(
    world: World, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.forget("rome", "users", b"oslo-07")
    divide = ComparedSites.plan

    def plan_and_leave(self: ComparedSites, *arguments: object, **options: object) -> list[RangeComparison]:
        ranges = divide(self, *arguments, **options)  # type: ignore[arg-type]
        world.served["bonn"].server.close()
        return [replace(ranges[0], keys=KeyRange())]

    monkeypatch.setattr(ComparedSites, "plan", plan_and_leave)
    summary = verify(world.addresses, ["users"], max_lag=MAX_LAG, spark=spark)
    assert (summary.outcome, summary.drift) == (Outcome.DRIFT, 1)
    assert any("'users' of bonn cannot be compared" in doubt for doubt in summary.doubts)


@pytest.mark.slow
def test_watch_goes_on_when_a_record_is_damaged_and_does_not_vouch_for_a_site_that_is_gone(
    world: World, spark: SparkSession
) -> None:
    watcher = Watcher(world.addresses, ["users", "counts"], spark, timedelta(hours=24), None)
    assert watcher.take_pass(20, MAX_LAG).outcome is Outcome.AGREE
    world["oslo"].namespace("users").put(b"bad", b"1")
    world["oslo"].namespace("counts").add(b"all", 1)
    world.link_all()
    sound = world.find("rome", "users", b"bad")
    world.overwrite("rome", "users", b"bad", sound.version, b"zz\x7f")
    for _ in range(2):
        damaged = watcher.take_pass(20, MAX_LAG)
        assert (damaged.whole, damaged.outcome) == (False, Outcome.UNKNOWN)
        assert any("the changed keys of 'users' were not compared" in doubt for doubt in damaged.doubts)
        assert {pair.namespace for pair in damaged.pairs} == {"counts"}
    world.overwrite("rome", "users", b"bad", sound.version, sound.stored)
    mended = watcher.take_pass(20, MAX_LAG)
    assert (mended.whole, mended.outcome) == (False, Outcome.AGREE)
    assert sum(pair.compared for pair in mended.pairs if pair.namespace == "users") == 3
    world.served["bonn"].server.close()
    for whole in (True, False):
        alone = watcher.take_pass(20, MAX_LAG)
        assert (alone.whole, alone.outcome) == (whole, Outcome.UNKNOWN)
        assert any("cannot be compared" in doubt for doubt in alone.doubts)
    watcher.close()

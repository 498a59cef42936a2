"""Verify on Spark finds every key that has drifted and no other, while sites write, lag, stop and collect."""

import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread

import msgspec
import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession
from tests.cli.support import run
from tests.cli.test_tutorial import find_blocks, find_commands, is_as_shown
from tests.links.support import POLICIES, ServeSite, require_equal
from tests.spark.support_garbage import collect_old
from tests.spark.support_verify import FAULTS, KEYS, World, forget
from tests.spark.test_operations import PAGES, Machines, machines

from floodmark.divergence.comparing import Vantage, take_vantage
from floodmark.divergence.outcome import Outcome, tell_doubts
from floodmark.host.comparisons import ComparisonNote
from floodmark.host.embedded import EmbeddedHost
from floodmark.host.examination import Severity
from floodmark.host.ports import Host, NamespaceUpdate
from floodmark.model.errors import InvalidArgument, StorageFailed
from floodmark.replication.topology import SharedNamespace
from floodmark.server.console.watching import SiteFrame, SiteWatch, find_alarms
from floodmark.spark import SiteAddress
from floodmark.spark.jobs import VerifySummary, verify, watch
from floodmark.spark.jobs.verifying.comparing import DRIFT_ROWS
from floodmark.spark.jobs.verifying.verify import ComparedSites

__all__ = ["machines"]

SHORT = timedelta(milliseconds=1)


@pytest.fixture
def world(serve_site: ServeSite) -> World:
    world = World(serve_site)
    world.fill()
    return world


def found_in(summary: VerifySummary) -> list[tuple[str, bytes, str]]:
    return [(each.namespace, each.drift.key, str(each.drift.verdict)) for each in summary.sample]


@pytest.mark.slow
def test_every_planted_fault_is_found_and_mended_and_nothing_else(
    world: World, spark: SparkSession, tmp_path: Path
) -> None:
    planted = sorted(plant(world) for plant in FAULTS.values())
    world["oslo"].namespace("users").put(b"under way", b"1")
    summary = verify(
        world.addresses,
        report=str(tmp_path / "report"),
        history=True,
        max_lag=timedelta(hours=1),
        spark=spark,
    )
    assert sorted(found_in(summary)) == planted
    assert (summary.outcome, summary.lag, summary.drift) == (Outcome.DRIFT, 1, len(planted))
    assert sum(pair.compared for pair in summary.pairs if pair.namespace == "users") == 2 * KEYS + 7

    report = pyarrow.parquet.read_table(tmp_path / "report")
    assert report.schema.names == DRIFT_ROWS.names
    rows = report.to_pylist()
    assert sorted((row["namespace"], row["key"], row["verdict"]) for row in rows) == planted
    for row in rows:
        assert (row["left_site"], row["right_site"]) == ("oslo", "rome")
        assert row["left_digest"] != row["right_digest"]
        assert {site for site, _ in row["left_mark"]} == {world["oslo"].id, world["rome"].id}

    repaired = verify(world.addresses, repair=True, max_lag=timedelta(hours=1), spark=spark)
    assert repaired.repair is not None
    assert (repaired.repair.repaired, repaired.repair.impossible) == (len(planted), 0)
    assert (repaired.outcome, repaired.drift) == (Outcome.AGREE, len(planted))
    world.link_all()
    require_equal(list(world.sites.values()))
    assert world["rome"].namespace("users").get(b"corrupted") == b"sound"
    assert world["rome"].namespace("users").get(b"resurrected") is None
    assert world["rome"].namespace("counts").get(b"visits") == 43


@pytest.mark.slow
def test_change_that_was_lost_and_written_over_is_in_the_history(world: World, spark: SparkSession) -> None:
    users = world["oslo"].namespace("users")
    users.put(b"key", b"1")
    lost = world["oslo"].now()
    with pytest.MonkeyPatch.context() as patch:
        # What comes to Rome in this step goes nowhere.
        patch.setattr(world["rome"].host.router, "apply", lambda *_, **__: 0)
        world.link("oslo", "rome")
    world["rome"].heartbeat()
    users.put(b"key", b"2")
    world.link_all()
    assert verify(world.addresses, ["users"], spark=spark).outcome is Outcome.AGREE
    summary = verify(world.addresses, ["users"], history=True, spark=spark)
    assert summary.outcome is Outcome.DRIFT
    (found,) = summary.differences
    assert (found.difference.key, found.difference.other, str(found.difference.kind)) == (
        b"key",
        "rome",
        "lost",
    )
    assert found.difference.stamp.version < lost


@pytest.mark.slow
def test_histories_are_compared_across_data_sets(world: World, spark: SparkSession) -> None:
    oslo, rome = world["oslo"], world["rome"]
    users = oslo.namespace("users")

    def lose(key: bytes) -> None:
        """Write a key at Oslo whose change never comes to Rome."""
        users.put(key, b"lost")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rome.host.router, "apply", lambda *_, **__: 0)
            world.link("oslo", "rome")
        rome.heartbeat()

    # What is older than the data set counts no more.
    lose(b"before")
    base = oslo.now()
    lose(b"since the base")
    rome.namespace("users").put(b"rome since", b"not lost")
    world.link_all()
    oslo.generations.publish("users", {b"before": b"row", b"row": b"row"}, base=base, others=[rome])
    lose(b"since the swap")
    for number in range(2):
        for key in (b"before", b"since the base", b"since the swap"):
            users.put(key, b"again")
        world.link_all()
        summary = verify(world.addresses, ["users"], history=True, spark=spark)
        assert (summary.doubts, summary.drift, summary.lag) == ([], 0, 0)
        if number == 0:
            found = sorted(each.difference.key for each in summary.differences)
            assert (summary.outcome, found) == (Outcome.DRIFT, [b"since the base", b"since the swap"])
            oslo.generations.publish("users", {b"row": b"next"}, others=[rome])
    assert (summary.outcome, summary.differences) == (Outcome.AGREE, [])


@pytest.mark.slow
def test_data_sets_that_some_sites_lack_or_get_meanwhile_are_no_drift(
    world: World, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    oslo, rome = world["oslo"], world["rome"]
    rows = {b"oslo-%02d" % number: b"published" for number in range(10, 30)}

    def publish_meanwhile(site: Host, namespace: str) -> Vantage:
        vantage = take_vantage(site, namespace)
        if (namespace, site.identity.site) == ("users", "rome"):
            oslo.generations.publish("users", rows, others=[rome])
            oslo.namespace("users").put(b"oslo-00", b"since")
        return vantage

    with monkeypatch.context() as patched:
        patched.setattr("floodmark.spark.jobs.verifying.verify.take_vantage", publish_meanwhile)
        before = verify(world.addresses, ["users"], spark=spark)
    assert (before.drift, before.lag) == (0, 0)
    assert before.pairs[0].compared == 2 * KEYS
    world.link_all()
    assert verify(world.addresses, ["users"], spark=spark).outcome is Outcome.AGREE
    world.forget("rome", "users", b"oslo-10")
    lost = verify(world.addresses, ["users"], spark=spark)
    assert found_in(lost) == [("users", b"oslo-10", "missing_right")]
    oslo.generations.publish("users", {b"oslo-10": b"again"}, without=["rome"])
    behind = verify(world.addresses, ["users"], max_lag=timedelta(hours=1), spark=spark)
    assert (behind.outcome, behind.drift, behind.lag) == (Outcome.AGREE, 0, 21)
    for _ in range(2):
        oslo.heartbeat()
        rome.heartbeat()
        world.link_all()
    assert dict(rome.namespace("users").scan()) == {b"oslo-10": b"again"}
    assert verify(world.addresses, ["users"], spark=spark).outcome is Outcome.AGREE


@pytest.mark.slow
def test_three_sites_are_compared_each_with_each(serve_site: ServeSite, spark: SparkSession) -> None:
    world = World(serve_site, ("oslo", "rome", "bonn"))
    world.fill()
    world.forget("bonn", "users", b"oslo-07")
    world["bonn"].namespace("users").put(b"of bonn alone", b"1")
    summary = verify(world.addresses, spark=spark)
    assert found_in(summary) == [("users", b"oslo-07", "missing_right")] * 2
    numbers = {(pair.left, pair.right): pair for pair in summary.pairs if pair.namespace == "users"}
    assert {pair: (each.drift, each.lag) for pair, each in numbers.items()} == {
        ("oslo", "rome"): (0, 0),
        ("oslo", "bonn"): (1, 1),
        ("rome", "bonn"): (1, 1),
    }
    assert verify(world.addresses, repair=True, spark=spark).outcome is Outcome.AGREE
    world.link_all()
    require_equal(list(world.sites.values()))


@pytest.mark.slow
def test_console_shows_a_comparison_while_it_runs_and_what_it_found(
    world: World, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    rome = world["rome"].host
    assert isinstance(rome, EmbeddedHost)
    console, note = SiteWatch("rome", world.urls[1], lambda: rome), rome.comparisons.note
    seen: list[SiteFrame] = []

    def note_and_look(report: ComparisonNote, now_ms: int) -> None:
        note(report, now_ms)
        assert console.look()
        seen.append(console.frame(0))

    # What a console shows after each report of the job, which come over the wire.
    monkeypatch.setattr(rome.comparisons, "note", note_and_look)
    world.forget("rome", "users", b"oslo-07")
    assert verify(world.addresses, spark=spark).outcome is Outcome.DRIFT
    overviews = [frame.overview for frame in seen if frame.overview is not None]
    running = [each.running_comparison for each in overviews[:-1] if each.running_comparison is not None]
    assert len(running) == len(overviews) - 1 > 0
    assert {tuple(each.report.sites) for each in running} == {("oslo", "rome")}
    assert all(each.whole_comparison is None for each in overviews[:-1])
    last = overviews[-1]
    assert last.running_comparison is None
    assert last.whole_comparison is not None
    told = last.whole_comparison.report
    assert (told.outcome, told.drift, told.sample) == ("drift", 1, ["users/oslo-07"])
    alarms = {alarm.finding.check: alarm.finding.severity for alarm in find_alarms(seen[-1:])}
    assert alarms["verify"] is Severity.PROBLEM


@pytest.fixture
def busy(world: World) -> Iterator[World]:
    """Both sites write without a pause, and the links run."""
    stop = Event()
    failures: list[BaseException] = []

    def guarded(work: object) -> Thread:
        def loop() -> None:
            number = 0
            try:
                while not stop.is_set():
                    number += 1
                    work(number)  # type: ignore[operator]
            except BaseException as failure:
                failures.append(failure)

        return Thread(target=loop, daemon=True)

    def write(name: str) -> object:
        users, profiles, counts = (world[name].namespace(each) for each in POLICIES)

        def work(number: int) -> None:
            key = b"key-%d" % (number % 50)
            users.put_many({key: b"%d" % number, b"%s-%02d" % (name.encode(), number % KEYS): b"new"})
            if number % 7 == 0:
                users.delete(key)
            profiles.update(key, {name: number})
            counts.add(key, 1)
            stop.wait(0.002)

        return work

    def collect(_: int) -> None:
        for site in world.sites.values():
            site.heartbeat()
            site.collect_garbage()
        stop.wait(0.05)

    for site in world.sites.values():
        # Long enough for the links, which hold nothing here.
        retention = NamespaceUpdate(retention=timedelta(seconds=2))
        site.host.namespaces.update_namespace("users", retention)
    with ExitStack() as stack:
        for work in (write("oslo"), write("rome"), lambda _: world.link_all(), collect):
            thread = guarded(work)
            stack.callback(thread.join)
            thread.start()
        stack.callback(stop.set)
        yield world
    assert failures == []


@pytest.mark.slow
def test_no_drift_is_reported_while_sites_write_copy_and_collect(busy: World, spark: SparkSession) -> None:
    lag = 0
    for _ in range(2):
        summary = verify(busy.addresses, spark=spark)
        assert (summary.outcome, found_in(summary), summary.doubts) == (Outcome.AGREE, [], [])
        lag += summary.lag
    # Otherwise nothing was under way, and the test has shown nothing.
    assert lag > 0


@pytest.mark.slow
def test_lag_of_a_site_that_has_stopped_cannot_be_told_from_loss(world: World, spark: SparkSession) -> None:
    world["oslo"].namespace("users").put(b"new", b"1")
    world["oslo"].namespace("users").delete(b"oslo-00")
    for site in world.sites.values():
        collect_old(site)
    summary = verify(world.addresses, spark=spark)
    assert (summary.outcome, summary.lag, summary.drift) == (Outcome.AGREE, 2, 0)
    late = verify(world.addresses, max_lag=SHORT, spark=spark)
    assert (late.outcome, late.drift) == (Outcome.UNKNOWN, 0)
    assert any("rome has the changes in 'users' of oslo only up to" in doubt for doubt in late.doubts)


@pytest.mark.slow
def test_what_cannot_be_compared_is_said_and_the_rest_is_compared(
    world: World, serve_site: ServeSite, spark: SparkSession
) -> None:
    world.forget("rome", "users", b"oslo-07")
    damaged = world.find("rome", "profiles", b"oslo-1").version
    world.overwrite("rome", "profiles", b"oslo-1", damaged, b"damaged\x08")
    away = SiteAddress(location="grpc://127.0.0.1:1", timeout=timedelta(seconds=1))
    named = replace(away, location="grpc://127.0.0.1:2", name="bonn")
    alone = serve_site("alone")
    alone.site.create_namespace("users", merge="counter")
    summary = verify([*world.addresses, away, named], spark=spark)
    assert summary.outcome is Outcome.DRIFT
    assert "127.0.0.1:1 cannot be compared" in summary.doubts[0]
    assert summary.doubts[1].startswith("bonn cannot be compared: no answer from grpc://127.0.0.1:2")
    assert any(
        "not all of 'profiles' of rome was compared: key b'oslo-1' of namespace" in each
        for each in summary.doubts
    )
    stranger = verify(
        [world.addresses[0], SiteAddress(location=alone.url)], ["users", "nowhere"], spark=spark
    )
    assert (stranger.outcome, stranger.pairs) == (Outcome.UNKNOWN, [])
    assert any("'users' of alone cannot be compared" in doubt for doubt in stranger.doubts)
    assert any("'nowhere' of oslo cannot be compared" in doubt for doubt in stranger.doubts)
    nothing = verify([world.addresses[0], SiteAddress(location=alone.url)], spark=spark)
    assert nothing.outcome is Outcome.UNKNOWN
    with pytest.raises(StorageFailed, match="/dev/null/report"):
        verify(world.addresses, report="/dev/null/report", spark=spark)
    for wrong in (world.addresses[:1], [world.addresses[0]] * 2, [SiteAddress(location="data/oslo")] * 2):
        with pytest.raises(InvalidArgument):
            verify(wrong, spark=spark)


def test_namespaces_that_only_some_of_the_sites_share_are_compared_there(serve_site: ServeSite) -> None:
    world = World(serve_site, ("oslo", "rome", "bonn"))
    before = world["oslo"].topology()
    assert before is not None
    for epoch, name, told in ((2, "of-two", world.sites), (3, "of-two-soon", ["oslo"])):
        shared = {**before.namespaces, name: SharedNamespace(sites=("oslo", "rome"))}
        for each in told:
            world[each].set_topology(msgspec.structs.replace(before, epoch=epoch, namespaces=shared))
    with ComparedSites(world.addresses) as sites:
        found = {name: [site.name for site in who] for name, who in sites.shared_namespaces().items()}
        assert found == {
            **{name: ["oslo", "rome", "bonn"] for name in POLICIES},
            "of-two": ["oslo", "rome"],
            "of-two-soon": ["oslo", "rome"],
        }
        assert sites.look("of-two-soon", sites.sites[:2]) is None
        assert "'of-two-soon' of rome cannot be compared" in tell_doubts(sites.doubts)[0]


@pytest.mark.slow
def test_watch_reads_only_what_has_changed_and_finds_what_is_lost_meanwhile(
    world: World, spark: SparkSession
) -> None:
    passes = watch(world.addresses, ["users", "counts"], every=SHORT, spark=spark)
    first = next(passes)
    assert (first.whole, first.outcome) == (True, Outcome.AGREE)
    users = world["oslo"].namespace("users")
    users.put(b"dropped", b"1")
    users.put(b"oslo-00", b"new")
    lagging = next(passes)
    assert (lagging.whole, lagging.outcome, lagging.lag, lagging.drift) == (False, Outcome.AGREE, 2, 0)
    world.link_all()
    world.forget("rome", "users", b"dropped")
    world["rome"].namespace("counts").add(b"all", 1)
    drifted = next(passes)
    assert (drifted.whole, drifted.lag) == (False, 1)
    assert found_in(drifted) == [("users", b"dropped", "missing_right")]
    # It was not written to again, and is still open.
    assert found_in(next(passes)) == [("users", b"dropped", "missing_right")]
    world.link_all()
    users.put(b"dropped", b"2")
    world.link_all()
    mended = next(passes)
    assert (mended.whole, mended.outcome, mended.lag) == (False, Outcome.AGREE, 0)
    assert {point.name.partition("-")[0] for point in world["oslo"].safe_points()} == {"spark/verify"}
    passes.close()
    assert world["oslo"].safe_points() == []


@pytest.mark.slow
def test_watch_begins_anew_where_history_is_gone(world: World, spark: SparkSession) -> None:
    passes = watch(world.addresses, ["users"], every=SHORT, spark=spark)
    next(passes)
    users = world["oslo"].namespace("users")
    for point in world["oslo"].safe_points():
        world["oslo"].host.retention.release_safe_point(point.name)
    world["oslo"].host.namespaces.update_namespace("users", NamespaceUpdate(retention=SHORT))
    users.put(b"oslo-00", b"new")
    users.put(b"oslo-00", b"newer")
    collect_old(world["oslo"])
    again = next(passes)
    assert (again.whole, again.lag, again.outcome) == (True, 1, Outcome.AGREE)
    passes.close()


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_command_says_by_its_exit_code_whether_sites_agree(world: World) -> None:
    agreed = run("verify", *world.urls)
    assert (agreed.code, agreed.lines[-1]) == (0, "the sites agree")
    world.forget("rome", "users", b"oslo-07")
    drifted = run("verify", *world.urls, "--namespace", "users", "--json")
    assert (drifted.code, drifted.json["outcome"]) == (1, "drift")
    (found,) = drifted.json["sample"]
    assert (found["key"], found["verdict"], found["right"]["stamp"]) == ("oslo-07", "missing_right", None)
    assert int(found["left"]["version"]) < int(found["left"]["mark"][str(world["oslo"].id)])
    repaired = run("verify", *world.urls, "--repair")
    assert (repaired.code, repaired.lines[-1]) == (0, "the sites agree again"), repaired.errors
    away = run("--timeout", "1s", "verify", world.urls[0], "grpc://127.0.0.1:1")
    assert (away.code, away.lines[-1]) == (2, "unknown: not all sites could be compared")
    for wrong in (
        ["verify", world.urls[0]],
        ["verify"],
        ["verify", *world.urls, "--watch", "--repair"],
        ["verify", *world.urls, "--every", "5s"],
        ["verify", *world.urls, "--topology", "topology.toml"],
    ):
        assert run(*wrong).code == 64


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_every_command_of_the_page_does_what_it_says(machines: Machines) -> None:
    machines.share("oslo", "rome")
    for name in ("oslo", "rome"):
        machines.sites[name].namespace("users").put(b"of " + name.encode(), b"1")
    machines.put("oslo", "countess")
    machines.link("oslo", "rome")
    machines.link("rome", "oslo")
    forget(machines.sites["rome"], "users", b"ada")
    machines.begin()
    code = 0
    for block in find_blocks((PAGES / "verify.md").read_text("utf-8")):
        for command, shown in find_commands(block.text):
            if command == "echo $?":
                printed = f"{code}\n"
            else:
                program, *words = shlex.split(machines.place(command))
                assert program == "floodmark"
                outcome = run(*words)
                code, printed = outcome.code, outcome.text
            assert is_as_shown(shown, printed), f"line {block.line}: $ {command}\n{printed}"

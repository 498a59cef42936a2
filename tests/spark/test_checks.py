"""Exports, links and feeds on Spark are held against heartbeats: what goes astray is named, once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec
import pytest
from pyspark.sql import SparkSession
from tests.cli.support import run as run_command
from tests.links.support import Served, ServeSite
from tests.server.support import LOOPBACK
from tests.spark.support_backup import address_of

import floodmark
from floodmark.accounting.account import Doubt
from floodmark.accounting.checks import Checks, CheckStatistics, check_step
from floodmark.cli.failures import DONE, FINDING
from floodmark.codec.ordered import encode_namespace
from floodmark.host.embedded import EmbeddedHost
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.stream import ChangeBatch, ChangesRequest
from floodmark.model.version import VERSION_MAX
from floodmark.server import serve
from floodmark.site import Namespace, Site
from floodmark.spark.jobs import export, run_feed
from floodmark.spark.jobs.exports.frames import HISTORY, CountedChanges, FileWriter, add_counted
from floodmark.spark.source.reading import ChangeInterval

LOST: Final = b"lost"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A site whose heart beats when a test says so."""
    site = floodmark.open(tmp_path / "oslo", site="oslo", background=False)
    with serve(site, LOOPBACK) as server:
        yield Served(site=site, server=server, directory=tmp_path / "oslo")


@pytest.fixture
def users(site: Site) -> Namespace:
    return site.create_namespace("users")


class Reading:
    """The changes of a site as a task of Spark gets them, from one step to the next."""

    def __init__(self, served: Served) -> None:
        self._site = served.site
        self._address = address_of(served.url)
        self._since = served.site.host.namespaces.find_namespace("users").created_at

    def step(self, *, parts: int = 1) -> Iterator[CountedChanges]:
        """The changes up to the present, in parts that share the versions and the keys."""
        host = self._site.host
        namespace = host.namespaces.find_namespace("users").id
        prefix, until = encode_namespace(namespace), self._site.resolved_version()
        whole = KeyRange(prefix, prefix_end(prefix))
        ranges = [
            within for each in host.router.maps.map.partitions if (within := each.range.intersect(whole))
        ]
        borders = [self._since + (until - self._since) * number // parts for number in range(parts + 1)]
        for keys in ranges:
            for since, end in pairwise(borders):
                interval = ChangeInterval(namespace, keys, since, end, host.physical_ms(), self._site.id)
                yield CountedChanges(self._address, interval)
        self._since = until


def write_all_sorts(users: Namespace) -> None:
    users.put_many((b"%03d" % number, b"x") for number in range(40))
    for number in range(0, 40, 7):
        users.delete(b"%03d" % number)
    users.put(b"soon", b"gone", ttl=timedelta(seconds=1))
    users.put(b"large", bytes(10_000))


def count_only(changes: CountedChanges, _place: Path) -> bytes:
    for _ in changes:
        pass
    return changes.finish()


def write_files(changes: CountedChanges, place: Path) -> bytes:
    for _ in FileWriter(str(place), HISTORY, "step-")(changes):
        pass
    return changes.finish()


# What goes astray on its way to a task


@contextmanager
def going_astray(rows_of: Callable[[bytes], int]) -> Iterator[None]:
    """For a while a site gives its changes so many times, by their keys."""
    changes = EmbeddedHost.changes

    def fault(batch: ChangeBatch) -> ChangeBatch:
        rows = [row for row, key in enumerate(batch.keys) for _ in range(rows_of(key))]
        return replace(
            batch,
            versions=[batch.versions[row] for row in rows],
            partitions=[batch.partitions[row] for row in rows],
            keys=[batch.keys[row] for row in rows],
            values=[batch.values[row] for row in rows],
        )

    def read(host: EmbeddedHost, request: ChangesRequest) -> Iterator[ChangeBatch]:
        for batch in changes(host, request):
            yield fault(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddedHost, "changes", read)
        yield


@pytest.mark.parametrize("copies", [0, 1, 2])
@pytest.mark.parametrize("stage", [count_only, write_files])
def test_a_task_that_does_not_get_a_change_once_is_found_out(
    served: Served,
    users: Namespace,
    tmp_path: Path,
    stage: Callable[[CountedChanges, Path], bytes],
    copies: int,
) -> None:
    site, reading = served.site, Reading(served)
    site.heartbeat()
    write_all_sorts(users)
    site.heartbeat()
    checks = Checks()
    for _ in range(2):
        counted = add_counted(stage(changes, tmp_path) for changes in reading.step())
        checks = check_step(checks, counted, VERSION_MAX, 0)
        site.split("users", b"020" if len(site.statistics().partitions) == 1 else b"030")
    assert (checks.wrong, checks.reason) == (0, Doubt.FIRST)
    version = users.put(LOST, b"x")
    write_all_sorts(users)
    site.heartbeat()
    with going_astray(lambda key: copies if key.endswith(LOST) else 1):
        counted = add_counted(stage(changes, tmp_path) for changes in reading.step(parts=3))
    checks = check_step(checks, counted, VERSION_MAX, 0)
    assert [finding.since < version <= finding.through for finding in checks.findings] == (
        [] if copies == 1 else [True]
    )
    # All is well again, also for a job that goes on from the stored checks.
    checks = msgspec.json.decode(msgspec.json.encode(checks), type=Checks)
    before = checks.checked
    write_all_sorts(users)
    site.heartbeat()
    counted = add_counted(stage(changes, tmp_path) for changes in reading.step())
    checks = check_step(checks, counted, VERSION_MAX, 0)
    assert len(checks.findings) == (copies != 1)
    assert checks.checked > before


@pytest.mark.parametrize("copies", [0, 1])
def test_merged_records_are_counted(served: Served, copies: int) -> None:
    users = served.site.create_namespace("users", merge="fields")
    served.site.heartbeat()
    users.update(b"ada", {"name": "Ada"})
    served.site.heartbeat()
    users.update(b"ada", {"born": 1815})
    users.update(LOST, {"a": 1})
    served.site.heartbeat()
    (changes,) = Reading(served).step()
    with going_astray(lambda key: copies if key.endswith(LOST) else 1):
        checks = check_step(Checks(), add_counted([count_only(changes, Path())]), VERSION_MAX, 0)
    assert checks.checked + checks.wrong >= 2
    told = [(finding.expected_changes, finding.got_changes) for finding in checks.findings]
    assert told == ([] if copies else [(2, 1)])


# Whole jobs


def run_through_faults(site: Site, users: Namespace, run: Callable[[], CheckStatistics]) -> CheckStatistics:
    """Run a job, each time anew, while all is well, while changes go astray, and afterwards."""
    site.heartbeat()
    write_all_sorts(users)
    site.heartbeat()
    sound = run()
    assert sound.intervals_wrong == 0
    # Feeds begin with a snapshot, other jobs with the first change.
    assert sound.unchecked_reason in (Doubt.FIRST, Doubt.SNAPSHOT)
    write_all_sorts(users)
    lost = users.put(LOST, b"x")
    site.split("users", b"020")
    with going_astray(lambda key: 0 if key.endswith(LOST) else 1):
        assert run().findings == []
    # The next run names what the one before it has lost, by the heartbeat that comes now.
    site.heartbeat()
    write_all_sorts(users)
    doubled = users.put(LOST, b"y")
    site.heartbeat()
    with going_astray(lambda key: 2 if key.endswith(LOST) else 1):
        wrong = run()
    first, second = wrong.findings
    assert first.since < lost <= first.through <= second.since < doubled <= second.through
    assert first.expected_changes == first.got_changes + 1
    assert second.expected_changes == second.got_changes - 1
    # Nothing more happens, and nobody writes.
    site.heartbeat()
    later = run()
    assert later.findings == wrong.findings
    assert later.intervals_checked > wrong.intervals_checked
    return later


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "view"), [("parquet", "history"), ("delta", "current")])
def test_an_export_names_what_went_astray_and_keeps_it(
    served: Served, spark: SparkSession, users: Namespace, tmp_path: Path, kind: str, view: str
) -> None:
    def run() -> CheckStatistics:
        summary = export(
            address_of(served.url),
            "users",
            str(tmp_path / "table"),
            format=kind,  # type: ignore[arg-type]
            view=view,  # type: ignore[arg-type]
            spark=spark,
        )
        return summary.checks

    if view == "current":
        # It begins with a snapshot, of which heartbeats do not tell.
        served.site.heartbeat()
        run()
    run_through_faults(served.site, users, run)


@pytest.mark.usefixtures("spark")
def test_command_says_by_its_exit_code_that_something_went_astray(
    served: Served, users: Namespace, tmp_path: Path
) -> None:
    command = ["export", served.url, "users", str(tmp_path / "table"), "--once"]
    served.site.heartbeat()
    users.put(LOST, b"x")
    served.site.heartbeat()
    with going_astray(lambda key: 0 if key.endswith(LOST) else 1):
        found = run_command(*command)
    assert (found.code, "1 of 1 changes" in found.text + found.errors) == (FINDING, True)
    users.put(b"later", b"y")
    served.site.heartbeat()
    assert run_command(*command).code == DONE


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("runner", ["process", "spark"])
def test_command_for_a_topology_says_by_its_exit_code_what_it_found_wrong_itself(
    served: Served, serve_site: ServeSite, tmp_path: Path, runner: str
) -> None:
    bergen = serve_site("bergen")
    file = tmp_path / "topology.toml"
    file.write_text(
        f"""
        epoch = 1
        sites.oslo = {{id = {served.site.id}, url = "{served.url}"}}
        sites.bergen = {{id = {bergen.site.id}, url = "{bergen.url}"}}
        namespaces.users = {{}}
        """,
        "utf-8",
    )
    command = ["replicate", "--topology", str(file), "--once", "--json", "--runner", runner]
    assert run_command(*command).code == DONE
    users = served.site.namespace("users")
    served.site.heartbeat()
    users.put(LOST, b"x")
    served.site.heartbeat()
    with going_astray(lambda key: 0 if key.endswith(LOST) else 1):
        found = run_command(*command)
    assert (found.code, found.json["wrong"]) == (FINDING, 1)
    users.put(b"later", b"y")
    served.site.heartbeat()
    later = run_command(*command)
    assert (later.code, later.json["wrong"]) == (DONE, 0)
    assert sum(link["findings"] for link in later.json["links"]) == 1


def test_a_feed_on_spark_names_what_went_astray_and_the_site_keeps_it(
    served: Served, spark: SparkSession, users: Namespace
) -> None:
    site = served.site
    site.feeds.create("copy", "users", "blackhole:")

    def run() -> CheckStatistics:
        return run_feed(address_of(served.url), "copy", once=True, spark=spark).checks

    later = run_through_faults(site, users, run)
    assert site.feeds.statistics("copy").checks == later

"""A site as an earlier Floodmark wrote it is read in full, and goes on.

The content is checked against the plain list that `make_site.py` kept while it wrote the site.
"""

import json
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from tests.clock.fakes import FakeTime
from tests.golden.make_site import HERE, Content, Write, write_site

import floodmark
from floodmark import Change, ChangeType, Site, Stamp
from floodmark.codec.changelog import CommitRow, decode_log_key, decode_row
from floodmark.codec.ordered import decode_key
from floodmark.codec.values import decode_value
from floodmark.engine import Row
from floodmark.engine.rocks import RocksEngine
from floodmark.host.secondary import open_directory
from floodmark.host.transaction_port import LogKind
from floodmark.model.errors import FormatTooNew, SiteMismatch, VersionCollected
from floodmark.model.format import FORMAT
from floodmark.model.limits import LOG_INLINE_VALUE_BYTES_MAX
from floodmark.partition import FAMILIES
from floodmark.site import opening

GOLDEN = sorted(path.with_suffix("") for path in HERE.glob("format-*.json"))
SIZE_MAX = 300_000

State = dict[bytes, bytes]


class Golden:
    """A copy of a golden site, and what it must hold."""

    def __init__(self, directory: Path, content: Content) -> None:
        self.directory = directory
        self.content = content
        self.time = FakeTime(content["end_ms"] + 1000)
        numbers = {name: number for number, name in enumerate(content["settings"], start=1)}
        self.ids: dict[str, int] = content.get("ids", numbers)

    def open(self) -> Site:
        return floodmark.open(self.directory, background=False, time_source=self.time)

    def recent(self) -> list[Write]:
        """The writes that garbage collection has left in the change log."""
        return [write for write in self.content["writes"] if write["version"] > self.content["collected"]]

    def state(self, namespace: str, version: int) -> State:
        """What a reader at a version must find, from the list of writes alone."""
        found: State = {}
        for write in self.content["writes"]:
            if write["namespace"] == namespace and write["version"] <= version:
                found.pop(bytes.fromhex(write["key"]), None)
                expires_at, value = write["expires_at"], write["value"]
                faded_at, faded = write.get("fades", (None, None))
                if faded_at is not None and faded_at * 1000 <= version >> 18:
                    value = faded
                if value is not None and (expires_at is None or expires_at * 1000 > version >> 18):
                    found[bytes.fromhex(write["key"])] = bytes.fromhex(value)
        return dict(sorted(found.items()))


@pytest.fixture(params=GOLDEN, ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    directory: Path = request.param
    shutil.copytree(directory, tmp_path / "site")
    content = json.loads(directory.with_suffix(".json").read_text("utf-8"))
    return Golden(tmp_path / "site", cast(Content, content))


@pytest.fixture
def site(golden: Golden) -> Iterator[Site]:
    with golden.open() as opened:
        yield opened


def test_there_is_a_golden_site_of_the_present_format() -> None:
    assert HERE / f"format-{FORMAT}" in GOLDEN


@pytest.mark.parametrize("directory", GOLDEN, ids=lambda path: path.name)
def test_golden_site_is_small_and_holds_nothing_of_the_process_that_wrote_it(directory: Path) -> None:
    files = [file for file in directory.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < SIZE_MAX
    assert not [file.name for file in files if file.name.startswith("LOG") or file.name in ("LOCK", "owner")]
    assert all(any(path.iterdir()) for path in directory.rglob("*") if path.is_dir())


def test_identity_settings_partitions_and_safe_points_are_there(golden: Golden, site: Site) -> None:
    content = golden.content
    statistics = site.statistics()
    assert (site.name, site.id, statistics.format) == (content["site"], content["site_id"], FORMAT)
    assert site.namespaces() == sorted(content["settings"])
    for name, expected in content["settings"].items():
        settings = site.namespace(name).settings
        assert settings.merge == expected["merge"]
        assert (settings.ttl and settings.ttl.total_seconds()) == expected["ttl_seconds"]
        assert settings.retention.total_seconds() == expected["retention_seconds"]
    partitions = [
        [partition.id, partition.range.start.hex(), partition.range.end and partition.range.end.hex()]
        for partition in site.partitions()
    ]
    assert partitions == [list(row) for row in content["partitions"]]
    points = [
        [point.name, point.version, point.expires_at_ms, point.namespace] for point in site.safe_points()
    ]
    assert points == [list(row) for row in content["safe_points"]]


def test_present_records_are_there_with_version_stamp_and_expiry(golden: Golden, site: Site) -> None:
    present = (golden.time.ms << 18) - 1
    for name in site.namespaces():
        users = site.namespace(name).stored
        state = golden.state(name, present)
        assert len(state) >= 1
        assert dict(users.scan()) == state
        assert list(users.scan(reverse=True)) == sorted(state.items(), reverse=True)
        for write in golden.content["writes"]:
            key = bytes.fromhex(write["key"])
            assert users.get(key) == state.get(key) or write["namespace"] != name
        newest = {write["key"]: write for write in golden.content["writes"] if write["namespace"] == name}
        for key, value in state.items():
            record = users.record(key)
            write = newest[key.hex()]
            assert record is not None
            assert (record.value, record.version) == (value, write["version"])
            assert record.stamp == stamp_of(write, site)
            assert record.expires_at == write["expires_at"]


def test_history_is_there_at_every_version_that_was_kept(golden: Golden, site: Site) -> None:
    versions = sorted({write["version"] for write in golden.recent()})
    assert len(versions) > 15
    for version in [golden.content["collected"], *versions]:
        for at in (version, version + 1, version + (900 << 18)):
            for name in site.namespaces():
                view = site.namespace(name).stored.as_of(at)
                assert dict(view.scan()) == golden.state(name, at)


def test_what_was_collected_stays_collected(golden: Golden, site: Site) -> None:
    collected = golden.content["collected"]
    early = {write["namespace"] for write in golden.content["writes"] if write["version"] <= collected}
    for namespace in site.statistics().namespaces:
        if namespace.name not in early:
            continue
        assert namespace.oldest_version == collected
        assert 0 < namespace.collected_horizon < collected
        with pytest.raises(VersionCollected):
            site.namespace(namespace.name).get(b"old", at=collected - 1)
    with pytest.raises(VersionCollected):
        list(site.changes(since=collected - 1))
    assert site.namespace("users").get(b"old") == b"second"


def stamp_of(write: Write, site: Site) -> Stamp:
    return Stamp(*write["origin"]) if "origin" in write else Stamp(write["version"], site.id)


def to_change(write: Write, site: Site) -> Change:
    """A write as a reader gets it now: one that is expired is a deletion."""
    expires_at = write["expires_at"]
    is_expired = expires_at is not None and expires_at * 1000 <= site.host.physical_ms()
    value = None if is_expired else write["value"]
    return Change(
        namespace=write["namespace"],
        key=bytes.fromhex(write["key"]),
        value=None if value is None else bytes.fromhex(value),
        type=ChangeType.DELETE if value is None else ChangeType.UPSERT,
        version=write["version"],
        stamp=stamp_of(write, site),
        partition=write["partition"],
        expires_at=expires_at,
        batch=write.get("batch"),
    )


def test_changes_are_there_across_splits_and_merges(golden: Golden, site: Site) -> None:
    collected = golden.content["collected"]
    expected = [to_change(write, site) for write in golden.recent()]
    assert list(site.changes(since=collected)) == expected
    for name in site.namespaces():
        own = [change for change in expected if change.namespace == name]
        assert list(site.changes(name, since=collected)) == own
    ranged = [
        change for change in expected if change.namespace == "users" and b"user04" <= change.key < b"user11"
    ]
    assert list(site.changes("users", since=collected, start_key=b"user04", end_key=b"user11")) == ranged
    assert len({change.partition for change in ranged}) >= 3
    middle = expected[len(expected) // 2].version
    later = [change for change in expected if change.version > middle]
    assert list(site.changes(since=middle)) == later


def test_transactions_that_were_open_are_open_and_end(golden: Golden, site: Site) -> None:
    expected = golden.content.get("open_transactions", [])
    assert sorted(each.id for each in site.transactions.list(timedelta(0))) == sorted(expected)
    if expected:
        reports = {report.log: report for report in site.transactions.logs()}
        assert [report.holds_batches for report in reports.values()] == [True, True]
        assert reports[LogKind.COORDINATOR].settings.enabled is False
        assert site.subscriptions.statistics("indexer").unacked == 1
        for transaction in expected:
            site.transactions.commit(transaction, [])
        assert site.subscriptions.statistics("indexer").backlog == 0
        assert not any(report.live_records for report in site.transactions.logs())


def rows(engine: RocksEngine, family: str) -> list[Row]:
    return engine.scan(family, b"", None, rows_max=10_000, bytes_max=1 << 30)


def test_every_stored_row_decodes(golden: Golden) -> None:
    """Below the site: nothing in the database is left unread, and the rows that it needs are there."""
    engine = RocksEngine(golden.directory / "engine", FAMILIES)
    data, log, meta, _ = (rows(engine, family) for family in FAMILIES)
    engine.close()
    stored = {decode_key(key): decode_value(value) for key, value in data}
    ids = golden.ids | golden.content.get("physical", {})
    for write in golden.recent():
        namespace = ids[write["namespace"]]
        record = stored[namespace, bytes.fromhex(write["key"]), write["version"]]
        assert record.value.hex() == (write["value"] or "")
        assert (record.deleted, record.expires_at) == (write["value"] is None, write["expires_at"])
    entries = [(*decode_log_key(key), decode_row(decode_log_key(key)[1], row)) for key, row in log]
    commits = [row for _, _, _, row in entries if isinstance(row, CommitRow)]
    heartbeats = [row for _, _, _, row in entries if not isinstance(row, CommitRow)]
    assert len([beat for beat in heartbeats if beat.log is None]) == golden.content["heartbeats"]
    assert len([beat for beat in heartbeats if beat.log is not None]) == golden.content["seals"]
    large = [
        write for write in golden.recent() if len(write["value"] or "") // 2 >= LOG_INLINE_VALUE_BYTES_MAX
    ]
    assert sum(row.values.count(None) for row in commits) == len(large) == 3
    assert {key.partition(b"/")[0] for key, _ in meta} >= {b"clock", b"partitions", b"logs", b"namespaces"}


def test_writing_goes_on(golden: Golden) -> None:
    last = max(write["version"] for write in golden.content["writes"])
    # Even with the clock set back.
    golden.time.ms -= 3_600_000
    with golden.open() as site:
        users = site.namespace("users")
        written = [users.put(key, b"new") for key in (b"ada", b"user06", b"user12")]
        assert min(written) > last
        assert [change.key for change in site.changes("users", since=last)] == [b"ada", b"user06", b"user12"]
        left, right = site.split("users", b"user15")
        site.merge(left, right)
        site.heartbeat()
        before = {name: dict(site.namespace(name).scan()) for name in site.namespaces()}
        assert site.create_namespace("third").put(b"k", b"v") > max(written)
        taken = {*golden.ids.values(), *golden.content.get("physical", {}).values()}
        ids = golden.ids | {"third": max(taken) + 1}
        assert {space.name: space.id for space in site.statistics().namespaces} == ids
    with golden.open() as site:
        assert {name: dict(site.namespace(name).scan()) for name in before} == before
        for point in ("everything", "reader"):
            site.release_safe_point(point)
        golden.time.ms += int(timedelta(days=2).total_seconds()) * 1000
        site.collect_garbage()
        assert dict(site.namespace("users").scan()) == before["users"]


def test_author_of_the_golden_site_still_writes_the_same(golden: Golden, tmp_path: Path) -> None:
    """If this fails, what a site does has changed, not only how it stores it."""
    if golden.content["format"] == FORMAT:
        again = json.loads(json.dumps(write_site(tmp_path / "again")))
        for content in (again, golden.content):
            # The rest of an id is random.
            content["open_transactions"] = [
                "-".join(each.split("-")[:2]) for each in content.get("open_transactions", [])
            ]
        assert again == golden.content


# Formats


def read_format(golden: Golden) -> object:
    return json.loads((golden.directory / "floodmark.json").read_bytes())["format"]


def test_a_site_of_an_earlier_format_is_raised_before_its_database_is_opened(
    golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the new release writes there, an older one that comes later must not look at it."""
    assert read_format(golden) == golden.content["format"]
    found: list[object] = []

    def look(*arguments: Any, **options: Any) -> Any:
        found.append(read_format(golden))
        return RocksEngine(*arguments, **options)

    monkeypatch.setattr(opening, "RocksEngine", look)
    with golden.open() as site:
        assert site.statistics().format == FORMAT
    identity = (golden.directory / "floodmark.json").stat()
    golden.open().close()
    assert found == [FORMAT, FORMAT]
    assert (golden.directory / "floodmark.json").stat() == identity, "it is raised once"


def test_who_only_reads_a_directory_leaves_its_format_alone(golden: Golden) -> None:
    with open_directory(golden.directory) as reader:
        assert reader.identity.format == golden.content["format"]
        for name in golden.content["settings"]:
            assert reader.find_namespace(name).name == name
    assert read_format(golden) == golden.content["format"]


def test_a_site_that_is_asked_for_by_another_name_keeps_its_format(golden: Golden) -> None:
    with pytest.raises(SiteMismatch):
        floodmark.open(golden.directory, site="rome")
    assert read_format(golden) == golden.content["format"]


def test_a_site_that_was_being_raised_when_the_machine_stopped_opens(golden: Golden) -> None:
    (golden.directory / "floodmark.json.new").write_bytes(b'{"site": "os')
    with golden.open() as site:
        assert site.namespace("users").get(b"ada") == b"programmer"
    assert read_format(golden) == FORMAT


def test_a_later_format_is_refused(golden: Golden) -> None:
    identity = golden.directory / "floodmark.json"
    later = json.dumps(json.loads(identity.read_bytes()) | {"format": FORMAT + 1})
    identity.write_text(later)
    for attempt in (golden.open, lambda: open_directory(golden.directory)):
        with pytest.raises(FormatTooNew, match=f"format {FORMAT + 1}.*up to {FORMAT}.*newer Floodmark"):
            attempt()
    assert identity.read_text() == later


def test_topology_and_watermarks_are_there(golden: Golden, site: Site) -> None:
    topology = site.host.membership.topology()
    assert (None if topology is None else topology.epoch) == golden.content.get("epoch")
    for name, entries in golden.content.get("watermarks", {}).items():
        expected = {int(source): through for source, through in entries.items()}
        assert site.host.replication.watermark(name, None) == expected
        (link,) = [link for link in site.replication().links if link.namespace == name]
        assert (link.source, link.through, link.intervals_wrong) == ("rome", *expected.values(), 0)


def test_merged_records_go_on_from_what_they_were(golden: Golden, site: Site) -> None:
    if golden.content["format"] < 2:
        pytest.skip("there were no merged records yet")
    profiles, counts = site.namespace("profiles"), site.namespace("counts")
    profiles.update(b"ada", {"session": None, "name": "Ada King"})
    assert profiles.get(b"ada") == b'{"name":"Ada King","tags":[1,  2],"title":"countess"}'
    counts.add(b"home", -2)
    assert counts.get(b"home") == 40


def test_subscriptions_go_on_from_what_was_acknowledged(golden: Golden, site: Site) -> None:
    for name, versions in golden.content.get("unacknowledged", {}).items():
        assert [commit.version for commit in site.host.subscriptions.find(name).live] == versions

"""Reading a site's directory beside its owner: complete snapshots, no lock, and no skipping in silence."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from tests.clock.fakes import FakeTime
from tests.site import support_pairs
from tests.site.support import node_of
from tests.site.support_pairs import LEFT, RIGHT

import floodmark
from floodmark.codec.columns import RECORDS
from floodmark.codec.ordered import encode_namespace
from floodmark.codec.records import split_values
from floodmark.codec.values import decode_value
from floodmark.host.secondary import DirectoryReader, open_directory
from floodmark.model import errors
from floodmark.model.limits import LOG_INLINE_VALUE_BYTES_MAX
from floodmark.model.ranges import KeyRange, prefix_end
from floodmark.model.stream import ChangesRequest, Way
from floodmark.model.version import Version
from floodmark.site import Site

START_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
NOBODY = 65534
LARGE = bytes(LOG_INLINE_VALUE_BYTES_MAX + 1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "oslo"


@pytest.fixture(autouse=True)
def scratch(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where readers put what they need; at the end of a test all of it must be gone."""
    assert not directory.exists(), "pytest has chosen its own directory before"
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o777)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield path
        assert list(path.iterdir()) == []


def open_site(path: Path, **options: Any) -> Site:
    return floodmark.open(path, **{"site": "oslo", "site_id": 7, "background": False, **options})


def whole(namespace: int) -> KeyRange:
    start = encode_namespace(namespace)
    return KeyRange(start, prefix_end(start))


def snapshot(reader: DirectoryReader, at: Version, name: str = "users", **options: Any) -> pyarrow.Table:
    keys = whole(reader.find_namespace(name).id)
    return pyarrow.Table.from_batches(list(reader.scan_records(keys, at, **options)), RECORDS)


def pairs(table: pyarrow.Table) -> dict[bytes, bytes]:
    values = split_values(table.column("value").combine_chunks()).values.to_pylist()
    return dict(zip(table.column("key").to_pylist(), values, strict=True))


def request_of(reader: DirectoryReader, name: str = "users", **options: Any) -> ChangesRequest:
    namespace = reader.find_namespace(name).id
    return ChangesRequest(**{"keys": whole(namespace), "namespace": namespace, **options})


def changes(reader: DirectoryReader, **options: Any) -> list[tuple[Version, bytes, bytes]]:
    """Versions, user keys and values of all changes that a reader gets."""
    return [
        (version, key[3:], decode_value(stored).value)
        for batch in reader.changes(request_of(reader, **options))
        for version, key, stored in zip(batch.versions, batch.keys, batch.values, strict=True)
    ]


# Nobody has it open


def test_closed_site_is_complete_up_to_its_last_change(directory: Path) -> None:
    with open_site(directory) as site:
        users = site.create_namespace("users")
        users.put_many({b"ada": b"countess", b"bob": b"builder"})
        left, right = site.split("users", b"b")
        users.delete(b"ada")
        last = users.put(b"cleo", b"queen", durability="async")
    with open_directory(directory) as reader:
        assert reader.identity.site == "oslo"
        assert reader.identity.site_id == 7
        assert reader.complete_version() == last
        border = encode_namespace(users.id) + b"b"
        assert reader.partitions() == [(left, KeyRange(b"", border)), (right, KeyRange(border, None))]
        assert pairs(snapshot(reader, last)) == {b"bob": b"builder", b"cleo": b"queen"}
        assert snapshot(reader, last).column("partition").to_pylist() == [right, right]
        everything = snapshot(reader, last, dead=True)
        assert everything.column("key").to_pylist() == [b"ada", b"bob", b"cleo"]
        assert everything.column("version")[2].as_py() == last


def test_site_that_was_killed_is_complete_up_to_what_reached_its_files(directory: Path) -> None:
    child = start_child(directory)
    try:
        rounds = [int(line) for line in (next(child.stdout) for _ in range(10))]  # type: ignore[arg-type]
    finally:
        child.kill()
        child.communicate()
    with open_directory(directory) as reader:
        at = reader.complete_version()
        require_pairs(pairs(snapshot(reader, at)), rounds[-1])
        with open_site(directory) as site:
            assert list(pairs(snapshot(reader, at)).items()) == list(site.namespace("users").scan(at=at))


def test_empty_site_has_nothing_in_it(directory: Path) -> None:
    open_site(directory).close()
    with open_directory(directory) as reader:
        assert reader.complete_version() > 0
        with pytest.raises(errors.NamespaceNotFound, match="there are: none yet"):
            reader.find_namespace("users")


# Beside its owner


def start_child(directory: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, support_pairs.__file__, str(directory)], stdout=subprocess.PIPE, text=True
    )


def require_pairs(found: dict[bytes, bytes], round_least: int) -> int:
    """A snapshot has whole commits, and of two that followed each other never only the second."""
    left, right = ({found.get(key, b"0") for key in pair} for pair in (LEFT, RIGHT))
    assert len(left) == len(right) == 1, found
    ahead, behind = int(left.pop()), int(right.pop())
    assert behind <= ahead <= behind + 1
    assert behind >= round_least
    return behind


@pytest.mark.soak
def test_every_complete_version_of_a_busy_writer_is_consistent(directory: Path) -> None:
    child = start_child(directory)
    assert child.stdout is not None
    seen: list[int] = []
    versions: list[Version] = []
    try:
        for _ in range(3):
            assert next(child.stdout)
        with open_directory(directory) as reader:
            for line, _ in zip(child.stdout, range(300), strict=False):
                versions.append(reader.complete_version())
                # What was announced before the line is complete; a heartbeat comes every third round.
                found = pairs(snapshot(reader, versions[-1]))
                seen.append(require_pairs(found, int(line) - 4))
            # The past stays as it was, for a reader who comes later too.
            with open_directory(directory) as other:
                for at, number in list(zip(versions, seen, strict=True))[::100]:
                    assert require_pairs(pairs(snapshot(other, at)), number) == number
    finally:
        child.kill()
        child.communicate()
    assert versions == sorted(versions)
    assert len(set(seen)) > 50, "the writer made no progress: this proves nothing"


def test_open_site_is_complete_up_to_its_last_heartbeat(directory: Path) -> None:
    with open_site(directory) as site, open_directory(directory) as reader:
        born = reader.complete_version()
        users = site.create_namespace("users")
        first = users.put(b"ada", b"1")
        assert reader.complete_version() == born < first
        heartbeat = site.host.versions.heartbeat()
        second = users.put(b"ada", b"2")
        assert first <= reader.complete_version() == heartbeat.through < second
        assert pairs(snapshot(reader, heartbeat.through)) == {b"ada": b"1"}
        site.close()
        assert reader.complete_version() == second
        assert pairs(snapshot(reader, second)) == {b"ada": b"2"}


def test_reader_takes_no_lock_and_leaves_the_directory_as_it_was(directory: Path) -> None:
    with open_site(directory) as site:
        version = site.create_namespace("users").put(b"ada", b"countess")
    before = contents(directory)
    with open_directory(directory) as reader:
        assert pairs(snapshot(reader, version)) == {b"ada": b"countess"}
        assert contents(directory) == before
        with open_site(directory) as site:
            site.namespace("users").put(b"bob", b"builder")
            site.host.versions.heartbeat()
            assert b"bob" in pairs(snapshot(reader, reader.complete_version()))
    with open_directory(directory) as reader, open_directory(directory) as another:
        assert snapshot(reader, version).equals(snapshot(another, version))


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def test_complete_version_never_goes_back_when_somebody_opens_the_site(directory: Path) -> None:
    with open_site(directory) as site:
        last = site.create_namespace("users").put(b"ada", b"1")
    with open_directory(directory) as reader:
        assert reader.complete_version() == last
        with open_site(directory) as site, open_directory(directory) as late:
            assert reader.complete_version() == last
            # A reader that comes now has not heard yet that all this is complete, but it can see it.
            assert late.complete_version() < last
            assert pairs(snapshot(late, last)) == {b"ada": b"1"}


def test_reader_goes_on_while_its_files_are_rewritten_and_removed(directory: Path) -> None:
    with open_site(directory) as site:
        brief = site.create_namespace("users", retention=timedelta(0))
        rows = {b"key-%05d" % number: b"old" for number in range(30_000)}
        at = brief.put_many(rows)
        site.host.versions.heartbeat()
        with open_directory(directory) as reader:
            at = reader.complete_version()
            batches = reader.scan_records(whole(brief.id), at)
            found = split_values(next(batches).column("value")).values.to_pylist()
            brief.put_many(dict.fromkeys(rows, b"new"))
            site.collect_garbage()
            compact(site)
            for batch in batches:
                found += split_values(batch.column("value")).values.to_pylist()
            assert found == [b"old"] * len(rows)
            # Having caught up, it knows that the old ones are gone.
            site.host.versions.heartbeat()
            newest = reader.complete_version()
            assert set(pairs(snapshot(reader, newest)).values()) == {b"new"}
            with pytest.raises(errors.VersionCollected) as refused:
                snapshot(reader, at)
            assert refused.value.details["oldest"] == reader.oldest_version(brief.id)


def compact(site: Site) -> None:
    engine: Any = node_of(site).engine
    for column in engine._columns.values():
        column.flush()
        column.compact_range(None, None)


def test_reader_follows_its_owner_over_restarts(directory: Path) -> None:
    with open_site(directory) as site:
        site.create_namespace("users").put(b"ada", b"0")
    with open_directory(directory) as reader:
        for number in range(1, 6):
            with open_site(directory) as site:
                site.namespace("users").put(b"ada", b"%d" % number)
                compact(site)
                site.host.versions.heartbeat()
                assert pairs(snapshot(reader, reader.complete_version())) == {b"ada": b"%d" % number}


# Versions that cannot be read


def test_version_that_is_not_there_yet_is_refused(directory: Path) -> None:
    with open_site(directory) as site:
        last = site.create_namespace("users").put(b"ada", b"1")
    with open_directory(directory) as reader:
        with pytest.raises(errors.VersionInFuture, match="the newest that is complete"):
            snapshot(reader, last + 1)
        with open_site(directory) as site:
            later = site.namespace("users").put(b"ada", b"2")
            # It looks again before it refuses.
            assert pairs(snapshot(reader, later)) == {b"ada": b"2"}


def test_trimmed_changes_are_refused(directory: Path) -> None:
    time = FakeTime(START_MS)
    with open_site(directory, time_source=time, log_retention=timedelta(hours=1)) as site:
        users = site.create_namespace("users", retention=timedelta(hours=24))
        first = users.put(b"ada", b"1")
        time.ms += 2 * HOUR_MS
        second = users.put(b"ada", b"2")
        site.collect_garbage()
    with open_directory(directory) as reader:
        with pytest.raises(errors.VersionCollected, match="the change log was trimmed"):
            changes(reader, since=first - 1)
        oldest = reader.oldest_changes_version(users.id)
        assert first < oldest < second
        assert changes(reader, since=oldest) == [(second, b"ada", b"2")]
        # The versions themselves are kept for longer.
        assert reader.oldest_version(users.id) < first
        assert pairs(snapshot(reader, first)) == {b"ada": b"1"}


# Changes


def test_changes_are_those_of_the_site(directory: Path) -> None:
    with open_site(directory) as site:
        users = site.create_namespace("users")
        others = site.create_namespace("others")
        users.put_many({b"%04d" % number: b"x" for number in range(3_000)})
        others.put(b"elsewhere", b"x")
        site.split("users", b"1500")
        users.put(b"large", LARGE)
        third = users.put(b"1499", b"before")
        site.host.versions.heartbeat()
        users.delete(b"1499")
        expected = [(change.version, change.key, change.value or b"") for change in site.changes("users")]
        since_third = [fact for fact in expected if fact[0] > third]
        last = site.host.versions.heartbeat().through
    with open_directory(directory) as reader:
        assert changes(reader) == expected
        assert changes(reader, since=third) == since_third
        assert changes(reader, until=third) == [fact for fact in expected if fact[0] <= third]
        keys = KeyRange(encode_namespace(users.id) + b"1499", encode_namespace(users.id) + b"15")
        assert changes(reader, keys=keys) == [fact for fact in expected if fact[1] == b"1499"]
        batches = list(reader.changes(request_of(reader, heartbeats=True)))
        assert {batch.way for batch in batches} == {Way.LOG}
        assert batches[-1].through == reader.complete_version() >= last
        assert [beat.through for batch in batches for beat in batch.heartbeats if beat.log is None][
            -1
        ] == last
        (batch,) = reader.changes(request_of(reader, since=third, before_images=True))
        assert batch.befores is not None
        assert [before and decode_value(before).value for before in batch.befores] == [b"before"]


def test_changes_of_an_open_site_end_where_it_is_complete(directory: Path) -> None:
    with open_site(directory) as site, open_directory(directory) as reader:
        users = site.create_namespace("users")
        first = users.put(b"ada", b"1")
        through = site.host.versions.heartbeat().through
        second = users.put(b"ada", b"2")
        assert changes(reader, until=second) == [(first, b"ada", b"1")]
        assert list(reader.changes(request_of(reader, since=through))) == []


def test_large_values_of_a_dropped_namespace_are_left_out(directory: Path) -> None:
    time = FakeTime(START_MS)
    with open_site(directory, time_source=time) as site:
        kept = site.create_namespace("users", retention=timedelta(hours=24))
        gone = site.create_namespace("gone", retention=timedelta(0))
        gone.put(b"large", LARGE)
        last = kept.put(b"large", LARGE)
        site.drop_namespace("gone")
        time.ms += 1_000
        site.collect_garbage()
    with open_directory(directory) as reader:
        found = [
            (version, key) for batch in reader.changes(ChangesRequest()) for version, key in rows_of(batch)
        ]
        assert found == [(last, encode_namespace(kept.id) + b"large")]


def rows_of(batch: Any) -> Iterator[tuple[Version, bytes]]:
    return zip(batch.versions, batch.keys, strict=True)


def test_directory_cannot_be_followed(directory: Path) -> None:
    with open_site(directory) as site:
        site.create_namespace("users")
    with open_directory(directory) as reader, pytest.raises(errors.InvalidArgument, match="by its URL"):
        reader.changes(request_of(reader, follow=True))


# What cannot be opened


def damage_identity(path: Path, **fields: object) -> None:
    file = path / "floodmark.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def replace_by_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("chapter one")


@pytest.mark.parametrize(
    "spoil",
    [
        shutil.rmtree,
        empty,
        replace_by_file,
        lambda path: (path / "floodmark.json").unlink(),
        lambda path: (path / "floodmark.json").write_text("{"),
        lambda path: (path / "floodmark.json").write_bytes(b"\xff\xfe"),
        lambda path: damage_identity(path, format=99),
        lambda path: damage_identity(path, site_id=0),
        lambda path: damage_identity(path, site="no name!"),
    ],
)
def test_what_cannot_be_opened_cannot_be_read_either(
    directory: Path, spoil: Callable[[Path], object]
) -> None:
    open_site(directory).close()
    spoil(directory)
    with pytest.raises(errors.CannotOpen) as opening:
        floodmark.open(directory, create=False)
    with pytest.raises(errors.CannotOpen) as reading:
        open_directory(directory)
    assert type(reading.value) is type(opening.value)
    assert str(reading.value) == str(opening.value)


def test_missing_and_damaged_databases_are_told_apart(directory: Path) -> None:
    open_site(directory).close()
    (directory / "engine" / "CURRENT").write_text("nonsense")
    with pytest.raises(errors.Corruption, match="restore the site"):
        open_directory(directory)
    shutil.rmtree(directory / "engine")
    with pytest.raises(errors.StorageFailed, match="holds no database"):
        open_directory(directory)
    assert not (directory / "engine").exists()


@contextmanager
def other_user() -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(NOBODY)
    except OSError as error:
        pytest.skip(f"root cannot become another user ({error})")
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("mode", [0o555, 0o000], ids=["read-only", "closed"])
def test_directory_without_rights_is_refused_by_name(scratch: Path, mode: int) -> None:
    path = scratch / "site"
    open_site(path).close()
    for file in (path / "engine").iterdir():
        file.chmod(0o444)
    (path / "engine").chmod(mode)
    with other_user(), pytest.raises(errors.CannotOpen, match="denied") as refused:
        open_directory(path)
    assert str(path) in str(refused.value)
    (path / "engine").chmod(0o755)
    shutil.rmtree(path)


def test_closed_reader_reads_nothing(directory: Path) -> None:
    with open_site(directory) as site:
        version = site.create_namespace("users").put(b"ada", b"1")
    reader = open_directory(directory)
    assert pairs(snapshot(reader, version)) == {b"ada": b"1"}
    reader.close()
    reader.close()
    for read in (
        reader.complete_version,
        reader.partitions,
        lambda: reader.find_namespace("users"),
        lambda: list(reader.scan_records(KeyRange(b"\0\0\1", b"\0\0\2"), version)),
        lambda: reader.changes(ChangesRequest()),
    ):
        with pytest.raises(errors.Closed):
            read()


def test_names_of_namespaces_are_looked_up(directory: Path) -> None:
    with open_site(directory) as site:
        users = site.create_namespace("users", ttl=timedelta(hours=1))
        site.create_namespace("gone")
        site.drop_namespace("gone")
    with open_directory(directory) as reader:
        row = reader.find_namespace("users")
        assert (row.id, row.settings) == (users.id, users._row.settings)
        assert reader.oldest_version(row.id) == row.created_at
        with pytest.raises(errors.NamespaceNotFound, match="there are: users"):
            reader.find_namespace("gone")


def test_repr_names_the_directory(directory: Path) -> None:
    open_site(directory).close()
    with open_directory(str(directory)) as reader:
        assert repr(reader) == f"DirectoryReader({str(directory)!r})"

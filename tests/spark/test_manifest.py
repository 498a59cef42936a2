"""Manifests say what they were told or are refused, and parts lead to the versions that they lead to."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from pyarrow import fs

from floodmark.files.directory import Directory, directory_at, find_full_disk
from floodmark.host.catalog import NamespaceRow
from floodmark.model.errors import (
    Corruption,
    FormatTooNew,
    InvalidArgument,
    InvalidVersion,
    StorageFailed,
    StorageFull,
)
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.spark.jobs.backups.manifest import (
    FORMAT,
    MANIFEST,
    ColumnType,
    Manifest,
    PartFile,
    PartKind,
    RowCounts,
    RowSums,
    choose_chain,
    decode_document,
    encode_document,
    find_gaps,
    part_name,
    read_manifest,
    read_manifests,
)
from floodmark.spark.jobs.backups.parts import compare_files, find_strange_files

NAMESPACE = NamespaceRow(id=7, name="users", merge="last_write", ttl_ms=None, retention_ms=5, created_at=3)


def manifest_of(since: Version, version: Version) -> Manifest:
    """A part with changes, or a full one if it is since 0."""
    return Manifest(
        id=f"{since}-{version}",
        kind=PartKind.CHANGES if since else PartKind.FULL,
        site="oslo",
        site_id=1,
        namespace=NAMESPACE,
        since=since,
        version=version,
        keys=KeyRange(b"\x00a", None),
        sums=RowSums(counts=RowCounts(live=1, tombstones=2, expired=3, total=6), digest=-(1 << 63)),
        files=[PartFile("rows-1/part-0.parquet", 17)],
        columns=[ColumnType("key", "binary")],
        watermark={1: version, 200: 5},
        collected_horizon=2,
        safe_point="spark/backup-1",
        created_at=datetime(2026, 1, 2, tzinfo=UTC),
    )


def store(target: Directory, manifest: Manifest) -> None:
    target.directory(manifest.part).publish(MANIFEST, encode_document(manifest))


@pytest.fixture(params=["local", "elsewhere"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Directory:
    """A directory by its path, and one that only Arrow's file systems reach."""
    if request.param == "local":
        return directory_at(str(tmp_path / "backup"))
    elsewhere = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    return Directory("elsewhere://backup", elsewhere, "backup")


# Documents


def test_a_manifest_is_read_as_it_was_written(target: Directory) -> None:
    manifest = manifest_of(0, 9)
    store(target, manifest)
    assert read_manifests(target) == [manifest]


def test_a_part_without_manifest_is_not_complete(target: Directory) -> None:
    target.directory(part_name(PartKind.FULL, 0, 9)).publish("rows", b"")
    assert read_manifest(target, part_name(PartKind.FULL, 0, 9)) is None
    assert read_manifests(target) == []


def test_every_damaged_byte_of_a_manifest_is_noticed() -> None:
    stored = encode_document(manifest_of(0, 9))
    for place in range(len(stored) - 1):
        damaged = bytearray(stored)
        damaged[place] ^= 1
        with pytest.raises((Corruption, FormatTooNew), match=r"m has format|m is damaged"):
            decode_document(bytes(damaged), Manifest, "m")


@pytest.mark.parametrize("cut", [0, 1, 100, -2])
def test_a_manifest_that_was_cut_off_is_refused(cut: int) -> None:
    with pytest.raises(Corruption, match="damaged"):
        decode_document(encode_document(manifest_of(0, 9))[:cut], Manifest, "m")


def test_a_format_that_is_not_known_is_refused_by_its_number() -> None:
    newer = msgspec.structs.replace(manifest_of(0, 9), format=FORMAT + 1)
    with pytest.raises(FormatTooNew, match=f"format {FORMAT + 1}; this Floodmark knows format {FORMAT}"):
        decode_document(encode_document(newer), Manifest, "m")


def test_a_manifest_in_the_directory_of_another_part_is_refused(target: Directory) -> None:
    name = part_name(PartKind.FULL, 0, 10)
    target.directory(name).publish(MANIFEST, encode_document(manifest_of(0, 9)))
    with pytest.raises(Corruption, match=f"{name} holds the manifest of full-0+9"):
        read_manifest(target, name)


def test_a_manifest_can_be_read_by_any_program() -> None:
    document = json.loads(encode_document(manifest_of(9, 12)))["document"]
    assert document["kind"] == "changes"
    assert document["version"] == 12
    assert document["sums"]["counts"] == {"live": 1, "tombstones": 2, "expired": 3, "total": 6}
    assert document["watermark"] == {"1": 12, "200": 5}


# Chains

PARTS = [
    manifest_of(0, 10),
    manifest_of(10, 20),
    manifest_of(20, 30),
    manifest_of(0, 40),
    manifest_of(40, 50),
]


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (10, [(0, 10)]),
        (11, [(0, 10), (10, 20)]),
        (20, [(0, 10), (10, 20)]),
        (30, [(0, 10), (10, 20), (20, 30)]),
        (40, [(0, 40)]),
        (50, [(0, 40), (40, 50)]),
        (None, [(0, 40), (40, 50)]),
    ],
)
def test_the_parts_that_lead_to_a_version_are_chosen(
    at: Version | None, expected: list[tuple[int, int]]
) -> None:
    chain, version = choose_chain(reversed(PARTS), at, "here")
    assert [(part.since, part.version) for part in chain.parts] == expected
    assert version == (at or 50)


@pytest.mark.parametrize("at", [0, 9, 31, 39, 51])
def test_a_version_that_no_part_leads_to_is_refused_with_what_is_possible(at: Version) -> None:
    with pytest.raises(InvalidVersion, match=r"every version in \[10, 30\].* or \[40, 50\]"):
        choose_chain(PARTS, at, "here")


def test_without_a_full_part_nothing_can_be_restored() -> None:
    with pytest.raises(InvalidArgument, match="no complete full backup at here"):
        choose_chain(PARTS[1:3], None, "here")


def test_parts_that_follow_nothing_are_found() -> None:
    assert find_gaps(PARTS) == []
    assert find_gaps([PARTS[0], *PARTS[2:]]) == [PARTS[2]]
    assert find_gaps(PARTS[1:3]) == PARTS[1:3]


# Files


def test_files_that_differ_are_named() -> None:
    files = [PartFile("a", 1), PartFile("b", 2)]
    assert compare_files(files, {"a": 1, "b": 2, MANIFEST: 9}) == []
    assert compare_files(files, {"a": 1}) == ["b is missing"]
    assert compare_files(files, {"a": 1, "b": 1}) == ["b has 1 bytes instead of 2"]
    assert compare_files(files, {"a": 1, "b": 2, "c": 3}) == []
    assert find_strange_files(files, {"a": 1, "b": 2, "c": 3}) == ["c does not belong to it"]


def test_what_a_killed_attempt_has_left_is_not_a_difference() -> None:
    files = [PartFile("rows-2/a", 1)]
    assert find_strange_files(files, {"rows-1/a": 1, "rows-2/a": 1}) == []
    assert find_strange_files(files, {"rows-2/a": 1, "rows-2/b": 1}) == ["rows-2/b does not belong to it"]


def test_a_published_file_replaces_the_one_before(target: Directory) -> None:
    assert target.read("plan.json") is None
    target.publish("plan.json", b"one")
    target.publish("plan.json", b"two")
    assert target.read("plan.json") == b"two"
    assert target.names() == ["plan.json"]


def test_files_are_listed_without_what_readers_pass_over(target: Directory) -> None:
    for name in ("part-0.parquet", "_SUCCESS", ".part-0.parquet.crc"):
        target.directory("rows").publish(name, b"12345")
    assert target.sizes() == {"rows/part-0.parquet": 5}
    assert target.names() == ["rows"]


def test_what_is_removed_is_gone_with_all_that_is_in_it(target: Directory) -> None:
    target.directory("rows").publish("a", b"1")
    target.publish("b", b"2")
    for name in ("rows", "b", "nothing"):
        target.remove(name)
    assert target.names() == []


def test_a_directory_that_is_not_there_is_empty(target: Directory) -> None:
    assert target.names() == []
    assert target.sizes() == {}
    assert target.read("a") is None


def test_spark_is_told_where_a_local_directory_is_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert directory_at("a b").directory("c").url == f"{tmp_path.as_uri()}/a%20b/c"
    assert directory_at(f"{tmp_path.as_uri()}/x").url == f"{tmp_path.as_uri()}/x"


@pytest.mark.parametrize("location", ["s3a://key:secret@bucket/a", "s3://key@bucket/a", "hdfs://u:p@host/a"])
def test_a_secret_in_a_location_is_refused_and_not_repeated(location: str) -> None:
    with pytest.raises(InvalidArgument, match="holds a password") as caught:
        directory_at(location)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("location", ["", "nowhere://a/b"])
def test_what_is_no_directory_is_refused(location: str) -> None:
    with pytest.raises(InvalidArgument):
        directory_at(location)


def test_a_file_in_the_place_of_a_directory_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "backup").write_text("a file")
    with pytest.raises(StorageFailed, match="backup could not be written"):
        directory_at(str(tmp_path / "backup")).publish("plan.json", b"{}")


@pytest.mark.parametrize("reason", ["java.io.IOException: No space left on device", "[x] File too large"])
def test_a_full_disk_is_recognised_in_what_others_say(reason: str) -> None:
    found = find_full_disk("here", reason)
    assert isinstance(found, StorageFull)
    assert "no room left at here" in str(found)
    assert find_full_disk("here", "Connection reset") is None


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no disk here that is always full")
def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    target = directory_at(str(tmp_path))
    target.publish("plan.json", b"before")
    (tmp_path / ".plan.json.new").symlink_to("/dev/full")
    with pytest.raises(StorageFull, match="no room left"):
        target.publish("plan.json", b"x" * 1_000_000)
    assert target.read("plan.json") == b"before"

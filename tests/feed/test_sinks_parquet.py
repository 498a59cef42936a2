"""The directory of a Parquet sink holds each change exactly once, wherever a crash comes."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest
from msgspec.structs import replace
from pyarrow import fs

from floodmark.feed.named.feeds import RangeProgress, recut
from floodmark.feed.sinks.base import SinkContext, open_sink
from floodmark.feed.sinks.parquet import SCHEMA, ChangeFile, ParquetSink, _Held, to_table
from floodmark.files.directory import Directory, directory_at
from floodmark.model.change import Change
from floodmark.model.errors import InvalidArgument, SinkFailed
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version
from floodmark.testing import SimulatedCrash
from floodmark.testing.sinks import EXPIRES_AT, SINCE, change, context, write

CHANGES: Final = [change(number, b"%c" % (97 + number * 7 % 26), b"%d" % number) for number in range(1, 25)]
STEPS_MAX: Final = 400


class FastDirectory(Directory):
    """A directory that does not wait for the disk: a simulated crash loses nothing that was written."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), fs.LocalFileSystem(), str(path))

    def write(self, name: str, content: bytes | pyarrow.Buffer) -> None:
        (self.path / name).write_bytes(content)

    def sync(self, names: Iterable[str]) -> None:
        pass


class CrashingDirectory(FastDirectory):
    """A directory whose step of a number is not done, done, or done by half; then the process is gone."""

    def __init__(self, path: Path, at: int, how: str) -> None:
        super().__init__(path)
        self.steps = 0
        self._at = at
        self._how = how

    def write(self, name: str, content: bytes | pyarrow.Buffer) -> None:
        if self.steps + 1 == self._at and self._how == "half":
            super().write(name, bytes(content)[: len(content) // 2])
        self._step(lambda: FastDirectory.write(self, name, content))

    def rename(self, name: str, target: str) -> None:
        self._step(lambda: FastDirectory.rename(self, name, target))

    def remove(self, name: str) -> None:
        self._step(lambda: FastDirectory.remove(self, name))

    def _step(self, step: Callable[[], None]) -> None:
        self.steps += 1
        if self.steps < self._at:
            step()
            return
        if self.steps == self._at and self._how == "after":
            step()
        raise SimulatedCrash


class Feed:
    """What survives a crash: the directory, and the ranges with the checkpoints that were reported."""

    def __init__(self, directory: Path, cuts: Sequence[bytes], sink_type: type[ParquetSink]) -> None:
        self.directory = directory
        self.ranges = [
            RangeProgress(id=number, keys=keys, checkpoint=SINCE)
            for number, keys in enumerate(tile(cuts), start=1)
        ]
        self._sink_type = sink_type
        self._next_id = len(self.ranges) + 1
        self._seen: dict[str, bytes] = {}

    def cut_anew(self, cuts: Sequence[bytes]) -> None:
        self.ranges = recut(self.ranges, tile(cuts), self._next_id)
        self._next_id += len(self.ranges)

    def run(self, directory: Directory, batch: int, *, reported_every: int, through: int) -> None:
        """Write each range in batches of this many versions; only some of the checkpoints are reported."""
        for index, part in enumerate(self.ranges):
            inside = [each for each in CHANGES if part.keys.contains(each.key)]
            since = part.checkpoint - SINCE
            with closing(self._sink_type(directory, self._context(part))) as sink:
                for number, start in enumerate(range(since, through, batch), start=1):
                    end = min(start + batch, through)
                    write(sink, inside, since=start, through=end)
                    if number % reported_every == 0 or end == through:
                        self.ranges[index] = replace(part, checkpoint=SINCE + end)

    def _context(self, part: RangeProgress) -> SinkContext:
        return context(part.checkpoint - SINCE, range_id=part.id, keys=part.keys)

    def check(self) -> None:
        """No change is there twice, none at or below a reported checkpoint is missing, and no file that a
        reader has seen was changed or removed."""
        held = read(self.directory)
        files = {file.name: file.read_bytes() for file in self.directory.glob("*.parquet")}
        assert self._seen.items() <= files.items(), "a published file was taken back"
        self._seen = files
        assert len(held) == len(set(held)), "a change is there twice"
        for part in self.ranges:
            for each in CHANGES:
                if part.keys.contains(each.key) and each.version <= part.checkpoint:
                    assert (each.version, each.key, each.value) in held, "a change is missing"


def open_parquet(directory: Path, opened: SinkContext | None = None) -> ParquetSink:
    return ParquetSink(directory_at(str(directory)), opened or context())


def tile(cuts: Sequence[bytes]) -> list[KeyRange]:
    return [KeyRange(start, end) for start, end in zip([b"", *cuts], [*cuts, None], strict=True)]


def read(directory: Path) -> list[tuple[int, bytes, bytes]]:
    """What a reader of directories finds."""
    if not directory.exists():
        return []
    table = pyarrow.dataset.dataset(directory, format="parquet").to_table()
    if not table.num_rows:
        return []
    columns = (table[name].to_pylist() for name in ("_commit_version", "key", "value"))
    return list(zip(*columns, strict=True))


def crash_everywhere(directory: Path, sink_type: type[ParquetSink] = ParquetSink) -> int:
    """Crash in the first run at every step, then cut anew and crash again; the number of first crashes."""
    for how in ("before", "half", "after"):
        for at in range(1, STEPS_MAX):
            feed = Feed(directory / f"{how}-{at}", [b"m"], sink_type)
            crashed = run_to_crash(feed, CrashingDirectory(feed.directory, at, how), batch=3, through=11)
            # Elsewhere each time, in the second run; its steps are fewer than these.
            feed.cut_anew([b"g", b"t"])
            later = CrashingDirectory(feed.directory, 1 + at * 7 % 23, how)
            run_to_crash(feed, later, batch=8, through=24)
            feed.run(FastDirectory(feed.directory), 12, reported_every=1, through=24)
            feed.check()
            assert sorted(read(feed.directory)) == [(each.version, each.key, each.value) for each in CHANGES]
            left = [name for name in os.listdir(feed.directory) if name.endswith(".new")]
            assert not left, "something is left behind"
            if not crashed:
                break
        else:
            raise AssertionError("it does not get through")
    return at


def run_to_crash(feed: Feed, directory: CrashingDirectory, *, batch: int, through: int) -> bool:
    try:
        feed.run(directory, batch, reported_every=2, through=through)
    except SimulatedCrash:
        feed.check()
        return True
    feed.check()
    return False


@pytest.mark.slow
def test_each_change_is_there_once_wherever_a_crash_comes(tmp_path: Path) -> None:
    assert crash_everywhere(tmp_path) > 15


def test_the_check_finds_a_sink_that_leaves_staged_files(tmp_path: Path) -> None:
    class Careless(ParquetSink):
        def _remove_staged(self) -> None:
            pass

    with pytest.raises(AssertionError, match="left behind"):
        crash_everywhere(tmp_path, Careless)


def test_the_check_finds_a_sink_that_writes_everything_again(tmp_path: Path) -> None:
    class Forgetful(ParquetSink):
        def _missing(self, changes: Sequence[Change], *, is_by_key: bool) -> list[Change]:
            return list(changes)

    with pytest.raises(AssertionError, match="twice"):
        crash_everywhere(tmp_path, Forgetful)


def test_the_check_finds_a_sink_that_leaves_out_a_batch_of_which_it_holds_some(tmp_path: Path) -> None:
    class Lazy(ParquetSink):
        def _missing(self, changes: Sequence[Change], *, is_by_key: bool) -> list[Change]:
            missing = super()._missing(changes, is_by_key=is_by_key)
            return missing if len(missing) == len(changes) else []

    with pytest.raises(AssertionError, match="missing"):
        crash_everywhere(tmp_path, Lazy)


def test_the_check_finds_a_sink_that_takes_files_back(tmp_path: Path) -> None:
    class Greedy(ParquetSink):
        def _find_held(self) -> list[_Held]:
            for held in super()._find_held():
                (tmp_path / self._directory.location / held.file.name).unlink()
            return []

    with pytest.raises(AssertionError, match=r"taken back|missing"):
        crash_everywhere(tmp_path, Greedy)


def test_the_check_finds_a_sink_that_writes_in_place(tmp_path: Path) -> None:
    class InPlace(ParquetSink):
        def write(self, changes: Sequence[Change], *, since: Version, through: Version) -> None:
            file = ChangeFile.of(self._context.range_id, changes, since, through)
            self._directory.write(file.name, self._encode(to_table(changes)))

    with pytest.raises((AssertionError, pyarrow.ArrowInvalid)):
        crash_everywhere(tmp_path, InPlace)


def test_going_back_by_hand_writes_only_what_is_missing(tmp_path: Path) -> None:
    """A checkpoint in the middle of a file: the file stays, and the changes behind it are added."""
    directory = tmp_path / "changes"
    with closing(open_parquet(directory)) as first:
        write(first, CHANGES, since=0, through=20)
    with closing(open_parquet(directory, context(11, range_id=2))) as second:
        assert len(read(directory)) == 20
        write(second, CHANGES, since=11, through=24)
    assert sorted(read(directory)) == [(each.version, each.key, each.value) for each in CHANGES]
    first_file, second_file = sorted(file.name for file in directory.glob("*.parquet"))
    assert first_file == f"changes-000001-{SINCE:020}-{SINCE + 20:020}.parquet"
    assert second_file == f"changes-000002-{SINCE + 20:020}-{SINCE + 24:020}.parquet"


def test_a_file_that_was_removed_by_hand_is_written_again(tmp_path: Path) -> None:
    directory = tmp_path / "changes"
    with closing(open_parquet(directory)) as first:
        for start in range(0, 24, 4):
            write(first, CHANGES, since=start, through=start + 4)
    sorted(directory.glob("*.parquet"))[2].unlink()
    with closing(open_parquet(directory)) as second:
        write(second, CHANGES, since=0, through=24)
    assert sorted(read(directory)) == [(each.version, each.key, each.value) for each in CHANGES]


# What is in the files


def test_rows_have_the_columns_of_change_rows(tmp_path: Path) -> None:
    sink = open_parquet(tmp_path / "changes")
    written = [change(1, b"a", b"1", expires_at=EXPIRES_AT), change(2, b"a", None)]
    write(sink, written, since=0, through=2)
    (name,) = (name for name in os.listdir(tmp_path / "changes") if name.endswith(".parquet"))
    assert name == f"changes-000001-{SINCE:020}-{SINCE + 2:020}.parquet"
    table = pyarrow.parquet.read_table(tmp_path / "changes" / name)
    assert table.schema.equals(SCHEMA)
    assert table.schema.metadata[b"floodmark.feed"] == b"copy"
    put, delete = table.to_pylist()
    assert put["_commit_timestamp"].isoformat() == "2023-11-14T22:13:20+00:00"
    assert put["_expires_at"].timestamp() == EXPIRES_AT
    assert (put["_change_type"], delete["_change_type"]) == ("upsert", "delete")
    assert (put["value"], delete["value"], delete["_expires_at"]) == (b"1", None, None)
    assert (put["_origin_site"], put["_origin_version"], put["_site_partition"]) == (7, SINCE + 1, 65)


def test_an_expiry_beyond_all_calendars_can_still_be_read(tmp_path: Path) -> None:
    sink = open_parquet(tmp_path / "changes")
    write(sink, [change(1, b"a", expires_at=2**63 - 1)], since=0, through=1)
    table = pyarrow.dataset.dataset(tmp_path / "changes", format="parquet").to_table()
    assert table["_expires_at"][0].as_py().year == 9999


@pytest.mark.parametrize("compression", ["zstd", "snappy", "gzip", "none"])
def test_files_are_compressed_as_asked(tmp_path: Path, compression: str) -> None:
    sink = open_sink(f"parquet:{tmp_path}/changes?compression={compression}", context())
    write(sink, CHANGES, since=0, through=24)
    (file,) = (tmp_path / "changes").glob("*.parquet")
    used = pyarrow.parquet.ParquetFile(file).metadata.row_group(0).column(0).compression
    assert used == {"none": "UNCOMPRESSED"}.get(compression, compression.upper())


# Whose directory it is


def test_a_directory_belongs_to_one_feed(tmp_path: Path) -> None:
    directory = tmp_path / "changes"
    write(open_parquet(directory), CHANGES, since=0, through=24)
    with pytest.raises(InvalidArgument, match="'copy'"):
        open_parquet(directory, context(feed="other"))
    assert len(read(directory)) == 24


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.parquet").write_bytes(b"precious")
    with pytest.raises(InvalidArgument, match="other files"):
        open_parquet(tmp_path)
    assert os.listdir(tmp_path) == ["precious.parquet"]


def test_a_damaged_owner_is_refused(tmp_path: Path) -> None:
    open_parquet(tmp_path / "changes")
    (tmp_path / "changes" / "_floodmark.json").write_text(json.dumps({"site": 1}))
    with pytest.raises(InvalidArgument, match="damaged"):
        open_parquet(tmp_path / "changes")


def test_a_directory_that_cannot_be_made_is_an_error_of_the_sink(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SinkFailed, match="could not be created"):
        open_parquet(tmp_path / "file" / "changes")


def test_a_full_disk_is_an_error_of_the_sink_and_leaves_no_file(tmp_path: Path) -> None:
    class Full(FastDirectory):
        full = False

        def write(self, name: str, content: bytes | pyarrow.Buffer) -> None:
            with self.failing("written"):
                if self.full:
                    raise OSError(28, "No space left on device")
                super().write(name, content)

    directory = Full(tmp_path / "changes")
    sink = ParquetSink(directory, context())
    directory.full = True
    with pytest.raises(SinkFailed, match="No space left"):
        sink.write(CHANGES[:1], since=SINCE, through=SINCE + 1)
    assert read(tmp_path / "changes") == []


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("parquet:", "directory"),
        ("parquet://host/changes", "directory"),
        ("parquet:changes?compression=lzma", "zstd"),
        ("parquet:changes?compresion=zstd", "compression"),
    ],
)
def test_a_uri_that_makes_no_sense_is_refused(uri: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        open_sink(uri, context())


def test_a_reader_of_single_files_gets_each_change_once(tmp_path: Path) -> None:
    directory, seen = tmp_path / "changes", dict[Path, list[dict[str, object]]]()
    for since, through in ((0, 12), (5, 24)):
        with closing(open_parquet(directory, context(since))) as sink:
            write(sink, CHANGES, since=since, through=through)
        for file in directory.glob("*.parquet"):
            seen.setdefault(file, pyarrow.parquet.read_table(file).to_pylist())
    rows = [(row["_commit_version"], row["key"], row["value"]) for rows in seen.values() for row in rows]
    assert sorted(rows) == [(each.version, each.key, each.value) for each in CHANGES]

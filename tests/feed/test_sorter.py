"""The sorter against `sorted`, at every quota, under every fault, and within its memory."""

import os
import resource
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floodmark.feed.reading.sorter import MERGE_RUNS_MAX, Row, Sorter, open_nameless
from floodmark.model.errors import Closed, Corruption, InvalidArgument, StorageFailed, StorageFull
from floodmark.model.limits import KEY_BYTES_MAX, MIB, VALUE_BYTES_MAX
from floodmark.model.version import VERSION_MAX

# Few versions and keys, so that many rows are equal; some keys are prefixes of others.
VERSIONS = st.sampled_from([1, 2, 3, 255, 256, 1 << 18, VERSION_MAX])
KEYS = st.sampled_from([b"", b"a", b"a\x00", b"ab", b"b", b"\xff"])
PARTITIONS = st.integers(0, 2**32 - 1)
# From one row a run and one row a block, over several levels of merging, to no run at all.
QUOTAS = st.sampled_from([1, 400, 1_000, 4_000, 100_000, 64 * MIB])


def ordered(rows: Sequence[Row]) -> list[Row]:
    """What a stable sort by version and key gives."""
    return sorted(rows, key=lambda row: (row[0], row[1]))


def random_rows(count: int, seed: int = 1) -> list[Row]:
    """Rows whose values say in which order they were added."""
    random = Random(seed)
    return [
        (random.randrange(1, 20), bytes(random.choices(b"ab", k=2)), random.randrange(9), b"%d" % index)
        for index in range(count)
    ]


def fill(sorter: Sorter, rows: Sequence[Row]) -> None:
    for row in rows:
        sorter.add_page([row])


class Files:
    """Opens files for a sorter and keeps them at hand, to look into and to damage."""

    def __init__(self) -> None:
        self.opened: list[FileIO] = []

    def __call__(self, directory: Path | None) -> FileIO:
        self.opened.append(open_nameless(directory))
        return self.opened[-1]

    def all_closed(self) -> bool:
        return all(file.closed for file in self.opened)

    def size(self) -> int:
        return os.fstat(self.opened[0].fileno()).st_size


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let the system refuse to write any file beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@given(st.lists(st.tuples(VERSIONS, KEYS, PARTITIONS), max_size=200), QUOTAS, st.integers(0, 400))
def test_it_gives_what_a_stable_sort_gives(
    heads: list[tuple[int, bytes, int]], quota: int, value_bytes: int
) -> None:
    rows = [
        (*head, b"%d:" % index + bytes(index * 7 % (value_bytes + 1))) for index, head in enumerate(heads)
    ]
    with Sorter(memory_bytes_max=quota) as sorter:
        fill(sorter, rows)
        assert list(sorter.rows()) == ordered(rows)


@given(st.lists(st.integers(0, 30), max_size=12), QUOTAS)
def test_pages_and_single_rows_can_be_mixed(sizes: list[int], quota: int) -> None:
    rows = random_rows(sum(sizes))
    rest = iter(rows)
    with Sorter(memory_bytes_max=quota) as sorter:
        for turn, size in enumerate(sizes):
            page = [next(rest) for _ in range(size)]
            if turn % 2:
                fill(sorter, page)
            else:
                sorter.add_page(page)
        assert list(sorter.rows()) == ordered(rows)


def test_equal_rows_keep_their_order_over_blocks_runs_and_levels() -> None:
    rows = [(7, b"key", 0, b"%d" % index) for index in range(2_000)]
    with Sorter(memory_bytes_max=2_000) as sorter:
        fill(sorter, rows)
        assert list(sorter.rows()) == rows
        assert sorter.runs_spilled > 300


def test_many_runs_are_merged_in_several_levels() -> None:
    rows = random_rows(MERGE_RUNS_MAX * 3)
    files = Files()
    with Sorter(memory_bytes_max=1, open_file=files) as sorter:
        fill(sorter, rows[:-1])
        sorter.add_page([rows[-1]])
        spilled = sorter.bytes_spilled
        assert list(sorter.rows()) == ordered(rows)
        # Within such a quota only two runs can be merged at a time: that takes as many levels as doublings.
        assert sorter.bytes_spilled > 7 * spilled
        assert sorter.runs_spilled == len(rows)
        assert sum(not file.closed for file in files.opened) <= 2


def test_no_more_runs_are_merged_beforehand_than_needed() -> None:
    runs = MERGE_RUNS_MAX + 2
    with Sorter(memory_bytes_max=MIB // 4) as sorter:
        for version in range(runs):
            sorter.add_page([(version, b"key", 0, bytes(100))] * 400)
        assert sorter.runs_spilled == runs - 1
        one_run = sorter.bytes_spilled // (runs - 1)
        sorter.rows()
        # The last run was still in memory, and three runs had to become one.
        assert round(sorter.bytes_spilled / one_run) == runs + 3


def test_rows_that_fit_into_memory_touch_no_disk(tmp_path: Path) -> None:
    rows = random_rows(1_000)
    with Sorter(tmp_path / "missing") as sorter:
        fill(sorter, rows)
        assert list(sorter.rows()) == ordered(rows)
        assert sorter.bytes_spilled == sorter.runs_spilled == 0


def test_rows_of_the_largest_size_are_sorted() -> None:
    rows = [
        (version, b"k" * (KEY_BYTES_MAX + 3), 2**32 - 1, bytes([version]) * VALUE_BYTES_MAX)
        for version in (5, 3, 4, 1, 2)
    ]
    with Sorter(memory_bytes_max=MIB) as sorter:
        fill(sorter, rows)
        assert list(sorter.rows()) == ordered(rows)
        assert sorter.runs_spilled == len(rows)


def test_rows_can_be_read_again() -> None:
    rows = random_rows(500)
    with Sorter(memory_bytes_max=10_000) as sorter:
        fill(sorter, rows)
        first, second = sorter.rows(), sorter.rows()
        assert [pair[0] for pair in zip(first, second, strict=True)] == ordered(rows)


def test_nothing_gives_nothing() -> None:
    with Sorter() as sorter:
        assert list(sorter.rows()) == []


# Memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "value_bytes", "quota"),
    [(75_000, 4 * 1024, 16 * MIB), (300, MIB, 16 * MIB), (60_000, 8, 2 * MIB)],
    ids=["pages", "largest values", "tiny rows"],
)
def test_memory_stays_within_the_quota(rows: int, value_bytes: int, quota: int) -> None:
    payload = bytes(value_bytes - 8)
    with Sorter(memory_bytes_max=quota) as sorter:
        tracemalloc.start()
        try:
            for index in range(rows):
                # Steps of the golden ratio: versions come in no order, and partitions are no small integers.
                version = index * 0x9E3779B97F4A7C15 & VERSION_MAX
                value = payload + b"%08d" % index
                sorter.add_page([(version, b"%016d" % index, 1_000 + index % 1_000, value)])
            last, count = -1, 0
            for version, _, _, _ in sorter.rows():
                assert version > last
                last = version
                count += 1
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert count == rows
        assert sorter.bytes_spilled >= rows * value_bytes
    assert peak <= quota, f"{peak / MIB:.1f} MiB"


# Nothing is left behind


def test_no_file_has_a_name_and_all_are_closed_at_the_end(tmp_path: Path) -> None:
    files = Files()
    with Sorter(tmp_path, 1_000, files) as sorter:
        fill(sorter, random_rows(100))
        next(sorter.rows())
        assert not files.all_closed()
        assert list(tmp_path.iterdir()) == []
    assert files.all_closed()


def fail_while_reading(sorter: Sorter) -> None:
    with sorter:
        fill(sorter, random_rows(100))
        for _ in sorter.rows():
            raise RuntimeError("whoever reads the rows has failed")


def test_an_error_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    files = Files()
    with pytest.raises(RuntimeError):
        fail_while_reading(Sorter(tmp_path, 1_000, files))
    assert files.opened
    assert files.all_closed()


KILLED = """
import sys
from pathlib import Path
from floodmark.feed.reading.sorter import Sorter
sorter = Sorter(Path(sys.argv[1]), 1_000)
for version in range(100):
    sorter.add_page([(version, b"key", 0, bytes(100))])
next(sorter.rows())
print(sorter.runs_spilled, flush=True)
sys.stdin.read()
"""


def test_kill_9_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 10
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


# Use at the wrong time


def test_no_row_can_be_added_once_rows_are_read() -> None:
    with Sorter() as sorter:
        sorter.add_page([(1, b"a", 0, b"")])
        sorter.rows()
        with pytest.raises(Closed, match="being read"):
            sorter.add_page([(2, b"b", 0, b"")])
        with pytest.raises(Closed, match="being read"):
            sorter.add_page([(2, b"b", 0, b"")])
        assert len(list(sorter.rows())) == 1


def test_a_closed_sorter_refuses_everything() -> None:
    sorter = Sorter(memory_bytes_max=1_000)
    fill(sorter, random_rows(50))
    rows = sorter.rows()
    next(rows)
    sorter.close()
    sorter.close()
    with pytest.raises(Closed):
        sorter.add_page([(1, b"a", 0, b"")])
    with pytest.raises(Closed):
        sorter.rows()
    with pytest.raises(Closed):
        list(rows)


def test_a_quota_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        Sorter(memory_bytes_max=0)


# Faults

FAULTY_ROWS = random_rows(24)
FAULTY_QUOTA = 1_000


def file_sizes() -> list[int]:
    """The sizes of the files that sorting takes: one of runs, and some of merged runs."""
    sizes: dict[FileIO, int] = {}
    files = Files()
    with Sorter(memory_bytes_max=FAULTY_QUOTA, open_file=files) as sorter:
        fill(sorter, FAULTY_ROWS)
        sizes[files.opened[0]] = files.size()
        sorter.rows()
        sizes |= {file: os.fstat(file.fileno()).st_size for file in files.opened if not file.closed}
    return list(sizes.values())


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_byte_fails_whole_and_the_call_can_be_repeated(tmp_path: Path) -> None:
    files = Files()
    failures = 0
    highest = max(file_sizes())
    assert len(file_sizes()) > 1
    for size in range(highest + 1):
        with Sorter(tmp_path, FAULTY_QUOTA, files) as sorter:
            for row in FAULTY_ROWS:
                try:
                    with file_size_limit(size):
                        sorter.add_page([row])
                except StorageFull:
                    failures += 1
                    sorter.add_page([row])
            try:
                with file_size_limit(size):
                    rows = sorter.rows()
            except StorageFull:
                failures += 1
                rows = sorter.rows()
            assert list(rows) == ordered(FAULTY_ROWS), f"after a disk full at byte {size}"
    assert failures > highest
    assert files.all_closed()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_no_space_left_is_storage_full() -> None:
    with (
        Sorter(memory_bytes_max=1, open_file=lambda _: FileIO("/dev/full", "r+")) as sorter,
        pytest.raises(StorageFull, match="make room, then call again"),
    ):
        fill(sorter, FAULTY_ROWS)


def test_a_directory_that_is_missing_is_storage_failed(tmp_path: Path) -> None:
    with (
        Sorter(tmp_path / "missing", 1) as sorter,
        pytest.raises(StorageFailed, match=r"missing.*call again") as caught,
    ):
        fill(sorter, FAULTY_ROWS)
    assert not isinstance(caught.value, StorageFull)


def one_level_file() -> tuple[Sorter, Files, int]:
    """A sorter whose runs need no merging beforehand: what is in its file is all that will be read."""
    files = Files()
    sorter = Sorter(memory_bytes_max=8_000, open_file=files)
    fill(sorter, random_rows(60))
    sorter.rows()
    assert sorter.runs_spilled > 2
    assert len(files.opened) == 1
    return sorter, files, files.size()


def test_a_file_that_is_cut_off_anywhere_is_found_out() -> None:
    sorter, files, size = one_level_file()
    with sorter:
        for length in reversed(range(size)):
            files.opened[0].truncate(length)
            with pytest.raises(Corruption, match="check the disk"):
                list(sorter.rows())


def test_a_byte_that_is_changed_anywhere_is_found_out() -> None:
    sorter, files, size = one_level_file()
    file = files.opened[0].fileno()
    with sorter:
        before = list(sorter.rows())
        for position in range(size):
            right = os.pread(file, 1, position)
            os.pwrite(file, bytes([right[0] ^ 1 << position % 8]), position)
            with pytest.raises(Corruption):
                list(sorter.rows())
            os.pwrite(file, right, position)
        assert list(sorter.rows()) == before


def test_a_block_at_a_wrong_place_is_found_out() -> None:
    files = Files()
    with Sorter(memory_bytes_max=1, open_file=files) as sorter:
        sorter.add_page([(1, b"a", 0, b"one")])
        sorter.add_page([(2, b"b", 0, b"two")])
        sorter.rows()
        file, half = files.opened[0].fileno(), files.size() // 2
        os.pwrite(file, os.pread(file, half, half), 0)
        with pytest.raises(Corruption, match="checksum"):
            list(sorter.rows())


def test_the_check_of_stability_finds_a_sort_that_swaps_equal_rows() -> None:
    rows = random_rows(200)
    unstable = ordered(rows[::-1])
    assert sorted(unstable) == sorted(rows)
    assert unstable != ordered(rows)

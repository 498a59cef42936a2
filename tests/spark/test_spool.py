"""Rows come back from the last batch to the first, from memory and from disk."""

import tempfile
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from floodmark.columns.pairs import PAIRS
from floodmark.model.errors import StorageFailed
from floodmark.spark.source.writing import reverse


def make_batch(number: int, rows: int = 10) -> pyarrow.RecordBatch:
    keys = [b"%04d-%04d" % (number, row) for row in range(rows)]
    return pyarrow.RecordBatch.from_arrays([pyarrow.array(keys), pyarrow.array(keys)], schema=PAIRS)


@pytest.fixture
def spools(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The files that are made."""
    made: list[Any] = []

    class Noted(tempfile.SpooledTemporaryFile[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.directory = options["dir"]
            made.append(self)

    monkeypatch.setattr(tempfile, "SpooledTemporaryFile", Noted)
    return made


@pytest.mark.parametrize("memory_bytes_max", [1, 1_000, 1 << 20])
def test_batches_come_back_reversed_and_their_rows_as_they_were(
    memory_bytes_max: int, spools: list[Any]
) -> None:
    batches = [make_batch(number) for number in range(20)]
    reversed_batches = reverse(iter(batches), memory_bytes_max=memory_bytes_max)
    last = next(reversed_batches)
    assert spools[0]._rolled == (memory_bytes_max < 1 << 20)
    assert [last, *reversed_batches] == batches[::-1]
    assert spools[0].closed


def test_no_batches_come_back_as_none() -> None:
    assert list(reverse(iter([]))) == []


def test_slices_are_put_down_without_what_they_were_cut_from(spools: list[Any]) -> None:
    slices = reverse(iter([make_batch(1, rows=10_000).slice(5_000, 2)]))
    assert next(slices).column(0).to_pylist() == [b"0001-5000", b"0001-5001"]
    assert spools[0].tell() < 1_000


def test_the_file_stands_where_spark_keeps_its_files_and_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spools: list[Any]
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path / 'gone'},{tmp_path}")
    next(reverse(iter([make_batch(1)]), memory_bytes_max=1))
    assert spools[0].directory == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "r+b", buffering=0) as full:
        monkeypatch.setattr(tempfile, "SpooledTemporaryFile", lambda *_, **__: full)
        with pytest.raises(StorageFailed, match=r"No space left.*spark\.local\.dir"):
            next(reverse(iter([make_batch(1)])))

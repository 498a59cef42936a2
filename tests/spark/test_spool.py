"""The spool gives back what was put down, from the last batch to the first, in memory and on disk."""

from pathlib import Path

import pyarrow
import pytest

from floodmark.model.errors import StorageFailed
from floodmark.spark.source.spool import Spool
from floodmark.wire.columns import PAIRS


def make_batch(number: int, rows: int = 10) -> pyarrow.RecordBatch:
    keys = [b"%04d-%04d" % (number, row) for row in range(rows)]
    return pyarrow.RecordBatch.from_arrays([pyarrow.array(keys), pyarrow.array(keys)], schema=PAIRS)


@pytest.mark.parametrize("memory_bytes_max", [1, 1_000, 1 << 20])
def test_batches_come_back_reversed_and_their_rows_as_they_were(memory_bytes_max: int) -> None:
    batches = [make_batch(number) for number in range(20)]
    with Spool(PAIRS, memory_bytes_max=memory_bytes_max) as spool:
        for batch in batches:
            spool.add(batch)
        assert (spool.file_bytes > 0) == (memory_bytes_max < 1 << 20)
        assert list(spool.drain_reversed()) == batches[::-1]
        assert list(spool.drain_reversed()) == []


def test_an_empty_spool_gives_nothing() -> None:
    with Spool(PAIRS) as spool:
        assert list(spool.drain_reversed()) == []


def test_slices_are_put_down_without_what_they_were_cut_from() -> None:
    with Spool(PAIRS, memory_bytes_max=1) as spool:
        spool.add(make_batch(1, rows=10_000).slice(5_000, 2))
        assert spool.file_bytes < 1_000
        (batch,) = spool.drain_reversed()
        assert batch.column(0).to_pylist() == [b"0001-5000", b"0001-5001"]


def test_the_file_stands_where_spark_keeps_its_files_and_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path / 'gone'},{tmp_path}")
    with Spool(PAIRS, memory_bytes_max=1) as spool:
        spool.add(make_batch(1))
        assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_with_what_to_do() -> None:
    with Spool(PAIRS, memory_bytes_max=1) as spool, open("/dev/full", "r+b", buffering=0) as full:
        spool._file = full
        with pytest.raises(StorageFailed, match=r"No space left.*spark\.local\.dir"):
            spool.add(make_batch(1))

"""What a process that writes needs; apart from the tests, so that it starts quickly."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import pyarrow

from floodmark.spark.source.writing import FrameWriter

Pairs: TypeAlias = Sequence[tuple[bytes, bytes]]


def batches_of(*batches: Pairs) -> Iterator[pyarrow.RecordBatch]:
    for pairs in batches:
        keys, values = zip(*pairs, strict=True)
        yield pyarrow.record_batch([pyarrow.array(keys), pyarrow.array(values)], names=["key", "value"])


def write_in_process(writer: FrameWriter, batches: int) -> None:
    """A task as Spark runs it: every batch has every key, and the last value is the highest."""
    keys = [b"%03d" % key for key in range(100)]
    writer.write(batches_of(*([(key, b"%06d" % number) for key in keys] for number in range(batches))))

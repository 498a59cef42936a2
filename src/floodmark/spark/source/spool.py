"""A stack of batches: in memory up to a limit, then in an unnamed file that vanishes with the process."""

import os
import tempfile
from collections.abc import Iterator
from typing import IO, Final

import pyarrow
import pyarrow.ipc

from floodmark.model.errors import StorageFailed
from floodmark.model.limits import MIB

MEMORY_BYTES_MAX: Final = 64 * MIB


class Spool:
    """Batches of one schema.  For one thread; close it, or use `with`."""

    def __init__(self, schema: pyarrow.Schema, *, memory_bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self._schema = schema
        self._memory_bytes_max = memory_bytes_max
        self._memory: list[pyarrow.RecordBatch] = []
        self._memory_bytes = 0
        self._file: IO[bytes] | None = None
        # The start of each batch in the file, and the end of the last one.
        self._places = [0]

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def file_bytes(self) -> int:
        """The bytes on disk."""
        return self._places[-1]

    def add(self, batch: pyarrow.RecordBatch) -> None:
        """Push a batch."""
        self._memory.append(batch)
        self._memory_bytes += batch.nbytes
        if self._memory_bytes > self._memory_bytes_max:
            self._move_to_file()

    def drain_reversed(self) -> Iterator[pyarrow.RecordBatch]:
        """Pop the batches, the last one first; the rows within a batch keep their order."""
        while self._memory:
            yield self._memory.pop()
        while len(self._places) > 1:
            end = self._places.pop()
            yield self._read(self._places[-1], end)

    def close(self) -> None:
        """Drop all batches."""
        self._memory.clear()
        if self._file is not None:
            self._file.close()

    def _move_to_file(self) -> None:
        try:
            if self._file is None:
                self._file = _open_file()
            for batch in self._memory:
                self._file.write(batch.serialize())
                self._places.append(self._file.tell())
            self._file.flush()
        except OSError as error:
            raise StorageFailed(
                f"rows on their way to a site do not fit into {_directory() or tempfile.gettempdir()!r} "
                f"({error.strerror or error}); make room, let Spark use another directory (spark.local.dir), "
                'cut the rows into more partitions, or set option("distinctKeys", "true") if no key comes '
                "twice"
            ) from error
        self._memory.clear()
        self._memory_bytes = 0

    def _read(self, start: int, end: int) -> pyarrow.RecordBatch:
        assert self._file is not None
        self._file.seek(start)
        return pyarrow.ipc.read_record_batch(pyarrow.py_buffer(self._file.read(end - start)), self._schema)


def _open_file() -> IO[bytes]:
    return tempfile.TemporaryFile(dir=_directory())


def _directory() -> str | None:
    """Spark's local directory, if Spark names it to its workers."""
    directories = [each for each in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if os.path.isdir(each)]
    return directories[0] if directories else None

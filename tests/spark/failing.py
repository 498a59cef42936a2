"""A data source that raises a Floodmark error wherever its option `where` says."""

from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)

from floodmark.model.errors import NotAllowed, Unreachable

MESSAGE = "No answer from grpc://127.0.0.1:1 in 5 s: nothing was read.\n\nStart 'oslo': floodmark serve"


class FailingSource(DataSource):
    """Fails on the driver."""

    @classmethod
    def name(cls) -> str:
        return "failing"

    def schema(self) -> str:
        fail("schema", self.options)
        return "id long"

    def reader(self, schema: object) -> "FailingReader":
        return FailingReader(self.options)

    def streamReader(self, schema: object) -> "FailingStreamReader":
        return FailingStreamReader(self.options)

    def writer(self, schema: object, overwrite: bool) -> "FailingWriter":
        fail("writer", self.options)
        return FailingWriter(self.options)

    def streamWriter(self, schema: object, overwrite: bool) -> "FailingStreamWriter":
        return FailingStreamWriter(self.options)


class FailingReader(DataSourceReader):
    """Fails when partitions are planned, on the driver, or read, on a worker."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = options

    def partitions(self) -> list[InputPartition]:
        fail("partitions", self.options)
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        fail("read", self.options)
        yield (1,)


class FailingStreamReader(DataSourceStreamReader):
    """Fails in a process beside the driver, or on a worker."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = options

    def initialOffset(self) -> dict[str, int]:
        fail("initialOffset", self.options)
        return {"version": 0}

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, int]:
        return {"version": 1}

    def partitions(self, start: Any, end: Any) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        fail("stream read", self.options)
        yield (1,)


class FailingWriter(DataSourceWriter):
    """Fails on a worker, or on the driver when all have written."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = options

    def write(self, iterator: object) -> WriterCommitMessage:
        fail("write", self.options)
        return WriterCommitMessage()

    def commit(self, messages: object) -> None:
        fail("commit", self.options)


class FailingStreamWriter(DataSourceStreamWriter):
    """Fails on a worker."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = options

    def write(self, iterator: object) -> WriterCommitMessage:
        fail("stream write", self.options)
        return WriterCommitMessage()

    def commit(self, messages: object, batchId: int) -> None:
        pass


def fail(where: str, options: Mapping[str, str]) -> None:
    """Raise, with two more errors behind it, one of which only looks like ours."""
    if options.get("where") != where:
        return
    try:
        try:
            raise ConnectionError("floodmark.model.errors.Closed: not raised by anyone")
        except ConnectionError as error:
            raise NotAllowed("raised, and handled") from error
    except NotAllowed as error:
        raise Unreachable(MESSAGE, url="grpc://127.0.0.1:1") from error

"""What a query has checked, kept beside its checkpoint: a small file for each of its last micro-batches.

Spark notes a micro-batch as done after its sink has committed it, and runs it again if it died in between.
So what was checked is written in that commit, under the number of the batch, and always follows from what
the batch before it has left: done again, it becomes the same.

    00000000000000000041.json       the checks after batch 41
    00000000000000000042.json
"""

import os
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow
from pyarrow import fs

from floodmark.accounting.checks import Checks, check_step, report_findings
from floodmark.accounting.counting import Counted
from floodmark.model.errors import Corruption, StorageFailed
from floodmark.model.version import VERSION_MAX

# The last and the one before it are needed; more are kept for those who want to look.
FILES_KEPT: Final = 4

# Names under which Hadoop's file systems and Arrow's know the same thing.
_ARROW_SCHEMES: Final = {"s3a": "s3", "s3n": "s3"}
_SUFFIX: Final = ".json"


class QueryChecks:
    """The checks of a query, in a directory that is named by its URI."""

    def __init__(self, url: str) -> None:
        scheme, colon, rest = url.partition(":")
        try:
            self._filesystem, self._path = fs.FileSystem.from_uri(
                f"{_ARROW_SCHEMES.get(scheme, scheme)}{colon}{rest}"
            )
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise _failed(url, error) from error
        self._url = url

    def last(self) -> Checks:
        """What was checked so far."""
        return self._load(None)

    def add_batch(self, batch: int, counted: Counted, now_ms: int, *, namespace: str) -> Checks:
        """Take note of what was counted of a micro-batch, all of which is delivered."""
        before = self._load(batch)
        checks = check_step(before, counted, VERSION_MAX, now_ms)
        report_findings(f"copy of {namespace}", before, checks, namespace=namespace)
        try:
            self._publish(_name(batch), msgspec.json.encode(checks))
            for name in self._names()[:-FILES_KEPT]:
                self._filesystem.delete_file(f"{self._path}/{name}")
        except OSError as error:
            raise _failed(self._url, error) from error
        return checks

    def _load(self, before: int | None) -> Checks:
        """What the last batch has left, or the last before another one."""
        try:
            names = [name for name in self._names() if before is None or name < _name(before)]
            if not names:
                return Checks()
            with self._filesystem.open_input_stream(f"{self._path}/{names[-1]}") as stream:
                return msgspec.json.decode(stream.read(), type=Checks)
        except OSError as error:
            raise _failed(self._url, error) from error
        except msgspec.MsgspecError as error:
            raise Corruption(
                f"{self._url}/{names[-1]} is damaged ({error}); remove it, and the checks begin anew"
            ) from error

    def _names(self) -> list[str]:
        found = self._filesystem.get_file_info(fs.FileSelector(self._path, allow_not_found=True))
        return sorted(info.base_name for info in found if info.base_name.endswith(_SUFFIX))

    def _publish(self, name: str, content: bytes) -> None:
        self._filesystem.create_dir(self._path, recursive=True)
        local = isinstance(self._filesystem, fs.LocalFileSystem)
        # Elsewhere a file is seen when it is whole.
        written = f"{name}.new" if local else name
        with self._filesystem.open_output_stream(f"{self._path}/{written}") as stream:
            stream.write(content)
        if local:
            _sync(Path(self._path, written))
            self._filesystem.move(f"{self._path}/{written}", f"{self._path}/{name}")
            _sync(Path(self._path))


def _name(batch: int) -> str:
    return f"{batch:020}{_SUFFIX}"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failed(url: str, error: Any) -> StorageFailed:
    return StorageFailed(
        f"what was checked could not be kept in {url}: {error}. See to it, then run it again"
    )

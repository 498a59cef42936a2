"""The few steps that jobs take on directories themselves, each of them whole or not done.

Spark writes the data; what says that the data is complete is a small file, and that must not appear before
its time or half.  A directory is a local path, or a URI that both Spark and Arrow reach: `s3a:`, `gs:`,
`abfss:`, `hdfs:` and others.  Where files are renamed, a small file is written beside its place, made
durable and renamed; an object store shows an object only when it is whole, so there it is written in place.
"""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import pyarrow
from pyarrow import fs

from floodmark.model.errors import InvalidArgument, StorageFailed, StorageFull

# Names under which Hadoop's file systems and Arrow's know the same thing.
_ARROW_SCHEMES: Final = {"s3a": "s3", "s3n": "s3"}
_OBJECT_STORES: Final = frozenset({"s3", "gcs", "abfs"})
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What Java says, in whose messages there is no number.
_NO_ROOM_TEXTS: Final = tuple(os.strerror(number) for number in _NO_ROOM)


class Directory:
    """A place for files, by its local path or its URI.  It need not be there yet."""

    def __init__(self, location: str, filesystem: Any, path: str) -> None:
        self.location = location
        self._filesystem = filesystem
        self._path = path

    def __repr__(self) -> str:
        return f"Directory({self.location!r})"

    @property
    def url(self) -> str:
        """The place as Spark is told: never a bare path, which a cluster takes for one of its own."""
        return Path(self._path).as_uri() if self._is_local else self.location

    @property
    def _is_local(self) -> bool:
        return isinstance(self._filesystem, fs.LocalFileSystem)

    def directory(self, name: str) -> "Directory":
        """A directory inside this one."""
        return Directory(f"{self.location.rstrip('/')}/{name}", self._filesystem, f"{self._path}/{name}")

    def names(self) -> list[str]:
        """The names in this directory, sorted; none if it is not there."""
        with self._failing("listed"):
            found = self._filesystem.get_file_info(fs.FileSelector(self._path, allow_not_found=True))
        return sorted(info.base_name for info in found)

    def sizes(self) -> dict[str, int]:
        """The bytes of all data files below, by their path from here; what readers pass over is left out."""
        selector = fs.FileSelector(self._path, allow_not_found=True, recursive=True)
        with self._failing("listed"):
            found = self._filesystem.get_file_info(selector)
        files = {info.path[len(self._path) :].lstrip("/"): info for info in found if info.is_file}
        return {name: info.size for name, info in sorted(files.items()) if not _is_hidden(name)}

    def make(self) -> None:
        """Make this directory where there are such things, or say why it cannot be written to."""
        if self._is_local:
            with self._failing("made"):
                self._filesystem.create_dir(self._path, recursive=True)

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if it is not there."""
        with self._failing("read"):
            if self._filesystem.get_file_info(self._file(name)).type == fs.FileType.NotFound:
                return None
            with self._filesystem.open_input_stream(self._file(name)) as stream:
                return cast(bytes, stream.read())

    def open(self, name: str) -> Any:
        """A file to read at any place."""
        return self._filesystem.open_input_file(self._file(name))

    def publish(self, name: str, content: bytes) -> None:
        """Write a small file so that it is there whole or not at all, and return when it is durable."""
        with self._failing("written"):
            self._filesystem.create_dir(self._path, recursive=True)
            if self._filesystem.type_name in _OBJECT_STORES:
                self._write(name, content)
                return
            self._write(f".{name}.new", content)
            self.sync([f".{name}.new"])
            self._filesystem.move(self._file(f".{name}.new"), self._file(name))
            self.sync(["."])

    def remove(self, name: str) -> None:
        """Remove a file or a directory with all that is in it, if it is there."""
        with self._failing("removed"):
            info = self._filesystem.get_file_info(self._file(name))
            if info.type == fs.FileType.Directory:
                self._filesystem.delete_dir(info.path)
            elif info.type == fs.FileType.File:
                self._filesystem.delete_file(info.path)

    def sync(self, names: Iterable[str]) -> None:
        """Return when files and their names are on disk.  Only the local file system has to be told."""
        if not self._is_local:
            return
        with self._failing("written"):
            paths = [Path(self._file(name)) for name in names]
            for path in {*paths, *(path.parent for path in paths)}:
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def _write(self, name: str, content: bytes) -> None:
        with self._filesystem.open_output_stream(self._file(name)) as stream:
            stream.write(content)

    def _file(self, name: str) -> str:
        return f"{self._path}/{name}"

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            failure = find_full_disk(self.location, reason) or StorageFailed(
                f"{self.location} could not be {what}: {reason}. See to it, then run it again"
            )
            raise failure from error


def directory_at(location: str) -> Directory:
    """The directory at a local path or a URI."""
    if "://" not in location:
        if not location:
            raise InvalidArgument(
                "no directory is named; give a local path, or a URI such as s3a://bucket/path"
            )
        return Directory(location, fs.LocalFileSystem(), str(Path(location).absolute()))
    parts = urlsplit(location)
    if parts.password is not None or (parts.scheme in ("s3", "s3a", "s3n") and parts.username is not None):
        raise InvalidArgument(
            "the directory's URI holds a password, which would stand in plans and event logs; configure "
            "credentials in the environment instead"
        )
    scheme = _ARROW_SCHEMES.get(parts.scheme, parts.scheme)
    try:
        filesystem, path = fs.FileSystem.from_uri(parts._replace(scheme=scheme).geturl())
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InvalidArgument(
            f"{location!r:.200} cannot be used as a directory: {error}. Give a local path, or a URI that "
            "both Arrow and Spark know"
        ) from error
    return Directory(location, filesystem, path.rstrip("/"))


def find_full_disk(location: str, reason: str) -> StorageFull | None:
    """The error of a directory without room, if the reason that someone gave says so."""
    for text in _NO_ROOM_TEXTS:
        if text in reason:
            return StorageFull(f"there is no room left at {location}: {text}. Make room, then run it again")
    return None


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/"))

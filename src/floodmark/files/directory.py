"""A directory whose files are staged under hidden names and then published.

    name                      published: whole, durable, seen by readers
    .name.new                 staged: being written, or waiting to be published; readers skip it

A directory is a local path, or a URI that both Arrow and Spark reach: `s3a:`, `gs:`, `abfss:`, `hdfs:` and
others.  A local file is written under its hidden name, synced, renamed, and its directory is synced.  An
object store shows an object only when it is whole, so `publish` writes it in place there.

Every failure of the storage is raised as StorageFailed, or as StorageFull if no space is left.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit

import msgspec
import pyarrow
from pyarrow import fs

from floodmark.files.local import FULL_DISK, sync
from floodmark.model.errors import Corruption, InvalidArgument, StorageFailed, StorageFull

# Schemes of Hadoop's file systems, and Arrow's names for them.
_ARROW_SCHEMES: Final = {"s3a": "s3", "s3n": "s3"}
_OBJECT_STORES: Final = frozenset({"s3", "gcs", "abfs"})
_STAGED: Final = ".new"

Document = TypeVar("Document", bound=msgspec.Struct)


class Directory:
    """A place for files, by its local path or its URI.  It need not exist yet."""

    def __init__(self, location: str, filesystem: Any, path: str) -> None:
        self.location = location
        self._filesystem = filesystem
        self._path = path
        self._is_local = isinstance(filesystem, fs.LocalFileSystem)

    def __repr__(self) -> str:
        return f"Directory({self.location!r})"

    @property
    def url(self) -> str:
        """The URI for Spark: never a bare path, which a cluster resolves in its own file system."""
        return self.path.as_uri() if self._is_local else self.location

    @property
    def path(self) -> Path:
        """The path of a local directory."""
        return Path(self._path)

    def directory(self, name: str) -> "Directory":
        """A directory inside this one."""
        return Directory(f"{self.location.rstrip('/')}/{name}", self._filesystem, self._file(name))

    # Reading

    def names(self) -> list[str]:
        """The names in this directory, sorted; empty if it does not exist."""
        with self.failing("listed"):
            found = self._filesystem.get_file_info(fs.FileSelector(self._path, allow_not_found=True))
        return sorted(info.base_name for info in found)

    def staged(self) -> list[str]:
        """The names under which the staged files will be published."""
        hidden = [name for name in self.names() if name.startswith(".") and name.endswith(_STAGED)]
        return [name[1 : -len(_STAGED)] for name in hidden]

    def sizes(self) -> dict[str, int]:
        """The bytes of all data files below this directory, by their relative path, without hidden files."""
        selector = fs.FileSelector(self._path, allow_not_found=True, recursive=True)
        with self.failing("listed"):
            found = self._filesystem.get_file_info(selector)
        files = {info.path[len(self._path) :].lstrip("/"): info for info in found if info.is_file}
        return {name: info.size for name, info in sorted(files.items()) if not _is_hidden(name)}

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if it does not exist."""
        with self.failing("read"):
            if self._filesystem.get_file_info(self._file(name)).type == fs.FileType.NotFound:
                return None
            with self.open(name) as stream:
                return cast(bytes, stream.read())

    def open(self, name: str) -> Any:
        """A file for random access."""
        return self._filesystem.open_input_file(self._file(name))

    def read_document(self, name: str, kind: type[Document], remedy: str) -> Document | None:
        """The object in a JSON file; None if there is no file.  Raises Corruption, with the remedy."""
        content = self.read(name)
        if content is None:
            return None
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Corruption(f"{self.location}/{name} is damaged ({error}); {remedy}") from error

    # Writing

    def make(self) -> None:
        """Create a local directory.  In an object store there is nothing to create."""
        if self._is_local:
            with self.failing("created"):
                self._filesystem.create_dir(self._path, recursive=True)

    def publish(self, name: str, content: bytes | pyarrow.Buffer) -> None:
        """Write a file so that it exists whole or not at all, and return when it is durable."""
        with self.failing("written"):
            self._filesystem.create_dir(self._path, recursive=True)
        if self._filesystem.type_name in _OBJECT_STORES:
            self.write(name, content)
        else:
            self.stage(name, content)
            self.reveal([name])

    def publish_document(self, name: str, document: msgspec.Struct) -> None:
        """Publish an object as a JSON file that people can read."""
        self.publish(name, msgspec.json.format(msgspec.json.encode(document)))

    def stage(self, name: str, content: bytes | pyarrow.Buffer) -> None:
        """Write a file under a hidden name, and return when its content is durable."""
        self.write(_hide(name), content)

    def reveal(self, names: Iterable[str]) -> None:
        """Publish staged files, in this order, and return when their names are durable."""
        for name in names:
            self.rename(_hide(name), name)
        self.sync(["."])

    def unstage(self, name: str) -> None:
        """Remove a staged file."""
        self.remove(_hide(name))

    def write(self, name: str, content: bytes | pyarrow.Buffer) -> None:
        """Write a file in place, and return when its content is durable."""
        with self.writing(name) as stream:
            stream.write(content)

    @contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """A stream into a file: durable when the block ends, removed if it fails."""
        with self.failing("written"), ExitStack() as undo:
            undo.callback(self._remove_quietly, name)
            if self._is_local:
                with open(self._file(name), "wb") as stream:
                    yield stream
                    stream.flush()
                    os.fsync(stream.fileno())
            else:
                with self._filesystem.open_output_stream(self._file(name)) as stream:
                    yield stream
            undo.pop_all()

    def rename(self, name: str, target: str) -> None:
        """Give a file another name; a file that had that name is replaced in the same step."""
        with self.failing("written"):
            self._filesystem.move(self._file(name), self._file(target))

    def point(self, name: str, target: str) -> None:
        """Make a symbolic link point to another name, in one step."""
        with self.failing("written"):
            staged = Path(self._file(_hide(name)))
            staged.unlink(missing_ok=True)
            staged.symlink_to(target)
            staged.rename(self._file(name))
        self.sync(["."])

    def remove(self, name: str) -> None:
        """Remove a file, or a directory with its content, if it exists."""
        with self.failing("removed"):
            info = self._filesystem.get_file_info(self._file(name))
            if info.type == fs.FileType.Directory:
                self._filesystem.delete_dir(info.path)
            elif info.type == fs.FileType.File:
                self._filesystem.delete_file(info.path)

    def sync(self, names: Iterable[str]) -> None:
        """Return when files and their names are on disk; does nothing unless the file system is local."""
        if self._is_local:
            paths = [Path(self._file(name)) for name in names]
            with self.failing("written"):
                sync({*paths, *(path.parent for path in paths)})

    @contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Raise an error of the storage in the block as StorageFailed or StorageFull."""
        try:
            yield
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            failure = find_full_disk(self.location, reason) or StorageFailed(
                f"{self.location} could not be {what}: {reason}. Correct that, then run it again"
            )
            raise failure from error

    def _file(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _remove_quietly(self, name: str) -> None:
        with suppress(OSError):
            self._filesystem.delete_file(self._file(name))


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
            "the directory's URI holds a password, which plans and event logs would show; configure "
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
    """StorageFull if the text of an error is that of a full disk, else None: Java's errors have no number."""
    for text in map(os.strerror, sorted(FULL_DISK)):
        if text in reason:
            return StorageFull(f"there is no room left at {location}: {text}. Make room, then run it again")
    return None


def _hide(name: str) -> str:
    return f".{name}{_STAGED}"


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/"))

"""A site's directory: whose it is, which format it has, and which process owns it now.

floodmark.json    name, id and format version of the site; what makes a directory a site
owner             held locked by the process that has the site open, and naming it
engine/           the database
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from floodmark.codec.digest import SEED, hash_bytes
from floodmark.model.errors import (
    CannotOpen,
    FormatTooNew,
    InvalidName,
    NotASite,
    SiteLocked,
    SiteMismatch,
)
from floodmark.model.limits import NAMESPACE_NAME_CHARACTERS_MAX, SITE_IDS_MAX

FORMAT: Final = 1

_IDENTITY: Final = "floodmark.json"
_OWNER: Final = "owner"
_ENGINE: Final = "engine"


class Identity(msgspec.Struct, frozen=True):
    """Who a site is.  Never changes after the site was made."""

    site: str
    site_id: int
    format: int


class SiteDirectory:
    """The directory of a site, owned by this process until it is released."""

    def __init__(self, path: Path, site: str | None, site_id: int | None) -> None:
        self.path = path
        _require_site_or_empty(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._owner = os.open(path / _OWNER, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CannotOpen(f"cannot use {path}: {error.strerror}", path=str(path)) from error
        try:
            self._lock()
            self.identity = self._load_identity() or self._make_identity(site, site_id)
            self._require_identity(site, site_id)
        except BaseException:
            os.close(self._owner)
            raise

    @property
    def engine_path(self) -> Path:
        """Where the database lives."""
        return self.path / _ENGINE

    def release(self) -> None:
        """Let another process own the directory."""
        with suppress(OSError):
            os.ftruncate(self._owner, 0)
            os.close(self._owner)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._owner, 200, 0).decode(errors="replace") or "another process"
            raise SiteLocked(
                f"{self.path} is open in {owner}; stop that process, or talk to it, and try again",
                path=str(self.path),
                owner=owner,
            ) from error
        os.ftruncate(self._owner, 0)
        os.pwrite(self._owner, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _load_identity(self) -> Identity | None:
        file = self.path / _IDENTITY
        if not file.exists():
            return None
        try:
            head = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
            stored_format = head.get("format")
            if isinstance(stored_format, int) and stored_format > FORMAT:
                raise FormatTooNew(
                    f"{self.path} has format {stored_format}; this Floodmark reads up to {FORMAT}. "
                    "Install a newer Floodmark",
                    format=stored_format,
                )
            return msgspec.convert(head, Identity)
        except msgspec.MsgspecError as error:
            raise NotASite(
                f"{file} is damaged ({error}); restore it, or the site, from a backup",
                path=str(self.path),
            ) from error

    def _make_identity(self, site: str | None, site_id: int | None) -> Identity:
        name = site if site is not None else self.path.resolve().name
        require_name(name, "site")
        identity = Identity(
            site=name,
            site_id=site_id if site_id is not None else default_site_id(name),
            format=FORMAT,
        )
        if not 1 <= identity.site_id <= SITE_IDS_MAX:
            raise InvalidName(f"a site id lies between 1 and {SITE_IDS_MAX}, not {site_id}")
        _write_durably(self.path / _IDENTITY, msgspec.json.format(msgspec.json.encode(identity)))
        return identity

    def _require_identity(self, site: str | None, site_id: int | None) -> None:
        identity = self.identity
        if site not in (None, identity.site) or site_id not in (None, identity.site_id):
            raise SiteMismatch(
                f"{self.path} is site {identity.site!r} with id {identity.site_id}, not {site!r} with "
                f"id {site_id}; open it under its own name, or choose another directory",
                path=str(self.path),
                site=identity.site,
            )


def default_site_id(name: str) -> int:
    """An id for a site that was given none: always the same for a name, and seldom another's."""
    return hash_bytes(name.encode(), SEED) % SITE_IDS_MAX + 1


def require_name(name: object, what: str) -> None:
    """Names go into file names, URLs and metrics: short, printable, without blanks."""
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= NAMESPACE_NAME_CHARACTERS_MAX
        or not name.isprintable()
        or any(character.isspace() or character == "/" for character in name)
    ):
        raise InvalidName(
            f"{name!r} cannot name a {what}: use 1 to {NAMESPACE_NAME_CHARACTERS_MAX} printable "
            "characters without blanks or slashes"
        )


def _require_site_or_empty(path: Path) -> None:
    if path.is_dir():
        if (path / _IDENTITY).exists() or not _foreign_entries(path):
            return
        raise NotASite(
            f"{path} holds other files and no site; choose an empty or a new directory",
            path=str(path),
        )
    if path.exists():
        raise NotASite(f"{path} is a file, not a site's directory", path=str(path))


def _foreign_entries(path: Path) -> bool:
    # A site that was being made when the machine stopped has only its owner file.
    return any(entry.name not in (_OWNER, f"{_IDENTITY}.new") for entry in path.iterdir())


def _write_durably(file: Path, content: bytes) -> None:
    fresh = file.with_name(f"{file.name}.new")
    with fresh.open("wb") as stream:
        stream.write(content + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
    fresh.rename(file)
    with _directory(file.parent) as descriptor:
        os.fsync(descriptor)


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)

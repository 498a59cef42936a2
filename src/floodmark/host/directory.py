"""A site's directory: the identity and the format of the site, and the process that owns it.

floodmark.json    name, id and format version of the site; what makes a directory a site
owner             held locked by the process that has the site open, and naming it
witness           what the database is known to hold (engine/witness.py)
engine/           the database, which holds name and id of the site too

Opening a site for writing raises its format to the present one (`model/format.py`), durably and before the
database is touched.  All earlier formats are read for ever.  There is no way down: an earlier Floodmark
refuses the directory from then on, and a later format is refused here.
"""

import fcntl
import logging
import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from floodmark.engine import Engine
from floodmark.files.local import FULL_DISK, write_durably
from floodmark.model.errors import (
    CannotOpen,
    Corruption,
    FloodmarkError,
    FormatTooNew,
    InvalidName,
    NotASite,
    SiteLocked,
    SiteMismatch,
    StorageFull,
)
from floodmark.model.format import FORMAT
from floodmark.model.limits import SITE_IDS_MAX
from floodmark.model.names import require_name
from floodmark.partition.families import META, STORED_FORMAT
from floodmark.replication.topology import default_site_id

_IDENTITY: Final = "floodmark.json"
_OWNER: Final = "owner"
_ENGINE: Final = "engine"
_WITNESS: Final = "witness"

_log = logging.getLogger("floodmark.site")

_OWNER_TEXT: Final = re.compile(r"process (?P<id>\d+) on (?P<host>.+)")


class Identity(msgspec.Struct, frozen=True, omit_defaults=True):
    """The identity of a site.  Name and id never change.  It is unfinished until the database is created."""

    site: str
    site_id: int
    format: int
    unfinished: bool = False

    def require_possible(self) -> None:
        """Raise an error for a name, an id or a format that no site can have."""
        require_name(self.site, "site")
        if type(self.site_id) is not int or not 1 <= self.site_id <= SITE_IDS_MAX:
            raise InvalidName(f"a site id is a number from 1 to {SITE_IDS_MAX}, not {self.site_id!r}")
        if self.format < 1:
            raise InvalidName(f"formats begin with 1, not {self.format}")


class EngineIdentity(msgspec.Struct, frozen=True):
    """The copy of a site's identity in its database."""

    site: str
    site_id: int


def encode_engine_identity(identity: Identity) -> bytes:
    """The row with the site's identity in the database."""
    return msgspec.json.encode(EngineIdentity(site=identity.site, site_id=identity.site_id))


def new_identity(site: str, site_id: int | None) -> Identity:
    """The identity of a new site; without an id, the id is derived from the name."""
    require_name(site, "site")
    chosen = default_site_id(site) if site_id is None else site_id
    identity = Identity(site=site, site_id=chosen, format=FORMAT)
    identity.require_possible()
    return identity


class SiteDirectory:
    """The directory of a site, owned by this process until it is released."""

    def __init__(self, path: Path, site: str | None, site_id: int | None, *, create: bool) -> None:
        self.path = path
        try:
            _require_site_or_empty(path, create=create)
            path.mkdir(parents=True, exist_ok=True)
            self._owner = os.open(path / _OWNER, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _cannot_use(path, error) from error
        try:
            self._lock()
            self.identity = _load_identity(path) or self._make_identity(site, site_id)
            self._require_identity(site, site_id)
            self._require_engine()
            self._raise_format()
        except BaseException as error:
            os.close(self._owner)
            if isinstance(error, OSError):
                raise _cannot_use(path, error) from error
            raise

    def finish(self) -> None:
        """Record that the database exists.  From then on opening the site without it is refused."""
        if self.identity.unfinished:
            self.identity = msgspec.structs.replace(self.identity, unfinished=False)
            try:
                _write_identity(self.path, self.identity)
            except OSError as error:
                raise _cannot_use(self.path, error) from error

    def abandon(self) -> None:
        """In a forked process, close the inherited lock file, so that the lock ends with the owner."""
        with suppress(OSError):
            os.close(self._owner)

    def release(self) -> None:
        """Release the lock, so that another process can own the directory."""
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

    def _make_identity(self, site: str | None, site_id: int | None) -> Identity:
        made = new_identity(self.path.resolve().name if site is None else site, site_id)
        identity = msgspec.structs.replace(made, unfinished=True)
        _write_identity(self.path, identity)
        return identity

    def _require_engine(self) -> None:
        """Raise CannotOpen if the database is missing, as on a disk that is not mounted."""
        path = engine_path(self.path)
        if self.identity.unfinished or (path.is_dir() and any(path.iterdir())):
            return
        raise CannotOpen(
            f"{self.path} is site {self.identity.site!r}, and its database is gone: {path} is missing or "
            "empty. Mount its disk, restore the site from a backup, or remove the directory if the site was "
            "never used",
            path=str(self.path),
            missing=_ENGINE,
        )

    def _raise_format(self) -> None:
        """Store the present format, before the first row in that format is written."""
        if self.identity.format == FORMAT:
            return
        raised = msgspec.structs.replace(self.identity, format=FORMAT)
        try:
            _write_identity(self.path, raised)
        except OSError as error:
            if error.errno in FULL_DISK:
                raise
            raise CannotOpen(
                f"{self.path} has format {self.identity.format}, and cannot be raised to {FORMAT}: "
                f"{error.strerror}. Make it writable, with room on the disk, and open it again",
                path=str(self.path),
            ) from error
        _log.info("%s was raised from format %d to %d", self.path, self.identity.format, FORMAT)
        self.identity = raised

    def _require_identity(self, site: str | None, site_id: int | None) -> None:
        identity = self.identity
        if site not in (None, identity.site) or site_id not in (None, identity.site_id):
            asked = " and ".join(
                [f"name {site!r}"] * (site is not None) + [f"id {site_id}"] * (site_id is not None)
            )
            raise SiteMismatch(
                f"{self.path} is site {identity.site!r} with id {identity.site_id}, and was asked for by "
                f"{asked}; open it under its own name, or choose another directory",
                path=str(self.path),
                site=identity.site,
            )


def _cannot_use(path: Path, error: OSError) -> FloodmarkError:
    if error.errno in FULL_DISK:
        return StorageFull(f"the disk of {path} is full; make room, then open the site again", path=str(path))
    return CannotOpen(f"cannot use {path}: {error.strerror}", path=str(path))


def read_identity(path: Path) -> Identity:
    """The identity of the site in a directory, without opening it."""
    try:
        _require_site_or_empty(path, create=False)
    except OSError as error:
        raise _cannot_use(path, error) from error
    identity = _load_identity(path)
    if identity is None:
        raise NotASite(f"{path} holds no site any more", path=str(path))
    return identity


def stored_identity(stored: bytes | None, path: object) -> EngineIdentity | None:
    """The identity that is stored in a database; None if there is none."""
    try:
        return None if stored is None else msgspec.json.decode(stored, type=EngineIdentity)
    except msgspec.MsgspecError as error:
        raise Corruption(
            f"{path}: the site's name and id in the database are damaged: {error}. Restore it from a backup"
        ) from error


def raise_format(engine: Engine, path: object) -> None:
    """Store the present format in a database without a directory, before a row of it; refuse a later one."""
    stored = int(engine.get(META, STORED_FORMAT) or 0)
    if stored > FORMAT:
        raise _too_new(path, stored)
    if stored < FORMAT:
        engine.write([(META, STORED_FORMAT, b"%d" % FORMAT)])
        engine.sync()


def _too_new(path: object, stored: int) -> FormatTooNew:
    return FormatTooNew(
        f"{path} has format {stored}; this Floodmark reads up to {FORMAT}. Install a newer Floodmark",
        format=stored,
    )


def require_same_identity(identity: Identity, stored: bytes, path: object) -> None:
    """Raise Corruption for a database whose identity differs from floodmark.json."""
    held = stored_identity(stored, path)
    assert held is not None
    if (held.site, held.site_id) != (identity.site, identity.site_id):
        raise Corruption(
            f"{path}: {_IDENTITY} says site {identity.site!r} with id {identity.site_id}, and the database "
            f"belongs to {held.site!r} with id {held.site_id}. Either {_IDENTITY} was damaged: restore it "
            "with the name and id of the database; or the database of another site stands here: mount the "
            "right one",
            missing=_IDENTITY,
        )


def engine_path(path: Path) -> Path:
    """The path of the database in a site's directory."""
    return path / _ENGINE


def witness_path(path: Path) -> Path:
    """The path of the database's witness in a site's directory."""
    return path / _WITNESS


class Ownership(NamedTuple):
    """Whether a process has a site open, and since when it is open or closed."""

    is_owned: bool
    since_ns: int


def read_ownership(path: Path) -> Ownership:
    """Read the owner file without locking it.  A process on another machine counts as running."""
    try:
        since_ns = (path / _OWNER).stat().st_mtime_ns
        owner = (path / _OWNER).read_text("utf-8", "replace")
    except FileNotFoundError:
        return Ownership(False, 0)
    except OSError as error:
        raise _cannot_use(path, error) from error
    process = _OWNER_TEXT.fullmatch(owner)
    if process is None or process["host"] != socket.gethostname():
        return Ownership(bool(owner), since_ns)
    return Ownership(_is_running(int(process["id"])), since_ns)


def _is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _load_identity(path: Path) -> Identity | None:
    file = path / _IDENTITY
    try:
        head = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
        stored_format = head.get("format")
        if isinstance(stored_format, int) and stored_format > FORMAT:
            raise _too_new(path, stored_format)
        identity = msgspec.convert(head, Identity)
        identity.require_possible()
        return identity
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CannotOpen(f"cannot read {file}: {error.strerror}", path=str(path)) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, InvalidName) as error:
        raise NotASite(
            f"{file} is damaged ({error}); restore it, or the site, from a backup",
            path=str(path),
        ) from error


def _write_identity(path: Path, identity: Identity) -> None:
    write_durably(path / _IDENTITY, msgspec.json.format(msgspec.json.encode(identity)) + b"\n")


def _require_site_or_empty(path: Path, *, create: bool) -> None:
    if (path / _IDENTITY).exists():
        return
    if path.exists() and not path.is_dir():
        raise NotASite(f"{path} is a file, not a site's directory", path=str(path))
    if not create:
        raise NotASite(f"{path} holds no site; check the name, or create the site first", path=str(path))
    if path.exists() and _foreign_entries(path):
        raise NotASite(
            f"{path} holds other files and no site; choose an empty or a new directory",
            path=str(path),
        )


def _foreign_entries(path: Path) -> bool:
    # A site whose creation was interrupted by a machine failure has only its owner file.
    return any(entry.name not in (_OWNER, f"{_IDENTITY}.new") for entry in path.iterdir())

"""The location of a site, which is a directory or the URL of its server, and how a command opens it.

Only `init`, `serve` and `demo` make a site: a typo must not leave an empty one.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import floodmark
from floodmark.cli.failures import NoInput, Usage
from floodmark.model.errors import NotASite
from floodmark.model.text import json_bytes, show_bytes

if TYPE_CHECKING:
    from floodmark import Site

SITE_FILE: Final = "floodmark.json"
_HOST_AND_PORT: Final = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\]):\d+")
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def _from(variable: str, **more: str) -> dict[str, str]:
    return {"envvar": f"FLOODMARK_{variable}", **more}


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """The options about servers.  Credentials are files: other users can read a command line."""

    token_file: Annotated[Path | None, "FILE", "A file with the token.", _from("TOKEN_FILE")] = None
    tls_root: Annotated[
        Path | None,
        "FILE",
        "The certificates to verify the server with; the system's by default.",
        _from("TLS_ROOT"),
    ] = None
    tls_certificate: Annotated[
        Path | None,
        "FILE",
        "The client certificate, if the server requires one.",
        _from("TLS_CERTIFICATE"),
    ] = None
    tls_key: Annotated[Path | None, "FILE", "Its private key.", _from("TLS_KEY")] = None
    timeout: Annotated[
        timedelta | None,
        "DURATION",
        "How long to wait for an answer.",
        _from("TIMEOUT", show_default="30s"),
    ] = None

    def given(self) -> dict[str, Any]:
        """The options that have a value; `connect` and `SiteAddress` have defaults for the others."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def files(self) -> dict[str, str]:
        """The credentials, as absolute paths."""
        return {name: str(file.absolute()) for name, file in self.given().items() if name != "timeout"}


# Whether the command is the purpose of this process, and not a call from a program or a test.
owns_process: Final = ContextVar("owns_process", default=False)
# Whether an error is shown with its traceback.
show_trace: Final = ContextVar("show_trace", default=False)
# The options before the command.
connection_options: Final = ContextVar("connection_options", default=ConnectionOptions())  # noqa: B039


def is_url(location: str) -> bool:
    """Whether a site is named by the URL of its server; anything else is a directory.

    >>> is_url("grpc+tls://oslo.example:7100"), is_url("data/oslo"), is_url("./odd://name")
    (True, False, False)
    """
    return _URL.match(location) is not None


def location_fields(location: str) -> dict[str, str | None]:
    """The location of a site as JSON fields: its `directory` or its `url`.

    >>> location_fields("data/oslo"), location_fields("grpc://oslo:7100")
    ({'directory': 'data/oslo'}, {'url': 'grpc://oslo:7100'})
    """
    return json_bytes("url" if is_url(location) else "directory", os.fsencode(location))


def show_location(location: str) -> str:
    """The location of a site, for people."""
    return show_bytes(os.fsencode(location))


def holds_site(directory: Path) -> bool:
    """Whether a directory is a site."""
    return (directory / SITE_FILE).is_file()


def require_site(location: str) -> Path:
    """The directory of an existing site."""
    directory = require_directory(location)
    if not directory.exists() and _HOST_AND_PORT.fullmatch(location):
        raise NoInput(f"there is no directory {location}; is it a server?", f"its URL, grpc://{location}")
    if not holds_site(directory):
        raise NotASite(f"there is no site in {directory}", path=str(directory), missing=True)
    return directory


def require_directory(location: str) -> Path:
    """The directory that a location names; a URL is refused."""
    if is_url(location):
        raise Usage(
            f"{location} is a server's URL, and this works on a directory",
            "the same on the server's machine",
        )
    return Path(location)


@contextmanager
def open_site(location: str, *, background: bool = False) -> Iterator["Site"]:
    """Open an existing site.  A short command runs neither heartbeats nor garbage collection."""
    if is_url(location):
        opened = connect(location)
    else:
        opened = floodmark.open(require_site(location), background=background)
    with opened as site:
        yield site


def connect(url: str, **own: str | None) -> "Site":
    """Connect to a server, with the options before the command and with its own credential files."""
    files: dict[str, Any] = {name: file for name, file in own.items() if file is not None}
    return floodmark.connect(url, **connection_options.get().given() | files)

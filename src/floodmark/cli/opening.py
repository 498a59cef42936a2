"""Opening a site for a command: the one in a directory, or the one behind a server's URL.

Only `init`, `serve` and `demo` make a site: a typo must not leave an empty one.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import floodmark
from floodmark.cli.connection import connection_options
from floodmark.cli.failures import Usage
from floodmark.cli.locations import is_url
from floodmark.model.errors import InvalidConfiguration, NotASite
from floodmark.replication.topology import Topology, parse_topology

SITE_FILE: Final = "floodmark.json"


def holds_site(directory: Path) -> bool:
    """Whether a directory is a site."""
    return (directory / SITE_FILE).is_file()


def require_site(location: str) -> Path:
    """The directory of an existing site."""
    directory = require_directory(location)
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
def open_site(location: str, *, background: bool = False) -> Iterator[floodmark.Site]:
    """Open an existing site.  A short command runs neither heartbeats nor garbage collection."""
    if is_url(location):
        opened = _connect(location)
    else:
        opened = floodmark.open(require_site(location), background=background)
    with opened as site:
        yield site


def read_topology(file: Path) -> Topology:
    """The topology in a file."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise Usage(f"{file} cannot be read: {error.strerror}", "floodmark topology --help") from error
    return parse_topology(text, str(file))


@contextmanager
def open_members(topology: Topology, *, without: str) -> Iterator[dict[str, floodmark.Site]]:
    """All active sites of a topology but one, by name, connected."""
    with ExitStack() as stack:
        opened: dict[str, floodmark.Site] = {}
        for name, site in topology.sites.items():
            if not site.is_active or name == without:
                continue
            if site.url is None:
                raise InvalidConfiguration(f"site {name!r} has no url in the topology; add it", site=name)
            token_file, root = site.token_file, site.tls_root_certificate
            member = _connect(
                site.url,
                token_file=None if token_file is None else Path(token_file),
                tls_root=None if root is None else Path(root),
            )
            opened[name] = stack.enter_context(member)
        yield opened


def _connect(url: str, *, token_file: Path | None = None, tls_root: Path | None = None) -> floodmark.Site:
    options = connection_options.get()
    timeout: dict[str, Any] = {} if options.timeout is None else {"timeout": options.timeout}
    return floodmark.connect(
        url,
        token_file=token_file or options.token_file,
        tls_root=tls_root or options.tls_root,
        tls_certificate=options.tls_certificate,
        tls_key=options.tls_key,
        **timeout,
    )

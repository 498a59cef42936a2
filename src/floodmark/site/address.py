"""The address of a site: its URL or directory, and the files with credentials for its server.

Spark shows addresses in plans and event logs, so an address never holds a token or a key itself.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from floodmark.model.errors import InvalidOption
from floodmark.site.connecting import TIMEOUT, connect
from floodmark.site.site import Site
from floodmark.wire.address import SCHEMES, parse_addresses

# Option names of readers, writers and jobs, with the address fields that they set.
FILES: Final = {
    "tokenFile": "token_file",
    "tlsRootCertificate": "tls_root",
    "tlsCertificate": "tls_certificate",
    "tlsKey": "tls_key",
}


@dataclass(frozen=True, kw_only=True)
class SiteAddress:
    """A server's URL or a site's directory, and the files with credentials for the server.

    >>> SiteAddress(location="grpc://127.0.0.1:7100").is_url, SiteAddress(location="data/oslo").is_url
    (True, False)
    """

    location: str
    token_file: str | None = None
    tls_root: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    timeout: timedelta = TIMEOUT
    # The name of the site, if it is known before connecting.
    name: str | None = None

    def __post_init__(self) -> None:
        if not self.location:
            raise InvalidOption("a site is named by its URL or its directory: load('grpc://host:port')")
        if "://" in self.location:
            self._require_url()

    @property
    def is_url(self) -> bool:
        """Whether the address is a server's URL."""
        return self.location.partition("://")[0] in SCHEMES

    def connect(self) -> Site:
        """Connect to the site.  Close it after use, or use it as a `with` block."""
        self.require_url("be connected to")
        return connect(
            self.location,
            token_file=self.token_file,
            tls_root=self.tls_root,
            tls_certificate=self.tls_certificate,
            tls_key=self.tls_key,
            timeout=self.timeout,
        )

    def require_url(self, purpose: str) -> None:
        """Raise InvalidOption if this is a directory.  `purpose` names the operation that needs a server."""
        if not self.is_url:
            raise InvalidOption(
                f"the directory {self.location!r:.200} can be read, but not {purpose}; start a server with "
                f"`floodmark serve {self.location}` and use its URL",
                option="path",
            )

    def options(self) -> dict[str, str]:
        """The options that make up this address, without the location.

        >>> SiteAddress(location="grpc://a:1", token_file="secret/token").options()
        {'tokenFile': 'secret/token'}
        """
        named = {option: getattr(self, field) for option, field in FILES.items()}
        return {option: file for option, file in named.items() if file is not None}

    def _require_url(self) -> None:
        try:
            parse_addresses(self.location)
        except ValueError as error:
            # The message does not repeat the URL, which may hold a password.
            raise InvalidOption(f"the site's URL cannot be used: {error}", option="path") from None

"""Addresses of servers: `grpc://host:port`, or `grpc+tls://host:port` with encryption.

A site that several nodes serve has several: `grpc://oslo-1:7100,oslo-2:7100`.
"""

from typing import Final, NamedTuple
from urllib.parse import urlsplit

from floodmark.model.errors import InvalidArgument

DEFAULT_PORT: Final = 7100

# The scheme of a URL, and whether it asks for TLS.
SCHEMES: Final = {"grpc": False, "grpc+tls": True, "floodmark": False, "floodmark+tls": True}


class Address(NamedTuple):
    """A host, a port, and whether to encrypt."""

    host: str
    port: int
    tls: bool

    @property
    def url(self) -> str:
        """The address in the form that Arrow Flight takes.

        >>> parse_address("floodmark+tls://[::1]").url
        'grpc+tls://[::1]:7100'
        """
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'grpc+tls' if self.tls else 'grpc'}://{host}:{self.port}"


def parse_addresses(url: str) -> list[Address]:
    """The addresses of the nodes of a site, which share a scheme.

    >>> [address.url for address in parse_addresses("grpc://oslo-1,oslo-2:7200")]
    ['grpc://oslo-1:7100', 'grpc://oslo-2:7200']
    """
    scheme, _, hosts = url.partition("://") if isinstance(url, str) else ("", "", "")
    if "," not in hosts:
        return [parse_address(url)]
    return list(dict.fromkeys(parse_address(f"{scheme}://{host.strip()}") for host in hosts.split(",")))


def parse_address(url: str) -> Address:
    """Parse the URL of one server; raises InvalidArgument, without repeating what may be a secret.

    >>> parse_address("grpc://127.0.0.1:7100")
    Address(host='127.0.0.1', port=7100, tls=False)
    """
    expected = "a server's URL looks like grpc://host:port or grpc+tls://host:port"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{expected}; this one cannot be read") from error
    if parts.username is not None or parts.password is not None:
        # Not repeated: it is probably a secret.
        raise InvalidArgument(f"{expected}; a token is passed as token= or token_file=, not in the URL")
    if (
        parts.scheme not in SCHEMES
        or not host
        or parts.query
        or parts.fragment
        or parts.path not in ("", "/")
    ):
        # The text after a question mark may be a secret, and is not repeated.
        shown = parts._replace(query="…" if parts.query else "", fragment="").geturl()
        hint = "; a token is passed as token= or token_file=" if parts.query else ""
        raise InvalidArgument(f"{expected}, not {shown!r:.200}{hint}")
    return Address(host, DEFAULT_PORT if port is None else port, SCHEMES[parts.scheme])

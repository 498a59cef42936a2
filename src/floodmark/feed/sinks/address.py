"""The URI of a sink: `scheme:place?name=value&…`.

A URI is stored with its feed and shown to every reader of the feed, so it never holds a secret: a password or
a token stands in a file, and the URI names the file.  Errors do not repeat a refused URI either.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from floodmark.model.errors import InvalidArgument

URI_CHARACTERS_MAX: Final = 2_048

_SECRET: Final = re.compile(r"token|password|secret|credential|key", re.IGNORECASE)
# Parameters that name a file, or keys that are no secret.
_HARMLESS: Final = re.compile(r".*_(file|path|location)|(start|end)_key", re.IGNORECASE)


class SinkAddress(NamedTuple):
    """The parts of a sink's URI.  `host` follows `//`; `path` is unescaped."""

    scheme: str
    host: str
    path: str
    parameters: Mapping[str, str]

    def __str__(self) -> str:
        """The URI again.

        >>> str(parse_sink("parquet:data/out?compression=zstd"))
        'parquet:data/out?compression=zstd'
        """
        place = f"//{self.host}" if self.host else ""
        query = f"?{urlencode(self.parameters, safe='/')}" if self.parameters else ""
        return f"{self.scheme}:{place}{quote(self.path)}{query}"

    def require_known(self, known: Iterable[str]) -> None:
        """Refuse parameters that the sink does not have, such as mistyped ones."""
        names = sorted(known)
        unknown = sorted(self.parameters.keys() - set(names))
        if unknown:
            raise InvalidArgument(
                f"the sink {self.scheme}: has no parameter {', '.join(unknown)}; "
                + (f"it takes: {', '.join(names)}" if names else "it takes none of its own")
            )

    def require_empty(self) -> None:
        """Refuse a host or a path where the sink has none."""
        if self.host or self.path:
            raise InvalidArgument(f"the sink {self.scheme}: takes nothing behind the colon but parameters")


def parse_sink(uri: str) -> SinkAddress:
    """Parse a sink's URI.

    >>> parse_sink("kafka://broker:9092/users?password_file=p")
    SinkAddress(scheme='kafka', host='broker:9092', path='/users', parameters={'password_file': 'p'})
    >>> parse_sink("stdout:").scheme
    'stdout'
    """
    if not isinstance(uri, str) or not 0 < len(uri) <= URI_CHARACTERS_MAX or not uri.isprintable():
        raise InvalidArgument(
            f"a sink is a URI of at most {URI_CHARACTERS_MAX:,} printable characters, such as "
            "parquet:data/changes"
        )
    try:
        parts = urlsplit(uri)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise InvalidArgument(
            "the sink's URI cannot be read; write scheme:place?name=value&name=value"
        ) from None
    _require_plain(parts, [name for name, _ in pairs])
    return SinkAddress(parts.scheme, parts.netloc, unquote(parts.path), dict(pairs))


def _require_plain(parts: SplitResult, names: list[str]) -> None:
    if not parts.scheme or parts.fragment:
        raise InvalidArgument(
            "a sink's URI begins with its scheme and has no #fragment; write for example parquet:data/changes"
        )
    if "@" in parts.netloc:
        raise InvalidArgument(
            "a sink's URI must not hold a user name or a password, for it is stored and shown; "
            "put the secret into a file and name the file, for example with token_file="
        )
    for name in names:
        if _SECRET.search(name) and not _HARMLESS.fullmatch(name):
            raise InvalidArgument(
                f"a sink's URI must not hold {name}, for it is stored and shown; "
                "put the secret into a file and name the file, for example with token_file="
            )
    if len(set(names)) < len(names):
        raise InvalidArgument("a sink's URI must not name a parameter twice")

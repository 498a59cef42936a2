"""The arguments and options that commands share, with the words that explain them in `--help`."""

from datetime import timedelta
from typing import Annotated, Any, Final

import typer

from floodmark.cli.parsing import parse, read_since
from floodmark.model import Version
from floodmark.model.text import read_at, read_bytes, read_duration

BYTES_HELP: Final = "UTF-8 text, or hexadecimal behind 0x (0x00ff)."
JSON_HELP: Final = (
    "Print JSON, one object a line. Bytes that are UTF-8 stand as text in `key` and `value`, others as "
    "base64 in `key_base64` and `value_base64`. Versions are strings, times ISO 8601 in UTC."
)


def text_option(name: str, metavar: str, help_text: str, **more: Any) -> Any:
    """An option with a value."""
    return typer.Option(name, metavar=metavar, help=help_text, **more)


def duration_option(name: str, help_text: str, **more: Any) -> Any:
    """An option that is a length of time."""
    return text_option(name, "DURATION", help_text, parser=parse(read_duration), **more)


def key_option(name: str, help_text: str) -> Any:
    """An option that is a key."""
    return text_option(name, "KEY", help_text, parser=parse(read_bytes))


def version_option(name: str, help_text: str) -> Any:
    """An option that is a version, or the time of one."""
    return text_option(name, "VERSION|TIME", help_text, parser=parse(read_at))


_DIRECTORY_HELP: Final = "The site's directory; where a site is made, a new or empty one."
_SITE_HELP: Final = "The site: its directory, or its server's URL, such as grpc://127.0.0.1:7100."
_SINCE: Final = "VERSION|TIME|snapshot|beginning|now"
_SINCE_HELP: Final = "Only changes after this, exclusive; snapshot: every key as it is, then later changes."

Directory = Annotated[str, typer.Argument(metavar="DIRECTORY", help=_DIRECTORY_HELP)]
Location = Annotated[str, typer.Argument(metavar="SITE", help=_SITE_HELP)]
NamespaceName = Annotated[str, typer.Argument(metavar="NAMESPACE", help="The namespace's name.")]
Key = Annotated[bytes, typer.Argument(metavar="KEY", parser=parse(read_bytes), help=f"The key: {BYTES_HELP}")]
Prefix = Annotated[bytes | None, key_option("--prefix", "Only keys that start with this.")]
StartKey = Annotated[bytes | None, key_option("--start-key", "Only keys from this one on, inclusive.")]
EndKey = Annotated[bytes | None, key_option("--end-key", "Only keys before this one, exclusive.")]
# Typer takes no union of types: the value is a `floodmark.site.arguments.Since`, or None.
SinceOption = Annotated[Any, text_option("--since", _SINCE, _SINCE_HELP, parser=parse(read_since))]
SinceArgument = Annotated[
    Any,
    typer.Argument(metavar=_SINCE, parser=parse(read_since), help="Where to go on: after this, exclusive."),
]
AtOption = Annotated[
    Version | None, version_option("--at", "Read as of a version, or of a time such as 2026-01-31T12:00:00Z.")
]
Ttl = Annotated[timedelta | None, duration_option("--ttl", "Time to live: 90s, 24h, 7d.")]
Retention = Annotated[
    timedelta | None,
    duration_option("--retention", "How long old versions and changes are kept at least: 24h, 7d."),
]
Json = Annotated[bool, typer.Option("--json", help=JSON_HELP)]
InsecureMetrics = Annotated[
    bool,
    typer.Option(
        "--insecure-metrics", help="Serve --metrics beyond this machine too: nothing protects these pages."
    ),
]

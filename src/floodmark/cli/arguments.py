"""The arguments and options that commands share, with the words that explain them in `--help`."""

from datetime import timedelta
from typing import Annotated, Any

import typer

from floodmark.cli.parsing import parse, read_since
from floodmark.model import Version
from floodmark.model.text import read_at, read_bytes, read_duration

BYTES_HELP = "UTF-8 text, or hexadecimal behind 0x (0x00ff)."
JSON_HELP = (
    "Print JSON, one object a line. Bytes that are UTF-8 stand as text in `key` and `value`, others as "
    "base64 in `key_base64` and `value_base64`. Versions are strings, times ISO 8601 in UTC."
)
AT_HELP = "Read as of a version, or of a time such as 2026-01-31T12:00:00Z."

Directory = Annotated[
    str,
    typer.Argument(metavar="DIRECTORY", help="The site's directory; if it is to be made, new or empty."),
]
Location = Annotated[
    str,
    typer.Argument(
        metavar="SITE",
        help="The site: its directory, or its server's URL, such as grpc://127.0.0.1:7100.",
    ),
]
NamespaceName = Annotated[str, typer.Argument(metavar="NAMESPACE", help="The namespace's name.")]
Key = Annotated[bytes, typer.Argument(metavar="KEY", parser=parse(read_bytes), help=f"The key: {BYTES_HELP}")]
Prefix = Annotated[
    bytes | None,
    typer.Option("--prefix", metavar="KEY", parser=parse(read_bytes), help="Only keys that start with this."),
]
StartKey = Annotated[
    bytes | None,
    typer.Option(
        "--start-key", metavar="KEY", parser=parse(read_bytes), help="Only keys from this one on, inclusive."
    ),
]
EndKey = Annotated[
    bytes | None,
    typer.Option(
        "--end-key", metavar="KEY", parser=parse(read_bytes), help="Only keys before this one, exclusive."
    ),
]
# Typer takes no union of types: what arrives is a `floodmark.site.arguments.Since`, or None.
SinceOption = Annotated[
    Any,
    typer.Option(
        "--since",
        metavar="VERSION|TIME|snapshot|beginning|now",
        parser=parse(read_since),
        help="Only what came after this, exclusive; snapshot: every key as it is, then what comes after.",
    ),
]
AtOption = Annotated[
    Version | None, typer.Option("--at", metavar="VERSION|TIME", parser=parse(read_at), help=AT_HELP)
]
Ttl = Annotated[
    timedelta | None,
    typer.Option(
        "--ttl", metavar="DURATION", parser=parse(read_duration), help="Time to live: 90s, 24h, 7d."
    ),
]
Retention = Annotated[
    timedelta | None,
    typer.Option(
        "--retention",
        metavar="DURATION",
        parser=parse(read_duration),
        help="How long old versions and changes are kept at least: 24h, 7d.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help=JSON_HELP)]
InsecureMetrics = Annotated[
    bool,
    typer.Option(
        "--insecure-metrics", help="Serve --metrics beyond this machine too: nothing protects these pages."
    ),
]

"""changes: what was written, in the order in which it was committed."""

from collections.abc import Iterator
from typing import Annotated

import typer

import floodmark
from floodmark.cli.arguments import Directory, Json, Prefix, parse
from floodmark.cli.opening import open_site
from floodmark.cli.output import Output, counted, note
from floodmark.cli.text import json_bytes, read_at, show_bytes, show_expiry, show_time
from floodmark.model import Version
from floodmark.model.errors import VersionCollected

Since = Annotated[
    Version | None,
    typer.Option(
        "--since",
        metavar="VERSION|TIME",
        parser=parse(read_at),
        help="Only what came after this, exclusive; without it, all that is kept.",
    ),
]
Until = Annotated[
    Version | None,
    typer.Option(
        "--until",
        metavar="VERSION|TIME",
        parser=parse(read_at),
        help="Only up to this, inclusive; without it, up to the present.",
    ),
]


def changes(
    directory: Directory,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", metavar="NAMESPACE", help="Only this one; without it, all."),
    ] = None,
    prefix: Prefix = None,
    since: Since = None,
    until: Until = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for more, until --until is reached or Ctrl-C is pressed.")
    ] = False,
    json: Json = False,
) -> None:
    """Print what was written, in commit order.

    A line has version, time, namespace, type, key and value, with tabs between them. To go
    on later, pass the version of the last change that you have to --since. A change is printed
    only when it is durable and nothing earlier can still come.

    \b
    Examples:
      floodmark changes data/oslo
      floodmark changes data/oslo --namespace users --since 2026-01-31T12:00:00Z
      floodmark changes data/oslo --since 467077993267200001 --follow --json
    """
    output = Output(json=json, flush=follow)
    with open_site(directory, background=follow) as site:
        if follow and output.is_terminal:
            note("following: this process owns the site until you press Ctrl-C")
        rows = _read(site, namespace, prefix, since, until, follow=follow)
        for change in rows if follow else counted(rows, "changes read"):
            _print(output, change)


def _read(
    site: floodmark.Site,
    namespace: str | None,
    prefix: bytes | None,
    since: Version | None,
    until: Version | None,
    *,
    follow: bool,
) -> Iterator[floodmark.Change]:
    """The changes; if no beginning was asked for, from the oldest that is kept, and saying so."""
    if since is not None:
        yield from site.changes(namespace, since=since, until=until, follow=follow, prefix=prefix)
        return
    start: Version = 0
    printed = False
    while True:
        try:
            for change in site.changes(namespace, since=start, until=until, follow=follow, prefix=prefix):
                printed = True
                yield change
            return
        except VersionCollected as error:
            oldest = error.details.get("oldest")
            if printed or not isinstance(oldest, int) or oldest == start:
                raise
            start = oldest
            note(f"these are the changes after {oldest} ({show_time(oldest)}); older ones are not kept")


def _print(output: Output, change: floodmark.Change) -> None:
    if output.json:
        output.object(
            {
                "namespace": change.namespace,
                **json_bytes("key", change.key),
                "type": change.type.value,
                **json_bytes("value", change.value),
                "version": str(change.version),
                "time": show_time(change.version),
                "partition": change.partition,
                "origin_version": str(change.stamp.version),
                "origin_site_id": change.stamp.site,
                "expires_at": show_expiry(change.expires_at),
            }
        )
        return
    output.line(
        (f"{change.version}\t{show_time(change.version)}", "dim"),
        f"\t{change.namespace}\t",
        (change.type.value, "green" if change.value is not None else "red"),
        "\t",
        (show_bytes(change.key), "cyan"),
        "" if change.value is None else f"\t{show_bytes(change.value)}",
    )

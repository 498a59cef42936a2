"""init, status, gc and version: the site as a whole."""

import os
import platform
from dataclasses import fields, is_dataclass
from datetime import datetime
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import typer

import floodmark
from floodmark.cli.arguments import Directory, Json
from floodmark.cli.opening import holds_site, open_site
from floodmark.cli.output import Output, progress
from floodmark.cli.partitions import partition_fields
from floodmark.cli.text import (
    json_bytes,
    show_bytes,
    show_count,
    show_moment,
    show_size,
    show_time,
    show_version,
)
from floodmark.site.directory import FORMAT


def init(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Where to make it: a new or an empty directory.")
    ],
    site: Annotated[
        str | None,
        typer.Option("--site", metavar="NAME", help="The site's name; without it, the directory's."),
    ] = None,
    site_id: Annotated[
        int | None,
        typer.Option(
            "--site-id",
            metavar="NUMBER",
            min=1,
            max=255,
            help="An id that no other site has; without it, one that follows from the name.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Make a site.  No other command makes one, so that a mistyped path is noticed.

    If the site is there already, under the same name, nothing changes.

    \b
    Example:
      floodmark init data/oslo --site oslo
    """
    output = Output(json=json)
    created = not holds_site(directory)
    with floodmark.open(directory, site=site, site_id=site_id, background=False) as made:
        name, number = made.name, made.id
    if json:
        output.object({**_path(directory), "site": name, "site_id": number, "created": created})
    else:
        state = "made" if created else "already there:"
        output.line(f"{state} site {name} with id {number} in {_shown(directory)}")


def status(directory: Directory, json: Json = False) -> None:
    """Show how a site is: versions, sizes, namespaces.

    With --json, all of its statistics; counters such as `commits` begin when a process opens
    the site, so they are small here.

    \b
    Examples:
      floodmark status data/oslo
      floodmark status data/oslo --json
    """
    output = Output(json=json)
    with open_site(directory) as site:
        statistics, safe_points = site.statistics(), site.safe_points()
    if json:
        names = {each.id: each.name for each in statistics.namespaces}
        partitions = [partition_fields(partition, names) for partition in statistics.partitions]
        counted = {**_plain(statistics), "partitions": partitions, "safe_points": len(safe_points)}
        output.object({**_path(directory), **counted})
        return
    pairs = [
        ("site", f"{statistics.site}, id {statistics.site_id}, format {statistics.format}"),
        ("directory", _shown(directory)),
        ("version", show_version(statistics.version)),
        ("resolved", show_version(statistics.resolved_version)),
        ("data", f"{show_size(statistics.data_bytes)}, change log {show_size(statistics.log_bytes)}"),
        ("namespaces", ", ".join(each.name for each in statistics.namespaces) or "none yet"),
        ("partitions", f"{len(statistics.partitions):,}"),
        ("safe points", f"{len(safe_points):,}"),
    ]
    if statistics.clock_ahead_ms:
        pairs.append(("clock", f"{statistics.clock_ahead_ms:,} ms ahead of the machine's"))
    output.fields(pairs)


def gc(directory: Directory, json: Json = False) -> None:
    """Collect garbage: remove what nobody can need.

    That is what is older than its namespace's retention. Safe points hold it back: see
    `floodmark safepoint list`. An open site does this by itself every ten minutes.

    \b
    Example:
      floodmark gc data/oslo
    """
    output = Output(json=json)
    with open_site(directory) as site, progress("collecting garbage"):
        report = site.collect_garbage()
    if json:
        output.object(_plain(report))
        return
    trimmed = report.log_trimmed_version
    output.fields(
        [
            ("read", show_count(report.versions_read, "version")),
            ("removed", show_count(report.versions_removed, "version")),
            ("keys gone", f"{report.keys_removed:,}"),
            ("namespaces gone", f"{report.namespaces_removed:,}"),
            ("changes kept", f"after {show_time(trimmed)}" if trimmed else "all"),
        ]
    )


def version(json: Json = False) -> None:
    """Print the versions of Floodmark, its format and Python.

    \b
    Example:
      floodmark version
    """
    own, python = installed_version("floodmark"), platform.python_version()
    if json:
        Output(json=True).object({"floodmark": own, "format": FORMAT, "python": python})
    else:
        Output(json=False).line(f"floodmark {own} (format {FORMAT}, Python {python})")


def _path(directory: Path) -> dict[str, str | None]:
    return json_bytes("directory", os.fsencode(directory))


def _shown(directory: Path) -> str:
    return show_bytes(os.fsencode(directory))


def _plain(value: object) -> dict[str, object]:
    """A dataclass as JSON fields: versions become strings, moments ISO 8601."""
    assert is_dataclass(value)
    return {field.name: _json_value(getattr(value, field.name), field.name) for field in fields(value)}


def _json_value(value: object, name: str) -> object:
    if isinstance(value, datetime):
        return show_moment(value)
    if isinstance(value, int) and name.endswith(("version", "horizon")):
        return str(value)
    if is_dataclass(value):
        return _plain(value)
    if isinstance(value, list):
        return [_json_value(each, name) for each in value]
    return value

"""init and gc: the site as a whole."""

from typing import Annotated

import typer

import floodmark
from floodmark.cli.arguments import Directory, Json, Location
from floodmark.cli.locations import location_fields, show_location
from floodmark.cli.opening import holds_site, open_site, require_directory
from floodmark.cli.render.fields import plain
from floodmark.cli.render.output import Output
from floodmark.cli.render.progress import progress
from floodmark.cli.render.text import show_count, show_time


def init(
    directory: Directory,
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
    """Make a site.  Only this and `serve` make one, so that a mistyped path is noticed.

    If the site is there already, under the same name, nothing changes.

    \b
    Example:
      floodmark init data/oslo --site oslo
    """
    output = Output(json=json)
    path = require_directory(directory)
    created = not holds_site(path)
    with floodmark.open(path, site=site, site_id=site_id, background=False) as made:
        name, number = made.name, made.id
    if json:
        output.object({**location_fields(directory), "site": name, "site_id": number, "created": created})
    else:
        state = "made" if created else "already there:"
        output.line(f"{state} site {name} with id {number} in {show_location(directory)}")


def gc(location: Location, json: Json = False) -> None:
    """Collect garbage: remove what nobody can need.

    That is what is older than its namespace's retention. Safe points hold it back: see
    `floodmark safepoint list`. An open site does this by itself every ten minutes.

    \b
    Example:
      floodmark gc data/oslo
    """
    output = Output(json=json)
    with open_site(location) as site, progress("collecting garbage"):
        report = site.collect_garbage()
    if json:
        output.object(plain(report))
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

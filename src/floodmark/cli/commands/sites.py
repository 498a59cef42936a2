"""init and gc: the site as a whole."""

from typing import Annotated

import floodmark
from floodmark.cli.arguments import Directory, Json, Location, text_option
from floodmark.cli.locations import location_fields, show_location
from floodmark.cli.opening import holds_site, open_site, require_directory
from floodmark.cli.render.fields import plain
from floodmark.cli.render.output import Output
from floodmark.cli.render.progress import progress
from floodmark.cli.render.text import show_count, show_time


def init(
    directory: Directory,
    site: Annotated[
        str | None, text_option("--site", "NAME", "The site's name; without it, the directory's.")
    ] = None,
    site_id: Annotated[
        int | None,
        text_option(
            "--site-id",
            "NUMBER",
            "An id that no other site has; without it, one that follows from the name.",
            min=1,
            max=255,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Make a site.  Only this and `serve` make one, so that a mistyped path is noticed.

    Does nothing to a site that exists under the same name.

    \b
    Example:
      floodmark init data/oslo --site oslo
    """
    path = require_directory(directory)
    created = not holds_site(path)
    with floodmark.open(path, site=site, site_id=site_id, background=False) as made:
        name, number = made.name, made.id
    state = "made" if created else "already there:"
    Output(json=json).result(
        {**location_fields(directory), "site": name, "site_id": number, "created": created},
        f"{state} site {name} with id {number} in {show_location(directory)}",
    )


def gc(location: Location, json: Json = False) -> None:
    """Collect garbage: remove versions older than the retention.

    Safe points hold it back: see `floodmark safepoint list`. An open site collects garbage by
    itself every ten minutes.

    \b
    Example:
      floodmark gc data/oslo
    """
    with open_site(location) as site, progress("collecting garbage"):
        report = site.collect_garbage()
    trimmed = report.log_trimmed_version
    Output(json=json).result(
        plain(report),
        [
            ("read", show_count(report.versions_read, "version")),
            ("removed", show_count(report.versions_removed, "version")),
            ("keys gone", f"{report.keys_removed:,}"),
            ("namespaces gone", f"{report.namespaces_removed:,}"),
            ("changes kept", f"after {show_time(trimmed)}" if trimmed else "all"),
        ],
    )

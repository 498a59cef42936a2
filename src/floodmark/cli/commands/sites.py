"""init, gc and version: the site as a whole, and which Floodmark this is."""

import platform
from typing import Annotated

import floodmark
from floodmark.cli.arguments import Directory, OpenSite, SiteId
from floodmark.cli.opening import holds_site, location_fields, require_directory, show_location
from floodmark.cli.render.output import Output
from floodmark.cli.render.progress import progress
from floodmark.cli.render.text import show_count, show_time
from floodmark.model.format import FORMAT


def init(
    directory: Directory,
    output: Output,
    site: Annotated[str | None, "NAME", "The site's name; the directory's name by default."] = None,
    id: SiteId = None,
) -> None:
    """Make a site.  Only this and `serve` make one, so that a mistyped path is noticed.

    Does nothing to a site that exists under the same name.

    Example:
      floodmark init data/oslo --site oslo
    """
    path = require_directory(directory)
    created = not holds_site(path)
    with floodmark.open(path, site=site, site_id=id, background=False) as made:
        name, number = made.name, made.id
    state = "made" if created else "already there:"
    output.result(
        {**location_fields(directory), "site": name, "site_id": number, "created": created},
        f"{state} site {name} with id {number} in {show_location(directory)}",
    )


def gc(site: OpenSite, output: Output) -> None:
    """Collect garbage: remove versions older than the retention.

    Safe points hold it back: see `floodmark safepoint list`. An open site collects garbage by
    itself every ten minutes.
    """
    with progress("collecting garbage"):
        report = site.collect_garbage()
    trimmed = report.log_trimmed_version
    output.details(
        report,
        {
            "read": lambda each: show_count(each.versions_read, "version"),
            "removed": lambda each: show_count(each.versions_removed, "version"),
            "keys gone": "keys_removed",
            "namespaces gone": "namespaces_removed",
            "changes kept": lambda _: f"after {show_time(trimmed)}" if trimmed else "all",
        },
    )


def version(output: Output) -> None:
    """Print the versions of Floodmark, its format and Python."""
    own, python = floodmark.__version__, platform.python_version()
    output.result(
        {"floodmark": own, "format": FORMAT, "python": python},
        f"floodmark {own} (format {FORMAT}, Python {python})",
    )

"""namespace create, list, show, update and drop."""

import sys
from typing import Annotated

import typer
from msgspec import UNSET

import floodmark
from floodmark.cli.arguments import Json, Location, NamespaceName, Retention, Ttl, text_option
from floodmark.cli.failures import FINDING, Usage
from floodmark.cli.opening import open_site
from floodmark.cli.render.fields import plain
from floodmark.cli.render.output import Column, Output, note
from floodmark.cli.render.progress import tracked
from floodmark.cli.render.text import show_duration, show_version
from floodmark.host.statistics import NamespaceStatistics
from floodmark.model.errors import NamespaceExists
from floodmark.site.rewriting import rewrite as rewrite_namespace

commands = typer.Typer(help="Create, list, show, change, rewrite and drop namespaces.")

Merge = Annotated[
    str,
    text_option(
        "--merge", "POLICY", "How concurrent writes of several sites merge: last_write, fields, counter."
    ),
]


@commands.command()
def create(
    location: Location,
    name: NamespaceName,
    merge: Merge = "last_write",
    ttl: Ttl = None,
    retention: Retention = None,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Do nothing if the namespace exists.")
    ] = False,
    json: Json = False,
) -> None:
    """Add a namespace to a site.

    With --merge last_write a record is a value, which the last write replaces; with fields, a
    JSON object whose fields are written one by one; with counter, a number that writes add to.
    --ttl holds for writes that name none; --retention is 24h if not given.

    \b
    Examples:
      floodmark namespace create data/oslo users
      floodmark namespace create data/oslo profiles --merge fields
      floodmark namespace create data/oslo sessions --ttl 30m --retention 7d
    """
    with open_site(location) as site:
        try:
            site.create_namespace(name, merge=merge, ttl=ttl, retention=retention)
        except NamespaceExists:
            if not if_missing:
                raise
        _print_one(site, name, json=json)


@commands.command("list")
def list_namespaces(location: Location, json: Json = False) -> None:
    """List the namespaces of a site, with their settings.

    \b
    Example:
      floodmark namespace list data/oslo
    """
    with open_site(location) as site:
        found = [_Namespace(site, each) for each in site.statistics().namespaces]
    columns: dict[str, Column[_Namespace]] = {
        "name": "name",
        "id": "id",
        "merge": lambda each: each.settings.merge,
        "ttl": lambda each: show_duration(each.settings.ttl),
        "retention": lambda each: show_duration(each.settings.retention),
        "readable since": "oldest_version",
    }
    Output(json=json).rows(found, columns, _Namespace.fields)


@commands.command()
def show(location: Location, name: NamespaceName, json: Json = False) -> None:
    """Show a namespace's settings, and how far back it can be read.

    \b
    Example:
      floodmark namespace show data/oslo users
    """
    with open_site(location) as site:
        _print_one(site, name, json=json)


@commands.command()
def update(
    location: Location,
    name: NamespaceName,
    ttl: Ttl = None,
    no_ttl: Annotated[
        bool, typer.Option("--no-ttl", help="Writes that name no time to live stay for good.")
    ] = False,
    retention: Retention = None,
    json: Json = False,
) -> None:
    """Change the settings of a namespace.

    Settings that are not named stay. A new time to live holds for later writes. The merge policy
    cannot be changed.

    \b
    Examples:
      floodmark namespace update data/oslo users --retention 7d
      floodmark namespace update data/oslo sessions --no-ttl
    """
    if ttl is not None and no_ttl:
        raise Usage("--ttl and --no-ttl exclude each other", "name one of them")
    if ttl is None and not no_ttl and retention is None:
        raise Usage("nothing to change", "name --ttl, --no-ttl or --retention")
    with open_site(location) as site:
        site.update_namespace(
            name,
            ttl=UNSET if ttl is None and not no_ttl else ttl,
            retention=UNSET if retention is None else retention,
        )
        _print_one(site, name, json=json)


@commands.command()
def drop(
    location: Location,
    name: NamespaceName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Drop a namespace with all its keys, at once and for good.

    Asks first on a terminal; elsewhere --yes is needed. A namespace that other sites share is
    refused: leave it out of the topology first.

    \b
    Example:
      floodmark namespace drop data/oslo sessions --yes
    """
    with open_site(location) as site:
        site.namespace(name)
        if not yes and not sys.stdin.isatty():
            raise Usage(f"this drops {name!r} with all its keys", "add --yes if you mean it")
        if not yes and not typer.confirm(f"Drop {name!r} with all its keys?", err=True):
            note("nothing was dropped")
            raise typer.Exit(FINDING)
        site.drop_namespace(name)
    Output(json=json).result({"name": name, "dropped": True}, f"dropped {name}")


@commands.command()
def rewrite(location: Location, name: NamespaceName, json: Json = False) -> None:
    """Write a namespace again, as it is, under new stamps.

    For a namespace with data that is to be shared, and for what a removed site has left behind.
    Records that change meanwhile are left alone, and a second run does no harm. Stop writes to it
    at other sites meanwhile: changes that have not arrived yet would lose. Counters are rewritten
    at every site that shares them.

    \b
    Example:
      floodmark namespace rewrite data/oslo users
    """
    with open_site(location) as site, tracked("rewriting") as track:
        rewritten = rewrite_namespace(site.host, name, lambda read: track("rewriting records", read))
    written = rewritten.records_read if rewritten.records_written is None else rewritten.records_written
    Output(json=json).result(
        plain(rewritten),
        [
            ("namespace", rewritten.namespace),
            ("read", f"{rewritten.records_read:,} records"),
            ("rewritten", f"{written:,} records"),
            ("older than", show_version(rewritten.since)),
        ],
    )


class _Namespace:
    """A namespace with its settings."""

    def __init__(self, site: floodmark.Site, statistics: NamespaceStatistics) -> None:
        self.name = statistics.name
        self.id = statistics.id
        self.oldest_version = statistics.oldest_version
        self.collected_horizon = statistics.collected_horizon
        self.settings = site.namespace(statistics.name).settings

    def fields(self) -> dict[str, object]:
        """The namespace for programs."""
        ttl, retention = self.settings.ttl, self.settings.retention
        return {
            "name": self.name,
            "id": self.id,
            "merge": self.settings.merge,
            "ttl_seconds": None if ttl is None else ttl.total_seconds(),
            "retention_seconds": retention.total_seconds(),
            "oldest_version": str(self.oldest_version),
            "collected_horizon": str(self.collected_horizon),
        }


def _print_one(site: floodmark.Site, name: str, *, json: bool) -> None:
    site.namespace(name)
    found = next(_Namespace(site, each) for each in site.statistics().namespaces if each.name == name)
    Output(json=json).result(
        found.fields(),
        [
            ("name", found.name),
            ("id", str(found.id)),
            ("merge", found.settings.merge),
            ("ttl", show_duration(found.settings.ttl)),
            ("retention", show_duration(found.settings.retention)),
            ("readable since", show_version(found.oldest_version)),
        ],
    )

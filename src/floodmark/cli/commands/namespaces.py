"""namespace create, list, show, update, rewrite and drop."""

import sys
from typing import Annotated, Any, Final

import typer
from msgspec import UNSET

import floodmark
from floodmark.cli.arguments import Commands, NamespaceName, OpenSite, Retention, Ttl
from floodmark.cli.failures import FINDING, Usage
from floodmark.cli.render.output import Column, Output, note, plain, show_value
from floodmark.cli.render.progress import tracked
from floodmark.cli.render.text import show_version
from floodmark.host.statistics import NamespaceStatistics
from floodmark.layers.large_values import LARGE_VALUES, LargeValues
from floodmark.layers.ports import layer_of
from floodmark.merge.policies import MergePolicy
from floodmark.site.rewriting import rewrite as rewrite_namespace

commands = Commands("namespace")

_COLUMNS: Final[dict[str, Column[dict[str, object]]]] = {
    "name": "name",
    "id": "id",
    "merge": "merge",
    "ttl": lambda each: show_value("ttl_seconds", each["ttl_seconds"]) or "none",
    "retention": "retention_seconds",
    "readable since": "oldest_version",
}


@commands.command()
def create(
    site: OpenSite,
    output: Output,
    name: NamespaceName,
    merge: Annotated[
        MergePolicy, "POLICY", "How concurrent writes of several sites merge: last_write, fields, counter."
    ] = "last_write",
    ttl: Ttl = None,
    retention: Retention = None,
    large_values: Annotated[bool, "Allow values of any size, stored in chunks; see docs/layers.md."] = False,
    if_missing: Annotated[bool, "Do nothing if the namespace exists."] = False,
) -> None:
    """Add a namespace to a site.

    With --merge last_write a record is a value, which the last write replaces; with fields, a
    JSON object whose fields are written one by one; with counter, a number that writes add to.
    --ttl holds for writes that name none; --retention is 24h if not given.

    Examples:
      floodmark namespace create data/oslo users
      floodmark namespace create data/oslo profiles --merge fields
      floodmark namespace create data/oslo sessions --ttl 30m --retention 7d
      floodmark namespace create data/oslo configs --large-values
    """
    options: Any = {"merge": merge, "ttl": ttl, "retention": retention, "exist_ok": if_missing}
    if large_values:
        options["large_values"] = True
    site.create_namespace(name, **options)
    show(site, output, name)


@commands.command("list")
def list_namespaces(site: OpenSite, output: Output) -> None:
    """List the namespaces of a site, with their settings."""
    output.rows([_fields(site, each) for each in site.statistics().namespaces], _COLUMNS)


@commands.command()
def show(site: OpenSite, output: Output, name: NamespaceName) -> None:
    """Show a namespace's settings, and how far back it can be read."""
    site.namespace(name)
    found = next(each for each in site.statistics().namespaces if each.name == name)
    output.details(_fields(site, found), _COLUMNS)


@commands.command()
def update(
    site: OpenSite,
    output: Output,
    name: NamespaceName,
    ttl: Ttl = None,
    no_ttl: Annotated[bool, "Writes without a time to live do not expire."] = False,
    retention: Retention = None,
) -> None:
    """Change the settings of a namespace.

    Settings that are not named stay. A new time to live holds for later writes. The merge policy
    cannot be changed.

    Examples:
      floodmark namespace update data/oslo users --retention 7d
      floodmark namespace update data/oslo sessions --no-ttl
    """
    if ttl is not None and no_ttl:
        raise Usage("--ttl and --no-ttl exclude each other", "name one of them")
    if ttl is None and not no_ttl and retention is None:
        raise Usage("nothing to change", "name --ttl, --no-ttl or --retention")
    site.update_namespace(
        name,
        ttl=UNSET if ttl is None and not no_ttl else ttl,
        retention=UNSET if retention is None else retention,
    )
    show(site, output, name)


@commands.command()
def drop(
    site: OpenSite, output: Output, name: NamespaceName, yes: Annotated[bool, "Do not ask."] = False
) -> None:
    """Drop a namespace with all its keys, at once and for good.

    Asks first on a terminal; elsewhere --yes is needed. A namespace that other sites share is
    refused: leave it out of the topology first.

    Example:
      floodmark namespace drop data/oslo sessions --yes
    """
    site.namespace(name)
    if not yes and not sys.stdin.isatty():
        raise Usage(f"this drops {name!r} with all its keys", "add --yes if you mean it")
    if not yes and not typer.confirm(f"Drop {name!r} with all its keys?", err=True):
        note("nothing was dropped")
        raise typer.Exit(FINDING)
    site.drop_namespace(name)
    output.result({"name": name, "dropped": True}, f"dropped {name}")


@commands.command()
def sweep(site: OpenSite, output: Output, name: NamespaceName) -> None:
    """Free the space of large values that were replaced or deleted.

    Also of values that were not written to their end. All were discarded at this site more than an
    hour ago: a reader may have younger ones open. Every put of a large value frees two by itself.

    Example:
      floodmark namespace sweep data/oslo configs
    """
    if layer_of(site.namespace(name)) != LARGE_VALUES:
        raise Usage(f"{name!r} holds no large values", "floodmark namespace create --help")
    swept = LargeValues(site, name).sweep()
    output.result({"name": name, "swept": swept}, f"values removed: {swept:,}")


@commands.command()
def rewrite(site: OpenSite, output: Output, name: NamespaceName) -> None:
    """Rewrite all records of a namespace under new stamps.

    Needed before a namespace with data can be shared, and for data that a removed site has left.
    A record that changes meanwhile is left alone, and a second run does no harm. Stop writes to
    the namespace at other sites first: changes that have not arrived yet would lose. Rewrite
    counters at every site that shares them.
    """
    with tracked("rewriting") as track:
        rewritten = rewrite_namespace(site.host, name, lambda read: track("rewriting records", read))
    written = rewritten.records_read if rewritten.records_written is None else rewritten.records_written
    output.details(
        rewritten,
        {
            "namespace": "namespace",
            "read": lambda each: f"{each.records_read:,} records",
            "rewritten": lambda _: f"{written:,} records",
            "older than": lambda each: show_version(each.since),
        },
    )


def _fields(site: floodmark.Site, statistics: NamespaceStatistics) -> dict[str, object]:
    """A namespace with its settings."""
    settings = site.namespace(statistics.name).settings
    return {
        **plain(statistics),
        "ttl_seconds": None if settings.ttl is None else settings.ttl.total_seconds(),
        "retention_seconds": settings.retention.total_seconds(),
    }

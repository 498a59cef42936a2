"""subscription list, show, seek and remove: the durable subscriptions of a site."""

from typing import Annotated

import typer

import floodmark
from floodmark.cli.arguments import Json, Location, SinceArgument
from floodmark.cli.opening import open_site
from floodmark.cli.render.fields import plain
from floodmark.cli.render.output import Output
from floodmark.cli.render.progress import progress
from floodmark.cli.render.text import json_bytes, show_bytes, show_lag, show_version
from floodmark.feed.subscription.subscriptions import SubscriptionRow, SubscriptionStatistics
from floodmark.model import KeyRange

commands = typer.Typer(help="List, show, move and remove durable subscriptions.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The subscription's name.")]


@commands.command("list")
def list_subscriptions(location: Location, json: Json = False) -> None:
    """List the subscriptions of a site.

    \b
    Example:
      floodmark subscription list data/oslo
    """
    with open_site(location) as site, progress("counting backlogs"):
        found = [(row, site.subscriptions.statistics(row.name)) for row in site.subscriptions.list()]
    specs = {row.name: row for row, _ in found}
    Output(json=json).rows(
        [statistics for _, statistics in found],
        {
            "name": "name",
            "namespace": "namespace",
            "delivered up to": "through",
            "backlog": _show_backlog,
            "lag": "lag_ms",
            "consumer": lambda each: each.holder or "none",
        },
        lambda each: _fields(specs[each.name], each),
    )


@commands.command()
def show(location: Location, name: Name, json: Json = False) -> None:
    """Show a subscription.

    \b
    Example:
      floodmark subscription show data/oslo indexer
    """
    with open_site(location) as site:
        _print_one(site, name, json=json)


@commands.command()
def seek(location: Location, name: Name, since: SinceArgument, json: Json = False) -> None:
    """Let a subscription go on somewhere else.

    Changes after that place are delivered again; changes that are skipped are not delivered. The
    subscription must have no consumer at the moment.

    \b
    Examples:
      floodmark subscription seek data/oslo indexer snapshot
      floodmark subscription seek data/oslo indexer 2026-01-31T12:00:00Z
    """
    with open_site(location) as site:
        site.subscriptions.seek(name, since)
        _print_one(site, name, json=json)


@commands.command()
def remove(location: Location, name: Name, json: Json = False) -> None:
    """Remove a subscription: garbage collection waits for it no longer.

    It must have no consumer at the moment.

    \b
    Example:
      floodmark subscription remove data/oslo indexer
    """
    with open_site(location) as site:
        site.subscriptions.remove(name)
    Output(json=json).result({"name": name, "removed": True}, f"removed {name}")


def show_keys(keys: KeyRange) -> str:
    """A range of user keys, for people."""
    start = f"from {show_bytes(keys.start)}" if keys.start else "from the first"
    return f"{start} to the last" if keys.end is None else f"{start} to before {show_bytes(keys.end)}"


def _show_backlog(statistics: SubscriptionStatistics) -> str:
    return f"{statistics.backlog:,}" if statistics.backlog_is_exact else f"more than {statistics.backlog:,}"


def _print_one(site: floodmark.Site, name: str, *, json: bool) -> None:
    row, statistics = site.subscriptions.show(name), site.subscriptions.statistics(name)
    Output(json=json).result(
        _fields(row, statistics),
        [
            ("name", name),
            ("namespace", statistics.namespace),
            ("keys", show_keys(row.spec.keys)),
            ("delivered up to", show_version(statistics.through)),
            ("unacknowledged", f"{statistics.unacked:,} of at most {row.spec.unacked_max:,}"),
            ("in transactions", f"{statistics.pending:,}"),
            ("backlog", _show_backlog(statistics)),
            ("lag", show_lag(statistics.lag_ms)),
            ("consumer", statistics.holder or "none"),
        ],
    )


def _fields(row: SubscriptionRow, statistics: SubscriptionStatistics) -> dict[str, object]:
    keys = row.spec.keys
    return {
        **plain(statistics),
        **json_bytes("start_key", keys.start),
        **json_bytes("end_key", keys.end),
        "unacked_max": row.spec.unacked_max,
    }

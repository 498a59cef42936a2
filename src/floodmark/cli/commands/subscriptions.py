"""subscription list, show, seek and remove: what durable subscriptions there are, and how far they are."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

import floodmark
from floodmark.cli.arguments import Json, Location
from floodmark.cli.opening import open_site
from floodmark.cli.parsing import parse, read_since
from floodmark.cli.render.fields import plain
from floodmark.cli.render.output import Output
from floodmark.cli.render.progress import progress
from floodmark.cli.render.text import json_bytes, show_bytes, show_lag, show_time, show_version
from floodmark.feed.subscription.subscriptions import SubscriptionRow, SubscriptionStatistics
from floodmark.model import KeyRange

commands = typer.Typer(help="See how far durable subscriptions are, and move or remove them.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The subscription's name.")]


@commands.command("list")
def list_subscriptions(location: Location, json: Json = False) -> None:
    """List the subscriptions of a site.

    \b
    Example:
      floodmark subscription list data/oslo
    """
    output = Output(json=json)
    with open_site(location) as site, progress("counting what is left"):
        rows = site.subscriptions.list()
        measured = [site.subscriptions.statistics(row.name) for row in rows]
    if json:
        for row, statistics in zip(rows, measured, strict=True):
            output.object(_fields(row, statistics))
        return
    output.table(
        ("name", "namespace", "delivered up to", "backlog", "lag", "consumer"),
        [_cells(each) for each in measured],
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
def seek(
    location: Location,
    name: Name,
    since: Annotated[
        Any,
        typer.Argument(
            metavar="VERSION|TIME|snapshot|beginning|now",
            parser=parse(read_since),
            help="Where to go on: behind this, exclusive.",
        ),
    ],
    json: Json = False,
) -> None:
    """Let a subscription go on somewhere else.

    What lies behind is delivered again, what is skipped is not delivered. The subscription must
    not have a consumer at the moment.

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
    """Forget a subscription, and let garbage collection go on.

    It must not have a consumer at the moment.

    \b
    Example:
      floodmark subscription remove data/oslo indexer
    """
    with open_site(location) as site:
        site.subscriptions.remove(name)
    if json:
        Output(json=True).object({"name": name, "removed": True})
    else:
        Output(json=False).line(f"removed {name}")


def show_keys(keys: KeyRange) -> str:
    """A range of user keys, for people."""
    start = f"from {show_bytes(keys.start)}" if keys.start else "from the first"
    return f"{start} to the last" if keys.end is None else f"{start} to before {show_bytes(keys.end)}"


def _cells(statistics: SubscriptionStatistics) -> Sequence[str]:
    return (
        statistics.name,
        statistics.namespace,
        show_time(statistics.through),
        _show_backlog(statistics),
        show_lag(statistics.lag_ms),
        statistics.holder or "nobody",
    )


def _show_backlog(statistics: SubscriptionStatistics) -> str:
    return f"{statistics.backlog:,}" if statistics.backlog_is_exact else f"more than {statistics.backlog:,}"


def _print_one(site: floodmark.Site, name: str, *, json: bool) -> None:
    row, statistics = site.subscriptions.show(name), site.subscriptions.statistics(name)
    output = Output(json=json)
    if json:
        output.object(_fields(row, statistics))
        return
    output.fields(
        [
            ("name", name),
            ("namespace", statistics.namespace),
            ("keys", show_keys(row.spec.keys)),
            ("delivered up to", show_version(statistics.through)),
            ("unacknowledged", f"{statistics.unacked:,} of at most {row.spec.unacked_max:,}"),
            ("in transactions", f"{statistics.pending:,}"),
            ("backlog", _show_backlog(statistics)),
            ("lag", show_lag(statistics.lag_ms)),
            ("consumer", statistics.holder or "nobody"),
        ]
    )


def _fields(row: SubscriptionRow, statistics: SubscriptionStatistics) -> dict[str, object]:
    keys = row.spec.keys
    return {
        **plain(statistics),
        **json_bytes("start_key", keys.start),
        **json_bytes("end_key", keys.end),
        "unacked_max": row.spec.unacked_max,
    }

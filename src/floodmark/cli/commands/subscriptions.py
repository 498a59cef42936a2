"""subscription list, show, seek and remove: the durable subscriptions of a site."""

from typing import Annotated, Any

import floodmark
from floodmark.cli.arguments import Commands, OpenSite
from floodmark.cli.render.output import Output, plain
from floodmark.cli.render.progress import progress
from floodmark.cli.render.text import show_keys, show_version
from floodmark.feed.subscription.subscriptions import SubscriptionRow
from floodmark.model.text import json_bytes

commands = Commands("subscription", sample="indexer")

Name = Annotated[str, "NAME", "The subscription's name."]
Since = Annotated[Any, "VERSION|TIME|snapshot|beginning|now", "Continue after this, exclusive."]


@commands.command("list")
def list_subscriptions(site: OpenSite, output: Output) -> None:
    """List the subscriptions of a site."""
    with progress("counting backlogs"):
        found = [_fields(site, row) for row in site.subscriptions.list()]
    output.rows(
        found,
        {
            "name": "name",
            "namespace": "namespace",
            "delivered up to": "through",
            "backlog": _show_backlog,
            "lag": "lag_ms",
            "consumer": lambda each: each["holder"] or "none",
        },
    )


@commands.command()
def show(site: OpenSite, output: Output, name: Name) -> None:
    """Show a subscription."""
    row = site.subscriptions.show(name)
    output.details(
        _fields(site, row),
        {
            "name": "name",
            "namespace": "namespace",
            "keys": lambda _: show_keys(row.spec.keys),
            "delivered up to": lambda each: show_version(int(each["through"])),
            "unacknowledged": lambda each: f"{each['unacked']:,} of at most {each['unacked_max']:,}",
            "in transactions": "pending",
            "backlog": _show_backlog,
            "lag": "lag_ms",
            "consumer": lambda each: each["holder"] or "none",
        },
    )


@commands.command()
def seek(site: OpenSite, output: Output, name: Name, since: Since) -> None:
    """Let a subscription go on somewhere else.

    Changes after that place are delivered again; changes that are skipped are not delivered. The
    subscription must have no consumer at the moment.

    Examples:
      floodmark subscription seek data/oslo indexer snapshot
      floodmark subscription seek data/oslo indexer 2026-01-31T12:00:00Z
    """
    site.subscriptions.seek(name, since)
    show(site, output, name)


@commands.command()
def remove(site: OpenSite, output: Output, name: Name) -> None:
    """Remove a subscription: garbage collection waits for it no longer.

    It must have no consumer at the moment.
    """
    site.subscriptions.remove(name)
    output.result({"name": name, "removed": True}, f"removed {name}")


def _show_backlog(each: dict[str, Any]) -> str:
    return f"{each['backlog']:,}" if each["backlog_is_exact"] else f"more than {each['backlog']:,}"


def _fields(site: floodmark.Site, row: SubscriptionRow) -> dict[str, Any]:
    return {
        **plain(site.subscriptions.statistics(row.name)),
        **json_bytes("start_key", row.spec.keys.start),
        **json_bytes("end_key", row.spec.keys.end),
        "unacked_max": row.spec.unacked_max,
    }

"""safepoint list, hold and release: what keeps the past from being collected."""

from datetime import timedelta
from typing import Annotated

import typer

import floodmark
from floodmark.cli.arguments import Json, Location, duration_option, text_option, version_option
from floodmark.cli.opening import open_site
from floodmark.cli.render.output import Output
from floodmark.cli.render.text import show_expiry, show_version
from floodmark.feed import LIFETIME
from floodmark.model import Version

commands = typer.Typer(help="Keep old versions and changes from garbage collection.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The safe point's name.")]
_AT_HELP = "Keep what a reader at this version or time sees; without it, at the present."
_LIFETIME_HELP = "How long, unless it is held again: 24h, 7d."


@commands.command("list")
def list_safe_points(location: Location, json: Json = False) -> None:
    """List the safe points that hold now.

    \b
    Example:
      floodmark safepoint list data/oslo
    """
    with open_site(location) as site:
        points = [_fields(site, point) for point in site.safe_points()]
    Output(json=json).rows(
        points,
        {
            "name": lambda point: str(point["name"]),
            "namespace": lambda point: str(point["namespace"] or "all"),
            "keeps since": lambda point: show_version(int(str(point["version"]))),
            "expires": lambda point: str(point["expires_at"]),
        },
        dict,
    )


@commands.command()
def hold(
    location: Location,
    name: Name,
    at: Annotated[Version | None, version_option("--at", _AT_HELP)] = None,
    lifetime: Annotated[
        timedelta | None, duration_option("--lifetime", _LIFETIME_HELP, show_default="24h")
    ] = None,
    namespace: Annotated[
        str | None, text_option("--namespace", "NAMESPACE", "Only in this one; without it, in all.")
    ] = None,
    json: Json = False,
) -> None:
    """Keep what a reader at a version sees.

    It is kept until the safe point is released or its lifetime is over. Holding again under the
    same name moves the safe point and renews its lifetime.

    \b
    Examples:
      floodmark safepoint hold data/oslo before-import
      floodmark safepoint hold data/oslo audit --at 2026-01-31T12:00:00Z --lifetime 7d
    """
    with open_site(location) as site:
        point = site.hold_safe_point(
            name,
            site.now() if at is None else at,
            lifetime=LIFETIME if lifetime is None else lifetime,
            namespace=namespace,
        )
        fields = _fields(site, point)
    Output(json=json).result(
        fields, f"{name} keeps {show_version(point.version)} until {fields['expires_at']}"
    )


@commands.command()
def release(location: Location, name: Name, json: Json = False) -> None:
    """Release a safe point: garbage collection passes it.

    \b
    Example:
      floodmark safepoint release data/oslo before-import
    """
    with open_site(location) as site:
        site.release_safe_point(name)
    Output(json=json).result({"name": name, "released": True}, f"released {name}")


def _fields(site: floodmark.Site, point: floodmark.SafePoint) -> dict[str, object]:
    names = {each.id: each.name for each in site.statistics().namespaces}
    return {
        "name": point.name,
        "namespace": None if point.namespace is None else names.get(point.namespace, f"#{point.namespace}"),
        "version": str(point.version),
        "expires_at": show_expiry(point.expires_at_ms // 1000),
    }

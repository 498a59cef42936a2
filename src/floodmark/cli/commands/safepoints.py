"""safepoint list, hold and release: safe points, which keep old versions from garbage collection."""

from datetime import timedelta
from typing import Annotated

import floodmark
from floodmark.cli.arguments import Commands, OpenSite
from floodmark.cli.commands.partitions import namespace_names
from floodmark.cli.render.output import Output
from floodmark.cli.render.text import show_expiry, show_version
from floodmark.feed import LIFETIME
from floodmark.model import Version

commands = Commands("safepoint", sample="before-import")

Name = Annotated[str, "NAME", "The safe point's name."]


@commands.command("list")
def list_safe_points(site: OpenSite, output: Output) -> None:
    """List the safe points that hold now."""
    names = namespace_names(site)
    output.rows(
        [_fields(point, names) for point in site.safe_points()],
        {
            "name": "name",
            "namespace": lambda point: point["namespace"] or "all",
            "keeps since": lambda point: show_version(int(str(point["version"]))),
            "expires": "expires_at",
        },
    )


@commands.command()
def hold(
    site: OpenSite,
    output: Output,
    name: Name,
    at: Annotated[
        Version | None,
        "VERSION|TIME",
        "The version or time to keep readable; now by default.",
    ] = None,
    lifetime: Annotated[
        timedelta, "DURATION", "When the safe point expires unless it is renewed: 24h, 7d."
    ] = LIFETIME,
    namespace: Annotated[str | None, "NAMESPACE", "Only in this namespace; all by default."] = None,
) -> None:
    """Keep what a reader at a version sees.

    It is kept until the safe point is released or its lifetime is over. Holding again under the
    same name moves the safe point and renews its lifetime.

    Examples:
      floodmark safepoint hold data/oslo before-import
      floodmark safepoint hold data/oslo audit --at 2026-01-31T12:00:00Z --lifetime 7d
    """
    version = site.now() if at is None else at
    point = site.hold_safe_point(name, version, lifetime=lifetime, namespace=namespace)
    fields = _fields(point, namespace_names(site))
    output.result(fields, f"{name} keeps {show_version(point.version)} until {fields['expires_at']}")


@commands.command()
def release(site: OpenSite, output: Output, name: Name) -> None:
    """Release a safe point: garbage collection passes it."""
    site.release_safe_point(name)
    output.result({"name": name, "released": True}, f"released {name}")


def _fields(point: floodmark.SafePoint, names: dict[int, str]) -> dict[str, object]:
    return {
        "name": point.name,
        "namespace": None if point.namespace is None else names.get(point.namespace, f"#{point.namespace}"),
        "version": str(point.version),
        "expires_at": show_expiry(point.expires_at_ms // 1000),
    }

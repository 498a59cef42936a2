"""namespace rewrite: everything in a namespace gets a new stamp."""

from floodmark.cli.arguments import Json, Location, NamespaceName
from floodmark.cli.opening import open_site
from floodmark.cli.render.fields import plain
from floodmark.cli.render.output import Output, tracked
from floodmark.cli.render.text import show_version
from floodmark.site.rewriting import rewrite as rewrite_namespace


def rewrite(location: Location, name: NamespaceName, json: Json = False) -> None:
    """Write a namespace again, as it is, under new stamps.

    For a namespace that is to be shared and holds data already, and for what a site has left
    behind that was removed. Whatever changes here meanwhile is left alone, and it does no harm
    to run it again. Let nobody write to it at other sites meanwhile: what has not arrived yet
    would lose. Counters are rewritten at every site that shares them.

    \b
    Example:
      floodmark namespace rewrite data/oslo users
    """
    with open_site(location) as site, tracked("rewriting") as track:
        rewritten = rewrite_namespace(site.host, name, lambda read: track("rewriting records", read))
    output = Output(json=json)
    if json:
        output.object(plain(rewritten))
        return
    written = rewritten.records_read if rewritten.records_written is None else rewritten.records_written
    output.fields(
        [
            ("namespace", rewritten.namespace),
            ("read", f"{rewritten.records_read:,} records"),
            ("rewritten", f"{written:,} records"),
            ("older than", show_version(rewritten.since)),
        ]
    )

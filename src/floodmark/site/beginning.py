"""Resolves where a reader of changes begins, and decodes the changes that it reads."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from floodmark.codec.ordered import qualify_range
from floodmark.feed import Decoder, Item
from floodmark.feed.reading.items import OnDamaged
from floodmark.feed.safepoints import begin_reading
from floodmark.host.ports import Host
from floodmark.model.change import Resolved
from floodmark.model.errors import InvalidRange
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import ChangeBatch
from floodmark.model.version import Version
from floodmark.site.arguments import At, Since, to_version

Result = TypeVar("Result")


def begin_at(
    host: Host, since: Since, begin: Callable[[Resolved], Result], *, until: At | None = None
) -> Result:
    """Call `begin` with the position that `since` names and return its result.

    A "snapshot" is taken at the resolved version, or at `until` if that is lower.
    """
    return begin_reading(
        since if isinstance(since, Resolved | str) else to_version(since) if since != 0 else 0,
        begin,
        present=host.versions.resolved_version,
        require_past=lambda version: host.versions.observe(to_version(version)),
        until=None if until is None else to_version(until),
    )


def find_scope(host: Host, namespace: str | None, keys: KeyRange) -> tuple[KeyRange, int | None, Version]:
    """The qualified keys, the namespace's id and the version of its creation.

    For all namespaces, the id is None and the version 0.
    """
    if namespace is not None:
        row = host.namespaces.find_namespace(namespace)
        return qualify_range(row.id, keys), row.id, row.created_at
    if keys != KeyRange():
        raise InvalidRange("a key range needs a namespace; name the one that it is in")
    return keys, None, 0


def decoder_of(host: Host) -> Decoder:
    """A decoder of the changes of a site."""

    def names() -> dict[int, str]:
        return {row.id: row.name for row in host.namespaces.list_namespaces()}

    return Decoder(host.identity.site_id, names, host.physical_ms)


def decode_items(
    host: Host, batches: Iterator[ChangeBatch], *, resolved_markers: bool, on_damaged: OnDamaged | None
) -> Iterator[Item]:
    """The changes of the batches, with the heartbeats that they hold and, if asked for, resolved markers."""
    decoder = decoder_of(host)
    for batch in batches:
        if batch.heartbeats or resolved_markers:
            yield from decoder.items(batch, resolved_markers=resolved_markers, on_damaged=on_damaged)
        else:
            yield from decoder.decode(batch, on_damaged)

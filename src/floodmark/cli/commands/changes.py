"""changes: the changes of a site, in commit order."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, NamedTuple

import typer

import floodmark
from floodmark.cli.arguments import KeyOptions, Location, parse, read_since
from floodmark.cli.failures import FINDING
from floodmark.cli.opening import is_url, open_site
from floodmark.cli.render.output import Output, note, plain
from floodmark.cli.render.progress import counted
from floodmark.cli.render.text import show_place, show_time
from floodmark.feed import Item
from floodmark.feed.reading.items import OnCorrupt, OnDamaged, SkippedChange
from floodmark.feed.sinks.stdout import change_fields
from floodmark.model import Resolved, Version
from floodmark.model.errors import Corruption, GenerationSwapped, NamespaceNotFound, VersionCollected
from floodmark.model.stream import OnGeneration
from floodmark.model.text import read_bytes, show_bytes
from floodmark.site.arguments import Since

_VERSION_DIGITS_MAX: Final = 20


class ChangePlace(NamedTuple):
    """The position after one change.  Changes of a commit share a version, and are in order of keys."""

    version: Version
    namespace: str
    key: bytes

    def __str__(self) -> str:
        """The position as `--since` takes it.

        >>> str(ChangePlace(7, "users", b"ada")), read_beginning("7/users/0x00ff")
        ('7/users/ada', ChangePlace(version=7, namespace='users', key=b'\\x00\\xff'))
        """
        return f"{self.version}/{self.namespace}/{show_bytes(self.key)}"


def read_beginning(text: str) -> Since | ChangePlace:
    """Parse where changes begin: as `read_since` does, or the position of a change."""
    version, slash, rest = text.partition("/")
    if not slash:
        return read_since(text)
    namespace, slash, key = rest.partition("/")
    if not slash or not version.isdecimal() or len(version) > _VERSION_DIGITS_MAX:
        raise ValueError("a position is written as VERSION/NAMESPACE/KEY")
    return ChangePlace(int(version), namespace, read_bytes(key))


OnCorruptOption = Annotated[
    OnCorrupt | None,
    "fail|report|skip",
    "At a damaged change: fail, leave it out and report that, or skip it. The keys are listed.",
]


_ON_GENERATION: Final = (
    "fail|difference|snapshot",
    "After a publication: fail, or continue with the difference, or with a snapshot.",
)
OnGenerationOption = Annotated[OnGeneration, *_ON_GENERATION]
OnGenerationUpdate = Annotated[OnGeneration | None, *_ON_GENERATION]


def changes(
    location: Location,
    output: Output,
    keys: KeyOptions,
    namespace: Annotated[str | None, "NAMESPACE", "Only this namespace; all by default."] = None,
    since: Annotated[
        Any,
        "VERSION|POSITION|TIME|snapshot|beginning|now",
        "Only changes after this, exclusive.",
        {"parser": parse(read_beginning)},
    ] = None,
    until: Annotated[
        Version | None, "VERSION|TIME", "Only changes up to this, inclusive; up to the present by default."
    ] = None,
    follow: Annotated[bool, "Wait for more, until --until is reached or Ctrl-C is pressed."] = False,
    before_images: Annotated[bool, "Show values from before: an update is two lines."] = False,
    resolved: Annotated[
        bool,
        "Add lines of type `resolved`: all changes up to their position were printed; pass it to --since.",
    ] = False,
    on_corrupt: OnCorruptOption = None,
    on_generation: OnGenerationOption = OnGeneration.FAIL,
) -> None:
    """Print changes, in commit order.

    A line has version, time, namespace, type, key and value, separated by tabs. To continue
    later, pass the position of the last printed change to --since: VERSION/NAMESPACE/KEY, which
    is part of each object of --json. A version alone would skip the rest of its commit. A change
    is printed once it is durable and no earlier change can follow. Without --since, all changes
    that the site still keeps are printed, and a note says where they begin. With --since
    snapshot, every key is printed first, as of one version, then the later changes.

    At a publication, the command ends with an error after the changes before it. With
    --on-generation difference it continues: a line of type generation, then the rows that the
    data set put and deleted. With snapshot, every key follows, and replaces all earlier lines.

    A damaged change is an error. With --on-corrupt report or skip it is left out, and its key is
    printed on stderr; with report the exit code is 1.

    Examples:
      floodmark changes data/oslo
      floodmark changes data/oslo --namespace users --since 2026-01-31T12:00:00Z
      floodmark changes data/oslo --since 467077993267200001/users/ada --follow --json
      floodmark changes grpc://127.0.0.1:7100 --since now --follow --before-images
    """
    output.flushes = follow
    skipped: list[SkippedChange] = []

    def read(beginning: Since) -> Iterator[Item]:
        return site.changes(
            namespace,
            since=beginning,
            until=until,
            follow=follow,
            **keys.given(),
            before_images=before_images,
            resolved_markers=resolved,
            on_generation=on_generation,
            on_damaged=None if on_corrupt in (None, OnCorrupt.FAIL) else _leave_out(output, skipped),
        )

    with open_site(location, background=follow) as site:
        if follow and output.is_terminal and not is_url(location):
            note("following: this process owns the site until you press Ctrl-C")
        rows = _read_from(site, since, read)
        for item in rows if follow else counted(rows, "changes read"):
            _print(output, item)
    if skipped and on_corrupt is OnCorrupt.REPORT:
        raise typer.Exit(FINDING)


def _leave_out(output: Output, skipped: list[SkippedChange]) -> OnDamaged:
    """A function that adds a damaged change to `skipped`, and prints it."""

    def leave_out(error: Corruption) -> None:
        change = SkippedChange.of(error)
        skipped.append(change)
        if output.json:
            output.object({"type": "damaged", **plain(change)})
        else:
            note(f"left out {show_bytes(change.key)} at {change.version}: {change.reason}")

    return leave_out


def _read_from(
    site: floodmark.Site, since: Since | ChangePlace | None, read: Callable[[Since], Iterator[Item]]
) -> Iterator[Item]:
    if isinstance(since, ChangePlace):
        return _read_behind(site, since, read)
    return _read_kept(read) if since is None else read(since)


def _read_behind(
    site: floodmark.Site, position: ChangePlace, read: Callable[[Since], Iterator[Item]]
) -> Iterator[Item]:
    """The changes after a position, which may be in the middle of a commit."""
    ids = {row.name: row.id for row in site.host.namespaces.list_namespaces()}
    if position.namespace not in ids:
        raise NamespaceNotFound(
            f"there is no namespace {position.namespace!r}, which --since names; pass the version of a "
            "resolved line instead",
            namespace=position.namespace,
        )
    last = position.version, ids[position.namespace], position.key
    for item in read(position.version - 1):
        if (
            not isinstance(item, floodmark.Change)
            or item.snapshot
            or (item.version, ids.get(item.namespace, 0), item.key) > last
        ):
            yield item


def _read_kept(read: Callable[[Since], Iterator[Item]]) -> Iterator[Item]:
    """The changes from the oldest that is kept, after a note if earlier ones were collected."""
    start: Version = 0
    printed = False
    while True:
        try:
            for item in read(start):
                printed = True
                yield item
            return
        except VersionCollected as error:
            oldest = error.details.get("oldest")
            if (
                printed
                or isinstance(error, GenerationSwapped)
                or not isinstance(oldest, int)
                or oldest == start
            ):
                raise
            start = oldest
            note(f"these are the changes after {oldest} ({show_time(oldest)}); older ones are not kept")


def _print(output: Output, item: Item) -> None:
    if isinstance(item, floodmark.Change):
        _print_change(output, item)
    elif isinstance(item, Resolved):
        place, time = show_place(item), show_time(item.version)
        if output.json:
            output.object({"type": "resolved", "version": str(item.version), "time": time, "place": place})
        else:
            output.line((f"{place}\t{time}\t\tresolved", "dim"))


def _print_change(output: Output, change: floodmark.Change) -> None:
    if output.json:
        # Within a snapshot, a reader can resume only from resolved lines.
        position = None if change.snapshot else str(ChangePlace(change.version, change.namespace, change.key))
        output.object({**change_fields(change), "position": position})
        return
    is_gone = change.type in (floodmark.ChangeType.DELETE, floodmark.ChangeType.UPDATE_PREIMAGE)
    output.line(
        (f"{change.version}\t{show_time(change.version)}", "dim"),
        f"\t{change.namespace}\t",
        (change.type.value, "red" if is_gone else "green"),
        "\t",
        (show_bytes(change.key), "cyan"),
        "" if change.value is None else f"\t{show_bytes(change.value)}",
    )

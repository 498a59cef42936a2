"""A step of a link: the range of changes to copy next.  Plain data, which travels."""

import msgspec

from floodmark.model.version import Version, moment_of


class NamespaceStep(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of one namespace in `(since, until]`, versions of the source.

    `since` is the position of the link.  Reading begins after `start` if that is higher: the version at which
    the namespace was shared, or the end of the data that it was loaded with.  The source wrote nothing itself
    after `since`, up to `loaded`.  A namespace that was dropped and made anew has another id.  `data_set` is
    the stamp of one that was published at the source and that the target lacks.
    """

    name: str
    source_id: int
    target_id: int
    since: Version
    until: Version
    start: Version = 0
    loaded: Version = 0
    data_set: bytes = b""

    @property
    def begin(self) -> Version:
        """The version after which reading begins."""
        return max(self.since, self.start)


class NamespacePosition(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a target in a namespace of a source, and the namespace's id at the target.

    The target refuses changes from before the `horizon`, and all changes if `refused` gives a reason.
    `data_set` is the stamp of the one that was published there last; None if it is not known.
    """

    name: str
    id: int
    through: Version
    horizon: Version = 0
    refused: str | None = None
    data_set: bytes | None = None


class NamespaceCut(msgspec.Struct, frozen=True, kw_only=True):
    """The begin and end of the next step of a namespace, and the namespace's id at the source.

    `changes` is their number, None if the source does not know it, and `batches` is False if none is of an
    atomic batch.  `loaded` is as in `NamespaceStep`.  `data_set` is the stamp of the one that was published
    last.  With a `problem` there is no step.
    """

    name: str
    id: int = 0
    start: Version = 0
    until: Version = 0
    loaded: Version = 0
    changes: int | None = 0
    batches: bool = True
    data_set: bytes = b""
    problem: str | None = None


class LinkStep(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of some namespaces that were first written at one site, for another.

    `incarnation` counts the restores of the source: a target refuses changes of an earlier incarnation.
    `changes` is about their number, 0 only if there are none, and None if the source does not know it.
    `batches` is False if none is of an atomic batch: else what is read of all keys is read in commit order.
    `stalled` gives the reasons why other namespaces take no part.
    """

    source: str
    source_id: int
    incarnation: int = 1
    namespaces: tuple[NamespaceStep, ...] = ()
    changes: int | None = None
    batches: bool = True
    stalled: dict[str, str] = {}


def why_too_old(source: str, namespace: str, begin: Version, horizon: Version) -> str:
    """The message for changes that begin before collected deletions."""
    return (
        f"they go back to {moment_of(begin).isoformat()}, and deletions up to "
        f"{moment_of(horizon).isoformat()} are forgotten here, because it took part before this site knew; "
        f"write them again at {source!r} with `floodmark namespace rewrite LOCATION {namespace}`"
    )

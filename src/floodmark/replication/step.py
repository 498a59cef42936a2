"""A step of a link: which changes of which namespaces are copied next.  Plain data, which travels."""

import msgspec

from floodmark.model.version import Version


class NamespaceStep(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of one namespace in `(since, until]`, versions of the source.

    `since` is the position of the link.  What it needs lies behind `start` as well: where the namespace was
    shared, or what it was loaded with ends.
    The ids are those of the namespace at each site: one that was dropped meanwhile is not its successor.
    """

    name: str
    source_id: int
    target_id: int
    since: Version
    until: Version
    start: Version = 0

    @property
    def begin(self) -> Version:
        """The version behind which reading begins."""
        return max(self.since, self.start)


class NamespacePosition(msgspec.Struct, frozen=True, kw_only=True):
    """How far a target is with a namespace of a source, and the id that the namespace has there.

    Nothing is taken in from before the `horizon`, and nothing at all if it is `refused`, for this reason.
    """

    name: str
    id: int
    through: Version
    horizon: Version = 0
    refused: str | None = None


class NamespaceCut(msgspec.Struct, frozen=True, kw_only=True):
    """Where the next step of a namespace may begin and end at its source, and the id that it has there.

    `changes` is how many lie in between; None if the source cannot tell.  With a `problem` there is no step.
    """

    name: str
    id: int = 0
    start: Version = 0
    until: Version = 0
    changes: int | None = 0
    problem: str | None = None


class LinkStep(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of some namespaces that were first written at one site, on their way to another.

    `incarnation` counts how often the source was restored: changes of an earlier life are refused.
    `changes` is about how many there are, and 0 only if there are none; None if the source cannot tell.
    `stalled` says of namespaces that take no part in it why.
    """

    source: str
    source_id: int
    incarnation: int = 1
    namespaces: tuple[NamespaceStep, ...] = ()
    changes: int | None = None
    stalled: dict[str, str] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to go on to."""
        return all(namespace.until <= namespace.since for namespace in self.namespaces)

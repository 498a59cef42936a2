"""A checker that atomic reads saw atomic batches whole, from the histories of the keys.

The history of a key has its versions, each with the value that a reader finds there.  From a value that was
read follows at which versions the reader may have been: from `earliest` to `latest`, as a value may recur.

A read is *fractured* if it shows a batch at one key and lacks it at another:

- a key shows the batch that wrote it if the reader was at the batch's version and no other;
- a merged key (fields, counters) shows every batch at or below `earliest`: it holds what each has added;
- a key lacks a batch that wrote it if `latest` lies below the batch's version.

If a value leaves a choice, the checker decides in favour of the read.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from floodmark.model.version import Version

Key = TypeVar("Key")


class SeenVersions(NamedTuple):
    """The versions of a key at which a reader may have been; 0 stands for before its first write."""

    earliest: Version
    latest: Version
    merged: bool = False

    def shows(self, version: Version) -> bool:
        """Whether the reader must have seen the write of a batch at a version."""
        return self.earliest >= version if self.merged else self.earliest == self.latest == version


class Fracture(NamedTuple, Generic[Key]):
    """A batch that a read saw at one key, and not at another."""

    version: Version
    shown: Key
    lacking: Key


def locate(
    history: Iterable[tuple[Version, bytes | None]], value: bytes | None, *, merged: bool = False
) -> SeenVersions | None:
    """The versions at which a reader of the key finds a value; None if the key never had it.

    >>> locate([(3, b"a"), (5, b"b"), (9, b"a")], b"a")
    SeenVersions(earliest=3, latest=9, merged=False)
    >>> locate([(3, b"a"), (5, None)], None), locate([(3, b"a")], b"x")
    (SeenVersions(earliest=0, latest=5, merged=False), None)
    """
    versions = [version for version, found in history if found == value]
    if value is None:
        versions.append(0)
    return SeenVersions(min(versions), max(versions), merged) if versions else None


def find_fracture(
    read: Mapping[Key, SeenVersions], batches: Iterable[Mapping[Key, Version]]
) -> Fracture[Key] | None:
    """The first batch that a read saw in part, or None.  A batch maps each of its keys to its version there.

    >>> batch = {"message": 7, "unread": 7}
    >>> find_fracture({"message": SeenVersions(7, 7), "unread": SeenVersions(4, 4)}, [batch])
    Fracture(version=7, shown='message', lacking='unread')
    >>> find_fracture({"message": SeenVersions(7, 7), "unread": SeenVersions(4, 9)}, [batch])
    """
    for batch in batches:
        common: Sequence[Key] = [key for key in batch if key in read]
        lacking = next((key for key in common if read[key].latest < batch[key]), None)
        if lacking is None:
            continue
        shown = next((key for key in common if read[key].shows(batch[key])), None)
        if shown is not None:
            return Fracture(batch[shown], shown, lacking)
    return None

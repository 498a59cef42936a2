"""The manifests of a backup, and the parts that lead to a version.

    TARGET/
      plan.json                                 a part that was begun (backup.py); gone when it is complete
      full-<version>/                           every record as of a version, the dead ones too
        manifest.json                           written last: with it the part is complete
        rows-<attempt>/part-….parquet
      changes-<since>-<version>/                every change in (since, version]
        manifest.json
        rows-<attempt>/part-….parquet

A manifest holds everything to check its part, and to restore it without the site that it came from.  It
carries a hash of itself, which shows damage, and the number of its format; an unknown format is refused.
"""

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple, TypeVar

import msgspec
import xxhash

from floodmark.files.directory import Directory
from floodmark.host.catalog import NamespaceRow
from floodmark.model.errors import BackupDamaged, FormatTooNew, InvalidArgument, InvalidVersion
from floodmark.model.ranges import KeyRange
from floodmark.model.version import Version, moment_of

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
# The prefix of the directories into which attempts write their rows.
ATTEMPT: Final = "rows-"


class PartKind(StrEnum):
    """The rows of a part: all records as of a version, or changes."""

    FULL = "full"
    CHANGES = "changes"


class RowCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Rows by their state at the part's version: with a value, deleted, expired."""

    live: int
    tombstones: int
    expired: int
    total: int


class RowSums(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of rows, and the XOR of Spark's xxhash64 of all columns: equal sums mean equal rows."""

    counts: RowCounts
    digest: int


class PartFile(msgspec.Struct, frozen=True):
    """A file of rows, by its path from the part's directory."""

    name: str
    bytes: int


class ColumnType(msgspec.Struct, frozen=True):
    """A column of the rows, with Spark's name of its type."""

    name: str
    type: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a backup that was begun.

    After a restore, a reader of the site's changes goes on from `version`.  `watermark` names per site the
    changes that are in, and `incarnations` counts the restores of each site that shares anything with it.
    """

    format: int = FORMAT
    id: str
    kind: PartKind
    site: str
    site_id: int
    namespace: NamespaceRow
    since: Version
    version: Version
    watermark: dict[int, Version]
    # Not in the manifests of earlier releases, which count as made before any restore.
    incarnations: dict[int, int] = {}
    safe_point: str

    @property
    def part(self) -> str:
        """The name of the part's directory."""
        return part_name(self.kind, self.since, self.version)

    @property
    def held_version(self) -> Version:
        """The version to hold until the part is complete."""
        return self.version if self.kind is PartKind.FULL else self.since


class Manifest(Plan, frozen=True, kw_only=True):
    """A complete part of a backup.  Below `collected_horizon` deletions may be missing."""

    keys: KeyRange = KeyRange()
    sums: RowSums
    files: list[PartFile]
    columns: list[ColumnType]
    collected_horizon: Version
    created_at: datetime


class _Sealed(msgspec.Struct, frozen=True):
    """A stored document, with the hash of its bytes."""

    document: msgspec.Raw
    xxh64: str


class _Format(msgspec.Struct, frozen=True):
    format: int


Document = TypeVar("Document", bound=msgspec.Struct)


def part_name(kind: PartKind, since: Version, version: Version) -> str:
    """The name of a part's directory; names sort as versions do.

    >>> part_name(PartKind.FULL, 0, 17), part_name(PartKind.CHANGES, 17, 42)
    ('full-00000000000000000017', 'changes-00000000000000000017-00000000000000000042')
    """
    return f"full-{version:020}" if kind is PartKind.FULL else f"changes-{since:020}-{version:020}"


def encode_document(document: msgspec.Struct) -> bytes:
    """Encode a manifest or a plan."""
    content = msgspec.json.encode(document)
    sealed = _Sealed(msgspec.Raw(content), xxhash.xxh64_hexdigest(content))
    return msgspec.json.encode(sealed) + b"\n"


def decode_document(content: bytes, kind: type[Document], place: str) -> Document:
    """Decode a manifest or a plan.  Raises BackupDamaged, or FormatTooNew for an unknown format."""
    try:
        sealed = msgspec.json.decode(content, type=_Sealed)
        stored = bytes(sealed.document)
        found = msgspec.json.decode(stored, type=_Format).format
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BackupDamaged(f"{place} is damaged: {error}") from error
    if xxhash.xxh64_hexdigest(stored) != sealed.xxh64:
        raise BackupDamaged(f"{place} is damaged: its hash does not match its content")
    if found != FORMAT:
        raise FormatTooNew(
            f"{place} has format {found}; this Floodmark knows format {FORMAT}. Use the release that wrote "
            "it, or a later one"
        )
    try:
        return msgspec.json.decode(stored, type=kind)
    except msgspec.MsgspecError as error:
        raise BackupDamaged(f"{place} is damaged: {error}") from error


def read_manifest(target: Directory, part: str) -> Manifest | None:
    """The manifest of a part; None if the part is not complete."""
    content = target.directory(part).read(MANIFEST)
    if content is None:
        return None
    manifest = decode_document(content, Manifest, f"{target.location}/{part}/{MANIFEST}")
    if manifest.part != part:
        raise BackupDamaged(f"{target.location}/{part} holds the manifest of {manifest.part}")
    return manifest


def read_manifests(target: Directory) -> list[Manifest]:
    """The manifests of all complete parts, oldest first."""
    found = [read_manifest(target, name) for name in part_names(target)]
    return sorted((each for each in found if each is not None), key=lambda each: (each.version, each.since))


def part_names(target: Directory) -> list[str]:
    """The names of the parts' directories, complete or not."""
    return [name for name in target.names() if name.startswith(("full-", "changes-"))]


class Chain(NamedTuple):
    """A full part and the changes that follow without a gap: it leads to every version in its range."""

    parts: tuple[Manifest, ...]

    @property
    def newest(self) -> Manifest:
        """The last part."""
        return self.parts[-1]

    def leads_to(self, version: Version) -> bool:
        """Whether the chain can be restored as of a version."""
        return self.parts[0].version <= version <= self.newest.version

    def up_to(self, version: Version) -> "Chain":
        """The parts that are needed for a version."""
        return Chain((self.parts[0], *(part for part in self.parts[1:] if part.since < version)))


def find_chains(manifests: Iterable[Manifest]) -> list[Chain]:
    """The chains of the parts, one for each full part, oldest first."""
    parts = sorted(manifests, key=lambda each: each.version)
    followers = {each.since: each for each in parts if each.kind is PartKind.CHANGES}
    chains = []
    for full in parts:
        if full.kind is PartKind.FULL:
            chain = [full]
            while (part := followers.get(chain[-1].version)) is not None:
                chain.append(part)
            chains.append(Chain(tuple(chain)))
    return chains


def choose_chain(manifests: Iterable[Manifest], at: Version | None, place: str) -> tuple[Chain, Version]:
    """The shortest chain to a version, by default the newest, and that version."""
    chains = find_chains(manifests)
    if not chains:
        raise InvalidArgument(
            f"there is no complete full backup at {place}; take one with `floodmark backup`"
        )
    if at is None:
        at = max(chain.newest.version for chain in chains)
    leading = [chain for chain in chains if chain.leads_to(at)]
    if not leading:
        bounds = [(chain.parts[0].version, chain.newest.version) for chain in chains]
        ranges = " or ".join(
            f"[{first}, {last}] ({moment_of(first).isoformat()} to {moment_of(last).isoformat()})"
            for first, last in bounds
        )
        raise InvalidVersion(
            f"the backup at {place} does not lead to version {at} ({moment_of(at).isoformat()}); it leads to "
            f"every version in {ranges}",
            version=at,
        )
    return leading[-1].up_to(at), at


def find_gaps(manifests: Iterable[Manifest]) -> list[Manifest]:
    """The parts with changes whose predecessor is missing."""
    parts = list(manifests)
    reached = {part.id for chain in find_chains(parts) for part in chain.parts}
    return [each for each in parts if each.kind is PartKind.CHANGES and each.id not in reached]

"""Looks up single records with their stamps, and repairs them, for comparisons of sites (`divergence/`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from floodmark.codec.ordered import decode_version, encode_namespace, encode_prefixes
from floodmark.codec.thin import thin_record
from floodmark.feed import at_present
from floodmark.host.comparisons import ComparisonNote, Comparisons
from floodmark.host.examination import CheckResult
from floodmark.host.parts import LocalPort, SiteParts
from floodmark.model.errors import (
    Corruption,
    FloodmarkError,
    InvalidArgument,
    LimitExceeded,
)
from floodmark.model.limits import COMMIT_BYTES_MAX, RECORDS_FOUND_MAX
from floodmark.model.partition import CommitLimits, Partition
from floodmark.model.record import FoundRecord, Repair
from floodmark.model.version import Version
from floodmark.partition.commit.entering import check_key
from floodmark.partition.commit.repairing import find_rows
from floodmark.partition.read.records import require_kept, require_sound
from floodmark.routing import Router, partly_done

# The maximum size of an answer: some dozens of the largest values.
FOUND_BYTES_MAX: Final = 2 * COMMIT_BYTES_MAX


class LocalVerification(LocalPort):
    """The port to the records of a site, key by key."""

    def __init__(
        self,
        site: SiteParts,
        examine: Callable[[bool], list[CheckResult]],
        router: Router,
        read_version: Callable[[], Version],
        comparisons: Comparisons,
    ) -> None:
        super().__init__(site)
        self.examine = examine
        self._comparisons = comparisons
        self._router = router
        self._read_version = read_version

    def note_comparison(self, report: ComparisonNote) -> None:
        self._comparisons.note(report, self._node.clock.physical_ms())

    def find_records(
        self, namespace: str, keys: list[bytes], at: Version | None, thin: bool
    ) -> list[FoundRecord | None]:
        row = self._catalog.get(namespace)
        _check_keys(keys)
        if at is not None:
            return self._find_at(row.id, keys, at, thin=thin)
        return at_present(
            self._read_version,
            lambda version: self._find_at(row.id, keys, version, thin=thin),
        )

    def _find_at(
        self, namespace: int, keys: Sequence[bytes], version: Version, *, thin: bool
    ) -> list[FoundRecord | None]:
        prefix = encode_namespace(namespace)
        found: dict[bytes, FoundRecord | None] = {}
        size = 0
        is_settled = self._node.number > 0 and version <= self._node.resolved_version()

        def find_some(owner: Partition, some: Sequence[bytes]) -> None:
            nonlocal size
            if not is_settled:
                owner.settle(some, version)
            # Every node that shares the engine can read records that do not change any more.
            rows = find_rows(self._node.engine, encode_prefixes(some), version)
            # Garbage collection may have removed records meanwhile.
            require_kept(version, self._node.retention.collected.get(prefix, 0))
            for key, stored in zip(some, rows, strict=True):
                record = None if stored is None else _found(*stored, thin=thin)
                found[key] = record
                size += 0 if record is None else len(record.stored)
                if size > FOUND_BYTES_MAX:
                    raise LimitExceeded(
                        f"the records of {len(keys):,} keys make more than {FOUND_BYTES_MAX:,} bytes; ask "
                        "for fewer at a time"
                    )

        self._router.each([prefix + key for key in keys], find_some)
        return [found[prefix + key] for key in keys]

    def repair_records(self, namespace: str, repairs: list[Repair]) -> list[bool]:
        row = self._catalog.get(namespace)
        self._members.require_rejoined()
        _check_keys([repair.key for repair in repairs])
        prefix = encode_namespace(row.id)
        wanted = {prefix + repair.key: repair for repair in repairs}
        if len(wanted) < len(repairs):
            raise InvalidArgument("a key stands twice among the repairs; repair it once")
        stored: set[bytes] = set()

        def repair_some(owner: Partition, some: Sequence[bytes]) -> None:
            for keys in _portions(some, wanted, owner.limits):
                values, seen = zip(*((wanted[key].stored, wanted[key].seen) for key in keys), strict=True)
                stored.update(owner.repair(keys, values, seen))

        try:
            self._router.each(list(wanted), repair_some)
        except FloodmarkError as error:
            raise partly_done(len(stored), error) from error
        return [key in stored for key in wanted]


def _found(engine_key: bytes, stored: bytes, *, thin: bool) -> FoundRecord:
    try:
        shown, digest = thin_record(stored)
    except Corruption:
        require_sound(engine_key, stored)
        raise
    return FoundRecord(decode_version(engine_key), shown if thin else stored, digest)


def _portions(
    keys: Sequence[bytes], wanted: Mapping[bytes, Repair], limits: CommitLimits
) -> Iterator[list[bytes]]:
    """The keys in portions that each fit into one commit."""
    portion: list[bytes] = []
    size = 0
    for key in keys:
        added = len(key) + len(wanted[key].stored)
        if portion and (size + added > limits.bytes_max or len(portion) == limits.changes_max):
            yield portion
            portion, size = [], 0
        portion.append(key)
        size += added
    yield portion


def _check_keys(keys: Sequence[bytes]) -> None:
    if len(keys) > RECORDS_FOUND_MAX:
        raise LimitExceeded(f"{len(keys):,} keys are too many; one call takes {RECORDS_FOUND_MAX:,} at most")
    for key in keys:
        check_key(key)

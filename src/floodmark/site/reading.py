"""The reads of a transaction: as of one version, with its own writes applied."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from heapq import merge
from itertools import islice
from typing import Any, Protocol

from floodmark.codec.ordered import NAMESPACE_BYTES, qualify_range
from floodmark.model.errors import Conflict, InvalidArgument, LimitExceeded, VersionCollected
from floodmark.model.limits import TRANSACTION_KEYS_MAX
from floodmark.model.partition import Partition, ReadSet
from floodmark.model.ranges import KeyRange, after
from floodmark.model.record import FreshValue
from floodmark.model.version import Version
from floodmark.partition.conflicts import check_write_conflicts
from floodmark.routing.router import Router
from floodmark.site.codecs import CodedNamespace, present
from floodmark.site.gathering import AnyNamespace
from floodmark.site.namespace import Namespace
from floodmark.site.read_versions import AskFresh


class ReadAt(Protocol):
    """Returns the version of a transaction's reads; `ask` fetches it together with the first read."""

    def __call__(self, *, ask: AskFresh | None) -> Version: ...


class TransactionReads:
    """The reads of a transaction, all as of one version, which the first read asks for.

    `written` holds the transaction's own writes by qualified key: stored values or unstamped states.
    """

    def __init__(self, router: Router, read_version: ReadAt, written: Mapping[bytes, bytes]) -> None:
        self._router = router
        self._read_version = read_version
        self._written = written
        self._version: Version = 0
        # Whether the version came from the site, and the number of the attempt, which servers count.
        self._is_fresh = False
        self.attempt = 1
        # The read conflicts: qualified keys, and ranges as far as they were read.
        self._keys: set[bytes] = set()
        self._ranges: list[_ReadRange] = []
        # The declared write conflicts: the commit makes transactions that have read these ranges conflict.
        self._declared: set[KeyRange] = set()
        self._count = 0

    @property
    def version(self) -> Version:
        """The version of the reads."""
        if not self._version:
            self._version = self._read_version(ask=self._ask_alone)
        return self._version

    @property
    def conflicts(self) -> ReadSet | None:
        """The read set of the commit, with the declared write conflicts; None if both are empty."""
        ranges = sorted({each.keys for each in self._ranges if each.keys is not None})
        if not self._keys and not ranges and not self._declared:
            return None
        return ReadSet(
            self.version,
            sorted(self._keys),
            ranges,
            sorted(self._declared),
            self.attempt,
            is_cached=not self._is_fresh,
        )

    def get(self, namespace: AnyNamespace, key: Any, *, snapshot: bool) -> Any:
        """The value of a key; None if it is absent."""
        handle = _handle(namespace)
        policy, qualify, _ = namespace.encoding
        qualified = qualify(key)
        written, value = self._written.get(qualified), None
        if written is None or policy.merges:
            self._add(1)
            try:
                value = (
                    self._router.get(qualified, self._version) if self._version else self._first(qualified)
                )
            except VersionCollected as error:
                raise _conflict(error) from error
            if not snapshot:
                self._keys.add(qualified)
        if written is not None:
            value = policy.read_back(value, written)
        return present(handle, qualified[NAMESPACE_BYTES:], value)[1]

    def _first(self, key: bytes) -> bytes | None:
        """Read the transaction's first key, and get the read version in the same call if possible."""
        found: FreshValue | None = None

        def ask(since: Version) -> Version:
            nonlocal found
            self._is_fresh = True
            found = self._router.call(key, partial(_get_fresh, key, since))
            return 0 if found is None else found.version

        self._version = self._read_version(ask=ask)
        if found is not None and found.version == self._version:
            return found.value
        return self._router.get(key, self._version)

    def _ask_alone(self, _: Version) -> Version:
        """An `ask` that requests a separate call for the version."""
        self._is_fresh = True
        return 0

    def get_many(self, namespace: AnyNamespace, keys: Iterable[Any], *, snapshot: bool) -> list[Any]:
        """The values of several keys, in their order; None for a key that is absent."""
        handle = _handle(namespace)
        policy, qualify, _ = namespace.encoding
        wanted, written = list(map(qualify, keys)), self._written
        stored = [key for key in wanted if policy.merges or key not in written]
        self._add(len(stored))
        try:
            found = dict(zip(stored, self._router.get_many(stored, self.version), strict=True))
        except VersionCollected as error:
            raise _conflict(error) from error
        if not snapshot:
            self._keys.update(stored)
        values = [
            policy.read_back(found.get(key), written[key]) if key in written else found[key] for key in wanted
        ]
        return [
            present(handle, key[NAMESPACE_BYTES:], value)[1]
            for key, value in zip(wanted, values, strict=True)
        ]

    def scan(
        self,
        namespace: AnyNamespace,
        keys: KeyRange,
        *,
        limit: int | None,
        reverse: bool,
        snapshot: bool,
    ) -> Iterator[tuple[Any, Any]]:
        """The keys of a range with their values, in order."""
        handle, policy = _handle(namespace), namespace.encoding.policy
        within = qualify_range(namespace.id, keys)
        written = {key[NAMESPACE_BYTES:]: row for key, row in self._written.items() if within.contains(key)}
        read = _ReadRange(namespace.id, keys, reverse=reverse)
        if not snapshot:
            self._ranges.append(read)
        most = None if limit is None else limit + len(written)
        try:
            rows = handle.stored.scan(keys.start, keys.end, limit=most, reverse=reverse, at=self.version)
        except VersionCollected as error:
            raise _conflict(error) from error

        def pairs() -> Iterator[tuple[Any, Any]]:
            own = ((key, None) for key in sorted(written, reverse=reverse))
            last: bytes | None = None
            for key, value in merge(rows, own, key=_first, reverse=reverse):
                read.reach(key)
                if key == last:
                    # The key was yielded from the stored rows, with the transaction's own write applied.
                    continue
                last = key
                self._add(1)
                found = policy.read_back(value, written[key]) if key in written else value
                if found is not None:
                    yield present(handle, key, found)
            read.finish()

        return islice(pairs(), limit)

    def depend_on(self, namespace: AnyNamespace, keys: KeyRange) -> None:
        """Add a read conflict: the commit fails if the range has changed since the read version."""
        self._add(1)
        if keys.start and keys.end == after(keys.start):
            self._keys.add(qualify_range(namespace.id, keys).start)
            return
        read = _ReadRange(namespace.id, keys, reverse=False)
        read.finish()
        self._ranges.append(read)

    def declare(self, namespace: AnyNamespace, keys: KeyRange) -> None:
        """Add a write conflict: the commit makes transactions that have read the range conflict."""
        check_write_conflicts(len(self._declared) + 1)
        self._declared.add(qualify_range(namespace.id, keys))

    def _add(self, count: int) -> None:
        self._count += count
        if self._count > TRANSACTION_KEYS_MAX:
            raise LimitExceeded(
                f"a transaction may read {TRANSACTION_KEYS_MAX:,} keys; read with snapshots of a namespace "
                "(`as_of`), or in several transactions"
            )


class _ReadRange:
    """The part of a range that a scan has read: none, up to a key, or all."""

    def __init__(self, namespace: int, keys: KeyRange, *, reverse: bool) -> None:
        self.keys: KeyRange | None = None
        self._namespace = namespace
        self._whole = keys
        self._reverse = reverse

    def reach(self, key: bytes) -> None:
        """Count the range from the scan's beginning to a key, inclusive, as read."""
        start, end = self._whole
        self._set(KeyRange(key, end) if self._reverse else KeyRange(start, after(key)))

    def finish(self) -> None:
        """Count the whole range as read."""
        self._set(self._whole)

    def _set(self, keys: KeyRange) -> None:
        self.keys = qualify_range(self._namespace, keys)


def _get_fresh(key: bytes, since: Version, partition: Partition) -> FreshValue | None:
    """The value of a qualified key with the version of the read; None if several nodes serve the site."""
    return partition.get_fresh(key, since) if partition.is_alone else None


def _conflict(error: VersionCollected) -> Conflict:
    """The error for a collected read version: a conflict, so that the transaction is retried."""
    return Conflict(f"{error}; the transaction begins again", **error.details)


def _handle(namespace: AnyNamespace) -> Namespace[Any] | CodedNamespace[Any]:
    """Return the namespace if it can be read.  Raises InvalidArgument for anything else."""
    if not isinstance(namespace, Namespace | CodedNamespace):
        raise InvalidArgument(f"a transaction reads from a namespace of its site, not from {namespace!r:.60}")
    return namespace


def _first(pair: tuple[bytes, bytes | None]) -> bytes:
    return pair[0]
